# SPDX-License-Identifier: Apache-2.0
"""``ebpflb check``: what the source says against what the kernel does; every difference.

Plans with the agent's own planner and compares with the agent's own audit, but repairs nothing.
The agent may be at work meanwhile, so only what differs at several looks in a row counts. This
file must not know what a plan or a map looks like.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from ebpflb.cli import options, render
from ebpflb.cli.render import Cell, Column, Styled
from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import audit, inspect
from ebpflb.datapath.ebpf.attach import Attachment
from ebpflb.datapath.ebpf.inspect import Inspector
from ebpflb.errors import ConfigError, DatapathError
from ebpflb.model import Address, Event, LocalAddresses, Plan, Rejected

if TYPE_CHECKING:
    from ebpflb.planner.options import PlannerOptions

LOOKS: Final = 4
LOOK_INTERVAL_S: Final = 0.5
"""A sync and the grace period behind it are over long before the last look."""

Reader = Callable[[Callable[..., None]], list[Event]]
"""Reads the source once; what there is to say goes to the function given."""

Local = Callable[[], frozenset[Address]]
"""Reads the addresses of this node's interfaces."""


class Truth(msgspec.Struct, frozen=True):
    """What the source says: the plan of it, and what of it is not served."""

    plan: Plan
    rejected: tuple[Rejected, ...]


@click.command()
@click.option(
    "--manifests",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="The source of truth: a folder of YAML or JSON files.  [default: the agent's source]",
)
@click.option(
    "--kubeconfig",
    metavar="FILE",
    help="The source of truth: the API server that this file names.  [default: the agent's source]",
)
@click.option("--master", metavar="URL", help="The API server, whatever the kubeconfig says.")
@click.option(
    "--hostname-override",
    metavar="NAME",
    help="The name of this node.  [default: as the agent was told, or the host's name]",
)
@options.output("table", "json")
@options.pin_path
@options.cgroup
def check(
    *,
    manifests: Path | None,
    kubeconfig: str | None,
    master: str | None,
    hostname_override: str | None,
    output: str,
    pin_path: Path,
    cgroup: Path | None,
) -> None:
    """Compare what this node should do with what its maps and hooks do.

    Prints every difference and exits 1 if there is one. Changes nothing. What is not told is taken
    from what the agent left in the maps. A difference that goes away within two seconds is a sync
    that was under way, and is not one.
    """
    with inspect.opened(pin_path) as kernel:
        settings = kernel.settings()
        left = settings.options
        notes = _Notes()
        settled = planner_options(_node(hostname_override, left), left, notes)
        read = _reader(_chosen(manifests, kubeconfig, master, left), settled.node_name)
        local = _local(kernel, settings.host_netns, notes)
        attachment = inspect.attachment(pin_path, options.chosen_cgroup(cgroup, left), left)
        truth = load_truth(read, settled, local, notes)
        found = lasting(
            _differences(truth.plan, kernel, attachment),
            lambda: _differences(
                load_truth(read, settled, local, _silent).plan, kernel, attachment
            ),
        )
    notes.say(truth.rejected)
    if output == "json":
        render.print_json(found)
    elif found:
        _print_table(found)
    else:
        _print_agreement(truth.plan)
    if found:
        raise click.exceptions.Exit(1)


def _chosen(
    manifests: Path | None,
    kubeconfig: str | None,
    master: str | None,
    left: Mapping[str, object],
) -> Path | tuple[str, str]:
    """A folder, or the kubeconfig and the URL of an API server, as told or as the agent was."""
    if manifests is not None:
        return manifests
    if kubeconfig or master:
        return kubeconfig or "", master or ""
    if folder := left.get("manifests"):
        return Path(str(folder))
    if "kubeconfig" in left:
        return str(left["kubeconfig"]), str(left.get("master") or "")
    raise ConfigError(
        "--manifests, --kubeconfig: nothing to compare with: no source is given, and no agent has "
        "left word of its own in the maps"
    )


def _reader(source: Path | tuple[str, str], node: str) -> Reader:
    if isinstance(source, Path):
        from ebpflb.sources import manifests

        return lambda notice: manifests.load(source, notice)
    from ebpflb.sources import cluster
    from ebpflb.sources.transport import Credentials, Where, load_access

    where = Where(kubeconfig=source[0], master=source[1])
    credentials = Credentials(lambda: load_access(where))
    return lambda _notice: cluster.load(credentials, node_name=node)


def _node(told: str | None, left: Mapping[str, object]) -> str:
    from ebpflb.config import node_name

    known = left.get("hostname")
    if told is None and isinstance(known, str) and known:
        return known
    return node_name(told)


def planner_options(
    node: str, left: Mapping[str, object], notice: Callable[..., None]
) -> PlannerOptions:
    """What the agent plans by, as it left it, but for this node's name."""
    from ebpflb.planner.options import PlannerOptions

    try:
        return msgspec.structs.replace(
            msgspec.convert(left.get("planner"), PlannerOptions), node_name=node
        )
    except msgspec.ValidationError:
        notice("planned by kube-proxy's defaults: no agent has left word of its settings")
        return PlannerOptions(node_name=node)


def _local(kernel: Inspector, host_netns: int, notice: Callable[..., None]) -> Local:
    """In another network namespace than the node's its addresses are those that the map knows."""
    from ebpflb.node import local_addresses

    if inspect.is_elsewhere(host_netns):
        notice(
            "this is not the node's network namespace: addresses at which NodePorts should answer "
            "and do not, and the programs of its devices, are not seen from here"
        )
        return lambda: frozenset(kernel.snapshot.node_addrs)

    def read() -> frozenset[Address]:
        try:
            return local_addresses()
        except OSError as error:
            raise DatapathError("read", "this node's addresses", error.errno or 0) from None

    return read


def load_truth(
    read: Reader, settled: PlannerOptions, local: Local, notice: Callable[..., None]
) -> Truth:
    """Read the source once and plan it. Raises ConfigError or SourceError where that fails."""
    from ebpflb.planner.plan import Planner

    planner = Planner(settled)
    planner.apply(LocalAddresses(local()))
    for event in read(notice):
        planner.apply(event)
    return Truth(planner.update().plan, planner.rejected)


def _differences(plan: Plan, kernel: Inspector, attachment: Attachment) -> list[Difference]:
    found = audit.differences(plan, kernel.fresh_snapshot())
    found += attachment.differences(kernel.map_ids())
    return [*found, *_of_packets(plan, kernel)]


def _of_packets(plan: Plan, kernel: Inspector) -> Iterator[Difference]:
    """Where an agent has left word of a packet path, and this is the node's network namespace."""
    from ebpflb.datapath.ebpf import listing

    settings = kernel.settings()
    if "devices" in settings.options and not inspect.is_elsewhere(settings.host_netns):
        yield from listing.differences(
            plan, settings.options, kernel.map("devices"), kernel.map_ids()
        )


def lasting(
    found: Sequence[Difference],
    look_again: Callable[[], Iterable[Difference]],
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Difference]:
    """What of ``found`` is there at every other look too; sorted."""
    for _ in range(LOOKS - 1):
        if not found:
            break
        sleep(LOOK_INTERVAL_S)
        again = set(look_again())
        found = [one for one in found if one in again]
    return sorted(found)


# --- output --------------------------------------------------------------------------------------


def _silent(_event: str, /, **_fields: object) -> None:
    """What a second reading of the source has to say was said by the first."""


class _Notes:
    """What the source could not read, told once and on standard error."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, event: str, /, **fields: object) -> None:
        if event == "manifest_unreadable":
            self._lines.append(
                f"{fields.get('file')}, line {fields.get('line')}: {fields.get('reason')}; "
                "what it says counts for nothing here"
            )
            return
        facts = ", ".join(f"{key} {value}" for key, value in fields.items() if value)
        self._lines.append(event.replace("_", " ") + (f": {facts}" if facts else ""))

    def say(self, rejected: tuple[Rejected, ...]) -> None:
        for line in self._lines:
            click.echo(f"Note: {line}", err=True)
        for one in rejected:
            click.echo(f"Note: not served: {one.key}: {one.reason}", err=True)


def _print_table(found: list[Difference]) -> None:
    columns = [
        Column("SERVICE", style="bold"),
        Column("WHERE", rigid=True),
        Column("WHAT"),
        Column("EXPECTED"),
        Column("ACTUAL"),
    ]
    rows: list[list[Cell]] = [
        [
            one.service or "-",
            one.where,
            one.what,
            Styled(one.expected, "green") if one.expected else "-",
            Styled(one.actual, "red") if one.actual else "-",
        ]
        for one in found
    ]
    render.print_table(columns, rows)
    click.echo(f"{len(found)} {'difference' if len(found) == 1 else 'differences'}.", err=True)


def _print_agreement(plan: Plan) -> None:
    ports = {(str(name), name.protocol) for name in plan.ports}
    backends = {
        (str(name), name.protocol, backend.address, backend.port)
        for name, planned in plan.ports.items()
        for backend in (*planned.cluster.backends, *planned.local.backends, *planned.draining)
    }
    render.print_line(
        f"no difference: {len(ports)} service port{'' if len(ports) == 1 else 's'}, "
        f"{len(backends)} backend{'' if len(backends) == 1 else 's'}"
    )
