# SPDX-License-Identifier: Apache-2.0
"""What the programs at tc take for one packet, as the kernel itself measures it (a test run).

On maps of its own, with the programs as the agent loads them. A test run hands the same packet to
the program again and again, and keeps what the program wrote; so there are two flows that lead to
each other: every run translates, and the next one finds the other flow.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final, NamedTuple

from ebpflb.datapath.ebpf import abi, flows, libbpf, loader
from ebpflb.datapath.ebpf.maps import Map, PinFolder, sizes
from ebpflb.datapath.ebpf.programs import tc_build
from ebpflb.model import Address, Protocol

_RUNS: Final = 1_000_000
_REPEATS: Final = 7
_CLIENT_PORT: Final = 40_000
_SERVICE_PORT: Final = 80
_BACKEND_PORT: Final = 8080
_ACK: Final = 0x10
_ETHERTYPES: Final = {4: 0x0800, 6: 0x86DD}
_PAYLOAD: Final = bytes(20)

_ADDRESSES: Final[Mapping[int, tuple[bytes, ...]]] = {
    4: tuple(IPv4Address(text).packed for text in ("192.0.2.1", "198.51.100.1", "203.0.113.1")),
    6: tuple(IPv6Address(f"2001:db8:{n}::1").packed for n in range(3)),
}
"""A client, a Service and a backend, of the ranges for documentation."""


class PacketCost(NamedTuple):
    """Nanoseconds a packet: with the loop that the kernel runs it in, and without that."""

    ns: float
    net_ns: float


def per_packet(*, runs: int = _RUNS, repeats: int = _REPEATS) -> Mapping[str, PacketCost]:
    """The least of some runs, by what kind of packet it is."""
    with _programs() as (programs, maps):
        empty = libbpf.load_empty(libbpf.PROG_SCHED_CLS)
        try:
            floor = _least(empty, _packet(4), runs, repeats)
        finally:
            os.close(empty)
        found = {
            "other": _least(programs["ebpflb_ingress"], _packet(4), runs, repeats),
            "other_reply": _least(programs["ebpflb_egress"], _packet(4), runs, repeats),
        }
        for version in _ADDRESSES:
            _open_flows(maps["conntrack"], version)
            for name, program in (("forward", "ebpflb_ingress"), ("reverse", "ebpflb_egress")):
                packet = _packet(version, turned=name == "reverse")
                found[f"{name}{version}"] = _least(programs[program], packet, runs, repeats)
    return {name: PacketCost(ns, ns - floor) for name, ns in found.items()}


def _least(fd: int, packet: bytes, runs: int, repeats: int) -> float:
    return min(libbpf.prog_test_run(fd, packet, repeat=runs).duration_ns for _ in range(repeats))


@contextlib.contextmanager
def _programs() -> Iterator[tuple[Mapping[str, int], Mapping[str, Map]]]:
    """The programs, loaded but nowhere attached, and their maps, of which no pin stays."""
    folder = PinFolder(Path(f"/sys/fs/bpf/ebpflb-perpacket-{os.getpid()}"))
    folder.create()
    programs: Mapping[str, int] = {}
    maps: Mapping[str, Map] = {}
    try:
        maps = folder.open_or_create(sizes())
        programs = loader.load(tc_build(maps))
        yield programs, maps
    finally:
        for fd in programs.values():
            os.close(fd)
        for one in maps.values():
            one.close()
        for path in folder.path.iterdir():
            path.unlink()
        folder.path.rmdir()


def _mapped(address: bytes) -> Address:
    return Address(address if len(address) == 16 else bytes(10) + b"\xff\xff" + address)


def _open_flows(conntrack: Map, version: int) -> None:
    """Forward from the Service to the backend and the other way round, and both back."""
    client, service, backend = map(_mapped, _ADDRESSES[version])
    client_port = _CLIENT_PORT.to_bytes(2)
    ends = ((service, _SERVICE_PORT.to_bytes(2)), (backend, _BACKEND_PORT.to_bytes(2)))
    key, flow = abi.LAYOUTS["flow_key"], abi.LAYOUTS["flow"]
    now = time.monotonic_ns()
    for (here, port), (there, other_port) in (ends, ends[::-1]):
        for kind, packed in (
            ("FLOW_FORWARD", key.pack(client, here, client_port, port, Protocol.TCP)),
            ("FLOW_REVERSE", key.pack(here, client, port, client_port, Protocol.TCP)),
        ):
            value = flow.make(
                check_head=flows.check(packed),
                kind=abi.CONSTANTS[kind],
                address=there,
                port=other_port,
                client_port=client_port,
                id=1,
                used_ns=now,
                created_ns=now,
                check_tail=flows.check(packed),
            )
            conntrack.update([(packed, value)])


# --- packets --------------------------------------------------------------------------------------


def _packet(version: int, *, turned: bool = False) -> bytes:
    """A TCP segment of an open connection in an Ethernet frame, 74 bytes with IPv4.

    Only what the programs read and mend is right; nobody else sees it.
    """
    client, service, _ = _ADDRESSES[version]
    source, target = (service, client) if turned else (client, service)
    ports = (_SERVICE_PORT, _CLIENT_PORT) if turned else (_CLIENT_PORT, _SERVICE_PORT)
    tcp = struct.pack("!HHIIBBHHH", *ports, 1, 1, 5 << 4, _ACK, 65535, 0, 0) + _PAYLOAD
    if version == 4:
        head = struct.pack("!BBHHHBBH", 0x45, 0, 20 + len(tcp), 1, 0, 64, Protocol.TCP, 0)
    else:
        head = struct.pack("!IHBB", 6 << 28, len(tcp), Protocol.TCP, 64)
    return bytes(12) + _ETHERTYPES[version].to_bytes(2) + head + source + target + tcp
