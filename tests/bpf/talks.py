"""A client's conversation with a Service, packet by packet, and what netfilter adds to it.

A ``Talk`` sends what the client says through the program that meets it first, and what the backend
answers through the one that meets it last. A ``Netfilter`` is the node's one MASQUERADE rule, with
just enough connection tracking to bring replies back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from scapy.packet import Packet

from ebpflb.model import Protocol
from tests.bpf.node import MASQUERADE, Out, PacketNode, Service
from tests.bpf.packets import End, ends_of, ip_of, l4_of, parse, tcp, udp

Make = Callable[[End, End, str], Packet]
"""A packet from one to the other; what it says is the protocol's own word, "SA" for TCP."""


def make_tcp(source: End, target: End, what: str) -> Packet:
    return tcp(source, target, what, payload=b"data" if "P" in what else b"")


def make_udp(source: End, target: End, what: str) -> Packet:
    return udp(source, target, what.encode() or b"hello")


MAKES: dict[Protocol, Make] = {Protocol.TCP: make_tcp, Protocol.UDP: make_udp}


class Talk:
    """``backend`` is whom the client's last packet went to, ``seen_as`` what it came from there.

    ``own``: the client is a process of the node. ``make`` makes the packets.
    """

    def __init__(
        self,
        node: PacketNode,
        client: End,
        frontend: End,
        make: Make = make_tcp,
        *,
        on: str = "uplink",
        own: bool = False,
    ) -> None:
        self._node = node
        self._make = make
        self._on = on
        self._own = own
        self.client = client
        self.frontend = frontend
        self.backend = End("")
        self.seen_as = End("")

    def says(self, what: str = "", packet: Packet | None = None, **options: Any) -> Out:
        """The client's next packet; to be answered it must pass."""
        packet = packet or self._make(self.client, self.frontend, what)
        out = (self._node.sends_own if self._own else self._node.receives)(
            packet, self._on, **options
        )
        self.seen_as, self.backend = out.source, out.target
        return out

    def answers(self, what: str = "", packet: Packet | None = None, **options: Any) -> Out:
        """The backend's next packet, to whom it has heard from."""
        packet = packet or self._make(self.backend, self.seen_as, what)
        if self._own:
            return self._node.receives(packet, self._on, **options)
        return self._node.sends(packet, self._on, came_in="pod2", **options)

    def is_home(self, out: Out) -> bool:
        """Whether an answer reaches the client as one from whom it dialled."""
        return out.passed and (out.source, out.target) == (self.frontend, self.client)

    def opens(self) -> End:
        """A whole beginning: three packets of TCP, two of all else. Returns the backend."""
        is_tcp = self._make is make_tcp
        says = self.says("S" if is_tcp else "")
        assert says.target != self.frontend, says
        back = self.answers("SA" if is_tcp else "")
        assert self.is_home(back), back
        backend = self.backend
        if is_tcp:
            self.says("A")
            assert self.backend == backend
        return backend

    def lives(self) -> bool:
        """Whether a packet each way still goes where all before have gone."""
        before = self.backend
        what = "PA" if self._make is make_tcp else ""
        self.says(what)
        return self.backend == before and self.is_home(self.answers(what))


def talks_to(
    node: PacketNode, service: Service, client: End | None = None, frontend: End | None = None
) -> Talk:
    """A talk with a Service, by default an outside client's with its NodePort."""
    return Talk(
        node, client or service.net.client, frontend or service.node_port, MAKES[service.protocol]
    )


def clients(client: End, first: int = 41000) -> Iterator[End]:
    """The same client, from one port after the other."""
    return map(client.at, itertools.count(first))


class Netfilter:
    """The node's MASQUERADE rule: marked packets leave with its address, replies come back."""

    def __init__(self, address: End) -> None:
        self._address = address
        self._ports = itertools.count(50000)
        self._there: dict[tuple[End, End], End] = {}
        self._back: dict[tuple[End, End], End] = {}

    def leaves(self, out: Out) -> Packet:
        """What goes on after POSTROUTING."""
        source, target = out.source, out.target
        if not out.mark & MASQUERADE:
            return out.packet
        if (source, target) not in self._there:
            seen_as = self._address.at(next(self._ports))
            self._there[source, target] = seen_as
            self._back[target, seen_as] = source
        return moved(out.packet, source=self._there[source, target])

    def comes_back(self, out: Out) -> Packet:
        """What goes on after PREROUTING."""
        client = self._back.get((out.source, out.target))
        return moved(out.packet, target=client) if client else out.packet


def moved(packet: Packet, *, source: End | None = None, target: End | None = None) -> Packet:
    """The packet from or to another end, its checksums made anew."""
    whole = packet.copy()
    was_source, was_target = ends_of(whole)
    ip, l4 = ip_of(whole), l4_of(whole)
    assert ip is not None
    assert l4 is not None
    (ip.src, l4.sport), (ip.dst, l4.dport) = source or was_source, target or was_target
    for layer in (ip, l4):
        if "chksum" in layer.fields:
            layer.delfieldval("chksum")
    return parse(bytes(whole))
