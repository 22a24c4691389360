# SPDX-License-Identifier: Apache-2.0
"""The programs and the agent agree on when a flow is over, and a packet wins over the agent."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest

from ebpflb.datapath.ebpf import flows
from ebpflb.datapath.ebpf.expiry import Expiry, Looker
from ebpflb.datapath.ebpf.flows import FLOW, FLOW_KEY, Reason
from ebpflb.datapath.ebpf.maps import FLOW_TABLES, Map
from ebpflb.lab import wait_until
from ebpflb.model import Protocol
from tests.bpf.node import PacketNode, Service
from tests.bpf.packets import Net
from tests.bpf.talks import Talk, talks_to

ALL = (Protocol.TCP, Protocol.UDP)


def look(node: PacketNode) -> dict[Reason, int]:
    """What one look takes out."""
    return dict(
        Looker([node.maps[name] for name in FLOW_TABLES], node.maps["settings"]).look().ended
    )


def serve(node: PacketNode, net: Net, protocol: Protocol = Protocol.TCP) -> Service:
    one = Service(net, protocol, local=net.local[:1])
    node.serve(one)
    return one


@pytest.mark.parametrize("protocol", ALL, ids=lambda one: one.name)
def test_both_halves_are_found_and_checked_as_the_programs_do(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    web = serve(node, net, protocol)
    for number in range(20):
        talks_to(node, web, net.client.at(40000 + number)).opens()
    halves = {key: value for name in FLOW_TABLES for key, value in node.maps[name].items()}
    assert len(halves) == 2 * 20
    for key, value in halves.items():
        ends, half = FLOW_KEY.unpack(key), FLOW.unpack(value)
        assert flows.check(key) == half.check_head == half.check_tail
        assert flows.is_other(ends, half, FLOW.unpack(halves[flows.other_key(ends, half)]))


def says(*what: str) -> Callable[[Talk], None]:
    """Packets after the beginning: those in capitals are the client's, the others' answers."""

    def go(talk: Talk) -> None:
        for word in what:
            (talk.says if word.isupper() else talk.answers)(word.upper())

    return go


@pytest.mark.parametrize(
    ("protocol", "goes_on", "after_s", "reason"),
    [
        pytest.param(Protocol.TCP, says(), 600, Reason.IDLE, id="an open connection (CT-21)"),
        pytest.param(
            Protocol.TCP, says("PA", "fa"), 300, Reason.HALF_CLOSED, id="closed by one end (CT-21)"
        ),
        pytest.param(
            Protocol.TCP, says("PA", "fa", "FA", "a"), 120, Reason.CLOSED, id="closed by both"
        ),
        pytest.param(Protocol.TCP, says("PA", "ra"), 10, Reason.RESET, id="reset"),
        pytest.param(Protocol.UDP, says(""), 120, Reason.IDLE, id="a conversation of UDP"),
    ],
)
def test_a_flow_is_over_for_the_agent_when_it_is_for_the_programs(
    node: PacketNode,
    net: Net,
    protocol: Protocol,
    *,
    goes_on: Callable[[Talk], None],
    after_s: int,
    reason: Reason,
) -> None:
    talk = talks_to(node, serve(node, net, protocol))
    talk.opens()
    goes_on(talk)
    node.later(after_s - 5)
    assert look(node) == {}
    assert len(node.flows()) == 2
    node.later(10)
    assert look(node) == {reason: 1}
    assert node.flows() == []


@pytest.mark.parametrize(
    ("protocol", "after_s"),
    [(Protocol.TCP, 120), (Protocol.UDP, 30)],
    ids=lambda one: one.name if isinstance(one, Protocol) else "",
)
def test_what_nobody_answers_goes_sooner(
    node: PacketNode, net: Net, protocol: Protocol, after_s: int
) -> None:
    talk = talks_to(node, serve(node, net, protocol))
    talk.says("S")
    node.later(after_s - 5)
    assert look(node) == {}
    node.later(10)
    assert look(node) == {Reason.UNANSWERED: 1}
    assert node.flows() == []


def test_among_many_only_those_go_that_are_over(node: PacketNode, net: Net) -> None:
    web = serve(node, net, Protocol.UDP)
    old = [talks_to(node, web, net.client.at(20000 + number)) for number in range(500)]
    for talk in old:
        talk.opens()
    node.later(200)
    young = [talks_to(node, web, net.client.at(40000 + number)) for number in range(100)]
    for talk in young:
        talk.opens()
    assert look(node) == {Reason.IDLE: len(old)}
    assert {flow.source.port for flow in node.flows() if flow.kind == "forward"} == {
        talk.client.port for talk in young
    }
    assert all(talk.lives() for talk in young)


class Interrupted:
    """A flow table in which something happens before an entry is taken out."""

    def __init__(self, one: Map, happens: Callable[[], object]) -> None:
        self.name = one.name
        self.max_entries = one.max_entries
        self.batches = one.batches
        self.lookup = one.lookup
        self.insert = one.insert
        self._take = one.take
        self._happens = happens

    def take(self, key: bytes) -> bytes | None:
        self._happens()
        return self._take(key)


@pytest.mark.parametrize("who", ["client", "backend"])
@pytest.mark.parametrize("moment", [1, 2])
def test_a_connection_that_is_used_when_it_is_taken_out_stays(
    node: PacketNode, net: Net, who: str, moment: int
) -> None:
    talk = talks_to(node, serve(node, net))
    talk.opens()
    node.later(700)
    moments: Iterator[int] = iter(range(1, 100))

    def packet() -> None:
        if next(moments) == moment:
            out = talk.says("PA") if who == "client" else talk.answers("PA")
            assert out.passed

    tables = [Interrupted(node.maps["conntrack"], packet)]
    ended = Looker(tables, node.maps["settings"]).look().ended
    if (who, moment) == ("backend", 2):
        assert ended == {Reason.IDLE: 1}, (
            "its half has gone, and the packet comes a moment too late"
        )
        return
    assert ended == {}
    assert talk.lives()


def test_the_thread_looks_when_asked_and_ends(node: PacketNode, net: Net) -> None:
    web = serve(node, net, Protocol.UDP)
    for number in range(10):
        talks_to(node, web, net.client.at(40000 + number)).opens()
    with contextlib.closing(Expiry(node.maps)) as expiry:
        expiry.start()
        wait_until(
            lambda: sum(used for used, _ in expiry.occupancy().values()) == 20,
            what="it has looked",
        )
        assert expiry.counts().states["new"] + expiry.counts().states["open"] == 10
        assert expiry.occupancy().keys() == set(FLOW_TABLES)
        node.later(200)
        expiry.request()
        wait_until(lambda: expiry.counts().expired["idle"] == 10, what="it has looked again")
        assert node.flows() == []
    assert "expiry" not in {thread.name for thread in threading.enumerate()}


def test_a_thread_that_never_began_can_be_ended(node: PacketNode) -> None:
    Expiry(node.maps).close()
