# SPDX-License-Identifier: Apache-2.0
"""A day's changes to a cluster's Services and slices, at random, and what must come of them.

What clients have to see is kept here in a few lines of its own, out of the Services as the API
server last returned them: it shares nothing with the planner whose work it judges. Wrong addresses
and the like are not for here: the API server refuses them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ebpflb.lab import Namespace, Node, Pod
from ebpflb.model import Family
from tests.builders import ApiObject
from tests.e2e.objects import HTTP, OTHER, Objects, Service, endpoint, slice_ports
from tests.e2e.world import OWN, Health, health, listening, reaches, refuses, shut, unserved

PORTS: Final[Mapping[int, ApiObject]] = {80: HTTP, 90: OTHER}
PARTS: Final = ("a", "b")
PROXY_NAME: Final = "service.kubernetes.io/service-proxy-name"
HEADLESS: Final = "service.kubernetes.io/headless"
NODE_PORT, BALANCER, NAME = "NodePort", "LoadBalancer", "ExternalName"
TYPES: Final = ("ClusterIP", NODE_PORT, BALANCER, NAME)
POLICIES: Final = ("Cluster", "Local")
FIRST_NODE_PORT: Final = 30_000
"""The API server gives none of the first 86 to anybody who does not ask for it (KEP-3668)."""

LISTENERS: Final = 100
"""So many ports of one process, each of which is four sockets."""

NODES: Final = "192.168.50.0/24"
NOBODY: Final = "192.0.2.0/24"


class Piece(msgspec.Struct):
    """A slice of one Service in one family: which pods it names, and whether it is for us."""

    pods: list[Pod]
    ready: bool = True
    headless: bool = False


class Slot:
    """A name under which a Service comes and goes, and has slices with or without it."""

    def __init__(
        self, name: str, node_port: int, external: Sequence[str], vips: Sequence[str]
    ) -> None:
        self.name = name
        self.node_port = node_port
        self.external = external
        self.vips = vips
        self.service: Service | None = None
        self.foreign = False
        self.pieces: dict[tuple[str, Family], Piece] = {}

    @property
    def served(self) -> Service | None:
        """The Service, where it is one for this node."""
        if self.service is None or self.foreign or self.service.type == NAME:
            return None
        return self.service

    def backends(self, family: Family, elsewhere: Pod | None = None) -> set[str]:
        """Who has to answer in this family: the ready ones, or else those that only terminate.

        Of all pods, or of all but the one that is said to be ``elsewhere``.
        """
        usable = [
            piece
            for (_, whose), piece in self.pieces.items()
            if whose is family and not piece.headless
        ]
        ready = {pod.name for piece in usable if piece.ready for pod in piece.pods}
        going = {pod.name for piece in usable for pod in piece.pods}
        others = {elsewhere.name} if elsewhere else set()
        return ready - others or going - others

    def ready_here(self, elsewhere: Pod) -> int:
        """What a load balancer is told: of the family that has more."""
        counts = [
            len(
                {
                    pod.name
                    for (_, whose), piece in self.pieces.items()
                    if whose is family and piece.ready and not piece.headless
                    for pod in piece.pods
                    if pod is not elsewhere
                }
            )
            for family in Family
        ]
        return max(counts)


class Churn:
    """Makes changes, one request to the API server each; ``seed`` decides which.

    Slices say of the last pod that it is on another node, wherever it is.
    """

    def __init__(self, objects: Objects, pods: Sequence[Pod], *, services: int, seed: int) -> None:
        self._objects = objects
        self._pods = list(pods)
        self._elsewhere = self._pods[-1]
        self._random = random.Random(seed)
        self._slots = [
            Slot(
                objects.name("churn-"), FIRST_NODE_PORT + one, objects.outside(), objects.outside()
            )
            for one in range(services)
        ]
        self._had: set[str] = set()
        self._node_ports: set[int] = set()

    def change(self) -> None:
        """Make one change."""
        slot = self._random.choice(self._slots)
        if slot.service is None and self._random.random() < 0.5:
            self._create(slot)
        elif self._random.random() < 0.6:
            self._change_slice(slot)
        elif slot.service is not None and slot.foreign and self._random.random() < 0.5:
            self._give_away(slot, slot.service)
        elif slot.service is not None:
            self._change_service(slot, slot.service)
        else:
            self._create(slot)
        if slot.service is not None:
            self._remember(slot.service)

    def _remember(self, service: Service) -> None:
        spec = service.obj["spec"]
        self._had |= {*service.ips, *spec.get("externalIPs", []), *service.vips}
        self._node_ports |= {one["nodePort"] for one in spec["ports"] if "nodePort" in one}

    # --- Services -------------------------------------------------------------------------------

    def _create(self, slot: Slot) -> None:
        slot.foreign = False
        kind = self._random.choice(TYPES[:3])
        policies = self._policies(kind)
        slot.service = self._objects.service(name=slot.name, type=kind, **policies)

    def _policies(self, kind: str) -> dict[str, Any]:
        """Policies at random, as far as a Service of this type has any."""
        internal = {"internalTrafficPolicy": self._random.choice(POLICIES)}
        external = {"externalTrafficPolicy": self._random.choice(POLICIES)}
        return {} if kind == NAME else internal if kind == "ClusterIP" else internal | external

    def _change_service(self, slot: Slot, service: Service) -> None:
        changes: list[Callable[[Slot, Service], None]] = [
            self._delete,
            self._change_ports,
            self._change_affinity,
            self._give_away,
            self._change_type,
            self._change_policies,
            self._change_external_ips,
            self._change_balancer,
            self._change_ranges,
        ]
        self._random.choices(changes, weights=[3, 3, 2, 1, 3, 3, 2, 6, 3])[0](slot, service)

    def _delete(self, slot: Slot, service: Service) -> None:
        service.delete()
        slot.service = None

    def _change_ports(self, slot: Slot, service: Service) -> None:
        ports = [PORTS[one] for one in self._random.choice([[80], [90], [80, 90], [90, 80]])]
        if service.type in {NODE_PORT, BALANCER} and self._random.random() < 0.5:
            ports[0] = ports[0] | {"nodePort": slot.node_port}
        service.patch(ports=ports)

    def _change_affinity(self, _slot: Slot, service: Service) -> None:
        if service.type != NAME:
            had = service.obj["spec"]["sessionAffinity"]
            service.patch(sessionAffinity="None" if had == "ClientIP" else "ClientIP")

    def _give_away(self, slot: Slot, service: Service) -> None:
        slot.foreign = not slot.foreign
        service.label({PROXY_NAME: "other" if slot.foreign else None})

    def _change_type(self, _slot: Slot, service: Service) -> None:
        kind = self._random.choice([one for one in TYPES if one != service.type])
        spec: dict[str, Any] = {"type": kind, "loadBalancerSourceRanges": None}
        if kind == NAME:
            nothing = ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy")
            spec |= dict.fromkeys(nothing)
            spec |= {"externalName": "example.com", "sessionAffinity": "None"}
        else:
            spec |= {"externalName": None, "ipFamilyPolicy": "RequireDualStack"}
        service.patch(**spec)

    def _change_policies(self, _slot: Slot, service: Service) -> None:
        service.patch(**self._policies(service.type))

    def _change_external_ips(self, slot: Slot, service: Service) -> None:
        addresses = self._random.choice([[], slot.external[:1], slot.external])
        service.patch(externalIPs=[*addresses])

    def _change_balancer(self, slot: Slot, service: Service) -> None:
        if service.type == BALANCER:
            proxied: ApiObject = {"ip": slot.vips[0], "ipMode": "Proxy"}
            vips: list[str | ApiObject] = [*slot.vips]
            service.ingress(*self._random.choice([vips, vips[:1], [proxied, vips[1]], []]))

    def _change_ranges(self, _slot: Slot, service: Service) -> None:
        if service.type == BALANCER:
            ranges = self._random.choice([None, [NODES], [NOBODY]])
            service.patch(loadBalancerSourceRanges=ranges)

    # --- slices ---------------------------------------------------------------------------------

    def _change_slice(self, slot: Slot) -> None:
        key = self._random.choice(PARTS), self._random.choice(list(Family))
        piece = slot.pieces.get(key)
        name = f"{slot.name}-{key[0]}-{key[1].value}"
        if piece is not None and self._random.random() < 0.1:
            self._objects.delete_slice(name)
            del slot.pieces[key]
        elif piece is not None and self._random.random() < 0.1:
            piece.headless = not piece.headless
            labels = {HEADLESS: "" if piece.headless else None}
            self._objects.api.patch("EndpointSlice", name, {"metadata": {"labels": labels}})
        else:
            self._write(slot, key, name, headless=piece is not None and piece.headless)

    def _write(self, slot: Slot, key: tuple[str, Family], name: str, *, headless: bool) -> None:
        pods = self._random.sample(self._pods, self._random.randint(0, len(self._pods)))
        ready = self._random.random() < 0.9
        slot.pieces[key] = Piece(pods, ready, headless)
        conditions = {} if ready else {"ready": False, "serving": True, "terminating": True}
        points = [
            endpoint(pod, **conditions)[key[1]]
            | ({"nodeName": "n9"} if pod is self._elsewhere else {})
            for pod in pods
        ]
        content = {"ports": slice_ports(PORTS.values()), "endpoints": points}
        self._objects.write_slice(name, slot.name, key[1], content)

    # --- what must come of it -------------------------------------------------------------------

    def verify(self, client: Pod, node: Node) -> int:
        """Dial every frontend that there is, and all that were; returns how many.

        The agent cannot tell pods, so to an external policy the client is from outside.
        """
        dialled = 0
        serving: set[str] = set()
        services = [slot.served for slot in self._slots if slot.served]
        node_ports = {
            number
            for service in services
            for one in service.obj["spec"]["ports"]
            if (number := one.get("nodePort", 0))
        }
        with listening(node, *node_ports):
            for slot in self._slots:
                if (service := slot.served) is None:
                    continue
                if service.obj["spec"]["sessionAffinity"] != "None":
                    service.patch(sessionAffinity="None")
                for port in (one["port"] for one in service.obj["spec"]["ports"]):
                    for kind, dials in service.dials(node, port).items():
                        for ip, number in dials:
                            self._verify(slot, service, client, node, (kind, ip, number))
                            dialled += 1
                        serving |= {ip for ip, _ in dials if kind != "NodePort"}
                if service.health_port:
                    told = health(node, node.ipv4, service.health_port)
                    assert told == Health.of(service.key, slot.ready_here(self._elsewhere))
        for ip in self._had - serving:
            unserved(node, ip, 80)
        # Health ports are of the same range, and the agent listens there.
        health_ports = {service.health_port for service in services}
        gone = sorted(self._node_ports - node_ports - health_ports)
        for start in range(0, len(gone), LISTENERS):
            some = gone[start : start + LISTENERS]
            with listening(node, *some):
                for number in some:
                    for ip in (node.ipv4, node.ipv6):
                        reaches(client, ip, number, {OWN})
        return dialled + len(self._had - serving) + len(gone)

    def _verify(
        self, slot: Slot, service: Service, pod: Pod, node: Node, dial: tuple[str, str, int]
    ) -> None:
        """A frontend, for the pod and for the node."""
        kind, ip, port = dial
        spec = service.obj["spec"]
        family = Family.IPV6 if ":" in ip else Family.IPV4
        everybody = slot.backends(family)
        here = slot.backends(family, self._elsewhere)
        if kind == "ClusterIP":
            local_for = {pod, node} if spec["internalTrafficPolicy"] == "Local" else set()
        else:
            local_for = {pod} if spec.get("externalTrafficPolicy") == "Local" else set()
        ranges = spec.get("loadBalancerSourceRanges", [])
        guarded = kind == "LoadBalancer" and family is Family.IPV4 and ranges
        for who in (pod, node):
            names = here if who in local_for else everybody
            if guarded and (who is pod or NODES not in ranges):
                shut(who, ip, port)
            elif names:
                _leads(who, ip, port, names)
            elif everybody:
                shut(who, ip, port)
            else:
                refuses(who, ip, port)


def _leads(who: Namespace, ip: str, port: int, names: set[str]) -> None:
    """The same as ``reaches``, in one round where all is well."""
    outcome = who.tcp(ip, port, count=16 * len(names))
    if outcome.failed or outcome.backends.keys() != names:
        reaches(who, ip, port, names)
