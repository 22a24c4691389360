# SPDX-License-Identifier: Apache-2.0
"""``ebpflb bench``: measure on this machine what the product promises, and judge it.

Progress goes to standard error, the result to standard output. This file must not know how
anything is measured.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from ebpflb.cli import options, render
from ebpflb.cli.render import Column, Styled

if TYPE_CHECKING:
    from ebpflb.bench.report import Gate, Report


@click.command(
    short_help="measure on this machine what is promised",
    epilog="Exit code 1 where a gate is missed, or where the machine is too busy to tell.",
)
@click.option("--quick", is_flag=True, help="The gates alone: some three minutes.")
@options.output("table", "json")
def bench(*, quick: bool, output: str) -> None:
    """Measure on this machine what ebpflb promises, at 10,000 Services x 10 endpoints.

    In network namespaces of its own, which go when it ends; needs root and a C compiler.
    """
    from ebpflb.bench import suite
    from ebpflb.lab import LabError

    if not quick:
        raise click.UsageError("this version measures the gates alone: ebpflb bench --quick")
    began_s = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - began_s:5.1f} s] {text}", err=True)

    try:
        report = suite.run(suite.QUICK, say)
    except LabError as error:
        raise click.ClickException(str(error)) from error
    show(report, output)
    if not report.passed:
        raise click.exceptions.Exit(1)


def show(report: Report, output: str) -> None:
    """Print a report as ``-o`` has it."""
    if output == "json":
        render.print_json(report)
        return
    print_environment(report)
    render.print_line()
    render.print_table(
        [
            Column("CONNECT"),
            Column("SAMPLES", right=True, rigid=True),
            Column("P50", right=True, rigid=True),
            Column("X DIRECT", right=True, rigid=True),
            Column("P99", right=True, rigid=True),
            Column("X DIRECT", right=True, rigid=True),
            Column("SOCKET TO CLOSE", right=True, rigid=True),
        ],
        [
            [
                mode.title,
                f"{mode.samples:,}",
                measure(mode.p50_us, "µs"),
                f"{mode.p50:.3f}",
                measure(mode.p99_us, "µs"),
                f"{mode.p99:.3f}",
                f"{mode.cycle:.3f}",
            ]
            for mode in report.modes
        ],
    )
    render.print_line()
    render.print_table(
        [Column("FIGURE"), Column("MEASURED", right=True, rigid=True)],
        [[one.title, measure(one.measured, one.unit)] for one in report.figures],
    )
    render.print_line()
    render.print_table(
        [
            Column("GATE"),
            Column("MEASURED", right=True, rigid=True),
            Column("AT MOST", right=True, rigid=True),
            Column("VERDICT", rigid=True),
        ],
        [
            [gate.title, measure(gate.measured, gate.unit), _limit(gate), _verdict(gate)]
            for gate in report.gates
        ],
    )
    if report.refused:
        render.print_line()
        render.print_line(Styled("refused: ", "bold red"), report.refused)


def print_environment(report: Report) -> None:
    on = report.environment
    render.print_line(f"{report.services:,} Services x {report.endpoints} endpoints")
    render.print_line(
        f"Linux {on.kernel}, {on.cpus} CPUs ({on.cpu_model}), Python {on.python}, bcc {on.bcc}, "
        f"libbpf {on.libbpf}, ebpflb {on.ebpflb}"
    )
    render.print_line(
        f"{on.foreign_cpu:.0%} of the CPUs were used by others while connects were timed; "
        f"the run took {on.seconds:.0f} s"
    )
    render.print_line(f"the second agent: {on.second_agent}")
    if on.root_programs:
        render.print_line(
            Styled(
                f"{on.root_programs} programs are attached to the root of cgroup v2: "
                "they ran for the direct connects too",
                "yellow",
            )
        )


def measure(value: float, unit: str) -> str:
    """A value with as many digits as are worth reading."""
    if unit == "x":
        return f"{value:.3f} x"
    text = f"{value:,.2f}" if unit in {"ms", "s", "MiB", "µs"} else f"{value:,.0f}"
    return f"{text} {unit}".strip()


def _limit(gate: Gate) -> str:
    return f"{gate.limit:g} {gate.unit}".strip()


def _verdict(gate: Gate) -> Styled:
    return Styled("ok", "green") if gate.passed else Styled("MISSED", "bold red")
