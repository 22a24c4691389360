# SPDX-License-Identifier: Apache-2.0
"""Which programs there are, and what each set of them is compiled with.

This file must not know where a program is attached, nor when.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ebpflb.datapath.ebpf import attach, libbpf, loader
from ebpflb.datapath.ebpf.maps import Map

PROG_SCHED_CLS = 3

HELPER_KTIME_GET_COARSE_NS = 160

INGRESS = "ebpflb_ingress"
EGRESS = "ebpflb_egress"
INGRESS_L3 = "ebpflb_in_l3"
"""For a device whose packets begin with IP's header, not Ethernet's."""
EGRESS_L3 = "ebpflb_out_l3"

_ETHERNET = (INGRESS, EGRESS)
TC_PROGRAMS = (*_ETHERNET, INGRESS_L3, EGRESS_L3)


def sock_build(
    maps: Mapping[str, Map], *, retval: bool | None, show_service_tcp: bool, protect_nodeports: bool
) -> loader.Build:
    """The socket programs on ``maps``.

    ``retval``: whether the kernel lets a program choose connect()'s error; None asks it.
    """
    if retval is None:
        retval = libbpf.has_helper(libbpf.PROG_CGROUP_SOCK_ADDR, libbpf.HELPER_SET_RETVAL)
    hooks = (*attach.HOOKS, *(attach.BIND_HOOKS if protect_nodeports else ()))
    return _build(
        "sock.c",
        (loader.Function(*hook) for hook in hooks),
        {"HAVE_RETVAL": int(retval), "SHOW_SERVICE_TCP": int(show_service_tcp)},
        maps,
    )


def tc_build(maps: Mapping[str, Map], *, l3: bool = False) -> loader.Build:
    """The packet programs on ``maps``; with ``l3`` also those for devices without Ethernet."""
    names = TC_PROGRAMS if l3 else _ETHERNET
    functions = (loader.Function(name, PROG_SCHED_CLS, 0) for name in names)
    coarse_time = libbpf.has_helper(PROG_SCHED_CLS, HELPER_KTIME_GET_COARSE_NS)
    defines = {"HAVE_COARSE_TIME": int(coarse_time), "WITH_L3": int(l3)}
    return _build("tc.c", functions, defines, maps)


def _build(
    source: str,
    functions: Iterable[loader.Function],
    defines: Mapping[str, int],
    maps: Mapping[str, Map],
) -> loader.Build:
    return loader.Build(
        source=source,
        functions=tuple(functions),
        defines=dict(defines) | {f"SIZE_{name}": one.max_entries for name, one in maps.items()},
        pins={name: str(one.path) for name, one in maps.items()},
    )
