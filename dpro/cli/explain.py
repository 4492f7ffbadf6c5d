"""`dpro explain`: show what limits a job, what is at fault, and what to do first, in twelve lines."""

from __future__ import annotations

import shlex
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dpro.cli.analysis import layout_option, open_or_import, run_argument
from dpro.cli.output import json_option, print_json
from dpro.errors import DproError

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis


@click.command()
@run_argument
@layout_option
@json_option
def explain(run: str, as_json: bool) -> None:
    """Show what limits the job, what is at fault, and what to do first.

    \b
    LIMIT   what takes most of the step besides needed work, else the computing
    FAULT   ranks and components slower than their peers (all: dpro diagnose)
    TRY     changes you can make, and their gain (all: dpro whatif)
    BOTH    two of these that gain more together
    THEN    changes that pay off only once the limit is gone
    NOT     apparent remedies that do not help
    UNSURE  what limits the confidence in these answers
    MORE    the commands behind these answers

    \b
    dpro explain RUN
    dpro explain trace.json.gz
    dpro explain RUN --json | jq .limit.kind
    """
    from dpro.analysis.analysis import Analysis
    from dpro.analysis.graphs import ranks_built_once
    from dpro.verdict import verdict
    from dpro.verdict.words import lines_of

    click.get_current_context().with_resource(ranks_built_once())
    analysis = Analysis(open_or_import(run))
    explanation = verdict.explain(analysis)
    if as_json:
        print_json(explanation)
        return
    for line in lines_of(explanation):
        click.echo(line)
    if more := _more(run, analysis):
        click.echo(more)


def _more(run: str, analysis: Analysis) -> str:
    """Return the commands that can answer, in a line, or a line for each; empty if none can."""
    from dpro.schema import SPANS
    from dpro.verdict.words import MARGIN, WIDTH

    names = ["report"] * bool(analysis.run.num_rows(SPANS))
    with suppress(DproError):
        names += ["diagnose"] * bool(analysis.verdict)
    with suppress(DproError):
        names += ["whatif"] * bool(not analysis.end.hung and analysis.trust)
    if not names:
        return ""
    commands = [f"dpro {name} {shlex.quote(run)}" for name in names]
    line = f"{'MORE':{MARGIN}}{' | '.join(commands)}"
    return line if len(line) <= WIDTH else line.replace(" | ", "\n" + " " * MARGIN)
