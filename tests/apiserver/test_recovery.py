"""A server that was lost and is back: how soon each watch follows again, and what is said of it."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from ebpflb.sources.client import Client
from ebpflb.sources.cluster import GOOD_NEWS, ApiSource, resources
from ebpflb.sources.watch import Timing, Watch, default_backoff
from tests.apiserver.conftest import Watching
from tests.apiserver.consumer import QUICK, Consumer, Told
from tests.apiserver.fake import GONE, KINDS, Answer, FakeApiServer, Spoiler, Stream
from tests.builders import NODE, cluster_ip, service_object

HOUR_S = 3600.0
LONG_PAUSES = msgspec.structs.replace(
    QUICK, backoff=lambda attempt, _rng: HOUR_S if attempt else 0.01
)


class Stepped:
    """A watch of Services that the test steps; ``attempts``: what each pause was computed from."""

    def __init__(self, client: Client, timing: Timing = QUICK) -> None:
        self.attempts: list[int] = []
        self.now = 0.0
        self.pace = 0.0  # how much later it is at each look at the clock
        self._backoff = timing.backoff
        self.watch = Watch(
            resources(NODE)[0],
            client,
            Told(Consumer()),
            Consumer(),
            threading.Event(),
            timing=msgspec.structs.replace(timing, backoff=self._record),
            clock=self._clock,
            rng=random.Random(1),
        )

    def _clock(self) -> float:
        self.now += self.pace
        return self.now

    def _record(self, attempt: int, rng: random.Random) -> float:
        self.attempts.append(attempt)
        return self._backoff(attempt, rng)

    def step(self, times: int = 1) -> list[float]:
        """Return the pauses; ``attempts`` are those of these steps."""
        self.attempts.clear()
        return [self.watch.step() for _ in range(times)]


# --- the pauses -----------------------------------------------------------------------------------


def test_a_server_that_cannot_be_reached_is_tried_every_few_seconds(
    server: FakeApiServer, client: Client
) -> None:
    stepped = Stepped(client, msgspec.structs.replace(QUICK, backoff=default_backoff))
    server.down()
    assert max(stepped.step(40)) <= 6.0
    server.up()
    server.spoil(Answer(503), times=-1)
    pauses = stepped.step(40)
    assert pauses[0] < 0.5
    assert max(pauses) > 30.0  # it is under load


def test_a_server_that_restarts_again_and_again_leaves_no_long_pause(
    server: FakeApiServer, client: Client
) -> None:
    """Its streams do not last, nobody says anything in them; each kind of failure begins anew."""
    stepped = Stepped(client)
    for restart in range(3):
        server.down()
        stepped.step(8)
        assert stepped.attempts[:4] == [0, 1, 2, 3]
        server.up()
        server.spoil(Answer(503), times=3)
        stepped.step(3)
        assert stepped.attempts == [0, 1, 2]
        server.spoil(Stream(end="cut"), "services", "watch")
        stepped.step()
        assert stepped.attempts == [restart]


@pytest.mark.parametrize(
    "spoiler",
    [
        pytest.param(Stream(end="close"), id="ends each watch at once"),
        pytest.param(Stream(end="cut"), id="breaks each watch at once"),
        pytest.param(Stream(after=1, end="close"), id="ends each watch after one event"),
        pytest.param(Stream(after=1, end="cut"), id="breaks each watch after one event"),
        pytest.param(Stream(after=1, lines=GONE.lines, end="close"), id="says 410 after one event"),
    ],
)
def test_a_server_whose_streams_never_last_is_asked_less_and_less(
    spoiler: Stream, server: FakeApiServer, client: Client
) -> None:
    stepped = Stepped(client)
    stepped.watch.list_once()
    server.spoil(spoiler, "services", "watch", times=-1)
    attempts: list[int] = []
    for turn in range(6):
        server.put(service_object(cluster_ips=[cluster_ip(20 + turn)]))
        if spoiler.lines:  # what it knows was listed after the last 410
            stepped.watch.list_once()
            server.put(service_object(cluster_ips=[cluster_ip(40 + turn)]))
        stepped.step()
        attempts += stepped.attempts
    assert attempts == sorted(set(attempts))
    assert attempts[-1] >= 4


@pytest.mark.parametrize(
    ("end", "most"),
    [
        pytest.param(Stream(end="cut"), 3, id="that break: looked at again within seconds"),
        pytest.param(Stream(end="close"), 3, id="that end: the same"),
        pytest.param(GONE, 7, id="that say 410: each costs a list"),
    ],
)
def test_streams_that_went_on_for_a_while(
    end: Stream, most: int, server: FakeApiServer, client: Client
) -> None:
    """As when an API server is restarted every few seconds."""
    stepped = Stepped(client, msgspec.structs.replace(QUICK, healthy_s=3600.0))
    stepped.watch.list_once()
    stepped.pace = 2.0
    server.spoil(end, "services", "watch", times=-1)
    stepped.step(8)
    assert max(stepped.attempts) == most


@pytest.mark.parametrize("gone", [GONE, Answer(410)], ids=["an event", "an answer"])
def test_the_first_410_is_answered_by_a_list_at_once(
    gone: Spoiler, server: FakeApiServer, client: Client
) -> None:
    """However long the server was away before that; one that says it again is backed off."""
    stepped = Stepped(
        client, msgspec.structs.replace(QUICK, backoff=lambda attempt, _: 1 + attempt)
    )
    server.spoil(Stream(end="cut"), "services", "watch")
    stepped.step()
    server.down()
    stepped.step(9)
    server.up()
    server.spoil(gone, "services", "watch", times=3)
    assert stepped.step(3) == [0.0, 2.0, 3.0]  # the stream that was cut counts
    assert server.count("list", "services") == 3


# --- nudges ---------------------------------------------------------------------------------------


def test_who_reaches_the_server_wakes_those_who_wait_for_it(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """Only the Node's watch would try again within the hour."""

    def backoff(attempt: int, _rng: random.Random) -> float:
        patient = threading.current_thread().name != "watch-Node"
        return HOUR_S if attempt and patient else 0.01

    watching(timing=msgspec.structs.replace(QUICK, backoff=backoff))
    consumer.wait_synced()
    server.wait(lambda: all(map(server.watchers, KINDS)), "three watches")
    server.down()
    consumer.wait(
        lambda: all(consumer.failed(k, "watch", "unreachable") >= 2 for k in KINDS.values())
    )
    server.up()
    server.wait(lambda: all(map(server.watchers, KINDS)), "three watches")


class Counting(threading.Event):
    """Notes the pauses and does not pause; set after so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self._most = most

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(timeout or 0.0)
        if len(self.pauses) == self._most:
            self.set()
        return self.is_set()


def nudged(client: Client, pauses: int) -> list[float]:
    """Run a watch that is nudged in each of its tries; return its pauses."""
    stopping = Counting(pauses)

    def backoff(_attempt: int, _rng: random.Random) -> float:
        watch.nudge()
        return HOUR_S

    watch = Watch(
        resources(NODE)[0],
        client,
        Told(Consumer()),
        Consumer(),
        stopping,
        timing=msgspec.structs.replace(QUICK, backoff=backoff),
        rng=random.Random(1),
    )
    watch.run()
    return stopping.pauses


def test_one_nudge_is_heeded_in_an_outage(server: FakeApiServer, client: Client) -> None:
    server.spoil(Answer(503), times=-1)
    first, *others = nudged(client, 3)
    assert first < 1.0
    assert others == [HOUR_S, HOUR_S]


def test_the_next_outage_has_a_nudge_of_its_own(server: FakeApiServer, client: Client) -> None:
    server.spoil(Answer(503), times=2)
    server.spoil(Stream(end="cut"), "services", "watch")
    server.spoil(Answer(503), "services", "watch", times=-1)
    first, second, cut, third, fourth = nudged(client, 5)
    assert (first < 1.0, second, cut) == (True, HOUR_S, HOUR_S)
    assert (third < 1.0, fourth) == (True, HOUR_S)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(Answer(429, headers=(("Retry-After", "60"),)), id="asks for time"),
        pytest.param(Answer(403), id="refuses this resource"),
        pytest.param(Answer(404), id="has no such resource"),
    ],
)
def test_no_nudge_where_it_would_not_help(
    answer: Answer, server: FakeApiServer, client: Client
) -> None:
    server.spoil(answer, times=-1)
    assert nudged(client, 1) == [HOUR_S]


def test_a_source_that_pauses_stops_at_once(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """Some of its pauses wait for the server, and some do not."""
    server.spoil(Answer(404), "nodes", times=-1)
    server.spoil(Answer(503), times=-1)
    source = watching(timing=LONG_PAUSES)
    consumer.wait(lambda: consumer.failures.total() == 6)
    began = time.monotonic()
    source.stop()
    assert time.monotonic() - began < 1.0
    assert not source.alive()
    assert not any(thread.is_alive() for thread in source._threads)


# --- a 403 of a server that has just started ------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


STARTING = msgspec.structs.replace(QUICK, forbidden_s=10.0)


def all_failed(consumer: Consumer, times: int) -> Callable[[], bool]:
    return lambda: all(consumer.failed(k, "list", "forbidden") >= times for k in KINDS.values())


def test_a_server_that_has_just_started_forbids_everything_and_nobody_hears_of_it(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    clock = Clock()
    server.forbidden = set(KINDS)
    watching(timing=STARTING, clock=clock)
    consumer.wait(all_failed(consumer, 5))
    clock.now += 9.9
    consumer.wait(all_failed(consumer, 10))
    server.forbidden = {"nodes"}
    consumer.wait(lambda: consumer.names("Service") and consumer.names("EndpointSlice"))
    assert not consumer.synced  # the Node is still to come
    server.behave()
    consumer.wait_synced()
    assert consumer.names("Node")
    assert not consumer.notices


def test_a_403_that_lasts_is_told_and_the_node_is_waited_for_no_longer(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    clock = Clock()
    server.forbidden = {"nodes"}
    watching(timing=STARTING, clock=clock)
    consumer.wait(lambda: consumer.failed("Node", "list", "forbidden") >= 5)
    assert not consumer.notices
    clock.now += 10.0
    consumer.wait_synced()
    [lost] = consumer.said("api_lost")
    assert (lost["resource"], lost["reason"]) == (
        "Node",
        'answers 403: User "system:serviceaccount:kube-system:ebpflb" cannot list resource "nodes"',
    )


def test_each_start_of_the_server_is_one(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    clock = Clock()
    watching(timing=STARTING, clock=clock)
    consumer.wait_synced()
    for start in (1, 2):
        server.down()
        count = consumer.failures.total()
        consumer.wait(lambda count=count: consumer.failures.total() > count + 12)  # type: ignore[misc]
        server.forbidden = set(KINDS)
        server.up()
        consumer.wait(
            lambda start=start: all(  # type: ignore[misc]
                consumer.failed(kind, "watch", "forbidden") >= 5 * start for kind in KINDS.values()
            )
        )
        server.behave()
        server.wait(lambda: all(map(server.watchers, KINDS)), "three watches")
        clock.now += 100.0  # the second is quiet for what it is, not for the first
    consumer.wait(lambda: consumer.said("api_back"))
    assert not any("403" in lost["reason"] for lost in consumer.said("api_lost"))


def test_a_server_that_may_have_just_started_is_asked_again_soon(
    server: FakeApiServer, client: Client
) -> None:
    stepped = Stepped(client, STARTING)
    server.forbidden = {"services"}
    stepped.step(8)
    assert stepped.attempts == [0, 1, 2, 2, 2, 2, 2, 2]
    stepped.now = 10.0
    stepped.step(3)
    assert stepped.attempts == [3, 4, 5]


# --- what is said ---------------------------------------------------------------------------------


def test_that_it_is_back_is_good_news_and_that_it_is_lost_is_not(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.down()
    consumer.wait(lambda: consumer.said("api_lost"))
    server.up()
    consumer.wait(lambda: consumer.said("api_back"))
    assert {event for event, _ in consumer.notices} & GOOD_NEWS == {"api_back"}


def test_of_many_restarts_nothing_is_said_of_each_resource(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """Each breaks a stream that had told nothing: that is the server's doing, and known."""
    watching(timing=msgspec.structs.replace(QUICK, healthy_s=60.0))
    consumer.wait_synced()
    for restart in range(1, 6):
        server.wait(lambda: all(map(server.watchers, KINDS)), "three watches")
        server.down()
        consumer.wait(
            lambda restart=restart: all(  # type: ignore[misc]
                consumer.failed(kind, "watch", "cut") >= restart for kind in KINDS.values()
            )
        )
        before = [consumer.failed(kind, "watch", "unreachable") for kind in KINDS.values()]
        consumer.wait(
            lambda before=before: all(  # type: ignore[misc]
                consumer.failed(kind, "watch", "unreachable") > count
                for kind, count in zip(KINDS.values(), before, strict=True)
            )
        )
        server.up()
    consumer.wait(lambda: consumer.said("api_back"))
    assert {fields["resource"] for _, fields in consumer.notices} == {None}
