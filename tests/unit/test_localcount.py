"""Service ports that drop for want of a local endpoint (MET-17), counted as the plan changes."""

from __future__ import annotations

import random

import msgspec
import pytest

from ebpflb.localcount import Count, NoLocalEndpoints
from ebpflb.model import Backend, Family, FrontendKind, Plan, PlannedPort, Policy
from ebpflb.planner.endpoints import Endpoints
from ebpflb.planner.topology import select
from tests.builders import NODE, backend, frontend, pod_ip, port_name

V4, V6 = Family.IPV4, Family.IPV6
CLUSTER, LOCAL = Policy.CLUSTER, Policy.LOCAL
HERE = backend(pod_ip(2), local=True)
ELSEWHERE = backend(pod_ip(2, node=2))


def planned(
    *endpoints: Backend,
    name: str = "web",
    family: Family = V4,
    internal: Policy = LOCAL,
    external: Policy | None = None,
) -> PlannedPort:
    """A service port; without ``external`` it has no address but its ClusterIP."""
    choice = select(Endpoints(endpoints), node=NODE, zone="")
    kind = FrontendKind.CLUSTER_IP if external is None else FrontendKind.NODE_PORT
    return PlannedPort(
        name=port_name(name, family=family),
        frontends=(frontend("10.96.0.10", kind=kind),),
        cluster=choice.cluster,
        local=choice.local,
        draining=(),
        affinity_s=0,
        internal_policy=internal,
        external_policy=external or CLUSTER,
    )


def counted(*ports: PlannedPort) -> dict[Family, Count]:
    plan = Plan({port.name: port for port in ports})
    found = NoLocalEndpoints()
    found.changed(plan.ports, plan)
    return found.counts


@pytest.mark.parametrize(
    ("port", "expected"),
    [
        pytest.param(planned(HERE, ELSEWHERE, external=LOCAL), (0, 0), id="one is here"),
        pytest.param(planned(HERE, external=LOCAL), (0, 0), id="the only one is here"),
        pytest.param(planned(ELSEWHERE), (1, 0), id="none for the ClusterIP"),
        pytest.param(planned(ELSEWHERE, internal=CLUSTER), (0, 0), id="no policy asks for one"),
        pytest.param(
            planned(ELSEWHERE, internal=CLUSTER, external=LOCAL), (0, 1), id="none for outside"
        ),
        pytest.param(planned(ELSEWHERE, external=LOCAL), (1, 1), id="none for either"),
        pytest.param(planned(external=LOCAL), (0, 0), id="none anywhere"),
    ],
)
def test_a_policy_counts_where_endpoints_are_on_other_nodes_only(
    port: PlannedPort, expected: tuple[int, int]
) -> None:
    """NOEP-14"""
    assert counted(port) == {V4: expected, V6: (0, 0)}


def test_the_families_are_counted_apart() -> None:
    found = counted(
        planned(ELSEWHERE, name="a"),
        planned(ELSEWHERE, name="b", family=V6, external=LOCAL),
    )
    assert found == {V4: (1, 0), V6: (1, 1)}


def test_what_changes_and_what_goes_is_followed() -> None:
    """Any sequence of changes comes to what counting it all comes to."""
    rng = random.Random(7)
    some = [(), (HERE,), (ELSEWHERE,), (HERE, ELSEWHERE)]
    ports: dict[object, PlannedPort] = {}
    plan = Plan(ports)  # type: ignore[arg-type] # a view, as the planner's
    found = NoLocalEndpoints()
    for _ in range(300):
        names = set()
        for _ in range(rng.randrange(4)):
            port = planned(
                *rng.choice(some),
                name=rng.choice("abcdef"),
                family=rng.choice([V4, V6]),
                internal=rng.choice([CLUSTER, LOCAL]),
                external=rng.choice([CLUSTER, LOCAL, None]),
            )
            names.add(port.name)
            if rng.random() < 0.3:
                ports.pop(port.name, None)
            else:
                ports[port.name] = port
        found.changed(names, plan)
        assert found.counts == counted(*ports.values())


def test_the_same_change_told_twice_counts_once() -> None:
    port = planned(ELSEWHERE)
    plan = Plan({port.name: port})
    found = NoLocalEndpoints()
    found.changed([port.name, port.name], plan)
    found.changed([port.name], plan)
    assert found.counts[V4] == (1, 0)
    forwards = msgspec.structs.replace(port, internal_policy=CLUSTER)
    found.changed([port.name], Plan({port.name: forwards}))
    assert found.counts[V4] == (0, 0)
