"""Trust in a replay: its errors against the trace, and open questions of the trace.

Takes a graph with its matching, and its timeline; returns figures and a plain verdict. A small error of the
step time proves little by itself, since wrong parts can add up right, so three more things are measured:
errors of single starts, time that nothing explains, and starts taken from the trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import structs

from dpro.arrays import Bools, Ints
from dpro.classify import classify
from dpro.documents import DocumentPart
from dpro.markup import table
from dpro.replay.construction.graph_builder import Built
from dpro.replay.construction.lags import UNEXPLAINED_NS
from dpro.replay.construction.recording_cost import FAR
from dpro.replay.engine import NO_NODE
from dpro.replay.fidelity.missing_ranks import PartialCollectives, extrapolate_missing_ranks
from dpro.replay.fidelity.overlap import Contention, contention_of, kernels_beside
from dpro.replay.graph import GPU_KINDS, EdgeKind, Graph, NodeKind, is_one_of
from dpro.replay.steps import StepSeries, series_outside, steps_of
from dpro.replay.timeline import (
    Timeline,
    are_usual,
    cold_share,
    extents_of,
    measured_step_times,
    rank_step_times,
    replay,
    replayed,
    share_saved,
    step_ends,
    step_lengths,
    step_times,
    usual_steps,
    warm_up,
)
from dpro.schema import SPANS, STEPS
from dpro.store import Manifest
from dpro.timed import with_times
from dpro.units import NS_PER_MS, format_duration, ms
from dpro.words import ranks_in_words

# Quality of predictions from a run: each measured figure against its bars, and an overall score.

STANDARD_ERRORS = 2.0  # on each side of an interval
# Difference between recordings of one job, in standard deviations of their steps: noise lasts, and more steps
# do not average it away (median of 30 pairs of recordings in docs/accuracy.md).
RUN_TO_RUN = 0.6
SURE = 0.95  # confidence in the lower bound of a share of a small number
GOOD, FAIR = 0.75, 0.25  # lowest scores of these grades
COPIED = "start times surely copied from the trace"
UNMATCHED = "no collective was matched across ranks: which rank waits for which is unknown"
COLD_STEPS, WARM_UP = "first calls of a process in steps", "steps that warm up against the others"
NOTABLE = 1.05  # factor from which a slowdown by recording is reported
MIN_USUAL_STEPS = 5  # steps outside deep windows: fewer do not show the usual one


_MEASURED = {  # sentence of a figure, by its name
    "error of replayed steps": "replayed steps are off by {}",
    "median error of starts": "replayed start times are off by {} of a step (median)",
    "95th percentile of errors of starts": "replayed start times are off by {} of a step (95th percentile)",
    "unexplained time": "{} of the time is unexplained",
    COPIED: "at least {} of starts are explained by nothing in the graph and keep their recorded time",
    "length of deep steps against others": "median (not mean) steps in and outside deep windows differ by {}",
    "noise of steps": "step times vary: changes below {} of a step cannot be detected",
    "spans of impossible times": "{} of spans have impossible times",
    COLD_STEPS: "first calls of a process make up {} of the steps",
    WARM_UP: "steps that warm up take {} as long as the others",
}


class Criterion(DocumentPart, frozen=True):
    """One figure on which predictions depend.

    Attributes:
        name: the measured quantity.
        value: in `unit`; null where the run does not show it.
        good, poor: bars in `unit`: good up to the first, poor from the second on.
        unit: % or x (times).
        score: 0 to 1; null where unknown.
    """

    name: str
    value: float | None
    good: float
    poor: float
    unit: str
    score: float | None

    def __str__(self) -> str:
        """Word the figure and its bars."""
        bars = f"good up to {self.good:g}{self.unit}, poor from {self.poor:g}{self.unit}"
        return f"{self.in_words} ({bars})"

    @property
    def in_words(self) -> str:
        """The measured quantity, in words."""
        if self.value is None:
            return f"{self.name}: unknown"
        measured = _MEASURED.get(self.name, f"{self.name}: {{}}")
        return measured.format(f"{_figure_in_words(self.value)}{self.unit}")


def _figure_in_words(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def criterion(name: str, value: float | None, good: float, poor: float, unit: str = "%") -> Criterion:
    """Make a figure with its score: 1 up to `good`, 0 from `poor` on, linear between."""
    score = None if value is None else float(np.clip((poor - value) / (poor - good), 0.0, 1.0))
    return Criterion(name, value, good, poor, unit, score)


def figures_of(
    steps: pl.DataFrame,
    starts_ns: Mapping[int, float],
    unexplained: float,
    copied: float,
    windows: float | None,
    impossible: float = 0.0,
    cold: float = 0.0,
    warming: float = 0.0,
) -> tuple[Criterion, ...]:
    """Return all figures of trust, worst score first.

    Args:
        steps: `measured_ns` and `error_pct` of the replayed steps.
        starts_ns: percentiles of the errors of starts, ns.
        unexplained: share of time that nothing explains.
        copied: lower bound of the share of starts taken from the trace.
        windows: from `windows_to_usual`.
        impossible: share of spans left out or moved because of impossible times.
        cold: share of the usual steps in first calls of a process, from `cold_share`.
        warming: time before the usual steps, as a multiple of theirs, from `warm_up`.
    """
    measured = steps["measured_ns"].to_numpy().astype(np.float64)
    measured = measured[are_usual(measured)]
    step_ns = float(measured.mean()) if measured.size else 0.0
    error = float(steps["error_pct"].abs().mean()) if steps.height else None  # type: ignore[arg-type]
    half, most = (
        100 * starts_ns[percent] / step_ns if step_ns and percent in starts_ns else None
        for percent in (50, 95)
    )
    # The smallest change, in % of the step, whose interval excludes no change.
    smallest = None
    if measured.size >= 2 and error is not None:
        smallest = float(100 * STANDARD_ERRORS * RUN_TO_RUN * measured.std(ddof=1) / measured.mean()) + error
    noise = criterion("noise of steps", smallest, 10.0, 50.0)
    if smallest is None:  # as with one step: no prediction is good, and none shown to be poor
        noise = structs.replace(noise, score=(GOOD + FAIR) / 2)
    figures = [
        criterion("error of replayed steps", error, 1.0, 5.0),
        criterion("median error of starts", half, 0.2, 5.0),
        criterion("95th percentile of errors of starts", most, 2.0, 50.0),
        criterion("unexplained time", 100 * unexplained, 1.0, 10.0),
        criterion(COPIED, 100 * copied, 5.0, 20.0),
        criterion("length of deep steps against others", windows, 1.1, 1.5, "x"),
        noise,
        *([criterion("spans of impossible times", 100 * impossible, 0.0, 5.0)] if impossible else []),
        *([criterion(COLD_STEPS, 100 * cold, 0.0, 50.0)] if cold else []),
        *([criterion(WARM_UP, warming, 1.0, 10.0, "x")] if warming > 1 else []),
    ]
    return tuple(sorted(figures, key=lambda figure: 2.0 if figure.score is None else figure.score))


def deep_and_usual(steps: pl.DataFrame) -> tuple[float, StepSeries] | None:
    """Return the median step in deep windows, in ns, and the steps outside; None where either is missing."""
    deep = with_times(steps).filter((pl.col("window") >= 0) & (pl.col("time_ns") > 0))
    usual = series_outside(steps, MIN_USUAL_STEPS)
    if deep.is_empty() or usual is None:
        return None
    return float(np.median(deep["time_ns"].to_numpy())), usual


def windows_mislead(steps: pl.DataFrame) -> bool:
    """Return whether windows slow down steps so much that these no longer show what takes the job's time."""
    both = deep_and_usual(steps)
    return both is not None and both[0] / both[1].typical_ns >= FAR


def windows_to_usual(steps: pl.DataFrame, taken_out: float = 1.0) -> float | None:
    """Return the ratio of steps in deep windows to others, or its inverse, whichever is at least 1.

    Args:
        taken_out: ratio of steps as recorded to steps without the cost of recording.

    Returns:
        None where either are missing.
    """
    both = deep_and_usual(steps)
    if both is None:
        return None
    ratio = both[0] / taken_out / both[1].typical_ns
    return max(ratio, 1 / ratio)


def score_of(figures: Sequence[Criterion]) -> float:
    """Return the score of the worst figure; 0 without any."""
    return min((figure.score for figure in figures if figure.score is not None), default=0.0)


def grade_of(score: float) -> str:
    """Return a score as a word: good, fair or poor."""
    return "good" if score >= GOOD else "fair" if score >= FAIR else "poor"


ADVICE = {
    "good": "They are reliable within their intervals",
    "fair": "Their intervals are plausible; verify important ones with `dpro try`",
    "poor": "Do not rely on them; measure a change with `dpro try` first",
}


def grade_sentence(score: float, figures: Sequence[Criterion]) -> str:
    """Word the grade, the score, the figures that lower it, and those the run does not show.

    Args:
        score: from 0 to 1.
    """
    grade = grade_of(score)
    weak = [str(figure) for figure in figures if figure.score is not None and figure.score < GOOD][:2]
    why = f" Weakest point: {'; '.join(weak)}." if weak else ""
    unknown = [figure.name for figure in figures if figure.value is None]
    missing = f" Unknown: {', '.join(unknown)}." if unknown else ""
    return f"Predictions from this run: {grade} ({score:.2f} of 1). {ADVICE[grade]}.{why}{missing}"


# The basis of a replay: recorded dependencies, inferred ones, and times taken from the trace.


class Starts(DocumentPart, frozen=True):
    """The basis of the starts of GPU work and of collectives: four shares that add up to 1.

    Attributes:
        derived: share set by a recorded dependency.
        inferred: share set by an inferred dependency.
        fitted: share set by the draining of the device.
        anchored: share set by the trace alone.
    """

    derived: float
    inferred: float
    fitted: float
    anchored: float


class EdgeCounts(DocumentPart, frozen=True):
    """Dependencies of one kind.

    Attributes:
        kind: kind of dependency.
        recorded, inferred: number of each.
    """

    kind: str
    recorded: int
    inferred: int


class StreamPairs(DocumentPart, frozen=True):
    """Pairs of streams where one waits for the other.

    Attributes:
        recorded: number of pairs with recorded events.
        inferred: number of pairs with inferred events only.
    """

    recorded: int
    inferred: int


class Evidence(DocumentPart, frozen=True):
    """The basis of the replay.

    Attributes:
        starts: the basis of starts.
        edges: dependencies by kind.
        stream_pairs: streams that wait for each other.
    """

    starts: Starts
    edges: tuple[EdgeCounts, ...]
    stream_pairs: StreamPairs


class StartCounts(NamedTuple):
    """The basis of the starts of work as counts, which add up over ranks.

    Attributes:
        edges: [EdgeKind, 2] recorded and inferred dependencies.
        streams: [2] pairs of streams with recorded waits, and with inferred waits only.
        set_by: [4] starts that are derived, inferred, fitted, anchored.
    """

    edges: Ints
    streams: Ints
    set_by: Ints


def evidence_of(counts: StartCounts) -> Evidence:
    """Return the basis of the starts as shares of all."""
    rows = zip(EdgeKind, counts.edges.tolist())
    edges = tuple(EdgeCounts(kind.name.lower(), *numbers) for kind, numbers in rows if sum(numbers))
    shares = counts.set_by / max(int(counts.set_by.sum()), 1)
    return Evidence(Starts(*map(float, shares)), edges, StreamPairs(*counts.streams.tolist()))


def min_share_from_trace(counts: StartCounts) -> float:
    """Return a lower bound of the share of starts set by the trace (Clopper and Pearson, 1934).

    The bound allows for a small number of starts.
    """
    from scipy.special import betaincinv  # imported here, since most commands do not need it

    taken, number = int(counts.set_by[2:].sum()), int(counts.set_by.sum())
    return float(betaincinv(taken, number - taken + 1, 1 - SURE)) if taken else 0.0


def count_starts(timeline: Timeline) -> StartCounts:
    """Count the basis of starts in a replay of the unchanged graph, or of one rank of it."""
    graph = timeline.graph
    work = is_started(graph)
    anchored = graph.nodes.anchored.copy()
    late = (graph.nodes.kind == NodeKind.DELAY) & (graph.nodes.duration > UNEXPLAINED_NS)
    anchored[graph.edges.target[late[graph.edges.source]]] = True
    on_full_streams = np.zeros(graph.num_nodes, np.bool_)
    on_full_streams[graph.edges.target[graph.edges.kind == EdgeKind.CONTENTION]] = True
    fitted = on_full_streams & graph.nodes.anchored
    bound = timeline.binding != NO_NODE
    inferred = np.zeros(graph.num_nodes, np.bool_)
    inferred[bound] = graph.edges.inferred[timeline.binding[bound]]
    kind = np.select([fitted, anchored, inferred], [2, 3, 1], 0)[work]
    edges = np.bincount(2 * graph.edges.kind + graph.edges.inferred, minlength=2 * len(EdgeKind))
    set_by = np.bincount(kind, minlength=4)
    events = graph.edges.taken(np.flatnonzero(graph.edges.kind == EdgeKind.EVENT))
    lanes = [graph.nodes.lane[nodes].tolist() for nodes in (events.source, events.target)]
    ordered = {pair for pair, guessed in zip(zip(*lanes), events.inferred.tolist()) if not guessed}
    streams = np.array([len(ordered), len(set(zip(*lanes)) - ordered)], np.int64)
    return StartCounts(edges.reshape(-1, 2), streams, set_by)


def is_started(graph: Graph) -> Bools:
    """Return [N] which nodes are started rather than follow on a CPU thread: GPU work and arrivals."""
    return np.isin(graph.nodes.kind, (*GPU_KINDS, NodeKind.ARRIVE))


def taken_from_trace(graph: Graph) -> Bools:
    """Return [N] which starts are as measured by construction: anchored, or after a recorded delay."""
    nodes = graph.nodes
    recorded = nodes.duration == nodes.measured_end - nodes.measured_start
    taken = nodes.anchored.copy()
    taken[graph.edges.target[((nodes.kind == NodeKind.DELAY) & recorded)[graph.edges.source]]] = True
    return taken


# Beyond these, a replay does not describe the job well enough for predictions.
WORST_STEP_ERROR_PCT = 5.0
WORST_UNEXPLAINED = 0.10
WORST_ANCHORED = 0.20
# Bounds of a good replay; the verdict reports where they are exceeded. Starts in shares of a step.
GOOD_STEP_ERROR_PCT = 1.0
GOOD_START_MEDIAN = 0.002
GOOD_START_P95 = 0.02
GOOD_UNEXPLAINED = 0.01


class TraceCoverage(DocumentPart, frozen=True):
    """What the trace shows, as shares.

    Attributes:
        collectives_matched: collectives found on all ranks whose windows cover them; null without any.
        collectives_outside_window: collectives outside the window of some rank; null without any.
        kernels_classified: GPU time in kernels of a known class; null without GPU work.
        time_unexplained: time in which work could have started and nothing shows why it had not.
        host_gaps: CPU time in no span, kept as work.
        starts_anchored: starts that were taken from the trace.
    """

    collectives_matched: float | None
    collectives_outside_window: float | None
    kernels_classified: float | None
    time_unexplained: float
    host_gaps: float
    starts_anchored: float


@dataclass(frozen=True)
class Trust:
    """The assessment of how well a replay fits.

    Attributes:
        steps: `window`, `step`, `measured_ns`, `replayed_ns`, `error_pct`.
        ranks: `rank`, `error_pct`, `p50`, `p95` (ns), from `rank_errors`.
        error_pct: mean of the steps' absolute errors.
        starts_ns: percentiles of |replayed - measured| starts of GPU work and collectives, or of CPU spans
            without any, in the replay that predictions start from; starts set by the trace are left out, and
            it is empty where the trace sets all.
        coverage: what the trace shows.
        evidence: the basis of the starts.
        overlap: slowdown of kernels during communication; None where the trace does not show it.
        reasons: questions that the trace cannot answer, one line each.
        doubts: where it fits less well than a good replay, one line each.
        answerable: whether the replay fits well enough for detectors and predictions to start from it.
        comparable: whether times of ranks as measured can be compared: nothing but the fit may be wrong.
        assumed: assumptions, one line each.
        rendezvous: collectives with missing ranks; None without any.
        figures: all figures on which predictions depend, each with its bars, worst first.
        doubt_pct: largest error of a step in % due to communication times, where these are not measured.
        taken_out: ratio of usual steps as recorded to those of the job as it runs.
        pace: from `recording_cost.find_pace`.
        cold: share of the usual recorded steps in first calls of a process; these are taken out, too.
        hosts: factor by which recording slowed hosts: likely, at least, at most; all 1 where unknown.
        host_factors: by `rank`, the `factor` by which CPU work may be shorter, and longer, than estimated;
            empty where unknown.
    """

    steps: pl.DataFrame
    ranks: pl.DataFrame
    error_pct: float
    starts_ns: Mapping[int, float]
    coverage: TraceCoverage
    evidence: Evidence
    overlap: Contention | None
    reasons: tuple[str, ...]
    doubts: tuple[str, ...]
    answerable: bool
    comparable: bool = True
    assumed: tuple[str, ...] = ()
    rendezvous: PartialCollectives | None = None
    figures: tuple[Criterion, ...] = ()
    doubt_pct: float = 0.0
    taken_out: float = 1.0
    pace: float = 1.0
    cold: float = 0.0
    hosts: tuple[float, float, float] = (1.0, 1.0, 1.0)
    host_factors: tuple[pl.DataFrame, ...] = ()

    @property
    def start_error_ns(self) -> tuple[float, float] | None:
        """Median and 95th percentile of errors of derived starts, in ns; None where no start is derived."""
        return (self.starts_ns[50], self.starts_ns[95]) if self.starts_ns else None

    @property
    def score(self) -> float:
        """Quality of predictions, from 0 to 1: the score of the worst figure."""
        return score_of(self.figures) if self.answerable else 0.0

    @property
    def grade(self) -> str:
        """The score as a word: good, fair or poor."""
        return grade_of(self.score)

    @property
    def weakest(self) -> str:
        """The figure that lowers the grade most, in words; empty where none is known."""
        return next((figure.in_words for figure in self.figures if figure.score is not None), "")

    @property
    def verdict(self) -> str:
        """How far to trust predictions, in a sentence."""
        return grade_sentence(self.score, self.figures)

    def _repr_html_(self) -> str:
        """Return the verdict, and the figures with their bars, for notebooks."""
        rows = [
            (
                figure.name,
                "not known" if figure.value is None else f"{_figure_in_words(figure.value)} {figure.unit}",
                f"{figure.good:g} {figure.unit}",
                f"{figure.poor:g} {figure.unit}",
                "" if figure.score is None else f"{figure.score:.2f}",
            )
            for figure in self.figures
        ]
        return table(self.verdict, rows, ("figure", "value", "good up to", "poor from", "score"))


def assess(built: Built, timeline: Timeline, manifest: Manifest) -> Trust:
    """Compare a replay of the unchanged graph with the trace."""
    derived = replay(built.predictive) if built.of_operations else timeline
    as_recorded = built.of_operations or built.predictive is built.graph
    as_it_runs = timeline if as_recorded else replayed(built.predictive)
    facts = facts_of(timeline, derived, has_gpu_work(built.graph))
    return judge(built, timeline, facts, manifest, as_it_runs)


def judge(
    built: Built, timeline: Timeline, facts: FitFacts, manifest: Manifest, as_it_runs: Timeline
) -> Trust:
    """Assess a replay from the observations of its ranks.

    Args:
        as_it_runs: the replay of the job without the cost of recording and without first calls.
    """
    steps = step_errors(timeline)
    error_pct = float(steps["error_pct"].abs().mean() or 0.0)  # type: ignore[arg-type]
    unexplained, nodes = share(facts.unexplained), built.graph.nodes
    late = nodes.kind == NodeKind.DELAY
    if late.any():  # not their summed time, since many wait for others meanwhile
        prompt = built.graph.with_durations(np.where(late, 0, nodes.duration))
        unexplained = share_saved(built.graph, prompt)
    evidence = evidence_of(facts.starts)
    taken = evidence.starts.anchored + evidence.starts.fitted
    starts = start_errors(facts.misses)
    # The unexplained share measures late launches, so their number does not count as well.
    doubtful = 0.0 if built.of_operations else min_share_from_trace(facts.starts)
    no_fit = _refusals(error_pct, unexplained, doubtful, steps.height)
    why_not = [*cut_in_words(manifest), *no_fit, *_no_work(built), *built.alignment.conflicts]
    missing, matching = extrapolate_missing_ranks(built, manifest), built.matching
    table = STEPS.empty() if built.graph.run is None else steps_of(built.graph.run)
    taken_out = _step_of(timeline) / _step_of(as_it_runs)
    windows = windows_to_usual(table, taken_out * built.pace)
    usual = usual_steps(step_ends(timeline.graph, timeline.start, timeline.end))
    cold, warming = cold_share(usual), warm_up(usual, built.steps_known)
    figures = figures_of(steps, starts, unexplained, doubtful, windows, _impossible(built), cold, warming)
    return Trust(
        steps=steps,
        ranks=rank_errors(timeline, facts.ranks),
        error_pct=error_pct,
        starts_ns=starts,
        coverage=TraceCoverage(
            collectives_matched=matching.share_on_all_ranks if matching.rows.height else None,
            collectives_outside_window=matching.share_outside if matching.rows.height else None,
            kernels_classified=share(facts.classified) if facts.classified[1] else None,
            time_unexplained=unexplained,
            host_gaps=share(facts.gaps),
            starts_anchored=taken,
        ),
        evidence=evidence,
        overlap=None if built.of_operations else contention_of(facts.kernels),
        reasons=(*why_not, *missing.unknown, *_not_known(built, manifest)),
        doubts=tuple(_doubts(steps, error_pct, starts, unexplained)),
        answerable=not why_not,
        comparable=steps.height > 0 and why_not == no_fit,
        assumed=(*missing.assumed, *_assumed(built, unexplained)),
        rendezvous=missing.rendezvous,
        figures=figures,
        taken_out=taken_out,
        pace=built.pace,
        cold=cold,
        hosts=(1.0, 1.0, 1.0) if built.recording is None else built.recording.slowed,
        host_factors=() if built.recording is None else built.recording.host_factors,
    )


def _step_of(timeline: Timeline) -> float:
    """Return the mean usual step of a replay, in ns; at least 1."""
    lengths = step_lengths(usual_steps(step_ends(timeline.graph, timeline.start, timeline.end)))
    return max(float(lengths.mean()), 1.0) if lengths.size else 1.0


def taken_out_in_words(trust: Trust) -> str:
    """Word what was taken out of the recorded job; empty where that is little."""
    likely, least, most = trust.hosts
    without_cold = trust.taken_out * trust.pace * (1 - trust.cold)
    parts = []
    if max(likely, most) >= NOTABLE:
        step = f" and steps x{without_cold:.2f}" if without_cold >= NOTABLE else ""
        parts.append(f"recording slowed hosts x{likely:.2f} ({least:.2f} to {most:.2f}){step}")
    if trust.cold >= NOTABLE - 1:
        parts.append(f"first calls of a process make up {trust.cold:.0%} of the recorded steps")
    both = "that" if len(parts) == 1 else "both"
    return f"{'; '.join(parts)}; figures are corrected for {both}" if parts else ""


def _assumed(built: Built, unexplained: float) -> tuple[str, ...]:
    late = built.graph.nodes.kind == NodeKind.DELAY
    if not late.any():
        return built.assumed
    launches = (
        f"launches were not recorded: {unexplained:.1%} of step time is delay between operations and "
        "their dependencies; predictions assume the usual delay of each kind"
    )
    return (launches, *built.assumed)


def cut_in_words(manifest: Manifest) -> list[str]:
    """Return a line if traces are cut short; empty if none is."""
    if not manifest.num_cut:
        return []
    traces = "1 trace is" if manifest.num_cut == 1 else f"{manifest.num_cut} traces are"
    return [f"{traces} cut short: missing parts, often GPU work, would count as idle; copy or record again"]


def _no_work(built: Built) -> list[str]:
    """Return a line if the work that takes the time was not recorded; empty if it was."""
    nodes = built.graph.nodes
    if not nodes.kind.size or is_one_of(nodes.kind, (NodeKind.TRANSFER, *GPU_KINDS)).any():
        return []
    if not is_one_of(nodes.kind, (NodeKind.CPU, NodeKind.RUNTIME)).any():
        return ["neither operators nor GPU work was recorded"]
    launches = [code for code, name in enumerate(built.graph.names) if "launch" in name.lower()]
    launched = (nodes.kind == NodeKind.RUNTIME) & np.isin(nodes.name, launches)
    return ["hosts launch GPU work, but none was recorded"] if launched.any() else []


def _refusals(error_pct: float, unexplained: float, anchored: float, steps: int) -> list[str]:
    """Return the reasons that forbid predictions from the replay, one line each."""
    reasons = []
    if steps == 0:
        reasons.append("no whole step in the trace: record at least two steps")
    if error_pct > WORST_STEP_ERROR_PCT:
        reasons.append(f"replayed steps are off by {error_pct:.1f}%, too much to predict from this trace")
    if unexplained > WORST_UNEXPLAINED:
        reasons.append(
            f"the trace does not explain {unexplained:.1%} of the time before GPU work and collectives"
        )
    if anchored > WORST_ANCHORED:
        reasons.append(
            f"at least {anchored:.0%} of the starts of GPU work and collectives were taken from the trace, "
            "which does not show their dependencies, so a small error proves nothing"
        )
    return reasons


def _doubts(
    steps: pl.DataFrame, error_pct: float, starts: Mapping[int, float], unexplained: float
) -> list[str]:
    """Return where the replay fits less well than a good one, so that predictions are less sharp."""
    doubts = []
    if GOOD_STEP_ERROR_PCT < error_pct <= WORST_STEP_ERROR_PCT:
        doubts.append(f"replayed steps are off by {error_pct:.1f}%: smaller gains may be replay errors")
    step_ns = float(steps["measured_ns"].mean() or 0.0)  # type: ignore[arg-type]
    for percent, good, which in ((50, GOOD_START_MEDIAN, "half"), (95, GOOD_START_P95, "one in twenty")):
        if starts.get(percent, 0.0) > good * step_ns > 0:
            doubts.append(
                f"{which} of the starts are off by {format_duration(starts[percent])} or more, "
                f"{starts[percent] / step_ns:.1%} of a step: step times are more reliable than their "
                "breakdown"
            )
    if GOOD_UNEXPLAINED < unexplained <= WORST_UNEXPLAINED:
        doubts.append(
            f"the trace does not explain {unexplained:.1%} of the time before GPU work and collectives"
        )
    return doubts


def _impossible(built: Built) -> float:
    """Return the share of spans left out, or moved with their device, because of impossible times."""
    run = built.graph.run
    gone = 0 if run is None else run.manifest.num_impossible
    return gone / (gone + run.num_rows(SPANS)) if run and gone else 0.0


def _not_known(built: Built, manifest: Manifest) -> list[str]:
    """Return open questions of the trace that do not forbid predictions, one line each."""
    reasons = [*built.unknown, *without_spans(built.graph, manifest)]
    if gone := manifest.num_impossible:
        reasons.append(
            f"spans with impossible times, left out or moved: {gone}; gaps count as idle time, and "
            "other times may also be wrong"
        )
    if not built.steps_known:
        reasons.append("no steps are recorded: each window counts as one step; mark steps in the profiler")
    if len(manifest.ranks) > 1 and not built.of_operations and not (built.matching.rows["members"] > 1).any():
        reasons.append(UNMATCHED)
    reasons += [
        f"collectives not matched ({line}): their waiting counts as communication"
        for line in built.matching.refused
    ]
    uncertainty = {place: clock.line.uncertainty_ns for place, clock in built.alignment.clocks.items()}
    unsure = {rank for (rank, _), ns in uncertainty.items() if ns > NS_PER_MS}
    if unsure:
        worst = ms(max(uncertainty.values()))
        reasons.append(f"clocks of {ranks_in_words(unsure)} are known only to {worst:.1f} ms")
    unknown = {rank for (rank, _), ns in uncertainty.items() if ns < 0}
    if unknown and (built.matching.rows["members"] > 1).any():
        reasons.append(f"clock offsets of {ranks_in_words(unknown)} are unknown")
    return reasons


def without_spans(graph: Graph, manifest: Manifest) -> list[str]:
    """Return a line if recorded ranks have no node in their graph; empty if all have."""
    ranks = {*manifest.ranks} - {*graph.ranks}
    return [f"no spans of {ranks_in_words(ranks)}: left out of the replay"] if ranks else []


class TrustDocument(DocumentPart, frozen=True):
    """How far predictions from this run can be trusted.

    Attributes:
        grade: good, fair or poor.
        score: 0 to 1, the score of the worst figure.
        verdict: all of this in a sentence.
        figures: figures that it is measured by, worst first.
    """

    grade: str
    score: float
    verdict: str
    figures: list[Criterion]


def trust_document(trust: Trust) -> TrustDocument:
    """Return the trust in a replay as a document."""
    return TrustDocument(trust.grade, trust.score, trust.verdict, list(trust.figures))


# Observations of ranks about how well their replay fits, as sums that add up over ranks.


@dataclass(frozen=True)
class FitFacts:
    """Observations of ranks about how well their replay fits.

    Attributes:
        ranks: rows of `rank_start_errors`.
        misses: rows of `counted`.
        starts: the basis of starts.
        unexplained: ns in which work could have started by all edges, but had not; and ns of the windows.
        gaps: ns of CPU time that no span explains, and of all CPU time.
        classified: ns of GPU work in kernels of a known class, and of all GPU work.
        kernels: rows of `dpro.replay.fidelity.overlap.kernels_beside`.
    """

    ranks: pl.DataFrame
    misses: pl.DataFrame
    starts: StartCounts
    unexplained: Ints
    gaps: Ints
    classified: Ints
    kernels: pl.DataFrame


def facts_of(timeline: Timeline, derived: Timeline, on_gpu: bool) -> FitFacts:
    """Return the observations of the ranks of a graph.

    Args:
        derived: the replay whose starts are judged.
        on_gpu: whether any rank of the run has work on a GPU.
    """
    graph, misses = timeline.graph, judged_starts(derived, on_gpu)
    duration, kind = graph.nodes.duration, graph.nodes.kind
    cpu = kind <= NodeKind.GAP
    return FitFacts(
        ranks=rank_start_errors(misses),
        misses=counted(misses),
        starts=count_starts(timeline),
        unexplained=unexplained_ns(graph),
        gaps=np.array([duration[kind == NodeKind.GAP].sum(), duration[cpu].sum()], np.int64),
        classified=_classified_ns(graph),
        kernels=kernels_beside(graph),
    )


def add_facts(facts: Sequence[FitFacts]) -> FitFacts:
    """Add up the observations of several groups of ranks."""
    misses = pl.concat([part.misses for part in facts])
    by = "window", "step", "miss_ns"
    misses = misses.group_by(by).agg(pl.col("count").sum()).sort(by)  # sorted for reproducible files
    return FitFacts(
        ranks=pl.concat([part.ranks for part in facts]),
        misses=misses,
        starts=StartCounts(*(sum(column) for column in zip(*(part.starts for part in facts)))),
        unexplained=np.sum([part.unexplained for part in facts], axis=0),
        gaps=np.sum([part.gaps for part in facts], axis=0),
        classified=np.sum([part.classified for part in facts], axis=0),
        kernels=pl.concat([part.kernels for part in facts]),
    )


def share(parts: Ints) -> float:
    """Return the first of two sums as a share of the second; 0 if that is 0.

    Args:
        parts: [2] ns.
    """
    return float(parts[0]) / float(parts[1]) if parts[1] else 0.0


def unexplained_ns(graph: Graph) -> Ints:
    """Return [2] ns in which work could have started by all edges, but had not; and of the windows."""
    nodes, edges = graph.nodes, graph.edges
    started, ready = is_started(graph), nodes.earliest.copy()
    to_work = np.flatnonzero(started[edges.target])
    ended = nodes.measured_end[edges.source[to_work]] + edges.lag[to_work]
    np.maximum.at(ready, edges.target[to_work], ended)
    lag = np.maximum(nodes.measured_start - ready, 0)[started]
    extents = extents_of(graph, ["rank", "window"], nodes.measured_start, nodes.measured_end)
    return np.array([lag.sum(), (extents["end"] - extents["start"]).sum()], np.int64)


def _classified_ns(graph: Graph) -> Ints:
    nodes = graph.nodes
    gpu = np.isin(nodes.kind, (NodeKind.KERNEL, NodeKind.TRANSFER)) & (nodes.duration > 0)
    gpu &= np.isin(nodes.lane, [i for i, (_, what) in enumerate(graph.lanes) if what.startswith("stream")])
    is_classified = np.zeros(len(graph.names), np.bool_)
    for name in np.unique(nodes.name[gpu]).tolist():
        is_classified[name] = classify(graph.names[name]).kind != "other"
    return np.array(
        [nodes.duration[gpu & is_classified[nodes.name]].sum(), nodes.duration[gpu].sum()], np.int64
    )


# Distance of a replay from the trace: by step, by rank, and by single starts.

PERCENTILES = (50, 75, 95, 99, 100)


def step_errors(timeline: Timeline) -> pl.DataFrame:
    """Return `window`, `step`, `measured_ns`, `replayed_ns`, `error_pct` of each step that takes time."""
    graph = timeline.graph
    return _compared(
        measured_step_times(graph), step_times(graph, timeline.start, timeline.end), ["window", "step"]
    )


def rank_errors(timeline: Timeline, starts: pl.DataFrame) -> pl.DataFrame:
    """Return how well each rank fits.

    Args:
        starts: rows of `rank_start_errors`.

    Returns:
        `rank`, `error_pct` (mean of the absolute errors of its own steps; null without any), and `p50`,
        `p95`: percentiles of the errors of its starts, ns.
    """
    graph, nodes = timeline.graph, timeline.graph.nodes
    measured = rank_step_times(graph, nodes.measured_start, nodes.measured_end)
    replayed = rank_step_times(graph, timeline.start, timeline.end)
    steps = _compared(measured, replayed, ["rank", "window", "step"])
    of_steps = steps.group_by("rank").agg(pl.col("error_pct").abs().mean())
    ranks = pl.DataFrame({"rank": np.unique(nodes.rank[nodes.rank >= 0])})
    return ranks.join(of_steps, on="rank", how="left").join(starts, on="rank", how="left").sort("rank")


def rank_start_errors(misses: pl.DataFrame) -> pl.DataFrame:
    """Return `rank`, `p50`, `p95`: percentiles of the errors of its starts, in ns, for ranks that have any.

    Args:
        misses: rows of `judged_starts`.
    """
    return misses.group_by("rank").agg(
        p50=pl.col("miss_ns").quantile(0.5, "linear"), p95=pl.col("miss_ns").quantile(0.95, "linear")
    )


def judged_starts(timeline: Timeline, on_gpu: bool) -> pl.DataFrame:
    """Return `rank`, `window`, `step` and `miss_ns` = |replayed - measured| of the starts that are judged.

    Args:
        on_gpu: whether any rank of the run has work on a GPU.
    """
    nodes, counted = timeline.graph.nodes, counted_starts(timeline, on_gpu)
    columns = {name: getattr(nodes, name)[counted] for name in ("rank", "window", "step")}
    return pl.DataFrame(columns | {"miss_ns": start_misses(timeline)[counted]})


def counted(misses: pl.DataFrame) -> pl.DataFrame:
    """Return `window`, `step`, `miss_ns` and `count`: the number of starts, on any rank, with that error.

    Args:
        misses: rows of `judged_starts`.
    """
    return misses.group_by("window", "step", "miss_ns").agg(count=pl.len().cast(pl.Int64))


def start_errors(misses: pl.DataFrame) -> dict[int, float]:
    """Return percentiles of errors of starts, in ns, by percent; empty without any.

    They are interpolated as by `numpy.percentile`.

    Args:
        misses: rows of `counted`.
    """
    if misses.is_empty():
        return {}
    ordered = misses.group_by("miss_ns").agg(pl.col("count").sum()).sort("miss_ns")
    miss, before = ordered["miss_ns"].to_numpy(), ordered["count"].cum_sum().to_numpy()
    places = (before[-1] - 1) * (np.array(PERCENTILES) / 100)
    ends = np.floor(places), np.ceil(places)
    low, high = (miss[np.searchsorted(before, place, side="right")] for place in ends)
    over = places - ends[0]
    between = np.where(over < 0.5, low + (high - low) * over, high - (high - low) * (1 - over))
    return dict(zip(PERCENTILES, between.tolist()))


def start_misses(timeline: Timeline) -> Ints:
    """Return [N] |replayed - measured| starts, in ns.

    Where launches were not recorded and usual delays replace them, both starts are relative to the beginning
    of their step: otherwise the errors of delays in one step would count again in all later steps.
    """
    graph, nodes = timeline.graph, timeline.graph.nodes
    missed = timeline.start - nodes.measured_start
    if (nodes.kind == NodeKind.DELAY).any():
        missed = missed - _begin_of_step(graph, timeline.start, timeline.end)
        missed = missed + _begin_of_step(graph, nodes.measured_start, nodes.measured_end)
    distance: Ints = np.abs(missed)
    return distance


def _begin_of_step(graph: Graph, start: Ints, end: Ints) -> Ints:
    """Return [N] ns when the step of each node begins; 0 outside steps."""
    previous = pl.col("finish_ns").shift(1).over("window").fill_null(pl.col("begin_ns"))
    begins = step_ends(graph, start, end).select("window", "step", begin=previous)
    places = pl.DataFrame({"window": graph.nodes.window, "step": graph.nodes.step})
    of_node = places.join(begins, on=["window", "step"], how="left", maintain_order="left")
    begin: Ints = of_node["begin"].fill_null(0).to_numpy()
    return begin


def counted_starts(timeline: Timeline, on_gpu: bool) -> Bools:
    """Return [N] which starts are judged: of GPU work and collectives, or of all spans without GPU work.

    Starts set by the trace are left out: they are right by construction.

    Args:
        on_gpu: whether any rank of the run has work on a GPU.
    """
    nodes = timeline.graph.nodes
    chosen = is_started(timeline.graph)
    if not on_gpu:
        chosen |= nodes.span >= 0
    return chosen & ~taken_from_trace(timeline.graph)


def has_gpu_work(graph: Graph) -> bool:
    """Return whether any node is work on a GPU."""
    return bool(np.isin(graph.nodes.kind, GPU_KINDS).any())


def _compared(measured: pl.DataFrame, replayed: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    steps = measured.rename({"duration_ns": "measured_ns"}).join(replayed, on=keys)
    steps = steps.rename({"duration_ns": "replayed_ns"}).filter(pl.col("measured_ns") > 0)
    error = (pl.col("replayed_ns") / pl.col("measured_ns") - 1) * 100
    return steps.with_columns(error_pct=error).sort(keys)
