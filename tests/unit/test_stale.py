# SPDX-License-Identifier: Apache-2.0
"""Which connected UDP sockets are cut, and what happens in the moments between two looks."""

from __future__ import annotations

import errno
import struct
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ebpflb.datapath.ebpf import abi, sockdiag, stale
from ebpflb.datapath.ebpf.sockdiag import Connected
from ebpflb.datapath.ebpf.stale import Judge, Reason, Walk, Walker
from ebpflb.errors import DatapathError
from ebpflb.model import Address, Family, family_of, parse_address
from tests.logs import EventDict, capture_logs

C = abi.CONSTANTS
HOST, POD, OTHER_POD = 1, 42, 43
A, B = parse_address("10.244.1.5"), parse_address("fd44::5")
NOWHERE4, NOWHERE6 = parse_address("127.0.0.1"), parse_address("::1")
DNS = 0x100007
SLOT = DNS & ((1 << C["ABI_ID_INDEX_BITS"]) - 1)


class Table(dict[bytes, bytes]):
    """A hash map in memory; ``before`` is called ahead of each access to one entry."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.before: Callable[[str], None] = lambda _: None

    def lookup(self, key: bytes) -> bytes | None:
        self.before("lookup")
        return self.get(key)

    def items(self) -> Iterator[tuple[bytes, bytes]]:  # type: ignore[override]
        yield from list(super().items())

    def take(self, key: bytes) -> bytes | None:
        self.before("take")
        return self.pop(key, None)

    def insert(self, key: bytes, value: bytes) -> bool:
        self.before("insert")
        return self.setdefault(key, value) is value

    def replace(self, key: bytes, value: bytes) -> bool:
        self.before("replace")
        if key in self:
            self[key] = value
            return True
        return False


def entry(
    address: Address = A,
    *,
    port: int = 53,
    one: int = DNS,
    netns: int = POD,
    external: bool = False,
    balanced: bool = False,
) -> bytes:
    scope = C["SCOPE_EXTERNAL"] if external or balanced else C["SCOPE_INTERNAL"]
    kind = C["KIND_LOAD_BALANCER"] if balanced else C["KIND_CLUSTER_IP"]
    return struct.pack("=16s2sBBIQ", address, port.to_bytes(2), scope, kind, one, netns)


def key(cookie: int) -> bytes:
    return struct.pack("=Q", cookie)


def member(address: Address, *, port: int = 53, one: int = DNS, role: int = 2) -> bytes:
    return stale.MEMBER_KEY.pack(address, port.to_bytes(2), role, one)


def maps(
    *members: bytes,
    cluster: int = 0,
    local: int = 0,
    port_flags: int = 0,
    settings_flags: int = 0,
    port_id: int = DNS,
) -> dict[str, Table]:
    words = [0, 0]
    words[C["SET_CLUSTER"]] = cluster << C["ABI_WORD_COUNT_SHIFT"]
    words[C["SET_LOCAL"]] = local << C["ABI_WORD_COUNT_SHIFT"]
    port = stale.PORT.pack(struct.pack("=2Q", *words), port_id, 0, 0, port_id >> 20, 17, port_flags)
    settings = stale.SETTINGS.make(host_netns=HOST, flags=settings_flags)
    return {
        "members": Table(dict.fromkeys(members, b"")),
        "ports": Table({struct.pack("=I", SLOT): port}),
        "settings": Table({bytes(4): settings}),
        "names": Table({struct.pack("=I", DNS): b"kube-system/dns:udp".ljust(192, b"\0")}),
    }


def test_an_entry_is_laid_out_as_this_file_thinks() -> None:
    assert stale.read_entry(entry()).peer == A + (53).to_bytes(2)
    assert len(entry()) == stale.UDP_CONN.size
    assert (stale.read_entry(entry()).id, stale.read_entry(entry()).netns) == (DNS, POD)


# --- which are stale ------------------------------------------------------------------------------

_EXTERNAL_LOCAL = C["PORT_EXTERNAL_LOCAL"]
_INTERNAL_LOCAL = C["PORT_INTERNAL_LOCAL"]
_TELLS4 = C["SETTING_TELLS_PODS4"]
_TELLS6 = C["SETTING_TELLS_PODS6"]
_NO_PODS, _NO_HOST = C["PORT_LB_NO_PODS"], C["PORT_LB_NO_HOST"]


@pytest.mark.parametrize(
    ("value", "there", "reason"),
    [
        pytest.param(entry(), maps(member(A)), None, id="a serving backend stays (CT-07, TV-C07)"),
        pytest.param(entry(B), maps(member(B)), None, id="an IPv6 one likewise"),
        pytest.param(
            entry(), maps(member(B), cluster=1), Reason.LEFT, id="one that left is cut (CT-03)"
        ),
        pytest.param(entry(), maps(), Reason.LEFT, id="also where nobody is left (B-03)"),
        pytest.param(
            entry(), maps(member(A, port=54)), Reason.LEFT, id="another port is another backend"
        ),
        pytest.param(
            entry(), maps(member(A, one=DNS + 1)), Reason.LEFT, id="so is another Service's"
        ),
        pytest.param(
            entry(),
            maps(member(A, role=C["MEMBER_CLUSTER"]), cluster=1),
            Reason.LEFT,
            id="a member for affinity alone does not serve",
        ),
        pytest.param(
            entry(one=DNS + (1 << 20)),
            maps(member(A)),
            Reason.DELETED,
            id="the slot of before has another generation",
        ),
        pytest.param(
            entry(NOWHERE4, port=1), maps(), None, id="refused, and nobody serves (NOEP-10)"
        ),
        pytest.param(
            entry(NOWHERE4, port=1), maps(cluster=1), Reason.REFUSED, id="refused, and now served"
        ),
        pytest.param(
            entry(NOWHERE6, port=1), maps(cluster=1), Reason.REFUSED, id="the same in IPv6 (CT-09)"
        ),
        pytest.param(
            entry(NOWHERE4, port=2), maps(cluster=1), Reason.LEFT, id="a backend on the loopback"
        ),
    ],
)
def test_what_is_stale(value: bytes, there: dict[str, Table], reason: Reason | None) -> None:
    assert Judge(there, lambda: {DNS}).reason(value) is reason


@pytest.mark.parametrize(
    ("options", "there", "is_told"),
    [
        pytest.param({}, maps(local=1), False, id="the local set is not for it"),
        pytest.param({}, maps(local=1, port_flags=_INTERNAL_LOCAL), True, id="now it is (POL-01)"),
        pytest.param({}, maps(cluster=1, port_flags=_INTERNAL_LOCAL), False, id="none is local"),
        pytest.param(
            {"external": True}, maps(cluster=1, port_flags=_INTERNAL_LOCAL), True, id="not internal"
        ),
        pytest.param(
            {"external": True},
            maps(cluster=1, port_flags=_EXTERNAL_LOCAL),
            False,
            id="a pod that cannot be told counts as outside (POL-06)",
        ),
        pytest.param(
            {"external": True},
            maps(cluster=1, port_flags=_EXTERNAL_LOCAL, settings_flags=_TELLS4),
            True,
            id="a pod that can be told is inside (POL-05)",
        ),
        pytest.param(
            {"external": True},
            maps(cluster=1, port_flags=_EXTERNAL_LOCAL, settings_flags=_TELLS6),
            False,
            id="not by the other family's setting",
        ),
        pytest.param(
            {"external": True},
            maps(cluster=1, port_flags=_EXTERNAL_LOCAL | C["PORT_IPV6"], settings_flags=_TELLS6),
            True,
            id="but by its own",
        ),
        pytest.param(
            {"external": True, "netns": HOST},
            maps(cluster=1, port_flags=_EXTERNAL_LOCAL),
            True,
            id="the host is inside (POL-04)",
        ),
        pytest.param(
            {"balanced": True},
            maps(cluster=1, port_flags=_NO_PODS),
            False,
            id="source ranges keep a pod out (LB-06)",
        ),
        pytest.param({"balanced": True}, maps(cluster=1), True, id="until they are gone"),
        pytest.param(
            {"external": True},
            maps(cluster=1, port_flags=_NO_PODS | _NO_HOST),
            True,
            id="at the load balancer's addresses alone (LB-05)",
        ),
        pytest.param(
            {"balanced": True, "netns": HOST},
            maps(cluster=1, port_flags=_NO_PODS),
            True,
            id="but not the host (LB-07)",
        ),
        pytest.param(
            {"balanced": True, "netns": HOST},
            maps(cluster=1, port_flags=_NO_PODS | _NO_HOST),
            False,
            id="unless it is not in them",
        ),
        pytest.param({}, maps(cluster=1, port_id=0), False, id="the slot is another's by now"),
    ],
)
def test_who_was_refused_is_told_only_where_it_would_be_served(
    options: Any, there: dict[str, Table], is_told: bool
) -> None:
    """The same as `choose()` in bpf/lookup.h, or a socket would be cut again and again."""
    value = entry(NOWHERE4, port=1, **options)
    assert Judge(there, lambda: {DNS}).reason(value) is (Reason.REFUSED if is_told else None)


@pytest.mark.parametrize(
    ("members", "programmed", "reason"),
    [
        pytest.param([member(A, one=99)], {99}, None, id="it serves somebody"),
        pytest.param([member(A, one=99)], {98}, Reason.LEFT, id="who is going"),
        pytest.param([member(A, one=99, role=0)], {99}, Reason.LEFT, id="affinity's alone"),
        pytest.param([], {99}, Reason.LEFT, id="it serves nobody"),
    ],
)
def test_an_entry_of_maps_that_are_gone(
    members: list[bytes], programmed: Collection[int], reason: Reason | None
) -> None:
    value = entry(one=stale.OF_NO_MAP)
    assert Judge(maps(*members), lambda: programmed).reason(value) is reason


# --- a walk ---------------------------------------------------------------------------------------


@dataclass
class Kernel:
    """Sockets by namespace, and what becomes of an attempt to destroy one."""

    sockets: dict[int, list[Connected]] = field(default_factory=dict)
    destroyed: list[int] = field(default_factory=list)
    visited: list[int] = field(default_factory=list)
    code: int = 0
    fails_in: int | None = None
    tells_cookies: bool = True

    def add(
        self,
        cookie: int,
        address: Address = A,
        *,
        port: int = 53,
        netns: int = POD,
        ends: bytes = b"",
    ) -> None:
        family = 2 if family_of(address) is Family.IPV4 else 10
        one = Connected(cookie, address + port.to_bytes(2), family, ends or key(cookie))
        self.sockets.setdefault(netns, []).append(one)

    def visit(
        self, wanted: Collection[int], _refused: dict[str, OSError]
    ) -> Iterator[tuple[int | None, Diag]]:
        for netns in list(self.sockets):
            if netns in wanted or not self.tells_cookies:
                self.visited.append(netns)
                yield (netns if self.tells_cookies else None), Diag(self, netns)


class Diag:
    def __init__(self, kernel: Kernel, netns: int) -> None:
        self._kernel = kernel
        self._netns = netns

    def connected(self) -> Iterator[Connected]:
        if self._kernel.fails_in == self._netns:
            raise OSError(errno.ENOBUFS, "no room")
        yield from list(self._kernel.sockets[self._netns])

    def destroy(self, one: Connected) -> int:
        there = self._kernel.sockets[self._netns]
        if self._kernel.code:
            return self._kernel.code
        # By its addresses, as the kernel does: the first that has them, if it is the one.
        if next((other for other in there if other.id == one.id), None) != one:
            return errno.ENOENT
        there.remove(one)
        self._kernel.destroyed.append(one.cookie)
        return 0


@dataclass
class Bench:
    """A walker, all that it sees, and its clock."""

    index: Table = field(default_factory=Table)
    maps: dict[str, Table] = field(default_factory=maps)
    kernel: Kernel = field(default_factory=Kernel)
    programmed: set[int] = field(default_factory=lambda: {DNS})
    now: float = 100.0
    graces: int = 0
    during_grace: Any = None

    def __post_init__(self) -> None:
        self.walker = Walker(
            self.index,
            self.maps,
            programmed=lambda: self.programmed,
            grace=self.grace,
            visit=self.kernel.visit,
            clock=lambda: self.now,
        )

    def grace(self) -> None:
        self.graces += 1
        if self.during_grace:
            self.during_grace()

    def add(self, cookie: int, address: Address = A, **options: Any) -> None:
        """A connected socket, and its entry."""
        self.index[key(cookie)] = entry(address, **options)
        port, netns = options.get("port", 53), options.get("netns", POD)
        self.kernel.add(cookie, address, port=port, netns=netns)

    def serve(self, *backends: Address) -> None:
        self.maps["members"].update(dict.fromkeys(map(member, backends), b""))

    def walk(self, *, sweep: bool = False) -> Walk:
        return self.walker.walk(sweep=sweep)

    @property
    def indexed(self) -> set[int]:
        return {struct.unpack("=Q", one)[0] for one in self.index}


@pytest.fixture
def lines() -> Iterator[list[EventDict]]:
    """What is logged."""
    with capture_logs() as logged:
        yield logged


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_walk_cuts_what_is_stale_and_its_entry_goes(bench: Bench, lines: list[EventDict]) -> None:
    for cookie in (1, 2, 3):
        bench.add(cookie)
    bench.add(4, B)
    bench.serve(B)
    walk = bench.walk()
    assert bench.kernel.destroyed == [1, 2, 3]
    assert bench.indexed == {4}
    assert walk.cut == {Family.IPV4: 3}
    assert walk.entries == 4
    (line,) = lines
    assert line["sockets"] == line["left"] == 3
    assert line["services"] == "kube-system/dns:udp: 3"
    assert bench.walk().cut == {}


def test_only_namespaces_of_stale_sockets_are_entered(bench: Bench) -> None:
    bench.add(1)
    bench.add(2, B, netns=OTHER_POD)
    bench.serve(B)
    bench.walk()
    assert bench.kernel.visited == [POD]


def test_nothing_to_do_enters_none(bench: Bench) -> None:
    bench.add(1)
    bench.serve(A)
    assert bench.walk().entries == 1
    assert bench.kernel.visited == []


def test_it_reads_after_all_programs_that_ran_have_ended(bench: Bench) -> None:
    """connect() chose by what was before, and leaves its entry after a walk was asked for."""
    bench.during_grace = lambda: bench.add(1)
    bench.walk()
    assert bench.kernel.destroyed == [1]


def test_a_service_that_is_being_added_is_not_taken_for_deleted(bench: Bench) -> None:
    """Its first entry may be younger than what the walk knew when it began to read."""
    new = DNS + 1
    bench.add(1, one=new)

    def appears() -> Iterator[tuple[bytes, bytes]]:
        yield from dict.items(bench.index)
        bench.programmed.add(new)
        bench.maps["members"][member(A, one=new)] = b""

    bench.index.items = appears  # type: ignore[method-assign]
    assert bench.walk().cut == {}
    assert bench.indexed == {1}


def test_a_deleted_service_is_named_while_its_name_is_known(
    bench: Bench, lines: list[EventDict]
) -> None:
    bench.add(1)
    bench.serve(A)
    bench.walk()
    bench.programmed.clear()
    bench.maps["names"].clear()
    bench.walk()
    (line,) = lines
    assert (line["services"], line["deleted"]) == ("kube-system/dns:udp: 1", 1)


def test_a_log_line_names_a_few_services_only(bench: Bench, lines: list[EventDict]) -> None:
    for number in range(15):
        one = DNS + 1 + number
        bench.maps["names"][struct.pack("=I", one)] = b"ns/s%d" % number + bytes(8)
        bench.add(number, one=one)
    bench.walk()
    (line,) = lines
    assert line["services"].endswith(", and 5 more")


@pytest.mark.parametrize("when", ["lookup", "take"])
def test_a_socket_that_connects_anew_meanwhile_is_not_hit_and_stays_indexed(
    bench: Bench, when: str
) -> None:
    """Before it is destroyed, or as soon as it was: the entry is another one by then."""
    bench.add(1)
    bench.serve(B)

    def reconnects(what: str) -> None:
        if what == when:
            bench.index[key(1)] = entry(B)
            bench.index.before = lambda _: None

    bench.index.before = reconnects
    bench.walk()
    assert bench.kernel.destroyed == ([] if when == "lookup" else [1])
    assert bench.index == {key(1): entry(B)}


def test_an_entry_that_is_put_back_does_not_replace_a_newer_one(bench: Bench) -> None:
    bench.add(1)
    steps = {"take": entry(B), "insert": entry(B, port=54)}

    def reconnects(what: str) -> None:
        if what in steps:
            bench.index[key(1)] = steps[what]

    bench.index.before = reconnects
    bench.walk()
    assert bench.index == {key(1): entry(B, port=54)}


def test_a_socket_with_the_cookie_but_another_peer_is_not_hit(bench: Bench) -> None:
    """Its entry is of before: AF_UNSPEC tells nobody (C2)."""
    bench.index[key(1)] = entry(A)
    bench.kernel.add(1, B)
    bench.walk()
    assert bench.kernel.destroyed == []


def test_sockets_that_share_both_ends_are_cut_one_after_another(bench: Bench) -> None:
    """The kernel finds the first of them only; one that is to stay hides those behind it."""
    other = DNS + 1
    bench.programmed.add(other)
    bench.maps["members"][member(A, one=other)] = b""
    for cookie, one in ((4, DNS), (1, DNS), (2, other), (3, DNS)):
        bench.index[key(cookie)] = entry(one=one)
    for cookie in (1, 4, 2, 3):
        bench.kernel.add(cookie, ends=b"both")
    bench.walk()
    assert bench.kernel.destroyed == [1, 4]
    assert bench.indexed == {2, 3}
    bench.kernel.sockets[POD].pop(0)
    bench.walk()
    assert bench.kernel.destroyed == [1, 4, 3]


# --- entries without a socket ---------------------------------------------------------------------


@pytest.mark.parametrize("is_stale", [True, False], ids=["stale", "its backend serves"])
def test_an_entry_without_a_socket_goes_late(bench: Bench, is_stale: bool) -> None:
    """It may be in the middle of connect(), so one look more, soon; forgotten is it much later."""
    bench.add(1)
    bench.index[key(2)] = entry()
    bench.serve(*([] if is_stale else [A]))
    walk = bench.walk(sweep=True)
    assert (walk.forgotten, bench.walker.again_in_s) == (0, stale.RECHECK_S)
    bench.now += stale.RECHECK_S
    walk = bench.walk()
    assert (walk.forgotten, bench.walker.again_in_s) == (0, None)
    bench.now += stale.FORGET_AFTER_S
    assert bench.walk(sweep=True).forgotten == 1
    assert bench.indexed == (set() if is_stale else {1})


def test_who_was_in_the_middle_of_connect_is_cut_at_the_second_look(bench: Bench) -> None:
    bench.index[key(1)] = entry()
    bench.kernel.sockets[POD] = []
    bench.walk()
    assert bench.walker.again_in_s is not None
    bench.kernel.add(1)
    assert bench.walk().cut == {Family.IPV4: 1}


def test_a_socket_that_came_back_is_not_forgotten(bench: Bench) -> None:
    bench.index[key(1)] = entry()
    bench.kernel.sockets[POD] = []
    bench.serve(A, B)
    bench.walk(sweep=True)
    bench.index[key(1)] = entry(B)
    bench.now += 2 * stale.FORGET_AFTER_S
    assert bench.walk(sweep=True).forgotten == 0
    assert bench.indexed == {1}


def test_without_a_sweep_nobody_looks_for_those_that_are_well(bench: Bench) -> None:
    bench.index[key(1)] = entry()
    bench.serve(A)
    bench.kernel.sockets[POD] = []
    bench.walk()
    assert bench.walker.again_in_s is None


@pytest.mark.parametrize("how", ["not found", "it cannot be read", "the kernel tells no cookies"])
def test_a_namespace_that_was_not_looked_through_loses_no_entry(
    bench: Bench, how: str, lines: list[EventDict]
) -> None:
    bench.index[key(1)] = entry(netns=OTHER_POD)
    if how == "it cannot be read":
        bench.kernel.sockets[OTHER_POD] = []
        bench.kernel.fails_in = OTHER_POD
    if how == "the kernel tells no cookies":
        bench.kernel.sockets[POD] = []
        bench.kernel.tells_cookies = False
    for _ in range(3):
        assert bench.walk(sweep=True).forgotten == 0
        bench.now += 10 * stale.FORGET_AFTER_S
    assert bench.indexed == {1}
    # It is said once, with how many and why.
    if how != "the kernel tells no cookies":
        reason = {"not found": "not found", "it cannot be read": "ENOBUFS"}[how]
        assert [(line["sockets"], line["reason"]) for line in lines] == [(1, reason)]
        assert bench.walk().unreached == 1


def test_one_namespace_that_fails_does_not_save_the_others(bench: Bench) -> None:
    bench.add(1, netns=OTHER_POD)
    bench.add(2)
    bench.kernel.fails_in = OTHER_POD
    walk = bench.walk()
    assert (bench.kernel.destroyed, walk.unreached) == ([2], 1)


def test_before_kernel_5_14_every_namespace_is_looked_through(bench: Bench) -> None:
    bench.kernel.tells_cookies = False
    bench.add(1)
    bench.add(2, netns=OTHER_POD)
    bench.add(3, B)
    bench.serve(B)
    bench.walk()
    assert bench.kernel.destroyed == [1, 2]
    assert bench.indexed == {3}


# --- limits ---------------------------------------------------------------------------------------


def test_what_is_too_much_for_one_walk_is_the_next_ones(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stale, "MAX_CUTS", 2)
    for cookie in range(5):
        bench.add(cookie, netns=POD + cookie)
    counts = []
    while bench.index:
        counts.append(sum(bench.walk().cut.values()))
        assert bench.walker.again_in_s == (0.0 if counts[-1] == 2 else None)
    assert counts == [2, 2, 1]


def test_a_kernel_that_cannot_destroy_sockets_is_asked_once(
    bench: Bench, lines: list[EventDict]
) -> None:
    bench.add(1)
    bench.add(2)
    bench.kernel.code = errno.EOPNOTSUPP
    for _ in range(3):
        assert bench.walk().cut == {}
    assert len(lines) == 1
    assert bench.kernel.visited == [POD]
    assert bench.indexed == {1, 2}


def test_a_socket_that_cannot_be_destroyed_keeps_its_entry(
    bench: Bench, lines: list[EventDict]
) -> None:
    bench.add(1)
    bench.kernel.code = errno.EPERM
    assert bench.walk().unreached == 1
    assert [line["reason"] for line in lines] == ["EPERM"]
    assert bench.indexed == {1}


def test_a_walk_that_is_told_to_stop_leaves_the_rest(bench: Bench) -> None:
    bench.add(1)
    bench.add(2, netns=OTHER_POD)
    bench.walker.stopping = True
    bench.walk()
    assert bench.kernel.destroyed == []
    assert bench.indexed == {1, 2}


# --- maps made anew -------------------------------------------------------------------------------


def test_entries_of_maps_that_are_gone_belong_to_nobody(bench: Bench) -> None:
    bench.add(1)
    bench.add(2, B)
    assert bench.walker.disown() == 2
    assert {stale.read_entry(value).id for value in bench.index.values()} == {stale.OF_NO_MAP}
    bench.serve(B)
    bench.walk()
    assert bench.kernel.destroyed == [1]


def test_a_socket_that_closes_meanwhile_is_not_indexed_again(bench: Bench) -> None:
    bench.add(1)

    def closes(what: str) -> None:
        if what == "replace":
            bench.index.pop(key(1), None)

    bench.index.before = closes
    assert bench.walker.disown() == 0
    assert bench.index == {}


# --- the thread -----------------------------------------------------------------------------------


class PinnedTable(Table):
    """As much of `maps.Map` as an empty index needs."""

    name = "udp_conn"
    fd = -1
    path = Path("/nowhere/udp_conn-0123")


def test_requests_are_gathered_and_a_failure_is_survived(
    lines: list[EventDict],
) -> None:
    walks: list[Walk] = []
    entered, go_on, done = threading.Event(), threading.Event(), threading.Semaphore(0)
    failing = [True]

    def grace() -> None:
        entered.set()
        assert go_on.wait(30)
        if failing.pop() if failing else False:
            done.release()
            raise DatapathError("write to map", "grace", errno.ENOMEM)

    def walked(walk: Walk) -> None:
        walks.append(walk)
        done.release()

    tables: dict[str, Any] = {**maps(), "udp_conn": PinnedTable()}
    one = stale.StaleUdp(tables, programmed=set, grace=grace, walked=walked)
    try:
        one.request()
        assert entered.wait(30)
        for _ in range(100):
            one.request()  # while it walks: one more walk, not a hundred
        go_on.set()
        assert done.acquire(timeout=30)
        assert done.acquire(timeout=30)
        assert len(walks) == 1
        assert len(lines) == 1
        one.request(sweep=True)
        assert done.acquire(timeout=30)
    finally:
        one.close()
    one.close()
    assert len(walks) == 2


# --- what the kernel lists ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path"),
    [("/run/netns/blue", "/run/netns/blue"), (r"/a\040b\134c\011", "/a b\\c\t")],
)
def test_a_mount_point_is_read_as_it_is_written(text: str, path: str) -> None:
    assert sockdiag._unescape(text) == path
