# SPDX-License-Identifier: Apache-2.0
"""The one entry of `settings`, read and written a word at a time.

Several parts write it, each its own members; all of them from one thread. This file must not know
what a member means.
"""

from __future__ import annotations

from typing import Any, Final

from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.libbpf import MappedArray

SETTINGS: Final = abi.LAYOUTS["settings"]


class Settings:
    """`settings`, mapped into memory."""

    def __init__(self, memory: MappedArray) -> None:
        self._memory = memory

    def read(self) -> Any:
        """A named tuple of the members."""
        return SETTINGS.unpack(self._memory.view[: SETTINGS.size])

    def write(self, **changes: object) -> None:
        """Give members other values; options that are too long become none."""
        before = bytes(self._memory.view[: SETTINGS.size])
        options = changes.get("options")
        if isinstance(options, bytes) and len(options) >= abi.CONSTANTS["ABI_OPTIONS_LEN"]:
            changes["options"] = b"{}"
        after = SETTINGS.pack(*SETTINGS.unpack(before)._replace(**changes))
        # Programs read the numbers: a word at a time, and only what differs (the writer's own word
        # is among them).
        words = SETTINGS.offsets["options"] // 8
        for at, word in enumerate(memoryview(after[: 8 * words]).cast("Q")):
            if self._memory.words[at] != word:
                self._memory.words[at] = word
        if after[8 * words :] != before[8 * words :]:
            self._memory.view[8 * words : SETTINGS.size] = after[8 * words :]

    def set_state(self, bits: int, *, of: int) -> None:
        """Let those bits of ``state`` that are in ``of`` be these; one store."""
        at = SETTINGS.offsets["state"] // 8
        word = self._memory.words[at] & ~of | bits
        if self._memory.words[at] != word:
            self._memory.words[at] = word

    def close(self) -> None:
        self._memory.close()
