"""The Services' addresses under any sequence of askers, with failures and restarts at any step."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ebpflb.datapath.ebpf.addresses import ServiceAddresses
from ebpflb.errors import DatapathError
from tests.memory_tables import MemoryTables

KEYS = st.integers(0, 5).map(lambda number: bytes([number]) * 20)
ROOM = 4


class Asking(RuleBasedStateMachine):
    """What is asked for is there after a write that had room and did not fail; nothing else is."""

    @initialize()
    def start(self) -> None:
        self.tables = MemoryTables(service_addrs=ROOM)
        self.addresses = ServiceAddresses(self.tables.service_addrs)
        self.asked: Counter[bytes] = Counter()

    @property
    def there(self) -> set[bytes]:
        return {key for key, _ in self.tables.service_addrs.items()}

    @rule(key=KEYS)
    def ask(self, key: bytes) -> None:
        self.addresses.ask(key)
        self.asked[key] += 1

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.asked)))
        self.addresses.give_back(key)
        self.asked[key] -= 1
        self.asked += Counter()

    @rule()
    def write(self) -> None:
        before = self.there
        written = self.addresses.write()
        assert self.there <= self.asked.keys()
        assert written.failed.keys() == self.asked.keys() - self.there
        assert bool(written.failed) == (len(self.asked) > ROOM)
        assert written.writes == len(before ^ self.there)
        assert before & self.asked.keys() <= self.there, "who had an entry has lost it"

    @rule(operations=st.integers(1, 4))
    def write_and_fail(self, operations: int) -> None:
        self.tables.fail_at = self.tables.operations + operations
        written = self.addresses.write()
        self.tables.fail_at = None
        assert all(isinstance(error, DatapathError) for error in written.failed.values())
        assert written.failed.keys() == self.asked.keys() ^ self.there

    @rule()
    def restart(self) -> None:
        self.addresses = ServiceAddresses(self.tables.service_addrs)
        for key in self.asked.elements():
            self.addresses.ask(key)

    @rule(key=KEYS)
    def somebody_else_writes(self, key: bytes) -> None:
        if key in self.there:
            self.tables.service_addrs.delete(key)
        elif len(self.there) < ROOM:
            self.tables.service_addrs.update([(key, bytes(4))])
        else:
            return
        assert not self.addresses.matches()
        self.restart()

    @invariant()
    def it_knows_what_is_there(self) -> None:
        if hasattr(self, "addresses"):
            assert self.addresses.matches()
            assert self.addresses.used == len(self.there)


Asking.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestAsking = Asking.TestCase
