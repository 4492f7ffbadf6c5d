"""What a job would get done, and what changes to its recovery would give, as a document.

In: the life of a job, how often it fails, and changes. Out: `OutlookDocument`. Without changes, those are
tried for which the recording of the job is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

import numpy as np

from dpro.analysis.analysis import Analysis
from dpro.arrays import Floats
from dpro.documents import DocumentPart
from dpro.errors import DproError, Unanswerable, UsageError
from dpro.goodput.life import JobLife
from dpro.goodput.recovery.designs import DESIGNS, SMALLER, changed, young_daly
from dpro.goodput.recovery.rates import FailureRate, own_rate
from dpro.goodput.recovery.simulate import CLASSES, Failures, Recovery, exponential, simulate
from dpro.goodput.recovery.stages import seen_failures, stages_of
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.scaling import Batch, DataParallelSize, replicas_of
from dpro.replay.whatif.grammar import split_edit, values_of
from dpro.replay.whatif.predict import NINETY, Prediction, predict
from dpro.schema import SPANS
from dpro.units import S_PER_H


class GoodputPrediction(DocumentPart, frozen=True):
    """What the job would get done in the time that was asked about.

    Attributes:
        edits: what was changed; none for the job as it is.
        goodput: share of the time in which steps are done for good, with stragglers and evaluation, as `ettr`
            of the job counts them: mean, and within which nine of ten simulated jobs are.
        low, high: that interval.
        gain_h: hours of training that the change gives, mean; null for the job as it is.
        gain_low_h, gain_high_h: its interval.
        failures: in that time.
        shares: of the time, by class.
    """

    edits: list[str]
    goodput: float
    low: float
    high: float
    gain_h: float | None
    gain_low_h: float | None
    gain_high_h: float | None
    failures: float
    shares: dict[str, float]


class OutlookDocument(DocumentPart, frozen=True):
    """What the job would get done if its hosts fail so often, and what changes would give. Unproven.

    Attributes:
        hours: that are simulated.
        rate: where the rate of failures comes from.
        job_failures_per_h: of the job as a whole.
        host_failures_per_h: of each host.
        hosts: of the job.
        stages: of the job as measured, s and steps, that the simulation starts from.
        predictions: the job as it is, then changes, largest gain first.
    """

    hours: float
    rate: str
    job_failures_per_h: float
    host_failures_per_h: float
    hosts: int
    stages: dict[str, float]
    predictions: list[GoodputPrediction]


def outlook(life: JobLife, rate: FailureRate | None, edits: Sequence[str], hours: float) -> OutlookDocument:
    """Predict a job as it is, and with changes.

    Args:
        rate: how often it fails; None for as often as it did.

    Raises:
        UsageError: there is no such change.
        Unanswerable: the job did no step, or its own failures are too few.
    """
    recovery = stages_of(life)
    rate = rate or own_rate(seen_failures(life))
    changes = [_replayed(life, recovery, edits)] if edits else candidates(recovery, rate)
    base, *predictions = predict_goodput(recovery, rate, changes, hours)
    ranked = sorted(predictions, key=lambda prediction: -(prediction.gain_h or 0.0))
    return OutlookDocument(
        hours=hours,
        rate=rate.source,
        job_failures_per_h=rate.job,
        host_failures_per_h=rate.host,
        hosts=recovery.hosts,
        stages={name: float(value) for name, value in asdict(recovery).items()},
        predictions=[base, *ranked],
    )


def _replayed(life: JobLife, recovery: Recovery, edits: Sequence[str]) -> list[str]:
    """Changes with what a replay of the job says of them."""
    changes: list[str] = []
    for edit in edits:
        changes.append(with_replayed_step(life, recovery, edit))
        recovery = changed(recovery, changes[-1])
    return changes


# What changes to the recovery of a job would give: productive hours a month, with intervals.

JOBS = 200  # simulated for each prediction
LOW, HIGH = 5.0, 95.0  # percentiles of an interval
SEED = 20240501
MAX_FAILURES = 10_000  # of a job, that are simulated


def predict_goodput(
    recovery: Recovery, rate: FailureRate, changes: Sequence[Sequence[str]], hours: float
) -> list[GoodputPrediction]:
    """Predict the job as it is, and each of some changes.

    Raises:
        UsageError: as `changed`.
        Unanswerable: more failures would come than can be simulated.
    """
    base = _simulated(recovery, rate, hours)
    predictions = [_prediction([], base, base, hours)]
    for edits in changes:
        design = recovery
        for edit in edits:
            design = changed(design, edit)
        predictions.append(_prediction(edits, _simulated(design, rate, hours), base, hours))
    return predictions


def candidates(recovery: Recovery, rate: FailureRate) -> list[list[str]]:
    """Changes that a search tries: those that need nothing which the job did not show."""
    per_s = (rate.job + rate.host * recovery.hosts) / S_PER_H
    changes = []
    if recovery.stall_s > 0 and per_s > 0:
        best = young_daly(recovery, per_s)
        changes += [[f"checkpoint:every={every}"] for every in sorted({best, max(best // 2, 1), 2 * best})]
        changes.append(["async:stall=0"])
    if recovery.detect_s > 0:
        changes.append([f"detect:s={recovery.detect_s / 10:.3g}"])
    if recovery.start_s > 0:
        changes.append([f"start:s={recovery.start_s / 2:.3g}"])
    return changes


def _simulated(recovery: Recovery, rate: FailureRate, hours: float) -> tuple[Floats, Floats, float]:
    """[S] goodput, [classes] shares and the mean number of failures of simulated jobs."""
    failures_per_h = rate.job + rate.host * recovery.hosts
    if not failures_per_h * hours <= MAX_FAILURES:
        raise Unanswerable(
            f"{failures_per_h:,.3g} failures an hour for {hours:,.5g} h are "
            f"more than the {MAX_FAILURES:,} that are simulated: give fewer --hours, or a lower rate"
        )
    rng = np.random.default_rng(SEED)
    failures: Failures = exponential(*rate.per_s(JOBS, rng), rng)
    done = simulate(recovery, failures, hours * S_PER_H, rng, JOBS)
    shares = done.seconds.mean(axis=0) / done.seconds.sum(axis=1).mean()
    return done.goodput, shares, float(done.failures.mean())


def _prediction(
    edits: Sequence[str],
    simulated: tuple[Floats, Floats, float],
    base: tuple[Floats, Floats, float],
    hours: float,
) -> GoodputPrediction:
    goodput, shares, failures = simulated
    gain = goodput - base[0]
    low, high = np.percentile(goodput, [LOW, HIGH])
    gains = (gain.mean(), *np.percentile(gain, [LOW, HIGH]))
    gain_h, gain_low_h, gain_high_h = (hours * float(share) if edits else None for share in gains)
    return GoodputPrediction(
        edits=list(edits),
        goodput=float(goodput.mean()),
        low=float(low),
        high=float(high),
        gain_h=gain_h,
        gain_low_h=gain_low_h,
        gain_high_h=gain_high_h,
        failures=failures,
        shares=dict(zip(CLASSES, map(float, shares), strict=True)),
    )


# How long a step takes while a host is missing: by a replay of the job's own recording with fewer replicas.


def with_replayed_step(life: JobLife, recovery: Recovery, text: str) -> str:
    """A change with `slower` and `unsure`, where it is `smaller` and does not give them.

    Raises:
        UsageError: the run does not say how long such a step takes.
    """
    name, rest = split_edit(text)
    if name != SMALLER:
        return text
    change = DESIGNS[name]
    values = values_of(name, rest, [key.name for key in change.keys], change.example)
    if "slower" in values or "replicas" not in values:
        return text
    with suppress(ValueError):
        replicas = int(values["replicas"])
        fewer = max((recovery.hosts - 1) * replicas // recovery.hosts, 1)
        keeps_batch = float(values.get("batch", "0")) > 0
        slower, unsure = _replayed_slowdown(life, replicas, fewer, keeps_batch)
        return f"{text},slower={slower:.4g},unsure={unsure:.2g}"
    return text  # whose numbers are none: it is refused when it is applied


def _replayed_slowdown(life: JobLife, replicas: int, fewer: int, keeps_batch: bool) -> tuple[float, float]:
    """Steps of `fewer` replicas over those of all, and the standard deviation of that."""
    most = max((attempt.workers.height for attempt in life.attempts), default=0)
    whole = [
        attempt for attempt in life.attempts if attempt.workers.height == most and attempt.run.num_rows(SPANS)
    ]
    if not whole:
        raise UsageError(
            "smaller: nothing was recorded in depth (no deep window), so how long a step takes with fewer "
            f"replicas is not known: give it, as in {DESIGNS[SMALLER].example}"
        )
    analysis = Analysis(whole[-1].run)
    try:
        recorded = replicas_of(analysis.built.predictive)
        before = _predicted(analysis, recorded, replicas)
        more = [Batch(replicas / fewer)] if keeps_batch and fewer < replicas else []
        after = _predicted(analysis, recorded, fewer, *more)
    except DproError as error:
        raise UsageError(
            f"smaller: how long a step takes with fewer replicas is not known ({error}): give it, as in "
            f"{DESIGNS[SMALLER].example}"
        ) from error
    (before_ns, before_doubt_ns), (after_ns, after_doubt_ns) = before, after
    # What both assume of the network is the same, so doubts do not add up: the larger one counts.
    return after_ns / before_ns, max(before_doubt_ns, after_doubt_ns) / before_ns


def _predicted(analysis: Analysis, recorded: int, replicas: int, *more: Edit) -> tuple[float, float]:
    """The mean step of a job with this number of replicas, and its standard deviation."""
    edits = [*([DataParallelSize(replicas)] if replicas != recorded else []), *more]
    trust = analysis.trust
    if not trust.answerable:
        raise Unanswerable("; ".join(trust.reasons))
    prediction = predict(analysis.built.predictive, analysis.baseline, edits, trust)
    return prediction.predicted_ns, _deviation_ns(prediction) if edits else 0.0


def _deviation_ns(prediction: Prediction) -> float:
    """The standard deviation of a predicted step, of its gain's interval of nine in ten."""
    return (prediction.gain_high_ns - prediction.gain_low_ns) * prediction.samples / 2 / NINETY
