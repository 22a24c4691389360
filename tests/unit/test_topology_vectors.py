# SPDX-License-Identifier: Apache-2.0
"""Upstream's topology vectors (TV-T01 to TV-T50), from slices to the two sets of a planned port.

An endpoint is written as in the reference: its number, ``(a,b)`` hints for zones, ``n(n1)`` hints
for nodes, ``L`` for local, ``nr`` not ready, ``ST`` not ready, serving and terminating. This node
is n1. A set that upstream does not compute is None here: nothing may lead there.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest

from ebpflb.model import (
    ApiObject,
    Node,
    PlannedPort,
    Policy,
    Protocol,
    Selection,
    ServicePort,
    Upserted,
    Verdict,
)
from ebpflb.planner.options import PlannerOptions
from ebpflb.planner.plan import Planner
from tests.builders import (
    READY,
    TERMINATING,
    UNUSABLE,
    Row,
    at,
    endpoint_slice,
    pod_ip,
    port_name,
    service,
)

HERE = "n1"
CLUSTER, LOCAL = Policy.CLUSTER, Policy.LOCAL
REJECT, DROP = Verdict.REJECT, Verdict.DROP

ENDPOINT = re.compile(r"(\d)(?:z?\(([\w,]*)\))?(?:n\(([\w,]*)\))?(L?)(nr|ST|)")
STATES = {"": READY, "nr": UNUSABLE, "ST": TERMINATING}

Set = str | Verdict | None


class Policies(NamedTuple):
    internal: Policy = CLUSTER
    external: Policy = CLUSTER
    node_port: int = 0


def row(text: str) -> Row:
    match = ENDPOINT.fullmatch(text)
    assert match, text
    number, zones, nodes, local, state = match.groups()
    return at(
        pod_ip(10 + int(number)),
        HERE if local else "elsewhere",
        STATES[state],
        zones=zones.split(",") if zones else (),
        nodes=nodes.split(",") if nodes else (),
    )


def planned(endpoints: str, zone: str | None, policies: Policies) -> PlannedPort:
    planner = Planner(PlannerOptions(node_name=HERE))
    objects: list[ApiObject] = [
        service(
            ports=[ServicePort("http", Protocol.TCP, 80, policies.node_port)],
            internal_policy=policies.internal,
            external_policy=policies.external,
        ),
        endpoint_slice(*map(row, endpoints.split())),
        Node(HERE, zone=zone or ""),
    ]
    for obj in objects:
        planner.apply(Upserted(obj))
    return planner.update().plan.ports[port_name()]


def shown(selection: Selection) -> Set:
    if selection.verdict is not Verdict.FORWARD:
        assert selection.backends == ()
        return selection.verdict
    assert selection.backends
    return " ".join(str(each.address[15] - 10) for each in selection.backends)


def used(port: PlannedPort) -> set[Set]:
    """What clients are led to, by whatever frontend: a pod or the node to the cluster set."""
    led = [port.internal] if port.external is None else [port.internal, port.external, port.cluster]
    return set(map(shown, led))


ZONES = "3(a) 4(b) 5(c) 6(a)"
NP_ETP = Policies(external=LOCAL, node_port=8080)
NP_ITP = Policies(internal=LOCAL, node_port=8080)
NP_BOTH = Policies(LOCAL, LOCAL, 8080)
ITP = Policies(internal=LOCAL)
ANY = Policies()


@pytest.mark.parametrize(
    ("endpoints", "zone", "policies", "cluster", "local"),
    [
        pytest.param(ZONES, "a", ANY, "3 6", None, id="TV-T01"),
        pytest.param("3(a)L 4(b)L 5(c) 6(a)", "a", NP_ETP, "3 6", "3 4", id="TV-T02"),
        pytest.param("3(a)L 4(b)L 5(c) 6(a)", "a", NP_ITP, "3 6", "3 4", id="TV-T03"),
        pytest.param("3(a)", None, ANY, "3", None, id="TV-T04 a node without a zone"),
        pytest.param("3(a)", "", ANY, "3", None, id="TV-T05 a node with an empty zone"),
        pytest.param("3(a)", "b", ANY, "3", None, id="TV-T06 nobody for the zone"),
        pytest.param("3(a) 4(b) 5(c) 6(a)nr", "a", ANY, "3", None, id="TV-T07"),
        pytest.param("3(a)nr 4(b) 5(c) 6(a)nr", "a", ANY, "4 5", None, id="TV-T08"),
        pytest.param("3(a) 4(b) 5 6(a)", "a", ANY, "3 4 5 6", None, id="TV-T09 TOP-09"),
        pytest.param("3(a,b,c) 4(b,c) 5(b,d) 6(c)", "c", ANY, "3 4 6", None, id="TV-T10"),
        pytest.param("0(a)L 1(b)L 2(a) 3(b)", "a", NP_ETP, "0 2", "0 1", id="TV-T20"),
        pytest.param("", None, ITP, None, REJECT, id="TV-T21 hasAny false"),
        pytest.param("0 1", None, ITP, None, DROP, id="TV-T22 hasAny true"),
        pytest.param("0L 1L", None, ITP, None, "0 1", id="TV-T23"),
        pytest.param("0L 1", None, ITP, None, "0", id="TV-T24"),
        pytest.param("0nr 1nr", None, ANY, REJECT, None, id="TV-T25 NOEP-08"),
        pytest.param("0nr 1", None, ANY, "1", None, id="TV-T26"),
        pytest.param("0ST 1ST", None, ANY, "0 1", None, id="TV-T27 hasAny true"),
        pytest.param("0L 1", None, NP_ITP, "0 1", "0", id="TV-T28"),
        pytest.param("0L 1", None, NP_ETP, "0 1", "0", id="TV-T29"),
        pytest.param("0L 1", None, NP_BOTH, "0 1", "0", id="TV-T30"),
        pytest.param("0 1", None, NP_BOTH, "0 1", DROP, id="TV-T31"),
        pytest.param("0ST 1ST", None, NP_BOTH, "0 1", DROP, id="TV-T32 hasAny true"),
        pytest.param("0 1Lnr 2LST 3ST", None, NP_ETP, "0", "2", id="TV-T33 TOP-14"),
        pytest.param("0 1L", None, Policies(external=LOCAL), "0 1", None, id="TV-T34 TOP-01"),
        pytest.param("0 1L", None, ITP, None, "1", id="TV-T35"),
    ],
)
def test_upstreams_own(
    endpoints: str, zone: str | None, policies: Policies, cluster: Set, local: Set
) -> None:
    port = planned(endpoints, zone, policies)
    assert used(port) == {each for each in (cluster, local) if each is not None}
    if cluster is not None:
        assert shown(port.cluster) == cluster
    if local is not None:
        assert shown(port.local) == local


T40 = "0z(a)n(n1) 1z(a)n(n2) 2z(b)n(n3)"


@pytest.mark.parametrize(
    ("endpoints", "zone", "cluster"),
    [
        pytest.param(T40, "a", "0", id="TV-T40 TOP-07 the same node"),
        pytest.param("0z(a)n(n4) 1z(a)n(n2) 2z(b)n(n3)", "a", "0 1", id="TV-T41 else the zone"),
        pytest.param("0z(b)n(n4) 1z(b)n(n2) 2z(c)n(n3)", "a", "0 1 2", id="TV-T42 else any"),
        pytest.param("0z(a)n(n1) 1z(a)n(n2) 2z(b)", "a", "0 1", id="TV-T43 TOP-09 one level off"),
        pytest.param("0z(a)n(n1) 1z(a)n(n2) 2", "a", "0 1 2", id="TV-T44 TOP-09 both off"),
        pytest.param("0z(a)n(n1)nr 1z(a)n(n2) 2z(b)n(n3)", "a", "1", id="TV-T45 TOP-06"),
        pytest.param("0z(a)n(n1) 1z(a)n(n2) 2nr", "a", "0", id="TV-T46 TOP-06"),
        pytest.param("0z(a)n(n1)ST 1z(a)n(n2)ST 2z(b)n(n3)ST", "a", "0 1 2", id="TV-T47 TOP-03"),
        pytest.param(T40, None, "0", id="TV-T48 a node hint needs no zone"),
        pytest.param("0z(a)n(n1,n2) 1z(a)n(n1)", "a", "0 1", id="TV-T50"),
    ],
)
def test_ours_for_node_hints(endpoints: str, zone: str | None, cluster: str) -> None:
    assert shown(planned(endpoints, zone, ANY).cluster) == cluster


def test_hints_play_no_part_for_the_local_set_tv_t49() -> None:
    port = planned("0z(a)n(n1) 1z(a)n(n2)L 2z(b)n(n3)", "a", ITP)
    assert shown(port.internal) == shown(port.local) == "1"


def test_hints_count_whatever_an_annotation_says_tv_t11() -> None:
    assert shown(planned(ZONES, "a", ANY).cluster) == "3 6"


def test_the_sets_are_the_same_under_every_policy() -> None:
    """Both are always made, so that a change of policy needs no new one."""
    every = [Policies(one, two, port) for one in Policy for two in Policy for port in (0, 8080)]
    ports = [planned("3(a)L 4(b)L 5(c) 6(a)", "a", policies) for policies in every]
    assert {(port.cluster, port.local, port.draining) for port in ports} == {
        (ports[0].cluster, ports[0].local, ports[0].draining)
    }
