# SPDX-License-Identifier: Apache-2.0
"""An agent with a folder of manifests, and whether the kernel's maps are what they say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from ebpflb.lab import LabError, Node
from ebpflb.lab import wait_until as wait_briefly
from ebpflb.node import local_addresses
from ebpflb.planner.options import PlannerOptions
from tests.agents import EBPFLB, LOG_S, ROOT, START_S, AgentProcess, Entry
from tests.netns.kernel import Kernel
from tests.netns.services import Manifests

__all__ = ["EBPFLB", "OLD_KERNEL", "ROOT", "SERVES_PACKETS", "SMALL", "Agent", "wait_until"]

OLD_KERNEL: Final = (sys.executable, str(Path(__file__).with_name("old_kernel.py")))
"""The command that refuses as on kernels before 5.18."""

SMALL: Final = (
    "frontends=2048,ports=1024,backends=4096,affinity=1024,members=2048,udp_conn=2048,names=1024,"
    "node_addrs=64"
)
"""Sizes of maps that are quickly read; what a test has to say about sizes it says itself."""

SERVES_PACKETS: Final = "packets are served"
"""What an agent says when its programs are on the devices, and proved; after it serves sockets."""

T = TypeVar("T")


def wait_until(condition: Callable[[], T], *, timeout_s: float = LOG_S, what: str) -> T:
    """The lab's, with a deadline for what an agent must do on a machine that is busy elsewhere."""
    return wait_briefly(condition, timeout_s=timeout_s, what=what)


class Agent(AgentProcess):
    """``flags`` come behind those that the place demands, so that they win.

    ``plans_by`` says what some of them come to, by the names of ``PlannerOptions``.
    """

    def __init__(
        self,
        node: Node,
        manifests: Manifests,
        *flags: str,
        plans_by: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        folder = manifests.folder
        number = len(list(folder.parent.glob(f"{folder.name}.*.log")))
        log_path = folder.with_suffix(f".{number}.log")
        super().__init__(node, log_path, "--manifests", str(folder), *flags, **options)
        self.manifests = manifests
        self._plans_by = PlannerOptions(node_name=node.name, **(plans_by or {}))
        self.kernel = Kernel(node.pin_path, node.cgroup_root)

    def serving_packets(self) -> Self:
        """Wait until its programs are on the devices too; it compiles them after it serves."""
        self.serving().wait_for(SERVES_PACKETS, timeout_s=2 * START_S)
        return self

    def complaints(self) -> list[Entry]:
        """What it has said as an error, and what is no line of its log at all."""
        found = []
        for line in self.log_path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                entry = {"level": "error", "event": line}
            if entry.get("level") in {"error", "critical"}:
                found.append(entry)
        return found

    def settle(self, *, timeout_s: float = LOG_S) -> None:
        """Wait until the maps are what the files and the node's addresses say, and no more."""
        plan = self.manifests.plan(self._plans_by, self.node.inside(local_addresses))
        try:
            with self._last_words():
                wait_until(
                    lambda: self.kernel.follows(plan),
                    timeout_s=timeout_s,
                    what="the maps follow the manifests",
                )
        except LabError as error:
            error.add_note("\n".join(map(str, self.kernel.differences(plan)[:10])))
            raise
