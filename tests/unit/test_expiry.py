# SPDX-License-Identifier: Apache-2.0
"""What a look takes out of the flow tables, what it leaves to who comes in between, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ebpflb.datapath.ebpf import abi, expiry, flows
from ebpflb.datapath.ebpf.expiry import Look, Looker
from ebpflb.datapath.ebpf.flows import Reason
from ebpflb.model import Protocol
from tests.flows import CLIENT, NOW_NS, Made, made, only, used_at

C = abi.CONSTANTS
FIN = C["FLOW_SEEN_FIN"]
TCP, UDP = Protocol.TCP, Protocol.UDP
MINUTE, DAY = 60, 86_400
BATCH = 3


class Table(dict[bytes, bytes]):
    """A flow table in memory; ``before`` is called ahead of each access to one entry."""

    def __init__(self, name: str, *there: Made, max_entries: int = 1_000) -> None:
        super().__init__(item for flow in there for item in flow.items)
        self.name = name
        self.max_entries = max_entries
        self.before: Callable[[str, bytes], None] = lambda _what, _key: None

    def batches(self) -> Iterator[tuple[memoryview, memoryview]]:
        items = list(self.items())
        for start in range(0, len(items), BATCH):
            part = items[start : start + BATCH]
            yield (
                memoryview(b"".join(key for key, _ in part)),
                memoryview(b"".join(value for _, value in part)),
            )

    def lookup(self, key: bytes) -> bytes | None:
        self.before("lookup", key)
        return self.get(key)

    def take(self, key: bytes) -> bytes | None:
        self.before("take", key)
        return self.pop(key, None)

    def insert(self, key: bytes, value: bytes) -> bool:
        self.before("insert", key)
        return self.setdefault(key, value) is value


class NoSettings:
    """Nobody has written any time-out yet."""

    def lookup(self, _key: bytes) -> bytes | None:
        return bytes(flows.SETTINGS.size)


def looker(*tables: Table) -> Looker:
    return Looker(tables, NoSettings(), clock=lambda: NOW_NS)


def look(*tables: Table) -> Look:
    return looker(*tables).look()


def conntrack(*there: Made, **options: Any) -> Table:
    return Table("conntrack", *there, **options)


def number(i: int, protocol: int = TCP, **options: Any) -> Made:
    """One of many flows."""
    return made(protocol, client=(CLIENT[0], 1024 + i), **options)


DEAD: Any = {"idle": (11 * MINUTE, 10 * MINUTE)}


# --- what goes ------------------------------------------------------------------------------------


def test_only_what_is_over_goes_and_with_both_halves() -> None:
    alive = [number(i, idle=(MINUTE, MINUTE)) for i in range(5)]
    dead = [number(i, UDP, **DEAD) for i in range(5, 12)]
    table = conntrack(*alive, *dead)
    found = look(table)
    assert set(table) == {key for flow in alive for key in flow.keys}
    assert found.ended == {Reason.IDLE: len(dead)}
    assert not found.has_more


def test_each_table_has_its_own_times() -> None:
    waits = number(1, UDP, idle=(45, 45), answered=False)
    new, answered = Table("flows_new", waits), conntrack(waits)
    found = look(new, answered)
    assert (len(new), len(answered)) == (0, 2)
    assert found.ended == {Reason.UNANSWERED: 1}


def test_a_flow_goes_a_little_later_than_a_packet_would_find_it_over() -> None:
    margin_s = expiry.MARGIN_NS / 10**9
    table = conntrack(
        number(1, UDP, idle=(120.5, 120.5)), number(2, UDP, idle=(120 + margin_s,) * 2)
    )
    assert look(table).ended == {Reason.IDLE: 1}
    assert set(table) == set(number(1, UDP).keys)


def test_a_half_that_is_old_stays_while_the_other_is_used() -> None:
    flow = number(1, UDP, idle=(10 * MINUTE, 1))
    table = conntrack(flow)
    assert look(table).ended == {}
    assert set(table) == set(flow.keys)


def test_a_lone_half_goes_as_its_flow_would() -> None:
    table = conntrack(
        only(number(1, idle=(2 * DAY, 0)), "forward"), only(number(2, idle=(0, 2 * DAY)), "reverse")
    )
    assert look(table).ended == {Reason.ALONE: 2}
    assert not table


def test_the_half_of_another_flow_stays() -> None:
    """Two frontends of one backend: what lies under the other half's key can be another's."""
    dead = only(made(TCP, idle=(2 * DAY, 2 * DAY)), "forward")
    alive = made(TCP, frontend=("10.96.0.99", 80), idle=(0, 0))
    table = conntrack(dead, alive)
    assert look(table).ended == {Reason.ALONE: 1}
    assert set(table) == set(alive.keys)


def test_what_is_foreign_goes_alone() -> None:
    table = Table("flows_new", made(UDP, foreign=True, idle=(MINUTE, 0)))
    assert look(table).ended == {Reason.FOREIGN: 1}
    assert not table


def test_a_look_counts_flows_by_their_state() -> None:
    new = Table("flows_new", number(1), number(2), made(UDP, foreign=True))
    answered = conntrack(number(3), number(4, seen=(FIN, 0)), number(5, seen=(0, FIN)))
    found = look(new, answered)
    assert found.states == {"new": 2, "open": 2, "closing": 1, "foreign": 1}
    assert found.entries == {"flows_new": 5, "conntrack": 6}


def test_a_look_ends_so_many_flows_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry, "MAX_ENDED", 4)
    table = conntrack(*(number(i, UDP, **DEAD) for i in range(6)))
    one = looker(table)
    assert one.look().has_more
    assert len(table) == 2 * 2
    assert not one.look().has_more
    assert not table


def test_a_look_ends_when_it_is_to() -> None:
    table = conntrack(*(number(i, UDP, **DEAD) for i in range(50)))
    one = looker(table)
    taken = []

    def stop(what: str, key: bytes) -> None:
        if what == "take":
            taken.append(key)
            one.stop.set()

    table.before = stop
    one.look()
    assert len(taken) == 2, "the flow that was at hand, and no other"


def test_a_full_table_keeps_what_is_closed_for_ten_seconds() -> None:
    closed = [number(i, seen=(FIN, FIN), idle=(20, 20)) for i in range(4)]
    just_now = number(10, seen=(FIN, FIN), idle=(5, 5))
    silent = [number(i, idle=(DAY / 2, DAY / 2)) for i in range(20, 24)]
    table = conntrack(*closed, just_now, *silent, max_entries=20)
    one = looker(table)
    assert one.look().ended == {}, "it is not known to be full yet"
    assert one.look().ended == {Reason.CLOSED: len(closed)}
    assert set(table) == {key for flow in (just_now, *silent) for key in flow.keys}
    assert one.look().ended == {}, "and now it is not"


# --- what comes in between ------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(4), ids=lambda at: f"ahead of access {at}")
@pytest.mark.parametrize("half", ["forward", "reverse"])
def test_a_flow_that_is_used_at_any_moment_stays(at: int, half: str) -> None:
    flow = made(UDP, **DEAD)
    table = conntrack(flow)
    accesses = 0
    key, value = flow.items[("forward", "reverse").index(half)]

    def use(_what: str, _key: bytes) -> None:
        nonlocal accesses
        # A program stores the use where the half is; where it is gone nothing is stored.
        if accesses == at and key in table:
            table[key] = used_at(value, NOW_NS)
        accesses += 1

    table.before = use
    found = look(table)
    assert accesses > at
    if key not in table:
        assert half == "reverse", "only the half that goes first can have gone before its packet"
        assert at == 3
        return
    assert found.ended == {}
    assert set(table) == set(flow.keys)
    assert table[key] == used_at(value, NOW_NS)


def test_a_flow_that_began_meanwhile_under_the_same_ends_is_not_overwritten() -> None:
    flow, anew = made(TCP, idle=(2 * DAY, 2 * DAY)), made(TCP, backend=("10.244.1.6", 8080))
    table = conntrack(flow)

    def begin(what: str, key: bytes) -> None:
        if what == "insert":  # between taking out and putting back
            table.update(anew.items)
        elif what == "take" and key == flow.keys[0]:
            table[key] = used_at(flow.items[0][1], NOW_NS)

    table.before = begin
    assert look(table).ended == {Reason.ALONE: 1}, "the half that nobody leads to any more"
    assert dict(table) == dict(anew.items)


def test_a_flow_that_a_packet_ended_meanwhile_is_none_of_ours() -> None:
    flow = made(UDP, **DEAD)
    table = conntrack(flow)
    table.before = lambda what, _key: table.clear() if what == "take" else None
    assert look(table).ended == {}
    assert not table


# --- when -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fill", "gain", "before_s", "expected_s"),
    [
        pytest.param(0.0, 0.0, 0.0, 20, id="an empty table is looked at three times a minute"),
        pytest.param(0.1, 0.0, 20, 40, id="a look in vain doubles the pause"),
        pytest.param(0.1, 0.0, 40, 60, id="up to a minute"),
        pytest.param(0.1, 0.005, 60, 60, id="so does one that finds next to nothing"),
        pytest.param(0.1, 0.3, 60, 20, id="one that finds much brings the next one on"),
        pytest.param(0.5, 0.3, 60, 10, id="half full: sooner"),
        pytest.param(0.5, 0.0, 60, 40, id="half full, in vain"),
        pytest.param(0.75, 0.3, 60, 3, id="three quarters full: sooner still"),
        pytest.param(0.9, 0.3, 60, 1, id="nearly full: each second"),
        pytest.param(1.0, 0.0, 60, 10, id="full, and nothing to be had: not all the time"),
        pytest.param(1.0, 1.0, 60, 0.04, id="more to be had: as soon as its share allows"),
    ],
)
def test_the_next_look_is_sooner_the_fuller_and_the_more_worth_it(
    fill: float, gain: float, before_s: float, expected_s: float
) -> None:
    assert expiry.pause_s(before_s, fill=fill, gain=gain, took_s=0.01) == expected_s


@pytest.mark.parametrize(("fill", "share"), [(0.1, 0.05), (0.5, 0.05), (0.8, 0.1), (1.0, 0.2)])
@pytest.mark.parametrize("gain", [0.0, 0.5, 1.0])
def test_looks_never_take_more_than_their_share_of_a_cpu(
    fill: float, share: float, gain: float
) -> None:
    pause_s = expiry.pause_s(0, fill=fill, gain=gain, took_s=10.0)
    assert 10.0 / (10.0 + pause_s) == pytest.approx(share)
