"""Stacked devices (a VLAN on a bond, a bridge on a NIC) run the programs twice: twice is once."""

from __future__ import annotations

import pytest
from scapy.layers.inet import TCP

from ebpflb.model import FrontendKind, Protocol
from tests.bpf.node import REJECT, PacketNode, Service
from tests.bpf.packets import Net, reply_to, tcp
from tests.bpf.talks import MAKES

PROTOCOLS = (Protocol.TCP, Protocol.UDP)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)
@pytest.mark.parametrize("kind", list(FrontendKind), ids=lambda kind: kind.value)
def test_a_packet_and_its_answer_are_translated_once(
    node: PacketNode, net: Net, protocol: Protocol, kind: FrontendKind
) -> None:
    web = Service(net, protocol, local=net.local, remote=net.remote)
    node.serve(web)
    frontend, make = web.frontend(kind), MAKES[protocol]
    flows = 0
    for flags, answer in (("S", "SA"), ("PA", "PA")):
        first = node.receives(make(net.client, frontend, flags))
        second = node.receives(first.packet, "pod", mark=first.mark)
        assert second.unchanged, second
        back = node.sends(make(first.target, first.source, answer))
        assert (back.source, back.target) == (frontend, net.client)
        again = node.sends(back.packet, "pod2")
        assert again.unchanged, again
        flows = flows or len(node.flows())
        assert len(node.flows()) == flows == 2


def test_a_rejected_packet_is_rejected_once(node: PacketNode, net: Net) -> None:
    web = Service(net)
    node.serve(web)
    first = node.receives(tcp(net.client, web.node_port))
    assert first.mark == REJECT
    second = node.receives(first.packet, "pod", mark=first.mark)
    assert second.passed
    assert second.mark == REJECT
    assert bytes(second.packet) == bytes(first.packet)


def test_a_reported_flow_is_reported_once(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    node.receives(tcp(net.client, web.node_port))
    first = node.receives(tcp(net.client, web.cluster_ip))
    assert first.source.port != net.client.port
    second = node.receives(first.packet, "pod", mark=first.mark)
    assert second.unchanged
    back = node.sends(reply_to(first.packet, TCP(flags="SA")))
    assert node.sends(back.packet, "pod2").unchanged


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)
def test_a_backend_that_is_a_frontend_too_is_reached(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """A process of the host that listens on another Service's NodePort number."""
    other = Service(net, protocol, number=1, local=net.local[:1])
    web = Service(net, protocol, local=(other.node_port,))
    node.serve(web, other)
    make = MAKES[protocol]
    for flags, answer in (("S", "SA"), ("PA", "PA")):
        first = node.receives(make(net.client, web.cluster_ip, flags))
        assert first.target == other.node_port
        assert node.receives(first.packet, "pod", mark=first.mark).unchanged
        back = node.sends_own(make(first.target, first.source, answer))
        assert (back.source, back.target) == (web.cluster_ip, net.client)
        assert node.sends_own(back.packet, "pod2").unchanged
    # Who dials the other one is served by it.
    assert node.receives(make(net.stranger, other.node_port, "S")).target == net.local[0]
