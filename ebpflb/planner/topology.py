# SPDX-License-Identifier: Apache-2.0
"""Which endpoints take new connections: one pure function, and its comment is the specification.

It must not know addresses' meanings, Services' names, or how a verdict is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ebpflb.model import Backend, Policy, Selection, Verdict


class Choice(msgspec.Struct, frozen=True, gc=False):
    """What ``select`` found; ``external`` is None where nothing comes from outside."""

    internal: Selection
    external: Selection | None
    draining: tuple[Backend, ...]


def select(
    endpoints: Sequence[Backend],
    *,
    internal_policy: Policy,
    external_policy: Policy,
    externally_accessible: bool,
) -> Choice:
    """Choose among the usable ``endpoints`` of one service port.

    There are two sets to choose from:

    * the Cluster set: the ready endpoints; where there are none, all that are serving and
      terminating (TOP-03);
    * the Local set: the same, looking only at endpoints on this node (TOP-04). Each set falls back
      to terminating ones by itself (TOP-14).

    While a set has a ready endpoint, its terminating ones get no new connections (TOP-15).

    The internal scope (ClusterIP) takes the set that the internal policy names, the external scope
    (NodePort, external and load-balancer addresses) the one that the external policy names
    (POL-01 to -03); neither policy changes the other scope (POL-07). Without an external address
    there is no external scope, whatever its policy says (TOP-01).

    A scope whose set is not empty is FORWARD. Otherwise it is DROP if an endpoint is usable
    anywhere (NOEP-04, -05), and REJECT if none is (NOEP-01 to -03, -07, -08).

    Usable endpoints that no scope takes are ``draining``: connections that they have go on
    (TOP-15), also where only the policy or the node keeps new ones away (CT-04).

    The order of ``endpoints`` is kept in every result.
    """
    cluster = _ready_or_terminating(endpoints)
    local = _ready_or_terminating([endpoint for endpoint in endpoints if endpoint.local])
    none = Selection(Verdict.DROP if endpoints else Verdict.REJECT, ())

    def scope(policy: Policy) -> Selection:
        chosen = local if policy is Policy.LOCAL else cluster
        return Selection(Verdict.FORWARD, chosen) if chosen else none

    internal = scope(internal_policy)
    external = scope(external_policy) if externally_accessible else None
    taken = {*internal.backends, *(external.backends if external else ())}
    draining = tuple(endpoint for endpoint in endpoints if endpoint not in taken)
    return Choice(internal, external, draining)


def _ready_or_terminating(endpoints: Sequence[Backend]) -> tuple[Backend, ...]:
    ready = tuple(endpoint for endpoint in endpoints if not endpoint.terminating)
    return ready or tuple(endpoints)
