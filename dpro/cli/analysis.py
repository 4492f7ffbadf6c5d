"""What the analysing commands share: open a run, build its graph, replay it, judge the fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
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
    """A run with its graph, how far to believe the replay of that, and the replay."""

    run: Run
    built: Built
    trust: Trust

    @cached_property
    def timeline(self) -> Timeline:
        """The replay of the unchanged graph."""
        from dpro.replay.timeline import replay

        return replay(self.built.graph)

    @cached_property
    def decisive(self) -> Timeline:
        """The replay that shows what decides: without waits that only look like late launches.

        Those would stand in for what was waited for. Only runs of whole operations have them.
        """
        from dpro.replay.timeline import replay

        return replay(self.built.predictive) if self.built.of_operations else self.timeline


@contextmanager
def why_unanswerable(run: Run) -> Iterator[None]:
    """Where a run lacks what is needed, say why, if that can be told."""
    from dpro.errors import Unanswerable

    try:
        yield
    except Unanswerable as error:
        reason = why_no_window(run)
        raise Unanswerable(f"{error}; {reason}" if reason else str(error)) from error


def why_no_window(run: Run) -> str:
    """Why a recording has steps and no deep window; empty where it has one, or is no recording."""
    from dpro.schema import SPANS, STEPS

    options = run.manifest.options
    if run.rows()[SPANS.name] or not {"skip", "window_steps"} <= options.keys():
        return ""
    last = run.table(STEPS)["step"].max()
    if not isinstance(last, int):
        return ""
    steps = last + 1
    first, end = options["skip"], options["skip"] + options["window_steps"]
    if steps < end:
        return (
            f"the job ended after {steps} steps, before its first deep window (steps {first} to {end - 1}) "
            "was whole: record more steps, or lower --skip"
        )
    return "no deep window was kept: another profiler ran, or the process forked, while one was open"


def analyse(path: str) -> Analysis:
    """Open RUN (importing it if it is not a run directory yet) and build its graph, or find it in the cache.

    Raises:
        InputError: RUN cannot be read.
        Unanswerable: it holds no spans.
    """
    from dpro.cli.graphs import graph_of
    from dpro.cli.output import stderr_console
    from dpro.cli.runs import open_or_import

    run = open_or_import(path)
    console = stderr_console()
    with console.status("Building the graph …"), why_unanswerable(run):
        built, trust = graph_of(run)
    return Analysis(run, built, trust)
