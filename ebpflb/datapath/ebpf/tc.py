# SPDX-License-Identifier: Apache-2.0
"""How a program gets to tc ingress and egress of a device, and stays there in its right place.

First at ingress and last at egress, so that others see what netfilter sees (ADR, K12). Two ways:
TCX (Linux 6.6), which needs no qdisc but runs before every filter, and a filter of clsact. Nothing
is remembered, linked or pinned: what is attached outlives every process, and ours is told by the
name of its program. One copy of ours is left at a hook, and of others' nothing is touched. This
file must not know what a program does, nor which devices get one.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import itertools
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from ebpflb import netlink
from ebpflb.datapath.ebpf import libbpf
from ebpflb.errors import DatapathError

OURS: Final = "ebpflb_"
"""The names of our programs begin so."""

TCX: Final = "tcx"
CLSACT: Final = "clsact"


class Direction(enum.Enum):
    """Where at a device."""

    INGRESS = "ingress"
    EGRESS = "egress"


class At(NamedTuple):
    """A hook: a direction of a device, which is known by its number."""

    number: int
    device: str
    direction: Direction

    @property
    def attach_type(self) -> int:
        return 46 if self.direction is Direction.INGRESS else 47  # BPF_TCX_INGRESS, …_EGRESS

    @property
    def parent(self) -> int:
        return 0xFFFF_FFF2 if self.direction is Direction.INGRESS else 0xFFFF_FFF3

    def __str__(self) -> str:
        return f"{self.device} {self.direction.value}"


class Place(enum.Enum):
    """Where among the others."""

    FIRST = "first"
    LAST = "last"


class Entry(NamedTuple):
    """One that runs at a hook: a program, or a filter of another kind, whose ``program`` is 0.

    ``name`` is the program's, or the filter's kind. ``priority`` and ``takes_all`` (every
    protocol) are a filter's, ``handle`` a program's filter's.
    """

    way: str
    program: int
    name: str
    map_ids: frozenset[int] = frozenset()
    priority: int = 0
    handle: int = 0
    takes_all: bool = False

    @property
    def is_ours(self) -> bool:
        return self.program != 0 and self.name.startswith(OURS)

    def __str__(self) -> str:
        what = f"{self.name} (id {self.program})" if self.program else self.name
        return f"{what}, {self.way}" + (f" priority {self.priority}" if self.priority else "")


class Hook(NamedTuple):
    """What runs at a hook of a device, in its order. ``qdisc``: clsact, ingress, "" for none."""

    entries: tuple[Entry, ...]
    qdisc: str
    has_tcx: bool

    @property
    def ours(self) -> tuple[Entry, ...]:
        return tuple(one for one in self.entries if one.is_ours)

    @property
    def before(self) -> tuple[Entry, ...]:
        """Others that run before the first of ours."""
        at = self._positions()
        return self.entries[: at[0]] if at else ()

    @property
    def behind(self) -> tuple[Entry, ...]:
        """Others that run after the last of ours."""
        at = self._positions()
        return self.entries[at[-1] + 1 :] if at else ()

    @property
    def others(self) -> tuple[Entry, ...]:
        return tuple(one for one in self.entries if not one.is_ours)

    def _positions(self) -> list[int]:
        return [at for at, one in enumerate(self.entries) if one.is_ours]

    def of(self, way: str) -> tuple[Entry, ...]:
        return tuple(one for one in self.entries if one.way == way)

    def is_in(self, place: Place) -> bool:
        """Whether one copy of ours runs, and no other's on that side of it."""
        return len(self.ours) == 1 and not (self.before if place is Place.FIRST else self.behind)


_RTM_NEWQDISC: Final = 36
_RTM_DELQDISC: Final = 37
_RTM_GETQDISC: Final = 38
_RTM_NEWTFILTER: Final = 44
_RTM_DELTFILTER: Final = 45
_RTM_GETTFILTER: Final = 46

_TCMSG: Final = struct.Struct("=BxxxiIII")  # family, device, handle, parent, info
_U32: Final = struct.Struct("=I")

_TCA_KIND, _TCA_OPTIONS, _TCA_CHAIN = 1, 2, 11
_TCA_BPF_FD, _TCA_BPF_NAME, _TCA_BPF_FLAGS, _TCA_BPF_ID = 6, 7, 8, 11
_DIRECT_ACTION: Final = 1

_QDISC_PARENT: Final = 0xFFFF_FFF1
_QDISC_HANDLE: Final = 0xFFFF_0000
_ETH_P_ALL: Final = socket.htons(3)
_PRIORITIES: Final = range(1, 0x10000)
_FIRST_HANDLE: Final = 0xEB9F1
_NO_QDISC: Final = frozenset({errno.ENOENT, errno.EINVAL})
_GONE: Final = frozenset({errno.ENOENT, errno.EINVAL, errno.ENODEV})


class Tc:
    """tc of the network namespace of the thread that makes it. ``tcx`` False: as before 6.6."""

    def __init__(self, *, tcx: bool = True) -> None:
        self._kernel = netlink.opened()
        self._may_tcx = tcx

    def close(self) -> None:
        self._kernel.close()

    # --- looking --------------------------------------------------------------------------------

    def look(self, at: At) -> Hook:
        """What runs there. Raises DatapathError: ENODEV where the device is gone."""
        qdisc = self._qdisc(at.number)
        ids = libbpf.tcx_programs(at.number, at.attach_type) if self._may_tcx else None
        entries = [_entry(TCX, one) for one in ids or ()]
        if qdisc == CLSACT or (qdisc and at.direction is Direction.INGRESS):
            entries += self._filters(at)
        return Hook(tuple(entries), qdisc, ids is not None)

    def _qdisc(self, number: int) -> str:
        """The kind of the one that filters of both directions hang on; "" where there is none."""
        asked = _TCMSG.pack(socket.AF_UNSPEC, number, 0, _QDISC_PARENT, 0)
        found: list[bytes] = []
        with _named("ask about", f"the qdisc of device {number}", but=_NO_QDISC):
            found = netlink.request(self._kernel, _RTM_GETQDISC, asked, flags=netlink.ECHO)
        kinds = (dict(netlink.attributes(body[_TCMSG.size :])).get(_TCA_KIND) for body in found)
        return next((kind.rstrip(b"\0").decode() for kind in kinds if kind), "")

    def _filters(self, at: At) -> Iterator[Entry]:
        asked = _TCMSG.pack(socket.AF_UNSPEC, at.number, 0, at.parent, 0)
        with _named("ask about", f"filters at {at}"):
            bodies = netlink.dump(self._kernel, _RTM_GETTFILTER, asked)
        told: set[Entry] = set()
        for body in bodies:
            _, _, handle, _, info = _TCMSG.unpack_from(body)
            found = dict(netlink.attributes(body[_TCMSG.size :]))
            if not handle or _U32.unpack(found.get(_TCA_CHAIN, bytes(4)))[0]:
                continue  # what its filters have in common; or a chain that only a filter leads to
            kind = found.get(_TCA_KIND, b"").rstrip(b"\0").decode()
            options = dict(netlink.attributes(found.get(_TCA_OPTIONS, b"")))
            program = _U32.unpack(options[_TCA_BPF_ID])[0] if _is_program(kind, options) else 0
            entry = _entry(CLSACT, program) if program else Entry(CLSACT, 0, kind)
            entry = entry._replace(
                priority=info >> 16,
                handle=handle if program else 0,
                takes_all=kind == "bpf" and info & 0xFFFF == _ETH_P_ALL,
            )
            if entry not in told:  # of other kinds one stands for all of its priority
                told.add(entry)
                yield entry

    # --- changing -------------------------------------------------------------------------------

    def ensure(self, at: At, prog_fd: int, place: Place, *, move: bool = True) -> bool:
        """Let this program, and no other of ours, run there; returns whether anything changed.

        At no moment none of ours runs where one did before. ``move`` False: one that runs already
        stays where it is among the others, if it is the only one.
        """
        hook = self.look(at)
        program = libbpf.prog_info(prog_fd).id
        if len(hook.ours) == 1 and (hook.is_in(place) or not move):
            return self._swap(at, hook.ours[0], prog_fd, program)
        way = _way(at.direction, hook, place)
        if way == TCX:
            self._to_tcx(at, hook, prog_fd, place)
        else:
            self._to_filter(at, hook, prog_fd, place)
        after = self.look(at)
        copies = [one for one in after.ours if one.program == program and one.way == way]
        keep = copies[0 if place is Place.FIRST else -1] if copies else None
        for one in after.ours:
            if keep and one != keep:
                self._remove(at, one)
        if way == TCX and not hook.qdisc:
            self.remove_empty_qdisc(at)
        return True

    def _swap(self, at: At, entry: Entry, prog_fd: int, program: int) -> bool:
        """Put the program in the place of ours that runs there."""
        if entry.program == program:
            return False
        if entry.way == CLSACT:
            self._set_filter(at, entry.priority, entry.handle, prog_fd)
            return True
        with _program(entry.program) as old_fd:
            if old_fd is None:
                raise DatapathError("replace", f"{entry} at {at}", errno.ENOENT)
            libbpf.tcx_attach(at.number, at.attach_type, prog_fd, instead_of=old_fd)
        return True

    def _to_tcx(self, at: At, hook: Hook, prog_fd: int, place: Place) -> None:
        """A program cannot be at one hook twice: while it moves, a filter stands in for it."""
        old = [one for one in hook.ours if one.way == TCX]
        if old and len(old) == len(hook.ours):
            with contextlib.suppress(DatapathError):  # without a qdisc of its kind: a short gap
                self._to_filter(at, hook, prog_fd, place)
        for one in old:
            self._detach_tcx(at, one)
        where = libbpf.TCX_BEFORE if place is Place.FIRST else libbpf.TCX_AFTER
        libbpf.tcx_attach(at.number, at.attach_type, prog_fd, where=where)

    def _to_filter(self, at: At, hook: Hook, prog_fd: int, place: Place) -> None:
        if not hook.qdisc:
            self._add_qdisc(at)
        elif at.direction is Direction.EGRESS and hook.qdisc != CLSACT:
            raise DatapathError(
                "attach to",
                str(at),
                hint=f"its qdisc is of kind {hook.qdisc}, which knows no egress; "
                f"have clsact in its place (tc qdisc del dev {at.device} {hook.qdisc})",
            )
        priority = priority_of(hook, place)
        taken = {one.handle for one in hook.of(CLSACT) if one.priority == priority}
        handle = next(one for one in itertools.count(_FIRST_HANDLE) if one not in taken)
        self._set_filter(at, priority, handle, prog_fd)

    def remove(self, at: At) -> int:
        """Take away every program of ours; returns how many there were."""
        ours = self.look(at).ours
        for one in ours:
            self._remove(at, one)
        return len(ours)

    def remove_empty_qdisc(self, at: At) -> bool:
        """Remove a clsact on which no filter hangs (any more), in neither direction."""
        if self._qdisc(at.number) != CLSACT:
            return False
        if any(any(self._filters(at._replace(direction=one))) for one in Direction):
            return False
        body = _TCMSG.pack(socket.AF_UNSPEC, at.number, _QDISC_HANDLE, _QDISC_PARENT, 0)
        with _named("remove", f"clsact of {at.device}", but=_GONE):
            netlink.request(self._kernel, _RTM_DELQDISC, body)
        return True

    def _remove(self, at: At, entry: Entry) -> None:
        if entry.way == TCX:
            self._detach_tcx(at, entry)
            return
        body = _filter_head(at, entry.priority, entry.handle)
        with _named("remove", f"filter at {at}", but=_GONE):
            netlink.request(self._kernel, _RTM_DELTFILTER, body)

    @staticmethod
    def _detach_tcx(at: At, entry: Entry) -> None:
        with _program(entry.program) as fd:
            if fd is not None:
                libbpf.tcx_detach(at.number, at.attach_type, fd)

    def _add_qdisc(self, at: At) -> None:
        body = _TCMSG.pack(socket.AF_UNSPEC, at.number, _QDISC_HANDLE, _QDISC_PARENT, 0)
        body += netlink.attribute(_TCA_KIND, b"clsact\0")
        with _named("add", f"clsact to {at.device}", but=frozenset({errno.EEXIST})):
            netlink.request(
                self._kernel, _RTM_NEWQDISC, body, flags=netlink.CREATE | netlink.EXCLUSIVE
            )

    def _set_filter(self, at: At, priority: int, handle: int, prog_fd: int) -> None:
        """Make a filter, or give the one of this handle another program, at once."""
        name = libbpf.prog_info(prog_fd).name.encode() + b"\0"
        options = (
            netlink.attribute(_TCA_BPF_FD, _U32.pack(prog_fd))
            + netlink.attribute(_TCA_BPF_NAME, name)
            + netlink.attribute(_TCA_BPF_FLAGS, _U32.pack(_DIRECT_ACTION))
        )
        body = _filter_head(at, priority, handle) + netlink.attribute(_TCA_OPTIONS, options)
        with _named("attach to", str(at)):
            netlink.request(self._kernel, _RTM_NEWTFILTER, body, flags=netlink.CREATE)


def priority_of(hook: Hook, place: Place) -> int:
    """The priority of a filter of ours there: what others have of its kind, ours can stand beside.

    The newest of one priority runs first.
    """
    blocked = {one.priority for one in hook.of(CLSACT) if not one.takes_all}
    order: Iterable[int] = _PRIORITIES if place is Place.FIRST else reversed(_PRIORITIES)
    return next(one for one in order if one not in blocked)


def _way(direction: Direction, hook: Hook, place: Place) -> str:
    """TCX runs before every filter: first it always can be, last only where there is none."""
    if not hook.has_tcx:
        return CLSACT
    if place is Place.FIRST:
        return TCX
    if direction is Direction.EGRESS and hook.qdisc not in {"", CLSACT}:
        return TCX  # a qdisc of another kind has no egress: no filter is there, and none can be
    filters = any(not one.is_ours for one in hook.of(CLSACT))
    # Others come behind ours by default; behind a filter of the last priority none does.
    was_overtaken = any(one.way == TCX for one in hook.ours) and bool(hook.behind)
    return CLSACT if filters or was_overtaken else TCX


def _filter_head(at: At, priority: int, handle: int) -> bytes:
    info = priority << 16 | _ETH_P_ALL
    head = _TCMSG.pack(socket.AF_UNSPEC, at.number, handle, at.parent, info)
    return head + netlink.attribute(_TCA_KIND, b"bpf\0")


def _is_program(kind: str, options: dict[int, bytes]) -> bool:
    return kind == "bpf" and len(options.get(_TCA_BPF_ID, b"")) == _U32.size


def _entry(way: str, program: int) -> Entry:
    with _program(program) as fd:
        if fd is None:
            return Entry(way, program, "?")  # it went meanwhile
        info = libbpf.prog_info(fd)
    return Entry(way, program, info.name, info.map_ids)


@contextlib.contextmanager
def _program(number: int) -> Iterator[int | None]:
    """A descriptor of the program of this id; None where there is none (any more)."""
    try:
        fd = libbpf.prog_by_id(number)
    except DatapathError as error:
        if error.errno != errno.ENOENT:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _named(operation: str, thing: str, *, but: frozenset[int] = frozenset()) -> Iterator[None]:
    """OSError as DatapathError; those of ``but`` are none."""
    try:
        yield
    except OSError as error:
        if error.errno in but:
            return
        forbidden = error.errno in (errno.EPERM, errno.EACCES)
        hint = "needs root, or CAP_NET_ADMIN" if forbidden else str(error.strerror or "")
        raise DatapathError(
            operation, thing, error.errno or 0, hint=hint, fatal=forbidden
        ) from None
