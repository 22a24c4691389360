# SPDX-License-Identifier: Apache-2.0
"""Connected UDP sockets whose backend no longer serves are cut off; all others are let be.

No program sees what a connected socket sends. What tells it is the error of its next call, upon
which applications connect anew. Rows of the specification are named as CT-…, TV-C….
"""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from ebpflb.datapath.ebpf import sockdiag
from ebpflb.datapath.ebpf.stale import KernelIndex, Walker
from ebpflb.lab import Lab, Namespace, Node
from ebpflb.model import Family, Protocol
from tests.builders import cluster_ip
from tests.netns.agents import Agent, wait_until
from tests.netns.services import Endpoint, Manifests, Spec, ready, terminating, unready
from tests.netns.sockets import Form, SocketMaker, ask, cookie, peer
from tests.netns.world import UDP_PORT, Handle, MakeService, MakeServices, OpenSocket, World

CUT = "cut UDP sockets whose backend does not serve"


def is_cut(sock: socket.socket) -> bool:
    return peer(sock) == "ENOTCONN"


def wait_for_cut(*sockets: socket.socket) -> None:
    wait_until(lambda: all(map(is_cut, sockets)), what="the sockets are cut")


def number_cut(agent: Agent, since: int) -> int:
    """How many sockets the agent says that it has cut since a mark of its log."""
    return sum(entry["sockets"] for entry in agent.log(CUT, since=since))


def error_of(call: Callable[[], object]) -> str:
    """The name of the error that a call ends with, "" where it ends well."""
    try:
        call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


def connected(
    open_socket: OpenSocket, place: Namespace, form: Form, handle: Handle
) -> socket.socket:
    sock = open_socket(place, form)
    sock.connect((form.host(handle), 53))
    return sock


def remote(*addresses: tuple[str, str]) -> tuple[Endpoint, ...]:
    """Ready, on another node."""
    return tuple(Endpoint(ipv4, ipv6, "elsewhere") for ipv4, ipv6 in addresses)


@pytest.fixture
def all_seen(world: World, service: MakeService, open_socket: OpenSocket) -> Callable[[], int]:
    """Waits until all that has changed so far has been looked at: a socket of its own is cut.

    Returns how many others were cut since the test began.
    """
    canary = service(pods=world.backends[:1], tcp={})
    since = world.agent.mark
    mine = 0

    def wait() -> int:
        nonlocal mine
        canary.set(endpoints=ready(world.backends[0]))
        sock = connected(open_socket, world.p2, Form.V4, canary)
        canary.set(endpoints=())
        mine += 1
        wait_for_cut(sock)
        said = f"{canary.spec.name}:udp-53: 1"
        wait_until(
            lambda: (
                sum(said in one["services"] for one in world.agent.log(CUT, since=since)) == mine
            ),
            what="the agent tells of the canary",
        )
        return number_cut(world.agent, since) - mine

    return wait


# --- whose backend leaves -------------------------------------------------------------------------


def test_only_those_are_cut_whose_backend_has_left(
    world: World,
    service: MakeService,
    form: Form,
    open_socket: OpenSocket,
    all_seen: Callable[[], int],
) -> None:
    """CT-02, CT-03, CT-07, TV-C01, TV-C02, B-09: from three backends to two."""
    handle = service(pods=world.backends[:3])
    sockets = [connected(open_socket, world.p1, form, handle) for _ in range(30)]
    where = [ask(sock)[0] for sock in sockets]
    assert set(where) == {"be1", "be2", "be3"}
    received = world.servers["be1"].stats()["udp_received"]

    handle.set(endpoints=ready(*world.backends[1:3]))
    leave = [sock for sock, name in zip(sockets, where, strict=True) if name == "be1"]
    wait_for_cut(*leave)
    assert all_seen() == len(leave)

    for sock, name in zip(sockets, where, strict=True):
        if name != "be1":
            assert ask(sock) == (name, (form.host(handle), 53))
            continue
        # What the application sees; it is the same however long it waits (K19).
        assert error_of(partial(sock.send, b"x")) == "EDESTADDRREQ"
        assert error_of(partial(sock.recv, 9)) == "ECONNABORTED"
        assert error_of(partial(sock.send, b"x")) == "EDESTADDRREQ"
        sock.connect((form.host(handle), 53))
        assert ask(sock)[0] in {"be2", "be3"}
    assert world.servers["be1"].stats()["udp_received"] == received
    assert all_seen() == len(leave), "what has connected anew was cut again"


def test_a_reader_that_waits_is_told_at_once(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    """It need not send anything to learn of it (B-09)."""
    handle = service(pods=world.backends[:1])
    sock = connected(open_socket, world.p1, form, handle)
    sock.settimeout(30)
    handle.set(endpoints=ready(world.backends[1]))
    assert error_of(partial(sock.recv, 9)) == "ECONNABORTED"
    sock.connect((form.host(handle), 53))
    assert ask(sock)[0] == "be2"


def test_nobody_is_left_that_serves(
    world: World,
    service: MakeService,
    form: Form,
    open_socket: OpenSocket,
    all_seen: Callable[[], int],
) -> None:
    """B-03. Deviates from CT-05 and TV-C09: kube-proxy keeps such flows."""
    handle = service(pods=world.backends[:2])
    sockets = [connected(open_socket, world.p1, form, handle) for _ in range(5)]
    handle.set(endpoints=unready(*world.backends[:2]))
    wait_for_cut(*sockets)
    assert all_seen() == 5
    assert error_of(partial(sockets[0].recv, 9)) == "ECONNABORTED"
    sockets[0].connect((form.host(handle), 53))
    sockets[0].send(b"x")
    assert error_of(partial(sockets[0].recv, 9)) == "ECONNREFUSED"


def test_its_service_is_deleted(
    world: World,
    services: MakeServices,
    form: Form,
    open_socket: OpenSocket,
    all_seen: Callable[[], int],
) -> None:
    """Deviates from kube-proxy, which knows nothing of it. Another Service's are let be."""
    gone, stays = services(2, pods=world.backends[:1])
    cut = [connected(open_socket, world.p1, form, gone) for _ in range(3)]
    kept = [connected(open_socket, world.p1, form, stays) for _ in range(3)]
    world.agent.manifests.remove(gone.name)
    world.agent.settle()
    wait_for_cut(*cut)
    assert all_seen() == 3
    assert {ask(sock)[0] for sock in kept} == {"be1"}


def test_one_port_of_a_service_goes(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket, all_seen: Any
) -> None:
    """TV-C04: the other one's flows, to the same backend and address, stay."""
    handle = service(pods=world.backends[:1], udp={53: UDP_PORT, 54: UDP_PORT})
    cut = connected(open_socket, world.p1, form, handle)
    kept = open_socket(world.p1, form)
    kept.connect((form.host(handle), 54))
    handle.set(udp={54: UDP_PORT})
    wait_for_cut(cut)
    assert all_seen() == 1
    assert ask(kept)[0] == "be1"


def test_by_whichever_address_of_the_service_it_went(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket, all_seen: Any
) -> None:
    """CT-02, TV-C01, TV-C06: ClusterIP, external and load balancer's addresses, NodePort."""
    handle = service(pods=world.backends[:1], tcp={}, balanced=True, external=True)
    mapped = "::ffff:" if form is Form.MAPPED else ""
    outside = [
        (mapped + address, 53)
        for address in (*handle.spec.external_ips, *handle.spec.ingress_ips)
        if (":" in address) == (form is Form.V6)
    ]
    node_port = (form.host(world.node), handle.spec.node_port)
    sockets = []
    for where in ((form.host(handle), 53), node_port, *outside):
        sockets.append(open_socket(world.p1, form))
        sockets[-1].connect(where)
        assert ask(sockets[-1]) == ("be1", where)
    handle.set(endpoints=ready(world.backends[1]))
    wait_for_cut(*sockets)
    assert all_seen() == len(sockets) == 4


# --- whose backend stays --------------------------------------------------------------------------


def test_a_terminating_backend_that_serves_keeps_its_sockets(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket, all_seen: Any
) -> None:
    """CT-07, TV-C07, and TV-C08 in the end."""
    going, stays = world.backends[:2]
    handle = service(pods=[going])
    sock = connected(open_socket, world.p1, form, handle)
    handle.set(endpoints=(*terminating(going), *ready(stays)))
    assert all_seen() == 0
    assert ask(sock) == ("be1", (form.host(handle), 53))
    handle.set(endpoints=(*unready(going), *ready(stays)))
    wait_for_cut(sock)


def test_a_policy_cuts_nothing(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket, all_seen: Any
) -> None:
    """CT-04: a serving backend of another node stays under internalTrafficPolicy Local."""
    far = remote((world.backends[0].ipv4, world.backends[0].ipv6))
    handle = service(endpoints=far)
    sock = connected(open_socket, world.p1, form, handle)
    handle.set(local=True)
    assert all_seen() == 0
    handle.set(endpoints=(*far, *ready(world.backends[1])))
    assert all_seen() == 0
    assert ask(sock) == ("be1", (form.host(handle), 53))


def test_sockets_that_went_through_no_service_are_let_be(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket, all_seen: Any
) -> None:
    """B-09: one that dialled the backend itself, and one that has left the Service since."""
    handle = service(pods=world.backends[:1])
    backend = (form.host(world.backends[0]), UDP_PORT)
    direct = open_socket(world.p1, form)
    direct.connect(backend)
    moved = connected(open_socket, world.p1, form, handle)
    moved.connect(backend)
    handle.set(endpoints=())
    assert all_seen() == 0
    assert {ask(sock)[0] for sock in (direct, moved)} == {"be1"}


def test_tcp_drains(world: World, service: MakeService, form: Form, all_seen: Any) -> None:
    """CT-06, TV-C05, BAL-03: also where the Service goes as a whole."""
    handle = service(pods=world.backends[:1])
    mapped = form is Form.MAPPED
    host = handle.ipv6 if form is Form.V6 else handle.ipv4
    with world.p1.hold_loop(host, 80, parallel=3, interval_s=0.01, mapped=mapped) as loop:
        loop.wait_for(lambda one: one.good > 10, timeout_s=30, what="they are open")
        handle.set(endpoints=())
        assert all_seen() == 0
        world.agent.manifests.remove(handle.name)
        world.agent.settle()
        assert all_seen() == 0
        good = loop.outcome().good
        loop.wait_for(lambda one: one.good > good + 10, timeout_s=30, what="they go on")
        assert loop.stop().failed == 0


# --- those who were refused (CT-09) ---------------------------------------------------------------


def test_who_was_refused_is_told_when_there_is_a_backend(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket, all_seen: Any
) -> None:
    """CT-09, TV-C03: from none to one. Before that, nothing is cut for nothing."""
    handle = service(endpoints=unready(world.backends[0]))
    sock = connected(open_socket, world.p1, form, handle)
    handle.set(endpoints=unready(*world.backends[:2]))
    assert all_seen() == 0
    handle.set(endpoints=ready(world.backends[0]))
    wait_for_cut(sock)
    assert all_seen() == 1
    with contextlib.suppress(ConnectionAbortedError):
        sock.recv(9)
    sock.connect((form.host(handle), 53))
    assert ask(sock) == ("be1", (form.host(handle), 53))


def test_who_was_refused_by_a_policy_is_told_when_that_allows_a_backend(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket, all_seen: Any
) -> None:
    """Until then it would be refused again, so it is not cut again and again."""
    far = remote((world.backends[0].ipv4, world.backends[0].ipv6))
    handle = service(endpoints=far, local=True)
    sock = connected(open_socket, world.p1, form, handle)
    handle.set(endpoints=(*far, *remote(("10.244.9.9", "fd44::9"))))
    assert all_seen() == 0
    assert all_seen() == 0
    handle.set(local=False)
    wait_for_cut(sock)


def test_who_is_kept_out_by_source_ranges_is_not_cut_again_and_again(
    world: World, service: MakeService, open_socket: OpenSocket, all_seen: Any
) -> None:
    """LB-06: whatever its backends do, a pod that dials anew is refused anew; till they open."""
    handle = service(
        pods=world.backends[:1], tcp={}, balanced=True, source_ranges=("192.0.2.0/24",)
    )
    sock = open_socket(world.p1, Form.V4)
    sock.connect((handle.spec.ingress_ips[0], 53))
    sock.send(b"x")
    assert error_of(partial(sock.recv, 9)) == "ECONNREFUSED"
    handle.set(endpoints=ready(*world.backends[:2]))
    assert all_seen() == 0
    assert not is_cut(sock)
    handle.set(source_ranges=())
    wait_for_cut(sock)


@pytest.mark.parametrize("client", ["p1", "node"])
def test_what_an_external_policy_refuses_is_refused_to_those_outside_alone(
    world: World, service: MakeService, open_socket: OpenSocket, all_seen: Any, client: str
) -> None:
    """POL-04 to -06: who is told that there is a backend will be given it."""
    handle = service(endpoints=(), tcp={}, external=True, external_local=True)
    address = handle.spec.external_ips[0]
    sock = open_socket(getattr(world, client), Form.V4)
    sock.connect((address, 53))
    far = remote((world.backends[0].ipv4, world.backends[0].ipv6))
    handle.set(endpoints=far)
    cut = all_seen()
    other = open_socket(getattr(world, client), Form.V4)
    other.connect((address, 53))
    assert (cut == 1) == (error_of(partial(ask, other)) == "")
    assert cut == is_cut(sock)


# --- unconnected sockets: nothing is cut, they move (CT-08, CT-09) --------------------------------


@pytest.mark.parametrize(
    ("client", "options"),
    [
        pytest.param("p1", {}, id="E-C02, E-C05"),
        pytest.param("p1", {"local": True}, id="internalTrafficPolicy Local, E-C03"),
        pytest.param("node", {}, id="a host's process, E-C04"),
        pytest.param("p1", {"node_port": True}, id="NodePort, E-C01"),
    ],
)
def test_a_client_that_keeps_sending_reaches_the_new_pod(
    world: World,
    service: MakeService,
    open_socket: OpenSocket,
    form: Form,
    *,
    client: str,
    options: Any,
) -> None:
    """CT-08, CT-09: the only pod goes, later another one comes; the client's port is the same."""
    handle = service(pods=world.backends[:1], tcp={}, **options)
    where = (form.host(handle), 53)
    if handle.spec.node_port:
        where = (form.host(world.node), handle.spec.node_port)
    sock = open_socket(getattr(world, client), form)
    assert ask(sock, where) == ("be1", where)
    source = sock.getsockname()
    received = world.servers["be1"].stats()["udp_received"]
    for gone in ((), unready(world.backends[1])):
        handle.set(endpoints=gone)
        sock.sendto(b"who", where)
    handle.set(endpoints=ready(world.backends[1]))
    assert ask(sock, where) == ("be2", where)
    assert sock.getsockname() == source
    assert world.servers["be1"].stats()["udp_received"] == received


# --- in every network namespace -------------------------------------------------------------------


class Unnamed:
    """A network namespace that only its processes hold; every address is its loopback's."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.name = "unnamed"

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        routes = "ip link set lo up; ip route add default dev lo; ip -6 route add default dev lo"
        shell = ["sh", "-ec", f'{routes}; exec "$@"', "sh", *map(str, command)]
        return self._node.popen(["unshare", "--net", *shell], **options)


@contextlib.contextmanager
def unnamed_maker(world: World) -> Iterator[SocketMaker]:
    maker = SocketMaker(cast("Namespace", Unnamed(world.node)))
    try:
        yield maker
    finally:
        maker.close()


def test_in_a_namespace_without_a_name(world: World, service: MakeService, form: Form) -> None:
    """It is found by its processes (K19)."""
    handle = service(pods=world.backends[:1])
    with (
        unnamed_maker(world) as maker,
        maker.make(form.family, socket.SOCK_DGRAM) as sock,
    ):
        sock.connect((form.host(handle), 53))
        handle.set(endpoints=())
        wait_for_cut(sock)


def test_in_the_hosts_namespace(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    handle = service(pods=world.backends[:1])
    sock = connected(open_socket, world.node, form, handle)
    handle.set(endpoints=())
    wait_for_cut(sock)


def test_what_no_process_of_a_namespace_holds_keeps_its_entry(
    world: World, service: MakeService, all_seen: Any
) -> None:
    """A socket that was handed on, of a pod that has gone: it is not found. That is said."""
    handle = service(pods=world.backends[:1])
    since = world.agent.mark
    with unnamed_maker(world) as maker:
        sock = maker.make(socket.AF_INET, socket.SOCK_DGRAM)
    with sock:
        sock.connect((handle.ipv4, 53))
        handle.set(endpoints=())
        assert all_seen() == 0
        said = [one for one in world.agent.log(since=since) if one["level"] == "warning"]
        assert [one["sockets"] for one in said] == [1]
        assert cookie(sock) in world.kernel.udp_connections()
        assert peer(sock) == (handle.ipv4, 53)


def test_a_kernel_that_tells_no_cookies_of_namespaces(
    world: World,
    services: MakeServices,
    form: Form,
    open_socket: OpenSocket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 5.14 each is entered. The agent is stopped: this process looks in its stead."""
    monkeypatch.setattr(sockdiag.SockDiag, "netns_cookie", lambda _self: None)
    gone, stays = services(2, pods=world.backends[:1])
    places = (world.p1, world.p2, world.node)
    cut = [connected(open_socket, place, form, gone) for place in places]
    kept = [connected(open_socket, place, form, stays) for place in places]
    deleted = world.kernel.id_of(gone.port_name(Protocol.UDP, 53, form))
    ids = {port.id for port in world.kernel.snapshot().ports} - {deleted}
    with world.agent.paused(), world.kernel.maps() as maps:
        walker = Walker(
            KernelIndex(maps["udp_conn"]), maps, programmed=lambda: ids, grace=lambda: None
        )
        assert sum(walker.walk().cut.values()) == 3
        assert all(map(is_cut, cut))
        assert sum(walker.walk(sweep=True).cut.values()) == 0
    assert {ask(sock)[0] for sock in kept} == {"be1"}


# --- many, and odd ones ---------------------------------------------------------------------------


def test_sockets_that_share_both_ends_are_all_cut(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket, all_seen: Any
) -> None:
    """SO_REUSEPORT: the kernel finds one of them at a time."""
    handle = service(pods=world.backends[:1])
    twins = [open_socket(world.p1, form) for _ in range(4)]
    for sock in twins:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(("", twins[0].getsockname()[1]))
        sock.connect((form.host(handle), 53))
    handle.set(endpoints=())
    wait_for_cut(*twins)
    assert all_seen() == 4


def test_a_socket_that_is_bound_to_a_device(
    world: World, service: MakeService, form: Form, open_socket: OpenSocket
) -> None:
    handle = service(pods=world.backends[:1])
    sock = open_socket(world.p1, form)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0")
    sock.connect((form.host(handle), 53))
    handle.set(endpoints=())
    wait_for_cut(sock)


def test_a_client_that_connects_anew_follows_a_rolling_update(
    world: World, service: MakeService, all_seen: Any
) -> None:
    """B-19: fifty clients are with live backends after each step; none is cut twice for one."""
    handle = service(pods=world.backends[:3])
    code = f"""
import json, select, socket, sys
made = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(50)]
def dial(sock):
    sock.connect(({handle.ipv4!r}, 53))
for sock in made:
    sock.settimeout(3)
    dial(sock)
def who(sock):
    for _ in range(20):
        try:
            sock.send(b"who")
            return json.loads(sock.recv(4096))["name"]
        except (ConnectionAbortedError, ConnectionRefusedError):
            continue
        except OSError:
            dial(sock)
    return "nobody"
print("ready", flush=True)
for _ in sys.stdin:
    print(json.dumps(sorted({{who(sock) for sock in made}})), flush=True)
"""
    client = world.p1.popen(
        ["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with client:
        assert client.stdin
        assert client.stdout
        assert client.stdout.readline() == "ready\n"
        for present in ((0, 1, 2), (1, 2, 3), (2, 3), (3, 0)):
            pods = [world.backends[index] for index in present]
            handle.set(endpoints=ready(*pods))
            all_seen()
            client.stdin.write("\n")
            client.stdin.flush()
            assert set(json.loads(client.stdout.readline())) <= {pod.name for pod in pods}
        client.kill()


def test_a_thousand_sockets_at_once(world: World, service: MakeService, all_seen: Any) -> None:
    """One line of the log, and the index is empty of them."""
    handle = service(pods=world.backends[:2])
    code = f"""
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))
made = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(1000)]
for sock in made:
    sock.connect(({handle.ipv4!r}, 53))
print("ready", flush=True)
sys.stdin.read()
def gone(sock):
    try:
        sock.getpeername()
    except OSError:
        return True
print(sum(map(bool, map(gone, made))), flush=True)
"""
    client = world.p1.popen(
        ["python3", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with client:
        assert client.stdin
        assert client.stdout
        assert client.stdout.readline() == "ready\n"
        since = world.agent.mark
        name = handle.port_name(Protocol.UDP, 53)
        assert _entries(world, name) == 1000
        handle.set(endpoints=())
        wait_until(lambda: number_cut(world.agent, since) >= 1000, what="they are cut")
        assert _entries(world, name) == 0
        assert len(world.agent.log(CUT, since=since)) == 1
        client.stdin.close()
        assert client.stdout.readline() == "1000\n"


def _entries(world: World, name: Any) -> int:
    wanted = world.kernel.id_of(name)
    return sum(one.id == wanted for one in world.kernel.udp_connections().values())


# --- the agent was away ---------------------------------------------------------------------------

# No HTTP servers: they say nothing here, and two agents on one node want the same ports.
QUIET = ("--healthz-bind-address", "", "--metrics-bind-address", "")


class Place:
    """A node whose agent each test starts and ends."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.node = lab.node("n1")
        self.client = self.node.pod("p1")
        self.backends = [self.node.pod(f"be{number}") for number in (1, 2)]
        for pod in self.backends:
            pod.serve(udp=[UDP_PORT])
        self.manifests = Manifests(folder / "manifests")
        self.maker = SocketMaker(self.client)

    def agent(self, *flags: str) -> Agent:
        return Agent(self.node, self.manifests, *QUIET, *flags)

    def spec(self, number: int, *pods: Any) -> Spec:
        return Spec(
            name=f"s{number}",
            ipv4=cluster_ip(number),
            ipv6=cluster_ip(number, Family.IPV6),
            udp={53: UDP_PORT},
            endpoints=ready(*pods),
        )

    def connected(self, form: Form, spec: Spec, stack: contextlib.ExitStack) -> socket.socket:
        sock = stack.enter_context(self.maker.make(form.family, socket.SOCK_DGRAM))
        sock.connect((form.host(spec), 53))
        return sock

    def canary(self, agent: Agent, stack: contextlib.ExitStack) -> None:
        """Wait until the agent has looked at everything."""
        spec = self.spec(99, self.backends[0])
        self.manifests.put(spec)
        agent.settle()
        sock = self.connected(Form.V4, spec, stack)
        self.manifests.put(msgspec.structs.replace(spec, endpoints=()))
        agent.settle()
        wait_for_cut(sock)
        agent.wait_for(CUT, services="default/s99:udp-53: 1")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with Lab("stale") as lab:
        place = Place(lab, tmp_path_factory.mktemp("stale"))
        yield place
        place.maker.close()


@pytest.fixture
def place(shared: Place) -> Place:
    """s10 has both backends, s11 the first one; no agent runs."""
    shared.manifests.clear()
    shared.manifests.put(shared.spec(10, *shared.backends), shared.spec(11, shared.backends[0]))
    with shared.agent() as agent:
        agent.settle()
        agent.end()
    return shared


def in_every_form(place: Place, spec: Spec, stack: contextlib.ExitStack) -> list[socket.socket]:
    return [place.connected(form, spec, stack) for form in Form]


def test_what_changed_while_the_agent_was_away_is_found(place: Place) -> None:
    """By state, not by event; the sockets, too, were made while no agent ran. TV-C10 besides."""
    one, two = place.backends
    with contextlib.ExitStack() as stack:
        left = in_every_form(place, place.spec(10), stack)
        deleted = in_every_form(place, place.spec(11), stack)
        where = [ask(sock)[0] for sock in left]
        place.manifests.put(place.spec(10, two))
        place.manifests.remove("s11")
        with place.agent() as agent:
            agent.settle()
            going = [sock for sock, name in zip(left, where, strict=True) if name == one.name]
            wait_for_cut(*going, *deleted)
            place.canary(agent, stack)
            for sock, name in zip(left, where, strict=True):
                assert is_cut(sock) == (name == one.name)
            assert number_cut(agent, 0) == len(going) + len(deleted) + 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_restart_with_nothing_changed_cuts_nothing(place: Place, number: signal.Signals) -> None:
    """B-05"""
    with contextlib.ExitStack() as stack:
        sockets = in_every_form(place, place.spec(10), stack)
        answers = [ask(sock) for sock in sockets]
        with place.agent() as agent:
            for _ in range(3):
                agent.settle()
                place.canary(agent, stack)
                assert sum(one["sockets"] for one in agent.log(CUT)) == 1
                agent.restart(number)
        assert [ask(sock) for sock in sockets] == answers


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("--map-size", "ports=1000,backends=5000"), id="maps of other sizes"),
        pytest.param(("--map-size", "udp_conn=999"), id="another index"),
        pytest.param(("--map-size", "ports=999,udp_conn=998"), id="all of it"),
    ],
)
def test_maps_that_are_made_anew_cut_nothing_and_lose_nothing(
    place: Place, flags: tuple[str, ...]
) -> None:
    """Ids of the maps before mean nothing, or another Service, in those of now."""
    one, two = place.backends
    place.manifests.put(place.spec(1, two), place.spec(12, one))  # s10 gets another id
    with contextlib.ExitStack() as stack:
        sockets = in_every_form(place, place.spec(10), stack)
        where = [ask(sock)[0] for sock in sockets]
        answers = [ask(sock) for sock in sockets]
        with place.agent(*flags) as agent:
            agent.settle()
            place.canary(agent, stack)
            agent.restart(signal.SIGKILL)
            agent.settle()
            place.canary(agent, stack)
            assert [ask(sock) for sock in sockets] == answers
            # Nobody serves with be1 any more.
            place.manifests.remove("s11", "s12")
            place.manifests.put(place.spec(10, two))
            agent.settle()
            going = [sock for sock, name in zip(sockets, where, strict=True) if name == one.name]
            wait_for_cut(*going)
            place.canary(agent, stack)
            kept = [sock for sock, name in zip(sockets, where, strict=True) if name == two.name]
            assert {ask(sock)[0] for sock in kept} <= {two.name}


def test_an_upgrade_finds_what_changed(place: Place) -> None:
    """From other maps, and a backend left at the same time."""
    two = place.backends[1]
    with contextlib.ExitStack() as stack:
        sockets = in_every_form(place, place.spec(11), stack)
        place.manifests.put(place.spec(10, two), place.spec(11, two))
        with place.agent("--map-size", "ports=1001,udp_conn=1001") as agent:
            agent.settle()
            wait_for_cut(*sockets)
