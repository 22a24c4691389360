# SPDX-License-Identifier: Apache-2.0
"""What the agent was told, checked: every wrong flag is named before anything is touched."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ebpflb.errors import ConfigError

DEFAULT_PIN_PATH = "/sys/fs/bpf/ebpflb"
SYNC_PERIOD_S = 30.0
AUDIT_PERIOD_S = 60.0

_MODES = ("auto", "ebpf", "iptables")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's configuration. Addresses are ``IP:port``, "" switches the server off."""

    manifests: Path
    node_name: str
    proxy_mode: str = "auto"
    pin_path: Path = Path(DEFAULT_PIN_PATH)
    cgroup: Path | None = None
    map_sizes: dict[str, int] = {}
    healthz_bind_address: str = "0.0.0.0:10256"
    metrics_bind_address: str = "127.0.0.1:10249"
    bind_address_hard_fail: bool = False
    sync_period_s: float = SYNC_PERIOD_S
    audit_period_s: float = AUDIT_PERIOD_S
    show_service_tcp: bool = False

    def checked(self) -> Config:
        """Itself. Raises ConfigError naming the flag that is wrong."""
        if self.proxy_mode not in _MODES:
            raise ConfigError(f"--proxy-mode {self.proxy_mode}: must be one of {', '.join(_MODES)}")
        if self.proxy_mode == "iptables":
            raise ConfigError("--proxy-mode iptables: this version has eBPF mode only")
        if not self.node_name:
            raise ConfigError("--hostname-override: the node's name is empty")
        for flag, address in (
            ("--healthz-bind-address", self.healthz_bind_address),
            ("--metrics-bind-address", self.metrics_bind_address),
        ):
            if address:
                parse_bind_address(flag, address)
        if self.sync_period_s <= 0:
            raise ConfigError(f"--sync-period {self.sync_period_s}: must be more than 0")
        if self.audit_period_s <= 0:
            raise ConfigError(f"--audit-period {self.audit_period_s}: must be more than 0")
        return self


def node_name(override: str | None) -> str:
    """The node's name as Kubernetes spells it (EP-04): trimmed and in lower case."""
    return (override if override is not None else socket.gethostname()).strip().lower()


def parse_bind_address(flag: str, text: str) -> tuple[str, int]:
    """``(IP, port)`` of ``IP:port`` or ``[IP]:port``. Raises ConfigError naming the flag."""
    host, _, port = text.rpartition(":")
    try:
        address = str(ipaddress.ip_address(host.strip("[]")))
        number = int(port)
    except ValueError:
        address, number = "", 0
    if not 1 <= number <= 65535:
        raise ConfigError(f"{flag} {text}: must be IP:port, or empty to switch it off")
    return address, number


def parse_map_sizes(texts: Iterable[str]) -> dict[str, int]:
    """``NAME=N,NAME=N`` as given to --map-size, any number of times."""
    found: dict[str, int] = {}
    for part in (one.strip() for text in texts for one in text.split(",")):
        name, _, size = part.partition("=")
        if not name or not size.isdecimal():
            raise ConfigError(f"--map-size {part}: must be NAME=N")
        found[name] = int(size)
    return found
