# SPDX-License-Identifier: Apache-2.0
"""Every story in stories/, told to the planner and the writer, on maps in memory and the kernel's.

After each change, whatever the story asks of it: the plan is what a new planner makes of the
objects that are there, the maps are as planned and hold nothing else, and no part failed.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from ebpflb.datapath.ebpf import audit
from ebpflb.datapath.ebpf.maps import PinFolder, sizes
from ebpflb.datapath.ebpf.tables import KernelTables, Tables, read
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.model import Deleted, Event, LocalAddresses, ObjectKey, Plan, parse_address
from ebpflb.planner.options import PlannerOptions
from ebpflb.planner.plan import Planner
from tests.builders import told
from tests.memory_tables import ManualGate, MemoryTables
from tests.scenario.printed import map_lines, plan_text
from tests.scenario.story import Step, api_object, node_object, read_story

FOLDER = Path(__file__).with_name("stories")
STORIES = sorted(FOLDER.glob("*.txt"))
SMALL = {
    "frontends": 256,
    "ports": 64,
    "backends": 1024,
    "affinity": 16,
    "members": 1024,
    "udp_conn": 16,
    "names": 64,
    "node_addrs": 64,
    "flows_new": 16,
    "conntrack": 16,
    "source_ranges": 64,
    "service_addrs": 256,
}
ROUNDS = 8
"""A change waits for a few grace periods at most."""


class Run:
    """One story on one set of tables."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.gate = ManualGate()
        self.writer = Writer(tables, self.gate)
        self.options = PlannerOptions(node_name="n1")
        self.objects: dict[object, Event] = {}
        self.planner = Planner(self.options)

    def step(self, step: Step) -> None:
        getattr(self, f"_{step.word}")(step)

    # --- what happens ---------------------------------------------------------------------------

    def _options(self, step: Step) -> None:
        said: dict[str, Any] = yaml.safe_load(step.body)
        self.options = msgspec.convert(
            {"node_name": self.options.node_name, **said}, PlannerOptions
        )
        self.planner = Planner(self.options)
        for event in self.objects.values():
            self.planner.apply(event)
        self._follow()

    def _node(self, step: Step) -> None:
        (name,) = step.arguments
        self.options = msgspec.structs.replace(self.options, node_name=name)
        self.planner = Planner(self.options)
        self._tell(told(node_object(name, yaml.safe_load(step.body) or {})))

    def _local(self, step: Step) -> None:
        self._tell(LocalAddresses(frozenset(map(parse_address, step.arguments))))

    def _apply(self, step: Step) -> None:
        kind, name = step.arguments
        self._tell(told(api_object(kind, name, step.body)))

    def _delete(self, step: Step) -> None:
        kind, name = step.arguments
        namespace, _, short = name.rpartition("/")
        self._tell(Deleted(ObjectKey(kind, namespace, short)))

    def _tell(self, event: Event) -> None:
        if isinstance(event, LocalAddresses):
            self.objects["local"] = event
        else:
            key = event.key if hasattr(event, "key") else event.obj.key  # type: ignore[union-attr]
            self.objects.pop(key, None)
            if not isinstance(event, Deleted):
                self.objects[key] = event
        self.planner.apply(event)
        self._follow()

    def _follow(self) -> None:
        """Plan and write; then everything must agree, and there is no more to write."""
        update = self.planner.update()
        changed = update.changed
        for _ in range(ROUNDS):
            report = self.writer.sync(update.plan, changed)
            assert report.failed == {}
            changed = report.deferred
            self._grace()
            if not report.writes and not changed:
                break
        assert not changed, f"{changed} still wait"
        fresh = Planner(self.options)
        for event in self.objects.values():
            fresh.apply(event)
        fresh.update()
        assert plan_text(self.planner.plan) == plan_text(fresh.plan)
        assert audit.differences(update.plan, read(self.tables)) == []

    def _grace(self) -> None:
        self.gate.passed = self.gate.drawn
        if isinstance(self.tables, MemoryTables):
            self.tables.grace()
        self.writer.release()

    # --- what must be ---------------------------------------------------------------------------

    def _plan(self, step: Step) -> None:
        assert plan_text(self.planner.plan).splitlines() == step.body.splitlines()

    def _unserved(self, step: Step) -> None:
        said = [f"{one.key}: {one.reason}" for one in self.planner.rejected]
        assert said == [line for line in step.body.splitlines() if line != "nothing"]

    def _maps(self, step: Step) -> None:
        there = map_lines(read(self.tables))
        wanted = step.body.splitlines()
        assert [line for line in wanted if line in there] == wanted, "\n".join(there)


def tell(path: Path, tables: Tables) -> None:
    run = Run(tables)
    for step in read_story(path).steps:
        try:
            run.step(step)
        except Exception as error:
            error.add_note(f"{path.name}:{step.line}: {step.word} {' '.join(step.arguments)}")
            raise
    last = Plan({})
    run.writer.sync(last, None)
    run._grace()
    run.writer.sync(last, None)
    run._grace()
    assert audit.differences(last, read(tables)) == []


@contextlib.contextmanager
def kernel_tables(**more: int) -> Iterator[Tables]:
    """Tables of the kernel's, small but for ``more`` sizes."""
    folder = PinFolder(Path(f"/sys/fs/bpf/ebpflb-story-{os.getpid()}-{uuid.uuid4().hex[:8]}"))
    folder.create()
    try:
        maps = folder.open_or_create(sizes(SMALL | more))
        with contextlib.closing(KernelTables(maps)) as tables, contextlib.ExitStack() as stack:
            for one in maps.values():
                stack.callback(one.close)
            yield tables
    finally:
        for path in folder.path.iterdir():
            path.unlink()
        folder.path.rmdir()


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_in_memory(path: Path) -> None:
    tell(path, MemoryTables())


@pytest.mark.root
@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_on_the_kernels_maps(path: Path) -> None:
    with kernel_tables() as tables:
        tell(path, tables)


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_a_story_says_what_it_is_about_and_looks_at_something(path: Path) -> None:
    story = read_story(path)
    assert story.title
    assert {step.word for step in story.steps} & {"plan", "maps", "unserved"}
