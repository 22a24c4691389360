# SPDX-License-Identifier: Apache-2.0
"""Which devices get programs, and as what: tables of nodes as they are found."""

from __future__ import annotations

from typing import Any

import pytest

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.devices import Device, Header, Held, Link, Seen, Wanted, decide
from ebpflb.model import PodDetector, parse_address

ETHER, LOOPBACK, NONE, IPIP, INFINIBAND = 1, 772, 0xFFFE, 768, 32
NODE = frozenset({parse_address("192.168.50.1"), parse_address("fd50::1")})


class Build:
    """A node's devices, numbered as they are made; "lo" is the first."""

    def __init__(self) -> None:
        self._links: list[Link] = []
        self._addresses: list[Held] = []
        self._defaults: set[int] = set()
        self._hosts: set[int] = set()
        self.device("lo", type=LOOPBACK, addresses=["127.0.0.1"])

    def device(
        self,
        name: str,
        kind: str = "",
        *,
        addresses: list[str] | tuple[str, ...] = (),
        default: bool = False,
        host: bool = False,
        master: str = "",
        type: int = ETHER,  # noqa: A002 - the member's name
    ) -> Build:
        number = len(self._links) + 1
        above = next((one.number for one in self._links if one.name == master), 0)
        self._links.append(Link(number, name, kind, type, above, is_up=True, mac=bytes(6)))
        self._addresses += [
            Held(number, parse_address(text), not text.startswith(("127.", "fe80:", "169.254.")))
            for text in addresses
        ]
        if default:
            self._defaults.add(number)
        if host:
            self._hosts.add(number)
        return self

    def decide(self, **wanted: Any) -> dict[str, Device]:
        seen = Seen(
            frozenset(self._links),
            frozenset(self._addresses),
            frozenset(self._defaults),
            frozenset(self._hosts),
        )
        wanted.setdefault("node_addresses", NODE)
        return {one.name: one for one in decide(seen, Wanted(**wanted))}


def roles(found: dict[str, Device]) -> dict[str, str]:
    """In one word each."""
    return {
        name: "uplink" if one.is_uplink else "bridged" if one.is_bridged else "pod"
        for name, one in found.items()
    }


def plain() -> Build:
    """A node with an uplink and two routed pods."""
    return (
        Build()
        .device("eth0", addresses=["192.168.50.1", "fe80::1"], default=True)
        .device("cali1", "veth", addresses=["fe80::ecee"], host=True)
        .device("cali2", "veth", host=True)
    )


def flannel() -> Build:
    """Pods on a bridge, other nodes through VXLAN."""
    return (
        Build()
        .device("eth0", addresses=["192.168.50.1"], default=True)
        .device("flannel.1", "vxlan", addresses=["10.244.1.0"])
        .device("cni0", "bridge", addresses=["10.244.1.1"])
        .device("veth1", "veth", master="cni0")
        .device("tap1", "tun", master="cni0")
        .device("vx0", "vxlan", master="cni0")
    )


UPLINK_AND_PODS = {"eth0": "uplink", "cali1": "pod", "cali2": "pod"}
UPLINK_AND_BRIDGED = {"eth0": "uplink", "veth1": "bridged", "tap1": "bridged"}

NODES: dict[str, tuple[Build, dict[str, str]]] = {
    "routed pods": (plain(), UPLINK_AND_PODS),
    "pods on a bridge": (flannel(), UPLINK_AND_BRIDGED),
    "an uplink without a default route": (
        Build().device("eth0", addresses=["192.168.50.1"]),
        {"eth0": "uplink"},
    ),
    "a default route and no address of the Node's": (
        plain().device("eth1", addresses=["10.9.0.1"], default=True),
        {**UPLINK_AND_PODS, "eth1": "uplink"},
    ),
    "a second network that is none of the Node's": (
        plain().device("eth1", addresses=["10.9.0.1"]),
        UPLINK_AND_PODS,
    ),
    "a storage network with a route to one host": (
        plain().device("eth1", addresses=["10.9.0.1"], host=True),
        UPLINK_AND_PODS,
    ),
    "a pod's virtual function of a network card": (
        plain().device("rep0", host=True),
        {**UPLINK_AND_PODS, "rep0": "pod"},
    ),
    "the Node's address on a bridge over its network card": (
        Build()
        .device("br0", "bridge", addresses=["192.168.50.1"], default=True)
        .device("eth0", master="br0")
        .device("vnet0", "tun", master="br0"),
        {"br0": "uplink"},
    ),
    "the Node's address on a bond": (
        Build()
        .device("bond0", "bond", addresses=["192.168.50.1"], default=True)
        .device("eth0", master="bond0")
        .device("eth1", master="bond0"),
        {"bond0": "uplink"},
    ),
    "the Node's address on a VLAN": (
        Build()
        .device("eth0", default=False)
        .device("eth0.5", "vlan", addresses=["192.168.50.1"], default=True),
        {"eth0.5": "uplink"},
    ),
    "an address of the Node in IPv6 only": (
        Build().device("eth0", addresses=["fd50::1"]),
        {"eth0": "uplink"},
    ),
    "a pod that has the gateway's address on its veth": (
        plain().device("veth9", "veth", addresses=["10.244.1.1"], host=True),
        {**UPLINK_AND_PODS, "veth9": "pod"},
    ),
    "a tunnel with a route to its other end": (
        plain().device("wg0", "wireguard", addresses=["10.9.0.1"], host=True, type=NONE),
        UPLINK_AND_PODS,
    ),
    "addresses of Services on a dummy": (
        plain().device("kube-ipvs0", "dummy", addresses=["10.96.0.1"], host=True),
        UPLINK_AND_PODS,
    ),
    "a veth that leads nowhere": (plain().device("veth9", "veth"), UPLINK_AND_PODS),
    "a pod in a VRF": (
        plain().device("vrf1", "vrf").device("veth9", "veth", host=True, master="vrf1"),
        {**UPLINK_AND_PODS, "veth9": "pod"},
    ),
    "a default route through loopback": (
        Build().device("lo2", type=LOOPBACK, default=True),
        {},
    ),
}


@pytest.mark.parametrize("name", NODES)
def test_devices_are_found_out(name: str) -> None:
    node, expected = NODES[name]
    assert roles(node.decide()) == expected


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        pytest.param(
            flannel(), UPLINK_AND_BRIDGED, id="the bridge's and the tunnel's do not count"
        ),
        pytest.param(
            Build().device("eth0", addresses=["10.9.0.1"]).device("eth1", addresses=["10.8.0.1"]),
            {"eth0": "uplink", "eth1": "uplink"},
            id="every global one counts",
        ),
        pytest.param(
            Build().device("eth0", addresses=["169.254.0.1", "fe80::1"]),
            {},
            id="a local one does not",
        ),
        pytest.param(
            Build()
            .device("eth0", addresses=["10.9.0.1"])
            .device("veth1", "veth", addresses=["10.244.1.1"], host=True),
            {"eth0": "uplink", "veth1": "pod"},
            id="that of a pod's gateway does not",
        ),
    ],
)
def test_without_an_address_of_the_node(node: Build, expected: dict[str, str]) -> None:
    assert roles(node.decide(node_addresses=frozenset())) == expected


def test_an_address_of_the_node_that_no_device_has_is_as_none() -> None:
    elsewhere = frozenset({parse_address("203.0.113.1")})
    assert roles(plain().decide(node_addresses=elsewhere)) == UPLINK_AND_PODS


# --- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        pytest.param({"uplinks": (), "pods": ()}, {}, id="none"),
        pytest.param({"uplinks": ()}, {"cali1": "pod", "cali2": "pod"}, id="no uplinks"),
        pytest.param({"pods": ()}, {"eth0": "uplink"}, id="no pods"),
        pytest.param({"pods": ("cali2",)}, {"eth0": "uplink", "cali2": "pod"}, id="a name"),
        pytest.param({"uplinks": ("e*", "x*")}, UPLINK_AND_PODS, id="several patterns"),
        pytest.param(
            {"uplinks": ("cali?",), "pods": ("*",)},
            {"eth0": "pod", "cali1": "uplink", "cali2": "uplink"},
            id="what is both is an uplink",
        ),
        pytest.param(
            {"uplinks": ("*",)},
            {"eth0": "uplink", "cali1": "uplink", "cali2": "uplink"},
            id="all but loopback",
        ),
        pytest.param({"uplinks": ("ETH0",), "pods": ()}, {}, id="in their own case"),
    ],
)
def test_patterns_take_the_place_of_finding_out(
    wanted: dict[str, Any], expected: dict[str, str]
) -> None:
    assert roles(plain().decide(**wanted)) == expected


def test_a_pods_device_by_pattern_is_bridged_where_it_is() -> None:
    found = flannel().decide(pods=("v*", "flannel*"))
    assert roles(found) == {
        "eth0": "uplink",
        "flannel.1": "pod",
        "veth1": "bridged",
        "vx0": "bridged",
    }


# --- what they are to the programs ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("detector", "expected"),
    [
        pytest.param(PodDetector(), set(), id="by nothing"),
        pytest.param(PodDetector(bridge="cni0"), {"veth1", "tap1"}, id="the bridge's ports"),
        pytest.param(PodDetector(bridge="cni1"), set(), id="not another bridge's"),
        pytest.param(PodDetector(bridge="cali1"), {"cali1"}, id="the device itself"),
        pytest.param(PodDetector(device_prefix="cali"), {"cali1"}, id="a prefix"),
        pytest.param(
            PodDetector(device_prefix="cni"), {"veth1", "tap1"}, id="a prefix of the bridge's name"
        ),
        pytest.param(
            PodDetector(device_prefix="veth"), set(), id="not a bridged port's, netfilter sees none"
        ),
    ],
)
def test_local_pods_by_their_device(detector: PodDetector, expected: set[str]) -> None:
    """MASQ-09"""
    found = flannel().device("cali1", "veth", host=True).decide(detector=detector)
    assert {name for name, one in found.items() if one.is_told_pod} == expected


def test_roles_are_those_of_the_map() -> None:
    found = flannel().decide(detector=PodDetector(bridge="cni0"))
    names = abi.names_of("DEVICE_")
    assert {names[one] for one in found["eth0"].roles} == {"uplink"}
    assert {names[one] for one in found["veth1"].roles} == {"bridged", "pod"}
    assert plain().decide()["cali1"].roles == frozenset()


@pytest.mark.parametrize(
    ("type_", "header"),
    [
        (ETHER, Header.ETHERNET),
        (NONE, Header.NONE),
        (IPIP, Header.NONE),
        (INFINIBAND, Header.OTHER),
    ],
)
def test_what_a_packet_begins_with(type_: int, header: Header) -> None:
    found = Build().device("dev0", addresses=["192.168.50.1"], type=type_).decide()
    assert found["dev0"].header is header
