# SPDX-License-Identifier: Apache-2.0
"""Follows something that the kernel knows and tells of by netlink: read, and read again when told.

The kernel's messages say no more than that something is different; what is emitted is always what
has been read, so that a lost message is only another reason to read. This file must not know what
is read.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

RETRY_MIN_S: Final = 1.0
RETRY_MAX_S: Final = 30.0
SETTLE_S: Final = 0.05
"""So long what changes is gathered: an interface mostly gets several addresses at once."""

_MESSAGE_BYTES: Final = 65536

T = TypeVar("T")


class Notice(Protocol):
    def __call__(self, event: str, /, **fields: object) -> None: ...


class KernelWatch(Generic[T]):
    """Emits what ``read`` returns, as it is at first and then whenever it is another.

    ``start`` emits the first before it returns, unless it cannot be read: then, and after any
    failure (OSError), the thread tries again, after 1, 2, 4 … 30 seconds, and ``notice`` is told
    once, with ``failed`` as the event.

    ``subscribe`` makes the netlink socket; it watches the network namespace of the thread that
    calls ``start``.
    """

    def __init__(
        self,
        name: str,
        emit: Callable[[T], None],
        notice: Notice,
        *,
        read: Callable[[], T],
        subscribe: Callable[[], socket.socket],
        failed: str,
        settle_s: float = SETTLE_S,
        retry_min_s: float = RETRY_MIN_S,
    ) -> None:
        self._emit = emit
        self._notice = notice
        self._read = read
        self._subscribe = subscribe
        self._failure = failed
        self._settle_s = settle_s
        self._retry_min_s = self._retry_s = retry_min_s
        self._failed = False
        self._told: T | None = None
        self._changes: socket.socket | None = None
        self._stopping = threading.Event()
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._look()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; after that nothing is emitted. To be called once."""
        self._stopping.set()
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._unsubscribe()
        os.close(self._stop_fd)

    def alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        while self._wait():
            self._look()

    def _look(self) -> None:
        try:
            if self._changes is None:
                self._changes = self._subscribe()  # before reading: what comes later is told
            now = self._read()
        except OSError as error:
            if not self._failed:
                self._notice(self._failure, reason=str(error))
            self._failed = True
            return
        self._failed, self._retry_s = False, self._retry_min_s
        if now != self._told:
            self._told = now
            self._emit(now)

    def _wait(self) -> bool:
        """Until it is worth looking; False where it is to end."""
        if self._failed:
            wait_s, self._retry_s = self._retry_s, min(2 * self._retry_s, RETRY_MAX_S)
            return not self._stopping.wait(wait_s)
        if self._changes is not None:
            poll = select.poll()
            for one in (self._changes.fileno(), self._stop_fd):
                poll.register(one, select.POLLIN)
            poll.poll()
        if self._stopping.wait(self._settle_s):
            return False
        self._empty()
        return True

    def _empty(self) -> None:
        """Take what has been told meanwhile; a subscription that fails is made anew."""
        try:
            while self._changes is not None and self._changes.recv(_MESSAGE_BYTES):
                pass
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                return  # the next wait finds what is left, and ends at once
        self._unsubscribe()

    def _unsubscribe(self) -> None:
        if self._changes is not None:
            self._changes.close()
            self._changes = None
