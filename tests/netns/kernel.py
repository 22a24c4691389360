# SPDX-License-Identifier: Apache-2.0
"""The kernel's maps under one pin path, as they are at the moment of a question."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import abi, audit, libbpf
from ebpflb.datapath.ebpf.attach import EVERY_HOOK, Attached, Attachment
from ebpflb.datapath.ebpf.maps import Map, PinFolder
from ebpflb.datapath.ebpf.tables import KernelTables, Snapshot, index_of, read
from ebpflb.errors import DatapathError
from ebpflb.model import Plan, ServicePortName

_U32 = struct.Struct("=I")
_ARRAYS = frozenset({"ports", "backends", "settings", "probe"})
_COUNTERS = frozenset({"connections", "stats"})


class UdpConnection(NamedTuple):
    """An entry of `udp_conn`."""

    backend: bytes
    backend_port: int
    id: int
    netns: int


class Kernel:
    """Asks the maps that are pinned at ``pin_path``; needs no agent."""

    def __init__(self, pin_path: Path, cgroup: Path) -> None:
        self.pin_path = pin_path
        self._attachment = Attachment(pin_path, cgroup)

    @contextlib.contextmanager
    def maps(self) -> Iterator[Mapping[str, Map]]:
        maps = PinFolder(self.pin_path).open_existing()
        try:
            yield maps
        finally:
            for one in maps.values():
                one.close()

    def snapshot(self) -> Snapshot:
        with self.maps() as maps, contextlib.closing(KernelTables(maps)) as tables:
            return read(tables)

    def follows(self, plan: Plan) -> bool:
        """Whether the maps are as planned and hold nothing else."""
        try:
            return not self.differences(plan)
        except DatapathError:
            return False  # nothing is pinned yet

    def differences(self, plan: Plan) -> list[Difference]:
        snapshot = self.snapshot()
        found = audit.differences(plan, snapshot)
        live = {port.id for port in snapshot.ports}
        for where, ids in (
            ("members", {member.id for member in snapshot.members}),
            ("names", set(snapshot.names)),
        ):
            found += [Difference("", where, f"of id {one}", "", "left over") for one in ids - live]
        return found

    def hooks(self) -> dict[str, Attached]:
        """What the kernel says of each hook."""
        return {one.hook: one for one in self._attachment.look()}

    def id_of(self, name: ServicePortName) -> int:
        return next(port.id for port in self.snapshot().ports if port.name == name)

    def connections(self, name: ServicePortName) -> int:
        """How many connections were made to a service port."""
        with self.maps() as maps:
            return sum(maps["connections"].per_cpu(index_of(self.id_of(name))))

    def stats(self) -> dict[str, int]:
        """What the programs counted, by name."""
        with self.maps() as maps:
            return {
                name: sum(maps["stats"].per_cpu(index))
                for index, name in abi.names_of("STAT_").items()
            }

    def udp_connections(self) -> dict[int, UdpConnection]:
        """Connected UDP sockets by their cookies."""
        layout = abi.LAYOUTS["udp_conn"]
        found = {}
        with self.maps() as maps:
            for key, value in maps["udp_conn"].items():
                entry: Any = layout.unpack(value)
                found[struct.unpack("=Q", key)[0]] = UdpConnection(
                    entry.backend, int.from_bytes(entry.backend_port), entry.id, entry.netns
                )
        return found

    def affinity_ages_s(self, name: ServicePortName) -> list[float]:
        """How long ago each client of a service port made its last connection."""
        key_layout, layout = abi.LAYOUTS["affinity_key"], abi.LAYOUTS["affinity_value"]
        wanted = self.id_of(name)
        now = time.monotonic_ns()
        with self.maps() as maps:
            return [
                (now - layout.unpack(value).used_ns) / 1e9
                for key, value in maps["affinity"].items()
                if key_layout.unpack(key).id == wanted
            ]

    @contextlib.contextmanager
    def settings(self) -> Iterator[libbpf.MappedArray]:
        with self.maps() as maps:
            memory = maps["settings"].memory()
            try:
                yield memory
            finally:
                memory.close()

    def set_setting(self, member: str, value: int) -> int:
        """Overwrite a 64-bit member of `settings`; returns what it was."""
        with self.settings() as memory:
            at = abi.LAYOUTS["settings"].offsets[member] // 8
            before = int(memory.words[at])
            memory.words[at] = value
        return before

    def dump(self) -> dict[str, Any]:
        """Everything that an agent writes, byte for byte; also where and which the maps are."""
        found: dict[str, Any] = {}
        with self.maps() as maps:
            for name, one in maps.items():
                found[f"{name} id"] = libbpf.map_info(one.fd, name).id
                if name in _ARRAYS:
                    with contextlib.closing(one.memory()) as memory:
                        found[name] = bytes(memory.view)
                elif name in _COUNTERS:
                    found[name] = [one.per_cpu(index) for index in range(one.max_entries)]
                elif one.spec.type in {"hash", "lru_hash"}:
                    found[name] = dict(one.items())
        for name, hook in self.hooks().items():
            found[f"hook {name}"] = hook.prog_id
        return found

    def delete(self, table: str, key: bytes) -> None:
        """Take an entry away behind the agent's back."""
        with self.maps() as maps:
            maps[table].delete(key)

    def put(self, table: str, key: bytes, value: bytes) -> None:
        """Write an entry behind the agent's back."""
        with self.maps() as maps:
            libbpf.update(maps[table].fd, table, key, value)


def programs_on(cgroup: Path) -> list[int]:
    """The ids of all programs on this very cgroup, at the hooks that are ours too."""
    folder = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = (libbpf.cgroup_programs(folder, hook.attach_type)[0] for hook in EVERY_HOOK)
        return [one for ids in found for one in ids]
    finally:
        os.close(folder)


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What two dumps do not have in common, for an assertion that can be read."""
    return sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
