# SPDX-License-Identifier: Apache-2.0
"""``ebpflb run``: flags to a Config, then the agent."""

from __future__ import annotations

from pathlib import Path

import click

from ebpflb.cli import options
from ebpflb.config import AUDIT_PERIOD_S, SYNC_PERIOD_S

_FOLDER = click.Path(readable=False, path_type=Path)


@click.command(short_help="the agent")
@click.option(
    "--manifests",
    type=_FOLDER,
    metavar="DIR",
    required=True,
    help="Folder of YAML or JSON files with Services, EndpointSlices and a Node; watched.",
)
@click.option("--proxy-mode", default="auto", show_default=True, help="auto or ebpf.")
@options.pin_path
@click.option(
    "--cgroup",
    type=_FOLDER,
    metavar="DIR",
    help="Attach the programs here.  [default: the root of cgroup v2]",
)
@click.option("--hostname-override", help="This node's name.  [default: the host's name]")
@click.option(
    "--map-size",
    "map_sizes",
    multiple=True,
    metavar="NAME=N[,NAME=N…]",
    help="Entries of a map: frontends, ports, backends, affinity, members, udp_conn, names.",
)
@click.option("--healthz-bind-address", default="0.0.0.0:10256", show_default=True)
@click.option("--metrics-bind-address", default="127.0.0.1:10249", show_default=True)
@click.option(
    "--bind-address-hard-fail", is_flag=True, help="End when an address is taken, do not retry."
)
@click.option(
    "--sync-period",
    default=SYNC_PERIOD_S,
    show_default=True,
    metavar="SECONDS",
    help="/healthz turns red when a change has waited for twice as long.",
)
@click.option(
    "--audit-period",
    default=AUDIT_PERIOD_S,
    show_default=True,
    metavar="SECONDS",
    help="How often kernel and plan are compared and differences repaired.",
)
@click.option(
    "--tcp-peer-name/--no-tcp-peer-name",
    default=False,
    show_default=True,
    help="getpeername() of a TCP socket shows the Service; it costs some 5 % of a connect().",
)
@click.option(
    "--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@click.option("-v", "--verbose", is_flag=True, help="Log what only debugging needs.")
def run(
    *,
    manifests: Path,
    proxy_mode: str,
    pin_path: Path,
    cgroup: Path | None,
    hostname_override: str | None,
    map_sizes: tuple[str, ...],
    healthz_bind_address: str,
    metrics_bind_address: str,
    bind_address_hard_fail: bool,
    sync_period: float,
    audit_period: float,
    tcp_peer_name: bool,
    log_format: str,
    verbose: bool,
) -> None:
    """Serve the Services of this node until SIGTERM; the data path stays when the agent ends."""
    from ebpflb import agent, logs
    from ebpflb.config import Config, node_name, parse_map_sizes

    logs.configure(json=log_format == "json", verbose=verbose)
    agent.run(
        Config(
            manifests=manifests,
            node_name=node_name(hostname_override),
            proxy_mode=proxy_mode,
            pin_path=pin_path,
            cgroup=cgroup,
            map_sizes=parse_map_sizes(map_sizes),
            healthz_bind_address=healthz_bind_address,
            metrics_bind_address=metrics_bind_address,
            bind_address_hard_fail=bind_address_hard_fail,
            sync_period_s=sync_period,
            audit_period_s=audit_period,
            show_service_tcp=tcp_peer_name,
        ).checked()
    )
