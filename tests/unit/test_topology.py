# SPDX-License-Identifier: Apache-2.0
"""Which endpoints take new connections: the two sets, their verdicts, and who drains.

Endpoints are written as ``0`` to ``3`` with ``L`` for local, ``ST`` for serving and terminating,
and the zones that they are hinted for behind ``@``. Unready endpoints do not reach ``select``: the
union leaves them out (TOP-13). Upstream's own vectors are in test_topology_vectors.py.
"""

from __future__ import annotations

import pytest

from ebpflb.model import NO_HINTS, Backend, Hints, Selection, Verdict
from ebpflb.planner.endpoints import Endpoints
from ebpflb.planner.topology import Choice, select
from tests.builders import NODE, backend, pod_ip

REJECT, DROP = Verdict.REJECT, Verdict.DROP


def endpoint(text: str) -> Backend:
    return backend(pod_ip(10 + int(text[0])), local="L" in text, terminating="ST" in text)


def choose(endpoints: str) -> Choice:
    texts = [text for text in endpoints.split(",") if text]
    hints = [Hints((text.partition("@")[2],)) if "@" in text else NO_HINTS for text in texts]
    column = tuple(hints) if "@" in endpoints else ()
    return select(Endpoints(tuple(map(endpoint, texts)), column), node=NODE, zone="a")


def shown(selection: Selection) -> str | Verdict:
    if selection.verdict is not Verdict.FORWARD:
        assert selection.backends == ()
        return selection.verdict
    assert selection.backends
    return numbers(selection.backends)


def numbers(backends: tuple[Backend, ...]) -> str:
    return ",".join(str(each.address[15] - 10) for each in backends)


@pytest.mark.parametrize(
    ("endpoints", "cluster", "local"),
    [
        pytest.param("", REJECT, REJECT, id="TOP-02 NOEP-01 -02 -03 -07 none anywhere"),
        pytest.param("0,1", "0,1", DROP, id="NOEP-04 NOEP-05 none here"),
        pytest.param("0L,1L", "0,1", "0,1", id="all here"),
        pytest.param("0L,1", "0,1", "0", id="TOP-04 one here"),
        pytest.param("0ST,1ST", "0,1", DROP, id="TOP-03 B-65 all terminating, none here"),
        pytest.param("0LST,1ST", "0,1", "0", id="TOP-04 B-65 all terminating, one here"),
        pytest.param("0,1ST", "0", DROP, id="TOP-15 ready keeps others out"),
        pytest.param("0,2LST,3ST", "0", "2", id="TOP-14 the local set alone falls back"),
        pytest.param("0L,1LST", "0", "0", id="TOP-15 in the local set too"),
        pytest.param("0@a,1@b", "0", DROP, id="TOP-08 hints"),
        pytest.param("0@b,1@bL", "0,1", "1", id="TOP-08 hints for nobody here"),
        pytest.param("0@bL,1@a", "1", "0", id="TOP-12 no hints for the local set"),
        pytest.param("0@bST,1@aST", "0,1", DROP, id="TOP-03 no hints for terminating ones"),
        pytest.param("0@a,1@b,2ST", "0", DROP, id="TOP-06 only ready ones are judged"),
    ],
)
def test_each_set_is_made_by_itself(
    endpoints: str, cluster: str | Verdict, local: str | Verdict
) -> None:
    choice = choose(endpoints)
    assert (shown(choice.cluster), shown(choice.local)) == (cluster, local)


@pytest.mark.parametrize(
    ("endpoints", "draining"),
    [
        pytest.param("", "", id="none where there is none"),
        pytest.param("0,1", "", id="none where all are in the cluster set"),
        pytest.param("0,1ST", "1", id="TOP-15 the terminating ones"),
        pytest.param("0ST,1ST", "", id="not while they are in the set"),
        pytest.param("0,1LST,2ST", "2", id="not one that the local set falls back to"),
        pytest.param("0@a,1@b", "1", id="CT-04 whom the hints keep away"),
        pytest.param("0@a,1@bL", "", id="CT-04 but not here"),
    ],
)
def test_usable_endpoints_in_neither_set_serve_open_connections(
    endpoints: str, draining: str
) -> None:
    assert numbers(choose(endpoints).draining) == draining


def test_the_order_is_kept() -> None:
    choice = choose("3,1,2ST,0ST,2L")
    assert (shown(choice.cluster), numbers(choice.draining)) == ("3,1,2", "2,0")
