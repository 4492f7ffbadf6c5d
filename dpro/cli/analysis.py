"""What the analysing commands share: open a run, build its graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dpro.cli.completion import ranges as complete_ranges
from dpro.errors import UsageError

if TYPE_CHECKING:
    from polars import DataFrame

    from dpro.analysis.analysis import Analysis
    from dpro.selection import Ranges

run_argument = click.argument("run", type=click.Path(), metavar="RUN")


def _read_ranges(_context: click.Context, option: click.Parameter, text: str | None) -> Ranges:
    """Callback of options that select.

    Raises:
        UsageError: the text is no list of numbers and ranges.
    """
    if text is None:
        return ()
    from dpro.selection import parse_ranges

    ranges = parse_ranges(text, str(option.name))
    if not ranges:
        raise UsageError(f"--{option.name} names none: give some, as 3, 3-8 or 3,5,7-9")
    return ranges


steps_option = click.option(
    "--steps",
    metavar="STEPS",
    callback=_read_ranges,
    shell_complete=complete_ranges,
    help="Only these steps: 3-8, or 3,5,7-9.",
)
ranks_option = click.option(
    "--ranks",
    metavar="RANKS",
    callback=_read_ranges,
    shell_complete=complete_ranges,
    help="Only these ranks: 0, or 0,2-3.",
)


def analyse(path: str, network_table: str | None = None) -> Analysis:
    """Open RUN (importing it if it is not a run directory yet) and build its graph, or find it in the cache.

    Args:
        path: as the user gave it.
        network_table: a file of what communication takes, if the user gave one.

    Raises:
        InputError: RUN or the table cannot be read.
        Unanswerable: it holds no spans.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.cli.runs import open_or_import

    network = _network(network_table) if network_table else None
    return with_graph(Analysis(open_or_import(path), network))


def _network(path: str) -> DataFrame:
    from dpro.replay.models.network_tables import read_frame

    return read_frame(path)


def with_graph(analysis: Analysis) -> Analysis:
    """The analysis of a run, once its graph is there.

    Raises:
        Unanswerable: it holds no spans.
    """
    from dpro.cli.output import progress

    with progress("Building the graph") as report:
        analysis.report_progress = report
        _ = analysis.graph_and_trust
    return analysis
