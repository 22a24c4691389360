"""Two frontends of one backend, one client port: the second flow gets another port (L-38, B-21)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ebpflb.model import FrontendKind, Protocol
from tests.bpf.node import PacketNode, Service
from tests.bpf.packets import End, Net, tcp
from tests.bpf.talks import MAKES, Talk, talks_to

PROTOCOLS = (Protocol.TCP, Protocol.UDP)
by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)


@by_protocol
@pytest.mark.parametrize("answered", [True, False], ids=["answered", "unanswered"])
def test_the_second_flow_gets_another_port_and_both_get_their_answers(
    node: PacketNode, net: Net, protocol: Protocol, answered: bool
) -> None:
    web = Service(net, protocol, local=net.local[:1])
    node.serve(web)
    first = talks_to(node, web, frontend=web.node_port)
    if answered:
        first.opens()
    else:
        first.says("S")
    second = talks_to(node, web, frontend=web.external_ip)
    second.opens()
    assert first.seen_as == net.client
    assert second.seen_as.address == net.client.address
    assert second.seen_as.port not in {0, net.client.port}
    assert node.counted("REPORTED") == 1
    if not answered:
        assert first.is_home(first.answers("SA"))
    for _ in range(3):
        assert first.lives()
        assert second.lives()
        node.later(1)
    assert second.seen_as.port != net.client.port


@by_protocol
def test_every_frontend_may_be_dialled_from_one_port(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    web = Service(net, protocol, local=net.local[:1])
    other = replace(web, number=1)
    node.serve(web, other)
    talks = [
        talks_to(node, service, frontend=service.frontend(kind))
        for service in (web, other)
        for kind in FrontendKind
    ]
    for talk in talks:
        talk.opens()
    assert len({talk.seen_as for talk in talks}) == len(talks)
    assert all(talk.lives() for talk in talks)


def test_a_retransmitted_syn_keeps_the_port_that_it_was_given(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talks_to(node, web).opens()
    second = talks_to(node, web, frontend=web.cluster_ip)
    assert len({second.says("S").source for _ in range(5)}) == 1


def test_who_dials_the_backend_itself_is_not_confused_with_the_service(
    node: PacketNode, net: Net
) -> None:
    """A pod may dial both from one port: what nobody translated keeps its tuple."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    assert node.receives(tcp(net.client, net.local[0])).unchanged
    talk = talks_to(node, web)
    talk.opens()
    assert talk.lives()


def test_a_port_is_free_again_when_its_flow_is_over(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    first = talks_to(node, web)
    first.opens()
    first.says("FA")
    first.answers("FA")
    first.says("A")
    node.later(310)
    second = talks_to(node, web, frontend=web.cluster_ip)
    second.opens()
    assert second.seen_as == net.client
    assert second.lives()


def test_a_flow_whose_backend_is_silent_keeps_its_port(node: PacketNode, net: Net) -> None:
    """The client sends, the backend hears: the way back is idle, and still not free."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    first = talks_to(node, dns)
    first.opens()
    assert first.lives()
    for _ in range(3):
        node.later(80)
        first.says()
    second = talks_to(node, dns, frontend=dns.cluster_ip)
    second.opens()
    assert second.seen_as.port != net.client.port
    assert first.is_home(first.answers())
    assert second.lives()


@by_protocol
def test_a_flow_of_its_own_past_is_no_collision(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """The forward half was evicted: the client goes on with the port that the backend knows."""
    web = Service(net, protocol, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.opens()
    node.forget(node.half("forward"))
    talk.says("S")
    assert talk.seen_as == net.client
    assert node.counted("REPORTED") == 0
    assert talk.is_home(talk.answers("SA"))


@by_protocol
def test_no_answer_ever_goes_to_another_conversation(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """Few ports, many frontends, one backend, in any order: each answer comes home."""
    rng = random.Random(5)
    web = Service(net, protocol, local=net.local[:1])
    other = replace(web, number=1)
    node.serve(web, other)
    frontends = [one.frontend(kind) for one in (web, other) for kind in FrontendKind]
    talks: dict[tuple[End, End], Talk] = {}
    for _ in range(300):
        client = net.client.at(40000 + rng.randrange(6))
        frontend = rng.choice(frontends)
        talk = talks.get((client, frontend))
        if talk is None:
            talk = Talk(node, client, frontend, MAKES[protocol])
            talk.opens()
            talks[client, frontend] = talk
        else:
            assert talk.lives()
    seen = [(talk.seen_as, talk.backend) for talk in talks.values()]
    assert len(set(seen)) == len(seen)
    assert all(talk.lives() for talk in talks.values())
