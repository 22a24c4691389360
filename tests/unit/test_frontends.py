# SPDX-License-Identifier: Apache-2.0
"""What a Service asks clients to dial, and who has an address that two want."""

from __future__ import annotations

import itertools

import pytest

from ebpflb.model import (
    Family,
    Frontend,
    FrontendKind,
    Protocol,
    Service,
    ServicePort,
    parse_address,
)
from ebpflb.planner.frontends import Claims, Wanted, wanted_by
from tests.builders import cluster_ip, port_name, service, service_key

V4, V6 = cluster_ip(10), cluster_ip(10, Family.IPV6)
ADVICE = "which was first: give one of them another address"
OLD, YOUNG = "2025-01-01T00:00:00Z", "2026-01-01T00:00:00Z"


def frontend(address: str, port: int = 80, protocol: Protocol = Protocol.TCP) -> Frontend:
    return Frontend(parse_address(address), port, protocol, FrontendKind.CLUSTER_IP)


def dialled(wanted: Wanted) -> dict[str, list[Frontend]]:
    return {f"{port.name} {port.name.family.label}": [*port.frontends] for port in wanted.ports}


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        pytest.param(None, {}, id="no Service asks for nothing"),
        pytest.param(service(cluster_ips=[]), {}, id="no ClusterIP"),
        pytest.param(service(ports=[]), {}, id="no port"),
        pytest.param(
            service(cluster_ips=[V4, V6]),
            {"default/web:http IPv4": [frontend(V4)], "default/web:http IPv6": [frontend(V6)]},
            id="FAM-01 one service port a family",
        ),
        pytest.param(
            service(
                ports=[
                    ServicePort("dns", Protocol.TCP, 53),
                    ServicePort("dns-udp", Protocol.UDP, 53),
                ]
            ),
            {
                "default/web:dns IPv4": [frontend(V4, 53)],
                "default/web:dns-udp IPv4": [frontend(V4, 53, Protocol.UDP)],
            },
            id="PORT-02 one number in two protocols",
        ),
    ],
)
def test_a_service_asks_for_its_cluster_ips(
    obj: Service | None, expected: dict[str, list[Frontend]]
) -> None:
    assert dialled(wanted_by(obj)) == expected


def test_of_two_ports_with_one_name_the_first_counts_port_01() -> None:
    twice = [ServicePort("http", Protocol.TCP, 80), ServicePort("http", Protocol.TCP, 81)]
    wanted = wanted_by(service(ports=twice))
    assert dialled(wanted) == {"default/web:http IPv4": [frontend(V4, 80)]}
    assert wanted.problems == (
        "port 81/TCP (IPv4) is not served: an earlier TCP port has the same name 'http'",
    )


def test_one_name_in_two_protocols_is_two_service_ports_b_85() -> None:
    both = [ServicePort("dns", Protocol.TCP, 53), ServicePort("dns", Protocol.UDP, 53)]
    wanted = wanted_by(service(ports=both))
    assert [port.name.protocol for port in wanted.ports] == [Protocol.TCP, Protocol.UDP]
    assert wanted.problems == ()


# --- claims --------------------------------------------------------------------------------------


def owner_of(claims: Claims, *rivals: Wanted) -> str:
    """Name who has the place that all rivals want, after checking that the others do not."""
    having = [wanted for wanted in rivals if claims.split(wanted.ports[0])[0]]
    assert len(having) == 1
    return having[0].ports[0].name.name


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            service("z", created=OLD), service("a", created=YOUNG), id="the older one, by creation"
        ),
        pytest.param(service("a"), service("z"), id="of two as old the first by name"),
        pytest.param(
            service("z", namespace="a"), service("a", namespace="b"), id="and by namespace before"
        ),
        pytest.param(
            service("z", created=YOUNG), service("a", created=""), id="an undated one is youngest"
        ),
    ],
)
def test_of_two_services_with_one_address_one_is_served(first: Service, second: Service) -> None:
    one, other = wanted_by(first), wanted_by(second)
    for order in ((one, other), (other, one)):
        claims = Claims()
        for wanted in order:
            claims.add(wanted)
        assert owner_of(claims, one, other) == first.name
        frontends, losses = claims.split(other.ports[0])
        assert frontends == ()
        assert losses == [f"{V4}:80/TCP belongs to {first.namespace}/{first.name}:http, {ADVICE}"]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_whoever_waits_has_the_address_when_the_winner_goes(order: tuple[int, ...]) -> None:
    claims = Claims()
    a, b, c = rivals = [wanted_by(service(name)) for name in "abc"]
    for i in order:
        claims.add(rivals[i])
    assert owner_of(claims, a, b, c) == "a"
    claims.withdraw(a)
    assert owner_of(claims, b, c) == "b"
    claims.withdraw(c)
    assert owner_of(claims, b) == "b"
    claims.withdraw(b)
    claims.add(c)
    assert owner_of(claims, c) == "c"


def test_only_services_whose_address_changed_hands_are_affected() -> None:
    claims = Claims()
    a, b, c = (wanted_by(service(name)) for name in "abc")
    alone = wanted_by(service("alone", cluster_ips=[cluster_ip(11)]))
    keys = [service_key(name) for name in "abc"]
    for wanted in (b, alone):
        claims.add(wanted)
    assert claims.take_affected() == set()
    claims.add(c)
    assert claims.take_affected() == set(), "b still has it"
    claims.add(a)
    assert claims.take_affected() == {*keys}
    claims.withdraw(c)
    assert claims.take_affected() == set(), "a still has it"
    claims.withdraw(a)
    assert claims.take_affected() == {keys[1]}
    claims.withdraw(b)
    claims.withdraw(alone)
    assert claims.take_affected() == set()


def test_of_two_ports_of_one_service_with_one_number_the_first_is_served() -> None:
    twice = [ServicePort("z", Protocol.TCP, 80), ServicePort("a", Protocol.TCP, 80)]
    wanted = wanted_by(service(ports=twice))
    claims = Claims()
    claims.add(wanted)
    assert claims.split(wanted.ports[0]) == ((frontend(V4),), [])
    frontends, losses = claims.split(wanted.ports[1])
    assert frontends == ()
    assert losses == [f"{V4}:80/TCP belongs to default/web:z, {ADVICE}"]
    claims.withdraw(wanted)
    assert claims.take_affected() == set()


def test_one_number_in_two_protocols_and_families_is_no_conflict() -> None:
    wanted = wanted_by(
        service(
            cluster_ips=[V4, V6],
            ports=[ServicePort("t", Protocol.TCP, 53), ServicePort("u", Protocol.UDP, 53)],
        )
    )
    claims = Claims()
    claims.add(wanted)
    assert [claims.split(port)[1] for port in wanted.ports] == [[], [], [], []]
    assert {port.name for port in wanted.ports} >= {
        port_name(port="t"),
        port_name(port="u", protocol=Protocol.UDP, family=Family.IPV6),
    }
