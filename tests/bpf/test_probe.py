"""The agent's own packet, by which it sees that the hooks run: noted, and never passed on.

What leaves comes back in at the same device, so that one packet proves both hooks.
"""

from __future__ import annotations

import struct

import pytest

from ebpflb.datapath.ebpf.encode import PROBE_ADDRESSES, PROBE_PORT
from ebpflb.model import format_address
from tests.bpf.node import PacketNode
from tests.bpf.packets import End, Net, udp

NUMBER = 0x0123456789ABCDEF


def probe(net: Net, number: int = NUMBER) -> tuple[End, End, bytes]:
    there = End(format_address(PROBE_ADDRESSES[net.family]), PROBE_PORT)
    return net.client, there, struct.pack("=Q", number)


@pytest.mark.parametrize("hook", ["INGRESS", "EGRESS"])
def test_a_hook_notes_the_probe_that_is_expected_and_keeps_it(
    node: PacketNode, net: Net, hook: str
) -> None:
    run = node.receives if hook == "INGRESS" else node.sends_own
    node.expects_probe(hook, NUMBER)
    out = run(udp(*probe(net)))
    assert out.dropped if hook == "INGRESS" else out.redirected
    seen = node.probes(hook)
    assert (seen.socket, seen.netns, seen.runs) == (NUMBER, node.index["uplink"], 1)
    assert not run(udp(*probe(net)), "pod").passed
    assert (node.probes(hook).netns, node.probes(hook).runs) == (node.index["pod"], 2)


@pytest.mark.parametrize("hook", ["INGRESS", "EGRESS"])
def test_anybody_elses_probe_is_not_noted(node: PacketNode, net: Net, hook: str) -> None:
    run = node.receives if hook == "INGRESS" else node.sends_own
    node.expects_probe(hook, NUMBER)
    assert run(udp(*probe(net, NUMBER + 1))).dropped
    client, there, _ = probe(net)
    assert run(udp(client, there, b"short")).dropped
    assert node.probes(hook).runs == 0
