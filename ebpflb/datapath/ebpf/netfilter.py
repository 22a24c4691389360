# SPDX-License-Identifier: Apache-2.0
"""Our few rules in netfilter, beside the packets' programs: put there, looked after, taken away.

Marked packets are masqueraded or refused, the marks are cleared before a tunnel, and accepts stand
in every FORWARD chain that can drop. All but the accepts is a table of our own in nft; where there
is no nft, chains in iptables. Others' rules are left as they are. This file must not know who marks
packets, or why.

Accepts are put at the head of a chain when they are not in it, and then left where they are, even
behind what others put before them: two who each want to be first would never end. Those in a chain
that can no longer drop do no harm there, and stay.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import iptables, nfrules
from ebpflb.datapath.ebpf.iptables import BackEnd, Table, Tools
from ebpflb.datapath.ebpf.netfilterwatch import NetfilterWatch
from ebpflb.datapath.ebpf.nfrules import Marks
from ebpflb.datapath.ebpf.nftables import Chain, NfTables
from ebpflb.errors import DatapathError
from ebpflb.logs import Log
from ebpflb.model import Family

_log = Log("netfilter")

_WORDS: Final[Mapping[Family, str]] = {Family.IPV4: "ip", Family.IPV6: "ip6"}
_INTERFACES6: Final = Path("/proc/thread-self/net/if_inet6")
_REMOVALS: Final = 5


class _Step(NamedTuple):
    """Something that is not as it should be, and how it becomes so.

    ``is_ours``: without it packets are not served; else it is in a chain of somebody else.
    """

    wrong: tuple[Difference, ...]
    mend: Callable[[], None]
    is_ours: bool


class Netfilter:
    """The rules of the network namespace of the calling thread; to be used by one thread.

    ``mark`` and ``reject_mark`` are one bit each of a packet's mark, to be masqueraded and to be
    refused.
    """

    def __init__(self, *, mark: int, reject_mark: int) -> None:
        self._marks = Marks(mark, reject_mark)
        self._refusal: DatapathError | None = None
        self._said: set[str] = set()
        self._watch: NetfilterWatch | None = None

    def ensure(self) -> list[Difference]:
        """Put there what is missing; returns what that was. Writes nothing where all is right.

        Raises DatapathError where a rule of our own cannot be; for what cannot be done to chains of
        others a warning is logged.
        """
        found: list[Difference] = []
        for step in self._steps():
            try:
                step.mend()
            except DatapathError as error:
                if step.is_ours:
                    raise
                self._say(f"in {step.wrong[0].what}: {error}")
                continue
            found += step.wrong
            _log.info("rules in netfilter written", what=", ".join(one.what for one in step.wrong))
        return found

    def differences(self) -> list[Difference]:
        """What ``ensure`` would mend. Raises DatapathError where it cannot be looked at."""
        return [difference for step in self._steps() for difference in step.wrong]

    def _steps(self) -> Iterator[_Step]:
        """Each as it is found when those before it have been mended, or have not."""
        with contextlib.ExitStack() as stack:
            kernel = NfTables.open()
            if kernel is None:
                chains = []
            else:
                stack.enter_context(kernel)
                chains = kernel.chains()
                self._note_watched(chains)
                if self._uses_nft(kernel):
                    yield from self._own_table(kernel, chains)
                yield from self._accepts(kernel, chains)
            uses_nft = self._uses_nft(kernel)
            for family in _families():
                yield from self._iptables(kernel, chains, family, whole=not uses_nft)
            if kernel is not None and not uses_nft:
                yield from _old_tables(kernel)

    def _say(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("what we masquerade may be dropped", where=what)

    # --- our table in nft -----------------------------------------------------------------------

    def _uses_nft(self, kernel: NfTables | None) -> bool:
        return kernel is not None and self._refusal is None and bool(iptables.find_tool("nft"))

    def _own_table(self, kernel: NfTables, chains: Collection[Chain]) -> Iterator[_Step]:
        family = "inet" if Family.IPV6 in _families() else "ip"
        comment = nfrules.nft_comment(self._marks, family)
        found = [(one.chain, one.comment) for one in kernel.rules(family, nfrules.TABLE)]
        wanted = nfrules.nft_chains(self._marks, family)
        there = {
            (one.name, one.type, one.hook, one.priority)
            for one in chains
            if (one.family, one.table) == (family, nfrules.TABLE)
            and not (one.drops or one.is_dormant)
        }
        if there == {one[:4] for one in wanted} and sorted(found) == sorted(
            (one.name, comment) for one in wanted
        ):
            return
        expected = f"{len(wanted)} rules, {comment}"
        actual = f"{len(found)} rules" if there or found else ""
        yield _Step(
            (_difference(f"nft table {family} {nfrules.TABLE}", expected, actual),),
            partial(self._write_own_table, family),
            is_ours=True,
        )

    def _write_own_table(self, family: str) -> None:
        """Where this kernel will not have it, iptables is the next to be tried."""
        try:
            _nft(nfrules.nft_table(self._marks, family), "-f", "-")
        except DatapathError as error:
            self._refusal = error
            _log.warning("nft cannot be used; trying iptables", reason=str(error))

    # --- accepts in other people's nft chains ---------------------------------------------------

    def _accepts(self, kernel: NfTables, chains: Collection[Chain]) -> Iterator[_Step]:
        comment = nfrules.accept_comment(self._marks)
        for chain in chains:
            if not _may_need_accepts(chain):
                continue
            rules = kernel.rules(chain.family, chain.table, chain.name)
            ours = [rule for rule in rules if nfrules.is_ours(rule.comment)]
            if [rule.comment for rule in ours] == [comment] * nfrules.ACCEPTS:
                continue
            can_drop = chain.drops or any(rule.can_drop for rule in rules if rule not in ours)
            if not ours and not can_drop:
                continue
            where = f"nft chain {chain}"
            if chain.is_owned:
                self._say(f"{where} belongs to a process that lets nobody else write there")
            elif not iptables.find_tool("nft"):
                self._say(f"{where} can be written by nft only: install the package nftables")
            else:
                expected = f"{nfrules.ACCEPTS} accepts, {comment}"
                yield _Step(
                    (_difference(where, expected, f"{len(ours)} accepts" if ours else ""),),
                    partial(self._insert_accepts, kernel, chain),
                    is_ours=False,
                )

    def _insert_accepts(self, kernel: NfTables, chain: Chain) -> None:
        _remove_accepts(kernel, chain)
        script = nfrules.nft_accepts(
            self._marks, family=chain.family, table=chain.table, chain=chain.name
        )
        _nft(script, "-j", "-f", "-")

    # --- iptables -------------------------------------------------------------------------------

    def _iptables(
        self, kernel: NfTables | None, chains: Collection[Chain], family: Family, *, whole: bool
    ) -> Iterator[_Step]:
        """Accepts in each back end; ``whole``: and all that our nft table would do in one."""
        held: dict[Tools, dict[str, Table]] = {}
        for back_end in BackEnd:
            if back_end is BackEnd.LEGACY:
                there = set(iptables.TABLES) & iptables.legacy_tables(family)
            elif kernel is not None:
                there = _of_iptables_nft(kernel, chains, family, whole=whole)
            else:
                continue
            tools = iptables.find(back_end, family) if there or whole else None
            if tools is None:
                if "filter" in there:
                    self._say(
                        f"the FORWARD chain of {family.label} iptables' {back_end.value} back end: "
                        "its tools are not installed (package iptables)"
                    )
                continue
            held[tools] = tools.read(there)
            if "filter" in there - held[tools].keys():
                self._say(f"the FORWARD chain of {tools}: something in it {tools} cannot read")
        chosen = self._chosen(held, family) if whole else None
        for tools, tables in held.items():
            wanted = self._wanted(tables, family, whole=tools is chosen)
            correction = iptables.correct(tables, wanted)
            if correction.wrong:
                yield _Step(
                    tuple(
                        _difference(f"{tools} {one.what}", one.expected, one.actual)
                        for one in correction.wrong
                    ),
                    partial(self._restore, tools, correction.text),
                    is_ours=tools is chosen,
                )

    def _wanted(
        self, tables: Mapping[str, Table], family: Family, *, whole: bool
    ) -> list[nfrules.Chain]:
        wanted: list[nfrules.Chain] = []
        accepts = nfrules.accept_chain(self._marks)
        if "filter" in tables and (
            iptables.can_drop(tables["filter"], "FORWARD") or iptables.has_chain(tables, accepts)
        ):
            wanted.append(accepts)
        if whole:  # after the accepts, and so before them in the kernel
            wanted += nfrules.iptables_chains(self._marks, is_ipv6=family is Family.IPV6)
        return wanted

    def _chosen(self, held: Mapping[Tools, Mapping[str, Table]], family: Family) -> Tools:
        """Where we are already, else the back end that has more rules of others, in doubt nft."""
        ours = nfrules.iptables_chains(self._marks, is_ipv6=family is Family.IPV6)

        def fitness(tools: Tools) -> tuple[bool, int]:
            tables = held[tools]
            return any(iptables.has_chain(tables, one) for one in ours), iptables.size(tables)

        if held:
            return max(held, key=fitness)
        tool = "iptables" if family is Family.IPV4 else "ip6tables"
        if self._refusal is not None:
            raise self._refusal
        raise DatapathError(
            "find",
            f"nft or {tool}",
            hint="packets are masqueraded and refused by netfilter: install the package nftables, "
            "or the package iptables",
        )

    def _restore(self, tools: Tools, text: str) -> None:
        try:
            tools.write(text)
        except DatapathError as error:
            if self._refusal is None:
                raise
            raise DatapathError(
                "write", "rules for netfilter", hint=f"neither way: {self._refusal}; {error}"
            ) from None

    # --- taking away ----------------------------------------------------------------------------

    def remove(self) -> bool:
        """Take away all of ours, of any version; whether there was anything.

        Rules of nft and of iptables' nft back end go without any tool. Raises DatapathError.
        """
        found = False
        kernel = NfTables.open()
        if kernel is not None:
            with kernel:
                found = _remove_from_nft(kernel)
        for family in Family:
            there = iptables.legacy_tables(family) & set(iptables.TABLES)
            tools = iptables.find(BackEnd.LEGACY, family) if there else None
            if tools is not None:
                correction = iptables.correct(tools.read(there), ())
                if correction.text:
                    tools.write(correction.text)
                    found = True
        return found

    # --- being told -----------------------------------------------------------------------------

    def watch(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called, by a thread, whenever ``ensure`` may have something to do.

        It watches the network namespace of the calling thread. To be called once.
        """
        self._watch = NetfilterWatch(wake)
        self._watch.start()

    def _note_watched(self, chains: Collection[Chain]) -> None:
        if self._watch is not None:
            self._watch.chains = frozenset(
                (one.family, one.table, one.name)
                for one in chains
                if one.hook and (one.hook == "forward" or one.table in iptables.TABLES)
            )

    def close(self) -> None:
        """End the thread; the rules stay."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None


def _families() -> tuple[Family, ...]:
    """Those that the kernel has."""
    return tuple(Family) if _INTERFACES6.exists() else (Family.IPV4,)


def _difference(what: str, expected: str, actual: str) -> Difference:
    return Difference("", "netfilter", what, expected, actual)


def _nft(text: str, *arguments: str) -> None:
    iptables.run([iptables.find_tool("nft"), *arguments], "nft", text=text)


def _is_of_iptables(chain: Chain) -> bool:
    """Which nft must not write to: iptables could read none of it any more."""
    return chain.table == "filter" and chain.name == "FORWARD" and chain.family != "inet"


def _may_need_accepts(chain: Chain) -> bool:
    return (
        chain.hook == "forward"
        and chain.type == "filter"
        and chain.table != nfrules.TABLE
        and not chain.is_dormant
        and not _is_of_iptables(chain)
        and not nfrules.decides_policy(chain.table)
    )


def _of_iptables_nft(
    kernel: NfTables, chains: Collection[Chain], family: Family, *, whole: bool
) -> set[str]:
    """Its tables that are there and worth reading, which is a process each."""
    word = _WORDS[family]
    there = {table for known, table in kernel.tables() if known == word} & set(iptables.TABLES)
    if whole:
        return there
    return there & {
        one.table
        for one in chains
        if one.family == word
        and (
            one.name.startswith(nfrules.CHAIN_PREFIX)
            or (_is_of_iptables(one) and (one.drops or kernel.rules(word, one.table, one.name)))
        )
    }


def _old_tables(kernel: NfTables) -> Iterator[_Step]:
    """Ours in nft, where iptables does it now."""
    for family, table in kernel.tables():
        if table == nfrules.TABLE:
            yield _Step(
                (_difference(f"nft table {family} {table}", "", "a table"),),
                partial(kernel.delete, family, table),
                is_ours=False,
            )


def _remove_accepts(kernel: NfTables, chain: Chain) -> bool:
    rules = kernel.rules(chain.family, chain.table, chain.name)
    ours = [rule for rule in rules if nfrules.is_ours(rule.comment)]
    if ours:
        kernel.delete(chain.family, chain.table, rules=ours)
    return bool(ours)


def _remove_from_nft(kernel: NfTables) -> bool:
    """Whether there was anything; begins anew where somebody else takes something away, too."""
    for _ in range(_REMOVALS):
        try:
            return _remove_all(kernel)
        except DatapathError as error:
            if error.errno != errno.ENOENT:
                raise
    raise DatapathError("delete from", "nf_tables", hint="somebody changes it all the time")


def _remove_all(kernel: NfTables) -> bool:
    found = False
    for family, table in kernel.tables():
        if table == nfrules.TABLE:
            kernel.delete(family, table)
            found = True
    chains = kernel.chains()
    for chain in chains:
        if chain.hook == "forward" and not chain.is_owned:
            found |= _remove_accepts(kernel, chain)
    for family, table in sorted({(one.family, one.table) for one in chains}):
        ours = [
            one.name
            for one in chains
            if (one.family, one.table) == (family, table)
            and one.name.startswith(nfrules.CHAIN_PREFIX)
        ]
        if ours:
            jumps = [one for one in kernel.rules(family, table) if one.jump in ours]
            kernel.delete(family, table, rules=jumps, chains=ours)
            found = True
    return found
