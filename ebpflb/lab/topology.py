# SPDX-License-Identifier: Apache-2.0
"""What a lab looks like: nodes with pods, a wire between the nodes, an outside client.

                                   wire (a namespace with a bridge)
                     ┌───────────────────┬──────┴────────────┐
                  n1 eth0             n2 eth0             edge eth0     router
              192.168.50.1         192.168.50.2        192.168.50.254
               p1 │  │ be1            │ be3               out0 │ 192.168.60.1
       10.244.1.2    10.244.1.3    10.244.2.2                  x 192.168.60.9

Each box is a network namespace; each node has its own cgroup folder and pin path, so that several
agents run side by side. Pods hang on their node by a veth each, either routed (the node's end is
`veth-NAME`, no bridge, as Calico and most clouds do) or on the Linux bridge `cni0` (as flannel
does). Nodes reach each other's pods by plain routes, or through VXLAN. `addresses` says who has
which address, in both families.

    <cgroup v2>/ebpflb-lab-PID-K/NODE                a node: where its agent attaches
    <cgroup v2>/ebpflb-lab-PID-K/NODE/host           processes of the node itself
    <cgroup v2>/ebpflb-lab-PID-K/NODE/pods/POD       a pod's processes
    <cgroup v2>/ebpflb-lab-PID-K/outside/NAME        what belongs to no node, and virtual pods
    /sys/fs/bpf/ebpflb-lab-PID-K/NODE                the node's pin path; its agent makes it
    /run/netns/eblbPID-K-NAME                        a namespace

Service addresses have no route: an untranslated connect() fails at once, on a node for want of a
route (ENETUNREACH), from a pod by the node's ICMP answer. What netfilter or tc translates on the
host itself needs one: `default_route=True`.

The lab must know nothing of Services, of the agent, or of any data path.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from ebpflb.lab import addresses, janitor, netns, spawn
from ebpflb.lab.namespace import SYSCTLS, Namespace
from ebpflb.lab.spawn import LabError, Running

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["External", "Lab", "Node", "Pod", "Router"]

PodLinks = Literal["routed", "bridge"]
Overlay = Literal["none", "vxlan"]

VXLAN_BYTES: Final = 50
VXLAN_DEVICE: Final = "flannel.1"
POD_PREFIX: Final = "veth-"
NAME_MAX: Final = netns.IFNAME_MAX - len(POD_PREFIX)

# Of the node's end of every routed veth, as Calico has it. The pods know it beforehand: nobody
# answers ARP for their gateway, since no interface has its address.
GATEWAY_MAC: Final = "ee:ee:ee:ee:ee:ee"

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_counter = itertools.count(1)

_FORWARDING: Final[Mapping[str, str | int]] = {
    "net.ipv4.ip_forward": 1,
    "net.ipv6.conf.all.forwarding": 1,
}


class Pod(Namespace):
    """A pod: a namespace behind a veth of its node, or (host_network) the node's own.

    `device` is the node's end of its veth, "" for a pod on the host's network.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        *,
        number: int,
        host_network: bool,
        mtu: int,
        hairpin: bool,
        virtual: bool,
    ) -> None:
        super().__init__(
            node.lab,
            name,
            cgroup=(node.lab.cgroup / "outside" if virtual else node.cgroup_root / "pods") / name,
            ipv4=node.ipv4 if host_network else addresses.pod_ipv4(node.number, number),
            ipv6=node.ipv6 if host_network else addresses.pod_ipv6(node.number, number),
        )
        self.node = node
        self.number = number
        self.mtu = mtu
        self.host_network = host_network
        self.device = "" if host_network else f"{POD_PREFIX}{name}"
        self.cgroup.mkdir(parents=True)
        if host_network:
            self.netns = node.netns
            return
        self.netns = self.lab.make_netns(f"{node.name}-{name}")
        node.links(lambda links: self._plug_in(links, hairpin=hairpin))
        self.links(self._configure)

    def _plug_in(self, links: netns.Links, *, hairpin: bool) -> None:
        """Configure the node's end."""
        links.veth(self.device, peer="eth0", peer_netns=self.netns, mtu=self.mtu)
        if self.node.pod_links == "bridge":
            links.set(self.device, state="up", master="cni0")
            links.hairpin(self.device, on=hairpin)
            return
        links.set(self.device, state="up", address=GATEWAY_MAC)
        links.address(self.device, f"{addresses.POD_GATEWAY_IPV6}/64")
        links.route(f"{self.ipv4}/32", device=self.device, source=self.node.ipv4)
        links.route(f"{self.ipv6}/128", device=self.device, source=self.node.ipv6)

    def _configure(self, links: netns.Links) -> None:
        """Configure the pod's end."""
        netns.write_sysctls(SYSCTLS)
        links.set("lo", state="up")
        links.set("eth0", state="up")
        if self.node.pod_links == "bridge":
            links.address("eth0", f"{self.ipv4}/24")
            links.address("eth0", f"{self.ipv6}/64")
            links.route("default", via=addresses.pod_ipv4(self.node.number, 1))
            links.route("default6", via=addresses.pod_ipv6(self.node.number, 1))
        else:
            links.address("eth0", f"{self.ipv4}/32")
            links.address("eth0", f"{self.ipv6}/128")
            links.neighbour("eth0", addresses.POD_GATEWAY_IPV4, mac=GATEWAY_MAC)
            links.route(f"{addresses.POD_GATEWAY_IPV4}/32", device="eth0")
            links.route("default", via=addresses.POD_GATEWAY_IPV4, device="eth0")
            links.route("default6", via=addresses.POD_GATEWAY_IPV6, device="eth0")

    def remove(self) -> None:
        """End the pod: its processes (SIGKILL), its veth, its namespace. Its name is free then."""
        janitor.remove_cgroup(self.cgroup)
        if not self.host_network:
            self.node.links(lambda links: links.delete(self.device))
            janitor.remove_netns(self.netns.name)
        self.node.pods.pop(self.name, None)


class Node(Namespace):
    """A node: a namespace with pods, the folder its agent attaches to, a place for its pins.

    `cgroup_root` is what an agent is given as --cgroup, `pin_path` as --pin-path; programs started
    on the node itself live in `cgroup`, which lies below.
    """

    def __init__(
        self,
        lab: Lab,
        name: str,
        *,
        number: int,
        pod_links: PodLinks,
        pod_mtu: int,
        default_route: bool,
    ) -> None:
        self.cgroup_root = lab.cgroup / name
        super().__init__(
            lab,
            name,
            cgroup=self.cgroup_root / "host",
            ipv4=addresses.node_ipv4(number),
            ipv6=addresses.node_ipv6(number),
        )
        self.number = number
        self.pod_links: PodLinks = pod_links
        self.pod_mtu = pod_mtu
        self.pin_path = lab.pin_root / name
        self.pods: dict[str, Pod] = {}
        self.pods_ipv4 = addresses.pods_ipv4(number)
        self.pods_ipv6 = addresses.pods_ipv6(number)
        self.cgroup.mkdir(parents=True)
        self.make(_FORWARDING, lambda _: None)
        lab.plug_into_wire(self)
        self.links(lambda links: self._configure(links, default_route=default_route))

    @property
    def _tunnel_mac(self) -> str:
        return f"0e:b9:f1:b0:00:{self.number:02x}"

    def _configure(self, links: netns.Links, *, default_route: bool) -> None:
        links.address("eth0", f"{self.ipv4}/24")
        links.address("eth0", f"{self.ipv6}/64")
        links.set("eth0", state="up")
        if self.pod_links == "bridge":
            links.bridge("cni0", mtu=self.pod_mtu)
            links.address("cni0", f"{addresses.pod_ipv4(self.number, 1)}/24")
            links.address("cni0", f"{addresses.pod_ipv6(self.number, 1)}/64")
        if self.lab.overlay == "vxlan":
            links.vxlan(
                VXLAN_DEVICE,
                local=self.ipv4,
                parent="eth0",
                mac=self._tunnel_mac,
                mtu=self.lab.mtu - VXLAN_BYTES,
            )
            links.address(VXLAN_DEVICE, f"{addresses.pod_ipv4(self.number, 0)}/32")
            links.address(VXLAN_DEVICE, f"{addresses.pod_ipv6(self.number, 0)}/128")
        if default_route:
            links.route("default", via=addresses.ROUTER_INSIDE_IPV4)
            links.route("default6", via=addresses.ROUTER_INSIDE_IPV6)

    def reach(self, others: Iterable[Node], *, outside: bool) -> None:
        """Add the routes to other nodes' pods and to the outside."""

        def act(links: netns.Links) -> None:
            for other in others:
                if self.lab.overlay == "vxlan":
                    tunnel_ends = [
                        addresses.pod_ipv4(other.number, 0),
                        addresses.pod_ipv6(other.number, 0),
                    ]
                    links.tunnel_to(
                        VXLAN_DEVICE,
                        mac=other._tunnel_mac,  # noqa: SLF001 - of our own kind
                        via=other.ipv4,
                        neighbours=tunnel_ends,
                    )
                    for network, end in zip(
                        (other.pods_ipv4, other.pods_ipv6), tunnel_ends, strict=True
                    ):
                        links.route(network, via=end, device=VXLAN_DEVICE, onlink=True)
                else:
                    links.route(other.pods_ipv4, via=other.ipv4)
                    links.route(other.pods_ipv6, via=other.ipv6)
            if outside:
                links.route(addresses.OUTSIDE_IPV4, via=addresses.ROUTER_INSIDE_IPV4)
                links.route(addresses.OUTSIDE_IPV6, via=addresses.ROUTER_INSIDE_IPV6)

        self.links(act)

    def pod(
        self,
        name: str,
        *,
        number: int | None = None,
        mtu: int | None = None,
        host_network: bool = False,
        hairpin: bool = False,
        virtual: bool = False,
    ) -> Pod:
        """Make a pod. Names are the lab's, so that servers' answers are not ambiguous.

        number: the last part of its addresses; by default the lowest that is free, from 2.
        hairpin: on a bridge, let the pod's port send back what came from it.
        virtual: as in a virtual machine (Kata, KubeVirt): its processes are in no cgroup of the
        node's, so that the node sees its packets and never its sockets.
        """
        self.lab.check_name(name)
        taken = {pod.number for pod in self.pods.values()}
        free = [n for n in range(2, addresses.MAX_PODS + 2) if n not in taken]
        if host_network:
            number = 0
        elif number is None and free:
            number = free[0]
        elif number not in free:
            raise LabError(f"{self.name} has no address left, or {number} is taken or is none")
        pod = Pod(
            self,
            name,
            number=number,
            host_network=host_network,
            mtu=mtu or self.pod_mtu,
            hairpin=hairpin,
            virtual=virtual,
        )
        self.pods[name] = pod
        return pod


class Router(Namespace):
    """The way out: between the nodes' wire and the outside clients."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(
            lab,
            "edge",
            cgroup=lab.cgroup / "outside" / "edge",
            ipv4=addresses.ROUTER_INSIDE_IPV4,
            ipv6=addresses.ROUTER_INSIDE_IPV6,
        )
        self.cgroup.mkdir(parents=True)
        self.make(_FORWARDING, lambda _: None)
        lab.plug_into_wire(self)
        self.links(self._configure)

    def _configure(self, links: netns.Links) -> None:
        links.address("eth0", f"{self.ipv4}/24")
        links.address("eth0", f"{self.ipv6}/64")
        links.set("eth0", state="up")
        links.bridge("out0", mtu=self.lab.mtu)
        links.address("out0", f"{addresses.ROUTER_OUTSIDE_IPV4}/24")
        links.address("out0", f"{addresses.ROUTER_OUTSIDE_IPV6}/64")

    def reach(self, nodes: Iterable[Node]) -> None:
        """Add the routes to nodes' pods, as a network that knows them would."""

        def act(links: netns.Links) -> None:
            for node in nodes:
                links.route(node.pods_ipv4, via=node.ipv4)
                links.route(node.pods_ipv6, via=node.ipv6)

        self.links(act)

    def path_mtu(self, mtu: int) -> None:
        """Let what goes to the outside clients be of at most `mtu` bytes.

        The clients do not know (their interface's MTU, and so their MSS, stays): a node that sends
        more gets "fragmentation needed" or "packet too big" from here.
        """

        def act(links: netns.Links) -> None:
            links.route(addresses.OUTSIDE_IPV4, device="out0", mtu=mtu)
            links.route(addresses.OUTSIDE_IPV6, device="out0", mtu=mtu, metric=100)

        self.links(act)


class External(Namespace):
    """An outside client: it knows nothing of pods or Services, only its router."""

    def __init__(self, lab: Lab, name: str, *, number: int, router: Router) -> None:
        super().__init__(
            lab,
            name,
            cgroup=lab.cgroup / "outside" / name,
            ipv4=addresses.external_ipv4(number),
            ipv6=addresses.external_ipv6(number),
        )
        self.cgroup.mkdir(parents=True)
        self.make({}, lambda _: None)

        def plug_in(links: netns.Links) -> None:
            links.veth(f"to-{name}", peer="eth0", peer_netns=self.netns, mtu=lab.mtu)
            links.set(f"to-{name}", state="up", master="out0")

        router.links(plug_in)
        self.links(self._configure)

    def _configure(self, links: netns.Links) -> None:
        links.set("eth0", state="up")
        links.address("eth0", f"{self.ipv4}/24")
        links.address("eth0", f"{self.ipv6}/64")
        links.route("default", via=addresses.ROUTER_OUTSIDE_IPV4)
        links.route("default6", via=addresses.ROUTER_OUTSIDE_IPV6)


class Lab:
    """A small cluster; a context manager that builds on demand and takes all down at its end.

    Also when its process is killed: a janitor, a process of its own, watches it. What an earlier
    lab left behind, whose owner and janitor both died, goes when the next one starts.

    mtu: of the wire and all that hangs on it. overlay: how nodes reach each other's pods.
    Needs root, cgroup v2 somewhere and the commands unshare, nsenter, mount and umount.
    """

    def __init__(self, name: str = "lab", *, mtu: int = 1500, overlay: Overlay = "none") -> None:
        self.name = name
        self.mtu = mtu
        self.overlay: Overlay = overlay
        self.nodes: dict[str, Node] = {}
        self.externals: dict[str, External] = {}
        self.tag = f"{os.getpid()}-{next(_counter)}"
        self.cgroup = Path()
        self.pin_root = Path()
        self.folder = Path()  # temporary files; goes with the lab
        self._owner = os.getpid()
        self._router: Router | None = None
        self._wire: Namespace | None = None
        self._extras: set[str] = set()
        self._janitor: subprocess.Popen[bytes] | None = None
        self._processes: list[subprocess.Popen[Any]] = []

    # --- beginning and end --------------------------------------------------------------------

    def __enter__(self) -> Self:
        root = janitor.cgroup2_root()
        if root is None:
            raise LabError("cgroup v2 is not mounted: mount -t cgroup2 none /sys/fs/cgroup/unified")
        if os.geteuid():
            raise LabError("the lab makes network namespaces and cgroups: it needs root")
        for path in janitor.sweep():
            raise LabError(f"{path} of a dead lab could not be removed")
        self.cgroup = root / janitor.folder_name(self.tag)
        self.pin_root = _bpffs() / janitor.folder_name(self.tag)
        # First the one who cleans up, then what there is to clean.
        self._janitor = subprocess.Popen(
            spawn.python_program("janitor", self.tag),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self.folder = janitor.write_owner(self.tag, self._owner)
            (self.cgroup / "setup").mkdir(parents=True)
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._owner:
            return  # a fork that runs out of the same block
        left = self._take_down()
        if left:
            complaint = f"lab {self.name} left {', '.join(left)}"
            if error is None:
                raise LabError(complaint)
            error.add_note(complaint)

    def _take_down(self) -> list[str]:
        """Let the janitor do it, and do it oneself where that one has died."""
        if self._janitor is not None:
            assert self._janitor.stdin is not None  # noqa: S101 - made with a pipe
            self._janitor.stdin.close()
            try:
                self._janitor.wait(2 * janitor.DEADLINE_S)
            except subprocess.TimeoutExpired:
                self._janitor.kill()
                self._janitor.wait()
        left = janitor.teardown(self.tag) if janitor.leftovers(self.tag) else []
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        return left

    # --- what there is ------------------------------------------------------------------------

    def node(
        self,
        name: str,
        *,
        pod_links: PodLinks = "routed",
        pod_mtu: int | None = None,
        default_route: bool = False,
    ) -> Node:
        """Make a node, and the routes between it and what there is already.

        pod_links: "routed" or "bridge". pod_mtu: default the lab's, less VXLAN's share.
        default_route: through the router, which refuses what it does not know. In iptables mode a
        host's own connect() to a Service needs it: the route is looked up before the NAT.
        """
        self.check_name(name)
        number = len(self.nodes) + 1
        if number > addresses.MAX_NODES:
            raise LabError("the address plan ends at 99 nodes")
        if default_route:
            _ = self.router
        node = Node(
            self,
            name,
            number=number,
            pod_links=pod_links,
            pod_mtu=pod_mtu or self.mtu - (VXLAN_BYTES if self.overlay == "vxlan" else 0),
            default_route=default_route,
        )
        others = list(self.nodes.values())
        node.reach(others, outside=self._router is not None)
        for other in others:
            other.reach([node], outside=False)
        if self._router is not None:
            self._router.reach([node])
        self.nodes[name] = node
        return node

    @property
    def router(self) -> Router:
        """The router between the wire and the outside; made when first asked for."""
        if self._router is None:
            self._router = Router(self)
            self._router.reach(self.nodes.values())
            for node in self.nodes.values():
                node.reach([], outside=True)
        return self._router

    def external(self, name: str = "x") -> External:
        """Make an outside client, behind the router."""
        self.check_name(name)
        client = External(self, name, number=len(self.externals) + 1, router=self.router)
        self.externals[name] = client
        return client

    def namespace(self, name: str, *, forwarding: bool = False) -> Namespace:
        """Make a namespace with nothing but loopback, for what the lab has no word for."""
        self.check_name(name)
        extra = Namespace(self, name, cgroup=self.cgroup / "outside" / name)
        extra.cgroup.mkdir(parents=True)
        extra.make(_FORWARDING if forwarding else {}, lambda _: None)
        self._extras.add(name)
        return extra

    def link(
        self, one: Namespace, one_device: str, other: Namespace, other_device: str, *, mtu: int = 0
    ) -> None:
        """Join two namespaces by one more veth, both ends up and without addresses."""

        def act(links: netns.Links) -> None:
            links.veth(one_device, peer=other_device, peer_netns=other.netns, mtu=mtu or self.mtu)
            links.set(one_device, state="up")

        one.links(act)
        other.links(lambda links: links.set(other_device, state="up"))

    def tunnel(
        self, one: Namespace, one_device: str, other: Namespace, other_device: str, *, mtu: int = 0
    ) -> Running:
        """Join two namespaces by devices without an Ethernet header, both up, without addresses.

        A process carries the packets: it is slow, and the devices go when it ends. Raises OSError
        where the kernel has no tun devices.
        """
        ends = ((one, one_device), (other, other_device))
        descriptors: list[int] = []
        try:
            for place, device in ends:
                descriptors.append(place.inside(partial(netns.open_tun, device)))
            carrier = one.start_program("tun", *map(str, descriptors), pass_fds=descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        for place, device in ends:
            place.links(partial(_set_up, device=device, mtu=mtu or self.mtu))
        return carrier

    # --- for the parts of the lab -------------------------------------------------------------

    def check_name(self, name: str) -> None:
        """Refuse a name that is taken, or that is none."""
        taken = {"wire", "edge", "outside", "setup", *self.nodes, *self.externals, *self._extras}
        for node in self.nodes.values():
            taken |= node.pods.keys()
        if name in taken or len(name) > NAME_MAX or not _NAME.fullmatch(name):
            raise LabError(f"{name!r} is taken, or is not 1 to 10 letters, digits and dashes")

    def make_netns(self, name: str) -> Path:
        """Make a namespace under the lab's own name."""
        if self._janitor is None:
            raise LabError("a lab is used as a context manager: with Lab(…) as lab:")
        full = janitor.netns_prefix(self.tag) + name
        return netns.create([full], cgroup=self.cgroup / "setup")[0]

    def plug_into_wire(self, member: Namespace) -> None:
        """Give a namespace an eth0 that is a port of the wire's bridge."""
        wire = self._wire
        if wire is None:
            wire = Namespace(self, "wire", cgroup=self.cgroup / "outside" / "wire")
            wire.cgroup.mkdir(parents=True)
            wire.make({}, lambda links: links.bridge("wire0", mtu=self.mtu))
            self._wire = wire
        port = f"to-{member.name}"

        def act(links: netns.Links) -> None:
            links.veth(port, peer="eth0", peer_netns=member.netns, mtu=self.mtu)
            links.set(port, state="up", master="wire0")

        wire.links(act)

    def reap_at_end(self, process: subprocess.Popen[Any]) -> None:
        """Remember a process, whose end is waited for when the lab ends."""
        self._processes.append(process)


def _set_up(links: netns.Links, *, device: str, mtu: int) -> None:
    links.set(device, state="up", mtu=mtu)


def _bpffs() -> Path:
    """Return where bpffs is mounted; mount it at its usual place if it is nowhere.

    It stays mounted: systemd does the same at boot, and others may use it by then.
    """
    usual = Path("/sys/fs/bpf")
    if not janitor.bpffs_mounts():
        with netns.machine_lock():
            if not janitor.bpffs_mounts():
                subprocess.run(["mount", "-t", "bpf", "bpf", str(usual)], check=True)
    return janitor.bpffs_mounts()[0]
