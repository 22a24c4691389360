"""UDP has no SYN: a flow is new by its time-out, and stale by its backend (CT-02 to -09, K5)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scapy.layers.inet import UDP
from scapy.layers.sctp import SCTP, SCTPChunkInit, SCTPChunkInitAck

from ebpflb.model import FrontendKind, Policy, Protocol
from tests.bpf.node import PacketNode, Service
from tests.bpf.packets import Net, frame, reply_to, tcp, udp
from tests.bpf.talks import Talk, make_udp, talks_to


def moved_service(node: PacketNode, net: Net, *, answered: bool = True) -> tuple[Service, Talk]:
    """A flow to the first backend; new ones go to the second. Both serve."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    talk = talks_to(node, dns)
    talk.says()
    if answered:
        assert talk.is_home(talk.answers())
        assert talk.lives()
    dns = replace(dns, local=net.local[1:], draining=net.local[:1])
    node.serve(dns)
    return dns, talk


@pytest.mark.parametrize("kind", list(FrontendKind), ids=lambda kind: kind.value)
def test_a_conversation_stays_with_its_backend(
    node: PacketNode, net: Net, kind: FrontendKind
) -> None:
    dns = Service(net, Protocol.UDP, local=net.local, remote=net.remote)
    node.serve(dns)
    talk = talks_to(node, dns, frontend=dns.frontend(kind))
    talk.opens()
    for _ in range(10):
        assert talk.lives()


def test_an_empty_datagram_is_one_too(node: PacketNode, net: Net) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    talk = talks_to(node, dns)
    assert talk.says(packet=udp(net.client, dns.node_port, b"")).target == net.local[0]
    assert talk.is_home(talk.answers(packet=udp(net.local[0], net.client, b"")))


@pytest.mark.parametrize(("idle_s", "over"), [(25, False), (35, True)])
def test_a_flow_without_an_answer_is_over_after_30_seconds(
    node: PacketNode, net: Net, idle_s: int, over: bool
) -> None:
    _, talk = moved_service(node, net, answered=False)
    node.later(idle_s)
    assert talk.says().target == net.local[1 if over else 0]


@pytest.mark.parametrize(("idle_s", "over"), [(115, False), (125, True)])
def test_a_conversation_is_over_after_120_seconds(
    node: PacketNode, net: Net, idle_s: int, over: bool
) -> None:
    _, talk = moved_service(node, net)
    node.later(idle_s)
    assert talk.says().target == net.local[1 if over else 0]


def test_a_flow_that_is_over_begins_whole(node: PacketNode, net: Net) -> None:
    _, talk = moved_service(node, net)
    node.later(125)
    talk.says()
    assert talk.is_home(talk.answers())
    assert talk.lives()
    assert len([flow for flow in node.flows() if flow.kind == "forward"]) == 1


@pytest.mark.parametrize("way", ["the client's", "the backend's"])
def test_packets_of_either_way_keep_a_conversation(node: PacketNode, net: Net, way: str) -> None:
    _, talk = moved_service(node, net)
    for _ in range(3):
        node.later(80)
        if way == "the client's":
            assert talk.says().target == net.local[0]
        else:
            assert talk.is_home(talk.answers())
    node.later(80)
    assert talk.says().target == net.local[0]
    assert talk.is_home(talk.answers())


def test_who_asks_once_and_then_only_hears_has_a_conversation_too(
    node: PacketNode, net: Net
) -> None:
    """A subscriber. netfilter's rule: what still talks after two seconds has the long time-out."""
    _, talk = moved_service(node, net, answered=False)
    for pause_s in (0, 1, 10, 20, 80, 80):
        node.later(pause_s)
        assert talk.is_home(talk.answers())
    node.later(80)
    assert talk.says().target == net.local[0]


def test_the_timeouts_are_the_nodes(node: PacketNode, net: Net) -> None:
    _, talk = moved_service(node, net)
    node.settings(udp_stream_timeout_ns=10_000_000_000)
    node.later(15)
    assert talk.says().target == net.local[1]


# --- stale -------------------------------------------------------------------------------------


def test_a_flow_moves_when_its_backend_serves_no_more(node: PacketNode, net: Net) -> None:
    """CT-03, CT-08: the same client from the same port, who never stops."""
    dns, talk = moved_service(node, net)
    node.serve(replace(dns, draining=()))
    node.later(0.5)
    assert talk.says().target == net.local[1]
    assert talk.is_home(talk.answers())
    assert talk.lives()
    assert {flow.address for flow in node.flows() if flow.kind == "forward"} == {net.local[1]}
    assert {flow.source for flow in node.flows() if flow.kind == "reverse"} == {net.local[1]}


def test_an_unanswered_flow_moves_when_its_backend_serves_no_more(
    node: PacketNode, net: Net
) -> None:
    dns, talk = moved_service(node, net, answered=False)
    node.serve(replace(dns, draining=()))
    node.later(0.5)
    assert talk.says().target == net.local[1]
    assert talk.is_home(talk.answers())


def test_a_flow_whose_backend_terminates_but_serves_stays(node: PacketNode, net: Net) -> None:
    """CT-07."""
    _, talk = moved_service(node, net)
    node.later(0.5)
    assert talk.lives()


def test_a_flow_stays_whatever_policy_says_of_its_backend(node: PacketNode, net: Net) -> None:
    """CT-04."""
    dns = Service(net, Protocol.UDP, remote=net.remote[:1])
    node.serve(dns)
    talk = talks_to(node, dns)
    talk.opens()
    node.serve(replace(dns, local=net.local[:1], external_policy=Policy.LOCAL))
    node.later(0.5)
    assert talk.lives()


def test_a_flow_is_cut_when_no_endpoint_is_left(node: PacketNode, net: Net) -> None:
    """Other than CT-05, and documented; when one comes, the same flow reaches it (CT-09)."""
    dns, talk = moved_service(node, net)
    node.serve(replace(dns, local=(), draining=()))
    node.later(0.5)
    assert talk.says().rejected
    node.serve(replace(dns, draining=()))
    assert talk.says().target == net.local[1]
    assert talk.is_home(talk.answers())


def test_a_flow_is_cut_when_its_service_is_deleted(node: PacketNode, net: Net) -> None:
    dns, talk = moved_service(node, net)
    node.remove(dns)
    node.later(0.5)
    assert talk.says().unchanged


def test_who_dials_before_there_is_an_endpoint_reaches_it_when_it_comes(
    node: PacketNode, net: Net
) -> None:
    """CT-09, L-41: nothing is remembered of a refusal."""
    dns = Service(net, Protocol.UDP)
    node.serve(dns)
    talk = talks_to(node, dns)
    for _ in range(3):
        assert talk.says().rejected
    node.serve(replace(dns, local=net.local[:1]))
    assert talk.says().target == net.local[0]
    assert talk.is_home(talk.answers())


def test_a_service_that_is_made_again_under_its_old_address_has_flows_of_its_own(
    node: PacketNode, net: Net
) -> None:
    dns, talk = moved_service(node, net)
    node.remove(dns)
    node.serve(replace(dns, local=net.local, draining=()))
    node.later(0.5)
    talk.says()
    assert talk.backend in net.local
    assert talk.is_home(talk.answers())
    assert talk.lives()


# --- what leaves from a NodePort's number and is not ours (K5) ---------------------------------


def _init(source_port: int, target_port: int) -> SCTP:
    return SCTP(sport=source_port, dport=target_port) / SCTPChunkInit(init_tag=7)


@pytest.mark.parametrize("own", [True, False], ids=["the node's own", "masqueraded by the CNI"])
def test_the_answer_to_a_foreign_flow_is_no_new_connection(
    node: PacketNode, net: Net, own: bool
) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    query = udp(dns.node_port, net.stranger.at(53))
    sends = node.sends_own if own else node.sends
    assert sends(query).unchanged
    answer = reply_to(query, UDP())
    for _ in range(3):
        assert node.receives(answer).unchanged
        assert sends(query).unchanged
    assert node.half("foreign").table == "conntrack"
    assert node.counted("FOREIGN_FLOWS") == 1
    # Others who dial the NodePort are served, also from the same host.
    assert node.receives(udp(net.client, dns.node_port)).target == net.local[0]
    assert node.receives(udp(net.stranger.at(54), dns.node_port)).target == net.local[0]


def test_a_foreign_flow_is_over_when_nobody_uses_it(node: PacketNode, net: Net) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    query = udp(dns.node_port, net.stranger.at(53))
    node.sends(query)
    node.later(35)
    assert node.receives(udp(net.stranger.at(53), dns.node_port)).target == net.local[0]


def test_a_foreign_flow_that_goes_on_stays_foreign(node: PacketNode, net: Net) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    query, answer = (
        udp(dns.node_port, net.stranger.at(53)),
        udp(net.stranger.at(53), dns.node_port),
    )
    node.sends(query)
    assert node.receives(answer).unchanged
    for _ in range(4):
        node.later(80)
        assert node.sends(query).unchanged
    assert node.receives(answer).unchanged


def test_sctp_that_leaves_from_a_nodeports_number_is_foreign_too(
    node: PacketNode, net: Net
) -> None:
    sig = Service(net, Protocol.SCTP, local=net.local[:1])
    node.serve(sig)
    there = net.stranger.at(2905)
    init = frame(net.node.address, there.address, _init(sig.node_port.port, there.port))
    assert node.sends(init).unchanged
    ack = SCTP(sport=there.port, dport=sig.node_port.port) / SCTPChunkInitAck(init_tag=8)
    assert node.receives(frame(there.address, net.node.address, ack)).unchanged
    assert node.half("foreign").protocol == Protocol.SCTP


def test_tcp_needs_no_foreign_flows(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    assert node.sends(tcp(web.node_port, net.stranger.at(80))).unchanged
    assert node.receives(tcp(net.stranger.at(80), web.node_port, "SA")).unchanged
    assert not node.flows()


def test_only_a_nodeports_number_makes_a_flow_foreign(node: PacketNode, net: Net) -> None:
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    assert node.sends(udp(net.node.at(30099), net.stranger.at(53))).unchanged
    assert node.sends(udp(net.pod.at(dns.node_port.port), net.stranger.at(53))).unchanged
    assert node.sends(udp(net.node.at(dns.cluster_ip.port), net.stranger.at(53))).unchanged
    assert not node.flows()


def test_an_answer_of_ours_is_not_taken_for_a_foreign_flow(node: PacketNode, net: Net) -> None:
    """What goes home bears the NodePort as its source; so does what a stacked device sees."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    talk = Talk(node, net.client, dns.node_port, make_udp)
    talk.says()
    home = talk.answers()
    assert talk.is_home(home)
    assert node.sends(home.packet, "pod2").unchanged
    assert [flow for flow in node.flows() if flow.kind == "foreign"] == []
    assert talk.lives()


def test_a_hostnetwork_backend_on_the_nodeports_own_number_answers(
    node: PacketNode, net: Net
) -> None:
    dns = Service(net, Protocol.UDP, number=3)
    dns = replace(dns, local=(dns.node_port,))
    node.serve(dns)
    talk = talks_to(node, dns)
    for _ in range(3):
        out = talk.says()
        assert out.passed
        assert out.target == dns.node_port
        home = talk.answers()
        assert talk.is_home(home)
    assert [flow for flow in node.flows() if flow.kind == "foreign"] == []
