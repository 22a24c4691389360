# SPDX-License-Identifier: Apache-2.0
"""A node with two ways to the outside, and with addresses and devices that come later.

``y`` is a client behind the second uplink, and ``x`` one behind the first; each can also be reached
by the other way, where a route says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from ebpflb.lab import Namespace, wait_until
from ebpflb.model import Family
from tests.netns.site import PATIENCE_S, SILENCE_S, Served, Site, To, site
from tests.netns.world import Way

LATER_S = 30.0

NODE = {Family.IPV4: "172.31.1.1", Family.IPV6: "fd31:1::1"}
OTHER = {Family.IPV4: "172.31.1.9", Family.IPV6: "fd31:1::9"}


def length(family: Family) -> int:
    return 64 if family is Family.IPV6 else 24


class TwoUplinks:
    def __init__(self, place: Site, y: Namespace) -> None:
        self.place = place
        self.y = y

    def dials(
        self, client: Namespace, service: Served, host: str, way: Way, *, count: int = 5
    ) -> None:
        """A NodePort at some address of the node's answers, from both backends' nodes."""
        outcome = way.ask(client, host, service.spec.node_port, count, timeout_s=PATIENCE_S)
        assert outcome.failed == 0, outcome
        assert outcome.backends.keys() <= {"be1", "far"}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoUplinks]:
    with site(tmp_path_factory.mktemp("uplinks"), nodes=2) as one:
        one.backend("be1")
        one.backend("far", one.n2)
        y = one.lab.namespace("y")
        one.lab.link(one.n1, "eth1", y, "eth0")
        for family in Family:
            one.n1.address(f"{NODE[family]}/{length(family)}", device="eth1")
            y.address(f"{OTHER[family]}/{length(family)}")
        y.links(lambda links: links.route("default", via=NODE[Family.IPV4]))
        y.links(lambda links: links.route("default6", via=NODE[Family.IPV6]))
        with one.running():
            yield TwoUplinks(one, y)


@pytest.fixture
def service(two: TwoUplinks) -> Iterator[Served]:
    with two.place.serve("be1", "far") as one:
        yield one


def test_node_ports_answer_at_each_uplink(
    two: TwoUplinks, service: Served, family: Family, way: Way
) -> None:
    """NP-01, NP-02: each client at the address that it knows; the backends are on both nodes."""
    two.dials(two.y, service, NODE[family], way, count=20)
    first, _ = service.address(way, family)
    two.dials(two.place.x, service, first, way, count=20)


def test_services_addresses_are_reached_by_each_uplink(
    two: TwoUplinks, service: Served, family: Family, way: Way
) -> None:
    for to in (To.CLUSTER_IP, To.EXTERNAL, To.BALANCER):
        outcome = way.ask(two.y, *service.address(way, family, to), 10, timeout_s=PATIENCE_S)
        assert outcome.failed == 0, outcome


def test_the_address_of_one_uplink_is_dialled_by_the_other(
    two: TwoUplinks, service: Served, family: Family, way: Way
) -> None:
    """The node is one node, whichever of its addresses is meant."""
    first, _ = service.address(way, family)
    two.dials(two.y, service, first, way, count=10)


@pytest.mark.parametrize("local", [False, True], ids=["Cluster", "external Local"])
def test_answers_may_leave_by_the_other_uplink(
    two: TwoUplinks, family: Family, way: Way, local: bool
) -> None:
    """B-153, H-15: a flow is known by its addresses, not by the device that it came in on.

    ``x`` asks by the first uplink; the node's route back to it leads through ``y``, which carries
    the answers over a wire of its own.
    """
    place = two.place
    six = family is Family.IPV6
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(
            place.service(pods=place.pods("be1"), balanced=True, external_local=local)
        )
        two.y.sysctl("net.ipv6.conf.all.forwarding" if six else "net.ipv4.ip_forward", 1)
        place.lab.link(two.y, "to-x", place.x, "from-y")
        stack.callback(lambda: two.y.links(lambda links: links.delete("to-x")))
        back = place.x.ipv6 if six else place.x.ipv4
        bits = 128 if six else 32
        ours, theirs = ("fd31:2::1", "fd31:2::2") if six else ("172.31.2.1", "172.31.2.2")
        two.y.address(f"{ours}/{length(family)}", device="to-x")
        place.x.address(f"{theirs}/{length(family)}", device="from-y")
        two.y.route(f"{back}/{bits}", via=theirs)
        place.n1.route(f"{back}/{bits}", via=OTHER[family])
        stack.callback(
            lambda: place.n1.links(lambda links: links.ipr.route("del", dst=f"{back}/{bits}"))
        )
        with place.n1.capture("eth0") as first, place.n1.capture("eth1") as second:
            host, port = service.address(way, family)
            outcome = way.ask(place.x, host, port, 5, timeout_s=PATIENCE_S)
            assert outcome.backends == {"be1": 5}, outcome
            if local:
                assert outcome.seen_as.keys() == {back}
            protocol = "tcp" if way is Way.TCP else "udp"
            asked = f"[{host}]:{port}" if six else f"{host}:{port}"
            assert first.packets(direction="in", protocol=protocol, destination=asked) >= 5
            assert second.packets(direction="out", protocol=protocol, source=asked) >= 5


# --- what comes later -----------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["eth0", "eth1"])
def test_an_address_that_comes_later_has_node_ports_too_until_it_goes(
    two: TwoUplinks, service: Served, family: Family, device: str
) -> None:
    """NP-05: a second address of a device; told by rtnetlink, not by a restart."""
    six = family is Family.IPV6
    client: Namespace
    if device == "eth0":
        host, client = ("fd50::77" if six else "192.168.50.177"), two.place.x
    else:
        host, client = ("fd31:1::77" if six else "172.31.1.77"), two.y
    port = service.spec.node_port
    assert client.tcp(host, port, timeout_s=SILENCE_S).good == 0
    node = two.place.n1
    bits = 64 if six else 24
    node.address(f"{host}/{bits}", device=device)
    wait_until(
        lambda: client.tcp(host, port, timeout_s=1.0).good, timeout_s=LATER_S, what="it is served"
    )
    for way in Way:
        two.dials(client, service, host, way)

    def drop() -> None:
        node.links(
            lambda links: links.ipr.addr(
                "del", index=links.index(device), address=host, prefixlen=bits
            )
        )

    drop()
    wait_until(
        lambda: not client.tcp(host, port, timeout_s=SILENCE_S).good,
        timeout_s=LATER_S,
        what="it is served no more",
    )


def test_an_uplink_that_comes_later_gets_its_programs(
    two: TwoUplinks, service: Served, family: Family, way: Way
) -> None:
    """L-31: with its first address; and nothing is complained of when it goes."""
    six = family is Family.IPV6
    ours, theirs = ("fd31:3::1", "fd31:3::9") if six else ("172.31.3.1", "172.31.3.9")
    lab, node = two.place.lab, two.place.n1
    lab.link(node, "eth2", two.y, "late")
    try:
        node.address(f"{ours}/{length(family)}", device="eth2")
        two.y.address(f"{theirs}/{length(family)}", device="late")
        port = service.spec.node_port
        wait_until(
            lambda: two.y.tcp(ours, port, source=theirs, timeout_s=1.0).good,
            timeout_s=LATER_S,
            what="it is served",
        )
        outcome = way.ask(two.y, ours, port, 5, source=theirs, timeout_s=PATIENCE_S)
        assert outcome.failed == 0, outcome
    finally:
        node.links(lambda links: links.delete("eth2"))
    two.dials(two.y, service, NODE[family], way)


def test_a_pod_that_comes_later_is_seen_from_its_first_packets_on(
    two: TwoUplinks, service: Served, family: Family, way: Way
) -> None:
    """L-31: its device gets programs as soon as it is there."""
    pod = two.place.n1.pod("late", virtual=True)
    try:
        dialled = service.address(way, family, To.CLUSTER_IP)
        wait_until(
            lambda: way.ask(pod, *dialled, timeout_s=1.0).good,
            timeout_s=LATER_S,
            what="it is served",
        )
        outcome = way.ask(pod, *dialled, 20, timeout_s=PATIENCE_S)
        assert outcome.failed == 0, outcome
    finally:
        pod.remove()
