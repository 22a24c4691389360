# SPDX-License-Identifier: Apache-2.0
"""Events in, planned service ports out: upstream's tracker vectors and hostile objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from ebpflb.model import (
    ApiObject,
    Deleted,
    Event,
    Family,
    Node,
    Policy,
    Protocol,
    Refused,
    Rejected,
    Selection,
    ServicePort,
    ServicePortName,
    SlicePort,
    Synced,
    Upserted,
    Verdict,
)
from ebpflb.planner.plan import Planner, PlanUpdate
from tests.builders import (
    NODE,
    READY,
    TERMINATING,
    Row,
    at,
    backend,
    cluster_ip,
    endpoint_slice,
    pod_ip,
    port_name,
    service,
    service_key,
    slice_key,
)

A, B, C = pod_ip(10), pod_ip(11), pod_ip(12)
A6 = pod_ip(10, Family.IPV6)
WEB = port_name()
V6 = cluster_ip(10, Family.IPV6)


def tell(planner: Planner, *changes: ApiObject | Event) -> PlanUpdate:
    """Apply objects and events, then update."""
    for change in changes:
        planner.apply(Upserted(change) if isinstance(change, ApiObject) else change)
    return planner.update()


def planner_of(*changes: ApiObject | Event) -> Planner:
    planner = Planner(NODE)
    tell(planner, *changes)
    return planner


def endpoints(planner: Planner, name: ServicePortName = WEB) -> list[str]:
    """Show a planned port's internal backends as ``address:port``."""
    backends = planner.plan.ports[name].internal.backends
    return [f"{'.'.join(map(str, each.address[12:]))}:{each.port}" for each in backends]


def verdict(planner: Planner, name: ServicePortName = WEB) -> Verdict:
    return planner.plan.ports[name].internal.verdict


# --- Services and slices in any order ------------------------------------------------------------


def test_a_service_and_its_slice_make_a_planned_port() -> None:
    planner = planner_of(
        service(affinity_s=60), endpoint_slice(at(A, NODE), at(B), at(C, state=TERMINATING))
    )
    port = planner.plan.ports[WEB]
    assert port.name == WEB
    assert [each.port for each in port.frontends] == [80]
    assert port.internal == Selection(Verdict.FORWARD, (backend(A, local=True), backend(B)))
    assert port.external is None
    assert port.draining == (backend(C, terminating=True),)
    assert (port.affinity_s, port.internal_policy) == (60, Policy.CLUSTER)
    assert not planner.rejected


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_order_of_arrival_ends_in_the_same_plan_ep_10(order: tuple[int, ...]) -> None:
    objects: list[ApiObject] = [
        service(),
        endpoint_slice(at(A), name="a"),
        endpoint_slice(at(B), name="b"),
    ]
    at_once, one_by_one = Planner(NODE), Planner(NODE)
    tell(at_once, *(objects[i] for i in order))
    for i in order:
        tell(one_by_one, objects[i])
    assert at_once.plan == one_by_one.plan == planner_of(*objects).plan


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_every_order_of_deletion_ends_empty_b_79(order: tuple[int, ...]) -> None:
    keys = [service_key(), slice_key("a"), slice_key("b")]
    planner = planner_of(
        service(), endpoint_slice(at(A), name="a"), endpoint_slice(at(B), name="b")
    )
    for i in order:
        tell(planner, Deleted(keys[i]))
    assert dict(planner.plan.ports) == {}
    assert planner._cluster._entries == {}
    assert planner._claims._owners == {}


def test_a_deletion_before_the_creation_and_of_what_never_was_does_nothing() -> None:
    planner = Planner(NODE)
    update = tell(planner, Deleted(service_key()), Deleted(slice_key()), Synced(), Node(NODE))
    assert update.changed == frozenset()
    assert tell(planner, service()).changed == {WEB}


def test_slices_outlive_their_service_ep_09() -> None:
    planner = planner_of(service(), endpoint_slice(at(A)))
    assert tell(planner, Deleted(service_key())).changed == {WEB}
    assert WEB not in planner.plan.ports
    assert tell(planner, service()).changed == {WEB}
    assert endpoints(planner) == [f"{A}:8080"]


def test_a_service_outlives_its_slices_ep_09() -> None:
    planner = planner_of(service(), endpoint_slice(at(A)))
    assert tell(planner, Deleted(slice_key())).changed == {WEB}
    assert verdict(planner) is Verdict.REJECT


def test_a_service_made_anew_with_another_address_is_served_there_svc_09() -> None:
    planner = planner_of(service(), endpoint_slice(at(A)))
    update = tell(planner, Deleted(service_key()), service(cluster_ips=[cluster_ip(11)]))
    assert update.changed == {WEB}
    assert planner.plan.ports[WEB].frontends[0].address[15] == 11


# --- upstream's endpoint vectors -----------------------------------------------------------------

P11 = SlicePort("http", Protocol.TCP, 11)
P12 = SlicePort("more", Protocol.TCP, 12)
TWO_PORTS = service(
    ports=[ServicePort("http", Protocol.TCP, 80), ServicePort("more", Protocol.TCP, 81)]
)
MORE = port_name(port="more")


@pytest.mark.parametrize(
    ("before", "after", "changed", "web", "more"),
    [
        pytest.param([], [], set(), [], [], id="TV-E01 nothing"),
        pytest.param(
            [endpoint_slice(at(A), ports=[P11])],
            [endpoint_slice(at(A), ports=[P11])],
            set(),
            [f"{A}:11"],
            [],
            id="TV-E02 no change",
        ),
        pytest.param(
            [],
            [endpoint_slice(at(A), ports=[P11])],
            {WEB},
            [f"{A}:11"],
            [],
            id="TV-E05 TV-E14 the first endpoint",
        ),
        pytest.param(
            [endpoint_slice(at(A), ports=[P11])], [Deleted(slice_key())], {WEB}, [], [], id="TV-E06"
        ),
        pytest.param(
            [endpoint_slice(at(A), ports=[P11])],
            [endpoint_slice(at(A), at(B), ports=[P11, P12])],
            {WEB, MORE},
            [f"{A}:11", f"{B}:11"],
            [f"{A}:12", f"{B}:12"],
            id="TV-E07 an address and a port more",
        ),
        pytest.param(
            [endpoint_slice(at(A), at(B), ports=[P11, P12])],
            [endpoint_slice(at(A), ports=[P11])],
            {WEB, MORE},
            [f"{A}:11"],
            [],
            id="TV-E08 an address and a port less",
        ),
        pytest.param(
            [endpoint_slice(at(A), ports=[P11])],
            [endpoint_slice(at(B), ports=[P12], name="web-2")],
            {MORE},
            [f"{A}:11"],
            [f"{B}:12"],
            id="TV-E09 a slice with the other port",
        ),
        pytest.param(
            [
                endpoint_slice(at(A), ports=[P11]),
                endpoint_slice(at(B), ports=[P12], name="web-2"),
            ],
            [Deleted(slice_key("web-2"))],
            {MORE},
            [f"{A}:11"],
            [],
            id="TV-E10 a slice less",
        ),
        pytest.param(
            [endpoint_slice(at(A), ports=[P11])],
            [endpoint_slice(at(A), ports=[SlicePort("more", Protocol.TCP, 11)])],
            {WEB, MORE},
            [],
            [f"{A}:11"],
            id="TV-E11 a port renamed",
        ),
        pytest.param(
            [endpoint_slice(at(A), ports=[P11])],
            [endpoint_slice(at(A), ports=[SlicePort("http", Protocol.TCP, 22)])],
            {WEB},
            [f"{A}:22"],
            [],
            id="TV-E12 a port renumbered",
        ),
        pytest.param(
            [endpoint_slice(at(A), name="a")],
            [endpoint_slice(at(A), name="b"), Deleted(slice_key("a"))],
            set(),
            [f"{A}:8080"],
            [],
            id="TV-E16 an endpoint moves, added first",
        ),
        pytest.param(
            [endpoint_slice(at(A), name="a")],
            [Deleted(slice_key("a")), endpoint_slice(at(A), name="b")],
            set(),
            [f"{A}:8080"],
            [],
            id="TV-E16 an endpoint moves, removed first",
        ),
    ],
)
def test_endpoints_follow_the_slices(
    before: list[ApiObject],
    after: list[ApiObject | Event],
    changed: set[ServicePortName],
    web: list[str],
    more: list[str],
) -> None:
    planner = planner_of(TWO_PORTS, *before)
    assert tell(planner, *after).changed == changed
    assert endpoints(planner) == web
    assert endpoints(planner, MORE) == more


def test_many_changes_in_one_update_give_the_exact_union_tv_e13() -> None:
    def piece(ns: int, name: str, *rows: Row) -> ApiObject:
        return endpoint_slice(*rows, namespace=f"ns{ns}", name=name)

    planner = planner_of(
        *(service(namespace=f"ns{n}", cluster_ips=[cluster_ip(n)]) for n in range(1, 5)),
        piece(1, "a", at(A, NODE)),
        piece(2, "a", at(A), at(B, NODE)),
        piece(2, "b", at(C, NODE)),
        piece(4, "a", at(A, NODE), at(B, NODE)),
    )
    update = tell(
        planner,
        piece(1, "a", at(A, NODE), at(B)),
        piece(2, "a", at(A)),
        Deleted(slice_key("b", namespace="ns2")),
        piece(3, "a", at(C)),
        piece(4, "a", at(B, NODE), at(A, NODE)),
    )
    names = [port_name(namespace=f"ns{n}") for n in range(1, 5)]
    assert update.changed == {*names[:3]}
    assert [endpoints(planner, name) for name in names] == [
        [f"{A}:8080", f"{B}:8080"],
        [f"{A}:8080"],
        [f"{C}:8080"],
        [f"{A}:8080", f"{B}:8080"],
    ]


def test_the_other_familys_slices_change_nothing_tv_e19() -> None:
    planner = planner_of(service(), endpoint_slice(at(A)))
    assert tell(planner, endpoint_slice(at(A6), name="web-6")).changed == frozenset()


def test_each_family_of_a_dual_stack_service_has_its_own_endpoints_fam_01() -> None:
    planner = planner_of(
        service(cluster_ips=[cluster_ip(10), V6]),
        endpoint_slice(at(A)),
        endpoint_slice(at(A6), name="web-6"),
    )
    v6 = port_name(family=Family.IPV6)
    assert planner.plan.ports[WEB].internal.backends == (backend(A),)
    assert planner.plan.ports[v6].internal.backends == (backend(A6),)
    assert tell(planner, Deleted(slice_key("web-6"))).changed == {v6}
    assert tell(planner, service(cluster_ips=[V6])).changed == {WEB}
    assert set(planner.plan.ports) == {v6}


@pytest.mark.parametrize(
    "rows",
    [[at(A), at(B), at(C)], [at(A)], [at(A), at(C)], []],
    ids=["three", "one", "two", "none"],
)
def test_a_shrunk_slice_leaves_no_residue_b_75(rows: list[Row]) -> None:
    planner = planner_of(service(), endpoint_slice(*(at(pod_ip(n)) for n in range(10, 14))))
    tell(planner, endpoint_slice(*rows))
    assert endpoints(planner) == [f"{address}:8080" for address, _, _ in rows]


def test_a_slice_relabelled_to_another_service_moves_its_endpoints() -> None:
    planner = planner_of(
        service(), service("other", cluster_ips=[cluster_ip(11)]), endpoint_slice(at(A))
    )
    update = tell(planner, endpoint_slice(at(A), service="other"))
    assert update.changed == {WEB, port_name("other")}
    assert (endpoints(planner), endpoints(planner, port_name("other"))) == ([], [f"{A}:8080"])


# --- what changes, and what does not -------------------------------------------------------------


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(service(), id="TV-S14 the same Service"),
        pytest.param(endpoint_slice(at(A), at(B)), id="B-175 the same slice"),
        pytest.param(endpoint_slice(at(B), at(A)), id="EP-07 the same endpoints in another order"),
        pytest.param(endpoint_slice(at(C), service="nobody", name="x"), id="a slice of nobody"),
        pytest.param(endpoint_slice(at(C), namespace="x"), id="EP-01 a slice of another namespace"),
        pytest.param(Node("node-9"), id="a node"),
    ],
)
def test_what_makes_no_difference_changes_nothing(again: ApiObject) -> None:
    planner = planner_of(service(), endpoint_slice(at(A), at(B)))
    assert tell(planner, again).changed == frozenset()


def test_only_the_port_that_differs_has_changed_port_08() -> None:
    planner = planner_of(TWO_PORTS)
    update = tell(planner, service(ports=[*TWO_PORTS.ports, ServicePort("new", Protocol.TCP, 82)]))
    assert update.changed == {port_name(port="new")}
    update = tell(planner, service(ports=TWO_PORTS.ports[::-1]))
    assert update.changed == {port_name(port="new")}, "B-85 the order of ports does not matter"
    update = tell(planner, service(ports=TWO_PORTS.ports[:1]))
    assert update.changed == {MORE}


def test_a_port_that_changes_its_protocol_is_another_service_port_b_85() -> None:
    planner = planner_of(service())
    udp = port_name(protocol=Protocol.UDP)
    update = tell(planner, service(ports=[ServicePort("http", Protocol.UDP, 80)]))
    assert update.changed == {WEB, udp}
    assert set(planner.plan.ports) == {udp}


def test_two_ports_that_swap_their_names_both_change_b_85() -> None:
    planner = planner_of(TWO_PORTS)
    swapped = [ServicePort("more", Protocol.TCP, 80), ServicePort("http", Protocol.TCP, 81)]
    assert tell(planner, service(ports=swapped)).changed == {WEB, MORE}
    assert not planner.rejected


def test_affinity_on_a_live_service_changes_its_ports_only_aff_08() -> None:
    planner = planner_of(service(), service("other", cluster_ips=[cluster_ip(11)]))
    assert tell(planner, service(affinity_s=10800)).changed == {WEB}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param([at(A, NODE), at(B)], Verdict.FORWARD, id="POL-01 one is here"),
        pytest.param([at(B)], Verdict.DROP, id="NOEP-04 B-73 none is here"),
        pytest.param([], Verdict.REJECT, id="TV-F23 none is anywhere"),
    ],
)
def test_an_internal_policy_local_serves_this_node_alone(
    rows: list[Row], expected: Verdict
) -> None:
    planner = planner_of(service(internal_policy=Policy.LOCAL), endpoint_slice(*rows))
    assert verdict(planner) is expected
    assert endpoints(planner) == ([f"{A}:8080"] if expected is Verdict.FORWARD else [])


def test_the_last_terminating_endpoint_serves_until_it_goes_b_65() -> None:
    planner = planner_of(service(), endpoint_slice(at(A)))
    tell(planner, endpoint_slice(at(A, state=TERMINATING)))
    assert planner.plan.ports[WEB].internal.backends == (backend(A, terminating=True),)
    tell(planner, endpoint_slice(at(A, state=TERMINATING), at(B, state=READY)))
    port = planner.plan.ports[WEB]
    assert (port.internal.backends, port.draining) == (
        (backend(B),),
        (backend(A, terminating=True),),
    )


# --- what is not ours, refused or contested ------------------------------------------------------


@pytest.mark.parametrize(
    "away",
    [
        pytest.param(Deleted(service_key()), id="SVC-01 SVC-05 B-83 a label or type put on it"),
        pytest.param(Refused(service_key(), "its port is a text"), id="made unreadable"),
    ],
)
def test_a_service_that_stops_being_ours_is_gone_and_comes_back(away: Event) -> None:
    planner = planner_of(service(), endpoint_slice(at(A)))
    assert tell(planner, away).changed == {WEB}
    assert dict(planner.plan.ports) == {}
    assert tell(planner, service()).changed == {WEB}
    assert endpoints(planner) == [f"{A}:8080"]
    assert not planner.rejected


def test_a_slice_that_stops_being_ours_takes_its_endpoints_and_brings_them_back_svc_03() -> None:
    planner = planner_of(service(), endpoint_slice(at(A)))
    tell(planner, Deleted(slice_key()))
    assert verdict(planner) is Verdict.REJECT
    tell(planner, endpoint_slice(at(A)))
    assert endpoints(planner) == [f"{A}:8080"]


def test_a_refused_object_is_reported_once_and_again_when_it_is_mended() -> None:
    planner, refused = Planner(NODE), Refused(service_key(), "no name")
    update = tell(planner, refused)
    assert update.rejected == planner.rejected == (Rejected(service_key(), "no name"),)
    assert tell(planner, refused).rejected == ()
    assert planner.rejected == (Rejected(service_key(), "no name"),)
    update = tell(planner, service())
    assert (update.rejected, update.mended) == ((), (Rejected(service_key(), "no name"),))
    assert not planner.rejected


def test_a_problem_of_a_part_is_reported_and_the_rest_is_served_b_93() -> None:
    planner = planner_of(service(problems=("ports[1] is bad",)))
    bad = endpoint_slice(at(A), problems=("endpoints[1] is bad", "endpoints[2] is bad"))
    update = tell(planner, bad)
    assert [str(each.key) + " " + each.reason for each in update.rejected] == [
        "EndpointSlice default/web-1 endpoints[1] is bad",
        "EndpointSlice default/web-1 endpoints[2] is bad",
    ]
    assert endpoints(planner) == [f"{A}:8080"]
    assert len(planner.rejected) == planner.rejected_count == 3
    update = tell(planner, endpoint_slice(at(A), problems=("endpoints[2] is bad",)))
    assert [each.reason for each in update.mended] == ["endpoints[1] is bad"]
    assert len(tell(planner, Deleted(slice_key()), Deleted(service_key())).mended) == 2
    assert not planner.rejected


def test_of_two_services_with_one_address_the_loser_waits_and_comes_alive() -> None:
    old = service("old", created="2025-01-01T00:00:00Z")
    planner = planner_of(
        service(), endpoint_slice(at(A)), endpoint_slice(at(B), name="old-1", service="old")
    )
    update = tell(planner, old)
    assert update.changed == {WEB, port_name("old")}
    assert set(planner.plan.ports) == {port_name("old")}
    reason = (
        f"{cluster_ip(10)}:80/TCP belongs to default/old:http, which was first: "
        "give one of them another address"
    )
    assert update.rejected == (Rejected(service_key(), reason),)
    update = tell(planner, Deleted(service_key("old")))
    assert update.changed == {WEB, port_name("old")}
    assert update.mended == (Rejected(service_key(), reason),)
    assert endpoints(planner) == [f"{A}:8080"]


def test_two_services_that_trade_addresses_in_one_update_are_both_served() -> None:
    one, other = cluster_ip(10), cluster_ip(11)
    planner = planner_of(service("a", cluster_ips=[one]), service("b", cluster_ips=[other]))
    update = tell(planner, service("a", cluster_ips=[other]), service("b", cluster_ips=[one]))
    assert update.changed == {port_name("a"), port_name("b")}
    assert (update.rejected, planner.rejected) == ((), ())


def test_a_port_that_loses_an_address_does_not_cost_the_services_other_ports() -> None:
    both = [ServicePort("http", Protocol.TCP, 80), ServicePort("more", Protocol.TCP, 81)]
    planner = planner_of(service("a"), service("b", ports=both))
    assert set(planner.plan.ports) == {port_name("a"), port_name("b", "more")}
    assert len(planner.rejected) == 1


def test_two_ports_with_one_name_are_reported_port_01() -> None:
    twice = [ServicePort("http", Protocol.TCP, 80), ServicePort("http", Protocol.TCP, 81)]
    update = tell(Planner(NODE), service(ports=twice))
    assert update.changed == {WEB}
    assert [each.reason for each in update.rejected] == [
        "port 81/TCP (IPv4) is not served: an earlier TCP port has the same name 'http'"
    ]


def test_the_plan_is_one_view_that_shows_the_last_update() -> None:
    planner = Planner(NODE)
    plan = planner.plan
    planner.apply(Upserted(service()))
    assert dict(plan.ports) == {}, "nothing is planned before the update"
    assert planner.update().plan is plan
    assert set(plan.ports) == {WEB}


def test_seventy_thousand_endpoints_behind_one_service_are_planned() -> None:
    def rows(start: int) -> Iterable[Row]:
        numbers = range(start, start + 1000)
        return (at(f"10.{n // 65536}.{n // 256 % 256}.{n % 256}") for n in numbers)

    slices = [endpoint_slice(*rows(n * 1000), name=f"web-{n}") for n in range(70)]
    planner = planner_of(service(), *slices)
    assert len(planner.plan.ports[WEB].internal.backends) == 70_000
