# SPDX-License-Identifier: Apache-2.0
"""A folder of manifests: what is told of it, at the start and as it changes.

No thread and no sleep: ``poll`` is called by hand, on a clock that the test sets. It stands far
ahead of the files' own times, so that they have settled, unless the test says otherwise.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from ebpflb.errors import ConfigError
from ebpflb.model import Deleted, Event, ObjectKey, Refused, Synced, Upserted
from ebpflb.sources import manifests
from ebpflb.sources.manifests import SETTLE_S, ManifestSource, load
from ebpflb.sources.wire import Told
from tests.builders import (
    ApiObject,
    cluster_ip,
    node_object,
    service_key,
    service_object,
    slice_key,
    slice_object,
    told,
)


class Watched:
    """A folder, a source that watches it, and what it has said."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[Event] = []
        self.notices: list[dict[str, object]] = []
        self.clock_s: Callable[[], float] = lambda: time.time() + 3600
        path.mkdir(exist_ok=True)
        self._source: ManifestSource | None = None

    def write(self, name: str, *objects: ApiObject) -> None:
        """Write YAML documents, or one JSON list."""
        if name.endswith(".json"):
            text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        else:
            text = yaml.safe_dump_all(objects)
        (self.path / name).write_text(text)

    def poll(self) -> list[Event]:
        """Look once; return what was emitted."""
        if self._source is None:
            self._source = ManifestSource(
                self.path, self.events.append, self._note, clock_s=self._now_s
            )
        self.events.clear()
        self.notices.clear()
        self.look_again = self._source.poll()
        return list(self.events)

    def believed(self, key: ObjectKey) -> Told:
        assert self._source is not None
        return self._source._sayings._believed(key)

    def just_changed(self) -> None:
        """Set the clock to when the folder's last change was a moment ago."""
        newest = max(p.stat().st_ctime for p in (self.path, *self.path.iterdir()))
        self.clock_s = lambda: newest + SETTLE_S / 2

    def settled(self) -> None:
        self.clock_s = lambda: time.time() + 3600

    def _now_s(self) -> float:
        return self.clock_s()

    def _note(self, event: str, /, **fields: object) -> None:
        self.notices.append({"event": event} | fields)


@pytest.fixture
def folder(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "manifests")


WEB = service_object()
WEB_ELSEWHERE = service_object(cluster_ips=[cluster_ip(11)])
OTHER = service_object("other", cluster_ips=[cluster_ip(12)])
PIECE = slice_object()


# --- the first look ------------------------------------------------------------------------------


def test_all_files_are_told_in_order_and_then_synced(folder: Watched) -> None:
    folder.write("b.json", PIECE, node_object())
    folder.write("a.yaml", WEB)
    folder.write("c.yml", OTHER)
    expected = [told(obj) for obj in (WEB, PIECE, node_object(), OTHER)]
    assert folder.poll() == [*expected, Synced()]
    assert folder.notices == []
    assert folder.poll() == []


def test_an_empty_folder_is_synced_at_once(folder: Watched) -> None:
    assert folder.poll() == [Synced()]


@pytest.mark.parametrize("name", [".hidden.yaml", "a.yaml~", "a.txt", "README", ".a.yaml.swp"])
def test_what_is_no_manifest_by_its_name_is_not_read(folder: Watched, name: str) -> None:
    (folder.path / name).write_text("{{{")
    assert folder.poll() == [Synced()]
    assert folder.notices == []


def test_folders_and_links_to_nowhere_are_passed_over(folder: Watched) -> None:
    (folder.path / "folder.yaml").mkdir()
    (folder.path / "nowhere.yaml").symlink_to("gone")
    assert folder.poll() == [Synced()]
    assert folder.notices == []


def test_a_missing_folder_is_wrong_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--manifests .*/none: No such file or directory; name "):
        load(tmp_path / "none", lambda *_, **__: None)


def test_a_file_for_a_folder_is_wrong_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        load(tmp_path / "file", lambda *_, **__: None)


def test_load_tells_all_that_is_there_now(folder: Watched) -> None:
    folder.write("a.yaml", WEB, PIECE)
    (folder.path / "b.yaml").write_text("{")
    assert load(folder.path, folder._note) == [told(WEB), told(PIECE), Synced()]
    assert [notice["event"] for notice in folder.notices] == ["manifest_unreadable"]


# --- changes -------------------------------------------------------------------------------------


def test_only_what_differs_is_told(folder: Watched) -> None:
    folder.write("a.yaml", WEB, OTHER)
    folder.poll()
    folder.write("a.yaml", OTHER, WEB_ELSEWHERE)
    (event,) = folder.poll()
    assert event == told(WEB_ELSEWHERE)
    folder.write("a.yaml", OTHER, WEB_ELSEWHERE)
    assert folder.poll() == []
    assert folder.believed(service_key()) is event, "so that the planner and we share one object"


def test_an_object_that_leaves_its_file_is_deleted(folder: Watched) -> None:
    folder.write("a.yaml", WEB, PIECE)
    folder.poll()
    folder.write("a.yaml", WEB)
    assert folder.poll() == [Deleted(slice_key())]


def test_a_file_that_vanishes_takes_its_objects_with_it(folder: Watched) -> None:
    folder.write("a.yaml", WEB, PIECE)
    folder.poll()
    (folder.path / "a.yaml").unlink()
    assert folder.poll() == [Deleted(service_key()), Deleted(slice_key())]


def test_a_slice_that_replaces_another_is_told_before_the_other_goes_tv_e16(
    folder: Watched,
) -> None:
    folder.write("a.yaml", slice_object("web-1"), WEB)
    folder.poll()
    folder.write("a.yaml", slice_object("web-2"))
    assert folder.poll() == [
        Deleted(service_key()),
        told(slice_object("web-2")),
        Deleted(slice_key("web-1")),
    ]


def test_an_object_that_is_no_longer_ours_is_deleted_svc_01(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    folder.poll()
    folder.write("a.yaml", service_object(labels={"service.kubernetes.io/service-proxy-name": "x"}))
    assert folder.poll() == [Deleted(service_key())]
    folder.write("a.yaml", service_object(type="ExternalName"))
    assert folder.poll() == []
    folder.write("a.yaml", WEB)
    assert folder.poll() == [told(WEB)]


def test_an_object_that_was_never_ours_is_not_told(folder: Watched) -> None:
    folder.write("a.yaml", service_object(cluster_ips=["None"]))
    assert folder.poll() == [Synced()]


def test_an_object_that_becomes_unreadable_is_refused_and_mended(folder: Watched) -> None:
    folder.write("a.yaml", OTHER, WEB)
    folder.poll()
    folder.write("a.yaml", OTHER, service_object(clusterIP=5))
    (event,) = folder.poll()
    assert isinstance(event, Refused)
    assert event.key == service_key()
    assert event.reason.endswith("(object 2 of a.yaml)")
    folder.write("a.yaml", OTHER, WEB)
    assert folder.poll() == [told(WEB)]


@pytest.mark.parametrize("settled", [True, False], ids=["settled", "just now"])
def test_a_file_that_is_renamed_changes_nothing(folder: Watched, settled: bool) -> None:
    folder.write("b.yaml", WEB, PIECE)
    folder.poll()
    for name in ("a.yaml", "c.yaml"):
        next(folder.path.iterdir()).rename(folder.path / name)
        if not settled:
            folder.just_changed()
        assert folder.poll() == []
        folder.settled()
        assert folder.poll() == []
        assert folder.notices == []


def test_a_config_maps_links_are_followed_when_they_turn(folder: Watched) -> None:
    for version, obj in (("..v1", WEB), ("..v2", WEB_ELSEWHERE)):
        (folder.path / version).mkdir()
        folder.write(f"{version}/a.yaml", obj)
    (folder.path / "..data").symlink_to("..v1")
    (folder.path / "a.yaml").symlink_to("..data/a.yaml")
    assert folder.poll() == [told(WEB), Synced()]
    (folder.path / "..next").symlink_to("..v2")
    (folder.path / "..next").rename(folder.path / "..data")
    assert folder.poll() == [told(WEB_ELSEWHERE)]
    assert folder.notices == []


# --- what has not settled ------------------------------------------------------------------------


def test_a_file_is_not_believed_the_moment_it_changes(folder: Watched) -> None:
    folder.write("a.yaml", WEB, PIECE)
    folder.poll()
    folder.write("a.yaml")  # as an editor does before it writes
    folder.just_changed()
    assert folder.poll() == []
    assert folder.look_again
    folder.write("a.yaml", WEB_ELSEWHERE, PIECE)
    folder.settled()
    assert folder.poll() == [told(WEB_ELSEWHERE)]
    assert not folder.look_again


def test_the_first_look_takes_files_as_they_are_and_looks_again(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    folder.write("b.yaml")
    (folder.path / "b.yaml").write_text("[")
    folder.just_changed()
    assert folder.poll() == [told(WEB), Synced()]
    assert folder.look_again
    assert folder.notices == [], "half a file is no reason to complain"
    folder.settled()
    assert folder.poll() == []
    assert [notice["event"] for notice in folder.notices] == ["manifest_unreadable"]


def test_a_change_within_one_tick_of_the_files_clock_is_not_overlooked(
    folder: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "_stamp", lambda _: 1)  # the same before and after
    folder.write("a.yaml", WEB)
    folder.just_changed()
    assert folder.poll() == [told(WEB), Synced()]
    folder.write("a.yaml", WEB_ELSEWHERE)
    folder.settled()
    assert folder.poll() == [told(WEB_ELSEWHERE)]


def test_a_file_that_is_rewritten_without_end_is_believed_in_the_end(folder: Watched) -> None:
    folder.write("a.yaml", OTHER)
    folder.poll()
    told_at: list[int] = []
    for look in range(8):
        folder.write("a.yaml", service_object(f"web-{look}"))
        folder.just_changed()
        if folder.poll():
            told_at.append(look)
    assert told_at == [4, 5, 6, 7]


def test_a_file_is_not_given_up_the_moment_it_vanishes(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    folder.poll()
    (folder.path / "a.yaml").rename(folder.path / "a.yaml~")  # as an editor does before it writes
    folder.just_changed()
    assert folder.poll() == []
    assert folder.look_again
    folder.write("a.yaml", WEB_ELSEWHERE)
    folder.settled()
    assert folder.poll() == [told(WEB_ELSEWHERE)]


def test_a_file_that_stays_away_is_given_up_in_a_folder_that_never_settles(
    folder: Watched,
) -> None:
    folder.write("a.yaml", WEB)
    folder.poll()
    (folder.path / "a.yaml").unlink()
    for expected in ([], [Deleted(service_key())]):
        (folder.path / "restless").touch()
        folder.just_changed()
        assert folder.poll() == expected


def test_a_time_in_the_future_does_not_hold_a_file_up(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    folder.poll()
    folder.write("a.yaml", WEB_ELSEWHERE)
    folder.clock_s = lambda: 0.0
    assert folder.poll() == [told(WEB_ELSEWHERE)]


# --- files that cannot be read -------------------------------------------------------------------


def test_a_file_that_makes_no_sense_keeps_what_it_last_said(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    folder.write("b.yaml", OTHER)
    folder.poll()
    (folder.path / "a.yaml").write_text("kind: Service\n bad: [\n")
    assert folder.poll() == []
    assert folder.notices == [
        {
            "event": "manifest_unreadable",
            "file": str(folder.path / "a.yaml"),
            "line": 2,
            "reason": "is not YAML: mapping values are not allowed in this context",
            "action": "mend it; until then what it last said stays in force",
        }
    ]
    assert folder.poll() == []
    assert folder.notices == [], "said once"
    (folder.path / "a.yaml").write_text("kind: Service\n still: [\n")
    folder.poll()
    assert len(folder.notices) == 1, "and again when it changes"
    folder.write("a.yaml", WEB_ELSEWHERE)
    assert folder.poll() == [told(WEB_ELSEWHERE)]
    (folder.path / "a.yaml").write_text("[")
    folder.poll()
    (folder.path / "a.yaml").unlink()
    assert folder.poll() == [Deleted(service_key())]


def test_a_file_that_never_made_sense_costs_no_other(folder: Watched) -> None:
    folder.write("b.yaml", WEB)
    (folder.path / "a.yaml").write_bytes(b"\x7fELF\x00\xff")
    assert folder.poll() == [told(WEB), Synced()]
    assert [notice["file"] for notice in folder.notices] == [str(folder.path / "a.yaml")]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        pytest.param(
            lambda path: path.symlink_to(path.name),
            "cannot be read: Too many levels of symbolic links",
            id="a link to itself",
        ),
        pytest.param(os.mkfifo, "cannot be read: it is no regular file", id="a pipe"),
        pytest.param(
            lambda path: path.symlink_to("/dev/zero"),
            "cannot be read: it is no regular file",
            id="a device",
        ),
    ],
)
def test_a_file_that_cannot_be_opened_keeps_what_it_last_said(
    folder: Watched, make: Callable[[Path], None], reason: str
) -> None:
    folder.write("a.yaml", WEB)
    folder.poll()
    (folder.path / "a.yaml").unlink()
    make(folder.path / "a.yaml")
    assert folder.poll() == []
    assert [(n["event"], n["reason"]) for n in folder.notices] == [("manifest_unreadable", reason)]
    folder.poll()
    assert folder.notices == []


def test_a_file_that_may_not_be_read_is_read_once_it_may(
    folder: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write("a.yaml", WEB)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        assert folder.poll() == [Synced()]
        assert folder.poll() == []
    (folder.path / "a.yaml").chmod(0o640)
    assert folder.poll() == [told(WEB)]


def denied(*_: object) -> int:
    raise PermissionError(13, "Permission denied")


# --- one object in two places --------------------------------------------------------------------


def test_of_two_files_with_one_object_the_first_by_name_wins(folder: Watched) -> None:
    folder.write("b.yaml", WEB)
    assert folder.poll() == [told(WEB), Synced()]
    folder.write("c.yaml", WEB_ELSEWHERE)
    assert folder.poll() == []
    assert folder.notices == [repeated("c.yaml", used="b.yaml", folder=folder)]
    folder.write("a.yaml", WEB_ELSEWHERE)
    assert folder.poll() == [told(WEB_ELSEWHERE)]
    assert folder.notices == [repeated("b.yaml", used="a.yaml", folder=folder)]
    (folder.path / "a.yaml").unlink()
    assert folder.poll() == [told(WEB)]
    (folder.path / "b.yaml").unlink()
    assert folder.poll() == [told(WEB_ELSEWHERE)]
    (folder.path / "c.yaml").unlink()
    assert folder.poll() == [Deleted(service_key())]


def test_a_repeated_object_is_told_of_once(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    folder.write("b.yaml", WEB, WEB_ELSEWHERE)
    folder.poll()
    assert folder.notices == [
        repeated("b.yaml", used="b.yaml", folder=folder),
        repeated("b.yaml", used="a.yaml", folder=folder),
    ]
    folder.write("b.yaml", WEB, WEB_ELSEWHERE, OTHER)
    assert folder.poll() == [told(OTHER)]
    assert folder.notices == []


def test_an_excluded_object_in_the_first_file_hides_the_second(folder: Watched) -> None:
    folder.write("a.yaml", service_object(annotations={"ebpflb.io/exclude": "true"}))
    folder.write("b.yaml", WEB)
    assert folder.poll() == [Synced()]
    (folder.path / "a.yaml").unlink()
    assert folder.poll() == [told(WEB)]


def repeated(name: str, *, used: str, folder: Watched) -> dict[str, object]:
    return {
        "event": "manifest_object_repeated",
        "object": "Service default/web",
        "file": str(folder.path / name),
        "used": str(folder.path / used),
    }


def test_kinds_that_are_not_read_are_told_of_once_a_file(folder: Watched) -> None:
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}
    folder.write("a.yaml", config, config, WEB)
    assert folder.poll() == [told(WEB), Synced()]
    notice = {
        "event": "manifest_kind_ignored",
        "file": str(folder.path / "a.yaml"),
        "kind": "v1 ConfigMap",
    }
    assert folder.notices == [notice]
    folder.write("a.yaml", config, WEB)
    folder.poll()
    assert folder.notices == []


# --- the folder itself ---------------------------------------------------------------------------


def test_a_folder_that_vanishes_keeps_all_it_had_and_says_so_once(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    folder.poll()
    away = folder.path.with_name("away")
    folder.path.rename(away)
    for notices in (["manifest_folder_lost"], []):
        assert folder.poll() == []
        assert [notice["event"] for notice in folder.notices] == notices
    away.rename(folder.path)
    folder.write("a.yaml", WEB_ELSEWHERE)
    assert folder.poll() == [told(WEB_ELSEWHERE)]
    assert [notice["event"] for notice in folder.notices] == ["manifest_folder_back"]


def test_ten_thousand_objects_in_one_file_are_told_again_only_where_they_differ(
    folder: Watched,
) -> None:
    objects = [service_object(f"web-{n}", cluster_ips=[cluster_ip(n + 1)]) for n in range(10_000)]
    folder.write("a.json", *objects)
    assert len(folder.poll()) == 10_001
    objects[5_000] = service_object("web-5000", cluster_ips=[cluster_ip(20_000)])
    folder.write("a.json", *objects)
    assert folder.poll() == [told(objects[5_000])]


def test_a_look_that_is_stopped_tells_nothing(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    source = ManifestSource(folder.path, folder.events.append, folder._note)
    source.stop()
    source.poll()
    assert folder.events == []


# --- the thread ----------------------------------------------------------------------------------


def test_the_thread_tells_changes_until_it_is_stopped(folder: Watched) -> None:
    folder.write("a.yaml", WEB)
    seen, arrived = [], threading.Condition()

    def emit(event: Event) -> None:
        with arrived:
            seen.append(event)
            arrived.notify()

    def wait_for(event: Event) -> None:
        with arrived:
            assert arrived.wait_for(lambda: event in seen, timeout=30)

    source = ManifestSource(folder.path, emit, folder._note)
    source.start()
    wait_for(Synced())
    assert source.alive()
    folder.write("a.yaml", WEB_ELSEWHERE)
    wait_for(told(WEB_ELSEWHERE))
    source.stop()
    assert not source.alive()
    assert [event for event in seen if isinstance(event, Upserted)] == [
        told(WEB),
        told(WEB_ELSEWHERE),
    ]
