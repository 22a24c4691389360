# SPDX-License-Identifier: Apache-2.0
"""Plan against kernel, in words: every difference, for the audit and for ``ebpflb check``.

Reads a snapshot, changes nothing. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from ebpflb.datapath.base import Difference
from ebpflb.datapath.ebpf import abi
from ebpflb.datapath.ebpf.encode import (
    encode,
    encode_frontend,
    encode_service_addresses,
    encode_subnets,
    scope_of,
    setting_flags,
    source_ranges,
    terminating,
)
from ebpflb.datapath.ebpf.rows import flag_words, subnet_text
from ebpflb.datapath.ebpf.tables import (
    CLUSTER,
    KIND_PROBE,
    KINDS,
    LOCAL,
    MEMBER_KEY,
    PORT_LB_NO_HOST,
    PORT_LB_NO_PODS,
    PORT_LB_RANGES,
    SERVICE_ADDRESS_KEY,
    BackendEntry,
    FrontendEntry,
    PortEntry,
    Snapshot,
)
from ebpflb.model import (
    Backend,
    Plan,
    PlannedPort,
    Protocol,
    ServicePortName,
    format_address,
    format_endpoint,
)

_SCOPES = abi.names_of("SCOPE_")
_SETS = abi.names_of("SET_")
_ROLES = abi.names_of("MEMBER_")
_WORD_FLAGS = abi.names_of("WORD_")
_PORT_FLAGS = abi.names_of("PORT_")
_RANGES = PORT_LB_NO_PODS | PORT_LB_NO_HOST | PORT_LB_RANGES
_ADDRESS_ROLES = abi.names_of("ADDRESS_")
_SETTING_FLAGS = abi.names_of("SETTING_")


def differences(plan: Plan, snapshot: Snapshot) -> list[Difference]:
    """Sorted by service port, then by map; what is the whole node's comes first."""
    found = _node_differences(plan, snapshot)
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
    networks: dict[int, set[str]] = defaultdict(set)
    for one in snapshot.source_ranges:
        networks[one.id].add(str(one.network) if one.network else one.key.hex())

    for name in sorted(plan.ports, key=lambda each: each.sort_key):
        planned = plan.ports[name]
        if name not in entries:
            found.append(Difference(str(name), "ports", _words(name), "programmed", ""))
            for frontend in planned.frontends:
                frontends.pop(encode_frontend(frontend), None)
            continue
        entry = entries.pop(name)
        found += _port_differences(planned, entry, snapshot, members[entry.id])
        found += _range_differences(planned, networks[entry.id])
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
            _frontend(_kind(frontend), frontend.scope, _owner(frontend.id, names)),
        )
        for frontend in frontends.values()
        if frontend.kind != KIND_PROBE
    ]
    return sorted(found)


def _node_differences(plan: Plan, snapshot: Snapshot) -> list[Difference]:
    """Where NodePorts answer and to whom, who is a pod, and which addresses are Services'."""
    wanted, actual = plan.node_ports.addresses, frozenset(snapshot.node_addrs)
    found = [
        Difference(
            "",
            "node_addrs",
            format_address(address),
            _ANSWERS if address in wanted else "",
            _ANSWERS if address in actual else "",
        )
        for address in wanted ^ actual
    ]
    flags = setting_flags(plan)
    if flags != snapshot.flags:
        expected, seen = (_flags(each, _SETTING_FLAGS) for each in (flags, snapshot.flags))
        found.append(Difference("", "settings", "flags", expected, seen))
    for member, subnet, other in zip(_PODS, encode_subnets(plan), snapshot.subnets, strict=True):
        if subnet != other:
            found.append(
                Difference("", "settings", member, subnet_text(subnet), subnet_text(other))
            )
    return [*found, *_address_differences(plan, snapshot)]


_ANSWERS = "NodePorts answer"
_PODS = ("pods4", "pods6")


def _address_differences(plan: Plan, snapshot: Snapshot) -> Iterable[Difference]:
    wanted = _by_address(encode_service_addresses(plan))
    actual = _by_address(snapshot.service_addrs)
    for address in sorted(wanted.keys() | actual.keys()):
        expected, seen = wanted.get(address, ""), actual.get(address, "")
        if expected != seen:
            yield Difference("", "service_addrs", format_address(address), expected, seen)


def _by_address(keys: Iterable[bytes]) -> dict[bytes, str]:
    """What each address is, in words: ``known answers``."""
    words: dict[bytes, str] = {}
    for key in sorted(keys):
        entry = SERVICE_ADDRESS_KEY.unpack(key)
        word = _ADDRESS_ROLES.get(entry.role, f"role {entry.role}")
        words[entry.address] = f"{words.get(entry.address, '')} {word}".lstrip()
    return words


def _words(name: ServicePortName) -> str:
    return f"service port {name.protocol.name} {name.family.label}"


def _dialled(frontend: FrontendEntry) -> str:
    protocol = Protocol(frontend.protocol).name if frontend.protocol in list(Protocol) else "?"
    return f"{format_endpoint(frontend.address, frontend.port)} {protocol}"


def _frontend_differences(
    planned: PlannedPort,
    entry: PortEntry,
    frontends: dict[bytes, FrontendEntry],
    names: Mapping[int, ServicePortName],
) -> Iterable[Difference]:
    for frontend in planned.frontends:
        actual = frontends.pop(encode_frontend(frontend), None)
        what = f"{format_endpoint(frontend.address, frontend.port)} {frontend.protocol.name}"
        wanted = _frontend(frontend.kind.value, scope_of(frontend.kind), str(planned.name))
        if actual is None:
            yield Difference(str(planned.name), "frontends", what, wanted, "")
            continue
        seen = _frontend(
            _kind(actual),
            actual.scope,
            str(planned.name) if actual.id == entry.id else _owner(actual.id, names),
        )
        if seen != wanted:
            yield Difference(str(planned.name), "frontends", what, wanted, seen)


def _kind(entry: FrontendEntry) -> str:
    kind = KINDS.get(entry.kind)
    return kind.value if kind else f"kind {entry.kind}"


def _owner(service_port_id: int, names: Mapping[int, ServicePortName]) -> str:
    """Names alone may be equal: of two protocols, of two families."""
    name = names.get(service_port_id)
    return f"{name} (id {service_port_id})" if name else f"id {service_port_id}"


def _frontend(kind: str, scope: int, owner: str) -> str:
    """In words: ``LoadBalancer of default/web, external``."""
    return f"{kind} of {owner}, {_SCOPES.get(scope, f'scope {scope}')}"


def _port_differences(
    planned: PlannedPort, entry: PortEntry, snapshot: Snapshot, members: set[bytes]
) -> Iterable[Difference]:
    name = str(planned.name)
    encoded = encode(planned, entry.id)
    yield from _set_differences(planned, entry, snapshot)
    for which, slots in enumerate(encoded.sets):
        actual = entry.words[which].flags
        if slots.flags != actual:
            expected, seen = (_flags(each, _WORD_FLAGS) for each in (slots.flags, actual))
            yield Difference(name, "ports", f"{_SETS[which]} flags", expected, seen)
    for what, wanted, got in (
        ("affinity seconds", planned.affinity_s, entry.affinity_s),
        ("internal policy", planned.internal_policy.value, entry.internal_policy.value),
        ("external policy", planned.external_policy.value, entry.external_policy.value),
        ("source ranges", _closed_for(encoded.port_flags), _closed_for(entry.flags)),
    ):
        if wanted != got:
            yield Difference(name, "ports", what, str(wanted), str(got))
    for key in sorted(encoded.members ^ members):
        member = MEMBER_KEY.unpack(key)
        role = _ROLES.get(member.role, f"role {member.role}")
        what = f"{role} {format_endpoint(member.address, int.from_bytes(member.port))}"
        there = "member" if key in encoded.members else ""
        yield Difference(name, "members", what, there, "" if there else "member")


def _range_differences(planned: PlannedPort, actual: Iterable[str]) -> Iterable[Difference]:
    wanted = {str(network) for network in source_ranges(planned)}
    for text in sorted(wanted.symmetric_difference(actual)):
        there = "let in" if text in wanted else ""
        yield Difference(str(planned.name), "source_ranges", text, there, "" if there else "let in")


def _set_differences(
    planned: PlannedPort, entry: PortEntry, snapshot: Snapshot
) -> Iterable[Difference]:
    """The two sets, and what stands behind the cluster set's range."""
    active = entry.words[CLUSTER].length
    slots = snapshot.cluster[entry.id]
    for where, wanted, held in (
        (_SETS[CLUSTER], planned.cluster.backends, slots[:active]),
        (_SETS[LOCAL], planned.local.backends, snapshot.local[entry.id]),
        ("draining", terminating(planned), slots[active:]),
    ):
        expected = {format_endpoint(one.address, one.port): _state(one) for one in wanted}
        actual = {
            format_endpoint(slot.address, slot.port): _state(slot)
            if slot.owner == entry.id
            else f"slot of id {slot.owner}"
            for slot in held
        }
        for what in sorted(expected.keys() | actual.keys()):
            if expected.get(what, "") != actual.get(what, ""):
                yield Difference(
                    str(planned.name),
                    "backends",
                    f"{where} {what}",
                    expected.get(what, ""),
                    actual.get(what, ""),
                )
        if expected == actual and len(wanted) != len(held):
            yield Difference(
                str(planned.name), "ports", f"{where} count", str(len(wanted)), str(len(held))
            )


def _closed_for(port_flags: int) -> str:
    return _flags(port_flags & _RANGES, _PORT_FLAGS)


def _flags(flags: int, words: Mapping[int, str]) -> str:
    return " ".join(flag_words(flags, words)) or "none set"


def _state(backend: Backend | BackendEntry) -> str:
    return ("terminating" if backend.terminating else "ready") + (
        ", local" if backend.local else ""
    )
