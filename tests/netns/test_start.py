# SPDX-License-Identifier: Apache-2.0
"""What can keep an agent from starting: each has one clear message, and its exit code.

3: this kernel, or this process with its privileges, cannot. 2: a flag is wrong. And what need not
keep it from starting does not.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ebpflb.datapath.ebpf import abi, libbpf, loader
from ebpflb.datapath.ebpf.maps import LINKS, PinFolder, sizes
from ebpflb.errors import DatapathError
from ebpflb.lab import Lab, Node
from tests.builders import cluster_ip
from tests.netns import foreign
from tests.netns.agents import EBPFLB, ROOT, SMALL, Agent, wait_until
from tests.netns.kernel import programs_on
from tests.netns.services import Manifests, Spec, ready

KERNEL_CANNOT = 3
WRONG_USAGE = 2


class Place:
    """A node without an agent, a backend, and a Service of it in the manifests."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab = lab
        self.node: Node = lab.node("n1")
        self.client = self.node.pod("p1")
        self.backend = self.node.pod("be1")
        self.backend.serve(tcp=[8080])
        self.manifests = Manifests(folder / "manifests")
        self.address = cluster_ip(10)
        self.manifests.put(
            Spec(name="web", ipv4=self.address, tcp={80: 8080}, endpoints=ready(self.backend))
        )

    def agent(self, *flags: str, **options: Any) -> Agent:
        return Agent(self.node, self.manifests, "--map-size", SMALL, *flags, **options)

    def try_to_run(
        self,
        *flags: str | Path,
        within: Sequence[str | Path] = (),
        env: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        """Run an agent that is to end by itself: its exit code and its one message."""
        ran = self.node.run(
            [
                *within,
                *EBPFLB,
                "run",
                *("--manifests", self.manifests.folder, "--pin-path", self.node.pin_path),
                *("--hostname-override", "n1", "--map-size", SMALL, *flags),
            ],
            check=False,
            env={"PYTHONPATH": str(ROOT), **(env or {})},
        )
        return ran.returncode, the_message(ran)

    @property
    def here(self) -> tuple[str, Path]:
        return "--cgroup", self.node.cgroup_root

    def works(self) -> bool:
        return self.client.tcp(self.address, 80).good == 1


def the_message(ran: subprocess.CompletedProcess[str]) -> str:
    """What follows ``Error:`` at the end, and nothing of the kind may stand before it."""
    assert "Traceback" not in ran.stderr, ran.stderr
    log, error, message = ran.stderr.partition("Error: ")
    assert error, f"exit code {ran.returncode}: {ran.stderr}"
    assert "Error: " not in message
    assert "error" not in log.lower(), log
    return message.strip()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Lab("start") as lab:
        yield Place(lab, tmp_path_factory.mktemp("start"))


@pytest.fixture
def place(shared: Place) -> Iterator[Place]:
    """Nothing is pinned or attached, neither before nor behind."""
    yield shared
    links = shared.node.pin_path / LINKS
    for folder in (links, shared.node.pin_path):
        if folder.is_dir():
            for pin in folder.iterdir():
                if pin.is_dir():
                    continue
                pin.unlink()
            folder.rmdir()
    cgroup = shared.node.cgroup_root
    wait_until(lambda: programs_on(cgroup) == [], what="the kernel has let the links go")


def map_pin(node: Node, name: str) -> Path:
    """Where the agents of this module pin a map."""
    wanted = dict(part.split("=") for part in SMALL.split(","))
    entries = sizes({key: int(value) for key, value in wanted.items()})[name]
    return PinFolder(node.pin_path).map_path(abi.MAPS[name], entries)


# --- the machine --------------------------------------------------------------------------------


def test_no_bpf_file_system(place: Place) -> None:
    hidden = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
    code, message = place.try_to_run(*place.here, within=(*hidden, place.lab.pin_root.parent))
    assert code == KERNEL_CANNOT
    assert message == (
        f"use {place.node.pin_path}: it is not on a BPF file system; "
        "mount one with: mount -t bpf bpf /sys/fs/bpf"
    )


def test_a_cgroup_that_is_no_folder_of_cgroup_v2(place: Place, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        code, message = place.try_to_run("--cgroup", folder)
        assert code == KERNEL_CANNOT
        assert message == f"use {folder}: it is no folder of cgroup v2; name one with --cgroup"


def test_no_cgroup_v2_at_all(place: Place) -> None:
    mount = place.lab.cgroup.parent
    without = ("unshare", "-m", "sh", "-c", 'umount -l "$0" && exec "$@"', mount)
    code, message = place.try_to_run(within=without)
    assert code == KERNEL_CANNOT
    assert message.startswith("find cgroup v2: it is not mounted; mount it with: mount -t cgroup2")


def test_an_agent_outside_of_its_cgroup_sees_that_its_hooks_do_not_run(place: Place) -> None:
    code, message = place.try_to_run("--cgroup", place.client.cgroup)
    assert code == KERNEL_CANNOT
    assert message.startswith("verify the connect4 hook: ")
    assert str(place.client.cgroup) in message
    assert "run the agent inside of that cgroup, or name the root" in message


def test_a_start_on_a_wrong_cgroup_leaves_what_works_as_it_is(place: Place) -> None:
    """Nothing moves, and the commands go on looking where the programs are."""
    with place.agent() as agent:
        agent.settle()
        agent.end()
        before = agent.kernel.hooks()
        code, message = place.try_to_run("--cgroup", place.client.cgroup)
        assert code == KERNEL_CANNOT
        assert "the connect4 hook" in message
        assert agent.kernel.hooks() == before
        assert programs_on(place.client.cgroup) == []
        assert place.works()
        agent.start()
        assert agent.log("attached") == []


@pytest.mark.parametrize(
    "without",
    [
        pytest.param(("--bounding-set=-all", "--inh-caps=-all"), id="root without capabilities"),
        pytest.param(("--reuid=65534", "--regid=65534", "--clear-groups"), id="another user"),
    ],
)
@pytest.mark.parametrize("pinned", [False, True], ids=["at first", "beside what root has pinned"])
def test_no_privileges(place: Place, without: tuple[str, ...], pinned: bool) -> None:
    place.lab.pin_root.mkdir(mode=0o700, exist_ok=True)
    if pinned:
        with place.agent() as agent:
            agent.end()
    # The folder of the tests' manifests is root's alone; here it does not matter what it holds.
    flags = (*place.here, "--manifests", "/")
    code, message = place.try_to_run(*flags, within=["setpriv", *without])
    assert code == KERNEL_CANNOT
    assert "needs root" in message
    assert "(EPERM)" in message or "(EACCES)" in message
    if pinned:
        assert place.works()


def test_a_python_without_bcc(place: Place, tmp_path: Path) -> None:
    (tmp_path / "bcc.py").write_text("raise ImportError")
    code, message = place.try_to_run(*place.here, env={"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    assert code == KERNEL_CANNOT
    assert message.startswith("import bcc: install Debian's or Ubuntu's python3-bpfcc")
    assert sys.executable in message


# --- what lies in the way -----------------------------------------------------------------------

Foreign = Callable[[Path, Path], None]

PINS = [
    pytest.param(lambda path, _: foreign.pin_a_map(path), "(1, 4, 12, 7, 0)", id="another map"),
    pytest.param(lambda path, _: foreign.pin_a_program(path), "it is a bpf-prog", id="a program"),
    pytest.param(foreign.pin_a_link, "it is a bpf-link", id="a link"),
]


@pytest.mark.parametrize("name", ["frontends", "sock_peer"])
@pytest.mark.parametrize(("pin", "what"), PINS)
def test_a_pin_that_is_not_the_map_that_its_name_says(
    place: Place, name: str, pin: Foreign, what: str
) -> None:
    path = map_pin(place.node, name)
    pin(path, place.client.cgroup)
    code, message = place.try_to_run(*place.here)
    assert code == KERNEL_CANNOT
    assert message.startswith(f"use pin {path}: it is not the map that its name says: ")
    assert what in message.replace("bpf_link", "bpf-link")  # a matter of the kernel's version
    assert f"remove it (rm {path}) or choose another --pin-path" in message
    assert path.exists(), "it is not ours to remove"


def test_a_folder_where_a_map_should_be(place: Place) -> None:
    path = map_pin(place.node, "frontends")
    path.mkdir(parents=True)
    try:
        code, message = place.try_to_run(*place.here)
        assert code != 0
        assert str(path) in message
    finally:
        path.rmdir()


@pytest.mark.parametrize(("pin", "what"), PINS)
def test_a_pin_that_is_not_our_link_gives_way(place: Place, pin: Foreign, what: str) -> None:
    """Our programs must run, so the path is taken; nothing is served by what lay there."""
    pin(place.node.pin_path / LINKS / "connect4", place.client.cgroup)
    with place.agent() as agent:
        assert place.works()
        assert all(not hook.problem for hook in agent.kernel.hooks().values())


@pytest.mark.parametrize(
    "flags", [foreign.ALONE, foreign.OVERRIDABLE], ids=["alone", "overridable"]
)
@pytest.mark.parametrize("above", [False, True], ids=["on our cgroup", "on one above it"])
def test_a_foreign_program_that_suffers_no_other(place: Place, flags: int, above: bool) -> None:
    """K22. One above that may be overridden does not keep us away: then ours runs in its place."""
    cgroup = place.lab.cgroup if above else place.node.cgroup_root
    with foreign.attached(foreign.ALLOW, cgroup, hook="sendmsg4", flags=flags):
        if above and flags == foreign.OVERRIDABLE:
            with place.agent():
                assert place.works()
            return
        (number,) = programs_on(cgroup)
        code, message = place.try_to_run(*place.here)
        assert code == KERNEL_CANNOT
        assert message.startswith("attach sendmsg4: Operation not permitted (EPERM): the program ")
        assert f"foreign (id {number}) is on {cgroup}" in message
        assert "detach it" in message
        assert "BPF_F_ALLOW_MULTI" in message


def test_a_foreign_program_that_goes_lets_the_agent_start(place: Place) -> None:
    """What a failed start left behind is in nobody's way."""
    with foreign.attached(
        foreign.ALLOW, place.node.cgroup_root, hook="connect6", flags=foreign.ALONE
    ):
        assert place.try_to_run(*place.here)[0] == KERNEL_CANNOT
    with place.agent():
        assert place.works()


# --- ports that are taken -----------------------------------------------------------------------


TAKEN = {"--healthz-bind-address": 10256, "--metrics-bind-address": 10249}


def test_taken_ports_are_named_with_their_holder_and_taken_over_later(place: Place) -> None:
    """As where a kube-proxy still runs: everything else works meanwhile (B-47)."""
    holder = place.node.serve(tcp=TAKEN.values(), name="holder")
    with place.agent() as agent:
        said = agent.log("cannot listen; trying again")
        assert {one["flag"]: one["reason"] for one in said} == dict.fromkeys(
            TAKEN, "Address already in use"
        )
        assert all(f"(process {holder.pid})" in one["holder"] for one in said)
        assert place.works()
        holder.stop()
        for flag, port in TAKEN.items():
            agent.wait_for("listening", flag=flag)
            assert agent.get("/healthz", port=port)[0] == 200
        assert len(agent.log("cannot listen; trying again")) == len(TAKEN)


def test_a_taken_port_ends_the_agent_where_that_is_asked_for(place: Place) -> None:
    with place.node.serve(tcp=[10256], name="holder") as holder:
        code, message = place.try_to_run(*place.here, "--bind-address-hard-fail")
    assert code == WRONG_USAGE
    assert message.startswith("--healthz-bind-address 0.0.0.0:10256: Address already in use, ")
    assert f"(process {holder.pid}) listens there" in message


def test_health_and_mode_are_told_as_kube_proxy_tells_them(place: Place) -> None:
    """HZ-01, HZ-02, ADM-01"""
    with place.agent() as agent:
        for path in ("/healthz", "/livez"):
            status, body = agent.get(path)
            told = json.loads(body)
            assert (status, told["healthy"]) == (200, True)
            assert told.get("nodeEligible") is (True if path == "/healthz" else None)
        assert agent.get("/proxyMode", port=10249) == (200, "ebpf")
        assert agent.get("/healthz", port=10249) == (200, "ok")
        assert agent.get("/nothing")[0] == 404
        assert agent.metrics()["ebpflb_service_ports"] == 1


# --- flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--map-size", "front=1"), "--map-size front=1: no such size; there are frontends, "),
        (("--map-size", "ports=0"), "--map-size ports=0: must be 1 to 1048576"),
        (("--map-size", "ports"), "--map-size ports: must be NAME=N"),
        (("--proxy-mode", "bpf"), "--proxy-mode bpf: must be one of auto, ebpf, iptables"),
        (("--manifests", "/nowhere/at/all"), "--manifests /nowhere/at/all: No such file"),
        (("--healthz-bind-address", "10256"), "--healthz-bind-address 10256: must be IP:port"),
        (("--audit-period", "0"), "--audit-period 0: must be more than 0"),
        (("--no-such-flag",), "No such option"),
    ],
)
def test_a_wrong_flag_is_named(place: Place, flags: tuple[str, ...], says: str) -> None:
    code, message = place.try_to_run(*place.here, *flags)
    assert code == WRONG_USAGE
    assert message.startswith(says)


# --- programs that do not load ------------------------------------------------------------------


class _Wrong(loader.Build):
    """The programs, with a piece of code more."""

    more = ""

    def text(self) -> str:
        return super().text() + self.more


class _DoesNotCompile(_Wrong):
    more = "\nstatic int broken(void)\n{\n\treturn no_such_thing + 1;\n}\n"


class _DoesNotVerify(_Wrong):
    more = "\nint broken(struct bpf_sock_addr *ctx)\n{\n\treturn *(volatile int *)8;\n}\n"


@pytest.fixture
def build(place: Place) -> dict[str, object]:
    """The arguments of a build on maps that lie there."""
    with place.agent() as agent:
        agent.end()
        with agent.kernel.maps() as maps:
            return {
                "source": "sock.c",
                "functions": (loader.Function("broken", libbpf.PROG_CGROUP_SOCK_ADDR, 10),),
                "defines": {
                    "HAVE_RETVAL": 1,
                    "SHOW_SERVICE_TCP": 1,
                    **{f"SIZE_{name}": one.max_entries for name, one in maps.items()},
                },
                "pins": {name: str(one.path) for name, one in maps.items()},
            }


@pytest.mark.parametrize(
    ("kind", "says", "longest"),
    [
        (_DoesNotCompile, ["compile bpf/sock.c: ", "no_such_thing"], 12),
        (_DoesNotVerify, ["load program broken: ", "the kernel's verifier says:", "R1"], 14),
    ],
    ids=["compiler", "verifier"],
)
def test_what_compiler_and_verifier_say_is_shown_where_it_matters(
    build: dict[str, object], kind: type[_Wrong], says: list[str], longest: int
) -> None:
    with pytest.raises(DatapathError) as raised:
        loader.load(kind(**build))  # type: ignore[arg-type]
    assert raised.value.exit_code == KERNEL_CANNOT
    text = str(raised.value)
    assert all(one in text for one in says), text
    assert len(text.splitlines()) <= longest
    assert "Traceback" not in text


# --- the end ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_ends_the_agent_and_not_the_data_path(
    place: Place, number: signal.Signals
) -> None:
    with place.agent() as agent:
        assert agent.end(number) == 0
        assert agent.log("stopping; the data path stays")[0]["signal"] == number.name
        assert agent.log("stopped")
    assert place.works()
