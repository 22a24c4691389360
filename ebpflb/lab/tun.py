# SPDX-License-Identifier: Apache-2.0
"""Joins two tun devices: what leaves one arrives at the other, packets without an Ethernet header.

Each end is in a namespace of its own, as WireGuard or a provider's IP link would be; here they are
two file descriptors that this process inherits. It must know nothing of the lab, and imports
nothing outside the standard library.

It says {"ready": true} on standard output and carries packets until the end of its input.
"""

import json
import os
import select
import sys
from collections.abc import Sequence
from typing import Final

__all__ = ["main"]

LARGEST: Final = 1 << 16
BATCH: Final = 64


def _carry(source: int, target: int) -> None:
    for _ in range(BATCH):
        try:
            packet = os.read(source, LARGEST)
        except OSError:  # nothing left, or the device is down
            return
        try:
            os.write(target, packet)
        except OSError:  # down, or full: a wire loses it
            continue


def main(arguments: Sequence[str]) -> int:
    """Carry packets between the two descriptors that the arguments number."""
    one, other = map(int, arguments)
    across = {one: other, other: one}
    for descriptor in across:
        os.set_blocking(descriptor, False)
    sys.stdout.write(json.dumps({"ready": True, "pid": os.getpid()}) + "\n")
    sys.stdout.flush()
    while True:
        for source in select.select([0, *across], [], [])[0]:
            if source == 0:
                return 0
            _carry(source, across[source])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
