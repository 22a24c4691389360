# SPDX-License-Identifier: Apache-2.0
"""The agent ends and comes back, in every way, while packets are translated: nobody notices."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ebpflb.lab import Loop
from ebpflb.model import Family
from tests.netns.services import ready
from tests.netns.site import Served, Site, To, goes_on, site
from tests.netns.world import Way

PAUSE_S = 0.005


@pytest.fixture
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("restart"), nodes=2) as one:
        one.backend("be1")
        one.backend("be2")
        one.backend("far", one.n2)
        one.n1.pod("k1", virtual=True)
        with one.running():
            yield one


class Traffic(NamedTuple):
    """Long connections, short ones and datagrams, none of them seen by a hook."""

    loops: list[Loop]

    def go_on(self, *, by: int = 20) -> None:
        """Wait until each of them has had some more answers."""
        for loop in self.loops:
            goes_on(loop, by=by, timeout_s=60)

    def stop(self) -> None:
        """Nothing has failed, and nothing was lost."""
        for loop in self.loops:
            outcome = loop.stop()
            assert outcome.failed == 0, (loop.title, outcome)


@contextlib.contextmanager
def traffic(place: Site, service: Served) -> Iterator[Traffic]:
    with contextlib.ExitStack() as stack:
        loops = []
        for name, to, family in (
            ("x", To.NODE_PORT, Family.IPV4),
            ("x", To.BALANCER, Family.IPV6),
            ("k1", To.CLUSTER_IP, Family.IPV4),
            ("k1", To.EXTERNAL, Family.IPV6),
        ):
            client = place.client(name)
            by_tcp, by_udp = (service.address(way, family, to) for way in (Way.TCP, Way.UDP))
            loops += [
                client.hold_loop(*by_tcp, parallel=3, interval_s=PAUSE_S),
                client.tcp_loop(*by_tcp, reset=True, interval_s=PAUSE_S, timeout_s=10.0),
                client.udp_loop(*by_udp, sockets=4, interval_s=PAUSE_S, timeout_s=10.0),
            ]
        for loop in loops:
            stack.enter_context(loop)
        running = Traffic(loops)
        running.go_on(by=3)
        yield running


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
def test_traffic_notices_nothing_of_an_agent_that_ends_and_comes_back(
    place: Site, number: signal.Signals
) -> None:
    """SYNC-09, B-133, E-S09: several times; programs and flows are found again."""
    with place.serve("be1", "be2", "far") as service, traffic(place, service) as running:
        for _ in range(2):
            place.agent.end(number)
            running.go_on()
            place.agent.launch().serving_packets()
            running.go_on()
        service.set(endpoints=ready(*place.pods("be1", "far")))
        running.go_on()
        running.stop()
    assert place.agent.complaints() == []


def test_traffic_notices_nothing_of_a_lost_pin_folder(place: Site) -> None:
    """B-133: whoever removes it; new flows go on with the programs of the agent that comes next.

    Flows that were open live in the maps that are lost with the folder: those may break, once.
    """
    with place.serve("be1", "far") as service:
        host, port = service.address(Way.TCP, Family.IPV4)
        with place.x.tcp_loop(host, port, reset=True, interval_s=PAUSE_S, timeout_s=10.0) as loop:
            for _ in range(2):
                place.agent.kill()
                shutil.rmtree(place.n1.pin_path)
                place.agent.launch().serving_packets()
                place.agent.settle()
                goes_on(loop, by=20)
            outcome = loop.stop()
        assert outcome.failed <= 3, outcome
        assert place.x.tcp(host, port, count=50).failed == 0


def test_cleanup_says_how_many_flows_it_cuts(place: Site) -> None:
    """K17: and afterwards the node is as if we had never been."""
    with place.serve("be1", "far") as service:
        host, port = service.address(Way.TCP, Family.IPV4)
        with place.x.hold_loop(host, port, parallel=7, interval_s=0.05) as held:
            held.wait_for(lambda one: one.good >= 21, timeout_s=30, what="they are open")
            flags = ["--pin-path", str(place.n1.pin_path), "--cgroup", str(place.n1.cgroup_root)]
            place.agent.end()
            said = place.n1.python(module="ebpflb", arguments=["cleanup", *flags]).stdout
            found = re.search(r"cuts +(\d+) open flows", said)
            assert found, said
            assert int(found[1]) >= 7
            held.wait_for(lambda one: one.failed >= 7, timeout_s=60, what="they are cut")
        assert place.x.tcp(host, port, timeout_s=0.5).good == 0
        rules = place.n1.run(["nft", "list", "ruleset"]).stdout
        assert "ebpflb" not in rules.lower()
        links = place.n1.run(["tc", "filter", "show", "dev", "eth0", "ingress"]).stdout
        assert "ebpflb" not in links
        place.agent.launch().serving_packets()
        assert place.x.tcp(host, port, count=5).failed == 0
