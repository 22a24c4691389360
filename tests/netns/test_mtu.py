# SPDX-License-Identifier: Apache-2.0
"""Large packets: path MTUs, fragments, jumbo frames, offloads, devices without a link header."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from ebpflb.lab import Capture, Namespace, Pod
from ebpflb.model import Family
from tests.netns.site import PATIENCE_S, SILENCE_S, Site, To, site
from tests.netns.world import TCP_PORT, Way

NARROW = 1_300
BULK = 3_000_000
LONG_S = 4 * PATIENCE_S

TOO_BIG = {Family.IPV4: {"protocol": "icmp", "icmp": "3/4"}}
TOO_BIG[Family.IPV6] = {"protocol": "icmp6", "icmp": "2/0"}


def populate(one: Site) -> None:
    one.backend("be1")
    one.backend("far", one.n2)
    one.n1.pod("k1", virtual=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("mtu"), nodes=2) as one:
        populate(one)
        with one.running():
            yield one


class Path(NamedTuple):
    """Who dials what, and where the backend is."""

    client: str
    to: To
    backend: str

    @property
    def label(self) -> str:
        client = "outside" if self.client == "x" else "virtual pod"
        where = "elsewhere" if self.backend == "far" else "here"
        return f"{client} to {self.to.value}, a backend {where}"


PATHS = [
    Path("x", To.NODE_PORT, "be1"),
    Path("x", To.NODE_PORT, "far"),
    Path("x", To.CLUSTER_IP, "far"),
    Path("k1", To.CLUSTER_IP, "be1"),
    Path("k1", To.CLUSTER_IP, "far"),
    Path("k1", To.NODE_PORT, "be1"),
]


@pytest.fixture(params=PATHS, ids=lambda path: path.label)
def path(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


def host_of(place: Namespace, family: Family) -> str:
    return place.ipv6 if family is Family.IPV6 else place.ipv4


def transfers(place: Site, path: Path, family: Family, *, size: int = BULK, **spec: Any) -> None:
    """So much up and down again through one connection, unharmed."""
    with place.service(
        pods=place.pods(path.backend), external=True, balanced=True, **spec
    ) as service:
        dialled = service.address(Way.TCP, family, path.to)
        outcome = place.client(path.client).tcp(*dialled, size=size, count=2, timeout_s=LONG_S)
    assert outcome.failed == 0, outcome
    assert outcome.backends == {path.backend: 2}


# --- path MTU -------------------------------------------------------------------------------------


@pytest.fixture
def narrow_outside(place: Site) -> Iterator[None]:
    """The link to the outside clients carries less than they and the pods know."""
    place.lab.router.path_mtu(NARROW)
    yield
    place.lab.router.path_mtu(place.lab.mtu)


def forget_paths(*places: Namespace) -> None:
    """What they have learned of path MTUs."""
    for place in places:
        for family in ("-4", "-6"):
            place.run(["ip", family, "route", "flush", "cache"], check=False)


def too_big(capture: Capture, family: Family) -> list[str]:
    """The flows that ICMP errors are about, which came in."""
    return [flow["about"] for flow in capture.flows(direction="in", **TOO_BIG[family])]


@pytest.mark.parametrize(
    ("path", "local"),
    [(one, False) for one in PATHS if one.client == "x"]
    + [(Path("x", To.BALANCER, "far"), False), (Path("x", To.NODE_PORT, "be1"), True)],
    ids=lambda one: (
        ("external Local" if one else "Cluster") if isinstance(one, bool) else one.label
    ),
)
def test_a_backend_learns_of_a_narrow_path_to_its_client(
    place: Site, narrow_outside: None, path: Path, local: bool, family: Family
) -> None:
    """B-113, B-115, L-43: the error is about the Service; it arrives about the backend's packet."""
    (pod,) = place.pods(path.backend)
    forget_paths(place.x, *place.nodes, pod)
    with pod.capture() as capture:
        transfers(place, path, family, size=200_000, external_local=local)
        about = too_big(capture, family)
    source = f"[{pod.ipv6}]:{TCP_PORT}" if family is Family.IPV6 else f"{pod.ipv4}:{TCP_PORT}"
    assert about, "the backend was told nothing"
    assert all(flow.startswith(f"tcp {source} ") for flow in about), about


@pytest.fixture
def narrow_inside(place: Site) -> Iterator[None]:
    """The way from n1 to the pods of n2 carries less; n1 itself says so."""

    def set_mtu(mtu: int) -> None:
        for pods, via in (
            (place.n2.pods_ipv4, place.n2.ipv4),
            (place.n2.pods_ipv6, place.n2.ipv6),
        ):
            place.n1.route(pods, via=via, mtu=mtu)

    set_mtu(NARROW)
    yield
    set_mtu(place.lab.mtu)


@pytest.mark.parametrize(
    ("client", "to"),
    [
        pytest.param("x", To.NODE_PORT, id="outside to NodePort"),
        pytest.param("x", To.BALANCER, id="outside to load balancer"),
        pytest.param("k1", To.CLUSTER_IP, id="virtual pod to ClusterIP"),
        pytest.param("k1", To.NODE_PORT, id="virtual pod to NodePort"),
    ],
)
def test_a_client_learns_of_a_narrow_path_to_its_backend(
    place: Site, narrow_inside: None, client: str, to: To, family: Family
) -> None:
    """L-43, L-44: the error is about the backend; what arrives is about the Service."""
    where = place.client(client)
    forget_paths(where, place.n1, *place.pods("far"))
    with place.serve("far") as service, where.capture() as capture:
        host, port = service.address(Way.TCP, family, to)
        # A node's address is no Service's own: it may be known of from another test.
        known = f"mtu {NARROW}" in where.run(["ip", "route", "get", host]).stdout
        outcome = where.tcp(host, port, size=200_000, count=2, timeout_s=LONG_S)
        about = too_big(capture, family)
        learned = where.run(["ip", "route", "get", host]).stdout
    assert outcome.failed == 0, outcome
    asked = f"[{host}]:{port}" if family is Family.IPV6 else f"{host}:{port}"
    assert about or known, "the client was told nothing"
    assert all(flow.startswith("tcp ") and flow.endswith(f" {asked}") for flow in about), about
    assert f"mtu {NARROW}" in learned, learned


# --- fragments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4_000, 8_000, 50_000])
def test_large_datagrams_go_both_ways_in_fragments(
    place: Site, path: Path, family: Family, size: int
) -> None:
    """B-117, E-N08: of one socket and of many."""
    (backend,) = place.pods(path.backend)
    with place.serve(path.backend) as service, backend.capture() as capture:
        dialled = service.address(Way.UDP, family, path.to)
        client = place.client(path.client)
        for sockets in (1, 10):
            outcome = client.udp(
                *dialled, size=size, sockets=sockets, count=20, timeout_s=PATIENCE_S
            )
            assert outcome.failed == 0, outcome
            assert outcome.first["size"] == size
        fragments = capture.packets(protocol="udp fragment", direction="in")
    assert fragments >= 40 * (size // 1_500)


# --- what the devices do --------------------------------------------------------------------------

SWITCHED_OFF = [
    pytest.param((), id="all offloads on"),
    pytest.param(("tx-checksum",), id="no checksum on sending"),
    pytest.param(("rx-checksum",), id="no checksum on receiving"),
    pytest.param(("gso", "tso"), id="no GSO"),
    pytest.param(("gro",), id="no GRO"),
    pytest.param(("tx-checksum", "rx-checksum", "gso", "tso", "gro"), id="all offloads off"),
]


@pytest.fixture(scope="module", params=SWITCHED_OFF)
def offloads(place: Site, request: pytest.FixtureRequest) -> Iterator[None]:
    """Switched on every device between any two."""
    pods: list[Pod] = place.pods("be1", "far", "k1")
    devices: list[tuple[Namespace, str]] = [(pod, "eth0") for pod in pods]
    devices += [(pod.node, pod.device) for pod in pods]
    devices += [(where, "eth0") for where in (*place.nodes, place.x, place.lab.router)]
    with contextlib.ExitStack() as stack:
        for where, device in devices if request.param else ():
            where.offload(*request.param, on=False, device=device)
            stack.callback(where.offload, *request.param, on=True, device=device)
        yield


def test_bulk_comes_through_unharmed_whatever_is_offloaded(
    place: Site, offloads: None, path: Path, family: Family
) -> None:
    """L-46: partial sums, segments that are cut behind us and in front of us."""
    transfers(place, path, family)


def test_datagrams_come_through_whatever_is_offloaded(
    place: Site, offloads: None, path: Path, family: Family
) -> None:
    """L-46: a UDP sum is partial, whole or, of IPv4, none."""
    with place.serve(path.backend) as service:
        dialled = service.address(Way.UDP, family, path.to)
        for size in (0, 1_000, 5_000):
            outcome = place.client(path.client).udp(*dialled, size=size, count=10)
            assert outcome.failed == 0, outcome


def test_refusals_reach_the_client_whatever_is_offloaded(
    place: Site, offloads: None, family: Family
) -> None:
    """K9: an error about a packet whose sum was partial."""
    with place.serve() as service:
        for client, to in (("x", To.NODE_PORT), ("x", To.BALANCER), ("k1", To.CLUSTER_IP)):
            for way in (Way.TCP, Way.CONNECTED_UDP):
                dialled = service.address(way, family, to)
                outcome = way.ask(place.client(client), *dialled, timeout_s=PATIENCE_S)
                assert outcome.errors == {"ECONNREFUSED": 1}, (client, to, way)


# --- other links ----------------------------------------------------------------------------------


def test_jumbo_frames(tmp_path_factory: pytest.TempPathFactory) -> None:
    """9,000 bytes everywhere; and with offloads off, so that packets are that large indeed."""
    with site(tmp_path_factory.mktemp("jumbo"), lab={"mtu": 9_000}, nodes=2) as one:
        populate(one)
        with one.running():
            for on in (True, False):
                for where in (one.x, one.n1, one.n2, *one.pods("be1", "far", "k1")):
                    where.offload("gso", "tso", "gro", on=on)
                for path in PATHS:
                    for family in Family:
                        transfers(one, path, family)
                        with one.serve(path.backend) as service:
                            dialled = service.address(Way.UDP, family, path.to)
                            sent = one.client(path.client).udp(*dialled, size=8_500, count=5)
                            assert sent.failed == 0, sent


def test_an_uplink_without_an_ethernet_header(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A tun device, as WireGuard's or a provider's link is: NodePorts, Services, pings, errors."""
    with site(tmp_path_factory.mktemp("tun"), nodes=2) as one:
        populate(one)
        y = one.lab.namespace("y")
        try:
            carrier = one.lab.tunnel(one.n1, "tun0", y, "tun0", mtu=1_400)
        except OSError:
            pytest.skip("kernel lacks tun devices")
        for where, ipv4, ipv6 in (
            (one.n1, "172.31.0.1/24", "fd31::1/64"),
            (y, "172.31.0.2/24", "fd31::2/64"),
        ):
            where.address(ipv4, device="tun0")
            where.address(ipv6, device="tun0")
        y.links(lambda links: links.route("default", via="172.31.0.1"))
        y.links(lambda links: links.route("default6", via="fd31::1"))
        with carrier, one.running():
            for family in Family:
                host = "fd31::1" if family is Family.IPV6 else "172.31.0.1"
                with one.serve("be1", "far") as service:
                    _reaches_all(one, y, service.spec.node_port, host)
                    for to in (To.CLUSTER_IP, To.BALANCER):
                        there, port = service.address(Way.TCP, family, to)
                        assert y.tcp(there, port, count=5, size=200_000).failed == 0
                        assert y.ping(there, timeout_s=PATIENCE_S).sources == {there: 1}
                    service.set(endpoints=())
                    for way in (Way.TCP, Way.CONNECTED_UDP):
                        refused = way.ask(y, host, service.spec.node_port, timeout_s=PATIENCE_S)
                        assert refused.errors == {"ECONNREFUSED": 1}


def _reaches_all(one: Site, y: Namespace, port: int, host: str) -> None:
    by_tcp = y.tcp(host, port, count=20, size=100_000, timeout_s=PATIENCE_S)
    assert by_tcp.failed == 0, by_tcp
    # Over IPv6 each backend's first large answer only tells it of the narrower link.
    y.udp(host, port, count=20, sockets=20, size=5_000, timeout_s=SILENCE_S)
    by_udp = y.udp(host, port, count=20, sockets=20, size=5_000, timeout_s=PATIENCE_S)
    assert by_udp.failed == 0, by_udp
    assert by_tcp.backends.keys() == by_udp.backends.keys() == {"be1", "far"}


def test_a_tagged_uplink(tmp_path_factory: pytest.TempPathFactory) -> None:
    """L-47: a VLAN's device is the uplink; below it frames are tagged and left alone."""
    with site(tmp_path_factory.mktemp("vlan")) as one:
        one.backend("be1")
        y = one.lab.namespace("y")
        one.lab.link(one.n1, "trunk", y, "trunk")
        made = [
            where.run(
                ["ip", "link", "add", "link", "trunk", "name", "vlan7", "type", "vlan", "id", "7"],
                check=False,
            ).returncode
            for where in (one.n1, y)
        ]
        if any(made):
            pytest.skip("kernel lacks 802.1Q VLAN devices")
        for where, ipv4, ipv6 in (
            (one.n1, "172.31.0.1/24", "fd31::1/64"),
            (y, "172.31.0.2/24", "fd31::2/64"),
        ):
            where.links(lambda links: links.set("vlan7", state="up"))
            where.address(ipv4, device="vlan7")
            where.address(ipv6, device="vlan7")
        with one.running(), one.serve("be1") as service:
            for host in ("172.31.0.1", "fd31::1"):
                assert y.tcp(host, service.spec.node_port, count=5, size=BULK).failed == 0
                assert y.udp(host, service.spec.node_port, count=5, size=5_000).failed == 0
