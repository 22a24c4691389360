# SPDX-License-Identifier: Apache-2.0
"""Upstream's endpoint vectors (TV-E01 to TV-E19): slices that change, and what it makes of a plan.

All ports are UDP, as upstream has them. What its conntrack and annotation vectors (TV-E17, TV-E20)
ask for is not the planner's; TV-E15 is in test_endpoints.py, TV-E18 in test_plan.py.
"""

from __future__ import annotations

import pytest

from ebpflb.model import (
    ApiObject,
    Deleted,
    Event,
    Family,
    Protocol,
    ServicePort,
    ServicePortName,
    SlicePort,
    Upserted,
    format_endpoint,
)
from ebpflb.planner.plan import Planner, PlanUpdate
from tests.builders import (
    NODE,
    Row,
    at,
    cluster_ip,
    endpoint_slice,
    new_planner,
    pod_ip,
    port_name,
    service,
    slice_key,
)

A, B, C = pod_ip(10), pod_ip(11), pod_ip(12)
A6 = pod_ip(10, Family.IPV6)
P11 = SlicePort("http", Protocol.UDP, 11)
P12 = SlicePort("more", Protocol.UDP, 12)
BOTH = [ServicePort("http", Protocol.UDP, 80), ServicePort("more", Protocol.UDP, 81)]
WEB = port_name(protocol=Protocol.UDP)
MORE = port_name(port="more", protocol=Protocol.UDP)

TWO_SLICES = [
    endpoint_slice(at(A, NODE), ports=[P11], name="a"),
    endpoint_slice(at(B, NODE), ports=[P11], name="b"),
]
TWO_PORTS_HERE = [endpoint_slice(at(A, NODE), ports=[P11, P12])]
MORE_HERE = endpoint_slice(at(B, NODE), ports=[P11, P12], name="web-2")


def tell(planner: Planner, *changes: ApiObject | Event) -> PlanUpdate:
    for change in changes:
        planner.apply(Upserted(change) if isinstance(change, ApiObject) else change)
    return planner.update()


def planner_of(*changes: ApiObject | Event) -> Planner:
    planner = new_planner()
    tell(planner, *changes)
    return planner


def endpoints(planner: Planner, name: ServicePortName = WEB) -> list[str]:
    backends = planner.plan.ports[name].cluster.backends
    return [format_endpoint(each.address, each.port) for each in backends]


@pytest.mark.parametrize(
    ("before", "after", "changed", "web", "more"),
    [
        pytest.param([], [], set(), [], [], id="TV-E01 nothing"),
        pytest.param(
            [endpoint_slice(at(A, NODE), ports=[P11])],
            [endpoint_slice(at(A, NODE), ports=[P11])],
            set(),
            [f"{A}:11"],
            [],
            id="TV-E02 no change",
        ),
        pytest.param(
            TWO_SLICES, TWO_SLICES, set(), [f"{A}:11", f"{B}:11"], [], id="TV-E03 several slices"
        ),
        pytest.param(
            TWO_PORTS_HERE,
            TWO_PORTS_HERE,
            set(),
            [f"{A}:11"],
            [f"{A}:12"],
            id="TV-E03 several ports",
        ),
        pytest.param(
            [*TWO_PORTS_HERE, MORE_HERE],
            [MORE_HERE, *TWO_PORTS_HERE],
            set(),
            [f"{A}:11", f"{B}:11"],
            [f"{A}:12", f"{B}:12"],
            id="TV-E03 several slices of several ports",
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
            [endpoint_slice(at(A), ports=[SlicePort("more", Protocol.UDP, 11)])],
            {WEB, MORE},
            [],
            [f"{A}:11"],
            id="TV-E11 a port renamed",
        ),
        pytest.param(
            [endpoint_slice(at(A), ports=[P11])],
            [endpoint_slice(at(A), ports=[SlicePort("http", Protocol.UDP, 22)])],
            {WEB},
            [f"{A}:22"],
            [],
            id="TV-E12 a port renumbered",
        ),
        pytest.param(
            [endpoint_slice(at(A), name="a", ports=[P11])],
            [endpoint_slice(at(A), name="b", ports=[P11]), Deleted(slice_key("a"))],
            set(),
            [f"{A}:11"],
            [],
            id="TV-E16 an endpoint moves, added first",
        ),
        pytest.param(
            [endpoint_slice(at(A), name="a", ports=[P11])],
            [Deleted(slice_key("a")), endpoint_slice(at(A), name="b", ports=[P11])],
            set(),
            [f"{A}:11"],
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
    planner = planner_of(service(ports=BOTH), *before)
    assert tell(planner, *after).changed == changed
    assert endpoints(planner) == web
    assert endpoints(planner, MORE) == more


def served(ns: int) -> ApiObject:
    return service(
        namespace=f"ns{ns}", cluster_ips=[cluster_ip(ns)], ports=BOTH[:1], health_port=32000 + ns
    )


def local_counts(planner: Planner) -> dict[str, int]:
    return {key.namespace: one.endpoints for key, one in planner.plan.health_checks.items()}


def test_local_counts_over_slices_and_services_tv_e04() -> None:
    planner = planner_of(
        served(1),
        served(2),
        *(
            endpoint_slice(*rows, namespace=f"ns{ns}", name=name, ports=ports)
            for ns, name, rows, ports in (
                (1, "a", [at(A), at(B, NODE)], [P11]),
                (1, "b", [at(C, NODE)], [P12]),
                (2, "a", [at(A, NODE), at(B)], [P11, P12]),
            )
        ),
    )
    assert local_counts(planner) == {"ns1": 2, "ns2": 1}


@pytest.mark.parametrize(("node", "count"), [(NODE, 1), ("", 0)])
def test_the_first_endpoint_and_the_last_tv_e05_tv_e06(node: str, count: int) -> None:
    planner = planner_of(served(1))
    piece = endpoint_slice(at(A, node), namespace="ns1", ports=[P11])
    assert tell(planner, piece).changed == {port_name(namespace="ns1", protocol=Protocol.UDP)}
    assert local_counts(planner) == {"ns1": count}
    tell(planner, Deleted(piece.key))
    assert local_counts(planner) == {"ns1": 0}


def test_many_changes_in_one_update_give_the_exact_union_tv_e13() -> None:
    def piece(ns: int, name: str, *rows: Row) -> ApiObject:
        return endpoint_slice(*rows, namespace=f"ns{ns}", name=name, ports=[P11])

    planner = planner_of(
        *(served(n) for n in range(1, 5)),
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
    names = [port_name(namespace=f"ns{n}", protocol=Protocol.UDP) for n in range(1, 5)]
    assert update.changed == {*names[:3]}
    assert [endpoints(planner, name) for name in names] == [
        [f"{A}:11", f"{B}:11"],
        [f"{A}:11"],
        [f"{C}:11"],
        [f"{A}:11", f"{B}:11"],
    ]


def test_the_other_familys_slices_change_nothing_tv_e19() -> None:
    planner = planner_of(service(ports=BOTH), endpoint_slice(at(A), ports=[P11]))
    assert tell(planner, endpoint_slice(at(A6), name="web-6", ports=[P11])).changed == frozenset()
