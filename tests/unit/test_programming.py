"""How long a change of endpoints takes until this node follows it (MET-06, MET-30)."""

from __future__ import annotations

import pytest

from ebpflb.model import EndpointSlice, Family, ObjectKey, Protocol, ServicePortName
from ebpflb.programming import BUCKETS_S, FINE_BUCKETS_S, Programming

START_S = 1000.0


def endpoints(
    triggered_s: float, name: str = "web-1", service: str = "web", family: Family = Family.IPV4
) -> EndpointSlice:
    return EndpointSlice("default", name, service, family, (), (), (), b"", triggered_s=triggered_s)


def port(service: str = "web", family: Family = Family.IPV4) -> ServicePortName:
    return ServicePortName("default", service, "http", Protocol.TCP, family)


@pytest.fixture
def tracker() -> Programming:
    return Programming(START_S)


def test_a_change_takes_from_its_trigger_to_the_end_of_the_sync(tracker: Programming) -> None:
    tracker.changed(endpoints(1001.0))
    assert tracker.synced(1003.5) == ((Family.IPV4, 2.5),)
    assert tracker.synced(1004.0) == ()


def test_each_change_of_a_slice_counts(tracker: Programming) -> None:
    tracker.changed(endpoints(1001.0))
    tracker.changed(endpoints(1002.0))
    tracker.changed(endpoints(1003.0, name="web-2", family=Family.IPV6))
    assert tracker.synced(1004.0) == ((Family.IPV4, 3.0), (Family.IPV4, 2.0), (Family.IPV6, 1.0))


@pytest.mark.parametrize("triggered_s", [0.0, 999.0, START_S])
def test_what_was_triggered_before_the_start_does_not_count(
    triggered_s: float, tracker: Programming
) -> None:
    tracker.changed(endpoints(triggered_s))
    assert tracker.synced(1001.0) == ()


def test_what_is_deleted_before_the_sync_does_not_count(tracker: Programming) -> None:
    tracker.changed(endpoints(1001.0))
    tracker.changed(endpoints(1001.0, name="web-2"))
    tracker.deleted(ObjectKey("EndpointSlice", "default", "web-1"))
    tracker.deleted(ObjectKey("EndpointSlice", "default", "unknown"))
    assert tracker.synced(1002.0) == ((Family.IPV4, 1.0),)


def test_what_a_sync_could_not_put_into_force_waits_on(tracker: Programming) -> None:
    tracker.changed(endpoints(1001.0))
    tracker.changed(endpoints(1001.0, name="db-1", service="db"))
    assert tracker.synced(1002.0, {port("web")}) == ((Family.IPV4, 1.0),)
    assert tracker.synced(1003.0, {port("web", Family.IPV6)}) == ((Family.IPV4, 2.0),)


def test_a_slice_that_moves_to_another_service_begins_anew(tracker: Programming) -> None:
    tracker.changed(endpoints(1001.0))
    tracker.changed(endpoints(1002.0, service="db"))
    assert tracker.synced(1003.0) == ((Family.IPV4, 1.0),)


def test_a_clock_that_is_behind_makes_nothing_negative(tracker: Programming) -> None:
    tracker.changed(endpoints(1005.0))
    assert tracker.synced(1004.0) == ((Family.IPV4, 0.0),)


def test_while_nothing_is_synced_the_memory_is_bounded(tracker: Programming) -> None:
    for number in range(1, 1000):
        tracker.changed(endpoints(START_S + number))
    assert len(tracker.synced(2000.0)) == 64


def test_the_buckets_are_kube_proxys_and_ours_are_finer() -> None:
    assert BUCKETS_S[:4] == (0.25, 0.5, 1, 2)
    assert BUCKETS_S[60:63] == (59, 60, 65)
    assert BUCKETS_S[-8:] == (115, 120, 150, 180, 210, 240, 270, 300)
    assert len(BUCKETS_S) == 2 + 59 + 12 + 7
    assert (FINE_BUCKETS_S[0], FINE_BUCKETS_S[-1]) == (0.001, 16.384)
