# SPDX-License-Identifier: Apache-2.0
"""What an entry of the flow tables says, as ``bpf/flow.h`` has it: which half it is, which is its
other one, for how long the flow may be silent. Pure.

A flow has two halves, each under the addresses and ports that a packet of that way has before it is
translated. This file must not know who reads the tables, nor what becomes of a flow that is over.
"""

from __future__ import annotations

import enum
import re
import struct
from typing import Any, Final, NamedTuple, Self

from ebpflb.datapath.ebpf import abi
from ebpflb.model import Protocol

FLOW_KEY: Final = abi.LAYOUTS["flow_key"]
FLOW: Final = abi.LAYOUTS["flow"]
SETTINGS: Final = abi.LAYOUTS["settings"]

FORWARD: Final = abi.CONSTANTS["FLOW_FORWARD"]
REVERSE: Final = abi.CONSTANTS["FLOW_REVERSE"]
FOREIGN: Final = abi.CONSTANTS["FLOW_FOREIGN"]
SEEN_FIN: Final = abi.CONSTANTS["FLOW_SEEN_FIN"]
SEEN_RST: Final = abi.CONSTANTS["FLOW_SEEN_RST"]

NEW: Final = "flows_new"
ANSWERED: Final = "conntrack"

_NS_PER_S: Final = 10**9
_HEADER: Final = {
    name: int(seconds) * _NS_PER_S
    for name, seconds in re.findall(
        r"^#define (\w+_NS) \((\d+) \* NSEC_PER_SEC\)$",
        abi.SOURCES.joinpath("flow.h").read_text(),
        re.MULTILINE,
    )
}
OPENING_NS: Final = _HEADER["OPENING_NS"]
TCP_CLOSED_NS: Final = _HEADER["TCP_CLOSED_NS"]
TCP_RESET_NS: Final = _HEADER["TCP_RESET_NS"]
SCTP_NS: Final = _HEADER["SCTP_NS"]


class Times(NamedTuple):
    """How long a flow may be silent, as far as that is a setting; ns."""

    udp: int
    udp_stream: int
    tcp: int
    tcp_closing: int
    tcp_closed: int = TCP_CLOSED_NS

    @classmethod
    def read(cls, settings: bytes) -> Self:
        """Those of the map's one entry; what nobody has written yet is as netfilter's default."""
        values: Any = SETTINGS.unpack(settings)
        return cls(
            udp=values.udp_timeout_ns or 30 * _NS_PER_S,
            udp_stream=values.udp_stream_timeout_ns or 120 * _NS_PER_S,
            tcp=values.tcp_timeout_ns or 86_400 * _NS_PER_S,
            tcp_closing=values.tcp_closing_ns or 3_600 * _NS_PER_S,
        )


class Reason(enum.Enum):
    """Why a flow is over; the value labels the metric."""

    UNANSWERED = "unanswered"
    IDLE = "idle"
    HALF_CLOSED = "half_closed"
    CLOSED = "closed"
    RESET = "reset"
    FOREIGN = "foreign"
    ALONE = "alone"  # the LRU took the other half, and no packet has put it back


# --- halves --------------------------------------------------------------------------------------

_CHECKED: Final = struct.Struct("=8I2HB3x")
_MASK: Final = (1 << 64) - 1


def check(key: bytes) -> int:
    """flow_check() of the key: what both checks of its value must be."""
    s0, s1, s2, s3, t0, t1, t2, t3, source_port, target_port, protocol = _CHECKED.unpack(key)
    mix = (s0 << 32 | s1) * 0x9E3779B97F4A7C15
    mix ^= (s2 << 32 | s3) * 0xC2B2AE3D27D4EB4F
    mix ^= (t0 << 32 | t1) * 0x165667B19E3779F9
    mix ^= (t2 << 32 | t3) * 0xD6E8FEB86659FD93
    mix ^= (protocol << 32 | source_port << 16 | target_port) * 0xA0761D6478BD642F
    return int((mix & _MASK) >> 32 | 1)


def other_key(key: Any, half: Any) -> bytes:
    """The key of the half that is not this one. Both are unpacked; not for foreign ones."""
    if half.kind == FORWARD:
        ends = half.address, key.source, half.port, half.client_port
    else:
        ends = key.target, half.address, half.client_port, half.port
    return FLOW_KEY.pack(*ends, key.protocol)


def is_other(key: Any, half: Any, other: Any) -> bool:
    """Whether what lies under ``other_key(key, half)`` is of this very flow."""
    if half.kind == FORWARD:
        expected = REVERSE, key.target, key.target_port, key.source_port
    else:
        expected = FORWARD, key.source, key.source_port, key.target_port
    return bool(expected == (other.kind, other.address, other.port, other.client_port))


# --- how long it lives ---------------------------------------------------------------------------


def is_answered(table: str, half: Any, other: Any | None) -> bool:
    """Whether a packet has come back to who began the flow."""
    reverse = half if half.kind == REVERSE else other
    return table == ANSWERED or bool(reverse and reverse.used_ns != reverse.created_ns)


def is_closed(half: Any, other: Any | None) -> bool:
    """Whether both ends have finished, or one has reset."""
    seen = other.seen if other else 0
    return bool((half.seen | seen) & SEEN_RST or half.seen & seen & SEEN_FIN)


def idle_ns(half: Any, other: Any | None, now_ns: int) -> int:
    """Since the last packet of either way, in steps of 250 ms."""
    used_ns = max(half.used_ns, other.used_ns) if other else half.used_ns
    return int(max(0, now_ns - used_ns))


def lifetime(
    protocol: int, table: str, half: Any, other: Any | None, times: Times
) -> tuple[int, Reason]:
    """For how long the flow may be silent, in ns, and what it is then."""
    answered = is_answered(table, half, other)
    silent = Reason.IDLE if answered else Reason.UNANSWERED
    if half.kind == FOREIGN:
        silent = Reason.FOREIGN
    elif other is None:
        silent = Reason.ALONE
    if protocol == Protocol.UDP:
        return times.udp_stream if answered else times.udp, silent
    if protocol == Protocol.SCTP:
        return SCTP_NS, silent
    return _tcp_lifetime(table, half.seen, other.seen if other else 0, times, silent)


def _tcp_lifetime(
    table: str, seen: int, other_seen: int, times: Times, silent: Reason
) -> tuple[int, Reason]:
    if (seen | other_seen) & SEEN_RST:
        return TCP_RESET_NS, Reason.RESET
    if seen & other_seen & SEEN_FIN:
        return times.tcp_closed, Reason.CLOSED
    if table != ANSWERED:
        return OPENING_NS, silent
    if (seen | other_seen) & SEEN_FIN:
        return times.tcp_closing, Reason.HALF_CLOSED
    return times.tcp, silent


def why_over(
    protocol: int, table: str, half: Any, other: Any | None, *, now_ns: int, times: Times
) -> Reason | None:
    """Why the flow of these halves is over; None while it is not.

    Both halves decide: the one that was used last, and what either end has said. ``now_ns`` is on
    the clock of bpf_ktime_get_ns(), CLOCK_MONOTONIC.
    """
    length_ns, reason = lifetime(protocol, table, half, other, times)
    return reason if idle_ns(half, other, now_ns) >= length_ns else None


def shortest_ns(protocol: int, table: str, seen: int, times: Times) -> int:
    """How long a half must have been silent for its flow to be worth a look.

    What the other half may add is that half's to say: of a flow that is over, one half says so.
    """
    if protocol == Protocol.UDP:
        return times.udp_stream if table == ANSWERED else min(times.udp, times.udp_stream)
    if protocol == Protocol.SCTP:
        return SCTP_NS
    if seen & SEEN_RST:
        return TCP_RESET_NS
    if seen & SEEN_FIN:
        return min(times.tcp_closed, times.tcp_closing)
    return OPENING_NS if table != ANSWERED else times.tcp
