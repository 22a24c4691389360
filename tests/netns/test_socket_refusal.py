# SPDX-License-Identifier: Apache-2.0
"""A Service without an endpoint refuses, as a REJECT on the way would (NOEP-01, NOEP-10, K14).

All of it twice: as programs do it that may choose connect()'s error, and as on older kernels. And
what another program on the way to a socket has refused already stays refused.
"""

from __future__ import annotations

import errno
import select
import socket
from collections.abc import Iterator

import msgspec
import pytest

from ebpflb.lab import Namespace
from ebpflb.model import Protocol
from tests.netns import foreign
from tests.netns.agents import OLD_KERNEL
from tests.netns.services import ready, terminating, unready
from tests.netns.sockets import Form, ask, connect_to, disconnect, greeting, peer, sockaddr
from tests.netns.world import Handle, MakeService, OpenSocket, World, served

TCP = socket.SOCK_STREAM


@pytest.fixture(scope="module", params=["new", "old"], ids=["this kernel", "as before Linux 5.18"])
def world(
    request: pytest.FixtureRequest, world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The shared cluster, and one more whose programs cannot choose an error."""
    if request.param == "new":
        yield world
        return
    with served(tmp_path_factory.mktemp("old"), command=OLD_KERNEL) as old:
        yield old


@pytest.fixture(scope="module")
def empty(world: World) -> Iterator[Handle]:
    """A Service that never has an endpoint."""
    (handle,) = world.services(world.spec())
    yield handle
    world.agent.manifests.remove(handle.name)


@pytest.fixture(scope="module")
def full(world: World) -> Iterator[Handle]:
    """A Service of one backend."""
    (handle,) = world.services(world.spec(pods=world.backends[:1]))
    yield handle
    world.agent.manifests.remove(handle.name)


@pytest.fixture(params=["p1", "n1"], ids=["from a pod", "from the node itself"])
def client(request: pytest.FixtureRequest, world: World) -> Namespace:
    return world.p1 if request.param == "p1" else world.node


def refused_and_translated(world: World) -> tuple[int, int]:
    stats = world.kernel.stats()
    return stats["refused"], stats["translated"]


# --- TCP ----------------------------------------------------------------------------------------


def test_tcp_is_refused_at_once(world: World, client: Namespace, empty: Handle, form: Form) -> None:
    refused, translated = refused_and_translated(world)
    outcome = client.tcp(form.host(empty), 80, count=5)
    assert outcome.errors == {"ECONNREFUSED": 5}, outcome
    assert refused_and_translated(world) == (refused + 5, translated)
    assert empty.connections(Protocol.TCP, 80, form) == 0


def test_a_connect_that_does_not_block_is_refused(
    world: World, empty: Handle, form: Form, open_socket: OpenSocket
) -> None:
    sock = open_socket(world.p1, form, TCP)
    sock.setblocking(False)
    code = sock.connect_ex((form.host(empty), 80))
    if code == errno.EINPROGRESS:
        assert select.select([], [sock], [], 3.0)[1]
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    assert code == errno.ECONNREFUSED
    assert peer(sock) == "ENOTCONN"


def test_the_refused_socket_connects_once_there_is_an_endpoint(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    handle = service(endpoints=unready(world.backends[0]))
    sock = open_socket(world.p1, form, TCP)
    address = sockaddr(form.family, form.host(handle), 80)
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            connect_to(sock, address)
    handle.set(endpoints=ready(world.backends[0]))
    connect_to(sock, address)
    assert greeting(sock)["name"] == "be1"


def test_a_bound_socket_is_refused_too(world: World, empty: Handle, form: Form) -> None:
    outcome = world.p1.tcp(form.host(empty), 80, source=form.host(world.p1), count=2)
    assert outcome.errors == {"ECONNREFUSED": 2}, outcome


def test_fast_open_is_refused(world: World, empty: Handle, form: Form) -> None:
    assert world.p1.tcp(form.host(empty), 80, fastopen="sendto").errors == {"ECONNREFUSED": 1}
    assert world.p1.tcp(form.host(empty), 80, fastopen="connect").errors == {"ECONNREFUSED": 1}


def test_multipath_tcp_is_refused(world: World, empty: Handle) -> None:
    assert world.p1.tcp(empty.ipv4, 80, mptcp=True).errors == {"ECONNREFUSED": 1}


def test_a_socket_on_a_device_is_refused_where_the_kernel_lets_us(
    world: World, empty: Handle, request: pytest.FixtureRequest
) -> None:
    """An older kernel's way leads over the loopback, which this socket cannot take: it waits."""
    old = "as before" in request.node.name
    outcome = world.p1.tcp(empty.ipv4, 80, device="eth0", timeout_s=0.3 if old else 3.0)
    assert outcome.errors == {"TIMEOUT" if old else "ECONNREFUSED": 1}, outcome


def test_endpoints_come_and_go_and_connections_follow(
    world: World, service: MakeService, form: Form
) -> None:
    """NOEP-08, NOEP-15, TOP-03: unready is none; going but serving is better than none."""
    pod = world.backends[0]
    handle = service()
    for endpoints, good in (
        (ready(pod), True),
        (unready(pod), False),
        (terminating(pod), True),
        ((), False),
        (ready(pod), True),
    ):
        handle.set(endpoints=endpoints)
        outcome = world.p1.tcp(form.host(handle), 80, count=3)
        assert outcome.good == (3 if good else 0), outcome
        assert outcome.errors == ({} if good else {"ECONNREFUSED": 3})


def test_endpoints_that_the_policy_does_not_allow_are_no_endpoints(
    world: World, service: MakeService, form: Form
) -> None:
    """NOEP-04, B-73: refused and counted apart, until packets can be dropped."""
    (there,) = ready(world.backends[0])
    there = msgspec.structs.replace(there, node="n2")
    handle = service(endpoints=(there,), local=True)
    before = world.kernel.stats()
    assert world.p1.tcp(form.host(handle), 80, count=2).errors == {"ECONNREFUSED": 2}
    after = world.kernel.stats()
    assert after["refused_policy"] == before["refused_policy"] + 2
    assert after["refused"] == before["refused"]


# --- UDP ----------------------------------------------------------------------------------------


def test_udp_connects_and_learns_it_on_the_next_call(
    client: Namespace, empty: Handle, form: Form, open_socket: OpenSocket
) -> None:
    """connect() and the first send() succeed; the socket shows the Service all the while."""
    sock = open_socket(client, form)
    sock.connect((form.host(empty), 53))
    assert peer(sock) == (form.host(empty), 53)
    sock.send(b"first")
    with pytest.raises(ConnectionRefusedError):
        sock.recv(100)
    sock.send(b"second")
    with pytest.raises(ConnectionRefusedError):
        sock.send(b"third")
    assert peer(sock) == (form.host(empty), 53)
    assert empty.connections(Protocol.UDP, 53, form) == 0


def test_a_refused_udp_socket_is_disconnected_and_connects_again(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    handle = service()
    sock = open_socket(world.p1, form)
    sock.connect((form.host(handle), 53))
    sock.send(b"first")
    with pytest.raises(ConnectionRefusedError):
        sock.recv(100)
    disconnect(sock)  # so that it is none of those that are told of the endpoint (CT-09)
    handle.set(endpoints=ready(world.backends[0]))
    sock.connect((form.host(handle), 53))
    assert ask(sock) == ("be1", (form.host(handle), 53))


@pytest.mark.xfail(reason="a refused socket has the loopback's address, which it keeps until then")
def test_a_refused_udp_socket_connects_elsewhere_as_it_is(
    world: World, empty: Handle, full: Handle, form: Form, *, open_socket: OpenSocket
) -> None:
    sock = open_socket(world.p1, form)
    sock.settimeout(0.2)
    sock.connect((form.host(empty), 53))
    sock.connect((form.host(full), 53))
    assert ask(sock) == ("be1", (form.host(full), 53))


def test_an_unconnected_datagram_is_sent_and_answered_by_nobody(
    client: Namespace, empty: Handle, form: Form, open_socket: OpenSocket
) -> None:
    """NOEP-10; with IP_RECVERR the socket hears the refusal, as it would of an ICMP message."""
    sock = open_socket(client, form)
    for _ in range(3):
        assert sock.sendto(b"who", (form.host(empty), 53)) == 3
    sock.setsockopt(socket.IPPROTO_IP, 11, 1)  # IP_RECVERR
    if form is not Form.V4:
        sock.setsockopt(socket.IPPROTO_IPV6, 25, 1)  # IPV6_RECVERR
    sock.sendto(b"who", (form.host(empty), 53))
    with pytest.raises(ConnectionRefusedError):
        sock.recv(100)


def test_the_same_unconnected_socket_is_served_once_there_is_an_endpoint(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """CT-09"""
    handle = service()
    sock = open_socket(world.p1, form)
    sock.sendto(b"who", (form.host(handle), 53))
    handle.set(endpoints=ready(world.backends[0]))
    assert ask(sock, (form.host(handle), 53)) == ("be1", (form.host(handle), 53))


def test_a_flow_ends_when_the_last_endpoint_goes(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """B-03: an unconnected sender stops at once; nothing reaches the pod that is gone."""
    handle = service(pods=world.backends[:1])
    sock = open_socket(world.p1, form)
    assert ask(sock, (form.host(handle), 53))[0] == "be1"
    handle.set(endpoints=())
    received = world.servers["be1"].stats()["udp_received"]
    for _ in range(3):
        sock.sendto(b"who", (form.host(handle), 53))
    assert world.servers["be1"].stats()["udp_received"] == received


# --- other programs on the way ------------------------------------------------------------------

REFUSALS = pytest.mark.parametrize(
    ("instructions", "code"),
    [
        pytest.param(foreign.REFUSE, errno.EPERM, id="refused"),
        pytest.param(foreign.REFUSE_WITH_EACCES, errno.EACCES, id="refused with an error"),
    ],
)


@REFUSALS
@pytest.mark.parametrize("kind", [TCP, socket.SOCK_DGRAM], ids=["TCP", "UDP"])
def test_what_a_program_on_the_pod_refused_stays_refused(
    world: World,
    empty: Handle,
    full: Handle,
    open_socket: OpenSocket,
    *,
    kind: socket.SocketKind,
    instructions: bytes,
    code: int,
    request: pytest.FixtureRequest,
) -> None:
    """Its program runs before ours, which leaves error and state as they are (K14)."""
    old = "as before" in request.node.name
    with foreign.attached(instructions, world.p1.cgroup):
        before = world.kernel.stats()
        for handle in (full, empty):
            sock = open_socket(world.p1, Form.V4, kind)
            assert sock.connect_ex((handle.ipv4, 80 if kind == TCP else 53)) == code
        if not old:  # there a program cannot ask what the others have said
            assert world.kernel.stats() == before
            assert world.kernel.udp_connections() == {}
    assert world.p1.tcp(full.ipv4, 80).good == 1


@REFUSALS
def test_what_a_program_above_us_refuses_is_refused(
    world: World, full: Handle, instructions: bytes, code: int
) -> None:
    """It runs after ours and sees the backend; its word is the last one."""
    with foreign.attached(instructions, world.lab.cgroup):
        outcome = world.p1.tcp(full.ipv4, 80, count=2)
        assert outcome.errors == {errno.errorcode[code]: 2}, outcome
    assert world.p1.tcp(full.ipv4, 80).good == 1


@pytest.mark.parametrize("flags", [foreign.ALONE, foreign.OVERRIDABLE, foreign.BESIDE_OTHERS])
def test_a_program_on_a_pods_cgroup_does_not_keep_ours_away(
    world: World, full: Handle, flags: int
) -> None:
    """Whatever its flags: ours above it runs as well (K22)."""
    with foreign.attached(foreign.ALLOW, world.p1.cgroup, flags=flags):
        assert world.p1.tcp(full.ipv4, 80, count=3).backends == {"be1": 3}
