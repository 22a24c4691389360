# SPDX-License-Identifier: Apache-2.0
"""What came out: the gates with their limits, the figures beside them, and whether all may pass.

The members of these structs are the JSON keys that ``ebpflb bench -o json`` promises
(docs/benchmarks.md). This file must not know how anything was measured or is printed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from ebpflb.bench.connects import MODES, Connects, ProgramCost
from ebpflb.bench.footprint import FLOWS, GROWING, Crash, Footprint, Restart
from ebpflb.bench.fromapi import FromApi
from ebpflb.bench.packets import MODES as PACKET_MODES
from ebpflb.bench.packets import Packets
from ebpflb.bench.propagation import Propagation

MIB: Final = 1 << 20

CONNECT_LIMIT: Final = 1.05
CHANGE_LIMIT_MS: Final = 20.0
MEMORY_LIMIT_MIB: Final = 96.0
MAPS_LIMIT_MIB: Final = 24.0
LISTS_LIMIT_S: Final = 3.0
LAG_LIMIT_MS: Final = 250.0
LOAD_LIMIT: Final = 100.0
BYTES_LIMIT: Final = 1.05
PACKET_CONNECT_LIMIT: Final = 1.15
PACKET_LIMIT_NS: Final = 150.0
OTHER_PACKET_LIMIT_NS: Final = 60.0
BULK_LIMIT: Final = 1.0 / 0.95


class Gate(msgspec.Struct, frozen=True):
    """One line: it passes where ``measured`` is at most ``limit``, both in ``unit``."""

    name: str
    title: str
    measured: float
    limit: float
    unit: str
    passed: bool


class Figure(msgspec.Struct, frozen=True):
    """Something measured that nothing is promised of."""

    name: str
    title: str
    measured: float
    unit: str


class Mode(msgspec.Struct, frozen=True):
    """One way to connect. ``p50`` to ``cycle`` are ratios to the direct mode it belongs to.

    ``cycle`` is the p50 of everything from socket() to close().
    """

    name: str
    title: str
    samples: int
    p50_us: float
    p99_us: float
    p50: float
    p99: float
    cycle: float


class Environment(msgspec.Struct, frozen=True):
    """Where it was measured.

    ``second_agent``: the flag that sets it apart. ``foreign_cpu``: the share of all CPUs that
    others' processes used while connects were timed, what a hypervisor took included.
    ``root_programs``: programs on the root of cgroup v2, which run for direct connects too.
    """

    kernel: str
    cpus: int
    cpu_model: str
    python: str
    bcc: str
    libbpf: str
    ebpflb: str
    second_agent: str
    foreign_cpu: float
    root_programs: int
    attempts: int
    seconds: float


class Report(msgspec.Struct, frozen=True):
    """``refused`` says why the run proves nothing, "" where it does."""

    passed: bool
    refused: str
    services: int
    endpoints: int
    gates: tuple[Gate, ...]
    modes: tuple[Mode, ...]
    figures: tuple[Figure, ...]
    environment: Environment


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All phases of a run."""

    connects: Connects
    costs: Mapping[str, ProgramCost]
    propagation: Propagation
    footprint: Footprint
    restart: Restart
    crash: Crash
    api: FromApi
    packets: Packets


def gates(run: Measured) -> tuple[Gate, ...]:
    latencies, foot = run.connects.latencies, run.footprint
    watched = (run.propagation, run.api.propagation, run.api.paced, run.api.fed)
    failed = run.connects.failed + run.crash.failed + sum(one.failed for one in watched)
    peak = max(foot.peak_with_audit, run.restart.peak) / MIB
    growing = sum(foot.maps[name] for name in GROWING) / MIB
    rows: tuple[tuple[str, str, float, float, str], ...] = (
        (
            "connect_random",
            "connect() to a random ClusterIP, p50 against direct",
            latencies["cluster_ip"].ratio,
            CONNECT_LIMIT,
            "x",
        ),
        (
            "connect_hot",
            "connect() to one ClusterIP, p50 against direct",
            latencies["cluster_ip_hot"].ratio,
            CONNECT_LIMIT,
            "x",
        ),
        ("failed_connects", "failed connects, all phases", failed, 0, "connects"),
        (
            "change_p99",
            "changed manifest in hand to first correct connect, p99",
            run.propagation.p99_ms,
            CHANGE_LIMIT_MS,
            "ms",
        ),
        (
            "connects_to_old",
            "connects to an old endpoint behind the first to a new one",
            sum(one.old_after for one in watched),
            0,
            "connects",
        ),
        (
            "agent_memory",
            "agent memory (VmRSS) after start and one audit",
            foot.rss / MIB,
            MEMORY_LIMIT_MIB,
            "MiB",
        ),
        (
            "agent_peak",
            "agent memory, peak (VmHWM) of start, audit, restart",
            peak,
            MEMORY_LIMIT_MIB,
            "MiB",
        ),
        ("growing_maps", "maps that grow with Services", growing, MAPS_LIMIT_MIB, "MiB"),
        ("restart_writes", "map writes of a restart, nothing changed", run.restart.writes, 0, ""),
        ("restart_maps", "maps whose bytes it changed", len(run.restart.changed), 0, ""),
        ("crash_writes", "map writes of a restart after SIGKILL", run.crash.writes, 0, ""),
        *_api_gates(run.api),
        *_packet_gates(run.packets),
    )
    return tuple(Gate(*row, passed=row[2] <= row[3]) for row in rows)


def _api_gates(api: FromApi) -> Iterator[tuple[str, str, float, float, str]]:
    yield (
        "api_change_p99",
        "event of a slice written to first correct connect, p99",
        api.propagation.p99_ms,
        CHANGE_LIMIT_MS,
        "ms",
    )
    yield (
        "api_cold_start",
        "lists of the API server asked for until all is programmed",
        api.start.lists_s,
        LISTS_LIMIT_S,
        "s",
    )
    yield (
        "api_memory",
        "agent memory (VmRSS) from the API server, as above",
        api.start.rss / MIB,
        MEMORY_LIMIT_MIB,
        "MiB",
    )
    yield (
        "api_peak",
        "agent memory, peak (VmHWM) of that start and audit",
        api.start.peak / MIB,
        MEMORY_LIMIT_MIB,
        "MiB",
    )
    yield (
        "event_lag",
        "1,000 events a second: behind the last one",
        api.fed.lag_ms,
        LAG_LIMIT_MS,
        "ms",
    )
    yield (
        "event_load",
        "… CPU time of the agent, of one CPU",
        api.fed.load * 100,
        LOAD_LIMIT,
        "%",
    )
    yield (
        "event_bytes",
        "… bytes read, against those of the events",
        api.fed.received / api.fed.sent,
        BYTES_LIMIT,
        "x",
    )


def _packet_gates(packets: Packets) -> Iterator[tuple[str, str, float, float, str]]:
    established = ("forward4", "reverse4", "forward6", "reverse6")
    yield (
        "packets_connect",
        "connect() through tc, p50 against direct with conntrack",
        packets.latencies["packets"].ratio,
        PACKET_CONNECT_LIMIT,
        "x",
    )
    yield (
        "packet_established",
        "a packet of an open flow, the dearest way and family",
        max(packets.costs[name].net_ns for name in established),
        PACKET_LIMIT_NS,
        "ns",
    )
    yield (
        "packet_other",
        "a packet that is none of ours",
        max(packets.costs[name].net_ns for name in ("other", "other_reply")),
        OTHER_PACKET_LIMIT_NS,
        "ns",
    )
    yield (
        "packets_failed",
        "failed connects through tc, source ports re-used",
        packets.failed + packets.reused_failed + packets.unanswered,
        0,
        "connects",
    )
    yield "packets_wrong", "connects through tc that somebody else answered", packets.wrong, 0, ""
    yield (
        "bulk",
        "a bulk transfer without us, against one through tc",
        1 / packets.bulk,
        BULK_LIMIT,
        "x",
    )


_MODE_TITLES: Final = {
    "direct": "direct: random endpoints",
    "direct_again": "the same again (A/A)",
    "hooks_no_service": "the same where the hooks run",
    "cluster_ip": "random ClusterIPs",
    "cluster_ip_other": "random ClusterIPs, second agent",
    "direct_hot": "direct: one Service's endpoints",
    "direct_hot_again": "the same again (A/A)",
    "cluster_ip_hot": "one ClusterIP",
    "cluster_ip_hot_other": "one ClusterIP, second agent",
}


_PACKET_MODE_TITLES: Final = {
    "tracked": "direct, with conntrack: random endpoints",
    "tracked_again": "the same again (A/A)",
    "bare": "the same without conntrack",
    "packets_no_service": "the same past the programs at tc",
    "packets": "random ClusterIPs through tc",
}


def packet_modes(packets: Packets) -> tuple[Mode, ...]:
    """Ratios are to ``tracked``; there is no ``cycle`` (0)."""
    return tuple(
        Mode(
            name=name,
            title=_PACKET_MODE_TITLES[name],
            samples=one.samples,
            p50_us=one.p50_us,
            p99_us=one.p99_us,
            p50=one.ratio,
            p99=one.ratio_p99,
            cycle=one.cycle,
        )
        for name, one in ((name, packets.latencies[name]) for name in PACKET_MODES)
    )


def modes(connects: Connects) -> tuple[Mode, ...]:
    return tuple(
        Mode(
            name=name,
            title=_MODE_TITLES[name],
            samples=one.samples,
            p50_us=one.p50_us,
            p99_us=one.p99_us,
            p50=one.ratio,
            p99=one.ratio_p99,
            cycle=one.cycle,
        )
        for name, one in ((name, connects.latencies[name]) for name in MODES)
    )


def figures(run: Measured) -> tuple[Figure, ...]:
    rows = (
        *_cost_rows(run),
        *_change_rows(run),
        *_agent_rows(run),
        *_api_rows(run.api),
        *_packet_rows(run.packets),
    )
    return tuple(Figure(*row) for row in rows)


_Row = tuple[str, str, float, str]


def _cost_rows(run: Measured) -> Iterator[_Row]:
    for name, cost in run.costs.items():
        yield f"program_{name}", f"connect4 program, counting included: {cost.what}", cost.ns, "ns"


def _change_rows(run: Measured) -> Iterator[_Row]:
    change = run.propagation
    yield "change_p50", "changed manifest to first correct connect, p50", change.p50_ms, "ms"
    yield "change_max", "… the slowest", change.max_ms, "ms"
    yield "change_decode", "… of it bytes to events, p50", change.decode_ms, "ms"
    yield "change_plan", "… of it events to plan, p50", change.plan_ms, "ms"
    yield "change_write", "… of it plan to maps, p50", change.write_ms, "ms"
    yield "change_file", "the largest changed file", change.change_bytes / 1024, "KiB"
    yield "changes", "changes measured", change.changes, ""
    yield "change_foreign_cpu", "others' share of the CPUs meanwhile", change.foreign_cpu * 100, "%"


def _agent_rows(run: Measured) -> Iterator[_Row]:
    foot = run.footprint
    yield "cold_start", "cold start until synced, compiling included", foot.start_s, "s"
    yield "cold_sync", "… of it plan to maps, and attaching", foot.first_sync_ms, "ms"
    yield "cold_writes", "… map writes", foot.first_sync_writes, ""
    yield "restart", "restart until synced", run.restart.start_s, "s"
    yield "crash_connects", "connects while the agent was killed and came back", run.crash.dials, ""
    yield "agent_pss", "agent memory (PSS) after start and one audit", foot.pss / MIB, "MiB"
    yield "agent_mapped", "… of VmRSS, maps that it has mapped", foot.mapped / MIB, "MiB"
    yield "agent_peak_start", "agent memory, peak of the cold start", foot.peak / MIB, "MiB"
    for name in (*GROWING, *FLOWS):
        yield f"map_{name}", f"map {name}", foot.maps[name] / MIB, "MiB"
    flows = sum(foot.maps[name] for name in FLOWS) / MIB
    yield "flow_maps", "maps that grow with traffic", flows, "MiB"


def _api_rows(api: FromApi) -> Iterator[_Row]:
    change, start = api.propagation, api.start
    yield "api_change_p50", "event written to first correct connect, p50", change.p50_ms, "ms"
    yield "api_change_max", "… the slowest", change.max_ms, "ms"
    yield "api_change_receive", "… of it written to read, p50", change.receive_ms, "ms"
    yield "api_change_decode", "… of it bytes to events, p50", change.decode_ms, "ms"
    yield "api_change_plan", "… of it events to plan, p50", change.plan_ms, "ms"
    yield "api_change_write", "… of it plan to maps, p50", change.write_ms, "ms"
    yield "api_change_event", "the largest event", change.change_bytes / 1024, "KiB"
    yield "api_changes", "changes measured", change.changes, ""
    foreign_cpu = change.foreign_cpu * 100
    yield "api_change_foreign_cpu", "others' share of the CPUs meanwhile", foreign_cpu, "%"
    yield "event_cpu", "CPU time an event, one by one", api.paced.cpu_us, "µs"
    yield "event_cpu_fed", "… at 1,000 a second", api.fed.cpu_us, "µs"
    yield "event_lag_paced", "behind the last of those that came one by one", api.paced.lag_ms, "ms"
    yield "event_writes", "map writes an event", api.fed.writes / api.fed.events, ""
    yield "events", "events fed", api.paced.events + api.fed.events, ""
    yield "api_start", "cold start from the API server until synced", start.start_s, "s"
    yield "api_start_cpu", "… CPU time of the agent", start.cpu_s, "s"
    yield (
        "api_restart_writes",
        "map writes of a restart with it, nothing changed",
        (api.restart_writes),
        "",
    )
    yield (
        "api_memory_start",
        "agent memory (VmRSS) before the audit",
        start.rss_at_start / MIB,
        ("MiB"),
    )
    yield "api_peak_start", "… peak (VmHWM)", start.peak_at_start / MIB, "MiB"
    yield (
        "api_memory_fed",
        "… (VmRSS) of the restarted agent behind all events",
        api.rss / MIB,
        ("MiB"),
    )
    yield "api_peak_fed", "… peak (VmHWM)", api.peak / MIB, "MiB"


_PACKET_TITLES: Final = {
    "other": "a packet that is none of ours, received",
    "other_reply": "… sent",
    "forward4": "a packet of an open flow to a frontend, IPv4",
    "reverse4": "… from a backend, IPv4",
    "forward6": "… to a frontend, IPv6",
    "reverse6": "… from a backend, IPv6",
}


def _packet_rows(packets: Packets) -> Iterator[_Row]:
    for name, cost in packets.costs.items():
        title = f"test run, less an empty program's: {_PACKET_TITLES[name]}"
        yield f"packet_{name}_ns", title, cost.net_ns, "ns"
    yield "packets_reused", "connects through tc from 64 source ports", packets.reused, ""
    yield "packets_answered", "… that were asked whom they reached", packets.answered, ""
    yield "bulk_speed", "a bulk transfer through tc", packets.bulk_gbit_s, "Gbit/s"
    without = packets.latencies["packets"].ratio / packets.latencies["bare"].ratio
    yield "packets_connect_bare", "connect() through tc against direct, no conntrack", without, "x"
