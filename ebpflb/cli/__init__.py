# SPDX-License-Identifier: Apache-2.0
"""The ``ebpflb`` command: which commands there are, and how an error becomes an exit code.

A command's module is imported when it runs, so that no command pays for another's imports. This
file must not know what a command does.

Exit codes: 0 good, 1 a difference or failure found, 2 wrong usage or configuration, 3 the kernel
cannot. An exception that is none of the product's three is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import click

from ebpflb import __version__
from ebpflb.errors import EbpflbError


class _Entry(NamedTuple):
    """Where a command is, and its line in the list."""

    target: str
    summary: str


_COMMANDS = {
    "run": _Entry("ebpflb.cli.run:run", "The agent: make this node follow the cluster."),
    "map": _Entry("ebpflb.cli.map_dump:map_group", "The kernel's maps as they are."),
    "service": _Entry("ebpflb.cli.service_list:service_group", "Services as the kernel has them."),
    "check": _Entry("ebpflb.cli.check:check", "What should be against what is: every difference."),
    "status": _Entry("ebpflb.cli.status:status", "One page: what runs, how full, what is wrong."),
    "cleanup": _Entry("ebpflb.cli.cleanup:cleanup", "Remove all that is ours from this node."),
    "demo": _Entry("ebpflb.cli.demo:demo", "A small cluster of namespaces on this machine."),
    "bench": _Entry("ebpflb.cli.bench:bench", "The comparison with iptables mode."),
}


class LazyGroup(click.Group):
    """A group whose commands are named here and imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].target.partition(":")
        command = getattr(importlib.import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in _COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EbpflbError as error:
            click.echo(f"Error: {error}", err=True)
            raise click.exceptions.Exit(error.exit_code) from error


@click.group(
    "ebpflb",
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 good, 1 a difference or failure found, 2 wrong usage or configuration, "
    "3 the kernel cannot.",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Kubernetes Service load balancing in eBPF, in place of kube-proxy."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
