# SPDX-License-Identifier: Apache-2.0
"""The workload's API server: lists, watches, and events when the benchmark says so.

A process of its own that costs whoever is measured as little as may be: all lists are encoded and
compressed before it says that it is ready, an event is one write. It answers as the real one does:
chunked HTTP/1.1, lists by gzip, in pages where they are asked for (but whole at version 0, where
the real one ignores the limit, too), objects in lists without their kind, ``managedFields`` and all
else that a reader must skip, one chunk an event. Selectors are not looked at, since all that it has
passes the agent's. A watch begins at the version that is; of any other one it says that it is gone
(410). There are no bookmarks, and no watch ends. This file must not know what is measured.

It says a line of JSON with its port when it listens, and answers a line with a line:

    {"do": "await", "what": "list"}      {"at_ns": …}: when somebody first asked for a list;
                                         "watch": as soon as there is a watch of the slices
    {"do": "feed", "services": [3, …], "rate": 1000, "last": 7, "side": "B"}
                                         a slice of each of the services with one endpoint other
                                         than before, so many a second; then the slice of a watched
                                         service with all of its endpoints on the other side.
                                         What ``Sent`` has, when all of it has been written

Times are CLOCK_MONOTONIC. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import gzip
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import parse_qs, urlsplit

import msgspec

from ebpflb.bench.workload import Side, Workload

SLICES: Final = "/apis/discovery.k8s.io/v1/endpointslices"
SERVICES: Final = "/api/v1/services"
NODES: Final = "/api/v1/nodes"
_LISTS: Final = {
    SERVICES: ("v1", "ServiceList"),
    SLICES: ("discovery.k8s.io/v1", "EndpointSliceList"),
    NODES: ("v1", "NodeList"),
}
_CACHED: Final = "0"
"""The resourceVersion for: whatever is at hand."""

_GZIP_LEVEL: Final = 1
_REQUEST_BYTES: Final = 1 << 16
_TRIGGERED: Final = "endpoints.kubernetes.io/last-change-trigger-time"
_TIME_MARK: Final = "0000-00-00T00:00:00.000000Z"
_VERSION_MARK: Final = "VERSION-MARK"
_AHEAD_NS: Final = 50_000


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the benchmark's."""

    do: Literal["await", "feed"]
    what: Literal["list", "watch"] = "list"
    services: Sequence[int] = ()
    rate: float = 0.0
    last: int = 0
    side: Side = "A"


class Sent(msgspec.Struct, frozen=True):
    """What was written: ``due_ns`` is when the last event was to be, ``sent_ns`` when it was.

    ``bytes`` are those of the events, without HTTP's own.
    """

    began_ns: int
    due_ns: int
    sent_ns: int
    events: int
    bytes: int


# --- objects as bytes -----------------------------------------------------------------------------


def _managed(manager: str, *fields: str) -> list[dict[str, Any]]:
    """Who wrote which fields, as every object of the API server says at length."""
    return [
        {
            "manager": manager,
            "operation": "Update",
            "apiVersion": "v1",
            "time": "2026-01-01T00:00:00Z",
            "fieldsType": "FieldsV1",
            "fieldsV1": {
                "f:metadata": {
                    "f:annotations": {".": {}, f"f:{_TRIGGERED}": {}},
                    "f:labels": {".": {}, "f:app": {}, "f:kubernetes.io/service-name": {}},
                },
                **{f"f:{field}": {} for field in fields},
            },
        }
    ]


def _as_stored(obj: dict[str, Any], version: str) -> dict[str, Any]:
    is_slice = obj["kind"] == "EndpointSlice"
    managed = (
        _managed("kube-controller-manager", "addressType", "endpoints", "ports")
        if is_slice
        else _managed("kubectl", "spec")
    )
    meta = obj["metadata"] | {"resourceVersion": version, "managedFields": managed}
    return obj | {"metadata": meta}


def listed(obj: dict[str, Any], version: str) -> bytes:
    """An object as it stands in a list: without apiVersion and kind."""
    stored = _as_stored(obj, version)
    return msgspec.json.encode(
        {key: value for key, value in stored.items() if key not in {"apiVersion", "kind"}}
    )


def event(obj: dict[str, Any]) -> bytes:
    """A watch's line; ``stamped`` gives it its version and the time of the change."""
    stored = _as_stored(obj, _VERSION_MARK)
    stored["metadata"]["annotations"] = {_TRIGGERED: _TIME_MARK}
    return msgspec.json.encode({"type": "MODIFIED", "object": stored}) + b"\n"


def stamped(line: bytes, version: int) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"
    return line.replace(_VERSION_MARK.encode(), b"%d" % version, 1).replace(
        _TIME_MARK.encode(), now.encode(), 1
    )


def node(name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "uid": f"node-{name}",
            "labels": {"topology.kubernetes.io/zone": "zone-a", "kubernetes.io/hostname": name},
        },
        "spec": {"podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24"]},
        "status": {"addresses": [{"type": "InternalIP", "address": "192.168.50.1"}]},
    }


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# --- the server -----------------------------------------------------------------------------------


class Server:
    """Holds all objects as bytes. ``serve`` is a connection's thread, all else the main one's."""

    def __init__(self, workload: Workload, node_name: str) -> None:
        self._workload = workload
        self._lock = threading.Condition()
        self._version = 1
        self._items: dict[str, list[bytes]] = {
            SERVICES: [listed(workload.service(n), "1") for n in range(workload.services)],
            SLICES: [listed(workload.slice(n), "1") for n in range(workload.services)],
            NODES: [listed(node(node_name), "1")],
        }
        self._pages: dict[tuple[str, int, int], bytes] = {}
        self._replaced: dict[int, int | None] = {}
        self._watches: dict[str, list[socket.socket]] = {path: [] for path in _LISTS}
        self._first_list_ns = 0
        for path in _LISTS:
            self._page(path, 0, 0)

    # --- requests

    def listen(self) -> int:
        """Serve from now on, on loopback; returns the port."""
        listener = socket.create_server(("127.0.0.1", 0))

        def accept() -> None:
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return int(listener.getsockname()[1])

    def _serve(self, connection: socket.socket) -> None:
        """Answer one request after the other, until the other side has gone."""
        pending = b""
        try:
            while True:
                while b"\r\n\r\n" not in pending:
                    if not (data := connection.recv(_REQUEST_BYTES)):
                        return
                    pending += data
                head, _, pending = pending.partition(b"\r\n\r\n")
                pending = self._skip_body(connection, head, pending)
                self._answer(connection, head.decode("latin-1"))
        except OSError:
            return
        finally:
            with self._lock:
                for watches in self._watches.values():
                    if connection in watches:
                        watches.remove(connection)
            connection.close()

    @staticmethod
    def _skip_body(connection: socket.socket, head: bytes, pending: bytes) -> bytes:
        _, found, rest = head.lower().partition(b"\r\ncontent-length:")
        length = int(rest.split(b"\r\n", 1)[0]) if found else 0
        while len(pending) < length and (data := connection.recv(_REQUEST_BYTES)):
            pending += data
        return pending[length:]

    def _answer(self, connection: socket.socket, head: str) -> None:
        method, target, _ = head.split("\r\n", 1)[0].split(" ")
        url = urlsplit(target)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if method == "POST":
            connection.sendall(_plain(b"201 Created", b"{}"))
        elif url.path not in _LISTS:
            connection.sendall(_plain(b"404 Not Found", b'{"kind":"Status","code":404}'))
        elif "watch" in query:
            self._begin_watch(connection, url.path, query["resourceVersion"])
        else:
            self._note_list()
            limit = "0" if query.get("resourceVersion") == _CACHED else query.get("limit", "0")
            page = self._page(url.path, int(query.get("continue", "0")), int(limit))
            connection.sendall(_head(b"Content-Encoding: gzip\r\n") + _chunk(page) + _chunk(b""))

    def _begin_watch(self, connection: socket.socket, path: str, version: str) -> None:
        with self._lock:
            if version != str(self._version):
                connection.sendall(
                    _plain(b"410 Gone", b'{"kind":"Status","reason":"Expired","code":410}')
                )
                return
            connection.sendall(_head())
            self._watches[path].append(connection)
            self._lock.notify_all()

    def _note_list(self) -> None:
        with self._lock:
            self._first_list_ns = self._first_list_ns or time.monotonic_ns()
            self._lock.notify_all()

    def _page(self, path: str, first: int, limit: int) -> bytes:
        """``limit`` objects from number ``first`` on, all for 0; compressed."""
        with self._lock:
            key = (path, first, limit)
            if key not in self._pages:
                items = self._items[path]
                beyond = first + limit if limit else len(items)
                api_version, kind = _LISTS[path]
                meta: dict[str, Any] = {"resourceVersion": str(self._version)}
                if beyond < len(items):
                    meta |= {
                        "continue": str(beyond),
                        "remainingItemCount": len(items) - beyond,
                    }
                text = msgspec.json.encode(
                    {
                        "kind": kind,
                        "apiVersion": api_version,
                        "metadata": meta,
                        "items": [msgspec.Raw(item) for item in items[first:beyond]],
                    }
                )
                self._pages[key] = gzip.compress(text, _GZIP_LEVEL)
            return self._pages[key]

    # --- what the benchmark asks for

    def obey(self, command: Command) -> object:
        """Returns what to answer."""
        if command.do == "await":
            return {"at_ns": self._await(command.what)}
        slices = [self._replace_one(service) for service in command.services]
        slices.append((command.last, self._workload.slice(command.last, command.side)))
        lines = [event(obj) for _, obj in slices]
        items = [
            (service, listed(obj, str(version)))
            for version, (service, obj) in enumerate(slices, start=self._version + 1)
        ]
        sent = self._send(lines, command.rate)
        with self._lock:
            for service, item in items:
                self._items[SLICES][service] = item
            self._pages.clear()
        return sent

    def _await(self, what: Literal["list", "watch"]) -> int:
        with self._lock:
            if what == "list":
                self._lock.wait_for(lambda: self._first_list_ns)
                return self._first_list_ns
            self._lock.wait_for(lambda: self._watches[SLICES])
            return time.monotonic_ns()

    def _replace_one(self, service: int) -> tuple[int, dict[str, Any]]:
        """The slice with one endpoint replaced, or as it was where it was replaced before."""
        replaced = None if self._replaced.get(service) is not None else 0
        self._replaced[service] = replaced
        return service, self._workload.slice(service, replaced=replaced)

    def _send(self, lines: Iterable[bytes], rate: float) -> Sent:
        """Write events to the slices' watches, each when it is due."""
        period_ns = 1e9 / rate if rate else 0.0
        events = size = due_ns = sent_ns = 0
        began_ns = time.monotonic_ns()
        for number, line in enumerate(lines):
            due_ns = began_ns + round(number * period_ns)
            if (left_ns := due_ns - time.monotonic_ns()) > _AHEAD_NS:
                time.sleep(left_ns / 1e9)
            with self._lock:
                self._version += 1
                data = stamped(line, self._version)
                watches = list(self._watches[SLICES])
            chunk = _chunk(data)
            sent_ns = time.monotonic_ns()
            for watch in watches:
                watch.sendall(chunk)
            events, size = events + 1, size + len(data)
        return Sent(began_ns, due_ns, sent_ns, events, size)


def _head(more: bytes = b"") -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        + more
        + b"Transfer-Encoding: chunked\r\n\r\n"
    )


def _plain(status: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ebpflb.bench.apiserver")
    parser.add_argument("--node-name", required=True)
    parser.add_argument("--workload", required=True, help="a Workload in JSON")
    told = parser.parse_args(arguments)
    server = Server(msgspec.json.decode(told.workload, type=Workload), told.node_name)
    _say({"port": server.listen()})
    for line in sys.stdin:
        _say(server.obey(msgspec.json.decode(line, type=Command)))
    return 0


def _say(answer: object) -> None:
    sys.stdout.write(msgspec.json.encode(answer).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
