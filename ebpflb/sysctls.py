# SPDX-License-Identifier: Apache-2.0
"""What the agent sets of the kernel at start: conntrack's sysctls (CT-20 to -24), its OOM score.

A knob is written only where it differs, so that an agent without the privilege runs after one that
had it (--init-only). This file must not know where the values come from.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from ebpflb.errors import DatapathError
from ebpflb.kubeproxy.schema import Conntrack
from ebpflb.logs import Log

_log = Log("sysctls")

_NETFILTER: Final = Path("/proc/sys/net/netfilter")
_HASHSIZE: Final = Path("/sys/module/nf_conntrack/parameters/hashsize")
_OOM_SCORE_ADJ: Final = Path("/proc/self/oom_score_adj")

MOST_BY_CORES: Final = 1 << 20
"""What the number of cores alone asks for at most, as in kube-proxy 1.37; ``min`` may ask more."""

_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def wanted(conntrack: Conntrack, cpus: int) -> Iterator[tuple[str, int]]:
    """The knobs and their values, in the order of writing; times are in whole seconds."""
    if conntrack.max_per_core > 0:
        by_cores = min(conntrack.max_per_core * cpus, MOST_BY_CORES)
        yield "nf_conntrack_max", max(by_cores, conntrack.min)
    for name, time in (
        ("nf_conntrack_tcp_timeout_established", conntrack.tcp_established_timeout),
        ("nf_conntrack_tcp_timeout_close_wait", conntrack.tcp_close_wait_timeout),
    ):
        if time.ns > 0:
            yield name, int(time.s)
    if conntrack.tcp_be_liberal:
        yield "nf_conntrack_tcp_be_liberal", 1
    for name, time in (
        ("nf_conntrack_udp_timeout", conntrack.udp_timeout),
        ("nf_conntrack_udp_timeout_stream", conntrack.udp_stream_timeout),
    ):
        if time.ns > 0:
            yield name, int(time.s)


def set_conntrack(
    conntrack: Conntrack,
    *,
    cpus: int = 0,
    netfilter: Path = _NETFILTER,
    hashsize: Path = _HASHSIZE,
) -> None:
    """Write what differs. Raises DatapathError naming the knob that cannot be written.

    Where conntrack is not loaded nothing is tracked, and nothing is set. What belongs to the
    initial network namespace is left alone in another one, with a warning.
    """
    if not (netfilter / "nf_conntrack_max").exists():
        _log.warning("conntrack is not loaded; its limits stay as they are")
        return
    for name, value in wanted(conntrack, cpus or os.cpu_count() or 1):
        path = netfilter / name
        if name != "nf_conntrack_max":
            _set(path, value)
        elif _read(path) != value and not path.stat().st_mode & 0o222:
            _log.warning("left alone: not in the initial network namespace", sysctl=name)
        else:
            _set(path, value)
            _set(hashsize, value // 4, at_least=True)


def _set(path: Path, value: int, *, at_least: bool = False) -> None:
    now = _read(path)
    if now == value or (at_least and now > value):
        return
    try:
        path.write_text(str(value))
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:  # hashsize, outside the initial network namespace
            _log.warning("left alone: not in the initial network namespace", parameter=path.name)
            return
        raise DatapathError(
            "set",
            f"{path.name} to {value}",
            error.errno or 0,
            hint="run --init-only with all privileges before, or leave conntrack alone with "
            "--conntrack-max-per-core 0 and time-outs of 0",
            fatal=error.errno in _FORBIDDEN,
        ) from None
    _log.info("set", sysctl=path.name, value=value, was=now)


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except OSError as error:
        forbidden = error.errno in _FORBIDDEN
        hint = "needs root" if forbidden else ""
        raise DatapathError(
            "read", path.name, error.errno or 0, hint=hint, fatal=forbidden
        ) from None
    except ValueError:
        raise DatapathError("read", path.name, hint="it holds no number") from None


def set_oom_score_adj(score: int, path: Path = _OOM_SCORE_ADJ) -> None:
    """How readily the kernel kills this process when memory ends (CT-29); or else a warning."""
    try:
        if int(path.read_text()) != score:
            path.write_text(str(score))
    except OSError as error:
        _log.warning("oom_score_adj stays as it is", wanted=score, reason=error.strerror)
