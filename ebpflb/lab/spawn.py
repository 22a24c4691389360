# SPDX-License-Identifier: Apache-2.0
"""Starts programs in a namespace and a cgroup, and talks with those that listen.

A program joins its cgroup first and enters the namespace then, since a cgroup hook sees only
sockets that were made inside the cgroup, and the way in must not depend on the namespace. It must
know nothing of topologies: a `Place` is two paths.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, Self, TypeVar

from ebpflb.lab import client
from ebpflb.lab.client import Outcome

__all__ = [
    "Capture",
    "LabError",
    "Loop",
    "Place",
    "Running",
    "Server",
    "Worker",
    "command_in",
    "python_program",
    "wait_until",
]

T = TypeVar("T")

ANSWER_S: Final = 10.0

# "echo 0" moves the writer, which is this shell: echo is a builtin.
_JOIN: Final = 'echo 0 > "$1/cgroup.procs" && shift && exec "$@"'


class LabError(Exception):
    """The lab could not be built or taken down, or a program in it did not do its part."""


class Place(NamedTuple):
    """Where a program runs."""

    cgroup: Path
    netns: Path


def command_in(place: Place, command: Sequence[str | Path]) -> list[str]:
    """Return the command that joins the place's cgroup, enters its namespace and becomes another.

    The process keeps its number all the way. `ip netns exec` will not do: it mounts a fresh /sys,
    which hides bpffs and cgroup v2.
    """
    enter = ["nsenter", f"--net={place.netns}", "--"]
    return ["sh", "-c", _JOIN, "join", str(place.cgroup), *enter, *map(str, command)]


def python_program(name: str, *arguments: str) -> list[str]:
    """Return the command for a program of this folder: server, client or capture.

    By its path and without site packages: it starts in 20 ms where an import of the lab would
    take 150.
    """
    path = Path(__file__).with_name(f"{name}.py")
    return [sys.executable, "-I", "-S", str(path), *arguments]


def wait_until(condition: Callable[[], T], *, timeout_s: float = 5.0, what: str) -> T:
    """Ask `condition` until it returns something true, and return that.

    For what can be observed and not awaited. Raises LabError, with `what` in its text, when time
    is up. At least one question is asked.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.001
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise LabError(f"{what}: not so within {timeout_s:g} s")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.05)
    return answer


class Running:
    """A program that says a line of JSON when it is ready, and one for each line it is sent.

    Use it as a context manager, or let the lab's end take it.
    """

    def __init__(self, title: str, process: subprocess.Popen[bytes], complaints: Path) -> None:
        """Wait until it is ready; `complaints` is the file that its standard error goes to."""
        self.title = title
        self._process = process
        self._complaints = complaints
        self._unread = b""
        self._lock = threading.Lock()
        try:
            self.ready: dict[str, Any] = self._read(ANSWER_S)
        except LabError:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def ask(self, line: str, *, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Send one line and return the answer; threads take turns.

        Who does not answer in time is ended: his answer must not be taken for the next one.
        """
        with self._lock:
            try:
                self._input.write(line.encode() + b"\n")
                self._input.flush()
            except OSError as error:
                raise self._failure(f"took no command: {error}") from error
            try:
                return self._read(timeout_s)
            except LabError:
                self.kill()
                raise

    def end(self, *, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Close its input, return its last line and wait for its end."""
        with contextlib.suppress(OSError):
            self._input.close()
        last = self._read(timeout_s)
        self._process.wait(timeout_s)
        self._close()
        return last

    def kill(self) -> None:
        """End it at once (SIGKILL), as a pod's node does in the worst case. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait(ANSWER_S)
        self._close()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, SIGSTOP for example."""
        self._process.send_signal(number)

    @property
    def _input(self) -> IO[bytes]:
        assert self._process.stdin is not None  # noqa: S101 - made with a pipe
        return self._process.stdin

    def _read(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None  # noqa: S101 - made with a pipe
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
                raise self._failure(f"said nothing within {timeout_s:g} s")
            received = os.read(descriptor, 1 << 18)
            if not received:
                raise self._failure("ended")
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise self._failure(f"said {line[:200]!r}") from error
        return answer if isinstance(answer, dict) else {"result": answer}

    def _failure(self, what: str) -> LabError:
        complaints = ""
        with contextlib.suppress(OSError):
            complaints = self._complaints.read_text(errors="replace").strip()[-2000:]
        return LabError(f"{self.title} {what}" + (f":\n{complaints}" if complaints else ""))

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Server(Running):
    """A server that says who it is (`ebpflb.lab.server`)."""

    def stats(self) -> dict[str, Any]:
        """Return its counts: tcp_accepted, tcp_open, udp_received, peers, ports, last."""
        return self.ask("stats")

    def mute(self, *, muted: bool = True) -> None:
        """Let it answer no datagram any more, or again."""
        self.ask("mute" if muted else "unmute")

    def stop(self) -> dict[str, Any]:
        """End it in order; return its last counts."""
        return self.end()


class Loop(Running):
    """A client that goes on until it is stopped (`ebpflb.lab.client --until-stopped`)."""

    def outcome(self) -> Outcome:
        """Return what has come of it so far."""
        return outcome_of(self.ask(""))

    def wait_for(
        self, condition: Callable[[Outcome], bool], *, timeout_s: float = 5.0, what: str
    ) -> Outcome:
        """Wait until the outcome so far satisfies a condition; return it."""
        seen: list[Outcome] = []

        def look() -> bool:
            seen[:] = [self.outcome()]
            return condition(seen[0])

        try:
            wait_until(look, timeout_s=timeout_s, what=f"{self.title}: {what}")
        except LabError as error:
            error.add_note(f"its outcome so far: {seen[0]}")
            raise
        return seen[0]

    def stop(self, *, timeout_s: float = 30.0) -> Outcome:
        """Let it finish what it is at and return its outcome."""
        return outcome_of(self.end(timeout_s=timeout_s))


class Capture(Running):
    """A witness on an interface (`ebpflb.lab.capture`)."""

    def flows(self, **wanted: object) -> list[dict[str, Any]]:
        """Return the flows that passed so far and have all of the given values.

        flows(direction="in", protocol="udp"): keys as `ebpflb.lab.capture` prints them.
        """
        told = self.ask("")["flows"]
        return [
            flow for flow in told if all(flow.get(key) == value for key, value in wanted.items())
        ]

    def packets(self, **wanted: object) -> int:
        """Return how many packets such flows had."""
        return sum(int(flow["packets"]) for flow in self.flows(**wanted))


class Worker(Running):
    """A client that performs one command after another (`ebpflb.lab.client worker`)."""

    def perform(self, arguments: Sequence[str], *, timeout_s: float) -> list[Outcome]:
        """Perform one client command; most have one outcome."""
        return self._results(list(arguments), timeout_s)

    def perform_at_once(
        self, commands: Sequence[Sequence[str]], *, timeout_s: float
    ) -> list[Outcome]:
        """Perform client commands that have one outcome each, at once."""
        return self._results([list(command) for command in commands], timeout_s) if commands else []

    def _results(self, command: list[Any], timeout_s: float) -> list[Outcome]:
        answer = self.ask(json.dumps(command), timeout_s=timeout_s)
        if "error" in answer:
            raise LabError(f"{self.title}: {str(command)[:500]}: {answer['error']}")
        result = answer["result"]
        return [outcome_of(one) for one in (result if isinstance(result, list) else [result])]


def outcome_of(said: Mapping[str, Any]) -> Outcome:
    """Read an outcome that a client printed."""
    try:
        switches = [(float(when), str(who)) for when, who in said["switches"]]
        return Outcome(**{**said, "switches": switches})
    except (KeyError, TypeError) as error:
        raise LabError(f"no outcome: {said}") from error


def client_arguments(operation: str, *operands: str | int, **options: object) -> list[str]:
    """Write a client's command line; an option that is "", 0, None or False is left out."""
    arguments = [operation, *map(str, operands)]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value:
            arguments += [flag, str(value)]
    return arguments


def client_environment(tools: Path) -> dict[str, str]:
    """Return the environment for clients: helpers in C are compiled into the folder `tools`."""
    return {**os.environ, client.TOOLS_VARIABLE: str(tools)}
