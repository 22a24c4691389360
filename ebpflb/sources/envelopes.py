# SPDX-License-Identifier: Apache-2.0
"""What the API wraps its objects in: pages of a list, lines of a watch.

Pure: bytes in, raw objects out. A page is taken apart while it comes, so that a list of 50 MB needs
room for a few objects. This file must not know what an object is, nor what HTTP is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import msgspec

PIECE_BYTES: Final = 1 << 18
LINE_BYTES: Final = 1 << 24
"""More than any object may have; a longer line is none."""


class MalformedError(Exception):
    """These bytes are no list, or no event."""


# --- lists ----------------------------------------------------------------------------------------


class _ListMeta(msgspec.Struct, gc=False):
    version: str | None = msgspec.field(default=None, name="resourceVersion")
    token: str | None = msgspec.field(default=None, name="continue")


class _List(msgspec.Struct, gc=False):
    metadata: _ListMeta | None = None
    items: list[msgspec.Raw] | msgspec.UnsetType | None = msgspec.UNSET


class _Object(msgspec.Struct, gc=False):
    metadata: _ListMeta | None = None


_LIST: Final = msgspec.json.Decoder(_List)
_ITEMS: Final = msgspec.json.Decoder(list[msgspec.Raw])
_OBJECT: Final = msgspec.json.Decoder(_Object)
_OPENING: Final = b'"items":['
_SEAM: Final = b'},{"metadata":'
_BAD: Final = (msgspec.MsgspecError, RecursionError, ValueError)


class Page:
    """One page of a list. ``feed`` it, then ``finish`` it; then its ``version`` is known.

    The API server writes all objects of a list alike, so a large page is cut where one ends and the
    next begins, and each piece is decoded by itself; a cut in the wrong place does not decode and
    is not made. Of a page that is written in another way nothing comes before its end.
    """

    def __init__(self) -> None:
        self.version = ""
        self.token = ""
        """What the next page must be asked for with, "" where there is none."""
        self._buffer = bytearray()
        self._opened = False
        self._enough = PIECE_BYTES

    def feed(self, data: bytes) -> list[msgspec.Raw]:
        """Take more bytes; return the objects that are complete, possibly none."""
        self._buffer += data
        if len(self._buffer) < self._enough:
            return []
        objects = self._piece()
        # Nobody is to look at one buffer over and over.
        self._enough = PIECE_BYTES if objects else 2 * len(self._buffer)
        return objects

    def finish(self) -> list[msgspec.Raw]:
        """Return the rest of the objects. Raises MalformedError, also for half a page."""
        text = (b'{"items":[' if self._opened else b"") + self._buffer
        self._buffer = bytearray()
        try:
            rest = _LIST.decode(text)
        except _BAD as error:
            raise MalformedError(f"no list: {_why(error)}") from None
        self._note(rest.metadata)
        if rest.items is msgspec.UNSET or not self.version:
            raise MalformedError("no list: it lacks items or metadata.resourceVersion")
        return rest.items or []

    def _piece(self) -> list[msgspec.Raw]:
        if not self._opened and not self._open():
            return []
        cut = self._buffer.rfind(_SEAM) + 1
        if not cut:
            return []
        try:
            objects = _ITEMS.decode(b"".join((b"[", self._buffer[:cut], b"]")))
        except _BAD:
            return []
        del self._buffer[: cut + 1]
        return objects

    def _open(self) -> bool:
        """Take what stands before the objects."""
        end = self._buffer.find(_OPENING) + len(_OPENING)
        if end < len(_OPENING):
            return False
        try:
            self._note(_LIST.decode(self._buffer[:end] + b"]}").metadata)
        except _BAD:
            return False
        del self._buffer[:end]
        self._opened = True
        return True

    def _note(self, meta: _ListMeta | None) -> None:
        if meta is not None:
            self.version = meta.version or self.version
            self.token = meta.token or self.token


# --- watches --------------------------------------------------------------------------------------


class Line(msgspec.Struct, gc=False):
    """One event of a watch."""

    type: str
    object: msgspec.Raw


_LINE: Final = msgspec.json.Decoder(Line)


def lines(read: Callable[[], bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream, without their ends; ``read`` returns b"" when it is over.

    Raises MalformedError where it ends in the middle of a line, or a line does not end.
    """
    pending = b""
    while data := read():
        *whole, rest = data.split(b"\n")
        if whole:
            yield pending + whole[0]
            yield from whole[1:]
            pending = rest
        else:
            pending += rest
        if len(pending) > LINE_BYTES:
            raise MalformedError("no event: a line without an end")
    if pending.strip():
        raise MalformedError("no event: half a line")


def read_line(data: bytes) -> Line:
    """Read one line of a watch. Raises MalformedError."""
    try:
        return _LINE.decode(data)
    except _BAD as error:
        raise MalformedError(f"no event: {_why(error)}") from None


def version_of(data: msgspec.Raw) -> str:
    """The resourceVersion of an object, "" where it has none that can be read."""
    try:
        meta = _OBJECT.decode(data).metadata
    except _BAD:
        return ""
    return (meta.version if meta else None) or ""


def _why(error: Exception) -> str:
    return str(error).replace("`", "")
