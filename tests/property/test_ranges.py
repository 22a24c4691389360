"""The range allocator against a plain set of slots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.datapath.ebpf.ranges import Range, Ranges

SIZE = 40


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_what_is_taken_is_nobody_elses_and_comes_back_whole(steps: list[tuple[bool, int]]) -> None:
    ranges = Ranges(SIZE)
    held: list[Range] = []
    free = set(range(SIZE))
    for take, number in steps:
        if take:
            one = ranges.take(number)
            runs = "".join("1" if slot in free else "0" for slot in range(SIZE)).split("0")
            if one is None:
                assert max(map(len, runs)) < number
                assert ranges.largest == max(map(len, runs))
            else:
                slots = set(range(one.base, one.end))
                assert one.size == number
                assert slots <= free
                free -= slots
                held.append(one)
        elif held:
            one = held.pop(number % len(held))
            ranges.give_back(one)
            free |= set(range(one.base, one.end))
        assert ranges.free == len(free)
    for one in held:
        ranges.give_back(one)
    assert ranges.take(SIZE) == Range(0, SIZE)


@given(st.lists(st.tuples(st.integers(0, SIZE), st.integers(1, 6)), max_size=8))
def test_a_start_knows_exactly_the_slots_that_are_not_taken(spans: list[tuple[int, int]]) -> None:
    taken = [Range(base, size) for base, size in spans]
    slots = [slot for one in taken for slot in range(one.base, one.end)]
    if len(slots) != len(set(slots)) or any(slot >= SIZE for slot in slots):
        with pytest.raises(ValueError, match="overlaps another or lies outside"):
            Ranges(SIZE, taken)
        return
    assert Ranges(SIZE, taken).free == SIZE - len(slots)


@pytest.mark.parametrize(
    "twice", [Range(0, 4), Range(2, 1), Range(3, 4), Range(0, 10)], ids=lambda one: str(tuple(one))
)
def test_giving_back_what_is_free_is_an_error(twice: Range) -> None:
    ranges = Ranges(10)
    ranges.take(4)
    ranges.give_back(Range(0, 4))
    with pytest.raises(ValueError, match="is free already"):
        ranges.give_back(twice)
