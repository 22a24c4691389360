"""No endpoint anywhere: the packet is marked for netfilter's REJECT, no more (NOEP, K9)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ebpflb.model import FrontendKind, Policy, Protocol
from tests.bpf.node import REJECT, PacketNode, Service
from tests.bpf.packets import Net, tcp, udp
from tests.bpf.talks import MAKES, talks_to

PROTOCOLS = (Protocol.TCP, Protocol.UDP)
by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)
by_kind = pytest.mark.parametrize("kind", list(FrontendKind), ids=lambda kind: kind.value)


@by_protocol
@by_kind
@pytest.mark.parametrize("policy", list(Policy), ids=lambda policy: policy.value)
def test_without_an_endpoint_every_frontend_rejects(
    node: PacketNode, net: Net, kind: FrontendKind, protocol: Protocol, policy: Policy
) -> None:
    """NOEP-01 to -03, and NOEP-07: also where a policy would drop."""
    web = Service(net, protocol, internal_policy=policy, external_policy=policy)
    node.serve(web)
    make = MAKES[protocol]
    assert node.receives(make(net.client, web.frontend(kind), "S")).rejected
    assert node.receives(make(net.pod, web.frontend(kind), "S"), "pod").rejected
    assert node.counted("REJECTED") == 2
    assert not node.flows()


def test_other_marks_are_left_as_they_are(node: PacketNode, net: Net) -> None:
    web = Service(net)
    node.serve(web)
    out = node.receives(tcp(net.client, web.cluster_ip), mark=0xFFFF0000)
    assert out.mark == 0xFFFF0000 | REJECT


def test_another_bit_may_be_chosen(node: PacketNode, net: Net) -> None:
    web = Service(net)
    node.serve(web)
    node.settings(reject_mark=1 << 7)
    assert node.receives(tcp(net.client, web.cluster_ip)).mark == 1 << 7


@pytest.mark.parametrize("flags", ["A", "PA", "FA", "R", "RA"])
def test_mid_flow_tcp_is_not_rejected(node: PacketNode, net: Net, flags: str) -> None:
    """NOEP-11: a connection to what was a backend is not ours to end."""
    web = Service(net)
    node.serve(web)
    assert node.receives(tcp(net.client, web.node_port, flags)).unchanged


@by_protocol
def test_a_first_endpoint_serves_at_once(node: PacketNode, net: Net, protocol: Protocol) -> None:
    """L-41: that there was none is not remembered."""
    web = Service(net, protocol)
    node.serve(web)
    talk = talks_to(node, web)
    assert talk.says("S").rejected
    node.serve(replace(web, local=net.local[:1]))
    assert talk.opens() == net.local[0]


def test_an_endpoint_that_only_drains_is_none(node: PacketNode, net: Net) -> None:
    """NOEP-08."""
    web = Service(net, draining=net.local[:1])
    node.serve(web)
    assert node.receives(tcp(net.client, web.node_port)).rejected


def test_an_open_connection_outlives_its_services_last_endpoint(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.opens()
    node.serve(replace(web, local=()))
    assert talk.lives()
    assert node.receives(tcp(net.stranger, web.node_port)).rejected


@by_protocol
def test_what_the_node_itself_sends_to_nobody_does_not_go_out(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """Past the socket hooks; elsewhere it might be served by who knows whom."""
    web = Service(net, protocol)
    node.serve(web)
    make = MAKES[protocol]
    out = node.sends_own(make(net.node, web.cluster_ip, "S"))
    assert out.dropped or out.rejected
    assert node.counted("REJECTED") == 1


def test_another_port_of_an_empty_services_address_is_left_alone(
    node: PacketNode, net: Net
) -> None:
    """As in iptables mode."""
    web = Service(net)
    node.serve(web)
    assert node.receives(tcp(net.client, web.cluster_ip.at(81))).unchanged
    assert node.receives(udp(net.client, web.cluster_ip)).unchanged
