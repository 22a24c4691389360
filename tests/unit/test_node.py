"""This node's addresses: what netlink says is read, and what changes is told."""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from ebpflb import node
from ebpflb.model import Address, LocalAddresses, parse_address
from ebpflb.node import AddressWatch, local_addresses

TIMEOUT_S = 10.0
V4, V6 = socket.AF_INET, socket.AF_INET6
ADDRESS, LOCAL, LABEL = 1, 2, 3  # IFA_…
TENTATIVE, DADFAILED, PERMANENT, OPTIMISTIC = 0x40, 0x08, 0x80, 0x04


def attribute(kind: int, data: bytes) -> bytes:
    return struct.pack("=HH", len(data) + 4, kind) + data + bytes(-len(data) % 4)


def packed(text: str) -> bytes:
    return socket.inet_pton(V6 if ":" in text else V4, text)


def interface_address(family: int, attributes: dict[int, str], flags: int = PERMANENT) -> bytes:
    return struct.pack("=BBBBI", family, 24, flags, 0, 2) + b"".join(
        attribute(kind, b"eth0\0" if kind == LABEL else packed(text))
        for kind, text in attributes.items()
    )


@pytest.mark.parametrize(
    ("body", "address"),
    [
        (interface_address(V4, {ADDRESS: "10.0.0.1", LOCAL: "10.0.0.1"}), "10.0.0.1"),
        (interface_address(V4, {ADDRESS: "10.0.0.2", LOCAL: "10.0.0.1"}), "10.0.0.1"),
        (interface_address(V4, {LABEL: "eth0", LOCAL: "10.0.0.1"}), "10.0.0.1"),
        (interface_address(V6, {ADDRESS: "fd00::1"}), "fd00::1"),
        (interface_address(V6, {LOCAL: "fd00::1", ADDRESS: "fd00::2"}), "fd00::1"),
        (interface_address(V6, {ADDRESS: "fd00::1"}, TENTATIVE | PERMANENT), None),
        (interface_address(V6, {ADDRESS: "fd00::1"}, TENTATIVE | DADFAILED), None),
        (interface_address(V6, {ADDRESS: "fd00::1"}, TENTATIVE | OPTIMISTIC), None),
        (interface_address(17, {ADDRESS: "10.0.0.1"}), None),
        (interface_address(V6, {ADDRESS: "10.0.0.1"}), None),
        (interface_address(V4, {}), None),
        (b"", None),
    ],
    ids=[
        "an IPv4 address",
        "of a point-to-point link this end",
        "attributes of other kinds and lengths are passed over",
        "an IPv6 address",
        "of an IPv6 address with a peer this end",
        "an IPv6 address whose duplicates are looked for is not yet the node's",
        "an IPv6 address that another machine has is not the node's",
        "one that is used meanwhile is told by its route",
        "another family's is none",
        "an address of the wrong length is none",
        "no attribute at all",
        "the end of a dump",
    ],
)
def test_an_interfaces_address(body: bytes, address: str | None) -> None:
    """NP-05: as the kernel's ``type local``."""
    assert node._address_of_interface(body) == (parse_address(address) if address else None)


def test_what_ipvs_mode_left_is_no_address_of_the_nodes() -> None:
    """Every Service's address is on its device; NodePorts do not answer there."""
    body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, 7) + attribute(2, packed("10.96.0.10"))
    assert node._address_of_interface(body, foreign=7) is None
    assert node._address_of_interface(body, foreign=8) == parse_address("10.96.0.10")
    by_route = route(socket.AF_INET, "10.96.0.10") + attribute(4, struct.pack("=I", 7))
    assert node._address_of_route(by_route, foreign=7) is None
    assert node._address_of_route(by_route, foreign=8) == parse_address("10.96.0.10")


def route(
    family: int, destination: str, *, length: int = 32, table: int = 255, kind: int = 2
) -> bytes:
    header = struct.pack("=8BI", family, length, 0, 0, table, 0, 0, kind, 0)
    return header + attribute(15, struct.pack("=I", table)) + attribute(1, packed(destination))


@pytest.mark.parametrize(
    ("body", "address"),
    [
        (route(V4, "10.9.9.9"), "10.9.9.9"),
        (route(V6, "fd09::9", length=128), "fd09::9"),
        (route(V4, "10.9.0.0", length=24), None),
        (route(V6, "fd09::", length=32), None),
        (route(V4, "10.9.9.9", kind=3), None),
        (route(V4, "10.9.9.9", table=100), None),
        (b"", None),
    ],
    ids=[
        "a local route to an IPv4 address",
        "a local route to an IPv6 address",
        "a local network is not one address",
        "a local network of 32 bits is no IPv4 address",
        "a broadcast address is none of the node's",
        "a transparent proxy's table is not the node's",
        "the end of a dump",
    ],
)
def test_a_local_routes_address(body: bytes, address: str | None) -> None:
    """NP-05: cloud agents add load balancers' addresses so."""
    assert node._address_of_route(body) == (parse_address(address) if address else None)


def test_this_machine_has_a_loopback() -> None:
    assert parse_address("127.0.0.1") in local_addresses()


class Kernel:
    """Answers dumps with what it is given, one list of messages for each."""

    def __init__(self, *dumps: list[tuple[int, int, bytes]]) -> None:
        self._dumps = list(dumps)
        self.asked = 0

    def send(self, _data: bytes) -> None:
        self.asked += 1

    def recv(self, _size: int) -> bytes:
        return b"".join(
            struct.pack("=IHHII", 16 + len(body), kind, flags, 0, 0) + body + bytes(-len(body) % 4)
            for kind, flags, body in self._dumps.pop(0)
        )


FIRST = interface_address(V4, {LOCAL: "10.0.0.1"})
SECOND = interface_address(V4, {LOCAL: "10.0.0.2"})
NEW, DONE, ERROR, INTERRUPTED = 20, 3, 2, 0x10
END = (DONE, 0, struct.pack("=i", 0))


def dumped(kernel: Kernel) -> list[Address]:
    return list(node._dumped(kernel, 22, bytes(8), node._address_of_interface))  # type: ignore[arg-type]


def test_a_dump_in_several_messages_and_reads() -> None:
    kernel = Kernel([(NEW, 0, FIRST)], [(NEW, 0, SECOND), END])
    assert dumped(kernel) == [parse_address("10.0.0.1"), parse_address("10.0.0.2")]


@pytest.mark.parametrize("where", ["in the middle", "at the end"])
def test_a_dump_under_which_something_changed_is_asked_for_again(where: str) -> None:
    first = (NEW, INTERRUPTED if where == "in the middle" else 0, FIRST)
    end = (DONE, INTERRUPTED if where == "at the end" else 0, struct.pack("=i", 0))
    kernel = Kernel([first, end], [(NEW, 0, SECOND), END])
    assert dumped(kernel) == [parse_address("10.0.0.2")]
    assert kernel.asked == 2


def test_a_dump_that_never_holds_still_is_an_error() -> None:
    kernel = Kernel(*[[(NEW, INTERRUPTED, FIRST), END]] * 100)
    with pytest.raises(OSError, match="faster than they can be read"):
        dumped(kernel)


@pytest.mark.parametrize("kind", [ERROR, DONE], ids=["in place of a dump", "at its end"])
def test_an_error_that_the_kernel_answers_is_raised(kind: int) -> None:
    with pytest.raises(OSError, match="Permission denied"):
        dumped(Kernel([(kind, 0, struct.pack("=i", -errno.EACCES))]))


# --- AddressWatch --------------------------------------------------------------------------------


class World:
    """What a watch reads, whether it can, and how it is told."""

    def __init__(self) -> None:
        self.addresses = frozenset({parse_address("10.0.0.1")})
        self.error: OSError | None = None
        self.reads = 0
        self.notices: list[str] = []
        self.subscriptions = 0
        self._changed = threading.Condition()
        self._emitted: list[frozenset[Address]] = []
        self._teller: socket.socket | None = None

    def read(self) -> frozenset[Address]:
        with self._changed:
            self.reads += 1
            self._changed.notify_all()
            if self.error is not None:
                raise self.error
            return self.addresses

    def subscribe(self) -> socket.socket:
        self.subscriptions += 1
        if self._teller is not None:
            self._teller.close()
        self._teller, told = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        told.settimeout(0)
        return told

    def emit(self, event: LocalAddresses) -> None:
        with self._changed:
            self._emitted.append(event.addresses)
            self._changed.notify_all()

    def notice(self, event: str, /, **fields: object) -> None:
        with self._changed:
            self.notices.append(f"{event}: {fields['reason']}")
            self._changed.notify_all()

    def tell(self, *, times: int = 1) -> None:
        assert self._teller is not None
        for _ in range(times):
            self._teller.send(b"something")

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S)

    def emitted(self, count: int) -> list[frozenset[Address]]:
        self.wait(lambda: len(self._emitted) >= count)
        return self._emitted

    def close(self) -> None:
        if self._teller is not None:
            self._teller.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


@pytest.fixture
def watch(world: World) -> Iterator[AddressWatch]:
    made = AddressWatch(
        world.emit,
        world.notice,
        read=world.read,
        subscribe=world.subscribe,
        settle_s=0.001,
        retry_min_s=0.001,
    )
    yield made
    made.stop()


def addresses(*texts: str) -> frozenset[Address]:
    return frozenset(map(parse_address, texts))


def test_the_first_addresses_are_there_when_start_returns(
    world: World, watch: AddressWatch
) -> None:
    """B-89: no plan is made before this node's addresses are known."""
    watch.start()
    assert world._emitted == [addresses("10.0.0.1")]
    assert watch.alive()


def test_a_change_is_emitted_and_only_a_change(world: World, watch: AddressWatch) -> None:
    watch.start()
    world.tell()
    world.wait(lambda: world.reads == 2)
    world.addresses = addresses("10.0.0.1", "10.0.0.2")
    world.tell()
    assert world.emitted(2) == [addresses("10.0.0.1"), addresses("10.0.0.1", "10.0.0.2")]


def test_what_comes_at_once_is_read_once(world: World) -> None:
    watch = AddressWatch(
        world.emit, world.notice, read=world.read, subscribe=world.subscribe, settle_s=0.2
    )
    watch.start()
    world.tell(times=10)
    world.addresses = addresses("10.0.0.2")
    world.emitted(2)
    watch.stop()
    assert world.reads <= 3  # one more, should the ten not have come within the first wait


def test_addresses_that_cannot_be_read_at_first_are_told_when_they_can(
    world: World, watch: AddressWatch
) -> None:
    world.error = OSError(errno.ENOMEM, "Cannot allocate memory")
    watch.start()
    world.wait(lambda: world.reads >= 3)
    assert world._emitted == []
    assert watch.alive()
    world.error = None
    assert world.emitted(1) == [addresses("10.0.0.1")]
    assert len(world.notices) == 1
    assert "Cannot allocate memory" in world.notices[0]


def test_a_failure_later_keeps_what_was_told_and_is_told_once_each_time(
    world: World, watch: AddressWatch
) -> None:
    watch.start()
    for round_ in (1, 2):
        world.error = OSError(errno.ENOMEM, "no")
        world.tell()
        world.wait(lambda: len(world.notices) == round_)  # noqa: B023 - waited for within the turn
        world.addresses = addresses(f"10.0.1.{round_}")
        world.error = None
        assert world.emitted(round_ + 1)[-1] == addresses(f"10.0.1.{round_}")


class Lossy(socket.socket):
    """Says once that messages were lost."""

    number = errno.ENOBUFS
    lost = True

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        if self.lost:
            self.lost = False
            raise OSError(self.number, "lost")
        return super().recv(size, flags)


@pytest.mark.parametrize(
    ("number", "subscriptions"),
    [(errno.ENOBUFS, 1), (errno.EBADF, 2)],
    ids=["lost messages are a reason to read", "a broken subscription is made anew"],
)
def test_a_subscription_that_fails(world: World, number: int, subscriptions: int) -> None:
    def subscribe() -> socket.socket:
        told = world.subscribe()
        if world.subscriptions > 1:
            return told
        lossy = Lossy(told.family, told.type, told.proto, told.detach())
        lossy.settimeout(0)
        lossy.number = number
        return lossy

    watch = AddressWatch(
        world.emit, world.notice, read=world.read, subscribe=subscribe, settle_s=0.001
    )
    watch.start()
    world.addresses = addresses("10.0.0.2")
    world.tell()
    assert world.emitted(2)[-1] == addresses("10.0.0.2")
    world.addresses = addresses("10.0.0.3")
    world.tell()
    assert world.emitted(3)[-1] == addresses("10.0.0.3")
    watch.stop()
    assert world.subscriptions == subscriptions


@pytest.mark.parametrize("when", ["before start", "idle", "waiting to try again"])
def test_stop_ends_it_and_leaves_no_descriptor(world: World, when: str) -> None:
    watch = AddressWatch(
        world.emit,
        world.notice,
        read=world.read,
        subscribe=world.subscribe,
        retry_min_s=3600,
    )
    if when == "waiting to try again":
        world.error = OSError(errno.EIO, "no")
    if when != "before start":
        watch.start()
    watch.stop()
    assert not watch.alive()
    assert watch._changes is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(watch._stop_fd)


def test_a_fault_of_ours_ends_the_thread_and_shows(
    world: World, watch: AddressWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _args: ended.set())
    watch.start()
    world.addresses = None  # type: ignore[assignment]
    monkeypatch.setattr(watch, "_emit", lambda _event: 1 / 0)
    world.tell()
    assert ended.wait(TIMEOUT_S)
    watch._thread.join(TIMEOUT_S)
    assert not watch.alive()
