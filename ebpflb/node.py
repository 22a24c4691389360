# SPDX-License-Identifier: Apache-2.0
"""Facts about this node that are read from the kernel, for messages and decisions alike.

Netlink is spoken here by hand, two dumps and one subscription: importing any part of pyroute2
imports all of it, which is 10.9 MiB and 0.1 s in every agent on every node.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol

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
    with _netlink() as kernel:
        found = set(_dumped(kernel, _RTM_GETADDR, bytes(_IFADDRMSG.size), of_interface))
        for family in (socket.AF_INET, socket.AF_INET6):
            wanted = _RTMSG.pack(family, 0, 0, 0, _RT_TABLE_LOCAL, 0, 0, _RTN_LOCAL, 0)
            try:
                found |= set(_dumped(kernel, _RTM_GETROUTE, wanted, of_route))
            except OSError as error:
                if error.errno not in _HAS_NO_ROUTES:
                    raise
    return frozenset(found)


RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
SETTLE_S: Final = 0.05
"""So long what changes is gathered: an interface mostly gets several addresses at once."""


class _Notice(Protocol):
    def __call__(self, event: str, /, **fields: object) -> None: ...


class AddressWatch:
    """Emits this node's addresses, as they are at first and then whenever they are others.

    ``start`` emits the first ones before it returns, unless they cannot be read: then, and after
    any failure, the thread tries again, after 1, 2, 4 … 30 seconds, and ``notice`` is told once.
    The kernel's messages say no more than that something is different; what is emitted is always
    what has been read, so that a lost message (ENOBUFS) is only another reason to read.

    It watches the network namespace of the thread that calls ``start``.
    """

    def __init__(
        self,
        emit: Callable[[LocalAddresses], None],
        notice: _Notice,
        *,
        read: Callable[[], frozenset[Address]] = local_addresses,
        subscribe: Callable[[], socket.socket] | None = None,
        settle_s: float = SETTLE_S,
        retry_min_s: float = RETRY_MIN_S,
    ) -> None:
        self._emit = emit
        self._notice = notice
        self._read = read
        self._subscribe = subscribe or _subscription
        self._settle_s = settle_s
        self._retry_min_s = self._retry_s = retry_min_s
        self._failed = False
        self._told: frozenset[Address] | None = None
        self._changes: socket.socket | None = None
        self._stopping = threading.Event()
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="addresses", daemon=True)

    def start(self) -> None:
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; after that nothing is emitted. To be called once."""
        self._stopping.set()
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._unsubscribe()
        os.close(self._stop_fd)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while self._wait():
            self._look()

    def _look(self) -> None:
        try:
            if self._changes is None:
                self._changes = self._subscribe()  # before reading: what comes later is told
            addresses = self._read()
        except OSError as error:
            if not self._failed:
                self._notice(
                    "this node's addresses cannot be read; trying again", reason=str(error)
                )
            self._failed = True
            return
        self._failed, self._retry_s = False, self._retry_min_s
        if addresses != self._told:
            self._told = addresses
            self._emit(LocalAddresses(addresses))

    def _wait(self) -> bool:
        """Until it is worth looking; False where it is to end."""
        if self._failed:
            wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_MAX_S)
            return not self._stopping.wait(wait_s)
        if self._changes is not None:
            poll = select.poll()
            for one in (self._changes.fileno(), self._stop_fd):
                poll.register(one, select.POLLIN)
            poll.poll()
        if self._stopping.wait(self._settle_s):
            return False
        self._empty()
        return True

    def _empty(self) -> None:
        """Take what has been told meanwhile; a subscription that fails is made anew."""
        try:
            while self._changes is not None and self._changes.recv(_MESSAGE_BYTES):
                pass
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return  # the next wait finds what is left, and ends at once
        self._unsubscribe()

    def _unsubscribe(self) -> None:
        if self._changes is not None:
            self._changes.close()
            self._changes = None


# --- netlink -------------------------------------------------------------------------------------

_SOL_NETLINK: Final = 270
_NETLINK_GET_STRICT_CHK: Final = 12  # filter routes in the kernel, which may have a million
_SO_ATTACH_FILTER: Final = 26

_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_NLM_F_REQUEST: Final = 0x1
_NLM_F_DUMP_INTR: Final = 0x10
_NLM_F_DUMP: Final = 0x300

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

_NLMSGHDR: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_IFADDRMSG: Final = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface
_RTMSG: Final = struct.Struct("=8BI")  # family, lengths, tos, table, protocol, scope, type, flags
_RTATTR: Final = struct.Struct("=HH")  # length, type
_ERRNO: Final = struct.Struct("=i")

_MESSAGE_BYTES: Final = 65536
_DUMPS: Final = 10
_HAS_NO_ROUTES: Final = {errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP}
"""No such table yet, or no such family in this kernel."""

_ADDRESS_BYTES: Final[Mapping[int, int]] = {socket.AF_INET: 4, socket.AF_INET6: 16}


class _Message(NamedTuple):
    type: int
    flags: int
    body: bytes


def _netlink(
    *, groups: int = 0, program: tuple[tuple[int, int, int, int], ...] = ()
) -> socket.socket:
    """A socket to the kernel; ``program`` says which messages of ``groups`` it gets."""
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
    try:
        made.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
        if program:
            code = array.array("B", b"".join(struct.pack("=HBBI", *one) for one in program))
            fprog = struct.pack("HP", len(program), code.buffer_info()[0])
            made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
        made.bind((0, groups))
    except OSError:
        made.close()
        raise
    return made


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
    made = _netlink(groups=_GROUPS, program=_ONLY_LOCAL_ROUTES)
    made.settimeout(0)
    return made


def _dumped(
    kernel: socket.socket, kind: int, body: bytes, address_of: Callable[[bytes], Address | None]
) -> Iterator[Address]:
    """The addresses in a dump; one that something changed under is asked for again."""
    for _ in range(_DUMPS):
        size = _NLMSGHDR.size + len(body)
        kernel.send(_NLMSGHDR.pack(size, kind, _NLM_F_REQUEST | _NLM_F_DUMP, 0, 0) + body)
        messages = list(_answer(kernel))
        if not any(message.flags & _NLM_F_DUMP_INTR for message in messages):
            break
    else:
        raise OSError(errno.EAGAIN, "addresses and routes change faster than they can be read")
    for message in messages:
        address = address_of(message.body)
        if address is not None:
            yield address


def _answer(kernel: socket.socket) -> Iterator[_Message]:
    """The messages of a dump, its end included, which may say that it was interrupted."""
    while True:
        for message in _messages(kernel.recv(_MESSAGE_BYTES)):
            if message.type in {_NLMSG_ERROR, _NLMSG_DONE}:
                number = _ERRNO.unpack_from(message.body)[0] if message.body else 0
                if number < 0:
                    raise OSError(-number, os.strerror(-number))
                yield message._replace(body=b"")
                return
            yield message


def _messages(data: bytes) -> Iterator[_Message]:
    at = 0
    while at + _NLMSGHDR.size <= len(data):
        length, kind, flags, _, _ = _NLMSGHDR.unpack_from(data, at)
        yield _Message(kind, flags, data[at + _NLMSGHDR.size : at + length])
        at += _aligned(max(length, _NLMSGHDR.size))


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
    found = dict(_attributes(body[_IFADDRMSG.size :]))
    return _address(family, found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS))


def _address_of_route(body: bytes, *, foreign: int = 0) -> Address | None:
    if not body:
        return None
    family, length, _, _, table, _, _, kind, _ = _RTMSG.unpack_from(body)
    if (table, kind, length) != (_RT_TABLE_LOCAL, _RTN_LOCAL, 8 * _ADDRESS_BYTES.get(family, 0)):
        return None
    found = dict(_attributes(body[_RTMSG.size :]))
    if foreign and found.get(_RTA_OIF) == foreign.to_bytes(4, sys.byteorder):
        return None
    return _address(family, found.get(_RTA_DST))


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _RTATTR.size <= len(data):
        length, kind = _RTATTR.unpack_from(data, at)
        yield kind, data[at + _RTATTR.size : at + length]
        at += _aligned(max(length, _RTATTR.size))


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def _address(family: int, data: bytes | None) -> Address | None:
    if data is None or len(data) != _ADDRESS_BYTES.get(family, 0):
        return None
    return Address(data if len(data) == 16 else bytes(10) + b"\xff\xff" + data)
