# SPDX-License-Identifier: Apache-2.0
"""A day's changes in minutes, with the API server and etcd killed on the way.

`make test-full` makes 10,000 changes, CI fewer. The seed stands in the output of a test that fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import pytest

from ebpflb.lab import Lab, Outcome
from tests.e2e.churn import Churn
from tests.e2e.objects import DNS, HTTP, Objects
from tests.e2e.world import FULL, World, reaches

CHANGES: Final = 10_000 if FULL else 1_500
API_DEATHS: Final = 9 if FULL else 3
ETCD_DEATHS: Final = 3 if FULL else 1
SERVICES: Final = 60
PAGE: Final = 60
TIMEOUT_S: Final = 1500 if FULL else 600

pytestmark = pytest.mark.timeout(TIMEOUT_S)


class Day(msgspec.Struct):
    """What is left of it: the cluster as it is then, and what clients of a quiet Service saw."""

    world: World
    seed: int
    churn: Churn
    seen: list[Outcome]
    log: str

    def logs(self) -> dict[str, str]:
        """Of which seed it was, and what everybody said."""
        return {"seed": str(self.seed), **self.world.logs()}


@pytest.fixture(scope="module")
def day() -> Iterator[Day]:
    seed = random.SystemRandom().randrange(1 << 32)
    with Lab("churn") as lab, World(lab) as world:
        world.start_agents("--audit-period", "2s", log_format="text")
        objects = Objects(world.admin)
        churn = Churn(objects, world.backends, services=SERVICES, seed=seed)
        quiet = objects.service(HTTP, DNS).endpoints(*world.backends)
        for ip in quiet.ips:
            reaches(world.client, ip, 80, {"be1", "be2", "be3"})
        since = world.agent.mark
        loops = [
            world.client.tcp_loop(quiet.ips[0], 80, interval_s=0.01),
            world.node.tcp_loop(quiet.ips[1], 80, interval_s=0.01),
            world.client.udp_loop(quiet.ips[0], 53, sockets=2, interval_s=0.02),
        ]
        deaths = _deaths(world)
        for number in range(CHANGES):
            churn.change()
            for die in deaths.get(number, []):
                die()
                world.cluster.start()
        # Each watch tells in order: who has followed these two has followed everything.
        last = objects.service(HTTP, DNS).endpoints(world.backends[1])
        reaches(world.client, last.ip, 80, {"be2"})
        quiet.endpoints(world.backends[2])
        reaches(world.client, quiet.ip, 80, {"be3"})
        seen = [loop.stop() for loop in loops]
        yield Day(world, seed, churn, seen, world.agent.text(since=since))


def _deaths(world: World) -> dict[int, list[Callable[[], None]]]:
    """Who is killed after which change."""
    found: dict[int, list[Callable[[], None]]] = {}
    for part, times in (
        (world.cluster.apiserver, API_DEATHS),
        (world.cluster.etcd, ETCD_DEATHS),
    ):
        for number in range(times):
            found.setdefault((number + 1) * CHANGES // (times + 1), []).append(part.kill)
    return found


def test_nobody_who_dialled_noticed(day: Day) -> None:
    for outcome in day.seen:
        assert outcome.failed == 0, outcome
        assert outcome.good > 100


def test_check_finds_nothing(day: Day) -> None:
    """B-99: the API server's truth against the maps, once, with no second chance."""
    said = day.world.agent.command(
        *("check", "--kubeconfig", day.world.lab.folder / "n1.kubeconfig"),
        *("--hostname-override", day.world.node.name, "--cgroup", day.world.node.cgroup_root),
        check=False,
    )
    assert said.returncode == 0, said.stdout + said.stderr
    assert "no difference" in said.stdout
    assert said.stderr == ""


def test_no_audit_had_anything_to_repair(day: Day) -> None:
    """Every two seconds, in the middle of all that."""
    metrics = day.world.agent.metrics()
    assert metrics["ebpflb_audits_total"] > 2
    assert metrics["ebpflb_audit_repairs_total"] == 0
    assert metrics["ebpflb_audit_failures_total"] == 0


def test_every_frontend_leads_where_the_day_left_it(day: Day) -> None:
    """The same, told by clients, against a model that shares nothing with the planner."""
    assert day.churn.verify(day.world.client, day.world.node) > SERVICES


def test_the_log_is_a_page(day: Day) -> None:
    """What an operator needs: when the API server was lost and when it was back."""
    lines = day.log.splitlines()
    assert len(lines) <= PAGE, f"{len(lines)} lines:\n" + "\n".join(lines[:100])
    assert max(map(len, lines), default=0) <= 400
    assert day.world.agent.faults() == []
