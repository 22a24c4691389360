# SPDX-License-Identifier: Apache-2.0
"""What the log says of syncs: what somebody waits for at once, the rest now and then."""

from __future__ import annotations

from typing import Any

import pytest

from ebpflb.synclog import QUIET_S, SyncLog
from tests.logs import capture_logs


class Told:
    def __init__(self) -> None:
        self.now = 1000.0
        self.log = SyncLog()

    def done(self, *, writes: int = 3, duration_s: float = 0.002, aloud: bool = False) -> None:
        self.log.done(
            self.now,
            duration_s=duration_s,
            service_ports=7,
            changed=1,
            writes=writes,
            failed=0,
            aloud=aloud,
        )


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_change_after_a_quiet_time_is_told_at_once(told: Told) -> None:
    with capture_logs() as lines:
        told.done()
    [line] = lines
    assert _facts(line) == {"service_ports": 7, "changed": 1, "writes": 3, "ms": 2.0}


def test_a_thousand_changes_in_a_minute_are_two_lines(told: Told) -> None:
    with capture_logs() as lines:
        for number in range(1000):
            told.now += 0.06
            told.done(duration_s=0.5 if number == 500 else 0.002)
        told.now += QUIET_S
        told.log.look(told.now)
    first, rest = map(_facts, lines)
    assert first["writes"] == 3
    assert rest == {
        "service_ports": 7,
        "changed": 999,
        "writes": 2997,
        "syncs": 999,
        "longest_ms": 500.0,
    }


def test_what_was_told_is_not_told_again(told: Told) -> None:
    with capture_logs() as lines:
        told.done()
        for _ in range(3):
            told.now += QUIET_S
            told.log.look(told.now)
    assert len(lines) == 1


def test_a_comparison_of_everything_is_told_always(told: Told) -> None:
    """A start, and what follows a failure: somebody waits for it."""
    with capture_logs() as lines:
        told.done()
        told.done(aloud=True, writes=0)
    assert [line["writes"] for line in lines] == [3, 0]


def _facts(line: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in line.items() if k not in {"event", "log_level"}}
