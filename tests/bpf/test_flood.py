"""A flood of first packets, with answers or without, costs no flow of those who talk (K11)."""

from __future__ import annotations

import pytest

from ebpflb.model import Protocol
from tests.bpf.node import SIZES, PacketNode, Service
from tests.bpf.packets import Net
from tests.bpf.talks import MAKES, talks_to

FLOWS = 50
FLOOD = 10 * SIZES["flows_new"]


def _flood(template: bytes, net: Net, *, source: bool) -> list[bytes]:
    """The packet from, or to, as many other ends; its checksums are not right any more."""
    at = 14 + (8 if net.family == 6 else 12) if source else 14 + (24 if net.family == 6 else 16)
    last = at + (16 if net.family == 6 else 4)
    ports = 14 + (40 if net.family == 6 else 20) + (0 if source else 2)
    packets = []
    for number in range(FLOOD):
        packet = bytearray(template)
        packet[last - 2 : last] = (number // 60000 + 0x0A00).to_bytes(2)
        packet[ports : ports + 2] = (1024 + number % 60000).to_bytes(2)
        packets.append(bytes(packet))
    return packets


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=lambda one: one.name)
@pytest.mark.parametrize("answered", [False, True], ids=["unanswered", "answered"])
def test_a_flood_of_ten_times_the_table_leaves_idle_flows_alone(
    node: PacketNode, net: Net, protocol: Protocol, answered: bool
) -> None:
    web = Service(net, protocol, local=net.local[:1])
    node.serve(web)
    talks = [
        talks_to(node, web, net.client_number(10 + number // 10).at(40000 + number))
        for number in range(FLOWS)
    ]
    for talk in talks:
        talk.opens()
        assert talk.lives()

    make = MAKES[protocol]
    syns = _flood(bytes(make(net.stranger, web.node_port, "S")), net, source=True)
    answers = _flood(bytes(make(net.local[0], net.stranger, "SA")), net, source=False)
    assert set(node.run_many("ebpflb_ingress", syns[:1])) == {-1}
    for start in range(0, FLOOD, 500):
        part = slice(start, start + 500)
        assert set(node.run_many("ebpflb_ingress", syns[part], came_in="uplink")) == {-1}
        if answered:
            node.run_many("ebpflb_egress", answers[part], came_in="pod2")

    assert len(node.flows("conntrack")) == 2 * FLOWS
    assert all(talk.lives() for talk in talks)
    assert talks_to(node, web).opens() == net.local[0]
