# SPDX-License-Identifier: Apache-2.0
"""Services, EndpointSlices and Nodes from a folder of YAML and JSON files, watched for changes.

One thread owns the folder: it looks for changed files, reads only those, and tells the agent what
became of each object. Two rules keep a half-written file from costing anybody a connection: what
changed a moment ago is looked at again before it is believed, and a file that makes no sense keeps
what it last said. It must not know what an object means, nor what is done with it.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Final, Protocol

import msgspec

from ebpflb.errors import ConfigError
from ebpflb.model import Deleted, Event, ObjectKey, Synced
from ebpflb.sources.documents import Contents, UnreadableError, read_objects
from ebpflb.sources.wire import Told

SETTLE_S: Final = 0.05
"""What changed less than this ago may still be changing; longer than a tick of any file's clock."""

_PATIENCE: Final = 4  # looks: a file that is rewritten without end is believed after these
_INTERVAL_S: Final = 0.2
_CPU_SHARE: Final = 0.05
_LONGEST_WAIT_S: Final = 2.0  # after a long read, which is not the rule, as much as after a short
_SUFFIXES: Final = (".yaml", ".yml", ".json")


class Notice(Protocol):
    """Where messages go: an event's name, and what a person needs to know as fields."""

    def __call__(self, event: str, /, **fields: object) -> None:
        """Take one message."""
        ...


class ManifestSource:
    """Tells ``emit`` what the files of ``directory`` say, and how that changes.

    Read are ``*.yaml``, ``*.yml`` and ``*.json``, none that are hidden, with any number of objects
    each. Of two files with one object the first by name wins, and of two in one file the first;
    when the winner goes the other one counts. A file that cannot be read keeps what it last said,
    one that vanishes takes its objects with it, and a folder that vanishes keeps all it had.

    ``emit`` and ``notice`` are called on the source's thread. The constructor raises ConfigError
    where there is no such folder. The notices:

    * ``manifest_unreadable``: file, line (0: unknown), reason, action;
    * ``manifest_kind_ignored``: file, kind;
    * ``manifest_object_repeated``: object, file, used (the file whose object counts);
    * ``manifest_folder_lost``: directory, reason, action; ``manifest_folder_back``: directory.
    """

    def __init__(
        self,
        directory: str | Path,
        emit: Callable[[Event], None],
        notice: Notice,
        *,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._directory = Path(directory)
        self._emit = emit
        self._notice = notice
        self._clock_s = clock_s
        self._files: dict[str, _File] = {}
        self._sayings = _Sayings()
        self._looks: dict[str, int] = {}  # at each file that has not settled
        self._synced = False
        self._lost = False
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        _check(self._directory)

    def start(self) -> None:
        """Begin to watch, on a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="manifests", daemon=True)
        self._thread.start()

    def alive(self) -> bool:
        """Whether the thread watches; one that ended without ``stop`` is a fault of ours."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End the watching; nothing is emitted after this returns."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> bool:
        """Look once and emit what is different; the first look is followed by Synced.

        Returns whether something has not settled, so that it is worth looking again after
        ``SETTLE_S``. The first look does not wait for that: it takes everything as it is.
        """
        try:
            present, settled = self._scan()
        except OSError as error:
            self._folder_lost(error)
            return False
        if self._lost:
            self._lost = False
            self._notice("manifest_folder_back", directory=str(self._directory))
        files = self._files
        changed = sorted(
            name
            for name, stamp in present.items()
            if (known := files.get(name)) is None or known.stamp != stamp
        )
        unsettled: list[str] = []
        for name in changed:
            if (
                self._stopping.is_set()
            ):  # a folder of YAML may take seconds; half of it says nothing
                return False
            if not self._refresh(name, present):
                unsettled.append(name)
        for name in sorted(files.keys() - present.keys()):
            if settled or name in self._looks:
                del files[name]
                self._sayings.put(name, {})
            else:
                unsettled.append(name)
        self._looks = {name: self._looks.get(name, 0) + 1 for name in unsettled}
        # Slices go last, so that an endpoint which moves to another slice is never without one.
        for event in sorted(self._sayings.take_changes(), key=_is_slice_gone):
            self._emit(event)
        if not self._synced:
            self._synced = True
            self._emit(Synced())
        return bool(unsettled)

    def _run(self) -> None:
        wait_s = 0.0
        while not self._stopping.wait(wait_s):
            began_s = time.thread_time()
            look_again = self.poll()
            used_s = time.thread_time() - began_s
            share_s = min(used_s / _CPU_SHARE, _LONGEST_WAIT_S)
            wait_s = max(SETTLE_S if look_again else _INTERVAL_S, share_s)

    def _scan(self) -> tuple[dict[str, _Stamp], bool]:
        """The manifest files by name, and whether that list has settled."""
        settled = self._has_settled(self._directory.stat())
        found: dict[str, _Stamp] = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if entry.name.startswith(".") or not entry.name.endswith(_SUFFIXES):
                    continue
                try:
                    status = entry.stat()
                except FileNotFoundError:  # gone since, or a link to nowhere
                    continue
                except OSError:  # reading it will say what is wrong
                    found[entry.name] = _NO_STAMP
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    found[entry.name] = _stamp(status)
        return found, settled

    def _refresh(self, name: str, present: Mapping[str, _Stamp]) -> bool:
        """Take in one changed file; False if it must be looked at again."""
        try:
            data, stamp, settled = self._read(name)
        except FileNotFoundError:
            return False
        except OSError as error:
            why = UnreadableError(f"cannot be read: {error.strerror}")
            self._keep(name, present[name], why)
            return True
        if not settled and self._synced and self._looks.get(name, 0) < _PATIENCE:
            return False
        try:
            contents = read_objects(name, data)
        except UnreadableError as error:
            if settled:
                self._keep(name, stamp, error)
            return settled
        self._take(name, stamp if settled else None, contents, present)
        return settled

    def _read(self, name: str) -> tuple[bytes, _Stamp, bool]:
        """A file's bytes and stamp, and whether they go together and have settled."""
        # O_NONBLOCK: a pipe by the name of a manifest must not hold us up.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        with os.fdopen(os.open(self._directory / name, flags), "rb") as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise OSError(0, "it is no regular file")
            data = file.read()
            after = os.fstat(file.fileno())
        return data, _stamp(after), _stamp(before) == _stamp(after) and self._has_settled(after)

    def _has_settled(self, status: os.stat_result) -> bool:
        """Whether the last change is long enough ago; one in the future says nothing."""
        return not 0 <= self._clock_s() - status.st_ctime < SETTLE_S

    def _keep(self, name: str, stamp: _Stamp, why: UnreadableError) -> None:
        """Leave all as it is until the file changes, and say so."""
        known = self._files.setdefault(name, _File(stamp))
        self._files[name] = msgspec.structs.replace(known, stamp=stamp)
        self._notice(
            "manifest_unreadable",
            file=str(self._directory / name),
            line=why.line,
            reason=why.reason,
            action="mend it; until then what it last said stays in force",
        )

    def _take(
        self, name: str, stamp: _Stamp | None, contents: Contents, present: Collection[str]
    ) -> None:
        """Take what a file says for what there is."""
        known = self._files.get(name, _File(None))
        self._files[name] = _File(stamp, contents.ignored, contents.repeated)
        for kind in sorted(contents.ignored - known.ignored):
            self._notice("manifest_kind_ignored", file=str(self._directory / name), kind=kind)
        for key in sorted(contents.repeated - known.repeated):
            self._notice_repeated(key, name, used=name)
        for key, loser, winner in self._sayings.put(name, contents.objects):
            if {loser, winner} <= set(present):  # not while a file is being renamed
                self._notice_repeated(key, loser, used=winner)

    def _notice_repeated(self, key: ObjectKey, name: str, *, used: str) -> None:
        self._notice(
            "manifest_object_repeated",
            object=str(key),
            file=str(self._directory / name),
            used=str(self._directory / used),
        )

    def _folder_lost(self, error: OSError) -> None:
        if not self._lost:
            self._lost = True
            self._notice(
                "manifest_folder_lost",
                directory=str(self._directory),
                reason=error.strerror,
                action="bring it back; until then all that it said stays in force",
            )


def load(directory: str | Path, notice: Notice) -> list[Event]:
    """Return what the files of ``directory`` say now, Synced at the end, without watching them.

    Raises ConfigError where there is no such folder.
    """
    events: list[Event] = []
    ManifestSource(directory, events.append, notice, clock_s=lambda: float("inf")).poll()
    return events


# --- files and what they say ---------------------------------------------------------------------

_Stamp = int
"""Made of the time of the last change, size, inode and device: equal while a file is the same."""

_NO_STAMP: Final = 0


class _File(msgspec.Struct, frozen=True, gc=False):
    """What is remembered of a file; without a stamp it is read again at the next look."""

    stamp: _Stamp | None
    ignored: frozenset[str] = frozenset()
    repeated: frozenset[ObjectKey] = frozenset()


class _Saying(msgspec.Struct, frozen=True, gc=False):
    file: str
    told: Told


class _Sayings:
    """Which file says what of which object; the first file by name is believed."""

    def __init__(self) -> None:
        self._by_key: dict[ObjectKey, tuple[_Saying, ...]] = {}
        self._keys: dict[str, tuple[ObjectKey, ...]] = {}
        self._before: dict[ObjectKey, Told] = {}  # what was believed of all that is touched

    def put(self, file: str, objects: Mapping[ObjectKey, Told]) -> list[tuple[ObjectKey, str, str]]:
        """Let ``file`` say just this; return key, loser and winner of each new disagreement."""
        disagreements: list[tuple[ObjectKey, str, str]] = []
        for key in self._keys.pop(file, ()):
            if key not in objects:
                self._replace(key, file, None)
        for key, told in objects.items():
            sayings = self._by_key.get(key, ())
            mine = next((saying for saying in sayings if saying.file == file), None)
            # What is said again stays the object that it was, which others may share.
            if mine is None or mine.told != told:
                self._replace(key, file, _Saying(file, told))
            if mine is None and sayings:
                first, second = sorted((sayings[0].file, file))
                disagreements.append((key, second, first))
        if objects:
            self._keys[file] = tuple(objects)
        return disagreements

    def take_changes(self) -> Iterator[Told]:
        """Yield what is believed now, of each object of which something else was believed."""
        touched, self._before = self._before, {}
        for key, before in touched.items():
            now = self._believed(key)
            if now != before:
                yield now

    def _believed(self, key: ObjectKey) -> Told:
        sayings = self._by_key.get(key)
        return sayings[0].told if sayings else Deleted(key)

    def _replace(self, key: ObjectKey, file: str, saying: _Saying | None) -> None:
        self._before.setdefault(key, self._believed(key))
        others = [each for each in self._by_key.get(key, ()) if each.file != file]
        said = sorted([*others, saying] if saying else others, key=lambda each: each.file)
        if said:
            self._by_key[key] = tuple(said)
        else:
            del self._by_key[key]


def _is_slice_gone(told: Told) -> bool:
    return isinstance(told, Deleted) and told.key.kind == "EndpointSlice"


def _stamp(status: os.stat_result) -> _Stamp:
    return hash((status.st_ctime_ns, status.st_size, status.st_ino, status.st_dev))


def _check(directory: Path) -> None:
    try:
        with os.scandir(directory):
            pass
    except OSError as error:
        raise ConfigError(
            f"--manifests {directory}: {error.strerror}; name a folder of YAML or JSON manifests "
            "that this process may read"
        ) from None
