# SPDX-License-Identifier: Apache-2.0
"""The cluster that is measured: so many Services with so many endpoints, as objects and manifests.

Pure: numbers in, objects, bytes and addresses out. Every endpoint has an address of its own; a
backend namespace owns a whole prefix and answers at any address in it, so 100,000 endpoints need no
100,000 interfaces. This file must not know who reads the objects, nor what is measured.

    Service s            10.96.1.0 + s, port 80
    backend k            10.(128 + 2k).0.0/15, k from 0
    endpoint j of s      endpoint number e = 10 s + j: the e-th address of backend e mod 4

Most Services send to the backends' quiet port. A few, the *watched* ones, send to the port where a
backend says which side it is on: their endpoints are either all on side A (the first half of the
backends) or all on side B, and a measured change moves them from one side to the other.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address
from typing import Any, Final, Literal, NamedTuple

import msgspec

Side = Literal["A", "B"]

SIDES: Final[tuple[Side, Side]] = ("A", "B")
SERVICE_PORT: Final = 80
QUIET_PORT: Final = 8080
GREET_PORT: Final = 8081
SINK_PORT: Final = 8082
HOT: Final = 1
"""The Service that hot look-ups dial."""

_FIRST_SERVICE: Final = int(IPv4Address("10.96.1.0"))
_FIRST_BACKEND: Final = int(IPv4Address("10.128.0.0"))
_PREFIX_LENGTH: Final = 15
_PREFIX: Final = 1 << (32 - _PREFIX_LENGTH)
_MAX_SERVICES: Final = 60_000
_DESTINATION: Final = struct.Struct("!IHcx")
_LIST_LENGTH: Final = 1 << 16
_CREATED: Final = "2026-01-01T00:00:00Z"


class Destination(NamedTuple):
    """What a client dials."""

    address: int
    port: int

    def __str__(self) -> str:
        return f"{IPv4Address(self.address)}:{self.port}"


class Workload(NamedTuple):
    """``services`` x ``endpoints`` in ``files`` files, on an even number of ``backends``."""

    services: int
    endpoints: int
    files: int
    backends: int
    watched_services: int

    def check(self) -> None:
        """Raises ValueError where the address plan has no room, or nothing would be measured."""
        if not 2 <= self.services <= _MAX_SERVICES or not 1 <= self.files <= self.services:
            raise ValueError(f"{self.services} services in {self.files} files")
        if self.backends % 2 or self.services * self.endpoints >= _PREFIX:
            raise ValueError(
                f"{self.services * self.endpoints} endpoints, {self.backends} backends"
            )
        if not 1 <= len(self.watched) < self.services - 1:
            raise ValueError(f"{self.watched_services} watched services")

    # --- who is where ---------------------------------------------------------------------------

    @property
    def watched(self) -> range:
        """The numbers of the watched Services, spread over the files."""
        step = self.services // self.watched_services
        return range(step - 1 if step > HOT + 1 else HOT + 1, self.services, step)

    def prefix(self, backend: int) -> str:
        """The addresses that backend number ``backend`` owns, as a route."""
        return f"{IPv4Address(_FIRST_BACKEND + backend * _PREFIX)}/{_PREFIX_LENGTH}"

    def side(self, backend: int) -> Side:
        return SIDES[backend >= self.backends // 2]

    def frontend(self, service: int) -> Destination:
        return Destination(_FIRST_SERVICE + service, SERVICE_PORT)

    @property
    def quiet(self) -> list[int]:
        """The numbers of all other Services."""
        watched = frozenset(self.watched)
        return [service for service in range(self.services) if service not in watched]

    def backends_of(
        self, service: int, side: Side = "A", replaced: int | None = None
    ) -> list[Destination]:
        """The endpoints of a Service; ``side`` matters to watched ones only.

        ``replaced``: of a quiet one, the endpoint that is another one, as after a pod's end.
        """
        first = service * self.endpoints
        if service in self.watched:
            half = self.backends // 2
            offset = half if side == "B" else 0
            return [
                self._endpoint(first + j, offset + (first + j) % half, GREET_PORT)
                for j in range(self.endpoints)
            ]
        return [
            self._endpoint(first + j, (first + j + (j == replaced)) % self.backends, QUIET_PORT)
            for j in range(self.endpoints)
        ]

    def _endpoint(self, number: int, backend: int, port: int) -> Destination:
        return Destination(_FIRST_BACKEND + backend * _PREFIX + 1 + number, port)

    # --- what clients dial ----------------------------------------------------------------------

    def lists(self, seed: int) -> tuple[list[Destination], ...]:
        """Random destinations: any endpoint, any Service, endpoints of the hot one, the hot one."""
        rng = random.Random(seed)  # noqa: S311 - a workload, no secret
        chosen = rng.choices(self.quiet, k=_LIST_LENGTH)
        hot = self.backends_of(HOT)
        return (
            [rng.choice(self.backends_of(service)) for service in chosen],
            [self.frontend(service) for service in chosen],
            rng.choices(hot, k=_LIST_LENGTH),
            [self.frontend(HOT)],
        )

    # --- manifests and objects ------------------------------------------------------------------

    def file_of(self, service: int) -> int:
        return service * self.files // self.services

    def sink_manifest(self) -> bytes:
        """One more Service, whose only endpoint swallows what it is sent: ``sink``."""
        address = str(IPv4Address(self.sink.address))
        service, piece = self.service(self.services), self.slice(self.services)
        service["spec"] |= {"clusterIP": address, "clusterIPs": [address]}
        piece["ports"][0]["port"] = SINK_PORT
        piece["endpoints"] = [_endpoint(_name(self.services), 0, self.sink_endpoint)]
        items = [service, piece]
        return msgspec.json.encode({"apiVersion": "v1", "kind": "List", "items": items})

    @property
    def sink(self) -> Destination:
        """That Service's frontend."""
        return self.frontend(self.services)

    @property
    def sink_endpoint(self) -> Destination:
        return Destination(_FIRST_BACKEND + _PREFIX - 2, SINK_PORT)

    def manifest(self, file: int, sides: Mapping[int, Side]) -> bytes:
        """One file: a List of its Services and their slices. ``sides`` of the watched ones."""
        first = -(-file * self.services // self.files)
        last = -(-(file + 1) * self.services // self.files)
        items: list[object] = []
        for service in range(first, last):
            items += [self.service(service), self.slice(service, sides.get(service, "A"))]
        return msgspec.json.encode({"apiVersion": "v1", "kind": "List", "items": items})

    def service(self, service: int) -> dict[str, Any]:
        address = str(IPv4Address(self.frontend(service).address))
        name = _name(service)
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": _meta(name, f"svc-{service}", {"app": name}),
            "spec": {
                "type": "ClusterIP",
                "clusterIP": address,
                "clusterIPs": [address],
                "ipFamilies": ["IPv4"],
                "ipFamilyPolicy": "SingleStack",
                "internalTrafficPolicy": "Cluster",
                "sessionAffinity": "None",
                "selector": {"app": name},
                "ports": [
                    {"name": "http", "port": SERVICE_PORT, "protocol": "TCP", "targetPort": "http"}
                ],
            },
            "status": {"loadBalancer": {}},
        }

    def slice(self, service: int, side: Side = "A", replaced: int | None = None) -> dict[str, Any]:
        """As the EndpointSlice controller writes it, with all that a reader must skip."""
        name = _name(service)
        labels = {
            "app": name,
            "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
            "kubernetes.io/service-name": name,
        }
        backends = self.backends_of(service, side, replaced)
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": _meta(f"{name}-x7k2p", f"slice-{service}", labels)
            | {
                "generateName": f"{name}-",
                "ownerReferences": [
                    {
                        "apiVersion": "v1",
                        "blockOwnerDeletion": True,
                        "controller": True,
                        "kind": "Service",
                        "name": name,
                        "uid": f"svc-{service}",
                    }
                ],
            },
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": backends[0].port, "protocol": "TCP"}],
            "endpoints": [_endpoint(name, number, one) for number, one in enumerate(backends)],
        }


def _name(service: int) -> str:
    return f"svc-{service:05d}"


def _meta(name: str, uid: str, labels: Mapping[str, str]) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": "bench",
        "uid": uid,
        "resourceVersion": "1",
        "creationTimestamp": _CREATED,
        "labels": labels,
    }


def _endpoint(service: str, number: int, at: Destination) -> dict[str, Any]:
    return {
        "addresses": [str(IPv4Address(at.address))],
        "conditions": {"ready": True, "serving": True, "terminating": False},
        "nodeName": f"node-{number}",
        "zone": "zone-a",
        "targetRef": {
            "kind": "Pod",
            "namespace": "bench",
            "name": f"{service}-5d8f7c9b6d-{number:05d}",
            "uid": f"pod-{service}-{number}",
        },
    }


def pack_destinations(destinations: Iterable[Destination]) -> bytes:
    """As connect.c reads a list: address and port in network order, and that nobody answers."""
    return b"".join(_DESTINATION.pack(*one, b"\0") for one in destinations)


def pack_expected(destinations: Iterable[tuple[Destination, Side]]) -> bytes:
    """The same, with the side that must answer."""
    return b"".join(_DESTINATION.pack(*one, side.encode()) for one, side in destinations)


def file_name(file: int) -> str:
    return f"bench-{file:04d}.json"


def all_files(workload: Workload) -> Iterable[tuple[str, bytes]]:
    """Every manifest file by name, all watched Services on side A."""
    sides: dict[int, Side] = {}
    for file in range(workload.files):
        yield file_name(file), workload.manifest(file, sides)


def other(side: Side) -> Side:
    return SIDES[side == "A"]


def evenly(services: Sequence[int], count: int) -> list[int]:
    """``count`` of them, each as often as the others."""
    return [services[i % len(services)] for i in range(count)]
