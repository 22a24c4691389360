# SPDX-License-Identifier: Apache-2.0
"""The packet path: a pod whose sockets no hook sees dials through the programs at tc.

Three more nodes, one hop before the node with the backends: ``packets`` runs the agent, ``tracked``
has no agent but a netfilter that tracks connections (as any node with a CNI has), ``bare`` has not
even that. A pod of each dials the same endpoints at the same time, so a ratio compares one way with
the same way. What a single packet costs is asked of the kernel (a test run), on maps of its own.
This file must not know how anything is printed.
"""

from __future__ import annotations

import contextlib
import random
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ebpflb.bench.bed import Bed, BenchError, Client, Say
from ebpflb.bench.connects import Latency, latency
from ebpflb.bench.numbers import in_guard, median
from ebpflb.bench.perpacket import PacketCost, per_packet
from ebpflb.bench.workload import SIDES, Side, pack_destinations, pack_expected
from ebpflb.lab import Node, Pod

_ENDPOINTS, _SERVICES = range(2)
_SINK_DIRECT, _SINK_SERVICE, _ANSWERED = range(2, 5)
_WARM_UP: Final = 10
_REUSED_PORTS: Final = "20000 20063"
_ALL_PORTS: Final = "1024 65535"
_REUSE_BATCH: Final = 50_000
_STREAM_MS: Final = 400
_NFT_S: Final = 10

_TRACKING: Final = (
    "table inet bench { chain track { type filter hook forward priority 0; "
    "ct state invalid counter; }; }"
)
"""Any rule that asks for a connection's state switches tracking on."""


class Mode(NamedTuple):
    """``node``: whose pod dials. ``base``: the mode it is compared with."""

    node: str
    destinations: int
    base: str


MODES: Final[Mapping[str, Mode]] = {
    "tracked": Mode("tracked", _ENDPOINTS, ""),
    "tracked_again": Mode("tracked-again", _ENDPOINTS, "tracked"),
    "bare": Mode("bare", _ENDPOINTS, "tracked"),
    "packets_no_service": Mode("packets", _ENDPOINTS, "tracked"),
    "packets": Mode("packets", _SERVICES, "tracked"),
}


class Packets(NamedTuple):
    """``latencies`` by mode; ``trusted``: the guard held, after so many ``attempts``.

    ``reused`` connects from a few source ports, and how many of them failed; ``answered`` ones
    that were asked whom they reached, and how many were answered by somebody ``wrong``.
    ``bulk``: bytes a second through a Service against those of the same way without us.
    """

    latencies: Mapping[str, Latency]
    trusted: bool
    attempts: int
    failed: int
    reused: int
    reused_failed: int
    answered: int
    unanswered: int
    wrong: int
    bulk: float
    bulk_gbit_s: float
    costs: Mapping[str, PacketCost]


class _Sizes(NamedTuple):
    rounds: int
    batch: int
    attempts: int
    reused: int
    answered: int
    streams: int
    test_runs: int


def measure(
    bed: Bed,
    *,
    rounds: int,
    batch: int,
    attempts: int,
    reused: int,
    answered: int,
    streams: int,
    test_runs: int,
    seed: int,
    say: Say,
) -> Packets:
    """Measure all of it; the agent of the packets' node is started here and ended."""
    sizes = _Sizes(rounds, batch, attempts, reused, answered, streams, test_runs)
    sides = _write_manifests(bed)
    pods = {name: _pod_on(bed, name) for name in ("packets", "tracked", "bare")}
    _track(pods["tracked"].node)
    _forget_soon(pods["tracked"].node)
    agent = bed.agent(pods["packets"].node, packets=True)
    try:
        agent.synced()
        agent.wait_until(lambda: bool(agent.events("packets are served")), "it serves no packets")
        _forget_soon(pods["packets"].node)
        with _clients(bed, pods, sides) as clients:
            return _measure(pods, clients, sizes, seed=seed, say=say)
    finally:
        agent.end()


def _measure(
    pods: Mapping[str, Pod],
    clients: Mapping[str, Client],
    sizes: _Sizes,
    *,
    seed: int,
    say: Say,
) -> Packets:
    rng = random.Random(seed)  # noqa: S311 - an order, no secret
    say(f"{sizes.rounds * sizes.batch:,} connects in each of {len(MODES)} modes of the packet path")
    attempts = 0
    while True:
        attempts += 1
        latencies, failed = _connects(clients, sizes, rng)
        trusted = in_guard(latencies["tracked_again"].ratio)
        say(f"direct against direct: {latencies['tracked_again'].ratio:.3f}")
        if trusted or failed or attempts >= sizes.attempts:
            break
    say(f"{sizes.reused:,} connects from {_port_count()} source ports")
    reused_failed = _reuse(pods["packets"], clients["packets"], sizes.reused)
    checked = clients["packets"].check(_ANSWERED, sizes.answered)
    say(f"{sizes.streams} streams of {_STREAM_MS} ms each way")
    direct, served = _bulk(clients, sizes.streams, rng)
    return Packets(
        latencies=latencies,
        trusted=trusted,
        attempts=attempts,
        failed=failed,
        reused=sizes.reused,
        reused_failed=reused_failed,
        answered=checked.dials,
        unanswered=checked.failed,
        wrong=checked.wrong,
        bulk=served / direct,
        bulk_gbit_s=served * 8 / 1e9,
        costs=per_packet(runs=sizes.test_runs),
    )


# --- the nodes ------------------------------------------------------------------------------------


def _write_manifests(bed: Bed) -> Mapping[int, Side]:
    """Every other watched Service on the other side, and one that swallows; returns the sides."""
    work = bed.workload
    sides = {service: SIDES[number % 2] for number, service in enumerate(work.watched)}
    for file in sorted({work.file_of(service) for service in work.watched}):
        bed.rewrite(file, work.manifest(file, sides))
    (bed.manifests / "sink.json").write_bytes(work.sink_manifest())
    return sides


def _pod_on(bed: Bed, name: str) -> Pod:
    """A node one hop before the backends', with a pod that dials."""
    node = bed.lab.node(name)

    for number in range(bed.workload.backends):
        node.route(bed.workload.prefix(number), via=bed.node.ipv4)
    pod = node.pod(f"from-{name[:5]}")
    pod.sysctl("net.ipv4.ip_local_port_range", _ALL_PORTS)
    return pod


def _track(node: Node) -> None:
    """Make netfilter track connections, as on any node with a CNI."""
    ran = node.run(["nft", _TRACKING], check=False, timeout_s=_NFT_S)
    if ran.returncode:
        raise BenchError(f"nft cannot make {node.name} track connections: {ran.stderr.strip()}")


def _forget_soon(node: Node) -> None:
    """Let netfilter forget closed connections at once.

    It keeps them for 10 s, in which a client opens more than its table holds: then it drops
    packets, whoever translates them.
    """
    node.sysctl("net.netfilter.nf_conntrack_tcp_timeout_close", 1)


@contextlib.contextmanager
def _clients(
    bed: Bed, pods: Mapping[str, Pod], sides: Mapping[int, Side]
) -> Iterator[Mapping[str, Client]]:
    """A client in each pod and a second one for the guard, none in a cgroup that has hooks."""
    paths = _lists(bed, sides)
    clients = {}
    try:
        for name in (*pods, "tracked-again"):
            pod = pods[name.removesuffix("-again")]
            clients[name] = client = bed.client(name, bed.bare_cgroup, pod)
            for number, path in paths.items():
                client.ask(f"list {number} {path}")
        yield clients
    finally:
        for client in clients.values():
            client.end()
            bed.clients.remove(client)


def _lists(bed: Bed, sides: Mapping[int, Side]) -> Mapping[int, Path]:
    work = bed.workload
    packed = {
        _SINK_DIRECT: pack_destinations([work.sink_endpoint]),
        _SINK_SERVICE: pack_destinations([work.sink]),
        _ANSWERED: pack_expected((work.frontend(one), side) for one, side in sides.items()),
    }
    paths = {}
    for number, data in packed.items():
        paths[number] = path = bed.lab.folder / f"packets-list-{number}"
        path.write_bytes(data)
    return paths


# --- what is measured -----------------------------------------------------------------------------


def _connects(
    clients: Mapping[str, Client], sizes: _Sizes, rng: random.Random
) -> tuple[Mapping[str, Latency], int]:
    samples: dict[str, array[int]] = {name: array("I") for name in MODES}
    cycles: dict[str, array[int]] = {name: array("I") for name in MODES}
    failed = 0
    for _ in range(sizes.rounds):
        order = list(MODES)
        rng.shuffle(order)
        for name in order:
            mode = MODES[name]
            got = clients[mode.node].run(mode.destinations, sizes.batch + _WARM_UP)
            failed += got.failed
            samples[name].extend(got.connect[_WARM_UP:])
            cycles[name].extend(got.cycle[_WARM_UP:])
    return {
        name: latency(name, mode.base or name, samples, cycles) for name, mode in MODES.items()
    }, failed


def _port_count() -> int:
    first, last = map(int, _REUSED_PORTS.split())
    return last - first + 1


def _reuse(pod: Pod, client: Client, count: int) -> int:
    """Connect so often that every source port comes back again and again; returns failures."""
    failed = 0
    pod.sysctl("net.ipv4.ip_local_port_range", _REUSED_PORTS)
    try:
        for left in range(count, 0, -_REUSE_BATCH):
            failed += client.run(_SERVICES, min(left, _REUSE_BATCH)).failed
    finally:
        pod.sysctl("net.ipv4.ip_local_port_range", _ALL_PORTS)
    return failed


def _bulk(clients: Mapping[str, Client], streams: int, rng: random.Random) -> tuple[float, float]:
    """Bytes a second of the same way without and with us, medians of streams taken in turn."""
    speeds: dict[str, list[float]] = {"tracked": [], "packets": []}
    for _ in range(streams):
        order = list(speeds)
        rng.shuffle(order)
        for name in order:
            number = _SINK_SERVICE if name == "packets" else _SINK_DIRECT
            speeds[name].append(clients[name].stream(number, _STREAM_MS))
    return median(speeds["tracked"]), median(speeds["packets"])
