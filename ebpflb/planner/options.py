# SPDX-License-Identifier: Apache-2.0
"""What the user has set that decides a plan.

Plain texts and truths, so that an agent can leave them in a map and ``ebpflb check`` can plan by
them. Whether they make sense was somebody else's to see.
"""

from __future__ import annotations

import msgspec


class PlannerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The settings by kube-proxy's names, with its defaults.

    ``node_port_addresses`` are CIDRs and the words primary, localhost and all (NP-06), None or
    empty where unset. ``external_ips`` are the CIDRs whose addresses a Service's externalIPs may
    capture, None for any; without ``allow_external_ips`` they capture none (VER-04).
    ``bind_address`` is the node's main address of its family, "" or an unspecified one to have the
    Node say it (CFG-55). Of ``cluster_cidrs`` (the pods', one of a family at most), ``pod_bridge``
    and ``pod_device_prefix`` the one counts that ``detect_local_mode`` asks for (MASQ-09).
    """

    node_name: str
    node_port_addresses: tuple[str, ...] | None = None
    localhost_node_ports: bool = True
    external_ips: tuple[str, ...] | None = None
    allow_external_ips: bool = True
    detect_local_mode: str = "ClusterCIDR"
    cluster_cidrs: tuple[str, ...] = ()
    pod_bridge: str = ""
    pod_device_prefix: str = ""
    masquerade_all: bool = False
    bind_address: str = ""
