# SPDX-License-Identifier: Apache-2.0
"""``ebpflb cleanup``: takes all that is ours off this node.

Links and the devices' programs go first, so that no program meets half of its maps. What is not
ours stays. This file must not know how it got there.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click

from ebpflb.cli import options, render
from ebpflb.cli.render import Styled
from ebpflb.datapath.ebpf import abi, inspect, libbpf
from ebpflb.datapath.ebpf.attach import EVERY_HOOK, Attachment
from ebpflb.datapath.ebpf.maps import LINKS, Map, PinFolder
from ebpflb.errors import DatapathError

_DETACH_TIMEOUT_S: Final = 2.0
_DETACH_POLL_S: Final = 0.01
_NAMED: Final = 5

_MAP_PIN = re.compile(r"[a-z][a-z0-9_]*-[0-9a-f]{12}")
"""``NAME-DIGEST``; other versions may have had maps that this one has not."""


class _Contents(NamedTuple):
    """What lies in a pin folder, in the order in which it is to go."""

    links: tuple[Path, ...]
    maps: tuple[Path, ...]
    foreign: tuple[Path, ...]


@click.command()
@options.pin_path
@options.cgroup
def cleanup(*, pin_path: Path, cgroup: Path | None) -> None:
    """Detach the programs, remove our rules from netfilter, and the maps and their folder.

    An agent must not be running. Afterwards Services are no longer translated on this node. How
    many open flows that cuts is said first. Where there is nothing to remove, that is said and is
    no error.
    """
    if not inspect.is_there(pin_path):
        if not _report_packets(_remove_packets()):
            render.print_line(f"Nothing to remove: {pin_path} does not exist.")
        return
    folder = PinFolder(pin_path)
    folder.require_bpffs()
    with folder.lock(lambda _holder: None, wait=False):
        contents = _look(pin_path)
        where = _cgroup(cgroup, pin_path)
        running = _running(pin_path, where) if where else {}
        _say_flows(pin_path)
        _remove(contents.links)
        packets = _remove_packets(pin_path)
        _remove(contents.maps)
        attached = _still_attached(running, where) if where and running else []
        if not contents.foreign:
            _remove_folders(pin_path)
    _report(pin_path, contents, packets)
    if attached:
        raise DatapathError(
            "detach",
            ", ".join(attached),
            hint="the link is removed, but the program still runs: another process holds the link",
        )
    if contents.foreign:
        raise DatapathError(
            "remove",
            str(pin_path),
            hint=f"not ours, and left alone: {_names(pin_path, contents.foreign)}; "
            "move it away and run cleanup again",
        )


def _look(pin_path: Path) -> _Contents:
    links: list[Path] = []
    maps: list[Path] = []
    foreign: list[Path] = []
    hooks = {hook.name for hook in EVERY_HOOK}
    for path in sorted(pin_path.iterdir()):
        if path.name == LINKS and path.is_dir():
            for inner in sorted(path.iterdir()):
                (links if inner.name in hooks else foreign).append(inner)
        elif _is_map_pin(path):
            maps.append(path)
        else:
            foreign.append(path)
    order = [hook.name for hook in reversed(EVERY_HOOK)]  # new connections first, replies last
    links.sort(key=lambda path: order.index(path.name))
    return _Contents(tuple(links), tuple(maps), tuple(foreign))


def _is_map_pin(path: Path) -> bool:
    if not _MAP_PIN.fullmatch(path.name) or path.is_dir():
        return False
    try:
        fd = libbpf.obj_get(str(path))
    except DatapathError as error:
        if error.errno == errno.EPERM:
            raise
        return False  # what libbpf cannot open, nobody of ours has made
    try:
        return libbpf.fd_kind(fd) == "bpf-map" or path.name.rpartition("-")[0] in abi.MAPS
    finally:
        os.close(fd)


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DatapathError("remove", str(path), error.errno or 0) from None


def _remove_folders(pin_path: Path) -> None:
    for folder in (pin_path / LINKS, pin_path):
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DatapathError("remove", str(folder), error.errno or 0) from None


# --- packets -------------------------------------------------------------------------------------


class _Packets(NamedTuple):
    """What was taken away of the packet path. ``elsewhere``: what there is cannot be seen."""

    hooks: tuple[str, ...]
    had_rules: bool
    elsewhere: bool = False


def _say_flows(pin_path: Path) -> None:
    try:
        with inspect.opened(pin_path) as kernel:
            flows = sum(_forward_halves(kernel.map(name)) for name in ("conntrack", "flows_new"))
    except DatapathError:
        return  # no whole set of maps, and so none that programs run on
    if flows:
        text = f"{flows} open flow{'' if flows == 1 else 's'} that only its packets' programs know"
        render.print_line(Styled("cuts      ", "bold yellow"), text)


def _forward_halves(table: Map) -> int:
    at = abi.LAYOUTS["flow"].offsets["kind"]
    return sum(1 for _, flow in table.items() if flow[at] == abi.CONSTANTS["FLOW_FORWARD"])


def _remove_packets(pin_path: Path | None = None) -> _Packets:
    """What is on this network namespace's devices and in its netfilter, whichever maps it uses."""
    from ebpflb.config import Config
    from ebpflb.datapath.ebpf import listing
    from ebpflb.datapath.ebpf.netfilter import Netfilter

    if pin_path is not None and _is_elsewhere(pin_path):
        return _Packets((), had_rules=False, elsewhere=True)
    hooks = listing.remove_all()
    bits = Config(node_name="")
    rules = Netfilter(mark=1 << bits.masquerade_bit, reject_mark=1 << bits.reject_bit)
    try:
        return _Packets(tuple(hooks), had_rules=rules.remove())
    finally:
        rules.close()


def _is_elsewhere(pin_path: Path) -> bool:
    try:
        with inspect.opened(pin_path) as kernel:
            return inspect.is_elsewhere(kernel.settings().host_netns)
    except DatapathError:
        return False


def _report_packets(found: _Packets) -> bool:
    """Returns whether there was anything to tell of."""
    if found.hooks:
        render.print_line(Styled("detached  ", "bold"), ", ".join(found.hooks))
    if found.had_rules:
        render.print_line(Styled("removed   ", "bold"), "our rules in netfilter")
    if found.elsewhere:
        click.echo(
            "Note: this is not the node's network namespace: programs on its devices and rules in "
            "its netfilter stay; run cleanup there too",
            err=True,
        )
    return bool(found.hooks or found.had_rules)


# --- what runs -----------------------------------------------------------------------------------


def _cgroup(told: Path | None, pin_path: Path) -> Path | None:
    """Where the programs are attached; None where this kernel has no cgroup v2."""
    try:
        with inspect.opened(pin_path) as kernel:
            left = kernel.settings().options
    except DatapathError:
        left = {}  # no whole set of maps: an agent that ended early, or a cleanup that did
    try:
        return options.chosen_cgroup(told, left)
    except DatapathError:
        if told is not None:
            raise
        return None


def _running(pin_path: Path, cgroup: Path) -> Mapping[str, int]:
    """The programs that our links run on this cgroup, by hook."""
    looked = Attachment(pin_path, cgroup).look()
    return {one.hook: one.prog_id for one in looked if one.prog_id and not one.problem}


def _still_attached(running: Mapping[str, int], cgroup: Path) -> list[str]:
    """Hooks at which those programs run on; the kernel takes a moment to let a link go."""
    fd = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until = time.monotonic() + _DETACH_TIMEOUT_S
        while True:
            left = [
                hook.name
                for hook in EVERY_HOOK
                if hook.name in running
                and running[hook.name] in libbpf.cgroup_programs(fd, hook.attach_type)[0]
            ]
            if not left or time.monotonic() > until:
                return left
            time.sleep(_DETACH_POLL_S)
    finally:
        os.close(fd)


# --- output --------------------------------------------------------------------------------------


def _report(pin_path: Path, contents: _Contents, packets: _Packets) -> None:
    if not contents.links and not contents.maps:
        _report_packets(packets)
        render.print_line(f"Removed the empty folder {pin_path}.")
        return
    if contents.links:
        render.print_line(
            Styled("detached  ", "bold"), " ".join(path.name for path in contents.links)
        )
    _report_packets(packets)
    if contents.maps:
        names = " ".join(path.name.rpartition("-")[0] for path in contents.maps)
        render.print_line(Styled("removed   ", "bold"), names)
    if not contents.foreign:
        render.print_line(Styled("removed   ", "bold"), str(pin_path))
    if contents.links or packets.hooks:
        render.print_line(
            "Services are no longer translated on this node: new connections to them fail unless "
            "something else, as kube-proxy, serves them. TCP connections and connected UDP sockets "
            "of this node and its pods go on where they were translated at the socket; unconnected "
            "UDP sockets reach no Service any more."
        )


def _names(pin_path: Path, paths: Sequence[Path]) -> str:
    names = [str(path.relative_to(pin_path)) for path in paths]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
