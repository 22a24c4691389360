# SPDX-License-Identifier: Apache-2.0
"""One planned service port as the bytes that the maps should hold for it. Pure.

Where those bytes go, and in what order, is the writer's business.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.tables import (
    ADDRESS_ANSWERS,
    ADDRESS_KNOWN,
    BACKEND,
    EXTERNAL,
    FRONTEND_KEY,
    FRONTEND_VALUE,
    ID_BITS,
    INTERNAL,
    KIND_PROBE,
    KINDS,
    MEMBER_KEY,
    NO_SUBNETS,
    NODE_ADDRESS_KEY,
    PORT_LB_NO_HOST,
    PORT_LB_NO_PODS,
    PORT_LB_RANGES,
    SERVICE_ADDRESS_KEY,
    SOURCE_RANGE_KEY,
    SUBNET,
    Subnets,
)
from ebpflb.model import (
    Address,
    Backend,
    Family,
    Frontend,
    FrontendKind,
    Network,
    Plan,
    PlannedPort,
    Policy,
    Protocol,
    Selection,
    Verdict,
)

_KIND_NUMBERS = {kind: number for number, kind in KINDS.items()}
_VERDICT_FLAGS = {
    Verdict.FORWARD: 0,
    Verdict.REJECT: abi.CONSTANTS["WORD_NONE"],
    Verdict.DROP: abi.CONSTANTS["WORD_NONE_LOCAL"],
}
_LOCAL = abi.CONSTANTS["BACKEND_LOCAL"]
_TERMINATING = abi.CONSTANTS["BACKEND_TERMINATING"]
_CLUSTER_ROLE = abi.CONSTANTS["MEMBER_CLUSTER"]
_LOCAL_ROLE = abi.CONSTANTS["MEMBER_LOCAL"]
_SERVING_ROLE = abi.CONSTANTS["MEMBER_SERVING"]
_LOOPBACK_FLAGS = {
    Family.IPV4: abi.CONSTANTS["SETTING_LOOPBACK4"],
    Family.IPV6: abi.CONSTANTS["SETTING_LOOPBACK6"],
}
_TELLS_PODS_FLAGS = {
    Family.IPV4: abi.CONSTANTS["SETTING_TELLS_PODS4"],
    Family.IPV6: abi.CONSTANTS["SETTING_TELLS_PODS6"],
}
_BY_NET_FLAGS = {
    Family.IPV4: abi.CONSTANTS["SETTING_PODS_BY_NET4"],
    Family.IPV6: abi.CONSTANTS["SETTING_PODS_BY_NET6"],
}
BY_NET = sum(_BY_NET_FLAGS.values())
"""The flags of `settings` that lead to its subnets."""

MEMBER_VALUE = bytes(abi.LAYOUTS["member_value"].size)
NODE_ADDRESS_VALUE = bytes(abi.LAYOUTS["node_address"].size)
SOURCE_RANGE_VALUE = bytes(abi.LAYOUTS["source_range"].size)

# Addresses that nobody has: reserved, and discard-only (RFC 1112, RFC 6666). A connected UDP
# socket sends nothing, so a probe that no hook meets stays on the machine.
PROBE_PORT = 9
PROBE_ADDRESSES: Mapping[Family, Address] = {
    Family.IPV4: Address(bytes(10) + b"\xff\xff" + ipaddress.IPv4Address("240.0.0.9").packed),
    Family.IPV6: Address(ipaddress.IPv6Address("100::9").packed),
}


class Slots(NamedTuple):
    """The range of one set: ``active`` slots take new connections, those behind them drain."""

    raw: bytes
    active: int
    flags: int

    @property
    def size(self) -> int:
        return len(self.raw) // BACKEND.size


class Encoded(NamedTuple):
    """Keys and values as the maps have them. ``sets`` is by set: cluster, local.

    ``source_ranges`` are whose sources may dial the load balancer's addresses, empty for everybody.
    """

    sets: tuple[Slots, Slots]
    draining: int
    affinity_s: int
    port_flags: int
    frontends: Mapping[bytes, bytes]
    members: frozenset[bytes]
    source_ranges: frozenset[Network]


def encode(planned: PlannedPort, service_port_id: int) -> Encoded:
    """What the maps hold for ``planned`` under this id."""
    common = abi.CONSTANTS["WORD_AFFINITY"] if planned.affinity_s else 0
    if not planned.socket_lb:
        common |= abi.CONSTANTS["WORD_UNTOUCHED"]

    def slots(selection: Selection, behind: tuple[Backend, ...]) -> Slots:
        return Slots(
            encode_backends((*selection.backends, *behind), service_port_id),
            len(selection.backends),
            common | _VERDICT_FLAGS[selection.verdict],
        )

    drains = terminating(planned)
    return Encoded(
        sets=(slots(planned.cluster, drains), slots(planned.local, ())),
        draining=len(drains),
        affinity_s=planned.affinity_s,
        port_flags=_port_flags(planned),
        frontends={
            encode_frontend(frontend): FRONTEND_VALUE.pack(
                service_port_id,
                _KIND_NUMBERS[frontend.kind],
                scope_of(frontend.kind),
            )
            for frontend in planned.frontends
        },
        members=_members(planned, service_port_id),
        source_ranges=source_ranges(planned),
    )


def terminating(planned: PlannedPort) -> tuple[Backend, ...]:
    """What stands behind the cluster range, for those who read the map.

    What drains only because a policy or a topology keeps new connections away is a member and no
    more: listed with the range it would look as if it could be reached.
    """
    return tuple(backend for backend in planned.draining if backend.terminating)


def scope_of(kind: FrontendKind) -> int:
    return INTERNAL if kind is FrontendKind.CLUSTER_IP else EXTERNAL


def encode_node_addresses(plan: Plan) -> frozenset[bytes]:
    """The keys of `node_addrs`."""
    return frozenset(map(NODE_ADDRESS_KEY.pack, plan.node_ports.addresses))


def setting_flags(plan: Plan) -> int:
    """What the programs must know of the node as a whole."""
    flags = sum(_LOOPBACK_FLAGS[family] for family in plan.node_ports.loopback)
    flags |= sum(_TELLS_PODS_FLAGS[family] for family in plan.tells_pods)
    flags |= sum(_BY_NET_FLAGS[network.family] for network in plan.pods.networks)
    if plan.pods.bridge or plan.pods.device_prefix:
        flags |= abi.CONSTANTS["SETTING_PODS_BY_DEVICE"]
    return flags | (abi.CONSTANTS["SETTING_MASQUERADE_ALL"] if plan.masquerade_all else 0)


def encode_subnets(plan: Plan) -> Subnets:
    """Where `settings` says that pods' addresses are."""
    by_family = {network.family: _subnet(network) for network in plan.pods.networks}
    return Subnets(
        by_family.get(Family.IPV4, NO_SUBNETS.ipv4), by_family.get(Family.IPV6, NO_SUBNETS.ipv6)
    )


def _subnet(network: Network) -> bytes:
    mask = (1 << 128) - (1 << 128 - network.length)
    return SUBNET.pack(network.address, mask.to_bytes(16))


# --- load balancers' source ranges ---------------------------------------------------------------


def source_ranges(planned: PlannedPort) -> frozenset[Network]:
    """From where its load-balancer addresses may be dialled; empty for everywhere.

    Where this node may dial them, they may themselves: a node that has such an address bound, and
    dials it, comes from it (LB-07).
    """
    if not planned.source_ranges or not planned.node_in_ranges:
        return frozenset(planned.source_ranges)
    balanced = (one for one in planned.frontends if one.kind is FrontendKind.LOAD_BALANCER)
    return frozenset((*planned.source_ranges, *(Network(one.address, 128) for one in balanced)))


def encode_source_range(network: Network, service_port_id: int) -> bytes:
    return SOURCE_RANGE_KEY.pack(ID_BITS + network.length, service_port_id, network.address)


# --- Services' addresses --------------------------------------------------------------------------


def encode_service_address(address: bytes, role: int) -> bytes:
    return SERVICE_ADDRESS_KEY.pack(address, role)


def encode_service_addresses(plan: Plan) -> frozenset[bytes]:
    """The keys of `service_addrs`.

    An address answers a ping where one of its frontends leads those somewhere who come from
    outside: under the Local policy to an endpoint on this node. Pods' pings are no exception.
    """
    found = set()
    for planned in plan.ports.values():
        for frontend in planned.frontends:
            if frontend.kind is FrontendKind.NODE_PORT:
                continue
            found.add(encode_service_address(frontend.address, ADDRESS_KNOWN))
            chosen = planned.internal if scope_of(frontend.kind) == INTERNAL else planned.external
            if chosen and chosen.backends:
                found.add(encode_service_address(frontend.address, ADDRESS_ANSWERS))
    return frozenset(found)


# --- entries --------------------------------------------------------------------------------------


def encode_backends(backends: Iterable[Backend], owner: int) -> bytes:
    return b"".join(
        BACKEND.pack(
            backend.address,
            backend.port.to_bytes(2),
            (_LOCAL if backend.local else 0) | (_TERMINATING if backend.terminating else 0),
            owner,
        )
        for backend in backends
    )


def encode_frontend(frontend: Frontend) -> bytes:
    return FRONTEND_KEY.pack(frontend.address, frontend.port.to_bytes(2), frontend.protocol)


def probe_frontends() -> dict[bytes, bytes]:
    """The entries that let the agent see whether its own connect() runs through the hooks."""
    value = FRONTEND_VALUE.pack(0, KIND_PROBE, INTERNAL)
    return {
        FRONTEND_KEY.pack(address, PROBE_PORT.to_bytes(2), Protocol.UDP): value
        for address in PROBE_ADDRESSES.values()
    }


def _port_flags(planned: PlannedPort) -> int:
    flags = abi.CONSTANTS["PORT_IPV6"] if planned.name.family is Family.IPV6 else 0
    if planned.internal_policy is Policy.LOCAL:
        flags |= abi.CONSTANTS["PORT_INTERNAL_LOCAL"]
    if planned.external_policy is Policy.LOCAL:
        flags |= abi.CONSTANTS["PORT_EXTERNAL_LOCAL"]
    if planned.source_ranges:  # LB-05, LB-06
        flags |= PORT_LB_RANGES
        # A packet of the node's own asks for this too, and of a Service that sockets leave alone.
        flags |= 0 if planned.node_in_ranges else PORT_LB_NO_HOST
        if planned.socket_lb:
            flags |= PORT_LB_NO_PODS
    return flags


def _members(planned: PlannedPort, service_port_id: int) -> frozenset[bytes]:
    """Only what a program may have to look up later: records of affinity, and UDP's flows."""
    cluster, local = planned.cluster.backends, planned.local.backends
    roles: list[tuple[int, Iterable[Backend]]] = []
    if planned.affinity_s:
        roles += [(_CLUSTER_ROLE, cluster), (_LOCAL_ROLE, local)]
    if planned.name.protocol is Protocol.UDP:
        roles.append((_SERVING_ROLE, (*cluster, *local, *planned.draining)))
    return frozenset(
        MEMBER_KEY.pack(backend.address, backend.port.to_bytes(2), role, service_port_id)
        for role, backends in roles
        for backend in backends
    )
