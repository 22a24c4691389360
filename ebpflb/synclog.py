# SPDX-License-Identifier: Apache-2.0
"""What is said of syncs: a cluster that changes all day long must not fill a node's disk.

A sync after a quiet time is told at once; those that follow soon are gathered and told as one.
"""

from __future__ import annotations

from ebpflb.logs import Log

_log = Log("agent")

QUIET_S = 300.0
"""Between two lines about syncs."""


class SyncLog:
    """``done`` for each sync that did something, ``look`` now and then. Times are a clock's."""

    def __init__(self) -> None:
        self._told_at = float("-inf")
        self._syncs = self._changed = self._writes = 0
        self._longest_s = 0.0
        self._service_ports = self._failed = 0

    def done(
        self,
        now: float,
        *,
        duration_s: float,
        service_ports: int,
        changed: int,
        writes: int,
        failed: int,
        aloud: bool,
    ) -> None:
        """Count a sync that has just ended; ``aloud``: whoever reads the log waits for it."""
        self._syncs += 1
        self._changed += changed
        self._writes += writes
        self._longest_s = max(self._longest_s, duration_s)
        self._service_ports, self._failed = service_ports, failed
        if aloud:
            self._tell(now)
        else:
            self.look(now)

    def look(self, now: float) -> None:
        """Tell what has been gathered, where it is time."""
        if self._syncs and now - self._told_at >= QUIET_S:
            self._tell(now)

    def _tell(self, now: float) -> None:
        alone = self._syncs == 1
        _log.info(
            "synced",
            service_ports=self._service_ports,
            changed=self._changed,
            writes=self._writes,
            failed=self._failed or None,
            syncs=None if alone else self._syncs,
            **{"ms" if alone else "longest_ms": round(self._longest_s * 1000, 1)},
        )
        self._told_at = now
        self._syncs = self._changed = self._writes = 0
        self._longest_s = 0.0
