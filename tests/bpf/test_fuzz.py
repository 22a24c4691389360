"""Broken and random packets: nothing crashes, and nothing is changed but what a Service needs.

What is written of a TCP, UDP or SCTP packet is its addresses, its ports and two checksums; every
other byte stays, and no packet gets longer or shorter. Of ICMP more may change; its length may not.
"""

from __future__ import annotations

import errno
from itertools import cycle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6EchoRequest,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrHopByHop,
)
from scapy.layers.sctp import SCTP, SCTPChunkInit
from scapy.packet import Packet, Raw

from ebpflb.errors import DatapathError
from ebpflb.model import Family, Protocol
from tests.bpf.node import Fate, PacketNode, Service
from tests.bpf.packets import Net, fragments, frame, tagged, tcp, udp, without_ethernet

PROGRAMS = ("ebpflb_ingress", "ebpflb_egress", "ebpflb_in_l3", "ebpflb_out_l3")

fuzz = settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def run(node: PacketNode, program: str, data: bytes, *, own: bool = False) -> tuple[Fate, bytes]:
    """What comes out; what the kernel does not take is as if it had been left alone.

    It refuses frames that say IP and are shorter than its header.
    """
    try:
        result = node.run_raw(
            program,
            data,
            came_in="" if own else "pod",
            checksum_complete=node.sums_up and not program.endswith("l3"),
        )
    except DatapathError as error:
        if error.errno != errno.EINVAL:
            raise
        return Fate.PASSED, data
    if Fate(result.verdict) is Fate.PASSED and result.packet == data:
        assert result.mark in {0, 0x2000}, hex(result.mark)
    return Fate(result.verdict), result.packet


def may_change(data: bytes, at: int) -> set[int] | None:
    """The bytes of a packet, whose IP header begins ``at``, that may be written; None: any."""
    if data[at] >> 4 == 4:
        l4, protocol = at + (data[at] & 15) * 4, data[at + 9]
        found = set(range(at + 10, at + 20))
    else:
        l4, protocol = at + 40, data[at + 6]
        found = set(range(at + 8, at + 40))
        for _ in range(6):
            if protocol not in {0, 43, 44, 51, 60} or l4 + 2 > len(data):
                break
            unit, more = (4, 2) if protocol == 51 else (8, 1)
            size = 8 if protocol == 44 else (data[l4 + 1] + more) * unit
            protocol, l4 = data[l4], l4 + size
    if protocol in {1, 58}:
        return None
    found |= set(range(l4, l4 + 4))
    sums = {Protocol.TCP: (16, 2), Protocol.UDP: (6, 2), Protocol.SCTP: (8, 4)}
    if protocol in sums:
        start, length = sums[Protocol(protocol)]
        found |= set(range(l4 + start, l4 + start + length))
    return found


def only_what_a_service_needs(before: bytes, after: bytes, at: int) -> bool:
    if len(before) != len(after):
        return False
    if before == after:
        return True
    allowed = may_change(before, at)
    differ = {i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
    return allowed is None or differ <= allowed


def service_packets(web: Service, dns: Service) -> list[Packet]:
    """One of each kind, all to Services or about them."""
    net = web.net
    v6 = net.family is Family.IPV6
    options = tcp(net.client, web.node_port, payload=b"payload")
    hops = udp(net.client, dns.node_port)
    if v6:
        hops = (
            frame(net.client.address, net.node.address)
            / IPv6ExtHdrHopByHop()
            / IPv6ExtHdrDestOpt()
            / hops[UDP]
        )
    else:
        options[IP].options = [IPOption_NOP()] * 8
    quoted = tcp(web.node_port, net.client, "A")[IPv6 if v6 else IP]
    error = ICMPv6DestUnreach(code=4) if v6 else ICMP(type=3, code=4)
    echo = ICMPv6EchoRequest(data=b"ping") if v6 else ICMP() / Raw(b"ping")
    init = SCTP(sport=40000, dport=web.node_port.port) / SCTPChunkInit(init_tag=7)
    return [
        tcp(net.client, web.node_port),
        tcp(net.client, web.cluster_ip, payload=b"payload"),
        udp(net.client, dns.cluster_ip),
        options,
        hops,
        *fragments(udp(net.client, dns.cluster_ip, bytes(64)), size=32),
        frame(net.client.address, net.node.address, error, quoted),
        frame(net.client.address, web.cluster_ip.address, echo),
        frame(net.client.address, net.node.address, init),
        tagged(tcp(net.client, web.node_port), 0),
        tcp(net.client, web.node_port, "A"),
        tcp(net.local[0], net.client, "SA"),
    ]


@pytest.fixture
def services(node: PacketNode, net: Net) -> tuple[Service, Service]:
    web = Service(net, Protocol.TCP, local=net.local[:1])
    dns = Service(net, Protocol.UDP, number=1, local=net.local[:1])
    node.serve(web, dns)
    return web, dns


@fuzz
@given(data=st.binary(min_size=14, max_size=256), type_=st.sampled_from([0, 0x0800, 0x86DD]))
def test_random_bytes_come_out_as_they_were(
    node: PacketNode, services: tuple[Service, Service], data: bytes, type_: int
) -> None:
    assert services
    if type_:
        data = data[:12] + type_.to_bytes(2) + data[14:]
    for program in PROGRAMS:
        assert run(node, program, data) == (Fate.PASSED, data)
        assert run(node, program, data, own=True) == (Fate.PASSED, data)


@fuzz
@given(data=st.data())
def test_of_a_spoilt_packet_only_what_a_service_needs_is_changed(
    node: PacketNode, services: tuple[Service, Service], data: st.DataObject
) -> None:
    packets = service_packets(*services)
    packet = bytearray(bytes(data.draw(st.sampled_from(packets))))
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(12, len(packet) - 1))
        packet[at] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(34, len(packet) + 8))
    spoilt = bytes(packet[:length]).ljust(length, b"\xee")
    for program in PROGRAMS[:2]:
        fate, out = run(node, program, spoilt, own=data.draw(st.booleans()))
        at = 14 if spoilt[12:14] != b"\x81\x00" else 18
        assert fate is Fate.DROPPED or only_what_a_service_needs(spoilt, out, at), (
            program,
            spoilt.hex(),
            out.hex(),
        )


def test_a_packet_cut_off_anywhere_comes_out_as_it_was(
    node: PacketNode, services: tuple[Service, Service]
) -> None:
    """It says itself that it is longer: whoever it is for will find that out."""
    for packet in service_packets(*services):
        whole = bytes(packet)
        for length in range(34, len(whole)):
            for program in PROGRAMS[:2]:
                cut = whole[:length]
                assert run(node, program, cut) == (Fate.PASSED, cut), (program, packet.summary())
    assert not node.flows()


def test_a_short_packet_that_says_so_is_translated_whole_or_not_at_all(
    node: PacketNode, services: tuple[Service, Service]
) -> None:
    """The IP header is in order; what is behind it ends anywhere."""
    net = services[0].net
    v6 = net.family is Family.IPV6
    for packet in service_packets(*services):
        whole = bytes(packet)
        if whole[12:14] == b"\x81\x00":
            continue
        for length in range(54 if v6 else 34, len(whole)):
            cut = bytearray(whole[:length])
            at, size = (18, length - 54) if v6 else (16, length - 14)
            cut[at : at + 2] = size.to_bytes(2)
            if not v6:
                _mend_ip_checksum(cut)
            fate, out = run(node, "ebpflb_ingress", bytes(cut))
            assert fate is Fate.DROPPED or only_what_a_service_needs(bytes(cut), out, 14)
            assert len(out) == length


def _mend_ip_checksum(data: bytearray) -> None:
    header = (data[14] & 15) * 4
    data[24:26] = b"\0\0"
    words = data[14 : 14 + header]
    total = sum(int.from_bytes(words[i : i + 2]) for i in range(0, len(words), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    data[24:26] = (total ^ 0xFFFF).to_bytes(2)


@pytest.mark.parametrize("program", PROGRAMS)
def test_other_protocols_of_any_length_come_out_as_they_were(
    node: PacketNode, services: tuple[Service, Service], program: str
) -> None:
    web, _ = services
    kinds = cycle([TCP, UDP, SCTP])
    for number in (0, 2, 4, 41, 47, 50, 51, 59, 89, 112, 135, 255):
        packet = frame(web.net.client.address, web.node_port.address, next(kinds)(), Raw(b"x" * 9))
        data = bytearray(bytes(without_ethernet(packet) if "l3" in program else packet))
        start = 0 if "l3" in program else 14
        data[start + (6 if web.net.family is Family.IPV6 else 9)] = number
        assert run(node, program, bytes(data)) == (Fate.PASSED, bytes(data))
