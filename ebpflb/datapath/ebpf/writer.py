# SPDX-License-Identifier: Apache-2.0
"""Makes the tables follow the plan, so that at every single step each frontend leads only to
backends of its own service port.

The order is the point of this file:

* A changed set of backends goes to a fresh range; one store of the word switches all frontends of
  the service port to it. The old range is free after a grace period.
* A changed policy is one store of the flags, which makes another set visible to its frontends:
  that set's word goes before it, and the word of the set that it hides goes after it.
* Source ranges are flags beside the policies, and networks in a trie. Whom they begin to keep out
  is kept out before any word changes. Whom they no longer keep out is let in after all words have,
  and not while somebody may still hold an address that went with the ranges. Of two networks one
  contains the other or they are apart, so between the two those are let in whom both plans let in.
* A new service port is complete before its first frontend is inserted; of one that goes, the
  frontends go first, and the rest after a grace period.
* A frontend's value is never replaced, and nothing is inserted into `frontends` while an element
  deleted there may still be in a reader's hand.

What is known of the kernel is kept beside it, byte for byte, so a sync writes only differences.
The writer must not know how plans are made, and takes no decision that a plan could take.
"""

from __future__ import annotations

import contextlib
import errno
import struct
import sys
from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ebpflb.datapath.base import SyncReport
from ebpflb.datapath.ebpf.addresses import ServiceAddresses
from ebpflb.datapath.ebpf.encode import (
    BY_NET,
    MEMBER_VALUE,
    NODE_ADDRESS_VALUE,
    SOURCE_RANGE_VALUE,
    Encoded,
    Slots,
    encode,
    encode_frontend,
    encode_node_addresses,
    encode_service_address,
    encode_source_range,
    encode_subnets,
    probe_frontends,
    setting_flags,
)
from ebpflb.datapath.ebpf.grace import Gate
from ebpflb.datapath.ebpf.ranges import Range, Ranges
from ebpflb.datapath.ebpf.tables import (
    ADDRESS_ANSWERS,
    ADDRESS_KNOWN,
    BACKEND,
    CLUSTER,
    EXTERNAL,
    FRONTEND_KEY,
    FRONTEND_VALUE,
    GENERATIONS,
    ID,
    INDEX_BITS,
    INTERNAL,
    KIND_PROBE,
    KINDS,
    LOCAL,
    MAX_COUNT,
    PORT,
    PORT_EXTERNAL_LOCAL,
    PORT_INTERNAL_LOCAL,
    PORT_IPV6,
    PORT_LB_NO_HOST,
    PORT_LB_NO_PODS,
    PORT_LB_RANGES,
    SERVICE_ADDRESS_KEY,
    SETS,
    Table,
    Tables,
    Word,
    make_id,
    pack_name,
    read_frontends,
    read_members,
    read_names,
    read_source_ranges,
    unpack_port,
    unpack_word,
)
from ebpflb.errors import DatapathError
from ebpflb.model import (
    Address,
    Family,
    FrontendKind,
    Network,
    Plan,
    PlannedPort,
    Protocol,
    ServicePortName,
)

MAX_UNRELEASED = 4
"""Copies of one service port's range that may wait for their grace period; more changes wait."""

_AFFINITY_OFFSET = PORT.offsets["affinity_s"]
_DRAINING_OFFSET = PORT.offsets["draining"]
_TAIL_OFFSET = PORT.offsets["generation"]
_RANGES = PORT_LB_NO_PODS | PORT_LB_NO_HOST | PORT_LB_RANGES
_EVERYBODY = frozenset({Network(Address(bytes(16)), 0)})


class _NotYetError(Exception):
    """This change must wait for a grace period; it is no failure."""


class Published(NamedTuple):
    """What one set of a service port has: its word, its range and what stands in that."""

    word: int = 0
    range: Range | None = None
    raw: bytes = b""


_NOTHING = (Published(),) * SETS


@dataclass(slots=True)
class Programmed:
    """What the tables hold of one service port. There may be many: what is empty is shared."""

    name: ServicePortName
    index: int
    id: int
    sets: tuple[Published, ...] = _NOTHING
    affinity_s: int = 0
    draining: int = 0
    flags: int = 0
    frontends: dict[bytes, bytes] = field(default_factory=dict)
    members: frozenset[bytes] = frozenset()
    source_ranges: frozenset[Network] = frozenset()
    answering: int = 0
    """A bit for each scope whose frontends lead somewhere, as `service_addrs` was told."""
    unreleased: int = 0
    quiet_at: int = 0
    """When nobody can still hold a frontend of it that was deleted."""

    def set(self, which: int, now: Published) -> None:
        self.sets = (*self.sets[:which], now, *self.sets[which + 1 :])

    def ranges(self) -> list[Range]:
        return [one.range for one in self.sets if one.range]

    def pack(self) -> bytes:
        return PORT.pack(
            struct.pack(f"={SETS}Q", *(one.word for one in self.sets)),
            self.id,
            self.affinity_s,
            self.draining,
            self.id >> INDEX_BITS,
            self.name.protocol,
            self.flags,
        )


@dataclass(slots=True)
class _Retired:
    """What may be used again once the gate has reached ``ticket``."""

    ticket: int
    ranges: list[Range]
    port: Programmed | None = None
    dying: bool = False


class Writer:
    """The one writer of the tables. Begins with what is there; writes nothing before a sync.

    Whoever makes one sees to it that a grace period has passed since the last writer.
    """

    def __init__(self, tables: Tables, gate: Gate) -> None:
        self._tables = tables
        self._gate = gate
        self._ports: dict[ServicePortName, Programmed] = {}
        self._owner: dict[bytes, ServicePortName] = {}
        self._free = Ranges(0)
        self._indexes: deque[int] = deque()
        self._generations = array("H")
        self._retired: list[_Retired] = []
        self._frontends_quiet_at = 0
        self._stray_frontends: set[bytes] = set()
        self._stray_members: set[bytes] = set()
        self._stray_names: set[int] = set()
        self._stray_ranges: set[bytes] = set()
        self._probe_missing: dict[bytes, bytes] = {}
        self._node_addresses: set[bytes] = set()
        self._flags = 0
        self._subnets = tables.read_subnets()
        self._subnets_quiet_at = 0
        self._source_ranges = 0
        self._addresses = ServiceAddresses(tables.service_addrs)
        self._writes = 0
        self._restore()

    @property
    def programmed(self) -> Collection[ServicePortName]:
        return self._ports.keys()

    @property
    def ids(self) -> frozenset[int]:
        """Of the service ports that are programmed, not of those that go. Any thread may ask."""
        return frozenset([port.id for port in self._ports.copy().values()])

    @property
    def slots_used(self) -> int:
        """Slots of `backends` that are published or wait for a grace period."""
        return self._tables.backend_entries - self._free.free

    @property
    def frontends_used(self) -> int:
        return len(self._owner)

    @property
    def node_addresses_used(self) -> int:
        return len(self._node_addresses)

    @property
    def source_ranges_used(self) -> int:
        return self._source_ranges

    @property
    def service_addresses_used(self) -> int:
        return self._addresses.used

    # --- start: what is there -------------------------------------------------------------------

    def _restore(self) -> None:
        """Learn what the tables hold. What makes no sense is marked to be removed by a sync."""
        tables = self._tables
        names = read_names(tables)
        frontends = read_frontends(tables)
        used: dict[int, int] = {}
        for frontend in frontends:
            used[frontend.id] = used.get(frontend.id, 0) + 1

        strays = self._restore_ports(names, used)
        by_id = {port.id: port for port in self._ports.values()}
        for frontend in frontends:
            owner = by_id.get(frontend.id)
            if owner is not None and frontend.kind != KIND_PROBE:
                owner.frontends[frontend.key] = FRONTEND_VALUE.pack(
                    frontend.id, frontend.kind, frontend.scope
                )
                self._owner[frontend.key] = owner.name
            elif frontend.kind != KIND_PROBE or frontend.key not in probe_frontends():
                self._stray_frontends.add(frontend.key)
        members: dict[int, set[bytes]] = defaultdict(set)
        for member in read_members(tables):
            port = by_id.get(member.id)
            if port is not None:
                members[port.id].add(member.key)
            else:
                self._stray_members.add(member.key)
        for one, keys in members.items():
            by_id[one].members = frozenset(keys)
        self._restore_source_ranges(by_id)
        self._stray_names = {one for one in names if one not in by_id}
        there = {frontend.key for frontend in frontends}
        self._probe_missing = {k: v for k, v in probe_frontends().items() if k not in there}
        self._node_addresses = {key for key, _ in tables.node_addrs.items()}
        self._flags = tables.read_flags()

        for port in self._ports.values():
            port.answering = _answering(port)
            for key in port.frontends:
                self._ask_for_addresses(port, key)

        self._free = Ranges(tables.backend_entries, self._restore_ranges())
        for port in strays:
            self._retired.append(_Retired(self._gate.ticket(), [], port, dying=True))

    def _restore_source_ranges(self, by_id: Mapping[int, Programmed]) -> None:
        found: dict[int, set[Network]] = defaultdict(set)
        for entry in read_source_ranges(self._tables):
            if entry.id in by_id and entry.network is not None:
                found[entry.id].add(entry.network)
            else:
                self._stray_ranges.add(entry.key)
        for one, networks in found.items():
            by_id[one].source_ranges = frozenset(networks)
            self._source_ranges += len(networks)

    def _restore_ports(self, names: dict[int, str], used: dict[int, int]) -> list[Programmed]:
        """Adopt every live slot by its name; returns those that cannot be."""
        raw = self._tables.read_ports()
        strays = []
        self._indexes = deque()
        self._generations = array("H", bytes(2 * self._tables.port_entries))
        for index in range(self._tables.port_entries):
            slot = raw[index * PORT.size : (index + 1) * PORT.size]
            self._generations[index] = PORT.unpack(slot).generation
            entry = unpack_port(index, slot, names)
            if entry is None:
                self._indexes.append(index)
                continue
            values = PORT.unpack(slot)
            family = Family.IPV6 if entry.ipv6 else Family.IPV4
            port = Programmed(
                name=entry.name or ServicePortName("", f"#{entry.id}", "", Protocol.TCP, family),
                index=index,
                id=entry.id,
                sets=tuple(map(Published, memoryview(values.word).cast("Q"))),
                affinity_s=entry.affinity_s,
                draining=entry.draining,
                flags=entry.flags,
            )
            sane = entry.id == make_id(index, values.generation)
            other = self._ports.get(port.name)
            if (
                not sane
                or entry.name is None
                or (other is not None and used.get(other.id, 0) >= used.get(port.id, 0))
            ):
                strays.append(port)
            else:
                if other is not None:
                    strays.append(other)
                self._ports[port.name] = port
        return strays

    def _restore_ranges(self) -> list[Range]:
        """Adopt the ranges whose slots are all the service port's own; the rest is rewritten."""
        for port in self._ports.values():
            cluster, local = (unpack_word(one.word) for one in port.sets)
            here = Range(local.base, local.length)
            whole = Range(cluster.base, cluster.length + port.draining)
            self._adopt(port, LOCAL, here)
            # `draining` is stored before the word, so after a crash it may reach into what follows.
            # What is published must never count as free; it is rewritten all the same.
            if not whole.overlaps(here) and self._adopt(port, CLUSTER, whole):
                continue
            if self._adopt(port, CLUSTER, Range(cluster.base, cluster.length)):
                port.set(CLUSTER, port.sets[CLUSTER]._replace(raw=b""))
        return _without_overlaps(self._ports.values())

    def _adopt(self, port: Programmed, which: int, one: Range) -> bool:
        if not one.size or one.end > self._tables.backend_entries:
            return False
        raw = self._tables.read_backends(one.base, one.size)
        owners = memoryview(raw).cast("I")[BACKEND.offsets["owner"] // 4 :: BACKEND.size // 4]
        if any(owner != port.id for owner in owners):
            return False
        port.set(which, Published(port.sets[which].word, one, raw))
        return True

    # --- sync -----------------------------------------------------------------------------------

    def sync(self, plan: Plan, changed: Collection[ServicePortName] | None) -> SyncReport:
        """Write what differs. With ``changed`` None everything is compared."""
        self._writes = 0
        failed: dict[ServicePortName, DatapathError] = {}
        deferred: set[ServicePortName] = set()
        self.release()
        names = self._ports.keys() | plan.ports.keys() if changed is None else set(changed)
        self._set_node(plan, failed)

        inserts: dict[bytes, bytes] = {}
        inserters: dict[bytes, ServicePortName] = {}
        deletes: set[bytes] = set()
        if changed is None:
            self._drop_strays(deletes)
            inserts |= self._probe_missing
        for name in sorted(names, key=lambda each: each.sort_key):
            planned = plan.ports.get(name)
            if planned is None:
                deletes |= self._frontends_of(name)
                continue
            try:
                encoded = self._program(planned)
                self._open(self._ports[name], encoded, failed, deferred)
            except (_NotYetError, DatapathError) as error:
                if isinstance(error, DatapathError):
                    failed[name] = error
                else:
                    deferred.add(name)
                # What it no longer has may be another's: that must not wait for its backends.
                deletes |= self._frontends_of(name) - {
                    encode_frontend(frontend) for frontend in planned.frontends
                }
                continue
            finally:
                self._note_answering(name)
            port = self._ports[name]
            for key, value in encoded.frontends.items():
                if port.frontends.get(key) != value:
                    if key in port.frontends:
                        deletes.add(key)
                    inserts[key] = value
                    inserters[key] = name
            deletes |= port.frontends.keys() - encoded.frontends.keys()

        if inserts and not self._is_quiet():
            # Each delete makes the inserts wait for one more grace period. So that a stream of
            # them cannot hold up a new Service for ever, they take turns.
            held = deletes - inserts.keys()
            deferred |= {self._owner[key] for key in held if key in self._owner}
            deletes -= held
        waiting = self._insert_frontends(inserts, inserters, failed)
        deferred |= {inserters[key] for key in waiting if key in inserters}
        self._delete_frontends(deletes, failed)
        self._bury([name for name in names if name not in plan.ports])
        self._write_addresses(failed)
        return SyncReport(self._writes, failed, frozenset(deferred))

    def _set_node(self, plan: Plan, failed: dict[ServicePortName, DatapathError]) -> None:
        """What holds for the whole node: where NodePorts answer and to whom, and who is a pod."""
        self._set_flags_of_node(setting_flags(plan) & ~self._follow_subnets(plan))
        wanted = encode_node_addresses(plan)
        if wanted == self._node_addresses:
            return
        try:
            for key in sorted(self._node_addresses - wanted):
                self._tables.node_addrs.delete(key)
                self._node_addresses.discard(key)
                self._writes += 1
            for key in sorted(wanted - self._node_addresses):
                self._update(self._tables.node_addrs, "node_addrs", [(key, NODE_ADDRESS_VALUE)])
                self._node_addresses.add(key)
                self._writes += 1
        except DatapathError as error:
            # For each of them an address is missing, or one too many; each is tried again.
            failed |= {port.name: error for port in plan.ports.values() if _has_node_port(port)}

    def _follow_subnets(self, plan: Plan) -> int:
        """Write where the pods are; returns the flags that may not lead there yet.

        Nobody may read half of one. While it changes, for a grace period, pods are not told by it.
        """
        subnets = encode_subnets(plan)
        if subnets == self._subnets:
            return 0
        if self._flags & BY_NET:
            self._set_flags_of_node(self._flags & ~BY_NET)
            self._subnets_quiet_at = self._gate.ticket()
        if self._gate.done() < self._subnets_quiet_at:
            return BY_NET
        self._tables.write_subnets(subnets)
        self._subnets = subnets
        self._writes += 1
        return 0

    def _set_flags_of_node(self, flags: int) -> None:
        if flags != self._flags:
            self._tables.write_flags(flags)
            self._flags = flags
            self._writes += 1

    def _frontends_of(self, name: ServicePortName) -> set[bytes]:
        port = self._ports.get(name)
        return set(port.frontends) if port else set()

    def _program(self, planned: PlannedPort) -> Encoded:
        """Everything of a service port but its frontends."""
        port = self._ports.get(planned.name) or self._create(planned.name)
        encoded = encode(planned, port.id)
        # At once, also where members or backends must wait or have no room.
        self._close(port, encoded)
        self._add_members(port, encoded.members - port.members)
        self._publish(port, encoded)
        self._drop_members(port, port.members - encoded.members)
        return encoded

    def _create(self, name: ServicePortName) -> Programmed:
        try:
            text = pack_name(name)
        except ValueError as error:
            raise DatapathError("name", str(name), hint=str(error)) from None
        if not self._indexes:
            if self._retired:
                raise _NotYetError
            raise _full("ports", self._tables.port_entries)
        index = self._indexes[0]
        generation = self._generations[index] % (GENERATIONS - 1) + 1
        flags = PORT_IPV6 if name.family is Family.IPV6 else 0
        port = Programmed(name, index, make_id(index, generation), flags=flags)
        self._stray_names.add(port.id)  # until all of it is there
        self._update(self._tables.names, "names", [(ID.pack(port.id), text)])
        self._tables.clear_connections(index)
        self._tables.write_port(index, port.pack())
        self._indexes.popleft()
        self._generations[index] = generation
        self._stray_names.discard(port.id)
        self._ports[name] = port
        self._writes += 2
        return port

    def _add_members(self, port: Programmed, keys: Iterable[bytes]) -> None:
        items = [(key, MEMBER_VALUE) for key in sorted(keys)]
        if items:
            try:
                self._update(self._tables.members, "members", items)
            except DatapathError:
                lookup = self._tables.members.lookup  # some may have been written
                port.members |= {key for key, _ in items if lookup(key) is not None}
                raise
            port.members |= {key for key, _ in items}
            self._writes += len(items)

    def _drop_members(self, port: Programmed, keys: Iterable[bytes]) -> None:
        for key in sorted(keys):
            self._tables.members.delete(key)
            port.members -= {key}
            self._writes += 1

    def _publish(self, port: Programmed, encoded: Encoded) -> None:
        fresh: dict[int, Range] = {}
        replaced: list[Range] = []
        try:
            for which, slots in enumerate(encoded.sets):
                if slots.raw and slots.raw != port.sets[which].raw:
                    fresh[which] = self._take(port, slots)
        except (DatapathError, _NotYetError):
            for one in fresh.values():
                self._free.give_back(one)
            raise
        for which, slots in enumerate(encoded.sets):
            before = port.sets[which]
            if slots.raw == before.raw:
                continue
            if which in fresh:
                self._tables.write_backends(fresh[which].base, slots.raw)
                self._writes += slots.size
            if before.range:
                replaced.append(before.range)
            port.set(which, Published(before.word, fresh.get(which), slots.raw))
        self._switch(port, encoded)
        if replaced:
            port.unreleased += 1
            self._retired.append(_Retired(self._gate.ticket(), replaced, port))

    def _switch(self, port: Programmed, encoded: Encoded) -> None:
        """Show what is written; see above for the order."""
        self._set_fields(port, encoded)
        for which in _appearing(port.flags, encoded.port_flags):
            self._set_word(port, which, encoded.sets[which])
        self._set_flags(port, encoded.port_flags | port.flags & _RANGES)
        for which, slots in enumerate(encoded.sets):
            self._set_word(port, which, slots)

    def _is_leaving(self, port: Programmed, encoded: Encoded) -> bool:
        """Whether somebody may reach ``port`` at an address that is no longer planned."""
        return self._gate.done() < port.quiet_at or any(
            encoded.frontends.get(key) != value for key, value in port.frontends.items()
        )

    # --- source ranges --------------------------------------------------------------------------

    def _close(self, port: Programmed, encoded: Encoded) -> None:
        """Keep out whom ``encoded`` keeps out; whom it lets in and has been let in is never out.

        But where `source_ranges` has no room: whoever does not fit in is kept out.
        """
        wanted = encoded.source_ranges
        if not wanted:
            return
        let_in = port.source_ranges if port.flags & PORT_LB_RANGES else _EVERYBODY
        # What has no room now may have some when others are gone: `_open` tries again, and tells.
        with contextlib.suppress(DatapathError):
            self._add_ranges(port, _within(wanted, let_in))
        self._set_flags(port, port.flags | encoded.port_flags & _RANGES)
        self._drop_ranges(port, port.source_ranges - _within(port.source_ranges, wanted))

    def _open(
        self,
        port: Programmed,
        encoded: Encoded,
        failed: dict[ServicePortName, DatapathError],
        deferred: set[ServicePortName],
    ) -> None:
        """Let in whom ``encoded`` lets in, unless that must wait."""
        if (port.flags, port.source_ranges) == (encoded.port_flags, encoded.source_ranges):
            return
        if self._is_leaving(port, encoded):
            deferred.add(port.name)
            return
        self._set_flags(port, encoded.port_flags)
        try:
            self._add_ranges(port, encoded.source_ranges)
            self._drop_ranges(port, port.source_ranges - encoded.source_ranges)
        except DatapathError as error:  # its endpoints and frontends are served all the same
            failed[port.name] = error

    def _add_ranges(self, port: Programmed, networks: Iterable[Network]) -> None:
        for network in sorted(networks):
            if network in port.source_ranges:
                continue
            item = (encode_source_range(network, port.id), SOURCE_RANGE_VALUE)
            self._update(self._tables.source_ranges, "source_ranges", [item])
            port.source_ranges |= {network}
            self._source_ranges += 1
            self._writes += 1

    def _drop_ranges(self, port: Programmed, networks: Iterable[Network]) -> None:
        for network in sorted(networks):
            self._tables.source_ranges.delete(encode_source_range(network, port.id))
            port.source_ranges -= {network}
            self._source_ranges -= 1
            self._writes += 1

    # --- words and flags ------------------------------------------------------------------------

    def _set_word(self, port: Programmed, which: int, slots: Slots) -> None:
        before = port.sets[which]
        base = before.range.base if before.range else 0
        word = Word(base, slots.active, slots.flags).pack()
        if word != before.word:
            self._tables.publish(port.index, which, word)
            port.set(which, before._replace(word=word))
            self._writes += 1

    def _take(self, port: Programmed, slots: Slots) -> Range:
        if port.unreleased >= MAX_UNRELEASED:
            raise _NotYetError
        one = self._free.take(slots.size) if slots.size <= MAX_COUNT else None
        if one is None:
            if any(entry.ranges for entry in self._retired):
                raise _NotYetError
            raise _full(
                "backends",
                self._tables.backend_entries,
                f"{slots.size} slots in a row are needed, {self._free.largest} are free "
                f"({self._free.free} in all)",
            )
        return one

    def _set_fields(self, port: Programmed, encoded: Encoded) -> None:
        tables = self._tables
        if encoded.affinity_s != port.affinity_s:
            # A reader of the word before may see it early: a record then lives shorter or longer.
            tables.set_port_field(port.index, _AFFINITY_OFFSET, encoded.affinity_s)
            port.affinity_s = encoded.affinity_s
            self._writes += 1
        if encoded.draining != port.draining:
            tables.set_port_field(port.index, _DRAINING_OFFSET, encoded.draining)
            port.draining = encoded.draining
            self._writes += 1

    def _set_flags(self, port: Programmed, flags: int) -> None:
        if flags != port.flags:
            port.flags = flags
            tail = int.from_bytes(port.pack()[_TAIL_OFFSET:], sys.byteorder)
            self._tables.set_port_field(port.index, _TAIL_OFFSET, tail)
            self._writes += 1

    # --- frontends ------------------------------------------------------------------------------

    def _insert_frontends(
        self,
        inserts: dict[bytes, bytes],
        inserters: dict[bytes, ServicePortName],
        failed: dict[ServicePortName, DatapathError],
    ) -> set[bytes]:
        """Insert what may be inserted now; returns the keys that must wait for a grace period."""
        if not self._is_quiet():
            return set(inserts)
        # A key that leads elsewhere is deleted by this sync, and free after a grace period.
        waiting = {key for key in inserts if key in self._owner or key in self._stray_frontends}
        ready = [(key, value) for key, value in inserts.items() if key not in waiting]
        if not ready:
            return waiting
        try:
            self._update(self._tables.frontends, "frontends", ready)
            written = ready
        except DatapathError:
            written = []
            for item in ready:  # find whose they are that do not fit
                try:
                    # Written again it would be a replaced value, same as it is.
                    if self._tables.frontends.lookup(item[0]) != item[1]:
                        self._update(self._tables.frontends, "frontends", [item])
                    written.append(item)
                except DatapathError as error:
                    if item[0] in inserters:
                        failed[inserters[item[0]]] = error
        for key, value in written:
            self._writes += 1
            if key in inserters:
                port = self._ports[inserters[key]]
                port.frontends[key] = value
                self._owner[key] = inserters[key]
                self._ask_for_addresses(port, key)
            else:
                self._probe_missing.pop(key, None)
        return waiting

    def _is_quiet(self) -> bool:
        """Whether nobody can still hold an element that was deleted from `frontends`."""
        return self._gate.done() >= self._frontends_quiet_at

    def _delete_frontends(
        self, keys: set[bytes], failed: dict[ServicePortName, DatapathError]
    ) -> None:
        deleted = False
        losers = []
        for key in sorted(keys):
            owner = self._owner.get(key)
            try:
                self._tables.frontends.delete(key)
            except DatapathError as error:
                if owner is not None:
                    failed[owner] = error
                continue
            deleted = True
            self._writes += 1
            if owner is not None:
                del self._owner[key]
                losers.append(self._ports[owner])
                self._give_back_addresses(losers[-1], key)
                del losers[-1].frontends[key]
            self._stray_frontends.discard(key)
        if deleted:
            self._frontends_quiet_at = self._gate.ticket()
        for port in losers:
            port.quiet_at = self._frontends_quiet_at

    # --- the Services' addresses ----------------------------------------------------------------

    def _ask_for_addresses(self, port: Programmed, key: bytes) -> None:
        for entry in _address_entries(port, key):
            self._addresses.ask(entry)

    def _give_back_addresses(self, port: Programmed, key: bytes) -> None:
        for entry in _address_entries(port, key):
            self._addresses.give_back(entry)

    def _note_answering(self, name: ServicePortName) -> None:
        """Whether its addresses answer may have changed with its words and policies."""
        port = self._ports.get(name)
        if port is None or (now := _answering(port)) == port.answering:
            return
        for key in port.frontends:
            self._give_back_addresses(port, key)
        port.answering = now
        for key in port.frontends:
            self._ask_for_addresses(port, key)

    def _write_addresses(self, failed: dict[ServicePortName, DatapathError]) -> None:
        written = self._addresses.write()
        self._writes += written.writes
        if not written.failed:
            return
        by_address = {
            SERVICE_ADDRESS_KEY.unpack(key).address: error for key, error in written.failed.items()
        }
        for port in self._ports.values():
            for key in port.frontends:
                if error := by_address.get(FRONTEND_KEY.unpack(key).address):
                    failed.setdefault(port.name, _named(error, "service_addrs"))

    # --- strays ---------------------------------------------------------------------------------

    def _drop_strays(self, deletes: set[bytes]) -> None:
        deletes |= self._stray_frontends
        dying = {entry.port.id for entry in self._retired if entry.dying and entry.port}
        for table, keys in (
            (self._tables.members, self._stray_members),
            (self._tables.names, {ID.pack(i) for i in self._stray_names - dying}),
            (self._tables.source_ranges, self._stray_ranges),
        ):
            for key in sorted(keys):
                table.delete(key)
                self._writes += 1
        self._stray_members.clear()
        self._stray_ranges.clear()
        self._stray_names &= dying

    # --- what goes, and what comes back ---------------------------------------------------------

    def _bury(self, names: Iterable[ServicePortName]) -> None:
        for name in names:
            port = self._ports.get(name)
            if port is None or port.frontends:
                continue
            del self._ports[name]
            self._retired.append(_Retired(self._gate.ticket(), [], port, dying=True))

    def release(self) -> None:
        """Take back all whose grace period is over."""
        done = self._gate.done()
        keep = []
        for entry in self._retired:
            if entry.ticket > done or (entry.dying and not self._forget(entry)):
                keep.append(entry)
                continue
            for one in entry.ranges:
                self._free.give_back(one)
            if entry.port is not None and not entry.dying:
                entry.port.unreleased -= 1
        self._retired = keep

    def _forget(self, entry: _Retired) -> bool:
        """The last of a service port that no program can know any more. False: try again."""
        port = entry.port
        if port is None:
            return True
        try:
            self._drop_members(port, port.members)
            self._drop_ranges(port, port.source_ranges)
            self._tables.names.delete(ID.pack(port.id))
        except DatapathError:
            return False
        self._tables.write_port(
            port.index,
            PORT.pack(bytes(8 * SETS), 0, 0, 0, self._generations[port.index], 0, 0),
        )
        entry.ranges += port.ranges()
        self._indexes.append(port.index)
        self._stray_names.discard(port.id)
        self._writes += 2
        return True

    def _update(self, table: Table, name: str, items: list[tuple[bytes, bytes]]) -> None:
        try:
            table.update(items)
        except DatapathError as error:
            raise _named(error, name) from None

    # --- audit ----------------------------------------------------------------------------------

    def mend_names(self) -> None:
        """Write the names back that are lost: by them a new writer adopts the service ports."""
        for port in self._ports.values():
            name = (ID.pack(port.id), pack_name(port.name))
            if self._tables.names.lookup(name[0]) != name[1]:
                self._tables.names.update([name])

    def matches(self) -> bool:
        """Whether the tables are, byte for byte, as this writer left them."""
        tables = self._tables
        dying = [entry.port for entry in self._retired if entry.dying and entry.port]
        frontends = probe_frontends()
        members: set[bytes] = set()
        source_ranges: set[bytes] = set()
        names: dict[bytes, bytes] = {}
        raw = tables.read_ports()
        free = bytearray(raw)  # blank out what is ours: the rest must have no id
        for port in (*self._ports.values(), *dying):
            at = slice(port.index * PORT.size, (port.index + 1) * PORT.size)
            if raw[at] != port.pack():
                return False
            free[at] = bytes(PORT.size)
            frontends |= port.frontends
            members |= port.members
            source_ranges |= {encode_source_range(one, port.id) for one in port.source_ranges}
            names[ID.pack(port.id)] = pack_name(port.name)
            for one in port.sets:
                if one.range and tables.read_backends(*one.range) != one.raw:
                    return False
        ids = memoryview(free).cast("I")[PORT.offsets["id"] // 4 :: PORT.size // 4]
        return (
            not any(ids)
            and _holds(tables.frontends, frontends)
            and {key for key, _ in tables.members.items()} == members
            and _holds(tables.names, names)
            and {key for key, _ in tables.node_addrs.items()} == self._node_addresses
            and {key for key, _ in tables.source_ranges.items()} == source_ranges
            and self._addresses.matches()
            and (tables.read_flags(), tables.read_subnets()) == (self._flags, self._subnets)
        )


def _holds(table: Table, expected: Mapping[bytes, bytes]) -> bool:
    """Whether it has these entries and no others; it may be too large to be copied."""
    count = 0
    for key, value in table.items():
        if expected.get(key) != value:
            return False
        count += 1
    return count == len(expected)


def _without_overlaps(ports: Iterable[Programmed]) -> list[Range]:
    """The adopted ranges; of two that overlap the later loses its own and is rewritten."""
    taken: list[Range] = []
    end = 0
    every = [
        (one.range, port, which)
        for port in ports
        for which, one in enumerate(port.sets)
        if one.range is not None
    ]
    for one, port, which in sorted(every, key=lambda entry: entry[0]):
        if one.base < end:
            port.set(which, Published(port.sets[which].word))
        else:
            taken.append(one)
            end = one.end
    return taken


def _appearing(before: int, after: int) -> set[int]:
    """The sets that a change of a port's flags makes somebody choose who did not before."""
    return {
        LOCAL if after & flag else CLUSTER
        for flag in (PORT_INTERNAL_LOCAL, PORT_EXTERNAL_LOCAL)
        if (before ^ after) & flag
    }


def _within(networks: Collection[Network], others: Collection[Network]) -> set[Network]:
    """Those of ``networks`` that are in one of ``others``."""
    starts = {(other.length, _start(other, other.length)) for other in others}
    lengths = {other.length for other in others}
    return {
        one
        for one in networks
        if any(
            (length, _start(one, length)) in starts for length in lengths if length <= one.length
        )
    }


def _start(network: Network, length: int) -> int:
    return int.from_bytes(network.address) >> 128 - length


def _answering(port: Programmed) -> int:
    """A bit for each scope in which it leads those somewhere who come from outside."""
    return sum(
        1 << scope
        for scope, flag in ((INTERNAL, PORT_INTERNAL_LOCAL), (EXTERNAL, PORT_EXTERNAL_LOCAL))
        if unpack_word(port.sets[LOCAL if port.flags & flag else CLUSTER].word).length
    )


def _address_entries(port: Programmed, key: bytes) -> list[bytes]:
    """What `service_addrs` needs for one frontend of ``port``."""
    frontend = FRONTEND_VALUE.unpack(port.frontends[key])
    if KINDS.get(frontend.kind) is FrontendKind.NODE_PORT:
        return []
    address = FRONTEND_KEY.unpack(key).address
    roles = (ADDRESS_KNOWN, ADDRESS_ANSWERS)
    wanted = roles if port.answering & 1 << frontend.scope else roles[:1]
    return [encode_service_address(address, role) for role in wanted]


def _has_node_port(port: PlannedPort) -> bool:
    return any(one.kind is FrontendKind.NODE_PORT for one in port.frontends)


def _named(error: DatapathError, name: str) -> DatapathError:
    """``error`` of the map ``name``: as one of a full map where it is."""
    return _full(name) if error.errno in (errno.E2BIG, errno.ENOSPC) else error


def _full(name: str, entries: int = 0, detail: str = "") -> DatapathError:
    size = f" of {entries}" if entries else ""
    return DatapathError(
        "write to map",
        name,
        errno.E2BIG,
        hint=f"the map{size} is full{': ' + detail if detail else ''}; "
        f"give it more room with --map-size {name}=N",
    )
