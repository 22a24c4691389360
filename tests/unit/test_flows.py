# SPDX-License-Identifier: Apache-2.0
"""What an entry of the flow tables says: its other half, and when a flow is over."""

from __future__ import annotations

from typing import Any

import pytest

from ebpflb.datapath.ebpf import abi, flows
from ebpflb.datapath.ebpf.flows import ANSWERED, FLOW, FLOW_KEY, NEW, Reason, Times
from ebpflb.model import Protocol
from tests.flows import BACKEND, CLIENT, FRONTEND, NOW_NS, Made, end, made, only

C = abi.CONSTANTS
TCP, UDP, SCTP = Protocol.TCP, Protocol.UDP, Protocol.SCTP
FIN, RST = C["FLOW_SEEN_FIN"], C["FLOW_SEEN_RST"]
HOUR, DAY = 3_600, 86_400
TIMES = Times(*(seconds * 10**9 for seconds in (30, 120, DAY, HOUR)))


def why(flow: Made, table: str) -> Reason | None:
    """Of the flow, asked by either half: both must say the same."""
    halves = flow.halves
    assert halves
    found = {
        flows.why_over(
            flow.protocol,
            table,
            half,
            next((other for other in halves if other is not half), None),
            now_ns=NOW_NS,
            times=TIMES,
        )
        for half in halves
    }
    assert len(found) == 1, found
    return found.pop()


@pytest.mark.parametrize(
    ("protocol", "table", "options", "after_s", "reason"),
    [
        pytest.param(
            TCP, ANSWERED, {}, DAY, Reason.IDLE, id="an open connection lives for a day (CT-21)"
        ),
        pytest.param(
            TCP,
            ANSWERED,
            {"seen": (FIN, 0)},
            HOUR,
            Reason.HALF_CLOSED,
            id="one that the client has closed for an hour (CT-21)",
        ),
        pytest.param(
            TCP,
            ANSWERED,
            {"seen": (0, FIN)},
            HOUR,
            Reason.HALF_CLOSED,
            id="one that the backend has closed likewise",
        ),
        pytest.param(
            TCP,
            ANSWERED,
            {"seen": (FIN, FIN)},
            120,
            Reason.CLOSED,
            id="one that both have closed for two minutes",
        ),
        pytest.param(
            TCP,
            ANSWERED,
            {"seen": (RST, 0)},
            10,
            Reason.RESET,
            id="one that the client has reset for ten seconds",
        ),
        pytest.param(
            TCP,
            ANSWERED,
            {"seen": (FIN, FIN | RST)},
            10,
            Reason.RESET,
            id="a reset counts more than what came before",
        ),
        pytest.param(
            TCP, NEW, {"answered": False}, 120, Reason.UNANSWERED, id="a SYN waits for two minutes"
        ),
        pytest.param(
            TCP, NEW, {}, 120, Reason.IDLE, id="so does what was answered and not taken up"
        ),
        pytest.param(
            TCP,
            NEW,
            {"seen": (0, RST)},
            10,
            Reason.RESET,
            id="a SYN that was answered by a reset goes soon",
        ),
        pytest.param(
            UDP, NEW, {"answered": False}, 30, Reason.UNANSWERED, id="a question waits for 30 s"
        ),
        pytest.param(UDP, NEW, {}, 120, Reason.IDLE, id="an answered one is kept for two minutes"),
        pytest.param(UDP, ANSWERED, {}, 120, Reason.IDLE, id="and so is a conversation"),
        pytest.param(SCTP, ANSWERED, {}, 210, Reason.IDLE, id="SCTP is kept for 210 s"),
        pytest.param(
            SCTP, NEW, {"answered": False}, 210, Reason.UNANSWERED, id="an INIT of SCTP as well"
        ),
    ],
)
def test_a_flow_is_over_after_its_time(
    protocol: Protocol, table: str, options: dict[str, Any], after_s: int, reason: Reason
) -> None:
    def of(idle: tuple[float, float]) -> Reason | None:
        return why(made(protocol, idle=idle, **options), table)

    assert of((after_s - 1, after_s - 1)) is None
    assert of((after_s, after_s)) is reason
    assert of((after_s + 10 * DAY, after_s)) is reason
    assert of((0, 10 * DAY)) is None, "the client still talks"
    assert of((10 * DAY, 0)) is None, "the backend still talks"


@pytest.mark.parametrize(
    ("protocol", "table", "seen", "after_s", "reason"),
    [
        pytest.param(TCP, ANSWERED, 0, DAY, Reason.ALONE, id="it may still be needed for a day"),
        pytest.param(TCP, ANSWERED, FIN, HOUR, Reason.HALF_CLOSED, id="an hour if it has finished"),
        pytest.param(TCP, NEW, 0, 120, Reason.ALONE, id="two minutes where it is new"),
        pytest.param(UDP, ANSWERED, 0, 120, Reason.ALONE, id="as a conversation of UDP"),
    ],
)
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_a_half_whose_other_one_was_pushed_out_is_judged_by_itself(
    kind: str, protocol: Protocol, table: str, *, seen: int, after_s: int, reason: Reason
) -> None:
    def of(idle_s: int) -> Reason | None:
        flow = made(protocol, idle=(idle_s, idle_s), seen=(seen, seen))
        return why(only(flow, kind), table)

    assert of(after_s - 1) is None
    assert of(after_s) is reason


@pytest.mark.parametrize(("table", "after_s"), [(NEW, 30), (ANSWERED, 120)])
def test_what_is_foreign_goes_when_netfilter_forgets_it(table: str, after_s: int) -> None:
    def of(idle_s: int) -> Reason | None:
        return why(made(UDP, foreign=True, idle=(idle_s, 0)), table)

    assert of(after_s - 1) is None
    assert of(after_s) is Reason.FOREIGN


@pytest.mark.parametrize("table", [NEW, ANSWERED])
@pytest.mark.parametrize("protocol", [TCP, UDP, SCTP, 47])
@pytest.mark.parametrize("answered", [False, True])
def test_of_every_flow_that_is_over_one_half_is_worth_a_look(
    protocol: int, table: str, answered: bool
) -> None:
    for seen in ((a, b) for a in range(4) for b in range(4)):
        for idle_s in (9, 10, 29, 30, 119, 120, 209, 210, HOUR - 1, HOUR, DAY - 1, DAY):
            flow = made(protocol, idle=(idle_s, idle_s), seen=seen, answered=answered)
            if why(flow, table) is None:
                continue
            assert any(
                idle_s * 10**9 >= flows.shortest_ns(protocol, table, half.seen, TIMES)
                for half in flow.halves
            ), (seen, idle_s)


def test_what_nobody_has_set_is_as_netfilter_has_it() -> None:
    assert Times.read(bytes(flows.SETTINGS.size)) == TIMES
    settings = flows.SETTINGS.make(
        udp_timeout_ns=1, udp_stream_timeout_ns=2, tcp_timeout_ns=3, tcp_closing_ns=4
    )
    assert Times.read(settings)[:4] == (1, 2, 3, 4)


def test_a_half_leads_to_the_other() -> None:
    flow = made(TCP, port_at_backend=1234)
    (forward_key, forward), (reverse_key, reverse) = flow.items
    ends, back = FLOW_KEY.unpack(forward_key), FLOW_KEY.unpack(reverse_key)
    assert (end(ends.source, ends.source_port), end(ends.target, ends.target_port)) == (
        CLIENT,
        FRONTEND,
    )
    assert (end(back.source, back.source_port), end(back.target, back.target_port)) == (
        BACKEND,
        (CLIENT[0], 1234),
    )
    there, here = FLOW.unpack(forward), FLOW.unpack(reverse)
    assert flows.other_key(ends, there) == reverse_key
    assert flows.other_key(back, here) == forward_key
    assert flows.is_other(ends, there, here)
    assert flows.is_other(back, here, there)


def test_what_lies_where_the_other_half_should_may_be_another_flows() -> None:
    flow, other = made(TCP), made(TCP, frontend=("10.96.0.99", 80), port_at_backend=CLIENT[1])
    (forward_key, forward), (reverse_key, _) = flow.items
    (_, _), (other_key, other_reverse) = other.items
    assert reverse_key == other_key, "both are one flow to the backend"
    assert not flows.is_other(
        FLOW_KEY.unpack(forward_key), FLOW.unpack(forward), FLOW.unpack(other_reverse)
    )
