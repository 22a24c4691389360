# SPDX-License-Identifier: Apache-2.0
"""From events to the plan, one Service at a time.

What is remembered between updates changes nothing but speed: a planner that is told the same
objects anew, in any order, comes to the same plan. It must not know where events come from, what a
datapath does with a plan, or what time it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

import msgspec

from ebpflb.model import Event, ObjectKey, Plan, PlannedPort, Rejected, ServicePortName
from ebpflb.planner.cluster import Cluster, Entry
from ebpflb.planner.endpoints import usable_endpoints
from ebpflb.planner.frontends import Claims, Wanted, wanted_by
from ebpflb.planner.topology import select


class PlanUpdate(msgspec.Struct, frozen=True):
    """The plan, and how it differs from the last one.

    ``plan`` is a view that the next update changes. ``changed`` holds every service port whose
    planned port is new, different or gone, and no other. ``rejected`` are the objects or parts of
    objects that have become unserved, ``mended`` those that no longer are; both are sorted.
    """

    plan: Plan
    changed: frozenset[ServicePortName]
    rejected: tuple[Rejected, ...]
    mended: tuple[Rejected, ...]


class Planner:
    """The plan for the node called ``node_name``: ``apply`` events, then ask for an ``update``.

    ``plan`` and ``rejected`` are as the last update left them.
    """

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name
        self._cluster = Cluster()
        self._claims = Claims()
        self._wanted: dict[ObjectKey, Wanted] = {}
        self._ports: dict[ServicePortName, PlannedPort] = {}
        self._unserved: dict[ObjectKey, tuple[str, ...]] = {}
        self._rejected: dict[ObjectKey, tuple[str, ...]] = {}
        self.plan = Plan(MappingProxyType(self._ports))

    @property
    def rejected(self) -> tuple[Rejected, ...]:
        """Everything that is not served, and why, sorted."""
        return _sorted(self._rejected.items())

    @property
    def rejected_count(self) -> int:
        """How many entries ``rejected`` has."""
        return sum(map(len, self._rejected.values()))

    def apply(self, event: Event) -> None:
        """Take in one event; ``update`` shows what comes of it."""
        self._cluster.apply(event)

    def update(self) -> PlanUpdate:
        """Plan anew what the events since the last update have touched."""
        changes = self._cluster.take_changes()
        before = {key: self._wanted.get(key, Wanted()) for key in changes.services}
        for key in changes.services:
            self._claim_anew(key)
        dirty = changes.services | changes.endpoints | self._claims.take_affected()
        changed: set[ServicePortName] = set()
        for key in dirty:
            changed |= self._replan(key, before.get(key, Wanted()))
        rejected, mended = self._review(dirty | changes.objects)
        return PlanUpdate(self.plan, frozenset(changed), rejected, mended)

    def _claim_anew(self, key: ObjectKey) -> None:
        entry = self._cluster.entry(key)
        service = entry.service if entry else None
        self._claims.withdraw(self._wanted.pop(key, Wanted()))
        if service is not None:
            self._wanted[key] = wanted = wanted_by(service)
            self._claims.add(wanted)

    def _replan(self, key: ObjectKey, before: Wanted) -> set[ServicePortName]:
        """Plan one Service; return which of its ports, those it had ``before`` too, changed."""
        wanted = self._wanted.get(key, Wanted())
        planned, unserved = self._planned_ports(self._cluster.entry(key), wanted)
        names = {port.name for port in (*before.ports, *wanted.ports)}
        changed = {name for name in names if self._ports.get(name) != planned.get(name)}
        for name in changed:
            if name in planned:
                self._ports[name] = planned[name]
            else:
                del self._ports[name]
        _put(self._unserved, key, unserved)
        return changed

    def _planned_ports(
        self, entry: Entry | None, wanted: Wanted
    ) -> tuple[dict[ServicePortName, PlannedPort], tuple[str, ...]]:
        """One Service's planned ports, and what of it cannot be served."""
        if entry is None or entry.service is None:
            return {}, ()
        service = entry.service
        planned: dict[ServicePortName, PlannedPort] = {}
        unserved = list(wanted.problems)
        for port in wanted.ports:
            frontends, losses = self._claims.split(port)
            unserved += losses
            if not frontends:
                continue
            choice = select(
                usable_endpoints(entry.slices, port.name, node=self._node_name),
                internal_policy=service.internal_policy,
                external_policy=service.external_policy,
                externally_accessible=False,
            )
            planned[port.name] = PlannedPort(
                name=port.name,
                frontends=frontends,
                internal=choice.internal,
                external=choice.external,
                draining=choice.draining,
                affinity_s=service.affinity_s,
                internal_policy=service.internal_policy,
                external_policy=service.external_policy,
                socket_lb=service.socket_lb,
            )
        return planned, tuple(unserved)

    def _review(
        self, keys: Iterable[ObjectKey]
    ) -> tuple[tuple[Rejected, ...], tuple[Rejected, ...]]:
        """What has become unserved among ``keys``, and what no longer is."""
        new: list[tuple[ObjectKey, Iterable[str]]] = []
        old: list[tuple[ObjectKey, Iterable[str]]] = []
        for key in keys:
            before = self._rejected.get(key, ())
            texts = (*self._cluster.problems(key), *self._unserved.get(key, ()))
            now = tuple(dict.fromkeys(texts))
            if before == now:
                continue
            new.append((key, set(now) - set(before)))
            old.append((key, set(before) - set(now)))
            _put(self._rejected, key, now)
        return _sorted(new), _sorted(old)


def _put(table: dict[ObjectKey, tuple[str, ...]], key: ObjectKey, texts: tuple[str, ...]) -> None:
    """Keep ``texts`` under ``key``, and nothing where there are none."""
    if texts:
        table[key] = texts
    else:
        table.pop(key, None)


def _sorted(reasons: Iterable[tuple[ObjectKey, Iterable[str]]]) -> tuple[Rejected, ...]:
    return tuple(sorted(Rejected(key, text) for key, texts in reasons for text in texts))
