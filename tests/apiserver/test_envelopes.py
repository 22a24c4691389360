"""Pages and lines: taken apart as they come, wherever they are cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.sources import envelopes
from ebpflb.sources.envelopes import MalformedError, Page, lines, read_line, version_of

texts = st.text(max_size=8) | st.sampled_from(['},{"metadata":', '"items":[', "\\", '"', "é"])
values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(texts, inner, max_size=3)
        | st.fixed_dictionaries({"metadata": inner})
    ),
    max_leaves=8,
)
objects = st.lists(st.fixed_dictionaries({"metadata": values, "more": values}), max_size=12)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(each % (len(data) + 1) for each in at)})
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    objects=objects,
    at=st.lists(st.integers(min_value=0), max_size=20),
    piece=st.integers(min_value=1, max_value=200),
    compact=st.booleans(),
    meta_last=st.booleans(),
)
def test_a_page_is_what_was_written_wherever_it_is_cut(
    objects: list[Any], at: list[int], piece: int, compact: bool, meta_last: bool
) -> None:
    meta = {"metadata": {"resourceVersion": "7", "continue": "next"}}
    page = {"items": objects} | meta if meta_last else meta | {"items": objects}
    data = json.dumps(page, separators=(",", ":") if compact else None).encode()
    read = Page()
    read._enough = piece
    found: list[Any] = []
    for part in cut(data, at):
        found += read.feed(part)
    found += read.finish()
    assert [msgspec.json.decode(each) for each in found] == objects
    assert (read.version, read.token) == ("7", "next")


def test_a_page_needs_little_room() -> None:
    objs = [{"metadata": {"name": f"s{n}"}, "text": "x" * 5000} for n in range(10_000)]
    page = {"kind": "List", "metadata": {"resourceVersion": "7"}, "items": objs}
    data = json.dumps(page, separators=(",", ":")).encode()
    assert len(data) > 50_000_000
    read, count, most = Page(), 0, 0
    for start in range(0, len(data), 1 << 16):
        count += len(read.feed(data[start : start + (1 << 16)]))
        most = max(most, len(read._buffer))
    assert count + len(read.finish()) == len(objs)
    assert most < 2 * envelopes.PIECE_BYTES


@pytest.mark.parametrize("items", ["null", "[]", "[ ]"])
def test_an_empty_page(items: str) -> None:
    page = Page()
    page.feed(b'{"metadata":{"resourceVersion":"7"},"items":%b}' % items.encode())
    assert page.finish() == []
    assert (page.version, page.token) == ("7", "")


def test_half_a_page_is_none() -> None:
    page = Page()
    page._enough = 1
    page.feed(b'{"metadata":{"resourceVersion":"7"},"items":[{"metadata":1},{"metadata":2},{"me')
    with pytest.raises(MalformedError):
        page.finish()


@given(
    st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b" ")), max_size=8),
    st.lists(st.integers(min_value=0), max_size=12),
)
def test_lines_are_what_was_written_wherever_they_are_cut(
    written: list[bytes], at: list[int]
) -> None:
    data = b"".join(line + b"\n" for line in written)
    parts = iter([part for part in cut(data, at) if part] + [b""])
    assert list(lines(lambda: next(parts))) == written


def test_an_event_and_its_version() -> None:
    line = read_line(b'{"object":{"x":1,"metadata":{"resourceVersion":"8"}},"type":"ADDED"}')
    assert (line.type, version_of(line.object)) == ("ADDED", "8")
    assert version_of(msgspec.Raw(b'{"metadata":[]}')) == ""
    assert version_of(msgspec.Raw(b"7")) == ""
