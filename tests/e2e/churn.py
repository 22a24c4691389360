# SPDX-License-Identifier: Apache-2.0
"""A day's changes to a cluster's Services and slices, at random, and what must come of them.

What clients have to see is kept here in a few lines of its own: it shares nothing with the planner
whose work it judges. Wrong addresses and the like are not for here: the API server refuses them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from ebpflb.lab import Node, Pod
from ebpflb.model import Family
from tests.builders import ApiObject
from tests.e2e.objects import HTTP, OTHER, Objects, Service, endpoint, slice_ports
from tests.e2e.world import reaches, refuses, unserved

PORTS: Final[Mapping[int, ApiObject]] = {80: HTTP, 90: OTHER}
PARTS: Final = ("a", "b")
PROXY_NAME: Final = "service.kubernetes.io/service-proxy-name"
HEADLESS: Final = "service.kubernetes.io/headless"


class Piece(msgspec.Struct):
    """A slice of one Service in one family: which pods it names, and whether it is for us."""

    pods: list[Pod]
    ready: bool = True
    headless: bool = False


class Slot:
    """A name under which a Service comes and goes, and has slices with or without it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.service: Service | None = None
        self.external = False
        self.foreign = False
        self.ports = [80]
        self.pieces: dict[tuple[str, Family], Piece] = {}

    @property
    def served(self) -> bool:
        return self.service is not None and not self.external and not self.foreign

    def backends(self, family: Family) -> set[str]:
        """Who has to answer in this family: the ready ones, or else those that only terminate."""
        usable = [
            piece
            for (_, whose), piece in self.pieces.items()
            if whose is family and not piece.headless
        ]
        ready = {pod.name for piece in usable if piece.ready for pod in piece.pods}
        return ready or {pod.name for piece in usable for pod in piece.pods}


class Churn:
    """Makes changes, one request to the API server each; ``seed`` decides which."""

    def __init__(self, objects: Objects, pods: Sequence[Pod], *, services: int, seed: int) -> None:
        self._objects = objects
        self._pods = list(pods)
        self._random = random.Random(seed)
        self._slots = [Slot(objects.name("churn-")) for _ in range(services)]
        self._had: set[str] = set()

    def change(self) -> None:
        """Make one change."""
        slot = self._random.choice(self._slots)
        if slot.service is None and self._random.random() < 0.5:
            self._create(slot)
        elif self._random.random() < 0.7:
            self._change_slice(slot)
        elif slot.service is not None:
            self._change_service(slot, slot.service)
        else:
            self._create(slot)

    # --- Services -------------------------------------------------------------------------------

    def _create(self, slot: Slot) -> None:
        slot.external = slot.foreign = False
        slot.ports = [80]
        slot.service = self._objects.service(name=slot.name)
        self._had |= set(slot.service.ips)

    def _change_service(self, slot: Slot, service: Service) -> None:
        changes: list[Callable[[Slot, Service], None]] = [
            self._delete,
            self._change_ports,
            self._change_affinity,
            self._give_away,
            self._change_type,
        ]
        self._random.choices(changes, weights=[4, 3, 2, 2, 1])[0](slot, service)

    def _delete(self, slot: Slot, service: Service) -> None:
        service.delete()
        slot.service = None

    def _change_ports(self, slot: Slot, service: Service) -> None:
        slot.ports = self._random.choice([[80], [90], [80, 90], [90, 80]])
        service.patch(ports=[PORTS[port] for port in slot.ports])

    def _change_affinity(self, _slot: Slot, service: Service) -> None:
        had = service.obj["spec"]["sessionAffinity"]
        service.patch(sessionAffinity="None" if had == "ClientIP" else "ClientIP")

    def _give_away(self, slot: Slot, service: Service) -> None:
        slot.foreign = not slot.foreign
        service.label({PROXY_NAME: "other" if slot.foreign else None})

    def _change_type(self, slot: Slot, service: Service) -> None:
        slot.external = not slot.external
        nothing = dict.fromkeys(("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"))
        spec: dict[str, Any] = (
            {"type": "ExternalName", "externalName": "example.com", "sessionAffinity": "None"}
            | nothing
            if slot.external
            else {
                "type": "ClusterIP",
                "externalName": None,
                "ipFamilyPolicy": "RequireDualStack",
            }
        )
        self._had |= set(service.patch(**spec).ips)

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
        points = [endpoint(pod, **conditions)[key[1]] for pod in pods]
        content = {"ports": slice_ports(PORTS.values()), "endpoints": points}
        self._objects.write_slice(name, slot.name, key[1], content)

    # --- what must come of it -------------------------------------------------------------------

    def verify(self, client: Pod, node: Node) -> int:
        """Dial every frontend that there is, and every address that was one; returns how many."""
        dialled = 0
        serving: set[str] = set()
        for slot in filter(lambda slot: slot.served, self._slots):
            assert slot.service is not None
            if slot.service.obj["spec"]["sessionAffinity"] != "None":
                slot.service.patch(sessionAffinity="None")
            serving |= set(slot.service.ips)
            for family, ip in zip(Family, slot.service.ips, strict=True):
                for port in slot.ports:
                    dialled += 1
                    if names := slot.backends(family):
                        reaches(client, ip, port, names)
                    else:
                        refuses(client, ip, port)
        for ip in self._had - serving:
            dialled += 1
            unserved(node, ip, 80)
        return dialled
