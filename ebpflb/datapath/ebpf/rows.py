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
from typing import Any, NamedTuple

import msgspec

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.tables import (
    CLUSTER,
    EXTERNAL,
    INTERNAL,
    KIND_PROBE,
    KINDS,
    LOCAL,
    PORT_LB_NO_HOST,
    PORT_LB_NO_PODS,
    SERVICE_ADDRESS_KEY,
    SUBNET,
    BackendEntry,
    FrontendEntry,
    MemberEntry,
    PortEntry,
    Snapshot,
    SourceRangeEntry,
    Word,
    index_of,
)
from ebpflb.model import (
    Address,
    Family,
    FrontendKind,
    Network,
    Policy,
    Protocol,
    family_of,
    format_address,
)

AFFINITY_KEY = abi.LAYOUTS["affinity_key"]
AFFINITY_VALUE = abi.LAYOUTS["affinity_value"]
UDP_CONN = abi.LAYOUTS["udp_conn"]
PROBE = abi.LAYOUTS["probe"]
DEVICE_KEY = abi.LAYOUTS["device_key"]
SETTINGS = abi.LAYOUTS["settings"]

_SCOPE_WORDS = abi.names_of("SCOPE_")
_SET_WORDS = abi.names_of("SET_")
_WORD_FLAGS = abi.names_of("WORD_")
_PORT_FLAGS = abi.names_of("PORT_")
_SETTING_FLAGS = abi.names_of("SETTING_")
_STATE_FLAGS = abi.names_of("STATE_")
_BY_NET4 = abi.CONSTANTS["SETTING_PODS_BY_NET4"]
_BY_NET6 = abi.CONSTANTS["SETTING_PODS_BY_NET6"]
_ADDRESS_ROLES = abi.names_of("ADDRESS_")
_DEVICE_ROLES = abi.names_of("DEVICE_")
_ROLES = abi.names_of("MEMBER_")
_HOOKS = abi.names_of("HOOK_")
_NONE_LOCAL = abi.CONSTANTS["WORD_NONE_LOCAL"]
_UNTOUCHED = abi.CONSTANTS["WORD_UNTOUCHED"]
_KIND_ORDER = tuple(KINDS.values())
_DRAINING = "draining"
_NS_PER_S = 10**9


# --- rows of a dump ------------------------------------------------------------------------------


class Row(msgspec.Struct, frozen=True):
    """One entry of a map. ``id`` is a service-port id, ``service`` its printed name or None."""


class FrontendRow(Row, frozen=True):
    """``type`` is ClusterIP, NodePort, ExternalIP, LoadBalancer or probe.

    A NodePort's ``address`` is the unspecified one of its family.
    """

    address: str
    port: int
    protocol: str
    type: str
    scope: str
    id: int
    service: str | None


class NodeAddressRow(Row, frozen=True):
    """An address of this node at which NodePorts answer."""

    address: str


class PortRow(Row, frozen=True):
    """A slot that is in use, with both sets; ``flags`` say which of them is for whom.

    They also say whom source ranges keep out. ``*_base`` and ``*_count`` name a set's range in
    `backends`.
    """

    slot: int
    id: int
    service: str | None
    protocol: str
    family: str
    flags: list[str]
    cluster_base: int
    cluster_count: int
    cluster_flags: list[str]
    local_base: int
    local_count: int
    local_flags: list[str]
    draining: int
    affinity_seconds: int


class BackendRow(Row, frozen=True):
    """A slot in a range that is in use. ``id`` is its owner's.

    ``ranges`` are cluster, local or draining; ``flags`` are local and terminating, and
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
    """``role``: cluster and local, the sets that it is in; serving: it serves open flows."""

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


class SourceRangeRow(Row, frozen=True):
    """``network``: sources that may dial the service port's load-balancer addresses."""

    network: str
    id: int
    service: str | None


class ServiceAddressRow(Row, frozen=True):
    """``role``: known, a frontend has this address; answers, it answers an echo request."""

    address: str
    role: str


class DeviceRow(Row, frozen=True):
    """``device`` is its name, None where that is not known."""

    index: int
    device: str | None
    role: str


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
    """What the programs read of the node, and ``options``, which is what the agent was told.

    ``programs`` and ``packet_programs`` name the attached programs' text. ``flags`` are what the
    plan says of the node, ``state`` what the packet path can do there. A mark is in hex. ``pods``
    are the networks of pods' addresses, those that ``flags`` lead to.
    """

    host_netns: int
    udp_timeout_seconds: int
    udp_stream_timeout_seconds: int
    programs: str
    packet_programs: str
    flags: list[str]
    state: list[str]
    tcp_timeout_seconds: int
    tcp_closing_seconds: int
    masquerade_mark: str
    reject_mark: str
    pods: list[str]
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
    return [words.get(1 << bit, hex(1 << bit)) for bit in range(64) if flags & 1 << bit]


def subnet_text(raw: bytes) -> str:
    """``10.244.0.0/16`` of a subnet in `settings`, "" where it is empty."""
    subnet: Any = SUBNET.unpack(raw)
    if not any(raw):
        return ""
    length = int.from_bytes(subnet.mask).bit_count()
    if int.from_bytes(subnet.mask) != (1 << 128) - (1 << 128 - length):
        return f"{format_address(subnet.address)} & {format_address(subnet.mask)}"
    return str(Network(Address(subnet.address), length))


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
            entries, key=lambda e: (address_key(e.address), e.port, e.protocol, e.id)
        )
    ]


def node_address_rows(addresses: Iterable[bytes]) -> list[NodeAddressRow]:
    """By address."""
    return [NodeAddressRow(format_address(one)) for one in sorted(addresses, key=address_key)]


def port_rows(ports: Iterable[PortEntry], names: Mapping[int, str]) -> list[PortRow]:
    """By slot."""
    return [
        PortRow(
            slot=port.slot,
            id=port.id,
            service=names.get(port.id),
            protocol=protocol_word(port.protocol),
            family=_family(port).label,
            flags=flag_words(port.flags, _PORT_FLAGS),
            cluster_base=port.words[CLUSTER].base,
            cluster_count=port.words[CLUSTER].length,
            cluster_flags=flag_words(port.words[CLUSTER].flags, _WORD_FLAGS),
            local_base=port.words[LOCAL].base,
            local_count=port.words[LOCAL].length,
            local_flags=flag_words(port.words[LOCAL].flags, _WORD_FLAGS),
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
    active = port.words[CLUSTER].length
    for i, entry in enumerate(snapshot.cluster[port.id]):
        ranges[entry].append(_SET_WORDS[CLUSTER] if i < active else _DRAINING)
    for entry in snapshot.local[port.id]:
        ranges[entry].append(_SET_WORDS[LOCAL])
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
        order = address_key(client) if path else int.from_bytes(client[:8], sys.byteorder)
        found.append((name_key(row.service), key.id, path, order, row))
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
                name_key(names.get(e.id)),
                e.id,
                e.role,
                address_key(e.address),
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


def source_range_rows(
    entries: Iterable[SourceRangeEntry], names: Mapping[int, str]
) -> list[SourceRangeRow]:
    """By service and network; one that the agent never writes is shown in hex."""
    return [
        SourceRangeRow(
            network=str(entry.network) if entry.network else entry.key.hex(),
            id=entry.id,
            service=names.get(entry.id),
        )
        for entry in sorted(
            entries, key=lambda e: (name_key(names.get(e.id)), e.id, _network_key(e))
        )
    ]


def _network_key(entry: SourceRangeEntry) -> tuple[bool, tuple[int, bytes], int]:
    if entry.network is None:
        return True, (0, entry.key), 0
    return False, address_key(entry.network.address), entry.network.length


def service_address_rows(keys: Iterable[bytes]) -> list[ServiceAddressRow]:
    """By address and role."""
    entries = [SERVICE_ADDRESS_KEY.unpack(key) for key in keys]
    return [
        ServiceAddressRow(
            address=format_address(entry.address),
            role=_ADDRESS_ROLES.get(entry.role, str(entry.role)),
        )
        for entry in sorted(entries, key=lambda e: (address_key(e.address), e.role))
    ]


def device_rows(keys: Iterable[bytes], devices: Mapping[int, str]) -> list[DeviceRow]:
    """By index and role; ``devices`` are the names, by index."""
    entries = sorted(DEVICE_KEY.unpack(key) for key in keys)
    return [
        DeviceRow(
            index=entry.index,
            device=devices.get(entry.index),
            role=_DEVICE_ROLES.get(entry.role, str(entry.role)),
        )
        for entry in entries
    ]


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
        for one, text in sorted(names.items(), key=lambda item: (name_key(item[1]), item[0]))
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
        packet_programs=f"{values.packet_programs:016x}",
        flags=flag_words(values.flags, _SETTING_FLAGS),
        state=flag_words(values.state, _STATE_FLAGS),
        tcp_timeout_seconds=values.tcp_timeout_ns // _NS_PER_S,
        tcp_closing_seconds=values.tcp_closing_ns // _NS_PER_S,
        masquerade_mark=hex(values.masquerade_mark),
        reject_mark=hex(values.reject_mark),
        pods=[
            subnet_text(subnet)
            for subnet, flag in ((values.pods4, _BY_NET4), (values.pods6, _BY_NET6))
            if values.flags & flag
        ],
        options=options if isinstance(options, dict) else {},
    )


def _family(port: PortEntry) -> Family:
    return Family.IPV6 if port.ipv6 else Family.IPV4


def address_key(address: bytes) -> tuple[int, bytes]:
    """IPv4 first, then in numeric order."""
    return family_of(address).value, bytes(address)


def name_key(name: str | None) -> tuple[bool, str]:
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
    """A service port, and what a table says of it beside the promised keys.

    ``notes``: what becomes of new connections that reach no backend. ``frontend_marks`` and
    ``backend_marks`` are texts, one for each frontend and backend, "" for nothing to say: whom a
    frontend refuses, and who alone is led to a backend.
    """

    service: Service
    notes: tuple[str, ...]
    frontend_marks: tuple[str, ...]
    backend_marks: tuple[str, ...]


_Led = dict[str, int]
"""Who is led to which set, in the order of `_WHO`."""

_WHO = ("ClusterIP", "inside", "outside")
"""Those who dial the ClusterIP; those of this node and those from outside at other frontends."""


def services(snapshot: Snapshot, connections: Callable[[int], int]) -> list[ListedService]:
    """By name and protocol; ``connections`` tells the count at a slot of `ports`."""
    parts: dict[tuple[tuple[bool, str], int, int], list[PortEntry]] = defaultdict(list)
    for port in snapshot.ports:
        name = snapshot.names.get(port.id)
        parts[(name_key(name), port.protocol, 0 if name else port.id)].append(port)
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
    led = [_led(part, frontends.get(part.id, ())) for part in parts]
    dialled = _service_frontends(
        (entry, part) for part in parts for entry in frontends.get(part.id, ())
    )
    backends = _service_backends(parts, led, snapshot)
    return ListedService(
        Service(
            service=snapshot.names.get(first.id),
            id=first.id,
            protocol=protocol_word(first.protocol),
            affinity_seconds=first.affinity_s,
            frontends=[frontend for frontend, _ in dialled],
            backends=[backend for backend, _ in backends],
            internal_policy=first.internal_policy.value,
            external_policy=first.external_policy.value,
            connections=sum(connections(index_of(part.id)) for part in parts),
        ),
        notes=_notes(parts, led),
        frontend_marks=tuple(mark for _, mark in dialled),
        backend_marks=tuple(mark for _, mark in backends),
    )


def _led(port: PortEntry, frontends: Iterable[FrontendEntry]) -> _Led:
    """As the programs decide it; one without any frontend counts as one with a ClusterIP."""
    scopes = {frontend.scope for frontend in frontends} or {INTERNAL}
    led = {}
    if INTERNAL in scopes:
        led["ClusterIP"] = _set_of(port.internal_policy)
    if EXTERNAL in scopes:
        led["inside"] = CLUSTER
        led["outside"] = _set_of(port.external_policy)
    return led


def _set_of(policy: Policy) -> int:
    return LOCAL if policy is Policy.LOCAL else CLUSTER


def _service_frontends(
    entries: Iterable[tuple[FrontendEntry, PortEntry]],
) -> list[tuple[ServiceFrontend, str]]:
    """Each with its mark."""
    found = set()
    for entry, port in entries:
        kind = KINDS.get(entry.kind)
        rank = _KIND_ORDER.index(kind) if kind else len(_KIND_ORDER)
        address, key = format_address(entry.address), address_key(entry.address)
        if kind is FrontendKind.NODE_PORT:  # each family has one, at its unspecified address
            address, key = "*", (0, b"")
        mark = _refuses(port) if kind is FrontendKind.LOAD_BALANCER else ""
        found.add((rank, key, entry.port, address, kind_word(entry.kind), mark))
    return [
        (ServiceFrontend(address, port, kind), mark)
        for _, _, port, address, kind, mark in sorted(found)
    ]


def _refuses(port: PortEntry) -> str:
    words = (("pods", PORT_LB_NO_PODS), ("this node", PORT_LB_NO_HOST))
    refused = [word for word, flag in words if port.flags & flag]
    return f"source ranges: not for {' nor '.join(refused)}" if refused else ""


class _Seen(NamedTuple):
    """A backend, put together from all places where it stands."""

    local: bool
    terminating: bool
    who: frozenset[str]


def _service_backends(
    parts: Sequence[PortEntry], led: Sequence[_Led], snapshot: Snapshot
) -> list[tuple[ServiceBackend, str]]:
    """Those to which somebody is led, and those that terminate; each with its mark.

    What is ready and in no set that is used takes nothing: it would look as if it could be reached.
    """
    found: dict[tuple[tuple[int, bytes], int], _Seen] = {}
    all_of: dict[tuple[tuple[int, bytes], int], int] = {}
    for part, leads in zip(parts, led, strict=True):
        for entry, ranges in _slots(part, snapshot):
            if entry.owner != part.id:
                continue
            key = (address_key(entry.address), entry.port)
            who = frozenset(one for one, chosen in leads.items() if _SET_WORDS[chosen] in ranges)
            before = found.get(key, _Seen(local=False, terminating=True, who=frozenset()))
            found[key] = _Seen(
                local=entry.local or before.local,
                terminating=(entry.terminating or ranges == [_DRAINING]) and before.terminating,
                who=before.who | who,
            )
            all_of[key] = len(leads)
    return [
        (
            ServiceBackend(
                address=format_address(address),
                port=port,
                state="terminating" if seen.terminating else "ready",
                local=seen.local,
            ),
            _only(seen.who) if len(seen.who) < all_of[(family, address), port] else "",
        )
        for ((family, address), port), seen in sorted(found.items())
        if seen.who or seen.terminating
    ]


def _only(who: frozenset[str]) -> str:
    """What only drains says so by its state."""
    return f"only {'+'.join(one for one in _WHO if one in who)}" if who else ""


def _notes(parts: Sequence[PortEntry], led: Sequence[_Led]) -> tuple[str, ...]:
    notes = [_note(part.words, leads) for part, leads in zip(parts, led, strict=True)]
    if len(set(notes)) == 1:
        return (notes[0],) if notes[0] else ()
    return tuple(
        f"{_family(part).label} {note}" for part, note in zip(parts, notes, strict=True) if note
    )


def _note(words: Sequence[Word], led: _Led) -> str:
    if any(word.flags & _UNTOUCHED for word in words):
        return "left to others"
    nowhere = [one for one, chosen in led.items() if not words[chosen].length]
    if not nowhere:
        return ""
    at_all = any(words[led[one]].flags & _NONE_LOCAL for one in nowhere)
    none = "none on this node" if at_all else "none"
    whom = "" if len(nowhere) == len(led) else f" for {'+'.join(nowhere)}"
    return f"{none}{whom}: refused"
