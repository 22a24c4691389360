# SPDX-License-Identifier: Apache-2.0
"""This node, as far as a plan depends on it: made anew from the options and what was told last.

It must not know Services or endpoints.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ebpflb.model import (
    Address,
    Family,
    Network,
    Node,
    NodePorts,
    PodDetector,
    family_of,
    parse_address,
    parse_network,
    special_use,
    unspecified,
)
from ebpflb.planner.nodeports import node_ports
from ebpflb.planner.options import PlannerOptions


class Here(msgspec.Struct, frozen=True):
    """``addresses`` are the node's own, which its processes dial from (LB-07); sorted.
    ``named`` are all that the Node object and the bind address name.

    The others are as in ``model.Plan`` and ``model.Node``.
    """

    zone: str
    named: frozenset[Address]
    addresses: tuple[Address, ...]
    node_ports: NodePorts
    pods: PodDetector


def look(options: PlannerOptions, node: Node | None, local: frozenset[Address]) -> Here:
    """Put together what is known: ``node`` None is no Node object, ``local`` the interfaces'.

    The node's own addresses are those of the Node object and the bind address that an interface
    has: nothing is sent from an address that is only translated to (a cloud's external one). Where
    there is none such, all that its interfaces have.
    """
    known = node.addresses if node else ()
    bound = _bound(options)
    here = {one for one in local if not special_use(one)}
    own = ({*known, *bound} & here if here else {*known, *bound}) or here
    return Here(
        zone=node.zone if node else "",
        named=frozenset({*known, *bound}),
        addresses=tuple(sorted(own)),
        node_ports=node_ports(
            options.node_port_addresses,
            local=local,
            primary=_primary((*bound, *known)),
            localhost=options.localhost_node_ports,
        ),
        pods=_pods(options, node.pod_cidrs if node else ()),
    )


def _bound(options: PlannerOptions) -> tuple[Address, ...]:
    if not options.bind_address:
        return ()
    address = parse_address(options.bind_address)
    return () if address == unspecified(family_of(address)) else (address,)


def _primary(addresses: Iterable[Address]) -> tuple[Address, ...]:
    """The first address of each family (CFG-55)."""
    by_family: dict[Family, Address] = {}
    for address in addresses:
        by_family.setdefault(family_of(address), address)
    return tuple(by_family.values())


def _pods(options: PlannerOptions, pod_cidrs: Iterable[str]) -> PodDetector:
    """MASQ-09; by address a family's first range counts, and none is no detector (MASQ-10)."""
    if options.detect_local_mode == "BridgeInterface":
        return PodDetector(bridge=options.pod_bridge)
    if options.detect_local_mode == "InterfaceNamePrefix":
        return PodDetector(device_prefix=options.pod_device_prefix)
    by_node = options.detect_local_mode == "NodeCIDR"
    networks: dict[Family, Network] = {}
    for text in pod_cidrs if by_node else options.cluster_cidrs:
        try:
            network = parse_network(text)
        except ValueError:  # the Node's own: whoever wrote it meant no range of this family
            continue
        networks.setdefault(network.family, network)
    return PodDetector(networks=tuple(networks[family] for family in sorted(networks)))
