# SPDX-License-Identifier: Apache-2.0
"""What can go wrong between us and the API server, one word and one sentence for each.

Made of answers other than 200, of ERROR events and of urllib3's exceptions. The sentences are for
whoever runs the cluster: no exception's own text is among them, which speaks of Python and may hold
a token. This file must not know what was asked, nor what is done about it.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.client import HTTPException, IncompleteRead, RemoteDisconnected
from typing import Final, Literal

import msgspec
from urllib3.exceptions import (
    ConnectTimeoutError,
    DecodeError,
    InvalidHeader,
    LocationValueError,
    NameResolutionError,
    NewConnectionError,
    ProtocolError,
    ProxyError,
    ReadTimeoutError,
)

from ebpflb.errors import SourceError

Reason = Literal[
    "credentials",
    "unreachable",
    "tls",
    "unauthorized",
    "forbidden",
    "missing",
    "refused",
    "throttled",
    "server_error",
    "gone",
    "too_new",
    "silent",
    "cut",
    "garbage",
    "error_event",
    "empty",
    "fault",
]
"""One word for each kind of failure; also the label of its metric.

credentials: they cannot be read. unreachable: no connection, or none that holds until there is an
answer. tls: no trust. unauthorized: 401.
forbidden: 403. missing: 404, an API that the server does not have. refused: another 4xx.
throttled: 429. server_error: 5xx. gone: 410, that version of the state is no longer kept. too_new:
the server has not seen that version yet. silent: nothing was heard for too long. cut: the
connection broke. garbage: no JSON, or not what was asked for. error_event: an ERROR in a watch
other than 410. empty: a watch ended at once. fault: ours.
"""

_SHARED: Final = frozenset(
    {"credentials", "unreachable", "tls", "unauthorized", "throttled", "server_error"}
)


class ApiError(SourceError):
    """A request to the API server failed.

    ``text`` says what happened, without the server's address; ``shared``: it is about the server or
    our credentials rather than the one resource that was asked for; ``retry_after_s``: the server
    asks not to be asked again sooner.
    """

    def __init__(
        self,
        reason: Reason,
        text: str,
        *,
        server: str = "",
        retry_after_s: float = 0.0,
        shared: bool = False,
    ) -> None:
        self.reason: Reason = reason
        self.text = text
        self.server = server
        self.shared = shared or reason in _SHARED
        self.retry_after_s = retry_after_s
        super().__init__(f"{server}: {text}" if server else text)


# --- answers and events --------------------------------------------------------------------------


class _Cause(msgspec.Struct, gc=False):
    reason: str | None = None


class _Details(msgspec.Struct, gc=False, rename="camel"):
    causes: list[_Cause] | None = None
    retry_after_seconds: int | None = None


class _Status(msgspec.Struct, gc=False):
    message: str | None = None
    code: int | None = None
    details: _Details | None = None


_BY_CODE: Final[Mapping[int, Reason]] = {
    401: "unauthorized",
    403: "forbidden",
    404: "missing",
    410: "gone",
    429: "throttled",
}


def status_error(
    code: int,
    body: bytes | msgspec.Raw,
    *,
    server: str,
    path: str = "",
    retry_after_s: float = 0.0,
    otherwise: Reason = "refused",
) -> ApiError:
    """The failure that a Status object tells, or whatever stands in its place.

    ``code`` is the answer's, 0 where the object alone has one; ``otherwise`` is the reason where
    the code says nothing more.
    """
    try:
        status = msgspec.json.decode(body, type=_Status)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        status = _Status(bytes(body)[:200].decode(errors="replace"))
    code = code or status.code or 0
    message = " ".join((status.message or "").split()) or "no reason is given"
    reason: Reason = _BY_CODE.get(code, "server_error" if code >= 500 and path else otherwise)
    details = status.details or _Details()
    if code == 504 and any(c.reason == "ResourceVersionTooLarge" for c in details.causes or ()):
        reason = "too_new"
    return ApiError(
        reason,
        _told(code, path, message[:500]),
        server=server,
        retry_after_s=max(retry_after_s, float(details.retry_after_seconds or 0)),
    )


_DENIED: Final = re.compile(r'User "[^"]*" cannot \S+ resource "[^"]*"(?: in API group "[^"]+")?')


def _told(code: int, path: str, message: str) -> str:
    """One sentence; of a 403 who may not do what, without the roles that were looked through."""
    if code == HTTPStatus.FORBIDDEN and (denied := _DENIED.search(message)):
        return f"answers {code}: {denied[0]}"
    if path:
        return f"answers {code} to {path}: {message}"
    return f"ends a watch with {code or 'an error'}: {message}"


def explained(error: Exception, server: str, *, answered: bool) -> ApiError:
    """One of urllib3's exceptions, by what is behind it; ``answered``: there was a status line."""
    causes = list(_causes(error))
    reason, text = _tls_failure(causes) or _failure(error, causes)
    if reason == "cut" and not answered:
        reason = "unreachable"
    return ApiError(reason, text, server=server, shared=not answered)


def _tls_failure(causes: Sequence[BaseException]) -> tuple[Reason, str] | None:
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "tls", _distrust(cause)
    for cause in causes:
        if isinstance(cause, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            return "cut", "the connection was closed"
        if isinstance(cause, ssl.SSLError):
            return "tls", f"TLS fails: {(cause.reason or _UNKNOWN).replace('_', ' ').lower()}"
    return None


_UNKNOWN: Final = "for a reason that is not known"

# In this order: some are kinds of others.
_FAILURES: Final[Sequence[tuple[type[Exception], Reason, str]]] = (
    (ReadTimeoutError, "silent", "says nothing for too long"),
    (NameResolutionError, "unreachable", "its name cannot be resolved"),
    (NewConnectionError, "unreachable", "cannot be connected to: {why}"),
    (ConnectTimeoutError, "unreachable", "does not answer a connect"),
    (ProxyError, "unreachable", "the proxy cannot be used: {why}"),
    (DecodeError, "garbage", "its answer cannot be decompressed"),
    (LocationValueError, "unreachable", "its address or its proxy's is no URL that can be used"),
    (ProtocolError, "cut", "the connection broke: {why}"),
    (InvalidHeader, "cut", "the connection broke: {why}"),
    (OSError, "cut", "the connection broke: {why}"),
)
_WHYS: Final[Sequence[tuple[type[Exception], str]]] = (
    (RemoteDisconnected, "it was closed without an answer"),
    (IncompleteRead, "it ended too early"),
    (HTTPException, "what came is no HTTP"),
    (InvalidHeader, "what came is no HTTP"),
    (socket.gaierror, "its name cannot be resolved"),
    (TimeoutError, "it does not answer"),
    (ConnectTimeoutError, "it does not answer"),
)


def _failure(error: Exception, causes: Sequence[BaseException]) -> tuple[Reason, str]:
    for kind, reason, text in _FAILURES:
        if isinstance(error, kind):
            return reason, text.format(why=_why(causes))
    return "unreachable", "no request can be made of its address and our credentials"


_TUNNEL: Final = re.compile(r"Tunnel connection failed: (.*)")


def _why(causes: Sequence[BaseException]) -> str:
    """What is behind it, as far as that can be said in words of ours or of the kernel's."""
    number = next((c.errno for c in causes if isinstance(c, OSError) and (c.errno or 0) > 0), 0)
    if number:
        return os.strerror(number)
    for kind, text in _WHYS:
        if any(isinstance(cause, kind) for cause in causes):
            return text
    answers = (_TUNNEL.match(str(cause)) for cause in causes if isinstance(cause, OSError))
    return next((f"it answers {answer[1]}" for answer in answers if answer), _UNKNOWN)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and all that it holds, outermost first."""
    yield error
    inner = [*error.args, error.__cause__, error.__context__]
    if isinstance(error, ProxyError):
        inner.append(error.original_error)
    for each in inner:
        if isinstance(each, BaseException) and each is not error:
            yield from _causes(each)


_EXPIRED: Final = 10
_NOT_YET_VALID: Final = 9
_WRONG_NAMES: Final = frozenset({62, 64})


def _distrust(error: ssl.SSLCertVerificationError) -> str:
    said = (error.verify_message or _UNKNOWN).rstrip(".")
    if error.verify_code == _EXPIRED:
        return "its certificate has expired"
    if error.verify_code == _NOT_YET_VALID:
        return "its certificate is not valid yet (is this node's clock right?)"
    if error.verify_code in _WRONG_NAMES:
        return f"its certificate is another server's: {said}"
    return f"its certificate is not trusted: {said}"
