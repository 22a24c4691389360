# SPDX-License-Identifier: Apache-2.0
"""Other people's BPF programs and maps, as small as can be, to stand in the agent's way."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
from collections.abc import Iterator
from pathlib import Path

from ebpflb.datapath.ebpf import libbpf
from ebpflb.datapath.ebpf.attach import HOOKS

SYS_BPF = {"x86_64": 321, "aarch64": 280}[platform.machine()]
PROG_LOAD, PROG_ATTACH, PROG_DETACH, LINK_DETACH = 5, 8, 9, 34

ALONE = 0
OVERRIDABLE = 1
BESIDE_OTHERS = 2

_libc = ctypes.CDLL(None, use_errno=True)

# Before Linux 5.11 programs and maps are locked memory; libbpf raises the limit by itself.
with contextlib.suppress(ValueError):  # not allowed, and since then not needed
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

# struct bpf_insn: opcode, registers, offset, immediate
_EXIT = struct.pack("=BBhi", 0x95, 0, 0, 0)


def _set(register: int, value: int) -> bytes:
    return struct.pack("=BBhi", 0xB7, register, 0, value)


ALLOW = _set(0, 1) + _EXIT
REFUSE = _set(0, 0) + _EXIT
REFUSE_WITH_EACCES = (
    _set(1, -errno.EACCES)
    + struct.pack("=BBhi", 0x85, 0, 0, libbpf.HELPER_SET_RETVAL)
    + _set(0, 0)
    + _EXIT
)


def _bpf(command: int, attributes: bytes) -> int:
    buffer = ctypes.create_string_buffer(attributes, 128)
    result: int = _libc.syscall(SYS_BPF, command, buffer, len(buffer))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"bpf command {command}: {os.strerror(code)}")
    return result


def _attach_type(hook: str) -> tuple[int, int]:
    return next((one.prog_type, one.attach_type) for one in HOOKS if one.name == hook)


@contextlib.contextmanager
def program(instructions: bytes, hook: str = "connect4", name: str = "foreign") -> Iterator[int]:
    """A loaded program; its descriptor."""
    prog_type, attach_type = _attach_type(hook)
    code = ctypes.create_string_buffer(instructions)
    licence = ctypes.create_string_buffer(b"GPL")
    fd = _bpf(
        PROG_LOAD,
        struct.pack(
            "=IIQQIIQII16sII",
            prog_type,
            len(instructions) // 8,
            ctypes.addressof(code),
            ctypes.addressof(licence),
            0,
            0,
            0,
            0,
            0,
            name.encode(),
            0,
            attach_type,
        ),
    )
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def attached(
    instructions: bytes, cgroup: Path, *, hook: str = "connect4", flags: int = BESIDE_OTHERS
) -> Iterator[None]:
    """A program on a cgroup, without a link, as older tools attach it."""
    _, attach_type = _attach_type(hook)
    folder = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with program(instructions, hook) as fd:
            _bpf(PROG_ATTACH, struct.pack("=IIII", folder, fd, attach_type, flags))
            try:
                yield
            finally:
                _bpf(PROG_DETACH, struct.pack("=IIII", folder, fd, attach_type, 0))
    finally:
        os.close(folder)


def detach_link(pin: Path) -> None:
    """What `bpftool link detach` does: the pin stays, and leads to nothing."""
    fd = libbpf.obj_get(str(pin))
    try:
        _bpf(LINK_DETACH, struct.pack("=I", fd))
    finally:
        os.close(fd)


def pin_a_program(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with program(ALLOW) as fd:
        libbpf.obj_pin(fd, str(path))


def pin_a_map(path: Path) -> None:
    """A hash map of a shape that no map of ours has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = libbpf.map_create("hash", "foreign", key_size=4, value_size=12, max_entries=7)
    try:
        libbpf.obj_pin(fd, str(path))
    finally:
        os.close(fd)


def pin_a_link(path: Path, cgroup: Path, hook: str = "getpeername4") -> None:
    """A harmless program on a cgroup, by a link that is pinned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with program(ALLOW, hook) as fd:
            link = libbpf.link_create(fd, folder, _attach_type(hook)[1], hook)
            try:
                libbpf.obj_pin(link, str(path))
            finally:
                os.close(link)
    finally:
        os.close(folder)
