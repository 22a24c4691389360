# SPDX-License-Identifier: Apache-2.0
"""One resource of the API server: listed, then watched, for ever.

Split by fear: an endless loop that nothing can end, list-then-watch inside it, one HTTP stream
inside that. Every failure ends the stream, costs a pause and is told; what is known stays as it is
until the server says otherwise. It must not know what an object means, nor who listens.

What is known of the server's state is one resourceVersion. A stream that broke goes on from there.
Where that cannot be (410 in either of its forms), or where something in the stream could not be
read, everything is listed anew; objects that the list no longer has are deleted then, and not
before the list is complete. Order in a stream is the truth; versions are not compared.
"""

from __future__ import annotations

import enum
import random
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Final, Literal, Protocol

import msgspec

from ebpflb.model import Deleted, ObjectKey, Refused, Upserted
from ebpflb.sources import envelopes, wire
from ebpflb.sources.client import Client, InterruptedRequestError, Stream
from ebpflb.sources.envelopes import MalformedError
from ebpflb.sources.failures import ApiError, status_error

Operation = Literal["list", "watch"]

PAGE: Final = 500
"""Objects in a page, where the server cares to make pages; client-go's number."""


def default_backoff(attempt: int, rng: random.Random) -> float:
    """Seconds before trying again: from 0.25 doubling to 30, each more or less by half."""
    return min(30.0, 0.25 * 2.0 ** min(attempt, 16)) * rng.uniform(0.5, 1.5)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long is waited for what, in seconds; tests wait shorter.

    ``watch_s``: a stream is asked to last so long, at random between the two (client-go's numbers).
    ``grace_s``: how much longer than that it may. ``silence_s``: a server whose streams have had
    bookmarks, which come once a minute, is taken for dead when it is silent for so long.
    ``brief_s``: a stream that lasted no longer came to nothing (client-go's number); ``healthy_s``:
    one that lasted so long was a good one. ``forbidden_s``: a 403 that lasts no
    longer is that of a server that has just started. ``confirm_s``: before an incredible list is
    asked for again. ``node_s``: how long the start waits for the Node.
    """

    connect_s: float = 5.0
    list_silence_s: float = 65.0
    list_s: float = 300.0
    watch_s: tuple[float, float] = (300.0, 600.0)
    grace_s: float = 15.0
    silence_s: float = 150.0
    brief_s: float = 1.0
    healthy_s: float = 10.0
    forbidden_s: float = 10.0
    confirm_s: float = 3.0
    node_s: float = 300.0
    backoff: Callable[[int, random.Random], float] = default_backoff


class Resource(msgspec.Struct, frozen=True):
    """What is listed and watched: where, and which of them.

    ``optional`` are parameters that an old server may not know: left out once it has said 400.
    """

    kind: wire.Kind
    path: str
    selectors: Mapping[str, str] = {}
    optional: frozenset[str] = frozenset()


class Listener(Protocol):
    """Who is told; called on the watch's thread."""

    def changed(self, told: wire.Told) -> None:
        """An object is not what it was."""
        ...

    def listed(self, kind: wire.Kind) -> None:
        """Everything that exists has been told."""
        ...

    def works(self, kind: wire.Kind, *, stream: bool) -> None:
        """The server answered; with ``stream``, the stream itself works too."""
        ...

    def failed(
        self, kind: wire.Kind, operation: Operation, error: ApiError, *, row: int, stream: bool
    ) -> None:
        """A request failed, or with ``stream`` what came after it, ``row`` times in a row.

        Not called for the 403 that a server gives to everybody when it has just started.
        """
        ...

    def doubted(self, kind: wire.Kind, *, known: int, listed: int) -> None:
        """A list has nothing of all that is known; it is asked for again."""
        ...


class WatchMetrics(Protocol):
    """What is counted. Any thread calls."""

    def received(self, kind: str, size: int) -> None:
        """Bytes came over the wire."""
        ...

    def heard(self, kind: str) -> None:
        """An event or a bookmark came, or a list: what is known is as of now."""
        ...

    def event(self, kind: str) -> None:
        """A watch said that an object is new, different or gone."""
        ...

    def listed(self, kind: str, *, again: bool, seconds: float) -> None:
        """A list came in whole; ``again`` but for the first one."""
        ...

    def request_failed(self, kind: str, operation: Operation, reason: str) -> None:
        """One more failure, by what was tried and the reason of the ApiError."""
        ...


# After these the stream's version is worth nothing.
_LIST_ANEW: Final = frozenset(
    {"gone", "garbage", "silent", "error_event", "empty", "fault", "refused", "missing", "too_new"}
)
# After these not even "at least this version" may be asked for.
_FORGET_VERSION: Final = frozenset({"gone", "refused", "too_new"})
# These belong to a watch's life, in whatever form they come.
_ROUTINE: Final = frozenset({"gone", "too_new"})
_LONGEST_RETRY_AFTER_S: Final = 120.0
_NUDGED_S: Final = 0.25
"""Who was nudged waits at most so long, at random: others were nudged as well."""
_CACHED: Final = "0"
"""The resourceVersion for: whatever the server has at hand. Any node's start costs etcd nothing."""


class _Stage(enum.IntEnum):
    """How far a try came before it failed."""

    CONNECT = 0
    """No connection, or none that held: it cost the server next to nothing."""
    ANSWER = 1
    """The server was asked and gave no stream: an error, a bad list, no trust."""
    STREAM = 2
    """There was a stream, and it was over at once."""
    BROKEN = 3
    """There was a stream that went on for a while."""


# The pause doubles no more often: to 4, 1 and 2 s; otherwise as far as ``default_backoff`` does.
_CONNECT_DOUBLINGS: Final = 4
_STARTING_DOUBLINGS: Final = 2
_BROKEN_DOUBLINGS: Final = 3


class _Rows:
    """How many failures there were in a row, for each stage by itself.

    Who came further than a stage has ended its row. So a server that could not be reached for long
    is not avoided once it answers, and one that breaks every stream soon is, though it answers.
    """

    def __init__(self) -> None:
        self._rows = dict.fromkeys(_Stage, 0)

    def passed(self, last: _Stage) -> None:
        """A try came further than ``last``."""
        self._rows |= {stage: 0 for stage in _Stage if stage <= last}

    def failed(self, stage: _Stage, most: int | None) -> int:
        """A try came as far as ``stage``; returns how many did before, counting up to ``most``."""
        self._rows |= {earlier: 0 for earlier in _Stage if earlier < stage}
        row = self._rows[stage] if most is None else min(self._rows[stage], most)
        self._rows[stage] = row + 1
        return row


class Watch:
    """Tells ``listener`` what the objects of ``resource`` are, and how that changes.

    ``run`` is the body of a thread and returns when ``stopping`` is set. The first list is taken
    from the server's cache, later ones are at least as new as what is known, and one after a 410 is
    the newest there is. ``client`` is this watch's alone. Any thread may call ``nudge``.
    """

    def __init__(
        self,
        resource: Resource,
        client: Client,
        listener: Listener,
        metrics: WatchMetrics,
        stopping: threading.Event,
        *,
        timing: Timing,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._resource = resource
        self._kind = resource.kind
        self._client = client
        self._listener = listener
        self._metrics = metrics
        self._stopping = stopping
        self._timing = timing
        self._clock = clock
        self._rng = rng or random.Random()  # noqa: S311 - spreads load, keeps no secret
        self._selectors = dict(resource.selectors)
        self._known: dict[ObjectKey, Upserted | Refused] = {}
        self._version = ""  # where the stream goes on, "" where everything must be listed
        self._at_least = _CACHED
        self._limit = PAGE
        self._doubted = False
        self._complete = False  # listed once
        self._bookmarks = False
        self._rows = _Rows()  # for the pauses
        self._fruitless = 0  # streams in a row that told nothing, of a server that was there
        self._was_gone = False  # a 410 since the last stream that went on for a while
        self._forbidden_since: float | None = None
        self._nudged = threading.Event()
        self._was_nudged = False  # since the server last gave a stream
        self._heeds_nudge = False  # in the pause that comes
        self._operation: Operation = "list"
        self._stream_began: float | None = None

    def run(self) -> None:
        """List and watch until ``stopping``. Nothing that goes wrong ends it."""
        while not self._stopping.is_set():
            self._rest(self.step())

    def nudge(self) -> None:
        """Somebody has reached the server, or all is to stop: end a pause that waits for it.

        Heeded once, then not before the server has given a stream: what it answers to others it
        may well refuse here.
        """
        self._nudged.set()

    def _rest(self, pause_s: float) -> None:
        if not self._heeds_nudge:
            self._stopping.wait(pause_s)
        elif self._nudged.wait(pause_s):
            self._was_nudged = True
            self._rows.passed(_Stage.ANSWER)
            self._stopping.wait(self._rng.uniform(0.0, _NUDGED_S))

    def step(self) -> float:
        """List if that must be, then one stream; returns for how long to pause."""
        self._stream_began = None
        self._heeds_nudge = False
        self._nudged.clear()
        try:
            if not self._version:
                self.list()
            return self._watch()
        except InterruptedRequestError:
            return 0.0
        except ApiError as error:
            return self._failed(error)
        except MalformedError as error:
            return self._failed(ApiError("garbage", f"sends {error}"))
        except Exception as error:  # noqa: BLE001 - a fault of ours: all is listed anew
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({at.name}, line {at.lineno} of {at.filename})"
            return self._failed(ApiError("fault", f"fault of ours: {what}"))

    def list_once(self) -> None:
        """List, trying once. Raises ApiError."""
        try:
            self.list()
        except MalformedError as error:
            raise ApiError("garbage", f"sends {error}") from None

    # --- list -----------------------------------------------------------------------------------

    def list(self) -> None:
        """Take in all that exists. Raises ApiError or MalformedError, and then deletes nothing."""
        self._operation = "list"
        while True:
            began = self._clock()
            known, present = set(self._known), set[ObjectKey]()
            version = self._pages(present)
            if not self._is_incredible(known, present):
                break
            self._doubted = True
            self._listener.doubted(self._kind, known=len(known), listed=len(present))
            if self._stopping.wait(self._timing.confirm_s):
                raise InterruptedRequestError
        for key in [key for key in self._known if key not in present]:
            self._take(Deleted(key))
        self._version = self._at_least = version
        self._doubted = False
        self._limit = PAGE
        self._metrics.heard(self._kind)
        self._metrics.listed(self._kind, again=self._complete, seconds=self._clock() - began)
        self._complete = True
        self._listener.listed(self._kind)

    def _is_incredible(self, known: set[ObjectKey], present: set[ObjectKey]) -> bool:
        """Whether the list says that there is nothing, or nothing of all that is known.

        That is the picture of a server that has lost its state for a moment: in a cluster there is
        always default/kubernetes with a slice, and this Node. Not so when it says it again.
        """
        return not self._doubted and (present.isdisjoint(known) if known else not present)

    def _pages(self, present: set[ObjectKey]) -> str:
        """Take in every page, noting the keys; return the version that they are of."""
        token = ""
        while True:
            page = self._page(token, present)
            if not page.token:
                return page.version
            token = page.token

    def _page(self, token: str, present: set[ObjectKey]) -> envelopes.Page:
        query = dict(self._selectors)
        # client-go's rules. With both a limit and a version old servers list that version exactly.
        if self._limit and (token or self._at_least in {"", _CACHED}):
            query["limit"] = str(self._limit)
        if token:
            query["continue"] = token
        elif self._at_least:
            query["resourceVersion"] = self._at_least
        deadline = self._clock() + self._timing.list_s
        page = envelopes.Page()
        with self._client.get(
            self._resource.path,
            query,
            read_timeout_s=self._timing.list_silence_s,
            compressed=True,
        ) as stream:
            try:
                while data := stream.read():
                    self._check(stream, deadline)
                    for item in page.feed(data):
                        self._take_item(item, present)
            finally:
                self._metrics.received(self._kind, stream.received)
        for item in page.finish():
            self._take_item(item, present)
        return page

    def _take_item(self, item: msgspec.Raw, present: set[ObjectKey]) -> None:
        told = wire.decode_json(self._kind, item)
        present.add(_key(told))
        self._take(told)

    def _check(self, stream: Stream, deadline: float) -> None:
        """Whether it may go on: somebody who sends a byte now and then is not alive."""
        if self._stopping.is_set():
            raise InterruptedRequestError
        if self._clock() > deadline:
            raise ApiError("silent", "does not come to an end", server=stream.server)

    # --- watch ----------------------------------------------------------------------------------

    def _watch(self) -> float:
        """One stream, to its end; returns for how long to pause."""
        self._operation = "watch"
        timing = self._timing
        lasting_s = self._rng.uniform(*timing.watch_s)
        longest_s = lasting_s + timing.grace_s
        began_at = self._version
        query = self._selectors | {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(max(1, round(lasting_s))),
        }
        with self._client.get(
            self._resource.path,
            query,
            read_timeout_s=min(longest_s, timing.silence_s) if self._bookmarks else longest_s,
            compressed=False,
            endless=True,
        ) as stream:
            began = self._stream_began = self._clock()
            self._was_nudged = False
            self._forbidden_since = None
            self._listener.works(self._kind, stream=False)
            for line in envelopes.lines(self._reader(stream, began + longest_s)):
                self._take_line(line, stream)
        if self._stopping.is_set():
            return 0.0
        if self._is_healthy():
            self._recovered()
            return 0.0
        stage = self._stage()
        if stage is _Stage.STREAM and self._version == began_at:
            raise ApiError("empty", "ends a watch at once", server=stream.server)
        return self._pause(stage, _BROKEN_DOUBLINGS if stage is _Stage.BROKEN else None)

    def _reader(self, stream: Stream, deadline: float) -> Callable[[], bytes]:
        received = 0

        def read() -> bytes:
            nonlocal received
            self._check(stream, deadline)
            data = stream.read()
            if data:
                self._metrics.received(self._kind, stream.received - received)
                received = stream.received
            return data

        return read

    def _take_line(self, data: bytes, stream: Stream) -> None:
        line = envelopes.read_line(data)
        if line.type == "ERROR":
            raise status_error(0, line.object, server=stream.server, otherwise="error_event")
        version = envelopes.version_of(line.object)
        if not version:
            raise MalformedError(f"no event: a {line.type!r} without a resourceVersion")
        if line.type == "BOOKMARK":
            self._bookmarks = True
        elif line.type in {"ADDED", "MODIFIED", "DELETED"}:
            told = wire.decode_json(self._kind, line.object)
            self._metrics.event(self._kind)
            self._take(Deleted(_key(told)) if line.type == "DELETED" else told)
        else:
            raise MalformedError(f"no event: its type is {line.type!r}")
        self._version = self._at_least = version
        if self._fruitless:
            self._recovered()
        self._metrics.heard(self._kind)

    # --- what is known --------------------------------------------------------------------------

    def _take(self, told: wire.Told) -> None:
        """Tell it if it is news. What is not ours to serve counts as absent."""
        key = _key(told)
        before = self._known.get(key)
        # Told first: what could not be told must not count as known.
        if not isinstance(told, Deleted):
            if told != before:
                self._listener.changed(told)
                self._known[key] = told
        elif before is not None:
            self._listener.changed(told)
            del self._known[key]

    # --- failures -------------------------------------------------------------------------------

    def _failed(self, error: ApiError) -> float:
        """Note a failure; return for how long to pause."""
        if self._stopping.is_set():
            return 0.0
        if self._is_healthy():
            self._recovered()
        stream = self._stream_began is not None or error.reason in _ROUTINE
        self._fruitless += stream
        self._metrics.request_failed(self._kind, self._operation, error.reason)
        if error.reason in _LIST_ANEW:
            self._version = ""
        if error.reason in _FORGET_VERSION:
            # A second 410 in the middle of a list: pages take too long here, all at once then.
            if self._operation == "list" and error.reason == "gone" and not self._at_least:
                self._limit = 0
            self._at_least = ""
        if error.reason == "refused" and self._resource.optional & self._selectors.keys():
            for name in self._resource.optional:
                self._selectors.pop(name, None)
            return 0.0
        self._heeds_nudge = error.shared and not error.retry_after_s and not self._was_nudged
        if self._is_starting(error):
            return self._pause(_Stage.ANSWER, _STARTING_DOUBLINGS)
        self._listener.failed(
            self._kind, self._operation, error, row=self._fruitless, stream=stream
        )
        stage = self._stage() if stream else _Stage.ANSWER
        if stage is _Stage.BROKEN:
            self._was_gone = False
        elif error.reason == "gone" and not self._was_gone:
            self._was_gone = True
            return 0.0
        if error.reason == "unreachable":
            self._fruitless = min(self._fruitless, 1)  # its going is what broke the stream
            return self._pause(_Stage.CONNECT, _CONNECT_DOUBLINGS)
        asked_s = min(error.retry_after_s, _LONGEST_RETRY_AFTER_S)
        # What costs the server a list must become rare, however long its streams last.
        is_cheap = stage is _Stage.BROKEN and error.reason not in _LIST_ANEW
        pause_s = self._pause(stage, _BROKEN_DOUBLINGS if is_cheap else None)
        return max(pause_s, asked_s * self._rng.uniform(1.0, 1.25))

    def _stage(self) -> _Stage:
        """How far a stream came."""
        began = self._stream_began
        brief = began is None or self._clock() - began < self._timing.brief_s
        return _Stage.STREAM if brief else _Stage.BROKEN

    def _is_starting(self, error: ApiError) -> bool:
        """Whether the server may have just started: it knows of no rights then, for seconds."""
        if error.reason == "unreachable":
            self._forbidden_since = None
        if error.reason != "forbidden":
            return False
        now = self._clock()
        if self._forbidden_since is None:
            self._forbidden_since = now
        return now - self._forbidden_since < self._timing.forbidden_s

    def _is_healthy(self) -> bool:
        began = self._stream_began
        return began is not None and self._clock() - began >= self._timing.healthy_s

    def _recovered(self) -> None:
        """The stream works: it has lasted, or told something."""
        if self._is_healthy():
            self._rows.passed(_Stage.BROKEN)
            self._was_gone = False
        self._fruitless = 0
        self._listener.works(self._kind, stream=True)

    def _pause(self, stage: _Stage, most: int | None = None) -> float:
        return self._timing.backoff(self._rows.failed(stage, most), self._rng)


def _key(told: wire.Told) -> ObjectKey:
    return told.obj.key if isinstance(told, Upserted) else told.key
