# SPDX-License-Identifier: Apache-2.0
"""The packet path, put together: programs on devices, netfilter's part, and what is said of both.

It begins when the socket programs serve, and whatever fails here leaves those alone: it is said by
name, and tried again when something changes and at every audit. The sockets' programs leave to
packets what they cannot know only once the packets' programs have been seen to run. This file must
not know what a packet or a flow looks like.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import abi, libbpf, loader
from ebpflb.datapath.ebpf.deviceprograms import DevicePrograms, Prove, close_all
from ebpflb.datapath.ebpf.devices import Device, DeviceWatch, Header, Seen, Wanted, decide
from ebpflb.datapath.ebpf.maps import Map
from ebpflb.datapath.ebpf.options import EbpfOptions
from ebpflb.datapath.ebpf.programs import tc_build
from ebpflb.datapath.ebpf.settings import Settings
from ebpflb.datapath.ebpf.surroundings import Problem, Surroundings
from ebpflb.datapath.ebpf.tc import Tc
from ebpflb.errors import DatapathError
from ebpflb.logs import Log
from ebpflb.model import Family, Plan

_log = Log("packets")

_SEES_PODS: Final = abi.CONSTANTS["STATE_SEES_PODS"]
_SEES_HOST: Final = abi.CONSTANTS["STATE_SEES_HOST"]
_PODS_BY_PACKET: Final = abi.CONSTANTS["STATE_PODS_BY_PACKET"]
_PING: Final = abi.CONSTANTS["STATE_PING"]
_MIGRATING: Final = abi.CONSTANTS["STATE_MIGRATING"]
_KEEP_CLIENT: Final = abi.CONSTANTS["STATE_KEEP_CLIENT"]
_MASQUERADE_BRIDGED: Final[Mapping[Family, int]] = {
    Family.IPV4: abi.CONSTANTS["STATE_MASQUERADE_BRIDGED4"],
    Family.IPV6: abi.CONSTANTS["STATE_MASQUERADE_BRIDGED6"],
}
_PROVED: Final = _SEES_PODS | _SEES_HOST | _PODS_BY_PACKET
_OURS: Final = _PROVED | _PING | _KEEP_CLIENT | sum(_MASQUERADE_BRIDGED.values())
"""The bits of ``state`` that are written here; the others are somebody else's."""

_NETFILTER: Final = Path("/proc/sys/net/netfilter")
_ESTABLISHED: Final = "nf_conntrack_tcp_timeout_established"
_CLOSE_WAIT: Final = "nf_conntrack_tcp_timeout_close_wait"

ALL_OF_IT: Final = "packet path"
"""The name under which a failure is told that is not one device's."""


class Netfilter(Protocol):
    """What netfilter does for packets; its ``ensure`` and ``differences`` say what was amiss."""

    def ensure(self) -> list[Difference]: ...
    def differences(self) -> list[Difference]: ...
    def remove(self) -> bool: ...
    def watch(self, wake: Callable[[], None]) -> None: ...
    def close(self) -> None: ...


class Carrier(Protocol):
    """Copies open flows into our tables, before programs are switched to them and behind that."""

    @property
    def pending(self) -> bool: ...
    def first(self) -> int: ...
    def second(self) -> int: ...
    def close(self) -> None: ...


class _Now(NamedTuple):
    """All that a decision depends on."""

    seen: Seen
    wanted: Wanted
    masquerade_all: bool
    families: frozenset[Family]


class PacketPath:
    """Used by one thread. ``wake`` is called from others when ``follow`` has something to do.

    ``carried`` is called when nothing needs another version's flow tables any more.
    """

    def __init__(
        self,
        options: EbpfOptions,
        maps: Mapping[str, Map],
        settings: Settings,
        *,
        prove: Prove,
        wake: Callable[[], None],
        netfilter: Netfilter,
        carrier: Carrier,
        carried: Callable[[], None],
    ) -> None:
        self._options = options
        self._carrier = carrier
        self._carried = carried
        self._settings = settings
        self._wake = wake
        self._netfilter = netfilter
        self._surroundings = Surroundings()
        self._devices = DevicePrograms(
            Tc(tcx=options.tcx),
            maps["devices"],
            {libbpf.map_info(one.fd, name).id for name, one in maps.items()},
            prove=prove,
        )
        self._watch = DeviceWatch(self._note_devices, _log.warning)
        self._watching = False
        self._seen: Seen | None = None
        self._maps = maps
        self._build = tc_build(maps)
        self._has_l3 = False
        self._programs: dict[str, int] = {}
        self._compiler: _Compiler | None = None
        self._hopeless: DatapathError | None = None
        self._netfilter_changed = threading.Event()
        self._done: _Now | None = None
        self._serves = self._is_withdrawn = False
        self._failure = ""
        self._surrounding_problems: frozenset[Problem] = frozenset()
        self._unread: frozenset[str] = frozenset()

    @property
    def is_carrying(self) -> bool:
        """Whether flows in tables of another version or size are still to be taken over."""
        return self._carrier.pending

    @property
    def problems(self) -> Mapping[str, str]:
        """What is not served, and why; any thread may ask."""
        failure = self._failure
        return {**self._devices.problems, **({ALL_OF_IT: failure} if failure else {})}

    # --- beginning ------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look at the devices. What is to be compiled is compiled by another thread."""
        self._settings.write(**self._numbers())
        if not self._carrier.pending:
            self._settings.set_state(0, of=_MIGRATING)  # an agent that was killed may have left it
        self._watching = True
        self._watch.start()
        if self._options.has_packet_path:
            self._netfilter.watch(self._note_netfilter)

    def _note_devices(self, seen: Seen) -> None:
        self._seen = seen
        self._wake()

    def _note_netfilter(self) -> None:
        self._netfilter_changed.set()
        self._wake()

    def _numbers(self) -> dict[str, int]:
        options = self._options
        return {
            "masquerade_mark": 1 << options.masquerade_bit,
            "reject_mark": 1 << options.reject_bit,
            # Ours must not end first: what came then would be nobody's, and be reset (CT-21).
            "tcp_timeout_ns": int(max(options.tcp_timeout_s, _seconds(_ESTABLISHED)) * 1e9),
            "tcp_closing_ns": int(max(options.tcp_closing_timeout_s, _seconds(_CLOSE_WAIT)) * 1e9),
        }

    # --- following ------------------------------------------------------------------------------

    def follow(self, plan: Plan) -> None:
        """After each sync: do what has become to be done. Raises nothing that is not fatal to all.

        Cheap where nothing has.
        """
        now = self._now(plan)
        if now is None:
            return
        compiled = self._compiler is not None and self._compiler.is_done
        if now == self._done and not compiled and not self._netfilter_changed.is_set():
            return
        self._try(now, everything=self._done is None or compiled)

    def _now(self, plan: Plan) -> _Now | None:
        if self._seen is None:
            return None  # they cannot be read, and the watch says so
        options = self._options
        return _Now(
            self._seen,
            Wanted(options.devices, options.pod_devices, plan.node_addresses, plan.pods),
            plan.masquerade_all,
            frozenset(name.family for name in plan.ports),
        )

    def _try(self, now: _Now, *, everything: bool) -> None:
        self._done = now
        try:
            self._do(now, everything=everything)
        except DatapathError as error:
            self._settings.set_state(0, of=_PROVED)
            if self._failure != str(error):
                _log.error("packets are not served; trying again", reason=str(error))
            self._failure = str(error)
            return
        if self._failure:
            _log.info("packets are served now")
        self._failure = ""

    def _do(self, now: _Now, *, everything: bool) -> None:
        if not self._options.has_packet_path:
            self._withdraw(now.seen)
            return
        devices = self._readable(decide(now.seen, now.wanted))
        if everything or self._netfilter_changed.is_set():
            self._netfilter_changed.clear()
            self._netfilter.ensure()
        if devices and not self._have_programs(devices):
            return  # they are being compiled
        self._say_surroundings(now, devices)
        is_all_new = self._settings.read().packet_programs != self._build.digest()
        if is_all_new:
            self._settings.write(packet_programs=0)
        everything |= is_all_new
        kept = self._state(devices)
        self._settings.set_state(kept, of=_OURS & ~_PROVED)
        with self._carrying(devices):
            self._devices.serve(devices, self._programs, now.seen.links, everything=everything)
        if devices:
            self._settings.write(packet_programs=self._build.digest())
        self._settings.set_state(kept | self._proved(now, devices), of=_OURS)
        if not self._serves and devices:
            self._serves = True
            uplinks = [one.name for one in devices if one.is_uplink]
            _log.info(
                "packets are served", uplinks=" ".join(uplinks), pods=len(devices) - len(uplinks)
            )

    @contextlib.contextmanager
    def _carrying(self, devices: Collection[Device]) -> Iterator[None]:
        """Open flows go with the programs to our tables.

        Until they are all there, a packet in the middle of a connection that nobody knows is
        dropped and sent again: to let it pass would have the connection reset (K6).
        """
        if not devices or not self._carrier.pending:
            yield
            return
        self._settings.set_state(_MIGRATING, of=_MIGRATING)
        self._carrier.first()
        yield
        self._carrier.second()
        self._end_carrying()

    def _end_carrying(self) -> None:
        self._settings.set_state(0, of=_MIGRATING)
        self._carrier.close()
        self._carried()

    def _readable(self, devices: Collection[Device]) -> tuple[Device, ...]:
        """Without those whose packets begin with something that no program of ours reads."""
        unread = frozenset(one.name for one in devices if one.header is Header.OTHER)
        for name in sorted(unread - self._unread):
            _log.warning("left alone: no Ethernet, and IP is not first either", device=name)
        self._unread = unread
        return tuple(one for one in devices if one.header is not Header.OTHER)

    # --- the programs ---------------------------------------------------------------------------

    def _have_programs(self, devices: Collection[Device]) -> bool:
        """Whether those that are needed are at hand; if not, it is begun to compile them."""
        needed = self._devices.names(devices)
        if not self._has_l3 and any(one.header is Header.NONE for one in devices):
            self._has_l3 = True
            self._build = tc_build(self._maps, l3=True)
        if self._hopeless is not None:
            raise self._hopeless
        if self._compiler is None and not needed <= self._programs.keys():
            if self._settings.read().packet_programs == self._build.digest():
                self._take_over(self._devices.running(devices))
            if not needed <= self._programs.keys():
                self._compiler = _Compiler(self._build, self._wake)
        if self._compiler is not None and self._compiler.is_done:
            compiler, self._compiler = self._compiler, None
            try:
                programs = compiler.programs()
            except DatapathError as error:
                self._hopeless = error if error.fatal else None
                raise
            try:
                self._devices.require_our_maps(programs)
            except DatapathError:
                close_all(programs)
                raise
            self._take_over(programs)
            if not needed <= self._programs.keys():  # a device of another kind came meanwhile
                self._compiler = _Compiler(self._build, self._wake)
        return self._compiler is None

    def _take_over(self, programs: Mapping[str, int]) -> None:
        close_all(self._programs)
        self._programs = dict(programs)

    # --- what the programs are told -------------------------------------------------------------

    def _state(self, devices: Collection[Device]) -> int:
        """What does not depend on a proof."""
        bits = _PING if self._options.ping else 0
        bits |= _KEEP_CLIENT if self._options.keep_client_local else 0
        if any(one.is_bridged for one in devices):
            for family, bit in _MASQUERADE_BRIDGED.items():
                if not self._surroundings.bridges_pass_netfilter(family):
                    bits |= bit
        return bits

    def _proved(self, now: _Now, devices: Collection[Device]) -> int:
        """What packets' programs have been seen to do, so that sockets' may count on it."""
        bits = 0
        for is_uplink, bit in ((False, _SEES_PODS), (True, _SEES_HOST)):
            there = [one for one in devices if one.is_uplink is is_uplink and one.is_up]
            # One that has just come or gone is neither proved nor silent.
            if any(map(self._devices.is_proved, there)) and not any(
                one.name in self._devices.problems for one in there
            ):
                bits |= bit
        if bits & _SEES_PODS and (self._options.socket_lb != "all" or now.masquerade_all):
            bits |= _PODS_BY_PACKET
        return bits

    def _say_surroundings(self, now: _Now, devices: Collection[Device]) -> None:
        found = frozenset(
            self._surroundings.problems(devices, families=now.families, defaults=now.seen.defaults)
        )
        for one in sorted(found - self._surrounding_problems):
            _log.warning("a sysctl eats packets", sysctl=one.sysctl, effect=one.effect)
        self._surrounding_problems = found

    # --- auditing -------------------------------------------------------------------------------

    def audit(self, plan: Plan) -> list[Difference]:
        """Compare, and mend; what failed before is tried again, and is no difference."""
        self.follow(plan)  # what has just come or gone is no difference
        now = self._done
        if now is None:
            return []
        found = []
        if self._serves and not self._failure:
            try:
                devices = self._readable(decide(now.seen, now.wanted))
                found = self._devices.differences(devices, now.seen.links)
                found += self._netfilter.differences()
            except DatapathError as error:
                _log.error("packets' programs cannot be looked at", reason=str(error))
        self._try(now, everything=True)
        return found

    # --- the end --------------------------------------------------------------------------------

    def _withdraw(self, seen: Seen) -> None:
        """There is to be no packet path: take away what an agent before has put there."""
        if self._is_withdrawn:
            return
        self._settings.set_state(0, of=_OURS)
        self._devices.remove_all(seen.links)
        self._settings.write(packet_programs=0)
        self._netfilter.remove()
        if self._carrier.pending:
            self._end_carrying()
        self._is_withdrawn = True

    def close(self) -> None:
        """End the threads; what is attached stays."""
        if self._watching:
            self._watch.stop()
        if self._compiler is not None:
            self._compiler.cancel()
        self._netfilter.close()
        self._carrier.close()
        self._devices.close()
        close_all(self._programs)


class _Compiler:
    """Compiles in a child that a thread waits for, which then calls ``wake``."""

    def __init__(self, build: loader.Build, wake: Callable[[], None]) -> None:
        self._loading = loader.Loading(build)
        self._wake = wake
        self._programs: dict[str, int] = {}
        self._error: DatapathError | None = None
        self._thread = threading.Thread(target=self._run, name="compiler", daemon=True)
        self._done = threading.Event()
        self._thread.start()

    def _run(self) -> None:
        try:
            self._programs = self._loading.wait()
        except DatapathError as error:
            self._error = error
        self._done.set()
        self._wake()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def programs(self) -> dict[str, int]:
        """Descriptors by name, the caller's from now on. Raises DatapathError."""
        if self._error is not None:
            raise self._error
        return self._programs

    def cancel(self) -> None:
        self._loading.cancel()
        self._thread.join()
        close_all(self._programs)


def _seconds(name: str) -> float:
    """netfilter's own time-out, 0 where this kernel has no conntrack."""
    with contextlib.suppress(OSError, ValueError):
        return float((_NETFILTER / name).read_text())
    return 0.0
