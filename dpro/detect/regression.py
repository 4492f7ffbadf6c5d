"""Detector of a job that became slower.

Takes the steps of a run, its telemetry and its spans. Returns at most one finding, for the job as a whole:
since when, by how much, and what else differs since then. Does not report slow periods that are over, a slow
beginning, or a slow period no longer than this job's usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.detect.findings import Finding
from dpro.detect.machine.gpu_state import errors_since, remedy_of_errors, remedy_of_hold
from dpro.detect.machine.telemetry import TimeRange, changes
from dpro.detect.observations import Observation, observe
from dpro.detect.significance import MIN_SHARE, SHORTEST, change_points
from dpro.replay.steps import host_facts, job_steps, kernel_totals

MIN_EXPLAINED = 0.2  # of the growth of the step: smaller growth is not evidence
MAX_LINES = 4  # lines of evidence per kind
# A job that becomes slower from step to step has no single change of level: parts of it, of at least four
# steps each, are compared in order. Ten parts without a trend rise like this once in 2,000 times.
PARTS, MIN_PART, RISING, GROWN = 10, 4, 0.8, 1.25  # Kendall's tau, and the last part by the first
COMES_AND_GOES = 0.05  # above this chance, the latest slow period may be one of a job's usual ones
LONGER_SINCE = "longer-since"
NOTHING_ELSE = observe("nothing-else-changed", "nothing else in the recording shows what changed then")
HOST_WORDS = {
    "data_wait_ns": "waiting for the DataLoader",
    "gc_ns": "collecting garbage",
    "run_queue_ns": "waiting for a core",
    "training_thread_cpu_ns": "CPU time of the training thread",
}


@dataclass(frozen=True)
class Regression:
    """Facts about a job that became slower.

    Attributes:
        since: first step of the slower level.
        before_ns, after_ns: typical step before and since.
        persistent: share of the steps since then that are above the middle of both levels.
        before, after: time ranges of the faster level, and of everything since the change.
        last_ns: typical length of the last steps, if steps become longer and longer; else None.
    """

    since: int
    before_ns: float
    after_ns: float
    persistent: float
    before: TimeRange
    after: TimeRange
    last_ns: float | None


def find_regression(
    steps: pl.DataFrame,
    workers: pl.DataFrame,
    read_counters: Callable[[], pl.DataFrame],
    read_spans: Callable[[], pl.DataFrame],
) -> list[Finding]:
    """Find whether the steps at the end are clearly longer than at some time before.

    Args:
        steps: table `steps`; those in deep windows are left out, since recording slows them down.
        read_counters: returns table `counters`; called only if the job became slower.
        read_spans: returns table `spans`; called only if deep windows on both sides allow a comparison.
    """
    regression = regression_of(job_steps(steps))
    if regression is None:
        return []
    counters = read_counters()
    cost = regression.after_ns - regression.before_ns
    changed = changes(counters, workers, regression.before, regression.after)
    lower = "SM clock" in changed or counters.filter(counter="sm_clock_mhz").is_empty()
    cause = next((what for what in changed if lower and remedy_of_hold(what)), "")
    last_ns = regression.last_ns
    longer = observe(
        LONGER_SINCE, "since step {step} the typical step takes {after_ns}", step=regression.since,
        after_ns=regression.after_ns,
    )  # fmt: skip
    if last_ns is not None:
        longer = longer.then(", {last_ns} in the end", last_ns=last_ns)
    observations = (
        longer.then("; before it took {before_ns}", before_ns=regression.before_ns),
        *_host_changes(host_facts(steps, counters), regression),
        *_work_changes(read_spans, steps, regression),
        *[changed[what] for what in sorted(changed, key=lambda what: what != cause)][:MAX_LINES],
        *islice(errors_since(steps, counters, workers, regression.since), MAX_LINES),
    )
    if len(observations) == 1:
        observations += (NOTHING_ELSE,)
    share = round(cost / regression.after_ns, 4)
    return [
        Finding(
            "slow.regression", "job", "step time", (), share, round(regression.persistent, 3), cost,
            observations, f"GPU {cause}" if cause else "",
            remedy=remedy_of_hold(cause) or remedy_of_errors(observations),
        )
    ]  # fmt: skip


def regression_of(
    series: pl.DataFrame, least: float = MIN_SHARE, clear: float = math.inf
) -> Regression | None:
    """Return the change for the worse that lasts to the end of a series; None without one.

    Args:
        series: as from `job_steps`.
        least, clear: as for `change_points`.
    """
    times = series["duration_ns"].to_numpy().astype(np.float64)
    cuts = change_points(times, least, clear=clear)
    growth = [] if cuts else _beginning_of_growth(times)
    begins = [0, *cuts, *growth]
    if len(begins) < 2:
        return None
    levels = [float(np.median(part)) for part in np.split(times, begins[1:])]
    fastest = int(np.argmin(levels))
    slower = [level >= (1 + least) * levels[fastest] for level in levels]
    first = fastest + 1  # index of the first level of those that are slower to the end
    while first < len(levels) and not all(slower[first:]):
        first += 1
    if first >= len(levels):
        return None
    since = begins[first]
    before, after = times[begins[fastest] : begins[fastest + 1]], times[since:]
    fast, slow = float(np.median(before)), float(np.median(after))
    middle = (fast + slow) / 2
    earlier, latest = slow_periods(times, fast, slow)
    if chance_to_last(latest, earlier) >= COMES_AND_GOES:
        return None
    return Regression(
        since=int(series["step"][since]),
        before_ns=fast,
        after_ns=slow,
        persistent=float((after > middle).mean()),
        before=_stretch(series, begins[fastest], begins[fastest + 1]),
        after=_stretch(series, since, times.size),
        last_ns=float(np.median(times[-(times.size // PARTS) :])) if growth else None,
    )


def slow_periods(times: Floats, fast: float, slow: float) -> tuple[Ints, int]:
    """Return the lengths of slow periods, in steps.

    A period begins where the median of `SHORTEST` steps is nearer to `slow` than to `fast`, and is over where
    that is back at `fast` except for a quarter of the distance.

    Args:
        times: [T] step times.
        fast, slow: typical step times before and during the latest period.

    Returns:
        The length of each period that began after a faster step and was over in the end, and of the latest.
        Periods slower by half more had another reason, and are left out.
    """
    smooth = pl.Series(times).rolling_median(SHORTEST, center=True, min_samples=1)
    at = (smooth - fast) / (slow - fast)
    is_slow = pl.select(pl.when(at > 0.5).then(True).when(at < 0.25).then(False).forward_fill()).to_series()
    turns = np.flatnonzero(np.diff(is_slow.fill_null(True).to_numpy())) + 1
    first = int(is_slow[0] is not False)  # a slow beginning does not count
    periods = zip(turns[first::2], turns[first + 1 :: 2])
    most = slow + (slow - fast) / 2
    earlier = [end - begin for begin, end in periods if np.median(times[begin:end]) <= most]
    return np.array(earlier, np.int64), times.size - int(turns[-1]) if turns.size else times.size


def chance_to_last(steps: int, lasted: Ints) -> float:
    """Return the chance that one more slow period lasts this long, if periods end independently of their age.

    The lifetime is exponential, with a mean known from earlier periods (the predictive distribution: a Lomax,
    or Pareto type II); 0 without any.
    """
    return float((1 + steps / lasted.sum()) ** -lasted.size) if lasted.size else 0.0


def _beginning_of_growth(times: Floats) -> list[int]:
    """Return the index after which all parts of a growing series exceed its first part; else none."""
    if times.size < PARTS * MIN_PART:
        return []
    parts = np.array_split(times, PARTS)
    levels = np.array([np.median(part) for part in parts])
    tau = np.sign(levels - levels[:, None])[np.triu_indices(PARTS, 1)].mean()
    if tau < RISING or levels[-1] < GROWN * levels[0]:
        return []
    unchanged = np.flatnonzero(levels <= (1 + MIN_SHARE) * levels[0])
    return [sum(part.size for part in parts[: unchanged[-1] + 1])]


def _stretch(series: pl.DataFrame, begin: int, end: int) -> TimeRange:
    return TimeRange(int(series["begin_ns"][begin]), int(series["end_ns"][end - 1]))


def _host_changes(facts: pl.DataFrame, regression: Regression) -> list[Observation]:
    """Return what the host does longer per step since then, on the rank where that grew most."""
    enough = MIN_EXPLAINED * (regression.after_ns - regression.before_ns)
    observations = []
    for column, words in HOST_WORDS.items():
        grown = (
            facts.filter(pl.col(column).is_not_null())
            .group_by("rank")
            .agg(
                old=pl.col(column).filter(pl.col("step") < regression.since).mean(),
                new=pl.col(column).filter(pl.col("step") >= regression.since).mean(),
            )
            .drop_nulls()
            .filter(pl.col("new") - pl.col("old") >= enough)
            .sort(pl.col("new") - pl.col("old"), descending=True)
        )
        for rank, old, new in grown.head(1).iter_rows():
            sentence = "rank {rank}: {what} {before_ns} per step before, {after_ns} since"
            observations.append(
                observe("host-changed", sentence, rank=rank, what=words, before_ns=old, after_ns=new)
            )
    return observations


def _work_changes(
    read_spans: Callable[[], pl.DataFrame], steps: pl.DataFrame, regression: Regression
) -> list[Observation]:
    """Return kernels (of a CPU job: operators) that take longer per step in deep windows since then."""
    inside = steps.filter(pl.col("window") >= 0)
    old_steps = inside.filter(pl.col("step") < regression.since)
    new_steps = inside.filter(pl.col("step") >= regression.since)
    if old_steps.is_empty() or new_steps.is_empty():
        return []
    spans = read_spans()
    old, new = (_work_per_step(spans, part) for part in (old_steps, new_steps))
    enough = MIN_EXPLAINED * (regression.after_ns - regression.before_ns)
    grown = (
        new.join(old, on="name", how="left", suffix="_old")
        .with_columns(pl.col("work_ns_old").fill_null(0.0))
        .filter(pl.col("work_ns") - pl.col("work_ns_old") >= enough)
        .sort([pl.col("work_ns") - pl.col("work_ns_old"), "name"], descending=[True, False])
    )
    return [
        observe(
            "work-changed",
            "{name}: {before_ns} per rank and step before, {after_ns} since",
            name=name,
            before_ns=before,
            after_ns=after,
        )
        for name, after, before in grown.head(MAX_LINES).select("name", "work_ns", "work_ns_old").iter_rows()
    ]


def _work_per_step(spans: pl.DataFrame, inside: pl.DataFrame) -> pl.DataFrame:
    """Return `name`, `work_ns` per rank and step in the windows of some steps."""
    chosen = spans.join(inside.select("rank", "window").unique(), on=["rank", "window"], how="semi")
    return kernel_totals(chosen).select("name", work_ns=pl.col("total_ns") / inside.height)
