# SPDX-License-Identifier: Apache-2.0
"""How a plan is to be read: where a client's new flow goes, and whether it is masqueraded.

Two pure functions, the rule for every datapath; one that cannot tell something at some place
(a socket has no source address yet) says so in its documentation. They must not know what a
datapath adds of its own: who reaches itself is masqueraded always (MASQ-06).
"""

from __future__ import annotations

import enum

from ebpflb.model import FrontendKind, Plan, PlannedPort, Policy, Selection


class Client(enum.Enum):
    """Who dials: a pod of the cluster, a process of this node, anybody else.

    Pods are pods whether or not ``Plan.pods`` can tell them from the outside.
    """

    POD = "pod"
    NODE = "node"
    OUTSIDE = "outside"


def leads(plan: Plan, port: PlannedPort, kind: FrontendKind, client: Client) -> Selection:
    """Where a frontend of this kind leads (POL-01 to -06)."""
    if kind is FrontendKind.CLUSTER_IP:
        return port.internal
    if client is Client.NODE or _is_told(plan, port, client):
        return port.cluster
    return port.local if port.external_policy is Policy.LOCAL else port.cluster


def masquerades(plan: Plan, port: PlannedPort, kind: FrontendKind, client: Client) -> bool:
    """Whether the backend sees this node's address in place of the client's (MASQ-01 to -05)."""
    if kind is FrontendKind.CLUSTER_IP:
        tells = port.name.family in plan.tells_pods
        return plan.masquerade_all or (tells and not _is_told(plan, port, client))
    return client is Client.NODE or port.external_policy is Policy.CLUSTER


def _is_told(plan: Plan, port: PlannedPort, client: Client) -> bool:
    return client is Client.POD and port.name.family in plan.tells_pods
