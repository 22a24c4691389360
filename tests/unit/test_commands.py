# SPDX-License-Identifier: Apache-2.0
"""What the commands decide without a kernel: usage, exit codes, what is wrong, what lasts."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner, Result

from ebpflb import __version__
from ebpflb.cli import check, main, map_dump, options, service_list, status
from ebpflb.cli.render import Styled
from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import inspect
from ebpflb.datapath.ebpf.inspect import Holder, MapFill
from ebpflb.datapath.ebpf.listing import PacketDevice, PacketHook
from ebpflb.datapath.ebpf.rows import (
    ListedService,
    NodeAddressRow,
    PortRow,
    Row,
    Service,
    ServiceBackend,
    ServiceFrontend,
    SettingsRow,
)
from ebpflb.errors import ConfigError, DatapathError, EbpflbError, SourceError
from ebpflb.model import parse_address
from ebpflb.planner.options import PlannerOptions


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


# --- the group -----------------------------------------------------------------------------------


def test_alone_it_prints_what_there_is() -> None:
    result = run()
    assert result.exit_code == 0
    for name in ("run", "map", "service", "check", "status", "cleanup", "demo", "bench"):
        assert f"\n  {name} " in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"ebpflb {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("mapp", "No such command 'mapp'"),
        ("map", "Usage: ebpflb map"),
        ("map dump frontend", "no map 'frontend'; there are frontends, node_addrs, ports"),
        ("map dump --service web", "'web' is not of the form NS/NAME"),
        ("map dump --service /web", "'/web' is not of the form NS/NAME"),
        ("map dump --service a/b/c", "'a/b/c' is not of the form NS/NAME"),
        ("map dump --service a/b:http", "give NS/NAME for all of its ports"),
        ("map dump stats --service a/b", "belong to no Service"),
        ("map dump -o wide", "Invalid value for '-o'"),
        ("service list -o xml", "Invalid value for '-o'"),
        ("status --frobnicate", "No such option"),
    ],
)
def test_wrong_usage_is_named_and_exits_2(arguments: str, said: str) -> None:
    result = run(*arguments.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize("name", ["sock_peer", "sock_udp"])
def test_socket_storage_cannot_be_listed(name: str) -> None:
    result = run("map", "dump", name)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.startswith(f"Error: list map {name}: ")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--flag x: wrong"), 2),
        (SourceError("no source"), 1),
        (DatapathError("read", "map"), 1),
        (DatapathError("read", "map", fatal=True), 3),
    ],
)
def test_each_error_of_ours_is_one_line_and_its_exit_code(
    error: EbpflbError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setattr(type(main), "get_command", lambda *_: broken)
    result = run("status")
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr == f"Error: {error}\n"


def test_any_other_exception_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(type(main), "get_command", lambda *_: broken)
    assert isinstance(run("status").exception, ZeroDivisionError)


def test_a_dump_imports_nothing_that_it_does_not_use() -> None:
    code = (
        "import sys\n"
        "from ebpflb.cli import main\n"
        "main(['map', 'dump', '-o', 'json', '--pin-path', '/nonexistent'], standalone_mode=False)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    costly = ("kubernetes", "rich", "bcc", "pyroute2", "yaml", "prometheus_client", "structlog")
    assert not [name for name in costly if f"'{name}'" in ran.stdout]


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "has"),
    [
        ("default/web", True),
        ("default/web:http", True),
        ("default/web2", False),
        ("default/web2:http", False),
        ("other/web", False),
        (None, False),
    ],
)
def test_a_service_has_all_of_its_ports(printed: str | None, has: bool) -> None:
    assert options.ServiceName("default", "web").has(printed) is has


# --- service list --------------------------------------------------------------------------------


def shown(*backends: tuple[str, str]) -> list[str]:
    made = [ServiceBackend(address, 80, state, local=False) for address, state in backends]
    return [
        item.text if isinstance(item, Styled) else item
        for item in service_list._some_backends(made)
    ]


def test_few_backends_are_all_shown() -> None:
    assert shown(("10.1.0.1", "ready"), ("10.1.0.2", "terminating"), ("fd00::1", "ready")) == [
        "10.1.0.1:80",
        "[fd00::1]:80",
        "10.1.0.2:80 terminating",
    ]


def test_many_backends_are_elided_and_the_terminating_ones_counted() -> None:
    ready = [(f"10.1.0.{i}", "ready") for i in range(1, 11)]
    assert shown(*ready) == ["10.1.0.1:80", "10.1.0.2:80", "10.1.0.3:80", "+7"]
    assert shown(("10.1.0.0", "terminating"), *ready) == [
        "10.1.0.1:80",
        "10.1.0.2:80",
        "10.1.0.3:80",
        "+7",
        "1 terminating",
    ]


SERVED = ListedService(
    Service(
        service="default/web:http",
        id=7,
        protocol="TCP",
        affinity_seconds=0,
        frontends=[
            ServiceFrontend("10.96.0.10", 80, "ClusterIP"),
            ServiceFrontend("*", 30080, "NodePort"),
            ServiceFrontend("203.0.113.9", 80, "LoadBalancer"),
        ],
        backends=[
            ServiceBackend("10.244.1.2", 8080, "ready", local=True),
            ServiceBackend("10.244.2.2", 8080, "ready", local=False),
            ServiceBackend("10.244.2.3", 8080, "terminating", local=True),
        ],
        internal_policy="Cluster",
        external_policy="Local",
        connections=12,
    ),
    notes=("none on this node for outside: refused",),
    frontend_marks=("", "", "source ranges: not for pods"),
    backend_marks=("", "only ClusterIP+inside", "only outside"),
)


def table(capsys: pytest.CaptureFixture[str], *, wide: bool) -> list[str]:
    """The cells of its one row, as they stand in a pipe."""
    service_list._print_table([SERVED], wide=wide)
    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "SERVICE",
        *(("ID", "POLICY") if wide else ()),
        *("PROTO", "AFFINITY", "CONNS", "FRONTENDS", "BACKENDS"),
    ]
    return re.split(" {2,}", row)


def test_the_narrow_table_says_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert table(capsys, wide=False)[-2:] == [
        "10.96.0.10:80, *:30080 NodePort, 203.0.113.9:80 LoadBalancer",
        (
            "none on this node for outside: refused, "
            "10.244.1.2:8080, 10.244.2.2:8080, 10.244.2.3:8080 terminating"
        ),
    ]


def test_the_wide_table_says_for_whom_and_for_whom_not(capsys: pytest.CaptureFixture[str]) -> None:
    cells = table(capsys, wide=True)
    assert cells[1:4] == ["7", "Cluster/Local", "TCP"]
    assert cells[-2:] == [
        (
            "10.96.0.10:80, *:30080 NodePort, "
            "203.0.113.9:80 LoadBalancer (source ranges: not for pods)"
        ),
        (
            "none on this node for outside: refused, 10.244.1.2:8080 local, "
            "10.244.2.2:8080 (only ClusterIP+inside), "
            "10.244.2.3:8080 terminating local (only outside)"
        ),
    ]


# --- map dump ------------------------------------------------------------------------------------


def dumped(capsys: pytest.CaptureFixture[str], *rows: Row) -> list[list[str]]:
    map_dump._print_rows(rows)
    lines = capsys.readouterr().out.splitlines()
    return [re.split(" {2,}", line.strip()) for line in lines]


def test_a_table_of_ports_has_both_sets(capsys: pytest.CaptureFixture[str]) -> None:
    port = PortRow(
        slot=3,
        id=7,
        service="default/web:http",
        protocol="TCP",
        family="IPv4",
        flags=["internal_local", "external_local"],
        cluster_base=12,
        cluster_count=2,
        cluster_flags=["affinity"],
        local_base=0,
        local_count=0,
        local_flags=["affinity", "none_local"],
        draining=1,
        affinity_seconds=60,
    )
    assert dumped(capsys, port) == [
        ["SLOT", "ID", "PROTO", "FAMILY", "CLUSTER", "LOCAL", "FLAGS", "AFFINITY", "SERVICE"],
        [
            *("3", "7", "TCP", "IPv4", "12-13 affinity +1 draining", "affinity none_local"),
            *("internal_local,external_local", "1m", "default/web:http"),
        ],
    ]


def test_a_table_of_settings_has_the_flags_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    row = SettingsRow(
        host_netns=3,
        udp_timeout_seconds=30,
        udp_stream_timeout_seconds=120,
        programs="00",
        packet_programs="00",
        flags=["loopback4", "tells_pods4"],
        state=[],
        tcp_timeout_seconds=0,
        tcp_closing_seconds=0,
        masquerade_mark="0x4000",
        reject_mark="0x2000",
        pods=["10.244.0.0/16", "fd00::/48"],
        options={"hostname": "n1"},
    )
    found = dict(dumped(capsys, row))
    assert found["flags"] == "loopback4,tells_pods4"
    assert (found["state"], found["pods"]) == ("-", "10.244.0.0/16,fd00::/48")
    assert found["options.hostname"] == "n1"


# --- check ---------------------------------------------------------------------------------------


def test_check_plans_by_what_the_agent_left() -> None:
    agents = PlannerOptions(
        node_name="n1", node_port_addresses=("192.168.50.0/24",), cluster_cidrs=("10.244.0.0/16",)
    )
    left = {"planner": msgspec.to_builtins(agents)}
    notes = check._Notes()
    assert check.planner_options("n1", left, notes) == agents
    other = check.planner_options("n2", left, notes)
    assert other == msgspec.structs.replace(agents, node_name="n2")
    assert notes._lines == []


@pytest.mark.parametrize("left", [{}, {"planner": {}}, {"planner": "all"}])
def test_check_says_when_it_must_plan_by_defaults(left: dict[str, object]) -> None:
    notes = check._Notes()
    assert check.planner_options("n1", left, notes) == PlannerOptions(node_name="n1")
    assert notes._lines == [
        "planned by kube-proxy's defaults: no agent has left word of its settings"
    ]


@pytest.mark.parametrize(
    ("left", "bind"),
    [({"protect_nodeports": True}, True), ({"protect_nodeports": False}, False), ({}, None)],
    ids=["protected", "not protected", "unknown: right as it is"],
)
def test_the_bind_hooks_are_expected_as_the_agent_was_told(
    left: dict[str, object], bind: bool | None, tmp_path: Path
) -> None:
    """NP-10."""
    assert inspect.attachment(tmp_path, tmp_path, left)._bind is bind


def test_check_plans_node_ports_at_this_nodes_addresses() -> None:
    """NP-01, NP-05."""
    read: check.Reader = lambda _notice: []  # noqa: E731
    truth = check.load_truth(
        read,
        PlannerOptions(node_name="n1", node_port_addresses=("192.168.50.0/24",)),
        lambda: frozenset(map(parse_address, ("192.168.50.1", "10.0.0.1"))),
        lambda _event: None,
    )
    assert truth.plan.node_ports.addresses == {parse_address("192.168.50.1")}


def difference(what: str) -> Difference:
    return Difference("default/web", "backends", what, "ready", "")


@pytest.mark.parametrize(
    ("looks", "lasts", "asked"),
    [
        ([""], "", 0),
        (["ab", "ab", "ab", "ab"], "ab", 3),
        (["ba", "", "b", "b"], "", 1),
        (["ab", "bc", "b", "bd"], "b", 3),
    ],
    ids=["nothing", "everything", "a sync under way", "one of several"],
)
def test_only_what_differs_at_every_look_counts(looks: list[str], lasts: str, asked: int) -> None:
    left = [[difference(one) for one in look] for look in looks]
    slept: list[float] = []
    found = check.lasting(left.pop(0), lambda: left.pop(0), sleep=slept.append)
    assert [one.what for one in found] == list(lasts)
    assert len(slept) == asked


# --- status --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("addresses", "flags", "line"),
    [
        (
            ["192.168.50.1", "fd50::1"],
            ["loopback4", "loopback6", "tells_pods4"],
            "at 192.168.50.1, fd50::1; for the node itself at 127.0.0.0/8 and ::1",
        ),
        (["192.168.50.1"], [], "at 192.168.50.1"),
        ([], ["loopback4"], "for the node itself at 127.0.0.0/8"),
        ([], ["tells_pods6"], "answer nowhere"),
        (
            [f"10.0.0.{i}" for i in range(1, 10)],
            [],
            "at 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4, 10.0.0.5, 10.0.0.6 and 3 more",
        ),
    ],
    ids=["everywhere", "addresses", "the loopback alone", "nowhere", "many addresses"],
)
def test_where_node_ports_answer_is_one_line(
    addresses: list[str], flags: list[str], line: str
) -> None:
    found = status.where_node_ports_answer(map(NodeAddressRow, addresses), flags)
    assert found.addresses == addresses
    item = status._answering(found)
    assert (item.text if isinstance(item, Styled) else item) == line


@pytest.mark.parametrize(
    ("node_ports", "types", "warns"),
    [
        (status.NodePorts([], []), ["ClusterIP", "NodePort"], True),
        (status.NodePorts([], []), ["ClusterIP"], False),
        (status.NodePorts(["192.168.50.1"], []), ["NodePort"], False),
        (status.NodePorts([], ["::1"]), ["NodePort"], False),
    ],
    ids=["nowhere", "no NodePort", "an address", "the loopback alone"],
)
def test_node_ports_that_nobody_can_dial_are_a_warning(
    node_ports: status.NodePorts, types: list[str], warns: bool
) -> None:
    frontends = [ServiceFrontend("*", 1, one) for one in types]
    service = msgspec.structs.replace(SERVED.service, frontends=frontends)
    warnings = status.unanswered(node_ports, [service])
    assert bool(warnings) is warns
    assert all("--nodeport-addresses" in text for text in warnings)


GOOD = status.Agent(
    running=True,
    process=7,
    answers=True,
    healthy=True,
    last_sync_age_seconds=1.0,
    lag_seconds=0.0,
    service_ports_failed=0,
    objects_rejected=0,
)
ATTACHED = [status.Hook("connect4", "connect4", 5, "attached")]


def judged(
    agent: status.Agent = GOOD,
    programs: list[status.Hook] = ATTACHED,
    maps: tuple[MapFill, ...] = (),
    counters: Mapping[str, int] = {},
) -> tuple[str, str]:
    problems, warnings = status.judge(agent, programs, maps, counters)
    return "; ".join(problems), "; ".join(warnings)


def test_nothing_is_wrong() -> None:
    maps = (
        MapFill("frontends", 89, 100, 1),
        MapFill("stats", None, 7, 1),
        MapFill("sock_udp", None, None, 1),
    )
    assert judged(maps=maps, counters={"foreign_backend": 0, "refused": 9}) == ("", "")


def test_hooks_with_one_ailment_are_one_problem() -> None:
    programs = [
        status.Hook("connect4", "", 0, "not attached"),
        status.Hook("connect6", "connect6", 5, "attached"),
        status.Hook("sendmsg4", "", 0, "not attached"),
    ]
    assert judged(programs=programs)[0] == "not translated at connect4 sendmsg4: not attached"


INGRESS = PacketHook("ingress", "ebpflb_ingress", 7, "tcx", [], [], "first, by tcx", "attached")
EGRESS = PacketHook(
    "egress", "ebpflb_egress", 8, "clsact", ["x"], [], "last, by clsact", "attached"
)
_SHOWN = PacketDevice("eth0", 2, "uplink", [INGRESS, EGRESS])


@pytest.mark.parametrize(
    ("path", "problems", "warnings"),
    [
        pytest.param(
            status.PacketPath(is_wanted=True, state=["sees_host"], devices=[_SHOWN]),
            [],
            [],
            id="all is well",
        ),
        pytest.param(
            status.PacketPath(
                is_wanted=True,
                state=[],
                devices=[
                    PacketDevice(
                        "eth0",
                        2,
                        "uplink",
                        [INGRESS, msgspec.structs.replace(EGRESS, state="not attached")],
                    )
                ],
            ),
            ["packets are not translated at eth0 egress: not attached"],
            [],
            id="a program that is gone",
        ),
        pytest.param(
            status.PacketPath(
                is_wanted=True,
                state=[],
                devices=[
                    PacketDevice(
                        "eth0",
                        2,
                        "uplink",
                        [
                            msgspec.structs.replace(
                                INGRESS, before=["u32, clsact priority 1"], possible="behind u32"
                            ),
                            EGRESS,
                        ],
                    )
                ],
            ),
            [],
            [
                (
                    "at eth0 ingress the program cannot be where it should: behind u32; around it "
                    "run u32, clsact priority 1"
                )
            ],
            id="another that keeps ours from its place",
        ),
        pytest.param(
            status.PacketPath(is_wanted=True, state=[], devices=[]),
            [],
            ["no device has programs: packets from outside reach no Service"],
            id="no device",
        ),
        pytest.param(
            status.PacketPath(is_wanted=True, state=[], devices=None),
            [],
            ["this is not the node's network namespace: its devices are not seen from here"],
            id="from elsewhere",
        ),
        pytest.param(
            status.PacketPath(is_wanted=False, state=[], devices=[]), [], [], id="switched off"
        ),
    ],
)
def test_what_is_wrong_with_the_packet_path(
    path: status.PacketPath, problems: list[str], warnings: list[str]
) -> None:
    assert status.judge_packets(path) == (problems, warnings)


def test_a_table_of_fragments_that_is_full_is_as_it_should_be() -> None:
    assert judged(maps=(MapFill("fragments", 100, 100, 1),)) == ("", "")


def test_a_full_map_is_a_problem_unless_it_makes_room_itself() -> None:
    full = (MapFill("members", 90, 100, 1), MapFill("affinity", 100, 100, 1))
    problem, warning = judged(maps=full)
    assert problem.startswith("map members: 90 of 100 entries are used: ")
    assert "--map-size members=N" in problem
    assert warning.startswith("map affinity: 100 of 100 entries are used, ")


def test_a_foreign_backend_is_a_problem_and_lost_memory_a_warning() -> None:
    problem, warning = judged(
        counters={"foreign_backend": 2, "udp_conn_full": 3, "no_socket_memory": 4}
    )
    assert problem.startswith("counter foreign_backend is 2, it must stay 0")
    assert "udp_conn_full is 3" in warning
    assert "no_socket_memory is 4" in warning


@pytest.mark.parametrize(
    ("agent", "problem", "warning"),
    [
        (status.Agent(running=False), "", "no agent runs"),
        (status.Agent(running=True), "", "does not answer"),
        (status.Agent(running=True, answers=True), "", "has not synced yet"),
    ],
    ids=["none", "a silent one", "one that waits"],
)
def test_the_agent_is_a_warning(agent: status.Agent, problem: str, warning: str) -> None:
    found = judged(agent)
    assert found[0] == problem
    assert warning in found[1]


def test_an_agent_that_fails_is_a_problem_that_names_the_service_port() -> None:
    agent = status.Agent(
        running=True,
        answers=True,
        healthy=False,
        last_sync_age_seconds=1.0,
        service_ports_failed=1,
        objects_rejected=2,
        failures={"default/web:http": "the map is full"},
    )
    problem, warning = judged(agent)
    assert "the agent is not healthy" in problem
    assert "default/web:http: not programmed: the map is full" in problem
    assert "wholly or in part: 2" in warning


METRICS = b"""# HELP ebpflb_build_info Version and mode; always 1.
# TYPE ebpflb_build_info gauge
ebpflb_build_info{mode="ebpf",version="0.1.0"} 1.0
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv4"} 1.0e+03
kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"} 1.001e+03
kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds{ip_family="IPv4"} 1003.0
ebpflb_service_ports_failed 1.0
ebpflb_objects_rejected 2.0
odd line without a number
"""


def test_metrics_are_read_by_name_whatever_their_labels() -> None:
    found = status.parse_metrics(METRICS)
    assert found["kubeproxy_sync_proxy_rules_last_timestamp_seconds"] == 1001.0
    assert found["ebpflb_service_ports_failed"] == 1.0
    assert status.parse_metrics(b"") == {}


Answers = dict[str, bytes]


@pytest.fixture
def answers() -> Iterator[tuple[Answers, str]]:
    """What a server answers by path, and where it is."""
    bodies: Answers = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bodies.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            """Not of interest."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield bodies, f"0.0.0.0:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_the_agent_is_asked_where_it_said_it_listens(answers: tuple[Answers, str]) -> None:
    bodies, address = answers
    bodies["/metrics"] = METRICS
    bodies["/healthz"] = b'{"healthy": true, "nodeEligible": true}'
    bodies["/failures"] = b'{"default/web": "the map is full"}'
    left = {"metrics_bind_address": address, "healthz_bind_address": address}
    assert status.ask_agent(Holder(42), left, now_s=1005.5) == status.Agent(
        running=True,
        process=42,
        answers=True,
        healthy=True,
        last_sync_age_seconds=4.5,
        lag_seconds=2.5,
        service_ports_failed=1,
        objects_rejected=2,
        failures={"default/web": "the map is full"},
    )


def test_another_program_at_the_agents_address_is_not_believed(
    answers: tuple[Answers, str],
) -> None:
    bodies, address = answers
    bodies["/metrics"] = METRICS.replace(b"ebpflb_build_info", b"kubernetes_build_info")
    found = status.ask_agent(Holder(42), {"metrics_bind_address": address})
    assert found == status.Agent(running=True, process=42)
    assert not status.ask_agent(None, {"metrics_bind_address": address}).running


def test_an_agent_whose_lock_cannot_be_seen_from_here_is_known_by_its_answer(
    answers: tuple[Answers, str],
) -> None:
    bodies, address = answers
    bodies["/metrics"] = METRICS
    found = status.ask_agent(None, {"metrics_bind_address": address})
    assert (found.running, found.process, found.answers) == (True, None, True)


@pytest.mark.parametrize(
    "left", [{}, {"metrics_bind_address": ""}, {"metrics_bind_address": "nonsense"}]
)
def test_an_agent_without_an_address_does_not_answer(left: dict[str, object]) -> None:
    assert status.ask_agent(Holder(42), left) == status.Agent(running=True, process=42)


def test_without_a_holder_and_an_answer_no_agent_runs() -> None:
    assert status.ask_agent(None, {"metrics_bind_address": "127.0.0.1:1"}) == status.Agent(
        running=False
    )


@pytest.mark.parametrize(
    ("struct", "promised"),
    [
        (
            status.Status,
            (
                "version mode node pin_path cgroup service_ports backends node_ports agent "
                "programs packet_path maps counters problems warnings"
            ),
        ),
        (
            status.Agent,
            (
                "running process answers healthy last_sync_age_seconds lag_seconds "
                "service_ports_failed objects_rejected failures"
            ),
        ),
        (status.NodePorts, "addresses loopback"),
        (status.Hook, "hook program program_id state"),
        (status.PacketPath, "is_wanted state devices"),
        (PacketDevice, "device index role hooks"),
        (PacketHook, "direction program program_id way before behind possible state"),
        (Difference, "service where what expected actual"),
    ],
    ids=[
        "status",
        "agent",
        "node_ports",
        "programs",
        "packet_path",
        "devices",
        "hooks of a device",
        "check",
    ],
)
def test_json_keys_are_as_documented(struct: type[status.Status], promised: str) -> None:
    assert struct.__struct_encode_fields__ == tuple(promised.split())
