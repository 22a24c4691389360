# SPDX-License-Identifier: Apache-2.0
"""Builds etcd, kube-apiserver and kube-controller-manager, once, and keeps them outside the tree.

    python -m tests.e2e.binaries        builds what is missing and prints the folder

Which versions is for go/go.mod to say; what was built from another go.mod or go.sum, or in another
way, is another build. This file must not know what the programs are started for.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

MODULE = Path(__file__).with_name("go")
SAY_EVERY_S = 15.0
RECIPE = ("build", "-v", "-trimpath", "-mod=readonly", "-buildvcs=false")
ENVIRONMENT = {"CGO_ENABLED": "0"}
KUBERNETES = "k8s.io/kubernetes"


class Binary(NamedTuple):
    """A program: its file here, its main package, and the name that `go build` gives it."""

    name: str
    package: str
    built_as: str


BINARIES = (
    Binary("etcd", "go.etcd.io/etcd/server/v3", "server"),
    *(
        Binary(name, f"{KUBERNETES}/cmd/{name}", name)
        for name in ("kube-apiserver", "kube-controller-manager")
    ),
)


class BuildError(Exception):
    """The programs could not be built; the text says why."""


def go() -> str | None:
    """Where Go is: on the PATH, or where its own installation puts it."""
    usual = Path("/usr/local/go/bin/go")
    return shutil.which("go") or (str(usual) if os.access(usual, os.X_OK) else None)


@functools.cache
def version(module: str) -> str:
    """The version of a module in go.mod."""
    required = re.search(
        rf"^\t{re.escape(module)} (v\S+)", (MODULE / "go.mod").read_text(), re.MULTILINE
    )
    if required is None:
        raise BuildError(f"{MODULE / 'go.mod'} requires no {module}")
    return required[1]


def link_flags() -> str:
    """Without symbols; with the version that a release's own build would have written in."""
    wanted = version(KUBERNETES)
    major, minor = wanted.removeprefix("v").split(".")[:2]
    where = "k8s.io/component-base/version"
    facts = {"gitVersion": wanted, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(["-s", "-w", *(f"-X {where}.{name}={value}" for name, value in facts.items())])


def folder() -> Path:
    """Where the programs of this very go.mod and go.sum are, or will be."""
    digest = hashlib.sha256()
    for file in ("go.mod", "go.sum"):
        digest.update((MODULE / file).read_bytes())
    digest.update(repr((RECIPE, ENVIRONMENT, link_flags(), BINARIES)).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "ebpflb" / "e2e" / digest.hexdigest()[:16]


def built() -> bool:
    return all((folder() / one.name).is_file() for one in BINARIES)


def build(say: Callable[[str], None]) -> Path:
    """Build what is not there yet; returns the folder. Raises BuildError.

    It takes minutes; ``say`` gets a line now and then. Who comes second waits for the first.
    """
    done = folder()
    if built():
        return done
    program = go()
    if program is None:
        raise BuildError("there is no Go: see docs/testing.md")
    done.parent.mkdir(parents=True, exist_ok=True)
    with _lock(done.with_suffix(".lock"), say):
        if not built():
            with tempfile.TemporaryDirectory(prefix=".new-", dir=done.parent) as new:
                _build(program, Path(new), done.with_suffix(".log"), say)
                for one in BINARIES:
                    (Path(new) / one.built_as).rename(Path(new) / one.name)
                done.mkdir(exist_ok=True)
                for one in BINARIES:
                    (Path(new) / one.name).rename(done / one.name)
    return done


@contextlib.contextmanager
def _lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build is under way; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(program: str, into: Path, log_path: Path, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    say(f"building Kubernetes {version(KUBERNETES)} and etcd; this takes minutes, once")
    packages = [one.package for one in BINARIES]
    with log_path.open("w") as log:
        needed = _run(program, ["list", "-deps", "-mod=readonly", *packages], log, _Progress(say))
        progress = _Progress(say, of=len(needed))
        command = [*RECIPE, "-ldflags", link_flags(), "-o", f"{into}/", *packages]
        _run(program, command, log, progress)
    say(f"built in {time.monotonic() - began:.0f} s")


class _Progress:
    """Counts what Go says it has done and says so now and then."""

    def __init__(self, say: Callable[[str], None], *, of: int = 0) -> None:
        self._say = say
        self._of = of
        self._began = self._said = time.monotonic()
        self._count = 0

    def __call__(self, lines: Sequence[str]) -> None:
        self._count += len(lines)
        now = time.monotonic()
        if now - self._said >= SAY_EVERY_S:
            self._said = now
            what = f"{self._count} of {self._of} packages" if self._of else "fetching modules"
            self._say(f"… {now - self._began:.0f} s: {what}")


def _run(
    program: str, arguments: Sequence[str], log: TextIO, progress: Callable[[Sequence[str]], None]
) -> list[str]:
    """Run Go to its end; its standard error is read for progress and kept. Returns the output."""
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(
            [program, *arguments],
            cwd=MODULE,
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.PIPE,
        ) as process,
    ):
        assert process.stderr is not None
        said = bytearray()
        unread = b""
        while True:
            lines: list[bytes] = []
            if select.select([process.stderr], [], [], 1.0)[0]:
                received = os.read(process.stderr.fileno(), 1 << 16)
                if not received:
                    break
                said += received
                *lines, unread = (unread + received).split(b"\n")
            progress([line.decode(errors="replace") for line in lines])
        code = process.wait()
        text = said.decode(errors="replace")
        print("$ go", *arguments, "\n", text, file=log)
        output.seek(0)
        if code:
            end = "\n".join(text.splitlines()[-25:])
            raise BuildError(f"go {arguments[0]} ended with {code}:\n{end}")
        return output.read().splitlines()


def main() -> int:
    def say(line: str) -> None:
        sys.stderr.write(f"[e2e] {line}\n")

    try:
        sys.stdout.write(f"{build(say)}\n")
    except BuildError as error:
        say(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
