# SPDX-License-Identifier: Apache-2.0
"""Which endpoints take new connections: one pure function, and its comment is the specification.

It must not know addresses' meanings, Services' names, or how a verdict is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ebpflb.model import Backend, Hints, Selection, Verdict
from ebpflb.planner.endpoints import Endpoints


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What ``select`` found."""

    cluster: Selection
    local: Selection
    draining: tuple[Backend, ...]


def select(endpoints: Endpoints, *, node: str, zone: str) -> Choice:
    """Choose among the usable ``endpoints`` of one service port, on ``node`` in ``zone``.

    There are two sets to choose from. Both are always made, whoever uses them (TOP-01 and -05 only
    spare upstream work): which of them a client is led to is for the traffic policies to say
    (TOP-12, POL-01 to -06), and those change by themselves.

    * The **cluster set** is the ready endpoints that the hints allow; where no endpoint is ready,
      all that are serving and terminating, whatever their hints (TOP-03).
    * The **local set** is the ready endpoints on this node; where none of those is ready, those
      that are serving and terminating. Hints play no part (TOP-04, -12).

    Each set falls back to terminating endpoints by itself (TOP-14). While it has a ready one, its
    terminating ones get no new connections (TOP-15). What is neither ready nor serving and
    terminating does not come this far (TOP-13).

    Hints are looked at on ready endpoints alone (TOP-06), in two levels:

    1. Same node: if every ready endpoint has a hint for nodes, and some name this one, then only
       those are allowed (TOP-07).
    2. Else same zone: if every ready endpoint has a hint for zones, and this node's zone is known,
       and some name it, then only those are allowed (TOP-08).
    3. Else all ready endpoints are.

    One ready endpoint without a hint switches its level off, and only that level (TOP-09). Nothing
    else decides: no annotation, no field of the Service (TOP-10).

    A set that is not empty is FORWARD. The cluster set is empty only where no endpoint is usable
    anywhere, and is then REJECT (TOP-02, NOEP-01 to -03, -08). An empty local set is DROP if an
    endpoint is usable anywhere (NOEP-04, -05), and REJECT if none is (NOEP-07).

    Usable endpoints in neither set are ``draining``: connections that they have go on (TOP-15),
    also where only the policy, the hints or the node keep new ones away (CT-04).

    The order of ``endpoints`` is kept in every result.
    """
    backends = endpoints.backends
    cluster = _allowed(endpoints, node, zone) or backends
    here = [backend for backend in backends if backend.local]
    local = tuple(backend for backend in here if not backend.terminating) or tuple(here)
    if len(cluster) == len(backends):
        draining: tuple[Backend, ...] = ()
    else:
        taken = {*cluster, *local}
        draining = tuple(backend for backend in backends if backend not in taken)
    nobody_here = Verdict.DROP if backends else Verdict.REJECT
    return Choice(_selection(cluster, Verdict.REJECT), _selection(local, nobody_here), draining)


def _selection(backends: tuple[Backend, ...], otherwise: Verdict) -> Selection:
    return Selection(Verdict.FORWARD if backends else otherwise, backends)


def _allowed(endpoints: Endpoints, node: str, zone: str) -> tuple[Backend, ...]:
    """The ready endpoints that the hints allow, all of them where hints have nothing to say."""
    if not endpoints.hints:
        return tuple(backend for backend in endpoints.backends if not backend.terminating)
    ready = [
        (backend, hints)
        for backend, hints in zip(endpoints.backends, endpoints.hints, strict=True)
        if not backend.terminating
    ]
    return (
        _hinted(ready, lambda hints: hints.nodes, node)
        or _hinted(ready, lambda hints: hints.zones, zone)
        or tuple(backend for backend, _ in ready)
    )


def _hinted(
    ready: Sequence[tuple[Backend, Hints]], level: Callable[[Hints], tuple[str, ...]], here: str
) -> tuple[Backend, ...]:
    """Those whose hints of one level name ``here``; none where one has no hint of that level."""
    if not here or not all(level(hints) for _, hints in ready):
        return ()
    return tuple(backend for backend, hints in ready if here in level(hints))
