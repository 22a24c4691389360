# SPDX-License-Identifier: Apache-2.0
"""The union of a Service's slices for one service port."""

from __future__ import annotations

import itertools

import pytest

from ebpflb.model import (
    Backend,
    EndpointSlice,
    Family,
    Hints,
    Protocol,
    ServicePortName,
    SlicePort,
)
from ebpflb.planner.endpoints import usable_endpoints
from tests.builders import (
    NODE,
    OTHER_NODE,
    READY,
    TERMINATING,
    UNUSABLE,
    Row,
    at,
    backend,
    endpoint_slice,
    pod_ip,
    port_name,
)

A, B, C = pod_ip(10), pod_ip(11), pod_ip(12)
A6 = pod_ip(10, Family.IPV6)
HTTP = SlicePort("http", Protocol.TCP, 8080)


def union(*slices: EndpointSlice, name: ServicePortName | None = None) -> list[Backend]:
    return list(usable_endpoints(slices, name or port_name(), node=NODE).backends)


@pytest.mark.parametrize(
    ("ports", "name", "numbers"),
    [
        pytest.param([HTTP], port_name(), [8080], id="PORT-03 by name"),
        pytest.param([HTTP], port_name(port="web"), [], id="PORT-03 another name"),
        pytest.param([HTTP], port_name(port=""), [], id="PORT-03 a named one is not unnamed"),
        pytest.param([HTTP], port_name(protocol=Protocol.UDP), [], id="PORT-02 another protocol"),
        pytest.param(
            [HTTP, SlicePort("http", Protocol.UDP, 53)],
            port_name(protocol=Protocol.UDP),
            [53],
            id="B-85 one name in two protocols",
        ),
        pytest.param([SlicePort("", Protocol.TCP, 1)], port_name(port=""), [1], id="unnamed"),
        pytest.param([], port_name(), [], id="a slice without ports adds nothing"),
        pytest.param([HTTP], port_name(family=Family.IPV6), [], id="FAM-06 another family"),
    ],
)
def test_a_slices_port_is_matched_by_name_and_protocol(
    ports: list[SlicePort], name: ServicePortName, numbers: list[int]
) -> None:
    found = union(endpoint_slice(at(A), ports=ports), name=name)
    assert [each.port for each in found] == numbers


def test_each_family_has_its_own_endpoints_fam_01() -> None:
    slices = endpoint_slice(at(A), name="v4"), endpoint_slice(at(A6), name="v6")
    assert union(*slices) == [backend(A)]
    assert union(*slices, name=port_name(family=Family.IPV6)) == [backend(A6)]


def test_slices_may_map_a_named_port_to_different_numbers_port_03() -> None:
    other = SlicePort("http", Protocol.TCP, 9090)
    assert union(endpoint_slice(at(A)), endpoint_slice(at(B), ports=[other])) == [
        backend(A, 8080),
        backend(B, 9090),
    ]


@pytest.mark.parametrize(
    ("one", "other", "counts"),
    [
        pytest.param(at(A), at(A), backend(A), id="B-61 equal copies"),
        pytest.param(at(A, NODE), at(A), backend(A, local=True), id="EP-02 the local one wins"),
        pytest.param(
            at(A, state=TERMINATING), at(A, state=READY), backend(A), id="EP-02 ready wins"
        ),
        pytest.param(
            at(A, state=UNUSABLE),
            at(A, state=TERMINATING),
            backend(A, terminating=True),
            id="EP-02 then serving and terminating",
        ),
        pytest.param(
            at(A, NODE, TERMINATING),
            at(A, OTHER_NODE, READY),
            backend(A, local=True),
            id="EP-02 each wins by itself",
        ),
        pytest.param(
            at(A, NODE, UNUSABLE), at(A, OTHER_NODE, UNUSABLE), None, id="TOP-13 neither is usable"
        ),
    ],
)
def test_an_endpoint_in_two_slices_counts_once_tv_e15(
    one: Row, other: Row, counts: Backend | None
) -> None:
    expected = [counts] if counts else []
    for first, second in ((one, other), (other, one)):
        slices = endpoint_slice(first, name="a"), endpoint_slice(second, name="b")
        assert union(*slices) == expected
        assert union(endpoint_slice(first, second)) == expected, "B-63 twice in one slice"


def test_the_order_of_slices_and_endpoints_does_not_matter_ep_03_ep_07() -> None:
    slices = [endpoint_slice(at(C), at(A)), endpoint_slice(at(B)), endpoint_slice(at(A6))]
    for order in itertools.permutations(slices):
        assert union(*order) == [backend(A), backend(B), backend(C)]


def test_the_same_address_at_two_ports_is_two_endpoints_ep_07() -> None:
    ports = [HTTP, SlicePort("http", Protocol.TCP, 80)]
    assert union(endpoint_slice(at(A), ports=ports)) == [backend(A, 80), backend(A, 8080)]


def test_an_endpoint_that_is_terminating_from_the_start_takes_nothing_b_59() -> None:
    assert union(endpoint_slice(at(A, state=UNUSABLE), at(B))) == [backend(B)]


def test_an_endpoint_without_a_node_is_not_local_ep_04() -> None:
    piece = endpoint_slice(at(A, ""))
    assert union(piece) == [backend(A)]
    assert usable_endpoints([piece], port_name(), node="").backends == (backend(A),)


# --- hints ---------------------------------------------------------------------------------------


def hints_of(*slices: EndpointSlice) -> tuple[Hints, ...]:
    return usable_endpoints(slices, port_name(), node=NODE).hints


def test_hints_are_a_column_beside_the_backends() -> None:
    piece = endpoint_slice(at(B, zones="b"), at(C), at(A, zones="ab", nodes=[NODE]))
    assert union(piece) == [backend(A), backend(B), backend(C)]
    assert hints_of(piece) == (Hints(("a", "b"), (NODE,)), Hints(("b",)), Hints())


def test_there_is_no_column_where_nobody_has_hints() -> None:
    assert hints_of(endpoint_slice(at(A), at(B))) == ()


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        pytest.param(at(A, zones="a"), at(A, zones="a"), Hints(("a",)), id="equal copies"),
        pytest.param(at(A, zones="a"), at(A, zones="b"), Hints(("a", "b")), id="both count"),
        pytest.param(at(A, zones="a"), at(A), Hints(("a",)), id="one without says nothing"),
        pytest.param(
            at(A, zones="a"),
            at(A, state=TERMINATING, zones="b"),
            Hints(("a",)),
            id="those of the better state alone",
        ),
    ],
)
def test_an_endpoint_in_two_slices_has_the_hints_of_both(
    one: Row, other: Row, expected: Hints
) -> None:
    for first, second in ((one, other), (other, one)):
        slices = endpoint_slice(first, name="a"), endpoint_slice(second, name="b")
        assert hints_of(*slices) == hints_of(endpoint_slice(first, second)) == (expected,)


def test_unusable_endpoints_have_no_place_in_the_column() -> None:
    piece = endpoint_slice(at(A, state=UNUSABLE, zones="a"), at(B, zones="b"))
    assert hints_of(piece) == (Hints(("b",)),)


def test_slices_with_and_without_hints_are_one_column() -> None:
    slices = endpoint_slice(at(A, zones="a")), endpoint_slice(at(B))
    assert hints_of(*slices) == (Hints(("a",)), Hints())
