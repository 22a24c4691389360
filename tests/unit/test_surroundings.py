# SPDX-License-Identifier: Apache-2.0
"""Sysctls that eat packets are named, with what they do; and nothing is said of those that do not.

The sysctls are files of a folder that each test writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.datapath.ebpf.devices import Device, Header
from ebpflb.datapath.ebpf.surroundings import Surroundings
from ebpflb.model import Family

Sysctls = Callable[..., Surroundings]
BOTH = frozenset(Family)
GOOD = {"ipv4/ip_forward": 1, "ipv6/conf/all/forwarding": 1}


def device(number: int, name: str, *, is_uplink: bool = False) -> Device:
    return Device(
        number,
        name,
        Header.ETHERNET,
        is_up=True,
        mac=bytes(6),
        is_uplink=is_uplink,
        is_bridged=False,
        is_told_pod=False,
    )


ETH0 = device(2, "eth0", is_uplink=True)
ETH1 = device(3, "eth1", is_uplink=True)
POD = device(4, "cali.1")


@pytest.fixture
def sysctls(tmp_path: Path) -> Sysctls:
    def write(values: dict[str, int]) -> Surroundings:
        for name, value in values.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
        return Surroundings(tmp_path)

    return write


def named(
    found: Surroundings,
    *devices: Device,
    families: frozenset[Family] = BOTH,
    defaults: frozenset[int] = frozenset({2}),
) -> list[str]:
    return [one.sysctl for one in found.problems(devices, families=families, defaults=defaults)]


@pytest.mark.parametrize(
    ("values", "families", "expected"),
    [
        pytest.param(GOOD, BOTH, [], id="forwarding is on"),
        pytest.param({}, BOTH, ["net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding"], id="off"),
        pytest.param({}, frozenset({Family.IPV6}), ["net.ipv6.conf.all.forwarding"], id="of IPv6"),
        pytest.param({}, frozenset(), [], id="of no family that has Services"),
    ],
)
def test_forwarding(
    sysctls: Sysctls, values: dict[str, int], families: frozenset[Family], expected: list[str]
) -> None:
    assert named(sysctls(values), ETH0, families=families) == expected


def test_without_devices_forwarding_does_not_matter(sysctls: Sysctls) -> None:
    assert named(sysctls({})) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param({"eth1": 1}, ["net.ipv4.conf.eth1.rp_filter"], id="of a second uplink"),
        pytest.param({"eth0": 1}, [], id="where the default route leads nothing is lost"),
        pytest.param({"cali.1": 1}, ["net.ipv4.conf.cali/1.rp_filter"], id="of a pod's device"),
        pytest.param({"all": 1}, ["net.ipv4.conf.all.rp_filter"] * 2, id="of all"),
        pytest.param({"all": 2, "eth1": 1}, [], id="loose for all wins"),
        pytest.param({"all": 1, "eth1": 2, "cali.1": 2}, [], id="loose for each wins"),
        pytest.param({"all": 0, "eth1": 0}, [], id="off"),
    ],
)
def test_reverse_path_filters(
    sysctls: Sysctls, values: dict[str, int], expected: list[str]
) -> None:
    """B-153"""
    filters = {f"ipv4/conf/{name}/rp_filter": value for name, value in values.items()}
    assert named(sysctls(GOOD | filters), ETH0, ETH1, POD) == expected


@pytest.mark.parametrize("value", [0, 1, None], ids=["off", "on", "no such module"])
@pytest.mark.parametrize("family", list(Family), ids=lambda one: one.name)
def test_whether_bridges_pass_netfilter(
    sysctls: Sysctls, family: Family, value: int | None
) -> None:
    """K10"""
    name = f"bridge/bridge-nf-call-{'ip' if family is Family.IPV4 else 'ip6'}tables"
    found = sysctls({} if value is None else {name: value})
    assert found.bridges_pass_netfilter(family) is (value == 1)
