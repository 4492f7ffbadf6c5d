"""Predictions: throughput and step time under edits, each with an interval.

In: a graph and edits. Out: `Prediction`s. The interval comes from how steps and gains vary, from how far the
replay misses the unchanged steps, from how much of the gain rests on an edit's assumptions, from how well the
slowdown of compute during communication is known, where an edit changes what overlaps, and
from what may become of waiting for ranks that are missing.

The step of a changed job is that of another recording, and recordings of one job differ. What an edit gains
is a difference: what is common to the job before and after it cancels, and what is left is how the gain
varies from step to step, and what the edit assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
from dpro.replay.graph import CPU_KINDS, Graph, is_of, once
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

NINETY = 1.645  # standard deviations on each side of a normal value that hold 90%
# Of the doubt of an edit, what counts for its gain where pairs of recordings have shown it: with so much 85%
# of the intervals held what 18 pairs gained (docs/accuracy.md). Of an unproven edit all
# of it counts.
PROVEN_DOUBT = 0.7
# By how much two recordings of one and the same job differ, of its step: the median of sleeping jobs over
# links of a fixed speed, which nothing disturbs (docs/accuracy.md). A gain that is
# measured is between two.
RECORDINGS = 0.004
SAME_HOSTS = 0.005  # by which hosts may differ from what is taken for likely without a replay for that

# The order in which predictions are given, and what each block of them is called.
BLOCKS = {
    "proven": "proven: real jobs were recorded before and after such a change",
    "unproven": "unproven: no job was recorded before and after such a change",
    "bound": "what parts are worth: upper bounds and hypotheticals, not advice",
}


@dataclass(frozen=True)
class Prediction:
    """What edits would do to the mean step.

    Attributes:
        edits: in the order they are applied.
        predicted_ns: mean step time under the edits.
        speedup: of throughput: samples per second under the edits over those without.
        low_ns, high_ns: interval of the predicted time.
        notes: what the edits found in the run, a line each.
        proven: whether jobs were really changed by all of these edits, and recorded before and after.
        samples: how many times as many samples a step works on.
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
        """The mean step without the edits; not known where nothing is left of it."""
        return self.predicted_ns * self.speedup / self.samples if self.predicted_ns else np.inf

    @property
    def gain_ns(self) -> float:
        """What is saved of the time for as many samples as a step works on now."""
        return self.base_ns - self.predicted_ns / self.samples

    def speedup_at(self, gain_ns: float) -> float:
        """How many times the throughput is if so much is gained."""
        left_ns = self.base_ns - gain_ns
        return self.base_ns / left_ns if left_ns > 0 else np.inf

    @property
    def between_ns(self) -> tuple[float, float]:
        """The step under the edits at the ends of the gain's interval: what a step varies by is not in it."""
        if not np.isfinite([self.base_ns, self.gain_low_ns, self.gain_high_ns]).all():
            return self.low_ns, self.high_ns
        low_ns, high_ns = (self.base_ns - gain_ns for gain_ns in (self.gain_high_ns, self.gain_low_ns))
        return max(low_ns, 0.0) * self.samples, max(high_ns, 0.0) * self.samples

    @property
    def effort(self) -> str:
        """What it takes at most to make the changes, as `EFFORTS`."""
        return max((edit.effort for edit in self.edits), key=list(EFFORTS).index, default=next(iter(EFFORTS)))

    @property
    def training(self) -> tuple[str, ...]:
        """What the edits change in the training itself, a line each; what that does is not predicted."""
        return tuple(f"{edit}: {edit.training}" for edit in self.edits if edit.training)

    @property
    def is_advice(self) -> bool:
        """Whether all of it can be done to the job as it is."""
        return all(edit.is_advice for edit in self.edits)

    @property
    def effect(self) -> str:
        """`faster` or `slower` where the interval of the gain says so, else `unclear`: it holds no gain."""
        if self.gain_low_ns > 0:
            return "faster"
        return "slower" if self.gain_high_ns < 0 else "unclear"

    @property
    def block(self) -> str:
        """Which of `BLOCKS` it stands in."""
        if not self.is_advice:
            return "bound"
        return "proven" if self.proven else "unproven"

    def _repr_html_(self) -> str:
        """The predicted step, its interval, and how to get it, for notebooks."""
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
        """What would be different, in words."""
        return " and ".join(edit.describe() for edit in self.edits)

    def how(self) -> str:
        """How to do it for real, and what is assumed."""
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
    """What is faster beyond doubt, what may not be, and what is no advice, in this order.

    Of each what leaves the training as it is comes first. Then what is beyond doubt goes by what it gains at
    least: of like gains the proven ones come first, then the least effort. All else goes by what is
    proven, then by the gain.
    """
    return sorted(predictions, key=_place)


def _place(prediction: Prediction) -> tuple[object, ...]:
    """Where a prediction stands in the ranking."""
    block, effort = list(BLOCKS).index(prediction.block), list(EFFORTS).index(prediction.effort)
    sure = prediction.is_advice and prediction.effect == "faster"
    least = prediction.speedup_at(prediction.gain_low_ns)
    merit = (-_order_of_gain(least), block, effort, -least) if sure else (block, -prediction.speedup)
    return (
        not prediction.is_advice,
        prediction.effect != "faster",
        bool(prediction.training),
        *merit,
        len(prediction.edits),
        *map(str, prediction.edits),
    )


def _order_of_gain(speedup: float) -> int:
    """The power of two that a gain in percent reaches: gains between the same two are like gains."""
    return math.floor(math.log2(min(max(100 * (speedup - 1), 0.1), 1e6)))


def baseline_steps(
    graph: Graph, timeline: Timeline | None = None, selection: Selection = ALL, usual_ns: float | None = None
) -> pl.DataFrame:
    """When the replayed steps of the unchanged graph end, as `step_ends`.

    Args:
        timeline: its replay, if it is at hand.
        usual_ns: as of `device_step_ns`: how long steps take that wait for no host.
        selection: the steps that predictions are the mean of, the usual ones where it names none; where
            these are not all, `counted` has them.

    Raises:
        Unanswerable: there is no whole step, or none that counts takes any time.
    """
    timeline = timeline or replayed(graph)
    steps = step_ends(graph, timeline.start, timeline.end)
    if steps.height == 0:
        raise Unanswerable("no complete step in the run: record at least two steps")
    if selection.steps:
        steps = steps.with_columns(counted=is_in_ranges("step", selection.steps))
    else:
        steps = usual_steps(steps, usual_ns)
    lengths = step_lengths(steps)
    if lengths.size and not lengths.any():
        raise Unanswerable("no step of the run takes any time: record steps with work in them")
    return steps


def predict(
    job: ReplayedJob | Graph, baseline: pl.DataFrame, edits: Sequence[Edit], trust: Trust
) -> Prediction:
    """Apply edits one after the other, replay, and compare with the baseline.

    Args:
        baseline: `baseline_steps` of its graph.

    Raises:
        Unanswerable: an edit needs what the run lacks, or the whole graph of a job by condensed ranks.
    """
    return compare(apply_all(job_of(job).with_kept_tables(), edits), baseline, trust)


@dataclass(frozen=True)
class Applied(Generic[J]):
    """Edits that were applied one after the other.

    Attributes:
        before: the job without them.
        edits: in their order.
        changes: what each made, on top of those before it.
    """

    before: J
    edits: tuple[Edit, ...]
    changes: Sequence[Changed[J]]

    @property
    def after(self) -> J:
        """The job under all of them."""
        return self.changes[-1].job if self.changes else self.before

    @property
    def graphs(self) -> list[Graph]:
        """The graph of the job, and as it is after each edit."""
        return [self.before.graph, *(change.job.graph for change in self.changes)]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it, a line each."""
        lines = (
            (*change.notes, *beyond_sizes(graph, change.job.graph))
            for graph, change in zip(self.graphs, self.changes)
        )
        return tuple(chain(*lines))

    def others(self, alternatives: Callable[[Changed[J]], Iterable[J]]) -> Iterator[J]:
        """The jobs that each edit could have made instead, with the edits after it on top.

        Args:
            alternatives: of what an edit made, its `ends` or its `limits`.
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
        Unanswerable: as of `predict`.
    """
    before = after = job_of(job)
    changes: list[Changed[ReplayedJob]] = []
    for edit in edits:
        changes.append(after.under(edit))
        after = changes[-1].job
    return Applied(before, tuple(edits), changes)


def compare(applied: Applied[J], baseline: pl.DataFrame, trust: Trust) -> Prediction:
    """Replay a job under edits, and compare.

    Args:
        baseline: `baseline_steps` of the job without them.

    Raises:
        Unanswerable: they leave nothing that takes time.
    """
    before, after, slowdowns = applied.before, applied.after, slowdowns_of(trust)
    timelines: Iterable[Timeline] = before.replays(after, slowdowns)
    if trust.rendezvous is not None and before.has_same_nodes(after):
        timelines = chain(timelines, as_missing_ranks_may_come(after.graph, trust.rendezvous))
    # By `map`, which holds no timeline while the next one is made.
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
    """Refuse a changed job whose steps take no time.

    Args:
        steps_ns: [S] their lengths.

    Raises:
        Unanswerable: none takes any.
    """
    if steps_ns.size and not steps_ns.any():
        raise Unanswerable("nothing of the step would be left: the run cannot say how long it would take")


@dataclass(frozen=True, eq=False)
class HostFactors:
    """Hosts work a multiple of the time that they are taken to work.

    Attributes:
        factors: `factor` by `rank`; ranks that it does not have are as the others in the mean.
    """

    factors: pl.DataFrame

    def apply(self, graph: Graph) -> Graph:
        """The graph with these durations of CPU work."""
        nodes = graph.nodes
        by_rank = np.full(int(nodes.rank.max(initial=0)) + 1, self.factors["factor"].mean())
        of_job = self.factors.filter(pl.col("rank") < by_rank.size)
        by_rank[of_job["rank"].to_numpy()] = of_job["factor"].to_numpy()
        on_cpu = is_of(nodes.kind, CPU_KINDS) & (nodes.rank >= 0)
        longer = np.rint(nodes.duration * by_rank[nodes.rank]).astype(np.int64)
        return graph.with_durations(np.where(on_cpu, longer, nodes.duration))


def _steps_with_hosts(
    baseline: pl.DataFrame, applied: Applied[J], hosts: HostFactors, slowdowns: tuple[float, ...]
) -> tuple[float, float]:
    """Ns of the mean step without and with edits, where hosts work as long as they may instead."""
    before = applied.before

    def mean_ns(job: J) -> float:
        return float(changed_steps_ns(baseline, before, job.with_change(hosts), slowdowns).mean())

    # Of the job without edits it is the same for all that are compared with it.
    columns = (before.graph.nodes.duration, before.graph.edges.lag, baseline, hosts.factors)
    name = ("steps with hosts", float(hosts.factors["factor"].sum()))
    base_ns = once(before.graph, name, columns, lambda: mean_ns(before))
    return base_ns, mean_ns(applied.after) if applied.edits else base_ns


def slowdowns_of(trust: Trust) -> tuple[float, ...]:
    """Of kernels by communication: as estimated, and at both bounds; none where that is not known."""
    overlap = trust.overlap
    return () if overlap is None else (overlap.factor, overlap.low, overlap.high)


def _with_interval(
    applied: Applied[J],
    baseline: pl.DataFrame,
    trust: Trust,
    replayed_ns: tuple[Ints, Sequence[Ints], Sequence[float], Sequence[float]],
    hosts_ns: Sequence[tuple[float, float]],
) -> Prediction:
    """What edits do to the step, and how sure that is.

    Args:
        baseline: `baseline_steps` of the job without them.
        replayed_ns: [S] the steps then, and what else they may come to; mean steps at the ends of what the
            edits leave open, and those that they cannot be faster than.
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
        measured = base  # which has no communication
    misfit = max(trust.error_pct / 100, abs(base / measured - 1)) * predicted
    misfit += trust.doubt_pct / 100 * predicted
    between = [float(changed_durations(baseline, graph, replay(graph).end).mean()) for graph in graphs[1:-1]]
    proven = [edit.is_proven(graph) for edit, graph in zip(edits, graphs)]
    doubts = _doubts(edits, [base, *between, predicted])
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
    # What edits leave open has nothing to do with what recording cost.
    less = math.hypot(gain_ns - min(by_edits), gain_ns - min(by_hosts))
    more = math.hypot(max(by_edits) - gain_ns, max(by_hosts) - gain_ns)
    doubted = sum(PROVEN_DOUBT * ns if shown else ns for shown, ns in zip(proven, doubts))
    unsure = _unsure(before_ns, saved, doubted / samples) + open_ns / samples
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
    """How long the steps that count take, as measured: their mean; 0 where none was.

    Args:
        baseline: `baseline_steps`.
    """
    steps = trust.steps
    if "counted" in baseline.columns:
        counted = baseline.filter("counted").select("window", "step")
        steps = steps.join(counted, on=["window", "step"], how="semi")
    return float(steps["measured_ns"].mean() or 0)  # type: ignore[arg-type]


def _unsure(before_ns: Ints, saved_ns: Floats, doubted_ns: float) -> float:
    """Half of the 90% interval of a gain, but for what misfit and overlap leave open, ns.

    What is independent adds up in squares: how gains vary from step to step, by how much recordings of one
    job differ (with its steps, and in any case), and what the edit assumes. Single slow steps, which are slow
    before and after, do not count.

    Args:
        before_ns: [S] how long each step takes.
        saved_ns: [S] what it gains.
    """
    deviation = float(saved_ns.std(ddof=1)) if saved_ns.size > 1 else 0.0
    lasting = RUN_TO_RUN * MAD_TO_SIGMA * float(np.median(np.abs(before_ns - np.median(before_ns))))
    between = NINETY * MAD_TO_SIGMA * RECORDINGS * float(before_ns.mean())
    return math.hypot(NINETY * deviation / math.sqrt(saved_ns.size), lasting, between, doubted_ns)


def predicted_timeline(applied: Applied[J], trust: Trust) -> Timeline:
    """The replay of a job under edits whose steps `compare` predicts: to show what they consist of."""
    return next(applied.before.replays(applied.after, slowdowns_of(trust)))


def _doubts(edits: Sequence[Edit], steps: Sequence[float]) -> list[float]:
    """What of the gain rests on what the edits assume, ns: each one's share of what it alone changed.

    Args:
        edits: in order.
    """
    return [edit.doubt * abs(after - before) for edit, (before, after) in zip(edits, pairwise(steps))]


def _deviation(steps_ns: NDArray[np.int64]) -> float:
    """The standard deviation of steps; 0 of a single one."""
    return float(steps_ns.std(ddof=1)) if steps_ns.size > 1 else 0.0


def _standard_error(gain: NDArray[np.int64], after_ns: NDArray[np.int64]) -> float:
    """Of the mean step that a run of the changed job would show: its own steps vary, and so do the gains."""
    return float(np.hypot(_deviation(gain), _deviation(after_ns)) / np.sqrt(gain.size))


def steps_under(baseline: pl.DataFrame, before: ReplayedJob, after: ReplayedJob, timeline: Timeline) -> Ints:
    """[S] ns, how long each step of a changed job takes; 0 where all of it moved before the first step.

    In a window of few steps a host that began it ahead of its device would hide how long it takes itself: the
    mean step does not become shorter than the slowest host needs for one if it never waits for a device.

    Args:
        baseline: `baseline_steps` of the job as it was.
        before, after: the job, and as it is changed.
        timeline: the replay of the changed one.
    """
    steps_ns = changed_durations(baseline, timeline.graph, timeline.end)
    if not steps_ns.size or (mean_ns := float(steps_ns.mean())) >= before.pace_ns:
        return steps_ns
    least_ns = min(after.pace_ns, float(step_lengths(baseline).mean()))
    return steps_ns + max(round(least_ns - mean_ns), 0)


def changed_steps_ns(
    baseline: pl.DataFrame, before: ReplayedJob, after: ReplayedJob, slowdowns: Sequence[float]
) -> Ints:
    """[S] ns, how long each step of a changed job takes by its likeliest replay.

    Args:
        baseline: `baseline_steps` of the job as it was.
        before, after: the job, and as it is changed.
        slowdowns: as of `slowdowns_of`.
    """
    return steps_under(baseline, before, after, next(before.replays(after, slowdowns[:1])))
