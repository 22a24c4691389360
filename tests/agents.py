# SPDX-License-Identifier: Apache-2.0
"""An agent on a node of the lab: started, watched, ended in every way, and asked.

Nothing here sleeps for a while and hopes: what is waited for is a line of the log, an answer of
its endpoints, or what a test's own subclass can see.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from ebpflb.lab import LabError, Node, wait_until

ROOT: Final = Path(__file__).parents[1]
EBPFLB: Final = (sys.executable, "-m", "ebpflb")
START_S: Final = 60.0
LOG_S: Final = 30.0

Entry = dict[str, Any]


class AgentProcess:
    """``ebpflb run`` on a node with its pins and cgroup; one process at a time.

    ``flags`` say where the Services come from, and whatever else is wanted; ``within`` is a command
    that starts it, such as one that gives it another view of files.
    """

    def __init__(
        self,
        node: Node,
        log_path: Path,
        *flags: str,
        log_format: str = "json",
        command: Sequence[str] = EBPFLB,
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.node = node
        self.log_path = log_path
        self._command = [
            *(*within, *command, "run"),
            *("--pin-path", str(node.pin_path), "--cgroup", str(node.cgroup_root)),
            *("--hostname-override", node.name, "--log-format", log_format),
            *flags,
        ]
        self._env = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0
        self.log_path.touch()

    # --- life and death -------------------------------------------------------------------------

    def launch(self) -> Self:
        """Start the process and wait for nothing."""
        assert not self.alive, "it runs already"
        self._started_at = self.mark
        with self.log_path.open("ab") as log:
            self._process = self.node.popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._env, cwd="/"
            )
        return self

    def start(self) -> Self:
        """Start it and wait until Services are served."""
        return self.launch().serving()

    def serving(self) -> Self:
        """Wait until its first sync is done, in whatever format it says so."""
        with self._last_words():
            wait_until(
                lambda: not self.alive or "synced" in self.text(),
                timeout_s=START_S,
                what=f"{self.node.name}'s agent serves",
            )
            if not self.alive:
                raise LabError(f"the agent ended with {self.wait()}")
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "it was never started"
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal that ends it; returns its exit code."""
        self.process.send_signal(number)
        return self.wait()

    def kill(self) -> int:
        """SIGKILL, in the middle of whatever it does."""
        return self.end(signal.SIGKILL)

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for its end; returns its exit code."""
        return self.process.wait(timeout_s)

    def restart(self, number: signal.Signals = signal.SIGTERM) -> Self:
        self.end(number)
        return self.start()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """It is stopped (SIGSTOP) meanwhile, as on a node that hangs."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        """Start it, where that has not been done yet."""
        return self if self.alive else self.start()

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self.kill()

    # --- what it says ---------------------------------------------------------------------------

    @property
    def mark(self) -> int:
        """The end of the log so far: an argument ``since`` for later."""
        return self.log_path.stat().st_size

    def text(self, *, since: int | None = None) -> str:
        """What this process has said (or what was said ``since`` a mark), as it stands there."""
        said = self.log_path.read_bytes()[self._started_at if since is None else since :]
        return said.decode(errors="replace")

    def log(
        self, event: str | None = None, *, since: int | None = None, **fields: Any
    ) -> list[Entry]:
        """The log's entries of this process (or ``since`` a mark) that say all of this."""
        entries = []
        for line in self.text(since=since).splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and event in {None, entry.get("event")}:
                    entries.append(entry)
        return [one for one in entries if all(one.get(k) == v for k, v in fields.items())]

    def wait_for(
        self, event: str, *, timeout_s: float = LOG_S, since: int | None = None, **fields: Any
    ) -> Entry:
        """Wait for a line of the log; returns the first that says all of this."""
        found: list[Entry] = []

        def said() -> bool:
            found[:] = self.log(event, since=since, **fields)
            return bool(found) or not self.alive

        with self._last_words():
            wait_until(said, timeout_s=timeout_s, what=f"{self.node.name}'s agent says {event!r}")
            if not found:
                raise LabError(f"the agent ended with {self.wait()} and never said {event!r}")
        return found[0]

    @contextlib.contextmanager
    def _last_words(self) -> Iterator[None]:
        """Whoever waits in vain is told what it said at last."""
        try:
            yield
        except LabError as error:
            error.add_note(self.text()[-3000:])
            raise

    # --- what it answers ------------------------------------------------------------------------

    def get(self, path: str, *, port: int = 10256) -> tuple[int, str]:
        """(status, body) of one of its HTTP servers, asked on the node's loopback."""

        def ask() -> tuple[int, str]:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            try:
                with opener.open(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        return self.node.inside(ask)

    def metrics(self) -> dict[str, float]:
        """Samples by name with labels, as /metrics prints them."""
        status, body = self.get("/metrics", port=10249)
        assert status == 200, body
        samples = (line.rpartition(" ") for line in body.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}
