"""What of the kernel's own knobs is set at start: CT-20 to CT-24, CT-29, CFG-30 to -34."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ebpflb import sysctls
from ebpflb.durations import Duration
from ebpflb.errors import DatapathError
from ebpflb.kubeproxy.schema import Conntrack
from tests.logs import capture_logs

ESTABLISHED = "nf_conntrack_tcp_timeout_established"
CLOSE_WAIT = "nf_conntrack_tcp_timeout_close_wait"
LIBERAL = "nf_conntrack_tcp_be_liberal"
UDP = "nf_conntrack_udp_timeout"
UDP_STREAM = "nf_conntrack_udp_timeout_stream"
NONE = Duration(0)
NOTHING = Conntrack(max_per_core=0, tcp_established_timeout=NONE, tcp_close_wait_timeout=NONE)


@pytest.mark.parametrize(
    ("conntrack", "cpus", "expected"),
    [
        (
            Conntrack(),
            2,
            {"nf_conntrack_max": 131072, ESTABLISHED: 86400, CLOSE_WAIT: 3600},
        ),
        (
            Conntrack(),
            8,
            {"nf_conntrack_max": 262144, ESTABLISHED: 86400, CLOSE_WAIT: 3600},
        ),
        (
            Conntrack(),
            1000,
            {"nf_conntrack_max": 1048576, ESTABLISHED: 86400, CLOSE_WAIT: 3600},
        ),
        (
            Conntrack(min=2000000),
            1000,
            {"nf_conntrack_max": 2000000, ESTABLISHED: 86400, CLOSE_WAIT: 3600},
        ),
        (NOTHING, 8, {}),
        (
            Conntrack(
                max_per_core=0,
                tcp_established_timeout=NONE,
                tcp_close_wait_timeout=NONE,
                tcp_be_liberal=True,
                udp_timeout=Duration.seconds(30),
                udp_stream_timeout=Duration.seconds(180.9),
            ),
            8,
            {LIBERAL: 1, UDP: 30, UDP_STREAM: 180},
        ),
    ],
    ids=[
        "CT-20: few cores ask for the least",
        "CT-20: many cores ask for more",
        "very many cores ask for a million",
        "unless somebody asks for more than that",
        "0 leaves each as it is",
        "CT-22, CT-23: only where asked for; whole seconds",
    ],
)
def test_what_is_wanted(conntrack: Conntrack, cpus: int, expected: dict[str, int]) -> None:
    assert dict(sysctls.wanted(conntrack, cpus)) == expected


class Kernel:
    """The knobs as files."""

    def __init__(self, folder: Path) -> None:
        self.netfilter = folder / "netfilter"
        self.netfilter.mkdir()
        self.hashsize = folder / "hashsize"
        self.hashsize.write_text("1024\n")
        for name, value in (
            ("nf_conntrack_max", 4096),
            (ESTABLISHED, 432000),
            (CLOSE_WAIT, 60),
            (LIBERAL, 0),
            (UDP, 30),
            (UDP_STREAM, 120),
        ):
            (self.netfilter / name).write_text(f"{value}\n")

    def set(self, conntrack: Conntrack) -> list[str]:
        """Set, and tell what the log said."""
        with capture_logs() as lines:
            sysctls.set_conntrack(
                conntrack, cpus=2, netfilter=self.netfilter, hashsize=self.hashsize
            )
        return [f"{line['event']} {line.get('sysctl', '')}".strip() for line in lines]

    def value(self, name: str) -> int:
        return int((self.netfilter / name).read_text())


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_the_defaults_are_set_and_the_hash_grows_with_the_limit(kernel: Kernel) -> None:
    assert kernel.set(Conntrack()) == [
        "set nf_conntrack_max",
        "set hashsize",
        f"set {ESTABLISHED}",
        f"set {CLOSE_WAIT}",
    ]
    assert kernel.value("nf_conntrack_max") == 131072
    assert kernel.hashsize.read_text() == "32768"
    assert (kernel.value(ESTABLISHED), kernel.value(CLOSE_WAIT)) == (86400, 3600)
    assert (kernel.value(LIBERAL), kernel.value(UDP)) == (0, 30)


def test_what_is_right_already_is_not_written_so_that_no_privilege_is_needed(
    kernel: Kernel,
) -> None:
    kernel.set(Conntrack())
    for path in (*kernel.netfilter.iterdir(), kernel.hashsize):
        path.chmod(0o444)
    assert kernel.set(Conntrack()) == []


def test_a_hash_that_is_larger_stays(kernel: Kernel) -> None:
    kernel.hashsize.write_text("65536")
    kernel.set(Conntrack())
    assert kernel.hashsize.read_text() == "65536"


def test_where_conntrack_is_not_loaded_nothing_is_set(kernel: Kernel) -> None:
    (kernel.netfilter / "nf_conntrack_max").unlink()
    assert kernel.set(Conntrack()) == ["conntrack is not loaded; its limits stay as they are"]
    assert kernel.value(ESTABLISHED) == 432000


def test_outside_the_initial_network_namespace_the_limit_is_a_warning(kernel: Kernel) -> None:
    (kernel.netfilter / "nf_conntrack_max").chmod(0o444)
    assert kernel.set(Conntrack()) == [
        "left alone: not in the initial network namespace nf_conntrack_max",
        f"set {ESTABLISHED}",
        f"set {CLOSE_WAIT}",
    ]
    assert (kernel.value("nf_conntrack_max"), kernel.hashsize.read_text()) == (4096, "1024\n")


def failing(number: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each writing to ``path`` fail."""
    write = Path.write_text

    def write_text(self: Path, text: str) -> int:
        if self == path:
            raise OSError(number, "refused")
        return write(self, text)

    monkeypatch.setattr(Path, "write_text", write_text)


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(errno.EROFS, 3), (errno.EACCES, 3), (errno.EINVAL, 1)],
    ids=["a read-only /proc/sys", "no privilege", "a value that the kernel refuses"],
)
def test_ct_24_what_cannot_be_written_ends_the_start_by_name(
    number: int, exit_code: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(number, kernel.netfilter / ESTABLISHED, monkeypatch)
    with pytest.raises(DatapathError) as error:
        kernel.set(Conntrack())
    assert error.value.exit_code == exit_code
    assert str(error.value).startswith(f"set {ESTABLISHED} to 86400: ")
    assert "--init-only" in str(error.value)


def test_the_hash_of_another_network_namespace_is_a_warning(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(errno.EOPNOTSUPP, kernel.hashsize, monkeypatch)
    assert "left alone: not in the initial network namespace" in kernel.set(Conntrack())


def test_a_knob_that_is_missing_is_named(kernel: Kernel) -> None:
    (kernel.netfilter / CLOSE_WAIT).unlink()
    with pytest.raises(DatapathError, match=f"^read {CLOSE_WAIT}: No such file"):
        kernel.set(Conntrack())


@pytest.mark.parametrize("score", [-999, 0, 1000])
def test_the_oom_score_is_set(score: int, tmp_path: Path) -> None:
    path = tmp_path / "oom_score_adj"
    path.write_text("0\n")
    sysctls.set_oom_score_adj(score, path)
    assert int(path.read_text()) == score


def test_an_oom_score_that_cannot_be_set_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "oom_score_adj"
    path.write_text("0\n")
    failing(errno.EACCES, path, monkeypatch)
    with capture_logs() as lines:
        sysctls.set_oom_score_adj(-999, path)
    assert lines == [
        {
            "event": "oom_score_adj stays as it is",
            "log_level": "warning",
            "wanted": -999,
            "reason": "refused",
        }
    ]
