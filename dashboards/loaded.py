"""The analysis behind the views: results of commands, and data that only figures need."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import numpy as np
import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.answers.replay import critical_work
from dpro.analysis.answers.whatif import search_once
from dpro.analysis.cached import cached
from dpro.analysis.comparison import difference_of
from dpro.analysis.graphs import make_graph
from dpro.analysis.unanswered import why_unanswerable
from dpro.dashboards.links import Link
from dpro.dashboards.timeline.counters import CounterTrack, counter_tracks
from dpro.dashboards.timeline.figure import Tracks, make_tracks
from dpro.dashboards.timeline.measured import (
    MAX_UNASKED,
    BackgroundResult,
    MeasuredLanes,
    Replayed,
    make_replayed,
)
from dpro.detect.findings import Finding
from dpro.detect.findings_log import identity_of, time_of_day
from dpro.detect.hang.records import with_known_state
from dpro.detect.network.traffic import transfers_of
from dpro.errors import DproError, UsageError
from dpro.freed_memory import give_back_freed_memory
from dpro.replay.construction.graph_builder import Built
from dpro.replay.difference import DifferenceDocument
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import NodeKind
from dpro.replay.mesh import Mesh, mesh_of_run
from dpro.replay.pipeline.operations import Operations
from dpro.replay.pipeline.recorded import operations_of
from dpro.replay.steps import IS_GPU
from dpro.replay.timeline import critical_path_of_steps, durations_of
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import Applied, apply_all, predicted_timeline
from dpro.replay.whatif.sensitivity import Curve, sensitivity
from dpro.schema import COLLECTIVES, PROCESS_GROUPS, SPANS
from dpro.selection import quoted, ranges_of, ranges_text
from dpro.store import Run
from dpro.timed import with_times
from dpro.timelines.slices import slices
from dpro.verdict.verdict import explain

_VERDICTS = ("verdict_on_hangs", "verdict_by_calls", "verdict_by_replay")  # of `Analysis`, in its order

if TYPE_CHECKING:
    from dpro.dashboards.runs import OfferedRun


NAMED_STEPS = 6  # ranges of steps listed in a sentence


class Withdrawn(NamedTuple):
    """A finding that an earlier copy of a run under recording showed, and a later one does not.

    Attributes:
        time_ns: when the copy without it was opened.
    """

    finding: Finding
    time_ns: int
    why: str

    def __str__(self) -> str:
        """Return one line that says what was withdrawn, when and why."""
        return f"{self.finding.title}: withdrawn at {time_of_day(self.time_ns)} because {self.why}"


class EarlierFindings(NamedTuple):
    """Findings that readers of earlier copies of a run were shown, where any were computed.

    Attributes:
        findings: of the latest of those copies.
        withdrawn: findings withdrawn up to that copy.
    """

    findings: tuple[Finding, ...] = ()
    withdrawn: tuple[Withdrawn, ...] = ()


class Loaded(Analysis):
    """A run, with cached results.

    Attributes:
        others: returns another run of the page by its name.
        offers: returns all runs that a link can name.
    """

    min_searched_elsewhere: float = 200_000

    def __init__(self, run: Run) -> None:
        """Make an analysis; it reads the run on first use."""
        super().__init__(run)
        self.others: Callable[[str], Loaded] = _no_other
        self.offers: Callable[[], Sequence[OfferedRun]] = tuple
        self.earlier, self.opened_ns = EarlierFindings(), time.time_ns()

    def warm(self) -> None:
        """Compute slow results ahead, in the order in which they are likely to be needed.

        Does nothing for a run with too many spans: its graph would take memory and cores from the open view.
        """
        if self.run.rows()["spans"] > MAX_UNASKED:
            return
        names = ("graph_and_trust", "verdict", "breakdown", "curves")
        first, judged, split, last = map(attrgetter, names)
        for compute in (first, judged, split, search_once, explain, last):
            with suppress(DproError):  # the view that needs it reports the error
                compute(self)
            give_back_freed_memory()  # else the next computation would add to it

    @cached
    def timed_steps(self) -> pl.DataFrame:
        """Table `steps`; if no GPU timed its steps, those in deep windows last as long as in `breakdown`."""
        steps = with_times(self.steps)
        if steps.is_empty() or steps["by_device"].any() or self.num_rows[SPANS.name] > MAX_UNASKED:
            return steps
        if not self.has_gpu_work:
            return steps
        with suppress(DproError):  # the breakdown's own view reports the error
            parts = self.breakdown.select("rank", "step", by_gpu_ns="duration_ns")
            deep = steps.join(parts, on=["rank", "step"], how="left", maintain_order="left")
            by_gpu = pl.when(pl.col("window") >= 0).then("by_gpu_ns")
            return deep.with_columns(time_ns=pl.coalesce(by_gpu, "time_ns")).drop("by_gpu_ns")
        return steps

    @cached
    def has_gpu_work(self) -> bool:
        """Whether work of a GPU was recorded."""
        return any(part.select(IS_GPU.any()).item() for part in self.run.part_by_part(SPANS, ["kind"]))

    @cached
    def measured(self) -> MeasuredLanes:
        """The measured lanes of the timeline, which need no graph."""
        return MeasuredLanes(self.run, lambda: self.hangs)

    @cached
    def pipeline(self) -> Operations | None:
        """Whole operations of a job with a pipeline; None if there are none."""
        return operations_of(self.run)

    @cached
    def replay_lanes(self) -> BackgroundResult:
        """The replayed lanes and the critical path of the timeline, computed on request."""

        def make() -> Replayed:
            recorded = None if self.built.of_operations else self.replayed
            return make_replayed(self.timeline, self.measured, recorded)

        return BackgroundResult(make)

    @cached
    def counter_tracks(self) -> list[CounterTrack]:
        """The counters beside the lanes of the timeline."""
        return counter_tracks(self.counters, self.workers, self.measured.clocks)

    @cached
    def tracks(self) -> Tracks:
        """The tracks of the timeline as a Plotly figure."""
        return make_tracks(slices(self.timeline), self.timeline.graph.origin_ns)

    @cached
    def path(self) -> pl.DataFrame:
        """The critical path of the usual steps of the unchanged graph; predictions are their means."""
        return critical_work(self, durations_of(self.baseline))

    @cached
    def curves(self) -> list[Curve]:
        """How the step time depends on the speed of each part of the machine."""
        return sensitivity(self.built.predictive)

    def changed(self, edits: Sequence[Edit]) -> Applied[ReplayedJob]:
        """Apply edits one after the other. Cache the latest result.

        Raises:
            Unanswerable: the run lacks what an edit needs.
        """
        return self.once(
            "changed", lambda: apply_all(self.built.predictive, edits), inputs=tuple(map(str, edits))
        )

    def path_after(self, edits: Sequence[Edit]) -> pl.DataFrame:
        """Compute the critical path of the usual steps under edits. Cache the latest result.

        Raises:
            Unanswerable: the run lacks what an edit needs.
        """
        if not edits:
            return self.path

        def compute() -> pl.DataFrame:
            changed = predicted_timeline(self.changed(edits), self.trust)
            return critical_path_of_steps(changed, durations_of(self.baseline), self.baseline)

        return self.once("changed path", compute, inputs=tuple(map(str, edits)))

    @cached
    def num_rows(self) -> dict[str, int]:
        """Number of rows of each table of the run."""
        return self.run.rows()

    @cached
    def has_call_states(self) -> bool:
        """Whether the run says how far ranks got in the collectives of their groups."""
        if self.num_rows[PROCESS_GROUPS.name]:
            return True
        columns = ["state", "window", "duration_ns", "group"]
        parts = self.run.part_by_part(COLLECTIVES, columns)
        return any(not with_known_state(part).is_empty() for part in parts)

    @cached
    def mesh(self) -> Mesh:
        """The position of each rank on the axes of parallelism."""
        return mesh_of_run(self.run)

    @cached
    def transfers(self) -> pl.DataFrame:
        """The collectives and messages with all members recorded."""
        return transfers_of(self.outline.graph)

    def may_have_pairs(self) -> bool:
        """Return whether ranks met in collectives or messages; true as long as the graph is not computed."""
        return "graph_and_trust" not in self.values or self.has_pairs

    @cached
    def has_pairs(self) -> bool:
        """Whether ranks met in collectives or messages that were matched."""
        nodes = self.outline.graph.nodes
        met = nodes.collective[(nodes.kind == NodeKind.ARRIVE) & (nodes.collective >= 0)]
        return not self.transfers.is_empty() or np.unique(met).size < met.size

    def findings_so_far(self) -> EarlierFindings:
        """Return the findings that this copy and earlier ones have shown; compute none."""
        if not any(isinstance(self.values.get(name), tuple) for name in _VERDICTS):
            return self.earlier
        return EarlierFindings(tuple(self.verdict[0]), self.withdrawn())

    def withdrawn(self) -> tuple[Withdrawn, ...]:
        """Return the findings withdrawn up to this copy of the run, the earliest first.

        Raises:
            DproError: the findings of the copy cannot be computed.
        """
        if not any(self.earlier):
            return ()
        findings, unknown = self.verdict
        now = {identity_of(finding) for finding in findings}
        steps = self.steps["step"].to_numpy()
        last = f"the steps up to {steps.max()}" if steps.size else "its steps"
        why = f"{last} no longer show it" if not unknown else f"it cannot be checked now: {unknown[0]}"
        gone = [Withdrawn(finding, self.opened_ns, why) for finding in self.earlier.findings]
        return tuple(
            past for past in (*self.earlier.withdrawn, *gone) if identity_of(past.finding) not in now
        )

    def against(self, link: Link) -> Loaded | None:
        """Return the run that a link compares this one with; None if the link names none.

        Raises:
            DproError: there is no such run, or it cannot be opened.
        """
        return self.others(link.against) if link.against else None

    def difference_from(self, other: Analysis) -> DifferenceDocument:
        """Explain how much the step differs from another run's, and why. Cache the latest result.

        Raises:
            DproError: one of the runs has no graph.
        """
        return self.once(
            "difference",
            lambda: difference_of(other, self),
            inputs=ref(other),  # the cache must not keep a closed run in memory
        )


def steps_in_words(steps: pl.Series, num_recorded: int) -> str:
    """Name steps, and how many of the recorded ones they are: `steps 5-7,30 (4 of 9 recorded)`."""
    named = "step" if steps.n_unique() == 1 else "steps"
    numbers = ranges_text(ranges_of(steps.unique()), NAMED_STEPS)
    return f"{named} {numbers} ({steps.n_unique()} of {num_recorded} recorded)"


def _no_other(name: str) -> Loaded:
    """Refuse any name.

    Raises:
        UsageError: always.
    """
    raise UsageError(f"no run {quoted(name)} is offered here: give it to `dpro dashboard`, too")


class RecordingCopy(Loaded):
    """A copy of a run under recording; its graph, soon outdated, is not cached on disk."""

    min_searched_elsewhere = math.inf

    @cached
    def graph_and_trust(self) -> tuple[Built, Trust]:
        """The graph, and how far to believe it."""
        with why_unanswerable(self.run, lambda: self.end):
            return make_graph(self.run)
