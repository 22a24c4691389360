"""Where the API server is remembered to be, for an agent that knows it by its Service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ebpflb.model import Deleted, EndpointState, Protocol, ServicePort, SlicePort
from ebpflb.model import Upserted as Told
from ebpflb.sources.addresses import Addresses
from tests.builders import Row, at, endpoint_slice, service, slice_key

BY_SERVICE = "https://10.96.0.1:443"
KUBERNETES = Told(
    service(
        "kubernetes", cluster_ips=("10.96.0.1",), ports=(ServicePort("https", Protocol.TCP, 443),)
    )
)


def serving(*rows: Row, name: str = "kubernetes", port: int = 6443) -> Told:
    ports = (SlicePort("https", Protocol.TCP, port),)
    return Told(endpoint_slice(*rows, name=name, service="kubernetes", ports=ports))


def learnt(*events: Any, server: str = BY_SERVICE, file: Path | None = None) -> Addresses:
    addresses = Addresses(file)
    for event in events:
        addresses.learn(event, server)
    return addresses


@pytest.mark.parametrize(
    "server",
    [
        BY_SERVICE,
        "https://kubernetes:443",
        "https://kubernetes.default.svc",
        "https://kubernetes.default.svc.cluster.local:443",
    ],
)
def test_the_endpoints_of_the_service_stand_in_for_it(server: str) -> None:
    addresses = learnt(KUBERNETES, serving(at("172.18.0.2"), at("172.18.0.3")), server=server)
    assert addresses.others(server) == ("https://172.18.0.2:6443", "https://172.18.0.3:6443")


def test_both_families_and_both_orders() -> None:
    addresses = learnt(serving(at("fd00::2")), serving(at("172.18.0.2"), name="k-2"), KUBERNETES)
    assert addresses.others(BY_SERVICE) == ("https://172.18.0.2:6443", "https://[fd00::2]:6443")


@pytest.mark.parametrize("server", ["https://172.18.0.9:6443", "https://api.example", ""])
def test_a_server_with_an_address_of_its_own_is_reached_there_alone(server: str) -> None:
    addresses = learnt(KUBERNETES, serving(at("172.18.0.2")), server=server)
    assert addresses.others(server) == ()


def test_another_service_is_no_api_server() -> None:
    other = Told(endpoint_slice(at("172.18.0.2"), service="web"))
    far = Told(endpoint_slice(at("172.18.0.2"), service="kubernetes", namespace="elsewhere"))
    assert learnt(KUBERNETES, other, far).others(BY_SERVICE) == ()


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param(serving(), id="an empty slice"),
        pytest.param(serving(at("172.18.0.2", state=EndpointState.UNUSABLE)), id="none serves"),
        pytest.param(Deleted(slice_key("kubernetes")), id="no slice"),
    ],
)
def test_the_last_ones_that_were_good_are_kept(gone: Any) -> None:
    addresses = learnt(KUBERNETES, serving(at("172.18.0.2")), gone)
    assert addresses.others(BY_SERVICE) == ("https://172.18.0.2:6443",)


def test_a_server_that_moved_is_followed() -> None:
    addresses = learnt(KUBERNETES, serving(at("172.18.0.2")), serving(at("172.18.0.7"), port=443))
    assert addresses.others(BY_SERVICE) == ("https://172.18.0.7:443",)


def test_they_outlive_the_agent(tmp_path: Path) -> None:
    file = tmp_path / "deeper" / "apiserver.json"
    learnt(KUBERNETES, serving(at("172.18.0.2")), file=file)
    assert Addresses(file).others(BY_SERVICE) == ("https://172.18.0.2:6443",)
    assert Addresses(file).others("https://10.96.0.9:443") == ()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert file.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        b"[]",
        b'{"server": 1}',
        b'{"server": "https://10.96.0.1:443", "others": ["http://172.18.0.2"]}',
        b'{"server": "https://10.96.0.1:443", "others": ["https://a:b@172.18.0.2/path"]}',
        b'{"server": "https://10.96.0.1:443", "others": ["https://[::1"]}',
    ],
)
def test_a_file_that_says_something_else_says_nothing(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "apiserver.json"
    file.write_bytes(content)
    assert Addresses(file).others(BY_SERVICE) == ()
    learnt(KUBERNETES, serving(at("172.18.0.2")), file=file)
    assert Addresses(file).others(BY_SERVICE)


def test_a_file_that_cannot_be_written_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said: list[dict[str, Any]] = []
    addresses = Addresses(tmp_path / "file" / "x", lambda _event, **fields: said.append(fields))
    for number in range(3):
        addresses.learn(KUBERNETES, BY_SERVICE)
        addresses.learn(serving(at(f"172.18.0.{number + 2}")), BY_SERVICE)
    [fields] = said
    assert fields["file"] == str(tmp_path / "file" / "x")
    assert "--master" in fields["action"]
    assert addresses.others(BY_SERVICE) == ("https://172.18.0.4:6443",)
