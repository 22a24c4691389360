# SPDX-License-Identifier: Apache-2.0
"""What nf_tables holds, as the kernel itself tells it: chains, rules, changes; and deletes there.

No tool is asked: one that is older than what somebody else has put there cannot read it, and an
audit costs less than a millisecond. What iptables writes in its nft back end is here too. Numbers
are in network byte order on the wire. This file must not know which rules are ours.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, Self

from ebpflb import netlink
from ebpflb.errors import DatapathError
from ebpflb.netlink import attribute, attributes

FAMILIES: Final[Mapping[int, str]] = {1: "inet", 2: "ip", 10: "ip6"}
"""nft's word for each family that forwards IP packets."""
_NUMBERS: Final = {word: number for number, word in FAMILIES.items()}

HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting")

_NETLINK_NETFILTER: Final = 12
_GROUP_NFTABLES: Final = 1 << 6

_SUBSYSTEM: Final = 10
_NEWTABLE, _GETTABLE, _DELTABLE = (_SUBSYSTEM << 8 | one for one in (0, 1, 2))
_NEWCHAIN, _GETCHAIN, _DELCHAIN = (_SUBSYSTEM << 8 | one for one in (3, 4, 5))
_NEWRULE, _GETRULE, _DELRULE = (_SUBSYSTEM << 8 | one for one in (6, 7, 8))
_BATCH_BEGIN: Final = 0x10
_BATCH_END: Final = 0x11

_NLMSG_ERROR: Final = 2
_REQUEST: Final = 0x1
_ACK: Final = 0x4

_NFGENMSG: Final = struct.Struct(">BBH")  # family, version, resource
_BE32: Final = struct.Struct(">I")
_BE32_SIGNED: Final = struct.Struct(">i")
_BE64: Final = struct.Struct(">Q")

_TABLE_NAME, _TABLE_FLAGS = 1, 2
_TABLE_DORMANT, _TABLE_OWNED = 0x1, 0x2
_CHAIN_TABLE, _CHAIN_NAME, _CHAIN_HOOK, _CHAIN_POLICY, _CHAIN_TYPE = 1, 3, 4, 5, 7
_HOOK_NUMBER, _HOOK_PRIORITY = 1, 2
_RULE_TABLE, _RULE_CHAIN, _RULE_HANDLE, _RULE_EXPRESSIONS, _RULE_USERDATA = 1, 2, 3, 4, 7
_EXPRESSION_NAME, _EXPRESSION_DATA = 1, 2
_IMMEDIATE_DATA, _DATA_VERDICT, _VERDICT_CODE, _VERDICT_CHAIN = 2, 2, 1, 2
_LOOKUP_TARGET: Final = 3
_TARGET_NAME: Final = 1
_DROP, _JUMP, _GOTO = 0, -3, -4
_REGISTER_VERDICT: Final = 0
_USERDATA_COMMENT: Final = 0

_HARMLESS_TARGETS: Final = frozenset({"LOG", "NFLOG", "MARK", "CONNMARK", "TCPMSS", "CT", "TRACE"})
"""iptables' own targets that let a packet go on."""

_MISSING: Final = frozenset({errno.EINVAL, errno.EPROTONOSUPPORT, errno.EOPNOTSUPP})
_MESSAGE_BYTES: Final = 65536


class Chain(NamedTuple):
    """A chain; ``hook`` is "" where no packet begins in it. ``drops``: its policy does.

    ``is_owned``: nobody may write to the table but the process that made it. ``is_dormant``: no
    packet sees it.
    """

    family: str
    table: str
    name: str
    type: str
    hook: str
    priority: int
    drops: bool
    is_owned: bool = False
    is_dormant: bool = False

    def __str__(self) -> str:
        return f"{self.family} {self.table} {self.name}"


class Rule(NamedTuple):
    """``jump`` is the chain that it always jumps to, if it matches; ``can_drop`` counts jumps."""

    chain: str
    handle: int
    comment: str
    jump: str
    can_drop: bool


class Change(NamedTuple):
    """Something that is told of: a table (``chain`` is ""), a chain or a chain's rule."""

    family: str
    table: str
    chain: str
    hook: str


class NfTables:
    """A socket in the network namespace of the thread that opens it; a context manager."""

    def __init__(self, kernel: socket.socket) -> None:
        self._kernel = kernel

    @classmethod
    def open(cls) -> Self | None:
        """None where the kernel has no nf_tables. Raises DatapathError."""
        try:
            kernel = netlink.opened(protocol=_NETLINK_NETFILTER)
        except OSError as error:
            if error.errno in _MISSING:
                return None
            raise _failure("open", error) from None
        try:
            netlink.dump(kernel, _GETTABLE, _NFGENMSG.pack(0, 0, 0))
        except OSError as error:
            kernel.close()
            if error.errno in _MISSING:
                return None
            raise _failure("read", error) from None
        return cls(kernel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._kernel.close()

    def tables(self) -> Mapping[tuple[str, str], int]:
        """Flags by family and name."""
        found = {}
        for family, body in self._dump(_GETTABLE):
            told = dict(attributes(body))
            found[family, _text(told[_TABLE_NAME])] = _number(told.get(_TABLE_FLAGS))
        return found

    def chains(self) -> list[Chain]:
        tables = self.tables()
        return [
            _chain(family, dict(attributes(body)), tables) for family, body in self._dump(_GETCHAIN)
        ]

    def rules(self, family: str, table: str, chain: str = "") -> list[Rule]:
        """A chain's rules, or a table's, in their order; none where there is no such thing."""
        asked = attribute(_RULE_TABLE, _name(table))
        if chain:
            asked += attribute(_RULE_CHAIN, _name(chain))
        return [
            rule
            for _, body in self._dump(_GETRULE, family, asked)
            if (told := dict(attributes(body))) and _text(told[_RULE_TABLE]) == table
            if (rule := _rule(told)).chain == chain or not chain
        ]

    def delete(
        self,
        family: str,
        table: str,
        *,
        rules: Iterable[Rule] = (),
        chains: Iterable[str] = (),
    ) -> None:
        """Rules, and chains with all that is in them; neither: the whole table. All or nothing.

        Raises DatapathError, with ENOENT where something has gone meanwhile.
        """
        named = attribute(_RULE_TABLE, _name(table))
        emptied = tuple(chains)
        steps = [
            (
                _DELRULE,
                named
                + attribute(_RULE_CHAIN, _name(rule.chain))
                + attribute(_RULE_HANDLE, _BE64.pack(rule.handle)),
            )
            for rule in rules
        ]
        steps += [(_DELRULE, named + attribute(_RULE_CHAIN, _name(one))) for one in emptied]
        steps += [(_DELCHAIN, named + attribute(_CHAIN_NAME, _name(one))) for one in emptied]
        self._batch(_NUMBERS[family], steps or [(_DELTABLE, attribute(_TABLE_NAME, _name(table)))])

    def _dump(self, kind: int, family: str = "", asked: bytes = b"") -> Iterator[tuple[str, bytes]]:
        """Family and attributes of each thing that is of a family of ours."""
        number = _NUMBERS.get(family, 0)
        try:
            bodies = netlink.dump(self._kernel, kind, _NFGENMSG.pack(number, 0, 0) + asked)
        except OSError as error:
            if error.errno == errno.ENOENT:
                return
            raise _failure("read", error) from None
        for body in bodies:
            word = FAMILIES.get(body[0])
            if word is not None:
                yield word, body[_NFGENMSG.size :]

    def _batch(self, family: int, steps: list[tuple[int, bytes]]) -> None:
        whole = _NFGENMSG.pack(0, 0, _SUBSYSTEM)
        head = _NFGENMSG.pack(family, 0, 0)
        messages = [
            _message(_BATCH_BEGIN, _REQUEST, whole),
            *(_message(kind, _REQUEST | _ACK, head + body) for kind, body in steps),
            _message(_BATCH_END, _REQUEST, whole),
        ]
        waiting = len(steps)
        try:
            self._kernel.send(b"".join(messages))
            while waiting:
                for answer in netlink.messages(self._kernel.recv(_MESSAGE_BYTES)):
                    if answer.type != _NLMSG_ERROR:
                        continue
                    number = struct.unpack_from("=i", answer.body)[0]
                    if number:
                        raise OSError(-number, os.strerror(-number))  # noqa: TRY301 - one way out
                    waiting -= 1
        except OSError as error:
            self._drain()
            raise _failure("delete from", error) from None

    def _drain(self) -> None:
        """What else was said of a batch that failed."""
        with contextlib.suppress(BlockingIOError):
            while self._kernel.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT):
                pass


def subscribe() -> socket.socket:
    """A socket that is told of every change, without blocking. Raises OSError."""
    made = netlink.opened(groups=_GROUP_NFTABLES, protocol=_NETLINK_NETFILTER)
    made.settimeout(0)
    return made


def changes(data: bytes) -> Iterator[Change]:
    """What a datagram tells of: tables deleted, chains, rules."""
    for message in netlink.messages(data):
        family = FAMILIES.get(message.body[0]) if message.body else None
        if family is None:
            continue
        told = dict(attributes(message.body[_NFGENMSG.size :]))
        if message.type in {_NEWTABLE, _DELTABLE}:
            yield Change(family, _text(told.get(_TABLE_NAME, b"")), "", "")
        elif message.type in {_NEWCHAIN, _DELCHAIN}:
            chain = _chain(family, told, {})
            yield Change(family, chain.table, chain.name, chain.hook)
        elif message.type in {_NEWRULE, _DELRULE}:
            table, name = (_text(told.get(one, b"")) for one in (_RULE_TABLE, _RULE_CHAIN))
            yield Change(family, table, name, "")


# --- the wire's form -----------------------------------------------------------------------------


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return netlink.HEADER.pack(netlink.HEADER.size + len(body), kind, flags, 0, 0) + body


def _name(text: str) -> bytes:
    return text.encode() + b"\0"


def _text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


def _number(data: bytes | None) -> int:
    return 0 if data is None else int(_BE32.unpack(data)[0])


def _chain(family: str, told: Mapping[int, bytes], tables: Mapping[tuple[str, str], int]) -> Chain:
    table = _text(told.get(_CHAIN_TABLE, b""))
    hook = dict(attributes(told.get(_CHAIN_HOOK, b"")))
    number = _number(hook.get(_HOOK_NUMBER))
    is_base = _HOOK_NUMBER in hook and number < len(HOOKS)
    flags = tables.get((family, table), 0)
    return Chain(
        family,
        table,
        _text(told.get(_CHAIN_NAME, b"")),
        type=_text(told.get(_CHAIN_TYPE, b"")),
        hook=HOOKS[number] if is_base else "",
        priority=_BE32_SIGNED.unpack(hook.get(_HOOK_PRIORITY, bytes(4)))[0],
        drops=is_base and _CHAIN_POLICY in told and _number(told[_CHAIN_POLICY]) == _DROP,
        is_owned=bool(flags & _TABLE_OWNED),
        is_dormant=bool(flags & _TABLE_DORMANT),
    )


def _rule(told: Mapping[int, bytes]) -> Rule:
    jump, can_drop = "", False
    for _, element in attributes(told.get(_RULE_EXPRESSIONS, b"")):
        expression = dict(attributes(element))
        name = _text(expression.get(_EXPRESSION_NAME, b""))
        data = dict(attributes(expression.get(_EXPRESSION_DATA, b"")))
        match name:
            case "immediate":
                code, chain = _verdict(data.get(_IMMEDIATE_DATA, b""))
                can_drop |= code in {_DROP, _JUMP, _GOTO}
                jump = chain or jump
            case "lookup":  # into a map of verdicts
                can_drop |= _number(data.get(_LOOKUP_TARGET, b"\xff" * 4)) == _REGISTER_VERDICT
            case "reject":
                can_drop = True
            case "target":
                can_drop |= _text(data.get(_TARGET_NAME, b"")) not in _HARMLESS_TARGETS
    return Rule(
        _text(told.get(_RULE_CHAIN, b"")),
        _BE64.unpack(told[_RULE_HANDLE])[0],
        _comment(told.get(_RULE_USERDATA, b"")),
        jump,
        can_drop,
    )


def _verdict(data: bytes) -> tuple[int | None, str]:
    """Code and chain; None for a value that is no verdict."""
    verdict = dict(attributes(dict(attributes(data)).get(_DATA_VERDICT, b"")))
    if _VERDICT_CODE not in verdict:
        return None, ""
    return _BE32_SIGNED.unpack(verdict[_VERDICT_CODE])[0], _text(verdict.get(_VERDICT_CHAIN, b""))


def _comment(userdata: bytes) -> str:
    """nft's comment: one of some records, each a byte for its type and one for its length."""
    at = 0
    while at + 2 <= len(userdata):
        kind, length = userdata[at], userdata[at + 1]
        if kind == _USERDATA_COMMENT:
            return _text(userdata[at + 2 : at + 2 + length])
        at += 2 + length
    return ""


def _failure(operation: str, error: OSError) -> DatapathError:
    hint = "it takes CAP_NET_ADMIN" if error.errno == errno.EPERM else ""
    return DatapathError(operation, "nf_tables", error.errno or 0, hint=hint)
