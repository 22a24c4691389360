# SPDX-License-Identifier: Apache-2.0
"""``ebpflb map dump``: the kernel's maps as they are, with names in place of numbers.

No agent is asked and none is needed. This file must not know what the maps should hold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ebpflb.cli import options, render
from ebpflb.cli.render import Cell, Column, Styled
from ebpflb.datapath.ebpf import abi, inspect
from ebpflb.datapath.ebpf.flowrows import FORWARD_HALF, REVERSE_HALF, FlowRow
from ebpflb.datapath.ebpf.inspect import DUMPABLE, NOT_LISTABLE, OF_SERVICES, Inspector
from ebpflb.datapath.ebpf.rows import PortRow, Row, SettingsRow
from ebpflb.errors import DatapathError

_QUESTION = re.compile(r"/\* (.*?) \*/\n(?:MAP\(\"\w+\", |SOCKET_STORAGE\()(\w+),")

_RIGHT = frozenset(
    {
        *("slot", "index", "port", "source_port", "target_port", "datagram", "id"),
        *("connections", "count", "age_seconds", "socket", "netns", "draining"),
    }
)
_FOLDING = frozenset(
    {"service", "address", "network", "name", "client", "source", "target", "options"}
)


@click.group("map", short_help="the kernel's maps")
def map_group() -> None:
    """The kernel's maps as they are."""


def _known_maps(
    _ctx: click.Context, _param: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    for name in names:
        if name not in abi.MAPS:
            raise click.BadParameter(f"no map {name!r}; there are {', '.join(DUMPABLE)}")
    return tuple(dict.fromkeys(names))


@map_group.command(
    "dump",
    short_help="The entries of the maps, names resolved.",
    epilog=f"Maps: {', '.join(DUMPABLE)}. "
    f"What is in {' and '.join(NOT_LISTABLE)} lies in the sockets themselves, and the kernel lets "
    "nobody list it: naming one of them ends with exit code 3.",
)
@click.argument("maps", metavar="[MAP]...", nargs=-1, callback=_known_maps)
@options.service
@options.output("table", "json", "yaml")
@options.pin_path
def dump(
    *, maps: tuple[str, ...], service: options.ServiceName | None, output: str, pin_path: Path
) -> None:
    """Print the entries of the kernel's maps, names resolved; no agent need run.

    Without MAP, every map. As JSON or YAML: one object, a list of flat objects under each map's
    name, in stable order.
    """
    _refuse_socket_storage(maps)
    chosen = maps or (OF_SERVICES if service else DUMPABLE)
    if service:
        for name in chosen:
            if name not in OF_SERVICES:
                raise click.UsageError(
                    f"the entries of map {name!r} belong to no Service; leave out --service"
                )
    with inspect.opened(pin_path) as kernel:
        if service and not any(service.has(name) for name in kernel.names.values()):
            raise DatapathError("find", f"Service {service}", hint="the maps know no such Service")
        found = {name: _rows(kernel, name, service) for name in chosen}
        if output == "json":
            render.print_json(found)
        elif output == "yaml":
            render.print_yaml(found)
        else:
            _print_tables(kernel, found, service)


def _refuse_socket_storage(maps: Sequence[str]) -> None:
    for name in maps:
        if name in NOT_LISTABLE:
            raise DatapathError(
                "list map",
                name,
                hint="its entries lie in the sockets themselves and the kernel lets nobody list "
                "them; connected UDP sockets are in the map udp_conn",
                fatal=True,
            )


def _rows(kernel: Inspector, name: str, service: options.ServiceName | None) -> Sequence[Row]:
    rows = kernel.entries(name)
    if service is None:
        return rows
    return [row for row in rows if service.has(getattr(row, "service", None))]


# --- tables --------------------------------------------------------------------------------------


def _print_tables(
    kernel: Inspector,
    found: Mapping[str, Sequence[Row]],
    service: options.ServiceName | None,
) -> None:
    questions = {
        name: text for text, name in _QUESTION.findall(abi.SOURCES.joinpath("maps.h").read_text())
    }
    for number, (name, rows) in enumerate(found.items()):
        if number:
            render.print_line()
        limit = "" if service else f"of {kernel.max_entries(name)} "
        render.print_line(Styled(name, "bold cyan"), f"  {_how_many(rows, limit)}")
        render.print_line(Styled(questions.get(name, ""), "dim italic"))
        if rows:
            _print_rows(rows)
        if name == "backends" and service is None and (others := kernel.left_over_backends()):
            render.print_line(Styled(f"and {others} left-over slots in no range", "dim"))


def _how_many(rows: Sequence[Row], limit: str) -> str:
    """``limit``: "of so many ", where all entries are shown."""
    flows = [row for row in rows if type(row) is FlowRow]
    count = sum(len(row.halves) for row in flows) if flows else len(rows)
    entries = f"{count} {limit}{'entry' if count == 1 and not limit else 'entries'}"
    return f"{len(flows)} {'flow' if len(flows) == 1 else 'flows'}, {entries}" if flows else entries


def _print_rows(rows: Sequence[Row]) -> None:
    first = rows[0]
    if isinstance(first, SettingsRow):
        _print_settings(first)
        return
    if isinstance(first, PortRow):
        columns, cells = _PORT_COLUMNS, [_port_cells(row) for row in rows if type(row) is PortRow]
    elif isinstance(first, FlowRow):
        columns, cells = _FLOW_COLUMNS, [_flow_cells(row) for row in rows if type(row) is FlowRow]
    else:
        keys = type(first).__struct_fields__
        columns = [
            Column(_heading(key), right=key in _RIGHT, rigid=key not in _FOLDING) for key in keys
        ]
        cells = [[_cell(key, getattr(row, key)) for key in keys] for row in rows]
    render.print_table(columns, cells)


def _heading(key: str) -> str:
    return {"protocol": "PROTO", "age_seconds": "AGE"}.get(key, key.upper())


def _cell(key: str, value: Any) -> Cell:
    if value is None or value == []:
        return "-"
    if isinstance(value, list):
        return Styled(",".join(value), "red") if "foreign" in value else ",".join(value)
    if key == "age_seconds":
        return render.duration(value)
    return str(value)


_PORT_COLUMNS = [
    Column("SLOT", right=True, rigid=True),
    Column("ID", right=True, rigid=True),
    Column("PROTO", rigid=True),
    Column("FAMILY", rigid=True),
    Column("CLUSTER"),
    Column("LOCAL"),
    Column("FLAGS"),
    Column("AFFINITY", right=True, rigid=True),
    Column("SERVICE"),
]


def _port_cells(row: PortRow) -> list[Cell]:
    cluster = _range(row.cluster_base, row.cluster_count, row.cluster_flags)
    return [
        str(row.slot),
        str(row.id),
        row.protocol,
        row.family,
        f"{cluster} +{row.draining} draining" if row.draining else cluster,
        _range(row.local_base, row.local_count, row.local_flags),
        ",".join(row.flags) or "-",
        render.duration(row.affinity_seconds) if row.affinity_seconds else "-",
        row.service or "-",
    ]


def _range(base: int, count: int, flags: Sequence[str]) -> str:
    """Which slots of `backends`, and what else the word says."""
    slots = "" if not count else str(base) if count == 1 else f"{base}-{base + count - 1}"
    return " ".join(filter(None, (slots, *flags))) or "-"


_FLOW_COLUMNS = [
    Column("PROTO", rigid=True),
    Column("CLIENT"),
    Column("FRONTEND"),
    Column("BACKEND"),
    Column("STATE", rigid=True),
    Column("IDLE", right=True, rigid=True),
    Column("AGE", right=True, rigid=True),
    Column("FLAGS"),
    Column("SERVICE"),
]


def _flow_cells(row: FlowRow) -> list[Cell]:
    client = _endpoint(row.client, row.client_port)
    if row.port_at_backend not in {None, row.client_port}:
        client += f" (as {row.port_at_backend})"
    backend = "-"
    missing: list[str] = []
    if row.backend is not None and row.backend_port is not None:
        backend = _endpoint(row.backend, row.backend_port)
        missing = [f"no {half}" for half in (FORWARD_HALF, REVERSE_HALF) if half not in row.halves]
    return [
        row.protocol,
        client,
        _endpoint(row.frontend, row.frontend_port),
        backend,
        row.state,
        render.duration(row.idle_seconds),
        render.duration(row.age_seconds),
        ",".join((*row.flags, *missing)) or "-",
        row.service or "-",
    ]


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _print_settings(row: SettingsRow) -> None:
    values: list[tuple[str, Cell]] = [
        (key, _cell(key, getattr(row, key))) for key in row.__struct_fields__ if key != "options"
    ]
    values += [(f"options.{key}", str(value)) for key, value in row.options.items()]
    render.print_table([Column("SETTING", rigid=True), Column("VALUE")], values)
