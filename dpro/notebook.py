"""A run in a notebook: its verdict, tables, graph, replay and what-ifs as frames and figures.

Takes a path, as commands do; returns an `OpenedRun`, which computes each result on first use and keeps it.
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


def _analysis_property(name: str, doc: str) -> Any:
    """Return a property that reads one attribute of the run's analysis."""
    return property(lambda run: getattr(run._analysis, name), doc=doc)


class OpenedRun:
    """An opened run with its tables, verdict, predictions and figures."""

    def __init__(self, analysis: Analysis, figures: Figures | None = None) -> None:
        """Wrap an analysis without reading anything yet.

        Args:
            figures: figures of the whole run; None to make them on first use.
        """
        self._analysis, self._figures = analysis, figures

    steps = _analysis_property("steps", "Table `steps`.")
    spans = _analysis_property("spans", "Table `spans`.")
    collectives = _analysis_property("collectives", "Table `collectives`.")
    counters = _analysis_property("counters", "Table `counters`.")
    workers = _analysis_property("workers", "Table `workers`.")
    breakdown = _analysis_property("breakdown", "Where the time of each step and rank went.")
    mean_step = property(lambda run: mean_step_of(run._analysis), doc="Where the mean step went.")
    host = _analysis_property("host", "What the hosts did.")
    timeline = _analysis_property("timeline", "The replay of the graph: when each node starts and ends.")
    trust = _analysis_property("trust", "How far to believe predictions.")

    def __repr__(self) -> str:
        """Return the verdict, as `dpro explain` prints it."""
        return "\n".join(self._in_short())

    def _repr_html_(self) -> str:
        """Return the verdict and a table of what was recorded, as HTML."""
        lines, run = html.escape("\n".join(self._in_short())), self._analysis.run
        return f"<pre>{lines}</pre>" + table(run.label, run_info(run.manifest, self.steps))

    def _in_short(self) -> list[str]:
        from dpro.verdict.words import lines_of

        try:
            return [printable(line) for line in lines_of(self.verdict)]
        except DproError as error:  # a run without a verdict still has to be shown
            return [printable(f"{self._analysis.run.label}: {error}")]

    @property
    def verdict(self) -> Explanation:
        """What limits the job, which ranks or parts are at fault, and what to do first."""
        from dpro.verdict.verdict import explain

        return explain(self._analysis)

    def diagnose(self) -> pl.DataFrame:
        """Return findings as a frame, the costliest first, with evidence and cost per step."""
        from dpro.analysis.summary import finding_info

        return finding_info(self._analysis.verdict[0])

    @property
    def not_known(self) -> list[str]:
        """The kinds of problems that this run has no data to rule out, in words."""
        return self._analysis.verdict[1]

    def table(self, name: str) -> pl.DataFrame:
        """Return a table of the run, as declared in `dpro.schema`.

        Raises:
            UsageError: no table has this name.
        """
        if name not in TABLES:
            raise UsageError(f"no table {name!r}; there are {', '.join(TABLES)}")
        return self._analysis.run.table(TABLES[name])

    def sql(self, query: str) -> pl.DataFrame:
        """Return the result of a query of the run's tables, in Polars SQL.

        Args:
            query: `select rank, avg(duration_ns) from steps group by rank`.

        Raises:
            UsageError: the query is invalid.
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
        """Return the run limited to some steps and ranks, as `dpro report --steps --ranks` does.

        Args:
            steps: `3-8` or `3,5,7-9`; empty for all.
            ranks: `0,2-3`, or coordinates in the layout, such as `tp=0`; empty for all.

        Raises:
            UsageError: a text is invalid, or no deep window covers the selection.
            Unanswerable: the run has no spans.
        """
        from dpro.analysis.selected import read_selection, select

        return OpenedRun(select(self._analysis, read_selection(steps, ranks, self._analysis.run)))

    def whatif(self, *edits: str, steps: str = "") -> pl.DataFrame:
        """Predict the mean step after all edits together; without edits, rank the changes that would help.

        Args:
            edits: edits as in `dpro whatif --edit`, such as `heal:rank=1`.
            steps: steps whose mean is predicted, such as `3-8` or `3,5,7-9`; empty for all.

        Returns:
            One row per prediction; without edits, the largest gain first.

        Raises:
            UsageError: an edit is invalid, or no deep window covers the steps.
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
        """Return the prediction of the mean step after all edits together, as an object.

        Args:
            edits: edits as in `dpro whatif --edit`.
            steps: steps whose mean is predicted, such as `3-8` or `3,5,7-9`; empty for all.

        Raises:
            UsageError: an edit is invalid, or no deep window covers the steps.
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
        InputError: the path does not exist, contains neither a run nor a trace, or is still being recorded.
    """
    opened = open_path(run)
    return OpenedRun(*(_with_figures(opened) or (Analysis(opened),)))


def _with_figures(run: Run) -> tuple[Analysis, Figures] | None:
    """Return the analysis and figures of the first extension that draws figures; None without one."""
    return next(filter(None, (opened(run) for opened in hooks_of("notebook"))), None)
