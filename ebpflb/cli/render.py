# SPDX-License-Identifier: Apache-2.0
"""How values are printed: JSON, YAML, and tables that are a pleasure to read.

A table on a terminal is as wide as that, in colour, and folds what does not fit; in a pipe it has
one row a line, nothing cut off and nothing coloured, so that grep and awk find what they look for.
This file must not know what a value means.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.text import Text

_MAX_FOLDED_ROWS: Final = 2000
"""A longer table is printed as into a pipe: nobody reads it on a screen, and it must be quick."""

_GAP: Final = 2

_JOINTS: Final = (re.compile(r"(?<=[/\s])"), re.compile(r"(?<=[-:.,])"))
"""Where a name or an address may be folded: between its great parts first, then the small ones."""


class Styled(NamedTuple):
    """A text with a style of rich's, which shows on a terminal only."""

    text: str
    style: str


Item = str | Styled
Cell = Item | Sequence[Item]
"""A sequence stands in one line each on a terminal, in one line with commas elsewhere."""


class Column(NamedTuple):
    """``rigid`` columns keep their width on a terminal that is too narrow; the others fold."""

    heading: str
    right: bool = False
    rigid: bool = False
    style: str = ""


# --- for programs --------------------------------------------------------------------------------


def print_json(value: object) -> None:
    """Indented; keys in the order of the struct or dict."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_yaml(value: object) -> None:
    import yaml

    # libyaml's own is ten times as fast, but not everywhere there.
    dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    yaml.dump(
        msgspec.to_builtins(value),
        sys.stdout,
        Dumper=dumper,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
    )


# --- for people ----------------------------------------------------------------------------------


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    if sys.stdout.isatty() and len(rows) <= _MAX_FOLDED_ROWS:
        _print_rich(columns, rows)
    else:
        _print_plain(columns, rows)


def print_line(*items: Item) -> None:
    """One line of several texts."""
    if sys.stdout.isatty():
        _console().print(_rich_text(items, ""), soft_wrap=True)
    else:
        print("".join(_text(item) for item in items))


def _print_plain(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    texts = [[_joined(cell) for cell in row] for row in rows]
    widths = [len(column.heading) for column in columns]
    for row in texts:
        widths = [max(width, len(text)) for width, text in zip(widths, row, strict=True)]
    for row in ([column.heading for column in columns], *texts):
        padded = (
            text.rjust(width) if column.right else text.ljust(width)
            for column, width, text in zip(columns, widths, row, strict=True)
        )
        print((" " * _GAP).join(padded).rstrip())


def _print_rich(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold dim", pad_edge=False)
    for column in columns:
        table.add_column(
            column.heading,
            justify="right" if column.right else "left",
            style=column.style,
            no_wrap=column.rigid,
        )
    for row in rows:
        table.add_row(
            *(
                _rich_text(_items(cell), "\n") if column.rigid else _Folding(_items(cell))
                for column, cell in zip(columns, row, strict=True)
            )
        )
    _console().print(table)


class _Folding:
    """Lines of rich that break where a name or an address has a joint."""

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        from rich.measure import Measurement

        texts = [_text(item) for item in self._items]
        parts = (
            part
            for text in texts
            for great in _JOINTS[0].split(text)
            for part in _JOINTS[1].split(great)
        )
        least = max(map(len, parts), default=0)
        most = max(map(len, texts), default=0)
        return Measurement(min(least, options.max_width), min(most, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for item in self._items:
            for line in fold(_text(item), options.max_width):
                yield _rich_text(
                    [item._replace(text=line) if isinstance(item, Styled) else line], ""
                )


def fold(text: str, width: int) -> list[str]:
    """Lines of at most ``width``, broken at joints; a part that is longer is broken anywhere."""
    lines = [""]
    for great in _JOINTS[0].split(text):
        for part in [great] if len(great.rstrip()) <= width else _JOINTS[1].split(great):
            if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
                lines.append("")
            lines[-1] += part
            while width and len(lines[-1].rstrip()) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)


def _items(cell: Cell) -> Sequence[Item]:
    return [cell] if isinstance(cell, str | Styled) else cell


def _text(item: Item) -> str:
    return item.text if isinstance(item, Styled) else item


def _joined(cell: Cell) -> str:
    return ", ".join(_text(item) for item in _items(cell))


def _rich_text(items: Sequence[Item], separator: str) -> Text:
    from rich.text import Text

    text = Text()
    for i, item in enumerate(items):
        if i:
            text.append(separator)
        text.append(_text(item), style=item.style if isinstance(item, Styled) else None)
    return text


# --- numbers -------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """Exact where it is short: ``90s``, ``3h``, ``1h 30m``."""
    whole = round(seconds)
    if abs(seconds) < 10 and seconds != whole:
        return f"{seconds:.1f}s"
    parts = []
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60), ("s", 1)):
        count, whole = divmod(whole, length)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2]) or "0s"


def size(count: int) -> str:
    """Bytes, as ``512 B``, ``20.0 KiB``, ``6.3 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
