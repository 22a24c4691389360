# SPDX-License-Identifier: Apache-2.0
"""Kubernetes Events: what the users of an object, who never see a node's log, should know.

Building one is pure. Sending is best effort on a thread of its own, behind a queue that drops
rather than waits and a limit that keeps a bad day from becoming the API server's. How a request
travels is not known here: functions send it.

`kubectl describe` shows the Events of an object's uid. That of a Node is its name, by convention;
another object's is asked for when its Event is sent, which is rare, and not kept for all objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import queue
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Final, Literal, NamedTuple, TypeVar

from ebpflb.logs import Log
from ebpflb.model import ObjectKey, Rejected

_log = Log("events")

CONTROLLER: Final = "ebpflb"
NOTE_BYTES: Final = 1024
"""The API server refuses a longer note."""

_API_VERSIONS: Final = {"EndpointSlice": "discovery.k8s.io/v1"}
_PATHS: Final = {
    "Service": "/api/v1/namespaces/{}/services",
    "EndpointSlice": "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
}
_NAME_LENGTH: Final = 253
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?", re.ASCII)
_INSTANCE_BYTES: Final = 128

Post = Callable[[str, bytes], int]
"""Sends a JSON body to a path of the API server; returns the status, raises where none came."""

Read = Callable[[str, Mapping[str, str]], bytes]
"""Reads a list at a path of the API server, with a query; raises where it has none to give."""

Clock = Callable[[], float]


class Event(NamedTuple):
    """What happened to an object. Reason and action are one word each, the note is a sentence.

    ``of_cluster``: every node finds the same, so one Event is enough for all of them.
    """

    regarding: ObjectKey
    reason: str
    action: str
    note: str
    type: Literal["Normal", "Warning"] = "Warning"
    of_cluster: bool = False


# --- the Events that there are -------------------------------------------------------------------


def starting(node_name: str) -> Event:
    """The agent starts (ADM-09); reason and action are kube-proxy's."""
    return Event(_node(node_name), "Starting", "StartKubeProxy", "", "Normal")


def not_served(rejected: Rejected) -> Event:
    """An object, or a part of it, that is not served. All nodes reject it for the same reason."""
    return Event(rejected.key, "NotServed", "Program", rejected.reason, of_cluster=True)


def cannot_listen(node_name: str, flag: str, reason: str) -> Event:
    """A server's address is taken (HZ-08, ADM-07); reasons and action are kube-proxy's."""
    reasons = {
        "--healthz-bind-address": "FailedToStartProxierHealthcheck",
        "--metrics-bind-address": "FailedToStartMetricServer",
    }
    return Event(_node(node_name), reasons[flag], "StartKubeProxy", reason)


def _node(name: str) -> ObjectKey:
    return ObjectKey("Node", "", name)


# --- as the API server takes it ------------------------------------------------------------------


def path_of(event: Event) -> str:
    return f"/apis/events.k8s.io/v1/namespaces/{_namespace(event.regarding)}/events"


def body_of(event: Event, *, node_name: str, now_s: float, times: int = 1, uid: str = "") -> bytes:
    """The Event as JSON. ``times``: how often it happened since it was last told.

    ``uid`` is that of the object that it regards, "" where unknown.

    An Event of the cluster has a name that all nodes make alike within an hour, so that the first
    one's is taken and the others' are refused as there already.
    """
    regarding = event.regarding
    at = datetime.fromtimestamp(now_s, UTC).isoformat(timespec="microseconds")
    body: dict[str, object] = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {
            "name": _name(event, node_name, now_s),
            "namespace": _namespace(regarding),
        },
        "eventTime": at.replace("+00:00", "Z"),
        "reportingController": CONTROLLER,
        "reportingInstance": _cut(f"{CONTROLLER}-{node_name}", _INSTANCE_BYTES),
        "action": event.action,
        "reason": event.reason,
        "regarding": _reference(regarding, uid),
        "note": _cut(event.note, NOTE_BYTES),
        "type": event.type,
    }
    if times > 1:
        body["series"] = {"count": times, "lastObservedTime": body["eventTime"]}
    return json.dumps(body, ensure_ascii=False).encode()


def query_of(key: ObjectKey) -> tuple[str, dict[str, str]] | None:
    """Path and query of a list of this object alone; None where that is not needed.

    A list, because kube-proxy's role may list these objects and may not get one. Version 0 is
    answered from the API server's cache.
    """
    path = _PATHS.get(key.kind)
    if path is None:
        return None
    query = {"fieldSelector": f"metadata.name={key.name}", "resourceVersion": "0"}
    return path.format(key.namespace), query


def uid_in(data: bytes) -> str:
    """The uid of the one object in a list, "" where there is none (any more)."""
    items = json.loads(data).get("items") or [{}]
    return str(items[0].get("metadata", {}).get("uid", ""))


def _reference(key: ObjectKey, uid: str) -> dict[str, str]:
    reference = {
        "apiVersion": _API_VERSIONS.get(key.kind, "v1"),
        "kind": key.kind,
        "name": key.name,
    }
    if key.namespace:
        reference["namespace"] = key.namespace
    uid = key.name if key.kind == "Node" else uid  # as kubelet writes it
    if uid:
        reference["uid"] = uid
    return reference


def _namespace(key: ObjectKey) -> str:
    return key.namespace or "default"


def _name(event: Event, node_name: str, now_s: float) -> str:
    if event.of_cluster:
        parts = (str(event.regarding), event.reason, event.note, str(now_s // 3600))
    else:
        parts = (node_name, event.reason, event.note, str(now_s))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    name = event.regarding.name[: _NAME_LENGTH - 17].rstrip("-.")
    return f"{name if _SUBDOMAIN.fullmatch(name) else CONTROLLER}.{digest}"


def _cut(text: str, most_bytes: int) -> str:
    """``text`` within so many bytes of UTF-8, with a mark where something is missing."""
    data = text.encode()
    if len(data) <= most_bytes:
        return text
    return data[: most_bytes - len("…".encode())].decode(errors="ignore") + "…"


# --- how many ------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """``burst`` Events at once, one more each ``refill_s`` seconds; the same one not within
    ``again_s``; on one object ``of_one`` within ``window_s`` at most.
    """

    burst: int = 25
    refill_s: float = 10.0
    again_s: float = 600.0
    of_one: int = 5
    window_s: float = 60.0


_MOST_REMEMBERED: Final = 4096


class Limiter:
    """Which Events are worth sending now. Not for several threads."""

    def __init__(self, clock: Clock, limits: Limits | None = None) -> None:
        self._clock = clock
        self._limits = limits or Limits()
        self._tokens = float(self._limits.burst)
        self._filled_s = clock()
        self._told: OrderedDict[Event, _Told] = OrderedDict()
        self._of_one: OrderedDict[ObjectKey, tuple[float, ...]] = OrderedDict()

    def take(self, event: Event) -> int:
        """How often it happened since it was last taken, this time included; 0: do not send it."""
        now = self._clock()
        told = self._told.get(event)
        if told is not None and now - told.at_s < self._limits.again_s:
            self._told[event] = told._replace(unsaid=told.unsaid + 1)
            return 0
        since = now - self._limits.window_s
        recent = tuple(at for at in self._of_one.get(event.regarding, ()) if at > since)
        if len(recent) >= self._limits.of_one or not self._has_token(now):
            return 0
        _remember(self._told, event, _Told(now, 0))
        _remember(self._of_one, event.regarding, (*recent, now))
        return 1 + (told.unsaid if told is not None else 0)

    def _has_token(self, now: float) -> bool:
        limits = self._limits
        gained = (now - self._filled_s) / limits.refill_s
        self._tokens = min(float(limits.burst), self._tokens + gained)
        self._filled_s = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class _Told(NamedTuple):
    at_s: float
    unsaid: int


_K = TypeVar("_K")
_V = TypeVar("_V")


def _remember(memory: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    memory[key] = value
    memory.move_to_end(key)
    if len(memory) > _MOST_REMEMBERED:
        memory.popitem(last=False)


# --- sending -------------------------------------------------------------------------------------

_MOST_QUEUED: Final = 256
_RETRIES_S: Final = (1.0, 5.0, 25.0)
_REFUSALS: Final = 3
"""So many refusals in a row are RBAC's; one alone may be a namespace's that is being deleted."""


class Recorder:
    """Sends Events from a thread of its own. ``tell`` never waits, whatever the API server does.

    ``read`` finds out the uids of their objects; an Event is sent without where that fails.
    What cannot be sent is tried three times more and then dropped; what the API server forbids
    switches all of it off, with one line in the log, until the agent starts again. ``dropped``
    counts what was told and not sent, for whatever reason.
    """

    def __init__(
        self,
        post: Post,
        node_name: str,
        *,
        read: Read | None = None,
        limiter: Limiter | None = None,
        clock: Clock = time.time,
        retries_s: tuple[float, ...] = _RETRIES_S,
    ) -> None:
        self._post = post
        self._read = read
        self._node_name = node_name
        self._clock = clock
        self._retries_s = retries_s
        self._limiter = limiter or Limiter(time.monotonic)
        self._queue: queue.Queue[tuple[Event, int] | None] = queue.Queue(_MOST_QUEUED)
        self._closing = threading.Event()
        self._off = threading.Event()
        self._refusals = 0
        self._has_sent = False
        self._lock = threading.Lock()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """End the thread, within ``timeout_s``; what has not been sent by then is not sent."""
        self._closing.set()
        with contextlib.suppress(queue.Full):  # then the thread has something to wake it
            self._queue.put_nowait(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def tell(self, event: Event) -> None:
        """Send it soon, unless that would be too much. Any thread may call this."""
        if self._off.is_set():
            return
        with self._lock:
            times = self._limiter.take(event)
        if times:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait((event, times))
                return
        self._drop()

    def _run(self) -> None:
        while not self._closing.is_set() and not self._off.is_set():
            item = self._queue.get()
            if item is not None:
                self._send(*item)

    def _send(self, event: Event, times: int) -> None:
        path, now_s, uid = path_of(event), self._clock(), ""
        for wait_s in (*self._retries_s, None):
            uid = uid or self._uid(event.regarding)
            body = body_of(event, node_name=self._node_name, now_s=now_s, times=times, uid=uid)
            status = self._try(path, body)
            if status is not None and not _is_passing(status):
                self._answered(event, status)
                return
            if wait_s is None or self._closing.wait(wait_s):
                break
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1

    def _uid(self, key: ObjectKey) -> str:
        query = query_of(key)
        if self._read is None or query is None:
            return ""
        try:
            return uid_in(self._read(*query))
        except Exception as error:  # noqa: BLE001 - as below
            _log.debug("uid not found", object=str(key), reason=str(error))
            return ""

    def _try(self, path: str, body: bytes) -> int | None:
        try:
            return self._post(path, body)
        except Exception as error:  # noqa: BLE001 - nothing that an Event does may end this thread
            _log.debug("event not sent", path=path, reason=str(error))
            return None

    def _answered(self, event: Event, status: int) -> None:
        if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES or status == HTTPStatus.CONFLICT:
            self._has_sent, self._refusals = True, 0
            return
        self._drop()
        if status not in {HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}:
            _log.warning("event refused", object=str(event.regarding), status=status)
            return
        self._refusals += 1
        if not self._has_sent or self._refusals >= _REFUSALS:
            self._off.set()
            _log.warning(
                "no Events are sent from now on: the API server forbids it",
                status=status,
                grant="create on events of events.k8s.io",
            )


def _is_passing(status: int) -> bool:
    """Whether trying again may help."""
    return status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.TOO_MANY_REQUESTS} or status >= 500


# --- of the health servers of Services ----------------------------------------------------------


def no_health_server(node_name: str, key: ObjectKey, port: int, reason: str) -> Event:
    """A Service's health port is not served on this node (HC-09); all words are kube-proxy's."""
    what = f'failed to start healthcheck "{key.namespace}/{key.name}" on port {port}'
    note = f"node {node_name} {what}: {reason}"
    return Event(key, "FailedToStartServiceHealthcheck", "Listen", note)
