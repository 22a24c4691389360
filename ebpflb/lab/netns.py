# SPDX-License-Identifier: Apache-2.0
"""Makes network namespaces and configures what is in them.

Every interface is made inside a namespace of the lab's own, both ends of a veth at once: the
machine's own namespace is never touched, not even for a moment. It must know nothing of nodes,
pods or address plans.
"""

import array
import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from pyroute2 import IPRoute, netns

from ebpflb.lab.janitor import NETNS_FOLDER
from ebpflb.lab.spawn import LabError

__all__ = [
    "IFNAME_MAX",
    "OFFLOADS",
    "Links",
    "create",
    "inside",
    "links",
    "open_tun",
    "write_sysctls",
]

T = TypeVar("T")

IFNAME_MAX: Final = 15
_NODAD: Final = 0x02  # IFA_F_NODAD: the address is usable at once
_RTAX_MTU: Final = 2
_ONLINK: Final = "onlink"

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000

_SIOCETHTOOL: Final = 0x8946
OFFLOADS: Final[Mapping[str, int]] = {
    # ETHTOOL_SRXCSUM and its like
    "rx-checksum": 0x15,
    "tx-checksum": 0x17,
    "scatter": 0x19,
    "tso": 0x1F,
    "gso": 0x24,
    "gro": 0x2C,
}

# The file must be there before unshare mounts the new namespace on it, and go if that fails.
_CREATE: Final = """
echo 0 > "$1/cgroup.procs"; shift
for name; do
    : > "$name" && unshare --net="$name" true || { rm -f "$name"; exit 1; }
done
"""


@contextlib.contextmanager
def machine_lock() -> Iterator[None]:
    """Hold what labs do to the machine itself: one at a time, whichever process they are in."""
    lock = os.open("/run", os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _mounted(path: Path) -> bool:
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    return any(line.split()[1] == str(path) for line in mounts)


def _share_folder() -> None:
    """Make /run/netns what `ip netns add` makes of it at its first use.

    Were that to happen later, our namespaces would be mounted twice, and once for ever.
    """
    if _mounted(NETNS_FOLDER):
        return
    with machine_lock():
        NETNS_FOLDER.mkdir(exist_ok=True)
        if not _mounted(NETNS_FOLDER):
            for command in (["--bind", str(NETNS_FOLDER)], ["--make-rshared"]):
                subprocess.run(["mount", *command, str(NETNS_FOLDER)], check=True)


def create(names: list[str], *, cgroup: Path) -> list[Path]:
    """Make namespaces; the makers live in `cgroup`, so that they end with the lab.

    Return the paths under /run/netns.
    """
    _share_folder()
    paths = [NETNS_FOLDER / name for name in names]
    ran = subprocess.run(
        ["sh", "-c", _CREATE, "create", cgroup, *paths],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    if ran.returncode:
        raise LabError(f"namespaces {' '.join(names)} could not be made: {ran.stderr.strip()}")
    return paths


def inside(path: Path, act: Callable[[], T]) -> T:
    """Call a function in a namespace and return its result; what it raises is raised.

    It runs in a thread of its own, since a thread can enter a namespace alone (and a process
    cannot leave one behind it by mistake this way). Sockets it returns stay in the namespace.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            netns.setns(str(path), flags=0, fork=False)
            results.append(act())
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=enter, name=f"inside {path.name}")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def links(path: Path, act: "Callable[[Links], T]") -> T:
    """Call a function with a way to configure a namespace's interfaces."""

    def open_and_act() -> T:
        with IPRoute() as ipr:
            return act(Links(ipr, path))

    return inside(path, open_and_act)


def open_tun(name: str) -> int:
    """Make a tun device in the namespace that the caller is in; it lives as long as the descriptor.

    Raises OSError where the kernel has none.
    """
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    try:
        request = struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(descriptor, _TUNSETIFF, request)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def write_sysctls(settings: Mapping[str, str | int]) -> None:
    """Write sysctls of the namespace that the caller is in; "net.ipv4.ip_forward" for example.

    A name's dots are slashes, an interface's own dots stay if written with slashes already.
    """
    for name, value in settings.items():
        path = name if "/" in name else name.replace(".", "/")
        (Path("/proc/sys") / path).write_text(str(value))


class Links:
    """The interfaces, addresses and routes of the namespace that the caller is in."""

    def __init__(self, ipr: Any, path: Path) -> None:
        self.ipr = ipr
        self._path = path
        self._indices: dict[str, int] = {}

    def index(self, name: str) -> int:
        """Return an interface's number."""
        if name not in self._indices:
            found = self.ipr.link_lookup(ifname=name)
            if not found:
                raise LabError(f"{self._path.name} has no interface {name}")
            self._indices[name] = found[0]
        return self._indices[name]

    def names(self) -> list[str]:
        """Return the names of all interfaces."""
        return [link.get_attr("IFLA_IFNAME") for link in self.ipr.get_links()]

    def mac(self, name: str) -> str:
        """Return an interface's hardware address."""
        return str(self.ipr.get_links(self.index(name))[0].get_attr("IFLA_ADDRESS"))

    def veth(self, name: str, *, peer: str, peer_netns: Path, mtu: int) -> None:
        """Make a veth here whose other end is made in another namespace."""
        if max(len(name), len(peer)) > IFNAME_MAX:
            raise LabError(f"{name} and {peer}: an interface's name has at most 15 characters")
        descriptor = os.open(peer_netns, os.O_RDONLY)
        try:
            other = {"ifname": peer, "mtu": mtu, "net_ns_fd": descriptor}
            self.ipr.link("add", ifname=name, kind="veth", mtu=mtu, peer=other)
        finally:
            os.close(descriptor)

    def bridge(self, name: str, *, mtu: int) -> None:
        """Make a Linux bridge and set it up. No spanning tree: its ports forward at once."""
        self.ipr.link("add", ifname=name, kind="bridge", br_stp_state=0)
        self.set(name, state="up", mtu=mtu)

    def set(self, name: str, **changes: object) -> None:
        """Change an interface: state="up", mtu=1400, address=…, master="cni0"."""
        master = changes.pop("master", None)
        if isinstance(master, str):
            changes["master"] = self.index(master)
        self.ipr.link("set", index=self.index(name), **changes)

    def offload(self, name: str, *offloads: str, on: bool) -> None:
        """Switch what an interface does for the kernel (keys of OFFLOADS; default all of them)."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for offload in offloads or OFFLOADS:
                value = array.array("I", [OFFLOADS[offload], int(on)])
                where, _ = value.buffer_info()
                fcntl.ioctl(sock, _SIOCETHTOOL, struct.pack("16sP16x", name.encode(), where))

    def hairpin(self, name: str, *, on: bool) -> None:
        """Let a bridge send back through a port what came in through it."""
        self.ipr.brport("set", index=self.index(name), mode=int(on))

    def delete(self, name: str) -> None:
        """Delete an interface if it is there."""
        for index in self.ipr.link_lookup(ifname=name):
            self.ipr.link("del", index=index)
        self._indices.pop(name, None)

    def address(self, name: str, address: str) -> None:
        """Add "address/length" to an interface, without duplicate address detection."""
        host, _, length = address.partition("/")
        flags = {"flags": _NODAD} if ":" in host else {}
        self.ipr.addr("add", index=self.index(name), address=host, prefixlen=int(length), **flags)

    def route(
        self,
        destination: str,
        *,
        via: str = "",
        device: str = "",
        source: str = "",
        mtu: int = 0,
        metric: int = 0,
        onlink: bool = False,
    ) -> None:
        """Add or replace a route; "default" with a gateway alone, "default6" likewise.

        mtu: a fixed path MTU, for what is forwarded too. metric: the lowest one wins; 0 is the
        family's default, 256 an IPv6 address's own route.
        """
        request: dict[str, Any] = {}
        if destination in {"default", "default6"}:
            request["family"] = 10 if destination == "default6" else 2
        else:
            request["dst"] = destination
        if via:
            request["gateway"] = via
        if device:
            request["oif"] = self.index(device)
            if not via and ":" not in destination:
                request["scope"] = "link"
        if source:
            request["prefsrc"] = source
        if mtu:
            request["metrics"] = {"mtu": mtu, "lock": 1 << _RTAX_MTU}
        if metric:
            request["priority"] = metric
        if onlink:
            request["flags"] = [_ONLINK]
        self.ipr.route("replace", **request)

    def vxlan(self, name: str, *, local: str, parent: str, mac: str, mtu: int) -> None:
        """Make a VXLAN device as flannel does: network 1, port 8472, no learning."""
        self.ipr.link(
            "add",
            ifname=name,
            kind="vxlan",
            vxlan_id=1,
            vxlan_local=local,
            vxlan_link=self.index(parent),
            vxlan_port=8472,
            vxlan_learning=0,
            address=mac,
        )
        self.set(name, state="up", mtu=mtu)

    def tunnel_to(self, name: str, *, mac: str, via: str, neighbours: list[str]) -> None:
        """Say where a VXLAN device finds a hardware address, and whose it is."""
        self.ipr.fdb("add", ifindex=self.index(name), lladdr=mac, dst=via)
        for address in neighbours:
            self.neighbour(name, address, mac=mac)

    def neighbour(self, name: str, address: str, *, mac: str) -> None:
        """Say for good which hardware address an address has."""
        index = self.index(name)
        self.ipr.neigh("replace", ifindex=index, dst=address, lladdr=mac, state="permanent")
