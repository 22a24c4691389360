# SPDX-License-Identifier: Apache-2.0
"""API objects into values: what is read, what is defaulted, and what a bad field costs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.model import (
    NO_HINTS,
    Deleted,
    EndpointSlice,
    Family,
    Hints,
    Node,
    Policy,
    Protocol,
    Refused,
    Service,
    ServicePort,
    SlicePort,
    Upserted,
    format_address,
    parse_address,
    parse_network,
)
from ebpflb.sources import wire
from tests.builders import (
    CREATED,
    NODE,
    READY,
    TERMINATING,
    UNUSABLE,
    ApiObject,
    cluster_ip,
    endpoint_object,
    node_object,
    pod_ip,
    service_key,
    service_object,
    slice_key,
    slice_object,
    told,
)

V4, V6 = cluster_ip(10), cluster_ip(10, Family.IPV6)


def read_service(obj: ApiObject) -> Service:
    event = told(obj)
    assert isinstance(event, Upserted), event
    assert isinstance(event.obj, Service)
    return event.obj


def read_slice(obj: ApiObject) -> EndpointSlice:
    event = told(obj)
    assert isinstance(event, Upserted), event
    assert isinstance(event.obj, EndpointSlice)
    return event.obj


def refusal(obj: ApiObject) -> str:
    event = told(obj)
    assert isinstance(event, Refused), event
    return event.reason


# --- what is read ------------------------------------------------------------------------------


def test_a_service_is_read_field_by_field() -> None:
    obj = service_object(
        cluster_ips=[V4, V6],
        ports=[
            {
                "name": "http",
                "port": 80,
                "protocol": "TCP",
                "targetPort": "web",
                "nodePort": 30080,
            },
            {"name": "dns", "port": 53, "protocol": "UDP"},
            {"name": "sig", "port": 9, "protocol": "SCTP"},
        ],
        annotations={"ebpflb.io/socket-lb": "false"},
        sessionAffinity="ClientIP",
        sessionAffinityConfig={"clientIP": {"timeoutSeconds": 60}},
        internalTrafficPolicy="Local",
        externalTrafficPolicy="Local",
        somethingNew={"of": ["a", "later", "version"]},
        type="LoadBalancer",
        externalIPs=["192.0.2.1", "2001:db8::1"],
        loadBalancerSourceRanges=["10.0.0.0/8"],
        healthCheckNodePort=32000,
        loadBalancerIP="192.0.2.9",
        allocateLoadBalancerNodePorts=False,
        ingress=[{"ip": "192.0.2.2", "ports": [{"port": 80}]}],
    )
    assert read_service(obj) == Service(
        namespace="default",
        name="web",
        created=CREATED,
        cluster_ips=(parse_address(V4), parse_address(V6)),
        ports=(
            ServicePort("http", Protocol.TCP, 80, 30080),
            ServicePort("dns", Protocol.UDP, 53),
            ServicePort("sig", Protocol.SCTP, 9),
        ),
        affinity_s=60,
        internal_policy=Policy.LOCAL,
        external_policy=Policy.LOCAL,
        socket_lb=False,
        external_ips=(parse_address("192.0.2.1"), parse_address("2001:db8::1")),
        ingress_ips=(parse_address("192.0.2.2"),),
        source_ranges=(parse_network("10.0.0.0/8"),),
        health_port=32000,
    )


def test_a_slice_is_read_field_by_field() -> None:
    obj = slice_object(
        endpoints=[
            endpoint_object(pod_ip(10), ready=True, serving=True, terminating=False),
            {
                "addresses": [pod_ip(11), pod_ip(12)],
                "hostname": "not read",
                "nodeName": None,
                "hints": {
                    "forZones": [{"name": "b"}, {"name": "a"}],
                    "forNodes": [{"name": NODE}],
                },
            },
        ],
        ports=[{"name": "http", "port": 8080, "protocol": "TCP", "appProtocol": "http"}],
    )
    assert read_slice(obj) == EndpointSlice(
        namespace="default",
        name="web-1",
        service="web",
        family=Family.IPV4,
        ports=(SlicePort("http", Protocol.TCP, 8080),),
        addresses=(parse_address(pod_ip(10)), parse_address(pod_ip(11))),
        nodes=(NODE, ""),
        states=bytes([READY, READY]),
        hints=(NO_HINTS, Hints(("a", "b"), (NODE,))),
    )


def test_a_node_is_read_with_its_zone() -> None:
    obj = node_object(labels={"topology.kubernetes.io/zone": "a", "other": "label"})
    assert told(obj) == Upserted(Node(NODE, zone="a"))
    assert told(node_object()) == Upserted(Node(NODE))


def test_json_and_builtins_are_read_alike() -> None:
    everything = service_object(
        ports=[{"port": 80, "nodePort": 30080}],
        ingress=[{"ip": "192.0.2.1", "ipMode": "VIP"}],
        externalIPs=["192.0.2.2"],
        loadBalancerSourceRanges=["10.0.0.0/8"],
        **LOCAL | {"healthCheckNodePort": 32000},
    )
    hints = {"forZones": [{"name": "a"}], "forNodes": [{"name": NODE}]}
    hinted = slice_object(endpoints=[endpoint_object(hints=hints)])
    nonsense: ApiObject = {"kind": "Node", "metadata": []}
    for obj in (service_object(), everything, slice_object(), hinted, node_object(), nonsense):
        kind: Any = obj["kind"]
        assert wire.from_builtins(kind, obj) == wire.decode_json(kind, json.dumps(obj).encode())


def test_an_object_without_a_namespace_is_in_default_as_kubectl_has_it() -> None:
    service = service_object()
    del service["metadata"]["namespace"]
    assert read_service(service).namespace == "default"


def test_equal_port_lists_are_one_object() -> None:
    one, other = read_slice(slice_object("a")), read_slice(slice_object("b"))
    assert one.ports is other.ports
    assert one.nodes[0] is other.nodes[0]


@pytest.mark.parametrize(
    ("port", "read"),
    [
        pytest.param({"name": None, "port": 1}, SlicePort("", Protocol.TCP, 1), id="a null name"),
        pytest.param({"port": 1}, SlicePort("", Protocol.TCP, 1), id="no name"),
        pytest.param(
            {"name": "http", "port": 1, "protocol": None},
            SlicePort("http", Protocol.TCP, 1),
            id="a null protocol",
        ),
        pytest.param({"name": "http", "port": None}, None, id="a null port"),
        pytest.param({"name": "http", "port": 0}, None, id="port 0"),
        pytest.param(None, None, id="null"),
        pytest.param(
            {"name": "s", "port": 1, "protocol": "SCTP", "appProtocol": None, "new": {}},
            SlicePort("s", Protocol.SCTP, 1),
            id="fields that nobody reads",
        ),
    ],
)
def test_a_slices_port_with_nulls_port_04_b_57(
    port: ApiObject | None, read: SlicePort | None
) -> None:
    good = {"name": "good", "port": 2}
    piece = read_slice(slice_object(ports=[port, good]))
    assert piece.ports == (*([read] if read else []), SlicePort("good", Protocol.TCP, 2))
    assert len(piece.problems) == (0 if read else 1)


# --- hints ---------------------------------------------------------------------------------------


def hinted(*hints: object) -> EndpointSlice:
    return read_slice(slice_object(endpoints=[endpoint_object(hints=one) for one in hints]))


@pytest.mark.parametrize(
    "hints",
    [
        pytest.param(None, id="null"),
        pytest.param({}, id="empty"),
        pytest.param({"forZones": None, "forNodes": []}, id="null and empty within"),
        pytest.param({"forZones": [{}, None, {"name": None}, {"name": ""}]}, id="of no name"),
    ],
)
def test_hints_that_say_nothing_are_none(hints: object) -> None:
    piece = hinted(hints)
    assert (piece.hints, piece.problems) == ((), ())
    piece = hinted(hints, {"forZones": [{"name": "a"}]})
    assert piece.hints == (NO_HINTS, Hints(("a",)))


def test_equal_hints_are_one_object_in_whatever_order() -> None:
    one, other, again = (
        hinted({"forZones": [{"name": zone} for zone in zones]}).hints[0]
        for zones in ("ab", "ba", "ab")
    )
    assert one == other
    assert again is one


def test_of_more_hints_than_the_api_allows_the_first_count_ep_08() -> None:
    names = [{"name": f"z{n}"} for n in range(9)]
    piece = hinted({"forZones": names, "forNodes": names[:8]})
    assert [len(each.zones) for each in piece.hints] == [8]
    assert piece.problems == ("endpoints[0].hints.forZones has 9 entries: the first 8 count",)


def test_an_endpoint_that_is_refused_takes_its_hints_along() -> None:
    bad = endpoint_object("127.0.0.1", hints={"forZones": [{"name": "a"}]})
    good = endpoint_object(pod_ip(11), hints={"forZones": [{"name": "b"}]})
    piece = read_slice(slice_object(endpoints=[bad, good]))
    assert (len(piece.addresses), piece.hints) == (1, (Hints(("b",)),))


# --- addresses from outside ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ingress", "served", "problems"),
    [
        pytest.param(None, [], [], id="B-103 null"),
        pytest.param([], [], [], id="none"),
        pytest.param([None, {}], [], [], id="B-103 an empty entry"),
        pytest.param([{"hostname": "lb.example"}], [], [], id="LB-02 a name alone"),
        pytest.param([{"ip": "", "hostname": "lb.example"}], [], [], id="B-103 an empty address"),
        pytest.param([{"ip": "192.0.2.1", "ipMode": None}], ["192.0.2.1"], [], id="LB-02 no mode"),
        pytest.param([{"ip": "192.0.2.1", "ipMode": "VIP"}], ["192.0.2.1"], [], id="LB-02 VIP"),
        pytest.param([{"ip": "192.0.2.1", "ipMode": "Proxy"}], [], [], id="LB-02 Proxy"),
        pytest.param(
            [{"ip": "192.0.2.1", "ipMode": "vip"}, {"ip": "192.0.2.2"}],
            ["192.0.2.2"],
            ["[0].ipMode 'vip' is neither VIP nor Proxy: it is not served"],
            id="a mode of another time",
        ),
        pytest.param(
            [{"ip": "192.0.2.1"}, {"ip": "192.0.2.1"}], ["192.0.2.1"], [], id="twice is once"
        ),
        pytest.param(
            [{"ip": "lb"}, {"ip": "2001:db8::1"}],
            ["2001:db8::1"],
            ["[0].ip 'lb' is no IP address"],
            id="B-101 no address",
        ),
        pytest.param(
            [{"ip": "127.0.0.1"}, {"ip": "0.0.0.0"}, {"ip": "fe80::1"}],
            [],
            [
                "[0].ip '127.0.0.1' is a loopback address and is refused",
                "[1].ip '0.0.0.0' is the unspecified address and is refused",
                "[2].ip 'fe80::1' is a link-local address and is refused",
            ],
            id="SEC-02 addresses that are nobody's own",
        ),
    ],
)
def test_a_load_balancers_addresses(
    ingress: object, served: list[str], problems: list[str]
) -> None:
    service = read_service(service_object(ingress=ingress))
    assert [format_address(ip) for ip in service.ingress_ips] == served
    assert list(service.problems) == [f"status.loadBalancer.ingress{one}" for one in problems]


@pytest.mark.parametrize("status", [None, {}, {"loadBalancer": None}, {"loadBalancer": {}}])
def test_a_service_without_a_status_has_no_load_balancer_lb_03(status: object) -> None:
    service = read_service(service_object(type="LoadBalancer") | {"status": status})
    assert (service.ingress_ips, service.problems) == ((), ())


@pytest.mark.parametrize(
    ("texts", "served", "problems"),
    [
        pytest.param(None, [], 0, id="null"),
        pytest.param(["192.0.2.1", "2001:DB8::1"], ["192.0.2.1", "2001:db8::1"], 1, id="both"),
        pytest.param(["192.0.2.1", "192.0.2.1"], ["192.0.2.1"], 0, id="twice is once"),
        pytest.param(["192.0.2.300", None, "192.0.2.1"], ["192.0.2.1"], 2, id="B-101 bad ones"),
        pytest.param(["192.000.002.001"], ["192.0.2.1"], 1, id="FAM-09 leading zeros"),
        pytest.param(["::ffff:192.0.2.1"], ["192.0.2.1"], 1, id="FAM-09 mapped"),
        pytest.param(["127.0.0.1", "::1", "224.0.0.1", "::"], [], 4, id="SEC-02 special ones"),
    ],
)
def test_external_ips(texts: object, served: list[str], problems: int) -> None:
    service = read_service(service_object(externalIPs=texts))
    assert [format_address(ip) for ip in service.external_ips] == served
    assert len(service.problems) == problems


@pytest.mark.parametrize(
    ("texts", "ranges", "problems"),
    [
        pytest.param([" 10.1.2.0/28"], ["10.1.2.0/28"], 0, id="FAM-04 TV-S11 a blank before"),
        pytest.param(["10.1.2.0/28\n"], ["10.1.2.0/28"], 0, id="FAM-04 and behind"),
        pytest.param(["10.0.0.1/8"], ["10.0.0.0/8"], 0, id="B-101 host bits"),
        pytest.param(["010.0.0.0/8"], ["10.0.0.0/8"], 0, id="FAM-09 leading zeros"),
        pytest.param(["::ffff:10.0.0.0/104"], ["10.0.0.0/8"], 0, id="B-101 mapped"),
        pytest.param(["FD00:0::/48"], ["fd00::/48"], 0, id="B-101 upper case"),
        pytest.param(["fd00::/48", "10.0.0.0/8"], ["10.0.0.0/8", "fd00::/48"], 0, id="both"),
        pytest.param(["10.0.0.0/8", "10.0.0.0/8"], ["10.0.0.0/8"], 0, id="twice is once"),
        pytest.param(
            ["x", "10.0.0.0/33", "10.0.0.0", None, "fe80::%1/64", "10.0.0.0/8"],
            ["10.0.0.0/8"],
            5,
            id="B-101 bad ones cost themselves",
        ),
        pytest.param([], [], 0, id="none"),
        pytest.param(None, [], 0, id="null"),
    ],
)
def test_source_ranges(texts: object, ranges: list[str], problems: int) -> None:
    obj = service_object(loadBalancerSourceRanges=texts, ingress=[{"ip": "192.0.2.1"}])
    service = read_service(obj)
    assert list(map(str, service.source_ranges)) == ranges
    assert (len(service.ingress_ips), len(service.problems)) == (1, problems)


def test_ranges_that_nobody_can_read_do_not_let_everybody_in() -> None:
    obj = service_object(
        loadBalancerSourceRanges=["10.0.0.0/99"], ingress=[{"ip": "192.0.2.1"}], externalIPs=["1.1"]
    )
    service = read_service(obj)
    assert (service.ingress_ips, service.source_ranges) == ((), ())
    assert len(service.cluster_ips) == 1
    assert (
        "spec.loadBalancerSourceRanges has no range that can be read: "
        "the load balancer's addresses are not served"
    ) in service.problems


@pytest.mark.parametrize(
    ("number", "served", "problem"),
    [
        pytest.param(None, 0, "", id="LB-04 null"),
        pytest.param(0, 0, "", id="LB-04 none was given"),
        pytest.param(1, 1, "", id="NP-11 any number"),
        pytest.param(
            70000,
            0,
            "spec.ports[0].nodePort 70000 is out of range (1 to 65535): no NodePort is served",
            id="B-93 out of range",
        ),
        pytest.param(
            -1,
            0,
            "spec.ports[0].nodePort -1 is out of range (1 to 65535): no NodePort is served",
            id="negative",
        ),
    ],
)
def test_a_node_port(number: object, served: int, problem: str) -> None:
    service = read_service(service_object(ports=[{"port": 80, "nodePort": number}]))
    assert [port.node_port for port in service.ports] == [served]
    assert service.problems == ((problem,) if problem else ())


LOCAL: dict[str, Any] = {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}
NO_HEALTH = "spec.healthCheckNodePort 0 is no port: no health check is served"


@pytest.mark.parametrize(
    ("spec", "port", "problem"),
    [
        pytest.param(LOCAL | {"healthCheckNodePort": 345}, 345, "", id="HC-01 TV-S07"),
        pytest.param(LOCAL | {"healthCheckNodePort": 0}, 0, NO_HEALTH, id="HC-01 0 is none"),
        pytest.param(LOCAL, 0, NO_HEALTH, id="HC-01 no number"),
        pytest.param(
            LOCAL | {"healthCheckNodePort": 70000},
            0,
            NO_HEALTH.replace(" 0 ", " 70000 "),
            id="out of range",
        ),
        pytest.param(
            LOCAL | {"type": "NodePort", "healthCheckNodePort": 345}, 0, "", id="HC-01 the type"
        ),
        pytest.param(
            LOCAL | {"externalTrafficPolicy": "Cluster", "healthCheckNodePort": 345},
            0,
            "",
            id="HC-01 POL-10 the policy",
        ),
    ],
)
def test_a_health_check_is_for_a_local_load_balancer_alone(
    spec: dict[str, Any], port: int, problem: str
) -> None:
    service = read_service(service_object(**spec))
    assert service.health_port == port
    assert service.problems == ((problem,) if problem else ())


# --- what is not ours counts as absent -----------------------------------------------------------


@pytest.mark.parametrize(
    "obj",
    [
        pytest.param(
            service_object(labels={"service.kubernetes.io/service-proxy-name": "other"}),
            id="SVC-01 a Service of another proxy",
        ),
        pytest.param(
            service_object(labels={"service.kubernetes.io/service-proxy-name": ""}),
            id="SVC-01 a Service of another proxy without a name",
        ),
        pytest.param(
            service_object(labels={"service.kubernetes.io/service-proxy-name": None}),
            id="SVC-01 a Service of another proxy, null",
        ),
        pytest.param(service_object(cluster_ips=["None"]), id="SVC-02 a headless Service"),
        pytest.param(service_object(cluster_ips=[]), id="SVC-02 a Service without a ClusterIP"),
        pytest.param(service_object(clusterIP=None, clusterIPs=None), id="B-77 null ClusterIPs"),
        pytest.param(service_object(clusterIP="", clusterIPs=["None"]), id="B-77 None in the list"),
        pytest.param(service_object(clusterIP="None", clusterIPs=[]), id="B-77 None beside it"),
        pytest.param(service_object(type="ExternalName"), id="SVC-04 an ExternalName with all"),
        pytest.param(
            service_object(annotations={"ebpflb.io/exclude": "true"}), id="an excluded Service"
        ),
        pytest.param(
            {"kind": "Service", "apiVersion": "v1", "metadata": {"name": "web"}},
            id="a Service without a spec",
        ),
    ],
)
def test_a_service_that_is_not_ours_counts_as_absent(obj: ApiObject) -> None:
    assert told(obj) == Deleted(service_key())


@pytest.mark.parametrize(
    "obj",
    [
        pytest.param(
            slice_object(labels={"service.kubernetes.io/headless": ""}), id="SVC-03 headless"
        ),
        pytest.param(
            slice_object(address_type="FQDN", endpoints=[endpoint_object("web.example")]),
            id="FAM-06 FQDN",
        ),
    ],
)
def test_a_slice_that_is_not_ours_counts_as_absent(obj: ApiObject) -> None:
    assert told(obj) == Deleted(slice_key())


def test_a_service_labelled_headless_is_served_as_its_slices_carry_the_label_svc_03() -> None:
    service = read_service(service_object(labels={"service.kubernetes.io/headless": ""}))
    assert service.problems == ()


@pytest.mark.parametrize("value", [None, "false"])
def test_a_service_that_is_not_excluded_is_served(value: str | None) -> None:
    service = read_service(service_object(annotations={"ebpflb.io/exclude": value}))
    assert service.problems == ()


# --- defaults ------------------------------------------------------------------------------------


def test_nulls_everywhere_are_the_api_servers_defaults() -> None:
    service = read_service(
        service_object(
            ports=[{"name": None, "protocol": None, "port": 80}],
            type=None,
            sessionAffinity=None,
            sessionAffinityConfig=None,
            internalTrafficPolicy=None,
            externalTrafficPolicy="",
        )
    )
    assert service.ports == (ServicePort("", Protocol.TCP, 80),)
    assert (service.affinity_s, service.internal_policy) == (0, Policy.CLUSTER)
    assert service.external_policy is Policy.CLUSTER
    assert service.problems == ()


@pytest.mark.parametrize(
    ("conditions", "state"),
    [
        pytest.param({}, READY, id="no condition at all is ready"),
        pytest.param({"ready": None}, READY, id="an unknown ready is ready"),
        pytest.param({"ready": True, "terminating": True}, READY, id="SVC-07 ready wins"),
        pytest.param({"ready": False}, UNUSABLE, id="not ready, not terminating"),
        pytest.param({"ready": False, "serving": True}, UNUSABLE, id="TOP-13 serving alone"),
        pytest.param(
            {"ready": False, "serving": True, "terminating": True}, TERMINATING, id="the fallback"
        ),
        pytest.param({"ready": False, "terminating": True}, TERMINATING, id="unknown serves"),
        pytest.param(
            {"ready": False, "serving": False, "terminating": True},
            UNUSABLE,
            id="B-59 terminating and not serving",
        ),
    ],
)
def test_conditions_come_to_a_state_ep_05(conditions: dict[str, Any], state: int) -> None:
    piece = read_slice(slice_object(endpoints=[endpoint_object(pod_ip(10), **conditions)]))
    assert piece.states == bytes([state])


def test_null_conditions_are_ready_ep_05() -> None:
    obj = slice_object(endpoints=[{"addresses": [pod_ip(10)], "conditions": None}])
    assert read_slice(obj).states == bytes([READY])


@pytest.mark.parametrize(
    ("config", "seconds", "problem"),
    [
        pytest.param(None, 10800, "", id="the default"),
        pytest.param({"clientIP": None}, 10800, "", id="the default, null within"),
        pytest.param({"clientIP": {"timeoutSeconds": 1}}, 1, "", id="the least"),
        pytest.param({"clientIP": {"timeoutSeconds": 86400}}, 86400, "", id="the most"),
        pytest.param(
            {"clientIP": {"timeoutSeconds": 0}},
            10800,
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds 0 is out of range (1 to 86400): "
            "10800 is used",
            id="too little takes the default",
        ),
        pytest.param(
            {"clientIP": {"timeoutSeconds": 86401}},
            86400,
            "spec.sessionAffinityConfig.clientIP.timeoutSeconds 86401 is out of range "
            "(1 to 86400): 86400 is used",
            id="too much takes the most",
        ),
    ],
)
def test_affinity_has_a_time_out_aff_04(config: object, seconds: int, problem: str) -> None:
    service = read_service(service_object(sessionAffinity="ClientIP", sessionAffinityConfig=config))
    assert service.affinity_s == seconds
    assert service.problems == ((problem,) if problem else ())


# --- families ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "served", "problems"),
    [
        pytest.param(
            {"clusterIP": V4, "clusterIPs": [V4, V6], "ipFamilies": ["IPv4", "IPv6"]},
            [V4, V6],
            0,
            id="dual stack",
        ),
        pytest.param(
            {"clusterIP": V6, "clusterIPs": [V6, V4], "ipFamilies": ["IPv6", "IPv4"]},
            [V6, V4],
            0,
            id="dual stack, IPv6 first",
        ),
        pytest.param({"clusterIP": V4}, [V4], 0, id="B-167 an old object of one address"),
        pytest.param({"clusterIP": V6, "clusterIPs": [V6]}, [V6], 0, id="no families, IPv6"),
        pytest.param({"clusterIPs": [V4]}, [V4], 0, id="only the list"),
        pytest.param({"clusterIP": V4, "ipFamilies": ["IPv4"]}, [V4], 0, id="a family and no list"),
        pytest.param(
            {"clusterIP": V4, "clusterIPs": [V4, V6]},
            [V4],
            1,
            id="without families clusterIP alone counts",
        ),
        pytest.param(
            {"clusterIP": V4, "clusterIPs": [V4], "ipFamilies": ["IPv4", "IPv6"]},
            [V4],
            1,
            id="a family without an address",
        ),
        pytest.param(
            {"clusterIP": V4, "clusterIPs": [V4, V6], "ipFamilies": ["IPv6", "IPv4"]},
            [],
            2,
            id="families and addresses crossed",
        ),
        pytest.param(
            {"clusterIP": V4, "clusterIPs": [V4, V6], "ipFamilies": [None, "IPv6"]},
            [V6],
            1,
            id="one family unreadable",
        ),
        pytest.param(
            {
                "clusterIP": V4,
                "clusterIPs": [V4, cluster_ip(11)],
                "ipFamilies": ["IPv4", "IPv4"],
            },
            [V4],
            0,
            id="of two addresses of a family the first",
        ),
    ],
)
def test_a_service_has_one_address_a_family_fam_02(
    spec: dict[str, object], served: list[str], problems: int
) -> None:
    obj = service_object()
    obj["spec"] = {"ports": [{"port": 80}]} | spec
    service = read_service(obj)
    assert [format_address(ip) for ip in service.cluster_ips] == served
    assert len(service.problems) == problems


def test_a_slice_without_a_type_takes_the_family_of_its_first_address() -> None:
    v6 = pod_ip(10, Family.IPV6)
    piece = read_slice(slice_object(address_type=None, endpoints=[endpoint_object(v6)]))
    assert (piece.family, len(piece.addresses)) == (Family.IPV6, 1)
    assert piece.problems == ("addressType is missing: the addresses are taken for IPv6",)


# --- what is wrong in one part costs that part ---------------------------------------------------


@pytest.mark.parametrize(
    ("port", "problem"),
    [
        pytest.param({"name": "bad"}, "spec.ports[1].port is missing", id="PORT-04 no number"),
        pytest.param(None, "spec.ports[1].port is missing", id="a null port"),
        pytest.param(
            {"port": 0}, "spec.ports[1].port 0 is out of range (1 to 65535)", id="PORT-04 port 0"
        ),
        pytest.param(
            {"port": 70000},
            "spec.ports[1].port 70000 is out of range (1 to 65535)",
            id="B-93 port 70000",
        ),
        pytest.param(
            {"port": 1, "protocol": "tcp"},
            "spec.ports[1].protocol 'tcp' is none of TCP, UDP and SCTP",
            id="an unknown protocol",
        ),
        pytest.param(
            {"port": 1, "name": "x" * 64},
            f"spec.ports[1].name '{'x' * 63}… is 64 characters long: 63 at most",
            id="a name that no map holds",
        ),
        pytest.param(
            {"port": 1, "name": "a\nb"},
            "spec.ports[1].name 'a\\nb' is no Kubernetes name (a-z, 0-9 and - between them)",
            id="a name of two lines",
        ),
    ],
)
def test_a_bad_service_port_leaves_the_others(port: Any, problem: str) -> None:
    good: Any = {"name": "http", "port": 80}
    service = read_service(service_object(ports=[good, port, good | {"name": "more"}]))
    assert [port.name for port in service.ports] == ["http", "more"]
    assert service.problems == (problem,)


def test_a_service_without_ports_says_so() -> None:
    service = read_service(service_object(ports=[]))
    assert service.problems == ("spec.ports is empty: there is nothing to serve",)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("abc", "'abc' is no IP address", id="B-93 no address"),
        pytest.param("10.96.0.256", "'10.96.0.256' is no IP address", id="out of range"),
        pytest.param("fe80::1%eth0", "'fe80::1%eth0' is no IP address", id="a zone"),
        pytest.param("10.0.0.1\0", "'10.0.0.1\\x00' is no IP address", id="a zero byte"),
        pytest.param("0.0.0.0", "'0.0.0.0' is the unspecified address and is refused", id="0"),
        pytest.param("127.0.0.1", "'127.0.0.1' is a loopback address and is refused", id="lo"),
    ],
)
def test_a_bad_cluster_ip_leaves_the_other_family(text: str, problem: str) -> None:
    service = read_service(
        service_object(cluster_ips=[text, V6], clusterIP=text, ipFamilies=["IPv4", "IPv6"])
    )
    assert [format_address(ip) for ip in service.cluster_ips] == [V6]
    assert service.problems == (f"spec.clusterIPs[0] {problem}",)


@pytest.mark.parametrize(
    ("address", "address_type", "problem"),
    [
        pytest.param("abc", "IPv4", "is no IP address", id="B-93 no address"),
        pytest.param("10.244.1.256", "IPv4", "is no IP address", id="an octet out of range"),
        pytest.param("", "IPv4", "is no IP address", id="an empty text"),
        pytest.param("fd00::1", "IPv4", "is no IPv4 address", id="FAM-03 IPv6 among IPv4"),
        pytest.param("10.244.1.9", "IPv6", "is no IPv6 address", id="FAM-03 IPv4 among IPv6"),
        pytest.param("::ffff:10.0.0.1", "IPv6", "is no IPv6 address", id="mapped among IPv6"),
        pytest.param("127.0.0.1", "IPv4", "is a loopback address and is refused", id="SEC-03 lo"),
        pytest.param(
            "127.9.9.9", "IPv4", "is a loopback address and is refused", id="SEC-03 127/8"
        ),
        pytest.param("0177.0.0.1", "IPv4", "", id="FAM-09 zeros are decimal, 177 is no loopback"),
        pytest.param("169.254.169.254", "IPv4", "is a link-local address and is refused", id="ll"),
        pytest.param("224.0.0.1", "IPv4", "is a multicast address and is refused", id="mcast"),
        pytest.param("239.1.1.1", "IPv4", "is a multicast address and is refused", id="mcast end"),
        pytest.param("0.0.0.0", "IPv4", "is the unspecified address and is refused", id="any"),
        pytest.param("::1", "IPv6", "is a loopback address and is refused", id="SEC-03 ::1"),
        pytest.param("::", "IPv6", "is the unspecified address and is refused", id="SEC-03 ::"),
        pytest.param("fe80::1", "IPv6", "is a link-local address and is refused", id="fe80"),
        pytest.param("febf::1", "IPv6", "is a link-local address and is refused", id="febf"),
        pytest.param("ff02::1", "IPv6", "is a multicast address and is refused", id="ff02"),
        pytest.param("::ffff:127.0.0.1", "IPv4", "is a loopback address and is refused", id="map"),
    ],
)
def test_a_bad_endpoint_address_leaves_the_others(
    address: str, address_type: str, problem: str
) -> None:
    family = Family.IPV4 if address_type == "IPv4" else Family.IPV6
    good = endpoint_object(pod_ip(10, family))
    piece = read_slice(
        slice_object(address_type=address_type, endpoints=[good, endpoint_object(address), good])
    )
    if problem:
        assert len(piece.addresses) == 2
        assert piece.problems == (f"endpoints[1].addresses[0] {address!r} {problem}",)
    else:
        assert len(piece.addresses) == 3


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(endpoint_object(None), id="PORT-04 an empty list of addresses"),
        pytest.param({"addresses": None}, id="null addresses"),
        pytest.param({}, id="no addresses"),
        pytest.param(None, id="a null endpoint"),
    ],
)
def test_an_endpoint_without_an_address_leaves_the_others(bad: ApiObject | None) -> None:
    piece = read_slice(slice_object(endpoints=[bad, endpoint_object(pod_ip(11))]))
    assert piece.addresses == (parse_address(pod_ip(11)),)
    assert piece.problems == ("endpoints[0].addresses is empty",)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        pytest.param("010.244.001.010", pod_ip(10), id="FAM-09 leading zeros"),
        pytest.param("::ffff:10.244.1.10", pod_ip(10), id="FAM-09 IPv4-mapped"),
    ],
)
def test_an_address_written_the_old_way_is_served_and_reported_once(text: str, read: str) -> None:
    piece = read_slice(slice_object(endpoints=[endpoint_object(text)]))
    assert piece.addresses == (parse_address(read),)
    assert piece.problems == (
        f"endpoints[0].addresses[0] {text!r} is read as {read} and served: better written so",
    )


def test_a_thousand_bad_endpoints_say_so_in_a_few_lines() -> None:
    piece = read_slice(slice_object(endpoints=[endpoint_object("abc")] * 1000))
    assert len(piece.problems) == 17
    assert piece.problems[-1] == "and 984 more of the kind"


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (
            {"internalTrafficPolicy": "local"},
            "spec.internalTrafficPolicy 'local' is neither Cluster nor Local: Cluster is used",
        ),
        (
            {"sessionAffinity": "Cookie"},
            "spec.sessionAffinity 'Cookie' is neither None nor ClientIP",
        ),
    ],
)
def test_an_unknown_word_takes_the_default_and_is_named(spec: dict[str, Any], problem: str) -> None:
    assert read_service(service_object(**spec)).problems == (problem,)


def test_an_annotation_that_is_neither_true_nor_false_is_named() -> None:
    service = read_service(service_object(annotations={"ebpflb.io/exclude": "yes"}))
    assert service.problems == (
        "annotation ebpflb.io/exclude 'yes' is neither true nor false: false",
    )


def test_a_creation_time_that_does_not_sort_is_not_used() -> None:
    service = read_service(service_object(created="2026-01-01T00:00:00+02:00"))
    assert service.created == ""
    assert len(service.problems) == 1


# --- what is refused whole -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("obj", "reason"),
    [
        pytest.param(service_object(""), "metadata.name is missing", id="no name"),
        pytest.param(slice_object(""), "metadata.name is missing", id="a name-less slice"),
        pytest.param(node_object(""), "metadata.name is missing", id="a name-less node"),
        pytest.param(
            service_object("x" * 300),
            f"metadata.name '{'x' * 63}… is 300 characters long: 63 at most",
            id="a Service of 300 characters",
        ),
        pytest.param(
            slice_object("x" * 300),
            f"metadata.name '{'x' * 63}… is 300 characters long: 253 at most",
            id="a slice of 300 characters",
        ),
        pytest.param(
            service_object(namespace="x" * 64),
            f"metadata.namespace '{'x' * 63}… is 64 characters long: 63 at most",
            id="a namespace of 64 characters",
        ),
        pytest.param(
            service_object('web"\n-A INPUT'),
            "metadata.name 'web\"\\n-A INPUT' is no Kubernetes name (a-z, 0-9 and - between them)",
            id="a name that would be a rule",
        ),
        pytest.param(
            service_object(ports=[{"name": "http", "port": "80"}]),
            "spec.ports[*].port has a wrong type: expected int, got str",
            id="a port in quotes",
        ),
        pytest.param(
            service_object(ports=[{"port": 80.5}]),
            "spec.ports[*].port has a wrong type: expected int, got float",
            id="half a port",
        ),
        pytest.param(
            service_object(ports=[{"port": True}]),
            "spec.ports[*].port has a wrong type: expected int, got bool",
            id="a true port",
        ),
        pytest.param(
            service_object(clusterIP=10),
            "spec.clusterIP has a wrong type: expected str, got int",
            id="a number for an address",
        ),
        pytest.param(
            slice_object(endpoints=[{"addresses": pod_ip(10)}]),
            "endpoints[*].addresses has a wrong type: expected array, got str",
            id="a text for a list",
        ),
        pytest.param(
            slice_object(endpoints=[endpoint_object(ready="yes")]),  # type: ignore[arg-type]
            "endpoints[*].conditions.ready has a wrong type: expected bool, got str",
            id="a text for a condition",
        ),
        pytest.param(
            slice_object(service=None),
            "has no label kubernetes.io/service-name, so it belongs to no Service",
            id="EP-01 a slice of no Service",
        ),
        pytest.param(
            slice_object(address_type="IPv5"),
            "addressType 'IPv5' is none of IPv4, IPv6 and FQDN",
            id="an unknown address type",
        ),
    ],
)
def test_what_cannot_be_named_or_read_is_refused(obj: ApiObject, reason: str) -> None:
    assert refusal(obj).replace("[0]", "[*]").replace("[...]", "[*]") == reason


def test_a_refusal_has_the_objects_own_key() -> None:
    assert told(service_object(ports=[{"port": "80"}])).key == service_key()  # type: ignore[union-attr]
    assert told(slice_object(endpoints=[{"addresses": 1}])).key == slice_key()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b'{"metadata": {"name": "we', id="half an object"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b'{"metadata": {"name": "\xff"}}', id="a name that is no UTF-8"),
        pytest.param(b'{"a":' * 9999 + b"1" + b"}" * 9999, id="nested without end"),
        pytest.param(b'{"spec": {"ports": [{"port": ' + b"9" * 9999 + b"}]}}", id="9999 digits"),
    ],
)
def test_what_is_no_object_is_refused(text: bytes) -> None:
    event = wire.decode_json("Service", text)
    assert isinstance(event, Refused)
    assert event.reason


# --- anything at all -----------------------------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        (
            *(V4, V6, pod_ip(10), "None", "IPv4", "IPv6", "TCP", "true", "web", "010.0.0.1"),
            *("LoadBalancer", "Local", "10.0.0.0/8", "VIP"),
        )
    )
)
WORDS = st.sampled_from(
    (
        *("metadata", "name", "namespace", "labels", "annotations", "spec", "ports", "port"),
        *("clusterIP", "clusterIPs", "ipFamilies", "protocol", "endpoints", "addresses"),
        *("conditions", "ready", "serving", "terminating", "nodeName", "addressType"),
        *("sessionAffinity", "sessionAffinityConfig", "clientIP", "timeoutSeconds"),
        *("kubernetes.io/service-name", "ebpflb.io/exclude", "nodePort", "externalIPs"),
        *("loadBalancerSourceRanges", "healthCheckNodePort", "status", "loadBalancer", "ingress"),
        *("ip", "ipMode", "hints", "forZones", "forNodes", "type", "externalTrafficPolicy"),
    )
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner),
    max_leaves=30,
)


@given(kind=st.sampled_from(["Service", "EndpointSlice", "Node"]), obj=JSON)
def test_no_object_raises(kind: wire.Kind, obj: object) -> None:
    event = wire.from_builtins(kind, obj)
    assert type(wire.decode_json(kind, json.dumps(obj).encode())) is type(event)


@given(kind=st.sampled_from(["Service", "EndpointSlice", "Node"]), data=st.binary())
def test_no_bytes_raise(kind: wire.Kind, data: bytes) -> None:
    assert isinstance(wire.decode_json(kind, data), Refused)


@given(data=st.data(), obj=st.sampled_from([service_object(), slice_object(), node_object()]))
def test_a_spoilt_field_never_raises(data: st.DataObject, obj: ApiObject) -> None:
    spoilt = json.loads(json.dumps(obj))
    here: Any = spoilt
    while True:
        key = data.draw(
            st.sampled_from(sorted(here) if isinstance(here, dict) else range(len(here)))
        )
        if not isinstance(here[key], dict | list) or not here[key] or data.draw(st.booleans()):
            break
        here = here[key]
    here[key] = data.draw(JSON)
    kind: Any = obj["kind"]
    event = wire.from_builtins(kind, spoilt)
    assert isinstance(event, Upserted | Deleted | Refused)
