"""When the health endpoints are red, and what they say."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from ebpflb.errors import ConfigError
from ebpflb.health import Health, HttpServer, json_response, text


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
        ([], True),
        ([1e6], True),
        (["queued", 59.9], True),
        (["queued", 60.0], False),
        (["queued", 30.0, "queued", 30.0], False),
        (["queued", 100.0, "updated"], True),
        (["queued", "updated", 1e6], True),
    ],
    ids=[
        "before the first sync it is healthy",
        "a quiet cluster stays healthy for ever",
        "a change may wait for less than two sync periods",
        "a change that waits for two sync periods turns it red",
        "only the oldest change that waits counts",
        "a sync makes it healthy again",
        "what is in force does not age",
    ],
)
def test_health(clock: Clock, story: list[str | float], healthy: bool) -> None:
    """HZ-03 and HZ-07."""
    health = Health(30.0, clock)
    for step in story:
        if isinstance(step, float):
            clock.now += step
        else:
            getattr(health, step)()
    assert health.healthy() is healthy


def test_a_source_whose_thread_has_ended_turns_it_red(clock: Clock) -> None:
    health = Health(30.0, clock)
    health.depends_on(lambda: False)
    assert not health.healthy()


def test_the_body_tells_the_last_update_when_unhealthy_and_now_otherwise(clock: Clock) -> None:
    """HZ-02 and HZ-06."""
    health = Health(30.0, clock)
    health.queued()
    health.updated()
    clock.now += 5
    assert health.body(node_eligible=True) == {
        "lastUpdated": "1970-01-12T13:46:45Z",
        "currentTime": "1970-01-12T13:46:45Z",
        "healthy": True,
        "nodeEligible": True,
        "status": {
            family: {"lastUpdated": "1970-01-12T13:46:45Z", "healthy": True}
            for family in ("IPv4", "IPv6")
        },
    }
    health.queued()
    clock.now += 60
    body = health.body(node_eligible=None)
    assert "nodeEligible" not in body
    assert (body["lastUpdated"], body["healthy"]) == ("1970-01-12T13:46:40Z", False)


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
    for _ in range(500):
        try:
            with urllib.request.urlopen(url + "/proxyMode", timeout=5) as answer:
                assert answer.read() == b"ebpf"
                return
        except urllib.error.URLError:
            continue
    pytest.fail("it never listened")
