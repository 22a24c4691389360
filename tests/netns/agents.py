# SPDX-License-Identifier: Apache-2.0
"""An agent on a node of the lab: started, watched, ended in every way, and asked.

Nothing here sleeps for a while and hopes: what is waited for is a line of the log, an answer of
/healthz, or what the maps hold.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from ebpflb.lab import LabError, Node
from ebpflb.lab import wait_until as wait_briefly
from tests.netns.kernel import Kernel
from tests.netns.services import Manifests

ROOT = Path(__file__).parents[2]
START_S = 60.0
SYNC_S = 30.0
EBPFLB = (sys.executable, "-m", "ebpflb")
OLD_KERNEL = (sys.executable, str(Path(__file__).with_name("old_kernel.py")))
"""The command that refuses as on kernels before 5.18."""

# Maps of a size that is quickly read; what a test has to say about sizes it says itself.
SMALL = (
    "frontends=2048,ports=1024,backends=4096,affinity=1024,members=2048,udp_conn=2048,names=1024"
)

Entry = dict[str, Any]
T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, timeout_s: float = SYNC_S, what: str) -> T:
    """The lab's, with a deadline for what an agent must do on a machine that is busy elsewhere."""
    return wait_briefly(condition, timeout_s=timeout_s, what=what)


class Agent:
    """``ebpflb run`` on a node, with one folder of manifests. One process at a time.

    ``flags`` come behind those that the place demands, so that they win.
    """

    def __init__(
        self,
        node: Node,
        manifests: Manifests,
        *flags: str,
        command: Sequence[str] = EBPFLB,
        env: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> None:
        self.node = node
        self.manifests = manifests
        self.kernel = Kernel(node.pin_path, node.cgroup_root)
        self.log_path = manifests.folder.with_suffix(f".{len(list(_logs(manifests)))}.log")
        self._command = [
            *within,
            *command,
            "run",
            *("--manifests", str(manifests.folder)),
            *("--pin-path", str(node.pin_path)),
            *("--cgroup", str(node.cgroup_root)),
            *("--hostname-override", node.name),
            *("--log-format", "json"),
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
        self._started_at = len(self.log_path.read_bytes())
        with self.log_path.open("ab") as log:
            self._process = self.node.popen(
                self._command, stdout=log, stderr=subprocess.STDOUT, env=self._env, cwd="/"
            )
        return self

    def start(self) -> Self:
        """Start it and wait until the first sync is done: from then on Services are served."""
        self.launch()
        self.wait_for("synced", timeout_s=START_S)
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

    def terminate(self) -> int:
        """SIGTERM; returns its exit code."""
        return self.end(signal.SIGTERM)

    def kill(self) -> int:
        """SIGKILL, in the middle of whatever it does."""
        return self.end(signal.SIGKILL)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self, timeout_s: float = START_S) -> int:
        """Wait for its end; returns its exit code."""
        return self.process.wait(timeout_s)

    def restart(self, number: signal.Signals = signal.SIGTERM) -> Self:
        self.end(number)
        return self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.alive:
            self.kill()

    # --- what it says ---------------------------------------------------------------------------

    @property
    def mark(self) -> int:
        """The end of the log so far: an argument ``since`` for later."""
        return len(self.log_path.read_bytes())

    def log(
        self, event: str | None = None, *, since: int | None = None, **fields: Any
    ) -> list[Entry]:
        """The log's entries of this process (or ``since`` a mark) that say all of this."""
        entries = []
        text = self.log_path.read_bytes()[self._started_at if since is None else since :]
        for line in text.decode(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and (event is None or entry.get("event") == event):
                    entries.append(entry)
        return [one for one in entries if all(one.get(k) == v for k, v in fields.items())]

    @property
    def text(self) -> str:
        """All that this process has said, as it stands there."""
        return self.log_path.read_bytes()[self._started_at :].decode(errors="replace")

    def wait_for(
        self, event: str, *, timeout_s: float = SYNC_S, since: int | None = None, **fields: Any
    ) -> Entry:
        """Wait for a line of the log; returns the first that says all of this."""
        found: list[Entry] = []

        def said() -> bool:
            found[:] = self.log(event, since=since, **fields)
            return bool(found) or not self.alive

        try:
            wait_until(said, timeout_s=timeout_s, what=f"{self.node.name}'s agent says {event!r}")
        except LabError as error:
            error.add_note(self.text[-3000:])
            raise
        if not found:
            raise LabError(
                f"the agent ended with {self.wait()} and never said {event!r}:\n{self.text[-3000:]}"
            )
        return found[0]

    def complaints(self) -> list[Entry]:
        """What it has said as an error, and what is no line of its log at all."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        found = []
        for line in lines:
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"level": "error", "event": line}
            if entry.get("level") in {"error", "critical"}:
                found.append(entry)
        return found

    # --- what it did ----------------------------------------------------------------------------

    def settle(self, *, timeout_s: float = SYNC_S) -> None:
        """Wait until the maps are what the files say, and hold nothing else."""
        plan = self.manifests.plan(self.node.name)
        try:
            wait_until(
                lambda: self.kernel.follows(plan),
                timeout_s=timeout_s,
                what="the maps follow the manifests",
            )
        except LabError as error:
            error.add_note("\n".join(map(str, self.kernel.differences(plan)[:10])))
            error.add_note(self.text[-3000:])
            raise

    def get(self, path: str, *, port: int = 10256) -> tuple[int, str]:
        """(status, body) of one of its HTTP servers, asked on the node's loopback."""

        def ask() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
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


def _logs(manifests: Manifests) -> list[Path]:
    return list(manifests.folder.parent.glob(f"{manifests.folder.name}.*.log"))
