# SPDX-License-Identifier: Apache-2.0
"""The maps as plain values: the keys that are promised, the words, the order, the merging."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from ebpflb.datapath.ebpf import abi, inspect, rows
from ebpflb.datapath.ebpf.rows import (
    AffinityRow,
    BackendRow,
    ConnectionsRow,
    FrontendRow,
    ListedService,
    MemberRow,
    NameRow,
    PortRow,
    ProbeRow,
    ServiceBackend,
    ServiceFrontend,
    SettingsRow,
    StatRow,
    UdpConnRow,
)
from ebpflb.datapath.ebpf.tables import ID, Snapshot, index_of, read
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
)
from tests.builders import backend, cluster_ip, pod_ip, port_name
from tests.memory_tables import ManualGate, MemoryTables

NAMES = {1: "default/web:http", 2: "default/dns"}


def planned(
    name: ServicePortName,
    *backends: Backend,
    draining: Sequence[Backend] = (),
    external: Sequence[Backend] | None = None,
    frontends: Sequence[tuple[str, int, FrontendKind]] = (),
    affinity_s: int = 0,
    nothing: Verdict = Verdict.REJECT,
    socket_lb: bool = True,
) -> PlannedPort:
    """A service port with the frontends given, else one ClusterIP."""

    def selection(chosen: Sequence[Backend]) -> Selection:
        ordered = tuple(sorted(chosen, key=lambda one: (one.address, one.port)))
        return Selection(Verdict.FORWARD if ordered else nothing, ordered)

    dialled = frontends or [(cluster_ip(10, name.family), 80, FrontendKind.CLUSTER_IP)]
    return PlannedPort(
        name=name,
        frontends=tuple(
            Frontend(parse_address(address), port, name.protocol, kind)
            for address, port, kind in dialled
        ),
        internal=selection(backends),
        external=None if external is None else selection(external),
        draining=tuple(draining),
        affinity_s=affinity_s,
        internal_policy=Policy.CLUSTER,
        external_policy=Policy.LOCAL if external is not None else Policy.CLUSTER,
        socket_lb=socket_lb,
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
    "slot id service protocol family internal_base internal_count internal_flags internal_policy "
    "external_base external_count external_flags external_policy draining affinity_seconds"
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
        (PortRow, PORT_KEYS),
        (BackendRow, "slot address port flags ranges id service"),
        (AffinityRow, "client path address port age_seconds id service"),
        (MemberRow, "address port role id service"),
        (UdpConnRow, "socket netns address port id service"),
        (ConnectionsRow, "slot connections protocol family id service"),
        (StatRow, "name count"),
        (ProbeRow, "hook socket netns"),
        (NameRow, "id service"),
        (
            SettingsRow,
            "host_netns udp_timeout_seconds udp_stream_timeout_seconds programs options",
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


def test_every_map_is_either_dumped_or_socket_storage() -> None:
    assert set(inspect.DUMPABLE) | set(inspect.NOT_LISTABLE) == set(abi.MAPS)
    assert inspect.NOT_LISTABLE == ("sock_peer", "sock_udp")
    assert inspect.EVICTING == ("affinity",)
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


def test_ports_show_ranges_flags_and_policies() -> None:
    seen = snapshot(
        planned(
            port_name(),
            backend(pod_ip(1)),
            backend(pod_ip(2)),
            draining=[backend(pod_ip(3), terminating=True)],
            external=[backend(pod_ip(2))],
            affinity_s=60,
        ),
        planned(port_name("none", ""), nothing=Verdict.DROP),
    )
    none, web = rows.port_rows(seen.ports, seen.names)
    assert web == PortRow(
        slot=1,
        id=seen.ports[1].id,
        service="default/web:http",
        protocol="TCP",
        family="IPv4",
        internal_base=0,
        internal_count=2,
        internal_flags=["affinity"],
        internal_policy="Cluster",
        external_base=3,
        external_count=1,
        external_flags=["affinity"],
        external_policy="Local",
        draining=1,
        affinity_seconds=60,
    )
    assert (none.internal_count, none.internal_flags) == (0, ["none_local"])


def test_backends_show_in_which_ranges_each_slot_is() -> None:
    seen = snapshot(
        planned(
            port_name(),
            backend(pod_ip(1), local=True),
            draining=[backend(pod_ip(2), terminating=True)],
            external=[backend(pod_ip(1), local=True)],
        )
    )
    found = rows.backend_rows(seen)
    assert [(row.slot, row.address, row.flags, row.ranges) for row in found] == [
        (0, pod_ip(1), ["local"], ["internal", "external"]),
        (1, pod_ip(2), ["terminating"], ["draining"]),
    ]
    assert {row.service for row in found} == {"default/web:http"}


def test_a_slot_of_another_owner_is_shown_as_foreign() -> None:
    seen = snapshot(planned(port_name(), backend(pod_ip(1))))
    (port,) = seen.ports
    (slot,) = seen.backends[port.id]
    (row,) = rows.backend_rows(seen._replace(backends={port.id: (slot._replace(owner=77),)}))
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
        planned(port_name("b", ""), backend(pod_ip(1)), affinity_s=10),
    )
    found = rows.member_rows(seen.members, seen.names)
    assert [(row.service, row.address, row.port, row.role) for row in found] == [
        ("default/a", pod_ip(2), 8080, "serving"),
        ("default/b", pod_ip(1), 8080, "internal"),
    ]


def test_connected_udp_sockets_show_cookies_and_backend() -> None:
    layout = abi.LAYOUTS["udp_conn"]
    items = [
        (struct.pack("=Q", 30), layout.pack(parse_address("127.0.0.1"), bytes(2), 5, 8)),
        (
            struct.pack("=Q", 20),
            layout.pack(parse_address(pod_ip(1)), (53).to_bytes(2), 2, 7),
        ),
    ]
    assert rows.udp_conn_rows(items, NAMES) == [
        UdpConnRow(20, 7, pod_ip(1), 53, 2, "default/dns"),
        UdpConnRow(30, 8, "127.0.0.1", 0, 5, None),
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
    entries[abi.CONSTANTS["HOOK_CONNECT6"]] = abi.LAYOUTS["probe"].pack(44, 44, 3)
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
    raw = abi.LAYOUTS["settings"].pack(3, 30 * 10**9, 120 * 10**9, 0xABC, left)
    assert rows.settings_row(raw) == SettingsRow(3, 30, 120, "0000000000000abc", options)


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


def test_frontends_stand_by_type_and_a_nodeport_is_a_star() -> None:
    (one,) = listed(
        planned(
            port_name(),
            backend(pod_ip(1)),
            external=[backend(pod_ip(1))],
            frontends=[
                ("203.0.113.9", 80, FrontendKind.LOAD_BALANCER),
                ("198.51.100.1", 80, FrontendKind.EXTERNAL_IP),
                ("0.0.0.0", 30080, FrontendKind.NODE_PORT),
                (cluster_ip(10), 80, FrontendKind.CLUSTER_IP),
            ],
        ),
        planned(
            port_name(family=Family.IPV6),
            external=[],
            frontends=[("::", 30080, FrontendKind.NODE_PORT)],
        ),
    )
    assert one.service.frontends == [
        ServiceFrontend(cluster_ip(10), 80, "ClusterIP"),
        ServiceFrontend("*", 30080, "NodePort"),
        ServiceFrontend("198.51.100.1", 80, "ExternalIP"),
        ServiceFrontend("203.0.113.9", 80, "LoadBalancer"),
    ]


def test_backends_are_those_of_both_scopes_and_what_drains() -> None:
    (one,) = listed(
        planned(
            port_name(),
            backend(pod_ip(1)),
            backend(pod_ip(2), terminating=True),
            draining=[backend(pod_ip(4)), backend(pod_ip(5), terminating=True)],
            external=[backend(pod_ip(3), local=True), backend(pod_ip(4))],
        )
    )
    assert [(b.address, b.state, b.local) for b in one.service.backends] == [
        (pod_ip(1), "ready", False),
        (pod_ip(2), "terminating", False),
        (pod_ip(3), "ready", True),
        (pod_ip(4), "ready", False),
        (pod_ip(5), "terminating", False),
    ]


def test_backends_of_one_address_are_in_the_order_of_their_ports() -> None:
    (one,) = listed(
        planned(port_name(), backend(pod_ip(10), 9), backend(pod_ip(9), 80), backend(pod_ip(9), 8))
    )
    assert [(b.address, b.port) for b in one.service.backends] == [
        (pod_ip(9), 8),
        (pod_ip(9), 80),
        (pod_ip(10), 9),
    ]


V4_ONLY = planned(port_name(), backend(pod_ip(1)))
V6_NONE = planned(port_name(family=Family.IPV6))
V4_NONE = planned(port_name())


@pytest.mark.parametrize(
    ("ports", "notes"),
    [
        ([V4_ONLY], ()),
        ([V4_NONE], ("none: refused",)),
        ([V4_NONE, V6_NONE], ("none: refused",)),
        ([V4_ONLY, V6_NONE], ("IPv6 none: refused",)),
        ([planned(port_name(), nothing=Verdict.DROP)], ("none on this node: refused",)),
        ([planned(port_name(), draining=[backend(pod_ip(2))])], ("none: refused",)),
        ([planned(port_name(), backend(pod_ip(1)), socket_lb=False)], ("left to others",)),
    ],
    ids=[
        "an endpoint",
        "no endpoint",
        "no endpoint of either family",
        "no endpoint of one family",
        "none that the policy allows",
        "only one that drains",
        "excluded from the socket path",
    ],
)
def test_notes_say_what_reaches_no_backend(
    ports: list[PlannedPort], notes: tuple[str, ...]
) -> None:
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
