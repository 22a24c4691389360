# SPDX-License-Identifier: Apache-2.0
"""Where a plan leads whom, and who is masqueraded: upstream's packet-flow vectors."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from ebpflb.model import (
    ApiObject,
    Deleted,
    Family,
    FrontendKind,
    LocalAddresses,
    Plan,
    Policy,
    Protocol,
    ServicePort,
    ServicePortName,
    SlicePort,
    Upserted,
    Verdict,
    parse_address,
)
from ebpflb.planner import flows
from tests.builders import (
    NODE,
    READY,
    TERMINATING,
    UNUSABLE,
    Row,
    at,
    cluster_ip,
    endpoint_slice,
    new_planner,
    node,
    port_name,
    service,
    slice_key,
)

Client = Literal["pod", "node", "outside"]
CLUSTER_IP, NODE_PORT, EXTERNAL, VIP = FrontendKind
CLUSTER, LOCAL = Policy.CLUSTER, Policy.LOCAL
REJECT, DROP = "REJECT", "DROP"

NODE_IP = "192.168.0.2"
DETECTOR: dict[str, Any] = {"cluster_cidrs": ("10.0.0.0/8",)}
HTTP = ServicePort("http", Protocol.TCP, 80, 3001)
EXTERNAL_IP, LB_IP = "192.168.99.11", "1.2.3.4"


def plan_of(*objects: ApiObject, **options: Any) -> Plan:
    planner = new_planner(**options)
    planner.apply(LocalAddresses(frozenset({parse_address(NODE_IP)})))
    for obj in (node(NODE_IP), *objects):
        planner.apply(Upserted(obj))
    return planner.update().plan


def led(plan: Plan, client: Client, kind: FrontendKind, name: ServicePortName) -> str:
    """The last octets of where a client may come out, or what becomes of it."""
    port = plan.ports[name]
    assert kind in {each.kind for each in port.frontends}
    selection = flows.leads(plan, port, kind, flows.Client(client))
    if selection.verdict is not Verdict.FORWARD:
        return selection.verdict.name
    return ",".join(str(each.address[15]) for each in selection.backends)


def flow(plan: Plan, client: Client, kind: FrontendKind, name: ServicePortName) -> str:
    """The same, with m where the client is masqueraded and - where it is not."""
    masquerades = flows.masquerades(plan, plan.ports[name], kind, flows.Client(client))
    return f"{led(plan, client, kind, name)} {'m' if masquerades else '-'}"


# --- TestInternalExternalMasquerade: the whole matrix --------------------------------------------

L, B = "1", "1,2"  # the local endpoint, and both
MATRIX = ("svc1", "svc2", "svc3")


def matrix(**options: Any) -> Plan:
    policies = {"svc1": {}, "svc2": {"external_policy": LOCAL}, "svc3": {"internal_policy": LOCAL}}
    objects: list[ApiObject] = []
    for number, (name, policy) in enumerate(policies.items(), start=1):
        made: dict[str, Any] = policy
        objects += [
            service(
                name,
                cluster_ips=[cluster_ip(40 + number)],
                ports=[ServicePort("http", Protocol.TCP, 80, 3000 + number)],
                ingress_ips=[f"192.0.2.{number}"],
                **made,
            ),
            endpoint_slice(
                at(f"10.180.{number}.1", NODE),
                at(f"10.180.{number}.2"),
                name=f"{name}-1",
                service=name,
            ),
        ]
    return plan_of(*objects, **options)


@pytest.mark.parametrize(
    ("client", "kind", "expected"),
    [
        pytest.param("pod", CLUSTER_IP, "B - | B - | L -", id="TV-M01 MASQ-02 MASQ-15"),
        pytest.param("pod", NODE_PORT, "B m | B - | B m", id="TV-M02 MASQ-04 MASQ-05"),
        pytest.param("pod", VIP, "B m | B - | B m", id="TV-M03 MASQ-04 MASQ-05"),
        pytest.param("node", CLUSTER_IP, "B m | B m | L m", id="TV-M04 MASQ-02"),
        pytest.param("node", NODE_PORT, "B m | B m | B m", id="TV-M05 TV-M06 MASQ-05 MASQ-12"),
        pytest.param("node", VIP, "B m | B m | B m", id="TV-M07 MASQ-05 MASQ-11"),
        pytest.param("outside", CLUSTER_IP, "B m | B m | L m", id="TV-M08 MASQ-02"),
        pytest.param("outside", NODE_PORT, "B m | L - | B m", id="TV-M09 MASQ-04 MASQ-05"),
        pytest.param("outside", VIP, "B m | L - | B m", id="TV-M10 MASQ-04 MASQ-05"),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        DETECTOR,
        {"detect_local_mode": "BridgeInterface", "pod_bridge": "cni0"},
        {"detect_local_mode": "InterfaceNamePrefix", "pod_device_prefix": "veth"},
    ],
    ids=["by address", "by bridge", "by device"],
)
def test_the_matrix(
    options: dict[str, Any], client: Client, kind: FrontendKind, expected: str
) -> None:
    assert row_of_the_matrix(matrix(**options), client, kind) == expected


def row_of_the_matrix(plan: Plan, client: Client, kind: FrontendKind) -> str:
    found = [flow(plan, client, kind, port_name(name)) for name in MATRIX]
    return " | ".join(found).replace(B, "B").replace(L, "L")


MASQUERADE_ALL: dict[str, Any] = {"masquerade_all": True}


@pytest.mark.parametrize(
    ("options", "client", "kind", "expected"),
    [
        pytest.param({}, "pod", CLUSTER_IP, "B - | B - | L -", id="TV-M20 M01 MASQ-03"),
        pytest.param({}, "node", CLUSTER_IP, "B - | B - | L -", id="TV-M20 M04 MASQ-03"),
        pytest.param({}, "outside", CLUSTER_IP, "B - | B - | L -", id="TV-M20 M08 MASQ-03"),
        pytest.param({}, "pod", NODE_PORT, "B m | L - | B m", id="TV-M20 M02 POL-06"),
        pytest.param({}, "pod", VIP, "B m | L - | B m", id="TV-M20 M03 POL-06"),
        pytest.param({}, "node", VIP, "B m | B m | B m", id="TV-M20 M07"),
        pytest.param({}, "outside", VIP, "B m | L - | B m", id="TV-M20 M10"),
        pytest.param(
            DETECTOR | MASQUERADE_ALL,
            "pod",
            CLUSTER_IP,
            "B m | B m | L m",
            id="TV-M21 M01 MASQ-01",
        ),
        pytest.param(
            DETECTOR | MASQUERADE_ALL, "pod", VIP, "B m | B - | B m", id="TV-M21 M03, as it was"
        ),
        pytest.param(MASQUERADE_ALL, "pod", CLUSTER_IP, "B m | B m | L m", id="TV-M22 M01 MASQ-01"),
        pytest.param(
            MASQUERADE_ALL, "node", CLUSTER_IP, "B m | B m | L m", id="TV-M22 M04 MASQ-01"
        ),
        pytest.param(
            MASQUERADE_ALL, "outside", CLUSTER_IP, "B m | B m | L m", id="TV-M22 M08 MASQ-01"
        ),
        pytest.param(MASQUERADE_ALL, "pod", NODE_PORT, "B m | L - | B m", id="TV-M22 M02 POL-06"),
        pytest.param(MASQUERADE_ALL, "pod", VIP, "B m | L - | B m", id="TV-M22 M03 POL-06"),
    ],
)
def test_the_matrix_without_a_detector_and_with_masquerade_all(
    options: dict[str, Any], client: Client, kind: FrontendKind, expected: str
) -> None:
    assert row_of_the_matrix(matrix(**options), client, kind) == expected


def test_a_detector_of_one_family_leaves_the_other_without_masq_10() -> None:
    plan = plan_of(
        service(cluster_ips=[cluster_ip(10), "fd96::10"]),
        endpoint_slice(at("10.180.0.1", NODE)),
        endpoint_slice(at("fd00:180::1", NODE), name="web-2"),
        **DETECTOR,
    )
    families = (port_name(), port_name(family=Family.IPV6))
    assert [flow(plan, "node", CLUSTER_IP, name) for name in families] == ["1 m", "1 -"]


# --- TestTerminatingEndpointsTrafficPolicyLocal and …Cluster -------------------------------------

STATES = {"R": READY, "ST": TERMINATING, "TN": UNUSABLE}


def row(text: str) -> Row:
    """``3STL`` is an endpoint by its number and state, and L where it is here."""
    where = NODE if text.endswith("L") else "elsewhere"
    return at(f"10.0.1.{text[0]}", where, STATES[text[1:].removesuffix("L")])


@pytest.mark.parametrize(
    ("policy", "endpoints", "from_pod", "from_outside"),
    [
        pytest.param(LOCAL, "1RL 2RL 3STL 4TNL 5R", "1,2,5", "1,2", id="TV-X01"),
        pytest.param(LOCAL, "2STL 3STL 4TNL 5R", "5", "2,3", id="TV-X02"),
        pytest.param(LOCAL, "5ST", "5", DROP, id="TV-X03"),
        pytest.param(LOCAL, "4TNL 5TN", REJECT, REJECT, id="TV-X04"),
        pytest.param(CLUSTER, "1RL 2RL 3ST 4TN 5R", "1,2,5", "1,2,5", id="TV-X05"),
        pytest.param(CLUSTER, "2STL 3STL 4TN 5ST", "2,3,5", "2,3,5", id="TV-X06"),
        pytest.param(CLUSTER, "5ST", "5", "5", id="TV-X07"),
        pytest.param(CLUSTER, "4TNL 5TN", REJECT, REJECT, id="TV-X08"),
    ],
)
def test_terminating_endpoints(
    policy: Policy, endpoints: str, from_pod: str, from_outside: str
) -> None:
    planner = new_planner(**DETECTOR)
    served = service(external_policy=policy, ingress_ips=[LB_IP], health_port=30000)
    for obj in (served, endpoint_slice(*map(row, endpoints.split()))):
        planner.apply(Upserted(obj))
    plan = planner.update().plan
    assert led(plan, "pod", CLUSTER_IP, port_name()) == from_pod
    assert led(plan, "pod", VIP, port_name()) == from_pod
    assert led(plan, "outside", VIP, port_name()) == from_outside
    planner.apply(Deleted(slice_key()))
    plan = planner.update().plan
    for client in ("pod", "node", "outside"):
        for kind in (CLUSTER_IP, VIP):
            assert led(plan, client, kind, port_name()) == REJECT, "TV-X09"


# --- single flows --------------------------------------------------------------------------------

EVERYWHERE: dict[str, Any] = {
    "ports": [HTTP],
    "external_ips": [EXTERNAL_IP],
    "ingress_ips": [LB_IP],
}
OUTER = (NODE_PORT, EXTERNAL, VIP)


@pytest.mark.parametrize("client", ["pod", "node", "outside"])
def test_without_any_endpoint_everybody_is_refused_tv_f01(client: Client) -> None:
    plan = plan_of(service(**EVERYWHERE), endpoint_slice(at("10.180.0.1", state=UNUSABLE)))
    for kind in FrontendKind:
        assert led(plan, client, kind, port_name()) == REJECT


def test_by_protocol_and_port_tv_f05_tv_f06_tv_f07() -> None:
    dns = [
        ServicePort(f"dns-{protocol.name.lower()}", protocol, 53)
        for protocol in (Protocol.TCP, Protocol.UDP, Protocol.SCTP)
    ]
    targets = [
        SlicePort(one.name, one.protocol, 5353 if one.protocol is Protocol.TCP else 53)
        for one in dns
    ]
    plan = plan_of(service(ports=dns), endpoint_slice(at("10.180.0.1"), ports=targets))
    found = {
        (name.protocol.name, port.frontends[0].port): [each.port for each in port.cluster.backends]
        for name, port in plan.ports.items()
    }
    assert found == {("TCP", 53): [5353], ("UDP", 53): [53], ("SCTP", 53): [53]}


@pytest.mark.parametrize(
    ("client", "policy", "expected"),
    [
        pytest.param("pod", LOCAL, B, id="TV-F18 POL-04"),
        pytest.param("node", LOCAL, B, id="POL-05"),
        pytest.param("outside", LOCAL, L, id="TV-F19 POL-03 POL-08"),
        pytest.param("pod", CLUSTER, B, id="TV-F20 POL-02"),
        pytest.param("outside", CLUSTER, B, id="TV-F20 POL-02"),
    ],
)
def test_the_external_policy(client: Client, policy: Policy, expected: str) -> None:
    endpoints = endpoint_slice(at("10.180.0.1", NODE), at("10.180.0.2"))
    plan = plan_of(service(external_policy=policy, **EVERYWHERE), endpoints, **DETECTOR)
    assert [led(plan, client, kind, port_name()) for kind in OUTER] == [expected] * 3
    assert led(plan, client, CLUSTER_IP, port_name()) == B, "POL-07"


@pytest.mark.parametrize(
    ("policy", "here", "expected"),
    [
        pytest.param(CLUSTER, 1, "1,2,3", id="TV-F21"),
        pytest.param(LOCAL, 1, "1", id="TV-F22 one is here"),
        pytest.param(LOCAL, 2, "1,2", id="TV-F22 two are here"),
        pytest.param(LOCAL, 0, DROP, id="TV-F23 POL-11 none is"),
    ],
)
def test_the_internal_policy(policy: Policy, here: int, expected: str) -> None:
    endpoints = endpoint_slice(
        *(at(f"10.180.0.{n}", NODE if n <= here else "elsewhere") for n in (1, 2, 3))
    )
    plan = plan_of(service(internal_policy=policy, **EVERYWHERE), endpoints)
    for client in ("pod", "node", "outside"):
        assert led(plan, client, CLUSTER_IP, port_name()) == expected
        assert led(plan, client, NODE_PORT, port_name()) == "1,2,3", "POL-07 B-69"


@pytest.mark.parametrize("internal", Policy)
@pytest.mark.parametrize("external", Policy)
def test_the_four_pairs_of_policies_without_a_local_endpoint_b_143_noep_06(
    internal: Policy, external: Policy
) -> None:
    made = service(internal_policy=internal, external_policy=external, **EVERYWHERE)
    plan = plan_of(made, endpoint_slice(at("10.180.0.2")), **DETECTOR)
    inside = DROP if internal is LOCAL else "2"
    outside = DROP if external is LOCAL else "2"
    for kind in OUTER:
        assert led(plan, "pod", kind, port_name()) == "2"
        assert led(plan, "node", kind, port_name()) == "2"
        assert led(plan, "outside", kind, port_name()) == outside, "NOEP-05"
    assert led(plan, "pod", CLUSTER_IP, port_name()) == inside, "NOEP-04"


def test_a_change_of_policy_leaves_the_sets_as_they_are_pol_10() -> None:
    planner = new_planner()
    planner.apply(Upserted(endpoint_slice(at("10.180.0.1", NODE), at("10.180.0.2"))))
    seen = []
    for policy in (CLUSTER, LOCAL, CLUSTER):
        planner.apply(Upserted(service(external_policy=policy, **EVERYWHERE)))
        assert planner.update().changed == {port_name()}
        port = planner.plan.ports[port_name()]
        seen.append((port.cluster, port.local, port.draining))
    assert seen[0] == seen[1] == seen[2]


def test_a_load_balancers_ranges_and_nothing_else_is_guarded_tv_f08_to_tv_f13() -> None:
    ranges = ["192.168.0.0/24", "203.0.113.0/25"]
    endpoints = endpoint_slice(at("10.180.0.1"))
    port = plan_of(service(source_ranges=ranges, **EVERYWHERE), endpoints).ports[port_name()]
    assert list(map(str, port.source_ranges)) == ranges
    assert port.node_in_ranges, "TV-F12 TV-F13 the node is served"
    inside, outside = parse_address("203.0.113.2"), parse_address("203.0.113.130")
    assert any(inside in each for each in port.source_ranges), "TV-F09"
    assert not any(outside in each for each in port.source_ranges), "TV-F10"
