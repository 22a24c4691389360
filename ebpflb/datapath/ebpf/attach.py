# SPDX-License-Identifier: Apache-2.0
"""Which programs run at which hook of the cgroup, and how they get and stay there.

Each hook has one link, pinned at a fixed path, so what is attached outlives every process. A
program is swapped inside its link; a link whose cgroup is gone is made anew. Whatever else is on
the cgroup is left alone. This file must not know what a program does.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import libbpf
from ebpflb.datapath.ebpf.maps import LINKS
from ebpflb.errors import DatapathError

_ALLOW_MULTI = 2


class Hook(NamedTuple):
    """``name`` is that of the C function, of the program and of the link's pin."""

    name: str
    prog_type: int
    attach_type: int


_ATTACH_TYPES = {
    "bind4": 8,
    "bind6": 9,
    "connect4": 10,
    "connect6": 11,
    "sendmsg4": 14,
    "sendmsg6": 15,
    "recvmsg4": 19,
    "recvmsg6": 20,
    "getpeername4": 29,
    "getpeername6": 30,
    "sock_release": 34,
}

# What brings a socket's own view back comes first: a new connect() never meets an old reverse.
_ORDER = ("recvmsg", "getpeername", "sock_release", "sendmsg", "connect", "bind")

EVERY_HOOK: tuple[Hook, ...] = tuple(
    sorted(
        (
            Hook(
                name,
                libbpf.PROG_CGROUP_SOCK if name == "sock_release" else libbpf.PROG_CGROUP_SOCK_ADDR,
                _ATTACH_TYPES[name],
            )
            for name in _ATTACH_TYPES
        ),
        key=lambda hook: (_ORDER.index(hook.name.rstrip("46")), hook.name),
    )
)
"""In the order in which they are attached."""

BIND_HOOKS = tuple(hook for hook in EVERY_HOOK if hook.name.startswith("bind"))
"""Attached only where NodePorts are to be protected from other binds."""

HOOKS = tuple(hook for hook in EVERY_HOOK if hook not in BIND_HOOKS)
"""Attached always."""


class Attached(NamedTuple):
    """What the kernel says of one hook. ``problem`` is "" where all is well."""

    hook: str
    prog_id: int
    prog_name: str
    map_ids: frozenset[int]
    problem: str


class Attachment:
    """The links of one pin folder on one cgroup. The folder's lock is the caller's to hold.

    ``bind`` says whether BIND_HOOKS are to be attached; None, for those who only look: it is right
    as it is. ``off``: nothing is to be attached.
    """

    def __init__(
        self, pin_path: Path, cgroup: Path, *, bind: bool | None = None, off: bool = False
    ) -> None:
        self._links = pin_path / LINKS
        self._cgroup = cgroup
        self._bind = bind
        self._off = off

    def ensure(self, programs: Mapping[str, int]) -> int:
        """Make every hook run its program of ``programs`` (descriptors by hook).

        Returns how many links were made, changed or, where bind is not to be watched (any more),
        removed. Raises DatapathError, fatal where a foreign program keeps ours off the cgroup.
        """
        try:
            self._links.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError as error:
            raise _os_error("create", self._links, error, _not_ours(self._links)) from None
        except OSError as error:
            hint = "make its folder again, or restart the agent"
            raise _os_error("create", self._links, error, hint) from None
        with self._opened() as cgroup_fd:
            return sum(
                self._ensure(hook, programs[hook.name], cgroup_fd)
                for hook in EVERY_HOOK
                if hook.name in programs
            ) + sum(map(self._detach, self._unwanted()))

    @contextlib.contextmanager
    def on_trial(self, programs: Mapping[str, int]) -> Iterator[frozenset[str]]:
        """Let those of ``programs`` run on the cgroup meanwhile that have no link there yet.

        Those are what it yields. What is pinned stays as it is: whether they run for us is found
        out before anything moves.
        """
        with contextlib.ExitStack() as stack:
            cgroup_fd = stack.enter_context(self._opened())
            tried = [
                hook for hook in EVERY_HOOK if hook.name in programs and self._look(hook).problem
            ]
            for hook in tried:
                stack.callback(os.close, self._link(hook, programs[hook.name], cgroup_fd))
            yield frozenset(hook.name for hook in tried)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        try:
            cgroup_fd = os.open(self._cgroup, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            hint = "make it again, or restart the agent with another --cgroup"
            raise _os_error("open", self._cgroup, error, hint) from None
        try:
            yield cgroup_fd
        finally:
            os.close(cgroup_fd)

    def _unwanted(self) -> list[Hook]:
        """Hooks with a link that should have none; new connections first."""
        if self._off:
            return [hook for hook in reversed(EVERY_HOOK) if self._is_pinned(hook)]
        return [] if self._bind is not False else [h for h in BIND_HOOKS if self._is_pinned(h)]

    def _is_pinned(self, hook: Hook) -> bool:
        return os.path.lexists(self._links / hook.name)

    def _detach(self, hook: Hook) -> bool:
        path = self._links / hook.name
        try:
            path.unlink()  # nothing else holds it
        except OSError as error:
            raise _os_error("remove", path, error, _not_ours(path)) from None
        return True

    def _ensure(self, hook: Hook, prog_fd: int, cgroup_fd: int) -> bool:
        path = self._links / hook.name
        state = self._look(hook)
        if not state.problem:
            if state.prog_id == libbpf.prog_info(prog_fd).id:
                return False
            link_fd = libbpf.obj_get(str(path))
            try:
                libbpf.link_update(link_fd, prog_fd, hook.name)
            finally:
                os.close(link_fd)
            return True
        link_fd = self._link(hook, prog_fd, cgroup_fd)
        try:
            path.unlink(missing_ok=True)  # ours is attached already: no gap
            libbpf.obj_pin(link_fd, str(path))
        except OSError as error:
            raise _os_error("replace", path, error, _not_ours(path)) from None
        finally:
            os.close(link_fd)
        return True

    def _link(self, hook: Hook, prog_fd: int, cgroup_fd: int) -> int:
        """Attach beside whatever else is there; returns the link's descriptor."""
        try:
            return libbpf.link_create(prog_fd, cgroup_fd, hook.attach_type, hook.name)
        except DatapathError as error:
            if error.errno == errno.EPERM and (foreign := self._foreign(hook)):
                raise DatapathError(
                    "attach",
                    hook.name,
                    error.errno,
                    hint=f"{foreign} and lets no other program beside it; detach it, have it "
                    "attached with BPF_F_ALLOW_MULTI, or choose another --cgroup",
                    fatal=True,
                ) from None
            raise

    def _foreign(self, hook: Hook) -> str:
        """Who forbids company on this cgroup or one above it, in words; "" where nobody does."""
        for cgroup in (self._cgroup, *self._cgroup.parents):
            try:
                fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
            except OSError:
                continue
            try:
                ids, flags = libbpf.cgroup_programs(fd, hook.attach_type)
            except DatapathError:
                return ""  # above the root of cgroup v2
            finally:
                os.close(fd)
            if ids and not flags & _ALLOW_MULTI:
                infos = [(one, _prog_info(one)) for one in ids]
                names = ", ".join(f"{info.name if info else '?'} (id {i})" for i, info in infos)
                return f"the program {names} is on {cgroup}"
        return ""

    def look(self) -> list[Attached]:
        """Ask the kernel what runs at each hook that has or should have a program of ours."""
        return [
            self._look(hook)
            for hook in EVERY_HOOK
            if self._is_pinned(hook) or not (self._off or (hook in BIND_HOOKS and not self._bind))
        ]

    def _look(self, hook: Hook) -> Attached:
        path = self._links / hook.name
        try:
            link_fd = libbpf.obj_get(str(path))
        except DatapathError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return Attached(hook.name, 0, "", frozenset(), "not attached")
            if error.errno == errno.EACCES and _is_folder(path):  # what the kernel says of those
                return Attached(hook.name, 0, "", frozenset(), "the pin is a folder")
            raise
        try:
            kind = libbpf.fd_kind(link_fd)
            if kind not in ("bpf_link", "bpf-link"):
                return Attached(hook.name, 0, "", frozenset(), f"the pin is a {kind}")
            link = libbpf.link_info(link_fd)
        finally:
            os.close(link_fd)
        info = _prog_info(link.prog_id)
        return Attached(
            hook.name,
            link.prog_id,
            info.name if info else "",
            info.map_ids if info else frozenset(),
            self._problem(hook, link),
        )

    def _problem(self, hook: Hook, link: libbpf.LinkInfo) -> str:
        """What is wrong with a link at ``hook``'s place, "" where nothing is."""
        if link.attach_type != hook.attach_type:
            return "the pinned link is for another hook"
        if link.cgroup_id == 0:
            return "its cgroup is gone"
        try:
            ours = self._cgroup.stat().st_ino
        except OSError:
            return f"{self._cgroup} is gone"
        return "" if link.cgroup_id == ours else f"attached to another cgroup than {self._cgroup}"

    def differences(self, our_map_ids: frozenset[int] = frozenset()) -> list[Difference]:
        """Each hook that does not run a program of ours.

        With the kernel's ids of our maps also each whose program runs on none or on others.
        """
        found = []
        unwanted = {hook.name for hook in self._unwanted()}
        for one in self.look():
            where = f"hook {one.hook}"
            if one.hook in unwanted:
                found.append(Difference("", where, "program", "", one.problem or "attached"))
            elif one.problem:
                found.append(Difference("", where, "program", "attached", one.problem))
            elif our_map_ids and not (one.map_ids and one.map_ids <= our_map_ids):
                uses = f"program {one.prog_id} uses {'others' if one.map_ids else 'none'}"
                found.append(Difference("", where, "maps", "those pinned", uses))
        return found


def _prog_info(prog_id: int) -> libbpf.ProgInfo | None:
    try:
        fd = libbpf.prog_by_id(prog_id)
    except DatapathError:
        return None  # it went meanwhile
    try:
        return libbpf.prog_info(fd)
    finally:
        os.close(fd)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def _not_ours(path: Path) -> str:
    remove = "rmdir" if _is_folder(path) else "rm"
    return f"it is not ours: remove it ({remove} {path}) or choose another --pin-path"


def _os_error(operation: str, path: Path, error: OSError, hint: str) -> DatapathError:
    forbidden = error.errno in (errno.EPERM, errno.EACCES)
    hint = "needs root" if forbidden else hint
    return DatapathError(operation, str(path), error.errno or 0, hint=hint, fatal=forbidden)


def cgroup2_root() -> Path:
    """Where cgroup v2 is mounted. Raises DatapathError (fatal) where it is not."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] == "cgroup2":
            return Path(left.split()[4])
    raise DatapathError(
        "find",
        "cgroup v2",
        hint="it is not mounted; mount it with: mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified "
        "(or boot with cgroup v2), or name its root with --cgroup",
        fatal=True,
    )


def is_root_of_all(cgroup: Path) -> bool:
    """Whether it is the kernel's own root, not just that of this process's cgroup namespace."""
    try:
        return cgroup.stat().st_ino == 1
    except OSError:
        return True  # that it cannot be used is said elsewhere


def require_cgroup2(path: Path) -> None:
    """Raises DatapathError (fatal) unless ``path`` is a folder of cgroup v2."""
    try:
        known = all((path / name).exists() for name in ("cgroup.procs", "cgroup.controllers"))
    except OSError as error:
        raise _os_error("use", path, error, "") from None
    if not known:
        raise DatapathError(
            "use",
            str(path),
            hint="it is no folder of cgroup v2; name one with --cgroup",
            fatal=True,
        )
