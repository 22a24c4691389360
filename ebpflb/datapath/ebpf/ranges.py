# SPDX-License-Identifier: Apache-2.0
"""Which slots of `backends` are free: contiguous ranges, handed out best fit first.

Pure bookkeeping in memory; what a range holds, and when it may be used again, others know.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple


class Range(NamedTuple):
    """``size`` slots from ``base`` on."""

    base: int
    size: int

    @property
    def end(self) -> int:
        return self.base + self.size

    def overlaps(self, other: Range) -> bool:
        return self.base < other.end and other.base < self.end


class Ranges:
    """The free slots of an array of ``size``: ``free`` in all. Neighbours are always one range."""

    def __init__(self, size: int, taken: Iterable[Range] = ()) -> None:
        """Raises ValueError when two of ``taken`` overlap or one lies outside."""
        self.size = size
        self.free = 0
        self._free: list[Range] = []  # by base
        self._by_size: list[tuple[int, int]] = []  # (size, base) of the same
        at = 0
        for one in sorted(taken):
            if one.base < at or one.end > size:
                raise ValueError(f"{one} overlaps another or lies outside of {size} slots")
            self._add(Range(at, one.base - at))
            at = one.end
        self._add(Range(at, size - at))

    @property
    def largest(self) -> int:
        """The largest range that could be taken now."""
        return self._by_size[-1][0] if self._by_size else 0

    def take(self, size: int) -> Range | None:
        """``size`` (at least 1) slots, None where no range of that many is free."""
        at = bisect_left(self._by_size, (size, 0))
        if at == len(self._by_size):
            return None
        _, base = self._by_size[at]
        found = self._free[bisect_left(self._free, Range(base, 0))]
        self._remove(found)
        self._add(Range(found.base + size, found.size - size))
        return Range(found.base, size)

    def give_back(self, one: Range) -> None:
        """``one`` was taken before. Raises ValueError where a slot of it is free already."""
        at = bisect_left(self._free, one)
        before = self._free[at - 1] if at else None
        after = self._free[at] if at < len(self._free) else None
        if (before and before.end > one.base) or (after and one.end > after.base):
            raise ValueError(f"{one} is free already")
        if before and before.end == one.base:
            self._remove(before)
            one = Range(before.base, before.size + one.size)
        if after and after.base == one.end:
            self._remove(after)
            one = Range(one.base, one.size + after.size)
        self._add(one)

    def _add(self, one: Range) -> None:
        self.free += one.size
        if one.size:
            insort(self._free, one)
            insort(self._by_size, (one.size, one.base))

    def _remove(self, one: Range) -> None:
        self.free -= one.size
        del self._free[bisect_left(self._free, one)]
        del self._by_size[bisect_left(self._by_size, (one.size, one.base))]
