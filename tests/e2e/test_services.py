# SPDX-License-Identifier: Apache-2.0
"""Services and EndpointSlices through a real API server, and what pods' connections do then.

The slices are written by hand; who else writes some is test_endpointslice_controller's. Ids are
those of docs/behaviour.md.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from ebpflb.model import Family
from tests.e2e.api import ApiError
from tests.e2e.objects import DNS, HTTP, OTHER, Objects, endpoint
from tests.e2e.world import (
    OTHER_PORT,
    TCP_PORT,
    ZONES,
    World,
    ask,
    keeps,
    reaches,
    refuses,
    shut,
    unserved,
)

HEADLESS = "service.kubernetes.io/headless"
PROXY_NAME = "service.kubernetes.io/service-proxy-name"


# --- come and go --------------------------------------------------------------------------------


def test_the_api_server_itself_is_reached_by_its_service(world: World) -> None:
    """E-S01: from a pod, with a certificate that is good for the ClusterIP."""
    (ip,) = world.admin.get("Service", "kubernetes")["spec"]["clusterIPs"]
    ran = world.client.python(
        "import ssl, sys, urllib.request as r\n"
        "tls = ssl.create_default_context(cafile=sys.argv[2])\n"
        "opener = r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=tls))\n"
        "print(opener.open(f'https://{sys.argv[1]}/version', timeout=10).read().decode())",
        arguments=[ip, str(world.cluster.ca)],
    )
    assert '"gitVersion"' in ran.stdout


def test_endpoints_are_followed_up_and_down(world: World, objects: Objects) -> None:
    """E-S02, E-S07, E-S30: none, one, three, another, none; both families, from pods and nodes."""
    be1, be2, be3, be4 = world.backends
    service = objects.service(HTTP, DNS)
    for pods in ([], [be1], [be1, be2, be4], [be3], []):
        service.endpoints(*pods)
        for client in (*world.clients, *world.nodes):
            for ip in service.ips:
                if not pods:
                    refuses(client, ip, 80)
                    continue
                names = {pod.name for pod in pods}
                reaches(client, ip, 80, names)
                reaches(client, ip, 53, names, protocol="udp")
    service.delete()
    for ip in service.ips:
        unserved(world.node, ip, 80)


def test_replacing_every_endpoint_costs_no_connect(world: World, objects: Objects) -> None:
    """Rolling updates under a loop of connects from each node."""
    be1, be2, be3, be4 = world.backends
    service = objects.service().endpoints(be1, be2)
    for client in world.clients:
        reaches(client, service.ip, 80, {"be1", "be2"})
    loops = [client.tcp_loop(service.ip, 80, interval_s=0.001) for client in world.clients]
    for _ in range(25):
        service.endpoints(be2, be3).endpoints(be3, be4).endpoints(be4, be1).endpoints(be1, be2)
    service.endpoints(be3)
    for loop, client in zip(loops, world.clients, strict=True):
        reaches(client, service.ip, 80, {"be3"})
        outcome = loop.stop()
        assert outcome.failed == 0, outcome
        assert outcome.good > 20


def test_a_service_that_is_made_again_serves_again(world: World, objects: Objects) -> None:
    """E-S08, EP-09: under its old address, and its slices were there all the time."""
    service = objects.service().endpoints(world.backends[0])
    reaches(world.client, service.ip, 80, {"be1"})
    service.delete()
    unserved(world.node, service.ip, 80)
    again = objects.service(name=service.name, clusterIP=service.ips[0], clusterIPs=service.ips)
    for ip in again.ips:
        reaches(world.client, ip, 80, {"be1"})


def test_an_address_that_passes_to_another_service_leads_there(
    world: World, objects: Objects
) -> None:
    """B-81: deleted and given out again between two looks of anybody."""
    first = objects.service().endpoints(world.backends[0])
    second = objects.service(clusterIP=None).endpoints(world.backends[1])
    reaches(world.client, first.ip, 80, {"be1"})
    first.delete()
    third = objects.service(clusterIP=first.ips[0], clusterIPs=first.ips)
    third.endpoints(world.backends[2])
    reaches(world.client, first.ip, 80, {"be3"})
    reaches(world.client, second.ip, 80, {"be2"})


def test_a_collection_is_deleted_at_once(world: World, objects: Objects) -> None:
    """E-S43"""
    services = [objects.service().endpoints(world.backends[0]) for _ in range(5)]
    for service in services:
        reaches(world.client, service.ip, 80, {"be1"})
    objects.clear()
    for service in services:
        unserved(world.node, service.ip, 80)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_what_changed_while_the_agent_was_away_is_followed(
    world: World, objects: Objects, number: signal.Signals
) -> None:
    """E-S09, SYNC-09, B-79, B-95: what stays is not touched, not even for one connect."""
    be1, be2, *_ = world.backends
    stays, changes, goes = (objects.service().endpoints(be1) for _ in range(3))
    for service in (stays, changes, goes):
        reaches(world.client, service.ip, 80, {"be1"})
    before = world.agent.entries(stays.key)
    with world.client.tcp_loop(stays.ip, 80, interval_s=0.001) as loop:
        world.agent.end(number)
        changes.endpoints(be2)
        goes.delete()
        comes = objects.service().endpoints(be2)
        assert world.client.tcp(goes.ip, 80, count=3).backends == {"be1": 3}
        world.agent.start()
        reaches(world.client, changes.ip, 80, {"be2"})
        reaches(world.client, comes.ip, 80, {"be2"})
        unserved(world.node, goes.ip, 80)
        assert loop.stop().failed == 0
    assert world.agent.entries(stays.key) == before


# --- ports --------------------------------------------------------------------------------------


def test_ports_have_endpoints_of_their_own(world: World, objects: Objects) -> None:
    """E-S03: two ports of one Service, by name, in slices of their own and with other pods."""
    be1, be2, be3, _ = world.backends
    service = objects.service(HTTP, OTHER)
    port80 = {"name": "http", "protocol": "TCP", "port": TCP_PORT}
    port90 = {"name": "other", "protocol": "TCP", "port": OTHER_PORT}
    service.slices("one", [endpoint(be1), endpoint(be2)], ports=[port80])
    service.slices("two", [endpoint(be3)], ports=[port90])
    for ip in service.ips:
        reaches(world.client, ip, 80, {"be1", "be2"})
        reaches(world.client, ip, 90, {"be3"})


def test_ports_come_and_go(world: World, objects: Objects) -> None:
    """E-S04: one added, one moved to another number, one deleted."""
    pods = world.backends[:2]
    names = {pod.name for pod in pods}
    service = objects.service(HTTP).endpoints(*pods)
    reaches(world.client, service.ip, 80, names)
    service.patch(ports=[HTTP, OTHER]).endpoints(*pods)
    reaches(world.client, service.ip, 90, names)
    service.patch(ports=[HTTP | {"port": 81}, OTHER])
    reaches(world.client, service.ip, 81, names)
    unserved(world.node, service.ip, 80)
    service.patch(ports=[OTHER])
    unserved(world.node, service.ip, 81)
    reaches(world.client, service.ip, 90, names)


def test_one_number_serves_two_protocols(world: World, objects: Objects) -> None:
    """E-S44, B-85: without UDP, TCP stays; and a port may change its protocol."""
    udp = {"name": "u", "protocol": "UDP", "port": 80, "targetPort": TCP_PORT}
    pod = world.backends[0]
    service = objects.service(HTTP, udp).endpoints(pod)
    for ip in service.ips:
        reaches(world.client, ip, 80, {"be1"})
        reaches(world.client, ip, 80, {"be1"}, protocol="udp")
    service.patch(ports=[HTTP])
    for ip in service.ips:
        unserved(world.node, ip, 80, protocol="udp")
        reaches(world.client, ip, 80, {"be1"})
    service.patch(ports=[HTTP | {"protocol": "UDP"}]).endpoints(pod)
    for ip in service.ips:
        reaches(world.client, ip, 80, {"be1"}, protocol="udp")
        unserved(world.node, ip, 80)


# --- families -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", list(Family), ids=lambda family: family.label)
def test_a_service_of_one_family(world: World, objects: Objects, family: Family) -> None:
    """FAM-02"""
    service = objects.service(ipFamilyPolicy="SingleStack", ipFamilies=[family.label])
    (ip,) = service.endpoints(*world.backends).ips
    for client in world.clients:
        reaches(client, ip, 80, {"be1", "be2", "be3", "be4"})


def test_a_service_gets_a_second_family_and_loses_it(world: World, objects: Objects) -> None:
    service = objects.service(ipFamilyPolicy="SingleStack").endpoints(world.backends[0])
    (first,) = service.ips
    with world.client.tcp_loop(first, 80, interval_s=0.001) as loop:
        service.patch(ipFamilyPolicy="RequireDualStack")
        second = service.ips[1]
        reaches(world.client, second, 80, {"be1"})
        service.patch(ipFamilyPolicy="SingleStack", ipFamilies=["IPv4"], clusterIPs=[first])
        unserved(world.node, second, 80)
        assert loop.stop().failed == 0


# --- kinds of Services --------------------------------------------------------------------------


def test_external_name_and_cluster_ip_become_each_other(world: World, objects: Objects) -> None:
    """E-S14, E-S16: the address that it had is nobody's any more."""
    service = objects.service().endpoints(world.backends[0])
    had = service.ips
    reaches(world.client, had[0], 80, {"be1"})
    nothing = {"clusterIP": None, "clusterIPs": None, "ipFamilies": None, "ipFamilyPolicy": None}
    service.patch(type="ExternalName", externalName="example.com", **nothing)
    for ip in had:
        unserved(world.node, ip, 80)
    service.patch(type="ClusterIP", externalName=None, ipFamilyPolicy="RequireDualStack")
    for ip in service.ips:
        reaches(world.client, ip, 80, {"be1"})


def test_a_label_gives_a_service_to_another_proxy_and_takes_it_back(
    world: World, objects: Objects
) -> None:
    """E-S28, SVC-01"""
    service = objects.service(labels={PROXY_NAME: "foo"}).endpoints(world.backends[0])
    other = objects.service().endpoints(world.backends[1])
    reaches(world.client, other.ip, 80, {"be2"})
    unserved(world.node, service.ip, 80)
    for name in (None, "", None):
        service.label({PROXY_NAME: name})
        if name is None:
            reaches(world.client, service.ip, 80, {"be1"})
        else:
            unserved(world.node, service.ip, 80)
    reaches(world.client, other.ip, 80, {"be2"})


def test_slices_that_are_labelled_headless_are_not_used(world: World, objects: Objects) -> None:
    """SVC-03: the label on the Service is for whoever writes the slices."""
    service = objects.service(labels={HEADLESS: ""}).endpoints(world.backends[0])
    reaches(world.client, service.ip, 80, {"be1"})
    for value in ("", None):
        objects.label_slices(service.name, {HEADLESS: value})
        if value is None:
            reaches(world.client, service.ip, 80, {"be1"})
        else:
            refuses(world.client, service.ip, 80)


def test_a_headless_service_has_no_address(world: World, objects: Objects) -> None:
    """SVC-02: its neighbours are served, and nothing is said of it."""
    since = world.agent.mark
    headless = objects.service(clusterIP="None").endpoints(world.backends[0])
    assert headless.ips == []
    other = objects.service().endpoints(world.backends[1])
    reaches(world.client, other.ip, 80, {"be2"})
    assert headless.name not in world.agent.text(since=since)


def test_affinity_is_switched_on_and_off(world: World, objects: Objects) -> None:
    """E-S24, E-S26, AFF-08, AFF-09"""
    pods = world.backends
    service = objects.service(HTTP, DNS).endpoints(*pods)
    names = {pod.name for pod in pods}
    for affinity in ("None", "ClientIP", "None", "ClientIP"):
        service.patch(sessionAffinity=affinity)
        for ip in service.ips:
            if affinity == "None":
                reaches(world.client, ip, 80, names)
                continue
            keeps(world.client, ip, 80)
            assert len(ask(world.client, ip, 53, "udp", count=20).backends) == 1


def test_only_local_endpoints_where_the_policy_says_so(world: World, objects: Objects) -> None:
    """E-S32, NOEP-04: the node's own; where there are none, a drop and no refusal."""
    p1, p2 = world.clients
    service = objects.service(internalTrafficPolicy="Local").endpoints(
        world.backends[0], world.backends[3]
    )
    for ip in service.ips:
        reaches(p1, ip, 80, {"be1"})
        reaches(p2, ip, 80, {"be4"})
    service.endpoints(world.backends[0])
    shut(p2, service.ip, 80)
    reaches(p1, service.ip, 80, {"be1"})
    service.patch(internalTrafficPolicy="Cluster")
    for client in (p1, p2):
        reaches(client, service.ip, 80, {"be1"})


def test_a_node_that_changes_its_zone_takes_the_other_endpoints(
    world: World, objects: Objects
) -> None:
    """TOP-08, TOP-11: at once, and not one connect fails; back again. Nobody rewrites the hints."""
    points = [endpoint(pod) for pod in (world.backends[0], world.backends[3])]
    for point, zone in zip(points, ZONES, strict=True):
        for one in point.values():
            one["hints"] = {"forZones": [{"name": zone}]}
    service = objects.service().slices("all", points)
    for client, name in zip(world.clients, ("be1", "be4"), strict=True):
        reaches(client, service.ip, 80, {name})
    with world.client.tcp_loop(service.ip, 80, interval_s=0.002) as loop:
        try:
            for zone, names in (("b", {"be4"}), ("c", {"be1", "be4"}), ("a", {"be1"})):
                world.label_zone(world.node, zone)
                reaches(world.client, service.ip, 80, names)
        finally:
            world.label_zone(world.node, ZONES[0])
        assert loop.stop().failed == 0


# --- connections --------------------------------------------------------------------------------


def test_the_backend_sees_the_pod_that_dialled(world: World, objects: Objects) -> None:
    """E-S05: on the same node and across nodes."""
    service = objects.service().endpoints(*world.backends)
    for client in world.clients:
        for ip, address in zip(service.ips, (client.ipv4, client.ipv6), strict=True):
            outcome = reaches(client, ip, 80, {pod.name for pod in world.backends})
            assert outcome.seen_as.keys() == {address}


def test_a_pod_reaches_itself(world: World, objects: Objects) -> None:
    """E-S06"""
    service = objects.service().endpoints(world.backends[0])
    for ip in service.ips:
        reaches(world.backends[0], ip, 80, {"be1"})


def test_terminating_endpoints_serve_where_none_is_ready(world: World, objects: Objects) -> None:
    """E-S36: and no longer when one is; one that serves no more is refused."""
    be1, be2, *_ = world.backends
    service = objects.service()
    service.slices("old", [endpoint(be1, ready=False, serving=True, terminating=True)])
    reaches(world.client, service.ip, 80, {"be1"})
    service.slices("new", [endpoint(be2)])
    reaches(world.client, service.ip, 80, {"be2"})
    service.slices("new", [])
    reaches(world.client, service.ip, 80, {"be1"})
    service.slices("old", [endpoint(be1, ready=False, serving=False, terminating=True)])
    refuses(world.client, service.ip, 80)


# --- slices -------------------------------------------------------------------------------------


def test_many_slices_are_one_service(world: World, objects: Objects) -> None:
    """EP-01, EP-02: with one endpoint in two of them."""
    be1, be2, be3, be4 = world.backends
    service = objects.service()
    for part, pods in (("a", [be1, be2]), ("b", [be2, be3]), ("c", [be4])):
        service.slices(part, [endpoint(pod) for pod in pods])
    for ip in service.ips:
        reaches(world.client, ip, 80, {"be1", "be2", "be3", "be4"})
    service.slices("a", [])
    reaches(world.client, service.ip, 80, {"be2", "be3", "be4"})


@pytest.mark.parametrize("order", ["Service first", "slices first"])
def test_slices_and_their_service_come_in_any_order(
    world: World, objects: Objects, order: str
) -> None:
    """EP-10"""
    name = objects.name()
    pod = world.backends[0]
    content = {
        "ports": [{"name": "http", "protocol": "TCP", "port": TCP_PORT}],
        "endpoints": [endpoint(pod)[Family.IPV4]],
    }
    if order == "slices first":
        objects.write_slice(f"{name}-x", name, Family.IPV4, content)
        reaches(world.client, objects.service(name=name).ips[0], 80, {"be1"})
        return
    service = objects.service(name=name)
    refuses(world.client, service.ip, 80)
    objects.write_slice(f"{name}-x", name, Family.IPV4, content)
    reaches(world.client, service.ip, 80, {"be1"})


def test_a_slice_passes_from_one_service_to_another(world: World, objects: Objects) -> None:
    """EP-01: the label that names its Service is changed, and taken away."""
    one, other = objects.service(), objects.service()
    one.endpoints(world.backends[0])
    reaches(world.client, one.ip, 80, {"be1"})
    objects.label_slices(one.name, {"kubernetes.io/service-name": other.name})
    reaches(world.client, other.ip, 80, {"be1"})
    refuses(world.client, one.ip, 80)
    objects.label_slices(other.name, {"kubernetes.io/service-name": None})
    refuses(world.client, other.ip, 80)


def test_slices_of_names_and_of_no_ports_serve_nobody(world: World, objects: Objects) -> None:
    """FAM-06: they stand beside one that does."""
    service = objects.service().endpoints(world.backends[0])
    fqdn = objects.slice_object(service.name, "FQDN")
    fqdn |= {
        "ports": [{"name": "http", "protocol": "TCP", "port": TCP_PORT}],
        "endpoints": [{"addresses": ["backend.example.com"], "conditions": {"ready": True}}],
    }
    world.admin.create(fqdn)
    service.slices("bare", [endpoint(world.backends[1])], ports=[])
    service.slices("portless", [endpoint(world.backends[2])], ports=[{"name": "http"}])
    reaches(world.client, service.ip, 80, {"be1"})
    service.endpoints()
    refuses(world.client, service.ip, 80)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda service: service.patch(clusterIP="10.96.0.1"), id="another address"),
        pytest.param(lambda service: service.patch(ports=[]), id="no port"),
        pytest.param(
            lambda service: service.patch(ports=[HTTP | {"port": 70000}]), id="port 70000"
        ),
    ],
)
def test_what_the_api_server_refuses_changes_nothing(
    world: World, objects: Objects, change: Callable[..., object]
) -> None:
    service = objects.service().endpoints(world.backends[0])
    reaches(world.client, service.ip, 80, {"be1"})
    with pytest.raises(ApiError) as caught:
        change(service)
    assert caught.value.status == 422
    reaches(world.client, service.ip, 80, {"be1"})
