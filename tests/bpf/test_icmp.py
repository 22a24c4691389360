"""ICMP: errors about what was translated reach those who can make use of them, whole (L-43, B-113,
B-115); a ping of a Service is answered (PORT-09)."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_NOP, IPOption_RR
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6EchoReply,
    ICMPv6EchoRequest,
    ICMPv6PacketTooBig,
    ICMPv6ParamProblem,
    ICMPv6TimeExceeded,
    IPv6,
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
)
from scapy.layers.l2 import Ether
from scapy.packet import Packet, Raw

from ebpflb.model import Family, FrontendKind, Policy, Protocol
from tests.bpf.node import MASQUERADE, Fate, Out, PacketNode, Service
from tests.bpf.packets import (
    DEVICE_MAC,
    NETS,
    PEER_MAC,
    End,
    Net,
    fragments,
    frame,
    ip_of,
    tcp,
    udp,
    without_ethernet,
)
from tests.bpf.sctp import associates, make_sctp
from tests.bpf.talks import MAKES, Talk
from tests.bpf.wire import Wire

V4, V6 = NETS

ROUTER = {Family.IPV4: End("192.0.2.254"), Family.IPV6: End("2001:db8:ffff::fe")}
"""Somebody on the way."""

ICMP_LENGTH = 8
IP_LENGTH = {Family.IPV4: 20, Family.IPV6: 40}
L4_NEEDED = 8
"""Bytes of the payload that every error quotes (RFC 792)."""

QUOTES = {Family.IPV4: 576 - 28, Family.IPV6: 1280 - 48}
"""What fits into an error."""

SCTP_CRC = slice(8, 12)

ERRORS: dict[Family, dict[str, Callable[[], Packet]]] = {
    Family.IPV4: {
        "port unreachable": lambda: ICMP(type=3, code=3),
        "fragmentation needed": lambda: ICMP(type=3, code=4, nexthopmtu=1300),
        "administratively prohibited": lambda: ICMP(type=3, code=13),
        "source quench": lambda: ICMP(type=4),
        "time exceeded": lambda: ICMP(type=11, code=0),
        "parameter problem": lambda: ICMP(type=12, code=0, ptr=8),
    },
    Family.IPV6: {
        "port unreachable": lambda: ICMPv6DestUnreach(code=4),
        "administratively prohibited": lambda: ICMPv6DestUnreach(code=1),
        "packet too big": lambda: ICMPv6PacketTooBig(mtu=1300),
        "time exceeded": lambda: ICMPv6TimeExceeded(code=0),
        "parameter problem": lambda: ICMPv6ParamProblem(code=1, ptr=6),
    },
}
EVERY_ERROR = [(net, name) for net in NETS for name in ERRORS[net.family]]

MTU = {Family.IPV4: "fragmentation needed", Family.IPV6: "packet too big"}

MAKE = {**MAKES, Protocol.SCTP: make_sctp}
BEGINS = {Protocol.TCP: "S", Protocol.UDP: "hello", Protocol.SCTP: "INIT"}
GOES_ON = {Protocol.TCP: "PA", Protocol.UDP: "on and on", Protocol.SCTP: "DATA"}

by_protocol = pytest.mark.parametrize("protocol", list(Protocol), ids=lambda one: one.name)


# --- making them -------------------------------------------------------------------------------


def quotable(packet: Packet) -> bytes:
    """A frame's IP packet, as far as an error has room for it."""
    ip = without_ethernet(packet)
    return bytes(ip)[: QUOTES[Family.IPV6 if isinstance(ip, IPv6) else Family.IPV4]]


def error(net: Net, source: str, target: str, quoted: bytes, kind: str = "") -> Packet:
    made = ERRORS[net.family][kind or MTU[net.family]]()
    return Ether(bytes(frame(source, target, made, Raw(quoted))))


def quoted_in(packet: Packet, net: Net) -> bytes:
    """What an error quotes, byte by byte."""
    return bytes(without_ethernet(packet))[IP_LENGTH[net.family] + ICMP_LENGTH :]


def message_in(packet: Packet, net: Net) -> bytes:
    """An error's own header, without its checksum."""
    at = IP_LENGTH[net.family]
    header = bytes(without_ethernet(packet))[at : at + ICMP_LENGTH]
    return header[:2] + header[4:]


def ends(packet: Packet) -> tuple[str, str]:
    ip = ip_of(packet)
    assert ip is not None
    return ip.src, ip.dst


def ones_sum(data: bytes) -> int:
    """RFC 1071; 0xffff where data has a right checksum in it."""
    data += bytes(len(data) % 2)
    total = sum(int.from_bytes(data[at : at + 2]) for at in range(0, len(data), 2))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def pseudo_header(ip: bytes, length: int) -> bytes:
    return ip[8:40] + length.to_bytes(4) + (58).to_bytes(4)


def sums(ip: bytes) -> tuple[int, int]:
    """IP's own header's, and ICMP's: 0xffff is right. ``ip`` is a packet without extensions.

    From its bytes: scapy takes what is quoted apart, and makes another of it.
    """
    if ip[0] >> 4 == 6:
        ip = ip[: 40 + int.from_bytes(ip[4:6])]
        return 0xFFFF, ones_sum(pseudo_header(ip, len(ip) - 40) + ip[40:])
    header = (ip[0] & 15) * 4
    ip = ip[: int.from_bytes(ip[2:4])]
    return ones_sum(ip[:header]), ones_sum(ip[header:])


def assert_sums(packet: Packet) -> None:
    assert sums(bytes(without_ethernet(packet))) == (0xFFFF, 0xFFFF)


def without_crc(net: Net, protocol: Protocol, quoted: bytes) -> bytes:
    """SCTP's CRC is left as it is: nobody compares what is quoted of it."""
    if protocol is not Protocol.SCTP:
        return quoted
    at = IP_LENGTH[net.family]
    return quoted[: at + SCTP_CRC.start] + quoted[at + SCTP_CRC.stop :]


class Told(NamedTuple):
    """A packet before and behind our hook: who is told of the second must hear of the first."""

    before: Packet
    behind: Packet


class Flow:
    """A flow of a Service, and its packets on both sides of us."""

    def __init__(
        self,
        node: PacketNode,
        service: Service,
        *,
        client: End | None = None,
        frontend: End | None = None,
        own: bool = False,
        answered: bool = True,
    ) -> None:
        self.net, self.protocol, self.own = service.net, service.protocol, own
        self._node = node
        make = MAKE[service.protocol]
        client = client or (service.net.node if own else service.net.client)
        self.talk = Talk(node, client, frontend or service.node_port, make, own=own)
        if not answered:
            self.talk.says(BEGINS[self.protocol])
        elif self.protocol is Protocol.SCTP:
            associates(self.talk)
        else:
            self.talk.opens()

    def asked(self) -> Told:
        """A packet of the client's, and as it goes on to the backend."""
        out = self.talk.says(GOES_ON[self.protocol])
        return Told(out.was, out.packet)

    def answered(self) -> Told:
        """A packet of the backend's, and as it goes on to the client."""
        out = self.talk.answers(GOES_ON[self.protocol])
        return Told(out.was, out.packet)

    def hears(self, packet: Packet, *, sums_up: bool | None = None) -> Out:
        """An error from beyond us, at the hook where it is on its way to the client."""
        if self.own:
            return self._node.receives(packet, checks=False, sums_up=sums_up)
        return self._node.sends(packet, came_in="pod2", checks=False, sums_up=sums_up)

    def tells(self, packet: Packet, *, sums_up: bool | None = None) -> Out:
        """An error from the client's side, where it comes in."""
        if self.own:
            return self._node.sends_own(packet, checks=False, sums_up=sums_up)
        return self._node.receives(packet, checks=False, sums_up=sums_up)


def web_of(net: Net, protocol: Protocol = Protocol.TCP, *, number: int = 0) -> Service:
    return Service(net, protocol, number=number, local=net.local[:1])


def assert_mended(out: Out, told: Told, net: Net, protocol: Protocol) -> None:
    """It quotes what its target had sent, as it had sent it; all else of the message is kept."""
    quoted, was = quoted_in(out.packet, net), quoted_in(out.was, net)
    assert out.passed
    assert_sums(out.packet)
    assert without_crc(net, protocol, quoted) == without_crc(
        net, protocol, quotable(told.before)[: len(was)]
    )
    assert message_in(out.packet, net) == message_in(out.was, net)
    assert len(bytes(out.packet)) == len(bytes(out.was))


# --- towards the client ------------------------------------------------------------------------


@by_protocol
@pytest.mark.parametrize("answered", [True, False], ids=["answered", "unanswered"])
def test_the_client_hears_of_the_packet_that_it_sent(
    node: PacketNode, net: Net, protocol: Protocol, answered: bool
) -> None:
    """What is in the way of its packets beyond us concerns those to the frontend."""
    web = web_of(net, protocol)
    node.serve(web)
    flow = Flow(node, web, answered=answered)
    told = flow.asked() if answered else Told(*_first(flow))
    out = flow.hears(
        error(net, ROUTER[net.family].address, net.client.address, quotable(told.behind))
    )
    assert_mended(out, told, net, protocol)
    assert ends(out.packet) == (ROUTER[net.family].address, net.client.address)
    assert node.counted("ICMP_ERRORS") == 1


def _first(flow: Flow) -> tuple[Packet, Packet]:
    out = flow.talk.says(BEGINS[flow.protocol])
    return out.was, out.packet


@by_protocol
def test_an_error_of_the_backends_own_comes_from_the_frontend(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """The client has never heard of the backend."""
    web = web_of(net, protocol)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.asked()
    out = flow.hears(
        error(
            net,
            web.local[0].address,
            net.client.address,
            quotable(told.behind),
            "port unreachable",
        )
    )
    assert_mended(out, told, net, protocol)
    assert ends(out.packet) == (web.node_port.address, net.client.address)


@pytest.mark.parametrize(
    ("net", "kind"), EVERY_ERROR, ids=[f"{net.family.label}, {kind}" for net, kind in EVERY_ERROR]
)
@pytest.mark.parametrize("from_backend", [False, True], ids=["of a router", "of the backend"])
def test_every_kind_of_error_is_mended(
    node: PacketNode, net: Net, kind: str, from_backend: bool
) -> None:
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    for told, source, target, way in (
        (
            flow.asked(),
            web.local[0] if from_backend else ROUTER[net.family],
            net.client,
            flow.hears,
        ),
        (
            flow.answered(),
            net.client if from_backend else ROUTER[net.family],
            web.node_port,
            flow.tells,
        ),
    ):
        out = way(error(net, source.address, target.address, quotable(told.behind), kind))
        assert_mended(out, told, net, Protocol.TCP)
    assert node.counted("ICMP_ERRORS") == 2


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.family.label)
def test_the_mtu_of_the_way_is_told_on(node: PacketNode, net: Net) -> None:
    """Path MTU discovery through a Service works."""
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.asked()
    out = flow.hears(
        error(net, ROUTER[net.family].address, net.client.address, quotable(told.behind))
    )
    mtu = (
        out.packet[ICMPv6PacketTooBig].mtu
        if net.family is Family.IPV6
        else out.packet[ICMP].nexthopmtu
    )
    assert mtu == 1300


# --- from the client's side --------------------------------------------------------------------


@by_protocol
@pytest.mark.parametrize("of_client", [True, False], ids=["of the client", "of a router"])
def test_the_backend_hears_of_the_packet_that_it_sent(
    node: PacketNode, net: Net, protocol: Protocol, of_client: bool
) -> None:
    """B-113: else a backend never learns how long its packets may be."""
    web = web_of(net, protocol)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.answered()
    source = net.client if of_client else ROUTER[net.family]
    out = flow.tells(error(net, source.address, web.node_port.address, quotable(told.behind)))
    assert_mended(out, told, net, protocol)
    assert ends(out.packet) == (source.address, web.local[0].address)
    assert node.counted("ICMP_ERRORS") == 1


@pytest.mark.parametrize("kind", list(FrontendKind), ids=lambda kind: kind.value)
def test_an_error_bears_the_mark_of_its_flow(
    node: PacketNode, net: Net, kind: FrontendKind
) -> None:
    """Netfilter is to do with it as with the flow's packets."""
    web = Service(net, local=net.local[:1], external_policy=Policy.LOCAL)
    other = web_of(net, number=1)
    node.serve(web, other)
    for service in (web, other):
        flow = Flow(node, service, frontend=service.frontend(kind))
        marked = flow.talk.says("PA").masqueraded
        assert marked == (service is other or kind is FrontendKind.CLUSTER_IP)
        told = flow.answered()
        frontend = service.frontend(kind).address
        packet = error(net, net.client.address, frontend, quotable(told.behind))
        assert flow.tells(packet).masqueraded == marked
        assert node.receives(packet, mark=0xF0000, checks=False).mark == 0xF0000 | (
            MASQUERADE if marked else 0
        )
        back = flow.asked()
        packet = error(net, web.local[0].address, net.client.address, quotable(back.behind))
        assert flow.hears(packet).mark == 0


# --- whose ports were changed ------------------------------------------------------------------


@by_protocol
def test_the_client_has_its_own_port_back(node: PacketNode, net: Net, protocol: Protocol) -> None:
    """Two frontends of one backend dialled from one port: the second flow was given another."""
    web = web_of(net, protocol)
    node.serve(web)
    first, second = (Flow(node, web, frontend=end) for end in (web.node_port, web.cluster_ip))
    assert second.talk.seen_as.port != net.client.port
    for flow in (first, second):
        told = flow.asked()
        packet = error(net, web.local[0].address, net.client.address, quotable(told.behind))
        out = flow.hears(packet)
        assert_mended(out, told, net, protocol)
        assert ends(out.packet) == (flow.talk.frontend.address, net.client.address)
        told = flow.answered()
        packet = error(net, net.client.address, flow.talk.frontend.address, quotable(told.behind))
        out = flow.tells(packet)
        assert_mended(out, told, net, protocol)
        assert ends(out.packet) == (net.client.address, web.local[0].address)


def test_any_addresses_and_ports_have_right_checksums(node: PacketNode, net: Net) -> None:
    """Carries, and the two zeros of one's complement."""
    for number in range(12):
        for protocol in Protocol:
            client = net.client_number(3 + number).at(1 + 5461 * number)
            backend = net.pod_number(1, 20 + number, 65535 - 4999 * number)
            web = Service(net, protocol, number=number, local=(backend,))
            node.serve(web)
            flow = Flow(node, web, client=client)
            for told, source, target, way in (
                (flow.asked(), backend, client, flow.hears),
                (flow.answered(), client, web.node_port, flow.tells),
            ):
                out = way(error(net, source.address, target.address, quotable(told.behind)))
                assert_mended(out, told, net, protocol)
            node.remove(web)


# --- the node's own ----------------------------------------------------------------------------


@by_protocol
@pytest.mark.parametrize("of_backend", [True, False], ids=["of the backend", "of a router"])
def test_the_node_hears_of_the_packet_that_it_sent(
    node: PacketNode, net: Net, protocol: Protocol, of_backend: bool
) -> None:
    """K8: what it sent past the socket programs."""
    web = Service(net, protocol, remote=net.remote[:1])
    node.serve(web)
    flow = Flow(node, web, frontend=web.cluster_ip, own=True)
    told = flow.asked()
    source = web.remote[0] if of_backend else ROUTER[net.family]
    packet = error(net, source.address, net.node.address, quotable(told.behind))
    out = flow.hears(packet)
    assert_mended(out, told, net, protocol)
    assert ends(out.packet) == (
        web.cluster_ip.address if of_backend else source.address,
        net.node.address,
    )
    assert not out.mark
    assert node.sends(packet).unchanged


# --- what is quoted may be less, or more -------------------------------------------------------


@by_protocol
@pytest.mark.parametrize("towards_client", [True, False], ids=["to the client", "to the backend"])
def test_an_error_may_quote_little(
    node: PacketNode, net: Net, protocol: Protocol, towards_client: bool
) -> None:
    """As far as the ports are there, it is mended as far as there is anything; else left alone."""
    web = web_of(net, protocol)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.asked() if towards_client else flow.answered()
    whole = quotable(told.behind)
    source, target = (web.local[0], net.client) if towards_client else (net.client, web.node_port)
    way = flow.hears if towards_client else flow.tells
    for length in range(len(whole)):
        out = way(error(net, source.address, target.address, whole[:length]))
        if length < IP_LENGTH[net.family] + L4_NEEDED:
            assert out.unchanged, length
        elif protocol is Protocol.TCP and length == IP_LENGTH[net.family] + 17:
            assert quoted_in(out.packet, net)[:-1] == quotable(told.before)[: length - 1]
            assert_sums(out.packet)  # half of TCP's checksum cannot be mended
        else:
            assert_mended(out, told, net, protocol)


def test_bytes_behind_the_error_are_not_quoted(node: PacketNode, net: Net) -> None:
    """Ethernet's shortest frame: padding is no header."""
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    before, behind = map(quotable, flow.asked())
    for cut in (4, 7, 8, 12, 16, 18):
        length = IP_LENGTH[net.family] + cut
        packet = error(net, ROUTER[net.family].address, net.client.address, behind[:length])
        result = node.run_raw("ebpflb_egress", bytes(packet) + behind[length:], came_in="pod2")
        quoted = before if cut >= L4_NEEDED else behind
        assert result.packet[-len(behind) :] == quoted[:length] + behind[length:]


@pytest.mark.parametrize(
    "options",
    [[IPOption_NOP()] * 4, [IPOption_RR(routers=["0.0.0.0"] * 9)], [IPOption_NOP()] * 40],
    ids=["four bytes", "record route", "all that fits"],
)
@by_protocol
def test_quoted_ipv4_options_are_stepped_over(
    node: PacketNode, options: list[Packet], protocol: Protocol
) -> None:
    web = web_of(V4, protocol)
    node.serve(web)
    flow = Flow(node, web)
    for plain, source, target, way in (
        (flow.asked(), V4.local[0], V4.client, flow.hears),
        (flow.answered(), V4.client, web.node_port, flow.tells),
    ):
        told = Told(*(_with_options(packet, options) for packet in plain))
        length = told.behind[IP].ihl * 4
        for cut in (L4_NEEDED - 1, L4_NEEDED, 18, 500):
            packet = error(
                V4, source.address, target.address, quotable(told.behind)[: length + cut]
            )
            out = way(packet)
            if cut < L4_NEEDED:
                assert out.unchanged
                continue
            quoted, wanted = quoted_in(out.packet, V4), quotable(told.before)[: length + cut]
            if protocol is Protocol.SCTP:
                quoted, wanted = (one[: length + 8] for one in (quoted, wanted))
            assert quoted == wanted


def _with_options(packet: Packet, options: list[Packet]) -> Packet:
    made = packet.copy()
    made[IP].options = options
    for name in ("len", "ihl", "chksum"):
        made[IP].delfieldval(name)
    return Ether(bytes(made))


def test_the_errors_own_ipv4_options_are_stepped_over(node: PacketNode) -> None:
    web = web_of(V4)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.answered()
    packet = _with_options(
        error(V4, V4.client.address, web.node_port.address, quotable(told.behind)),
        [IPOption_NOP()] * 8,
    )
    out = flow.tells(packet)
    assert ends(out.packet) == (V4.client.address, V4.local[0].address)
    assert bytes(out.packet[ICMP])[ICMP_LENGTH:] == quotable(told.before)


CHAINS: dict[str, list[Packet]] = {
    "hop by hop": [IPv6ExtHdrHopByHop()],
    "destination options": [IPv6ExtHdrDestOpt()],
    "a routing header that is used up": [IPv6ExtHdrRouting(segleft=0, addresses=["fd00::1"])],
    "the head of a fragment": [IPv6ExtHdrFragment(offset=0, m=1, id=7)],
    "the head of a fragment, its spare byte used": [IPv6ExtHdrFragment(offset=0, res1=2, id=7)],
    "all of them": [
        IPv6ExtHdrHopByHop(),
        IPv6ExtHdrDestOpt(),
        IPv6ExtHdrRouting(segleft=0, addresses=["fd00::1"]),
        IPv6ExtHdrFragment(offset=0, m=1, id=7),
        IPv6ExtHdrDestOpt(),
    ],
}


def _extended(packet: Packet, chain: list[Packet]) -> Packet:
    """The packet with these headers before its own transport header, which stays as it is."""
    ip = packet[IPv6]
    made: Packet = Ether(src=packet.src, dst=packet.dst) / IPv6(src=ip.src, dst=ip.dst)
    for header in chain:
        made /= header.copy()
    last = made.lastlayer()
    last.nh = ip.nh
    return Ether(bytes(made / Raw(bytes(ip.payload))))


@pytest.mark.parametrize("chain", CHAINS)
@by_protocol
def test_quoted_extension_headers_are_stepped_over(
    node: PacketNode, chain: str, protocol: Protocol
) -> None:
    web = web_of(V6, protocol)
    node.serve(web)
    flow = Flow(node, web)
    for plain, source, target, way in (
        (flow.asked(), V6.local[0], V6.client, flow.hears),
        (flow.answered(), V6.client, web.node_port, flow.tells),
    ):
        told = Told(*(_extended(packet, CHAINS[chain]) for packet in plain))
        whole = quotable(told.behind)
        short = len(whole) - len(bytes(told.before)) + 54  # up to where the chain begins
        out = way(error(V6, source.address, target.address, whole))
        quoted, wanted = quoted_in(out.packet, V6), quotable(told.before)
        if protocol is Protocol.SCTP:
            at = sum(len(bytes(header)) for header in CHAINS[chain])
            cut = IP_LENGTH[Family.IPV6] + at + SCTP_CRC.start
            quoted, wanted = quoted[:cut], wanted[:cut]
        assert quoted == wanted
        for length in range(short, IP_LENGTH[Family.IPV6] + 8 + L4_NEEDED):
            assert way(error(V6, source.address, target.address, whole[:length])).unchanged


def test_the_errors_own_extension_headers_are_stepped_over(node: PacketNode) -> None:
    web = web_of(V6)
    node.serve(web)
    flow = Flow(node, web)
    for told, source, target, way, there in (
        (flow.asked(), V6.local[0], V6.client, flow.hears, (web.node_port, V6.client)),
        (flow.answered(), V6.client, web.node_port, flow.tells, (V6.client, V6.local[0])),
    ):
        plain = error(V6, source.address, target.address, quotable(told.behind))
        out = way(_extended(plain, [IPv6ExtHdrHopByHop(), IPv6ExtHdrDestOpt()]))
        assert ends(out.packet) == (there[0].address, there[1].address)
        ip = bytes(without_ethernet(out.packet))
        message = ip[40 + 16 :]
        assert message[ICMP_LENGTH:] == quotable(told.before)
        assert ones_sum(pseudo_header(ip, len(message)) + message) == 0xFFFF


NOT_READ: dict[str, list[Packet]] = {
    "a routing header that is not used up": [IPv6ExtHdrRouting(segleft=1, addresses=["fd00::1"])],
    "the middle of a fragment": [IPv6ExtHdrFragment(offset=9, m=1, id=7)],
    "more headers than anybody sends": [IPv6ExtHdrDestOpt()] * 12,
}


@pytest.mark.parametrize("chain", NOT_READ)
def test_what_is_quoted_behind_other_headers_is_left_alone(node: PacketNode, chain: str) -> None:
    web = web_of(V6)
    node.serve(web)
    flow = Flow(node, web)
    quoted = quotable(_extended(flow.asked().behind, NOT_READ[chain]))
    assert flow.hears(error(V6, V6.local[0].address, V6.client.address, quoted)).unchanged


def test_quoted_udp_without_a_checksum_stays_without(node: PacketNode) -> None:
    """RFC 768: zero is none."""
    dns = web_of(V4, Protocol.UDP)
    node.serve(dns)
    flow = Flow(node, dns)
    asked = udp(V4.client, dns.node_port)
    asked[UDP].chksum = 0
    out = flow.talk.says(packet=asked)
    told = Told(out.was, out.packet)
    assert told.behind[UDP].chksum == 0
    packet = error(V4, V4.local[0].address, V4.client.address, quotable(told.behind))
    assert_mended(flow.hears(packet), told, V4, Protocol.UDP)


def test_a_quoted_udp_checksum_that_comes_out_as_zero_is_ones(node: PacketNode, net: Net) -> None:
    """RFC 768, RFC 8200: as zero it would be none."""
    dns = web_of(net, Protocol.UDP)
    node.serve(dns)
    flow = Flow(node, dns)
    bare = Ether(bytes(udp(net.client, dns.node_port, b"\0\0")))
    packet = udp(net.client, dns.node_port, bare[UDP].chksum.to_bytes(2))
    out = flow.talk.says(packet=packet)
    told = Told(out.was, out.packet)
    assert told.before[UDP].chksum == 0xFFFF
    out = flow.hears(error(net, net.local[0].address, net.client.address, quotable(told.behind)))
    assert_mended(out, told, net, Protocol.UDP)


def test_what_routers_change_on_the_way_is_told_as_they_tell_it(node: PacketNode, net: Net) -> None:
    """TTL, with or without the checksum that follows, and the traffic class."""
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    before, behind = flow.asked()
    for follows in (True, False):
        quoted = []
        for packet in (before, behind):
            ip = without_ethernet(packet).copy()
            if net.family is Family.IPV6:
                ip.hlim, ip.tc = 1, 0x88
            else:
                ip.ttl, ip.tos = 1, 0x88
                if follows:
                    ip.delfieldval("chksum")
            quoted.append(bytes(ip))
        out = flow.hears(error(net, ROUTER[net.family].address, net.client.address, quoted[1]))
        assert quoted_in(out.packet, net) == quoted[0]


def test_what_follows_the_quoted_packet_is_kept(node: PacketNode) -> None:
    """RFC 4884: extensions, for which what is quoted is filled up to 128 bytes."""
    web = web_of(V4)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.asked()
    extension = bytes.fromhex("2000dfff000801010001f101")
    quoted = quotable(told.behind).ljust(128, b"\0") + extension
    packet = error(V4, ROUTER[Family.IPV4].address, V4.client.address, quoted, "time exceeded")
    packet[ICMP].length = 32
    packet[ICMP].delfieldval("chksum")
    out = flow.hears(Ether(bytes(packet)))
    assert quoted_in(out.packet, V4) == quotable(told.before).ljust(128, b"\0") + extension
    assert out.packet[ICMP].length == 32


@pytest.mark.parametrize("sums_up", [True, False], ids=["summed up", "not summed up"])
def test_what_the_card_has_summed_up_stays_right(node: PacketNode, net: Net, sums_up: bool) -> None:
    """B-121: a veth never shows it."""
    if sums_up and not node.sums_up:
        pytest.skip("kernel lacks BPF_F_TEST_SKB_CHECKSUM_COMPLETE (6.16)")
    for protocol in Protocol:
        web = web_of(net, protocol)
        node.serve(web)
        flow = Flow(node, web)
        for told, source, target, way in (
            (flow.asked(), web.local[0], net.client, flow.hears),
            (flow.answered(), net.client, web.node_port, flow.tells),
        ):
            for length in (IP_LENGTH[net.family] + L4_NEEDED, QUOTES[net.family]):
                quoted = quotable(told.behind)[:length]
                out = way(error(net, source.address, target.address, quoted), sums_up=sums_up)
                assert_mended(out, told, net, protocol)


def test_an_error_whose_checksum_is_still_to_be_filled_in_stays_so(
    node: PacketNode, net: Net, wire: Wire
) -> None:
    """No stack leaves ICMP to the device, but a virtual machine may."""
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.asked()
    packet = error(net, web.local[0].address, net.client.address, quotable(told.behind))
    wanted = flow.hears(packet).packet
    at = 14 + IP_LENGTH[net.family]
    empty = bytearray(bytes(packet))
    empty[at + 2 : at + 4] = _seed(packet, net)
    data, unfinished = wire.leaves(
        node.programs["ebpflb_egress"], bytes(empty), sum_from=at, field=2
    )
    assert unfinished
    there = bytearray(bytes(wanted))
    there[at + 2 : at + 4] = _seed(wanted, net)
    assert data == bytes(there)


def _seed(packet: Packet, net: Net) -> bytes:
    """What a device begins with: the sum of IPv6's pseudo header."""
    if net.family is Family.IPV4:
        return bytes(2)
    ip = bytes(without_ethernet(packet))
    return ones_sum(pseudo_header(ip, len(ip) - 40)).to_bytes(2)


# --- not ours ----------------------------------------------------------------------------------


def everywhere(node: PacketNode, packet: Packet) -> Iterator[Out]:
    yield node.receives(packet, checks=False)
    yield node.sends(packet, checks=False)
    yield node.sends_own(packet, checks=False)


@by_protocol
def test_an_error_about_others_is_left_alone(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    web = web_of(net, protocol)
    node.serve(web)
    flow = Flow(node, web)
    make, what = MAKE[protocol], GOES_ON[protocol]
    strangers = [
        make(net.stranger.at(net.client.port), web.local[0], what),
        make(net.client.at(net.client.port + 1), web.local[0], what),
        make(net.client, web.local[0].at(9999), what),
        make(net.client, net.local[1], what),
        make(web.node_port.at(9999), net.client, what),
    ]
    for packet in strangers:
        ip = ip_of(packet)
        assert ip is not None
        for source in (ROUTER[net.family].address, ip.dst):
            for out in everywhere(node, error(net, source, ip.src, quotable(packet))):
                assert out.unchanged, out
    assert node.counted("ICMP_ERRORS") == 0
    assert flow.talk.is_home(flow.talk.answers(GOES_ON[protocol]))


@by_protocol
def test_at_the_other_hook_an_error_is_left_alone(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """It would be mended there for the wrong one: each side knows its own packets."""
    web = web_of(net, protocol)
    node.serve(web)
    flow = Flow(node, web)
    asked = quotable(flow.asked().behind)
    answered = quotable(flow.answered().behind)
    for source in (web.local[0].address, ROUTER[net.family].address):
        assert node.receives(error(net, source, net.client.address, asked)).unchanged
    for source in (net.client.address, ROUTER[net.family].address):
        packet = error(net, source, web.node_port.address, answered)
        assert node.sends(packet).unchanged
        assert node.sends_own(packet).unchanged


def test_an_error_about_the_untranslated_packet_is_left_alone(node: PacketNode, net: Net) -> None:
    """As netfilter's REJECT sends it: the client already knows what it is about."""
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    for told, source, target in (
        (flow.asked(), web.node_port, net.client),
        (flow.answered(), net.client, web.local[0]),
    ):
        packet = error(net, source.address, target.address, quotable(told.before))
        for out in everywhere(node, packet):
            assert out.unchanged


def test_an_error_for_somebody_else_than_who_sent_it_is_left_alone(
    node: PacketNode, net: Net
) -> None:
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    for told in (flow.asked(), flow.answered()):
        packet = error(net, ROUTER[net.family].address, net.stranger.address, quotable(told.behind))
        for out in everywhere(node, packet):
            assert out.unchanged


def test_an_error_about_an_answer_to_others_is_left_alone(node: PacketNode, net: Net) -> None:
    """K5: the node itself sends from a NodePort's number."""
    dns = web_of(net, Protocol.UDP)
    node.serve(dns)
    out = node.sends_own(udp(dns.node_port, net.stranger.at(53)))
    assert node.half("foreign")
    packet = error(net, net.stranger.address, net.node.address, quotable(out.packet))
    for out in everywhere(node, packet):
        assert out.unchanged


OTHERS: dict[Family, dict[str, Callable[[], Packet]]] = {
    Family.IPV4: {
        "a redirect": lambda: ICMP(type=5, code=1, gw="192.0.2.1"),
        "an echo reply": lambda: ICMP(type=0),
        "a time stamp": lambda: ICMP(type=13),
        "an unassigned type": lambda: ICMP(type=7),
    },
    Family.IPV6: {
        "an echo reply": ICMPv6EchoReply,
        "an unassigned type": lambda: ICMPv6DestUnreach(type=5),
        "type 0": lambda: ICMPv6DestUnreach(type=0),
        "a redirect": lambda: ICMPv6DestUnreach(type=137),
    },
}


@pytest.mark.parametrize(
    ("net", "name"),
    [(net, name) for net in NETS for name in OTHERS[net.family]],
    ids=[f"{net.family.label}, {name}" for net in NETS for name in OTHERS[net.family]],
)
def test_other_messages_are_left_alone(node: PacketNode, net: Net, name: str) -> None:
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.asked()
    packet = frame(
        web.local[0].address,
        net.client.address,
        OTHERS[net.family][name](),
        Raw(quotable(told.behind)),
    )
    for out in everywhere(node, packet):
        assert out.unchanged


def test_fragments_of_an_error_are_left_alone(node: PacketNode, net: Net) -> None:
    """Nobody sends any; all of them would have to be given the same source."""
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    told = flow.asked()
    packet = error(
        net, web.local[0].address, net.client.address, quotable(told.behind) + bytes(300)
    )
    for part in fragments(packet, size=256):
        for out in everywhere(node, part):
            assert out.unchanged


SPOILT: dict[str, Callable[[bytes, Net], bytes]] = {
    "another version": lambda q, net: _at(q, net, 0, 0, bytes([q[0] ^ 0x20])),
    "another protocol": lambda q, net: _at(q, net, 9, 6, b"\x2f"),
    "the other family's ICMP": lambda q, net: _at(q, net, 9, 6, b"\x3a"),
}


def _at(quoted: bytes, net: Net, ipv4: int, ipv6: int, value: bytes) -> bytes:
    at = ipv4 if net.family is Family.IPV4 else ipv6
    return quoted[:at] + value + quoted[at + len(value) :]


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_quoted_and_no_packet_of_ours_is_left_alone(
    node: PacketNode, net: Net, name: str
) -> None:
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    quoted = SPOILT[name](quotable(flow.asked().behind), net)
    for out in everywhere(node, error(net, web.local[0].address, net.client.address, quoted)):
        assert out.unchanged


@pytest.mark.parametrize("ihl", [*range(5), 15])
def test_a_quoted_header_of_no_length_is_left_alone(node: PacketNode, ihl: int) -> None:
    web = web_of(V4)
    node.serve(web)
    flow = Flow(node, web)
    quoted = bytearray(quotable(flow.asked().behind)[:60])
    quoted[0] = 0x40 | ihl
    packet = error(V4, V4.local[0].address, V4.client.address, bytes(quoted))
    assert flow.hears(packet).unchanged


def test_of_a_quoted_header_that_is_too_short_no_address_is_taken_for_ports(
    node: PacketNode,
) -> None:
    """Of four words, the target's address is where the ports would be."""
    address = ipaddress.ip_address(V4.local[0].address).packed
    client, backend = int.from_bytes(address[:2]), int.from_bytes(address[2:])
    web = Service(V4, local=(V4.local[0].at(backend),))
    node.serve(web)
    flow = Flow(node, web, client=V4.client.at(client))
    quoted = bytearray(quotable(flow.asked().behind))
    quoted[0] = 0x44
    packet = error(V4, V4.local[0].address, V4.client.address, bytes(quoted))
    assert flow.hears(packet).unchanged


@pytest.mark.parametrize("offset", [1, 0x1FFF])
def test_a_quoted_fragment_without_ports_is_left_alone(node: PacketNode, offset: int) -> None:
    web = web_of(V4)
    node.serve(web)
    flow = Flow(node, web)
    ip = without_ethernet(flow.asked().behind).copy()
    ip.frag = offset
    packet = error(V4, V4.local[0].address, V4.client.address, bytes(ip))
    assert flow.hears(packet).unchanged


def test_an_error_about_an_error_is_left_alone(node: PacketNode, net: Net) -> None:
    """RFC 1122, RFC 4443: there is none."""
    web = web_of(net)
    node.serve(web)
    flow = Flow(node, web)
    inner = error(net, net.client.address, web.local[0].address, quotable(flow.asked().behind))
    for out in everywhere(
        node, error(net, web.local[0].address, net.client.address, quotable(inner))
    ):
        assert out.unchanged


@by_protocol
def test_of_a_spoilt_error_only_addresses_ports_and_checksums_are_changed(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """And by as much as the checksums say: a wrong one stays as wrong as it was."""
    rng = random.Random(net.family.value * 1000 + protocol)
    web = web_of(net, protocol)
    node.serve(web)
    flow = Flow(node, web)
    start = 14 + IP_LENGTH[net.family]
    changed = 0
    for told, source, target, program in (
        (flow.asked(), web.local[0], net.client, "ebpflb_egress"),
        (flow.answered(), net.client, web.node_port, "ebpflb_ingress"),
    ):
        whole = bytes(error(net, source.address, target.address, quotable(told.behind)))
        for _ in range(400):
            spoilt = bytearray(whole)
            for _ in range(rng.randrange(1, 4)):
                spoilt[rng.randrange(start, len(spoilt))] = rng.randrange(256)
            data = bytes(spoilt)
            result = node.run_raw(program, data, came_in="pod2")
            assert result.verdict == Fate.PASSED
            if result.packet == data:
                continue
            changed += 1
            assert sums(result.packet[14:]) == sums(data[14:])
            assert result.packet[start : start + 2] == data[start : start + 2]
            assert result.packet[start + 4 : start + 8] == data[start + 4 : start + 8]
            assert len(result.packet) == len(data)
    assert changed > 100


# --- the node's own answers --------------------------------------------------------------------


def test_what_the_node_says_about_an_answer_is_left_alone(node: PacketNode, net: Net) -> None:
    """It leaves by the uplink for the frontend: the backend may be elsewhere."""
    dns = Service(net, Protocol.UDP, remote=net.remote[:1])
    node.serve(dns)
    flow = Flow(node, dns, frontend=dns.cluster_ip, own=True)
    told = flow.answered()
    packet = error(net, net.node.address, dns.cluster_ip.address, quotable(told.behind))
    assert flow.tells(packet).unchanged
    assert node.receives(packet, checks=False).unchanged


# --- ping --------------------------------------------------------------------------------------


def ping(net: Net, source: End, target: End, *, payload: bytes = b"are you there?") -> Packet:
    echo = (
        ICMPv6EchoRequest(id=7, seq=9, data=payload)
        if net.family is Family.IPV6
        else ICMP(type=8, id=7, seq=9) / Raw(payload)
    )
    packet = frame(source.address, target.address, echo)
    ip = ip_of(packet)
    assert ip is not None
    setattr(ip, "hlim" if net.family is Family.IPV6 else "ttl", 17)
    return Ether(bytes(packet))


def assert_answered(out: Out, net: Net) -> None:
    assert out.redirected
    before, after = ip_of(out.was), ip_of(out.packet)
    assert before is not None
    assert after is not None
    assert (after.src, after.dst) == (before.dst, before.src)
    if net.family is Family.IPV6:
        reply, request = after[ICMPv6EchoReply], before[ICMPv6EchoRequest]
        assert (reply.id, reply.seq, reply.data) == (request.id, request.seq, request.data)
        assert after.hlim == 64
    else:
        reply, request = after[ICMP], before[ICMP]
        assert (reply.type, reply.code) == (0, 0)
        assert bytes(reply)[4:] == bytes(request)[4:]
        assert after.ttl == 64
    assert len(bytes(out.packet)) == len(bytes(out.was))


ADDRESSES = [kind for kind in FrontendKind if kind is not FrontendKind.NODE_PORT]


@pytest.mark.parametrize("kind", ADDRESSES, ids=lambda kind: kind.value)
@pytest.mark.parametrize("size", [0, 1, 56, 1400])
def test_a_ping_of_a_service_is_answered(
    node: PacketNode, net: Net, kind: FrontendKind, size: int
) -> None:
    web = web_of(net)
    node.serve(web)
    out = node.receives(
        ping(net, net.client, web.frontend(kind), payload=bytes(range(256)) * 6)
        if size == 1400
        else ping(net, net.client, web.frontend(kind), payload=b"x" * size)
    )
    assert_answered(out, net)
    assert (out.packet.src, out.packet.dst) == (DEVICE_MAC, PEER_MAC)
    assert node.counted("PINGS") == 1
    assert not node.flows()


def test_the_nodes_own_ping_is_answered(node: PacketNode, net: Net) -> None:
    web = web_of(net)
    node.serve(web)
    packet = ping(net, net.node, web.cluster_ip)
    out = node.sends_own(packet)
    assert_answered(out, net)
    assert (out.packet.src, out.packet.dst) == (packet.dst, packet.src)


def test_what_the_node_forwards_is_not_answered_where_it_leaves(node: PacketNode, net: Net) -> None:
    """Where it came in it was, if that is a device of ours."""
    web = web_of(net)
    node.serve(web)
    assert node.sends(ping(net, net.client, web.external_ip)).unchanged


def test_a_pod_behind_a_bridge_is_answered(node: PacketNode, net: Net) -> None:
    """Its frames are for the bridge, whose address the bridge's port does not have."""
    web = web_of(net)
    node.serve(web)
    packet = ping(net, net.pod, web.cluster_ip)
    packet.dst = "02:00:00:00:00:77"
    assert node.receives(packet, "bridged").unchanged
    node.has_role("bridged", "BRIDGED")
    out = node.receives(packet, "bridged")
    assert_answered(out, net)
    assert (out.packet.src, out.packet.dst) == (packet.dst, packet.src)


@pytest.mark.parametrize(
    "mac",
    ["02:00:00:00:00:77", "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01"],
    ids=["for another", "for all", "for many"],
)
def test_a_frame_for_others_is_not_answered(node: PacketNode, net: Net, mac: str) -> None:
    """A switch floods what it does not know: whose it is will answer, and not every node."""
    web = web_of(net)
    node.serve(web)
    packet = ping(net, net.client, web.load_balancer)
    packet.dst = mac
    assert node.receives(packet).unchanged
    if mac != "02:00:00:00:00:77":
        node.has_role("uplink", "BRIDGED")
        assert node.receives(packet).unchanged


def test_a_device_without_an_ethernet_header_answers(node: PacketNode, net: Net) -> None:
    """Of such an address that bytes 12 and 13 of the packet are an EtherType to a test run."""
    web = web_of(net)
    node.serve(web)
    v6 = net.family is Family.IPV6
    client = End("2001:db8:86dd::9" if v6 else "8.0.60.9")
    out = node.receives(ping(net, client, web.cluster_ip), "tun")
    assert out.redirected
    assert ends(out.packet) == (web.cluster_ip.address, client.address)


def test_without_an_endpoint_nobody_answers(node: PacketNode, net: Net) -> None:
    web = Service(net)
    node.serve(web)
    for kind in FrontendKind:
        assert node.receives(ping(net, net.client, web.frontend(kind))).unchanged


def test_what_is_nobodys_is_not_answered(node: PacketNode, net: Net) -> None:
    """The node's own address, another one of the Services' range, a pod's."""
    web = web_of(net)
    node.serve(web)
    targets = (net.node, End(net.cluster_ip(99)), net.local[0], net.stranger)
    for target in targets:
        packet = ping(net, net.client, target)
        assert node.receives(packet).unchanged
        assert node.sends_own(packet).unchanged
    assert node.counted("PINGS") == 0


def test_it_can_be_switched_off(node: PacketNode, net: Net) -> None:
    web = web_of(net)
    node.serve(web)
    node.state("SEES_PODS", "SEES_HOST")
    packet = ping(net, net.client, web.cluster_ip)
    assert node.receives(packet).unchanged
    assert node.sends_own(packet).unchanged


def test_an_answer_is_not_answered(node: PacketNode, net: Net) -> None:
    """Also not from one Service's address to another's."""
    web, other = web_of(net), web_of(net, number=1)
    node.serve(web, other)
    out = node.receives(ping(net, other.cluster_ip, web.cluster_ip))
    assert_answered(out, net)
    assert node.sends_own(out.packet).unchanged
    assert node.receives(out.packet).unchanged


def test_a_ping_in_fragments_is_not_answered(node: PacketNode, net: Net) -> None:
    web = web_of(net)
    node.serve(web)
    for part in fragments(ping(net, net.client, web.cluster_ip, payload=bytes(1200))):
        out = node.receives(part)
        assert not out.redirected
    assert node.counted("PINGS") == 0


def test_a_ping_with_options_is_not_answered(node: PacketNode) -> None:
    """They may ask for a way back, or for the way of the answer."""
    web4, web6 = web_of(V4), web_of(V6, number=1)
    node.serve(web4, web6)
    packet = _with_options(ping(V4, V4.client, web4.cluster_ip), [IPOption_RR(routers=["0.0.0.0"])])
    assert node.receives(packet).unchanged
    packet = _extended(ping(V6, V6.client, web6.cluster_ip), [IPv6ExtHdrHopByHop()])
    assert node.receives(packet).unchanged


@pytest.mark.parametrize("sums_up", [True, False], ids=["summed up", "not summed up"])
def test_a_pings_sum_stays_right(node: PacketNode, net: Net, sums_up: bool) -> None:
    if sums_up and not node.sums_up:
        pytest.skip("kernel lacks BPF_F_TEST_SKB_CHECKSUM_COMPLETE (6.16)")
    web = web_of(net)
    node.serve(web)
    for size in (0, 1, 2, 57):
        packet = ping(net, net.client, web.cluster_ip, payload=b"y" * size)
        assert_answered(node.receives(packet, sums_up=sums_up), net)


@pytest.mark.parametrize(
    "checksum", [0x0000, 0x0001, 0x07FF, 0x0800, 0xF7FF, 0xF800, 0xFFFE], ids=hex
)
def test_a_pings_checksum_may_be_anything(node: PacketNode, checksum: int) -> None:
    """RFC 1624: carries, and the two zeros of one's complement."""
    web = web_of(V4)
    node.serve(web)
    bare = ping(V4, V4.client, web.cluster_ip, payload=b"\0\0")
    total = (bare[ICMP].chksum ^ 0xFFFF, checksum ^ 0xFFFF)
    payload = (total[1] - total[0]) % 0xFFFF
    packet = ping(V4, V4.client, web.cluster_ip, payload=payload.to_bytes(2))
    assert packet[ICMP].chksum == checksum
    assert_answered(node.receives(packet), V4)


def test_a_ping_is_no_tcp(node: PacketNode, net: Net) -> None:
    """What is beside it in the same address goes its own way."""
    web = web_of(net)
    node.serve(web)
    assert_answered(node.receives(ping(net, net.client, web.cluster_ip)), net)
    assert node.receives(tcp(net.client, web.cluster_ip)).target == web.local[0]
    assert node.receives(ping(net, net.client, web.cluster_ip)).fate is Fate.REDIRECTED
    assert TCP in node.receives(tcp(net.client, web.cluster_ip)).packet
