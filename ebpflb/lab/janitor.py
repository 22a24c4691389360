# SPDX-License-Identifier: Apache-2.0
"""Takes a lab down by name: at its end, after its owner died, and before the next lab starts.

Everything a lab makes on the machine bears its tag (owner's pid and a count), so that it can be
found and removed with no memory of how it was made. Started as a program it holds a pipe whose
other end its owner has; when the owner closes it, or dies however suddenly, it takes the lab down.
It must know nothing of topologies, must touch nothing that bears no tag, and imports nothing
outside the standard library, so that it is ready at once.
"""

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

__all__ = [
    "bpffs_mounts",
    "cgroup2_root",
    "end_processes",
    "folder_name",
    "leftovers",
    "netns_prefix",
    "remove_cgroup",
    "remove_netns",
    "sweep",
    "teardown",
    "write_owner",
]

NETNS_FOLDER: Final = Path("/run/netns")
DEADLINE_S: Final = 20.0

_NETNS = re.compile(r"eblb(\d+-\d+)-")
_FOLDER = re.compile(r"ebpflb-lab-(\d+-\d+)$")


# --- names ------------------------------------------------------------------------------------


def netns_prefix(tag: str) -> str:
    """Return how the names of a lab's network namespaces begin."""
    return f"eblb{tag}-"


def folder_name(tag: str) -> str:
    """Return the name of a lab's folder, under cgroup v2, bpffs and the temporary folder alike."""
    return f"ebpflb-lab-{tag}"


def _mounts(kind: str) -> list[Path]:
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return [Path(fields[1]) for fields in lines if fields[2] == kind]


def cgroup2_root() -> Path | None:
    """Return where cgroup v2 is mounted, or None."""
    return next(iter(_mounts("cgroup2")), None)


def bpffs_mounts() -> list[Path]:
    """Return where bpffs is mounted, /sys/fs/bpf first if it is one of them."""
    return sorted(set(_mounts("bpf")), key=lambda path: (path != Path("/sys/fs/bpf"), path))


def _parents() -> list[Path]:
    cgroup = cgroup2_root()
    return [
        *([cgroup] if cgroup else []),
        *bpffs_mounts(),
        Path(tempfile.gettempdir()),
    ]


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 - names are what is asked for
    except OSError:
        return []


def leftovers(tag: str | None = None) -> list[str]:
    """Return the paths of all that exists of one lab, or of any lab."""
    found = [NETNS_FOLDER / name for name in _names(NETNS_FOLDER) if _belongs(_NETNS, name, tag)]
    for parent in _parents():
        found += [parent / name for name in _names(parent) if _belongs(_FOLDER, name, tag)]
    return sorted(map(str, found))


def _belongs(pattern: re.Pattern[str], name: str, tag: str | None) -> bool:
    match = pattern.match(name)
    return match is not None and (tag is None or match[1] == tag)


# --- removal ----------------------------------------------------------------------------------


def _until(condition: Callable[[], bool], deadline: float) -> bool:
    """Ask until the condition holds; False when the deadline (monotonic seconds) passed."""
    pause = 0.0005
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.02)
    return True


def _populated(cgroup: Path) -> bool:
    try:
        return "populated 1" in (cgroup / "cgroup.events").read_text()
    except OSError:
        return False


def _kill(cgroup: Path) -> None:
    try:
        (cgroup / "cgroup.kill").write_text("1")
    except (FileNotFoundError, PermissionError):  # nobody may make a file in a cgroup
        _kill_each(cgroup)


def _kill_each(cgroup: Path) -> None:
    """End processes one by one, before Linux 5.14. Who forks meanwhile is met at the next look."""
    for procs in cgroup.rglob("cgroup.procs"):
        with contextlib.suppress(OSError):
            for pid in procs.read_text().split():
                os.kill(int(pid), signal.SIGKILL)


def end_processes(cgroup: Path, *, deadline_s: float = DEADLINE_S) -> bool:
    """End with SIGKILL all that lives in a cgroup and below; False if something would not die."""

    def gone() -> bool:
        if _populated(cgroup):
            with contextlib.suppress(OSError):
                _kill(cgroup)
        return not _populated(cgroup)

    return _until(gone, time.monotonic() + deadline_s)


def remove_cgroup(cgroup: Path, *, deadline_s: float = DEADLINE_S) -> None:
    """End what lives in a cgroup and remove it with all below it; nothing if it is not there."""

    def gone() -> bool:
        for folder, _, _ in os.walk(cgroup, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # noqa: PTH106 - os.walk gives text
        return not cgroup.exists()

    if cgroup.exists():
        end_processes(cgroup, deadline_s=deadline_s)
        _until(gone, time.monotonic() + deadline_s)


def remove_netns(*names: str) -> None:
    """Take the names of network namespaces away; each ends with the last that uses it."""
    paths = [NETNS_FOLDER / name for name in names]
    present = [str(path) for path in paths if path.exists()]
    if present:
        # Lazily: whoever still looks at it must not keep the lab from going.
        subprocess.run(["umount", "-l", "-q", *present], check=False, stderr=subprocess.DEVNULL)
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


def _remove_pins(folder: Path) -> None:
    # On bpffs a link or a map goes by unlink alone; shutil would try to open what it finds.
    for parent, _, names in os.walk(folder, topdown=False):
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(parent, name))  # noqa: PTH108, PTH118 - os.walk gives text
        for name in _names(Path(parent)):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(parent, name))  # noqa: PTH108, PTH118 - symbolic links
        with contextlib.suppress(OSError):
            os.rmdir(parent)  # noqa: PTH106


def _remove_once(tag: str, deadline_s: float) -> None:
    cgroup = cgroup2_root()
    folder = folder_name(tag)
    # Processes first: all else is held by them.
    if cgroup:
        end_processes(cgroup / folder, deadline_s=deadline_s)
    remove_netns(*(name for name in _names(NETNS_FOLDER) if _belongs(_NETNS, name, tag)))
    for bpffs in bpffs_mounts():
        _remove_pins(bpffs / folder)
    if cgroup:
        remove_cgroup(cgroup / folder, deadline_s=deadline_s)
    shutil.rmtree(Path(tempfile.gettempdir()) / folder, ignore_errors=True)


def teardown(tag: str, *, deadline_s: float = DEADLINE_S) -> list[str]:
    """Remove all that bears a lab's tag; return what would not go. Idempotent."""

    def gone() -> bool:
        _remove_once(tag, deadline_s)
        return not leftovers(tag)

    _until(gone, time.monotonic() + deadline_s)
    return leftovers(tag)


# --- owners that died -------------------------------------------------------------------------


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the command's name, or None."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _start_time(pid: int) -> str:
    fields = _stat(pid)
    return fields[19] if fields else ""


def write_owner(tag: str, pid: int) -> Path:
    """Make a lab's temporary folder and note its owner there; return the folder."""
    folder = Path(tempfile.gettempdir()) / folder_name(tag)
    folder.mkdir(mode=0o700)
    (folder / "owner").write_text(_start_time(pid))
    return folder


def _owner_lives(tag: str) -> bool:
    pid = int(tag.partition("-")[0])
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return False
    try:
        noted = (Path(tempfile.gettempdir()) / folder_name(tag) / "owner").read_text()
    except OSError:
        return True
    # Another process may have got the dead owner's number.
    return not noted or noted == fields[19]


def _tags() -> Iterator[str]:
    for path in leftovers():
        match = _NETNS.match(Path(path).name) or _FOLDER.match(Path(path).name)
        if match:
            yield match[1]


def sweep() -> list[str]:
    """Take down every lab whose owner is dead; return what would not go."""
    dead = [tag for tag in sorted(set(_tags())) if not _owner_lives(tag)]
    return [path for tag in dead for path in teardown(tag)]


# --- the program ------------------------------------------------------------------------------


def _wait_for_owner(pid: int) -> None:
    """Return when standard input's other end is closed, or the process is gone.

    The pipe alone would do if no child of the owner could ever hold its end: a fork without an
    exec does.
    """
    poll = select.poll()
    poll.register(0, select.POLLIN)
    try:
        poll.register(os.pidfd_open(pid), select.POLLIN)
    except ProcessLookupError:
        return
    except OSError:
        pass  # before Linux 5.3 the pipe must do
    poll.poll()


def main() -> int:
    """Wait for the lab's end and take it down: `janitor.py TAG`."""
    tag = sys.argv[1]
    # A terminal's or a supervisor's signals mean the owner; its end is what we wait for.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    _wait_for_owner(int(tag.partition("-")[0]))
    left = teardown(tag)
    for path in left:
        sys.stderr.write(f"lab {tag}: {path} could not be removed\n")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
