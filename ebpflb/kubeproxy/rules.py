# SPDX-License-Identifier: Apache-2.0
"""Whether a KubeProxyConfiguration makes sense, and which of its settings have no effect here.

Pure, and as strict as kube-proxy 1.37 where it checks (CFG-52), no stricter: what it starts with
must start here too. Two values of our own are taken besides, the modes auto and ebpf. This file
must not know which flags there are; how a setting is called in a message is told to it.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from ebpflb import durations
from ebpflb.durations import Duration
from ebpflb.kubeproxy.featuregates import KNOWN
from ebpflb.kubeproxy.schema import KubeProxyConfiguration
from ebpflb.model import Family, parse_address

Called = Callable[[str], str]
"""What the user called the field at this path: the path itself, or the flag that set it."""

MODES: Final = ("auto", "ebpf", "iptables", "ipvs", "nftables")
MEANING_AUTO: Final = frozenset({"", "auto", "ipvs", "nftables"})
LOCAL_MODES: Final = ("ClusterCIDR", "NodeCIDR", "BridgeInterface", "InterfaceNamePrefix")
KEYWORDS: Final = ("primary", "localhost", "all")

_NOT_NEGATIVE: Final = (
    "conntrack.maxPerCore",
    "conntrack.min",
    "conntrack.tcpEstablishedTimeout",
    "conntrack.tcpCloseWaitTimeout",
    "conntrack.udpTimeout",
    "conntrack.udpStreamTimeout",
    "clientConnection.burst",
)
_NOT_NEGATIVE_IN_IPVS: Final = ("ipvs.tcpTimeout", "ipvs.tcpFinTimeout", "ipvs.udpTimeout")
_VERSION: Final = re.compile(r"\d+\.\d+")


def problems(config: KubeProxyConfiguration, called: Called = str) -> list[str]:
    """What is wrong, a line each: the setting, its value, what is allowed."""
    found = [
        *_mode(config),
        *_periods(config),
        *_numbers(config),
        *_addresses(config),
        *_detection(config),
        *_logging(config),
        *_gates(config),
    ]
    return [f"{called(path)}{_shown(value)}: {what}" for path, value, what in found]


_Problem = tuple[str, object, str]
"""Path, value (None where the path says it), what is allowed."""


def _mode(config: KubeProxyConfiguration) -> Iterator[_Problem]:
    if config.mode and config.mode not in MODES:
        yield "mode", config.mode, f"must be one of {', '.join(MODES)}, or empty (auto)"


def _periods(config: KubeProxyConfiguration) -> Iterator[_Problem]:
    section = config.mode_section
    sync: Duration = config.at(f"{section}.syncPeriod")
    least: Duration | None = config.at(f"{section}.minSyncPeriod")
    for path, period in (
        ("configSyncPeriod", config.config_sync_period),
        (f"{section}.syncPeriod", sync),
    ):
        if period.ns <= 0:
            yield path, period, "must be more than 0s"
    if least is not None and least.ns < 0:
        yield f"{section}.minSyncPeriod", least, "must be 0s or more"
    elif least is not None and least.ns > sync.ns > 0:
        yield (
            f"{section}.minSyncPeriod",
            least,
            f"must not be more than syncPeriod, which is {sync}",
        )


def _numbers(config: KubeProxyConfiguration) -> Iterator[_Problem]:
    in_ipvs = _NOT_NEGATIVE_IN_IPVS if config.mode == "ipvs" else ()
    for path in (*_NOT_NEGATIVE, *in_ipvs):
        value = config.at(path)
        if isinstance(value, Duration) and value.ns < 0:
            yield path, value, "must be 0s or more; 0s leaves it as it is"
        elif isinstance(value, int) and value < 0:
            yield path, value, "must be 0 or more"
    bits = ["iptables", "nftables"] if config.mode == "nftables" else ["iptables"]
    for section in bits:
        bit = config.at(f"{section}.masqueradeBit")
        if not 0 <= bit <= 31:
            yield f"{section}.masqueradeBit", bit, "must be 0 to 31"
    if not -1000 <= config.oom_score_adj <= 1000:
        yield "oomScoreAdj", config.oom_score_adj, "must be -1000 to 1000"
    if not math.isfinite(config.client_connection.qps):
        yield "clientConnection.qps", config.client_connection.qps, "must be a number"


# --- addresses -----------------------------------------------------------------------------------


def _addresses(config: KubeProxyConfiguration) -> Iterator[_Problem]:
    if not _is_address(config.bind_address):
        yield "bindAddress", config.bind_address, "must be an IP address"
    for path in ("healthzBindAddress", "metricsBindAddress"):
        text = config.at(path)
        if text and not is_host_port(text):
            yield path, text, "must be IP:port, as 127.0.0.1:10249 or [::1]:10249"
    seen = set()
    for index, text in enumerate(config.node_port_addresses or ()):
        path = f"nodePortAddresses[{index}]"
        if text in KEYWORDS and text in seen:
            yield path, text, "must be given once"
        elif text not in KEYWORDS and cidr_family(text) is None:
            yield path, text, f"must be a CIDR, as 10.0.0.0/8, or one of {', '.join(KEYWORDS)}"
        seen.add(text)
    if config.mode == "ipvs":
        for index, text in enumerate(config.ipvs.exclude_cidrs or ()):
            if cidr_family(text) is None:
                yield f"ipvs.excludeCIDRs[{index}]", text, "must be a CIDR, as 10.0.0.0/8"


def _detection(config: KubeProxyConfiguration) -> Iterator[_Problem]:
    mode, detect = config.detect_local_mode, config.detect_local
    if mode not in LOCAL_MODES:
        yield "detectLocalMode", mode, f"must be one of {', '.join(LOCAL_MODES)}"
    elif mode == "BridgeInterface" and not detect.bridge_interface:
        yield "detectLocal.bridgeInterface", "", "must name a bridge: detectLocalMode asks for one"
    elif mode == "InterfaceNamePrefix" and not detect.interface_name_prefix:
        yield (
            "detectLocal.interfaceNamePrefix",
            "",
            "must be how pods' devices begin: detectLocalMode asks for it",
        )
    elif mode == "ClusterCIDR" and config.cluster_cidr:
        families = [cidr_family(text) for text in config.cluster_cidr.split(",")]
        if None in families or len(families) > 2 or len(set(families)) < len(families):
            yield (
                "clusterCIDR",
                config.cluster_cidr,
                "must be one CIDR, or one of each family, as 10.0.0.0/8,fd00::/48",
            )


def is_host_port(text: str) -> bool:
    """Whether it is ``IP:port`` or ``[IPv6]:port`` with a port of 1 to 65535."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        return False
    return _is_address(host) and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535


def cidr_family(text: str) -> Family | None:
    """The family of ``address/prefix``, whose host bits may be set; None where it is no CIDR."""
    address, slash, prefix = text.partition("/")
    longest = 128 if ":" in address else 32
    if not (slash and prefix.isascii() and prefix.isdigit() and int(prefix) <= longest):
        return None
    return (Family.IPV6 if longest == 128 else Family.IPV4) if _is_address(address) else None


def _is_address(text: str) -> bool:
    try:
        parse_address(text)
    except ValueError:
        return False
    return True


# --- the rest ------------------------------------------------------------------------------------


def _logging(config: KubeProxyConfiguration) -> Iterator[_Problem]:
    if config.logging.format not in {"text", "json"}:
        yield "logging.format", config.logging.format, "must be text or json"
    frequency = config.logging.flush_frequency
    try:
        durations.parse(str(frequency))
    except ValueError:
        yield "logging.flushFrequency", frequency, "must be a duration such as 5s"
    version = config.show_hidden_metrics_for_version
    if version and not _VERSION.fullmatch(version):
        yield "showHiddenMetricsForVersion", version, "must be MAJOR.MINOR, as 1.36"


def _gates(config: KubeProxyConfiguration) -> Iterator[_Problem]:
    for name in config.feature_gates:
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.8)
            hint = f": is {near[0]} meant?" if near else ""
            yield f"featureGates.{name}", None, f"is no feature gate of Kubernetes{hint}"


def _shown(value: object) -> str:
    if value is None:
        return ""
    return f" {value}" if str(value) else ' ""'


# --- settings without effect ---------------------------------------------------------------------

MEANS_NOTHING: Final = (
    "clientConnection.acceptContentTypes",
    "clientConnection.contentType",
    "configSyncPeriod",
    "enableProfiling",
    "featureGates",
    "logging.flushFrequency",
    "logging.options",
    "logging.vmodule",
    "ipvs",
    "nftables",
    "portRange",
    "showHiddenMetricsForVersion",
    "windowsRunAsService",
    "winkernel",
)
"""What has no meaning in this data path or this agent; docs/configuration.md says why for each."""

_GATES_WITH_EFFECT: Final = ("featureGates.AllowServiceExternalIPs",)

_PERIODS: Final = ("syncPeriod", "minSyncPeriod")
_MASQUERADING: Final = ("masqueradeAll", "masqueradeBit")


def without_effect(paths: Iterable[str], config: KubeProxyConfiguration) -> list[str]:
    """Those of ``paths`` that mean nothing here; of a mode's own settings, by the mode chosen."""
    counting = {
        *(f"{config.mode_section}.{name}" for name in _PERIODS),
        *(f"{config.masquerade_section}.{name}" for name in _MASQUERADING),
        *_GATES_WITH_EFFECT,
    }
    of_a_mode = {*_PERIODS, *_MASQUERADING}
    return [
        path
        for path in paths
        if path not in counting
        and (path.rpartition(".")[2] in of_a_mode or _is_under(path, MEANS_NOTHING))
    ]


def _is_under(path: str, roots: Iterable[str]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def differing(config: KubeProxyConfiguration, default: KubeProxyConfiguration) -> list[str]:
    """The paths of the fields that are not as in ``default``, in the schema's order."""
    return list(_differing(config, default, ""))


def _differing(one: object, other: object, path: str) -> Iterator[str]:
    if isinstance(one, msgspec.Struct):
        for field in msgspec.structs.fields(one):
            at = f"{path}.{field.encode_name}".removeprefix(".")
            yield from _differing(getattr(one, field.name), getattr(other, field.name), at)
    elif isinstance(one, dict):
        yield from (f"{path}.{key}" for key in one)
    elif (one or None) != (other or None):
        yield path
