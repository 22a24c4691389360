# SPDX-License-Identifier: Apache-2.0
"""A map's layout, left with the map itself: the name, place and size of each member, as BTF.

Another version of the agent reads from it what an entry of an older or a newer one means. It is
for that alone: nothing is checked by it, and of BTF only what is written here is read. This file
must not know what any member is for.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from typing import Final, NamedTuple

from ebpflb.datapath.ebpf.abi import Layout
from ebpflb.datapath.ebpf.libbpf import Btf

_HEADER: Final = struct.Struct("=HBBIIIII")
_TYPE: Final = struct.Struct("=III")
_TRIPLE: Final = struct.Struct("=III")
"""Of an array: element, index, length; of a member: name, type, bit."""

_MAGIC: Final = 0xEB9F
_INT, _ARRAY, _STRUCT = 1, 3, 4
_KIND_SHIFT: Final = 24
_LENGTH_MASK: Final = 0xFFFF
_BYTE, _INDEX = 1, 2
_INDEX_SIZE: Final = 4


class Place(NamedTuple):
    """Where a member is, in bytes."""

    offset: int
    size: int

    def of(self, raw: bytes | memoryview) -> bytes:
        return bytes(raw[self.offset : self.offset + self.size])


Members = Mapping[str, Place]


def places(layout: Layout) -> Members:
    """Of every member, those that are padding too."""
    starts = [*layout.offsets.values(), layout.size]
    return {
        name: Place(start, end - start)
        for name, (start, end) in zip(layout.offsets, itertools.pairwise(starts), strict=True)
    }


class _Writer:
    def __init__(self) -> None:
        self._types = bytearray()
        self._strings = bytearray(b"\0")
        self._count = 0
        self._plain: dict[int, int] = {}
        for name, size in (("u8", 1), ("u32", _INDEX_SIZE)):
            self._plain[size] = self._int(name, size)

    def struct(self, layout: Layout) -> int:
        members = [
            (self._string(name), self._type(place.size), 8 * place.offset)
            for name, place in places(layout).items()
        ]
        info = _STRUCT << _KIND_SHIFT | len(members)
        return self._add(self._string(layout.name), info, layout.size, *members)

    def data(self) -> bytes:
        size = len(self._types)
        header = _HEADER.pack(_MAGIC, 1, 0, _HEADER.size, 0, size, size, len(self._strings))
        return header + self._types + self._strings

    def _type(self, size: int) -> int:
        """A number where there is one of that size, else so many bytes."""
        if size not in self._plain:
            if size in (2, 8):
                self._plain[size] = self._int(f"u{8 * size}", size)
            else:
                self._plain[size] = self._add(0, _ARRAY << _KIND_SHIFT, 0, (_BYTE, _INDEX, size))
        return self._plain[size]

    def _int(self, name: str, size: int) -> int:
        number = self._add(self._string(name), _INT << _KIND_SHIFT, size)
        self._types += struct.pack("=I", 8 * size)
        return number

    def _add(self, name: int, info: int, size: int, *triples: tuple[int, int, int]) -> int:
        self._types += _TYPE.pack(name, info, size)
        for triple in triples:
            self._types += _TRIPLE.pack(*triple)
        self._count += 1
        return self._count

    def _string(self, text: str) -> int:
        at = len(self._strings)
        self._strings += text.encode() + b"\0"
        return at


def describe(key: Layout, value: Layout) -> Btf:
    """Of a map whose key and value are structs."""
    writer = _Writer()
    key_type = writer.struct(key)
    value_type = writer.struct(value)
    return Btf(writer.data(), key_type, value_type)


_Triples = tuple[tuple[int, int, int], ...]


def read(types: Btf) -> tuple[Members, Members] | None:
    """The members of key and value; None where it is not as ``describe`` writes it."""
    try:
        sizes, structs, strings = _types(types.data)
        found = [
            {
                _text(strings, name): Place(bit // 8, sizes[type_id])
                for name, type_id, bit in structs[one]
            }
            for one in (types.key_type, types.value_type)
        ]
    except (struct.error, KeyError, ValueError):
        return None
    return found[0], found[1]


def _types(data: bytes) -> tuple[dict[int, int], dict[int, _Triples], bytes]:
    magic, _, _, header, start, size, strings_start, strings_size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("not BTF of this machine")
    at, end = header + start, header + start + size
    sizes: dict[int, int] = {}
    structs: dict[int, _Triples] = {}
    for number in itertools.count(1):
        if at >= end:
            break
        _, info, size = _TYPE.unpack_from(data, at)
        at += _TYPE.size
        kind = info >> _KIND_SHIFT & 0x1F
        if kind == _INT:
            sizes[number] = size
            at += 4
        elif kind == _ARRAY:
            element, _, count = _TRIPLE.unpack_from(data, at)
            sizes[number] = sizes[element] * count
            at += _TRIPLE.size
        elif kind == _STRUCT:
            count = info & _LENGTH_MASK
            length = count * _TRIPLE.size
            structs[number] = tuple(_TRIPLE.iter_unpack(data[at : at + length]))
            sizes[number] = size
            at += length
        else:
            raise ValueError(f"a type of kind {kind}")
    return sizes, structs, data[header + strings_start :][:strings_size]


def _text(strings: bytes, at: int) -> str:
    return strings[at : strings.index(b"\0", at)].decode()
