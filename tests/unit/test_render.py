# SPDX-License-Identifier: Apache-2.0
"""How values are printed: into a pipe, on a terminal of any width, as JSON and YAML."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout

import msgspec
import pytest
import yaml

from ebpflb.cli import render
from ebpflb.cli.render import Column, Styled

COLUMNS = [
    Column("SERVICE", style="bold"),
    Column("CONNS", right=True, rigid=True),
    Column("BACKENDS"),
]
ROWS: list[list[render.Cell]] = [
    ["default/web", "7", ["10.1.0.1:80", Styled("10.1.0.2:80", "yellow")]],
    ["kube-system/kube-dns:dns-tcp", "1204", Styled("none: refused", "red")],
]


class Thing(msgspec.Struct):
    zone: str
    address: str | None
    flags: list[str]


THINGS = {"things": [Thing("b", None, []), Thing("a", "10.0.0.1", ["local", "ünïcode"])]}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 80 columns, to be put in the place of standard output."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return Terminal()


def plain(terminal: Terminal) -> list[str]:
    """The lines without colours and padding."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    return [line.rstrip() for line in text.splitlines()]


# --- for programs --------------------------------------------------------------------------------


def test_json_is_indented_with_keys_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_json(THINGS)
    text = capsys.readouterr().out
    assert text.endswith("}\n")
    assert '\n  "things"' in text
    assert [list(one) for one in json.loads(text)["things"]] == [["zone", "address", "flags"]] * 2
    assert json.loads(text)["things"][1] == {
        "zone": "a",
        "address": "10.0.0.1",
        "flags": ["local", "ünïcode"],
    }


def test_yaml_says_the_same_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_json(THINGS)
    as_json = capsys.readouterr().out
    render.print_yaml(THINGS)
    as_yaml = capsys.readouterr().out
    assert yaml.safe_load(as_yaml) == json.loads(as_json)
    assert as_yaml.index("zone") < as_yaml.index("address") < as_yaml.index("flags")


# --- into a pipe ---------------------------------------------------------------------------------


def test_a_pipe_gets_one_row_a_line_and_nothing_cut(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_table(COLUMNS, ROWS)
    assert capsys.readouterr().out.splitlines() == [
        "SERVICE                       CONNS  BACKENDS",
        "default/web                       7  10.1.0.1:80, 10.1.0.2:80",
        "kube-system/kube-dns:dns-tcp   1204  none: refused",
    ]


def test_a_pipe_gets_wide_rows_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    many = [f"10.1.0.{i}:8080" for i in range(200)]
    render.print_table([Column("BACKENDS")], [[many]])
    assert capsys.readouterr().out.splitlines()[1] == ", ".join(many)


def test_lines_in_a_pipe_have_no_style(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_line(Styled("problem  ", "red"), "[bold]as it is[/bold] :smile:")
    assert capsys.readouterr().out == "problem  [bold]as it is[/bold] :smile:\n"


# --- on a terminal -------------------------------------------------------------------------------


def test_a_terminal_gets_one_item_a_line(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        render.print_table(COLUMNS, ROWS)
    assert plain(terminal) == [
        "SERVICE                       CONNS  BACKENDS",
        "default/web                       7  10.1.0.1:80",
        "                                     10.1.0.2:80",
        "kube-system/kube-dns:dns-tcp   1204  none: refused",
    ]
    assert "\x1b[33m10.1.0.2:80" in terminal.getvalue()


@pytest.mark.parametrize("width", [24, 30, 40, 60, 80, 200])
def test_a_narrow_terminal_folds_and_loses_nothing(
    width: int, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with redirect_stdout(terminal):
        render.print_table(COLUMNS, ROWS)
    lines = plain(terminal)
    assert max(map(len, lines)) <= width
    shown = "".join("".join(lines).split())
    for row in ROWS:
        assert str(row[1]) in shown
    assert sorted(shown) == sorted(
        "SERVICECONNSBACKENDS"
        "default/web710.1.0.1:8010.1.0.2:80"
        "kube-system/kube-dns:dns-tcp1204none:refused"
    )


def test_no_color_is_respected(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(terminal):
        render.print_table(COLUMNS, ROWS)
        render.print_line(Styled("x", "red"))
    assert not re.search(r"\x1b\[(\d+;)*3\d", terminal.getvalue())


def test_markup_in_values_is_shown_as_it_is(terminal: Terminal) -> None:
    with redirect_stdout(terminal):
        render.print_table([Column("NAME")], [["[red]x[/red]"], [":smile:"]])
        render.print_line("[red]y[/red]")
    assert plain(terminal) == ["NAME", "[red]x[/red]", ":smile:", "[red]y[/red]"]


def test_a_very_long_table_is_not_folded(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    rows = [[f"row {i}", "a text that is longer than the screen is wide"] for i in range(3000)]
    with redirect_stdout(terminal):
        render.print_table([Column("A"), Column("B")], rows)
    assert len(plain(terminal)) == 3001


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("default/web:http", 20, ["default/web:http"]),
        ("default/web:http", 16, ["default/web:http"]),
        ("default/kubernetes:https", 16, ["default/", "kubernetes:https"]),
        ("kube-system/kube-dns:dns-tcp", 18, ["kube-system/", "kube-dns:dns-tcp"]),
        ("shop/a-long-name:grpc", 12, ["shop/a-long-", "name:grpc"]),
        ("10.96.77.188:50051", 14, ["10.96.77.188:", "50051"]),
        ("none on this node: refused", 18, ["none on this node:", "refused"]),
        ("abcdefghij", 4, ["abcd", "efgh", "ij"]),
        ("", 4, [""]),
    ],
)
def test_folding_breaks_where_a_name_has_a_joint(text: str, width: int, lines: list[str]) -> None:
    assert render.fold(text, width) == lines


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.04, "0.0s"),
        (2.25, "2.2s"),
        (9, "9s"),
        (59.6, "1m"),
        (90, "1m 30s"),
        (3600, "1h"),
        (10_800, "3h"),
        (86_400, "1d"),
        (90_061, "1d 1h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (6_291_456, "6.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3072.0 GiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert render.size(count) == text
