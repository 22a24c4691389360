"""What holds for every test: its marker, what it needs, when a skip is a failure, what may stay.

Fixtures of one kind of test belong into that folder's own conftest.py.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

from ebpflb.lab import LabError, janitor, wait_until

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

HERE = Path(__file__).parent
FOLDERS = frozenset({"unit", "property", "scenario", "bpf", "netns", "apiserver", "e2e", "bench"})
ROOT_FOLDERS = frozenset({"bpf", "netns", "e2e", "bench"})

os.environ.setdefault("EBPFLB_WERROR", "1")  # a warning is for us to mend, not for a node

IN_CI = os.environ.get("CI", "").lower() not in {"", "0", "false"}
EXCUSE = "kernel lacks "

# No deadline: the time that one example takes says more about the machine's neighbours than us.
hypothesis.settings.register_profile("default", deadline=None)
# CI says the same of the same commit (.ci/run fixes the order too); new examples are our own runs'.
hypothesis.settings.register_profile("ci", deadline=None, max_examples=300, derandomize=True)
hypothesis.settings.load_profile("ci" if IN_CI else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its folder's marker, and skip what needs root where there is none."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        folder = item.path.relative_to(HERE).parts[0]
        if folder in FOLDERS:
            item.add_marker(folder)
        if folder in ROOT_FOLDERS:
            item.add_marker("root")
        if os.geteuid() != 0 and item.get_closest_marker("root"):
            item.add_marker(pytest.mark.skip(reason="needs root: sudo make test"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a test's skip into a failure where it could have run."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        _fail_unless_excused(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a whole module's skip into a failure where it could have run."""
    report = yield
    if report.skipped:
        _fail_unless_excused(report)
    return report


def _fail_unless_excused(report: pytest.TestReport | pytest.CollectReport) -> None:
    longrepr = report.longrepr
    reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    reason = reason.removeprefix("Skipped: ")
    if IN_CI and not reason.startswith(EXCUSE):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped, and CI is set: {reason}\n"
            f"(there a skip is a failure unless its reason begins with {EXCUSE!r})"
        )


# --- what may stay ----------------------------------------------------------------------------


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No namespace, cgroup, pin, folder or process outlives the tests that made it.

    Of the whole session, and so made before any other fixture of its scope and asked after the
    last of them: a cluster that tests share may start programs anew while it lasts.
    """
    before = set(_children())
    yield
    if os.geteuid() == 0:
        assert _our_labs() == set()
    with contextlib.suppress(LabError):
        wait_until(lambda: set(_children()) <= before, timeout_s=30, what="all have ended")
    assert set(_children()) - before == set()


def _children() -> list[str]:
    """The processes that this one started and that have not ended: number and name."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = status.read_text().rpartition(")")
            if int(fields.split()[1]) == os.getpid():
                found.append(name)
    return found


def _our_labs() -> set[str]:
    """The labs that this process made and of which there is anything."""
    names = (Path(path).name for path in janitor.leftovers())
    found = (re.search(rf"{os.getpid()}-\d+", name) for name in names)
    return {lab[0] for lab in found if lab}
