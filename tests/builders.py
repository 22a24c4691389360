# SPDX-License-Identifier: Apache-2.0
"""Small objects for tests, all addresses from the lab's plan.

``service_object`` and its like make API objects as dicts, ``service`` and its like the values that
the planner takes. Whatever a test does not care about has a default.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from ebpflb.lab.addresses import node_ipv4, pod_ipv4, pod_ipv6
from ebpflb.model import (
    NO_HINTS,
    Address,
    Backend,
    EndpointSlice,
    EndpointState,
    Family,
    Frontend,
    FrontendKind,
    Hints,
    Node,
    ObjectKey,
    PodDetector,
    Policy,
    Protocol,
    Service,
    ServicePort,
    ServicePortName,
    SlicePort,
    family_of,
    parse_address,
    parse_network,
)
from ebpflb.planner.options import PlannerOptions
from ebpflb.planner.plan import Planner
from ebpflb.sources import wire

NODE = "node-1"
OTHER_NODE = "node-2"
CREATED = "2026-01-01T00:00:00Z"

READY = EndpointState.READY
TERMINATING = EndpointState.TERMINATING
UNUSABLE = EndpointState.UNUSABLE

ApiObject = dict[str, Any]


def cluster_ip(number: int, family: Family = Family.IPV4) -> str:
    """Return ClusterIP number ``number`` (1 to 65534)."""
    if family is Family.IPV6:
        return f"fd96::{number:x}"
    return f"10.96.{number // 256}.{number % 256}"


def pod_ip(number: int, family: Family = Family.IPV4, *, node: int = 1) -> str:
    """Return the address of pod ``number`` of a node; 1 is its bridge."""
    return pod_ipv6(node, number) if family is Family.IPV6 else pod_ipv4(node, number)


def node_ip(number: int) -> str:
    """Return a node's address."""
    return node_ipv4(number)


# --- API objects -----------------------------------------------------------------------------


def service_object(
    name: str = "web",
    *,
    namespace: str = "default",
    cluster_ips: Sequence[str] = (cluster_ip(10),),
    ports: Iterable[ApiObject] = ({"name": "http", "port": 80},),
    labels: dict[str, str | None] | None = None,
    annotations: dict[str, str | None] | None = None,
    created: str | None = CREATED,
    ingress: object = None,
    **spec: object,
) -> ApiObject:
    """Return a v1 Service; ``ingress`` is in its status, ``spec`` adds to or replaces its spec."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "creationTimestamp": created,
            "labels": labels,
            "annotations": annotations,
        },
        "spec": {
            "clusterIP": next(iter(cluster_ips), ""),
            "clusterIPs": list(cluster_ips),
            "ipFamilies": ["IPv6" if ":" in ip else "IPv4" for ip in cluster_ips],
            "ports": list(ports),
        }
        | spec,
        "status": {"loadBalancer": {"ingress": ingress}},
    }


def endpoint_object(
    address: str | None = pod_ip(10),
    *,
    node: str | None = NODE,
    hints: object = None,
    **conditions: bool | None,
) -> ApiObject:
    """Return one entry of a slice's ``endpoints``."""
    return {
        "addresses": [] if address is None else [address],
        "nodeName": node,
        "conditions": conditions or None,
        "hints": hints,
    }


def slice_object(
    name: str = "web-1",
    *,
    namespace: str = "default",
    service: str | None = "web",
    endpoints: Iterable[ApiObject | None] = (endpoint_object(),),
    ports: Iterable[ApiObject | None] = ({"name": "http", "port": 8080},),
    labels: dict[str, str | None] | None = None,
    address_type: str | None = "IPv4",
) -> ApiObject:
    """Return a discovery.k8s.io/v1 EndpointSlice."""
    belongs = {} if service is None else {"kubernetes.io/service-name": service}
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": namespace, "labels": belongs | (labels or {})},
        "addressType": address_type,
        "ports": list(ports),
        "endpoints": list(endpoints),
    }


def node_object(name: str = NODE, *, labels: dict[str, str | None] | None = None) -> ApiObject:
    """Return a v1 Node."""
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}


def told(obj: ApiObject) -> wire.Told:
    """Read an API object as a source would."""
    return wire.decode_json(wire.KINDS[obj["apiVersion"], obj["kind"]], msgspec.json.encode(obj))


# --- model values ----------------------------------------------------------------------------


def service(
    name: str = "web",
    *,
    namespace: str = "default",
    cluster_ips: Iterable[str] = (cluster_ip(10),),
    ports: Iterable[ServicePort] = (ServicePort("http", Protocol.TCP, 80),),
    created: str = CREATED,
    affinity_s: int = 0,
    internal_policy: Policy = Policy.CLUSTER,
    external_policy: Policy = Policy.CLUSTER,
    external_ips: Iterable[str] = (),
    ingress_ips: Iterable[str] = (),
    source_ranges: Iterable[str] = (),
    health_port: int = 0,
    problems: tuple[str, ...] = (),
) -> Service:
    """Return a Service of one TCP port ``http``."""
    return Service(
        namespace=namespace,
        name=name,
        created=created,
        cluster_ips=tuple(map(parse_address, cluster_ips)),
        ports=tuple(ports),
        affinity_s=affinity_s,
        internal_policy=internal_policy,
        external_policy=external_policy,
        external_ips=tuple(map(parse_address, external_ips)),
        ingress_ips=tuple(map(parse_address, ingress_ips)),
        source_ranges=tuple(map(parse_network, source_ranges)),
        health_port=health_port,
        problems=problems,
    )


class Row(NamedTuple):
    """An endpoint as a slice has it."""

    address: str
    node: str
    state: EndpointState
    hints: Hints


def at(
    address: str,
    node: str = OTHER_NODE,
    state: EndpointState = READY,
    *,
    zones: Iterable[str] = (),
    nodes: Iterable[str] = (),
) -> Row:
    """Return an endpoint, ready and on another node, with hints for zones and nodes."""
    hints = Hints(tuple(zones), tuple(nodes))
    return Row(address, node, state, NO_HINTS if hints == NO_HINTS else hints)


def endpoint_slice(
    *rows: Row,
    name: str = "web-1",
    namespace: str = "default",
    service: str = "web",
    ports: Iterable[SlicePort] = (SlicePort("http", Protocol.TCP, 8080),),
    problems: tuple[str, ...] = (),
) -> EndpointSlice:
    """Return a slice of the family of its first endpoint."""
    addresses: tuple[Address, ...] = tuple(parse_address(row.address) for row in rows)
    has_hints = any(row.hints is not NO_HINTS for row in rows)
    return EndpointSlice(
        namespace=namespace,
        name=name,
        service=service,
        family=family_of(addresses[0]) if addresses else Family.IPV4,
        ports=tuple(ports),
        addresses=addresses,
        nodes=tuple(row.node for row in rows),
        states=bytes(row.state for row in rows),
        hints=tuple(row.hints for row in rows) if has_hints else (),
        problems=problems,
    )


def node(*addresses: str, zone: str = "", pod_cidrs: tuple[str, ...] = ()) -> Node:
    """Return this node's Node object."""
    return Node(NODE, zone, addresses=tuple(map(parse_address, addresses)), pod_cidrs=pod_cidrs)


def by_network(*texts: str) -> PodDetector:
    """Return a detector that tells pods by their addresses."""
    return PodDetector(networks=tuple(map(parse_network, texts)))


def new_planner(**options: Any) -> Planner:
    """Return a planner for this node."""
    return Planner(PlannerOptions(node_name=NODE, **options))


def frontend(
    address: str,
    port: int = 80,
    protocol: Protocol = Protocol.TCP,
    kind: FrontendKind = FrontendKind.CLUSTER_IP,
) -> Frontend:
    """Return what clients dial."""
    return Frontend(parse_address(address), port, protocol, kind)


def backend(
    address: str, port: int = 8080, *, local: bool = False, terminating: bool = False
) -> Backend:
    """Return a backend, ready and on another node."""
    return Backend(parse_address(address), port, local, terminating)


def port_name(
    name: str = "web",
    port: str = "http",
    *,
    namespace: str = "default",
    protocol: Protocol = Protocol.TCP,
    family: Family = Family.IPV4,
) -> ServicePortName:
    """Return the identity of a service port."""
    return ServicePortName(namespace, name, port, protocol, family)


def service_key(name: str = "web", *, namespace: str = "default") -> ObjectKey:
    """Return the key of a Service."""
    return ObjectKey("Service", namespace, name)


def slice_key(name: str = "web-1", *, namespace: str = "default") -> ObjectKey:
    """Return the key of an EndpointSlice."""
    return ObjectKey("EndpointSlice", namespace, name)
