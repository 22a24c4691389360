# SPDX-License-Identifier: Apache-2.0
"""Traffic policies of real Services, and what their health-check ports say of each node.

Two clusters: in one the agents can tell pods (--cluster-cidr), in the other pods are strangers, as
if from outside. Each has be1, be2 and be3 on n1, and be4 on n2. Ids are those of docs/behaviour.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import pytest

from ebpflb.lab import Lab, Namespace, Node, wait_until
from tests.e2e.objects import Objects, Service, endpoint
from tests.e2e.world import FOLLOW_S, Health, World, health, reaches, refuses, shut

PODS: Final = "10.244.0.0/16,fd00:244::/32"
HERE, BOTH = {"be1"}, {"be1", "be4"}
EXTERNAL: Final = ("NodePort", "ExternalIP", "LoadBalancer")


@pytest.fixture(scope="module")
def telling() -> Iterator[World]:
    """The cluster whose agents can tell pods."""
    with Lab("telling") as lab, World(lab, nodes=2) as one:
        one.start_agents("--cluster-cidr", PODS)
        yield one
        assert [agent.faults() for agent in one.agents] == [[], []]


class Place(NamedTuple):
    """A cluster with a Service that has frontends of every kind, and no endpoint yet."""

    world: World
    service: Service
    tells_pods: bool

    def spots(self) -> Iterator[tuple[Node, Namespace, bool]]:
        """Each node and its pod as clients: (the node whose frontends it dials, who, whether
        it is served by all endpoints under a Local external policy).
        """
        for node, pod in zip(self.world.nodes, self.world.clients, strict=True):
            yield node, pod, self.tells_pods
            yield node, node, True

    def leads(self, node: Node, who: Namespace, names: Collection[str], *kinds: str) -> None:
        """Wait until the frontends of these kinds lead there; to nobody where there is none."""
        dials = self.service.dials(node)
        for ip, port in [one for kind in kinds for one in dials[kind]]:
            if names:
                reaches(who, ip, port, names)
            else:
                shut(who, ip, port)


@pytest.fixture(params=["pods are told", "pods are strangers"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Each of the two."""
    tells_pods = request.param == "pods are told"
    world: World = request.getfixturevalue("telling" if tells_pods else "world")
    objects = Objects(world.admin)
    service = objects.service(type="LoadBalancer", externalIPs=[*objects.outside()])
    service.ingress(*objects.outside())
    assert [len(kind) for kind in service.dials(world.node).values()] == [2, 2, 2, 2]
    yield Place(world, service, tells_pods)
    objects.clear()


# --- who is led where -----------------------------------------------------------------------------


def test_a_local_external_policy(place: Place) -> None:
    """POL-03 to -08, NOEP-05 to -07: an endpoint on each node, on one alone, nowhere, and back."""
    be1, *_, be4 = place.world.backends
    n1, _ = place.world.nodes
    place.service.patch(externalTrafficPolicy="Local")
    for pods in ([be1, be4], [be1], [], [be4]):
        place.service.endpoints(*pods)
        for node, who, by_all in place.spots():
            if not pods:
                for ip, port in [
                    one for kind in place.service.dials(node).values() for one in kind
                ]:
                    refuses(who, ip, port)
                continue
            mine = pods if by_all else [pod for pod in pods if pod.node is node]
            place.leads(node, who, {pod.name for pod in mine}, *EXTERNAL)
            place.leads(node, who, {pod.name for pod in pods}, "ClusterIP")
    for ip in ("127.0.0.1", "::1"):
        reaches(n1, ip, place.service.node_port(), {"be4"})


def test_a_local_internal_policy(place: Place) -> None:
    """POL-01, POL-07, POL-11, NOEP-04, E-S32, E-S33: pods, the node and pods on its network."""
    be1, *_, be4 = place.world.backends
    n1, n2 = place.world.nodes
    place.service.patch(internalTrafficPolicy="Local")
    hosts = [node.pod(f"{node.name}-host", host_network=True) for node in (n1, n2)]
    try:
        for pods in ([be1, be4], [be1]):
            place.service.endpoints(*pods)
            names = {pod.name for pod in pods}
            clients = zip(place.world.nodes, place.world.clients, hosts, strict=True)
            for node, pod, host in clients:
                mine = {one.name for one in pods if one.node is node}
                for who in (pod, node, host):
                    place.leads(node, who, mine, "ClusterIP")
                    place.leads(node, who, names, *EXTERNAL)
    finally:
        for host in hosts:
            host.remove()


def test_terminating_endpoints_under_local_policies(place: Place) -> None:
    """TOP-14, E-S37, E-S39: each set falls back for itself, and not beyond its node."""
    be1, *_, be4 = place.world.backends
    service = place.service.patch(internalTrafficPolicy="Local", externalTrafficPolicy="Local")
    going = {"ready": False, "serving": True, "terminating": True}
    for ready, of_n1, of_n2, of_all in (
        ([], {"be1"}, set[str](), {"be1"}),
        ([endpoint(be4)], {"be1"}, {"be4"}, {"be4"}),
    ):
        service.slices("all", [endpoint(be1, **going), *ready])
        for node, who, by_all in place.spots():
            mine = of_n1 if node is place.world.node else of_n2
            place.leads(node, who, mine, "ClusterIP")
            place.leads(node, who, of_all if by_all else mine, *EXTERNAL)


def test_policies_are_switched_under_way(place: Place) -> None:
    """POL-10: each policy leads somewhere, so not one connect fails meanwhile."""
    be1, *_, be4 = place.world.backends
    service, world = place.service, place.world
    service.endpoints(be1, be4)
    for node, who, _ in place.spots():
        place.leads(node, who, BOTH, "ClusterIP", *EXTERNAL)
    with contextlib.ExitStack() as stack:
        loops = [
            stack.enter_context(who.tcp_loop(ip, port, interval_s=0.002))
            for who in (world.client, world.node)
            for ip, port in [kind[0] for kind in service.dials(world.node).values()]
        ]
        for internal, external in (
            ("Local", "Cluster"),
            ("Local", "Local"),
            ("Cluster", "Local"),
            ("Cluster", "Cluster"),
            ("Local", "Local"),
        ):
            service.patch(internalTrafficPolicy=internal, externalTrafficPolicy=external)
            for who, by_all in ((world.client, place.tells_pods), (world.node, True)):
                place.leads(world.node, who, HERE if internal == "Local" else BOTH, "ClusterIP")
                mine = HERE if external == "Local" and not by_all else BOTH
                place.leads(world.node, who, mine, *EXTERNAL)
        for loop in loops:
            outcome = loop.stop()
            assert outcome.failed == 0, (loop.title, outcome)
            assert outcome.good > 20


# --- health-check ports ---------------------------------------------------------------------------


def says(world: World, service: Service, *counts: int | None) -> None:
    """Wait until each node tells of so many endpoints, at all its addresses and at any path.

    None: nobody listens there.
    """
    outsider, port = world.cluster.node, service.health_port
    wanted = [None if count is None else Health.of(service.key, count) for count in counts]
    for path in ("/", "/healthz"):
        for family in ("ipv4", "ipv6"):
            hosts = [getattr(node, family) for node in world.nodes]

            def said(hosts: list[str] = hosts, path: str = path) -> bool:
                return [health(outsider, ip, port, path) for ip in hosts] == wanted

            wait_until(said, timeout_s=FOLLOW_S, what=f"{hosts} say {wanted}")


@pytest.fixture
def checked(world: World, objects: Objects) -> Service:
    """A Service that load balancers ask each node for."""
    service = objects.service(type="LoadBalancer", externalTrafficPolicy="Local")
    assert service.health_port
    return service


def test_health_follows_the_endpoints(world: World, checked: Service) -> None:
    """HC-01 to HC-06, HC-11, HC-12, E-S35: they come, terminate and go."""
    be1, be2, _, be4 = world.backends
    says(world, checked, 0, 0)
    checked.endpoints(be1)
    says(world, checked, 1, 0)
    checked.endpoints(be1, be2, be4)
    says(world, checked, 2, 1)
    checked.slices("more", [endpoint(be1)])
    going = {"ready": False, "serving": True, "terminating": True}
    checked.slices("all", [endpoint(be2, **going), endpoint(be4, **going)])
    says(world, checked, 1, 0)
    checked.slices("more", [])
    says(world, checked, 0, 0)
    reaches(world.client, world.node.ipv4, checked.node_port(), {"be2"})
    checked.endpoints(be4)
    says(world, checked, 0, 1)
    checked.endpoints()
    says(world, checked, 0, 0)


def test_health_goes_with_the_policy_the_type_and_the_service(
    world: World, objects: Objects, checked: Service
) -> None:
    """HC-01, HC-08, POL-10: another Service's port does not notice."""
    stays = objects.service(type="LoadBalancer", externalTrafficPolicy="Local")
    stays.endpoints(world.backends[3])
    checked.endpoints(world.backends[0])
    says(world, stays, 0, 1)

    for change, back in (
        ({"externalTrafficPolicy": "Cluster"}, {"externalTrafficPolicy": "Local"}),
        ({"type": "NodePort"}, {"type": "LoadBalancer"}),
        ({"type": "ClusterIP"}, {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}),
    ):
        says(world, checked, 1, 0)
        before = Service(objects, checked.obj)
        assert checked.patch(**change).health_port == 0
        says(world, before, None, None)
        checked.patch(**back)
    says(world, checked, 1, 0)
    checked.delete()
    says(world, checked, None, None)
    told = health(world.cluster.node, world.nodes[1].ipv4, stays.health_port)
    assert told == Health.of(stays.key, 1)
