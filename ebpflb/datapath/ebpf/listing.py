# SPDX-License-Identifier: Apache-2.0
"""What runs at tc of this network namespace's devices, for the commands: ours, others, the order.

Only looks. The members of the structs are JSON keys. This file must not know which devices should
have programs.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import abi, devices
from ebpflb.datapath.ebpf.deviceprograms import compare
from ebpflb.datapath.ebpf.devices import Header, Link, Wanted
from ebpflb.datapath.ebpf.maps import Map
from ebpflb.datapath.ebpf.tc import CLSACT, TCX, At, Direction, Hook, Place, Tc, priority_of
from ebpflb.errors import DatapathError
from ebpflb.model import Plan

_UPLINK = abi.CONSTANTS["DEVICE_UPLINK"]
_BRIDGED = abi.CONSTANTS["DEVICE_BRIDGED"]
_EGRESS_FIRST = abi.CONSTANTS["DEVICE_EGRESS_FIRST"]


class PacketHook(msgspec.Struct, frozen=True):
    """One direction of a device. ``way`` is tcx or clsact, "" where no program of ours runs.

    ``before`` and ``behind`` are others' programs and filters, as they run around ours; where none
    of ours runs all are in ``before``. ``possible`` is the order that ours can have: at ingress
    first is best, at egress last.
    """

    direction: str
    program: str
    program_id: int
    way: str
    before: list[str]
    behind: list[str]
    possible: str
    state: str


class PacketDevice(msgspec.Struct, frozen=True):
    """``role`` is uplink, pod, or bridged pod; "" where nothing of ours is on it."""

    device: str
    index: int
    role: str
    hooks: list[PacketHook]


def describe(
    tc: Tc, link: Link, *, role: str = "", map_ids: Collection[int] = (), is_forced: bool = False
) -> PacketDevice:
    """All that runs at a device. Raises DatapathError: ENODEV where it is gone.

    With ``map_ids`` a program of ours on others is said to be one. ``is_forced``: another's program
    ends the chain at egress.
    """
    hooks = []
    for direction in Direction:
        hook = tc.look(At(link.number, link.name, direction))
        ours = hook.ours[0] if hook.ours else None
        hooks.append(
            PacketHook(
                direction=direction.value,
                program=ours.name if ours else "",
                program_id=ours.program if ours else 0,
                way=ours.way if ours else "",
                before=[str(one) for one in (hook.before if ours else hook.others)],
                behind=[str(one) for one in hook.behind],
                possible=_possible(direction, hook, is_forced=is_forced),
                state=_state(hook, frozenset(map_ids)),
            )
        )
    return PacketDevice(link.name, link.number, role, hooks)


def _state(hook: Hook, map_ids: frozenset[int]) -> str:
    if not hook.ours:
        return "not attached"
    if len(hook.ours) > 1:
        return f"{len(hook.ours)} copies"
    if map_ids and not hook.ours[0].map_ids <= map_ids:
        return "runs on other maps than those pinned"
    return "attached"


def _possible(direction: Direction, hook: Hook, *, is_forced: bool) -> str:
    if direction is Direction.EGRESS and is_forced:
        return "before others, of whom one ends the chain"
    if direction is Direction.EGRESS and hook.qdisc not in {"", CLSACT}:
        known = hook.has_tcx
        return f"last, by {TCX}" if known else f"none: its qdisc is of kind {hook.qdisc}"
    if direction is Direction.EGRESS:
        filters = any(not one.is_ours for one in hook.of(CLSACT))
        return f"last, by {TCX if hook.has_tcx and not filters else CLSACT}"
    if hook.has_tcx:
        return f"first, by {TCX}"
    priority = priority_of(hook, Place.FIRST)
    behind = [str(one) for one in hook.others if one.priority < priority]
    return f"behind {', '.join(behind)}" if behind else f"first, by {CLSACT}"


def attached(roles: Iterable[tuple[int, int]], map_ids: Collection[int]) -> list[PacketDevice]:
    """The devices with a program of ours or a role in `devices`, by name.

    ``roles`` are (index, role) as that map has them. Raises DatapathError.
    """
    told: dict[int, set[int]] = {}
    for number, role in roles:
        told.setdefault(number, set()).add(role)
    tc = Tc()
    try:
        found = [
            describe(
                tc,
                link,
                role=_role(told.get(link.number, set())),
                map_ids=map_ids,
                is_forced=_EGRESS_FIRST in told.get(link.number, ()),
            )
            for link in _links()
            if link.number in told or _has_ours(tc, link)
        ]
    finally:
        tc.close()
    return sorted(found, key=lambda one: (one.role != "uplink", one.device))


def _role(roles: Collection[int]) -> str:
    if _UPLINK in roles:
        return "uplink"
    return "bridged pod" if _BRIDGED in roles else "pod"


def _has_ours(tc: Tc, link: Link) -> bool:
    try:
        return any(tc.look(At(link.number, link.name, one)).ours for one in Direction)
    except DatapathError as error:
        if error.errno == errno.ENODEV:
            return False
        raise


def _links() -> Collection[Link]:
    try:
        return devices.look().links
    except OSError as error:
        raise DatapathError("read", "this node's devices", error.errno or 0) from None


def remove_all() -> list[str]:
    """Take every program of ours off every device, and a clsact that is empty then.

    Returns the hooks. New flows end first: ingress before egress. Raises DatapathError.
    """
    tc = Tc()
    removed = []
    try:
        for direction in (Direction.INGRESS, Direction.EGRESS):
            for link in _links():
                at = At(link.number, link.name, direction)
                removed += [at] if _remove(tc, at) else []
        for at in removed:
            tc.remove_empty_qdisc(at)
    finally:
        tc.close()
    return [str(at) for at in sorted(removed, key=lambda at: (at.device, at.direction.value))]


def _remove(tc: Tc, at: At) -> int:
    try:
        return tc.remove(at)
    except DatapathError as error:
        if error.errno == errno.ENODEV:
            return 0
        raise


def differences(
    plan: Plan, left: Mapping[str, object], table: Map, map_ids: Collection[int]
) -> Iterator[Difference]:
    """What of the packet path is not as the agent, which ``left`` word of it, wants it.

    Raises DatapathError.
    """
    uplinks, pods = _patterns(left, "devices"), _patterns(left, "pod_devices")
    try:
        seen = devices.look()
    except OSError as error:
        raise DatapathError("read", "this node's devices", error.errno or 0) from None
    wanted = Wanted(uplinks, pods, plan.node_addresses, plan.pods)
    served = [one for one in devices.decide(seen, wanted) if one.header is not Header.OTHER]
    tc = Tc()
    try:
        yield from compare(tc, table, map_ids, served, seen.links)
    finally:
        tc.close()


def _patterns(left: Mapping[str, object], name: str) -> tuple[str, ...] | None:
    found = left.get(name)
    return tuple(map(str, found)) if isinstance(found, list) else None
