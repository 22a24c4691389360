# SPDX-License-Identifier: Apache-2.0
"""Events in, planned service ports out: upstream's tracker vectors and hostile objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from ebpflb.model import (
    ApiObject,
    Deleted,
    EndpointSlice,
    Event,
    Family,
    LocalAddresses,
    Node,
    NodePorts,
    PodDetector,
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
    format_endpoint,
    parse_address,
)
from ebpflb.planner.plan import Planner, PlanUpdate
from tests.builders import (
    NODE,
    READY,
    TERMINATING,
    UNUSABLE,
    Row,
    at,
    backend,
    by_network,
    cluster_ip,
    endpoint_slice,
    new_planner,
    node,
    pod_ip,
    port_name,
    service,
    service_key,
    slice_key,
)

A, B, C = pod_ip(10), pod_ip(11), pod_ip(12)
P80, P81 = SlicePort("http", Protocol.TCP, 8080), SlicePort("more", Protocol.TCP, 8081)
A6 = pod_ip(10, Family.IPV6)
WEB = port_name()
V6 = cluster_ip(10, Family.IPV6)


def tell(planner: Planner, *changes: ApiObject | Event) -> PlanUpdate:
    """Apply objects and events, then update."""
    for change in changes:
        planner.apply(Upserted(change) if isinstance(change, ApiObject) else change)
    return planner.update()


def planner_of(*changes: ApiObject | Event, **options: Any) -> Planner:
    planner = new_planner(**options)
    tell(planner, *changes)
    return planner


def endpoints(planner: Planner, name: ServicePortName = WEB) -> list[str]:
    """Show a planned port's internal backends as ``address:port``."""
    backends = planner.plan.ports[name].internal.backends
    return [format_endpoint(each.address, each.port) for each in backends]


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
    assert port.cluster == Selection(Verdict.FORWARD, (backend(A, local=True), backend(B)))
    assert port.local == Selection(Verdict.FORWARD, (backend(A, local=True),))
    assert (port.internal, port.external) == (port.cluster, None)
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
    at_once, one_by_one = new_planner(), new_planner()
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
    planner = new_planner()
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


# --- slices that change --------------------------------------------------------------------------

TWO_PORTS = service(
    ports=[ServicePort("http", Protocol.TCP, 80), ServicePort("more", Protocol.TCP, 81)]
)
MORE = port_name(port="more")


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
    assert endpoints(planner) == [f"{row.address}:8080" for row in rows]


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
    planner, refused = new_planner(), Refused(service_key(), "no name")
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
    update = tell(new_planner(), service(ports=twice))
    assert update.changed == {WEB}
    assert [each.reason for each in update.rejected] == [
        "port 81/TCP (IPv4) is not served: an earlier TCP port has the same name 'http'"
    ]


def test_the_plan_is_one_view_that_shows_the_last_update() -> None:
    planner = new_planner()
    plan = planner.plan
    planner.apply(Upserted(service(health_port=32000)))
    assert dict(plan.ports) == {}, "nothing is planned before the update"
    assert planner.update().plan is plan
    assert set(plan.ports) == {WEB}
    assert set(plan.health_checks) == {service_key()}


def test_seventy_thousand_endpoints_behind_one_service_are_planned() -> None:
    def rows(start: int) -> Iterable[Row]:
        numbers = range(start, start + 1000)
        return (at(f"10.{n // 65536}.{n // 256 % 256}.{n % 256}") for n in numbers)

    slices = [endpoint_slice(*rows(n * 1000), name=f"web-{n}") for n in range(70)]
    planner = planner_of(service(), *slices)
    assert len(planner.plan.ports[WEB].internal.backends) == 70_000


# --- the node itself -----------------------------------------------------------------------------

GUARDED = service(ingress_ips=["192.0.2.1"], source_ranges=["10.1.0.0/16"])
IN_RANGES, NOT_IN_RANGES = "10.1.2.3", "10.2.2.3"


def test_a_change_of_the_nodes_zone_plans_anew_what_has_hints_top_11() -> None:
    planner = planner_of(
        node(zone="a"),
        service(),
        endpoint_slice(at(A, zones="a"), at(B, zones="b")),
        service("other", cluster_ips=[cluster_ip(11)]),
        endpoint_slice(at(C), name="other-1", service="other"),
    )
    assert endpoints(planner) == [f"{A}:8080"]
    assert tell(planner, node(zone="b")).changed == {WEB}
    assert endpoints(planner) == [f"{B}:8080"]
    assert planner.plan.ports[WEB].draining == (backend(A),)
    assert tell(planner, node(zone="c")).changed == {WEB}
    assert endpoints(planner) == [f"{A}:8080", f"{B}:8080"]
    assert tell(planner, node("192.0.2.9", zone="c")).changed == frozenset()
    assert tell(planner, Deleted(Node(NODE).key)).changed == frozenset()
    assert tell(planner, node(zone="a")).changed == {WEB}


def test_another_nodes_zone_means_nothing() -> None:
    planner = planner_of(
        node(zone="a"), service(), endpoint_slice(at(A, zones="a"), at(B, zones="b"))
    )
    assert tell(planner, Node("node-9", zone="b")).changed == frozenset()


@pytest.mark.parametrize(
    ("told", "local", "options", "expected"),
    [
        pytest.param(node(IN_RANGES), [], {}, True, id="LB-07 the Node's address is in"),
        pytest.param(node(NOT_IN_RANGES), [], {}, False, id="LB-06 it is not"),
        pytest.param(node(NOT_IN_RANGES, IN_RANGES), [], {}, True, id="any of them"),
        pytest.param(node("fd00::1"), [], {}, False, id="another family's is not"),
        pytest.param(
            node(NOT_IN_RANGES),
            [IN_RANGES, NOT_IN_RANGES],
            {},
            False,
            id="of what interfaces have the Node's count",
        ),
        pytest.param(
            node(NOT_IN_RANGES, IN_RANGES),
            [NOT_IN_RANGES],
            {},
            False,
            id="an address that is only translated to sends nothing",
        ),
        pytest.param(node(), [IN_RANGES], {}, True, id="a Node without addresses has its own"),
        pytest.param(None, [IN_RANGES, "127.0.0.1"], {}, True, id="no Node"),
        pytest.param(None, ["127.0.0.1"], {}, False, id="no Node, and no address of any use"),
        pytest.param(
            node(NOT_IN_RANGES), [], {"bind_address": IN_RANGES}, True, id="CFG-08 bindAddress"
        ),
        pytest.param(
            node(NOT_IN_RANGES), [], {"bind_address": "0.0.0.0"}, False, id="CFG-08 that says none"
        ),
    ],
)
def test_whether_the_node_itself_is_in_the_source_ranges(
    told: Node | None, local: list[str], options: dict[str, Any], expected: bool
) -> None:
    addresses = LocalAddresses(frozenset(map(parse_address, local)))
    planner = planner_of(GUARDED, addresses, *([told] if told else []), **options)
    port = planner.plan.ports[WEB]
    assert (port.source_ranges, port.node_in_ranges) == (GUARDED.source_ranges, expected)


def test_when_the_nodes_addresses_change_what_is_guarded_is_planned_anew() -> None:
    planner = planner_of(
        GUARDED, service("other", cluster_ips=[cluster_ip(11)]), node(NOT_IN_RANGES)
    )
    assert tell(planner, node(IN_RANGES)).changed == {WEB}
    assert tell(planner, node(IN_RANGES, NOT_IN_RANGES)).changed == frozenset()
    assert tell(planner, Deleted(node().key)).changed == {WEB}
    local = LocalAddresses(frozenset([parse_address(IN_RANGES)]))
    assert tell(planner, local).changed == {WEB}
    assert tell(planner, local).changed == frozenset()


@pytest.mark.parametrize(
    ("ranges", "ipv4", "ipv6"),
    [
        pytest.param([], [], [], id="LB-05 without ranges nobody is kept out"),
        pytest.param(["10.0.0.0/8"], ["10.0.0.0/8"], [], id="FAM-05 IPv6 is then unrestricted"),
        pytest.param(
            ["10.0.0.0/8", "fd00::/8"], ["10.0.0.0/8"], ["fd00::/8"], id="FAM-03 each its own"
        ),
    ],
)
def test_source_ranges_are_by_family(ranges: list[str], ipv4: list[str], ipv6: list[str]) -> None:
    planner = planner_of(
        service(
            cluster_ips=[cluster_ip(10), V6],
            ingress_ips=["192.0.2.1", "2001:db8::1"],
            source_ranges=ranges,
        )
    )
    ports = [planner.plan.ports[WEB], planner.plan.ports[port_name(family=Family.IPV6)]]
    assert [list(map(str, port.source_ranges)) for port in ports] == [ipv4, ipv6]
    assert [port.node_in_ranges for port in ports] == [not ipv4, not ipv6]


def test_ranges_of_a_service_without_a_load_balancers_address_guard_nothing_lb_05() -> None:
    planner = planner_of(service(external_ips=["192.0.2.1"], source_ranges=["10.0.0.0/8"]))
    port = planner.plan.ports[WEB]
    assert (port.source_ranges, port.node_in_ranges) == ((), True)


def test_source_ranges_that_change_step_by_step_b_155() -> None:
    planner = planner_of(GUARDED, service("other", cluster_ips=[cluster_ip(11)]))
    for ranges in (["10.0.0.0/8"], ["10.0.0.0/8", "192.0.2.0/24"], [], ["10.0.0.0/8"]):
        told = service(ingress_ips=["192.0.2.1"], source_ranges=ranges)
        assert tell(planner, told).changed == {WEB}
        assert list(map(str, planner.plan.ports[WEB].source_ranges)) == ranges


@pytest.mark.parametrize(
    ("options", "pod_cidrs", "detector", "families"),
    [
        pytest.param({}, (), PodDetector(), "", id="MASQ-10 no range is no detector"),
        pytest.param(
            {"cluster_cidrs": ("10.0.0.0/8",)},
            (),
            by_network("10.0.0.0/8"),
            "4",
            id="MASQ-09 ClusterCIDR",
        ),
        pytest.param(
            {"cluster_cidrs": ("fd00::/48", "10.0.0.0/8")},
            (),
            by_network("10.0.0.0/8", "fd00::/48"),
            "46",
            id="MASQ-09 of both families",
        ),
        pytest.param(
            {}, ("10.0.0.0/24",), PodDetector(), "", id="the Node's range is not asked for"
        ),
        pytest.param(
            {"detect_local_mode": "NodeCIDR", "cluster_cidrs": ("10.0.0.0/8",)},
            ("fd00::/64", "nonsense", "fd01::/64"),
            by_network("fd00::/64"),
            "6",
            id="MASQ-09 NodeCIDR, the first of a family",
        ),
        pytest.param(
            {"detect_local_mode": "BridgeInterface"}, (), PodDetector(), "", id="MASQ-10 no bridge"
        ),
        pytest.param(
            {
                "detect_local_mode": "BridgeInterface",
                "pod_bridge": "cni0",
                "pod_device_prefix": "x",
            },
            ("10.0.0.0/24",),
            PodDetector(bridge="cni0"),
            "46",
            id="MASQ-09 a bridge",
        ),
        pytest.param(
            {"detect_local_mode": "InterfaceNamePrefix", "pod_device_prefix": "veth"},
            (),
            PodDetector(device_prefix="veth"),
            "46",
            id="MASQ-09 a prefix",
        ),
    ],
)
def test_how_pods_are_told(
    options: dict[str, Any], pod_cidrs: tuple[str, ...], detector: PodDetector, families: str
) -> None:
    planner = planner_of(node(pod_cidrs=pod_cidrs), **options)
    assert planner.plan.pods == detector
    assert planner.plan.tells_pods == {Family(int(each)) for each in families}
    if options.get("detect_local_mode") == "NodeCIDR":
        assert planner_of(**options).plan.pods == PodDetector(), "SYNC-10 it is not known yet"
        assert tell(planner, Deleted(node().key)).plan.pods == PodDetector()


def test_masquerade_all_is_in_the_plan_masq_01() -> None:
    assert not planner_of().plan.masquerade_all
    assert planner_of(masquerade_all=True).plan.masquerade_all


def test_node_ports_follow_the_addresses_that_come_and_go_np_05() -> None:
    planner = planner_of(service())
    assert planner.plan.node_ports == NodePorts(frozenset(), frozenset(Family))
    for texts in (["192.0.2.1"], ["192.0.2.1", "fd00::1"], ["fd00::1"], []):
        addresses = frozenset(map(parse_address, texts))
        update = tell(planner, LocalAddresses(addresses))
        assert update.changed == frozenset(), "no service port has another plan for it"
        assert update.plan.node_ports.addresses == addresses
        assert update.plan is planner.plan


def test_node_ports_at_the_nodes_main_addresses_follow_the_node_np_06() -> None:
    local = LocalAddresses(frozenset(map(parse_address, ["192.0.2.1", "192.0.2.2"])))
    planner = planner_of(local, node_port_addresses=("primary",))
    assert planner.plan.node_ports == NodePorts()
    tell(planner, node("192.0.2.1", "192.0.2.2"))
    assert planner.plan.node_ports.addresses == {parse_address("192.0.2.1")}
    tell(planner, node("192.0.2.2"))
    assert planner.plan.node_ports.addresses == {parse_address("192.0.2.2")}


# --- health checks -------------------------------------------------------------------------------


def local_counts(planner: Planner) -> dict[str, tuple[int, int]]:
    return {
        f"{key.namespace}/{key.name}": (check.port, check.endpoints)
        for key, check in planner.plan.health_checks.items()
    }


@pytest.mark.parametrize(
    ("slices", "count"),
    [
        pytest.param([], 0, id="HC-11 none at all"),
        pytest.param([endpoint_slice(at(A), at(B))], 0, id="TV-E18 remote only"),
        pytest.param([endpoint_slice(at(A, NODE), at(B))], 1, id="TV-E18 one here"),
        pytest.param(
            [endpoint_slice(at(A, NODE), ports=[P80, P81])], 1, id="TV-E18 two ports, one address"
        ),
        pytest.param(
            [
                endpoint_slice(at(A, NODE), at(B, NODE), name="a", ports=[P80]),
                endpoint_slice(at(A, NODE), at(C, NODE), name="b", ports=[P81]),
            ],
            3,
            id="HC-06 distinct over all ports",
        ),
        pytest.param(
            [endpoint_slice(at(A, NODE)), endpoint_slice(at(A6, NODE), name="six")],
            1,
            id="HC-06 a pod has an address of each family",
        ),
        pytest.param(
            [endpoint_slice(at(A, NODE, TERMINATING), at(B, NODE, UNUSABLE), at(C))],
            0,
            id="HC-06 B-49 TV-E18 terminating and unready ones do not count",
        ),
        pytest.param(
            [endpoint_slice(at(A, NODE)), endpoint_slice(at(A, NODE, TERMINATING), name="b")],
            1,
            id="EP-02 the best state of an endpoint in two slices",
        ),
        pytest.param([endpoint_slice(at(A, NODE), ports=[])], 0, id="a slice without ports"),
        pytest.param(
            [endpoint_slice(at(A, NODE), service="other")], 0, id="another Service's slice"
        ),
    ],
)
def test_a_health_check_counts_the_ready_endpoints_here(
    slices: list[EndpointSlice], count: int
) -> None:
    planner = planner_of(service(health_port=32000), service("other"), *slices)
    assert local_counts(planner) == {"default/web": (32000, count)}


def test_a_health_check_follows_its_service_hc_08_tv_f24() -> None:
    planner = planner_of(service(health_port=32000), endpoint_slice(at(A, NODE)))
    assert local_counts(planner) == {"default/web": (32000, 1)}
    tell(planner, endpoint_slice(at(A, NODE, TERMINATING)))
    assert local_counts(planner) == {"default/web": (32000, 0)}, "TV-F24 the key stays"
    tell(planner, service(health_port=32001))
    assert local_counts(planner) == {"default/web": (32001, 0)}, "another number"
    tell(planner, service())
    assert local_counts(planner) == {}, "POL-10 the policy is Cluster again"
    tell(planner, service(health_port=32000))
    assert tell(planner, Deleted(service_key())).plan.health_checks == {}
    tell(planner, service(health_port=32000, ports=[]))
    assert local_counts(planner) == {}, "nothing is served"


# --- external addresses --------------------------------------------------------------------------

TAKEN = "192.0.2.1"


def kinds(planner: Planner, name: ServicePortName = WEB) -> list[str]:
    return [each.kind.value for each in planner.plan.ports[name].frontends]


def test_a_service_that_changes_its_type_in_every_direction_svc_05() -> None:
    http = ServicePort("http", Protocol.TCP, 80, 30080)
    types: dict[str, tuple[ApiObject | Event, list[str]]] = {
        "ClusterIP": (service(), ["ClusterIP"]),
        "NodePort": (service(ports=[http]), ["ClusterIP", "NodePort"]),
        "LoadBalancer": (
            service(ports=[http], ingress_ips=[TAKEN]),
            ["ClusterIP", "NodePort", "LoadBalancer"],
        ),
        "without a nodePort": (service(ingress_ips=[TAKEN]), ["ClusterIP", "LoadBalancer"]),
        "externalIPs": (service(external_ips=[TAKEN]), ["ClusterIP", "ExternalIP"]),
        "ExternalName": (Deleted(service_key()), []),
    }
    planner = planner_of(endpoint_slice(at(A)))
    for before, after in itertools.permutations(types.values(), 2):
        tell(planner, before[0])
        assert tell(planner, after[0]).changed == {WEB}
        assert (kinds(planner) if WEB in planner.plan.ports else []) == after[1]
        assert not planner.rejected


def test_an_external_ip_that_is_not_allowed_is_reported_and_mended_sec_02() -> None:
    planner = planner_of(external_ips=("198.51.100.0/24",))
    update = tell(planner, service(external_ips=[TAKEN]))
    assert kinds(planner) == ["ClusterIP"]
    assert update.rejected == (
        Rejected(
            service_key(),
            f"spec.externalIPs {TAKEN} is not served: --external-ips does not allow it",
        ),
    )
    update = tell(planner, service(external_ips=["198.51.100.7"]))
    assert (len(update.mended), kinds(planner)) == (1, ["ClusterIP", "ExternalIP"])


def test_a_port_that_lost_its_cluster_ip_is_served_at_its_node_port() -> None:
    http = ServicePort("http", Protocol.TCP, 80, 30080)
    planner = planner_of(
        service("old", created="2025-01-01T00:00:00Z"), service(ports=[http]), endpoint_slice(at(A))
    )
    assert (kinds(planner), len(planner.rejected)) == (["NodePort"], 1)
    assert planner.plan.ports[WEB].external == planner.plan.ports[WEB].cluster
    assert tell(planner, Deleted(service_key("old"))).changed == {WEB, port_name("old")}
    assert (kinds(planner), len(planner.rejected)) == (["ClusterIP", "NodePort"], 0)
