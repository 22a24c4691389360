"""The health server and the metrics server: bodies, codes, addresses (HZ-…, ADM-…)."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus

import pytest

from ebpflb import health
from ebpflb.errors import ConfigError
from ebpflb.health import (
    Health,
    HttpServer,
    Response,
    Route,
    admin_routes,
    health_routes,
    text,
)

TIMEOUT_S = 10.0
PERIOD_S = 30.0
START_S = 1_769_903_999.0
START = "2026-01-31T23:59:59Z"


class Clock:
    def __init__(self) -> None:
        self.now_s = START_S

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


# --- health --------------------------------------------------------------------------------------


Answers = tuple[dict[str, Route], list[tuple[str, int]]]


def routes(one: Health, *, is_eligible: bool = True) -> Answers:
    answered: list[tuple[str, int]] = []
    return (
        health_routes(
            one,
            is_eligible=lambda: is_eligible,
            answered=lambda path, status: answered.append((path, int(status))),
        ),
        answered,
    )


@pytest.mark.parametrize(
    ("late", "is_eligible", "path", "status", "body"),
    [
        (False, True, "/healthz", 200, {"healthy": True, "nodeEligible": True}),
        (False, False, "/healthz", 503, {"healthy": True, "nodeEligible": False}),
        (True, True, "/healthz", 503, {"healthy": False, "nodeEligible": True}),
        (False, True, "/livez", 200, {"healthy": True}),
        (False, False, "/livez", 200, {"healthy": True}),
        (True, True, "/livez", 503, {"healthy": False}),
    ],
    ids=[
        "HZ-05: healthy and eligible",
        "HZ-05: a node that is to be deleted is drained",
        "HZ-05: not healthy",
        "HZ-04: alive",
        "HZ-05: the node's fate is nothing for kubelet to restart us for",
        "HZ-04: a sync that hangs",
    ],
)
def test_what_is_answered(
    *, late: bool, is_eligible: bool, path: str, status: int, body: dict[str, object], clock: Clock
) -> None:
    one = Health(PERIOD_S, clock, clock)
    one.begin()
    one.updated()
    one.queued()
    clock.now_s += 100 if late else 1
    made, answered = routes(one, is_eligible=is_eligible)
    response = made[path]()
    found = json.loads(response.body)
    assert (response.status, response.content_type) == (status, "application/json")
    assert answered == [(path, status)]  # HZ-10
    now = "2026-02-01T00:01:39Z" if late else "2026-02-01T00:00:00Z"
    assert found == {
        "lastUpdated": now if status == 200 else START,
        "currentTime": now,
        **body,
        "status": {
            family: {"lastUpdated": START, "healthy": body["healthy"]}
            for family in ("IPv4", "IPv6")
        },
    }


# --- metrics and administration ------------------------------------------------------------------


@pytest.fixture
def admin() -> dict[str, Route]:
    return admin_routes(
        exposition=lambda: b"metric 1\n",
        mode="ebpf",
        configz={"kubeproxy.config.k8s.io": {"mode": "", "nodePortAddresses": None}},
    )


@pytest.mark.parametrize(
    ("path", "content_type", "body"),
    [
        ("/healthz", "text/plain; charset=utf-8", b"ok"),
        ("/proxyMode", "text/plain; charset=utf-8", b"ebpf"),
        ("/metrics", "text/plain; version=0.0.4; charset=utf-8", b"metric 1\n"),
        (
            "/configz",
            "application/json",
            b'{"kubeproxy.config.k8s.io": {"mode": "", "nodePortAddresses": null}}',
        ),
        ("/metrics/slis", "text/plain; version=0.0.4; charset=utf-8", b""),
    ],
    ids=["ADM-01", "ADM-03: the mode's word alone", "ADM-02", "ADM-04", "ADM-02: no check yet"],
)
def test_what_the_metrics_server_answers(
    path: str, content_type: str, body: bytes, admin: dict[str, Route]
) -> None:
    assert admin[path]() == Response(HTTPStatus.OK, content_type, body)


def test_adm_02_the_indicators_count_the_health_checks(admin: dict[str, Route]) -> None:
    admin["/healthz"]()
    admin["/healthz"]()
    lines = admin["/metrics/slis"]().body.decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'kubernetes_healthcheck{name="ping",type="healthz"} 1',
        'kubernetes_healthchecks_total{name="ping",status="success",type="healthz"} 2',
    ]


def test_adm_05_there_is_no_profiling(admin: dict[str, Route]) -> None:
    assert not [path for path in admin if path.startswith("/debug")]


# --- servers -------------------------------------------------------------------------------------


needs_ipv6 = pytest.mark.skipif(not health.has_ipv6(), reason="kernel lacks IPv6")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextlib.contextmanager
def serving(address: str, **routes: Route) -> Iterator[None]:
    made = {f"/{name}": route for name, route in routes.items()}
    server = HttpServer("--healthz-bind-address", address, made, hard_fail=True)
    try:
        yield
    finally:
        server.close()


def got(host: str, port: int, path: str, method: str = "GET") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    connection.request(method, path)
    return connection.getresponse()


def test_hz_01_headers_and_unknown_paths() -> None:
    port = free_port()
    with serving(f"127.0.0.1:{port}", healthz=lambda: text("ok")):
        response = got("127.0.0.1", port, "/healthz?verbose")
        assert (response.status, response.read()) == (200, b"ok")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Content-Length"] == "2"
        assert got("127.0.0.1", port, "/healthz", "HEAD").read() == b""
        assert got("127.0.0.1", port, "/debug/pprof/").status == 404


@needs_ipv6
@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]"])
def test_all_addresses_are_those_of_both_families(wildcard: str) -> None:
    port = free_port()
    with serving(f"{wildcard}:{port}", healthz=lambda: text("ok")):
        for host in ("127.0.0.1", "::1"):
            assert got(host, port, "/healthz").status == 200


def test_all_addresses_are_those_of_ipv4_where_there_is_no_ipv6(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "has_ipv6", lambda: False)
    port = free_port()
    with serving(f"0.0.0.0:{port}", healthz=lambda: text("ok")):
        assert got("127.0.0.1", port, "/healthz").status == 200


@needs_ipv6
def test_one_address_is_that_one_alone() -> None:
    port = free_port()
    with (
        serving(f"[::1]:{port}", healthz=lambda: text("six")),
        serving(f"127.0.0.1:{port}", healthz=lambda: text("four")),
    ):
        assert got("::1", port, "/healthz").read() == b"six"
        assert got("127.0.0.1", port, "/healthz").read() == b"four"


@contextlib.contextmanager
def taken() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        yield one.getsockname()[1]


def test_hz_08_an_address_that_is_taken_is_told_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "BIND_RETRY_S", 0.001)
    told: list[tuple[str, str]] = []
    served = threading.Event()
    with contextlib.ExitStack() as stack:
        with taken() as port:
            server = HttpServer(
                "--metrics-bind-address",
                f"127.0.0.1:{port}",
                {"/healthz": lambda: text("ok")},
                hard_fail=False,
                failed=lambda flag, reason: told.append((flag, reason)),
            )
            stack.callback(server.close)
        assert until(lambda: answers(port), served)
    ((flag, reason),) = told
    assert flag == "--metrics-bind-address"
    assert reason.startswith(f"--metrics-bind-address 127.0.0.1:{port}: Address already in use")


def until(holds: Callable[[], bool], never: threading.Event) -> bool:
    """Whether it comes to hold within the time-out."""
    return any(holds() or never.wait(0.01) for _ in range(int(TIMEOUT_S / 0.01)))


def answers(port: int) -> bool:
    try:
        return got("127.0.0.1", port, "/healthz").status == 200
    except OSError:
        return False


def test_cfg_11_an_address_that_is_taken_may_end_the_agent() -> None:
    with taken() as port, pytest.raises(ConfigError, match="Address already in use"):
        HttpServer("--healthz-bind-address", f"127.0.0.1:{port}", {}, hard_fail=True)


def test_a_source_whose_thread_has_ended_turns_it_red() -> None:
    """A fault of ours that a restart mends; losing what the source reads from is none (HZ-07)."""
    health = Health(30.0)
    assert health.healthy()
    health.depends_on(lambda: False)
    assert not health.healthy()
