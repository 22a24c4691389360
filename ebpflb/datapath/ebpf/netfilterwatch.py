# SPDX-License-Identifier: Apache-2.0
"""Notices that somebody has changed what our rules in netfilter depend on.

nf_tables tells of each change, iptables' nft back end included; only what touches our own chains,
or those that a forwarded packet begins in, counts. The legacy tables tell nothing: where there are
any, they are read every few seconds. This file must not know what is done about a change.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from ebpflb.datapath.ebpf import iptables, nfrules, nftables
from ebpflb.datapath.ebpf.iptables import BackEnd, Table
from ebpflb.errors import DatapathError
from ebpflb.model import Family

LEGACY_S: Final = 10.0
"""Between two looks at the legacy tables."""
AT_MOST_EVERY_S: Final = 1.0

_MESSAGE_BYTES: Final = 65536


class NetfilterWatch:
    """Calls ``wake`` at once when something has changed, and at most once in a second.

    ``chains`` are those of others that count, by nft's family, table and name; any thread may set
    them. It watches the network namespace of the thread that calls ``start``.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.chains: frozenset[tuple[str, str, str]] = frozenset()
        self._wake = wake
        self._changes: socket.socket | None = None
        self._stopping = threading.Event()
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="netfilter", daemon=True)

    def start(self) -> None:
        self._subscribe()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; after that nobody is woken. To be called once."""
        self._stopping.set()
        os.eventfd_write(self._stop_fd, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._unsubscribe()
        os.close(self._stop_fd)

    def _run(self) -> None:
        legacy = _legacy()
        look_at = time.monotonic() + LEGACY_S
        while not self._stopping.is_set():
            self._wait(look_at - time.monotonic())
            counts = self._counts()
            if time.monotonic() >= look_at:
                before, legacy = legacy, _legacy()
                counts |= legacy != before
                look_at = time.monotonic() + LEGACY_S
            if counts and not self._stopping.is_set():
                self._wake()
                self._stopping.wait(AT_MOST_EVERY_S)

    def _wait(self, at_most_s: float) -> None:
        """Until nf_tables tells of something, or this is to end, or time is up."""
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        if self._changes is not None:
            poll.register(self._changes.fileno(), select.POLLIN)
        poll.poll(max(at_most_s, 0) * 1000)

    def _counts(self) -> bool:
        """Read all that has been told; whether any of it counts, or something was lost."""
        if self._changes is None:
            self._subscribe()
            return self._changes is not None
        found = False
        try:
            while True:
                data = self._changes.recv(_MESSAGE_BYTES)
                found = found or any(map(self._is_ours, nftables.changes(data)))
        except BlockingIOError:
            return found
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                self._unsubscribe()
        return True

    def _is_ours(self, change: nftables.Change) -> bool:
        if change.table == nfrules.TABLE or change.hook == "forward":
            return True
        if not change.chain:
            return any((change.family, change.table) == one[:2] for one in self.chains)
        return (
            change.chain.startswith(nfrules.CHAIN_PREFIX)
            or (change.family, change.table, change.chain) in self.chains
        )

    def _subscribe(self) -> None:
        """Where the kernel has no nf_tables there is nothing to be told of."""
        try:
            self._changes = nftables.subscribe()
        except OSError:
            self._changes = None

    def _unsubscribe(self) -> None:
        if self._changes is not None:
            self._changes.close()
            self._changes = None


def _legacy() -> list[dict[str, Table]]:
    """What the legacy tables of both families hold, as far as we have anything to do with it."""
    found: list[dict[str, Table]] = []
    for family in Family:
        there = iptables.legacy_tables(family) & set(iptables.TABLES)
        try:
            tools = iptables.find(BackEnd.LEGACY, family) if there else None
            found.append(tools.read(there) if tools else {})
        except DatapathError:
            found.append({})  # whoever mends will say so
    return found
