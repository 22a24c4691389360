# SPDX-License-Identifier: Apache-2.0
"""What a Service's health-check port says: how many endpoints a load balancer finds on this node.

It must not know who serves the port, nor whether the agent itself is well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ebpflb.model import Address, EndpointSlice, EndpointState, HealthCheck, Service, family_of


def health_check(
    service: Service, slices: Iterable[EndpointSlice], *, node: str
) -> HealthCheck | None:
    """Return None where the Service has no health check (HC-01).

    What counts are the distinct addresses, over all ports, of the endpoints on ``node`` that are
    ready: terminating ones do not count even while they serve (HC-06), and of an endpoint in
    several slices the best state counts, as everywhere (EP-02). A pod has an address of each
    family, so the family that has more of them is what is told.
    """
    if not service.health_port:
        return None
    here: set[Address] = set()
    ready: set[Address] = set()
    for piece in slices:
        if not piece.ports:
            continue
        for address, on, state in zip(piece.addresses, piece.nodes, piece.states, strict=True):
            if on == node:
                here.add(address)
            if state == EndpointState.READY:
                ready.add(address)
    families = Counter(map(family_of, here & ready))
    return HealthCheck(service.health_port, max(families.values(), default=0))
