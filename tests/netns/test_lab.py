# SPDX-License-Identifier: Apache-2.0
"""The lab itself: whom reaches whom, what servers and clients tell, and that nothing stays behind.

No Service and no agent is in any of these: what fails here is the lab's fault.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest

from ebpflb.lab import Lab, LabError, Node, Outcome, Question, addresses, janitor, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


class Cluster:
    """Two nodes with a client and a backend each, and an outside client."""

    def __init__(self, lab: Lab, pod_links: Literal["routed", "bridge"] = "routed") -> None:
        self.lab = lab
        self.n1 = lab.node("n1", pod_links=pod_links)
        self.x = lab.external("x")
        self.n2 = lab.node("n2", pod_links=pod_links)
        self.p1 = self.n1.pod("p1")
        self.vm = self.n1.pod("vm", virtual=True)
        self.be1 = self.n1.pod("be1")
        self.be2 = self.n2.pod("be2")
        self.servers = {
            place.name: place.serve(tcp=[80], udp=[53])
            for place in (self.be1, self.be2, self.n1, self.n2, self.x)
        }


VARIANTS = [
    pytest.param(("none", "routed"), id="routed pods"),
    pytest.param(("none", "bridge"), id="pods on a bridge"),
    pytest.param(("vxlan", "routed"), id="routed pods over vxlan"),
    pytest.param(("vxlan", "bridge"), id="pods on a bridge over vxlan"),
]


@pytest.fixture(scope="module", params=VARIANTS)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    overlay, pod_links = request.param
    with Lab("connectivity", overlay=overlay) as lab:
        yield Cluster(lab, pod_links)


@pytest.fixture(scope="module")
def plain() -> Iterator[Cluster]:
    with Lab("plain") as lab:
        yield Cluster(lab)


def backend(outcome: Outcome) -> str:
    """Who answered everything; fails if not one backend did."""
    assert outcome.failed == 0, outcome
    (name,) = outcome.backends
    return name


# --- who reaches whom -------------------------------------------------------------------------

PATHS = [
    pytest.param("p1", "be1", id="pod to pod of the same node"),
    pytest.param("p1", "be2", id="pod to pod of another node"),
    pytest.param("p1", "p1", id="pod to itself"),
    pytest.param("vm", "be1", id="virtual pod to pod of the same node"),
    pytest.param("vm", "be2", id="virtual pod to pod of another node"),
    pytest.param("p1", "n1", id="pod to its node"),
    pytest.param("p1", "n2", id="pod to another node"),
    pytest.param("p1", "x", id="pod to the outside"),
    pytest.param("n1", "be1", id="node to its pod"),
    pytest.param("n1", "be2", id="node to a pod of another node"),
    pytest.param("n1", "n2", id="node to node"),
    pytest.param("x", "n1", id="outside to node"),
    pytest.param("x", "n2", id="outside to another node"),
    pytest.param("x", "be2", id="outside to pod"),
]


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
@pytest.mark.parametrize(("source", "target"), PATHS)
def test_reaches(cluster: Cluster, source: str, target: str, family: str) -> None:
    client, host = getattr(cluster, source), getattr(getattr(cluster, target), family)
    if target == "p1":
        client.serve(tcp=[80], udp=[53])
    # On a tunnel and on a bridge a node has an address of its own, as with flannel.
    also = addresses.pod_ipv4 if family == "ipv4" else addresses.pod_ipv6
    seen = {getattr(client, family)}
    if isinstance(client, Node) and target.startswith("be"):
        seen |= {also(client.number, 0), also(client.number, 1)}

    by_tcp = client.tcp(host, 80, count=3, size=20_000)
    assert backend(by_tcp) == target
    assert by_tcp.peernames == {spelt(host, 80): 3}
    assert by_tcp.seen_as.keys() <= seen, by_tcp

    by_udp = client.udp(host, 53, count=3, size=1_000)
    assert backend(by_udp) == target
    assert by_udp.sources == {spelt(host, 53): 3}
    assert by_udp.seen_as.keys() <= seen, by_udp

    if target == "p1":
        client.remove()
        cluster.p1 = cluster.n1.pod("p1")


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
@pytest.mark.parametrize("source", ["p1", "n1"])
def test_a_service_address_is_unreachable(cluster: Cluster, source: str, family: str) -> None:
    host = "10.96.0.1" if family == "ipv4" else "fd96::1"
    outcome = getattr(cluster, source).tcp(host, 80, timeout_s=5.0)
    assert outcome.errors == {"ENETUNREACH": 1}


def test_ping(cluster: Cluster) -> None:
    assert cluster.p1.ping(cluster.be2.ipv4, count=2).good == 2
    assert cluster.x.ping(cluster.n1.ipv6, count=2).good == 2


def spelt(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# --- where programs run -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("who", "folder"),
    [("p1", "n1/pods/p1"), ("n1", "n1/host"), ("x", "outside/x"), ("vm", "outside/vm")],
)
def test_a_program_is_in_its_cgroup_and_namespace(plain: Cluster, who: str, folder: str) -> None:
    place = getattr(plain, who)
    ran = place.run(["sh", "-c", "grep ^0: /proc/self/cgroup; readlink /proc/self/ns/net"])
    cgroup, namespace = ran.stdout.split()
    assert cgroup == f"0::/{plain.lab.cgroup.name}/{folder}"
    assert namespace == f"net:[{place.netns.stat().st_ino}]"


def test_a_program_sees_bpffs_and_cgroup_v2(plain: Cluster) -> None:
    plain.n1.pin_path.mkdir(parents=True)
    ran = plain.n1.run(["ls", "-d", plain.n1.pin_path, plain.n1.cgroup_root])
    assert ran.stdout.split() == [str(plain.n1.pin_path), str(plain.n1.cgroup_root)]


def test_python_runs_code_and_modules(plain: Cluster) -> None:
    code = "import ebpflb, sys; print(sys.argv[1])"
    assert plain.p1.python(code, arguments=["hello"]).stdout == "hello\n"
    said = plain.p1.python(
        module="ebpflb.lab.client", arguments=["tcp", plain.be2.ipv4, "80"]
    ).stdout
    assert '"be2": 1' in said


def test_a_failing_program_tells_what_it_said(plain: Cluster) -> None:
    with pytest.raises(LabError, match=r"in p1: exit code 3\nalas"):
        plain.p1.run(["sh", "-c", "echo alas >&2; exit 3"])


def test_host_network_pod_shares_its_nodes_namespace(plain: Cluster) -> None:
    pod = plain.n2.pod("hostpod", host_network=True)
    pod.serve(tcp=[8443])
    assert backend(plain.p1.tcp(plain.n2.ipv4, 8443)) == "hostpod"
    assert pod.run(["grep", "^0:", "/proc/self/cgroup"]).stdout.strip().endswith("/pods/hostpod")
    pod.remove()
    assert plain.p1.tcp(plain.n2.ipv4, 8443).errors == {"ECONNREFUSED": 1}
    assert backend(plain.p1.tcp(plain.n2.ipv4, 80)) == "n2"


def test_a_removed_pod_is_gone_and_its_name_and_number_are_free(plain: Cluster) -> None:
    pod = plain.n1.pod("brief", number=77)
    pod.serve(tcp=[80])
    assert backend(plain.p1.tcp(pod.ipv4, 80)) == "brief"
    pod.remove()
    assert not pod.netns.exists()
    assert not pod.cgroup.exists()
    assert pod.device not in plain.n1.links(lambda links: links.names())
    again = plain.n1.pod("brief", number=77)
    again.serve(tcp=[80], name="second")
    assert backend(plain.p1.tcp(again.ipv4, 80)) == "second"
    again.remove()


@pytest.mark.parametrize("name", ["p1", "n1", "edge", "", "a/b", "UPPER", "far-too-long-a-name"])
def test_a_name_that_is_taken_or_none_is_refused(plain: Cluster, name: str) -> None:
    with pytest.raises(LabError):
        plain.n1.pod(name)


def test_sysctls_are_the_namespaces_own(plain: Cluster) -> None:
    name = "net.ipv4.tcp_syn_retries"
    here = Path("/proc/sys/net/ipv4/tcp_syn_retries")
    before, its_own = here.read_text(), plain.p1.sysctl(name)
    try:
        assert plain.p1.sysctl(name, "3").split()[0] == "3"
        assert here.read_text() == before
    finally:
        plain.p1.sysctl(name, its_own)
    assert plain.n1.sysctl("net.ipv4.ip_forward") == "1"


# --- what servers and clients tell ------------------------------------------------------------


def test_a_server_tells_whom_it_sees(plain: Cluster) -> None:
    first = plain.p1.tcp(plain.be2.ipv4, 80, source_port=21_000, reset=True).first
    assert first == {
        "name": "be2",
        "protocol": "tcp",
        "peer": f"{plain.p1.ipv4}:21000",
        "local": f"{plain.be2.ipv4}:80",
    }
    first = plain.p1.udp(plain.be2.ipv6, 53, source_port=21_001).first
    assert first["peer"] == f"[{plain.p1.ipv6}]:21001"
    assert first["local"] == f"[{plain.be2.ipv6}]:53"


def test_a_source_port_that_chance_may_have_taken_is_refused(plain: Cluster) -> None:
    """A connection that got it is in TIME_WAIT for a minute: the test would fail now and then."""
    with pytest.raises(LabError, match=r"source port 40000 .* ip_local_port_range"):
        plain.p1.tcp(plain.be2.ipv4, 80, source_port=40_000)


def test_a_datagram_is_answered_from_the_address_it_was_sent_to(plain: Cluster) -> None:
    plain.n1.address("192.168.50.111/32")
    plain.n1.address("fd50::111/128")
    assert plain.x.udp("192.168.50.111", 53).sources == {"192.168.50.111:53": 1}
    assert plain.x.udp("fd50::111", 53).sources == {"[fd50::111]:53": 1}


def test_a_mute_server_counts_and_is_silent(plain: Cluster) -> None:
    server = plain.be1.serve(udp=[5353], mute=True)
    assert plain.p1.udp(plain.be1.ipv4, 5353, count=2, timeout_s=0.05).errors == {"TIMEOUT": 2}
    assert server.stats()["udp_received"] == 2
    server.mute(muted=False)
    assert backend(plain.p1.udp(plain.be1.ipv4, 5353)) == "be1"
    assert server.stop()["peers"] == {plain.p1.ipv4: 3}


def test_a_server_bound_to_one_address_and_closing_first(plain: Cluster) -> None:
    with plain.be1.serve(tcp=[8081], bind=[plain.be1.ipv6], once=True) as server:
        assert server.ready["listening"] == [f"tcp [{plain.be1.ipv6}]:8081"]
        assert plain.p1.tcp(plain.be1.ipv6, 8081, count=20).good == 20
        assert plain.p1.tcp(plain.be1.ipv4, 8081).errors == {"ECONNREFUSED": 1}


def test_a_server_that_cannot_bind_says_why(plain: Cluster) -> None:
    with pytest.raises(LabError, match="Address already in use"):
        plain.be1.serve(tcp=[80])


def test_many_short_connections(plain: Cluster) -> None:
    outcome = plain.p1.tcp(plain.be2.ipv4, 80, count=1000, parallel=4, reset=True)
    assert outcome.good == 4000, outcome
    assert backend(outcome) == "be2"


def test_many_questions_at_once_are_answered_in_their_order(plain: Cluster) -> None:
    both = [(plain.be1, "be1"), (plain.be2, "be2")] * 40
    questions = [Question("tcp", place.ipv4, 80) for place, _ in both]
    questions += [Question("udp", place.ipv6, 53, {"connected": True}) for place, _ in both]
    questions += [Question("ping", place.ipv4) for place, _ in both]
    outcomes = plain.p1.at_once(questions)
    assert [backend(one) for one in outcomes[:160]] == [name for _, name in both] * 2
    assert all(one.good == 1 for one in outcomes[160:])
    silent = plain.p1.at_once([Question("tcp", plain.be1.ipv4, 81), Question("ping", "10.96.0.1")])
    assert [one.errors for one in silent] == [{"ECONNREFUSED": 1}, {"TIMEOUT": 1}]
    assert plain.p1.at_once([]) == []


@pytest.mark.parametrize("how", ["sendto", "connect"])
def test_tcp_fast_open(plain: Cluster, how: Literal["sendto", "connect"]) -> None:
    # Whichever comes first asks for the cookie, and has no data in its SYN.
    outcome = plain.p1.tcp(plain.be2.ipv4, 80, fastopen=how, count=3)
    assert backend(outcome) == "be2"
    assert outcome.syn_data >= 2


def test_multipath_tcp(plain: Cluster) -> None:
    plain.be2.serve(tcp=[8088], mptcp=True)
    outcome = plain.p1.tcp(plain.be2.ipv4, 8088, mptcp=True, size=1000)
    assert backend(outcome) == "be2"


@pytest.mark.parametrize("connected", [True, False])
def test_mapped_addresses(plain: Cluster, connected: bool) -> None:
    outcome = plain.p1.udp(plain.be2.ipv4, 53, mapped=True, connected=connected)
    assert backend(outcome) == "be2"
    assert outcome.sources == {f"[::ffff:{plain.be2.ipv4}]:53": 1}
    assert outcome.seen_as == {plain.p1.ipv4: 1}
    outcome = plain.p1.tcp(plain.be2.ipv4, 80, mapped=True)
    assert outcome.peernames == {f"[::ffff:{plain.be2.ipv4}]:80": 1}


def test_bound_sockets(plain: Cluster) -> None:
    outcome = plain.n1.tcp(plain.n2.ipv4, 80, source=plain.n1.ipv4, device="eth0", reuseport=True)
    assert outcome.seen_as == {plain.n1.ipv4: 1}
    assert plain.n1.tcp(plain.be1.ipv4, 80, device="lo", timeout_s=0.2).failed == 1


def test_one_udp_socket_connects_again_and_disconnects(plain: Cluster) -> None:
    one, none, two, refused = plain.p1.reconnect(
        (plain.be1.ipv4, 53), None, (plain.be2.ipv4, 53), (plain.be2.ipv4, 54)
    )
    assert backend(one) == "be1"
    assert none.peernames == {"ENOTCONN": 1}
    assert backend(two) == "be2"
    assert two.peernames == {f"{plain.be2.ipv4}:53": 1}
    assert refused.errors == {"ECONNREFUSED": 1}


def test_several_udp_sockets_in_turn(plain: Cluster) -> None:
    with plain.be1.capture() as capture:
        assert plain.p1.udp(plain.be1.ipv4, 53, count=6, sockets=3).good == 6
        flows = capture.flows(direction="in", protocol="udp")
    assert [flow["packets"] for flow in flows] == [2, 2, 2]


def test_unconnected_udp_learns_of_errors_when_it_asks_to(plain: Cluster) -> None:
    assert plain.p1.udp(plain.be1.ipv4, 54, recverr=True).errors == {"ECONNREFUSED": 1}
    assert plain.p1.udp(plain.be1.ipv6, 54, recverr=True).errors == {"ECONNREFUSED": 1}


@pytest.mark.parametrize("mapped", [False, True])
def test_io_uring(plain: Cluster, mapped: bool) -> None:
    outcome = plain.p1.uring(plain.be2.ipv4, 80, mapped=mapped)
    if outcome.errors == {"UNSUPPORTED": 1}:
        kernel = "io_uring" in outcome.first_errors[0]
        pytest.skip(("kernel lacks io_uring" if kernel else "") + outcome.first_errors[0])
    assert backend(outcome) == "be2"
    assert plain.p1.uring(plain.be2.ipv4, 81).errors == {"ECONNREFUSED": 1}


def test_a_loop_goes_on_until_it_is_stopped(plain: Cluster) -> None:
    with plain.p1.tcp_loop(plain.be2.ipv4, 80, interval_s=0.001) as loop:
        loop.wait_for(lambda so_far: so_far.good >= 50, what="50 connects")
        outcome = loop.stop()
    assert outcome.good >= 50
    assert backend(outcome) == "be2"
    assert [who for _, who in outcome.switches] == ["be2"]


def test_long_connections_tell_when_they_break(plain: Cluster) -> None:
    server = plain.be1.serve(tcp=[8082])
    with plain.p1.hold_loop(plain.be1.ipv4, 8082, parallel=5, interval_s=0.01) as loop:
        loop.wait_for(lambda so_far: so_far.good >= 20, what="20 lines")
        assert server.stats()["tcp_open"] == 5
        server.kill()
        loop.wait_for(lambda so_far: so_far.failed == 5, what="5 broken connections")
        outcome = loop.stop()
    assert outcome.failed == 5
    assert outcome.errors.keys() <= {"EOF", "ECONNRESET", "EPIPE"}


def test_a_one_way_sender_and_its_witness(plain: Cluster) -> None:
    server = plain.be1.serve(udp=[8125], mute=True)
    with (
        plain.be1.capture() as capture,
        plain.p1.udp_loop(plain.be1.ipv4, 8125, one_way=True, interval_s=0.005) as loop,
    ):
        wait_until(lambda: server.stats()["udp_received"] >= 10, what="10 datagrams at the server")
        sent = loop.stop().good
        wait_until(lambda: server.stats()["udp_received"] == sent, what="all datagrams")
        assert capture.packets(direction="in", destination=f"{plain.be1.ipv4}:8125") == sent
        assert capture.packets(direction="out", protocol="udp") == 0


@pytest.mark.parametrize("family", ["ipv4", "ipv6"])
def test_large_datagrams_travel_in_fragments(plain: Cluster, family: str) -> None:
    with plain.be2.capture() as capture:
        outcome = plain.p1.udp(getattr(plain.be2, family), 53, count=2, size=4_000)
        assert backend(outcome) == "be2"
        assert capture.packets(direction="in", protocol="udp") == 2
        assert capture.packets(direction="in", protocol="udp fragment") == 4


def test_a_path_with_a_small_mtu_beyond_the_router(plain: Cluster) -> None:
    plain.lab.router.path_mtu(1300)
    for host, error in ((plain.be1.ipv4, "3/4"), (plain.be1.ipv6, "2/0")):
        with plain.n1.capture() as capture:
            assert backend(plain.x.tcp(host, 80, size=100_000, timeout_s=10.0)) == "be1"
            (too_big,) = (flow for flow in capture.flows() if flow["icmp"] == error)
        assert too_big["about"].startswith(f"tcp {spelt(host, 80)} ")
    plain.lab.router.path_mtu(1500)


# --- what stays behind ------------------------------------------------------------------------


def test_two_namespaces_are_joined_without_an_ethernet_header(plain: Cluster) -> None:
    far = plain.lab.namespace("far")
    try:
        carrier = plain.lab.tunnel(plain.n1, "tun0", far, "tun0", mtu=1400)
    except OSError:
        pytest.skip("kernel lacks tun devices")
    with carrier:
        for place, ipv4, ipv6 in (
            (plain.n1, "172.31.0.1", "fd31::1"),
            (far, "172.31.0.2", "fd31::2"),
        ):
            place.address(f"{ipv4}/24", device="tun0")
            place.address(f"{ipv6}/64", device="tun0")
        with far.serve(tcp=[80], udp=[53]):
            for host in ("172.31.0.2", "fd31::2"):
                assert plain.n1.tcp(host, 80, size=200_000).good == 1
                assert plain.n1.udp(host, 53, size=5_000).good == 1
    wait_until(
        lambda: "tun0" not in far.links(lambda links: links.names()),
        what="it goes with its carrier",
    )


def test_offloads_are_switched(plain: Cluster) -> None:
    """Without them what leaves a veth is cut into packets of its MTU."""
    for on in (False, True):
        plain.p1.offload(on=on)
        with plain.be1.capture() as capture:
            assert plain.p1.tcp(plain.be1.ipv4, 80, size=300_000).good == 1
            (flow,) = capture.flows(direction="in", protocol="tcp")
        assert (flow["bytes"] / flow["packets"] > 1500) is on


def test_nothing_stays_after_the_end() -> None:
    with Lab("end") as lab:
        node = lab.node("n1")
        pod = node.pod("p1")
        server = pod.serve(tcp=[80])
        sleeper = node.popen(["sleep", "300"])
        node.pin_path.mkdir(parents=True)
        (node.pin_path / "links").mkdir()
        assert backend(node.tcp(pod.ipv4, 80)) == "p1"
        assert len(janitor.leftovers(lab.tag)) == 6  # 3 namespaces, cgroups, pins, files
    assert janitor.leftovers(lab.tag) == []
    assert not server.alive
    assert sleeper.returncode == -signal.SIGKILL


def test_pinned_objects_go_with_the_lab() -> None:
    libbpf = ctypes.CDLL("libbpf.so.1")
    with Lab("pins") as lab:
        folder = lab.node("n1").pin_path / "maps"
        folder.mkdir(parents=True)
        array = libbpf.bpf_map_create(2, b"lab_test", 4, 8, 1, None)
        assert array >= 0
        try:
            assert libbpf.bpf_obj_pin(array, bytes(folder / "one")) == 0
        finally:
            os.close(array)
        (folder / "two").symlink_to("one")
    assert janitor.leftovers(lab.tag) == []


def test_nothing_stays_after_an_exception() -> None:
    lab = Lab("exception")

    def build_and_fail() -> None:
        with lab:
            lab.node("n1").pod("p1").serve(tcp=[80])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        build_and_fail()
    assert janitor.leftovers(lab.tag) == []


def test_nothing_stays_when_the_janitor_was_killed() -> None:
    with Lab("no janitor") as lab:
        lab.node("n1")
        assert lab._janitor is not None
        lab._janitor.kill()
    assert janitor.leftovers(lab.tag) == []


OWNER = """
    import sys
    from ebpflb.lab import Lab
    with Lab("owner") as lab:
        node = lab.node("n1")
        pod = node.pod("p1")
        pod.serve(tcp=[80])
        pod.tcp_loop(pod.ipv4, 80, interval_s=0.01)
        sleeper = node.popen(["sh", "-c", "trap '' TERM HUP INT; sleep 300"])
        node.pin_path.mkdir(parents=True)
        print(lab.tag, lab._janitor.pid, sleeper.pid, flush=True)
        sys.stdin.read()
"""


class Owner:
    """A process that has a lab and waits."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(OWNER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        self.tag, janitor_pid, sleeper = self.process.stdout.readline().split()
        self.janitor, self.sleeper = int(janitor_pid), int(sleeper)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        janitor.teardown(self.tag)


@pytest.fixture
def owner() -> Iterator[Owner]:
    with contextlib.closing(Owner()) as an_owner:
        yield an_owner


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").exists()


def test_nothing_stays_when_the_owner_is_killed(owner: Owner) -> None:
    assert len(janitor.leftovers(owner.tag)) == 6
    owner.process.kill()
    wait_until(lambda: not janitor.leftovers(owner.tag), timeout_s=20, what="the janitor's work")
    wait_until(lambda: not alive(owner.sleeper), what="the end of the node's program")
    wait_until(lambda: not alive(owner.janitor), what="the janitor's end")


def test_the_next_lab_sweeps_when_owner_and_janitor_are_killed(owner: Owner) -> None:
    os.kill(owner.janitor, signal.SIGKILL)
    owner.process.kill()
    owner.process.wait()
    assert len(janitor.leftovers(owner.tag)) == 6
    with Lab("next") as lab:
        assert janitor.leftovers(owner.tag) == []
        assert janitor.leftovers(lab.tag) != []
    wait_until(lambda: not alive(owner.sleeper), what="the end of the node's program")


def test_a_sweep_spares_the_living(owner: Owner) -> None:
    before = janitor.leftovers(owner.tag)
    assert janitor.sweep() == []
    assert janitor.leftovers(owner.tag) == before
    assert alive(owner.sleeper)


def test_names_without_the_tag_are_nobodys() -> None:
    for name in ("eblb", "eblb12", "eblb12-n1", "xeblb12-1-n1"):
        assert not re.match(janitor._NETNS, name)
    for name in ("ebpflb-lab", "ebpflb-lab-12", "ebpflb-lab-12-1x", "ebpflb"):
        assert not re.match(janitor._FOLDER, name)


def test_processes_end_one_by_one_where_the_kernel_has_no_cgroup_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before 5.14 the write would have to make the file, which cgroup v2 lets nobody do."""

    def as_there(path: Path, _text: str) -> int:
        with (path.parent / "no.such.file").open("w") as file:
            return file.write("1")

    with Lab("old kernel") as lab:
        node = lab.node("n1")
        sleepers = [place.popen(["sleep", "300"]) for place in (node, node.pod("p1"))]
        for place in (node, node.pods["p1"]):
            wait_until(lambda p=place: populated(p.cgroup), what="a sleeper in its cgroup")  # type: ignore[misc]
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_text", as_there)
            janitor._kill(node.cgroup_root)
        assert [sleeper.wait(5) for sleeper in sleepers] == [-signal.SIGKILL] * 2


def populated(cgroup: Path) -> bool:
    return (cgroup / "cgroup.procs").read_text() != ""


def test_labs_are_the_tools_of_threads_too(plain: Cluster) -> None:
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(plain.p1.tcp(plain.be1.ipv4, 80)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [backend(outcome) for outcome in outcomes] == ["be1"] * 8


def test_who_does_not_answer_is_replaced(plain: Cluster) -> None:
    assert plain.p1.tcp(plain.be1.ipv4, 80).good == 1
    assert plain.p1._worker is not None
    plain.p1._worker.signal(signal.SIGSTOP)
    with pytest.raises(LabError, match="client p1 said nothing"):
        plain.p1._client().perform(["tcp", plain.be1.ipv4, "80"], timeout_s=0.1)
    assert backend(plain.p1.tcp(plain.be2.ipv4, 80)) == "be2"


def test_two_labs_at_once() -> None:
    with Lab("one") as one, Lab("two") as two:
        for lab in (one, two):
            lab.node("n1").pod("p1").serve(tcp=[80], name=lab.name)
        for lab in (one, two):
            assert backend(lab.nodes["n1"].tcp(addresses.pod_ipv4(1, 2), 80)) == lab.name
    assert janitor.leftovers(one.tag) + janitor.leftovers(two.tag) == []
