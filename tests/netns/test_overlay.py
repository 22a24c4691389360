# SPDX-License-Identifier: Apache-2.0
"""Pods that reach each other through VXLAN: what we mark must not mark the outer packets."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from pyroute2 import NFCTSocket
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple

from ebpflb.lab import Capture, Node
from ebpflb.lab.topology import VXLAN_DEVICE
from ebpflb.model import Family
from tests.netns.site import PATIENCE_S, SILENCE_S, Site, To, site
from tests.netns.world import Way

VXLAN_PORT = 8472
BULK = 4_000_000


@pytest.fixture(scope="module", params=["routed", "bridge"], ids=lambda one: f"pods {one}")
def place(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("overlay")
    with site(folder, lab={"overlay": "vxlan"}, nodes=2, pod_links=request.param) as one:
        one.backend("be1")
        one.backend("far", one.n2)
        one.n1.pod("k1", virtual=True)
        with one.running():
            yield one


@pytest.fixture(params=[True, False], ids=["with offloads", "without offloads"])
def offloads(place: Site, request: pytest.FixtureRequest) -> Iterator[bool]:
    """On or off on everything that a packet passes on the nodes and at both ends."""
    if request.param:
        yield True
        return
    devices = [(place.x, "eth0"), (place.pods("far")[0], "eth0"), (place.pods("k1")[0], "eth0")]
    devices += [(node, name) for node in place.nodes for name in ("eth0", VXLAN_DEVICE)]
    with contextlib.ExitStack() as stack:
        for where, device in devices:
            where.offload(on=False, device=device)
            stack.callback(where.offload, on=True, device=device)
        yield False


def outer_flows(capture: Capture) -> set[str]:
    """Where outer packets to the other node came from, address and port."""
    flows = capture.flows(direction="out", protocol="udp")
    return {flow["source"] for flow in flows if flow["destination"].endswith(f".2:{VXLAN_PORT}")}


@pytest.mark.parametrize("client", ["x", "k1"], ids=["from outside", "from a virtual pod"])
def test_a_backend_behind_the_tunnel_answers(
    place: Site, offloads: bool, client: str, family: Family, way: Way
) -> None:
    """NodePort, balancer and ClusterIP; whole transfers."""
    del offloads
    with place.serve("far") as service:
        for to in (To.NODE_PORT, To.BALANCER, To.CLUSTER_IP):
            dialled = service.address(way, family, to)
            size = BULK if way is Way.TCP else 5_000
            if family is Family.IPV6 and way is not Way.TCP:
                # Only the sender may cut it, who does not know of the tunnel: told by the first.
                way.ask(place.client(client), *dialled, size=size, timeout_s=SILENCE_S)
            outcome = way.ask(
                place.client(client), *dialled, 2, size=size, timeout_s=4 * PATIENCE_S
            )
            assert outcome.backends == {"far": 2}, (to, outcome)


def forget_outer_flows(node: Node) -> int:
    """Delete conntrack's entries of the tunnel's own packets; how many there were."""

    def act() -> int:
        deleted = 0
        with NFCTSocket() as conntrack:
            for entry in list(conntrack.dump()):
                tuple_orig = entry.get_attr("CTA_TUPLE_ORIG")
                protocol = tuple_orig.get_attr("CTA_TUPLE_PROTO")
                if protocol.get_attr("CTA_PROTO_NUM") != socket.IPPROTO_UDP:
                    continue
                if protocol.get_attr("CTA_PROTO_DST_PORT") == VXLAN_PORT:
                    conntrack.entry("del", tuple_orig=_tuple_of(tuple_orig))
                    deleted += 1
        return deleted

    return node.inside(act)


def _tuple_of(attributes: Any) -> Any:
    addresses = attributes.get_attr("CTA_TUPLE_IP")
    protocol = attributes.get_attr("CTA_TUPLE_PROTO")
    return NFCTAttrTuple(
        saddr=addresses.get_attr("CTA_IP_V4_SRC"),
        daddr=addresses.get_attr("CTA_IP_V4_DST"),
        proto=protocol.get_attr("CTA_PROTO_NUM"),
        sport=protocol.get_attr("CTA_PROTO_SRC_PORT"),
        dport=protocol.get_attr("CTA_PROTO_DST_PORT"),
    )


@pytest.mark.parametrize("way", [Way.TCP, Way.UDP], ids=lambda way: way.value)
def test_outer_packets_keep_their_port_when_conntrack_forgets_them(
    place: Site, family: Family, way: Way
) -> None:
    """K4: an entry made anew in the middle of a marked flow must not be source-NATed."""
    with place.serve("far") as service, place.n1.capture() as capture:
        host, port = service.address(way, family)
        loop = (
            place.x.hold_loop(host, port, interval_s=0.01)
            if way is Way.TCP
            else place.x.udp_loop(host, port, interval_s=0.01)
        )
        with loop:
            loop.wait_for(lambda one: one.good >= 20, timeout_s=30, what="it is in use")
            before = outer_flows(capture)
            assert before
            assert forget_outer_flows(place.n1) > 0
            good = loop.outcome().good
            loop.wait_for(lambda one: one.good >= good + 20, timeout_s=30, what="it goes on")
            assert loop.stop().failed == 0
        assert outer_flows(capture) == before
