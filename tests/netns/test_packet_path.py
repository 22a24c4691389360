# SPDX-License-Identifier: Apache-2.0
"""The agent and the devices: its programs get there, stay there once, follow, are proved, and go.

What the programs do to packets is seen elsewhere. Here nobody sends any but the agent itself.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from click.testing import CliRunner, Result

from ebpflb.cli import main
from ebpflb.datapath.ebpf import abi, libbpf
from ebpflb.datapath.ebpf.maps import LINKS
from ebpflb.datapath.ebpf.tc import At, Direction, Hook, Tc
from ebpflb.lab import Lab, Node
from tests.builders import cluster_ip
from tests.netns.agents import EBPFLB, SERVES_PACKETS, SMALL, Agent, wait_until
from tests.netns.kernel import differing
from tests.netns.services import Manifests, Spec
from tests.netns.tcprograms import OK, UNSPEC, Program, pinned, tc

T = TypeVar("T")

INGRESS, EGRESS = Direction.INGRESS, Direction.EGRESS
NO_TCX = (sys.executable, str(Path(__file__).with_name("no_tcx.py")))
OFTEN = ("--map-size", SMALL, "--audit-period", "0.2")
REPAIRED = "audit repaired a difference"
PROVED = {"sees_pods", "sees_host"}
# What an agent's start writes by itself: its own connect() and packets through the hooks.
BY_START = {"probe"}


class Place:
    """A node with an agent, an uplink and two pods' devices."""

    def __init__(self, lab: Lab, folder: Path, *, way: str, pod_links: str) -> None:
        self.lab = lab
        self.way = way
        self.node: Node = lab.node("n1", pod_links=pod_links)  # type: ignore[arg-type]
        self.pods = [self.node.pod(name) for name in ("p1", "p2")]
        self.manifests = Manifests(folder / "manifests")
        self.manifests.put(Spec(name="web", ipv4=cluster_ip(10), tcp={80: 8080}))
        self.agent = self.another()

    def another(self, *flags: str) -> Agent:
        command = EBPFLB if self.way == "tcx" else NO_TCX
        return Agent(self.node, self.manifests, *OFTEN, *flags, command=command)

    # --- what runs ------------------------------------------------------------------------------

    def devices(self) -> dict[str, int]:
        return self.node.links(
            lambda links: {name: links.index(name) for name in links.names() if name != "lo"}
        )

    def inside(self, act: Callable[[Tc], T]) -> T:
        def go() -> T:
            with contextlib.closing(Tc()) as ways:
                return act(ways)

        return self.node.inside(go)

    def at(self, device: str, direction: Direction) -> At:
        return At(self.devices()[device], device, direction)

    def look(self, device: str, direction: Direction) -> Hook:
        at = self.at(device, direction)
        return self.inside(lambda ways: ways.look(at))

    def names(self, device: str, direction: Direction) -> list[str]:
        return [one.name for one in self.look(device, direction).entries]

    def running(self) -> dict[str, list[int]]:
        """The ids of programs of ours, by hook."""
        found = {}
        for device in self.devices():
            for direction in Direction:
                ours = self.look(device, direction).ours
                if ours:
                    found[f"{device} {direction.value}"] = [one.program for one in ours]
        return found

    def runs_on(self, *devices: str) -> bool:
        """Whether one copy runs at both hooks of these devices, and none elsewhere."""
        running = self.running()
        wanted = {f"{device} {direction.value}" for device in devices for direction in Direction}
        return running.keys() == wanted and all(len(ids) == 1 for ids in running.values())

    @property
    def ours(self) -> list[str]:
        return ["eth0", *(pod.device for pod in self.pods)]

    def settings(self) -> Any:
        layout = abi.LAYOUTS["settings"]
        with self.agent.kernel.settings() as memory:
            return layout.unpack(memory.view[: layout.size])

    def state(self) -> set[str]:
        words = abi.names_of("STATE_")
        return {word for bit, word in words.items() if self.settings().state & bit}

    def roles(self) -> set[tuple[str, str]]:
        names = {number: name for name, number in self.devices().items()}
        words = abi.names_of("DEVICE_")
        layout = abi.LAYOUTS["device_key"]
        with self.agent.kernel.maps() as maps:
            keys: list[Any] = [layout.unpack(key) for key, _ in maps["devices"].items()]
        return {(names.get(key.index, str(key.index)), words[key.role]) for key in keys}

    def dump(self) -> Mapping[str, Any]:
        return {**self.agent.kernel.dump(), **self.running()}

    # --- what others do -------------------------------------------------------------------------

    @contextlib.contextmanager
    def foreign(
        self,
        device: str,
        direction: Direction,
        *,
        verdict: int = UNSPEC,
        way: str = "clsact",
        name: str = "foreign",
        stays: bool = True,
    ) -> Iterator[Program]:
        """A program of somebody else's, attached as they do it, and removed again."""
        program = Program(name, verdict)
        at = self.at(device, direction)
        if way == "tcx":
            attach_type = at.attach_type
            self.node.inside(lambda: libbpf.tcx_attach(at.number, attach_type, program.fd))
            yield program
            gone = self.node.inside(lambda: libbpf.tcx_detach(at.number, attach_type, program.fd))
            assert gone is stays
            program.close()
            return
        with pinned(program, self.lab.pin_root / "foreign") as path:

            def attach() -> None:
                if "clsact" not in tc("qdisc", "show", "dev", device):
                    tc("qdisc", "add", "dev", device, "clsact")
                what = ["filter", "add", "dev", device, direction.value, "prio", "7", "bpf"]
                tc(*what, "direct-action", "object-pinned", str(path))

            self.node.inside(attach)
        yield program
        if stays:
            what = ("filter", "del", "dev", device, direction.value, "prio", "7")
            self.node.inside(lambda: tc(*what))
        program.close()

    # --- commands -------------------------------------------------------------------------------

    def run(self, *arguments: str) -> Result:
        flags = ("--pin-path", str(self.node.pin_path))
        return self.node.inside(lambda: CliRunner().invoke(main, [*arguments, *flags]))

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "-o", "json").stdout)


@pytest.fixture(
    scope="module",
    params=[("tcx", "routed"), ("clsact", "bridge")],
    ids=["by TCX, routed pods", "by clsact, pods on a bridge"],
)
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    way, pod_links = request.param
    with Lab("packets") as lab:
        yield Place(lab, tmp_path_factory.mktemp("packets"), way=way, pod_links=pod_links)


@pytest.fixture
def place(shared: Place) -> Place:
    """The agent serves packets, whatever the test before has done."""
    if not shared.agent.alive:
        shared.agent.start()
    shared.agent.wait_for(SERVES_PACKETS, timeout_s=60)
    with shared.agent._last_words():
        wait_until(lambda: shared.runs_on(*shared.ours), timeout_s=60, what="packets are served")
        wait_until(lambda: shared.state() >= PROVED, what="it is proved")
    return shared


def said(place: Place, event: str, since: int, **facts: Any) -> bool:
    return bool(place.agent.log(event, since=since, **facts))


# --- where they are ------------------------------------------------------------------------------


def test_each_device_has_one_copy_at_each_hook(place: Place) -> None:
    assert place.runs_on(*place.ours)
    for pod in place.pods:  # nobody else is ever on these
        ours = [place.look(pod.device, one).ours[0] for one in (INGRESS, EGRESS)]
        assert [one.name for one in ours] == ["ebpflb_ingress", "ebpflb_egress"]
        assert {one.way for one in ours} == {place.way}


def test_the_programs_are_told_what_each_device_is(place: Place) -> None:
    bridged = {(pod.device, "bridged") for pod in place.pods if place.node.pod_links == "bridge"}
    assert place.roles() == {("eth0", "uplink")} | bridged


def test_the_socket_programs_are_told_once_it_is_proved(place: Place) -> None:
    assert place.state() >= PROVED | {"ping"}
    assert "pods_by_packet" not in place.state()
    settings = place.settings()
    assert (settings.masquerade_mark, settings.reject_mark) == (0x4000, 0x2000)
    assert settings.tcp_timeout_ns >= 86_400 * 10**9


def test_a_bridge_that_netfilter_does_not_see_is_known(place: Place) -> None:
    """K10"""
    bridged = {"masquerade_bridged4", "masquerade_bridged6"}
    passes = place.node.run(
        ["sh", "-c", "cat /proc/sys/net/bridge/bridge-nf-call-iptables 2>/dev/null || echo 0"]
    ).stdout.strip()
    if place.node.pod_links == "bridge" and passes == "0":
        assert place.state() >= bridged
    else:
        assert not place.state() & bridged


# --- staying -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_restart_with_nothing_changed_replaces_and_writes_nothing(
    place: Place, number: signal.Signals
) -> None:
    before = place.dump()
    place.agent.restart(number)
    place.agent.wait_for(SERVES_PACKETS)
    assert set(differing(before, place.dump())) <= BY_START
    assert place.state() >= PROVED


def test_without_pins_there_is_still_one_copy(place: Place) -> None:
    """B-133: the maps are new, so the programs are too; the old ones are not left behind."""
    before = place.running()
    for _ in range(2):
        place.agent.kill()
        for path in (*(place.node.pin_path / LINKS).iterdir(), *place.node.pin_path.glob("*-*")):
            path.unlink()
        place.agent.start()
        place.agent.wait_for(SERVES_PACKETS)
        assert place.runs_on(*place.ours)
    after = place.running()
    assert all(after[hook] != before[hook] for hook in before)


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.value)
def test_what_somebody_took_away_is_put_back_and_said(place: Place, direction: Direction) -> None:
    since = place.agent.mark
    at = place.at("eth0", direction)
    assert place.inside(lambda ways: ways.remove(at)) == 1
    place.agent.wait_for(
        REPAIRED, since=since, where=f"tc eth0 {direction.value}", actual="not attached"
    )
    wait_until(lambda: place.runs_on(*place.ours), what="it is back")
    wait_until(lambda: place.state() >= PROVED, what="it is proved again")


def test_a_role_that_somebody_took_away_is_put_back(place: Place) -> None:
    since = place.agent.mark
    before = place.roles()
    with place.agent.kernel.maps() as maps:
        for key, _ in list(maps["devices"].items()):
            maps["devices"].delete(key)
    place.agent.wait_for(REPAIRED, since=since, where="devices", expected="uplink")
    wait_until(lambda: place.roles() == before, what="they are back")


def test_another_copy_of_ours_is_removed(place: Place) -> None:
    """B-133, B-135"""
    since = place.agent.mark
    with place.foreign("eth0", INGRESS, way=place.way, name="ebpflb_stray", stays=False):
        place.agent.wait_for(REPAIRED, since=since, where="tc eth0 ingress", actual="2 copies")
        wait_until(lambda: place.runs_on(*place.ours), what="one is left")
    assert place.names("eth0", INGRESS) == ["ebpflb_ingress"]


# --- following -----------------------------------------------------------------------------------


def test_a_device_that_appears_is_served_and_one_that_goes_is_forgotten(place: Place) -> None:
    since = place.agent.mark
    pod = place.node.pod("p9")
    wait_until(lambda: place.runs_on(*place.ours, pod.device), what="the new one is served")
    pod.remove()
    wait_until(lambda: place.runs_on(*place.ours), what="it is gone")
    wait_until(lambda: all(not name.isdigit() for name, _ in place.roles()), what="so is its role")
    assert place.state() >= PROVED
    errors = [one for one in place.agent.log(since=since) if one["level"] == "error"]
    assert not errors, "\n".join(map(str, errors))


def test_a_device_that_is_not_ours_any_more_loses_the_programs(place: Place) -> None:
    since = place.agent.mark
    node = place.node

    pod = node.pod("p9")
    wait_until(lambda: place.runs_on(*place.ours, "veth-p9"), what="it is served")
    if node.pod_links == "bridge":
        node.links(lambda links: links.ipr.link("set", index=links.index("veth-p9"), master=0))
    else:
        for target in (f"{pod.ipv4}/32", f"{pod.ipv6}/128"):
            node.run(["ip", "route", "del", target, "dev", "veth-p9"])
    wait_until(lambda: place.runs_on(*place.ours), what="it is left alone")
    assert said(place, "detached: not a device of ours any more", since, hook="veth-p9 ingress")
    pod.remove()


def test_while_a_device_is_down_the_others_are_served(place: Place) -> None:
    device = place.pods[1].device
    place.node.links(lambda links: links.set(device, state="down"))
    wait_until(lambda: place.state() >= PROVED, what="the others are proved")
    place.node.links(lambda links: links.set(device, state="up"))
    wait_until(lambda: place.runs_on(*place.ours) or _without_route(place), what="all run")
    if _without_route(place):  # the kernel drops a device's routes with its state
        pod = place.pods[1]
        place.node.links(lambda links: links.route(f"{pod.ipv4}/32", device=device))
    wait_until(lambda: place.runs_on(*place.ours), what="all run")


def _without_route(place: Place) -> bool:
    return place.node.pod_links == "routed"


# --- beside others -------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", list(Direction), ids=lambda one: one.value)
@pytest.mark.parametrize("way", ["tcx", "clsact"])
def test_anothers_program_stays_where_it_is(place: Place, direction: Direction, way: str) -> None:
    """B-137; ours is first at ingress and last at egress, also where theirs comes later."""
    with place.foreign("eth0", direction, way=way):
        order = (
            ["ebpflb_ingress", "foreign"] if direction is INGRESS else ["foreign", "ebpflb_egress"]
        )
        possible = place.way == "tcx" or way == "clsact" or direction is EGRESS
        if possible:
            wait_until(lambda: place.names("eth0", direction) == order, what="the order is right")
        before = place.look("eth0", direction)
        place.agent.restart()
        place.agent.wait_for(SERVES_PACKETS)
        assert place.look("eth0", direction) == before
        assert len(before.others) == 1
        assert place.state() >= PROVED
    assert place.runs_on(*place.ours)


def test_one_that_ends_the_chain_at_egress_has_ours_before_it(place: Place) -> None:
    """K12: said once, kept by a restart, and undone when it goes."""
    since = place.agent.mark
    with place.foreign("eth0", EGRESS, verdict=OK):
        event = "another's program ends the chain at egress; ours runs before it"
        told = place.agent.wait_for(event, since=since, device="eth0")
        assert told["behind"].startswith("foreign (id ")
        order = ["ebpflb_egress", "foreign"]
        wait_until(lambda: place.names("eth0", EGRESS) == order, what="ours is first")
        wait_until(lambda: place.state() >= PROVED, what="it is proved")
        assert ("eth0", "egress_first") in place.roles()
        (shown,) = [
            one for one in place.json("status")["packet_path"]["devices"] if one["device"] == "eth0"
        ]
        egress = next(one for one in shown["hooks"] if one["direction"] == "egress")
        assert egress["behind"] == ["foreign" + egress["behind"][0].removeprefix("foreign")]
        assert egress["possible"] == "before others, of whom one ends the chain"
        place.agent.restart()
        place.agent.wait_for(SERVES_PACKETS)
        assert place.names("eth0", EGRESS) == order
        assert len(place.agent.log(event, since=since)) == 1
    wait_until(lambda: ("eth0", "egress_first") not in place.roles(), what="it is undone")
    wait_until(lambda: place.runs_on(*place.ours), what="one copy")


# --- what goes wrong -----------------------------------------------------------------------------


def test_without_netfilter_sockets_are_served_and_packets_later(
    place: Place, tmp_path: Path
) -> None:
    """Said once by name, shown by `status`, and tried again by the audit."""
    place.agent.end()
    works = tmp_path / "works"
    agent = Agent(
        place.node,
        place.manifests,
        *OFTEN,
        command=(sys.executable, str(Path(__file__).with_name("no_netfilter.py"))),
        env={"EBPFLB_TEST_NETFILTER": str(works)},
    )
    with agent:
        told = agent.wait_for("packets are not served; trying again")
        assert told["reason"].startswith("run nft: ")
        assert {one.problem for one in agent.kernel.hooks().values()} == {""}
        assert not place.state() & PROVED
        audits = agent.metrics()["ebpflb_audits_total"]
        wait_until(
            lambda: agent.metrics()["ebpflb_audits_total"] > audits + 2, what="it has tried again"
        )
        assert len(agent.log("packets are not served; trying again")) == 1
        problems = place.json("status")["problems"]
        assert problems == [f"packet path: not programmed: {told['reason']}"]
        works.touch()
        agent.wait_for("packets are served now")
        wait_until(lambda: place.state() >= PROVED, what="it is proved")
        agent.end()


def test_a_device_without_ethernet_has_programs_of_its_kind(place: Place) -> None:
    place.agent.end()
    place.node.run(["ip", "tuntap", "add", "tun7", "mode", "tun"])
    place.node.run(["ip", "link", "set", "tun7", "up"])
    try:
        with place.another("--pod-devices", "veth-*,tun7") as agent:
            agent.wait_for(SERVES_PACKETS)
            wait_until(lambda: place.runs_on(*place.ours, "tun7"), what="it has programs")
            assert place.names("tun7", INGRESS) == ["ebpflb_in_l3"]
            assert place.names("tun7", EGRESS) == ["ebpflb_out_l3"]
            wait_until(lambda: place.state() >= PROVED, what="they are proved")
            agent.end()
    finally:
        place.node.run(["ip", "link", "del", "tun7"])


# --- switched off --------------------------------------------------------------------------------


def test_patterns_that_match_nothing_switch_it_off(place: Place) -> None:
    place.agent.end()
    with place.another("--devices", "", "--pod-devices", "") as other:
        wait_until(lambda: not place.running(), what="nothing is on any device")
        wait_until(lambda: not place.roles(), what="nothing is said of any")
        assert place.state() == set()
        assert place.settings().packet_programs == 0
        assert other.log(SERVES_PACKETS) == []
        assert {one.problem for one in other.kernel.hooks().values()} == {""}
        other.end()


def test_devices_are_chosen_by_pattern(place: Place) -> None:
    place.agent.end()
    with place.another("--devices", "", "--pod-devices", "*-p2") as other:
        wait_until(lambda: place.runs_on("veth-p2"), what="one alone is served")
        other.wait_for(SERVES_PACKETS)
        assert place.state() & PROVED == {"sees_pods"}
        other.end()


def test_without_socket_programs_pods_are_served_by_packets(place: Place) -> None:
    place.agent.end()
    with place.another("--socket-lb", "off") as other:
        wait_until(lambda: "pods_by_packet" in place.state(), what="pods are left to packets")
        assert [one.hook for one in other.kernel.hooks().values() if one.prog_id] == []
        wait_until(lambda: place.runs_on(*place.ours), what="all run")
        assert place.json("status")["problems"] == []
        assert other.log(REPAIRED) == []
        other.end()


def test_only_the_hosts_sockets_are_translated(place: Place) -> None:
    place.agent.end()
    with place.another("--socket-lb", "host") as other:
        wait_until(lambda: "pods_by_packet" in place.state(), what="pods are left to packets")
        assert {one.problem for one in other.kernel.hooks().values()} == {""}
        other.end()


# --- commands ------------------------------------------------------------------------------------


def test_status_and_check_agree_that_all_is_well(place: Place) -> None:
    found = place.json("status")
    assert (found["problems"], found["warnings"]) == ([], [])
    path = found["packet_path"]
    assert path["is_wanted"]
    assert set(path["state"]) >= PROVED
    role = "bridged pod" if place.node.pod_links == "bridge" else "pod"
    assert {one["device"]: one["role"] for one in path["devices"]} == {
        "eth0": "uplink",
        **{pod.device: role for pod in place.pods},
    }
    assert {hook["state"] for one in path["devices"] for hook in one["hooks"]} == {"attached"}
    assert "eth0" in place.run("status").stdout
    assert place.json("check") == []


def test_check_finds_what_is_not_on_a_device(place: Place) -> None:
    place.agent.end()
    at = place.at("eth0", EGRESS)
    place.inside(lambda ways: ways.remove(at))
    expected = {
        "service": "",
        "where": "tc eth0 egress",
        "what": "program",
        "expected": "attached",
        "actual": "not attached",
    }
    assert place.json("check") == [expected]
    problems = place.json("status")["problems"]
    assert problems == ["packets are not translated at eth0 egress: not attached"]


def test_cleanup_takes_ours_and_leaves_others(place: Place) -> None:
    place.agent.end()
    with place.foreign("eth0", INGRESS) as other:
        before = place.look("eth0", INGRESS).others
        result = place.run("cleanup")
        assert (result.exit_code, result.stderr) == (0, "")
        hooks = ", ".join(sorted(f"{one} {at.value}" for one in place.ours for at in Direction))
        assert f"detached  {hooks}\n" in result.stdout
        assert place.running() == {}
        assert place.look("eth0", INGRESS).entries == before
        assert not other.runs
        assert place.look("eth0", INGRESS).qdisc == "clsact"
        assert {place.look(pod.device, INGRESS).qdisc for pod in place.pods} == {""}
    assert "Nothing to remove" in place.run("cleanup").stdout


def test_cleanup_finds_programs_also_where_the_maps_are_gone(place: Place) -> None:
    place.agent.end()
    for path in sorted(place.node.pin_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    place.node.pin_path.rmdir()
    result = place.run("cleanup")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("detached  eth0 egress, eth0 ingress, ")
    assert place.running() == {}
