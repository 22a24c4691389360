# SPDX-License-Identifier: Apache-2.0
"""kube-proxy's flags: what each is called, which field it sets, and how its text is read.

Pure: texts in, a KubeProxyConfiguration out. Values are read as pflag reads them; whether they make
sense is for ``rules``. This file must not know how a command line is taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from ebpflb import durations
from ebpflb.errors import ConfigError
from ebpflb.kubeproxy.schema import (
    KubeProxyConfiguration,
    VModule,
    default_healthz_address,
    default_metrics_address,
    with_port,
)


def _last(values: Sequence[Any]) -> Any:
    return values[-1]


class Kind(NamedTuple):
    """How a flag's text becomes a value. ``read`` raises ValueError where it is not ``allowed``.

    ``joined`` makes one value of those of a flag that is given several times: most often the last.
    """

    read: Callable[[str], Any]
    allowed: str
    metavar: str
    joined: Callable[[Sequence[Any]], Any] = _last


class Flag(NamedTuple):
    """``field`` is what it sets, "" where no field of the file says it."""

    name: str
    kind: Kind
    field: str
    help: str = ""

    def value(self, *texts: str) -> Any:
        """Raises ConfigError naming the flag, the text and what is allowed."""
        return self.kind.joined([self._read(text) for text in texts])

    def _read(self, text: str) -> Any:
        try:
            return self.kind.read(text)
        except ValueError:
            raise ConfigError(f"--{self.name} {text}: must be {self.kind.allowed}") from None


_TRUE: Final = frozenset({"1", "t", "T", "TRUE", "true", "True"})
_FALSE: Final = frozenset({"0", "f", "F", "FALSE", "false", "False"})


def _boolean(text: str) -> bool:
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError


def _int32(text: str) -> int:
    number = int(text, 0)
    if not -(2**31) <= number < 2**31:
        raise ValueError
    return number


def _not_negative(text: str) -> int:
    number = _int32(text.removeprefix("="))  # -v=2 reaches us as "=2"
    if number < 0:
        raise ValueError
    return number


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _gates(text: str) -> dict[str, bool]:
    pairs = (part.partition("=") for part in _list(text) if part)
    return {name.strip(): _boolean(value.strip()) for name, _, value in pairs}


def _modules(text: str) -> tuple[VModule, ...]:
    pairs = (part.partition("=") for part in _list(text) if part)
    return tuple(VModule(file_pattern=name, verbosity=int(level)) for name, _, level in pairs)


def _go_duration_text(text: str) -> str:
    return str(durations.parse(text))


def _concatenated(values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(item for value in values for item in value)


def _merged(values: Sequence[dict[str, bool]]) -> dict[str, bool]:
    return {name: is_on for value in values for name, is_on in value.items()}


TEXT: Final = Kind(str, "a text", "TEXT")
BOOL: Final = Kind(_boolean, "true or false", "[=BOOL]")
INT: Final = Kind(_int32, "a whole number of 32 bits", "N")
LEVEL: Final = Kind(_not_negative, "a whole number, at least 0", "N")
FLOAT: Final = Kind(float, "a number", "N")
DURATION: Final = Kind(durations.parse, "a duration such as 30s or 1h0m0s", "DURATION")
LIST: Final = Kind(_list, "texts with commas between them", "A,B…", _concatenated)
GATES: Final = Kind(_gates, "NAME=true or NAME=false, with commas between", "NAME=BOOL…", _merged)
MODULES: Final = Kind(_modules, "PATTERN=N, with commas between", "PATTERN=N…", _concatenated)
QUOTED_DURATION: Final = DURATION._replace(read=_go_duration_text)

FLAGS: Final = (
    Flag("kubeconfig", TEXT, "clientConnection.kubeconfig", "Credentials for the API server."),
    Flag(
        "bind-address",
        TEXT,
        "bindAddress",
        "The node's main address, where the Node object does not say it; nothing listens there.",
    ),
    Flag(
        "healthz-bind-address",
        TEXT,
        "healthzBindAddress",
        'IP:port where /healthz and /livez answer, "" for nowhere.  [default: 0.0.0.0:10256]',
    ),
    Flag(
        "metrics-bind-address",
        TEXT,
        "metricsBindAddress",
        'IP:port where /metrics answers, "" for nowhere.  [default: 127.0.0.1:10249]',
    ),
    Flag(
        "bind-address-hard-fail",
        BOOL,
        "bindAddressHardFail",
        "End when one of these addresses is taken; do not retry.",
    ),
    Flag(
        "proxy-mode",
        TEXT,
        "mode",
        'auto, ebpf or iptables; kube-proxy\'s "", ipvs and nftables mean auto.  [default: auto]',
    ),
    Flag(
        "iptables-sync-period",
        DURATION,
        "iptables.syncPeriod",
        "/healthz turns red when a change has waited for twice as long.  [default: 30s]",
    ),
    Flag(
        "iptables-min-sync-period",
        DURATION,
        "iptables.minSyncPeriod",
        "The least time between two syncs.  [default: 0s in eBPF mode, 1s in iptables mode]",
    ),
    Flag("oom-score-adj", INT, "oomScoreAdj", "The agent's oom_score_adj.  [default: -999]"),
    Flag(
        "conntrack-max-per-core",
        INT,
        "conntrack.maxPerCore",
        "Connections to track for each core; 0 leaves the limit as it is.  [default: 32768]",
    ),
    Flag("conntrack-min", INT, "conntrack.min", "At least so many.  [default: 131072]"),
    Flag(
        "conntrack-tcp-timeout-established",
        DURATION,
        "conntrack.tcpEstablishedTimeout",
        "0 leaves it as it is.  [default: 24h0m0s]",
    ),
    Flag(
        "conntrack-tcp-timeout-close-wait",
        DURATION,
        "conntrack.tcpCloseWaitTimeout",
        "0 leaves it as it is.  [default: 1h0m0s]",
    ),
    Flag("conntrack-tcp-be-liberal", BOOL, "conntrack.tcpBeLiberal"),
    Flag("conntrack-udp-timeout", DURATION, "conntrack.udpTimeout"),
    Flag("conntrack-udp-timeout-stream", DURATION, "conntrack.udpStreamTimeout"),
    Flag("kube-api-qps", FLOAT, "clientConnection.qps"),
    Flag("kube-api-burst", INT, "clientConnection.burst"),
    Flag("kube-api-content-type", TEXT, "clientConnection.contentType"),
    Flag("feature-gates", GATES, "featureGates"),
    Flag("profiling", BOOL, "enableProfiling"),
    Flag("show-hidden-metrics-for-version", TEXT, "showHiddenMetricsForVersion"),
    Flag("config-sync-period", DURATION, "configSyncPeriod"),
    Flag("masquerade-all", BOOL, "iptables.masqueradeAll"),
    Flag("iptables-masquerade-bit", INT, "iptables.masqueradeBit"),
    Flag("iptables-localhost-nodeports", BOOL, "iptables.localhostNodePorts"),
    Flag("ipvs-sync-period", DURATION, "ipvs.syncPeriod"),
    Flag("ipvs-min-sync-period", DURATION, "ipvs.minSyncPeriod"),
    Flag("ipvs-scheduler", TEXT, "ipvs.scheduler"),
    Flag("ipvs-exclude-cidrs", LIST, "ipvs.excludeCIDRs"),
    Flag("ipvs-strict-arp", BOOL, "ipvs.strictARP"),
    Flag("ipvs-tcp-timeout", DURATION, "ipvs.tcpTimeout"),
    Flag("ipvs-tcpfin-timeout", DURATION, "ipvs.tcpFinTimeout"),
    Flag("ipvs-udp-timeout", DURATION, "ipvs.udpTimeout"),
    Flag("detect-local-mode", TEXT, "detectLocalMode"),
    Flag("pod-bridge-interface", TEXT, "detectLocal.bridgeInterface"),
    Flag("pod-interface-name-prefix", TEXT, "detectLocal.interfaceNamePrefix"),
    Flag("cluster-cidr", TEXT, "clusterCIDR"),
    Flag("nodeport-addresses", LIST, "nodePortAddresses"),
    Flag("healthz-port", INT, ""),
    Flag("metrics-port", INT, ""),
    Flag("network-name", TEXT, "winkernel.networkName"),
    Flag("source-vip", TEXT, "winkernel.sourceVip"),
    Flag("enable-dsr", BOOL, "winkernel.enableDSR"),
    Flag("root-hnsendpoint-name", TEXT, "winkernel.rootHnsEndpointName"),
    Flag("forward-healthcheck-vip", BOOL, "winkernel.forwardHealthCheckVip"),
    Flag("windows-service", BOOL, "windowsRunAsService"),
    Flag("boot-id-file", TEXT, ""),
    Flag("machine-id-file", TEXT, ""),
)
"""Those that a configuration file says in their place (CFG-38)."""

LOG_FLAGS: Final = (
    Flag(
        "v", LEVEL, "logging.verbosity", "How much is logged; from 4 on what only debugging needs."
    ),
    Flag("logging-format", TEXT, "logging.format"),
    Flag("vmodule", MODULES, "logging.vmodule"),
    Flag("log-flush-frequency", QUOTED_DURATION, "logging.flushFrequency"),
    Flag("log-json-split-stream", BOOL, "logging.options.json.splitStream"),
    Flag("log-json-info-buffer-size", TEXT, "logging.options.json.infoBufferSize"),
    Flag("log-text-split-stream", BOOL, "logging.options.text.splitStream"),
    Flag("log-text-info-buffer-size", TEXT, "logging.options.text.infoBufferSize"),
)
"""Those that win over a configuration file (CFG-06)."""

Given = Mapping[str, tuple[str, ...]]
"""What stood on the command line: each flag's name, without dashes, with its texts in order."""

IN_NFTABLES: Final = ("syncPeriod", "minSyncPeriod", "masqueradeAll")
"""Fields of nftables that have no flags of their own: those of iptables count."""


def applied(config: KubeProxyConfiguration, given: Given) -> KubeProxyConfiguration:
    """``config``, which is all defaults, with the flags of FLAGS that were given."""
    values = {flag.field: flag.value(*given[flag.name]) for flag in FLAGS if flag.name in given}
    values.pop("", None)
    if values.get("bindAddress") == "":
        del values["bindAddress"]
    for field, value in values.items():
        config = config.replaced(field, value)
    if config.mode == "nftables":
        for name in IN_NFTABLES:
            if f"iptables.{name}" in values:
                config = config.replaced(f"nftables.{name}", values[f"iptables.{name}"])
    return _with_addresses(config, given)


def log_flags_applied(config: KubeProxyConfiguration, given: Given) -> KubeProxyConfiguration:
    """``config`` with the flags of LOG_FLAGS that were given; patterns of both count."""
    for flag in LOG_FLAGS:
        if flag.name in given:
            value = flag.value(*given[flag.name])
            if flag.kind is MODULES:
                value += config.logging.vmodule
            config = config.replaced(flag.field, value)
    return config


def _with_addresses(config: KubeProxyConfiguration, given: Given) -> KubeProxyConfiguration:
    """The servers' addresses; a deprecated port counts where an address has none (CFG-42)."""
    for field, name, default in (
        ("healthzBindAddress", "healthz", default_healthz_address(config.bind_address)),
        ("metricsBindAddress", "metrics", default_metrics_address(config.bind_address)),
    ):
        address = str(config.at(field)) if f"{name}-bind-address" in given else default
        port = deprecated_port(given, f"{name}-port")
        if port is None:
            port = int(default.rpartition(":")[2])
        config = config.replaced(field, with_port(address, port) if port else "")
    return config


def deprecated_port(given: Given, name: str) -> int | None:
    """What ``--healthz-port`` or ``--metrics-port`` says; 0 switches that server off."""
    if name not in given:
        return None
    port: int = Flag(name, INT, "").value(*given[name])
    return port
