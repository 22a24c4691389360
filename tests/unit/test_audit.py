# SPDX-License-Identifier: Apache-2.0
"""Plan against tables: every kind of difference is found, and says what and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import audit
from ebpflb.datapath.ebpf.tables import CLUSTER, Snapshot, read
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.model import (
    Backend,
    Family,
    Frontend,
    FrontendKind,
    NodePorts,
    Plan,
    PlannedPort,
    PodDetector,
    Policy,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
    parse_address,
    parse_network,
    unspecified,
)
from tests.builders import backend, by_network, cluster_ip, node_ip, pod_ip, port_name
from tests.memory_tables import ManualGate, MemoryTables

WEB = port_name()
HERE, THERE = backend(pod_ip(1), local=True), backend(pod_ip(2))
ENDS = backend(pod_ip(3), terminating=True)
DIALLED = Frontend(parse_address(cluster_ip(10)), 80, Protocol.TCP, FrontendKind.CLUSTER_IP)
NODE_PORT = Frontend(unspecified(Family.IPV4), 30080, Protocol.TCP, FrontendKind.NODE_PORT)
BALANCED = Frontend(parse_address("203.0.113.9"), 80, Protocol.TCP, FrontendKind.LOAD_BALANCER)


def planned(
    *cluster: Backend,
    name: ServicePortName = WEB,
    local: Sequence[Backend] | None = None,
    draining: Sequence[Backend] = (),
    frontends: Sequence[Frontend] = (DIALLED,),
    **fields: Any,
) -> PlannedPort:
    def selection(backends: Sequence[Backend]) -> Selection:
        nothing = Verdict.DROP if cluster or draining else Verdict.REJECT
        return Selection(Verdict.FORWARD if backends else nothing, tuple(backends))

    here = [one for one in cluster if one.local] if local is None else local
    defaults: dict[str, Any] = {
        "affinity_s": 0,
        "internal_policy": Policy.CLUSTER,
        "external_policy": Policy.CLUSTER,
    }
    return PlannedPort(
        name=name,
        frontends=tuple(frontends),
        cluster=selection(cluster),
        local=selection(here),
        draining=tuple(draining),
        **(defaults | fields),
    )


def plan(*ports: PlannedPort, **fields: Any) -> Plan:
    return Plan({port.name: port for port in ports}, **fields)


def programmed(made: Plan) -> Snapshot:
    tables: Any = MemoryTables()
    Writer(tables, ManualGate()).sync(made, None)
    return read(tables)


def found(wanted: PlannedPort, there: PlannedPort) -> list[tuple[str, str, str, str]]:
    differences = audit.differences(plan(wanted), programmed(plan(there)))
    of_ports = [one for one in differences if one.where != "service_addrs"]
    assert {one.service for one in of_ports} <= {"default/web:http"}
    return [(one.where, one.what, one.expected, one.actual) for one in differences]


RANGES: dict[str, Any] = {
    "frontends": (BALANCED,),
    "source_ranges": (parse_network("192.0.2.0/24"),),
}


@pytest.mark.parametrize(
    ("wanted", "there", "differences"),
    [
        (planned(HERE, THERE), planned(HERE, THERE), []),
        (
            planned(HERE, THERE),
            planned(HERE),
            [("backends", f"cluster {pod_ip(2)}:8080", "ready", "")],
        ),
        (
            planned(THERE),
            planned(backend(pod_ip(2), terminating=True)),
            [("backends", f"cluster {pod_ip(2)}:8080", "ready", "terminating")],
        ),
        (
            planned(HERE, THERE),
            planned(HERE, THERE, local=[]),
            [
                ("backends", f"local {pod_ip(1)}:8080", "ready, local", ""),
                ("ports", "local flags", "none set", "none_local"),
            ],
        ),
        (
            planned(THERE, local=[]),
            planned(THERE, local=[backend(pod_ip(3), local=True, terminating=True)]),
            [
                ("backends", f"local {pod_ip(3)}:8080", "", "terminating, local"),
                ("ports", "local flags", "none_local", "none set"),
            ],
        ),
        (
            planned(THERE, draining=[ENDS]),
            planned(THERE),
            [("backends", f"draining {pod_ip(3)}:8080", "terminating", "")],
        ),
        (
            planned(ENDS, backend(pod_ip(4), terminating=True)),
            planned(ENDS, draining=[backend(pod_ip(4), terminating=True)]),
            [
                ("backends", f"cluster {pod_ip(4)}:8080", "terminating", ""),
                ("backends", f"draining {pod_ip(4)}:8080", "", "terminating"),
            ],
        ),
        (
            planned(),
            planned(THERE),
            [
                ("service_addrs", cluster_ip(10), "known", "known answers"),
                ("backends", f"cluster {pod_ip(2)}:8080", "", "ready"),
                ("ports", "cluster flags", "none", "none set"),
                ("ports", "local flags", "none", "none_local"),
            ],
        ),
        (
            planned(HERE, THERE, socket_lb=False),
            planned(HERE, THERE, affinity_s=60),
            [
                ("members", f"cluster {pod_ip(1)}:8080", "", "member"),
                ("members", f"cluster {pod_ip(2)}:8080", "", "member"),
                ("members", f"local {pod_ip(1)}:8080", "", "member"),
                ("ports", "affinity seconds", "0", "60"),
                ("ports", "cluster flags", "untouched", "affinity"),
                ("ports", "local flags", "untouched", "affinity"),
            ],
        ),
        (
            planned(HERE, internal_policy=Policy.LOCAL),
            planned(HERE, external_policy=Policy.LOCAL),
            [
                ("ports", "external policy", "Cluster", "Local"),
                ("ports", "internal policy", "Local", "Cluster"),
            ],
        ),
        (
            planned(frontends=[DIALLED, NODE_PORT]),
            planned(frontends=[DIALLED]),
            [
                (
                    "frontends",
                    "0.0.0.0:30080 TCP",
                    "NodePort of default/web:http, external",
                    "",
                )
            ],
        ),
        (
            planned(frontends=[DIALLED]),
            planned(frontends=[DIALLED, NODE_PORT]),
            [
                (
                    "frontends",
                    "0.0.0.0:30080 TCP",
                    "",
                    f"NodePort of default/web:http (id {1 << 20}), external",
                )
            ],
        ),
        (
            planned(**RANGES, node_in_ranges=False),
            planned(frontends=[BALANCED]),
            [
                ("ports", "source ranges", "lb_no_pods lb_no_host lb_ranges", "none set"),
                ("source_ranges", "192.0.2.0/24", "let in", ""),
            ],
        ),
        (
            planned(**RANGES),
            planned(**RANGES, node_in_ranges=False),
            [
                (
                    "ports",
                    "source ranges",
                    "lb_no_pods lb_ranges",
                    "lb_no_pods lb_no_host lb_ranges",
                ),
                ("source_ranges", "203.0.113.9/32", "let in", ""),
            ],
        ),
        (
            planned(**RANGES, node_in_ranges=False, socket_lb=False),
            planned(
                frontends=[BALANCED],
                source_ranges=(parse_network("192.0.2.0/25"),),
                node_in_ranges=False,
                socket_lb=False,
            ),
            [
                ("source_ranges", "192.0.2.0/24", "let in", ""),
                ("source_ranges", "192.0.2.0/25", "", "let in"),
            ],
        ),
        (
            planned(frontends=[DIALLED]),
            planned(
                frontends=[
                    Frontend(DIALLED.address, 80, Protocol.TCP, FrontendKind.EXTERNAL_IP),
                ]
            ),
            [
                (
                    "frontends",
                    f"{cluster_ip(10)}:80 TCP",
                    "ClusterIP of default/web:http, internal",
                    "ExternalIP of default/web:http, external",
                )
            ],
        ),
    ],
    ids=[
        "all is well",
        "a backend is not there",
        "a backend is there in another state",
        "the local set is empty",
        "the local set has one too many",
        "what drains is not there",
        "one drains that should take connections",
        "there should be no endpoint at all",
        "flags and members",
        "both policies",
        "a NodePort is not there",
        "a NodePort is there",
        "source ranges are not applied",
        "this node is refused, but in the ranges",
        "other source ranges are applied",
        "another kind and scope",
    ],
)
def test_every_difference_of_a_service_port_is_named(
    wanted: PlannedPort, there: PlannedPort, differences: list[tuple[str, str, str, str]]
) -> None:
    assert found(wanted, there) == differences


def test_a_frontend_of_another_service_port_names_both_by_id() -> None:
    """The names alone can be equal: of two protocols."""
    name = port_name("dns", "")
    twin = port_name("dns", "", protocol=Protocol.UDP)
    wanted = plan(planned(name=name), planned(name=twin, frontends=()))
    there = programmed(wanted)
    mine, other = ({port.name: port.id for port in there.ports}[one] for one in (name, twin))
    swapped = [
        one._replace(id=other) if one.id == mine else one for one in there.frontends if one.id
    ]
    assert audit.differences(wanted, there._replace(frontends=tuple(swapped))) == [
        Difference(
            "default/dns",
            "frontends",
            f"{cluster_ip(10)}:80 TCP",
            "ClusterIP of default/dns, internal",
            f"ClusterIP of default/dns (id {other}), internal",
        )
    ]


def test_a_slot_of_another_owner_and_one_that_stands_there_twice_are_found() -> None:
    there = programmed(plan(planned(HERE, THERE)))
    (port,) = there.ports
    here, other = there.cluster[port.id]
    foreign = there._replace(cluster={port.id: (here, other._replace(owner=77))})
    (one,) = audit.differences(plan(planned(HERE, THERE)), foreign)
    assert (one.what, one.actual) == (f"cluster {pod_ip(2)}:8080", "slot of id 77")

    words = list(port.words)
    words[CLUSTER] = words[CLUSTER]._replace(length=3)
    doubled = there._replace(
        ports=(port._replace(words=tuple(words)),), cluster={port.id: (here, other, here)}
    )
    (one,) = audit.differences(plan(planned(HERE, THERE)), doubled)
    assert (one.where, one.what, one.expected, one.actual) == ("ports", "cluster count", "2", "3")


def test_a_port_too_many_and_one_too_few_are_named() -> None:
    more = planned(name=port_name("more"), frontends=())
    assert audit.differences(plan(planned()), programmed(plan(more))) == [
        Difference("", "service_addrs", cluster_ip(10), "known", ""),
        Difference("default/more:http", "ports", "service port TCP IPv4", "", "programmed"),
        Difference("default/web:http", "ports", "service port TCP IPv4", "programmed", ""),
    ]


@pytest.mark.parametrize(
    ("wanted", "there", "differences"),
    [
        ({node_ip(1)}, {node_ip(1)}, []),
        ({node_ip(1), "fd50::1"}, {node_ip(1)}, [("fd50::1", "NodePorts answer", "")]),
        (set(), {node_ip(1)}, [(node_ip(1), "", "NodePorts answer")]),
    ],
    ids=["as planned", "one is not there", "one is there"],
)
def test_where_nodeports_answer_is_compared(
    wanted: set[str], there: set[str], differences: list[tuple[str, str, str]]
) -> None:
    """NP-01."""
    here, actual = (
        plan(node_ports=NodePorts(frozenset(map(parse_address, texts))))
        for texts in (wanted, there)
    )
    seen = audit.differences(here, programmed(actual))
    assert [(one.what, one.expected, one.actual) for one in seen] == differences
    assert {(one.service, one.where) for one in seen} <= {("", "node_addrs")}


def test_what_holds_for_the_whole_node_is_compared() -> None:
    """NP-07, POL-06, MASQ-01, MASQ-09."""
    wanted = plan(
        node_ports=NodePorts(loopback=frozenset({Family.IPV4})),
        pods=by_network("10.0.0.0/8", "fd00::/48"),
        masquerade_all=True,
    )
    assert audit.differences(wanted, programmed(wanted)) == []
    there = plan(pods=by_network("10.0.0.0/9", "fd00::/48"))
    assert audit.differences(wanted, programmed(there)) == [
        Difference(
            "",
            "settings",
            "flags",
            "loopback4 tells_pods4 tells_pods6 masquerade_all pods_by_net4 pods_by_net6",
            "tells_pods4 tells_pods6 pods_by_net4 pods_by_net6",
        ),
        Difference("", "settings", "pods4", "10.0.0.0/8", "10.0.0.0/9"),
    ]
    by_device = plan(pods=PodDetector(bridge="cni0"))
    flags, *subnets = audit.differences(wanted, programmed(by_device))
    assert flags.actual == "tells_pods4 tells_pods6 pods_by_device"
    assert [(one.what, one.expected, one.actual) for one in subnets] == [
        ("pods4", "10.0.0.0/8", ""),
        ("pods6", "fd00::/48", ""),
    ]
    assert audit.differences(wanted, programmed(plan()))[0].actual == "none set"


def test_a_subnet_that_is_none_is_shown_as_it_is() -> None:
    there = programmed(plan(pods=by_network("10.0.0.0/8")))
    torn = there._replace(subnets=there.subnets._replace(ipv4=there.subnets.ipv4[:30] + b"\1\1"))
    (one,) = audit.differences(plan(pods=by_network("10.0.0.0/8")), torn)
    assert one.actual == "10.0.0.0 & ffff:ffff:ffff:ffff:ffff:ffff:ff00:101"


ELSEWHERE = Frontend(parse_address("192.0.2.7"), 80, Protocol.TCP, FrontendKind.EXTERNAL_IP)


@pytest.mark.parametrize(
    ("wanted", "there", "differences"),
    [
        (planned(HERE), planned(HERE), []),
        (planned(), planned(), []),
        (planned(HERE), planned(), [(cluster_ip(10), "known answers", "known")]),
        (
            planned(HERE, frontends=[DIALLED, ELSEWHERE]),
            planned(HERE),
            [("192.0.2.7", "known answers", "")],
        ),
        (
            planned(THERE, frontends=[DIALLED, ELSEWHERE]),
            planned(THERE, frontends=[DIALLED, ELSEWHERE], external_policy=Policy.LOCAL),
            [("192.0.2.7", "known answers", "known")],
        ),
        (
            planned(THERE, frontends=[DIALLED, ELSEWHERE]),
            planned(THERE, frontends=[DIALLED, ELSEWHERE], internal_policy=Policy.LOCAL),
            [(cluster_ip(10), "known answers", "known")],
        ),
        (planned(HERE), planned(HERE, frontends=[DIALLED, NODE_PORT]), []),
    ],
    ids=[
        "it answers",
        "it is known and no more",
        "it answers without an endpoint",
        "one more",
        "an external address leads to nothing on this node",
        "a ClusterIP does",
        "a NodePort has no address",
    ],
)
def test_which_addresses_are_services_is_compared(
    wanted: PlannedPort, there: PlannedPort, differences: list[tuple[str, str, str]]
) -> None:
    seen = audit.differences(plan(wanted), programmed(plan(there)))
    addresses = [one for one in seen if one.where == "service_addrs"]
    assert [(one.what, one.expected, one.actual) for one in addresses] == differences
