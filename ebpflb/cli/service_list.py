# SPDX-License-Identifier: Apache-2.0
"""``ebpflb service list``: what clients dial and where it goes, as the kernel has it.

No agent is asked and none is needed. This file must not know what the cluster's truth is.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ebpflb.cli import options, render
from ebpflb.cli.render import Cell, Column, Item, Styled
from ebpflb.datapath.ebpf import inspect
from ebpflb.datapath.ebpf.rows import ListedService, ServiceBackend, ServiceFrontend
from ebpflb.model import FrontendKind

_SHOWN = 3
"""Frontends or backends of a service port in the narrow table."""


@click.group("service", short_help="Services as the kernel has them")
def service_group() -> None:
    """Services as the kernel has them."""


@service_group.command("list", short_help="Frontends, backends and connections.")
@options.output("table", "wide", "json", "yaml")
@options.pin_path
def list_services(*, output: str, pin_path: Path) -> None:
    """Print each service port's frontends, backends and connections as the kernel has them.

    The kernel keeps the IPv4 and the IPv6 part of a service port apart; here they are one entry:
    frontends and backends of both, their connections added up, and the id of the IPv4 part where
    there is one. Backends are those to which somebody's new connections are led, and those that
    terminate and serve open ones only. With -o wide a backend that is not for everybody says for
    whom: ClusterIP (who dials that), inside (this node and its pods, dialling another frontend) or
    outside.
    """
    with inspect.opened(pin_path) as kernel:
        found = kernel.services()
    if output == "json":
        render.print_json([one.service for one in found])
    elif output == "yaml":
        render.print_yaml([one.service for one in found])
    elif not found:
        click.echo("No service port is programmed.", err=True)
    else:
        _print_table(found, wide=output == "wide")


def _print_table(found: Sequence[ListedService], *, wide: bool) -> None:
    columns = [
        Column("SERVICE", style="bold"),
        Column("PROTO", rigid=True),
        Column("AFFINITY", right=True, rigid=True),
        Column("CONNS", right=True, rigid=True),
        Column("FRONTENDS"),
        Column("BACKENDS"),
    ]
    if wide:
        columns[1:1] = [Column("ID", right=True, rigid=True), Column("POLICY")]
    render.print_table(columns, [_cells(one, wide=wide) for one in found])


def _cells(one: ListedService, *, wide: bool) -> list[Cell]:
    service = one.service
    frontends: list[Item] = [
        _frontend(frontend, mark if wide else "")
        for frontend, mark in zip(service.frontends, one.frontend_marks, strict=True)
    ]
    backends = _every_backend(one) if wide else _some_backends(service.backends)
    notes = [Styled(note, "yellow") for note in one.notes]
    cells: list[Cell] = [
        service.service or Styled("(no name)", "red"),
        service.protocol,
        render.duration(service.affinity_seconds) if service.affinity_seconds else "-",
        str(service.connections),
        frontends if wide else _elided(frontends),
        [*notes, *backends],
    ]
    if wide:
        policy = f"{service.internal_policy}/{service.external_policy}"
        cells[1:1] = [str(service.id), policy]
    return cells


def _every_backend(one: ListedService) -> list[Item]:
    return [
        _backend(backend, (" local" if backend.local else "") + (f" ({mark})" if mark else ""))
        for backend, mark in zip(one.service.backends, one.backend_marks, strict=True)
    ]


def _some_backends(backends: Sequence[ServiceBackend]) -> list[Item]:
    """The first ones, and how many more; those that are terminating are counted apart."""
    ready = [_backend(one) for one in backends if one.state == "ready"]
    ending = [_backend(one) for one in backends if one.state != "ready"]
    if len(backends) <= _SHOWN:
        return [*ready, *ending]
    return [*_elided(ready), *([Styled(f"{len(ending)} terminating", "yellow")] if ending else [])]


def _elided(items: Sequence[Item]) -> list[Item]:
    more = len(items) - _SHOWN
    return [*items[:_SHOWN], Styled(f"+{more}", "dim")] if more > 0 else list(items)


def _backend(backend: ServiceBackend, more: str = "") -> Item:
    text = _endpoint(backend.address, backend.port)
    if backend.state == "ready":
        return Styled(f"{text}{more}", "green")
    return Styled(f"{text} terminating{more}", "yellow")


def _frontend(frontend: ServiceFrontend, mark: str) -> Item:
    """The type of most frontends, ClusterIP, goes without saying."""
    text = _endpoint(frontend.address, frontend.port)
    if frontend.type != FrontendKind.CLUSTER_IP.value:
        text += f" {frontend.type}"
    return f"{text} ({mark})" if mark else text


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
