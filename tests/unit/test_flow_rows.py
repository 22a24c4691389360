# SPDX-License-Identifier: Apache-2.0
"""What `map dump` makes of the flow tables: one row for each flow, whatever the LRU left of it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from ebpflb.datapath.ebpf import abi, flowrows
from ebpflb.datapath.ebpf.flowrows import FlowRow, FragmentRow
from ebpflb.model import Family, Protocol, parse_address
from tests.flows import NOW_NS, Made, made, only

C = abi.CONSTANTS
FIN, RST = C["FLOW_SEEN_FIN"], C["FLOW_SEEN_RST"]
TCP, UDP = Protocol.TCP, Protocol.UDP
NAMES = {7: "default/web:http", 8: "kube-system/dns"}


def rows(*there: Made, table: str = "conntrack") -> list[FlowRow]:
    """The same in whatever order the kernel tells them."""
    items = [item for flow in there for item in flow.items]
    found = flowrows.flow_rows(table, items, NAMES, now_ns=NOW_NS)
    assert found == flowrows.flow_rows(table, reversed(items), NAMES, now_ns=NOW_NS)
    return found


def row(flow: Made, table: str = "conntrack") -> FlowRow:
    (found,) = rows(flow, table=table)
    return found


def test_a_flow_is_one_row_from_the_client_to_the_backend() -> None:
    flow = made(TCP, id=7, idle=(30, 2.5), created_ns=NOW_NS - 90 * 10**9)
    assert row(flow) == FlowRow(
        protocol="TCP",
        client="192.0.2.9",
        client_port=40000,
        frontend="10.96.0.10",
        frontend_port=80,
        backend="10.244.1.5",
        backend_port=8080,
        port_at_backend=40000,
        state="open",
        flags=[],
        halves=["forward", "reverse"],
        idle_seconds=2.5,
        age_seconds=90.0,
        id=7,
        service="default/web:http",
    )


def test_either_half_tells_the_whole_flow() -> None:
    flow = made(UDP, id=8, port_at_backend=1234)
    whole = row(flow)
    for kind in ("forward", "reverse"):
        found = row(only(flow, kind))
        assert found.halves == [kind]
        for key in FlowRow.__struct_fields__:
            if key != "halves":
                assert getattr(found, key) == getattr(whole, key), key
    assert (whole.client_port, whole.port_at_backend) == (40000, 1234)


def test_a_flow_of_ipv6_likewise() -> None:
    flow = made(
        TCP, client=("fd60::9", 40000), frontend=("fd50::1", 30080), backend=("fd44::5", 8080)
    )
    found = row(flow)
    assert (found.client, found.frontend, found.backend) == ("fd60::9", "fd50::1", "fd44::5")
    assert found.halves == ["forward", "reverse"]


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_a_flow_is_as_old_as_the_older_half(kind: str) -> None:
    """A half that was pushed out and put back begins anew."""
    long_ago, just_now = (
        made(TCP, created_ns=NOW_NS - seconds * 10**9).items for seconds in (90, 1)
    )
    items = (long_ago[0], just_now[1]) if kind == "reverse" else (just_now[0], long_ago[1])
    assert row(Made(TCP, items)).age_seconds == 90.0


@pytest.mark.parametrize(
    ("table", "options", "state"),
    [
        pytest.param("flows_new", {"answered": False}, "new", id="nobody has answered"),
        pytest.param("flows_new", {}, "open", id="answered, and the client says no more"),
        pytest.param("conntrack", {}, "open", id="a conversation"),
        pytest.param("conntrack", {"seen": (FIN, 0)}, "closing", id="the client has finished"),
        pytest.param("conntrack", {"seen": (0, FIN)}, "closing", id="the backend has finished"),
        pytest.param("conntrack", {"seen": (FIN, FIN)}, "closed", id="both have"),
        pytest.param("conntrack", {"seen": (0, RST)}, "closed", id="one has reset"),
    ],
)
def test_a_flow_has_a_state(table: str, options: dict[str, Any], state: str) -> None:
    assert row(made(TCP, **options), table).state == state


def test_the_node_itself_and_source_nat_are_flags() -> None:
    flags = C["FLOW_MASQUERADE"] | C["FLOW_HOST"]
    assert row(made(TCP, flags=flags)).flags == ["masquerade", "host"]


def test_what_is_foreign_has_no_backend() -> None:
    found = row(made(UDP, frontend=("192.168.50.1", 30080), foreign=True), "flows_new")
    assert (found.state, found.backend, found.backend_port, found.port_at_backend) == (
        "foreign",
        None,
        None,
        None,
    )
    assert (found.frontend, found.frontend_port, found.service) == ("192.168.50.1", 30080, None)


def test_two_frontends_of_one_backend_are_two_flows() -> None:
    """Also where the LRU has left of each what would lie where the other's half is."""
    one = made(TCP, id=7)
    other = made(TCP, frontend=("10.96.0.99", 80), id=8)
    found = rows(only(one, "forward"), only(other, "reverse"))
    assert [(row.frontend, row.halves) for row in found] == [
        ("10.96.0.10", ["forward"]),
        ("10.96.0.99", ["reverse"]),
    ]
    found = rows(only(one, "forward"), only(other, "forward"))
    assert [(row.frontend, row.halves) for row in found] == [
        ("10.96.0.10", ["forward"]),
        ("10.96.0.99", ["forward"]),
    ]


def test_rows_are_by_service_protocol_and_client() -> None:
    found = rows(
        made(UDP, id=8, client=("192.0.2.9", 1025)),
        made(UDP, id=99, client=("192.0.2.1", 1024)),
        made(TCP, id=7, client=("192.0.2.10", 1024)),
        made(TCP, id=7, client=("192.0.2.9", 1026)),
        made(TCP, id=7, client=("192.0.2.9", 1024)),
    )
    assert [(row.service, row.client, row.client_port) for row in found] == [
        ("default/web:http", "192.0.2.9", 1024),
        ("default/web:http", "192.0.2.9", 1026),
        ("default/web:http", "192.0.2.10", 1024),
        ("kube-system/dns", "192.0.2.9", 1025),
        (None, "192.0.2.1", 1024),
    ]


def fragment(source: str, target: str, number: bytes) -> tuple[bytes, bytes]:
    key = flowrows.FRAGMENT_KEY.make(
        source=parse_address(source), target=parse_address(target), id=number, protocol=UDP
    )
    value = flowrows.FRAGMENT.make(source_port=(40000).to_bytes(2), target_port=(53).to_bytes(2))
    return key, value


@pytest.mark.parametrize("family", Family, ids=lambda family: family.label)
def test_a_head_of_fragments_shows_its_ports(family: Family) -> None:
    if family is Family.IPV4:
        ends = "192.0.2.9", "10.96.0.10"
        number = int.from_bytes((4711).to_bytes(2), sys.byteorder).to_bytes(4, sys.byteorder)
    else:
        ends = "fd60::9", "fd50::1"
        number = (4711).to_bytes(4)
    assert flowrows.fragment_rows([fragment(*ends, number)]) == [
        FragmentRow("UDP", *ends, 4711, 40000, 53)
    ]
