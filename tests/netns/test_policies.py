# SPDX-License-Identifier: Apache-2.0
"""Traffic policies at the socket: which endpoints a pod gets, and which the node's own processes.

Two agents: one can tell pods (--cluster-cidr), to the other they are strangers from outside. What
really comes from outside is no socket's business. ``be1`` is an endpoint of this node's; ``be2`` is
here too, but its slice says that it is on another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from ebpflb.lab import Namespace, Pod
from tests.netns.services import Endpoint, ready, terminating, unready
from tests.netns.sockets import Form
from tests.netns.world import TCP_PORT, UDP_PORT, Handle, Way, World, served

PODS = ("10.244.0.0/16", "fd00:244::/32")
ASKED = 25
"""Questions after which both of two endpoints have answered, but for one time in 10^7."""

BOTH, LOCAL, NONE = {"be1", "be2"}, {"be1"}, set[str]()

Serve = Callable[..., Handle]


@pytest.fixture(scope="module")
def telling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The cluster with an agent that can tell pods."""
    flags = ["--cluster-cidr", ",".join(PODS)]
    folder = tmp_path_factory.mktemp("telling")
    with served(folder, flags=flags, plans_by={"cluster_cidrs": PODS}) as one:
        yield one


@pytest.fixture(params=["pods are told", "pods are strangers"])
def place(request: pytest.FixtureRequest) -> World:
    """Each of the two agents."""
    name = "telling" if request.param == "pods are told" else "world"
    found: World = request.getfixturevalue(name)
    return found


@contextlib.contextmanager
def serving(place: World, **options: Any) -> Iterator[Handle]:
    """A Service with every frontend while it lives."""
    spec = place.spec(external=True, balanced=True, **options)
    (handle,) = place.services(spec)
    try:
        yield handle
    finally:
        place.agent.manifests.remove(spec.name)


def elsewhere(*pods: Pod) -> tuple[Endpoint, ...]:
    return tuple(msgspec.structs.replace(one, node="n2") for one in ready(*pods))


def dialled(place: World, handle: Handle, form: Form, frontend: str) -> tuple[str, int | None]:
    """Host and port; None: the Service's own, by protocol."""
    spec = handle.spec
    index = 1 if form is Form.V6 else 0
    mapped = "::ffff:" if form is Form.MAPPED else ""
    node_port = spec.node_port
    return {
        "ClusterIP": (form.host(spec), None),
        "NodePort": (form.host(place.node), node_port),
        "localhost": (mapped + ("127.0.0.1", "::1")[index], node_port),
        "external": (mapped + spec.external_ips[index], None),
        "balancer": (mapped + spec.ingress_ips[index], None),
    }[frontend]


def who(
    place: World,
    handle: Handle,
    client: Namespace,
    frontend: str,
    *,
    form: Form = Form.V4,
    way: Way = Way.TCP,
    count: int = ASKED,
) -> set[str]:
    """Who answers. Either all questions are answered or all are refused."""
    host, port = dialled(place, handle, form, frontend)
    outcome = way.ask(client, host, port or way.port, count, timeout_s=1.0)
    assert outcome.good in {0, count}, outcome
    if not outcome.good and way is not Way.UDP:
        assert outcome.errors == {"ECONNREFUSED": count}
    return set(outcome.backends)


# --- the matrix -----------------------------------------------------------------------------------

SERVICES: dict[str, dict[str, bool]] = {
    "svc1": {},
    "svc2": {"external_local": True},
    "svc3": {"local": True},
}

MATRIX = [
    ("TV-M01", "pod", "ClusterIP", (BOTH, BOTH, LOCAL)),
    ("TV-M02", "pod", "NodePort", (BOTH, BOTH, BOTH)),
    ("TV-M03", "pod", "balancer", (BOTH, BOTH, BOTH)),
    ("POL-08", "pod", "external", (BOTH, BOTH, BOTH)),
    ("TV-M04", "node", "ClusterIP", (BOTH, BOTH, LOCAL)),
    ("TV-M05", "node", "NodePort", (BOTH, BOTH, BOTH)),
    ("TV-M06", "node", "localhost", (BOTH, BOTH, BOTH)),
    ("TV-M07", "node", "balancer", (BOTH, BOTH, BOTH)),
    ("POL-08", "node", "external", (BOTH, BOTH, BOTH)),
]
"""Who answers svc1, svc2 (externalTrafficPolicy Local) and svc3 (internalTrafficPolicy Local)."""


@pytest.mark.parametrize("policies", SERVICES)
def test_the_matrix(place: World, policies: str, form: Form, way: Way) -> None:
    """TV-M01 to -M07, POL-01 to -08, B-143; TV-M20 where pods are strangers: svc2 is L for them."""
    here, there = place.backends[:2]
    column = list(SERVICES).index(policies)
    endpoints = (*ready(here), *elsewhere(there))
    with serving(place, endpoints=endpoints, **SERVICES[policies]) as handle:
        for row, source, frontend, answers in MATRIX:
            client = place.p1 if source == "pod" else place.node
            expected = answers[column]
            if policies == "svc2" and source == "pod" and frontend != "ClusterIP":
                expected = BOTH if place.tells_pods else LOCAL
            seen = who(place, handle, client, frontend, form=form, way=way)
            assert seen == expected, f"{row}: {source} to {frontend}"


# --- none for a policy ----------------------------------------------------------------------------


@pytest.mark.parametrize("frontend", ["NodePort", "external", "balancer"])
def test_none_here_under_a_local_external_policy(place: World, frontend: str, form: Form) -> None:
    """NOEP-05, -06: pods and the node are served by others; a stranger is refused, not sent away.

    Upstream drops a stranger's packets; refused is what a socket can have until they can be.
    """
    with serving(place, endpoints=elsewhere(place.backends[1]), external_local=True) as handle:
        before = place.kernel.stats()
        assert who(place, handle, place.node, frontend, form=form) == {"be2"}
        served_by = {"be2"} if place.tells_pods else NONE
        for way in (Way.TCP, Way.CONNECTED_UDP):
            assert who(place, handle, place.p1, frontend, form=form, way=way) == served_by
        after = place.kernel.stats()
    refused = 0 if place.tells_pods else 2 * ASKED
    assert after["refused_policy"] == before["refused_policy"] + refused
    assert after["refused"] == before["refused"]


def test_none_here_under_a_local_internal_policy(place: World, form: Form) -> None:
    """NOEP-04, POL-11: pods, pods on the host's network and the node alike; POL-07: not outside."""
    host_pod = place.node.pod("hostpod", host_network=True)
    try:
        with serving(place, endpoints=elsewhere(place.backends[1]), local=True) as handle:
            before = place.kernel.stats()
            for client in (place.p1, place.node, host_pod):
                assert who(place, handle, client, "ClusterIP", form=form, count=3) == NONE
                for frontend in ("NodePort", "external", "balancer"):
                    assert who(place, handle, client, frontend, form=form, count=3) == {"be2"}
            after = place.kernel.stats()
    finally:
        host_pod.remove()
    assert after["refused_policy"] == before["refused_policy"] + 9
    assert after["refused"] == before["refused"]


@pytest.mark.parametrize("state", ["no endpoint", "unready ones"])
def test_none_anywhere_is_no_matter_of_policy(place: World, state: str) -> None:
    """NOEP-01 to -03, -07, -08, B-161, B-163"""
    endpoints = () if state == "no endpoint" else unready(*place.backends[:2])
    policies = {"local": True, "external_local": True}
    with serving(place, endpoints=endpoints, **policies) as handle:
        before = place.kernel.stats()
        for client in (place.p1, place.node):
            for frontend in ("ClusterIP", "NodePort", "external", "balancer"):
                assert who(place, handle, client, frontend, count=1) == NONE
        after = place.kernel.stats()
    assert after["refused"] == before["refused"] + 8
    assert after["refused_policy"] == before["refused_policy"]


def test_a_terminating_endpoint_here_serves_strangers_and_one_elsewhere_the_others(
    place: World,
) -> None:
    """TOP-03, TOP-04, POL-09: each set falls back for itself."""
    here, there = place.backends[:2]
    endpoints = (*terminating(here), *elsewhere(there))
    with serving(place, endpoints=endpoints, external_local=True) as handle:
        assert who(place, handle, place.node, "NodePort") == {"be2"}
        expected = {"be2"} if place.tells_pods else {"be1"}
        assert who(place, handle, place.p1, "NodePort") == expected


def test_policies_are_switched_under_way(place: World) -> None:
    """POL-10: not one connection fails, and from the next on the new policy holds."""
    here, there = place.backends[:2]
    with (
        serving(place, endpoints=(*ready(here), *elsewhere(there))) as handle,
        place.p2.tcp_loop(handle.ipv4, 80, interval_s=0.002) as inside,
        place.p2.tcp_loop(place.node.ipv4, handle.spec.node_port, interval_s=0.002) as outside,
    ):
        for external, internal in ((True, False), (True, True), (False, True), (True, False)):
            handle.set(external_local=external, local=internal)
            assert who(place, handle, place.p1, "ClusterIP") == (LOCAL if internal else BOTH)
            is_local = external and not place.tells_pods
            assert who(place, handle, place.p1, "NodePort") == (LOCAL if is_local else BOTH)
            assert who(place, handle, place.node, "NodePort") == BOTH
        assert (inside.stop().failed, outside.stop().failed) == (0, 0)


# --- the node and the client as backends ---------------------------------------------------------


def test_a_backend_on_the_hosts_network(place: World, form: Form, way: Way) -> None:
    """POL-12, B-141, B-149: from pod and node, at every frontend; the node is its own backend."""
    target = 29_990
    server = place.node.pod("hostpod", host_network=True)
    try:
        with (
            server.serve(tcp=[target], udp=[target]),
            serving(place, endpoints=ready(server), tcp={80: target}, udp={53: target}) as handle,
        ):
            for client in (place.p1, place.node, server):
                for frontend in ("ClusterIP", "NodePort", "external", "balancer"):
                    seen = who(place, handle, client, frontend, form=form, way=way, count=3)
                    assert seen == {"hostpod"}
            for client in (place.node, server):
                seen = who(place, handle, client, "localhost", form=form, way=way, count=3)
                assert seen == {"hostpod"}
    finally:
        server.remove()


def test_a_node_port_that_is_its_backends_own_port(place: World, form: Form, way: Way) -> None:
    """The backend's address is dialled again by nobody: no translation is translated."""
    target = 31_990
    server = place.node.pod("hostpod", host_network=True)
    try:
        with (
            server.serve(tcp=[target], udp=[target]),
            serving(place, endpoints=ready(server), tcp={80: target}, udp={53: target}) as handle,
        ):
            handle.set(node_port=target)
            for client in (place.p1, place.node):
                for frontend in ("ClusterIP", "NodePort"):
                    seen = who(place, handle, client, frontend, form=form, way=way, count=3)
                    assert seen == {"hostpod"}
    finally:
        server.remove()


@pytest.mark.parametrize("frontend", ["ClusterIP", "NodePort", "external", "balancer"])
def test_a_pod_reaches_itself(place: World, frontend: str, form: Form, way: Way) -> None:
    """POL-13, H-10, B-139: through its loopback; it sees its own address, unlike upstream."""
    itself = place.backends[0]
    with serving(place, endpoints=ready(itself)) as handle:
        host, port = dialled(place, handle, form, frontend)
        outcome = way.ask(itself, host, port or way.port, 5)
        assert outcome.backends == {"be1": 5}, outcome
        own = itself.ipv6 if form is Form.V6 else itself.ipv4
        assert {seen.removeprefix("::ffff:") for seen in outcome.seen_as} == {own}


# --- affinity, and several ways to one service port -----------------------------------------------

FRONTENDS = ("ClusterIP", "NodePort", "external", "balancer")


def test_affinity_is_shared_by_all_frontends(place: World, form: Form, way: Way) -> None:
    """AFF-02: within the socket path (H-03), each client for itself."""
    with serving(place, pods=place.backends, affinity_s=100) as handle:
        for client, frontends in (
            (place.p1, FRONTENDS),
            (place.p2, FRONTENDS[::-1]),
            (place.node, (*FRONTENDS, "localhost")),
        ):
            seen = [
                who(place, handle, client, frontend, form=form, way=way, count=5)
                for frontend in frontends
            ]
            assert all(one == seen[0] for one in seen)
            assert len(seen[0]) == 1


def test_affinity_is_of_one_protocol(place: World) -> None:
    """AFF-01: TCP and UDP of one number have records of their own."""
    for _ in range(12):
        ports = {"tcp": {53: TCP_PORT}, "udp": {53: UDP_PORT}}
        with serving(place, pods=place.backends, affinity_s=100, **ports) as handle:
            tcp = place.p1.tcp(handle.ipv4, 53, count=4).backends
            udp = place.p1.udp(handle.ipv4, 53, count=4, sockets=4).backends
            assert len(tcp) == len(udp) == 1
            if tcp.keys() != udp.keys():
                return
    pytest.fail("two clients that know nothing of each other always agree")


def test_a_record_of_another_set_is_a_miss(place: World) -> None:
    """AFF-07: the ClusterIP led to be2, which a Local policy does not have."""
    here, there = place.backends[:2]
    endpoints = (*ready(here), *elsewhere(there))
    with serving(place, endpoints=elsewhere(there), affinity_s=100) as handle:
        assert who(place, handle, place.p1, "ClusterIP", count=3) == {"be2"}
        handle.set(endpoints=endpoints, external_local=True)
        assert who(place, handle, place.p1, "ClusterIP", count=3) == {"be2"}
        expected = {"be2"} if place.tells_pods else {"be1"}
        assert who(place, handle, place.p1, "NodePort", count=3) == expected
        # What was chosen last is the record, for all that have it in their set.
        assert who(place, handle, place.p1, "ClusterIP", count=3) == expected
        handle.set(local=True)
        assert who(place, handle, place.p1, "ClusterIP", count=3) == {"be1"}


def test_affinity_is_switched_at_every_frontend(place: World) -> None:
    """AFF-08"""
    with serving(place, pods=place.backends[:2], external_local=True) as handle:
        for affinity_s, several in ((100, False), (0, True), (100, False)):
            handle.set(affinity_s=affinity_s)
            for frontend in FRONTENDS:
                seen = who(place, handle, place.p1, frontend)
                assert (len(seen) > 1) is several
