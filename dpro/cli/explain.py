"""`dpro explain`: show what limits a job, what is at fault, and what to do first, in twelve lines."""

from __future__ import annotations

import click

from dpro.cli.analysis import layout_option, open_or_import, run_argument
from dpro.cli.following import print_following
from dpro.cli.output import json_option, print_json


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
    print_following(run, analysis, ["report", "diagnose", "whatif"])
