# SPDX-License-Identifier: Apache-2.0
"""What the eBPF datapath can be told. Which flag says it is not known here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec


class EbpfOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``agent`` is left in `settings` for the commands: JSON values, some 4,000 bytes at most.

    ``show_service_tcp``: getpeername() of a TCP socket shows the Service. ``retval`` False makes
    the programs refuse as on kernels before 5.18; None asks the kernel. ``protect_nodeports``: no
    process of the node may bind a port at which a NodePort answers (NP-10: kube-proxy lets it).
    ``socket_lb``: whose connects are translated at the socket, "all", "host" (this node's own
    processes') or "off".

    Of the packet path: ``devices`` and ``pod_devices`` are shell patterns of uplinks and pods'
    devices, None where they are to be found out, empty for none; where both are empty there is no
    packet path. ``keep_client_local``: no source NAT to a backend on this node. The bits are of a
    packet's mark. A time-out counts where it is longer than netfilter's own. ``tcx`` False: attach
    as on kernels before 6.6.
    """

    pin_path: Path
    cgroup: Path
    map_sizes: Mapping[str, int] = {}
    show_service_tcp: bool = False
    retval: bool | None = None
    protect_nodeports: bool = False
    agent: Mapping[str, object] = {}
    socket_lb: str = "all"
    devices: tuple[str, ...] | None = None
    pod_devices: tuple[str, ...] | None = None
    ping: bool = True
    keep_client_local: bool = False
    masquerade_bit: int = 14
    reject_bit: int = 13
    tcp_timeout_s: float = 86_400.0
    tcp_closing_timeout_s: float = 3_600.0
    tcx: bool = True

    @property
    def has_packet_path(self) -> bool:
        return self.devices != () or self.pod_devices != ()
