# SPDX-License-Identifier: Apache-2.0
"""Percentiles, ratios and the A/A guard. Pure; it must not know what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

GUARD_LOW: Final = 0.98
GUARD_HIGH: Final = 1.02


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that ``share`` (0 to 1) of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(round(share * len(ordered), 6)) - 1)]


def median(values: Sequence[float]) -> float:
    return percentile(values, 0.5)


def in_guard(ratio: float) -> bool:
    """Whether two measurements of one thing came out alike."""
    return GUARD_LOW <= ratio <= GUARD_HIGH
