"""Source NAT as kube-proxy's TestInternalExternalMasquerade has it (TV-M), as far as tc decides.

tc marks and netfilter acts on the mark; what the node itself sends is redirected with the address
that the node chose, which is what source NAT would come to. TV-M05 and TV-M06 (the node's own
NodePorts) never leave by a device.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import pytest

from ebpflb.model import FrontendKind, PodDetector, Policy, Protocol
from tests.bpf.node import MASQUERADE, Out, PacketNode, Service
from tests.bpf.packets import End, Net, tcp
from tests.bpf.talks import MAKES, Talk, clients, talks_to

PROTOCOLS = (Protocol.TCP, Protocol.UDP)

by_protocol = pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda one: one.name)

# B: both backends, L: the local one; m: masqueraded, -: not. For the three Services in turn:
# both policies Cluster, externalTrafficPolicy Local, internalTrafficPolicy Local.
BASE = """
    TV-M01  pod       ClusterIP     B -   B -   L -
    TV-M02  pod       NodePort      B m   B -   B m
    TV-M03  pod       LoadBalancer  B m   B -   B m
    TV-M04  node      ClusterIP     B m   B m   L m
    TV-M07  node      LoadBalancer  B m   B m   B m
    TV-M08  external  ClusterIP     B m   B m   L m
    TV-M09  external  NodePort      B m   L -   B m
    TV-M10  external  LoadBalancer  B m   L -   B m
"""
NO_DETECTOR = """
    TV-M04  node      ClusterIP     B -   B -   L -
    TV-M08  external  ClusterIP     B -   B -   L -
    TV-M02  pod       NodePort      B m   L -   B m
    TV-M03  pod       LoadBalancer  B m   L -   B m
"""
MASQUERADE_ALL = """
    TV-M01  pod       ClusterIP     B m   B m   L m
"""
NO_DETECTOR_MASQUERADE_ALL = """
    TV-M01  pod       ClusterIP     B m   B m   L m
    TV-M02  pod       NodePort      B m   L -   B m
    TV-M03  pod       LoadBalancer  B m   L -   B m
"""
SERVICES = ("Cluster", "external Local", "internal Local")


class Row(NamedTuple):
    """One cell of the matrix."""

    name: str
    configuration: str
    client: str
    kind: FrontendKind
    service: int
    backends: str
    masqueraded: bool

    def __str__(self) -> str:
        where = "both" if self.backends == "B" else "local"
        how = "masqueraded" if self.masqueraded else "seen"
        return (
            f"{self.name} {self.configuration}: {self.client} to {self.kind.value} of "
            f"{SERVICES[self.service]}: {where}, {how}"
        )


def _rows(configuration: str, changes: str) -> list[Row]:
    cells = {}
    for line in (BASE + changes).split("\n"):
        if not line.strip():
            continue
        name, client, kind, *pairs = line.split()
        for service in range(3):
            backends, mark = pairs[2 * service : 2 * service + 2]
            cells[name, service] = Row(
                name, configuration, client, FrontendKind(kind), service, backends, mark == "m"
            )
    return list(cells.values())


ROWS = [
    *_rows("detector", ""),
    *_rows("no detector (TV-M20)", NO_DETECTOR),
    *_rows("masqueradeAll (TV-M21)", MASQUERADE_ALL),
    *_rows("no detector, masqueradeAll (TV-M22)", NO_DETECTOR_MASQUERADE_ALL),
]


def _services(net: Net) -> tuple[Service, ...]:
    one = Service(net, local=net.local[:1], remote=net.remote[:1])
    return (
        one,
        replace(one, number=1, external_policy=Policy.LOCAL),
        replace(one, number=2, internal_policy=Policy.LOCAL),
    )


def _dial(node: PacketNode, client: str, end: End, frontend: End) -> Out:
    syn = tcp(end, frontend)
    if client == "node":
        return node.sends_own(syn)
    return node.receives(syn, "pod" if client == "pod" else "uplink")


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_masquerade_matrix(node: PacketNode, net: Net, row: Row) -> None:
    services = _services(net)
    node.serve(*services)
    node.plans(masquerade_all="masqueradeAll" in row.configuration)
    if "no detector" in row.configuration:
        node.plans(pods=PodDetector())
    service = services[row.service]
    client = {"pod": net.pod, "node": net.node, "external": net.client}[row.client]

    wanted = set(service.local if row.backends == "L" else service.backends)
    reached = set()
    # As many as are needed; where it must be the local one, 12 miss the other 1 time in 4,096.
    for end in islice(clients(client), 64 if row.backends == "B" else 12):
        out = _dial(node, row.client, end, service.frontend(row.kind))
        reached.add(out.target)
        if row.client == "node":
            assert out.redirected
        else:
            assert out.passed
            assert out.mark == (MASQUERADE if row.masqueraded else 0), out
        assert out.source == end
        if row.backends == "B" and reached == wanted:
            break
    assert reached == wanted


@by_protocol
def test_every_packet_of_a_masqueraded_flow_bears_the_mark_and_no_answer_does(
    node: PacketNode, net: Net, protocol: Protocol
) -> None:
    """K4: netfilter may have forgotten the flow at any packet."""
    web = Service(net, protocol, remote=net.remote[:1])
    node.serve(web)
    talk = talks_to(node, web)
    assert talk.says("S").mark == MASQUERADE
    assert talk.answers("SA").mark == 0
    for _ in range(3):
        assert talk.says("A").mark == MASQUERADE
        node.later(1)
        assert talk.answers("A").mark == 0


def test_other_marks_are_left_as_they_are(node: PacketNode, net: Net) -> None:
    """MASQ-07, L-34."""
    web = Service(net, remote=net.remote[:1])
    node.serve(web)
    others = 0xFFFFFFFF & ~MASQUERADE
    talk = talks_to(node, web)
    assert talk.says("S", mark=others).mark == others | MASQUERADE
    assert talk.answers("SA", mark=others).mark == others
    assert talk.says("A", mark=0x1).mark == MASQUERADE | 0x1


def test_another_bit_may_be_chosen_for_the_mark(node: PacketNode, net: Net) -> None:
    """MASQ-07: masqueradeBit."""
    web = Service(net, remote=net.remote[:1])
    node.serve(web)
    node.settings(masquerade_mark=1 << 31)
    assert node.receives(tcp(net.client, web.node_port)).mark == 1 << 31


@by_protocol
@pytest.mark.parametrize("kind", list(FrontendKind), ids=lambda kind: kind.value)
@pytest.mark.parametrize("policy", list(Policy), ids=lambda policy: policy.value)
def test_a_backend_that_dials_its_own_service_is_masqueraded(
    node: PacketNode, net: Net, kind: FrontendKind, policy: Policy, protocol: Protocol
) -> None:
    """MASQ-06, POL-13: in every mode and policy, or it would hear from itself."""
    pod = net.local[0]
    web = Service(net, protocol, local=(pod,), internal_policy=policy, external_policy=policy)
    node.serve(web)
    node.state("SEES_PODS", "SEES_HOST", "KEEP_CLIENT")
    talk = Talk(node, pod.at(40000), web.frontend(kind), MAKES[protocol], on="pod")
    assert talk.says("S").mark == MASQUERADE
    assert talk.says("S").mark == MASQUERADE
    assert talk.is_home(talk.answers("SA"))


def test_another_backend_of_the_service_is_no_hairpin(node: PacketNode, net: Net) -> None:
    web = Service(net, local=net.local)
    node.serve(web)
    own = net.local[0]
    marks: dict[End, set[int]] = {}
    for end in islice(clients(own), 40):
        out = node.receives(tcp(end, web.cluster_ip), "pod")
        marks.setdefault(out.target, set()).add(out.mark)
    assert marks == {net.local[0]: {MASQUERADE}, net.local[1]: {0}}


def test_the_clients_address_may_be_kept_where_the_backend_is_here(
    node: PacketNode, net: Net
) -> None:
    """An option of ours, for externalTrafficPolicy Cluster."""
    web = Service(net, local=net.local[:1], remote=net.remote[:1])
    node.serve(web)
    node.state("SEES_PODS", "SEES_HOST", "KEEP_CLIENT")
    marks: dict[End, set[int]] = {}
    for end in islice(clients(net.client), 40):
        out = node.receives(tcp(end, web.node_port))
        marks.setdefault(out.target, set()).add(out.mark)
    assert marks == {net.local[0]: {0}, net.remote[0]: {MASQUERADE}}


@pytest.mark.parametrize("where", ["here", "on the other node"])
def test_where_netfilter_does_not_see_the_bridge_its_pods_are_masqueraded(
    node: PacketNode, net: Net, where: str
) -> None:
    """K10: the answer of a pod on the same bridge would be switched past netfilter."""
    web = Service(net, local=net.local[:1])
    if where != "here":
        web = Service(net, remote=net.local[:1])
    node.serve(web)
    node.has_role("bridged", "BRIDGED")
    mine = {"IPv4": "MASQUERADE_BRIDGED4", "IPv6": "MASQUERADE_BRIDGED6"}[net.family.label]
    others = {"IPv4": "MASQUERADE_BRIDGED6", "IPv6": "MASQUERADE_BRIDGED4"}[net.family.label]

    def marks(device: str, first: int) -> set[int]:
        return {
            node.receives(tcp(end, web.cluster_ip), device).mark
            for end in islice(clients(net.pod, first), 3)
        }

    assert marks("bridged", 41000) == {0}
    node.state("SEES_PODS", "SEES_HOST", others)
    assert marks("bridged", 42000) == {0}
    node.state("SEES_PODS", "SEES_HOST", mine)
    assert marks("bridged", 43000) == {MASQUERADE if where == "here" else 0}
    assert marks("pod", 44000) == {0}


def test_a_flow_keeps_what_was_decided_for_it(node: PacketNode, net: Net) -> None:
    """POL-10: a switched policy is for new flows."""
    web = Service(net, local=net.local[:1])
    node.serve(web)
    old = talks_to(node, web)
    old.opens()
    node.serve(replace(web, external_policy=Policy.LOCAL))
    assert old.says("A").mark == MASQUERADE
    assert talks_to(node, web, net.stranger).says("S").mark == 0
