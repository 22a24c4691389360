# SPDX-License-Identifier: Apache-2.0
"""Netlink to the routing side of the kernel, by hand: dumps, requests, subscriptions, attributes.

Importing any part of pyroute2 imports all of it, which is 10.9 MiB and 0.1 s in every agent on
every node. All numbers are in host byte order unless a caller packs them otherwise. This file must
not know what a link, an address or a filter is.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from ebpflb.model import Address

__all__ = [
    "ATTRIBUTE",
    "CREATE",
    "ECHO",
    "EXCLUSIVE",
    "HAS_NONE",
    "HEADER",
    "Message",
    "address",
    "attribute",
    "attributes",
    "dump",
    "messages",
    "opened",
    "request",
]

_SOL_NETLINK: Final = 270
_NETLINK_EXT_ACK: Final = 11
_NETLINK_GET_STRICT_CHK: Final = 12  # filter routes in the kernel, which may have a million
_SO_ATTACH_FILTER: Final = 26

_NLMSG_ERROR: Final = 2
_NLMSG_DONE: Final = 3
_NLM_F_REQUEST: Final = 0x1
_NLM_F_ACK: Final = 0x4
_NLM_F_DUMP_INTR: Final = 0x10
_NLM_F_CAPPED: Final = 0x100
_NLM_F_ACK_TLVS: Final = 0x200
_NLM_F_DUMP: Final = 0x300
_NLMSGERR_ATTR_MSG: Final = 1
_NLA_TYPE_MASK: Final = 0x3FFF

ECHO: Final = 0x8
EXCLUSIVE: Final = 0x200
CREATE: Final = 0x400

HEADER: Final = struct.Struct("=IHHII")  # length, type, flags, sequence, port
ATTRIBUTE: Final = struct.Struct("=HH")  # length, type
_ERRNO: Final = struct.Struct("=i")

HAS_NONE: Final = frozenset({errno.ENOENT, errno.EAFNOSUPPORT, errno.EOPNOTSUPP})
"""What a dump of routes fails with where there is no such table, or no such family."""

_MESSAGE_BYTES: Final = 65536
_DUMPS: Final = 10

_ADDRESS_BYTES: Final[Mapping[int, int]] = {socket.AF_INET: 4, socket.AF_INET6: 16}


class Message(NamedTuple):
    type: int
    flags: int
    body: bytes


def opened(
    *,
    groups: int = 0,
    program: tuple[tuple[int, int, int, int], ...] = (),
    protocol: int = socket.NETLINK_ROUTE,
) -> socket.socket:
    """A socket to the kernel; ``program`` (classic BPF) says which messages of ``groups`` it gets.

    It belongs to the network namespace of the calling thread. Raises OSError.
    """
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol)
    try:
        made.setsockopt(_SOL_NETLINK, _NETLINK_GET_STRICT_CHK, 1)
        made.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        if program:
            code = array.array("B", b"".join(struct.pack("=HBBI", *one) for one in program))
            fprog = struct.pack("HP", len(program), code.buffer_info()[0])
            made.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, fprog)
        made.bind((0, groups))
    except OSError:
        made.close()
        raise
    return made


def dump(kernel: socket.socket, kind: int, body: bytes) -> list[bytes]:
    """The bodies that answer a dump; one that something changed under is asked for again.

    Raises OSError: the kernel's own, or EAGAIN where it never holds still.
    """
    for _ in range(_DUMPS):
        size = HEADER.size + len(body)
        kernel.send(HEADER.pack(size, kind, _NLM_F_REQUEST | _NLM_F_DUMP, 0, 0) + body)
        found = list(_answer(kernel))
        if not any(message.flags & _NLM_F_DUMP_INTR for message in found):
            return [message.body for message in found if message.body]
    raise OSError(errno.EAGAIN, "addresses, routes or links change faster than they can be read")


def request(kernel: socket.socket, kind: int, body: bytes, *, flags: int = 0) -> list[bytes]:
    """Have something done; with the flag ECHO returns the bodies of what has come of it.

    Raises OSError, with the kernel's own words where it has some.
    """
    size = HEADER.size + len(body)
    kernel.send(HEADER.pack(size, kind, _NLM_F_REQUEST | _NLM_F_ACK | flags, 0, 0) + body)
    return [message.body for message in _answer(kernel) if message.body]


def _answer(kernel: socket.socket) -> Iterator[Message]:
    """The messages of an answer, its end included, which may say that a dump was interrupted."""
    while True:
        for message in messages(kernel.recv(_MESSAGE_BYTES)):
            if message.type in {_NLMSG_ERROR, _NLMSG_DONE}:
                number = _ERRNO.unpack_from(message.body)[0] if message.body else 0
                if number < 0:
                    raise OSError(-number, _words(message) or os.strerror(-number))
                yield message._replace(body=b"")
                return
            yield message


def _words(message: Message) -> str:
    """What the kernel says of an error besides its number; "" where it says nothing."""
    if message.type != _NLMSG_ERROR or not message.flags & _NLM_F_ACK_TLVS:
        return ""
    at = _ERRNO.size + HEADER.size
    if not message.flags & _NLM_F_CAPPED:  # it brings the whole request back
        at += _aligned(HEADER.unpack_from(message.body, _ERRNO.size)[0] - HEADER.size)
    text = dict(attributes(message.body[at:])).get(_NLMSGERR_ATTR_MSG, b"")
    return text.rstrip(b"\0").decode(errors="replace")


def messages(data: bytes) -> Iterator[Message]:
    at = 0
    while at + HEADER.size <= len(data):
        length, kind, flags, _, _ = HEADER.unpack_from(data, at)
        yield Message(kind, flags, data[at + HEADER.size : at + length])
        at += _aligned(max(length, HEADER.size))


# --- attributes ----------------------------------------------------------------------------------


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, value) of each; a value may be attributes again."""
    at = 0
    while at + ATTRIBUTE.size <= len(data):
        length, kind = ATTRIBUTE.unpack_from(data, at)
        yield kind & _NLA_TYPE_MASK, data[at + ATTRIBUTE.size : at + length]
        at += _aligned(max(length, ATTRIBUTE.size))


def attribute(kind: int, value: bytes) -> bytes:
    """One attribute, padded so that another can follow."""
    length = ATTRIBUTE.size + len(value)
    return ATTRIBUTE.pack(length, kind) + value + bytes(_aligned(length) - length)


def _aligned(length: int) -> int:
    return (length + 3) & ~3


def address(family: int, data: bytes | None) -> Address | None:
    """An attribute's address; None for one that is not there, or of another length."""
    if data is None or len(data) != _ADDRESS_BYTES.get(family, 0):
        return None
    return Address(data if len(data) == 16 else bytes(10) + b"\xff\xff" + data)
