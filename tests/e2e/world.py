# SPDX-License-Identifier: Apache-2.0
"""The cluster that tests share: a control plane, nodes with agents, and the lab's pods.

              cp                    n1 (zone a)                 n2 (zone b)
    etcd, kube-apiserver    agent · p1 · be1 · be2 · be3     agent · p2 · be4

Every backend answers on TCP and UDP 8080 and on TCP 9090. What clients are told by connecting is
all that is asserted of a Service: no map is looked at to see whether it is served.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from collections.abc import Collection, Iterator
from typing import Final, Literal, NamedTuple, Self

from ebpflb.lab import Lab, LabError, Namespace, Node, Outcome, Server, wait_until
from tests.builders import ApiObject
from tests.e2e.agents import Agent
from tests.e2e.api import Api
from tests.e2e.cluster import Cluster

TCP_PORT: Final = 8080
UDP_PORT: Final = 8080
OTHER_PORT: Final = 9090
ZONE: Final = "topology.kubernetes.io/zone"
ZONES: Final = ("a", "b")
FULL: Final = os.environ.get("EBPFLB_TEST_FULL", "") not in {"", "0"}
"""Whether there is more time than CI has: `make test-full`."""

OWN: Final = "the node itself"
"""Who answers at a port of the node that no Service has, where ``listening``."""

FOLLOW_S: Final = 45.0
"""An agent looks for a server that is gone every 6 s at most; the rest is for a busy machine."""

Protocol = Literal["tcp", "udp"]


class World:
    """A context manager: it starts the control plane, and agents where it is told to."""

    def __init__(self, lab: Lab, *, nodes: int = 1, watch_cache: bool = True) -> None:
        self.lab = lab
        self.cluster = Cluster(lab.node("cp"), watch_cache=watch_cache)
        self.nodes = [lab.node(f"n{number}") for number in range(1, nodes + 1)]
        self.clients = [node.pod(f"p{number}") for number, node in enumerate(self.nodes, 1)]
        self.client = self.clients[0]
        homes = [*[self.nodes[0]] * 3, *self.nodes[1:]]
        self.backends = [node.pod(f"be{number}") for number, node in enumerate(homes, 1)]
        for pod in self.backends:
            pod.serve(tcp=[TCP_PORT, OTHER_PORT], udp=[UDP_PORT])
        self.agents: list[Agent] = []
        self._stack = contextlib.ExitStack()

    @property
    def admin(self) -> Api:
        return self.cluster.admin

    @property
    def node(self) -> Node:
        """The first; ``client`` is a pod of it."""
        return self.nodes[0]

    @property
    def agent(self) -> Agent:
        """The first node's."""
        return self.agents[0]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.cluster)
            for node, zone in zip(self.nodes, ZONES, strict=False):
                made, status = _node_object(node, zone)
                self.admin.create(made, status=status)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start_agents(self, *flags: str, log_format: str = "json") -> None:
        """One on each node, with one token for all that is never revoked.

        The first node's reaches the API server by IPv4, the others' by IPv6.
        """
        token = self.cluster.agent_token("agents")
        for number, node in enumerate(self.nodes):
            server = self.cluster.server_v6 if number else self.cluster.server
            config = self.lab.folder / f"{node.name}.kubeconfig"
            self.cluster.kubeconfig(config, token=token, server=server)
            agent = Agent(node, "--kubeconfig", str(config), *flags, log_format=log_format)
            self._stack.push(agent.launch())
            self.agents.append(agent)
        for agent in self.agents:
            agent.serving()

    def label_zone(self, node: Node, zone: str) -> None:
        """Say in which zone a node is."""
        self.admin.patch("Node", node.name, {"metadata": {"labels": {ZONE: zone}}})

    @contextlib.contextmanager
    def parted(self) -> Iterator[None]:
        """No packet passes between the control plane and the nodes; all links seem to be up."""
        wire = self.lab._wire
        assert wire is not None
        port = f"to-{self.cluster.node.name}"
        wire.links(lambda links: links.ipr.link("set", index=links.index(port), master=0))
        try:
            yield
        finally:
            wire.links(lambda links: links.set(port, master="wire0"))

    def logs(self) -> dict[str, str]:
        """The end of every log, by whose it is."""
        said = {part.name: part.tail() for part in self.cluster.parts}
        for path in sorted(self.lab.folder.glob("agent-*.log")):
            said[path.stem] = path.read_text(errors="replace")[-6000:]
        return said


def _node_object(node: Node, zone: str) -> tuple[ApiObject, ApiObject]:
    """A Node and its status."""
    made = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {ZONE: zone}},
        "spec": {"podCIDR": node.pods_ipv4, "podCIDRs": [node.pods_ipv4, node.pods_ipv6]},
    }
    addresses = [{"type": "InternalIP", "address": ip} for ip in (node.ipv4, node.ipv6)]
    return made, {"addresses": addresses}


# --- what clients see -------------------------------------------------------------------------


def ask(place: Namespace, ip: str, port: int, protocol: Protocol, *, count: int) -> Outcome:
    """Dial ``count`` times, each time from a new socket."""
    if protocol == "tcp":
        return place.tcp(ip, port, count=count, timeout_s=2.0)
    return place.udp(ip, port, count=count, sockets=count, timeout_s=2.0)


def reaches(
    place: Namespace,
    ip: str,
    port: int,
    names: Collection[str],
    *,
    protocol: Protocol = "tcp",
    timeout_s: float = FOLLOW_S,
) -> Outcome:
    """Wait until these backends, all of them and nobody else, answer there; never mind how often.

    A round is so long that a set with one backend more would not be mistaken for this one. The
    first good round is followed by another that must be good: what is published does not go back.
    """
    wanted = set(names)
    count = 30 * len(wanted)
    seen: list[Outcome] = []

    def look() -> bool:
        for tries in (1, count):  # one that has no route takes a second to say so
            seen[:] = [ask(place, ip, port, protocol, count=tries)]
            if seen[0].failed:
                return False
        return seen[0].backends.keys() == wanted

    what = f"{protocol} {ip} port {port} leads from {place.name} to {sorted(wanted)}"
    try:
        wait_until(look, timeout_s=timeout_s, what=what)
    except LabError as error:
        error.add_note(f"at last: {seen[0]}")
        raise
    again = ask(place, ip, port, protocol, count=count)
    assert again.failed == 0, (what, again)
    assert again.backends.keys() <= wanted, (what, again)
    return again


def refuses(place: Namespace, ip: str, port: int, *, timeout_s: float = FOLLOW_S) -> None:
    """Wait until a connect() to a Service port that exists is refused at once."""

    def look() -> bool:
        outcome = place.tcp(ip, port, count=3, timeout_s=2.0)
        return outcome.errors == {"ECONNREFUSED": 3}

    wait_until(look, timeout_s=timeout_s, what=f"{ip} port {port} is refused from {place.name}")


def unserved(
    node: Node, ip: str, port: int, *, protocol: Protocol = "tcp", timeout_s: float = FOLLOW_S
) -> None:
    """Wait until a node knows no such frontend: its own sockets have no route there."""

    def look() -> bool:
        return ask(node, ip, port, protocol, count=3).errors == {"ENETUNREACH": 3}

    wait_until(look, timeout_s=timeout_s, what=f"{ip} port {port} is no Service's {protocol} port")


def shut(place: Namespace, ip: str, port: int, *, timeout_s: float = FOLLOW_S) -> None:
    """Wait until nobody answers at a Service port that exists, for its policy or its ranges.

    Whether that is a refusal or silence is for those who test how packets are dropped.
    """

    def look() -> bool:
        return place.tcp(ip, port, count=2, timeout_s=0.3).good == 0

    wait_until(look, timeout_s=timeout_s, what=f"{ip} port {port} is shut to {place.name}")


def keeps(place: Namespace, ip: str, port: int) -> str:
    """Wait until one backend answers everything, and see that it stays; returns its name."""

    def one() -> dict[str, int]:
        seen = place.tcp(ip, port, count=20).backends
        return seen if len(seen) == 1 else {}

    first = wait_until(one, timeout_s=FOLLOW_S, what=f"{ip} has one backend for {place.name}")
    assert place.tcp(ip, port, count=20).backends == first
    (name,) = first
    return name


def listening(node: Node, *ports: int) -> Server:
    """A process of the node's own at these ports: it answers where no Service does (NP-10).

    Without it a NodePort that is gone, and one that has no endpoint, would look alike.
    """
    return node.serve(tcp=ports, udp=ports, name=OWN)


class Health(NamedTuple):
    """What a Service's health-check port says of a node."""

    status: int
    service: str
    endpoints: int

    @classmethod
    def of(cls, service: str, endpoints: int) -> Self:
        """What is right for a Service with so many endpoints there (HC-03)."""
        return cls(200 if endpoints else 503, service, endpoints)


CLOSING: Final = Health(0, "", 0)
"""The connection was taken, and the port closed before the question was read."""


def health(place: Namespace, ip: str, port: int, path: str = "/") -> Health | None:
    """What is answered there (HC-04, HC-05); None where nobody listens."""

    def ask() -> Health | None:
        with contextlib.closing(http.client.HTTPConnection(ip, port, timeout=5)) as client:
            try:
                client.request("GET", path)
                answer = client.getresponse()
            except ConnectionRefusedError:
                return None
            except ConnectionResetError:
                return CLOSING
            body = json.loads(answer.read())
        assert body["serviceProxyHealthy"] is True
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == str(body["localEndpoints"])
        name = "{namespace}/{name}".format(**body["service"])
        return Health(answer.status, name, body["localEndpoints"])

    return place.inside(ask)
