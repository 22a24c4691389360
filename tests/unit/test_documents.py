# SPDX-License-Identifier: Apache-2.0
"""The objects in the bytes of one file."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.model import Deleted, Refused, Service, Upserted
from ebpflb.sources.documents import Contents, UnreadableError, read_objects
from tests.builders import (
    ApiObject,
    cluster_ip,
    endpoint_object,
    node_object,
    service_key,
    service_object,
    slice_object,
    told,
)

EVERYTHING = [service_object(), slice_object(), node_object()]
FROM_KINDS = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}


def as_json(*objects: object) -> Contents:
    obj = (
        objects[0] if len(objects) == 1 else {"apiVersion": "v1", "kind": "List", "items": objects}
    )
    return read_objects("x.json", json.dumps(obj).encode())


def as_yaml(*objects: object) -> Contents:
    return read_objects("x.yaml", yaml.safe_dump_all(objects).encode())


def printed(contents: Contents) -> list[str]:
    return [str(key) for key in contents.objects]


# --- one file, many objects ----------------------------------------------------------------------


@pytest.mark.parametrize("read", [as_json, as_yaml], ids=["JSON", "YAML"])
def test_a_file_may_hold_every_kind_that_is_read(read: Any) -> None:
    contents = read(*EVERYTHING)
    assert list(contents.objects.values()) == [told(obj) for obj in EVERYTHING]
    assert (contents.repeated, contents.ignored) == (frozenset(), frozenset())


@pytest.mark.parametrize("read", [as_json, as_yaml], ids=["JSON", "YAML"])
@pytest.mark.parametrize(
    ("api_version", "kind", "items"),
    [
        pytest.param("v1", "List", EVERYTHING, id="a List"),
        pytest.param("v1", "ServiceList", EVERYTHING[:1], id="a ServiceList"),
        pytest.param(
            "discovery.k8s.io/v1", "EndpointSliceList", EVERYTHING[1:2], id="an EndpointSliceList"
        ),
    ],
)
def test_lists_are_unpacked(read: Any, api_version: str, kind: str, items: list[ApiObject]) -> None:
    whole = read({"apiVersion": api_version, "kind": kind, "items": items})
    assert list(whole.objects.values()) == [told(obj) for obj in items]


@pytest.mark.parametrize("read", [as_json, as_yaml], ids=["JSON", "YAML"])
def test_items_of_a_typed_list_need_not_say_their_kind(read: Any) -> None:
    item = service_object()
    del item["kind"], item["apiVersion"]
    whole = read({"apiVersion": "v1", "kind": "ServiceList", "items": [item]})
    assert printed(whole) == ["Service default/web"]


@pytest.mark.parametrize("read", [as_json, as_yaml], ids=["JSON", "YAML"])
@pytest.mark.parametrize("items", [None, []], ids=["null", "none"])
def test_an_empty_list_says_nothing(read: Any, items: Any) -> None:
    assert read({"apiVersion": "v1", "kind": "List", "items": items}) == Contents(
        {}, frozenset(), frozenset()
    )


@pytest.mark.parametrize("read", [as_json, as_yaml], ids=["JSON", "YAML"])
@pytest.mark.parametrize(
    ("obj", "ignored"),
    [
        pytest.param(FROM_KINDS, "v1 ConfigMap", id="another kind"),
        pytest.param(
            service_object() | {"apiVersion": "serving.knative.dev/v1"},
            "serving.knative.dev/v1 Service",
            id="a Service of another group",
        ),
        pytest.param(
            slice_object() | {"apiVersion": "discovery.k8s.io/v1beta1"},
            "discovery.k8s.io/v1beta1 EndpointSlice",
            id="an old version",
        ),
        pytest.param({"kind": "Service"}, "(no apiVersion) Service", id="no version"),
        pytest.param({"apiVersion": "v1"}, "v1 (no kind)", id="no kind"),
        pytest.param(
            {"apiVersion": "v1", "kind": "List", "items": []}, "v1 List", id="a list in a list"
        ),
    ],
)
def test_other_kinds_are_named_and_ignored(read: Any, obj: object, ignored: str) -> None:
    in_list = read({"apiVersion": "v1", "kind": "List", "items": [obj, service_object()]})
    assert (printed(in_list), in_list.ignored) == (["Service default/web"], {ignored})


@pytest.mark.parametrize("read", [as_json, as_yaml], ids=["JSON", "YAML"])
def test_of_one_object_twice_in_a_file_the_first_counts(read: Any) -> None:
    first = service_object()
    contents = read(first, service_object(cluster_ips=[cluster_ip(11)]))
    assert contents.objects == {service_key(): told(first)}
    assert contents.repeated == {service_key()}


@pytest.mark.parametrize("read", [as_json, as_yaml], ids=["JSON", "YAML"])
def test_a_bad_object_costs_no_other_and_is_told_by_its_place(read: Any) -> None:
    contents = read(
        service_object("a"), service_object("b", clusterIP=5), slice_object(""), slice_object("")
    )
    assert printed(contents)[:2] == ["Service default/a", "Service default/b"]
    refused = list(contents.objects.values())[1:]
    assert all(isinstance(each, Refused) for each in refused)
    assert [each.reason for each in refused if isinstance(each, Refused)] == [
        f"spec.clusterIP has a wrong type: expected str, got int ({place(read, 2)})",
        f"metadata.name is missing ({place(read, 3)})",
        f"metadata.name is missing ({place(read, 4)})",
    ]
    assert printed(contents)[2:] == [
        f"EndpointSlice default/({place(read, 3)})",
        f"EndpointSlice default/({place(read, 4)})",
    ]


def place(read: Any, number: int) -> str:
    return f"object {number} of {'x.json' if read is as_json else 'x.yaml'}"


def test_an_object_that_is_not_ours_is_told_as_such() -> None:
    contents = as_yaml(service_object(type="ExternalName"))
    assert contents.objects == {service_key(): Deleted(service_key())}


# --- YAML as Kubernetes reads it -----------------------------------------------------------------


def test_plain_yaml_scalars_are_what_kubernetes_takes_them_for() -> None:
    text = """
        apiVersion: v1
        kind: Service
        metadata: {name: web, creationTimestamp: 2026-01-01T00:00:00Z}   # a text, no time
        spec:
          clusterIP: 1:2:3:4:5:6:7:8                                     # no number to base 60
          ipFamilies: [IPv6]
          ports:
          - {port: 0x50, name: off-by-one}
    """
    (event,) = read_objects("x.yml", text.encode()).objects.values()
    assert isinstance(event, Upserted)
    assert isinstance(event.obj, Service)
    assert (event.obj.created, event.obj.ports[0].port) == ("2026-01-01T00:00:00Z", 80)
    assert (len(event.obj.cluster_ips), event.obj.problems) == (1, ())


def test_anchors_and_merges_work() -> None:
    text = """
        apiVersion: v1
        kind: Service
        metadata: {name: web}
        spec:
          clusterIP: 10.96.0.10
          ports:
          - &port {name: http, port: 80}
          - {<<: *port, name: more, port: 81}
    """
    (event,) = read_objects("x.yaml", text.encode()).objects.values()
    assert isinstance(event, Upserted)
    assert isinstance(event.obj, Service)
    assert [port.port for port in event.obj.ports] == [80, 81]


@pytest.mark.parametrize("text", ["", "---\n---\n", "# a remark\n", "\ufeff---\n"])
def test_an_empty_yaml_file_says_nothing(text: str) -> None:
    assert read_objects("x.yaml", text.encode()).objects == {}


# --- files that make no sense --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "reason", "line"),
    [
        pytest.param("x.json", b"", "is not JSON: Input data was truncated", 0, id="empty JSON"),
        pytest.param(
            "x.json", b'{"kind":\n', "is not JSON: Input data was truncated", 0, id="half"
        ),
        pytest.param(
            "x.json", b'{\n"kind": x}', "is not JSON: invalid character", 2, id="JSON, a bad line"
        ),
        pytest.param("x.json", b"{}\n{}", "is not JSON: trailing characters", 2, id="two values"),
        pytest.param(
            "x.json",
            b"[]",
            "is no Kubernetes object: Expected object, got array",
            0,
            id="a JSON list",
        ),
        pytest.param(
            "x.yaml",
            b"kind: Service\n bad: [\n",
            "is not YAML: mapping values are not allowed in this context",
            2,
            id="YAML, a bad line",
        ),
        pytest.param(
            "x.yaml",
            b"a: b\nc: {d: e\n",
            "is not YAML: did not find expected ',' or '}'",
            3,
            id="half a YAML file",
        ),
        pytest.param(
            "x.yaml",
            b"a: b\nc: \x01\n",
            "is not YAML: control characters are not allowed",
            2,
            id="a control character",
        ),
        pytest.param("x.yaml", b"\x00\xff\x80", None, 1, id="no text at all"),
        pytest.param("x.yaml", b"a: !python/object:os.system x", None, 1, id="a foreign tag"),
        pytest.param(
            "x.yaml", b"- a\n", "is no Kubernetes object: document 1 is a list", 0, id="ls"
        ),
        pytest.param(
            "x.yaml", b"hello", "is no Kubernetes object: document 1 is a str", 0, id="plain text"
        ),
        pytest.param("x.yaml", b"[" * 100_000, None, 1, id="YAML nested without end"),
        pytest.param("x.json", b"[" * 100_000, None, 0, id="JSON nested without end"),
        pytest.param("x.json", b'{"a":' * 100_000, None, 0, id="JSON objects without end"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_with_its_line(
    name: str, data: bytes, reason: str | None, line: int
) -> None:
    with pytest.raises(UnreadableError) as caught:
        read_objects(name, data)
    assert caught.value.line == line
    assert reason in {None, caught.value.reason}


def test_a_manifest_that_contains_itself_is_refused() -> None:
    text = """
        apiVersion: v1
        kind: Service
        metadata: &m {name: web, labels: *m}
        spec: {ports: &p [*p]}
    """
    (event,) = read_objects("x.yaml", text.encode()).objects.values()
    assert isinstance(event, Refused)


@given(data=st.binary() | st.text().map(str.encode), suffix=st.sampled_from([".json", ".yaml"]))
def test_any_bytes_are_read_or_refused(data: bytes, suffix: str) -> None:
    try:
        read_objects("x" + suffix, data)
    except UnreadableError as error:
        assert error.reason  # noqa: PT017 - either outcome is right


@given(cut=st.integers(0, 2000), suffix=st.sampled_from([".json", ".yaml"]))
def test_half_a_file_is_read_or_refused(cut: int, suffix: str) -> None:
    whole = {"apiVersion": "v1", "kind": "List", "items": [*EVERYTHING, endpoint_object()]}
    text = json.dumps(whole) if suffix == ".json" else yaml.safe_dump(whole)
    try:
        read_objects("x" + suffix, text.encode()[:cut])
    except UnreadableError as error:
        assert error.reason  # noqa: PT017 - either outcome is right
