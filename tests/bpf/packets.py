"""Packets as scapy makes them, and who is who in them.

Addresses are the lab's plan (ebpflb/lab/addresses.py). An ``End`` is an address and a port. Here is
nothing of programs or maps: a packet goes in and out of a PacketNode (node.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment, _ICMPv6
from scapy.layers.l2 import Dot1AD, Dot1Q, Ether
from scapy.layers.sctp import SCTP
from scapy.packet import NoPayload, Packet, Raw

from ebpflb.lab.addresses import (
    external_ipv4,
    external_ipv6,
    node_ipv4,
    node_ipv6,
    pod_ipv4,
    pod_ipv6,
)
from ebpflb.model import Family
from tests.builders import cluster_ip

DEVICE_MAC = "02:00:00:00:00:01"
PEER_MAC = "02:00:00:00:00:02"

VLAN_TYPES = (0x8100, 0x88A8)


class End(NamedTuple):
    """Whom a packet comes from, or goes to; a port is 0 where there is none."""

    address: str
    port: int = 0

    def at(self, port: int) -> End:
        return End(self.address, port)

    def __str__(self) -> str:
        return f"[{self.address}]:{self.port}" if ":" in self.address else ":".join(map(str, self))


class Net(NamedTuple):
    """The addresses of one family. Clients dial from port 40000, backends listen on 8080."""

    family: Family

    def _pick(self, ipv4: str, ipv6: str) -> str:
        return ipv6 if self.family is Family.IPV6 else ipv4

    def _node(self, number: int) -> str:
        return self._pick(node_ipv4(number), node_ipv6(number))

    def client_number(self, number: int) -> End:
        return End(self._pick(external_ipv4(number), external_ipv6(number)), 40000)

    def pod_number(self, node: int, number: int, port: int = 8080) -> End:
        return End(self._pick(pod_ipv4(node, number), pod_ipv6(node, number)), port)

    @property
    def client(self) -> End:
        """Outside of the cluster, behind the uplink."""
        return self.client_number(1)

    @property
    def stranger(self) -> End:
        """Another one."""
        return self.client_number(2)

    @property
    def node(self) -> End:
        """The node under test."""
        return End(self._node(1), 40000)

    @property
    def other_node(self) -> End:
        return End(self._node(2), 40000)

    @property
    def pod(self) -> End:
        """A pod of this node that dials."""
        return self.pod_number(1, 2, 40000)

    @property
    def local(self) -> tuple[End, End]:
        """Backends on this node."""
        return self.pod_number(1, 10), self.pod_number(1, 11)

    @property
    def remote(self) -> tuple[End, End]:
        """Backends on the other node."""
        return self.pod_number(2, 10), self.pod_number(2, 11)

    def cluster_ip(self, number: int) -> str:
        return cluster_ip(10 + number, self.family)

    def external_ip(self, number: int) -> str:
        return self._pick(f"198.51.100.{1 + number}", f"2001:db8:51::{1 + number:x}")

    def balancer_ip(self, number: int) -> str:
        return self._pick(f"203.0.113.{1 + number}", f"2001:db8:113::{1 + number:x}")

    @property
    def pods(self) -> str:
        """The cluster's pods."""
        return self._pick("10.244.0.0/16", "fd00:244::/32")

    @property
    def bits(self) -> int:
        return 128 if self.family is Family.IPV6 else 32

    @property
    def ip(self) -> type[Packet]:
        return IPv6 if self.family is Family.IPV6 else IP


NETS = tuple(map(Net, Family))


# --- making ------------------------------------------------------------------------------------


def frame(source: str, target: str, *payload: Packet) -> Packet:
    """An Ethernet frame with an IP packet of these layers."""
    ip = IPv6(src=source, dst=target) if ":" in source else IP(src=source, dst=target, id=7)
    packet: Packet = Ether(src=PEER_MAC, dst=DEVICE_MAC) / ip
    for layer in payload:
        packet /= layer
    return packet


def tcp(
    source: End,
    target: End,
    flags: str = "S",
    *,
    isn: int = 1000,
    ack: int = 0,
    payload: bytes = b"",
) -> Packet:
    """A segment; ``isn`` is its sequence number."""
    segment = TCP(sport=source.port, dport=target.port, flags=flags, seq=isn, ack=ack)
    return frame(source.address, target.address, segment, *_raw(payload))


def udp(source: End, target: End, payload: bytes = b"hello") -> Packet:
    """A datagram."""
    return frame(
        source.address, target.address, UDP(sport=source.port, dport=target.port), *_raw(payload)
    )


def _raw(payload: bytes) -> Sequence[Packet]:
    return [Raw(payload)] if payload else []


def reply_to(packet: Packet, *layers: Packet) -> Packet:
    """A packet back where this one came from, with these layers (their ports are filled in)."""
    source, target = ends_of(packet)
    for layer in layers:
        if isinstance(layer, (TCP, UDP, SCTP)):
            layer.sport, layer.dport = target.port, source.port
    return frame(target.address, source.address, *layers)


def tagged(packet: Packet, *vlans: int, type_: int = 0x8100) -> Packet:
    """The same frame with a tag for each VLAN id (0: a priority tag), the outermost first."""
    ether = packet.copy()
    inner = ether.payload
    ether.remove_payload()
    ether.type = type_
    for i, vlan in enumerate(vlans):
        kind = Dot1AD if type_ == 0x88A8 and i == 0 else Dot1Q
        ether /= kind(vlan=vlan, prio=5)
    if vlans and isinstance(inner, IPv6):
        ether.lastlayer().type = 0x86DD
    return ether / inner


def without_ethernet(packet: Packet) -> Packet:
    """What a device without an Ethernet header has of it."""
    payload: Packet = packet[Ether].payload
    return payload


# --- reading -----------------------------------------------------------------------------------


def parse(data: bytes, *, ethernet: bool = True) -> Packet:
    if ethernet:
        return Ether(data)
    return IPv6(data) if data[:1] and data[0] >> 4 == 6 else IP(data)


def ip_of(packet: Packet) -> Packet | None:
    """Its outermost IP header."""
    for layer in layers_of(packet):
        if type(layer) in (IP, IPv6):
            return layer
    return None


def l4_of(packet: Packet) -> Packet | None:
    """Its own TCP, UDP or SCTP header: not one that an ICMP error quotes."""
    for layer in layers_of(packet):
        if type(layer) in (TCP, UDP, SCTP):
            return layer
    return None


def layers_of(packet: Packet) -> list[Packet]:
    found = []
    layer = packet
    while not isinstance(layer, NoPayload):
        found.append(layer)
        layer = layer.payload
    return found


def ends_of(packet: Packet) -> tuple[End, End]:
    """From whom, and to whom."""
    ip, l4 = ip_of(packet), l4_of(packet)
    assert ip is not None, packet.summary()
    ports = (l4.sport, l4.dport) if l4 else (0, 0)
    return End(ip.src, ports[0]), End(ip.dst, ports[1])


def is_fragment(packet: Packet) -> bool:
    ip = ip_of(packet)
    if isinstance(ip, IP):
        return bool(ip.frag or "MF" in str(ip.flags))
    return IPv6ExtHdrFragment in packet


def wrong_checksums(packet: Packet, *, ethernet: bool = True) -> list[str]:
    """The checksums that scapy finds otherwise; a UDP/IPv4 checksum of 0 is none (RFC 768).

    Of a fragment only the IP header's: the others are of the whole (see ``reassembled``). What an
    ICMP error quotes is part of its payload.
    """
    fresh = packet.copy()
    names = {}
    for layer in layers_of(fresh):
        if isinstance(layer, _ICMPv6):
            name = "cksum"
        elif type(layer) in (IP, TCP, UDP, SCTP, ICMP):
            name = "chksum"
        else:
            continue
        if not isinstance(layer, IP) and is_fragment(packet):
            continue
        if type(layer) is UDP and not layer.chksum and type(ip_of(packet)) is IP:
            continue
        names[type(layer)] = name
        layer.delfieldval(name)
        layer.clear_cache()
    again = parse(bytes(fresh), ethernet=ethernet)
    return [
        f"{kind.__name__} checksum is {packet[kind].getfieldval(name):#x}, "
        f"should be {again[kind].getfieldval(name):#x}"
        for kind, name in names.items()
        if packet[kind].getfieldval(name) != again[kind].getfieldval(name)
    ]


# --- fragments ---------------------------------------------------------------------------------


def fragments(packet: Packet, *, size: int = 512, id_: int = 77) -> list[Packet]:
    """The frame in fragments of ``size`` bytes of payload, which is a multiple of eight."""
    whole = parse(bytes(packet))
    ip = ip_of(whole)
    assert ip is not None
    data = bytes(ip.payload)
    parts: list[Packet] = []
    for at in range(0, len(data), size):
        more = at + size < len(data)
        part = data[at : at + size]
        if isinstance(ip, IP):
            head: Packet = IP(
                src=ip.src,
                dst=ip.dst,
                id=id_,
                proto=ip.proto,
                ttl=ip.ttl,
                flags="MF" if more else 0,
                frag=at // 8,
            )
        else:
            head = IPv6(src=ip.src, dst=ip.dst) / IPv6ExtHdrFragment(
                nh=ip.nh, offset=at // 8, m=int(more), id=id_
            )
        made = Ether(src=whole.src, dst=whole.dst) / head / Raw(part)
        parts.append(Ether(bytes(made)))
    return parts


def reassembled(parts: Sequence[Packet]) -> Packet:
    """The frame whose fragments these are, in order."""
    first = parts[0].copy()
    data = b"".join(_fragment_data(part) for part in parts)
    ip = ip_of(first)
    if isinstance(ip, IP):
        head: Packet = IP(src=ip.src, dst=ip.dst, id=ip.id, proto=ip.proto, ttl=ip.ttl)
    else:
        assert ip is not None
        head = IPv6(src=ip.src, dst=ip.dst, nh=first[IPv6ExtHdrFragment].nh, hlim=ip.hlim)
    return Ether(bytes(Ether(src=first.src, dst=first.dst) / head / Raw(data)))


def _fragment_data(part: Packet) -> bytes:
    head = part[IPv6ExtHdrFragment] if IPv6ExtHdrFragment in part else ip_of(part)
    assert head is not None
    return bytes(head.payload)
