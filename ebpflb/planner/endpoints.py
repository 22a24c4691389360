# SPDX-License-Identifier: Apache-2.0
"""The endpoints of one service port: the union over its Service's slices (EP-01).

It must not know which of them take connections; that is topology's to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import repeat

import msgspec

from ebpflb.model import (
    NO_HINTS,
    Address,
    Backend,
    EndpointSlice,
    EndpointState,
    Hints,
    ServicePortName,
)

_At = tuple[Address, int]
_Copy = tuple[int, bool]
"""An endpoint's state, and whether it is on this node, as one slice has it."""


class Endpoints(msgspec.Struct, frozen=True, gc=False):
    """Usable endpoints, sorted. ``hints`` is a column beside them, empty where none has any.

    Hints are for choosing alone, so they are not part of the backends, which are published.
    """

    backends: tuple[Backend, ...]
    hints: tuple[Hints, ...] = ()


def usable_endpoints(
    slices: Iterable[EndpointSlice], name: ServicePortName, *, node: str
) -> Endpoints:
    """Return every ready, or serving and terminating, endpoint of the service port ``name``.

    Only slices of the port's family count (FAM-06), at their port of the same name and protocol
    (PORT-03). An address and port that stands in several slices counts once: it is local if any
    copy is on ``node``, and has the best state that any copy has (EP-02), with the hints of all
    copies of that state. ``terminating`` is set where that is serving and terminating. All others
    take nothing ever (TOP-13) and are left out. Sorted by address and port, whatever the slices'
    order (EP-03, EP-07).
    """
    matching = list(_matching(slices, name))
    found: dict[_At, _Copy] = {}
    for piece, port in matching:
        for address, on, state in zip(piece.addresses, piece.nodes, piece.states, strict=True):
            at, copy = (address, port), (state, on == node != "")
            other = found.get(at)
            found[at] = _merged(copy, other) if other else copy
    backends = tuple(
        Backend(address, port, local, state == EndpointState.TERMINATING)
        for (address, port), (state, local) in sorted(found.items())
        if state != EndpointState.UNUSABLE
    )
    return Endpoints(backends, _column(backends, matching, found))


def _matching(
    slices: Iterable[EndpointSlice], name: ServicePortName
) -> Iterator[tuple[EndpointSlice, int]]:
    """The slices that have the service port, with where their endpoints listen; maybe twice."""
    for piece in slices:
        if piece.family is name.family:
            for port in piece.ports:
                if port.name == name.port and port.protocol is name.protocol:
                    yield piece, port.port


def _column(
    backends: Iterable[Backend],
    matching: Iterable[tuple[EndpointSlice, int]],
    found: Mapping[_At, _Copy],
) -> tuple[Hints, ...]:
    if not any(piece.hints for piece, _ in matching):
        return ()
    hints: dict[_At, Hints] = {}
    for piece, port in matching:
        columns = zip(piece.addresses, piece.states, piece.hints or repeat(NO_HINTS), strict=False)
        for address, state, told in columns:
            at = (address, port)
            if state == found[at][0]:
                hints[at] = _together(hints.get(at, told), told)
    return tuple(hints[backend.address, backend.port] for backend in backends)


def _merged(one: _Copy, other: _Copy) -> _Copy:
    return max(one[0], other[0]), one[1] or other[1]


def _together(one: Hints, other: Hints) -> Hints:
    if one == other:
        return one
    return Hints(
        tuple(sorted({*one.zones, *other.zones})), tuple(sorted({*one.nodes, *other.nodes}))
    )
