# SPDX-License-Identifier: Apache-2.0
"""One source port, again and again, and for several frontends at once: nobody gets another's flow.

Here it is thousands of connections; a million of them is the benchmark's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.lab import Namespace, Question
from ebpflb.model import Family
from tests.netns.services import ready
from tests.netns.site import Site, To, site, spelt
from tests.netns.world import TCP_PORT, UDP_PORT, Way

PORT = 4_000
QUICK = 1_500
"""Connections in a row: some seconds."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("reuse"), nodes=2) as one:
        one.backend("be1")
        one.backend("be2")
        one.backend("far", one.n2)
        one.n1.pod("closer").serve(tcp=[TCP_PORT], once=True)
        one.n1.pod("k1", virtual=True)
        with one.running():
            yield one


def syns_sent_again(client: Namespace) -> int:
    """How many SYNs the kernel had to repeat in a namespace, of all connections so far."""
    lines = client.run(["cat", "/proc/net/netstat"]).stdout.splitlines()
    names, values = (line.split() for line in lines if line.startswith("TcpExt:"))
    return int(values[names.index("TCPSynRetrans")])


@contextlib.contextmanager
def no_syn_twice(client: Namespace) -> Iterator[None]:
    """The first SYN of each connection is answered meanwhile."""
    before = syns_sent_again(client)
    yield
    assert syns_sent_again(client) == before


@pytest.fixture(params=["be1", "far"], ids=["a backend here", "a backend elsewhere"])
def backend(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.mark.parametrize("to", [To.NODE_PORT, To.CLUSTER_IP], ids=lambda to: to.value)
def test_a_port_is_used_again_as_soon_as_its_client_has_reset(
    place: Site, to: To, backend: str, family: Family
) -> None:
    """B-23, L-39: quick connects from one port, each closed by RST; not one has to try twice."""
    with place.serve(backend) as service:
        client = place.client("x" if to is To.NODE_PORT else "k1")
        host, port = service.address(Way.TCP, family, to)
        with no_syn_twice(client):
            outcome = client.tcp(host, port, source_port=PORT, reset=True, count=QUICK, size=8)
    assert outcome.failed == 0, outcome
    assert outcome.backends == {backend: QUICK}


def test_a_port_is_used_again_while_the_server_remembers_it(place: Site, family: Family) -> None:
    """The server has closed first: its TIME_WAIT takes the next SYN, and so must the flow."""
    with place.serve("closer") as service, no_syn_twice(place.x):
        outcome = place.x.tcp(
            *service.address(Way.TCP, family), source_port=PORT, reset=True, count=QUICK
        )
    assert outcome.failed == 0, outcome


def test_each_connection_of_a_port_may_have_another_backend(place: Site, family: Family) -> None:
    """L-39, BAL-01: what is closed binds nobody to its backend."""
    with place.serve("be1", "far") as service:
        outcome = place.x.tcp(
            *service.address(Way.TCP, family), source_port=PORT, reset=True, count=100
        )
    assert outcome.failed == 0, outcome
    assert outcome.backends.keys() == {"be1", "far"}


@pytest.mark.parametrize("backend_dies", [False, True], ids=["and it lives", "and it has died"])
def test_a_client_crashes_and_its_port_comes_back_to_an_open_flow(
    place: Site, family: Family, backend_dies: bool
) -> None:
    """L-39: no FIN, no RST: the flow looks open for ever. Its SYN goes to whom it was open with."""
    server = place.backend("server")
    with place.serve("server") as service:
        dialled = service.address(Way.TCP, family, To.CLUSTER_IP)
        client = place.n1.pod("crash", number=77, virtual=True)
        loop = client.hold_loop(*dialled, source_port=PORT, interval_s=0.05)
        loop.wait_for(lambda one: one.good > 3, timeout_s=30, what="it is open")
        client.links(lambda links: links.set("eth0", state="down"))
        client.remove()
        if backend_dies:
            server.remove()
            service.set(endpoints=ready(*place.pods("far")))
        client = place.n1.pod("crash", number=77, virtual=True)
        outcome = client.tcp(*dialled, source_port=PORT, timeout_s=15.0)
        client.remove()
    if not backend_dies:
        server.remove()
    assert outcome.backends == {"far" if backend_dies else "server": 1}, outcome


@pytest.mark.parametrize("way", [Way.TCP, Way.CONNECTED_UDP], ids=lambda way: way.value)
def test_two_frontends_of_one_backend_from_one_port_at_once(
    place: Site, way: Way, backend: str, family: Family
) -> None:
    """B-21, L-38: to the backend they would be one flow; each client hears what it asked for."""
    with place.serve(backend) as service, place.serve(backend) as another:
        fronts = [
            service.address(way, family, To.NODE_PORT),
            service.address(way, family, To.BALANCER),
            service.address(way, family, To.EXTERNAL),
            another.address(way, family, To.NODE_PORT),
            service.address(way, family, To.NODE_PORT, at=place.n2),
        ]
        options: dict[str, Any] = {"source_port": PORT, "reuseport": True, "interval_s": 0.01}
        if way is Way.TCP:
            questions = [Question("hold", *front, {**options, "count": 50}) for front in fronts]
        else:
            options |= {"connected": True, "timeout_s": 1.0}
            questions = [Question("udp", *front, {**options, "count": 50}) for front in fronts]
        outcomes = place.x.at_once(questions)
    for front, outcome in zip(fronts, outcomes, strict=True):
        assert outcome.failed == 0, (front, outcome)
        assert outcome.backends.keys() == {backend}
        assert outcome.strays == 0


def test_two_frontends_of_one_backend_from_one_port_thousands_of_times(
    place: Site, family: Family
) -> None:
    """B-21, L-38: new flows all the time, of which any two may collide."""
    with place.serve("be1") as service, no_syn_twice(place.x):
        options = {"source_port": PORT, "reset": True, "count": QUICK // 3, "size": 8}
        options |= {"reuseport": True}
        questions = [
            Question("tcp", *service.address(Way.TCP, family, to), options)
            for to in (To.NODE_PORT, To.BALANCER, To.EXTERNAL, To.CLUSTER_IP)
        ]
        outcomes = place.x.at_once(questions)
    for question, outcome in zip(questions, outcomes, strict=True):
        assert outcome.failed == 0, (question, outcome)


def test_a_port_that_has_asked_a_service_asks_its_backend_itself(
    place: Site, family: Family
) -> None:
    """L-38: what is remembered of the Service looks like the new connection's answers.

    Each in turn, several times; a SYN to the backend itself ends what was remembered.
    """
    (pod,) = place.pods("be1")
    host = pod.ipv6 if family is Family.IPV6 else pod.ipv4
    with (
        place.service(pods=[pod], balanced=True, external_local=True) as service,
        no_syn_twice(place.x),
    ):
        for dialled in (service.address(Way.TCP, family), (host, TCP_PORT)) * 3:
            outcome = place.x.tcp(*dialled, source_port=PORT, reset=True)
            assert outcome.backends == {"be1": 1}, (dialled, outcome)


@pytest.mark.parametrize("way", [Way.CONNECTED_UDP, Way.UDP], ids=lambda way: way.value)
def test_a_datagrams_port_asks_a_service_and_its_backend_in_turn(
    place: Site, way: Way, family: Family
) -> None:
    """L-38: the same without a SYN."""
    (pod,) = place.pods("be1")
    host = pod.ipv6 if family is Family.IPV6 else pod.ipv4
    with place.service(pods=[pod], balanced=True, external_local=True) as service:
        for dialled in (service.address(way, family), (host, UDP_PORT)) * 3:
            outcome = way.ask(place.x, *dialled, 1, source_port=PORT)
            assert outcome.backends == {"be1": 1}, (dialled, outcome)
            assert outcome.sources == {spelt(dialled): 1}


def test_many_clients_at_once_never_send_a_syn_twice(place: Site, family: Family) -> None:
    """B-23, B-29"""
    with place.serve("be1", "be2", "far") as service, no_syn_twice(place.x):
        host, port = service.address(Way.TCP, family)
        outcome = place.x.tcp(host, port, parallel=16, count=150, reset=True)
    assert outcome.failed == 0, outcome
    assert outcome.good == 16 * 150
