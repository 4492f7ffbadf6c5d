"""What a job would get done, and what changes to its recovery would give, as a document.

In: the life of a job, how often it fails, and changes. Out: `OutlookDocument`. Without changes, those are
tried for which the recording of the job is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dpro.documents import DocumentPart
from dpro.goodput.life import JobLife
from dpro.goodput.recovery.degraded import with_replayed_step
from dpro.goodput.recovery.designs import changed
from dpro.goodput.recovery.predict import PredictedGoodput, candidates, predict_goodput
from dpro.goodput.recovery.rates import FailureRate, own_rate
from dpro.goodput.recovery.simulate import Recovery
from dpro.goodput.recovery.stages import seen_failures, stages_of


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
    base, *found = predict_goodput(recovery, rate, changes, hours)
    ranked = sorted(found, key=lambda each: -each.gain)
    return OutlookDocument(
        hours=hours,
        rate=rate.source,
        job_failures_per_h=rate.job,
        host_failures_per_h=rate.host,
        hosts=recovery.hosts,
        stages={name: float(value) for name, value in asdict(recovery).items()},
        predictions=[_document(each, hours) for each in (base, *ranked)],
    )


def _replayed(life: JobLife, recovery: Recovery, edits: Sequence[str]) -> list[str]:
    """Changes with what a replay of the job says of them."""
    found: list[str] = []
    for edit in edits:
        found.append(with_replayed_step(life, recovery, edit))
        recovery = changed(recovery, found[-1])
    return found


def _document(found: PredictedGoodput, hours: float) -> GoodputPrediction:
    gains = (found.gain, found.gain_low, found.gain_high)
    gain, low, high = (hours * each if found.edits else None for each in gains)
    return GoodputPrediction(
        edits=list(found.edits),
        goodput=found.goodput,
        low=found.low,
        high=found.high,
        gain_h=gain,
        gain_low_h=low,
        gain_high_h=high,
        failures=found.failures,
        shares=found.shares,
    )
