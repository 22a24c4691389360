# SPDX-License-Identifier: Apache-2.0
"""NodePorts at the socket: at which addresses they answer, and whom."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab import Namespace, Pod
from ebpflb.model import Protocol
from tests.netns.services import ready
from tests.netns.sockets import Form, ask, greeting, peer
from tests.netns.world import TCP_PORT, MakeService, MakeServices, OpenSocket, Way, World, served

MORE = "192.168.50.101"
"""An address that the node gets for a while."""


@pytest.fixture
def host_pod(world: World) -> Iterator[Pod]:
    """A pod on the host's network: its sockets are the node's."""
    pod = world.node.pod("hostpod", host_network=True)
    yield pod
    pod.remove()


@contextlib.contextmanager
def more_address(world: World) -> Iterator[None]:
    world.node.address(f"{MORE}/32")
    try:
        yield
    finally:
        world.node.links(lambda links: links.ipr.addr("del", index=_eth0(links), address=MORE))


def _eth0(links: object) -> int:
    index: int = links.ipr.link_lookup(ifname="eth0")[0]  # type: ignore[attr-defined]
    return index


def spelt(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- at the node's addresses ---------------------------------------------------------------------


def test_a_node_port_answers_at_the_nodes_addresses(
    world: World, service: MakeService, form: Form, way: Way
) -> None:
    """NP-01: pods and node, each protocol, each family. One number, TCP and UDP."""
    handle = service(pods=world.backends[:2], node_port=True)
    host, port = form.host(world.node), handle.spec.node_port
    for client in (world.p1, world.node):
        outcome = way.ask(client, host, port, 40)
        assert outcome.failed == 0, outcome
        assert outcome.backends.keys() == {"be1", "be2"}
        if way is not Way.TCP:
            assert outcome.sources == {spelt(host, port): 40}
    assert handle.connections(way.protocol, way.port, form) == 80


def test_a_node_port_answers_nowhere_else(
    world: World, service: MakeService, form: Form, way: Way
) -> None:
    """Neither at a pod's address nor at another node's, nor at a Service's."""
    handle = service(pods=world.backends[:2], node_port=True)
    for place in (world.backends[0], handle):
        outcome = way.ask(world.p1, form.host(place), handle.spec.node_port, timeout_s=0.3)
        assert outcome.good == 0, outcome
    assert handle.connections(way.protocol, way.port, form) == 0


def test_a_port_that_is_no_node_port_is_the_nodes_own(
    world: World, service: MakeService, form: Form
) -> None:
    service(pods=world.backends[:2], node_port=True)
    host = form.host(world.node)
    assert world.p1.tcp(host, 29_999).errors == {"ECONNREFUSED": 1}
    with world.node.serve(tcp=[29_999], udp=[29_999], name="the node"):
        for way in Way:
            assert way.ask(world.p1, host, 29_999).backends == {"the node": 1}


def test_who_listens_at_a_node_port_is_not_reached(
    world: World, service: MakeService, form: Form
) -> None:
    """NP-10, H-16: nothing keeps a process from it, and the Service wins."""
    handle = service(pods=world.backends[:1], node_port=True)
    port = handle.spec.node_port
    with world.node.serve(tcp=[port], udp=[port], name="the node"):
        for way in Way:
            for client in (world.p1, world.node):
                assert way.ask(client, form.host(world.node), port).backends == {"be1": 1}
        handle.set(node_port=0)
        for way in Way:
            assert way.ask(world.p1, form.host(world.node), port).backends == {"the node": 1}


def test_a_node_port_without_endpoints_is_refused_at_once(
    world: World, service: MakeService, form: Form
) -> None:
    """NOEP-03"""
    handle = service(node_port=True)
    before = world.kernel.stats()
    port = handle.spec.node_port
    outcome = world.p1.tcp(form.host(world.node), port, count=3)
    assert outcome.errors == {"ECONNREFUSED": 3}
    assert world.p1.udp(form.host(world.node), port, connected=True).errors == {"ECONNREFUSED": 1}
    after = world.kernel.stats()
    assert after["refused"] == before["refused"] + 4
    assert after["refused_policy"] == before["refused_policy"]


# --- an address, a number that changes ------------------------------------------------------------


def test_an_address_that_comes_and_goes(world: World, service: MakeService) -> None:
    """NP-05: at once, and the Services notice nothing."""
    handle = service(pods=world.backends[:1], node_port=True)
    port = handle.spec.node_port
    with world.p2.tcp_loop(world.node.ipv4, port, interval_s=0.005) as others:
        for _ in range(2):
            with more_address(world):
                world.agent.settle()
                for way in Way:
                    assert way.ask(world.p1, MORE, port).backends == {"be1": 1}
                    assert way.ask(world.node, MORE, port, mapped=True).backends == {"be1": 1}
            world.agent.settle()
            assert world.p1.tcp(MORE, port, timeout_s=0.3).good == 0
        outcome = others.stop()
    assert outcome.failed == 0, outcome


def test_a_restart_keeps_an_address_that_came_meanwhile_out_or_takes_it_in(
    world: World, service: MakeService
) -> None:
    handle = service(pods=world.backends[:1], node_port=True)
    world.agent.end()
    with more_address(world):
        assert world.p1.tcp(MORE, handle.spec.node_port).good == 0
        world.agent.start()
        world.agent.settle()
        assert world.p1.tcp(MORE, handle.spec.node_port).good == 1
    world.agent.settle()


def test_a_number_that_changes_stops_the_old_one(world: World, service: MakeService) -> None:
    """NP-12: to another number and back to none."""
    handle = service(pods=world.backends[:1], node_port=True)
    old = handle.spec.node_port
    for now in (old + 500, 0, old):
        handle.set(node_port=now)
        for port in {old, old + 500}:
            assert world.p1.tcp(world.node.ipv4, port).good == (port == now)
        assert world.p1.tcp(handle.ipv4, 80).good == 1


def test_a_number_that_passes_to_another_service(world: World, services: MakeServices) -> None:
    """B-81"""
    one, two = services(2, pods=world.backends[:1])
    port = 30_000 + 1
    one.set(node_port=port)
    two.set(endpoints=ready(world.backends[1]))
    assert world.p1.tcp(world.node.ipv4, port).backends == {"be1": 1}
    one.set(node_port=0)
    two.set(node_port=port)
    assert world.p1.tcp(world.node.ipv4, port, count=9).backends == {"be2": 9}
    two.set(node_port=0)


def test_the_type_changes_in_every_direction(world: World, service: MakeService) -> None:
    """Each address answers exactly while the type has it; the ClusterIP always."""
    handle = service(pods=world.backends[:1])
    port, vip = 31_900, "203.0.114.1"
    kinds = {
        "ClusterIP": {"node_port": 0, "ingress_ips": ()},
        "NodePort": {"node_port": port, "ingress_ips": ()},
        "LoadBalancer": {"node_port": port, "ingress_ips": (vip,)},
    }
    order = ["NodePort", "LoadBalancer", "ClusterIP", "LoadBalancer", "NodePort", "ClusterIP"]
    with world.p2.tcp_loop(handle.ipv4, 80, interval_s=0.005) as steady:
        for kind in order:
            handle.set(**kinds[kind])
            assert handle.spec.type == kind
            assert world.p1.tcp(world.node.ipv4, port).good == (kind != "ClusterIP")
            assert world.p1.tcp(vip, 80, timeout_s=0.3).good == (kind == "LoadBalancer")
        assert steady.stop().failed == 0


# --- on the loopback -----------------------------------------------------------------------------

LOOPBACKS = {
    Form.V4: ["127.0.0.1", "127.1.2.3", "0.0.0.0"],
    Form.V6: ["::1", "::"],
    Form.MAPPED: ["::ffff:127.0.0.1", "::ffff:127.9.9.9", "::ffff:0.0.0.0"],
}
MEANT = {"0.0.0.0": "127.0.0.1", "::": "::1", "::ffff:0.0.0.0": "::ffff:127.0.0.1"}
"""To every system call the unspecified address is the loopback."""


def test_the_nodes_own_processes_reach_it_on_the_loopback(
    world: World, service: MakeService, host_pod: Pod, form: Form, way: Way
) -> None:
    """NP-07, TV-M06, H-14: UDP and IPv6 too. The socket goes on seeing the loopback."""
    handle = service(pods=world.backends[:2], node_port=True)
    port = handle.spec.node_port
    for client in (world.node, host_pod):
        for host in LOOPBACKS[form]:
            outcome = way.ask(client, host, port, 20)
            assert outcome.failed == 0, outcome
            assert outcome.backends.keys() == {"be1", "be2"}
            if way is not Way.TCP:
                assert outcome.sources == {spelt(MEANT.get(host, host), port): 20}


def test_a_pods_loopback_is_its_own(
    world: World, service: MakeService, form: Form, way: Way
) -> None:
    """L-23: no matter what the host's loopback does."""
    handle = service(pods=world.backends[:2], node_port=True)
    port = handle.spec.node_port
    for host in LOOPBACKS[form]:
        assert way.ask(world.p1, host, port, timeout_s=0.3).good == 0
    with world.p1.serve(tcp=[port], udp=[port], name="p1 itself"):
        for host in LOOPBACKS[form]:
            assert way.ask(world.p1, host, port, 5).backends == {"p1 itself": 5}
    assert handle.connections(way.protocol, way.port, form) == 0


def test_other_ports_on_the_loopback_are_left_alone(
    world: World, service: MakeService, form: Form, way: Way
) -> None:
    service(pods=world.backends[:2], node_port=True)
    with world.node.serve(tcp=[29_998], udp=[29_998], name="the node"):
        for host in LOOPBACKS[form]:
            assert way.ask(world.node, host, 29_998).backends == {"the node": 1}


def test_where_it_is_not_wanted_the_loopback_is_the_nodes_own(tmp_path: Path) -> None:
    """NP-03, NP-05, NP-07: some IPv4 addresses are selected, IPv6 is not spoken of."""
    flags = ["--nodeport-addresses", "192.168.50.0/28", "--iptables-localhost-nodeports=false"]
    plans_by = {"node_port_addresses": ("192.168.50.0/28",), "localhost_node_ports": False}
    with served(tmp_path, flags=flags, plans_by=plans_by) as world:
        spec = world.spec(pods=world.backends[:1], node_port=True)
        world.services(spec)
        with more_address(world):
            world.agent.settle()
            for way in Way:
                for host, good in (
                    (world.node.ipv4, 1),
                    (world.node.ipv6, 1),
                    (MORE, 0),
                    ("127.0.0.1", 0),
                    ("::1", 0),
                ):
                    outcome = way.ask(world.node, host, spec.node_port, timeout_s=0.3)
                    assert outcome.good == good, (way, host)
        world.agent.settle()


# --- one socket, several ways to a Service --------------------------------------------------------


def _all_ways(world: World, handle: object, form: Form) -> list[tuple[str, int]]:
    spec = handle.spec  # type: ignore[attr-defined]
    loopback = LOOPBACKS[form][0]
    port = spec.node_port
    return [(form.host(spec), 53), (form.host(world.node), port), (loopback, port)]


def test_replies_come_from_where_each_datagram_went(
    world: World, services: MakeServices, open_socket: OpenSocket, form: Form
) -> None:
    """Two Services, three addresses each, one unconnected socket: no flow is another's."""
    one, two = services(2, node_port=True)
    one.set(endpoints=ready(world.backends[0]))
    two.set(endpoints=ready(world.backends[1]))
    with open_socket(world.node, form) as sock:
        for _ in range(3):
            # be1 and be2 are met by several frontends each: the one that was used last is shown.
            for handle, name in ((one, "be1"), (two, "be2")):
                for where in _all_ways(world, handle, form):
                    assert ask(sock, where) == (name, where)


def test_a_connected_socket_sends_to_its_peer_by_either_name_of_the_loopback(
    world: World, service: MakeService, open_socket: OpenSocket
) -> None:
    """connect(0.0.0.0), then sendto(0.0.0.0) and sendto(127.0.0.1): one peer, one backend."""
    handle = service(pods=world.backends, node_port=True)
    port = handle.spec.node_port
    for _ in range(8):
        with open_socket(world.node, Form.V4) as sock:
            sock.connect(("0.0.0.0", port))
            assert peer(sock) == ("127.0.0.1", port)
            mine, where = ask(sock)
            assert where == ("127.0.0.1", port)
            for host in ("0.0.0.0", "127.0.0.1"):
                assert ask(sock, (host, port)) == (mine, ("127.0.0.1", port))


def test_a_tcp_socket_is_connected_through_every_address(
    world: World, service: MakeService, open_socket: OpenSocket, form: Form
) -> None:
    handle = service(pods=world.backends[:1], node_port=True)
    for host in (form.host(world.node), *LOOPBACKS[form]):
        with open_socket(world.node, form, socket.SOCK_STREAM) as sock:
            sock.connect((host, handle.spec.node_port))
            assert greeting(sock)["name"] == "be1"
            assert peer(sock)[1] == TCP_PORT


def _count(world: World, clients: list[Namespace], port: int) -> int:
    return sum(client.tcp(world.node.ipv4, port, count=5).good for client in clients)


def test_connections_are_counted_once_whatever_was_dialled(
    world: World, service: MakeService
) -> None:
    handle = service(pods=world.backends[:2], node_port=True)
    assert _count(world, [world.p1, world.p2, world.node], handle.spec.node_port) == 15
    assert world.p1.tcp(handle.ipv4, 80, count=5).good == 5
    assert handle.connections(Protocol.TCP, 80) == 20
