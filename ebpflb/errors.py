# SPDX-License-Identifier: Apache-2.0
"""The three exceptions of the product, each the reason why something whole cannot go on.

A bad object is none of them: the planner returns it as a ``Rejected`` and goes on.
"""

from __future__ import annotations

import errno as _errno
import os


class EbpflbError(Exception):
    """Base of the three; its text names the thing, what is wrong with it and what to do."""

    exit_code = 1


class ConfigError(EbpflbError):
    """A flag, a file or a folder that the user gave cannot be used. Exit code 2."""

    exit_code = 2


class SourceError(EbpflbError):
    """The source of cluster state cannot be read. Exit code 1."""


class DatapathError(EbpflbError):
    """A kernel operation failed.

    ``operation`` says what was tried, ``thing`` on which map, program or file, ``errno`` is the
    kernel's answer (0 where there was none). ``fatal`` tells that this kernel, or this process
    with its privileges, can never do it: exit code 3.
    """

    def __init__(
        self,
        operation: str,
        thing: str,
        errno: int = 0,
        *,
        hint: str = "",
        fatal: bool = False,
    ) -> None:
        self.operation = operation
        self.thing = thing
        self.errno = errno
        self.hint = hint
        self.fatal = fatal
        self.exit_code = 3 if fatal else 1
        text = f"{operation} {thing}"
        if errno:
            text += f": {os.strerror(errno)} ({_errno.errorcode.get(errno, errno)})"
        if hint:
            text += f": {hint}"
        super().__init__(text)
