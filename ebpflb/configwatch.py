# SPDX-License-Identifier: Apache-2.0
"""Whether the configuration file still says what the agent was started with (CFG-51).

Looks a few times a minute rather than asking the kernel to tell, because what is watched is mostly
a link that kubelet swaps. This file must not know what the file says, nor how an agent ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

INTERVAL_S: Final = 2.0


class ConfigWatch:
    """Calls ``changed``, once and on a thread of its own, when ``path`` holds something else.

    A file that is touched, or written anew with what it said before, has not changed; one that is
    not there or cannot be read at the moment is waited for. ``content`` is what was read from it.
    """

    def __init__(
        self,
        path: Path,
        content: bytes,
        changed: Callable[[], None],
        *,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._path = path
        self._content = content
        self._changed = changed
        self._interval_s = interval_s
        self._stamp: tuple[int, ...] = ()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="config-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def has_changed(self) -> bool:
        """Look once."""
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return False
            content = self._path.read_bytes()
        except OSError:
            return False
        self._stamp = stamp
        return content != self._content

    def _run(self) -> None:
        while not self.has_changed():
            if self._stopping.wait(self._interval_s):
                return
        self._changed()


def _stamp(path: Path) -> tuple[int, ...]:
    """What differs when a file is written to or another one takes its place, also behind a link."""
    stat = path.stat()
    return (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
