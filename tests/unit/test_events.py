"""Kubernetes Events: what they say, how many there are, and that sending them waits for nobody."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest

from ebpflb import events
from ebpflb.events import Event, Limiter, Limits, Recorder
from ebpflb.model import ObjectKey, Rejected
from tests.logs import capture_logs

TIMEOUT_S = 10.0
NODE = "node-a"
NOW_S = 1_769_903_999.25
SERVICE = ObjectKey("Service", "shop", "web")
SLICE = ObjectKey("EndpointSlice", "shop", "web-abc")
REJECTED = events.not_served(Rejected(SERVICE, "spec.ports is empty: there is nothing to serve"))


def body(event: Event, *, node: str = NODE, now_s: float = NOW_S, times: int = 1) -> Any:
    return json.loads(events.body_of(event, node_name=node, now_s=now_s, times=times))


# --- what they say -------------------------------------------------------------------------------


def test_an_object_that_is_not_served() -> None:
    found = body(REJECTED)
    name = found["metadata"].pop("name")
    assert re.fullmatch(r"web\.[0-9a-f]{16}", name)
    assert found == {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": "shop"},
        "eventTime": "2026-01-31T23:59:59.250000Z",
        "reportingController": "ebpflb",
        "reportingInstance": "ebpflb-node-a",
        "action": "Program",
        "reason": "NotServed",
        "regarding": {
            "apiVersion": "v1",
            "kind": "Service",
            "namespace": "shop",
            "name": "web",
        },
        "note": "spec.ports is empty: there is nothing to serve",
        "type": "Warning",
    }
    assert events.path_of(REJECTED) == "/apis/events.k8s.io/v1/namespaces/shop/events"


def test_a_slice_is_of_its_own_api_group() -> None:
    found = body(events.not_served(Rejected(SLICE, "x")))
    assert found["regarding"]["apiVersion"] == "discovery.k8s.io/v1"


@pytest.mark.parametrize(
    ("event", "kind", "reason", "note"),
    [
        (events.starting(NODE), "Normal", "Starting", ""),
        (
            events.cannot_listen(NODE, "--healthz-bind-address", "taken"),
            "Warning",
            "FailedToStartProxierHealthcheck",
            "taken",
        ),
        (
            events.cannot_listen(NODE, "--metrics-bind-address", "taken"),
            "Warning",
            "FailedToStartMetricServer",
            "taken",
        ),
    ],
    ids=["ADM-09", "HZ-08", "ADM-07"],
)
def test_what_happens_to_the_agent_regards_its_node(
    event: Event, kind: str, reason: str, note: str
) -> None:
    found = body(event)
    assert (found["type"], found["reason"], found["note"]) == (kind, reason, note)
    assert found["action"] == "StartKubeProxy"
    assert found["regarding"] == {
        "apiVersion": "v1",
        "kind": "Node",
        "name": NODE,
        "uid": NODE,
    }
    assert found["metadata"]["namespace"] == "default"
    assert events.path_of(event) == "/apis/events.k8s.io/v1/namespaces/default/events"


def test_the_time_always_has_six_digits_after_the_point() -> None:
    assert body(REJECTED, now_s=1_769_903_999.0)["eventTime"] == "2026-01-31T23:59:59.000000Z"


def test_a_long_note_is_cut_within_what_the_api_server_takes() -> None:
    note = body(REJECTED._replace(note="ü" * 1000))["note"]
    assert len(note.encode()) <= 1024
    assert note.endswith("ü…")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("web", r"web\.[0-9a-f]{16}"),
        ("a" * 253, r"a{236}\.[0-9a-f]{16}"),
        ("a" * 235 + "." + "b" * 17, r"a{235}\.[0-9a-f]{16}"),
        ("(object 3 of web.yaml)", r"ebpflb\.[0-9a-f]{16}"),
        ("", r"ebpflb\.[0-9a-f]{16}"),
    ],
    ids=["a short one", "the longest one", "cut at a point", "no name of Kubernetes", "none"],
)
def test_an_event_has_a_name_that_the_api_server_takes(name: str, expected: str) -> None:
    event = events.not_served(Rejected(ObjectKey("Service", "shop", name), "x"))
    found = body(event)["metadata"]["name"]
    assert re.fullmatch(expected, found)
    assert len(found) <= 253


def test_all_nodes_give_one_name_to_what_they_all_find_so_that_one_event_is_made() -> None:
    found = [
        body(REJECTED, node=node, now_s=NOW_S - later) for node, later in (("a", 0), ("b", 60))
    ]
    assert found[0]["metadata"] == found[1]["metadata"]


@pytest.mark.parametrize(
    "other",
    [
        {"event": REJECTED._replace(note="another")},
        {"event": REJECTED._replace(reason="Another")},
        {"event": REJECTED._replace(regarding=ObjectKey("EndpointSlice", "shop", "web"))},
        {"event": REJECTED, "now_s": NOW_S + 3600},
        {"event": REJECTED._replace(of_cluster=False)},
    ],
    ids=["another note", "another reason", "another object", "an hour later", "of one node"],
)
def test_another_event_has_another_name(other: dict[str, Any]) -> None:
    assert body(**other)["metadata"]["name"] != body(REJECTED)["metadata"]["name"]


def test_what_happens_on_one_node_has_a_name_of_its_own() -> None:
    event = events.starting(NODE)
    names = {
        body(event)["metadata"]["name"],
        body(event, node="b")["metadata"]["name"],
        body(event, now_s=NOW_S + 0.1)["metadata"]["name"],
    }
    assert len(names) == 3


def test_what_happened_several_times_is_a_series() -> None:
    found = body(REJECTED, times=3)
    assert found["series"] == {"count": 3, "lastObservedTime": found["eventTime"]}
    assert "series" not in body(REJECTED)


@pytest.mark.parametrize(
    ("data", "uid"),
    [
        (b'{"items": [{"metadata": {"name": "web", "uid": "1-2"}}]}', "1-2"),
        (b'{"items": [{"metadata": {"name": "web"}}]}', ""),
        (b'{"items": []}', ""),
        (b'{"items": null}', ""),
        (b"{}", ""),
    ],
)
def test_an_objects_uid_is_read_from_a_list_of_it(data: bytes, uid: str) -> None:
    assert events.uid_in(data) == uid
    with_uid = json.loads(events.body_of(REJECTED, node_name=NODE, now_s=NOW_S, uid=uid))
    assert with_uid["regarding"].get("uid", "") == uid
    assert with_uid["metadata"] == body(REJECTED)["metadata"]


# --- how many ------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def event(name: str = "web", note: str = "x") -> Event:
    return events.not_served(Rejected(ObjectKey("Service", "shop", name), note))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_same_event_is_told_again_only_after_a_while_and_says_how_often_it_was(
    clock: Clock,
) -> None:
    limiter = Limiter(clock, Limits(again_s=600))
    assert [limiter.take(event()) for _ in range(3)] == [1, 0, 0]
    clock.now_s = 599
    assert limiter.take(event()) == 0
    clock.now_s = 600
    assert limiter.take(event()) == 4
    clock.now_s = 1200
    assert limiter.take(event()) == 1


def test_one_object_with_many_faults_does_not_take_all(clock: Clock) -> None:
    limiter = Limiter(clock, Limits(of_one=3, window_s=60))
    assert [limiter.take(event(note=str(i))) for i in range(5)] == [1, 1, 1, 0, 0]
    assert limiter.take(event("other")) == 1
    clock.now_s = 60
    assert limiter.take(event(note="4")) == 1


def test_many_objects_at_once_are_a_burst_and_then_a_trickle(clock: Clock) -> None:
    limiter = Limiter(clock, Limits(burst=3, refill_s=10))
    assert sum(limiter.take(event(str(i))) for i in range(10)) == 3
    clock.now_s = 9.9
    assert limiter.take(event("10")) == 0
    clock.now_s = 10
    assert [limiter.take(event(name)) for name in ("10", "11")] == [1, 0]
    clock.now_s = 1e6
    assert sum(limiter.take(event(f"later-{i}")) for i in range(10)) == 3


def test_what_is_remembered_is_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_MOST_REMEMBERED", 10)
    limiter = Limiter(clock, Limits(burst=1000))
    for number in range(100):
        limiter.take(event(str(number)))
    assert len(limiter._told) == len(limiter._of_one) == 10
    assert limiter.take(event("99")) == 0
    assert limiter.take(event("0")) == 1


# --- sending -------------------------------------------------------------------------------------


class Server:
    """Answers each POST with the next status, and the last one for ever; 0 is a failure."""

    def __init__(self, *statuses: int) -> None:
        self._statuses = list(statuses or (201,))
        self.posted: list[tuple[str, Any]] = []
        self.asked = threading.Semaphore(0)

    def __call__(self, path: str, body: bytes) -> int:
        status = self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]
        self.posted.append((path, json.loads(body)))
        self.asked.release()
        if not status:
            raise ConnectionError("nobody there")
        return status

    def wait(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.asked.acquire(timeout=TIMEOUT_S)

    def notes(self) -> list[str]:
        return [body["note"] for _, body in self.posted]


def recorder(post: Callable[[str, bytes], int], read: events.Read | None = None) -> Recorder:
    limits = Limits(burst=10_000, of_one=10_000, again_s=0)
    return Recorder(
        post,
        NODE,
        read=read,
        limiter=Limiter(Clock(), limits),
        clock=lambda: NOW_S,
        retries_s=(0.001, 0.001, 0.001),
    )


def sent(server: Server, *told: Event, posts: int) -> tuple[Recorder, list[dict[str, Any]]]:
    """Tell them, wait for so many requests and for the end of the thread; and what was logged."""
    made = recorder(server)
    with capture_logs() as lines:
        for one in told:
            made.tell(one)
        made.start()
        server.wait(posts)
        made.close(TIMEOUT_S)
    assert not made._thread.is_alive()
    return made, [dict(line) for line in lines if line["log_level"] != "debug"]


def test_an_event_is_posted() -> None:
    server = Server(201)
    made, logged = sent(server, REJECTED, posts=1)
    ((path, found),) = server.posted
    assert path == events.path_of(REJECTED)
    assert found == body(REJECTED)
    assert (made.dropped, logged) == (0, [])


def test_what_another_node_has_told_already_is_no_failure() -> None:
    made, logged = sent(Server(409), REJECTED, posts=1)
    assert (made.dropped, logged) == (0, [])


@pytest.mark.parametrize("status", [0, 401, 429, 500, 503])
def test_what_may_pass_is_tried_again(status: int) -> None:
    server = Server(status, status, 201)
    made, logged = sent(server, REJECTED, posts=3)
    assert (made.dropped, logged) == (0, [])


@pytest.mark.parametrize("status", [0, 500])
def test_what_does_not_pass_is_dropped_and_the_next_one_is_sent(status: int) -> None:
    server = Server(status, status, status, status, 201)
    made, logged = sent(server, event(note="first"), event(note="second"), posts=5)
    assert server.notes() == ["first"] * 4 + ["second"]
    assert (made.dropped, logged) == (1, [])


@pytest.mark.parametrize("status", [403, 404])
def test_what_rbac_forbids_is_switched_off_with_one_line(status: int) -> None:
    server = Server(status)
    made, logged = sent(server, event(note="1"), event(note="2"), event(note="3"), posts=1)
    assert server.notes() == ["1"]
    assert logged == [
        {
            "event": "no Events are sent from now on: the API server forbids it",
            "log_level": "warning",
            "status": status,
            "grant": "create on events of events.k8s.io",
        }
    ]
    made.tell(event(note="4"))
    assert made._queue.qsize() <= 3


def test_one_namespace_that_is_being_deleted_switches_nothing_off() -> None:
    server = Server(201, 403, 201, 403, 403, 201)
    told = [event(note=str(i)) for i in range(6)]
    made, logged = sent(server, *told, posts=6)
    assert server.notes() == ["0", "1", "2", "3", "4", "5"]
    assert (made.dropped, logged) == (3, [])


def test_permission_that_is_taken_away_switches_all_off() -> None:
    server = Server(201, 403)
    _, logged = sent(server, *(event(note=str(i)) for i in range(6)), posts=4)
    assert server.notes() == ["0", "1", "2", "3"]
    assert len(logged) == 1


def test_a_request_that_the_api_server_does_not_understand_is_said_and_not_repeated() -> None:
    server = Server(422, 201)
    made, logged = sent(server, event(note="1"), event(note="2"), posts=2)
    assert server.notes() == ["1", "2"]
    assert made.dropped == 1
    assert logged == [
        {
            "event": "event refused",
            "log_level": "warning",
            "object": "Service shop/web",
            "status": 422,
        }
    ]


def test_telling_never_waits_for_an_api_server_that_hangs() -> None:
    release, hanging = threading.Event(), threading.Event()

    def post(_path: str, _body: bytes) -> int:
        hanging.set()
        release.wait(TIMEOUT_S)
        return 201

    made = recorder(post)
    made.start()
    made.tell(event())
    assert hanging.wait(TIMEOUT_S)
    for number in range(1000):
        made.tell(event(note=str(number)))
    assert made.dropped == 1000 - 256
    made.close(0.001)  # nor does the end
    release.set()


def test_the_limit_is_kept_by_telling() -> None:
    made = Recorder(Server(), NODE)
    for _ in range(5):
        made.tell(REJECTED)
    assert (made._queue.qsize(), made.dropped) == (1, 4)


def test_the_uid_is_looked_for_again_with_each_try_until_it_is_found() -> None:
    answers: list[bytes | None] = [None, b'{"items": [{"metadata": {"uid": "7"}}]}']

    def read(_path: str, _query: object) -> bytes:
        answer = answers.pop(0)
        if answer is None:
            raise ConnectionError("nobody there")
        return answer

    server = Server(0, 500, 201)
    made = recorder(server, read)
    with capture_logs() as lines:
        made._send(REJECTED, 1)
    found = [sent["regarding"].get("uid") for _, sent in server.posted]
    assert found == [None, "7", "7"]
    assert not answers
    assert {line["log_level"] for line in lines} == {"debug"}


def test_the_end_does_not_wait_for_another_try() -> None:
    server = Server(500)
    made = Recorder(server, NODE, retries_s=(3600.0,))
    made.start()
    made.tell(REJECTED)
    server.wait()
    made.close(TIMEOUT_S)
    assert not made._thread.is_alive()
    assert made.dropped == 1


def test_it_can_be_closed_without_having_been_started() -> None:
    recorder(Server()).close()
