# SPDX-License-Identifier: Apache-2.0
"""From a changed manifest in the agent's hands to the first connect that follows it.

A client dials one Service without a pause worth the name; one of the manifest files is rewritten so
that every endpoint of that Service is another one. The clock starts when the agent has the file's
bytes (how long it takes to notice a file is a matter of its polling), and stops when the first
connect() to a new endpoint has returned. Which side answered, the backend itself says.
"""

from __future__ import annotations

import json
import random
import sys
import time
from ipaddress import IPv4Address
from typing import Any, Final, NamedTuple

from ebpflb.bench.bed import NODE_NAME, START_S, Bed, BenchError, Client, Say, Talker
from ebpflb.bench.numbers import median, percentile
from ebpflb.bench.workload import SERVICE_PORT, Side, evenly, other

_WATCH_S: Final = 60.0
_PHASE_S: Final = 240.0


class Propagation(NamedTuple):
    """Milliseconds, over ``changes`` changes.

    ``decode``, ``plan`` and ``write`` are medians of its parts inside the agent: bytes to events,
    events to plan, plan to maps. ``failed`` connects, and connects to an old endpoint behind the
    first to a new one, should both be 0. ``foreign_cpu``: others' share of the CPUs meanwhile.
    """

    changes: int
    file_bytes: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    decode_ms: float
    plan_ms: float
    write_ms: float
    dials: int
    failed: int
    old_after: int
    foreign_cpu: float


class _Change(NamedTuple):
    total_ns: int
    decode_ns: int
    plan_ns: int
    write_ns: int


def measure(bed: Bed, *, changes: int, seed: int, say: Say) -> Propagation:
    """Change one Service after another. The folder's other agents must have ended."""
    agent = _start(bed)
    before = bed.cpu_used()
    client = bed.client("watch", bed.pod_cgroup)
    rng = random.Random(seed)  # noqa: S311 - an order, no secret
    order = evenly(bed.workload.watched, changes)
    rng.shuffle(order)
    sides: dict[int, Side] = {}
    found: list[_Change] = []
    dials = failed = old_after = file_bytes = 0
    end_s = time.monotonic() + _PHASE_S
    for number, service in enumerate(order, start=1):
        if time.monotonic() > end_s:
            raise BenchError(f"only {number - 1} of {changes} changes within {_PHASE_S:g} s")
        old = sides.get(service, "A")
        sides[service] = other(old)
        file = bed.workload.file_of(service)
        data = bed.workload.manifest(file, sides)
        file_bytes = max(file_bytes, len(data))
        _watch(bed, client, service, old)
        bed.rewrite(file, data)
        seen = client.watched(_WATCH_S)
        if not seen.first_ns:
            raise BenchError(
                f"Service {service}: no connect reached a new backend within {_WATCH_S:g} s "
                f"({seen.dials} dialled, {seen.failed} failed)"
            )
        dials, failed = dials + seen.dials, failed + seen.failed
        old_after += seen.old_after
        found.append(_change(agent, seen.first_ns))
        if number % 40 == 0:
            say(f"{number} of {changes} changes")
    foreign_cpu = bed.foreign_share(before)
    client.end()
    bed.clients.remove(client)
    agent.end()
    total = [change.total_ns / 1e6 for change in found]
    return Propagation(
        changes=len(found),
        file_bytes=file_bytes,
        p50_ms=median(total),
        p99_ms=percentile(total, 0.99),
        max_ms=max(total),
        decode_ms=median([change.decode_ns / 1e6 for change in found]),
        plan_ms=median([change.plan_ns / 1e6 for change in found]),
        write_ms=median([change.write_ns / 1e6 for change in found]),
        dials=dials,
        failed=failed,
        old_after=old_after,
        foreign_cpu=foreign_cpu,
    )


def _start(bed: Bed) -> Talker:
    """The agent with a stopwatch, on the maps that the last agent left."""
    agent = bed.talker(
        "observed agent",
        bed.node,
        [
            *(sys.executable, "-m", "ebpflb.bench.observed", "--node-name", NODE_NAME),
            *("--manifests", str(bed.manifests), "--pin-path", str(bed.node.pin_path)),
            *("--cgroup", str(bed.node.cgroup_root)),
        ],
    )
    _next_sync(agent, START_S)
    return agent


def _watch(bed: Bed, client: Client, service: int, old: Side) -> None:
    frontend = bed.workload.frontend(service)
    client.watch(str(IPv4Address(frontend.address)), SERVICE_PORT, old, timeout_s=_WATCH_S)


def _next_sync(agent: Talker, timeout_s: float) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(agent.line(timeout_s))
    return said


def _change(agent: Talker, first_ns: int) -> _Change:
    """The sync that made the connect at ``first_ns`` possible: the first that wrote anything."""
    while True:
        sync = _next_sync(agent, _WATCH_S)
        if sync["writes"]:
            break
    if first_ns < sync["read_ns"]:
        raise BenchError("a connect followed a change before the agent had it in hand")
    return _Change(
        total_ns=first_ns - sync["read_ns"],
        decode_ns=sync["told_ns"] - sync["read_ns"],
        plan_ns=sync["planned_ns"] - sync["told_ns"],
        write_ns=sync["synced_ns"] - sync["planned_ns"],
    )
