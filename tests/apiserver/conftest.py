"""A server that does as it is told, a source that watches it, and what the source tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from ebpflb.sources.client import Client
from ebpflb.sources.cluster import ApiSource
from ebpflb.sources.transport import Access, Credentials
from tests.apiserver.consumer import QUICK, Consumer
from tests.apiserver.fake import KINDS, FakeApiServer
from tests.builders import NODE, node_ip, node_object, service_object, slice_object

HERE = Path(__file__).parent

KUBERNETES = service_object("kubernetes", cluster_ips=("10.96.0.1",))
KUBERNETES_SLICE = slice_object("kubernetes", service="kubernetes")
THIS_NODE = node_object() | {
    "status": {"addresses": [{"type": "InternalIP", "address": node_ip(1)}]}
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A server that dies in the middle of a word may leave a socket to the garbage collector.

    Python says so at some later moment, in whatever test is running then.
    """
    for item in items:
        if item.path.is_relative_to(HERE):
            for warning in ("pytest.PytestUnraisableExceptionWarning", "ResourceWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:.*socket:{warning}"))
                item.add_marker(pytest.mark.filterwarnings(f"ignore:.*SSLSocket:{warning}"))


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    """An API server with what every cluster has, and this node."""
    with FakeApiServer() as server:
        server.put(KUBERNETES, KUBERNETES_SLICE, THIS_NODE)
        yield server


@pytest.fixture
def consumer() -> Consumer:
    return Consumer()


@pytest.fixture
def client(server: FakeApiServer) -> Iterator[Client]:
    """One that a test's own watch may have."""
    with closing(Client(Credentials(lambda: Access(server=server.url)))) as client:
        yield client


Watching = Callable[..., ApiSource]


@pytest.fixture
def watching(server: FakeApiServer, consumer: Consumer) -> Iterator[Watching]:
    """Start a source; keywords go to ApiSource, ``access`` replaces how the server is reached."""
    with ExitStack() as stack:

        def start(access: Access | None = None, **options: Any) -> ApiSource:
            access = access or Access(server=server.url)
            usual: dict[str, Any] = {"node_name": NODE, "metrics": consumer, "timing": QUICK}
            source = ApiSource(
                options.pop("credentials", Credentials(lambda: access, consumer.notice)),
                options.pop("emit", consumer.emit),
                consumer.notice,
                **usual | options,
            )
            stack.callback(source.stop)
            source.start()
            return source

        yield start


@pytest.fixture
def source(server: FakeApiServer, watching: Watching, consumer: Consumer) -> ApiSource:
    """A source that has told everything and watches."""
    source = watching()
    consumer.wait_synced()
    server.wait(lambda: all(map(server.watchers, KINDS)), "three watches")
    return source
