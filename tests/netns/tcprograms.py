# SPDX-License-Identifier: Apache-2.0
"""Tiny tc programs that count their packets and give a verdict; and other people's ways to attach.

Written out by hand, so that a test of who runs where needs no compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ebpflb.datapath.ebpf import libbpf
from tests.netns.foreign import PROG_LOAD, _bpf

UNSPEC: Final = -1
"""TC_ACT_UNSPEC, and TCX_NEXT: whoever is next decides."""
OK: Final = 0
SHOT: Final = 2


def _insn(code: int, registers: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    return struct.pack("=BBhi", code, registers, offset, immediate)


def _counting(map_fd: int, verdict: int) -> bytes:
    return b"".join(
        [
            _insn(0x62, 0x0A, -4, 0),  # *(u32 *)(r10 - 4) = 0
            _insn(0xBF, 0xA2),  # r2 = r10
            _insn(0x07, 0x02, 0, -4),  # r2 += -4
            _insn(0x18, 0x11, 0, map_fd),  # r1 = the map
            _insn(0),
            _insn(0x85, 0, 0, 1),  # bpf_map_lookup_elem
            _insn(0x15, 0x00, 2, 0),  # if r0 == 0 skip the next two
            _insn(0xB7, 0x01, 0, 1),  # r1 = 1
            _insn(0xDB, 0x10, 0, 0),  # lock *(u64 *)(r0) += r1
            _insn(0xB7, 0x00, 0, verdict),  # r0 = verdict
            _insn(0x95),
        ]
    )


class Program:
    """A loaded program. ``runs`` is how many packets it has seen."""

    def __init__(self, name: str, verdict: int = UNSPEC) -> None:
        self.name = name
        self._map = libbpf.map_create("array", "runs", key_size=4, value_size=8, max_entries=1)
        code = ctypes.create_string_buffer(_counting(self._map, verdict))
        licence = ctypes.create_string_buffer(b"GPL")
        self.fd = _bpf(
            PROG_LOAD,
            struct.pack(
                "=IIQQIIQII16s",
                libbpf.PROG_SCHED_CLS,
                len(code) // 8,
                ctypes.addressof(code),
                ctypes.addressof(licence),
                *(0, 0, 0, 0, 0),
                name.encode(),
            ),
        )
        info = libbpf.prog_info(self.fd)
        self.id, self.map_ids = info.id, info.map_ids

    @property
    def runs(self) -> int:
        return int(
            struct.unpack("=Q", libbpf.lookup(self._map, "runs", bytes(4), 8) or bytes(8))[0]
        )

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._map)


@contextlib.contextmanager
def pinned(program: Program, folder: Path) -> Iterator[Path]:
    """Where `tc` and `bpftool` find it meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / program.name
    libbpf.obj_pin(program.fd, str(path))
    try:
        yield path
    finally:
        path.unlink()


def tc(*arguments: str) -> str:
    """The command, in the network namespace of the calling thread."""
    done = subprocess.run(["tc", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, (arguments, done.stderr)
    return done.stdout
