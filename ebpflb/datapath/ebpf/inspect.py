# SPDX-License-Identifier: Apache-2.0
"""The pinned maps, opened to be read by the commands: no agent is asked, none is needed.

Nothing is locked or written. This file must not know what an entry means (rows.py), nor what the
maps should hold.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Final

import msgspec

from ebpflb.datapath.ebpf import abi, flowrows, libbpf, rows
from ebpflb.datapath.ebpf.attach import Attachment
from ebpflb.datapath.ebpf.maps import Map, PinFolder, lock_holder
from ebpflb.datapath.ebpf.rows import PROBE, SETTINGS, Row
from ebpflb.datapath.ebpf.tables import (
    BACKEND,
    ID,
    KernelTables,
    Snapshot,
    read,
    read_frontends,
    read_members,
    read_names,
    read_node_addrs,
    read_service_addrs,
    read_source_ranges,
)
from ebpflb.errors import ConfigError, DatapathError

NOT_LISTABLE: Final = tuple(name for name, spec in abi.MAPS.items() if spec.type == "sk_storage")
"""Maps whose entries live in sockets: the kernel lets nobody list them."""

DUMPABLE: Final = tuple(name for name in abi.MAPS if name not in NOT_LISTABLE)

OF_SERVICES: Final = (
    "frontends",
    "ports",
    "backends",
    "affinity",
    "members",
    "udp_conn",
    "flows_new",
    "conntrack",
    "source_ranges",
    "connections",
    "names",
)
"""Maps whose every entry belongs to one service port, but for what is foreign to us."""

EVICTING: Final = tuple(name for name, spec in abi.MAPS.items() if spec.type == "lru_hash")
"""Maps that make room for the newest entry by themselves."""

_HOOKS = abi.names_of("HOOK_")
_STATS = abi.names_of("STAT_")

_SO_NETNS_COOKIE: Final = 71


# --- the maps themselves -------------------------------------------------------------------------


class MapFill(msgspec.Struct, frozen=True):
    """How full a map is; ``entries`` is None where that cannot be told or means nothing.

    ``bytes`` is the kernel memory that the map is charged with now.
    """

    map: str
    entries: int | None
    max_entries: int | None
    bytes: int


class Inspector:
    """The maps of one pin folder, open to be read. Made by ``opened``; not for threads."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps
        self._tables = KernelTables(maps)

    @property
    def tables(self) -> KernelTables:
        return self._tables

    @cached_property
    def names(self) -> Mapping[int, str]:
        return read_names(self._tables)

    @cached_property
    def snapshot(self) -> Snapshot:
        return read(self._tables)

    def fresh_snapshot(self) -> Snapshot:
        """Read again, whatever was read before."""
        self.__dict__.pop("snapshot", None)
        return self.snapshot

    def map(self, name: str) -> Map:
        return self._maps[name]

    def max_entries(self, name: str) -> int:
        return self._maps[name].max_entries

    def map_ids(self) -> frozenset[int]:
        """The kernel's ids of the maps."""
        return frozenset(libbpf.map_info(one.fd, name).id for name, one in self._maps.items())

    def entries(self, name: str) -> Sequence[Row]:
        """The entries of the map ``name`` of DUMPABLE, in stable order."""
        readers: Mapping[str, Callable[[], Sequence[Row]]] = {
            "frontends": lambda: rows.frontend_rows(read_frontends(self._tables), self.names),
            "node_addrs": lambda: rows.node_address_rows(read_node_addrs(self._tables)),
            "ports": lambda: rows.port_rows(self.snapshot.ports, self.names),
            "backends": lambda: rows.backend_rows(self.snapshot),
            "affinity": self._affinity,
            "members": lambda: rows.member_rows(read_members(self._tables), self.names),
            "udp_conn": lambda: rows.udp_conn_rows(self._maps["udp_conn"].items(), self.names),
            "flows_new": lambda: self._flows("flows_new"),
            "conntrack": lambda: self._flows("conntrack"),
            "fragments": lambda: flowrows.fragment_rows(self._maps["fragments"].items()),
            "source_ranges": lambda: rows.source_range_rows(
                read_source_ranges(self._tables), self.names
            ),
            "service_addrs": lambda: rows.service_address_rows(read_service_addrs(self._tables)),
            "devices": self._devices,
            "connections": lambda: rows.connections_rows(
                self.snapshot.ports, self.names, self._tables.connections
            ),
            "stats": lambda: [rows.StatRow(word, count) for word, count in self.counters().items()],
            "probe": self._probe,
            "names": lambda: rows.name_rows(self.names),
            "settings": lambda: [self.settings()],
        }
        return readers[name]()

    def services(self) -> list[rows.ListedService]:
        return rows.services(self.snapshot, self._tables.connections)

    def settings(self) -> rows.SettingsRow:
        return rows.settings_row(self._maps["settings"].lookup(bytes(4)) or bytes(SETTINGS.size))

    def counters(self) -> dict[str, int]:
        """What the programs counted since the maps were made, by name."""
        stats = self._maps["stats"]
        return {word: sum(stats.per_cpu(index)) for index, word in _STATS.items()}

    def left_over_backends(self) -> int:
        """Slots of `backends` that hold something and are in no range that is in use."""
        raw = memoryview(self._tables.read_backends(0, self._tables.backend_entries)).cast("I")
        owners = raw[BACKEND.offsets["owner"] // 4 :: BACKEND.size // 4]
        live = {row.slot for row in rows.backend_rows(self.snapshot) if row.id}
        return sum(1 for owner in owners if owner) - len(live)

    def fill(self) -> list[MapFill]:
        """Every map, in the order of ``maps.h``."""
        live = {
            "ports": len(self.snapshot.ports),
            "backends": len({row.slot for row in rows.backend_rows(self.snapshot)}),
            "names": len(self.names),
            "frontends": len(self.snapshot.frontends),
            "members": len(self.snapshot.members),
        }
        return [
            MapFill(
                map=name,
                entries=live[name] if name in live else self._count(one),
                max_entries=None if name in NOT_LISTABLE else one.max_entries,
                bytes=libbpf.map_memory(one.fd),
            )
            for name, one in ((name, self._maps[name]) for name in abi.MAPS)
        ]

    def _count(self, one: Map) -> int | None:
        if "hash" in one.spec.type or one.spec.type == "lpm_trie":
            return one.count()
        return None

    def _affinity(self) -> list[rows.AffinityRow]:
        return rows.affinity_rows(
            self._maps["affinity"].items(),
            self.names,
            now_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),  # as bpf_ktime_get_ns()
        )

    def _flows(self, name: str) -> list[flowrows.FlowRow]:
        return flowrows.flow_rows(
            name,
            self._maps[name].items(),
            self.names,
            now_ns=time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        )

    def _devices(self) -> list[rows.DeviceRow]:
        """With their names where this is the node's network namespace, as far as can be known."""
        elsewhere = is_elsewhere(self.settings().host_netns)
        names = {} if elsewhere else dict(socket.if_nameindex())
        return rows.device_rows((key for key, _ in self._maps["devices"].items()), names)

    def _probe(self) -> list[rows.ProbeRow]:
        one = self._maps["probe"]
        empty = bytes(PROBE.size)
        return rows.probe_rows([one.lookup(ID.pack(hook)) or empty for hook in sorted(_HOOKS)])

    def close(self) -> None:
        self._tables.close()
        for one in self._maps.values():
            one.close()


def is_elsewhere(host_netns: int) -> bool:
    """Whether this process is in another network namespace than the node, as far as can be known.

    ``host_netns`` is the node's, as `settings` has it; 0 is not known.
    """
    mine = netns_cookie()
    return bool(mine and host_netns and mine != host_netns)


def netns_cookie() -> int:
    """That of this process's network namespace; 0 on kernels before 5.14."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            raw = one.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError:
            return 0
    return int(struct.unpack("=Q", raw)[0])


def is_there(pin_path: Path) -> bool:
    """Whether there is such a folder.

    Raises ConfigError where it is none, DatapathError (fatal) where it may not be read.
    """
    try:
        with os.scandir(pin_path):
            return True
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise ConfigError(f"--pin-path {pin_path}: it is no folder") from None
    except OSError as error:
        forbidden = error.errno in (errno.EACCES, errno.EPERM)
        raise DatapathError(
            "read",
            str(pin_path),
            error.errno or 0,
            hint="needs root" if forbidden else "",
            fatal=forbidden,
        ) from None


@contextmanager
def opened(pin_path: Path) -> Iterator[Inspector]:
    """The maps that are pinned there.

    Raises DatapathError: nothing is pinned, another version is, or (fatal) it may not be read.
    """
    if not is_there(pin_path) or not any(map(_is_pin, pin_path.glob("*-*"))):
        raise _nothing(pin_path)
    inspector = Inspector(PinFolder(pin_path).open_existing())
    try:
        yield inspector
    finally:
        inspector.close()


def _is_pin(path: Path) -> bool:
    return path.name.rpartition("-")[0] in abi.MAPS


def _nothing(pin_path: Path) -> DatapathError:
    return DatapathError(
        "read",
        str(pin_path),
        hint="nothing of ebpflb is pinned here; start the agent (ebpflb run), "
        "or name another folder with --pin-path",
    )


def attachment(pin_path: Path, cgroup: Path, left: Mapping[str, object]) -> Attachment:
    """The links there, as the agent, which ``left`` word of it, wants them."""
    bind = left.get("protect_nodeports")
    return Attachment(
        pin_path,
        cgroup,
        bind=bind if isinstance(bind, bool) else None,
        off=left.get("socket_lb") == "off",
    )


# --- who writes them -----------------------------------------------------------------------------

_PROCESS: Final = re.compile(r"\(process (\d+)\)")


class Holder(msgspec.Struct, frozen=True):
    """The process that holds the lock of a pin folder."""

    process: int


def holder(pin_path: Path) -> Holder | None:
    """The one writer of this folder, if one can be seen from this pid namespace.

    Only looked up: to try the lock would be in the way of whoever takes it at that moment.
    """
    try:
        seen = _PROCESS.search(lock_holder(pin_path))
    except FileNotFoundError:
        return None  # the folder went meanwhile
    return Holder(int(seen.group(1))) if seen else None
