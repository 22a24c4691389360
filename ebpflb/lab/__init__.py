# SPDX-License-Identifier: Apache-2.0
"""The lab: small clusters out of network namespaces, veths and cgroups on this machine.

The demo, the netns tests and the benchmarks share it. It knows namespaces, addresses, servers and
clients; it must know nothing of Services, of the agent or of any data path: what runs in a node is
its user's affair.

    with Lab("example") as lab:
        node = lab.node("n1")
        client = node.pod("p1")
        backend = node.pod("be1")
        backend.serve(tcp=[8080])
        outcome = client.tcp(backend.ipv4, 8080, count=10)
        assert outcome.backends == {"be1": 10}

`topology` says what a lab looks like and `addresses` which addresses it has. What is below is
imported when it is first asked for: `python -m ebpflb.lab.server` needs none of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ebpflb.lab.client import Outcome
    from ebpflb.lab.namespace import Namespace, Question
    from ebpflb.lab.spawn import Capture, LabError, Loop, Running, Server, wait_until
    from ebpflb.lab.topology import External, Lab, Node, Pod, Router

__all__ = [
    "Capture",
    "External",
    "Lab",
    "LabError",
    "Loop",
    "Namespace",
    "Node",
    "Outcome",
    "Pod",
    "Question",
    "Router",
    "Running",
    "Server",
    "wait_until",
]

_HOMES = {
    **dict.fromkeys(["Namespace", "Question"], "namespace"),
    "Outcome": "client",
    **dict.fromkeys(["Capture", "LabError", "Loop", "Running", "Server", "wait_until"], "spawn"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'topology')}"), name)
