"""What changes to the recovery of a job would give: productive hours a month, with intervals.

In: the measured stages of a job, how often it fails, and changes. Out: a prediction for each. All are
simulated with the same random numbers, so that the difference of two is what the change makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpro.arrays import Floats
from dpro.errors import Unanswerable
from dpro.goodput.recovery.designs import changed, young_daly
from dpro.goodput.recovery.rates import FailureRate
from dpro.goodput.recovery.simulate import CLASSES, Failures, Recovery, exponential, simulate
from dpro.units import S_PER_H

JOBS = 200  # simulated for each prediction
LOW, HIGH = 5.0, 95.0  # percentiles of an interval
SEED = 20240501
MAX_FAILURES = 10_000  # of a job, that are simulated


@dataclass(frozen=True)
class PredictedGoodput:
    """What a job would get done.

    Attributes:
        edits: what was changed.
        goodput: mean share of the time in which steps are done for good.
        low, high: within which nine of ten simulated jobs are.
        gain: of goodput over the unchanged job, mean; `gain_low`, `gain_high` its interval.
        failures: mean.
        shares: of the time, by class of `simulate.CLASSES`.
    """

    edits: tuple[str, ...]
    goodput: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    failures: float
    shares: dict[str, float]


def predict_goodput(
    recovery: Recovery, rate: FailureRate, changes: Sequence[Sequence[str]], hours: float
) -> list[PredictedGoodput]:
    """Predict the job as it is, and each of some changes.

    Raises:
        UsageError: as `changed`.
        Unanswerable: more failures would come than can be simulated.
    """
    base = _simulated(recovery, rate, hours)
    found = [_prediction((), base, base)]
    for edits in changes:
        design = recovery
        for edit in edits:
            design = changed(design, edit)
        found.append(_prediction(tuple(edits), _simulated(design, rate, hours), base))
    return found


def candidates(recovery: Recovery, rate: FailureRate) -> list[list[str]]:
    """Changes that a search tries: those that need nothing which the job did not show."""
    per_s = (rate.job + rate.host * recovery.hosts) / S_PER_H
    found = []
    if recovery.stall_s > 0 and per_s > 0:
        best = young_daly(recovery, per_s)
        found += [[f"checkpoint:every={every}"] for every in sorted({best, max(best // 2, 1), 2 * best})]
        found.append(["async:stall=0"])
    if recovery.detect_s > 0:
        found.append([f"detect:s={recovery.detect_s / 10:.3g}"])
    if recovery.start_s > 0:
        found.append([f"start:s={recovery.start_s / 2:.3g}"])
    return found


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
    found = simulate(recovery, failures, hours * S_PER_H, rng, JOBS)
    shares = found.seconds.mean(axis=0) / found.seconds.sum(axis=1).mean()
    return found.goodput, shares, float(found.failures.mean())


def _prediction(
    edits: tuple[str, ...], simulated: tuple[Floats, Floats, float], base: tuple[Floats, Floats, float]
) -> PredictedGoodput:
    goodput, shares, failures = simulated
    gain = goodput - base[0]
    low, high = np.percentile(goodput, [LOW, HIGH])
    gain_low, gain_high = np.percentile(gain, [LOW, HIGH])
    return PredictedGoodput(
        edits, float(goodput.mean()), float(low), float(high), float(gain.mean()), float(gain_low),
        float(gain_high), failures, dict(zip(CLASSES, map(float, shares), strict=True)),
    )  # fmt: skip
