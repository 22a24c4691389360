"""SCTP: its own checksum, and its own words for the beginning and the end of a flow."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from scapy.layers.inet import IP
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from ebpflb.model import Family, Protocol
from tests.bpf.node import Fate, Out, PacketNode, Service
from tests.bpf.packets import End, Net, ends_of, fragments, frame, reassembled
from tests.bpf.sctp import CRC, associates, crc32c, ending_for, make_sctp
from tests.bpf.talks import Talk
from tests.bpf.wire import Wire

DATA = 0
SHORTEST = 16
"""The common header, and the head of a chunk."""

IP_LENGTH = {Family.IPV4: 20, Family.IPV6: 40}
LENGTHS = [range(SHORTEST, 200), range(200, 1501, 7)]


def service(net: Net, *, number: int = 0, port: int = 8080) -> Service:
    return Service(net, Protocol.SCTP, number=number, local=(net.local[0].at(port),))


def talk_to(node: PacketNode, frontend: End, client: End) -> Talk:
    return Talk(node, client, frontend, make_sctp)


def with_crc(packet: bytes) -> bytes:
    return packet[: CRC.start] + crc32c(packet) + packet[CRC.stop :]


def raw(source: End, target: End, length: int, *, rng: random.Random) -> bytes:
    """An SCTP packet of so many bytes: a DATA chunk of anything."""
    head = source.port.to_bytes(2) + target.port.to_bytes(2) + rng.randbytes(4) + bytes(4)
    return with_crc((head + bytes([DATA]) + rng.randbytes(length))[:length])


def framed(source: End, target: End, sctp: bytes) -> Packet:
    packet = frame(source.address, target.address, Raw(sctp))
    ip = packet.payload
    if isinstance(ip, IP):
        ip.proto = Protocol.SCTP
    else:
        ip.nh = Protocol.SCTP
    return Ether(bytes(packet))


def sctp_of(packet: Packet) -> bytes:
    ip = packet.payload
    return bytes(ip.payload)[: ip.len - 20 if isinstance(ip, IP) else ip.plen]


def ports_of(sctp: bytes) -> tuple[int, int]:
    return int.from_bytes(sctp[:2]), int.from_bytes(sctp[2:4])


def test_the_crc_that_all_others_are_compared_with_is_the_right_one() -> None:
    """The check value that every catalogue of CRCs has for CRC-32C (RFC 3720, B.4)."""
    data = b"\x00" * 8 + bytes(4) + b"\x00" * 20
    assert crc32c(data) == bytes.fromhex("aa36918a")
    assert with_crc(data[:28] + ending_for(data[:28], 0))[CRC] == bytes(4)


# --- the CRC -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_a_packet_of_any_length_has_the_right_crc_both_ways(
    node: PacketNode, net: Net, lengths: range
) -> None:
    rng = random.Random(lengths.start)
    web = service(net)
    node.serve(web)
    associates(talk_to(node, web.node_port, net.client))
    for length in lengths:
        asked = framed(net.client, web.node_port, raw(net.client, web.node_port, length, rng=rng))
        there = sctp_of(node.receives(asked, checks=False).packet)
        assert ports_of(there) == (net.client.port, 8080)
        assert there == with_crc(there), length
        assert there[4:8] == sctp_of(asked)[4:8]
        assert there[12:] == sctp_of(asked)[12:]
        answer = framed(net.local[0], net.client, raw(net.local[0], net.client, length, rng=rng))
        home = sctp_of(node.sends(answer, checks=False).packet)
        assert ports_of(home) == (web.node_port.port, net.client.port)
        assert home == with_crc(home), length
        assert home[12:] == sctp_of(answer)[12:]


@pytest.mark.parametrize("length", [9000, 32767, 32768, 65000])
def test_a_jumbo_packet_has_the_right_crc(
    node: PacketNode, net: Net, wire: Wire, length: int
) -> None:
    web = service(net)
    node.serve(web)
    associates(talk_to(node, web.node_port, net.client))
    packet = raw(net.local[0], net.client, length, rng=random.Random(length))
    data, _ = wire.leaves(
        node.programs["ebpflb_egress"], bytes(framed(net.local[0], net.client, packet))
    )
    home = sctp_of(Ether(data))
    assert ports_of(home) == (web.node_port.port, net.client.port)
    assert home == with_crc(home)


def test_any_ports_lead_to_the_right_crc(node: PacketNode, net: Net) -> None:
    rng = random.Random(8)
    for _ in range(40):
        client = net.client.at(rng.randrange(1, 65536))
        web = service(net, port=rng.randrange(1, 65536))
        node.serve(web)
        talk = talk_to(node, web.cluster_ip, client)
        assert associates(talk) == web.local[0]
        node.remove(web)


def test_with_other_ports_on_both_sides_the_crc_is_right(node: PacketNode, net: Net) -> None:
    """Two frontends of one backend dialled from one port (L-38): the source port changes too."""
    web = service(net)
    node.serve(web)
    first, second = (talk_to(node, one, net.client) for one in (web.node_port, web.cluster_ip))
    for talk in (first, second):
        associates(talk)
    assert second.seen_as.port != net.client.port
    for talk in (first, second):
        talk.says("DATA")
        assert talk.is_home(talk.answers("DATA"))


def test_where_no_port_changes_the_crc_does_not(node: PacketNode, net: Net) -> None:
    """It is of the SCTP packet alone: addresses have no part in it, a wrong one stays wrong."""
    web = service(net, port=80)
    node.serve(web)
    associates(talk_to(node, web.cluster_ip, net.client))
    packet = bytearray(raw(net.client, web.cluster_ip, 64, rng=random.Random(1)))
    packet[20] ^= 1
    out = node.receives(framed(net.client, web.cluster_ip, bytes(packet)), checks=False)
    assert out.target == web.local[0]
    assert sctp_of(out.packet) == bytes(packet)


def test_a_wrong_crc_stays_wrong(node: PacketNode, net: Net) -> None:
    """The backend is to notice what the network spoilt: no CRC is made anew."""
    web = service(net)
    node.serve(web)
    associates(talk_to(node, web.node_port, net.client))
    rng = random.Random(2)
    for _ in range(50):
        packet = bytearray(raw(net.client, web.node_port, 64, rng=rng))
        packet[rng.randrange(12, 64)] ^= 1 << rng.randrange(8)
        out = node.receives(framed(net.client, web.node_port, bytes(packet)), checks=False)
        there = sctp_of(out.packet)
        assert ports_of(there)[1] == 8080
        assert there != with_crc(there)


@pytest.mark.parametrize("sums_up", [True, False], ids=["summed up", "not summed up"])
def test_a_crc_of_zero_is_a_crc(node: PacketNode, net: Net, sums_up: bool) -> None:
    """It looks as if it were still to be filled in."""
    if sums_up and not node.sums_up:
        pytest.skip("kernel lacks BPF_F_TEST_SKB_CHECKSUM_COMPLETE (6.16)")
    web = service(net)
    node.serve(web)
    associates(talk_to(node, web.node_port, net.client))
    packet = raw(net.client, web.node_port, 60, rng=random.Random(3))
    packet = with_crc(packet + ending_for(packet, 0))
    assert packet[CRC] == bytes(4)
    out = node.receives(framed(net.client, web.node_port, packet), sums_up=sums_up)
    assert ports_of(sctp_of(out.packet)) == (net.client.port, 8080)
    assert sctp_of(out.packet)[CRC] != bytes(4)
    # And it may become zero.
    packet = raw(net.client, web.local[0], 60, rng=random.Random(4))
    wanted = with_crc(packet + ending_for(packet, 0))
    packet = with_crc(packet[:2] + web.node_port.port.to_bytes(2) + wanted[4:])
    out = node.receives(framed(net.client, web.node_port, packet), sums_up=sums_up)
    assert sctp_of(out.packet) == wanted


def test_a_crc_that_is_still_to_be_filled_in_stays_empty(
    node: PacketNode, net: Net, wire: Wire
) -> None:
    """Who fills it in sums up the field as well, so it must be zero then."""
    web = service(net)
    node.serve(web)
    associates(talk_to(node, web.node_port, net.client))
    packet = raw(net.local[0], net.client, 64, rng=random.Random(5))
    packet = packet[: CRC.start] + bytes(4) + packet[CRC.stop :]
    data, unfinished = wire.leaves(
        node.programs["ebpflb_egress"],
        bytes(framed(net.local[0], net.client, packet)),
        sum_from=14 + IP_LENGTH[net.family],
        field=CRC.start,
    )
    out = Ether(data)
    assert unfinished
    assert ends_of(out)[0].address == web.node_port.address
    assert ports_of(sctp_of(out)) == (web.node_port.port, net.client.port)
    assert sctp_of(out)[4:] == packet[4:]


def test_bytes_behind_the_packet_are_no_part_of_it(node: PacketNode) -> None:
    """Ethernet's shortest frame."""
    net = Net(Family.IPV4)
    web = service(net)
    node.serve(web)
    associates(talk_to(node, web.node_port, net.client))
    packet = framed(
        net.client, web.node_port, raw(net.client, web.node_port, 17, rng=random.Random(6))
    )
    out = node.receives(Ether(bytes(packet) + b"\xee" * 9), checks=False)
    assert ports_of(sctp_of(out.packet)) == (net.client.port, 8080)
    assert sctp_of(out.packet) == with_crc(sctp_of(out.packet))
    assert bytes(out.packet)[-9:] == b"\xee" * 9


@pytest.mark.parametrize("length", range(SHORTEST))
def test_a_packet_without_a_chunk_is_left_alone(node: PacketNode, net: Net, length: int) -> None:
    web = service(net)
    node.serve(web)
    associates(talk_to(node, web.node_port, net.client))
    packet = raw(net.client, web.node_port, SHORTEST, rng=random.Random(7))[:length]
    assert node.receives(framed(net.client, web.node_port, packet), checks=False).unchanged


# --- fragments ---------------------------------------------------------------------------------


def test_fragments_keep_their_crc_where_no_port_changes(node: PacketNode, net: Net) -> None:
    web = service(net, port=80)
    node.serve(web)
    associates(talk_to(node, web.cluster_ip, net.client))
    packet = framed(
        net.client, web.cluster_ip, raw(net.client, web.cluster_ip, 1400, rng=random.Random(9))
    )
    outs = [node.receives(part) for part in fragments(packet)]
    assert all(out.passed for out in outs)
    assert sctp_of(reassembled([out.packet for out in outs])) == sctp_of(packet)


def test_fragments_of_other_ports_cannot_be_mended(node: PacketNode, net: Net) -> None:
    """The CRC is in the first and of all of them. What cannot be right does not go on; what belongs
    to it is not spoilt."""
    web = service(net)
    node.serve(web)
    associates(talk_to(node, web.node_port, net.client))
    packet = framed(
        net.client, web.node_port, raw(net.client, web.node_port, 1400, rng=random.Random(9))
    )
    head, *others = fragments(packet)
    assert node.receives(head).dropped
    assert node.counted("DROPPED_UNWRITABLE") == 1
    for part in others:
        out = node.receives(part)
        assert out.target.address == web.local[0].address
        assert bytes(out.packet)[-8:] == bytes(part)[-8:]
        assert out.packet[Raw] == out.was[Raw]


# --- associations ------------------------------------------------------------------------------


def test_an_association_lives_from_its_first_word_to_its_last(node: PacketNode, net: Net) -> None:
    web = service(net)
    node.serve(web)
    talk = talk_to(node, web.node_port, net.client)
    associates(talk)
    words: list[tuple[Callable[[str], Out], str]] = [
        (talk.says, "DATA"),
        (talk.answers, "DATA"),
        (talk.says, "SHUTDOWN"),
        (talk.answers, "SHUTDOWN ACK"),
        (talk.says, "SHUTDOWN COMPLETE"),
    ]
    for way, what in words:
        out = way(what)
        assert talk.is_home(out) if way == talk.answers else talk.backend == web.local[0], what
    assert {flow.protocol for flow in node.flows()} == {Protocol.SCTP}


@pytest.mark.parametrize("what", ["DATA", "ABORT", "INIT ACK", "COOKIE ECHO", "SHUTDOWN"])
def test_what_does_not_begin_an_association_is_left_alone(
    node: PacketNode, net: Net, what: str
) -> None:
    """L-33: it is of one that began before us."""
    web = service(net)
    node.serve(web)
    assert node.receives(make_sctp(net.client, web.node_port, what)).unchanged
    assert not node.flows()


def test_an_aborted_association_is_over(node: PacketNode, net: Net) -> None:
    """What begins from the same port after it is given a backend anew."""
    web = service(net)
    node.serve(web)
    talk = talk_to(node, web.node_port, net.client)
    associates(talk)
    talk.says("ABORT")
    moved = Service(net, Protocol.SCTP, local=(net.local[1],))
    node.serve(moved)
    talk.says(packet=make_sctp(net.client, web.node_port, "INIT", tag=77))
    assert talk.backend == net.local[1]


def test_the_nodes_own_associations_are_sent_on(node: PacketNode, net: Net) -> None:
    """K8: no socket program sees them."""
    web = Service(net, Protocol.SCTP, remote=(net.remote[0],))
    node.serve(web)
    talk = Talk(node, net.node, web.cluster_ip, make_sctp, own=True)
    assert talk.says("INIT").fate is Fate.REDIRECTED
    assert talk.backend == net.remote[0]
    assert talk.is_home(talk.answers("INIT ACK"))
