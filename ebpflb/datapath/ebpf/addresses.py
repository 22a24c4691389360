# SPDX-License-Identifier: Apache-2.0
"""The Services' addresses, as `service_addrs` has them: one entry, however many ask for it.

Whoever owns a frontend asks for the entries that it needs and gives them back with it; what is
written is what follows from the counts. This file must not know when a frontend needs which.
"""

from __future__ import annotations

from typing import NamedTuple

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.tables import Table
from ebpflb.errors import DatapathError

_VALUE = bytes(abi.LAYOUTS["service_address"].size)


class Written(NamedTuple):
    """How many entries were written, and which could not be."""

    writes: int
    failed: dict[bytes, DatapathError]


class ServiceAddresses:
    """Begins with what the table holds, for which nobody has asked yet."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._asked: dict[bytes, int] = {}
        self._due = {key for key, _ in table.items()}
        """What is there and nobody asks for, and what somebody asks for and is not there."""

    @property
    def used(self) -> int:
        missing = sum(1 for key in self._due if key in self._asked)
        return len(self._asked) - missing + len(self._due) - missing

    def ask(self, key: bytes) -> None:
        """One more needs this entry."""
        count = self._asked.get(key, 0)
        self._asked[key] = count + 1
        if not count:
            self._due ^= {key}

    def give_back(self, key: bytes) -> None:
        """One who has asked needs it no more."""
        count = self._asked.pop(key)
        if count > 1:
            self._asked[key] = count - 1
        else:
            self._due ^= {key}

    def write(self) -> Written:
        """Delete and insert what is due; what fails is due again the next time."""
        due = sorted(self._due)
        failed = self._delete([key for key in due if key not in self._asked])
        failed |= self._insert([key for key in due if key in self._asked])
        self._due = set(failed)
        return Written(len(due) - len(failed), failed)

    def _delete(self, keys: list[bytes]) -> dict[bytes, DatapathError]:
        failed = {}
        for key in keys:
            try:
                self._table.delete(key)
            except DatapathError as error:
                failed[key] = error
        return failed

    def _insert(self, keys: list[bytes]) -> dict[bytes, DatapathError]:
        """All at once, or where that fails one by one, to find those that have no room."""
        failed = {}
        try:
            self._table.update([(key, _VALUE) for key in keys])
        except DatapathError:
            for key in keys:
                try:
                    if self._table.lookup(key) is None:
                        self._table.update([(key, _VALUE)])
                except DatapathError as error:
                    failed[key] = error
        return failed

    def matches(self) -> bool:
        """Whether the table holds what was left there, and no more."""
        count = 0
        for entry in self._table.items():
            if (entry[0] in self._asked) == (entry[0] in self._due):
                return False
            count += 1
        return count == self.used
