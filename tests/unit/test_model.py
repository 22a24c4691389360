# SPDX-License-Identifier: Apache-2.0
"""Addresses, families and printed names."""

from __future__ import annotations

import pytest

from ebpflb.model import (
    Family,
    Protocol,
    family_of,
    format_address,
    format_endpoint,
    is_canonical,
    parse_address,
    parse_network,
    special_use,
    unspecified,
)
from tests.builders import port_name, service_key


@pytest.mark.parametrize(
    ("text", "printed", "family"),
    [
        pytest.param("10.96.0.1", "10.96.0.1", Family.IPV4, id="a plain IPv4 address"),
        pytest.param("010.096.000.001", "10.96.0.1", Family.IPV4, id="FAM-09 zeros are decimal"),
        pytest.param("::ffff:10.96.0.1", "10.96.0.1", Family.IPV4, id="FAM-09 mapped is IPv4"),
        pytest.param("::FFFF:a60:1", "10.96.0.1", Family.IPV4, id="FAM-09 mapped in hex"),
        pytest.param("FD96:0::1", "fd96::1", Family.IPV6, id="B-101 unshortened upper case"),
        pytest.param("::1.2.3.4", "::102:304", Family.IPV6, id="an IPv4-compatible one is IPv6"),
    ],
)
def test_an_address_is_read_as_kubernetes_reads_it(text: str, printed: str, family: Family) -> None:
    address = parse_address(text)
    assert len(address) == 16
    assert (format_address(address), family_of(address)) == (printed, family)
    assert is_canonical(printed)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("10.96.0", id="three octets"),
        pytest.param("10.96.0.1.2", id="five octets"),
        pytest.param("10.96.0.256", id="an octet out of range"),
        pytest.param("10.96.0.-1", id="a negative octet"),
        pytest.param("10.96.0.0x1", id="a hexadecimal octet"),
        pytest.param("10.96.0.\u0661", id="a digit that is not ASCII"),
        pytest.param("10.96.0." + "0" * 5000 + "1", id="an octet of thousands of digits"),
        pytest.param(" 10.96.0.1", id="B-101 a blank before it"),
        pytest.param("fe80::1%eth0", id="B-101 a zone"),
        pytest.param("fd96:::1", id="a colon too many"),
        pytest.param("web.example", id="a host name"),
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the text says which
        parse_address(text)
    assert not is_canonical(text)


@pytest.mark.parametrize("text", ["010.96.0.1", "::ffff:10.96.0.1", "FD96::1", "fd96:0:0::1"])
def test_an_address_that_is_not_written_as_it_should_be_is_known(text: str) -> None:
    assert not is_canonical(text)


@pytest.mark.parametrize(
    ("text", "printed", "inside", "outside"),
    [
        pytest.param("10.0.0.0/8", "10.0.0.0/8", "10.255.0.1", "11.0.0.1", id="IPv4"),
        pytest.param(" 10.1.2.3/8\t", "10.0.0.0/8", "10.0.0.0", "9.255.255.255", id="FAM-04"),
        pytest.param("0.0.0.0/0", "0.0.0.0/0", "203.0.113.1", "::1", id="every IPv4 address"),
        pytest.param("::/0", "::/0", "fd00::1", "203.0.113.1", id="every IPv6 address"),
        pytest.param("::ffff:10.0.0.0/104", "10.0.0.0/8", "10.1.1.1", "fd00::1", id="mapped"),
        pytest.param("FD00::1/48", "fd00::/48", "fd00:0:0:f::1", "fd00:0:1::", id="IPv6"),
        pytest.param("192.0.2.1/32", "192.0.2.1/32", "192.0.2.1", "192.0.2.2", id="one address"),
    ],
)
def test_a_network_holds_addresses_of_its_family(
    text: str, printed: str, inside: str, outside: str
) -> None:
    network = parse_network(text)
    assert str(network) == printed
    assert parse_address(inside) in network
    assert parse_address(outside) not in network
    assert parse_network(printed) == network


@pytest.mark.parametrize(
    "text",
    [
        *("", "10.0.0.0", "10.0.0.0/", "10.0.0.0/33", "10.0.0.0/-1", "10.0.0.0/8/8", "10.0/8"),
        *("fd00::/129", "fe80::%eth0/64", "::ffff:10.0.0.0/8", "x/8", "10.0.0.0/\u0668"),
    ],
)
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the text says which
        parse_network(text)


@pytest.mark.parametrize(
    ("text", "use"),
    [
        ("127.0.0.1", "a loopback address"),
        ("::1", "a loopback address"),
        ("169.254.169.254", "a link-local address"),
        ("febf::1", "a link-local address"),
        ("239.1.1.1", "a multicast address"),
        ("ff02::1", "a multicast address"),
        ("0.0.0.0", "the unspecified address"),
        ("::", "the unspecified address"),
        ("192.0.2.1", ""),
        ("fec0::1", ""),
        ("0.0.0.1", ""),
        ("240.0.0.1", ""),
    ],
)
def test_addresses_that_are_no_single_nodes_or_services_sec_03(text: str, use: str) -> None:
    assert special_use(parse_address(text)) == use


def test_the_unspecified_addresses() -> None:
    assert [format_address(unspecified(family)) for family in Family] == ["0.0.0.0", "::"]


def test_an_ipv6_endpoint_prints_in_brackets() -> None:
    assert format_endpoint(parse_address("10.96.0.1"), 80) == "10.96.0.1:80"
    assert format_endpoint(parse_address("fd96::1"), 80) == "[fd96::1]:80"


@pytest.mark.parametrize(
    ("port", "printed"),
    [("http", "default/web:http"), ("", "default/web")],
    ids=["named", "unnamed"],
)
def test_a_service_port_prints_as_in_kube_proxy_port_01(port: str, printed: str) -> None:
    assert str(port_name(port=port)) == printed


def test_service_ports_sort_by_namespace_name_port_protocol_and_family() -> None:
    names = [
        port_name("a"),
        port_name("b", "x", protocol=Protocol.TCP),
        port_name("b", "x", protocol=Protocol.UDP, family=Family.IPV4),
        port_name("b", "x", protocol=Protocol.UDP, family=Family.IPV6),
        port_name("a", namespace="other"),
    ]
    shuffled = [names[i] for i in (3, 0, 4, 1, 2)]
    assert sorted(shuffled) == names


def test_families_are_labelled_with_kubernetes_words() -> None:
    assert [family.label for family in Family] == ["IPv4", "IPv6"]


def test_a_key_prints_as_a_person_would_name_it() -> None:
    assert str(service_key("web")) == "Service default/web"
