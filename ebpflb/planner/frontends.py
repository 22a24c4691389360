# SPDX-License-Identifier: Apache-2.0
"""What clients dial to reach a Service, and whose an address and port is when two want it.

It must not know endpoints, nor which Services have changed.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from typing import Final, NamedTuple

import msgspec

from ebpflb.model import (
    Address,
    Frontend,
    FrontendKind,
    Network,
    ObjectKey,
    Protocol,
    Service,
    ServicePort,
    ServicePortName,
    family_of,
    format_address,
    format_endpoint,
    parse_network,
    unspecified,
)
from ebpflb.planner.options import PlannerOptions

_Place = tuple[Address, int, Protocol]


class ExternalIPs(msgspec.Struct, frozen=True):
    """Which addresses a Service's externalIPs may capture (SEC-02); ``networks`` None is any."""

    allowed: bool = True
    networks: tuple[Network, ...] | None = None

    def objection(self, address: Address) -> str:
        """Say why not this one; "" where it may."""
        if not self.allowed:
            return "feature gate AllowServiceExternalIPs is off"
        if self.networks is not None and not any(address in one for one in self.networks):
            return "--external-ips does not allow it"
        return ""


_ANY_EXTERNAL_IP: Final = ExternalIPs()


def external_ips(options: PlannerOptions) -> ExternalIPs:
    texts = options.external_ips
    networks = None if texts is None else tuple(map(parse_network, texts))
    return ExternalIPs(options.allow_external_ips, networks)


class WantedPort(msgspec.Struct, frozen=True, gc=False):
    """One service port of one family and the frontends that it asks for.

    ``created`` is its Service's creation time, ``index`` its position in the Service.
    """

    name: ServicePortName
    frontends: tuple[Frontend, ...]
    created: str
    index: int


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """All that a Service asks for; ``problems`` says what of it cannot be had."""

    ports: tuple[WantedPort, ...] = ()
    problems: tuple[str, ...] = ()


def wanted_by(service: Service | None, external: ExternalIPs = _ANY_EXTERNAL_IP) -> Wanted:
    """Return the service ports of ``service`` in its own order, one for each family it has.

    The families are those of its ClusterIPs; addresses of another family count for nothing
    (FAM-02, -03, -07). A service port has a frontend

    * at its ClusterIP;
    * at the unspecified address for its NodePort, if it has one, whatever the type (LB-03);
    * at each external IP that ``external`` lets it capture (LB-01);
    * at each load balancer's address (LB-02).

    An address that the Service has in several of these ways is one frontend: that of the ClusterIP,
    else that of the load balancer, so that source ranges guard it.

    Of two ports with one name and protocol, which are one service port (PORT-01), the first counts.
    """
    if service is None:
        return Wanted()
    ports: dict[ServicePortName, WantedPort] = {}
    problems = [
        f"spec.externalIPs {format_address(address)} is not served: {objection}"
        for address in service.external_ips
        if (objection := external.objection(address))
    ]
    allowed = [address for address in service.external_ips if not external.objection(address)]
    for port in service.ports:
        for address in service.cluster_ips:
            name = ServicePortName(
                service.namespace, service.name, port.name, port.protocol, family_of(address)
            )
            if name in ports:
                problems.append(_same_name(port, name))
                continue
            frontends = _frontends(port, address, allowed, service.ingress_ips)
            ports[name] = WantedPort(name, frontends, service.created, len(ports))
    return Wanted(tuple(ports.values()), tuple(problems))


def _frontends(
    port: ServicePort,
    cluster_ip: Address,
    external_ips: Iterable[Address],
    ingress_ips: Iterable[Address],
) -> tuple[Frontend, ...]:
    """One service port's frontends of the ClusterIP's family, sorted in each kind."""
    family = family_of(cluster_ip)
    cluster, balancer = {cluster_ip}, {one for one in ingress_ips if family_of(one) is family}
    external = {one for one in external_ips if family_of(one) is family}
    found = [
        (cluster, FrontendKind.CLUSTER_IP),
        (external - balancer - cluster, FrontendKind.EXTERNAL_IP),
        (balancer - cluster, FrontendKind.LOAD_BALANCER),
    ]
    frontends = [
        Frontend(address, port.port, port.protocol, kind)
        for addresses, kind in found
        for address in sorted(addresses)
    ]
    if port.node_port:
        at = Frontend(unspecified(family), port.node_port, port.protocol, FrontendKind.NODE_PORT)
        frontends.insert(1, at)
    return tuple(frontends)


def _same_name(port: ServicePort, name: ServicePortName) -> str:
    return (
        f"port {port.port}/{port.protocol.name} ({name.family.label}) is not served: an earlier "
        f"{port.protocol.name} port has the same name {port.name!r}"
    )


# --- claims --------------------------------------------------------------------------------------


class _Claim(NamedTuple):
    frontend: Frontend
    port: WantedPort


class Claims:
    """Who wants which address, port and protocol, and who has it.

    A ClusterIP goes first, since the API server gave it to one Service and to no other: nobody can
    take it by naming it as an address of his own. Then the Service that was created first has it;
    of two as old, or without a creation time (which count as the youngest), the first by namespace
    and name; inside one Service the first port. Whoever comes second waits, and has it when the
    first one goes.
    """

    def __init__(self) -> None:
        self._owners: dict[_Place, _Claim] = {}
        self._waiting: dict[_Place, list[_Claim]] = {}
        self._passed_on: set[_Place] = set()

    def add(self, wanted: Wanted) -> None:
        """Enter all that a Service asks for; it must have no claims yet."""
        for port in wanted.ports:
            for frontend in port.frontends:
                self._claim(_Claim(frontend, port))

    def withdraw(self, wanted: Wanted) -> None:
        """Take back all that a Service asked for."""
        for port in wanted.ports:
            for frontend in port.frontends:
                self._release(_Claim(frontend, port))

    def take_affected(self) -> set[ObjectKey]:
        """Return the Services that want a place which changed hands since the last call."""
        places, self._passed_on = self._passed_on, set()
        return {
            ObjectKey("Service", claim.port.name.namespace, claim.port.name.name)
            for place in places
            if place in self._owners
            for claim in (self._owners[place], *self._waiting.get(place, ()))
        }

    def split(self, port: WantedPort) -> tuple[tuple[Frontend, ...], list[str]]:
        """Return the frontends that ``port`` has, and for each it wants in vain why not."""
        lost = [
            frontend
            for frontend in port.frontends
            if self._owners[_place(frontend)].port.name != port.name
        ]
        if not lost:
            return port.frontends, []
        had = tuple(frontend for frontend in port.frontends if frontend not in lost)
        return had, [self._loss(frontend) for frontend in lost]

    def _claim(self, claim: _Claim) -> None:
        place = _place(claim.frontend)
        owner = self._owners.setdefault(place, claim)
        if owner is claim:
            return
        if _seniority(claim) < _seniority(owner):
            self._owners[place] = claim
            self._passed_on.add(place)
            claim = owner
        insort(self._waiting.setdefault(place, []), claim, key=_seniority)

    def _release(self, claim: _Claim) -> None:
        place = _place(claim.frontend)
        waiting = self._waiting.get(place)
        if waiting is None:
            del self._owners[place]
            return
        if self._owners[place].port is claim.port:
            self._owners[place] = waiting.pop(0)
            self._passed_on.add(place)
        else:
            waiting.remove(claim)
        if not waiting:
            del self._waiting[place]

    def _loss(self, frontend: Frontend) -> str:
        owner = self._owners[_place(frontend)]
        if frontend.kind is FrontendKind.NODE_PORT:
            family = family_of(frontend.address).label
            place, thing = f"NodePort {frontend.port}/{frontend.protocol.name} ({family})", "port"
        else:
            at = format_endpoint(frontend.address, frontend.port)
            place, thing = f"{at}/{frontend.protocol.name}", "address"
        why = "which was first"
        if owner.frontend.kind is not frontend.kind and _is_cluster_ip(owner.frontend):
            why = "whose ClusterIP it is"
        return f"{place} belongs to {owner.port.name}, {why}: give one of them another {thing}"


def _place(frontend: Frontend) -> _Place:
    return (frontend.address, frontend.port, frontend.protocol)


def _is_cluster_ip(frontend: Frontend) -> bool:
    return frontend.kind is FrontendKind.CLUSTER_IP


def _seniority(claim: _Claim) -> tuple[bool, bool, str, str, str, int]:
    port = claim.port
    return (
        not _is_cluster_ip(claim.frontend),
        not port.created,
        port.created,
        port.name.namespace,
        port.name.name,
        port.index,
    )
