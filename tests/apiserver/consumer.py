"""What an agent would know: takes a source's events and notices, and waits for them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ebpflb.model import ApiObject, Deleted, Event, ObjectKey, Refused, Synced, Upserted
from ebpflb.sources import wire
from ebpflb.sources.cluster import resources
from ebpflb.sources.failures import ApiError
from ebpflb.sources.watch import Timing
from tests.apiserver.fake import RESOURCES, FakeApiServer, selector
from tests.builders import NODE

DEADLINE_S = 20.0

QUICK = Timing(
    connect_s=1.0,
    list_silence_s=1.0,
    list_s=5.0,
    watch_s=(60.0, 60.0),
    silence_s=1.0,
    healthy_s=0.5,
    forbidden_s=0.0,
    confirm_s=0.01,
    node_s=60.0,
    backoff=lambda attempt, rng: min(0.05, 0.002 * 2**attempt) * rng.uniform(0.5, 1.5),
)


class Consumer:
    """``state`` is what is known; ``events`` all that were told; ``notices`` what was said."""

    def __init__(self) -> None:
        self.state: dict[ObjectKey, ApiObject | Refused] = {}
        self.events: list[Event] = []
        self.notices: list[tuple[str, dict[str, Any]]] = []
        self.synced = False
        self.failures: Counter[tuple[str, str, str]] = Counter()
        self.lists: Counter[tuple[str, bool]] = Counter()
        self.bytes = 0
        self.heard_of: Counter[str] = Counter()
        self.changed = threading.Condition()

    # --- a source's emit and notice ---------------------------------------------------------------

    def emit(self, event: Event) -> None:
        with self.changed:
            self.events.append(event)
            if isinstance(event, Synced):
                assert not self.synced, "Synced twice"
                self.synced = True
            elif isinstance(event, Upserted):
                assert self.state.get(event.obj.key) != event.obj, f"told again: {event}"
                self.state[event.obj.key] = event.obj
            elif isinstance(event, Refused):
                self.state[event.key] = event
            else:
                assert isinstance(event, Deleted), f"not a source's: {event}"
                assert event.key in self.state, f"deleted but never told: {event}"
                del self.state[event.key]
            self.changed.notify_all()

    def notice(self, event: str, /, **fields: object) -> None:
        with self.changed:
            self.notices.append((event, fields))
            self.changed.notify_all()

    # --- a source's metrics -----------------------------------------------------------------------

    def received(self, kind: str, size: int) -> None:  # noqa: ARG002 - the protocol's
        with self.changed:
            self.bytes += size

    def heard(self, kind: str) -> None:
        with self.changed:
            self.heard_of[kind] += 1
            self.changed.notify_all()

    def event(self, kind: str) -> None: ...

    def listed(self, kind: str, *, again: bool, seconds: float) -> None:  # noqa: ARG002
        with self.changed:
            self.lists[kind, again] += 1
            self.changed.notify_all()

    def request_failed(self, kind: str, operation: str, reason: str) -> None:
        with self.changed:
            self.failures[kind, operation, reason] += 1
            self.changed.notify_all()

    # --- what a test asks -------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], what: str = "") -> None:
        """Until it holds; fails after a deadline."""
        deadline = time.monotonic() + DEADLINE_S
        with self.changed:
            while not condition():
                left = deadline - time.monotonic()
                assert left > 0, f"never came: {what or condition}; {self.notices}"
                self.changed.wait(min(left, 0.02))

    def wait_synced(self) -> None:
        self.wait(lambda: self.synced, "Synced")

    def wait_equal(self, server: FakeApiServer) -> None:
        """Until all that the server has is known, and nothing else."""
        self.wait(lambda: self.state == truth(server), "what the server has")

    def said(self, name: str) -> list[dict[str, Any]]:
        """The fields of each notice of this name."""
        with self.changed:
            return [fields for event, fields in self.notices if event == name]

    def failed(self, kind: str, operation: str, reason: str) -> int:
        with self.changed:
            return self.failures[kind, operation, reason]

    def deletions(self) -> list[ObjectKey]:
        with self.changed:
            return [event.key for event in self.events if isinstance(event, Deleted)]

    def names(self, kind: str) -> set[str]:
        with self.changed:
            return {key.name for key in self.state if key.kind == kind}


class Told:
    """A Listener for a watch that runs without a source."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def changed(self, told: wire.Told) -> None:
        self._consumer.emit(told)

    def listed(self, kind: str) -> None: ...
    def works(self, kind: str, *, stream: bool) -> None: ...
    def failed(
        self, kind: str, operation: str, error: ApiError, *, row: int, stream: bool
    ) -> None: ...
    def doubted(self, kind: str, *, known: int, listed: int) -> None: ...


def truth(server: FakeApiServer) -> dict[ObjectKey, ApiObject | Refused]:
    """What a source should know of a server: all that passes the selectors and is ours."""
    known: dict[ObjectKey, ApiObject | Refused] = {}
    with server.changed:
        for resource in resources(NODE):
            match = selector(resource.selectors)
            for stored in server.stores[RESOURCES[resource.kind]].objects.values():
                told = wire.decode_json(resource.kind, stored.data)
                if match(stored.obj) and isinstance(told, Upserted):
                    known[told.obj.key] = told.obj
                elif match(stored.obj) and isinstance(told, Refused):
                    known[told.key] = told
    return known
