"""The health servers of Services: what they answer, where they listen, that nobody can block."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ebpflb import events, health, servicehealth
from ebpflb.model import (
    Address,
    Family,
    HealthCheck,
    NodePorts,
    ObjectKey,
    parse_address,
)
from ebpflb.servicehealth import Place, ServiceHealth, everywhere, owners, places
from tests.logs import capture_logs

TIMEOUT_S = 10.0
WEB, API = ObjectKey("Service", "default", "web"), ObjectKey("Service", "default", "api")

needs_ipv6 = pytest.mark.skipif(not health.has_ipv6(), reason="kernel lacks IPv6")


def free_port() -> int:
    """One that no client of this machine gets by chance, and so connects to itself."""
    while True:
        port = random.randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def one(port: int, endpoints: int = 1, key: ObjectKey = WEB) -> dict[ObjectKey, HealthCheck]:
    return {key: HealthCheck(port, endpoints)}


class Node:
    """Servers of this machine, and what they have said."""

    def __init__(self) -> None:
        self.healthy = True
        self._changed = threading.Condition()
        self._failures: list[tuple[ObjectKey, int, str]] = []
        self.servers: list[ServiceHealth] = []

    def serve(self, *, selected: list[str] | None = None, retry_s: float = 3600) -> ServiceHealth:
        made = ServiceHealth(
            healthy=lambda: self.healthy,
            node_port_addresses=selected,
            failed=self._failed,
            retry_s=retry_s,
        )
        self.servers.append(made)
        return made

    def _failed(self, key: ObjectKey, port: int, reason: str) -> None:
        with self._changed:
            self._failures.append((key, port, reason))
            self._changed.notify_all()

    def failures(self, count: int) -> list[tuple[ObjectKey, int, str]]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._failures) >= count, TIMEOUT_S)
            return list(self._failures)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    for server in made.servers:
        server.close()


@pytest.fixture
def server(node: Node) -> ServiceHealth:
    return node.serve()


def until(condition: Callable[[], bool]) -> None:
    """Until the servers' thread has done it; it says nothing when it has."""
    pause, left = threading.Event(), int(TIMEOUT_S / 0.005)
    while not condition():
        left -= 1
        assert left
        pause.wait(0.005)


def listens(port: int, host: str = "127.0.0.1") -> bool:
    try:
        socket.create_connection((host, port), TIMEOUT_S).close()
    except ConnectionError:  # refused, or reset where it was closed at this moment
        return False
    return True


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read().decode()


def ask(port: int, path: str = "/", *, method: str = "GET", host: str = "127.0.0.1") -> Answer:
    until(lambda: listens(port, host))
    client = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    with contextlib.closing(client):
        client.request(method, path)
        return Answer(client.getresponse())


# --- what is answered ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoints", "healthy", "status"),
    [(1, True, 200), (12, True, 200), (0, True, 503), (1, False, 503), (0, False, 503)],
    ids=[
        "an endpoint here",
        "several",
        "none here",
        "the agent is not well",
        "neither",
    ],
)
def test_the_answer(
    node: Node, server: ServiceHealth, endpoints: int, healthy: bool, status: int
) -> None:
    """HC-03, HC-04, HC-05, HC-11: kube-proxy's, byte for byte."""
    port, node.healthy = free_port(), healthy
    server.follow(one(port, endpoints), NodePorts())
    answer = ask(port)
    assert answer.status == status
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["X-Load-Balancing-Endpoint-Weight"] == str(endpoints)
    assert answer.body == (
        '{\n\t"service": {\n\t\t"namespace": "default",\n\t\t"name": "web"\n\t},\n'
        f'\t"localEndpoints": {endpoints},\n'
        f'\t"serviceProxyHealthy": {"true" if healthy else "false"}\n}}'
    )


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("GET", "/healthz"), ("GET", "/any/thing?x=1"), ("POST", "/"), ("HEAD", "/")],
)
def test_every_path_and_method_answers_alike(server: ServiceHealth, method: str, path: str) -> None:
    """HC-02."""
    port = free_port()
    server.follow(one(port), NodePorts())
    answer = ask(port, path, method=method)
    assert answer.status == 200
    assert int(answer.headers["Content-Length"]) > 0
    assert (answer.body == "") == (method == "HEAD")


def test_counts_and_health_are_those_of_the_moment(node: Node, server: ServiceHealth) -> None:
    """HC-03: what was last followed counts, and no connection is closed for a new count."""
    port = free_port()
    server.follow(one(port, 1), NodePorts())
    assert ask(port).status == 200
    server.follow(one(port, 0), NodePorts())
    assert ask(port).status == 503
    server.follow(one(port, 2), NodePorts())
    assert json.loads(ask(port).body)["localEndpoints"] == 2
    node.healthy = False
    assert ask(port).status == 503


def test_each_service_answers_at_its_own_port(server: ServiceHealth) -> None:
    ports = [free_port(), free_port()]
    server.follow(one(ports[0]) | one(ports[1], 0, API), NodePorts())
    assert json.loads(ask(ports[0]).body)["service"]["name"] == "web"
    assert json.loads(ask(ports[1]).body)["service"]["name"] == "api"


# --- ports come and go ---------------------------------------------------------------------------


def test_a_port_goes_with_its_service_and_a_changed_one_moves(server: ServiceHealth) -> None:
    """HC-08."""
    old, new = free_port(), free_port()
    server.follow(one(old), NodePorts())
    assert ask(old).status == 200
    server.follow(one(new), NodePorts())
    assert ask(new).status == 200
    until(lambda: not listens(old))
    server.follow({}, NodePorts())
    until(lambda: not listens(new))


def test_what_is_followed_is_a_copy(server: ServiceHealth) -> None:
    """A plan is a view that the next update changes, while the thread looks at this one."""
    port, other = free_port(), free_port()
    checks = one(port)
    server.follow(checks, NodePorts())
    checks[API] = HealthCheck(other, 1)
    assert ask(port).status == 200
    assert not listens(other)
    server.follow(checks, NodePorts())
    assert ask(other).status == 200


def test_without_services_there_is_no_thread(server: ServiceHealth) -> None:
    before = threading.active_count()
    server.follow({}, NodePorts())
    assert threading.active_count() == before
    assert server.alive()


def test_hundreds_of_services_are_one_thread(server: ServiceHealth) -> None:
    before = threading.active_count()
    ports = list({free_port() for _ in range(200)})
    server.follow(
        {ObjectKey("Service", "default", f"s{port}"): HealthCheck(port, 1) for port in ports},
        NodePorts(),
    )
    assert threading.active_count() == before + 1
    for port in ports:
        assert ask(port).status == 200
    server.close()
    assert not any(map(listens, ports))


@pytest.fixture
def taken() -> Iterator[socket.socket]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
        yield listener


def test_a_port_that_is_taken_is_told_once_and_costs_others_nothing(
    node: Node, server: ServiceHealth, taken: socket.socket
) -> None:
    """HC-09 and B-47."""
    port, other = taken.getsockname()[1], free_port()
    with capture_logs() as lines:
        server.follow(one(port) | one(other, key=API), NodePorts())
        assert ask(other).status == 200
        ((key, at, reason),) = node.failures(1)
        assert (key, at) == (WEB, port)
        assert reason.startswith("Address already in use at ")
        assert "(process " in reason
        for endpoints in range(2, 6):  # each follows a sync, and tries again
            server.follow(one(port) | one(other, endpoints, API), NodePorts())
            until(lambda: json.loads(ask(other).body)["localEndpoints"] == endpoints)  # noqa: B023
    assert len(node.failures(1)) == 1
    assert [line["service"] for line in lines] == ["default/web"]


@pytest.mark.parametrize("occasion", ["the next sync", "the next try"])
def test_a_port_that_was_taken_is_served_when_it_is_free(
    node: Node, taken: socket.socket, occasion: str
) -> None:
    """HC-09."""
    server = node.serve(retry_s=0.05 if occasion == "the next try" else 3600)
    port = taken.getsockname()[1]
    with capture_logs() as lines:
        server.follow(one(port), NodePorts())
        node.failures(1)
        taken.close()
        if occasion == "the next sync":
            server.follow(one(port), NodePorts())
        assert ask(port).status == 200
        until(lambda: len(lines) == 2)
    assert [line["log_level"] for line in lines] == ["error", "info"]
    assert len(node.failures(1)) == 1


def test_of_two_services_with_one_port_the_first_keeps_it(
    node: Node, server: ServiceHealth
) -> None:
    """HC-09: the other is told, and has it when the first one goes."""
    port = free_port()
    server.follow(one(port), NodePorts())
    assert ask(port).status == 200
    server.follow(one(port) | one(port, 5, API), NodePorts())
    ((key, _, reason),) = node.failures(1)
    assert (key, reason.partition(",")[0]) == (
        API,
        "it is the port of Service default/web already",
    )
    assert json.loads(ask(port).body)["service"]["name"] == "web"
    server.follow(one(port, 5, API), NodePorts())
    until(lambda: json.loads(ask(port).body)["service"]["name"] == "api")


@pytest.mark.parametrize(
    ("checks", "before", "found"),
    [
        (one(1) | one(2, key=API), {}, {1: WEB, 2: API}),
        (one(1) | one(1, key=API), {}, {1: API}),
        (one(1) | one(1, key=API), {1: WEB}, {1: WEB}),
        (one(1, key=API), {1: WEB}, {1: API}),
        (one(2) | one(1, key=API), {1: WEB}, {2: WEB, 1: API}),
        ({}, {1: WEB}, {}),
    ],
    ids=[
        "each its own",
        "of two new ones the first by name",
        "who has it keeps it",
        "it passes on when its owner goes",
        "it passes on when its owner wants another",
        "nobody wants it",
    ],
)
def test_whose_a_port_is(
    checks: Mapping[ObjectKey, HealthCheck],
    before: dict[int, ObjectKey],
    found: dict[int, ObjectKey],
) -> None:
    assert owners(checks, before) == found


# --- where it listens ----------------------------------------------------------------------------


def node_ports(*texts: str, loopback: tuple[Family, ...] = ()) -> NodePorts:
    addresses: frozenset[Address] = frozenset(map(parse_address, texts))
    return NodePorts(addresses, frozenset(loopback))


@pytest.mark.parametrize(
    ("selected", "families"),
    [
        (None, {4, 6}),
        ([], {4, 6}),
        (["all"], {4, 6}),
        (["primary", "all"], {4, 6}),
        (["0.0.0.0/0", "::/0"], {4, 6}),
        (["10.0.0.0/8", "0.0.0.0/0", "::/0"], {4, 6}),
        (["10.0.0.0/8"], {6}),
        (["fd00::/8"], {4}),
        (["0.0.0.0/0", "fd00::/8"], {4}),
        (["10.0.0.0/8", "fd00::/8"], set()),
        (["primary"], set()),
        (["localhost", "0.0.0.0/0"], {4}),
    ],
    ids=[
        "nothing is selected",
        "an empty list",
        "all",
        "all beside others",
        "everything of both families",
        "everything wins over others (NP-04)",
        "no entry of IPv6 is all of IPv6 (NP-03)",
        "no entry of IPv4 is all of IPv4 (NP-03)",
        "everything of one family",
        "some of each",
        "a keyword speaks of both families",
        "everything of one family beside a keyword",
    ],
)
def test_which_families_are_everywhere(selected: list[str] | None, families: set[int]) -> None:
    """HC-07: as match-all is decided for NodePorts."""
    assert everywhere(selected) == {Family(number) for number in families}


BOTH = frozenset(Family)
SOME = node_ports("10.0.0.1", "10.0.0.2", "fd00::1")


@pytest.mark.parametrize(
    ("families", "selected", "ipv6", "found"),
    [
        (BOTH, SOME, True, {Place("::", both=True)}),
        (BOTH, SOME, False, {Place("0.0.0.0")}),
        ({Family.IPV4}, SOME, False, {Place("0.0.0.0")}),
        ({Family.IPV4}, SOME, True, {Place("0.0.0.0"), Place("fd00::1")}),
        ({Family.IPV6}, SOME, True, {Place("::"), Place("10.0.0.1"), Place("10.0.0.2")}),
        (set(), SOME, True, {Place("10.0.0.1"), Place("10.0.0.2"), Place("fd00::1")}),
        (set(), SOME, False, {Place("10.0.0.1"), Place("10.0.0.2")}),
        (set(), node_ports(loopback=(Family.IPV4,)), True, {Place("127.0.0.1")}),
        (set(), NodePorts(), True, set()),
    ],
    ids=[
        "everywhere is one socket for both families",
        "everywhere without IPv6",
        "everywhere of IPv4, and there is no IPv6",
        "everywhere of IPv4, selected of IPv6",
        "everywhere of IPv6, selected of IPv4",
        "selected",
        "selected without IPv6",
        "the loopback where it is selected",
        "nowhere, as long as no address is known",
    ],
)
def test_where_it_listens(
    families: set[Family], selected: NodePorts, ipv6: bool, found: set[Place]
) -> None:
    """HC-07, HC-12."""
    assert places(families, selected, ipv6=ipv6) == found


@needs_ipv6
def test_everywhere_answers_in_both_families(server: ServiceHealth) -> None:
    """HC-12."""
    port = free_port()
    server.follow(one(port), NodePorts())
    assert ask(port).status == 200
    assert ask(port, host="::1").status == 200


def test_selected_addresses_are_followed(node: Node) -> None:
    """HC-07: at these addresses and no other ones, as they come and go."""
    port, server = free_port(), node.serve(selected=["127.0.0.0/30", "fd00::/8"])
    server.follow(one(port), node_ports("127.0.0.2"))
    assert ask(port, host="127.0.0.2").status == 200
    assert not listens(port)
    server.follow(one(port), node_ports("127.0.0.3", "203.0.113.77"))
    assert ask(port, host="127.0.0.3").status == 200
    assert not listens(port, "127.0.0.2")
    server.follow(one(port), node_ports("127.0.0.2", "127.0.0.3"))
    assert ask(port, host="127.0.0.2").status == 200
    assert node.failures(0) == []  # an address that is just going is no reason for alarm


def test_an_address_that_is_taken_leaves_the_others(node: Node, taken: socket.socket) -> None:
    port, server = taken.getsockname()[1], node.serve(selected=["127.0.0.0/8", "fd00::/8"])
    server.follow(one(port), node_ports("127.0.0.1", "127.0.0.2"))
    assert ask(port, host="127.0.0.2").status == 200
    ((_, _, reason),) = node.failures(1)
    assert reason.startswith("Address already in use at 127.0.0.1")


# --- clients -------------------------------------------------------------------------------------


@pytest.fixture
def connect() -> Iterator[Callable[[int], socket.socket]]:
    with contextlib.ExitStack() as stack:

        def make(port: int) -> socket.socket:
            until(lambda: listens(port))
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))

        yield make


Connect = Callable[[int], socket.socket]


def peers(server: ServiceHealth) -> list[tuple[str, int]]:
    """Who is connected, by their addresses in IPv4."""
    with contextlib.suppress(OSError):  # one is going at this moment
        found = [each.socket.getpeername() for each in list(server._connections)]
        return [(host.removeprefix("::ffff:"), port) for host, port, *_ in found]
    return []


def everything(client: socket.socket) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionError):
        while more := client.recv(4096):
            data += more
    return data


@pytest.mark.parametrize(
    ("pieces", "start"),
    [
        ([b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], b"HTTP/1.1 200 OK\r\n"),
        ([b"GET / HTTP/1.0\r\n\r\n"], b"HTTP/1.1 200 OK\r\n"),
        ([b"GET / HTTP/1.1\nHost: x\n\n"], b"HTTP/1.1 200 OK\r\n"),
        ([b"GE", b"T / HT", b"TP/1.1\r\nHost: x\r", b"\n\r", b"\n"], b"HTTP/1.1 200 OK\r\n"),
        ([b"GET /\r\n\r\n"], b"HTTP/1.1 400 Bad Request\r\n"),
        ([b"\x16\x03\x01\x00\x01\r\n\r\n"], b"HTTP/1.1 400 Bad Request\r\n"),
        ([b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 2000], b"HTTP/1.1 431 "),
        ([b"POST / HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody"], b"HTTP/1.1 200 OK\r\n"),
    ],
    ids=[
        "a request",
        "of HTTP/1.0",
        "with bare line feeds",
        "in pieces",
        "of no version",
        "no HTTP at all",
        "that never ends",
        "with a body",
    ],
)
def test_requests(
    server: ServiceHealth, connect: Connect, pieces: list[bytes], start: bytes
) -> None:
    port = free_port()
    server.follow(one(port), NodePorts())
    client = connect(port)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for piece in pieces:
        client.send(piece)
    assert everything(client).startswith(start)


def test_clients_that_say_nothing_keep_nobody_out(
    server: ServiceHealth, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as want to: the oldest go."""
    monkeypatch.setattr(servicehealth, "MOST_CONNECTIONS", 4)
    port = free_port()
    server.follow(one(port), NodePorts())
    silent = [connect(port) for _ in range(20)]
    assert ask(port).status == 200
    assert everything(silent[0]) == b""
    assert len(server._connections) <= 4


@pytest.mark.parametrize("dripping", [False, True], ids=["says nothing", "says a little"])
def test_a_client_has_a_limited_time_to_ask(
    server: ServiceHealth, connect: Connect, monkeypatch: pytest.MonkeyPatch, dripping: bool
) -> None:
    monkeypatch.setattr(servicehealth, "REQUEST_S", 0.1)
    port = free_port()
    server.follow(one(port), NodePorts())
    client = connect(port)
    if dripping:
        client.send(b"GET / HTTP/1.1\r\nX-Slow")
    assert everything(client) == b""


def test_a_client_has_a_limited_time_to_go(
    server: ServiceHealth, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicehealth, "GOODBYE_S", 0.1)
    port = free_port()
    server.follow(one(port), NodePorts())
    client = connect(port)
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert everything(client)
    until(lambda: not server._connections)


def test_a_client_that_goes_on_and_on_is_cut_off(
    server: ServiceHealth, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servicehealth, "GOODBYE_S", 3600)
    port = free_port()
    server.follow(one(port), NodePorts())
    client = connect(port)
    client.send(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(ConnectionError):
        client.sendall(bytes(64 * 1024 * 1024))


def test_without_descriptors_the_oldest_client_goes(
    server: ServiceHealth, connect: Connect
) -> None:
    port = free_port()
    server.follow(one(port), NodePorts())
    silent = connect(port)
    until(lambda: peers(server) == [silent.getsockname()])
    waiting = socket.socket()
    with waiting:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        held = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(socket.socket())
            waiting.settimeout(TIMEOUT_S)
            waiting.connect(("127.0.0.1", port))
            waiting.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = waiting.recv(17)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for each in held:
                each.close()
    assert answer == b"HTTP/1.1 200 OK\r\n"
    assert everything(silent) == b""


def test_a_client_of_a_service_that_has_gone_gets_no_answer(
    server: ServiceHealth, connect: Connect
) -> None:
    port, other = free_port(), free_port()
    server.follow(one(port), NodePorts())
    client = connect(port)
    client.send(b"GET / HT")
    until(lambda: any(each.request for each in server._connections))
    server.follow(one(other), NodePorts())
    until(lambda: not listens(port))
    client.send(b"TP/1.1\r\nHost: x\r\n\r\n")
    assert everything(client) == b""


def test_closing_closes_ports_and_connections(server: ServiceHealth, connect: Connect) -> None:
    port = free_port()
    server.follow(one(port), NodePorts())
    client = connect(port)
    server.close()
    assert not listens(port)
    assert everything(client) == b""


# --- the Event -----------------------------------------------------------------------------------


def test_the_event_is_kube_proxys() -> None:
    """HC-09."""
    event = events.no_health_server("n1", WEB, 32000, "Address already in use at ::")
    assert event.regarding == WEB
    assert (event.type, event.reason, event.action) == (
        "Warning",
        "FailedToStartServiceHealthcheck",
        "Listen",
    )
    assert event.note == (
        'node n1 failed to start healthcheck "default/web" on port 32000: '
        "Address already in use at ::"
    )
