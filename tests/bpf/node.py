"""One node's packet path, without a network: its four tc programs, their maps, and test runs.

A ``PacketNode`` has devices (veths in a namespace of the lab, that no packet ever goes through) and
Services, which the product's own writer puts into the maps. ``receives`` and ``sends`` run a packet
through the program of that direction; what comes out is the next one's input, here or on another
node, until the reply is home. Every packet that comes out must have the checksums that scapy finds,
and the kernel checks what was done to its own sum (CHECKSUM_COMPLETE) where it can.

It must not know how the programs decide.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import enum
import errno
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from scapy.packet import Packet

from ebpflb.datapath.ebpf import abi, libbpf, loader
from ebpflb.datapath.ebpf.maps import PinFolder, sizes
from ebpflb.datapath.ebpf.programs import tc_build
from ebpflb.datapath.ebpf.tables import KernelTables
from ebpflb.datapath.ebpf.writer import Writer
from ebpflb.errors import DatapathError
from ebpflb.lab import Lab, Namespace, addresses, netns
from ebpflb.model import (
    Backend,
    Frontend,
    FrontendKind,
    NodePorts,
    Plan,
    PlannedPort,
    PodDetector,
    Policy,
    Protocol,
    Selection,
    ServicePortName,
    Verdict,
    format_address,
    parse_address,
    parse_network,
    unspecified,
)
from tests.bpf.packets import (
    DEVICE_MAC,
    NETS,
    End,
    Net,
    ends_of,
    parse,
    tcp,
    without_ethernet,
    wrong_checksums,
)

HERE = Path(__file__).parent

MASQUERADE = 0x4000
REJECT = 0x2000

SIZES = {
    "frontends": 256,
    "ports": 64,
    "backends": 1024,
    "members": 1024,
    "names": 64,
    "affinity": 1024,
    "node_addrs": 16,
    "flows_new": 2048,
    "conntrack": 8192,
    "source_ranges": 64,
    "service_addrs": 256,
}

DEVICES = ("uplink", "pod", "pod2", "bridged", "bridged2", "tun")
"""The node's devices; ``tun`` stands for one without an Ethernet header."""

_C = abi.CONSTANTS
_FLOW_KEY = abi.LAYOUTS["flow_key"]
_FLOW = abi.LAYOUTS["flow"]
_AFFINITY = abi.LAYOUTS["affinity_value"]
_SETTINGS = abi.LAYOUTS["settings"]
_DEVICE_KEY = abi.LAYOUTS["device_key"]
_PROBE = abi.LAYOUTS["probe"]
_KINDS = {_C[f"FLOW_{kind.upper()}"]: kind for kind in ("forward", "reverse", "foreign")}


# --- what comes out ----------------------------------------------------------------------------


class Fate(enum.IntEnum):
    """What a program may return; all else ends the chain for others."""

    PASSED = -1
    DROPPED = 2
    REDIRECTED = 7


class Out(NamedTuple):
    """What became of a packet: ``packet`` as it is now, ``was`` as it had come."""

    fate: Fate
    packet: Packet
    was: Packet
    mark: int
    mark_before: int

    @property
    def passed(self) -> bool:
        return self.fate is Fate.PASSED

    @property
    def dropped(self) -> bool:
        return self.fate is Fate.DROPPED

    @property
    def redirected(self) -> bool:
        return self.fate is Fate.REDIRECTED

    @property
    def source(self) -> End:
        return ends_of(self.packet)[0]

    @property
    def target(self) -> End:
        return ends_of(self.packet)[1]

    @property
    def unchanged(self) -> bool:
        """Passed, byte for byte, mark and all."""
        return (
            self.passed and self.mark == self.mark_before and bytes(self.packet) == bytes(self.was)
        )

    @property
    def masqueraded(self) -> bool:
        return bool(self.mark & MASQUERADE)

    @property
    def rejected(self) -> bool:
        """Untouched but for the mark by which netfilter answers it."""
        return (
            self.passed
            and self.mark == self.mark_before | REJECT
            and bytes(self.packet) == bytes(self.was)
        )

    def __repr__(self) -> str:
        change = "unchanged" if self.unchanged else f"{self.was.summary()} is now"
        return f"{self.fate.name} {change} {self.packet.summary()}, mark {self.mark:#x}"


class Flow(NamedTuple):
    """One half of a flow as it stands in ``table``; ``entry`` is struct flow."""

    table: str
    protocol: int
    source: End
    target: End
    kind: str
    address: End
    client_port: int
    entry: Any


# --- Services ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Service:
    """A Service of one port in one family. Each ``number`` has addresses and ports of its own.

    It has every kind of frontend. ``draining``: backends that serve open flows only.
    """

    net: Net
    protocol: Protocol = Protocol.TCP
    number: int = 0
    local: tuple[End, ...] = ()
    remote: tuple[End, ...] = ()
    draining: tuple[End, ...] = ()
    internal_policy: Policy = Policy.CLUSTER
    external_policy: Policy = Policy.CLUSTER
    affinity_s: int = 0
    source_ranges: tuple[str, ...] = ()
    socket_lb: bool = True

    @property
    def cluster_ip(self) -> End:
        return End(self.net.cluster_ip(self.number), 80)

    @property
    def external_ip(self) -> End:
        return End(self.net.external_ip(self.number), 80)

    @property
    def load_balancer(self) -> End:
        return End(self.net.balancer_ip(self.number), 80)

    @property
    def node_port(self) -> End:
        return self.net.node.at(30080 + self.number)

    @property
    def backends(self) -> tuple[End, ...]:
        return (*self.local, *self.remote)

    def frontend(self, kind: FrontendKind) -> End:
        return {
            FrontendKind.CLUSTER_IP: self.cluster_ip,
            FrontendKind.NODE_PORT: self.node_port,
            FrontendKind.EXTERNAL_IP: self.external_ip,
            FrontendKind.LOAD_BALANCER: self.load_balancer,
        }[kind]

    @property
    def name(self) -> ServicePortName:
        return ServicePortName("test", f"s{self.number}", "p", self.protocol, self.net.family)

    def planned(self) -> PlannedPort:
        local = tuple(map(self._backend, self.local))
        every = (*local, *map(self._backend, self.remote))
        ranges = tuple(map(parse_network, self.source_ranges))
        no_endpoint = Selection(Verdict.REJECT, ())
        if not every:
            selections = (no_endpoint, no_endpoint)
        else:
            on_node = Selection(Verdict.FORWARD, local) if local else Selection(Verdict.DROP, ())
            selections = (Selection(Verdict.FORWARD, every), on_node)
        return PlannedPort(
            name=self.name,
            frontends=tuple(
                Frontend(
                    unspecified(self.net.family)
                    if kind is FrontendKind.NODE_PORT
                    else parse_address(self.frontend(kind).address),
                    self.frontend(kind).port,
                    self.protocol,
                    kind,
                )
                for kind in FrontendKind
            ),
            cluster=selections[0],
            local=selections[1],
            draining=tuple(self._backend(end, terminating=True) for end in self.draining),
            affinity_s=self.affinity_s,
            internal_policy=self.internal_policy,
            external_policy=self.external_policy,
            socket_lb=self.socket_lb,
            source_ranges=ranges,
            node_in_ranges=any(parse_address(self.net.node.address) in one for one in ranges)
            or not ranges,
        )

    def _backend(self, end: End, *, terminating: bool = False) -> Backend:
        return Backend(
            parse_address(end.address),
            end.port,
            local=end.address in {one.address for one in self.local},
            terminating=terminating,
        )


class _AtOnce:
    """Grants every grace period at once: no program runs while the maps are written."""

    def __init__(self) -> None:
        self._drawn = 0

    def ticket(self) -> int:
        self._drawn += 1
        return self._drawn

    def done(self) -> int:
        return self._drawn

    def close(self) -> None:
        """Nothing is held."""


# --- the node ----------------------------------------------------------------------------------


class PacketNode:
    """A node of its own maps and programs. ``reset`` makes it as new, which costs milliseconds."""

    def __init__(self, lab: Lab, name: str, number: int = 1) -> None:
        self._stack = contextlib.ExitStack()
        self.number = number
        self._plan = Plan({})
        with contextlib.ExitStack() as stack:
            self.namespace = _make_devices(lab, name, number)
            self.index: Mapping[str, int] = self.namespace.links(
                lambda links: {device: links.index(device) for device in DEVICES}
            )
            self._inside = stack.enter_context(_thread_in(self.namespace))
            folder = PinFolder(lab.pin_root / name)
            folder.create()
            self.maps = folder.open_or_create(sizes(SIZES))
            for one in self.maps.values():
                stack.callback(one.close)
            self.programs = loader.load(tc_build(self.maps, l3=True))
            for fd in self.programs.values():
                stack.callback(os.close, fd)
            self._tables = KernelTables(self.maps)
            stack.callback(self._tables.close)
            self._settings = self.maps["settings"].memory()
            stack.callback(self._settings.close)
            self._probe = self.maps["probe"].memory()
            stack.callback(self._probe.close)
            self._writer = Writer(self._tables, _AtOnce())
            self.sums_up = self._can_sum_up()
            self.reset()
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    # --- what it is told -----------------------------------------------------------------------

    def reset(self) -> None:
        """No Services, no flows, nothing counted; pods told by their addresses."""
        own = frozenset(parse_address(self.address(net).address) for net in NETS)
        self.plan(
            Plan(
                {},
                NodePorts(own),
                node_addresses=own,
                pods=PodDetector(networks=tuple(parse_network(net.pods) for net in NETS)),
            )
        )
        for name in ("flows_new", "conntrack", "fragments", "affinity", "devices"):
            self.clear(name)
        for stat in range(_C["STAT_COUNT"]):
            self.maps["stats"].clear_per_cpu(stat)
        self._probe.view[:] = bytes(len(self._probe.view))
        seconds = 1_000_000_000
        self.settings(
            host_netns=1,
            udp_timeout_ns=30 * seconds,
            udp_stream_timeout_ns=120 * seconds,
            tcp_timeout_ns=600 * seconds,
            tcp_closing_ns=300 * seconds,
            masquerade_mark=MASQUERADE,
            reject_mark=REJECT,
            state=0,
        )
        self.state("SEES_PODS", "SEES_HOST", "PING")
        self.has_role("uplink", "UPLINK")

    def address(self, net: Net) -> End:
        """This node's own address."""
        return net.node if self.number == 1 else net.other_node

    def plan(self, plan: Plan) -> None:
        """Bring the maps to this plan, whole."""
        self._plan = plan
        changed: Collection[ServicePortName] | None = None
        while changed is None or changed or self._writer._retired:
            report = self._writer.sync(plan, changed)
            assert not report.failed, report.failed
            changed = report.deferred

    def plans(self, **changes: Any) -> None:
        """Change what the plan says of the node: ``pods``, ``masquerade_all`` …"""
        self.plan(msgspec.structs.replace(self._plan, **changes))

    def serve(self, *services: Service) -> None:
        """Serve them, or serve them otherwise than until now."""
        self.plans(ports={**self._plan.ports, **{one.name: one.planned() for one in services}})

    def remove(self, service: Service) -> None:
        """Serve it no more."""
        self.plans(
            ports={name: one for name, one in self._plan.ports.items() if name != service.name}
        )

    def settings(self, **members: int) -> None:
        """Store words of ``settings`` as the datapath does."""
        view = self._settings.view
        values = _SETTINGS.unpack(bytes(view[: _SETTINGS.size]))
        view[: _SETTINGS.size] = _SETTINGS.pack(*values._replace(**members))

    def state(self, *names: str) -> None:
        """What the packet path can do on the node: these of enum state_flag, and no other."""
        self.settings(state=sum(_C[f"STATE_{name}"] for name in names))

    def has_role(self, device: str, role: str) -> None:
        """What is beyond a device (enum device_role)."""
        key = _DEVICE_KEY.pack(self.index[device], _C[f"DEVICE_{role}"])
        self.maps["devices"].update([(key, bytes(self.maps["devices"].spec.value.size))])

    def expects_probe(self, hook: str, number: int) -> None:
        """The agent has sent a probe with this number in it."""
        at = _C[f"HOOK_{hook}"] * _PROBE.size
        self._probe.view[at : at + _PROBE.size] = _PROBE.make(expected=number)

    # --- a packet's life -----------------------------------------------------------------------

    def receives(self, packet: Packet, on: str = "uplink", **options: Any) -> Out:
        """The packet comes in on a device. Options: see ``run``."""
        program = "ebpflb_in_l3" if on == "tun" else "ebpflb_ingress"
        return self.run(program, packet, on, came_in=on, **options)

    def sends(
        self, packet: Packet, on: str = "uplink", *, came_in: str = "pod", **options: Any
    ) -> Out:
        """The packet, which came in on another device, is about to leave by this one."""
        program = "ebpflb_out_l3" if on == "tun" else "ebpflb_egress"
        return self.run(program, packet, on, came_in=came_in, **options)

    def sends_own(self, packet: Packet, on: str = "uplink", **options: Any) -> Out:
        """The node itself sends the packet."""
        return self.sends(packet, on, came_in="", **options)

    def run(
        self,
        program: str,
        packet: Packet,
        on: str,
        *,
        came_in: str = "",
        mark: int = 0,
        sums_up: bool | None = None,
        checks: bool = True,
        gso_size: int = 0,
        gso_segs: int = 0,
    ) -> Out:
        """Run one program; the packet that comes out must have the right checksums.

        ``sums_up`` False: nobody has summed the packet up before. ``checks`` False: its checksums
        may be wrong.
        """
        ethernet = not program.endswith("_l3")
        was = parse(bytes(packet if ethernet else without_ethernet(packet)), ethernet=ethernet)
        if sums_up is None:
            sums_up = self.sums_up and ethernet
        result = self.run_raw(
            program,
            bytes(was),
            on,
            came_in=came_in,
            mark=mark,
            gso_size=gso_size,
            gso_segs=gso_segs,
            checksum_complete=sums_up,
        )
        out = Out(
            Fate(result.verdict), parse(result.packet, ethernet=ethernet), was, result.mark, mark
        )
        if checks and not out.dropped:
            wrong = wrong_checksums(out.packet, ethernet=ethernet)
            assert not wrong, f"{out}: {'; '.join(wrong)}"
        return out

    def run_raw(
        self,
        program: str,
        data: bytes,
        on: str = "uplink",
        *,
        came_in: str = "",
        **options: Any,
    ) -> libbpf.RunResult:
        """The same with bytes; ``options`` are those of ``libbpf.prog_test_run``."""
        result: libbpf.RunResult = self._inside(
            lambda: libbpf.prog_test_run(
                self.programs[program],
                data,
                ifindex=self.index[on],
                ingress_ifindex=self.index[came_in] if came_in else 0,
                **options,
            )
        )
        return result

    def run_many(
        self, program: str, packets: Sequence[bytes], on: str = "uplink", came_in: str = ""
    ) -> list[int]:
        """The verdicts on many packets, in their order; fast."""
        fd, index = self.programs[program], self.index[on]
        before = self.index[came_in] if came_in else 0

        def act() -> list[int]:
            return [
                libbpf.prog_test_run(fd, data, ifindex=index, ingress_ifindex=before).verdict
                for data in packets
            ]

        verdicts: list[int] = self._inside(act)
        return verdicts

    # --- what it has and knows -----------------------------------------------------------------

    def flows(self, table: str | None = None) -> list[Flow]:
        """Every half of a flow, or those of one table."""
        return [
            _flow(name, key, value)
            for name in ([table] if table else ["flows_new", "conntrack"])
            for key, value in self.maps[name].items()
        ]

    def half(self, kind: str) -> Flow:
        """The one half of this kind (``forward``, ``reverse``, ``foreign``)."""
        found = [flow for flow in self.flows() if flow.kind == kind]
        assert len(found) == 1, found
        return found[0]

    def change_flows(self, **changes: Callable[[int], int]) -> None:
        """Let each of these members of every half be what the function makes of it."""
        for name in ("flows_new", "conntrack"):
            flows = self.maps[name]
            for key, value in list(flows.items()):
                entry = _FLOW.unpack(value)
                entry = entry._replace(**{m: f(getattr(entry, m)) for m, f in changes.items()})
                flows.update([(key, _FLOW.pack(*entry))])

    def later(self, seconds: float) -> None:
        """So much time passes, as far as the flows and the affinity records can tell.

        The kernel counts from its boot: nothing can have been longer ago than that.
        """
        assert seconds < time.monotonic(), "this machine has not been up for so long"
        ns = int(seconds * 1e9)

        def back(then: int) -> int:
            return max(1, then - ns) if then else 0

        self.change_flows(used_ns=back, syn_ns=back, created_ns=back)
        affinity = self.maps["affinity"]
        for key, value in list(affinity.items()):
            record = _AFFINITY.unpack(value)
            record = record._replace(used_ns=back(record.used_ns))
            affinity.update([(key, _AFFINITY.pack(*record))])

    def forget(self, flow: Flow) -> None:
        """The LRU takes one half away."""
        flows = self.maps[flow.table]
        for key, value in list(flows.items()):
            if _flow(flow.table, key, value) == flow:
                flows.delete(key)

    def clear(self, name: str) -> None:
        one = self.maps[name]
        for key, _ in list(one.items()):
            one.delete(key)

    def counted(self, stat: str) -> int:
        """How often since the reset (enum stat)."""
        return sum(self.maps["stats"].per_cpu(_C[f"STAT_{stat}"]))

    def connections(self, service: Service) -> int:
        """How many connections were counted for it."""
        return self._tables.connections(self._writer._ports[service.name].index)

    def probes(self, hook: str) -> Any:
        """What a hook has noted of the agent's probe."""
        at = _C[f"HOOK_{hook}"] * _PROBE.size
        return _PROBE.unpack(bytes(self._probe.view[at : at + _PROBE.size]))

    def _can_sum_up(self) -> bool:
        syn = tcp(NETS[0].client, NETS[0].stranger)
        try:
            self.run_raw("ebpflb_ingress", bytes(syn), checksum_complete=True)
        except DatapathError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True


def _flow(table: str, key_bytes: bytes, value: bytes) -> Flow:
    key, entry = _FLOW_KEY.unpack(key_bytes), _FLOW.unpack(value)
    return Flow(
        table,
        key.protocol,
        _end(key.source, key.source_port),
        _end(key.target, key.target_port),
        _KINDS[entry.kind],
        _end(entry.address, entry.port),
        int.from_bytes(entry.client_port),
        entry,
    )


def _end(address: bytes, port: bytes) -> End:
    return End(format_address(address), int.from_bytes(port))


def _make_devices(lab: Lab, name: str, number: int) -> Namespace:
    """A namespace with the node's devices, its addresses, and its routes."""
    node, beyond = lab.namespace(name, forwarding=True), lab.namespace(f"{name}-far")
    for device in DEVICES:
        lab.link(node, device, beyond, device)
    other = 3 - number

    def configure(links: netns.Links) -> None:
        links.set("uplink", state="up", address=DEVICE_MAC)
        links.address("uplink", f"{addresses.node_ipv4(number)}/24")
        links.address("uplink", f"{addresses.node_ipv6(number)}/64")
        links.route(addresses.pods_ipv4(number), device="pod2")
        links.route(addresses.pods_ipv6(number), device="pod2")
        links.route(addresses.pods_ipv4(other), via=addresses.node_ipv4(other))
        links.route(addresses.pods_ipv6(other), via=addresses.node_ipv6(other))
        links.route("default", via=addresses.ROUTER_INSIDE_IPV4)
        links.route("default6", via=addresses.ROUTER_INSIDE_IPV6)

    node.links(configure)
    return node


@contextlib.contextmanager
def _thread_in(namespace: Namespace) -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """Calls functions in a namespace, in one thread that stays there."""
    fd = os.open(namespace.netns, os.O_RDONLY)
    try:
        with concurrent.futures.ThreadPoolExecutor(
            1, namespace.name, initializer=libbpf.enter_netns, initargs=(fd,)
        ) as pool:
            yield lambda act: pool.submit(act).result()
    finally:
        os.close(fd)
