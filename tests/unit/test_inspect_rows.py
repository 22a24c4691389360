# SPDX-License-Identifier: Apache-2.0
"""The maps as plain values: the keys that are promised, the words, the order, the merging."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebpflb.datapath.ebpf import abi, inspect, rows
from ebpflb.datapath.ebpf.encode import (
    encode_service_address,
    encode_source_range,
    encode_subnets,
    setting_flags,
)
from ebpflb.datapath.ebpf.flowrows import FlowRow, FragmentRow
from ebpflb.datapath.ebpf.rows import (
    AffinityRow,
    BackendRow,
    ConnectionsRow,
    DeviceRow,
    FrontendRow,
    ListedService,
    MemberRow,
    NameRow,
    NodeAddressRow,
    PortRow,
    ProbeRow,
    ServiceAddressRow,
    ServiceBackend,
    ServiceFrontend,
    SettingsRow,
    SourceRangeRow,
    StatRow,
    UdpConnRow,
)
from ebpflb.datapath.ebpf.tables import ID, Snapshot, index_of, read, unpack_source_range
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.model import (
    Backend,
    Family,
    Frontend,
    FrontendKind,
    Plan,
    PlannedPort,
    Policy,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
    parse_address,
    parse_network,
)
from tests.builders import backend, by_network, cluster_ip, pod_ip, port_name
from tests.memory_tables import ManualGate, MemoryTables

NAMES = {1: "default/web:http", 2: "default/dns"}


def planned(
    name: ServicePortName,
    *cluster: Backend,
    local: Sequence[Backend] | None = None,
    draining: Sequence[Backend] = (),
    frontends: Sequence[tuple[str, int, FrontendKind]] = (),
    internal: Policy = Policy.CLUSTER,
    external: Policy = Policy.CLUSTER,
    affinity_s: int = 0,
    socket_lb: bool = True,
    source_ranges: Sequence[str] = (),
    node_in_ranges: bool = True,
) -> PlannedPort:
    """A service port with the frontends given, else one ClusterIP.

    The local set is what of the cluster set is local, where it is not said.
    """

    def selection(chosen: Sequence[Backend]) -> Selection:
        ordered = tuple(sorted(chosen, key=lambda one: (one.address, one.port)))
        nothing = Verdict.DROP if cluster or draining else Verdict.REJECT
        return Selection(Verdict.FORWARD if ordered else nothing, ordered)

    dialled = frontends or [(cluster_ip(10, name.family), 80, FrontendKind.CLUSTER_IP)]
    return PlannedPort(
        name=name,
        frontends=tuple(
            Frontend(parse_address(address), port, name.protocol, kind)
            for address, port, kind in dialled
        ),
        cluster=selection(cluster),
        local=selection([one for one in cluster if one.local] if local is None else local),
        draining=tuple(draining),
        affinity_s=affinity_s,
        internal_policy=internal,
        external_policy=external,
        socket_lb=socket_lb,
        source_ranges=tuple(map(parse_network, source_ranges)),
        node_in_ranges=node_in_ranges,
    )


def programmed(*ports: PlannedPort) -> Any:
    """The tables, in memory, that the writer makes of these."""
    tables: Any = MemoryTables()
    Writer(tables, ManualGate()).sync(Plan({port.name: port for port in ports}), None)
    return tables


def snapshot(*ports: PlannedPort) -> Snapshot:
    return read(programmed(*ports))


def no_connections(_slot: int) -> int:
    return 0


def listed(
    *ports: PlannedPort, connections: Callable[[int], int] = no_connections
) -> list[ListedService]:
    return rows.services(snapshot(*ports), connections)


PORT_KEYS = (
    "slot id service protocol family flags cluster_base cluster_count cluster_flags "
    "local_base local_count local_flags draining affinity_seconds"
)
SETTINGS_KEYS = (
    "host_netns udp_timeout_seconds udp_stream_timeout_seconds programs packet_programs flags "
    "state tcp_timeout_seconds tcp_closing_seconds masquerade_mark reject_mark pods options"
)
FLOW_KEYS = (
    "protocol client client_port frontend frontend_port backend backend_port port_at_backend "
    "state flags halves idle_seconds age_seconds id service"
)
SERVICE_KEYS = (
    "service id protocol affinity_seconds frontends backends internal_policy external_policy "
    "connections"
)


# --- what is promised ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "promised"),
    [
        (FrontendRow, "address port protocol type scope id service"),
        (NodeAddressRow, "address"),
        (PortRow, PORT_KEYS),
        (BackendRow, "slot address port flags ranges id service"),
        (AffinityRow, "client path address port age_seconds id service"),
        (MemberRow, "address port role id service"),
        (UdpConnRow, "socket netns address port id service"),
        (FlowRow, FLOW_KEYS),
        (FragmentRow, "protocol source target datagram source_port target_port"),
        (SourceRangeRow, "network id service"),
        (ServiceAddressRow, "address role"),
        (DeviceRow, "index device role"),
        (ConnectionsRow, "slot connections protocol family id service"),
        (StatRow, "name count"),
        (ProbeRow, "hook socket netns"),
        (NameRow, "id service"),
        (
            SettingsRow,
            SETTINGS_KEYS,
        ),
        (ServiceFrontend, "address port type"),
        (ServiceBackend, "address port state local"),
        (rows.Service, SERVICE_KEYS),
        (inspect.MapFill, "map entries max_entries bytes"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_json_keys_are_as_documented(row: type[msgspec.Struct], promised: str) -> None:
    assert row.__struct_fields__ == tuple(promised.split())
    assert row.__struct_encode_fields__ == row.__struct_fields__


ROWS = {
    "frontends": FrontendRow,
    "node_addrs": NodeAddressRow,
    "ports": PortRow,
    "backends": BackendRow,
    "affinity": AffinityRow,
    "members": MemberRow,
    "udp_conn": UdpConnRow,
    "flows_new": FlowRow,
    "conntrack": FlowRow,
    "fragments": FragmentRow,
    "source_ranges": SourceRangeRow,
    "service_addrs": ServiceAddressRow,
    "devices": DeviceRow,
    "connections": ConnectionsRow,
    "stats": StatRow,
    "probe": ProbeRow,
    "names": NameRow,
    "settings": SettingsRow,
}
WORDS = {
    "frontends": ("SCOPE_",),
    "ports": ("PORT_", "SET_", "WORD_"),
    "backends": ("BACKEND_", "SET_"),
    "members": ("MEMBER_",),
    "stats": ("STAT_",),
    "service_addrs": ("ADDRESS_",),
    "devices": ("DEVICE_",),
    "settings": ("SETTING_", "STATE_"),
}
"""The enums whose words stand in the rows of a map."""


@pytest.mark.parametrize("name", inspect.DUMPABLE)
def test_the_keys_and_words_of_each_map_are_in_the_documentation(name: str) -> None:
    text = Path(__file__).parents[2].joinpath("docs/commands.md").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
    described = line.split("|", 2)[2]
    keys = ROWS[name].__struct_fields__
    said = [
        word for word in re.findall(r"`(\w+)`", described) if word in keys or word not in abi.MAPS
    ]
    assert said == [*keys]
    words = set(re.findall(r"\w+", described))
    for prefix in WORDS.get(name, ()):
        assert set(abi.names_of(prefix).values()) <= words


def test_every_map_is_either_dumped_or_socket_storage() -> None:
    assert set(inspect.DUMPABLE) | set(inspect.NOT_LISTABLE) == set(abi.MAPS)
    assert inspect.NOT_LISTABLE == ("sock_peer", "sock_udp")
    assert inspect.EVICTING == ("affinity", "flows_new", "conntrack", "fragments")
    assert set(inspect.OF_SERVICES) <= set(inspect.DUMPABLE)


# --- rows ----------------------------------------------------------------------------------------


def test_frontends_show_addresses_words_and_names_by_address() -> None:
    seen = snapshot(
        planned(port_name(), backend(pod_ip(9))),
        planned(port_name("dns", "", protocol=Protocol.UDP, family=Family.IPV6)),
    )
    found = rows.frontend_rows(seen.frontends, seen.names)
    assert [(row.address, row.port, row.protocol, row.type, row.service) for row in found] == [
        (cluster_ip(10), 80, "TCP", "ClusterIP", "default/web:http"),
        ("240.0.0.9", 9, "UDP", "probe", None),
        ("100::9", 9, "UDP", "probe", None),
        (cluster_ip(10, Family.IPV6), 80, "UDP", "ClusterIP", "default/dns"),
    ]
    assert {row.scope for row in found} == {"internal"}


def test_frontends_show_their_kind_and_scope_and_ports_whom_they_refuse() -> None:
    """LB-05, LB-06"""
    dialled = [
        (cluster_ip(10), 80, FrontendKind.CLUSTER_IP),
        ("0.0.0.0", 30080, FrontendKind.NODE_PORT),
        ("198.51.100.1", 80, FrontendKind.EXTERNAL_IP),
        ("203.0.113.9", 80, FrontendKind.LOAD_BALANCER),
    ]
    seen = snapshot(
        planned(port_name(), frontends=dialled, source_ranges=["192.0.2.0/24"]),
        planned(
            port_name("none"),
            frontends=[("203.0.113.10", 80, FrontendKind.LOAD_BALANCER)],
            source_ranges=["192.0.2.0/24"],
            node_in_ranges=False,
        ),
    )
    found = [row for row in rows.frontend_rows(seen.frontends, seen.names) if row.service]
    assert [(row.address, row.port, row.type, row.scope) for row in found] == [
        ("0.0.0.0", 30080, "NodePort", "external"),
        (cluster_ip(10), 80, "ClusterIP", "internal"),
        ("198.51.100.1", 80, "ExternalIP", "external"),
        ("203.0.113.9", 80, "LoadBalancer", "external"),
        ("203.0.113.10", 80, "LoadBalancer", "external"),
    ]
    assert {row.service: row.flags for row in rows.port_rows(seen.ports, seen.names)} == {
        "default/web:http": ["lb_no_pods", "lb_ranges"],
        "default/none:http": ["lb_no_pods", "lb_no_host", "lb_ranges"],
    }


def test_node_addresses_are_ipv4_first_and_in_numeric_order() -> None:
    texts = ["fd50::1", "192.168.50.10", "192.168.50.9", "fd50::10", "fd50::2"]
    assert [row.address for row in rows.node_address_rows(map(parse_address, texts))] == [
        "192.168.50.9",
        "192.168.50.10",
        "fd50::1",
        "fd50::2",
        "fd50::10",
    ]


def test_ports_show_both_sets_and_their_flags() -> None:
    seen = snapshot(
        planned(
            port_name(),
            backend(pod_ip(1)),
            backend(pod_ip(2), local=True),
            draining=[backend(pod_ip(3), terminating=True)],
            external=Policy.LOCAL,
            affinity_s=60,
        ),
        planned(
            port_name("far", family=Family.IPV6),
            backend(pod_ip(1, Family.IPV6)),
            internal=Policy.LOCAL,
        ),
        planned(port_name("none", ""), socket_lb=False),
    )
    far, none, web = rows.port_rows(seen.ports, seen.names)
    assert web == PortRow(
        slot=2,
        id=seen.ports[2].id,
        service="default/web:http",
        protocol="TCP",
        family="IPv4",
        flags=["external_local"],
        cluster_base=1,
        cluster_count=2,
        cluster_flags=["affinity"],
        local_base=4,
        local_count=1,
        local_flags=["affinity"],
        draining=1,
        affinity_seconds=60,
    )
    assert (far.flags, far.family) == (["internal_local", "ipv6"], "IPv6")
    assert (far.cluster_count, far.cluster_flags) == (1, [])
    assert (far.local_count, far.local_flags) == (0, ["none_local"])
    assert (none.cluster_count, none.cluster_flags) == (0, ["none", "untouched"])
    assert (none.local_count, none.local_flags) == (0, ["none", "untouched"])


def test_backends_show_in_which_ranges_each_slot_is() -> None:
    seen = snapshot(
        planned(
            port_name(),
            backend(pod_ip(1), local=True),
            draining=[backend(pod_ip(2), terminating=True)],
        )
    )
    found = rows.backend_rows(seen)
    assert [(row.slot, row.address, row.flags, row.ranges) for row in found] == [
        (0, pod_ip(1), ["local"], ["cluster"]),
        (1, pod_ip(2), ["terminating"], ["draining"]),
        (2, pod_ip(1), ["local"], ["local"]),
    ]
    assert {row.service for row in found} == {"default/web:http"}


def test_a_slot_that_both_words_name_is_in_both_ranges() -> None:
    seen = snapshot(planned(port_name(), backend(pod_ip(1), local=True)))
    (port,) = seen.ports
    (row, *_) = rows.backend_rows(seen._replace(local=seen.cluster))
    assert row.ranges == ["cluster", "local"]
    assert row.id == port.id


def test_a_slot_of_another_owner_is_shown_as_foreign() -> None:
    seen = snapshot(planned(port_name(), backend(pod_ip(1))))
    (port,) = seen.ports
    (slot,) = seen.cluster[port.id]
    (row,) = rows.backend_rows(seen._replace(cluster={port.id: (slot._replace(owner=77),)}))
    assert (row.flags, row.id, row.service) == (["foreign"], 77, None)


def affinity(client: bytes, *, owner: int, path: int, used_ns: int) -> tuple[bytes, bytes]:
    return (
        abi.LAYOUTS["affinity_key"].pack(client, owner, path),
        abi.LAYOUTS["affinity_value"].pack(
            5, (8080).to_bytes(2), parse_address(pod_ip(1)), used_ns, 5
        ),
    )


def test_affinity_shows_the_client_of_each_path_and_an_age() -> None:
    items = [
        affinity(parse_address("fd00::7"), owner=1, path=1, used_ns=10**9),
        affinity(struct.pack("=QQ", 4711, 0), owner=1, path=0, used_ns=3 * 10**9),
        affinity(struct.pack("=QQ", 12, 0), owner=9, path=0, used_ns=10**12),
        affinity(struct.pack("=QQ", 99, 0), owner=1, path=0, used_ns=0),
    ]
    found = rows.affinity_rows(items, NAMES, now_ns=5_500_000_000)
    assert [(row.client, row.path, row.age_seconds, row.service) for row in found] == [
        ("99", "socket", 5.5, "default/web:http"),
        ("4711", "socket", 2.5, "default/web:http"),
        ("fd00::7", "packet", 4.5, "default/web:http"),
        ("12", "socket", 0.0, None),
    ]
    assert (found[0].address, found[0].port) == (pod_ip(1), 8080)


def test_members_show_the_role_by_service() -> None:
    seen = snapshot(
        planned(port_name("a", "", protocol=Protocol.UDP), backend(pod_ip(2))),
        planned(port_name("b", ""), backend(pod_ip(1), local=True), affinity_s=10),
    )
    found = rows.member_rows(seen.members, seen.names)
    assert [(row.service, row.address, row.port, row.role) for row in found] == [
        ("default/a", pod_ip(2), 8080, "serving"),
        ("default/b", pod_ip(1), 8080, "cluster"),
        ("default/b", pod_ip(1), 8080, "local"),
    ]


def test_connected_udp_sockets_show_cookies_and_backend() -> None:
    layout = abi.LAYOUTS["udp_conn"]
    items = [
        (struct.pack("=Q", 30), layout.pack(parse_address("127.0.0.1"), bytes(2), 0, 0, 5, 8)),
        (
            struct.pack("=Q", 20),
            layout.pack(parse_address(pod_ip(1)), (53).to_bytes(2), 0, 0, 2, 7),
        ),
    ]
    assert rows.udp_conn_rows(items, NAMES) == [
        UdpConnRow(20, 7, pod_ip(1), 53, 2, "default/dns"),
        UdpConnRow(30, 8, "127.0.0.1", 0, 5, None),
    ]


def test_source_ranges_are_sorted_by_service_and_network() -> None:
    keys = [
        *(encode_source_range(parse_network(text), 1) for text in ("fd00::/8", "10.0.0.0/8")),
        encode_source_range(parse_network("10.0.0.0/16"), 1),
        encode_source_range(parse_network("192.0.2.0/24"), 2),
        encode_source_range(parse_network("192.0.2.0/24"), 9),
        encode_source_range(parse_network("192.0.2.0/24"), 1)[:-1] + b"\7",
    ]
    found = rows.source_range_rows(map(unpack_source_range, keys), NAMES)
    assert [(row.service, row.id, row.network) for row in found] == [
        ("default/dns", 2, "192.0.2.0/24"),
        ("default/web:http", 1, "10.0.0.0/8"),
        ("default/web:http", 1, "10.0.0.0/16"),
        ("default/web:http", 1, "fd00::/8"),
        ("default/web:http", 1, keys[-1].hex()),
        (None, 9, "192.0.2.0/24"),
    ]


def test_services_addresses_are_sorted_and_say_whether_they_answer() -> None:
    tables = programmed(
        planned(port_name("a", ""), backend(pod_ip(2))),
        planned(port_name("b", "", family=Family.IPV6)),
    )
    keys = [key for key, _ in tables.service_addrs.items()]
    stray = encode_service_address(parse_address("fd00::1"), 7)
    assert rows.service_address_rows([stray, *reversed(keys)]) == [
        ServiceAddressRow(cluster_ip(10), "known"),
        ServiceAddressRow(cluster_ip(10), "answers"),
        ServiceAddressRow("fd00::1", "7"),
        ServiceAddressRow(cluster_ip(10, Family.IPV6), "known"),
    ]


def test_devices_have_names_where_they_are_known() -> None:
    keys = [struct.pack("=II", *one) for one in ((12, 1), (2, 2), (12, 0), (300, 9))]
    assert rows.device_rows(keys, {2: "eth0", 12: "veth1"}) == [
        DeviceRow(2, "eth0", "uplink"),
        DeviceRow(12, "veth1", "pod"),
        DeviceRow(12, "veth1", "bridged"),
        DeviceRow(300, None, "9"),
    ]


def test_connections_are_those_of_the_slot() -> None:
    seen = snapshot(planned(port_name("a", "")), planned(port_name("b", "")))
    found = rows.connections_rows(seen.ports, seen.names, lambda slot: 100 + slot)
    assert [(row.slot, row.service, row.connections) for row in found] == [
        (0, "default/a", 100),
        (1, "default/b", 101),
    ]


def test_a_probe_is_shown_for_the_hooks_that_met_one() -> None:
    entries = [bytes(abi.LAYOUTS["probe"].size)] * abi.CONSTANTS["HOOK_COUNT"]
    entries[abi.CONSTANTS["HOOK_CONNECT6"]] = abi.LAYOUTS["probe"].pack(44, 44, 3, 1)
    assert rows.probe_rows(entries) == [ProbeRow("connect6", 44, 3)]


def test_names_are_sorted_by_name_then_id() -> None:
    assert rows.name_rows({5: "b/b", 7: "a/a", 6: "a/a"}) == [
        NameRow(6, "a/a"),
        NameRow(7, "a/a"),
        NameRow(5, "b/b"),
    ]


@pytest.mark.parametrize(
    ("left", "options"),
    [
        (b'{"hostname": "n1"}', {"hostname": "n1"}),
        (b"", {}),
        (b'{"hostname": "n', {}),
        (b"[1]", {}),
        (b"\xff\xfe", {}),
    ],
    ids=["an object", "nothing", "half an object", "a list", "no text"],
)
def test_settings_survive_whatever_the_agent_left(left: bytes, options: dict[str, object]) -> None:
    flags = abi.CONSTANTS["SETTING_LOOPBACK4"] | abi.CONSTANTS["SETTING_TELLS_PODS6"] | 1 << 40
    raw = abi.LAYOUTS["settings"].make(
        host_netns=3,
        udp_timeout_ns=30 * 10**9,
        udp_stream_timeout_ns=120 * 10**9,
        programs=0xABC,
        packet_programs=0xDEF,
        flags=flags,
        state=abi.CONSTANTS["STATE_SEES_HOST"] | abi.CONSTANTS["STATE_PING"],
        tcp_timeout_ns=86_400 * 10**9,
        tcp_closing_ns=3_600 * 10**9,
        masquerade_mark=1 << 14,
        reject_mark=1 << 13,
        options=left,
    )
    assert rows.settings_row(raw) == SettingsRow(
        host_netns=3,
        udp_timeout_seconds=30,
        udp_stream_timeout_seconds=120,
        programs="0000000000000abc",
        packet_programs="0000000000000def",
        flags=["loopback4", "tells_pods6", "0x10000000000"],
        state=["sees_host", "ping"],
        tcp_timeout_seconds=86_400,
        tcp_closing_seconds=3_600,
        masquerade_mark="0x4000",
        reject_mark="0x2000",
        pods=[],
        options=options,
    )


@pytest.mark.parametrize(
    "texts", [(), ("10.244.0.0/16",), ("fd00::/48",), ("0.0.0.0/0", "::/0")], ids=" ".join
)
def test_settings_show_where_pods_are_told_to_be(texts: tuple[str, ...]) -> None:
    told = Plan({}, pods=by_network(*texts))
    ipv4, ipv6 = encode_subnets(told)
    raw = abi.LAYOUTS["settings"].make(flags=setting_flags(told), pods4=ipv4, pods6=ipv6)
    assert [text or "::/0" for text in rows.settings_row(raw).pods] == [*texts]


@pytest.mark.parametrize(
    ("flags", "words"),
    [(0, []), (1, ["affinity"]), (6, ["none", "none_local"]), (0x40, ["0x40"])],
)
def test_flags_are_words_and_unknown_ones_numbers(flags: int, words: list[str]) -> None:
    assert rows.flag_words(flags, abi.names_of("WORD_")) == words


# --- services ------------------------------------------------------------------------------------


def test_the_families_of_a_service_port_are_one_entry() -> None:
    v4 = planned(port_name(), backend(pod_ip(1), local=True), affinity_s=60)
    v6 = planned(port_name(family=Family.IPV6), backend(pod_ip(1, Family.IPV6)), affinity_s=60)
    (one,) = listed(v4, v6, connections=lambda slot: 10 + slot)
    assert one.service == rows.Service(
        service="default/web:http",
        id=snapshot(v4, v6).ports[0].id,
        protocol="TCP",
        affinity_seconds=60,
        frontends=[
            ServiceFrontend(cluster_ip(10), 80, "ClusterIP"),
            ServiceFrontend(cluster_ip(10, Family.IPV6), 80, "ClusterIP"),
        ],
        backends=[
            ServiceBackend(pod_ip(1), 8080, "ready", local=True),
            ServiceBackend(pod_ip(1, Family.IPV6), 8080, "ready", local=False),
        ],
        internal_policy="Cluster",
        external_policy="Cluster",
        connections=21,
    )
    assert one.notes == ()


def test_one_family_alone_is_an_entry_with_its_own_id() -> None:
    port = planned(port_name(family=Family.IPV6), backend(pod_ip(1, Family.IPV6)))
    (one,) = listed(port)
    assert one.service.id == snapshot(port).ports[0].id


def test_protocols_are_entries_of_their_own_and_names_are_in_order() -> None:
    found = listed(
        planned(port_name("b", "dns", protocol=Protocol.UDP)),
        planned(port_name("b", "dns")),
        planned(port_name("a", "")),
        planned(port_name("b", "")),
    )
    assert [(one.service.service, one.service.protocol) for one in found] == [
        ("default/a", "TCP"),
        ("default/b", "TCP"),
        ("default/b:dns", "TCP"),
        ("default/b:dns", "UDP"),
    ]


def dialled(family: Family = Family.IPV4) -> list[tuple[str, int, FrontendKind]]:
    """A ClusterIP and a NodePort."""
    return [
        (cluster_ip(10, family), 80, FrontendKind.CLUSTER_IP),
        ("::" if family is Family.IPV6 else "0.0.0.0", 30080, FrontendKind.NODE_PORT),
    ]


def test_frontends_stand_by_type_and_a_nodeport_is_a_star() -> None:
    (one,) = listed(
        planned(
            port_name(),
            backend(pod_ip(1)),
            frontends=[
                ("203.0.113.9", 80, FrontendKind.LOAD_BALANCER),
                ("198.51.100.1", 80, FrontendKind.EXTERNAL_IP),
                *dialled(),
            ],
        ),
        planned(port_name(family=Family.IPV6), frontends=dialled(Family.IPV6)[1:]),
    )
    assert one.service.frontends == [
        ServiceFrontend(cluster_ip(10), 80, "ClusterIP"),
        ServiceFrontend("*", 30080, "NodePort"),
        ServiceFrontend("198.51.100.1", 80, "ExternalIP"),
        ServiceFrontend("203.0.113.9", 80, "LoadBalancer"),
    ]
    assert one.frontend_marks == ("",) * 4


@pytest.mark.parametrize(
    ("node_in_ranges", "mark"),
    [
        (True, "source ranges: not for pods"),
        (False, "source ranges: not for pods nor this node"),
    ],
)
def test_a_load_balancer_says_whom_its_source_ranges_refuse(
    node_in_ranges: bool, mark: str
) -> None:
    """LB-05 to LB-07, as far as a socket can tell."""
    (one,) = listed(
        planned(
            port_name(),
            frontends=[*dialled(), ("203.0.113.9", 80, FrontendKind.LOAD_BALANCER)],
            source_ranges=["192.0.2.0/24"],
            node_in_ranges=node_in_ranges,
        )
    )
    assert one.frontend_marks == ("", "", mark)


HERE, THERE = backend(pod_ip(1), local=True), backend(pod_ip(2))
HERE_ENDS = backend(pod_ip(3), local=True, terminating=True)
THERE_ENDS = backend(pod_ip(4), terminating=True)
ALL = (("ready", True, ""), ("ready", False, ""))


@pytest.mark.parametrize(
    ("internal", "external", "is_external", "shown"),
    [
        ("Cluster", "Cluster", False, ALL),
        ("Cluster", "Local", False, ALL),
        ("Local", "Cluster", False, ALL[:1]),
        ("Cluster", "Cluster", True, ALL),
        ("Cluster", "Local", True, (ALL[0], ("ready", False, "only ClusterIP+inside"))),
        ("Local", "Cluster", True, (ALL[0], ("ready", False, "only inside+outside"))),
        ("Local", "Local", True, (ALL[0], ("ready", False, "only inside"))),
    ],
    ids=[
        "all, for a ClusterIP",
        "the external policy is not a ClusterIP's",
        "those on this node, for a ClusterIP that is Local",
        "all, for everybody",
        "all, but not from outside",
        "all, but not for the ClusterIP",
        "all, but only for those inside, at other frontends",
    ],
)
def test_backends_are_those_to_whom_somebody_is_led(
    internal: str, external: str, is_external: bool, shown: tuple[tuple[str, bool, str], ...]
) -> None:
    """POL-01 to POL-05, POL-07."""
    (one,) = listed(
        planned(
            port_name(),
            HERE,
            THERE,
            internal=Policy(internal),
            external=Policy(external),
            frontends=dialled() if is_external else (),
        )
    )
    states = [(each.state, each.local) for each in one.service.backends]
    assert [(*each, mark) for each, mark in zip(states, one.backend_marks, strict=True)] == [*shown]
    policies = (one.service.internal_policy, one.service.external_policy)
    assert policies == (internal, external)


@pytest.mark.parametrize(
    ("external", "is_external", "marks"),
    [
        ("Local", True, ("only ClusterIP+inside", "only outside")),
        ("Cluster", True, ("", "")),
        ("Local", False, ("", "")),
    ],
    ids=["its own set is used", "its own set is not used", "there is no outside"],
)
def test_a_local_set_that_fell_back_is_shown_as_terminating(
    external: str, is_external: bool, marks: tuple[str, str]
) -> None:
    """TOP-14: it takes new connections from outside, while those inside go to what is ready."""
    (one,) = listed(
        planned(
            port_name(),
            THERE,
            local=[HERE_ENDS],
            external=Policy(external),
            frontends=dialled() if is_external else (),
        )
    )
    assert [(b.address, b.state, b.local) for b in one.service.backends] == [
        (pod_ip(2), "ready", False),
        (pod_ip(3), "terminating", True),
    ]
    assert one.backend_marks == marks


def test_what_drains_is_shown_as_terminating() -> None:
    (one,) = listed(
        planned(
            port_name(),
            HERE,
            draining=[backend(pod_ip(9)), HERE_ENDS, THERE_ENDS],
            frontends=dialled(),
        )
    )
    assert [(b.address, b.state, b.local) for b in one.service.backends] == [
        (pod_ip(1), "ready", True),
        (pod_ip(3), "terminating", True),
        (pod_ip(4), "terminating", False),
    ]
    assert one.backend_marks == ("", "", "")


def test_each_family_has_its_own_sets() -> None:
    here6, there6 = backend(pod_ip(1, Family.IPV6), local=True), backend(pod_ip(2, Family.IPV6))
    (one,) = listed(
        planned(port_name(), HERE, THERE, external=Policy.LOCAL, frontends=dialled()),
        planned(port_name(family=Family.IPV6), here6, there6, external=Policy.LOCAL),
    )
    assert [b.address for b in one.service.backends] == [
        pod_ip(1),
        pod_ip(2),
        pod_ip(1, Family.IPV6),
        pod_ip(2, Family.IPV6),
    ]
    assert one.backend_marks == ("", "only ClusterIP+inside", "", "")


def test_backends_of_one_address_are_in_the_order_of_their_ports() -> None:
    (one,) = listed(
        planned(port_name(), backend(pod_ip(10), 9), backend(pod_ip(9), 80), backend(pod_ip(9), 8))
    )
    assert [(b.address, b.port) for b in one.service.backends] == [
        (pod_ip(9), 8),
        (pod_ip(9), 80),
        (pod_ip(10), 9),
    ]


V4_ONLY = planned(port_name(), THERE)
V6_NONE = planned(port_name(family=Family.IPV6))
V4_NONE = planned(port_name())
V4_OUTSIDE = planned(port_name(), THERE, external=Policy.LOCAL, frontends=dialled())
V6_ALL = planned(port_name(family=Family.IPV6), backend(pod_ip(1, Family.IPV6)))


@pytest.mark.parametrize(
    ("ports", "notes"),
    [
        ([V4_ONLY], ()),
        ([V4_NONE], ("none: refused",)),
        ([V4_NONE, V6_NONE], ("none: refused",)),
        ([V4_ONLY, V6_NONE], ("IPv6 none: refused",)),
        (
            [planned(port_name(), THERE, internal=Policy.LOCAL)],
            ("none on this node: refused",),
        ),
        (
            [planned(port_name(), THERE, internal=Policy.LOCAL, frontends=dialled())],
            ("none on this node for ClusterIP: refused",),
        ),
        ([V4_OUTSIDE], ("none on this node for outside: refused",)),
        ([V4_OUTSIDE, V6_ALL], ("IPv4 none on this node for outside: refused",)),
        (
            [
                planned(
                    port_name(),
                    THERE,
                    internal=Policy.LOCAL,
                    external=Policy.LOCAL,
                    frontends=dialled(),
                )
            ],
            ("none on this node for ClusterIP+outside: refused",),
        ),
        ([planned(port_name(), external=Policy.LOCAL, frontends=dialled())], ("none: refused",)),
        ([planned(port_name(), THERE, socket_lb=False)], ("left to others",)),
    ],
    ids=[
        "an endpoint",
        "no endpoint",
        "no endpoint of either family",
        "no endpoint of one family",
        "none that the policy allows",
        "none that the internal policy allows",
        "none that the external policy allows",
        "none that the external policy allows, of one family",
        "none that either policy allows",
        "no endpoint, whatever the policy",
        "excluded from the socket path",
    ],
)
def test_notes_say_what_reaches_no_backend(
    ports: list[PlannedPort], notes: tuple[str, ...]
) -> None:
    """NOEP-01 to NOEP-06."""
    (one,) = listed(*ports)
    assert one.notes == notes


def test_a_slot_without_a_name_is_listed_last_and_by_itself() -> None:
    tables = programmed(
        planned(port_name("a", "")),
        planned(port_name("b", "")),
        planned(port_name("c", "")),
    )
    seen = read(tables)
    for port in seen.ports[:2]:
        tables.names.delete(ID.pack(port.id))
    found = rows.services(read(tables), lambda _slot: 0)
    assert [one.service.service for one in found] == ["default/c", None, None]
    assert [index_of(one.service.id) for one in found] == [2, 0, 1]
