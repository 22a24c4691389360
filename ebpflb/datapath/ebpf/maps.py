# SPDX-License-Identifier: Apache-2.0
"""The pin folder: its lock, and every map in it, opened, checked or made.

A map is pinned as ``NAME-DIGEST``, the digest being that of its layout and size, so another
version's map is another file. What is opened is compared with what was meant all the same: a pin
can be anybody's. This file must not know what the maps hold.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ebpflb.datapath.ebpf import abi, libbpf, members
from ebpflb.errors import ConfigError, DatapathError

BPFFS_MAGIC = "bpf"
LINKS = "links"
_LOCK_POLL_S = 0.1

DEFAULT_SIZES: Mapping[str, int] = {
    "frontends": 65_536,
    "ports": 32_768,
    "backends": 262_144,
    "affinity": 65_536,
    "members": 131_072,
    "udp_conn": 65_536,
    "names": 32_768,
    "node_addrs": 16_384,
    "flows_new": 32_768,
    "conntrack": 131_072,
    "source_ranges": 16_384,
    "service_addrs": 65_536,
}
"""Entries of the maps whose size is an option (``--map-size NAME=N``)."""

FLOW_TABLES = ("conntrack", "flows_new")
"""Maps of open flows: their layout stays with them, for the next version to carry them over by."""

_FOLLOWS = {"connections": "ports"}
_FIXED = {"sock_peer": 0, "sock_udp": 0, "settings": 1, "fragments": 8_192, "devices": 16_384}
_FROM_ENUM = {"stats": "STAT_COUNT", "probe": "HOOK_COUNT"}

# Their keys or values are ids and slots of one another.
_TOGETHER = frozenset(
    {
        "frontends",
        "ports",
        "backends",
        "affinity",
        "members",
        "connections",
        "names",
        "source_ranges",
    }
)


def sizes(options: Mapping[str, int] | None = None) -> dict[str, int]:
    """Entries of every map. Raises ConfigError for a map without a size option or a bad size."""
    options = options or {}
    for name, size in options.items():
        if name not in DEFAULT_SIZES:
            known = ", ".join(DEFAULT_SIZES)
            raise ConfigError(f"--map-size {name}={size}: no such size; there are {known}")
        limit = 1 << (abi.CONSTANTS["ABI_ID_INDEX_BITS"] if name == "ports" else 24)
        if not 1 <= size <= limit:
            raise ConfigError(f"--map-size {name}={size}: must be 1 to {limit}")
    chosen = {**DEFAULT_SIZES, **options}
    chosen |= {name: chosen[other] for name, other in _FOLLOWS.items()}
    return chosen | _FIXED | {name: abi.CONSTANTS[count] for name, count in _FROM_ENUM.items()}


class Map:
    """One open map."""

    def __init__(self, spec: abi.MapSpec, fd: int, path: Path, max_entries: int) -> None:
        self.spec = spec
        self.fd = fd
        self.path = path
        self.max_entries = max_entries

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def _is_trie(self) -> bool:
        """Before 5.13 the kernel has no batches for these."""
        return self.spec.type == "lpm_trie"

    def lookup(self, key: bytes) -> bytes | None:
        return libbpf.lookup(self.fd, self.name, key, self.spec.value.size)

    def update(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        if self._is_trie:
            for key, value in items:
                libbpf.update(self.fd, self.name, key, value)
        else:
            libbpf.update_batch(self.fd, self.name, items)

    def insert(self, key: bytes, value: bytes) -> bool:
        """Write an entry where there is none; False where there is one, which stays."""
        return libbpf.insert(self.fd, self.name, key, value)

    def take(self, key: bytes) -> bytes | None:
        """Delete an entry of a hash map and return what it was."""
        return libbpf.take(self.fd, self.name, key, self.spec.value.size)

    def delete(self, key: bytes) -> None:
        libbpf.delete(self.fd, self.name, key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        read = libbpf.items_singly if self._is_trie else libbpf.items
        return read(self.fd, self.name, self.spec.key.size, self.spec.value.size)

    def batches(self) -> Iterator[tuple[memoryview, memoryview]]:
        """The entries of a hash map in pieces: keys, and values, one behind the other."""
        return libbpf.batches(self.fd, self.name, self.spec.key.size, self.spec.value.size)

    def count(self) -> int:
        """Entries in use of a hash map or a trie."""
        if self._is_trie:
            return sum(1 for _ in self.items())
        return libbpf.count(self.fd, self.name, self.spec.key.size, self.spec.value.size)

    def memory(self) -> libbpf.MappedArray:
        return libbpf.MappedArray(
            self.fd, self.name, value_size=self.spec.value.size, max_entries=self.max_entries
        )

    def per_cpu(self, index: int) -> list[int]:
        """The 64-bit values of one entry of a per-CPU array, one for each possible CPU."""
        raw = libbpf.lookup(
            self.fd, self.name, index.to_bytes(4, sys.byteorder), 8 * libbpf.possible_cpus()
        )
        return list(memoryview(raw or b"").cast("Q"))

    def clear_per_cpu(self, index: int) -> None:
        libbpf.update(
            self.fd, self.name, index.to_bytes(4, sys.byteorder), bytes(8 * libbpf.possible_cpus())
        )

    def close(self) -> None:
        os.close(self.fd)


class PinFolder:
    """``/sys/fs/bpf/ebpflb`` or wherever ``--pin-path`` says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock_fd: int | None = None

    def require_bpffs(self) -> None:
        """Raises DatapathError (fatal) where no BPF file system is mounted."""
        where = self.path
        try:
            while not where.exists() and where != where.parent:
                where = where.parent
            kind = _file_system_of(where)
        except OSError as error:
            raise _os_error("use", self.path, error) from None
        if kind != BPFFS_MAGIC:
            raise DatapathError(
                "use",
                str(self.path),
                hint="it is not on a BPF file system; mount one with: mount -t bpf bpf /sys/fs/bpf",
                fatal=True,
            )

    def create(self) -> None:
        self.require_bpffs()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _os_error("create", self.path, error) from None

    @contextmanager
    def lock(self, waiting: Callable[[str], None], *, wait: bool = True) -> Iterator[None]:
        """Be the one writer. Says through ``waiting`` once whom it waits for.

        The lock belongs to a descriptor that no child inherits; the kernel frees it when the
        holder ends, however it ends. With ``wait`` False raises DatapathError at once.
        """
        said = False
        while True:
            fd = self._open()
            try:
                if not _try_lock(fd):
                    holder = lock_holder(self.path)
                    if not wait:
                        raise DatapathError(
                            "lock",
                            str(self.path),
                            errno.EWOULDBLOCK,
                            hint=f"{holder} works on this folder; stop it first",
                        )
                    if not said:
                        waiting(holder)
                        said = True
                    time.sleep(_LOCK_POLL_S)
                elif self._is_still(fd):
                    yield
                    return
                else:  # `cleanup` took the folder away while we waited for it
                    self.create()
            finally:
                os.close(fd)

    def _open(self) -> int:
        try:
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            self.create()
            return os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise _os_error("open", self.path, error) from None

    def _is_still(self, fd: int) -> bool:
        """Whether the folder that was opened is the one that lies at the path."""
        try:
            return os.fstat(fd).st_ino == self.path.stat().st_ino
        except FileNotFoundError:
            return False

    def map_path(self, spec: abi.MapSpec, max_entries: int) -> Path:
        return self.path / f"{spec.name}-{spec.digest(max_entries)}"

    def open_or_create(self, entries: Mapping[str, int]) -> dict[str, Map]:
        """Every map of ``maps.h``, ours from before where it lies there, else fresh and pinned.

        Maps that name each other's entries are taken over together or made anew together. Programs
        that still use the old ones keep them alive until they are replaced themselves.
        """
        found = {}
        for spec in abi.MAPS.values():
            path = self.map_path(spec, entries[spec.name])
            if path.exists():
                fd = _open_checked(spec, path, entries[spec.name])
                found[spec.name] = Map(spec, fd, path, entries[spec.name])
        if not found.keys() >= _TOGETHER:
            # Of any size and layout: one that stayed behind would be of another generation of ids.
            for path in self.path.glob("*-*"):
                if path.name.rpartition("-")[0] in _TOGETHER:
                    path.unlink()
            for name in _TOGETHER & found.keys():
                found.pop(name).close()
        return {
            spec.name: found.get(spec.name) or self._create(spec, entries[spec.name])
            for spec in abi.MAPS.values()
        }

    def _create(self, spec: abi.MapSpec, max_entries: int) -> Map:
        path = self.map_path(spec, max_entries)
        fd = libbpf.map_create(
            spec.type,
            spec.name,
            key_size=spec.key.size,
            value_size=spec.value.size,
            max_entries=max_entries,
            flags=spec.flags,
            types=members.describe(spec.key, spec.value) if spec.name in FLOW_TABLES else None,
        )
        libbpf.obj_pin(fd, str(path))
        return Map(spec, fd, path, max_entries)

    def open_existing(self) -> dict[str, Map]:
        """The maps as they lie there, of whatever size, for those who only read.

        Of two sizes of one map the one that is newest by its id counts. Raises DatapathError
        where nothing is pinned.
        """
        found: dict[str, Map] = {}
        for path in sorted(self.path.glob("*-*")) if self.path.is_dir() else []:
            spec = abi.MAPS.get(path.name.rpartition("-")[0])
            if spec is None:
                continue
            fd = libbpf.obj_get(str(path))
            entries = libbpf.map_info(fd, spec.name).max_entries
            if libbpf.fd_kind(fd) != "bpf-map" or self.map_path(spec, entries) != path:
                os.close(fd)
                continue
            one = Map(spec, fd, path, entries)
            other = found.get(spec.name)
            if other and _map_id(other) > _map_id(one):
                one.close()
                continue
            if other:
                other.close()
            found[spec.name] = one
        missing = [name for name in abi.MAPS if name not in found]
        if missing:
            for one in found.values():
                one.close()
            raise DatapathError(
                "read",
                str(self.path),
                hint="nothing of ebpflb is pinned here"
                if not found
                else f"no pinned map {', '.join(missing)} of this version",
            )
        return found

    def others(self, maps: Mapping[str, Map]) -> list[Path]:
        """The pins of maps of ours in other sizes or layouts."""
        ours = {one.path for one in maps.values()}
        return [
            path
            for path in sorted(self.path.glob("*-*"))
            if path.name.rpartition("-")[0] in abi.MAPS and path not in ours
        ]

    def remove_others(self, maps: Mapping[str, Map], *, but: Collection[str] = ()) -> list[str]:
        """Unpin these, except those of the maps named; returns what is gone."""
        gone = []
        for path in self.others(maps):
            if path.name.rpartition("-")[0] not in but:
                path.unlink()
                gone.append(path.name)
        return gone


def _map_id(one: Map) -> int:
    return libbpf.map_info(one.fd, one.name).id


def _open_checked(spec: abi.MapSpec, path: Path, max_entries: int) -> int:
    """bcc and libbpf open whatever lies at a path: compare it with what is meant."""
    fd = libbpf.obj_get(str(path))
    kind = libbpf.fd_kind(fd)
    if kind == "bpf-map":
        info = libbpf.map_info(fd, spec.name)
        is_ = (info.type, info.key_size, info.value_size, info.max_entries, info.flags)
        meant = (
            libbpf.MAP_TYPES[spec.type],
            spec.key.size,
            spec.value.size,
            max_entries,
            spec.flags,
        )
        if is_ == meant:
            return fd
        difference = f"(type, key size, value size, entries, flags) are {is_}, should be {meant}"
    else:
        difference = f"it is a {kind}"
    os.close(fd)
    raise DatapathError(
        "use pin",
        str(path),
        hint=f"it is not the map that its name says: {difference}; "
        f"remove it (rm {path}) or choose another --pin-path",
        fatal=True,
    )


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_holder(path: Path) -> str:
    """Who holds the lock on ``path``, as far as /proc can tell from here."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "another ebpflb"
    wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if "FLOCK" in fields and wanted in fields and "->" not in fields:
            pid = fields[fields.index("WRITE") + 1] if "WRITE" in fields else "?"
            return f"another ebpflb (process {pid})"
    return "another ebpflb"


def _file_system_of(path: Path) -> str:
    """The type of the file system that ``path`` is on, by the mount table."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    kind = ""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if left.split()[2] == wanted:
            kind = right.split()[0]
    return kind


def _os_error(operation: str, path: Path, error: OSError) -> DatapathError:
    forbidden = error.errno in (errno.EPERM, errno.EACCES)
    hint = "needs root" if forbidden else ""
    return DatapathError(operation, str(path), error.errno or 0, hint=hint, fatal=forbidden)
