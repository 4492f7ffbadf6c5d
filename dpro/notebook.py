"""A run in a notebook: its tables, graph, replay, findings and what-ifs as frames, and figures of them.

In: a path, as commands take it. Out: an `OpenedRun`, which computes what it is first asked for, and keeps it.
"""

from __future__ import annotations

import html
import os
from typing import TYPE_CHECKING

import polars as pl

from dpro.analysis.summary import run_info
from dpro.dashboards.loaded import Loaded
from dpro.errors import DproError, UsageError, needs_extra
from dpro.markup import table
from dpro.opening import open_path
from dpro.schema import TABLES
from dpro.selection import parse_selection
from dpro.words import printable

if TYPE_CHECKING:
    from dpro.analysis.analysis import Analysis
    from dpro.dashboards.figures import Figures
    from dpro.replay.graph import Graph
    from dpro.replay.whatif.predict import Prediction


class OpenedRun(Loaded):
    """A run, and all that can be asked of it.

    Besides what is declared here: `steps`, `spans`, `collectives`, `counters` and `workers` are its tables,
    `timeline` is the replay of its graph, `trust` how far to believe predictions, `breakdown` where the time
    of each step went.
    """

    def __repr__(self) -> str:
        """The verdict, as `dpro explain` prints it."""
        return "\n".join(self._in_short())

    def _repr_html_(self) -> str:
        """The verdict, and what was recorded, for notebooks."""
        lines = html.escape("\n".join(self._in_short()))
        return f"<pre>{lines}</pre>" + table(self.run.label, run_info(self.run.manifest, self.steps))

    def _in_short(self) -> list[str]:
        from dpro.verdict.words import lines_of

        try:
            return [printable(line) for line in lines_of(self.explanation)]
        except DproError as error:  # shown where it is opened, too
            return [printable(f"{self.run.label}: {error}")]

    def table(self, name: str) -> pl.DataFrame:
        """A table of the run, as `dpro.schema` declares it.

        Raises:
            UsageError: there is no such table.
        """
        if name not in TABLES:
            raise UsageError(f"no table {name!r}; there are {', '.join(TABLES)}")
        return self.run.table(TABLES[name])

    @property
    def graph(self) -> Graph:
        """The graph of all ranks, CPU threads and GPU streams."""
        return self.built.graph

    @property
    def findings(self) -> pl.DataFrame:
        """What is slow or broken, costliest first, with evidence and cost."""
        from dpro.analysis.summary import finding_info

        return finding_info(self.verdict[0])

    @property
    def not_known(self) -> list[str]:
        """What this run cannot show of what may be wrong."""
        return self.verdict[1]

    def select(self, steps: str = "", ranks: str = "") -> Analysis:
        """Selected steps and ranks: tables, breakdown and mean step of these alone, as `dpro report --steps`.

        Args:
            steps: as `3-8` or `3,5,7-9`; empty for all.
            ranks: as `0,2-3`, or by their places in the layout, as `tp=0`; empty for all.

        Raises:
            UsageError: it is not understood, or selects nothing that was recorded in depth.
            Unanswerable: the run holds no spans.
        """
        from dpro.analysis.selected import read_selection, select

        return select(self, read_selection(steps, ranks, self.run))

    def whatif(self, *edits: str, steps: str = "") -> pl.DataFrame:
        """What edits together would make of the mean step; without any, what would help, best first.

        Args:
            edits: as `dpro whatif --edit` takes them, such as `heal:rank=1`.
            steps: whose mean is predicted, as `3-8` or `3,5,7-9`; empty for all.

        Raises:
            UsageError: an edit is not understood, or no such steps were recorded in depth.
            Unanswerable: the run lacks what an edit needs.
        """
        from dpro.analysis.answers.whatif import what_if
        from dpro.analysis.summary import gain_info

        if edits:
            return gain_info([self.predict(*edits, steps=steps)])
        if not steps:
            return gain_info(self.search[0])
        search = what_if(self, calibrate=lambda edits: (list(edits), []), selection=parse_selection(steps))
        return gain_info(search.predictions)

    def predict(self, *edits: str, steps: str = "") -> Prediction:
        """What edits together would make of the mean step, as an object.

        Args:
            edits: as `dpro whatif --edit` takes them.
            steps: whose mean is predicted, as `3-8` or `3,5,7-9`; empty for all.

        Raises:
            UsageError: an edit is not understood, or no such steps were recorded in depth.
            Unanswerable: the run lacks what an edit needs.
        """
        from dpro.analysis.answers.whatif import of_steps, predicted
        from dpro.replay.whatif.registry import parse_edit

        parsed = [parse_edit(edit) for edit in edits]
        trust, baseline = of_steps(self, parse_selection(steps))
        return predicted(self, parsed, trust, baseline)

    @property
    def plot(self) -> Figures:
        """Plotly figures of it.

        Raises:
            MissingExtra: plotly is not installed.
        """
        with needs_extra("dashboard"):
            from dpro.dashboards.figures import Figures
        return Figures(self)


def open_run(run: str | os.PathLike[str]) -> OpenedRun:
    """Open a run, or traces, which are imported into a cache first.

    Raises:
        InputError: there is no such path, it holds neither a run nor a trace, or it is still being recorded.
    """
    return OpenedRun(open_path(run))
