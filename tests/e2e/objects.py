# SPDX-License-Identifier: Apache-2.0
"""API objects of one test: Services, their EndpointSlices, Pods. They go with it.

Who writes slices here is no controller: a Service without a selector, and its slices by hand. A
Service with a selector and Pods are for the real controller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ebpflb.lab import Node, Pod
from ebpflb.model import Family
from tests.builders import ApiObject
from tests.e2e.api import Api
from tests.e2e.world import OTHER_PORT, TCP_PORT, UDP_PORT

HTTP: Final[ApiObject] = {"name": "http", "port": 80, "targetPort": TCP_PORT}
OTHER: Final[ApiObject] = {"name": "other", "port": 90, "targetPort": OTHER_PORT}
DNS: Final[ApiObject] = {"name": "dns", "protocol": "UDP", "port": 53, "targetPort": UDP_PORT}

LABEL: Final = "ebpflb-e2e"
SERVICE_NAME: Final = "kubernetes.io/service-name"
MANAGED_BY: Final = "endpointslice.kubernetes.io/managed-by"
_numbers = itertools.count(1)


class Service:
    """A Service as the API server has it."""

    def __init__(self, objects: Objects, made: ApiObject) -> None:
        self._objects = objects
        self.obj = made
        self.name: str = made["metadata"]["name"]

    @property
    def key(self) -> str:
        return f"default/{self.name}"

    @property
    def ips(self) -> list[str]:
        """Its ClusterIPs, in both families where it has both."""
        return [ip for ip in self.obj["spec"].get("clusterIPs", []) if ip != "None"]

    @property
    def ip(self) -> str:
        return self.ips[0]

    @property
    def type(self) -> str:
        kind: str = self.obj["spec"]["type"]
        return kind

    @property
    def vips(self) -> list[str]:
        """The load balancer's addresses that nodes serve."""
        ingress = self.obj.get("status", {}).get("loadBalancer", {}).get("ingress", [])
        return [one["ip"] for one in ingress if one.get("ipMode") == "VIP"]

    @property
    def health_port(self) -> int:
        port: int = self.obj["spec"].get("healthCheckNodePort", 0)
        return port

    def node_port(self, port: int = 80) -> int:
        """The NodePort of the first port of this number; 0 where it has none."""
        listed = self.obj["spec"]["ports"]
        found: int = next(one.get("nodePort", 0) for one in listed if one["port"] == port)
        return found

    def dials(self, node: Node, port: int = 80) -> dict[str, list[tuple[str, int]]]:
        """All that a client on ``node`` may dial for a port, by kind; IPv4 first in each."""
        number = self.node_port(port)
        return {
            "ClusterIP": [(ip, port) for ip in self.ips],
            "NodePort": [(ip, number) for ip in (node.ipv4, node.ipv6) if number],
            "ExternalIP": [(ip, port) for ip in self.obj["spec"].get("externalIPs", [])],
            "LoadBalancer": [(ip, port) for ip in self.vips],
        }

    def ingress(self, *entries: str | ApiObject) -> Service:
        """Let its load balancer have these addresses; an entry may be said in full."""
        listed = [{"ip": one} if isinstance(one, str) else one for one in entries]
        status = {"loadBalancer": {"ingress": listed}}
        self.obj = self._objects.api.patch_status(self.obj, status)
        return self

    def patch(self, **spec: Any) -> Service:
        """Change its spec; a list replaces the one that was there."""
        self.obj = self._objects.api.patch("Service", self.name, {"spec": spec})
        return self

    def label(self, labels: Mapping[str, str | None]) -> None:
        """Set labels, or (None) take them away."""
        change = {"metadata": {"labels": dict(labels)}}
        self.obj = self._objects.api.patch("Service", self.name, change)

    def delete(self) -> None:
        """Delete it alone; its slices stay."""
        self._objects.api.delete("Service", self.name)

    def endpoints(self, *pods: Pod, **conditions: bool) -> Service:
        """Let its slices, one a family, name these pods and no others."""
        return self.slices("all", [endpoint(pod, **conditions) for pod in pods])

    def slices(
        self,
        part: str,
        endpoints: Sequence[dict[Family, ApiObject]],
        *,
        ports: Iterable[ApiObject] | None = None,
    ) -> Service:
        """Write one slice a family, ``NAME-part-4`` and ``-6``; of several, each is a part.

        ports: as a slice has them; by default all of the Service's.
        """
        listed = list(ports) if ports is not None else slice_ports(self.obj["spec"]["ports"])
        for family in Family:
            content = {
                "ports": listed,
                "endpoints": [one[family] for one in endpoints if family in one],
            }
            self._objects.write_slice(
                f"{self.name}-{part}-{family.value}", self.name, family, content
            )
        return self


class PodObject:
    """A Pod of the API whose addresses are those of a pod of the lab."""

    def __init__(self, api: Api, made: ApiObject, pod: Pod) -> None:
        self._api = api
        self.name: str = made["metadata"]["name"]
        self._made = made
        self._pod = pod

    def ready(self, *, ready: bool = True) -> PodObject:
        """Let its kubelet say whether it is ready."""
        ips = [{"ip": self._pod.ipv4}, {"ip": self._pod.ipv6}]
        condition = {"type": "Ready", "status": str(ready)}
        status = {
            "phase": "Running",
            "podIP": self._pod.ipv4,
            "podIPs": ips,
            "conditions": [condition],
        }
        self._api.patch_status(self._made, status)
        return self

    def evict(self) -> None:
        """Let it have failed, as an evicted one has."""
        condition = {"type": "Ready", "status": "False"}
        failed = {"phase": "Failed", "reason": "Evicted", "conditions": [condition]}
        self._api.patch_status(self._made, failed)

    def terminate(self) -> None:
        """Ask it to go; it is there until ``gone``."""
        self._api.delete("Pod", self.name, grace_s=600)

    def gone(self) -> None:
        """It has ended."""
        self._api.delete("Pod", self.name, grace_s=0)


class Objects:
    """Makes objects that bear one label, by which ``clear`` finds them."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._tag = f"t{next(_numbers)}"
        self._slices: set[str] = set()

    @property
    def labels(self) -> dict[str, str]:
        return {LABEL: self._tag}

    def name(self, kind: str = "s") -> str:
        """A name that no other object has had."""
        return f"{kind}{next(_numbers)}"

    def service(
        self,
        *ports: ApiObject,
        selector: dict[str, str] | None = None,
        name: str = "",
        labels: dict[str, str] | None = None,
        **spec: Any,
    ) -> Service:
        """Create a Service, of both families unless told otherwise; port 80 by default."""
        filled: ApiObject = {"ipFamilyPolicy": "RequireDualStack", "ports": list(ports or (HTTP,))}
        if selector:
            filled["selector"] = selector
        filled |= spec
        made = self.api.create(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {"name": name or self.name(), "labels": self.labels | (labels or {})},
                "spec": {key: value for key, value in filled.items() if value is not None},
            }
        )
        return Service(self, made)

    def outside(self) -> tuple[str, str]:
        """An address of each family that nobody has, for an external IP or a load balancer."""
        number = next(_numbers)
        return f"198.18.{number // 250}.{number % 250 + 1}", f"2001:db8::{number:x}"

    def slice_object(self, service: str, address_type: str, name: str = "") -> ApiObject:
        """A slice of a Service with nothing in it, not created yet."""
        labels = {SERVICE_NAME: service, MANAGED_BY: "ebpflb-e2e"}
        return {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": name or self.name("slice"), "labels": self.labels | labels},
            "addressType": address_type,
            "endpoints": [],
        }

    def write_slice(self, name: str, service: str, family: Family, content: ApiObject) -> None:
        """Create a slice of ours, or change it."""
        if name in self._slices:
            self.api.patch("EndpointSlice", name, content)
            return
        self.api.create(self.slice_object(service, family.label, name) | content)
        self._slices.add(name)

    def delete_slice(self, name: str) -> None:
        """Delete a slice of ours."""
        self.api.delete("EndpointSlice", name)
        self._slices.discard(name)

    def secret(self) -> None:
        """Create something that is no agent's business."""
        meta = {"name": self.name(), "labels": self.labels}
        self.api.create({"apiVersion": "v1", "kind": "Secret", "metadata": meta})

    def crowd(self, service: Service, count: int, *, shift: int = 0) -> None:
        """Give a Service a slice of many endpoints that nobody has; of another shift, others."""
        points = [
            {"addresses": [f"10.245.{number // 250}.{number % 250 + 1 + shift}"], "nodeName": "n9"}
            for number in range(count)
        ]
        content = {"ports": slice_ports(service.obj["spec"]["ports"]), "endpoints": points}
        self.write_slice(f"{service.name}-crowd", service.name, Family.IPV4, content)

    def label_slices(self, service: str, labels: Mapping[str, str | None]) -> None:
        """Set labels of all of a Service's slices, or (None) take them away."""
        for one in self.api.list("EndpointSlice", labels=f"{SERVICE_NAME}={service}"):
            change = {"metadata": {"labels": dict(labels)}}
            self.api.patch("EndpointSlice", one["metadata"]["name"], change)

    def pod(self, pod: Pod, labels: dict[str, str], *, ready: bool = True) -> PodObject:
        """Create a Pod that stands for a pod of the lab."""
        made = self.api.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": self.name(f"{pod.name}-"), "labels": self.labels | labels},
                "spec": {
                    "nodeName": pod.node.name,
                    "containers": [
                        {
                            "name": "server",
                            "image": "none",
                            "ports": [{"name": "web", "containerPort": TCP_PORT}],
                        }
                    ],
                },
            }
        )
        return PodObject(self.api, made, pod).ready(ready=ready)

    def clear(self) -> None:
        """Delete all of them."""
        for kind in ("Service", "Pod", "Secret", "Endpoints", "EndpointSlice"):
            self.api.delete_all(kind, labels=f"{LABEL}={self._tag}")


def endpoint(pod: Pod, **conditions: bool) -> dict[Family, ApiObject]:
    """One endpoint of a slice, for each family; ready unless told otherwise."""
    return {
        family: {
            "addresses": [ip],
            "nodeName": pod.node.name,
            "conditions": {"ready": True} | conditions,
        }
        for family, ip in ((Family.IPV4, pod.ipv4), (Family.IPV6, pod.ipv6))
    }


def slice_ports(ports: Iterable[ApiObject]) -> list[ApiObject]:
    """The ports of a Service as its slices have them."""
    return [
        {
            "name": one.get("name", ""),
            "protocol": one.get("protocol", "TCP"),
            "port": one.get("targetPort", one["port"]),
        }
        for one in ports
    ]
