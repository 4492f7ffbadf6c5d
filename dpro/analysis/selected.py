"""An analysis of selected steps and ranks of a run.

In: the analysis of a run, and a selection. Out: an `Analysis` whose tables hold what is selected. How the job
ended, the graph, its trust and findings stay those of the whole run: they cannot be had from a part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import polars as pl

from dpro.analysis.analysis import Analysis, Verdict
from dpro.analysis.cached import cached
from dpro.errors import UsageError
from dpro.replay.mesh import in_words, mesh_of_run, named_axes, places_along
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
    """Selected steps and ranks of a run.

    Work counts in the step in whose time it begins. What lies in a window before its first step or after its
    last counts only where all steps of deep windows are selected.
    """

    def __init__(self, whole: Analysis, selection: Selection) -> None:
        """Nothing is read but which steps were recorded in depth.

        Raises:
            UsageError: no selected step was recorded in depth on a selected rank.
            Unanswerable: the run holds no spans.
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
        """Table `steps`, of the selection."""
        return self._selection.keep(self._whole.steps)

    @cached
    def spans(self) -> pl.DataFrame:
        """Table `spans`, of the selection."""
        return self._inside(self._whole.spans, spans_of_steps)

    @cached
    def collectives(self) -> pl.DataFrame:
        """Table `collectives`, of the selection; members on other ranks are not in it."""
        return self._ran_inside(self._whole.collectives)

    @cached
    def counters(self) -> pl.DataFrame:
        """Table `counters`: what was sampled of selected ranks during selected steps."""
        of_ranks = Selection(ranks=self._selection.ranks)
        chosen = of_ranks.keep(self._whole.counters)
        if self.steps.height == of_ranks.keep(self._whole.steps).height:
            return chosen
        ends = pl.col("start_ns") + pl.col("duration_ns")
        return within_stretches(chosen, self.steps.with_columns(end_ns=ends), "time_ns")

    @cached
    def breakdown(self) -> pl.DataFrame:
        """Where the time of each selected step and rank went."""
        return self._selection.keep(self._whole.breakdown)

    @cached
    def usual_breakdown(self) -> pl.DataFrame:
        """Where the usual steps among them go; as recorded where none of these is selected."""
        usual = self._selection.keep(self._whole.usual_breakdown)
        return usual if usual.height else self.breakdown

    @cached
    def sizes(self) -> pl.DataFrame:
        """Collectives of the selection by operation and size; waits follow from all members."""
        whole = self._whole
        return collective_totals(whole.collectives, whole.spans, whole.workers, self._ran_inside)

    @cached
    def end(self) -> JobEnd:
        """How the job ended."""
        return self._whole.end

    @cached
    def condensed(self) -> CondensedRun | None:
        """The ranks of the whole run, where it is large."""
        return self._whole.condensed

    @cached
    def graph_and_trust(self) -> tuple[Built, Trust]:
        """The graph of the whole run, and how far to believe it."""
        return self._whole.graph_and_trust

    @property
    def verdict(self) -> Verdict:
        """What is wrong with the whole run, and what it cannot show."""
        return self._whole.verdict

    def _ran_inside(self, rows: pl.DataFrame) -> pl.DataFrame:
        """The rows of selected ranks that begin in selected steps, on GPUs in those of the GPU."""
        chosen = self._selection.keep(steps_of_devices(self._whole))
        return self._inside(rows, lambda some, _: within_stretches(some, chosen))

    def _inside(
        self,
        rows: pl.DataFrame,
        within: Callable[[pl.DataFrame, pl.DataFrame], pl.DataFrame] = within_stretches,
    ) -> pl.DataFrame:
        """The rows of selected ranks that begin in selected steps."""
        chosen = Selection(ranks=self._selection.ranks).keep(rows)
        return chosen if self._all_steps else within(chosen, self._stretches)


@cached
def steps_of_devices(analysis: Analysis) -> pl.DataFrame:
    """When the GPU of each rank went through all steps that were recorded in depth, as of `device_steps`."""
    return device_steps(analysis.spans, recorded_steps(analysis.spans, analysis.steps))


def selection_of(steps: Ranges, ranks: RankChoice, *runs: Run) -> Selection:
    """Steps and ranks by their numbers.

    Args:
        steps: selected ones; empty for all.
        ranks: by number or by place; empty for all.

    Raises:
        UsageError: places are given, and the layout of a run is not known, or has no rank there.
    """
    if not ranks.places:
        return Selection(steps, ranks.ranks)
    chosen = {_ranks_at(run, ranks) for run in runs}
    if len(chosen) > 1:
        raise UsageError(f"--ranks {ranks}: these are not the same ranks in both runs: give their numbers")
    return Selection(steps, chosen.pop())


def read_selection(steps: str, ranks: str, *runs: Run) -> Selection:
    """Read a selection, as options write it; empty texts select all.

    Args:
        steps: as `3-8` or `3,5,7-9`.
        ranks: as `0,2-3`, or `tp=0`.

    Raises:
        UsageError: one is no such list, or names none.
    """
    chosen = parse_rank_choice(ranks)
    if ranks and not chosen:
        raise UsageError("ranks is empty: give for instance 3, 3-8, 3,5,7-9, or tp=0")
    return selection_of(parse_selection(steps).steps, chosen, *runs)


def _ranks_at(run: Run, chosen: RankChoice) -> Ranges:
    """The ranks that stand at all of some places."""
    mesh, given = mesh_of_run(run), f"--ranks {chosen}"
    if not named_axes(mesh):
        raise UsageError(
            f"{given}: nothing recorded says how the ranks are laid out: give --layout, or their numbers"
        )
    ranks = set(mesh.coordinates)
    for axis, wanted in chosen.places:
        if axis not in named_axes(mesh):
            raise UsageError(f"{given}: there is no axis {quoted(axis)}: {in_words(mesh)}")
        ranks &= {rank for rank, place in places_along(mesh, axis).items() if is_within(place, wanted)}
    if not ranks:
        raise UsageError(f"{given}: no rank stands there (places count from 0): {in_words(mesh)}")
    return ranges_of(ranks)


def select(analysis: Analysis, selection: Selection) -> Analysis:
    """The analysis of what is selected; the same one where nothing is left out.

    Raises:
        UsageError: no selected step was recorded in depth on a selected rank.
        Unanswerable: the run holds no spans.
    """
    return SelectedRun(analysis, selection) if selection else analysis


def replayed_steps(analysis: Analysis) -> pl.DataFrame:
    """`rank` and `step` of the work in the graph of a run.

    Raises:
        Unanswerable: the run holds no spans.
    """
    nodes = analysis.outline.graph.nodes
    work = pl.DataFrame({"rank": nodes.rank, "step": nodes.step}).unique()
    return work.filter((pl.col("rank") >= 0) & (pl.col("step") >= 0))
