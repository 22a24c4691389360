"""When the health endpoints are red, and what they say."""

from __future__ import annotations

import http.client
import json
import socket
import socketserver
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer

import pytest

from ebpflb import health as health_module
from ebpflb.errors import ConfigError
from ebpflb.health import Health, HttpServer, json_response, text
from ebpflb.lab import wait_until


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.mark.parametrize(
    ("story", "healthy"),
    [
        (["queued", "taken", 1e6], True),
        (["queued", "taken", 1e6, "queued", "taken", "begin", 59.9], True),
        (["queued", "begin", 60.0], False),
        (["begin", "updated", 1e6], True),
        (["begin", "updated", "queued", 59.9], True),
        (["begin", "updated", "queued", 60.0], False),
        (["begin", "updated", "queued", 30.0, "queued", 30.0], False),
        (["begin", "updated", "queued", 30.0, "taken", 30.0], False),
        (["begin", "updated", "queued", "taken", 30.0, "queued", "taken", 30.0], False),
        (["begin", "updated", "queued", 100.0, "taken", "updated"], True),
        (["begin", "updated", "queued", "taken", "updated", 1e6], True),
        (["begin", "updated", "queued", "taken", 30.0, "queued", "updated", 59.9], True),
        (["begin", "updated", "queued", "taken", 30.0, "queued", "updated", 60.0], False),
        (["begin", "updated", "queued", 30.0, "queued", "taken", "updated", 59.9], True),
        (["begin", "updated", "queued", 30.0, "queued", "taken", "updated", 60.0], False),
    ],
    ids=[
        "before the source has told everything nothing waits",
        "what was told at first waits from when everything has been told",
        "the first sync may not take for ever",
        "a quiet cluster stays healthy for ever",
        "a change may wait for less than two sync periods",
        "a change that nobody takes turns it red",
        "only the oldest change that waits counts",
        "a change that was taken waits from when it came",
        "only the oldest change that was taken counts",
        "a sync makes it healthy again",
        "what is in force does not age",
        "a sync does not age what came meanwhile",
        "a sync does not hide what came meanwhile",
        "one that came while the queue was emptied waits from then",
        "one that came while the queue was emptied is not forgotten",
    ],
)
def test_health(clock: Clock, story: list[str | float], healthy: bool) -> None:
    """HZ-03, HZ-07 and H-20; ``taken`` takes one."""
    health = Health(30.0, clock)
    for step in story:
        if isinstance(step, float):
            clock.now += step
        else:
            getattr(health, step)(*([1] if step == "taken" else []))
    assert health.healthy() is healthy


def test_what_is_deferred_waits_from_when_it_was(clock: Clock) -> None:
    health = Health(30.0, clock)
    health.begin()
    began = clock.now
    clock.now += 59
    health.updated(began)
    assert health.healthy()
    clock.now += 1
    assert not health.healthy()
    health.updated()
    assert health.healthy()


def test_a_source_whose_thread_has_ended_turns_it_red(clock: Clock) -> None:
    health = Health(30.0, clock)
    health.depends_on(lambda: False)
    assert not health.healthy()


def test_the_body_tells_the_last_update_when_unhealthy_and_now_otherwise(clock: Clock) -> None:
    """HZ-02 and HZ-06."""
    health = Health(30.0, clock, clock)
    health.begin()
    health.updated()
    clock.now += 5
    assert health.body(node_eligible=True) == {
        "lastUpdated": "1970-01-12T13:46:45Z",
        "currentTime": "1970-01-12T13:46:45Z",
        "healthy": True,
        "nodeEligible": True,
        "status": {
            family: {"lastUpdated": "1970-01-12T13:46:40Z", "healthy": True}
            for family in ("IPv4", "IPv6")
        },
    }
    health.queued()
    clock.now += 60
    body = health.body(node_eligible=None)
    assert "nodeEligible" not in body
    assert (body["lastUpdated"], body["healthy"]) == ("1970-01-12T13:46:40Z", False)


def test_a_wall_clock_that_is_set_changes_nothing(clock: Clock) -> None:
    wall = Clock()
    health = Health(30.0, clock, wall)
    health.begin()
    wall.now += 1e6
    assert health.healthy()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve(free_port: int) -> Iterator[Callable[..., str]]:
    servers: list[HttpServer] = []

    def start(*, hard_fail: bool = False) -> str:
        address = f"127.0.0.1:{free_port}"
        routes = {"/proxyMode": lambda: text("ebpf"), "/bad": lambda: json_response({}, 503)}
        servers.append(HttpServer("--test-address", address, routes, hard_fail=hard_fail))
        return f"http://{address}"

    yield start
    for server in servers:
        server.close()


def test_proxy_mode_is_the_bare_word(serve: Callable[..., str]) -> None:
    """ADM-03."""
    with urllib.request.urlopen(serve() + "/proxyMode", timeout=5) as answer:
        assert answer.read() == b"ebpf"
        assert answer.headers["Content-Type"].startswith("text/plain")


def test_json_answers_are_not_sniffed(serve: Callable[..., str]) -> None:
    """HZ-01."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(serve() + "/bad", timeout=5)
    with caught.value as answer:
        assert answer.code == 503
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert json.loads(answer.read()) == {}


def test_an_unknown_path_is_not_found(serve: Callable[..., str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(serve() + "/nothing", timeout=5)
    with caught.value as answer:
        assert answer.code == 404


def test_a_taken_port_names_its_holder_and_with_hard_fail_ends_the_agent(
    serve: Callable[..., str], free_port: int
) -> None:
    """HZ-08, L-64."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        holder.listen()
        with pytest.raises(ConfigError, match=r"Address already in use, .+ listens there"):
            serve(hard_fail=True)


def test_a_taken_port_is_tried_again_until_it_is_free(
    serve: Callable[..., str], free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HZ-08: retried; here every 20 ms."""
    monkeypatch.setattr("ebpflb.health.BIND_RETRY_S", 0.02)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port))
        holder.listen()
        url = serve()

    def mode() -> bytes:
        try:
            with urllib.request.urlopen(url + "/proxyMode", timeout=5) as answer:
                return bytes(answer.read())
        except (OSError, http.client.HTTPException):
            return b""

    assert wait_until(mode, timeout_s=30, what="it listens") == b"ebpf"


def closes(server: HttpServer) -> bool:
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(5)
    return not closing.is_alive()


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_it_closes_also_before_it_has_begun_to_serve(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    run, shutdown = HttpServer._run, health_module._Server.shutdown

    def late(self: HttpServer) -> None:
        told.wait()
        run(self)

    def tell(self: socketserver.BaseServer) -> None:
        told.set()
        shutdown(self)

    monkeypatch.setattr(HttpServer, "_run", late)
    monkeypatch.setattr(health_module._Server, "shutdown", tell)
    server = HttpServer("--test-address", f"127.0.0.1:{free_port}", {}, hard_fail=True)
    assert closes(server)
    assert not listens(free_port)


def test_it_closes_also_while_it_gets_its_port_at_last(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ebpflb.health.BIND_RETRY_S", 0.0)
    bind, bound = HttpServer._bind, threading.Event()

    def slow(
        self: HttpServer, *, hard_fail: bool, quiet: bool = False
    ) -> ThreadingHTTPServer | None:
        if not quiet:
            return None
        server = bind(self, hard_fail=hard_fail)
        bound.set()
        self._closing.wait()
        return server

    monkeypatch.setattr(HttpServer, "_bind", slow)
    server = HttpServer("--test-address", f"127.0.0.1:{free_port}", {}, hard_fail=False)
    bound.wait()
    assert closes(server)
    assert not listens(free_port)
