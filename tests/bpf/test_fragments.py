"""Fragments: only the head has ports, and those that follow it go where it went (L-45, B-117)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from scapy.layers.inet import IP, TCP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from ebpflb.model import Family, Protocol
from tests.bpf.node import MASQUERADE, Out, PacketNode, Service
from tests.bpf.packets import Net, fragments, ip_of, reassembled, tcp, udp, wrong_checksums

PAYLOAD = bytes(range(256)) * 6


def passed(outs: list[Out]) -> Packet:
    """All of them, put together again, with the right checksum of the whole."""
    assert all(out.passed for out in outs), outs
    whole = reassembled([out.packet for out in outs])
    assert not wrong_checksums(whole)
    return whole


def receive(node: PacketNode, parts: list[Packet], on: str = "uplink") -> list[Out]:
    return [node.receives(part, on) for part in parts]


def send(node: PacketNode, parts: list[Packet]) -> list[Out]:
    return [node.sends(part, came_in="pod2") for part in parts]


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=lambda one: one.name)
def test_fragments_that_follow_their_head_go_where_it_goes(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    dns = Service(net, protocol, local=net.local, remote=net.remote)
    node.serve(dns)
    packet = (
        udp(net.client, dns.node_port, PAYLOAD)
        if protocol is Protocol.UDP
        else tcp(net.client, dns.node_port, payload=PAYLOAD)
    )
    outs = receive(node, fragments(packet))
    whole = passed(outs)
    assert {out.target.address for out in outs} == {outs[0].target.address}
    assert outs[0].target in dns.backends
    assert bytes(whole[Raw]) == PAYLOAD
    assert {out.mark for out in outs} == {MASQUERADE}


def test_the_answers_fragments_come_from_the_frontend(node: PacketNode, net: Net) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    receive(node, fragments(udp(net.client, dns.node_port, PAYLOAD)))
    outs = send(node, fragments(udp(net.local[0], net.client, PAYLOAD), id_=99))
    whole = passed(outs)
    assert bytes(whole[Raw]) == PAYLOAD
    assert outs[0].source == dns.node_port
    assert {out.source.address for out in outs} == {dns.node_port.address}
    assert {out.target.address for out in outs} == {net.client.address}


def test_datagrams_whose_fragments_are_interleaved_are_kept_apart(
    node: PacketNode, net: Net
) -> None:
    """B-119."""
    one = Service(net, Protocol.UDP, local=net.local[:1])
    two = replace(one, number=1, local=net.local[1:])
    node.serve(one, two)
    first = fragments(udp(net.client, one.node_port, PAYLOAD), id_=1)
    second = fragments(udp(net.client, two.node_port, PAYLOAD), id_=2)
    outs = receive(node, [part for pair in zip(first, second, strict=True) for part in pair])
    assert {out.target.address for out in outs[::2]} == {net.local[0].address}
    assert {out.target.address for out in outs[1::2]} == {net.local[1].address}
    passed(outs[::2])
    passed(outs[1::2])


def test_fragments_may_follow_their_head_in_any_order(node: PacketNode, net: Net) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    head, *rest = fragments(udp(net.client, dns.node_port, PAYLOAD))
    outs = receive(node, [head, *reversed(rest)])
    passed([outs[0], *reversed(outs[1:])])


def test_a_fragment_before_its_head_to_a_services_address_is_dropped(
    node: PacketNode, net: Net
) -> None:
    """Nobody can tell whose it is, and nobody else is to have it."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    for number, frontend in enumerate((dns.cluster_ip, dns.external_ip, dns.load_balancer), 1):
        parts = fragments(udp(net.client, frontend, PAYLOAD), id_=number)
        assert node.receives(parts[1]).dropped
        assert node.counted("DROPPED_FRAGMENT") == number
        passed(receive(node, parts))


def test_a_fragment_before_its_head_to_the_node_is_left_alone(node: PacketNode, net: Net) -> None:
    """It may be the node's own; NodePorts have no address of their own."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    assert node.receives(fragments(udp(net.client, dns.node_port, PAYLOAD))[1]).unchanged


def test_fragments_to_another_port_of_a_services_address_follow_their_head(
    node: PacketNode, net: Net
) -> None:
    """An external IP may be the node's own address: what else goes there is not ours to drop."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    for number, frontend in enumerate((dns.external_ip, dns.load_balancer, dns.cluster_ip)):
        for part in fragments(udp(net.client, frontend.at(9999), PAYLOAD), id_=number):
            assert node.receives(part).unchanged, part
    assert node.counted("DROPPED_FRAGMENT") == 0


@pytest.mark.parametrize("way", ["in", "out"])
def test_the_fragments_of_what_is_not_ours_are_left_alone(
    node: PacketNode, net: Net, way: str
) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    for target in (net.stranger.at(53), net.node.at(53), net.local[0]):
        for part in fragments(udp(net.client, target, PAYLOAD)):
            out = node.receives(part) if way == "in" else node.sends(part)
            assert out.unchanged
    assert not list(node.maps["fragments"].items())


def test_the_fragments_of_a_rejected_datagram_are_no_reason_to_crash(
    node: PacketNode, net: Net
) -> None:
    dns = Service(net, Protocol.UDP)
    node.serve(dns)
    parts = fragments(udp(net.client, dns.cluster_ip, PAYLOAD))
    assert node.receives(parts[0]).rejected
    for part in parts[1:]:
        out = node.receives(part)
        assert out.dropped or out.rejected


def test_the_nodes_own_fragments_follow_their_head(node: PacketNode, net: Net) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    outs = [node.sends_own(part) for part in fragments(udp(net.node, dns.cluster_ip, PAYLOAD))]
    assert all(out.redirected for out in outs), outs
    assert {out.target.address for out in outs} == {net.local[0].address}
    assert not wrong_checksums(reassembled([out.packet for out in outs]))


def _short_head(net: Net, packet: Packet) -> Packet:
    """A first fragment with eight bytes: the ports are there, TCP's flags are not."""
    return fragments(packet, size=8)[0]


def _headless(net: Net, packet: Packet) -> Packet:
    """A first fragment without even the ports."""
    ip = ip_of(packet)
    assert ip is not None
    if net.family is Family.IPV6:
        head: Packet = IPv6(src=ip.src, dst=ip.dst) / IPv6ExtHdrFragment(nh=17, m=1, id=5)
    else:
        head = IP(src=ip.src, dst=ip.dst, proto=17, flags="MF", id=5)
    return Ether(bytes(Ether(src=packet.src, dst=packet.dst) / head / Raw(b"")))


@pytest.mark.parametrize("make", [_short_head, _headless], ids=["short", "empty"])
def test_a_first_fragment_that_lacks_what_decides_is_not_translated(
    node: PacketNode, net: Net, make: Callable[[Net, Packet], Packet]
) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    out = node.receives(make(net, tcp(net.client, web.cluster_ip, payload=PAYLOAD)))
    assert out.dropped or out.unchanged
    assert not node.flows()


def test_an_atomic_fragment_is_a_whole_packet(node: PacketNode, net: Net) -> None:
    """IPv6 only: a fragment header that says that there is one fragment (RFC 6946)."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    if net.family is Family.IPV4:
        packet = udp(net.client, dns.node_port)
        packet[IP].flags = "DF"
    else:
        (packet,) = fragments(udp(net.client, dns.node_port), size=1480)
    out = node.receives(packet)
    assert out.passed
    assert out.target == net.local[0]


def test_a_tcp_flow_may_begin_with_a_fragment(node: PacketNode, net: Net) -> None:
    """Its answer is whole, and the flow goes on so."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    outs = receive(node, fragments(tcp(net.client, web.node_port, payload=PAYLOAD)))
    assert outs[0].packet[TCP].dport == net.local[0].port
    back = node.sends(tcp(net.local[0], net.client, "SA"))
    assert back.source == web.node_port


def test_a_number_that_comes_back_is_another_datagrams(node: PacketNode, net: Net) -> None:
    """Numbers are of 16 bits: a tunnel's datagram from the same host is not a Service's."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    payload = bytes(1500)
    for part in fragments(udp(net.client, dns.node_port, payload), id_=5):
        assert node.receives(part).target.address == net.local[0].address
    for part in fragments(udp(net.client, net.node.at(4789), payload), id_=5):
        assert node.receives(part).unchanged


def test_fragments_that_are_only_sent_on_follow_their_head(node: PacketNode, net: Net) -> None:
    """They came in by a device that has no programs, and are for no port of a Service's."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    for part in fragments(udp(net.client, dns.load_balancer.at(999), bytes(1500)), id_=50):
        assert node.sends(part, came_in="tun").unchanged
