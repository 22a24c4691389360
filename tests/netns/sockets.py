# SPDX-License-Identifier: Apache-2.0
"""Sockets of a pod or a node in the hands of a test, and the calls that Python does not have.

The lab's clients tell what came of whole exchanges; these are for what happens between two calls.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import json
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ebpflb.lab import Namespace

PATIENCE_S = 3.0
SO_COOKIE = 57

_libc = ctypes.CDLL(None, use_errno=True)


class Dialled(Protocol):
    """What has an address in both families: a Service, a pod, a node."""

    @property
    def ipv4(self) -> str: ...
    @property
    def ipv6(self) -> str: ...


class Form(enum.Enum):
    """How a program spells an address: the three ways into one code path."""

    V4 = "IPv4"
    V6 = "IPv6"
    MAPPED = "IPv4 on an IPv6 socket"

    @property
    def family(self) -> socket.AddressFamily:
        return socket.AF_INET if self is Form.V4 else socket.AF_INET6

    def host(self, place: Dialled) -> str:
        """The address of a pod, a node or a Service, as a program of this form writes it."""
        if self is Form.V6:
            return place.ipv6
        return place.ipv4 if self is Form.V4 else f"::ffff:{place.ipv4}"

    def spelt(self, place: Dialled, port: int) -> str:
        """The same with a port, as the lab's clients print it."""
        host = self.host(place)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class SocketMaker:
    """Sockets of one namespace and cgroup. Ends with the lab, or by ``close``."""

    def __init__(self, place: Namespace) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = Path(__file__).with_name("socket_maker.py")
            self._process = place.popen(
                [sys.executable, "-I", "-S", program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )

    def make(
        self, family: socket.AddressFamily, kind: socket.SocketKind, protocol: int = 0
    ) -> socket.socket:
        self._channel.send(f"{family:d} {kind:d} {protocol}".encode())
        answer, fds, _, _ = socket.recv_fds(self._channel, 16, 1)
        if answer != b"ok":
            raise OSError(int(answer), os.strerror(int(answer)))
        made = socket.socket(fileno=fds[0])
        made.settimeout(PATIENCE_S)
        return made

    def close(self) -> None:
        self._channel.close()
        self._process.wait(PATIENCE_S)


# --- questions ---------------------------------------------------------------------------------


def peer(sock: socket.socket) -> tuple[str, int] | str:
    """(address, port) as getpeername() says, or the error's name."""
    try:
        host, port = sock.getpeername()[:2]
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return host, port


def cookie(sock: socket.socket) -> int:
    """The number by which BPF programs know the socket."""
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8), sys.byteorder)


def greeting(sock: socket.socket) -> dict[str, Any]:
    """What the lab's server says upon a TCP connection."""
    line = b""
    while not line.endswith(b"\n"):
        more = sock.recv(4096)
        if not more:
            raise EOFError("the server closed without a word")
        line += more
    answer: dict[str, Any] = json.loads(line)
    return answer


def ask(sock: socket.socket, to: tuple[str, int] | None = None) -> tuple[str, tuple[str, int]]:
    """Send a datagram (to the peer, where ``to`` is None); who answers, and from where."""
    if to is None:
        sock.send(b"who")
    else:
        sock.sendto(b"who", to)
    return answer_on(sock)


def answer_on(sock: socket.socket) -> tuple[str, tuple[str, int]]:
    """Who sent the next datagram, and from where."""
    data, source = sock.recvfrom(4096)
    name: str = json.loads(data)["name"]
    return name, source[:2]


# --- calls that Python does not have -------------------------------------------------------------


def sockaddr(family: socket.AddressFamily, host: str, port: int) -> Any:
    """A socket address in memory of our own, so that one can see whether the kernel changes it."""
    head = int(family).to_bytes(2, sys.byteorder) + port.to_bytes(2)
    address = socket.inet_pton(family, host)
    body = address + bytes(8) if family == socket.AF_INET else bytes(4) + address + bytes(4)
    return ctypes.create_string_buffer(head + body, len(head + body))


def connect_to(sock: socket.socket, address: Any) -> None:
    """connect() with the very memory that ``sockaddr`` made; blocking."""
    sock.setblocking(True)
    result = _libc.connect(sock.fileno(), address, len(address))
    code = ctypes.get_errno()
    sock.settimeout(PATIENCE_S)
    if result:
        raise OSError(code, os.strerror(code))


def send_to(sock: socket.socket, data: bytes, address: Any) -> None:
    """sendto() with the very memory that ``sockaddr`` made."""
    if _libc.sendto(sock.fileno(), data, len(data), 0, address, len(address)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def disconnect(sock: socket.socket) -> None:
    """connect() to AF_UNSPEC: the socket has no peer any more, and no hook is told."""
    connect_to(sock, ctypes.create_string_buffer(16))
