# SPDX-License-Identifier: Apache-2.0
"""Counts the packets that pass an interface, by flow: the witness on each link of a lab.

It shows what no client and no server can see: that nothing reached a removed backend, which
address a packet bore on the wire, what an ICMP error said and held. It must know nothing of the
lab, and imports nothing outside the standard library.

It says {"ready": true} on standard output when it listens; each line on standard input is answered
by what has passed so far, and so is the end of the input, after which it exits:

    {"packets": 7, "flows": [{"direction": "in", "protocol": "tcp", "source": "10.244.1.2:4242",
      "destination": "10.244.1.3:80", "packets": 4, "bytes": 240, "flags": "SFA", "ttl": 63}, ...]}

"in" is what arrived at the interface, "out" what left by it. Bytes are of the IP packet. ICMP
errors have `icmp` ("type/code") and `about`, the flow that the packet inside belongs to.
"""

import argparse
import json
import os
import select
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

__all__ = ["Flow", "main", "parse"]

ETH_P_ALL: Final = 3
ETH_P_IP: Final = 0x0800
ETH_P_IPV6: Final = 0x86DD
PACKET_OUTGOING: Final = 4
SO_RCVBUFFORCE: Final = 33
MAX_FLOWS: Final = 20_000
SNAP: Final = 256
V6_EXTENSIONS: Final = frozenset({0, 43, 60})
PROTOCOLS: Final = {1: "icmp", 6: "tcp", 17: "udp", 58: "icmp6", 132: "sctp"}
FLAGS: Final = "FSRPAUEC"


class Flow(NamedTuple):
    """What packets have in common that are counted together."""

    protocol: str
    source: str
    destination: str
    icmp: str = ""
    about: str = ""


class _Packet(NamedTuple):
    flow: Flow
    length: int
    ttl: int
    flags: int


def _spell(host: str, port: int | None) -> str:
    if port is None:
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(packet: bytes, *, inner: bool = False) -> _Packet | None:
    """Read an IP packet; `inner` is one that an ICMP error holds. None if it is neither IP."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 20:
        length, fragment, ttl, number = struct.unpack("!2xHxxHBB", packet[:10])
        hosts = [socket.inet_ntop(socket.AF_INET, packet[at : at + 4]) for at in (12, 16)]
        rest = packet[(packet[0] & 15) * 4 :]
        first = not fragment & 0x1FFF
    elif version == 6 and len(packet) >= 40:
        payload, number, ttl = struct.unpack("!4xHBB", packet[:8])
        length = payload + 40
        hosts = [socket.inet_ntop(socket.AF_INET6, packet[at : at + 16]) for at in (8, 24)]
        rest, number, first = _skip_extensions(packet[40:], number)
    else:
        return None
    protocol = PROTOCOLS.get(number, str(number))
    ports: list[int | None] = [None, None]
    icmp = about = ""
    flags = 0
    if not first:
        protocol += " fragment"
    elif number in {6, 17, 132} and len(rest) >= 4:
        ports = list(struct.unpack("!HH", rest[:4]))
        flags = rest[13] if number == 6 and len(rest) > 13 else 0
    elif number in {1, 58} and len(rest) >= 8 and not inner:
        icmp = f"{rest[0]}/{rest[1]}"
        if (number == 1 and rest[0] in {3, 5, 11, 12}) or (number == 58 and rest[0] < 128):
            held = parse(rest[8:], inner=True)
            about = " ".join(held.flow[:3]) if held else "?"
    source, destination = map(_spell, hosts, ports)
    return _Packet(Flow(protocol, source, destination, icmp, about), length, ttl, flags)


def _skip_extensions(rest: bytes, number: int) -> tuple[bytes, int, bool]:
    """Walk an IPv6 packet's extension headers; False for a fragment that is not the first."""
    first = True
    while len(rest) >= 8:
        if number in V6_EXTENSIONS:
            number, rest = rest[0], rest[(rest[1] + 1) * 8 :]
        elif number == 44:
            first = first and not struct.unpack("!H", rest[2:4])[0] & 0xFFF8
            number, rest = rest[0], rest[8:]
        else:
            break
    return rest, number, first


class _Counts:
    def __init__(self) -> None:
        self.packets = 0
        self.missed = 0
        self._flows: dict[tuple[str, Flow], list[int]] = {}

    def add(self, packet: _Packet, direction: str) -> None:
        """Count one packet."""
        self.packets += 1
        key = (direction, packet.flow)
        if key not in self._flows:
            if len(self._flows) >= MAX_FLOWS:
                self.missed += 1
                return
            self._flows[key] = [0, 0, 0, 0]
        counts = self._flows[key]
        counts[0] += 1
        counts[1] += packet.length
        counts[2] |= packet.flags
        counts[3] = packet.ttl

    def report(self) -> dict[str, Any]:
        """Return what is printed."""
        flows: list[dict[str, Any]] = []
        for (direction, flow), (packets, length, flags, ttl) in self._flows.items():
            told: dict[str, Any] = {"direction": direction, **flow._asdict()}
            told |= {"packets": packets, "bytes": length, "ttl": ttl}
            told["flags"] = "".join(flag for bit, flag in enumerate(FLAGS) if flags & 1 << bit)
            flows.append(told)
        return {"packets": self.packets, "missed": self.missed, "flows": flows}


def _drain(sock: socket.socket, counts: _Counts) -> None:
    while True:
        try:
            data, (_, kind, direction, *_) = sock.recvfrom(SNAP)
        except (BlockingIOError, OSError):  # OSError: the interface went down
            return
        if kind not in {ETH_P_IP, ETH_P_IPV6}:
            continue
        packet = parse(data)
        if packet is not None:
            counts.add(packet, "out" if direction == PACKET_OUTGOING else "in")


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Count until the end of the input."""
    parser = argparse.ArgumentParser(prog="ebpflb.lab.capture", description=__doc__.split("\n")[0])
    parser.add_argument("device")
    device = parser.parse_args(arguments).device
    # SOCK_DGRAM: without the link's header, so that every kind of device looks the same.
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_ALL)) as sock:
        sock.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 32 << 20)
        sock.bind((device, ETH_P_ALL))
        sock.setblocking(False)  # noqa: FBT003 - its only argument
        counts = _Counts()
        _say({"ready": True, "pid": os.getpid()})
        while True:
            ready = select.select([sock.fileno(), 0], [], [])[0]
            _drain(sock, counts)
            if 0 in ready:
                more = os.read(0, 4096)
                # What passed before the question is in the socket's queue by now.
                _drain(sock, counts)
                _say(counts.report())
                if not more:
                    return 0


if __name__ == "__main__":
    sys.exit(main())
