# SPDX-License-Identifier: Apache-2.0
"""One request after the other to the API server, on one connection.

urllib3 does the work, at 1 MB; the ``kubernetes`` library is not asked. This file must not know
where credentials come from, nor what a list or a watch is.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final
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
_POST_TIMEOUT_S: Final = 10.0

_CONNECTING: Final = frozenset({"unreachable", "tls", "silent", "cut"})


class InterruptedRequestError(Exception):
    """``Client.interrupt`` was called: nothing is wanted any more."""


def no_others(_server: str) -> Sequence[str]:
    """Return no other URL of this server."""
    return ()


class Client:
    """Makes one request after the other, on a connection of its own; for one thread.

    ``others`` names URLs where a server may be reached besides its own; its certificate must then
    be good for the configured one. They take turns when no connection can be made.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        others: Callable[[str], Sequence[str]] = no_others,
        connect_timeout_s: float = 5.0,
    ) -> None:
        self._credentials = credentials
        self._others = others
        self._connect_timeout_s = connect_timeout_s
        self._pool: urllib3.PoolManager | None = None
        self._pool_key: tuple[int, str] = (0, "")
        self._turn = 0
        self._stream: Stream | None = None
        self._interrupted = False

    @contextlib.contextmanager
    def get(
        self, path: str, query: Mapping[str, str], *, read_timeout_s: float, compressed: bool
    ) -> Iterator[Stream]:
        """GET ``path``; the body is read while this lasts. Raises ApiError for any but 200.

        ``read_timeout_s`` is how long nothing may come. A 401 is answered by finding out the
        credentials anew, once.
        """
        try:
            stream = self._get(path, query, read_timeout_s, compressed=compressed)
        except ApiError as error:
            self._note(error)
            raise
        self._stream = stream
        try:
            if self._interrupted:
                raise InterruptedRequestError
            yield stream
        except ApiError as error:
            self._note(error)
            raise
        finally:
            self._stream = None
            stream.close()

    def post(self, path: str, body: bytes) -> int:
        """POST ``body``, which is JSON; returns the answer's status, whatever that is.

        Raises ApiError where no answer came. A 401 is answered as in ``get``.
        """
        timeout = urllib3.Timeout(connect=self._connect_timeout_s, read=_POST_TIMEOUT_S)
        for attempt in range(2):
            generation, access, context = self._credentials.current()
            server = self._server(access)
            try:
                response = self._pool_for(generation, server, access, context).request(
                    "POST",
                    f"{server}{path}",
                    body=body,
                    headers={**_headers(access), "Content-Type": "application/json"},
                    timeout=timeout,
                    retries=False,
                    redirect=False,
                )
            except (HTTPError, OSError, ValueError) as error:
                failure = explained(error, server, answered=False)
                self._note(failure)
                raise failure from None
            if response.status != HTTPStatus.UNAUTHORIZED or attempt:
                return int(response.status)
            self._credentials.renew(generation)
        raise AssertionError("unreachable")

    def interrupt(self) -> None:
        """End what is going on, for good; the one call that other threads may make."""
        self._interrupted = True
        stream = self._stream
        if stream is not None:
            stream.shutdown()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.clear()
            self._pool = None

    def _get(
        self, path: str, query: Mapping[str, str], read_timeout_s: float, *, compressed: bool
    ) -> Stream:
        timeout = urllib3.Timeout(connect=self._connect_timeout_s, read=read_timeout_s)
        for attempt in range(2):
            if self._interrupted:
                raise InterruptedRequestError
            generation, access, context = self._credentials.current()
            server = self._server(access)
            headers = _headers(access)
            headers["Accept-Encoding"] = "gzip" if compressed else "identity"
            url = f"{server}{path}?{urlencode(query)}"
            try:
                response = self._pool_for(generation, server, access, context).request(
                    "GET",
                    url,
                    headers=headers,
                    timeout=timeout,
                    preload_content=False,
                    retries=False,
                    redirect=False,
                )
            except (HTTPError, OSError, ValueError) as error:
                raise explained(error, server, answered=False) from None
            stream = Stream(response, server)
            if response.status == 200:
                return stream
            with contextlib.closing(stream):
                failure = stream.error(path)
            if failure.reason != "unauthorized" or attempt:
                raise failure
            self._credentials.renew(generation)
        raise AssertionError("unreachable")

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


def _headers(access: Access) -> dict[str, str]:
    headers = {"Accept": "application/json", "User-Agent": f"ebpflb/{__version__}"}
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

    @property
    def received(self) -> int:
        """Bytes that have come over the wire so far."""
        return self._response.tell()

    def read(self) -> bytes:
        """What has come, waiting for it if need be; b"" at the end. Raises ApiError."""
        try:
            return self._response.read1(READ_BYTES)
        except (HTTPError, OSError, ValueError) as error:
            raise explained(error, self.server, answered=True) from None

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
