# SPDX-License-Identifier: Apache-2.0
"""A cluster for tests of the packet path: nodes with agents, and a client outside of it.

Node ``n1`` is the one by which the outside reaches Services' addresses. Each test file says how its
nodes are connected; Services are a test's own, with addresses that no other test has.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from ebpflb.lab import External, Lab, Loop, Namespace, Node, Outcome, Pod, Server
from ebpflb.model import Family
from tests.netns.agents import SMALL, Agent
from tests.netns.reach import PODS, SERVICES, SERVICES6
from tests.netns.services import Manifests, Spec
from tests.netns.world import TCP_PORT, UDP_PORT, Way, new_spec

PATIENCE_S: Final = 8.0
"""For an answer that must come, on a machine that is busy elsewhere."""
SILENCE_S: Final = 0.4
"""For one that must not."""


class To(enum.Enum):
    """Which of a Service's addresses is dialled."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    EXTERNAL = "external"
    BALANCER = "balancer"


class Served:
    """A Service that all agents of a site serve."""

    def __init__(self, site: Site, spec: Spec) -> None:
        self._site = site
        self.spec = spec

    @property
    def name(self) -> str:
        return self.spec.name

    def set(self, **changes: Any) -> None:
        """Change the manifests and wait until the maps follow them."""
        self.spec = msgspec.structs.replace(self.spec, **changes)
        self._site.put(self.spec)

    def address(
        self, way: Way, family: Family, to: To = To.NODE_PORT, *, at: Node | None = None
    ) -> tuple[str, int]:
        """Host and port; a NodePort is ``at`` a node, by default n1."""
        six = family is Family.IPV6
        node = at or self._site.n1
        match to:
            case To.CLUSTER_IP:
                return (self.spec.ipv6 if six else self.spec.ipv4), way.port
            case To.NODE_PORT:
                return (node.ipv6 if six else node.ipv4), self.spec.node_port
            case To.EXTERNAL:
                return self.spec.external_ips[six], way.port
            case To.BALANCER:
                return self.spec.ingress_ips[six], way.port


class Site:
    """``n1``, ``n2`` … with agents that are not started yet, and ``x`` outside.

    ``told``: pods are known by their addresses (--cluster-cidr). The rest of the options are the
    nodes'.
    """

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *flags: str,
        nodes: int = 1,
        told: bool = True,
        plans_by: Mapping[str, Any] | None = None,
        pod_links: Literal["routed", "bridge"] = "routed",
    ) -> None:
        self.lab = lab
        self.x: External = lab.external("x")
        self.nodes = [
            lab.node(f"n{number}", pod_links=pod_links, default_route=True)
            for number in range(1, nodes + 1)
        ]
        self.servers: dict[str, Server] = {}
        for network in (*SERVICES, *SERVICES6):
            gateway = self.n1.ipv6 if ":" in network else self.n1.ipv4
            lab.router.route(network, via=gateway)
        self.agents = [
            Agent(
                node,
                Manifests(folder / node.name),
                *("--map-size", SMALL),
                *(["--cluster-cidr", ",".join(PODS)] if told else []),
                *flags,
                plans_by={**({"cluster_cidrs": PODS} if told else {}), **(plans_by or {})},
            )
            for node in self.nodes
        ]

    @property
    def n1(self) -> Node:
        return self.nodes[0]

    @property
    def n2(self) -> Node:
        return self.nodes[1]

    @property
    def agent(self) -> Agent:
        """That of n1."""
        return self.agents[0]

    def backend(self, name: str, node: Node | None = None, **options: Any) -> Pod:
        """A pod that serves both protocols, on n1 by default."""
        pod = (node or self.n1).pod(name, **options)
        self.servers[name] = pod.serve(tcp=[TCP_PORT], udp=[UDP_PORT])
        return pod

    def pods(self, *names: str) -> list[Pod]:
        """Pods by their names, whichever node they are on."""
        known = {name: pod for node in self.nodes for name, pod in node.pods.items()}
        return [known[name] for name in names]

    def client(self, name: str) -> Namespace:
        """A pod, a node or ``x``, by name."""
        places: dict[str, Namespace] = {"x": self.x, **{node.name: node for node in self.nodes}}
        return places[name] if name in places else self.pods(name)[0]

    def serve(self, *names: str) -> contextlib.AbstractContextManager[Served]:
        """A Service with every kind of address, of these pods, while it lives."""
        return self.service(pods=self.pods(*names), external=True, balanced=True)

    @contextlib.contextmanager
    def running(self, *, but: str = "") -> Iterator[Site]:
        """The agents run meanwhile, and complain of nothing ``but`` this."""
        with contextlib.ExitStack() as stack:
            for agent in self.agents:
                stack.enter_context(agent.launch())
            for agent in self.agents:
                agent.serving_packets()
            yield self
            complaints = [one for agent in self.agents for one in agent.complaints()]
            assert all(one["event"] == but for one in complaints), complaints

    def put(self, *specs: Spec) -> None:
        """Have Services served, all at once."""
        for agent in self.agents:
            agent.manifests.put(*specs)
        for agent in self.agents:
            agent.settle()

    @contextlib.contextmanager
    def service(self, **options: Any) -> Iterator[Served]:
        """A Service with a NodePort while it lives; see ``new_spec``."""
        with self.services(1, **options) as made:
            yield made[0]

    @contextlib.contextmanager
    def services(self, count: int, **options: Any) -> Iterator[list[Served]]:
        """Several, all alike but for their names and addresses."""
        specs = [new_spec(**{"node_port": True, **options}) for _ in range(count)]
        self.put(*specs)
        try:
            yield [Served(self, spec) for spec in specs]
        finally:
            for agent in self.agents:
                agent.manifests.remove(*(spec.name for spec in specs))


def goes_on(loop: Loop, *, by: int = 10, timeout_s: float = 30.0) -> Outcome:
    """Wait until a loop has had some more good answers."""
    good = loop.outcome().good
    return loop.wait_for(lambda one: one.good >= good + by, timeout_s=timeout_s, what="it goes on")


def spelt(address: tuple[str, int]) -> str:
    """Host and port as the lab's clients print them."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def site(
    folder: Path, *flags: str, lab: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Site]:
    """A site of its own, whose agents are not started yet; ``lab`` is how that is made."""
    with Lab("site", **(lab or {})) as made:
        yield Site(made, folder, *flags, **options)
