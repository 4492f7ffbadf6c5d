"""A run in a notebook: its verdict, tables, graph, replay and what-ifs as frames, and figures of them.

In: a path, as commands take it. Out: an `OpenedRun`, which computes what it is first asked for, and keeps it.
"""

from __future__ import annotations

import html
import os
import re
from typing import TYPE_CHECKING, Any

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import mean_step_of
from dpro.analysis.summary import run_info
from dpro.errors import DproError, MissingExtra, UsageError, first_line
from dpro.markup import table
from dpro.opening import open_path
from dpro.plugins import hooks_of
from dpro.schema import TABLES
from dpro.selection import parse_selection
from dpro.words import printable

if TYPE_CHECKING:
    from dpro.dashboards.figures import Figures
    from dpro.replay.graph import Graph
    from dpro.replay.whatif.predict import Prediction
    from dpro.store import Run
    from dpro.verdict.verdict import Explanation


def _asked(name: str, doc: str) -> Any:
    """What the analysis of the run has by a name, computed once."""
    return property(lambda run: getattr(run._analysis, name), doc=doc)


class OpenedRun:
    """A run, and all that can be asked of it."""

    def __init__(self, analysis: Analysis, figures: Figures | None = None) -> None:
        """Nothing is read yet.

        Args:
            figures: of the whole run; None for those that are made when they are asked for.
        """
        self._analysis, self._figures = analysis, figures

    steps = _asked("steps", "Table `steps`.")
    spans = _asked("spans", "Table `spans`.")
    collectives = _asked("collectives", "Table `collectives`.")
    counters = _asked("counters", "Table `counters`.")
    workers = _asked("workers", "Table `workers`.")
    breakdown = _asked("breakdown", "Where the time of each step and rank went.")
    mean_step = property(lambda run: mean_step_of(run._analysis), doc="Where the mean step went.")
    host = _asked("host", "What the hosts did.")
    timeline = _asked("timeline", "The replay of the graph: when each node starts and ends.")
    trust = _asked("trust", "How far to believe predictions.")

    def __repr__(self) -> str:
        """The verdict, as `dpro explain` prints it."""
        return "\n".join(self._in_short())

    def _repr_html_(self) -> str:
        """The verdict, and what was recorded, for notebooks."""
        lines, run = html.escape("\n".join(self._in_short())), self._analysis.run
        return f"<pre>{lines}</pre>" + table(run.label, run_info(run.manifest, self.steps))

    def _in_short(self) -> list[str]:
        from dpro.verdict.words import lines_of

        try:
            return [printable(line) for line in lines_of(self.verdict)]
        except DproError as error:  # shown where it is opened, too
            return [printable(f"{self._analysis.run.label}: {error}")]

    @property
    def verdict(self) -> Explanation:
        """What limits the job, who is at fault, and what to do first."""
        from dpro.verdict.verdict import explain

        return explain(self._analysis)

    def diagnose(self) -> pl.DataFrame:
        """What is slow or broken, costliest first, with evidence and cost."""
        from dpro.analysis.summary import finding_info

        return finding_info(self._analysis.verdict[0])

    @property
    def not_known(self) -> list[str]:
        """What this run cannot show of what may be wrong."""
        return self._analysis.verdict[1]

    def table(self, name: str) -> pl.DataFrame:
        """A table of the run, as `dpro.schema` declares it.

        Raises:
            UsageError: there is no such table.
        """
        if name not in TABLES:
            raise UsageError(f"no table {name!r}; there are {', '.join(TABLES)}")
        return self._analysis.run.table(TABLES[name])

    def sql(self, query: str) -> pl.DataFrame:
        """What a query of the run's tables gives, in the SQL of polars.

        Args:
            query: such as `select rank, avg(duration_ns) from steps group by rank`.

        Raises:
            UsageError: it is not understood.
        """
        named = [name for name in TABLES if re.search(rf"\b{name}\b", query, re.IGNORECASE)]
        try:
            return pl.SQLContext({name: self.table(name) for name in named}, eager=True).execute(query)
        except pl.exceptions.PolarsError as error:
            raise UsageError(f"{first_line(error)}; tables are {', '.join(TABLES)}") from error

    @property
    def graph(self) -> Graph:
        """The graph of all ranks, CPU threads and GPU streams, of the job as it runs."""
        return self._analysis.built.predictive

    def select(self, steps: str = "", ranks: str = "") -> OpenedRun:
        """Selected steps and ranks: tables, breakdown and mean step of these alone, as `dpro report --steps`.

        Args:
            steps: as `3-8` or `3,5,7-9`; empty for all.
            ranks: as `0,2-3`, or by their places in the layout, as `tp=0`; empty for all.

        Raises:
            UsageError: it is not understood, or selects nothing that was recorded in depth.
            Unanswerable: the run holds no spans.
        """
        from dpro.analysis.selected import read_selection, select

        return OpenedRun(select(self._analysis, read_selection(steps, ranks, self._analysis.run)))

    def whatif(self, *edits: str, steps: str = "") -> pl.DataFrame:
        """What edits together would make of the mean step; without any, what would help, best first.

        Args:
            edits: as `dpro whatif --edit` takes them, such as `heal:rank=1`.
            steps: whose mean is predicted, as `3-8` or `3,5,7-9`; empty for all.

        Raises:
            UsageError: an edit is not understood, or no such steps were recorded in depth.
            Unanswerable: the run lacks what an edit needs.
        """
        from dpro.analysis.answers.whatif import search_once, what_if
        from dpro.analysis.summary import gain_info

        if edits:
            return gain_info([self.predict(*edits, steps=steps)])
        if not steps:
            return gain_info(search_once(self._analysis).predictions)
        return gain_info(what_if(self._analysis, selection=parse_selection(steps)).predictions)

    def predict(self, *edits: str, steps: str = "") -> Prediction:
        """What edits together would make of the mean step, as an object.

        Args:
            edits: as `dpro whatif --edit` takes them.
            steps: whose mean is predicted, as `3-8` or `3,5,7-9`; empty for all.

        Raises:
            UsageError: an edit is not understood, or no such steps were recorded in depth.
            Unanswerable: the run lacks what an edit needs.
        """
        from dpro.analysis.predictions import predict_edits
        from dpro.replay.whatif.registry import parse_edit

        parsed = [parse_edit(edit) for edit in edits]
        return predict_edits(self._analysis, parsed, parse_selection(steps))

    @property
    def plot(self) -> Figures:
        """Plotly figures of the whole run; each takes `steps=` and `ranks=`.

        Raises:
            MissingExtra: plotly is not installed.
        """
        if self._figures is None:
            opened = _with_figures(self._analysis.run)
            if opened is None:
                raise MissingExtra("plotly", "dashboard")
            self._figures = opened[1]
        return self._figures


def open_run(run: str | os.PathLike[str]) -> OpenedRun:
    """Open a run, or traces, which are imported into a cache first.

    Raises:
        InputError: there is no such path, it holds neither a run nor a trace, or it is still being recorded.
    """
    opened = open_path(run)
    return OpenedRun(*(_with_figures(opened) or (Analysis(opened),)))


def _with_figures(run: Run) -> tuple[Analysis, Figures] | None:
    """An analysis and figures of it, from whatever draws them; None where nothing does."""
    return next(filter(None, (opened(run) for opened in hooks_of("notebook"))), None)
