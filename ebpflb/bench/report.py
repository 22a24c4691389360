# SPDX-License-Identifier: Apache-2.0
"""What came out: the gates with their limits, the figures beside them, and whether all may pass.

The members of these structs are the JSON keys that ``ebpflb bench -o json`` promises
(docs/benchmarks.md). This file must not know how anything was measured or is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from ebpflb.bench.connects import Connects, ProgramCost
from ebpflb.bench.footprint import FLOWS, GROWING, Crash, Footprint, Restart
from ebpflb.bench.propagation import Propagation

MIB: Final = 1 << 20


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


class Environment(msgspec.Struct, frozen=True):
    """Where it was measured. ``foreign_cpu``: the share of all CPUs that others used meanwhile."""

    kernel: str
    cpus: int
    cpu_model: str
    python: str
    bcc: str
    libbpf: str
    ebpflb: str
    foreign_cpu: float
    other_root_programs: int
    seconds: float


class Report(msgspec.Struct, frozen=True):
    """``refused`` says why the run proves nothing, "" where it does."""

    services: int
    endpoints: int
    samples: int
    gates: tuple[Gate, ...]
    figures: tuple[Figure, ...]
    environment: Environment
    refused: str

    @property
    def passed(self) -> bool:
        return not self.refused and all(gate.passed for gate in self.gates)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """All phases of a run."""

    connects: Connects
    costs: Mapping[str, ProgramCost]
    propagation: Propagation
    footprint: Footprint
    restart: Restart
    crash: Crash


def gates(run: Measured) -> tuple[Gate, ...]:
    latencies = run.connects.latencies
    failed = run.connects.failed + run.crash.failed + run.propagation.failed
    growing = sum(run.footprint.maps[name] for name in GROWING)
    peak = max(run.footprint.peak_with_audit, run.restart.peak)
    return (
        _gate("connect_random", "connect() to a random ClusterIP, p50 against direct",
              latencies["cluster_ip"].ratio, 1.05, "x"),
        _gate("connect_hot", "connect() to one ClusterIP, p50 against direct",
              latencies["cluster_ip_hot"].ratio, 1.05, "x"),
        _gate("failed_connects", "failed connects, all phases", failed, 0, "connects"),
        _gate("change_p99", "changed manifest in hand to first correct connect, p99",
              run.propagation.p99_ms, 20, "ms"),
        _gate("connects_to_old", "connects to an old endpoint behind the first to a new one",
              run.propagation.old_after, 0, "connects"),
        _gate("agent_memory", "agent memory (VmRSS) after start and one audit",
              run.footprint.rss / MIB, 96, "MiB"),
        _gate("agent_peak", "agent memory, peak (VmHWM), cold start and restart",
              peak / MIB, 96, "MiB"),
        _gate("growing_maps", "maps that grow with Services", growing / MIB, 24, "MiB"),
        _gate("restart_writes", "map writes of a restart with nothing changed",
              run.restart.writes, 0, "writes"),
        _gate("restart_changed", "maps whose bytes a restart changed",
              len(run.restart.changed), 0, "maps"),
        _gate("crash_writes", "map writes of a restart after SIGKILL", 
              run.crash.writes, 0, "writes"),
    )  # fmt: skip


def _gate(name: str, title: str, measured: float, limit: float, unit: str) -> Gate:
    return Gate(name, title, measured, limit, unit, measured <= limit)


_MODE_TITLES: Final = {
    "direct": "direct, random endpoint",
    "direct_again": "the same again (A/A)",
    "hooks_no_service": "the same where the hooks run",
    "cluster_ip": "random ClusterIP",
    "cluster_ip_no_peer_name": "random ClusterIP, --no-tcp-peer-name",
    "direct_hot": "direct, one Service's endpoints",
    "direct_hot_again": "the same again (A/A)",
    "cluster_ip_hot": "one ClusterIP",
    "cluster_ip_hot_no_peer_name": "one ClusterIP, --no-tcp-peer-name",
}


def figures(run: Measured) -> tuple[Figure, ...]:
    found: list[Figure] = []

    def add(name: str, title: str, measured: float, unit: str) -> None:
        found.append(Figure(name, title, measured, unit))

    for mode, latency in run.connects.latencies.items():
        title = _MODE_TITLES[mode]
        add(f"{mode}_p50", f"connect() p50: {title}", latency.p50_us, "µs")
        add(f"{mode}_ratio", f"p50 against direct: {title}", latency.ratio, "x")
        add(f"{mode}_cycle", f"socket() to close(), p50 against direct: {title}",
            latency.cycle, "x")  # fmt: skip
        add(f"{mode}_p99_ratio", f"p99 against direct: {title}", latency.ratio_p99, "x")
    for name, cost in run.costs.items():
        add(f"program_{name}", f"connect4 program, counting included: {name}", cost.ns, "ns")
    add(
        "change_p50", "changed manifest to first correct connect, p50", run.propagation.p50_ms, "ms"
    )
    add("change_max", "… slowest", run.propagation.max_ms, "ms")
    add("change_decode", "… of it bytes to events, p50", run.propagation.decode_ms, "ms")
    add("change_plan", "… of it events to plan, p50", run.propagation.plan_ms, "ms")
    add("change_write", "… of it plan to maps, p50", run.propagation.write_ms, "ms")
    add("change_file", "bytes of the changed file", run.propagation.file_bytes, "bytes")
    add("changes", "changes measured", run.propagation.changes, "changes")
    add("cold_start", "cold start, compiling included", run.footprint.start_s, "s")
    add("cold_sync", "… of it plan to maps, attaching included", run.footprint.first_sync_ms, "ms")
    add("cold_writes", "map writes of the cold start", run.footprint.first_sync_writes, "writes")
    add("restart", "restart until synced", run.restart.start_s, "s")
    add("crash_connects", "connects while the agent was killed and came back", run.crash.dials,
        "connects")  # fmt: skip
    add("agent_pss", "agent memory (PSS) after start and one audit", run.footprint.pss / MIB, "MiB")
    add("agent_peak_start", "agent memory, peak of the cold start", run.footprint.peak / MIB, "MiB")
    for name in (*GROWING, *FLOWS):
        add(f"map_{name}", f"map {name}", run.footprint.maps[name] / MIB, "MiB")
    add("flow_maps", "maps that grow with traffic", sum(run.footprint.maps[n] for n in FLOWS) / MIB,
        "MiB")  # fmt: skip
    return tuple(found)
