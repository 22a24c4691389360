"""Service ports that drop for want of a local endpoint (MET-17), counted as the plan changes."""

from __future__ import annotations

import random

import msgspec
import pytest

from ebpflb.localcount import Count, NoLocalEndpoints
from ebpflb.model import Family, Plan, PlannedPort, Policy, Selection, Verdict
from ebpflb.planner.topology import select
from tests.builders import backend, pod_ip, port_name

V4, V6 = Family.IPV4, Family.IPV6
LOCAL = backend(pod_ip(2), local=True)
REMOTE = backend(pod_ip(2, node=2))
DROP = Selection(Verdict.DROP, ())
FORWARD = Selection(Verdict.FORWARD, (REMOTE,))
REJECT = Selection(Verdict.REJECT, ())


def planned(
    name: str = "web",
    *,
    family: Family = V4,
    internal: Selection = FORWARD,
    external: Selection | None = None,
) -> PlannedPort:
    return PlannedPort(
        name=port_name(name, family=family),
        frontends=(),
        internal=internal,
        external=external,
        draining=(),
        affinity_s=0,
        internal_policy=Policy.CLUSTER,
        external_policy=Policy.CLUSTER,
    )


def counted(*ports: PlannedPort) -> dict[Family, Count]:
    plan = Plan({port.name: port for port in ports})
    found = NoLocalEndpoints()
    found.changed(plan.ports, plan)
    return found.counts


@pytest.mark.parametrize(
    ("port", "expected"),
    [
        pytest.param(planned(), (0, 0), id="it has endpoints"),
        pytest.param(planned(internal=DROP), (1, 0), id="none for the ClusterIP"),
        pytest.param(planned(external=DROP), (0, 1), id="none for outside"),
        pytest.param(planned(internal=DROP, external=DROP), (1, 1), id="none for either"),
        pytest.param(planned(internal=REJECT, external=REJECT), (0, 0), id="none anywhere"),
        pytest.param(planned(external=FORWARD), (0, 0), id="some for outside"),
    ],
)
def test_a_scope_counts_where_endpoints_are_on_other_nodes_only(
    port: PlannedPort, expected: tuple[int, int]
) -> None:
    assert counted(port) == {V4: expected, V6: (0, 0)}


@pytest.mark.parametrize("endpoints", [(), (REMOTE,), (LOCAL,), (LOCAL, REMOTE)])
@pytest.mark.parametrize("policy", Policy)
def test_it_is_what_the_policy_says(endpoints: tuple[object, ...], policy: Policy) -> None:
    """NOEP-14: only with Local, and only while there is an endpoint elsewhere."""
    choice = select(
        endpoints,  # type: ignore[arg-type]
        internal_policy=policy,
        external_policy=policy,
        externally_accessible=True,
    )
    expected = policy is Policy.LOCAL and endpoints == (REMOTE,)
    found = counted(planned(internal=choice.internal, external=choice.external))
    assert found[V4] == (expected, expected)


def test_the_families_are_counted_apart() -> None:
    found = counted(
        planned("a", internal=DROP), planned("b", family=V6, internal=DROP, external=DROP)
    )
    assert found == {V4: (1, 0), V6: (1, 1)}


def test_what_changes_and_what_goes_is_followed() -> None:
    """Any sequence of changes comes to what counting it all comes to."""
    rng = random.Random(7)
    selections = [DROP, FORWARD, REJECT]
    ports: dict[object, PlannedPort] = {}
    plan = Plan(ports)  # type: ignore[arg-type] # a view, as the planner's
    found = NoLocalEndpoints()
    for _ in range(300):
        names = set()
        for _ in range(rng.randrange(4)):
            port = planned(
                rng.choice("abcdef"),
                family=rng.choice([V4, V6]),
                internal=rng.choice(selections),
                external=rng.choice([*selections, None]),
            )
            names.add(port.name)
            if rng.random() < 0.3:
                ports.pop(port.name, None)
            else:
                ports[port.name] = port
        found.changed(names, plan)
        assert found.counts == counted(*ports.values())


def test_the_same_change_told_twice_counts_once() -> None:
    port = planned(internal=DROP)
    plan = Plan({port.name: port})
    found = NoLocalEndpoints()
    found.changed([port.name, port.name], plan)
    found.changed([port.name], plan)
    assert found.counts[V4] == (1, 0)
    forwards = msgspec.structs.replace(port, internal=FORWARD)
    found.changed([port.name], Plan({port.name: forwards}))
    assert found.counts[V4] == (0, 0)
