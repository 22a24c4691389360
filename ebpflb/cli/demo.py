# SPDX-License-Identifier: Apache-2.0
"""``ebpflb demo``: tells the story of the demo's cluster as it happens."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from ebpflb.demo import Cluster

CONNECTS = 300
DATAGRAMS = 200

_PICTURE = """\
   node n1, {n1}, with the agent      node n2, {n2}      outside
   ├─ client-a  {a:<12}                  └─ web-3  {w3}       laptop  {x}
   ├─ client-b  {b:<12}
   ├─ web-1     {w1:<12}
   ├─ web-2     {w2:<12}
   └─ vm-pod    {vm:<12} (in a virtual machine: the node never sees its sockets)

   demo/web     {web} and {web6}, port 80, NodePort {node_port}
   demo/sticky  {sticky}, port 80, ClientIP affinity
   demo/dns     {dns}, port 53, UDP
   demo/empty   {empty}, port 80, no endpoints"""


@click.command(
    short_help="a small cluster of network namespaces on this machine, and the agent in it"
)
@click.option(
    "--keep", is_flag=True, help="At the end leave it running until Enter, to look around in it."
)
def demo(*, keep: bool) -> None:
    """Build two nodes out of network namespaces, run the agent, send traffic, show the maps.

    Needs root. Takes about ten seconds; everything is taken down again, also when it is killed.
    """
    from rich.console import Console

    from ebpflb.demo import cluster
    from ebpflb.errors import ConfigError
    from ebpflb.lab import LabError

    if os.geteuid() != 0:
        raise ConfigError(
            "demo: it makes network namespaces and loads BPF programs: run it as root"
        )
    console = Console(highlight=False, soft_wrap=True)
    tell = _Teller(console)
    try:
        with cluster() as running:
            failed = _story(running, console, tell)
            if keep:
                _look_around(running, console)
    except (LabError, RuntimeError) as error:
        raise click.ClickException(str(error)) from None
    console.print("Everything is taken down: no namespace, cgroup, pin or process is left.")
    if failed:
        raise click.ClickException(f"{failed} connects failed that should not have")


class _Teller:
    """Numbers the steps."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = 0

    def __call__(self, title: str) -> None:
        self._step += 1
        self._console.print(f"\n[bold]{self._step}. {title}[/bold]")


def _story(running: Cluster, console: Console, tell: Callable[[str], None]) -> int:
    """Everything, in order; returns how many connects failed that should not have."""
    _show_cluster(running, console, tell)
    failed = _dial(running, console, tell) + _change(running, console, tell)
    if not _show_kernel(running, console, tell):
        raise RuntimeError("a command found what it should not have")
    return failed


def _show_cluster(running: Cluster, console: Console, tell: Callable[[str], None]) -> None:
    from ebpflb.demo import DNS, EMPTY, NODE_PORT, STICKY, WEB, WEB6

    tell("A cluster out of network namespaces")
    pods = zip(
        ("a", "b", "w1", "w2", "w3", "vm"),
        (*running.clients, *running.backends, running.sandboxed),
        strict=True,
    )
    hosts = {
        "n1": running.node.ipv4,
        "n2": running.backends[2].node.ipv4,
        "x": running.outside.ipv4,
    }
    addresses = {"web": WEB, "web6": WEB6, "sticky": STICKY, "dns": DNS, "empty": EMPTY}
    texts = {key: pod.ipv4 for key, pod in pods} | hosts | addresses
    console.print(_PICTURE.format(node_port=NODE_PORT, **texts))

    tell("The agent starts: it makes the maps, fills them, and attaches the programs")
    running.start_agent()
    console.print(_indent(running.log.read_text()), style="dim", markup=False)


def _dial(running: Cluster, console: Console, tell: Callable[[str], None]) -> int:
    from ebpflb.demo import DNS, EMPTY, NODE_PORT, STICKY, WEB, WEB6

    client = running.clients[0]
    tell(f"{client.name} connects {CONNECTS} times to {WEB}:80 (demo/web)")
    web = client.tcp(WEB, 80, count=CONNECTS)
    _bars(console, web.backends)
    console.print(
        f"   failed: {web.failed}; the backends saw {', '.join(web.seen_as)}, the pod's own address"
    )
    web6 = client.tcp(WEB6, 80, count=CONNECTS)
    console.print(f"   the same over IPv6, {WEB6} port 80:")
    _bars(console, web6.backends)

    node = running.node
    tell(f"NodePort {NODE_PORT} of demo/web: {client.name} dials the node, the node its loopback")
    ported = [
        client.tcp(node.ipv4, NODE_PORT, count=50),
        node.tcp("127.0.0.1", NODE_PORT, count=50),
    ]
    for dialled, outcome in zip((node.ipv4, "127.0.0.1"), ported, strict=True):
        console.print(f"   {dialled:<13} {_counts(outcome.backends)}")

    outside, sandboxed = running.outside, running.sandboxed
    tell(
        f"Packets: {outside.name} dials the node from outside, and {sandboxed.name} dials {WEB}:80"
    )
    translated = [
        outside.tcp(node.ipv4, NODE_PORT, count=50),
        sandboxed.tcp(WEB, 80, count=50),
    ]
    for who, outcome in zip((outside, sandboxed), translated, strict=True):
        console.print(
            f"   {who.name:<8} {_counts(outcome.backends)}; "
            f"the backends saw {', '.join(outcome.seen_as)}"
        )

    tell(f"ClientIP affinity: both clients connect 50 times to {STICKY}:80 (demo/sticky)")
    sticky = [each.tcp(STICKY, 80, count=50) for each in running.clients]
    for each, outcome in zip(running.clients, sticky, strict=True):
        console.print(f"   {each.name} stays with {_counts(outcome.backends)}")

    tell(f"UDP: {client.name} sends {DATAGRAMS} datagrams to {DNS}:53 (demo/dns)")
    one = client.udp(DNS, 53, count=DATAGRAMS)
    many = client.udp(DNS, 53, count=DATAGRAMS, sockets=20)
    console.print(
        f"   one socket keeps its backend: {_counts(one.backends)}; "
        f"recvfrom() says {', '.join(one.sources)}"
    )
    console.print(f"   20 sockets spread: {_counts(many.backends)}")

    tell(f"No endpoints: {client.name} connects to {EMPTY}:80 (demo/empty)")
    empty = client.tcp(EMPTY, 80, count=3)
    console.print(f"   refused at once: {_counts(empty.errors)}")
    return sum(outcome.failed for outcome in (web, web6, *ported, *translated, *sticky, one, many))


def _change(running: Cluster, console: Console, tell: Callable[[str], None]) -> int:
    from ebpflb.demo import WEB

    client = running.clients[0]
    leaver = running.backends[1]
    tell(f"{leaver.name} leaves demo/web while {client.name} connects without a pause")
    left, settled = running.leave(leaver)
    _bars(console, left.backends)
    console.print(
        f"   {left.tried} connects, failed: {left.failed}; the last one to {leaver.name} came "
        f"{settled * 1000:.0f} ms after its manifest was replaced (the folder is looked at "
        "a few times a second)"
    )

    tell("The agent is killed; the data path stays, and a new agent finds it")
    loop = client.tcp_loop(WEB, 80)
    loop.wait_for(lambda now: now.good > 100, what="some connects")
    running.stop_agent(kill=True)
    count = loop.outcome().good
    loop.wait_for(lambda now: now.good > count + 1000, what="connects without an agent")
    running.start_agent()
    restarted = loop.stop()
    console.print(f"   {restarted.tried} connects meanwhile, failed: {restarted.failed}")
    return left.failed + restarted.failed


def _show_kernel(running: Cluster, console: Console, tell: Callable[[str], None]) -> bool:
    """Whether every command exits with 0."""
    good = True
    pin = running.flags[:2]
    maps = ("frontends", "ports", "backends")
    for title, command in (
        ("What the kernel holds: ebpflb service list", ("service", "list", *pin)),
        (
            f"… and why: ebpflb map dump --service demo/web {' '.join(maps)}",
            ("map", "dump", "--service", "demo/web", *pin, *maps),
        ),
        ("The kernel against the manifests: ebpflb check", ("check", *running.flags)),
    ):
        tell(title)
        shown = running.command(*command)
        console.print(_indent(shown.stdout + shown.stderr), markup=False)
        good = good and shown.returncode == 0
    return good


def _look_around(running: Cluster, console: Console) -> None:
    pin_path = running.node.pin_path
    console.print("\n[bold]The cluster is running.[/bold] In another terminal, as root:")
    for line in (
        f"ebpflb service list --pin-path {pin_path}",
        f"ebpflb map dump --pin-path {pin_path}",
        f"ebpflb status --pin-path {pin_path} --cgroup {running.node.cgroup_root}",
        f"edit {running.manifests}/*.json; the agent follows (its log: {running.log})",
    ):
        console.print(f"   {line}")
    click.pause("Enter takes it down. ")


def _bars(console: Console, counts: Mapping[str, int]) -> None:
    """One line a backend, as long as its share."""
    total = sum(counts.values()) or 1
    for name in sorted(counts):
        share = counts[name] / total
        console.print(f"   {name:<8} {'█' * round(share * 40):<40} {counts[name]:>6}  {share:4.0%}")


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {counts[name]}" for name in sorted(counts)) or "nothing"


def _indent(text: str) -> str:
    return "\n".join(f"   {line}" for line in text.rstrip().splitlines())
