"""What makes sense in a KubeProxyConfiguration (CFG-52), and what has no effect here."""

from __future__ import annotations

import pytest

from ebpflb.durations import Duration, S
from ebpflb.kubeproxy import rules
from ebpflb.kubeproxy.schema import KubeProxyConfiguration, with_defaults

DEFAULTS = with_defaults(KubeProxyConfiguration())


def changed(**values: object) -> KubeProxyConfiguration:
    """The defaults with other values at these paths, whose dots are written as two underscores."""
    config = DEFAULTS
    for path, value in values.items():
        config = config.replaced(path.replace("__", "."), value)
    return config


def seconds(number: float) -> Duration:
    return Duration.seconds(number)


RIGHT: dict[str, dict[str, object]] = {
    "the defaults": {},
    "the least masqueradeBit": {"iptables__masqueradeBit": 0},
    "the greatest masqueradeBit": {"iptables__masqueradeBit": 31},
    "the bounds of oomScoreAdj": {"oomScoreAdj": -1000},
    "minSyncPeriod as long as syncPeriod": {"iptables__minSyncPeriod": seconds(30)},
    "minSyncPeriod 0": {"iptables__minSyncPeriod": seconds(0)},
    "an IPv6 bindAddress": {"bindAddress": "fd00::1"},
    "an address with leading zeros, as kube-proxy takes it": {"bindAddress": "010.0.0.1"},
    "no server for health": {"healthzBindAddress": ""},
    "no server for metrics": {"metricsBindAddress": ""},
    "a server on IPv6": {"metricsBindAddress": "[::1]:10249"},
    "one CIDR": {"clusterCIDR": "10.0.0.0/8"},
    "a CIDR with host bits set": {"clusterCIDR": "10.1.2.3/8"},
    "a dual-stack pair": {"clusterCIDR": "fd00::/48,10.0.0.0/8"},
    "a bad clusterCIDR that nobody reads": {"detectLocalMode": "NodeCIDR", "clusterCIDR": "x"},
    "NP-06: keywords and CIDRs": {
        "nodePortAddresses": ("primary", "localhost", "10.0.0.0/8", "all", "::/0")
    },
    "the mode ipvs": {"mode": "ipvs"},
    "the mode nftables": {"mode": "nftables"},
    "a mode of ours": {"mode": "ebpf"},
    "an ipvs time-out below 0 in another mode": {"ipvs__tcpTimeout": seconds(-1)},
    "an nftables bit out of range in another mode": {"nftables__masqueradeBit": 99},
    "a bridge": {"detectLocalMode": "BridgeInterface", "detectLocal__bridgeInterface": "br0"},
    "CFG-01: gates of other components": {"featureGates": {"MemoryManager": True}},
    "a gate that has been removed": {"featureGates": {"IPv6DualStack": True}},
    "a version": {"showHiddenMetricsForVersion": "1.36"},
}


@pytest.mark.parametrize("values", RIGHT.values(), ids=RIGHT)
def test_what_kube_proxy_takes_is_taken(values: dict[str, object]) -> None:
    assert rules.problems(changed(**values)) == []


HOST_PORT = "must be IP:port, as 127.0.0.1:10249 or [::1]:10249"
KEYWORDS = "must be a CIDR, as 10.0.0.0/8, or one of primary, localhost, all"
PAIR = "must be one CIDR, or one of each family, as 10.0.0.0/8,fd00::/48"
WRONG: dict[str, dict[str, object]] = {
    "iptables.masqueradeBit 32: must be 0 to 31": {"iptables__masqueradeBit": 32},
    "iptables.masqueradeBit -1: must be 0 to 31": {"iptables__masqueradeBit": -1},
    "nftables.masqueradeBit 32: must be 0 to 31": {
        "mode": "nftables",
        "nftables__masqueradeBit": 32,
    },
    "iptables.syncPeriod 0s: must be more than 0s": {"iptables__syncPeriod": seconds(0)},
    "ipvs.syncPeriod -1s: must be more than 0s": {"mode": "ipvs", "ipvs__syncPeriod": seconds(-1)},
    "iptables.minSyncPeriod -1s: must be 0s or more": {"iptables__minSyncPeriod": seconds(-1)},
    "iptables.minSyncPeriod 31s: must not be more than syncPeriod, which is 30s": {
        "iptables__minSyncPeriod": seconds(31)
    },
    "configSyncPeriod 0s: must be more than 0s": {"configSyncPeriod": seconds(0)},
    "oomScoreAdj -1001: must be -1000 to 1000": {"oomScoreAdj": -1001},
    "oomScoreAdj 1001: must be -1000 to 1000": {"oomScoreAdj": 1001},
    "bindAddress node-1: must be an IP address": {"bindAddress": "node-1"},
    f"healthzBindAddress 10256: {HOST_PORT}": {"healthzBindAddress": "10256"},
    f"healthzBindAddress localhost:10256: {HOST_PORT}": {"healthzBindAddress": "localhost:10256"},
    f"metricsBindAddress 127.0.0.1:0: {HOST_PORT}": {"metricsBindAddress": "127.0.0.1:0"},
    f"metricsBindAddress 127.0.0.1:65536: {HOST_PORT}": {"metricsBindAddress": "127.0.0.1:65536"},
    f"metricsBindAddress ::1:10249: {HOST_PORT}": {"metricsBindAddress": "::1:10249"},
    f"clusterCIDR 10.0.0.0: {PAIR}": {"clusterCIDR": "10.0.0.0"},
    f"clusterCIDR 10.0.0.0/33: {PAIR}": {"clusterCIDR": "10.0.0.0/33"},
    f"clusterCIDR 10.0.0.0/8,10.1.0.0/16: {PAIR}": {"clusterCIDR": "10.0.0.0/8,10.1.0.0/16"},
    f"clusterCIDR 1.0.0.0/8,::/0,2.0.0.0/8: {PAIR}": {"clusterCIDR": "1.0.0.0/8,::/0,2.0.0.0/8"},
    f"nodePortAddresses[1] 10.0.0.1: {KEYWORDS}": {"nodePortAddresses": ("primary", "10.0.0.1")},
    'nodePortAddresses[0] "": ' + KEYWORDS: {"nodePortAddresses": ("",)},
    "nodePortAddresses[1] primary: must be given once": {
        "nodePortAddresses": ("primary", "primary")
    },
    "conntrack.maxPerCore -1: must be 0 or more": {"conntrack__maxPerCore": -1},
    "conntrack.min -1: must be 0 or more": {"conntrack__min": -1},
    "conntrack.tcpEstablishedTimeout -1s: must be 0s or more; 0s leaves it as it is": {
        "conntrack__tcpEstablishedTimeout": seconds(-1)
    },
    "conntrack.udpStreamTimeout -1s: must be 0s or more; 0s leaves it as it is": {
        "conntrack__udpStreamTimeout": seconds(-1)
    },
    "ipvs.udpTimeout -1s: must be 0s or more; 0s leaves it as it is": {
        "mode": "ipvs",
        "ipvs__udpTimeout": seconds(-1),
    },
    "ipvs.excludeCIDRs[0] x: must be a CIDR, as 10.0.0.0/8": {
        "mode": "ipvs",
        "ipvs__excludeCIDRs": ("x",),
    },
    "mode userspace: must be one of auto, ebpf, iptables, ipvs, nftables, or empty (auto)": {
        "mode": "userspace"
    },
    "detectLocalMode Bridge: must be one of ClusterCIDR, NodeCIDR, BridgeInterface, "
    "InterfaceNamePrefix": {"detectLocalMode": "Bridge"},
    'detectLocal.bridgeInterface "": must name a bridge: detectLocalMode asks for one': {
        "detectLocalMode": "BridgeInterface"
    },
    'detectLocal.interfaceNamePrefix "": must be how pods\' devices begin: detectLocalMode asks '
    "for it": {"detectLocalMode": "InterfaceNamePrefix"},
    "clientConnection.burst -1: must be 0 or more": {"clientConnection__burst": -1},
    "clientConnection.qps nan: must be a number": {"clientConnection__qps": float("nan")},
    "logging.format yaml: must be text or json": {"logging__format": "yaml"},
    "logging.flushFrequency soon: must be a duration such as 5s": {
        "logging__flushFrequency": "soon"
    },
    "showHiddenMetricsForVersion 36: must be MAJOR.MINOR, as 1.36": {
        "showHiddenMetricsForVersion": "36"
    },
    "featureGates.NoSuchGate: is no feature gate of Kubernetes": {
        "featureGates": {"NoSuchGate": True}
    },
    "featureGates.AllowServiceExternalIP: is no feature gate of Kubernetes: is "
    "AllowServiceExternalIPs meant?": {"featureGates": {"AllowServiceExternalIP": False}},
}


@pytest.mark.parametrize(("said", "values"), WRONG.items(), ids=WRONG)
def test_what_is_wrong_is_said_with_its_name_its_value_and_what_is_allowed(
    said: str, values: dict[str, object]
) -> None:
    assert rules.problems(changed(**values)) == [said]


def test_everything_that_is_wrong_is_said_at_once() -> None:
    assert len(rules.problems(changed(mode="x", oomScoreAdj=9999, clusterCIDR="y"))) == 3


def test_a_setting_is_called_what_the_user_called_it() -> None:
    found = rules.problems(changed(oomScoreAdj=9999), called=lambda path: f"<{path}>")
    assert found == ["<oomScoreAdj> 9999: must be -1000 to 1000"]


@pytest.mark.parametrize(
    ("mode", "path", "counts"),
    [
        ("", "clientConnection.contentType", False),
        ("", "ipvs.scheduler", False),
        ("", "ipvs.syncPeriod", False),
        ("", "nftables.minSyncPeriod", False),
        ("", "winkernel.enableDSR", False),
        ("", "featureGates.AllAlpha", False),
        ("ipvs", "ipvs.syncPeriod", True),
        ("ipvs", "iptables.syncPeriod", False),
        ("ipvs", "iptables.masqueradeAll", True),
        ("ipvs", "nftables.masqueradeAll", False),
        ("nftables", "nftables.syncPeriod", True),
        ("nftables", "nftables.masqueradeAll", True),
        ("nftables", "iptables.masqueradeBit", False),
        ("iptables", "iptables.masqueradeBit", True),
        ("", "nodePortAddresses", True),
        ("", "iptables.localhostNodePorts", True),
        ("", "clusterCIDR", True),
        ("", "detectLocal.bridgeInterface", True),
        ("", "featureGates.AllowServiceExternalIPs", True),
        ("", "iptables.syncPeriod", True),
        ("", "conntrack.min", True),
        ("", "mode", True),
        ("", "oomScoreAdj", True),
    ],
)
def test_which_settings_have_no_effect_here(mode: str, path: str, counts: bool) -> None:
    assert rules.without_effect([path], changed(mode=mode)) == ([] if counts else [path])


def test_every_setting_without_effect_is_a_field_or_a_section() -> None:
    for path in rules.MEANS_NOTHING:
        DEFAULTS.at(path)


def test_the_fields_that_differ_are_found_by_their_paths() -> None:
    config = changed(
        oomScoreAdj=0, iptables__syncPeriod=Duration(S), featureGates={"AllAlpha": False}
    )
    assert rules.differing(config, DEFAULTS) == [
        "featureGates.AllAlpha",
        "iptables.syncPeriod",
        "oomScoreAdj",
    ]
    assert rules.differing(changed(nodePortAddresses=()), DEFAULTS) == []
