"""The writer in single cases: what a full map, a broken map and a busy service port lead to."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import audit
from ebpflb.datapath.ebpf.encode import encode_frontend, probe_frontends
from ebpflb.datapath.ebpf.tables import (
    BACKEND,
    FRONTEND_VALUE,
    ID,
    INTERNAL,
    PORT,
    Word,
    index_of,
    make_id,
    pack_name,
    read,
)
from ebpflb.datapath.ebpf.writer import MAX_UNRELEASED, Writer
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
from tests.memory_tables import ManualGate, MemoryTables, v4


def name(number: int) -> ServicePortName:
    return ServicePortName("ns", f"s{number}", "", Protocol.TCP, Family.IPV4)


def planned(number: int, backends: int = 2, *, affinity_s: int = 0, first: int = 1) -> PlannedPort:
    chosen = tuple(
        Backend(v4(10, number, i >> 8, i & 255), 8080, local=False, terminating=False)
        for i in range(first, first + backends)
    )
    return PlannedPort(
        name=name(number),
        frontends=(Frontend(v4(10, 96, 0, number), 80, Protocol.TCP, FrontendKind.CLUSTER_IP),),
        internal=Selection(Verdict.FORWARD if chosen else Verdict.REJECT, chosen),
        external=None,
        draining=(),
        affinity_s=affinity_s,
        internal_policy=Policy.CLUSTER,
        external_policy=Policy.CLUSTER,
    )


def plan(*ports: PlannedPort) -> Plan:
    return Plan({port.name: port for port in ports})


class Bench:
    """Tables, gate and writer, with the few steps that the tests below are made of."""

    def __init__(self, **sizes: int) -> None:
        self.tables = MemoryTables(**sizes)
        self.gate = ManualGate()
        self.writer = Writer(self.tables, self.gate)

    def sync(self, *ports: PlannedPort) -> dict[str, str]:
        """Failures by service port."""
        report = self.writer.sync(plan(*ports), None)
        return {str(n): str(e) for n, e in report.failed.items()}

    def settle(self, *ports: PlannedPort) -> dict[str, str]:
        for _ in range(4):
            self.sync(*ports)
            self.grace()
        return self.sync(*ports)

    def grace(self) -> None:
        self.gate.passed = self.gate.drawn
        self.tables.grace()

    def restart(self) -> None:
        self.tables.grace()
        self.gate = ManualGate()
        self.writer = Writer(self.tables, self.gate)

    def differences(self, *ports: PlannedPort) -> list[Difference]:
        return audit.differences(plan(*ports), read(self.tables))

    def served(self) -> set[str]:
        snapshot = read(self.tables)
        names = {port.id: str(port.name) for port in snapshot.ports}
        return {names[frontend.id] for frontend in snapshot.frontends if frontend.id}


@pytest.mark.parametrize(
    ("sizes", "map_name"),
    [
        ({"frontends": 2 + len(probe_frontends())}, "frontends"),
        ({"ports": 2}, "ports"),
        ({"names": 2}, "names"),
        ({"backends": 5}, "backends"),
        ({"members": 4}, "members"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_full_map_refuses_the_newest_by_name_and_serves_it_once_there_is_room(
    sizes: dict[str, int], map_name: str
) -> None:
    """B-105, L-11: the others keep what they have; nothing is left of the refused one's rest."""
    bench = Bench(**sizes)
    one, two, three = (planned(i, affinity_s=60) for i in (1, 2, 3))
    assert bench.settle(one, two) == {}
    failed = bench.settle(one, two, three)
    assert list(failed) == ["ns/s3"]
    assert f"--map-size {map_name}=N" in failed["ns/s3"]
    assert bench.served() == {"ns/s1", "ns/s2"}
    assert bench.settle(one, three) == {}
    assert bench.served() == {"ns/s1", "ns/s3"}
    assert bench.differences(one, three) == []
    assert bench.writer.matches()


def test_a_service_port_that_outgrows_the_map_keeps_the_range_that_it_has() -> None:
    bench = Bench(backends=10)
    bench.settle(planned(1, 4))
    failed = bench.settle(planned(1, 8))
    assert "8 slots in a row are needed, 6 are free" in failed["ns/s1"]
    assert bench.differences(planned(1, 4)) == []


def test_changes_beyond_the_copies_that_may_wait_are_put_together() -> None:
    """K2: a busy service port has at most four copies that wait for their grace period."""
    bench = Bench()
    bench.sync(planned(1, 2, first=1))
    deferred = []
    for step in range(2, 9):
        report = bench.writer.sync(plan(planned(1, 2, first=step)), {name(1)})
        deferred.append(bool(report.deferred))
    assert deferred == [False] * MAX_UNRELEASED + [True] * (7 - MAX_UNRELEASED)
    assert bench.differences(planned(1, 2, first=1 + MAX_UNRELEASED)) == []
    bench.grace()
    assert not bench.writer.sync(plan(planned(1, 2, first=8)), {name(1)}).deferred
    assert bench.differences(planned(1, 2, first=8)) == []


def test_an_id_is_never_used_twice_in_a_row() -> None:
    """L-02: affinity and flows of a dead id must not meet its successor."""
    bench = Bench(ports=2)
    seen = []
    for _ in range(6):
        bench.settle(planned(1))
        seen += [port.id for port in read(bench.tables).ports]
        bench.settle()
        bench.restart()
    assert len(set(seen)) == len(seen)


def test_a_frontend_that_cannot_be_deleted_keeps_its_service_port_alive() -> None:
    bench = Bench()
    bench.settle(planned(1))
    bench.tables.fail_at = bench.tables.operations + 1
    assert list(bench.sync()) == ["ns/s1"]
    for _ in range(2):
        bench.grace()
        bench.writer.release()
    assert bench.served() == {"ns/s1"}
    assert bench.settle() == {}
    assert bench.served() == set()
    assert bench.writer.matches()


def test_a_cluster_ip_that_passes_to_another_service_waits_for_the_readers_of_the_old_one() -> None:
    """B-81 and K1: deleted, a grace period, inserted; never replaced."""
    bench = Bench()
    one, two = planned(1), planned(2)
    moved = PlannedPort(
        **{f: getattr(two, f) for f in two.__struct_fields__} | {"frontends": one.frontends}
    )
    bench.settle(one)
    report = bench.writer.sync(plan(moved), None)
    assert report.deferred == {name(2)}
    assert bench.served() == set()
    bench.grace()
    bench.writer.sync(plan(moved), report.deferred)
    assert bench.served() == {"ns/s2"}


def test_an_affinity_that_is_switched_on_finds_its_members_there() -> None:
    """AFF-08: the word with the flag is published after the members were inserted."""
    bench = Bench()
    bench.settle(planned(1))

    def members_come_first() -> None:
        snapshot = read(bench.tables)
        if snapshot.ports and snapshot.ports[0].words[INTERNAL].flags:
            assert len(snapshot.members) == 2
            assert snapshot.ports[0].affinity_s == 60

    bench.tables.check = members_come_first
    bench.settle(planned(1, affinity_s=60))
    assert bench.differences(planned(1, affinity_s=60)) == []
    bench.tables.check = lambda: None
    bench.settle(planned(1))
    assert read(bench.tables).members == ()


def test_a_new_service_comes_through_a_stream_of_deletions() -> None:
    """Every deletion makes insertions wait for a grace period: they must take turns."""
    bench = Bench()
    leaving = [planned(number) for number in range(1, 40)]
    bench.settle(*leaving)
    changed: set[ServicePortName] = set()
    rounds = 0
    while "ns/s50" not in bench.served():
        gone = leaving.pop()
        rounds += 1
        assert rounds < 6, "it starves"
        changed |= {gone.name, name(50)} if rounds == 1 else {gone.name}
        report = bench.writer.sync(plan(*leaving, *([planned(50)] if rounds > 1 else [])), changed)
        changed = {*report.deferred, name(50)}
        bench.grace()
    bench.settle(*leaving, planned(50))
    assert bench.differences(*leaving, planned(50)) == []


def test_an_address_that_a_service_gives_up_does_not_wait_for_that_services_backends() -> None:
    bench = Bench(backends=10)
    one, two = planned(1, 4), planned(2, 1)
    bench.settle(one)
    bigger = planned(1, 20)
    without = PlannedPort(
        **{f: getattr(bigger, f) for f in bigger.__struct_fields__} | {"frontends": ()}
    )
    taker = PlannedPort(
        **{f: getattr(two, f) for f in two.__struct_fields__} | {"frontends": one.frontends}
    )
    assert list(bench.settle(without, taker)) == ["ns/s1"]
    assert bench.served() == {"ns/s2"}


def test_an_external_range_at_the_first_slot_outlives_a_restart() -> None:
    """An empty internal scope has base 0 too, and is not the same range."""
    bench = Bench()
    inside = planned(1)
    chosen = inside.internal.backends
    outside = PlannedPort(
        **{f: getattr(inside, f) for f in inside.__struct_fields__}
        | {
            "internal": Selection(Verdict.DROP, ()),
            "external": Selection(Verdict.FORWARD, chosen),
        }
    )
    bench.settle(outside)
    used = bench.writer.slots_used
    bench.restart()
    assert bench.writer.slots_used == used == 2
    assert bench.writer.sync(plan(outside), None).writes == 0


# --- a start on maps that something else has been at -------------------------------------------


def _duplicate_name(bench: Bench) -> None:
    """Two live slots of one name, as a second writer would leave them (L-02)."""
    fake = make_id(40, 7)
    bench.tables.names.update([(ID.pack(fake), pack_name(name(1)))])
    bench.tables.write_port(40, PORT.pack(bytes(16), fake, 0, 0, 7, Protocol.TCP, 0))


def _foreign_owner(bench: Bench) -> None:
    port = next(p for p in read(bench.tables).ports if p.name == name(1))
    slot = BACKEND.pack(v4(10, 9, 9, 9), b"\0\1", 0, 0xDEAD)
    start = port.words[INTERNAL].base * BACKEND.size
    bench.tables._backends[start : start + BACKEND.size] = slot


def _range_outside(bench: Bench) -> None:
    port = next(p for p in read(bench.tables).ports if p.name == name(1))
    word = Word(bench.tables.backend_entries - 1, 500, 0).pack()
    struct.pack_into("=Q", bench.tables._ports, index_of(port.id) * PORT.size, word)


def _frontend_of_nobody(bench: Bench) -> None:
    key = encode_frontend(Frontend(v4(10, 96, 9, 9), 80, Protocol.TCP, FrontendKind.CLUSTER_IP))
    bench.tables.frontends.update([(key, FRONTEND_VALUE.pack(make_id(50, 3), 0, 0))])


def _name_lost(bench: Bench) -> None:
    port = next(p for p in read(bench.tables).ports if p.name == name(1))
    bench.tables.names.delete(ID.pack(port.id))


def _stray_rest(bench: Bench) -> None:
    bench.tables.names.update([(ID.pack(77), pack_name(name(5)))])
    bench.tables.members.update([(bytes(24), bytes(4))])


@pytest.mark.parametrize(
    "damage",
    [
        _duplicate_name,
        _foreign_owner,
        _range_outside,
        _frontend_of_nobody,
        _name_lost,
        _stray_rest,
    ],
    ids=lambda f: f.__name__.strip("_").replace("_", " "),
)
@pytest.mark.parametrize("restart", [True, False], ids=["found at a start", "found by an audit"])
def test_damage_is_repaired_and_the_other_services_stay_as_they_are(
    damage: Callable[[Bench], None], *, restart: bool
) -> None:
    bench = Bench()
    ports = planned(1), planned(2)
    bench.settle(*ports)
    untouched = [p for p in read(bench.tables).ports if p.name == name(2)]
    bench.tables.grace()
    # What is damaged is not ours to write by the rules: readers look again only afterwards.
    look, bench.tables._look = bench.tables._look, lambda: None  # type: ignore[method-assign]
    damage(bench)
    if restart:
        bench.restart()
    else:
        assert not bench.writer.matches()
        bench.writer.mend_names()
        bench.restart()
    bench.settle(*ports)
    bench.tables._look = look  # type: ignore[method-assign]
    bench.settle(*ports)
    assert bench.differences(*ports) == []
    assert bench.writer.matches()
    assert [p for p in read(bench.tables).ports if p.name == name(2)] == untouched


def test_a_restart_with_nothing_changed_writes_nothing() -> None:
    bench = Bench()
    ports = [planned(i, 3, affinity_s=60 * (i % 2)) for i in range(1, 9)]
    bench.settle(*ports)
    operations = bench.tables.operations
    bench.restart()
    assert bench.writer.sync(plan(*ports), None).writes == 0
    assert bench.tables.operations == operations
