# SPDX-License-Identifier: Apache-2.0
"""Clients of every kind that dial an address and tell who answered: the traffic of every lab.

Each operation is a function that returns an `Outcome`, and a command that prints one as a line of
JSON. It must know nothing of the lab: it dials numbers from the namespace it is started in, and
imports nothing outside the standard library.

    client.py tcp 10.96.0.1 80 --count 100          ... --fastopen connect, --mptcp, --mapped
    client.py udp 10.96.0.10 53 --sockets 2         unconnected; --connected; --one-way
    client.py hold 10.96.0.1 80 --parallel 30       long connections that talk every --interval-s
    client.py reconnect --to 10.96.0.10:53 --to none --to 10.96.0.11:53      one UDP socket
    client.py uring 10.96.0.1 80                    connect() through io_uring
    client.py ping 10.244.2.2                       no socket hook sees it

With --until-stopped an operation goes on until SIGTERM or the end of its standard input, and then
prints its outcome; meanwhile a line on standard input is answered by the outcome so far. That is
how "not one failed connect while the agent restarts" is shown.

`client.py worker` reads one command a line (a JSON list of the arguments above) and answers each
with one line, so that a test's hundreds of questions do not start hundreds of interpreters. A list
of commands is performed at once, as far as threads go, and answered by the list of the outcomes.
"""

import argparse
import atexit
import contextlib
import errno
import functools
import itertools
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, get_args

__all__ = ["Dial", "Outcome", "main", "ping", "reconnect", "tcp", "tcp_hold", "udp", "uring"]

MSG_FASTOPEN: Final = 0x2000_0000
TCP_FASTOPEN_CONNECT: Final = 30
TCPI_OPT_SYN_DATA: Final = 0x20
IPPROTO_MPTCP: Final = 262
IP_RECVERR: Final = 11
IPV6_RECVERR: Final = 25
MAX_NOTED: Final = 5
MAX_SWITCHES: Final = 200
MAX_SECONDS: Final = 600.0
MAX_THREADS: Final = 32

# Where helpers written in C are compiled to; the lab sets it so that they go with the lab.
TOOLS_VARIABLE: Final = "EBPFLB_LAB_TOOLS"

_pings = itertools.count(os.getpid())

Fastopen = Literal["", "sendto", "connect"]
Address = tuple[Any, ...]


class Dial(NamedTuple):
    """Whom to dial, from where, through what kind of socket."""

    host: str
    port: int
    timeout_s: float = 3.0
    source: str = ""
    source_port: int = 0
    device: str = ""  # SO_BINDTODEVICE
    reuseport: bool = False
    mapped: bool = False  # an IPv4 address on an AF_INET6 socket, as ::ffff:a.b.c.d
    mptcp: bool = False
    fastopen: Fastopen = ""
    recverr: bool = False  # ICMP errors reach an unconnected UDP socket


class Outcome(NamedTuple):
    """What came of an operation.

    `tried` counts attempts: connects, datagrams, lines on a long connection. A `good` one was
    answered (or, one way, sent). `errors` counts the others by errno name, or TIMEOUT, EOF (closed
    without an answer), UNSUPPORTED. A datagram that came late or twice is in `strays`.
    """

    tried: int
    good: int
    errors: dict[str, int]
    backends: dict[str, int]  # who answered
    seen_as: dict[str, int]  # the client's address (no port) as the backend saw it
    peernames: dict[str, int]  # what getpeername() said
    sources: dict[str, int]  # where recvfrom() said that datagrams came from
    strays: int
    syn_data: int  # connections whose SYN carried data that the server took (TCP Fast Open)
    first: dict[str, Any]  # the first answer, whole
    first_errors: list[str]
    switches: list[tuple[float, str]]  # seconds since the start, the backend from then on
    elapsed_s: float
    slowest_s: float

    @property
    def failed(self) -> int:
        """How many attempts came to nothing."""
        return self.tried - self.good


class _Tally:
    """Collects an outcome from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._tried = self._good = self._strays = self._syn_data = 0
        self._counts: dict[str, Counter[str]] = {
            name: Counter() for name in ("errors", "backends", "seen_as", "peernames", "sources")
        }
        self._first: dict[str, Any] = {}
        self._first_errors: list[str] = []
        self._switches: list[tuple[float, str]] = []
        self._slowest_s = 0.0

    def good(self, answer: dict[str, Any], *, took_s: float, **where: str) -> None:
        """Count an answer; `where` is peernames= and sources=."""
        with self._lock:
            self._tried += 1
            self._good += 1
            self._slowest_s = max(self._slowest_s, took_s)
            for name, value in where.items():
                if value:
                    self._counts[name][value] += 1
            if not answer:
                return
            self._first = self._first or answer
            name = str(answer.get("name", "?"))
            self._counts["backends"][name] += 1
            if "peer" in answer:
                self._counts["seen_as"][_host_of(str(answer["peer"]))] += 1
            if not self._switches or self._switches[-1][1] != name:
                self._switches.append((round(time.monotonic() - self._began, 4), name))
                del self._switches[MAX_SWITCHES:]

    def failed(self, error: BaseException | str, *, took_s: float = 0.0) -> None:
        """Count a failure."""
        with self._lock:
            self._tried += 1
            self._slowest_s = max(self._slowest_s, took_s)
            self._counts["errors"][_error_name(error)] += 1
            if len(self._first_errors) < MAX_NOTED:
                after_s = time.monotonic() - self._began
                self._first_errors.append(f"after {after_s:.3f} s: {error}")

    def stray(self) -> None:
        """Count a datagram that answers nothing we still wait for."""
        with self._lock:
            self._strays += 1

    def syn_data(self) -> None:
        """Count a connection whose SYN carried data."""
        with self._lock:
            self._syn_data += 1

    def outcome(self) -> Outcome:
        """Return the outcome so far."""
        with self._lock:
            return Outcome(
                tried=self._tried,
                good=self._good,
                **{name: dict(counts) for name, counts in self._counts.items()},
                strays=self._strays,
                syn_data=self._syn_data,
                first=dict(self._first),
                first_errors=list(self._first_errors),
                switches=list(self._switches),
                elapsed_s=round(time.monotonic() - self._began, 4),
                slowest_s=round(self._slowest_s, 6),
            )


class _Pace:
    """When to go on: a count, an interval, and a stop that may come from elsewhere."""

    def __init__(
        self, count: int | None = 1, interval_s: float = 0.0, stop: threading.Event | None = None
    ) -> None:
        self.count = count
        self.interval_s = interval_s
        self.stop = stop or threading.Event()
        self._until = time.monotonic() + MAX_SECONDS

    def __iter__(self) -> Iterator[int]:
        number = 0
        while self.count is None or number < self.count:
            if self.stop.is_set() or time.monotonic() > self._until:
                return
            yield number
            number += 1
            if self.interval_s and (self.count is None or number < self.count):
                self.stop.wait(self.interval_s)


def _error_name(error: BaseException | str) -> str:
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error.errno))
    if isinstance(error, TimeoutError):
        return "TIMEOUT"
    if isinstance(error, EOFError):
        return "EOF"
    return str(error).partition(":")[0] if isinstance(error, str) else type(error).__name__


def _host_of(spelt: str) -> str:
    return spelt.rpartition(":")[0].strip("[]")


def _spell(address: Address) -> str:
    host, port = address[0].partition("%")[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- sockets ----------------------------------------------------------------------------------


def _target(dial: Dial) -> tuple[int, Address]:
    host = f"::ffff:{dial.host}" if dial.mapped and ":" not in dial.host else dial.host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if "%" in host:
        return family, socket.getaddrinfo(host, dial.port, family)[0][4]
    return family, (host, dial.port)


@functools.cache
def _ports_of_chance() -> range:
    """The ports that this network namespace gives to sockets that ask for none.

    After such a connection its port is in TIME_WAIT for a minute, where no other socket can have
    it: a fixed source port from here fails once in a while.
    """
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return range(int(first), int(last) + 1)


def _open(dial: Dial, kind: socket.SocketKind, *, which: int = 0) -> tuple[socket.socket, Address]:
    """Make the socket and bind it as asked; `which` is added to a fixed source port."""
    port = dial.source_port + which if dial.source_port else 0
    if port in _ports_of_chance():
        raise ValueError(f"source port {port} is in ip_local_port_range: it may be taken")
    family, target = _target(dial)
    sock = socket.socket(family, kind, IPPROTO_MPTCP if dial.mptcp else 0)
    try:
        sock.settimeout(dial.timeout_s)
        if dial.reuseport:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if dial.device:
            name = dial.device.encode() + b"\0"
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
        if dial.recverr:
            sock.setsockopt(socket.IPPROTO_IP, IP_RECVERR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, IPV6_RECVERR, 1)
        if dial.source or dial.source_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            source = dial.source or ("::" if family == socket.AF_INET6 else "0.0.0.0")  # noqa: S104
            sock.bind((source, port))
    except OSError:
        sock.close()
        raise
    return sock, target


def _peername(sock: socket.socket) -> str:
    try:
        return _spell(sock.getpeername())
    except OSError as error:
        return _error_name(error)


def _read_line(sock: socket.socket, rest: bytearray) -> bytes:
    """Read up to the next end of line; what came behind it stays in `rest`."""
    while b"\n" not in rest:
        received = sock.recv(1 << 18)
        if not received:
            raise EOFError("EOF: closed before an answer came")
        rest += received
    line, _, after = bytes(rest).partition(b"\n")
    rest[:] = after
    return line


def _expect_echo(sock: socket.socket, rest: bytearray, line: bytes) -> None:
    if not _read_line(sock, rest).endswith(b" " + line):
        raise OSError(errno.EBADMSG, "the echo differs from what was sent")


@functools.cache
def _text(size: int) -> bytes:
    """A line of so many bytes, of which no part is like another."""
    return b"".join(b"%08x" % number for number in range(size // 8 + 1))[:size]


def _answer(line: bytes) -> dict[str, Any]:
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"name": line.decode("utf-8", "replace")[:80]}


def _connect(sock: socket.socket, target: Address, fastopen: Fastopen) -> bytes:
    """Connect; return what the server will echo (TCP Fast Open needs something to send)."""
    if fastopen == "sendto":
        # Blocking, with the kernel's own time-out: without a cookie this is an ordinary connect().
        patience_s = sock.gettimeout() or 0.0
        sock.settimeout(None)
        bound = struct.pack("ll", int(patience_s), int(patience_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
        sock.sendto(b"fastopen\n", MSG_FASTOPEN, target)
        sock.settimeout(patience_s)
        return b"fastopen"
    if fastopen == "connect":
        sock.setsockopt(socket.IPPROTO_TCP, TCP_FASTOPEN_CONNECT, 1)
        sock.connect(target)
        sock.sendall(b"fastopen\n")
        return b"fastopen"
    sock.connect(target)
    return b""


def _syn_data_taken(sock: socket.socket) -> bool:
    # struct tcp_info: state, ca_state, retransmits, probes, backoff, options
    information = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
    return bool(information[5] & TCPI_OPT_SYN_DATA)


@functools.cache
def _tool(name: str) -> Path:
    """Compile a helper once and return it; OSError when there is no compiler."""
    folder = os.environ.get(TOOLS_VARIABLE)
    if not folder:
        folder = tempfile.mkdtemp(prefix="ebpflb-tools-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    tool = Path(folder) / name
    if not tool.exists():
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if not compiler:
            raise FileNotFoundError(errno.ENOENT, "no C compiler", "cc")
        source = Path(__file__).parent / f"{name}.c"
        draft = tool.with_name(f"{tool.name}.{os.getpid()}")
        subprocess.run([compiler, "-O1", "-o", draft, source], check=True, timeout=60)
        draft.rename(tool)
    return tool


# --- operations -------------------------------------------------------------------------------


def _in_parallel(parallel: int, work: Callable[[int], None]) -> None:
    if parallel == 1:
        work(0)
        return
    threads = [threading.Thread(target=work, args=(number,)) for number in range(parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tcp(
    dial: Dial,
    *,
    pace: _Pace | None = None,
    parallel: int = 1,
    size: int = 0,
    reset: bool = False,
    tally: _Tally | None = None,
) -> Outcome:
    """Connect, read who answers, close; again and again as `pace` says.

    size: send a line of that many bytes too and expect it back. reset: close with RST, so that no
    TIME_WAIT keeps the source port.
    """
    tally = tally or _Tally()
    pace = pace or _Pace()

    def one(which: int) -> None:
        began = time.monotonic()
        try:
            sock, target = _open(dial, socket.SOCK_STREAM, which=which)
        except OSError as error:
            tally.failed(error)
            return
        with sock:
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            try:
                rest = bytearray()
                expected = _connect(sock, target, dial.fastopen)
                answer = _answer(_read_line(sock, rest))
                if dial.fastopen and _syn_data_taken(sock):
                    tally.syn_data()
                if size:
                    expected += (b"\n" if expected else b"") + _text(size)
                    sock.sendall(_text(size) + b"\n")
                for line in expected.split(b"\n") if expected else []:
                    _expect_echo(sock, rest, line)
                took_s = time.monotonic() - began
                tally.good(answer, took_s=took_s, peernames=_peername(sock))
            except (OSError, EOFError) as error:
                tally.failed(error, took_s=time.monotonic() - began)

    def work(which: int) -> None:
        for _ in pace:
            one(which)

    _in_parallel(parallel, work)
    return tally.outcome()


def tcp_hold(
    dial: Dial,
    *,
    pace: _Pace | None = None,
    parallel: int = 1,
    tally: _Tally | None = None,
) -> Outcome:
    """Hold `parallel` connections open and exchange a line on each as `pace` says.

    The connect counts as the first exchange. A connection that breaks is not opened again.
    """
    tally = tally or _Tally()
    pace = pace or _Pace()

    def work(which: int) -> None:
        try:
            sock, target = _open(dial, socket.SOCK_STREAM, which=which)
        except OSError as error:
            tally.failed(error)
            return
        with sock:
            rest = bytearray()
            try:
                _connect(sock, target, "")
                answer = _answer(_read_line(sock, rest))
                tally.good(answer, took_s=0.0, peernames=_peername(sock))
                for number in pace:
                    began = time.monotonic()
                    line = f"line {number}".encode()
                    sock.sendall(line + b"\n")
                    _expect_echo(sock, rest, line)
                    tally.good({"name": answer.get("name")}, took_s=time.monotonic() - began)
            except (OSError, EOFError) as error:
                tally.failed(error)

    _in_parallel(parallel, work)
    return tally.outcome()


def udp(
    dial: Dial,
    *,
    pace: _Pace | None = None,
    sockets: int = 1,
    connected: bool = False,
    one_way: bool = False,
    reopen: bool = False,
    size: int = 0,
    tally: _Tally | None = None,
) -> Outcome:
    """Send datagrams from `sockets` sockets in turn, and wait for each answer.

    connected: connect() first and send(); reopen: connect() the same socket again after an error.
    one_way: wait for nothing. size: pad to that many bytes.
    """
    tally = tally or _Tally()
    pace = pace or _Pace()
    with contextlib.ExitStack() as stack:
        open_sockets: list[tuple[socket.socket, Address]] = []
        for which in range(sockets):
            try:
                sock, target = _open(dial, socket.SOCK_DGRAM, which=which)
                stack.enter_context(sock)
                if connected:
                    sock.connect(target)
                open_sockets.append((sock, target))
            except OSError as error:
                tally.failed(error)
        if not open_sockets:
            return tally.outcome()
        for number in pace:
            sock, target = open_sockets[number % len(open_sockets)]
            payload = f"{number} ".encode().ljust(size, b"x")
            ask = _Question(sock, target if not connected else None, payload, tally)
            if not ask.exchange(dial.timeout_s, one_way=one_way) and connected and reopen:
                try:
                    sock.connect(target)
                except OSError as error:
                    tally.failed(error)
    return tally.outcome()


class _Question(NamedTuple):
    """One datagram and its answer; no target on a connected socket."""

    sock: socket.socket
    target: Address | None
    payload: bytes
    tally: _Tally

    def exchange(self, timeout_s: float, *, one_way: bool) -> bool:
        """Send and wait; count what came of it. False if it failed."""
        began = time.monotonic()
        try:
            if self.target is None:
                self.sock.send(self.payload)
            else:
                self.sock.sendto(self.payload, self.target)
            if one_way:
                self.tally.good({}, took_s=time.monotonic() - began)
                return True
            answer, source = self._await_answer(began + timeout_s)
        except OSError as error:
            self.tally.failed(error, took_s=time.monotonic() - began)
            return False
        self.tally.good(
            answer,
            took_s=time.monotonic() - began,
            sources=_spell(source),
            peernames=_peername(self.sock) if self.target is None else "",
        )
        return True

    def _await_answer(self, deadline: float) -> tuple[dict[str, Any], Address]:
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self.sock], [], [], left_s)[0]:
                break
            data, source = self.sock.recvfrom(1 << 16)
            answer = _answer(data)
            if answer.get("payload", "").encode() == self.payload[: len(answer.get("payload", ""))]:
                return answer, source
            self.tally.stray()
        raise TimeoutError("TIMEOUT: no answer")


def _disconnect(sock: socket.socket) -> None:
    """Take a socket's peer away, as connect() to AF_UNSPEC does."""
    command = [str(_tool("disconnect")), str(sock.fileno())]
    code = subprocess.run(command, check=False, pass_fds=[sock.fileno()]).returncode
    if code:
        raise OSError(code, os.strerror(code))


def reconnect(targets: Sequence[Dial | None]) -> list[Outcome]:
    """Connect one UDP socket to each target in turn, with one exchange each; None disconnects.

    All targets are of the first one's family and socket options. An outcome for each: of None it
    says whether the kernel did it, and getpeername() afterwards.
    """
    outcomes: list[Outcome] = []
    first = next(target for target in targets if target is not None)
    sock, _ = _open(first, socket.SOCK_DGRAM)
    with sock:
        for number, dial in enumerate(targets):
            tally = _Tally()
            try:
                if dial is None:
                    _disconnect(sock)
                    tally.good({}, took_s=0.0, peernames=_peername(sock))
                else:
                    sock.connect(_target(dial)[1])
                    question = _Question(sock, None, f"{number} ".encode(), tally)
                    question.exchange(dial.timeout_s, one_way=False)
            except OSError as error:
                tally.failed(error)
            outcomes.append(tally.outcome())
    return outcomes


def uring(dial: Dial) -> Outcome:
    """Connect once through io_uring; UNSUPPORTED where the kernel, or a compiler, is lacking."""
    tally = _Tally()
    forbidden = Path("/proc/sys/kernel/io_uring_disabled")
    if forbidden.exists() and forbidden.read_text().strip() == "2":
        tally.failed("UNSUPPORTED: kernel.io_uring_disabled is 2")
        return tally.outcome()
    try:
        command = [str(_tool("uring_connect")), dial.host, str(dial.port)]
        command += ["mapped"] if dial.mapped else []
        began = time.monotonic()
        ran = subprocess.run(command, check=True, capture_output=True, timeout=dial.timeout_s + 10)
    except (OSError, subprocess.SubprocessError) as error:
        tally.failed(f"UNSUPPORTED: {error}")
        return tally.outcome()
    said = json.loads(ran.stdout)
    if "unsupported" in said:
        tally.failed(f"UNSUPPORTED: {said['unsupported']}")
    elif said["errno"]:
        tally.failed(OSError(said["errno"], os.strerror(said["errno"])))
    elif not said["line"]:
        tally.failed(EOFError("EOF: closed before an answer came"))
    else:
        took_s = time.monotonic() - began
        answer = _answer(said["line"].encode())
        tally.good(answer, took_s=took_s, peernames=_spell(tuple(said["peer"])))
    return tally.outcome()


def ping(dial: Dial, *, pace: _Pace | None = None) -> Outcome:
    """Send ICMP echo requests from a raw socket; needs CAP_NET_RAW."""
    tally = _Tally()
    family, target = _target(dial)
    version6 = family == socket.AF_INET6
    protocol = socket.IPPROTO_ICMPV6 if version6 else socket.IPPROTO_ICMP
    request, reply = (128, 129) if version6 else (8, 0)
    identity = next(_pings) & 0xFFFF
    with socket.socket(family, socket.SOCK_RAW, protocol) as sock:
        for number in pace or _Pace():
            began = time.monotonic()
            echo = struct.pack("!HH", identity, number & 0xFFFF) + b"ebpflb lab"
            head = struct.pack("!BBH", request, 0, 0)
            if not version6:  # of ICMPv6 the kernel makes the checksum
                head = struct.pack("!BBH", request, 0, _checksum(head + echo))
            try:
                sock.sendto(head + echo, (target[0], 0, *target[2:]))
                source = _await_reply(sock, reply, echo, began + dial.timeout_s)
                tally.good({}, took_s=time.monotonic() - began, sources=source)
            except OSError as error:
                tally.failed(error, took_s=time.monotonic() - began)
    return tally.outcome()


def _await_reply(sock: socket.socket, reply: int, echo: bytes, deadline: float) -> str:
    while (left_s := deadline - time.monotonic()) > 0:
        if not select.select([sock], [], [], left_s)[0]:
            break
        data, source = sock.recvfrom(1 << 16)
        # A raw IPv4 socket delivers the IP header too.
        message = data[(data[0] & 15) * 4 :] if sock.family == socket.AF_INET else data
        if message[0] == reply and message[4:] == echo:
            return str(source[0]).partition("%")[0]
    raise TimeoutError("TIMEOUT: no reply")


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


# --- the program ------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ebpflb.lab.client", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="operation", required=True)
    for name in ("tcp", "hold", "udp", "uring", "ping"):
        command = commands.add_parser(name)
        command.add_argument("host")
        if name != "ping":
            command.add_argument("port", type=int)
        else:
            command.set_defaults(port=0)
        _add_dial(command)
        command.add_argument("--count", type=int, default=1, help="attempts (of each thread)")
        command.add_argument("--interval-s", type=float, default=0.0, help="pause between them")
        command.add_argument("--until-stopped", action="store_true")
        command.add_argument("--parallel", type=int, default=1, help="tcp, hold: connections")
        command.add_argument("--size", type=int, default=0, help="tcp, udp: bytes to have echoed")
        command.add_argument("--reset", action="store_true", help="tcp: close with RST")
        command.add_argument("--sockets", type=int, default=1, help="udp: used in turn")
        command.add_argument("--connected", action="store_true", help="udp: connect() and send()")
        command.add_argument("--one-way", action="store_true", help="udp: await no answer")
        command.add_argument("--reopen", action="store_true", help="udp: connect() after an error")
    command = commands.add_parser("reconnect")
    command.add_argument("--to", action="append", required=True, metavar="HOST:PORT|none")
    _add_dial(command)
    commands.add_parser("worker")
    return parser


def _add_dial(command: argparse.ArgumentParser) -> None:
    command.add_argument("--timeout-s", type=float, default=3.0)
    command.add_argument("--source", default="", help="address to bind")
    command.add_argument("--source-port", type=int, default=0, help="+1 a thread or socket")
    command.add_argument("--device", default="", help="SO_BINDTODEVICE")
    command.add_argument("--reuseport", action="store_true")
    command.add_argument("--mapped", action="store_true", help="IPv4 on an AF_INET6 socket")
    command.add_argument("--mptcp", action="store_true")
    command.add_argument("--fastopen", default="", choices=get_args(Fastopen))
    command.add_argument("--recverr", action="store_true", help="udp: get ICMP errors")


def _dial(options: argparse.Namespace, host: str, port: int) -> Dial:
    given = {name: getattr(options, name) for name in Dial._fields if name not in {"host", "port"}}
    return Dial(host, port, **given)


def _perform(
    options: argparse.Namespace, tally: _Tally, stop: threading.Event
) -> dict[str, Any] | list[dict[str, Any]]:
    """Do what a command line says; return what is to be printed."""
    if options.operation == "reconnect":
        targets = [text.rpartition(":") for text in options.to]
        dials = [
            _dial(options, host.strip("[]"), int(port)) if port != "none" else None
            for host, _, port in targets
        ]
        return [outcome._asdict() for outcome in reconnect(dials)]
    dial = _dial(options, options.host, options.port)
    pace = _Pace(None if options.until_stopped else options.count, options.interval_s, stop)
    match options.operation:
        case "tcp":
            outcome = tcp(
                dial,
                pace=pace,
                parallel=options.parallel,
                size=options.size,
                reset=options.reset,
                tally=tally,
            )
        case "hold":
            outcome = tcp_hold(dial, pace=pace, parallel=options.parallel, tally=tally)
        case "udp":
            outcome = udp(
                dial,
                pace=pace,
                sockets=options.sockets,
                connected=options.connected,
                one_way=options.one_way,
                reopen=options.reopen,
                size=options.size,
                tally=tally,
            )
        case "uring":
            outcome = uring(dial)
        case _:
            outcome = ping(dial, pace=pace)
    return outcome._asdict()


def _say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _interrupt(*_: object) -> NoReturn:
    """Raise, since a read that a signal merely interrupts is begun again."""
    raise InterruptedError


def _until_stopped(options: argparse.Namespace) -> dict[str, Any] | list[dict[str, Any]]:
    """Run an operation in a thread of its own while this one listens to standard input."""
    tally = _Tally()
    stop = threading.Event()
    results: list[dict[str, Any] | list[dict[str, Any]]] = []
    thread = threading.Thread(target=lambda: results.append(_perform(options, tally, stop)))
    signal.signal(signal.SIGTERM, _interrupt)
    thread.start()
    try:
        _say({"ready": True, "pid": os.getpid()})
        while os.read(0, 4096):
            _say(tally.outcome()._asdict())
    except InterruptedError:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.set()
        thread.join()
    return results[0]


def _worker() -> None:
    """Answer one command a line, or a list of them, until the input ends."""
    parser = _parser()

    def perform(command: list[str]) -> dict[str, Any] | list[dict[str, Any]]:
        return _perform(parser.parse_args(command), _Tally(), threading.Event())

    def answer(command: Any) -> dict[str, Any]:
        try:
            if command and isinstance(command[0], list):
                return {"result": _at_once(command, perform)}
            return {"result": perform(command)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - told to the one who asked
            return {"error": f"{type(error).__name__}: {error}"}

    _say({"ready": True, "pid": os.getpid()})
    for line in sys.stdin:
        _say(answer(json.loads(line)))


def _at_once(commands: Sequence[list[str]], perform: Callable[[list[str]], Any]) -> list[Any]:
    """Perform commands at once; the results in their order. What one raises is raised."""
    results: list[Any] = [None] * len(commands)
    errors: list[BaseException] = []
    todo = iter(enumerate(commands))

    def work(_: int) -> None:
        for number, command in todo:  # the threads share it: each takes the next one
            try:
                results[number] = perform(command)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - raised by the first thread
                errors.append(error)

    _in_parallel(min(len(commands), MAX_THREADS), work)
    if errors:
        raise errors[0]
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and print its outcome as JSON; exit code 1 if anything failed."""
    options = _parser().parse_args(arguments)
    if options.operation == "worker":
        _worker()
        return 0
    if getattr(options, "until_stopped", False):
        result = _until_stopped(options)
    else:
        result = _perform(options, _Tally(), threading.Event())
    _say(result)
    outcomes = result if isinstance(result, list) else [result]
    return 0 if all(one["good"] == one["tried"] for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
