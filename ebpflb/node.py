# SPDX-License-Identifier: Apache-2.0
"""Facts about this node that are read from the kernel, for messages and decisions alike."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from ebpflb import netlink
from ebpflb.kernelwatch import RETRY_MIN_S, SETTLE_S, KernelWatch, Notice
from ebpflb.model import Address, LocalAddresses

_LISTEN = "0A"


def port_holder(port: int) -> str:
    """Who listens on TCP ``port`` in this network namespace: ``kube-proxy (process 4711)``.

    "" where nobody does, or where it cannot be found out.
    """
    inodes = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return next((holder for inode in inodes if (holder := _holder_of(inode))), "")


def _holder_of(inode: str) -> str:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            for fd in (process / "fd").iterdir():
                if str(fd.readlink()) == inode:
                    return f"{(process / 'comm').read_text().strip()} (process {process.name})"
        except OSError:
            continue  # it ended, or is not ours to look at
    return ""


# --- addresses -----------------------------------------------------------------------------------


def local_addresses() -> frozenset[Address]:
    """The addresses that are this network namespace's own, of every interface and both families.

    That is what iptables' ``addrtype LOCAL`` means at a packet (NP-05), for single addresses:

    * all that interfaces have, loopback's included. An IPv6 address whose duplicates are still
      looked for, or that has been found to be one, is not yet, or not, the node's: the kernel has
      no local route to it either, and tells when it has;
    * those of local routes (/32 and /128), as cloud agents and load balancers make them.

    What kube-proxy's ipvs mode left on its own device is every Service's address and no node's.
    Not in it are the other addresses of local networks: of 127.0.0.0/8, or where all of a prefix
    is local to a node. Raises OSError.
    """
    foreign = _ipvs_device()
    of_interface = partial(_address_of_interface, foreign=foreign)
    of_route = partial(_address_of_route, foreign=foreign)
    with netlink.opened() as kernel:
        found = set(_dumped(kernel, _RTM_GETADDR, bytes(_IFADDRMSG.size), of_interface))
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = _RTMSG.pack(family, 0, 0, 0, _RT_TABLE_LOCAL, 0, 0, _RTN_LOCAL, 0)
            try:
                found |= set(_dumped(kernel, _RTM_GETROUTE, wanted, of_route))
            except OSError as error:
                if error.errno not in netlink.HAS_NONE:
                    raise
    return frozenset(found)


class AddressWatch(KernelWatch[frozenset[Address]]):
    """Emits this node's addresses, as they are at first and then whenever they are others.

    ``start`` emits the first ones before it returns, unless they cannot be read; see KernelWatch.
    """

    def __init__(
        self,
        emit: Callable[[LocalAddresses], None],
        notice: Notice,
        *,
        read: Callable[[], frozenset[Address]] = local_addresses,
        subscribe: Callable[[], socket.socket] | None = None,
        settle_s: float = SETTLE_S,
        retry_min_s: float = RETRY_MIN_S,
    ) -> None:
        super().__init__(
            "addresses",
            lambda addresses: emit(LocalAddresses(addresses)),
            notice,
            read=read,
            subscribe=subscribe or _subscription,
            failed="this node's addresses cannot be read; trying again",
            settle_s=settle_s,
            retry_min_s=retry_min_s,
        )


# --- netlink -------------------------------------------------------------------------------------

_RTM_GETADDR: Final = 22
_RTM_NEWROUTE: Final = 24
_RTM_DELROUTE: Final = 25
_RTM_GETROUTE: Final = 26
_GROUPS: Final = 0x10 | 0x40 | 0x100 | 0x400  # addresses and routes of IPv4, and of IPv6

_IFA_ADDRESS: Final = 1
_IFA_LOCAL: Final = 2  # differs from the former where that is the other end's
_IFA_F_TENTATIVE: Final = 0x40  # also set where a duplicate has been found
_RTA_DST: Final = 1
_RTA_OIF: Final = 4
_RT_TABLE_LOCAL: Final = 255
_RTN_LOCAL: Final = 2

_IFADDRMSG: Final = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface
_RTMSG: Final = struct.Struct("=8BI")  # family, lengths, tos, table, protocol, scope, type, flags

_ADDRESS_BITS: Final[Mapping[int, int]] = {socket.AF_INET: 32, socket.AF_INET6: 128}

# The type of a message is its 4th and 5th byte, which a load takes for network order; that of a
# route is the 23rd.
_ONLY_LOCAL_ROUTES: Final = (
    (0x28, 0, 0, 4),  # load the message's type
    (0x15, 2, 0, socket.htons(_RTM_NEWROUTE)),
    (0x15, 1, 0, socket.htons(_RTM_DELROUTE)),
    (0x06, 0, 0, 0xFFFFFFFF),  # no route: take it
    (0x30, 0, 0, 23),  # load the route's type
    (0x15, 0, 1, _RTN_LOCAL),
    (0x06, 0, 0, 0xFFFFFFFF),  # take it
    (0x06, 0, 0, 0),  # leave it
)


def _subscription() -> socket.socket:
    """A socket that is told of changes of addresses and of local routes, and of no other ones.

    Other routes are kept away in the kernel: a router may tell a node of thousands a second.
    """
    made = netlink.opened(groups=_GROUPS, program=_ONLY_LOCAL_ROUTES)
    made.settimeout(0)
    return made


def _dumped(
    kernel: socket.socket, kind: int, body: bytes, address_of: Callable[[bytes], Address | None]
) -> Iterator[Address]:
    """The addresses in a dump."""
    for found in map(address_of, netlink.dump(kernel, kind, body)):
        if found is not None:
            yield found


def _ipvs_device() -> int:
    """The number of the device that ipvs mode makes; 0 where there is none."""
    try:
        return socket.if_nametoindex("kube-ipvs0")
    except OSError:
        return 0


def _address_of_interface(body: bytes, *, foreign: int = 0) -> Address | None:
    if not body:
        return None
    family, _, flags, _, device = _IFADDRMSG.unpack_from(body)
    if flags & _IFA_F_TENTATIVE or (foreign and device == foreign):
        return None
    found = dict(netlink.attributes(body[_IFADDRMSG.size :]))
    return netlink.address(family, found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS))


def _address_of_route(body: bytes, *, foreign: int = 0) -> Address | None:
    if not body:
        return None
    family, length, _, _, table, _, _, kind, _ = _RTMSG.unpack_from(body)
    if (table, kind, length) != (_RT_TABLE_LOCAL, _RTN_LOCAL, _ADDRESS_BITS.get(family, 0)):
        return None
    found = dict(netlink.attributes(body[_RTMSG.size :]))
    if foreign and found.get(_RTA_OIF) == foreign.to_bytes(4, sys.byteorder):
        return None
    return netlink.address(family, found.get(_RTA_DST))
