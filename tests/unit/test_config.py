"""Flags, a file and our own flags, made into one Config: who wins, and what the user is told."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ebpflb.config import (
    Config,
    File,
    Notice,
    Own,
    Resolved,
    parse_bind_address,
    parse_map_sizes,
    parse_period,
    planner_options,
    require_supported,
    resolve,
)
from ebpflb.errors import ConfigError
from ebpflb.kubeproxy import file
from ebpflb.kubeproxy.flags import FLAGS, LOG_FLAGS
from ebpflb.kubeproxy.schema import as_builtins
from ebpflb.planner.options import PlannerOptions

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


def said(command_line: str, body: str | None = None, **own: Any) -> Resolved:
    """What comes of flags as ``--name=text``, and of a file where there is one."""
    given: dict[str, tuple[str, ...]] = {}
    for part in command_line.split():
        name, _, text = part.removeprefix("--").partition("=")
        given[name] = (*given.get(name, ()), text)
    if body is None:
        return resolve(Own(**own), given)
    data = (HEAD + body).encode()
    loaded = file.read("kp.conf", data)
    return resolve(Own(**own), given, File(Path("kp.conf"), data, *loaded))


def at(resolved: Resolved, path: str) -> object:
    found: object = as_builtins(resolved.config.kube_proxy)
    for name in path.split("."):
        assert isinstance(found, dict)
        found = found[name]
    return found


ADVICE = {"node port addresses are not set", "pods are not told from others"}


def notices(resolved: Resolved) -> list[Notice]:
    """What is told, but for what kube-proxy too says where nothing is set."""
    return [one for one in resolved.notices if one.event not in ADVICE]


def only(resolved: Resolved) -> Notice:
    (notice,) = notices(resolved)
    return notice


# --- flags ---------------------------------------------------------------------------------------

SET: dict[str, tuple[str, object]] = {
    "--kubeconfig=/etc/k": ("clientConnection.kubeconfig", "/etc/k"),
    "--kube-api-qps=2.5": ("clientConnection.qps", 2.5),
    "--kube-api-burst=3": ("clientConnection.burst", 3),
    "--kube-api-content-type=x": ("clientConnection.contentType", "x"),
    "--bind-address=fd00::1": ("metricsBindAddress", "[::1]:10249"),
    "--bind-address=": ("bindAddress", "0.0.0.0"),
    "--healthz-bind-address=127.0.0.1": ("healthzBindAddress", "127.0.0.1:10256"),
    "--healthz-bind-address=": ("healthzBindAddress", ""),
    "--healthz-port=0": ("healthzBindAddress", ""),
    "--metrics-port=0": ("metricsBindAddress", ""),
    "--healthz-bind-address=127.0.0.1 --healthz-port=1": ("healthzBindAddress", "127.0.0.1:1"),
    "--metrics-bind-address=[::]:1": ("metricsBindAddress", "[::]:1"),
    "--bind-address-hard-fail=true": ("bindAddressHardFail", True),
    "--bind-address-hard-fail=F": ("bindAddressHardFail", False),
    "--profiling=1": ("enableProfiling", True),
    "--show-hidden-metrics-for-version=1.36": ("showHiddenMetricsForVersion", "1.36"),
    "--proxy-mode=ebpf": ("mode", "ebpf"),
    "--iptables-masquerade-bit=0x10": ("iptables.masqueradeBit", 16),
    "--masquerade-all=true": ("iptables.masqueradeAll", True),
    "--masquerade-all=true --proxy-mode=nftables": ("nftables.masqueradeAll", True),
    "--iptables-localhost-nodeports=false": ("iptables.localhostNodePorts", False),
    "--iptables-sync-period=1m": ("iptables.syncPeriod", "1m0s"),
    "--iptables-min-sync-period=10s": ("iptables.minSyncPeriod", "10s"),
    "--iptables-sync-period=1m --proxy-mode=nftables": ("nftables.syncPeriod", "1m0s"),
    "--ipvs-sync-period=1m": ("ipvs.syncPeriod", "1m0s"),
    "--ipvs-min-sync-period=1m": ("ipvs.minSyncPeriod", "1m0s"),
    "--ipvs-scheduler=rr": ("ipvs.scheduler", "rr"),
    "--ipvs-exclude-cidrs=10.0.0.0/8,fd00::/8": ("ipvs.excludeCIDRs", ("10.0.0.0/8", "fd00::/8")),
    "--ipvs-strict-arp=true": ("ipvs.strictARP", True),
    "--ipvs-tcp-timeout=1s": ("ipvs.tcpTimeout", "1s"),
    "--ipvs-tcpfin-timeout=1s": ("ipvs.tcpFinTimeout", "1s"),
    "--ipvs-udp-timeout=1s": ("ipvs.udpTimeout", "1s"),
    "--detect-local-mode=NodeCIDR": ("detectLocalMode", "NodeCIDR"),
    "--pod-bridge-interface=br0": ("detectLocal.bridgeInterface", "br0"),
    "--pod-interface-name-prefix=veth": ("detectLocal.interfaceNamePrefix", "veth"),
    "--cluster-cidr=10.0.0.0/8": ("clusterCIDR", "10.0.0.0/8"),
    "--nodeport-addresses=primary --nodeport-addresses=10.0.0.0/8": (
        "nodePortAddresses",
        ("primary", "10.0.0.0/8"),
    ),
    "--oom-score-adj=-998": ("oomScoreAdj", -998),
    "--conntrack-max-per-core=0": ("conntrack.maxPerCore", 0),
    "--conntrack-min=1": ("conntrack.min", 1),
    "--conntrack-tcp-timeout-established=0": ("conntrack.tcpEstablishedTimeout", "0s"),
    "--conntrack-tcp-timeout-close-wait=0s": ("conntrack.tcpCloseWaitTimeout", "0s"),
    "--conntrack-tcp-be-liberal=true": ("conntrack.tcpBeLiberal", True),
    "--conntrack-udp-timeout=30s": ("conntrack.udpTimeout", "30s"),
    "--conntrack-udp-timeout-stream=3m": ("conntrack.udpStreamTimeout", "3m0s"),
    "--config-sync-period=1h": ("configSyncPeriod", "1h0m0s"),
    "--feature-gates=AllAlpha=false,AllBeta=true --feature-gates=AllBeta=false": (
        "featureGates",
        {"AllAlpha": False, "AllBeta": False},
    ),
    "--network-name=x": ("winkernel.networkName", "x"),
    "--source-vip=x": ("winkernel.sourceVip", "x"),
    "--enable-dsr=true": ("winkernel.enableDSR", True),
    "--root-hnsendpoint-name=x": ("winkernel.rootHnsEndpointName", "x"),
    "--forward-healthcheck-vip=true": ("winkernel.forwardHealthCheckVip", True),
    "--windows-service=true": ("windowsRunAsService", True),
    "--v=2": ("logging.verbosity", 2),
    "--v==2": ("logging.verbosity", 2),
    "--logging-format=json": ("logging.format", "json"),
    "--vmodule=a=1,b=2": (
        "logging.vmodule",
        ({"filePattern": "a", "verbosity": 1}, {"filePattern": "b", "verbosity": 2}),
    ),
    "--log-flush-frequency=1m": ("logging.flushFrequency", "1m0s"),
    "--log-json-split-stream=true": ("logging.options.json.splitStream", True),
    "--log-json-info-buffer-size=1K": ("logging.options.json.infoBufferSize", "1K"),
    "--log-text-split-stream=true": ("logging.options.text.splitStream", True),
    "--log-text-info-buffer-size=1K": ("logging.options.text.infoBufferSize", "1K"),
    "--v=1 --v=3": ("logging.verbosity", 3),
}


@pytest.mark.parametrize(("command_line", "expected"), SET.items(), ids=SET)
def test_each_flag_of_kube_proxy_sets_its_field(
    command_line: str, expected: tuple[str, object]
) -> None:
    path, value = expected
    assert at(said(command_line), path) == value


def test_the_table_above_has_every_flag() -> None:
    without_field = {"boot-id-file", "machine-id-file"}
    tried = {part.partition("=")[0].removeprefix("--") for key in SET for part in key.split()}
    assert tried == {flag.name for flag in (*FLAGS, *LOG_FLAGS)} - without_field


UNREADABLE = {
    "--iptables-sync-period=30": "--iptables-sync-period 30: must be a duration such as 30s or "
    "1h0m0s",
    "--iptables-masquerade-bit=x": "--iptables-masquerade-bit x: must be a whole number of 32 bits",
    "--oom-score-adj=9999999999": "--oom-score-adj 9999999999: must be a whole number of 32 bits",
    "--masquerade-all=yes": "--masquerade-all yes: must be true or false",
    "--kube-api-qps=x": "--kube-api-qps x: must be a number",
    "--feature-gates=AllAlpha": "--feature-gates AllAlpha: must be NAME=true or NAME=false, with "
    "commas between",
    "--v=-1": "--v -1: must be a whole number, at least 0",
    "--iptables-masquerade-bit=32": "--iptables-masquerade-bit 32: must be 0 to 31",
    "--healthz-bind-address=x": "--healthz-bind-address x: must be IP:port, as 127.0.0.1:10249 or "
    "[::1]:10249",
    "--nodeport-addresses=primary,x": "--nodeport-addresses x: must be a CIDR, as 10.0.0.0/8, or "
    "one of primary, localhost, all",
    "--feature-gates=NoSuch=true": "--feature-gates NoSuch: is no feature gate of Kubernetes",
    "--proxy-mode=userspace": "--proxy-mode userspace: must be one of auto, ebpf, iptables, ipvs, "
    "nftables, or empty (auto)",
    "--proxy-mode=nftables --iptables-sync-period=0s": "--iptables-sync-period 0s: must be more "
    "than 0s",
}


@pytest.mark.parametrize(("command_line", "text"), UNREADABLE.items(), ids=UNREADABLE)
def test_a_wrong_flag_is_named_with_its_value_and_what_is_allowed(
    command_line: str, text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        said(command_line)
    assert str(error.value) == text


def test_several_that_are_wrong_stand_on_lines_of_their_own() -> None:
    with pytest.raises(ConfigError) as error:
        said("--conntrack-min=-1 --oom-score-adj=5000")
    assert str(error.value) == (
        "2 settings are wrong:\n  --conntrack-min -1: must be 0 or more\n"
        "  --oom-score-adj 5000: must be -1000 to 1000"
    )


# --- who wins ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command_line", "mode"),
    [
        ("", "auto"),
        ("--proxy-mode=", "auto"),
        ("--proxy-mode=auto", "auto"),
        ("--proxy-mode=ebpf", "ebpf"),
        ("--proxy-mode=ipvs", "auto"),
        ("--proxy-mode=nftables", "auto"),
        ("--proxy-mode=iptables", "iptables"),
    ],
)
@pytest.mark.parametrize("body", [None, "mode: iptables"], ids=["alone", "beside a file"])
def test_the_flag_says_the_mode_and_wins_over_a_file(
    command_line: str, mode: str, body: str | None
) -> None:
    expected = "iptables" if body and not command_line else mode
    assert said(command_line, body).config.proxy_mode == expected


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        ("", "auto"),
        ("mode: ipvs", "auto"),
        ("mode: nftables", "auto"),
        ("mode: iptables", "iptables"),
        ("mode: ebpf", "ebpf"),
        ("mode: auto", "auto"),
    ],
)
def test_a_file_says_the_mode(body: str, mode: str) -> None:
    assert said("", body).config.proxy_mode == mode


def test_beside_a_file_the_flags_of_kube_proxy_are_ignored_and_named_once() -> None:
    resolved = said(
        "--kubeconfig=/flag --oom-score-adj=1 --cluster-cidr=10.0.0.0/8 --metrics-port=0 "
        "--proxy-mode=ebpf --v=5",
        "oomScoreAdj: 2",
        master="https://192.0.2.1",
        hostname_override="N1",
    )
    assert at(resolved, "oomScoreAdj") == 2
    assert at(resolved, "clusterCIDR") == ""
    config = resolved.config
    assert (config.kubeconfig, config.metrics_bind_address) == ("", "127.0.0.1:10249")
    assert (config.master, config.node_name, config.verbosity) == ("https://192.0.2.1", "n1", 5)
    assert config.proxy_mode == "ebpf"
    assert only(resolved) == Notice(
        "flags ignored: --config is given",
        {"flags": "--kubeconfig, --oom-score-adj, --cluster-cidr, --metrics-port"},
    )


@pytest.mark.parametrize(
    ("command_line", "own", "node"),
    [
        ("", {}, "from-file"),
        ("", {"hostname_override": " From-Flag "}, "from-flag"),
        ("", {"hostname_override": ""}, "from-file"),
    ],
    ids=["the file", "CFG-07: the flag, trimmed and in lower case", "an empty flag is none"],
)
def test_the_nodes_name(command_line: str, own: dict[str, Any], node: str) -> None:
    resolved = said(command_line, "hostnameOverride: From-File", **own)
    assert resolved.config.node_name == node


def test_the_nodes_name_is_the_hosts_where_nobody_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "Host-1")
    assert said("").config.node_name == "host-1"


def test_a_nodes_name_of_spaces_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        said("", hostname_override="  ")
    assert str(error.value) == "--hostname-override: the node's name is empty"


@pytest.mark.parametrize(
    ("command_line", "body", "own", "sync_s", "least_s"),
    [
        ("", None, {}, 30, None),
        ("--iptables-sync-period=1m", None, {}, 60, None),
        ("--iptables-min-sync-period=0s", None, {}, 30, 0),
        ("--ipvs-sync-period=1m", None, {}, 30, None),
        ("--ipvs-sync-period=1m --proxy-mode=ipvs", None, {}, 60, None),
        ("--iptables-sync-period=1m", None, {"sync_period": "5s"}, 5, None),
        ("", "iptables: {syncPeriod: 2m, minSyncPeriod: 0s}", {}, 120, None),
        ("", "iptables: {minSyncPeriod: 3s}", {}, 30, 3),
        ("", "mode: nftables\nnftables: {syncPeriod: 4s, minSyncPeriod: 3s}", {}, 4, 3),
        ("", "mode: nftables\niptables: {syncPeriod: 4s, minSyncPeriod: 3s}", {}, 30, None),
        ("", "iptables: {syncPeriod: 2m}", {"sync_period": "7"}, 7, None),
        ("", "mode: ipvs", {"sync_period": "1.5"}, 1.5, None),
    ],
    ids=[
        "the default; the least one is then the mode's own",
        "CFG-18: by flag",
        "CFG-19: 0 by flag is 0",
        "CFG-20: ipvs' flag means nothing in another mode",
        "ipvs' flag in mode ipvs",
        "our own flag wins over kube-proxy's",
        "by file, where 0s is not set",
        "the least one by file",
        "CFG-23: nftables' section in mode nftables",
        "iptables' section means nothing in mode nftables",
        "our own flag counts beside a file, and takes seconds too",
        "our own flag is for whatever mode there is",
    ],
)
def test_the_sync_periods(
    command_line: str, body: str | None, own: dict[str, Any], sync_s: float, least_s: float | None
) -> None:
    config = said(command_line, body, **own).config
    assert (config.sync_period_s, config.min_sync_period_s) == (sync_s, least_s)


@pytest.mark.parametrize(
    ("command_line", "body", "own", "is_json", "verbosity"),
    [
        ("", None, {}, False, 0),
        ("--logging-format=json", None, {}, True, 0),
        ("--logging-format=json", None, {"log_format": "text"}, False, 0),
        ("", "logging: {format: json, verbosity: 4}", {}, True, 4),
        ("--v=1", "logging: {format: json, verbosity: 4}", {}, True, 1),
        ("", "logging: {format: json}", {"log_format": "text"}, False, 0),
    ],
    ids=[
        "the default",
        "by flag",
        "our own flag wins",
        "CFG-06: by file",
        "CFG-06: the flag wins over the file",
        "our own flag wins over the file",
    ],
)
def test_the_log(
    command_line: str, body: str | None, own: dict[str, Any], is_json: bool, verbosity: int
) -> None:
    config = said(command_line, body, **own).config
    assert (config.log_json, config.verbosity) == (is_json, verbosity)


def test_what_is_ours_counts_beside_a_file() -> None:
    config = said(
        "",
        "mode: ipvs",
        manifests=Path("/m"),
        pin_path=Path("/p"),
        cgroup=Path("/c"),
        map_sizes=("ports=5",),
        audit_period="2m",
        tcp_peer_name=False,
        external_ips=("192.0.2.0/24, 2001:db8::/32", "198.51.100.0/24"),
        protect_nodeports=True,
    ).config
    assert config == Config(
        manifests=Path("/m"),
        pin_path=Path("/p"),
        cgroup=Path("/c"),
        map_sizes={"ports": 5},
        audit_period_s=120.0,
        show_service_tcp=False,
        external_ips=("192.0.2.0/24", "2001:db8::/32", "198.51.100.0/24"),
        protect_node_ports=True,
        node_name=config.node_name,
        config_file=Path("kp.conf"),
        config_content=(HEAD + "mode: ipvs").encode(),
        kube_proxy=config.kube_proxy,
    )


# --- what the user is told -----------------------------------------------------------------------


def test_with_nothing_said_there_is_nothing_to_tell() -> None:
    assert notices(said("")) == []
    assert notices(said("--oom-score-adj=-998 --kubeconfig=/k --bind-address=::")) == []
    settings = "--nodeport-addresses=primary --cluster-cidr=10.0.0.0/8"
    assert said(settings).notices == ()


def test_a_file_in_default_mode_is_told_that_it_means_auto() -> None:
    assert only(said("", "")) == Notice(
        "proxy mode auto: eBPF where this kernel can",
        {"setting": "kp.conf: mode", "says": '""'},
        is_warning=False,
    )


@pytest.mark.parametrize("mode", ["ipvs", "nftables"])
def test_a_mode_that_is_not_ours_is_told_that_it_means_auto(mode: str) -> None:
    notice = only(said(f"--proxy-mode={mode}"))
    assert notice.fields == {"setting": "--proxy-mode", "says": mode}


def test_what_a_strict_reader_would_refuse_is_told_once() -> None:
    assert only(said("--proxy-mode=ebpf", "Mode: ipvs\nfoo: 1")) == Notice(
        "read leniently",
        {
            "file": "kp.conf",
            "problems": "Mode is unknown (is mode meant?); foo is unknown",
        },
    )


@pytest.mark.parametrize(
    ("command_line", "body", "own", "fields"),
    [
        (
            """--ipvs-scheduler=rr --iptables-masquerade-bit=1 --feature-gates=AllAlpha=true
            --healthz-port=99 --machine-id-file=/x --v=0 --vmodule=a=1""",
            None,
            {},
            {
                "file": "",
                "mean_nothing_here": "--ipvs-scheduler, --vmodule, --feature-gates AllAlpha, "
                "--machine-id-file, --healthz-port",
            },
        ),
        (
            "--proxy-mode=ebpf",
            "ipvs: {scheduler: '', strictARP: true}",
            {},
            {"file": "kp.conf", "mean_nothing_here": "ipvs.strictARP"},
        ),
        (
            "--proxy-mode=ebpf",
            "portRange: 1-2\niptables: {masqueradeBit: 3}\nnftables: {masqueradeBit: 4}",
            {},
            {
                "file": "kp.conf",
                "mean_nothing_here": "nftables.masqueradeBit, portRange",
            },
        ),
        (
            "--kubeconfig=/k",
            None,
            {"manifests": Path("/m")},
            {"file": "", "not_beside_manifests": "--kubeconfig"},
        ),
    ],
    ids=[
        "by flag, whatever their values",
        "by file, where not the default",
        "of a mode that is not chosen",
        "beside --manifests",
    ],
)
def test_settings_without_effect_are_told_once(
    command_line: str, body: str | None, own: dict[str, Any], fields: dict[str, str]
) -> None:
    assert only(said(command_line, body, **own)) == Notice("settings without effect", fields)


def test_unset_node_port_addresses_are_told_with_advice_np_02() -> None:
    told = {one.event: one for one in said("--cluster-cidr=10.0.0.0/8").notices}
    assert told == {
        "node port addresses are not set": Notice(
            "node port addresses are not set",
            {"answer_at": "all", "action": "say where: --nodeport-addresses primary is best"},
            is_warning=False,
        )
    }


def test_pods_that_nobody_can_tell_are_told_masq_10() -> None:
    told = [one.event for one in said("--nodeport-addresses=all").notices]
    assert told == ["pods are not told from others"]
    quiet = "--nodeport-addresses=all --detect-local-mode=NodeCIDR"
    assert said(quiet).notices == ()


def test_localhost_that_is_selected_in_vain_is_told_np_13() -> None:
    resolved = said(
        "--nodeport-addresses=primary,localhost --iptables-localhost-nodeports=false "
        "--cluster-cidr=10.0.0.0/8"
    )
    assert only(resolved) == Notice(
        "NodePorts do not answer at localhost",
        {
            "selected_by": "--nodeport-addresses",
            "off_by": "--iptables-localhost-nodeports",
        },
    )


# --- what decides the plan -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command_line", "body", "own", "expected"),
    [
        pytest.param("", None, {}, {}, id="kube-proxy's defaults"),
        pytest.param(
            "--nodeport-addresses=primary --nodeport-addresses=10.0.0.0/8",
            None,
            {},
            {"node_port_addresses": ("primary", "10.0.0.0/8")},
            id="CFG-29 where NodePorts answer",
        ),
        pytest.param("", "nodePortAddresses: []", {}, {}, id="CFG-29 an empty list is unset"),
        pytest.param(
            "--proxy-mode=nftables",
            None,
            {},
            {"node_port_addresses": ("primary",)},
            id="NP-02 as nftables mode has it",
        ),
        pytest.param(
            "",
            "mode: nftables\nnodePortAddresses: [all]",
            {},
            {"node_port_addresses": ("all",)},
            id="NP-02 unless it is said",
        ),
        pytest.param(
            "--iptables-localhost-nodeports=false",
            None,
            {},
            {"localhost_node_ports": False},
            id="CFG-17 no localhost",
        ),
        pytest.param(
            "--cluster-cidr=10.0.0.0/8,fd00::/48",
            None,
            {},
            {"cluster_cidrs": ("10.0.0.0/8", "fd00::/48")},
            id="CFG-28 the pods' ranges",
        ),
        pytest.param(
            "",
            "detectLocalMode: NodeCIDR",
            {},
            {"detect_local_mode": "NodeCIDR"},
            id="CFG-25 how pods are told",
        ),
        pytest.param(
            "--detect-local-mode=BridgeInterface --pod-bridge-interface=cni0",
            None,
            {},
            {"detect_local_mode": "BridgeInterface", "pod_bridge": "cni0"},
            id="CFG-26 by their bridge",
        ),
        pytest.param(
            "--detect-local-mode=InterfaceNamePrefix --pod-interface-name-prefix=veth",
            None,
            {},
            {"detect_local_mode": "InterfaceNamePrefix", "pod_device_prefix": "veth"},
            id="CFG-27 by their devices' names",
        ),
        pytest.param(
            "--feature-gates=AllowServiceExternalIPs=false",
            None,
            {},
            {"allow_external_ips": False},
            id="VER-04 the gate",
        ),
        pytest.param(
            "--bind-address=192.168.50.1",
            None,
            {},
            {"bind_address": "192.168.50.1"},
            id="CFG-08 the node's address",
        ),
        pytest.param(
            "",
            None,
            {"external_ips": ("192.0.2.0/24",)},
            {"external_ips": ("192.0.2.0/24",)},
            id="SEC-02 which externalIPs",
        ),
        pytest.param("", None, {"external_ips": ("",)}, {"external_ips": ()}, id="SEC-02 none"),
    ],
)
def test_what_decides_the_plan(
    command_line: str, body: str | None, own: dict[str, Any], expected: dict[str, Any]
) -> None:
    resolved = said(command_line, body, hostname_override="n1", **own)
    fields: dict[str, Any] = {"node_name": "n1", "bind_address": "0.0.0.0"}
    assert planner_options(resolved.config) == PlannerOptions(**fields | expected)


def test_the_gate_for_external_ips_is_not_without_effect_ver_04() -> None:
    assert notices(said("--feature-gates=AllowServiceExternalIPs=false")) == []


def test_what_decides_the_plan_can_be_left_in_a_map() -> None:
    options = planner_options(said("--nodeport-addresses=all", external_ips=("::/0",)).config)
    text = msgspec.json.encode(msgspec.to_builtins(options))
    assert msgspec.convert(msgspec.json.decode(text), PlannerOptions) == options


@pytest.mark.parametrize("text", ["192.0.2.1", "x", "10.0.0.0/33", "10.0.0.0/8,y"])
def test_an_external_ip_range_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--external-ips [^,]*: must be a CIDR, as 192.0.2.0/2"):
        said("", external_ips=(text,))


# --- single settings -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "ebpf"])
def test_the_modes_that_this_version_has(mode: str) -> None:
    require_supported(Config(node_name="n", proxy_mode=mode))


def test_a_mode_that_this_version_has_not_is_refused() -> None:
    with pytest.raises(ConfigError, match="proxy mode iptables: this version has eBPF mode only"):
        require_supported(Config(node_name="n", proxy_mode="iptables"))


# --- the packet path -----------------------------------------------------------------------------


def packet_path(command_line: str, body: str | None = None, **own: Any) -> dict[str, object]:
    """What was said of it, where that is not the default."""
    config = said(command_line, body, hostname_override="n1", **own).config
    names = (
        *("devices", "pod_devices", "socket_lb", "ping", "preserve_client_ip_local"),
        *("masquerade_bit", "reject_bit"),
        *("tcp_established_timeout_s", "tcp_close_wait_timeout_s"),
    )
    default = Config(node_name="n1")
    values = {name: getattr(config, name) for name in names}
    return {name: value for name, value in values.items() if value != getattr(default, name)}


@pytest.mark.parametrize(
    ("command_line", "body", "own", "expected"),
    [
        pytest.param("", None, {}, {}, id="the defaults"),
        pytest.param(
            "",
            None,
            {"devices": ("eth*, ens3",), "pod_devices": ("cali*", "veth*")},
            {"devices": ("eth*", "ens3"), "pod_devices": ("cali*", "veth*")},
            id="patterns of devices, by comma or one by one",
        ),
        pytest.param(
            "",
            None,
            {"devices": ("",), "pod_devices": ("",)},
            {"devices": (), "pod_devices": ()},
            id="nothing is no device",
        ),
        pytest.param(
            "",
            None,
            {"socket_lb": "host", "ping": "off", "preserve_client_ip_local": True},
            {"socket_lb": "host", "ping": False, "preserve_client_ip_local": True},
            id="switches",
        ),
        pytest.param(
            "--iptables-masquerade-bit=5", None, {}, {"masquerade_bit": 5}, id="MASQ-07 the bit"
        ),
        pytest.param(
            "--iptables-masquerade-bit=5 --proxy-mode=nftables",
            None,
            {},
            {},
            id="MASQ-07 the flag is not nftables'",
        ),
        pytest.param(
            "",
            "mode: nftables\nnftables: {masqueradeBit: 6}\niptables: {masqueradeBit: 5}",
            {},
            {"masquerade_bit": 6},
            id="MASQ-07 of nftables",
        ),
        pytest.param(
            "--proxy-mode=ipvs --iptables-masquerade-bit=5",
            None,
            {},
            {"masquerade_bit": 5},
            id="MASQ-07 ipvs has iptables'",
        ),
        pytest.param("", None, {"reject_bit": 0}, {"reject_bit": 0}, id="the least bit"),
        pytest.param(
            "--iptables-masquerade-bit=13",
            None,
            {"reject_bit": 31},
            {"masquerade_bit": 13, "reject_bit": 31},
            id="the greatest bit, and the other's default",
        ),
        pytest.param(
            "--conntrack-tcp-timeout-established=2h --conntrack-tcp-timeout-close-wait=90s",
            None,
            {},
            {"tcp_established_timeout_s": 7200.0, "tcp_close_wait_timeout_s": 90.0},
            id="CT-21 time-outs",
        ),
        pytest.param(
            "",
            "conntrack: {tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}",
            {},
            {"tcp_established_timeout_s": 0.0, "tcp_close_wait_timeout_s": 0.0},
            id="CT-21 the kernel's own",
        ),
    ],
)
def test_what_the_packet_path_is_told(
    command_line: str, body: str | None, own: dict[str, Any], expected: dict[str, object]
) -> None:
    assert packet_path(command_line, body, **own) == expected


@pytest.mark.parametrize(
    ("command_line", "body", "own", "text"),
    [
        (
            "",
            None,
            {"reject_bit": 14},
            "--reject-bit 14: is iptables.masqueradeBit too; they must differ",
        ),
        (
            "--iptables-masquerade-bit=13",
            None,
            {},
            "--reject-bit 13: is --iptables-masquerade-bit too; they must differ",
        ),
        (
            "",
            "mode: nftables\nnftables: {masqueradeBit: 13}",
            {},
            "--reject-bit 13: is kp.conf: nftables.masqueradeBit too; they must differ",
        ),
        ("", None, {"reject_bit": 32}, "--reject-bit 32: must be 0 to 31"),
        ("", None, {"reject_bit": -1}, "--reject-bit -1: must be 0 to 31"),
        (
            "",
            None,
            {"devices": ("eth0,a/b",)},
            "--devices a/b: must be a device's name, or a pattern such as eth*",
        ),
        (
            "",
            None,
            {"pod_devices": ("veth a",)},
            "--pod-devices veth a: must be a device's name, or a pattern such as eth*",
        ),
    ],
)
def test_what_the_packet_path_cannot_be_told(
    command_line: str, body: str | None, own: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as error:
        said(command_line, body, **own)
    assert str(error.value) == text


@pytest.mark.parametrize(
    ("command_line", "body", "masquerades"),
    [
        ("", None, False),
        ("--masquerade-all=true", None, True),
        ("--masquerade-all=true --proxy-mode=nftables", None, True),
        ("--masquerade-all=true --proxy-mode=ipvs", None, True),
        ("--masquerade-all=false", None, False),
        ("", "mode: nftables\nnftables: {masqueradeAll: true}", True),
        ("", "nftables: {masqueradeAll: true}", False),
        ("", "mode: nftables\niptables: {masqueradeAll: true}", False),
    ],
)
def test_masquerade_all_is_that_of_the_mode_masq_01(
    command_line: str, body: str | None, masquerades: bool
) -> None:
    config = said(command_line, body).config
    require_supported(config)
    assert planner_options(config).masquerade_all is masquerades


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.0.0.0:10256", ("0.0.0.0", 10256)),
        ("[::]:1", ("::", 1)),
        ("[2001:DB8::1]:65535", ("2001:db8::1", 65535)),
        ("010.0.0.1:5", ("10.0.0.1", 5)),
    ],
)
def test_an_address_to_listen_at(text: str, expected: tuple[str, int]) -> None:
    assert parse_bind_address("--flag", text) == expected


@pytest.mark.parametrize("text", ["::1:80", "localhost:80", "1.2.3.4", "1.2.3.4:x", "1.2.3.4:0"])
def test_an_address_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--flag .*: must be IP:port"):
        parse_bind_address("--flag", text)


@pytest.mark.parametrize(
    ("text", "seconds"), [("30", 30), ("0.5", 0.5), ("30s", 30), ("1m0s", 60), ("250ms", 0.25)]
)
def test_a_period_of_ours_is_a_duration_or_seconds(text: str, seconds: float) -> None:
    assert parse_period("--audit-period", text).s == seconds


@pytest.mark.parametrize("text", ["soon", "", "5 s", "1e3"])
def test_a_period_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--audit-period .*: must be a duration such as 30s"):
        parse_period("--audit-period", text)


def test_audits_cannot_be_without_a_pause() -> None:
    with pytest.raises(ConfigError, match=r"^--audit-period 0s: must be more than 0s"):
        said("", audit_period="0s")


def test_map_sizes() -> None:
    assert parse_map_sizes(["ports=5,names=6", "ports=7"]) == {"ports": 7, "names": 6}


@pytest.mark.parametrize("text", ["ports", "ports=", "=5", "ports=-1", "ports=five"])
def test_a_map_size_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--map-size {text}: must be NAME=N$"):
        parse_map_sizes([text])


def test_a_config_made_by_hand_has_the_defaults_of_one_with_nothing_said() -> None:
    config = said("").config
    assert config == Config(node_name=config.node_name)
