# SPDX-License-Identifier: Apache-2.0
"""This node's own addresses: which there are, that a change is seen at once, and what follows."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ebpflb.lab import Lab, Loop, Node
from ebpflb.model import Address, LocalAddresses, parse_address
from ebpflb.node import AddressWatch, local_addresses
from tests.netns.agents import SMALL, Agent
from tests.netns.services import ready
from tests.netns.world import MakeService, Way, World

TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Lab("addresses") as lab:
        yield lab.node("n1")


def ip(node: Node, arguments: str) -> None:
    node.run(["ip", *arguments.split()])


class Seen:
    """What a watch on the node has emitted, and what it has complained of."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._states: list[frozenset[Address]] = []
        self.notices: list[str] = []

    def emit(self, event: LocalAddresses) -> None:
        with self._changed:
            self._states.append(event.addresses)
            self._changed.notify_all()

    def notice(self, event: str, /, **_fields: object) -> None:
        self.notices.append(event)

    @property
    def count(self) -> int:
        return len(self._states)

    @property
    def now(self) -> frozenset[Address]:
        return self._states[-1]

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S)


@pytest.fixture
def seen(node: Node) -> Iterator[Seen]:
    made = Seen()
    watch = AddressWatch(made.emit, made.notice)
    node.inside(watch.start)
    yield made
    assert watch.alive()
    watch.stop()
    assert made.notices == []
    assert made.now == node.inside(local_addresses)


CHANGES = {
    "an IPv4 address": ("addr {} 192.168.50.77/24 dev eth0", "192.168.50.77"),
    "an IPv4 address of the loopback": ("addr {} 192.168.50.78/32 dev lo", "192.168.50.78"),
    "an IPv6 address": ("addr {} fd50::77/64 dev eth0 nodad", "fd50::77"),
    "an address with a peer": ("addr {} 192.168.50.79 peer 192.168.51.1 dev eth0", "192.168.50.79"),
    "a cloud agent's route": ("route {} local 10.9.9.9/32 dev eth0 proto 66", "10.9.9.9"),
    "a cloud agent's IPv6 route": ("-6 route {} local fd99::1/128 dev lo", "fd99::1"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_comes_and_goes_is_seen(node: Node, seen: Seen, change: tuple[str, str]) -> None:
    """NP-05 and B-171: as iptables' LOCAL has it, without waiting for a sync."""
    command, text = change
    address = parse_address(text)
    assert address not in seen.now
    ip(node, command.format("add"))
    seen.wait(lambda: address in seen.now)
    ip(node, command.format("del"))
    seen.wait(lambda: address not in seen.now)


def test_what_there_is_at_first(node: Node, seen: Seen) -> None:
    expected = {parse_address(text) for text in ("127.0.0.1", "::1", node.ipv4, node.ipv6)}
    assert expected <= seen.now
    assert seen.count == 1


def test_other_routes_and_local_networks_wake_nobody(node: Node, seen: Seen) -> None:
    """A route of the last address that is told comes behind all others."""
    for arguments in (
        "route add 10.99.0.0/16 dev eth0",
        "route add blackhole 10.98.0.1/32",
        "-6 route add fd98::/64 dev eth0",
        "route add local 10.97.0.0/24 dev lo",
        "route add local 10.9.9.8/32 dev lo table 100",
        "route add local 10.9.9.7/32 dev lo",
    ):
        ip(node, arguments)
    seen.wait(lambda: parse_address("10.9.9.7") in seen.now)
    assert seen.count == 2
    assert parse_address("10.9.9.8") not in seen.now
    ip(node, "route del local 10.9.9.7/32 dev lo")
    seen.wait(lambda: seen.count == 3)


def test_an_interface_brings_and_takes_its_addresses(node: Node, seen: Seen) -> None:
    """IPv6 addresses go when it is down, IPv4 ones stay the node's: as the kernel has it."""
    ipv4, ipv6 = parse_address("10.5.5.5"), parse_address("fd55::1")
    ip(node, "link add br5 type bridge")
    ip(node, "link set br5 up")
    ip(node, "addr add 10.5.5.5/32 dev br5")
    ip(node, "addr add fd55::1/64 dev br5 nodad")
    seen.wait(lambda: {ipv4, ipv6} <= seen.now)
    ip(node, "link set br5 down")
    seen.wait(lambda: ipv6 not in seen.now)
    assert ipv4 in seen.now
    ip(node, "link del br5")
    seen.wait(lambda: ipv4 not in seen.now)


@contextlib.contextmanager
def looking_for_duplicates(node: Node) -> Iterator[None]:
    """Addresses are tentative for a second or two, as they are on machines that are no lab."""
    settings = {
        "net.ipv6.conf.all.accept_dad": 1,
        "net.ipv6.conf.eth0.accept_dad": 1,
        "net.ipv6.conf.eth0.dad_transmits": 2,
    }
    before = {name: node.sysctl(name) for name in settings}
    for name, value in settings.items():
        node.sysctl(name, value)
    try:
        yield
    finally:
        for name, text in before.items():
            node.sysctl(name, text)


def test_an_ipv6_address_is_the_nodes_when_no_other_machine_has_it(node: Node, seen: Seen) -> None:
    """While duplicates are looked for there is no local route, and nothing is told."""
    address = parse_address("fd50::d")
    with looking_for_duplicates(node):
        ip(node, "addr add fd50::d/64 dev eth0")
        tentative = node.run(["ip", "-6", "addr", "show", "dev", "eth0", "tentative"]).stdout
        assert "fd50::d/" in tentative
        assert address not in node.inside(local_addresses)
        seen.wait(lambda: address in seen.now)
    ip(node, "addr del fd50::d/64 dev eth0")
    seen.wait(lambda: address not in seen.now)


@pytest.mark.parametrize("way", list(Way), ids=lambda way: way.value)
def test_a_nodeport_answers_at_an_address_that_comes_later(
    world: World, service: MakeService, way: Way
) -> None:
    """NP-05: at once, and no longer when the address has gone."""
    one = service(node_port=True, pods=world.backends[:1])
    world.node.address("192.168.50.88/32")
    try:
        world.agent.settle()
        outcome = way.ask(world.p1, "192.168.50.88", one.spec.node_port, 5)
        assert outcome.backends == {"be1": 5}
    finally:
        ip(world.node, "addr del 192.168.50.88/32 dev eth0")
    world.agent.settle()


def go_on(loop: Loop) -> None:
    good = loop.outcome().good
    loop.wait_for(lambda now: now.good > good + 100, what="it goes on")


SLOW = (sys.executable, str(Path(__file__).with_name("slow_addresses.py")))


def test_an_agent_that_does_not_know_its_addresses_takes_no_nodeport_away(tmp_path: Path) -> None:
    """B-89: at its start it changes nothing before they are known, and then follows."""
    told = tmp_path / "told"
    with Lab("slow") as lab:
        world = World(lab, tmp_path)
        with world.agent:
            (one,) = world.services(world.spec(node_port=True, pods=world.backends[:1]))
        slow = Agent(
            world.node,
            world.agent.manifests,
            *("--map-size", SMALL),
            command=SLOW,
            env={"EBPFLB_TEST_ADDRESSES": str(told)},
        )
        clients = [
            world.p1.tcp_loop(world.node.ipv4, one.spec.node_port, interval_s=0.005),
            world.node.tcp_loop(world.node.ipv4, one.spec.node_port, interval_s=0.005),
        ]
        slow.launch()
        try:
            slow.wait_for("this node's addresses cannot be read; trying again")
            world.agent.manifests.put(
                msgspec.structs.replace(one.spec, endpoints=ready(world.backends[1]))
            )
            for client in clients:
                go_on(client)
            assert slow.log("synced") == []
            told.touch()
            slow.serving()
            slow.settle()
        finally:
            slow.kill()
        outcomes = [client.stop() for client in clients]
    assert [one.failed for one in outcomes] == [0, 0]
    assert all(one.backends.keys() <= {"be1", "be2"} for one in outcomes)
