# SPDX-License-Identifier: Apache-2.0
"""The agent with the API server in place of manifests: its start, its memory, what events cost.

The agent is the real one, a process of its own; the server is the benchmark's. How fast an agent
follows is seen from outside: events come in one order, so when a client of the Service that the
last one is about reaches its new endpoints, all before it are in the maps.
"""

from __future__ import annotations

import os
import random
from typing import Final, NamedTuple

from ebpflb.bench.apiserver import Command
from ebpflb.bench.bed import START_S, Agent, ApiServer, Bed, client_cgroup
from ebpflb.bench.propagation import Propagation, watch, watched
from ebpflb.bench.workload import Side, other

_AUDIT_S: Final = 2
_RECEIVED: Final = 'ebpflb_api_received_bytes_total{resource="EndpointSlice"}'


class ApiStart(NamedTuple):
    """Bytes of memory. ``lists_s``: from the first list's request until all was programmed.

    So it has in it that the server answers, and that the programs are attached. ``cpu_s``: of the
    agent since it began to run, the compiler not counted. ``rss`` and ``peak``: after an audit.
    """

    start_s: float
    lists_s: float
    cpu_s: float
    rss: int
    peak: int
    rss_at_start: int
    peak_at_start: int


class Feed(NamedTuple):
    """What a stream of events cost, one CPU being all that the agent had.

    ``lag_ms``: from when the last event was due until a connect followed it. ``load``: the agent's
    CPU time over the time until then. ``received``: bytes read, ``sent``: those of the events.
    """

    events: int
    seconds: float
    lag_ms: float
    cpu_us: float
    load: float
    received: int
    sent: int
    writes: int
    dials: int
    failed: int
    old_after: int


class FromApi(NamedTuple):
    """All of it. ``rss``: the agent's memory behind the feeds, bytes."""

    start: ApiStart
    restart_writes: int
    paced: Feed
    fed: Feed
    rss: int
    peak: int
    propagation: Propagation


def cold_start(bed: Bed, server: ApiServer) -> ApiStart:
    """Start the agent on an empty pin folder, let it audit once, end it."""
    agent = bed.api_agent(server, "--audit-period", str(_AUDIT_S))
    asked_ns = server.wait_for("list")
    start_s, _ = agent.synced()
    cpu_s = agent.cpu_s()
    at_start = agent.status()
    agent.wait_until(lambda: agent.metric("ebpflb_audits_total") >= 1, "it has not audited")
    later = agent.status()
    agent.end()
    return ApiStart(
        start_s=start_s,
        lists_s=agent.started_s + start_s - asked_ns / 1e9,
        cpu_s=cpu_s,
        rss=later["VmRSS"],
        peak=later["VmHWM"],
        rss_at_start=at_start["VmRSS"],
        peak_at_start=at_start["VmHWM"],
    )


def restart(bed: Bed, server: ApiServer) -> tuple[Agent, int]:
    """Start the agent again, as it is by default; it watches, and how much it has written."""
    agent = bed.api_agent(server)
    agent.synced()
    server.wait_for("watch")
    return agent, int(agent.metric("ebpflb_map_writes_total"))


def feed(
    bed: Bed,
    server: ApiServer,
    agent: Agent,
    *,
    events: int,
    rate: float,
    sides: dict[int, Side],
    seed: int,
) -> Feed:
    """Feed so many events at this rate a second; each but the last is about another Service."""
    agent.pin(bed.cpus.client)
    client = bed.client(f"feed {rate:g}", client_cgroup(server.node))
    os.sched_setaffinity(client.process.pid, {bed.cpus.server})
    quiet = bed.workload.quiet
    random.Random(seed).shuffle(quiet)  # noqa: S311 - an order, no secret
    services = tuple(quiet[number % len(quiet)] for number in range(events - 1))
    last = bed.workload.watched[0]
    old = sides.get(last, "A")
    sides[last] = other(old)
    received, writes = agent.metric(_RECEIVED), agent.metric("ebpflb_map_writes_total")
    watch(bed, client, last, old)
    cpu_s = agent.cpu_s()
    server.begin(Command(do="feed", services=services, rate=rate, last=last, side=sides[last]))
    sent = server.sent(START_S + events / rate)
    seen = watched(client, last)
    cpu_s = agent.cpu_s() - cpu_s
    seconds = (seen.first_ns - sent.began_ns) / 1e9
    client.end()
    bed.clients.remove(client)
    return Feed(
        events=sent.events,
        seconds=seconds,
        lag_ms=(seen.first_ns - sent.due_ns) / 1e6,
        cpu_us=cpu_s / sent.events * 1e6,
        load=cpu_s / seconds,
        received=int(agent.metric(_RECEIVED) - received),
        sent=sent.bytes,
        writes=int(agent.metric("ebpflb_map_writes_total") - writes),
        dials=seen.dials,
        failed=seen.failed,
        old_after=seen.old_after,
    )
