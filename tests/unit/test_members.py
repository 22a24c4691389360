# SPDX-License-Identifier: Apache-2.0
"""A layout that was left with a map is read again as it was; what else lies there is nobody's."""

from __future__ import annotations

import pytest

from ebpflb.datapath.ebpf import abi, members
from ebpflb.datapath.ebpf.libbpf import Btf
from ebpflb.datapath.ebpf.members import Place

KEY, VALUE = abi.LAYOUTS["flow_key"], abi.LAYOUTS["flow"]


def test_members_are_where_the_header_has_them() -> None:
    found = members.places(VALUE)
    assert list(found) == list(VALUE.offsets)
    assert found["used_ns"] == Place(VALUE.offsets["used_ns"], 8)
    assert found["address"].size == 16
    assert sum(place.size for place in found.values()) == VALUE.size


@pytest.mark.parametrize("name", abi.LAYOUTS)
def test_what_is_written_is_read_again(name: str) -> None:
    layout = abi.LAYOUTS[name]
    assert members.read(members.describe(KEY, layout)) == (
        members.places(KEY),
        members.places(layout),
    )


@pytest.mark.parametrize(
    "types",
    [
        pytest.param(Btf(b"", 1, 2), id="nothing"),
        pytest.param(Btf(b"\x9f\xeb\1\0" + bytes(40), 1, 2), id="no types"),
        pytest.param(Btf(bytes(200), 1, 2), id="something else"),
        pytest.param(
            members.describe(KEY, VALUE)._replace(key_type=1), id="a key that is a number"
        ),
        pytest.param(members.describe(KEY, VALUE)._replace(value_type=99), id="no such type"),
    ],
)
def test_what_somebody_else_wrote_is_not_understood(types: Btf) -> None:
    assert members.read(types) is None


def test_what_is_cut_off_is_not_understood() -> None:
    whole = members.describe(KEY, VALUE)
    assert not [
        length
        for length in range(len(whole.data) - len(b"check_tail\0"))
        if members.read(whole._replace(data=whole.data[:length])) == members.read(whole)
    ]
