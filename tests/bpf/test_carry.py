# SPDX-License-Identifier: Apache-2.0
"""Open flows go on in tables of another size or layout, older or newer (K6)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from ebpflb.datapath.ebpf import abi, flows, libbpf, loader, members
from ebpflb.datapath.ebpf.abi import Layout
from ebpflb.datapath.ebpf.carry import Carrier
from ebpflb.datapath.ebpf.flows import FLOW, FLOW_KEY
from ebpflb.datapath.ebpf.maps import FLOW_TABLES, Map, PinFolder, sizes
from ebpflb.datapath.ebpf.programs import tc_build
from ebpflb.datapath.ebpf.tables import FRONTEND_KEY, FRONTEND_VALUE
from ebpflb.lab import Lab
from ebpflb.model import Protocol, parse_address
from tests.bpf.node import SIZES, PacketNode, Service
from tests.bpf.packets import Net
from tests.bpf.talks import talks_to
from tests.flows import CLIENT, Made, made, used_at, used_ns_of

TCP, UDP = Protocol.TCP, Protocol.UDP
ELSEWHERE = "0123456789ab"
SMALL = {**dict.fromkeys(SIZES, 64), "conntrack": 1024, "flows_new": 512}


@pytest.fixture
def folder(lab: Lab, request: pytest.FixtureRequest) -> Iterator[PinFolder]:
    """A pin folder of the test's own."""
    one = PinFolder(lab.pin_root / f"carry-{abs(hash(request.node.nodeid)):x}")
    one.create()
    yield one
    for path in one.path.iterdir():
        path.unlink()
    one.path.rmdir()


@pytest.fixture
def opened(folder: PinFolder) -> Iterator[Callable[..., dict[str, Map]]]:
    """Opens or makes the maps in other sizes."""
    with contextlib.ExitStack() as stack:

        def open_(**changes: int) -> dict[str, Map]:
            maps = folder.open_or_create(sizes(SMALL | changes))
            for one in maps.values():
                stack.callback(one.close)
            return maps

        yield open_


@contextlib.contextmanager
def carrying(
    folder: PinFolder, maps: Mapping[str, Map], *, ids_are_new: bool = False
) -> Iterator[Carrier]:
    one = Carrier(folder, maps, ids_are_new=ids_are_new, grace=lambda: None)
    try:
        yield one
    finally:
        one.close()


def many(count: int, *, first: int = 0) -> list[Made]:
    """Flows of which each was used a second later than the one before."""
    return [
        made(TCP, client=(CLIENT[0], 1024 + i), idle=(1000 - i, 1000 - i))
        for i in range(first, first + count)
    ]


def put(one: Map, *there: Made) -> None:
    one.update([item for flow in there for item in flow.items])


def in_it(one: Map) -> dict[bytes, bytes]:
    return dict(one.items())


def items_of(*there: Made) -> dict[bytes, bytes]:
    return dict(item for flow in there for item in flow.items)


# --- another size ---------------------------------------------------------------------------------


def test_a_table_that_did_not_change_is_taken_over_and_there_is_nothing_to_carry(
    folder: PinFolder, opened: Callable[..., dict[str, Map]]
) -> None:
    put(opened()["conntrack"], *many(10))
    again = opened(frontends=128)
    with carrying(folder, again) as carrier:
        assert not carrier.pending
        assert (carrier.first(), carrier.second()) == (0, 0)
    assert in_it(again["conntrack"]) == items_of(*many(10))


@pytest.mark.parametrize("table", FLOW_TABLES)
@pytest.mark.parametrize("size", [600, 2048])
def test_flows_go_into_a_table_of_another_size_as_they_are(
    folder: PinFolder, opened: Callable[..., dict[str, Map]], table: str, size: int
) -> None:
    put(opened()[table], *many(100))
    ours = opened(**{table: size})
    assert in_it(ours[table]) == {}
    with carrying(folder, ours) as carrier:
        assert carrier.pending
        assert carrier.first() == 200
    assert in_it(ours[table]) == items_of(*many(100))


def test_of_more_than_it_holds_a_table_takes_the_newest(
    folder: PinFolder, opened: Callable[..., dict[str, Map]]
) -> None:
    put(opened()["conntrack"], *many(400))
    ours = opened(conntrack=200)
    with carrying(folder, ours) as carrier:
        carrier.first()
    found = in_it(ours["conntrack"])
    assert len(found) > 150, "an LRU map makes room a little early"
    newest = items_of(*many(100, first=300))
    assert found.items() <= newest.items()


def test_the_second_time_only_what_is_not_there_is_carried(
    folder: PinFolder, opened: Callable[..., dict[str, Map]]
) -> None:
    before = opened()["conntrack"]
    put(before, *many(50))
    ours = opened(conntrack=2048)
    with carrying(folder, ours) as carrier:
        carrier.first()
        # Our programs have used one since, and the old ones have made others.
        key, value = many(1)[0].items[0]
        ours["conntrack"].update([(key, used_at(value, used_ns_of(value) + 10**9))])
        put(before, *many(5, first=500))
        assert carrier.second() == 10
    found = in_it(ours["conntrack"])
    assert used_ns_of(found.pop(key)) == used_ns_of(value) + 10**9
    expected = items_of(*many(50), *many(5, first=500))
    assert found == {one: expected[one] for one in expected if one != key}


def test_until_they_are_carried_the_old_tables_stay_pinned(
    folder: PinFolder, opened: Callable[..., dict[str, Map]]
) -> None:
    opened()
    ours = opened(conntrack=2048, node_addrs=128)
    old = [path.name for path in folder.others(ours)]
    assert {name.rpartition("-")[0] for name in old} == {"conntrack", "node_addrs"}
    gone = folder.remove_others(ours, but=FLOW_TABLES)
    assert [path.name.rpartition("-")[0] for path in folder.others(ours)] == ["conntrack"]
    with carrying(folder, ours) as carrier:
        assert carrier.pending
    gone += folder.remove_others(ours)
    assert sorted(gone) == old
    assert folder.others(ours) == []


def test_of_two_tables_of_before_the_newer_knows_better(
    folder: PinFolder, opened: Callable[..., dict[str, Map]]
) -> None:
    """The agent was changed twice, and ended in between."""
    flow, later = made(TCP, isn=1), made(TCP, isn=2)
    put(opened(conntrack=100)["conntrack"], flow, *many(1))
    put(opened(conntrack=300)["conntrack"], later)
    ours = opened(conntrack=200)
    with carrying(folder, ours) as carrier:
        carrier.first()
    assert in_it(ours["conntrack"]) == items_of(later, *many(1))


# --- another layout -------------------------------------------------------------------------------


def layouts(text: str) -> tuple[Layout, Layout]:
    found = abi._layouts(text, abi.CONSTANTS)
    return found["key"], found["value"]


OLDER = """
struct key {
	__u8 protocol;
	__u8 pad[3];
	__be32 target[4];
	__be16 target_port;
	__be16 source_port;
	__be32 source[4];
};
struct value {
	__u64 used_ns;
	__u32 check_head;
	__be16 port;
	__be16 client_port;
	__be32 address[4];
	__u8 kind;
	__u8 flags;
	__u16 old_fashioned;
	__u32 id;
	__u32 check_tail;
	__u32 pad_tail;
};
"""
"""One that knew less, in another order, and something that is not known now."""

NEWER = """
struct key {
	__be32 source[4];
	__be32 target[4];
	__be16 source_port;
	__be16 target_port;
	__u8 protocol;
	__u8 pad;
	__u16 zone;
};
struct value {
	__u32 check_head;
	__u8 kind;
	__u8 flags;
	__u8 seen;
	__u8 scope;
	__be32 address[4];
	__be16 port;
	__be16 client_port;
	__u32 id;
	__u64 used_ns;
	__u64 syn_ns;
	__u64 created_ns;
	__u32 isn;
	__u32 frontend_kind;
	__u64 bytes[2];
	__u64 window;
	__u32 pad_tail;
	__u32 check_tail;
};
"""


def pin_other(
    folder: PinFolder, key: Layout, value: Layout, *, described: bool = True
) -> tuple[Path, int]:
    """A table of another version, as its agent has left it."""
    fd = libbpf.map_create(
        "lru_hash",
        "conntrack",
        key_size=key.size,
        value_size=value.size,
        max_entries=1024,
        types=members.describe(key, value) if described else None,
    )
    path = folder.path / f"conntrack-{ELSEWHERE}"
    libbpf.obj_pin(fd, str(path))
    return path, fd


def in_layout(item: tuple[bytes, bytes], key: Layout, value: Layout) -> tuple[bytes, bytes]:
    """The entry as the other version would have written it; its checks are not ours."""
    of_key, of_value = FLOW_KEY.unpack(item[0])._asdict(), FLOW.unpack(item[1])._asdict()
    of_value["check_head"] = of_value["check_tail"] = 4711
    their_key = {name: of_key[name] for name in key.offsets if name in of_key}
    their_value = {name: of_value[name] for name in value.offsets if name in of_value}
    known = {"old_fashioned": 7, "zone": 0, "window": 9}
    their_value |= {name: known[name] for name in known if name in value.offsets}
    return key.make(**their_key), value.make(**their_value)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        pytest.param(
            OLDER,
            {"seen", "scope", "syn_ns", "created_ns", "isn", "frontend_kind"},
            id="an older one that knew less",
        ),
        pytest.param(NEWER, {"frontend_kind"}, id="a newer one, in a downgrade"),
    ],
)
def test_flows_of_another_layout_are_carried_by_the_names_of_their_members(
    folder: PinFolder, opened: Callable[..., dict[str, Map]], text: str, lost: set[str]
) -> None:
    key, value = layouts(text)
    _, fd = pin_other(folder, key, value)
    flow = made(TCP, seen=(1, 2), id=7, isn=3, frontend_kind=1, scope=1, flags=1)
    libbpf.update_batch(fd, "theirs", [in_layout(item, key, value) for item in flow.items])
    os.close(fd)
    ours = opened()
    with carrying(folder, ours) as carrier:
        assert carrier.pending
        assert carrier.first() == 2
    found = in_it(ours["conntrack"])
    assert set(found) == set(flow.keys)
    for one, expected in flow.items:
        half = FLOW.unpack(found[one])
        assert half == FLOW.unpack(expected)._replace(**dict.fromkeys(lost, 0))
        assert half.check_head == half.check_tail == flows.check(one)


@pytest.mark.parametrize(
    ("text", "described"),
    [
        pytest.param(NEWER, False, id="it does not say what it is"),
        pytest.param(NEWER.replace("client_port", "other_port"), True, id="it lacks a member"),
        pytest.param(
            OLDER.replace("__be16 port", "__be32 port"), True, id="a member is of another size"
        ),
    ],
)
def test_what_cannot_be_understood_is_left_and_costs_nothing_else(
    folder: PinFolder, opened: Callable[..., dict[str, Map]], text: str, *, described: bool
) -> None:
    path, fd = pin_other(folder, *layouts(text), described=described)
    os.close(fd)
    put(opened(conntrack=100)["conntrack"], *many(3))
    ours = opened()
    with carrying(folder, ours) as carrier:
        assert carrier.first() == 6
    assert in_it(ours["conntrack"]) == items_of(*many(3))
    assert path in folder.others(ours)


# --- ids ------------------------------------------------------------------------------------------


def frontend(address: str, port: int, one: int) -> tuple[bytes, bytes]:
    key = FRONTEND_KEY.pack(parse_address(address), port.to_bytes(2), TCP)
    return key, FRONTEND_VALUE.make(id=one)


def test_where_ids_are_new_the_frontend_says_whose_a_flow_is(
    folder: PinFolder, opened: Callable[..., dict[str, Map]]
) -> None:
    web = made(TCP, id=7)
    node_port = made(TCP, client=("192.0.2.10", 1), frontend=("192.168.50.1", 30080), id=8)
    node_port6 = made(
        TCP, client=("fd60::9", 1), frontend=("fd50::1", 30080), backend=("fd44::5", 80), id=9
    )
    nobodys = made(TCP, client=("192.0.2.11", 1), frontend=("10.96.0.99", 80), id=10)
    put(opened()["conntrack"], web, node_port, node_port6, nobodys)
    ours = opened(conntrack=2048)
    ours["frontends"].update(
        [
            frontend("10.96.0.10", 80, 107),
            frontend("0.0.0.0", 30080, 108),
            frontend("::", 30080, 109),
        ]
    )
    with carrying(folder, ours, ids_are_new=True) as carrier:
        carrier.first()
    found = in_it(ours["conntrack"])
    for flow, one in ((web, 107), (node_port, 108), (node_port6, 109), (nobodys, 0)):
        assert {FLOW.unpack(found[key]).id for key in flow.keys} == {one}


# --- the whole of it ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def larger(the_node: PacketNode) -> Iterator[dict[str, Map]]:
    """The node's maps, with larger flow tables, which nobody has used yet."""
    folder = PinFolder(the_node.maps["conntrack"].path.parent)
    changed = {name: 2 * SIZES[name] for name in FLOW_TABLES}
    maps = folder.open_or_create(sizes(SIZES | changed))
    yield maps
    for name in FLOW_TABLES:
        maps[name].path.unlink()
    for one in maps.values():
        one.close()


@pytest.fixture(scope="module")
def other_programs(larger: dict[str, Map]) -> Iterator[Mapping[str, int]]:
    """The same programs on those maps."""
    programs = loader.load(tc_build(larger))
    yield programs
    for fd in programs.values():
        os.close(fd)


@pytest.mark.parametrize("protocol", [TCP, UDP], ids=lambda one: one.name)
def test_open_flows_go_on_when_the_programs_move_to_tables_of_another_size(
    node: PacketNode,
    net: Net,
    *,
    larger: dict[str, Map],
    other_programs: Mapping[str, int],
    monkeypatch: pytest.MonkeyPatch,
    protocol: Protocol,
) -> None:
    web = Service(net, protocol, local=net.local, remote=net.remote)
    node.serve(web)
    open_before = [talks_to(node, web, net.client.at(40000 + number)) for number in range(20)]
    for talk in open_before:
        talk.opens()
        assert talk.lives()
    folder = PinFolder(larger["conntrack"].path.parent)
    with carrying(folder, larger) as carrier:
        assert carrier.first() == 2 * len(open_before)
        between = [talks_to(node, web, net.client.at(50000 + number)) for number in range(20)]
        for talk in between:
            talk.opens()
        monkeypatch.setattr(node, "programs", other_programs)
        monkeypatch.setattr(node, "maps", larger)
        carrier.second()
    assert all(talk.lives() for talk in (*open_before, *between))
    for name in FLOW_TABLES:
        node.clear(name)
