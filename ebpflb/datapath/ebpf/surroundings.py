# SPDX-License-Identifier: Apache-2.0
"""The kernel's settings that let packets through or eat them: looked at and named, never changed.

What they mean for us is said with each (L-48). This file must not know how devices are found.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from ebpflb.datapath.ebpf.devices import Device
from ebpflb.model import Family

_SYSCTLS: Final = Path("/proc/sys/net")
_STRICT: Final = 1


class Problem(NamedTuple):
    """``sysctl`` by its dotted name, and what it does to packets as it is."""

    sysctl: str
    effect: str


class Surroundings:
    """The sysctls of a network namespace; of the caller's own unless a test says otherwise."""

    def __init__(self, sysctls: Path = _SYSCTLS) -> None:
        self._sysctls = sysctls

    def problems(
        self,
        devices: Collection[Device],
        *,
        families: Collection[Family],
        defaults: Collection[int],
    ) -> Iterator[Problem]:
        """What eats packets of Services on a node with these devices.

        ``families`` are those with Services, ``defaults`` the devices with a default route.
        """
        if devices:
            for family, name in (
                (Family.IPV4, "ipv4/ip_forward"),
                (Family.IPV6, "ipv6/conf/all/forwarding"),
            ):
                if family in families and not self._read(name):
                    yield Problem(
                        _dotted(name),
                        "is 0: packets to backends in pods and on other nodes are dropped",
                    )
        if Family.IPV4 in families:
            yield from self._reverse_paths(devices, defaults)

    def _reverse_paths(
        self, devices: Collection[Device], defaults: Collection[int]
    ) -> Iterator[Problem]:
        """Answers to this node itself bear the Service's address when they are looked at (K8)."""
        of_all = self._read("ipv4/conf/all/rp_filter")
        for device in devices:
            name = f"ipv4/conf/{device.name}/rp_filter"
            of_it = self._read(name)
            if max(of_all, of_it) != _STRICT or device.number in defaults:
                continue
            lost = "answers to what this node itself sends past the socket programs (SCTP, raw)"
            if device.is_uplink:
                lost = f"clients' packets whose answers would not go out there, and {lost}"
            yield Problem(
                _dotted(name if of_it == _STRICT else "ipv4/conf/all/rp_filter"),
                f"is 1 (strict): {device.name} drops {lost}; 2 (loose) lets them in",
            )

    def bridges_pass_netfilter(self, family: Family) -> bool:
        """Whether netfilter sees what a bridge switches: not where its module is not loaded."""
        version = "ip" if family is Family.IPV4 else "ip6"
        return bool(self._read(f"bridge/bridge-nf-call-{version}tables"))

    def _read(self, name: str) -> int:
        """0 for one that is not there."""
        try:
            return int((self._sysctls / name).read_text())
        except (OSError, ValueError):
            return 0


def _dotted(name: str) -> str:
    """As sysctl(8) takes it: dots of a device's name are slashes there."""
    return "net." + name.replace(".", "\0").replace("/", ".").replace("\0", "/")
