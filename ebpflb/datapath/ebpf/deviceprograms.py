# SPDX-License-Identifier: Apache-2.0
"""The packet programs on the devices that are to have them: put there, proved, taken away.

What a device is to the programs is in the map `devices`. One device's trouble is its own: all
others are served. This file must not know which devices are wanted, nor whence the programs come.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Final, Protocol

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import abi, libbpf
from ebpflb.datapath.ebpf.devices import Device, Header, Link
from ebpflb.datapath.ebpf.maps import Map
from ebpflb.datapath.ebpf.programs import EGRESS, EGRESS_L3, INGRESS, INGRESS_L3
from ebpflb.datapath.ebpf.tc import At, Direction, Hook, Place, Tc
from ebpflb.errors import DatapathError
from ebpflb.logs import Log

_log = Log("packets")

_KEY: Final = abi.LAYOUTS["device_key"]
_NOTHING: Final = bytes(abi.LAYOUTS["device"].size)
_EGRESS_FIRST: Final = abi.CONSTANTS["DEVICE_EGRESS_FIRST"]
_OF_OTHERS: Final = frozenset({_EGRESS_FIRST})
"""Roles that are not decided with the devices."""

# An answer's program is there before one that makes flows, and goes after it.
_ATTACH_ORDER: Final = (Direction.EGRESS, Direction.INGRESS)
_NAMES: Final[Mapping[tuple[Header, Direction], str]] = {
    (Header.ETHERNET, Direction.INGRESS): INGRESS,
    (Header.ETHERNET, Direction.EGRESS): EGRESS,
    (Header.NONE, Direction.INGRESS): INGRESS_L3,
    (Header.NONE, Direction.EGRESS): EGRESS_L3,
}


class Prove(Protocol):
    """The hooks of a device at which ours runs. Raises OSError."""

    def __call__(self, device: Device, /, *, was_silent: bool) -> frozenset[Direction]: ...


class DevicePrograms:
    """What runs on this network namespace's devices. ``map_ids`` are the kernel's, of our maps."""

    def __init__(self, tc: Tc, devices: Map, map_ids: Collection[int], *, prove: Prove) -> None:
        self._tc = tc
        self._map = devices
        self._map_ids = frozenset(map_ids)
        self._prove = prove
        self._attached: dict[int, Device] = {}
        self._proved: set[int] = set()
        self._settled: dict[At, frozenset[object]] = {}
        self._problems: dict[str, str] = {}

    @property
    def problems(self) -> Mapping[str, str]:
        """What is wrong with which device; any thread may look."""
        return self._problems

    @property
    def attached(self) -> Collection[Device]:
        return self._attached.values()

    def is_proved(self, device: Device) -> bool:
        """Whether both its programs have been seen to run."""
        return device.number in self._proved

    # --- which programs -------------------------------------------------------------------------

    @staticmethod
    def names(devices: Iterable[Device]) -> frozenset[str]:
        """The programs that these devices need."""
        return frozenset(_NAMES[one.header, at] for one in devices for at in Direction)

    def running(self, devices: Iterable[Device]) -> dict[str, int]:
        """Descriptors, by name, of programs of our maps that run there already."""
        found: dict[str, int] = {}
        for _, hook in _hooks(self._tc, devices):
            for one in hook.ours:
                if one.name not in found and self._is_of_our_maps(one.map_ids):
                    found[one.name] = libbpf.prog_by_id(one.program)
        return found

    def require_our_maps(self, programs: Mapping[str, int]) -> None:
        """Raises DatapathError where a program (descriptors by name) was made for other maps.

        A loader that finds no pin makes a map of its own.
        """
        for name, fd in programs.items():
            if not self._is_of_our_maps(libbpf.prog_info(fd).map_ids):
                raise DatapathError(
                    "attach", name, hint="it was made for other maps than those that are open"
                )

    def _is_of_our_maps(self, map_ids: frozenset[int]) -> bool:
        return bool(map_ids) and map_ids <= self._map_ids

    # --- putting them there ---------------------------------------------------------------------

    def serve(
        self,
        devices: Collection[Device],
        programs: Mapping[str, int],
        links: Iterable[Link],
        *,
        everything: bool,
    ) -> None:
        """Let these devices, and no others, run the programs (descriptors by name), and prove it.

        With ``everything`` all is looked at, else what is new. Raises DatapathError where it is not
        one device's trouble.
        """
        wanted = {one.number: one for one in devices}
        new = [one for one in devices if everything or self._attached.get(one.number) != one]
        told = roles_in(self._map)
        firsts = {number for number, role in told if role == _EGRESS_FIRST}
        roles = {(one.number, role) for one in devices for role in one.roles}
        numbers = {one.number for one in new}
        self._tell({(number, role) for number, role in roles - told if number in numbers})
        for direction in _ATTACH_ORDER:
            for one in new:
                self._attach(one, direction, programs, firsts)
        gone = self._attached.keys() - wanted.keys()
        for link in links:
            if link.number not in wanted and (everything or link.number in gone):
                self._detach(link)
        self._forget(gone, wanted)
        self._untell(told - roles - {(number, _EGRESS_FIRST) for number in wanted})
        for one in devices:
            if one.is_up and (one in new or one.number not in self._proved):
                self._prove_and_say(one, programs)

    def _attach(
        self,
        device: Device,
        direction: Direction,
        programs: Mapping[str, int],
        firsts: Collection[int],
    ) -> None:
        at = At(device.number, device.name, direction)
        program = programs[_NAMES[device.header, direction]]
        place = Place.FIRST if direction is Direction.INGRESS else Place.LAST
        try:
            company = frozenset((one.program, one.priority) for one in self._tc.look(at).others)
            if direction is Direction.EGRESS and device.number in firsts:
                if company:
                    place = Place.FIRST
                else:  # whoever forced it there is gone
                    self._untell([(device.number, _EGRESS_FIRST)])
            # Others may want the same place: ours is moved once for each company that it has.
            move = self._settled.get(at) != company
            if self._tc.ensure(at, program, place, move=move):
                self._proved.discard(device.number)
            self._settled[at] = company
        except DatapathError as error:
            if error.fatal:
                raise
            self._proved.discard(device.number)
            if error.errno != errno.ENODEV:  # gone: the next look at the devices tells it
                self._complain(device, str(error))
            return
        self._attached[device.number] = device

    def _detach(self, link: Link) -> None:
        for direction in reversed(_ATTACH_ORDER):
            at = At(link.number, link.name, direction)
            try:
                removed = self._tc.remove(at)
            except DatapathError as error:
                if error.errno == errno.ENODEV:
                    return
                raise
            if removed:
                _log.info("detached: not a device of ours any more", hook=str(at))

    def _forget(self, gone: Iterable[int], wanted: Mapping[int, Device]) -> None:
        for number in gone:
            self._attached.pop(number)
        self._proved &= wanted.keys()
        self._settled = {at: known for at, known in self._settled.items() if at.number in wanted}
        names = {one.name for one in wanted.values()}
        self._problems = {name: text for name, text in self._problems.items() if name in names}

    def remove_all(self, links: Iterable[Link]) -> None:
        """Take every program of ours away, and what the map says of the devices."""
        for link in links:
            self._detach(link)
        self._forget(list(self._attached), {})
        self._untell(roles_in(self._map))

    # --- proving --------------------------------------------------------------------------------

    def _prove_and_say(self, device: Device, programs: Mapping[str, int]) -> None:
        if device.number not in self._attached:
            return
        try:
            was_silent = device.name in self._problems
            runs = self._prove(device, was_silent=was_silent)
            if Direction.EGRESS not in runs and self._put_first(device, programs):
                runs = self._prove(device, was_silent=was_silent)
        except OSError:  # it went, or down: the next look at the devices tells it
            self._proved.discard(device.number)
            return
        if runs == frozenset(Direction):
            self._proved.add(device.number)
            if self._problems.pop(device.name, ""):
                _log.info("the packet programs run now", device=device.name)
            return
        self._proved.discard(device.number)
        silent = Direction.INGRESS if Direction.EGRESS in runs else Direction.EGRESS
        at = At(device.number, device.name, silent)
        before = ", ".join(map(str, self._tc.look(at).before))
        why = f"before it runs {before}" if before else "nothing of others is before it"
        self._complain(device, f"a packet of our own does not reach the program at {at}: {why}")

    def _put_first(self, device: Device, programs: Mapping[str, int]) -> bool:
        """Before those at egress that let nobody run behind them (K12)."""
        at = At(device.number, device.name, Direction.EGRESS)
        before = self._tc.look(at).before
        if not before:
            return False
        self._tell({(device.number, _EGRESS_FIRST)})
        self._tc.ensure(at, programs[_NAMES[device.header, Direction.EGRESS]], Place.FIRST)
        _log.warning(
            "another's program ends the chain at egress; ours runs before it",
            device=device.name,
            effect="theirs sees answers with the Service's address",
            behind=", ".join(map(str, before)),
        )
        return True

    def _complain(self, device: Device, text: str) -> None:
        if self._problems.get(device.name) != text:
            _log.error("no packets are served here", device=device.name, reason=text)
        self._problems = {**self._problems, device.name: text}

    # --- the map --------------------------------------------------------------------------------

    def _tell(self, roles: Collection[tuple[int, int]]) -> None:
        if roles:
            self._map.update([(_KEY.pack(*one), _NOTHING) for one in sorted(roles)])

    def _untell(self, roles: Iterable[tuple[int, int]]) -> None:
        for one in roles:
            self._map.delete(_KEY.pack(*one))

    def differences(self, devices: Collection[Device], links: Iterable[Link]) -> list[Difference]:
        """Where not exactly one program of ours, on these very maps, runs as it should."""
        return list(compare(self._tc, self._map, self._map_ids, devices, links))

    def close(self) -> None:
        self._tc.close()


def compare(
    tc: Tc,
    table: Map,
    map_ids: Collection[int],
    devices: Collection[Device],
    links: Iterable[Link],
) -> Iterator[Difference]:
    """What differs from these devices having exactly one program at each hook, and no others any.

    ``table`` is `devices`, ``map_ids`` are the kernel's, of the maps that programs should run on.
    """
    for at, hook in _hooks(tc, devices):
        yield from _differences(at, hook, frozenset(map_ids))
    wanted = {one.number for one in devices}
    for at, hook in _hooks(tc, (link for link in links if link.number not in wanted)):
        if hook.ours:
            yield Difference("", f"tc {at}", "program", "", "attached")
    told = {one for one in roles_in(table) if one[1] not in _OF_OTHERS}
    roles = {(one.number, role) for one in devices for role in one.roles}
    words = abi.names_of("DEVICE_")
    for number, role in sorted(told ^ roles):
        word = words.get(role, str(role))
        is_missing = (number, role) in roles
        yield Difference(
            "",
            "devices",
            f"device {number}",
            word if is_missing else "",
            "" if is_missing else word,
        )


def _differences(at: At, hook: Hook, map_ids: frozenset[int]) -> Iterator[Difference]:
    where = f"tc {at}"
    if not hook.ours:
        yield Difference("", where, "program", "attached", "not attached")
    elif len(hook.ours) > 1:
        yield Difference("", where, "program", "one copy", f"{len(hook.ours)} copies")
    elif not hook.ours[0].map_ids or not hook.ours[0].map_ids <= map_ids:
        uses = f"program {hook.ours[0].program} uses others"
        yield Difference("", where, "maps", "those pinned", uses)


def roles_in(table: Map) -> set[tuple[int, int]]:
    """(index, role) of every entry of `devices`."""
    keys: Iterator[Any] = (_KEY.unpack(key) for key, _ in table.items())
    return {(key.index, key.role) for key in keys}


def _hooks(tc: Tc, devices: Iterable[Device | Link]) -> Iterator[tuple[At, Hook]]:
    """What runs at each; a device that goes meanwhile is left out."""
    for one in devices:
        for direction in Direction:
            at = At(one.number, one.name, direction)
            try:
                hook = tc.look(at)
            except DatapathError as error:
                if error.errno != errno.ENODEV:
                    raise
                break
            yield at, hook


def close_all(programs: Mapping[str, int]) -> None:
    for fd in programs.values():
        os.close(fd)
