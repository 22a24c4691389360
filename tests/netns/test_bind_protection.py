# SPDX-License-Identifier: Apache-2.0
"""--protect-nodeports: no process of the node may take the port of a NodePort."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence

import pytest

from ebpflb.lab import Lab, Namespace
from tests.builders import cluster_ip
from tests.netns.agents import EBPFLB, OLD_KERNEL, SMALL, Agent
from tests.netns.kernel import programs_on
from tests.netns.services import Manifests, Spec
from tests.netns.sockets import SocketMaker
from tests.netns.world import MakeService, World

NODE_PORT = 30_080
FREE = 30_081
ONLY4 = 30_082
"""NodePort of a Service of IPv4 alone, TCP and UDP."""

PROTECT = "--protect-nodeports"
KINDS = (socket.SOCK_STREAM, socket.SOCK_DGRAM)


class Site:
    """A node with two Services that have NodePorts, and sockets of its own and of a pod's."""

    def __init__(self, lab: Lab, manifests: Manifests) -> None:
        self.node = lab.node("n1")
        self.pod = self.node.pod("p1")
        self.manifests = manifests
        self._makers = {place.name: SocketMaker(place) for place in (self.node, self.pod)}
        manifests.put(
            Spec(
                name="both",
                ipv4=cluster_ip(10),
                ipv6="fd96::a",
                tcp={80: 8080},
                udp={53: 8080},
                node_port=NODE_PORT,
            ),
            Spec(name="four", ipv4=cluster_ip(11), tcp={80: 8080}, udp={53: 8080}, node_port=ONLY4),
        )

    def agent(self, *flags: str, command: Sequence[str] = EBPFLB) -> Agent:
        return Agent(self.node, self.manifests, "--map-size", SMALL, *flags, command=command)

    def bind(
        self,
        place: Namespace,
        family: socket.AddressFamily,
        kind: socket.SocketKind,
        address: tuple[str, int],
        *,
        only_v6: bool = False,
        protocol: int = 0,
    ) -> str:
        """The error's name, "" where it could be bound."""
        with self._makers[place.name].make(family, kind, protocol) as sock:
            if only_v6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                sock.bind(address)
            except OSError as error:
                return errno.errorcode[error.errno or 0]
        return ""

    def close(self) -> None:
        for maker in self._makers.values():
            maker.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Lab("bind") as lab:
        one = Site(lab, Manifests(tmp_path_factory.mktemp("bind") / "manifests"))
        yield one
        one.close()


@pytest.fixture(scope="module")
def protected(site: Site) -> Iterator[Site]:
    with site.agent(PROTECT):
        yield site


V4, V6 = socket.AF_INET, socket.AF_INET6

BINDS = [
    pytest.param(V4, "0.0.0.0", NODE_PORT, True, id="anywhere"),
    pytest.param(V6, "::", NODE_PORT, True, id="anywhere, both families"),
    pytest.param(V4, "192.168.50.1", NODE_PORT, True, id="at the node's address"),
    pytest.param(V6, "fd50::1", NODE_PORT, True, id="at the node's IPv6 address"),
    pytest.param(V6, "::ffff:192.168.50.1", NODE_PORT, True, id="at its address, mapped"),
    pytest.param(V4, "127.0.0.1", NODE_PORT, True, id="on the loopback, where NodePorts answer"),
    pytest.param(V6, "::1", NODE_PORT, True, id="on the IPv6 loopback"),
    pytest.param(V4, "0.0.0.0", FREE, False, id="a port that is no NodePort"),
    pytest.param(V6, "::", FREE, False, id="a port that is none, both families"),
    pytest.param(V4, "0.0.0.0", 0, False, id="any port"),
    pytest.param(V6, "::", 0, False, id="any port, both families"),
    pytest.param(V6, "fd50::1", ONLY4, False, id="IPv6, where the Service is IPv4's"),
    pytest.param(V6, "::", ONLY4, True, id="both families, where the Service is IPv4's"),
    pytest.param(V6, "::ffff:0.0.0.0", ONLY4, True, id="anywhere, mapped"),
]


@pytest.mark.parametrize("kind", KINDS, ids=["TCP", "UDP"])
@pytest.mark.parametrize(("family", "host", "port", "taken"), BINDS)
def test_what_a_process_of_the_node_may_bind(
    protected: Site,
    family: socket.AddressFamily,
    kind: socket.SocketKind,
    host: str,
    port: int,
    *,
    taken: bool,
) -> None:
    """K13"""
    expected = "EADDRINUSE" if taken else ""
    assert protected.bind(protected.node, family, kind, (host, port)) == expected


def test_a_socket_of_ipv6_alone_cannot_be_told(protected: Site) -> None:
    """A limit: the option is not seen by the program, and the other error is the worse one."""
    bind = protected.bind(protected.node, V6, socket.SOCK_STREAM, ("::", ONLY4), only_v6=True)
    assert bind == "EADDRINUSE"


def test_a_protocol_that_the_number_is_not_taken_for(protected: Site) -> None:
    kind, sctp = socket.SOCK_SEQPACKET, 132
    try:
        bound = protected.bind(protected.node, V4, kind, ("0.0.0.0", NODE_PORT), protocol=sctp)
    except OSError as error:
        pytest.skip(f"kernel lacks SCTP: {error}")
    assert bound == ""


@pytest.mark.parametrize("kind", KINDS, ids=["TCP", "UDP"])
def test_a_pods_ports_are_its_own(protected: Site, kind: socket.SocketKind) -> None:
    for family, host in ((V4, "0.0.0.0"), (V6, "::"), (V4, "127.0.0.1")):
        assert protected.bind(protected.pod, family, kind, (host, NODE_PORT)) == ""


def test_a_port_that_the_kernel_chooses_is_never_refused(protected: Site) -> None:
    """K13: with the range of NodePorts as the range to choose from, as some nodes have it."""
    protected.node.sysctl("net.ipv4.ip_local_port_range", f"{NODE_PORT - 4}\t{NODE_PORT + 4}")
    for _ in range(200):
        assert protected.bind(protected.node, V4, socket.SOCK_DGRAM, ("0.0.0.0", 0)) == ""


def test_it_is_off_unless_it_is_asked_for(world: World, service: MakeService) -> None:
    """NP-10, H-16: hostNetwork ingress controllers bind the number that their Service has."""
    handle = service(pods=world.backends[:1], node_port=True)
    with world.node.serve(tcp=[handle.spec.node_port], udp=[handle.spec.node_port]):
        assert world.p1.tcp(world.node.ipv4, handle.spec.node_port).backends == {"be1": 1}


@pytest.fixture
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with Lab("binds") as lab:
        one = Site(lab, Manifests(tmp_path_factory.mktemp("binds") / "manifests"))
        yield one
        one.close()


def bind(site: Site) -> str:
    return site.bind(site.node, V4, socket.SOCK_STREAM, ("0.0.0.0", NODE_PORT))


def test_it_is_switched_by_a_restart(fresh: Site) -> None:
    """On, off, on: what is not asked for is detached, what was there before stays bound."""
    with fresh.node.serve(tcp=[NODE_PORT]):
        for flags, expected, programs in (
            ((), "EADDRINUSE", 9),
            ((PROTECT,), "EADDRINUSE", 11),
            ((), "EADDRINUSE", 9),
        ):
            with fresh.agent(*flags) as agent:
                assert len(programs_on(fresh.node.cgroup_root)) == programs
                assert bind(fresh) == expected  # the server's
                assert agent.complaints() == []
    for flags, expected, programs in (((PROTECT,), "EADDRINUSE", 11), ((), "", 9)):
        with fresh.agent(*flags) as agent:
            assert bind(fresh) == expected
            agent.end()
            assert bind(fresh) == expected
            assert len(programs_on(fresh.node.cgroup_root)) == programs


def test_a_restart_that_asks_for_the_same_compiles_nothing(fresh: Site) -> None:
    for changed in (True, False):
        with fresh.agent(PROTECT) as agent:
            assert bool(agent.log("attached")) is changed


def test_before_linux_5_18_it_is_eperm(fresh: Site) -> None:
    with fresh.agent(PROTECT, command=OLD_KERNEL):
        assert bind(fresh) == "EPERM"
