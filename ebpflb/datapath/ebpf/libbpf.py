# SPDX-License-Identifier: Apache-2.0
"""The bpf system call through libbpf, as far as the agent needs it: the only user of ctypes.

Thin on purpose: descriptors in, bytes out, every failure a DatapathError that names the map or
the hook. This file must not know what any map or program is for.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import platform
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import DatapathError

F_MMAPABLE = 1024

MAP_TYPES = {
    "hash": 1,
    "array": 2,
    "percpu_array": 6,
    "lru_hash": 9,
    "lpm_trie": 11,
    "array_of_maps": 12,
    "sk_storage": 24,
}

PROG_SCHED_CLS = 3
PROG_CGROUP_SOCK = 9
PROG_CGROUP_SOCK_ADDR = 18

HELPER_SET_RETVAL = 187

_ANY = 0
_NOEXIST = 1
_EXIST = 2
_BATCH = 4096
_ENOTSUPP = 524  # the kernel's own, which errno does not know


class _CreateOpts(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("btf_fd", ctypes.c_uint32),
        ("btf_key_type_id", ctypes.c_uint32),
        ("btf_value_type_id", ctypes.c_uint32),
        ("btf_vmlinux_value_type_id", ctypes.c_uint32),
        ("inner_map_fd", ctypes.c_uint32),
        ("map_flags", ctypes.c_uint32),
        ("map_extra", ctypes.c_uint64),
        ("numa_node", ctypes.c_uint32),
        ("map_ifindex", ctypes.c_uint32),
    )


class _BatchOpts(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("elem_flags", ctypes.c_uint64),
        ("flags", ctypes.c_uint64),
    )


class _RunOpts(ctypes.Structure):
    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("data_in", ctypes.c_char_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_char_p),
        ("ctx_out", ctypes.c_void_p),
        ("ctx_size_in", ctypes.c_uint32),
        ("ctx_size_out", ctypes.c_uint32),
        ("retval", ctypes.c_uint32),
        ("repeat", ctypes.c_int),
        ("duration", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("cpu", ctypes.c_uint32),
        ("batch_size", ctypes.c_uint32),
    )


class MapInfo(NamedTuple):
    type: int
    id: int
    key_size: int
    value_size: int
    max_entries: int
    flags: int


class ProgInfo(NamedTuple):
    id: int
    name: str
    tag: str
    map_ids: frozenset[int]
    verified: int = 0
    """Instructions that the verifier looked at; 0 before 5.16."""


class RunResult(NamedTuple):
    """What a program made of a packet. ``duration_ns`` is the mean of all its runs."""

    verdict: int
    packet: bytes
    mark: int
    duration_ns: int


class Btf(NamedTuple):
    """A description of types in the kernel's format, and which of them a map's two are."""

    data: bytes
    key_type: int
    value_type: int


class LinkInfo(NamedTuple):
    """A cgroup link; ``cgroup_id`` 0 means that its cgroup is gone."""

    id: int
    prog_id: int
    cgroup_id: int
    attach_type: int


@functools.cache
def _lib() -> ctypes.CDLL:
    try:
        lib = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError:
        raise DatapathError(
            "load", "libbpf.so.1", hint="install the package libbpf1", fatal=True
        ) from None
    lib.libbpf_set_print(None)
    return lib


def _call(operation: str, thing: str, name: str, *args: object) -> int:
    """A libbpf function that returns a descriptor or 0, or a negative errno."""
    result = int(getattr(_lib(), name)(*args))
    if result < 0:
        raise _error(operation, thing, -result)
    return result


def _error(operation: str, thing: str, code: int) -> DatapathError:
    forbidden = code in (errno.EPERM, errno.EACCES)
    hint = "needs root, or CAP_BPF, CAP_NET_ADMIN and CAP_SYS_ADMIN" if forbidden else ""
    return DatapathError(operation, thing, code, hint=hint, fatal=forbidden or code == errno.ENOSYS)


# --- maps --------------------------------------------------------------------------------------


def map_create(
    kind: str,
    name: str,
    *,
    key_size: int,
    value_size: int,
    max_entries: int,
    flags: int = 0,
    inner_fd: int = 0,
    types: Btf | None = None,
) -> int:
    """Make a map; returns its descriptor. ``kind`` is a key of MAP_TYPES.

    ``types``, if given, stay with the map for as long as it lives.
    """
    opts = _CreateOpts(sz=ctypes.sizeof(_CreateOpts), map_flags=flags, inner_map_fd=inner_fd)
    btf = -1
    if kind == "sk_storage":
        types = _int_and_struct(value_size)
    if types:
        btf = _call("load", "BTF", "bpf_btf_load", types.data, len(types.data), None)
        opts.btf_fd = btf
        opts.btf_key_type_id, opts.btf_value_type_id = types.key_type, types.value_type
    try:
        return _call(
            "create map",
            name,
            "bpf_map_create",
            MAP_TYPES[kind],
            name[:15].encode(),
            key_size,
            value_size,
            max_entries,
            ctypes.byref(opts),
        )
    finally:
        if btf >= 0:
            os.close(btf)


def _int_and_struct(size: int) -> Btf:
    """Socket storage is refused without a description: an int, and a struct of ``size`` bytes."""
    strings = b"\0int\0"
    types = struct.pack("=IIII", 1, 1 << 24, 4, (1 << 24) | 32)  # signed 32-bit int
    types += struct.pack("=III", 0, 4 << 24, size)
    header = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
    return Btf(header + types + strings, 1, 2)


def obj_pin(fd: int, path: str) -> None:
    _call("pin", path, "bpf_obj_pin", fd, path.encode())


def obj_get(path: str) -> int:
    """The descriptor of what is pinned at ``path``."""
    return _call("open pin", path, "bpf_obj_get", path.encode())


def _info(fd: int, buffer: ctypes.Array[ctypes.c_char], thing: str) -> bytes:
    size = ctypes.c_uint32(len(buffer))
    _call("ask about", thing, "bpf_obj_get_info_by_fd", fd, buffer, ctypes.byref(size))
    return buffer.raw


def fd_kind(fd: int) -> str:
    """``bpf-map``, ``bpf-prog``, ``bpf_link`` or another word of the kernel's for the object."""
    return str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix("anon_inode:").strip("[]")


def map_info(fd: int, name: str) -> MapInfo:
    raw = _info(fd, ctypes.create_string_buffer(88), name)
    return MapInfo(*struct.unpack_from("=IIIIII", raw))


def map_types(fd: int, name: str) -> Btf | None:
    """What the map was made with; None if with none."""
    raw = _info(fd, ctypes.create_string_buffer(88), name)
    btf_id, key_type, value_type = struct.unpack_from("=III", raw, 64)
    if not btf_id:
        return None
    btf = _call("open BTF of", name, "bpf_btf_get_fd_by_id", btf_id)
    try:
        size = struct.unpack_from("=I", _info(btf, ctypes.create_string_buffer(32), name), 8)[0]
        data = ctypes.create_string_buffer(size)
        question = ctypes.create_string_buffer(32)
        struct.pack_into("=QI", question, 0, ctypes.addressof(data), size)
        _info(btf, question, name)
    finally:
        os.close(btf)
    return Btf(data.raw, key_type, value_type)


def map_memory(fd: int) -> int:
    """Bytes of kernel memory that the map is charged with now."""
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("memlock:"):
            return int(line.split()[1])
    return 0


def update(fd: int, name: str, key: bytes, value: bytes) -> None:
    _call("write to map", name, "bpf_map_update_elem", fd, key, value, ctypes.c_uint64(_ANY))


def insert(fd: int, name: str, key: bytes, value: bytes) -> bool:
    """Write an entry where there is none; False where there is one, which stays."""
    return _update_unless(errno.EEXIST, _update(fd, key, value, _NOEXIST), name)


def replace(fd: int, name: str, key: bytes, value: bytes) -> bool:
    """Overwrite an entry; False where there is none, and none is made."""
    return _update_unless(errno.ENOENT, _update(fd, key, value, _EXIST), name)


def _update(fd: int, key: bytes, value: bytes, flag: int) -> int:
    return int(_lib().bpf_map_update_elem(fd, key, value, ctypes.c_uint64(flag)))


def _update_unless(otherwise: int, result: int, name: str) -> bool:
    if result < 0 and result != -otherwise:
        raise _error("write to map", name, -result)
    return result == 0


def take(fd: int, name: str, key: bytes, size: int) -> bytes | None:
    """Delete an entry of a hash map; returns the very value that was deleted.

    Before 5.14 the kernel cannot do it in one go: there it is what was there just before.
    """
    value = ctypes.create_string_buffer(size)
    result = int(_lib().bpf_map_lookup_and_delete_elem(fd, key, value))
    if result == -errno.ENOENT:
        return None
    if result in {-errno.EINVAL, -errno.EOPNOTSUPP, -_ENOTSUPP}:
        before = lookup(fd, name, key, size)
        delete(fd, name, key)
        return before
    if result < 0:
        raise _error("delete from map", name, -result)
    return value.raw


def delete(fd: int, name: str, key: bytes) -> None:
    """Deleting what is not there is no error."""
    result = int(_lib().bpf_map_delete_elem(fd, key))
    if result < 0 and result != -errno.ENOENT:
        raise _error("delete from map", name, -result)


def lookup(fd: int, name: str, key: bytes, size: int) -> bytes | None:
    value = ctypes.create_string_buffer(size)
    result = int(_lib().bpf_map_lookup_elem(fd, key, value))
    if result == -errno.ENOENT:
        return None
    if result < 0:
        raise _error("read map", name, -result)
    return value.raw


def update_batch(fd: int, name: str, items: Sequence[tuple[bytes, bytes]]) -> None:
    """Write all items; on an error some are written (``errno`` E2BIG: the map is full)."""
    opts = _BatchOpts(sz=ctypes.sizeof(_BatchOpts))
    for start in range(0, len(items), _BATCH):
        part = items[start : start + _BATCH]
        count = ctypes.c_uint32(len(part))
        keys = b"".join(key for key, _ in part)
        values = b"".join(value for _, value in part)
        _call(
            "write to map",
            name,
            "bpf_map_update_batch",
            fd,
            keys,
            values,
            ctypes.byref(count),
            ctypes.byref(opts),
        )


def items(fd: int, name: str, key_size: int, value_size: int) -> Iterator[tuple[bytes, bytes]]:
    """Every entry of a hash map, in no order; entries written meanwhile may be missing."""
    for keys, values, count in _batches(fd, name, key_size, value_size):
        all_keys, all_values = keys.raw, values.raw
        for i in range(count):
            yield (
                all_keys[i * key_size : (i + 1) * key_size],
                all_values[i * value_size : (i + 1) * value_size],
            )


def items_singly(
    fd: int, name: str, key_size: int, value_size: int
) -> Iterator[tuple[bytes, bytes]]:
    """The same, by single calls: for kinds of maps that old kernels know no batches of."""
    seen: set[bytes] = set()
    key: bytes | None = None
    while (key := _next_key(fd, name, key, key_size)) is not None:
        if key in seen:  # the one before it was deleted meanwhile, and the kernel began anew
            continue
        seen.add(key)
        value = lookup(fd, name, key, value_size)
        if value is not None:
            yield key, value


def _next_key(fd: int, name: str, key: bytes | None, size: int) -> bytes | None:
    found = ctypes.create_string_buffer(size)
    result = int(_lib().bpf_map_get_next_key(fd, key, found))
    if result < 0 and result != -errno.ENOENT:
        raise _error("read map", name, -result)
    return found.raw if result == 0 else None


def batches(
    fd: int, name: str, key_size: int, value_size: int
) -> Iterator[tuple[memoryview, memoryview]]:
    """The same in pieces of a thousand or so: the keys, and the values, one behind the other."""
    for keys, values, count in _batches(fd, name, key_size, value_size):
        yield (
            memoryview(keys).cast("B")[: count * key_size],
            memoryview(values).cast("B")[: count * value_size],
        )


def count(fd: int, name: str, key_size: int, value_size: int) -> int:
    """How many entries a hash map has."""
    return sum(count for _, _, count in _batches(fd, name, key_size, value_size))


_Bytes = ctypes.Array[ctypes.c_char]


def _batches(
    fd: int, name: str, key_size: int, value_size: int
) -> Iterator[tuple[_Bytes, _Bytes, int]]:
    """The keys, the values and the number of entries of each batch."""
    size = 1024
    token_in: _Bytes | None = None
    token_out = ctypes.create_string_buffer(max(key_size, 4))
    opts = _BatchOpts(sz=ctypes.sizeof(_BatchOpts))
    while True:
        keys = ctypes.create_string_buffer(size * key_size)
        values = ctypes.create_string_buffer(size * value_size)
        entries = ctypes.c_uint32(size)
        result = int(
            _lib().bpf_map_lookup_batch(
                fd, token_in, token_out, keys, values, ctypes.byref(entries), ctypes.byref(opts)
            )
        )
        if result == -errno.ENOSPC:
            size *= 2  # one bucket holds more than that
            continue
        if result < 0 and result != -errno.ENOENT:
            raise _error("read map", name, -result)
        yield keys, values, entries.value
        if result == -errno.ENOENT:
            return
        token_in = ctypes.create_string_buffer(token_out.raw, len(token_out))


def possible_cpus() -> int:
    return int(_lib().libbpf_num_possible_cpus())


class MappedArray:
    """An array map as memory: ``view`` is its bytes, ``words`` its aligned 64-bit words.

    A store to ``words`` is one store of eight bytes; anything wider may tear under a reader.
    """

    def __init__(self, fd: int, name: str, *, value_size: int, max_entries: int) -> None:
        self.name = name
        self.stride = (value_size + 7) & ~7
        self.entries = max_entries
        page = mmap.PAGESIZE
        length = (self.stride * max_entries + page - 1) // page * page
        try:
            self._memory = mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            raise DatapathError("map into memory", name, error.errno or 0) from None
        self.view = memoryview(self._memory)[: self.stride * max_entries]
        self.words = self.view.cast("Q")

    def close(self) -> None:
        self.words.release()
        self.view.release()
        with contextlib.suppress(BufferError):
            self._memory.close()


# --- this process's memory ---------------------------------------------------------------------

_M_TRIM_THRESHOLD = -1
_M_ARENA_MAX = -8
_TRIM_BYTES = 128 << 10


def share_one_heap() -> None:
    """Let all threads allocate from one heap that is given back early; best before there are any.

    glibc gives each thread a heap of its own, and that keeps what its largest list needed: 5 MiB
    for three watches. Another libc has no such thing.
    """
    if hasattr(_libc(), "mallopt"):
        _libc().mallopt(_M_ARENA_MAX, 1)
        _libc().mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)


# --- the order of stores -----------------------------------------------------------------------

_MEMBARRIER_PRIVATE_EXPEDITED = 8
_MEMBARRIER_REGISTER_PRIVATE_EXPEDITED = 16
_NR_MEMBARRIER = {"aarch64": 283}.get(platform.machine(), 283)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


@functools.cache
def _register_barrier() -> None:
    _libc().syscall(_NR_MEMBARRIER, _MEMBARRIER_REGISTER_PRIVATE_EXPEDITED, 0, 0)


if platform.machine() in ("x86_64", "i686"):

    def store_barrier() -> None:
        """Stores before come before stores after, for every CPU. x86 keeps stores in order."""

else:

    def store_barrier() -> None:
        """Stores before come before stores after, for every CPU."""
        _register_barrier()
        _libc().syscall(_NR_MEMBARRIER, _MEMBARRIER_PRIVATE_EXPEDITED, 0, 0)


# --- network namespaces ------------------------------------------------------------------------

_CLONE_NEWNET = 0x40000000


def enter_netns(fd: int) -> None:
    """Put the calling thread, and no other, into a network namespace. Raises OSError."""
    if _libc().setns(fd, _CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


# --- the end of readers ------------------------------------------------------------------------


class GracePeriod:
    """Waits until every BPF program that runs now has ended.

    The kernel promises that to whoever updates a map of maps; the map made here is for that alone.
    """

    def __init__(self) -> None:
        self._inner = map_create("array", "grace_inner", key_size=4, value_size=4, max_entries=1)
        self._outer = map_create(
            "array_of_maps",
            "grace",
            key_size=4,
            value_size=4,
            max_entries=1,
            inner_fd=self._inner,
        )

    def wait(self) -> None:
        """8 to 30 ms on an idle machine; not for the thread that must answer."""
        update(self._outer, "grace", bytes(4), struct.pack("=I", self._inner))

    def close(self) -> None:
        os.close(self._outer)
        os.close(self._inner)


# --- programs and links ------------------------------------------------------------------------


def has_helper(prog_type: int, helper: int) -> bool:
    return int(_lib().libbpf_probe_bpf_helper(prog_type, helper, None)) == 1


def prog_info(fd: int) -> ProgInfo:
    ids = (ctypes.c_uint32 * 64)()
    buffer = ctypes.create_string_buffer(232)
    struct.pack_into("=I", buffer, 52, len(ids))
    struct.pack_into("=Q", buffer, 56, ctypes.addressof(ids))
    raw = _info(fd, buffer, "program")
    count = struct.unpack_from("=I", raw, 52)[0]
    return ProgInfo(
        id=struct.unpack_from("=I", raw, 4)[0],
        name=raw[64:80].split(b"\0")[0].decode(errors="replace"),
        tag=raw[8:16].hex(),
        map_ids=frozenset(ids[: min(count, len(ids))]),
        verified=struct.unpack_from("=I", raw, 216)[0],
    )


def load_empty(prog_type: int) -> int:
    """A program that returns 0 and does nothing else, to compare others with; its descriptor."""
    code = struct.pack("=BBhi", 0xB7, 0, 0, 0) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    return _call(
        "load", "empty program", "bpf_prog_load", prog_type, b"empty", b"GPL", code, 2, None
    )


# Where the members of struct __sk_buff are that a test run takes; all others must be zero.
_SKB_SIZE = 192
_SKB_MARK = 8
_SKB_INGRESS_IFINDEX = 36
_SKB_IFINDEX = 40
_SKB_GSO_SEGS = 164
_SKB_GSO_SIZE = 176

_RUN_CHECKSUM_COMPLETE = 4


def prog_test_run(
    fd: int,
    packet: bytes,
    *,
    ifindex: int = 0,
    ingress_ifindex: int = 0,
    mark: int = 0,
    gso_segs: int = 0,
    gso_size: int = 0,
    repeat: int = 1,
    checksum_complete: bool = False,
) -> RunResult:
    """Run a tc program on a packet that no device sees; nothing that it decides is done.

    ``packet`` is of 14 bytes at least, which the kernel reads as an Ethernet header. ``ifindex`` is
    a device of the caller's network namespace, 0 its loopback. With ``checksum_complete`` the
    kernel has summed the packet up, as many network cards do, and a program that leaves that sum
    wrong is an error (EBADMSG; a kernel before 6.16 knows no such flag, EINVAL).
    """
    context = bytearray(_SKB_SIZE)
    for at, value in (
        (_SKB_MARK, mark),
        (_SKB_INGRESS_IFINDEX, ingress_ifindex),
        (_SKB_IFINDEX, ifindex),
        (_SKB_GSO_SEGS, gso_segs),
        (_SKB_GSO_SIZE, gso_size),
    ):
        struct.pack_into("=I", context, at, value)
    out = ctypes.create_string_buffer(len(packet) + 256)
    context_out = ctypes.create_string_buffer(_SKB_SIZE)
    opts = _RunOpts(
        sz=ctypes.sizeof(_RunOpts),
        data_in=packet,
        data_out=ctypes.addressof(out),
        data_size_in=len(packet),
        data_size_out=len(out),
        ctx_in=bytes(context),
        ctx_out=ctypes.addressof(context_out),
        ctx_size_in=_SKB_SIZE,
        ctx_size_out=_SKB_SIZE,
        repeat=repeat,
        flags=_RUN_CHECKSUM_COMPLETE if checksum_complete else 0,
    )
    _call("run", "program", "bpf_prog_test_run_opts", fd, ctypes.byref(opts))
    return RunResult(
        verdict=ctypes.c_int32(opts.retval).value,
        packet=out.raw[: opts.data_size_out],
        mark=struct.unpack_from("=I", context_out, _SKB_MARK)[0],
        duration_ns=opts.duration,
    )


def prog_by_id(prog_id: int) -> int:
    return _call("open program", str(prog_id), "bpf_prog_get_fd_by_id", prog_id)


def link_info(fd: int) -> LinkInfo:
    raw = _info(fd, ctypes.create_string_buffer(64), "link")
    _, link_id, prog_id = struct.unpack_from("=III", raw)
    cgroup_id, attach_type = struct.unpack_from("=QI", raw, 16)
    return LinkInfo(link_id, prog_id, cgroup_id, attach_type)


def link_create(prog_fd: int, cgroup_fd: int, attach_type: int, name: str) -> int:
    """Attach beside whatever else is on the cgroup; returns the link's descriptor."""
    return _call("attach", name, "bpf_link_create", prog_fd, cgroup_fd, attach_type, None)


def link_update(link_fd: int, prog_fd: int, name: str) -> None:
    """Swap the program of a link, at once for every process."""
    _call("replace program of", name, "bpf_link_update", link_fd, prog_fd, None)


def cgroup_programs(cgroup_fd: int, attach_type: int) -> tuple[list[int], int]:
    """(program ids in their order, attach flags) of what is on this very cgroup."""
    flags = ctypes.c_uint32()
    count = ctypes.c_uint32(64)
    ids = (ctypes.c_uint32 * 64)()
    _call(
        "ask about",
        "cgroup",
        "bpf_prog_query",
        cgroup_fd,
        attach_type,
        0,
        ctypes.byref(flags),
        ids,
        ctypes.byref(count),
    )
    return list(ids[: count.value]), flags.value


# --- tc, without a qdisc (Linux 6.6) -----------------------------------------------------------

TCX_BEFORE = 8
TCX_AFTER = 16
_TCX_REPLACE = 4

_PROG_ATTACH = 8
_PROG_DETACH = 9
_PROG_QUERY = 16
_NR_BPF = {"x86_64": 321, "ppc64le": 361, "s390x": 351}.get(platform.machine(), 280)

# The members of union bpf_attr that these commands take; libbpf of Debian 12 knows no TCX.
_ATTACH_ATTR = struct.Struct(
    "=iIIIIIQ"
)  # device, program, type, flags, replaced, relative, revision
_QUERY_ATTR = struct.Struct("=iIIIQI4xQQQQ")  # device, type, flags (2), ids, count, unused


def tcx_programs(ifindex: int, attach_type: int) -> list[int] | None:
    """The ids of the programs on a device, in the order in which they run; None before 6.6."""
    ids = (ctypes.c_uint32 * 64)()
    attr = bytearray(
        _QUERY_ATTR.pack(ifindex, attach_type, 0, 0, ctypes.addressof(ids), len(ids), 0, 0, 0, 0)
    )
    result = _bpf(_PROG_QUERY, attr)
    if result in (-errno.EINVAL, -errno.ENOTSUP):
        return None
    if result < 0:
        raise _error("ask about", f"tcx of device {ifindex}", -result)
    count = _QUERY_ATTR.unpack(attr)[5]
    return list(ids[:count])


def tcx_attach(
    ifindex: int, attach_type: int, prog_fd: int, *, where: int = 0, instead_of: int = 0
) -> None:
    """Let a program run on a device, TCX_BEFORE or TCX_AFTER all others, or in another's place.

    It stays when its descriptors are closed. ``instead_of`` is a descriptor.
    """
    flags = _TCX_REPLACE if instead_of else where
    attr = _ATTACH_ATTR.pack(ifindex, prog_fd, attach_type, flags, instead_of, 0, 0)
    result = _bpf(_PROG_ATTACH, bytearray(attr))
    if result < 0:
        raise _error("attach to", f"tcx of device {ifindex}", -result)


def tcx_detach(ifindex: int, attach_type: int, prog_fd: int) -> bool:
    """False where it was not there."""
    attr = _ATTACH_ATTR.pack(ifindex, prog_fd, attach_type, 0, 0, 0, 0)
    result = _bpf(_PROG_DETACH, bytearray(attr))
    if result < 0 and result != -errno.ENOENT:
        raise _error("detach from", f"tcx of device {ifindex}", -result)
    return result >= 0


def _bpf(command: int, attr: bytearray) -> int:
    """The system call itself; a negative errno where it fails. ``attr`` may be written to."""
    memory = (ctypes.c_char * len(attr)).from_buffer(attr)
    result = int(_libc().syscall(_NR_BPF, command, memory, len(attr)))
    return result if result >= 0 else -ctypes.get_errno()
