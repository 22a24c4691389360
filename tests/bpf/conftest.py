"""What the packet tests share: two nodes, made once, and each test's as new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ebpflb.lab import Lab
from tests.bpf.node import PacketNode
from tests.bpf.packets import NETS, Net
from tests.bpf.wire import Wire


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    with Lab("packets") as one:
        yield one


@pytest.fixture(scope="session")
def the_node(lab: Lab) -> Iterator[PacketNode]:
    one = PacketNode(lab, "n1")
    yield one
    one.close()


@pytest.fixture(scope="session")
def the_other_node(lab: Lab) -> Iterator[PacketNode]:
    one = PacketNode(lab, "n2", number=2)
    yield one
    one.close()


@pytest.fixture(scope="session")
def wire(lab: Lab) -> Wire:
    return Wire(lab)


@pytest.fixture
def node(the_node: PacketNode) -> PacketNode:
    """The node under test: no Services, no flows."""
    the_node.reset()
    return the_node


@pytest.fixture
def other_node(the_other_node: PacketNode) -> PacketNode:
    """A second one, with maps and programs of its own."""
    the_other_node.reset()
    return the_other_node


@pytest.fixture(params=NETS, ids=lambda net: net.family.label)
def net(request: pytest.FixtureRequest) -> Net:
    """The addresses of each family."""
    chosen: Net = request.param
    return chosen
