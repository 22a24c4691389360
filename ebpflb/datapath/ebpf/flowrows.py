# SPDX-License-Identifier: Apache-2.0
"""Entries of the flow tables as rows: one for each flow, whichever of its halves are there. Pure.

As in rows.py, the members are the JSON keys that `map dump` promises. This file must not know where
an entry was read, nor how a row is printed.
"""

from __future__ import annotations

import functools
import struct
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ebpflb.datapath.ebpf import abi, flows
from ebpflb.datapath.ebpf.flows import FLOW, FLOW_KEY
from ebpflb.datapath.ebpf.rows import Row, address_key, flag_words, name_key, protocol_word
from ebpflb.model import Family, family_of, format_address

FRAGMENT_KEY: Final = abi.LAYOUTS["fragment_key"]
FRAGMENT: Final = abi.LAYOUTS["fragment"]

_FLAGS: Final = {
    abi.CONSTANTS["FLOW_MASQUERADE"]: "masquerade",
    abi.CONSTANTS["FLOW_HOST"]: "host",
}
_NS_PER_S: Final = 10**9

FORWARD_HALF: Final = "forward"
REVERSE_HALF: Final = "reverse"

_ORDER: Final = struct.Struct(">IIBB16s2sB16s2s")
"""Service, id, protocol, then client and frontend: family, address, port. Compared as bytes."""


class FlowRow(Row, frozen=True):
    """``port_at_backend``: the client's, as the backend sees it.

    ``state``: new, nobody has answered; open; closing, one end has finished; closed, both have, or
    one has reset; foreign, a packet for ``frontend`` is an answer to others and there is no
    backend. ``flags`` are masquerade and host (this node began it, past the socket programs).
    ``halves``: forward, reverse; of a foreign one forward alone.
    """

    protocol: str
    client: str
    client_port: int
    frontend: str
    frontend_port: int
    backend: str | None
    backend_port: int | None
    port_at_backend: int | None
    state: str
    flags: list[str]
    halves: list[str]
    idle_seconds: float
    age_seconds: float
    id: int
    service: str | None


class FragmentRow(Row, frozen=True):
    """A datagram in pieces, by its number; the ports are those that its head had."""

    protocol: str
    source: str
    target: str
    datagram: int
    source_port: int
    target_port: int


_Half = tuple[bytes, bytes]
"""A key and its value: small, since all that still wait for their other half are kept."""


def flow_rows(
    table: str, items: Iterable[_Half], names: Mapping[int, str], *, now_ns: int
) -> list[FlowRow]:
    """By service, protocol and client. ``now_ns`` is on the clock of CLOCK_MONOTONIC."""
    make = _Maker(table, names, now_ns)
    waiting: dict[bytes, _Half] = {}  # by the key of the half that they wait for
    for item in items:
        key, value = item
        half: Any = FLOW.unpack(value)
        if half.kind == flows.FOREIGN:
            make.row(item)
            continue
        first = waiting.pop(key, None)
        if first and _are_one(first, item):
            make.row(first, item)
            continue
        if first:
            make.row(first)
        other = flows.other_key(FLOW_KEY.unpack(key), half)
        if other in waiting:
            make.row(waiting[other])
        waiting[other] = item
    for item in waiting.values():
        make.row(item)
    return make.sorted()


def _are_one(one: _Half, other: _Half) -> bool:
    return flows.is_other(FLOW_KEY.unpack(one[0]), FLOW.unpack(one[1]), FLOW.unpack(other[1]))


class _Maker:
    """Full tables have many rows: what they have in common is made once."""

    def __init__(self, table: str, names: Mapping[int, str], now_ns: int) -> None:
        self._table = table
        self._names = names
        self._now_ns = now_ns
        in_order = sorted({name_key(name) for name in names.values()})
        self._ranks = {name: rank for rank, (_, name) in enumerate(in_order)}
        self._rows: list[tuple[bytes, FlowRow]] = []
        self._text = functools.lru_cache(maxsize=None)(format_address)
        self._flags = functools.lru_cache(maxsize=None)(lambda bits: flag_words(bits, _FLAGS))

    def row(self, item: _Half, other_item: _Half | None = None) -> None:
        """Of one half, or of both."""
        ends: Any = FLOW_KEY.unpack(item[0])
        half: Any = FLOW.unpack(item[1])
        other: Any = FLOW.unpack(other_item[1]) if other_item else None
        client, frontend, backend, seen_port = _ends(ends, half)
        # One that was put back is younger than its flow.
        created_ns = min(half.created_ns, other.created_ns if other else half.created_ns)
        row = FlowRow(
            protocol=protocol_word(ends.protocol),
            client=self._text(client[0]),
            client_port=int.from_bytes(client[1]),
            frontend=self._text(frontend[0]),
            frontend_port=int.from_bytes(frontend[1]),
            backend=self._text(backend[0]) if backend else None,
            backend_port=int.from_bytes(backend[1]) if backend else None,
            port_at_backend=int.from_bytes(seen_port) if backend else None,
            state=self._state(half, other),
            flags=self._flags(half.flags),
            halves=_halves(half, other),
            idle_seconds=round(flows.idle_ns(half, other, self._now_ns) / _NS_PER_S, 3),
            age_seconds=round(max(0, self._now_ns - created_ns) / _NS_PER_S, 3),
            id=half.id,
            service=self._names.get(half.id),
        )
        order = _ORDER.pack(
            self._ranks.get(row.service or "", len(self._ranks)),
            half.id,
            ends.protocol,
            *(*address_key(client[0]), client[1]),
            *(*address_key(frontend[0]), frontend[1]),
        )
        self._rows.append((order, row))

    def _state(self, half: Any, other: Any | None) -> str:
        if half.kind == flows.FOREIGN:
            return "foreign"
        if flows.is_closed(half, other):
            return "closed"
        if (half.seen | (other.seen if other else 0)) & flows.SEEN_FIN:
            return "closing"
        return "open" if flows.is_answered(self._table, half, other) else "new"

    def sorted(self) -> list[FlowRow]:
        self._rows.sort(key=lambda entry: entry[0])
        return [row for _, row in self._rows]


_End = tuple[bytes, bytes]
"""An address and a port."""


def _ends(ends: Any, half: Any) -> tuple[_End, _End, _End | None, bytes]:
    """Client, frontend, backend, and the client's port as the backend sees it."""
    if half.kind == flows.REVERSE:
        return (
            (ends.target, half.client_port),
            (half.address, half.port),
            (ends.source, ends.source_port),
            ends.target_port,
        )
    client, frontend = (ends.source, ends.source_port), (ends.target, ends.target_port)
    backend = None if half.kind == flows.FOREIGN else (half.address, half.port)
    return client, frontend, backend, half.client_port


_BOTH: Final = [FORWARD_HALF, REVERSE_HALF]
_FORWARD_ONLY: Final = [FORWARD_HALF]
_REVERSE_ONLY: Final = [REVERSE_HALF]


def _halves(half: Any, other: Any | None) -> list[str]:
    if other:
        return _BOTH
    return _REVERSE_ONLY if half.kind == flows.REVERSE else _FORWARD_ONLY


def fragment_rows(items: Iterable[_Half]) -> list[FragmentRow]:
    """By source, target and number."""
    found = []
    for raw_key, raw_value in items:
        key: Any = FRAGMENT_KEY.unpack(raw_key)
        value: Any = FRAGMENT.unpack(raw_value)
        row = FragmentRow(
            protocol=protocol_word(key.protocol),
            source=format_address(key.source),
            target=format_address(key.target),
            datagram=_datagram(key),
            source_port=int.from_bytes(value.source_port),
            target_port=int.from_bytes(value.target_port),
        )
        order = address_key(key.source), address_key(key.target), key.id, key.protocol
        found.append((order, row))
    return [row for _, row in sorted(found, key=lambda entry: entry[0])]


def _datagram(key: Any) -> int:
    """IPv4's is of 16 bits, and stands in the low ones of a number of this machine's."""
    if family_of(key.source) is Family.IPV6:
        return int.from_bytes(key.id)
    return int.from_bytes(key.id[:2] if sys.byteorder == "little" else key.id[2:])
