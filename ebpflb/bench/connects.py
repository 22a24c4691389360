# SPDX-License-Identifier: Apache-2.0
"""How much longer a connect() to a ClusterIP takes than one to the endpoint itself.

Every mode is alive at the same time and measured in small batches, in shuffled rounds, so that
what the machine does meanwhile hits all of them alike. Two pairs of modes are the same thing
measured twice: where those come out differently (the A/A guard), nothing else may be believed.
"""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ebpflb.bench.bed import Bed, BenchError, Client, Say
from ebpflb.bench.numbers import in_guard, median, percentile
from ebpflb.datapath.ebpf import libbpf
from ebpflb.datapath.ebpf.attach import Attachment
from ebpflb.lab import Node

# Positions in Workload.lists.
_ENDPOINTS, _SERVICES, _HOT_ENDPOINTS, _HOT_SERVICE = range(4)
_WARM_UP: Final = 10
_STATS_CONNECTS: Final = 10_000


class Mode(NamedTuple):
    """``where``: which client, by its cgroup. ``base``: the mode it is compared with."""

    where: str
    destinations: int
    base: str


MODES: Final[Mapping[str, Mode]] = {
    "direct": Mode("bare", _ENDPOINTS, ""),
    "direct_again": Mode("bare-again", _ENDPOINTS, "direct"),
    "hooks_no_service": Mode("pod", _ENDPOINTS, "direct"),
    "cluster_ip": Mode("pod", _SERVICES, "direct"),
    "cluster_ip_other": Mode("plain", _SERVICES, "direct"),
    "direct_hot": Mode("bare", _HOT_ENDPOINTS, ""),
    "direct_hot_again": Mode("bare-again", _HOT_ENDPOINTS, "direct_hot"),
    "cluster_ip_hot": Mode("pod", _HOT_SERVICE, "direct_hot"),
    "cluster_ip_hot_other": Mode("plain", _HOT_SERVICE, "direct_hot"),
}
_GUARDS: Final = ("direct_again", "direct_hot_again")


class Latency(NamedTuple):
    """Microseconds of connect(), and ratios to the mode it is compared with (1 for a base).

    ``cycle`` is the ratio of everything from socket() to close().
    """

    samples: int
    p50_us: float
    p99_us: float
    ratio: float
    ratio_p99: float
    cycle: float


class Connects(NamedTuple):
    """``latencies`` by mode. ``trusted``: the guard held, after so many ``attempts``."""

    latencies: Mapping[str, Latency]
    trusted: bool
    attempts: int
    failed: int
    error: str
    foreign_cpu: float


class ProgramCost(NamedTuple):
    """Of one hook: what the kernel says that a run took, measuring included."""

    what: str
    runs: int
    ns: float


def measure(bed: Bed, *, rounds: int, batch: int, attempts: int, seed: int, say: Say) -> Connects:
    """Measure all modes; again, at most ``attempts`` times, while the guard does not hold."""
    clients = {
        "bare": bed.client("bare", bed.bare_cgroup),
        "bare-again": bed.client("bare again", bed.bare_cgroup),
        "pod": bed.client("pod", bed.pod_cgroup),
        "plain": bed.client("plain", bed.plain_cgroup),
    }
    rng = random.Random(seed)  # noqa: S311 - an order, no secret
    attempt = 0
    while True:
        attempt += 1
        found = _attempt(bed, clients, rounds=rounds, batch=batch, rng=rng)._replace(
            attempts=attempt
        )
        guards = ", ".join(f"{found.latencies[name].ratio:.3f}" for name in _GUARDS)
        if found.failed:
            say(f"{found.failed} connects failed: {found.error}")
        if found.trusted or found.failed or attempt >= attempts:
            say(f"direct against direct: {guards}")
            return found
        say(f"direct against direct: {guards}: not trusted, measuring again")


def _attempt(
    bed: Bed, clients: Mapping[str, Client], *, rounds: int, batch: int, rng: random.Random
) -> Connects:
    connect: dict[str, array[int]] = {name: array("I") for name in MODES}
    cycle: dict[str, array[int]] = {name: array("I") for name in MODES}
    failed, error = 0, ""
    before = bed.cpu_used()
    for _ in range(rounds):
        order = list(MODES)
        rng.shuffle(order)
        for name in order:
            mode = MODES[name]
            got = clients[mode.where].run(mode.destinations, batch + _WARM_UP)
            failed, error = failed + got.failed, error or got.error
            connect[name].extend(got.connect[_WARM_UP:])
            cycle[name].extend(got.cycle[_WARM_UP:])
    latencies = {
        name: latency(name, mode.base or name, connect, cycle) for name, mode in MODES.items()
    }
    return Connects(
        latencies=latencies,
        trusted=all(in_guard(latencies[name].ratio) for name in _GUARDS),
        attempts=1,
        failed=failed,
        error=error,
        foreign_cpu=bed.foreign_share(before),
    )


def latency(
    name: str, base: str, connect: Mapping[str, array[int]], cycle: Mapping[str, array[int]]
) -> Latency:
    """Of a mode against its ``base``, from the samples of both."""
    p50, p99 = median(connect[name]), percentile(connect[name], 0.99)
    return Latency(
        samples=len(connect[name]),
        p50_us=p50 / 1000,
        p99_us=p99 / 1000,
        ratio=p50 / median(connect[base]),
        ratio_p99=p99 / percentile(connect[base], 0.99),
        cycle=median(cycle[name]) / median(cycle[base]),
    )


# --- what the kernel says that the programs take -------------------------------------------------


def program_costs(bed: Bed) -> Mapping[str, ProgramCost]:
    """``run_time_ns / run_cnt`` of connect4, with the kernel's own counting, in a pass of its own.

    The counting itself costs 20 to 60 ns a run, which is in the figure.
    """
    found = {}
    for suffix, words, node, cgroup in (
        ("", "", bed.node, bed.pod_cgroup),
        ("_other", ", second agent", bed.plain, bed.plain_cgroup),
    ):
        client = bed.client(f"stats{suffix}", cgroup)
        for name, what, destinations in (
            ("no_service", "no Service", _ENDPOINTS),
            ("cluster_ip", "random ClusterIPs", _SERVICES),
            ("cluster_ip_hot", "one ClusterIP", _HOT_SERVICE),
        ):
            client.ask("stats on")
            time_before, runs_before = _run_time(node)
            client.run(destinations, _STATS_CONNECTS)
            time_ns, runs = _run_time(node)
            client.ask("stats off")
            spent, ran = time_ns - time_before, runs - runs_before
            found[f"{name}{suffix}"] = ProgramCost(what + words, ran, spent / max(ran, 1))
        client.end()
        bed.clients.remove(client)
    return found


def _run_time(node: Node) -> tuple[int, int]:
    """(nanoseconds, runs) of the program at connect4 so far, while they were counted."""
    hook = next(
        one for one in Attachment(node.pin_path, node.cgroup_root).look() if one.hook == "connect4"
    )
    fd = libbpf.prog_by_id(hook.prog_id)
    try:
        lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
    finally:
        os.close(fd)
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    if "run_time_ns" not in values:
        raise BenchError("this kernel does not count the time of BPF programs")
    return int(values["run_time_ns"]), int(values["run_cnt"])


def end_clients(bed: Bed) -> None:
    while bed.clients:
        bed.clients.pop().end()
