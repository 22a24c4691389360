"""When everything has been told, what is waited for, and how a source ends."""

from __future__ import annotations

import time

import msgspec
import pytest

from ebpflb.errors import SourceError
from ebpflb.model import Node, ObjectKey, Synced, Upserted
from ebpflb.sources.cluster import ApiSource, load
from ebpflb.sources.transport import Access, Credentials
from tests.apiserver.conftest import THIS_NODE, Watching
from tests.apiserver.consumer import QUICK, Consumer
from tests.apiserver.fake import Answer, FakeApiServer, Silence
from tests.builders import NODE, node_object, service_key, service_object, slice_object

NODE_KEY = ObjectKey("Node", "", NODE)
IMPATIENT = msgspec.structs.replace(QUICK, node_s=0.05)


@pytest.mark.parametrize("resource", ["services", "endpointslices"])
def test_synced_waits_for_both_lists(
    resource: str, server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """SYNC-01."""
    server.spoil(Answer(500), resource, "list", times=-1)  # type: ignore[arg-type]
    watching(timing=IMPATIENT)
    server.wait(lambda: server.count("list", resource) >= 4)  # type: ignore[arg-type]
    consumer.wait(lambda: NODE_KEY in consumer.state)
    assert not consumer.synced
    server.behave()
    consumer.wait_synced()
    consumer.wait_equal(server)


def test_synced_waits_for_the_last_page(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """B-97: a Service whose slices come one after the other is not told of in part."""
    server.put(*(slice_object(f"web-{number}") for number in range(1200)))
    server.spoil(Answer(500), "endpointslices", "list", skip=2, times=3)
    watching()
    consumer.wait_synced()
    before = consumer.events[: consumer.events.index(Synced())]
    names = {e.obj.name for e in before if isinstance(e, Upserted) and e.obj.key.kind != "Service"}
    assert {f"web-{number}" for number in range(1200)} <= names


def test_the_node_is_waited_for(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """SYNC-10: it must be there, with addresses."""
    server.delete("Node", NODE)
    watching()
    server.wait(lambda: server.watchers("nodes") == 1)
    consumer.wait(lambda: len(consumer.lists) == 3)
    assert not consumer.synced
    server.put(node_object())
    consumer.wait(lambda: NODE_KEY in consumer.state)
    assert not consumer.synced
    server.put(THIS_NODE)
    consumer.wait_synced()
    assert not consumer.said("node_missing")


def test_the_node_is_not_waited_for_without_end(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.delete("Node", NODE)
    watching(timing=IMPATIENT)
    consumer.wait_synced()
    [missing] = consumer.said("node_missing")
    assert missing["node"] == NODE
    assert "--hostname-override" in missing["action"]
    server.put(THIS_NODE)
    consumer.wait_equal(server)
    assert isinstance(consumer.state[NODE_KEY], Node)


def test_the_node_is_not_waited_for_where_it_may_not_be_read(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.forbidden = {"nodes"}
    watching()
    consumer.wait_synced()
    server.behave()
    consumer.wait(lambda: NODE_KEY in consumer.state)


def test_a_node_that_is_deleted_is_told(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """SYNC-11 is the agent's to act on."""
    server.delete("Node", NODE)
    consumer.wait(lambda: consumer.deletions() == [NODE_KEY])


def test_nothing_is_told_after_stop(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    assert source.alive()
    source.stop()
    told = len(consumer.events)
    assert not source.alive()
    server.put(service_object())
    assert len(consumer.events) == told


def test_stop_does_not_wait_for_a_server_that_says_nothing(
    server: FakeApiServer, watching: Watching
) -> None:
    server.spoil(Silence(), times=-1)
    source = watching(timing=msgspec.structs.replace(QUICK, list_silence_s=60.0))
    server.wait(lambda: len(server.requests) == 3)
    began = time.monotonic()
    source.stop()
    assert time.monotonic() - began < 10.0


def test_stop_before_start(watching: Watching, server: FakeApiServer, consumer: Consumer) -> None:
    source = ApiSource(
        Credentials(lambda: Access(server=server.url)),
        consumer.emit,
        consumer.notice,
        node_name=NODE,
    )
    source.stop()
    assert not source.alive()


def test_load_tells_what_there_is_now(server: FakeApiServer) -> None:
    server.put(service_object())
    events = load(Credentials(lambda: Access(server=server.url)), node_name=NODE, timing=QUICK)
    assert events[-1] == Synced()
    keys = {event.obj.key for event in events if isinstance(event, Upserted)}
    assert {service_key(), NODE_KEY} <= keys
    assert not any(query.get("watch") for query in (r.query for r in server.requests))


@pytest.mark.parametrize(
    ("code", "says"), [(403, "answers 403 to /api/v1/services"), (500, "answers 500")]
)
def test_load_says_why_it_cannot(code: int, says: str, server: FakeApiServer) -> None:
    server.spoil(Answer(code), "services", times=-1)
    with pytest.raises(SourceError, match=says) as caught:
        load(Credentials(lambda: Access(server=server.url)), node_name=NODE, timing=QUICK)
    assert server.url in str(caught.value)
