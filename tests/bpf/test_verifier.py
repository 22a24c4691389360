"""The verifier gate: every program loads on this kernel, with room to spare, warnings as errors."""

from __future__ import annotations

import os

import pytest

from ebpflb.datapath.ebpf import libbpf, loader
from tests.bpf.node import PacketNode

CEILING = 400_000
"""Instructions that the verifier may look at, of the 1,000,000 after which it gives up.

On Linux 6.18 it is some 200,000 for each; other kernels need more or less.
"""

PROGRAMS = ("ebpflb_ingress", "ebpflb_egress", "ebpflb_in_l3", "ebpflb_out_l3")


def test_every_program_is_tried(node: PacketNode) -> None:
    assert set(node.programs) >= set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_verifier_is_done_with_it_soon(node: PacketNode, program: str) -> None:
    info = libbpf.prog_info(node.programs[program])
    assert info.name == program
    if not info.verified:
        pytest.skip("kernel lacks bpf_prog_info.verified_insns (5.16)")
    assert info.verified < CEILING


@pytest.mark.parametrize("program", PROGRAMS)
def test_it_has_no_maps_but_ours(node: PacketNode, program: str) -> None:
    ours = {libbpf.map_info(one.fd, one.name).id for one in node.maps.values()}
    assert libbpf.prog_info(node.programs[program]).map_ids <= ours


def test_warnings_of_the_compiler_are_errors_here() -> None:
    assert os.environ[loader.WERROR]
