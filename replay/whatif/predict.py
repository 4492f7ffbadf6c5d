"""Predictions of throughput and step time under edits, each with an interval.

Takes a graph and edits; returns `Prediction`s. The interval combines the variation of steps and gains, the
error of the replay on unchanged steps, the share of the gain that rests on an edit's assumptions, the
uncertainty of the slowdown of compute during communication where an edit changes what overlaps, and that of
waiting for ranks that are missing.

The step of a changed job is that of another recording, and recordings of one job differ. The gain of an edit
is a difference: whatever is common to the job before and after cancels, which leaves the variation of the
gain from step to step, and the assumptions of the edit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Generic

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Floats, Ints
from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.markup import table
from dpro.replay.cost.transfers import beyond_sizes
from dpro.replay.fidelity.accuracy import RUN_TO_RUN, STANDARD_ERRORS, Trust
from dpro.replay.fidelity.missing_ranks import as_missing_ranks_may_come
from dpro.replay.graph import CPU_KINDS, Graph, is_one_of
from dpro.replay.timeline import (
    Timeline,
    changed_durations,
    replay,
    replayed,
    step_ends,
    step_lengths,
    usual_steps,
)
from dpro.replay.whatif.edit import EFFORTS, Edit
from dpro.replay.whatif.job import Changed, J, ReplayedJob, job_of
from dpro.selection import ALL, Selection, is_in_ranges
from dpro.units import format_duration

NINETY = 1.645  # standard deviations on either side of the mean that contain 90% of a normal distribution
# Share of the doubt of an edit that counts for its gain once pairs of recordings have confirmed it: with this
# value, 85% of the intervals contained the gains of 18 pairs (docs/accuracy.md). Of an unproven edit all of
# it counts.
PROVEN_DOUBT = 0.7
# Relative difference between the steps of two recordings of one job: the median over sleeping jobs on links
# of a fixed speed, which nothing disturbs (docs/accuracy.md). A measured gain is between two recordings.
RECORDING_SPREAD = 0.004
SAME_HOSTS = 0.005  # difference of hosts from their likely factors that does not need a replay

# Blocks of predictions in the order in which they are given, with their headings.
BLOCKS = {
    "proven": "proven: real jobs were recorded before and after such a change",
    "unproven": "unproven: no job was recorded before and after such a change",
    "bound": "what parts are worth: upper bounds and hypotheticals, not advice",
}


@dataclass(frozen=True)
class Prediction:
    """Predicted effect of edits on the mean step.

    Attributes:
        edits: in the order in which they are applied.
        predicted_ns: mean step time under the edits.
        speedup: of throughput: samples per second under the edits over those without.
        low_ns, high_ns: interval of the predicted time.
        notes: findings of the edits about the run, a line each.
        proven: whether jobs were recorded before and after all of these edits.
        samples: factor on the samples of a step.
        gain_low_ns, gain_high_ns: interval of `gain_ns`.
        widened: why the intervals are wider than the replay's own; empty where they are not.
    """

    edits: tuple[Edit, ...]
    predicted_ns: float
    speedup: float
    low_ns: float
    high_ns: float
    notes: tuple[str, ...] = ()
    proven: bool = False
    samples: float = 1.0
    gain_low_ns: float = float("-inf")
    gain_high_ns: float = float("inf")
    widened: str = ""

    @property
    def base_ns(self) -> float:
        """Mean step without the edits, ns; infinite where the predicted step takes no time."""
        return self.predicted_ns * self.speedup / self.samples if self.predicted_ns else np.inf

    @property
    def gain_ns(self) -> float:
        """Time saved per step, ns, for the number of samples in a step without the edits."""
        return self.base_ns - self.predicted_ns / self.samples

    def speedup_at(self, gain_ns: float) -> float:
        """Return the speed-up of throughput at a given gain."""
        left_ns = self.base_ns - gain_ns
        return self.base_ns / left_ns if left_ns > 0 else np.inf

    def covering(self, *gains_ns: float) -> Prediction:
        """Return the prediction with intervals that also cover some gains per step; never narrower."""
        if not np.isfinite(self.base_ns):
            return self
        steps_ns = [(self.base_ns - gain_ns) * self.samples for gain_ns in gains_ns]
        return replace(
            self,
            low_ns=min(self.low_ns, *steps_ns),
            high_ns=max(self.high_ns, *steps_ns),
            gain_low_ns=min(self.gain_low_ns, *gains_ns),
            gain_high_ns=max(self.gain_high_ns, *gains_ns),
        )

    @property
    def between_ns(self) -> tuple[float, float]:
        """Step under the edits at the ends of the gain's interval, ns; without the variation of steps."""
        if not np.isfinite([self.base_ns, self.gain_low_ns, self.gain_high_ns]).all():
            return self.low_ns, self.high_ns
        low_ns, high_ns = (self.base_ns - gain_ns for gain_ns in (self.gain_high_ns, self.gain_low_ns))
        return max(low_ns, 0.0) * self.samples, max(high_ns, 0.0) * self.samples

    @property
    def effort(self) -> str:
        """Largest effort among the changes, one of `EFFORTS`."""
        return max((edit.effort for edit in self.edits), key=list(EFFORTS).index, default=next(iter(EFFORTS)))

    @property
    def training(self) -> tuple[str, ...]:
        """Effects of the edits on the training itself, a line each; these are not predicted."""
        return tuple(f"{edit}: {edit.training}" for edit in self.edits if edit.training)

    @property
    def is_advice(self) -> bool:
        """Whether all edits can be made to the job as it is."""
        return all(edit.is_advice for edit in self.edits)

    @property
    def effect(self) -> str:
        """`faster` or `slower` where the whole interval of the gain is, else `unclear`."""
        if self.gain_low_ns > 0:
            return "faster"
        return "slower" if self.gain_high_ns < 0 else "unclear"

    @property
    def block(self) -> str:
        """Its block, a key of `BLOCKS`."""
        if not self.is_advice:
            return "bound"
        return "proven" if self.proven else "unproven"

    def _repr_html_(self) -> str:
        """Return the predicted step, its interval, and how to get it, for notebooks."""
        rows = [
            ("throughput", f"x{self.speedup:.2f} ({self.effect})"),
            ("step", format_duration(self.predicted_ns)),
            ("interval", " to ".join(map(format_duration, self.between_ns))),
            ("rests on", BLOCKS[self.block]),
            ("how", self.how()),
            *(("note", note) for note in self.notes),
        ]
        return table(" and ".join(map(str, self.edits)), rows)

    def what(self) -> str:
        """Describe the changes in words."""
        return " and ".join(edit.describe() for edit in self.edits)

    def how(self) -> str:
        """Describe how to make the changes, and their assumptions."""
        return "; ".join(f"{edit.how()} (assumes that {edit.assumes})" for edit in self.edits)


class Refusal(DocumentPart, frozen=True):
    """An edit that the run cannot answer.

    Attributes:
        edit: as `--edit` accepts it.
        reason: why, and what to record instead.
    """

    edit: str
    reason: str


def ranked(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Rank predictions: first what is certainly faster, then what may not be, then what is not advice.

    Within each, edits that leave the training unchanged come first. Certain gains are then ordered by their
    lower ends: among similar gains, proven ones come first, then the least effort. All others are ordered by
    proof, then by gain.
    """
    return sorted(predictions, key=_rank_key)


def _rank_key(prediction: Prediction) -> tuple[object, ...]:
    """Return the sort key of a prediction in the ranking."""
    block, effort = list(BLOCKS).index(prediction.block), list(EFFORTS).index(prediction.effort)
    sure = prediction.is_advice and prediction.effect == "faster"
    least = prediction.speedup_at(prediction.gain_low_ns)
    merit: tuple[float, ...] = (block, -prediction.speedup)
    if sure:  # gains in percent that reach equal powers of two count as similar
        power = math.floor(math.log2(min(max(100 * (least - 1), 0.1), 1e6)))
        merit = (-power, block, effort, -least)
    return (
        not prediction.is_advice,
        prediction.effect != "faster",
        bool(prediction.training),
        *merit,
        len(prediction.edits),
        *map(str, prediction.edits),
    )


def baseline_steps(
    graph: Graph,
    timeline: Timeline | None = None,
    selection: Selection = ALL,
    longest_ns: float | None = None,
) -> pl.DataFrame:
    """Return when the replayed steps of the unchanged graph end, as `step_ends`.

    Args:
        timeline: its replay, where known already.
        selection: steps over which predictions are the mean; the usual ones where it names none. Where these
            are not all steps, column `counted` marks them.
        longest_ns: as in `usual_steps`.

    Raises:
        Unanswerable: there is no complete step, or none that counts takes any time.
    """
    timeline = timeline or replayed(graph)
    steps = step_ends(graph, timeline.start, timeline.end)
    if steps.height == 0:
        raise Unanswerable("no complete step in the run: record at least two steps")
    if selection.steps:
        steps = steps.with_columns(counted=is_in_ranges("step", selection.steps))
    else:
        steps = usual_steps(steps, longest_ns)
    lengths = step_lengths(steps)
    if lengths.size and not lengths.any():
        raise Unanswerable("no step of the run takes any time: record steps with work in them")
    return steps


def predict(
    job: ReplayedJob | Graph, baseline: pl.DataFrame, edits: Sequence[Edit], trust: Trust
) -> Prediction:
    """Apply edits one after the other, replay, and compare with the baseline.

    Args:
        baseline: `baseline_steps` of the job's graph.

    Raises:
        Unanswerable: an edit needs what the run lacks, or the whole graph of a job with condensed ranks.
    """
    return compare(apply_all(job_of(job).with_kept_tables(), edits), baseline, trust)


@dataclass(frozen=True)
class Applied(Generic[J]):
    """Edits applied one after the other.

    Attributes:
        before: the job without them.
        edits: in their order.
        changes: result of each, on top of those before it.
    """

    before: J
    edits: tuple[Edit, ...]
    changes: Sequence[Changed[J]]

    @property
    def after(self) -> J:
        """The job under all edits."""
        return self.changes[-1].job if self.changes else self.before

    @property
    def graphs(self) -> list[Graph]:
        """Graphs of the job before and after each edit."""
        return [self.before.graph, *(change.job.graph for change in self.changes)]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of the edits, and on sizes beyond those of the run, a line each."""
        lines = (
            (*change.notes, *beyond_sizes(graph, change.job.graph))
            for graph, change in zip(self.graphs, self.changes)
        )
        return tuple(chain(*lines))

    def others(self, alternatives: Callable[[Changed[J]], Iterable[J]]) -> Iterator[J]:
        """Yield the jobs that each edit could have made instead, with the later edits on top.

        Args:
            alternatives: returns the `ends` or the `limits` of a change.
        """
        for number, change in enumerate(self.changes, 1):
            for job in alternatives(change):
                with suppress(Unanswerable):  # a later edit may find nothing to change there
                    for edit in self.edits[number:]:
                        job = job.under(edit, in_full=False).job
                    yield job


def apply_all(job: ReplayedJob | Graph, edits: Sequence[Edit]) -> Applied[ReplayedJob]:
    """Apply edits one after the other.

    Raises:
        Unanswerable: as in `predict`.
    """
    before = after = job_of(job)
    changes: list[Changed[ReplayedJob]] = []
    for edit in edits:
        changes.append(after.under(edit))
        after = changes[-1].job
    return Applied(before, tuple(edits), changes)


def compare(applied: Applied[J], baseline: pl.DataFrame, trust: Trust) -> Prediction:
    """Replay a job under edits, and compare it with the baseline.

    Args:
        baseline: `baseline_steps` of the job without them.

    Raises:
        Unanswerable: no step would take any time.
    """
    before, after, slowdowns = applied.before, applied.after, slowdowns_of(trust)
    timelines: Iterable[Timeline] = before.replays(after, slowdowns)
    if trust.rendezvous is not None and before.has_same_nodes(after):
        timelines = chain(timelines, as_missing_ranks_may_come(after.graph, trust.rendezvous))
    # `map` does not keep a timeline while the next one is made.
    after_ns, *may_be_ns = map(partial(steps_under, baseline, before, after), timelines)
    refuse_nothing_left(after_ns)
    ends_ns, limits_ns = (
        [
            float(changed_steps_ns(baseline, before, other, slowdowns).mean())
            for other in applied.others(alternatives)
        ]
        for alternatives in (lambda change: change.ends(), lambda change: change.limits())
    )
    hosts_ns = [
        _steps_with_hosts(baseline, applied, HostFactors(factors), slowdowns)
        for factors in trust.host_factors
        if (np.abs(factors["factor"].to_numpy() - 1) > SAME_HOSTS).any()
    ]
    return _with_interval(applied, baseline, trust, (after_ns, may_be_ns, ends_ns, limits_ns), hosts_ns)


def refuse_nothing_left(steps_ns: Ints) -> None:
    """Raise if the steps of a changed job take no time.

    Args:
        steps_ns: [S] their lengths.

    Raises:
        Unanswerable: none takes any.
    """
    if steps_ns.size and not steps_ns.any():
        raise Unanswerable("nothing of the step would be left, so its time cannot be predicted")


@dataclass(frozen=True, eq=False)
class HostFactors:
    """Factors on the work of hosts.

    Attributes:
        factors: `factor` by `rank`; other ranks have the mean.
    """

    factors: pl.DataFrame

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with CPU work longer by these factors."""
        nodes = graph.nodes
        by_rank = np.full(int(nodes.rank.max(initial=0)) + 1, self.factors["factor"].mean())
        of_job = self.factors.filter(pl.col("rank") < by_rank.size)
        by_rank[of_job["rank"].to_numpy()] = of_job["factor"].to_numpy()
        on_cpu = is_one_of(nodes.kind, CPU_KINDS) & (nodes.rank >= 0)
        longer = np.rint(nodes.duration * by_rank[nodes.rank]).astype(np.int64)
        return graph.with_durations(np.where(on_cpu, longer, nodes.duration))


def _steps_with_hosts(
    baseline: pl.DataFrame, applied: Applied[J], hosts: HostFactors, slowdowns: tuple[float, ...]
) -> tuple[float, float]:
    """Return the mean step without and with edits, ns, where hosts work by other factors."""

    def mean_ns(before: J, after: J) -> float:
        return float(changed_steps_ns(baseline, before, after.with_change(hosts), slowdowns).mean())

    # The job without edits is shared by all predictions that are compared with it.
    name = ("steps with hosts", float(hosts.factors["factor"].sum()), slowdowns)
    before, given = applied.before, (baseline, hosts.factors)
    base_ns = before.once(name, lambda job: mean_ns(job, job), given)
    return base_ns, mean_ns(before, applied.after) if applied.edits else base_ns


def slowdowns_of(trust: Trust) -> tuple[float, ...]:
    """Return slowdowns of kernels by communication: the estimate and both bounds; empty where unknown."""
    overlap = trust.overlap
    return () if overlap is None else (overlap.factor, overlap.low, overlap.high)


def _with_interval(
    applied: Applied[J],
    baseline: pl.DataFrame,
    trust: Trust,
    replayed_ns: tuple[Ints, Sequence[Ints], Sequence[float], Sequence[float]],
    hosts_ns: Sequence[tuple[float, float]],
) -> Prediction:
    """Combine replays and uncertainties into a prediction.

    Args:
        baseline: `baseline_steps` of the job without edits.
        replayed_ns: [S] changed steps, and alternatives to them; mean steps at the ends of what the edits
            leave open, and mean steps that the changed job cannot be faster than.
        hosts_ns: mean steps without and with the edits, where recording cost hosts more, or less.
    """
    graphs, edits = applied.graphs, applied.edits
    before_ns = step_lengths(baseline)
    after_ns, may_be_ns, ends_ns, limits_ns = replayed_ns
    base, predicted = float(before_ns.mean()), float(after_ns.mean())
    samples = float(np.prod([edit.samples(graph) for edit, graph in zip(edits, graphs)]))
    gain = before_ns - after_ns
    between_runs = RUN_TO_RUN * _deviation(before_ns) / base * predicted if base else 0.0
    spread = STANDARD_ERRORS * float(np.hypot(_standard_error(gain, after_ns), between_runs))
    measured = measured_ns(trust, baseline) / trust.taken_out or base
    run = graphs[0].run
    if run is not None and run.manifest.is_pretended:
        measured = base  # a pretended run has no communication in its measured steps
    misfit = max(trust.error_pct / 100, abs(base / measured - 1)) * predicted
    misfit += trust.doubt_pct / 100 * predicted
    between = [float(changed_durations(baseline, graph, replay(graph).end).mean()) for graph in graphs[1:-1]]
    proven = [edit.is_proven(graph) for edit, graph in zip(edits, graphs)]
    doubts = _doubted_gains(edits, [base, *between, predicted])
    open_ns = max((abs(float(other.mean()) - predicted) for other in may_be_ns), default=0.0)
    margin = spread + misfit + sum(doubts) + open_ns
    saved = before_ns - after_ns / samples
    ends = [predicted, *ends_ns]
    of_hosts = [after for _, after in hosts_ns]
    least = min([max(limits_ns, default=0.0), predicted, *of_hosts])
    gain_ns = base - predicted / samples
    by_edits = [base - end / samples for end in ends]
    by_hosts = [gain_ns, *(base * (1 - after / before / samples) for before, after in hosts_ns if before)]
    longest = max([base, *(before for before, _ in hosts_ns)])
    # What edits leave open is independent of the cost of recording.
    less = math.hypot(gain_ns - min(by_edits), gain_ns - min(by_hosts))
    more = math.hypot(max(by_edits) - gain_ns, max(by_hosts) - gain_ns)
    doubted = sum(PROVEN_DOUBT * ns if shown else ns for shown, ns in zip(proven, doubts))
    unsure = gain_uncertainty(before_ns, saved, doubted / samples) + open_ns / samples
    unsure += misfit / max(predicted, 1.0) * abs(float(saved.mean()))
    return Prediction(
        edits,
        predicted,
        base / predicted * samples if predicted else float("inf"),
        max(min([*ends, *of_hosts]) - margin, least, 0.0),
        max([*ends, *of_hosts]) + margin,
        applied.notes,
        bool(edits) and all(proven),
        samples,
        gain_ns - less - unsure,
        min(gain_ns + more + unsure, base * (1 - least / samples / longest)) if longest else 0.0,
    )


def measured_ns(trust: Trust, baseline: pl.DataFrame) -> float:
    """Return the measured mean of the steps that count, ns; 0 where none was measured.

    Args:
        baseline: `baseline_steps`.
    """
    steps = trust.steps
    if "counted" in baseline.columns:
        counted = baseline.filter("counted").select("window", "step")
        steps = steps.join(counted, on=["window", "step"], how="semi")
    return float(steps["measured_ns"].mean() or 0)  # type: ignore[arg-type]


def gain_uncertainty(before_ns: Ints | Floats, saved_ns: Floats, doubted_ns: float) -> float:
    """Return half of the 90% interval of a gain, ns, without the parts of misfit and overlap.

    Independent parts add in squares: the variation of gains from step to step, the difference between
    recordings of one job (in proportion to its steps, and in any case), and the assumptions of the edit.
    Single slow steps, which are slow before and after, do not count.

    Args:
        before_ns: [S] length of each step.
        saved_ns: [S] gain of each.
    """
    deviation = float(saved_ns.std(ddof=1)) if saved_ns.size > 1 else 0.0
    lasting = RUN_TO_RUN * MAD_TO_SIGMA * float(np.median(np.abs(before_ns - np.median(before_ns))))
    between = NINETY * MAD_TO_SIGMA * RECORDING_SPREAD * float(before_ns.mean())
    return math.hypot(NINETY * deviation / math.sqrt(saved_ns.size), lasting, between, doubted_ns)


def predicted_timeline(applied: Applied[J], trust: Trust) -> Timeline:
    """Return the replay of a job under edits whose steps `compare` predicts."""
    return next(applied.before.replays(applied.after, slowdowns_of(trust)))


def _doubted_gains(edits: Sequence[Edit], steps: Sequence[float]) -> list[float]:
    """Return the share of the gain that rests on each edit's assumptions, ns, of what that edit changed.

    Args:
        edits: in order.
        steps: mean steps before the first and after each edit, ns.
    """
    return [edit.doubt * abs(after - before) for edit, (before, after) in zip(edits, pairwise(steps))]


def _deviation(steps_ns: NDArray[np.int64]) -> float:
    """Return the standard deviation of steps; 0 for a single one."""
    return float(steps_ns.std(ddof=1)) if steps_ns.size > 1 else 0.0


def _standard_error(gain: NDArray[np.int64], after_ns: NDArray[np.int64]) -> float:
    """Return the standard error of the changed job's mean step: its steps vary, and so do the gains."""
    return float(np.hypot(_deviation(gain), _deviation(after_ns)) / np.sqrt(gain.size))


def steps_under(baseline: pl.DataFrame, before: ReplayedJob, after: ReplayedJob, timeline: Timeline) -> Ints:
    """Return [S] the length of each step of a changed job, ns; 0 where all of it moved before the first step.

    In a window of few steps, a host that begins ahead of its device would hide its own time: the mean step
    does not become shorter than the slowest host needs for one without waiting for a device.

    Args:
        baseline: `baseline_steps` of the unchanged job.
        before, after: the job before and after the change.
        timeline: the replay of the changed job.
    """
    steps_ns = changed_durations(baseline, timeline.graph, timeline.end)
    if not steps_ns.size or (mean_ns := float(steps_ns.mean())) >= before.pace_ns:
        return steps_ns
    least_ns = min(after.pace_ns, float(step_lengths(baseline).mean()))
    return steps_ns + max(round(least_ns - mean_ns), 0)


def changed_steps_ns(
    baseline: pl.DataFrame, before: ReplayedJob, after: ReplayedJob, slowdowns: Sequence[float]
) -> Ints:
    """Return [S] the length of each step of a changed job by its likeliest replay, ns.

    Args:
        baseline: `baseline_steps` of the unchanged job.
        before, after: the job before and after the change.
        slowdowns: as from `slowdowns_of`.
    """
    return steps_under(baseline, before, after, next(before.replays(after, slowdowns[:1])))
