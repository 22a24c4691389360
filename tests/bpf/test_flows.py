"""A packet's life: to a frontend, on to a backend, the answer, and home, on one node and on two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
from scapy.layers.inet import ICMP, TCP, UDP
from scapy.layers.inet6 import ICMPv6EchoRequest
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Packet, Raw

from ebpflb.model import Family, FrontendKind, Policy, Protocol
from tests.bpf.node import Out, PacketNode, Service
from tests.bpf.packets import End, Net, frame, ip_of, l4_of, reply_to, tcp, udp
from tests.bpf.talks import MAKES, Netfilter, Talk, clients, talks_to

PROTOCOLS = (Protocol.TCP, Protocol.UDP)

by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)
by_kind = pytest.mark.parametrize("kind", list(FrontendKind), ids=lambda kind: kind.value)


def fields(packet: Packet) -> dict[str, object]:
    """Every field of the headers, and the payload."""
    found: dict[str, object] = {}
    for layer in (packet[Ether], ip_of(packet), l4_of(packet)):
        assert layer is not None
        found |= {f"{layer.name}.{name}": value for name, value in layer.fields.items()}
    found["payload"] = bytes(packet[Raw]) if Raw in packet else b""
    return found


def changed(out: Out) -> set[str]:
    """The fields that are not as they were, without their layers' names."""
    before, after = fields(out.was), fields(out.packet)
    return {name.split(".")[-1] for name in before if before[name] != after[name]}


# --- one node ----------------------------------------------------------------------------------


@by_protocol
@by_kind
def test_a_new_flow_goes_to_a_backend_and_its_answer_comes_from_the_frontend(
    node: PacketNode, net: Net, protocol: Protocol, kind: FrontendKind
) -> None:
    web = Service(net, protocol, local=net.local, remote=net.remote)
    node.serve(web)
    talk = talks_to(node, web, frontend=web.frontend(kind))

    out = talk.says("S")
    assert out.passed, out
    assert out.source == net.client
    assert out.target in web.backends
    back = talk.answers("SA")
    assert talk.is_home(back), back
    assert back.mark == 0
    assert talk.lives()


@by_protocol
def test_only_addresses_ports_and_checksums_of_a_packet_are_changed(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    web = Service(net, protocol, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    assert changed(talk.says("S")) - {"chksum"} == {"dst", "dport"}
    assert changed(talk.answers("SA")) - {"chksum"} == {"src", "sport"}


def test_new_connections_are_spread_over_all_backends(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local, remote=net.remote)
    node.serve(web)
    targets = [
        node.receives(tcp(client, web.node_port)).target
        for client in islice(clients(net.client), 120)
    ]
    # One of them less than 6 times of 120 with four backends: once in 10^8 runs.
    assert all(targets.count(backend) >= 6 for backend in web.backends)
    assert set(targets) == set(web.backends)


def test_a_syn_that_is_sent_again_goes_to_the_same_backend(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local, remote=net.remote)
    node.serve(web)
    targets = {node.receives(tcp(net.client, web.node_port)).target for _ in range(20)}
    assert len(targets) == 1


def test_a_connection_is_counted_once(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talks_to(node, web).opens()
    talks_to(node, web, net.stranger).opens()
    assert node.connections(web) == 2
    assert node.counted("TRANSLATED") == 2


def test_the_clients_next_packet_after_an_answer_moves_both_halves_to_the_answered_ones(
    node: PacketNode, net: Net
) -> None:
    """A flood's answers do not, so that it stays among its like."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.says("S")
    assert sorted(flow.kind for flow in node.flows("flows_new")) == ["forward", "reverse"]
    assert not node.flows("conntrack")
    talk.answers("SA")
    assert not node.flows("conntrack")
    talk.says("A")
    assert sorted(flow.kind for flow in node.flows("conntrack")) == ["forward", "reverse"]
    assert not node.flows("flows_new")


@by_protocol
def test_a_client_that_nobody_answers_stays_among_the_unanswered(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    web = Service(net, protocol, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    for flags in ("S", "S", "A", "PA"):
        talk.says(flags)
        node.later(1)
    assert not node.flows("conntrack")


def test_an_entry_leads_from_the_client_to_the_backend_and_back(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.opens()
    forward, reverse = node.half("forward"), node.half("reverse")
    assert (forward.source, forward.target) == (net.client, web.node_port)
    assert (forward.address, forward.client_port) == (talk.backend, net.client.port)
    assert (reverse.source, reverse.target) == (talk.backend, net.client)
    assert (reverse.address, reverse.client_port) == (web.node_port, net.client.port)
    assert forward.entry.id == reverse.entry.id != 0


@by_protocol
@pytest.mark.parametrize("lost", ["forward", "reverse"])
@pytest.mark.parametrize("reported", [False, True], ids=["own port", "another port"])
def test_a_half_that_the_lru_took_is_put_back_by_the_other(
    node: PacketNode, net: Net, protocol: Protocol, lost: str, reported: bool
) -> None:
    web = Service(net, protocol, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    if reported:
        talks_to(node, web, frontend=web.cluster_ip).opens()
    talk.opens()
    assert talk.lives()
    assert (talk.seen_as != net.client) is reported
    (half,) = (
        flow
        for flow in node.flows("conntrack")
        if flow.kind == lost and web.node_port in {flow.target, flow.address}
    )
    node.forget(half)
    node.later(1)
    if lost == "reverse":
        talk.says("A")
    else:
        assert talk.is_home(talk.answers("A"))
    found = [flow._replace(entry=None) for flow in node.flows("conntrack")]
    assert half._replace(entry=None) in found
    assert talk.lives()


def test_an_entry_that_is_another_flows_by_now_is_none(node: PacketNode, net: Net) -> None:
    """The LRU may give an element to another key while it is read: both checks must hold."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    for check in ("check_head", "check_tail"):
        talk = talks_to(node, web, net.client.at(41000 + len(check)))
        talk.opens()
        node.change_flows(**{check: lambda value: value ^ 2})
        assert talk.says("A").unchanged
        assert node.sends(tcp(net.local[0], talk.client, "A")).unchanged


def test_a_service_that_the_sockets_leave_alone_is_served_here(node: PacketNode, net: Net) -> None:
    """ebpflb.io/socket-lb: "false"."""
    web = Service(net, local=net.local[:1], socket_lb=False)
    node.serve(web)
    assert talks_to(node, web).opens() == net.local[0]
    assert Talk(node, net.pod, web.cluster_ip, on="pod").opens() == net.local[0]


def test_both_ways_see_the_flow_only_where_the_client_is(node: PacketNode, net: Net) -> None:
    """Netfilter has the translated packet both ways: the backend's own device changes nothing."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    out = node.receives(tcp(net.client, web.node_port))
    assert node.sends(out.packet, "pod2", came_in="uplink").unchanged
    back = reply_to(out.packet, TCP(flags="SA"))
    assert node.receives(back, "pod2").unchanged
    home = node.sends(back, "uplink", came_in="pod2")
    assert (home.source, home.target) == (web.node_port, net.client)


def test_a_flow_is_none_at_the_hooks_that_are_not_its_own(node: PacketNode, net: Net) -> None:
    """Forward where the client's packets come in, reverse where they go home; the node's own flows
    the other way round."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk, own = talks_to(node, web), Talk(node, net.node, web.cluster_ip, own=True)
    talk.opens()
    own.says("S")
    own.answers("SA")
    assert own.says("A").redirected
    for packet in (tcp(talk.client, talk.frontend, "A"), tcp(own.backend, own.client, "A")):
        assert node.sends(packet).unchanged
        assert node.sends_own(packet).unchanged
    for packet in (tcp(talk.backend, talk.client, "A"), tcp(own.client, own.frontend, "A")):
        assert node.receives(packet).unchanged
    assert talk.lives()


@by_protocol
def test_a_pods_flow_is_translated_at_the_pods_own_device(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    web = Service(net, protocol, remote=net.remote)
    node.serve(web)
    talk = Talk(node, net.pod, web.cluster_ip, MAKES[protocol], on="pod")
    assert talk.opens() in web.remote
    assert talk.lives()


def test_two_clients_with_one_port_number_have_a_flow_each(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    one, other = talks_to(node, web), talks_to(node, web, net.stranger)
    one.opens()
    other.opens()
    assert one.lives()
    assert other.lives()


def test_tcp_and_udp_of_one_number_are_two_services(node: PacketNode, net: Net) -> None:
    web = Service(net, Protocol.TCP, number=1, local=net.local[:1])
    dns = Service(net, Protocol.UDP, number=1, local=net.local[1:])
    node.serve(web, dns)
    assert node.receives(tcp(net.client, web.node_port)).target == net.local[0]
    assert node.receives(udp(net.client, dns.node_port)).target == net.local[1]


# --- what is not ours --------------------------------------------------------------------------


def _echo(net: Net) -> Packet:
    return ICMPv6EchoRequest() if net.family is Family.IPV6 else ICMP()


STRANGE: dict[str, Callable[[Net, Service], Packet]] = {
    "TCP to somebody else": lambda net, _: tcp(net.client, net.stranger.at(80)),
    "UDP to somebody else": lambda net, _: udp(net.client, net.stranger.at(80)),
    "TCP to another port of a Service": lambda net, web: tcp(net.client, web.cluster_ip.at(81)),
    "the other protocol to a Service's port": lambda net, web: udp(net.client, web.cluster_ip),
    "a NodePort's number at another's address": lambda net, web: tcp(
        net.client, net.stranger.at(web.node_port.port)
    ),
    "a NodePort's number at a ClusterIP": lambda net, web: tcp(
        net.client, web.cluster_ip.at(web.node_port.port)
    ),
    "a ClusterIP's port at the node": lambda net, _: tcp(net.client, net.node.at(80)),
    "a backend by its own address": lambda net, _: tcp(net.client, net.local[0]),
    "an echo request to the node": lambda net, _: frame(
        net.client.address, net.node.address, _echo(net)
    ),
    "IP of no protocol": lambda net, _: frame(net.client.address, net.node.address, Raw(bytes(40))),
    "ARP": lambda *_: Ether() / ARP(),
    "a frame of an unknown type": lambda *_: Ether(type=0x9999) / Raw(bytes(40)),
    "a NodePort's number at the unspecified address": lambda net, web: tcp(
        net.client,
        End("::" if net.family is Family.IPV6 else "0.0.0.0", web.node_port.port),
    ),
    "a NodePort's number at the loopback": lambda net, web: tcp(
        net.client,
        End("::1" if net.family is Family.IPV6 else "127.0.0.1", web.node_port.port),
    ),
    "UDP to all hosts": lambda net, web: frame(
        net.client.address,
        "ff02::1" if net.family is Family.IPV6 else "224.0.0.1",
        UDP(sport=1, dport=web.node_port.port),
    ),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_not_a_services_is_left_alone(node: PacketNode, net: Net, what: str) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    packet = STRANGE[what](net, web)
    for device in ("uplink", "pod"):
        assert node.receives(packet, device, mark=0x30).unchanged
        assert node.sends(packet, device, mark=0x30).unchanged
        assert node.sends_own(packet, device, mark=0x30).unchanged
    assert not node.flows()


@pytest.mark.parametrize("flags", ["A", "PA", "FA", "R", "RA", "SA", ""])
def test_tcp_in_mid_flow_that_nobody_knows_is_left_alone(
    node: PacketNode, net: Net, flags: str
) -> None:
    """It may be another proxy's flow, of before our time (L-33)."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    for frontend in (web.cluster_ip, web.node_port, web.external_ip):
        assert node.receives(tcp(net.client, frontend, flags)).unchanged
    assert not node.flows()


@pytest.mark.parametrize("flags", ["A", "PA", "FA", "R", "SA"])
def test_while_flows_are_carried_over_mid_flow_tcp_to_a_frontend_is_dropped(
    node: PacketNode, net: Net, flags: str
) -> None:
    """It is sent again; passed on it would be reset by the node (K6)."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    node.state("SEES_PODS", "SEES_HOST", "MIGRATING")
    for frontend in (web.cluster_ip, web.node_port, web.external_ip):
        assert node.receives(tcp(net.client, frontend, flags)).dropped
    assert node.counted("DROPPED_MIGRATING") == 3
    assert node.receives(tcp(net.client, net.stranger.at(80), flags)).unchanged
    assert talks_to(node, web).opens() in web.backends


def test_without_new_flows_those_that_are_there_go_on(node: PacketNode, net: Net) -> None:
    """The packet path is about to go (K17)."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    old = talks_to(node, web)
    old.opens()
    node.state("SEES_PODS", "SEES_HOST", "DRAINING")
    assert old.lives()
    assert node.receives(tcp(net.stranger, web.node_port)).unchanged
    assert node.receives(tcp(net.pod, web.cluster_ip), "pod").unchanged
    assert old.lives()


def test_a_service_that_is_gone_is_not_translated_any_more(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.opens()
    node.remove(web)
    assert node.receives(tcp(net.stranger, web.node_port)).unchanged
    assert talk.lives()  # an open connection is not cut (CT-06)


# --- this node's own packets, past the socket hooks --------------------------------------------


@by_protocol
@pytest.mark.parametrize("where", ["here", "on the other node"])
def test_the_nodes_own_packet_is_translated_where_it_leaves(
    node: PacketNode, net: Net, protocol: Protocol, where: str
) -> None:
    backend = net.local[0] if where == "here" else net.remote[0]
    web = Service(net, protocol, local=(backend,))
    node.serve(web)
    talk = Talk(node, net.node, web.cluster_ip, MAKES[protocol], own=True)
    out = talk.says("S")
    assert out.redirected, out
    assert (out.source, out.target) == (net.node, backend)
    back = talk.answers("SA")
    assert talk.is_home(back), back
    assert talk.says("A").redirected
    assert talk.backend == backend


def test_the_nodes_own_packet_is_translated_once(node: PacketNode, net: Net) -> None:
    """After the redirection it meets the program of the device that it is sent to."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    out = node.sends_own(tcp(net.node, web.cluster_ip))
    assert node.sends_own(out.packet, "pod2").unchanged


@by_kind
def test_what_passes_through_the_node_is_not_taken_for_its_own(
    node: PacketNode, net: Net, kind: FrontendKind
) -> None:
    """It met the program where it came in; left alone there, it is left alone here."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    assert node.sends(tcp(net.client, web.frontend(kind)), came_in="pod").unchanged


# --- two nodes ---------------------------------------------------------------------------------


@by_protocol
def test_from_outside_through_a_nodeport_to_another_nodes_backend_and_home(
    node: PacketNode, other_node: PacketNode, net: Net, protocol: Protocol
) -> None:
    web = Service(net, protocol, remote=net.remote[:1])
    node.serve(web)
    other_node.serve(replace(web, remote=(), local=net.remote[:1]))
    netfilter = Netfilter(net.node)
    make = MAKES[protocol]

    for flags, answer in (("S", "SA"), ("PA", "PA")):
        packet = make(net.client, web.node_port, flags)
        translated = node.receives(packet)
        assert translated.masqueraded
        leaving = node.sends(netfilter.leaves(translated), came_in="uplink")
        assert leaving.unchanged
        arrived = other_node.receives(leaving.packet)
        assert arrived.unchanged
        assert arrived.target == net.remote[0]
        assert arrived.source.address == net.node.address
        assert other_node.sends(arrived.packet, "pod", came_in="uplink").unchanged

        back = make(arrived.target, arrived.source, answer)
        assert other_node.receives(back, "pod").unchanged
        assert other_node.sends(back, came_in="pod").unchanged
        returned = node.receives(back)
        assert returned.unchanged
        home = node.sends(netfilter.comes_back(returned), came_in="uplink")
        assert (home.source, home.target) == (web.node_port, net.client)
        assert not home.mark


@by_protocol
def test_a_pods_packet_through_the_clusterip_to_another_nodes_backend_and_home(
    node: PacketNode, other_node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """Nobody masquerades: the backend sees the pod (MASQ-15)."""
    web = Service(net, protocol, remote=net.remote[:1])
    node.serve(web)
    other_node.serve(replace(web, remote=(), local=net.remote[:1]))
    make = MAKES[protocol]

    for flags, answer in (("S", "SA"), ("PA", "PA")):
        translated = node.receives(make(net.pod, web.cluster_ip, flags), "pod")
        assert not translated.mark
        assert node.sends(translated.packet, came_in="pod").unchanged
        arrived = other_node.receives(translated.packet)
        assert arrived.unchanged
        assert (arrived.source, arrived.target) == (net.pod, net.remote[0])
        back = make(net.remote[0], net.pod, answer)
        assert other_node.receives(back, "pod").unchanged
        assert other_node.sends(back, came_in="pod").unchanged
        assert node.receives(back).unchanged
        home = node.sends(back, "pod", came_in="uplink")
        assert (home.source, home.target) == (web.cluster_ip, net.pod)


def test_a_pod_that_dials_another_nodes_nodeport_is_served_there(
    node: PacketNode, other_node: PacketNode, net: Net
) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    other_node.serve(replace(web, local=(), remote=net.local[:1]))
    there = net.other_node.at(web.node_port.port)
    netfilter = Netfilter(net.other_node)

    syn = tcp(net.pod, there)
    assert node.receives(syn, "pod").unchanged
    assert node.sends(syn, came_in="pod").unchanged
    translated = other_node.receives(syn)
    assert translated.target == net.local[0]
    assert translated.masqueraded
    turned_round = other_node.sends(netfilter.leaves(translated), came_in="uplink")
    assert turned_round.unchanged
    arrived = node.receives(turned_round.packet)
    assert arrived.unchanged
    back = reply_to(arrived.packet, TCP(flags="SA"))
    assert node.receives(back, "pod2").unchanged
    assert node.sends(back, came_in="pod2").unchanged
    returned = other_node.receives(back)
    assert returned.unchanged
    home = other_node.sends(netfilter.comes_back(returned), came_in="uplink")
    assert (home.source, home.target) == (there, net.pod)
    assert node.receives(home.packet).unchanged
    assert node.sends(home.packet, "pod", came_in="uplink").unchanged


def test_from_outside_through_external_traffic_policy_local_the_client_is_seen(
    node: PacketNode, net: Net
) -> None:
    web = Service(net, local=net.local[:1], remote=net.remote, external_policy=Policy.LOCAL)
    node.serve(web)
    talk = talks_to(node, web)
    out = talk.says("S")
    assert not out.mark
    assert out.source == net.client
    assert talk.is_home(talk.answers("SA"))
