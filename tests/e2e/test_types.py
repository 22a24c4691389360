# SPDX-License-Identifier: Apache-2.0
"""A Service changes its type, from each to each: what it has is served, what it had is gone.

Ids are those of docs/behaviour.md.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, Final

from tests.e2e.objects import Objects, Service
from tests.e2e.world import OWN, World, listening, reaches, unserved

CLUSTER_IP, NODE_PORT = "ClusterIP", "NodePort"
BALANCER, NAME = "LoadBalancer", "ExternalName"
WALK: Final = [
    *(CLUSTER_IP, NODE_PORT, CLUSTER_IP, BALANCER, CLUSTER_IP, NAME),
    *(NODE_PORT, BALANCER, NODE_PORT, NAME, BALANCER, NAME, CLUSTER_IP),
]
"""Each of the twelve transitions once."""

NOTHING: Final = dict.fromkeys(("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"))


class Walker:
    """One Service on its way; it keeps an external address throughout, and remembers all others."""

    def __init__(self, world: World, objects: Objects, stack: contextlib.ExitStack) -> None:
        self._world = world
        self._stack = stack
        self._vips = objects.outside()
        self._node_ports: set[int] = set()
        self._had: set[str] = set(self._vips)
        self.service = objects.service(externalIPs=[*objects.outside()])
        self.service.endpoints(world.backends[0], world.backends[3])

    def become(self, kind: str) -> None:
        """Change its type, and what goes with that."""
        spec: dict[str, Any] = {"type": kind, "externalName": None}
        if kind == NAME:
            spec |= NOTHING | {"externalName": "example.com"}
        else:
            spec["ipFamilyPolicy"] = "RequireDualStack"
        self.service.patch(**spec)
        if kind == BALANCER:
            self.service.ingress(*self._vips)

    def look(self) -> None:
        """What it has now answers everybody; of what it ever had, the rest answers nobody."""
        world, service = self._world, self.service
        dials = service.dials(world.node)
        if service.obj["spec"]["type"] == NAME:
            self._had |= {ip for ip, _ in dials["ExternalIP"]}
            dials = {}
        (number,) = {port for _, port in dials.get("NodePort", [])} or {0}
        if number and number not in self._node_ports:
            self._node_ports.add(number)
            self._stack.enter_context(listening(world.node, number))
        served = [one for kind in dials.values() for one in kind]
        for ip, port in served:
            for place in (world.client, world.node):
                reaches(place, ip, port, {"be1", "be4"})
        self._had |= {ip for ip, port in served if port == 80}
        for ip in self._had - {ip for ip, _ in served}:
            unserved(world.node, ip, 80)
        for gone in self._node_ports - {number}:
            for ip in (world.node.ipv4, world.node.ipv6, "127.0.0.1", "::1"):
                reaches(world.node, ip, gone, {OWN})


def test_each_type_becomes_each_other(world: World, objects: Objects) -> None:
    """SVC-04, SVC-05, NP-12, LB-03, E-S14 to -S17; what it keeps costs no connect."""
    pairs = list(itertools.pairwise(WALK))
    assert len(set(pairs)) == len(pairs) == 12
    with contextlib.ExitStack() as stack:
        walker = Walker(world, objects, stack)
        walker.look()
        for before, after in pairs:
            if NAME in {before, after}:
                walker.become(after)
                walker.look()
                continue
            kept = [walker.service.ip, walker.service.obj["spec"]["externalIPs"][1]]
            loops = [world.client.tcp_loop(ip, 80, interval_s=0.002) for ip in kept]
            walker.become(after)
            walker.look()
            for loop in loops:
                outcome = loop.stop()
                assert outcome.failed == 0, (before, after, outcome)
                assert outcome.good > 0


def test_a_name_becomes_headless_and_is_nobodys(world: World, objects: Objects) -> None:
    """SVC-02: ClusterIP, ExternalName, headless, ExternalName, ClusterIP."""
    service = objects.service().endpoints(world.backends[0])
    had = [_served(world, service)]
    for cluster_ip in ("None", ""):
        service.patch(type=NAME, externalName="example.com", **NOTHING)
        for ip in (ip for ips in had for ip in ips):
            unserved(world.node, ip, 80)
        again: dict[str, Any] = {"clusterIP": cluster_ip} if cluster_ip else {}
        service.patch(
            type=CLUSTER_IP, externalName=None, ipFamilyPolicy="RequireDualStack", **again
        )
        had.append(_served(world, service))
    assert [len(ips) for ips in had] == [2, 0, 2]


def _served(world: World, service: Service) -> Sequence[str]:
    """Its ClusterIPs, each of which is served."""
    for ip in service.ips:
        reaches(world.client, ip, 80, {"be1"})
    return service.ips
