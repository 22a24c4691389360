# SPDX-License-Identifier: Apache-2.0
"""``ebpflb status``: one page on this node, and what is wrong with it.

The kernel is asked what runs and what the maps hold; the agent, if one runs, is asked over HTTP how
it fares. Whatever does not answer is said, and hides nothing else. The members of the structs
below are the JSON keys. This file must not know how any of it is mended.
"""

from __future__ import annotations

import http.client
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from ebpflb import __version__
from ebpflb.cli import options, render
from ebpflb.cli.render import Cell, Column, Item, Styled
from ebpflb.datapath.ebpf import abi, inspect, listing
from ebpflb.datapath.ebpf.attach import Attachment
from ebpflb.datapath.ebpf.deviceprograms import roles_in
from ebpflb.datapath.ebpf.inspect import EVICTING, Holder, Inspector, MapFill
from ebpflb.datapath.ebpf.listing import PacketDevice, PacketHook
from ebpflb.datapath.ebpf.maps import DEFAULT_SIZES
from ebpflb.datapath.ebpf.rows import NodeAddressRow, Row, Service, SettingsRow
from ebpflb.errors import ConfigError
from ebpflb.model import FrontendKind

HTTP_TIMEOUT_S: Final = 2.0
_SHOWN: Final = 6
FULL: Final = 0.9
"""A map that is as full as this will soon refuse what comes next."""

_SYNCED = (
    "ebpflb_last_sync_timestamp_seconds",
    "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
)
_QUEUED = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds"
_HOOK_ORDER = tuple(abi.names_of("HOOK_").values())
_ATTACHED = "attached"
_BEST = {"ingress": "first", "egress": "last"}
_SEEN = {"sees_pods": "pods'", "sees_host": "uplinks'"}
_LOOPBACK = {"loopback4": "127.0.0.0/8", "loopback6": "::1"}


class Hook(msgspec.Struct, frozen=True):
    """What the kernel says of one hook. ``state`` is attached, or what is wrong with it."""

    hook: str
    program: str
    program_id: int
    state: str


class Agent(msgspec.Struct, frozen=True, kw_only=True):
    """The agent as it can be seen from here. None is what cannot be told.

    ``running``: somebody holds the pin folder's lock, or answers as the agent; ``process`` is the
    holder's id, None where this pid namespace does not show it. ``answers``: its
    metrics could be read. ``lag_seconds`` is for how long a change has waited for its sync, 0 when
    none waits. ``failures`` says for each service port that is not programmed why.
    """

    running: bool
    process: int | None = None
    answers: bool = False
    healthy: bool | None = None
    last_sync_age_seconds: float | None = None
    lag_seconds: float | None = None
    service_ports_failed: int | None = None
    objects_rejected: int | None = None
    failures: dict[str, str] = {}


class NodePorts(msgspec.Struct, frozen=True):
    """Where NodePorts answer: everybody at ``addresses``, the node's own processes at both."""

    addresses: list[str]
    loopback: list[str]


class PacketPath(msgspec.Struct, frozen=True):
    """``is_wanted``: the agent was not told to leave packets alone. ``state`` is of `settings`.

    ``devices`` is None where this is not the node's network namespace.
    """

    is_wanted: bool
    state: list[str]
    devices: list[PacketDevice] | None


class Status(msgspec.Struct, frozen=True):
    """All of it. ``problems`` make the exit code 1, ``warnings`` do not."""

    version: str
    mode: str
    node: str | None
    pin_path: str
    cgroup: str
    service_ports: int
    backends: int
    node_ports: NodePorts
    agent: Agent
    programs: list[Hook]
    packet_path: PacketPath
    maps: list[MapFill]
    counters: dict[str, int]
    problems: list[str]
    warnings: list[str]


@click.command()
@options.output("table", "json")
@options.pin_path
@options.cgroup
def status(*, output: str, pin_path: Path, cgroup: Path | None) -> None:
    """Show what runs on this node, how full the maps are, and what is wrong.

    Exits 1 if anything is: a hook that is not attached, a backend that was not its own, a map that
    is 90 % full, service ports that could not be programmed. That no agent runs is a warning only:
    the data path stays in force without it.
    """
    with inspect.opened(pin_path) as kernel:
        settings = kernel.settings()
        where = options.chosen_cgroup(cgroup, settings.options)
        found = _status(kernel, settings, pin_path, where)
    if output == "json":
        render.print_json(found)
    else:
        _print_page(found)
    if found.problems:
        raise click.exceptions.Exit(1)


def _status(kernel: Inspector, settings: SettingsRow, pin_path: Path, cgroup: Path) -> Status:
    attachment = inspect.attachment(pin_path, cgroup, settings.options)
    node = settings.options.get("hostname")
    services = [one.service for one in kernel.services()]
    programs = _hooks(attachment, kernel)
    maps = kernel.fill()
    counters = kernel.counters()
    node_ports = where_node_ports_answer(kernel.entries("node_addrs"), settings.flags)
    agent = ask_agent(inspect.holder(pin_path), settings.options)
    packet_path = _packet_path(kernel, settings)
    problems, warnings = judge(agent, programs, maps, counters)
    warnings += unanswered(node_ports, services)
    of_packets = judge_packets(packet_path)
    problems, warnings = problems + of_packets[0], warnings + of_packets[1]
    return Status(
        version=__version__,
        mode="ebpf",
        node=node if isinstance(node, str) else None,
        pin_path=str(pin_path),
        cgroup=str(cgroup),
        service_ports=len(services),
        backends=sum(len(one.backends) for one in services),
        node_ports=node_ports,
        agent=agent,
        programs=programs,
        packet_path=packet_path,
        maps=maps,
        counters=counters,
        problems=problems,
        warnings=warnings,
    )


def _hooks(attachment: Attachment, kernel: Inspector) -> list[Hook]:
    wrong = {one.where: one.actual for one in attachment.differences(kernel.map_ids())}
    return [
        Hook(
            hook=one.hook,
            program=one.prog_name,
            program_id=one.prog_id,
            state=wrong.get(f"hook {one.hook}", _ATTACHED),
        )
        for one in sorted(attachment.look(), key=lambda one: _HOOK_ORDER.index(one.hook))
    ]


def _packet_path(kernel: Inspector, settings: SettingsRow) -> PacketPath:
    left = settings.options
    found = None
    if not inspect.is_elsewhere(settings.host_netns):
        found = listing.attached(roles_in(kernel.map("devices")), kernel.map_ids())
    return PacketPath(
        is_wanted="devices" in left and (left["devices"] != [] or left.get("pod_devices") != []),
        state=settings.state,
        devices=found,
    )


def where_node_ports_answer(rows: Iterable[Row], flags: Sequence[str]) -> NodePorts:
    """``rows`` are those of `node_addrs`, ``flags`` the words of `settings`."""
    return NodePorts(
        addresses=[row.address for row in rows if isinstance(row, NodeAddressRow)],
        loopback=[network for flag, network in _LOOPBACK.items() if flag in flags],
    )


# --- what is wrong -------------------------------------------------------------------------------


def judge(
    agent: Agent,
    programs: Iterable[Hook],
    maps: Iterable[MapFill],
    counters: Mapping[str, int],
) -> tuple[list[str], list[str]]:
    """(problems, warnings), each a sentence that names its thing."""
    problems = [
        f"not translated at {' '.join(hooks)}: {state}" for state, hooks in _by_state(programs)
    ]
    if counters.get("foreign_backend"):
        problems.append(
            f"counter foreign_backend is {counters['foreign_backend']}, it must stay 0: so many "
            "connections were refused because the maps contradicted each other; please report this"
        )
    warnings = []
    for one in maps:
        if one.entries is None or not one.max_entries or one.entries < FULL * one.max_entries:
            continue
        if one.map in EVICTING and one.map not in DEFAULT_SIZES:
            continue  # full is how it always is
        fill = f"map {one.map}: {one.entries} of {one.max_entries} entries are used"
        more = f"run the agent with a greater --map-size {one.map}=N"
        if one.map in EVICTING:
            warnings.append(f"{fill}, and the oldest make room: {more}")
        else:
            problems.append(f"{fill}: {more}")
    if counters.get("udp_conn_full"):
        warnings.append(
            f"counter udp_conn_full is {counters['udp_conn_full']}: so many connected UDP sockets "
            "could not be indexed; run the agent with a greater --map-size udp_conn=N"
        )
    if counters.get("no_socket_memory"):
        warnings.append(
            f"counter no_socket_memory is {counters['no_socket_memory']}: so many sockets see "
            "the backend's address in place of the Service's"
        )
    of_agent = _of_agent(agent)
    return [*problems, *of_agent[0]], [*warnings, *of_agent[1]]


def judge_packets(path: PacketPath) -> tuple[list[str], list[str]]:
    """(problems, warnings) of the packet path."""
    if not path.is_wanted:
        return [], []
    if path.devices is None:
        return [], ["this is not the node's network namespace: its devices are not seen from here"]
    problems = [
        f"packets are not translated at {device.device} {hook.direction}: {hook.state}"
        for device in path.devices
        for hook in device.hooks
        if hook.state != _ATTACHED
    ]
    warnings = [
        f"at {device.device} {hook.direction} the program cannot be where it should: "
        f"{hook.possible}; around it run {', '.join([*hook.before, *hook.behind])}"
        for device in path.devices
        for hook in device.hooks
        if not hook.possible.startswith(_BEST[hook.direction])
    ]
    if not path.devices:
        warnings.append("no device has programs: packets from outside reach no Service")
    return problems, warnings


def unanswered(node_ports: NodePorts, services: Iterable[Service]) -> list[str]:
    """A warning where there are NodePorts and nobody can dial them."""
    if node_ports.addresses or node_ports.loopback:
        return []
    types = {frontend.type for one in services for frontend in one.frontends}
    if FrontendKind.NODE_PORT.value not in types:
        return []
    return ["NodePorts answer nowhere: --nodeport-addresses of the agent has none of this node's"]


def _by_state(programs: Iterable[Hook]) -> Iterable[tuple[str, list[str]]]:
    """The hooks that are not as they should be, those with one ailment together."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in programs:
        if one.state != _ATTACHED:
            found[one.state].append(one.hook)
    return found.items()


def _of_agent(agent: Agent) -> tuple[list[str], list[str]]:
    if not agent.running:
        return [], ["no agent runs: the data path stays in force, but follows no change"]
    if not agent.answers:
        return [], ["the agent does not answer at its metrics address; see its log"]
    problems = []
    warnings = []
    if agent.healthy is False:
        problems.append(
            "the agent is not healthy: a change has waited too long for its sync, or its source "
            "has ended; see its log"
        )
    if agent.last_sync_age_seconds is None:
        warnings.append("the agent has not synced yet: it waits for its source")
    if agent.failures:
        problems += [f"{name}: not programmed: {why}" for name, why in agent.failures.items()]
    elif agent.service_ports_failed:
        problems.append(
            f"service ports that could not be programmed: {agent.service_ports_failed}; "
            "the agent's log names them"
        )
    if agent.objects_rejected:
        warnings.append(
            f"objects that are not served, wholly or in part: {agent.objects_rejected}; "
            "the agent's log and ebpflb check name them"
        )
    return problems, warnings


# --- the agent -----------------------------------------------------------------------------------


def ask_agent(
    holder: Holder | None, left: Mapping[str, object], *, now_s: float | None = None
) -> Agent:
    """What the agent says of itself at the addresses that it ``left`` in `settings`."""
    process = holder.process if holder else None
    metrics = parse_metrics(_get(left.get("metrics_bind_address"), "/metrics"))
    if "ebpflb_build_info" not in metrics:  # nobody, or another program that has the port
        return Agent(running=holder is not None, process=process)
    # One that answers runs, also where its lock is not seen from this pid namespace.
    now = time.time() if now_s is None else now_s
    synced = max(metrics.get(name, 0.0) for name in _SYNCED)
    queued = metrics.get(_QUEUED, 0.0)
    health = _object(_get(left.get("healthz_bind_address"), "/healthz"))
    healthy = health.get("healthy")
    failures = _object(_get(left.get("metrics_bind_address"), "/failures"))
    return Agent(
        running=True,
        process=process,
        answers=True,
        healthy=healthy if isinstance(healthy, bool) else None,
        last_sync_age_seconds=round(max(0.0, now - synced), 3) if synced else None,
        lag_seconds=round(max(0.0, now - queued), 3) if queued > synced else 0.0,
        service_ports_failed=_whole(metrics.get("ebpflb_service_ports_failed")),
        objects_rejected=_whole(metrics.get("ebpflb_objects_rejected")),
        failures={str(name): str(why) for name, why in sorted(failures.items())},
    )


def parse_metrics(text: bytes) -> dict[str, float]:
    """The greatest value of each metric in Prometheus' text format, whatever its labels."""
    found: dict[str, float] = {}
    for line in text.decode(errors="replace").splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        try:
            value = float(line.rpartition(" ")[2])
        except ValueError:
            continue
        found[name] = max(value, found.get(name, value))
    return found


def _get(bind_address: object, path: str) -> bytes:
    """What is answered there, whatever the code; b"" where nobody does."""
    from ebpflb.config import parse_bind_address

    if not isinstance(bind_address, str) or not bind_address:
        return b""
    try:
        host, port = parse_bind_address("address", bind_address)
    except ConfigError:
        return b""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - not bound here
    connection = http.client.HTTPConnection(host, port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return b""
    finally:
        connection.close()


def _object(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


# --- the page ------------------------------------------------------------------------------------


def _print_page(found: Status) -> None:
    node = f" on {found.node}" if found.node else ""
    render.print_line(Styled(f"ebpflb {found.version}{node}: {found.mode} mode", "bold cyan"))
    for key, items in (
        ("pin path", [found.pin_path]),
        ("cgroup", [found.cgroup]),
        ("serving", [f"{found.service_ports} service ports, {found.backends} backends"]),
        ("node ports", [_answering(found.node_ports)]),
        ("agent", _agent_items(found.agent)),
    ):
        render.print_line(Styled(f"  {key:<11}", "dim"), *items)
    _heading("programs", "asked of the kernel")
    render.print_table(
        [
            Column("HOOK", rigid=True),
            Column("PROGRAM", rigid=True),
            Column("ID", right=True, rigid=True),
            Column("STATE"),
        ],
        [_hook_cells(one) for one in found.programs],
    )
    _print_packet_path(found.packet_path)
    _heading("maps")
    render.print_table(
        [
            Column("MAP", rigid=True),
            Column("USED", right=True, rigid=True),
            Column("ENTRIES", right=True, rigid=True),
            Column("FILL", right=True, rigid=True),
            Column("MEMORY", right=True, rigid=True),
        ],
        [*map(_map_cells, found.maps), _total(found.maps)],
    )
    _heading("counters", "since the maps were made")
    render.print_table(
        [Column("COUNTER", rigid=True), Column("COUNT", right=True, rigid=True)],
        [[name, str(count)] for name, count in found.counters.items()],
    )
    _heading("what is wrong")
    for text in found.problems:
        render.print_line(Styled("problem  ", "bold red"), text)
    for text in found.warnings:
        render.print_line(Styled("warning  ", "yellow"), text)
    if not found.problems and not found.warnings:
        render.print_line(Styled("nothing", "green"))


def _print_packet_path(path: PacketPath) -> None:
    _heading("packet path", "asked of the kernel")
    if not path.is_wanted and not path.devices:
        render.print_line(Styled("off", "dim"))
        return
    proved = " and ".join(word for flag, word in _SEEN.items() if flag in path.state)
    render.print_line(
        f"seen to run at the {proved} devices" if proved else Styled("not seen to run", "yellow")
    )
    render.print_table(
        [
            Column("DEVICE", rigid=True),
            Column("ROLE", rigid=True),
            Column("HOOK", rigid=True),
            Column("BY", rigid=True),
            Column("PROGRAM", rigid=True),
            Column("BEFORE"),
            Column("BEHIND"),
            Column("STATE"),
        ],
        [_packet_cells(device, hook) for device in path.devices or () for hook in device.hooks],
    )


def _packet_cells(device: PacketDevice, hook: PacketHook) -> Sequence[Cell]:
    return [
        device.device,
        device.role or "-",
        hook.direction,
        hook.way or "-",
        f"{hook.program} (id {hook.program_id})" if hook.program else "-",
        "; ".join(hook.before) or "-",
        "; ".join(hook.behind) or "-",
        Styled(hook.state, "green" if hook.state == _ATTACHED else "bold red"),
    ]


def _heading(text: str, more: str = "") -> None:
    render.print_line()
    render.print_line(Styled(text, "bold cyan"), Styled(f"  {more}" if more else "", "dim italic"))


def _answering(node_ports: NodePorts) -> Item:
    """Addresses may be many; all of them are in ``map dump node_addrs`` and in the JSON."""
    places = node_ports.addresses[:_SHOWN]
    more = len(node_ports.addresses) - len(places)
    at = f"at {', '.join(places)}{f' and {more} more' if more else ''}" if places else ""
    here = " and ".join(node_ports.loopback)
    texts = filter(None, (at, f"for the node itself at {here}" if here else ""))
    return "; ".join(texts) or Styled("answer nowhere", "yellow")


def _agent_items(agent: Agent) -> list[Item]:
    if not agent.running:
        return [Styled("no agent runs; the data path stays in force", "yellow")]
    name = f"process {agent.process}" if agent.process else "runs outside of this pid namespace"
    if not agent.answers:
        return [f"{name}, ", Styled("does not answer", "yellow")]
    items: list[Item] = [f"{name}, ", _health(agent.healthy)]
    if agent.last_sync_age_seconds is None:
        return [*items, ", not synced yet"]
    synced = f", last sync {render.duration(agent.last_sync_age_seconds)} ago"
    waits = f", a change waits for {render.duration(agent.lag_seconds or 0)}"
    return [*items, synced, waits if agent.lag_seconds else ", no change waits"]


def _health(healthy: bool | None) -> Item:  # noqa: FBT001 - shown, not acted on
    if healthy is None:
        return "health unknown"
    return Styled("healthy", "green") if healthy else Styled("not healthy", "bold red")


def _hook_cells(one: Hook) -> Sequence[Cell]:
    return [
        one.hook,
        one.program or "-",
        str(one.program_id or "-"),
        Styled(one.state, "green" if one.state == _ATTACHED else "bold red"),
    ]


def _map_cells(one: MapFill) -> Sequence[Cell]:
    fill: Item = "-"
    if one.entries is not None and one.max_entries:
        share = one.entries / one.max_entries
        percent = f"{100 * share:.0f} %"
        fill = Styled(percent, "bold red") if share >= FULL else percent
    return [
        one.map,
        "-" if one.entries is None else str(one.entries),
        str(one.max_entries or "-"),
        fill,
        render.size(one.bytes),
    ]


def _total(maps: Iterable[MapFill]) -> Sequence[Cell]:
    return ["all", "", "", "", Styled(render.size(sum(one.bytes for one in maps)), "bold")]
