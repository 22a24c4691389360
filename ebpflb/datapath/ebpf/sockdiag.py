# SPDX-License-Identifier: Apache-2.0
"""Connected UDP sockets, one network namespace after another: found by sock_diag, and destroyed.

Netlink by hand: it is two small messages, and a library would start a process for each namespace.
This file must not know why a socket is to be destroyed.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from ebpflb.datapath.ebpf import libbpf

SO_NETNS_COOKIE = 71  # Linux 5.14

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_SOCK_DESTROY = 21
_NLMSG_ERROR = 2
_NLMSG_DONE = 3
_NLM_F_REQUEST_ACK = 0x001 | 0x004
_NLM_F_REQUEST_DUMP = 0x001 | 0x300
_CONNECTED = 1 << 1  # TCP_ESTABLISHED, which a connected UDP socket is too

_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_ERROR = struct.Struct("=i")
_QUERY = struct.Struct("=BBxxI48s")  # struct inet_diag_req_v2
_ANSWER = struct.Struct("=Bxxx48s20x")  # struct inet_diag_msg
_SOCKET_ID = struct.Struct("=2x2s16x16s4xII")  # struct inet_diag_sockid: its peer and its cookie

_FAMILIES = (socket.AF_INET, socket.AF_INET6)
_MAPPED = bytes(10) + b"\xff\xff"
_TIMEOUT_S = 10.0
_RECEIVE = 1 << 16


class Connected(NamedTuple):
    """A connected UDP socket. ``id`` is the kernel's, as it wants it back."""

    cookie: int
    peer: bytes
    """Address (16 bytes, IPv4 in its mapped form) and port (2 bytes), both in network order."""
    family: int
    id: bytes


class SockDiag:
    """Asks about the sockets of one network namespace: the one that it was made in."""

    def __init__(self) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, _NETLINK_SOCK_DIAG)
        self._socket.settimeout(_TIMEOUT_S)
        self._number = 0

    def netns_cookie(self) -> int | None:
        """The cookie of the network namespace; None before Linux 5.14, which does not tell."""
        try:
            raw = self._socket.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError as error:
            if error.errno == errno.ENOPROTOOPT:
                return None
            raise
        return int.from_bytes(raw, sys.byteorder)

    def connected(self) -> Iterator[Connected]:
        """Every connected UDP socket; one that moves meanwhile may be missing. Raises OSError."""
        for family in _FAMILIES:
            query = _QUERY.pack(family, socket.IPPROTO_UDP, _CONNECTED, bytes(48))
            self._send(_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, query)
            for answer in self._answers():
                its_family, its_id = _ANSWER.unpack_from(answer)
                port, address, low, high = _SOCKET_ID.unpack(its_id)
                if its_family == socket.AF_INET:
                    address = _MAPPED + address[:4]
                yield Connected(low | high << 32, address + port, its_family, its_id)

    def destroy(self, one: Connected) -> int:
        """Abort a socket as if its peer had; returns 0, or the error's number.

        ENOENT: it has no longer that cookie, that address or that peer. One that shares both ends
        with another one is hidden behind it.
        """
        self._send(
            _SOCK_DESTROY,
            _NLM_F_REQUEST_ACK,
            _QUERY.pack(one.family, socket.IPPROTO_UDP, 0, one.id),
        )
        try:
            for _ in self._answers():
                pass
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            return error.errno or 0
        return 0

    def _send(self, kind: int, flags: int, query: bytes) -> None:
        self._number += 1
        header = _HEADER.pack(_HEADER.size + len(query), kind, flags, self._number, 0)
        self._socket.sendto(header + query, (0, 0))

    def _answers(self) -> Iterator[memoryview]:
        """The answers to the last query, to the end; raises the OSError that the kernel says."""
        while True:
            data = memoryview(self._socket.recv(_RECEIVE))
            while data:
                size, kind, _, number, _ = _HEADER.unpack_from(data)
                body = data[_HEADER.size : size]
                data = data[(size + 3) & ~3 :]
                if number != self._number:
                    continue  # of a dump that was not read to its end
                if kind in {_NLMSG_DONE, _NLMSG_ERROR}:
                    code = -_ERROR.unpack_from(body)[0] if len(body) >= _ERROR.size else 0
                    if code:
                        raise OSError(code, os.strerror(code))
                    return
                yield body

    def close(self) -> None:
        self._socket.close()


# --- every namespace ---------------------------------------------------------------------------


def visit(
    wanted: Collection[int], refused: dict[str, OSError]
) -> Iterator[tuple[int | None, SockDiag]]:
    """Enter every network namespace whose cookie is wanted; (its cookie, who asks there).

    The calling thread ends up in any of them, so it must be one that ends. Where the kernel tells
    no cookies (None) every namespace is entered. Found are those of processes and those that are
    mounted somewhere; not one that nothing but an open descriptor holds. ``refused`` is filled with
    why one could not be entered, by the error's name.
    """
    missing = set(wanted)
    for path in _paths(refused):
        if not missing:
            return
        try:
            diag = _enter(path)
        except OSError as error:
            _note(refused, error)
            continue
        try:
            cookie = diag.netns_cookie()
            if cookie is None or cookie in missing:
                yield cookie, diag
                missing.discard(cookie or 0)
        finally:
            diag.close()


def _enter(path: Path) -> SockDiag:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        libbpf.enter_netns(fd)
    finally:
        os.close(fd)
    return SockDiag()


def _note(refused: dict[str, OSError], error: OSError) -> None:
    """A process that has ended is no reason to worry."""
    if error.errno not in {errno.ENOENT, errno.ESRCH}:
        refused[errno.errorcode.get(error.errno or 0, "?")] = error


def _paths(refused: dict[str, OSError]) -> Iterator[Path]:
    """A path to every distinct network namespace; there is one nsfs, so its number tells them."""
    seen = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        path = process / "ns" / "net"
        try:
            number = str(path.readlink())
        except OSError as error:
            _note(refused, error)
            continue
        if number not in seen:
            seen.add(number)
            yield path
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split(" ")
        if fields[3].startswith("net:[") and fields[3] not in seen:
            seen.add(fields[3])
            yield Path(_unescape(fields[4]))


def _unescape(text: str) -> str:
    """Blanks in a mount point are written as octal numbers."""
    first, *rest = text.split("\\")
    return first + "".join(chr(int(part[:3], 8)) + part[3:] for part in rest)
