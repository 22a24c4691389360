# SPDX-License-Identifier: Apache-2.0
"""The kernel's tables of Services as the writer and the readers see them.

``Tables`` is the one interface through which a sync reaches the maps, so that the same writer
runs on kernel maps and on maps in memory that can fail at any step. ``read`` turns the tables
into a ``Snapshot``: what the programs would do, in words. Decisions are made elsewhere.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from ebpflb.datapath.ebpf import abi, libbpf
from ebpflb.datapath.ebpf.maps import Map
from ebpflb.model import Address, Family, FrontendKind, Network, Policy, ServicePortName
from ebpflb.model import Protocol as IpProtocol

FRONTEND_KEY = abi.LAYOUTS["frontend_key"]
FRONTEND_VALUE = abi.LAYOUTS["frontend_value"]
PORT = abi.LAYOUTS["port"]
BACKEND = abi.LAYOUTS["backend"]
MEMBER_KEY = abi.LAYOUTS["member_key"]
NAME = abi.LAYOUTS["name"]
NODE_ADDRESS_KEY = abi.LAYOUTS["node_address_key"]
SOURCE_RANGE_KEY = abi.LAYOUTS["source_range_key"]
SERVICE_ADDRESS_KEY = abi.LAYOUTS["service_address_key"]
SUBNET = abi.LAYOUTS["subnet"]
SETTINGS = abi.LAYOUTS["settings"]
ID = struct.Struct("=I")

INDEX_BITS = abi.CONSTANTS["ABI_ID_INDEX_BITS"]
INDEX_MASK = (1 << INDEX_BITS) - 1
GENERATIONS = 1 << (32 - INDEX_BITS)
COUNT_SHIFT = abi.CONSTANTS["ABI_WORD_COUNT_SHIFT"]
FLAGS_SHIFT = abi.CONSTANTS["ABI_WORD_FLAGS_SHIFT"]
MAX_COUNT = (1 << (FLAGS_SHIFT - COUNT_SHIFT)) - 1
SETS = abi.CONSTANTS["SET_COUNT"]
CLUSTER = abi.CONSTANTS["SET_CLUSTER"]
LOCAL = abi.CONSTANTS["SET_LOCAL"]
INTERNAL = abi.CONSTANTS["SCOPE_INTERNAL"]
EXTERNAL = abi.CONSTANTS["SCOPE_EXTERNAL"]

KINDS: Mapping[int, FrontendKind] = {
    abi.CONSTANTS["KIND_CLUSTER_IP"]: FrontendKind.CLUSTER_IP,
    abi.CONSTANTS["KIND_NODE_PORT"]: FrontendKind.NODE_PORT,
    abi.CONSTANTS["KIND_EXTERNAL_IP"]: FrontendKind.EXTERNAL_IP,
    abi.CONSTANTS["KIND_LOAD_BALANCER"]: FrontendKind.LOAD_BALANCER,
}
KIND_PROBE = abi.CONSTANTS["KIND_PROBE"]
PORT_IPV6 = abi.CONSTANTS["PORT_IPV6"]
PORT_INTERNAL_LOCAL = abi.CONSTANTS["PORT_INTERNAL_LOCAL"]
PORT_EXTERNAL_LOCAL = abi.CONSTANTS["PORT_EXTERNAL_LOCAL"]
PORT_LB_NO_PODS = abi.CONSTANTS["PORT_LB_NO_PODS"]
PORT_LB_NO_HOST = abi.CONSTANTS["PORT_LB_NO_HOST"]
PORT_LB_RANGES = abi.CONSTANTS["PORT_LB_RANGES"]
ADDRESS_KNOWN = abi.CONSTANTS["ADDRESS_KNOWN"]
ADDRESS_ANSWERS = abi.CONSTANTS["ADDRESS_ANSWERS"]
ID_BITS = 8 * ID.size
"""How many bits of an entry of `source_ranges` are the id's; the network's follow."""


class Table(Protocol):
    """A hash map. A batch that fails may be written in part; deleting nothing is no error."""

    def lookup(self, key: bytes) -> bytes | None: ...
    def update(self, items: Sequence[tuple[bytes, bytes]]) -> None: ...
    def delete(self, key: bytes) -> None: ...
    def items(self) -> Iterator[tuple[bytes, bytes]]: ...


class Subnets(NamedTuple):
    """Where pods' addresses are, by family, as `settings` has it; zero where that is not known."""

    ipv4: bytes
    ipv6: bytes


NO_SUBNETS = Subnets(bytes(SUBNET.size), bytes(SUBNET.size))


class Tables(Protocol):
    """All that a sync writes. Indexes and bases are below the sizes; nothing here checks them."""

    frontends: Table
    members: Table
    names: Table
    node_addrs: Table
    source_ranges: Table
    """A trie: what `lookup` finds may be a wider entry."""
    service_addrs: Table
    port_entries: int
    backend_entries: int

    def read_port(self, index: int) -> bytes: ...
    def write_port(self, index: int, value: bytes) -> None:
        """Write a slot that no frontend leads to; readers may see half of it."""
        ...

    def set_port_field(self, index: int, offset: int, value: int) -> None:
        """Everything stored so far, then one aligned 32-bit store."""
        ...

    def publish(self, index: int, which: int, word: int) -> None:
        """Everything stored so far, then one aligned 64-bit store of the word of a set."""
        ...

    def read_ports(self) -> bytes: ...
    def read_backends(self, base: int, count: int) -> bytes: ...
    def write_backends(self, base: int, slots: bytes) -> None: ...
    def clear_connections(self, index: int) -> None: ...
    def read_flags(self) -> int: ...
    def write_flags(self, flags: int) -> None:
        """Set the flags of `settings`: one aligned 64-bit store."""
        ...

    def read_subnets(self) -> Subnets: ...
    def write_subnets(self, subnets: Subnets) -> None:
        """Set those of `settings`, in several stores; none of its flags may lead to them."""
        ...


_SUBNETS = tuple(
    slice(SETTINGS.offsets[member], SETTINGS.offsets[member] + SUBNET.size)
    for member in ("pods4", "pods6")
)


class KernelTables:
    """``Tables`` on the pinned maps."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self.frontends: Table = maps["frontends"]
        self.members: Table = maps["members"]
        self.names: Table = maps["names"]
        self.node_addrs: Table = maps["node_addrs"]
        self.source_ranges: Table = maps["source_ranges"]
        self.service_addrs: Table = maps["service_addrs"]
        self._settings = maps["settings"].memory()
        self._connections = maps["connections"]
        self._ports = maps["ports"].memory()
        self._ports32 = self._ports.view.cast("I")
        self._backends = maps["backends"].memory()
        self.port_entries = self._ports.entries
        self.backend_entries = self._backends.entries

    def read_port(self, index: int) -> bytes:
        return bytes(self._ports.view[index * PORT.size : (index + 1) * PORT.size])

    def write_port(self, index: int, value: bytes) -> None:
        self._ports.view[index * PORT.size : (index + 1) * PORT.size] = value

    def set_port_field(self, index: int, offset: int, value: int) -> None:
        libbpf.store_barrier()
        self._ports32[(index * PORT.size + offset) // 4] = value

    def publish(self, index: int, which: int, word: int) -> None:
        libbpf.store_barrier()
        self._ports.words[index * PORT.size // 8 + which] = word

    def read_ports(self) -> bytes:
        return bytes(self._ports.view)

    def read_backends(self, base: int, count: int) -> bytes:
        return bytes(self._backends.view[base * BACKEND.size : (base + count) * BACKEND.size])

    def write_backends(self, base: int, slots: bytes) -> None:
        start = base * BACKEND.size
        self._backends.view[start : start + len(slots)] = slots

    def clear_connections(self, index: int) -> None:
        self._connections.clear_per_cpu(index)

    def read_flags(self) -> int:
        return int(self._settings.words[SETTINGS.offsets["flags"] // 8])

    def write_flags(self, flags: int) -> None:
        libbpf.store_barrier()
        self._settings.words[SETTINGS.offsets["flags"] // 8] = flags

    def read_subnets(self) -> Subnets:
        return Subnets(*(bytes(self._settings.view[at]) for at in _SUBNETS))

    def write_subnets(self, subnets: Subnets) -> None:
        for at, raw in zip(_SUBNETS, subnets, strict=True):
            self._settings.view[at] = raw

    def connections(self, index: int) -> int:
        """Connections made so far to the service port at ``index``."""
        return sum(self._connections.per_cpu(index))

    def close(self) -> None:
        self._ports32.release()
        self._ports.close()
        self._backends.close()
        self._settings.close()


# --- words and ids -----------------------------------------------------------------------------


class Word(NamedTuple):
    """What is published for one set of a service port."""

    base: int
    length: int
    flags: int

    def pack(self) -> int:
        return self.flags << FLAGS_SHIFT | self.length << COUNT_SHIFT | self.base


def unpack_word(word: int) -> Word:
    return Word(word & 0xFFFFFFFF, (word >> COUNT_SHIFT) & MAX_COUNT, word >> FLAGS_SHIFT)


def make_id(index: int, generation: int) -> int:
    return generation << INDEX_BITS | index


def index_of(service_port_id: int) -> int:
    return service_port_id & INDEX_MASK


def pack_name(name: ServicePortName) -> bytes:
    """The printed name; raises ValueError when it does not fit."""
    text = str(name).encode()
    if len(text) >= NAME.size:
        raise ValueError(f"the name {name} is longer than {NAME.size - 1} bytes")
    return NAME.pack(text)


def parse_name(text: str, protocol: IpProtocol, family: Family) -> ServicePortName:
    """The inverse of ``str(ServicePortName)``. Raises ValueError."""
    path, _, port = text.partition(":")
    namespace, slash, name = path.partition("/")
    if not slash or not namespace or not name:
        raise ValueError(f"{text!r} is no ns/name or ns/name:port")
    return ServicePortName(namespace, name, port, protocol, family)


# --- a snapshot, for those who compare or show -------------------------------------------------


class PortEntry(NamedTuple):
    """A live slot of `ports`. ``name`` is None where `names` does not know the id.

    ``words`` are by set: CLUSTER, LOCAL. ``flags`` are PORT_…
    """

    slot: int
    id: int
    name: ServicePortName | None
    protocol: int
    flags: int
    words: tuple[Word, ...]
    affinity_s: int
    draining: int

    @property
    def ipv6(self) -> bool:
        return bool(self.flags & PORT_IPV6)

    @property
    def internal_policy(self) -> Policy:
        return Policy.LOCAL if self.flags & PORT_INTERNAL_LOCAL else Policy.CLUSTER

    @property
    def external_policy(self) -> Policy:
        return Policy.LOCAL if self.flags & PORT_EXTERNAL_LOCAL else Policy.CLUSTER


class FrontendEntry(NamedTuple):
    key: bytes
    address: bytes
    port: int
    protocol: int
    id: int
    kind: int
    scope: int


class BackendEntry(NamedTuple):
    slot: int
    address: bytes
    port: int
    local: bool
    terminating: bool
    owner: int


class MemberEntry(NamedTuple):
    key: bytes
    id: int
    address: bytes
    port: int
    role: int


class SourceRangeEntry(NamedTuple):
    """``network`` is None where the entry is none that could be planned."""

    key: bytes
    id: int
    network: Network | None


class Snapshot(NamedTuple):
    """The tables at about one moment."""

    ports: tuple[PortEntry, ...]
    frontends: tuple[FrontendEntry, ...]
    members: tuple[MemberEntry, ...]
    names: Mapping[int, str]
    cluster: Mapping[int, tuple[BackendEntry, ...]]
    """By service-port id: the range of the cluster set with what drains behind it."""
    local: Mapping[int, tuple[BackendEntry, ...]]
    """By service-port id: the range of the local set."""
    node_addrs: tuple[Address, ...]
    """Where NodePorts answer, sorted."""
    flags: int
    """Those of `settings` (SETTING_…)."""
    subnets: Subnets
    """Of `settings`, where the pods are."""
    source_ranges: tuple[SourceRangeEntry, ...]
    service_addrs: tuple[bytes, ...]
    """The keys, sorted."""


def unpack_backends(base: int, raw: bytes) -> tuple[BackendEntry, ...]:
    entries = []
    for i in range(len(raw) // BACKEND.size):
        slot: Any = BACKEND.unpack(raw[i * BACKEND.size : (i + 1) * BACKEND.size])
        entries.append(
            BackendEntry(
                base + i,
                slot.address,
                int.from_bytes(slot.port),
                bool(slot.flags & abi.CONSTANTS["BACKEND_LOCAL"]),
                bool(slot.flags & abi.CONSTANTS["BACKEND_TERMINATING"]),
                slot.owner,
            )
        )
    return tuple(entries)


def unpack_port(index: int, raw: bytes, names: Mapping[int, str]) -> PortEntry | None:
    """None for a free slot."""
    port: Any = PORT.unpack(raw)
    if not port.id:
        return None
    try:
        family = Family.IPV6 if port.flags & PORT_IPV6 else Family.IPV4
        name = parse_name(names[port.id], IpProtocol(port.protocol), family)
    except (KeyError, ValueError):
        name = None
    return PortEntry(
        slot=index,
        id=port.id,
        name=name,
        protocol=port.protocol,
        flags=port.flags,
        words=tuple(unpack_word(word) for word in memoryview(port.word).cast("Q")),
        affinity_s=port.affinity_s,
        draining=port.draining,
    )


def read_names(tables: Tables) -> dict[int, str]:
    return {
        ID.unpack(key)[0]: text.split(b"\0")[0].decode(errors="replace")
        for key, text in tables.names.items()
    }


def read_frontends(tables: Tables) -> tuple[FrontendEntry, ...]:
    entries = []
    for key, value in tables.frontends.items():
        dialled: Any = FRONTEND_KEY.unpack(key)
        found: Any = FRONTEND_VALUE.unpack(value)
        entries.append(
            FrontendEntry(
                key,
                dialled.address,
                int.from_bytes(dialled.port),
                dialled.protocol,
                found.id,
                found.kind,
                found.scope,
            )
        )
    return tuple(sorted(entries))


def read_members(tables: Tables) -> tuple[MemberEntry, ...]:
    entries = []
    for entry in tables.members.items():
        key = entry[0]
        member: Any = MEMBER_KEY.unpack(key)
        entries.append(
            MemberEntry(key, member.id, member.address, int.from_bytes(member.port), member.role)
        )
    return tuple(sorted(entries))


def read_node_addrs(tables: Tables) -> tuple[Address, ...]:
    keys = (key for key, _ in tables.node_addrs.items())
    return tuple(sorted(Address(NODE_ADDRESS_KEY.unpack(key).address) for key in keys))


def read_source_ranges(tables: Tables) -> tuple[SourceRangeEntry, ...]:
    return tuple(sorted((unpack_source_range(key) for key, _ in tables.source_ranges.items())))


def unpack_source_range(key: bytes) -> SourceRangeEntry:
    entry: Any = SOURCE_RANGE_KEY.unpack(key)
    length = entry.bits - ID_BITS
    network = Network(Address(entry.address), length)
    is_sane = 0 <= length <= 128 and not int.from_bytes(entry.address) & (1 << 128 - length) - 1
    return SourceRangeEntry(key, entry.id, network if is_sane else None)


def read_service_addrs(tables: Tables) -> tuple[bytes, ...]:
    return tuple(sorted(key for key, _ in tables.service_addrs.items()))


def read(tables: Tables) -> Snapshot:
    """Read everything. A range that reaches out of the map is shown as far as it lies inside."""
    names = read_names(tables)
    raw = tables.read_ports()
    ports = tuple(
        port
        for index in range(tables.port_entries)
        if (port := unpack_port(index, raw[index * PORT.size : (index + 1) * PORT.size], names))
    )

    def slots(word: Word, behind: int) -> tuple[BackendEntry, ...]:
        base = min(word.base, tables.backend_entries)
        count = min(word.length + behind, tables.backend_entries - base)
        return unpack_backends(base, tables.read_backends(base, count))

    return Snapshot(
        ports=ports,
        frontends=read_frontends(tables),
        members=read_members(tables),
        names=names,
        cluster={port.id: slots(port.words[CLUSTER], port.draining) for port in ports},
        local={port.id: slots(port.words[LOCAL], 0) for port in ports},
        node_addrs=read_node_addrs(tables),
        flags=tables.read_flags(),
        subnets=tables.read_subnets(),
        source_ranges=read_source_ranges(tables),
        service_addrs=read_service_addrs(tables),
    )
