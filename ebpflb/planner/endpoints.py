# SPDX-License-Identifier: Apache-2.0
"""The endpoints of one service port: the union over its Service's slices (EP-01).

It must not know which of them take connections; that is topology's to say.
"""

from __future__ import annotations

from collections.abc import Iterable

from ebpflb.model import Address, Backend, EndpointSlice, EndpointState, ServicePortName

_Copy = tuple[int, bool]
"""An endpoint's state, and whether it is on this node, as one slice has it."""


def usable_endpoints(
    slices: Iterable[EndpointSlice], name: ServicePortName, *, node: str
) -> tuple[Backend, ...]:
    """Return every ready, or serving and terminating, endpoint of the service port ``name``.

    Only slices of the port's family count (FAM-06), at their port of the same name and protocol
    (PORT-03). An address and port that stands in several slices counts once: it is local if any
    copy is on ``node``, and has the best state that any copy has (EP-02). ``terminating`` is set
    where that is serving and terminating. All others take nothing ever (TOP-13) and are left out.
    Sorted by address and port, whatever the slices' order (EP-03, EP-07).
    """
    found: dict[tuple[Address, int], _Copy] = {}
    for piece in slices:
        if piece.family is not name.family:
            continue
        for port in piece.ports:
            if port.name != name.port or port.protocol is not name.protocol:
                continue
            for address, on, state in zip(piece.addresses, piece.nodes, piece.states, strict=True):
                at, copy = (address, port.port), (state, on == node != "")
                other = found.get(at)
                found[at] = _merged(copy, other) if other else copy
    return tuple(
        Backend(address, port, local, state == EndpointState.TERMINATING)
        for (address, port), (state, local) in sorted(found.items())
        if state != EndpointState.UNUSABLE
    )


def _merged(one: _Copy, other: _Copy) -> _Copy:
    return max(one[0], other[0]), one[1] or other[1]
