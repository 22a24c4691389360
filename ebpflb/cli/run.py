# SPDX-License-Identifier: Apache-2.0
"""``ebpflb run``: flags and a file to a Config, then the agent.

It takes kube-proxy's command line as it is, spelt as pflag takes it, and our own flags beside it.
This file must not know what a setting means.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from ebpflb import __version__
from ebpflb.cli import options
from ebpflb.config import AUDIT_PERIOD_S, REJECT_BIT, SOCKET_LB, Config, File, Notice, Own
from ebpflb.errors import ConfigError
from ebpflb.kubeproxy.flags import BOOL, FLAGS, LOG_FLAGS, Flag

_Command = TypeVar("_Command", bound=Callable[..., Any])

_FOLDER = click.Path(readable=False, path_type=Path)
_TRUE = "true"


def _flag(flag: Flag) -> Callable[[_Command], _Command]:
    """An option that gives the texts as they stood; reading them is the flag's own matter."""
    return click.option(
        *(["-v", "--v"] if flag.name == "v" else [f"--{flag.name}"]),
        multiple=True,
        metavar=flag.kind.metavar,
        help=flag.help,
        hidden=not flag.help,
        **_as_pflag_bool() if flag.kind is BOOL else {},
    )


def _as_pflag_bool() -> dict[str, Any]:
    """``--x`` and ``--x=false``, as pflag has it."""
    return {"is_flag": False, "flag_value": _TRUE}


def _kube_proxy_flags(command: _Command) -> _Command:
    for flag in reversed((*FLAGS, *LOG_FLAGS)):
        command = _flag(flag)(command)
    return command


def _show_version(ctx: click.Context, _param: click.Parameter, text: str | None) -> None:
    if text is not None and _is_true("version", text):
        click.echo(f"ebpflb {__version__}")
        ctx.exit()


def _is_true(name: str, text: str | None) -> bool:
    return bool(Flag(name, BOOL, "").value(text)) if text is not None else False


@click.command(
    short_help="the agent",
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
    epilog="All other flags of kube-proxy are taken too; docs/configuration.md says what becomes "
    "of each.",
)
@click.option(
    "--manifests",
    type=_FOLDER,
    metavar="DIR",
    help="Folder of YAML or JSON files with Services, EndpointSlices and a Node, watched, in place "
    "of an API server.",
)
@click.option(
    "--config",
    "config_file",
    type=_FOLDER,
    metavar="FILE",
    help="A KubeProxyConfiguration; most of kube-proxy's flags are ignored beside it.",
)
@click.option(
    "--master", default="", metavar="URL", help="The API server, whatever kubeconfig says."
)
@click.option(
    "--hostname-override", metavar="NAME", help="This node's name.  [default: the host's name]"
)
@options.pin_path
@click.option(
    "--cgroup", type=_FOLDER, metavar="DIR", help="Attach here.  [default: the root of cgroup v2]"
)
@click.option(
    "--map-size",
    "map_sizes",
    multiple=True,
    metavar="NAME=N[,NAME=N…]",
    help="Entries of a map: frontends, ports, backends, affinity, members, udp_conn, names,"
    " node_addrs, flows_new, conntrack, source_ranges, service_addrs.",
)
@click.option(
    "--sync-period",
    metavar="DURATION",
    help="The same as --iptables-sync-period, and counts beside --config too.",
)
@click.option(
    "--audit-period",
    metavar="DURATION",
    help="How often kernel and plan are compared and differences repaired.  "
    f"[default: {AUDIT_PERIOD_S:g}s]",
)
@click.option(
    "--tcp-peer-name/--no-tcp-peer-name",
    default=False,
    show_default=True,
    help="getpeername() of a TCP socket shows the Service; it costs some 5 % of a connect().",
)
@click.option(
    "--external-ips",
    multiple=True,
    metavar="CIDR[,CIDR…]",
    help="Which addresses a Service may take by its externalIPs; = (nothing) is none.  "
    "[default: any]",
)
@click.option(
    "--protect-nodeports/--no-protect-nodeports",
    default=False,
    show_default=True,
    help="No process of this node may bind() to a NodePort, where it would hear nothing.",
)
@click.option(
    "--devices",
    multiple=True,
    metavar="PATTERN[,PATTERN…]",
    help="Uplinks, where clients from outside come in; = (nothing) is none.  [default: those with "
    "an address of the Node or a default route]",
)
@click.option(
    "--pod-devices",
    multiple=True,
    metavar="PATTERN[,PATTERN…]",
    help="This node's ends of the pods' devices; = (nothing) is none.  [default: those with a "
    "route to one address, and the ports of bridges]",
)
@click.option(
    "--socket-lb",
    type=click.Choice(SOCKET_LB),
    default=SOCKET_LB[0],
    show_default=True,
    help="Whose connects are translated at the socket: all, this node's own processes' (pods' "
    "packets are translated instead), or nobody's.",
)
@click.option(
    "--ping",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Answer pings to a Service's address behind which there is an endpoint.",
)
@click.option(
    "--preserve-client-ip-local/--no-preserve-client-ip-local",
    default=False,
    show_default=True,
    help="A backend on this node sees the client's address also under externalTrafficPolicy "
    "Cluster.",
)
@click.option(
    "--reject-bit",
    type=int,
    default=REJECT_BIT,
    show_default=True,
    metavar="N",
    help="The bit of a packet's mark that has netfilter answer it: no endpoint.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]), help="[default: text]")
@click.option(
    "--write-config-to",
    type=_FOLDER,
    metavar="FILE",
    help="Write the effective configuration there and end.",
)
@click.option(
    "--cleanup",
    "only_cleanup",
    metavar="[=BOOL]",
    help="Remove all that is ours from this node and end: ebpflb cleanup.",
    **_as_pflag_bool(),
)
@click.option(
    "--init-only",
    metavar="[=BOOL]",
    help="Set what needs all privileges (conntrack's sysctls) and end.",
    **_as_pflag_bool(),
)
@click.option(
    "--version",
    metavar="[=BOOL]",
    help="Show the version and end.",
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    **_as_pflag_bool(),
)
@_kube_proxy_flags
@click.pass_context
def run(
    ctx: click.Context,
    /,
    *,
    config_file: Path | None,
    write_config_to: Path | None,
    only_cleanup: str | None,
    init_only: str | None,
    **flags: Any,
) -> None:
    """Serve the Services of this node until SIGTERM; the data path stays when the agent ends."""
    from ebpflb.config import require_supported, resolve

    names = [flag.name for flag in (*FLAGS, *LOG_FLAGS)]
    texts = {name: flags.pop(name.replace("-", "_")) for name in names}
    given = {name: values for name, values in texts.items() if values}
    file = None if config_file is None else _read(config_file)
    config, notices = resolve(Own(**flags), given, file)
    if write_config_to is not None:
        _write(write_config_to, config)
    if _is_true("cleanup", only_cleanup):
        from ebpflb.cli.cleanup import cleanup

        ctx.invoke(cleanup, pin_path=config.pin_path, cgroup=config.cgroup)
        return
    _say(config, notices)
    if _is_true("init-only", init_only):
        from ebpflb import sysctls

        sysctls.set_conntrack(config.kube_proxy.conntrack)
        return
    require_supported(config)
    from ebpflb import agent

    agent.run(config)


def _read(path: Path) -> File:
    from ebpflb.kubeproxy.file import read

    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    config, problems = read(str(path), data)
    return File(path, data, config, problems)


def _write(path: Path, config: Config) -> NoReturn:
    from ebpflb.kubeproxy.file import text_of

    try:
        path.write_text(text_of(config.kube_proxy))
    except OSError as error:
        raise ConfigError(f"--write-config-to {path}: {error.strerror}") from None
    click.echo(f"Wrote the configuration to {path}.", err=True)
    for field, address in (
        ("healthzBindAddress", config.healthz_bind_address),
        ("metricsBindAddress", config.metrics_bind_address),
    ):
        if not address:
            click.echo(
                f'Note: {field} is "" there, which a reader takes for the default address: '
                "that a server is off can be said by flag alone.",
                err=True,
            )
    raise click.exceptions.Exit(0)


def _say(config: Config, notices: tuple[Notice, ...]) -> None:

    from ebpflb import logs
    from ebpflb.config import DEBUG_VERBOSITY

    logs.configure(json=config.log_json, verbose=config.verbosity >= DEBUG_VERBOSITY)
    log = logs.Log("config")
    for notice in notices:
        fields = {key: value for key, value in notice.fields.items() if value}
        (log.warning if notice.is_warning else log.info)(notice.event, **fields)
