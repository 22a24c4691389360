# SPDX-License-Identifier: Apache-2.0
"""The reachability matrix under other settings: TCP, which shows all that they change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ebpflb.lab import Lab
from ebpflb.model import Family
from tests.netns.reach import CLIENTS, Party, Reach, Setting, cases
from tests.netns.world import Way

SETTINGS = {
    "TV-M20: pods are not told": Setting(tells_pods=False),
    "TV-M21: everything is masqueraded": Setting(masquerade_all=True),
    "TV-M22: both": Setting(tells_pods=False, masquerade_all=True),
    "the client of a backend here is kept": Setting(keeps_client=True),
    "pods by their packets": Setting(socket_lb="host"),
    "all by their packets": Setting(socket_lb="off"),
}


@pytest.fixture(scope="module", params=SETTINGS.values(), ids=list(SETTINGS))
def reach(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Reach]:
    folder = tmp_path_factory.mktemp("reach")
    with Lab("reach") as lab, Reach(lab, folder, request.param).serving() as one:
        yield one


@pytest.fixture(params=CLIENTS.values(), ids=list(CLIENTS))
def client(request: pytest.FixtureRequest) -> Party:
    chosen: Party = request.param
    return chosen


def test_everybody_reaches_whom_the_specification_says(
    reach: Reach, client: Party, family: Family
) -> None:
    """TV-M20 to -M22, MASQ-01 to -06, POL-06, H-07, K8, K15."""
    asked = list(cases(client))
    found = reach.mismatches(asked, [Way.TCP], family)
    assert not found, "\n".join([f"{len(found)} of {len(asked)}:", *map(str, found)])
