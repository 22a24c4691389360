# SPDX-License-Identifier: Apache-2.0
"""The options that several commands share, so that each is spelt and explained once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from ebpflb.config import DEFAULT_PIN_PATH

_Command = TypeVar("_Command", bound=Callable[..., Any])

# Nothing is looked at here: what is wrong with a folder is for the command to say, with its code.
_FOLDER = click.Path(readable=False, path_type=Path)


class ServiceName(NamedTuple):
    """A Service as ``--service`` names it; it stands for all of its ports."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def has(self, printed: str | None) -> bool:
        """Whether ``ns/name`` or ``ns/name:port`` is one of its ports."""
        return printed is not None and printed.partition(":")[0] == str(self)


def _parse_service(
    _ctx: click.Context, _param: click.Parameter, text: str | None
) -> ServiceName | None:
    if text is None:
        return None
    namespace, slash, name = text.partition("/")
    if ":" in name:
        raise click.BadParameter(f"{text!r} names one port; give NS/NAME for all of its ports")
    if not slash or not namespace or not name or "/" in name:
        raise click.BadParameter(f"{text!r} is not of the form NS/NAME")
    return ServiceName(namespace, name)


def pin_path(command: _Command) -> _Command:
    return click.option(
        "--pin-path",
        type=_FOLDER,
        default=DEFAULT_PIN_PATH,
        show_default=True,
        metavar="DIR",
        help="Where the maps and links are pinned.",
    )(command)


def cgroup(command: _Command) -> _Command:
    return click.option(
        "--cgroup",
        type=_FOLDER,
        metavar="DIR",
        help="Where the programs are attached.  [default: as the agent was told, or the root of "
        "cgroup v2]",
    )(command)


def output(*formats: str) -> Callable[[_Command], _Command]:
    """``-o``, given to the command as ``output``; the first of ``formats`` is the default."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help="How to print it.",
    )


def service(command: _Command) -> _Command:
    return click.option(
        "--service",
        metavar="NS/NAME",
        callback=_parse_service,
        help="Only what belongs to this Service, all of its ports.",
    )(command)


def chosen_cgroup(told: Path | None, left: Mapping[str, object]) -> Path:
    """``--cgroup``, else what the agent left in `settings`, else the root of cgroup v2.

    Raises DatapathError (fatal) where there is none, or where the one told is none.
    """
    from ebpflb.datapath.ebpf.attach import cgroup2_root, require_cgroup2

    if told is not None:
        require_cgroup2(told)
        return told
    known = left.get("cgroup")
    return Path(known) if isinstance(known, str) and known else cgroup2_root()
