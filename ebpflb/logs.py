# SPDX-License-Identifier: Apache-2.0
"""How the agent's log looks: one event a line, with its facts as key-value pairs, on stderr."""

from __future__ import annotations

import logging
import sys

import structlog


def _drop_absent(
    _logger: object, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """A fact that is not there is not printed."""
    return {key: value for key, value in event.items() if value is not None}


def configure(*, json: bool, verbose: bool) -> None:
    """``json`` for machines, else text for people; ``verbose`` adds what only debugging needs."""
    renderer: structlog.typing.Processor
    if json:
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            exception_formatter=structlog.dev.plain_traceback,
            pad_event=0,
        )
    structlog.configure(
        processors=[
            _drop_absent,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.INFO
        ),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
