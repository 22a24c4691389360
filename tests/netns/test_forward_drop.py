# SPDX-License-Identifier: Apache-2.0
"""A node whose FORWARD chain drops, as Docker, ufw and firewalld leave it, in either iptables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from ebpflb.lab import Lab, Node, wait_until
from ebpflb.model import Family
from tests.netns.site import PATIENCE_S, SILENCE_S, Site, To, site
from tests.netns.world import TCP_PORT, Way

BACK_ENDS = ("legacy", "nft")


@pytest.fixture(scope="module", params=BACK_ENDS, ids=lambda one: f"iptables-{one}")
def back_end(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    with Lab("iptables") as lab:
        probe = lab.namespace("probe")
        for tool in ("iptables", "ip6tables"):
            if probe.run(["sh", "-c", f"{tool}-{chosen} -S FORWARD"], check=False).returncode:
                pytest.skip(f"kernel lacks what {tool}-{chosen} needs, or that is not installed")
    return chosen


def set_policy(node: Node, back_end: str, policy: str) -> None:
    for tool in ("iptables", "ip6tables"):
        node.run([f"{tool}-{back_end}", "-P", "FORWARD", policy])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, back_end: str) -> Iterator[Site]:
    """The policy is there before the agent is."""
    with site(tmp_path_factory.mktemp("drop"), nodes=2) as one:
        one.backend("be1")
        one.backend("far", one.n2)
        one.n1.pod("k1", virtual=True)
        set_policy(one.n1, back_end, "DROP")
        with one.running(but="audit repaired a difference"):
            yield one


def asked_directly(place: Site, family: Family) -> int:
    """How many new connections that bear no mark of ours come through."""
    (backend,) = place.pods("be1")
    host = backend.ipv6 if family is Family.IPV6 else backend.ipv4
    return place.x.tcp(host, TCP_PORT, timeout_s=SILENCE_S).good


@pytest.mark.parametrize("backend", ["be1", "far"], ids=["a backend here", "a backend elsewhere"])
def test_what_we_masquerade_goes_through(
    place: Site, backend: str, family: Family, way: Way
) -> None:
    """MASQ-13, K3: by NodePort, balancer and, from the outside, ClusterIP; large answers too."""
    with place.serve(backend) as service:
        for to in (To.NODE_PORT, To.BALANCER, To.CLUSTER_IP):
            host, port = service.address(way, family, to)
            size = 100_000 if way is Way.TCP else 4_000
            outcome = way.ask(place.x, host, port, 3, timeout_s=PATIENCE_S, size=size)
            assert outcome.backends == {backend: 3}, (to, outcome)


def test_what_bears_no_mark_stays_dropped(place: Site, family: Family, way: Way) -> None:
    """MASQ-13: kube-proxy accepts no new unmarked packet either, so neither do we."""
    assert asked_directly(place, family) == 0
    with place.service(pods=place.pods("be1"), balanced=True, external_local=True) as service:
        host, port = service.address(way, family)
        assert way.ask(place.x, host, port, timeout_s=SILENCE_S).good == 0
        pod = place.client("k1")
        host, port = service.address(way, family, To.CLUSTER_IP)
        assert way.ask(pod, host, port, timeout_s=SILENCE_S).good == 0


def test_who_is_refused_is_told(place: Site, family: Family, way: Way) -> None:
    """NOEP-01 to -03 need the packet to come as far as our REJECT."""
    with place.serve() as service:
        for client, to in (("x", To.NODE_PORT), ("x", To.BALANCER), ("k1", To.CLUSTER_IP)):
            host, port = service.address(way, family, to)
            outcome = way.ask(
                place.client(client), host, port, timeout_s=PATIENCE_S, recverr=way is not Way.TCP
            )
            assert outcome.errors == {"ECONNREFUSED": 1}, (client, to)


@contextlib.contextmanager
def policy_of(place: Site, back_end: str, policy: str) -> Iterator[None]:
    set_policy(place.n1, back_end, policy)
    try:
        yield
    finally:
        set_policy(place.n1, back_end, "DROP")


def test_rules_that_somebody_flushed_are_put_back(
    place: Site, back_end: str, family: Family
) -> None:
    """B-181's like: another tool's flush of the chain; seen without a restart of ours."""
    tool = "ip6tables" if family is Family.IPV6 else "iptables"
    with place.serve("be1") as service:
        host, port = service.address(Way.TCP, family)
        assert place.x.tcp(host, port, timeout_s=PATIENCE_S).good == 1
        place.n1.run([f"{tool}-{back_end}", "-F", "FORWARD"])
        wait_until(
            lambda: place.x.tcp(host, port, timeout_s=SILENCE_S).good,
            timeout_s=90,
            what="NodePorts work again",
        )
    assert asked_directly(place, family) == 0


def test_a_policy_that_comes_later_is_noticed(place: Site, back_end: str, family: Family) -> None:
    """Docker is started after us: its policy and its fresh chain."""
    tool = "ip6tables" if family is Family.IPV6 else "iptables"
    with place.serve("be1") as service:
        host, port = service.address(Way.TCP, family)
        with policy_of(place, back_end, "ACCEPT"):
            place.n1.run([f"{tool}-{back_end}", "-F", "FORWARD"])
            assert asked_directly(place, family) == 1
        wait_until(
            lambda: place.x.tcp(host, port, timeout_s=SILENCE_S).good,
            timeout_s=90,
            what="NodePorts work again",
        )
