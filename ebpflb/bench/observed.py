# SPDX-License-Identifier: Apache-2.0
"""The agent with a stopwatch: its own source, loop, planner and datapath, put together here.

The agent reads its manifests, or what the API server sends, by itself, so nobody outside can see
when it has the bytes of a change in hand. Here the clock of the one source, which it asks right
behind every read, and the metrics of the other, which it tells of every read, take that moment
down, and the end of each sync is printed with it, a line of JSON each:

    {"read_ns": …, "told_ns": …, "planned_ns": …, "synced_ns": …, "writes": 12}

CLOCK_MONOTONIC: the change's bytes in hand, the event on the loop's queue, plan made, maps written.
All that is measured is the product's own code, in its own threads; this file must not know what is
done with the times. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from ebpflb import logs
from ebpflb.agent import Loop
from ebpflb.config import AUDIT_PERIOD_S, SYNC_PERIOD_S
from ebpflb.datapath.base import Datapath, Difference, SyncReport
from ebpflb.datapath.ebpf.datapath import start
from ebpflb.datapath.ebpf.options import EbpfOptions
from ebpflb.health import Health
from ebpflb.metrics import Metrics
from ebpflb.model import Event, Plan, ServicePortName
from ebpflb.planner.options import PlannerOptions
from ebpflb.planner.plan import Planner
from ebpflb.sources.cluster import ApiSource
from ebpflb.sources.manifests import ManifestSource
from ebpflb.sources.transport import Access, Credentials
from ebpflb.sources.watch import Operation, WatchMetrics


class _Times:
    """When what happened last; the loop's thread reads what the source's thread wrote before."""

    def __init__(self) -> None:
        self._asked_ns = 0
        self._read_ns = 0
        self._told_ns = 0

    def clock_s(self) -> float:
        """The source asks when it has looked at the folder, and when it has read a file."""
        self.read()
        return time.time()

    def read(self) -> None:
        """Bytes are in hand."""
        self._asked_ns = time.monotonic_ns()

    def told(self) -> None:
        self._read_ns = self._asked_ns
        self._told_ns = time.monotonic_ns()

    def say(self, planned_ns: int, report: SyncReport) -> None:
        line = {
            "read_ns": self._read_ns,
            "told_ns": self._told_ns,
            "planned_ns": planned_ns,
            "synced_ns": time.monotonic_ns(),
            "writes": report.writes,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class _Counted:
    """The API source's counts as the agent has them; a receipt is a time, too."""

    def __init__(self, metrics: WatchMetrics, times: _Times) -> None:
        self._metrics = metrics
        self._times = times

    def received(self, kind: str, size: int) -> None:
        self._times.read()
        self._metrics.received(kind, size)

    def heard(self, kind: str) -> None:
        self._metrics.heard(kind)

    def event(self, kind: str) -> None:
        self._metrics.event(kind)

    def listed(self, kind: str, *, again: bool, seconds: float) -> None:
        self._metrics.listed(kind, again=again, seconds=seconds)

    def request_failed(self, kind: str, operation: Operation, reason: str) -> None:
        self._metrics.request_failed(kind, operation, reason)


class _Timed:
    """A datapath whose syncs are told."""

    def __init__(self, datapath: Datapath, times: _Times) -> None:
        self.mode = datapath.mode
        self._datapath = datapath
        self._times = times

    def sync(self, plan: Plan, changed: Collection[ServicePortName] | None) -> SyncReport:
        planned_ns = time.monotonic_ns()
        report = self._datapath.sync(plan, changed)
        self._times.say(planned_ns, report)
        return report

    def audit(self, plan: Plan) -> list[Difference]:
        return self._datapath.audit(plan)

    def close(self) -> None:
        self._datapath.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="ebpflb.bench.observed")
    source_flags = parser.add_mutually_exclusive_group(required=True)
    source_flags.add_argument("--manifests", type=Path)
    source_flags.add_argument("--master")
    for flag in ("--pin-path", "--cgroup"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--node-name", required=True)
    told = parser.parse_args(arguments)
    logs.configure(json=True, verbose=False)
    times = _Times()
    metrics = Metrics()
    loop = Loop(
        Planner(PlannerOptions(node_name=told.node_name)),
        metrics,
        Health(SYNC_PERIOD_S),
        node_name=told.node_name,
        audit_period_s=AUDIT_PERIOD_S,
    )

    def emit(event: Event) -> None:
        times.told()
        loop.put(event)

    def end_with_input() -> None:
        sys.stdin.read()
        loop.stop()

    source: ManifestSource | ApiSource
    if told.manifests is not None:
        source = ManifestSource(told.manifests, emit, _ignore, clock_s=times.clock_s)
    else:
        source = ApiSource(
            Credentials(lambda: Access(server=told.master)),
            emit,
            _ignore,
            node_name=told.node_name,
            metrics=_Counted(metrics.api, times),
        )
    options = EbpfOptions(pin_path=told.pin_path, cgroup=told.cgroup, devices=(), pod_devices=())
    with start(options, loop.wake) as datapath:
        threading.Thread(target=end_with_input, daemon=True).start()
        source.start()
        try:
            loop.run(_Timed(datapath, times))
        finally:
            source.stop()
    return 0


def _ignore(event: str, /, **fields: object) -> None:
    """Take a notice; the objects are ours, and there is nothing to say about them."""


if __name__ == "__main__":
    sys.exit(main())
