# SPDX-License-Identifier: Apache-2.0
"""The values that flow from the sources through the planner to a datapath.

Plain frozen values, no behaviour beyond reading and printing themselves. This file must not know
where an object came from, what a map looks like, or what time it is.

Addresses have one form everywhere: 16 bytes in network order, IPv4 as ``::ffff:a.b.c.d``.
Ports are plain integers in host order, 1 to 65535.
"""

from __future__ import annotations

import enum
import ipaddress
from collections.abc import Mapping
from typing import NewType

import msgspec

Address = NewType("Address", bytes)
"""16 bytes, network order; IPv4 in its mapped form."""

_V4_PREFIX = bytes(10) + b"\xff\xff"
_V6_LOOPBACK = bytes(15) + b"\x01"
_V6_UNSPECIFIED = bytes(16)
_DECIMAL_OCTET_MAX_LEN = 16


class Family(enum.IntEnum):
    """The two address families; the number is the IP version, ``label`` is Kubernetes' word."""

    IPV4 = 4
    IPV6 = 6

    @property
    def label(self) -> str:
        return "IPv4" if self is Family.IPV4 else "IPv6"


def parse_address(text: str) -> Address:
    """Read an IPv4 or IPv6 address as Kubernetes' own sloppy parser does.

    Leading zeros in an IPv4 octet are decimal (FAM-09), an IPv4-mapped IPv6 address is the IPv4
    address. Raises ValueError, naming the text, for anything else, zone ids included.
    """
    if "%" in text:
        raise ValueError(f"{text!r} carries a zone")
    if ":" not in text:
        octets = text.split(".")
        if len(octets) != 4 or not all(
            o.isascii() and o.isdigit() and len(o) <= _DECIMAL_OCTET_MAX_LEN and int(o) <= 255
            for o in octets
        ):
            raise ValueError(f"{text!r} is no IP address")
        return Address(_V4_PREFIX + bytes(int(o) for o in octets))
    try:
        return Address(ipaddress.IPv6Address(text).packed)
    except ValueError:
        raise ValueError(f"{text!r} is no IP address") from None


def is_canonical(text: str) -> bool:
    """Whether ``text`` is how a current API server would let an address be written."""
    try:
        return format_address(parse_address(text)) == text
    except ValueError:
        return False


def format_address(address: bytes) -> str:
    """``10.0.0.1`` or ``fd00::1``; raises ValueError when not 16 bytes long."""
    if address[:12] == _V4_PREFIX:
        return ".".join(map(str, address[12:16]))
    return str(ipaddress.IPv6Address(bytes(address)))


def format_endpoint(address: bytes, port: int) -> str:
    """``10.0.0.1:80`` or ``[fd00::1]:80``."""
    text = format_address(address)
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"


def family_of(address: bytes) -> Family:
    """Tell the family of 16 bytes; mapped addresses are IPv4."""
    return Family.IPV4 if address[:12] == _V4_PREFIX else Family.IPV6


def unspecified(family: Family) -> Address:
    """``0.0.0.0`` or ``::``."""
    return Address((_V4_PREFIX if family is Family.IPV4 else bytes(12)) + bytes(4))


def special_use(address: bytes) -> str:
    """``a loopback address`` and the like, for one that is no single node's or Service's (SEC-03).

    "" for all others: unspecified, loopback, link-local and multicast addresses are special.
    """
    if address.startswith(_V4_PREFIX):
        first = address[12]
        loopback = first == 127
        link_local = first == 169 and address[13] == 254
        multicast = 224 <= first < 240
        unspecified = first == 0 and address.endswith(bytes(4))
    else:
        first = address[0]
        loopback = address == _V6_LOOPBACK
        link_local = first == 0xFE and address[1] & 0xC0 == 0x80
        multicast = first == 0xFF
        unspecified = address == _V6_UNSPECIFIED
    if not (loopback or link_local or multicast or unspecified):
        return ""
    if unspecified:
        return "the unspecified address"
    return f"a {'loopback' if loopback else 'link-local' if link_local else 'multicast'} address"


class Network(msgspec.Struct, frozen=True, order=True, gc=False):
    """A range of addresses: those whose first ``length`` bits of 128 are those of ``address``.

    ``address`` has no bit set behind them; an IPv4 prefix is 96 shorter than ``length``.
    """

    address: Address
    length: int

    @property
    def family(self) -> Family:
        return family_of(self.address)

    @property
    def admits_all(self) -> bool:
        """Whether every address of its family is in it."""
        return self.length == (96 if self.family is Family.IPV4 else 0)

    def __contains__(self, address: bytes) -> bool:
        """Whether the address is in the range; one of the other family never is."""
        if family_of(address) is not self.family:
            return False
        shift = 128 - self.length
        return int.from_bytes(address) >> shift == int.from_bytes(self.address) >> shift

    def __str__(self) -> str:
        prefix = self.length - 96 if self.family is Family.IPV4 else self.length
        return f"{format_address(self.address)}/{prefix}"


def parse_network(text: str) -> Network:
    """Read ``10.0.0.0/8`` or ``fd00::/48``, with blanks around it (FAM-04) and host bits or not.

    Raises ValueError, naming the text, for anything else.
    """
    address_text, slash, prefix_text = text.strip().partition("/")
    address = parse_address(address_text)
    longest = 32 if family_of(address) is Family.IPV4 and ":" not in address_text else 128
    is_number = prefix_text.isascii() and prefix_text.isdigit() and len(prefix_text) <= 3
    if not (slash and is_number and int(prefix_text) <= longest):
        raise ValueError(f"{text!r} is no CIDR")
    length = 128 - longest + int(prefix_text)
    shift = 128 - length
    start = int.from_bytes(address) >> shift << shift
    if longest == 128 and family_of(address) is Family.IPV4 and length < 96:
        raise ValueError(f"{text!r} is no CIDR")
    return Network(Address(start.to_bytes(16)), length)


class Protocol(enum.IntEnum):
    """The transport protocols of a Service, by their IP protocol numbers."""

    TCP = 6
    UDP = 17
    SCTP = 132


class Policy(enum.Enum):
    """A traffic policy: every endpoint, or only those on this node."""

    CLUSTER = "Cluster"
    LOCAL = "Local"


class FrontendKind(enum.Enum):
    """Why clients dial this address; values are the words of ``service list``."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    EXTERNAL_IP = "ExternalIP"
    LOAD_BALANCER = "LoadBalancer"


# --- API objects, only the fields that are read ------------------------------------------------


class ObjectKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """Names one API object: ``Service default/web``."""

    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        where = f"{self.namespace}/{self.name}" if self.namespace else self.name
        return f"{self.kind} {where}"


class ServicePort(msgspec.Struct, frozen=True, gc=False):
    """One entry of a Service's ``ports``; ``node_port`` is 0 where it has none."""

    name: str
    protocol: Protocol
    port: int
    node_port: int = 0


class Service(msgspec.Struct, frozen=True, gc=False):
    """A Service, checked field by field; what was wrong with it stands in ``problems``.

    ``created`` is the RFC 3339 creation time as text ("" where unknown); such texts sort by time.
    ``affinity_s`` is the ClientIP time-out, 0 without affinity. ``ingress_ips`` are the load
    balancer's addresses that are this node's to serve (LB-02), ``source_ranges`` who may dial them
    (LB-05; nobody is kept out where there are none). ``health_port`` is 0 where there is to be no
    health server (HC-01).
    """

    namespace: str
    name: str
    created: str
    cluster_ips: tuple[Address, ...]
    ports: tuple[ServicePort, ...]
    affinity_s: int = 0
    internal_policy: Policy = Policy.CLUSTER
    external_policy: Policy = Policy.CLUSTER
    socket_lb: bool = True
    external_ips: tuple[Address, ...] = ()
    ingress_ips: tuple[Address, ...] = ()
    source_ranges: tuple[Network, ...] = ()
    health_port: int = 0
    problems: tuple[str, ...] = ()

    @property
    def key(self) -> ObjectKey:
        return ObjectKey("Service", self.namespace, self.name)


class SlicePort(msgspec.Struct, frozen=True, gc=False):
    """One entry of a slice's ``ports``; ``port`` is where its endpoints listen."""

    name: str
    protocol: Protocol
    port: int


class Hints(msgspec.Struct, frozen=True, gc=False):
    """Whom the controller would like to use an endpoint: clients in these zones, on these nodes."""

    zones: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()


NO_HINTS = Hints()


class EndpointState(enum.IntEnum):
    """What an endpoint's conditions come to (EP-05, TOP-13); the higher is preferred (EP-02)."""

    UNUSABLE = 0
    TERMINATING = 1  # serving and terminating: takes new connections where nothing is ready
    READY = 2


class EndpointSlice(msgspec.Struct, frozen=True, gc=False):
    """A slice, checked field by field; what was wrong with it stands in ``problems``.

    All its endpoints are of one ``family``. They are columns of one length, because there may be
    100,000 of them: endpoint i is at ``addresses[i]`` (its first address) on node ``nodes[i]``
    ("" where unknown) and in the EndpointState ``states[i]``. ``hints`` is one column more, or
    empty where no endpoint has any. ``triggered_s`` is the Unix time of the change that made the
    slice what it is (MET-30), 0 where nobody says it.
    """

    namespace: str
    name: str
    service: str
    family: Family
    ports: tuple[SlicePort, ...]
    addresses: tuple[Address, ...]
    nodes: tuple[str, ...]
    states: bytes
    problems: tuple[str, ...] = ()
    triggered_s: float = 0.0
    hints: tuple[Hints, ...] = ()

    @property
    def key(self) -> ObjectKey:
        return ObjectKey("EndpointSlice", self.namespace, self.name)


class Node(msgspec.Struct, frozen=True, gc=False):
    """This node, as the cluster knows it.

    ``addresses`` are its internal ones and then its external ones, ``taints`` the keys of its
    taints; ``deleting``: somebody has asked for its deletion.
    """

    name: str
    zone: str = ""
    problems: tuple[str, ...] = ()
    addresses: tuple[Address, ...] = ()
    pod_cidrs: tuple[str, ...] = ()
    taints: tuple[str, ...] = ()
    deleting: bool = False

    @property
    def key(self) -> ObjectKey:
        return ObjectKey("Node", "", self.name)


ApiObject = Service | EndpointSlice | Node


# --- events, from a source to the agent ----------------------------------------------------------


class Upserted(msgspec.Struct, frozen=True, gc=False):
    """``obj`` exists, in this state, from now on."""

    obj: ApiObject


class Deleted(msgspec.Struct, frozen=True, gc=False):
    """There is no such object (any more)."""

    key: ObjectKey


class Refused(msgspec.Struct, frozen=True, gc=False):
    """The object exists but cannot be read at all; it counts as absent until it is mended."""

    key: ObjectKey
    reason: str


class Synced(msgspec.Struct, frozen=True, gc=False):
    """All objects that existed when the source began have been told."""


class LocalAddresses(msgspec.Struct, frozen=True, gc=False):
    """The addresses of this node's interfaces, all of them, loopback's too, as they are now."""

    addresses: frozenset[Address]


Event = Upserted | Deleted | Refused | Synced | LocalAddresses


# --- the plan, from the planner to a datapath ----------------------------------------------------


class ServicePortName(msgspec.Struct, frozen=True, gc=False):
    """Identity of a service port in one family (PORT-01, FAM-01: the families are independent).

    ``port`` is its name, "" where it has none.
    """

    namespace: str
    name: str
    port: str
    protocol: Protocol
    family: Family

    def __str__(self) -> str:
        """``ns/name:port``, and ``ns/name`` for an unnamed port."""
        return f"{self.namespace}/{self.name}" + (f":{self.port}" if self.port else "")

    def __lt__(self, other: ServicePortName) -> bool:
        return self.sort_key < other.sort_key

    @property
    def sort_key(self) -> tuple[str, str, str, int, int]:
        return (self.namespace, self.name, self.port, self.protocol.value, self.family.value)


class Frontend(msgspec.Struct, frozen=True, gc=False):
    """What clients dial."""

    address: Address
    port: int
    protocol: Protocol
    kind: FrontendKind


class Backend(msgspec.Struct, frozen=True, gc=False):
    """What a frontend selects. ``local``: it runs on this node."""

    address: Address
    port: int
    local: bool
    terminating: bool


class Verdict(enum.Enum):
    """What becomes of a new connection in one scope."""

    FORWARD = "forward"
    REJECT = "reject"  # no endpoint anywhere: NOEP-01, -02, -03
    DROP = "drop"  # endpoints exist, none that the policy allows: NOEP-04, -05


class Selection(msgspec.Struct, frozen=True, gc=False):
    """Where new connections of one scope go. ``backends`` is empty unless FORWARD, and sorted."""

    verdict: Verdict
    backends: tuple[Backend, ...]


class PlannedPort(msgspec.Struct, frozen=True, gc=False):
    """All that a datapath must know of one service port.

    ``cluster`` and ``local`` are the two sets to choose from, every endpoint and those on this node
    (TOP-03, TOP-04); the policies say which is for whom. ``draining`` are usable endpoints in
    neither set: they serve open connections only. ``socket_lb`` False: the socket path must leave
    its frontends alone.

    ``source_ranges``, where there are any, are who may dial its load-balancer addresses;
    ``node_in_ranges``: this node's own processes are among them (LB-05 to -07).
    """

    name: ServicePortName
    frontends: tuple[Frontend, ...]
    cluster: Selection
    local: Selection
    draining: tuple[Backend, ...]
    affinity_s: int
    internal_policy: Policy
    external_policy: Policy
    socket_lb: bool = True
    source_ranges: tuple[Network, ...] = ()
    node_in_ranges: bool = True

    @property
    def is_external(self) -> bool:
        """Whether it has a NodePort, an external or a load-balancer address (TOP-01)."""
        return any(one.kind is not FrontendKind.CLUSTER_IP for one in self.frontends)

    @property
    def internal(self) -> Selection:
        """Where the ClusterIP leads (POL-01)."""
        return self.local if self.internal_policy is Policy.LOCAL else self.cluster

    @property
    def external(self) -> Selection | None:
        """Where all other frontends lead those who come from outside (POL-02, -03); None without.

        Pods and this node's own processes are led to ``cluster`` (POL-04, -05).
        """
        if not self.is_external:
            return None
        return self.local if self.external_policy is Policy.LOCAL else self.cluster


class NodePorts(msgspec.Struct, frozen=True):
    """Where NodePorts answer: at ``addresses`` of this node, from everywhere.

    ``loopback``: and for this node's own processes at 127.0.0.0/8, or at ::1 (NP-07). Both
    families' frontends stand at the unspecified address, ``::ffff:0.0.0.0`` and ``::``.
    """

    addresses: frozenset[Address] = frozenset()
    loopback: frozenset[Family] = frozenset()


class PodDetector(msgspec.Struct, frozen=True):
    """How local pods' packets are told from others (MASQ-09); by nothing where all is empty.

    By their source in one of ``networks``, of which a family has one at most; or by the device
    that they come in on, whatever the family: ports of the bridge ``bridge``, or those whose name
    begins with ``device_prefix``.
    """

    networks: tuple[Network, ...] = ()
    bridge: str = ""
    device_prefix: str = ""

    @property
    def families(self) -> frozenset[Family]:
        if self.bridge or self.device_prefix:
            return frozenset(Family)
        return frozenset(network.family for network in self.networks)


class HealthCheck(msgspec.Struct, frozen=True, gc=False):
    """What a Service's health server says (HC-01, HC-06): ``endpoints`` ready ones are local."""

    port: int
    endpoints: int


class Plan(msgspec.Struct, frozen=True):
    """What this node should do, whole: one entry for each service port that is served.

    ``node_addresses`` are those that the Node object and the bind address name, none where there
    are neither. ``pods`` says which packets are local pods'. ``masquerade_all``: whatever goes to a
    ClusterIP bears this node's address (MASQ-01). ``health_checks`` are by their Service's key.
    """

    ports: Mapping[ServicePortName, PlannedPort]
    node_ports: NodePorts = NodePorts()
    node_addresses: frozenset[Address] = frozenset()
    pods: PodDetector = PodDetector()
    masquerade_all: bool = False
    health_checks: Mapping[ObjectKey, HealthCheck] = {}

    @property
    def tells_pods(self) -> frozenset[Family]:
        """The families in which pods can be told from the outside (POL-06).

        In the others they are treated as outside, and nothing to a ClusterIP is masqueraded
        (MASQ-03).
        """
        return self.pods.families


class Rejected(msgspec.Struct, frozen=True, order=True, gc=False):
    """An object, or a part of it, that is not served, and why. Its other parts are."""

    key: ObjectKey
    reason: str
