# SPDX-License-Identifier: Apache-2.0
"""iptables in its two back ends: which is there, what its tables hold, what would make them right.

Reading a table by the legacy tools makes it, so only those are read that are there. What iptables
prints is compared by our rules' comments, not by its words. This file must not know nft, or what
our rules are for.
"""

from __future__ import annotations

import enum
import itertools
import os
import shlex
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ebpflb.datapath.ebpf.nfrules import CHAIN_PREFIX, Chain, decides_policy
from ebpflb.errors import DatapathError
from ebpflb.model import Family

_TOOL_TIMEOUT_S: Final = 30.0
_LOCK_WAIT_S: Final = 5
"""How long a restore waits for another tool that holds the lock of the legacy tables."""

_SYSTEM_FOLDERS: Final = ("/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin")
_NAMES: Final[Mapping[Family, tuple[str, str]]] = {
    Family.IPV4: ("iptables", "ip_tables_names"),
    Family.IPV6: ("ip6tables", "ip6_tables_names"),
}
TABLES: Final = ("mangle", "nat", "filter")
"""Those in which there can be anything of ours."""


class BackEnd(enum.Enum):
    """Where iptables keeps its rules."""

    NFT = "nft"
    LEGACY = "legacy"


class Table(NamedTuple):
    """A table as iptables-save prints it: a chain's policy ("-": not built in) and its rules."""

    policies: Mapping[str, str]
    rules: Mapping[str, tuple[str, ...]]


class Tools(NamedTuple):
    """The paths of iptables-save and iptables-restore of one back end and family."""

    back_end: BackEnd
    family: Family
    save: str
    restore: str

    def __str__(self) -> str:
        return f"{_NAMES[self.family][0]}-{self.back_end.value}"

    def read(self, tables: Collection[str]) -> dict[str, Table]:
        """Those of ``tables``, which exist; without those that it cannot read. DatapathError."""
        found: dict[str, Table] = {}
        for name in sorted(tables):
            found |= parse(run([self.save, "-t", name], str(self)))
        return found

    def write(self, text: str) -> None:
        """Each table in one transaction, without what is not named in it. Raises DatapathError."""
        run([self.restore, "--noflush", "-w", str(_LOCK_WAIT_S)], str(self), text=text)


# --- tools ---------------------------------------------------------------------------------------


def find_tool(name: str) -> str:
    """Its path, "" where there is none; also where PATH lacks the administrator's folders."""
    path = os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM_FOLDERS])
    return shutil.which(name, path=path) or ""


def find(back_end: BackEnd, family: Family) -> Tools | None:
    """None where a tool is not installed. Plain ``iptables`` is one of the two, and says which."""
    tool = _NAMES[family][0]
    for prefix in (f"{tool}-{back_end.value}", tool):
        save, restore = find_tool(f"{prefix}-save"), find_tool(f"{prefix}-restore")
        if save and restore and (prefix != tool or _back_end_of(restore) is back_end):
            return Tools(back_end, family, save, restore)
    return None


def _back_end_of(restore: str) -> BackEnd:
    """Versions before 1.8 do not say, and are legacy."""
    is_nft = "nf_tables" in run([restore, "--version"], restore)
    return BackEnd.NFT if is_nft else BackEnd.LEGACY


def run(command: Sequence[str], name: str, *, text: str = "") -> str:
    """What a tool prints. It runs in the network namespace of the calling thread.

    Raises DatapathError with what it complains of.
    """
    try:
        ran = subprocess.run(
            command,
            check=False,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_TIMEOUT_S,
            env={**os.environ, "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise DatapathError("run", name, hint=f"no end after {_TOOL_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise DatapathError("run", name, error.errno or 0) from None
    if ran.returncode:
        raise DatapathError("run", name, hint=complaint(ran.stderr) or f"exit {ran.returncode}")
    return ran.stdout


def complaint(stderr: str) -> str:
    """A tool's first complaint, and for nft the line that it is about, in one line."""
    lines = [line.strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith("# Warning")]
    for at, line in enumerate(lines):
        if "Error: " in line:
            return ": ".join([line.partition("Error: ")[2], *lines[at + 1 : at + 2]])
    return "; ".join(lines[:2])


# --- what there is -------------------------------------------------------------------------------


def legacy_tables(family: Family) -> frozenset[str]:
    """The legacy tables that this network namespace has, by what the kernel lists."""
    listed = Path("/proc/thread-self/net", _NAMES[family][1])
    try:
        return frozenset(listed.read_text().split())
    except OSError:
        return frozenset()


def parse(text: str) -> dict[str, Table]:
    """What iptables-save printed, by table. Counters and remarks are left out."""
    found: dict[str, Table] = {}
    name = ""
    policies: dict[str, str] = {}
    rules: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            policies, rules = {}, {}
            name = line[1:].strip()
        elif line.startswith(":"):
            chain, policy, *_ = line[1:].split()
            policies[chain], rules[chain] = policy, []
        elif line.startswith("-A "):
            rules.setdefault(line.split(maxsplit=2)[1], []).append(line)
        elif line == "COMMIT":
            found[name] = Table(policies, {chain: tuple(all_) for chain, all_ in rules.items()})
    return found


def _words(rule: str) -> list[str]:
    try:
        return shlex.split(rule)
    except ValueError:  # a comment that somebody quoted in his own way
        return rule.split()


def target(rule: str) -> str:
    """Where a rule sends a packet, "" for nowhere."""
    words = _words(rule)
    return next((to for flag, to in itertools.pairwise(words) if flag in _TO), "")


_TO: Final = frozenset({"-j", "-g", "--jump", "--goto"})


def _comment(rule: str) -> str:
    words = _words(rule)
    return next((to for flag, to in itertools.pairwise(words) if flag == "--comment"), "")


def _is_our_jump(rule: str) -> bool:
    return CHAIN_PREFIX in rule and target(rule).startswith(CHAIN_PREFIX)


def can_drop(table: Table, chain: str) -> bool:
    """Whether a built-in chain has a policy, or any rule of others, that may drop."""
    others = (rule for rule in table.rules.get(chain, ()) if not _is_our_jump(rule))
    return table.policies.get(chain) == "DROP" or any(others)


def size(tables: Mapping[str, Table]) -> int:
    """How many rules and chains of others there are."""
    found = 0
    for table in tables.values():
        for chain, rules in table.rules.items():
            if not chain.startswith(CHAIN_PREFIX):
                found += table.policies.get(chain) == "-"
                found += sum(CHAIN_PREFIX not in rule for rule in rules)
    return found


def has_chain(tables: Mapping[str, Table], chain: Chain) -> bool:
    return chain.table in tables and chain.name in tables[chain.table].policies


# --- what is to be done --------------------------------------------------------------------------


class Wrong(NamedTuple):
    """Something of ours that is missing, other, or not wanted: readable texts, "" for absent."""

    what: str
    expected: str
    actual: str


class Correction(NamedTuple):
    """What is wrong, and what tells iptables-restore to make it right ("": nothing)."""

    wrong: tuple[Wrong, ...]
    text: str


def correct(tables: Mapping[str, Table], wanted: Collection[Chain]) -> Correction:
    """Make ``wanted`` all that is ours in these tables; one that is not among them is empty."""
    wrong: list[Wrong] = []
    text = ""
    for name in TABLES:
        table = tables.get(name, Table({}, {}))
        lines: list[str] = []
        ours = [chain for chain in wanted if chain.table == name]
        for chain in ours:
            wrong += _fill(table, chain, lines)
        names = {chain.name for chain in ours}
        for old in sorted(one for one in table.policies if one.startswith(CHAIN_PREFIX)):
            if old not in names:
                wrong.append(Wrong(f"{name} {old}", "", _count(table.rules.get(old, ()))))
                lines += [f":{old} - [0:0]", *_take_away_jumps(table, old), f"-X {old}"]
        if lines:
            # A chain is declared before a rule jumps to it, and gone when none does.
            declared = [line for line in lines if line.startswith(":")]
            rest = [line for line in lines if not line.startswith((":", "-X"))]
            gone = [line for line in lines if line.startswith("-X")]
            text += "\n".join([f"*{name}", *declared, *rest, *gone, "COMMIT", ""])
    return Correction(tuple(wrong), text)


def _fill(table: Table, chain: Chain, lines: list[str]) -> Iterator[Wrong]:
    expected = f"{_count(chain.rules)}, {chain.comment}"
    found = [_comment(rule) for rule in table.rules.get(chain.name, ())]
    if found != [chain.comment] * len(chain.rules):
        is_there = chain.name in table.policies
        yield Wrong(f"{chain.table} {chain.name}", expected, _count(found) * is_there)
        lines += [f":{chain.name} - [0:0]", *chain.lines()]
    for parent in chain.parents:
        there = table.rules.get(parent, ())
        if not any(chain.name in rule and target(rule) == chain.name for rule in there):
            yield Wrong(f"{chain.table} {parent}", f"a jump to {chain.name}", "")
            lines.append(chain.jump(parent, _place(there) if chain.behind_policies else 1))


def _count(rules: Sequence[str]) -> str:
    return f"{len(rules)} rule{'' if len(rules) == 1 else 's'}"


def _place(rules: Sequence[str]) -> int:
    """Counted from 1: behind the leading jumps to what decides NetworkPolicies, and ours."""
    for at, rule in enumerate(rules, 1):
        if not (decides_policy(target(rule)) or _is_our_jump(rule)):
            return at
    return len(rules) + 1


def _take_away_jumps(table: Table, to: str) -> Iterator[str]:
    for rules in table.rules.values():
        for rule in rules:
            if to in rule and target(rule) == to:
                yield f"-D {rule.removeprefix('-A ')}"
