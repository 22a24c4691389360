# SPDX-License-Identifier: Apache-2.0
"""What clients dial to reach a Service, and whose an address and port is when two want it.

It must not know endpoints, nor which Services have changed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

import msgspec

from ebpflb.model import (
    Address,
    Frontend,
    FrontendKind,
    ObjectKey,
    Protocol,
    Service,
    ServicePort,
    ServicePortName,
    family_of,
    format_endpoint,
)


class WantedPort(msgspec.Struct, frozen=True, gc=False):
    """One service port of one family and the frontends that it asks for.

    ``created`` is its Service's creation time, ``index`` its position in the Service.
    """

    name: ServicePortName
    frontends: tuple[Frontend, ...]
    created: str
    index: int


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """All that a Service asks for; ``problems`` says which of its ports cannot be told apart."""

    ports: tuple[WantedPort, ...] = ()
    problems: tuple[str, ...] = ()


def wanted_by(service: Service | None) -> Wanted:
    """Return the service ports of ``service`` in its own order, one for each family it has.

    Of two ports with one name and protocol, which are one service port (PORT-01), the first counts.
    """
    if service is None:
        return Wanted()
    ports: dict[ServicePortName, WantedPort] = {}
    problems: list[str] = []
    for port in service.ports:
        for address in service.cluster_ips:
            name = ServicePortName(
                service.namespace, service.name, port.name, port.protocol, family_of(address)
            )
            if name in ports:
                problems.append(_same_name(port, name))
                continue
            frontends = tuple(_frontends(port, address))
            ports[name] = WantedPort(name, frontends, service.created, len(ports))
    return Wanted(tuple(ports.values()), tuple(problems))


def _frontends(port: ServicePort, cluster_ip: Address) -> Iterator[Frontend]:
    """One service port's frontends of the ClusterIP's family."""
    yield Frontend(cluster_ip, port.port, port.protocol, FrontendKind.CLUSTER_IP)


def _same_name(port: ServicePort, name: ServicePortName) -> str:
    return (
        f"port {port.port}/{port.protocol.name} ({name.family.label}) is not served: an earlier "
        f"{port.protocol.name} port has the same name {port.name!r}"
    )


# --- claims --------------------------------------------------------------------------------------

_Place = tuple[Address, int, Protocol]


class Claims:
    """Who wants which address, port and protocol, and who has it.

    The Service that was created first has it; of two as old, or without a creation time (which
    count as the youngest), the first by namespace and name; inside one Service the first port.
    Whoever comes second waits, and has it when the first one goes.
    """

    def __init__(self) -> None:
        self._owners: dict[_Place, WantedPort] = {}
        self._waiting: dict[_Place, list[WantedPort]] = {}
        self._passed_on: set[_Place] = set()

    def add(self, wanted: Wanted) -> None:
        """Enter all that a Service asks for; it must have no claims yet."""
        for port in wanted.ports:
            for frontend in port.frontends:
                self._claim(_place(frontend), port)

    def withdraw(self, wanted: Wanted) -> None:
        """Take back all that a Service asked for."""
        for port in wanted.ports:
            for frontend in port.frontends:
                self._release(_place(frontend), port)

    def take_affected(self) -> set[ObjectKey]:
        """Return the Services that want a place which changed hands since the last call."""
        places, self._passed_on = self._passed_on, set()
        return {
            ObjectKey("Service", port.name.namespace, port.name.name)
            for place in places
            if place in self._owners
            for port in (self._owners[place], *self._waiting.get(place, ()))
        }

    def split(self, port: WantedPort) -> tuple[tuple[Frontend, ...], list[str]]:
        """Return the frontends that ``port`` has, and for each it wants in vain why not."""
        lost = [frontend for frontend in port.frontends if self._owner(frontend) != port.name]
        if not lost:
            return port.frontends, []
        had = tuple(frontend for frontend in port.frontends if frontend not in lost)
        return had, [self._loss(frontend) for frontend in lost]

    def _claim(self, place: _Place, port: WantedPort) -> None:
        owner = self._owners.setdefault(place, port)
        if owner is port:
            return
        if _seniority(port) < _seniority(owner):
            self._owners[place] = port
            self._passed_on.add(place)
            port = owner
        insort(self._waiting.setdefault(place, []), port, key=_seniority)

    def _release(self, place: _Place, port: WantedPort) -> None:
        waiting = self._waiting.get(place)
        if waiting is None:
            del self._owners[place]
            return
        if self._owners[place] is port:
            self._owners[place] = waiting.pop(0)
            self._passed_on.add(place)
        else:
            waiting.remove(port)
        if not waiting:
            del self._waiting[place]

    def _owner(self, frontend: Frontend) -> ServicePortName:
        return self._owners[_place(frontend)].name

    def _loss(self, frontend: Frontend) -> str:
        place = f"{format_endpoint(frontend.address, frontend.port)}/{frontend.protocol.name}"
        owner = self._owner(frontend)
        return f"{place} belongs to {owner}, which was first: give one of them another address"


def _place(frontend: Frontend) -> _Place:
    return (frontend.address, frontend.port, frontend.protocol)


def _seniority(port: WantedPort) -> tuple[bool, str, str, str, int]:
    return (not port.created, port.created, port.name.namespace, port.name.name, port.index)
