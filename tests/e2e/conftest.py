# SPDX-License-Identifier: Apache-2.0
"""What the tests with a real API server share: its programs, a cluster, a test's own objects.

The programs are built before the first test if they are not there: `make e2e` and `make test` do
that earlier, and say so.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import pytest

from ebpflb.lab import Lab
from tests.e2e import binaries
from tests.e2e.objects import Objects
from tests.e2e.world import World

HERE = Path(__file__).parent
TIMEOUT_S = 600
NOT_BUILT = pytest.StashKey[str]()


@runtime_checkable
class HasLogs(Protocol):
    """What a failed test was about."""

    def logs(self) -> dict[str, str]:
        """The end of every log, by whose it is."""
        ...


def _ours(item: pytest.Item) -> bool:
    return item.path.is_relative_to(HERE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip where there is no Go; main's conftest makes a failure of that in CI."""
    lacking = binaries.go() is None and not binaries.built()
    for item in filter(_ours, items):
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))
        if lacking:
            item.add_marker(pytest.mark.skip(reason="needs Go to build kube-apiserver and etcd"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Build what is missing, outside of any test's time."""
    wanted = any(map(_ours, session.items)) and not session.config.option.collectonly
    if not wanted or binaries.built() or binaries.go() is None or os.geteuid():
        return
    terminal = session.config.get_terminal_writer()

    def say(line: str) -> None:
        terminal.line(f"[e2e] {line}")
        terminal.flush()

    try:
        binaries.build(say)
    except binaries.BuildError as error:
        session.config.stash[NOT_BUILT] = str(error)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of a cluster in which a test failed."""
    report = yield
    if report.failed and isinstance(item, pytest.Function):
        for value in item.funcargs.values():
            if isinstance(value, HasLogs):
                report.sections += value.logs().items()
    return report


@pytest.fixture(scope="session", autouse=True)
def programs(pytestconfig: pytest.Config) -> None:
    """They are there, or every test says why not."""
    if NOT_BUILT in pytestconfig.stash:
        pytest.fail(pytestconfig.stash[NOT_BUILT], pytrace=False)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """The cluster that tests share, with agents on both nodes."""
    with Lab("e2e") as lab, World(lab, nodes=2) as one:
        one.start_agents()
        yield one
        assert [agent.faults() for agent in one.agents] == [[], []]


@pytest.fixture
def objects(world: World) -> Iterator[Objects]:
    """Makes objects in the shared cluster that go with the test."""
    made = Objects(world.admin)
    yield made
    made.clear()
