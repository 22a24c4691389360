"""``ebpflb run`` takes kube-proxy's command line, spelt as pflag has it, and ours beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import yaml
from click.testing import CliRunner, Result

from ebpflb import __version__, agent, logs, sysctls
from ebpflb.cli import cleanup, main
from ebpflb.cli.run import run as run_command
from ebpflb.config import Config
from ebpflb.kubeproxy.flags import FLAGS, LOG_FLAGS
from ebpflb.kubeproxy.schema import Conntrack, KubeProxyConfiguration, field_types
from tests.logs import EventDict, capture_logs

HEAD = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations that an agent was started with; none of them runs."""
    configs: list[Config] = []
    monkeypatch.setattr(agent, "run", configs.append)
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    return configs


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[EventDict]]:
    """What was logged, instead of being printed."""
    with capture_logs() as lines:
        yield lines


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


# CFG-03, CFG-38 to -43 and section 8.1: every flag that kube-proxy has on Linux or Windows.
KUBE_PROXY_FLAGS = """
bind-address bind-address-hard-fail boot-id-file cleanup cluster-cidr config config-sync-period
conntrack-max-per-core conntrack-min conntrack-tcp-be-liberal conntrack-tcp-timeout-close-wait
conntrack-tcp-timeout-established conntrack-udp-timeout conntrack-udp-timeout-stream
detect-local-mode enable-dsr feature-gates forward-healthcheck-vip healthz-bind-address
healthz-port help hostname-override init-only iptables-localhost-nodeports iptables-masquerade-bit
iptables-min-sync-period iptables-sync-period ipvs-exclude-cidrs ipvs-min-sync-period
ipvs-scheduler ipvs-strict-arp ipvs-sync-period ipvs-tcp-timeout ipvs-tcpfin-timeout
ipvs-udp-timeout kube-api-burst kube-api-content-type kube-api-qps kubeconfig log-flush-frequency
log-json-info-buffer-size log-json-split-stream log-text-info-buffer-size log-text-split-stream
logging-format machine-id-file masquerade-all master metrics-bind-address metrics-port network-name
nodeport-addresses oom-score-adj pod-bridge-interface pod-interface-name-prefix profiling
proxy-mode root-hnsendpoint-name show-hidden-metrics-for-version source-vip v version vmodule
windows-service write-config-to
"""
OURS = """
manifests pin-path cgroup map-size sync-period audit-period tcp-peer-name log-format external-ips
protect-nodeports devices pod-devices socket-lb ping preserve-client-ip-local reject-bit
"""


def options_of_run() -> set[str]:
    context = run_command.make_context("run", [], resilient_parsing=True)
    names = {name for param in run_command.get_params(context) for name in param.opts}
    return {name.removeprefix("--") for name in names if name.startswith("--")}


def test_all_flags_of_kube_proxy_are_there_and_no_others_but_ours() -> None:
    assert options_of_run() == {*KUBE_PROXY_FLAGS.split(), *OURS.split()}


def test_every_flag_and_every_field_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert [name for name in KUBE_PROXY_FLAGS.split() if f"--{name}`" not in text] == ["help"]
    assert not [name for name in OURS.split() if name not in text]
    whole = ("ipvs", "winkernel", "logging.options")  # sections that are told in one line
    assert not [
        f"{section}.{field}"
        for section, field in fields(KubeProxyConfiguration)
        if field not in text and not section.startswith(whole)
    ]


def fields(section: type, path: str = "") -> Iterator[tuple[str, str]]:
    for name, kind in field_types(section).items():
        if name in {"apiVersion", "kind"}:
            continue
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            yield from fields(kind, f"{path}.{name}".removeprefix("."))
        else:
            yield path, name


@pytest.mark.parametrize("unknown", ["--frobnicate", "--proxy-port-range=1-2", "-x"])
def test_an_unknown_flag_is_refused_and_exits_2(unknown: str, started: list[Config]) -> None:
    result = run(unknown)
    assert (result.exit_code, started) == (2, [])
    assert "No such option" in result.stderr


def test_an_argument_is_refused(started: list[Config]) -> None:
    assert (run("more").exit_code, started) == (2, [])


SPELLINGS: dict[str, list[str]] = {
    "--flag=value": ["--oom-score-adj=-5"],
    "--flag value": ["--oom-score-adj", "-5"],
    "with underscores": ["--oom_score_adj=-5"],
    "twice, and the last counts": ["--oom-score-adj=1", "--oom-score-adj=-5"],
}


@pytest.mark.parametrize("arguments", SPELLINGS.values(), ids=SPELLINGS)
def test_a_flag_may_be_spelt_in_each_of_pflags_ways(
    arguments: list[str], started: list[Config]
) -> None:
    assert run(*arguments).exit_code == 0
    assert started[0].kube_proxy.oom_score_adj == -5


@pytest.mark.parametrize(
    ("arguments", "is_on"),
    [
        ([], False),
        (["--bind-address-hard-fail"], True),
        (["--bind-address-hard-fail=true"], True),
        (["--bind-address-hard-fail=1"], True),
        (["--bind-address-hard-fail=false"], False),
        (["--bind-address-hard-fail", "--masquerade-all=false"], True),
    ],
)
def test_a_switch_needs_no_value_and_takes_one(
    arguments: list[str], is_on: bool, started: list[Config]
) -> None:
    assert run(*arguments).exit_code == 0
    assert started[0].bind_address_hard_fail is is_on


@pytest.mark.parametrize("arguments", [["-v", "4"], ["-v4"], ["-v=4"], ["--v=4"], ["--v", "4"]])
def test_the_level_of_the_log_may_be_spelt_in_each_way(
    arguments: list[str], started: list[Config]
) -> None:
    assert run(*arguments).exit_code == 0
    assert started[0].verbosity == 4


@pytest.mark.parametrize(
    ("level", "verbose"), [("0", False), ("3", False), ("4", True), ("10", True)]
)
def test_from_level_4_on_debugging_is_logged(
    level: str, verbose: bool, started: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured: list[dict[str, bool]] = []
    monkeypatch.setattr(logs, "configure", lambda **how: configured.append(how))
    run("-v", level, "--log-format=json")
    assert configured == [{"json": True, "verbose": verbose}]


def test_every_flag_at_once(started: list[Config]) -> None:
    values = {"[=BOOL]": "=true", "DURATION": "=40s", "N": "=5", "NAME=BOOL…": "=AllAlpha=true"}
    special = {
        "proxy-mode": "=ebpf",
        "bind-address": "=192.0.2.1",
        "healthz-bind-address": "=192.0.2.1:1",
        "metrics-bind-address": "=192.0.2.1",
        "detect-local-mode": "=NodeCIDR",
        "cluster-cidr": "=10.0.0.0/8",
        "nodeport-addresses": "=primary",
        "ipvs-exclude-cidrs": "=10.0.0.0/8",
        "show-hidden-metrics-for-version": "=1.36",
        "logging-format": "=json",
        "vmodule": "=a=1",
        "masquerade-all": "=false",
    }
    arguments = [
        f"--{flag.name}{special.get(flag.name) or values.get(flag.kind.metavar, '=x')}"
        for flag in (*FLAGS, *LOG_FLAGS)
    ]
    result = run(*arguments, "--master=https://192.0.2.1", "--hostname-override=n1")
    assert (result.exit_code, result.output) == (0, "")
    assert started[0].node_name == "n1"


# --- a file --------------------------------------------------------------------------------------


def test_a_file_says_it_and_is_remembered(tmp_path: Path, started: list[Config]) -> None:
    path = tmp_path / "kp.conf"
    path.write_text(HEAD + "oomScoreAdj: 7")
    assert run("--config", str(path), "--oom-score-adj=8").exit_code == 0
    config = started[0]
    assert config.kube_proxy.oom_score_adj == 7
    assert (config.config_file, config.config_content) == (path, path.read_bytes())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "Error: --config {path}: No such file or directory\n"),
        (HEAD + "oomScoreAdj: x", "Error: {path}: oomScoreAdj 'x': must be a whole number\n"),
        (HEAD + "oomScoreAdj: 5000", "Error: {path}: oomScoreAdj 5000: must be -1000 to 1000\n"),
    ],
    ids=["not there", "of a wrong type", "out of range"],
)
def test_a_file_that_is_wrong_exits_2(
    content: str | None, said: str, tmp_path: Path, started: list[Config]
) -> None:
    path = tmp_path / "kp.conf"
    if content is not None:
        path.write_text(content)
    result = run("--config", str(path))
    assert (result.exit_code, started) == (2, [])
    assert result.stderr == said.format(path=path)


def test_mode_iptables_is_refused_as_long_as_there_is_none(started: list[Config]) -> None:
    result = run("--proxy-mode=iptables")
    assert (result.exit_code, started) == (2, [])
    assert "this version has eBPF mode only" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "networks", "protect"),
    [
        pytest.param([], None, False, id="the defaults"),
        pytest.param(["--external-ips=192.0.2.0/24"], ("192.0.2.0/24",), False, id="a network"),
        pytest.param(
            ["--external-ips", "192.0.2.0/24,::/0", "--external-ips=10.0.0.0/8"],
            ("192.0.2.0/24", "::/0", "10.0.0.0/8"),
            False,
            id="several",
        ),
        pytest.param(["--external-ips="], (), False, id="none"),
        pytest.param(["--protect-nodeports"], None, True, id="NP-10 protected"),
    ],
)
def test_our_own_flags_for_addresses(
    arguments: list[str],
    networks: tuple[str, ...] | None,
    protect: bool,
    started: list[Config],
) -> None:
    assert run(*arguments).exit_code == 0
    assert (started[0].external_ips, started[0].protect_node_ports) == (networks, protect)


def test_an_external_ip_range_that_is_none_exits_2(started: list[Config]) -> None:
    result = run("--external-ips=192.0.2.1")
    assert (result.exit_code, started) == (2, [])
    assert result.stderr == "Error: --external-ips 192.0.2.1: must be a CIDR, as 192.0.2.0/24\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (None, None, "all", True, False, 13)),
        (["--devices=eth*,ens3", "--pod-devices="], (("eth*", "ens3"), (), "all", True, False, 13)),
        (["--socket-lb=host", "--ping", "off"], (None, None, "host", False, False, 13)),
        (["--socket-lb", "off", "--ping=on"], (None, None, "off", True, False, 13)),
        (
            ["--preserve-client-ip-local", "--reject-bit=4"],
            (None, None, "all", True, True, 4),
        ),
        (["--no-preserve-client-ip-local"], (None, None, "all", True, False, 13)),
    ],
    ids=lambda value: " ".join(value) or "the defaults" if isinstance(value, list) else "",
)
def test_our_own_flags_for_packets(
    arguments: list[str], expected: tuple[object, ...], started: list[Config]
) -> None:
    assert run(*arguments).exit_code == 0
    config = started[0]
    assert expected == (
        *(config.devices, config.pod_devices, config.socket_lb, config.ping),
        *(config.preserve_client_ip_local, config.reject_bit),
    )


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--socket-lb=some", "'some' is not one of 'all', 'host', 'off'"),
        ("--ping=maybe", "'maybe' is not one of 'on', 'off'"),
        ("--reject-bit=x", "'x' is not a valid integer"),
        ("--reject-bit=14", "--reject-bit 14: is iptables.masqueradeBit too; they must differ"),
    ],
)
def test_what_a_flag_for_packets_cannot_say_exits_2(
    argument: str, text: str, started: list[Config]
) -> None:
    result = run(argument)
    assert (result.exit_code, started) == (2, [])
    assert text in result.stderr


# --- instead of running --------------------------------------------------------------------------


def test_write_config_to_writes_the_effective_configuration_and_ends(
    tmp_path: Path, started: list[Config]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    result = run(
        *("--write-config-to", str(first), "--iptables-sync-period=1m", "--nodeport-addresses=all"),
        *("--hostname-override", " N1 ", "--proxy-mode", "ebpf", "--v=3", "--sync-period", "7"),
    )
    assert (result.exit_code, started) == (0, [])
    said = yaml.safe_load(first.read_text())
    assert said["iptables"]["syncPeriod"] == "7s"
    assert said["nodePortAddresses"] == ["all"]
    assert (said["mode"], said["logging"]["verbosity"]) == ("ebpf", 3)
    assert run("--config", str(first), "--write-config-to", str(second)).exit_code == 0
    assert first.read_bytes() == second.read_bytes()


def test_write_config_to_says_what_a_file_cannot_say(tmp_path: Path) -> None:
    result = run("--write-config-to", str(tmp_path / "f"), "--healthz-bind-address=")
    assert result.exit_code == 0
    assert 'Note: healthzBindAddress is "" there' in result.stderr


def test_write_config_to_where_nothing_can_be_written_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "folder"
    result = run("--write-config-to", str(path))
    assert result.exit_code == 2
    assert result.stderr == f"Error: --write-config-to {path}: No such file or directory\n"


@pytest.mark.parametrize("flag", ["--cleanup", "--cleanup=true"])
def test_cleanup_does_what_the_command_does(
    flag: str, tmp_path: Path, started: list[Config]
) -> None:
    absent = tmp_path / "absent"
    result = run(flag, "--pin-path", str(absent), "--proxy-mode=iptables")
    assert (result.exit_code, started) == (0, [])
    assert result.stdout == f"Nothing to remove: {absent} does not exist.\n"
    assert result.stdout == CliRunner().invoke(cleanup.cleanup, ["--pin-path", str(absent)]).stdout


def test_init_only_sets_what_needs_privileges_and_ends(
    started: list[Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Conntrack] = []
    monkeypatch.setattr(sysctls, "set_conntrack", told.append)
    assert run("--init-only", "--conntrack-min=5").exit_code == 0
    assert started == []
    assert [one.min for one in told] == [5]


@pytest.mark.parametrize("flag", ["--cleanup=false", "--init-only=false", "--version=false"])
def test_a_switch_that_is_off_changes_nothing(flag: str, started: list[Config]) -> None:
    assert run(flag).exit_code == 0
    assert len(started) == 1


@pytest.mark.parametrize("flag", ["--version", "--version=true"])
def test_version(flag: str, started: list[Config]) -> None:
    assert (run(flag).stdout, started) == (f"ebpflb {__version__}\n", [])


def test_help_says_what_has_an_effect_and_where_the_rest_is() -> None:
    text = " ".join(run("--help").stdout.split())
    for shown in ("--proxy-mode", "--conntrack-min", "--write-config-to", "docs/configuration.md"):
        assert shown in text
    assert "--ipvs-scheduler" not in text


def test_notices_are_events_of_the_log(started: list[Config], logged: list[EventDict]) -> None:
    assert run("--ipvs-scheduler=rr", "--proxy-mode=ipvs").exit_code == 0
    assert [line["log_level"] for line in logged] == ["info", "warning", "info", "info"]
    assert logged[1] == {
        "event": "settings without effect",
        "log_level": "warning",
        "mean_nothing_here": "--ipvs-scheduler",
    }
