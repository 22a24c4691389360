# SPDX-License-Identifier: Apache-2.0
"""What the agent needs, and what a restart costs: memory, map bytes, writes, failed connects.

The agent is the real one, a process of its own; its maps are read from their pins, as anybody may.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from ebpflb.bench.bed import Agent, Bed, BenchError, Say
from ebpflb.datapath.ebpf import libbpf
from ebpflb.datapath.ebpf.maps import Map, PinFolder
from ebpflb.lab import Node

GROWING: Final = ("frontends", "ports", "backends", "members", "names", "connections")
"""The maps whose use grows with Services and endpoints."""

FLOWS: Final = ("affinity", "udp_conn")
"""The maps whose use grows with traffic."""

_SERVICES_LIST: Final = 1
_AUDIT_S: Final = 2
_COMPARED: Final = ("frontends", "ports", "backends", "members", "names", "settings")


class Footprint(NamedTuple):
    """Bytes of memory, and bytes of kernel memory by map. ``start_s``: to the end of the sync."""

    start_s: float
    first_sync_ms: float
    first_sync_writes: int
    rss: int
    pss: int
    mapped: int
    peak: int
    peak_with_audit: int
    maps: Mapping[str, int]


class Restart(NamedTuple):
    """``writes`` as the agent counts them, ``changed`` the maps whose bytes differ."""

    start_s: float
    writes: int
    changed: tuple[str, ...]
    peak: int


class Crash(NamedTuple):
    """An agent killed and started again while a client dials."""

    dials: int
    failed: int
    error: str
    writes: int


def cold_start(bed: Bed) -> tuple[Agent, Footprint]:
    """Start the agent on an empty pin folder and let it audit once."""
    agent = bed.agent(bed.node, "--audit-period", str(_AUDIT_S))
    start_s, sync = agent.synced()
    at_start = agent.status()
    agent.wait_until(lambda: agent.metric("ebpflb_audits_total") >= 1, "it has not audited")
    later = agent.status()
    with _open_maps(bed.node) as maps:
        sizes = {name: libbpf.map_memory(maps[name].fd) for name in maps}
    return agent, Footprint(
        start_s=start_s,
        first_sync_ms=sync["ms"],
        first_sync_writes=sync["writes"],
        rss=later["VmRSS"],
        pss=later["Pss"],
        mapped=later["bpf-map"],
        peak=at_start["VmHWM"],
        peak_with_audit=later["VmHWM"],
        maps=sizes,
    )


def restart(bed: Bed, agent: Agent) -> tuple[Agent, Restart]:
    """End the agent and start it again, with nothing changed."""
    agent.end()
    before = _digests(bed.node)
    agent = bed.agent(bed.node)
    start_s, sync = agent.synced()
    writes = max(int(agent.metric("ebpflb_map_writes_total")), sync["writes"])
    after = _digests(bed.node)
    return agent, Restart(
        start_s=start_s,
        writes=writes,
        changed=tuple(name for name in _COMPARED if before[name] != after[name]),
        peak=agent.status()["VmHWM"],
    )


def crash(bed: Bed, agent: Agent, *, dials: int, say: Say) -> tuple[Agent, Crash]:
    """SIGKILL the agent and start it again, while a client dials random Services."""
    client = bed.client("restart", bed.pod_cgroup)
    batch = max(1, dials // 20)
    dialled, failed, error = 0, 0, ""

    def dial() -> None:
        nonlocal dialled, failed, error
        got = client.finish(batch)
        dialled, failed, error = dialled + batch, failed + got.failed, error or got.error

    client.begin(_SERVICES_LIST, batch)
    agent.end(signal.SIGKILL)
    agent = bed.agent(bed.node)
    synced = False
    while not synced or dialled < dials:
        dial()
        client.begin(_SERVICES_LIST, batch)
        synced = bool(agent.events("synced"))
        if not synced and agent.process.poll() is not None:
            agent.synced()  # says why it ended
        if dialled > 50 * dials:
            raise BenchError("the agent has not synced while it was dialled through")
    dial()
    client.end()
    bed.clients.remove(client)
    came = f"{failed} failed ({error})" if failed else "none failed"
    say(f"{dialled} connects while the agent was killed and came back: {came}")
    return agent, Crash(dialled, failed, error, int(agent.metric("ebpflb_map_writes_total")))


@contextlib.contextmanager
def _open_maps(node: Node) -> Iterator[dict[str, Map]]:
    maps = PinFolder(node.pin_path).open_existing()
    try:
        yield maps
    finally:
        for one in maps.values():
            one.close()


def _digests(node: Node) -> dict[str, str]:
    """What the maps hold, as one hash each."""
    found = {}
    with _open_maps(node) as maps:
        for name in _COMPARED:
            one = maps[name]
            digest = hashlib.sha256()
            if one.spec.type == "array":
                memory = one.memory()
                digest.update(memory.view)
                memory.close()
            else:
                for key, value in sorted(one.items()):
                    digest.update(key + value)
            found[name] = digest.hexdigest()
    return found
