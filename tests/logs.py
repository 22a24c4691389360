"""What is logged, for tests that look at it: one dictionary a line, as JSON would have it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ebpflb.logs import facts_of

EventDict = dict[str, Any]


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[EventDict] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(
            {
                "event": record.getMessage(),
                "log_level": record.levelname.lower(),
                **facts_of(record),
            }
        )


@contextmanager
def capture_logs() -> Iterator[list[EventDict]]:
    """The lines logged meanwhile: ``event``, ``log_level``, and the facts."""
    handler = _Lines()
    logger = logging.getLogger("ebpflb")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
