# SPDX-License-Identifier: Apache-2.0
"""NodePorts, external and load balancers' addresses of real Services, from pods and from nodes.

Each node answers its own pods and processes: what comes to it by packet is not for here. Ids are
those of docs/behaviour.md.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from datetime import datetime

import pytest

from ebpflb.events import CONTROLLER
from ebpflb.lab import wait_until
from tests.builders import ApiObject
from tests.e2e.objects import DNS, HTTP, OTHER, Objects, Service
from tests.e2e.world import (
    FOLLOW_S,
    OWN,
    TCP_PORT,
    World,
    keeps,
    listening,
    reaches,
    refuses,
    shut,
    unserved,
)

PROXY_NAME = "service.kubernetes.io/service-proxy-name"
ELSEWHERE = "192.0.2.0/24"
NODES = "192.168.50.0/24"
_static = itertools.count(30_000)


def static_port() -> int:
    """A NodePort of those that the API server gives nobody unasked (KEP-3668)."""
    return next(_static)


def everywhere(service: Service, world: World) -> list[tuple[str, int]]:
    """All that a client on the first node may dial."""
    return [one for kind in service.dials(world.node).values() for one in kind]


# --- NodePorts ------------------------------------------------------------------------------------


def test_a_node_port_answers_at_every_node(world: World, objects: Objects) -> None:
    """NP-01, NP-07, E-S11, E-S13: one number for TCP and UDP, both families, pods and nodes."""
    number = static_port()
    both = [
        {"name": "t", "port": 80, "targetPort": TCP_PORT, "nodePort": number},
        {"name": "u", "protocol": "UDP", "port": 80, "targetPort": TCP_PORT, "nodePort": number},
    ]
    service = objects.service(*both, type="NodePort").endpoints(*world.backends)
    names = {pod.name for pod in world.backends}
    for node, client in zip(world.nodes, world.clients, strict=True):
        for ip in (node.ipv4, node.ipv6):
            for place in (client, node):
                reaches(place, ip, number, names)
                reaches(place, ip, number, names, protocol="udp")
        for ip in ("127.0.0.1", "::1"):
            reaches(node, ip, number, names)
            reaches(node, ip, number, names, protocol="udp")
            assert client.tcp(ip, number, count=3).errors == {"ECONNREFUSED": 3}
            assert client.udp(ip, number, timeout_s=0.2).good == 0
        reaches(client, service.ip, 80, names)


def test_a_node_port_of_one_family(world: World, objects: Objects) -> None:
    """FAM-07"""
    service = objects.service(type="NodePort", ipFamilyPolicy="SingleStack", ipFamilies=["IPv6"])
    number = service.endpoints(world.backends[0]).node_port()
    with listening(world.node, number):
        for place in (world.client, world.node):
            reaches(place, world.node.ipv6, number, {"be1"})
            reaches(place, world.node.ipv4, number, {OWN})


def test_a_node_port_is_moved(world: World, objects: Objects) -> None:
    """NP-12, B-81: the old number is the node's again, or another Service's."""
    old, new = static_port(), static_port()
    service = objects.service(HTTP | {"nodePort": old}, type="NodePort")
    service.endpoints(world.backends[0])
    node = world.node
    with listening(node, old, new), world.client.tcp_loop(service.ip, 80, interval_s=0.002) as loop:
        for ip in (node.ipv4, node.ipv6):
            reaches(world.client, ip, old, {"be1"})
            reaches(world.client, ip, new, {OWN})
        service.patch(ports=[HTTP | {"nodePort": new}])
        for ip in (node.ipv4, node.ipv6):
            reaches(world.client, ip, new, {"be1"})
            reaches(world.client, ip, old, {OWN})
        other = objects.service(HTTP | {"nodePort": old}, type="NodePort")
        other.endpoints(world.backends[1])
        for ip in (node.ipv4, node.ipv6):
            reaches(world.client, ip, old, {"be2"})
            reaches(world.client, ip, new, {"be1"})
        other.delete()
        reaches(world.client, node.ipv4, old, {OWN})
        assert loop.stop().failed == 0


# --- external addresses ---------------------------------------------------------------------------


def test_external_addresses_come_and_go(world: World, objects: Objects) -> None:
    """LB-01, LB-09, E-S12: nobody has them; served on each node, to pods and to itself."""
    outside = objects.outside()
    service = objects.service(HTTP, DNS).endpoints(world.backends[0], world.backends[3])
    for ip in outside:
        unserved(world.node, ip, 80)
    for addresses in (outside, outside[:1], outside[1:], ()):
        service.patch(externalIPs=[*addresses])
        for ip in outside:
            for place in (*world.clients, *world.nodes):
                if ip in addresses:
                    reaches(place, ip, 80, {"be1", "be4"})
                    reaches(place, ip, 53, {"be1", "be4"}, protocol="udp")
            for node in world.nodes:
                if ip not in addresses:
                    unserved(node, ip, 80)
                    unserved(node, ip, 53, protocol="udp")
        reaches(world.client, service.ip, 80, {"be1", "be4"})


def test_an_external_address_that_is_the_nodes_own(world: World, objects: Objects) -> None:
    """LB-11: the Service has its own ports there, whoever listens, and no others."""
    node = world.node
    service = objects.service(HTTP, externalIPs=[node.ipv4, node.ipv6])
    service.endpoints(world.backends[0])
    with listening(node, 80, 81):
        for ip in (node.ipv4, node.ipv6):
            for place in (world.client, node):
                reaches(place, ip, 80, {"be1"})
                reaches(place, ip, 81, {OWN})
        service.patch(externalIPs=[])
        for ip in (node.ipv4, node.ipv6):
            reaches(world.client, ip, 80, {OWN})


# --- load balancers -------------------------------------------------------------------------------


def test_a_load_balancers_addresses_are_those_of_its_status(world: World, objects: Objects) -> None:
    """LB-02, LB-03: none yet, both families, by name only, and left to a balancer that proxies."""
    vips = objects.outside()
    service = objects.service(type="LoadBalancer").endpoints(world.backends[0], world.backends[3])
    names = {"be1", "be4"}
    with world.client.tcp_loop(service.ip, 80, interval_s=0.002) as loop:
        for node, client in zip(world.nodes, world.clients, strict=True):
            for kind in service.dials(node).values():
                for ip, port in kind:
                    reaches(client, ip, port, names)
            unserved(node, vips[0], 80)
        for entries, good in (
            (vips, vips),
            ([{"ip": vips[0], "ipMode": "Proxy"}, {"ip": vips[1], "ipMode": "VIP"}], vips[1:]),
            ([{"hostname": "lb.example.com"}, {"ip": vips[0]}], vips[:1]),
            ([], ()),
        ):
            service.ingress(*entries)
            for ip in vips:
                for place in (*world.clients, *world.nodes):
                    if ip in good:
                        reaches(place, ip, 80, names)
                for node in world.nodes:
                    if ip not in good:
                        unserved(node, ip, 80)
        assert loop.stop().failed == 0


def test_a_load_balancer_without_node_ports(world: World, objects: Objects) -> None:
    """LB-04: and it gets them, and gives them back, while it is served."""
    vips = objects.outside()
    service = objects.service(type="LoadBalancer", allocateLoadBalancerNodePorts=False)
    service.endpoints(world.backends[0]).ingress(*vips)
    assert service.node_port() == 0
    with world.client.tcp_loop(vips[0], 80, interval_s=0.002) as loop, contextlib.ExitStack() as on:
        loop.wait_for(lambda one: one.good > 0, timeout_s=FOLLOW_S, what="it is served")
        failed = loop.outcome().failed
        number = service.patch(allocateLoadBalancerNodePorts=True).node_port()
        assert number
        on.enter_context(listening(world.node, number))
        for place in (world.client, world.node):
            reaches(place, world.node.ipv4, number, {"be1"})
        service.patch(allocateLoadBalancerNodePorts=False, ports=[HTTP | {"nodePort": 0}])
        assert service.node_port() == 0
        for place in (world.client, world.node):
            reaches(place, world.node.ipv4, number, {OWN})
        for ip in vips:
            reaches(world.client, ip, 80, {"be1"})
        assert loop.stop().failed == failed


def test_a_load_balancer_of_two_protocols(world: World, objects: Objects) -> None:
    """E-S45: of one number."""
    udp = {"name": "u", "protocol": "UDP", "port": 80, "targetPort": TCP_PORT}
    vips = objects.outside()
    service = objects.service(HTTP, udp, type="LoadBalancer")
    service.endpoints(world.backends[0]).ingress(*vips)
    for ip in vips:
        reaches(world.client, ip, 80, {"be1"})
        reaches(world.client, ip, 80, {"be1"}, protocol="udp")


def test_source_ranges_guard_the_balancers_address_alone(world: World, objects: Objects) -> None:
    """LB-05, LB-06, FAM-05, E-LB02: of IPv4 only here, so IPv6 is open to all.

    Whether a pod is in a range cannot be seen at a socket: it is kept out.
    """
    vips = objects.outside()
    outside = objects.outside()
    service = objects.service(type="LoadBalancer", externalIPs=[*outside])
    service.endpoints(world.backends[0]).ingress(*vips)
    for ranges in ([], [ELSEWHERE], [ELSEWHERE, NODES], []):
        service.patch(loadBalancerSourceRanges=ranges)
        for place, is_in in ((world.client, not ranges), (world.node, ranges != [ELSEWHERE])):
            if is_in:
                reaches(place, vips[0], 80, {"be1"})
            else:
                shut(place, vips[0], 80)
            for ip, port in everywhere(service, world):
                if ip != vips[0]:
                    reaches(place, ip, port, {"be1"})


# --- of all kinds ---------------------------------------------------------------------------------


@pytest.fixture
def full(world: World, objects: Objects) -> Service:
    """A Service with frontends of every kind, and no endpoint yet."""
    service = objects.service(HTTP, type="LoadBalancer", externalIPs=[*objects.outside()])
    service.ingress(*objects.outside())
    assert [len(kind) for kind in service.dials(world.node).values()] == [2, 2, 2, 2]
    return service


def test_no_endpoint_is_a_refusal_at_every_frontend(world: World, full: Service) -> None:
    """NOEP-01 to -03, E-S30: even where the node itself listens."""
    be1, be2, *_ = world.backends
    with listening(world.node, full.node_port()):
        for pods in ([], [be1, be2], [be1], []):
            full.endpoints(*pods)
            for place in (world.client, world.node):
                for ip, port in everywhere(full, world):
                    if pods:
                        reaches(place, ip, port, {pod.name for pod in pods})
                    else:
                        refuses(place, ip, port)


def test_terminating_endpoints_serve_at_every_frontend(world: World, full: Service) -> None:
    """E-S38: where none is ready."""
    full.endpoints(world.backends[3], ready=False, serving=True, terminating=True)
    for node, client in zip(world.nodes, world.clients, strict=True):
        for place in (client, node):
            for kind in full.dials(node).values():
                for ip, port in kind:
                    reaches(place, ip, port, {"be4"})


def test_affinity_is_one_for_all_frontends(world: World, full: Service) -> None:
    """AFF-02, AFF-08, E-S27: switched on and off and on; each family has its own."""
    full.endpoints(*world.backends)
    names = {pod.name for pod in world.backends}
    for affinity in ("ClientIP", "None", "ClientIP"):
        full.patch(sessionAffinity=affinity)
        for place in (world.client, world.node):
            for family in zip(*full.dials(world.node).values(), strict=True):
                if affinity == "None":
                    for ip, port in family:
                        reaches(place, ip, port, names)
                else:
                    assert len({keeps(place, ip, port) for ip, port in family}) == 1


def test_another_proxys_service_has_no_frontend_here(world: World, full: Service) -> None:
    """SVC-01, E-S28: all kinds go with the label, and come back without it."""
    full.endpoints(world.backends[0])
    with listening(world.node, full.node_port()):
        for label in (None, "other", None):
            full.label({PROXY_NAME: label})
            for ip, port in everywhere(full, world):
                if label is None:
                    reaches(world.client, ip, port, {"be1"})
                elif port == 80:
                    unserved(world.node, ip, 80)
                else:
                    reaches(world.client, ip, port, {OWN})


def test_a_port_of_sctp_stands_beside_others(world: World, objects: Objects) -> None:
    """E-S46: no client of the lab speaks it; it takes nothing from TCP."""
    sctp = {"name": "s", "protocol": "SCTP", "port": 80, "targetPort": TCP_PORT}
    service = objects.service(HTTP, sctp, OTHER, type="NodePort").endpoints(world.backends[0])
    for ip in service.ips:
        reaches(world.client, ip, 80, {"be1"})
        reaches(world.client, ip, 90, {"be1"})
    reaches(world.client, world.node.ipv4, service.node_port(90), {"be1"})


# --- two that want one ----------------------------------------------------------------------------


def described(world: World, service: Service) -> list[ApiObject]:
    """Our Events that ``kubectl describe service`` would show.

    The API server has some of its own there, when its repair finds an address before it is noted.
    """
    meta = service.obj["metadata"]
    asked = {"name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]}
    fields = {"kind": "Service"} | asked
    query = {
        "fieldSelector": ",".join(f"involvedObject.{key}={one}" for key, one in fields.items())
    }
    found: list[ApiObject] = world.admin.request(
        "GET", "/api/v1/namespaces/default/events", query=query
    )["items"]
    return [one for one in found if one["reportingComponent"] == CONTROLLER]


def _a_second_after(service: Service) -> None:
    """The API server tells creation times in whole seconds: the next one is younger."""
    created = datetime.fromisoformat(service.obj["metadata"]["creationTimestamp"]).timestamp()
    wait_until(lambda: time.time() >= created + 1, what="a second has passed")


def test_of_two_that_claim_one_address_the_older_has_it(world: World, objects: Objects) -> None:
    """SEC-02: the other is told so where it is described, and gets it when the first goes."""
    (ip, _) = objects.outside()
    first = objects.service(name=objects.name("z"), externalIPs=[ip])
    first.endpoints(world.backends[0])
    _a_second_after(first)
    second = objects.service(HTTP, OTHER, name=objects.name("a"), externalIPs=[ip])
    second.endpoints(world.backends[1])
    for client in world.clients:
        reaches(client, second.ip, 80, {"be2"})
        reaches(client, ip, 90, {"be2"})
        reaches(client, ip, 80, {"be1"})
    (event,) = wait_until(
        lambda: described(world, second), timeout_s=FOLLOW_S, what="it is told to the second"
    )
    assert (event["reason"], event["type"]) == ("NotServed", "Warning")
    assert f"{ip}:80/TCP" in event["message"]
    assert first.key in event["message"]
    assert described(world, first) == []
    with world.client.tcp_loop(second.ip, 80, interval_s=0.002) as loop:
        first.delete()
        for client in world.clients:
            reaches(client, ip, 80, {"be2"})
        assert loop.stop().failed == 0


def test_a_claim_that_is_taken_back_leaves_the_address_to_the_other(
    world: World, objects: Objects
) -> None:
    """An external address that is also a load balancer's; each way of giving it up."""
    (ip, _) = objects.outside()
    first = objects.service(type="LoadBalancer").endpoints(world.backends[0]).ingress(ip)
    reaches(world.client, ip, 80, {"be1"})
    _a_second_after(first)
    second = objects.service(externalIPs=[ip]).endpoints(world.backends[1])
    reaches(world.client, second.ip, 80, {"be2"})
    reaches(world.client, ip, 80, {"be1"})
    first.ingress({"ip": ip, "ipMode": "Proxy"})
    reaches(world.client, ip, 80, {"be2"})
    first.ingress(ip)
    reaches(world.client, ip, 80, {"be1"})
    first.label({PROXY_NAME: "other"})
    reaches(world.client, ip, 80, {"be2"})
    first.label({PROXY_NAME: None})
    reaches(world.client, ip, 80, {"be1"})
    first.patch(ports=[HTTP | {"port": 81}])
    reaches(world.client, ip, 80, {"be2"})
    reaches(world.client, ip, 81, {"be1"})
