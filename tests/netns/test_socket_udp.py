# SPDX-License-Identifier: Apache-2.0
"""UDP sockets over their life: one backend a Service, until it leaves or the flow has gone cold.

What an unconnected socket remembers is bounded, and what the maps remember of a connected one goes
with it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

import pytest

from ebpflb.datapath.ebpf import abi
from ebpflb.model import Protocol, parse_address
from tests.netns.agents import wait_until
from tests.netns.kernel import Kernel
from tests.netns.services import ready, terminating, unready
from tests.netns.sockets import Form, answer_on, ask, cookie, disconnect, peer
from tests.netns.world import MORE_UDP_PORTS, UDP_PORT, Handle, MakeService, OpenSocket, World

REMEMBERED = abi.CONSTANTS["ABI_UDP_FLOWS"]


@pytest.fixture
def quick_to_forget(world: World) -> Iterator[None]:
    """Flows go cold as fast as conntrack would let them in an impatient cluster."""
    before = {
        name: world.kernel.set_setting(name, value)
        for name, value in (("udp_timeout_ns", 60_000_000), ("udp_stream_timeout_ns", 200_000_000))
    }
    yield
    for name, value in before.items():
        world.kernel.set_setting(name, value)


@pytest.fixture
def one_backend_many_services(world: World) -> Iterator[list[Handle]]:
    """Ten Services; each leads to a port of its own of the one backend be1."""
    specs = [world.spec(pods=world.backends[:1], tcp={}, udp={53: port}) for port in MORE_UDP_PORTS]
    yield world.services(*specs)
    world.agent.manifests.remove(*(spec.name for spec in specs))


# --- one socket, many Services ------------------------------------------------------------------


def test_every_socket_has_a_backend_of_its_own_and_keeps_it(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    handle = service(pods=world.backends)
    chosen = set()
    for _ in range(40):
        sock = open_socket(world.p1, form)
        answers = {ask(sock, (form.host(handle), 53)) for _ in range(5)}
        assert len(answers) == 1, answers
        ((name, source),) = answers
        assert source == (form.host(handle), 53)
        chosen.add(name)
    assert len(chosen) > 1


def test_one_socket_talks_with_several_services_at_once(
    world: World, one_backend_many_services: list[Handle], form: Form, open_socket: OpenSocket
) -> None:
    """All are asked before the first answer is read: each answer shows its own Service."""
    asked = one_backend_many_services[:REMEMBERED]
    sock = open_socket(world.p1, form)
    for handle in asked:
        sock.sendto(b"who", (form.host(handle), 53))
    heard = {answer_on(sock)[1] for _ in asked}
    assert heard == {(form.host(handle), 53) for handle in asked}


def test_of_more_services_than_it_remembers_a_socket_forgets_the_oldest(
    world: World, one_backend_many_services: list[Handle], form: Form, open_socket: OpenSocket
) -> None:
    """An answer that comes after that shows the backend. Dialled again, the Service is back."""
    asked = one_backend_many_services[: REMEMBERED + 1]
    sock = open_socket(world.p1, form)
    for handle in asked:
        sock.sendto(b"who", (form.host(handle), 53))
    heard = {answer_on(sock)[1] for _ in asked}
    forgotten = (form.host(world.backends[0]), MORE_UDP_PORTS[0])
    assert heard == {forgotten, *((form.host(handle), 53) for handle in asked[1:])}

    assert ask(sock, (form.host(asked[0]), 53)) == ("be1", (form.host(asked[0]), 53))


def test_two_services_on_one_backend_show_the_one_that_was_used_last(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """A datagram does not say which Service it answers (C3)."""
    one, two = service(pods=world.backends[:1]), service(pods=world.backends[:1])
    sock = open_socket(world.p1, form)
    assert ask(sock, (form.host(one), 53))[1] == (form.host(one), 53)
    assert ask(sock, (form.host(two), 53))[1] == (form.host(two), 53)
    assert ask(sock, (form.host(one), 53))[1] == (form.host(one), 53)
    for handle in (one, two):
        sock.sendto(b"who", (form.host(handle), 53))
    assert {answer_on(sock)[1] for _ in range(2)} == {(form.host(two), 53)}


def test_a_backend_that_is_then_dialled_itself_is_heard_under_its_own_address(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """As with two Services the last use counts; a Service that is dialled again is back (C2)."""
    handle = service(pods=world.backends[:1])
    backend = (form.host(world.backends[0]), UDP_PORT)
    sock = open_socket(world.p1, form)
    for where in ((form.host(handle), 53), backend, (form.host(handle), 53), backend):
        assert ask(sock, where) == ("be1", where)


def test_a_backend_that_is_then_connected_to_is_heard_under_its_own_address(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """recvfrom() and getpeername() of one socket must not tell two stories."""
    handle = service(pods=world.backends[:1])
    backend = (form.host(world.backends[0]), UDP_PORT)
    sock = open_socket(world.p1, form)
    assert ask(sock, (form.host(handle), 53)) == ("be1", (form.host(handle), 53))
    sock.connect(backend)
    assert ask(sock) == ("be1", backend)


def test_a_connected_socket_that_names_its_service_is_heard_by_its_peer(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """It hears from nobody else, so another choice would lose the answer."""
    handle = service(pods=world.backends)
    for _ in range(10):
        sock = open_socket(world.p1, form)
        sock.connect((form.host(handle), 53))
        name, _ = ask(sock)
        assert ask(sock, (form.host(handle), 53)) == (name, (form.host(handle), 53))
        assert ask(sock)[0] == name


def test_a_connected_socket_may_name_its_backend(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """It stays connected to the Service, so that is what it shows."""
    handle = service(pods=world.backends[:1])
    sock = open_socket(world.p1, form)
    sock.connect((form.host(handle), 53))
    assert ask(sock, (form.host(world.backends[0]), UDP_PORT))[0] == "be1"
    assert peer(sock) == (form.host(handle), 53)
    assert ask(sock) == ("be1", (form.host(handle), 53))


# --- how long -----------------------------------------------------------------------------------


def test_the_next_datagram_moves_when_the_backend_has_left(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """Its source port stays, and nothing reaches the one that left (B-01, B-15)."""
    two = world.backends[:2]
    handle = service(pods=two)
    sock = open_socket(world.p1, form)
    first, _ = ask(sock, (form.host(handle), 53))
    source = sock.getsockname()
    left, stays = two if first == "be1" else reversed(two)
    handle.set(endpoints=ready(stays))
    received = world.servers[left.name].stats()["udp_received"]
    for _ in range(5):
        assert ask(sock, (form.host(handle), 53)) == (stays.name, (form.host(handle), 53))
    assert sock.getsockname() == source
    assert world.servers[left.name].stats()["udp_received"] == received


def test_every_socket_follows_a_rolling_update(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """B-19: after each step every old socket is with a backend that is there."""
    handle = service(pods=world.backends[:3])
    where = (form.host(handle), 53)
    sockets = [open_socket(world.p1, form) for _ in range(30)]
    for present in ((0, 1, 2), (1, 2, 3), (2, 3), (3, 0)):
        pods = [world.backends[index] for index in present]
        handle.set(endpoints=ready(*pods))
        answers = [ask(sock, where) for sock in sockets]
        assert {name for name, _ in answers} <= {pod.name for pod in pods}
        assert {source for _, source in answers} == {where}


def test_an_unready_backend_is_left_and_a_ready_one_found(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """From no endpoint to one, on the same source port (B-07, CT-09 for unconnected sockets)."""
    handle = service(endpoints=unready(world.backends[0]))
    sock = open_socket(world.p1, form)
    before = world.servers["be1"].stats()["udp_received"]
    for _ in range(3):
        sock.sendto(b"who", (form.host(handle), 53))
    assert world.servers["be1"].stats()["udp_received"] == before
    handle.set(endpoints=ready(world.backends[0]))
    assert ask(sock, (form.host(handle), 53)) == ("be1", (form.host(handle), 53))


def test_a_terminating_backend_keeps_its_flows_and_gets_no_new_ones(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """(CT-07, TOP-15)"""
    going, stays = world.backends[:2]
    handle = service(pods=[going])
    old = open_socket(world.p1, form)
    assert ask(old, (form.host(handle), 53))[0] == going.name
    handle.set(endpoints=(*terminating(going), *ready(stays)))
    for _ in range(5):
        assert ask(old, (form.host(handle), 53)) == (going.name, (form.host(handle), 53))
        new = open_socket(world.p1, form)
        assert ask(new, (form.host(handle), 53))[0] == stays.name
    handle.set(endpoints=ready(stays))
    assert ask(old, (form.host(handle), 53))[0] == stays.name


def test_a_flow_that_is_used_stays_and_a_cold_one_is_chosen_anew(
    world: World,
    service: MakeService,
    form: Form,
    open_socket: OpenSocket,
    quick_to_forget: None,
) -> None:
    """A resolver's one socket sees a scaled-up Service once it has been idle (K7)."""
    handle = service(pods=world.backends[:1])
    sock = open_socket(world.p1, form)
    where = (form.host(handle), 53)
    assert ask(sock, where)[0] == "be1"
    handle.set(endpoints=ready(*world.backends))

    seen = set()

    def after_a_pause() -> bool:
        cold_at = time.monotonic() + 0.21
        wait_until(lambda: time.monotonic() > cold_at, what="the flow is cold")
        seen.add(ask(sock, where)[0])
        return len(seen) > 1

    assert ask(sock, where)[0] == ask(sock, where)[0]
    wait_until(after_a_pause, timeout_s=20, what="an idle socket gets another backend")


def test_an_unanswered_flow_goes_cold_sooner(
    world: World, service: MakeService, open_socket: OpenSocket, quick_to_forget: None
) -> None:
    """A connection is counted with each choice: 60 ms unanswered, 200 ms answered."""
    handle = service(pods=world.backends[:1], udp={53: 9999})
    sock = open_socket(world.p1, Form.V4)

    def used(number: int) -> bool:
        return handle.connections(Protocol.UDP, 53) == number

    sock.sendto(b"into the void", (handle.ipv4, 53))
    sock.sendto(b"into the void", (handle.ipv4, 53))
    assert used(1)
    cold_at = time.monotonic() + 0.065
    wait_until(lambda: time.monotonic() > cold_at, what="the unanswered flow is cold")
    with contextlib.suppress(ConnectionRefusedError):
        sock.sendto(b"into the void", (handle.ipv4, 53))
    assert used(2)


# --- what the maps remember of connected sockets ------------------------------------------------


def of_service(kernel: Kernel, handle: Handle) -> dict[int, tuple[bytes, int]]:
    """Sockets connected to UDP 53 of a Service: (backend, port) by cookie."""
    ids = {kernel.id_of(handle.port_name(Protocol.UDP, 53, form)) for form in (Form.V4, Form.V6)}
    return {
        sock: (entry.backend, entry.backend_port)
        for sock, entry in kernel.udp_connections().items()
        if entry.id in ids
    }


def test_a_connected_socket_is_indexed_until_it_is_closed(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    handle = service(pods=world.backends[:1])
    sock = open_socket(world.p1, form)
    backend = world.backends[0].ipv6 if form is Form.V6 else world.backends[0].ipv4
    for _ in range(2):
        sock.connect((form.host(handle), 53))
        entry = {cookie(sock): (parse_address(backend), UDP_PORT)}
        assert of_service(world.kernel, handle) == entry
    sock.close()
    assert of_service(world.kernel, handle) == {}


def test_the_entry_goes_when_the_socket_connects_elsewhere(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    handle = service(pods=world.backends[:1])
    sock = open_socket(world.p1, form)
    sock.connect((form.host(handle), 53))
    assert len(of_service(world.kernel, handle)) == 1
    sock.connect((form.host(world.backends[0]), UDP_PORT))
    assert of_service(world.kernel, handle) == {}


def test_the_entry_goes_when_a_disconnected_socket_sends(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """Nobody tells us of AF_UNSPEC itself (C2)."""
    handle = service(pods=world.backends[:1])
    sock = open_socket(world.p1, form)
    sock.connect((form.host(handle), 53))
    disconnect(sock)
    ask(sock, (form.host(world.backends[0]), UDP_PORT))
    assert of_service(world.kernel, handle) == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_entries_go_with_a_client_that_dies(
    world: World, service: MakeService, number: signal.Signals
) -> None:
    """(B-11, B-13)"""
    handle = service(pods=world.backends[:1])
    with world.p1.udp_loop(handle.ipv4, 53, sockets=20, connected=True, interval_s=0.01) as loop:
        loop.wait_for(lambda one: one.good >= 20, timeout_s=30, what="every socket has been used")
        assert len(of_service(world.kernel, handle)) == 20
        loop.signal(number)
        wait_until(lambda: not loop.alive, what="the client is dead")
        wait_until(lambda: not of_service(world.kernel, handle), what="its sockets are forgotten")


def test_many_short_conversations_leave_nothing(world: World, service: MakeService) -> None:
    """Twice as many sockets as the map has room for, one after another (B-13)."""
    handle = service(pods=world.backends[:1])
    with world.kernel.maps() as maps:
        room = maps["udp_conn"].max_entries
    code = f"""
import socket
for number in range({2 * room}):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect(({handle.ipv4!r}, 53))
        sock.send(b"x")
"""
    full = world.kernel.stats()["udp_conn_full"]
    world.p1.python(code)
    assert of_service(world.kernel, handle) == {}
    assert world.kernel.stats()["udp_conn_full"] == full


def test_a_full_index_costs_no_connection(world: World, service: MakeService) -> None:
    """More live sockets than the map has room for: all are served, the count says so (B-11)."""
    handle = service(pods=world.backends[:1])
    with world.kernel.maps() as maps:
        room = maps["udp_conn"].max_entries
    code = f"""
import resource, socket
resource.setrlimit(resource.RLIMIT_NOFILE, (2 * {room}, 2 * {room}))
held = []
for number in range({room} + 50):
    held.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    held[-1].connect(({handle.ipv4!r}, 53))
held[-1].settimeout(3)
held[-1].send(b"x")
assert held[-1].recvfrom(2000)[1] == ({handle.ipv4!r}, 53)
assert held[-1].getpeername() == ({handle.ipv4!r}, 53)
"""
    full = world.kernel.stats()["udp_conn_full"]
    world.p1.python(code)
    assert world.kernel.stats()["udp_conn_full"] >= full + 50
    assert of_service(world.kernel, handle) == {}
