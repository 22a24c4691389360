# SPDX-License-Identifier: Apache-2.0
"""Which network devices get programs, and as what: a decision over what the kernel knows of them.

Uplinks are where clients from outside come in; pods' devices are this node's ends of the devices
that pods have. All others (loopback, tunnels, bridges) are left alone: what passes them has passed
one of those already, or will. This file must not know how a program is attached.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from ebpflb import netlink
from ebpflb.datapath.ebpf import abi
from ebpflb.kernelwatch import KernelWatch, Notice
from ebpflb.model import Address, PodDetector

_SETTLE_S: Final = 0.02
"""A pod's device gets its address, its route and its state at once, and its first packet soon."""


class Header(enum.Enum):
    """What a packet begins with where a program sees it."""

    ETHERNET = "ethernet"
    NONE = "none"  # the IP header is first
    OTHER = "other"  # one that no program of ours reads


class Link(NamedTuple):
    """A network device. ``kind`` is the kernel's word, "" for hardware; ``master`` 0 is none."""

    number: int
    name: str
    kind: str
    type: int
    master: int
    is_up: bool
    mac: bytes

    @property
    def header(self) -> Header:
        if self.type in _WITHOUT_HEADER:
            return Header.NONE
        return Header.ETHERNET if self.type == _ARPHRD_ETHER else Header.OTHER


class Held(NamedTuple):
    """An address of a device; ``is_global``: others than its neighbours may know it."""

    device: int
    address: Address
    is_global: bool


class Seen(NamedTuple):
    """What there is.

    ``defaults`` are the devices with a default route, ``hosts`` those with a route to a single
    address that is directly behind them.
    """

    links: frozenset[Link] = frozenset()
    addresses: frozenset[Held] = frozenset()
    defaults: frozenset[int] = frozenset()
    hosts: frozenset[int] = frozenset()


class Wanted(NamedTuple):
    """What a decision depends on besides. Patterns are shell patterns of names; None: find out.

    ``node_addresses`` are those that the Node is known by, ``detector`` tells pods.
    """

    uplinks: tuple[str, ...] | None = None
    pods: tuple[str, ...] | None = None
    node_addresses: frozenset[Address] = frozenset()
    detector: PodDetector = PodDetector()


class Device(NamedTuple):
    """A device that gets programs.

    ``is_uplink``: of the outside; else of a pod. ``is_bridged``: a bridge may send what it receives
    past netfilter. ``is_told_pod``: what comes in here counts as local pods' (MASQ-09).
    """

    number: int
    name: str
    header: Header
    is_up: bool
    mac: bytes
    is_uplink: bool
    is_bridged: bool
    is_told_pod: bool

    @property
    def roles(self) -> frozenset[int]:
        """Those of `devices`."""
        found = (
            (self.is_uplink, "DEVICE_UPLINK"),
            (self.is_bridged, "DEVICE_BRIDGED"),
            (self.is_told_pod, "DEVICE_POD"),
        )
        return frozenset(abi.CONSTANTS[name] for is_so, name in found if is_so)


_ARPHRD_ETHER: Final = 1
_ARPHRD_LOOPBACK: Final = 772
# ppp, raw IP, ipip, ip6tnl, sit, gre, ip6gre, none (tun, wireguard), void: as the kernel's
# dev_is_mac_header_xmit() has it.
_WITHOUT_HEADER: Final = frozenset({512, 519, 768, 769, 776, 778, 823, 0xFFFE, 0xFFFF})

_OF_PODS: Final = frozenset({"veth", "tun", "netkit"})
_TUNNELS: Final = frozenset(
    {
        *("vxlan", "geneve", "bareudp", "gtp", "wireguard", "xfrm", "vti", "vti6", "ppp"),
        *("ipip", "sit", "gre", "gretap", "erspan", "ip6tnl", "ip6gre", "ip6gretap", "ip6erspan"),
    }
)
_NEVER_OF_PODS: Final = _TUNNELS | {"bond", "bridge", "dummy", "ifb", "team", "vrf"}


def decide(seen: Seen, wanted: Wanted) -> tuple[Device, ...]:
    """The devices that get programs, by their number.

    Uplinks have an address of the Node, or a default route. Where no device has an address of the
    Node, any global one will do, unless it is a tunnel's or a bridge's, which mostly is the pods'.
    """
    links = {link.number: link for link in seen.links if link.type != _ARPHRD_LOOPBACK}
    uplinks = _uplinks(links.values(), seen, wanted)
    found = []
    for number, link in sorted(links.items()):
        is_uplink = number in uplinks
        bridge = links.get(link.master)
        if bridge and (bridge.kind != "bridge" or bridge.number in uplinks):
            bridge = None
        if is_uplink or _is_of_pods(link, seen, wanted, is_bridged=bridge is not None):
            found.append(
                Device(
                    number=number,
                    name=link.name,
                    header=link.header,
                    is_up=link.is_up,
                    mac=link.mac,
                    is_uplink=is_uplink,
                    is_bridged=bridge is not None and not is_uplink,
                    # netfilter's input device, by which kube-proxy tells, is the bridge.
                    is_told_pod=_is_told_pod((bridge or link).name, wanted.detector),
                )
            )
    return tuple(found)


def _uplinks(links: Iterable[Link], seen: Seen, wanted: Wanted) -> frozenset[int]:
    if wanted.uplinks is not None:
        return frozenset(link.number for link in links if _matches(link.name, wanted.uplinks))
    homes = {one.device for one in seen.addresses if one.address in wanted.node_addresses}
    if not homes:
        others = _with_global_address(seen)
        homes = {
            link.number
            for link in links
            if link.number in others
            and link.kind not in _TUNNELS | {"bridge", "dummy"}
            and not (link.kind in _OF_PODS and link.number in seen.hosts)
        }
    return frozenset(link.number for link in links if link.number in seen.defaults | homes)


def _is_of_pods(link: Link, seen: Seen, wanted: Wanted, *, is_bridged: bool) -> bool:
    if wanted.pods is not None:
        return _matches(link.name, wanted.pods)
    if is_bridged:
        return link.kind in _OF_PODS
    if link.number not in seen.hosts or link.kind in _NEVER_OF_PODS:
        return False
    return link.kind in _OF_PODS or link.number not in _with_global_address(seen)


def _with_global_address(seen: Seen) -> frozenset[int]:
    return frozenset(one.device for one in seen.addresses if one.is_global)


def _is_told_pod(name: str, detector: PodDetector) -> bool:
    if detector.bridge:
        return name == detector.bridge
    return bool(detector.device_prefix) and name.startswith(detector.device_prefix)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# --- what there is -------------------------------------------------------------------------------

_RTM_NEWROUTE: Final = 24
_RTM_DELROUTE: Final = 25
_RTM_GETLINK: Final = 18
_RTM_GETADDR: Final = 22
_RTM_GETROUTE: Final = 26
_GROUPS: Final = 0x1 | 0x10 | 0x40 | 0x100 | 0x400  # links, addresses and routes of both families

_IFINFOMSG: Final = struct.Struct("=BxHiII")  # family, type, index, flags, change
_IFADDRMSG: Final = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface
_RTMSG: Final = struct.Struct("=8BI")  # family, lengths, tos, table, protocol, scope, type, flags
_NEXT_HOP: Final = struct.Struct("=HBBi")  # length, flags, weight, interface
_U32: Final = struct.Struct("=I")

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_EXT_MASK = 1, 3, 10, 18, 29
_IFLA_INFO_KIND: Final = 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_MULTIPATH, _RTA_VIA = 1, 4, 5, 9, 18

_RTEXT_FILTER_SKIP_STATS: Final = 8
_IFF_UP: Final = 1
_RT_SCOPE_UNIVERSE: Final = 0
_RT_TABLE_LOCAL: Final = 255
_RTN_UNICAST: Final = 1
_RTM_F_CLONED: Final = 0x200
_ADDRESS_BITS: Final[Mapping[int, int]] = {socket.AF_INET: 32, socket.AF_INET6: 128}

# A route's message has the length of its target as its 17th byte and its type as its 23rd; of
# others than those to everywhere and to a single address, which may be many, nothing is told.
_ONLY_OUR_ROUTES: Final = (
    (0x28, 0, 0, 4),  # load the message's type
    (0x15, 2, 0, socket.htons(_RTM_NEWROUTE)),
    (0x15, 1, 0, socket.htons(_RTM_DELROUTE)),
    (0x06, 0, 0, 0xFFFFFFFF),  # no route: take it
    (0x30, 0, 0, 17),  # load the length
    (0x15, 3, 0, 0),
    (0x15, 2, 0, 32),
    (0x15, 1, 0, 128),
    (0x06, 0, 0, 0),  # leave it
    (0x06, 0, 0, 0xFFFFFFFF),  # take it
)


def look() -> Seen:
    """Ask the kernel, in the network namespace of the calling thread. Raises OSError."""
    with netlink.opened() as kernel:
        links = frozenset(_links(kernel))
        addresses = frozenset(_addresses(kernel))
        own = frozenset(one.address for one in addresses)
        defaults: set[int] = set()
        hosts: set[int] = set()
        for family, bits in _ADDRESS_BITS.items():
            for route in _routes(kernel, family):
                if route.length == 0:
                    defaults |= route.devices
                elif route.length == bits and route.is_direct and route.target not in own:
                    hosts |= route.devices
    return Seen(links, addresses, frozenset(defaults), frozenset(hosts))


def _links(kernel: socket.socket) -> Iterator[Link]:
    asked = _IFINFOMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
    asked += netlink.attribute(_IFLA_EXT_MASK, _U32.pack(_RTEXT_FILTER_SKIP_STATS))
    for body in netlink.dump(kernel, _RTM_GETLINK, asked):
        _, kind, number, flags, _ = _IFINFOMSG.unpack_from(body)
        found = dict(netlink.attributes(body[_IFINFOMSG.size :]))
        info = dict(netlink.attributes(found.get(_IFLA_LINKINFO, b"")))
        yield Link(
            number=number,
            name=_text(found.get(_IFLA_IFNAME, b"")),
            kind=_text(info.get(_IFLA_INFO_KIND, b"")),
            type=kind,
            master=_U32.unpack(found.get(_IFLA_MASTER, bytes(4)))[0],
            is_up=bool(flags & _IFF_UP),
            mac=found.get(_IFLA_ADDRESS, b""),
        )


def _addresses(kernel: socket.socket) -> Iterator[Held]:
    for body in netlink.dump(kernel, _RTM_GETADDR, bytes(_IFADDRMSG.size)):
        family, _, _, scope, index = _IFADDRMSG.unpack_from(body)
        found = dict(netlink.attributes(body[_IFADDRMSG.size :]))
        address = netlink.address(family, found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS))
        if address is not None:
            yield Held(index, address, scope == _RT_SCOPE_UNIVERSE)


class _Route(NamedTuple):
    """``is_direct``: what it leads to is behind the device itself, not behind a gateway."""

    target: Address | None
    length: int
    devices: frozenset[int]
    is_direct: bool


def _routes(kernel: socket.socket, family: int) -> Iterator[_Route]:
    """Those to everywhere or to a single address, of any table but the one of local ones."""
    try:
        bodies = netlink.dump(kernel, _RTM_GETROUTE, _RTMSG.pack(family, *([0] * 8)))
    except OSError as error:
        if error.errno in netlink.HAS_NONE:
            return
        raise
    lengths = (0, _ADDRESS_BITS[family])
    for body in bodies:
        if body[1] not in lengths:  # quickly: a router's node may have a million of the others
            continue
        _, length, _, _, table, _, _, kind, flags = _RTMSG.unpack_from(body)
        if table == _RT_TABLE_LOCAL or kind != _RTN_UNICAST or flags & _RTM_F_CLONED:
            continue
        found = dict(netlink.attributes(body[_RTMSG.size :]))
        devices = frozenset(_U32.unpack(found[_RTA_OIF]) if _RTA_OIF in found else ())
        yield _Route(
            target=netlink.address(family, found.get(_RTA_DST)),
            length=length,
            devices=devices | frozenset(_next_hops(found.get(_RTA_MULTIPATH, b""))),
            is_direct=not found.keys() & {_RTA_GATEWAY, _RTA_VIA, _RTA_MULTIPATH},
        )


def _next_hops(data: bytes) -> Iterator[int]:
    """The devices of a route that has several."""
    at = 0
    while at + _NEXT_HOP.size <= len(data):
        length, _, _, index = _NEXT_HOP.unpack_from(data, at)
        yield index
        at += max((length + 3) & ~3, _NEXT_HOP.size)


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


class DeviceWatch(KernelWatch[Seen]):
    """Emits what there is, as it is at first and then whenever it is different."""

    def __init__(self, emit: Callable[[Seen], None], notice: Notice) -> None:
        super().__init__(
            "devices",
            emit,
            notice,
            read=look,
            subscribe=_subscription,
            failed="this node's devices cannot be read; trying again",
            settle_s=_SETTLE_S,
        )


def _subscription() -> socket.socket:
    made = netlink.opened(groups=_GROUPS, program=_ONLY_OUR_ROUTES)
    made.settimeout(0)
    return made
