"""What the analysing commands share: open a run, build its graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis

run_argument = click.argument("run", type=click.Path(), metavar="RUN")


def analyse(path: str) -> Analysis:
    """Open RUN (importing it if it is not a run directory yet) and build its graph, or find it in the cache.

    Raises:
        InputError: RUN cannot be read.
        Unanswerable: it holds no spans.
    """
    from dpro.analysis.analysis import Analysis
    from dpro.cli.runs import open_or_import

    return with_graph(Analysis(open_or_import(path)))


def with_graph(analysis: Analysis) -> Analysis:
    """The analysis of a run, once its graph is there.

    Raises:
        Unanswerable: it holds no spans.
    """
    from dpro.cli.output import stderr_console

    with stderr_console().status("Building the graph …"):
        _ = analysis.graph_and_trust
    return analysis
