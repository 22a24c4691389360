"""The tables of a datapath in memory, with readers that hold on to what they have seen.

Behaves like the kernel where it matters to the writer's order: a deleted element is used again by
the next insert, and a reader that began before may still look at it. Fails where it is told to.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterator, Sequence

from ebpflb.datapath.ebpf.encode import BY_NET
from ebpflb.datapath.ebpf.tables import (
    BACKEND,
    FRONTEND_VALUE,
    KIND_PROBE,
    NO_SUBNETS,
    PORT,
    SETS,
    Subnets,
    Table,
    index_of,
    unpack_word,
)
from ebpflb.errors import DatapathError
from ebpflb.model import Address


def v4(*octets: int) -> Address:
    return Address(bytes(10) + b"\xff\xff" + bytes(octets))


class CrashError(Exception):
    """The writer's process ends here. Nothing in it may catch this."""


class ManualGate:
    """A grace period passes when the test says so."""

    def __init__(self) -> None:
        self.drawn = 0
        self.passed = 0

    def ticket(self) -> int:
        self.drawn += 1
        return self.drawn

    def done(self) -> int:
        return self.passed

    def close(self) -> None:
        """Nothing is held."""


class _Element:
    def __init__(self) -> None:
        self.key = b""
        self.value = b""


class MemoryTable:
    """A hash map that uses a freed element again at once, as the kernel does."""

    def __init__(
        self, name: str, size: int, step: Callable[[], None], *, full: int = errno.E2BIG
    ) -> None:
        self.name = name
        self.size = size
        self._full = full
        self._step = step
        self._elements: dict[bytes, _Element] = {}
        self._free: list[_Element] = []

    def lookup(self, key: bytes) -> bytes | None:
        found = self._elements.get(key)
        return None if found is None else found.value

    def element(self, key: bytes) -> _Element:
        return self._elements[key]

    def update(self, items: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in items:
            self._step()
            element = self._elements.get(key)
            if element is None:
                if len(self._elements) >= self.size:
                    raise DatapathError("write to map", self.name, self._full)
                element = self._free.pop() if self._free else _Element()
                self._elements[key] = element
            else:
                # Even by the same value: the kernel puts the old element where the next replace
                # takes it from, while a reader may still hold it.
                assert self.name != "frontends", "a frontend's value was replaced"
            element.key, element.value = key, value

    def delete(self, key: bytes) -> None:
        self._step()
        element = self._elements.pop(key, None)
        if element is not None:
            self._free.append(element)

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        yield from [(key, element.value) for key, element in self._elements.items()]

    def __len__(self) -> int:
        return len(self._elements)


class MemoryTables:
    """``Tables`` in memory. After every operation each reader, past and present, is asked again."""

    def __init__(
        self,
        *,
        ports: int = 64,
        backends: int = 4096,
        frontends: int = 256,
        members: int = 4096,
        names: int = 256,
        node_addrs: int = 64,
        source_ranges: int = 256,
        service_addrs: int = 256,
    ) -> None:
        self.port_entries = ports
        self.backend_entries = backends
        self._frontends = MemoryTable("frontends", frontends, self._step)
        self.frontends: Table = self._frontends
        self.members: Table = MemoryTable("members", members, self._step)
        self.names: Table = MemoryTable("names", names, self._step)
        self.node_addrs: Table = MemoryTable("node_addrs", node_addrs, self._step)
        self.source_ranges: Table = MemoryTable(
            "source_ranges", source_ranges, self._step, full=errno.ENOSPC
        )
        self.service_addrs: Table = MemoryTable("service_addrs", service_addrs, self._step)
        self._flags = 0
        self._subnets = NO_SUBNETS
        self._held_subnets: Subnets | None = None
        self._ports = bytearray(ports * PORT.size)
        self._backends = bytearray(backends * BACKEND.size)
        self.cleared: list[int] = []
        self.operations = 0
        self.fail_at: int | None = None
        self.crash_at: int | None = None
        self.check: Callable[[], None] = lambda: None
        self._held_elements: list[tuple[_Element, bytes, bytes]] = []
        self._held_ids: dict[int, int] = {}
        self._held_ranges: dict[tuple[int, int, int], bytes] = {}

    # --- what the writer may do -----------------------------------------------------------------

    def _store(self) -> None:
        """A store to mapped memory cannot fail, but a process can end before it."""
        self._look()
        self.operations += 1
        if self.crash_at is not None and self.operations >= self.crash_at:
            self.crash_at = None
            raise CrashError

    def _step(self) -> None:
        self._store()
        if self.fail_at is not None and self.operations >= self.fail_at:
            self.fail_at = None
            raise DatapathError("write to map", "test", errno.ENOMEM)

    def read_port(self, index: int) -> bytes:
        return bytes(self._ports[index * PORT.size : (index + 1) * PORT.size])

    def write_port(self, index: int, value: bytes) -> None:
        self._store()
        self._ports[index * PORT.size : (index + 1) * PORT.size] = value
        self._look()

    def set_port_field(self, index: int, offset: int, value: int) -> None:
        self._store()
        struct.pack_into("=I", self._ports, index * PORT.size + offset, value)
        self._look()

    def publish(self, index: int, which: int, word: int) -> None:
        self._store()
        struct.pack_into("=Q", self._ports, index * PORT.size + 8 * which, word)
        self._look()

    def read_ports(self) -> bytes:
        return bytes(self._ports)

    def read_backends(self, base: int, count: int) -> bytes:
        return bytes(self._backends[base * BACKEND.size : (base + count) * BACKEND.size])

    def write_backends(self, base: int, slots: bytes) -> None:
        # A reader may come between any two slots.
        for at in range(0, len(slots), BACKEND.size):
            self._store()
            start = base * BACKEND.size + at
            self._backends[start : start + BACKEND.size] = slots[at : at + BACKEND.size]
            self._look()

    def clear_connections(self, index: int) -> None:
        self._step()
        self.cleared.append(index)

    def read_flags(self) -> int:
        return self._flags

    def write_flags(self, flags: int) -> None:
        self._store()
        self._flags = flags
        self._look()

    def read_subnets(self) -> Subnets:
        return self._subnets

    def write_subnets(self, subnets: Subnets) -> None:
        # A reader may come between any two bytes, and a process may end there.
        for family, raw in enumerate(subnets):
            for length in (1, len(raw) // 2, len(raw)):
                self._store()
                halves = list(self._subnets)
                halves[family] = raw[:length] + halves[family][length:]
                self._subnets = Subnets(*halves)
                self._look()

    # --- readers --------------------------------------------------------------------------------

    def grace(self) -> None:
        """No reader of before is left."""
        self._held_elements.clear()
        self._held_ids.clear()
        self._held_ranges.clear()
        self._held_subnets = None

    def _look(self) -> None:
        """Begin one reader at every frontend, and let those that began before go on."""
        for element, key, value in self._held_elements:
            assert element.value == value, f"a reader of {key.hex()} got another key's value"
        for index, held in self._held_ids.items():
            now = PORT.unpack(self.read_port(index)).id
            assert now == held, f"slot {index} went from id {held:#x} to {now:#x} under a reader"
        for (base, length, owner), raw in self._held_ranges.items():
            assert self.read_backends(base, length) == raw, f"a range of id {owner:#x} changed"
        if self._held_subnets is not None:
            assert self._subnets == self._held_subnets, "a subnet changed under a reader"
        if self._flags & BY_NET:
            self._held_subnets = self._subnets
        for key, value in self.frontends.items():
            frontend = FRONTEND_VALUE.unpack(value)
            self._held_elements.append((self._frontends.element(key), key, value))
            if frontend.kind == KIND_PROBE:
                continue
            index = index_of(frontend.id)
            port = PORT.unpack(self.read_port(index))
            assert port.id == frontend.id, f"a frontend leads to slot {index} of another id"
            self._held_ids[index] = frontend.id
            for word in struct.unpack(f"={SETS}Q", port.word):
                base, length, _ = unpack_word(word)
                raw = self.read_backends(base, length)
                for at in range(0, len(raw), BACKEND.size):
                    owner = BACKEND.unpack(raw[at : at + BACKEND.size]).owner
                    assert owner == frontend.id, "a frontend leads to a foreign backend"
                self._held_ranges[base, length, frontend.id] = raw
        self.check()
