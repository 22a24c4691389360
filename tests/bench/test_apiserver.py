"""The benchmark's API server is one that the agent's own source reads as it reads the real one."""

from __future__ import annotations

import gzip
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from ebpflb.bench.apiserver import SERVICES, SLICES, Command, Sent
from ebpflb.bench.bed import NODE_NAME, Talker
from ebpflb.bench.workload import Workload, all_files
from ebpflb.model import Event, Node, Upserted
from ebpflb.sources import wire
from ebpflb.sources.cluster import load
from ebpflb.sources.documents import read_objects
from ebpflb.sources.envelopes import read_line
from ebpflb.sources.transport import Access, Credentials

TINY = Workload(services=20, endpoints=4, files=4, backends=4, watched_services=2)
WATCHED = TINY.watched[0]


class Running:
    """The server, and a connection to it."""

    def __init__(self, talker: Talker) -> None:
        self.url = f"http://127.0.0.1:{json.loads(talker.line())['port']}"
        self.connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=10)
        self._talker = talker

    def get(self, target: str) -> http.client.HTTPResponse:
        self.connection.request("GET", target)
        return self.connection.getresponse()

    def objects(self, target: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(gzip.decompress(self.get(target).read()))
        return found

    def obey(self, command: Command) -> str:
        return self._talker.ask(msgspec.json.encode(command).decode())

    def feed(self, *services: int) -> Sent:
        command = Command(do="feed", services=services, rate=1000.0, last=WATCHED, side="B")
        return msgspec.json.decode(self.obey(command), type=Sent)

    def load(self) -> list[Event]:
        return load(Credentials(lambda: Access(server=self.url)), node_name=NODE_NAME)


@pytest.fixture
def server() -> Iterator[Running]:
    workload = msgspec.json.encode(TINY).decode()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ebpflb.bench.apiserver"),
            *("--node-name", NODE_NAME, "--workload", workload),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    talker = Talker("the server", process)
    running = Running(talker)
    yield running
    running.connection.close()
    talker.end()
    assert process.stdout is not None
    process.stdout.close()


def test_it_has_the_objects_of_the_manifests_and_the_node(server: Running) -> None:
    told = [one.obj for one in server.load() if isinstance(one, Upserted)]
    in_files = [
        one.obj
        for name, data in all_files(TINY)
        for one in read_objects(name, data).objects.values()
        if isinstance(one, Upserted)
    ]
    assert [one for one in told if not isinstance(one, Node)] == sorted(
        in_files, key=lambda one: (one.key.kind != "Service", one.key.name)
    )
    assert [one.name for one in told if isinstance(one, Node)] == [NODE_NAME]
    assert not [one.problems for one in told if one.problems]


def test_a_list_at_version_0_comes_whole_as_the_real_one_has_it(server: Running) -> None:
    whole = server.objects(f"{SLICES}?limit=7&resourceVersion=0")
    assert len(whole["items"]) == TINY.services
    assert "continue" not in whole["metadata"]
    assert not {"kind", "apiVersion"} & whole["items"][0].keys()


def test_any_other_list_comes_in_pages_where_they_are_asked_for(server: Running) -> None:
    names: list[str] = []
    token = ""
    while not names or token:
        page = server.objects(f"{SERVICES}?limit=7" + (f"&continue={token}" if token else ""))
        assert len(page["items"]) <= 7
        names += [one["metadata"]["name"] for one in page["items"]]
        token = page["metadata"].get("continue", "")
    assert names == [TINY.service(number)["metadata"]["name"] for number in range(TINY.services)]


def test_a_watch_brings_what_was_sent_and_lists_have_it_then(server: Running) -> None:
    with server.get(f"{SLICES}?watch=true&resourceVersion=1") as stream:
        server.obey(Command(do="await", what="watch"))
        sent = server.feed(0, 5)
        lines = [stream.readline() for _ in range(sent.events)]
    server.connection.close()
    assert sum(map(len, lines)) == sent.bytes
    assert sent.began_ns <= sent.due_ns <= sent.sent_ns
    changed = [wire.decode_json("EndpointSlice", read_line(line).object) for line in lines]
    assert [one.obj.key.name for one in changed if isinstance(one, Upserted)] == [
        TINY.slice(number)["metadata"]["name"] for number in (0, 5, WATCHED)
    ]
    by_key = {one.obj.key: one for one in server.load() if isinstance(one, Upserted)}
    for one in changed:
        assert isinstance(one, Upserted)
        listed = by_key[one.obj.key].obj
        assert msgspec.structs.replace(one.obj, triggered_s=0.0) == listed
    assert {server.objects(SLICES)["metadata"]["resourceVersion"]} == {"4"}


def test_a_fed_service_has_one_endpoint_that_is_another_one() -> None:
    before, after = TINY.backends_of(0), TINY.backends_of(0, replaced=0)
    assert len(set(before) & set(after)) == TINY.endpoints - 1
    assert len(set(after)) == TINY.endpoints


def test_a_watch_of_an_old_version_is_gone(server: Running) -> None:
    server.feed()
    answer = server.get(f"{SLICES}?watch=true&resourceVersion=1")
    assert answer.status == 410
    answer.read()


def test_what_it_does_not_have_is_not_found(server: Running) -> None:
    answer = server.get("/api/v1/pods")
    assert answer.status == 404
    answer.read()
