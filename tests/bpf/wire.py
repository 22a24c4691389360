"""A packet over a real device, with what a test run cannot give it: a checksum still to be filled
in (CHECKSUM_PARTIAL), as the kernel and virtual machines leave it to the device; or any length.

It must know nothing of Services.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections.abc import Iterator

from ebpflb.datapath.ebpf import tc
from ebpflb.lab import Lab, Namespace

_SOL_PACKET = 263
_PACKET_VNET_HDR = 15
_VNET_HEADER = struct.Struct("=BBHHHH")
_NEEDS_CSUM = 1
_ETH_P_ALL = 3

PATIENCE_S = 10


class Wire:
    """A veth between two namespaces; what passes it is not touched beyond."""

    def __init__(self, lab: Lab) -> None:
        self._here, self._there = lab.namespace("wire-a"), lab.namespace("wire-b")
        lab.link(self._here, "wire", self._there, "wire", mtu=65535)
        self._number = self._here.links(lambda links: links.index("wire"))

    def leaves(
        self, program: int, packet: bytes, *, sum_from: int = 0, field: int = 0
    ) -> tuple[bytes, bool]:
        """The frame as the program leaves it at egress, and whether it is still to be summed up.

        With ``sum_from`` it is, from there on; ``field`` behind that is where the sum goes.
        """
        header = _VNET_HEADER.pack(_NEEDS_CSUM if sum_from else 0, 0, 0, 0, sum_from, field)
        with self._attached(program), _opened(self._there) as there, _opened(self._here) as here:
            here.send(header + packet)
            while select.select([there], [], [], PATIENCE_S)[0]:
                data = there.recv(1 << 17)
                if len(data) == len(header) + len(packet):
                    return data[len(header) :], bool(data[0] & _NEEDS_CSUM)
        raise AssertionError("it never came")

    @contextlib.contextmanager
    def _attached(self, program: int) -> Iterator[None]:
        at = tc.At(self._number, "wire", tc.Direction.EGRESS)

        def attach() -> tc.Tc:
            one = tc.Tc()
            one.ensure(at, program, tc.Place.LAST)
            return one

        one = self._here.inside(attach)
        try:
            yield
        finally:
            self._here.inside(lambda: one.remove(at))
            one.close()


@contextlib.contextmanager
def _opened(end: Namespace) -> Iterator[socket.socket]:
    def opened() -> socket.socket:
        one = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL))
        one.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
        one.bind(("wire", _ETH_P_ALL))
        return one

    with end.inside(opened) as one:
        yield one
