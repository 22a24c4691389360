# SPDX-License-Identifier: Apache-2.0
"""What others break is found and mended: hooks and map entries, at the start and by the audit.

Each repair is said once, with what was wrong, and counted. Nobody else's Service notices.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.attach import HOOKS
from ebpflb.datapath.ebpf.maps import LINKS
from ebpflb.datapath.ebpf.tables import ID, index_of
from ebpflb.lab import Lab, Node
from ebpflb.model import Family, Protocol, parse_address
from tests.builders import cluster_ip
from tests.netns import foreign
from tests.netns.agents import SMALL, Agent, wait_until
from tests.netns.kernel import Kernel, programs_on
from tests.netns.services import Manifests, Spec, ready

REPAIRS = "ebpflb_audit_repairs_total"
OFTEN = ("--map-size", SMALL, "--audit-period", "0.2")

FRONTEND = abi.LAYOUTS["frontend_key"]
FRONTEND_VALUE = abi.LAYOUTS["frontend_value"]


class Place:
    """A node; `web` (UDP and TCP, two backends) is what gets broken, `other` must not notice."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node = node
        self.client = node.pod(f"p-{node.name}")
        self.backends = [node.pod(f"{node.name}-be{number}") for number in (1, 2, 3)]
        for pod in self.backends:
            pod.serve(tcp=[8080], udp=[8080])
        self.manifests = Manifests(folder / node.name)
        self.web = self.spec(10, 0, 1)
        self.other = self.spec(11, 2)
        self.manifests.put(self.web, self.other)
        self.kernel = Kernel(node.pin_path, node.cgroup_root)

    def spec(self, number: int, *backends: int) -> Spec:
        return Spec(
            name=f"s{number}",
            ipv4=cluster_ip(number),
            tcp={80: 8080},
            udp={53: 8080},
            endpoints=ready(*(self.backends[index] for index in backends)),
        )

    def works(self) -> bool:
        return (
            self.client.tcp(self.web.ipv4, 80, count=4).good == 4
            and self.client.udp(self.web.ipv4, 53, count=2, timeout_s=0.5).good == 2
        )

    def id(self, spec: Spec, protocol: Protocol = Protocol.TCP) -> int:
        port = 80 if protocol is Protocol.TCP else 53
        return self.kernel.id_of(spec.name_of(protocol, port, Family.IPV4))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("repair") as lab:
        yield lab


@pytest.fixture(scope="module")
def audited(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Agent]]:
    """An agent that looks five times a second."""
    place = Place(lab.node("n1"), tmp_path_factory.mktemp("audited"))
    with Agent(place.node, place.manifests, *OFTEN) as agent:
        yield place, agent


@pytest.fixture
def place(audited: tuple[Place, Agent]) -> Place:
    return audited[0]


@pytest.fixture
def agent(audited: tuple[Place, Agent]) -> Iterator[Agent]:
    """It has nothing to repair before a test, nor afterwards."""
    place, agent = audited
    agent.settle()
    assert place.works()
    yield agent
    since = agent.mark
    agent.settle()
    audits = agent.metrics()["ebpflb_audits_total"]
    wait_until(
        lambda: agent.metrics()["ebpflb_audits_total"] > audits + 1, what="another audit is done"
    )
    assert agent.log("audit repaired a difference", since=since) == []


def wait_for_repairs(agent: Agent, before: float) -> float:
    """Wait until something was repaired and nothing is left to do; returns how much it was."""
    wait_until(
        lambda: agent.metrics()[REPAIRS] > before,
        timeout_s=60,
        what="the audit repairs something",
    )
    agent.settle()
    return agent.metrics()[REPAIRS] - before


# --- pins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gone",
    [
        lambda path: path.name.startswith("frontends-"),
        lambda path: not path.is_dir(),
        lambda _: True,
    ],
    ids=["one map", "all maps", "all maps and links"],
)
def test_pins_that_somebody_removes_come_back_with_all_that_is_in_the_maps(
    place: Place, agent: Agent, gone: Callable[[Path], bool]
) -> None:
    """Nobody fails meanwhile, and no program ever runs on maps of its own."""
    loop = place.client.tcp_loop(place.web.ipv4, 80, interval_s=0.001)
    pins = sorted(place.node.pin_path.glob("*-*"))
    before = agent.metrics()[REPAIRS]
    for path in filter(gone, (*pins, place.node.pin_path / LINKS)):
        if path.is_dir():
            for link in HOOKS:
                (path / link.name).unlink()
        else:
            path.unlink()
    wait_for_repairs(agent, before)
    assert sorted(place.node.pin_path.glob("*-*")) == pins
    assert place.works()
    loop.wait_for(lambda now: now.good > 100, timeout_s=60, what="enough attempts")
    outcome = loop.stop()
    if not gone(place.node.pin_path / LINKS):  # without its links nothing is attached for a while
        assert outcome.failed == 0, outcome


# --- hooks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["detached", "unpinned", "replaced"])
@pytest.mark.parametrize("hook", ["connect4", "recvmsg6"])
def test_a_hook_that_is_taken_away_comes_back(
    place: Place, agent: Agent, how: str, hook: str
) -> None:
    """B-129: found within an audit's period, repaired, counted and said."""
    before, since = agent.metrics()[REPAIRS], agent.mark
    pin = place.node.pin_path / LINKS / hook
    if how == "detached":
        foreign.detach_link(pin)
    else:
        pin.unlink()
        if how == "replaced":
            foreign.pin_a_map(pin)
    assert wait_for_repairs(agent, before) == 1
    (said,) = agent.log("audit repaired a difference", since=since)
    assert said["where"] == f"hook {hook}"
    assert said["level"] == "error"
    assert place.kernel.hooks()[hook].problem == ""
    assert place.works()
    wait_until(
        lambda: len(programs_on(place.node.cgroup_root)) == len(HOOKS),
        what="one program of ours runs at each hook",
    )


# --- maps ----------------------------------------------------------------------------------------


def frontend(address: str) -> bytes:
    return FRONTEND.pack(parse_address(address), (80).to_bytes(2), Protocol.TCP)


def forget_the_frontend(place: Place) -> None:
    place.kernel.delete("frontends", frontend(place.web.ipv4))


def lead_the_frontend_to_another_service(place: Place) -> None:
    value = FRONTEND_VALUE.pack(place.id(place.other), 0, 0)
    place.kernel.put("frontends", frontend(place.web.ipv4), value)


def add_a_frontend(place: Place) -> None:
    value = FRONTEND_VALUE.pack(place.id(place.other), 0, 0)
    place.kernel.put("frontends", frontend(cluster_ip(250)), value)


def empty_the_slot_of_the_service_port(place: Place) -> None:
    key = ID.pack(index_of(place.id(place.web)))
    place.kernel.put("ports", key, bytes(abi.LAYOUTS["port"].size))


def change_a_backend(place: Place) -> None:
    owner = place.id(place.web)
    slot = place.kernel.snapshot().cluster[owner][0].slot
    value = abi.LAYOUTS["backend"].pack(parse_address("10.244.9.9"), b"\x1f\x90", 0, owner)
    place.kernel.put("backends", ID.pack(slot), value)


def take_a_backend_from_its_owner(place: Place) -> None:
    slot = place.kernel.snapshot().cluster[place.id(place.web)][0].slot
    value = abi.LAYOUTS["backend"].pack(
        parse_address(place.backends[2].ipv4), b"\x1f\x90", 0, place.id(place.other)
    )
    place.kernel.put("backends", ID.pack(slot), value)


def forget_a_member(place: Place) -> None:
    owner = place.id(place.web, Protocol.UDP)
    key = next(one.key for one in place.kernel.snapshot().members if one.id == owner)
    place.kernel.delete("members", key)


def forget_the_name(place: Place) -> None:
    place.kernel.delete("names", ID.pack(place.id(place.web)))


DAMAGE = [
    forget_the_frontend,
    lead_the_frontend_to_another_service,
    add_a_frontend,
    empty_the_slot_of_the_service_port,
    change_a_backend,
    take_a_backend_from_its_owner,
    forget_a_member,
    forget_the_name,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.replace("_", " "))
def test_damage_to_the_maps_is_repaired(
    place: Place, agent: Agent, damage: Callable[[Place], None]
) -> None:
    before, since = agent.metrics()[REPAIRS], agent.mark
    with place.client.tcp_loop(place.other.ipv4, 80, interval_s=0.001) as loop:
        damage(place)
        repaired = wait_for_repairs(agent, before)
        assert place.works()
        outcome = loop.stop()
    assert outcome.failed == 0, outcome
    assert outcome.backends.keys() == {place.backends[2].name}
    said = agent.log("audit repaired a difference", since=since)
    assert len(said) == repaired
    assert damage is add_a_frontend or place.web.name in str(said)


def test_the_socket_meets_no_foreign_backend_meanwhile(place: Place, agent: Agent) -> None:
    """A slot that belongs to another is refused and counted, not dialled."""
    before, repairs = place.kernel.stats()["foreign_backend"], agent.metrics()[REPAIRS]
    with place.client.tcp_loop(place.web.ipv4, 80) as loop:
        loop.wait_for(lambda one: one.good > 10, timeout_s=30, what="it goes on")
        for index in (0, 1):
            slot = place.kernel.snapshot().cluster[place.id(place.web)][index].slot
            foreign_slot = abi.LAYOUTS["backend"].pack(
                parse_address(place.backends[2].ipv4), b"\x1f\x90", 0, place.id(place.other)
            )
            place.kernel.put("backends", ID.pack(slot), foreign_slot)
        wait_for_repairs(agent, repairs)
        good = loop.outcome().good
        loop.wait_for(lambda one: one.good > good + 10, timeout_s=30, what="it works again")
        outcome = loop.stop()
    assert place.backends[2].name not in outcome.backends
    assert outcome.errors.keys() <= {"ECONNREFUSED"}
    assert place.kernel.stats()["foreign_backend"] == before + outcome.failed


# --- the cgroup ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quiet(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A node whose agent each test starts."""
    return Place(lab.node("n2"), tmp_path_factory.mktemp("quiet"))


def inside(cgroup: Path) -> list[str]:
    """The beginning of a command that runs in another cgroup."""
    return ["sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(cgroup)]


def small_agent(place: Place, *flags: str, within: tuple[str, ...] = ()) -> Agent:
    return Agent(place.node, place.manifests, "--map-size", SMALL, *flags, within=within)


@pytest.fixture
def elsewhere(lab: Lab, quiet: Place) -> Iterator[Path]:
    """A cgroup beside the node's, to which the last agent's links lead."""
    folder = lab.cgroup / "spare"
    folder.mkdir()
    flags = ("--cgroup", str(folder))
    with small_agent(quiet, *flags, within=tuple(inside(folder))) as agent:
        agent.end()
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), what="the cgroup is empty")
    assert len(programs_on(folder)) == len(HOOKS)
    yield folder
    if folder.exists():
        folder.rmdir()


def test_links_whose_cgroup_was_removed_are_made_anew(quiet: Place, elsewhere: Path) -> None:
    """B-127: the pins are there and lead to nothing; the kernel is asked, not a file."""
    elsewhere.rmdir()
    with small_agent(quiet) as agent:
        assert agent.log("attached")[0]["links_changed"] == len(HOOKS)
        assert quiet.works()
        assert len(programs_on(quiet.node.cgroup_root)) == len(HOOKS)


def test_links_to_another_cgroup_are_made_anew_and_the_other_is_left(
    quiet: Place, elsewhere: Path
) -> None:
    with small_agent(quiet):
        assert quiet.works()
        assert len(programs_on(quiet.node.cgroup_root)) == len(HOOKS)
        wait_until(lambda: programs_on(elsewhere) == [], what="nothing is left on the other")


def test_hooks_that_were_taken_away_meanwhile_come_back_at_the_start(quiet: Place) -> None:
    with small_agent(quiet) as agent:
        agent.kill()
    shutil.rmtree(quiet.node.pin_path / LINKS)
    wait_until(lambda: programs_on(quiet.node.cgroup_root) == [], what="no program is left")
    assert not quiet.works()
    with small_agent(quiet) as agent:
        assert agent.log("attached")[0]["links_changed"] == len(HOOKS)
        assert quiet.works()
