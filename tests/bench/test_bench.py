"""The benchmark suite works: at a tiny size it measures everything, judges it, and leaves nothing.

What it measures at this size means nothing; that a bad result fails is shown by results made up.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from msgspec import structs

from ebpflb.bench import connects, packets, report, suite
from ebpflb.bench.connects import Connects, Latency, ProgramCost
from ebpflb.bench.footprint import FLOWS, GROWING, Crash, Footprint, Restart
from ebpflb.bench.fromapi import ApiStart, Feed, FromApi
from ebpflb.bench.numbers import in_guard, median, percentile
from ebpflb.bench.packets import Packets
from ebpflb.bench.perpacket import PacketCost
from ebpflb.bench.propagation import Propagation
from ebpflb.bench.report import Measured, Report
from ebpflb.bench.workload import GREET_PORT, QUIET_PORT, Workload, all_files, pack_destinations
from ebpflb.cli import main
from ebpflb.lab.janitor import leftovers
from ebpflb.model import Upserted
from ebpflb.sources.documents import read_objects

TINY = Workload(services=20, endpoints=4, files=4, backends=4, watched_services=2)
SIZES = suite.Sizes(
    workload=TINY,
    rounds=4,
    batch=20,
    attempts=1,
    changes=6,
    dials=400,
    paced=40,
    fed=200,
    reused=2000,
    answered=100,
    streams=2,
    test_runs=1000,
)


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.01, 1), (0.5, 50), (0.99, 99), (1.0, 100)]
)
def test_a_percentile_is_a_value_that_was_measured(share: float, expected: int) -> None:
    assert percentile(range(100, 0, -1), share) == expected


def test_the_median_of_one_value_is_that_value() -> None:
    assert median([7]) == 7


@pytest.mark.parametrize(("ratio", "inside"), [(0.979, False), (0.98, True), (1.021, False)])
def test_the_guard_is_two_per_cent_wide(ratio: float, inside: bool) -> None:
    assert in_guard(ratio) is inside


# --- the workload ------------------------------------------------------------------------------


def test_every_endpoint_has_an_address_of_its_own() -> None:
    chosen = [one for service in range(TINY.services) for one in TINY.backends_of(service)]
    assert len({one.address for one in chosen}) == TINY.services * TINY.endpoints


def test_the_quick_workload_fits_the_address_plan() -> None:
    work = suite.QUICK.workload
    work.check()
    assert (work.services, work.endpoints) == (10_000, 10)
    assert len(work.watched) == work.watched_services


def test_a_watched_service_changes_sides_and_its_port_says_who_answers() -> None:
    service = TINY.watched[0]
    sides = [TINY.backends_of(service, side) for side in ("A", "B")]
    assert not set(sides[0]) & set(sides[1])
    assert {one.port for side in sides for one in side} == {GREET_PORT}
    assert {one.port for one in TINY.backends_of(0)} == {QUIET_PORT}


def test_manifests_are_read_without_a_complaint() -> None:
    told = [
        one for name, data in all_files(TINY) for one in read_objects(name, data).objects.values()
    ]
    assert len(told) == 2 * TINY.services
    assert all(isinstance(one, Upserted) and not one.obj.problems for one in told)


def test_clients_dial_no_service_that_wakes_its_backends() -> None:
    endpoints, services, _, hot = TINY.lists(seed=1)
    watched = {TINY.frontend(service) for service in TINY.watched}
    assert {one.port for one in endpoints} == {QUIET_PORT}
    assert not watched & {*services, *hot}
    assert len(pack_destinations(hot)) == 8


@pytest.mark.parametrize(
    "broken",
    [
        TINY._replace(services=1),
        TINY._replace(backends=3),
        TINY._replace(services=50_000),
        TINY._replace(files=21),
    ],
    ids=["one service", "an odd number of backends", "too many endpoints", "empty files"],
)
def test_a_workload_without_room_is_refused(broken: Workload) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        broken.check()


# --- the whole suite ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured() -> Report:
    said: list[str] = []
    before = set(leftovers())  # tests in other folders may share a lab for longer
    found = suite.run(SIZES, said.append)
    assert said
    assert not [path for path in set(leftovers()) - before if f"-{os.getpid()}-" in path]
    return found


def test_everything_is_measured(measured: Report) -> None:
    assert len(measured.gates) == 24
    assert {mode.name for mode in measured.modes} == {*connects.MODES, *packets.MODES}
    assert all(mode.samples == SIZES.samples for mode in measured.modes)
    assert all(mode.p50_us > 0 for mode in measured.modes)
    figures = {figure.name: figure.measured for figure in measured.figures}
    assert figures["changes"] == SIZES.changes
    assert figures["api_changes"] == SIZES.changes
    assert figures["events"] == SIZES.paced + SIZES.fed
    assert figures["event_writes"] > 0
    assert figures["crash_connects"] >= SIZES.dials
    assert figures["cold_writes"] > TINY.services
    assert figures["program_cluster_ip"] > 0


def test_what_no_noise_can_excuse_holds_at_any_size(measured: Report) -> None:
    gates = {gate.name: gate for gate in measured.gates}
    for name in (
        *("failed_connects", "connects_to_old", "restart_writes", "restart_maps", "crash_writes"),
        *("growing_maps", "event_bytes", "packets_failed", "packets_wrong"),
    ):
        assert gates[name].passed, gates[name]


# --- verdicts ----------------------------------------------------------------------------------


FED = Feed(5500, 5.5, 2.0, 270.0, 0.27, 1000, 1000, 11, 100, 0, 0)
FOLLOWED = Propagation(100, 1000, 1.0, 2.0, 3.0, 0.1, 0.5, 0.3, 0.2, 1000, 0, 0, 0.1)


LATENCY = Latency(100, 20.0, 40.0, 1.0, 1.0, 1.0)
COSTS = {
    name: PacketCost(100.0, 50.0)
    for name in ("other", "other_reply", "forward4", "reverse4", "forward6", "reverse6")
}
THROUGH_TC = Packets(
    latencies=dict.fromkeys(packets.MODES, LATENCY),
    trusted=True,
    attempts=1,
    failed=0,
    reused=1000,
    reused_failed=0,
    answered=100,
    unanswered=0,
    wrong=0,
    bulk=1.0,
    bulk_gbit_s=9.0,
    costs=COSTS,
)


def made_up(
    *,
    ratio: float = 1.0,
    failed: int = 0,
    writes: int = 0,
    lists_s: float = 1.0,
    fed: Feed = FED,
    through_tc: Packets = THROUGH_TC,
) -> Measured:
    """A run in which all is well but for what is asked."""
    latencies = dict.fromkeys(connects.MODES, LATENCY)
    latencies["cluster_ip"] = LATENCY._replace(ratio=ratio)
    return Measured(
        connects=Connects(latencies, True, 1, failed, "", 0.1),
        costs={"cluster_ip": ProgramCost("random ClusterIPs", 10, 500.0)},
        propagation=FOLLOWED,
        footprint=Footprint(1.0, 50.0, 100, 1, 1, 1, 1, 1, dict.fromkeys((*GROWING, *FLOWS), 1)),
        restart=Restart(1.0, writes, (), 1),
        crash=Crash(1000, 0, "", 0),
        api=FromApi(ApiStart(2.0, lists_s, 1.3, 1, 1, 1, 1), 0, FED, fed, 1, 1, FOLLOWED),
        packets=through_tc,
    )


def costing(what: str, net_ns: float) -> Measured:
    costs = {**COSTS, what: PacketCost(net_ns, net_ns)}
    return made_up(through_tc=THROUGH_TC._replace(costs=costs))


@pytest.mark.parametrize(
    ("run", "missed"),
    [
        (made_up(), set()),
        (made_up(ratio=1.05), set()),
        (made_up(ratio=1.051), {"connect_random"}),
        (made_up(failed=1), {"failed_connects"}),
        (made_up(writes=1), {"restart_writes"}),
        (made_up(lists_s=3.1), {"api_cold_start"}),
        (made_up(fed=FED._replace(lag_ms=251)), {"event_lag"}),
        (made_up(fed=FED._replace(load=1.01)), {"event_load"}),
        (made_up(fed=FED._replace(received=1051)), {"event_bytes"}),
        (made_up(fed=FED._replace(failed=1)), {"failed_connects"}),
        (made_up(fed=FED._replace(old_after=1)), {"connects_to_old"}),
        (
            made_up(
                through_tc=THROUGH_TC._replace(
                    latencies={**THROUGH_TC.latencies, "packets": LATENCY._replace(ratio=1.16)}
                )
            ),
            {"packets_connect"},
        ),
        (
            made_up(
                through_tc=THROUGH_TC._replace(costs={**COSTS, "reverse6": PacketCost(0, 151)})
            ),
            {"packet_established"},
        ),
        (
            made_up(through_tc=THROUGH_TC._replace(costs={**COSTS, "other": PacketCost(0, 61)})),
            {"packet_other"},
        ),
        (made_up(through_tc=THROUGH_TC._replace(reused_failed=1)), {"packets_failed"}),
        (made_up(through_tc=THROUGH_TC._replace(unanswered=1)), {"packets_failed"}),
        (made_up(through_tc=THROUGH_TC._replace(wrong=1)), {"packets_wrong"}),
        (made_up(through_tc=THROUGH_TC._replace(bulk=0.94)), {"bulk"}),
    ],
    ids=[
        "nothing",
        "at the limit",
        "a slow connect",
        "a failed connect",
        "a needless write",
        "a slow list",
        "a queue of events that grows",
        "a busy agent",
        "bytes that are read twice",
        "a failed connect under events",
        "an old endpoint under events",
        "a slow connect through tc",
        "a dear packet of an open flow",
        "a dear packet of somebody else's",
        "a failed connect from a port that came back",
        "a connect through tc that nobody answered",
        "a connect through tc that somebody else answered",
        "a slow transfer",
    ],
)
def test_a_gate_is_missed_by(run: Measured, missed: set[str]) -> None:
    assert {gate.name for gate in report.gates(run) if not gate.passed} == missed


def test_a_guard_that_does_not_hold_is_a_refusal() -> None:
    timed = made_up().connects
    assert not suite.refusal(timed, THROUGH_TC)
    assert "too busy" in suite.refusal(timed._replace(trusted=False), THROUGH_TC)
    assert "too busy" in suite.refusal(timed, THROUGH_TC._replace(trusted=False))


# --- the command -------------------------------------------------------------------------------


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch, measured: Report) -> Callable[..., Result]:
    def call(*arguments: str, **changes: object) -> Result:
        found = structs.replace(measured, **changes)
        monkeypatch.setattr(suite, "run", lambda *_args, **_options: found)
        return CliRunner().invoke(main, ["bench", *arguments])

    return call


def test_the_table_has_every_gate_with_its_verdict(invoke: Callable[..., Result]) -> None:
    result = invoke("--quick", passed=True, refused="")
    assert result.exit_code == 0, result.output
    assert "connect() to a random ClusterIP" in result.output
    assert "AT MOST" in result.output


def test_a_missed_gate_ends_in_exit_code_1(invoke: Callable[..., Result]) -> None:
    assert invoke("--quick", passed=False, refused="").exit_code == 1


def test_a_refusal_says_why_and_ends_in_exit_code_1(invoke: Callable[..., Result]) -> None:
    result = invoke("--quick", passed=False, refused="this machine is too busy now")
    assert result.exit_code == 1
    assert "refused: this machine is too busy now" in result.output


def test_json_has_the_documented_keys(invoke: Callable[..., Result]) -> None:
    told = json.loads(invoke("--quick", "-o", "json", passed=True).output)
    assert list(told) == [field.name for field in structs.fields(Report)]
    assert msgspec.convert(told, Report).gates
    documented = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    for gate in told["gates"]:
        assert f"`{gate['name']}`" in documented
    for key in told["environment"]:
        assert f"`{key}`" in documented


def test_without_quick_nothing_is_run() -> None:
    result = CliRunner().invoke(main, ["bench"])
    assert result.exit_code == 2
    assert "--quick" in result.output
