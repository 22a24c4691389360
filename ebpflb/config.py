# SPDX-License-Identifier: Apache-2.0
"""What the agent was told, made into one Config: every wrong setting is named before anything runs.

Three things say it: the flags that are kube-proxy's, a KubeProxyConfiguration file in their place,
and the flags that are ours alone, which count beside either. Pure but for the host's name. This
file must not know how a command line or a file is taken apart.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ebpflb import durations
from ebpflb.durations import Duration
from ebpflb.errors import ConfigError
from ebpflb.kubeproxy import flags, rules
from ebpflb.kubeproxy.flags import FLAGS, LOG_FLAGS, Given
from ebpflb.kubeproxy.schema import MODE_SECTIONS, KubeProxyConfiguration, with_defaults
from ebpflb.model import format_address, parse_address, parse_network
from ebpflb.planner.options import PlannerOptions

DEFAULT_PIN_PATH = "/sys/fs/bpf/ebpflb"
SYNC_PERIOD_S = 30.0
AUDIT_PERIOD_S = 60.0
DEBUG_VERBOSITY: Final = 4
"""kube-proxy's level from which on it says what only debugging needs."""
EXTERNAL_IPS_GATE: Final = "AllowServiceExternalIPs"
REJECT_BIT: Final = 13
SOCKET_LB: Final = ("all", "host", "off")
"""Whose connects are translated at the socket: all, this node's own processes' alone, nobody's."""

_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?", re.ASCII)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's configuration. Addresses are ``IP:port``, "" switches the server off.

    ``manifests`` None: the API server says what exists, reached by ``kubeconfig`` and ``master``,
    which are "" for the pod's own credentials. ``min_sync_period_s`` None is the mode's default.

    ``devices`` and ``pod_devices`` are shell patterns of the names of uplinks and of pods' devices,
    None where they are to be found out, empty for none. ``socket_lb`` is a word of SOCKET_LB. The
    bits are of a packet's mark, 0 to 31. A TCP time-out of 0 is the kernel's own.

    ``config_file`` is to be watched, ``config_content`` is what it said (CFG-51). ``kube_proxy`` is
    the whole effective configuration in kube-proxy's shape, for /configz and for what is read
    nowhere else.
    """

    manifests: Path | None = None
    kubeconfig: str = ""
    master: str = ""
    node_name: str
    proxy_mode: str = "auto"
    pin_path: Path = Path(DEFAULT_PIN_PATH)
    cgroup: Path | None = None
    map_sizes: dict[str, int] = {}
    healthz_bind_address: str = "0.0.0.0:10256"
    metrics_bind_address: str = "127.0.0.1:10249"
    bind_address_hard_fail: bool = False
    sync_period_s: float = SYNC_PERIOD_S
    min_sync_period_s: float | None = None
    audit_period_s: float = AUDIT_PERIOD_S
    show_service_tcp: bool = False
    external_ips: tuple[str, ...] | None = None
    protect_node_ports: bool = False
    devices: tuple[str, ...] | None = None
    pod_devices: tuple[str, ...] | None = None
    socket_lb: str = "all"
    ping: bool = True
    preserve_client_ip_local: bool = False
    masquerade_bit: int = 14
    reject_bit: int = REJECT_BIT
    tcp_established_timeout_s: float = 86_400.0
    tcp_close_wait_timeout_s: float = 3_600.0
    config_file: Path | None = None
    config_content: bytes = b""
    log_json: bool = False
    verbosity: int = 0
    kube_proxy: KubeProxyConfiguration = with_defaults(KubeProxyConfiguration())


class Own(msgspec.Struct, frozen=True, kw_only=True):
    """The flags that are ours, and those of kube-proxy's that no file says; None is not given."""

    manifests: Path | None = None
    pin_path: Path = Path(DEFAULT_PIN_PATH)
    cgroup: Path | None = None
    map_sizes: tuple[str, ...] = ()
    sync_period: str | None = None
    audit_period: str | None = None
    tcp_peer_name: bool = False
    external_ips: tuple[str, ...] = ()
    protect_nodeports: bool = False
    devices: tuple[str, ...] = ()
    pod_devices: tuple[str, ...] = ()
    socket_lb: str = "all"
    ping: str = "on"
    preserve_client_ip_local: bool = False
    reject_bit: int = REJECT_BIT
    log_format: str | None = None
    hostname_override: str | None = None
    master: str = ""


class File(NamedTuple):
    """What ``--config`` names, and what it says, defaults not yet filled in.

    ``problems`` are what a strict reader would not have taken.
    """

    path: Path
    content: bytes
    config: KubeProxyConfiguration
    problems: tuple[str, ...] = ()


class Notice(NamedTuple):
    """Something the user should know that is no error: an event of the log and its fields.

    A field of "" has nothing to say.
    """

    event: str
    fields: Mapping[str, str]
    is_warning: bool = True


class Resolved(NamedTuple):
    config: Config
    notices: tuple[Notice, ...]


def require_supported(config: Config) -> None:
    """Raises ConfigError where the agent of this version cannot run so."""
    if config.proxy_mode not in {"auto", "ebpf"}:
        raise ConfigError(
            f"proxy mode {config.proxy_mode}: this version has eBPF mode only; "
            "--proxy-mode ebpf chooses it"
        )


def planner_options(config: Config) -> PlannerOptions:
    """What of it decides the plan.

    In a file of mode nftables that selects no addresses for NodePorts they answer at the Node's own
    addresses only, as that mode has it; in all others at every local one (NP-02).
    """
    kube_proxy = config.kube_proxy
    selected = kube_proxy.node_port_addresses or None
    if selected is None and kube_proxy.mode == "nftables":
        selected = ("primary",)
    return PlannerOptions(
        node_name=config.node_name,
        node_port_addresses=selected,
        localhost_node_ports=kube_proxy.iptables.localhost_node_ports,
        external_ips=config.external_ips,
        allow_external_ips=kube_proxy.feature_gates.get(EXTERNAL_IPS_GATE, True),
        detect_local_mode=kube_proxy.detect_local_mode,
        cluster_cidrs=tuple(text for text in kube_proxy.cluster_cidr.split(",") if text),
        bind_address=kube_proxy.bind_address,
        pod_bridge=kube_proxy.detect_local.bridge_interface,
        pod_device_prefix=kube_proxy.detect_local.interface_name_prefix,
        masquerade_all=kube_proxy.at(f"{kube_proxy.masquerade_section}.masqueradeAll"),
    )


def resolve(own: Own, given: Given, file: File | None = None) -> Resolved:
    """Everything that was said, as one Config. Raises ConfigError for what is wrong in it.

    With a file, kube-proxy's flags must be readable and are ignored, but for --proxy-mode,
    --hostname-override, --master and those on logging (CFG-38).
    """
    kube_proxy = flags.applied(with_defaults(KubeProxyConfiguration()), given)
    if file is not None:
        kube_proxy = with_defaults(file.config)
        if "proxy-mode" in given:
            kube_proxy = kube_proxy.replaced("mode", given["proxy-mode"][-1])
    kube_proxy = _with_own(flags.log_flags_applied(kube_proxy, given), own)
    names = _names(own, given, file)
    _require_sense(kube_proxy, names)
    section = kube_proxy.mode_section
    least: Duration | None = kube_proxy.at(f"{section}.minSyncPeriod")
    config = Config(
        manifests=own.manifests,
        kubeconfig=kube_proxy.client_connection.kubeconfig,
        master=own.master,
        node_name=_require_name(kube_proxy, names),
        proxy_mode="auto" if kube_proxy.mode in rules.MEANING_AUTO else kube_proxy.mode,
        pin_path=own.pin_path,
        cgroup=own.cgroup,
        map_sizes=parse_map_sizes(own.map_sizes),
        healthz_bind_address=kube_proxy.healthz_bind_address,
        metrics_bind_address=kube_proxy.metrics_bind_address,
        bind_address_hard_fail=kube_proxy.bind_address_hard_fail,
        sync_period_s=kube_proxy.at(f"{section}.syncPeriod").s,
        min_sync_period_s=None if least is None else least.s,
        audit_period_s=_audit_period_s(own),
        show_service_tcp=own.tcp_peer_name,
        external_ips=parse_external_ips(own.external_ips) if own.external_ips else None,
        protect_node_ports=own.protect_nodeports,
        devices=parse_device_patterns("--devices", own.devices),
        pod_devices=parse_device_patterns("--pod-devices", own.pod_devices),
        socket_lb=own.socket_lb,
        ping=own.ping == "on",
        preserve_client_ip_local=own.preserve_client_ip_local,
        masquerade_bit=kube_proxy.at(f"{kube_proxy.masquerade_section}.masqueradeBit"),
        reject_bit=_reject_bit(own, kube_proxy, names),
        tcp_established_timeout_s=kube_proxy.conntrack.tcp_established_timeout.s,
        tcp_close_wait_timeout_s=kube_proxy.conntrack.tcp_close_wait_timeout.s,
        config_file=None if file is None else file.path,
        config_content=b"" if file is None else file.content,
        log_json=kube_proxy.logging.format == "json",
        verbosity=kube_proxy.logging.verbosity,
        kube_proxy=kube_proxy,
    )
    return Resolved(config, tuple(_notices(config, given, file, names)))


def _with_own(kube_proxy: KubeProxyConfiguration, own: Own) -> KubeProxyConfiguration:
    """Our own flags, where they say what a field of kube-proxy's says too."""
    if own.sync_period is not None:
        period = parse_period("--sync-period", own.sync_period)
        kube_proxy = kube_proxy.replaced(f"{kube_proxy.mode_section}.syncPeriod", period)
    if own.log_format is not None:
        kube_proxy = kube_proxy.replaced("logging.format", own.log_format)
    if own.hostname_override:
        kube_proxy = kube_proxy.replaced("hostnameOverride", own.hostname_override)
    return kube_proxy


def _require_name(kube_proxy: KubeProxyConfiguration, names: _Names) -> str:
    name = node_name(kube_proxy.hostname_override or None)
    if not name:
        raise ConfigError(f"{names.of('hostnameOverride')}: the node's name is empty")
    return name


def _audit_period_s(own: Own) -> float:
    if own.audit_period is None:
        return AUDIT_PERIOD_S
    period = parse_period("--audit-period", own.audit_period)
    if period.ns <= 0:
        raise ConfigError(f"--audit-period {own.audit_period}: must be more than 0s")
    return period.s


def _reject_bit(own: Own, kube_proxy: KubeProxyConfiguration, names: _Names) -> int:
    path = f"{kube_proxy.masquerade_section}.masqueradeBit"
    if not 0 <= own.reject_bit <= 31:
        raise ConfigError(f"--reject-bit {own.reject_bit}: must be 0 to 31")
    if own.reject_bit == kube_proxy.at(path):
        raise ConfigError(
            f"--reject-bit {own.reject_bit}: is {names.of(path)} too; they must differ"
        )
    return own.reject_bit


def _require_sense(kube_proxy: KubeProxyConfiguration, names: _Names) -> None:
    wrong = rules.problems(kube_proxy, names.of)
    if len(wrong) > 1:
        raise ConfigError("\n  ".join([f"{len(wrong)} settings are wrong:", *wrong]))
    if wrong:
        raise ConfigError(wrong[0])


# --- names and notices ---------------------------------------------------------------------------


class _Names(NamedTuple):
    """What the user called each setting: by flag where a flag says it, else by file and field."""

    flags: Mapping[str, str]
    file: str

    def of(self, path: str) -> str:
        called = self.short(path)
        return f"{self.file}: {path}" if self.file and called == path else called

    def short(self, path: str) -> str:
        """Without the file."""
        whole, _, part = path.partition(".")
        if flag := self.flags.get(path.partition("[")[0]):
            return flag
        if flag := self.flags.get(whole):  # featureGates.X: one flag sets them all
            return f"{flag} {part}"
        return path


def _names(own: Own, given: Given, file: File | None) -> _Names:
    counting = LOG_FLAGS if file else (*FLAGS, *LOG_FLAGS)
    called = {flag.field: f"--{flag.name}" for flag in counting if flag.name in given}
    for name in flags.IN_NFTABLES:
        if flag := called.get(f"iptables.{name}"):
            called[f"nftables.{name}"] = flag
    if "proxy-mode" in given:
        called["mode"] = "--proxy-mode"
    for value, flag, fields in (
        (own.sync_period, "--sync-period", [f"{s}.syncPeriod" for s in MODE_SECTIONS]),
        (own.log_format, "--log-format", ["logging.format"]),
        (own.hostname_override, "--hostname-override", ["hostnameOverride"]),
    ):
        if value:
            called.update(dict.fromkeys(fields, flag))
    return _Names(called, str(file.path) if file else "")


def _notices(config: Config, given: Given, file: File | None, names: _Names) -> Iterator[Notice]:
    mode = config.kube_proxy.mode
    if file and file.problems:
        found = "; ".join(file.problems)
        yield Notice("read leniently", {"file": names.file, "problems": found})
    if file and (beside := _flags_beside_a_file(given)):
        yield Notice("flags ignored: --config is given", {"flags": ", ".join(beside)})
    if mode in rules.MEANING_AUTO - {"auto"} and (file or "proxy-mode" in given):
        fields = {"setting": names.of("mode"), "says": mode or '""'}
        yield Notice("proxy mode auto: eBPF where this kernel can", fields, is_warning=False)
    if without := dict(_without_effect(config, given, file, names)):
        yield Notice("settings without effect", {"file": names.file, **without})
    yield from _advice(config, names)


def _advice(config: Config, names: _Names) -> Iterator[Notice]:
    """What kube-proxy too says at its start: nothing is wrong, but somebody may not expect it."""
    kube_proxy = config.kube_proxy
    if not kube_proxy.node_port_addresses:
        answer = " ".join(planner_options(config).node_port_addresses or ("all",))
        fields = {"answer_at": answer, "action": "say where: --nodeport-addresses primary is best"}
        yield Notice("node port addresses are not set", fields, is_warning=False)
    elif not kube_proxy.iptables.localhost_node_ports and "localhost" in (
        kube_proxy.node_port_addresses
    ):
        fields = {
            "selected_by": names.of("nodePortAddresses"),
            "off_by": names.of("iptables.localhostNodePorts"),
        }
        yield Notice("NodePorts do not answer at localhost", fields)
    if kube_proxy.detect_local_mode == "ClusterCIDR" and not kube_proxy.cluster_cidr:
        fields = {
            "effect": "under externalTrafficPolicy Local they are treated as clients from outside, "
            "and nobody's packets to a ClusterIP are masqueraded",
            "action": "name the pods' range: --cluster-cidr, or another --detect-local-mode",
        }
        yield Notice("pods are not told from others", fields, is_warning=False)


def _without_effect(
    config: Config, given: Given, file: File | None, names: _Names
) -> Iterator[tuple[str, str]]:
    """Settings that were made in vain, in groups by why."""
    said = _said(config, given, file)
    nothing = rules.without_effect(said, config.kube_proxy)
    unused = _unused_flags(config, given, file)
    beside = "clientConnection.kubeconfig" if config.manifests and config.kubeconfig else ""
    for why, called in (
        ("mean_nothing_here", [*map(names.short, nothing), *unused]),
        ("not_beside_manifests", [names.short(beside)] if beside else []),
    ):
        if called:
            yield why, ", ".join(called)


def _flags_beside_a_file(given: Given) -> list[str]:
    return [f"--{flag.name}" for flag in FLAGS if flag.name in given and flag.name != "proxy-mode"]


def _unused_flags(config: Config, given: Given, file: File | None) -> list[str]:
    """The flags that set no field and change nothing."""
    unused = [f"--{name}" for name in ("boot-id-file", "machine-id-file") if name in given]
    for name, address in (
        ("healthz-port", config.healthz_bind_address),
        ("metrics-port", config.metrics_bind_address),
    ):
        port = flags.deprecated_port(given, name)
        if port and not address.endswith(f":{port}"):
            unused.append(f"--{name}")
    return [] if file else unused


def _said(config: Config, given: Given, file: File | None) -> list[str]:
    """The fields that somebody set: by a flag at all, in the file to another than the default."""
    counting = LOG_FLAGS if file else (*FLAGS, *LOG_FLAGS)
    paths = {flag.field: None for flag in counting if flag.name in given}
    if file:
        default = with_defaults(KubeProxyConfiguration())
        paths |= dict.fromkeys(rules.differing(with_defaults(file.config), default))
    paths.pop("featureGates", None)
    paths |= {f"featureGates.{name}": None for name in config.kube_proxy.feature_gates}
    paths.pop("", None)
    return list(paths)


# --- single settings -----------------------------------------------------------------------------


def node_name(override: str | None) -> str:
    """The node's name as Kubernetes spells it (EP-04): trimmed and in lower case."""
    return (override if override is not None else socket.gethostname()).strip().lower()


def parse_bind_address(flag: str, text: str) -> tuple[str, int]:
    """``(IP, port)`` of ``IP:port`` or ``[IP]:port``. Raises ConfigError naming the flag."""
    if not rules.is_host_port(text):
        raise ConfigError(f"{flag} {text}: must be IP:port, or empty to switch it off")
    host, _, port = text.rpartition(":")
    return format_address(parse_address(host.strip("[]"))), int(port)


def parse_period(flag: str, text: str) -> Duration:
    """A duration such as ``30s``, or a number of seconds. Raises ConfigError naming the flag."""
    try:
        return Duration.seconds(float(text)) if _NUMBER.fullmatch(text) else durations.parse(text)
    except ValueError:
        raise ConfigError(f"{flag} {text}: must be a duration such as 30s or 1m0s") from None


def parse_external_ips(texts: Iterable[str]) -> tuple[str, ...]:
    """CIDRs as given to --external-ips, any number of times; "" allows none."""
    found = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    for one in found:
        try:
            parse_network(one)
        except ValueError:
            raise ConfigError(f"--external-ips {one}: must be a CIDR, as 192.0.2.0/24") from None
    return found


def parse_device_patterns(flag: str, texts: Collection[str]) -> tuple[str, ...] | None:
    """Shell patterns as given to ``flag``, any number of times: none for "", None for not given.

    Raises ConfigError naming the flag for what no device's name can match.
    """
    found = tuple(part.strip() for text in texts for part in text.split(",") if part.strip())
    for one in found:
        if "/" in one or len(one.split()) > 1:
            raise ConfigError(f"{flag} {one}: must be a device's name, or a pattern such as eth*")
    return found if texts else None


def parse_map_sizes(texts: Iterable[str]) -> dict[str, int]:
    """``NAME=N,NAME=N`` as given to --map-size, any number of times."""
    found: dict[str, int] = {}
    for part in (one.strip() for text in texts for one in text.split(",")):
        name, _, size = part.partition("=")
        if not name or not size.isdecimal():
            raise ConfigError(f"--map-size {part}: must be NAME=N")
        found[name] = int(size)
    return found
