# SPDX-License-Identifier: Apache-2.0
"""From a change in the agent's hands to the first connect that follows it.

A client dials one Service without a pause worth the name; every endpoint of that Service becomes
another one. The clock starts when the agent has the bytes that say so, and stops when the first
connect() to a new endpoint has returned. Which side answered, the backend itself says.

Of a manifest, the bytes are in hand when the agent has read the file; how long it takes to notice
one is a matter of its polling. Of an event they are as soon as the API server writes them.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import Any, Final, NamedTuple, Protocol

from ebpflb.bench.apiserver import Command
from ebpflb.bench.bed import (
    NODE_NAME,
    START_S,
    ApiServer,
    Bed,
    BenchError,
    Client,
    Say,
    Talker,
    Watched,
    client_cgroup,
)
from ebpflb.bench.numbers import median, percentile
from ebpflb.bench.workload import SERVICE_PORT, Side, evenly, other
from ebpflb.lab import Node

_WATCH_S: Final = 60.0
_PHASE_S: Final = 240.0


class Propagation(NamedTuple):
    """Milliseconds, over ``changes`` changes.

    ``receive`` to ``write`` are medians of its parts: written to read (events only), and inside the
    agent bytes to events, events to plan, plan to maps. ``change_bytes``: the most that one was.
    ``failed`` connects, and connects to an old endpoint behind the first to a new one, should both
    be 0. ``foreign_cpu``: others' share of the CPUs meanwhile.
    """

    changes: int
    change_bytes: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    receive_ms: float
    decode_ms: float
    plan_ms: float
    write_ms: float
    dials: int
    failed: int
    old_after: int
    foreign_cpu: float


class Written(NamedTuple):
    """A change on its way; ``at_ns``: when it began to be written, 0 where that does not count."""

    bytes: int
    at_ns: int


class Origin(Protocol):
    """Where the observed agent has the cluster's state from; ``source`` are its flags for that."""

    node: Node
    source: Sequence[str]

    def change(self, service: int, side: Side) -> Written:
        """Move all endpoints of a watched Service."""
        ...


class Manifests:
    """A change rewrites the file that the Service is in."""

    def __init__(self, bed: Bed) -> None:
        self.node = bed.node
        self.source: Sequence[str] = ("--manifests", str(bed.manifests))
        self._bed = bed
        self._sides: dict[int, Side] = {}

    def change(self, service: int, side: Side) -> Written:
        self._sides[service] = side
        file = self._bed.workload.file_of(service)
        data = self._bed.workload.manifest(file, self._sides)
        self._bed.rewrite(file, data)
        return Written(len(data), 0)


class Events:
    """A change is one event of the slice."""

    def __init__(self, server: ApiServer) -> None:
        self.node = server.node
        self.source: Sequence[str] = ("--master", server.url)
        self._server = server

    def change(self, service: int, side: Side) -> Written:
        self._server.begin(Command(do="feed", last=service, side=side))
        sent = self._server.sent()
        return Written(sent.bytes, sent.sent_ns)


class _Change(NamedTuple):
    total_ns: int
    receive_ns: int
    decode_ns: int
    plan_ns: int
    write_ns: int


def measure(
    bed: Bed, origin: Origin, *, changes: int, sides: dict[int, Side], seed: int, say: Say
) -> Propagation:
    """Change one Service after another; other agents on the origin's node must have ended.

    ``sides``: where the watched Services' endpoints are, kept up to date; A where it says nothing.
    """
    agent = _start(bed, origin)
    before = bed.cpu_used()
    client = bed.client("watch", client_cgroup(origin.node))
    rng = random.Random(seed)  # noqa: S311 - an order, no secret
    order = evenly(bed.workload.watched, changes)
    rng.shuffle(order)
    found: list[_Change] = []
    dials = failed = old_after = change_bytes = 0
    end_s = time.monotonic() + _PHASE_S
    for number, service in enumerate(order, start=1):
        if time.monotonic() > end_s:
            raise BenchError(f"only {number - 1} of {changes} changes within {_PHASE_S:g} s")
        old = sides.get(service, "A")
        sides[service] = other(old)
        watch(bed, client, service, old)
        written = origin.change(service, sides[service])
        seen = watched(client, service)
        change_bytes = max(change_bytes, written.bytes)
        dials, failed = dials + seen.dials, failed + seen.failed
        old_after += seen.old_after
        found.append(_change(agent, written.at_ns, seen.first_ns))
        if number % 40 == 0:
            say(f"{number} of {changes} changes")
    foreign_cpu = bed.foreign_share(before)
    client.end()
    bed.clients.remove(client)
    agent.end()
    total = [change.total_ns / 1e6 for change in found]
    return Propagation(
        changes=len(found),
        change_bytes=change_bytes,
        p50_ms=median(total),
        p99_ms=percentile(total, 0.99),
        max_ms=max(total),
        receive_ms=median([change.receive_ns / 1e6 for change in found]),
        decode_ms=median([change.decode_ns / 1e6 for change in found]),
        plan_ms=median([change.plan_ns / 1e6 for change in found]),
        write_ms=median([change.write_ns / 1e6 for change in found]),
        dials=dials,
        failed=failed,
        old_after=old_after,
        foreign_cpu=foreign_cpu,
    )


def watch(bed: Bed, client: Client, service: int, old: Side) -> None:
    """Let ``client`` dial a watched Service from now on; returns when ``old`` has answered."""
    frontend = bed.workload.frontend(service)
    client.watch(str(IPv4Address(frontend.address)), SERVICE_PORT, old, timeout_s=_WATCH_S)


def watched(client: Client, service: int) -> Watched:
    """What it saw. Raises BenchError where nothing changed."""
    seen = client.watched(_WATCH_S)
    if not seen.first_ns:
        raise BenchError(
            f"Service {service}: no connect reached a new backend within {_WATCH_S:g} s "
            f"({seen.dials} dialled, {seen.failed} failed)"
        )
    return seen


def _start(bed: Bed, origin: Origin) -> Talker:
    """The agent with a stopwatch, on the maps that the last agent left."""
    node = origin.node
    agent = bed.talker(
        f"observed agent {node.name}",
        node,
        [
            *(sys.executable, "-m", "ebpflb.bench.observed", "--node-name", NODE_NAME),
            *origin.source,
            *("--pin-path", str(node.pin_path), "--cgroup", str(node.cgroup_root)),
        ],
    )
    _next_sync(agent, START_S)
    return agent


def _next_sync(agent: Talker, timeout_s: float) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(agent.line(timeout_s))
    return said


def _change(agent: Talker, written_ns: int, first_ns: int) -> _Change:
    """The sync that made the connect at ``first_ns`` possible: the first that wrote anything."""
    while True:
        sync = _next_sync(agent, _WATCH_S)
        if sync["writes"]:
            break
    if first_ns < sync["read_ns"]:
        raise BenchError("a connect followed a change before the agent had it in hand")
    began_ns = written_ns or sync["read_ns"]
    return _Change(
        total_ns=first_ns - began_ns,
        receive_ns=sync["read_ns"] - began_ns,
        decode_ns=sync["told_ns"] - sync["read_ns"],
        plan_ns=sync["planned_ns"] - sync["told_ns"],
        write_ns=sync["synced_ns"] - sync["planned_ns"],
    )
