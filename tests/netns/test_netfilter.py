"""Our rules in netfilter by real tools: what they do to packets, and what others' rules come to.

Nothing of ours marks packets here: rules in the node's PREROUTING do, by port.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import iptables, netfilterwatch
from ebpflb.datapath.ebpf.netfilter import Netfilter
from ebpflb.errors import DatapathError
from ebpflb.lab import External, Lab, Namespace, Node, Pod, wait_until
from ebpflb.model import Family
from tests.logs import capture_logs
from tests.netns.test_overlay import forget_outer_flows, outer_flows

MASQUERADE, REJECT = 0x4000, 0x2000
OTHERS_BITS = 0x120001
MARKED, UNMARKED, REFUSED = 8080, 8081, 8082

PATIENCE_S = 8.0
SILENCE_S = 0.3
NOTICE_S = 30.0
QUIET_S = 0.7
"""Longer than the watch waits for more."""

MAY_BE_DROPPED = "what we masquerade may be dropped"

MARKS = f"""
table inet marks {{
    chain prerouting {{
        type filter hook prerouting priority -150;
        iifname != {{ "eth0", "veth-p1" }} return
        meta l4proto != {{ tcp, udp, sctp }} return
        meta mark set meta mark or {OTHERS_BITS:#x}
        th dport {MARKED} meta mark set meta mark or {MASQUERADE:#x}
        th dport {REFUSED} meta mark set meta mark or {REJECT:#x}
    }}
}}
"""

find_any_tool = iptables.find_tool


def only(*allowed: str) -> Callable[[str], str]:
    """A node that has these tools, by how their names begin."""

    def find(name: str) -> str:
        return find_any_tool(name) if name.startswith(allowed) else ""

    return find


WAYS = {
    "nft": only("nft", "iptables-nft", "ip6tables-nft", "iptables-legacy", "ip6tables-legacy"),
    "iptables-nft": only("iptables-nft", "ip6tables-nft"),
    "iptables-legacy": only("iptables-legacy", "ip6tables-legacy"),
}


class Place:
    """A node with a pod behind it, and a client before it."""

    def __init__(self, node: Node, pod: Pod, client: External) -> None:
        self.node = node
        self.pod = pod
        self.client = client

    def rules(self, **marks: int) -> Rules:
        return Rules(self.node, **marks)

    def mark(self) -> None:
        self.node.run(["nft", "-f", "-"], text_in=MARKS)

    def forget(self) -> None:
        """Everything in this node's netfilter."""
        self.node.run(["nft", "flush", "ruleset"])
        for tool, listed in (("iptables", "ip_tables"), ("ip6tables", "ip6_tables")):
            tables = self.legacy(listed)
            lines = [f"*{table}\nCOMMIT\n" for table in tables]
            if "filter" in tables:
                lines.append("*filter\n:FORWARD ACCEPT [0:0]\nCOMMIT\n")
            if lines:
                self.node.run([f"{tool}-legacy-restore"], text_in="".join(lines))

    def legacy(self, listed: str = "ip_tables") -> list[str]:
        """The legacy tables that there are."""
        path = f"/proc/net/{listed}_names"
        return self.node.run(["cat", path], check=False).stdout.split()

    def everything(self) -> str:
        """All rules in the node, as the tools print them, without counters."""
        text = self.node.run(["nft", "-s", "list", "ruleset"]).stdout
        for tool, listed in (("iptables", "ip_tables"), ("ip6tables", "ip6_tables")):
            for table in self.legacy(listed):
                text += self.node.run([f"{tool}-legacy", "-t", table, "-S"]).stdout
        return text

    def host(self, family: Family) -> str:
        return self.pod.ipv6 if family is Family.IPV6 else self.pod.ipv4

    def passes(self, port: int, family: Family, *, timeout_s: float = PATIENCE_S) -> bool:
        """Whether a new connection from outside to the pod is answered."""
        return self.client.tcp(self.host(family), port, timeout_s=timeout_s).good == 1


class Rules:
    """Ours, in a node's namespace."""

    def __init__(self, node: Node, *, mark: int = MASQUERADE, reject_mark: int = REJECT) -> None:
        self._node = node
        self._netfilter = Netfilter(mark=mark, reject_mark=reject_mark)

    def ensure(self) -> list[Difference]:
        return self._node.inside(self._netfilter.ensure)

    def differences(self) -> list[Difference]:
        return self._node.inside(self._netfilter.differences)

    def remove(self) -> bool:
        return self._node.inside(self._netfilter.remove)

    @contextlib.contextmanager
    def watched(self) -> Iterator[threading.Event]:
        """An event that is set whenever there may be something to do."""
        woken = threading.Event()
        self._node.inside(lambda: self._netfilter.watch(woken.set))
        try:
            yield woken
        finally:
            self._netfilter.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Place]:
    with Lab("netfilter") as lab:
        node = lab.node("n1")
        pod = node.pod("be1")
        pod.serve(tcp=[MARKED, UNMARKED, REFUSED], udp=[MARKED, UNMARKED, REFUSED])
        node.serve(tcp=[MARKED, UNMARKED, REFUSED], udp=[MARKED, UNMARKED, REFUSED])
        yield Place(node, pod, lab.external("x"))


@pytest.fixture(autouse=True)
def _needs(request: pytest.FixtureRequest, lacking: frozenset[str]) -> None:
    """By its name a test says when it needs the legacy tables."""
    if "nft" in lacking or ("legacy" in request.node.name and "legacy" in lacking):
        pytest.skip("kernel lacks nf_tables or the legacy tables, or their tools are not installed")


@pytest.fixture(scope="module")
def lacking() -> frozenset[str]:
    with Lab("probe") as lab:
        probe = lab.namespace("probe")
        return frozenset(
            one
            for one in ("legacy", "nft")
            for tool in ("iptables", "ip6tables")
            if probe.run(["sh", "-c", f"{tool}-{one} -t nat -S"], check=False).returncode
        )


@pytest.fixture
def place(site: Place) -> Place:
    """With nobody's rules."""
    site.forget()
    return site


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the node has to write rules with."""
    chosen: str = request.param
    monkeypatch.setattr(iptables, "find_tool", WAYS[chosen])
    return chosen


@pytest.fixture
def all_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(iptables, "find_tool", WAYS["nft"])


# --- what happens to packets ---------------------------------------------------------------------


def test_what_is_marked_is_masqueraded_and_nothing_else(
    place: Place, way: str, family: Family
) -> None:
    """MASQ-07"""
    rules = place.rules()
    place.mark()
    host = place.host(family)
    mine = place.client.ipv6 if family is Family.IPV6 else place.client.ipv4
    rules.ensure()
    for kind in (place.client.tcp, place.client.udp):
        marked = kind(host, MARKED, timeout_s=PATIENCE_S, count=3)
        assert marked.good == 3
        assert mine not in marked.seen_as
        assert kind(host, UNMARKED, timeout_s=PATIENCE_S).seen_as == {mine: 1}
    assert rules.remove()
    assert place.client.tcp(host, MARKED, timeout_s=PATIENCE_S).seen_as == {mine: 1}


def test_others_bits_survive_and_ours_end_in_output(place: Place, way: str, family: Family) -> None:
    """K4: what the node itself sends, as a tunnel does, leaves without a mark of ours."""
    place.rules().ensure()
    name = "ip6" if family is Family.IPV6 else "ip"
    place.node.run(
        ["nft", "-f", "-"],
        text_in=f"""
        table {name} counts {{
            chain postrouting {{
                type filter hook postrouting priority 300;
                udp dport 9 meta mark {OTHERS_BITS:#x} counter
                udp dport 9 meta mark != {OTHERS_BITS:#x} counter
            }}
        }}""",
    )

    def send() -> None:
        inet = socket.AF_INET6 if family is Family.IPV6 else socket.AF_INET
        for bits in (0, MASQUERADE, REJECT, MASQUERADE | REJECT):
            with socket.socket(inet, socket.SOCK_DGRAM) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, OTHERS_BITS | bits)
                sock.sendto(b"x", (place.host(family), 9))

    place.node.inside(send)
    text = place.node.run(["nft", "list", "table", name, "counts"]).stdout
    assert re.findall(r"packets (\d+)", text) == ["4", "0"]


@pytest.fixture(params=[True, False], ids=["with offloads", "without offloads"])
def offloads(site: Place, request: pytest.FixtureRequest) -> Iterator[None]:
    """Of the client, so that its checksum is partial or whole where netfilter sees the packet."""
    ends: list[tuple[Namespace, str]] = [(site.client, "eth0"), (site.node, "eth0")]
    for where, device in ends:
        where.offload(on=request.param, device=device)
    yield
    for where, device in ends:
        where.offload(on=True, device=device)


@pytest.mark.parametrize("to", ["forward", "input"])
def test_who_is_refused_is_told_at_once(
    place: Place, way: str, offloads: None, to: str, family: Family
) -> None:
    """NOEP-10, K9: by ICMP, for which both kinds of socket have ECONNREFUSED."""
    place.rules().ensure()
    place.mark()
    if to == "forward":
        host = place.host(family)
    else:
        host = place.node.ipv6 if family is Family.IPV6 else place.node.ipv4
    for dial in (place.client.tcp, place.client.udp):
        options: dict[str, Any] = {} if dial == place.client.tcp else {"connected": True}
        outcome = dial(host, REFUSED, count=2, timeout_s=PATIENCE_S, **options)
        assert outcome.errors == {"ECONNREFUSED": 2}
        assert dial(host, UNMARKED, timeout_s=PATIENCE_S).good == 1


def test_protocols_without_ports_in_the_kernel_are_refused_too(
    place: Place, way: str, family: Family
) -> None:
    """NOEP-10: SCTP's answer is the same ICMP error."""
    place.rules().ensure()
    place.mark()
    six = family is Family.IPV6
    wanted = (1, 4) if six else (3, 3)
    icmp = socket.IPPROTO_ICMPV6 if six else socket.IPPROTO_ICMP

    def ask() -> bool:
        inet = socket.AF_INET6 if six else socket.AF_INET
        init = struct.pack(">HHII", 4000, REFUSED, 0, 0) + struct.pack(">BBH", 1, 0, 4)
        with (
            socket.socket(inet, socket.SOCK_RAW, icmp) as errors,
            socket.socket(inet, socket.SOCK_RAW, socket.IPPROTO_SCTP) as sender,
        ):
            sender.sendto(init, (place.host(family), 0))
            while select.select([errors], [], [], PATIENCE_S)[0]:
                packet = errors.recv(2048)
                at = 0 if six else (packet[0] & 15) * 4
                if tuple(packet[at : at + 2]) == wanted:
                    return True
        return False

    assert place.client.inside(ask)


# --- chains that drop ----------------------------------------------------------------------------

FIREWALLD = """
table inet firewalld {
    chain filter_FORWARD {
        type filter hook forward priority filter + 10; policy accept;
        ct state { established, related } accept
        ct status dnat accept
        iifname "lo" accept
        ct state invalid drop
        jump filter_FORWARD_POLICIES
        reject with icmpx admin-prohibited
    }
    chain filter_FORWARD_POLICIES {
    }
}
"""

ADMIN = """
table inet filter {
    chain forward {
        type filter hook forward priority filter; policy drop;
    }
}
"""

DOCKER_NFT = """
table ip docker-bridges {
    map filter-forward-in-jumps {
        type ifname : verdict
        elements = { "veth-be1" : jump in }
    }
    chain in {
        drop
    }
    chain filter-FORWARD {
        type filter hook forward priority filter; policy accept;
        oifname vmap @filter-forward-in-jumps
    }
}
table ip6 docker-bridges {
    map filter-forward-in-jumps {
        type ifname : verdict
        elements = { "veth-be1" : jump in }
    }
    chain in {
        drop
    }
    chain filter-FORWARD {
        type filter hook forward priority filter; policy accept;
        oifname vmap @filter-forward-in-jumps
    }
}
"""


def by_nft(text: str) -> Callable[[Node], None]:
    def put(node: Node) -> None:
        node.run(["nft", "-f", "-"], text_in=text)

    return put


def by_iptables(back_end: str, *commands: str) -> Callable[[Node], None]:
    def put(node: Node) -> None:
        for tool in ("iptables", "ip6tables"):
            for command in commands:
                node.run([f"{tool}-{back_end}", *command.split()])

    return put


def ufw(back_end: str) -> Callable[[Node], None]:
    return by_iptables(
        back_end, "-N ufw-forward", "-A ufw-forward -j REJECT", "-A FORWARD -j ufw-forward"
    )


DROPS = {
    "iptables-legacy's policy": by_iptables("legacy", "-P FORWARD DROP"),
    "iptables-nft's policy": by_iptables("nft", "-P FORWARD DROP"),
    "both policies, legacy and nft": lambda node: (
        by_iptables("nft", "-P FORWARD DROP")(node),
        by_iptables("legacy", "-P FORWARD DROP")(node),
    ),
    "a chain in iptables-legacy": ufw("legacy"),
    "a chain in iptables-nft": ufw("nft"),
    "an administrator's policy in nft": by_nft(ADMIN),
    "firewalld": by_nft(FIREWALLD),
    "Docker by nft": by_nft(DOCKER_NFT),
}


@pytest.fixture(params=DROPS)
def put_drops(request: pytest.FixtureRequest) -> Callable[[Node], Any]:
    chosen: Callable[[Node], Any] = DROPS[request.param]
    return chosen


@pytest.mark.usefixtures("all_tools")
def test_what_is_marked_goes_through_chains_that_drop(
    place: Place, put_drops: Callable[[Node], Any], family: Family
) -> None:
    """MASQ-13, K3: and what belongs to a flow that conntrack knows, as answers do; nothing else.

    Who is refused is told all the same, whatever a policy would do with the packet.
    """
    rules = place.rules()
    place.mark()
    put_drops(place.node)
    assert not place.passes(MARKED, family, timeout_s=SILENCE_S)
    rules.ensure()
    assert place.passes(MARKED, family)
    assert not place.passes(UNMARKED, family, timeout_s=SILENCE_S)
    refused = place.client.tcp(place.host(family), REFUSED, timeout_s=PATIENCE_S)
    assert refused.errors == {"ECONNREFUSED": 1}
    before = place.everything()
    assert rules.ensure() == []
    assert place.everything() == before


@pytest.mark.usefixtures("all_tools")
def test_a_flow_that_was_there_before_goes_on(
    place: Place, put_drops: Callable[[Node], Any], family: Family
) -> None:
    place.rules().ensure()  # conntrack is at work from here on
    with place.client.hold_loop(place.host(family), UNMARKED, interval_s=0.01) as loop:
        loop.wait_for(lambda one: one.good >= 5, timeout_s=30, what="it is in use")
        put_drops(place.node)
        place.rules().ensure()
        good = loop.outcome().good
        loop.wait_for(lambda one: one.good >= good + 20, timeout_s=30, what="it goes on")
        assert loop.stop().failed == 0


@pytest.mark.usefixtures("all_tools")
def test_all_others_rules_are_as_before_when_ours_go(
    place: Place, put_drops: Callable[[Node], Any]
) -> None:
    place.mark()
    put_drops(place.node)
    before = place.everything()
    rules = place.rules()
    assert rules.ensure() != []
    assert place.everything() != before
    assert rules.remove()
    assert place.everything() == before
    assert not rules.remove()


@pytest.mark.parametrize("back_end", ["legacy", "nft"])
def test_where_only_iptables_is_others_rules_are_as_before_too(
    place: Place, monkeypatch: pytest.MonkeyPatch, back_end: str
) -> None:
    monkeypatch.setattr(iptables, "find_tool", WAYS[f"iptables-{back_end}"])
    for table in ("mangle", "nat", "filter"):
        by_iptables(back_end, f"-t {table} -N OTHERS", f"-t {table} -A OUTPUT -j OTHERS")(
            place.node
        )
    by_iptables(
        back_end,
        "-t nat -A POSTROUTING -j OTHERS",
        "-A INPUT -j OTHERS",
        "-A FORWARD -j OTHERS",
        "-P FORWARD DROP",
    )(place.node)
    before = place.everything()
    rules = place.rules()
    assert rules.ensure() != []
    assert rules.ensure() == []
    assert rules.remove()
    assert place.everything() == before


@pytest.mark.usefixtures("all_tools")
@pytest.mark.parametrize(
    "text",
    [
        ADMIN.replace("drop", "accept"),
        ADMIN.replace("hook forward", "hook input"),
        ADMIN.replace("table inet", "table bridge"),
        ADMIN.replace("filter {\n    chain", "filter {\n    flags dormant\n    chain"),
        ADMIN.replace("drop;", "accept; counter accept; ct mark set 1;"),
        ADMIN.replace("inet filter", "ip kube-network-policies"),
        ADMIN.replace("inet filter", "inet calico"),
    ],
    ids=[
        "one that accepts all",
        "another hook",
        "a bridge's",
        "a dormant table",
        "rules that drop nothing",
        "where policies are decided",
        "where Calico decides them",
    ],
)
def test_no_accept_stands_where_none_is_needed(place: Place, text: str) -> None:
    by_nft(text)(place.node)
    place.rules().ensure()
    with_ours = place.everything()
    place.node.run(["nft", "delete", "table", "inet", "ebpflb"])
    assert "ebpflb" in with_ours
    assert "ebpflb" not in place.everything()


@pytest.mark.usefixtures("all_tools")
def test_looking_makes_no_legacy_table() -> None:
    """A table of the legacy tools is made by reading it."""
    with Lab("untouched") as lab:
        node = lab.node("n1")
        rules = Rules(node)
        for act in (rules.differences, rules.ensure, rules.differences, rules.remove):
            act()
        assert node.run(["cat", "/proc/net/ip_tables_names"], check=False).stdout == ""


# --- tables that cannot be written ---------------------------------------------------------------


@pytest.mark.usefixtures("all_tools")
def test_a_table_that_belongs_to_its_process_is_named(
    place: Place,
) -> None:
    """firewalld may keep its own so: nobody else can write there, but all else must be right."""
    keeper = place.node.popen(["nft", "-i"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert keeper.stdin is not None
    keeper.stdin.write(
        b"add table inet own { flags owner; }\n"
        b"add chain inet own forward { type filter hook forward priority 0; policy drop; }\n"
    )
    keeper.stdin.flush()
    wait_until(lambda: "hook forward" in place.everything(), what="the table is there")
    try:
        rules = place.rules()
        with capture_logs() as logged:
            assert [one.what for one in rules.ensure()] == ["nft table inet ebpflb"]
            assert rules.differences() == []
            assert rules.remove()
    finally:
        keeper.stdin.close()
        keeper.wait()
    (warning,) = (one for one in logged if one["event"] == MAY_BE_DROPPED)
    assert "inet own forward" in warning["where"]


@pytest.mark.parametrize(
    ("put", "has", "named"),
    [
        (by_iptables("legacy", "-P FORWARD DROP"), only("nft"), "IPv4 iptables' legacy back end"),
        (by_iptables("nft", "-P FORWARD DROP"), only("nft"), "IPv4 iptables' nft back end"),
        (by_nft(ADMIN), WAYS["iptables-nft"], "inet filter forward"),
        (
            by_nft(ADMIN.replace("inet filter", "ip filter").replace("forward {", "FORWARD {")),
            WAYS["nft"],
            "iptables-nft",
        ),
    ],
    ids=[
        "no iptables-legacy",
        "no iptables-nft",
        "no nft",
        "rules of nft in a table of iptables'",
    ],
)
def test_chains_that_no_tool_can_write_are_named_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, put: Any, has: Any, named: str
) -> None:
    """All else is done: a warning is no reason to serve nothing."""
    monkeypatch.setattr(iptables, "find_tool", has)
    put(place.node)
    if "iptables-nft" in named:
        place.node.run(["nft", "add", "rule", "ip", "filter", "FORWARD", "ct", "mark", "1", "drop"])
    rules = place.rules()
    with capture_logs() as logged:
        assert rules.ensure() != []
        assert rules.ensure() == []
    warnings = [one["where"] for one in logged if one["event"] == MAY_BE_DROPPED]
    assert len(warnings) == len(set(warnings))
    assert any(named in one for one in warnings), warnings


# --- tools ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("has", "missing"),
    [(only(), "nft or iptables"), (only("iptables"), "nft or ip6tables")],
    ids=["no tool at all", "iptables of one family alone"],
)
def test_without_tools_the_packages_are_named(
    place: Place, monkeypatch: pytest.MonkeyPatch, has: Any, missing: str
) -> None:
    monkeypatch.setattr(iptables, "find_tool", has)
    with pytest.raises(DatapathError) as raised:
        place.rules().ensure()
    assert missing in str(raised.value)
    assert "package nftables" in str(raised.value)
    assert "package iptables" in str(raised.value)


@pytest.fixture
def refusing(tmp_path: Path) -> Callable[[str], str]:
    """A tool as it is where the kernel lacks something."""

    def make(complaint: str) -> str:
        path = tmp_path / f"tool-{len(list(tmp_path.iterdir()))}"
        path.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{complaint}' >&2\nexit 1\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_where_the_kernel_refuses_nft_iptables_is_taken(
    place: Place, monkeypatch: pytest.MonkeyPatch, refusing: Callable[[str], str]
) -> None:
    nft = refusing("x:1:1: Error: Could not process rule\n masquerade fully-random")
    find = WAYS["iptables-nft"]
    monkeypatch.setattr(iptables, "find_tool", lambda name: nft if name == "nft" else find(name))
    rules = place.rules()
    with capture_logs() as logged:
        assert rules.ensure() != []
        assert rules.ensure() == []
    assert "EBPFLB-POSTROUTING" in place.everything()
    (warning,) = (one for one in logged if one["event"].startswith("nft cannot be used"))
    assert "masquerade fully-random" in warning["reason"]


def test_what_the_kernel_lacks_is_named_where_neither_will_do(
    place: Place, monkeypatch: pytest.MonkeyPatch, refusing: Callable[[str], str]
) -> None:
    nft = refusing("x:1:1: Error: Could not process rule\n masquerade fully-random")
    restore = refusing("iptables-restore: unable to initialize table nat")
    find = WAYS["iptables-nft"]

    def find_tool(name: str) -> str:
        if name == "nft":
            return nft
        return restore if name.endswith("-restore") and find(name) else find(name)

    monkeypatch.setattr(iptables, "find_tool", find_tool)
    with pytest.raises(DatapathError, match=r"masquerade fully-random.*initialize table nat"):
        place.rules().ensure()


@pytest.mark.parametrize("before", WAYS)
@pytest.mark.parametrize("now", WAYS)
def test_another_tool_takes_over_and_leaves_nothing_of_the_one_before(
    place: Place, monkeypatch: pytest.MonkeyPatch, before: str, now: str
) -> None:
    """The agent's image has changed: with iptables, where we are already is where we stay."""
    place.mark()
    monkeypatch.setattr(iptables, "find_tool", WAYS[before])
    place.rules().ensure()
    monkeypatch.setattr(iptables, "find_tool", WAYS[now])
    place.rules().ensure()
    assert place.passes(MARKED, Family.IPV4)
    text = place.everything()
    uses = {"nft": "table inet ebpflb", "iptables-nft": "jump EBPFLB-POSTROUTING"}
    if now == "nft":
        assert "EBPFLB" not in text
        assert uses["nft"] in text
    else:
        assert uses["nft"] not in text
        assert "EBPFLB-POSTROUTING" in text


@pytest.mark.parametrize("before", ["nft", "iptables-nft"])
def test_rules_in_nf_tables_go_without_any_tool(
    place: Place, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    monkeypatch.setattr(iptables, "find_tool", WAYS[before])
    by_iptables("nft", "-P FORWARD DROP")(place.node)
    by_nft(ADMIN)(place.node)
    place.rules().ensure()
    monkeypatch.setattr(iptables, "find_tool", only())
    assert place.rules().remove()
    assert "ebpflb" not in place.everything().lower()
    assert not place.rules().remove()


def test_rules_of_another_mark_are_replaced(place: Place, way: str, family: Family) -> None:
    place.rules(mark=0x8000, reject_mark=0x1000).ensure()
    place.mark()
    by_iptables("legacy" if way == "iptables-legacy" else "nft", "-P FORWARD DROP")(place.node)
    if way == "nft":
        by_nft(ADMIN)(place.node)
    place.rules(mark=0x8000, reject_mark=0x1000).ensure()
    assert not place.passes(MARKED, family, timeout_s=SILENCE_S)
    place.rules().ensure()
    assert place.passes(MARKED, family)
    text = place.everything()
    assert re.search(r"0x0*4000\b", text)
    assert not re.search(r"0x0*(8000|1000)\b", text)
    assert place.rules(mark=0x1, reject_mark=0x2).remove()
    assert "ebpflb" not in place.everything().lower()


# --- what others do to our rules -----------------------------------------------------------------

FLUSHES = {
    "nft flush ruleset": ("nft", ["nft flush ruleset"]),
    "our table is deleted": ("nft", ["nft delete table inet ebpflb"]),
    "a chain of ours is flushed": ("nft", ["nft flush chain inet ebpflb postrouting"]),
    "a chain of ours is deleted": (
        "nft",
        ["nft flush chain inet ebpflb output", "nft delete chain inet ebpflb output"],
    ),
    "our table sleeps": ("nft", ["nft add table inet ebpflb { flags dormant ; }"]),
    "an administrator's chain is loaded anew": (
        "nft",
        [
            "nft delete table inet filter",
            "nft add table inet filter",
            (
                "nft add chain inet filter forward { type filter hook forward priority 0 ; "
                "policy drop ; }"
            ),
        ],
    ),
    "a chain that could not drop now can": (
        "nft",
        ["nft add rule inet quiet forward tcp dport 1 drop"],
    ),
    "iptables-nft -F": ("nft", ["iptables-nft -F"]),
    "iptables-nft -F of our accepts": ("nft", ["iptables-nft -F EBPFLB-ACCEPT"]),
    "iptables-nft gets a policy": ("nft", ["ip6tables-nft -P FORWARD DROP"]),
    "iptables-nft -t nat -F": ("iptables-nft", ["iptables-nft -t nat -F"]),
    "iptables-nft -t nat -F POSTROUTING": ("iptables-nft", ["iptables-nft -t nat -F POSTROUTING"]),
    "iptables-nft -t mangle -F": ("iptables-nft", ["ip6tables-nft -t mangle -F"]),
    "nft flush ruleset under iptables": ("iptables-nft", ["nft flush ruleset"]),
    "iptables-legacy -F": ("iptables-legacy", ["iptables-legacy -F"]),
    "iptables-legacy -t nat -F": ("iptables-legacy", ["iptables-legacy -t nat -F POSTROUTING"]),
    "iptables-legacy gets a policy": ("nft", ["ip6tables-legacy -P FORWARD DROP"]),
}


@pytest.fixture
def in_haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch waits less long than it should."""
    monkeypatch.setattr(netfilterwatch, "LEGACY_S", 0.2)
    monkeypatch.setattr(netfilterwatch, "AT_MOST_EVERY_S", 0.05)


QUIET = ADMIN.replace("inet filter", "inet quiet").replace("drop", "accept")


@pytest.mark.parametrize(("has", "commands"), FLUSHES.values(), ids=FLUSHES)
def test_what_somebody_flushes_is_noticed_and_put_back(
    place: Place, in_haste: None, monkeypatch: pytest.MonkeyPatch, has: str, commands: list[str]
) -> None:
    monkeypatch.setattr(iptables, "find_tool", WAYS[has])
    by_nft(ADMIN + QUIET)(place.node)
    place.node.run(["iptables-nft", "-P", "FORWARD", "DROP"])
    if has == "iptables-legacy":
        by_iptables("legacy", "-P FORWARD DROP")(place.node)
    rules = place.rules()
    with rules.watched() as woken:
        rules.ensure()
        settle(woken, rules)
        for command in commands:
            place.node.run(command.split())
        assert rules.differences() != []
        assert woken.wait(NOTICE_S)
        assert rules.ensure() != []
        assert rules.differences() == []


def settle(woken: threading.Event, rules: Rules) -> None:
    """Until what we have done ourselves is told no more."""

    def is_quiet() -> bool:
        woken.clear()
        assert rules.ensure() == []
        return not woken.wait(QUIET_S)

    wait_until(is_quiet, timeout_s=NOTICE_S, what="nobody wakes us without a reason")


@pytest.mark.usefixtures("all_tools", "in_haste")
def test_what_does_not_concern_us_wakes_nobody(place: Place) -> None:
    by_nft(ADMIN)(place.node)
    rules = place.rules()
    with rules.watched() as woken:
        rules.ensure()
        settle(woken, rules)
        for number in range(20):
            place.node.run(["iptables-nft", "-t", "nat", "-N", f"CNI-{number}"])
            place.node.run(["nft", "add", "rule", "ip", "nat", f"CNI-{number}", "drop"])
        place.node.run(["nft", "delete", "table", "ip", "nat"])
        place.node.run(["nft", "add", "chain", "inet", "filter", "other"])
        assert not woken.is_set()
        place.node.run(["nft", "flush", "chain", "inet", "filter", "forward"])
        assert woken.wait(NOTICE_S)


# --- tunnels -------------------------------------------------------------------------------------


def test_outer_packets_of_a_tunnel_keep_their_ports(
    monkeypatch: pytest.MonkeyPatch, way: str, family: Family
) -> None:
    """K4: also when conntrack has forgotten them in the middle of a flow that is marked."""
    with Lab("tunnel", overlay="vxlan") as lab:
        node, other = lab.node("n1"), lab.node("n2")
        client, backend = node.pod("p1"), other.pod("far")
        backend.serve(udp=[MARKED])
        Rules(node).ensure()
        node.run(["nft", "-f", "-"], text_in=MARKS)
        host = backend.ipv6 if family is Family.IPV6 else backend.ipv4
        mine = client.ipv6 if family is Family.IPV6 else client.ipv4
        with node.capture() as capture, client.udp_loop(host, MARKED, interval_s=0.01) as loop:
            loop.wait_for(lambda one: one.good >= 20, timeout_s=30, what="it is in use")
            before = outer_flows(capture)
            assert len(before) == 1
            assert forget_outer_flows(node) > 0
            good = loop.outcome().good
            loop.wait_for(lambda one: one.good >= good + 20, timeout_s=30, what="it goes on")
            outcome = loop.stop()
            assert outcome.failed == 0
            assert mine not in outcome.seen_as
            assert outer_flows(capture) == before
