"""What is counted of requests, how many there may be, and what else than lists is asked."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import pytest

from ebpflb import events
from ebpflb.events import Recorder
from ebpflb.model import ObjectKey, Rejected
from ebpflb.sources.client import Client, InterruptedRequestError, Throttle, _host
from ebpflb.sources.failures import ApiError
from ebpflb.sources.transport import Access, Credentials
from tests.apiserver.fake import Answer, FakeApiServer

PATH = "/api/v1/services"
TIMEOUT_S = 10.0
NODE = "node-a"
SERVICE = ObjectKey("Service", "shop", "web")
SLICE = ObjectKey("EndpointSlice", "shop", "web-abc")


class Counted:
    """The metrics of requests, as they come."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.answers: list[tuple[str, str, str, bool]] = []
        self.ends: list[tuple[str, str, int, int | None]] = []
        self.waiting = threading.Event()

    def throttled(self, verb: str, host: str, *, seconds: float) -> None:  # noqa: ARG002
        self.waits.append(seconds)
        self.waiting.set()

    def answered(self, verb: str, host: str, *, code: str, again: bool) -> None:
        self.answers.append((verb, host, code, again))

    def done(
        self, verb: str, host: str, *, seconds: float, sent: int, received: int | None
    ) -> None:
        assert seconds >= 0
        self.ends.append((verb, host, sent, received))


def client_of(url: str, metrics: Counted | None = None, **options: Any) -> Client:
    return Client(Credentials(lambda: Access(server=url)), metrics=metrics, **options)


def ask(client: Client, **options: Any) -> bytes:
    options = {"read_timeout_s": TIMEOUT_S, "compressed": True} | options
    with client.get(PATH, {}, **options) as stream:
        return stream.rest()


@pytest.fixture
def counted() -> Counted:
    return Counted()


# --- what is counted ------------------------------------------------------------------------------


@pytest.mark.parametrize("compresses", [False, True])
def test_a_list_is_counted_when_its_body_has_been_read(
    server: FakeApiServer, counted: Counted, compresses: bool
) -> None:
    server.compresses = compresses
    host = f"127.0.0.1:{server.port}"
    with (
        contextlib.closing(client_of(server.url, counted)) as client,
        client.get(PATH, {}, read_timeout_s=TIMEOUT_S, compressed=True) as stream,
    ):
        assert counted.answers == [("GET", host, "200", False)]
        assert not counted.ends
        body = stream.rest()
    assert counted.ends == [("GET", host, 0, len(body))]
    assert not counted.waits


def test_an_error_is_an_answer(server: FakeApiServer, counted: Counted) -> None:
    server.spoil(Answer(503, body=b"{}"))
    with contextlib.closing(client_of(server.url, counted)) as client, pytest.raises(ApiError):
        ask(client)
    host = f"127.0.0.1:{server.port}"
    assert counted.answers == [("GET", host, "503", False)]
    assert counted.ends == [("GET", host, 0, 2)]


def test_no_answer_has_client_gos_code(counted: Counted) -> None:
    client = client_of("http://127.0.0.1:1", counted)
    with pytest.raises(ApiError):
        ask(client)
    with pytest.raises(ApiError):
        client.post(PATH, b"{}")
    assert [(verb, code) for verb, _, code, _ in counted.answers] == [
        ("GET", "<error>"),
        ("POST", "<error>"),
    ]
    assert counted.ends == [
        ("GET", "127.0.0.1:1", 0, None),
        ("POST", "127.0.0.1:1", 2, None),
    ]


def test_a_second_try_with_other_credentials_is_a_retry(
    server: FakeApiServer, counted: Counted
) -> None:
    tokens = iter(("Bearer old", "Bearer new"))
    server.tokens = {"Bearer new"}
    client = Client(
        Credentials(lambda: Access(server=server.url, authorization=next(tokens))), metrics=counted
    )
    with contextlib.closing(client):
        body = ask(client)
    assert [(code, again) for _, _, code, again in counted.answers] == [
        ("401", False),
        ("200", True),
    ]
    assert [received for *_, received in counted.ends] == [len(body)]


def test_what_is_to_last_is_counted_but_neither_timed_nor_limited(
    server: FakeApiServer, counted: Counted
) -> None:
    """As client-go's watches."""
    throttle = Throttle(0.001, 1)
    throttle.take()
    with contextlib.closing(client_of(server.url, counted, throttle=throttle)) as client:
        ask(client, endless=True)
    assert [code for _, _, code, _ in counted.answers] == ["200"]
    assert (counted.waits, counted.ends) == ([], [])


def test_without_credentials_there_is_no_request(counted: Counted) -> None:
    with pytest.raises(ApiError):
        ask(client_of("nonsense", counted))
    assert (counted.answers, counted.ends) == ([], [])


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://api.example:6443", "api.example:6443"),
        ("https://api.example/prefix", "api.example"),
        ("https://[fd00::1]:6443", "[fd00::1]:6443"),
        ("https://user:secret@api.example:6443", "api.example:6443"),
    ],
)
def test_the_host_is_told_without_secrets(url: str, host: str) -> None:
    assert _host(url) == host


# --- how many there may be ------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_a_burst_goes_at_once_and_the_rest_one_after_the_other() -> None:
    clock = Clock()
    throttle = Throttle(5, 3, clock=clock)
    assert [throttle.take() for _ in range(5)] == pytest.approx([0, 0, 0, 0.2, 0.4])
    clock.now_s += 0.1
    assert throttle.take() == pytest.approx(0.5)
    clock.now_s += 0.6  # what waits has gone; there is one more
    assert [throttle.take() for _ in range(2)] == pytest.approx([0.1, 0.3])
    clock.now_s += 3600  # never more than a burst
    assert [throttle.take() for _ in range(4)] == pytest.approx([0, 0, 0, 0.2])


def test_0_is_client_gos_default() -> None:
    throttle = Throttle(0, 0, clock=Clock())
    assert [throttle.take() for _ in range(12)] == pytest.approx([0.0] * 10 + [0.2, 0.4])


def test_below_0_is_no_limit() -> None:
    throttle = Throttle(-1, 1, clock=Clock())
    assert {throttle.take() for _ in range(1000)} == {0.0}


def test_next_to_nothing_is_waited_for_as_long_as_can_be() -> None:
    throttle = Throttle(1e-300, 1, clock=Clock())
    throttle.take()
    assert throttle.take() == threading.TIMEOUT_MAX


def test_several_threads_share_one_limit() -> None:
    throttle = Throttle(10, 1, clock=Clock())
    waits: list[float] = []
    threads = [
        threading.Thread(target=lambda: waits.extend(throttle.take() for _ in range(50)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert sorted(waits) == pytest.approx([n / 10 for n in range(200)])


def test_clients_wait_for_their_turns(server: FakeApiServer, counted: Counted) -> None:
    throttle = Throttle(500, 1)
    for _ in range(3):
        with contextlib.closing(client_of(server.url, counted, throttle=throttle)) as client:
            assert ask(client)
    assert len(counted.waits) == 3
    assert counted.waits[0] == 0


def test_who_waits_can_be_interrupted(server: FakeApiServer, counted: Counted) -> None:
    throttle = Throttle(0.0001, 1)
    throttle.take()
    client = client_of(server.url, counted, throttle=throttle)
    ended: list[type[Exception]] = []

    def run() -> None:
        try:
            ask(client)
        except InterruptedRequestError as error:
            ended.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert counted.waiting.wait(TIMEOUT_S)
    client.interrupt()
    thread.join(TIMEOUT_S)
    assert ended == [InterruptedRequestError]
    assert not server.requests


# --- Events and their objects' uids ---------------------------------------------------------------


class Seen(NamedTuple):
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any
    port: int


class Small:
    """A server that answers each request as ``answer`` says: a status and JSON."""

    def __init__(self, answer: Callable[[Seen], tuple[int, object]]) -> None:
        self.seen: list[Seen] = []
        small = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                url = urlsplit(self.path)
                data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                request = Seen(
                    self.command,
                    url.path,
                    dict(parse_qsl(url.query)),
                    dict(self.headers.items()),
                    json.loads(data) if data else None,
                    self.client_address[1],
                )
                small.seen.append(request)
                status, content = answer(request)
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = answer  # noqa: N815 - http.server's names

            def log_message(self, *_args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


Serving = Callable[[Callable[[Seen], tuple[int, object]]], Small]


@pytest.fixture
def serving() -> Iterator[Serving]:
    with contextlib.ExitStack() as stack:

        def start(answer: Callable[[Seen], tuple[int, object]]) -> Small:
            small = Small(answer)
            stack.callback(small.close)
            return small

        yield start


def test_posts_use_one_connection_and_are_counted(serving: Serving, counted: Counted) -> None:
    small = serving(lambda _: (201, {"kind": "Event"}))
    with contextlib.closing(client_of(small.url, counted)) as client:
        assert [client.post("/events", b'{"a": 1}') for _ in range(2)] == [201, 201]
    assert [(s.method, s.body, s.headers["Content-Type"]) for s in small.seen] == [
        ("POST", {"a": 1}, "application/json")
    ] * 2
    assert len({s.port for s in small.seen}) == 1
    host = small.url.removeprefix("http://")
    assert counted.ends == [("POST", host, 8, len(b'{"kind": "Event"}'))] * 2


def test_a_post_that_is_refused_says_how(serving: Serving) -> None:
    small = serving(lambda _: (403, {}))
    with contextlib.closing(client_of(small.url)) as client:
        assert client.post("/events", b"{}") == 403


def test_a_post_is_sent_again_with_other_credentials_on_the_same_connection(
    serving: Serving,
) -> None:
    small = serving(lambda s: (201 if s.headers["Authorization"] == "Bearer 2" else 401, {}))
    file_says = iter(("Bearer 1", "Bearer 2"))
    credentials = Credentials(lambda: Access(server=small.url, authorization=next(file_says)))
    with contextlib.closing(Client(credentials)) as client:
        assert client.post("/events", b"{}") == 201
    assert len(small.seen) == 2


def test_a_client_that_was_interrupted_posts_nothing(serving: Serving) -> None:
    small = serving(lambda _: (201, {}))
    client = client_of(small.url)
    client.interrupt()
    with pytest.raises(InterruptedRequestError):
        client.post("/events", b"{}")
    assert not small.seen


def posted(small: Small, key: ObjectKey) -> Any:
    """Send an Event on ``key`` through a client; return what arrived."""
    client = client_of(small.url)
    recorder = Recorder(client.post, NODE, read=client.metadata)
    with contextlib.closing(client):
        recorder._send(events.not_served(Rejected(key, "x")), 1)
    return next(s.body for s in small.seen if s.method == "POST")


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (SERVICE, "/api/v1/namespaces/shop/services"),
        (SLICE, "/apis/discovery.k8s.io/v1/namespaces/shop/endpointslices"),
    ],
    ids=["a Service", "an EndpointSlice"],
)
def test_an_event_bears_the_uid_that_its_object_has(
    key: ObjectKey, path: str, serving: Serving
) -> None:
    found = {"items": [{"metadata": {"name": key.name, "uid": "1-2-3"}}]}
    small = serving(lambda s: (200, found) if s.method == "GET" else (201, {}))
    assert posted(small, key)["regarding"]["uid"] == "1-2-3"
    asked, _ = small.seen
    assert asked.path == path
    assert asked.query == {"fieldSelector": f"metadata.name={key.name}", "resourceVersion": "0"}
    assert asked.headers["Accept"].startswith("application/json;as=PartialObjectMetadataList;")


@pytest.mark.parametrize(
    "answer",
    [(403, {"kind": "Status", "code": 403}), (404, {}), (200, {"items": []}), (200, [])],
    ids=["forbidden", "missing", "gone", "nonsense"],
)
def test_an_event_is_sent_without_a_uid_that_cannot_be_found(
    answer: tuple[int, object], serving: Serving
) -> None:
    small = serving(lambda s: answer if s.method == "GET" else (201, {}))
    assert "uid" not in posted(small, SERVICE)["regarding"]


def test_a_nodes_uid_is_its_name_and_is_not_asked_for(serving: Serving) -> None:
    small = serving(lambda _: (201, {}))
    assert posted(small, ObjectKey("Node", "", NODE))["regarding"]["uid"] == NODE
    assert [s.method for s in small.seen] == ["POST"]
