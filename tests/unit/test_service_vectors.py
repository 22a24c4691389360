# SPDX-License-Identifier: Apache-2.0
"""Upstream's Service vectors (TV-S01 to TV-S14): from API objects to frontends in the plan.

Upstream has one proxier for each family and counts service ports in one of them; here a service
port of each family is planned at once, and is counted as such.
"""

from __future__ import annotations

from typing import Any

import pytest

from ebpflb.model import Family, format_endpoint
from ebpflb.planner.plan import Planner, PlanUpdate
from tests.builders import ApiObject, cluster_ip, new_planner, service_object, told

V4, V6 = cluster_ip(10), cluster_ip(10, Family.IPV6)
P1: ApiObject = {"name": "p1", "port": 1234, "protocol": "TCP"}
P2: ApiObject = {"name": "p2", "port": 1235, "protocol": "UDP"}
LB: dict[str, Any] = {"type": "LoadBalancer"}
LOCAL_LB = LB | {"externalTrafficPolicy": "Local", "healthCheckNodePort": 345}


def plan(*objects: ApiObject) -> Planner:
    planner = new_planner()
    tell(planner, *objects)
    return planner


def tell(planner: Planner, *objects: ApiObject) -> PlanUpdate:
    for obj in objects:
        planner.apply(told(obj))
    return planner.update()


def dialled(planner: Planner, family: Family = Family.IPV4) -> dict[str, list[str]]:
    """Name each service port of a family with what clients dial: ``port/protocol``, ``kind at``."""
    return {
        f"{name}/{name.protocol.name}": [
            f"{each.kind.value} {format_endpoint(each.address, each.port)}"
            for each in port.frontends
        ]
        for name, port in planner.plan.ports.items()
        if name.family is family
    }


@pytest.mark.parametrize(
    ("obj", "expected"),
    [
        pytest.param(service_object(cluster_ips=["None"], ports=[P2]), {}, id="TV-S02 UDP"),
        pytest.param(
            service_object(cluster_ips=["None"], ports=[P2 | {"protocol": "SCTP"}]),
            {},
            id="TV-S02 SCTP",
        ),
        pytest.param(service_object(cluster_ips=["None"], ports=[]), {}, id="TV-S02 no ports"),
        pytest.param(
            service_object(ports=[P1, P2]),
            {
                "default/web:p1/TCP": [f"ClusterIP {V4}:1234"],
                "default/web:p2/UDP": [f"ClusterIP {V4}:1235"],
            },
            id="TV-S03",
        ),
        pytest.param(
            service_object(ports=[P1 | {"nodePort": 345}, P2 | {"nodePort": 344}], type="NodePort"),
            {
                "default/web:p1/TCP": [f"ClusterIP {V4}:1234", "NodePort 0.0.0.0:345"],
                "default/web:p2/UDP": [f"ClusterIP {V4}:1235", "NodePort 0.0.0.0:344"],
            },
            id="TV-S04",
        ),
        pytest.param(
            service_object(ports=[P1, P2], ingress=[{"ip": "10.1.2.4"}], **LB),
            {
                "default/web:p1/TCP": [f"ClusterIP {V4}:1234", "LoadBalancer 10.1.2.4:1234"],
                "default/web:p2/UDP": [f"ClusterIP {V4}:1235", "LoadBalancer 10.1.2.4:1235"],
            },
            id="TV-S05",
        ),
        pytest.param(
            service_object(ports=[P1], type="ExternalName", externalName="web.example"),
            {},
            id="TV-S08",
        ),
        pytest.param(service_object(cluster_ips=[V6], ports=[P1]), {}, id="TV-S09 IPv6 only"),
    ],
)
def test_what_clients_dial(obj: ApiObject, expected: dict[str, list[str]]) -> None:
    assert dialled(plan(obj)) == expected


def test_nothing_makes_nothing_tv_s01() -> None:
    planner = plan()
    assert (dict(planner.plan.ports), dict(planner.plan.health_checks)) == ({}, {})


def test_the_other_family_alone_tv_s09() -> None:
    planner = plan(service_object(cluster_ips=[V4], ports=[P1]))
    assert dialled(planner, Family.IPV6) == {}


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        pytest.param({"ipMode": "VIP"}, True, id="TV-S06 VIP"),
        pytest.param({"ipMode": "Proxy"}, False, id="TV-S06 Proxy"),
        pytest.param({}, True, id="TV-S06 absent"),
    ],
)
def test_a_proxys_address_is_left_to_the_proxy(mode: dict[str, str], kept: bool) -> None:
    planner = plan(service_object(ports=[P1], ingress=[{"ip": "10.1.2.4"} | mode], **LB))
    vips = ["LoadBalancer 10.1.2.4:1234"] if kept else []
    assert dialled(planner)["default/web:p1/TCP"][1:] == vips
    assert not planner.rejected


def test_a_local_load_balancer_has_one_health_port_tv_s07() -> None:
    planner = plan(service_object(ports=[P1, P2], **LOCAL_LB))
    assert len(planner.plan.ports) == 2
    assert [check.port for check in planner.plan.health_checks.values()] == [345]


def test_each_family_has_its_own_addresses_and_ranges_tv_s10() -> None:
    planner = plan(
        service_object(
            cluster_ips=[V4, V6],
            ports=[P1],
            externalIPs=["10.1.2.3", "2001:db8::3"],
            loadBalancerSourceRanges=["10.1.2.0/28", "2001:db8::/64"],
            ingress=[{"ip": "10.1.2.4"}, {"ip": "2001:db8::4"}],
        )
    )
    assert dialled(planner) == {
        "default/web:p1/TCP": [
            f"ClusterIP {V4}:1234",
            "ExternalIP 10.1.2.3:1234",
            "LoadBalancer 10.1.2.4:1234",
        ]
    }
    assert dialled(planner, Family.IPV6) == {
        "default/web:p1/TCP": [
            f"ClusterIP [{V6}]:1234",
            "ExternalIP [2001:db8::3]:1234",
            "LoadBalancer [2001:db8::4]:1234",
        ]
    }
    ranges = {name.family: port.source_ranges for name, port in planner.plan.ports.items()}
    assert [str(one) for one in ranges[Family.IPV4]] == ["10.1.2.0/28"]
    assert [str(one) for one in ranges[Family.IPV6]] == ["2001:db8::/64"]


def test_a_range_with_a_blank_before_it_tv_s11() -> None:
    obj = service_object(
        ports=[P1], loadBalancerSourceRanges=[" 10.1.2.0/28"], ingress=[{"ip": "10.1.2.4"}]
    )
    (port,) = plan(obj).plan.ports.values()
    assert list(map(str, port.source_ranges)) == ["10.1.2.0/28"]


def many_services() -> list[ApiObject]:
    return [
        service_object("s1", cluster_ips=[cluster_ip(1)], ports=[P1, P2]),
        service_object("s2", cluster_ips=[cluster_ip(2)], ports=[P1, P2], type="NodePort"),
        service_object("s3", cluster_ips=[cluster_ip(3)], ports=[P1, P2], **LB),
        service_object("s4", cluster_ips=[cluster_ip(4)], ports=[P1, P2], **LOCAL_LB),
    ]


def test_many_services_and_then_one_port_alone_tv_s12_tv_s13() -> None:
    planner = plan(*many_services())
    assert (len(planner.plan.ports), len(planner.plan.health_checks)) == (8, 1)
    gone = [one["metadata"]["name"] for one in many_services()[1:]]
    update = tell(
        planner,
        service_object("s1", cluster_ips=[cluster_ip(1)], ports=[P1]),
        *(service_object(name, type="ExternalName") for name in gone),
    )
    assert list(map(str, planner.plan.ports)) == ["default/s1:p1"]
    assert dict(planner.plan.health_checks) == {}
    assert {name.name for name in update.changed} == {"s1", *gone}


def test_to_a_load_balancer_and_back_tv_s14() -> None:
    planner = plan(service_object(ports=[P1, P2]))
    seen = [(len(planner.plan.ports), len(planner.plan.health_checks))]
    changed = []
    local = service_object(ports=[P1, P2], ingress=[{"ip": "10.1.2.3"}], **LOCAL_LB)
    for obj in (local, local, service_object(ports=[P1, P2])):
        changed.append(len(tell(planner, obj).changed))
        seen.append((len(planner.plan.ports), len(planner.plan.health_checks)))
    assert seen == [(2, 0), (2, 1), (2, 1), (2, 0)]
    assert changed == [2, 0, 2], "the second one says nothing new"
