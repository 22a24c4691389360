# SPDX-License-Identifier: Apache-2.0
"""What the tests with real sockets share: the cluster, Services and sockets of a test's own."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from ebpflb.lab import Namespace
from ebpflb.model import Family
from tests.netns.services import Spec
from tests.netns.sockets import Form
from tests.netns.world import Handle, MakeService, MakeServices, OpenSocket, Way, World, served

# Each of these starts agents on several nodes again and again: CI has no time for all of them.
IN_FULL_ONLY = (
    "test_bridges.py",
    "test_forward_drop.py",
    "test_mtu.py",
    "test_overlay.py",
    "test_packet_path.py",
    "test_packet_policies.py",
    "test_packet_restart.py",
    "test_ping.py",
    "test_port_reuse.py",
    "test_reach_settings.py",
    "test_two_uplinks.py",
)

collect_ignore = [] if os.environ.get("EBPFLB_TEST_FULL") else list(IN_FULL_ONLY)


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


@pytest.fixture(params=list(Family), ids=lambda family: family.label)
def family(request: pytest.FixtureRequest) -> Family:
    """Each of the two."""
    chosen: Family = request.param
    return chosen


@pytest.fixture(params=list(Way), ids=lambda way: way.value)
def way(request: pytest.FixtureRequest) -> Way:
    """Each of the three ways to ask."""
    chosen: Way = request.param
    return chosen
