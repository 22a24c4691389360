# SPDX-License-Identifier: Apache-2.0
"""Pods on a Linux bridge, where an answer may be switched past netfilter and past us."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ebpflb.lab.addresses import pod_ipv4, pod_ipv6
from ebpflb.model import Family
from tests.netns.site import PATIENCE_S, Site, To, site, spelt
from tests.netns.world import Way

GUARD = """
table inet guard {
    chain through {
        type filter hook forward priority filter
        ct state invalid counter drop
    }
}
"""
NF_CALL = "net.bridge.bridge-nf-call-{}"


class Bridged(NamedTuple):
    """``calls``: bridge-nf-call-iptables; ``drops``: netfilter drops what it finds INVALID."""

    calls: bool
    drops: bool

    @property
    def label(self) -> str:
        calls = "netfilter sees what is switched" if self.calls else "netfilter does not see it"
        return f"{calls}, {'INVALID is dropped' if self.drops else 'INVALID passes'}"


@pytest.fixture(
    scope="module",
    params=[Bridged(calls, drops) for calls in (False, True) for drops in (False, True)],
    ids=lambda one: one.label,
)
def bridged(request: pytest.FixtureRequest) -> Bridged:
    chosen: Bridged = request.param
    if chosen.calls and not Path("/proc/sys/net/bridge").exists():
        pytest.skip("kernel lacks br_netfilter")
    return chosen


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, bridged: Bridged) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("bridges"), nodes=2, pod_links="bridge") as one:
        one.backend("be1")
        one.backend("far", one.n2)
        one.backend("k1", virtual=True, hairpin=bridged.calls)
        if Path("/proc/sys/net/bridge").exists():
            for tool in ("iptables", "ip6tables"):
                one.n1.sysctl(NF_CALL.format(tool), int(bridged.calls))
        if bridged.drops:
            one.n1.run(["nft", "-f", "-"], text_in=GUARD)
        with one.running():
            yield one


def gateway(place: Site, family: Family) -> str:
    """What a node's own traffic to its pods bears: the bridge's address."""
    number = place.n1.number
    return pod_ipv6(number, 1) if family is Family.IPV6 else pod_ipv4(number, 1)


@pytest.mark.parametrize("to", [To.CLUSTER_IP, To.NODE_PORT, To.BALANCER], ids=lambda to: to.value)
def test_a_pod_reaches_a_pod_on_the_same_bridge(
    place: Site, bridged: Bridged, to: To, family: Family, way: Way
) -> None:
    """K10, CT-27: whole transfers, not a handshake alone; source NAT only where it must be."""
    (client,) = place.pods("k1")
    with place.serve("be1") as service:
        dialled = service.address(way, family, to)
        size = 300_000 if way is Way.TCP else 5_000
        outcome = way.ask(client, *dialled, 5, size=size, timeout_s=PATIENCE_S)
    assert outcome.backends == {"be1": 5}, outcome
    if way is Way.UDP:
        assert outcome.sources == {spelt(dialled): 5}
    own = client.ipv6 if family is Family.IPV6 else client.ipv4
    keeps_own = to is To.CLUSTER_IP and bridged.calls
    assert outcome.seen_as.keys() == {own if keeps_own else gateway(place, family)}


def test_a_pod_on_a_bridge_reaches_itself(place: Site, family: Family, way: Way) -> None:
    """B-139, POL-13, MASQ-06: its port sends nothing back by itself, nor need it, mostly.

    Where netfilter sees what is switched it makes the answer one that is switched, and the port
    has to have hairpin mode, as with kube-proxy.
    """
    (client,) = place.pods("k1")
    with place.serve("k1") as service:
        for to in (To.CLUSTER_IP, To.NODE_PORT, To.EXTERNAL):
            outcome = way.ask(client, *service.address(way, family, to), 3, timeout_s=PATIENCE_S)
            assert outcome.backends == {"k1": 3}, (to, outcome)
            assert outcome.seen_as.keys() == {gateway(place, family)}


def test_others_reach_a_pod_on_a_bridge(place: Site, family: Family, way: Way) -> None:
    """From outside, and from the other node's pods: their answers are routed."""
    size = 100_000 if way is Way.TCP else 0
    with place.serve("be1", "far") as service:
        for name, node in (("x", place.n1), ("k1", place.n2), ("x", place.n2)):
            dialled = service.address(way, family, at=node)
            outcome = way.ask(place.client(name), *dialled, 20, timeout_s=PATIENCE_S, size=size)
            assert outcome.failed == 0, (name, node.name, outcome)
            assert outcome.backends.keys() == {"be1", "far"}


def test_a_source_is_kept_on_the_way_to_another_node(place: Site, family: Family, way: Way) -> None:
    """TV-M01: the answer comes by the uplink, so netfilter sees it whatever the bridge does."""
    (client,) = place.pods("k1")
    with place.serve("far") as service:
        dialled = service.address(way, family, To.CLUSTER_IP)
        outcome = way.ask(client, *dialled, 5, timeout_s=PATIENCE_S)
    assert outcome.backends == {"far": 5}
    assert outcome.seen_as.keys() == {client.ipv6 if family is Family.IPV6 else client.ipv4}


def test_nothing_of_ours_was_found_invalid(place: Site, bridged: Bridged) -> None:
    """The counter of the rule that drops; the tests above have gone by it."""
    if not bridged.drops:
        assert "guard" not in place.n1.run(["nft", "list", "tables"]).stdout
        return
    rules = place.n1.run(["nft", "list", "table", "inet", "guard"]).stdout
    assert "counter packets 0 bytes 0 drop" in rules, rules
