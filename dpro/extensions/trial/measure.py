"""How much faster a changed job is than the unchanged one, by recordings of both, and whether it learns.

Takes pairs of runs, recorded alternately; returns the ratio of their step times with an interval, and how
much recordings of the unchanged job differ from each other; how far the losses of the changed job are from
the others' in the second half, sample by sample, and whether they differ by more than recordings of one job
do (Student's interval of a difference of means). Leaves out steps of deep windows and the step after one,
which recording slows down, and the first steps, which are not typical of the job. Short jobs show a change
that breaks training, not one that costs a little of the final loss.

Machines have slow periods that last longer than a job, and every start of a job is a little different. So
pairs are compared, and their variation gives the interval; the variation of steps within one job would make
it far too narrow (Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.bad_numbers import LOSS
from dpro.documents import DocumentPart, finite
from dpro.errors import Unanswerable
from dpro.replay.steps import host_facts, host_steps_of, job_steps, steps_of, undisturbed
from dpro.schema import COUNTERS, LOSSES, STEPS
from dpro.store import Run
from dpro.units import format_duration

# Decides when enough pairs were recorded to know whether a change helps.

CONFIDENCE = 0.95
EFFECT = math.log1p(0.02)  # a smaller effect counts as none
MIN_PAIRS = 3  # before a trial is given up for needing too many: two say little about variation
LARGEST_NEED = 10_000


@dataclass(frozen=True)
class Decision:
    """Whether to record more pairs.

    Attributes:
        stop: whether to stop.
        decided: whether the question is answered.
        needed: estimated number of pairs that would answer it.
    """

    stop: bool
    decided: bool
    needed: int


def confidence_of(max_pairs: int) -> float:
    """Return the confidence of each look's interval, so that all looks together have `CONFIDENCE`."""
    return 1 - (1 - CONFIDENCE) / max(max_pairs - 1, 1)


def half_width(deviation: float, pairs: int, confidence: float) -> float:
    """Return half the width of Student's interval of a mean.

    Args:
        pairs: number of pairs, at least two.
    """
    from scipy.special import stdtrit

    return float(stdtrit(pairs - 1, (1 + confidence) / 2)) * deviation / math.sqrt(pairs)


def decide(ratios: Sequence[float], max_pairs: int) -> Decision:
    """Decide whether the pairs so far are enough."""
    count, logs = len(ratios), np.log(np.array(ratios))
    if count < 2:
        return Decision(count >= max_pairs, False, max_pairs)
    mean, deviation = abs(float(logs.mean())), float(logs.std(ddof=1))
    confidence = confidence_of(max_pairs)
    enough = max(mean, EFFECT - mean)  # excludes an effect of 0, or any beyond EFFECT
    if half_width(deviation, count, confidence) < enough:
        return Decision(True, True, count)
    needed = _needed(deviation, enough, confidence, count)
    hopeless = count >= MIN_PAIRS and needed > max_pairs
    return Decision(hopeless or count >= max_pairs, False, needed)


def _needed(deviation: float, enough: float, confidence: float, count: int) -> int:
    """Return the smallest number of pairs whose interval is narrow enough, by bisection."""
    low, high = count, LARGEST_NEED
    while low < high:
        middle = (low + high) // 2
        if half_width(deviation, middle, confidence) < enough:
            high = middle
        else:
            low = middle + 1
    return low


# Compares how busy the machine was on both sides.

MORE_CROWDED = 1.5  # ratio of waits for a core per CPU time from which the machine was busier
OF_EFFECT = 0.5  # share of the difference between sides; a larger wait for cores may explain all of it
OF_STEP = 0.02  # share of the step; waits that differ by less are ignored
ONE_PAIR = "one pair cannot show how much unchanged recordings differ: use --repeats 3"


class CoreUse(NamedTuple):
    """How long the training thread waited for a core and had one, in ns per step, mean over ranks."""

    wait_ns: float
    cpu_ns: float


def core_use_of(run: Run, skip: int) -> CoreUse | None:
    """Return how crowded the machine was in the measured steps; None if that was not recorded.

    Args:
        skip: steps at the beginning that are left out.
    """
    facts = host_facts(run.table(STEPS), run.table(COUNTERS)).filter(pl.col("step") > skip)
    sampled = facts.drop_nulls(["run_queue_ns", "training_thread_cpu_ns"])
    if sampled.is_empty():
        return None
    return CoreUse(
        float(sampled["run_queue_ns"].to_numpy().mean()),
        float(sampled["training_thread_cpu_ns"].to_numpy().mean()),
    )


def load_differs(
    baseline: Sequence[CoreUse | None], changed: Sequence[CoreUse | None], measured: MeasuredChange
) -> str:
    """Return why the sides cannot be compared, if waits for cores may explain the difference; else empty.

    A change after which the job needs less of the CPU also waits less for it, in proportion; if the wait
    changes by more than that, other load on the machine changed.
    """
    sides = [[load for load in side if load is not None] for side in (baseline, changed)]
    if not all(sides):
        return ""
    (wait, cpu), (wait_then, cpu_then) = (np.median(np.array(side), axis=0) for side in sides)
    more = abs(wait_then - wait)
    step_ns = measured.baseline_ns
    low, high = sorted((wait / max(cpu, 1.0), wait_then / max(cpu_then, 1.0)))
    as_crowded = high < MORE_CROWDED * low
    if as_crowded or more < max(OF_EFFECT * abs(measured.ratio - 1), OF_STEP) * step_ns:
        return ""
    return (
        f"the load of the machine differed: a step waits {format_duration(wait)} for a core unchanged, "
        f"{format_duration(wait_then)} changed"
    )


Typical = Callable[[Floats], float]

MIN_STEPS = 10
BLOCK_STEPS, RESAMPLES, SEED = 5, 1000, 0
FEW_LONGEST = 0.05  # share of the steps, the longest ones, that are no sign of bursts
IN_BURSTS = 0.1  # relative difference of mean and median from which the median is not how fast a job is


@dataclass(frozen=True)
class MeasuredChange:
    """A changed job compared with the unchanged one.

    Attributes:
        ratio: step time changed / unchanged; below 1 is faster.
        low, high: 95% interval of the ratio, over all looks.
        noise: typical difference of a recording of the unchanged job from the next, as a share; None with
            one.
        baseline_ns: typical step of the unchanged job, or mean where that is compared, median over
            recordings.
        num_pairs: pairs of recordings.
        num_steps: measured steps of the shortest recording.
        samples: samples of a step of the changed job divided by those of the unchanged job.
        withheld: why the change is not judged; empty if it is.
    """

    ratio: float
    low: float
    high: float
    noise: float | None
    baseline_ns: float
    num_pairs: int
    num_steps: int
    samples: float = 1.0
    withheld: str = ""

    @property
    def verdict(self) -> str:
        """`faster` or `slower` per sample, no effect beyond noise, or not judged and why."""
        if self.withheld:
            return f"not judged: {self.withheld}"
        per_sample = self.ratio / self.samples
        differs = not self.low <= self.samples <= self.high
        is_clear = differs and abs(math.log(per_sample)) > math.log1p(self.noise or 0)
        return ("faster" if per_sample < 1 else "slower") if is_clear else "no effect beyond noise"


def step_times(run: Run, skip: int) -> Floats:
    """Return the durations of the steps that recording did not slow down, in order, in ns.

    Args:
        skip: steps at the beginning that are left out.

    Raises:
        Unanswerable: there are too few.
    """
    return _measured(run, steps_of(run), skip)


def times_by_one_clock(runs: Sequence[Run], skip: int) -> tuple[str, list[Floats]]:
    """Return step times of runs to compare: by the devices if these timed all runs, else by the hosts.

    Args:
        skip: steps at the beginning that are left out.

    Returns:
        `device` or `host`, and the times of each run, in ns.

    Raises:
        Unanswerable: a run has too few steps.
    """
    clock, steps = "device", [steps_of(run) for run in runs]
    if not all(step["by_device"].any() for step in steps):
        clock, steps = "host", [host_steps_of(run) for run in runs]
    return clock, [_measured(run, step, skip) for run, step in zip(runs, steps, strict=True)]


def _measured(run: Run, steps: pl.DataFrame, skip: int) -> Floats:
    kept = undisturbed(steps).filter((pl.col("window") < 0) & (pl.col("step") > skip))
    times = job_steps(kept)
    if times.height < MIN_STEPS:
        raise Unanswerable(
            f"{run.path}: {times.height} of {steps['step'].n_unique()} steps can be measured, without the "
            f"first {skip} and those recorded in depth; {MIN_STEPS} are needed: let the job run longer"
        )
    return times["duration_ns"].to_numpy()


def ratios(baseline: Sequence[Floats], changed: Sequence[Floats], uneven: bool) -> Floats:
    """Return the ratio of step times, changed over unchanged, of each pair.

    Args:
        baseline, changed, uneven: as in `compare`.
    """
    typical = _typical_of(baseline, changed, uneven)
    return np.array([typical(after) / typical(before) for before, after in zip(baseline, changed)])


def compare(
    baseline: Sequence[Floats],
    changed: Sequence[Floats],
    uneven: bool,
    samples: float = 1.0,
    confidence: float = CONFIDENCE,
) -> MeasuredChange:
    """Compare pairs of recordings by the ratio of their step times.

    Args:
        baseline: step times of the unchanged job, ns, by recording.
        changed: step times of the changed job, ns, by recording.
        uneven: whether the change affects only some steps, so that only their mean shows it; the mean is
            also compared where steps of a recording come in bursts.
        samples: factor on the samples of a step.
        confidence: of the interval; higher if a trial may stop after any pair.

    Returns:
        The median ratio over pairs, with Student's interval of the logarithms' mean around it; with a single
        pair, an interval from blocks of steps, which ignores how jobs differ from start to start.
    """
    typical = _typical_of(baseline, changed, uneven)
    before = np.array([typical(times) for times in baseline])
    logs = np.log(ratios(baseline, changed, uneven))
    middle = float(np.median(logs))
    if logs.size > 1:
        half = half_width(float(logs.std(ddof=1)), logs.size, confidence)
        centre = float(logs.mean())
        low, high = min(centre - half, middle), max(centre + half, middle)
    else:
        low, high = _bootstrap(baseline[0], changed[0], typical)
    noise = math.expm1(float(np.median(np.abs(np.diff(np.log(before)))))) if before.size > 1 else None
    return MeasuredChange(
        math.exp(middle),
        math.exp(low),
        math.exp(high),
        noise,
        float(np.median(before)),
        logs.size,
        min(times.size for times in (*baseline, *changed)),
        samples,
    )


def _typical_of(baseline: Sequence[Floats], changed: Sequence[Floats], uneven: bool) -> Typical:
    """Return the measure by which all recordings are compared: the median step, or the mean.

    Several workers deliver batches in bursts: most steps are short, and the long ones between them take most
    of the time. Only the mean then is the time in which a job does a step.
    """
    return _mean if uneven or any(map(_come_in_bursts, (*baseline, *changed))) else _median


def _come_in_bursts(times: Floats) -> bool:
    """Return whether the mean step is not about the median, a few pauses left out."""
    calm = times[times <= np.quantile(times, 1 - FEW_LONGEST)]
    return bool(abs(calm.mean() / np.median(times) - 1) > IN_BURSTS)


def _median(times: Floats) -> float:
    return float(np.median(times))


def _mean(times: Floats) -> float:
    return float(times.mean())


def _bootstrap(before: Floats, after: Floats, typical: Typical) -> tuple[float, float]:
    """Return the interval of the logarithm of the ratio: moving block bootstrap (Künsch, 1989)."""
    random = np.random.default_rng(SEED)
    logs = [
        math.log(typical(_resampled(after, random)) / typical(_resampled(before, random)))
        for _ in range(RESAMPLES)
    ]
    low, high = np.quantile(logs, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _resampled(times: Floats, random: np.random.Generator) -> Floats:
    size = min(BLOCK_STEPS, times.size)
    starts = random.integers(0, times.size - size + 1, size=math.ceil(times.size / size))
    resampled: Floats = times[(starts[:, None] + np.arange(size)).ravel()]
    return resampled


# Losses.

MIN_PASSES = 6
SHARE = 0.02  # share of the loss, or of its fall, within which losses count as equal
NOT_SEEN = "in some recording, no rank called backward on a single number"


class Training(DocumentPart, frozen=True):
    """Losses of the changed job and of the unchanged job, over the same samples.

    Attributes:
        differs: whether the losses differ by more than the tolerance.
        base, changed: mean loss in the second half; null where it is not finite.
        spread: largest difference of it between recordings of the unchanged job; null with a single one.
        tolerance: difference between recordings of one job, or 2% of the loss or of its fall.
        passes: passes of the unchanged job that were compared.
    """

    differs: bool
    base: float | None
    changed: float | None
    spread: float | None
    tolerance: float | None
    passes: int


def losses_of(run: Run) -> Floats:
    """Return the losses of a run in order, the mean over its ranks; empty if they were not recorded."""
    rows = run.table(LOSSES).filter(pl.col("kind") == LOSS)
    by_rank = [losses["value"].to_numpy() for losses in rows.sort("rank", "time_ns").partition_by("rank")]
    if not by_rank:
        return np.empty(0)
    shortest = min(losses.size for losses in by_rank)
    mean: Floats = np.mean([losses[:shortest] for losses in by_rank], axis=0)
    return mean


def compare_losses(
    baseline: Sequence[Floats], changed: Sequence[Floats], passes: float = 1.0
) -> Training | None:
    """Compare losses over the samples that all recordings have seen.

    Args:
        baseline: `[L]` losses of the unchanged job in order, by recording.
        changed: `[L]` losses of the changed job in order, by recording.
        passes: factor on the samples of a forward pass.

    Returns:
        The comparison; None if a recording has too few losses.
    """
    common = min(*(losses.size for losses in baseline), *(int(losses.size * passes) for losses in changed))
    if common < MIN_PASSES or common / passes < 2:
        return None
    before = np.array([_late(losses, common) for losses in baseline])
    after = np.array([_late(losses, round(common / passes)) for losses in changed])
    base = float(before.mean())
    fall = float(np.mean([losses[: common // 2].mean() for losses in baseline])) - base
    spread = float(np.ptp(before)) if before.size > 1 else None
    tolerance = max(_noise(before, after), SHARE * max(abs(base), abs(fall)))
    learnt = float(after.mean())
    differs = math.isfinite(base) and not abs(learnt - base) <= tolerance
    return Training(differs, finite(base), finite(learnt), finite(spread), finite(tolerance), common)


def _noise(before: Floats, after: Floats) -> float:
    """Return half of the 95% interval of a difference of means, from the spread within both jobs; else 0."""
    freedom = before.size + after.size - 2
    if freedom < 1:
        return 0.0
    from scipy.special import stdtrit

    squares = ((before - before.mean()) ** 2).sum() + ((after - after.mean()) ** 2).sum()
    deviation = math.sqrt(squares / freedom * (1 / before.size + 1 / after.size))
    return float(stdtrit(freedom, 0.975)) * deviation


def _late(losses: Floats, common: int) -> float:
    return float(losses[common // 2 : common].mean())
