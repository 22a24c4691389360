# SPDX-License-Identifier: Apache-2.0
"""Which backend a new connection gets: a random one, or with affinity the client's last one."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from ebpflb.lab import Loop, Namespace
from ebpflb.model import Protocol
from tests.netns.agents import wait_until
from tests.netns.services import Endpoint, ready, terminating, unready
from tests.netns.sockets import Form
from tests.netns.world import TCP_PORT, UDP_PORT, Handle, MakeService, MakeServices, World

Dial = Callable[[Namespace, Handle, int], Counter[str]]


def by_tcp(client: Namespace, handle: Handle, count: int) -> Counter[str]:
    outcome = client.tcp(handle.ipv4, 80, count=count)
    assert outcome.failed == 0, outcome
    return Counter(outcome.backends)


def by_udp(client: Namespace, handle: Handle, count: int) -> Counter[str]:
    """From a socket each, since a socket keeps its backend anyway."""
    outcome = client.udp(handle.ipv4, 53, count=count, sockets=count)
    assert outcome.failed == 0, outcome
    return Counter(outcome.backends)


def by_connected_udp(client: Namespace, handle: Handle, count: int) -> Counter[str]:
    outcome = client.udp(handle.ipv4, 53, count=count, sockets=count, connected=True)
    assert outcome.failed == 0, outcome
    return Counter(outcome.backends)


EVERY_WAY = pytest.mark.parametrize(
    "dial",
    [
        pytest.param(by_tcp, id="TCP"),
        pytest.param(by_udp, id="UDP"),
        pytest.param(by_connected_udp, id="connected UDP"),
    ],
)


def only(chosen: Counter[str]) -> str:
    """The one backend that answered everything."""
    (name,) = chosen
    return name


# --- at random ----------------------------------------------------------------------------------


@EVERY_WAY
def test_every_backend_gets_its_share(world: World, service: MakeService, dial: Dial) -> None:
    """BAL-01, BAL-02: 100 of 400 each; fewer than 50 or more than 160 happen once in 10^7 runs."""
    chosen = dial(world.p1, service(pods=world.backends), 400)
    assert chosen.keys() == {"be1", "be2", "be3", "be4"}
    assert all(50 <= count <= 160 for count in chosen.values()), chosen


def test_an_endpoint_that_stands_in_the_slice_twice_gets_one_share(
    world: World, service: MakeService
) -> None:
    """B-61, B-63"""
    one, two = ready(*world.backends[:2])
    chosen = by_tcp(world.p1, service(endpoints=(one, one, one, two)), 200)
    assert all(60 <= count <= 140 for count in chosen.values()), chosen


def test_the_families_are_balanced_apart(world: World, service: MakeService) -> None:
    """FAM-01: each has endpoints of its own."""
    one, two = ready(*world.backends[:2])
    handle = service(endpoints=(Endpoint(ipv4=one.ipv4), Endpoint(ipv6=two.ipv6)))
    assert world.p1.tcp(handle.ipv4, 80, count=5).backends == {"be1": 5}
    assert world.p1.tcp(handle.ipv4, 80, count=5, mapped=True).backends == {"be1": 5}
    assert world.p1.tcp(handle.ipv6, 80, count=5).backends == {"be2": 5}


def test_connections_are_counted_as_they_were_dialled(
    world: World, service: MakeService, form: Form
) -> None:
    """By service port, so by family: each connect(), and the first datagram of a flow."""
    handle = service(pods=world.backends[:2])
    host = form.host(handle)
    translated = world.kernel.stats()["translated"]
    world.p1.tcp(host, 80, count=17)
    world.node.tcp(host, 80, count=5)
    world.p1.udp(host, 53, count=30, sockets=3)
    world.p2.udp(host, 53, count=30, sockets=4, connected=True)
    assert handle.connections(Protocol.TCP, 80, form) == 22
    assert handle.connections(Protocol.UDP, 53, form) == 7
    other = Form.V4 if form is Form.V6 else Form.V6
    assert handle.connections(Protocol.TCP, 80, other) == 0
    assert world.kernel.stats()["translated"] == translated + 29


def test_what_is_dialled_in_parallel_is_counted_too(world: World, service: MakeService) -> None:
    handle = service(pods=world.backends)
    for client in (world.p1, world.p2):
        assert client.tcp(handle.ipv4, 80, count=100, parallel=4).failed == 0
    assert handle.connections(Protocol.TCP, 80) == 800


# --- ClientIP affinity --------------------------------------------------------------------------


@EVERY_WAY
def test_a_client_comes_back_to_its_backend(world: World, service: MakeService, dial: Dial) -> None:
    """AFF-02, AFF-09"""
    handle = service(pods=world.backends, affinity_s=100)
    assert len(dial(world.p1, handle, 100)) == 1


def test_each_client_has_a_backend_of_its_own(world: World, services: MakeServices) -> None:
    """B-41: two pods and the node are three clients; sixteen Services are sixteen throws."""
    handles = services(16, pods=world.backends, affinity_s=100)
    clients = (world.p1, world.p2, world.node)
    pins = [tuple(only(by_tcp(client, one, 3)) for client in clients) for one in handles]
    again = [tuple(only(by_tcp(client, one, 3)) for client in clients) for one in handles]
    assert again == pins
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert any(pin[a] != pin[b] for pin in pins), pins
    assert all(len(set(column)) > 1 for column in zip(*pins, strict=True)), pins


def test_two_ports_of_a_service_are_two_choices(world: World, services: MakeServices) -> None:
    """AFF-01: of sixteen Services one at least sends a client elsewhere on its other port."""
    ports = {80: TCP_PORT, 81: TCP_PORT}
    handles = services(16, pods=world.backends, tcp=ports, affinity_s=100)
    pairs = []
    for handle in handles:
        first = world.p1.tcp(handle.ipv4, 80, count=5).backends
        second = world.p1.tcp(handle.ipv4, 81, count=5).backends
        assert len(first) == len(second) == 1
        pairs.append((*first, *second))
    assert any(one != two for one, two in pairs), pairs


def test_ipv4_and_mapped_sockets_are_one_client(world: World, service: MakeService) -> None:
    handle = service(pods=world.backends, affinity_s=100)
    plain = world.p1.tcp(handle.ipv4, 80, count=20).backends
    assert world.p1.tcp(handle.ipv4, 80, count=20, mapped=True).backends == plain


def test_the_record_lasts_from_the_last_connection_on(world: World, service: MakeService) -> None:
    """AFF-05, AFF-06: connections within the time-out keep it; after it the choice is free."""
    handle = service(pods=world.backends, affinity_s=1)
    name = handle.port_name(Protocol.TCP, 80)
    pinned = only(by_tcp(world.p1, handle, 1))
    began = last = time.monotonic()
    while last - began < 1.5:  # longer than the time-out, and never silent for so long
        chosen = only(by_tcp(world.p1, handle, 20))
        before, last = last, time.monotonic()
        if last - before > 0.9:  # this machine was busy elsewhere: once more from here
            pinned, began = chosen, last
        assert chosen == pinned
    seen = {pinned}

    def elsewhere() -> bool:
        wait_until(
            lambda: all(age > 1.0 for age in world.kernel.affinity_ages_s(name)),
            what="the record is too old",
        )
        seen.add(only(by_tcp(world.p1, handle, 1)))
        return len(seen) > 1

    wait_until(elsewhere, timeout_s=30, what="an expired client gets another backend")


@EVERY_WAY
def test_a_client_leaves_a_backend_that_is_not_ready_at_once(
    world: World, service: MakeService, dial: Dial
) -> None:
    """B-37, B-43, AFF-07: its next connection is good, and it stays with the new one."""
    handle = service(pods=world.backends, affinity_s=10_800)
    gone = only(dial(world.p1, handle, 3))
    rest = [pod for pod in world.backends if pod.name != gone]
    (left,) = (pod for pod in world.backends if pod.name == gone)
    handle.set(endpoints=(*unready(left), *ready(*rest)))
    new = only(dial(world.p1, handle, 10))
    assert new != gone
    handle.set(endpoints=ready(*world.backends))
    assert only(dial(world.p1, handle, 10)) == new


@EVERY_WAY
def test_a_client_leaves_a_backend_that_has_been_deleted(
    world: World, service: MakeService, dial: Dial
) -> None:
    """B-43"""
    handle = service(pods=world.backends[:2], affinity_s=10_800)
    gone = only(dial(world.p1, handle, 3))
    stays = next(pod for pod in world.backends[:2] if pod.name != gone)
    handle.set(endpoints=ready(stays, world.backends[2]))
    assert gone not in dial(world.p1, handle, 10)


def go_on(held: Loop) -> None:
    """Wait for more of a loop's exchanges."""
    good = held.outcome().good
    held.wait_for(lambda one: one.good > good + 5, timeout_s=30, what="it goes on")


def test_a_terminating_backend_keeps_its_connections_and_gets_no_new_ones(
    world: World, service: MakeService
) -> None:
    """B-39, BAL-03, NOEP-11: not through the client's record either; nothing is cut at its end."""
    handle = service(pods=world.backends[:2], affinity_s=10_800)
    with world.p1.hold_loop(handle.ipv4, 80, interval_s=0.01) as held:
        so_far = held.wait_for(
            lambda one: one.good > 3, timeout_s=30, what="the connection is in use"
        )
        going = next(pod for pod in world.backends[:2] if pod.name in so_far.backends)
        stays = next(pod for pod in world.backends[:2] if pod is not going)
        for endpoints in ((*terminating(going), *ready(stays)), ready(stays)):
            handle.set(endpoints=endpoints)
            assert by_tcp(world.p1, handle, 20) == {stays.name: 20}
            go_on(held)
        outcome = held.stop()
    assert outcome.failed == 0, outcome
    assert outcome.backends.keys() == {going.name}


def test_terminating_backends_serve_while_nothing_is_ready(
    world: World, service: MakeService
) -> None:
    """TOP-03, B-65"""
    handle = service(endpoints=terminating(*world.backends[:2]))
    assert by_tcp(world.p1, handle, 60).keys() == {"be1", "be2"}
    assert by_udp(world.p1, handle, 60).keys() == {"be1", "be2"}


def test_affinity_is_switched_on_and_off_under_way(world: World, service: MakeService) -> None:
    """AFF-08: new connections follow at once, open ones do not notice."""
    handle = service(pods=world.backends)
    with world.p2.hold_loop(handle.ipv4, 80, interval_s=0.01) as held:
        held.wait_for(lambda one: one.good > 1, timeout_s=30, what="the connection is in use")
        for affinity_s, several in ((100, False), (0, True), (100, False), (0, True)):
            handle.set(affinity_s=affinity_s)
            assert (len(by_tcp(world.p1, handle, 40)) > 1) is several
        assert held.stop().failed == 0


def test_a_service_that_is_made_again_remembers_no_client(
    world: World, service: MakeService
) -> None:
    """An id carries its generation: an old record never matches a new service port."""
    handle = service(pods=world.backends[:1], affinity_s=100)
    assert only(by_tcp(world.p1, handle, 3)) == "be1"
    world.agent.manifests.remove(handle.name)
    world.agent.settle()
    handle.set(endpoints=ready(world.backends[1]))
    assert only(by_tcp(world.p1, handle, 3)) == "be2"


def test_target_ports_are_part_of_the_choice(world: World, service: MakeService) -> None:
    """PORT-03: the same pods behind two ports, each with its own target."""
    handle = service(pods=world.backends[:1], tcp={80: TCP_PORT}, udp={53: UDP_PORT, 54: 9001})
    assert world.p1.udp(handle.ipv4, 53).first["local"].endswith(f":{UDP_PORT}")
    assert world.p1.udp(handle.ipv4, 54).first["local"].endswith(":9001")


# --- a Service that changes -----------------------------------------------------------------------


def test_scaling_leaves_no_dead_endpoint(world: World, service: MakeService) -> None:
    """B-75: after each step the slots are the endpoints, and all of them answer."""
    handle = service(pods=world.backends)
    name = handle.port_name(Protocol.TCP, 80)
    for count in (4, 2, 3, 1, 0, 2):
        handle.set(endpoints=ready(*world.backends[:count]))
        snapshot = world.kernel.snapshot()
        assert len(snapshot.cluster[world.kernel.id_of(name)]) == count
        outcome = world.p1.tcp(handle.ipv4, 80, count=40)
        assert outcome.good == (40 if count else 0), outcome
        assert outcome.backends.keys() == {pod.name for pod in world.backends[:count]}


def test_open_connections_outlive_their_service(world: World, service: MakeService) -> None:
    """BAL-03, NOEP-11"""
    handle = service(pods=world.backends[:1], affinity_s=100)
    with world.p1.hold_loop(handle.ipv4, 80, parallel=2, interval_s=0.01) as held:
        go_on(held)
        handle.set(endpoints=())
        go_on(held)
        world.agent.manifests.remove(handle.name)
        world.agent.settle()
        go_on(held)
        assert held.stop().failed == 0


@pytest.mark.parametrize(
    "order",
    [("service", "slices"), ("slices", "service")],
    ids=["the Service first", "its slices first"],
)
def test_a_service_goes_in_either_order(
    world: World, service: MakeService, order: tuple[str, str]
) -> None:
    """B-79: nothing of it is left, members and records of clients included."""
    handle = service(pods=world.backends, affinity_s=100)
    by_tcp(world.p1, handle, 3)
    by_udp(world.p1, handle, 3)
    objects = handle.spec.objects()
    left = {"service": objects[1:], "slices": objects[:1]}
    world.agent.manifests.put_objects(f"{handle.name}.json", left[order[0]])
    world.agent.settle()
    assert world.p1.tcp(handle.ipv4, 80).good == 0
    world.agent.manifests.remove(handle.name)
    world.agent.settle()
    assert world.kernel.stats()["foreign_backend"] == 0


def test_a_port_changes_its_protocol(world: World, service: MakeService) -> None:
    """B-85: same number, the same Service; the old one is gone, the new one works."""
    handle = service(pods=world.backends[:1], tcp={80: TCP_PORT}, udp={})
    assert world.p1.tcp(handle.ipv4, 80).good == 1
    handle.set(tcp={}, udp={80: UDP_PORT})
    assert world.p1.udp(handle.ipv4, 80).good == 1
    assert world.p1.tcp(handle.ipv4, 80).errors.keys() <= {"ENETUNREACH", "EHOSTUNREACH"}
    handle.set(tcp={80: TCP_PORT}, udp={})
    assert world.p1.tcp(handle.ipv4, 80).good == 1


def test_a_client_that_was_there_before_the_service_is_served(
    world: World, service: MakeService, form: Form
) -> None:
    """B-17: no answer of before is remembered, not for the same source port either."""
    spec = world.spec(pods=world.backends[:1])
    for _ in range(3):
        early = world.node.tcp(form.host(spec), 80, source_port=23_000, reset=True)
        assert early.good == 0
    (handle,) = world.services(spec)
    late = world.node.tcp(form.host(handle), 80, source_port=23_000, reset=True)
    world.agent.manifests.remove(handle.name)
    assert late.good == 1


def test_a_local_policy_takes_this_nodes_endpoints_alone(
    world: World, service: MakeService, form: Form
) -> None:
    """POL-01, B-73; switched under way."""
    here, there = ready(*world.backends[:2])
    there = msgspec.structs.replace(there, node="n2")
    handle = service(endpoints=(here, there), local=True)
    assert world.p1.tcp(form.host(handle), 80, count=20).backends == {"be1": 20}
    handle.set(local=False)
    assert world.p1.tcp(form.host(handle), 80, count=60).backends.keys() == {"be1", "be2"}


def test_a_service_that_is_not_for_the_socket_path_is_left_alone(
    world: World, service: MakeService, form: Form
) -> None:
    """B-131: a mesh wants to see the ClusterIP on the wire; switched under way, both ways."""
    left_alone = {"ebpflb.io/socket-lb": "false"}
    handle = service(pods=world.backends[:1], annotations=left_alone)
    for chosen, good in ((left_alone, 0), ({}, 1), (left_alone, 0)):
        handle.set(annotations=chosen)
        outcome = world.node.tcp(form.host(handle), 80)
        assert outcome.good == good, outcome
        assert "ECONNREFUSED" not in outcome.errors
