"""The configuration file is watched: another content ends the agent, nothing else does (CFG-51)."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ebpflb.configwatch import ConfigWatch

OLD, NEW = b"mode: ipvs\n", b"mode: ''\n"
TIMEOUT_S = 10.0


def nothing(_path: Path) -> None: ...


def written(path: Path) -> None:
    path.write_bytes(NEW)


def written_with_the_same_length(path: Path) -> None:
    path.write_bytes(OLD.replace(b"ipvs", b"ebpf"))


def replaced_by_rename(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(NEW)
    other.rename(path)


def touched(path: Path) -> None:
    os.utime(path, (1, 1))


def written_with_what_it_said(path: Path) -> None:
    path.write_bytes(OLD)


def removed(path: Path) -> None:
    path.unlink()


def removed_and_made_anew(path: Path) -> None:
    path.unlink()
    path.write_bytes(NEW)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("happens", "changed"),
    [
        (nothing, False),
        (written, True),
        (written_with_the_same_length, True),
        (replaced_by_rename, True),
        (removed_and_made_anew, True),
        (emptied, True),
        (touched, False),
        (written_with_what_it_said, False),
        (removed, False),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_counts_as_a_change(
    happens: Callable[[Path], None], changed: bool, tmp_path: Path
) -> None:
    path = tmp_path / "kp.conf"
    path.write_bytes(OLD)
    watch = ConfigWatch(path, OLD, lambda: None)
    assert not watch.has_changed()
    happens(path)
    assert watch.has_changed() is changed


def test_a_change_between_reading_and_watching_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "kp.conf"
    path.write_bytes(NEW)
    assert ConfigWatch(path, OLD, lambda: None).has_changed()


def test_a_config_map_is_followed_through_its_links(tmp_path: Path) -> None:
    for name, content in (("..1", OLD), ("..2", NEW)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kp.conf").write_bytes(content)
    (tmp_path / "..data").symlink_to("..1")
    path = tmp_path / "kp.conf"
    path.symlink_to("..data/kp.conf")
    watch = ConfigWatch(path, OLD, lambda: None)
    assert not watch.has_changed()
    (tmp_path / "..new").symlink_to("..2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert watch.has_changed()


def test_the_thread_tells_it_once_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "kp.conf"
    path.write_bytes(OLD)
    told = threading.Semaphore(0)
    watch = ConfigWatch(path, OLD, told.release, interval_s=0.001)
    watch.start()
    path.write_bytes(NEW)
    assert told.acquire(timeout=TIMEOUT_S)
    watch.stop()
    assert not told.acquire(blocking=False)


def test_the_thread_ends_when_it_is_stopped_and_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "kp.conf"
    path.write_bytes(OLD)
    told: list[None] = []
    watch = ConfigWatch(path, OLD, lambda: told.append(None))
    watch.start()
    watch.stop()
    path.write_bytes(NEW)
    assert told == []
