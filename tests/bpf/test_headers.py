"""Packets that are not the shortest of their kind (L-46, L-47): options, extension headers, VLAN
tags, no checksum, no Ethernet header, more than one segment."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from scapy.layers.inet import IP, TCP, UDP, IPOption_NOP, IPOption_RR
from scapy.layers.inet6 import (
    HBHOptUnknown,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    PadN,
)
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from ebpflb.datapath.ebpf import libbpf, loader
from ebpflb.model import Family, Protocol
from tests.bpf.node import HERE, MASQUERADE, Fate, PacketNode, Service
from tests.bpf.packets import (
    NETS,
    End,
    Net,
    ends_of,
    ip_of,
    parse,
    reply_to,
    tagged,
    tcp,
    udp,
)
from tests.bpf.talks import clients, talks_to

V4, V6 = NETS

SCHED_CLS = 3
PROG_ARRAY = 3


def is_translated(node: PacketNode, web: Service, packet: Packet) -> bool:
    """There and back, the headers that are not ours to change unchanged."""
    out = node.receives(packet)
    if out.unchanged:
        return False
    assert out.passed, out
    assert out.target in web.backends
    back = reply_to(out.packet, TCP(flags="SA") if TCP in packet else UDP())
    home = node.sends(back)
    assert (home.source, home.target) == (web.node_port, ends_of(packet)[0])
    return True


# --- IPv4 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        [IPOption_NOP()] * 4,
        [IPOption_RR(routers=["0.0.0.0"] * 9)],
        [IPOption_NOP()] * 40,
    ],
    ids=["four bytes", "record route", "all that fits"],
)
@pytest.mark.parametrize("make", [tcp, udp], ids=["TCP", "UDP"])
def test_ipv4_options_are_stepped_over(
    node: PacketNode, options: list[Packet], make: Callable[[End, End], Packet]
) -> None:
    web = Service(V4, Protocol.TCP if make is tcp else Protocol.UDP, local=V4.local[:1])
    node.serve(web)
    packet = make(V4.client, web.node_port)
    packet[IP].options = options
    out = node.receives(packet)
    assert out.target == V4.local[0]
    assert [bytes(one) for one in out.packet[IP].options] == [
        bytes(one) for one in out.was[IP].options
    ]
    assert is_translated(node, web, packet)


def test_udp_without_a_checksum_stays_without(node: PacketNode) -> None:
    """RFC 768: zero is none."""
    dns = Service(V4, Protocol.UDP, local=V4.local[:1])
    node.serve(dns)
    packet = udp(V4.client, dns.node_port)
    packet[UDP].chksum = 0
    out = node.receives(packet)
    assert out.target == V4.local[0]
    assert out.packet[UDP].chksum == 0
    back = reply_to(out.packet, UDP(chksum=0), Raw(b"x"))
    home = node.sends(back)
    assert home.source == dns.node_port
    assert home.packet[UDP].chksum == 0


def test_a_udp_checksum_that_comes_out_as_zero_is_written_as_ones(
    node: PacketNode, net: Net
) -> None:
    """RFC 768, RFC 8200: written as zero it would be none."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    after = parse(bytes(udp(net.client, net.local[0], b"\0\0")))
    # So much is to be added to the data for the sum of what comes out to be zero.
    payload = after[UDP].chksum.to_bytes(2)
    out = node.receives(udp(net.client, dns.node_port, payload))
    assert out.target == net.local[0]
    assert out.packet[UDP].chksum == 0xFFFF


@pytest.mark.parametrize(
    "wanted", [0x0000, 0x0001, 0x7FFF, 0x8000, 0xFFFE, 0xFFFD, 0xFEFF, 0xFDFF], ids=hex
)
def test_an_ipv4_checksum_may_come_out_as_anything(node: PacketNode, wanted: int) -> None:
    """RFC 1624: carries, and the two zeros of one's complement."""
    web = Service(V4, local=V4.local[:1])
    node.serve(web)
    packet, after = tcp(V4.client, web.node_port), tcp(V4.client, V4.local[0])
    after[IP].id = 0
    # What the other fields sum up to leaves so much to the id.
    total = (parse(bytes(after))[IP].chksum ^ 0xFFFF) + wanted
    packet[IP].id = 0xFFFF - ((total & 0xFFFF) + (total >> 16))
    out = node.receives(packet)
    assert out.target == V4.local[0]
    assert out.packet[IP].chksum == wanted


@pytest.mark.parametrize("fragment_bit", ["DF", "evil", 0], ids=str)
def test_flags_of_a_whole_packet_make_it_no_fragment(
    node: PacketNode, fragment_bit: str | int
) -> None:
    web = Service(V4, local=V4.local[:1])
    node.serve(web)
    packet = tcp(V4.client, web.node_port)
    packet[IP].flags = fragment_bit
    assert is_translated(node, web, packet)


# --- IPv6 --------------------------------------------------------------------------------------

CHAINS: dict[str, list[Packet]] = {
    "hop by hop": [IPv6ExtHdrHopByHop(options=[PadN(optdata=b"\0" * 4)])],
    "destination options": [IPv6ExtHdrDestOpt(options=[HBHOptUnknown(otype=0x1E)])],
    "a routing header that is used up": [IPv6ExtHdrRouting(segleft=0, addresses=["fd00::1"])],
    "hop by hop and destination options": [
        IPv6ExtHdrHopByHop(options=[PadN(optdata=b"\0" * 12)]),
        IPv6ExtHdrDestOpt(options=[PadN(optdata=b"\0" * 20)]),
    ],
    "three of them": [IPv6ExtHdrHopByHop(), IPv6ExtHdrDestOpt(), IPv6ExtHdrDestOpt()],
}


def extended(packet: Packet, chain: list[Packet]) -> Packet:
    """The packet with these headers before its own transport header."""
    ip, l4 = packet[IPv6], packet[IPv6].payload
    made: Packet = Ether(src=packet.src, dst=packet.dst) / IPv6(src=ip.src, dst=ip.dst)
    for header in chain:
        made /= header.copy()
    made /= l4
    return made


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("make", [tcp, udp], ids=["TCP", "UDP"])
def test_ipv6_extension_headers_are_stepped_over(
    node: PacketNode, chain: str, make: Callable[[End, End], Packet]
) -> None:
    web = Service(V6, Protocol.TCP if make is tcp else Protocol.UDP, local=V6.local[:1])
    node.serve(web)
    assert is_translated(node, web, extended(make(V6.client, web.node_port), CHAINS[chain]))


def test_a_packet_that_is_still_to_be_routed_elsewhere_is_left_alone(node: PacketNode) -> None:
    """Its checksum is of its last address, which is not yet its target (RFC 8200)."""
    web = Service(V6, local=V6.local[:1])
    node.serve(web)
    header = IPv6ExtHdrRouting(segleft=1, addresses=["fd00::1"])
    packet = extended(tcp(V6.client, web.node_port), [header])
    assert node.receives(packet).unchanged


def test_more_extension_headers_than_anybody_sends_are_left_alone(node: PacketNode) -> None:
    web = Service(V6, local=V6.local[:1])
    node.serve(web)
    packet = extended(tcp(V6.client, web.node_port), [IPv6ExtHdrDestOpt()] * 12)
    assert node.receives(packet).unchanged


@pytest.mark.parametrize("next_header", [50, 59, 135, 139], ids=["ESP", "none", "MH", "HIP"])
def test_what_cannot_be_read_is_left_alone(node: PacketNode, net: Net, next_header: int) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    packet = tcp(net.client, web.node_port)
    ip = ip_of(packet)
    setattr(ip, "proto" if net.family is Family.IPV4 else "nh", next_header)
    assert node.receives(packet, checks=False).unchanged


# --- both --------------------------------------------------------------------------------------


def test_the_headers_other_bits_are_kept(node: PacketNode, net: Net) -> None:
    """TTL, DSCP and ECN, the flow label, TCP's options and window."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    packet = tcp(net.client, web.node_port)
    ip = ip_of(packet)
    assert ip is not None
    if net.family is Family.IPV6:
        ip.tc, ip.fl, ip.hlim = 0xB9, 0xABCDE, 3
    else:
        ip.tos, ip.ttl, ip.id = 0xB9, 3, 0xBEEF
    packet[TCP].options = [("MSS", 1400), ("SAckOK", b""), ("Timestamp", (1, 2)), ("WScale", 7)]
    packet[TCP].window, packet[TCP].urgptr = 12345, 7
    out = node.receives(packet)
    before, after = ip_of(out.was), ip_of(out.packet)
    assert before is not None
    assert after is not None
    theirs = {"dst", "chksum"}
    assert {k: v for k, v in after.fields.items() if k not in theirs} == {
        k: v for k, v in before.fields.items() if k not in theirs
    }
    theirs = {"dport", "chksum"}
    assert {k: v for k, v in out.packet[TCP].fields.items() if k not in theirs} == {
        k: v for k, v in out.was[TCP].fields.items() if k not in theirs
    }


def test_bytes_behind_the_ip_packet_are_kept(node: PacketNode, net: Net) -> None:
    """Ethernet's shortest frame is longer than the shortest IP packets."""
    dns = Service(net, Protocol.UDP, local=net.local[:1])
    node.serve(dns)
    packet = bytes(udp(net.client, dns.node_port, b"x")) + b"\xee" * 18
    out = node.receives(parse(packet))
    assert out.target == net.local[0]
    assert bytes(out.packet)[-18:] == b"\xee" * 18
    assert len(bytes(out.packet)) == len(packet)


def _words(*ends: End) -> int:
    """What addresses and ports add to a checksum."""
    data = b"".join(socket.inet_pton(_af(end), end.address) for end in ends)
    words: tuple[int, ...] = struct.unpack(f"!{len(data) // 2}H", data)
    return sum(words) + sum(end.port for end in ends)


def _af(end: End) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in end.address else socket.AF_INET


@pytest.mark.parametrize("sums_up", [True, False], ids=["summed up", "not summed up"])
@pytest.mark.parametrize("make", [tcp, udp], ids=["TCP", "UDP"])
def test_a_backend_may_have_the_very_sum_of_its_frontend(
    node: PacketNode, net: Net, make: Callable[..., Packet], sums_up: bool
) -> None:
    """The checksum of addresses and ports stays what it was, and is right."""
    web = Service(net, Protocol.TCP if make is tcp else Protocol.UDP)
    address = net.local[0].at(0)
    port = (_words(web.node_port) - _words(address)) % 0xFFFF
    web = replace(web, local=(address.at(port),))
    node.serve(web)
    sums_up = sums_up and node.sums_up
    for payload in (b"", b"odd", b"even"):
        out = node.receives(make(net.client, web.node_port, payload=payload), sums_up=sums_up)
        assert out.target == web.local[0]
        back = make(web.local[0], net.client, payload=payload)
        if make is tcp:
            back[TCP].flags = "SA"
        assert node.sends(back, sums_up=sums_up).source == web.node_port


@pytest.mark.parametrize("step", [1, -1])
@pytest.mark.parametrize("at", range(-8, 0))
def test_a_backend_may_be_next_to_its_frontend(
    node: PacketNode, net: Net, at: int, step: int
) -> None:
    """One octet of the address is one more, or less: the shortest ways to a carry."""
    web = Service(net)
    octets = bytearray(socket.inet_pton(_af(web.node_port), web.node_port.address))
    at %= len(octets)
    octets[at] = (octets[at] + step) % 256
    address = socket.inet_ntop(_af(web.node_port), bytes(octets))
    web = replace(web, local=(End(address, web.node_port.port),))
    node.serve(web)
    talk = talks_to(node, web)
    assert talk.opens() == web.local[0]
    assert talk.lives()


@pytest.mark.parametrize("make", [tcp, udp], ids=["TCP", "UDP"])
def test_addresses_of_all_sorts_of_bits_have_right_checksums(
    node: PacketNode, net: Net, make: Callable[..., Packet]
) -> None:
    """Carries."""
    rng = random.Random(7)
    v6 = net.family is Family.IPV6
    pattern = ("0000", "ffff", "fffe", "0001", "8000", "7fff")
    ends: set[End] = set()
    while len(ends) < 24:
        tail = [rng.choice(pattern) for _ in range(6 if v6 else 1)]
        text = (
            str(ipaddress.IPv6Address(int("fd00ffff" + "".join(tail), 16)))
            if v6
            else str(ipaddress.IPv4Address(int("0aff" + tail[0], 16) ^ rng.randrange(1 << 20)))
        )
        ends.add(End(text, rng.choice([1, 80, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF])))
    web = Service(net, Protocol.TCP if make is tcp else Protocol.UDP, local=tuple(ends))
    node.serve(web)
    for client in islice(clients(net.client), 100):
        out = node.receives(make(client, web.node_port))
        back = make(out.target, out.source)
        if make is tcp:
            back[TCP].flags = "SA"
        home = node.sends(back)
        assert (home.source, home.target) == (web.node_port, client)


@pytest.mark.parametrize("size", [1, 2, 3, 1399, 1400, 3000])
@pytest.mark.parametrize("make", [tcp, udp], ids=["TCP", "UDP"])
def test_packets_of_any_size_have_right_checksums(
    node: PacketNode, net: Net, size: int, make: Callable[..., Packet]
) -> None:
    web = Service(net, Protocol.TCP if make is tcp else Protocol.UDP, local=net.local[:1])
    node.serve(web)
    packet = make(net.client, web.node_port, payload=os.urandom(size))
    assert node.receives(packet).target == net.local[0]
    assert node.receives(packet, sums_up=False).target == net.local[0]


@pytest.mark.parametrize("sums_up", [True, False], ids=["summed up", "not summed up"])
@pytest.mark.parametrize("make", [tcp, udp], ids=["TCP", "UDP"])
def test_what_the_card_has_summed_up_stays_right(
    node: PacketNode, net: Net, sums_up: bool, make: Callable[..., Packet]
) -> None:
    """B-121: a veth never shows it."""
    if sums_up and not node.sums_up:
        pytest.skip("kernel lacks BPF_F_TEST_SKB_CHECKSUM_COMPLETE (6.16)")
    web = Service(net, Protocol.TCP if make is tcp else Protocol.UDP, local=net.local[:1])
    node.serve(web)
    out = node.receives(make(net.client, web.node_port, payload=b"abc"), sums_up=sums_up)
    assert out.target == net.local[0]
    back = make(net.local[0], net.client, payload=b"abcd")
    if make is tcp:
        back[TCP].flags = "SA"
    assert node.sends(back, sums_up=sums_up).source == web.node_port


def test_several_segments_in_one_are_translated_as_one(node: PacketNode, net: Net) -> None:
    """GRO and TSO: what the kernel holds of them is one packet."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.opens()
    big = tcp(net.client, web.node_port, "PA", payload=bytes(2800))
    out = node.receives(big, gso_size=1400, gso_segs=2)
    assert out.target == net.local[0]
    home = node.sends(
        tcp(net.local[0], net.client, "PA", payload=bytes(2800)), gso_size=1400, gso_segs=2
    )
    assert home.source == web.node_port


# --- VLAN --------------------------------------------------------------------------------------


@pytest.mark.parametrize("type_", [0x8100, 0x88A8], ids=hex)
@pytest.mark.parametrize("vlans", [(5,), (4095,), (0, 5), (5, 0)], ids=str)
def test_a_frame_of_a_vlan_is_left_to_the_vlans_own_device(
    node: PacketNode, net: Net, vlans: tuple[int, ...], type_: int
) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    packet = tagged(tcp(net.client, web.node_port), *vlans, type_=type_)
    assert node.receives(packet).unchanged
    assert node.sends(packet).unchanged
    assert not node.flows()


class _TagBuild(loader.Build):
    """The tagging program stands beside this file."""

    __slots__ = ()

    def text(self) -> str:
        return (HERE / self.source).read_text()


@pytest.fixture(scope="module")
def tagger(the_node: PacketNode) -> Iterator[str]:
    """The name of a program that gives a packet the tag of its mark, and hands it on to ours."""
    pin = the_node.maps["stats"].path.with_name("next")
    with contextlib.ExitStack() as stack:
        fd = libbpf._call(
            "create map", "next", "bpf_map_create", PROG_ARRAY, b"next", 4, 4, 1, None
        )
        stack.callback(os.close, fd)
        libbpf.obj_pin(fd, str(pin))
        stack.callback(pin.unlink)
        ours = the_node.programs["ebpflb_ingress"]
        libbpf.update(fd, "next", bytes(4), ours.to_bytes(4, sys.byteorder))
        function = loader.Function("tag", SCHED_CLS, 0)
        program = loader.load(_TagBuild("tag.c", (function,), {}, {"next": str(pin)}))["tag"]
        stack.callback(os.close, program)
        the_node.programs["tag"] = program
        stack.callback(the_node.programs.pop, "tag")
        yield "tag"


@pytest.mark.parametrize(
    ("tag", "ours"), [(0x0000, True), (0xA000, True), (0x0005, False), (0xAFFF, False)], ids=hex
)
def test_a_tag_beside_the_packet_counts_as_one_in_it(
    node: PacketNode, tagger: str, net: Net, tag: int, ours: bool
) -> None:
    """A priority tag (VLAN 0) is no VLAN."""
    web = Service(net, remote=net.remote[:1])
    node.serve(web)
    packet = bytes(tcp(net.client, web.node_port))
    result = node.run_raw(tagger, packet, came_in="uplink", mark=tag)
    assert Fate(result.verdict) is Fate.PASSED
    assert ends_of(parse(result.packet))[1] == (net.remote[0] if ours else web.node_port)
    assert result.mark == (MASQUERADE if ours else 0)


# --- no Ethernet header ------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [Protocol.TCP, Protocol.UDP], ids=lambda one: one.name)
def test_a_device_without_an_ethernet_header_has_programs_of_its_own(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """Of such addresses that bytes 12 and 13 of the packet are an EtherType to a test run."""
    v6 = net.family is Family.IPV6
    client = End("2001:db8:86dd::9" if v6 else "8.0.60.9", 40000)
    backend = End("fd00:244:86dd::10" if v6 else "8.0.1.10", 8080)
    web = Service(net, protocol, local=(backend,))
    node.serve(web)
    make: Any = tcp if protocol is Protocol.TCP else udp
    out = node.receives(make(client, web.node_port, payload=bytes(32)), "tun")
    assert out.passed
    assert (out.source, out.target) == (client, backend)
    assert out.mark == MASQUERADE
    answer = make(backend, client, payload=bytes(32))
    if make is tcp:
        answer[TCP].flags = "SA"
    home = node.sends(answer, "tun")
    assert (home.source, home.target) == (web.node_port, client)
    other = make(client, net.stranger.at(80), payload=bytes(32))
    assert node.receives(other, "tun").unchanged
