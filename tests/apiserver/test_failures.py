"""What is said of a failure: a sentence for whoever runs the cluster, nothing of Python."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator

import pytest
from urllib3.exceptions import InvalidHeader

from ebpflb.sources.client import Client
from ebpflb.sources.failures import ApiError, explained, status_error
from ebpflb.sources.transport import Access, Credentials

PATH = "/api/v1/services"
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
PYTHONISM = re.compile(r"b'|\(\)|\\r|\\n|[a-z]Error|Read\(|None|Errno|_ssl|0x|<|object at")


@contextlib.contextmanager
def answering(data: bytes) -> Iterator[str]:
    """Answer one request with these bytes, then close; yields the address."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1 << 16)
            connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


def ask(access: Access) -> None:
    client = Client(Credentials(lambda: access), connect_timeout_s=1.0)
    with contextlib.closing(client), client.get(PATH, {}, read_timeout_s=5, compressed=True) as s:
        while s.read():
            pass


def failure(access: Access) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(access)
    assert not PYTHONISM.search(caught.value.text)
    return caught.value


@pytest.mark.parametrize(
    ("data", "reason", "text"),
    [
        pytest.param(
            b"",
            "unreachable",
            "the connection broke: it was closed without an answer",
            id="nothing",
        ),
        pytest.param(
            b"SSH-2.0\r\n",
            "unreachable",
            "the connection broke: what came is no HTTP",
            id="no HTTP",
        ),
        pytest.param(
            b"HTTP/1.1 abc OK\r\n\r\n",
            "unreachable",
            "the connection broke: what came is no HTTP",
            id="a status that is no number",
        ),
        pytest.param(
            OK + b"A: b\r\n" * 200 + b"\r\n",
            "unreachable",
            "the connection broke: what came is no HTTP",
            id="headers without end",
        ),
        pytest.param(
            OK + b"Content-Length: 50\r\n\r\nhalf",
            "cut",
            "the connection broke: it ended too early",
            id="half a body",
        ),
        pytest.param(
            CHUNKED + b"4\r\nhalf\r\n",
            "cut",
            "the connection broke: it ended too early",
            id="no more chunks",
        ),
        pytest.param(
            CHUNKED + b"50\r\nhalf",
            "cut",
            "the connection broke: it ended too early",
            id="half a chunk",
        ),
        pytest.param(
            OK + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello",
            "garbage",
            "its answer cannot be decompressed",
            id="no gzip",
        ),
    ],
)
def test_an_answer_that_breaks_off_or_is_none(data: bytes, reason: str, text: str) -> None:
    with answering(data) as address:
        error = failure(Access(server=f"http://{address}"))
    assert (error.reason, error.text) == (reason, text)


def test_an_answer_of_two_lengths() -> None:
    """urllib3 leaves its socket to the garbage collector, so this one is made up."""
    error = explained(InvalidHeader("unmatching values (1, 2)"), "x", answered=False)
    assert (error.reason, error.text) == (
        "unreachable",
        "the connection broke: what came is no HTTP",
    )


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            b"HTTP/1.1 407 Who are you\r\n\r\n",
            "the proxy cannot be used: it answers 407 Who are you",
        ),
        (b"", "the connection broke: it was closed without an answer"),
    ],
)
def test_a_proxy_that_lets_nobody_through(data: bytes, text: str) -> None:
    with answering(data) as address:
        access = Access(server="https://api.example", verify=False, proxy=f"http://{address}")
        assert failure(access).text == text


def test_a_proxy_whose_name_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    error = failure(Access(server="http://api.example", proxy="http://proxy.example:3128"))
    assert error.text == "the proxy cannot be used: its name cannot be resolved"


def test_a_host_that_is_none() -> None:
    error = failure(Access(server="http://a..b"))
    assert error.text == "its address or its proxy's is no URL that can be used"


@pytest.mark.parametrize("secret", ["s3cret\n", "s3cret\u20ac"])
def test_a_token_that_fits_into_no_header_is_not_shown(secret: str) -> None:
    error = failure(Access(server="http://127.0.0.1:1", authorization=f"Bearer {secret}"))
    assert error.text == "no request can be made of its address and our credentials"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        pytest.param(
            'services is forbidden: User "u" cannot list resource "services" in API group "" at '
            'the cluster scope: RBAC: [clusterrole.rbac.authorization.k8s.io "a" not found, '
            'clusterrole.rbac.authorization.k8s.io "b" not found]',
            'answers 403: User "u" cannot list resource "services"',
            id="of the core group",
        ),
        pytest.param(
            'endpointslices.discovery.k8s.io is forbidden: User "u" cannot watch resource '
            '"endpointslices" in API group "discovery.k8s.io" at the cluster scope',
            'answers 403: User "u" cannot watch resource "endpointslices" in API group '
            '"discovery.k8s.io"',
            id="of another group",
        ),
        pytest.param(
            "go away", "answers 403 to /api/v1/services: go away", id="in words of its own"
        ),
    ],
)
def test_a_403_says_who_may_not_do_what(message: str, says: str) -> None:
    body = b'{"kind":"Status","message":%b,"code":403}' % json.dumps(message).encode()
    assert status_error(403, body, server="x", path=PATH).text == says


def test_an_error_event_without_a_code() -> None:
    assert status_error(0, b"7", server="x").text == "ends a watch with an error: 7"
