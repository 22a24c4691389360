# SPDX-License-Identifier: Apache-2.0
"""A KubeProxyConfiguration file: its bytes to values and back.

Read strictly first and leniently where that fails, as kube-proxy does (CFG-50): a field that is
unknown or stands twice is said and costs nothing else; a value of a wrong type ends it. Bytes in,
values out: this file must not know folders, defaults, nor whether a value makes sense.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, get_args, get_origin

import msgspec
import yaml

from ebpflb import durations
from ebpflb.durations import Duration
from ebpflb.errors import ConfigError
from ebpflb.kubeproxy.schema import (
    API_VERSION,
    KIND,
    KubeProxyConfiguration,
    as_builtins,
    field_types,
)


class Loaded(NamedTuple):
    """``problems``: what a strict reader would have refused, a line each."""

    config: KubeProxyConfiguration
    problems: tuple[str, ...]


def read(name: str, data: bytes) -> Loaded:
    """What the file called ``name`` says, without defaults. Raises ConfigError naming the field."""
    problems: list[str] = []
    try:
        document = _first_document(data, problems)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: is no YAML: {_yaml_reason(error)}") from None
    except (RecursionError, ValueError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{name}: is no YAML: {reason}") from None
    if not isinstance(document, dict):
        what = "is empty" if document is None else f"holds {_shown(document)}"
        raise ConfigError(f"{name}: {what}: must be a {KIND}")
    _require_kind(name, document)
    known = _known(document, KubeProxyConfiguration, "", problems)
    try:
        config = msgspec.convert(known, KubeProxyConfiguration, dec_hook=_custom)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {_type_error(error, known)}") from None
    return Loaded(config, tuple(problems))


def text_of(config: KubeProxyConfiguration) -> str:
    """The YAML text, keys in the order in which kube-proxy writes them; ``read`` reads it back."""
    return yaml.dump(as_builtins(config), Dumper=_Dumper, sort_keys=True, width=1000)


def _require_kind(name: str, document: Mapping[Any, Any]) -> None:
    for field, wanted in (("kind", KIND), ("apiVersion", API_VERSION)):
        found = document.get(field)
        if found != wanted:
            is_there = f"{field} {_shown(found)}" if field in document else f"{field} is missing"
            hint = "; give the file that stands in its data" if found == "ConfigMap" else ""
            raise ConfigError(f"{name}: {is_there}: must be {wanted}{hint}")


# --- YAML ----------------------------------------------------------------------------------------

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_MERGE: Final = "tag:yaml.org,2002:merge"
_STR: Final = "tag:yaml.org,2002:str"


def _first_document(data: bytes, problems: list[str]) -> object:
    """The first document that says something; others, and keys that repeat, are problems."""
    loader = _Loader(data)
    try:
        documents: list[object] = []
        while loader.check_node():
            built = _built(loader, loader.get_node(), "", problems if not documents else [])
            if built is not None:
                documents.append(built)
    finally:
        loader.dispose()
    if len(documents) > 1:
        problems.append(f"it holds {len(documents)} documents: only the first is read")
    return documents[0] if documents else None


def _built(loader: Any, node: yaml.Node, path: str, problems: list[str]) -> object:
    if isinstance(node, yaml.SequenceNode):
        return [
            _built(loader, item, f"{path}[{index}]", problems)
            for index, item in enumerate(node.value)
        ]
    if not isinstance(node, yaml.MappingNode):
        return loader.construct_object(node)
    merges = any(key.tag == _MERGE for key, _ in node.value)
    if merges:
        loader.flatten_mapping(node)
    mapping: dict[object, object] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (list, dict)):
            raise ValueError(f"line {key_node.start_mark.line + 1}: {_shown(key)} is no key")  # noqa: TRY004
        at = f"{path}.{key}".removeprefix(".")
        if key in mapping and not merges:
            line = key_node.start_mark.line + 1
            problems.append(f"{at} stands twice: that in line {line} is taken")
        mapping[key] = _built(loader, value_node, at, problems)
    return mapping


def _yaml_reason(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or getattr(error, "reason", None) or "it cannot be read"
    return f"line {mark.line + 1}: {what}" if mark is not None else str(what)


class _Dumper(yaml.SafeDumper):
    """Texts that YAML would read as something else are quoted as Kubernetes' tools quote them."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    plain = dumper.resolve(yaml.ScalarNode, text, (True, False)) == _STR  # type: ignore[no-untyped-call]
    return dumper.represent_scalar(_STR, text, style=None if plain else '"')


_Dumper.add_representer(str, _represent_text)


# --- fields --------------------------------------------------------------------------------------


def _known(
    data: Mapping[Any, Any], section: type, path: str, problems: list[str]
) -> dict[str, Any]:
    """What of ``data`` the section has a field for; null is as if it were not there."""
    types = field_types(section)
    known: dict[str, Any] = {}
    for key, value in data.items():
        at = f"{path}.{key}".removeprefix(".")
        if key not in types:
            problems.append(f"{at} is unknown{_suggestion(key, types)}")
        elif value is not None:
            known[key] = _known_value(value, types[key], at, problems)
    return known


def _known_value(value: Any, kind: Any, path: str, problems: list[str]) -> Any:
    if isinstance(value, dict) and _is_section(kind):
        return _known(value, kind, path, problems)
    item = next(iter(_sections_in(kind)), None)
    if isinstance(value, list) and item is not None:
        return [
            _known(one, item, f"{path}[{index}]", problems) if isinstance(one, dict) else one
            for index, one in enumerate(value)
        ]
    return value


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _sections_in(kind: Any) -> Iterator[type]:
    """The sections that a list's items are."""
    if get_origin(kind) is tuple:
        yield from (item for item in get_args(kind) if _is_section(item))


def _suggestion(key: object, types: Mapping[str, Any]) -> str:
    lower = {name.lower(): name for name in types}
    near = difflib.get_close_matches(str(key).lower(), lower, n=1, cutoff=0.8)
    return f" (is {lower[near[0]]} meant?)" if near else ""


def _custom(kind: type, value: object) -> object:
    if kind is not Duration:
        raise NotImplementedError(f"{kind} is not read here")
    if not isinstance(value, str):
        raise ValueError("Expected `duration`")  # noqa: TRY004 - msgspec adds the path to this one
    try:
        return durations.parse(value)
    except ValueError:
        raise ValueError("Expected `duration`") from None


_WANTED: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "int | str": "a text or a whole number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "duration": "a duration such as 30s or 1h0m0s",
}
_PYTHON: Final = {"str": str, "bool": bool}
_STEP: Final = re.compile(r"\[[^]]*\]|[^.\[\]]+")
_BOUNDS: Final = {">=": "at least", "<=": "at most"}


def _type_error(error: msgspec.ValidationError, data: object) -> str:
    """Field, value and what is allowed: ``iptables.masqueradeBit 'x': must be a whole number``."""
    what, _, where = str(error).partition(" - at ")
    if where.startswith("`key` in "):
        return f"{where.removeprefix('`key` in `$.').strip('`')}: its keys must be texts"
    wanted = what.removeprefix("Expected ").partition(",")[0].replace("`", "")
    wanted = wanted.removesuffix(" | null")
    kind, bound, limit = wanted.partition(" >= ") if ">=" in wanted else wanted.partition(" <= ")
    allowed = _WANTED.get(kind, kind)
    if bound:
        allowed += f", {_BOUNDS[bound.strip()]} {limit}"
    field, value = _at(data, where.strip("`").removeprefix("$"), _PYTHON.get(kind, str))
    return f"{field} {_shown(value)}: must be {allowed}"


def _at(data: Any, path: str, wanted: type) -> tuple[str, Any]:
    """The place that msgspec names, and what is there.

    Of ``[...]``, which is any item, it is the first that is not of the wanted type.
    """
    value, field = data, ""
    for step in _STEP.findall(path):
        if step == "[...]":
            items = list(value.items() if isinstance(value, dict) else enumerate(value))
            key, one = next(item for item in items if not isinstance(item[1], wanted))
            field += f".{key}" if isinstance(value, dict) else f"[{key}]"
            value = one
        elif step.startswith("["):
            value = value[int(step[1:-1])]
            field += step
        else:
            value = value[step]
            field += f".{step}"
    return field.removeprefix("."), value


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 64 else f"{text[:64]}…"
