# SPDX-License-Identifier: Apache-2.0
"""The API objects in the bytes of one YAML or JSON file.

Pure: bytes in, objects out. It must not know folders, files' ages, or other files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from ebpflb.model import ObjectKey, Refused, Upserted
from ebpflb.sources import wire

if TYPE_CHECKING:
    from collections.abc import Callable


class UnreadableError(Exception):
    """These bytes are no manifest. ``line`` counts from 1; 0 where it is not known."""

    def __init__(self, reason: str, line: int = 0) -> None:
        self.reason = reason
        self.line = line
        super().__init__(reason)


class Contents(msgspec.Struct, frozen=True):
    """What a file says: one entry an object, in the file's order.

    ``repeated`` are the objects that stand in it again, where the first one counts; ``ignored`` the
    kinds that are not read, as ``apiVersion kind``.
    """

    objects: dict[ObjectKey, wire.Told]
    repeated: frozenset[ObjectKey]
    ignored: frozenset[str]


def read_objects(name: str, data: bytes) -> Contents:
    """Read the file called ``name``, which says by its suffix whether it is JSON or YAML.

    YAML may hold several documents; ``List`` and the lists of the kinds that are read are unpacked,
    but no lists in lists. Raises UnreadableError where the file as a whole makes no sense.
    """
    objects: dict[ObjectKey, wire.Told] = {}
    repeated: set[ObjectKey] = set()
    ignored: set[str] = set()
    pieces = _json_pieces(data) if name.endswith(".json") else _yaml_pieces(data)
    for position, (api_version, kind, read) in enumerate(pieces, start=1):
        known = wire.KINDS.get((api_version or "", kind or ""))
        if known is None:
            ignored.add(f"{api_version or '(no apiVersion)'} {kind or '(no kind)'}")
            continue
        told = _placed(read(known), name, position)
        key = told.obj.key if isinstance(told, Upserted) else told.key
        if key in objects:
            repeated.add(key)
        else:
            objects[key] = told
    return Contents(objects, frozenset(repeated), frozenset(ignored))


def _placed(told: wire.Told, file: str, position: int) -> wire.Told:
    """Say of a refused object where it stands; that also names one that has no name."""
    if not isinstance(told, Refused):
        return told
    key, where = told.key, f"object {position} of {file}"
    if not key.name:
        key = ObjectKey(key.kind, key.namespace, f"({where})")
    return Refused(key, f"{told.reason} ({where})")


_Piece = tuple[str | None, str | None, "Callable[[wire.Kind], wire.Told]"]
"""apiVersion and kind of one object, and what reads it as such."""


def _kind_listed(api_version: str | None, kind: str | None) -> str | None:
    """The kind of the objects in a list of this kind, "" where they say it, None for no list."""
    if (api_version, kind) == ("v1", "List"):
        return ""
    item = (kind or "").removesuffix("List")
    return item if item != kind and (api_version or "", item) in wire.KINDS else None


# --- JSON ----------------------------------------------------------------------------------------


class _Head(msgspec.Struct, gc=False, rename="camel"):
    api_version: str | None = None
    kind: str | None = None


class _Top(_Head, gc=False):
    items: msgspec.Raw = msgspec.Raw(b"null")


_BYTE: Final = re.compile(r" \(byte (\d+)\)$")


def _json_pieces(data: bytes) -> Iterator[_Piece]:
    try:
        top = msgspec.json.decode(data, type=_Top)
        listed = _kind_listed(top.api_version, top.kind)
        if listed is None:
            yield top.api_version, top.kind, partial(_read_json, data)
            return
        items = msgspec.json.decode(top.items, type=list[msgspec.Raw] | None) or []
    except msgspec.ValidationError as error:
        raise UnreadableError(f"is no Kubernetes object: {_plain(error)}") from None
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        at = _BYTE.search(str(error))
        line = data.count(b"\n", 0, int(at[1])) + 1 if at else 0
        raise UnreadableError(f"is not JSON: {_plain(error)}", line) from None
    for item in items:
        head = _json_head(item)
        yield (
            (top.api_version if listed else None) or head.api_version,
            listed or head.kind,
            partial(_read_json, item),
        )


def _read_json(data: bytes | msgspec.Raw, kind: wire.Kind) -> wire.Told:
    return wire.decode_json(kind, data)


def _json_head(item: msgspec.Raw) -> _Head:
    try:
        return msgspec.json.decode(item, type=_Head)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return _Head()


def _plain(error: Exception) -> str:
    return _BYTE.sub("", str(error)).replace("`", "").removeprefix("JSON is malformed: ")


# --- YAML ----------------------------------------------------------------------------------------


def _yaml_loader() -> Any:
    """A safe loader that takes plain scalars as Kubernetes' own tools do.

    Left out of YAML 1.1: times (a creation time is a text) and numbers to the base of 60, which an
    IPv6 address may look like.
    """
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("ManifestLoader", (base,), {"yaml_implicit_resolvers": {}})
    kept = {"tag:yaml.org,2002:" + tag for tag in ("bool", "null", "merge")}
    for first, resolvers in base.yaml_implicit_resolvers.items():
        loader.yaml_implicit_resolvers[first] = [each for each in resolvers if each[0] in kept]
    number = r"0|[1-9][0-9]*|0x[0-9a-fA-F]+|0o?[0-7]+|0b[01]+"
    fraction = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    for tag, pattern, firsts in (
        ("int", number, "-+0123456789"),
        ("float", fraction, "-+.0123456789"),
    ):
        loader.add_implicit_resolver(
            f"tag:yaml.org,2002:{tag}", re.compile(rf"^[-+]?(?:{pattern})$"), list(firsts)
        )
    return loader


_LOADER: Final = _yaml_loader()


def _yaml_pieces(data: bytes) -> Iterator[_Piece]:
    for number, document in enumerate(_yaml_documents(data), start=1):
        if document is None:
            continue
        if not isinstance(document, dict):
            raise UnreadableError(
                f"is no Kubernetes object: document {number} is a {type(document).__name__}"
            )
        api_version, kind = _yaml_head(document)
        listed = _kind_listed(api_version, kind)
        if listed is None:
            yield api_version, kind, partial(_read_builtins, document)
            continue
        items = document.get("items")
        for item in items if isinstance(items, list) else ():
            item_version, item_kind = _yaml_head(item)
            yield (
                (api_version if listed else None) or item_version,
                listed or item_kind,
                partial(_read_builtins, item),
            )


def _read_builtins(obj: object, kind: wire.Kind) -> wire.Told:
    return wire.from_builtins(kind, obj)


def _yaml_head(obj: object) -> tuple[str | None, str | None]:
    if not isinstance(obj, dict):
        return None, None
    api_version, kind = obj.get("apiVersion"), obj.get("kind")
    return (
        api_version if isinstance(api_version, str) else None,
        kind if isinstance(kind, str) else None,
    )


def _yaml_documents(data: bytes) -> list[object]:
    try:
        return list(yaml.load_all(data, Loader=_LOADER))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise UnreadableError(
            f"is not YAML: {error.problem}", mark.line + 1 if mark else 0
        ) from None
    except yaml.reader.ReaderError as error:
        line = data.count(b"\n", 0, error.position) + 1
        raise UnreadableError(f"is not YAML: {error.reason}", line) from None
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        raise UnreadableError(f"is not YAML: {error}") from None
