# SPDX-License-Identifier: Apache-2.0
"""Pings of Services' addresses: answered where somebody is behind them, by our programs alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ebpflb.model import Family
from tests.netns.services import ready, terminating, unready
from tests.netns.site import PATIENCE_S, SILENCE_S, Site, To, site
from tests.netns.world import Way


def place_with(tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("ping"), *flags) as one:
        one.backend("be1")
        one.n1.pod("p1")
        one.n1.pod("k1", virtual=True)
        with one.running():
            yield one


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from place_with(tmp_path_factory)


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from place_with(tmp_path_factory, "--ping", "off")


@pytest.fixture(params=["x", "p1", "k1", "n1"], ids=["outside", "pod", "virtual pod", "host"])
def client(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


ADDRESSES = (To.CLUSTER_IP, To.EXTERNAL, To.BALANCER)


@pytest.mark.parametrize("to", ADDRESSES, ids=lambda to: to.value)
def test_an_address_with_an_endpoint_answers(
    place: Site, client: str, family: Family, to: To
) -> None:
    """The answer comes from that very address, and is counted; the backend hears nothing."""
    before = place.agent.kernel.stats()["pings"]
    (backend,) = place.pods("be1")
    with place.serve("be1") as service, backend.capture() as capture:
        host, _ = service.address(Way.TCP, family, to)
        outcome = place.client(client).ping(host, count=5, timeout_s=PATIENCE_S)
        assert outcome.good == 5, outcome
        assert outcome.sources == {host: 5}
        assert capture.packets(protocol="icmp6" if ":" in host else "icmp", icmp="128/0") == 0
        assert capture.packets(protocol="icmp", icmp="8/0") == 0
    assert place.agent.kernel.stats()["pings"] == before + 5


@pytest.mark.parametrize("to", ADDRESSES, ids=lambda to: to.value)
def test_an_address_answers_for_as_long_as_somebody_is_behind_it(
    place: Site, client: str, family: Family, to: To
) -> None:
    """A terminating endpoint that serves is somebody (TOP-03)."""
    (backend,) = place.pods("be1")
    with place.serve() as service:
        host, _ = service.address(Way.TCP, family, to)
        for endpoints, answers in (
            ((), 0),
            (ready(backend), 1),
            (terminating(backend), 1),
            (unready(backend), 0),
        ):
            service.set(endpoints=endpoints)
            patience_s = PATIENCE_S if answers else SILENCE_S
            assert place.client(client).ping(host, timeout_s=patience_s).good == answers


def test_nothing_else_is_answered(place: Site, client: str, family: Family) -> None:
    """An address of the range that no Service has; and pods answer for themselves."""
    free = "fd96::9999" if family is Family.IPV6 else "10.96.99.99"
    (backend,) = place.pods("be1")
    before = place.agent.kernel.stats()["pings"]
    with place.serve("be1"):
        assert place.client(client).ping(free, timeout_s=SILENCE_S).good == 0
        for known in (backend, place.n1, place.x):
            host = known.ipv6 if family is Family.IPV6 else known.ipv4
            assert place.client(client).ping(host, timeout_s=PATIENCE_S).good == 1
    assert place.agent.kernel.stats()["pings"] == before


def test_many_pings_in_flight_find_their_own(place: Site, client: str, family: Family) -> None:
    """Identifier, number and payload come back as they went."""
    with place.serve("be1") as service:
        host, _ = service.address(Way.TCP, family, To.CLUSTER_IP)
        outcome = place.client(client).ping(host, count=200, timeout_s=PATIENCE_S)
    assert outcome.failed == 0, outcome


def test_it_can_be_switched_off(silent: Site, client: str, family: Family) -> None:
    """As with kube-proxy in iptables mode; TCP is served all the same."""
    with silent.serve("be1") as service:
        for to in ADDRESSES:
            host, port = service.address(Way.TCP, family, to)
            assert silent.client(client).ping(host, timeout_s=SILENCE_S).good == 0
            assert silent.client(client).tcp(host, port).good == 1
    assert silent.agent.kernel.stats()["pings"] == 0
