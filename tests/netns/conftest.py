# SPDX-License-Identifier: Apache-2.0
"""What the tests with real sockets share: the cluster, Services and sockets of a test's own.

And, for all of them together: that nothing is left behind when they are done.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.lab import Namespace, janitor
from tests.netns.agents import wait_until
from tests.netns.services import Spec
from tests.netns.sockets import Form
from tests.netns.world import Handle, MakeService, MakeServices, OpenSocket, Way, World, served


def _children() -> list[str]:
    """The processes that this one started and that have not ended."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, fields = status.read_text().rpartition(")")
            if int(fields.split()[1]) == os.getpid():
                found.append(name)
    return found


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """No namespace, cgroup, pin, folder or process outlives the tests that made it.

    What was there before is somebody else's to take away: tests with an API server have a lab that
    may outlast these.
    """
    before, others = set(_children()), set(_our_labs())
    yield
    assert set(_our_labs()) - others == set()
    wait_until(lambda: set(_children()) <= before, what="every process that was started has ended")


def _our_labs() -> list[str]:
    """The labs that this process made and of which there is anything."""
    names = (Path(path).name for path in janitor.leftovers())
    found = (re.search(rf"{os.getpid()}-\d+", name) for name in names)
    return [lab[0] for lab in found if lab]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The cluster that tests share, with its agent running."""
    with served(tmp_path_factory.mktemp("world")) as one:
        yield one


@pytest.fixture
def services(world: World) -> Iterator[MakeServices]:
    """Makes Services that are served at once and go with the test; see ``World.spec``."""
    made: list[Spec] = []

    def make(count: int, **options: Any) -> list[Handle]:
        specs = [world.spec(**options) for _ in range(count)]
        made.extend(specs)
        return world.services(*specs)

    yield make
    world.agent.manifests.remove(*(spec.name for spec in made))


@pytest.fixture
def service(services: MakeServices) -> MakeService:
    """The same, one by one."""

    def make(**options: Any) -> Handle:
        return services(1, **options)[0]

    return make


@pytest.fixture
def open_socket(world: World) -> Iterator[OpenSocket]:
    """Makes sockets of a pod or of the node; they are closed with the test."""
    with contextlib.ExitStack() as stack:

        def make(
            place: Namespace,
            form: Form,
            kind: socket.SocketKind = socket.SOCK_DGRAM,
            protocol: int = 0,
        ) -> socket.socket:
            return stack.enter_context(world.socket(place, form, kind, protocol))

        yield make


@pytest.fixture(params=list(Form), ids=lambda form: form.value)
def form(request: pytest.FixtureRequest) -> Form:
    """Each of the three ways to spell an address."""
    chosen: Form = request.param
    return chosen


@pytest.fixture(params=list(Way), ids=lambda way: way.value)
def way(request: pytest.FixtureRequest) -> Way:
    """Each of the three ways to ask."""
    chosen: Way = request.param
    return chosen
