# SPDX-License-Identifier: Apache-2.0
"""Durations as Go writes and reads them: ``1h0m0s``, ``1.5s``, ``250ms``.

Pure. This file must not know what a duration is for.
"""

from __future__ import annotations

import re
from typing import Final

NS: Final = 1
US: Final = 1_000
MS: Final = 1_000_000
S: Final = 1_000_000_000
MINUTE: Final = 60 * S
HOUR: Final = 60 * MINUTE

_UNITS: Final = {
    "ns": NS,
    "us": US,
    "\N{MICRO SIGN}s": US,
    "\N{GREEK SMALL LETTER MU}s": US,
    "ms": MS,
    "s": S,
    "m": MINUTE,
    "h": HOUR,
}
_PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([a-z\u00b5\u03bc]+)", re.ASCII)
_MAX: Final = 2**63 - 1


class Duration:
    """A length of time, in nanoseconds, as Go keeps it."""

    __slots__ = ("ns",)

    def __init__(self, ns: int) -> None:
        self.ns = ns

    @classmethod
    def seconds(cls, value: float) -> Duration:
        return cls(round(value * S))

    @property
    def s(self) -> float:
        return self.ns / S

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Duration) and self.ns == other.ns

    def __hash__(self) -> int:
        return hash(self.ns)

    def __repr__(self) -> str:
        return f"Duration({str(self)!r})"

    def __str__(self) -> str:
        """As Go prints it: ``0s``, ``1.5s``, ``15m0s``, ``24h0m0s``."""
        sign, left = ("-", -self.ns) if self.ns < 0 else ("", self.ns)
        if left == 0:
            return "0s"
        for unit, size in (("ns", US), ("µs", MS), ("ms", S)):
            if left < size:
                return f"{sign}{_decimal(left, _UNITS[unit])}{unit}"
        hours, left = divmod(left, HOUR)
        minutes, left = divmod(left, MINUTE)
        text = f"{hours}h{minutes}m" if hours else f"{minutes}m" if minutes else ""
        return f"{sign}{text}{_decimal(left, S)}s"


def parse(text: str) -> Duration:
    """Read ``30s``, ``1h30m``, ``1.5s`` or ``0``. Raises ValueError for anything else."""
    sign, rest = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    if rest == "0":
        return Duration(0)
    total, at = 0, 0
    while at < len(rest):
        part = _PART.match(rest, at)
        unit = _UNITS.get(part[2]) if part else None
        if part is None or unit is None:
            raise ValueError(f"{text!r} is no duration")
        whole, _, fraction = part[1].partition(".")
        total += int(whole or 0) * unit
        total += int(fraction or 0) * unit // 10 ** len(fraction)
        at = part.end()
    if not rest or total > _MAX:
        raise ValueError(f"{text!r} is no duration")
    return Duration(sign * total)


def _decimal(value: int, unit: int) -> str:
    """``value / unit`` without the zeros at its end."""
    whole, fraction = divmod(value, unit)
    if not fraction:
        return str(whole)
    digits = len(str(unit)) - 1
    return f"{whole}.{str(fraction).rjust(digits, '0').rstrip('0')}"
