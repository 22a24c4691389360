# SPDX-License-Identifier: Apache-2.0
"""The reachability matrix: whom a client reaches at a Service's addresses, and whom that one sees.

The oracle, ``expect``, says it for each combination of client, frontend, policies and backend, from
the rows of the specification (TV-M, POL-, NOEP-, MASQ-) alone: it knows who translates, and what
that one can know of the client. It must not know how the programs go about it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ebpflb.lab import Lab, Namespace, Node, Outcome, Pod, Question
from ebpflb.lab.addresses import pod_ipv4, pod_ipv6
from ebpflb.model import Family
from tests.builders import cluster_ip
from tests.netns.agents import SMALL, Agent
from tests.netns.services import Endpoint, Manifests, Spec, ready
from tests.netns.world import Way

PODS: Final = ("10.244.0.0/16", "fd00:244::/32")
SERVICES: Final = ("10.96.0.0/16", "198.51.100.0/24", "203.0.113.0/24")
SERVICES6: Final = ("fd96::/112", "fd98::/64", "fd99::/64")
TARGET: Final = 8080
SOURCE_PORTS: Final = range(11_000, 30_000)

PATIENCE_S: Final = 8.0
"""For an answer that must come; on a machine that is busy elsewhere it may be late."""
SILENCE_S: Final = 0.4
"""For one that must not: long enough for any answer of this lab's, on an idle machine."""


class Frontend(enum.Enum):
    """What is dialled."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT_1 = "NodePort at n1"
    NODE_PORT_2 = "NodePort at n2"
    LOCALHOST = "NodePort at localhost"
    EXTERNAL = "external IP"
    BALANCER = "load balancer's IP"


OWN: Final = frozenset({Frontend.LOCALHOST, Frontend.NODE_PORT_1, Frontend.NODE_PORT_2})
"""Those that are addresses of the node that serves them."""


class Policies(enum.Enum):
    """Which of the two traffic policies are Local."""

    CLUSTER = "Cluster"
    EXTERNAL = "external Local"
    INTERNAL = "internal Local"
    BOTH = "both Local"

    @property
    def external_local(self) -> bool:
        return self in {Policies.EXTERNAL, Policies.BOTH}

    @property
    def internal_local(self) -> bool:
        return self in {Policies.INTERNAL, Policies.BOTH}


class Party(NamedTuple):
    """A client or a backend. ``node`` is where it lives, "" outside.

    ``virtual``: a pod whose sockets no hook sees. A host is a node's own processes, hostNetwork
    pods too.
    """

    name: str
    node: str
    is_host: bool = False
    virtual: bool = False

    @property
    def is_pod(self) -> bool:
        return bool(self.node) and not self.is_host


CLIENTS: Final = {
    "pod": Party("p1", "n1"),
    "virtual pod": Party("k1", "n1", virtual=True),
    "pod on the other node": Party("p2", "n2"),
    "host": Party("n1", "n1", is_host=True),
    "host of the other node": Party("n2", "n2", is_host=True),
    "outside": Party("x", ""),
}
BACKENDS: Final = {
    "pod": Party("p1", "n1"),
    "virtual pod": Party("k1", "n1", virtual=True),
    "another pod": Party("be1", "n1"),
    "the other pod": Party("p2", "n2"),
    "a pod on the other node": Party("be2", "n2"),
    "host": Party("h1", "n1", is_host=True),
    "host of the other node": Party("h2", "n2", is_host=True),
    "nobody": None,
}
"""A Service of each; those that are clients too are themselves when they dial their own."""

GATEWAY: Final = "n1"
"""The node by which the outside reaches all that is no node's own address."""


class Setting(NamedTuple):
    """How the agents are set up, and the nodes.

    ``bridged``: pods hang on a Linux bridge. ``bridge_nf``: netfilter sees what that switches.
    """

    tells_pods: bool = True
    masquerade_all: bool = False
    socket_lb: Literal["all", "host", "off"] = "all"
    keeps_client: bool = False
    bridged: bool = False
    bridge_nf: bool = True

    @property
    def flags(self) -> list[str]:
        return [
            *(["--cluster-cidr", ",".join(PODS)] if self.tells_pods else []),
            *(["--masquerade-all"] if self.masquerade_all else []),
            *(["--preserve-client-ip-local"] if self.keeps_client else []),
            *(["--socket-lb", self.socket_lb] if self.socket_lb != "all" else []),
        ]

    @property
    def plans_by(self) -> dict[str, Any]:
        return {
            "cluster_cidrs": PODS if self.tells_pods else (),
            "masquerade_all": self.masquerade_all,
        }


class Case(NamedTuple):
    client: Party
    frontend: Frontend
    policies: Policies
    backend: Party | None


class Result(enum.Enum):
    REACHED = "reached"
    REFUSED = "refused"
    SILENT = "silent"
    ASTRAY = "astray"
    """The backend is asked, and its answer goes past the node that translated."""
    UNTOLD = "untold"
    """Nothing is promised."""


class Verdict(NamedTuple):
    """What must come of it; the backend sees an address of ``seen``. ``row`` is why."""

    result: Result
    row: str
    seen: str = ""


class Origin(enum.Enum):
    """What the node that translates takes a client for."""

    POD = "pod"
    HOST = "host"
    OUTSIDE = "outside"


def cases(client: Party) -> Iterator[Case]:
    """All of a client's; localhost is the hosts' alone."""
    frontends = [one for one in Frontend if one is not Frontend.LOCALHOST or client.is_host]
    for frontend, policies, backend in itertools.product(frontends, Policies, BACKENDS.values()):
        yield Case(client, frontend, policies, backend)


def serving_node(client: Party, frontend: Frontend) -> str:
    """The node that translates: the client's own, unless another's address is dialled."""
    if frontend is Frontend.NODE_PORT_1:
        return "n1"
    if frontend is Frontend.NODE_PORT_2:
        return "n2"
    return client.node or GATEWAY


def by_socket(client: Party, frontend: Frontend, setting: Setting) -> bool:
    """Whether the client's connect() is where it happens, and not its packets."""
    if client.virtual or client.node != serving_node(client, frontend):
        return False
    if client.is_host:
        return setting.socket_lb != "off"
    return setting.socket_lb == "all" and not setting.masquerade_all


def origin(client: Party, frontend: Frontend, setting: Setting) -> Origin:
    """MASQ-09, POL-03 to -06: pods are told by their address, on whichever node they are."""
    if client.is_pod and setting.tells_pods:
        return Origin.POD
    if client.is_host and client.node == serving_node(client, frontend):
        return Origin.HOST
    return Origin.OUTSIDE


def expect(case: Case, setting: Setting) -> Verdict:
    """What the specification says of a combination."""
    client, frontend, policies, backend = case
    serving = serving_node(client, frontend)
    asks_as = origin(client, frontend, setting)
    internal = frontend is Frontend.CLUSTER_IP
    past_hooks = asks_as is Origin.HOST and not by_socket(client, frontend, setting)
    if past_hooks and (
        frontend in OWN or (backend and backend.is_host and backend.node == serving)
    ):
        return Verdict(Result.UNTOLD, "K8: packets of the host to itself pass no device")
    if backend is None and past_hooks:
        return Verdict(Result.SILENT, "K8: on the way out nobody is left to refuse")
    if backend is None:
        row = "NOEP-01, -04" if internal else "NOEP-02, -03, -07"
        return Verdict(Result.REFUSED, f"{row}, -10")
    only_local = (
        policies.internal_local
        if internal
        else policies.external_local and asks_as is Origin.OUTSIDE
    )
    if only_local and backend.node != serving:
        return Verdict(Result.SILENT, "NOEP-04, POL-11" if internal else "NOEP-05, POL-03")
    if by_socket(client, frontend, setting):
        return _by_socket(case)
    return _by_packet(case, setting, asks_as)


def _by_socket(case: Case) -> Verdict:
    """No packet of it ever bears a Service's address, and none is masqueraded."""
    client, frontend, _, backend = case
    if client.is_host:
        return Verdict(Result.REACHED, "TV-M04 to -M07, H-06", client.name)
    if backend == client:
        return Verdict(Result.REACHED, "POL-13, deviation H-10: by its own loopback", client.name)
    if frontend is Frontend.CLUSTER_IP:
        return Verdict(Result.REACHED, "TV-M01", client.name)
    return Verdict(Result.REACHED, "TV-M02, -M03, deviation H-05", client.name)


def _by_packet(case: Case, setting: Setting, asks_as: Origin) -> Verdict:
    client, _, _, backend = case
    assert backend is not None
    serving = serving_node(client, case.frontend)
    masquerades, row = _masquerade(case, setting, asks_as)
    if masquerades and backend.is_host and backend.node == serving:
        # POSTROUTING is what leaves: as with kube-proxy, what stays keeps its source.
        return Verdict(Result.REACHED, f"{row}, POL-12: to the node itself", client.name)
    if masquerades:
        return Verdict(Result.REACHED, row, serving)
    if serving not in {backend.node, client.node}:
        return Verdict(Result.ASTRAY, f"{row}: as upstream, the answer does not come by {serving}")
    return Verdict(Result.REACHED, row, client.name)


def _masquerade(case: Case, setting: Setting, asks_as: Origin) -> tuple[bool, str]:
    client, frontend, policies, backend = case
    assert backend is not None
    serving = serving_node(client, frontend)
    if _same_address(client, backend):
        return True, "POL-13, MASQ-06"
    both_bridged = client.is_pod and backend.is_pod and client.node == backend.node == serving
    if setting.bridged and not setting.bridge_nf and both_bridged:
        return True, "K10: the bridge would switch the answer past netfilter"
    if frontend is Frontend.CLUSTER_IP:
        return _masquerade_internal(setting, asks_as)
    if policies.external_local:
        return asks_as is Origin.HOST, "TV-M02, -M03, -M09, -M10 svc2, MASQ-05"
    if setting.keeps_client and backend.node == serving:
        return False, "option: a backend on this node sees the client"
    return True, "TV-M02, -M03, -M09, -M10, MASQ-04"


def _masquerade_internal(setting: Setting, asks_as: Origin) -> tuple[bool, str]:
    if setting.masquerade_all:
        return True, "TV-M21, -M22, MASQ-01"
    if not setting.tells_pods:
        return False, "TV-M20, MASQ-03"
    is_pod = asks_as is Origin.POD
    return not is_pod, "TV-M01" if is_pod else "TV-M04, -M08, MASQ-02"


def _same_address(client: Party, backend: Party) -> bool:
    if client.is_host and backend.is_host:
        return client.node == backend.node
    return client == backend


# --- the cluster ----------------------------------------------------------------------------------


class Mismatch(NamedTuple):
    case: Case
    way: Way
    verdict: Verdict
    got: str

    def __str__(self) -> str:
        client, frontend, policies, backend = self.case
        to = backend.name if backend else "nobody"
        wanted = f"{self.verdict.result.value} {self.verdict.seen and 'as ' + self.verdict.seen}"
        return (
            f"{client.name} → {frontend.value:22} {policies.value:15} {to:6} {self.way.value:14}"
            f" must be {wanted.strip():14} is {self.got}   [{self.verdict.row}]"
        )


class Reach:
    """Two nodes with agents, all of ``CLIENTS`` and ``BACKENDS``, and a Service of each kind."""

    def __init__(self, lab: Lab, folder: Path, setting: Setting) -> None:
        self.lab = lab
        self.setting = setting
        links: Literal["routed", "bridge"] = "bridge" if setting.bridged else "routed"
        self.nodes = {
            name: lab.node(name, pod_links=links, default_route=True) for name in ("n1", "n2")
        }
        self.places: dict[str, Namespace] = {**self.nodes, "x": lab.external("x")}
        for party in filter(None, BACKENDS.values()):
            pod = self.nodes[party.node].pod(
                party.name, host_network=party.is_host, virtual=party.virtual
            )
            pod.serve(tcp=[TARGET], udp=[TARGET])
            self.places[party.name] = pod
        for family in (SERVICES, SERVICES6):
            for network in family:
                lab.router.route(network, via=self._gateway_of(network))
        for node in self.nodes.values():
            if setting.bridged:
                for tool in ("iptables", "ip6tables"):
                    node.sysctl(f"net.bridge.bridge-nf-call-{tool}", int(setting.bridge_nf))
        self.specs = {
            (policies, backend): self._spec(number, policies, backend)
            for number, (policies, backend) in enumerate(
                itertools.product(Policies, BACKENDS.values()), start=20
            )
        }
        self.agents = [self._agent(node, folder / node.name) for node in self.nodes.values()]
        self._source_ports = iter(SOURCE_PORTS)

    def _gateway_of(self, network: str) -> str:
        gateway = self.nodes[GATEWAY]
        return gateway.ipv6 if ":" in network else gateway.ipv4

    def _agent(self, node: Node, folder: Path) -> Agent:
        return Agent(
            node,
            Manifests(folder),
            *("--map-size", SMALL),
            *self.setting.flags,
            plans_by=self.setting.plans_by,
        )

    def _spec(self, number: int, policies: Policies, backend: Party | None) -> Spec:
        return Spec(
            name=f"s{number}",
            ipv4=cluster_ip(number),
            ipv6=cluster_ip(number, Family.IPV6),
            tcp={80: TARGET},
            udp={53: TARGET},
            endpoints=self._endpoints(backend),
            local=policies.internal_local,
            external_local=policies.external_local,
            node_port=30_000 + number,
            external_ips=(f"198.51.100.{number}", f"fd98::{number:x}"),
            ingress_ips=(f"203.0.113.{number}", f"fd99::{number:x}"),
        )

    def _endpoints(self, backend: Party | None) -> tuple[Endpoint, ...]:
        if backend is None:
            return ()
        place = self.places[backend.name]
        assert isinstance(place, Pod)
        return ready(place)

    @contextlib.contextmanager
    def serving(self) -> Iterator[Reach]:
        """Everything is served meanwhile."""
        for agent in self.agents:
            agent.manifests.put(*self.specs.values())
        with contextlib.ExitStack() as stack:
            for agent in self.agents:
                stack.enter_context(agent.launch())
            for agent in self.agents:
                agent.serving_packets()
                agent.settle()
            yield self

    # --- asking -----------------------------------------------------------------------------------

    def dialled(self, case: Case, way: Way, family: Family) -> tuple[str, int]:
        spec = self.specs[case.policies, case.backend]
        six = family is Family.IPV6
        port = way.port
        match case.frontend:
            case Frontend.CLUSTER_IP:
                return (spec.ipv6 if six else spec.ipv4), port
            case Frontend.EXTERNAL:
                return spec.external_ips[six], port
            case Frontend.BALANCER:
                return spec.ingress_ips[six], port
            case Frontend.LOCALHOST:
                return ("::1" if six else "127.0.0.1"), spec.node_port
            case Frontend.NODE_PORT_1 | Frontend.NODE_PORT_2:
                node = self.nodes["n1" if case.frontend is Frontend.NODE_PORT_1 else "n2"]
                return (node.ipv6 if six else node.ipv4), spec.node_port

    def seen(self, verdict: Verdict, family: Family) -> set[str]:
        """As which address; any of them, where a node's bridge has one of its own."""
        place = self.places[verdict.seen]
        six = family is Family.IPV6
        found = {place.ipv6 if six else place.ipv4}
        if isinstance(place, Node) and self.setting.bridged:
            found.add(pod_ipv6(place.number, 1) if six else pod_ipv4(place.number, 1))
        return found

    def mismatches(
        self, asked: Iterable[Case], ways: Sequence[Way], family: Family
    ) -> list[Mismatch]:
        """Ask all of them at once, those of one client; what is not as the oracle says."""
        todo = [
            (case, way, verdict)
            for case in asked
            for way in ways
            if (verdict := expect(case, self.setting)).result is not Result.UNTOLD
            # Without a connection an answer from anywhere is an answer.
            and not (way is Way.UDP and verdict.result is Result.ASTRAY)
        ]
        (client,) = {case.client for case, _, _ in todo}
        outcomes = self.places[client.name].at_once(
            [self._question(case, way, verdict, family) for case, way, verdict in todo]
        )
        found = []
        for (case, way, verdict), outcome in zip(todo, outcomes, strict=True):
            got = self._judge(case, way, verdict, family, outcome)
            if got:
                found.append(Mismatch(case, way, verdict, got))
        return found

    def _question(self, case: Case, way: Way, verdict: Verdict, family: Family) -> Question:
        host, port = self.dialled(case, way, family)
        waits = verdict.result in {Result.REACHED, Result.REFUSED}
        # A port of its own, so that no answer depends on what was asked before.
        options: dict[str, Any] = {
            "timeout_s": PATIENCE_S if waits else SILENCE_S,
            "source_port": next(self._source_ports),
        }
        if way is not Way.TCP:
            # Who asks for errors is told of our own drop too (ENOBUFS), which is no silence.
            options |= {"connected": way is Way.CONNECTED_UDP, "recverr": waits}
        return Question("tcp" if way is Way.TCP else "udp", host, port, options)

    def _judge(
        self, case: Case, way: Way, verdict: Verdict, family: Family, outcome: Outcome
    ) -> str:
        """What is wrong with an outcome, or ""."""
        if not outcome.good:
            (error,) = outcome.errors
            wanted = {
                Result.REFUSED: "ECONNREFUSED",
                Result.SILENT: "TIMEOUT",
                Result.ASTRAY: "TIMEOUT",
            }.get(verdict.result)
            return "" if error == wanted else error
        (seen,) = outcome.seen_as
        (who,) = outcome.backends
        said = f"reached: {who} sees {seen}"
        if verdict.result is not Result.REACHED or case.backend is None:
            return said
        if who != case.backend.name or seen not in self.seen(verdict, family):
            return said
        host, port = self.dialled(case, way, family)
        dialled = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if way is Way.UDP and outcome.sources.keys() != {dialled}:
            return f"answered from {outcome.sources}"
        return ""
