"""Watches: what comes in them, how they end, and what is done then."""

from __future__ import annotations

import random
import threading
from typing import Final

import msgspec
import pytest

from ebpflb.model import Refused, Upserted
from ebpflb.sources import envelopes
from ebpflb.sources.client import Client
from ebpflb.sources.cluster import ApiSource, resources
from ebpflb.sources.watch import Timing, Watch, default_backoff
from tests.apiserver.conftest import Watching
from tests.apiserver.consumer import QUICK, Consumer, Told
from tests.apiserver.fake import (
    GONE,
    Answer,
    Body,
    FakeApiServer,
    Silence,
    Spoiler,
    Stream,
    error_event,
)
from tests.builders import (
    NODE,
    cluster_ip,
    endpoint_object,
    pod_ip,
    service_key,
    service_object,
    slice_key,
    slice_object,
)

SERVICES: Final = "services"
SLICES: Final = "endpointslices"

Labels = dict[str, str | None]


def last_query(server: FakeApiServer) -> dict[str, str]:
    return dict(server.queries("watch", SERVICES)[-1])


# --- what comes -----------------------------------------------------------------------------------


def test_changes_are_told_as_they_come(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.put(service_object(), slice_object())
    consumer.wait_equal(server)
    server.put(slice_object(endpoints=[endpoint_object(pod_ip(11))]))
    consumer.wait_equal(server)
    server.delete("Service", "web")
    server.delete("EndpointSlice", "web-1")
    consumer.wait_equal(server)
    assert server.count("list", SERVICES) == server.count("list", SLICES) == 1


def test_a_label_that_says_not_for_us_is_a_deletion(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """SVC-01, and back; SVC-03 the same for slices."""
    plain: Labels = {"a": "b"}
    hidden: Labels = {"service.kubernetes.io/service-proxy-name": ""}
    headless: Labels = {"service.kubernetes.io/headless": ""}
    server.put(service_object(labels=plain), slice_object())
    consumer.wait_equal(server)
    server.put(service_object(labels=hidden), slice_object(labels=headless))
    consumer.wait(lambda: set(consumer.deletions()) == {service_key(), slice_key()})
    server.put(service_object(labels=plain), slice_object())
    consumer.wait(lambda: {service_key(), slice_key()} <= consumer.state.keys())


def test_the_same_again_is_no_event(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """Consumer fails when it is told what it knows."""
    server.put(service_object())
    consumer.wait_equal(server)
    heard = consumer.heard_of["Service"]
    server.put(service_object(), service_object(labels={"not": "read"}))
    consumer.wait(lambda: consumer.heard_of["Service"] >= heard + 2)
    assert sum(isinstance(e, Upserted) and e.obj.key == service_key() for e in consumer.events) == 1


def test_events_that_come_twice_do_no_harm(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.spoil(Stream(twice=True), times=-1)
    watching()
    consumer.wait_synced()
    for number in range(5):
        server.put(service_object("a", cluster_ips=[cluster_ip(20 + number)]), slice_object())
        server.delete("EndpointSlice", "web-1")
    consumer.wait_equal(server)


def test_events_of_different_objects_may_come_in_any_order(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.spoil(Stream(swapped=True), times=-1)
    watching()
    consumer.wait_synced()
    server.put(*(service_object(f"s{n}", cluster_ips=[cluster_ip(20 + n)]) for n in range(20)))
    consumer.wait_equal(server)


def test_an_older_event_is_mended_by_the_next_stream(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """Order in a stream is the truth, so a stream goes on from the last thing that it said."""
    server.spoil(Stream(swapped=True), "services", "watch")
    watching()
    consumer.wait_synced()
    server.put(*(service_object(cluster_ips=[cluster_ip(20 + n)]) for n in range(2)))
    consumer.wait(lambda: service_key() in consumer.state)
    server.end_watches("services", "cut")
    consumer.wait_equal(server)


def test_a_bookmark_moves_the_version_alone(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """The fake's bookmarks have no time, as the real one's."""
    told = len(consumer.events)
    server.put({"kind": "Node", "metadata": {"name": "another"}})
    heard = consumer.heard_of["Service"]
    server.bookmark("services")
    consumer.wait(lambda: consumer.heard_of["Service"] > heard)
    server.end_watches("services", "cut")
    server.wait(lambda: server.count("watch", SERVICES) == 2)
    assert last_query(server)["resourceVersion"] == str(server.version)
    assert last_query(server)["allowWatchBookmarks"] == "true"
    assert len(consumer.events) == told


# --- bad objects ----------------------------------------------------------------------------------


def test_a_bad_object_hurts_itself_alone_and_comes_alive_when_mended(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """B-93: port 70000, address abc, and worse."""
    server.put(
        service_object("texts", ports=[{"name": "http", "port": "eighty"}]),
        service_object("large", ports=[{"name": "http", "port": 70000}]),
        service_object("abc", cluster_ips=["abc"]),
        slice_object("numbers", endpoints=[{"addresses": [1, 2, 3]}]),
        slice_object("abc", endpoints=[endpoint_object("abc"), endpoint_object(pod_ip(12))]),
        service_object("good"),
    )
    consumer.wait_equal(server)
    assert isinstance(consumer.state[service_key("texts")], Refused)
    assert isinstance(consumer.state[slice_key("numbers")], Refused)
    assert "good" in consumer.names("Service")
    server.put(service_object("texts"), slice_object("numbers"))
    consumer.wait_equal(server)
    assert not isinstance(consumer.state[service_key("texts")], Refused)
    server.delete("EndpointSlice", "numbers")
    consumer.wait_equal(server)
    assert server.count("list", SERVICES) == server.count("list", SLICES) == 1


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param([], id="metadata is a list"),
        pytest.param({"name": 7}, id="the name is a number"),
        pytest.param({"name": "../../etc"}, id="the name is a path"),
        pytest.param({"name": "web", "labels": "none"}, id="labels are a text"),
    ],
)
def test_an_object_that_cannot_be_named_costs_nobody_anything(
    metadata: object, server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.put({"kind": "EndpointSlice", "metadata": metadata})
    server.put(slice_object("good"))
    consumer.wait(lambda: "good" in consumer.names("EndpointSlice"))
    server.put(slice_object("better"))
    consumer.wait(lambda: "better" in consumer.names("EndpointSlice"))


# --- ends after which it goes on where it was -----------------------------------------------------


@pytest.mark.parametrize("end", ["close", "cut", "half"])
def test_a_stream_that_ends_goes_on_where_it_was(
    end: str, server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.put(service_object("a"))
    consumer.wait_equal(server)
    version = str(server.version)
    server.end_watches("services", end)
    server.wait(lambda: server.count("watch", SERVICES) == 2)
    assert last_query(server)["resourceVersion"] == version
    server.put(service_object("b"))
    consumer.wait_equal(server)
    assert server.count("list", SERVICES) == 1


def test_an_event_whose_line_was_cut_comes_again(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """B-91: half a JSON line. Nothing was lost, so nothing is listed anew."""
    server.spoil(Stream(after=1, end="half"), "services", "watch")
    watching()
    consumer.wait_synced()
    server.put(service_object("a"), service_object("b"))
    consumer.wait_equal(server)
    assert server.count("list", SERVICES) == 1


def test_streams_are_asked_to_end_at_different_times(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    timing = msgspec.structs.replace(QUICK, watch_s=Timing().watch_s)
    watching(timing=timing)
    consumer.wait_synced()
    for count in range(1, 6):
        server.wait(lambda count=count: server.count("watch", SERVICES) >= count)  # type: ignore[misc]
        server.wait(lambda: server.watchers("services") == 1)
        server.end_watches("services", "cut")
    asked = {int(query["timeoutSeconds"]) for query in server.queries("watch", SERVICES)}
    assert len(asked) > 1
    assert all(300 <= seconds <= 600 for seconds in asked)


def test_a_server_that_is_down_for_a_while_changes_nothing(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """SYNC-08, HZ-07: what is known stays, and nothing that is known is told again."""
    told = list(consumer.events)
    server.down()
    consumer.wait(lambda: consumer.failures.total() > 12)
    assert consumer.events == told
    assert source.alive()
    server.up()
    server.wait(lambda: server.watchers("services") == 1)
    server.put(service_object())
    consumer.wait_equal(server)
    assert len(consumer.events) == len(told) + 1


# --- ends after which everything is listed anew ---------------------------------------------------


@pytest.mark.parametrize(
    ("spoiler", "reason"),
    [
        pytest.param(Answer(410, "too old resource version"), "gone", id="HTTP 410"),
        pytest.param(GONE, "gone", id="an ERROR event 410"),
        pytest.param(
            Stream(lines=(error_event(410),), end="silence"), "gone", id="ERROR 410, left open"
        ),
        pytest.param(
            Stream(lines=(error_event(500, "InternalError", "etcd event without PrevKv"),)),
            "error_event",
            id="an ERROR event 500",
        ),
        pytest.param(
            Stream(lines=(b'{"type":"ERROR","object":7}\n',)), "error_event", id="an ERROR of what"
        ),
        pytest.param(Stream(lines=(b"garbage\n",)), "garbage", id="no JSON"),
        pytest.param(Stream(lines=(b"\xff\xfe\n",)), "garbage", id="no text"),
        pytest.param(Stream(lines=(b"\n",)), "garbage", id="an empty line"),
        pytest.param(Stream(lines=(b"[" * 100_000 + b"\n",)), "garbage", id="nested too deeply"),
        pytest.param(Stream(lines=(b"{}\n",)), "garbage", id="an empty event"),
        pytest.param(
            Stream(lines=(b'{"type":"ADDED","object":{"metadata":{"name":"x"}}}\n',)),
            "garbage",
            id="an object without a version",
        ),
        pytest.param(
            Stream(lines=(b'{"type":"MOVED","object":{"metadata":{"resourceVersion":"7"}}}\n',)),
            "garbage",
            id="an unknown type",
        ),
        pytest.param(Stream(end="half close"), "garbage", id="half a line in good order"),
        pytest.param(Body(b"<html>"), "garbage", id="a captive portal"),
        pytest.param(Stream(end="close"), "empty", id="an empty body"),
        pytest.param(Answer(404, body=b"404 page not found"), "missing", id="404"),
        pytest.param(Answer(400, "invalid resource version"), "refused", id="400"),
    ],
)
def test_a_gap_is_closed_by_a_list(
    spoiler: Spoiler, reason: str, server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """B-91: what was deleted in the gap goes, what was made comes."""
    server.put(service_object("a"), service_object("b"))
    consumer.wait_equal(server)
    server.spoil(spoiler, "services", "watch")
    server.end_watches("services", "cut")
    consumer.wait(lambda: consumer.failed("Service", "watch", reason) == 1)
    server.delete("Service", "a")
    server.put(service_object("c"))
    consumer.wait_equal(server)
    server.wait(lambda: server.count("list", SERVICES) == 2)
    assert consumer.deletions() == [service_key("a")]
    assert consumer.failures.total() <= 2  # the cut, if it was noticed, and this


def test_a_line_without_end_is_given_up(
    server: FakeApiServer,
    source: ApiSource,
    consumer: Consumer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(envelopes, "LINE_BYTES", 1 << 16)
    server.spoil(Stream(lines=(b"x" * (1 << 18),), end="silence"), "services", "watch")
    server.end_watches("services", "cut")
    consumer.wait(lambda: consumer.failed("Service", "watch", "garbage") == 1)
    consumer.wait_equal(server)


def test_410_again_and_again_is_listed_each_time_and_told_once(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """B-91."""
    server.spoil(GONE, "services", "watch", times=-1)
    server.end_watches("services", "cut")
    consumer.wait(lambda: consumer.failed("Service", "watch", "gone") >= 6)
    assert server.count("list", SERVICES) >= 6
    # After a 410 not even "at least this version" is asked for.
    assert "resourceVersion" not in server.queries("list", SERVICES)[-1]
    [lost] = consumer.said("api_lost")
    assert lost["resource"] == "Service"
    assert "too old resource version" in lost["reason"]
    server.behave()
    server.wait(lambda: server.watchers("services") == 1)
    assert not consumer.said("api_back")  # a stream is trusted when it has told something

    def is_back() -> bool:
        server.bookmark("services")  # once is not enough: the last spoilt watch may still be there
        return bool(consumer.said("api_back"))

    consumer.wait(is_back)


def test_a_stream_that_breaks_now_and_then_is_nothing_to_speak_of(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    for how in ("cut", "half", "half close", "close"):
        server.put(service_object(f"after-{how.replace(' ', '-')}"))
        consumer.wait_equal(server)
        count = server.count("watch", SERVICES)
        server.end_watches("services", how)
        server.wait(lambda count=count: server.count("watch", SERVICES) > count)  # type: ignore[misc]
    assert not consumer.notices


# --- nothing comes at all -------------------------------------------------------------------------


def test_a_half_open_stream_is_noticed_once_bookmarks_have_been_seen(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """B-87, as far as a fake on loopback can: the peer's kernel answers, the server does not."""
    watching(timing=msgspec.structs.replace(QUICK, silence_s=0.2))
    consumer.wait_synced()
    server.wait(lambda: server.watchers("services") == 1)
    heard = consumer.heard_of["Service"]
    server.bookmark("services")
    consumer.wait(lambda: consumer.heard_of["Service"] > heard)
    server.spoil(Stream(end="silence"), "services", "watch")
    server.end_watches("services", "cut")
    server.wait(lambda: server.count("watch", SERVICES) == 2)
    server.put(service_object())  # the dead stream does not tell it
    consumer.wait_equal(server)
    assert consumer.failed("Service", "watch", "silent") >= 1


def test_a_half_open_stream_is_noticed_without_bookmarks_when_it_should_have_ended(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.spoil(Stream(end="silence"), "services", "watch")
    watching(timing=msgspec.structs.replace(QUICK, watch_s=(0.1, 0.1), grace_s=0.2))
    consumer.wait_synced()
    server.put(service_object())
    consumer.wait_equal(server)
    assert consumer.failed("Service", "watch", "silent") >= 1


def test_a_watch_that_is_never_answered_is_given_up(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.spoil(Silence(), "services", "watch")
    watching(timing=msgspec.structs.replace(QUICK, watch_s=(0.1, 0.1), grace_s=0.2))
    consumer.wait_synced()
    server.put(service_object())
    consumer.wait_equal(server)
    assert consumer.failed("Service", "watch", "silent") >= 1


def test_a_quiet_server_is_no_dead_server(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """Streams that end when they were asked to are no failure, and nothing is listed anew."""
    watching(timing=msgspec.structs.replace(QUICK, watch_s=(1.0, 1.0), healthy_s=0.1))
    consumer.wait_synced()
    server.wait(lambda: server.count("watch", SERVICES) == 3)
    assert server.count("list", SERVICES) == 1
    assert not consumer.failures
    assert not consumer.notices


# --- the pause ------------------------------------------------------------------------------------


def one_watch(client: Client, consumer: Consumer, timing: Timing) -> Watch:
    """Return a watch of Services that the test steps itself."""
    return Watch(
        resources(NODE)[0],
        client,
        Told(consumer),
        consumer,
        threading.Event(),
        timing=timing,
        rng=random.Random(1),
    )


def test_pauses_grow_with_each_failure_and_begin_anew_after_a_good_stream(
    server: FakeApiServer, client: Client, consumer: Consumer
) -> None:
    attempts: list[int] = []

    def backoff(attempt: int, _rng: random.Random) -> float:
        attempts.append(attempt)
        return 0.0

    timing = msgspec.structs.replace(QUICK, backoff=backoff, watch_s=(1.0, 1.0), healthy_s=0.2)
    watch = one_watch(client, consumer, timing)
    server.spoil(Answer(500), times=4)
    for _ in range(4):
        watch.step()
    assert attempts == [0, 1, 2, 3]
    assert watch.step() == 0.0  # a stream that lasted
    server.spoil(Answer(500), times=2)
    watch.step()
    watch.step()
    assert attempts == [0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize(
    ("asked", "at_least", "at_most"),
    [("7", 7.0, 8.75), ("86400", 120.0, 150.0), ("soon", 0.0, 0.0), ("-5", 0.0, 0.0)],
)
def test_retry_after_is_honoured_within_reason(  # noqa: PLR0917
    asked: str,
    at_least: float,
    at_most: float,
    server: FakeApiServer,
    client: Client,
    consumer: Consumer,
) -> None:
    timing = msgspec.structs.replace(QUICK, backoff=lambda _attempt, _rng: 0.0)
    watch = one_watch(client, consumer, timing)
    server.spoil(Answer(429, headers=(("Retry-After", asked),)))
    assert at_least <= watch.step() <= at_most
    assert consumer.failed("Service", "list", "throttled") == 1


def test_the_pause_doubles_from_a_quarter_of_a_second_to_half_a_minute() -> None:
    rng = random.Random(7)
    for attempt in range(100):
        middle = min(30.0, 0.25 * 2.0**attempt)
        assert 0.5 * middle <= default_backoff(attempt, rng) <= 1.5 * middle
    assert len({default_backoff(3, rng) for _ in range(20)}) == 20


def test_storms_of_errors_pass(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    for code in (500, 429, 503, 504):
        server.spoil(Answer(code), times=12)
    server.cut()
    server.put(service_object(), slice_object())
    consumer.wait_equal(server)
    assert len(consumer.said("api_lost")) <= 2  # server_error and throttled
    consumer.wait(lambda: consumer.said("api_back"))


def test_a_fault_of_ours_ends_nothing(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """B-93: whatever an event runs into, the next list tells it again."""
    broken = threading.Event()

    def emit(event: object) -> None:
        if isinstance(event, Upserted) and event.obj.key == service_key() and not broken.is_set():
            broken.set()
            raise RuntimeError("made up")
        consumer.emit(event)  # type: ignore[arg-type]

    source = watching(emit=emit)
    consumer.wait_synced()
    server.put(service_object())
    consumer.wait_equal(server)
    assert consumer.failed("Service", "watch", "fault") == 1
    assert source.alive()
