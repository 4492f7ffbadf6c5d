"""What a job would get done, and what changes to its recovery would give, as a document.

In: the life of a job, how often it fails, changes or none. Out: `OutlookDocument`: without changes, a search
over those that need nothing which the job did not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from dpro.goodput.degraded import with_replayed_step
from dpro.goodput.designs import changed
from dpro.goodput.document import GoodputPrediction, JobLife, OutlookDocument
from dpro.goodput.predict import PredictedGoodput, candidates, predict_goodput
from dpro.goodput.rates import FailureRate, own_rate
from dpro.goodput.simulate import Recovery
from dpro.goodput.stages import seen_failures, stages_of


def outlook(life: JobLife, rate: FailureRate | None, edits: Sequence[str], hours: float) -> OutlookDocument:
    """Predict a job as it is, and with changes.

    Args:
        life: of the job.
        rate: how often it fails; None for as often as it did.
        edits: changes, which are made together; none for a search.
        hours: for how long.

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
