# SPDX-License-Identifier: Apache-2.0
"""A network namespace with a cgroup: what a lab's user does with a node, a pod, a client.

Programs, servers, clients and witnesses are started here, and settings read and written. It must
know nothing of what a namespace is in the topology, or whom it is joined to.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypedDict, TypeVar

from ebpflb.lab import netns, spawn
from ebpflb.lab.spawn import Capture, LabError, Loop, Place, Running, Server, Worker

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ebpflb.lab.client import Fastopen, Outcome
    from ebpflb.lab.topology import Lab

__all__ = ["SYSCTLS", "Namespace", "Question"]

T = TypeVar("T")

RUN_S: Final = 60.0
LONGEST_S: Final = 600.0

_counter = itertools.count(1)

# Of every namespace: addresses are usable at once, and nobody's answer is held back by a limit
# that a test of a hundred refusals would reach.
SYSCTLS: Final[Mapping[str, str | int]] = {
    "net.ipv4.conf.all.rp_filter": 0,
    "net.ipv4.conf.default.rp_filter": 0,
    "net.ipv4.icmp_ratelimit": 0,
    "net.ipv4.tcp_fastopen": 3,
    "net.ipv6.conf.all.disable_ipv6": 0,
    "net.ipv6.conf.default.disable_ipv6": 0,
    "net.ipv6.conf.all.accept_dad": 0,
    "net.ipv6.conf.default.accept_dad": 0,
    "net.ipv6.conf.default.accept_ra": 0,
    "net.ipv6.icmp.ratelimit": 0,
}


class DialOptions(TypedDict, total=False):
    """How a client's socket is made; `client.Dial` says what each means."""

    timeout_s: float
    source: str
    source_port: int
    device: str
    reuseport: bool
    mapped: bool
    mptcp: bool
    fastopen: Fastopen
    recverr: bool


class PaceOptions(DialOptions, total=False):
    """How often; `count` does not matter to a loop."""

    count: int
    interval_s: float
    size: int


class TcpOptions(PaceOptions, total=False):
    """What `client.tcp` and `client.tcp_hold` take besides."""

    parallel: int
    reset: bool


class UdpOptions(PaceOptions, total=False):
    """What `client.udp` takes besides."""

    sockets: int
    connected: bool
    one_way: bool
    reopen: bool


class Question(NamedTuple):
    """What a client is to do, as one of several things at once; `options` are the operation's."""

    operation: Literal["tcp", "hold", "udp", "ping"]
    host: str
    port: int = 0
    options: Mapping[str, Any] = {}

    @property
    def command(self) -> list[str]:
        """The client's arguments."""
        operands = [self.host, self.port] if self.port else [self.host]
        return spawn.client_arguments(self.operation, *operands, **self.options)

    @property
    def longest_s(self) -> float:
        """How long it may take."""
        each_s = self.options.get("timeout_s", 3.0) + self.options.get("interval_s", 0.0)
        return float(min(30.0 + self.options.get("count", 1) * each_s, LONGEST_S))


class Namespace:
    """A network namespace with a cgroup for its processes: programs, servers and clients in it.

    `name` is what the lab's user calls it, `netns` its path under /run/netns, `cgroup` where its
    processes live, `ipv4` and `ipv6` the addresses that others dial ("" where there is none).
    """

    def __init__(
        self, lab: Lab, name: str, *, cgroup: Path, ipv4: str = "", ipv6: str = ""
    ) -> None:
        self.lab = lab
        self.name = name
        self.cgroup = cgroup
        self.ipv4 = ipv4
        self.ipv6 = ipv6
        self.netns = Path()
        self._worker: Worker | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.ipv4} {self.ipv6}>"

    def make(
        self, sysctls: Mapping[str, str | int], configure: Callable[[netns.Links], None]
    ) -> None:
        """Make the namespace and what is in it from the start."""
        self.netns = self.lab.make_netns(self.name)

        def configure_all(links: netns.Links) -> None:
            netns.write_sysctls({**SYSCTLS, **sysctls})
            links.set("lo", state="up")
            configure(links)

        netns.links(self.netns, configure_all)

    # --- configuration ------------------------------------------------------------------------

    def links(self, act: Callable[[netns.Links], T]) -> T:
        """Call a function with this namespace's interfaces, addresses and routes.

        `act(links)` runs inside the namespace; `links.ipr` is pyroute2's IPRoute for the rest.
        """
        return netns.links(self.netns, act)

    def inside(self, act: Callable[[], T]) -> T:
        """Call a function in a thread that is in this namespace (but not in its cgroup)."""
        return netns.inside(self.netns, act)

    def sysctl(self, name: str, value: str | int | None = None) -> str:
        """Return a sysctl of this namespace; with a value, write it first."""

        def act() -> str:
            if value is not None:
                netns.write_sysctls({name: value})
            path = name if "/" in name else name.replace(".", "/")
            return (Path("/proc/sys") / path).read_text().strip()

        return self.inside(act)

    def route(self, destination: str, *, via: str = "", device: str = "", mtu: int = 0) -> None:
        """Add or replace a route: to a load balancer's address through a node, for example."""
        self.links(lambda links: links.route(destination, via=via, device=device, mtu=mtu))

    def address(self, address: str, *, device: str = "eth0") -> None:
        """Add an address ("192.168.50.101/32") to an interface."""
        self.links(lambda links: links.address(device, address))

    def offload(self, *offloads: str, on: bool, device: str = "eth0") -> None:
        """Switch what an interface does for the kernel: keys of netns.OFFLOADS, default all."""
        self.links(lambda links: links.offload(device, *offloads, on=on))

    # --- programs -----------------------------------------------------------------------------

    def run(
        self,
        command: Sequence[str | Path],
        *,
        check: bool = True,
        timeout_s: float = RUN_S,
        text_in: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program here to its end; with `check`, raise LabError if it fails.

        env: added to this process's environment.
        """
        ran = subprocess.run(
            self._command(command),
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            input=text_in if text_in is not None else "",
            env={**os.environ, **(env or {})},
        )
        if check and ran.returncode:
            raise LabError(
                f"{' '.join(map(str, command))} in {self.name}: exit code {ran.returncode}\n"
                f"{ran.stdout}{ran.stderr}".strip()
            )
        return ran

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Start a program here; `options` are subprocess.Popen's. It ends with the lab.

        In a session of its own unless `options` says otherwise: Ctrl-C is for the lab's owner.
        """
        options.setdefault("start_new_session", True)
        process = subprocess.Popen(self._command(command), **options)
        self.lab.reap_at_end(process)
        return process

    def python(
        self,
        code: str | None = None,
        *,
        module: str | None = None,
        arguments: Sequence[str] = (),
        check: bool = True,
        timeout_s: float = RUN_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run Python code, or a module that this interpreter can import, to its end."""
        if (code is None) == (module is None):
            raise LabError("either code or a module")
        what = ["-c", code] if code is not None else ["-m", module or ""]
        here = str(Path(__file__).parents[2])
        search = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        return self.run(
            [sys.executable, *what, *arguments],
            check=check,
            timeout_s=timeout_s,
            env={"PYTHONPATH": search},
        )

    def _command(self, command: Sequence[str | Path]) -> list[str]:
        return spawn.command_in(Place(self.cgroup, self.netns), command)

    def _start(
        self, title: str, program: str, *arguments: str, pass_fds: Sequence[int] = ()
    ) -> tuple[Any, Path]:
        """Start one of the lab's own programs with pipes."""
        complaints = self.lab.folder / f"{title.replace(' ', '-')}-{next(_counter)}.stderr"
        with complaints.open("wb") as sink:
            process = self.popen(
                spawn.python_program(program, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                cwd="/",
                env=spawn.client_environment(self.lab.folder),
                pass_fds=pass_fds,
            )
        return process, complaints

    def start_program(self, program: str, *arguments: str, pass_fds: Sequence[int] = ()) -> Running:
        """Start one of the lab's own programs, which says a line when it is ready."""
        title = f"{program} {self.name}"
        return Running(title, *self._start(title, program, *arguments, pass_fds=pass_fds))

    # --- servers ------------------------------------------------------------------------------

    def serve(
        self,
        *,
        tcp: Iterable[int] = (),
        udp: Iterable[int] = (),
        name: str = "",
        bind: Iterable[str] = (),
        once: bool = False,
        mute: bool = False,
        mptcp: bool = False,
    ) -> Server:
        """Start a server that listens when this returns, and says `name` (else this name).

        bind: addresses; default all of both families. once: TCP, close behind the greeting.
        mute: UDP, count and never answer. mptcp: accept Multipath TCP too.
        """
        arguments = ["--name", name or self.name, "--control"]
        for flag, values in (("--tcp", tcp), ("--udp", udp), ("--bind", bind)):
            for value in values:
                arguments += [flag, str(value)]
        for flag, wanted in (("--once", once), ("--mute", mute), ("--mptcp", mptcp)):
            arguments += [flag] if wanted else []
        title = f"server {name or self.name}"
        return Server(title, *self._start(title, "server", *arguments))

    def capture(self, device: str = "eth0") -> Capture:
        """Count from now on what passes an interface, by flow."""
        title = f"capture {self.name} {device}"
        return Capture(title, *self._start(title, "capture", device))

    # --- clients ------------------------------------------------------------------------------

    def _client(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            title = f"client {self.name}"
            self._worker = Worker(title, *self._start(title, "client", "worker"))
        return self._worker

    def _ask(self, question: Question) -> Outcome:
        return self._client().perform(question.command, timeout_s=question.longest_s)[0]

    def tcp(self, host: str, port: int, **options: Unpack[TcpOptions]) -> Outcome:
        """Connect, read who answers, close: `count` times, `parallel` at once."""
        return self._ask(Question("tcp", host, port, options))

    def udp(self, host: str, port: int, **options: Unpack[UdpOptions]) -> Outcome:
        """Send `count` datagrams from `sockets` sockets in turn and await each answer."""
        return self._ask(Question("udp", host, port, options))

    def ping(self, host: str, **options: Unpack[PaceOptions]) -> Outcome:
        """Send ICMP echo requests, which no socket hook sees."""
        return self._ask(Question("ping", host, 0, options))

    def at_once(self, questions: Sequence[Question]) -> list[Outcome]:
        """Ask many questions at the same time; the outcomes are in their order."""
        longest_s = min(sum((one.longest_s for one in questions), 0.0), LONGEST_S)
        commands = [question.command for question in questions]
        return self._client().perform_at_once(commands, timeout_s=longest_s)

    def uring(self, host: str, port: int, *, mapped: bool = False) -> Outcome:
        """Connect once through io_uring; the error is UNSUPPORTED where there is none."""
        arguments = spawn.client_arguments("uring", host, port, mapped=mapped)
        return self._client().perform(arguments, timeout_s=RUN_S)[0]

    def reconnect(
        self, *targets: tuple[str, int] | None, **options: Unpack[DialOptions]
    ) -> list[Outcome]:
        """Connect one UDP socket to each target in turn, one exchange each; None disconnects."""
        arguments = spawn.client_arguments("reconnect", **options)
        for target in targets:
            spelt = "none:none" if target is None else f"{target[0]}:{target[1]}"
            arguments += ["--to", spelt]
        return self._client().perform(arguments, timeout_s=RUN_S)

    def tcp_loop(self, host: str, port: int, **options: Unpack[TcpOptions]) -> Loop:
        """Connect, read, close until stopped: shows "not one failed connect while …"."""
        return self._loop("tcp", host, port, options)

    def hold_loop(self, host: str, port: int, **options: Unpack[TcpOptions]) -> Loop:
        """Hold `parallel` TCP connections and exchange a line on each every `interval_s`."""
        return self._loop("hold", host, port, options)

    def udp_loop(self, host: str, port: int, **options: Unpack[UdpOptions]) -> Loop:
        """Send datagrams until stopped, one-way ones too."""
        return self._loop("udp", host, port, options)

    def _loop(self, operation: str, host: str, port: int, options: Mapping[str, Any]) -> Loop:
        arguments = spawn.client_arguments(operation, host, port, **options)
        title = f"{operation} loop {self.name}"
        return Loop(title, *self._start(title, "client", *arguments, "--until-stopped"))
