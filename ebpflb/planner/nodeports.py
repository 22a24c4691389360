# SPDX-License-Identifier: Apache-2.0
"""Where NodePorts answer: ``nodePortAddresses``, in all its forms, against the node's addresses.

One pure function, and its comment is the specification. It must not know Services.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from ebpflb.model import (
    Address,
    Family,
    Network,
    NodePorts,
    family_of,
    parse_network,
    special_use,
)

_LOOPBACK: Final = {
    Family.IPV4: parse_network("127.0.0.0/8"),
    Family.IPV6: parse_network("::1/128"),
}
_EVERYTHING: Final = {
    Family.IPV4: parse_network("0.0.0.0/0"),
    Family.IPV6: parse_network("::/0"),
}


def node_ports(
    selected: Iterable[str] | None,
    *,
    local: Iterable[Address],
    primary: Collection[Address],
    localhost: bool,
) -> NodePorts:
    """Choose among the ``local`` addresses of this node's interfaces.

    Each family is chosen for by itself (NP-03), by the entries of ``selected`` that are of it:

    * a CIDR takes the local addresses that are in it; /0 is every one, whatever stands beside it
      (NP-04);
    * ``primary`` takes the Node's ``primary`` address of the family, if an interface has it;
      it is an entry of both families, also where the Node has an address of one alone (NP-06);
    * ``localhost`` is 127.0.0.0/8 and ::1/128, ``all`` is both /0 (NP-06, VER-08).

    A family without an entry takes every local address, as both do where nothing is selected
    (NP-02, NP-03).

    Loopback, link-local, multicast and unspecified addresses never answer from everywhere: they are
    no single node's. Instead the loopback answers the node's own processes, if ``localhost`` is set
    and the family's selection meets its loopback network (NP-07; ::1 too, unlike NP-08); otherwise
    a selected loopback does nothing (NP-13).
    """
    entries = tuple(selected or ())
    mine = {address for address in local if not special_use(address)}
    addresses: set[Address] = set()
    loopback: set[Family] = set()
    for family in Family:
        networks = _networks(entries, family, primary)
        addresses |= {one for one in mine if any(one in network for network in networks)}
        if localhost and any(_meets(network, _LOOPBACK[family]) for network in networks):
            loopback.add(family)
    return NodePorts(frozenset(addresses), frozenset(loopback))


def _networks(
    entries: Iterable[str], family: Family, primary: Iterable[Address]
) -> Sequence[Network]:
    """What is selected of one family: all of it where no entry speaks of the family."""
    found: list[Network] = []
    is_spoken_of = False
    for entry in entries:
        if entry == "primary":
            networks = [Network(one, 128) for one in primary if family_of(one) is family]
        elif entry == "localhost":
            networks = [_LOOPBACK[family]]
        elif entry == "all":
            networks = [_EVERYTHING[family]]
        else:
            network = parse_network(entry)
            if network.family is not family:
                continue
            networks = [network]
        found += networks
        is_spoken_of = True
    return found if is_spoken_of else [_EVERYTHING[family]]


def _meets(one: Network, other: Network) -> bool:
    return one.address in other or other.address in one
