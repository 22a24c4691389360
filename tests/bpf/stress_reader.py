"""Runs the stress test's reader programs in a tight loop, on one CPU, until its input ends.

    stress_reader.py CPU FD:REPEAT [FD:REPEAT…]

Each program is run REPEAT times a system call (BPF_PROG_TEST_RUN), one program after the other. It
must know nothing of what the programs look for: they count in a map. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import select
import sys
from collections.abc import Sequence

_PACKET = bytes(64)


class _TestRunOpts(ctypes.Structure):
    """libbpf's bpf_test_run_opts."""

    _fields_ = (
        ("sz", ctypes.c_size_t),
        ("data_in", ctypes.c_char_p),
        ("data_out", ctypes.c_void_p),
        ("data_size_in", ctypes.c_uint32),
        ("data_size_out", ctypes.c_uint32),
        ("ctx_in", ctypes.c_void_p),
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


def main(arguments: Sequence[str]) -> int:
    lib = ctypes.CDLL("libbpf.so.1")
    os.sched_setaffinity(0, {int(arguments[0])})
    programs = [tuple(map(int, one.split(":"))) for one in arguments[1:]]
    while not select.select([0], [], [], 0)[0]:
        for fd, repeat in programs:
            opts = _TestRunOpts(
                sz=ctypes.sizeof(_TestRunOpts),
                data_in=_PACKET,
                data_size_in=len(_PACKET),
                repeat=repeat,
            )
            error = lib.bpf_prog_test_run_opts(fd, ctypes.byref(opts))
            if error:
                sys.stderr.write(f"test run: {os.strerror(-error)}\n")
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
