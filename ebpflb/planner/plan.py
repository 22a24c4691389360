# SPDX-License-Identifier: Apache-2.0
"""From events to the plan, one Service at a time.

What is remembered between updates changes nothing but speed: a planner that is told the same
objects anew, in any order, comes to the same plan. It must not know where events come from, what a
datapath does with a plan, or what time it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType
from typing import TypeVar

import msgspec

from ebpflb.model import (
    Event,
    FrontendKind,
    HealthCheck,
    ObjectKey,
    Plan,
    PlannedPort,
    Rejected,
    Service,
    ServicePortName,
)
from ebpflb.planner.cluster import Cluster, Entry
from ebpflb.planner.endpoints import usable_endpoints
from ebpflb.planner.frontends import Claims, Wanted, WantedPort, external_ips, wanted_by
from ebpflb.planner.health import health_check
from ebpflb.planner.here import look
from ebpflb.planner.options import PlannerOptions
from ebpflb.planner.topology import select


class PlanUpdate(msgspec.Struct, frozen=True):
    """The plan, and how it differs from the last one.

    ``plan`` is the planner's own: its mappings are views that the next update changes. ``changed``
    holds every service port whose planned port is new, different or gone, and no other; the plan's
    other parts are few and are to be compared. ``rejected`` are the objects or parts of
    objects that have become unserved, ``mended`` those that no longer are; both are sorted.
    """

    plan: Plan
    changed: frozenset[ServicePortName]
    rejected: tuple[Rejected, ...]
    mended: tuple[Rejected, ...]


class Planner:
    """The plan for one node: ``apply`` events, then ask for an ``update``.

    ``plan`` and ``rejected`` are as the last update left them.
    """

    def __init__(self, options: PlannerOptions) -> None:
        self._options = options
        self._cluster = Cluster(options.node_name)
        self._external_ips = external_ips(options)
        self._claims = Claims()
        self._wanted: dict[ObjectKey, Wanted] = {}
        self._ports: dict[ServicePortName, PlannedPort] = {}
        self._health_checks: dict[ObjectKey, HealthCheck] = {}
        self._unserved: dict[ObjectKey, tuple[str, ...]] = {}
        self._rejected: dict[ObjectKey, tuple[str, ...]] = {}
        self._here = look(options, None, frozenset())
        self.plan = self._whole_plan()

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
        if changes.here:
            dirty |= self._look_around()
        changed: set[ServicePortName] = set()
        for key in dirty:
            changed |= self._replan(key, before.get(key, Wanted()))
        rejected, mended = self._review(dirty | changes.objects)
        return PlanUpdate(self.plan, frozenset(changed), rejected, mended)

    def _look_around(self) -> set[ObjectKey]:
        """Plan what concerns the node itself; return the Services for which it has changed."""
        before = self._here
        now = look(self._options, self._cluster.node, self._cluster.local_addresses)
        if now == before:
            return set()
        self._here = now
        self.plan = self._whole_plan()
        dirty: set[ObjectKey] = set()
        if now.zone != before.zone:  # TOP-11
            hinted = (entry for entry in self._cluster.entries() if _has_hints(entry))
            dirty.update(entry.key for entry in hinted)
        if now.addresses != before.addresses:
            guarded = (entry for entry in self._cluster.entries() if _is_guarded(entry))
            dirty.update(entry.key for entry in guarded)
        return dirty

    def _whole_plan(self) -> Plan:
        return Plan(
            ports=MappingProxyType(self._ports),
            node_ports=self._here.node_ports,
            node_addresses=self._here.named,
            pods=self._here.pods,
            masquerade_all=self._options.masquerade_all,
            health_checks=MappingProxyType(self._health_checks),
        )

    def _claim_anew(self, key: ObjectKey) -> None:
        entry = self._cluster.entry(key)
        service = entry.service if entry else None
        self._claims.withdraw(self._wanted.pop(key, Wanted()))
        if service is not None:
            self._wanted[key] = wanted = wanted_by(service, self._external_ips)
            self._claims.add(wanted)

    def _replan(self, key: ObjectKey, before: Wanted) -> set[ServicePortName]:
        """Plan one Service; return which of its ports, those it had ``before`` too, changed."""
        wanted = self._wanted.get(key, Wanted())
        entry = self._cluster.entry(key)
        planned, unserved = self._planned_ports(entry, wanted)
        names = {port.name for port in (*before.ports, *wanted.ports)}
        changed = {name for name in names if self._ports.get(name) != planned.get(name)}
        for name in changed:
            if name in planned:
                self._ports[name] = planned[name]
            else:
                del self._ports[name]
        _put(self._unserved, key, unserved)
        _put(self._health_checks, key, self._health_check(entry) if wanted.ports else None)
        return changed

    def _planned_ports(
        self, entry: Entry | None, wanted: Wanted
    ) -> tuple[dict[ServicePortName, PlannedPort], tuple[str, ...]]:
        """One Service's planned ports, and what of it cannot be served."""
        if entry is None or entry.service is None:
            return {}, ()
        planned: dict[ServicePortName, PlannedPort] = {}
        unserved = list(wanted.problems)
        for port in wanted.ports:
            frontends, losses = self._claims.split(port)
            unserved += losses
            if frontends:
                had = msgspec.structs.replace(port, frontends=frontends)
                planned[port.name] = self._planned_port(had, entry, entry.service)
        return planned, tuple(unserved)

    def _planned_port(self, port: WantedPort, entry: Entry, service: Service) -> PlannedPort:
        node, here = self._options.node_name, self._here
        endpoints = usable_endpoints(entry.slices, port.name, node=node)
        choice = select(endpoints, node=node, zone=here.zone)
        guards = any(each.kind is FrontendKind.LOAD_BALANCER for each in port.frontends)
        ranges = tuple(
            each for each in service.source_ranges if guards and each.family is port.name.family
        )
        if any(each.admits_all for each in ranges):
            ranges = ()
        return PlannedPort(
            name=port.name,
            frontends=port.frontends,
            cluster=choice.cluster,
            local=choice.local,
            draining=choice.draining,
            affinity_s=service.affinity_s,
            internal_policy=service.internal_policy,
            external_policy=service.external_policy,
            socket_lb=service.socket_lb,
            source_ranges=ranges,
            node_in_ranges=not ranges
            or any(address in each for each in ranges for address in here.addresses),
        )

    def _health_check(self, entry: Entry | None) -> HealthCheck | None:
        if entry is None or entry.service is None:
            return None
        return health_check(entry.service, entry.slices, node=self._options.node_name)

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


def _has_hints(entry: Entry) -> bool:
    return any(piece.hints for piece in entry.slices)


def _is_guarded(entry: Entry) -> bool:
    return entry.service is not None and bool(entry.service.source_ranges)


_Value = TypeVar("_Value")


def _put(table: dict[ObjectKey, _Value], key: ObjectKey, value: _Value | None) -> None:
    """Keep ``value`` under ``key``, and nothing where it is nothing."""
    if value:
        table[key] = value
    else:
        table.pop(key, None)


def _sorted(reasons: Iterable[tuple[ObjectKey, Iterable[str]]]) -> tuple[Rejected, ...]:
    return tuple(sorted(Rejected(key, text) for key, texts in reasons for text in texts))
