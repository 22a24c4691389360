# SPDX-License-Identifier: Apache-2.0
"""What a Service asks clients to dial, and who has an address that two want."""

from __future__ import annotations

import itertools

import pytest

from ebpflb.model import Family, Frontend, FrontendKind, Protocol, Service, ServicePort
from ebpflb.planner.frontends import Claims, ExternalIPs, Wanted, external_ips, wanted_by
from ebpflb.planner.options import PlannerOptions
from tests.builders import NODE, cluster_ip, frontend, port_name, service, service_key

V4, V6 = cluster_ip(10), cluster_ip(10, Family.IPV6)
ADVICE = "which was first: give one of them another address"
OLD, YOUNG = "2025-01-01T00:00:00Z", "2026-01-01T00:00:00Z"


NODE_PORT, EXTERNAL, BALANCER = (
    FrontendKind.NODE_PORT,
    FrontendKind.EXTERNAL_IP,
    FrontendKind.LOAD_BALANCER,
)
IP, IP6 = "192.0.2.1", "2001:db8::1"
HTTP = ServicePort("http", Protocol.TCP, 80, 30080)


def at(kind: FrontendKind, address: str, port: int = 80) -> Frontend:
    return frontend(address, port, kind=kind)


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


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        pytest.param(
            service(ports=[HTTP]), [at(NODE_PORT, "0.0.0.0", 30080)], id="LB-03 a nodePort"
        ),
        pytest.param(
            service(cluster_ips=[V6], ports=[HTTP]),
            [at(NODE_PORT, "::", 30080)],
            id="FAM-07 B-169 a nodePort of the Service's family alone",
        ),
        pytest.param(
            service(external_ips=["192.0.2.2", IP]),
            [at(EXTERNAL, IP), at(EXTERNAL, "192.0.2.2")],
            id="LB-01 external IPs",
        ),
        pytest.param(
            service(ingress_ips=[IP]), [at(BALANCER, IP)], id="LB-04 a VIP without a nodePort"
        ),
        pytest.param(
            service(cluster_ips=[V4, V6], external_ips=[IP6, IP], ingress_ips=[IP6], ports=[HTTP]),
            [
                at(NODE_PORT, "0.0.0.0", 30080),
                at(EXTERNAL, IP),
                at(NODE_PORT, "::", 30080),
                at(BALANCER, IP6),
            ],
            id="FAM-03 each family has its own",
        ),
        pytest.param(
            service(external_ips=[IP6], ingress_ips=[IP6]), [], id="FAM-03 another family's"
        ),
        pytest.param(
            service(external_ips=[IP], ingress_ips=[IP], source_ranges=["10.0.0.0/8"]),
            [at(BALANCER, IP)],
            id="LB-05 an address that is both is guarded",
        ),
        pytest.param(
            service(external_ips=[V4], ingress_ips=[V4]), [], id="an address that it has already"
        ),
        pytest.param(
            service(ports=[ServicePort("http", Protocol.TCP, 30080, 30080)]),
            [at(NODE_PORT, "0.0.0.0", 30080)],
            id="B-55 nodePort is port",
        ),
    ],
)
def test_what_a_service_asks_for_beside_its_cluster_ips(
    obj: Service, expected: list[Frontend]
) -> None:
    wanted = wanted_by(obj)
    frontends = [each for port in wanted.ports for each in port.frontends]
    kinds = [each for each in frontends if each.kind is not FrontendKind.CLUSTER_IP]
    assert (kinds, wanted.problems) == (expected, ())
    assert len({(each.address, each.port, each.protocol) for each in frontends}) == len(frontends)


def test_a_port_without_a_node_port_has_none_np_12() -> None:
    both = [HTTP, ServicePort("more", Protocol.TCP, 81)]
    wanted = wanted_by(service(ports=both))
    assert [len(port.frontends) for port in wanted.ports] == [2, 1]


GATED = f"spec.externalIPs {IP} is not served: feature gate AllowServiceExternalIPs is off"


@pytest.mark.parametrize(
    ("allowed", "networks", "problems"),
    [
        pytest.param(True, None, [], id="LB-01 any is allowed by default"),
        pytest.param(True, ("192.0.2.0/24", "2001:db8::/32"), [], id="SEC-02 both are in"),
        pytest.param(
            True,
            ("192.0.2.1/32",),
            [f"spec.externalIPs {IP6} is not served: --external-ips does not allow it"],
            id="SEC-02 one is in",
        ),
        pytest.param(
            True,
            (),
            [
                f"spec.externalIPs {IP} is not served: --external-ips does not allow it",
                f"spec.externalIPs {IP6} is not served: --external-ips does not allow it",
            ],
            id="SEC-02 none is",
        ),
        pytest.param(
            False,
            ("192.0.2.0/24", "2001:db8::/32"),
            [GATED, GATED.replace(IP, IP6)],
            id="VER-04 none with the gate off",
        ),
    ],
)
def test_which_external_ips_may_be_captured(
    allowed: bool, networks: tuple[str, ...] | None, problems: list[str]
) -> None:
    options = PlannerOptions(node_name=NODE, external_ips=networks, allow_external_ips=allowed)
    obj = service(cluster_ips=[V4, V6], external_ips=[IP, IP6], ingress_ips=["192.0.2.9"])
    wanted = wanted_by(obj, external_ips(options))
    kinds = [each.kind for port in wanted.ports for each in port.frontends]
    assert list(wanted.problems) == problems
    assert kinds.count(EXTERNAL) == 2 - len(problems)
    assert kinds.count(BALANCER) == 1, "a load balancer's address is none of these"


def test_an_external_ip_that_is_refused_is_said_once_for_all_ports() -> None:
    ports = [ServicePort("a", Protocol.TCP, 1), ServicePort("b", Protocol.TCP, 2)]
    assert wanted_by(service(ports=ports, external_ips=[IP]), ExternalIPs(False)).problems == (
        GATED,
    )


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


def test_an_address_of_a_kind_that_anybody_may_name_goes_behind_a_cluster_ip_sec_02() -> None:
    old = wanted_by(service("old", cluster_ips=[cluster_ip(9)], external_ips=[V4], created=OLD))
    young = wanted_by(service("young", created=YOUNG))
    for order in ((old, young), (young, old)):
        claims = Claims()
        for wanted in order:
            claims.add(wanted)
        assert claims.split(young.ports[0]) == ((frontend(V4),), [])
        frontends, (loss,) = claims.split(old.ports[0])
        assert frontends == (frontend(cluster_ip(9)),)
        assert loss == (
            f"{V4}:80/TCP belongs to default/young:http, whose ClusterIP it is: "
            "give one of them another address"
        )
        claims.withdraw(young)
        assert len(claims.split(old.ports[0])[0]) == 2


def test_of_two_services_with_one_node_port_the_older_has_it_np_11() -> None:
    old = wanted_by(service("old", cluster_ips=[cluster_ip(9)], ports=[HTTP], created=OLD))
    young = wanted_by(service("young", cluster_ips=[V4, V6], ports=[HTTP], created=YOUNG))
    claims = Claims()
    claims.add(young)
    claims.add(old)
    (frontends, (loss,)), v6 = (claims.split(port) for port in young.ports)
    assert frontends == (frontend(V4),)
    assert loss == (
        "NodePort 30080/TCP (IPv4) belongs to default/old:http, which was first: "
        "give one of them another port"
    )
    assert v6 == ((frontend(V6), at(NODE_PORT, "::", 30080)), []), "the old one has no IPv6"


def test_one_node_port_for_two_protocols_is_no_conflict_b_53() -> None:
    both = [ServicePort("t", Protocol.TCP, 53, 30053), ServicePort("u", Protocol.UDP, 53, 30053)]
    wanted = wanted_by(service(ports=both))
    claims = Claims()
    claims.add(wanted)
    assert [len(claims.split(port)[0]) for port in wanted.ports] == [2, 2]


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
