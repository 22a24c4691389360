# SPDX-License-Identifier: Apache-2.0
"""An agent that takes its Services from the API server."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from ebpflb.lab import Node
from tests.agents import EBPFLB, ROOT, AgentProcess


class Agent(AgentProcess):
    """``flags`` say whence; ``options`` are an AgentProcess's.

    It serves sockets alone: what becomes of packets does not depend on where Services come from.
    """

    def __init__(self, node: Node, *flags: str, **options: Any) -> None:
        log = node.lab.folder / f"agent-{node.name}.log"
        super().__init__(node, log, "--devices=", "--pod-devices=", *flags, **options)

    def faults(self) -> list[str]:
        """Lines of all its logs that no outage of an API server accounts for."""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return [line for line in lines if _is_fault(line)]

    def failures(self) -> dict[str, float]:
        """How often a request to the API server failed, by what its metric's labels say."""
        name = "ebpflb_api_failures_total"
        return {key: count for key, count in self.metrics().items() if key.startswith(name)}

    def command(
        self, *arguments: str | Path, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run another command of ebpflb's on the node, for this agent's pins."""
        return self.node.run(
            [*EBPFLB, *arguments, "--pin-path", self.node.pin_path],
            check=check,
            env={"PYTHONPATH": str(ROOT)},
        )

    def entries(self, service: str) -> Any:
        """What the maps hold of a Service ``ns/name``, where it lies included."""
        maps = ("frontends", "ports", "backends", "members")
        said = self.command("map", "dump", *maps, "--service", service, "-o", "json")
        return json.loads(said.stdout)


def _is_fault(line: str) -> bool:
    try:
        entry = json.loads(line)
    except ValueError:
        return bool(re.search(r"^Error:|^\S+ (error|critical) |Traceback", line))
    return entry.get("level") in {"error", "critical"} or "Traceback" in line
