# SPDX-License-Identifier: Apache-2.0
"""The agent ends and comes back, in every way, and nobody who dials a Service notices.

What is in force lives in the kernel. A start finds it, compares it with what should be, and writes
the difference; where there is none it writes nothing.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ebpflb.datapath.ebpf import abi
from ebpflb.lab import Lab, Loop, Pod
from ebpflb.model import Protocol, parse_address
from tests.agents import START_S, AgentProcess
from tests.builders import cluster_ip
from tests.netns.agents import Agent, wait_until
from tests.netns.kernel import differing
from tests.netns.services import Manifests, Spec, ready, terminating

TCP_PORT = 8080
UDP_PORT = 8080
DEATHS = 100
# No HTTP servers: they say nothing here, and two agents on one node want the same ports.
QUIET = ("--healthz-bind-address", "", "--metrics-bind-address", "")

# What programs write by themselves, as often as somebody dials or an agent makes its probe.
BY_PROGRAMS = {"affinity", "connections", "probe", "stats", "udp_conn"}


class Place:
    """A node whose agent each test starts, with maps of the default sizes."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.node = lab.node("n1")
        self.client = self.node.pod("p1")
        self.backends = [self.node.pod(f"be{number}") for number in (1, 2, 3)]
        self.servers = {
            pod.name: pod.serve(tcp=[TCP_PORT], udp=[UDP_PORT]) for pod in self.backends
        }
        self.manifests = Manifests(folder / "manifests")
        self.agent = Agent(self.node, self.manifests, *QUIET)
        self.agents = [self.agent]

    def another(self, *flags: str) -> Agent:
        """One more agent on the same node and pins; it ends with the test."""
        self.agents.append(Agent(self.node, self.manifests, *QUIET, *flags))
        return self.agents[-1]

    def spec(self, number: int, *pods: Pod, affinity_s: int = 0) -> Spec:
        return Spec(
            name=f"s{number}",
            ipv4=cluster_ip(number),
            tcp={80: TCP_PORT},
            udp={53: UDP_PORT},
            endpoints=ready(*pods),
            affinity_s=affinity_s,
        )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Lab("restart") as lab:
        place = Place(lab, tmp_path_factory.mktemp("restart"))
        yield place
        complaints = [one for agent in place.agents for one in agent.complaints()]
        assert complaints == []


@pytest.fixture
def place(shared: Place) -> Iterator[Place]:
    """No agent runs, and s10 (all backends) and s11 (be1) are served."""
    shared.manifests.clear()
    shared.manifests.put(shared.spec(10, *shared.backends), shared.spec(11, shared.backends[0]))
    with shared.agent as agent:
        agent.settle()
        agent.end()
        yield shared
        for one in shared.agents:
            if one.alive:
                one.kill()


def assert_nothing_failed(*loops: Loop) -> None:
    """Stop them; each must have gone on, and not one attempt may have failed."""
    for loop in loops:
        loop.wait_for(lambda now: now.good > 100, timeout_s=60, what="enough attempts")
        outcome = loop.stop()
        assert outcome.failed == 0, (loop.title, outcome)
        assert outcome.good > 100, (loop.title, outcome)


def go_on(loop: Loop) -> None:
    good = loop.outcome().good
    loop.wait_for(lambda one: one.good > good + 20, timeout_s=30, what="it goes on")


# --- under load ---------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_a_hundred_restarts_cost_not_one_connect(place: Place) -> None:
    """Ended in order, killed when it serves, killed while it starts: in random order."""
    rounds = ["in order"] * 30 + ["killed"] * 40 + ["killed while it starts"] * 15
    random.shuffle(rounds)
    host = cluster_ip(10)
    loops = [
        place.client.tcp_loop(host, 80, interval_s=0.001),
        place.node.tcp_loop(host, 80, interval_s=0.003),
        place.client.hold_loop(host, 80, parallel=3, interval_s=0.02),
        place.client.udp_loop(host, 53, sockets=3, interval_s=0.005),
        place.client.udp_loop(host, 53, sockets=3, connected=True, interval_s=0.005),
    ]
    agent = place.another().start()
    before = agent.kernel.dump()
    deaths = 0
    for kind in rounds:
        agent.end(signal.SIGTERM if kind == "in order" else signal.SIGKILL)
        agent.launch()
        deaths += 1
        if kind == "killed while it starts":
            agent.wait_for("starting")
            agent.kill()
            agent.launch()
            deaths += 1
        synced = agent.wait_for("synced")
        assert synced["writes"] == 0, kind
    agent.kill()
    assert deaths == DEATHS
    assert_nothing_failed(*loops)
    changed = set(differing(before, place.agent.kernel.dump()))
    assert changed <= BY_PROGRAMS


def test_maps_that_a_start_left_half_made_are_not_taken_for_a_set(place: Place) -> None:
    """A start with another size that dies before its programs are attached leaves such a mixture.

    The programs of before serve on; the next start must not write into what they still use.
    """
    host, other = cluster_ip(10), cluster_ip(11)
    loop = place.client.tcp_loop(other, 80)
    folder = place.node.pin_path
    for name in ("frontends", "members", "names", "affinity", "connections"):
        for path in folder.glob(f"{name}-*"):
            path.unlink()
    for path in folder.glob("ports-*"):
        path.rename(path.with_name(f"ports-{'0' * 12}"))
    agent = place.agent.start()
    agent.settle()
    go_on(loop)
    assert place.client.tcp(host, 80, count=30).failed == 0
    agent.end()
    assert list(folder.glob("ports-000000000000")) == []
    outcome = loop.stop()
    assert outcome.failed == 0, outcome
    assert set(outcome.backends) == {"be1"}, outcome


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--tcp-peer-name",), id="other programs"),
        pytest.param(("--map-size", "ports=1000,backends=5000"), id="maps of other sizes"),
        pytest.param(
            ("--map-size", "frontends=99,members=99,names=99,udp_conn=99,affinity=99"),
            id="all maps of other sizes",
        ),
    ],
)
def test_programs_and_maps_are_replaced_under_load(place: Place, flags: tuple[str, ...]) -> None:
    """There and back: any pair of old and new programs and maps must do."""
    host = cluster_ip(10)
    loops = [
        place.client.tcp_loop(host, 80),
        place.client.udp_loop(host, 53, sockets=20, reopen=True, interval_s=0.001),
        place.client.hold_loop(host, 80, parallel=3, interval_s=0.01),
    ]
    before = place.agent.kernel.dump()
    other = place.another(*flags)
    for agent in (other, place.agent):
        agent.start()
        assert agent.log("attached"), "the programs were to be replaced"
        agent.settle()
        for loop in loops:
            go_on(loop)
        agent.end()
    assert_nothing_failed(*loops)
    after = place.agent.kernel.dump()
    assert (after["frontends"], after["hook connect4"]) != (None, before["hook connect4"])
    maps = sorted(path.name for path in place.node.pin_path.glob("*-*"))
    assert len(maps) == len(abi.MAPS), "maps of other sizes are left"


def test_a_udp_flow_outlives_three_restarts(place: Place) -> None:
    """B-05: a conversation stays with its backend and loses no datagram."""
    with (
        place.client.udp_loop(cluster_ip(10), 53, interval_s=0.005) as loop,
        place.client.udp_loop(cluster_ip(10), 53, connected=True, interval_s=0.005) as connected,
    ):
        for _ in range(3):
            for each in (loop, connected):
                go_on(each)
            place.agent.start()
            for each in (loop, connected):
                go_on(each)
            place.agent.end()
        for outcome in (loop.stop(), connected.stop()):
            assert outcome.failed == 0, outcome
            assert len(outcome.backends) == 1
            assert outcome.sources.keys() == {f"{cluster_ip(10)}:53"}


def test_affinity_outlives_a_restart(place: Place) -> None:
    """AFF-11"""
    specs = [place.spec(number, *place.backends, affinity_s=10_800) for number in range(20, 36)]
    place.manifests.put(*specs)
    place.agent.start().settle()
    pins = [place.client.tcp(spec.ipv4, 80, count=3).backends for spec in specs]
    assert all(len(pin) == 1 for pin in pins)
    place.agent.restart(signal.SIGKILL)
    assert [place.client.tcp(spec.ipv4, 80, count=3).backends for spec in specs] == pins


# --- nothing changed ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_restart_with_nothing_changed_writes_nothing(
    place: Place, number: signal.Signals
) -> None:
    """Every map, the settings and the programs are byte for byte and by id what they were."""
    place.manifests.put(
        place.spec(12, *place.backends, affinity_s=100),
        Spec(name="s13", ipv4=cluster_ip(13), tcp={80: TCP_PORT}),
        Spec(
            name="s14",
            ipv4=cluster_ip(14),
            ipv6="fd96::14",
            udp={53: UDP_PORT},
            endpoints=(*ready(place.backends[0]), *terminating(place.backends[1])),
        ),
    )
    agent = place.agent.start()
    agent.settle()
    agent.restart()  # whatever a first start leaves to the second
    before = agent.kernel.dump()
    agent.restart(number)
    agent.settle()
    (synced,) = agent.log("synced")
    assert synced["writes"] == 0
    assert agent.log("attached") == []
    # The agent's own connect() through the hooks, by which it sees that they run, is noted there.
    assert differing(before, agent.kernel.dump()) == ["probe"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_start_leaves_the_services_alone_until_all_is_known(
    place: Place, number: signal.Signals
) -> None:
    """SYNC-01: an agent that knows nothing yet deletes nothing; its API server never answers."""
    with place.node.inside(lambda: socket.create_server(("127.0.0.1", 0))) as server:
        server.settimeout(START_S)
        master = f"http://127.0.0.1:{server.getsockname()[1]}"
        log_path = place.manifests.folder.with_suffix(".api.log")
        agent = AgentProcess(place.node, log_path, "--master", master, *QUIET)
        with agent.launch(), server.accept()[0]:  # it has taken over the maps, and asks
            assert agent.log("synced") == []
            agent.end(number)
    assert place.client.tcp(cluster_ip(11), 80, count=3).backends == {"be1": 3}


# --- changed while it was away ------------------------------------------------------------------


def test_a_service_that_went_meanwhile_is_gone(place: Place) -> None:
    """B-79, B-95; the others are not touched."""
    with place.client.tcp_loop(cluster_ip(10), 80) as loop:
        place.manifests.remove("s11")
        place.agent.start().settle()
        assert place.client.tcp(cluster_ip(11), 80).good == 0
        assert_nothing_failed(loop)


def test_endpoints_that_changed_meanwhile_are_followed(place: Place) -> None:
    place.manifests.put(place.spec(11, place.backends[1]))
    assert place.client.tcp(cluster_ip(11), 80, count=3).backends == {"be1": 3}
    place.agent.start().settle()
    assert place.client.tcp(cluster_ip(11), 80, count=3).backends == {"be2": 3}


def test_an_address_that_passed_to_another_service_meanwhile_leads_there_alone(
    place: Place,
) -> None:
    """B-81: whoever dials it meets the old backend, nobody, or the new one, in this order."""
    place.manifests.put(place.spec(11, place.backends[0]), place.spec(12, place.backends[2]))
    place.agent.start().settle()
    place.agent.end()
    with (
        place.client.tcp_loop(cluster_ip(11), 80) as passed,
        place.client.tcp_loop(cluster_ip(12), 80) as other,
    ):
        go_on(passed)
        new = msgspec.structs.replace(place.spec(99, place.backends[1]), ipv4=cluster_ip(11))
        place.manifests.remove("s11")
        place.manifests.put(new)
        place.agent.start().settle()
        passed.wait_for(
            lambda one: one.backends.get("be2", 0) > 20, timeout_s=30, what="the new one answers"
        )
        outcome = passed.stop()
        assert [who for _, who in outcome.switches] == ["be1", "be2"]
        assert_nothing_failed(other)


def test_what_a_crash_or_another_left_in_the_maps_is_cleaned(place: Place) -> None:
    """B-81: two frontends of an id that nobody has, a member and a name of a third, a half slot."""
    with place.client.tcp_loop(cluster_ip(11), 80) as loop:
        kernel = place.agent.kernel
        key, value = abi.LAYOUTS["frontend_key"], abi.LAYOUTS["frontend_value"]
        for number, wrong_id in ((200, 0), (201, 0), (202, 77)):
            address = parse_address(cluster_ip(number))
            kernel.put(
                "frontends",
                key.pack(address, (80).to_bytes(2), Protocol.TCP),
                value.pack(wrong_id, 0, 0),
            )
        member = abi.LAYOUTS["member_key"].pack(parse_address("10.244.1.9"), b"\0\x50", 2, 4711)
        kernel.put("members", member, bytes(abi.LAYOUTS["member_value"].size))
        kernel.put("names", struct.pack("=I", 4711), abi.LAYOUTS["name"].pack(b"ghost/town"))
        port = abi.LAYOUTS["port"]
        half = port.pack(bytes(16), 900 | 1 << 20, 0, 0, 1, Protocol.TCP, 0)
        kernel.put("ports", struct.pack("=I", 900), half)

        agent = place.agent.start()
        agent.settle()
        assert place.client.tcp(cluster_ip(200), 80).good == 0
        with kernel.maps() as maps:
            slot = maps["ports"].lookup(struct.pack("=I", 900)) or b""
            assert port.unpack(slot).id == 0
        assert_nothing_failed(loop)


# --- one writer ---------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_second_agent_waits_says_so_once_and_takes_over(
    place: Place, number: signal.Signals
) -> None:
    """K22"""
    first = place.agent.start()
    second = place.another().launch()
    with place.client.tcp_loop(cluster_ip(10), 80) as loop:
        waiting = second.wait_for("waiting for the pin folder")
        assert str(first.pid) in waiting["holder"]
        assert waiting["pin_path"] == str(place.node.pin_path)
        place.manifests.remove("s11")
        first.settle()
        assert second.log("synced") == []
        first.end(number)
        second.wait_for("synced")
        assert len(second.log("waiting for the pin folder")) == 1
        place.manifests.put(place.spec(12, place.backends[0]))
        second.settle()
        assert_nothing_failed(loop)
    second.end()


def test_an_agent_that_waits_can_be_stopped(place: Place) -> None:
    place.agent.start()
    second = place.another().launch()
    second.wait_for("waiting for the pin folder")
    assert second.end() == 0


def test_a_compiler_that_outlives_its_agent_does_not_hold_the_lock(place: Place) -> None:
    """Whatever other tests have pinned: another option makes another program, so it compiles."""
    agent = place.another("--map-size", "names=500").launch()
    child = wait_until(lambda: _loader_of(agent.pid), what="the compiler runs")
    os.kill(child, signal.SIGSTOP)
    agent.kill()
    try:
        assert Path(f"/proc/{child}").exists()
        next_one = place.another().start()
        assert next_one.log("waiting for the pin folder") == []
        assert Path(f"/proc/{child}").exists()
        next_one.settle()
        next_one.end()
    finally:
        os.kill(child, signal.SIGKILL)


def _loader_of(pid: int) -> int:
    """The child process that compiles, 0 where there is none yet."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if b"ebpflb.datapath.ebpf.loader" in Path(f"/proc/{child}/cmdline").read_bytes():
            return int(child)
    return 0
