# SPDX-License-Identifier: Apache-2.0
"""The loop on a datapath that does as it is told: what is asked of it and when, and its health."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection

import pytest

from ebpflb import agent, events
from ebpflb.agent import RETRY_MIN_S, Loop
from ebpflb.datapath.base import Difference, SyncReport
from ebpflb.errors import DatapathError
from ebpflb.health import Health
from ebpflb.metrics import Metrics
from ebpflb.model import (
    Deleted,
    Family,
    LocalAddresses,
    Node,
    NodePorts,
    Plan,
    Refused,
    ServicePortName,
    Synced,
    Upserted,
    parse_address,
)
from ebpflb.nodelife import why_restart
from tests.builders import (
    NODE,
    at,
    endpoint_slice,
    new_planner,
    node,
    node_ip,
    pod_ip,
    port_name,
    service,
)
from tests.logs import capture_logs

SYNC_PERIOD_S = 30.0
AUDIT_PERIOD_S = 600.0
WEB = port_name()
LIMIT_S = 2 * SYNC_PERIOD_S
DONE = SyncReport(writes=1, failed={}, deferred=frozenset())
BROKEN = DatapathError("write to map", "backends", 22)
FATAL = DatapathError("attach", "connect4", 1, fatal=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Scripted:
    """Answers as it is told, once each, then well; ``asked`` is what each sync was asked for."""

    mode = "test"

    def __init__(self) -> None:
        self.asked: list[Collection[ServicePortName] | None] = []
        self.syncs: list[SyncReport | DatapathError] = []
        self.audits: list[DatapathError | Callable[[], None]] = []

    def sync(self, plan: Plan, changed: Collection[ServicePortName] | None) -> SyncReport:  # noqa: ARG002 - the protocol's
        self.asked.append(changed)
        answer = self.syncs.pop(0) if self.syncs else DONE
        if isinstance(answer, DatapathError):
            raise answer
        return answer

    def audit(self, plan: Plan) -> list[Difference]:  # noqa: ARG002 - the protocol's
        if self.audits:
            answer = self.audits.pop(0)
            if isinstance(answer, DatapathError):
                raise answer
            answer()
        return []

    def close(self) -> None:
        """Nothing is held."""


class Bench:
    """A loop that has synced once, with one Service."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.health = Health(SYNC_PERIOD_S, self.clock)
        self.metrics = Metrics()
        self.datapath = Scripted()
        self.loop = Loop(
            new_planner(),
            self.metrics,
            self.health,
            node_name=NODE,
            audit_period_s=AUDIT_PERIOD_S,
            clock=self.clock,
        )
        self.loop.put(Upserted(service()))
        self.loop.put(Upserted(endpoint_slice(at(pod_ip(10)))))
        self.loop.put(Synced())
        self.turn()

    def turn(self) -> None:
        """One round of the loop: what is in the queue, and what is due."""
        self.loop._turn(self.datapath)

    def change(self, pod: int) -> None:
        self.loop.put(Upserted(endpoint_slice(at(pod_ip(pod)))))

    def after(self, seconds: float) -> None:
        self.clock.now += seconds
        self.turn()

    def metric(self, name: str) -> float:
        lines = self.metrics.exposition().decode().splitlines()
        return sum(float(one.split()[-1]) for one in lines if one.split()[0] == name)


@pytest.fixture
def bench() -> Bench:
    return Bench()


# --- health --------------------------------------------------------------------------------------


def test_a_slow_first_list_does_not_turn_it_red() -> None:
    clock = Clock()
    health = Health(SYNC_PERIOD_S, clock)
    loop = Loop(new_planner(), Metrics(), health, node_name=NODE, audit_period_s=1.0, clock=clock)
    loop.put(Upserted(service()))
    clock.now += LIMIT_S
    assert health.healthy()
    loop._turn(Scripted())
    clock.now += LIMIT_S
    assert health.healthy()
    loop.put(Synced())
    loop._turn(Scripted())
    assert health.healthy()


def test_an_event_that_waits_while_an_audit_hangs_turns_it_red(bench: Bench) -> None:
    """H-20: nobody takes it from the queue."""
    seen: list[bool] = []

    def hang() -> None:
        bench.change(11)
        for _ in range(2):
            bench.clock.now += LIMIT_S / 2
            seen.append(bench.health.healthy())

    bench.datapath.audits = [hang]
    bench.after(AUDIT_PERIOD_S)
    assert seen == [True, False]
    bench.turn()
    assert bench.health.healthy()


def test_a_sync_that_hangs_turns_it_red(bench: Bench) -> None:
    def hang(plan: Plan, changed: Collection[ServicePortName] | None) -> SyncReport:
        bench.clock.now += LIMIT_S
        assert not bench.health.healthy()
        return DONE

    bench.datapath.sync = hang  # type: ignore[method-assign]
    bench.change(11)
    bench.turn()
    assert bench.health.healthy()


def test_what_stays_deferred_turns_it_red_and_what_is_deferred_anew_does_not(bench: Bench) -> None:
    other = port_name("other")
    web_waits, other_waits = (
        SyncReport(writes=0, failed={}, deferred=frozenset({name})) for name in (WEB, other)
    )
    bench.datapath.syncs = [web_waits, other_waits, other_waits, other_waits]
    bench.change(11)
    bench.turn()
    for seconds, healthy in ((40.0, True), (40.0, True), (20.0, False)):
        bench.loop.wake()
        bench.after(seconds)
        assert bench.health.healthy() is healthy
    bench.loop.wake()
    bench.turn()
    assert bench.health.healthy()


def test_a_service_port_that_fails_does_not_turn_it_red(bench: Bench) -> None:
    bench.datapath.syncs = [SyncReport(writes=0, failed={WEB: BROKEN}, deferred=frozenset())]
    bench.change(11)
    bench.turn()
    bench.clock.now += LIMIT_S
    assert bench.health.healthy()
    assert bench.loop.failures() == {str(WEB): str(BROKEN)}


def test_a_sync_that_fails_again_and_again_turns_it_red(bench: Bench) -> None:
    bench.datapath.syncs = [BROKEN, BROKEN]
    bench.change(11)
    bench.turn()
    bench.after(LIMIT_S)
    assert not bench.health.healthy()
    bench.after(LIMIT_S)
    assert bench.health.healthy()


# --- what is compared, and when -----------------------------------------------------------------


def test_only_the_first_sync_compares_everything(bench: Bench) -> None:
    bench.change(11)
    bench.turn()
    assert bench.datapath.asked == [None, {WEB}]


def test_after_a_failed_sync_the_next_compares_everything(bench: Bench) -> None:
    bench.datapath.syncs = [BROKEN]
    bench.change(11)
    bench.turn()
    bench.after(RETRY_MIN_S)
    bench.change(12)
    bench.turn()
    assert bench.datapath.asked == [None, {WEB}, None, {WEB}]


@pytest.mark.parametrize("error", [BROKEN, FATAL], ids=["not fatal", "fatal"])
def test_an_audit_that_fails_is_counted_and_a_sync_of_everything_follows(
    bench: Bench, error: DatapathError
) -> None:
    bench.datapath.audits = [error]
    bench.after(AUDIT_PERIOD_S)
    assert bench.metric("ebpflb_audit_failures_total") == 1
    assert bench.metric("ebpflb_audits_total") == 0
    bench.after(RETRY_MIN_S)
    assert bench.datapath.asked == [None, None]
    bench.after(AUDIT_PERIOD_S)
    assert bench.metric("ebpflb_audits_total") == 1


def test_comparing_everything_settles_what_had_failed_or_was_deferred(bench: Bench) -> None:
    other = port_name("other")
    bench.datapath.syncs = [
        SyncReport(writes=0, failed={WEB: BROKEN}, deferred=frozenset({other})),
        BROKEN,
    ]
    bench.change(11)
    bench.turn()
    bench.change(12)
    bench.turn()
    bench.change(13)
    bench.turn()
    assert bench.datapath.asked == [None, {WEB}, {WEB}, None]
    assert bench.loop.failures() == {}
    bench.clock.now += LIMIT_S
    assert bench.health.healthy()


# --- the end ------------------------------------------------------------------------------------


def test_a_signal_stops_it_before_anything_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Standard error may be blocked, or in the middle of a line."""
    order: list[str] = []
    monkeypatch.setattr(agent._log, "info", lambda event, **_: order.append(event))
    with agent._on_signal(lambda: order.append("stop")):
        os.kill(os.getpid(), signal.SIGTERM)
        assert order == ["stop"]
    assert order == ["stop", "stopping; the data path stays"]


def test_a_signal_ends_a_start_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(agent._log, "info", lambda _, **fields: said.append(fields["signal"]))
    with pytest.raises(SystemExit), agent._on_signal(agent._end):
        os.kill(os.getpid(), signal.SIGINT)
    assert said == ["SIGINT"]


# --- this node's Node -----------------------------------------------------------------------------


class Here:
    """A loop of a node with addresses, and what its plan says of the node."""

    def __init__(self) -> None:
        self.datapath = Scripted()
        self.told: list[events.Event] = []
        self.planner = new_planner(node_port_addresses=("primary",), detect_local_mode="NodeCIDR")
        self.loop = Loop(
            self.planner,
            Metrics(),
            Health(SYNC_PERIOD_S),
            node_name=NODE,
            audit_period_s=AUDIT_PERIOD_S,
            why_restart=lambda known, now: why_restart(known, now, uses_pod_cidrs=True),
            tell=self.told.append,
        )
        self.loop.put(LocalAddresses(frozenset({parse_address(node_ip(1))})))
        self.loop.put(Upserted(node(node_ip(1), pod_cidrs=("10.244.1.0/24",))))
        self.loop.put(Synced())
        assert self.turn() is None
        self.before = self.seen()
        assert self.before[0].addresses

    def turn(self) -> object:
        return self.loop._turn(self.datapath)

    def seen(self) -> tuple[NodePorts, frozenset[Family]]:
        return self.planner.plan.node_ports, self.planner.plan.tells_pods


def test_a_node_that_is_deleted_ends_the_agent_before_anything_is_taken_away() -> None:
    """SYNC-11: what is in force stays so until the next agent knows better."""
    here = Here()
    here.loop.put(Deleted(Node(NODE).key))
    ending = here.turn()
    assert isinstance(ending, agent._Stop)
    assert "is deleted" in ending.reason
    assert len(here.datapath.asked) == 1


def test_a_node_that_cannot_be_read_is_told_and_stays_what_it_was() -> None:
    here = Here()
    here.loop.put(Refused(Node(NODE).key, "spec.podCIDRs is no list"))
    with capture_logs() as lines:
        assert here.turn() is None
    assert here.seen() == here.before
    assert "spec.podCIDRs is no list" in lines[0]["reason"]
    assert len(here.told) == 1


def test_a_node_without_addresses_for_a_moment_keeps_its_node_ports() -> None:
    here = Here()
    here.loop.put(Upserted(node(pod_cidrs=("10.244.1.0/24",))))
    assert here.turn() is None
    assert here.seen() == here.before
