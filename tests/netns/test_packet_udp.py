# SPDX-License-Identifier: Apache-2.0
"""UDP on the packet path, where no SYN says that something begins, and no FIN that it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import pytest

from ebpflb.lab import Loop, Namespace, Node, Outcome
from ebpflb.model import Family
from tests.netns.services import ready, terminating
from tests.netns.site import Site, To, goes_on, site, spelt
from tests.netns.world import UDP_PORT, Way

NEXT_S = 0.01
"""Between two datagrams of one socket."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("udp"), nodes=2) as one:
        one.backend("be1")
        one.backend("be2")
        one.backend("far", one.n2)
        one.n1.pod("p1")
        one.n1.pod("k1", virtual=True)
        with one.running():
            yield one


@pytest.fixture(
    params=[("x", To.NODE_PORT), ("x", To.BALANCER), ("k1", To.CLUSTER_IP), ("k1", To.EXTERNAL)],
    ids=lambda one: f"{'outside' if one[0] == 'x' else 'virtual pod'} to {one[1].value}",
)
def path(request: pytest.FixtureRequest) -> tuple[str, To]:
    """Who dials what; none of it is seen by a hook."""
    chosen: tuple[str, To] = request.param
    return chosen


def hears_from(loop: Loop, *names: str) -> Outcome:
    """Wait until the loop's last answer is one of these backends'."""
    return loop.wait_for(
        lambda one: bool(one.switches) and one.switches[-1][1] in names,
        timeout_s=30,
        what=f"{' or '.join(names)} answers",
    )


def is_refused(loop: Loop) -> Outcome:
    """Wait for some more refusals."""
    refused = loop.outcome().errors.get("ECONNREFUSED", 0)
    return loop.wait_for(
        lambda one: one.errors.get("ECONNREFUSED", 0) >= refused + 3,
        timeout_s=30,
        what="it is refused",
    )


def test_answers_come_from_where_the_question_went(
    place: Site, path: tuple[str, To], family: Family
) -> None:
    """Many sockets at once; each keeps its backend."""
    client, to = path
    with place.serve("be1", "be2", "far") as service:
        dialled = service.address(Way.UDP, family, to)
        outcome = place.client(client).udp(*dialled, sockets=60, count=240)
    assert outcome.failed == 0, outcome
    assert outcome.sources == {spelt(dialled): 240}
    assert outcome.backends.keys() == {"be1", "be2", "far"}
    assert all(count % 4 == 0 for count in outcome.backends.values()), outcome.backends


# --- backends that go, and that come --------------------------------------------------------------


def test_who_is_taken_out_of_the_service_loses_its_flows_and_not_a_datagram(
    place: Site, path: tuple[str, To], family: Family
) -> None:
    """CT-03, CT-08, E-C01, E-C02: the server itself lives on, so every question is answered."""
    client, to = path
    with place.serve("be1", "far") as service:
        dialled = service.address(Way.UDP, family, to)
        with place.client(client).udp_loop(*dialled, interval_s=NEXT_S) as loop:
            first = hears_from(loop, "be1", "far").switches[-1][1]
            other = "far" if first == "be1" else "be1"
            for names in ((other,), (first,), (first, other)):
                service.set(endpoints=ready(*place.pods(*names)))
                hears_from(loop, names[0])
                goes_on(loop)
            outcome = loop.stop()
    assert outcome.failed == 0, outcome
    # A set that only grew has moved nobody (CT-07).
    assert [name for _, name in outcome.switches] == [first, other, first]


def test_a_backend_that_dies_is_followed_by_another(
    place: Site, path: tuple[str, To], family: Family
) -> None:
    """E-C01, E-LB05: what was sent while the dead one was still in the slices is lost; no more."""
    client, to = path
    doomed = place.backend("doomed")
    with place.serve("doomed") as service:
        dialled = service.address(Way.UDP, family, to)
        with place.client(client).udp_loop(*dialled, interval_s=NEXT_S, timeout_s=0.2) as loop:
            hears_from(loop, "doomed")
            doomed.remove()
            loop.wait_for(lambda one: one.failed > 0, timeout_s=30, what="the dead are silent")
            service.set(endpoints=ready(*place.pods("far")))
            hears_from(loop, "far")
            before = loop.outcome()
            after = goes_on(loop)
            assert after.failed == before.failed


def test_a_terminating_backend_keeps_its_flows_and_gets_no_new_ones(
    place: Site, path: tuple[str, To], family: Family
) -> None:
    """TOP-15, CT-07"""
    client, to = path
    with place.serve("be1") as service:
        dialled = service.address(Way.UDP, family, to)
        with place.client(client).udp_loop(*dialled, interval_s=NEXT_S) as loop:
            hears_from(loop, "be1")
            going, staying = place.pods("be1", "be2")
            service.set(endpoints=(*terminating(going), *ready(staying)))
            fresh = place.client(client).udp(*dialled, sockets=20, count=20)
            assert fresh.backends == {"be2": 20}
            goes_on(loop, by=40)
            outcome = loop.stop()
    assert outcome.failed == 0
    assert [name for _, name in outcome.switches] == ["be1"]


def test_one_socket_is_refused_while_there_is_nobody_and_served_as_soon_as_there_is(
    place: Site, path: tuple[str, To], family: Family
) -> None:
    """CT-09, E-C05, NOEP-01 to -03, NOEP-10: connected once; and again when everybody has gone."""
    client, to = path
    with place.serve() as service:
        dialled = service.address(Way.UDP, family, to)
        options = {"connected": True, "interval_s": NEXT_S, "timeout_s": 1.0}
        with place.client(client).udp_loop(*dialled, **options) as loop:  # type: ignore[arg-type]
            is_refused(loop)
            service.set(endpoints=ready(*place.pods("be1")))
            hears_from(loop, "be1")
            goes_on(loop)
            service.set(endpoints=())
            is_refused(loop)
            service.set(endpoints=ready(*place.pods("far")))
            hears_from(loop, "far")
            outcome = loop.stop()
    assert outcome.errors.keys() == {"ECONNREFUSED"}, outcome


def test_a_pods_connected_socket_is_left_to_its_packets_while_there_is_nobody(
    place: Site, family: Family
) -> None:
    """CT-09, K14: the same of a pod whose sockets are seen: connect() itself must not fail."""
    with place.serve() as service:
        dialled = service.address(Way.UDP, family, To.CLUSTER_IP)
        (pod,) = place.pods("p1")
        with pod.udp_loop(*dialled, connected=True, interval_s=NEXT_S, timeout_s=1.0) as loop:
            is_refused(loop)
            service.set(endpoints=ready(*place.pods("be1")))
            hears_from(loop, "be1")
            goes_on(loop)
            outcome = loop.stop()
    assert outcome.errors.keys() == {"ECONNREFUSED"}, outcome


def test_a_deleted_service_cuts_its_flows(place: Site, family: Family) -> None:
    """Deviation from CT-05, as at the socket: nobody goes on talking to a Service that is gone."""
    (pod,) = place.pods("k1")
    with place.serve("be1") as service:
        loop = pod.udp_loop(
            *service.address(Way.UDP, family, To.CLUSTER_IP), interval_s=NEXT_S, timeout_s=0.2
        )
        hears_from(loop, "be1")
    place.agent.settle()
    loop.wait_for(lambda one: one.failed >= 3, timeout_s=30, what="nobody answers any more")
    good = loop.outcome().good
    loop.wait_for(lambda one: one.failed >= 8, timeout_s=30, what="and nobody does later")
    assert loop.stop().good == good


# --- whose answer it is ---------------------------------------------------------------------------


@contextlib.contextmanager
def nat_rules(node: Node, rules: Iterable[str]) -> Iterator[None]:
    """Somebody else's rules in POSTROUTING meanwhile."""
    head = ["table inet cni {", "chain out {", "type nat hook postrouting priority srcnat;"]
    node.run(["nft", "-f", "-"], text_in="\n".join([*head, *rules, "}", "}", ""]))
    try:
        yield
    finally:
        node.run(["nft", "delete table inet cni"])


@pytest.fixture(params=[False, True], ids=["as it is", "masqueraded by others"])
def masquerading(place: Site, request: pytest.FixtureRequest) -> Iterator[bool]:
    """Without, and with, what a CNI does to packets that leave the cluster; it keeps the port."""
    if not request.param:
        yield False
        return
    rules = [
        f"{family} saddr {pods} {family} daddr {outside} masquerade"
        for family, pods, outside in (
            ("ip", place.n1.pods_ipv4, "192.168.60.0/24"),
            ("ip6", place.n1.pods_ipv6, "fd60::/64"),
        )
    ]
    with nat_rules(place.n1, rules):
        yield True


@pytest.mark.parametrize("sender", ["p1", "k1", "n1"])
def test_an_answer_to_a_port_that_is_a_node_port_too_reaches_who_asked(
    place: Site, masquerading: bool, family: Family, sender: str
) -> None:
    """K5, B-31, B-33: the port was picked by the client, or by somebody's masquerading."""
    client: Namespace = place.client(sender)
    six = family is Family.IPV6
    target = place.x.ipv6 if six else place.x.ipv4
    with place.x.serve(udp=[53], tcp=[53], name="outside"), place.serve("be1") as service:
        port = service.spec.node_port
        # Whoever dials the NodePort itself is served meanwhile.
        dialled = service.address(Way.UDP, family)
        with place.x.udp_loop(*dialled, interval_s=NEXT_S) as other:
            for way in (Way.UDP, Way.CONNECTED_UDP, Way.TCP):
                options = {"source_port": port, "count": 20, "timeout_s": 1.0}
                if way is Way.TCP:
                    outcome = client.tcp(target, 53, source_port=port, size=1000)
                else:
                    outcome = client.udp(
                        target,
                        53,
                        connected=way is Way.CONNECTED_UDP,
                        **options,  # type: ignore[arg-type]
                    )
                assert outcome.failed == 0, (way, outcome)
                assert outcome.backends.keys() == {"outside"}
                seen_as = place.n1 if masquerading or sender == "n1" else client
                assert outcome.seen_as.keys() == {seen_as.ipv6 if six else seen_as.ipv4}
            goes_on(other)
            assert other.stop().backends.keys() == {"be1"}


def test_masquerading_at_random_never_loses_an_answer(place: Site, family: Family) -> None:
    """K5: with every number a NodePort that such a masquerade may choose; TCP and UDP alike."""
    ports = {UDP_PORT: UDP_PORT}
    which = "ip6" if family is Family.IPV6 else "ip"
    target = place.x.ipv6 if family is Family.IPV6 else place.x.ipv4
    with (
        place.x.serve(udp=[53], tcp=[53], name="outside"),
        place.services(50, pods=place.pods("be1"), tcp=ports, udp=ports) as services,
    ):
        numbers = sorted(one.spec.node_port for one in services)
        assert numbers[-1] - numbers[0] == len(numbers) - 1
        rules = [
            f"meta l4proto {protocol} {which} daddr {target} masquerade to"
            f" :{numbers[0]}-{numbers[-1]} fully-random"
            for protocol in ("tcp", "udp")
        ]
        with nat_rules(place.n1, rules):
            (pod,) = place.pods("k1")
            by_udp = pod.udp(target, 53, sockets=40, count=200)
            by_tcp = pod.tcp(target, 53, count=40, reset=True)
    for outcome in (by_udp, by_tcp):
        assert outcome.failed == 0, outcome
        assert outcome.backends.keys() == {"outside"}


def test_a_connection_from_a_port_goes_on_when_that_becomes_a_node_port(
    place: Site, family: Family, way: Way
) -> None:
    """B-33: from this node to the outside, in use before the Service was there."""
    target = place.x.ipv6 if family is Family.IPV6 else place.x.ipv4
    with place.x.serve(udp=[53], tcp=[53], name="outside"), place.serve() as service:
        port = service.spec.node_port
        service.set(node_port=0, ingress_ips=())
        options = {"source_port": port, "interval_s": NEXT_S}
        if way is Way.TCP:
            loop = place.n1.hold_loop(target, 53, **options)  # type: ignore[arg-type]
        else:
            options["connected"] = way is Way.CONNECTED_UDP
            loop = place.n1.udp_loop(target, 53, **options)  # type: ignore[arg-type]
        with loop:
            goes_on(loop)
            service.set(node_port=port, endpoints=ready(*place.pods("be1")))
            assert way.ask(place.x, *service.address(way, family)).backends == {"be1": 1}
            goes_on(loop, by=30)
            assert loop.stop().failed == 0
