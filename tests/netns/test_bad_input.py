# SPDX-License-Identifier: Apache-2.0
"""Objects, files and numbers that no cluster should have: each costs only itself.

While every one of them is there, a loop of connects to a good Service goes on without a failure,
and a message that names what is wrong stands in the log once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebpflb.lab import Lab, Node, Pod
from tests.builders import ApiObject, cluster_ip, endpoint_object, service_object, slice_object
from tests.netns.agents import SMALL, Agent, wait_until
from tests.netns.kernel import Kernel
from tests.netns.services import Endpoint, Manifests, Spec, ready

CHANGES = "kubeproxy_sync_proxy_rules_service_changes_total"
PENDING = "kubeproxy_sync_proxy_rules_service_changes_pending"

HTTP: ApiObject = {"name": "http", "port": 80}


class Place:
    """A node, a client, a backend; `good` is served all the time."""

    def __init__(self, node: Node, folder: Path) -> None:
        self.node = node
        self.client: Pod = node.pod(f"p-{node.name}")
        self.backend: Pod = node.pod(f"be-{node.name}")
        self.backend.serve(tcp=[8080], udp=[8080])
        self.manifests = Manifests(folder / node.name)
        self.good = self.spec(10)
        self.kernel = Kernel(node.pin_path, node.cgroup_root)
        self.reset()

    def spec(self, number: int, **more: Any) -> Spec:
        fields = {"tcp": {80: 8080}, "endpoints": ready(self.backend), **more}
        return Spec(name=f"s{number}", ipv4=cluster_ip(number), **fields)

    def reset(self) -> None:
        self.manifests.put(self.good)
        for path in self.manifests.folder.iterdir():
            if path.name != f"{self.good.name}.json":
                path.unlink()

    def agent(self, *flags: str) -> Agent:
        return Agent(self.node, self.manifests, "--map-size", SMALL, *flags)

    def reaches(self, number: int, port: int = 80) -> bool:
        return self.client.tcp(cluster_ip(number), port).good == 1


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab("bad-input") as lab:
        yield lab


@pytest.fixture(scope="module")
def place(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where one agent runs all the time."""
    return Place(lab.node("n1"), tmp_path_factory.mktemp("bad-input"))


@pytest.fixture(scope="module")
def narrow(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where each test starts one, with maps as small as it likes."""
    return Place(lab.node("n2"), tmp_path_factory.mktemp("narrow"))


@pytest.fixture(scope="module")
def running(place: Place) -> Iterator[Agent]:
    """One agent for all whose input is bad in itself: it must survive everything."""
    place.reset()
    with place.agent() as agent:
        yield agent
        assert agent.alive
        assert agent.complaints() == []


@pytest.fixture
def agent(place: Place, running: Agent) -> Iterator[Agent]:
    """The agent, and the loop on the good Service that no test may disturb."""
    running.settle()
    with place.client.tcp_loop(place.good.ipv4, 80, interval_s=0.001) as loop:
        yield running
        place.reset()
        running.settle()
        assert running.get("/healthz")[0] == 200
        outcome = loop.stop()
    assert outcome.failed == 0, outcome
    assert outcome.good > 10


def said_once(agent: Agent, event: str, since: int, **fields: Any) -> dict[str, Any]:
    """Wait for a message; then, when something else has been synced, there is no second one."""
    agent.wait_for(event, since=since, **fields)
    changes = agent.metrics()[CHANGES]
    agent.manifests.put(Spec(name="marker", ipv4=cluster_ip(9999), tcp={80: 1}))

    def synced() -> bool:
        metrics = agent.metrics()
        return metrics[CHANGES] > changes and metrics[PENDING] == 0

    wait_until(synced, what="something else is synced")
    agent.manifests.remove("marker")
    (entry,) = agent.log(event, since=since, **fields)
    return entry


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "text", "line", "reason"),
    [
        ("bad.yaml", "kind: Service\nmetadata: {name: x\nspec: [\n", 3, "is not YAML: "),
        ("bad.yaml", "kind: Service\n\tspec: 1\n", 2, "is not YAML: "),
        ("bad.yaml", "just words\n", 0, "is no Kubernetes object: document 1 is a str"),
        ("bad.yaml", b"a: \x00\x80\xff", None, "is not YAML: "),
        ("bad.json", '{"kind": "Service",\n "spec": }', 2, "is not JSON: "),
        ("bad.json", "", None, "is not JSON: "),
    ],
)
def test_a_file_that_makes_no_sense(
    place: Place, agent: Agent, file: str, text: str | bytes, *, line: int | None, reason: str
) -> None:
    since = agent.mark
    place.manifests.put_text(file, text)
    said = said_once(agent, "manifest_unreadable", since)
    assert said["file"] == str(place.manifests.folder / file)
    assert said["reason"].startswith(reason)
    if line is not None:
        assert said["line"] == line


def test_half_a_file_keeps_what_the_whole_one_said(place: Place, agent: Agent) -> None:
    spec = place.spec(20)
    place.manifests.put(spec)
    agent.settle()
    assert place.reaches(20)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": spec.objects()})
    since = agent.mark
    place.manifests.put_text("s20.json", text[: len(text) // 2])
    said = said_once(agent, "manifest_unreadable", since)
    assert "s20.json" in said["file"]
    assert place.reaches(20)
    changed = msgspec.structs.replace(spec, tcp={81: 8080})
    place.manifests.put(changed)
    wait_until(lambda: place.reaches(20, 81), what="the mended file counts")
    assert not place.reaches(20, 80)


def test_of_two_files_with_one_object_the_first_counts(place: Place, agent: Agent) -> None:
    """And when it goes, the other one does."""
    first, second = place.spec(20), place.spec(20, tcp={81: 8080})
    since = agent.mark
    place.manifests.put_objects("a.json", first.objects())
    agent.settle()
    place.manifests.put_objects("b.json", second.objects())
    said = said_once(agent, "manifest_object_repeated", since, object="Service default/s20")
    assert said["file"].endswith("/b.json")
    assert said["used"].endswith("/a.json")
    assert (place.reaches(20, 80), place.reaches(20, 81)) == (True, False)
    place.manifests.remove("a.json")
    wait_until(lambda: place.reaches(20, 81), what="the other file counts")


def test_a_kind_that_is_not_read_is_said_once(place: Place, agent: Agent) -> None:
    since = agent.mark
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
    place.manifests.put_objects("more.json", [pod, pod, *place.spec(20).objects()])
    said = said_once(agent, "manifest_kind_ignored", since)
    assert said["kind"] == "v1 Pod"
    assert place.reaches(20)


def test_what_is_no_file_is_not_waited_for(place: Place, agent: Agent) -> None:
    folder = place.manifests.folder
    (folder / "folder.yaml").mkdir()
    (folder / "link.yaml").symlink_to("/nowhere")
    try:
        place.manifests.put(place.spec(20))
        agent.settle()
        assert place.reaches(20)
    finally:
        (folder / "folder.yaml").rmdir()


# --- objects -------------------------------------------------------------------------------------


LONG = "n" * 300

OBJECTS = [
    pytest.param(
        service_object(LONG, cluster_ips=[cluster_ip(30)]),
        f"is {len(LONG)} characters long: 63 at most",
        id="a Service with a name of 300 characters",
    ),
    pytest.param(
        slice_object(LONG, service="s20"),
        f"is {len(LONG)} characters long: 253 at most",
        id="a slice with a name of 300 characters",
    ),
    pytest.param(service_object("", cluster_ips=[cluster_ip(30)]), "is missing", id="no name"),
    pytest.param(
        service_object("Up_Per", cluster_ips=[cluster_ip(30)]),
        "is no Kubernetes name",
        id="a name that is none",
    ),
    pytest.param(slice_object("", service="s20"), "metadata.name is missing", id="nameless slice"),
    pytest.param(
        slice_object("x", service=None),
        "has no label kubernetes.io/service-name",
        id="a slice of no Service",
    ),
    pytest.param(
        service_object("bad", cluster_ips=[cluster_ip(30)], ports=[]),
        "spec.ports is empty",
        id="no ports",
    ),
    pytest.param(
        service_object("bad", cluster_ips=[cluster_ip(30)], ports=[{"name": "x", "port": 0}]),
        "spec.ports[0].port 0 is out of range (1 to 65535)",
        id="port 0",
    ),
    pytest.param(
        service_object("bad", cluster_ips=[cluster_ip(30)], ports=[{"name": "x", "port": 70_000}]),
        "spec.ports[0].port 70000 is out of range",
        id="port 70000 (B-93)",
    ),
    pytest.param(
        service_object("bad", cluster_ips=[cluster_ip(30)], ports=[{"name": "x"}]),
        "spec.ports[0].port is missing",
        id="no port number",
    ),
    pytest.param(
        service_object("bad", cluster_ips=[cluster_ip(30)], ports=[{**HTTP, "protocol": "ICMP"}]),
        "spec.ports[0].protocol 'ICMP' is none of TCP, UDP and SCTP",
        id="a protocol that is none",
    ),
    pytest.param(
        service_object("bad", cluster_ips=["10.96.0.300"]),
        "'10.96.0.300' is no IP address",
        id="an address out of range",
    ),
    pytest.param(
        service_object("bad", cluster_ips=["127.0.0.1"]),
        "is a loopback address and is refused",
        id="a loopback address",
    ),
    pytest.param(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "bad"}, "spec": "x"},
        "has a wrong type",
        id="a wrong type",
    ),
]


@pytest.mark.parametrize(("obj", "reason"), OBJECTS)
def test_an_object_that_no_cluster_should_have(
    place: Place, agent: Agent, obj: ApiObject, reason: str
) -> None:
    """What stands beside it in the same file is served."""
    since = agent.mark
    place.manifests.put_objects("bad.json", [obj, *place.spec(20).objects()])
    said = said_once(agent, "not served", since)
    assert reason in said["reason"], said
    assert obj["kind"] in said["object"]
    assert place.reaches(20)


ENDPOINTS = [
    pytest.param(endpoint_object(None), "endpoints[0].addresses is empty", id="no address"),
    pytest.param(
        endpoint_object("abc"), "endpoints[0].addresses[0] 'abc' is no IP address", id="no IP"
    ),
    pytest.param(endpoint_object("10.244.1.256"), "is no IP address", id="out of range"),
    pytest.param(endpoint_object("fd00::1"), "is no IPv4 address", id="of the other family"),
    pytest.param(endpoint_object("127.0.0.1"), "is a loopback address", id="loopback (SEC-03)"),
    pytest.param(None, "endpoints[0].addresses is empty", id="null"),
]


@pytest.mark.parametrize(("bad", "reason"), ENDPOINTS)
def test_an_endpoint_that_cannot_be_used_leaves_the_others(
    place: Place, agent: Agent, bad: ApiObject | None, reason: str
) -> None:
    since = agent.mark
    service, v4, _ = place.spec(20).objects()
    v4["endpoints"] = [bad, *v4["endpoints"]]
    place.manifests.put_objects("s20.json", [service, v4])
    said = said_once(agent, "not served", since)
    assert reason in said["reason"], said
    assert said["object"].startswith("EndpointSlice default/s20")
    assert place.client.tcp(cluster_ip(20), 80, count=5).good == 5


def test_a_slice_of_names_is_passed_over_in_silence(place: Place, agent: Agent) -> None:
    """EP-13's like: addressType FQDN is nobody's fault."""
    since = agent.mark
    fqdn = slice_object(
        "names",
        service="s20",
        address_type="FQDN",
        ports=[{"name": "tcp-80", "port": 8080}],
        endpoints=[endpoint_object("example.com")],
    )
    place.manifests.put_objects("bad.json", [fqdn, *place.spec(20).objects()])
    agent.settle()
    assert place.client.tcp(cluster_ip(20), 80, count=5).good == 5
    assert agent.log("not served", since=since) == []


def test_leading_zeros_are_decimal_and_said_once(place: Place, agent: Agent) -> None:
    """FAM-09: 010.096.000.020 is 10.96.0.20, never an octal number."""
    since = agent.mark
    service, v4, _ = place.spec(20).objects()
    zeros = "010.096.000.020"
    service["spec"] |= {"clusterIP": zeros, "clusterIPs": [zeros]}
    place.manifests.put_objects("s20.json", [service, v4])
    said = said_once(agent, "not served", since)
    assert "is read as 10.96.0.20 and served" in said["reason"]
    assert place.reaches(20)


def test_a_good_port_beside_a_bad_one_is_served(place: Place, agent: Agent) -> None:
    service, v4, _ = place.spec(20).objects()
    service["spec"]["ports"] = [{"name": "zero", "port": 0}, *service["spec"]["ports"]]
    place.manifests.put_objects("s20.json", [service, v4])
    agent.settle()
    assert place.reaches(20)


def test_an_object_that_is_mended_is_served_and_said(place: Place, agent: Agent) -> None:
    since = agent.mark
    service, v4, _ = place.spec(20).objects()
    broken = json.loads(json.dumps(service))
    broken["spec"]["ports"][0]["port"] = 0
    place.manifests.put_objects("s20.json", [broken, v4])
    agent.wait_for("not served", since=since)
    place.manifests.put_objects("s20.json", [service, v4])
    agent.wait_for("mended or gone", since=since)
    wait_until(lambda: place.reaches(20), what="it is served")


def test_the_second_service_with_one_address_waits_for_the_first(
    place: Place, agent: Agent
) -> None:
    """Said once; it is served when the first one goes."""
    since = agent.mark
    one = place.spec(20)
    two = msgspec.structs.replace(place.spec(21, tcp={80: 9}), ipv4=one.ipv4)
    place.manifests.put(one)
    agent.settle()
    place.manifests.put(two)
    said = said_once(agent, "not served", since)
    assert said["object"] == "Service default/s21"
    assert "belongs to default/s20" in said["reason"]
    assert place.reaches(20)
    place.manifests.put(msgspec.structs.replace(two, tcp={80: 8080}))
    place.manifests.remove("s20")
    agent.settle()
    assert place.reaches(20)


# --- full maps -----------------------------------------------------------------------------------

# The room of one map, and how many of the Services of `a_service` find room beside the good one.
ROOM = [
    pytest.param("frontends", 2 + 2 + 3 * 2, id="frontends"),
    pytest.param("ports", 2 + 3 * 2, id="ports"),
    pytest.param("names", 2 + 3 * 2, id="names"),
    pytest.param("backends", 2 * (2 + 3 * 2), id="backends"),
    pytest.param("members", 1 + 3 * 1, id="members"),
]


def a_service(narrow: Place, number: int) -> Spec:
    """Two service ports of one backend each, in both its sets; the UDP one has a member."""
    return narrow.spec(number, udp={53: 8080})


@pytest.mark.parametrize(("name", "entries"), ROOM)
def test_a_full_map_keeps_what_it_has_and_refuses_the_newest(
    narrow: Place, name: str, entries: int
) -> None:
    """B-105, B-109: by name, once, counted; served when there is room."""
    narrow.reset()
    narrow.manifests.put(a_service(narrow, 10))
    with narrow.agent("--map-size", f"{name}={entries}") as agent:
        with narrow.client.tcp_loop(cluster_ip(10), 80, interval_s=0.001) as loop:
            for number in (20, 21, 22):
                narrow.manifests.put(a_service(narrow, number))
                agent.settle()
            since = agent.mark
            narrow.manifests.put(a_service(narrow, 23))
            said = agent.wait_for("not programmed", since=since)
            assert said["service"].startswith("default/s23:")
            assert f"map {name}" in said["reason"]
            assert f"--map-size {name}=N" in said["reason"]
            assert all(narrow.reaches(number) for number in (20, 21, 22))
            said_once(agent, "not programmed", since, service=said["service"])
            metrics = agent.metrics()
            failures = f'ebpflb_map_write_failures_total{{errno="E2BIG",map="{name}"}}'
            assert metrics[failures] >= 1
            assert metrics["ebpflb_service_ports_failed"] >= 1
            told = json.loads(agent.get("/failures", port=10249)[1])
            assert said["service"] in told

            narrow.manifests.remove("s20")
            agent.settle(timeout_s=40)
            assert not narrow.reaches(20)
            assert narrow.reaches(23)
            assert len(agent.log("programmed now", since=since, service=said["service"])) == 1
            assert agent.metrics()["ebpflb_service_ports_failed"] == 0
            assert json.loads(agent.get("/failures", port=10249)[1]) == {}
            outcome = loop.stop()
        assert outcome.failed == 0, outcome
        assert narrow.kernel.stats()["foreign_backend"] == 0
        narrow.reset()
        agent.settle()


def test_many_ports_of_many_endpoints_fill_the_map_and_leave_it_empty(narrow: Place) -> None:
    """B-105: 40 ports x 50 endpoints in 1,000 slots: twenty ports fit, all of them go again."""
    narrow.reset()
    big = narrow.spec(
        20,
        tcp={1000 + number: 8080 for number in range(40)},
        endpoints=tuple(Endpoint(f"10.244.7.{number}") for number in range(1, 51)),
    )
    with narrow.agent("--map-size", "backends=1000") as agent:
        narrow.manifests.put(big)
        wait_until(
            lambda: agent.metrics().get("ebpflb_service_ports_failed") == 21,
            what="what does not fit is refused",
        )
        refused = {one["service"] for one in agent.log("not programmed")}
        assert len(refused) == 21
        assert len(agent.log("not programmed")) == 21
        assert all(one.startswith("default/s20:") for one in refused)
        assert narrow.reaches(10)
        narrow.manifests.remove("s20")
        agent.settle()
        assert narrow.kernel.snapshot().ports[0].name is not None
        used = agent.metrics()
        assert used['ebpflb_map_entries{map="ports"}'] == 1
        wait_until(
            lambda: agent.metrics()['ebpflb_map_entries{map="backends"}'] == 2,
            what="every slot is free again",
        )
        narrow.manifests.put(msgspec.structs.replace(big, tcp={1: 8080}))
        agent.settle()


# --- very many endpoints -------------------------------------------------------------------------


def a_big_service(slices: int) -> list[ApiObject]:
    """A Service with a thousand endpoints in each slice."""
    return [
        service_object("big", cluster_ips=[cluster_ip(20)]),
        *(
            slice_object(
                f"big-{number}",
                service="big",
                endpoints=[
                    endpoint_object(f"10.{128 + number}.{index // 250}.{index % 250 + 1}")
                    for index in range(1000)
                ],
            )
            for number in range(slices)
        ),
    ]


def test_seventy_thousand_endpoints_behind_one_service(narrow: Place) -> None:
    """Served with the default sizes, changed, and gone without a trace."""
    narrow.reset()
    with (
        Agent(narrow.node, narrow.manifests) as agent,
        narrow.client.tcp_loop(narrow.good.ipv4, 80, interval_s=0.001) as loop,
    ):
        for slices in (70, 69):
            narrow.manifests.put_objects("big.json", a_big_service(slices))

            def all_there(wanted: int = slices * 1000) -> bool:
                snapshot = narrow.kernel.snapshot()
                ports = [port for port in snapshot.ports if port.name and port.name.name == "big"]
                return [port.words[0].length for port in ports] == [wanted]

            wait_until(all_there, timeout_s=30, what="every endpoint is programmed")
            (port,) = (
                one for one in narrow.kernel.snapshot().ports if one.name and one.name.name == "big"
            )
            addresses = {slot.address for slot in narrow.kernel.snapshot().cluster[port.id]}
            assert len(addresses) == slices * 1000
        narrow.manifests.remove("big.json")
        agent.settle()
        outcome = loop.stop()
        assert agent.complaints() == []
    assert outcome.failed == 0, outcome


def test_more_endpoints_than_there_is_room_for_are_refused_by_name(narrow: Place) -> None:
    """The others are served, and the limit is in the message."""
    narrow.reset()
    with (
        narrow.agent("--map-size", "backends=65536") as agent,
        narrow.client.tcp_loop(narrow.good.ipv4, 80, interval_s=0.001) as loop,
    ):
        narrow.manifests.put_objects("big.json", a_big_service(70))
        said = agent.wait_for("not programmed", timeout_s=30)
        assert said["service"] == "default/big:http"
        assert "the map of 65536 is full: 70000 slots in a row are needed" in said["reason"]
        assert "--map-size backends=N" in said["reason"]
        narrow.manifests.put(narrow.spec(30))
        wait_until(lambda: narrow.reaches(30), what="others are served")
        outcome = loop.stop()
    assert outcome.failed == 0, outcome
