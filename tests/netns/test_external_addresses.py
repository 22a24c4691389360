# SPDX-License-Identifier: Apache-2.0
"""External and load balancers' addresses at the socket, and who is kept from them."""

from __future__ import annotations

import pytest

from ebpflb.lab import Namespace
from tests.builders import ApiObject
from tests.netns.services import ready
from tests.netns.sockets import Form
from tests.netns.world import Handle, MakeService, Way, World

SHORT_S = 0.3
PODS = "10.244.0.0/16"
ELSEWHERE = "192.0.2.0/24"


def of(form: Form, addresses: tuple[str, ...]) -> str:
    """The one of (IPv4, IPv6) that a program of this form dials."""
    ipv4, ipv6 = addresses
    if form is Form.V6:
        return ipv6
    return ipv4 if form is Form.V4 else f"::ffff:{ipv4}"


@pytest.fixture(params=["external_ips", "ingress_ips"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which addresses are dialled."""
    chosen: str = request.param
    return chosen


def test_pods_and_the_node_reach_a_service_there(
    world: World, service: MakeService, form: Form, way: Way, kind: str
) -> None:
    """LB-01, TV-M03, TV-M07, E-S12: the packet never leaves for the address itself."""
    handle = service(pods=world.backends[:2], external=True, balanced=True)
    host = of(form, getattr(handle.spec, kind))
    for client in (world.p1, world.node):
        outcome = way.ask(client, host, way.port, 40)
        assert outcome.failed == 0, outcome
        assert outcome.backends.keys() == {"be1", "be2"}
        if way is not Way.TCP:
            assert outcome.sources == {f"[{host}]:53" if ":" in host else f"{host}:53": 40}


def test_nothing_but_the_services_ports_answers_there(
    world: World, service: MakeService, form: Form, kind: str
) -> None:
    """PORT-05; not the NodePort either."""
    handle = service(pods=world.backends[:2], external=True, balanced=True)
    host = of(form, getattr(handle.spec, kind))
    for port in (81, 8080, handle.spec.node_port):
        assert world.p1.tcp(host, port, timeout_s=SHORT_S).good == 0


def test_without_endpoints_they_are_refused_at_once(
    world: World, service: MakeService, form: Form, kind: str
) -> None:
    """NOEP-02, NOEP-08"""
    handle = service(external=True, balanced=True)
    before = world.kernel.stats()
    host = of(form, getattr(handle.spec, kind))
    for client in (world.p1, world.node):
        assert client.tcp(host, 80).errors == {"ECONNREFUSED": 1}
        assert client.udp(host, 53, connected=True).errors == {"ECONNREFUSED": 1}
    assert world.kernel.stats()["refused"] == before["refused"] + 4


def test_an_address_that_the_balancer_proxies_for_is_left_to_it(
    world: World, service: MakeService
) -> None:
    """LB-02: ipMode Proxy; switched under way."""
    handle = service(pods=world.backends[:1], balanced=True)
    ipv4 = handle.spec.ingress_ips[0]
    for mode, good in (("Proxy", 0), ("VIP", 1), ("Proxy", 0)):
        objects: list[ApiObject] = handle.spec.objects()
        objects[0]["status"]["loadBalancer"]["ingress"] = [{"ip": ipv4, "ipMode": mode}]
        world.agent.manifests.put_objects(f"{handle.name}.json", objects)
        world.agent.settle()
        assert world.p1.tcp(ipv4, 80, timeout_s=SHORT_S).good == good


def test_an_external_address_that_is_the_nodes_own(world: World, service: MakeService) -> None:
    """LB-11: the Service gets its port there, and no other, whoever listens."""
    handle = service(pods=world.backends[:1])
    handle.set(external_ips=(world.node.ipv4,))
    with world.node.serve(tcp=[80, 29_997], name="the node"):
        assert world.p1.tcp(world.node.ipv4, 80).backends == {"be1": 1}
        assert world.p1.tcp(world.node.ipv4, 29_997).backends == {"the node": 1}
        handle.set(external_ips=())
        assert world.p1.tcp(world.node.ipv4, 80).backends == {"the node": 1}


# --- source ranges -------------------------------------------------------------------------------


def reach(world: World, handle: Handle, client: Namespace, form: Form) -> dict[str, bool]:
    """Which addresses of a Service answer this client, by TCP and by UDP alike."""
    spec = handle.spec
    dialled = {
        "ClusterIP": (form.host(spec), None),
        "NodePort": (form.host(world.node), spec.node_port),
        "external": (of(form, spec.external_ips), None),
        "balancer": (of(form, spec.ingress_ips), None),
    }
    found = {}
    for name, (host, port) in dialled.items():
        outcomes = [way.ask(client, host, port or way.port, timeout_s=SHORT_S) for way in Way]
        assert len({one.good for one in outcomes}) == 1, outcomes
        found[name] = outcomes[0].good == 1
        if not found[name]:
            assert outcomes[0].errors == {"ECONNREFUSED": 1}
    return found


EVERYWHERE = {"ClusterIP": True, "NodePort": True, "external": True, "balancer": True}
NOT_BALANCER = EVERYWHERE | {"balancer": False}


@pytest.mark.parametrize(
    ("ranges", "node", "pod"),
    [
        pytest.param((), EVERYWHERE, EVERYWHERE, id="nobody is kept out"),
        pytest.param((ELSEWHERE,), NOT_BALANCER, NOT_BALANCER, id="everybody here is kept out"),
        pytest.param(
            (ELSEWHERE, "192.168.50.0/24"), EVERYWHERE, NOT_BALANCER, id="the node is let in"
        ),
        pytest.param((PODS,), NOT_BALANCER, NOT_BALANCER, id="pods: not known at the socket"),
    ],
)
def test_source_ranges_guard_the_balancers_address_alone(
    world: World,
    service: MakeService,
    ranges: tuple[str, ...],
    node: dict[str, bool],
    pod: dict[str, bool],
) -> None:
    """LB-05, LB-06, SEC-07, B-159; refused, until packets can be dropped. Counted as by policy."""
    handle = service(pods=world.backends[:1], external=True, balanced=True, source_ranges=ranges)
    for client, expected in ((world.node, node), (world.p1, pod)):
        before = world.kernel.stats()
        for form in (Form.V4, Form.MAPPED):
            assert reach(world, handle, client, form) == expected
        after = world.kernel.stats()
        kept_out = not expected["balancer"]
        assert after["refused_policy"] == before["refused_policy"] + 6 * kept_out
        assert after["refused"] == before["refused"]


def test_a_family_without_ranges_is_open(world: World, service: MakeService) -> None:
    """FAM-05"""
    handle = service(
        pods=world.backends[:1], external=True, balanced=True, source_ranges=(ELSEWHERE,)
    )
    assert reach(world, handle, world.p1, Form.V6) == EVERYWHERE
    handle.set(source_ranges=(ELSEWHERE, "2001:db8::/32"))
    assert reach(world, handle, world.p1, Form.V6) == NOT_BALANCER
    handle.set(source_ranges=("2001:db8::/32",))
    assert reach(world, handle, world.p1, Form.V4) == EVERYWHERE


def test_source_ranges_are_switched_on_and_off_under_way(
    world: World, service: MakeService
) -> None:
    """E-LB02: the other addresses do not notice."""
    handle = service(pods=world.backends[:2], external=True, balanced=True)
    with world.p2.tcp_loop(handle.ipv4, 80, interval_s=0.005) as steady:
        for ranges in ((ELSEWHERE,), (), (ELSEWHERE, "192.168.50.1/32"), ()):
            handle.set(source_ranges=ranges)
            expected = NOT_BALANCER if ranges else EVERYWHERE
            assert reach(world, handle, world.p1, Form.V4) == expected
        assert steady.stop().failed == 0


def test_who_is_let_in_all_the_while_notices_nothing_of_changing_ranges(
    world: World, service: MakeService
) -> None:
    """LB-07, E-LB02: the node dials; not one connect fails or goes past the Service."""
    handle = service(pods=world.backends[:1], balanced=True)
    host = handle.spec.ingress_ips[0]
    here = "192.168.50.0/24"
    with world.node.tcp_loop(host, 80, interval_s=0.0, timeout_s=SHORT_S) as steady:
        for ranges in ((here,), (), (here, ELSEWHERE), ()) * 5:
            handle.set(source_ranges=ranges)
        outcome = steady.stop()
    assert outcome.failed == 0, outcome
    assert outcome.backends.keys() == {"be1"}


def test_open_conversations_outlive_a_range(world: World, service: MakeService) -> None:
    """As conntrack has it: a range is for who begins."""
    handle = service(pods=world.backends[:1], balanced=True)
    with world.p1.hold_loop(handle.spec.ingress_ips[0], 80, interval_s=0.01) as held:
        held.wait_for(lambda one: one.good > 3, timeout_s=30, what="the connection is in use")
        handle.set(source_ranges=(ELSEWHERE,))
        good = held.outcome().good
        held.wait_for(lambda one: one.good > good + 5, timeout_s=30, what="it goes on")
        assert held.stop().failed == 0


def test_who_is_kept_out_is_refused_without_endpoints_too(
    world: World, service: MakeService
) -> None:
    """LB-08"""
    handle = service(balanced=True, source_ranges=(ELSEWHERE,))
    assert world.p1.tcp(handle.spec.ingress_ips[0], 80).errors == {"ECONNREFUSED": 1}
    handle.set(endpoints=ready(world.backends[0]))
    assert world.p1.tcp(handle.spec.ingress_ips[0], 80).errors == {"ECONNREFUSED": 1}
