# SPDX-License-Identifier: Apache-2.0
"""Any sequence of events: remembered = from scratch = what the rules say, and no change untold.

Names, addresses and ports are so few, and the first ones so likely, that conflicts, duplicates,
moves and re-creations abound.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ebpflb.model import (
    NO_HINTS,
    Address,
    Backend,
    Deleted,
    EndpointSlice,
    EndpointState,
    Event,
    Family,
    Frontend,
    FrontendKind,
    HealthCheck,
    Hints,
    LocalAddresses,
    Node,
    ObjectKey,
    Plan,
    PlannedPort,
    Policy,
    Protocol,
    Refused,
    Selection,
    Service,
    ServicePort,
    ServicePortName,
    SlicePort,
    Synced,
    Upserted,
    Verdict,
    family_of,
    parse_address,
    parse_network,
    special_use,
    unspecified,
)
from ebpflb.planner.options import PlannerOptions
from ebpflb.planner.plan import Planner
from tests.builders import NODE, OTHER_NODE, at, cluster_ip, endpoint_slice, pod_ip
from tests.builders import service as web_service

NAMESPACES = st.sampled_from(["a", "a", "a", "b"])
NAMES = st.sampled_from(["x", "x", "x", "y", "z"])
PORT_NAMES = st.sampled_from(["http", "http", "http", ""])
PROTOCOLS = st.sampled_from([Protocol.TCP, Protocol.TCP, Protocol.UDP])
NUMBERS = st.integers(80, 81)
NODE_PORTS = st.sampled_from([0, 0, 80, 30080])
PROBLEMS = st.sampled_from([(), ("part one is bad",), ("part one is bad", "part two is bad")])
V4 = st.sampled_from([cluster_ip(1), cluster_ip(2)])
V6 = st.just("fd96::1")
READY = EndpointState.READY
STATES = st.sampled_from([READY, READY, READY, EndpointState.TERMINATING, EndpointState.UNUSABLE])
ZONES = st.sampled_from([["a"], ["a"], ["b"], ["b"], ["a", "b"], []])
HINTED_NODES = st.sampled_from([[NODE], [OTHER_NODE], [NODE, OTHER_NODE], []])
HINTS = [{}, {"zones": ZONES}, {"zones": ZONES}, {"zones": ZONES, "nodes": HINTED_NODES}]
OUTER = st.sampled_from(["192.0.2.1", "192.0.2.2", "2001:db8::1", cluster_ip(1)])
NODE_ADDRESSES = st.sampled_from(["192.168.50.1", "10.1.0.1", "fd50::1"])
OPTIONS = st.builds(
    PlannerOptions,
    node_name=st.just(NODE),
    node_port_addresses=st.sampled_from([None, ("primary",), ("10.0.0.0/8", "localhost")]),
    localhost_node_ports=st.booleans(),
    external_ips=st.sampled_from([None, ("192.0.2.1/32", "2001:db8::/32")]),
    allow_external_ips=st.sampled_from([True, True, False]),
    detect_local_mode=st.sampled_from(["ClusterCIDR", "NodeCIDR", "BridgeInterface"]),
    cluster_cidrs=st.sampled_from([(), ("10.244.0.0/16",)]),
    pod_bridge=st.just("cni0"),
    masquerade_all=st.booleans(),
    bind_address=st.sampled_from(["", "0.0.0.0", "10.1.0.9"]),
)


def addresses(texts: st.SearchStrategy[str], most: int = 2) -> st.SearchStrategy[Any]:
    return st.lists(texts.map(parse_address), max_size=most, unique=True).map(tuple)


def services() -> st.SearchStrategy[Service]:
    return st.builds(
        Service,
        namespace=NAMESPACES,
        name=NAMES,
        created=st.sampled_from(["", "2025-01-01T00:00:00Z", "2026-01-01T00:00:00Z"]),
        cluster_ips=st.one_of(
            *(st.tuples(V4), st.tuples(V4), st.tuples(V4, V6), st.tuples(V6), st.tuples())
        ).map(lambda texts: tuple(map(parse_address, texts))),
        ports=st.lists(
            st.builds(ServicePort, PORT_NAMES, PROTOCOLS, NUMBERS, NODE_PORTS), max_size=3
        ).map(tuple),
        affinity_s=st.sampled_from([0, 60]),
        internal_policy=st.sampled_from(Policy),
        external_policy=st.sampled_from(Policy),
        socket_lb=st.booleans(),
        external_ips=addresses(OUTER),
        ingress_ips=addresses(OUTER),
        source_ranges=st.sampled_from(
            [(), ("10.0.0.0/8",), ("fd50::/64",), ("10.0.0.0/8", "fd00::/48")]
        ).map(lambda texts: tuple(map(parse_network, texts))),
        health_port=st.sampled_from([0, 0, 32000]),
        problems=PROBLEMS,
    )


@st.composite
def slices(draw: st.DrawFn) -> EndpointSlice:
    pods = draw(st.sampled_from([[pod_ip(n) for n in (10, 11, 12)], ["fd00:244:1::a"]]))
    nodes = st.sampled_from([NODE, OTHER_NODE, ""])
    hints: dict[str, Any] = draw(st.sampled_from(HINTS))
    row = st.builds(at, st.sampled_from(pods), nodes, STATES, **hints)
    return endpoint_slice(
        *draw(st.lists(row, max_size=4)),
        name=draw(st.sampled_from(["s-1", "s-2", "s-3"])),
        namespace=draw(NAMESPACES),
        service=draw(NAMES),
        ports=draw(st.lists(st.builds(SlicePort, PORT_NAMES, PROTOCOLS, NUMBERS), max_size=2)),
        problems=draw(PROBLEMS),
    )


def nodes() -> st.SearchStrategy[Node]:
    return st.builds(
        Node,
        name=st.sampled_from([NODE, NODE, NODE, OTHER_NODE]),
        zone=st.sampled_from(["a", "b", ""]),
        addresses=addresses(NODE_ADDRESSES),
        pod_cidrs=st.sampled_from([(), ("10.244.1.0/24",), ("fd00:244:1::/64", "nonsense")]),
        problems=PROBLEMS,
    )


def keys() -> st.SearchStrategy[ObjectKey]:
    names = st.sampled_from(["x", "y", "z", "s-1", "s-2", "s-3"])
    objects = st.builds(ObjectKey, st.sampled_from(["Service", "EndpointSlice"]), NAMESPACES, names)
    nodes = st.builds(ObjectKey, st.just("Node"), st.just(""), st.sampled_from([NODE, OTHER_NODE]))
    return st.one_of(objects, objects, objects, nodes)


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Upserted, services()),
    st.builds(Upserted, services()),
    st.builds(Upserted, slices()),
    st.builds(Upserted, slices()),
    st.builds(Upserted, slices()),
    st.builds(Upserted, nodes()),
    st.builds(Deleted, keys()),
    st.builds(Refused, keys(), st.just("it is unreadable")),
    st.just(Synced()),
    st.builds(LocalAddresses, addresses(NODE_ADDRESSES, 3).map(frozenset)),
)


def start() -> st.SearchStrategy[list[Event]]:
    """Services with endpoints near and far, so that whatever comes after has something to change.

    Random events alone seldom make two objects that have anything to do with each other.
    """
    pods = [pod_ip(10), pod_ip(11), pod_ip(12)]
    near = ZONES.flatmap(
        lambda zone: st.tuples(
            *(
                st.builds(at, st.just(pod), st.just(OTHER_NODE), STATES, **hints)
                for pod, hints in zip(pods, ({"zones": st.just(zone)}, *HINTS[2:]), strict=True)
            )
        )
    )
    port = ServicePort("http", Protocol.TCP, 80, 30080)
    return st.builds(
        lambda rows, zone, number: [
            Upserted(
                web_service(
                    "x",
                    namespace="a",
                    cluster_ips=[cluster_ip(number)],
                    ports=[port],
                    external_ips=[cluster_ip(1)],
                    created="2025-01-01T00:00:00Z",
                    ingress_ips=["192.0.2.1"],
                    source_ranges=["10.0.0.0/8"],
                )
            ),
            Upserted(web_service("y", namespace="a", cluster_ips=[cluster_ip(1)], ports=[port])),
            Upserted(endpoint_slice(*rows, name="s-1", namespace="a", service="x")),
            Upserted(endpoint_slice(*rows[:2], name="s-2", namespace="a", service="y")),
            Upserted(Node(NODE, zone=zone)),
        ],
        near,
        st.sampled_from(["a", "b"]),
        st.sampled_from([1, 2]),
    )


BATCHES = st.builds(
    lambda first, more: [first, *more],
    st.one_of(start(), start(), st.just([])),
    st.lists(st.lists(EVENTS, max_size=6), max_size=12),
)


def last_words(batches: list[list[Event]]) -> dict[ObjectKey | None, Event]:
    """What was told last of each object, and of the node's addresses."""
    last: dict[ObjectKey | None, Event] = {}
    for batch in batches:
        for event in batch:
            if isinstance(event, LocalAddresses):
                last[None] = event
            elif not isinstance(event, Synced):
                last[event.obj.key if isinstance(event, Upserted) else event.key] = event
    return last


@given(batches=BATCHES, options=OPTIONS)
def test_a_planner_that_remembers_is_as_one_that_begins_anew(
    batches: list[list[Event]], options: PlannerOptions
) -> None:
    planner = Planner(options)
    for count, batch in enumerate(batches, start=1):
        for event in batch:
            planner.apply(event)
        planner.update()
        anew = Planner(options)
        for event in reversed(last_words(batches[:count]).values()):
            anew.apply(event)
        update = anew.update()
        assert planner.plan == update.plan
        assert planner.rejected == anew.rejected == update.rejected
        assert update.mended == ()


@given(batches=BATCHES, options=OPTIONS)
def test_an_update_tells_every_change_and_no_other(
    batches: list[list[Event]], options: PlannerOptions
) -> None:
    planner = Planner(options)
    ports: dict[ServicePortName, PlannedPort] = {}
    rejected = set(planner.rejected)
    for batch in batches:
        for event in batch:
            planner.apply(event)
        update = planner.update()
        differ = {
            n for n in {*ports, *update.plan.ports} if ports.get(n) != update.plan.ports.get(n)
        }
        assert update.plan is planner.plan
        assert update.changed == differ
        assert set(update.rejected) == set(planner.rejected) - rejected
        assert set(update.mended) == rejected - set(planner.rejected)
        ports, rejected = dict(update.plan.ports), set(planner.rejected)
        again = planner.update()
        assert (again.changed, again.plan) == (frozenset(), update.plan)


@given(batches=BATCHES, options=OPTIONS)
def test_the_plan_is_what_the_rules_say(
    batches: list[list[Event]], options: PlannerOptions
) -> None:
    planner = Planner(options)
    for batch in batches:
        for event in batch:
            planner.apply(event)
        if len(batch) % 2:
            planner.update()
    last = last_words(batches)
    local = last.pop(None, LocalAddresses(frozenset()))
    assert isinstance(local, LocalAddresses)
    objects = [event.obj for event in last.values() if isinstance(event, Upserted)]
    world = World(
        options,
        [obj for obj in objects if isinstance(obj, Service)],
        [obj for obj in objects if isinstance(obj, EndpointSlice)],
        next((obj for obj in objects if isinstance(obj, Node) and obj.name == NODE), None),
        local.addresses,
    )
    plan: Plan = planner.update().plan
    assert dict(plan.ports) == world.ports()
    assert dict(plan.health_checks) == world.health_checks()


@given(batches=BATCHES, options=OPTIONS)
def test_when_all_objects_are_gone_nothing_is_remembered(
    batches: list[list[Event]], options: PlannerOptions
) -> None:
    planner = Planner(options)
    for batch in batches:
        for event in batch:
            planner.apply(event)
        planner.update()
    for key in last_words(batches):
        planner.apply(Deleted(key) if key else LocalAddresses(frozenset()))
    planner.update()
    assert planner.plan == Planner(options).plan
    assert planner.rejected == ()
    memories = [*vars(planner).values(), *vars(planner._cluster).values()]
    memories += vars(planner._claims).values()
    assert [memory for memory in memories if isinstance(memory, dict | set) and memory] == []


# --- the rules, said once more without any memory ------------------------------------------------

Place = tuple[bytes, int, Protocol]


class World:
    """All that exists, and what is to be made of it."""

    def __init__(
        self,
        options: PlannerOptions,
        services: list[Service],
        slices: list[EndpointSlice],
        node: Node | None,
        local: frozenset[Address],
    ) -> None:
        self.options = options
        self.services = sorted(
            services, key=lambda s: (not s.created, s.created, s.namespace, s.name)
        )
        self.slices = slices
        self.zone = node.zone if node else ""
        bound = {parse_address("10.1.0.9")} if options.bind_address == "10.1.0.9" else set()
        known = bound | {*(node.addresses if node else ())}
        here = {one for one in local if not special_use(one)}
        self.own = (known & here or here) if here else known

    def ports(self) -> dict[ServicePortName, PlannedPort]:
        wants = [
            (service, name, port, self.frontends(service, port, address))
            for service in self.services
            for name, (port, address) in first_of_each_name(service).items()
        ]
        owners: dict[Place, ServicePortName] = {}
        for is_cluster_ip in (True, False):
            for _, name, _, frontends in wants:
                for each in frontends:
                    if (each.kind is FrontendKind.CLUSTER_IP) is is_cluster_ip:
                        owners.setdefault((each.address, each.port, each.protocol), name)
        expected = {}
        for service, name, _, frontends in wants:
            had = [
                each for each in frontends if owners[each.address, each.port, each.protocol] == name
            ]
            if had:
                expected[name] = self.port(service, name, tuple(had))
        return expected

    def frontends(self, service: Service, port: ServicePort, cluster_ip: Address) -> list[Frontend]:
        family = family_of(cluster_ip)
        found = [Frontend(cluster_ip, port.port, port.protocol, FrontendKind.CLUSTER_IP)]
        if port.node_port:
            at = unspecified(family)
            found.append(Frontend(at, port.node_port, port.protocol, FrontendKind.NODE_PORT))
        for address in sorted(service.external_ips):
            allowed = self.options.external_ips
            if (
                family_of(address) is family
                and address not in {cluster_ip, *service.ingress_ips}
                and self.options.allow_external_ips
                and (allowed is None or any(address in parse_network(one) for one in allowed))
            ):
                found.append(Frontend(address, port.port, port.protocol, FrontendKind.EXTERNAL_IP))
        found += [
            Frontend(address, port.port, port.protocol, FrontendKind.LOAD_BALANCER)
            for address in sorted(service.ingress_ips)
            if family_of(address) is family and address != cluster_ip
        ]
        return found

    def port(
        self, service: Service, name: ServicePortName, frontends: tuple[Frontend, ...]
    ) -> PlannedPort:
        usable = self.usable(name)
        all_of_them = [backend for backend, _ in usable]
        cluster = allowed(usable, self.zone) or all_of_them
        here = [backend for backend in all_of_them if backend.local]
        local = [backend for backend in here if not backend.terminating] or here
        nobody = Verdict.DROP if usable else Verdict.REJECT
        ranges = [one for one in service.source_ranges if one.family is name.family]
        is_balanced = any(each.kind is FrontendKind.LOAD_BALANCER for each in frontends)
        if not is_balanced or any(str(one).endswith("/0") for one in ranges):
            ranges = []
        return PlannedPort(
            name=name,
            frontends=frontends,
            cluster=Selection(Verdict.FORWARD if cluster else Verdict.REJECT, tuple(cluster)),
            local=Selection(Verdict.FORWARD if local else nobody, tuple(local)),
            draining=tuple(b for b in all_of_them if b not in cluster and b not in local),
            affinity_s=service.affinity_s,
            internal_policy=service.internal_policy,
            external_policy=service.external_policy,
            socket_lb=service.socket_lb,
            source_ranges=tuple(ranges),
            node_in_ranges=not ranges or any(a in one for a in self.own for one in ranges),
        )

    def usable(self, name: ServicePortName) -> list[tuple[Backend, Hints]]:
        copies = [
            (address, port.port, on == NODE, state, hints)
            for piece in self.slices
            if (piece.namespace, piece.service) == (name.namespace, name.name)
            for port in piece.ports
            if (port.name, port.protocol) == (name.port, name.protocol)
            for address, on, state, hints in zip(
                piece.addresses,
                piece.nodes,
                piece.states,
                piece.hints or [NO_HINTS] * len(piece.addresses),
                strict=True,
            )
            if family_of(address) is name.family
        ]
        usable = []
        for address, number in sorted({copy[:2] for copy in copies}):
            same = [copy for copy in copies if copy[:2] == (address, number)]
            state = max(copy[3] for copy in same)
            if state != EndpointState.UNUSABLE:
                local = any(copy[2] for copy in same)
                best = [copy[4] for copy in same if copy[3] == state]
                hints = Hints(
                    tuple(sorted({zone for each in best for zone in each.zones})),
                    tuple(sorted({node for each in best for node in each.nodes})),
                )
                terminating = state == EndpointState.TERMINATING
                usable.append((Backend(address, number, local, terminating), hints))
        return usable

    def health_checks(self) -> dict[ObjectKey, HealthCheck]:
        return {
            service.key: HealthCheck(service.health_port, self.ready_here(service))
            for service in self.services
            if service.health_port and service.ports and service.cluster_ips
        }

    def ready_here(self, service: Service) -> int:
        rows = [
            (address, on == NODE, state == EndpointState.READY)
            for piece in self.slices
            if (piece.namespace, piece.service) == (service.namespace, service.name)
            if piece.ports
            for address, on, state in zip(piece.addresses, piece.nodes, piece.states, strict=True)
        ]
        here = {address for address, is_here, _ in rows if is_here}
        return len(here & {address for address, _, is_ready in rows if is_ready})


def first_of_each_name(service: Service) -> dict[ServicePortName, tuple[ServicePort, Address]]:
    found: dict[ServicePortName, tuple[ServicePort, Address]] = {}
    for port in service.ports:
        for address in service.cluster_ips:
            family: Family = family_of(address)
            name = ServicePortName(
                service.namespace, service.name, port.name, port.protocol, family
            )
            found.setdefault(name, (port, address))
    return found


def allowed(usable: list[tuple[Backend, Hints]], zone: str) -> list[Backend]:
    ready = [(backend, hints) for backend, hints in usable if not backend.terminating]
    named = [backend for backend, hints in ready if NODE in hints.nodes]
    if named and all(hints.nodes for _, hints in ready):
        return named
    near = [backend for backend, hints in ready if zone in hints.zones]
    if near and all(hints.zones for _, hints in ready):
        return near
    return [backend for backend, _ in ready]
