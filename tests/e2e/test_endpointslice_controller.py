# SPDX-License-Identifier: Apache-2.0
"""The real kube-controller-manager writes the EndpointSlices, out of Pods that the lab's stand for.

The agent has to follow what that controller really writes, and in the order in which it writes it.
"""

from __future__ import annotations

import contextlib

import pytest

from ebpflb.lab import Loop, Pod, wait_until
from tests.builders import ApiObject
from tests.e2e.objects import DNS, HTTP, OTHER, SERVICE_NAME, Objects
from tests.e2e.world import FOLLOW_S, TCP_PORT, ZONES, World, reaches, refuses, unserved

HEADLESS = "service.kubernetes.io/headless"
WEB = {"app": "web"}


@pytest.fixture(autouse=True)
def controllers(world: World) -> None:
    """They run, from the first test that needs them to the end."""
    world.cluster.start_controllers()


def slices_of(world: World, name: str) -> list[ApiObject]:
    return world.admin.list("EndpointSlice", labels=f"{SERVICE_NAME}={name}")


def test_pods_come_and_go(world: World, objects: Objects) -> None:
    """E-S02: and it was the controller that wrote the slices, of both families."""
    service = objects.service(HTTP, DNS, selector=objects.labels)
    for ip in service.ips:
        refuses(world.client, ip, 80)
    pods = [objects.pod(pod, WEB) for pod in world.backends]
    for client in world.clients:
        for ip in service.ips:
            reaches(client, ip, 80, {"be1", "be2", "be3", "be4"})
            reaches(client, ip, 53, {"be1", "be2", "be3", "be4"}, protocol="udp")
    pods[1].gone()
    pods[3].gone()
    for ip in service.ips:
        reaches(world.client, ip, 80, {"be1", "be3"})
    found = slices_of(world, service.name)
    assert {one["addressType"] for one in found} == {"IPv4", "IPv6"}
    writers = {one["metadata"]["labels"]["endpointslice.kubernetes.io/managed-by"] for one in found}
    assert writers == {"endpointslice-controller.k8s.io"}


def test_readiness_is_followed(world: World, objects: Objects) -> None:
    """Not ready from the start, ready, not ready, ready again."""
    service = objects.service(selector=objects.labels)
    stays = objects.pod(world.backends[0], WEB)
    flips = objects.pod(world.backends[3], WEB, ready=False)
    reaches(world.client, service.ip, 80, {"be1"})
    for ready in (True, False, True):
        flips.ready(ready=ready)
        for ip in service.ips:
            reaches(world.client, ip, 80, {"be1", "be4"} if ready else {"be1"})
    stays.ready(ready=False)
    reaches(world.client, service.ip, 80, {"be4"})
    flips.ready(ready=False)
    refuses(world.client, service.ip, 80)


def test_a_pod_that_is_deleted_serves_on_only_while_it_is_the_last(
    world: World, objects: Objects
) -> None:
    """E-S36, E-S23: open connections stay with it until it is gone."""
    service = objects.service(selector=objects.labels)
    first = objects.pod(world.backends[0], WEB)
    reaches(world.client, service.ip, 80, {"be1"})
    with world.client.hold_loop(service.ip, 80, parallel=3, interval_s=0.01) as held:
        held.wait_for(lambda one: one.good >= 6, what="connections are open")
        first.terminate()
        wait_until(
            lambda: any(
                point["conditions"].get("terminating")
                for one in slices_of(world, service.name)
                for point in one["endpoints"]
            ),
            timeout_s=FOLLOW_S,
            what="the controller has seen that it terminates",
        )
        reaches(world.client, service.ip, 80, {"be1"})
        second = objects.pod(world.backends[1], WEB)
        reaches(world.client, service.ip, 80, {"be2"})
        outcome = held.stop()
    assert outcome.failed == 0, outcome
    assert outcome.backends.keys() == {"be1"}
    second.terminate()
    first.ready(ready=False)
    reaches(world.client, service.ip, 80, {"be2"})
    second.ready(ready=False)
    refuses(world.client, service.ip, 80)
    first.gone()
    second.gone()
    refuses(world.client, service.ip, 80)


def test_an_evicted_pod_is_none(world: World, objects: Objects) -> None:
    """E-S31"""
    service = objects.service(selector=objects.labels)
    pod = objects.pod(world.backends[0], WEB)
    reaches(world.client, service.ip, 80, {"be1"})
    pod.evict()
    refuses(world.client, service.ip, 80)


def test_unready_and_terminating_pods_are_published_where_asked_for(
    world: World, objects: Objects
) -> None:
    """E-S21, E-S22"""
    service = objects.service(selector=objects.labels, publishNotReadyAddresses=True)
    unready = objects.pod(world.backends[0], WEB, ready=False)
    going = objects.pod(world.backends[1], WEB)
    going.terminate()
    reaches(world.client, service.ip, 80, {"be1", "be2"})
    service.patch(publishNotReadyAddresses=False)
    reaches(world.client, service.ip, 80, {"be2"})
    unready.ready()
    reaches(world.client, service.ip, 80, {"be1"})


def test_a_selector_is_changed_and_taken_away(world: World, objects: Objects) -> None:
    """B-111; without a selector the slices stay as they are."""
    blue, green = ({"colour": colour} for colour in ("blue", "green"))
    objects.pod(world.backends[0], blue)
    pod = objects.pod(world.backends[1], green)
    service = objects.service(selector=objects.labels | blue)
    reaches(world.client, service.ip, 80, {"be1"})
    service.patch(selector=green)
    reaches(world.client, service.ip, 80, {"be2"})
    service.patch(selector=None)
    pod.gone()
    other = objects.service(selector=objects.labels | blue)
    reaches(world.client, other.ip, 80, {"be1"})
    reaches(world.client, service.ip, 80, {"be2"})


def test_ports_are_found_by_name_in_pods(world: World, objects: Objects) -> None:
    """E-S03, E-S04: a target port by name, and one more port later."""
    service = objects.service(HTTP | {"targetPort": "web"}, selector=objects.labels)
    objects.pod(world.backends[0], WEB)
    reaches(world.client, service.ip, 80, {"be1"})
    service.patch(ports=[HTTP | {"targetPort": "web"}, OTHER])
    reaches(world.client, service.ip, 90, {"be1"})
    service.patch(ports=[OTHER])
    unserved(world.node, service.ip, 80)
    reaches(world.client, service.ip, 90, {"be1"})


def test_a_service_that_is_labelled_headless_is_served_all_the_same(
    world: World, objects: Objects
) -> None:
    """SVC-03: it has a ClusterIP, so today's controller keeps the label from its slices."""
    service = objects.service(selector=objects.labels, labels={HEADLESS: ""})
    objects.pod(world.backends[0], WEB)
    reaches(world.client, service.ip, 80, {"be1"})
    headless = objects.service(selector=objects.labels, clusterIP="None")
    wait_until(
        lambda: slices_of(world, headless.name), timeout_s=FOLLOW_S, what="its slices are there"
    )
    assert all(HEADLESS in one["metadata"]["labels"] for one in slices_of(world, headless.name))


def test_zones_are_kept_to_where_the_service_asks(world: World, objects: Objects) -> None:
    """TOP-08: n1 is in zone a, n2 in zone b; the hints are the controller's."""
    p1, p2 = world.clients
    service = objects.service(selector=objects.labels)
    for pod in (world.backends[0], world.backends[3]):
        objects.pod(pod, WEB)
    for client in (p1, p2):
        reaches(client, service.ip, 80, {"be1", "be4"})
    service.patch(trafficDistribution="PreferSameZone")
    reaches(p1, service.ip, 80, {"be1"})
    reaches(p2, service.ip, 80, {"be4"})
    service.patch(trafficDistribution=None)
    for client in (p1, p2):
        reaches(client, service.ip, 80, {"be1", "be4"})


def test_nodes_are_kept_to_where_the_service_asks(world: World, objects: Objects) -> None:
    """TOP-07: the controller hints at zones as well, and both nodes are in one."""
    be1, be2, _, be4 = world.backends
    p1, p2 = world.clients
    _, n2 = world.nodes
    world.label_zone(n2, ZONES[0])
    try:
        service = objects.service(selector=objects.labels, trafficDistribution="PreferSameNode")
        pods = [objects.pod(pod, WEB) for pod in (be1, be2, be4)]
        reaches(p1, service.ip, 80, {"be1", "be2"})
        reaches(p2, service.ip, 80, {"be4"})
        pods[2].gone()
        reaches(p2, service.ip, 80, {"be1", "be2"})
    finally:
        world.label_zone(n2, ZONES[1])


def test_endpoints_of_the_old_kind_are_mirrored(world: World, objects: Objects) -> None:
    """Somebody writes Endpoints by hand; a controller makes slices of them."""
    service = objects.service()
    subsets = [
        {
            "addresses": [{"ip": world.backends[0].ipv4}],
            "ports": [{"name": "http", "port": TCP_PORT}],
        }
    ]
    world.admin.create(
        {
            "apiVersion": "v1",
            "kind": "Endpoints",
            "metadata": {"name": service.name, "labels": objects.labels},
            "subsets": subsets,
        }
    )
    reaches(world.client, service.ip, 80, {"be1"})
    subsets[0]["addresses"] = [{"ip": world.backends[1].ipv4}]
    world.admin.patch("Endpoints", service.name, {"subsets": subsets})
    reaches(world.client, service.ip, 80, {"be2"})


def test_a_rolling_update_costs_no_connect(world: World, objects: Objects) -> None:
    """A new Pod is ready before an old one is asked to go; four times round."""
    service = objects.service(selector=objects.labels)
    old = objects.pod(world.backends[0], WEB)
    for client in world.clients:
        reaches(client, service.ip, 80, {"be1"})
    with contextlib.ExitStack() as stack:
        loops = [
            stack.enter_context(client.tcp_loop(service.ip, 80, interval_s=0.002))
            for client in world.clients
        ]
        for pod in (*world.backends[1:], *world.backends[:2]):
            new = objects.pod(pod, WEB, ready=False).ready()
            for loop in loops:
                _answers(loop, pod)
            old.terminate()
            old.gone()
            old = new
        reaches(world.client, service.ip, 80, {"be2"})
        for loop in loops:
            assert loop.stop().failed == 0


def _answers(loop: Loop, pod: Pod) -> None:
    """Wait until a loop of connects has met this pod since now."""
    before = loop.outcome().backends.get(pod.name, 0)
    loop.wait_for(
        lambda one: one.backends.get(pod.name, 0) > before,
        timeout_s=FOLLOW_S,
        what=f"{pod.name} is reached",
    )
