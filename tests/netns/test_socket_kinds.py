# SPDX-License-Identifier: Apache-2.0
"""Every kind of socket that dials a Service lands on a backend and hears from the Service.

And a socket that dials none is left alone, whatever else it has in common with one that does.
What getpeername() of a TCP socket shows is an option, so all of this is done twice.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator
from typing import Literal

import pytest

from ebpflb.lab import Namespace, Pod
from ebpflb.lab.client import IPPROTO_MPTCP
from ebpflb.model import Protocol
from tests.netns.sockets import (
    Form,
    ask,
    connect_to,
    disconnect,
    greeting,
    peer,
    send_to,
    sockaddr,
)
from tests.netns.world import TCP_PORT, UDP_PORT, Handle, MakeService, OpenSocket, World, served

TCP = socket.SOCK_STREAM
UDP = socket.SOCK_DGRAM


@pytest.fixture(
    scope="module", params=[False, True], ids=["as it is by default", "with --tcp-peer-name"]
)
def world(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The shared cluster, and one more whose TCP sockets show the Service."""
    if not request.param:
        yield world
        return
    with served(tmp_path_factory.mktemp("peer-name"), tcp_peer_name=True) as other:
        yield other


@pytest.fixture(scope="module")
def web(world: World) -> Iterator[Handle]:
    """A Service of two backends: TCP 80 and UDP 53 lead to port 8080."""
    (handle,) = world.services(world.spec(pods=world.backends[:2]))
    yield handle
    world.agent.manifests.remove(handle.name)


@pytest.fixture(scope="module")
def other(world: World) -> Iterator[Handle]:
    """Another Service, of another backend."""
    (handle,) = world.services(world.spec(pods=world.backends[2:3]))
    yield handle
    world.agent.manifests.remove(handle.name)


@pytest.fixture(params=["p1", "n1"], ids=["from a pod", "from the node itself"])
def client(request: pytest.FixtureRequest, world: World) -> Namespace:
    return world.p1 if request.param == "p1" else world.node


# --- all that dial ------------------------------------------------------------------------------


def test_tcp_lands_on_a_backend(world: World, web: Handle, client: Namespace, form: Form) -> None:
    outcome = client.tcp(form.host(web), 80, count=6)
    assert outcome.failed == 0, outcome
    assert outcome.backends.keys() <= {"be1", "be2"}
    assert outcome.peernames == world.tcp_peernames(form, web, outcome)
    assert outcome.first["local"].rpartition(":")[2] == str(TCP_PORT)


def test_connected_udp_keeps_its_backend_and_shows_the_service(
    web: Handle, client: Namespace, form: Form
) -> None:
    outcome = client.udp(form.host(web), 53, count=6, connected=True)
    assert outcome.failed == 0, outcome
    assert len(outcome.backends) == 1
    assert outcome.peernames == outcome.sources == {form.spelt(web, 53): 6}


def test_unconnected_udp_keeps_its_backend_and_hears_from_the_service(
    web: Handle, client: Namespace, form: Form
) -> None:
    """The port is restored too, though it is not the backend's (B-125)."""
    assert UDP_PORT != 53
    outcome = client.udp(form.host(web), 53, count=6)
    assert outcome.failed == 0, outcome
    assert len(outcome.backends) == 1
    assert outcome.sources == {form.spelt(web, 53): 6}
    assert outcome.first["local"].rpartition(":")[2] == str(UDP_PORT)


def test_one_number_by_tcp_and_by_udp_is_two_ports(
    world: World, service: MakeService, form: Form
) -> None:
    """PORT-02: also with different targets."""
    handle = service(pods=world.backends[:1], tcp={80: TCP_PORT}, udp={80: 9001})
    assert world.p1.tcp(form.host(handle), 80).first["local"].endswith(f":{TCP_PORT}")
    assert world.p1.udp(form.host(handle), 80).first["local"].endswith(":9001")


@pytest.mark.parametrize("how", ["connect", "sendto"])
def test_tcp_fast_open_carries_data_in_the_syn_to_a_backend(
    world: World, other: Handle, form: Form, how: Literal["connect", "sendto"]
) -> None:
    """The cookie is the backend's: the first connect asks for it, the second one uses it."""
    outcome = world.p1.tcp(form.host(other), 80, count=3, fastopen=how)
    assert outcome.failed == 0, outcome
    assert outcome.syn_data >= 2
    assert outcome.peernames == world.tcp_peernames(form, other, outcome)


def test_multipath_tcp_is_served_but_shows_the_backend(
    world: World, web: Handle, form: Form
) -> None:
    """The hook at connect() sees a subflow; getpeername() is asked of another socket (C1)."""
    outcome = world.p1.tcp(form.host(web), 80, count=4, mptcp=True)
    assert outcome.failed == 0, outcome
    backends = {form.spelt(pod, TCP_PORT) for pod in world.backends[:2]}
    assert outcome.peernames.keys() <= backends


@pytest.mark.parametrize("mapped", [False, True], ids=["IPv4", "IPv4 on an IPv6 socket"])
def test_connect_through_io_uring(world: World, web: Handle, mapped: bool) -> None:
    outcome = world.p1.uring(web.ipv4, 80, mapped=mapped)
    if "UNSUPPORTED" in outcome.errors:
        pytest.skip(f"kernel lacks io_uring: {outcome.first_errors}")
    assert outcome.failed == 0, outcome
    form = Form.MAPPED if mapped else Form.V4
    assert outcome.peernames == world.tcp_peernames(form, web, outcome)


def test_a_bound_source_address_and_port_stay(world: World, web: Handle, form: Form) -> None:
    source = form.host(world.p1)
    kept = world.p1.tcp(form.host(web), 80, source=source, source_port=21_000, reset=True, count=3)
    assert kept.failed == 0, kept
    assert kept.seen_as == {form.host(world.p1).removeprefix("::ffff:"): 3}
    assert kept.first["peer"].rpartition(":")[2] == "21000"
    assert kept.peernames == world.tcp_peernames(form, web, kept)


def test_a_socket_bound_to_a_device_is_served(world: World, web: Handle, form: Form) -> None:
    by_tcp = world.p1.tcp(form.host(web), 80, device="eth0", count=3)
    by_udp = world.p1.udp(form.host(web), 53, device="eth0", count=3)
    assert (by_tcp.failed, by_udp.failed) == (0, 0), (by_tcp, by_udp)
    assert by_tcp.peernames == world.tcp_peernames(form, web, by_tcp)
    assert by_udp.sources == {form.spelt(web, 53): 3}


def test_clients_that_share_a_port_by_reuseport(world: World, web: Handle, form: Form) -> None:
    by_tcp = world.p1.tcp(form.host(web), 80, reuseport=True, source_port=22_000, reset=True)
    by_udp = world.p1.udp(form.host(web), 53, reuseport=True, source_port=22_000, count=4)
    assert (by_tcp.failed, by_udp.failed) == (0, 0), (by_tcp, by_udp)
    assert by_udp.sources == {form.spelt(web, 53): 4}


def test_servers_that_share_a_port_by_reuseport(
    world: World, service: MakeService, open_socket: OpenSocket
) -> None:
    """The kernel shares connections out among the listeners of the one backend as ever."""
    backend = world.backends[3]
    handle = service(pods=[backend], tcp={80: 7070})
    listeners = [open_socket(backend, Form.V4, TCP) for _ in range(2)]
    for listener in listeners:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("", 7070))
        listener.listen(64)
    for _ in range(40):
        open_socket(world.p1, Form.V4, TCP).connect((handle.ipv4, 80))
    for listener in listeners:
        assert select.select([listener], [], [], 0)[0], "one listener got nothing"


def answers_as_a_backend(world: World, sock: socket.socket, form: Form, handle: Handle) -> None:
    """It is one of the Service's, and the socket shows whom it should."""
    name = greeting(sock)["name"]
    (backend,) = (pod for pod in world.backends if pod.name == name)
    assert backend.ipv4 in {one.ipv4 for one in handle.spec.endpoints}
    assert peer(sock) == world.tcp_peer(form, handle, backend)


def test_a_connect_that_does_not_block(
    world: World, web: Handle, form: Form, open_socket: OpenSocket
) -> None:
    sock = open_socket(world.p1, form, TCP)
    sock.setblocking(False)
    code = sock.connect_ex((form.host(web), 80))
    assert code in {0, errno.EINPROGRESS}, errno.errorcode[code]
    assert select.select([], [sock], [], 3.0)[1]
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
    sock.settimeout(3.0)
    answers_as_a_backend(world, sock, form, web)


def test_connecting_again_to_the_same_is_what_it_was(
    world: World, web: Handle, form: Form, open_socket: OpenSocket
) -> None:
    """TCP says that it is connected already; UDP chooses anew and goes on."""
    tcp = open_socket(world.p1, form, TCP)
    address = sockaddr(form.family, form.host(web), 80)
    connect_to(tcp, address)
    with pytest.raises(OSError, match=os.strerror(errno.EISCONN)):
        connect_to(tcp, address)
    answers_as_a_backend(world, tcp, form, web)

    udp = open_socket(world.p1, form)
    for _ in range(2):
        udp.connect((form.host(web), 53))
        assert peer(udp) == (form.host(web), 53)
        assert ask(udp)[1] == (form.host(web), 53)


def test_the_programs_memory_is_left_alone(
    world: World, web: Handle, form: Form, open_socket: OpenSocket
) -> None:
    """A reconnect from the same memory must find the Service there, not a backend (B-123)."""
    for kind, port in ((TCP, 80), (UDP, 53)):
        address = sockaddr(form.family, form.host(web), port)
        before = address.raw
        for _ in range(2):
            sock = open_socket(world.p1, form, kind)
            connect_to(sock, address)
            assert address.raw == before
    address = sockaddr(form.family, form.host(web), 53)
    sock = open_socket(world.p1, form)
    for _ in range(2):
        send_to(sock, b"who", address)
        assert sock.recvfrom(2000)[1][:2] == (form.host(web), 53)
    assert address.raw == sockaddr(form.family, form.host(web), 53).raw


# --- one socket, one peer after another ---------------------------------------------------------


def test_one_udp_socket_connects_from_one_peer_to_the_next(
    world: World, web: Handle, other: Handle, form: Form, open_socket: OpenSocket
) -> None:
    """Each time it shows whom it dialled last: a Service, another one, a pod, and back."""
    pod = world.backends[3]
    sock = open_socket(world.p1, form)
    for place, port, answers in (
        (web, 53, {"be1", "be2"}),
        (other, 53, {"be3"}),
        (pod, UDP_PORT, {"be4"}),
        (web, 53, {"be1", "be2"}),
        (other, 53, {"be3"}),
    ):
        sock.connect((form.host(place), port))
        assert peer(sock) == (form.host(place), port)
        name, source = ask(sock)
        assert name in answers
        assert source == (form.host(place), port)


def test_a_socket_that_then_connects_to_the_backend_itself_shows_the_backend(
    world: World, other: Handle, form: Form, open_socket: OpenSocket
) -> None:
    backend = world.backends[2]
    sock = open_socket(world.p1, form)
    sock.connect((form.host(other), 53))
    sock.connect((form.host(backend), UDP_PORT))
    assert peer(sock) == (form.host(backend), UDP_PORT)
    assert ask(sock) == ("be3", (form.host(backend), UDP_PORT))


def test_a_disconnected_socket_has_no_peer_and_dials_anew(
    world: World, web: Handle, other: Handle, form: Form, open_socket: OpenSocket
) -> None:
    """AF_UNSPEC runs no hook; whatever comes next finds no trace of the Service (C2)."""
    backend = world.backends[2]
    sock = open_socket(world.p1, form)
    sock.connect((form.host(other), 53))
    disconnect(sock)
    assert peer(sock) == "ENOTCONN"
    sock.connect((form.host(web), 53))
    assert peer(sock) == (form.host(web), 53)

    sock.connect((form.host(other), 53))
    disconnect(sock)
    assert ask(sock, (form.host(other), 53)) == ("be3", (form.host(other), 53))

    sock.connect((form.host(other), 53))
    disconnect(sock)
    sock.connect((form.host(backend), UDP_PORT))
    assert peer(sock) == (form.host(backend), UDP_PORT)


def test_a_disconnected_socket_that_sends_to_the_backend_itself_hears_from_the_backend(
    world: World, other: Handle, form: Form, open_socket: OpenSocket
) -> None:
    """The record of the Service goes when its backend is dialled by its own address (C2)."""
    backend = (form.host(world.backends[2]), UDP_PORT)
    sock = open_socket(world.p1, form)
    sock.connect((form.host(other), 53))
    disconnect(sock)
    assert ask(sock, backend) == ("be3", backend)


def test_a_tcp_socket_is_disconnected_and_dials_another_service(
    world: World, web: Handle, other: Handle, form: Form, open_socket: OpenSocket
) -> None:
    sock = open_socket(world.p1, form, TCP)
    sock.connect((form.host(web), 80))
    answers_as_a_backend(world, sock, form, web)
    disconnect(sock)
    assert peer(sock) == "ENOTCONN"
    sock.connect((form.host(other), 80))
    answers_as_a_backend(world, sock, form, other)
    disconnect(sock)
    sock.connect((form.host(world.backends[3]), TCP_PORT))
    assert peer(sock) == (form.host(world.backends[3]), TCP_PORT)


# --- what is no Service's -----------------------------------------------------------------------


def test_a_pod_that_is_dialled_directly_is_reached_and_shown(
    world: World, web: Handle, form: Form
) -> None:
    """A backend of a Service too: only who dials the Service is given it."""
    before = world.kernel.stats()["translated"]
    pod: Pod = world.backends[0]
    by_tcp = world.p1.tcp(form.host(pod), TCP_PORT, count=3)
    by_udp = world.p1.udp(form.host(pod), UDP_PORT, count=3)
    connected = world.p1.udp(form.host(pod), UDP_PORT, count=3, connected=True)
    assert by_tcp.peernames == {form.spelt(pod, TCP_PORT): 3}
    assert by_udp.sources == {form.spelt(pod, UDP_PORT): 3}
    assert connected.peernames == {form.spelt(pod, UDP_PORT): 3}
    assert {*by_tcp.backends, *by_udp.backends, *connected.backends} == {"be1"}
    assert world.kernel.stats()["translated"] == before


@pytest.mark.parametrize(
    ("kind", "port"),
    [
        pytest.param(TCP, 81, id="a port that the Service does not have"),
        pytest.param(TCP, 53, id="its UDP port by TCP"),
        pytest.param(UDP, 80, id="its TCP port by UDP"),
        pytest.param(TCP, 0, id="port 0"),
    ],
)
def test_what_the_service_does_not_serve_is_left_to_the_network(
    world: World,
    web: Handle,
    form: Form,
    *,
    kind: socket.SocketKind,
    port: int,
    open_socket: OpenSocket,
) -> None:
    """The lab's network has no way to a Service's address, and that is the answer."""
    before = world.kernel.stats()
    sock = open_socket(world.node, form, kind)
    if kind == TCP:
        code = sock.connect_ex((form.host(web), port))
        assert code == errno.ENETUNREACH, errno.errorcode[code]
    else:
        with pytest.raises(OSError, match=os.strerror(errno.ENETUNREACH)):
            sock.sendto(b"who", (form.host(web), port))
        pods = open_socket(world.p1, form, kind)  # which has a default route
        pods.connect((form.host(web), port))
        assert peer(pods) == (form.host(web), port)
    assert world.kernel.stats() == before


def test_a_raw_and_a_local_socket_meet_no_hook(world: World, web: Handle) -> None:
    """What has no ports is not ours; the programs are asked and let it pass."""
    before = world.kernel.stats()
    assert world.p1.ping(world.backends[0].ipv4).failed == 0
    assert world.p1.ping(world.backends[0].ipv6).failed == 0
    assert world.kernel.stats() == before


def test_a_multipath_connection_counts_once(
    world: World, other: Handle, open_socket: OpenSocket
) -> None:
    before = other.connections(Protocol.TCP, 80)
    sock = open_socket(world.p1, Form.V4, TCP, IPPROTO_MPTCP)
    sock.connect((other.ipv4, 80))
    assert greeting(sock)["name"] == "be3"
    assert other.connections(Protocol.TCP, 80) == before + 1
