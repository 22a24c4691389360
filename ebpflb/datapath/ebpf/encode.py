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
    BACKEND,
    EXTERNAL,
    FRONTEND_KEY,
    FRONTEND_VALUE,
    INTERNAL,
    KIND_PROBE,
    KINDS,
    MEMBER_KEY,
    NODE_ADDRESS_KEY,
    PORT_LB_NO_HOST,
    PORT_LB_NO_PODS,
)
from ebpflb.model import (
    Address,
    Backend,
    Family,
    Frontend,
    FrontendKind,
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

MEMBER_VALUE = bytes(abi.LAYOUTS["member_value"].size)
NODE_ADDRESS_VALUE = bytes(abi.LAYOUTS["node_address"].size)

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
    """Keys and values as the maps have them. ``sets`` is by set: cluster, local."""

    sets: tuple[Slots, Slots]
    draining: int
    affinity_s: int
    port_flags: int
    frontends: Mapping[bytes, bytes]
    members: frozenset[bytes]


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
    return flags | sum(_TELLS_PODS_FLAGS[family] for family in plan.tells_pods)


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
    if planned.source_ranges and planned.socket_lb:  # LB-05, LB-06
        flags |= PORT_LB_NO_PODS if planned.node_in_ranges else PORT_LB_NO_PODS | PORT_LB_NO_HOST
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
