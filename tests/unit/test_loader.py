# SPDX-License-Identifier: Apache-2.0
"""The compiler's child: what it may import, how it is told to compile, and how it can end.

A module ``bcc`` that each test writes stands in for the real one.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.datapath.ebpf import loader
from ebpflb.errors import DatapathError

ROOT = Path(__file__).parents[2]
BUILD = loader.Build(source="sock.c", functions=(), defines={"X": 1}, pins={})

Fail = Callable[[str], DatapathError]


@pytest.fixture
def fail_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Load with this text as ``bcc.py``; returns the error."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def fail(bcc: str) -> DatapathError:
        (tmp_path / "bcc.py").write_text(bcc)
        with pytest.raises(DatapathError) as raised:
            loader.load(BUILD)
        return raised.value

    return fail


SHOW_FLAGS = """
import sys

class BPF:
    def __init__(self, text, cflags):
        print("error:", *cflags, file=sys.stderr)
        raise Exception
"""


def test_nothing_is_imported_from_the_working_directory(
    fail_with: Fail, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    anywhere = tmp_path / "anywhere"
    anywhere.mkdir()
    for module in ("json", "ebpflb", "socket"):
        (anywhere / f"{module}.py").write_text("raise SystemExit('taken')")
    monkeypatch.chdir(anywhere)
    error = fail_with("raise ImportError")
    assert str(error).startswith("import bcc: install ")
    assert error.fatal


@pytest.mark.parametrize(
    ("variable", "warnings"),
    [(None, "-w"), ("", "-w"), ("1", "-Werror -Wno-unused-value")],
    ids=["on a node", "set to nothing", "in our tests"],
)
def test_warnings_are_errors_only_where_that_is_asked_for(
    fail_with: Fail, monkeypatch: pytest.MonkeyPatch, variable: str | None, warnings: str
) -> None:
    if variable is None:
        monkeypatch.delenv("EBPFLB_WERROR", raising=False)
    else:
        monkeypatch.setenv("EBPFLB_WERROR", variable)
    error = fail_with(SHOW_FLAGS)
    assert str(error) == f"compile bpf/sock.c: the compiler says:\nerror: {warnings} -DX=1"
    assert error.fatal


def test_a_compiler_that_is_killed_is_no_fault_of_the_kernel(fail_with: Fail) -> None:
    error = fail_with("import os; os.kill(os.getpid(), 9)")
    assert str(error) == ("compile bpf/sock.c: the compiler was ended by signal 9 (out of memory?)")
    assert not error.fatal


@pytest.mark.parametrize(
    ("bcc", "says"),
    [
        ("raise SystemExit(7)", "the compiler says:\nnothing (it ended with exit code 7)"),
        (
            "print('load connect4'); raise SystemExit(1)",
            "the kernel's verifier says:\nnothing (it ended with exit code 1)",
        ),
    ],
    ids=["compiler", "verifier"],
)
def test_a_child_that_says_nothing_is_put_into_words(fail_with: Fail, bcc: str, says: str) -> None:
    assert str(fail_with(bcc)).endswith(says)


def test_a_child_that_cannot_be_started_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(DatapathError, match=r"^run .+: Cannot allocate memory \(ENOMEM\)"):
        loader.load(BUILD)
