# SPDX-License-Identifier: Apache-2.0
"""Grace periods: when may what was taken out of use be used again?

A ticket is drawn for what was freed; it is done once a whole grace period of the kernel's lies
behind it. One thread waits for everything freed meanwhile, so nobody else ever does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from ebpflb.errors import DatapathError
from ebpflb.logs import Log

_log = Log("grace")

RETRY_S = 1.0


class Gate(Protocol):
    def ticket(self) -> int:
        """A number for what was freed just now."""
        ...

    def done(self) -> int:
        """Every ticket up to this number is past its grace period."""
        ...

    def close(self) -> None: ...


class KernelGate:
    """The gate of a running agent. ``wake`` is called, from the waiting thread, after each one."""

    def __init__(self, wait: Callable[[], None], wake: Callable[[], None]) -> None:
        self._wait = wait
        self._wake = wake
        self._drawn = 0
        self._done = 0
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="grace", daemon=True)
        self._thread.start()

    def ticket(self) -> int:
        with self._changed:
            self._drawn += 1
            self._changed.notify()
            return self._drawn

    def done(self) -> int:
        return self._done

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._drawn > self._done)
                if self._closed:
                    return
                drawn = self._drawn
            try:
                self._wait()
            except DatapathError as error:
                # Nothing may be used again before this has worked; a thread less would freeze all.
                _log.error("no grace period; trying again", reason=str(error), retry_s=RETRY_S)
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, timeout=RETRY_S)
                continue
            self._done = drawn
            self._wake()
