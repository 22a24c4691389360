# SPDX-License-Identifier: Apache-2.0
"""Facts about this node that are read from the kernel, for messages and decisions alike."""

from __future__ import annotations

from pathlib import Path

_LISTEN = "0A"


def port_holder(port: int) -> str:
    """Who listens on TCP ``port`` in this network namespace: ``kube-proxy (process 4711)``.

    "" where nobody does, or where it cannot be found out.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return next((holder for inode in inodes if (holder := _holder_of(inode))), "")


def _holder_of(inode: str) -> str:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for fd in (process / "fd").iterdir():
                if str(fd.readlink()) == inode:
                    return f"{(process / 'comm').read_text().strip()} (process {process.name})"
        except OSError:
            continue  # it ended, or is not ours to look at
    return ""
