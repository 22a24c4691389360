"""What a SYN means for a flow that is there already, and what never moves a living one (L-39)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.bpf.node import Out, PacketNode, Service
from tests.bpf.packets import Net, tcp
from tests.bpf.talks import Talk, talks_to


def moved_service(node: PacketNode, net: Net) -> tuple[Service, Talk]:
    """An open connection to the first backend; new ones go to the second."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.opens()
    node.serve(replace(web, local=net.local[1:]))
    return web, talk


def new_syn(talk: Talk, isn: int = 9000) -> Out:
    """The client's port is used again."""
    return talk.says("S", tcp(talk.client, talk.frontend, isn=isn))


def is_anew(node: PacketNode, net: Net, talk: Talk) -> bool:
    """Whether a SYN begins a new flow, whole: to another backend, and nothing is left over."""
    out = new_syn(talk)
    if out.target != net.local[1]:
        assert out.target == net.local[0]
        return False
    assert talk.is_home(talk.answers("SA"))
    assert talk.lives()
    assert len([flow for flow in node.flows() if flow.kind == "forward"]) == 1
    reverse = [flow for flow in node.flows() if flow.kind == "reverse"]
    assert {flow.source for flow in reverse} <= {*net.local}
    return True


def test_an_unanswered_syn_with_the_same_number_is_a_retransmission(
    node: PacketNode, net: Net
) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.says("S")
    node.serve(replace(web, local=net.local[1:]))
    assert talk.says("S").target == net.local[0]


def test_an_unanswered_syn_with_another_number_chooses_anew(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.says("S")
    node.serve(replace(web, local=net.local[1:]))
    assert new_syn(talk).target == net.local[1]
    assert len(node.flows()) == 2  # the old reverse half is gone
    assert talk.is_home(talk.answers("SA"))
    assert talk.lives()


def test_a_syn_does_not_move_a_living_connection(node: PacketNode, net: Net) -> None:
    """Whoever can guess the ports may have sent it."""
    _, talk = moved_service(node, net)
    for isn in range(2000, 2010):
        assert new_syn(talk, isn).target == net.local[0]
        assert talk.lives()
        node.later(2)


@pytest.mark.parametrize("flags", ["S", "SE", "SEC"])
def test_a_syn_may_carry_ecn_bits(node: PacketNode, net: Net, flags: str) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    assert node.receives(tcp(net.client, web.node_port, flags)).target == net.local[0]


def test_a_client_may_finish_with_its_first_packet_after_the_answer(
    node: PacketNode, net: Net
) -> None:
    """That packet moves the flow to another table, and says that it is over."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.says("S")
    talk.answers("SA")
    talk.says("FA")
    talk.answers("FA")
    node.serve(replace(web, local=net.local[1:]))
    assert is_anew(node, net, talk)


def test_a_backend_may_finish_before_the_client_has_said_a_word(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.says("S")
    talk.answers("SA")
    talk.answers("FA")
    talk.says("A")
    talk.says("FA")
    node.serve(replace(web, local=net.local[1:]))
    assert is_anew(node, net, talk)


CLOSINGS: dict[str, Callable[[Talk], object]] = {
    "both sides have finished": lambda talk: (talk.says("FA"), talk.answers("FA")),
    "both have finished, the backend first": lambda talk: (talk.answers("FA"), talk.says("FA")),
    "the client has reset it": lambda talk: talk.says("R"),
    "the backend has reset it": lambda talk: talk.answers("R"),
    "both finished and acknowledged": lambda talk: (
        talk.says("FA"),
        talk.answers("FA"),
        talk.says("A"),
    ),
}


@pytest.mark.parametrize("closing", CLOSINGS)
def test_a_syn_chooses_anew_where(node: PacketNode, net: Net, closing: str) -> None:
    _, talk = moved_service(node, net)
    CLOSINGS[closing](talk)
    assert is_anew(node, net, talk)


@pytest.mark.parametrize("who", ["client", "backend"])
def test_a_syn_does_not_move_a_half_closed_connection(node: PacketNode, net: Net, who: str) -> None:
    _, talk = moved_service(node, net)
    if who == "client":
        talk.says("FA")
    else:
        talk.answers("FA")
    assert not is_anew(node, net, talk)
    assert talk.lives()


def test_the_last_packets_of_a_connection_still_go_through(node: PacketNode, net: Net) -> None:
    _, talk = moved_service(node, net)
    assert talk.says("FA").target == net.local[0]
    assert talk.is_home(talk.answers("A"))
    assert talk.is_home(talk.answers("FA"))
    assert talk.says("A").target == net.local[0]


@pytest.mark.parametrize("who", ["client", "backend"])
def test_a_reset_that_the_connection_survives_is_forgotten(
    node: PacketNode, net: Net, who: str
) -> None:
    """It was forged: the same side goes on."""
    _, talk = moved_service(node, net)
    if who == "client":
        talk.says("R")
        talk.says("PA")
    else:
        talk.answers("R")
        talk.answers("PA")
    assert not is_anew(node, net, talk)
    assert talk.lives()


@pytest.mark.parametrize(("idle_s", "over"), [(590, False), (610, True)])
def test_a_connection_is_over_when_it_is_idle_for_longer_than_the_setting(
    node: PacketNode, net: Net, idle_s: int, over: bool
) -> None:
    _, talk = moved_service(node, net)
    node.later(idle_s)
    assert is_anew(node, net, talk) is over


@pytest.mark.parametrize("who", ["client", "backend"])
@pytest.mark.parametrize(("idle_s", "over"), [(290, False), (310, True)])
def test_a_half_closed_connection_has_a_timeout_of_its_own(
    node: PacketNode, net: Net, who: str, idle_s: int, over: bool
) -> None:
    _, talk = moved_service(node, net)
    if who == "client":
        talk.says("FA")
    else:
        talk.answers("FA")
    node.later(idle_s)
    assert is_anew(node, net, talk) is over


@pytest.mark.parametrize("way", ["both", "the client's", "the backend's"])
def test_packets_of_either_way_keep_a_connection(node: PacketNode, net: Net, way: str) -> None:
    _, talk = moved_service(node, net)
    for _ in range(3):
        node.later(400)
        if way != "the backend's":
            talk.says("A")
        if way != "the client's":
            talk.answers("A")
    node.later(400)
    assert not is_anew(node, net, talk)


def test_a_connection_without_its_reverse_half_is_over(node: PacketNode, net: Net) -> None:
    _, talk = moved_service(node, net)
    node.forget(node.half("reverse"))
    assert is_anew(node, net, talk)


def test_a_backend_that_answers_no_syn_for_a_while_is_dead(node: PacketNode, net: Net) -> None:
    """A client that uses its port again must not meet a dead backend for hours."""
    _, talk = moved_service(node, net)
    node.later(10)
    assert new_syn(talk).target == net.local[0]
    node.later(0.5)
    assert new_syn(talk).target == net.local[0]
    node.later(0.5)
    assert is_anew(node, net, talk)


def test_a_backend_that_answers_the_syn_is_alive(node: PacketNode, net: Net) -> None:
    """It answers with a challenge ACK (RFC 5961)."""
    _, talk = moved_service(node, net)
    for _ in range(3):
        node.later(10)
        assert new_syn(talk).target == net.local[0]
        assert talk.is_home(talk.answers("A"))
        node.later(1)
    assert not is_anew(node, net, talk)


def test_a_refused_connection_is_over(node: PacketNode, net: Net) -> None:
    """The port is closed: RST for a SYN, from the frontend, and the next SYN is a new flow."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.says("S")
    assert talk.is_home(talk.answers("RA"))
    node.serve(replace(web, local=net.local[1:]))
    assert is_anew(node, net, talk)


def test_an_open_connection_goes_on_whatever_becomes_of_the_service(
    node: PacketNode, net: Net
) -> None:
    """CT-06, NOEP-11: backends gone, none at all, the Service deleted."""
    web, talk = moved_service(node, net)
    assert talk.lives()
    node.serve(replace(web, local=()))
    node.later(1)
    assert talk.lives()
    node.remove(web)
    node.later(1)
    assert talk.lives()


def test_a_new_syn_of_a_deleted_services_flow_goes_untouched(node: PacketNode, net: Net) -> None:
    web, talk = moved_service(node, net)
    talk.says("R")
    node.remove(web)
    assert new_syn(talk).unchanged


def test_syns_that_come_faster_than_they_are_answered_move_nobody(
    node: PacketNode, net: Net
) -> None:
    """A backend answers those of an open connection twice a second at most."""
    _, talk = moved_service(node, net)
    node.later(5)
    assert new_syn(talk, 2000).target == net.local[0]
    talk.answers("A")
    node.later(0.1)
    assert new_syn(talk, 2001).target == net.local[0]
    node.later(1)
    assert new_syn(talk, 2002).target == net.local[0]


def test_a_cluster_ip_that_was_given_to_another_service_leads_there(
    node: PacketNode, net: Net
) -> None:
    """B-81: also a client whose connection to the first one is still open."""
    old = Service(net, local=net.local[:1])
    node.serve(old)
    talk = Talk(node, net.pod, old.cluster_ip, on="pod")
    talk.opens()
    node.remove(old)
    node.serve(replace(old, local=net.local[1:]))
    assert new_syn(talk).target == net.local[1]


def test_what_is_left_of_an_old_flow_does_not_take_a_new_one(node: PacketNode, net: Net) -> None:
    """The LRU took its forward half, the client has begun anew, and the old backend sends again."""
    _, talk = moved_service(node, net)
    old, seen_as = talk.backend, talk.seen_as
    node.forget(node.half("forward"))
    assert new_syn(talk).target == net.local[1]
    assert talk.is_home(talk.answers("SA"))
    node.later(1)
    node.sends(tcp(old, seen_as, "PA"), came_in="pod2")
    assert talk.says("A").target == net.local[1]
