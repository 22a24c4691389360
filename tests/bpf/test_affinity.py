"""ClientIP affinity on the packet path: by the address that the packet comes from (AFF)."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from ebpflb.model import FrontendKind, Policy, Protocol
from tests.bpf.node import PacketNode, Service
from tests.bpf.packets import End, Net
from tests.bpf.talks import MAKES, clients

PROTOCOLS = (Protocol.TCP, Protocol.UDP)
by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)

TIMEOUT_S = 100


def sticky(net: Net, protocol: Protocol = Protocol.TCP) -> Service:
    return Service(net, protocol, local=net.local, remote=net.remote, affinity_s=TIMEOUT_S)


def reached(
    node: PacketNode,
    service: Service,
    frontend: End,
    client: End,
    *,
    first: int = 41000,
    count: int = 16,
    on: str = "uplink",
) -> set[End]:
    """The backends of so many new connections, from one port after the other."""
    make = MAKES[service.protocol]
    return {
        node.receives(make(end, frontend, "S"), on).target
        for end in islice(clients(client, first), count)
    }


@by_protocol
@pytest.mark.parametrize("kind", list(FrontendKind), ids=lambda kind: kind.value)
def test_a_client_gets_the_backend_of_last_time(
    node: PacketNode, net: Net, kind: FrontendKind, protocol: Protocol
) -> None:
    """AFF-02, AFF-09."""
    web = sticky(net, protocol)
    node.serve(web)
    assert len(reached(node, web, web.frontend(kind), net.client)) == 1


def test_all_frontends_of_a_service_port_share_the_record(node: PacketNode, net: Net) -> None:
    """AFF-02."""
    web = sticky(net)
    node.serve(web)
    found = set()
    for number, kind in enumerate(FrontendKind):
        first = 41000 + 100 * number
        found |= reached(node, web, web.frontend(kind), net.client, first=first, count=5)
    assert len(found) == 1


def test_each_client_has_a_record_of_its_own(node: PacketNode, net: Net) -> None:
    web = sticky(net)
    node.serve(web)
    found = [
        reached(node, web, web.node_port, net.client_number(number), count=3)
        for number in range(1, 21)
    ]
    assert all(len(backends) == 1 for backends in found)
    # 20 clients all at one of four backends: once in 4^19.
    assert len(set.union(*found)) > 1


def test_each_service_port_has_a_record_of_its_own(node: PacketNode, net: Net) -> None:
    """AFF-01: 12 clients who get the same backend twice by chance, once in 4^12."""
    web = sticky(net)
    other = replace(web, number=1)
    node.serve(web, other)
    pairs = [
        [
            reached(node, one, one.node_port, net.client_number(number), count=1)
            for one in (web, other)
        ]
        for number in range(1, 13)
    ]
    assert any(one != two for one, two in pairs)


def test_without_affinity_nothing_is_remembered(node: PacketNode, net: Net) -> None:
    web = replace(sticky(net), affinity_s=0)
    node.serve(web)
    assert len(reached(node, web, web.node_port, net.client, count=40)) > 1
    assert not list(node.maps["affinity"].items())


def test_a_record_is_over_so_long_after_the_last_new_connection(node: PacketNode, net: Net) -> None:
    """AFF-04, AFF-06."""
    web = sticky(net)
    node.serve(web)
    found = set()
    for number in range(40):
        found |= reached(node, web, web.node_port, net.client, first=41000 + number, count=1)
        node.later(TIMEOUT_S + 1)
    assert len(found) > 1


def test_each_new_connection_keeps_the_record(node: PacketNode, net: Net) -> None:
    """AFF-05."""
    web = sticky(net)
    node.serve(web)
    found = set()
    for number in range(20):
        found |= reached(node, web, web.node_port, net.client, first=41000 + number, count=1)
        node.later(TIMEOUT_S - 10)
    assert len(found) == 1


def test_packets_of_an_open_connection_do_not_keep_the_record(node: PacketNode, net: Net) -> None:
    """AFF-05."""
    web = sticky(net)
    node.serve(web)
    make = MAKES[web.protocol]
    found = set()
    for number in range(40):
        client = net.client.at(41000 + number)
        found.add(node.receives(make(client, web.node_port, "S")).target)
        node.later(TIMEOUT_S - 10)
        node.receives(make(client, web.node_port, "A"))
        node.later(11)
    assert len(found) > 1


def test_a_backend_that_is_gone_is_not_recalled(node: PacketNode, net: Net) -> None:
    """AFF-07."""
    web = sticky(net)
    node.serve(web)
    (first,) = reached(node, web, web.node_port, net.client)
    local, remote = (tuple(end for end in ends if end != first) for ends in (web.local, web.remote))
    node.serve(replace(web, local=local, remote=remote))
    (second,) = reached(node, web, web.node_port, net.client, first=42000)
    assert second != first
    # It is back; the client has another one by now.
    node.serve(web)
    assert reached(node, web, web.node_port, net.client, first=43000) == {second}


def test_a_backend_that_terminates_is_not_recalled(node: PacketNode, net: Net) -> None:
    """B-39."""
    web = Service(net, local=net.local[:1], affinity_s=TIMEOUT_S)
    node.serve(web)
    assert reached(node, web, web.node_port, net.client) == {net.local[0]}
    node.serve(replace(web, local=net.local[1:], draining=net.local[:1]))
    assert reached(node, web, web.node_port, net.client, first=42000) == {net.local[1]}


def test_a_record_counts_only_where_policy_allows_its_backend(node: PacketNode, net: Net) -> None:
    """AFF-07: through the ClusterIP it may be elsewhere, through the NodePort it must be here."""
    web = Service(
        net,
        local=net.local[:1],
        remote=net.remote,
        external_policy=Policy.LOCAL,
        affinity_s=TIMEOUT_S,
    )
    node.serve(web)
    for number in range(1, 9):
        client = net.client_number(number)
        reached(node, web, web.cluster_ip, client, count=2)
        assert reached(node, web, web.node_port, client, first=42000, count=2) == {net.local[0]}


def test_affinity_may_be_switched_on_and_off(node: PacketNode, net: Net) -> None:
    """AFF-08."""
    web = replace(sticky(net), affinity_s=0)
    node.serve(web)
    assert len(reached(node, web, web.node_port, net.client, count=40)) > 1
    node.serve(sticky(net))
    assert len(reached(node, web, web.node_port, net.client, first=42000)) == 1
    node.serve(web)
    assert len(reached(node, web, web.node_port, net.client, first=43000, count=40)) > 1
