# SPDX-License-Identifier: Apache-2.0
"""KubeProxyConfiguration v1alpha1 as values: every field that kube-proxy has, and its defaults.

Pure. The fields' documentation is kube-proxy's own. This file must not know where a value came
from, whether it is any good, nor what ebpflb makes of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from ebpflb.durations import MINUTE, Duration, S
from ebpflb.model import Family, family_of, parse_address

API_VERSION: Final = "kubeproxy.config.k8s.io/v1alpha1"
GROUP: Final = "kubeproxy.config.k8s.io"
KIND: Final = "KubeProxyConfiguration"

HEALTHZ_PORT: Final = 10256
METRICS_PORT: Final = 10249

MODE_SECTIONS: Final = ("iptables", "ipvs", "nftables")
"""The sections that say the periods of one mode each."""

Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_ZERO: Final = Duration(0)
_SYNC_PERIOD: Final = Duration(30 * S)


class _Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A mapping of the file; its keys are the fields' names in camel case unless said."""


class ClientConnection(_Section, frozen=True, kw_only=True):
    kubeconfig: str = ""
    accept_content_types: str = ""
    content_type: str = ""
    qps: float = 0.0
    burst: Int32 = 0


class IPTables(_Section, frozen=True, kw_only=True):
    """``min_sync_period`` None is unset, and then a matter of the mode: design, section 5."""

    masquerade_bit: Int32 = 14
    masquerade_all: bool = False
    localhost_node_ports: bool = True
    sync_period: Duration = _ZERO
    min_sync_period: Duration | None = None


class IPVS(_Section, frozen=True, kw_only=True):
    sync_period: Duration = _ZERO
    min_sync_period: Duration | None = None
    scheduler: str = ""
    exclude_cidrs: tuple[str, ...] | None = msgspec.field(default=None, name="excludeCIDRs")
    strict_arp: bool = msgspec.field(default=False, name="strictARP")
    tcp_timeout: Duration = _ZERO
    tcp_fin_timeout: Duration = _ZERO
    udp_timeout: Duration = _ZERO


class NFTables(_Section, frozen=True, kw_only=True):
    masquerade_bit: Int32 = 14
    masquerade_all: bool = False
    sync_period: Duration = _ZERO
    min_sync_period: Duration | None = None


class Winkernel(_Section, frozen=True, kw_only=True):
    network_name: str = ""
    source_vip: str = ""
    enable_dsr: bool = msgspec.field(default=False, name="enableDSR")
    root_hns_endpoint_name: str = ""
    forward_health_check_vip: bool = False


class DetectLocal(_Section, frozen=True, kw_only=True):
    bridge_interface: str = ""
    interface_name_prefix: str = ""


class Conntrack(_Section, frozen=True, kw_only=True):
    """Limits and time-outs of the kernel's connection tracking; 0 leaves one as it is."""

    max_per_core: Int32 = 32768
    min: Int32 = 131072
    tcp_established_timeout: Duration = Duration(24 * 60 * MINUTE)
    tcp_close_wait_timeout: Duration = Duration(60 * MINUTE)
    tcp_be_liberal: bool = False
    udp_timeout: Duration = _ZERO
    udp_stream_timeout: Duration = _ZERO


class VModule(_Section, frozen=True, kw_only=True):
    file_pattern: str = ""
    verbosity: int = 0


class OutputRouting(_Section, frozen=True, kw_only=True):
    split_stream: bool = False
    info_buffer_size: str | int = "0"


class FormatOptions(_Section, frozen=True, kw_only=True):
    text: OutputRouting = OutputRouting()
    json: OutputRouting = OutputRouting()


class Logging(_Section, frozen=True, kw_only=True):
    """``flush_frequency`` is a duration, or a number of nanoseconds."""

    format: str = ""
    flush_frequency: str | int = 0
    verbosity: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    vmodule: tuple[VModule, ...] = ()
    options: FormatOptions = FormatOptions()


class KubeProxyConfiguration(_Section, frozen=True, kw_only=True):
    """The whole of it. What a field of zero or "" means is settled by ``with_defaults``."""

    api_version: str = API_VERSION
    kind: str = KIND
    feature_gates: dict[str, bool] = {}
    client_connection: ClientConnection = ClientConnection()
    logging: Logging = Logging()
    hostname_override: str = ""
    bind_address: str = ""
    healthz_bind_address: str = ""
    metrics_bind_address: str = ""
    bind_address_hard_fail: bool = False
    enable_profiling: bool = False
    show_hidden_metrics_for_version: str = ""
    mode: str = ""
    iptables: IPTables = IPTables()
    ipvs: IPVS = IPVS()
    nftables: NFTables = NFTables()
    winkernel: Winkernel = Winkernel()
    detect_local_mode: str = ""
    detect_local: DetectLocal = DetectLocal()
    cluster_cidr: str = msgspec.field(default="", name="clusterCIDR")
    node_port_addresses: tuple[str, ...] | None = None
    oom_score_adj: Int32 = -999
    conntrack: Conntrack = Conntrack()
    config_sync_period: Duration = _ZERO
    port_range: str = ""
    windows_run_as_service: bool = False

    def at(self, path: str) -> Any:
        """The value at ``path``, as the file spells it: ``iptables.syncPeriod``."""
        value: Any = self
        for name in path.split("."):
            value = getattr(value, _attribute(type(value), name))
        return value

    def replaced(self, path: str, value: object) -> KubeProxyConfiguration:
        """A copy with another value at ``path``."""
        changed: KubeProxyConfiguration = _replaced(self, path.split("."), value)
        return changed

    @property
    def mode_section(self) -> str:
        """Which section holds the periods of ``mode``, as kube-proxy chooses it."""
        return self.mode if self.mode in {"ipvs", "nftables"} else "iptables"

    @property
    def masquerade_section(self) -> str:
        """Which section says what is masqueraded; ipvs has no such settings of its own."""
        return "nftables" if self.mode == "nftables" else "iptables"


def _attribute(section: type, name: str) -> str:
    return next(f.name for f in msgspec.structs.fields(section) if f.encode_name == name)


def _replaced(section: Any, path: list[str], value: object) -> Any:
    name = _attribute(type(section), path[0])
    if path[1:]:
        value = _replaced(getattr(section, name), path[1:], value)
    return msgspec.structs.replace(section, **{name: value})


# --- defaults ------------------------------------------------------------------------------------


def with_defaults(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    """What kube-proxy makes of a file's fields that are zero or "" (kubeadm writes many of them).

    That is the default, for the addresses of the servers too: in a file "" does not switch them
    off. Numbers that may be 0 (masqueradeBit, oomScoreAdj, conntrack's) keep it.
    """
    config = _with_default_addresses(config)
    for path, default in _WHERE_ZERO:
        if not _is_set(config.at(path)):
            config = config.replaced(path, default)
    for section in MODE_SECTIONS:
        path = f"{section}.minSyncPeriod"
        if not _is_set(config.at(path)):
            config = config.replaced(path, None)
    frequency = config.logging.flush_frequency or 5 * S
    text = str(Duration(frequency)) if isinstance(frequency, int) else frequency
    return config.replaced("logging.flushFrequency", text)


_WHERE_ZERO: Final[tuple[tuple[str, object], ...]] = (
    ("iptables.syncPeriod", _SYNC_PERIOD),
    ("ipvs.syncPeriod", _SYNC_PERIOD),
    ("nftables.syncPeriod", _SYNC_PERIOD),
    ("configSyncPeriod", Duration(15 * MINUTE)),
    ("clientConnection.contentType", "application/vnd.kubernetes.protobuf"),
    ("clientConnection.qps", 5.0),
    ("clientConnection.burst", 10),
    ("detectLocalMode", "ClusterCIDR"),
    ("logging.format", "text"),
)


def _is_set(value: object) -> bool:
    return value not in (None, "", 0, _ZERO)


def _with_default_addresses(config: KubeProxyConfiguration) -> KubeProxyConfiguration:
    bind = config.bind_address or "0.0.0.0"  # noqa: S104 - kube-proxy's default; nobody binds to it
    return msgspec.structs.replace(
        config,
        bind_address=bind,
        healthz_bind_address=with_port(config.healthz_bind_address, HEALTHZ_PORT)
        or default_healthz_address(bind),
        metrics_bind_address=with_port(config.metrics_bind_address, METRICS_PORT)
        or default_metrics_address(bind),
    )


def default_healthz_address(bind_address: str) -> str:
    host = "[::]" if _is_ipv6(bind_address) else "0.0.0.0"  # noqa: S104 - probes come from outside
    return f"{host}:{HEALTHZ_PORT}"


def default_metrics_address(bind_address: str) -> str:
    host = "[::1]" if _is_ipv6(bind_address) else "127.0.0.1"
    return f"{host}:{METRICS_PORT}"


def with_port(text: str, port: int) -> str:
    """``IP:port`` for a bare IP, anything else as it is."""
    try:
        parse_address(text)
    except ValueError:
        return text
    return f"[{text}]:{port}" if ":" in text else f"{text}:{port}"


def _is_ipv6(text: str) -> bool:
    try:
        return family_of(parse_address(text)) is Family.IPV6
    except ValueError:
        return False


# --- as plain data -------------------------------------------------------------------------------

_OMITTED_WHERE_EMPTY: Final = ("featureGates", "windowsRunAsService")


def as_builtins(config: KubeProxyConfiguration) -> dict[str, Any]:
    """As kube-proxy writes it: its field names, durations as texts, whole numbers without ``.0``.

    ``minSyncPeriod`` where unset is ``0s``, which reads as unset again, here and by kube-proxy.
    """
    data: dict[str, Any] = msgspec.to_builtins(config, enc_hook=_text_of)
    for section in MODE_SECTIONS:
        data[section]["minSyncPeriod"] = data[section]["minSyncPeriod"] or "0s"
    for name in _OMITTED_WHERE_EMPTY:
        if not data[name]:
            del data[name]
    logging = data["logging"]
    if not logging["vmodule"]:
        del logging["vmodule"]
    for routing in logging["options"].values():
        routing["infoBufferSize"] = str(routing["infoBufferSize"])
        if not routing["splitStream"]:
            del routing["splitStream"]
    qps = data["clientConnection"]["qps"]
    if qps == int(qps):
        data["clientConnection"]["qps"] = int(qps)
    return data


def _text_of(value: object) -> str:
    if isinstance(value, Duration):
        return str(value)
    raise NotImplementedError(f"{type(value)} has no text")


def field_types(section: type) -> Mapping[str, Any]:
    """The fields of a section by the names that the file gives them, with their types."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(section)}
