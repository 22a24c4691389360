"""An API server that does as it is told, also badly: on loopback, in threads, for tests.

It holds objects as the real one does: one version number over all, a log of changes for each
resource that can be compacted, label and field selectors, pages, bookmarks. Beside that it counts
what it is asked, and each request can be spoilt: see the classes below ``Spoiler``.

Alone (``python -m tests.apiserver.fake --services 10000``) it serves a made-up cluster, prints its
address, and makes as many changes as the numbers that it is given line by line.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import itertools
import json
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final, Literal, Self
from urllib.parse import parse_qsl, urlsplit

Json = dict[str, Any]
Resource = Literal["services", "endpointslices", "nodes"]
Verb = Literal["list", "watch"]

PATHS: Final[Mapping[str, Resource]] = {
    "/api/v1/services": "services",
    "/apis/discovery.k8s.io/v1/endpointslices": "endpointslices",
    "/api/v1/nodes": "nodes",
}
RESOURCES: Final[Mapping[str, Resource]] = {
    "Service": "services",
    "EndpointSlice": "endpointslices",
    "Node": "nodes",
}
KINDS: Final = {resource: kind for kind, resource in RESOURCES.items()}
API_VERSIONS: Final = {"services": "v1", "endpointslices": "discovery.k8s.io/v1", "nodes": "v1"}
DEADLINE_S: Final = 20.0


# --- what may go wrong with a request -------------------------------------------------------------


class Spoiler:
    """Something that a request runs into."""


@dataclass(frozen=True)
class Answer(Spoiler):
    """This status, as a Status object unless ``body`` is given."""

    code: int
    message: str = "as told"
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes | None = None
    details: Mapping[str, object] | None = None


@dataclass(frozen=True)
class Body(Spoiler):
    """200 and these bytes, in a well-formed answer."""

    data: bytes


@dataclass(frozen=True)
class Silence(Spoiler):
    """Nothing at all, until the server is closed or ``release`` is called."""


@dataclass(frozen=True)
class HalfList(Spoiler):
    """A list whose connection breaks in the middle."""


@dataclass(frozen=True)
class EmptyList(Spoiler):
    """A list without anything, though there is something."""


@dataclass(frozen=True)
class Drip(Spoiler):
    """A list that comes a few bytes at a time; ``forever``: then none, and no end."""

    size: int = 7
    pause_s: float = 0.0
    forever: bool = False


@dataclass(frozen=True)
class Stream(Spoiler):
    """A watch: ``after`` so many events come ``lines``, then the ``end``.

    Ends: ``go on`` as if nothing were; ``close`` in good order; ``cut`` (a reset); ``half`` a line
    of an event and then a reset; ``half close``: the same, in good order; ``silence``.
    ``twice``: every event comes twice. ``swapped``: events that are ready come in reverse.
    """

    after: int = 0
    lines: tuple[bytes, ...] = ()
    end: Literal["go on", "close", "cut", "half", "half close", "silence"] = "go on"
    twice: bool = False
    swapped: bool = False


def error_event(code: int, reason: str = "", message: str = "as told") -> bytes:
    """Return the line of an ERROR event."""
    status = {"kind": "Status", "apiVersion": "v1", "code": code, "message": message}
    return json.dumps({"type": "ERROR", "object": status | {"reason": reason}}).encode() + b"\n"


GONE: Final = Stream(
    lines=(error_event(410, "Expired", "too old resource version: 1 (2)"),), end="close"
)


@dataclass
class _Rule:
    spoiler: Spoiler
    resource: Resource | None
    verb: Verb | None
    times: int
    skip: int


# --- the objects ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """An object as it is at one version."""

    obj: Json
    version: int
    data: bytes


@dataclass(frozen=True)
class Change:
    version: int
    before: Stored | None
    after: Stored | None


Name = tuple[str, str]


@dataclass
class Store:
    """One resource. ``floor``: older changes than that are no longer known."""

    resource: Resource
    objects: dict[Name, Stored] = field(default_factory=dict)
    log: list[Change] = field(default_factory=list)
    floor: int = 0

    def put(self, obj: Json, version: int) -> None:
        meta = obj.get("metadata") or {}
        name = (str(meta.get("namespace")), str(meta.get("name")))
        stored = _stored(self.resource, obj, version)
        self.log.append(Change(version, self.objects.get(name), stored))
        self.objects[name] = stored

    def remove(self, name: Name, version: int) -> None:
        before = self.objects.pop(name)
        # The deletion has a version of its own, and the object's last state bears it.
        self.log.append(Change(version, _stored(self.resource, before.obj, version), None))

    def since(self, version: int) -> list[Change]:
        # The log is short, and its end is what is asked for.
        found: list[Change] = []
        for change in reversed(self.log):
            if change.version <= version:
                break
            found.append(change)
        return found[::-1]


def _stored(resource: Resource, obj: Json, version: int) -> Stored:
    meta = obj.get("metadata")
    versioned = obj
    if isinstance(meta, dict):
        versioned = obj | {"metadata": meta | {"resourceVersion": str(version)}}
    else:
        versioned = obj | {"metadata": meta}
    head = {"kind": KINDS[resource], "apiVersion": API_VERSIONS[resource]}
    return Stored(obj, version, json.dumps(head | versioned, separators=(",", ":")).encode())


def _in_list(stored: Stored) -> bytes:
    """In lists the real server leaves kind and apiVersion out."""
    return b'{"metadata":' + stored.data.partition(b',"metadata":')[2]


Match = Callable[[Json], bool]


def selector(query: Mapping[str, str]) -> Match:
    """What labelSelector and fieldSelector let through; only the forms that are used here."""
    absent = [part[1:] for part in query.get("labelSelector", "").split(",") if part]
    fields = [part for part in query.get("fieldSelector", "").split(",") if part]

    def match(obj: Json) -> bool:
        meta = obj.get("metadata")
        labels = (meta.get("labels") if isinstance(meta, dict) else None) or {}
        if any(label in labels for label in absent):
            return False
        return all(_field_matches(obj, part) for part in fields)

    return match


def _field_matches(obj: Json, part: str) -> bool:
    path, operator, wanted = part.partition("!=") if "!=" in part else part.partition("=")
    value: object = obj
    for step in path.split("."):
        value = value.get(step) if isinstance(value, dict) else None
    return (str(value or "") == wanted) is (operator == "=")


# --- the server -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One that was made; ``port`` is the client's, the same for one connection."""

    verb: Verb
    resource: Resource
    query: Mapping[str, str]
    headers: Mapping[str, str]
    port: int


class FakeApiServer:
    """``with FakeApiServer() as server``: listens at ``server.url`` until the end.

    ``tokens``: Authorization headers that are accepted, None for all. ``missing``: resources that
    this version does not have. ``forbidden``: those that we may not read. ``ignores_limit``: as a
    real one that lists from its cache. ``fields``: field selectors on spec.clusterIP are known.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tokens: set[str] | None = None
        self.missing: set[Resource] = set()
        self.forbidden: set[Resource] = set()
        self.ignores_limit = False
        self.fields = True
        self.compresses = False
        self.requests: list[Request] = []
        self.stores: dict[Resource, Store] = {name: Store(name) for name in KINDS}
        self.version = 100
        self.changed = threading.Condition()
        self.closing = False
        self._tls = tls
        self._rules: list[_Rule] = []
        self._released = 0
        self._watchers: dict[int, Resource] = {}
        self._pages: dict[str, tuple[int, int, list[Stored]]] = {}
        self._numbers = itertools.count(1)
        self._connections: set[socket.socket] = set()
        self._bookmarks: dict[Resource, int] = dict.fromkeys(KINDS, 0)
        self._ends: dict[Resource, tuple[int, str]] = {}
        self._server: _Server | None = None
        self.port = 0
        self.up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    # --- life -----------------------------------------------------------------------------------

    def up(self) -> None:
        """Listen, at the same port as before."""
        self.closing = False
        self._server = _Server(self, self.port, self._tls)
        self.port = self._server.server_address[1]
        self._server.begin()

    def down(self) -> None:
        """As if killed: nobody listens, every connection is reset."""
        server, self._server = self._server, None
        if server is None:
            return
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        server.end()
        self.cut()
        server.join_handlers()

    close = down

    def cut(self) -> None:
        """Reset every connection."""
        with self.changed:
            connections = list(self._connections)
        for connection in connections:
            _reset(connection)

    def release(self) -> None:
        """End every silence."""
        with self.changed:
            self._released += 1
            self.changed.notify_all()

    # --- objects --------------------------------------------------------------------------------

    def put(self, *objs: Json) -> None:
        """Make these objects what they are now."""
        with self.changed:
            for obj in objs:
                self.version += 1
                self.stores[RESOURCES[obj["kind"]]].put(obj, self.version)
            self.changed.notify_all()

    def delete(self, kind: str, name: str, *, namespace: str = "default") -> None:
        with self.changed:
            self.version += 1
            where = "None" if kind == "Node" else namespace
            self.stores[RESOURCES[kind]].remove((where, name), self.version)
            self.changed.notify_all()

    def replay(self, file: Path) -> None:
        """Put the objects of a recorded ``kind: List`` or of one list."""
        content = json.loads(file.read_bytes())
        for item in content["items"]:
            self.put({"kind": content["kind"].removesuffix("List")} | item)

    def compact(self) -> None:
        """Let nobody begin at an older version, nor go on with a list that is half told."""
        with self.changed:
            for store in self.stores.values():
                store.floor = self.version
            self._pages.clear()

    def bookmark(self, resource: Resource) -> None:
        """Send a bookmark to everybody who watches."""
        with self.changed:
            self._bookmarks[resource] += 1
            self.changed.notify_all()

    def end_watches(self, resource: Resource, how: str = "close") -> None:
        """End the watches that there are, as Stream's ``end`` says."""
        with self.changed:
            self._ends[resource] = (next(self._numbers), how)
            self.changed.notify_all()

    # --- faults ---------------------------------------------------------------------------------

    def spoil(
        self,
        spoiler: Spoiler,
        resource: Resource | None = None,
        verb: Verb | None = None,
        *,
        times: int = 1,
        skip: int = 0,
    ) -> None:
        """Let so many of these requests run into it, -1: all, but for the next ``skip``."""
        with self.changed:
            self._rules.append(_Rule(spoiler, resource, verb, times, skip))

    def behave(self) -> None:
        """Spoil nothing any more, and end every silence."""
        with self.changed:
            self._rules.clear()
            self.tokens = None
            self.missing.clear()
            self.forbidden.clear()
        self.release()

    def _spoiler(self, request: Request) -> Spoiler | None:
        for rule in self._rules:
            if rule.resource in {None, request.resource} and rule.verb in {None, request.verb}:
                if rule.skip:
                    rule.skip -= 1
                    continue
                rule.times -= 1
                if not rule.times:
                    self._rules.remove(rule)
                return rule.spoiler
        return None

    # --- what is observed -----------------------------------------------------------------------

    def count(self, verb: Verb, resource: Resource) -> int:
        """How often it was asked for, a list's further pages not counted."""
        with self.changed:
            return sum(
                r.verb == verb and r.resource == resource and "continue" not in r.query
                for r in self.requests
            )

    def queries(self, verb: Verb, resource: Resource) -> list[Mapping[str, str]]:
        with self.changed:
            return [r.query for r in self.requests if (r.verb, r.resource) == (verb, resource)]

    def watchers(self, resource: Resource) -> int:
        with self.changed:
            return sum(each == resource for each in self._watchers.values())

    def wait(self, condition: Callable[[], bool], what: str = "") -> None:
        """Until it holds; fails after a deadline."""
        deadline = time.monotonic() + DEADLINE_S
        with self.changed:
            while not condition():
                left = deadline - time.monotonic()
                assert left > 0, f"never came: {what or condition}"
                self.changed.wait(min(left, 0.02))

    # --- answering ------------------------------------------------------------------------------

    def answer(self, handler: _Handler) -> None:
        """One request, from its line to the end of its answer."""
        url = urlsplit(handler.path)
        resource = PATHS.get(url.path)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        if resource is None:
            handler.plain(404, b"404 page not found\n")
            return
        request = Request(
            "watch" if query.get("watch") in {"1", "true"} else "list",
            resource,
            query,
            dict(handler.headers.items()),
            handler.client_address[1],
        )
        with self.changed:
            self.requests.append(request)
            spoiler, handler.released = self._spoiler(request), self._released
            self.changed.notify_all()
        if refusal := self._refusal(request):
            spoiler = refusal
        if isinstance(spoiler, Silence):
            self._keep_silent(handler.released)
            handler.close_connection = True
        elif isinstance(spoiler, Answer):
            handler.status(spoiler)
        elif isinstance(spoiler, Body):
            handler.plain(200, spoiler.data)
        elif request.verb == "watch":
            self._watch(handler, request, spoiler if isinstance(spoiler, Stream) else Stream())
        else:
            self._list(handler, request, spoiler)

    def _refusal(self, request: Request) -> Answer | None:  # noqa: PLR0911 - one for each reason
        resource, query = request.resource, request.query
        if self.tokens is not None and request.headers.get("Authorization") not in self.tokens:
            return Answer(401, "Unauthorized")
        if resource in self.missing:
            return Answer(404, body=b"404 page not found\n")
        if resource in self.forbidden:
            return Answer(
                403,
                f'{resource} is forbidden: User "system:serviceaccount:kube-system:ebpflb" cannot '
                f'{request.verb} resource "{resource}" in API group "" at the cluster scope',
            )
        if not self.fields and "spec.clusterIP" in query.get("fieldSelector", ""):
            return Answer(400, "field label not supported: spec.clusterIP")
        floor = self.stores[resource].floor
        if request.verb == "watch" and 0 < int(query.get("resourceVersion") or 0) < floor:
            return Answer(410, "too old resource version")
        if request.verb == "list" and int(query.get("resourceVersion") or 0) > self.version:
            causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large"}]
            return Answer(504, "Too large resource version", details={"causes": causes})
        if "continue" in query and query["continue"] not in self._pages:
            return Answer(410, "The provided continue parameter is too old")
        return None

    def _keep_silent(self, released: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.closing or self._released > released)

    def _list(self, handler: _Handler, request: Request, spoiler: Spoiler | None) -> None:
        body = self._page(request, empty=isinstance(spoiler, EmptyList))
        if isinstance(spoiler, HalfList):
            handler.head(200, {"Content-Length": str(len(body))})
            handler.wfile.write(body[: len(body) // 2])
            _reset(handler.connection)
        elif isinstance(spoiler, Drip):
            handler.head(200, {"Transfer-Encoding": "chunked"})
            for start in range(0, len(body), spoiler.size):
                handler.chunk(body[start : start + spoiler.size])
                if spoiler.pause_s:
                    time.sleep(spoiler.pause_s)
            if spoiler.forever:
                self._keep_silent(handler.released)
            handler.chunk(b"")
        else:
            gzipped = self.compresses and "gzip" in request.headers.get("Accept-Encoding", "")
            handler.plain(200, body, gzipped=gzipped)

    def _page(self, request: Request, *, empty: bool) -> bytes:
        resource, query = request.resource, request.query
        with self.changed:
            token = query.get("continue")
            if token is None:
                match = selector(query)
                found = [s for s in self.stores[resource].objects.values() if match(s.obj)]
                version, page = self.version, 0
            else:
                version, page, found = self._pages.pop(token)
            limit = len(found) if self.ignores_limit else int(query.get("limit") or len(found))
            now, later = ([], []) if empty else (found[:limit], found[limit:])
            meta: Json = {"resourceVersion": str(version)}
            if later:
                meta["continue"] = f"{resource}-{page + 1}-{next(self._numbers)}"
                self._pages[meta["continue"]] = (version, page + 1, later)
        head = {
            "kind": f"{KINDS[resource]}List",
            "apiVersion": API_VERSIONS[resource],
            "metadata": meta,
        }
        opening = json.dumps(head, separators=(",", ":")).encode()[:-1]
        return opening + b',"items":[' + b",".join(map(_in_list, now)) + b"]}\n"

    def _watch(self, handler: _Handler, request: Request, spoiler: Stream) -> None:
        handler.head(200, {"Transfer-Encoding": "chunked"})
        number = next(self._numbers)
        with self.changed:
            self._watchers[number] = request.resource
            begun = (
                self._bookmarks[request.resource],
                self._last_end(request.resource)[0],
                handler.released,
            )
            self.changed.notify_all()
        try:
            for piece in self._events(request, spoiler, *begun):
                if piece is None:
                    _reset(handler.connection)
                    handler.close_connection = True
                    return
                handler.chunk(piece)
            handler.chunk(b"")
        finally:
            with self.changed:
                del self._watchers[number]
                self.changed.notify_all()

    def _events(
        self, request: Request, spoiler: Stream, bookmarks: int, end: int, released: int
    ) -> Iterator[bytes | None]:
        """Yield what to send; None: reset the connection."""
        resource, query = request.resource, request.query
        match = selector(query)
        lines: collections.deque[bytes] = collections.deque()
        armed = spoiler.end != "go on" or bool(spoiler.lines)
        sent = 0
        with self.changed:
            at = int(query.get("resourceVersion") or self.version)
        deadline = time.monotonic() + float(query.get("timeoutSeconds") or 60)
        while True:
            if armed and sent >= spoiler.after:
                yield from spoiler.lines
                yield from self._end(spoiler.end, released)
                if spoiler.end != "go on":
                    return
                armed = False
            if lines:
                yield lines.popleft()
                sent += 1
                continue
            with self.changed:
                self.changed.wait_for(
                    lambda: self._has_news(resource, at, bookmarks, end),  # noqa: B023 - it waits here
                    max(0.0, deadline - time.monotonic()),
                )
                changes = self.stores[resource].since(at)
                at = max(at, self.version)
                marks, ended = self._bookmarks[resource], self._last_end(resource)
                closing = self.closing
            ready = [line for change in changes for line in _lines(change, match)]
            for line in reversed(ready) if spoiler.swapped else ready:
                lines.extend([line] * (1 + spoiler.twice))
            if marks > bookmarks:
                lines.append(_bookmark(resource, at))
                bookmarks = marks
            if ended[0] > end:
                yield from lines
                yield from self._end(ended[1], released)
                return
            if closing:
                yield None
                return
            if time.monotonic() >= deadline and not lines:
                return

    def _last_end(self, resource: Resource) -> tuple[int, str]:
        return self._ends.get(resource, (0, ""))

    def _has_news(self, resource: Resource, at: int, bookmarks: int, end: int) -> bool:
        log = self.stores[resource].log
        return (
            self.closing
            or bool(log and log[-1].version > at)
            or self._bookmarks[resource] > bookmarks
            or self._last_end(resource)[0] > end
        )

    def _end(self, how: str, released: int) -> Iterator[bytes | None]:
        if how in {"half", "half close"}:
            yield b'{"type":"MODIFIED","object":{"kind":"Serv'
        if how in {"half", "cut"}:
            yield None
        if how == "silence":
            self._keep_silent(released)


def _lines(change: Change, match: Match) -> Iterator[bytes]:
    was = change.before is not None and match(change.before.obj)
    if change.after is not None and match(change.after.obj):
        yield _line("MODIFIED" if was else "ADDED", change.after.data)
    elif was and change.before is not None:
        # What no longer matches is told with its last state that did, at the new version.
        gone = _stored(RESOURCES[_kind(change.before)], change.before.obj, change.version)
        yield _line("DELETED", gone.data)


def _kind(stored: Stored) -> str:
    return str(json.loads(stored.data)["kind"])


def _line(event: str, data: bytes) -> bytes:
    return b'{"type":"%b","object":%b}\n' % (event.encode(), data)


def _bookmark(resource: Resource, version: int) -> bytes:
    meta = {"resourceVersion": str(version), "creationTimestamp": None}
    obj = {"kind": KINDS[resource], "apiVersion": API_VERSIONS[resource], "metadata": meta}
    return _line("BOOKMARK", json.dumps(obj, separators=(",", ":")).encode())


def _reset(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
        connection.close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, fake: FakeApiServer, port: int, tls: ssl.SSLContext | None) -> None:
        self.fake = fake
        self.tls = tls
        self._handlers: set[threading.Thread] = set()
        super().__init__(("127.0.0.1", port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=[0.01], name="fake-api-server", daemon=True
        )

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()

    def join_handlers(self) -> None:
        for thread in list(self._handlers):
            thread.join(DEADLINE_S)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any
    ) -> None:
        thread = threading.current_thread()
        self._handlers.add(thread)
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._handlers.discard(thread)

    def handle_error(self, *_: object) -> None:
        """Clients that go away are what is tested."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server
    connection: socket.socket
    released = 0

    def setup(self) -> None:
        if self.server.tls is not None:
            self.request = self.server.tls.wrap_socket(self.request, server_side=True)
        super().setup()
        with self.server.fake.changed:
            self.server.fake._connections.add(self.connection)

    def finish(self) -> None:
        with self.server.fake.changed:
            self.server.fake._connections.discard(self.connection)
        with contextlib.suppress(OSError, ValueError):
            super().finish()
        with contextlib.suppress(OSError):
            self.connection.close()

    def do_GET(self) -> None:
        try:
            self.server.fake.answer(self)
        except (OSError, ValueError):
            self.close_connection = True

    def head(self, code: int, headers: Mapping[str, str]) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def plain(
        self,
        code: int,
        body: bytes,
        headers: Iterable[tuple[str, str]] = (),
        *,
        gzipped: bool = False,
    ) -> None:
        more = dict(headers)
        if gzipped:
            body, more["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        self.head(code, {"Content-Length": str(len(body))} | more)
        self.wfile.write(body)

    def status(self, answer: Answer) -> None:
        status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": answer.code,
            "message": answer.message,
            "details": answer.details or {},
        }
        body = json.dumps(status).encode() if answer.body is None else answer.body
        self.plain(answer.code, body, answer.headers)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Requests are kept, not logged."""


# --- alone ----------------------------------------------------------------------------------------


def cluster(services: int, endpoints: int, padding: int) -> Iterator[Json]:
    """Yield a made-up cluster; ``padding`` bytes in each object stand for managedFields."""
    filler = {"note": "x" * padding}
    for s in range(services):
        meta = {"name": f"svc-{s}", "namespace": f"ns-{s % 50}", "annotations": filler}
        ip = f"10.96.{s // 250}.{s % 250 + 1}"
        yield {
            "kind": "Service",
            "metadata": meta | {"creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "clusterIP": ip,
                "clusterIPs": [ip],
                "ipFamilies": ["IPv4"],
                "ports": [{"name": "http", "protocol": "TCP", "port": 80, "targetPort": 8080}],
                "type": "ClusterIP",
            },
        }
        yield slice_of(s, endpoints, filler, turn=0)


def slice_of(s: int, endpoints: int, filler: Json, *, turn: int) -> Json:
    """Return the slice of a Service; each turn moves its endpoints."""
    network = 128 + (1 + turn % 7 if turn else 0)
    return {
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"svc-{s}-abcde",
            "namespace": f"ns-{s % 50}",
            "annotations": filler,
            "labels": {"kubernetes.io/service-name": f"svc-{s}"},
        },
        "addressType": "IPv4",
        "ports": [{"name": "http", "protocol": "TCP", "port": 8080}],
        "endpoints": [
            {
                "addresses": [f"10.{network}.{(s * endpoints + e) // 250 % 250}.{e + 1}"],
                "conditions": {"ready": True, "serving": True, "terminating": False},
                "nodeName": f"node-{e}",
                "targetRef": {"kind": "Pod", "namespace": "ns", "name": f"svc-{s}-{e}"},
            }
            for e in range(endpoints)
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--endpoints", type=int, default=10)
    parser.add_argument("--padding", type=int, default=900)
    parser.add_argument("--ignore-limit", action="store_true")
    options = parser.parse_args()
    with FakeApiServer() as server:
        server.ignores_limit = options.ignore_limit
        server.put({"kind": "Node", "metadata": {"name": "node-1"}})
        server.put(*cluster(options.services, options.endpoints, options.padding))
        sys.stdout.write(f"{server.url}\n")
        sys.stdout.flush()
        turns = itertools.count(1)
        for line in sys.stdin:
            filler = {"note": "x" * options.padding}
            for _ in range(int(line)):
                turn = next(turns)
                s = turn % options.services
                server.put(slice_of(s, options.endpoints, filler, turn=turn))
            sys.stdout.write("done\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
