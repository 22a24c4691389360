# SPDX-License-Identifier: Apache-2.0
"""A server that says who it is and whom it sees: the backend of every lab.

One process serves a list of TCP and UDP ports and answers each connection and each datagram with
one line of JSON: its name, the client's address as it arrived, the local address it arrived at.
It must know nothing of the lab: it runs from a shell just as well, and imports nothing outside
the standard library, so that it starts in a few hundredths of a second.

TCP: the line is sent upon accept. Then the client has the word: it closes, or it sends lines, and
each comes back with the server's name before it ("be1 hello"), which is how long connections and
large transfers are tested. With --once the server closes behind its line.

UDP: the datagram comes back inside the JSON, from the very address it was sent to. A mute server
counts and never answers.

It says {"ready": true, ...} on standard output when all ports listen. With --control it takes
commands on standard input, one a line, each answered by one line: `stats`, `mute`, `unmute`; at
the end of the input it prints the stats a last time and exits.
"""

import argparse
import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Final

__all__ = ["Responder", "main", "spell"]

IP_PKTINFO: Final = 8  # socket has it from Python 3.14 on
TCP_FASTOPEN: Final = 23
IPPROTO_MPTCP: Final = 262
BATCH: Final = 64
MAX_LINE: Final = 16 << 20
MAX_PEERS: Final = 10_000
MAX_DATAGRAM: Final = 60_000

Address = tuple[Any, ...]


def spell(address: Address) -> str:
    """Write a socket address as people do: 10.0.0.1:80, [fd00::1]:80."""
    host, port = address[0].partition("%")[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Connection:
    """One accepted TCP connection: what came without its end of line, what is not sent yet."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.incoming = bytearray()
        self.outgoing = bytearray()


class Responder:
    """All listeners of one process, and its counts."""

    def __init__(self, name: str, *, mute: bool = False, once: bool = False) -> None:
        self.name = name
        self.mute = mute
        self.once = once
        self.listening: list[str] = []
        self._tcp_accepted = 0
        self._udp_received = 0
        self._udp_answered = 0
        self._peers: Counter[str] = Counter()
        self._ports: Counter[str] = Counter()
        self._last: deque[str] = deque(maxlen=16)
        self._connections: dict[int, _Connection] = {}
        self._ready: dict[int, Callable[[int], None]] = {}
        self._sockets: list[socket.socket] = []
        self._epoll = select.epoll()
        self._stopped = False
        self._commands = b""

    # --- listening ----------------------------------------------------------------------------

    def listen_tcp(self, host: str, port: int, *, mptcp: bool = False) -> None:
        """Accept connections; port 0 lets the kernel choose."""
        protocol = IPPROTO_MPTCP if mptcp else 0
        sock = self._socket(host, port, socket.SOCK_STREAM, protocol)
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN, 1024)
        sock.listen(4096)
        self._register(sock, "tcp", lambda _: self._accept(sock))

    def listen_udp(self, host: str, port: int) -> None:
        """Answer datagrams; port 0 lets the kernel choose."""
        sock = self._socket(host, port, socket.SOCK_DGRAM, 0)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        else:
            sock.setsockopt(socket.IPPROTO_IP, IP_PKTINFO, 1)
        self._register(sock, "udp", lambda _: self._datagrams(sock))

    def _socket(self, host: str, port: int, kind: int, protocol: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)  # noqa: FBT003 - its only argument
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            sock.close()
            error.add_note(f"{self.name} wanted to bind {host} port {port}")
            raise
        return sock

    def _register(self, sock: socket.socket, protocol: str, act: Callable[[int], None]) -> None:
        self._sockets.append(sock)
        self._ready[sock.fileno()] = act
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self.listening.append(f"{protocol} {spell(sock.getsockname())}")

    # --- answering ----------------------------------------------------------------------------

    def _answer(self, protocol: str, peer: Address, local: Address, **more: object) -> bytes:
        answer = {
            "name": self.name,
            "protocol": protocol,
            "peer": spell(peer),
            "local": spell(local),
            **more,
        }
        return json.dumps(answer).encode() + b"\n"

    def _count(self, peer: Address, port: str) -> None:
        self._ports[port] += 1
        host = peer[0].partition("%")[0]
        if host in self._peers or len(self._peers) < MAX_PEERS:
            self._peers[host] += 1

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                sock, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                continue  # the client was gone before we came
            sock.setblocking(False)  # noqa: FBT003 - its only argument
            self._tcp_accepted += 1
            connection = _Connection(sock)
            try:
                local = sock.getsockname()
                self._count(peer, f"tcp/{local[1]}")
                sock.send(self._answer("tcp", peer, local))
            except OSError:
                sock.close()
                continue
            if self.once:
                sock.close()
                continue
            self._connections[sock.fileno()] = connection
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _converse(self, connection: _Connection, events: int) -> None:
        sock = connection.sock
        try:
            if events & select.EPOLLOUT and connection.outgoing:
                del connection.outgoing[: sock.send(connection.outgoing)]
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR):
                received = sock.recv(1 << 18)
                if not received or len(connection.incoming) > MAX_LINE:
                    self._drop(connection)
                    return
                connection.incoming += received
                self._echo(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        wanted = select.EPOLLIN | (select.EPOLLOUT if connection.outgoing else 0)
        self._epoll.modify(sock.fileno(), wanted)

    def _echo(self, connection: _Connection) -> None:
        *lines, rest = connection.incoming.split(b"\n")
        connection.incoming = bytearray(rest)
        for line in lines:
            connection.outgoing += self.name.encode() + b" " + line + b"\n"
        if connection.outgoing:
            del connection.outgoing[: connection.sock.send(connection.outgoing)]

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.sock.fileno()]
        connection.sock.close()

    def _datagrams(self, sock: socket.socket) -> None:
        for _ in range(BATCH):
            try:
                payload, ancillary, _flags, peer = sock.recvmsg(1 << 16, 128)
            except BlockingIOError:
                return
            except OSError:
                continue  # an ICMP error for an earlier answer
            self._udp_received += 1
            port = sock.getsockname()[1]
            self._count(peer, f"udp/{port}")
            text = payload.decode("utf-8", "replace")
            self._last.append(text[:200])
            if self.mute:
                continue
            host, reply_from = _arrived_at(ancillary)
            answer = self._answer(
                "udp", peer, (host, port), size=len(payload), payload=text[:MAX_DATAGRAM]
            )
            with contextlib.suppress(OSError):
                sock.sendmsg([answer[:65_000]], reply_from, 0, peer)
                self._udp_answered += 1

    # --- control ------------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """Return what was counted since the start."""
        return {
            "name": self.name,
            "tcp_accepted": self._tcp_accepted,
            "tcp_open": len(self._connections),
            "udp_received": self._udp_received,
            "udp_answered": self._udp_answered,
            "ports": dict(self._ports),
            "peers": dict(self._peers),
            "last": list(self._last),
            "mute": self.mute,
        }

    def take_commands(self, source: int) -> None:
        """Obey what comes on a file descriptor; its end ends the server."""
        self._ready[source] = self._command
        self._epoll.register(source, select.EPOLLIN)

    def _command(self, source: int) -> None:
        received = os.read(source, 4096)
        if not received:
            self.stop()
            return
        *lines, self._commands = (self._commands + received).split(b"\n")
        for line in lines:
            if line in {b"mute", b"unmute"}:
                self.mute = line == b"mute"
            _say(self.stats() if line in {b"mute", b"unmute", b"stats"} else {"error": "what?"})

    def stop(self) -> None:
        """Let `serve` return."""
        self._stopped = True

    def serve(self) -> None:
        """Answer until stopped."""
        while not self._stopped:
            for descriptor, events in self._epoll.poll():
                connection = self._connections.get(descriptor)
                if connection is not None:
                    self._converse(connection, events)
                else:
                    self._ready[descriptor](descriptor)

    def close(self) -> None:
        """Close every socket."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        for sock in self._sockets:
            sock.close()
        self._epoll.close()


def _arrived_at(
    ancillary: list[tuple[int, int, bytes]],
) -> tuple[str, list[tuple[int, int, bytes]]]:
    """Return the address a datagram was sent to, and what makes the answer come from there."""
    for level, kind, data in ancillary:
        if level == socket.IPPROTO_IP and kind == IP_PKTINFO:
            _, _, address = struct.unpack("=I4s4s", data[:12])
            back = struct.pack("=I4s4s", 0, address, b"\0" * 4)
            return socket.inet_ntop(socket.AF_INET, address), [(level, kind, back)]
        if level == socket.IPPROTO_IPV6 and kind == socket.IPV6_PKTINFO:
            address, index = struct.unpack("=16sI", data[:20])
            local = socket.inet_ntop(socket.AF_INET6, address)
            # A link-local answer needs its interface; any other is routed.
            back = struct.pack("=16sI", address, index if local.startswith("fe80") else 0)
            return local, [(level, kind, back)]
    return "?", []


def _say(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until the end of the input (--control) or SIGTERM."""
    parser = argparse.ArgumentParser(prog="ebpflb.lab.server", description=__doc__.split("\n")[0])
    parser.add_argument("--name", required=True, help="who it says it is")
    parser.add_argument("--tcp", type=int, action="append", default=[], metavar="PORT")
    parser.add_argument("--udp", type=int, action="append", default=[], metavar="PORT")
    parser.add_argument(
        "--bind",
        action="append",
        metavar="ADDRESS",
        help="where to listen, may be repeated; default: every address of both families",
    )
    parser.add_argument("--once", action="store_true", help="TCP: close behind the line of JSON")
    parser.add_argument("--mute", action="store_true", help="UDP: count and never answer")
    parser.add_argument("--mptcp", action="store_true", help="TCP: accept MPTCP too")
    parser.add_argument("--control", action="store_true", help="take commands on standard input")
    options = parser.parse_args(arguments)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65_536)), hard))
    responder = Responder(options.name, mute=options.mute, once=options.once)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))
    for host in options.bind or ["0.0.0.0", "::"]:  # noqa: S104 - a backend listens everywhere
        for port in options.tcp:
            responder.listen_tcp(host, port, mptcp=options.mptcp)
        for port in options.udp:
            responder.listen_udp(host, port)
    if options.control:
        responder.take_commands(0)
    _say({"ready": True, "pid": os.getpid(), **responder.stats(), "listening": responder.listening})
    responder.serve()
    _say(responder.stats())
    responder.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
