"""The writer under any sequence of plans, with a failure or a crash at any step.

After every single map operation each frontend must lead only to backends of its own service port,
also for readers that began long ago; `tests/memory_tables.py` asks them. And each client, chosen
for as `bpf/lookup.h` does it, must be led as one plan says that is in force, still or already,
never as a mixture of two; so must each packet be, by its source. When nothing fails any more, the
tables must equal the plan, and another sync or a restart must write nothing.
"""

from __future__ import annotations

import contextlib
import enum
import struct
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from ebpflb.datapath.ebpf import abi, audit
from ebpflb.datapath.ebpf.encode import (
    BY_NET,
    encode_frontend,
    encode_node_addresses,
    encode_service_addresses,
    encode_subnets,
    setting_flags,
)
from ebpflb.datapath.ebpf.tables import (
    BACKEND,
    CLUSTER,
    FRONTEND_VALUE,
    ID,
    INTERNAL,
    KIND_PROBE,
    KINDS,
    LOCAL,
    MEMBER_KEY,
    PORT,
    PORT_EXTERNAL_LOCAL,
    PORT_INTERNAL_LOCAL,
    PORT_LB_NO_HOST,
    PORT_LB_NO_PODS,
    PORT_LB_RANGES,
    SETS,
    SOURCE_RANGE_KEY,
    index_of,
    read,
    unpack_word,
)
from ebpflb.datapath.ebpf.writer import MAX_UNRELEASED, Writer
from ebpflb.errors import DatapathError
from ebpflb.model import (
    Address,
    Backend,
    Family,
    Frontend,
    FrontendKind,
    NodePorts,
    Plan,
    PlannedPort,
    PodDetector,
    Policy,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
    parse_address,
    parse_network,
    unspecified,
)
from tests.builders import by_network
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


def selection(chosen: Iterable[Backend], *, nothing: Verdict = Verdict.REJECT) -> Selection:
    backends = tuple(chosen)
    return Selection(Verdict.FORWARD if backends else nothing, backends)


RANGES = [
    (),
    ("10.0.0.0/8",),
    ("10.1.0.0/16",),
    ("10.1.0.0/16", "172.16.0.0/12"),
    ("0.0.0.0/1", "172.16.1.0/24"),
    ("192.0.2.0/24",),
]
DETECTORS = [
    PodDetector(),
    PodDetector(bridge="cni0"),
    by_network("10.244.0.0/16"),
    by_network("10.244.0.0/24"),
    by_network("fd00::/48"),
    by_network("10.244.0.0/16", "fd00:1::/64"),
]


@st.composite
def planned_ports(draw: st.DrawFn, name: ServicePortName) -> PlannedPort:
    numbers = draw(st.sets(st.integers(1, 6), max_size=6))
    hidden = draw(st.sets(st.sampled_from(sorted(numbers)), max_size=2)) if numbers else set()
    draining = draw(st.sets(st.integers(7, 9), max_size=2))
    usable = [backend(name, number) for number in sorted(numbers)]
    frontends = {
        Frontend(v4(10, 96, 0, number), 80, name.protocol, FrontendKind.CLUSTER_IP)
        for number in draw(st.sets(st.integers(1, 3), max_size=2))
    }
    kinds = (FrontendKind.LOAD_BALANCER, FrontendKind.EXTERNAL_IP)
    outside = draw(st.sampled_from([None, None, *kinds]))
    if outside:
        frontends.add(Frontend(v4(192, 0, 2, 1), 80, name.protocol, outside))
        wildcard = unspecified(Family.IPV4)
        frontends.add(Frontend(wildcard, 30080, name.protocol, FrontendKind.NODE_PORT))
    ranges = draw(st.sampled_from(RANGES))
    return PlannedPort(
        name=name,
        frontends=tuple(sorted(frontends, key=lambda f: f.address)),
        cluster=selection(b for b in usable if b.address[-1] not in hidden),
        local=selection(
            (b for b in usable if b.local), nothing=Verdict.DROP if usable else Verdict.REJECT
        ),
        draining=tuple(backend(name, number, terminating=True) for number in sorted(draining)),
        affinity_s=draw(st.sampled_from([0, 0, 60, 10800])),
        internal_policy=draw(st.sampled_from(Policy)),
        external_policy=draw(st.sampled_from(Policy)),
        socket_lb=draw(st.sampled_from([True, True, True, False])),
        source_ranges=tuple(map(parse_network, ranges)),
        node_in_ranges=not ranges or draw(st.booleans()),
    )


# --- what a client sees --------------------------------------------------------------------------


class Client(enum.Enum):
    """Who dials, at a socket or by packets from the address that is its value.

    ``STRANGER`` is a pod where pods cannot be told from the outside (POL-06); packets come from
    outside.
    """

    HOST = enum.auto()
    POD = enum.auto()
    STRANGER = enum.auto()
    NEAR = "10.1.2.3"
    FAR = "10.200.0.1"
    OTHER = "172.16.5.5"
    BALANCER = "192.0.2.1"

    @property
    def source(self) -> Address | None:
        return parse_address(self.value) if isinstance(self.value, str) else None

    @property
    def is_outside(self) -> bool:
        return self is Client.STRANGER or self.source is not None


class View(NamedTuple):
    """What becomes of a connection: the flags of a word, and whom it may get."""

    flags: int
    targets: frozenset[bytes]


_AFFINITY = abi.CONSTANTS["WORD_AFFINITY"]
_UNTOUCHED = abi.CONSTANTS["WORD_UNTOUCHED"]
_VERDICTS = {
    Verdict.FORWARD: 0,
    Verdict.REJECT: abi.CONSTANTS["WORD_NONE"],
    Verdict.DROP: abi.CONSTANTS["WORD_NONE_LOCAL"],
}


KEPT_OUT = View(-1, frozenset())
"""Refused by source ranges."""


def planned_set(planned: PlannedPort, chosen: Selection, client: Client) -> View:
    flags = _VERDICTS[chosen.verdict]
    flags |= _AFFINITY if planned.affinity_s else 0
    flags |= 0 if planned.socket_lb or client.source else _UNTOUCHED
    return View(flags, frozenset(one.address for one in chosen.backends))


def planned_view(planned: PlannedPort, kind: FrontendKind, client: Client) -> View:
    """POL-01 to -06, LB-05"""
    if (planned.socket_lb or client.source) and is_kept_out(planned, kind, client):
        return KEPT_OUT
    if kind is FrontendKind.CLUSTER_IP:
        return planned_set(planned, planned.internal, client)
    if client.is_outside and planned.external_policy is Policy.LOCAL:
        return planned_set(planned, planned.local, client)
    return planned_set(planned, planned.cluster, client)


def is_kept_out(planned: PlannedPort, kind: FrontendKind, client: Client) -> bool:
    """LB-05 to -07"""
    if kind is not FrontendKind.LOAD_BALANCER or not planned.source_ranges:
        return False
    if client.source is None:
        return client is not Client.HOST or not planned.node_in_ranges
    if planned.node_in_ranges and any(
        one.address == client.source and one.kind is kind for one in planned.frontends
    ):
        return False
    return not any(client.source in network for network in planned.source_ranges)


def actual_view(tables: MemoryTables, value: bytes, client: Client) -> View:
    """As `choose` in bpf/lookup.h."""
    frontend = FRONTEND_VALUE.unpack(value)
    port = PORT.unpack(tables.read_port(index_of(frontend.id)))
    if frontend.scope == INTERNAL:
        which = LOCAL if port.flags & PORT_INTERNAL_LOCAL else CLUSTER
    else:
        outside = port.flags & PORT_EXTERNAL_LOCAL and client.is_outside
        which = LOCAL if outside else CLUSTER
    word = unpack_word(struct.unpack(f"={SETS}Q", port.word)[which])
    raw = tables.read_backends(word.base, word.length)
    slots = [BACKEND.unpack(raw[at : at + BACKEND.size]) for at in range(0, len(raw), BACKEND.size)]
    if word.flags & _AFFINITY:
        for slot in slots:
            member = MEMBER_KEY.pack(slot.address, slot.port, which, frontend.id)
            assert tables.members.lookup(member) is not None, "a backend is not yet a member"
    targets = frozenset(slot.address for slot in slots)
    is_balancer = KINDS[frontend.kind] is FrontendKind.LOAD_BALANCER
    if client.source is not None:
        closed = port.flags & PORT_LB_RANGES and not is_in_trie(tables, port.id, client.source)
        return KEPT_OUT if is_balancer and closed else View(word.flags & ~_UNTOUCHED, targets)
    closed = port.flags & (PORT_LB_NO_HOST if client is Client.HOST else PORT_LB_NO_PODS)
    if is_balancer and closed and not word.flags & _UNTOUCHED:
        return KEPT_OUT
    return View(word.flags, targets)


def is_in_trie(tables: MemoryTables, service_port_id: int, source: Address) -> bool:
    """As the kernel looks up {id, source} in `source_ranges`."""
    wanted = int.from_bytes(struct.pack("=I", service_port_id) + source)
    for key in dict(tables.source_ranges.items()):
        shift = 8 * (len(key) - 4) - SOURCE_RANGE_KEY.unpack(key).bits
        if wanted >> shift == int.from_bytes(key[4:]) >> shift:
            return True
    return False


def change_places(plans: Iterable[PlannedPort]) -> bool:
    """Whether one policy goes from Local to Cluster and the other back: no order serves both."""
    policies = {(plan.internal_policy, plan.external_policy) for plan in plans}
    return policies >= {(Policy.LOCAL, Policy.CLUSTER), (Policy.CLUSTER, Policy.LOCAL)}


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
        result[name] = replace(port, frontends=free)
    return result


def addresses_of_any(plans: Iterable[PlannedPort]) -> frozenset[bytes]:
    """What `service_addrs` may hold for a service port, whichever of its plans is in force.

    A frontend that leaves, or has left, leads for a while where another plan leads.
    """
    frontends = tuple({one for planned in plans for one in planned.frontends})
    ports = [replace(planned, frontends=frontends) for planned in plans]
    return frozenset[bytes]().union(*(encode_service_addresses(Plan({p.name: p})) for p in ports))


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
        self.addresses: frozenset[Address] = frozenset()
        self.pods = PodDetector()
        self.masquerade_all = False
        self.has_failed = False
        # Plans that may be in force, still or already, of each service port and of the node.
        self.in_force: dict[ServicePortName, list[PlannedPort]] = {name: [] for name in NAMES}
        self.of_node: list[Plan] = [self.plan]
        self.tables.check = self._look

    @property
    def plan(self) -> Plan:
        return Plan(
            without_conflicts(self.ports),
            node_ports=NodePorts(self.addresses, self.pods.families),
            pods=self.pods,
            masquerade_all=self.masquerade_all,
        )

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def change(self, data: st.DataObject, name: ServicePortName) -> None:
        before = self.plan.ports
        self.ports[name] = data.draw(planned_ports(name))
        self._note(before)

    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def change_all_but_the_frontends(self, data: st.DataObject, name: ServicePortName) -> None:
        if name in self.ports:
            before = self.plan.ports
            drawn = data.draw(planned_ports(name))
            self.ports[name] = replace(drawn, frontends=self.ports[name].frontends)
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
        for name in self.changed & after.keys():
            self.in_force[name].append(after[name])

    @rule(
        last_octets=st.sets(st.integers(1, 4)),
        pods=st.sampled_from(DETECTORS),
        masquerade_all=st.booleans(),
    )
    def change_node(
        self, last_octets: set[int], pods: PodDetector, *, masquerade_all: bool
    ) -> None:
        self.addresses = frozenset(v4(192, 0, 2, number) for number in last_octets)
        self.pods = pods
        self.masquerade_all = masquerade_all
        self.of_node.append(self.plan)

    def _look(self) -> None:
        """Whether each client is led as one plan says."""
        plans_of = {
            ID.unpack(key)[0]: self.in_force[name]
            for key, text in self.tables.names.items()
            for name in NAMES
            if str(name).encode() == text.rstrip(b"\0")
        }
        for key, value in self.tables.frontends.items():
            frontend = FRONTEND_VALUE.unpack(value)
            if frontend.kind == KIND_PROBE:
                continue
            kind = KINDS[frontend.kind]
            plans = plans_of[frontend.id]
            having = [p for p in plans for f in p.frontends if encode_frontend(f) == key]
            for client in Client:
                seen = actual_view(self.tables, value, client)
                allowed = {planned_view(planned, kind, client) for planned in plans}
                if change_places(plans):
                    allowed |= {
                        planned_set(planned, one, client)
                        for planned in plans
                        if planned_view(planned, kind, client) is not KEPT_OUT
                        for one in (planned.cluster, planned.local)
                    }
                # Of a Service that sockets leave alone the flag is there for the node's packets.
                if client is Client.HOST and any(is_kept_out(p, kind, client) for p in plans):
                    allowed.add(KEPT_OUT)
                if self.has_failed and client.source:  # what has no room keeps its sources out
                    allowed.add(KEPT_OUT)
                assert seen in allowed, f"{client} {seen}"
                if all(planned_view(planned, kind, client) is KEPT_OUT for planned in having):
                    assert seen is KEPT_OUT or seen.flags & _UNTOUCHED, f"{client} is let in"
        addresses = {key for key, _ in self.tables.node_addrs.items()}
        wanted = [encode_node_addresses(plan) for plan in self.of_node]
        assert frozenset.intersection(*wanted) <= addresses <= frozenset.union(*wanted)
        self._look_at_services_addresses()
        flags, subnets = self.tables.read_flags(), self.tables.read_subnets()
        if not flags & BY_NET:  # while the subnets change
            assert flags in {setting_flags(plan) & ~BY_NET for plan in self.of_node}
        else:
            told = [(setting_flags(plan), encode_subnets(plan)) for plan in self.of_node]
            assert flags in {told_flags for told_flags, _ in told}
            assert subnets in {told_subnets for _, told_subnets in told}

    def _look_at_services_addresses(self) -> None:
        """Nothing is known, and nothing answers, but for one of the plans in force."""
        known = {key for key, _ in self.tables.service_addrs.items()}
        if not any(map(change_places, self.in_force.values())):
            allowed = frozenset[bytes]().union(*map(addresses_of_any, self.in_force.values()))
            assert known <= allowed

    def _settled(self, unsettled: set[ServicePortName], *, everything: bool) -> None:
        """After a sync: what it was told of is in force, but for these."""
        for name in NAMES:
            if name not in unsettled and (everything or name in self.changed):
                self.in_force[name] = [self.plan.ports[name]] if name in self.plan.ports else []
        if not unsettled:
            self.of_node = [self.plan]
            self.has_failed &= not everything

    @rule(everything=st.booleans())
    def sync(self, *, everything: bool) -> None:
        report = self.writer.sync(self.plan, None if everything else self.changed)
        self._settled({*report.deferred, *report.failed}, everything=everything)
        self.changed = {*report.deferred, *report.failed}

    @rule(operations=st.integers(1, 12), everything=st.booleans())
    def sync_that_fails(self, *, operations: int, everything: bool) -> None:
        self.tables.fail_at = self.tables.operations + operations
        self.has_failed = True
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
            # A set that becomes empty takes no range, and waits for none.
            most = MAX_UNRELEASED + SETS
            assert all(p.unreleased <= most for p in self.writer._ports.values())

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
        snapshot = read(self.tables)
        assert audit.differences(self.plan, snapshot) == [], when
        assert set(snapshot.node_addrs) == self.addresses, when
        assert snapshot.flags == setting_flags(self.plan), when
        assert set(snapshot.service_addrs) == encode_service_addresses(self.plan), when
        assert self.writer.service_addresses_used == len(snapshot.service_addrs), when
        assert self.writer.source_ranges_used == len(snapshot.source_ranges), when
        assert self.writer.matches(), when
        assert self.writer.sync(self.plan, None).writes == 0, when
        used = {one for p in self.writer._ports.values() for one in p.ranges()}
        assert self.writer.slots_used == sum(one.size for one in used), "slots leaked"
        assert len(self.writer._indexes) == self.tables.port_entries - len(self.ports)


Syncs.TestCase.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
TestSyncs = pytest.mark.timeout(600)(Syncs.TestCase)
