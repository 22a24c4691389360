"""What of a Node, and of a slice's annotations, is read for the agent's own life."""

from __future__ import annotations

from typing import Any

import pytest

from ebpflb.model import EndpointSlice, Node, Upserted, parse_address
from tests.builders import node_object, slice_object, told


def node(**parts: Any) -> Node:
    read = told({**node_object(), **parts})
    assert isinstance(read, Upserted)
    assert isinstance(read.obj, Node)
    return read.obj


def addresses(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"addresses": [{"type": kind, "address": text} for kind, text in pairs]}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, ()),
        ({"addresses": None}, ()),
        (addresses(("Hostname", "n1"), ("InternalIP", "10.0.0.1")), ("10.0.0.1",)),
        (
            addresses(
                ("ExternalIP", "192.0.2.1"), ("InternalIP", "fd00::1"), ("InternalIP", "10.0.0.1")
            ),
            ("fd00::1", "10.0.0.1", "192.0.2.1"),
        ),
        (addresses(("InternalIP", "010.0.0.1")), ("10.0.0.1",)),
    ],
    ids=[
        "no status",
        "no addresses",
        "a name is no address",
        "CFG-55: internal addresses before external ones",
        "FAM-09: leading zeros",
    ],
)
def test_a_nodes_addresses(status: Any, expected: tuple[str, ...]) -> None:
    assert node(status=status).addresses == tuple(map(parse_address, expected))


def test_an_address_that_is_none_costs_itself_alone() -> None:
    read = node(status=addresses(("InternalIP", "nonsense"), ("InternalIP", "10.0.0.1")))
    assert read.addresses == (parse_address("10.0.0.1"),)
    assert read.problems == ("status.addresses[0].address 'nonsense' is no IP address",)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, ()),
        ({"podCIDR": "10.1.0.0/24"}, ("10.1.0.0/24",)),
        (
            {"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.1.0.0/24", "fd01::/64"]},
            ("10.1.0.0/24", "fd01::/64"),
        ),
        ({"podCIDR": "", "podCIDRs": [None]}, ()),
    ],
    ids=["no spec", "the old field", "both", "empty"],
)
def test_a_nodes_pod_cidrs(spec: Any, expected: tuple[str, ...]) -> None:
    assert node(spec=spec).pod_cidrs == expected


def test_a_nodes_taints_are_their_keys() -> None:
    taints = [{"key": "a", "effect": "NoSchedule"}, None, {"value": "x"}, {"key": "b"}]
    assert node(spec={"taints": taints}).taints == ("a", "b")


@pytest.mark.parametrize(
    ("timestamp", "deleting"), [(None, False), ("", False), ("2026-01-31T23:59:59Z", True)]
)
def test_a_node_that_is_being_deleted(timestamp: str | None, deleting: bool) -> None:
    metadata = {"name": "n1", "deletionTimestamp": timestamp}
    assert node(metadata=metadata).deleting is deleting


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-01-31T23:59:59Z", 1769903999.0),
        ("2026-01-31T23:59:59.123456789Z", 1769903999.123456),
        ("2026-02-01T00:59:59+01:00", 1769903999.0),
        ("2026-01-31T23:59:59", 0.0),
        ("yesterday", 0.0),
        ("", 0.0),
        (None, 0.0),
    ],
    ids=[
        "in UTC",
        "with nanoseconds",
        "with an offset",
        "without one: no time",
        "no time at all",
        "empty",
        "null",
    ],
)
def test_met_30_when_the_change_of_a_slice_was_made(text: str | None, seconds: float) -> None:
    obj = slice_object()
    obj["metadata"]["annotations"] = {"endpoints.kubernetes.io/last-change-trigger-time": text}
    read = told(obj)
    assert isinstance(read, Upserted)
    assert isinstance(read.obj, EndpointSlice)
    assert read.obj.triggered_s == seconds
    assert read.obj.problems == ()
