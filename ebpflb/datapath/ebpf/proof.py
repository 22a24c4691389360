# SPDX-License-Identifier: Apache-2.0
"""Whether the packet programs of a device run: a packet of our own goes out of it and tells.

It is sent to an address that nobody has, from the device itself. The program at egress knows it by
its number, notes that, and turns it round to the device's ingress, where the other program notes it
and drops it. Where none of ours runs it leaves the device, and nobody answers. This file must not
know how the programs got there.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Any, Final

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.devices import Device, Header
from ebpflb.datapath.ebpf.encode import PROBE_ADDRESSES, PROBE_PORT
from ebpflb.datapath.ebpf.libbpf import MappedArray
from ebpflb.datapath.ebpf.tc import Direction
from ebpflb.model import Family

PROBE: Final = abi.LAYOUTS["probe"]
_SLOTS: Final = {
    direction: abi.CONSTANTS[f"HOOK_{direction.name}"] * PROBE.size for direction in Direction
}
_WAIT_S: Final = 0.2
"""What is turned round comes in at once, unless its CPU is busy with other packets."""
_WAIT_AGAIN_S: Final = 0.02
"""For one that was waited for in vain: a node may have hundreds of such devices."""

_ETH_P_IP: Final = 0x0800
_IPV4: Final = struct.Struct("!BBHHHBBH4s4s")
_UDP: Final = struct.Struct("!HHHH")
_NUMBER: Final = struct.Struct("=Q")


class Prover:
    """Sends the packets; ``probe`` is the map of that name. Not for several threads."""

    def __init__(self, probe: MappedArray) -> None:
        self._probe = probe

    def prove(self, device: Device, *, was_silent: bool = False) -> frozenset[Direction]:
        """The hooks of this device at which a program of these maps runs. Raises OSError."""
        number = _NUMBER.unpack(os.urandom(_NUMBER.size))[0] | 1
        for slot in _SLOTS.values():
            self._probe.words[(slot + PROBE.offsets["expected"]) // 8] = number
        with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM) as sender:
            # To the device's own address: whoever is beyond it takes it for somebody else's.
            to = device.mac if device.header is Header.ETHERNET else b""
            packet = _packet(number)
            sender.sendto(packet, (device.name, _ETH_P_IP, 0, 0, to))
        # Egress is over when the packet has been sent.
        if not self._has_seen(Direction.EGRESS, number):
            return frozenset()
        until = time.monotonic() + (_WAIT_AGAIN_S if was_silent else _WAIT_S)
        while not (came_in := self._has_seen(Direction.INGRESS, number)):
            if time.monotonic() > until:
                break
            with contextlib.suppress(InterruptedError):
                time.sleep(0.0005)
        return frozenset(Direction) if came_in else frozenset({Direction.EGRESS})

    def _has_seen(self, direction: Direction, number: int) -> bool:
        slot = _SLOTS[direction]
        seen: Any = PROBE.unpack(self._probe.view[slot : slot + PROBE.size])
        return bool(seen.socket == number)


def _packet(number: int) -> bytes:
    """IPv4, which a program sees on any device: UDP to the probe's frontend, with the number."""
    nobody = PROBE_ADDRESSES[Family.IPV4][12:]
    body = _NUMBER.pack(number)
    udp = _UDP.pack(PROBE_PORT, PROBE_PORT, _UDP.size + len(body), 0) + body
    head = [0x45, 0, _IPV4.size + len(udp), 0, 0, 1, socket.IPPROTO_UDP, 0, nobody, nobody]
    head[7] = _checksum(_IPV4.pack(*head))
    return _IPV4.pack(*head) + udp


def _checksum(header: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(header) // 2}H", header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
