# SPDX-License-Identifier: Apache-2.0
"""A plan, and what maps hold, in the words of a scenario file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.rows import flag_words, subnet_text
from ebpflb.datapath.ebpf.tables import (
    KIND_PROBE,
    KINDS,
    PORT_IPV6,
    SERVICE_ADDRESS_KEY,
    BackendEntry,
    Snapshot,
)
from ebpflb.model import (
    Backend,
    Frontend,
    FrontendKind,
    Plan,
    PlannedPort,
    Policy,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
    format_address,
    format_endpoint,
)

_SCOPES = abi.names_of("SCOPE_")
_PORT_FLAGS = abi.names_of("PORT_")
_ADDRESS_ROLES = abi.names_of("ADDRESS_")
_SETTING_FLAGS = abi.names_of("SETTING_")


def plan_text(plan: Plan) -> str:
    """All of it, a paragraph for each service port; ``nothing`` where there is none.

    Where NodePorts answer is said where there are any, and by what pods are told where something
    does.
    """
    lines = [line for name in sorted(plan.ports) for line in _port(plan.ports[name])]
    dialled = [one for port in plan.ports.values() for one in port.frontends]
    if any(one.kind is FrontendKind.NODE_PORT for one in dialled):
        where = plan.node_ports
        loopback = [f"loopback-{family.label}" for family in sorted(where.loopback)]
        addresses = map(format_address, sorted(where.addresses))
        lines.append(" ".join(["node-ports", *addresses, *loopback]))
    told_by = [*map(str, plan.pods.networks), plan.pods.bridge, plan.pods.device_prefix]
    if told := [one for one in told_by if one]:
        lines.append(" ".join(["pods-by", *told]))
    if plan.masquerade_all:
        lines.append("masquerade-all")
    for key, check in sorted(plan.health_checks.items()):
        lines.append(f"health {key.namespace}/{key.name} at {check.port}: {check.endpoints}")
    return "\n".join(lines) or "nothing"


def _port(port: PlannedPort) -> Iterator[str]:
    yield _words(port.name)
    for frontend in port.frontends:
        yield f"  {frontend.kind.value} {_dialled(frontend)}"
    yield f"  cluster: {_selection(port.cluster)}"
    yield f"  local: {_selection(port.local)}"
    if port.draining:
        yield f"  draining: {_backends(port.draining)}"
    policies = (port.internal_policy, port.external_policy)
    if policies != (Policy.CLUSTER, Policy.CLUSTER):
        yield f"  policies: internal {policies[0].value}, external {policies[1].value}"
    if port.affinity_s:
        yield f"  affinity: {port.affinity_s}"
    if port.source_ranges:
        node = "with" if port.node_in_ranges else "without"
        yield f"  only for: {', '.join(map(str, port.source_ranges))}, {node} this node"
    if not port.socket_lb:
        yield "  not at the socket"


def _words(name: ServicePortName) -> str:
    return f"{name} {name.protocol.name} {name.family.label}"


def _dialled(frontend: Frontend) -> str:
    if frontend.kind is FrontendKind.NODE_PORT:
        return f"{frontend.port}"
    return format_endpoint(frontend.address, frontend.port)


def _selection(selection: Selection) -> str:
    if selection.verdict is not Verdict.FORWARD:
        return f"{selection.verdict.value}"
    return _backends(selection.backends)


def _backends(backends: Iterable[Backend | BackendEntry]) -> str:
    return ", ".join(
        format_endpoint(one.address, one.port)
        + (" local" if one.local else "")
        + (" terminating" if one.terminating else "")
        for one in backends
    )


def map_lines(snapshot: Snapshot) -> list[str]:
    """What the kernel would act on, a line each.

    The flags of a service port are said where there are any but its family's, those of the node
    where there are any, with the networks of its pods.
    """
    names = {port.id: port.name for port in snapshot.ports if port.name}
    lines = []
    for frontend in snapshot.frontends:
        if frontend.kind == KIND_PROBE:
            continue
        at = format_endpoint(frontend.address, frontend.port)
        lines.append(
            f"frontend {at}/{Protocol(frontend.protocol).name} "
            f"{KINDS[frontend.kind].value} {_SCOPES[frontend.scope]} -> {names[frontend.id]}"
        )
    for port in snapshot.ports:
        if port.name is None:
            continue
        if flags := flag_words(port.flags & ~PORT_IPV6, _PORT_FLAGS):
            lines.append(f"port {_words(port.name)}: {' '.join(flags)}")
        for word, entries in (
            ("cluster", snapshot.cluster[port.id]),
            ("local", snapshot.local[port.id]),
        ):
            lines.append(f"{word} {_words(port.name)}: {_backends(entries) or 'none'}")
        if ranges := [str(one.network) for one in snapshot.source_ranges if one.id == port.id]:
            lines.append(f"source_ranges {_words(port.name)}: {', '.join(sorted(ranges))}")
    lines += [f"node_addrs {format_address(one)}" for one in snapshot.node_addrs]
    addresses: dict[bytes, list[str]] = {}
    for entry in map(SERVICE_ADDRESS_KEY.unpack, snapshot.service_addrs):
        addresses.setdefault(entry.address, []).append(_ADDRESS_ROLES[entry.role])
    lines += [
        f"service_addrs {format_address(address)}: {' '.join(roles)}"
        for address, roles in sorted(addresses.items())
    ]
    if words := flag_words(snapshot.flags, _SETTING_FLAGS):
        pods = [text for text in map(subnet_text, snapshot.subnets) if text]
        lines.append(f"settings {' '.join(words)}" + (f": {', '.join(pods)}" if pods else ""))
    return lines
