# SPDX-License-Identifier: Apache-2.0
"""One request after the other to the API server, on one connection.

urllib3 does the work, at 1 MB; the ``kubernetes`` library is not asked. This file must not know
where credentials come from, nor what a list or a watch is.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlencode, urlsplit

import urllib3
from urllib3.exceptions import HTTPError, InsecureRequestWarning

from ebpflb import __version__
from ebpflb.sources.failures import ApiError, explained, status_error
from ebpflb.sources.transport import Access, Credentials

READ_BYTES: Final = 1 << 16

# A peer that is gone without a word is noticed after 30 s, whatever waits for whom.
_SOCKET_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
_ERROR_BYTES: Final = 1 << 16
_SMALL_BYTES: Final = 1 << 22
_SHORT_TIMEOUT_S: Final = 10.0

_JSON: Final = "application/json"
_METADATA: Final = f"{_JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,{_JSON}"

NO_ANSWER: Final = "<error>"
"""client-go's word in place of a status code."""

_CONNECTING: Final = frozenset({"unreachable", "tls", "silent", "cut"})


class InterruptedRequestError(Exception):
    """``Client.interrupt`` was called: nothing is wanted any more."""


def no_others(_server: str) -> Sequence[str]:
    """Return no other URL of this server."""
    return ()


class RequestMetrics(Protocol):
    """What is counted of requests, as client-go counts (MET-27). Any thread calls.

    ``verb`` is HTTP's method, ``host`` the server's name or address and its port.
    """

    def throttled(self, verb: str, host: str, *, seconds: float) -> None:
        """It waited so long until the limit let it go."""
        ...

    def answered(self, verb: str, host: str, *, code: str, again: bool) -> None:
        """It was sent and answered so, ``NO_ANSWER``: not at all; ``again``: after a 401."""
        ...

    def done(
        self, verb: str, host: str, *, seconds: float, sent: int, received: int | None
    ) -> None:
        """It is over, after so long, its body read: so many bytes, None without an answer."""
        ...


class NoRequestMetrics:
    """Counts nothing."""

    def throttled(self, verb: str, host: str, *, seconds: float) -> None: ...
    def answered(self, verb: str, host: str, *, code: str, again: bool) -> None: ...
    def done(
        self, verb: str, host: str, *, seconds: float, sent: int, received: int | None
    ) -> None: ...


DEFAULT_QPS: Final = 5.0
DEFAULT_BURST: Final = 10


class Throttle:
    """client-go's limit: ``burst`` requests at once, then ``qps`` a second; any thread may ask.

    As there (CFG-05) a 0 is its default, and a ``qps`` below 0 limits nothing. Who waits has its
    turn already, so one that asks often cannot keep the others waiting.
    """

    def __init__(
        self, qps: float, burst: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._qps = qps or DEFAULT_QPS
        self._burst = float(burst or DEFAULT_BURST)
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = self._burst
        self._filled_s = clock()

    def take(self) -> float:
        """Take a turn; returns the seconds to wait until it has come."""
        if self._qps < 0:
            return 0.0
        with self._lock:
            now = self._clock()
            gained = (now - self._filled_s) * self._qps
            self._tokens = min(self._burst, self._tokens + gained) - 1
            self._filled_s = now
            return min(max(0.0, -self._tokens / self._qps), threading.TIMEOUT_MAX)


class Client:
    """Makes one request after the other, on a connection of its own; for one thread.

    ``others`` names URLs where a server may be reached besides its own; its certificate must then
    be good for the configured one. They take turns when no connection can be made. ``throttle`` is
    shared by all clients of the agent.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        others: Callable[[str], Sequence[str]] = no_others,
        connect_timeout_s: float = 5.0,
        throttle: Throttle | None = None,
        metrics: RequestMetrics | None = None,
    ) -> None:
        self._credentials = credentials
        self._others = others
        self._connect_timeout_s = connect_timeout_s
        self._throttle = throttle
        self._metrics = metrics or NoRequestMetrics()
        self._pool: urllib3.PoolManager | None = None
        self._pool_key: tuple[int, str] = (0, "")
        self._turn = 0
        self._stream: Stream | None = None
        self._interrupted = threading.Event()

    @contextlib.contextmanager
    def get(
        self,
        path: str,
        query: Mapping[str, str],
        *,
        read_timeout_s: float,
        compressed: bool,
        accept: str = _JSON,
        endless: bool = False,
    ) -> Iterator[Stream]:
        """GET ``path``; the body is read while this lasts. Raises ApiError for any but 200.

        ``read_timeout_s`` is how long nothing may come. A 401 is answered by finding out the
        credentials anew, once. ``endless``: the body is to last; as in client-go such a request
        is counted, but neither limited nor timed.
        """
        asked = _Asked(
            "GET",
            f"{path}?{urlencode(query)}",
            {"Accept": accept, "Accept-Encoding": "gzip" if compressed else "identity"},
            read_timeout_s,
            endless=endless,
        )
        with self._request(asked) as stream:
            if stream.status != HTTPStatus.OK:
                raise stream.error(path)
            self._stream = stream
            try:
                self._go_on()
                yield stream
            finally:
                self._stream = None

    def metadata(self, path: str, query: Mapping[str, str]) -> bytes:
        """GET the list at ``path``: its objects' metadata alone, if the server can tell it so.

        Raises ApiError for any answer but 200.
        """
        with self.get(
            path, query, read_timeout_s=_SHORT_TIMEOUT_S, compressed=True, accept=_METADATA
        ) as stream:
            return stream.rest()

    def post(self, path: str, body: bytes) -> int:
        """POST ``body``, which is JSON; returns the answer's status, whatever that is.

        Raises ApiError where no answer came. A 401 is answered as in ``get``.
        """
        headers = {"Accept": _JSON, "Content-Type": _JSON}
        asked = _Asked("POST", path, headers, _SHORT_TIMEOUT_S, body=body)
        with self._request(asked) as stream:
            stream.rest()
            return stream.status

    def interrupt(self) -> None:
        """End what is going on, for good; the one call that other threads may make."""
        self._interrupted.set()
        stream = self._stream
        if stream is not None:
            stream.shutdown()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.clear()
            self._pool = None

    @contextlib.contextmanager
    def _request(self, asked: _Asked) -> Iterator[Stream]:
        """Ask, and note what becomes of it. Raises ApiError where no answer came."""
        began = time.monotonic()
        host = ""
        stream: Stream | None = None
        try:
            for again in (False, True):
                generation, access, context = self._credentials.current()
                server = self._server(access)
                host = _host(server)
                self._wait(asked, host)
                try:
                    pool = self._pool_for(generation, server, access, context)
                except (HTTPError, ImportError, ValueError) as error:  # a proxy that cannot be
                    raise explained(error, server, answered=False) from None
                stream = self._send(asked, pool, access, server, again=again)
                if stream.status != HTTPStatus.UNAUTHORIZED or again:
                    break
                stream.error("")  # read, so that the connection can be used again
                stream.close()
                stream = None
                self._credentials.renew(generation)
            assert stream is not None  # noqa: S101 - for the type checker
            yield stream
        except ApiError as error:
            self._note(error)
            raise
        finally:
            if stream is not None:
                stream.close()
            if host and not asked.endless:
                self._metrics.done(
                    asked.method,
                    host,
                    seconds=time.monotonic() - began,
                    sent=len(asked.body),
                    received=stream.size if stream is not None else None,
                )

    def _send(
        self, asked: _Asked, pool: urllib3.PoolManager, access: Access, server: str, *, again: bool
    ) -> Stream:
        """Return the answer as soon as its head has come."""
        code = NO_ANSWER
        try:
            response = pool.request(
                asked.method,
                f"{server}{asked.target}",
                body=asked.body or None,
                headers=_headers(access) | asked.headers,
                timeout=urllib3.Timeout(connect=self._connect_timeout_s, read=asked.read_timeout_s),
                preload_content=False,
                retries=False,
                redirect=False,
            )
            code = str(response.status)
        except (HTTPError, OSError, ValueError) as error:
            raise explained(error, server, answered=False) from None
        finally:
            self._metrics.answered(asked.method, _host(server), code=code, again=again)
        return Stream(response, server)

    def _go_on(self) -> None:
        if self._interrupted.is_set():
            raise InterruptedRequestError

    def _wait(self, asked: _Asked, host: str) -> None:
        """Until the limit lets it go. Raises InterruptedRequestError."""
        if self._throttle is not None and not asked.endless:
            seconds = self._throttle.take()
            self._metrics.throttled(asked.method, host, seconds=seconds)
            if seconds:
                self._interrupted.wait(seconds)
        self._go_on()

    def _server(self, access: Access) -> str:
        servers = [access.server]
        # Elsewhere the server must prove that it is the one we were told of.
        if access.server.startswith("https:") and access.verify and not access.proxy:
            servers += self._others(access.server)
        return servers[self._turn % len(servers)]

    def _note(self, error: ApiError) -> None:
        if error.reason in _CONNECTING:
            self._turn += 1
        if error.reason in {"tls", "unauthorized"}:
            self._credentials.renew(self._pool_key[0])

    def _pool_for(
        self, generation: int, server: str, access: Access, context: ssl.SSLContext | None
    ) -> urllib3.PoolManager:
        key = (generation, server)
        if self._pool is None or self._pool_key != key:
            self.close()
            self._pool, self._pool_key = _pool(server, access, context), key
        return self._pool


class _Asked(NamedTuple):
    """What is asked for: the same for a second attempt."""

    method: str
    target: str
    headers: dict[str, str]
    read_timeout_s: float
    body: bytes = b""
    endless: bool = False


def _host(server: str) -> str:
    """The host and port of a URL, without a name and password that may stand before them."""
    return urlsplit(server).netloc.rpartition("@")[2]


def _headers(access: Access) -> dict[str, str]:
    headers = {"User-Agent": f"ebpflb/{__version__}"}
    if authorization := access.header():
        headers["Authorization"] = authorization
    return headers


def _pool(server: str, access: Access, context: ssl.SSLContext | None) -> urllib3.PoolManager:
    options: dict[str, Any] = {"maxsize": 1, "socket_options": list(_SOCKET_OPTIONS)}
    if context is not None:
        options["ssl_context"] = context
        options["cert_reqs"] = "CERT_REQUIRED" if access.verify else "CERT_NONE"
        name = access.server_name
        if not name and server != access.server:
            name = urlsplit(access.server).hostname or ""
        if name:
            options["server_hostname"] = name
        if not access.verify:
            urllib3.disable_warnings(InsecureRequestWarning)  # Credentials says it, once
    if not access.proxy:
        return urllib3.PoolManager(1, **options)
    if access.proxy.startswith("socks"):
        from urllib3.contrib.socks import SOCKSProxyManager  # noqa: PLC0415 - rarely, needs PySocks

        return SOCKSProxyManager(access.proxy, num_pools=1, **options)
    auth = urllib3.util.parse_url(access.proxy).auth
    if auth:
        options["proxy_headers"] = urllib3.util.make_headers(proxy_basic_auth=auth)
    return urllib3.ProxyManager(access.proxy, 1, **options)


class Stream:
    """The body of an answer, as it comes."""

    def __init__(self, response: urllib3.BaseHTTPResponse, server: str) -> None:
        self._response = response
        self.server = server
        self.status = int(response.status)
        self.size = 0
        """Bytes that were read so far, as they were before compression."""

    @property
    def received(self) -> int:
        """Bytes that have come over the wire so far."""
        return self._response.tell()

    def read(self) -> bytes:
        """What has come, waiting for it if need be; b"" at the end. Raises ApiError."""
        try:
            data = self._response.read1(READ_BYTES)
        except (HTTPError, OSError, ValueError) as error:
            raise explained(error, self.server, answered=True) from None
        self.size += len(data)
        return data

    def rest(self) -> bytes:
        """All that is still to come of a body that is small. Raises ApiError."""
        body = b""
        while len(body) < _SMALL_BYTES and (data := self.read()):
            body += data
        return body

    def shutdown(self) -> None:
        """Let a ``read`` that waits in another thread end."""
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            self._response.shutdown()

    def close(self) -> None:
        with contextlib.suppress(OSError, HTTPError):
            self._response.close()
            self._response.release_conn()

    def error(self, path: str) -> ApiError:
        """What an answer other than 200 says."""
        body = b""
        with contextlib.suppress(ApiError):
            while len(body) < _ERROR_BYTES and (data := self.read()):
                body += data
        retry_after = self._response.headers.get("Retry-After", "")
        return status_error(
            self._response.status,
            body,
            server=self.server,
            path=path,
            retry_after_s=float(retry_after) if retry_after.isdecimal() else 0.0,
        )
