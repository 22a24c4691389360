# SPDX-License-Identifier: Apache-2.0
"""The cluster that most tests share: one node with an agent, clients and backends; and Services.

Each test makes Services of its own, with addresses that no other test has, and they go with it.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from typing import Protocol as Interface

import msgspec

from ebpflb.lab import Lab, Namespace, Outcome, Pod
from ebpflb.model import Family, Protocol, ServicePortName
from tests.builders import cluster_ip
from tests.netns.agents import EBPFLB, SMALL, Agent
from tests.netns.kernel import Kernel
from tests.netns.services import Endpoint, Manifests, Spec, ready
from tests.netns.sockets import Form, SocketMaker

TCP_PORT = 8080
UDP_PORT = 8080
MORE_UDP_PORTS = range(9001, 9011)

_numbers = itertools.count(20)


class Handle:
    """A Service that is served while it lives. ``spec`` is what its manifest says now."""

    def __init__(self, agent: Agent, spec: Spec) -> None:
        self._agent = agent
        self.spec = spec

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def ipv4(self) -> str:
        return self.spec.ipv4

    @property
    def ipv6(self) -> str:
        return self.spec.ipv6

    def port_name(self, protocol: Protocol, port: int, form: Form = Form.V4) -> ServicePortName:
        return self.spec.name_of(protocol, port, Family.IPV6 if form is Form.V6 else Family.IPV4)

    def set(self, **changes: Any) -> None:
        """Change the manifest and wait until the maps follow it."""
        self.spec = msgspec.structs.replace(self.spec, **changes)
        self._agent.manifests.put(self.spec)
        self._agent.settle()

    def connections(self, protocol: Protocol, port: int, form: Form = Form.V4) -> int:
        """How many connections the programs have counted."""
        return self._agent.kernel.connections(self.port_name(protocol, port, form))


class MakeService(Interface):
    """Makes a Service that is served at once and goes with the test; see ``World.spec``."""

    def __call__(self, **spec: Any) -> Handle: ...


class MakeServices(Interface):
    """Makes several at once, all alike but for their names and addresses."""

    def __call__(self, count: int, **spec: Any) -> list[Handle]: ...


class OpenSocket(Interface):
    """Makes a socket of a pod or of the node, closed with the test; see ``World.socket``."""

    def __call__(
        self,
        place: Namespace,
        form: Form,
        kind: socket.SocketKind = socket.SOCK_DGRAM,
        protocol: int = 0,
    ) -> socket.socket: ...


def _outside(number: int, ipv4: str, ipv6: str) -> tuple[str, str]:
    """An address of each family that no interface has."""
    return f"{ipv4}.{number % 256}", f"{ipv6}::{number:x}"


def new_spec(
    *,
    endpoints: tuple[Endpoint, ...] | None = None,
    pods: Sequence[Pod] = (),
    tcp: Mapping[int, int] | None = None,
    udp: Mapping[int, int] | None = None,
    node_port: bool = False,
    external: bool = False,
    balanced: bool = False,
    **more: Any,
) -> Spec:
    """A Service with a name and addresses of its own: TCP 80 and UDP 53 by default.

    ``node_port``, ``external``, ``balanced``: with a NodePort, with external addresses, with a
    load balancer's (and a NodePort), in both families.
    """
    number = next(_numbers)
    return Spec(
        name=f"s{number}",
        ipv4=cluster_ip(number),
        ipv6=cluster_ip(number, Family.IPV6),
        tcp={80: TCP_PORT} if tcp is None else tcp,
        udp={53: UDP_PORT} if udp is None else udp,
        endpoints=ready(*pods) if endpoints is None else endpoints,
        node_port=30_000 + number if node_port or balanced else 0,
        external_ips=_outside(number, "198.51.100", "fd98") if external else (),
        ingress_ips=_outside(number, "203.0.113", "fd99") if balanced else (),
        **more,
    )


class Way(enum.Enum):
    """How a client asks: each question may be given another backend."""

    TCP = "TCP"
    UDP = "UDP"
    CONNECTED_UDP = "connected UDP"

    @property
    def protocol(self) -> Protocol:
        return Protocol.TCP if self is Way.TCP else Protocol.UDP

    @property
    def port(self) -> int:
        """That of a Service as ``new_spec`` makes it."""
        return 80 if self is Way.TCP else 53

    def ask(
        self, client: Namespace, host: str, port: int, count: int = 1, **options: Any
    ) -> Outcome:
        if self is Way.TCP:
            return client.tcp(host, port, count=count, **options)
        connected = self is Way.CONNECTED_UDP
        return client.udp(host, port, count=count, sockets=count, connected=connected, **options)


class World:
    """``p1`` and ``p2`` dial, ``be1`` … ``be4`` answer, ``node`` runs the agent.

    The agent serves sockets alone, unless ``flags`` say otherwise: what only packets can decide is
    refused, as on a node whose devices have no programs.

    Every backend serves TCP and UDP 8080, and UDP 9001 to 9010.
    """

    def __init__(
        self,
        lab: Lab,
        folder: Path,
        *,
        command: Sequence[str] = EBPFLB,
        tcp_peer_name: bool = False,
        flags: Sequence[str] = (),
        plans_by: Mapping[str, Any] | None = None,
    ) -> None:
        self.lab = lab
        self.tcp_peer_name = tcp_peer_name
        self.tells_pods = bool((plans_by or {}).get("cluster_cidrs"))
        self.node = lab.node("n1")
        self.p1, self.p2 = self.node.pod("p1"), self.node.pod("p2")
        self.backends = [self.node.pod(f"be{number}") for number in range(1, 5)]
        self.servers = {
            pod.name: pod.serve(tcp=[TCP_PORT], udp=[UDP_PORT, *MORE_UDP_PORTS])
            for pod in self.backends
        }
        self.agent = Agent(
            self.node,
            Manifests(folder / "manifests"),
            *("--map-size", SMALL),
            *("--devices=", "--pod-devices="),
            *(["--tcp-peer-name"] if tcp_peer_name else []),
            *flags,
            command=command,
            plans_by=plans_by,
        )
        self._makers: dict[str, SocketMaker] = {}

    @property
    def kernel(self) -> Kernel:
        return self.agent.kernel

    def tcp_peer(self, form: Form, handle: Handle, backend: Pod) -> tuple[str, int]:
        """What getpeername() says of a TCP socket that dialled port 80 and got this backend."""
        if self.tcp_peer_name:
            return form.host(handle), 80
        return form.host(backend), TCP_PORT

    def tcp_peernames(self, form: Form, handle: Handle, outcome: Outcome) -> dict[str, int]:
        """The same of all sockets of an outcome, as the lab's clients print it."""
        if self.tcp_peer_name:
            return {form.spelt(handle, 80): outcome.good}
        pods = {pod.name: pod for pod in self.backends}
        return {form.spelt(pods[who], TCP_PORT): n for who, n in outcome.backends.items()}

    def spec(self, **options: Any) -> Spec:
        """See ``new_spec``."""
        return new_spec(**options)

    def services(self, *specs: Spec) -> list[Handle]:
        """Serve some Services, all at once."""
        self.agent.manifests.put(*specs)
        self.agent.settle()
        return [Handle(self.agent, spec) for spec in specs]

    def socket(
        self,
        place: Namespace,
        form: Form,
        kind: socket.SocketKind = socket.SOCK_DGRAM,
        protocol: int = 0,
    ) -> socket.socket:
        """A socket of a pod or the node, in this process's hands."""
        if place.name not in self._makers:
            self._makers[place.name] = SocketMaker(place)
        return self._makers[place.name].make(form.family, kind, protocol)

    def close(self) -> None:
        for maker in self._makers.values():
            maker.close()


@contextlib.contextmanager
def served(folder: Path, **options: Any) -> Iterator[World]:
    """The world with its agent running; at the end nothing of any Service may be left."""
    with Lab("world") as lab:
        world = World(lab, folder, **options)
        try:
            with world.agent as agent:
                yield world
                agent.manifests.clear()
                agent.settle()
                assert world.kernel.stats()["foreign_backend"] == 0
                assert agent.complaints() == []
        finally:
            world.close()
