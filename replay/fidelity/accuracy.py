"""How far to trust a replay: its errors against the trace, and what the trace leaves open.

In: a graph with its matching, and its timeline. Out: numbers and a plain verdict. A small error of the step
time proves little by itself (wrong parts can add up right), so the errors of single starts, the time that
nothing explains, and the starts that were taken from the trace are counted too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.documents import DocumentPart
from dpro.markup import table
from dpro.replay.construction.graph_builder import Built
from dpro.replay.fidelity.evidence import Evidence, in_shares
from dpro.replay.fidelity.facts import FitFacts, facts_of, share
from dpro.replay.fidelity.fit import has_gpu_work, rank_errors, start_errors, step_errors
from dpro.replay.fidelity.grade import Criterion, figures_of, grade_of, in_words, score_of, windows_to_usual
from dpro.replay.fidelity.missing_ranks import RendezvousRegistry, extrapolate_missing_ranks
from dpro.replay.fidelity.overlap import Contention, contention_of
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.steps.durations import steps_of
from dpro.replay.timeline import Timeline, measured_step_times, replay, step_times
from dpro.schema import STEPS
from dpro.store import Manifest
from dpro.units import NS_PER_MS, format_duration, ms

# Beyond these a replay does not describe the job well enough to predict from.
WORST_STEP_ERROR_PCT = 5.0
WORST_UNEXPLAINED = 0.10
WORST_ANCHORED = 0.20
# What a good replay keeps to; where one does not, the verdict says so. Starts in shares of a step.
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
    """What is known about how well a replay fits.

    Attributes:
        steps: `window`, `step`, `measured_ns`, `replayed_ns`, `error_pct`.
        ranks: `rank`, `error_pct`, `p50`, `p95` (ns), as of `dpro.replay.fidelity.fit.rank_errors`.
        error_pct: mean of the steps' absolute errors.
        starts_ns: percentiles of |replayed - measured| starts of GPU work and collectives, or of CPU
            spans where there are none, in the replay of the graph that is predicted from; those that the
            trace sets are left out, and it is empty where it sets all.
        coverage: what the trace shows.
        evidence: what the starts rest on.
        overlap: how kernels slow down during communication; None where the trace does not show it.
        reasons: what the trace cannot answer, one line each.
        doubts: where it fits less well than a good replay, one line each.
        answerable: whether the replay fits well enough for detectors, and predictions, to start from it.
        assumed: what was taken for granted, one line each.
        rendezvous: collectives with ranks that are missing; None where there are none.
        figures: all that predictions stand or fall with, each with its bars, worst first.
        doubt_pct: by how much a step may be off for what communication takes, where that is no measurement.
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
    assumed: tuple[str, ...] = ()
    rendezvous: RendezvousRegistry | None = None
    figures: tuple[Criterion, ...] = ()
    doubt_pct: float = 0.0

    @property
    def start_error_ns(self) -> tuple[float, float] | None:
        """Median and 95th percentile of the errors of derived starts; None where no start is derived."""
        return (self.starts_ns[50], self.starts_ns[95]) if self.starts_ns else None

    @property
    def score(self) -> float:
        """How good predictions are, from 0 to 1: what the worst figure scores."""
        return score_of(self.figures) if self.answerable else 0.0

    @property
    def grade(self) -> str:
        """The score in a word: good, fair or poor."""
        return grade_of(self.score)

    @property
    def verdict(self) -> str:
        """How far to trust predictions, in a sentence."""
        return in_words(self.score, self.figures)

    def _repr_html_(self) -> str:
        """The verdict, and the figures with their bars, for notebooks."""
        rows = [
            (
                figure.name,
                "not known" if figure.value is None else f"{figure.value:.3g} {figure.unit}",
                f"{figure.good:g} {figure.unit}",
                f"{figure.poor:g} {figure.unit}",
                "" if figure.score is None else f"{figure.score:.2f}",
            )
            for figure in self.figures
        ]
        return table(self.verdict, rows, ("figure", "value", "good up to", "poor from", "score"))


def assess(built: Built, timeline: Timeline, manifest: Manifest) -> Trust:
    """Compare a replay of the unchanged graph with the trace.

    Args:
        manifest: the run's.
    """
    derived = replay(built.predictive) if built.of_operations else timeline
    return judge(built, timeline, facts_of(timeline, derived, has_gpu_work(built.graph)), manifest)


def judge(built: Built, timeline: Timeline, facts: FitFacts, manifest: Manifest) -> Trust:
    """How far to trust a replay, by what its ranks show.

    Args:
        manifest: the run's.
    """
    steps = step_errors(timeline)
    error_pct = float(steps["error_pct"].abs().mean() or 0.0)  # type: ignore[arg-type]
    late = (built.graph.nodes.kind == NodeKind.DELAY).any()
    unexplained = _share_of_delays(built.graph) if late else share(facts.unexplained)
    evidence = in_shares(facts.starts)
    taken = evidence.starts.anchored + evidence.starts.fitted
    starts = start_errors(facts.misses)
    # What late launches cost is the unexplained share: their number is no harm.
    doubtful = 0.0 if built.of_operations else taken
    why_not = [*_why_not(error_pct, unexplained, doubtful, steps.height), *built.alignment.conflicts]
    missing, matching = extrapolate_missing_ranks(built, manifest), built.matching
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
        assumed=(*missing.assumed, *_assumed(built, unexplained)),
        rendezvous=missing.rendezvous,
        figures=figures_of(steps, starts, unexplained, doubtful, windows_to_usual(_steps_of(built))),
    )


def _steps_of(built: Built) -> pl.DataFrame:
    return STEPS.empty() if built.graph.run is None else steps_of(built.graph.run)


def _assumed(built: Built, unexplained: float) -> tuple[str, ...]:
    late = built.graph.nodes.kind == NodeKind.DELAY
    if not late.any():
        return built.assumed
    launches = (
        "launches were not recorded: that operations begin later than all they depend on makes up "
        f"{unexplained:.1%} of the steps; predictions take the usual delay of each kind"
    )
    return (launches, *built.assumed)


def _share_of_delays(graph: Graph) -> float:
    """What the steps would save without what nothing explains, where that is nodes of its own.

    Many wait for others meanwhile: their time is no measure of it.
    """
    nodes = graph.nodes
    prompt = replay(graph.with_durations(np.where(nodes.kind == NodeKind.DELAY, 0, nodes.duration)))
    measured = float(measured_step_times(graph)["duration_ns"].sum())
    left = float(step_times(graph, prompt.start, prompt.end)["duration_ns"].sum())
    return 1 - left / measured if measured else 0.0


def _why_not(error_pct: float, unexplained: float, anchored: float, steps: int) -> list[str]:
    """What forbids predictions from the replay, one line each."""
    reasons = []
    if steps == 0:
        reasons.append("no whole step in the trace: record at least two steps")
    if error_pct > WORST_STEP_ERROR_PCT:
        reasons.append(f"the replayed steps are off by {error_pct:.1f}%: do not predict from this trace")
    if unexplained > WORST_UNEXPLAINED:
        reasons.append(
            f"nothing in the trace explains {unexplained:.1%} of the time before GPU work and collectives"
        )
    if anchored > WORST_ANCHORED:
        reasons.append(
            f"{anchored:.0%} of the starts of GPU work and collectives were taken from the trace, which does "
            "not say what they depend on: a small error proves nothing"
        )
    return reasons


def _doubts(
    steps: pl.DataFrame, error_pct: float, starts: Mapping[int, float], unexplained: float
) -> list[str]:
    """Where the replay fits less well than a good one, and predictions are accordingly less sharp."""
    doubts = []
    if GOOD_STEP_ERROR_PCT < error_pct <= WORST_STEP_ERROR_PCT:
        doubts.append(f"the replayed steps are off by {error_pct:.1f}%: smaller gains may be error")
    step_ns = float(steps["measured_ns"].mean() or 0.0)  # type: ignore[arg-type]
    for percent, good, which in ((50, GOOD_START_MEDIAN, "half"), (95, GOOD_START_P95, "one in twenty")):
        if starts.get(percent, 0.0) > good * step_ns > 0:
            doubts.append(
                f"{which} of the starts are off by {format_duration(starts[percent])} or more, "
                f"{starts[percent] / step_ns:.1%} of a step: where in a step time goes is known less well "
                "than how long it takes"
            )
    if GOOD_UNEXPLAINED < unexplained <= WORST_UNEXPLAINED:
        doubts.append(
            f"nothing in the trace explains {unexplained:.1%} of the time before GPU work and collectives"
        )
    return doubts


def _not_known(built: Built, manifest: Manifest) -> list[str]:
    """What the trace leaves open without forbidding predictions, one line each."""
    reasons = list(built.unknown)
    silent = sorted(set(manifest.ranks) - {int(rank) for rank in np.unique(built.graph.nodes.rank)})
    if silent:
        reasons.append(f"no spans of ranks {', '.join(map(str, silent))}: they are left out")
    if not built.steps_known:
        reasons.append("no steps are known: each window is taken as one step; mark steps in the profiler")
    if len(manifest.ranks) > 1 and not built.of_operations and not (built.matching.rows["members"] > 1).any():
        reasons.append("no collective is known on two ranks: which rank waits for which is unknown")
    reasons += [
        f"collectives not matched ({line}): their waiting counts as communication"
        for line in built.matching.refused
    ]
    return reasons + _clocks_not_known(built)


def _clocks_not_known(built: Built) -> list[str]:
    uncertainty = {place: clock.line.uncertainty_ns for place, clock in built.alignment.clocks.items()}
    reasons = []
    unsure = {rank for (rank, _), ns in uncertainty.items() if ns > NS_PER_MS}
    if unsure:
        worst = ms(max(uncertainty.values()))
        reasons.append(f"the clocks of {len(unsure)} ranks are known only to {worst:.1f} ms")
    unknown = {rank for (rank, _), ns in uncertainty.items() if ns < 0}
    if unknown and (built.matching.rows["members"] > 1).any():
        reasons.append(f"how far the clocks of {len(unknown)} ranks are off is unknown")
    return reasons


class TrustDocument(DocumentPart, frozen=True):
    """How far predictions from this run can be believed.

    Attributes:
        grade: good, fair or poor.
        score: 0 to 1, what the worst figure scores.
        verdict: all of this in a sentence.
        figures: what it is measured by, worst first.
    """

    grade: str
    score: float
    verdict: str
    figures: list[Criterion]


def trust_document(trust: Trust) -> TrustDocument:
    """How far to believe what follows from a replay, for programs."""
    return TrustDocument(trust.grade, trust.score, trust.verdict, list(trust.figures))
