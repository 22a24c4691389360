# SPDX-License-Identifier: Apache-2.0
"""Any sequence of events: remembered = from scratch = what the rules say, and no change untold.

Names, addresses and ports are so few that conflicts, duplicates, moves and re-creations abound.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ebpflb.model import (
    Backend,
    Deleted,
    EndpointSlice,
    EndpointState,
    Event,
    ObjectKey,
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
)
from ebpflb.planner.frontends import wanted_by
from ebpflb.planner.plan import Planner
from tests.builders import NODE, OTHER_NODE, at, cluster_ip, endpoint_slice, pod_ip

NAMESPACES = st.sampled_from(["a", "b"])
NAMES = st.sampled_from(["x", "y", "z"])
PORT_NAMES = st.sampled_from(["", "http"])
PROTOCOLS = st.sampled_from([Protocol.TCP, Protocol.UDP])
NUMBERS = st.integers(80, 81)
PROBLEMS = st.sampled_from([(), ("part one is bad",), ("part one is bad", "part two is bad")])
V4 = st.sampled_from([cluster_ip(1), cluster_ip(2)])
V6 = st.just("fd96::1")
STATES = st.sampled_from(EndpointState)


def services() -> st.SearchStrategy[Service]:
    return st.builds(
        Service,
        namespace=NAMESPACES,
        name=NAMES,
        created=st.sampled_from(["", "2025-01-01T00:00:00Z", "2026-01-01T00:00:00Z"]),
        cluster_ips=st.one_of(st.tuples(), st.tuples(V4), st.tuples(V4, V6), st.tuples(V6)).map(
            lambda texts: tuple(map(parse_address, texts))
        ),
        ports=st.lists(st.builds(ServicePort, PORT_NAMES, PROTOCOLS, NUMBERS), max_size=3).map(
            tuple
        ),
        affinity_s=st.sampled_from([0, 60]),
        internal_policy=st.sampled_from(Policy),
        external_policy=st.sampled_from(Policy),
        socket_lb=st.booleans(),
        problems=PROBLEMS,
    )


@st.composite
def slices(draw: st.DrawFn) -> EndpointSlice:
    pods = draw(st.sampled_from([[pod_ip(n) for n in (10, 11, 12)], ["fd00:244:1::a"]]))
    nodes = st.sampled_from([NODE, OTHER_NODE, ""])
    return endpoint_slice(
        *draw(st.lists(st.builds(at, st.sampled_from(pods), nodes, STATES), max_size=4)),
        name=draw(st.sampled_from(["s-1", "s-2", "s-3"])),
        namespace=draw(NAMESPACES),
        service=draw(NAMES),
        ports=draw(st.lists(st.builds(SlicePort, PORT_NAMES, PROTOCOLS, NUMBERS), max_size=2)),
        problems=draw(PROBLEMS),
    )


def keys() -> st.SearchStrategy[ObjectKey]:
    names = st.sampled_from(["x", "y", "z", "s-1", "s-2", "s-3"])
    return st.builds(ObjectKey, st.sampled_from(["Service", "EndpointSlice"]), NAMESPACES, names)


EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Upserted, services()),
    st.builds(Upserted, slices()),
    st.builds(Deleted, keys()),
    st.builds(Refused, keys(), st.just("it is unreadable")),
    st.just(Synced()),
)
BATCHES = st.lists(st.lists(EVENTS, max_size=6), max_size=12)


def last_words(batches: list[list[Event]]) -> dict[ObjectKey, Event]:
    """What was told last of each object."""
    last: dict[ObjectKey, Event] = {}
    for batch in batches:
        for event in batch:
            if not isinstance(event, Synced):
                last[event.obj.key if isinstance(event, Upserted) else event.key] = event
    return last


@given(batches=BATCHES)
def test_a_planner_that_remembers_is_as_one_that_begins_anew(batches: list[list[Event]]) -> None:
    planner = Planner(NODE)
    for count, batch in enumerate(batches, start=1):
        for event in batch:
            planner.apply(event)
        planner.update()
        anew = Planner(NODE)
        for event in reversed(last_words(batches[:count]).values()):
            anew.apply(event)
        update = anew.update()
        assert planner.plan == update.plan
        assert planner.rejected == anew.rejected == update.rejected
        assert update.mended == ()


@given(batches=BATCHES)
def test_an_update_tells_every_change_and_no_other(batches: list[list[Event]]) -> None:
    planner = Planner(NODE)
    ports: dict[ServicePortName, PlannedPort] = {}
    rejected = set(planner.rejected)
    for batch in batches:
        for event in batch:
            planner.apply(event)
        update = planner.update()
        differ = {
            n for n in {*ports, *update.plan.ports} if ports.get(n) != update.plan.ports.get(n)
        }
        assert update.changed == differ
        assert set(update.rejected) == set(planner.rejected) - rejected
        assert set(update.mended) == rejected - set(planner.rejected)
        ports, rejected = dict(update.plan.ports), set(planner.rejected)
        assert planner.update().changed == frozenset()


@given(batches=BATCHES)
def test_the_plan_is_what_the_rules_say(batches: list[list[Event]]) -> None:
    planner = Planner(NODE)
    for batch in batches:
        for event in batch:
            planner.apply(event)
        if len(batch) % 2:
            planner.update()
    objects = [e.obj for e in last_words(batches).values() if isinstance(e, Upserted)]
    assert dict(planner.update().plan.ports) == expected_ports(
        [obj for obj in objects if isinstance(obj, Service)],
        [obj for obj in objects if isinstance(obj, EndpointSlice)],
    )


@given(batches=BATCHES)
def test_when_all_objects_are_gone_nothing_is_remembered(batches: list[list[Event]]) -> None:
    planner = Planner(NODE)
    for batch in batches:
        for event in batch:
            planner.apply(event)
        planner.update()
    for key in last_words(batches):
        planner.apply(Deleted(key))
    planner.update()
    assert dict(planner.plan.ports) == {}
    assert planner.rejected == ()
    memories = [*vars(planner).values(), *vars(planner._cluster).values()]
    memories += vars(planner._claims).values()
    assert [memory for memory in memories if isinstance(memory, dict | set) and memory] == []


# --- the rules, said once more without any memory ------------------------------------------------


def expected_ports(
    services: list[Service], slices: list[EndpointSlice]
) -> dict[ServicePortName, PlannedPort]:
    expected: dict[ServicePortName, PlannedPort] = {}
    taken: set[tuple[bytes, int, Protocol]] = set()
    for service in sorted(services, key=lambda s: (not s.created, s.created, s.namespace, s.name)):
        named: set[ServicePortName] = set()
        for port in service.ports:
            for address in service.cluster_ips:
                name = ServicePortName(
                    service.namespace, service.name, port.name, port.protocol, family_of(address)
                )
                if name in named:
                    continue
                named.add(name)
                place = (address, port.port, port.protocol)
                if place not in taken:
                    taken.add(place)
                    expected[name] = expected_port(name, service, slices)
    return expected


def expected_port(
    name: ServicePortName, service: Service, slices: list[EndpointSlice]
) -> PlannedPort:
    copies = [
        (address, port.port, on == NODE, state)
        for piece in slices
        if (piece.namespace, piece.service) == (name.namespace, name.name)
        for port in piece.ports
        if (port.name, port.protocol) == (name.port, name.protocol)
        for address, on, state in zip(piece.addresses, piece.nodes, piece.states, strict=True)
        if family_of(address) is name.family
    ]
    usable: list[Backend] = []
    for address, number in sorted({copy[:2] for copy in copies}):
        same = [copy for copy in copies if copy[:2] == (address, number)]
        state = max(copy[3] for copy in same)
        if state != EndpointState.UNUSABLE:
            local = any(copy[2] for copy in same)
            usable.append(Backend(address, number, local, state == EndpointState.TERMINATING))
    near = [b for b in usable if b.local or service.internal_policy is Policy.CLUSTER]
    chosen = tuple([b for b in near if not b.terminating] or near)
    verdict = Verdict.FORWARD if chosen else Verdict.DROP if usable else Verdict.REJECT
    (wanted,) = (each for each in wanted_by(service).ports if each.name == name)
    return PlannedPort(
        name=name,
        frontends=wanted.frontends,
        internal=Selection(verdict, chosen),
        external=None,
        draining=tuple(b for b in usable if b not in chosen),
        affinity_s=service.affinity_s,
        internal_policy=service.internal_policy,
        external_policy=service.external_policy,
        socket_lb=service.socket_lb,
    )
