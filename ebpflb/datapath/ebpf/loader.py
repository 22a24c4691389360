# SPDX-License-Identifier: Apache-2.0
"""Compiles and loads the programs, in a child process that ends: the only user of bcc.

bcc brings a compiler of 100 MB into the process that imports it. So the agent starts this module
as a child, tells it on stdin what to build, and gets the programs' descriptors over a socket; the
maps are opened by the programs from their pins. Nothing is attached here, and nothing of what the
child printed is shown but the lines that explain a failure.
"""

from __future__ import annotations

import array
import errno
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import NamedTuple

from ebpflb.datapath.ebpf import abi
from ebpflb.errors import DatapathError

COMPILE_TIMEOUT_S = 120
WERROR = "EBPFLB_WERROR"
"""The environment variable that makes the compiler's warnings errors: for our own tests."""

_LOCAL_INCLUDE = re.compile(r'^#include "(\w+\.h)"$')
_LOG_LINES = 12


class Function(NamedTuple):
    """A program to load: its C function, the kernel's program and attach types."""

    name: str
    prog_type: int
    attach_type: int


class Build(NamedTuple):
    """All that is compiled, and for what. ``defines`` are numbers, ``pins`` are paths by map."""

    source: str
    functions: tuple[Function, ...]
    defines: Mapping[str, int]
    pins: Mapping[str, str]

    def digest(self) -> int:
        """64 bits that change with all of this, but not with the compiler; never 0."""
        text = json.dumps([self.text(), self.functions, self.flags()], sort_keys=True)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) | 1

    def text(self) -> str:
        return flatten(self.source) + abi.static_asserts()

    def flags(self) -> list[str]:
        defines = [f"-D{name}={value}" for name, value in sorted(self.defines.items())]
        return [*defines, *(f'-DPIN_{name}="{path}"' for name, path in sorted(self.pins.items()))]


def flatten(name: str, seen: set[str] | None = None) -> str:
    """The text of ``bpf/<name>`` with our headers in place: bcc rewrites one file only."""
    seen = set() if seen is None else seen
    seen.add(name)
    lines = [f'#line 1 "bpf/{name}"']
    for number, line in enumerate(abi.SOURCES.joinpath(name).read_text().splitlines(), 1):
        match = _LOCAL_INCLUDE.match(line)
        if not match:
            lines.append(line)
        elif match.group(1) not in seen:
            lines += [flatten(match.group(1), seen), f'#line {number + 1} "bpf/{name}"']
        else:
            lines.append("")
    return "\n".join(lines) + "\n"


class Loading:
    """A child that compiles and loads; ``wait`` for it, or ``cancel`` it from another thread."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = False
        self._lock = threading.Lock()

    def wait(self) -> dict[str, int]:
        """The programs' descriptors by function name.

        Raises DatapathError with the lines of the compiler or the verifier that matter.
        """
        build = self._build
        ours, theirs = socket.socketpair()
        with ours, theirs, resources.as_file(abi.SOURCES) as tree:
            request = {
                "text": build.text(),
                "flags": build.flags(),
                "functions": build.functions,
                "socket": theirs.fileno(),
            }
            try:
                child = self._run(json.dumps(request), theirs.fileno(), str(tree))
            except subprocess.TimeoutExpired:
                raise DatapathError(
                    "compile", f"bpf/{build.source}", hint=f"gave up after {COMPILE_TIMEOUT_S} s"
                ) from None
            except OSError as error:
                raise DatapathError("run", sys.executable, error.errno or 0) from None
            if self._cancelled:
                raise DatapathError("compile", f"bpf/{build.source}", errno.ECANCELED)
            if child.returncode:
                raise _explain(build, child)
            names = [function.name for function in build.functions]
            _, fds, _, _ = socket.recv_fds(ours, 1, len(names))
        return dict(zip(names, fds, strict=True))

    def _run(self, request: str, channel: int, tree: str) -> subprocess.CompletedProcess[str]:
        with self._lock:
            if self._cancelled:
                return subprocess.CompletedProcess([], 0, "", "")
            # -P: the working directory may be anybody's, and this child is root.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "ebpflb.datapath.ebpf.loader"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[channel],
                env={**os.environ, "BCC_KERNEL_SOURCE": tree},
            )
        with self._process as child:
            try:
                said, complained = child.communicate(request, COMPILE_TIMEOUT_S)
            except BaseException:
                child.kill()
                raise
        return subprocess.CompletedProcess(child.args, child.returncode, said, complained)

    def cancel(self) -> None:
        """End it; ``wait`` raises then. Any thread may, at any time."""
        with self._lock:
            self._cancelled = True
            if self._process is not None:
                self._process.kill()


def load(build: Build) -> dict[str, int]:
    """Compile and load; returns the programs' descriptors by function name.

    Raises DatapathError with the lines of the compiler or the verifier that matter.
    """
    return Loading(build).wait()


def _explain(build: Build, child: subprocess.CompletedProcess[str]) -> DatapathError:
    if child.returncode < 0:
        return DatapathError(
            "compile",
            f"bpf/{build.source}",
            hint=f"the compiler was ended by signal {-child.returncode} (out of memory?)",
        )
    failed = child.stdout.strip().splitlines()[-1] if child.stdout.strip() else ""
    log = child.stderr
    if not log.strip():
        log = f"nothing (it ended with exit code {child.returncode})"
    if failed == "no bcc":
        return DatapathError(
            "import",
            "bcc",
            hint="install Debian's or Ubuntu's python3-bpfcc (bcc on PyPI is another project) and "
            f"run ebpflb with a Python that sees it; this one is {sys.executable}",
            fatal=True,
        )
    if failed.startswith("load "):
        return DatapathError(
            "load program",
            failed.removeprefix("load "),
            hint="the kernel's verifier says:\n" + _verdict(log),
            fatal=True,
        )
    return DatapathError(
        "compile",
        f"bpf/{build.source}",
        hint="the compiler says:\n" + _diagnosis(log),
        fatal=True,
    )


def _diagnosis(log: str) -> str:
    """The compiler's errors, each with the line of code below it."""
    lines = log.splitlines()
    picked: list[str] = []
    for i, line in enumerate(lines):
        if " error: " in line or line.startswith("error: "):
            picked += lines[i : i + 3]
    return "\n".join((picked or lines)[-_LOG_LINES:])


def _verdict(log: str) -> str:
    """The end of the verifier's log, without its statistics: there it says why."""
    noise = ("processed ", "verification time", "stack depth", "HINT:")
    lines = [
        line
        for line in log.splitlines()
        if line.strip() and not line.startswith(("Traceback", "  File", *noise))
    ]
    while lines and ("raise " in lines[-1] or "Exception" in lines[-1]):
        lines.pop()
    return "\n".join(lines[-_LOG_LINES:])


def main() -> int:
    """The child. Prints one word of what failed; bcc prints the log on stderr."""
    request = json.load(sys.stdin)
    try:
        from bcc import BPF
    except ImportError:
        print("no bcc")
        return 1
    # Another compiler on somebody's node may warn of more than ours does.
    warnings = ["-Werror", "-Wno-unused-value"] if os.environ.get(WERROR) else ["-w"]
    try:
        module = BPF(text=request["text"], cflags=[*warnings, *request["flags"]])
    except Exception:  # noqa: BLE001 - bcc raises nothing more precise
        print("compile")
        return 1
    fds: Sequence[int] = array.array("i")
    for name, prog_type, attach_type in request["functions"]:
        try:
            fds.append(module.load_func(name, prog_type, None, attach_type).fd)  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - as above
            print(error, file=sys.stderr)
            print(f"load {name}")
            return 1
    with socket.socket(fileno=request["socket"]) as channel:
        socket.send_fds(channel, [b"!"], list(fds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
