"""Whatever happens, and whatever goes wrong meanwhile: in the end the agent knows what is."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebpflb.model import Upserted
from ebpflb.sources.cluster import ApiSource
from ebpflb.sources.transport import Access, Credentials
from tests.apiserver.conftest import KUBERNETES, KUBERNETES_SLICE, THIS_NODE
from tests.apiserver.consumer import QUICK, Consumer
from tests.apiserver.fake import (
    GONE,
    KINDS,
    Answer,
    Body,
    Drip,
    EmptyList,
    FakeApiServer,
    HalfList,
    Resource,
    Silence,
    Spoiler,
    Stream,
    error_event,
)
from tests.builders import NODE, cluster_ip, endpoint_object, pod_ip, service_object, slice_object


class Step(NamedTuple):
    """Something that happens to the server; ``text`` is for a failure's report."""

    text: str
    do: Callable[[FakeApiServer], None]

    def __repr__(self) -> str:
        return self.text


SPOILERS: Final[tuple[Spoiler, ...]] = (
    GONE,
    Answer(410),
    Answer(429, headers=(("Retry-After", "0"),)),
    Answer(500),
    Answer(504, details={"causes": [{"reason": "ResourceVersionTooLarge"}]}),
    Answer(403),
    Answer(401),
    Body(b"garbage"),
    Body(b"{}"),
    HalfList(),
    EmptyList(),
    Drip(size=50),
    Silence(),
    Stream(after=1, end="half"),
    Stream(after=1, end="cut"),
    Stream(end="half close"),
    Stream(end="close"),
    Stream(end="silence"),
    Stream(twice=True),
    Stream(lines=(b"garbage\n",)),
    Stream(after=2, lines=(error_event(500),), end="close"),
)

names = st.sampled_from(["a", "b", "c"])
resources: st.SearchStrategy[Resource] = st.sampled_from(list(KINDS))


@st.composite
def put_service(draw: st.DrawFn) -> Step:
    hidden: dict[str, str | None] | None
    hidden = {"service.kubernetes.io/service-proxy-name": "x"} if draw(st.booleans()) else None
    port: Any = draw(st.sampled_from([80, 443, 70000, "eighty"]))
    ip = draw(st.sampled_from([cluster_ip(20), cluster_ip(21), "None", "abc"]))
    obj = service_object(
        draw(names), labels=hidden, ports=[{"port": port}], cluster_ips=[ip], clusterIPs=[ip]
    )
    return Step(f"put {obj['metadata']['name']} {ip} {port} {hidden}", lambda s: s.put(obj))


@st.composite
def put_slice(draw: st.DrawFn) -> Step:
    addresses = draw(st.lists(st.sampled_from([10, 11, 12]), max_size=3))
    name = draw(names)
    obj = slice_object(name, endpoints=[endpoint_object(pod_ip(n)) for n in addresses])
    return Step(f"put slice {name} {addresses}", lambda s: s.put(obj))


@st.composite
def delete(draw: st.DrawFn) -> Step:
    kind, name = draw(st.sampled_from(["Service", "EndpointSlice"])), draw(names)

    def do(server: FakeApiServer) -> None:
        resource = next(r for r, k in KINDS.items() if k == kind)
        if ("default", name) in server.stores[resource].objects:
            server.delete(kind, name)

    return Step(f"delete {kind} {name}", do)


@st.composite
def spoil(draw: st.DrawFn) -> Step:
    spoiler, resource = draw(st.sampled_from(SPOILERS)), draw(st.none() | resources)
    verb = "watch" if isinstance(spoiler, Stream) else draw(st.sampled_from(["list", "watch"]))
    times, skip = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    return Step(
        f"spoil {spoiler} {resource} {verb} times={times} skip={skip}",
        lambda s: s.spoil(spoiler, resource, verb, times=times, skip=skip),  # type: ignore[arg-type]
    )


@st.composite
def disturb(draw: st.DrawFn) -> Step:
    resource = draw(resources)
    how = draw(st.sampled_from(["close", "cut", "half", "half close"]))

    return draw(
        st.sampled_from(
            [
                Step(f"end watches {resource} {how}", lambda s: s.end_watches(resource, how)),
                Step(f"bookmark {resource}", lambda s: s.bookmark(resource)),
                Step("compact", FakeApiServer.compact),
                Step("cut", FakeApiServer.cut),
                Step("release", FakeApiServer.release),
                Step("restart", restart),
            ]
        )
    )


def restart(server: FakeApiServer) -> None:
    server.down()
    server.up()


steps = st.lists(
    st.one_of(put_service(), put_service(), put_slice(), put_slice(), delete(), spoil(), disturb()),
    max_size=25,
)


@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(before=steps, after=steps)
def test_any_changes_and_faults_end_in_what_the_server_has(
    before: list[Step], after: list[Step]
) -> None:
    """``before`` the source starts and ``after``; Consumer checks each event on its own."""
    consumer = Consumer()
    with FakeApiServer() as server:
        server.put(KUBERNETES, KUBERNETES_SLICE, THIS_NODE)
        source = ApiSource(
            Credentials(lambda: Access(server=server.url)),
            consumer.emit,
            consumer.notice,
            node_name=NODE,
            metrics=consumer,
            timing=QUICK,
        )
        try:
            for step in before:
                step.do(server)
            source.start()
            for step in after:
                step.do(server)
            server.behave()
            consumer.wait_synced()
            consumer.wait_equal(server)
            assert source.alive()
        finally:
            source.stop()


def test_ten_thousand_changes(server: FakeApiServer, source: ApiSource, consumer: Consumer) -> None:
    """B-99: compared at random stops; the server is cut, compacted and restarted on the way."""
    seed, change = 20260101, 0
    rng = random.Random(seed)
    disturbances: list[Callable[[FakeApiServer], None]] = [
        FakeApiServer.cut,
        FakeApiServer.compact,
        lambda s: s.end_watches("services", "half"),
        lambda s: s.end_watches("endpointslices", "cut"),
        lambda s: s.spoil(GONE, verb="watch"),
        restart,
    ]
    try:
        for change in range(10_000):
            number = rng.randrange(40)
            if (
                rng.random() < 0.2
                and ("default", f"s{number}") in server.stores["endpointslices"].objects
            ):
                server.delete("EndpointSlice", f"s{number}")
            elif rng.random() < 0.5:
                port = rng.choice([80, 81, 82])
                server.put(service_object(f"s{number}", ports=[{"port": port}]))
            else:
                pods = rng.sample(range(10, 60), rng.randrange(4))
                ends = [endpoint_object(pod_ip(pod)) for pod in pods]
                server.put(slice_object(f"s{number}", endpoints=ends))
            if change % 250 == 249:
                rng.choice(disturbances)(server)
            if rng.random() < 0.002:
                consumer.wait_equal(server)
        consumer.wait_equal(server)
    except AssertionError:
        pytest.fail(f"seed {seed}, change {change}")
    assert sum(isinstance(event, Upserted) for event in consumer.events) > 1000
