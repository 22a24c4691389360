"""Lists: pages, versions, what goes wrong with them, and that nothing is deleted too early."""

from __future__ import annotations

import json
from typing import Final

import msgspec
import pytest

from ebpflb.model import ObjectKey, Synced, Upserted
from ebpflb.sources import watch
from ebpflb.sources.cluster import ApiSource
from tests.apiserver.conftest import Watching
from tests.apiserver.consumer import QUICK, Consumer
from tests.apiserver.fake import (
    Answer,
    Body,
    Drip,
    EmptyList,
    FakeApiServer,
    HalfList,
    Silence,
    Spoiler,
)
from tests.builders import cluster_ip, service_key, service_object, slice_object

SLICES: Final = "endpointslices"
SERVICES: Final = "services"


def slices(count: int) -> list[dict[str, object]]:
    return [slice_object(f"web-{number}") for number in range(count)]


def test_only_what_is_for_us_is_asked_for(server: FakeApiServer, source: ApiSource) -> None:
    """SVC-01, SVC-02, SVC-03, SYNC-12."""
    assert server.queries("list", "services")[0] == {
        "labelSelector": "!service.kubernetes.io/service-proxy-name",
        "fieldSelector": "spec.clusterIP!=None",
        "limit": "500",
        "resourceVersion": "0",
    }
    assert server.queries("list", "endpointslices")[0]["labelSelector"] == (
        "!service.kubernetes.io/headless"
    )
    assert server.queries("list", "nodes")[0]["fieldSelector"] == "metadata.name=node-1"
    # Nothing else is: an aggregated API that is down, which breaks discovery, is not noticed.
    assert {request.resource for request in server.requests} == {SERVICES, SLICES, "nodes"}


def test_a_long_list_comes_in_pages(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.put(*slices(1203))
    watching()
    consumer.wait_synced()
    consumer.wait_equal(server)
    first, *others = server.queries("list", SLICES)
    assert first["resourceVersion"] == "0"
    assert len(others) == 2
    assert all("continue" in query and "resourceVersion" not in query for query in others)
    assert server.count("list", SLICES) == 1


@pytest.mark.parametrize("spoilt", [1, 2], ids=["once", "twice: then all at once"])
def test_410_between_pages_begins_anew(
    spoilt: int,
    server: FakeApiServer,
    watching: Watching,
    consumer: Consumer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "PAGE", 10)
    server.put(*slices(35))
    for number in range(spoilt):
        server.spoil(Answer(410), "endpointslices", "list", skip=2 + number)
    watching()
    consumer.wait_synced()
    consumer.wait_equal(server)
    assert consumer.failed("EndpointSlice", "list", "gone") == spoilt
    starts = [query for query in server.queries("list", SLICES) if "continue" not in query]
    assert [query.get("resourceVersion") for query in starts] == ["0", None, None][: spoilt + 1]
    assert ("limit" in starts[-1]) is (spoilt == 1)
    assert not consumer.deletions()


def test_a_list_anew_is_at_least_as_new_as_what_is_known(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.put(service_object())
    consumer.wait_equal(server)
    server.spoil(Body(b"garbage"), "services", "watch")
    server.end_watches("services", "cut")
    server.wait(lambda: server.count("list", "services") == 2)
    query = server.queries("list", "services")[1]
    assert query["resourceVersion"] == str(server.version)
    assert "limit" not in query  # old servers would list just that version


def test_a_server_that_is_behind_is_asked_for_its_newest(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """As after a restored backup of etcd: its versions begin anew, below ours."""
    with server.changed:
        server.version = 50
    server.put(service_object())
    server.spoil(Body(b"garbage"), "services", "watch")
    server.end_watches("services", "cut")
    consumer.wait_equal(server)
    assert consumer.failed("Service", "list", "too_new") == 1
    assert "resourceVersion" not in server.queries("list", "services")[-1]


def test_a_list_anew_yields_the_deletions_that_it_implies(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    """SYNC-07, B-91."""
    server.put(service_object("a"), service_object("b"), service_object("c"), slice_object())
    consumer.wait_equal(server)
    server.down()
    server.delete("Service", "a")
    server.put(service_object("b", cluster_ips=[cluster_ip(77)]), service_object("d"))
    server.compact()
    server.up()
    consumer.wait_equal(server)
    assert consumer.deletions() == [service_key("a")]


def test_what_was_deleted_while_nobody_watched_is_never_told(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """B-95, this side of it: what the kernel still has is compared after Synced."""
    server.put(service_object())
    server.delete("Service", "web")
    watching()
    consumer.wait_synced()
    assert consumer.names("Service") == {"kubernetes"}
    assert not consumer.deletions()


@pytest.mark.parametrize(
    ("spoiler", "reason"),
    [
        pytest.param(HalfList(), "cut", id="the connection breaks in the middle"),
        pytest.param(Body(b""), "garbage", id="an empty body"),
        pytest.param(Body(b"null"), "garbage", id="null"),
        pytest.param(Body(b"{}"), "garbage", id="an empty object"),
        pytest.param(Body(b"[]"), "garbage", id="an array"),
        pytest.param(Body(b'{"items":[]}'), "garbage", id="a list without a version"),
        pytest.param(
            Body(b'{"metadata":{"resourceVersion":"999"}}'), "garbage", id="a list without items"
        ),
        pytest.param(
            Body(b'{"metadata":{"resourceVersion":"999"},"items":[{"metadata":{"name":"x"}},'),
            "garbage",
            id="half a list in good order",
        ),
        pytest.param(
            Body(b'{"metadata":{"resourceVersion":"999"},"items":7}'), "garbage", id="no items"
        ),
        pytest.param(Body(b"<html>log in</html>"), "garbage", id="a captive portal"),
        pytest.param(Body(b'{"kind":"Status","code":500}'), "garbage", id="a Status with 200"),
        pytest.param(Body(b"[" * 100_000), "garbage", id="nested without end"),
        pytest.param(Answer(500), "server_error", id="500"),
        pytest.param(Answer(302, headers=(("Location", "/x"),)), "refused", id="a redirect"),
        pytest.param(Silence(), "silent", id="no answer"),
        pytest.param(Drip(size=100_000, forever=True), "silent", id="no end"),
    ],
)
def test_no_list_is_no_deletion(
    spoiler: Spoiler, reason: str, server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    timing = {"list_silence_s": 0.1} if reason == "silent" else {}
    watching(timing=msgspec.structs.replace(QUICK, **timing))
    consumer.wait_synced()
    server.put(service_object())
    consumer.wait_equal(server)
    server.spoil(spoiler, "services", "list", times=3)
    server.down()
    server.delete("Service", "web")
    server.compact()
    server.up()
    consumer.wait(lambda: consumer.failed("Service", "list", reason) >= 2)
    server.behave()
    consumer.wait_equal(server)
    assert consumer.deletions() == [service_key("web")]


def test_nothing_is_deleted_while_lists_do_not_come_to_an_end(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.put(service_object("a"), service_object("b"))
    consumer.wait_equal(server)
    server.spoil(HalfList(), "services", "list", times=-1)
    server.down()
    server.delete("Service", "a")
    server.compact()
    server.up()
    consumer.wait(lambda: consumer.failed("Service", "list", "cut") >= 3)
    assert not consumer.deletions()
    server.behave()
    consumer.wait_equal(server)


def test_an_empty_list_is_not_believed_at_once(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.spoil(EmptyList(), "endpointslices", "list")
    server.compact()
    server.put(service_object())  # the version moves on, so that the old one is gone
    server.compact()
    server.end_watches("endpointslices", "cut")
    consumer.wait(lambda: consumer.said("api_list_doubted"))
    consumer.wait(lambda: consumer.lists["EndpointSlice", True] == 1)
    assert not consumer.deletions()
    assert consumer.said("api_list_doubted")[0]["resource"] == "EndpointSlice"
    consumer.wait_equal(server)


def test_an_empty_list_is_believed_the_second_time(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.delete("EndpointSlice", "kubernetes")
    consumer.wait(lambda: not consumer.names("EndpointSlice"))  # a watch's word is enough
    server.put(slice_object())
    consumer.wait_equal(server)
    server.down()
    server.delete("EndpointSlice", "web-1")
    server.compact()
    server.up()
    consumer.wait_equal(server)
    assert len(consumer.said("api_list_doubted")) == 1


def test_a_list_of_strangers_is_not_believed_at_once(
    server: FakeApiServer, source: ApiSource, consumer: Consumer
) -> None:
    server.put(service_object())
    consumer.wait_equal(server)
    other = json.dumps(
        {
            "metadata": {"resourceVersion": str(server.version)},
            "items": [service_object("stranger")],
        }
    )
    server.spoil(Body(other.encode()), "services", "list")
    server.spoil(Body(b"garbage"), "services", "watch")
    server.end_watches("services", "cut")
    consumer.wait(lambda: consumer.said("api_list_doubted"))
    consumer.wait_equal(server)
    assert consumer.deletions() == [service_key("stranger")]


def test_an_empty_first_list_is_not_believed_at_once(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """A server that has just started may have nothing yet; the kernel's maps would be emptied."""
    server.spoil(EmptyList(), "services", "list")
    server.spoil(EmptyList(), "endpointslices", "list")
    watching()
    consumer.wait_synced()
    consumer.wait_equal(server)
    before = consumer.events[: consumer.events.index(Synced())]
    keys = {event.obj.key for event in before if isinstance(event, Upserted)}
    assert {service_key("kubernetes"), ObjectKey("EndpointSlice", "default", "kubernetes")} <= keys


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_list_that_drips_arrives(
    size: int, server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.put(service_object())
    server.spoil(Drip(size=size), "services", "list")
    watching()
    consumer.wait_synced()
    consumer.wait_equal(server)


def test_a_list_of_50_mb_arrives_though_the_server_makes_no_pages(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.ignores_limit = True
    padding = {"note": '},{"metadata":' * 800}  # what a piece may be cut at, in a text
    many = [slice_object(f"web-{number}") for number in range(5000)]
    for each in many:
        each["metadata"]["annotations"] = padding
    server.put(*many)
    watching()
    consumer.wait_synced()
    assert len(consumer.names("EndpointSlice")) == 5001
    assert consumer.bytes > 50_000_000
    assert server.count("list", SLICES) == 1


def test_lists_are_compressed_where_the_server_can(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.compresses = True
    server.put(*slices(1000))
    watching()
    consumer.wait_synced()
    consumer.wait_equal(server)
    assert consumer.bytes < 100_000


def test_a_server_that_knows_no_field_selector_is_asked_without(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    """Kubernetes 1.21. Headless Services come then, and are not ours all the same (SVC-02)."""
    server.fields = False
    server.put(service_object("headless", clusterIP="None", clusterIPs=["None"]))
    watching()
    consumer.wait_synced()
    server.put(service_object())
    consumer.wait(lambda: consumer.names("Service") == {"kubernetes", "web"})
    assert not consumer.said("api_lost")


def test_a_server_without_endpoint_slices_is_named_and_asked_again(
    server: FakeApiServer, watching: Watching, consumer: Consumer
) -> None:
    server.missing = {"endpointslices"}
    watching()
    consumer.wait(lambda: consumer.failed("EndpointSlice", "list", "missing") >= 3)
    consumer.wait(lambda: consumer.names("Service") == {"kubernetes"})
    [lost] = consumer.said("api_lost")
    assert "discovery.k8s.io/v1" in lost["action"]
    assert lost["resource"] == "EndpointSlice"
    assert not consumer.synced
    server.behave()
    consumer.wait_synced()
    consumer.wait(lambda: consumer.said("api_back"))
    assert [each["resource"] for each in consumer.said("api_back")] == ["EndpointSlice"]


def test_recorded_lists_are_read(
    server: FakeApiServer,
    watching: Watching,
    consumer: Consumer,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    file = tmp_path_factory.mktemp("recorded") / "services.json"
    recorded = {"kind": "ServiceList", "items": [service_object("one"), service_object("two")]}
    for item in recorded["items"]:
        del item["kind"]  # type: ignore[attr-defined]
    file.write_text(json.dumps(recorded))
    server.replay(file)
    watching()
    consumer.wait_synced()
    assert consumer.names("Service") == {"kubernetes", "one", "two"}
