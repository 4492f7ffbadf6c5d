"""The answer of `dpro replay`: how well the graph explains the measurements, and what decides the step time.

Takes an `Analysis`, and the steps to report; returns a `ReplayDocument`.
"""

from __future__ import annotations

import polars as pl

from dpro.account import AccountedDocument
from dpro.analysis.analysis import Analysis
from dpro.analysis.end import JobEnd
from dpro.analysis.step_time import StepTimeDocument, step_time_document
from dpro.documents import DocumentPart
from dpro.errors import UsageError
from dpro.replay.fidelity.accuracy import (
    PERCENTILES,
    Evidence,
    TraceCoverage,
    TrustDocument,
    counted,
    has_gpu_work,
    judged_starts,
    start_errors,
    trust_document,
)
from dpro.replay.fidelity.by_rank import path_of_run
from dpro.replay.fidelity.overlap import Contention
from dpro.replay.pretended import PretendedStep
from dpro.replay.timeline import critical_path, critical_path_of_steps
from dpro.selection import Ranges, Selection
from dpro.units import ms, us

MAX_NAMED = 20  # steps that an error message lists


class StepFit(DocumentPart, frozen=True):
    """A step, measured and replayed.

    Attributes:
        step: number of the step.
        window: its deep window.
        measured_ms: measured duration.
        replayed_ms: replayed duration.
        error_pct: deviation of the replayed from the measured duration.
    """

    step: int
    window: int
    measured_ms: float
    replayed_ms: float
    error_pct: float


class RankStarts(DocumentPart, frozen=True):
    """Errors of the derived starts of one rank.

    Attributes:
        p50: median, us; null if no start is derived.
        p95: 95th percentile, us; null if no start is derived.
    """

    p50: float | None
    p95: float | None


class RankFit(DocumentPart, frozen=True):
    """A rank, measured and replayed.

    Attributes:
        rank: the rank.
        error_pct: mean absolute error of its steps; null if it has none.
        span_start_error_us: errors of its derived starts.
    """

    rank: int
    error_pct: float | None
    span_start_error_us: RankStarts


class LinkCostDocument(DocumentPart, frozen=True):
    """Fitted cost of one communication operation in one process group.

    Attributes:
        op: the operation.
        group: the process group.
        latency_us: time independent of the bytes; null if sizes vary too little, or its error is as large.
        latency_error_us: half of the 95% interval of `latency_us`.
        gbps: payload per time, 1e9 bytes per second; null if bytes cost nothing, or its error is as large.
        gbps_error: half of the 95% interval of `gbps`.
        transfers: number of transfers in the fit.
        misfit: median deviation of a transfer from the fit, as a share of its time.
    """

    op: str
    group: str
    latency_us: float | None
    latency_error_us: float
    gbps: float | None
    gbps_error: float | None
    transfers: int
    misfit: float


class ClockOffset(DocumentPart, frozen=True):
    """A rank's clock in its first window.

    Attributes:
        rank: the rank.
        offset_ns: its lead over the reference clock.
        uncertainty_ns: uncertainty of the offset; -1 unknown.
        source: what the offset was inferred from.
    """

    rank: int
    offset_ns: int
    uncertainty_ns: int
    source: str


class HostClock(DocumentPart, frozen=True):
    """One clock against the reference clock, in one window.

    Attributes:
        clock: name of the clock.
        window: the deep window.
        ranks: ranks that use the clock.
        reference_ns: a time on this clock, at which the offset holds.
        offset_ns: lead of this clock over the reference at that time.
        drift_ppm: growth of the lead, us per second.
        uncertainty_ns: uncertainty of the offset; -1 unknown.
        source: what the offset was inferred from.
    """

    clock: str
    window: int
    ranks: list[int]
    reference_ns: int
    offset_ns: int
    drift_ppm: float
    uncertainty_ns: int
    source: str


class PathPart(DocumentPart, frozen=True):
    """Work on the critical path, the longest first.

    Attributes:
        rank: rank of the work.
        name: name of the work.
        kind: kind of node.
        ms: its time on the path.
    """

    rank: int
    name: str
    kind: str
    ms: float


class ReplayDocument(AccountedDocument, frozen=True, kw_only=True):
    """How well the graph explains the measurements, and what decides the step time.

    Attributes:
        run: the run, as the user named it.
        step_time: time of a step; null if no step was timed.
        steps: measured and replayed steps in deep windows.
        ranks: measured against replayed, by rank.
        error_pct: mean absolute error of the steps.
        span_start_error_us: percentiles of the errors of derived starts, us; null if none is derived.
        coverage: shares of the work that the trace covers.
        evidence: the data that the replay rests on.
        overlap_slowdown: slowdown of kernels beside communication; null if the trace does not show it.
        communication: fitted costs of communication.
        clock_offsets: clock of each rank in its first window.
        clocks: each clock against the reference, by window.
        critical_path: the work that decides the step time.
        answerable: whether detectors and predictions may start from this replay.
        trust: how far to trust predictions.
        reasons: what the trace cannot answer, and where the replay fits less well.
        assumed: assumptions behind the graph.
        end: how the job ended.
        pretended: step of the job whose ranks were pretended; null if they were not.
    """

    run: str
    step_time: StepTimeDocument | None
    steps: list[StepFit]
    ranks: list[RankFit]
    error_pct: float
    span_start_error_us: dict[str, float | None]
    coverage: TraceCoverage
    evidence: Evidence
    overlap_slowdown: Contention | None
    communication: list[LinkCostDocument]
    clock_offsets: list[ClockOffset]
    clocks: list[HostClock]
    critical_path: list[PathPart]
    answerable: bool
    trust: TrustDocument
    reasons: list[str]
    assumed: list[str]
    end: JobEnd
    pretended: PretendedStep | None = None


def chosen_steps(
    analysis: Analysis, step: int | None, window: int | None, ranges: Ranges = ()
) -> pl.DataFrame | None:
    """Return the requested steps as rows of `Trust.steps`; None for all.

    Args:
        step: number of a step; None for any.
        window: number of a deep window; None for any.
        ranges: numbers of steps; empty for any.

    Raises:
        UsageError: no step matches.
    """
    if step is None and window is None and not ranges:
        return None
    steps = analysis.trust.steps
    asked = {key: value for key, value in (("step", step), ("window", window)) if value is not None}
    chosen = Selection(ranges).keep(steps.filter(pl.lit(True), **asked))
    if chosen.is_empty():
        rows = steps.select("window", "step").rows()[:MAX_NAMED]
        recorded = ", ".join(f"{number} (window {window_of_step})" for window_of_step, number in rows)
        raise UsageError(f"no such step was recorded in depth; there are {recorded or 'none'}")
    return chosen


def replay_document(analysis: Analysis, chosen: pl.DataFrame | None = None) -> ReplayDocument:
    """Return how well the replay fits, and what decides the step time.

    Args:
        chosen: steps to report, from `chosen_steps`; None for all.
    """
    trust = analysis.trust
    steps = trust.steps if chosen is None else chosen
    # Percentiles of the errors of derived starts of the chosen steps; None if none is derived.
    errors = analysis.trust.starts_ns
    if chosen is not None:
        errors = start_errors(start_misses(analysis).join(chosen, on=["window", "step"], how="semi"))
    alignment = analysis.outline.alignment
    first_clocks = {rank: alignment.of(rank) for rank in sorted({rank for rank, _ in alignment.clocks})}
    return ReplayDocument(
        run=analysis.run.label,
        step_time=step_time_document(analysis.steps),
        steps=[
            StepFit(
                row["step"],
                row["window"],
                ms(row["measured_ns"]),
                ms(row["replayed_ns"]),
                row["error_pct"],
            )
            for row in steps.iter_rows(named=True)
        ],
        ranks=[
            RankFit(row["rank"], row["error_pct"], RankStarts(*(_us_or_none(row[p]) for p in ("p50", "p95"))))
            for row in trust.ranks.iter_rows(named=True)
        ],
        error_pct=float(steps["error_pct"].abs().mean() or 0.0),  # type: ignore[arg-type]
        span_start_error_us={
            "max" if percent == 100 else f"p{percent}": _us_or_none(errors.get(percent))
            for percent in PERCENTILES
        },
        coverage=trust.coverage,
        evidence=trust.evidence,
        overlap_slowdown=trust.overlap,
        communication=_communication(analysis),
        clock_offsets=[
            ClockOffset(rank, clock.line.offset_ns, clock.line.uncertainty_ns, clock.source)
            for rank, clock in first_clocks.items()
        ],
        clocks=_clocks(analysis),
        critical_path=[
            PathPart(row["rank"], row["name"], row["kind"], ms(row["duration_ns"]))
            for row in critical_work(analysis, chosen).iter_rows(named=True)
        ],
        answerable=trust.answerable,
        trust=trust_document(trust),
        reasons=[*trust.reasons, *trust.doubts],
        assumed=list(trust.assumed),
        end=analysis.end,
        pretended=analysis.pretended,
    )


def _us_or_none(ns: float | None) -> float | None:
    return None if ns is None else us(ns)


def _communication(analysis: Analysis) -> list[LinkCostDocument]:
    return [
        LinkCostDocument(
            op=op,
            group=group,
            latency_us=_us_or_none(cost.clear_latency_ns),
            latency_error_us=us(cost.latency_error_ns),
            gbps=cost.clear_gbps,
            gbps_error=cost.gbps_error,
            transfers=cost.num_samples,
            misfit=cost.misfit,
        )
        for (op, group), cost in analysis.costs.items()
    ]


def _clocks(analysis: Analysis) -> list[HostClock]:
    """Return each clock against the reference, sorted by window."""
    clocks: dict[tuple[int, str], HostClock] = {}
    for (rank, window), clock in sorted(
        analysis.outline.alignment.clocks.items(), key=lambda item: item[0][::-1]
    ):
        line = clock.line
        fitted = HostClock(
            clock=clock.name,
            window=window,
            ranks=[],
            reference_ns=line.reference_ns,
            offset_ns=line.offset_ns,
            drift_ppm=line.drift_ppb / 1000,
            uncertainty_ns=line.uncertainty_ns,
            source=clock.source,
        )
        clocks.setdefault((window, clock.name), fitted).ranks.append(rank)
    return list(clocks.values())


# Replay results on nodes inside ranks, for whole graphs and condensed ranks.


def start_misses(analysis: Analysis) -> pl.DataFrame:
    """Return the errors of the starts that count, with columns of `dpro.replay.fidelity.accuracy.counted`."""
    if analysis.condensed is not None:
        return analysis.condensed.misses
    built = analysis.built
    timeline = analysis.timeline if built.of_operations else analysis.replayed
    return counted(judged_starts(timeline, has_gpu_work(built.graph)))


def critical_work(analysis: Analysis, steps: pl.DataFrame | None = None) -> pl.DataFrame:
    """Return the work on the critical path, with columns of `dpro.replay.timeline.critical_path`.

    Args:
        steps: `window` and `step` of the steps to explain; None for whole windows.
    """
    timeline, condensed = analysis.outline_timeline, analysis.condensed
    path_to = None if condensed is None else path_of_run(analysis.run, condensed, timeline)
    if steps is None:
        return critical_path(timeline, path_to)
    return critical_path_of_steps(timeline, steps, path_to=path_to)
