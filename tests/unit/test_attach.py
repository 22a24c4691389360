# SPDX-License-Identifier: Apache-2.0
"""What lies in the way of links, and whose maps their programs use; the kernel is played."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from ebpflb.datapath.ebpf import attach, inspect, libbpf
from ebpflb.datapath.ebpf.attach import HOOKS, Attached, Attachment
from ebpflb.datapath.ebpf.maps import LINKS
from ebpflb.errors import DatapathError


class Bed:
    """A pin folder and a cgroup; no link can be opened, each that is made can be pinned."""

    def __init__(self, folder: Path) -> None:
        self.pins = folder / "pins"
        self.cgroup = folder / "cgroup"
        for path in (self.pins, self.cgroup):
            path.mkdir()
        self.attachment = Attachment(self.pins, self.cgroup)

    def ensure(self) -> int:
        return self.attachment.ensure({"connect4": 0})


def obj_get(path: str) -> int:
    """As the kernel answers where no pin lies."""
    where = Path(path)
    if where.is_dir():
        code = errno.EACCES
    else:
        code = errno.ENOENT if where.parent.is_dir() else errno.ENOTDIR
    raise libbpf._error("open pin", path, code)


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bed:
    monkeypatch.setattr(libbpf, "obj_get", obj_get)
    monkeypatch.setattr(libbpf, "link_create", lambda *_: os.open(os.devnull, os.O_RDONLY))
    monkeypatch.setattr(libbpf, "obj_pin", lambda _fd, path: Path(path).touch())
    return Bed(tmp_path)


def test_links_are_made(bed: Bed) -> None:
    assert bed.ensure() == 1
    assert (bed.pins / LINKS / "connect4").exists()


def test_a_cgroup_that_went_meanwhile_is_named(bed: Bed) -> None:
    bed.cgroup.rmdir()
    with pytest.raises(DatapathError) as raised:
        bed.ensure()
    assert str(raised.value) == (
        f"open {bed.cgroup}: No such file or directory (ENOENT): "
        "make it again, or restart the agent with another --cgroup"
    )
    assert not raised.value.fatal


def test_a_pin_folder_that_went_meanwhile_is_named(bed: Bed) -> None:
    bed.pins.rmdir()
    with pytest.raises(DatapathError, match=rf"^create {bed.pins / LINKS}: .+ restart the agent$"):
        bed.ensure()


def test_a_file_in_place_of_the_links_folder_is_named_with_its_remedy(bed: Bed) -> None:
    links = bed.pins / LINKS
    links.touch()
    assert {one.problem for one in bed.attachment.look()} == {"not attached"}
    with pytest.raises(DatapathError) as raised:
        bed.ensure()
    assert str(raised.value) == (
        f"create {links}: File exists (EEXIST): it is not ours: remove it (rm {links}) "
        "or choose another --pin-path"
    )


def test_a_folder_in_place_of_a_link_is_named_with_its_remedy(bed: Bed) -> None:
    path = bed.pins / LINKS / "connect4"
    path.mkdir(parents=True)
    problems = {one.hook: one.problem for one in bed.attachment.look()}
    assert problems["connect4"] == "the pin is a folder"
    with pytest.raises(DatapathError) as raised:
        bed.ensure()
    assert str(raised.value) == (
        f"replace {path}: Is a directory (EISDIR): it is not ours: remove it (rmdir {path}) "
        "or choose another --pin-path"
    )
    assert not raised.value.fatal


def test_a_link_that_may_not_be_opened_needs_root(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(path: str) -> int:
        raise libbpf._error("open pin", path, errno.EACCES)

    monkeypatch.setattr(libbpf, "obj_get", forbidden)
    with pytest.raises(DatapathError, match="needs root"):
        bed.attachment.look()


@pytest.mark.parametrize(
    ("uses", "ours", "actual"),
    [
        ({1, 2}, {1, 2, 3}, None),
        ({1, 2}, (), None),
        ({1, 9}, {1, 2, 3}, "program 5 uses others"),
        ((), {1, 2, 3}, "program 5 uses none"),
    ],
    ids=["ours", "not asked", "one of another", "none: it is no program of ours"],
)
def test_whose_maps_a_program_uses(
    bed: Bed,
    monkeypatch: pytest.MonkeyPatch,
    uses: set[int],
    ours: set[int],
    actual: str | None,
) -> None:
    looked = [Attached("connect4", 5, "connect4", frozenset(uses), "")]
    monkeypatch.setattr(bed.attachment, "look", lambda: looked)
    found = bed.attachment.differences(frozenset(ours))
    assert [(one.where, one.what, one.actual) for one in found] == (
        [("hook connect4", "maps", actual)] if actual else []
    )


def test_what_is_not_attached_is_told_once(bed: Bed) -> None:
    found = bed.attachment.differences(frozenset({1}))
    assert [(one.what, one.actual) for one in found] == [("program", "not attached")] * len(HOOKS)


# --- the hooks that are attached only where that is asked for ------------------------------------


@pytest.mark.parametrize(
    ("asked", "pinned", "shown", "found"),
    [
        (True, False, True, ("attached", "not attached")),
        (True, True, True, None),
        (False, False, False, None),
        (False, True, True, ("", "attached")),
        (None, False, False, None),
        (None, True, True, None),
    ],
    ids=[
        "asked for and missing",
        "asked for and there",
        "neither",
        "there though nobody asks for it",
        "a command that finds none",
        "a command that finds it",
    ],
)
def test_what_is_right_of_an_optional_hook(
    bed: Bed,
    monkeypatch: pytest.MonkeyPatch,
    found: tuple[str, str] | None,
    *,
    asked: bool | None,
    pinned: bool,
    shown: bool,
) -> None:
    attachment = Attachment(bed.pins, bed.cgroup, bind=asked)
    links = bed.pins / LINKS
    links.mkdir()
    if pinned:
        (links / "bind4").touch()
    problem = "" if pinned else "not attached"
    monkeypatch.setattr(
        attachment, "_look", lambda hook: Attached(hook.name, 5, "", frozenset(), problem)
    )
    assert ("bind4" in {one.hook for one in attachment.look()}) is shown
    differences = [
        (one.expected, one.actual) for one in attachment.differences() if one.where == "hook bind4"
    ]
    assert differences == ([found] if found else [])


def test_what_is_no_longer_asked_for_is_detached(bed: Bed) -> None:
    links = bed.pins / LINKS
    links.mkdir()
    for name in ("bind4", "bind6", "connect6"):
        (links / name).touch()
    attachment = Attachment(bed.pins, bed.cgroup, bind=False)
    assert attachment.ensure({"connect4": 0}) == 3
    assert {path.name for path in links.iterdir()} == {"connect4", "connect6"}
    assert Attachment(bed.pins, bed.cgroup).ensure({}) == 0


def test_what_lies_there_instead_of_a_link_to_be_detached_is_named(bed: Bed) -> None:
    path = bed.pins / LINKS / "bind6"
    path.mkdir(parents=True)
    with pytest.raises(DatapathError) as raised:
        Attachment(bed.pins, bed.cgroup, bind=False).ensure({})
    assert str(raised.value).startswith(f"remove {path}: Is a directory (EISDIR): it is not ours")


def test_a_cgroup_that_may_not_be_looked_into_needs_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_: Path) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", forbidden)
    with pytest.raises(DatapathError, match=f"^use {tmp_path}: .+ needs root"):
        attach.require_cgroup2(tmp_path)


def test_a_folder_is_not_the_kernels_own_root_and_a_missing_one_is_another_matter(
    tmp_path: Path,
) -> None:
    assert not attach.is_root_of_all(tmp_path)
    assert attach.is_root_of_all(tmp_path / "nowhere")


# --- the holder of the lock ----------------------------------------------------------------------


def test_to_look_for_the_holder_takes_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleanup at that very moment would be refused."""

    def never(*_: object) -> None:
        pytest.fail("a lock was tried")

    monkeypatch.setattr("fcntl.flock", never)
    assert inspect.holder(tmp_path) is None


def test_a_folder_that_went_meanwhile_has_no_holder(tmp_path: Path) -> None:
    assert inspect.holder(tmp_path / "nowhere") is None
