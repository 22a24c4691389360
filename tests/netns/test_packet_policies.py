# SPDX-License-Identifier: Apache-2.0
"""Who is let in, who is told no, and who always gets the same: decided packet by packet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ebpflb.model import Family
from tests.netns.services import ready, terminating
from tests.netns.site import PATIENCE_S, SILENCE_S, Served, Site, To, goes_on, site, spelt
from tests.netns.world import UDP_PORT, Way

ELSEWHERE = ("192.0.2.0/24", "2001:db8::/32")
OUTSIDE = ("192.168.60.0/24", "fd60::/64")
PODS = ("10.244.0.0/16", "fd00:244::/32")
NODES = ("192.168.50.0/24", "fd50::/64")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("policies"), nodes=2) as one:
        for name in ("be1", "be2"):
            one.backend(name)
        one.backend("far", one.n2)
        one.lab.external("x2")
        one.n1.pod("k1", virtual=True)
        one.n1.pod("p1")
        with one.running():
            yield one


# --- source ranges --------------------------------------------------------------------------------

ALL = {To.CLUSTER_IP: True, To.NODE_PORT: True, To.EXTERNAL: True, To.BALANCER: True}
NOT_BALANCER = ALL | {To.BALANCER: False}


def reached(place: Site, service: Served, client: str, way: Way, family: Family) -> dict[To, bool]:
    """Which addresses answer; the others are silent."""
    found = {}
    for to in ALL:
        patience_s = SILENCE_S if to is To.BALANCER else PATIENCE_S
        dialled = service.address(way, family, to)
        outcome = way.ask(place.client(client), *dialled, timeout_s=patience_s)
        found[to] = outcome.good == 1
        assert outcome.errors.keys() <= {"TIMEOUT"}, (to, outcome)
    return found


@pytest.mark.parametrize("local", [False, True], ids=["Cluster", "external Local"])
@pytest.mark.parametrize(
    ("ranges", "kept_out"),
    [
        pytest.param((), set(), id="nobody is kept out"),
        pytest.param(ELSEWHERE, {"x", "k1", "p1"}, id="everybody is"),
        pytest.param(OUTSIDE, {"k1", "p1"}, id="the outside is let in"),
        pytest.param((*ELSEWHERE, *PODS), {"x"}, id="pods are let in"),
        pytest.param((*PODS, *OUTSIDE), set(), id="all are let in by name"),
    ],
)
def test_source_ranges_guard_the_balancers_address_alone(
    place: Site,
    ranges: tuple[str, ...],
    kept_out: set[str],
    local: bool,
    family: Family,
) -> None:
    """LB-05, LB-06, TV-F08 to -F11, E-LB02, B-159: by a packet's source; dropped, not refused."""
    before = place.agent.kernel.stats()["dropped_range"]
    with place.service(
        pods=place.pods("be1"),
        external=True,
        balanced=True,
        external_local=local,
        source_ranges=ranges,
    ) as service:
        for client in ("x", "k1", "p1"):
            for way in (Way.TCP, Way.CONNECTED_UDP):
                expected = NOT_BALANCER if client in kept_out else ALL
                assert reached(place, service, client, way, family) == expected, (client, way)
    after = place.agent.kernel.stats()["dropped_range"]
    assert after - before >= 2 * len(kept_out)
    assert bool(after - before) is bool(kept_out)


def test_each_address_of_a_balancer_is_guarded_alike(place: Site, family: Family) -> None:
    """B-157"""
    with place.service(pods=place.pods("be1"), balanced=True, source_ranges=ELSEWHERE) as service:
        more = ("203.0.113.251", "fd99::251")
        service.set(ingress_ips=(*service.spec.ingress_ips, *more))
        hosts = service.spec.ingress_ips[family is Family.IPV6 :: 2]
        assert len(hosts) == 2
        for ranges, good in ((ELSEWHERE, 0), (OUTSIDE, 1)):
            service.set(source_ranges=ranges)
            for host in hosts:
                patience_s = PATIENCE_S if good else SILENCE_S
                assert place.x.tcp(host, 80, timeout_s=patience_s).good == good


def test_ranges_are_switched_under_way_and_open_connections_stay(
    place: Site, family: Family
) -> None:
    """B-155, E-LB02: the other addresses never notice, and who is inside stays."""
    with place.service(pods=place.pods("be1"), balanced=True) as service:
        balancer = service.address(Way.TCP, family, To.BALANCER)
        node_port = service.address(Way.TCP, family)
        with (
            place.client("k1").hold_loop(*balancer, interval_s=0.01) as held,
            place.x.tcp_loop(*node_port, interval_s=0.005) as steady,
        ):
            goes_on(held)
            for ranges, good in (
                (ELSEWHERE, 0),
                ((*ELSEWHERE, *OUTSIDE), 1),
                ((), 1),
                (ELSEWHERE, 0),
            ):
                service.set(source_ranges=ranges)
                patience_s = PATIENCE_S if good else SILENCE_S
                assert place.x.tcp(*balancer, timeout_s=patience_s).good == good, ranges
                goes_on(held)
            assert held.stop().failed == 0
            assert steady.stop().failed == 0


def test_without_endpoints_everybody_is_refused(place: Site, family: Family) -> None:
    """LB-08, NOEP-16: as in iptables mode, where the guard comes with the endpoints."""
    with place.service(balanced=True, source_ranges=ELSEWHERE) as service:
        for client in ("x", "k1", "p1"):
            for way in (Way.TCP, Way.CONNECTED_UDP):
                dialled = service.address(way, family, To.BALANCER)
                outcome = way.ask(place.client(client), *dialled, timeout_s=PATIENCE_S)
                assert outcome.errors == {"ECONNREFUSED": 1}, (client, way)


# --- policies that change, endpoints that go ------------------------------------------------------


def test_policies_are_switched_under_way(place: Site, family: Family) -> None:
    """POL-10, E-LB11: not one connection fails; the next shows the new policy's source."""
    node, client = (
        (place.n1.ipv6, place.x.ipv6) if family is Family.IPV6 else (place.n1.ipv4, place.x.ipv4)
    )
    with place.service(pods=place.pods("be1", "far"), balanced=True) as service:
        dialled = service.address(Way.TCP, family)
        with place.x.tcp_loop(*dialled, interval_s=0.002) as steady:
            for local in (True, False, True):
                service.set(external_local=local)
                outcome = place.x.tcp(*dialled, count=25)
                assert outcome.backends.keys() == ({"be1"} if local else {"be1", "far"})
                assert outcome.seen_as.keys() == {client if local else node}
            assert steady.stop().failed == 0


def test_a_terminating_endpoint_here_serves_the_outside(place: Site, family: Family) -> None:
    """B-49, TOP-03, TV-X02: it alone is here and going; pods are led to the one elsewhere."""
    here, there = place.pods("be1", "far")
    with place.service(
        endpoints=(*terminating(here), *ready(there)), balanced=True, external_local=True
    ) as service:
        dialled = service.address(Way.TCP, family)
        assert place.x.tcp(*dialled, count=10).backends == {"be1": 10}
        assert place.client("k1").tcp(*dialled, count=10).backends == {"far": 10}


def test_open_connections_outlive_endpoints_and_services(place: Site, family: Family) -> None:
    """BAL-03, NOEP-11: TCP drains, whoever is refused from then on."""
    with place.service(pods=place.pods("be1")) as service:
        dialled = service.address(Way.TCP, family)
        held = place.x.hold_loop(*dialled, parallel=3, interval_s=0.01)
        goes_on(held)
        service.set(endpoints=())
        assert place.x.tcp(*dialled, timeout_s=PATIENCE_S).errors == {"ECONNREFUSED": 1}
        goes_on(held, by=30)
    place.agent.settle()
    goes_on(held, by=30)
    assert held.stop().failed == 0


# --- affinity -------------------------------------------------------------------------------------


def test_a_client_is_known_by_its_address(place: Site, family: Family, way: Way) -> None:
    """AFF-01, AFF-02, AFF-09, E-S24, E-S27: at every address of the Service, on this node."""
    x2 = place.lab.externals["x2"]
    with place.service(
        pods=place.pods("be1", "be2", "far"), external=True, balanced=True, affinity_s=100
    ) as service:
        for client in (place.x, x2, place.client("k1")):
            seen: set[str] = set()
            for to in To:
                outcome = way.ask(client, *service.address(way, family, to), 8)
                assert outcome.failed == 0, outcome
                seen |= outcome.backends.keys()
            assert len(seen) == 1, (client, seen)


def test_clients_do_not_share_a_record(place: Site, family: Family) -> None:
    """AFF-02: two addresses of one client are two clients; some choose differently."""
    with place.services(12, pods=place.pods("be1", "far"), affinity_s=100) as services:
        chosen = []
        for service in services:
            dialled = service.address(Way.TCP, family)
            for client in (place.x, place.lab.externals["x2"]):
                (name,) = client.tcp(*dialled, count=3).backends
                chosen.append(name)
    assert chosen[::2] != chosen[1::2]


# --- what is not ours -----------------------------------------------------------------------------


def test_a_port_that_no_service_has_is_not_touched(place: Site, family: Family, way: Way) -> None:
    """B-45, TV-F07: a listener of the node's in the range of NodePorts answers by itself."""
    port = 32_000
    host = place.n1.ipv6 if family is Family.IPV6 else place.n1.ipv4
    with place.n1.serve(tcp=[port], udp=[port], name="the node"), place.serve("be1"):
        outcome = way.ask(place.x, host, port, 5)
    assert outcome.backends == {"the node": 5}, outcome
    assert outcome.seen_as.keys() == {place.x.ipv6 if family is Family.IPV6 else place.x.ipv4}
    if way is Way.UDP:
        assert outcome.sources == {spelt((host, port)): 5}


def test_services_addresses_lead_to_no_listener_of_the_node(place: Site, family: Family) -> None:
    """B-151: an unknown port of a Service, and an address that no Service has."""
    free = "fd96::9999" if family is Family.IPV6 else "10.96.99.99"
    with place.n1.serve(tcp=[22], udp=[22]) as sshd, place.serve("be1") as service:
        hosts = [service.address(Way.TCP, family, to)[0] for to in (To.CLUSTER_IP, To.BALANCER)]
        for client in (place.x, place.client("k1"), place.client("p1")):
            for host in (*hosts, free):
                for way in (Way.TCP, Way.UDP):
                    assert way.ask(client, host, 22, timeout_s=SILENCE_S).good == 0
        stats = sshd.stats()
    assert (stats["tcp_accepted"], stats["udp_received"]) == (0, 0)


def test_a_node_port_without_endpoints_refuses_before_a_listener_of_the_node(
    place: Site, family: Family
) -> None:
    """B-165, NP-10: of that protocol alone, and only where packets come in, as with kube-proxy."""
    with place.service(udp={}) as service:
        host, port = service.address(Way.TCP, family)
        with place.n1.serve(tcp=[port], udp=[port], name="the node"):
            assert place.x.tcp(host, port, timeout_s=PATIENCE_S).errors == {"ECONNREFUSED": 1}
            assert place.x.udp(host, port).backends == {"the node": 1}


def test_an_external_address_that_is_the_nodes_own_goes_before_its_listener(
    place: Site, family: Family, way: Way
) -> None:
    """LB-11, and nothing but the Service's port: also for packets."""
    host = place.n1.ipv6 if family is Family.IPV6 else place.n1.ipv4
    with (
        place.n1.serve(tcp=[80, 81], udp=[53, 54], name="the node"),
        place.service(pods=place.pods("be1")) as service,
    ):
        service.set(external_ips=(place.n1.ipv4, place.n1.ipv6))
        assert way.ask(place.x, host, way.port, 3).backends == {"be1": 3}
        assert way.ask(place.x, host, way.port + 1, 3).backends == {"the node": 3}
        assert way.ask(place.client("k1"), host, way.port, 3).backends == {"be1": 3}


def test_the_api_server_on_the_nodes_own_address(place: Site, family: Family) -> None:
    """B-149: its Service's endpoint is the node, and everybody reaches it by the ClusterIP."""
    target = 6443
    host = place.n1.pod("apiserver", host_network=True)
    try:
        with (
            host.serve(tcp=[target]),
            place.service(pods=[host], tcp={443: target}, udp={}) as service,
        ):
            ip = service.spec.ipv6 if family is Family.IPV6 else service.spec.ipv4
            for client in (place.x, place.n1, place.n2, place.client("k1"), place.client("p1")):
                outcome = client.tcp(ip, 443, count=3, size=20_000)
                assert outcome.backends == {"apiserver": 3}, (client, outcome)
    finally:
        host.remove()


def test_one_number_for_two_protocols_and_a_port_that_is_its_target(
    place: Site, family: Family
) -> None:
    """B-53, B-55, E-S13: nothing is translated twice."""
    with place.service(pods=place.pods("be1"), tcp={80: 8080}, udp={53: UDP_PORT}) as service:
        service.set(udp={})
        assert place.x.tcp(*service.address(Way.TCP, family)).backends == {"be1": 1}
        assert place.x.udp(*service.address(Way.UDP, family), timeout_s=SILENCE_S).good == 0
        service.set(udp={53: UDP_PORT})
        assert place.x.udp(*service.address(Way.UDP, family)).backends == {"be1": 1}
        port = service.spec.node_port
        with place.pods("be1")[0].serve(tcp=[port], name="on its NodePort"):
            service.set(tcp={80: port})
            answered = place.x.tcp(*service.address(Way.TCP, family), count=3)
            assert answered.backends == {"on its NodePort": 3}
