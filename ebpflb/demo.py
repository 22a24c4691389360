# SPDX-License-Identifier: Apache-2.0
"""The demo's cluster: two nodes, their pods, the agent on one of them, and what is done to it.

Acts and measures, prints nothing: `ebpflb.cli.demo` tells the story. It must not know how the data
path works; what it shows comes from clients that dial and from the kernel's maps.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ebpflb.lab import Lab, Loop, Node, Outcome, Pod, wait_until

WEB = "10.96.0.10"
STICKY = "10.96.0.11"
DNS = "10.96.0.12"
EMPTY = "10.96.0.13"
WEB6 = "fd96::10"
NODE_PORT = 30080
PODS = "10.244.0.0/16,fd00:244::/32"

_AGENT_STARTS_S = 30.0


class Cluster:
    """One running demo. Made by `cluster`, which takes everything down again."""

    def __init__(self, lab: Lab, manifests: Path) -> None:
        self.manifests = manifests
        self.log = manifests.parent / "agent.log"
        self.node: Node = lab.node("n1")
        other = lab.node("n2")
        self.clients: tuple[Pod, Pod] = (self.node.pod("client-a"), self.node.pod("client-b"))
        self.sandboxed = self.node.pod("vm-pod", number=9, virtual=True)
        self.outside = lab.external("laptop")
        self.backends: tuple[Pod, ...] = (
            self.node.pod("web-1"),
            self.node.pod("web-2"),
            other.pod("web-3"),
        )
        for backend in self.backends:
            backend.serve(tcp=[8080], udp=[8053])
        self._agent: subprocess.Popen[Any] | None = None
        self.write_services()
        self.write_slices(self.backends)

    # --- what the API would say -----------------------------------------------------------------

    def write_services(self) -> None:
        """Four Services: dual-stack with a NodePort, with affinity, UDP, and without endpoints."""
        self._write(
            "services.json",
            [
                _service("web", [WEB, WEB6], "TCP", 80, node_port=NODE_PORT),
                _service("sticky", [STICKY], "TCP", 80, affinity=True),
                _service("dns", [DNS], "UDP", 53),
                _service("empty", [EMPTY], "TCP", 80),
            ],
        )

    def write_slices(self, web: Sequence[Pod]) -> None:
        """Slices for all Services; those of web have only the pods given."""
        self._write(
            "slices.json",
            [
                _slice("web", "IPv4", "TCP", 8080, web),
                _slice("web", "IPv6", "TCP", 8080, web),
                _slice("sticky", "IPv4", "TCP", 8080, self.backends),
                _slice("dns", "IPv4", "UDP", 8053, self.backends),
            ],
        )

    def _write(self, name: str, objects: list[dict[str, Any]]) -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=1)
        fresh = self.manifests / f".{name}"
        fresh.write_text(text)
        fresh.rename(self.manifests / name)

    # --- the agent ------------------------------------------------------------------------------

    @property
    def flags(self) -> list[str]:
        """What every command needs to find this node."""
        return ["--pin-path", str(self.node.pin_path), "--cgroup", str(self.node.cgroup_root)]

    def start_agent(self) -> None:
        """Start `ebpflb run` on the node and wait until sockets and packets are served."""
        with self.log.open("a") as log:
            before = self.log.stat().st_size
            self._agent = self.node.popen(
                [
                    *(sys.executable, "-m", "ebpflb", "run"),
                    *("--manifests", str(self.manifests), "--hostname-override", "n1"),
                    *("--cluster-cidr", PODS),
                    *self.flags,
                ],
                stdout=log,
                stderr=log,
            )

        def is_up() -> bool:
            if self._agent is not None and self._agent.poll() is not None:
                raise RuntimeError(f"the agent ended:\n{self.log.read_text()}")
            told = self.log.read_text()[before:]
            return "service_ports=" in told and "packets are served" in told

        wait_until(is_up, timeout_s=_AGENT_STARTS_S, what="the agent to serve")

    def stop_agent(self, *, kill: bool = False) -> None:
        """SIGTERM, or SIGKILL: the data path stays either way."""
        if self._agent is None:
            return
        if kill:
            self._agent.kill()
        else:
            self._agent.terminate()
        self._agent.wait(timeout=30)
        self._agent = None

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run one of ebpflb's own commands on the node."""
        return self.node.run([sys.executable, "-m", "ebpflb", *arguments], check=False)

    # --- what is watched ------------------------------------------------------------------------

    def leave(self, backend: Pod) -> tuple[Outcome, float]:
        """Take ``backend`` out of web under a connect loop.

        Returns the loop's outcome and how many seconds went by, after the manifest was replaced,
        until the last connect that still reached it.
        """
        loop: Loop = self.clients[0].tcp_loop(WEB, 80)
        loop.wait_for(lambda now: len(now.backends) == len(self.backends), what="all backends")
        before = loop.outcome()
        rest = [pod for pod in self.backends if pod is not backend]
        self.write_slices(rest)
        settled = self._wait_until_gone(loop, backend, before.elapsed_s)
        return loop.stop(), settled

    def _wait_until_gone(self, loop: Loop, backend: Pod, began_s: float) -> float:
        """Half a second in which nobody reached it means that nobody will any more."""
        last = [began_s, -1.0]

        def is_gone() -> bool:
            now = loop.outcome()
            hits = now.backends.get(backend.name, 0)
            if hits != last[1]:
                last[:] = [now.elapsed_s, hits]
            return now.elapsed_s - last[0] > 0.5

        wait_until(is_gone, timeout_s=20.0, what=f"{backend.name} to be left alone")
        return last[0] - began_s


def _service(
    name: str,
    addresses: list[str],
    protocol: str,
    port: int,
    *,
    affinity: bool = False,
    node_port: int = 0,
) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "type": "NodePort" if node_port else "ClusterIP",
        "clusterIP": addresses[0],
        "clusterIPs": addresses,
        "ipFamilies": ["IPv6" if ":" in one else "IPv4" for one in addresses],
        "ports": [{"name": "main", "protocol": protocol, "port": port, "nodePort": node_port}],
    }
    if affinity:
        spec["sessionAffinity"] = "ClientIP"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "demo", "name": name},
        "spec": spec,
    }


def _slice(
    service: str, family: str, protocol: str, port: int, pods: Sequence[Pod]
) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "namespace": "demo",
            "name": f"{service}-{family.lower()}",
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "ports": [{"name": "main", "protocol": protocol, "port": port}],
        "endpoints": [
            {
                "addresses": [pod.ipv6 if family == "IPv6" else pod.ipv4],
                "nodeName": pod.node.name,
                "conditions": {"ready": True},
            }
            for pod in pods
        ],
    }


@contextmanager
def cluster() -> Iterator[Cluster]:
    """Build the demo's cluster; nothing of it is left afterwards, however this ends."""
    with (
        tempfile.TemporaryDirectory(prefix="ebpflb-demo-") as folder,
        Lab("demo") as lab,
    ):
        manifests = Path(folder) / "manifests"
        manifests.mkdir()
        running = Cluster(lab, manifests)
        try:
            yield running
        finally:
            running.stop_agent()
