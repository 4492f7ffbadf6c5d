"""The analysis of selected steps and ranks of a run.

Takes the analysis of a run and a selection; returns an `Analysis` whose tables have only selected rows. The
job's end, the graph, its trust and the findings remain those of the whole run, since a part cannot show them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import polars as pl

from dpro.analysis.analysis import Analysis, Verdict
from dpro.analysis.cached import cached
from dpro.errors import UsageError
from dpro.replay.mesh import mesh_in_words, mesh_of_run, named_axes, places_along
from dpro.replay.steps import (
    collective_totals,
    device_steps,
    recorded_steps,
    spans_of_steps,
    within_stretches,
)
from dpro.selection import (
    Ranges,
    RankChoice,
    Selection,
    is_within,
    parse_rank_choice,
    parse_selection,
    quoted,
    ranges_of,
)
from dpro.store import Run

if TYPE_CHECKING:
    from dpro.analysis.end import JobEnd
    from dpro.replay.construction.graph_builder import Built
    from dpro.replay.fidelity.accuracy import Trust
    from dpro.replay.fidelity.by_rank import CondensedRun


class SelectedRun(Analysis):
    """The analysis of selected steps and ranks of a run.

    Work belongs to the step during which it begins. Work of a window before its first step or after its last
    is included only if all steps of deep windows are selected.
    """

    def __init__(self, whole: Analysis, selection: Selection) -> None:
        """Check the selection against the steps of deep windows; read nothing else yet.

        Raises:
            UsageError: no deep window covers a selected step on a selected rank.
            Unanswerable: the run has no spans.
        """
        super().__init__(whole.run)
        self._whole, self._selection = whole, selection
        _ = whole.breakdown  # a run without spans has nothing to select from
        recorded = recorded_steps(whole.spans, whole.steps)
        self._stretches = selection.checked(recorded)
        of_ranks = Selection(ranks=selection.ranks).keep(recorded)
        self._all_steps = self._stretches.height == of_ranks.height

    @cached
    def steps(self) -> pl.DataFrame:
        """Table `steps`, limited to the selection."""
        return self._selection.keep(self._whole.steps)

    @cached
    def spans(self) -> pl.DataFrame:
        """Table `spans`, limited to the selection."""
        return self._inside(self._whole.spans, spans_of_steps)

    @cached
    def collectives(self) -> pl.DataFrame:
        """Table `collectives`, limited to the selection, without members on other ranks."""
        return self.ran_inside(self._whole.collectives)

    @cached
    def counters(self) -> pl.DataFrame:
        """Table `counters`, limited to samples of selected ranks during selected steps."""
        of_ranks = Selection(ranks=self._selection.ranks)
        chosen = of_ranks.keep(self._whole.counters)
        if self.steps.height == of_ranks.keep(self._whole.steps).height:
            return chosen
        ends = pl.col("start_ns") + pl.col("duration_ns")
        return within_stretches(chosen, self.steps.with_columns(end_ns=ends), "time_ns")

    @cached
    def breakdown(self) -> pl.DataFrame:
        """The time of each selected step and rank, by its parts."""
        return self._selection.keep(self._whole.breakdown)

    @cached
    def usual_breakdown(self) -> pl.DataFrame:
        """The steps of the selection by their parts, as `breakdown_of` chooses them."""
        return self._whole.breakdown_of(self._selection)[0]

    @cached
    def members(self) -> pl.DataFrame:
        """Selected members of collectives; their waits are computed from all members."""
        return self.ran_inside(self._whole.members)

    @cached
    def sizes(self) -> pl.DataFrame:
        """Selected collectives by operation and size."""
        return collective_totals(self._whole.members, self._whole.workers, self.ran_inside)

    @cached
    def end(self) -> JobEnd:
        """How the job ended."""
        return self._whole.end

    @cached
    def condensed(self) -> CondensedRun | None:
        """The condensed ranks of the whole run; None unless it is large."""
        return self._whole.condensed

    @cached
    def graph_and_trust(self) -> tuple[Built, Trust]:
        """The graph of the whole run, and the trust in its replay."""
        return self._whole.graph_and_trust

    @property
    def verdict(self) -> Verdict:
        """Findings on the whole run, and what it cannot show."""
        return self._whole.verdict

    def ran_inside(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of selected ranks that begin in selected steps, by the steps of their device."""
        chosen = self._selection.keep(steps_of_devices(self._whole))
        return self._inside(rows, lambda some, _: within_stretches(some, chosen))

    def _inside(
        self,
        rows: pl.DataFrame,
        within: Callable[[pl.DataFrame, pl.DataFrame], pl.DataFrame] = within_stretches,
    ) -> pl.DataFrame:
        """Return the rows of selected ranks that begin in selected steps."""
        chosen = Selection(ranks=self._selection.ranks).keep(rows)
        return chosen if self._all_steps else within(chosen, self._stretches)


@cached
def steps_of_devices(analysis: Analysis) -> pl.DataFrame:
    """Return `device_steps` of deep windows: when the GPU of each rank executed each step."""
    return device_steps(analysis.spans, recorded_steps(analysis.spans, analysis.steps))


def selection_of(steps: Ranges, ranks: RankChoice, *runs: Run) -> Selection:
    """Return a selection, with ranks named by coordinates resolved to numbers.

    Args:
        steps: selected steps; empty for all.
        ranks: ranks by number or by coordinates; empty for all.

    Raises:
        UsageError: coordinates are given, and the layout of a run is unknown, has no rank there, or differs
            between the runs.
    """
    if not ranks.places:
        return Selection(steps, ranks.ranks)
    chosen = {_ranks_at(run, ranks) for run in runs}
    if len(chosen) > 1:
        raise UsageError(f"--ranks {ranks}: these are not the same ranks in both runs: give their numbers")
    return Selection(steps, chosen.pop())


def read_selection(steps: str, ranks: str, *runs: Run) -> Selection:
    """Parse a selection from the texts of options; empty texts select all.

    Args:
        steps: `3-8` or `3,5,7-9`.
        ranks: `0,2-3`, or `tp=0`.

    Raises:
        UsageError: a text is invalid, or selects nothing.
    """
    chosen = parse_rank_choice(ranks)
    if ranks and not chosen:
        raise UsageError("ranks is empty: give for instance 3, 3-8, 3,5,7-9, or tp=0")
    return selection_of(parse_selection(steps).steps, chosen, *runs)


def _ranks_at(run: Run, chosen: RankChoice) -> Ranges:
    mesh, given = mesh_of_run(run), f"--ranks {chosen}"
    if not named_axes(mesh):
        raise UsageError(
            f"{given}: nothing recorded says how the ranks are laid out: give --layout, or their numbers"
        )
    ranks = set(mesh.coordinates)
    for axis, wanted in chosen.places:
        if axis not in named_axes(mesh):
            raise UsageError(f"{given}: there is no axis {quoted(axis)}: {mesh_in_words(mesh)}")
        ranks &= {rank for rank, place in places_along(mesh, axis).items() if is_within(place, wanted)}
    if not ranks:
        raise UsageError(f"{given}: no rank stands there (places count from 0): {mesh_in_words(mesh)}")
    return ranges_of(ranks)


def select(analysis: Analysis, selection: Selection) -> Analysis:
    """Return the analysis of a selection; the given one if everything is selected.

    Raises:
        UsageError: no deep window covers a selected step on a selected rank.
        Unanswerable: the run has no spans.
    """
    return SelectedRun(analysis, selection) if selection else analysis


def replayed_steps(analysis: Analysis) -> pl.DataFrame:
    """Return the distinct pairs of `rank` and `step` in the graph of a run.

    Raises:
        Unanswerable: the run has no spans.
    """
    nodes = analysis.outline.graph.nodes
    work = pl.DataFrame({"rank": nodes.rank, "step": nodes.step}).unique()
    return work.filter((pl.col("rank") >= 0) & (pl.col("step") >= 0))
