# SPDX-License-Identifier: Apache-2.0
"""Flows as programs leave them in the tables, made without any program."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ebpflb.datapath.ebpf import abi, flows
from ebpflb.datapath.ebpf.flows import FLOW, FLOW_KEY
from ebpflb.model import format_address, parse_address

C = abi.CONSTANTS

End = tuple[str, int]

CLIENT: End = ("192.0.2.9", 40000)
FRONTEND: End = ("10.96.0.10", 80)
BACKEND: End = ("10.244.1.5", 8080)

CREATED_NS = 1
NOW_NS = 100 * 86_400 * 10**9


def end(address: bytes, port: bytes) -> End:
    return format_address(address), int.from_bytes(port)


class Made(NamedTuple):
    """A flow; ``items`` are its halves (key, value), the forward one first."""

    protocol: int
    items: tuple[tuple[bytes, bytes], ...]

    @property
    def halves(self) -> list[Any]:
        return [FLOW.unpack(value) for _, value in self.items]

    @property
    def keys(self) -> list[bytes]:
        return [key for key, _ in self.items]


def made(
    protocol: int,
    *,
    client: End = CLIENT,
    frontend: End = FRONTEND,
    backend: End = BACKEND,
    port_at_backend: int = 0,
    idle: tuple[float, float] = (0, 0),
    seen: tuple[int, int] = (0, 0),
    answered: bool = True,
    foreign: bool = False,
    now_ns: int = NOW_NS,
    **members: Any,
) -> Made:
    """``idle`` (seconds) and ``seen``: of the client's way, and of the way back."""
    seen_as = (client[0], port_at_backend or client[1])
    forward = _key(client, frontend, protocol)
    reverse = _key(backend, seen_as, protocol)
    used_ns = [now_ns - int(seconds * 10**9) for seconds in idle]
    if foreign:
        one = _half(forward, kind=C["FLOW_FOREIGN"], used_ns=used_ns[0], **members)
        return Made(protocol, (one,))
    members = {"created_ns": CREATED_NS if answered else used_ns[1], **members}
    there = _half(
        forward,
        kind=flows.FORWARD,
        used_ns=used_ns[0],
        seen=seen[0],
        address=parse_address(backend[0]),
        port=backend[1].to_bytes(2),
        client_port=seen_as[1].to_bytes(2),
        **members,
    )
    back = _half(
        reverse,
        kind=flows.REVERSE,
        used_ns=used_ns[1],
        seen=seen[1],
        address=parse_address(frontend[0]),
        port=frontend[1].to_bytes(2),
        client_port=client[1].to_bytes(2),
        **members,
    )
    return Made(protocol, (there, back))


def only(flow: Made, kind: str) -> Made:
    """The LRU has taken all but this half."""
    return flow._replace(items=(flow.items[("forward", "reverse").index(kind)],))


def _key(source: End, target: End, protocol: int) -> bytes:
    return FLOW_KEY.pack(
        parse_address(source[0]),
        parse_address(target[0]),
        source[1].to_bytes(2),
        target[1].to_bytes(2),
        protocol,
    )


def _half(key: bytes, **members: Any) -> tuple[bytes, bytes]:
    check = flows.check(key)
    members = {"created_ns": CREATED_NS, **members}
    return key, FLOW.make(check_head=check, check_tail=check, **members)


def used_ns_of(value: bytes) -> int:
    at = FLOW.offsets["used_ns"]
    return int.from_bytes(value[at : at + 8], sys.byteorder)


def used_at(value: bytes, used_ns: int) -> bytes:
    """The half as it is once a packet has come."""
    at = FLOW.offsets["used_ns"]
    return value[:at] + used_ns.to_bytes(8, sys.byteorder) + value[at + 8 :]
