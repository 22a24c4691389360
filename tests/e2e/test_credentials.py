# SPDX-License-Identifier: Apache-2.0
"""Who the agent is to a real API server, and what it may do: renewed, revoked, withheld, granted.

Tokens are the API server's own, bound to an object; when that goes, so does the token.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebpflb.lab import Lab
from tests.e2e.agents import Agent
from tests.e2e.cluster import AGENT_RULES, write_at_once
from tests.e2e.objects import Objects, Service
from tests.e2e.world import FOLLOW_S, World, reaches, refuses

_numbers = itertools.count(1)

# Where a pod finds its credentials, in a view of files that nobody else has.
IN_CLUSTER = """\
mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount &&
mount --bind "$1" /run/secrets/kubernetes.io/serviceaccount && shift && exec "$@"
"""


@pytest.fixture(scope="module")
def place() -> Iterator[World]:
    """A cluster of one node; each test starts the agent there."""
    with Lab("who") as lab, World(lab) as one:
        yield one


@pytest.fixture
def service(place: World) -> Iterator[Service]:
    """Be1 alone is behind it."""
    objects = Objects(place.admin)
    yield objects.service().endpoints(place.backends[0])
    objects.clear()


class Mounted:
    """A folder as kubelet makes one for a pod's token: all that is in it changes at once."""

    def __init__(self, folder: Path, ca: Path) -> None:
        self.folder = folder
        self._ca = ca
        folder.mkdir()
        for name in ("token", "ca.crt"):
            (folder / name).symlink_to(f"..data/{name}")

    def put(self, token: str) -> None:
        data = self.folder / f"..{next(_numbers)}"
        data.mkdir()
        (data / "token").write_text(token)
        (data / "ca.crt").write_bytes(self._ca.read_bytes())
        draft = self.folder / "..data_tmp"
        draft.symlink_to(data.name)
        draft.rename(self.folder / "..data")


def with_kubeconfig(
    place: World, folder: Path, token: str
) -> tuple[Agent, Callable[[str], object]]:
    file = write_at_once(folder / "token", token)
    config = place.cluster.kubeconfig(folder / "kubeconfig", token_file=file)
    agent = Agent(place.node, "--kubeconfig", str(config))
    return agent, lambda token: write_at_once(file, token)


def in_cluster(place: World, folder: Path, token: str) -> tuple[Agent, Callable[[str], object]]:
    mounted = Mounted(folder / "serviceaccount", place.cluster.ca)
    mounted.put(token)
    server, _, port = place.cluster.server.removeprefix("https://").rpartition(":")
    agent = Agent(
        place.node,
        env={"KUBERNETES_SERVICE_HOST": server, "KUBERNETES_SERVICE_PORT": port},
        within=["unshare", "--mount", "sh", "-c", IN_CLUSTER, "pod", str(mounted.folder)],
    )
    return agent, mounted.put


@pytest.mark.parametrize("way", [with_kubeconfig, in_cluster], ids=lambda way: way.__name__)
def test_a_token_is_rotated(
    place: World,
    service: Service,
    tmp_path: Path,
    way: Callable[..., tuple[Agent, Callable[..., object]]],
) -> None:
    """Renewed in time, and renewed too late: both times it goes on, and serves all the while."""
    names = [f"token-{next(_numbers)}" for _ in range(3)]
    tokens = [place.cluster.agent_token(name) for name in names]
    agent, put = way(place, tmp_path, tokens[0])
    with agent, place.client.tcp_loop(service.ip, 80, interval_s=0.002) as loop:
        reaches(place.client, service.ip, 80, {"be1"})
        put(tokens[1])
        place.cluster.revoke(names[0])
        _start_anew(place)
        service.endpoints(place.backends[1])
        reaches(place.client, service.ip, 80, {"be2"})
        assert "401" not in agent.text()

        place.cluster.revoke(names[1])
        _start_anew(place)
        agent.wait_for("api_lost", timeout_s=FOLLOW_S)
        service.endpoints(place.backends[2])
        assert place.client.tcp(service.ip, 80, count=3).backends == {"be2": 3}
        put(tokens[2])
        agent.wait_for("api_back", timeout_s=FOLLOW_S)
        reaches(place.client, service.ip, 80, {"be3"})
        assert agent.faults() == []
        assert loop.stop().failed == 0


def _start_anew(place: World) -> None:
    """So that every stream ends and every request is looked at again."""
    place.cluster.apiserver.kill()
    place.cluster.start()


@pytest.mark.parametrize("kind", ["services", "endpointslices", "nodes"])
def test_what_it_may_not_see_is_said_once_and_seen_when_granted(
    place: World, service: Service, tmp_path: Path, kind: str
) -> None:
    """Withheld at the start: nothing is written for want of Services or slices; a Node is not
    waited for."""
    token = place.cluster.agent_token(f"token-{next(_numbers)}")
    agent, _ = with_kubeconfig(place, tmp_path, token)
    place.cluster.allow_agent([rule for rule in AGENT_RULES if kind not in rule["resources"]])
    try:
        with agent.launch():
            lost = agent.wait_for("api_lost")
            assert "403" in lost["reason"] or "orbid" in lost["reason"]
            assert agent.get("/livez")[0] == 200
            if kind == "nodes":
                agent.wait_for("synced")
            else:
                assert agent.log("synced") == []
            place.cluster.allow_agent()
            agent.wait_for("api_back", timeout_s=FOLLOW_S)
            agent.wait_for("synced", timeout_s=FOLLOW_S)
            assert len(agent.log("api_lost")) == 1
            reaches(place.client, service.ip, 80, {"be1"})
    finally:
        place.cluster.allow_agent()


def test_a_right_that_is_taken_away_leaves_what_was_known(
    place: World, service: Service, tmp_path: Path
) -> None:
    """Slices are seen no more: the Services are, with the endpoints that they had."""
    token = place.cluster.agent_token(f"token-{next(_numbers)}")
    agent, _ = with_kubeconfig(place, tmp_path, token)
    objects = Objects(place.admin)
    try:
        with agent, place.client.tcp_loop(service.ip, 80, interval_s=0.002) as loop:
            reaches(place.client, service.ip, 80, {"be1"})
            place.cluster.allow_agent(
                [rule for rule in AGENT_RULES if "endpointslices" not in rule["resources"]]
            )
            _start_anew(place)
            agent.wait_for("api_lost", resource="EndpointSlice", timeout_s=FOLLOW_S)
            new = objects.service().endpoints(place.backends[1])
            refuses(place.client, new.ip, 80)
            place.cluster.allow_agent()
            reaches(place.client, new.ip, 80, {"be2"})
            assert loop.stop().failed == 0
    finally:
        place.cluster.allow_agent()
        objects.clear()
