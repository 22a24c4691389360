# SPDX-License-Identifier: Apache-2.0
"""How many service ports drop traffic because no endpoint is on this node (MET-17, NOEP-14).

Pure, and as fast as what has changed is small: a plan may hold 20,000 service ports. It must not
know what a metric is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ebpflb.model import Family, Plan, PlannedPort, ServicePortName, Verdict


class Count(NamedTuple):
    """Service ports by the scope that drops; one may count in both."""

    internal: int = 0
    external: int = 0


_NONE = Count()


class NoLocalEndpoints:
    """Follows a plan; ``counts`` has an entry for each family."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(Family, _NONE)
        self._dropping: dict[ServicePortName, Count] = {}

    def changed(self, names: Iterable[ServicePortName], plan: Plan) -> None:
        """Look again at these service ports: all that are new, different or gone."""
        for name in names:
            before = self._dropping.pop(name, _NONE)
            now = _dropped(plan.ports.get(name))
            if now != _NONE:
                self._dropping[name] = now
            count = self.counts[name.family]
            self.counts[name.family] = Count(
                count.internal + now.internal - before.internal,
                count.external + now.external - before.external,
            )


def _dropped(port: PlannedPort | None) -> Count:
    """Which scopes drop: they have endpoints, and a Local policy allows none of them."""
    if port is None:
        return _NONE
    external = port.external is not None and port.external.verdict is Verdict.DROP
    return Count(port.internal.verdict is Verdict.DROP, external)
