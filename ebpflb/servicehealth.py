# SPDX-License-Identifier: Apache-2.0
"""The health servers of Services: has this node an endpoint of its own? (HC-01 to HC-12)

A Service with external policy Local has a port at which load balancers ask that of each node.
There may be hundreds of them, so one thread serves all, and no client can keep it from the others:
a connection has one question and a time limit, and where there are too many the oldest goes. Which
Services have such a port, and how many endpoints count, is the plan's to say.
"""

from __future__ import annotations

import errno
import json
import os
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from typing import Final, NamedTuple

import msgspec

from ebpflb.health import BIND_RETRY_S, has_ipv6
from ebpflb.logs import Log
from ebpflb.model import (
    Family,
    HealthCheck,
    Network,
    NodePorts,
    ObjectKey,
    family_of,
    format_address,
    parse_network,
    unspecified,
)
from ebpflb.node import port_holder

_log = Log("servicehealth")

REQUEST_S: Final = 10.0
"""A client must have asked within this time, however slowly it does."""
GOODBYE_S: Final = 2.0
"""And must be gone so long after the answer."""
MOST_CONNECTIONS: Final = 256
_REQUEST_BYTES: Final = 8192
_GOODBYE_BYTES: Final = 65536
_BACKLOG: Final = 128
_FULL: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_FULL_S: Final = 0.1
_HOLDERS: Final = 5
"""So many at a time are looked for: that reads all of /proc, and a kube-proxy has every port."""
_IPV6_FREEBIND: Final = 78
_IP_FREEBIND: Final = 15

_REQUEST_LINE: Final = re.compile(rb"([!-~]+) \S+ HTTP/1\.[0-9]\r?\n")
_REQUEST_END: Final = re.compile(rb"\r?\n\r?\n")

_KEYWORDS: Final = {"primary", "localhost", "all"}
_LOOPBACK: Final = {Family.IPV4: "127.0.0.1", Family.IPV6: "::1"}


def everywhere(selected: Iterable[str] | None) -> frozenset[Family]:
    """The families for which ``nodePortAddresses`` selects every address (NP-03, NP-04).

    ``selected`` are its entries, all valid. What is everywhere is said to the kernel as such: an
    address that comes later is served at once, and one port costs one socket.
    """
    entries = list(selected or ())
    networks = [parse_network(one) for one in entries if one not in _KEYWORDS]
    found = set()
    for family in Family:
        mine = [one for one in networks if one.family is family]
        whole = Network(unspecified(family), 96 if family is Family.IPV4 else 0)
        is_spoken_of = mine or any(one in _KEYWORDS for one in entries)
        if not is_spoken_of or "all" in entries or whole in mine:
            found.add(family)
    return frozenset(found)


class Place(NamedTuple):
    """Where a server listens; ``host`` "::" with ``both`` is every address of both families."""

    host: str
    both: bool = False


def places(
    families_everywhere: Collection[Family], node_ports: NodePorts, *, ipv6: bool
) -> frozenset[Place]:
    """Where the servers are to listen (HC-07): as NodePorts do, at TCP sockets of this node.

    One of ``families_everywhere`` is served at all addresses. Without ``ipv6`` in the kernel
    there is only IPv4.
    """
    families = [family for family in Family if ipv6 or family is Family.IPV4]
    if all(family in families_everywhere for family in families):
        return frozenset({Place("::", both=True) if ipv6 else Place("0.0.0.0")})  # noqa: S104
    found: set[Place] = set()
    for family in families:
        if family in families_everywhere:
            found.add(Place("0.0.0.0" if family is Family.IPV4 else "::"))  # noqa: S104
            continue
        if family in node_ports.loopback:
            found.add(Place(_LOOPBACK[family]))
        found |= {
            Place(format_address(address))
            for address in node_ports.addresses
            if family_of(address) is family
        }
    return frozenset(found)


def owners(
    checks: Mapping[ObjectKey, HealthCheck], before: Mapping[int, ObjectKey]
) -> dict[int, ObjectKey]:
    """Whose each port is: who has it keeps it, and of new ones the first by name gets it."""
    found = {
        port: key for port, key in before.items() if key in checks and checks[key].port == port
    }
    for key in sorted(checks):
        found.setdefault(checks[key].port, key)
    return found


class _Wanted(NamedTuple):
    checks: Mapping[ObjectKey, HealthCheck]
    places: frozenset[Place]


class _Connection(msgspec.Struct, eq=False, gc=False):
    """A client's connection to ``port``: it asks, or after the answer is waited for to close."""

    socket: socket.socket
    port: int
    deadline: float
    request: bytes = b""
    answered: bool = False
    left: int = _GOODBYE_BYTES


class ServiceHealth:
    """Serves what ``follow`` was last told, from a thread that begins with the first Service.

    ``healthy``: is this agent itself well? ``failed`` is told, on that thread, once for each
    Service whose port is not served at some address, and why; it is tried again with each
    ``follow``, and every ``retry_s`` seconds. All methods are for one thread.
    """

    def __init__(
        self,
        *,
        healthy: Callable[[], bool],
        node_port_addresses: Iterable[str] | None,
        failed: Callable[[ObjectKey, int, str], None] = lambda _key, _port, _reason: None,
        retry_s: float = BIND_RETRY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._healthy = healthy
        self._everywhere = everywhere(node_port_addresses)
        self._failed = failed
        self._retry_s = retry_s
        self._clock = clock
        self._ipv6 = has_ipv6()
        self._wanted = _Wanted({}, frozenset())
        self._closing = threading.Event()
        self._wake_fd = -1
        self._thread: threading.Thread | None = None
        # What follows is the thread's.
        self._selector: selectors.BaseSelector
        self._owners: dict[int, ObjectKey] = {}
        self._listeners: dict[tuple[int, Place], socket.socket] = {}
        self._connections: dict[_Connection, None] = {}  # in the order in which they came
        self._problems: dict[ObjectKey, str] = {}

    def follow(self, checks: Mapping[ObjectKey, HealthCheck], node_ports: NodePorts) -> None:
        """Serve these from now on, and nothing else; it does not wait (HC-08)."""
        wanted = _Wanted(dict(checks), places(self._everywhere, node_ports, ipv6=self._ipv6))
        if wanted == self._wanted and not self._problems:
            return
        self._wanted = wanted
        if self._thread is None and checks:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = threading.Thread(target=self._run, name="service-health", daemon=True)
            self._thread.start()
        elif self._thread is not None:
            os.eventfd_write(self._wake_fd, 1)

    def alive(self) -> bool:
        """Whether what is wanted is cared for."""
        return self._thread is None or self._thread.is_alive()

    def close(self) -> None:
        """Close all ports, then return."""
        self._closing.set()
        if self._thread is not None:
            os.eventfd_write(self._wake_fd, 1)
            self._thread.join()
            self._thread = None
            os.close(self._wake_fd)

    # --- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._wake_fd, selectors.EVENT_READ, self._woken)
            try:
                while not self._closing.is_set():
                    wanted = self._wanted
                    self._reconcile(wanted)
                    self._serve(wanted)
            finally:
                for connection in list(self._connections):
                    self._drop(connection)
                for at in list(self._listeners):
                    self._unlisten(at)

    def _woken(self) -> None:
        os.eventfd_read(self._wake_fd)

    def _reconcile(self, wanted: _Wanted) -> None:
        """Open and close ports until they are the wanted ones, as far as possible."""
        self._owners = owners(wanted.checks, self._owners)
        listening = {(port, place) for port in self._owners for place in wanted.places}
        for at in [at for at in self._listeners if at not in listening]:
            self._unlisten(at)
        problems = {
            key: f"it is the port of {owner} already"
            for key, check in wanted.checks.items()
            if (owner := self._owners[check.port]) != key
        }
        for at in sorted(listening - self._listeners.keys()):
            port, place = at
            try:
                self._listeners[at] = self._listen(port, place)
            except OSError as error:
                reason = f"{error.strerror} at {place.host}"
                problems.setdefault(self._owners[port], reason)
        self._report(wanted.checks, problems)

    def _report(
        self, checks: Mapping[ObjectKey, HealthCheck], problems: dict[ObjectKey, str]
    ) -> None:
        """Say what has become of each Service, once."""
        before, self._problems = self._problems, problems
        new = [key for key, reason in problems.items() if before.get(key) != reason]
        for index, key in enumerate(new):
            port, reason = checks[key].port, problems[key]
            holder = port_holder(port) if index < _HOLDERS else ""
            _log.error(
                "a Service's health port is not served; trying again",
                service=f"{key.namespace}/{key.name}",
                port=port,
                reason=reason,
                holder=holder or None,
                retry_s=self._retry_s,
            )
            self._failed(key, port, f"{reason}, {holder} listens there" if holder else reason)
        for key in before.keys() - problems.keys():
            if key in checks:
                _log.info(
                    "a Service's health port is served now", service=f"{key.namespace}/{key.name}"
                )

    def _serve(self, wanted: _Wanted) -> None:
        """Answer until something else is wanted, or it is time to try what failed again."""
        retry_at = self._clock() + self._retry_s if self._problems else float("inf")
        while not self._closing.is_set() and self._wanted is wanted:
            now = self._clock()
            if now >= retry_at:
                return
            due = min((one.deadline for one in self._connections), default=float("inf"))
            until = min(due, retry_at)
            ready = self._selector.select(None if until == float("inf") else max(0, until - now))
            for key, _ in ready:
                key.data()
            if self._clock() >= due:
                self._expire()

    # --- ports ------------------------------------------------------------------------------------

    def _listen(self, port: int, place: Place) -> socket.socket:
        is_ipv6 = ":" in place.host
        made = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET, socket.SOCK_STREAM)
        try:
            made.settimeout(0)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # An address that has just gone is no reason for alarm: the next plan knows.
            if is_ipv6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not place.both)
                made.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
            else:
                made.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
            made.bind((place.host, port))
            made.listen(_BACKLOG)
            self._selector.register(made, selectors.EVENT_READ, partial(self._accept, made, port))
        except OSError:
            made.close()
            raise
        return made

    def _unlisten(self, at: tuple[int, Place]) -> None:
        listener = self._listeners.pop(at)
        self._selector.unregister(listener)
        listener.close()

    # --- connections ------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket, port: int) -> None:
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            if error.errno in _FULL:  # and the client stays at the door
                self._make_room()
            return
        accepted.settimeout(0)
        connection = _Connection(accepted, port, self._clock() + REQUEST_S)
        if len(self._connections) >= MOST_CONNECTIONS:
            self._make_room()
        try:
            data = partial(self._receive, connection)
            self._selector.register(accepted, selectors.EVENT_READ, data)
        except OSError:
            accepted.close()
        else:
            self._connections[connection] = None

    def _make_room(self) -> None:
        if self._connections:
            self._drop(next(iter(self._connections)))
        else:
            self._closing.wait(_FULL_S)

    def _receive(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return  # it had to go for another one a moment ago
        try:
            data = connection.socket.recv(_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
        elif connection.answered:
            connection.left -= len(data)
            if connection.left < 0:
                self._drop(connection)
        else:
            connection.request += data
            if _REQUEST_END.search(connection.request):
                self._answer(connection, self._answer_to(connection))
            elif len(connection.request) > _REQUEST_BYTES:
                self._answer(connection, _error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE))

    def _answer_to(self, connection: _Connection) -> bytes:
        request = _REQUEST_LINE.match(connection.request)
        if request is None:
            return _error(HTTPStatus.BAD_REQUEST)
        key = self._owners.get(connection.port)
        check = self._wanted.checks.get(key) if key is not None else None
        if key is None or check is None:
            return b""  # its Service has gone since
        return answer(key, check, healthy=self._healthy(), only_head=request[1] == b"HEAD")

    def _answer(self, connection: _Connection, answer: bytes) -> None:
        """Send it; it fits into any socket's buffer.

        The client is to close first: closing with something unread would reset the connection, and
        might take the answer with it.
        """
        try:
            connection.socket.send(answer)
            connection.socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop(connection)
            return
        connection.answered = True
        connection.request = b""
        connection.deadline = self._clock() + GOODBYE_S

    def _expire(self) -> None:
        now = self._clock()
        for connection in [one for one in self._connections if one.deadline <= now]:
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection]
        self._selector.unregister(connection.socket)
        connection.socket.close()


# --- what is answered ----------------------------------------------------------------------------


def answer(key: ObjectKey, check: HealthCheck, *, healthy: bool, only_head: bool = False) -> bytes:
    """kube-proxy's answer, whatever was asked for (HC-02 to HC-05)."""
    body = json.dumps(
        {
            "service": {"namespace": key.namespace, "name": key.name},
            "localEndpoints": check.endpoints,
            "serviceProxyHealthy": healthy,
        },
        indent="\t",
    )
    is_good = check.endpoints > 0 and healthy
    return _response(
        HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE,
        body,
        ("Content-Type: application/json", f"X-Load-Balancing-Endpoint-Weight: {check.endpoints}"),
        only_head=only_head,
    )


def _error(status: HTTPStatus) -> bytes:
    text = f"{status.value} {status.phrase}"
    return _response(status, text, ("Content-Type: text/plain; charset=utf-8",))


def _response(
    status: HTTPStatus, body: str, headers: Iterable[str], *, only_head: bool = False
) -> bytes:
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        *headers,
        "X-Content-Type-Options: nosniff",
        f"Date: {formatdate(usegmt=True)}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "",
        "" if only_head else body,
    )
    return "\r\n".join(lines).encode()
