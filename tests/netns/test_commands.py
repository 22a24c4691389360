# SPDX-License-Identifier: Apache-2.0
"""The commands on real maps: with no agent at all, and beside one that runs."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from ebpflb.cli import main
from ebpflb.datapath.ebpf import abi, inspect, libbpf
from ebpflb.datapath.ebpf.attach import HOOKS
from ebpflb.datapath.ebpf.maps import LINKS, PinFolder, sizes
from ebpflb.datapath.ebpf.tables import KernelTables
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.lab import Lab, Node, wait_until
from ebpflb.model import (
    Backend,
    Family,
    Frontend,
    FrontendKind,
    NodePorts,
    Plan,
    PlannedPort,
    Policy,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
    parse_address,
    unspecified,
)
from tests.builders import (
    ApiObject,
    backend,
    cluster_ip,
    endpoint_object,
    node_ip,
    pod_ip,
    port_name,
    service_object,
    slice_object,
)
from tests.flows import made, only
from tests.netns.agents import SERVES_PACKETS, SMALL, Agent
from tests.netns.services import Endpoint, Manifests, Spec

SMALL_SIZES = {
    "frontends": 64,
    "ports": 16,
    "backends": 128,
    "affinity": 16,
    "members": 64,
    "udp_conn": 16,
    "names": 16,
    "node_addrs": 16,
    "flows_new": 16,
    "conntrack": 16,
    "source_ranges": 16,
    "service_addrs": 64,
}
EVERY_MAP = [
    "frontends",
    "node_addrs",
    "ports",
    "backends",
    "affinity",
    "members",
    "udp_conn",
    "flows_new",
    "conntrack",
    "fragments",
    "source_ranges",
    "service_addrs",
    "devices",
    "connections",
    "stats",
    "probe",
    "names",
    "settings",
]


NO_NODE_PORTS = NodePorts()


class NoGrace:
    """Nobody reads these maps."""

    def __init__(self) -> None:
        self._drawn = 0

    def ticket(self) -> int:
        self._drawn += 1
        return self._drawn

    def done(self) -> int:
        return self._drawn

    def close(self) -> None:
        """Nothing is held."""


def planned(
    name: ServicePortName, number: int, *backends: Backend, affinity_s: int = 0, node_port: int = 0
) -> PlannedPort:
    """With a NodePort its external policy is Local."""
    address = parse_address(cluster_ip(number, name.family))
    port = 53 if name.protocol is Protocol.UDP else 80
    frontends = [Frontend(address, port, name.protocol, FrontendKind.CLUSTER_IP)]
    if node_port:
        anywhere = unspecified(name.family)
        frontends.append(Frontend(anywhere, node_port, name.protocol, FrontendKind.NODE_PORT))
    here = tuple(one for one in backends if one.local)
    nothing = Verdict.DROP if backends else Verdict.REJECT
    return PlannedPort(
        name=name,
        frontends=tuple(frontends),
        cluster=Selection(Verdict.FORWARD if backends else nothing, backends),
        local=Selection(Verdict.FORWARD if here else nothing, here),
        draining=(),
        affinity_s=affinity_s,
        internal_policy=Policy.CLUSTER,
        external_policy=Policy.LOCAL if node_port else Policy.CLUSTER,
    )


WEB = planned(port_name(), 10, backend(pod_ip(1)), backend(pod_ip(2), local=True), affinity_s=60)
WEB6 = planned(port_name(family=Family.IPV6), 10, backend(pod_ip(1, Family.IPV6)))
DNS = planned(port_name("dns", "", protocol=Protocol.UDP), 11, backend(pod_ip(3), 53))
EMPTY = planned(port_name("empty", ""), 12)


def ebpflb(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def as_json(*arguments: str | Path, code: int = 0) -> Any:
    result = ebpflb(*arguments, "-o", "json")
    assert (result.exit_code, result.stderr) == (code, "")
    return json.loads(result.stdout)


def remove_pins(pin_path: Path) -> None:
    """Whatever a test has left there."""
    for path in sorted(pin_path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    with contextlib.suppress(FileNotFoundError):
        pin_path.rmdir()


@pytest.fixture
def pin_path() -> Iterator[Path]:
    """A folder of the BPF file system that is not there yet, and gone afterwards."""
    path = Path(f"/sys/fs/bpf/ebpflb-test-{os.getpid()}-commands")
    yield path
    remove_pins(path)


@pytest.fixture
def pins(pin_path: Path) -> Path:
    """Maps of four service ports; no program, no agent."""
    fill(pin_path, WEB, WEB6, DNS, EMPTY)
    return pin_path


def fill(pin_path: Path, *ports: PlannedPort, node_ports: NodePorts = NO_NODE_PORTS) -> None:
    folder = PinFolder(pin_path)
    folder.create()
    maps = folder.open_or_create(sizes(SMALL_SIZES))
    with contextlib.closing(KernelTables(maps)) as tables:
        plan = Plan({one.name: one for one in ports}, node_ports)
        report = Writer(tables, NoGrace()).sync(plan, None)
    assert not report.failed
    for one in maps.values():
        one.close()


def write(pin_path: Path, name: str, key: bytes, value: bytes) -> None:
    """One entry, behind everybody's back."""
    maps = PinFolder(pin_path).open_existing()
    libbpf.update(maps[name].fd, name, key, value)
    for one in maps.values():
        one.close()


def id_of(pins: Path, service: str, family: str = "IPv4") -> int:
    rows = as_json("map", "dump", "ports", "--pin-path", pins)["ports"]
    (found,) = [r["id"] for r in rows if (r["service"], r["family"]) == (service, family)]
    return int(found)


# --- map dump ------------------------------------------------------------------------------------


def test_a_dump_has_every_map_in_order(pins: Path) -> None:
    found = as_json("map", "dump", "--pin-path", pins)
    assert list(found) == EVERY_MAP
    assert all(isinstance(rows, list) for rows in found.values())
    assert found == as_json("map", "dump", "--pin-path", pins)


def test_a_dump_resolves_names(pins: Path) -> None:
    web, web6 = id_of(pins, "default/web:http"), id_of(pins, "default/web:http", "IPv6")
    found = as_json("map", "dump", "frontends", "backends", "--pin-path", pins)
    assert list(found) == ["frontends", "backends"]
    assert found["frontends"][0] == {
        "address": cluster_ip(10),
        "port": 80,
        "protocol": "TCP",
        "type": "ClusterIP",
        "scope": "internal",
        "id": web,
        "service": "default/web:http",
    }
    of_web = [row for row in found["backends"] if row["service"] == "default/web:http"]
    assert [(row["address"], row["flags"], row["ranges"], row["id"]) for row in of_web] == [
        (pod_ip(1), [], ["cluster"], web),
        (pod_ip(2), ["local"], ["cluster"], web),
        (pod_ip(2), ["local"], ["local"], web),
        (pod_ip(1, Family.IPV6), [], ["cluster"], web6),
    ]


def test_a_dump_tells_the_age_of_affinity_and_connected_sockets(pins: Path) -> None:
    web, dns = id_of(pins, "default/web:http"), id_of(pins, "default/dns")
    used = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - 5 * 10**9
    pod = parse_address(pod_ip(1))
    key = abi.LAYOUTS["affinity_key"].pack(struct.pack("=QQ", 99, 0), web, 0)
    value = abi.LAYOUTS["affinity_value"].pack(7, (8080).to_bytes(2), pod, used, 7)
    write(pins, "affinity", key, value)
    udp = abi.LAYOUTS["udp_conn"].pack(parse_address(pod_ip(3)), (53).to_bytes(2), 0, 0, dns, 99)
    write(pins, "udp_conn", struct.pack("=Q", 1234), udp)
    found = as_json("map", "dump", "affinity", "udp_conn", "--pin-path", pins)
    (record,) = found["affinity"]
    assert 5.0 <= record.pop("age_seconds") < 60.0
    assert record == {
        "client": "99",
        "path": "socket",
        "address": pod_ip(1),
        "port": 8080,
        "id": web,
        "service": "default/web:http",
    }
    assert found["udp_conn"] == [
        {
            "socket": 1234,
            "netns": 99,
            "address": pod_ip(3),
            "port": 53,
            "id": dns,
            "service": "default/dns",
        }
    ]


def test_a_service_has_its_entries_of_every_map_and_no_others(pins: Path) -> None:
    found = as_json("map", "dump", "--service", "default/web", "--pin-path", pins)
    assert list(found) == [name for name in EVERY_MAP if name in inspect.OF_SERVICES]
    assert {row["service"] for rows in found.values() for row in rows} == {"default/web:http"}
    counts = {name: len(rows) for name, rows in found.items()}
    assert counts == {
        "frontends": 2,
        "ports": 2,
        "backends": 4,
        "affinity": 0,
        "members": 3,
        "udp_conn": 0,
        "flows_new": 0,
        "conntrack": 0,
        "source_ranges": 0,
        "connections": 2,
        "names": 2,
    }


def test_a_flow_can_be_followed_from_the_client_to_the_backend_and_back(pins: Path) -> None:
    web = id_of(pins, "default/web:http")
    now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    times: dict[str, Any] = {"now_ns": now_ns, "idle": (5, 5), "created_ns": now_ns - 60 * 10**9}
    whole = made(Protocol.TCP, backend=(pod_ip(1), 8080), port_at_backend=1234, id=web, **times)
    ends: dict[str, Any] = {"client": ("fd60::9", 5), "frontend": ("fd50::1", 80)}
    half = only(made(Protocol.TCP, **ends, id=web, **times), "forward")
    foreign = made(Protocol.UDP, frontend=(node_ip(1), 30080), foreign=True, **times)
    for flow in (whole, half, foreign):
        for key, value in flow.items:
            write(pins, "conntrack", key, value)
    first, *others = as_json("map", "dump", "conntrack", "--pin-path", pins)["conntrack"]
    assert 5.0 <= first.pop("idle_seconds") < first.pop("age_seconds") < 120.0
    assert first == {
        "protocol": "TCP",
        "client": "192.0.2.9",
        "client_port": 40000,
        "frontend": "10.96.0.10",
        "frontend_port": 80,
        "backend": pod_ip(1),
        "backend_port": 8080,
        "port_at_backend": 1234,
        "state": "open",
        "flags": [],
        "halves": ["forward", "reverse"],
        "id": web,
        "service": "default/web:http",
    }
    assert [(row["halves"], row["state"]) for row in others] == [
        (["forward"], "open"),
        (["forward"], "foreign"),
    ]
    of_web = ("map", "dump", "conntrack", "--service", "default/web", "--pin-path", pins)
    assert len(as_json(*of_web)["conntrack"]) == 2
    lines = ebpflb("map", "dump", "conntrack", "--pin-path", pins).stdout.splitlines()
    assert lines[0] == f"conntrack  3 flows, 4 of {SMALL_SIZES['conntrack']} entries"
    cells = [re.split(r"  +", line) for line in lines[3:]]
    assert cells[0][1:5] == [
        *("192.0.2.9:40000 (as 1234)", "10.96.0.10:80", f"{pod_ip(1)}:8080", "open")
    ]
    assert (cells[1][1], cells[1][-2]) == ("[fd60::9]:5", "no reverse")
    assert cells[2][2:5] == [f"{node_ip(1)}:30080", "-", "foreign"]


def test_yaml_and_table_say_what_json_says(pins: Path) -> None:
    found = as_json("map", "dump", "--pin-path", pins)
    as_yaml = ebpflb("map", "dump", "-o", "yaml", "--pin-path", pins)
    assert yaml.safe_load(as_yaml.stdout) == found
    table = ebpflb("map", "dump", "--pin-path", pins)
    assert (table.exit_code, table.stderr) == (0, "")
    lines = table.stdout.splitlines()
    for name, rows in found.items():
        assert any(line.startswith(f"{name}  {len(rows)} of ") for line in lines)
    assert "Which service port does this address, port and protocol belong to?" in lines
    assert max(map(len, lines)) > 80


def test_left_over_slots_are_counted_not_shown(pins: Path) -> None:
    without = ebpflb("map", "dump", "backends", "--pin-path", pins).stdout
    assert "left-over" not in without
    stale = abi.LAYOUTS["backend"].pack(parse_address(pod_ip(9)), bytes(2), 0, 4711)
    write(pins, "backends", struct.pack("=I", 100), stale)
    table = ebpflb("map", "dump", "backends", "--pin-path", pins).stdout
    assert table == f"{without}and 1 left-over slots in no range\n"


def test_an_unknown_service_is_said(pins: Path) -> None:
    result = ebpflb("map", "dump", "--service", "default/nowhere", "--pin-path", pins)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "default/nowhere" in result.stderr


NODE_PORTED = planned(port_name("np", ""), 13, backend(pod_ip(4)), node_port=30080)
ANSWERS = NodePorts(
    frozenset(map(parse_address, ("fd50::1", node_ip(1)))), frozenset({Family.IPV4})
)


def test_node_ports_are_shown_as_they_are(pin_path: Path) -> None:
    fill(pin_path, NODE_PORTED, node_ports=ANSWERS)
    found = as_json("map", "dump", "--pin-path", pin_path)
    assert found["frontends"][0] | {"id": 0} == {
        "address": "0.0.0.0",
        "port": 30080,
        "protocol": "TCP",
        "type": "NodePort",
        "scope": "external",
        "id": 0,
        "service": "default/np",
    }
    assert found["node_addrs"] == [{"address": node_ip(1)}, {"address": "fd50::1"}]
    assert found["settings"][0]["flags"] == ["loopback4"]
    (port,) = found["ports"]
    assert (port["flags"], port["cluster_count"]) == (["external_local"], 1)
    assert (port["local_count"], port["local_flags"]) == (0, ["none_local"])
    status = as_json("status", "--pin-path", pin_path, code=1)
    assert status["node_ports"] == {
        "addresses": [node_ip(1), "fd50::1"],
        "loopback": ["127.0.0.0/8"],
    }
    page = ebpflb("status", "--pin-path", pin_path).stdout
    assert f"at {node_ip(1)}, fd50::1; for the node itself at 127.0.0.0/8\n" in page
    (one,) = as_json("service", "list", "--pin-path", pin_path)
    assert one["frontends"][1] == {"address": "*", "port": 30080, "type": "NodePort"}
    wide = ebpflb("service", "list", "-o", "wide", "--pin-path", pin_path).stdout
    assert "none on this node for outside: refused" in wide
    assert f"{pod_ip(4)}:8080 (only ClusterIP+inside)" in wide


def test_node_ports_that_answer_nowhere_are_a_warning(pin_path: Path) -> None:
    fill(pin_path, NODE_PORTED)
    warnings = as_json("status", "--pin-path", pin_path, code=1)["warnings"]
    assert any(text.startswith("NodePorts answer nowhere") for text in warnings)


# --- service list --------------------------------------------------------------------------------


def test_the_list_merges_families_and_counts_connections(pins: Path) -> None:
    web, web6 = id_of(pins, "default/web:http"), id_of(pins, "default/web:http", "IPv6")
    cpus = libbpf.possible_cpus()
    for one in (web, web6):
        index = struct.pack("=I", one & 0xFFFFF)
        write(pins, "connections", index, struct.pack(f"={cpus}Q", *[2] * cpus))
    found = as_json("service", "list", "--pin-path", pins)
    assert [(one["service"], one["protocol"]) for one in found] == [
        ("default/dns", "UDP"),
        ("default/empty", "TCP"),
        ("default/web:http", "TCP"),
    ]
    assert found[2] == {
        "service": "default/web:http",
        "id": web,
        "protocol": "TCP",
        "affinity_seconds": 60,
        "frontends": [
            {"address": cluster_ip(10), "port": 80, "type": "ClusterIP"},
            {"address": cluster_ip(10, Family.IPV6), "port": 80, "type": "ClusterIP"},
        ],
        "backends": [
            {"address": pod_ip(1), "port": 8080, "state": "ready", "local": False},
            {"address": pod_ip(2), "port": 8080, "state": "ready", "local": True},
            {"address": pod_ip(1, Family.IPV6), "port": 8080, "state": "ready", "local": False},
        ],
        "internal_policy": "Cluster",
        "external_policy": "Cluster",
        "connections": 4 * cpus,
    }
    as_yaml = ebpflb("service", "list", "-o", "yaml", "--pin-path", pins)
    assert yaml.safe_load(as_yaml.stdout) == found


@pytest.mark.parametrize("form", ["table", "wide"])
def test_the_table_has_one_line_a_service_port_in_a_pipe(pins: Path, form: str) -> None:
    result = ebpflb("service", "list", "-o", form, "--pin-path", pins)
    assert (result.exit_code, result.stderr) == (0, "")
    header, dns, empty, web = result.stdout.splitlines()
    assert header.split()[0] == "SERVICE"
    assert dns.startswith("default/dns ")
    assert "none: refused" in empty
    assert f"{cluster_ip(10)}:80, [{cluster_ip(10, Family.IPV6)}]:80" in web


def test_an_empty_list_is_said_on_standard_error(pin_path: Path) -> None:
    fill(pin_path)
    table = ebpflb("service", "list", "--pin-path", pin_path)
    assert (table.exit_code, table.stdout) == (0, "")
    assert table.stderr == "No service port is programmed.\n"
    assert as_json("service", "list", "--pin-path", pin_path) == []


# --- what is missing or forbidden ----------------------------------------------------------------

READERS = (("map", "dump"), ("service", "list"), ("check",), ("status",))


@pytest.mark.parametrize("command", READERS, ids=" ".join)
def test_nothing_pinned_is_one_line_and_exits_1(command: tuple[str, ...], pin_path: Path) -> None:
    for _ in range(2):
        result = ebpflb(*command, "--pin-path", pin_path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert result.stderr.startswith(f"Error: read {pin_path}: nothing of ebpflb is pinned")
        assert result.stderr.count("\n") == 1
        pin_path.mkdir(exist_ok=True)  # an empty folder is nothing too


@pytest.mark.parametrize("command", [*READERS, ("cleanup",)], ids=" ".join)
def test_no_privileges_is_one_line_and_exits_3(command: tuple[str, ...], pins: Path) -> None:
    if not shutil.which("setpriv"):
        pytest.skip("machine lacks setpriv")
    ran = subprocess.run(
        [
            *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
            *(sys.executable, "-m", "ebpflb", *command, "--pin-path", str(pins)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (3, ""), ran.stderr
    assert ran.stderr.startswith(f"Error: read {pins}: Permission denied")
    assert ran.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [*READERS, ("cleanup",)], ids=" ".join)
def test_a_pin_path_that_is_a_file_is_wrong_usage(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = ebpflb(*command, "--pin-path", file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"Error: --pin-path {file}: it is no folder\n"


def test_check_without_a_source_says_what_to_give(pins: Path) -> None:
    result = ebpflb("check", "--pin-path", pins)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--manifests" in result.stderr


def test_a_cgroup_that_is_none_exits_3(pins: Path, tmp_path: Path) -> None:
    result = ebpflb("status", "--pin-path", pins, "--cgroup", tmp_path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert f"{tmp_path}" in result.stderr


# --- without programs ----------------------------------------------------------------------------


def test_status_of_maps_alone_names_every_hook(pins: Path) -> None:
    found = as_json("status", "--pin-path", pins, code=1)
    assert {one["hook"] for one in found["programs"]} == {hook.name for hook in HOOKS}
    assert {one["state"] for one in found["programs"]} == {"not attached"}
    (problem,) = found["problems"]
    assert problem.startswith("not translated at connect4 ")
    assert found["warnings"] == [
        "no agent runs: the data path stays in force, but follows no change"
    ]
    assert (found["service_ports"], found["backends"]) == (3, 4)
    used = {one["map"]: (one["entries"], one["max_entries"]) for one in found["maps"]}
    assert list(used) == list(abi.MAPS)
    assert used["frontends"] == (6, 64)  # two are the probe's
    assert used["ports"] == (4, 16)
    assert used["backends"] == (5, 128)
    assert used["node_addrs"] == (0, 16)
    assert used["members"] == (4, 64)
    assert used["names"] == (4, 16)
    assert used["sock_peer"] == (None, None)
    assert used["connections"] == (None, 16)
    assert used["source_ranges"] == (0, 16)
    assert used["service_addrs"] == (7, 64)
    weightless = {one["map"] for one in found["maps"] if not one["bytes"]}
    assert weightless <= {"source_ranges"}, "an empty trie takes nothing"


def test_a_full_map_is_a_problem(pin_path: Path) -> None:
    fill(pin_path, *(planned(port_name(f"s{i}", ""), 20 + i) for i in range(15)))
    problems = as_json("status", "--pin-path", pin_path, code=1)["problems"]
    assert any(text.startswith("map ports: 15 of 16 entries are used") for text in problems)


def test_the_holder_of_the_lock_is_seen_without_being_disturbed(pins: Path) -> None:
    assert inspect.holder(pins) is None
    with PinFolder(pins).lock(lambda _: None):
        assert inspect.holder(pins) == inspect.Holder(os.getpid())
        assert as_json("status", "--pin-path", pins, code=1)["agent"]["process"] == os.getpid()
    assert inspect.holder(pins) is None


# --- cleanup -------------------------------------------------------------------------------------


def test_cleanup_removes_all_and_twice_is_no_error(pins: Path) -> None:
    result = ebpflb("cleanup", "--pin-path", pins)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"removed   {pins}" in result.stdout
    assert not pins.exists()
    again = ebpflb("cleanup", "--pin-path", pins)
    assert (again.exit_code, again.stdout) == (0, f"Nothing to remove: {pins} does not exist.\n")


def test_cleanup_does_not_touch_the_folder_of_a_running_writer(pins: Path) -> None:
    before = sorted(pins.rglob("*"))
    with PinFolder(pins).lock(lambda _: None):
        result = ebpflb("cleanup", "--pin-path", pins)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"process {os.getpid()}" in result.stderr
    assert sorted(pins.rglob("*")) == before


def test_cleanup_leaves_what_is_not_ours_and_names_it(pins: Path) -> None:
    ours = {path.name for path in pins.iterdir()}
    (pins / "their-folder").mkdir()
    theirs = libbpf.map_create("array", "theirs", key_size=4, value_size=4, max_entries=1)
    libbpf.obj_pin(theirs, str(pins / "their-map"))
    os.close(theirs)
    result = ebpflb("cleanup", "--pin-path", pins)
    assert result.exit_code == 1
    assert "their-folder, their-map" in result.stderr
    assert {path.name for path in pins.iterdir()} == {"their-folder", "their-map"}
    assert "frontends" in result.stdout
    assert ours


def test_cleanup_also_removes_the_maps_of_another_version(pins: Path) -> None:
    other = libbpf.map_create("hash", "flows", key_size=4, value_size=4, max_entries=1)
    libbpf.obj_pin(other, str(pins / "flows_new-0123456789ab"))
    os.close(other)
    result = ebpflb("cleanup", "--pin-path", pins)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "flows_new" in result.stdout
    assert not pins.exists()


def test_cleanup_of_another_file_system_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "frontends-0123456789ab"
    file.touch()
    result = ebpflb("cleanup", "--pin-path", tmp_path)
    assert result.exit_code == 3
    assert "not on a BPF file system" in result.stderr
    assert file.exists()


# --- beside an agent -----------------------------------------------------------------------------


class Site:
    """A node with an agent and two Services; each command runs on that node."""

    def __init__(self, node: Node, agent: Agent) -> None:
        self.node = node
        self.agent = agent
        self.at = ("--pin-path", str(node.pin_path))

    def run(self, *arguments: str) -> Result:
        act: Callable[[], Result] = lambda: ebpflb(*arguments, *self.at)  # noqa: E731
        return self.node.inside(act)

    def json(self, *arguments: str, code: int = 0) -> Any:
        result = self.run(*arguments, "-o", "json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)


ENDPOINTS = (Endpoint(pod_ip(20), pod_ip(20, Family.IPV6)), Endpoint(pod_ip(21)))
SERVED = Spec(name="web", ipv4=cluster_ip(10), tcp={80: 8080}, endpoints=ENDPOINTS)
UNSERVED = Spec(name="empty", ipv4=cluster_ip(11), tcp={80: 8080})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("commands")
    with Lab("commands") as lab:
        node = lab.node("n1")
        manifests = Manifests(folder / "manifests")
        manifests.put(SERVED, UNSERVED)
        with Agent(node, manifests, "--map-size", SMALL) as agent:
            agent.settle()
            agent.wait_for(SERVES_PACKETS)
            yield Site(node, agent)


@pytest.fixture
def site(lab: Site) -> Site:
    """The agent runs and follows its two Services, whatever the test before has done."""
    if not lab.agent.alive:
        lab.agent.start()
    lab.agent.wait_for(SERVES_PACKETS)
    lab.agent.manifests.clear()
    lab.agent.manifests.put(SERVED, UNSERVED)
    lab.agent.settle()
    # An object that is not served has nothing in the maps by which one could see it go.
    wait_until(
        lambda: lab.agent.metrics()["ebpflb_objects_rejected"] == 0,
        timeout_s=30,
        what="the agent has seen the bad objects go",
    )
    return lab


def test_all_is_well(site: Site) -> None:
    found = site.json("status")
    assert (found["problems"], found["warnings"]) == ([], [])
    assert {one["state"] for one in found["programs"]} == {"attached"}
    assert all(one["program_id"] for one in found["programs"])
    assert (found["node"], found["mode"]) == ("n1", "ebpf")
    agent = found["agent"]
    assert agent["running"]
    assert agent["process"] == site.agent.pid
    assert agent["answers"]
    assert agent["healthy"]
    assert agent["last_sync_age_seconds"] < 600
    assert agent["failures"] == {}
    page = site.run("status")
    assert page.exit_code == 0
    assert page.stdout.endswith("what is wrong\nnothing\n")


def test_check_agrees_with_what_it_takes_from_the_agent(site: Site) -> None:
    result = site.run("check")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == "no difference: 2 service ports, 2 backends\n"
    assert site.json("check") == []


def test_check_finds_what_the_agent_was_not_told(site: Site, tmp_path: Path) -> None:
    truth = Manifests(tmp_path / "truth")
    truth.put(SERVED, Spec(name="more", ipv4=cluster_ip(12), tcp={80: 8080}))
    found = site.json("check", "--manifests", str(truth.folder), code=1)
    assert all(list(one) == ["service", "where", "what", "expected", "actual"] for one in found)
    assert {(one["service"], one["where"]) for one in found} == {
        ("default/empty:tcp-80", "ports"),
        ("default/empty:tcp-80", "frontends"),
        ("default/more:tcp-80", "ports"),
        ("", "service_addrs"),
    }
    assert {one["what"] for one in found if one["where"] == "service_addrs"} == {
        *(cluster_ip(11), cluster_ip(12))
    }
    table = site.run("check", "--manifests", str(truth.folder))
    assert table.exit_code == 1
    assert "default/more:tcp-80" in table.stdout


def test_check_tells_of_objects_that_are_not_served(site: Site) -> None:
    site.agent.manifests.put_text("half.yaml", "kind: [Service")
    site.agent.manifests.put(Spec(name="odd", ipv4="10.96.0.999", tcp={80: 1}))
    result = site.run("check")
    assert result.exit_code == 0
    assert "half.yaml, line " in result.stderr
    assert "Service default/odd" in result.stderr


def test_a_lost_link_is_found_until_the_agent_repairs_it(site: Site) -> None:
    site.agent.end()
    (site.node.pin_path / LINKS / "connect6").unlink()
    found = site.json("status", code=1)
    assert found["problems"] == ["not translated at connect6: not attached"]
    (difference,) = site.json("check", code=1)
    assert difference == {
        "service": "",
        "where": "hook connect6",
        "what": "program",
        "expected": "attached",
        "actual": "not attached",
    }
    site.agent.start()
    assert site.json("status")["problems"] == []
    assert site.json("check") == []


def test_without_its_agent_the_node_is_shown_as_before(site: Site) -> None:
    before = site.json("service", "list")
    site.agent.end()
    assert site.json("service", "list") == before
    assert site.json("check") == []
    found = site.json("status")
    assert found["problems"] == []
    assert found["warnings"] == [
        "no agent runs: the data path stays in force, but follows no change"
    ]
    assert not found["agent"]["running"]


def test_programs_on_other_maps_than_the_pinned_ones_are_found(site: Site) -> None:
    site.agent.end()
    pins = site.node.pin_path
    (stats,) = pins.glob("stats-*")
    stats.unlink()
    spec = abi.MAPS["stats"]
    other = libbpf.map_create(
        spec.type,
        "stats",
        key_size=spec.key.size,
        value_size=spec.value.size,
        max_entries=abi.CONSTANTS["STAT_COUNT"],
    )
    libbpf.obj_pin(other, str(stats))
    os.close(other)
    found = site.json("check", code=1)
    assert {one["where"] for one in found} >= {"hook connect4", "hook sendmsg6"}
    assert {one["what"] for one in found} == {"maps"}
    assert site.json("status", code=1)["problems"]
    site.agent.start().wait_for(SERVES_PACKETS)
    assert site.json("check") == []


def put_balanced(site: Site) -> None:
    """A Service of every frontend, with one endpoint elsewhere and one here."""
    balanced: ApiObject = service_object(
        "lb",
        cluster_ips=[cluster_ip(13)],
        ports=[{"name": "http", "port": 80, "nodePort": 30080}],
        type="LoadBalancer",
        externalTrafficPolicy="Local",
        healthCheckNodePort=30081,
        externalIPs=["198.51.100.1"],
        loadBalancerSourceRanges=["192.0.2.0/24"],
    )
    balanced["status"] = {"loadBalancer": {"ingress": [{"ip": "203.0.113.9"}]}}
    endpoints = [
        endpoint_object(pod_ip(20), node="n1", ready=True),
        endpoint_object(pod_ip(21), node="n2", ready=True),
    ]
    objects = [balanced, slice_object("lb-1", service="lb", endpoints=endpoints)]
    site.agent.manifests.put_objects("lb.json", objects)
    wait_until(
        lambda: any(one["service"] == "default/lb:http" for one in site.json("service", "list")),
        timeout_s=30,
        what="the agent serves default/lb",
    )


def test_every_frontend_is_shown_and_compared(site: Site) -> None:
    """NP-01, LB-01, LB-02, LB-05, POL-03 to POL-05."""
    put_balanced(site)
    (one,) = (one for one in site.json("service", "list") if one["service"] == "default/lb:http")
    assert one["frontends"] == [
        {"address": cluster_ip(13), "port": 80, "type": "ClusterIP"},
        {"address": "*", "port": 30080, "type": "NodePort"},
        {"address": "198.51.100.1", "port": 80, "type": "ExternalIP"},
        {"address": "203.0.113.9", "port": 80, "type": "LoadBalancer"},
    ]
    assert (one["internal_policy"], one["external_policy"]) == ("Cluster", "Local")
    assert [(b["address"], b["local"]) for b in one["backends"]] == [
        (pod_ip(20), True),
        (pod_ip(21), False),
    ]
    frontends = site.json("map", "dump", "frontends", "--service", "default/lb")["frontends"]
    assert {(row["type"], row["scope"]) for row in frontends} == {
        ("ClusterIP", "internal"),
        ("NodePort", "external"),
        ("ExternalIP", "external"),
        ("LoadBalancer", "external"),
    }
    (port,) = site.json("map", "dump", "ports", "--service", "default/lb")["ports"]
    assert port["flags"] == ["external_local", "lb_no_pods", "lb_no_host", "lb_ranges"]
    (let_in,) = site.json("map", "dump", "source_ranges", "--service", "default/lb")[
        "source_ranges"
    ]
    assert (let_in["network"], let_in["service"]) == ("192.0.2.0/24", "default/lb:http")
    addresses = site.json("map", "dump", "service_addrs")["service_addrs"]
    assert [row["role"] for row in addresses if row["address"] == "203.0.113.9"] == [
        *("known", "answers")
    ]
    found = site.json("status")
    assert site.node.ipv4 in found["node_ports"]["addresses"]
    assert found["warnings"] == []
    assert site.json("check") == []


def test_check_knows_where_node_ports_should_answer(site: Site) -> None:
    """NP-05: the agent that would follow does not run."""
    site.agent.end()
    site.node.address("192.168.50.77/32")
    (difference,) = site.json("check", code=1)
    assert difference == {
        "service": "",
        "where": "node_addrs",
        "what": "192.168.50.77",
        "expected": "NodePorts answer",
        "actual": "",
    }
    site.agent.start()
    wait_until(lambda: site.json("check") == [], timeout_s=30, what="the agent has followed")


def test_check_elsewhere_says_what_it_cannot_see(site: Site) -> None:
    """This process is in another network namespace than the node."""
    result = ebpflb("check", *site.at)
    assert (result.exit_code, result.stdout) == (
        0,
        "no difference: 2 service ports, 2 backends\n",
    )
    assert "this is not the node's network namespace" in result.stderr


def test_cleanup_beside_the_agent_is_refused(site: Site) -> None:
    result = site.run("cleanup")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"process {site.agent.pid}" in result.stderr
    assert site.json("status")["problems"] == []


def test_cleanup_detaches_and_the_node_translates_no_more(site: Site) -> None:
    refused = f"""
import socket, sys
try:
    socket.create_connection(("{cluster_ip(11)}", 80), 1)
except OSError as error:
    print(error.errno)
"""
    dial = [sys.executable, "-c", refused]
    assert site.node.run(dial).stdout.strip() == str(errno.ECONNREFUSED)
    site.agent.end()
    result = site.run("cleanup")
    assert (result.exit_code, result.stderr) == (0, "")
    links, devices, rules, maps, folder, *_ = result.stdout.splitlines()
    assert links.split()[:2] == ["detached", "connect6"]
    assert len(links.split()) == 1 + len(HOOKS)
    assert devices == "detached  eth0 egress, eth0 ingress"
    assert rules == "removed   our rules in netfilter"
    assert maps.startswith("removed   affinity ")
    assert folder == f"removed   {site.node.pin_path}"
    assert "Services are no longer translated" in result.stdout
    assert site.node.run(dial).stdout.strip() != str(errno.ECONNREFUSED)


def test_cleanup_says_when_somebody_else_holds_a_link(site: Site) -> None:
    held = libbpf.obj_get(str(site.node.pin_path / LINKS / "connect4"))
    try:
        site.agent.end()
        result = site.run("cleanup")
    finally:
        os.close(held)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: detach connect4: ")
    assert not site.node.pin_path.exists()
