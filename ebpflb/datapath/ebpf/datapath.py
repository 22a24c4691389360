# SPDX-License-Identifier: Apache-2.0
"""eBPF mode, put together: the maps, their writer, the programs and where they are attached.

The order of a start is decided here: lock, maps, programs compiled; after the first sync has
filled the maps the programs are attached, and a connect of our own proves that they run. This file
must not know where plans come from.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ebpflb.datapath.base import Difference, SyncReport
from ebpflb.datapath.ebpf import abi, audit, libbpf, loader
from ebpflb.datapath.ebpf.attach import BIND_HOOKS, HOOKS, Attachment, require_cgroup2
from ebpflb.datapath.ebpf.encode import PROBE_ADDRESSES, PROBE_PORT
from ebpflb.datapath.ebpf.grace import KernelGate
from ebpflb.datapath.ebpf.maps import Map, PinFolder, sizes
from ebpflb.datapath.ebpf.stale import StaleUdp, Walk
from ebpflb.datapath.ebpf.tables import KernelTables, read
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.errors import DatapathError
from ebpflb.logs import Log
from ebpflb.model import Family, Plan, Protocol, ServicePortName, format_address

_log = Log("ebpf")

_HOOK = "HOOK_"

SO_COOKIE = 57
SO_NETNS_COOKIE = 71
SETTINGS = abi.LAYOUTS["settings"]
PROBE = abi.LAYOUTS["probe"]

_UDP_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout")
_UDP_STREAM_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream")


class EbpfOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``agent`` is left in `settings` for the commands: JSON values, some 4,000 bytes at most.

    ``show_service_tcp``: getpeername() of a TCP socket shows the Service. ``retval`` False makes
    the programs refuse as on kernels before 5.18; None asks the kernel. ``protect_nodeports``: no
    process of the node may bind a port at which a NodePort answers (NP-10: kube-proxy lets it).
    """

    pin_path: Path
    cgroup: Path
    map_sizes: Mapping[str, int] = {}
    show_service_tcp: bool = False
    retval: bool | None = None
    protect_nodeports: bool = False
    agent: Mapping[str, object] = {}


class _Probed(NamedTuple):
    """``runs``: how many programs of these maps met the agent's own connect at this hook."""

    hook: str
    runs: int
    netns: int


class EbpfDatapath:
    """``Datapath`` by BPF programs. Made by ``start``, which holds the lock while it lives."""

    mode = "ebpf"

    def __init__(
        self,
        options: EbpfOptions,
        folder: PinFolder,
        maps: Mapping[str, Map],
        wake: Callable[[], None],
        walked: Callable[[Walk], None],
    ) -> None:
        self._options = options
        self._folder = folder
        self._maps = maps
        self._tables = KernelTables(maps)
        self._map_ids = frozenset(libbpf.map_info(one.fd, one.name).id for one in maps.values())
        self._settings = maps["settings"].memory()
        self._probe = maps["probe"].memory()
        self._attachment = Attachment(
            options.pin_path, options.cgroup, bind=options.protect_nodeports
        )
        self._grace = libbpf.GracePeriod()
        self._grace.wait()  # nobody reads what an earlier writer freed
        self._gate = KernelGate(self._grace.wait, wake)
        self._writer = Writer(self._tables, self._gate)
        self._stale = StaleUdp(
            maps,
            programmed=lambda: self._writer.ids,
            grace=self._grace.wait,
            walked=walked,
        )
        # Maps that hold no service port were made anew, or nobody was served: whichever it was,
        # an id that a socket remembers is not one that they will give out.
        self._is_new = not self._writer.programmed
        if self._is_new:
            self._stale.disown()
        self._build = self._plan_build()
        self._programs: Mapping[str, int] | None = None
        self._serving = False
        self._proved = False
        self._wake = wake
        self._unrepaired: frozenset[ServicePortName] = frozenset()
        self._fill: dict[str, int] = {}
        if not self._up_to_date():
            self._programs = loader.load(self._build)

    # --- the programs ---------------------------------------------------------------------------

    def _plan_build(self) -> loader.Build:
        retval = self._options.retval
        if retval is None:
            retval = libbpf.has_helper(libbpf.PROG_CGROUP_SOCK_ADDR, libbpf.HELPER_SET_RETVAL)
        return loader.Build(
            source="sock.c",
            functions=tuple(
                loader.Function(*hook)
                for hook in (*HOOKS, *(BIND_HOOKS if self._options.protect_nodeports else ()))
            ),
            defines={
                "HAVE_RETVAL": int(retval),
                "SHOW_SERVICE_TCP": int(self._options.show_service_tcp),
                **{f"SIZE_{name}": one.max_entries for name, one in self._maps.items()},
            },
            pins={name: str(one.path) for name, one in self._maps.items()},
        )

    def _up_to_date(self) -> bool:
        """Whether every hook runs a program made from this very text, on these very maps."""
        if self._read_settings().programs != self._build.digest():
            return False
        return not self._attachment.differences(self._map_ids)

    def _attach(self, *, anew: bool = False) -> None:
        """Attach what was compiled; with ``anew`` compile again where nothing is at hand."""
        if self._programs is None and not anew:
            return
        programs = self._programs or loader.load(self._build)
        self._programs = None
        try:
            for name, fd in programs.items():
                if not libbpf.prog_info(fd).map_ids <= self._map_ids:
                    raise DatapathError(
                        "attach", name, hint="it was made for other maps than those that are open"
                    )
            self._try(programs)
            self._write_settings(programs=0)
            changed = self._attachment.ensure(programs)
            self._write_settings(programs=self._build.digest())
        finally:
            for fd in programs.values():
                os.close(fd)
        _log.info("attached", cgroup=str(self._options.cgroup), links_changed=changed)

    def _serve(self) -> None:
        """After the maps are filled for the first time: attach, prove it, leave word of it."""
        self._write_settings(
            udp_timeout_ns=_seconds(_UDP_TIMEOUT, 30) * 10**9,
            udp_stream_timeout_ns=_seconds(_UDP_STREAM_TIMEOUT, 120) * 10**9,
        )
        if not self._read_settings().host_netns:
            self._write_settings(host_netns=_own_netns())
        self._attach()
        self._prove()
        self._write_settings(options=_left_behind(self._options.agent))
        inherited = self._stale.inherit()
        if inherited:
            _log.info("took over connected UDP sockets", sockets=inherited)
        if self._is_new:  # until now, programs of before gave out ids of maps of before
            self._stale.disown()
        for name in self._folder.remove_others(self._maps):
            _log.info("removed the map of another version or size", map=name)
        self._serving = True

    def _prove(self) -> None:
        """A connect of our own runs through the hooks, and tells this network namespace's cookie.

        Raises DatapathError (fatal) where it does not.
        """
        self._proved = False
        probed = self._probe_hooks()
        for one in probed:
            if not one.runs:
                raise self._not_seen(one.hook)
        self._write_settings(host_netns=probed[-1].netns)
        self._proved = True

    def _try(self, programs: Mapping[str, int]) -> None:
        """Whether ``programs`` will run for this process, before anything that works is moved.

        Raises DatapathError (fatal) where they do not.
        """
        before = {one.hook: one.runs for one in self._probe_hooks()}
        with self._attachment.on_trial({hook: programs[hook] for hook in before}) as on_trial:
            for one in self._probe_hooks():
                if one.hook in on_trial and one.runs <= before[one.hook]:
                    raise self._not_seen(one.hook)

    def _probe_hooks(self) -> list[_Probed]:
        """A connect of our own in each family that this kernel has."""
        found = []
        for family, kind, hook in (
            (Family.IPV4, socket.AF_INET, "connect4"),
            (Family.IPV6, socket.AF_INET6, "connect6"),
        ):
            try:
                probe = socket.socket(kind, socket.SOCK_DGRAM)
            except OSError:
                continue
            at = slice(
                (slot := abi.CONSTANTS[_HOOK + hook.upper()] * PROBE.size), slot + PROBE.size
            )
            before: Any = PROBE.unpack(self._probe.view[at])
            with probe:
                cookie = struct.unpack("=Q", probe.getsockopt(socket.SOL_SOCKET, SO_COOKIE, 8))[0]
                # Anybody may dial that address; the program answers to this socket alone.
                self._probe.words[(slot + PROBE.offsets["expected"]) // 8] = cookie
                with contextlib.suppress(OSError):
                    probe.connect((format_address(PROBE_ADDRESSES[family]), PROBE_PORT))
            seen: Any = PROBE.unpack(self._probe.view[at])
            runs = seen.runs - before.runs if seen.socket == cookie else 0
            found.append(_Probed(hook, runs, seen.netns))
        return found

    def _not_seen(self, hook: str) -> DatapathError:
        return DatapathError(
            "verify",
            f"the {hook} hook",
            hint=f"on {self._options.cgroup} it does not see a connect() of this very process: run "
            "the agent inside of that cgroup, or name the root of the host's cgroup v2 with "
            "--cgroup",
            fatal=True,
        )

    # --- settings -------------------------------------------------------------------------------

    def _read_settings(self) -> Any:
        return SETTINGS.unpack(self._settings.view[: SETTINGS.size])

    def _write_settings(self, **changes: object) -> None:
        before = bytes(self._settings.view[: SETTINGS.size])
        options = changes.get("options")
        if isinstance(options, bytes) and len(options) >= abi.CONSTANTS["ABI_OPTIONS_LEN"]:
            changes["options"] = b"{}"
        after = SETTINGS.pack(*SETTINGS.unpack(before)._replace(**changes))
        # Programs read the numbers: a word at a time, and only what differs (the writer's own word
        # is among them).
        words = SETTINGS.offsets["options"] // 8
        for at, word in enumerate(memoryview(after[: 8 * words]).cast("Q")):
            if self._settings.words[at] != word:
                self._settings.words[at] = word
        if after[8 * words :] != before[8 * words :]:
            self._settings.view[8 * words : SETTINGS.size] = after[8 * words :]

    # --- Datapath -------------------------------------------------------------------------------

    def sync(self, plan: Plan, changed: Collection[ServicePortName] | None) -> SyncReport:
        if changed is not None:
            changed = {*changed, *self._unrepaired}
        report = self._writer.sync(plan, changed)
        self._unrepaired = frozenset()
        if not self._serving:
            self._serve()
            self._stale.request()
        elif report.writes and (
            not changed or any(name.protocol is Protocol.UDP for name in changed)
        ):  # not changed: of all, or of the node alone, which decides who is refused
            self._stale.request()
        self._note_fill()
        return report

    def audit(self, plan: Plan) -> list[Difference]:
        try:
            found = self._audit_programs()
        finally:
            # Whatever is wrong with the programs, the maps are looked after.
            maps = self._audit_maps(plan)
            self._stale.request(sweep=True)
        return found + maps

    def _audit_programs(self) -> list[Difference]:
        found = self._pin_differences() + self._attachment.differences(self._map_ids)
        if found or not self._proved:
            self._pin()
            self._attach(anew=bool(found))
            self._prove()
        return found

    def _audit_maps(self, plan: Plan) -> list[Difference]:
        if self._writer.matches():
            return []
        found = audit.differences(plan, read(self._tables)) or [
            Difference("", "maps", "left-overs", "", "entries that nothing leads to")
        ]
        self._writer.mend_names()
        self._grace.wait()
        self._writer = Writer(self._tables, self._gate)
        report = self._writer.sync(plan, None)
        # What must wait, or failed, is the next sync's, and there is to be one.
        self._unrepaired = report.deferred | report.failed.keys()
        if self._unrepaired:
            self._wake()
        return found

    # --- pins -----------------------------------------------------------------------------------

    def _pin_differences(self) -> list[Difference]:
        return [
            Difference("", one.name, "pin", str(one.path), "")
            for one in self._maps.values()
            if not one.path.exists()
        ]

    def _pin(self) -> None:
        """Pin again what somebody unpinned: bcc would make a map of its own where a pin is gone."""
        self._folder.create()
        for one in self._maps.values():
            if not one.path.exists():
                libbpf.obj_pin(one.fd, str(one.path))

    def counters(self) -> dict[str, int]:
        """What the programs counted since the maps were made, by name. Any thread may ask."""
        stats = self._maps["stats"]
        return {name: sum(stats.per_cpu(index)) for index, name in abi.names_of("STAT_").items()}

    def fill(self) -> dict[str, tuple[int, int]]:
        """(entries in use, entries in all) by map. Any thread may ask."""
        used = self._fill | {name: self._maps[name].count() for name in ("affinity", "udp_conn")}
        return {name: (count, self._maps[name].max_entries) for name, count in used.items()}

    def _note_fill(self) -> None:
        writer = self._writer
        ports = len(writer.programmed)
        self._fill = {
            "frontends": writer.frontends_used,
            "ports": ports,
            "names": ports,
            "backends": writer.slots_used,
            "node_addrs": writer.node_addresses_used,
        }

    def close(self) -> None:
        self._stale.close()
        self._gate.close()
        self._grace.close()
        self._settings.close()
        self._probe.close()
        self._tables.close()
        for one in self._maps.values():
            one.close()


@contextlib.contextmanager
def start(
    options: EbpfOptions,
    wake: Callable[[], None],
    walked: Callable[[Walk], None] = lambda _walk: None,
) -> Iterator[EbpfDatapath]:
    """Take the lock, open or make the maps, compile what must be compiled.

    ``wake`` is called from another thread when something that was deferred can go on. Raises
    DatapathError, fatal where this kernel or these privileges cannot do it.
    """
    require_cgroup2(options.cgroup)
    folder = PinFolder(options.pin_path)
    folder.create()

    def waiting(holder: str) -> None:
        _log.warning("waiting for the pin folder", pin_path=str(options.pin_path), holder=holder)

    with folder.lock(waiting):
        datapath = EbpfDatapath(
            options, folder, folder.open_or_create(sizes(options.map_sizes)), wake, walked
        )
        try:
            yield datapath
        finally:
            datapath.close()


def _own_netns() -> int:
    """This network namespace's cookie; 0 where the kernel does not tell it (before 5.14).

    The proof tells it everywhere, but not before the programs run.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as own:
        try:
            cookie = own.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        except OSError:
            return 0
    return int.from_bytes(cookie, sys.byteorder)


def _left_behind(agent: Mapping[str, object]) -> bytes:
    """What the commands are told, without what they can do without where that is too long."""
    said = json.dumps(dict(agent), sort_keys=True).encode()
    if len(said) < abi.CONSTANTS["ABI_OPTIONS_LEN"]:
        return said
    _log.warning("the options are too long for `check`: it plans by the defaults", bytes=len(said))
    kept = {key: value for key, value in agent.items() if key != "planner"}
    return json.dumps(kept, sort_keys=True).encode()


def _seconds(path: Path, default: int) -> int:
    """conntrack's own time-out, where this kernel has conntrack."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default
