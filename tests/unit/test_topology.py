# SPDX-License-Identifier: Apache-2.0
"""Which endpoints take new connections: upstream's vectors that need no hints, and the verdicts.

Endpoints are written as ``0`` to ``3`` with ``L`` for local, ``ST`` for serving and terminating.
Unready endpoints do not reach ``select``: the union leaves them out (TOP-13).
"""

from __future__ import annotations

import pytest

from ebpflb.model import Backend, Policy, Selection, Verdict
from ebpflb.planner.topology import Choice, select
from tests.builders import backend, pod_ip

CLUSTER, LOCAL = Policy.CLUSTER, Policy.LOCAL
REJECT, DROP = Verdict.REJECT, Verdict.DROP


def endpoint(text: str) -> Backend:
    return backend(pod_ip(10 + int(text[0])), local="L" in text, terminating="ST" in text)


def choose(endpoints: str, policies: tuple[Policy, Policy], *, outside: bool) -> Choice:
    return select(
        [endpoint(text) for text in endpoints.split(",") if text],
        internal_policy=policies[0],
        external_policy=policies[1],
        externally_accessible=outside,
    )


def shown(selection: Selection | None) -> str | Verdict | None:
    if selection is None:
        return None
    if selection.verdict is not Verdict.FORWARD:
        assert selection.backends == ()
        return selection.verdict
    assert selection.backends
    return numbers(selection.backends)


def numbers(backends: tuple[Backend, ...]) -> str:
    return ",".join(str(each.address[15] - 10) for each in backends)


@pytest.mark.parametrize(
    ("endpoints", "policies", "internal", "external"),
    [
        pytest.param("", (CLUSTER, CLUSTER), REJECT, REJECT, id="TOP-02 NOEP-01 -02 -03 none"),
        pytest.param("", (LOCAL, LOCAL), REJECT, REJECT, id="TV-T21 NOEP-07 none"),
        pytest.param("0,1", (LOCAL, CLUSTER), DROP, "0,1", id="TV-T22 NOEP-04 B-69 iTP, none here"),
        pytest.param("0L,1L", (LOCAL, CLUSTER), "0,1", "0,1", id="TV-T23 all here"),
        pytest.param("0L,1", (LOCAL, CLUSTER), "0", "0,1", id="TV-T24 TV-T28 POL-07 one here"),
        pytest.param("1", (CLUSTER, CLUSTER), "1", "1", id="TV-T26 one ready"),
        pytest.param("0ST,1ST", (CLUSTER, CLUSTER), "0,1", "0,1", id="TV-T27 B-65 all terminating"),
        pytest.param("0L,1", (CLUSTER, LOCAL), "0,1", "0", id="TV-T29 POL-07 eTP Local"),
        pytest.param("0L,1", (LOCAL, LOCAL), "0", "0", id="TV-T30 both Local"),
        pytest.param("0,1", (LOCAL, LOCAL), DROP, DROP, id="TV-T31 NOEP-05 both, none here"),
        pytest.param("0ST,1ST", (LOCAL, LOCAL), DROP, DROP, id="TV-T32 terminating elsewhere"),
        pytest.param("0,2LST,3ST", (CLUSTER, LOCAL), "0", "2", id="TV-T33 TOP-14 each by itself"),
        pytest.param("0,1ST", (CLUSTER, CLUSTER), "0", "0", id="TOP-15 ready keeps others out"),
        pytest.param("0L,1L,2LST,3", (CLUSTER, LOCAL), "0,1,3", "0,1", id="TV-X01"),
        pytest.param("1LST,2LST,3", (CLUSTER, LOCAL), "3", "1,2", id="TV-X02"),
        pytest.param("3ST", (CLUSTER, LOCAL), "3", DROP, id="TV-X03"),
        pytest.param("0L,1L,2ST,3", (CLUSTER, CLUSTER), "0,1,3", "0,1,3", id="TV-X05"),
        pytest.param("1LST,2LST,3ST", (CLUSTER, CLUSTER), "1,2,3", "1,2,3", id="TV-X06"),
        pytest.param("3ST", (CLUSTER, CLUSTER), "3", "3", id="TV-X07"),
    ],
)
def test_each_scope_takes_the_set_that_its_policy_names(
    endpoints: str,
    policies: tuple[Policy, Policy],
    internal: str | Verdict,
    external: str | Verdict,
) -> None:
    choice = choose(endpoints, policies, outside=True)
    assert (shown(choice.internal), shown(choice.external)) == (internal, external)


@pytest.mark.parametrize(
    ("endpoints", "policies", "internal"),
    [
        pytest.param("0,1L", (CLUSTER, LOCAL), "0,1", id="TV-T34 eTP Local without an outside"),
        pytest.param("0,1L", (LOCAL, CLUSTER), "1", id="TV-T35 iTP Local without an outside"),
    ],
)
def test_without_an_external_address_there_is_no_external_scope_top_01(
    endpoints: str, policies: tuple[Policy, Policy], internal: str
) -> None:
    choice = choose(endpoints, policies, outside=False)
    assert (shown(choice.internal), choice.external) == (internal, None)


@pytest.mark.parametrize(
    ("endpoints", "policies", "outside", "draining"),
    [
        pytest.param("0,1", (CLUSTER, CLUSTER), False, "", id="none where all are taken"),
        pytest.param("0,1ST", (CLUSTER, CLUSTER), False, "1", id="TOP-15 the terminating ones"),
        pytest.param("0ST,1ST", (CLUSTER, CLUSTER), False, "", id="not while they are taken"),
        pytest.param("0L,1", (LOCAL, CLUSTER), False, "1", id="CT-04 whom the policy keeps away"),
        pytest.param("0L,1", (LOCAL, CLUSTER), True, "", id="not if the other scope takes them"),
        pytest.param("0,1", (LOCAL, CLUSTER), False, "0,1", id="CT-04 also where none is taken"),
        pytest.param("0,1LST,2ST", (CLUSTER, LOCAL), True, "2", id="what neither scope takes"),
    ],
)
def test_usable_endpoints_that_no_scope_takes_serve_open_connections(
    endpoints: str, policies: tuple[Policy, Policy], outside: bool, draining: str
) -> None:
    assert numbers(choose(endpoints, policies, outside=outside).draining) == draining
