# SPDX-License-Identifier: Apache-2.0
"""API objects as they come over the wire or out of a file, made into the values of ``model``.

The structs name only the fields that are read; everything else in an object is skipped unread.
What is wrong in one port, endpoint or address costs that part alone and is said in the value's
``problems``; an object without a usable name, or with a field of a wrong type, is refused whole.
Nothing here raises. This file must not know where an object came from, nor what becomes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from itertools import islice
from socket import AF_INET, AF_INET6, inet_ntop, inet_pton
from sys import intern
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from ebpflb.model import (
    NO_HINTS,
    Address,
    Deleted,
    EndpointSlice,
    EndpointState,
    Family,
    Hints,
    Network,
    Node,
    ObjectKey,
    Policy,
    Protocol,
    Refused,
    Service,
    ServicePort,
    SlicePort,
    Upserted,
    family_of,
    format_address,
    is_canonical,
    parse_address,
    parse_network,
    special_use,
)

Kind = Literal["Service", "EndpointSlice", "Node"]
Told = Upserted | Deleted | Refused
"""What one object amounts to. Deleted: it is there, but not ours to serve (SVC-01 to -04)."""

KINDS: Final[Mapping[tuple[str, str], Kind]] = {
    ("v1", "Service"): "Service",
    ("discovery.k8s.io/v1", "EndpointSlice"): "EndpointSlice",
    ("v1", "Node"): "Node",
}
"""The kinds that are read, by apiVersion and kind."""

DEFAULT_AFFINITY_S: Final = 10800
_MAX_AFFINITY_S: Final = 86400
_MAX_PORT: Final = 65535
_MAX_PROBLEMS: Final = 16
_MAX_SHOWN: Final = 64
_MAX_HINTS: Final = 8
# The kernel's name map has room for a namespace, a Service and a port name of this length each.
_MAX_LABEL: Final = 63
_MAX_SUBDOMAIN: Final = 253
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
_UTC_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_PROTOCOLS: Final = {p.name: p for p in Protocol} | {"": Protocol.TCP}
_POLICIES: Final = {p.value: p for p in Policy} | {"": Policy.CLUSTER}
_FAMILIES: Final = {family.label: family for family in Family}
_V4_PREFIX: Final = bytes(10) + b"\xff\xff"


# --- the wire's own shapes: any field may be absent or null ------------------------------------


class _Labels(
    msgspec.Struct,
    gc=False,
    rename={
        "proxy_name": "service.kubernetes.io/service-proxy-name",
        "headless": "service.kubernetes.io/headless",
        "service_name": "kubernetes.io/service-name",
        "zone": "topology.kubernetes.io/zone",
    },
):
    proxy_name: str | UnsetType | None = UNSET
    headless: str | UnsetType | None = UNSET
    service_name: str | None = None
    zone: str | None = None


class _Annotations(
    msgspec.Struct,
    gc=False,
    rename={
        "exclude": "ebpflb.io/exclude",
        "socket_lb": "ebpflb.io/socket-lb",
        "triggered": "endpoints.kubernetes.io/last-change-trigger-time",
    },
):
    exclude: str | None = None
    socket_lb: str | None = None
    triggered: str | None = None


class _Meta(msgspec.Struct, gc=False, rename="camel"):
    name: str | None = None
    namespace: str | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: _Labels | None = None
    annotations: _Annotations | None = None


class _Port(msgspec.Struct, gc=False):
    name: str | None = None
    protocol: str | None = None
    port: int | None = None


class _ServicePort(_Port, gc=False, rename="camel"):
    node_port: int | None = None


class _ClientIP(msgspec.Struct, gc=False, rename="camel"):
    timeout_seconds: int | None = None


class _AffinityConfig(msgspec.Struct, gc=False, rename={"client_ip": "clientIP"}):
    client_ip: _ClientIP | None = None


class _ServiceSpec(msgspec.Struct, gc=False, rename="camel"):
    type: str | None = None
    cluster_ip: str | None = msgspec.field(default=None, name="clusterIP")
    cluster_ips: list[str | None] | None = msgspec.field(default=None, name="clusterIPs")
    ip_families: list[str | None] | None = None
    ports: list[_ServicePort | None] | None = None
    session_affinity: str | None = None
    session_affinity_config: _AffinityConfig | None = None
    internal_traffic_policy: str | None = None
    external_traffic_policy: str | None = None
    external_ips: list[str | None] | None = msgspec.field(default=None, name="externalIPs")
    load_balancer_source_ranges: list[str | None] | None = None
    health_check_node_port: int | None = None


class _Ingress(msgspec.Struct, gc=False, rename="camel"):
    ip: str | None = None
    ip_mode: str | None = None


class _LoadBalancer(msgspec.Struct, gc=False):
    ingress: list[_Ingress | None] | None = None


class _ServiceStatus(msgspec.Struct, gc=False, rename="camel"):
    load_balancer: _LoadBalancer | None = None


class _Service(msgspec.Struct, gc=False):
    metadata: _Meta | None = None
    spec: _ServiceSpec | None = None
    status: _ServiceStatus | None = None


class _Conditions(msgspec.Struct, gc=False):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Named(msgspec.Struct, gc=False):
    name: str | None = None


class _Hints(msgspec.Struct, gc=False, rename="camel"):
    for_zones: list[_Named | None] | None = None
    for_nodes: list[_Named | None] | None = None


class _Endpoint(msgspec.Struct, gc=False, rename="camel"):
    addresses: list[str | None] | None = None
    conditions: _Conditions | None = None
    node_name: str | None = None
    hints: _Hints | None = None


class _EndpointSlice(msgspec.Struct, gc=False, rename="camel"):
    metadata: _Meta | None = None
    address_type: str | None = None
    ports: list[_Port | None] | None = None
    endpoints: list[_Endpoint | None] | None = None


class _Taint(msgspec.Struct, gc=False):
    key: str | None = None


class _NodeSpec(msgspec.Struct, gc=False):
    pod_cidr: str | None = msgspec.field(default=None, name="podCIDR")
    pod_cidrs: list[str | None] | None = msgspec.field(default=None, name="podCIDRs")
    taints: list[_Taint | None] | None = None


class _NodeAddress(msgspec.Struct, gc=False):
    type: str | None = None
    address: str | None = None


class _NodeStatus(msgspec.Struct, gc=False):
    addresses: list[_NodeAddress | None] | None = None


class _Node(msgspec.Struct, gc=False):
    metadata: _Meta | None = None
    spec: _NodeSpec | None = None
    status: _NodeStatus | None = None


# --- what other files call -----------------------------------------------------------------------


def decode_json(kind: Kind, data: bytes | msgspec.Raw) -> Told:
    """Read one object of ``kind`` from its JSON text. Never raises."""
    wire, convert = _READERS[kind]
    try:
        return convert(wire.decode(data))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        return Refused(_key_in(kind, _loosely(data)), _type_error(error))


def from_builtins(kind: Kind, obj: object) -> Told:
    """Read one object of ``kind`` from dicts and lists, as a YAML reader makes them. Never raises.

    Numbers, texts and booleans must already have their right types.
    """
    wire, convert = _READERS[kind]
    try:
        return convert(msgspec.convert(obj, wire.type))
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        return Refused(_key_in(kind, obj), _type_error(error))


# --- Service -----------------------------------------------------------------------------------


def _service(raw: _Service) -> Told:
    meta, spec = raw.metadata or _Meta(), raw.spec or _ServiceSpec()
    key = ObjectKey("Service", meta.namespace or "default", meta.name or "")
    if reason := _unusable_name(key, longest=_MAX_LABEL):
        return Refused(key, reason)
    problems = _Problems()
    labels, annotations = meta.labels or _Labels(), meta.annotations or _Annotations()
    if (
        labels.proxy_name is not UNSET
        or spec.type == "ExternalName"
        or _main_cluster_ip(spec) in {"", "None"}
        or _flag("ebpflb.io/exclude", annotations.exclude, default=False, problems=problems)
    ):
        return Deleted(key)
    external_policy = _policy("spec.externalTrafficPolicy", spec.external_traffic_policy, problems)
    source_ranges, ingress_ips = _load_balancer(spec, raw.status or _ServiceStatus(), problems)
    service = Service(
        namespace=intern(key.namespace),
        name=intern(key.name),
        created=_creation_time(meta.creation_timestamp, problems),
        cluster_ips=_cluster_ips(spec, problems),
        ports=_service_ports(spec, problems),
        affinity_s=_affinity_s(spec, problems),
        internal_policy=_policy(
            "spec.internalTrafficPolicy", spec.internal_traffic_policy, problems
        ),
        external_policy=external_policy,
        socket_lb=_flag(
            "ebpflb.io/socket-lb", annotations.socket_lb, default=True, problems=problems
        ),
        external_ips=_addresses("spec.externalIPs", spec.external_ips, problems),
        ingress_ips=ingress_ips,
        source_ranges=source_ranges,
        health_port=_health_port(spec, external_policy, problems),
        problems=problems.texts(),
    )
    return Upserted(service)


def _main_cluster_ip(spec: _ServiceSpec) -> str:
    """``clusterIP``, or the first of ``clusterIPs`` as the API server would have copied it."""
    return spec.cluster_ip or (spec.cluster_ips[0] if spec.cluster_ips else "") or ""


def _cluster_ips(spec: _ServiceSpec, problems: _Problems) -> tuple[Address, ...]:
    """One address a family at most, in the Service's order (FAM-02)."""
    texts = [text or "" for text in spec.cluster_ips or ()] or [_main_cluster_ip(spec)]
    if not spec.ip_families:
        for index, text in enumerate(texts[1:], start=1):
            problems.add(
                f"spec.clusterIPs[{index}]", text, "is not served: spec.ipFamilies is empty"
            )
        address = _address("spec.clusterIP", _main_cluster_ip(spec), problems)
        return (address,) if address else ()
    by_family: dict[Family, Address] = {}
    for index, label in enumerate(spec.ip_families):
        family = _FAMILIES.get(label or "")
        if family is None:
            problems.add(f"spec.ipFamilies[{index}]", label, "is neither IPv4 nor IPv6")
        elif index >= len(texts):
            problems.add(f"spec.ipFamilies[{index}]", label, "has no address in spec.clusterIPs")
        elif family not in by_family:
            address = _address(f"spec.clusterIPs[{index}]", texts[index], problems, family)
            if address:
                by_family[family] = address
    return tuple(by_family.values())


def _service_ports(spec: _ServiceSpec, problems: _Problems) -> tuple[ServicePort, ...]:
    if not spec.ports:
        problems.say("spec.ports is empty: there is nothing to serve")
    read: list[_ServicePortRead] = []
    for index, raw in enumerate(spec.ports or ()):
        at = f"spec.ports[{index}]"
        port = _port(at, raw, problems)
        if raw and port:
            read.append((*port, _node_port(f"{at}.nodePort", raw.node_port, problems)))
    return _shared_service_ports(tuple(read))


def _node_port(field: str, number: int | None, problems: _Problems) -> int:
    """0 where there is none, or where the number is none: the port's other addresses are served."""
    if not number:
        return 0
    if not 1 <= number <= _MAX_PORT:
        problems.add(field, number, f"is out of range (1 to {_MAX_PORT}): no NodePort is served")
        return 0
    return number


def _health_port(spec: _ServiceSpec, external_policy: Policy, problems: _Problems) -> int:
    """HC-01: only a load balancer that sends local traffic alone asks who is here."""
    if spec.type != "LoadBalancer" or external_policy is not Policy.LOCAL:
        return 0
    port = spec.health_check_node_port or 0
    if not 1 <= port <= _MAX_PORT:
        problems.add("spec.healthCheckNodePort", port, "is no port: no health check is served")
        return 0
    return port


def _load_balancer(
    spec: _ServiceSpec, status: _ServiceStatus, problems: _Problems
) -> tuple[tuple[Network, ...], tuple[Address, ...]]:
    """The source ranges, and the addresses that they guard.

    Ranges of which none can be read keep everybody out: they were to keep somebody out.
    """
    texts = spec.load_balancer_source_ranges or ()
    ranges = _source_ranges(texts, problems)
    balancer = status.load_balancer or _LoadBalancer()
    addresses = _ingress_ips(balancer.ingress or (), problems)
    if texts and not ranges and addresses:
        problems.say(
            "spec.loadBalancerSourceRanges has no range that can be read: "
            "the load balancer's addresses are not served"
        )
        addresses = ()
    return ranges, addresses


def _source_ranges(texts: Iterable[str | None], problems: _Problems) -> tuple[Network, ...]:
    """Blanks around a range and host bits in it do no harm (FAM-04); an IPv6 one may be mapped."""
    ranges: set[Network] = set()
    for index, text in enumerate(texts):
        try:
            ranges.add(parse_network(text or ""))
        except ValueError:
            problems.add(f"spec.loadBalancerSourceRanges[{index}]", text, "is no CIDR")
    return tuple(sorted(ranges))


def _ingress_ips(ingress: Iterable[_Ingress | None], problems: _Problems) -> tuple[Address, ...]:
    """The addresses that this node serves: neither names nor proxies' addresses (LB-02)."""
    texts: dict[str, str] = {}
    for index, raw in enumerate(ingress):
        at = f"status.loadBalancer.ingress[{index}]"
        mode = (raw and raw.ip_mode) or "VIP"
        if mode not in {"VIP", "Proxy"}:
            problems.add(f"{at}.ipMode", mode, "is neither VIP nor Proxy: it is not served")
        elif raw and raw.ip and mode == "VIP":
            texts[f"{at}.ip"] = raw.ip
    found = (_address(field, text, problems) for field, text in texts.items())
    return tuple(dict.fromkeys(address for address in found if address))


def _addresses(
    field: str, texts: Iterable[str | None] | None, problems: _Problems
) -> tuple[Address, ...]:
    """The usable ones, of either family and each once."""
    found = (
        _address(f"{field}[{index}]", text or "", problems)
        for index, text in enumerate(texts or ())
    )
    return tuple(dict.fromkeys(address for address in found if address))


def _affinity_s(spec: _ServiceSpec, problems: _Problems) -> int:
    """Seconds of ClientIP affinity, 0 for none; AFF-04."""
    if spec.session_affinity in {None, "", "None"}:
        return 0
    if spec.session_affinity != "ClientIP":
        problems.add(
            "spec.sessionAffinity",
            spec.session_affinity,
            "is neither None nor ClientIP",
        )
        return 0
    config = spec.session_affinity_config
    seconds = config.client_ip.timeout_seconds if config and config.client_ip else None
    if seconds is None:
        return DEFAULT_AFFINITY_S
    if 1 <= seconds <= _MAX_AFFINITY_S:
        return seconds
    used = DEFAULT_AFFINITY_S if seconds < 1 else _MAX_AFFINITY_S
    problems.add(
        "spec.sessionAffinityConfig.clientIP.timeoutSeconds",
        seconds,
        f"is out of range (1 to {_MAX_AFFINITY_S}): {used} is used",
    )
    return used


# --- EndpointSlice -------------------------------------------------------------------------------


def _endpoint_slice(raw: _EndpointSlice) -> Told:
    meta = raw.metadata or _Meta()
    key = ObjectKey("EndpointSlice", meta.namespace or "default", meta.name or "")
    if reason := _unusable_name(key, longest=_MAX_SUBDOMAIN):
        return Refused(key, reason)
    labels = meta.labels or _Labels()
    if labels.headless is not UNSET or raw.address_type == "FQDN":
        return Deleted(key)
    if not labels.service_name:
        return Refused(key, "has no label kubernetes.io/service-name, so it belongs to no Service")
    problems = _Problems()
    family = _slice_family(raw, problems)
    if family is None:
        shown = _shown(raw.address_type)
        return Refused(key, f"addressType {shown} is none of IPv4, IPv6 and FQDN")
    addresses: list[Address] = []
    nodes: list[str] = []
    states = bytearray()
    hints: list[Hints] = []
    for index, endpoint in enumerate(raw.endpoints or ()):
        address = _endpoint_address(index, endpoint, family, problems)
        if endpoint and address:
            addresses.append(address)
            nodes.append(intern(endpoint.node_name or ""))
            states.append(_state(endpoint.conditions))
            hints.append(_hints(index, endpoint.hints, problems) if endpoint.hints else NO_HINTS)
    return Upserted(
        EndpointSlice(
            namespace=intern(key.namespace),
            name=key.name,
            service=intern(labels.service_name),
            family=family,
            ports=_slice_ports(raw.ports, problems),
            addresses=tuple(addresses),
            nodes=tuple(nodes),
            states=bytes(states),
            problems=problems.texts(),
            triggered_s=_unix_time((meta.annotations or _Annotations()).triggered),
            hints=tuple(hints) if any(each is not NO_HINTS for each in hints) else (),
        )
    )


def _slice_family(raw: _EndpointSlice, problems: _Problems) -> Family | None:
    """The family that ``addressType`` names; where it names none, that of the first address."""
    if raw.address_type:
        return _FAMILIES.get(raw.address_type)
    first = next((e.addresses[0] for e in raw.endpoints or () if e and e.addresses), None)
    family = Family.IPV6 if ":" in (first or "") else Family.IPV4
    problems.say(f"addressType is missing: the addresses are taken for {family.label}")
    return family


def _endpoint_address(
    index: int, raw: _Endpoint | None, family: Family, problems: _Problems
) -> Address | None:
    """The endpoint's first address, which alone counts (PORT-04); None where it is unusable."""
    if raw is None or not raw.addresses:
        problems.say(f"endpoints[{index}].addresses is empty")
        return None
    return _address(f"endpoints[{index}].addresses[0]", raw.addresses[0] or "", problems, family)


def _hints(index: int, raw: _Hints, problems: _Problems) -> Hints:
    """Equal ones are the same object: there may be 100,000 endpoints."""
    at = f"endpoints[{index}].hints"
    zones = _hint_names(f"{at}.forZones", raw.for_zones or (), problems)
    nodes = _hint_names(f"{at}.forNodes", raw.for_nodes or (), problems)
    return _shared_hints(zones, nodes) if zones or nodes else NO_HINTS


def _hint_names(
    field: str, hints: Collection[_Named | None], problems: _Problems
) -> tuple[str, ...]:
    if len(hints) > _MAX_HINTS:  # EP-08
        problems.say(f"{field} has {len(hints)} entries: the first {_MAX_HINTS} count")
    return tuple(each.name for each in islice(hints, _MAX_HINTS) if each and each.name)


@lru_cache(maxsize=4096)
def _shared_hints(zones: tuple[str, ...], nodes: tuple[str, ...]) -> Hints:
    return Hints(tuple(sorted(map(intern, {*zones}))), tuple(sorted(map(intern, {*nodes}))))


def _state(conditions: _Conditions | None) -> EndpointState:
    """EP-05: an absent condition is ready, serving and not terminating."""
    if conditions is None or conditions.ready is not False:
        return EndpointState.READY
    if conditions.terminating and conditions.serving is not False:
        return EndpointState.TERMINATING
    return EndpointState.UNUSABLE


# --- Node ----------------------------------------------------------------------------------------


def _node(raw: _Node) -> Told:
    meta = raw.metadata or _Meta()
    key = ObjectKey("Node", "", meta.name or "")
    if reason := _unusable_name(key, longest=_MAX_SUBDOMAIN):
        return Refused(key, reason)
    spec = raw.spec or _NodeSpec()
    problems = _Problems()
    node = Node(
        intern(key.name),
        zone=(meta.labels or _Labels()).zone or "",
        addresses=_node_addresses(raw.status or _NodeStatus(), problems),
        pod_cidrs=tuple(cidr for cidr in spec.pod_cidrs or [spec.pod_cidr] if cidr),
        taints=tuple(taint.key for taint in spec.taints or () if taint and taint.key),
        deleting=bool(meta.deletion_timestamp),
        problems=problems.texts(),
    )
    return Upserted(node)


def _node_addresses(status: _NodeStatus, problems: _Problems) -> tuple[Address, ...]:
    """The internal addresses, then the external ones, each in the Node's order (CFG-55)."""
    found: dict[str, list[Address]] = {"InternalIP": [], "ExternalIP": []}
    for index, raw in enumerate(status.addresses or ()):
        if raw and raw.type in found:
            field = f"status.addresses[{index}].address"
            try:
                found[raw.type].append(parse_address(raw.address or ""))
            except ValueError:
                problems.add(field, raw.address, "is no IP address")
    return (*found["InternalIP"], *found["ExternalIP"])


# --- single fields -------------------------------------------------------------------------------


class _Problems:
    """What is wrong with one object, each line naming the field and the value.

    Bounded: an object of a thousand bad endpoints says so, not a thousand times.
    """

    __slots__ = ("_more", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._more = 0

    def add(self, field: str, value: object, what: str) -> None:
        self.say(f"{field} {_shown(value)} {what}")

    def say(self, text: str) -> None:
        if len(self._texts) < _MAX_PROBLEMS:
            self._texts.append(text)
        else:
            self._more += 1

    def texts(self) -> tuple[str, ...]:
        if self._more:
            return (*self._texts, f"and {self._more} more of the kind")
        return tuple(self._texts)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _unusable_name(key: ObjectKey, *, longest: int) -> str:
    """Why this object cannot be named in a map, a rule or a message; "" where it can."""
    pattern = _LABEL if longest == _MAX_LABEL else _SUBDOMAIN
    return _unfit("metadata.name", key.name, pattern, longest) or (
        _unfit("metadata.namespace", key.namespace, _LABEL, _MAX_LABEL) if key.namespace else ""
    )


def _unfit(field: str, text: str, pattern: re.Pattern[str], longest: int) -> str:
    if not text:
        return f"{field} is missing"
    if len(text) > longest:
        return f"{field} {_shown(text)} is {len(text)} characters long: {longest} at most"
    if not pattern.fullmatch(text):
        return f"{field} {_shown(text)} is no Kubernetes name (a-z, 0-9 and - between them)"
    return ""


def _creation_time(text: str | None, problems: _Problems) -> str:
    if not text:
        return ""
    if not _UTC_TIME.fullmatch(text):
        problems.add("metadata.creationTimestamp", text, "is not like 2026-01-31T23:59:59Z: unread")
        return ""
    return intern(text)


def _unix_time(text: str | None) -> float:
    """Seconds since 1970 of an RFC 3339 time, 0 where it is none."""
    try:
        time = datetime.fromisoformat(text) if text else None
        return time.timestamp() if time and time.tzinfo else 0.0
    except (ValueError, OverflowError):
        return 0.0


def _flag(annotation: str, text: str | None, *, default: bool, problems: _Problems) -> bool:
    if text is None:
        return default
    if text not in {"true", "false"}:
        problems.add(
            f"annotation {annotation}", text, f"is neither true nor false: {str(default).lower()}"
        )
        return default
    return text == "true"


def _policy(field: str, text: str | None, problems: _Problems) -> Policy:
    policy = _POLICIES.get(text or "")
    if policy is None:
        problems.add(field, text, "is neither Cluster nor Local: Cluster is used")
        return Policy.CLUSTER
    return policy


_PortRead = tuple[str, Protocol, int]
_ServicePortRead = tuple[str, Protocol, int, int]


# Most objects of a cluster have one of a few port lists, so equal ones are the same object.
@lru_cache(maxsize=1024)
def _shared_service_ports(read: tuple[_ServicePortRead, ...]) -> tuple[ServicePort, ...]:
    return tuple(ServicePort(*port) for port in read)


@lru_cache(maxsize=1024)
def _shared_slice_ports(read: tuple[_PortRead, ...]) -> tuple[SlicePort, ...]:
    return tuple(SlicePort(*port) for port in read)


def _slice_ports(ports: list[_Port | None] | None, problems: _Problems) -> tuple[SlicePort, ...]:
    read = (_port(f"ports[{i}]", raw, problems) for i, raw in enumerate(ports or ()))
    return _shared_slice_ports(tuple(port for port in read if port))


def _port(at: str, raw: _Port | None, problems: _Problems) -> _PortRead | None:
    """Name, protocol and number, None where one of them is unusable (PORT-04)."""
    if raw is None or raw.port is None:
        problems.say(f"{at}.port is missing")
        return None
    if not 1 <= raw.port <= _MAX_PORT:
        problems.add(f"{at}.port", raw.port, f"is out of range (1 to {_MAX_PORT})")
        return None
    protocol = _PROTOCOLS.get(raw.protocol or "")
    if protocol is None:
        problems.add(f"{at}.protocol", raw.protocol, "is none of TCP, UDP and SCTP")
        return None
    name = raw.name or ""
    if name and (reason := _unfit(f"{at}.name", name, _LABEL, _MAX_LABEL)):
        problems.say(reason)
        return None
    return intern(name), protocol, raw.port


def _address(
    field: str, text: str, problems: _Problems, family: Family | None = None
) -> Address | None:
    """The address, unless it is none, of another family or refused by SEC-03."""
    try:
        address, canonical = _read_address(text)
    except ValueError:
        problems.add(field, text, "is no IP address")
        return None
    if family is not None and family_of(address) is not family:
        problems.add(field, text, f"is no {family.label} address")
        return None
    if special := special_use(address):
        problems.add(field, text, f"is {special} and is refused")
        return None
    if not canonical:
        problems.add(
            field, text, f"is read as {format_address(address)} and served: better written so"
        )
    return address


def _read_address(text: str) -> tuple[Address, bool]:
    """The address, and whether it was written as a current API server wants it (FAM-09)."""
    try:
        if ":" not in text:
            # The C library takes four decimal numbers without leading zeros, nothing else.
            return Address(_V4_PREFIX + inet_pton(AF_INET, text)), True
        packed = inet_pton(AF_INET6, text)
        if inet_ntop(AF_INET6, packed) == text and not packed.startswith(_V4_PREFIX):
            return Address(packed), True
    except OSError:
        pass
    return parse_address(text), is_canonical(text)


# --- objects that cannot be read -----------------------------------------------------------------


def _type_error(error: Exception) -> str:
    """Put the field first: ``spec.ports[0].port has a wrong type: expected int, got str``."""
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    what, _, path = str(error).partition(" - at ")
    what = what.replace("`", "").replace(" | null", "")
    if not path:
        return f"cannot be read: {what}"
    field = path.replace("`", "").replace("$.", "").replace("$", "object").replace("[...]", "[*]")
    return f"{field} has a wrong type: {what[:1].lower()}{what[1:]}"


def _loosely(data: bytes | msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _key_in(kind: Kind, obj: object) -> ObjectKey:
    """Name an unreadable object as well as can be; parts that are not there are ""."""
    meta = obj.get("metadata") if isinstance(obj, dict) else None
    name, namespace = (
        (meta.get("name"), meta.get("namespace")) if isinstance(meta, dict) else ("", "")
    )
    if kind == "Node":
        namespace = ""
    elif not isinstance(namespace, str) or not namespace:
        namespace = "default"
    return ObjectKey(kind, namespace, name if isinstance(name, str) else "")


_READERS: Final[Mapping[Kind, tuple[msgspec.json.Decoder[Any], Callable[[Any], Told]]]] = {
    "Service": (msgspec.json.Decoder(_Service), _service),
    "EndpointSlice": (msgspec.json.Decoder(_EndpointSlice), _endpoint_slice),
    "Node": (msgspec.json.Decoder(_Node), _node),
}
