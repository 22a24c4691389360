# SPDX-License-Identifier: Apache-2.0
"""The test bed: backends, clients and agents in a lab of their own, and talking with them.

One client namespace is used by every client; they differ by their cgroup alone, since that is what
decides which programs a socket runs through. So a direct connect and one through a ClusterIP take
the same way, and both kinds are alive at the same time. This file must not know what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import IO, Any, Final, Literal, NamedTuple, TypeVar

import msgspec

from ebpflb.bench.apiserver import Command, Sent
from ebpflb.bench.workload import (
    GREET_PORT,
    QUIET_PORT,
    SINK_PORT,
    Workload,
    all_files,
    file_name,
    pack_destinations,
)
from ebpflb.errors import ConfigError, SourceError
from ebpflb.lab import Lab, Node, Pod
from ebpflb.lab.spawn import Place, command_in

T = TypeVar("T")
Say = Callable[[str], None]

ANSWER_S: Final = 30.0
START_S: Final = 120.0
COMPILE_S: Final = 60.0
_POLL_S: Final = 0.002

_NO_PACKETS: Final = ("--devices=", "--pod-devices=")

NODE_NAME: Final = "node-0"
"""The agents' own node; no endpoint is on it."""


class BenchError(SourceError):
    """Something that is measured, or measures, did not do its part. Exit code 1."""


class Cpus(NamedTuple):
    """Where clients and backends are pinned."""

    client: int
    server: int


class CpuUsed(NamedTuple):
    """Seconds: of all processes on all CPUs, of everything (idle too), of our own processes."""

    busy: float
    total: float
    own: float


class Samples(NamedTuple):
    """What one run of connects took, in nanoseconds: connect() alone, and socket() to close()."""

    connect: array[int]
    cycle: array[int]
    failed: int
    error: str


class Talker:
    """A program that is sent lines and answers with lines, and with bytes where it said so."""

    def __init__(self, title: str, process: subprocess.Popen[bytes]) -> None:
        self.title = title
        self.process = process
        self._unread = b""

    def send(self, line: str) -> None:
        try:
            self._pipe(self.process.stdin).write(line.encode() + b"\n")
            self._pipe(self.process.stdin).flush()
        except OSError as error:
            raise BenchError(f"{self.title} takes no command: {error}") from error

    def line(self, timeout_s: float = ANSWER_S) -> str:
        return self._take(lambda: self._unread.find(b"\n") + 1, timeout_s).decode().strip()

    def read(self, count: int, timeout_s: float = ANSWER_S) -> bytes:
        return self._take(lambda: count if len(self._unread) >= count else 0, timeout_s)

    def ask(self, line: str, timeout_s: float = ANSWER_S) -> str:
        self.send(line)
        return self.line(timeout_s)

    def end(self) -> None:
        """Close its input and wait for its end; kill it where it does not."""
        with contextlib.suppress(OSError):
            self._pipe(self.process.stdin).close()
        try:
            self.process.wait(ANSWER_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _take(self, size: Callable[[], int], timeout_s: float) -> bytes:
        fd = self._pipe(self.process.stdout).fileno()
        deadline = time.monotonic() + timeout_s
        while not (count := size()):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([fd], [], [], left_s)[0]:
                raise BenchError(f"{self.title} said nothing within {timeout_s:g} s")
            got = os.read(fd, 1 << 20)
            if not got:
                raise BenchError(f"{self.title} ended (exit code {self.process.wait(ANSWER_S)})")
            self._unread += got
        taken, self._unread = self._unread[:count], self._unread[count:]
        return taken

    @staticmethod
    def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
        assert pipe is not None  # noqa: S101 - made with pipes
        return pipe


class Watched(NamedTuple):
    """What a client saw while a Service's backends changed."""

    first_ns: int
    dials: int
    old_after: int
    failed: int


class Checked(NamedTuple):
    """Of ``dials`` connects, those that nobody answered, and those that somebody else did."""

    dials: int
    failed: int
    wrong: int


class Client(Talker):
    """``connect client``; lists are known by their position in what it was given."""

    def load(self, paths: Sequence[Path]) -> None:
        for number, path in enumerate(paths):
            self.ask(f"list {number} {path}")

    def begin(self, number: int, count: int) -> None:
        self.send(f"run {number} {count}")

    def finish(self, count: int) -> Samples:
        said, failed, error = map(int, self.line(10 + count / 100).split())
        raw = array("I", self.read(8 * said))
        return Samples(raw[::2], raw[1::2], failed, os.strerror(error) if error else "")

    def run(self, number: int, count: int) -> Samples:
        self.begin(number, count)
        return self.finish(count)

    def check(self, number: int, count: int) -> Checked:
        """Connects that must each be answered, and by whom the list says."""
        return Checked(*map(int, self.ask(f"check {number} {count}", 10 + count / 100).split()))

    def stream(self, number: int, ms: int) -> float:
        """Send to the first of a list for so long; bytes a second."""
        sent, took_ns = map(int, self.ask(f"stream {number} {ms}", 10 + ms / 1000).split())
        return sent / took_ns * 1e9

    def watch(self, address: str, port: int, old: str, *, timeout_s: float) -> None:
        """Begin; returns when ``old`` is being answered by."""
        self.send(f"watch {address} {port} {old} {int(timeout_s * 1000)}")
        if (said := self.line()) != "watching":
            raise BenchError(f"{self.title} said {said!r}")

    def watched(self, timeout_s: float) -> Watched:
        first, _, dials, old_after, failed = self.line(timeout_s + ANSWER_S).split()
        return Watched(int(first), int(dials), int(old_after), int(failed))


class ApiServer(Talker):
    """``ebpflb.bench.apiserver``; ready when this returns."""

    def __init__(self, node: Node, process: subprocess.Popen[bytes]) -> None:
        super().__init__("the API server", process)
        self.node = node
        port = json.loads(self.line(START_S))["port"]
        self.url = f"http://127.0.0.1:{port}"

    def begin(self, command: Command) -> None:
        self.send(msgspec.json.encode(command).decode())

    def sent(self, timeout_s: float = ANSWER_S) -> Sent:
        """What a change or a feed was, when it has been written."""
        return msgspec.json.decode(self.line(timeout_s), type=Sent)

    def wait_for(self, what: Literal["list", "watch"], timeout_s: float = START_S) -> int:
        """Until a list has been asked for, or the slices are watched; returns when that was."""
        self.begin(Command(do="await", what=what))
        return int(json.loads(self.line(timeout_s))["at_ns"])


class Agent:
    """``ebpflb run`` on a node; ``source``: the flags that say where the cluster's state is."""

    def __init__(
        self, node: Node, source: Sequence[str], *, folder: Path, flags: Sequence[str]
    ) -> None:
        """Start it; nothing is waited for."""
        self.node = node
        self.log = folder / f"agent-{node.name}-{time.monotonic_ns()}.log"
        self.started_s = time.monotonic()
        command = [
            *(sys.executable, "-m", "ebpflb", "run", "--log-format", "json"),
            *source,
            *("--hostname-override", NODE_NAME),
            *("--pin-path", str(node.pin_path), "--cgroup", str(node.cgroup_root)),
            *flags,
        ]
        with self.log.open("wb") as sink:
            self.process = node.popen(command, stdin=subprocess.DEVNULL, stderr=sink, cwd="/")

    def events(self, name: str) -> list[dict[str, Any]]:
        """What it has logged under this name."""
        found = []
        for line in self.log.read_text().splitlines(keepends=True):
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if line.endswith("\n") and event.get("event") == name:
                    found.append(event)
        return found

    def synced(self) -> tuple[float, dict[str, Any]]:
        """Wait for the first sync; seconds since its start, and what it said of it."""
        self.wait_until(lambda: bool(self.events("synced")), "it has not synced")
        return time.monotonic() - self.started_s, self.events("synced")[0]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + START_S
        while not condition():
            if self.process.poll() is not None:
                raise BenchError(f"the agent ended: {self._last_words()}")
            if time.monotonic() > deadline:
                raise BenchError(f"the agent: {what} within {START_S:g} s: {self._last_words()}")
            time.sleep(_POLL_S)

    def _last_words(self) -> str:
        return self.log.read_text()[-2000:].strip()

    def status(self) -> Mapping[str, int]:
        """``VmRSS``, ``VmHWM``, ``Pss``, and ``bpf-map``: maps in its memory. Bytes."""
        found = dict.fromkeys(("VmRSS", "VmHWM", "Pss", "bpf-map"), 0)
        here = False
        for name in ("status", "smaps_rollup", "smaps"):
            for line in Path(f"/proc/{self.process.pid}/{name}").read_text().splitlines():
                key, _, value = line.partition(":")
                if name == "smaps" and (line[0].isdigit() or line[0].islower()):
                    here = line.endswith("bpf-map")
                elif name == "smaps":
                    found["bpf-map"] += int(value.split()[0]) if here and key == "Rss" else 0
                elif key in found:
                    found[key] = int(value.split()[0])
        return {key: kib * 1024 for key, kib in found.items()}

    def cpu_s(self) -> float:
        """CPU time that its threads have used, its children not counted."""
        # The clock of another process's CPU time, as clock_getcpuclockid(3) computes it.
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def pin(self, cpu: int) -> None:
        """Let all of its threads run on this CPU alone."""
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(task.name), {cpu})

    def metric(self, name: str) -> float:
        """One of its metrics; labels are part of the name, as in Prometheus' text format."""

        def ask() -> str:
            from urllib.request import urlopen  # noqa: PLC0415 - only agents with metrics

            with urlopen("http://127.0.0.1:10249/metrics", timeout=ANSWER_S) as answer:
                return str(answer.read().decode())

        for line in self.node.inside(ask).splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise BenchError(f"the agent has no metric {name}")

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait for that; the data path stays."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(ANSWER_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise BenchError(f"the agent did not end: {self._last_words()}") from None


class Bed:
    """Made by ``prepared``. ``node`` runs the agent as it is by default, ``plain`` another one."""

    def __init__(self, lab: Lab, workload: Workload, program: Path, cpus: Cpus) -> None:
        self.lab = lab
        self.workload = workload
        self.cpus = cpus
        self.program = program
        self.manifests = lab.folder / "manifests"
        self.node = lab.node("n1")
        self.plain = lab.node("n2")
        self._pod = self.node.pod("client")
        self._pod.sysctl("net.ipv4.ip_local_port_range", "1024 65535")
        self._lists: list[Path] = []
        self.servers: list[Talker] = []
        self.clients: list[Client] = []
        self.programs: list[Talker] = []

    def write_manifests(self) -> int:
        """Returns how many bytes they are."""
        self.manifests.mkdir()
        total = 0
        for name, data in all_files(self.workload):
            (self.manifests / name).write_bytes(data)
            total += len(data)
        return total

    def rewrite(self, file: int, data: bytes) -> None:
        """Replace a file as kubectl or an editor would: all of it, at once."""
        path = self.manifests / file_name(file)
        fresh = path.with_name(f".{path.name}")
        fresh.write_bytes(data)
        fresh.rename(path)

    def start_backends(self) -> None:
        for number in range(self.workload.backends):
            pod = self.node.pod(f"be{number}")
            prefix = self.workload.prefix(number)
            pod.sysctl("net.core.somaxconn", 65535)
            _answer_at(pod, prefix)
            _route_to(self.node, pod, prefix)
            ports = map(str, (QUIET_PORT, GREET_PORT, SINK_PORT))
            arguments = ["serve", self.workload.side(number), *ports]
            process = self._spawn(Place(pod.cgroup, pod.netns), arguments, self.cpus.server)
            server = Talker(f"backend {pod.name}", process)
            if server.line() != "ready":
                raise BenchError(f"{server.title} did not start")
            self.servers.append(server)

    def write_lists(self, seed: int) -> None:
        for number, destinations in enumerate(self.workload.lists(seed)):
            path = self.lab.folder / f"list-{number}"
            path.write_bytes(pack_destinations(destinations))
            self._lists.append(path)

    def client(self, title: str, cgroup: Path, pod: Pod | None = None) -> Client:
        """A client in ``cgroup``, which is made, and in the namespace of ``pod``.

        By default that is the client namespace, which all socket clients share.
        """
        cgroup.mkdir(parents=True, exist_ok=True)
        netns = (pod or self._pod).netns
        process = self._spawn(Place(cgroup, netns), ["client"], self.cpus.client)
        client = Client(f"client {title}", process)
        if client.line() != "ready":
            raise BenchError(f"{client.title} did not start")
        client.load(self._lists)
        self.clients.append(client)
        return client

    @property
    def bare_cgroup(self) -> Path:
        """A cgroup that no agent's programs are attached to."""
        return self.lab.cgroup / "outside" / "bare"

    @property
    def pod_cgroup(self) -> Path:
        """The client pod's own cgroup, where ``node``'s agent serves."""
        return self._pod.cgroup

    @property
    def plain_cgroup(self) -> Path:
        """A cgroup where ``plain``'s agent serves."""
        return client_cgroup(self.plain)

    def agent(self, node: Node, *flags: str, packets: bool = False) -> Agent:
        """An agent on the manifests; without ``packets`` nothing of it meets a packet."""
        source = ("--manifests", str(self.manifests))
        flags = flags if packets else (*_NO_PACKETS, *flags)
        return Agent(node, source, folder=self.lab.folder, flags=flags)

    def api_agent(self, server: ApiServer, *flags: str) -> Agent:
        """An agent on ``server``'s node that has everything from there."""
        source = ("--master", server.url)
        return Agent(server.node, source, folder=self.lab.folder, flags=(*_NO_PACKETS, *flags))

    def api_server(self, node: Node) -> ApiServer:
        """The workload's API server in ``node``'s namespace, where its agent finds it."""
        command = [
            *(sys.executable, "-m", "ebpflb.bench.apiserver", "--node-name", NODE_NAME),
            *("--workload", msgspec.json.encode(self.workload).decode()),
        ]
        cgroup = self.lab.cgroup / "outside" / f"api-{node.name}"
        cgroup.mkdir(parents=True, exist_ok=True)
        process = self._spawn_command(Place(cgroup, node.netns), command, self.cpus.server)
        server = ApiServer(node, process)
        self.programs.append(server)
        return server

    def talker(self, title: str, node: Node, command: Sequence[str]) -> Talker:
        """A program of ours on ``node`` that we talk with."""
        log = self.lab.folder / f"{title.replace(' ', '-')}.log"
        with log.open("wb") as sink:
            process = node.popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sink, cwd="/"
            )
        self.programs.append(Talker(f"{title} (its log: {log})", process))
        return self.programs[-1]

    def cpu_used(self) -> CpuUsed:
        """So far; ``foreign_share`` compares with it."""
        fields = [
            int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        ]
        user, nice, system, _idle, _iowait, _irq, _softirq, steal = fields[:8]
        tick = os.sysconf("SC_CLK_TCK")
        own = sum(_ticks(one.process.pid) for one in (*self.clients, *self.servers, *self.programs))
        busy = user + nice + system + steal
        return CpuUsed(busy / tick, sum(fields[:8]) / tick, own / tick + time.process_time())

    def foreign_share(self, before: CpuUsed) -> float:
        """The share of all CPUs, since ``before``, that processes had which are none of ours.

        What a hypervisor took counts; interrupts do not, which are mostly our packets.
        """
        busy, total, own = (now - then for now, then in zip(self.cpu_used(), before, strict=True))
        return min(1.0, max(0.0, (busy - own) / max(total, 0.01)))

    def _spawn(self, place: Place, arguments: Sequence[str], cpu: int) -> subprocess.Popen[bytes]:
        return self._spawn_command(place, [str(self.program), *arguments], cpu)

    def _spawn_command(
        self, place: Place, command: Sequence[str], cpu: int
    ) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = subprocess.Popen(
            command_in(place, command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
        )
        self.lab.reap_at_end(process)
        os.sched_setaffinity(process.pid, {cpu})
        return process


@contextlib.contextmanager
def prepared(workload: Workload, seed: int) -> Iterator[Bed]:
    """A lab with everything but agents; all of it is gone at the end."""
    compiler = _compiler()
    usable = sorted(os.sched_getaffinity(0))
    with Lab("bench") as lab:
        program = _compile(compiler, lab.folder)
        bed = Bed(lab, workload, program, Cpus(usable[0], usable[-1]))
        bed.start_backends()
        bed.write_lists(seed)
        yield bed


def client_cgroup(node: Node) -> Path:
    """A cgroup where ``node``'s agent serves."""
    return node.cgroup_root / "pods" / "client"


def _ticks(pid: int) -> int:
    """CPU time of a process, 0 where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return 0
    return sum(map(int, stat.split()[11:13]))


def _route_to(node: Node, pod: Pod, prefix: str) -> None:
    """Through the pod's own address, so that one neighbour entry serves for the whole prefix."""

    def act(links: Any) -> None:
        links.route(prefix, via=pod.ipv4, device=pod.device, onlink=True)

    node.links(act)


def _answer_at(pod: Pod, prefix: str) -> None:
    """Let every address of ``prefix`` be the pod's own."""

    def act(links: Any) -> None:
        links.ipr.route(
            "replace", dst=prefix, oif=links.index("lo"), type="local", table=255, scope="host"
        )

    pod.links(act)


def _compiler() -> str:
    """Raises ConfigError where there is none."""
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return found
    raise ConfigError("the benchmark needs a C compiler: install the packages gcc, libc6-dev")


def _compile(compiler: str, folder: Path) -> Path:
    """connect.c as a program in ``folder``."""
    program = folder / "connect"
    with resources.as_file(resources.files("ebpflb.bench") / "connect.c") as source:
        ran = subprocess.run(
            [compiler, "-O2", "-Wall", "-o", str(program), str(source)],
            check=False,
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
        )
    if ran.returncode:
        raise ConfigError(
            f"{compiler} cannot compile the benchmark's client:\n{ran.stderr[-1000:]}"
        )
    return program
