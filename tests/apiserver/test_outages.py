"""What is said of a server that cannot be reached: few lines, each with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from ebpflb.sources.cluster import ApiSource, Outages
from ebpflb.sources.failures import ApiError, Reason
from tests.apiserver.conftest import Watching
from tests.apiserver.consumer import Consumer
from tests.apiserver.fake import Answer, FakeApiServer


def test_losing_the_server_is_two_lines(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """HZ-07's other half: one line when it is lost, one when it is back, for three watches."""
    server.down()
    consumer.wait(lambda: consumer.failures.total() > 20)
    server.up()
    consumer.wait(lambda: consumer.said("api_back"))
    [(lost, fields), (back, _)] = consumer.notices
    assert (lost, back) == ("api_lost", "api_back")
    assert fields["server"] == server.url
    assert fields["resource"] is None
    assert "onnection" in fields["reason"]  # refused, or reset while it went down
    assert "stays in force" in fields["action"]


def test_a_resource_that_may_not_be_read_is_named_and_the_others_go_on(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.forbidden = {"endpointslices"}
    watching()
    consumer.wait(lambda: consumer.failed("EndpointSlice", "list", "forbidden") > 3)
    consumer.wait(lambda: consumer.names("Service") and consumer.names("Node"))
    [lost] = consumer.said("api_lost")
    assert lost["resource"] == "EndpointSlice"
    assert 'cannot list resource "endpointslices"' in lost["reason"]
    assert "grant list and watch" in lost["action"]
    server.behave()
    consumer.wait_synced()
    consumer.wait(lambda: consumer.said("api_back"))


def test_what_goes_wrong_next_is_told_too(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.down()
    consumer.wait(lambda: consumer.said("api_lost"))
    server.forbidden = {"services"}
    server.up()
    consumer.wait(lambda: len(consumer.said("api_lost")) == 2)
    assert [each["resource"] for each in consumer.said("api_lost")] == [None, "Service"]
    server.behave()
    consumer.wait(lambda: len(consumer.said("api_back")) == 2)


def test_credentials_that_are_refused_are_told_once(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.tokens = {"Bearer another"}
    server.cut()
    consumer.wait(lambda: consumer.failed("Service", "watch", "unauthorized") > 3)
    [lost] = consumer.said("api_lost")
    assert "answers 401" in lost["reason"]
    server.behave()
    consumer.wait(lambda: consumer.said("api_back"))


class Said:
    """Outages with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.lines: list[tuple[str, str]] = []
        self.outages = Outages(self._notice, lambda: self.now)

    def _notice(self, event: str, /, **fields: Any) -> None:
        self.lines.append((event, str(fields.get("reason") or fields.get("resource"))))

    def failed(self, reason: Reason, *, row: int = 1, stream: bool = False) -> None:
        error = ApiError(reason, reason)
        self.outages.failed("Service", "watch", error, row=row, stream=stream)

    def works(self, *, stream: bool = False) -> None:
        self.outages.works("Service", stream=stream)


@pytest.fixture
def said() -> Said:
    return Said()


def test_each_reason_is_told_once_in_an_outage(said: Said) -> None:
    reasons: tuple[Reason, ...] = ("unreachable", "unreachable", "server_error", "unreachable")
    for reason in reasons:
        said.failed(reason)
    said.works()
    assert said.lines == [
        ("api_lost", "unreachable"),
        ("api_lost", "server_error"),
        ("api_back", "None"),
    ]


def test_a_server_that_comes_and_goes_does_not_fill_the_log(said: Said) -> None:
    for _ in range(600):
        said.now += 1.0
        said.failed("unreachable")
        said.works()
    assert len(said.lines) == 20  # ten minutes, two lines each


def test_a_stream_that_breaks_is_told_in_the_third_row(said: Said) -> None:
    for row in (1, 2):
        said.failed("cut", row=row, stream=True)
    assert not said.lines
    said.failed("cut", row=3, stream=True)
    assert said.lines == [("api_lost", "cut")]
    said.works()  # that it answers says nothing of the stream
    assert len(said.lines) == 1
    said.works(stream=True)
    assert said.lines[1:] == [("api_back", "Service")]


def test_an_outage_that_was_not_told_does_not_end_aloud(said: Said) -> None:
    said.failed("unreachable")
    said.works()
    said.now += 1.0
    said.failed("unreachable")
    said.works()
    assert len(said.lines) == 2


def test_a_long_outage_is_counted_from_its_beginning(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    now = [0.0]
    server.spoil(Answer(503), times=-1)
    watching(clock=lambda: now[0])
    consumer.wait(lambda: consumer.said("api_lost"))
    now[0] = 3600.0
    server.behave()
    consumer.wait(lambda: {"resource": None, "lost_s": 3600.0} in consumer.said("api_back"))
