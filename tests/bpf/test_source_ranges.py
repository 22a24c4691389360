"""Source ranges: who may dial a load balancer's addresses (LB-05 to -08, NOEP-16)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebpflb.model import Family, FrontendKind, Policy, Protocol
from tests.bpf.node import PacketNode, Service
from tests.bpf.packets import End, Net
from tests.bpf.talks import MAKES, talks_to

PROTOCOLS = (Protocol.TCP, Protocol.UDP)
by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)


def single(end: End) -> str:
    """The range of one address."""
    return f"{end.address}/{128 if ':' in end.address else 32}"


def wide(end: End) -> str:
    """A network around it."""
    return f"{end.address}/{64 if ':' in end.address else 24}"


def is_served(
    node: PacketNode, service: Service, client: End, frontend: End, *, on: str = "uplink"
) -> bool:
    """Dropped, or else translated; nothing in between."""
    out = node.receives(MAKES[service.protocol](client, frontend, "S"), on)
    if out.dropped:
        return False
    assert out.passed
    assert out.target in service.backends
    return True


@by_protocol
def test_the_load_balancers_address_is_for_those_in_range_only(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """LB-05: others are dropped, silently, and counted."""
    web = Service(net, protocol, local=net.local[:1], source_ranges=(single(net.client),))
    node.serve(web)
    assert is_served(node, web, net.client, web.load_balancer)
    assert not is_served(node, web, net.stranger, web.load_balancer)
    assert node.counted("DROPPED_RANGE") == 1
    assert talks_to(node, web, frontend=web.load_balancer).opens() == net.local[0]


def test_all_other_frontends_are_for_everybody(node: PacketNode, net: Net) -> None:
    """LB-05, SEC-07."""
    web = Service(net, local=net.local[:1], source_ranges=(single(net.client),))
    node.serve(web)
    for kind in set(FrontendKind) - {FrontendKind.LOAD_BALANCER}:
        assert is_served(node, web, net.stranger, web.frontend(kind))


def test_a_pod_must_be_in_range_too(node: PacketNode, net: Net) -> None:
    """LB-06, B-159."""
    web = Service(net, local=net.local[:1], source_ranges=(single(net.client),))
    node.serve(web)
    assert not is_served(node, web, net.pod, web.load_balancer, on="pod")
    node.serve(replace(web, source_ranges=(single(net.client), wide(net.pod))))
    assert is_served(node, web, net.pod, web.load_balancer, on="pod")


def test_the_node_itself_must_be_in_range_too(node: PacketNode, net: Net) -> None:
    """K16: what the socket hook leaves is decided where it leaves the node."""
    web = Service(net, local=net.local[:1], source_ranges=(single(net.client),))
    node.serve(web)
    make = MAKES[web.protocol]
    assert node.sends_own(make(net.node, web.load_balancer, "S")).dropped
    node.serve(replace(web, source_ranges=(single(net.node),)))
    assert node.sends_own(make(net.node, web.load_balancer, "S")).redirected


def test_the_load_balancers_own_address_is_in_range_where_the_nodes_is(
    node: PacketNode, net: Net
) -> None:
    """LB-07: a node that has the address bound uses it as its source."""
    web = Service(net, local=net.local[:1], source_ranges=(single(net.node),))
    node.serve(web)
    source = web.load_balancer.at(41000)
    assert is_served(node, web, source, web.load_balancer)
    node.serve(replace(web, source_ranges=(single(net.client),)))
    assert not is_served(node, web, source.at(41001), web.load_balancer)


def test_without_any_endpoint_everybody_is_rejected(node: PacketNode, net: Net) -> None:
    """LB-08, NOEP-16: as in iptables mode."""
    web = Service(net, source_ranges=(single(net.client),))
    node.serve(web)
    for client in (net.client, net.stranger):
        assert node.receives(MAKES[web.protocol](client, web.load_balancer, "S")).rejected
    assert node.counted("DROPPED_RANGE") == 0


def test_without_a_backend_here_those_in_range_are_dropped(node: PacketNode, net: Net) -> None:
    web = Service(
        net,
        remote=net.remote,
        source_ranges=(single(net.client),),
        external_policy=Policy.LOCAL,
    )
    node.serve(web)
    assert not is_served(node, web, net.client, web.load_balancer)
    assert not is_served(node, web, net.stranger, web.load_balancer)


def test_each_edit_of_the_ranges_takes_effect(node: PacketNode, net: Net) -> None:
    """B-155: [A], [A, B], none, [A], and no other Service is touched."""
    web = Service(net, local=net.local[:1])
    other = replace(web, number=1, source_ranges=(single(net.stranger),))
    node.serve(web, other)
    one, two = single(net.client), single(net.stranger)
    edits: list[tuple[tuple[str, ...], tuple[bool, bool]]] = [
        ((one,), (True, False)),
        ((one, two), (True, True)),
        ((), (True, True)),
        ((one,), (True, False)),
        ((two,), (False, True)),
    ]
    for number, (ranges, served) in enumerate(edits):
        node.serve(replace(web, source_ranges=ranges))
        port = 41000 + number
        found = tuple(
            is_served(node, web, client.at(port), web.load_balancer)
            for client in (net.client, net.stranger)
        )
        assert found == served, ranges
        assert not is_served(node, other, net.client.at(port), other.load_balancer)
        assert is_served(node, other, net.stranger.at(port), other.load_balancer)


def test_ranges_of_any_length_count(node: PacketNode, net: Net) -> None:
    v6 = net.family is Family.IPV6
    prefix = net.client.address.rpartition("::" if v6 else ".")[0] + ("::" if v6 else ".")
    web = Service(net, local=net.local[:1])
    inside, outside = End(f"{prefix}7", 41000), End(f"{prefix}8", 41000)
    last_of_eight = f"{prefix}0/{125 if v6 else 29}"
    for ranges, served in (
        ((last_of_eight,), (True, False)),
        (("::/0" if v6 else "0.0.0.0/0",), (True, True)),
        ((last_of_eight, single(outside)), (True, True)),
        ((wide(inside), single(inside)), (True, True)),
    ):
        node.serve(replace(web, source_ranges=ranges))
        node.clear("flows_new")
        found = tuple(
            is_served(node, web, client, web.load_balancer) for client in (inside, outside)
        )
        assert found == served, ranges


def test_an_open_connection_outlives_a_range(node: PacketNode, net: Net) -> None:
    """NOEP-11: what is new is kept out."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web, frontend=web.load_balancer)
    talk.opens()
    node.serve(replace(web, source_ranges=(single(net.stranger),)))
    assert talk.lives()
    assert not is_served(node, web, net.client.at(41000), web.load_balancer)
