"""What the Node object means for /healthz (HZ-05) and for the agent's life (SYNC-11)."""

from __future__ import annotations

import msgspec
import pytest

from ebpflb.model import Node, parse_address
from ebpflb.nodelife import is_eligible, node_ips, why_restart

IN_4, OUT_4, IN_6 = (parse_address(text) for text in ("10.0.0.1", "192.0.2.1", "fd00::1"))
NODE = Node("n1", addresses=(IN_4, OUT_4), pod_cidrs=("10.1.0.0/24",))


def node(**changes: object) -> Node:
    return msgspec.structs.replace(NODE, **changes)


@pytest.mark.parametrize(
    ("one", "eligible"),
    [
        (NODE, True),
        (None, False),
        (node(deleting=True), False),
        (node(taints=("ToBeDeletedByClusterAutoscaler",)), False),
        (node(taints=("node.kubernetes.io/unschedulable", "dedicated")), True),
    ],
    ids=[
        "a plain Node is eligible",
        "no Node is not",
        "one that is being deleted is not",
        "one that the autoscaler takes away is not",
        "one with other taints is",
    ],
)
def test_hz_05_which_node_may_have_new_traffic(one: Node | None, eligible: bool) -> None:
    assert is_eligible(one) is eligible


@pytest.mark.parametrize(
    ("addresses", "expected"),
    [
        ((), ()),
        ((IN_4,), (IN_4,)),
        ((IN_4, OUT_4), (IN_4,)),
        ((IN_4, OUT_4, IN_6), (IN_4, IN_6)),
        ((IN_6, IN_4), (IN_6, IN_4)),
    ],
    ids=["none", "one", "the first of a family", "the first of each", "in the Node's order"],
)
def test_cfg_55_the_nodes_own_addresses(
    addresses: tuple[bytes, ...], expected: tuple[bytes, ...]
) -> None:
    assert node_ips(node(addresses=addresses)) == expected
    assert node_ips(None) == ()


@pytest.mark.parametrize(
    ("known", "now", "uses_pod_cidrs", "why"),
    [
        (NODE, NODE, True, ""),
        (None, NODE, True, ""),
        (None, None, True, ""),
        (NODE, None, False, "Node n1 is deleted"),
        (
            NODE,
            node(addresses=(OUT_4,)),
            False,
            "the addresses of Node n1 changed from 10.0.0.1 to 192.0.2.1",
        ),
        (
            NODE,
            node(addresses=(IN_4, IN_6)),
            False,
            "the addresses of Node n1 changed from 10.0.0.1 to 10.0.0.1, fd00::1",
        ),
        (NODE, node(addresses=(IN_4,)), False, ""),
        (NODE, node(addresses=()), False, ""),
        (node(addresses=()), NODE, False, ""),
        (NODE, node(pod_cidrs=("10.2.0.0/24",)), False, ""),
        (
            NODE,
            node(pod_cidrs=("10.2.0.0/24",)),
            True,
            "the podCIDRs of Node n1 changed from 10.1.0.0/24 to 10.2.0.0/24",
        ),
        (
            node(pod_cidrs=()),
            NODE,
            True,
            "the podCIDRs of Node n1 changed from none to 10.1.0.0/24",
        ),
        (NODE, node(taints=("x",), zone="b", deleting=True), True, ""),
    ],
    ids=[
        "nothing changed",
        "the first Node that is seen",
        "no Node at all",
        "the Node is deleted",
        "another address",
        "a first address of the other family",
        "an address that does not count is gone",
        "all addresses are gone for a moment",
        "the first addresses of a Node that had none",
        "other podCIDRs that nobody reads",
        "other podCIDRs in mode NodeCIDR",
        "first podCIDRs in mode NodeCIDR",
        "anything else",
    ],
)
def test_sync_11_when_the_agent_must_be_started_anew(
    known: Node | None, now: Node | None, uses_pod_cidrs: bool, why: str
) -> None:
    assert why_restart(known, now, uses_pod_cidrs=uses_pod_cidrs) == why
