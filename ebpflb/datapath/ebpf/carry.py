# SPDX-License-Identifier: Apache-2.0
"""Open flows go with the agent from one layout or size of the flow tables to another (K6).

A packet of an open connection whose flow is not known passes untouched, and whoever it reaches
resets the connection. So what lies in tables of before is copied into ours before any program is
switched to them, and again, without overwriting, when all are: what the old programs have made in
between. The two of a switch are older and newer, whichever: an entry is copied by the names of its
members, which a table carries with it (members.py). This file must not know when that is to happen.

What becomes of an entry: members that ours has not are dropped, those that only ours has are zero,
the checks are ours. Its service-port id may be of maps that are gone: then the flow's frontend says
which id it has now. Where that is nobody's frontend any more the id is nobody's too: TCP and SCTP
go on without, a UDP flow is left behind, so that its next packet chooses anew, as one whose Service
was deleted. An id of 0 was a client's own connection to a backend, and stays so.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from ebpflb.datapath.ebpf import flows, libbpf, members
from ebpflb.datapath.ebpf.flows import FLOW, FLOW_KEY
from ebpflb.datapath.ebpf.maps import FLOW_TABLES, Map, PinFolder
from ebpflb.datapath.ebpf.members import Members, Place
from ebpflb.datapath.ebpf.tables import FRONTEND_KEY, FRONTEND_VALUE
from ebpflb.errors import DatapathError
from ebpflb.logs import Log
from ebpflb.model import Protocol, family_of, unspecified

_log = Log("carry")

_KEY: Final = members.places(FLOW_KEY)
_VALUE: Final = members.places(FLOW)

# An entry without one of these, or with one of another size, is not worth anything here.
_NEEDED_OF_KEY: Final = ("source", "target", "source_port", "target_port", "protocol")
_NEEDED_OF_VALUE: Final = ("kind", "flags", "address", "port", "client_port", "used_ns")

# A half that has been silent for longer, and has moved between the tables since the first copy, is
# put back by the next packet of the other one.
_MOVES_NS: Final = flows.OPENING_NS


class _Copy(NamedTuple):
    """How one struct is made of another: these bytes go there."""

    size: int
    moves: tuple[tuple[slice, slice], ...]

    def of(self, raw: bytes) -> bytearray:
        made = bytearray(self.size)
        for there, here in self.moves:
            made[there] = raw[here]
        return made


def copy_by_names(old: Members, new: Members, needed: tuple[str, ...], size: int) -> _Copy | None:
    """None where a needed member is not in both, of the same size."""
    common = {name for name, place in new.items() if name in old and old[name].size == place.size}
    if not common.issuperset(needed):
        return None
    moves: list[tuple[Place, Place]] = []
    for name in sorted(common, key=lambda one: new[one].offset):
        there, here = new[name], old[name]
        if moves and _meet(moves[-1][0], there) and _meet(moves[-1][1], here):
            before, before_here = moves.pop()
            there = Place(before.offset, before.size + there.size)
            here = Place(before_here.offset, before_here.size + here.size)
        moves.append((there, here))
    return _Copy(size, tuple((_slice(there), _slice(here)) for there, here in moves))


def _meet(one: Place, other: Place) -> bool:
    return one.offset + one.size == other.offset


def _slice(place: Place) -> slice:
    return slice(place.offset, place.offset + place.size)


# --- where flows lie -----------------------------------------------------------------------------


_CHECK_HEAD: Final = _slice(_VALUE["check_head"])
_CHECK_TAIL: Final = _slice(_VALUE["check_tail"])
_ID: Final = _slice(_VALUE["id"])
_PROTOCOL: Final = _KEY["protocol"].offset


class _Old(NamedTuple):
    """A table of before, and how its entries become ours."""

    fd: int
    path: Path
    info: libbpf.MapInfo
    ours: Map
    key: _Copy
    value: _Copy
    used_ns: slice

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        return libbpf.items(self.fd, self.path.name, self.info.key_size, self.info.value_size)

    def used(self, value: bytes) -> int:
        return int.from_bytes(value[self.used_ns], sys.byteorder)

    def newest(self) -> int:
        """The ``used_ns`` from which on as many entries are newer as ours has room for."""
        if self.info.max_entries <= self.ours.max_entries:
            return 0
        used = sorted(self.used(value) for _, value in self.items())
        return used[-self.ours.max_entries] if len(used) > self.ours.max_entries else 0


def _open(path: Path, ours: Map) -> _Old | None:
    """None where no entry of that map can be ours; that is said."""
    fd = libbpf.obj_get(str(path))
    try:
        found = _understand(fd, path, ours)
    except BaseException:
        os.close(fd)
        raise
    if found is None:
        os.close(fd)
        _log.warning("open flows cannot be carried over: their layout is not known", map=path.name)
    return found


def _understand(fd: int, path: Path, ours: Map) -> _Old | None:
    if libbpf.fd_kind(fd) != "bpf-map":
        return None
    types = libbpf.map_types(fd, path.name)
    layouts = members.read(types) if types else None
    if layouts is None:
        return None
    of_key, of_value = layouts
    key = copy_by_names(of_key, _KEY, _NEEDED_OF_KEY, FLOW_KEY.size)
    value = copy_by_names(of_value, _VALUE, _NEEDED_OF_VALUE, FLOW.size)
    if key is None or value is None:
        return None
    info = libbpf.map_info(fd, path.name)
    return _Old(fd, path, info, ours, key, value, _slice(of_value["used_ns"]))


# --- what a flow's id is now ---------------------------------------------------------------------


class _Ids:
    """Finds the service port of a frontend, as programs do."""

    def __init__(self, frontends: Map) -> None:
        self._frontends = frontends
        self._known: dict[bytes, int] = {}

    def of(self, key: bytearray, value: bytearray) -> int:
        """0: nobody's."""
        ends: Any = FLOW_KEY.unpack(bytes(key))
        half: Any = FLOW.unpack(bytes(value))
        if half.kind == flows.FORWARD:
            dialled = FRONTEND_KEY.pack(ends.target, ends.target_port, ends.protocol)
        else:
            dialled = FRONTEND_KEY.pack(half.address, half.port, ends.protocol)
        if dialled not in self._known:
            self._known[dialled] = self._look(dialled)
        return self._known[dialled]

    def _look(self, dialled: bytes) -> int:
        found = self._frontends.lookup(dialled) or self._frontends.lookup(_node_port(dialled))
        return int(FRONTEND_VALUE.unpack(found).id) if found else 0


def _node_port(dialled: bytes) -> bytes:
    """The NodePort of that number. Whether the address is the node's was asked when it began."""
    key: Any = FRONTEND_KEY.unpack(dialled)
    return FRONTEND_KEY.pack(unspecified(family_of(key.address)), key.port, key.protocol)


# --- the two copies ------------------------------------------------------------------------------


class Carrier:
    """Copies what lies in flow tables of before. Nothing here raises: to serve is worth more.

    ``ids_are_new``: the maps that ids are of were made anew, and their frontends have been written.
    ``grace`` returns when every program that was running has ended. The old maps stay pinned, for
    whoever calls ``close`` to unpin.
    """

    def __init__(
        self,
        folder: PinFolder,
        maps: Mapping[str, Map],
        *,
        ids_are_new: bool,
        grace: Callable[[], None],
    ) -> None:
        self._ids = _Ids(maps["frontends"]) if ids_are_new else None
        self._grace = grace
        self._began_ns = 0
        self._old: list[_Old] = []
        for path in folder.others(maps):
            name = path.name.rpartition("-")[0]
            if name not in FLOW_TABLES:
                continue
            try:
                one = _open(path, maps[name])
            except DatapathError as error:
                _log.error("open flows cannot be carried over", map=path.name, reason=str(error))
                continue
            if one is not None:
                self._old.append(one)
        # What several know is taken from the newest.
        self._old.sort(key=lambda one: -one.info.id)

    @property
    def pending(self) -> bool:
        """Whether there is anything to copy from."""
        return bool(self._old)

    def first(self) -> int:
        """Before any program is switched to our maps; returns how many halves came over."""
        self._began_ns = time.monotonic_ns()
        return self._copy("carried open flows over", since_ns=0)

    def second(self) -> int:
        """When every program has been."""
        if self.pending:
            self._grace()
        since_ns = max(0, self._began_ns - _MOVES_NS)
        return self._copy("carried flows over that began meanwhile", since_ns=since_ns)

    def close(self) -> None:
        for one in self._old:
            os.close(one.fd)
        self._old = []

    def _copy(self, said: str, *, since_ns: int) -> int:
        total = 0
        for one in self._old:
            try:
                count = self._copy_one(one, since_ns)
            except DatapathError as error:
                _log.error(
                    "open flows were not all carried over", map=one.path.name, reason=str(error)
                )
                continue
            total += count
            if count:
                _log.info(said, halves=count, map=one.path.name)
        return total

    def _copy_one(self, old: _Old, since_ns: int) -> int:
        """What is there already stays: it is what our programs have made of it since."""
        since_ns = max(since_ns, old.newest())
        count = 0
        for raw_key, raw_value in old.items():
            if old.used(raw_value) < since_ns:
                continue
            key = old.key.of(raw_key)
            value = old.value.of(raw_value)
            value[_CHECK_HEAD] = value[_CHECK_TAIL] = _number(flows.check(bytes(key)))
            if self._ids and any(value[_ID]):
                value[_ID] = _number(self._ids.of(key, value))
                if not any(value[_ID]) and key[_PROTOCOL] == Protocol.UDP:
                    continue
            count += old.ours.insert(bytes(key), bytes(value))
        return count


def _number(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder)
