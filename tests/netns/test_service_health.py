# SPDX-License-Identifier: Apache-2.0
"""Health ports of Services, as a load balancer asks them from outside of the node."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ebpflb.lab import Lab, Namespace
from tests.netns.agents import wait_until
from tests.netns.services import Endpoint, Spec
from tests.netns.world import Handle, World

ELSEWHERE = "n9"


class Place(NamedTuple):
    """The world with an outside client; its agent may complain. ``world`` has no outside."""

    world: World
    client: Namespace


@contextlib.contextmanager
def placed(folder: Path, **options: Any) -> Iterator[Place]:
    with Lab("health") as lab:
        place = Place(World(lab, folder, **options), lab.external("x"))
        with place.world.agent:
            yield place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with placed(tmp_path_factory.mktemp("health")) as made:
        yield made


def on(node: str, *numbers: int) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(ipv4=f"10.244.9.{number}", node=node) for number in numbers)


def balanced(place: Place, endpoints: tuple[Endpoint, ...]) -> Handle:
    spec = place.world.spec(balanced=True, external_local=True, endpoints=endpoints)
    return place.world.services(spec)[0]


def health_port(spec: Spec) -> int:
    return spec.node_port + 1_000


class Answer(NamedTuple):
    status: int
    weight: str
    body: dict[str, Any]


def ask(place: Place, port: int, path: str = "/", *, host: str = "") -> Answer | None:
    """What the node says to the outside client; None where nobody listens."""

    def connect() -> Answer | None:
        client = http.client.HTTPConnection(host or place.world.node.ipv4, port, timeout=5)
        with contextlib.closing(client):
            try:
                client.request("GET", path)
            except ConnectionRefusedError:
                return None
            got = client.getresponse()
            weight = got.headers["X-Load-Balancing-Endpoint-Weight"]
            return Answer(got.status, weight, json.loads(got.read()))

    return place.client.inside(connect)


def status(place: Place, port: int) -> int | None:
    answer = ask(place, port)
    return answer.status if answer else None


def becomes(place: Place, port: int, expected: int | None) -> None:
    wait_until(lambda: status(place, port) == expected, what=f"port {port} says {expected}")


def test_a_load_balancer_is_told_of_endpoints_here(place: Place) -> None:
    """HC-02 to HC-06, HC-11, HC-12."""
    one = balanced(place, on("n1", 1, 2) + on(ELSEWHERE, 3))
    other = balanced(place, on(ELSEWHERE, 4))
    becomes(place, health_port(one.spec), 200)
    becomes(place, health_port(other.spec), 503)
    for host in (place.world.node.ipv4, place.world.node.ipv6):
        for path in ("/", "/healthz"):
            answer = ask(place, health_port(one.spec), path, host=host)
            assert answer is not None
            assert answer.weight == "2"
            assert answer.body == {
                "service": {"namespace": "default", "name": one.name},
                "localEndpoints": 2,
                "serviceProxyHealthy": True,
            }


def test_it_leaves_when_its_last_endpoint_terminates_and_traffic_goes_on(place: Place) -> None:
    """HC-06 and B-49: 503 while what terminates still serves."""
    pod = place.world.backends[0]
    ready = Endpoint(pod.ipv4, node="n1")
    going = Endpoint(pod.ipv4, node="n1", ready=False, terminating=True)
    one = balanced(place, (ready,))
    becomes(place, health_port(one.spec), 200)
    one.set(endpoints=(going,))
    becomes(place, health_port(one.spec), 503)
    outcome = place.world.p1.tcp(one.ipv4, 80, count=3)
    assert outcome.backends == {pod.name: 3}
    one.set(endpoints=(ready,))
    becomes(place, health_port(one.spec), 200)


def test_a_port_moves_and_goes_with_its_service(place: Place) -> None:
    """HC-01 and HC-08."""
    one = balanced(place, on("n1", 1))
    old = health_port(one.spec)
    becomes(place, old, 200)
    one.set(node_port=one.spec.node_port + 500)
    new = health_port(one.spec)
    becomes(place, new, 200)
    becomes(place, old, None)
    one.set(external_local=False)
    becomes(place, new, None)
    one.set(external_local=True)
    becomes(place, new, 200)
    place.world.agent.manifests.remove(one.name)
    place.world.agent.settle()
    becomes(place, new, None)


def test_a_port_that_another_process_has(place: Place) -> None:
    """HC-09 and B-47: told once, other Services unaffected, served when it is free."""
    agent = place.world.agent
    spec = place.world.spec(balanced=True, external_local=True, endpoints=on("n1", 1))
    port, since = health_port(spec), agent.mark
    holder = place.world.node.serve(tcp=[port])
    (one,) = place.world.services(spec)
    event = "a Service's health port is not served; trying again"
    said = agent.wait_for(event, since=since, service=f"default/{one.name}", port=port)
    assert "process" in said["holder"]
    for number in range(2, 5):
        other = balanced(place, on("n1", number))
        becomes(place, health_port(other.spec), 200)
    assert len(agent.log(event, since=since)) == 1
    holder.stop()
    becomes(place, port, 200)


def test_an_agent_that_stops_leaves_no_port_and_a_new_one_has_them_all(place: Place) -> None:
    one = balanced(place, on("n1", 1))
    becomes(place, health_port(one.spec), 200)
    place.world.agent.end(signal.SIGTERM)
    assert status(place, health_port(one.spec)) is None
    place.world.agent.start()
    becomes(place, health_port(one.spec), 200)


def test_only_at_selected_addresses_as_they_come(tmp_path: Path) -> None:
    """HC-07."""
    selected = ("192.168.50.101/32", "fd50::/64")
    with placed(
        tmp_path,
        flags=("--nodeport-addresses", ",".join(selected)),
        plans_by={"node_port_addresses": selected},
    ) as place:
        one = balanced(place, on("n1", 1))
        port, node = health_port(one.spec), place.world.node
        wait_until(
            lambda: ask(place, port, host=node.ipv6) is not None, what="it answers over IPv6"
        )
        assert ask(place, port) is None
        node.address("192.168.50.101/32")
        wait_until(
            lambda: ask(place, port, host="192.168.50.101") is not None,
            what="it answers at the address that came",
        )
        assert ask(place, port) is None
