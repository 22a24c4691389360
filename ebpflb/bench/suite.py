# SPDX-License-Identifier: Apache-2.0
"""The benchmark from beginning to end: what is measured, in which order, at which size.

The order matters in two places: the connects are timed while the agents live, and the propagation
takes over the maps of an agent that has ended.
"""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from ebpflb import __version__
from ebpflb.bench import connects, footprint, fromapi, packets, propagation, report
from ebpflb.bench.bed import ANSWER_S, Bed, Say, prepared
from ebpflb.bench.fromapi import FromApi
from ebpflb.bench.numbers import GUARD_HIGH, GUARD_LOW
from ebpflb.bench.report import Environment, Measured, Report
from ebpflb.bench.workload import Side, Workload
from ebpflb.config import Config
from ebpflb.datapath.ebpf import libbpf
from ebpflb.datapath.ebpf.attach import HOOKS, cgroup2_root
from ebpflb.errors import DatapathError

SEED: Final = 20260101


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """``rounds`` batches of ``batch`` connects a mode are the samples of a mode.

    ``changes`` are followed from manifests, and as many from the API server; ``paced`` events come
    one by one, ``fed`` ones as fast as must be borne. ``reused`` connects through tc come from a
    few source ports, ``answered`` ones are asked whom they reached; ``test_runs``: packets a kind.
    """

    workload: Workload
    rounds: int
    batch: int
    attempts: int
    changes: int
    dials: int
    paced: int
    fed: int
    reused: int
    answered: int
    streams: int
    test_runs: int

    @property
    def samples(self) -> int:
        return self.rounds * self.batch


QUICK: Final = Sizes(
    # 100 Services and their slices a file: what people keep in one, and a change rewrites it all.
    workload=Workload(services=10_000, endpoints=10, files=100, backends=4, watched_services=20),
    rounds=50,
    batch=500,
    attempts=5,
    changes=120,
    dials=100_000,
    paced=2_000,
    fed=5_500,
    reused=1_000_000,
    answered=20_000,
    streams=15,
    test_runs=1_000_000,
)

PACED_RATE: Final = 400.0
"""Events a second that an agent takes one by one."""

FED_RATE: Final = 1_000.0
"""Events a second that must be borne: several times what the largest clusters have."""


def run(sizes: Sizes, say: Say, *, seed: int = SEED) -> Report:
    """Measure everything; ``say`` is told what is being done. Some minutes.

    Raises an EbpflbError where the machine lacks something, or the agent does not do its part.
    """
    began_s = time.monotonic()
    if os.geteuid():
        raise DatapathError(
            "run",
            "the benchmark",
            errno.EPERM,
            hint="it makes network namespaces, cgroups and BPF maps: run it as root",
            fatal=True,
        )
    sizes.workload.check()
    work = sizes.workload
    with prepared(work, seed) as bed:
        say(f"writing {work.services:,} Services x {work.endpoints} endpoints")
        size = bed.write_manifests()
        say(f"cold start of the agent on {size / report.MIB:.0f} MiB in {work.files} files")
        agent, start = footprint.cold_start(bed)
        say(f"synced after {start.start_s:.1f} s; restarting it with nothing changed")
        agent, again = footprint.restart(bed, agent)
        say(f"synced after {again.start_s:.1f} s; killing it while a client dials")
        agent, crash = footprint.crash(bed, agent, dials=sizes.dials, say=say)
        say(f"starting a second agent with {_second_flag()}")
        plain = bed.agent(bed.plain, _second_flag())
        plain.synced()
        say(f"{sizes.samples:,} connects in each of {len(connects.MODES)} modes")
        timed = connects.measure(
            bed,
            rounds=sizes.rounds,
            batch=sizes.batch,
            attempts=sizes.attempts,
            seed=seed,
            say=say,
        )
        connects.end_clients(bed)
        say("the programs' own time, as the kernel counts it")
        costs = connects.program_costs(bed)
        agent.end()
        plain.end()
        say(f"{sizes.changes} changed manifests, one after another")
        followed = propagation.measure(
            bed, propagation.Manifests(bed), changes=sizes.changes, sides={}, seed=seed, say=say
        )
        api = _from_api(bed, sizes, seed=seed, say=say)
        through_tc = packets.measure(
            bed,
            rounds=sizes.rounds,
            batch=sizes.batch,
            attempts=sizes.attempts,
            reused=sizes.reused,
            answered=sizes.answered,
            streams=sizes.streams,
            test_runs=sizes.test_runs,
            seed=seed,
            say=say,
        )
        environment = _environment(timed, time.monotonic() - began_s)
    say("done")
    measured = Measured(
        connects=timed,
        costs=costs,
        propagation=followed,
        footprint=start,
        restart=again,
        crash=crash,
        api=api,
        packets=through_tc,
    )
    refused = refusal(timed, through_tc)
    gates = report.gates(measured)
    return Report(
        passed=not refused and all(gate.passed for gate in gates),
        refused=refused,
        services=work.services,
        endpoints=work.endpoints,
        gates=gates,
        modes=(*report.modes(timed), *report.packet_modes(through_tc)),
        figures=report.figures(measured),
        environment=environment,
    )


def _from_api(bed: Bed, sizes: Sizes, *, seed: int, say: Say) -> FromApi:
    """On a node of its own, whose server has the same objects and whose maps are empty."""
    server = bed.api_server(bed.lab.node("api"))
    say("cold start of the agent from an API server")
    start = fromapi.cold_start(bed, server)
    say(f"listed and programmed within {start.lists_s:.1f} s; restarting it")
    agent, restart_writes = fromapi.restart(bed, server)
    sides: dict[int, Side] = {}
    feeds = []
    for events, rate in ((sizes.paced, PACED_RATE), (sizes.fed, FED_RATE)):
        say(f"{events:,} events, {rate:,.0f} a second")
        feeds.append(
            fromapi.feed(bed, server, agent, events=events, rate=rate, sides=sides, seed=seed)
        )
    after = agent.status()
    agent.end()
    say(f"{sizes.changes} changes by an event, one after another")
    followed = propagation.measure(
        bed, propagation.Events(server), changes=sizes.changes, sides=sides, seed=seed, say=say
    )
    return FromApi(
        start=start,
        restart_writes=restart_writes,
        paced=feeds[0],
        fed=feeds[1],
        rss=after["VmRSS"],
        peak=after["VmHWM"],
        propagation=followed,
    )


def refusal(timed: connects.Connects, through_tc: packets.Packets) -> str:
    """Why nothing of a run may be believed, "" where it may."""
    if timed.trusted and through_tc.trusted:
        return ""
    guards = [timed.latencies[name].ratio for name in ("direct_again", "direct_hot_again")]
    guards.append(through_tc.latencies["tracked_again"].ratio)
    ratios = ", ".join(f"{ratio:.3f}" for ratio in guards)
    attempts = max(timed.attempts, through_tc.attempts)
    return (
        f"direct against direct came out as {ratios} in the last of {attempts} attempts, "
        f"not within {GUARD_LOW} to {GUARD_HIGH}: this machine is too busy now "
        f"({timed.foreign_cpu:.0%} of its CPUs were used by others)"
    )


def _environment(timed: connects.Connects, seconds: float) -> Environment:
    return Environment(
        kernel=platform.release(),
        cpus=os.cpu_count() or 1,
        cpu_model=_cpu_model(),
        python=platform.python_version(),
        bcc=_bcc_version(),
        libbpf=_libbpf_version(),
        ebpflb=__version__,
        second_agent=_second_flag(),
        foreign_cpu=timed.foreign_cpu,
        root_programs=_root_programs(),
        attempts=timed.attempts,
        seconds=seconds,
    )


def _second_flag() -> str:
    """The first agent is as it comes; the second one does the other thing with peer names."""
    shown = next(one.default for one in structs.fields(Config) if one.name == "show_service_tcp")
    return "--no-tcp-peer-name" if shown else "--tcp-peer-name"


def _root_programs() -> int:
    """Programs on the root of cgroup v2 run for every mode, direct ones too."""
    fd = os.open(cgroup2_root(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        return sum(len(libbpf.cgroup_programs(fd, hook.attach_type)[0]) for hook in HOOKS)
    finally:
        os.close(fd)


def _bcc_version() -> str:
    """Asked of a child, as bcc brings a compiler into whoever imports it."""
    ran = subprocess.run(
        [sys.executable, "-c", "import bcc; print(bcc.__version__)"],
        check=False,
        capture_output=True,
        text=True,
        timeout=ANSWER_S,
    )
    return ran.stdout.strip() or "?"


def _libbpf_version() -> str:
    """The library in use tells its version by its file's name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, so, version = line.partition("/libbpf.so.")
        if so:
            return version
    return "?"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"model name", "CPU implementer"}:
            return value.strip()
    return platform.machine()
