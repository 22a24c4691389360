# SPDX-License-Identifier: Apache-2.0
"""``nodePortAddresses`` in all its forms, and where NodePorts answer by it."""

from __future__ import annotations

import pytest

from ebpflb.model import Family, NodePorts, format_address, parse_address
from ebpflb.planner.nodeports import node_ports

V4, V6, OTHER4, OTHER6 = "192.168.50.1", "fd50::1", "10.244.1.1", "fd00:244:1::1"
LOCAL = (
    *(V4, V6, OTHER4, OTHER6),
    *("127.0.0.1", "127.0.0.53", "::1", "169.254.20.10", "fe80::1", "ff02::1"),
)
ALL = {V4, V6, OTHER4, OTHER6}
ALL4, ALL6 = {V4, OTHER4}, {V6, OTHER6}


def chosen(
    selected: tuple[str, ...] | None,
    *,
    local: tuple[str, ...] = LOCAL,
    primary: tuple[str, ...] = (V4, V6),
    localhost: bool = True,
) -> NodePorts:
    return node_ports(
        selected,
        local=map(parse_address, local),
        primary=tuple(map(parse_address, primary)),
        localhost=localhost,
    )


def shown(found: NodePorts) -> tuple[set[str], str]:
    """The addresses, and the IP versions of the loopbacks that are served."""
    versions = "".join(str(family.value) for family in Family if family in found.loopback)
    return {format_address(address) for address in found.addresses}, versions


@pytest.mark.parametrize(
    ("selected", "addresses", "loopback"),
    [
        pytest.param(None, ALL, "46", id="NP-02 unset is every local address"),
        pytest.param((), ALL, "46", id="NP-02 an empty list is unset"),
        pytest.param(("192.168.50.0/24",), {V4} | ALL6, "6", id="NP-03 IPv6 stays open"),
        pytest.param(("fd50::/64",), {V6} | ALL4, "4", id="NP-03 IPv4 stays open"),
        pytest.param(("192.168.50.0/24", "fd50::/64"), {V4, V6}, "", id="NP-03 of both families"),
        pytest.param(
            ("192.168.50.0/24", "10.244.0.0/16", "fd50::/64"), {V4, OTHER4, V6}, "", id="TV-F14 (4)"
        ),
        pytest.param(("192.168.50.0/24", "0.0.0.0/0"), ALL, "46", id="NP-04 a /0 wins"),
        pytest.param(("0.0.0.0/0", "fd50::/64"), ALL4 | {V6}, "4", id="NP-04 in its family"),
        pytest.param(("192.168.50.1/16",), {V4} | ALL6, "6", id="host bits may be set"),
        pytest.param(("203.0.113.0/24", "::/0"), ALL6, "6", id="NP-05 nobody has one of these"),
        pytest.param(("primary",), {V4, V6}, "", id="NP-06 primary"),
        pytest.param(("localhost",), set(), "46", id="NP-06 localhost alone"),
        pytest.param(("all",), ALL, "46", id="NP-06 all"),
        pytest.param(("primary", "localhost"), {V4, V6}, "46", id="VER-08 two keywords"),
        pytest.param(("primary", "10.0.0.0/8"), {V4, OTHER4, V6}, "", id="VER-08 and a CIDR"),
        pytest.param(("all", "primary", "10.0.0.0/8"), ALL, "46", id="VER-08 all of them"),
        pytest.param(("127.0.0.0/8",), ALL6, "46", id="NP-07 loopback by its CIDR"),
        pytest.param(("127.0.0.53/32",), ALL6, "46", id="NP-07 by a part of it"),
        pytest.param(("64.0.0.0/2",), ALL6, "46", id="NP-07 inside another CIDR"),
        pytest.param(("::1/128", "192.168.50.0/24"), {V4}, "6", id="NP-08 ::1, which is ours"),
        pytest.param(("169.254.0.0/16", "fe80::/10"), set(), "", id="no link-local address"),
    ],
)
def test_which_local_addresses_are_selected(
    selected: tuple[str, ...] | None, addresses: set[str], loopback: str
) -> None:
    assert shown(chosen(selected)) == (addresses, loopback)


@pytest.mark.parametrize(
    ("selected", "addresses"),
    [
        pytest.param(None, ALL, id="TV-F14 (2) (6) unset"),
        pytest.param(("127.0.0.0/8",), ALL6, id="TV-F14 (3) NP-13 selected in vain"),
        pytest.param(("localhost",), set(), id="NP-13 by keyword in vain"),
        pytest.param(("all",), ALL, id="all"),
    ],
)
def test_without_localhost_node_ports_no_loopback_answers_np_07(
    selected: tuple[str, ...] | None, addresses: set[str]
) -> None:
    assert shown(chosen(selected, localhost=False)) == (addresses, "")


@pytest.mark.parametrize(
    ("primary", "addresses"),
    [
        pytest.param((V4,), {V4}, id="NP-06 a Node of one family closes the other"),
        pytest.param((V6,), {V6}, id="NP-06 or the other way round"),
        pytest.param((), set(), id="SYNC-10 a Node that is not known"),
        pytest.param(("203.0.113.7",), set(), id="NP-06 an address that no interface has"),
    ],
)
def test_primary_is_the_nodes_own(primary: tuple[str, ...], addresses: set[str]) -> None:
    assert shown(chosen(("primary",), primary=primary)) == (addresses, "")


def test_before_the_addresses_are_known_only_the_loopback_answers_b_89() -> None:
    assert shown(chosen(None, local=())) == (set(), "46")


def test_an_address_on_any_interface_answers_b_171() -> None:
    """A VRRP address as /32 on the loopback's device is the node's while it is there."""
    assert shown(chosen(None, local=("127.0.0.1", "192.168.50.99"))) == ({"192.168.50.99"}, "46")
