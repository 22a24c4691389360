# SPDX-License-Identifier: Apache-2.0
"""The two small HTTP servers: health for kubelet and load balancers, metrics for people.

They run in threads of their own and read a clock, so that they turn red also when the loop hangs.
Answers are kube-proxy's, byte for byte where something parses them. How a metric is counted and
what a configuration holds is not known here: functions tell it.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from ebpflb.config import parse_bind_address
from ebpflb.errors import ConfigError
from ebpflb.logs import Log
from ebpflb.model import Family
from ebpflb.node import port_holder

_log = Log("health")

BIND_RETRY_S = 5.0
POLL_S = 0.05  # so much later than it might a server ends


class Response(NamedTuple):
    status: int
    content_type: str
    body: bytes


Route = Callable[[], Response]


class Health:
    """Healthy unless an update has waited for two sync periods (HZ-03). Any thread may ask.

    Updates wait twice: in the queue, from ``queued`` to ``taken``, and in the loop's hands, until
    ``updated``. So it is red also when the loop hangs, wherever that is. Before ``begin`` nothing
    waits: a first list may be slow. A source's thread that has ended is a fault of ours that a
    restart mends, so it counts too; losing what the source reads from does not (HZ-07).

    ``clock`` is monotonic and the loop's own, ``wall_clock`` is for what is printed.
    """

    def __init__(
        self,
        sync_period_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._limit_s = 2 * sync_period_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._begun = False
        self._in_queue = 0
        self._queued_at: float | None = None
        self._taken_at: float | None = None
        self._updated_at = wall_clock()
        self._alive: Callable[[], bool] = lambda: True

    def depends_on(self, alive: Callable[[], bool]) -> None:
        """Be unhealthy from now on when ``alive`` says no."""
        self._alive = alive

    def begin(self) -> None:
        """From now on all that waits counts, what waits already from now."""
        with self._lock:
            self._begun = True
            self._taken_at = self._clock()
            self._queued_at = self._taken_at if self._in_queue else None

    def queued(self) -> None:
        """An update goes into the queue. Any thread may say so."""
        with self._lock:
            self._in_queue += 1
            if self._queued_at is None:
                self._queued_at = self._clock()

    def taken(self, updates: int) -> None:
        """The loop has emptied the queue of so many updates."""
        with self._lock:
            self._in_queue -= updates
            if self._taken_at is None:
                self._taken_at = self._queued_at
            # Those that are there again came a moment ago, after the last one was taken.
            self._queued_at = self._clock() if self._in_queue else None

    def updated(self, waits_since: float | None = None) -> None:
        """All that was taken is in force, but for what has been deferred since that time."""
        with self._lock:
            self._taken_at = waits_since
            if waits_since is None:
                self._updated_at = self._wall_clock()

    def healthy(self) -> bool:
        with self._lock:
            since = self._queued_at if self._taken_at is None else self._taken_at
            waits = self._begun and since is not None and self._clock() - since >= self._limit_s
        return not waits and self._alive()

    def body(self, *, node_eligible: bool | None) -> dict[str, object]:
        """HZ-02; ``node_eligible`` None leaves it out, as /livez does.

        What is answered with 200 was updated just now (HZ-06); the families say when they really
        were.
        """
        now = self._wall_clock()
        healthy = self.healthy()
        updated = _rfc3339(self._updated_at)
        body: dict[str, object] = {
            "lastUpdated": _rfc3339(now) if healthy and node_eligible is not False else updated,
            "currentTime": _rfc3339(now),
            "healthy": healthy,
        }
        if node_eligible is not None:
            body["nodeEligible"] = node_eligible
        body["status"] = {
            family.label: {"lastUpdated": updated, "healthy": healthy} for family in Family
        }
        return body


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def text(body: str) -> Response:
    return Response(HTTPStatus.OK, "text/plain; charset=utf-8", body.encode())


def json_response(body: object, status: int = HTTPStatus.OK) -> Response:
    return Response(status, "application/json", json.dumps(body).encode())


# --- what is answered where ----------------------------------------------------------------------


def health_routes(
    health: Health, *, is_eligible: Callable[[], bool], answered: Callable[[str, int], None]
) -> dict[str, Route]:
    """/healthz for load balancers, /livez for kubelet (HZ-01 to HZ-05).

    ``is_eligible``: may this node have new traffic? ``answered`` is told each path and status.
    """

    def answer(path: str, status: HTTPStatus, *, node_eligible: bool | None) -> Response:
        answered(path, status)
        return json_response(health.body(node_eligible=node_eligible), status)

    def healthz() -> Response:
        eligible = is_eligible()
        return answer("/healthz", _status(health.healthy() and eligible), node_eligible=eligible)

    def livez() -> Response:
        return answer("/livez", _status(health.healthy()), node_eligible=None)

    return {"/healthz": healthz, "/livez": livez}


def admin_routes(
    *, exposition: Callable[[], bytes], mode: str, configz: object
) -> dict[str, Route]:
    """What the metrics server answers (ADM-01 to ADM-05); ``configz`` is data for JSON.

    There is no profiling and no changing of the log's level here, whatever the configuration says:
    nobody is asked who they are (SEC-05).
    """
    slis = _Slis()

    def healthz() -> Response:
        slis.checked()
        return text("ok")

    return {
        "/healthz": healthz,
        "/metrics": lambda: Response(HTTPStatus.OK, _PROMETHEUS, exposition()),
        "/metrics/slis": lambda: Response(HTTPStatus.OK, _PROMETHEUS, slis.exposition()),
        "/proxyMode": lambda: text(mode),
        "/configz": lambda: json_response(configz),
    }


_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


_SLIS = """\
# HELP kubernetes_healthcheck The result of a health check, 1 for good.
# TYPE kubernetes_healthcheck gauge
kubernetes_healthcheck{{name="ping",type="healthz"}} 1
# HELP kubernetes_healthchecks_total How often a health check was made, by its result.
# TYPE kubernetes_healthchecks_total counter
kubernetes_healthchecks_total{{name="ping",status="success",type="healthz"}} {checks}
"""


class _Slis:
    """The component's service level indicators: that its health was asked for, and was good.

    kube-proxy has one check there, which only says that the server answers.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._checks = 0

    def checked(self) -> None:
        with self._lock:
            self._checks += 1

    def exposition(self) -> bytes:
        return _SLIS.format(checks=self._checks).encode() if self._checks else b""


def _status(is_good: bool) -> HTTPStatus:  # noqa: FBT001 - one argument needs no name
    return HTTPStatus.OK if is_good else HTTPStatus.SERVICE_UNAVAILABLE


# --- servers -------------------------------------------------------------------------------------


class HttpServer:
    """Serves ``routes`` at ``address`` from a thread; a port that is taken is tried again.

    With ``hard_fail`` the constructor raises ConfigError instead. ``failed`` is told the flag and
    why nothing listens there, once.
    """

    def __init__(
        self,
        flag: str,
        address: str,
        routes: Mapping[str, Route],
        *,
        hard_fail: bool,
        failed: Callable[[str, str], None] = lambda _flag, _reason: None,
    ) -> None:
        self._flag = flag
        self._address = address
        self._routes = routes
        self._failed = failed
        self._closing = threading.Event()
        self._lock = threading.Lock()  # either close() sees a late server, or that sees close()
        self._server = self._bind(hard_fail=hard_fail)
        self._thread = threading.Thread(target=self._run, name=flag.strip("-"), daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            server = self._server
        if server is not None:
            server.shutdown()  # also before it serves: then it never begins
        self._thread.join()

    def _run(self) -> None:
        server = self._server
        while server is None:
            if self._closing.wait(BIND_RETRY_S):
                return
            server = self._bind(hard_fail=False, quiet=True)
        with server:
            with self._lock:
                if self._closing.is_set() and self._server is None:
                    return
                self._server = server
            server.serve_forever(POLL_S)

    def _bind(self, *, hard_fail: bool, quiet: bool = False) -> ThreadingHTTPServer | None:
        host, port = parse_bind_address(self._flag, self._address)
        try:
            server = _Server(host, port, self._routes)
        except OSError as error:
            holder = port_holder(port)
            what = f"{self._flag} {self._address}: {error.strerror}"
            if holder:
                what += f", {holder} listens there"
            if hard_fail:
                raise ConfigError(what) from None
            if not quiet:
                self._failed(self._flag, what)
                _log.error(
                    "cannot listen; trying again",
                    flag=self._flag,
                    address=self._address,
                    reason=error.strerror,
                    holder=holder or None,
                    retry_s=BIND_RETRY_S,
                )
            return None
        if quiet:
            _log.info("listening", flag=self._flag, address=self._address)
        return server


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        class Handler(_Handler):
            pass

        Handler.routes = routes
        if host in _WILDCARDS and has_ipv6():
            host = "::"
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)

    def server_bind(self) -> None:
        """Bind to both families where all addresses are meant, as kube-proxy does.

        The base class would ask DNS for this host's name, which may take long and is of no use.
        """
        if self.address_family == socket.AF_INET6:
            both = self.server_address[0] == "::"
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not both)
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


_WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared, not bound to


def has_ipv6() -> bool:
    """Whether this kernel has IPv6 sockets."""
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


class _Handler(BaseHTTPRequestHandler):
    routes: Mapping[str, Route] = {}
    timeout = 10  # seconds; a client that says nothing must not keep a thread

    def do_GET(self) -> None:
        route = self.routes.get(self.path.partition("?")[0])
        answer = route() if route else Response(HTTPStatus.NOT_FOUND, "text/plain", b"not found\n")
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Requests are counted, not logged."""
