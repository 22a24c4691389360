# SPDX-License-Identifier: Apache-2.0
"""The lab's address plan: which addresses nodes, pods, routers and outside clients have.

One plan for every test, the demo and the benchmarks, so that an address in a failing test's output
says who it is. Nodes are numbered from 1, pods of a node from 2 (1 is a bridge's own address).
Pure: text in, text out; it must know nothing of namespaces or interfaces.

    who                     IPv4                    IPv6
    node N                  192.168.50.N/24         fd50::N/64
    edge router, inside     192.168.50.254/24       fd50::fe/64
    edge router, outside    192.168.60.1/24         fd60::1/64
    outside client K        192.168.60.(8+K)/24     fd60::(8+K)/64      K from 1
    pods of node N          10.244.N.0/24           fd00:244:N::/64
    Services                10.96.0.0/16            fd96::/112          no route anywhere
"""

from typing import Final

__all__ = [
    "POD_GATEWAY_IPV4",
    "POD_GATEWAY_IPV6",
    "ROUTER_INSIDE_IPV4",
    "ROUTER_INSIDE_IPV6",
    "ROUTER_OUTSIDE_IPV4",
    "ROUTER_OUTSIDE_IPV6",
    "SERVICES_IPV4",
    "SERVICES_IPV6",
    "external_ipv4",
    "external_ipv6",
    "node_ipv4",
    "node_ipv6",
    "pod_ipv4",
    "pod_ipv6",
    "pods_ipv4",
    "pods_ipv6",
]

NODES_IPV4: Final = "192.168.50.0/24"
NODES_IPV6: Final = "fd50::/64"
ROUTER_INSIDE_IPV4: Final = "192.168.50.254"
ROUTER_INSIDE_IPV6: Final = "fd50::fe"

OUTSIDE_IPV4: Final = "192.168.60.0/24"
OUTSIDE_IPV6: Final = "fd60::/64"
ROUTER_OUTSIDE_IPV4: Final = "192.168.60.1"
ROUTER_OUTSIDE_IPV6: Final = "fd60::1"

SERVICES_IPV4: Final = "10.96.0.0/16"
SERVICES_IPV6: Final = "fd96::/112"

# Where a routed pod sends everything. No interface has the IPv4 one (a pod has a fixed neighbour
# entry), so that the node's end of the veth has no IPv4 address, as with Calico and AWS.
POD_GATEWAY_IPV4: Final = "169.254.1.1"
POD_GATEWAY_IPV6: Final = "fe80::1"

MAX_NODES: Final = 99
MAX_PODS: Final = 250


def node_ipv4(node: int) -> str:
    """Return the IPv4 address of node number `node`."""
    return f"192.168.50.{node}"


def node_ipv6(node: int) -> str:
    """Return the IPv6 address of node number `node`."""
    return f"fd50::{node:x}"


def pods_ipv4(node: int) -> str:
    """Return the IPv4 pod range of a node."""
    return f"10.244.{node}.0/24"


def pods_ipv6(node: int) -> str:
    """Return the IPv6 pod range of a node."""
    return f"fd00:244:{node:x}::/64"


def pod_ipv4(node: int, pod: int) -> str:
    """Return the IPv4 address of a node's pod; 1 is the bridge `cni0`, 0 the tunnel's end."""
    return f"10.244.{node}.{pod}"


def pod_ipv6(node: int, pod: int) -> str:
    """Return the IPv6 address of a node's pod; 1 is the bridge `cni0`, 0 the tunnel's end."""
    return f"fd00:244:{node:x}::{pod:x}" if pod else f"fd00:244:{node:x}::"


def external_ipv4(client: int) -> str:
    """Return the IPv4 address of outside client number `client`, counted from 1."""
    return f"192.168.60.{8 + client}"


def external_ipv6(client: int) -> str:
    """Return the IPv6 address of outside client number `client`, counted from 1."""
    return f"fd60::{8 + client:x}"
