"""Traffic policies: which backends a client gets, by who it is and what it dials (POL, NOEP)."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from ebpflb.model import FrontendKind, PodDetector, Policy, Protocol
from tests.bpf.node import PacketNode, Service
from tests.bpf.packets import End, Net
from tests.bpf.talks import MAKES, clients, talks_to

EXTERNAL = (FrontendKind.NODE_PORT, FrontendKind.EXTERNAL_IP, FrontendKind.LOAD_BALANCER)
PROTOCOLS = (Protocol.TCP, Protocol.UDP)

by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)
by_external_kind = pytest.mark.parametrize("kind", EXTERNAL, ids=lambda kind: kind.value)


def reached(
    node: PacketNode, service: Service, frontend: End, client: End, *, on: str = "uplink"
) -> set[End]:
    """Every backend that a client gets: those beyond ``service.backends`` are not expected.

    16 connections miss one of two backends once in 32,768 times.
    """
    make = MAKES[service.protocol]
    found = set()
    for end in islice(clients(client), 16):
        packet = make(end, frontend, "S")
        out = node.sends_own(packet) if on == "own" else node.receives(packet, on)
        assert out.target != frontend, out
        found.add(out.target)
    return found


@by_protocol
@by_external_kind
def test_from_outside_external_traffic_policy_local_is_served_by_this_node(
    node: PacketNode, net: Net, kind: FrontendKind, protocol: Protocol
) -> None:
    """POL-03, POL-08."""
    web = Service(
        net,
        protocol,
        local=net.local[:1],
        remote=net.remote[:1],
        external_policy=Policy.LOCAL,
    )
    node.serve(web)
    assert reached(node, web, web.frontend(kind), net.client) == set(web.local)


@by_external_kind
@pytest.mark.parametrize("has_local", [True, False], ids=["with", "without"])
def test_from_a_pod_external_traffic_policy_local_is_served_by_every_node(
    node: PacketNode, net: Net, kind: FrontendKind, has_local: bool
) -> None:
    """POL-04, POL-06, NOEP-06, B-143: with and without a backend on this node."""
    web = Service(
        net,
        local=net.local[:1] if has_local else (),
        remote=net.remote[:1],
        external_policy=Policy.LOCAL,
    )
    node.serve(web)
    assert reached(node, web, web.frontend(kind), net.pod, on="pod") == set(web.backends)


@pytest.mark.parametrize("kind", EXTERNAL[1:], ids=lambda kind: kind.value)
@pytest.mark.parametrize("has_local", [True, False], ids=["with", "without"])
def test_from_the_node_itself_external_traffic_policy_local_is_served_by_every_node(
    node: PacketNode, net: Net, kind: FrontendKind, has_local: bool
) -> None:
    """POL-05, NOEP-06."""
    web = Service(
        net,
        local=net.local[:1] if has_local else (),
        remote=net.remote[:1],
        external_policy=Policy.LOCAL,
    )
    node.serve(web)
    assert reached(node, web, web.frontend(kind), net.node, on="own") == set(web.backends)


def test_where_nobody_can_tell_pods_they_count_as_outside(node: PacketNode, net: Net) -> None:
    """POL-06: no detector."""
    web = Service(net, local=net.local[:1], remote=net.remote[:1], external_policy=Policy.LOCAL)
    node.serve(web)
    node.plans(pods=PodDetector())
    assert reached(node, web, web.node_port, net.pod, on="pod") == set(web.local)


def test_a_pod_is_told_by_its_device_where_the_detector_goes_by_that(
    node: PacketNode, net: Net
) -> None:
    """MASQ-09: BridgeInterface, InterfaceNamePrefix; the address says nothing."""
    web = Service(net, local=net.local[:1], remote=net.remote[:1], external_policy=Policy.LOCAL)
    node.serve(web)
    node.plans(pods=PodDetector(device_prefix="veth"))
    node.has_role("pod", "POD")
    assert reached(node, web, web.node_port, net.client, on="pod") == set(web.backends)
    assert reached(node, web, web.node_port, net.pod, on="pod2") == set(web.local)


def test_a_pods_address_from_another_family_or_network_is_not_a_pods(
    node: PacketNode, net: Net
) -> None:
    web = Service(net, local=net.local[:1], remote=net.remote[:1], external_policy=Policy.LOCAL)
    node.serve(web)
    outside = net.pod_number(1, 2, 40000).address
    outside = outside.replace("10.244.", "10.245.").replace("fd00:244:", "fd00:245:")
    assert reached(node, web, web.node_port, End(outside, 40000), on="pod") == set(web.local)


def test_internal_traffic_policy_local_is_served_by_this_node(node: PacketNode, net: Net) -> None:
    """POL-01, POL-11: whoever dials."""
    web = Service(net, local=net.local[:1], remote=net.remote[:1], internal_policy=Policy.LOCAL)
    node.serve(web)
    assert reached(node, web, web.cluster_ip, net.client) == set(web.local)
    assert reached(node, web, web.cluster_ip, net.pod, on="pod") == set(web.local)
    assert reached(node, web, web.cluster_ip, net.node, on="own") == set(web.local)


def test_each_policy_is_for_its_own_frontends(node: PacketNode, net: Net) -> None:
    """POL-07."""
    inner = Service(net, local=net.local[:1], remote=net.remote[:1], internal_policy=Policy.LOCAL)
    outer = replace(inner, number=1, internal_policy=Policy.CLUSTER, external_policy=Policy.LOCAL)
    node.serve(inner, outer)
    for kind in EXTERNAL:
        assert reached(node, inner, inner.frontend(kind), net.client) == set(inner.backends)
    assert reached(node, outer, outer.cluster_ip, net.client) == set(outer.backends)


# --- none that the policy allows ---------------------------------------------------------------


@by_protocol
@by_external_kind
def test_from_outside_without_a_backend_here_a_packet_is_dropped(
    node: PacketNode, net: Net, kind: FrontendKind, protocol: Protocol
) -> None:
    """NOEP-05: silently."""
    web = Service(net, protocol, remote=net.remote, external_policy=Policy.LOCAL)
    node.serve(web)
    out = node.receives(MAKES[protocol](net.client, web.frontend(kind), "S"))
    assert out.dropped
    assert node.counted("DROPPED_POLICY") == 1
    assert not node.flows()


@by_protocol
def test_a_clusterip_without_a_backend_here_is_dropped_under_internal_traffic_policy_local(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """NOEP-04: whoever dials; what leaves the node itself is dropped where it leaves (K16)."""
    web = Service(net, protocol, remote=net.remote, internal_policy=Policy.LOCAL)
    node.serve(web)
    make = MAKES[protocol]
    assert node.receives(make(net.pod, web.cluster_ip, "S"), "pod").dropped
    assert node.receives(make(net.client, web.cluster_ip, "S")).dropped
    assert node.sends_own(make(net.node, web.cluster_ip, "S")).dropped
    assert node.counted("DROPPED_POLICY") == 3


def test_an_open_flow_outlives_its_policys_last_backend(node: PacketNode, net: Net) -> None:
    """NOEP-11: only what is new is dropped."""
    web = Service(net, local=net.local[:1], external_policy=Policy.LOCAL)
    node.serve(web)
    talk = talks_to(node, web)
    talk.opens()
    node.serve(replace(web, local=(), remote=net.remote, draining=net.local[:1]))
    assert talk.lives()
    assert talks_to(node, web, net.stranger).says("S").dropped
    assert talk.lives()


def test_terminating_backends_serve_open_flows_and_get_no_new_ones(
    node: PacketNode, net: Net
) -> None:
    web = Service(net, local=net.local[:1])
    node.serve(web)
    talk = talks_to(node, web)
    talk.opens()
    node.serve(replace(web, local=(), remote=net.remote[:1], draining=net.local[:1]))
    assert talk.lives()
    assert reached(node, web, web.node_port, net.stranger) == {net.remote[0]}
