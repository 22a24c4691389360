# SPDX-License-Identifier: Apache-2.0
"""The layout of the maps, read from ``bpf/abi.h`` and ``bpf/maps.h``: nothing is written twice.

Only the part of C that those two headers promise to keep to is understood; anything else is an
error at import, so a layout cannot drift unseen. This file must not know what a value means.
"""

from __future__ import annotations

import collections
import hashlib
import re
import struct
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

SOURCES = resources.files("ebpflb.bpf")

# Members of network order are handed over as bytes, so that no byte order is ever guessed.
_SCALARS = {
    "__u8": ("B", 1),
    "__u16": ("H", 2),
    "__u32": ("I", 4),
    "u32": ("I", 4),
    "int": ("I", 4),
    "__u64": ("Q", 8),
    "u64": ("Q", 8),
    "char": ("s", 1),
    "__be16": ("2s", 2),
    "__be32": ("4s", 4),
}

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_DEFINE = re.compile(r"^#define (ABI_\w+) (\d+)$", re.MULTILINE)
_ENUM = re.compile(r"^enum (\w+) \{(.*?)^\};", re.DOTALL | re.MULTILINE)
_STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.DOTALL | re.MULTILINE)
_MEMBER = re.compile(r"^((?:struct )?\w+) (\w+)(?:\[(\w+)\])?$")
_MAP = re.compile(r'^MAP\("(\w+)", (\w+), ((?:struct )?\w+), ((?:struct )?\w+), (\d+)\);$')


class Layout:
    """A key or a value: ``size`` bytes; ``pack(*members)`` and ``unpack(bytes)`` of its members.

    Members named ``pad`` or ``spare`` are zero and left out. Of the rest, numbers are in host
    order, ``__be`` members, arrays and structs are bytes as they lie in memory. ``offsets`` has
    them all.
    """

    def __init__(self, name: str, text: str, members: list[tuple[str, str, int]]) -> None:
        self.name = name
        self.text = text
        self._struct = struct.Struct("=" + "".join(code for _, code, _ in members))
        self.size = self._struct.size
        sizes = [size for _, _, size in members]
        self.offsets = {m: sum(sizes[:i]) for i, (m, _, _) in enumerate(members)}
        fields = [m for m, code, _ in members if not code.endswith("x")]
        self._make = _tuple_type(name, fields)._make
        self.pack = self._struct.pack

    def make(self, **members: object) -> bytes:
        """The bytes with these members; all others are zero."""
        return self.pack(*self.unpack(bytes(self.size))._replace(**members))

    def unpack(self, data: bytes | memoryview) -> Any:
        """A named tuple of the members."""
        return self._make(self._struct.unpack(data))


def _tuple_type(name: str, fields: list[str]) -> Any:
    return collections.namedtuple(name, fields)  # noqa: PYI024 - its members come from the header


class MapSpec(NamedTuple):
    """One line of ``maps.h``: ``type`` as bcc names it, ``flags`` of the system call."""

    name: str
    type: str
    key: Layout
    value: Layout
    flags: int

    def digest(self, max_entries: int) -> str:
        """Names this layout and size; a pinned map of another digest is another map."""
        text = f"{self.type}|{self.flags}|{max_entries}|{self.key.text}|{self.value.text}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _read(name: str) -> str:
    return _COMMENT.sub("", SOURCES.joinpath(name).read_text())


def _constants(text: str) -> dict[str, int]:
    found = {name: int(value) for name, value in _DEFINE.findall(text)}
    for _, body in _ENUM.findall(text):
        for line in filter(None, (part.strip() for part in body.split(","))):
            name, _, value = line.partition("=")
            found[name.strip()] = int(value)
    return found


def _layouts(text: str, constants: Mapping[str, int]) -> dict[str, Layout]:
    layouts: dict[str, Layout] = {}
    for name, body in _STRUCT.findall(text):
        members = []
        nested = ""
        for line in filter(None, (part.strip() for part in body.split(";"))):
            match = _MEMBER.match(line)
            if not match:
                raise ValueError(f"struct {name}: cannot read {line!r}")
            kind, member, count_text = match.groups()
            if kind.startswith("struct "):
                inner = layouts[kind.removeprefix("struct ")]
                code, size = "", inner.size
                nested += f" {inner.text}"
            else:
                code, size = _SCALARS[kind]
            if count_text:
                size *= int(constants.get(count_text, 0) or count_text)
            if member.startswith(("pad", "spare")):
                code = f"{size}x"
            elif count_text or not code:
                code = f"{size}s"
            members.append((member, code, size))
        layouts[name] = Layout(name, re.sub(r"\s+", " ", body).strip() + nested, members)
    return layouts


def _maps(text: str, layouts: Mapping[str, Layout]) -> dict[str, MapSpec]:
    def layout(kind: str) -> Layout:
        if kind.startswith("struct "):
            return layouts[kind.removeprefix("struct ")]
        code, size = _SCALARS[kind]
        return Layout(kind, f"{kind} value", [("value", code, size)])

    specs = {}
    for line in text.splitlines():
        if match := _MAP.match(line):
            kind, name, key, value, flags = match.groups()
            specs[name] = MapSpec(name, kind, layout(key), layout(value), int(flags))
    return specs


_ABI = _read("abi.h")
CONSTANTS: Mapping[str, int] = _constants(_ABI)
LAYOUTS: Mapping[str, Layout] = _layouts(_ABI, CONSTANTS)
MAPS: Mapping[str, MapSpec] = _maps(_read("maps.h"), LAYOUTS)


def names_of(prefix: str) -> dict[int, str]:
    """The members of an enum by value, without their prefix and in lower case."""
    return {
        value: name.removeprefix(prefix).lower()
        for name, value in CONSTANTS.items()
        if name.startswith(prefix) and name != f"{prefix}COUNT"
    }


def static_asserts() -> str:
    """C text that makes the compiler check every size and offset that is used here."""
    lines = []
    for layout in LAYOUTS.values():
        kind = f"struct {layout.name}"
        lines.append(f'_Static_assert(sizeof({kind}) == {layout.size}, "{kind}");')
        lines += [
            f'_Static_assert(__builtin_offsetof({kind}, {member}) == {at}, "{kind} {member}");'
            for member, at in layout.offsets.items()
        ]
    return "\n".join(lines) + "\n"
