# SPDX-License-Identifier: Apache-2.0
"""How the agent's log looks: one event a line, with its facts as key-value pairs, on stderr.

A thin layer over the standard library's logging: the libraries that do this bring in asyncio and
a terminal renderer, 14 MiB in every agent on every node.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_FACTS = "ebpflb_facts"


class Log:
    """``log.info("synced", writes=3)``; a fact that is None is not there."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"ebpflb.{name}")

    def debug(self, event: str, /, **facts: object) -> None:
        self._log(logging.DEBUG, event, facts)

    def info(self, event: str, /, **facts: object) -> None:
        self._log(logging.INFO, event, facts)

    def warning(self, event: str, /, **facts: object) -> None:
        self._log(logging.WARNING, event, facts)

    def error(self, event: str, /, **facts: object) -> None:
        self._log(logging.ERROR, event, facts)

    def _log(self, level: int, event: str, facts: Mapping[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            there = {key: value for key, value in facts.items() if value is not None}
            self._logger.log(level, event, extra={_FACTS: there})


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """A record's facts; those of a library's record are none."""
    facts: dict[str, Any] = getattr(record, _FACTS, {})
    return facts


def _time_of(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """``TIME level event key=value …``; values with blanks or quotes are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        facts = "".join(f" {key}={_text(value)}" for key, value in facts_of(record).items())
        line = f"{_time_of(record)} {record.levelname.lower():<7} {record.getMessage()}{facts}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _text(value: object) -> str:
    text = str(value)
    plain = text and not any(c.isspace() or c in "\"'=" for c in text)
    return text if plain else json.dumps(text, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``timestamp``, ``level``, ``logger``, ``event``, then the facts."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "timestamp": _time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix("ebpflb."),
            "event": record.getMessage(),
            **facts_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(*, json: bool, verbose: bool) -> None:
    """``json`` for machines, else text for people; ``verbose`` adds what only debugging needs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("ebpflb").setLevel(logging.DEBUG if verbose else logging.INFO)
