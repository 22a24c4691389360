# SPDX-License-Identifier: Apache-2.0
"""What this node's Node object means for the agent's own life and for what /healthz says.

Pure. This file must not know where a Node comes from, nor how an agent ends.
"""

from __future__ import annotations

from typing import Final

from ebpflb.model import Address, Node, family_of, format_address

AUTOSCALER_TAINT: Final = "ToBeDeletedByClusterAutoscaler"


def is_eligible(node: Node | None) -> bool:
    """Whether load balancers may send this node new traffic (HZ-05)."""
    return node is not None and not node.deleting and AUTOSCALER_TAINT not in node.taints


def node_ips(node: Node | None) -> tuple[Address, ...]:
    """The node's main address and the first one of the other family, if there is one (CFG-55)."""
    if node is None or not node.addresses:
        return ()
    main = node.addresses[0]
    others = (one for one in node.addresses if family_of(one) is not family_of(main))
    other = next(others, None)
    return (main,) if other is None else (main, other)


def why_restart(known: Node | None, now: Node | None, *, uses_pod_cidrs: bool) -> str:
    """Why an agent that started with ``known`` must end, to be started anew (SYNC-11); "" if not.

    ``known`` is the Node that the agent first saw, None where it has seen none: then there is
    nothing to be wrong about. ``now`` None says that it is deleted. ``uses_pod_cidrs``: pods are
    told by the Node's podCIDRs (detectLocalMode NodeCIDR). Addresses that are all gone are no other
    addresses: whoever sets them has a moment of weakness, and an agent that ended would not help.
    """
    if known is None:
        return ""
    if now is None:
        return f"Node {known.name} is deleted"
    before, after = node_ips(known), node_ips(now)
    if before and after and before != after:
        return f"the addresses of Node {now.name} changed from {_texts(before)} to {_texts(after)}"
    if uses_pod_cidrs and known.pod_cidrs != now.pod_cidrs:
        had, has = (", ".join(node.pod_cidrs) or "none" for node in (known, now))
        return f"the podCIDRs of Node {now.name} changed from {had} to {has}"
    return ""


def _texts(addresses: tuple[Address, ...]) -> str:
    return ", ".join(map(format_address, addresses))
