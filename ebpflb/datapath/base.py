# SPDX-License-Identifier: Apache-2.0
"""What the agent may ask of a datapath, whichever it is.

The agent hands over the whole plan and says what changed since the last time; how that becomes
map entries or rules is the datapath's business alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec

from ebpflb.errors import DatapathError
from ebpflb.model import Plan, ServicePortName


class SyncReport(msgspec.Struct, frozen=True):
    """What one sync did.

    ``writes`` counts entries written or deleted (0: nothing had to change). ``failed`` says for
    each service port that could not be programmed why; it keeps what it had. ``deferred`` wait
    for the kernel to release what they replace; the datapath's ``wake`` callback says when to
    sync them again.
    """

    writes: int
    failed: Mapping[ServicePortName, DatapathError]
    deferred: frozenset[ServicePortName]


class Difference(msgspec.Struct, frozen=True, order=True):
    """One thing that is not in the kernel as it should be.

    ``where`` is a map or a hook, ``service`` the printed service port ("" where there is none),
    ``expected`` and ``actual`` are readable texts, "" for absent.
    """

    service: str
    where: str
    what: str
    expected: str
    actual: str


class Datapath(Protocol):
    """A way to make the node behave as planned. Used by one thread only."""

    mode: str

    def sync(self, plan: Plan, changed: Collection[ServicePortName] | None) -> SyncReport:
        """Make the kernel follow ``plan``; ``changed`` None means that anything may differ."""
        ...

    def audit(self, plan: Plan) -> list[Difference]:
        """Compare kernel and plan, repair, and return what differed."""
        ...

    def close(self) -> None:
        """Let go of everything; what is programmed stays in force."""
        ...
