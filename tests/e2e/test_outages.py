# SPDX-License-Identifier: Apache-2.0
"""The API server and etcd die, come back, forget; the agent's own view of them is cut off.

What has been programmed stays in force meanwhile, whoever dials notices nothing, and afterwards
everything that happened is followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest

from ebpflb.lab import Lab, Loop
from tests.builders import ApiObject
from tests.e2e.agents import Agent
from tests.e2e.cluster import AGENT_RULES
from tests.e2e.objects import DNS, HTTP, Objects, Service
from tests.e2e.world import FOLLOW_S, FULL, World, reaches, unserved

KINDS = ("services", "endpointslices", "nodes")
ROUNDS = 2


@contextlib.contextmanager
def undisturbed(world: World, service: Service) -> Iterator[None]:
    """Every node's clients dial it all the while; not one attempt may fail, no entry may move."""
    before = [agent.entries(service.key) for agent in world.agents]
    loops: list[Loop] = []
    for client in world.clients:
        loops += [
            client.tcp_loop(service.ips[0], 80, interval_s=0.002),
            client.tcp_loop(service.ips[1], 80, interval_s=0.002),
            client.udp_loop(service.ips[0], 53, sockets=3, interval_s=0.005),
            client.hold_loop(service.ips[0], 80, parallel=2, interval_s=0.02),
        ]
    yield
    for loop in loops:
        outcome = loop.stop()
        assert outcome.failed == 0, (loop.title, outcome)
        assert outcome.good > 10, (loop.title, outcome)
    assert [agent.entries(service.key) for agent in world.agents] == before


def assert_followed(world: World, objects: Objects, service: Service) -> None:
    """What happens from now on is followed on every node: Services, and slices of old ones."""
    new = objects.service().endpoints(world.backends[1])
    service.endpoints(world.backends[2])
    for client in world.clients:
        for ip in new.ips:
            reaches(client, ip, 80, {"be2"})
        for ip in service.ips:
            reaches(client, ip, 80, {"be3"})
    service.endpoints(world.backends[0])
    new.delete()
    for node, client in zip(world.nodes, world.clients, strict=True):
        unserved(node, new.ip, 80)
        reaches(client, service.ip, 80, {"be1"})


@pytest.fixture
def stays(world: World, objects: Objects) -> Service:
    """A Service that nobody touches during the test."""
    service = objects.service(HTTP, DNS).endpoints(*world.backends)
    for client in world.clients:
        for ip in service.ips:
            reaches(client, ip, 80, {pod.name for pod in world.backends})
            reaches(client, ip, 53, {pod.name for pod in world.backends}, protocol="udp")
    return service


@pytest.fixture
def changes(world: World, objects: Objects) -> Service:
    """A Service whose only endpoint is be1."""
    service = objects.service().endpoints(world.backends[0])
    for client in world.clients:
        reaches(client, service.ip, 80, {"be1"})
    return service


# --- they die -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["kube-apiserver"], id="API server"),
        pytest.param(["etcd"], id="etcd"),
        pytest.param(["kube-apiserver", "etcd"], id="both"),
    ],
)
def test_killed_and_started_again_under_load(
    world: World, objects: Objects, stays: Service, changes: Service, victims: list[str]
) -> None:
    """E-S10, SYNC-08, HZ-07: nobody who dials notices, no map entry moves, health stays green."""
    marks = [agent.mark for agent in world.agents]
    with undisturbed(world, stays):
        for _ in range(ROUNDS):
            for part in world.cluster.parts:
                if part.name in victims:
                    part.kill()
            for agent in world.agents:
                assert agent.get("/healthz")[0] == 200
                assert agent.get("/livez")[0] == 200
            world.cluster.start()
            assert_followed(world, objects, changes)
    for agent, mark in zip(world.agents, marks, strict=True):
        told = [entry for entry in agent.log(since=mark) if entry["level"] != "info"]
        assert len(told) <= 4 * ROUNDS, told


def test_an_api_server_that_goes_in_order_comes_back(
    world: World, objects: Objects, stays: Service, changes: Service
) -> None:
    """It withdraws its own endpoint, and makes it anew."""
    with undisturbed(world, stays):
        world.cluster.apiserver.stop()
        world.cluster.start()
        assert_followed(world, objects, changes)
        (ip,) = world.admin.get("Service", "kubernetes")["spec"]["clusterIPs"]
        for client in world.clients:
            client.python(
                "import socket, sys; socket.create_connection((sys.argv[1], 443), 5)",
                arguments=[ip],
            )


def test_an_agent_that_starts_without_an_api_server_leaves_all_as_it_is(
    world: World, objects: Objects, stays: Service, changes: Service
) -> None:
    """SYNC-01: and goes on as soon as there is one."""
    with undisturbed(world, stays):
        world.cluster.apiserver.kill()
        agent = world.agent
        agent.end()
        agent.launch()
        agent.wait_for("api_lost")
        assert agent.log("synced") == []
        assert world.client.tcp(changes.ip, 80, count=3).backends == {"be1": 3}
        world.cluster.start()
        assert agent.wait_for("synced", timeout_s=FOLLOW_S)["writes"] == 0
        assert_followed(world, objects, changes)


@pytest.mark.parametrize(
    "notice", [False, *([True] if FULL else [])], ids=["short", "long"][: 1 + FULL]
)
def test_a_network_that_parts_and_heals_loses_nothing(
    world: World, objects: Objects, stays: Service, changes: Service, notice: bool
) -> None:
    """B-87: no FIN, no RST. Short, TCP gets over it; long, the agents notice and start anew."""
    marks = [agent.mark for agent in world.agents]
    with undisturbed(world, stays):
        with world.parted():
            new = objects.service().endpoints(world.backends[1])
            changes.endpoints(world.backends[2])
            for client in world.clients:
                assert client.tcp(changes.ip, 80, count=3).backends == {"be1": 3}
            for agent, mark in zip(world.agents, marks, strict=True):
                assert agent.get("/healthz")[0] == 200
                if notice:
                    agent.wait_for("api_lost", since=mark, timeout_s=120.0)
        for client in world.clients:
            reaches(client, new.ip, 80, {"be2"})
            reaches(client, changes.ip, 80, {"be3"})
        assert_followed(world, objects, changes)


# --- they forget --------------------------------------------------------------------------------


def test_what_was_compacted_away_is_listed_anew(
    world: World, objects: Objects, stays: Service, changes: Service
) -> None:
    """SYNC-07, B-91: it hangs, the world goes on and is forgotten; 410, relist, nothing lost."""
    _compacted(world, objects, stays, changes)


def test_what_was_compacted_away_is_listed_anew_from_etcd_itself() -> None:
    """The same where the API server keeps nothing in memory: the 410 is etcd's."""
    with Lab("uncached") as lab, World(lab, watch_cache=False) as world:
        world.start_agents()
        objects = Objects(world.admin)
        stays = objects.service(HTTP, DNS).endpoints(*world.backends)
        changes = objects.service().endpoints(world.backends[0])
        for ip in (*stays.ips, *changes.ips):
            reaches(world.client, ip, 80, {"be1", "be2", "be3"} if ip in stays.ips else {"be1"})
        _compacted(world, objects, stays, changes)
        assert world.agent.faults() == []


def _compacted(world: World, objects: Objects, stays: Service, changes: Service) -> None:
    be1, be2, *_ = world.backends
    version = world.admin.version("Service")
    before = [_gone(agent) for agent in world.agents]
    goes = objects.service().endpoints(be1)
    for client in world.clients:
        reaches(client, goes.ip, 80, {"be1"})
    with undisturbed(world, stays):
        with contextlib.ExitStack() as stack:
            for agent in world.agents:
                stack.enter_context(agent.paused())
            objects.secret()  # so that no version of theirs is the newest
            world.cluster.apiserver.kill()
            world.cluster.start()
            # Their connections are dead: of this nothing waits for them in any buffer.
            comes = objects.service().endpoints(be2)
            changes.endpoints(be2)
            goes.delete()
            world.cluster.compact()
            assert '"code":410' in world.admin.watched("Service", since=version)
        for client, node in zip(world.clients, world.nodes, strict=True):
            reaches(client, comes.ip, 80, {"be2"})
            reaches(client, changes.ip, 80, {"be2"})
            unserved(node, goes.ip, 80)
    for agent, count in zip(world.agents, before, strict=True):
        assert _gone(agent) > count, agent.failures()


def _gone(agent: Agent) -> float:
    """How often its watches were told that what they ask for is kept no more."""
    return sum(count for name, count in agent.failures().items() if 'reason="gone"' in name)


def test_an_agent_that_hangs_catches_up(
    world: World, objects: Objects, stays: Service, changes: Service
) -> None:
    """More happens meanwhile than any buffer on the way holds."""
    big = objects.service()
    with undisturbed(world, stays), contextlib.ExitStack() as stack:
        for agent in world.agents:
            stack.enter_context(agent.paused())
        for number in range(200):
            objects.crowd(big, 500, shift=number % 2)
        changes.endpoints(world.backends[1])
        stack.close()
        for client in world.clients:
            reaches(client, changes.ip, 80, {"be2"})
        assert_followed(world, objects, changes)


# --- what is asked of them ----------------------------------------------------------------------


def test_no_more_is_asked_for_than_is_granted(world: World, objects: Objects) -> None:
    """SYNC-12, CFG-56: only this node's Node is asked for, and each right is used."""
    asked = len(world.cluster.requests())
    world.agent.restart()
    used: set[tuple[str, str]] = set()
    for one in world.cluster.requests()[asked:]:
        assert one["responseStatus"]["code"] < 300, one
        assert one["userAgent"].startswith("ebpflb/")
        used.add((one["objectRef"]["resource"], one["verb"]))
        _assert_well_put(one)
    granted = {
        (resource, verb)
        for rule in AGENT_RULES
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    assert used <= granted
    assert {(kind, "list") for kind in KINDS} <= used


def _assert_well_put(request: ApiObject) -> None:
    query = parse_qs(urlsplit(request["requestURI"]).query)
    if request["objectRef"]["resource"] == "nodes":
        assert query["fieldSelector"] in (["metadata.name=n1"], ["metadata.name=n2"])
    if request["verb"] == "watch":
        assert query["allowWatchBookmarks"] == ["true"]
        assert int(query["timeoutSeconds"][0]) > 0
