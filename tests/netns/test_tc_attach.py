# SPDX-License-Identifier: Apache-2.0
"""Who runs where at a device: ours first at ingress and last at egress, once, and others untouched.

On real devices, beside other people's programs by clsact and by TCX, and on a kernel as before 6.6
by making the attachment believe that there is no TCX.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from ebpflb.datapath.ebpf import libbpf
from ebpflb.datapath.ebpf.tc import At, Direction, Entry, Hook, Place, Tc
from ebpflb.errors import DatapathError
from ebpflb.lab import Lab, LabError, Namespace, wait_until
from tests.netns.tcprograms import OK, SHOT, UNSPEC, Program, pinned, tc

T = TypeVar("T")

INGRESS, EGRESS = Direction.INGRESS, Direction.EGRESS
ONES = {INGRESS: Place.FIRST, EGRESS: Place.LAST}
WAYS = ["tcx", "clsact"]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("tc") as lab:
        yield lab


_PROTOCOL = 0x88B5  # for local experiments
_U32_FILTER = ("protocol", "all", "prio", "1", "u32", "match", "u32", "0", "0")
_FRAME = b"\xff" * 6 + bytes(6) + _PROTOCOL.to_bytes(2) + bytes(46)


def _packet_socket(device: str) -> socket.socket:
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_PROTOCOL))
    made.bind((device, _PROTOCOL))
    return made


class Device:
    """A fresh veth between two namespaces, seen from one of them."""

    def __init__(self, here: Namespace, there: Namespace, name: str, folder: Path) -> None:
        self.here, self.there, self.name, self.folder = here, there, name, folder
        self.number = here.links(lambda links: links.index(name))
        self._stack = contextlib.ExitStack()

    def at(self, direction: Direction) -> At:
        return At(self.number, self.name, direction)

    def inside(self, act: Callable[[Tc], T], *, tcx: bool = True) -> T:
        """Call a function with tc of the node's network namespace."""

        def go() -> T:
            with contextlib.closing(Tc(tcx=tcx)) as ways:
                return act(ways)

        return self.here.inside(go)

    def look(self, direction: Direction) -> Hook:
        return self.inside(lambda ways: ways.look(self.at(direction)))

    def names(self, direction: Direction) -> list[str]:
        return [one.name for one in self.look(direction).entries]

    def ensure(
        self,
        direction: Direction,
        program: Program,
        *,
        tcx: bool = True,
        place: Place | None = None,
        move: bool = True,
    ) -> bool:
        place = place or ONES[direction]
        return self.inside(
            lambda ways: ways.ensure(self.at(direction), program.fd, place, move=move), tcx=tcx
        )

    def ours(self, verdict: int = UNSPEC, name: str = "ebpflb_test") -> Program:
        return self._made(Program(name, verdict))

    def foreign(
        self,
        direction: Direction,
        way: str,
        *,
        name: str = "foreign",
        verdict: int = UNSPEC,
        options: str = "",
    ) -> Program:
        """A program of somebody else's, attached as they do it."""
        program = self._made(Program(name, verdict))
        if way == "tcx":
            self.here.inside(
                lambda: libbpf.tcx_attach(
                    self.number,
                    self.at(direction).attach_type,
                    program.fd,
                    where=libbpf.TCX_BEFORE if options == "first" else 0,
                )
            )
            return program
        with pinned(program, self.folder) as path:

            def attach() -> None:
                if "clsact" not in tc("qdisc", "show", "dev", self.name):
                    tc("qdisc", "add", "dev", self.name, "clsact")
                what = ["filter", "add", "dev", self.name, direction.value, *options.split()]
                tc(*what, "bpf", "direct-action", "object-pinned", str(path))

            self.here.inside(attach)
        return program

    def _made(self, program: Program) -> Program:
        self._stack.callback(program.close)
        return program

    def packet(self, direction: Direction) -> None:
        """Send one that no stack knows what to do with; what comes in may be a moment later."""
        with self.packets(direction) as sender:
            sender.send(_FRAME)

    def packets(self, direction: Direction) -> socket.socket:
        """The socket at whose end of the veth a frame goes in."""
        sender = self.here if direction is EGRESS else self.there
        return sender.inside(lambda: _packet_socket(self.name))

    def is_met(self, direction: Direction, program: Program) -> bool:
        """Whether a packet comes to it."""
        before = program.runs
        self.packet(direction)
        with contextlib.suppress(LabError):
            wait_until(lambda: program.runs > before, timeout_s=0.3, what="it runs")
        return program.runs > before

    def close(self) -> None:
        self.here.links(lambda links: links.delete(self.name))
        self._stack.close()


@pytest.fixture(scope="module")
def places(lab: Lab) -> tuple[Namespace, Namespace]:
    return lab.namespace("here"), lab.namespace("there")


@pytest.fixture
def device(lab: Lab, places: tuple[Namespace, Namespace]) -> Iterator[Device]:
    here, there = places
    lab.link(here, "dev0", there, "dev0")
    made = Device(here, there, "dev0", lab.pin_root / "foreign")
    yield made
    made.close()


@pytest.fixture(params=[True, False], ids=["with TCX", "as before TCX"])
def tcx(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=list(Direction), ids=lambda one: one.value)
def direction(request: pytest.FixtureRequest) -> Direction:
    return Direction(request.param)


def only(hook: Hook) -> Entry:
    (entry,) = hook.ours
    return entry


# --- alone ---------------------------------------------------------------------------------------


def test_a_program_runs_where_it_was_put(device: Device, direction: Direction, tcx: bool) -> None:
    ours = device.ours()
    assert device.ensure(direction, ours, tcx=tcx)
    assert only(device.look(direction)).way == ("tcx" if tcx else "clsact")
    assert device.is_met(direction, ours)


def test_the_other_direction_is_not_touched(
    device: Device, direction: Direction, tcx: bool
) -> None:
    device.ensure(direction, device.ours(), tcx=tcx)
    (other,) = set(Direction) - {direction}
    assert device.names(other) == []


def test_what_runs_already_is_not_put_there_again(
    device: Device, direction: Direction, tcx: bool
) -> None:
    ours = device.ours()
    device.ensure(direction, ours, tcx=tcx)
    before = device.look(direction)
    assert not device.ensure(direction, ours, tcx=tcx)
    assert device.look(direction) == before


def test_a_new_program_takes_the_place_of_the_old_one(
    device: Device, direction: Direction, tcx: bool
) -> None:
    """B-133"""
    device.ensure(direction, device.ours(), tcx=tcx)
    new = device.ours(name="ebpflb_renamed")
    assert device.ensure(direction, new, tcx=tcx)
    assert only(device.look(direction)).program == new.id


@pytest.mark.parametrize("now", [True, False], ids=["now TCX", "now clsact"])
def test_many_copies_become_one(device: Device, direction: Direction, now: bool) -> None:
    """B-133, B-135: whatever earlier agents left, of whatever way and priority."""
    for number in range(3):
        device.foreign(direction, "tcx", name=f"ebpflb_old{number}")
        device.foreign(
            direction, "clsact", name=f"ebpflb_old{number}", options=f"prio {number + 1}"
        )
    ours = device.ours()
    device.ensure(direction, ours)
    assert len(device.look(direction).entries) == 1
    assert only(device.look(direction)).program == ours.id


def test_it_is_taken_away(device: Device, direction: Direction, tcx: bool) -> None:
    device.ensure(direction, device.ours(), tcx=tcx)
    assert device.inside(lambda ways: ways.remove(device.at(direction))) == 1
    assert device.names(direction) == []
    assert device.inside(lambda ways: ways.remove(device.at(direction))) == 0


def test_a_program_outlives_all_descriptors(
    device: Device, direction: Direction, tcx: bool
) -> None:
    ours = Program("ebpflb_alone")
    device.ensure(direction, ours, tcx=tcx)
    os.close(ours.fd)
    assert device.names(direction) == ["ebpflb_alone"]


# --- beside others -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["before us", "after us"])
def test_others_keep_running(
    device: Device, direction: Direction, tcx: bool, way: str, when: str
) -> None:
    """B-137: and none of theirs is moved."""
    ours = device.ours()
    if when == "after us":
        device.ensure(direction, ours, tcx=tcx)
    other = device.foreign(direction, way)
    theirs = device.look(direction).others
    device.ensure(direction, ours, tcx=tcx)
    assert device.is_met(direction, ours)
    assert device.is_met(direction, other)
    assert device.look(direction).others == theirs


@pytest.mark.parametrize("when", ["before us", "after us"])
@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("tcx", "first"),
        ("tcx", ""),
        ("clsact", "prio 1"),
        ("clsact", "prio 1 handle 1"),
        ("clsact", "prio 50"),
        ("clsact", ""),
        ("clsact", "prio 65535"),
    ],
)
def test_ours_is_first_at_ingress(device: Device, way: str, options: str, when: str) -> None:
    """B-135, K12: also where theirs comes later, with the same priority."""
    ours = device.ours()
    if when == "after us":
        device.ensure(INGRESS, ours)
    device.foreign(INGRESS, way, options=options)
    device.ensure(INGRESS, ours)
    assert device.names(INGRESS) == ["ebpflb_test", "foreign"]


@pytest.mark.parametrize("when", ["before us", "after us"])
@pytest.mark.parametrize("options", ["prio 1", "prio 1 handle 1", "prio 50", "", "prio 65535"])
def test_ours_is_first_at_ingress_before_tcx(device: Device, options: str, when: str) -> None:
    ours = device.ours()
    if when == "after us":
        device.ensure(INGRESS, ours, tcx=False)
    device.foreign(INGRESS, "clsact", options=options)
    device.ensure(INGRESS, ours, tcx=False)
    assert device.names(INGRESS) == ["ebpflb_test", "foreign"]


@pytest.mark.parametrize("when", ["before us", "after us"])
@pytest.mark.parametrize(
    ("way", "options"),
    [("tcx", "first"), ("tcx", ""), ("clsact", "prio 1"), ("clsact", ""), ("clsact", "prio 65534")],
)
def test_ours_is_last_at_egress(
    device: Device, way: str, options: str, when: str, tcx: bool
) -> None:
    """K12: TCX runs before every filter, so ours is a filter where one of theirs is."""
    ours = device.ours()
    if when == "after us":
        device.ensure(EGRESS, ours, tcx=tcx)
    device.foreign(EGRESS, way, options=options)
    device.ensure(EGRESS, ours, tcx=tcx)
    assert device.names(EGRESS) == ["foreign", "ebpflb_test"]


def test_once_last_nobody_who_comes_later_is_behind(device: Device) -> None:
    device.foreign(EGRESS, "clsact", name="early")
    ours = device.ours()
    device.ensure(EGRESS, ours)
    device.foreign(EGRESS, "clsact", name="late")
    device.foreign(EGRESS, "tcx", name="tcx")
    assert device.names(EGRESS)[-1] == "ebpflb_test"
    assert not device.ensure(EGRESS, ours)


def test_a_program_of_another_hides_ours_unless_it_is_first(device: Device) -> None:
    """K12: one that ends the chain at egress forces ours before it."""
    device.foreign(EGRESS, "clsact", verdict=OK, options="prio 1")
    ours = device.ours()
    device.ensure(EGRESS, ours)
    assert not device.is_met(EGRESS, ours)
    device.ensure(EGRESS, ours, place=Place.FIRST)
    assert device.names(EGRESS) == ["ebpflb_test", "foreign"]
    assert device.is_met(EGRESS, ours)


def test_ours_goes_before_one_of_the_first_priority_without_tcx(device: Device) -> None:
    other = device.foreign(EGRESS, "clsact", verdict=OK, options="prio 1")
    ours = device.ours()
    device.ensure(EGRESS, ours, tcx=False)
    device.ensure(EGRESS, ours, tcx=False, place=Place.FIRST)
    assert device.names(EGRESS) == ["ebpflb_test", "foreign"]
    assert device.is_met(EGRESS, ours)
    assert device.is_met(EGRESS, other)


def test_a_filter_of_another_kind_is_left_where_it_is(device: Device) -> None:
    """Nothing can stand beside it at its priority: ours runs behind it, and that can be seen."""
    device.here.inside(
        lambda: [
            tc("qdisc", "add", "dev", "dev0", "clsact"),
            tc("filter", "add", "dev", "dev0", "ingress", *_U32_FILTER),
        ]
    )
    ours = device.ours()
    device.ensure(INGRESS, ours, tcx=False)
    hook = device.look(INGRESS)
    assert [one.name for one in hook.entries] == ["u32", "ebpflb_test"]
    assert [str(one) for one in hook.before] == ["u32, clsact priority 1"]
    assert not hook.is_in(Place.FIRST)
    assert device.is_met(INGRESS, ours)


def test_one_that_runs_is_not_moved_unless_it_is_to_be(device: Device) -> None:
    ours = device.ours()
    device.ensure(INGRESS, ours)
    device.foreign(INGRESS, "tcx", options="first")
    assert not device.ensure(INGRESS, ours, move=False)
    assert device.names(INGRESS) == ["foreign", "ebpflb_test"]


@pytest.mark.parametrize("way", WAYS)
def test_while_ours_moves_every_packet_meets_it(device: Device, way: str) -> None:
    """Without a gap: a packet in the middle of a flow that passes untouched would be reset."""
    ours = device.ours(verdict=SHOT)
    device.ensure(INGRESS, ours, tcx=way == "tcx")
    stop = threading.Event()
    with (
        device.here.inside(lambda: _packet_socket(device.name)) as witness,
        device.packets(INGRESS) as sender,
    ):

        def send() -> None:
            while not stop.is_set():
                sender.send(_FRAME)

        thread = threading.Thread(target=send)
        thread.start()
        for number in range(10):
            options = "first" if way == "tcx" else "prio 1"
            device.foreign(INGRESS, way, name=f"f{number}", options=options)
            assert device.ensure(INGRESS, ours, tcx=way == "tcx")
        stop.set()
        thread.join()
        assert ours.runs > 100
        witness.setblocking(False)
        with pytest.raises(BlockingIOError):  # where all were dropped, nothing came by
            witness.recv(100)


# --- qdiscs --------------------------------------------------------------------------------------


def test_a_qdisc_of_kind_ingress_stays(device: Device) -> None:
    """B-137"""
    device.here.inside(
        lambda: [
            tc("qdisc", "add", "dev", "dev0", "ingress"),
            tc("filter", "add", "dev", "dev0", "parent", "ffff:", *_U32_FILTER),
        ]
    )
    ours, other = device.ours(), device.ours(name="ebpflb_out")
    device.ensure(INGRESS, ours)
    device.ensure(EGRESS, other)
    assert device.names(INGRESS) == ["ebpflb_test", "u32"]
    assert device.names(EGRESS) == ["ebpflb_out"]
    assert "qdisc ingress" in device.here.inside(lambda: tc("qdisc", "show", "dev", "dev0"))


def test_without_tcx_a_qdisc_of_kind_ingress_is_named(device: Device) -> None:
    device.here.inside(lambda: tc("qdisc", "add", "dev", "dev0", "ingress"))
    device.ensure(INGRESS, device.ours(), tcx=False)
    with pytest.raises(DatapathError, match="tc qdisc del dev dev0 ingress"):
        device.ensure(EGRESS, device.ours(), tcx=False)
    assert device.names(INGRESS) == ["ebpflb_test"]


def test_only_an_empty_clsact_is_removed(device: Device) -> None:
    ours = device.ours()
    device.ensure(INGRESS, ours, tcx=False)
    at = device.at(INGRESS)
    assert not device.inside(lambda ways: ways.remove_empty_qdisc(at))
    device.foreign(EGRESS, "clsact")
    device.inside(lambda ways: ways.remove(at))
    assert not device.inside(lambda ways: ways.remove_empty_qdisc(at))
    assert device.names(EGRESS) == ["foreign"]


def test_no_qdisc_is_left_where_none_was(device: Device) -> None:
    ours = device.ours()
    device.ensure(INGRESS, ours, tcx=False)
    device.inside(lambda ways: ways.remove(device.at(INGRESS)))
    assert device.inside(lambda ways: ways.remove_empty_qdisc(device.at(INGRESS)))
    device.ensure(INGRESS, ours)
    device.foreign(INGRESS, "tcx", options="first")
    device.ensure(INGRESS, ours)  # moves, with a filter that stands in for it meanwhile
    assert device.names(INGRESS) == ["ebpflb_test", "foreign"]
    assert device.look(INGRESS).qdisc == ""


def test_a_device_that_is_gone_is_an_error_that_says_so(device: Device) -> None:
    gone = At(4711, "gone0", INGRESS)
    ours = device.ours()
    for tcx in (True, False):
        with pytest.raises(DatapathError, match="ENODEV"):
            device.inside(lambda ways: ways.ensure(gone, ours.fd, Place.FIRST), tcx=tcx)
        with pytest.raises(DatapathError, match="ENODEV"):
            device.inside(lambda ways: ways.look(gone), tcx=tcx)
