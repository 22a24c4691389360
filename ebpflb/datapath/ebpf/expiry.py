# SPDX-License-Identifier: Apache-2.0
"""Flows that are over are taken out of the tables, so that the living have the room.

A packet ends a flow only when it comes for it; this is for those that no packet comes for. A thread
of its own looks through both tables, the sooner the fuller they are. Most entries live and cost a
comparison; of one that may be over both halves are asked for. Programs write at any time, so what
turns out to be in use when it is taken out is put back. The fragments' table and the affinity
records are left to their LRU. This file must not know why a packet makes or ends a flow (flows.py).
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from typing import Protocol as Interface

from ebpflb.datapath.ebpf import flows
from ebpflb.datapath.ebpf.flows import FLOW, FLOW_KEY, Reason, Times
from ebpflb.datapath.ebpf.maps import FLOW_TABLES, Map
from ebpflb.errors import DatapathError
from ebpflb.logs import Log
from ebpflb.model import Protocol

_log = Log("expiry")

MARGIN_NS: Final = 2 * 10**9
"""A flow goes so much later than a packet would find it over: use is noted four times a second."""

MAX_ENDED: Final = 8_192
"""Flows that one look takes out; those that are left are the next one's, soon."""

_GAIN: Final = 0.01
"""A look is worth its while where so many of the entries were over."""


HURRY_FILL: Final = 0.75
HURRIED_CLOSED_NS: Final = 10 * 10**9
"""In a table that is fuller than that, what both ends have closed goes after this time: the LRU
would take silent connections that are open, and keep what was closed just now."""


class _Pace(NamedTuple):
    """From this fill on: the bounds of a pause, and how much longer it is than the look."""

    fill: float
    least_s: float
    most_s: float
    share: int


_PACES: Final = (
    _Pace(0.9, 1.0, 10.0, 4),
    _Pace(0.75, 3.0, 20.0, 9),
    _Pace(0.5, 10.0, 40.0, 19),
    _Pace(0.0, 20.0, 60.0, 19),
)

_FULL: Final = 0.95
_NOT_FULL: Final = 0.8

# Where in an entry that is which is compared for every one of them.
_PROTOCOL: Final = FLOW_KEY.offsets["protocol"]
_SEEN: Final = FLOW.offsets["seen"]
_USED_WORD: Final = FLOW.offsets["used_ns"] // 8
_WORDS: Final = FLOW.size // 8
_KIND_WORD: Final = FLOW.offsets["kind"] // 4
_KIND: Final = FLOW.offsets["kind"] % 4
_SEEN_BESIDE: Final = _SEEN - 4 * _KIND_WORD
_BYTE: Final = 256
_CLOSING: Final = flows.SEEN_FIN | flows.SEEN_RST

STATES: Final = ("new", "open", "closing", "foreign")


class FlowTable(Interface):
    """A flow table, as far as it is needed here."""

    @property
    def name(self) -> str: ...
    @property
    def max_entries(self) -> int: ...
    def batches(self) -> Iterator[tuple[memoryview, memoryview]]: ...
    def lookup(self, key: bytes) -> bytes | None: ...
    def take(self, key: bytes) -> bytes | None:
        """Delete an entry and return it."""
        ...

    def insert(self, key: bytes, value: bytes) -> bool:
        """Write an entry where there is none."""
        ...


class Settings(Interface):
    def lookup(self, key: bytes, /) -> bytes | None: ...


class Look(NamedTuple):
    """What one look through the tables found and did.

    ``entries`` (halves) and ``ended`` (flows) are of before and during it. ``states`` count flows
    by the half of who began them: new (in `flows_new`), open, closing (he has finished), foreign.
    """

    entries: Mapping[str, int]
    ended: Mapping[Reason, int]
    states: Mapping[str, int]
    has_more: bool


class Counts(NamedTuple):
    """``states`` at the last look, ``expired`` (by reason) since the start."""

    states: Mapping[str, int]
    expired: Mapping[str, int]


# --- one look ------------------------------------------------------------------------------------


class Looker:
    """Looks through the tables, in one thread; any may set ``stop``, which ends the look."""

    def __init__(
        self,
        tables: Sequence[FlowTable],
        settings: Settings,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._tables = tables
        self._settings = settings
        self._clock = clock
        self._fill = {one.name: 0.0 for one in tables}
        self.stop = threading.Event()

    def look(self) -> Look:
        """Take out what is over. Raises DatapathError; what is left is the next look's."""
        times = Times.read(self._settings.lookup(bytes(4)) or bytes(flows.SETTINGS.size))
        entries: dict[str, int] = {}
        states: Counter[str] = Counter(dict.fromkeys(STATES, 0))
        ended: Counter[Reason] = Counter()
        for table in self._tables:
            entries[table.name] = 0
            judge = self._judge(table.name, times)
            for keys, values in table.batches():
                if self.stop.is_set():
                    break
                entries[table.name] += len(values) // FLOW.size
                _count(table.name, values, states)
                for at in judge.maybe_over(keys, values):
                    if self.stop.is_set() or ended.total() >= MAX_ENDED:
                        break
                    key = bytes(keys[at * FLOW_KEY.size : (at + 1) * FLOW_KEY.size])
                    reason = _end(table, key, judge)
                    if reason:
                        ended[reason] += 1
            self._fill[table.name] = entries[table.name] / table.max_entries
        return Look(entries, ended, states, has_more=ended.total() >= MAX_ENDED)

    def _judge(self, table: str, times: Times) -> _Judge:
        if self._fill[table] >= HURRY_FILL:
            times = times._replace(tcp_closed=HURRIED_CLOSED_NS)
        return _Judge(table, times, self._clock() - MARGIN_NS)


class _Judge:
    """Says which flows of a table were over at ``now_ns``."""

    def __init__(self, table: str, times: Times, now_ns: int) -> None:
        self._table = table
        self._times = times
        self._now_ns = now_ns
        # By what a half has seen and its protocol: the use before which it is worth a look.
        tcp = [self._limit(Protocol.TCP, seen) for seen in range(_BYTE)]
        self._limits = [[tcp[seen]] * _BYTE for seen in range(_BYTE)]
        for protocol in (Protocol.UDP, Protocol.SCTP):
            limit = self._limit(protocol, 0)
            for limits in self._limits:
                limits[protocol] = limit

    def _limit(self, protocol: int, seen: int) -> int:
        shortest_ns = flows.shortest_ns(protocol, self._table, seen, self._times)
        return max(0, self._now_ns - shortest_ns)

    def maybe_over(self, keys: memoryview, values: memoryview) -> list[int]:
        """The indexes of halves that are old. Every entry passes here: nothing is made of it."""
        limits = self._limits
        used = values.cast("Q")[_USED_WORD::_WORDS]
        seen = bytes(values[_SEEN :: FLOW.size])
        protocols = bytes(keys[_PROTOCOL :: FLOW_KEY.size])
        return [
            at
            for at, (used_ns, saw, protocol) in enumerate(zip(used, seen, protocols, strict=True))
            if used_ns <= limits[saw][protocol]
        ]

    def why_over(self, protocol: int, half: Any, other: Any | None) -> Reason | None:
        return flows.why_over(
            protocol, self._table, half, other, now_ns=self._now_ns, times=self._times
        )


def _count(table: str, values: memoryview, states: Counter[str]) -> None:
    for word, count in Counter(values.cast("I")[_KIND_WORD :: FLOW.size // 4]).items():
        raw = word.to_bytes(4, sys.byteorder)
        kind, seen = raw[_KIND], raw[_SEEN_BESIDE]
        if kind == flows.FOREIGN:
            states["foreign"] += count
        elif kind == flows.FORWARD and table == flows.NEW:
            states["new"] += count
        elif kind == flows.FORWARD:
            states["closing" if seen & _CLOSING else "open"] += count


def _end(table: FlowTable, key: bytes, judge: _Judge) -> Reason | None:
    """Take out the flow under ``key`` if it is over; its reason, None if it was left."""
    value = table.lookup(key)
    if value is None:
        return None
    ends: Any = FLOW_KEY.unpack(key)
    half: Any = FLOW.unpack(value)
    there = {key: value}
    other = None
    if half.kind != flows.FOREIGN:
        other_key = flows.other_key(ends, half)
        other_value = table.lookup(other_key)
        if other_value is not None:
            found = FLOW.unpack(other_value)
            if flows.is_other(ends, half, found):
                other, there[other_key] = found, other_value
    reason = judge.why_over(ends.protocol, half, other)
    if reason is None:
        return None
    # The reverse one goes first: a packet of the client's that comes in between finds its own, and
    # the program puts the other one back.
    reverse_first = list(there) if half.kind == flows.REVERSE else list(there)[::-1]
    return reason if _take(table, {key: there[key] for key in reverse_first}) else None


def _take(table: FlowTable, there: Mapping[bytes, bytes]) -> bool:
    """Take these halves out; where one is not as it was they all stay."""
    taken: list[tuple[bytes, bytes]] = []
    for key, expected in there.items():
        value = table.take(key)
        if value is None:
            continue
        taken.append((key, value))
        if value != expected:
            for one in taken:
                table.insert(*one)
            return False
    return bool(taken)


# --- when ----------------------------------------------------------------------------------------


def pause_s(before_s: float, *, fill: float, gain: float, took_s: float) -> float:
    """From the end of one look to the next.

    ``fill`` is that of the fuller table, ``gain`` the share of the entries that were over, 1 where
    there are more. ``before_s`` is the pause before this look, which took so much of a CPU. A look
    that finds little doubles the pause; none is so short that looks take more than a twentieth of a
    CPU, or a fifth while a table is full.
    """
    pace = next(one for one in _PACES if fill >= one.fill)
    rest_s = pace.share * took_s
    if gain >= 1:
        return rest_s
    wanted_s = pace.least_s if gain >= _GAIN else max(2 * before_s, pace.least_s)
    return max(min(wanted_s, pace.most_s), rest_s)


class Expiry:
    """Looks when it is time, or asked to; ``request`` never waits. ``close`` ends the thread."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        tables = [maps[name] for name in FLOW_TABLES]
        self._sizes = {one.name: one.max_entries for one in tables}
        self._looker = Looker(tables, maps["settings"])
        self._wake = threading.Event()
        self._last = Look(
            dict.fromkeys(self._sizes, 0), {}, dict.fromkeys(STATES, 0), has_more=False
        )
        self._expired = {reason.value: 0 for reason in Reason}
        self._full: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """The first look is at once."""
        self._thread = threading.Thread(target=self._run, name="expiry", daemon=True)
        self._thread.start()

    def request(self) -> None:
        """Look soon."""
        self._wake.set()

    def close(self) -> None:
        """Return when no look goes on any more."""
        self._looker.stop.set()
        self._wake.set()
        if self._thread:
            self._thread.join()

    def occupancy(self) -> dict[str, tuple[int, int]]:
        """(entries in use at the last look, entries in all) by table. Any thread may ask."""
        entries = self._last.entries
        return {name: (entries[name], size) for name, size in self._sizes.items()}

    def counts(self) -> Counts:
        """Any thread may ask."""
        return Counts(self._last.states, dict(self._expired))

    def _run(self) -> None:
        pause = 0.0
        while not self._looker.stop.is_set():
            self._wake.clear()
            started = time.thread_time()
            try:
                look = self._looker.look()
            except DatapathError as error:
                # The next look is another try; a thread less would be none.
                _log.error("flows that are over were not looked for", reason=str(error))
                pause = _PACES[-1].least_s
            else:
                pause = self._note(look, pause, time.thread_time() - started)
            if not self._looker.stop.is_set():
                self._wake.wait(pause)

    def _note(self, look: Look, before_s: float, took_s: float) -> float:
        """Remember what a look found; returns how long to wait for the next."""
        for reason, count in look.ended.items():
            self._expired[reason.value] += count
        if self._looker.stop.is_set():
            return 0.0  # it has not seen everything
        self._last = look
        self._warn()
        gain = 2 * sum(look.ended.values()) / max(sum(look.entries.values()), 1)
        return pause_s(
            before_s,
            fill=max(look.entries[name] / size for name, size in self._sizes.items()),
            gain=1.0 if look.has_more else min(gain, 0.99),
            took_s=took_s,
        )

    def _warn(self) -> None:
        """Once each time that a table becomes full: from then on flows make room for flows."""
        for name, (used, size) in self.occupancy().items():
            if used >= _FULL * size and name not in self._full:
                self._full.add(name)
                _log.warning(
                    "a table of flows is full; the oldest make room for the newest",
                    map=name,
                    entries=used,
                    hint=f"--map-size {name}=N",
                )
            elif used < _NOT_FULL * size:
                self._full.discard(name)
