# SPDX-License-Identifier: Apache-2.0
"""Services as tests want them, and the folder of manifests in which an agent finds them.

Files are written elsewhere and renamed, so that nobody ever reads half of one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ebpflb.lab import Pod
from ebpflb.model import Address, Family, LocalAddresses, Plan, Protocol, ServicePortName
from ebpflb.planner.options import PlannerOptions
from ebpflb.planner.plan import Planner
from ebpflb.sources.manifests import load
from tests.builders import ApiObject, endpoint_object, service_object, slice_object

NAMESPACE = "default"


class Endpoint(msgspec.Struct, frozen=True):
    """One endpoint, of one or both families. The conditions are those of its EndpointSlice."""

    ipv4: str = ""
    ipv6: str = ""
    node: str | None = None
    ready: bool = True
    serving: bool = True
    terminating: bool = False

    def __lt__(self, other: Endpoint) -> bool:
        return (self.ipv4, self.ipv6) < (other.ipv4, other.ipv6)


def ready(*pods: Pod) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(pod.ipv4, pod.ipv6, pod.node.name) for pod in pods)


def terminating(*pods: Pod) -> tuple[Endpoint, ...]:
    """Going, and still serving."""
    return tuple(
        msgspec.structs.replace(one, ready=False, terminating=True) for one in ready(*pods)
    )


def unready(*pods: Pod) -> tuple[Endpoint, ...]:
    return tuple(msgspec.structs.replace(one, ready=False, serving=False) for one in ready(*pods))


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """A Service and its endpoints. ``tcp`` and ``udp`` are target ports by port.

    ``node_port`` is that of the first port of each protocol. ``local``: its internal traffic policy
    is Local, ``external_local`` the external one.
    """

    name: str
    ipv4: str = ""
    ipv6: str = ""
    tcp: Mapping[int, int] = {}
    udp: Mapping[int, int] = {}
    endpoints: tuple[Endpoint, ...] = ()
    affinity_s: int = 0
    local: bool = False
    external_local: bool = False
    node_port: int = 0
    external_ips: tuple[str, ...] = ()
    ingress_ips: tuple[str, ...] = ()
    source_ranges: tuple[str, ...] = ()
    annotations: Mapping[str, str] = {}

    @property
    def ports(self) -> list[tuple[str, str, int, int]]:
        """(name, protocol, port, target port) of each."""
        return [
            (f"{protocol.lower()}-{port}", protocol, port, target)
            for protocol, ports in (("TCP", self.tcp), ("UDP", self.udp))
            for port, target in ports.items()
        ]

    def name_of(self, protocol: Protocol, port: int, family: Family) -> ServicePortName:
        text = f"{protocol.name.lower()}-{port}"
        return ServicePortName(NAMESPACE, self.name, text, protocol, family)

    @property
    def type(self) -> str:
        if self.ingress_ips:
            return "LoadBalancer"
        return "NodePort" if self.node_port else "ClusterIP"

    def _service_ports(self) -> list[ApiObject]:
        firsts = {next(iter(ports)) for ports in (self.tcp, self.udp) if ports}
        return [
            {"name": name, "protocol": protocol, "port": port}
            | ({"nodePort": self.node_port} if self.node_port and port in firsts else {})
            for name, protocol, port, _ in self.ports
        ]

    def objects(self) -> list[ApiObject]:
        spec: dict[str, Any] = {
            "type": self.type,
            "internalTrafficPolicy": "Local" if self.local else "Cluster",
            "externalIPs": [*self.external_ips],
            "loadBalancerSourceRanges": [*self.source_ranges],
        }
        if self.type != "ClusterIP" or self.external_ips:
            spec["externalTrafficPolicy"] = "Local" if self.external_local else "Cluster"
        if self.type == "LoadBalancer" and self.external_local:
            spec["healthCheckNodePort"] = self.node_port + 1_000
        if self.affinity_s:
            spec["sessionAffinity"] = "ClientIP"
            spec["sessionAffinityConfig"] = {"clientIP": {"timeoutSeconds": self.affinity_s}}
        made = [
            service_object(
                self.name,
                cluster_ips=[ip for ip in (self.ipv4, self.ipv6) if ip],
                ports=self._service_ports(),
                annotations=dict(self.annotations),
                ingress=[{"ip": ip} for ip in self.ingress_ips],
                **spec,
            )
        ]
        for family in Family:
            addresses = [
                (one.ipv4 if family is Family.IPV4 else one.ipv6, one) for one in self.endpoints
            ]
            made += [
                slice_object(
                    f"{self.name}-{family.value}",
                    service=self.name,
                    address_type=family.label,
                    ports=[
                        {"name": n, "protocol": p, "port": target} for n, p, _, target in self.ports
                    ],
                    endpoints=[
                        endpoint_object(
                            address,
                            node=one.node,
                            ready=one.ready,
                            serving=one.serving,
                            terminating=one.terminating,
                        )
                        for address, one in addresses
                        if address
                    ],
                )
            ]
        return made


class Manifests:
    """A folder of manifests for one agent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, *specs: Spec) -> None:
        """One file a Service."""
        for spec in specs:
            self.put_objects(f"{spec.name}.json", spec.objects())

    def put_objects(self, file: str, objects: Iterable[ApiObject]) -> None:
        self.put_text(file, json.dumps({"apiVersion": "v1", "kind": "List", "items": [*objects]}))

    def put_text(self, file: str, text: str | bytes) -> None:
        draft = self.folder / f".{file}.draft"
        draft.write_bytes(text.encode() if isinstance(text, str) else text)
        draft.rename(self.folder / file)

    def remove(self, *names: str) -> None:
        """Take away Services, or files by their whole name."""
        for name in names:
            (self.folder / (name if "." in name else f"{name}.json")).unlink(missing_ok=True)

    def clear(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()

    def plan(self, options: PlannerOptions, addresses: frozenset[Address]) -> Plan:
        """What an agent with these settings should do on a node that has these addresses."""

        def ignore(event: str, /, **fields: Any) -> None:
            """Bad files are the tests' intention."""

        planner = Planner(options)
        planner.apply(LocalAddresses(addresses))
        for event in load(self.folder, ignore):
            planner.apply(event)
        return planner.update().plan
