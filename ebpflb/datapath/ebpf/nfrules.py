# SPDX-License-Identifier: Apache-2.0
"""Our rules for netfilter as text, in nft's language and in iptables'; how we know ours again.

Every rule bears a comment: ``ebpflb`` and a digest of what the rules say, so that neither rules of
another version nor of other marks pass for right, however a tool prints them. This file must not
know how rules get into the kernel, or which of them are there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

TABLE: Final = "ebpflb"
"""Our table's name in nft, in whichever family."""
CHAIN_PREFIX: Final = "EBPFLB-"
"""What our chains in iptables' tables begin with."""

_COMMENT = re.compile(r"ebpflb [0-9a-f]{8}")

_CNI_PREFIXES: Final = (
    "antrea",
    "azure-npm",
    "cali",
    "cilium",
    "kindnet",
    "kube-",
    "weave-npc",
)

BEFORE_FILTER: Final = -10
MANGLE: Final = -150
SOURCE_NAT: Final = 100


class Marks(NamedTuple):
    """One bit each of a packet's mark: to be masqueraded, to be refused."""

    masquerade: int
    reject: int


def is_ours(comment: str) -> bool:
    """Whether a rule's comment is one of ours, of any version."""
    return _COMMENT.fullmatch(comment) is not None


def decides_policy(name: str) -> bool:
    """Whether a table or chain of this name is a CNI's, or kube-proxy's.

    NetworkPolicies are decided there, of which an accept of ours must not make an exception:
    kube-proxy's has none either, since a CNI puts its own jump before it.
    """
    return name.lower().startswith(_CNI_PREFIXES)


def _commented(text: str) -> str:
    return f"ebpflb {hashlib.sha256(text.encode()).hexdigest()[:8]}"


# --- nft -----------------------------------------------------------------------------------------


class BaseChain(NamedTuple):
    """A chain of our table, with the one rule that it has."""

    name: str
    type: str
    hook: str
    priority: int
    rule: str


def nft_chains(marks: Marks, family: str) -> tuple[BaseChain, ...]:
    """Our table in the family ``inet``, or ``ip`` where the kernel has no IPv6.

    Rejects come before anybody's filter. The bits are cleared at mangle's place in OUTPUT, which is
    where the outer packet of a tunnel begins its way, with the mark of what is in it (K4).
    """
    clear = ~(marks.masquerade | marks.reject) & 0xFFFFFFFF
    both = marks.masquerade | marks.reject
    unreachable = "icmpx" if family == "inet" else "icmp"
    reject = f"{_has(marks.reject)} reject with {unreachable} type port-unreachable"
    return (
        BaseChain("input", "filter", "input", BEFORE_FILTER, reject),
        BaseChain("forward", "filter", "forward", BEFORE_FILTER, reject),
        BaseChain(
            "output",
            "filter",
            "output",
            MANGLE,
            f"meta mark & {both:#x} != 0 meta mark set meta mark & {clear:#x}",
        ),
        BaseChain(
            "postrouting",
            "nat",
            "postrouting",
            SOURCE_NAT,
            f"{_has(marks.masquerade)} masquerade fully-random",
        ),
    )


def _has(bit: int) -> str:
    return f"meta mark & {bit:#x} == {bit:#x}"


def nft_comment(marks: Marks, family: str) -> str:
    return _commented(repr(nft_chains(marks, family)))


def nft_table(marks: Marks, family: str) -> str:
    """A script that puts our table there in one transaction, in place of one that is there."""
    comment = nft_comment(marks, family)
    chains = "".join(
        f"\tchain {one.name} {{\n"
        f"\t\ttype {one.type} hook {one.hook} priority {one.priority}; policy accept;\n"
        f'\t\t{one.rule} comment "{comment}"\n'
        "\t}\n"
        for one in nft_chains(marks, family)
    )
    table = f"table {family} {TABLE}"
    return f"add {table}\ndelete {table}\n{table} {{\n{chains}}}\n"


ACCEPTS: Final = 2
"""How many rules ``nft_accepts`` inserts."""


def accept_comment(marks: Marks) -> str:
    return _commented(f"accept {marks.masquerade:#x}, established, related")


def nft_accepts(marks: Marks, *, family: str, table: str, chain: str) -> str:
    """A script in JSON, which quotes any name, that inserts our accepts at a chain's head."""
    marked = _match("==", {"&": [{"meta": {"key": "mark"}}, marks.masquerade]}, marks.masquerade)
    known = _match("in", {"ct": {"key": "state"}}, ["established", "related"])
    where = {"family": family, "table": table, "chain": chain, "comment": accept_comment(marks)}
    commands = [
        {"insert": {"rule": {**where, "expr": [match, {"accept": None}]}}}
        for match in (known, marked)  # each before the one inserted last
    ]
    return json.dumps({"nftables": commands})


def _match(operator: str, left: object, right: object) -> dict[str, object]:
    return {"match": {"op": operator, "left": left, "right": right}}


# --- iptables ------------------------------------------------------------------------------------


class Chain(NamedTuple):
    """A chain of ours in a table of iptables'; jumps to it stand in the chains ``parents``.

    ``rules`` are what follows ``-A NAME``. ``behind_policies``: after the jumps with which a CNI's
    NetworkPolicies begin the parent; else at its head.
    """

    table: str
    name: str
    parents: tuple[str, ...]
    rules: tuple[str, ...]
    behind_policies: bool = False

    @property
    def comment(self) -> str:
        return _commented(repr(self))

    def lines(self) -> Iterator[str]:
        """What fills it, for iptables-restore."""
        for rule in self.rules:
            match, _, target = rule.rpartition(" -j ")
            yield f'-A {self.name} {match} -m comment --comment "{self.comment}" -j {target}'

    def jump(self, parent: str, place: int) -> str:
        """What makes ``parent`` jump to it from that place on, counted from 1."""
        return f'-I {parent} {place} -m comment --comment "{self.comment}" -j {self.name}'


def accept_chain(marks: Marks) -> Chain:
    """The accepts for a FORWARD chain that can drop (MASQ-13, K3)."""
    return Chain(
        "filter",
        f"{CHAIN_PREFIX}ACCEPT",
        ("FORWARD",),
        (
            f"{_mark(marks.masquerade)} -j ACCEPT",
            "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT",
        ),
        behind_policies=True,
    )


def iptables_chains(marks: Marks, *, is_ipv6: bool) -> tuple[Chain, ...]:
    """All that our table does where there is no nft; without the accepts."""
    both = marks.masquerade | marks.reject
    icmp = "icmp6" if is_ipv6 else "icmp"
    return (
        Chain(
            "mangle",
            f"{CHAIN_PREFIX}OUTPUT",
            ("OUTPUT",),
            (f"-m mark ! --mark 0x0/{both:#x} -j MARK --set-xmark 0x0/{both:#x}",),
        ),
        Chain(
            "nat",
            f"{CHAIN_PREFIX}POSTROUTING",
            ("POSTROUTING",),
            (f"{_mark(marks.masquerade)} -j MASQUERADE --random-fully",),
        ),
        Chain(
            "filter",
            f"{CHAIN_PREFIX}REJECT",
            ("INPUT", "FORWARD"),
            (f"{_mark(marks.reject)} -j REJECT --reject-with {icmp}-port-unreachable",),
        ),
    )


def _mark(bit: int) -> str:
    return f"-m mark --mark {bit:#x}/{bit:#x}"
