# SPDX-License-Identifier: Apache-2.0
"""Everybody dials every address of every kind of Service: the whole matrix, generated.

What must come of each combination, and as whom the backend sees the client, is said by the oracle
(``tests.netns.reach``), and the oracle is held against the specification's own table first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ebpflb.lab import Lab
from ebpflb.model import Family
from tests.netns.reach import (
    BACKENDS,
    CLIENTS,
    TARGET,
    Case,
    Frontend,
    Party,
    Policies,
    Reach,
    Result,
    Setting,
    cases,
    expect,
)
from tests.netns.world import Way

WAYS = {"TCP": [Way.TCP], "UDP": [Way.UDP, Way.CONNECTED_UDP]}


@pytest.fixture(params=WAYS.values(), ids=list(WAYS))
def ways(request: pytest.FixtureRequest) -> list[Way]:
    chosen: list[Way] = request.param
    return chosen


@pytest.fixture(params=CLIENTS.values(), ids=list(CLIENTS))
def client(request: pytest.FixtureRequest) -> Party:
    chosen: Party = request.param
    return chosen


def reach_in(tmp_path_factory: pytest.TempPathFactory, setting: Setting) -> Iterator[Reach]:
    with (
        Lab("reach") as lab,
        Reach(lab, tmp_path_factory.mktemp("reach"), setting).serving() as one,
    ):
        yield one


@pytest.fixture(scope="module")
def bridged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    """Pods on a bridge whose traffic netfilter does not see, which is the harder way."""
    yield from reach_in(tmp_path_factory, Setting(bridged=True, bridge_nf=False))


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reach]:
    yield from reach_in(tmp_path_factory, Setting())


def check(
    reach: Reach,
    client: Party,
    ways: list[Way],
    family: Family,
    *,
    among: Callable[[Case], bool] = lambda _: True,
) -> None:
    asked = [case for case in cases(client) if among(case)]
    found = reach.mismatches(asked, ways, family)
    assert not found, "\n".join([f"{len(found)} of {len(asked) * len(ways)}:", *map(str, found)])


# --- the oracle -----------------------------------------------------------------------------------

VIRTUAL, OUTSIDE = CLIENTS["virtual pod"], CLIENTS["outside"]
HERE, THERE = BACKENDS["another pod"], BACKENDS["a pod on the other node"]

TABLE = [
    ("TV-M01", VIRTUAL, Frontend.CLUSTER_IP, "B - B - L -"),
    ("TV-M02", VIRTUAL, Frontend.NODE_PORT_1, "B m B - B m"),
    ("TV-M03", VIRTUAL, Frontend.BALANCER, "B m B - B m"),
    ("POL-08", VIRTUAL, Frontend.EXTERNAL, "B m B - B m"),
    ("TV-M08", OUTSIDE, Frontend.CLUSTER_IP, "B m B m L m"),
    ("TV-M09", OUTSIDE, Frontend.NODE_PORT_1, "B m L - B m"),
    ("TV-M10", OUTSIDE, Frontend.BALANCER, "B m L - B m"),
    ("POL-08", OUTSIDE, Frontend.EXTERNAL, "B m L - B m"),
]
DIFFERENCES: dict[tuple[bool, bool], dict[str, str]] = {
    (True, False): {},
    (False, False): {
        "TV-M02": "B m L - B m",
        "TV-M03": "B m L - B m",
        "TV-M08": "B - B - L -",
        "POL-08 k1": "B m L - B m",
    },
    (True, True): {"TV-M01": "B m B m L m"},
    (False, True): {
        "TV-M01": "B m B m L m",
        "TV-M02": "B m L - B m",
        "TV-M03": "B m L - B m",
        "POL-08 k1": "B m L - B m",
    },
}
"""By (pods are told, masqueradeAll): the base table, TV-M20, TV-M21, TV-M22."""


@pytest.mark.parametrize(
    ("told", "masquerade_all"), DIFFERENCES, ids=["base", "TV-M20", "TV-M21", "TV-M22"]
)
def test_the_oracle_agrees_with_the_specifications_table(told: bool, masquerade_all: bool) -> None:
    """svc1, svc2, svc3 as the table has them; B: both endpoints, L: this node's, m: masqueraded."""
    setting = Setting(tells_pods=told, masquerade_all=masquerade_all)
    differences = DIFFERENCES[told, masquerade_all]
    for row, client, frontend, base in TABLE:
        wanted = differences.get(row, differences.get(f"{row} {client.name}", base))
        said = []
        for policies in (Policies.CLUSTER, Policies.EXTERNAL, Policies.INTERNAL):
            here, there = (
                expect(Case(client, frontend, policies, backend), setting)
                for backend in (HERE, THERE)
            )
            assert here.result is Result.REACHED
            assert there.result in {Result.REACHED, Result.SILENT, Result.ASTRAY}
            said.append("L" if there.result is Result.SILENT else "B")
            said.append("m" if here.seen == "n1" else "-")
        assert " ".join(said) == wanted, f"{row}: {client.name} to {frontend.value}"


def test_the_oracle_promises_something_of_nearly_everything() -> None:
    """A matrix of exceptions would prove nothing."""
    every = [expect(case, Setting()) for client in CLIENTS.values() for case in cases(client)]
    by_result = {result: sum(one.result is result for one in every) for result in Result}
    assert len(every) == 6 * 5 * 32 + 2 * 32
    assert by_result[Result.UNTOLD] == 0
    assert by_result[Result.ASTRAY] < len(every) / 50
    assert by_result[Result.REACHED] > len(every) / 2
    assert all(verdict.row for verdict in every)


# --- the matrix -----------------------------------------------------------------------------------


def test_everybody_reaches_whom_the_specification_says(
    routed: Reach, client: Party, ways: list[Way], family: Family
) -> None:
    """TV-M01 to -M10, POL-01 to -13, NOEP-01 to -10, MASQ-02 to -06, B-139 to B-145, B-161."""
    check(routed, client, ways, family)


@pytest.mark.parametrize("name", ["virtual pod", "pod on the other node", "outside"])
def test_everybody_reaches_pods_on_a_bridge_too(
    bridged: Reach, name: str, ways: list[Way], family: Family
) -> None:
    """K10, B-139: those whom no hook sees; without the combinations that no bridge touches."""
    among = {Policies.CLUSTER, Policies.EXTERNAL}
    check(bridged, CLIENTS[name], ways, family, among=lambda case: case.policies in among)


@pytest.mark.parametrize("backend", [HERE, THERE], ids=["a backend here", "a backend elsewhere"])
def test_the_wire_shows_the_source_that_the_oracle_says(
    routed: Reach, client: Party, backend: Party, family: Family
) -> None:
    """TV-M: at the backend's own device, and no Service's address is seen there."""
    asked = [
        case
        for case in cases(client)
        if case.backend == backend and case.policies in {Policies.CLUSTER, Policies.EXTERNAL}
    ]
    verdicts = {case: expect(case, routed.setting) for case in asked}
    reached = [case for case in asked if verdicts[case].result is Result.REACHED]
    place = routed.places[backend.name]
    with place.capture() as capture:
        assert routed.mismatches(reached, [Way.TCP], family) == []
        flows = capture.flows(direction="in", protocol="tcp")
    begun = [flow for flow in flows if "S" in flow["flags"]]
    own = f"[{place.ipv6}]" if family is Family.IPV6 else place.ipv4
    assert {flow["destination"] for flow in begun} == {f"{own}:{TARGET}"}
    sources = {flow["source"].rpartition(":")[0].strip("[]") for flow in begun}
    seen = {address for case in reached for address in routed.seen(verdicts[case], family)}
    assert sources == seen
    assert len(begun) == len(reached)
