"""What the analysing commands share: open a run, build its graph, replay it, judge the fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from dpro.replay.accuracy import Trust
    from dpro.replay.build import Built
    from dpro.replay.timeline import Timeline
    from dpro.store import Run

run_argument = click.argument("run", type=click.Path(), metavar="RUN")


@dataclass(frozen=True)
class Analysis:
    """A run with its graph, the replay of it, and how far to believe that."""

    run: Run
    built: Built
    timeline: Timeline
    trust: Trust


def analyse(path: str) -> Analysis:
    """Open RUN (importing it if it is not a run directory yet), build its graph and replay it.

    Raises:
        InputError: RUN cannot be read.
        Unanswerable: it holds no spans.
    """
    from dpro.cli.output import stderr_console
    from dpro.cli.runs import open_or_import
    from dpro.replay.accuracy import assess
    from dpro.replay.build import build_graph
    from dpro.replay.timeline import replay

    run = open_or_import(path)
    console = stderr_console()
    with console.status("Building the graph …"):
        built = build_graph(run)
        timeline = replay(built.graph)
        trust = assess(built, timeline, run.manifest)
    return Analysis(run, built, timeline, trust)
