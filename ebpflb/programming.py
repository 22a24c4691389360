# SPDX-License-Identifier: Apache-2.0
"""How long a change of endpoints takes until this node follows it (MET-06, MET-30).

The API server's side writes the time of the change into the slice; this remembers it until a sync
has put the slice into force. Pure: events and times in, durations out. It must not know what a
metric is, nor what a sync does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NamedTuple

from ebpflb.model import EndpointSlice, Family, ObjectKey, ServicePortName

BUCKETS_S: Final = (
    *(0.25, 0.5),
    *range(1, 60),
    *range(60, 120, 5),
    *range(120, 301, 30),
)
"""kube-proxy's buckets, in seconds: of its scalability objective, too coarse for us."""

FINE_BUCKETS_S: Final = tuple(0.001 * 2**k for k in range(15))
"""1 ms to 16 s."""

_MOST_TIMES: Final = 64
"""Times that one slice may wait with; while nothing is synced the newest ones are dropped."""


class Duration(NamedTuple):
    family: Family
    seconds: float


class _Waiting(NamedTuple):
    namespace: str
    service: str
    family: Family
    times_s: list[float]


class Programming:
    """What waits for a sync since when. All times are Unix times, as the slices' own."""

    def __init__(self, started_s: float) -> None:
        self._started_s = started_s
        self._waiting: dict[ObjectKey, _Waiting] = {}

    def changed(self, endpoints: EndpointSlice) -> None:
        """A slice came; what was triggered before the start is nothing that we can be late with."""
        if endpoints.triggered_s <= self._started_s:
            return
        waiting = self._waiting.get(endpoints.key)
        if waiting is None or waiting.service != endpoints.service:
            waiting = _Waiting(endpoints.namespace, endpoints.service, endpoints.family, [])
            self._waiting[endpoints.key] = waiting
        if len(waiting.times_s) < _MOST_TIMES:
            waiting.times_s.append(endpoints.triggered_s)

    def deleted(self, key: ObjectKey) -> None:
        """A slice went; its time is that of its last change, not that of its deletion."""
        self._waiting.pop(key, None)

    def synced(
        self, now_s: float, behind: Collection[ServicePortName] = ()
    ) -> tuple[Duration, ...]:
        """How long each change took that is in force now.

        ``behind`` are the service ports that this sync could not put into force; their slices wait
        on. A clock behind that of the API server's side makes 0, never less.
        """
        held = {(name.namespace, name.name, name.family) for name in behind}
        done = [
            key
            for key, waiting in self._waiting.items()
            if (waiting.namespace, waiting.service, waiting.family) not in held
        ]
        found: list[Duration] = []
        for key in done:
            waiting = self._waiting.pop(key)
            found += [Duration(waiting.family, max(0.0, now_s - t)) for t in waiting.times_s]
        return tuple(found)
