# SPDX-License-Identifier: Apache-2.0
"""Connected UDP sockets whose backend no longer serves are cut off, so that they connect anew.

connect() translated them once, and no program sees what they send then. `udp_conn` knows them. A
walk compares all its entries with what the other maps say, so it does not matter when or why a
backend left, or whether an agent ran then (CT-02 to CT-09). In a thread of its own; the loop only
asks for a walk. This file must not know where plans come from, and writes nothing but `udp_conn`.
"""

from __future__ import annotations

import enum
import errno
import functools
import os
import struct
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from typing import Protocol as Interface

import msgspec

from ebpflb.datapath.ebpf import abi, libbpf, sockdiag
from ebpflb.datapath.ebpf.maps import Map
from ebpflb.errors import DatapathError
from ebpflb.logs import Log
from ebpflb.model import Family, family_of

_log = Log("stale")

MAX_CUTS = 10_000
"""Sockets that one walk destroys; those that are left are the next one's, at once."""

RECHECK_S = 1.0
"""A socket that is in the middle of connect() is indexed, but not to be found yet."""

FORGET_AFTER_S = 30.0
"""How long a socket must not have been found before its entry goes."""

JUDGE_S = 0.1
"""For how long what the maps say is good enough to cut by."""

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 1.0
_SHARE = 10  # a walk that took a second is followed by a pause of at least nine

OF_NO_MAP = 0
"""The id of entries that were made with maps that are gone: it is nobody's."""

UDP_CONN = abi.LAYOUTS["udp_conn"]
PORT = abi.LAYOUTS["port"]
MEMBER_KEY = abi.LAYOUTS["member_key"]
NAME = abi.LAYOUTS["name"]
SETTINGS = abi.LAYOUTS["settings"]

_C = abi.CONSTANTS
_COOKIE = struct.Struct("=Q")
_U32 = struct.Struct("=I")
_INDEX_MASK = (1 << _C["ABI_ID_INDEX_BITS"]) - 1
_COUNT_MASK = (1 << (_C["ABI_WORD_FLAGS_SHIFT"] - _C["ABI_WORD_COUNT_SHIFT"])) - 1
_NOWHERE = {  # nowhere() in bpf/reject.h
    bytes(10) + b"\xff\xff\x7f\0\0\1" + (1).to_bytes(2),
    bytes(15) + b"\1" + (1).to_bytes(2),
}
_MOST_NAMED = 10


class Table(Interface):
    """A pinned map, as far as it is read here."""

    def lookup(self, key: bytes) -> bytes | None: ...
    def items(self) -> Iterator[tuple[bytes, bytes]]: ...


class Index(Table, Interface):
    """`udp_conn`. Programs write it at any time, so nothing is written without a look."""

    def take(self, key: bytes) -> bytes | None:
        """Delete an entry and return it."""
        ...

    def insert(self, key: bytes, value: bytes) -> bool:
        """Write an entry where there is none."""
        ...

    def replace(self, key: bytes, value: bytes) -> bool:
        """Overwrite an entry where there is one."""
        ...


class KernelIndex:
    """``Index`` on the pinned map."""

    def __init__(self, one: Map) -> None:
        self._map = one
        self.lookup = one.lookup
        self.items = one.items

    def take(self, key: bytes) -> bytes | None:
        return libbpf.take(self._map.fd, self._map.name, key, UDP_CONN.size)

    def insert(self, key: bytes, value: bytes) -> bool:
        return libbpf.insert(self._map.fd, self._map.name, key, value)

    def replace(self, key: bytes, value: bytes) -> bool:
        return libbpf.replace(self._map.fd, self._map.name, key, value)


class Diag(Interface):
    """``sockdiag.SockDiag``: the sockets of one network namespace."""

    def connected(self) -> Iterator[sockdiag.Connected]: ...
    def destroy(self, one: sockdiag.Connected) -> int: ...


Visit = Callable[[Collection[int], dict[str, OSError]], Iterator[tuple[int | None, Diag]]]
"""``sockdiag.visit``"""


class Walk(msgspec.Struct, frozen=True, kw_only=True):
    """What one walk did. ``cut`` counts sockets by the family of their backend.

    ``unreached`` are stale sockets in network namespaces that could not be found or entered.
    ``forgotten`` are entries whose socket is no longer connected to what they say.
    """

    duration_s: float
    entries: int
    cut: Mapping[Family, int]
    unreached: int
    forgotten: int


# --- which are stale -----------------------------------------------------------------------------


class Reason(enum.Enum):
    """Why a socket is cut; the value is the word in the log."""

    DELETED = "deleted"  # its service port is no longer programmed
    LEFT = "left"  # its backend does not serve (any more)
    REFUSED = "refused"  # there was no endpoint, and now there is


class Entry(NamedTuple):
    """A value of `udp_conn`, read. ``scope`` and ``kind`` are the frontend's that was dialled."""

    peer: bytes
    id: int
    netns: int
    scope: int
    kind: int


@functools.lru_cache(maxsize=4096)
def read_entry(value: bytes) -> Entry:
    found: Any = UDP_CONN.unpack(value)
    peer = found.backend + found.backend_port
    return Entry(peer, found.id, found.netns, found.scope, found.kind)


class Judge:
    """Says what is stale, by the maps as they are when it is asked.

    ``programmed`` are the ids of the service ports that are planned; ``ports`` also holds those
    that wait for the end of their readers.
    """

    def __init__(
        self, maps: Mapping[str, Table], programmed: Callable[[], Collection[int]]
    ) -> None:
        self._members = maps["members"]
        self._ports = maps["ports"]
        self._programmed = frozenset(programmed())
        settings: Any = SETTINGS.unpack(maps["settings"].lookup(bytes(4)) or bytes(SETTINGS.size))
        self._host_netns = settings.host_netns
        self._flags = settings.flags
        self._reasons: dict[bytes, Reason | None] = {}
        self._serving_somewhere: frozenset[bytes] | None = None

    def reason(self, value: bytes) -> Reason | None:
        """Why the socket of such an entry is to be cut; None where it is to stay."""
        if value not in self._reasons:
            self._reasons[value] = self._decide(read_entry(value))
        return self._reasons[value]

    def _decide(self, entry: Entry) -> Reason | None:
        refused = entry.peer in _NOWHERE
        if entry.id == OF_NO_MAP:
            # Whose it was cannot be told: a backend that serves anybody may serve it still.
            return None if not refused and entry.peer in self._all_serving() else Reason.LEFT
        if entry.id not in self._programmed:
            return Reason.DELETED
        if refused:
            return Reason.REFUSED if self._would_be_served(entry) else None
        return None if self._serves(entry) else Reason.LEFT

    def _serves(self, entry: Entry) -> bool:
        role = _C["MEMBER_SERVING"]
        key = MEMBER_KEY.pack(entry.peer[:16], entry.peer[16:], role, entry.id)
        return self._members.lookup(key) is not None

    def _all_serving(self) -> frozenset[bytes]:
        if self._serving_somewhere is None:
            members: Iterator[Any] = (MEMBER_KEY.unpack(key) for key, _ in self._members.items())
            self._serving_somewhere = frozenset(
                member.address + member.port
                for member in members
                if member.role == _C["MEMBER_SERVING"] and member.id in self._programmed
            )
        return self._serving_somewhere

    def _would_be_served(self, entry: Entry) -> bool:
        """Whether connect() would find a backend now: choose() in bpf/lookup.h.

        Else a socket that a policy or the source ranges refuse would be cut again and again.
        """
        port: Any = PORT.unpack(
            self._ports.lookup(_U32.pack(entry.id & _INDEX_MASK)) or bytes(PORT.size)
        )
        if port.id != entry.id:
            return False
        is_host = entry.netns == self._host_netns
        closed = port.flags & _C["PORT_LB_NO_HOST" if is_host else "PORT_LB_NO_PODS"]
        if entry.kind == _C["KIND_LOAD_BALANCER"] and closed:
            return False
        if entry.scope == _C["SCOPE_INTERNAL"]:
            local = port.flags & _C["PORT_INTERNAL_LOCAL"]
        else:
            tells = "SETTING_TELLS_PODS6" if port.flags & _C["PORT_IPV6"] else "SETTING_TELLS_PODS4"
            inside = is_host or self._flags & _C[tells]
            local = port.flags & _C["PORT_EXTERNAL_LOCAL"] and not inside
        word = memoryview(port.word).cast("Q")[_C["SET_LOCAL" if local else "SET_CLUSTER"]]
        return bool((word >> _C["ABI_WORD_COUNT_SHIFT"]) & _COUNT_MASK)


# --- the walk ------------------------------------------------------------------------------------


class _Tally:
    """What a walk finds and does."""

    def __init__(self) -> None:
        self.cut: Counter[tuple[int, Reason]] = Counter()
        self.families: Counter[Family] = Counter()
        self.unreached = 0
        self.forgotten = 0
        self.refused: dict[str, OSError] = {}
        self.is_unsupported = False

    def refuse(self, error: OSError) -> None:
        self.refused[errno.errorcode.get(error.errno or 0, "?")] = error

    @property
    def cuts(self) -> int:
        return self.families.total()


class StaleUdp:
    """Walks when asked; ``request`` never waits. Begins with a thread; ``close`` ends it.

    ``maps`` are the pinned ones; ``programmed``: the ids of the service ports that are planned and
    programmed, asked from another thread; ``grace`` returns when every program that was running
    has ended. ``walked`` is told of each walk, from the thread.
    """

    def __init__(
        self,
        maps: Mapping[str, Map],
        *,
        programmed: Callable[[], Collection[int]],
        grace: Callable[[], None],
        walked: Callable[[Walk], None] = lambda _walk: None,
    ) -> None:
        self._path = maps["udp_conn"].path
        self._walker = Walker(
            KernelIndex(maps["udp_conn"]), maps, programmed=programmed, grace=grace
        )
        self._walked = walked
        self._changed = threading.Condition()
        self._requested = self._sweep = False
        self._again_at = float("inf")
        self._not_before = 0.0
        self._thread = threading.Thread(target=self._run, name="stale", daemon=True)
        self._thread.start()

    def request(self, *, sweep: bool = False) -> None:
        """Walk soon. With ``sweep`` forget the entries of sockets that are no more, too."""
        with self._changed:
            self._requested = True
            self._sweep |= sweep
            self._changed.notify()

    def close(self) -> None:
        """Return when no walk goes on any more."""
        with self._changed:
            self._walker.stopping = True
            self._changed.notify()
        self._thread.join()

    def inherit(self) -> int:
        """Take over the entries of maps of another size or version; returns how many.

        For a start, when all programs write to the map of now and nobody has unpinned the others.
        """
        return self._walker.inherit(
            path for path in self._path.parent.glob("udp_conn-*") if path != self._path
        )

    def disown(self) -> int:
        """No id in `udp_conn` is one of these maps' own: they were made anew. Returns how many."""
        return self._walker.disown()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._is_due():
                    self._changed.wait(self._pause_s())
                if self._walker.stopping:
                    return
                sweep, self._sweep, self._requested = self._sweep, False, False
                self._again_at = float("inf")
            started = time.monotonic()
            try:
                walk = self._walker.walk(sweep=sweep)
            except (DatapathError, OSError) as error:
                # The next audit asks again; a thread less would never.
                _log.error("stale UDP sockets were not looked for", reason=str(error))
            else:
                self._walked(walk)
            ended = time.monotonic()
            pause_s = min(max((_SHARE - 1) * (ended - started), MIN_PAUSE_S), MAX_PAUSE_S)
            self._not_before = ended + pause_s
            with self._changed:
                if self._walker.again_in_s is not None:
                    self._again_at = ended + self._walker.again_in_s

    def _is_due(self) -> bool:
        now = time.monotonic()
        wanted = self._requested or now >= self._again_at
        return self._walker.stopping or (wanted and now >= self._not_before)

    def _pause_s(self) -> float | None:
        at = self._not_before if self._requested else max(self._again_at, self._not_before)
        return None if at == float("inf") else max(0.0, at - time.monotonic())


class Walker:
    """One walk at a time; ``again_in_s`` says whether one more is to follow the last one."""

    def __init__(
        self,
        index: Index,
        maps: Mapping[str, Table],
        *,
        programmed: Callable[[], Collection[int]],
        grace: Callable[[], None],
        visit: Visit = sockdiag.visit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._maps = maps
        self._programmed = programmed
        self._grace = grace
        self._visit = visit
        self._clock = clock
        self._judged: tuple[Judge, float] | None = None
        self._names: dict[int, str] = {}
        self._missing: dict[int, tuple[bytes, float]] = {}
        self._is_unsupported = False
        self._complained: set[str] = set()
        self.stopping = False
        self.again_in_s: float | None = None

    def walk(self, *, sweep: bool = False) -> Walk:
        """Cut what is stale. Raises DatapathError; what was not done stays to be done."""
        started = self._clock()
        self.again_in_s = None
        tally = _Tally()
        # Every program that decided by what was before has left its entry when this returns.
        self._grace()
        entries, wanted = self._read(sweep=sweep)
        try:
            if wanted:
                self._in_a_thread(lambda: self._go(wanted, tally))
        finally:
            self._say(tally)
        return Walk(
            duration_s=self._clock() - started,
            entries=entries,
            cut=tally.families,
            unreached=tally.unreached,
            forgotten=tally.forgotten,
        )

    def _read(self, *, sweep: bool) -> tuple[int, dict[int, dict[int, bytes]]]:
        """How many entries there are; those to look for, by namespace and socket.

        This is a first opinion. Whoever cuts judges by what is true after all has been read: a
        Service that is being added is there before its first entry.
        """
        count = 0
        same: dict[bytes, bytes] = {}
        still: dict[int, tuple[bytes, float]] = {}
        wanted: dict[int, dict[int, bytes]] = defaultdict(dict)
        judge = self._judge()
        for key, read in self._index.items():
            count += 1
            value = same.setdefault(read, read)
            cookie = _COOKIE.unpack(key)[0]
            known = self._missing.get(cookie)
            if known and known[0] == value:
                still[cookie] = known
            is_stale = not self._is_unsupported and judge.reason(value) is not None
            if is_stale or sweep or cookie in still:
                wanted[read_entry(value).netns][cookie] = value
        self._missing = still
        self._judged = None
        self._learn_names(frozenset(read_entry(value).id for value in same))
        return count, wanted

    def _judge(self) -> Judge:
        now = self._clock()
        if self._judged is None or now - self._judged[1] > JUDGE_S:
            self._judged = (Judge(self._maps, self._programmed), now)
        return self._judged[0]

    def _learn_names(self, ids: frozenset[int]) -> None:
        """While they have them: what is deleted has none, and is what the log is to name."""
        self._names = {one: name for one, name in self._names.items() if one in ids}
        for one in ids - self._names.keys():
            raw = self._maps["names"].lookup(_U32.pack(one))
            if raw is not None:
                self._names[one] = raw.split(b"\0")[0].decode(errors="replace")

    def _in_a_thread(self, act: Callable[[], None]) -> None:
        """A thread that has entered a namespace cannot be used for anything else."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                errors.append(error)

        thread = threading.Thread(target=run, name="stale-netns", daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def _go(self, wanted: Mapping[int, Mapping[int, bytes]], tally: _Tally) -> None:
        """Through the namespaces, one after another."""
        left = dict(wanted)
        for netns, diag in self._visit(wanted.keys(), tally.refused):
            expected = _all(wanted) if netns is None else left[netns]
            try:
                self._look(diag, expected, tally, is_all=netns is not None)
            except OSError as error:
                tally.refuse(error)
                continue
            left.pop(netns or 0, None)
            if self.stopping or tally.is_unsupported:
                return
            if tally.cuts >= MAX_CUTS:
                self.again_in_s = 0.0
                return
            if netns is None:
                left = {}  # it is not known what has not been seen
        judge = self._judge()
        tally.unreached += sum(judge.reason(value) is not None for value in _all(left).values())

    def _look(
        self, diag: Diag, expected: Mapping[int, bytes], tally: _Tally, *, is_all: bool
    ) -> None:
        """At one namespace. ``is_all``: all that is expected should be here."""
        there = {
            one.cookie: one
            for one in diag.connected()
            if (value := expected.get(one.cookie)) and read_entry(value).peer == one.peer
        }
        for cookie in self._cut(diag, expected, there, tally):
            self._forget(cookie, expected[cookie])
        for cookie in there:
            self._missing.pop(cookie, None)
        if is_all:
            self._miss({c: v for c, v in expected.items() if c not in there}, tally)

    def _cut(
        self,
        diag: Diag,
        expected: Mapping[int, bytes],
        there: Mapping[int, sockdiag.Connected],
        tally: _Tally,
    ) -> list[int]:
        """Destroy those that are stale now; returns their cookies."""
        judge = self._judge()
        stale = [
            one
            for one in there.values()
            if not self._is_unsupported and judge.reason(expected[one.cookie])
        ]
        done: list[int] = []
        while stale:
            hidden = []
            for one in stale:
                if self.stopping or tally.cuts >= MAX_CUTS:
                    return done
                value = expected[one.cookie]
                # The cookie is the socket's, but it may have connected elsewhere meanwhile.
                if self._index.lookup(_COOKIE.pack(one.cookie)) != value:
                    continue
                code = diag.destroy(one)
                if code == errno.EOPNOTSUPP:
                    tally.is_unsupported = True
                    return done
                if code == errno.ENOENT:
                    hidden.append(one)
                elif code:
                    tally.refuse(OSError(code, os.strerror(code)))
                    tally.unreached += 1
                else:
                    done.append(one.cookie)
                    reason = judge.reason(value)
                    if reason is not None:
                        tally.cut[read_entry(value).id, reason] += 1
                    tally.families[family_of(one.peer[:16])] += 1
            if len(hidden) == len(stale):
                break  # gone, or behind one that is to stay: the next walk sees which
            stale = hidden
        return done

    # --- entries of sockets that are not there ----------------------------------------------------

    def _miss(self, missing: Mapping[int, bytes], tally: _Tally) -> None:
        """Of a namespace that was looked through: what is not connected as its entry says.

        It may be in the middle of connect(): one more look, and the entry goes only much later.
        """
        now = self._clock()
        for cookie, value in missing.items():
            if cookie not in self._missing:
                self._missing[cookie] = (value, now)
                self.again_in_s = RECHECK_S
            elif now - self._missing[cookie][1] >= FORGET_AFTER_S:
                self._forget(cookie, value)
                tally.forgotten += 1
                del self._missing[cookie]

    def _forget(self, cookie: int, value: bytes) -> None:
        """Delete an entry, unless it has become another's meanwhile."""
        key = _COOKIE.pack(cookie)
        taken = self._index.take(key)
        if taken is not None and taken != value:
            self._index.insert(key, taken)

    # --- at a start -------------------------------------------------------------------------------

    def inherit(self, others: Iterator[Path]) -> int:
        self._grace()
        count = 0
        for path in others:
            fd = libbpf.obj_get(str(path))
            try:
                if libbpf.fd_kind(fd) != "bpf-map":
                    continue
                info = libbpf.map_info(fd, path.name)
                if (info.key_size, info.value_size) != (_COOKIE.size, UDP_CONN.size):
                    continue
                for key, value in libbpf.items(fd, path.name, _COOKIE.size, UDP_CONN.size):
                    count += self._index.insert(key, value)
            finally:
                os.close(fd)
        return count

    def disown(self) -> int:
        self._grace()
        at = UDP_CONN.offsets["id"]
        nobody = _U32.pack(OF_NO_MAP)
        count = 0
        for key, value in list(self._index.items()):
            if self._index.lookup(key) == value:
                count += self._index.replace(key, value[:at] + nobody + value[at + _U32.size :])
        return count

    # --- what is said -----------------------------------------------------------------------------

    def _say(self, tally: _Tally) -> None:
        if tally.cuts:
            services: Counter[str] = Counter()
            reasons: Counter[str] = Counter()
            for (one, reason), count in tally.cut.items():
                services[self._names.get(one, "unknown")] += count
                reasons[reason.value] += count
            named = services.most_common(_MOST_NAMED)
            more = len(services) - len(named)
            _log.info(
                "cut UDP sockets whose backend does not serve",
                sockets=tally.cuts,
                services=", ".join(f"{name}: {count}" for name, count in named)
                + (f", and {more} more" if more else ""),
                **reasons,
            )
        if tally.is_unsupported:
            self._is_unsupported = True
            _log.error(
                "connected UDP sockets stay with backends that are gone: this kernel cannot "
                "destroy sockets (CONFIG_INET_DIAG_DESTROY)"
            )
        if not tally.unreached:
            self._complained.clear()
            return
        why = ", ".join(sorted(tally.refused)) or "not found"
        if why not in self._complained:
            self._complained.add(why)
            _log.warning(
                "connected UDP sockets stay with backends that are gone: their network namespaces "
                "cannot be entered; it takes the host's processes and /run/netns, CAP_SYS_ADMIN "
                "and CAP_SYS_PTRACE",
                sockets=tally.unreached,
                reason=why,
            )


def _all(wanted: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
    return {cookie: value for one in wanted.values() for cookie, value in one.items()}
