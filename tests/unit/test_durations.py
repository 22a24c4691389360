"""Durations as Go reads and prints them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb import durations
from ebpflb.durations import HOUR, MINUTE, MS, NS, US, Duration, S

READ = {
    "0": 0,
    "+0": 0,
    "0s": 0,
    "30s": 30 * S,
    "1h0m0s": HOUR,
    "2h22m": 2 * HOUR + 22 * MINUTE,
    "1.5s": 1500 * MS,
    ".5s": 500 * MS,
    "1.s": S,
    "250ms": 250 * MS,
    "7us": 7 * US,
    "7\N{MICRO SIGN}s": 7 * US,
    "7\N{GREEK SMALL LETTER MU}s": 7 * US,
    "9ns": 9 * NS,
    "-1m30s": -90 * S,
    "1s1s": 2 * S,
    "2562047h47m16.854775807s": 2**63 - 1,
}


@pytest.mark.parametrize(("text", "ns"), READ.items(), ids=READ)
def test_a_duration_is_read_as_go_reads_it(text: str, ns: int) -> None:
    assert durations.parse(text).ns == ns


@pytest.mark.parametrize(
    "text",
    ["", "5", "s", ".s", "5x", "5 s", "1h-5m", "--5s", "+", "2562047h47m16.854775808s", "5S"],
)
def test_what_go_does_not_read_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration") as refused:
        durations.parse(text)
    assert repr(text) in str(refused.value)


PRINTED = {
    0: "0s",
    1: "1ns",
    1500: "1.5µs",
    1_500_000: "1.5ms",
    S: "1s",
    30 * S: "30s",
    1500 * MS: "1.5s",
    90 * S: "1m30s",
    15 * MINUTE: "15m0s",
    24 * HOUR: "24h0m0s",
    HOUR + 1: "1h0m0.000000001s",
    -90 * S: "-1m30s",
}


@pytest.mark.parametrize(("ns", "text"), PRINTED.items(), ids=PRINTED.values())
def test_a_duration_is_printed_as_go_prints_it(ns: int, text: str) -> None:
    assert str(Duration(ns)) == text


@given(st.integers(-(2**62), 2**62))
def test_what_is_printed_reads_as_the_same(ns: int) -> None:
    assert durations.parse(str(Duration(ns))) == Duration(ns)
