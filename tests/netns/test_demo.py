# SPDX-License-Identifier: Apache-2.0
"""The demo, from its first line to its last: what a newcomer meets first."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def told() -> str:
    """What the demo says; it must end well."""
    done = subprocess.run(
        [sys.executable, "-m", "ebpflb", "demo"],
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_clients_outside_and_in_virtual_machines_are_served_by_packets(told: str) -> None:
    served = [
        line for line in told.splitlines() if line.startswith(("   laptop   ", "   vm-pod   "))
    ]
    assert len(served) == 2
    assert all("web-" in line for line in served)


def test_the_kernel_holds_what_the_manifests_say(told: str) -> None:
    assert "no difference: 4 service ports" in told


def test_the_data_path_outlives_the_agent(told: str) -> None:
    assert told.count("connects meanwhile, failed: 0") == 1


def test_the_demo_leaves_nothing_behind(told: str) -> None:
    assert told.rstrip().endswith("no namespace, cgroup, pin or process is left.")
