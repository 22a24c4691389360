"""The writer in single cases: what a full map, a broken map and a busy service port lead to."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import abi, audit
from ebpflb.datapath.ebpf.encode import (
    NODE_ADDRESS_VALUE,
    SOURCE_RANGE_VALUE,
    encode_frontend,
    encode_service_address,
    encode_source_range,
    probe_frontends,
)
from ebpflb.datapath.ebpf.rows import flag_words, subnet_text
from ebpflb.datapath.ebpf.tables import (
    ADDRESS_ANSWERS,
    BACKEND,
    CLUSTER,
    FRONTEND_VALUE,
    ID,
    PORT,
    SERVICE_ADDRESS_KEY,
    Word,
    index_of,
    make_id,
    pack_name,
    read,
    read_source_ranges,
)
from ebpflb.datapath.ebpf.writer import MAX_UNRELEASED, Writer
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
    format_address,
    parse_address,
    parse_network,
    unspecified,
)
from tests.builders import by_network
from tests.memory_tables import CrashError, ManualGate, MemoryTables, v4


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
        cluster=Selection(Verdict.FORWARD if chosen else Verdict.REJECT, chosen),
        local=Selection(Verdict.DROP if chosen else Verdict.REJECT, ()),
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
    moved = replace(two, frontends=one.frontends)
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
        if snapshot.ports and snapshot.ports[0].words[CLUSTER].flags:
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
    without = replace(bigger, frontends=())
    taker = replace(two, frontends=one.frontends)
    assert list(bench.settle(without, taker)) == ["ns/s1"]
    assert bench.served() == {"ns/s2"}


def test_a_local_range_at_the_first_slot_outlives_a_restart() -> None:
    """An empty cluster set has base 0 too, and is not the same range."""
    bench = Bench()
    inside = planned(1)
    here = replace(
        inside,
        cluster=Selection(Verdict.REJECT, ()),
        local=Selection(Verdict.FORWARD, inside.cluster.backends),
    )
    bench.settle(here)
    used = bench.writer.slots_used
    bench.restart()
    assert bench.writer.slots_used == used == 2
    assert bench.writer.sync(plan(here), None).writes == 0


# --- policies ----------------------------------------------------------------------------------


def both_sets(first: int, *, internal_local: bool, external_local: bool) -> PlannedPort:
    """Four backends, two of them here; no set shares one with another ``first``."""
    every = tuple(
        Backend(v4(10, 1, 0, number), 8080, local=number < first + 2, terminating=False)
        for number in range(first, first + 4)
    )
    return replace(
        planned(1),
        frontends=(
            Frontend(v4(10, 96, 0, 1), 80, Protocol.TCP, FrontendKind.CLUSTER_IP),
            Frontend(v4(192, 0, 2, 1), 80, Protocol.TCP, FrontendKind.EXTERNAL_IP),
        ),
        cluster=Selection(Verdict.FORWARD, every),
        local=Selection(Verdict.FORWARD, every[:2]),
        internal_policy=Policy.LOCAL if internal_local else Policy.CLUSTER,
        external_policy=Policy.LOCAL if external_local else Policy.CLUSTER,
    )


def seen(bench: Bench) -> dict[str, frozenset[int]]:
    """What each kind of client may be given now, by the last octets."""
    snapshot = read(bench.tables)
    port = snapshot.ports[0]
    sets = {
        which: frozenset(slot.address[-1] for slot in slots[port.id])
        for which, slots in ((Policy.CLUSTER, snapshot.cluster), (Policy.LOCAL, snapshot.local))
    }
    return {
        "ClusterIP": sets[port.internal_policy],
        "from outside": sets[port.external_policy],
        "from inside": sets[Policy.CLUSTER],
    }


def test_a_policy_alone_is_one_store() -> None:
    """POL-01 to -03: both sets are there before anybody asks for them."""
    bench = Bench()
    bench.settle(both_sets(1, internal_local=False, external_local=False))
    operations = bench.tables.operations
    assert bench.sync(both_sets(1, internal_local=True, external_local=True)) == {}
    assert bench.tables.operations == operations + 1
    assert seen(bench)["ClusterIP"] == seen(bench)["from outside"] == {1, 2}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((False, False), (True, False)),
        ((True, False), (False, False)),
        ((False, False), (False, True)),
        ((False, True), (False, False)),
        ((False, False), (True, True)),
        ((True, True), (False, False)),
        ((True, False), (True, True)),
    ],
    ids=lambda policies: "/".join("Local" if local else "Cluster" for local in policies),
)
def test_a_policy_that_changes_with_the_endpoints_shows_nobody_a_mixture(
    before: tuple[bool, bool], after: tuple[bool, bool]
) -> None:
    """At each step each client is in the old state or in the new one, and never goes back."""
    old, new = Bench(), Bench()
    was = both_sets(1, internal_local=before[0], external_local=before[1])
    will = both_sets(101, internal_local=after[0], external_local=after[1])
    old.settle(was)
    new.settle(will)
    allowed = {client: [sets, seen(new)[client]] for client, sets in seen(old).items()}

    def check() -> None:
        for client, sets in seen(old).items():
            assert sets in allowed[client], client
            if sets == allowed[client][-1]:
                allowed[client] = [sets]

    old.tables.check = check
    old.settle(will)
    assert all(len(one) == 1 for one in allowed.values())


def test_policies_that_change_places_show_nobody_a_dead_endpoint() -> None:
    """What each client sees is a set of before or of after; whose policy, no order can tell."""
    bench = Bench()
    was = both_sets(1, internal_local=True, external_local=False)
    will = both_sets(101, internal_local=False, external_local=True)
    bench.settle(was)
    whole = [{1, 2}, {1, 2, 3, 4}, {101, 102}, {101, 102, 103, 104}]

    def check() -> None:
        assert all(sets in whole for sets in seen(bench).values())

    bench.tables.check = check
    bench.settle(will)
    assert seen(bench)["from outside"] == {101, 102}


# --- the node as a whole -----------------------------------------------------------------------


def node_port(number: int) -> PlannedPort:
    frontend = Frontend(
        unspecified(Family.IPV4), 30_000 + number, Protocol.TCP, FrontendKind.NODE_PORT
    )
    return replace(planned(number), frontends=(*planned(number).frontends, frontend))


def on_node(*ports: PlannedPort, addresses: Iterable[Address] = (), **more: Any) -> Plan:
    return Plan(
        {port.name: port for port in ports},
        node_ports=NodePorts(
            frozenset(addresses), frozenset({Family.IPV4} if more.pop("loopback", False) else ())
        ),
        **more,
    )


def test_addresses_of_the_node_come_and_go_with_nothing_else_written() -> None:
    """NP-05: one entry an address, whatever number of NodePorts there is."""
    bench = Bench()
    one, two, three = (v4(192, 0, 2, number) for number in (1, 2, 3))
    ports = node_port(1), node_port(2)
    bench.writer.sync(on_node(*ports, addresses=(one, two)), None)
    for addresses, writes in (((one, two), 0), ((two, three), 2), ((), 2), ((one,), 1)):
        bench.restart()
        assert bench.writer.sync(on_node(*ports, addresses=addresses), set()).writes == writes
        assert read(bench.tables).node_addrs == addresses


_SETTINGS = abi.names_of("SETTING_")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        pytest.param({}, [], id="nothing, MASQ-03 MASQ-10"),
        pytest.param({"loopback": True}, ["loopback4"], id="NP-07 MASQ-12 the loopback"),
        pytest.param({"masquerade_all": True}, ["masquerade_all"], id="MASQ-01"),
        pytest.param(
            {"pods": PodDetector(bridge="cni0")},
            ["tells_pods4", "tells_pods6", "pods_by_device"],
            id="MASQ-09 BridgeInterface",
        ),
        pytest.param(
            {"pods": PodDetector(device_prefix="veth")},
            ["tells_pods4", "tells_pods6", "pods_by_device"],
            id="MASQ-09 InterfaceNamePrefix",
        ),
    ],
)
def test_what_the_node_tells_the_programs_is_one_word(
    told: dict[str, Any], words: list[str]
) -> None:
    bench = Bench()
    assert bench.writer.sync(on_node(**told), None).writes == bool(words) + len(probe_frontends())
    assert flag_words(read(bench.tables).flags, _SETTINGS) == words
    bench.restart()
    assert bench.writer.sync(on_node(**told), None).writes == 0
    assert bench.writer.sync(on_node(), set()).writes == bool(words)
    assert read(bench.tables).flags == 0


# --- where the pods are ------------------------------------------------------------------------


def pods_seen(bench: Bench) -> dict[str, str]:
    """By which subnets the programs tell pods now."""
    snapshot = read(bench.tables)
    texts = map(subnet_text, snapshot.subnets)
    flags = ("SETTING_PODS_BY_NET4", "SETTING_PODS_BY_NET6")
    return {
        flag[-4:]: text
        for flag, text in zip(flags, texts, strict=True)
        if snapshot.flags & abi.CONSTANTS[flag]
    }


@pytest.mark.parametrize(
    "texts",
    [("10.244.0.0/16",), ("fd00:1::/64",), ("10.244.0.0/16", "fd00:1::/64"), ("0.0.0.0/0",)],
    ids=" and ".join,
)
def test_where_the_pods_are_is_told_at_once_where_nobody_was_told_before(
    texts: tuple[str, ...],
) -> None:
    """MASQ-09"""
    bench = Bench()
    told = on_node(pods=by_network(*texts))
    bench.writer.sync(told, None)
    assert list(pods_seen(bench).values()) == [*texts]
    assert read(bench.tables).flags & abi.CONSTANTS["SETTING_TELLS_PODS4"] == (
        abi.CONSTANTS["SETTING_TELLS_PODS4"] if ":" not in texts[0] else 0
    )
    bench.restart()
    assert bench.writer.sync(told, None).writes == 0
    assert bench.writer.matches()


def test_where_the_pods_are_never_changes_under_a_reader() -> None:
    """It is not told for a grace period; the next sync, whatever changed, tells the new."""
    bench = Bench()
    before = on_node(pods=by_network("10.0.0.0/8"))
    after = on_node(pods=by_network("172.16.0.0/12"))
    bench.writer.sync(before, None)
    for _ in range(2):
        bench.writer.sync(after, set())
        assert pods_seen(bench) == {}
        assert bench.writer.matches()
    bench.grace()
    bench.writer.sync(after, set())
    assert pods_seen(bench) == {"NET4": "172.16.0.0/12"}
    assert audit.differences(after, read(bench.tables)) == []


def test_half_a_subnet_that_a_crash_left_is_written_anew() -> None:
    bench = Bench()
    bench.writer.sync(on_node(pods=by_network("10.0.0.0/8")), None)
    bench.writer.sync(on_node(pods=by_network("172.16.0.0/12")), set())
    bench.grace()
    bench.tables.crash_at = bench.tables.operations + 2
    with pytest.raises(CrashError):
        bench.writer.sync(on_node(pods=by_network("172.16.0.0/12")), set())
    bench.restart()
    bench.writer.sync(on_node(pods=by_network("192.168.0.0/24")), None)
    assert pods_seen(bench) == {"NET4": "192.168.0.0/24"}


def test_a_subnet_that_somebody_changed_is_put_right() -> None:
    bench = Bench()
    wanted = on_node(pods=by_network("10.0.0.0/8", "fd00::/48"))
    bench.writer.sync(wanted, None)
    bench.grace()
    bench.tables._subnets = bench.tables._subnets._replace(ipv6=bytes(32))
    assert not bench.writer.matches()
    (one,) = audit.differences(wanted, read(bench.tables))
    assert (one.what, one.expected, one.actual) == ("pods6", "fd00::/48", "")
    bench.restart()
    for _ in range(2):
        bench.writer.sync(wanted, None)
        bench.grace()
    assert audit.differences(wanted, read(bench.tables)) == []
    assert bench.writer.matches()


@pytest.mark.parametrize("what", ["an address more", "an address less", "flags"])
def test_what_somebody_changed_of_the_node_is_seen_and_put_right(what: str) -> None:
    bench = Bench()
    one, two = v4(192, 0, 2, 1), v4(192, 0, 2, 2)
    wanted = on_node(node_port(1), addresses=[one])
    bench.writer.sync(wanted, None)
    assert bench.writer.matches()
    if what == "flags":
        bench.tables.write_flags(1)
    elif what == "an address more":
        bench.tables.node_addrs.update([(two, NODE_ADDRESS_VALUE)])
    else:
        bench.tables.node_addrs.delete(one)
    assert not bench.writer.matches()
    bench.restart()
    bench.writer.sync(wanted, None)
    assert (read(bench.tables).node_addrs, read(bench.tables).flags) == ((one,), 0)
    assert bench.writer.matches()


def test_more_addresses_than_there_is_room_for_are_told_by_the_services_that_lack_them() -> None:
    bench = Bench(node_addrs=2)
    addresses = [v4(192, 0, 2, number) for number in (1, 2, 3)]
    ports = node_port(1), planned(2)
    report = bench.writer.sync(on_node(*ports, addresses=addresses), None)
    assert [str(one) for one in report.failed] == ["ns/s1"]
    assert "--map-size node_addrs=N" in str(report.failed[name(1)])
    assert bench.served() == {"ns/s1", "ns/s2"}
    assert read(bench.tables).node_addrs == tuple(addresses[:2])
    report = bench.writer.sync(on_node(*ports, addresses=addresses[1:]), report.failed)
    assert (report.failed, read(bench.tables).node_addrs) == ({}, tuple(addresses[1:]))


# --- source ranges -----------------------------------------------------------------------------

_NO_PODS, _NO_HOST = abi.CONSTANTS["PORT_LB_NO_PODS"], abi.CONSTANTS["PORT_LB_NO_HOST"]
_BY_PACKET = abi.CONSTANTS["PORT_LB_RANGES"]
_OPEN, _NODE_ALONE, _CLOSED = 0, _NO_PODS | _BY_PACKET, _NO_PODS | _NO_HOST | _BY_PACKET
_IDS: dict[object, str] = {_OPEN: "open", _NODE_ALONE: "node alone", _CLOSED: "closed"}


def balanced(
    flags: int, *addresses: int, first: int = 1, ranges: Iterable[str] = ("10.0.0.0/8",)
) -> PlannedPort:
    """With a ClusterIP and a load balancer's addresses, by their last octets."""
    return replace(
        planned(1, first=first),
        frontends=(
            *planned(1).frontends,
            *(
                Frontend(v4(203, 0, 113, one), 80, Protocol.TCP, FrontendKind.LOAD_BALANCER)
                for one in addresses
            ),
        ),
        source_ranges=tuple(map(parse_network, ranges)) if flags else (),
        node_in_ranges=not flags & _NO_HOST,
    )


def guarded(*ranges: str, **more: Any) -> PlannedPort:
    """With a load balancer's address that sources in these may dial, and not this node."""
    return balanced(_CLOSED if ranges else _OPEN, 1, ranges=ranges, **more)


def flags_of(bench: Bench) -> int:
    (port,) = read(bench.tables).ports
    return port.flags


def ranges_of(bench: Bench) -> set[str]:
    """What `source_ranges` holds, of whichever service port."""
    return {str(one.network) for one in read(bench.tables).source_ranges}


def is_let_in(tables: MemoryTables, source: str) -> bool:
    """As a packet's program looks it up."""
    (port,) = read(tables).ports
    if not port.flags & _BY_PACKET:
        return True
    networks = [one.network for one in read_source_ranges(tables) if one.id == port.id]
    return any(parse_address(source) in network for network in networks if network)


@pytest.mark.parametrize("before", [_OPEN, _NODE_ALONE, _CLOSED], ids=_IDS.get)
@pytest.mark.parametrize("after", [_OPEN, _NODE_ALONE, _CLOSED], ids=_IDS.get)
def test_source_ranges_alone_are_one_store_and_an_entry_each(before: int, after: int) -> None:
    """LB-05 to -07: no frontend is away meanwhile."""
    bench = Bench()
    bench.settle(balanced(before, 1, 2))
    assert flags_of(bench) == before
    held = ranges_of(bench)
    operations = bench.tables.operations
    assert bench.sync(balanced(after, 1, 2)) == {}
    entries = len(held ^ ranges_of(bench))
    assert bench.tables.operations == operations + (before != after) + entries
    assert flags_of(bench) == after
    assert bench.differences(balanced(after, 1, 2)) == []


@pytest.mark.parametrize(
    ("planned_port", "ranges"),
    [
        pytest.param(balanced(_OPEN, 1), set(), id="none guard nothing"),
        pytest.param(
            balanced(_CLOSED, 1, 2), {"10.0.0.0/8"}, id="LB-05 the ranges, for packets of all kinds"
        ),
        pytest.param(
            balanced(_NODE_ALONE, 1, 2),
            {"10.0.0.0/8", "203.0.113.1/32", "203.0.113.2/32"},
            id="LB-07 a node in the ranges comes from the address that it dials",
        ),
        pytest.param(
            balanced(_CLOSED, 1, ranges=("10.0.0.0/8", "10.1.0.0/16", "2001:db8::/32")),
            {"10.0.0.0/8", "10.1.0.0/16", "2001:db8::/32"},
            id="one in another",
        ),
        pytest.param(
            replace(balanced(_CLOSED, 1), socket_lb=False),
            {"10.0.0.0/8"},
            id="where the socket is left alone, packets are guarded all the same",
        ),
        pytest.param(
            replace(balanced(_CLOSED, 1), cluster=Selection(Verdict.REJECT, ())),
            {"10.0.0.0/8"},
            id="LB-08 without endpoints",
        ),
    ],
)
def test_which_sources_are_let_in(planned_port: PlannedPort, ranges: set[str]) -> None:
    bench = Bench()
    bench.settle(planned_port)
    assert ranges_of(bench) == ranges
    assert bool(flags_of(bench) & _BY_PACKET) == bool(ranges)
    bench.restart()
    assert bench.writer.sync(plan(planned_port), None).writes == 0
    assert bench.writer.source_ranges_used == len(ranges)
    assert bench.writer.matches()


SOURCES = ("10.1.2.3", "10.9.9.9", "172.16.0.1", "192.0.2.1")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((), ("10.0.0.0/8",)),
        (("10.0.0.0/8",), ()),
        (("10.0.0.0/8",), ("10.1.0.0/16",)),
        (("10.1.0.0/16",), ("10.0.0.0/8",)),
        (("10.0.0.0/8",), ("172.16.0.0/12",)),
        (("10.1.0.0/16", "172.16.0.0/12"), ("10.0.0.0/8", "172.16.0.1/32")),
        (("10.0.0.0/8", "10.1.0.0/16"), ("10.1.0.0/16",)),
    ],
    ids=lambda ranges: " ".join(ranges) or "none",
)
@pytest.mark.parametrize("moved", [False, True], ids=["alone", "with the endpoints"])
def test_source_ranges_change_for_each_source_at_once(
    before: tuple[str, ...], after: tuple[str, ...], moved: bool
) -> None:
    """LB-05: whom both let in is never kept out, whom both keep out is never let in."""
    bench, first = Bench(), 101 if moved else 1
    bench.settle(guarded(*before))

    def let_in(ranges: tuple[str, ...], source: str) -> bool:
        return not ranges or any(
            parse_address(source) in network for network in map(parse_network, ranges)
        )

    allowed = {one: [let_in(before, one), let_in(after, one)] for one in SOURCES}

    def check() -> None:
        for source, states in allowed.items():
            now = is_let_in(bench.tables, source)
            assert now in states, source
            if now == states[-1]:
                del states[:-1]

    bench.tables.check = check
    bench.settle(guarded(*after, first=first))
    check()
    assert all(len(states) == 1 for states in allowed.values())
    assert ranges_of(bench) == set(after)


@pytest.mark.parametrize("before", [_OPEN, _NODE_ALONE, _CLOSED], ids=_IDS.get)
@pytest.mark.parametrize("after", [_OPEN, _NODE_ALONE, _CLOSED], ids=_IDS.get)
def test_source_ranges_that_change_with_the_endpoints_show_nobody_a_mixture(
    before: int, after: int
) -> None:
    """At each step a client is in the old state or in the new one, and never goes back."""
    bench = Bench()
    bench.settle(balanced(before, 1, first=1))
    refused = frozenset[int]()
    allowed = {
        client: [
            refused if closed & client else octets
            for closed, octets in ((before, frozenset({1, 2})), (after, frozenset({101, 102})))
        ]
        for client in (_NO_PODS, _NO_HOST, _BY_PACKET)
    }

    def check() -> None:
        snapshot = read(bench.tables)
        (port,) = snapshot.ports
        octets = frozenset(slot.address[-1] for slot in snapshot.cluster[port.id])
        for client, states in allowed.items():
            state = refused if port.flags & client else octets
            assert state in states
            if state == states[-1]:
                del states[:-1]

    bench.tables.check = check
    bench.settle(balanced(after, 1, first=101))
    assert all(len(states) == 1 for states in allowed.values())


@pytest.mark.parametrize("left", [(), (2,)], ids=["no address is left", "one is"])
@pytest.mark.parametrize("wider", [(), ("0.0.0.0/1",)], ids=["ranges go", "ranges grow"])
def test_ranges_that_go_with_an_address_hold_until_nobody_has_it(
    left: tuple[int, ...], wider: tuple[str, ...]
) -> None:
    bench = Bench()
    bench.settle(balanced(_CLOSED, 1, 2))
    wanted = balanced(_CLOSED if wider else _OPEN, *left, ranges=wider)
    for _ in range(2):
        report = bench.writer.sync(plan(wanted), {name(1)})
        assert (set(report.deferred), flags_of(bench)) == ({name(1)}, _CLOSED)
        assert ranges_of(bench) == {"10.0.0.0/8"}
    bench.grace()
    assert not bench.writer.sync(plan(wanted), {name(1)}).deferred
    assert bench.differences(wanted) == []


@pytest.mark.parametrize(
    "sizes", [{"backends": 4}, {"members": 2}], ids=lambda one: next(iter(one))
)
def test_ranges_close_at_once_also_where_the_endpoints_have_no_room(sizes: dict[str, int]) -> None:
    bench = Bench(**sizes)
    bench.settle(balanced(_OPEN, 1))
    more = replace(balanced(_CLOSED, 1), cluster=planned(1, 5).cluster, affinity_s=60)
    assert list(bench.settle(more)) == ["ns/s1"]
    assert flags_of(bench) == _CLOSED
    assert ranges_of(bench) == {"10.0.0.0/8"}


def test_ranges_that_have_no_room_keep_their_sources_out_and_all_else_is_served() -> None:
    """The map is full: what did not fit is told by its name, and let in once there is room."""
    bench = Bench(source_ranges=2)
    wanted = guarded("10.1.0.0/16", "10.2.0.0/16", "10.3.0.0/16", first=101)
    bench.settle(guarded())
    failed = bench.settle(wanted)
    assert list(failed) == ["ns/s1"]
    assert "--map-size source_ranges=N" in failed["ns/s1"]
    assert [is_let_in(bench.tables, f"10.{one}.0.1") for one in (1, 2, 3, 4)] == [
        *(True, True, False, False)
    ]
    differences = bench.differences(wanted)
    assert [(one.where, one.what, one.expected, one.actual) for one in differences] == [
        ("source_ranges", "10.3.0.0/16", "let in", "")
    ]
    fits = guarded("10.3.0.0/16", "10.2.0.0/16", first=101)
    assert bench.settle(fits) == {}
    assert bench.differences(fits) == []


def test_ranges_in_a_full_map_make_room_for_narrower_ones() -> None:
    bench = Bench(source_ranges=1)
    bench.settle(guarded("10.0.0.0/8"))
    assert bench.settle(guarded("10.1.0.0/16")) == {}
    assert ranges_of(bench) == {"10.1.0.0/16"}


def test_ranges_go_with_their_service_port() -> None:
    bench = Bench()
    bench.settle(balanced(_NODE_ALONE, 1), planned(2))
    bench.settle(planned(2))
    assert ranges_of(bench) == set()
    assert bench.writer.source_ranges_used == 0


@pytest.mark.parametrize("stray", ["of nobody", "with bits behind its length", "one too many"])
def test_ranges_that_somebody_added_are_seen_and_taken_away(stray: str) -> None:
    bench = Bench()
    wanted = guarded("10.0.0.0/8")
    bench.settle(wanted)
    (port,) = read(bench.tables).ports
    network = parse_network("192.0.2.0/24")
    key = encode_source_range(network, 77 if stray == "of nobody" else port.id)
    if stray.startswith("with"):
        key = key[:-1] + b"\1"
    bench.tables.source_ranges.update([(key, SOURCE_RANGE_VALUE)])
    assert not bench.writer.matches()
    assert len(bench.differences(wanted)) == (stray != "of nobody")
    bench.restart()
    bench.settle(wanted)
    assert ranges_of(bench) == {"10.0.0.0/8"}
    assert bench.writer.matches()


# --- the Services' addresses --------------------------------------------------------------------


def addresses_of(bench: Bench) -> dict[str, str]:
    """What `service_addrs` says of each address."""
    roles: dict[str, list[str]] = {}
    for entry in map(SERVICE_ADDRESS_KEY.unpack, read(bench.tables).service_addrs):
        words = roles.setdefault(format_address(entry.address), [])
        words.append(abi.names_of("ADDRESS_")[entry.role])
    return {address: " ".join(words) for address, words in roles.items()}


def shared(number: int, backends: int, **fields: Any) -> PlannedPort:
    """At an external address that others have too."""
    address = Frontend(v4(192, 0, 2, 1), 8000 + number, Protocol.TCP, FrontendKind.EXTERNAL_IP)
    return replace(
        planned(number, backends),
        frontends=(*planned(number).frontends, address),
        **fields,
    )


def test_an_address_of_several_service_ports_is_known_until_the_last_has_gone() -> None:
    bench = Bench()
    for ports, expected in (
        ([shared(1, 1), shared(2, 1)], "known answers"),
        ([shared(1, 0), shared(2, 1)], "known answers"),
        ([shared(1, 0)], "known"),
        ([shared(1, 1)], "known answers"),
        ([planned(1)], None),
        ([], None),
    ):
        assert bench.settle(*ports) == {}
        assert addresses_of(bench).get("192.0.2.1") == expected
        assert bench.differences(*ports) == []
        assert bench.writer.service_addresses_used == len(read(bench.tables).service_addrs)
    assert addresses_of(bench) == {}


@pytest.mark.parametrize(
    ("fields", "cluster_ip", "external"),
    [
        ({}, "known answers", "known answers"),
        ({"internal_policy": Policy.LOCAL}, "known", "known answers"),
        ({"external_policy": Policy.LOCAL}, "known answers", "known"),
        ({"socket_lb": False}, "known answers", "known answers"),
    ],
    ids=["Cluster", "POL-01 internal Local", "POL-03 external Local", "not at the socket"],
)
def test_an_address_answers_where_those_from_outside_are_led_somewhere(
    fields: dict[str, Any], cluster_ip: str, external: str
) -> None:
    """Both endpoints are on another node."""
    bench = Bench()
    bench.settle(shared(1, 2, **fields))
    assert addresses_of(bench) == {"10.96.0.1": cluster_ip, "192.0.2.1": external}


def test_the_unspecified_address_of_a_node_port_is_no_services() -> None:
    bench = Bench()
    bench.settle(node_port(1))
    assert addresses_of(bench) == {"10.96.0.1": "known answers"}


def test_addresses_that_have_no_room_are_told_by_the_services_that_lack_them() -> None:
    bench = Bench(service_addrs=5)
    ports = [shared(1, 1), shared(2, 1)]  # two addresses of their own and one of both
    failed = bench.settle(*ports)
    assert set(failed) == {"ns/s1", "ns/s2"}
    assert all("--map-size service_addrs=N" in text for text in failed.values())
    assert bench.served() == {"ns/s1", "ns/s2"}
    assert addresses_of(bench) == {
        "10.96.0.1": "known answers",
        "10.96.0.2": "known answers",
        "192.0.2.1": "known",
    }
    assert bench.settle(ports[0]) == {}
    assert bench.differences(ports[0]) == []


def test_addresses_that_somebody_changed_are_put_right() -> None:
    bench = Bench()
    bench.settle(planned(1))
    bench.tables.service_addrs.delete(encode_service_address(v4(10, 96, 0, 1), ADDRESS_ANSWERS))
    stray = (encode_service_address(v4(10, 96, 0, 9), ADDRESS_ANSWERS), bytes(4))
    assert not bench.writer.matches()
    bench.tables.service_addrs.update([stray])
    assert not bench.writer.matches()
    bench.restart()
    assert bench.writer.sync(plan(planned(1)), None).writes == 2
    assert addresses_of(bench) == {"10.96.0.1": "known answers"}
    assert bench.writer.matches()


# --- a start on maps that something else has been at -------------------------------------------


def _duplicate_name(bench: Bench) -> None:
    """Two live slots of one name, as a second writer would leave them (L-02)."""
    fake = make_id(40, 7)
    bench.tables.names.update([(ID.pack(fake), pack_name(name(1)))])
    bench.tables.write_port(40, PORT.pack(bytes(16), fake, 0, 0, 7, Protocol.TCP, 0))


def _foreign_owner(bench: Bench) -> None:
    port = next(p for p in read(bench.tables).ports if p.name == name(1))
    slot = BACKEND.pack(v4(10, 9, 9, 9), b"\0\1", 0, 0xDEAD)
    start = port.words[CLUSTER].base * BACKEND.size
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
