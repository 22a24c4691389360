# SPDX-License-Identifier: Apache-2.0
"""Entries of the maps as rows and service ports that anybody can read. Pure.

The members of the structs below are the JSON keys that the commands promise (docs/commands.md), in
this order. This file must not know where an entry was read, nor how a row is printed.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.tables import (
    EXTERNAL,
    INTERNAL,
    KIND_PROBE,
    KINDS,
    BackendEntry,
    FrontendEntry,
    MemberEntry,
    PortEntry,
    Snapshot,
    Word,
    index_of,
)
from ebpflb.model import Family, FrontendKind, Protocol, family_of, format_address

AFFINITY_KEY = abi.LAYOUTS["affinity_key"]
AFFINITY_VALUE = abi.LAYOUTS["affinity_value"]
UDP_CONN = abi.LAYOUTS["udp_conn"]
PROBE = abi.LAYOUTS["probe"]
SETTINGS = abi.LAYOUTS["settings"]

_SCOPE_WORDS = abi.names_of("SCOPE_")
_WORD_FLAGS = abi.names_of("WORD_")
_ROLES = abi.names_of("MEMBER_")
_HOOKS = abi.names_of("HOOK_")
_NONE_LOCAL = abi.CONSTANTS["WORD_NONE_LOCAL"]
_UNTOUCHED = abi.CONSTANTS["WORD_UNTOUCHED"]
_KIND_ORDER = tuple(KINDS.values())
_NS_PER_S = 10**9


# --- rows of a dump ------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One entry of a map. ``id`` is a service-port id, ``service`` its printed name or None."""


class FrontendRow(Row, frozen=True):
    """``type`` is ClusterIP, NodePort, ExternalIP, LoadBalancer or probe."""

    address: str
    port: int
    protocol: str
    type: str
    scope: str
    id: int
    service: str | None


class PortRow(Row, frozen=True):
    """A slot that is in use. ``*_base`` and ``*_count`` name the range in `backends`."""

    slot: int
    id: int
    service: str | None
    protocol: str
    family: str
    internal_base: int
    internal_count: int
    internal_flags: list[str]
    internal_policy: str
    external_base: int
    external_count: int
    external_flags: list[str]
    external_policy: str
    draining: int
    affinity_seconds: int


class BackendRow(Row, frozen=True):
    """A slot in a range that is in use. ``id`` is its owner's.

    ``ranges`` are internal, external or draining; ``flags`` are local and terminating, and
    foreign where the owner is not the service port whose range this is (that must never be).
    """

    slot: int
    address: str
    port: int
    flags: list[str]
    ranges: list[str]
    id: int
    service: str | None


class AffinityRow(Row, frozen=True):
    """``client`` is a network namespace's cookie on the socket path, an address on the packet's."""

    client: str
    path: str
    address: str
    port: int
    age_seconds: float
    id: int
    service: str | None


class MemberRow(Row, frozen=True):
    """``role``: internal and external take new connections, serving serves open flows."""

    address: str
    port: int
    role: str
    id: int
    service: str | None


class UdpConnRow(Row, frozen=True):
    """A connected UDP socket and its backend, or port 1 of the loopback where it was refused.

    Cookies are numbers.
    """

    socket: int
    netns: int
    address: str
    port: int
    id: int
    service: str | None


class ConnectionsRow(Row, frozen=True):
    slot: int
    connections: int
    protocol: str
    family: str
    id: int
    service: str | None


class StatRow(Row, frozen=True):
    name: str
    count: int


class ProbeRow(Row, frozen=True):
    """A hook that met the agent's own connect: the cookies of its socket and its namespace."""

    hook: str
    socket: int
    netns: int


class NameRow(Row, frozen=True):
    id: int
    service: str


class SettingsRow(Row, frozen=True):
    """``programs`` names the attached programs' text; ``options`` is what the agent was told."""

    host_netns: int
    udp_timeout_seconds: int
    udp_stream_timeout_seconds: int
    programs: str
    options: dict[str, object]


def protocol_word(number: int) -> str:
    return Protocol(number).name if number in _PROTOCOLS else str(number)


_PROTOCOLS = frozenset(Protocol)


def kind_word(number: int) -> str:
    """The word of ``service list`` for a frontend's kind."""
    if number == KIND_PROBE:
        return "probe"
    return KINDS[number].value if number in KINDS else str(number)


def flag_words(flags: int, words: Mapping[int, str]) -> list[str]:
    """The names of the bits that are set; a bit without a name as a number."""
    return [words.get(1 << bit, hex(1 << bit)) for bit in range(32) if flags & 1 << bit]


def frontend_rows(entries: Iterable[FrontendEntry], names: Mapping[int, str]) -> list[FrontendRow]:
    """By address, port and protocol."""
    return [
        FrontendRow(
            address=format_address(entry.address),
            port=entry.port,
            protocol=protocol_word(entry.protocol),
            type=kind_word(entry.kind),
            scope=_SCOPE_WORDS.get(entry.scope, str(entry.scope)),
            id=entry.id,
            service=names.get(entry.id),
        )
        for entry in sorted(
            entries, key=lambda e: (_address_key(e.address), e.port, e.protocol, e.id)
        )
    ]


def port_rows(ports: Iterable[PortEntry], names: Mapping[int, str]) -> list[PortRow]:
    """By slot."""
    return [
        PortRow(
            slot=port.slot,
            id=port.id,
            service=names.get(port.id),
            protocol=protocol_word(port.protocol),
            family=_family(port).label,
            internal_base=port.words[INTERNAL].base,
            internal_count=port.words[INTERNAL].length,
            internal_flags=flag_words(port.words[INTERNAL].flags, _WORD_FLAGS),
            internal_policy=port.internal_policy.value,
            external_base=port.words[EXTERNAL].base,
            external_count=port.words[EXTERNAL].length,
            external_flags=flag_words(port.words[EXTERNAL].flags, _WORD_FLAGS),
            external_policy=port.external_policy.value,
            draining=port.draining,
            affinity_seconds=port.affinity_s,
        )
        for port in ports
    ]


def backend_rows(snapshot: Snapshot) -> list[BackendRow]:
    """By slot; a slot that two service ports claim stands there twice."""
    rows = [
        BackendRow(
            slot=entry.slot,
            address=format_address(entry.address),
            port=entry.port,
            flags=_backend_flags(entry, port),
            ranges=ranges,
            id=entry.owner,
            service=snapshot.names.get(entry.owner),
        )
        for port in snapshot.ports
        for entry, ranges in _slots(port, snapshot)
    ]
    return sorted(rows, key=lambda row: (row.slot, row.id))


def _slots(port: PortEntry, snapshot: Snapshot) -> Iterable[tuple[BackendEntry, list[str]]]:
    """Each slot of a service port once, with the ranges that it is in."""
    ranges: dict[BackendEntry, list[str]] = defaultdict(list)
    active = port.words[INTERNAL].length
    for i, entry in enumerate(snapshot.backends[port.id]):
        ranges[entry].append("internal" if i < active else "draining")
    for entry in snapshot.external[port.id]:
        ranges[entry].append("external")
    return ranges.items()


def _backend_flags(entry: BackendEntry, port: PortEntry) -> list[str]:
    words = (
        ("local", entry.local),
        ("terminating", entry.terminating),
        ("foreign", entry.owner != port.id),
    )
    return [word for word, is_set in words if is_set]


def affinity_rows(
    items: Iterable[tuple[bytes, bytes]], names: Mapping[int, str], *, now_ns: int
) -> list[AffinityRow]:
    """By service, path and client. ``now_ns`` is on the clock of CLOCK_MONOTONIC.

    Expired records are there until the map needs their room or the client comes back.
    """
    found = []
    for raw_key, raw_value in items:
        key: Any = AFFINITY_KEY.unpack(raw_key)
        value: Any = AFFINITY_VALUE.unpack(raw_value)
        client, path = bytes(key.client), key.path
        row = AffinityRow(
            client=format_address(client)
            if path
            else str(int.from_bytes(client[:8], sys.byteorder)),
            path="packet" if path else "socket",
            address=format_address(value.address),
            port=int.from_bytes(value.port),
            age_seconds=round(max(0, now_ns - value.used_ns) / _NS_PER_S, 3),
            id=key.id,
            service=names.get(key.id),
        )
        order = _address_key(client) if path else int.from_bytes(client[:8], sys.byteorder)
        found.append((_name_key(row.service), key.id, path, order, row))
    return [entry[-1] for entry in sorted(found, key=lambda entry: entry[:-1])]


def member_rows(entries: Iterable[MemberEntry], names: Mapping[int, str]) -> list[MemberRow]:
    """By service, role, address and port."""
    return [
        MemberRow(
            address=format_address(entry.address),
            port=entry.port,
            role=_ROLES.get(entry.role, str(entry.role)),
            id=entry.id,
            service=names.get(entry.id),
        )
        for entry in sorted(
            entries,
            key=lambda e: (
                _name_key(names.get(e.id)),
                e.id,
                e.role,
                _address_key(e.address),
                e.port,
            ),
        )
    ]


def udp_conn_rows(
    items: Iterable[tuple[bytes, bytes]], names: Mapping[int, str]
) -> list[UdpConnRow]:
    """By socket, which is by age."""
    rows = []
    for key, raw in items:
        value: Any = UDP_CONN.unpack(raw)
        rows.append(
            UdpConnRow(
                socket=int.from_bytes(key, sys.byteorder),
                netns=value.netns,
                address=format_address(value.backend),
                port=int.from_bytes(value.backend_port),
                id=value.id,
                service=names.get(value.id),
            )
        )
    return sorted(rows, key=lambda row: row.socket)


def connections_rows(
    ports: Iterable[PortEntry], names: Mapping[int, str], connections: Callable[[int], int]
) -> list[ConnectionsRow]:
    """By slot; ``connections`` tells the count at a slot."""
    return [
        ConnectionsRow(
            slot=port.slot,
            connections=connections(port.slot),
            protocol=protocol_word(port.protocol),
            family=_family(port).label,
            id=port.id,
            service=names.get(port.id),
        )
        for port in ports
    ]


def probe_rows(entries: Sequence[bytes]) -> list[ProbeRow]:
    """By hook; ``entries`` are the map's, those that no probe met are left out."""
    rows = []
    for hook, word in _HOOKS.items():
        seen: Any = PROBE.unpack(entries[hook])
        if seen.socket:
            rows.append(ProbeRow(hook=word, socket=seen.socket, netns=seen.netns))
    return rows


def name_rows(names: Mapping[int, str]) -> list[NameRow]:
    """By name, then by id."""
    return [
        NameRow(id=one, service=text)
        for one, text in sorted(names.items(), key=lambda item: (_name_key(item[1]), item[0]))
    ]


def settings_row(raw: bytes) -> SettingsRow:
    """What the agent left. Options that are no JSON object are shown as none."""
    values: Any = SETTINGS.unpack(raw[: SETTINGS.size])
    try:
        options = json.loads(values.options.rstrip(b"\0") or b"{}")
    except ValueError:
        options = {}
    return SettingsRow(
        host_netns=values.host_netns,
        udp_timeout_seconds=values.udp_timeout_ns // _NS_PER_S,
        udp_stream_timeout_seconds=values.udp_stream_timeout_ns // _NS_PER_S,
        programs=f"{values.programs:016x}",
        options=options if isinstance(options, dict) else {},
    )


def _family(port: PortEntry) -> Family:
    return Family.IPV6 if port.ipv6 else Family.IPV4


def _address_key(address: bytes) -> tuple[int, bytes]:
    """IPv4 first, then in numeric order."""
    return family_of(address).value, bytes(address)


def _name_key(name: str | None) -> tuple[bool, str]:
    """What has no name comes last."""
    return name is None, name or ""


# --- services ------------------------------------------------------------------------------------


class ServiceFrontend(msgspec.Struct, frozen=True):
    address: str
    port: int
    type: str


class ServiceBackend(msgspec.Struct, frozen=True):
    """``state`` is ready or terminating."""

    address: str
    port: int
    state: str
    local: bool


class Service(msgspec.Struct, frozen=True):
    """A service port as the kernel has it, its two families as one.

    ``id`` is that of the IPv4 part where there is one. ``service`` is None where `names` does not
    know the id. ``connections`` counts new ones since the service port was made.
    """

    service: str | None
    id: int
    protocol: str
    affinity_seconds: int
    frontends: list[ServiceFrontend]
    backends: list[ServiceBackend]
    internal_policy: str
    external_policy: str
    connections: int


class ListedService(msgspec.Struct, frozen=True):
    """A service port, and in words what becomes of new connections that reach no backend."""

    service: Service
    notes: tuple[str, ...]


def services(snapshot: Snapshot, connections: Callable[[int], int]) -> list[ListedService]:
    """By name and protocol; ``connections`` tells the count at a slot of `ports`."""
    parts: dict[tuple[tuple[bool, str], int, int], list[PortEntry]] = defaultdict(list)
    for port in snapshot.ports:
        name = snapshot.names.get(port.id)
        parts[(_name_key(name), port.protocol, 0 if name else port.id)].append(port)
    frontends: dict[int, list[FrontendEntry]] = defaultdict(list)
    for frontend in snapshot.frontends:
        if frontend.kind != KIND_PROBE:
            frontends[frontend.id].append(frontend)
    return [
        _service(
            sorted(parts[key], key=lambda port: (port.ipv6, port.id)),
            snapshot,
            frontends,
            connections,
        )
        for key in sorted(parts)
    ]


def _service(
    parts: Sequence[PortEntry],
    snapshot: Snapshot,
    frontends: Mapping[int, list[FrontendEntry]],
    connections: Callable[[int], int],
) -> ListedService:
    first = parts[0]
    return ListedService(
        Service(
            service=snapshot.names.get(first.id),
            id=first.id,
            protocol=protocol_word(first.protocol),
            affinity_seconds=first.affinity_s,
            frontends=_service_frontends(
                entry for part in parts for entry in frontends.get(part.id, ())
            ),
            backends=_service_backends(parts, snapshot),
            internal_policy=first.internal_policy.value,
            external_policy=first.external_policy.value,
            connections=sum(connections(index_of(part.id)) for part in parts),
        ),
        _notes(parts),
    )


def _service_frontends(entries: Iterable[FrontendEntry]) -> list[ServiceFrontend]:
    found = set()
    for entry in entries:
        kind = KINDS.get(entry.kind)
        rank = _KIND_ORDER.index(kind) if kind else len(_KIND_ORDER)
        if kind is FrontendKind.NODE_PORT:  # the entry of each family is a wildcard
            found.add((rank, (0, b""), entry.port, "*", kind_word(entry.kind)))
        else:
            address = format_address(entry.address)
            key = _address_key(entry.address)
            found.add((rank, key, entry.port, address, kind_word(entry.kind)))
    return [ServiceFrontend(address, port, kind) for _, _, port, address, kind in sorted(found)]


def _service_backends(parts: Sequence[PortEntry], snapshot: Snapshot) -> list[ServiceBackend]:
    """Of all ranges; what drains is terminating, unless another range holds it as ready."""
    found: dict[tuple[tuple[int, bytes], int], tuple[bool, bool]] = {}
    for part in parts:
        for entry, ranges in _slots(part, snapshot):
            if entry.owner != part.id:
                continue
            key = (_address_key(entry.address), entry.port)
            ends = entry.terminating or ranges == ["draining"]
            ends_too, local = found.get(key, (True, False))
            found[key] = (ends and ends_too, entry.local or local)
    return [
        ServiceBackend(
            address=format_address(address),
            port=port,
            state="terminating" if ends else "ready",
            local=local,
        )
        for ((_, address), port), (ends, local) in sorted(found.items())
    ]


def _notes(parts: Sequence[PortEntry]) -> tuple[str, ...]:
    notes = [_note(part.words) for part in parts]
    if len(set(notes)) == 1:
        return (notes[0],) if notes[0] else ()
    return tuple(
        f"{_family(part).label} {note}" for part, note in zip(parts, notes, strict=True) if note
    )


def _note(words: Sequence[Word]) -> str:
    if any(word.flags & _UNTOUCHED for word in words):
        return "left to others"
    if any(word.length for word in words):
        return ""
    if any(word.flags & _NONE_LOCAL for word in words):
        return "none on this node: refused"
    return "none: refused"
