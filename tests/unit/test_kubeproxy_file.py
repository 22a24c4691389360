"""A KubeProxyConfiguration file: what is read, what is said of it, what is written."""

from __future__ import annotations

import contextlib
import json
import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ebpflb.durations import MS, Duration, S
from ebpflb.errors import ConfigError
from ebpflb.kubeproxy import file, rules
from ebpflb.kubeproxy.schema import (
    KubeProxyConfiguration,
    VModule,
    as_builtins,
    with_defaults,
)

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
DEFAULTS = with_defaults(KubeProxyConfiguration())


def read(body: str, head: str = HEAD) -> file.Loaded:
    return file.read("kp.conf", (head + body).encode())


# What kubeadm puts into its ConfigMap: every field, most of them null, zero or empty.
KUBEADM = """\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
"""


def test_what_kubeadm_writes_is_strictly_right_and_means_the_defaults() -> None:
    config, problems = read(KUBEADM, head="")
    assert problems == ()
    differing = rules.differing(with_defaults(config), DEFAULTS)
    assert differing == ["clientConnection.kubeconfig", "clusterCIDR"]


# CFG-01 to CFG-37: the defaults that the reference gives.
DEFAULT_VALUES: dict[str, object] = {
    "clientConnection.kubeconfig": "",
    "clientConnection.contentType": "application/vnd.kubernetes.protobuf",
    "clientConnection.qps": 5,
    "clientConnection.burst": 10,
    "logging.format": "text",
    "logging.verbosity": 0,
    "bindAddress": "0.0.0.0",
    "healthzBindAddress": "0.0.0.0:10256",
    "metricsBindAddress": "127.0.0.1:10249",
    "bindAddressHardFail": False,
    "enableProfiling": False,
    "mode": "",
    "iptables.masqueradeBit": 14,
    "iptables.masqueradeAll": False,
    "iptables.localhostNodePorts": True,
    "iptables.syncPeriod": "30s",
    "ipvs.syncPeriod": "30s",
    "ipvs.scheduler": "",
    "ipvs.excludeCIDRs": None,
    "nftables.masqueradeBit": 14,
    "nftables.masqueradeAll": False,
    "nftables.syncPeriod": "30s",
    "detectLocalMode": "ClusterCIDR",
    "clusterCIDR": "",
    "nodePortAddresses": None,
    "oomScoreAdj": -999,
    "conntrack.maxPerCore": 32768,
    "conntrack.min": 131072,
    "conntrack.tcpEstablishedTimeout": "24h0m0s",
    "conntrack.tcpCloseWaitTimeout": "1h0m0s",
    "conntrack.tcpBeLiberal": False,
    "conntrack.udpTimeout": "0s",
    "conntrack.udpStreamTimeout": "0s",
    "configSyncPeriod": "15m0s",
}


@pytest.mark.parametrize(("path", "value"), DEFAULT_VALUES.items(), ids=DEFAULT_VALUES)
def test_a_field_that_is_not_there_has_kube_proxys_default(path: str, value: object) -> None:
    found: object = as_builtins(with_defaults(read("").config))
    for name in path.split("."):
        assert isinstance(found, dict)
        found = found[name]
    assert found == value


KEPT = {
    "oomScoreAdj: 0": ("oomScoreAdj", 0),
    "iptables: {masqueradeBit: 0}": ("iptables.masqueradeBit", 0),
    "iptables: {localhostNodePorts: false}": ("iptables.localhostNodePorts", False),
    "conntrack: {maxPerCore: 0}": ("conntrack.maxPerCore", 0),
    "conntrack: {tcpEstablishedTimeout: 0s}": ("conntrack.tcpEstablishedTimeout", Duration(0)),
    "iptables: {minSyncPeriod: 5s}": ("iptables.minSyncPeriod", Duration(5 * S)),
    "nodePortAddresses: [primary, 10.0.0.0/8]": ("nodePortAddresses", ("primary", "10.0.0.0/8")),
    "featureGates: {AllAlpha: false}": ("featureGates", {"AllAlpha": False}),
    "logging: {flushFrequency: 1000000}": ("logging.flushFrequency", "1ms"),
    "logging: {vmodule: [{filePattern: a, verbosity: 3}]}": (
        "logging.vmodule",
        (VModule(file_pattern="a", verbosity=3),),
    ),
}


@pytest.mark.parametrize(("body", "expected"), KEPT.items(), ids=KEPT)
def test_what_is_said_is_kept_a_zero_too_where_zero_has_a_meaning(
    body: str, expected: tuple[str, object]
) -> None:
    path, value = expected
    assert with_defaults(read(body).config).at(path) == value


@pytest.mark.parametrize(
    ("body", "healthz", "metrics"),
    [
        ("", "0.0.0.0:10256", "127.0.0.1:10249"),
        ("bindAddress: 192.0.2.1", "0.0.0.0:10256", "127.0.0.1:10249"),
        ('bindAddress: "2001:db8::1"', "[::]:10256", "[::1]:10249"),
        ("healthzBindAddress: 192.0.2.1", "192.0.2.1:10256", "127.0.0.1:10249"),
        ('metricsBindAddress: "::"', "0.0.0.0:10256", "[::]:10249"),
        ("metricsBindAddress: 0.0.0.0:1", "0.0.0.0:10256", "0.0.0.0:1"),
    ],
    ids=[
        "CFG-09, CFG-10: nothing said",
        "an IPv4 bindAddress",
        "an IPv6 bindAddress",
        "an address without a port",
        "an IPv6 address without a port",
        "address and port",
    ],
)
def test_the_servers_addresses(body: str, healthz: str, metrics: str) -> None:
    config = with_defaults(read(body).config)
    assert (config.healthz_bind_address, config.metrics_bind_address) == (healthz, metrics)


LENIENT = {
    "CFG-50: a field that is gone": ("udpIdleTimeout: 250ms", "udpIdleTimeout is unknown"),
    "a field of a section": ("iptables: {foo: 1}", "iptables.foo is unknown"),
    "a slip of the pen": (
        "clustercidr: x",
        "clustercidr is unknown (is clusterCIDR meant?)",
    ),
    "a field of a list's item": (
        "logging: {vmodule: [{filePattern: a, verbosity: 1, x: 2}]}",
        "logging.vmodule[0].x is unknown",
    ),
    "a key that is no text": ("1: 2", "1 is unknown"),
    "a field that stands twice": (
        "mode: ipvs\nmode: nftables",
        "mode stands twice: that in line 4 is taken",
    ),
    "twice within a section": (
        "iptables:\n  syncPeriod: 1s\n  syncPeriod: 2s",
        "iptables.syncPeriod stands twice: that in line 5 is taken",
    ),
    "a second document": (f"---\n{HEAD}mode: ipvs", "it holds 2 documents: only the first is read"),
}


@pytest.mark.parametrize(("body", "problem"), LENIENT.values(), ids=LENIENT)
def test_what_a_strict_reader_refuses_is_said_and_costs_nothing_else(
    body: str, problem: str
) -> None:
    config, problems = read(body)
    assert problems == (problem,)
    if "twice" in problem:
        assert "nftables" in config.mode or config.iptables.sync_period == Duration(2 * S)


@pytest.mark.parametrize("body", ["", "---\n", "mode: null", "iptables: null", "# nothing\n"])
def test_an_empty_part_is_no_problem(body: str) -> None:
    config, problems = read(body)
    assert (problems, with_defaults(config)) == ((), DEFAULTS)


def test_yaml_anchors_and_merges_are_no_repetitions() -> None:
    body = "iptables: &periods {syncPeriod: 5s}\nnftables: {<<: *periods, syncPeriod: 6s}"
    config, problems = read(body)
    assert problems == ()
    assert (config.iptables.sync_period, config.nftables.sync_period) == (
        Duration(5 * S),
        Duration(6 * S),
    )


WRONG_TYPES = {
    "iptables: {masqueradeBit: x}": "iptables.masqueradeBit 'x': must be a whole number",
    "iptables: {masqueradeBit: 1.5}": "iptables.masqueradeBit 1.5: must be a whole number",
    "iptables: 5": "iptables 5: must be a mapping",
    "iptables: {syncPeriod: 30}": (
        "iptables.syncPeriod 30: must be a duration such as 30s or 1h0m0s"
    ),
    "conntrack: {udpTimeout: 5 s}": (
        "conntrack.udpTimeout '5 s': must be a duration such as 30s or 1h0m0s"
    ),
    "oomScoreAdj: 99999999999": (
        "oomScoreAdj 99999999999: must be a whole number, at most 2147483647"
    ),
    "logging: {verbosity: -1}": "logging.verbosity -1: must be a whole number, at least 0",
    "logging: {vmodule: [{verbosity: x}]}": (
        "logging.vmodule[0].verbosity 'x': must be a whole number"
    ),
    "bindAddressHardFail: 'true'": "bindAddressHardFail 'true': must be true or false",
    "featureGates: {AllAlpha: 1}": "featureGates.AllAlpha 1: must be true or false",
    "featureGates: {1: true}": "featureGates: its keys must be texts",
    "nodePortAddresses: primary": "nodePortAddresses 'primary': must be a list",
    "nodePortAddresses: [primary, 5]": "nodePortAddresses[1] 5: must be a text",
    "hostnameOverride: 5": "hostnameOverride 5: must be a text",
    "clientConnection: {qps: fast}": "clientConnection.qps 'fast': must be a number",
    "logging: {flushFrequency: [5]}": (
        "logging.flushFrequency [5]: must be a text or a whole number"
    ),
}


@pytest.mark.parametrize(("body", "said"), WRONG_TYPES.items(), ids=WRONG_TYPES)
def test_a_value_of_a_wrong_type_is_named_with_its_field(body: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'kp.conf: {said}')}$"):
        read(body)


UNREADABLE = {
    "nothing": ("", "is empty: must be a KubeProxyConfiguration"),
    "a number": ("5", "holds 5: must be a KubeProxyConfiguration"),
    "no kind": ("mode: ipvs", "kind is missing: must be KubeProxyConfiguration"),
    "the ConfigMap around it": (
        "apiVersion: v1\nkind: ConfigMap\n",
        "kind 'ConfigMap': must be KubeProxyConfiguration; give the file that stands in its data",
    ),
    "another apiVersion": (
        "apiVersion: kubeproxy.config.k8s.io/v1beta1\nkind: KubeProxyConfiguration",
        "apiVersion 'kubeproxy.config.k8s.io/v1beta1': must be kubeproxy.config.k8s.io/v1alpha1",
    ),
    "no YAML": ("a: [", "is no YAML: line 2: did not find expected node content"),
    "a key that cannot be one": ("{a: b}: c", "is no YAML: line 1: {'a': 'b'} is no key"),
    "an anchor in itself": (f"{HEAD}x: &a {{b: *a}}", "is no YAML: it is nested too deeply"),
    "no text": ("\x00", "is no YAML: control characters are not allowed"),
}


@pytest.mark.parametrize(("text", "said"), UNREADABLE.values(), ids=UNREADABLE)
def test_a_file_that_is_none_is_refused_by_name(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'kp.conf: {said}')}"):
        read(text, head="")


@given(st.binary())
def test_no_bytes_end_in_anything_else_than_values_or_a_config_error(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        file.read("kp.conf", HEAD.encode() + data)


# --- written -------------------------------------------------------------------------------------


def test_the_defaults_are_written_as_kube_proxy_writes_them() -> None:
    text = file.text_of(DEFAULTS)
    lines = text.splitlines()
    assert lines[0] == "apiVersion: kubeproxy.config.k8s.io/v1alpha1"
    assert [line.partition(":")[0] for line in lines if line[0] != " "] == sorted(
        line.partition(":")[0] for line in lines if line[0] != " "
    )
    for line in (
        "  qps: 5",
        "configSyncPeriod: 15m0s",
        "  tcpEstablishedTimeout: 24h0m0s",
        "  udpTimeout: 0s",
        'mode: ""',
        "nodePortAddresses: null",
        'infoBufferSize: "0"',
        "healthzBindAddress: 0.0.0.0:10256",
    ):
        assert line in text
    for absent in ("featureGates", "vmodule", "splitStream", "windowsRunAsService"):
        assert absent not in text


DURATIONS = st.integers(0, 9 * 10**12).map(lambda ms: Duration(ms * MS))
CONFIGS = st.builds(
    KubeProxyConfiguration,
    mode=st.sampled_from(["", "iptables", "ipvs", "nftables", "auto", "ebpf"]),
    hostname_override=st.sampled_from(["", "n1", "1.5", "yes", "null", "0x1f", "a: b", "ü"]),
    oom_score_adj=st.integers(-1000, 1000),
    feature_gates=st.dictionaries(st.sampled_from(["AllAlpha", "AllBeta"]), st.booleans()),
    node_port_addresses=st.none()
    | st.lists(st.sampled_from(["primary", "10.0.0.0/8", "::/0"]), min_size=1).map(tuple),
    config_sync_period=DURATIONS,
    windows_run_as_service=st.booleans(),
)


@given(CONFIGS, DURATIONS, st.floats(0, 1e6))
def test_what_is_written_reads_as_the_same(
    config: KubeProxyConfiguration, period: Duration, qps: float
) -> None:
    config = config.replaced("iptables.syncPeriod", period).replaced("clientConnection.qps", qps)
    config = with_defaults(config.replaced("nftables.minSyncPeriod", period))
    loaded = file.read("written", file.text_of(config).encode())
    assert loaded.problems == ()
    assert with_defaults(loaded.config) == config


@pytest.mark.parametrize("indent", [None, 2, "\t"], ids=["on one line", "by spaces", "by tabs"])
def test_json_is_read_too(indent: int | str | None) -> None:
    text = json.dumps(as_builtins(DEFAULTS), indent=indent)
    assert with_defaults(read(text, head="").config) == DEFAULTS


def test_what_is_written_is_the_same_data_as_what_configz_says() -> None:
    assert yaml.safe_load(file.text_of(DEFAULTS)) == as_builtins(DEFAULTS)
