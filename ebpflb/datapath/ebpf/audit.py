# SPDX-License-Identifier: Apache-2.0
"""Plan against kernel, in words: every difference, for the audit and for ``ebpflb check``.

Reads a snapshot, changes nothing. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.encode import encode, encode_frontend, scope_of, terminating
from ebpflb.datapath.ebpf.tables import (
    EXTERNAL,
    INTERNAL,
    KIND_PROBE,
    KINDS,
    MEMBER_KEY,
    BackendEntry,
    FrontendEntry,
    PortEntry,
    Snapshot,
    Word,
)
from ebpflb.model import (
    Backend,
    Plan,
    PlannedPort,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
    format_endpoint,
)

_NONE_LOCAL = abi.CONSTANTS["WORD_NONE_LOCAL"]


def differences(plan: Plan, snapshot: Snapshot) -> list[Difference]:
    """Sorted by service port, then by map."""
    found: list[Difference] = []
    entries: dict[ServicePortName, PortEntry] = {}
    for entry in snapshot.ports:
        if entry.name is None or entry.name in entries:
            found.append(
                Difference("", "ports", f"slot {entry.slot}", "", f"id {entry.id}, not in use")
            )
        else:
            entries[entry.name] = entry
    names = {entry.id: name for name, entry in entries.items()}
    frontends = {frontend.key: frontend for frontend in snapshot.frontends}

    members: dict[int, set[bytes]] = defaultdict(set)
    for member in snapshot.members:
        members[member.id].add(member.key)

    for name in sorted(plan.ports, key=lambda each: each.sort_key):
        planned = plan.ports[name]
        if name not in entries:
            found.append(Difference(str(name), "ports", _words(name), "programmed", ""))
            for frontend in planned.frontends:
                frontends.pop(encode_frontend(frontend), None)
            continue
        entry = entries.pop(name)
        found += _port_differences(planned, entry, snapshot, members[entry.id])
        found += _frontend_differences(planned, entry, frontends, names)
    found += [
        Difference(str(name), "ports", _words(name), "", "programmed") for name in sorted(entries)
    ]
    found += [
        Difference(
            str(names.get(frontend.id, "")),
            "frontends",
            _dialled(frontend),
            "",
            f"id {frontend.id}",
        )
        for frontend in frontends.values()
        if frontend.kind != KIND_PROBE
    ]
    return sorted(found)


def _words(name: ServicePortName) -> str:
    return f"service port {name.protocol.name} {name.family.label}"


def _dialled(frontend: FrontendEntry) -> str:
    protocol = Protocol(frontend.protocol).name if frontend.protocol in list(Protocol) else "?"
    return f"{format_endpoint(frontend.address, frontend.port)} {protocol}"


def _frontend_differences(
    planned: PlannedPort,
    entry: PortEntry,
    frontends: dict[bytes, FrontendEntry],
    names: dict[int, ServicePortName],
) -> Iterable[Difference]:
    for frontend in planned.frontends:
        actual = frontends.pop(encode_frontend(frontend), None)
        what = f"{format_endpoint(frontend.address, frontend.port)} {frontend.protocol.name}"
        wanted = f"{frontend.kind.value} of {planned.name}"
        if actual is None:
            yield Difference(str(planned.name), "frontends", what, wanted, "")
            continue
        kind = KINDS.get(actual.kind)
        if actual.id != entry.id or kind is not frontend.kind or actual.scope != scope_of(kind):
            seen = f"{kind.value if kind else actual.kind} of {names.get(actual.id, actual.id)}"
            yield Difference(str(planned.name), "frontends", what, wanted, seen)


def _port_differences(
    planned: PlannedPort, entry: PortEntry, snapshot: Snapshot, members: set[bytes]
) -> Iterable[Difference]:
    name = str(planned.name)
    internal = snapshot.backends[entry.id]
    drains = terminating(planned)
    count = entry.words[INTERNAL].length
    yield from _compare(
        name,
        "internal",
        _printed(planned.internal, (*planned.internal.backends, *drains)),
        _seen(entry.words[INTERNAL], internal, entry.id),
    )
    if planned.external is not None:
        yield from _compare(
            name,
            "external",
            _printed(planned.external, planned.external.backends),
            _seen(entry.words[EXTERNAL], snapshot.external[entry.id], entry.id),
        )
    if count == len(planned.internal.backends) and entry.draining != len(drains):
        yield Difference(name, "ports", "draining", str(len(drains)), str(entry.draining))
    encoded = encode(planned, entry.id)
    for scope, slots in enumerate(encoded.scopes):
        if slots.flags != entry.words[scope].flags:
            yield Difference(
                name,
                "ports",
                f"flags {'internal' if scope == INTERNAL else 'external'}",
                str(slots.flags),
                str(entry.words[scope].flags),
            )
    for what, wanted, actual in (
        ("affinity seconds", planned.affinity_s, entry.affinity_s),
        ("internal policy", planned.internal_policy.value, entry.internal_policy.value),
        ("external policy", planned.external_policy.value, entry.external_policy.value),
    ):
        if wanted != actual:
            yield Difference(name, "ports", what, str(wanted), str(actual))
    for key in sorted(encoded.members ^ members):
        member = MEMBER_KEY.unpack(key)
        what = format_endpoint(member.address, int.from_bytes(member.port))
        there = "member" if key in encoded.members else ""
        yield Difference(name, "members", what, there, "" if there else "member")


def _compare(
    name: str, scope: str, wanted: dict[str, str], actual: dict[str, str]
) -> Iterable[Difference]:
    for what in sorted(wanted.keys() | actual.keys()):
        if wanted.get(what, "") != actual.get(what, ""):
            yield Difference(
                name, "backends", f"{scope} {what}", wanted.get(what, ""), actual.get(what, "")
            )


def _printed(selection: Selection, backends: Iterable[Backend]) -> dict[str, str]:
    """Each backend by its printed address, or the verdict where there is none."""
    printed = {format_endpoint(b.address, b.port): _state(b) for b in backends}
    if selection.verdict is not Verdict.FORWARD:
        printed["verdict"] = selection.verdict.value
    return printed


def _seen(word: Word, slots: Iterable[BackendEntry], owner: int) -> dict[str, str]:
    printed = {}
    if not word.length:
        printed["verdict"] = (
            Verdict.DROP.value if word.flags & _NONE_LOCAL else Verdict.REJECT.value
        )
    for slot in slots:
        state = _state(slot) if slot.owner == owner else f"slot of id {slot.owner}"
        printed[format_endpoint(slot.address, slot.port)] = state
    return printed


def _state(backend: Backend | BackendEntry) -> str:
    return ("terminating" if backend.terminating else "ready") + (
        ", local" if backend.local else ""
    )
