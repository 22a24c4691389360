# SPDX-License-Identifier: Apache-2.0
"""What a scenario file says: steps with what they hold, read but not yet run.

A line that begins at the margin is a step; the indented lines under it belong to it; `#` begins a
comment. The steps:

    node NAME                  this node, from the beginning: zone, addresses, pod-cidrs (YAML)
    options                    the planner's, by their names (YAML)
    local ADDRESS…             the addresses of this node's interfaces, from now on
    apply KIND [NS/]NAME       an object of the API (YAML): a Service's spec, with `ingress`,
                               `labels`, `annotations` and `created` beside it; an EndpointSlice's
                               `service`, `ports` and `endpoints`, each `ADDRESS [on NODE]
                               [unready | terminating | gone] [zones Z,…] [nodes N,…]`; a Node's as
                               in the step `node`
    delete KIND [NS/]NAME
    plan                       the whole plan, in the words of printed.py
    unserved                   every object or part that is not served, and why
    maps                       lines that the maps hold, among others

A word that nobody knows is an error, so that no step is passed over.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

from tests.builders import CREATED, ApiObject

STEPS: Final = frozenset(
    {"node", "options", "local", "apply", "delete", "plan", "unserved", "maps"}
)
_CONDITIONS: Final[Mapping[str, Mapping[str, bool]]] = {
    "ready": {"ready": True},
    "unready": {"ready": False, "serving": False},
    "terminating": {"ready": False, "serving": True, "terminating": True},
    "gone": {"ready": False, "serving": False, "terminating": True},
}
_LABELS: Final = ("labels", "annotations")


class Step(NamedTuple):
    """``line`` is where it stands; ``body`` is without its indentation."""

    line: int
    word: str
    arguments: tuple[str, ...]
    body: str


class Story(NamedTuple):
    """A file: its first comment says what it is about and cites the ids."""

    path: Path
    title: str
    steps: tuple[Step, ...]


def read_story(path: Path) -> Story:
    lines = path.read_text().splitlines()
    comment = [line.lstrip("# ") for line in lines if line.startswith("#")]
    return Story(path, comment[0] if comment else "", tuple(_steps(path, lines)))


def _steps(path: Path, lines: list[str]) -> Iterator[Step]:
    heads = [
        number for number, line in enumerate(lines) if line and line[0] not in "# " and line.strip()
    ]
    for number, end in zip(heads, [*heads[1:], len(lines)], strict=True):
        word, *arguments = shlex.split(lines[number], comments=True)
        if word not in STEPS:
            raise ValueError(f"{path.name}:{number + 1}: {word!r} is no step")
        inner = [line for line in lines[number + 1 : end] if line.strip() and line[0] == " "]
        margin = min((len(line) - len(line.lstrip()) for line in inner), default=0)
        body = "\n".join(line[margin:].rstrip() for line in inner)
        yield Step(number + 1, word, tuple(arguments), body)


# --- objects --------------------------------------------------------------------------------------


def api_object(kind: str, name: str, body: str) -> ApiObject:
    """The object of the API that an `apply` step describes."""
    said = yaml.safe_load(body) or {}
    makers = {"Service": _service, "EndpointSlice": _slice, "Node": node_object}
    return makers[kind](name, said)


def _metadata(name: str, said: dict[str, Any]) -> ApiObject:
    namespace, _, short = name.rpartition("/")
    kept: ApiObject = {key: said.pop(key) for key in _LABELS if key in said}
    return {"namespace": namespace, "name": short, **kept}


def _service(name: str, said: dict[str, Any]) -> ApiObject:
    metadata = _metadata(name, said) | {"creationTimestamp": said.pop("created", CREATED)}
    ingress = said.pop("ingress", None)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": said,
        "status": {"loadBalancer": {"ingress": ingress}},
    }


def _slice(name: str, said: dict[str, Any]) -> ApiObject:
    metadata = _metadata(name, said)
    if "service" in said:
        metadata["labels"] = {"kubernetes.io/service-name": said.pop("service")} | metadata.get(
            "labels", {}
        )
    endpoints = [_endpoint(text) for text in said.pop("endpoints", [])]
    first = endpoints[0]["addresses"][0] if endpoints else ""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": metadata,
        "addressType": "IPv6" if ":" in first else "IPv4",
        "endpoints": endpoints,
        **said,
    }


_ENDPOINT: Final = re.compile(
    r"(?P<address>\S+)(?: on (?P<node>\S+))?(?: (?P<state>ready|unready|terminating|gone))?"
    r"(?: zones (?P<zones>\S+))?(?: nodes (?P<nodes>\S+))?"
)


def _endpoint(text: str) -> ApiObject:
    found = _ENDPOINT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no endpoint")
    hints = {
        key: [{"name": each} for each in found[group].split(",")]
        for key, group in (("forZones", "zones"), ("forNodes", "nodes"))
        if found[group]
    }
    return {
        "addresses": [found["address"]],
        "nodeName": found["node"],
        "conditions": _CONDITIONS[found["state"]] if found["state"] else None,
        "hints": hints or None,
    }


def node_object(name: str, said: dict[str, Any]) -> ApiObject:
    """A Node of this name."""
    zone = said.get("zone")
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {"topology.kubernetes.io/zone": zone} if zone else None,
        },
        "spec": {"podCIDRs": said.get("pod-cidrs", [])},
        "status": {
            "addresses": [
                {"type": "InternalIP", "address": one} for one in said.get("addresses", [])
            ]
        },
    }
