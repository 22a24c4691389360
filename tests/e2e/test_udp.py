# SPDX-License-Identifier: Apache-2.0
"""A UDP client goes on from one source port while the only pod behind a Service is replaced.

The old pod goes on answering: who still hears from it has not been moved. Ids are those of
docs/behaviour.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

from ebpflb.lab import LabError, Loop, Pod, wait_until
from tests.e2e.objects import DNS, Objects, Service, endpoint
from tests.e2e.world import FOLLOW_S, World, reaches

TALK = 20
"""Answers in a row from one pod."""

Replace = Callable[[Service, Pod, Pod], object]


def _at_once(service: Service, _old: Pod, new: Pod) -> None:
    service.endpoints(new)


def _with_nobody_between(service: Service, _old: Pod, new: Pod) -> None:
    service.endpoints().endpoints(new)


def _as_a_rollout_does(service: Service, old: Pod, new: Pod) -> None:
    going = endpoint(old, ready=False, serving=True, terminating=True)
    service.slices("all", [going, endpoint(new)])
    service.endpoints(new)


class Way(NamedTuple):
    """What is dialled and from where; ``internal`` is the internal traffic policy."""

    frontend: str
    internal: str = "Cluster"
    from_node: bool = False


def talks_to(loop: Loop, pod: Pod, *, timeout_s: float = FOLLOW_S) -> None:
    """Wait until this pod answers, and nobody else does any more."""
    loop.wait_for(
        lambda one: pod.name in one.backends, timeout_s=timeout_s, what=f"{pod.name} answers"
    )
    before = loop.outcome()
    after = loop.wait_for(
        lambda one: one.backends[pod.name] >= before.backends[pod.name] + TALK,
        timeout_s=FOLLOW_S,
        what=f"{pod.name} goes on answering",
    )
    others = {name: count for name, count in after.backends.items() if name != pod.name}
    assert others == {name: before.backends[name] for name in others}, after


@pytest.mark.parametrize(
    ("replace", "connected"),
    [
        pytest.param(_at_once, False, id="at once"),
        pytest.param(_at_once, True, id="at once, connected"),
        pytest.param(_with_nobody_between, False, id="nobody between"),
        pytest.param(_as_a_rollout_does, False, id="rollout"),
        pytest.param(_as_a_rollout_does, True, id="rollout, connected"),
    ],
)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(Way("ClusterIP"), id="ClusterIP"),
        pytest.param(Way("ClusterIP", internal="Local"), id="Local"),
        pytest.param(Way("ClusterIP", from_node=True), id="ClusterIP, from the node"),
        pytest.param(Way("NodePort"), id="NodePort"),
        pytest.param(Way("NodePort", from_node=True), id="NodePort, from the node"),
    ],
)
def test_a_client_follows_when_the_only_pod_is_replaced(
    world: World, objects: Objects, way: Way, replace: Replace, connected: bool
) -> None:
    """CT-08, E-C01 to E-C04: a connected one by an error, upon which it connects anew."""
    old, new, *_ = world.backends
    service = objects.service(DNS, type="NodePort", internalTrafficPolicy=way.internal)
    place = world.node if way.from_node else world.client
    for ip, port in service.dials(world.node, 53)[way.frontend]:
        service.endpoints(old)
        reaches(place, ip, port, {old.name}, protocol="udp")
        with place.udp_loop(
            ip, port, connected=connected, reopen=connected, interval_s=0.005, timeout_s=0.3
        ) as loop:
            talks_to(loop, old)
            replace(service, old, new)
            talks_to(loop, new)
            outcome = loop.stop()
            if replace is _at_once and not connected:
                assert outcome.failed == 0, outcome


def _unready(objects: Objects, pod: Pod) -> Service:
    return objects.service(DNS, type="NodePort").endpoints(pod, ready=False)


def _ways(world: World, service: Service) -> list[tuple[str, int]]:
    dials = service.dials(world.node, 53)
    return [*dials["ClusterIP"], *dials["NodePort"]]


def _nobody(world: World, ip: str, port: int) -> None:
    """Wait until who connects there is refused."""
    wait_until(
        lambda: (
            world.client.udp(ip, port, connected=True, timeout_s=0.3).errors == {"ECONNREFUSED": 1}
        ),
        timeout_s=FOLLOW_S,
        what=f"{ip} port {port} is refused",
    )


def _refused(loop: Loop) -> None:
    loop.wait_for(
        lambda one: "ECONNREFUSED" in one.errors, timeout_s=FOLLOW_S, what="it is refused"
    )


def test_a_client_that_began_too_early_is_answered_in_the_end(
    world: World, objects: Objects
) -> None:
    """CT-09, E-C05: it sends while the only endpoint is not ready, and from then on."""
    pod = world.backends[0]
    service = _unready(objects, pod)
    for ip, port in _ways(world, service):
        service.endpoints(pod, ready=False)
        _nobody(world, ip, port)
        with world.client.udp_loop(ip, port, interval_s=0.005, timeout_s=0.1) as loop:
            loop.wait_for(lambda one: one.failed > 2, timeout_s=FOLLOW_S, what="nobody answers")
            service.endpoints(pod)
            talks_to(loop, pod)


def test_a_connected_client_that_was_refused_is_told_when_there_is_somebody(
    world: World, objects: Objects
) -> None:
    """CT-09: by another error than the refusals; then it connects anew."""
    pod = world.backends[0]
    service = _unready(objects, pod)
    for ip, port in _ways(world, service):
        service.endpoints(pod, ready=False)
        with world.client.udp_loop(ip, port, connected=True, interval_s=0.005) as loop:
            _refused(loop)
            service.endpoints(pod)
            loop.wait_for(
                lambda one: not one.errors.keys().isdisjoint({"ECONNABORTED", "EDESTADDRREQ"}),
                timeout_s=FOLLOW_S,
                what="it is told",
            )
        assert world.client.udp(ip, port, connected=True).backends == {pod.name: 1}


@pytest.mark.xfail(reason="a connect() that failed is noted as if it had not", raises=LabError)
def test_a_connected_client_that_connects_anew_after_each_refusal_is_answered_in_the_end(
    world: World, objects: Objects
) -> None:
    """CT-09: the same socket, which keeps the loopback as its source (EINVAL) until it is cut."""
    pod = world.backends[0]
    service = _unready(objects, pod)
    with world.client.udp_loop(
        service.ip, 53, connected=True, reopen=True, interval_s=0.005, timeout_s=0.1
    ) as loop:
        _refused(loop)
        service.endpoints(pod)
        talks_to(loop, pod, timeout_s=5.0)
