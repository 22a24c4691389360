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

from ebpflb.datapath.base import Difference, SyncReport
from ebpflb.datapath.ebpf import abi, audit, libbpf, loader
from ebpflb.datapath.ebpf.attach import Attachment, require_cgroup2
from ebpflb.datapath.ebpf.carry import Carrier
from ebpflb.datapath.ebpf.encode import PROBE_ADDRESSES, PROBE_PORT
from ebpflb.datapath.ebpf.expiry import Counts, Expiry
from ebpflb.datapath.ebpf.grace import KernelGate
from ebpflb.datapath.ebpf.maps import FLOW_TABLES, Map, PinFolder, sizes
from ebpflb.datapath.ebpf.netfilter import Netfilter
from ebpflb.datapath.ebpf.options import EbpfOptions
from ebpflb.datapath.ebpf.packets import PacketPath
from ebpflb.datapath.ebpf.programs import sock_build
from ebpflb.datapath.ebpf.proof import PROBE, Prover
from ebpflb.datapath.ebpf.settings import Settings
from ebpflb.datapath.ebpf.stale import StaleUdp, Walk
from ebpflb.datapath.ebpf.tables import KernelTables, read
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.errors import DatapathError
from ebpflb.logs import Log
from ebpflb.model import Family, Plan, Protocol, ServicePortName, format_address

_log = Log("ebpf")

_HOOK = "HOOK_"

_COUNTED = ("affinity", "udp_conn", "members", "devices", "fragments")
"""Maps whose entries are counted when somebody asks; the others' are known."""

SO_COOKIE = 57
SO_NETNS_COOKIE = 71

_UDP_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout")
_UDP_STREAM_TIMEOUT = Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream")


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
        self._sockets_off = options.socket_lb == "off"
        self._folder = folder
        self._maps = maps
        self._tables = KernelTables(maps)
        self._map_ids = frozenset(libbpf.map_info(one.fd, one.name).id for one in maps.values())
        self._settings = Settings(maps["settings"].memory())
        self._probe = maps["probe"].memory()
        self._attachment = Attachment(
            options.pin_path,
            options.cgroup,
            bind=options.protect_nodeports,
            off=self._sockets_off,
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
        self._expiry = Expiry(maps)
        self._packets = PacketPath(
            options,
            maps,
            self._settings,
            prove=Prover(self._probe).prove,
            wake=wake,
            netfilter=Netfilter(
                mark=1 << options.masquerade_bit, reject_mark=1 << options.reject_bit
            ),
            carrier=Carrier(folder, maps, ids_are_new=self._is_new, grace=self._grace.wait),
            carried=self._remove_others,
        )
        self._build = sock_build(
            maps,
            retval=options.retval,
            show_service_tcp=options.show_service_tcp,
            protect_nodeports=options.protect_nodeports,
        )
        self._programs: Mapping[str, int] | None = None
        self._serving = False
        self._proved = False
        self._wake = wake
        self._unrepaired: frozenset[ServicePortName] = frozenset()
        self._fill: dict[str, int] = {}
        if not self._up_to_date():
            self._programs = loader.load(self._build)

    # --- the programs ---------------------------------------------------------------------------

    def _up_to_date(self) -> bool:
        """Whether every hook runs a program made from this very text, on these very maps."""
        if self._sockets_off:
            return True
        if self._settings.read().programs != self._build.digest():
            return False
        return not self._attachment.differences(self._map_ids)

    def _attach(self, *, anew: bool = False) -> None:
        """Attach what was compiled; with ``anew`` compile again where nothing is at hand."""
        if self._sockets_off:
            self._detach()
            return
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
            self._settings.write(programs=0)
            changed = self._attachment.ensure(programs)
            self._settings.write(programs=self._build.digest())
        finally:
            for fd in programs.values():
                os.close(fd)
        _log.info("attached", cgroup=str(self._options.cgroup), links_changed=changed)

    def _detach(self) -> None:
        """Nobody's connects are translated at the socket (any more)."""
        removed = self._attachment.ensure({})
        self._settings.write(programs=0)
        if removed:
            _log.info("detached from sockets", cgroup=str(self._options.cgroup), links=removed)

    def _serve(self) -> None:
        """After the maps are filled for the first time: attach, prove it, leave word of it."""
        self._settings.write(
            udp_timeout_ns=_seconds(_UDP_TIMEOUT, 30) * 10**9,
            udp_stream_timeout_ns=_seconds(_UDP_STREAM_TIMEOUT, 120) * 10**9,
        )
        if not self._settings.read().host_netns:
            self._settings.write(host_netns=_own_netns())
        self._attach()
        self._prove()
        self._settings.write(options=_left_behind(self._options.agent))
        inherited = self._stale.inherit()
        if inherited:
            _log.info("took over connected UDP sockets", sockets=inherited)
        if self._is_new:  # until now, programs of before gave out ids of maps of before
            self._stale.disown()
        self._remove_others(but=FLOW_TABLES if self._packets.is_carrying else ())
        self._serving = True

    def _remove_others(self, but: Collection[str] = ()) -> None:
        for name in self._folder.remove_others(self._maps, but=but):
            _log.info("removed the map of another version or size", map=name)

    def _prove(self) -> None:
        """A connect of our own runs through the hooks, and tells this network namespace's cookie.

        Raises DatapathError (fatal) where it does not.
        """
        self._proved = self._sockets_off
        if self._sockets_off:
            return
        probed = self._probe_hooks()
        for one in probed:
            if not one.runs:
                raise self._not_seen(one.hook)
        self._settings.write(host_netns=probed[-1].netns)
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

    # --- Datapath -------------------------------------------------------------------------------

    def sync(self, plan: Plan, changed: Collection[ServicePortName] | None) -> SyncReport:
        if changed is not None:
            changed = {*changed, *self._unrepaired}
        report = self._writer.sync(plan, changed)
        self._unrepaired = frozenset()
        if not self._serving:
            self._serve()
            self._stale.request()
            self._packets.start()
            self._expiry.start()
        elif report.writes and (
            not changed or any(name.protocol is Protocol.UDP for name in changed)
        ):  # not changed: of all, or of the node alone, which decides who is refused
            self._stale.request()
        self._packets.follow(plan)
        self._note_fill()
        return report

    def audit(self, plan: Plan) -> list[Difference]:
        try:
            found = self._audit_programs()
        finally:
            # Whatever is wrong with the programs, the maps are looked after.
            maps = self._audit_maps(plan)
            packets = self._packets.audit(plan)
            self._stale.request(sweep=True)
            self._expiry.request()
        return found + packets + maps

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
        found = []
        for one in self._maps.values():
            if not one.path.exists():
                found.append(Difference("", one.name, "pin", str(one.path), ""))
            elif not self._is_pin_of(one):
                found.append(Difference("", one.name, "pin", str(one.path), "of another map"))
        return found

    def _is_pin_of(self, one: Map) -> bool:
        try:
            fd = libbpf.obj_get(str(one.path))
        except DatapathError:
            return False
        try:
            is_map = libbpf.fd_kind(fd) == "bpf-map"
            return is_map and libbpf.map_info(fd, one.name).id in self._map_ids
        finally:
            os.close(fd)

    def _pin(self) -> None:
        """Pin again what somebody unpinned: bcc makes a map of its own where a pin is gone."""
        self._folder.create()
        for one in self._maps.values():
            if not self._is_pin_of(one):
                try:
                    one.path.unlink(missing_ok=True)
                except OSError as error:
                    raise DatapathError("replace", str(one.path), error.errno or 0) from None
                libbpf.obj_pin(one.fd, str(one.path))

    def counters(self) -> dict[str, int]:
        """What the programs counted since the maps were made, by name. Any thread may ask."""
        stats = self._maps["stats"]
        return {name: sum(stats.per_cpu(index)) for index, name in abi.names_of("STAT_").items()}

    def fill(self) -> dict[str, tuple[int, int]]:
        """(entries in use, entries in all) by map. Any thread may ask."""
        used = self._fill | {name: self._maps[name].count() for name in _COUNTED}
        sizes = {name: (count, self._maps[name].max_entries) for name, count in used.items()}
        return sizes | self._expiry.occupancy()

    def flows(self) -> Counts:
        """The flows at the last look, by state, and those that were over. Any thread may ask."""
        return self._expiry.counts()

    def _note_fill(self) -> None:
        writer = self._writer
        ports = len(writer.programmed)
        self._fill = {
            "frontends": writer.frontends_used,
            "ports": ports,
            "names": ports,
            "backends": writer.slots_used,
            "node_addrs": writer.node_addresses_used,
            "source_ranges": writer.source_ranges_used,
            "service_addrs": writer.service_addresses_used,
        }

    def problems(self) -> Mapping[str, str]:
        """What of the packet path does not work, and why. Any thread may ask."""
        return self._packets.problems

    def close(self) -> None:
        self._packets.close()
        self._expiry.close()
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
