"""The writer under any sequence of plans, with a failure or a crash at any step.

After every single map operation each frontend must lead only to backends of its own service port,
also for readers that began long ago; `tests/memory_tables.py` asks them. When nothing fails any
more, the tables must equal the plan, and another sync or a restart must write nothing.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ebpflb.datapath.ebpf import audit
from ebpflb.datapath.ebpf.tables import read
from ebpflb.datapath.ebpf.writer import MAX_UNRELEASED, Writer
from ebpflb.errors import DatapathError
from ebpflb.model import (
    Backend,
    Family,
    Frontend,
    FrontendKind,
    Plan,
    PlannedPort,
    Policy,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
)
from tests.memory_tables import CrashError, ManualGate, MemoryTables, v4

NAMES = [
    ServicePortName("ns", f"s{i}", port, protocol, Family.IPV4)
    for i in range(2)
    for port, protocol in (("a", Protocol.TCP), ("b", Protocol.UDP))
]


def backend(name: ServicePortName, number: int, *, terminating: bool = False) -> Backend:
    """Its address says whose it is: no two service ports share one."""
    return Backend(
        address=v4(10, NAMES.index(name), 0, number),
        port=8080,
        local=number % 2 == 0,
        terminating=terminating,
    )


def selection(backends: tuple[Backend, ...]) -> Selection:
    return Selection(Verdict.FORWARD if backends else Verdict.REJECT, backends)


@st.composite
def planned_ports(draw: st.DrawFn, name: ServicePortName) -> PlannedPort:
    numbers = draw(st.sets(st.integers(1, 6), max_size=6))
    draining = draw(st.sets(st.integers(7, 9), max_size=2))
    internal = tuple(backend(name, number) for number in sorted(numbers))
    outside = draw(st.sampled_from(["none", "same", "local"]))
    frontends = {
        Frontend(v4(10, 96, 0, number), 80, name.protocol, FrontendKind.CLUSTER_IP)
        for number in draw(st.sets(st.integers(1, 3), max_size=2))
    }
    external = None
    if outside != "none":
        chosen = internal if outside == "same" else tuple(b for b in internal if b.local)
        external = selection(chosen)
        frontends.add(Frontend(v4(192, 0, 2, 1), 80, name.protocol, FrontendKind.LOAD_BALANCER))
    return PlannedPort(
        name=name,
        frontends=tuple(sorted(frontends, key=lambda f: f.address)),
        internal=selection(internal),
        external=external,
        draining=tuple(backend(name, number, terminating=True) for number in sorted(draining)),
        affinity_s=draw(st.sampled_from([0, 0, 60, 10800])),
        internal_policy=Policy.CLUSTER,
        external_policy=Policy.LOCAL if outside == "local" else Policy.CLUSTER,
        socket_lb=draw(st.sampled_from([True, True, False])),
    )


def without_conflicts(
    ports: dict[ServicePortName, PlannedPort],
) -> dict[ServicePortName, PlannedPort]:
    """What a planner guarantees: one frontend belongs to one service port."""
    taken: set[tuple[bytes, int, int]] = set()
    result = {}
    for name in sorted(ports):
        port = ports[name]
        free = tuple(f for f in port.frontends if _identity(f) not in taken)
        taken |= {_identity(f) for f in free}
        result[name] = PlannedPort(
            **{field: getattr(port, field) for field in port.__struct_fields__}
            | {"frontends": free}
        )
    return result


def _identity(frontend: Frontend) -> tuple[bytes, int, int]:
    return frontend.address, frontend.port, frontend.protocol


class Syncs(RuleBasedStateMachine):
    """Plans change, syncs run, fail, crash; readers look on."""

    @initialize()
    def start(self) -> None:
        self.tables = MemoryTables()
        self.gate = ManualGate()
        self.writer = Writer(self.tables, self.gate)
        self.ports: dict[ServicePortName, PlannedPort] = {}
        self.changed: set[ServicePortName] = set()

    @property
    def plan(self) -> Plan:
        return Plan(without_conflicts(self.ports))

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def change(self, data: st.DataObject, name: ServicePortName) -> None:
        before = self.plan.ports
        self.ports[name] = data.draw(planned_ports(name))
        self._note(before)

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: ServicePortName) -> None:
        before = self.plan.ports
        self.ports.pop(name, None)
        self._note(before)

    def _note(self, before: object) -> None:
        after = self.plan.ports
        assert isinstance(before, dict)
        self.changed |= {n for n in NAMES if before.get(n) != after.get(n)}

    @rule(everything=st.booleans())
    def sync(self, *, everything: bool) -> None:
        report = self.writer.sync(self.plan, None if everything else self.changed)
        self.changed = {*report.deferred, *report.failed}

    @rule(operations=st.integers(1, 12), everything=st.booleans())
    def sync_that_fails(self, *, operations: int, everything: bool) -> None:
        self.tables.fail_at = self.tables.operations + operations
        try:
            report = self.writer.sync(self.plan, None if everything else self.changed)
        except DatapathError:
            return  # the agent compares everything next time
        finally:
            self.tables.fail_at = None
        self.changed |= {*report.deferred, *report.failed}

    @rule()
    def grace_period_passes(self) -> None:
        self.gate.passed = self.gate.drawn
        self.tables.grace()

    @rule(operations=st.integers(1, 24))
    def crash_in_the_middle_of_a_sync(self, operations: int) -> None:
        self.tables.crash_at = self.tables.operations + operations
        with contextlib.suppress(CrashError):
            self.writer.sync(self.plan, self.changed)
        self.tables.crash_at = None
        self._restart()

    def _restart(self) -> None:
        self.tables.grace()
        self.gate = ManualGate()
        self.writer = Writer(self.tables, self.gate)
        self.changed = set(NAMES)

    @invariant()
    def copies_are_bounded(self) -> None:
        if hasattr(self, "writer"):
            assert all(p.unreleased <= MAX_UNRELEASED for p in self.writer._ports.values())

    def teardown(self) -> None:
        if not hasattr(self, "writer"):
            return
        self._settle()
        self._check_at_rest("after all syncs")
        self._restart()
        assert self.writer.sync(self.plan, None).writes == 0, "a restart wrote something"
        self._check_at_rest("after a restart")

    def _settle(self) -> None:
        for _ in range(6):
            assert not self.writer.sync(self.plan, None).failed
            self.grace_period_passes()
        assert not self.writer.sync(self.plan, None).deferred
        self.writer.release()

    def _check_at_rest(self, when: str) -> None:
        assert audit.differences(self.plan, read(self.tables)) == [], when
        assert self.writer.matches(), when
        assert self.writer.sync(self.plan, None).writes == 0, when
        used = {one for p in self.writer._ports.values() for one in p.ranges()}
        assert self.writer.slots_used == sum(one.size for one in used), "slots leaked"
        assert len(self.writer._indexes) == self.tables.port_entries - len(self.ports)


Syncs.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestSyncs = pytest.mark.timeout(600)(Syncs.TestCase)
