"""How long each step of a run took, also where hosts run ahead of GPUs that timed nothing.

In: a run. Out: table `steps` with the columns of `dpro.timed.with_times`.

In runs on GPUs whose timing events are missing (older recordings, traces) hosts that run ahead show by their
synchronisation schedule: many short steps, and at a regular distance a long one, which waits for all that was
enqueued. Of these only the mean over such a cycle is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import MAD_TO_SIGMA, Bools, Floats, Ints
from dpro.replay.steps.host import FACTS, host_facts
from dpro.schema import COUNTERS, STEPS
from dpro.store import Run
from dpro.timed import disturbed, with_times

FAR = 2.0  # times the median step: what a step takes that waits for those before it
CYCLES = 3  # at least, to be a schedule
REGULAR = 0.8  # of the distances between long steps are the same
EXPLAINED = (
    0.5  # of what long steps take more: the host did something else then, and did not wait for a device
)
# What the host does in long steps that no launch queue explains.
_ASIDE = ("checkpoint_ns", "no_grad_ns", "compile_ns", "gc_ns", "data_wait_ns")


def steps_of(run: Run) -> pl.DataFrame:
    """Table `steps` of a run, with how long each step took.

    Raises:
        InputError: a part of the run cannot be read.
    """
    table = run.table(STEPS)
    steps = with_times(table)
    return steps if steps["by_device"].any() else _host_steps(run, table)


def host_steps_of(run: Run) -> pl.DataFrame:
    """The same by hosts alone: for a comparison with a run whose steps no device timed.

    Raises:
        InputError: a part of the run cannot be read.
    """
    return _host_steps(run, run.table(STEPS))


def _host_steps(run: Run, table: pl.DataFrame) -> pl.DataFrame:
    steps = with_times(table.drop("gpu_step_ns"))
    return over_cycles(steps, lambda: run.table(COUNTERS)) if run.manifest.gpus else steps


def over_cycles(steps: pl.DataFrame, read_counters: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Steps of hosts that wait for their device at a regular distance, each as the mean of its cycle.

    Of steps up to the first such wait, after the last, and of cycles with a deep window it is not known.

    Args:
        steps: as from `with_times`, of a run on GPUs.
        read_counters: gives table `counters`; asked only where there is such a schedule.
    """
    parts = {rank: part.sort("step") for (rank,), part in steps.group_by("rank", maintain_order=True)}
    waits = {rank: _waits(part["time_ns"].to_numpy(), _disturbed(part)) for rank, part in parts.items()}
    if not any(places.size for places in waits.values()):
        return steps
    facts = host_facts(steps, read_counters())
    for rank, places in waits.items():
        if places.size and not _is_aside(parts[rank], places, facts):
            parts[rank] = _averaged(parts[rank], places)
    return pl.concat(parts.values()).sort(STEPS.sort_by, maintain_order=True)


def _disturbed(steps: pl.DataFrame) -> Bools:
    """Which steps are no measure of others; none if all are so."""
    is_disturbed: Bools = steps.select(disturbed(steps)).to_series().to_numpy()
    return np.asarray(is_disturbed & ~is_disturbed.all())


def _waits(times: Ints, disturbed: Bools) -> Ints:
    """Where a host waited for its device: steps far longer than most, at a regular distance; else none."""
    none = np.empty(0, np.int64)
    undisturbed_times = times[(times > 0) & ~disturbed]
    if not undisturbed_times.size:
        return none
    places = np.flatnonzero((times > FAR * np.median(undisturbed_times)) & ~disturbed)
    if places.size <= CYCLES:
        return none
    distances = np.diff(places)
    usual = int(np.median(distances))
    return places if usual >= 2 and float((distances % usual == 0).mean()) >= REGULAR else none


def _is_aside(steps: pl.DataFrame, places: Ints, facts: pl.DataFrame) -> bool:
    """Whether what the host counted explains most of the long steps."""
    chosen = steps["step"][places.tolist()].implode()
    of_rank = facts.filter(pl.col("rank") == steps["rank"][0]).with_columns(
        aside=pl.sum_horizontal(pl.col(name).fill_null(0.0) for name in FACTS.values() if name in _ASIDE)
    )
    if of_rank.is_empty():
        return False
    is_long = pl.col("step").is_in(chosen)
    more = of_rank.select(
        (pl.col(name).filter(is_long).mean() - pl.col(name).filter(~is_long).median()).alias(name)
        for name in ("aside", "duration_ns")
    ).row(0)
    return None not in more and more[0] >= EXPLAINED * more[1]


def _averaged(steps: pl.DataFrame, places: Ints) -> pl.DataFrame:
    """Each step as the mean of its cycle, which ends with a wait."""
    number = np.searchsorted(places, np.arange(steps.height))  # of the cycle that the step is in
    whole = (number > 0) & (number < places.size) & ~np.isin(number, number[_disturbed(steps)])
    length = int(np.median(np.diff(places)))
    return (
        steps.with_columns(cycle_number=pl.Series(number), is_whole=pl.Series(whole))
        .with_columns(
            time_ns=pl.when("is_whole")
            .then(pl.col("time_ns").mean().over("cycle_number").round().cast(pl.Int64))
            .otherwise(-1),
            cycle=pl.lit(length, pl.Int64),
        )
        .drop("cycle_number", "is_whole")
    )


# How long the steps of a job take: the typical step, the mean step with pauses, and which steps are pauses.

AROUND = 40  # steps whose median is what a step would take, however long two in five of them are
MIN_STEPS = 12  # fewer do not show what is usual
MIN_LONGER = 0.2  # of the steps around: what is less is no pause, whatever it is
CLEAR = 6.0  # standard deviations, by the median deviation, which pauses do not sway
MIN_NOISE = 0.02  # of the step: noise is never taken to be less
MAX_RUN = 5  # steps in a row: what lasts longer is a slow spell
MAX_SHARE = 0.4  # of the steps around: what is more frequent is how the job is


@dataclass(frozen=True)
class StepSeries:
    """The steps of a job, in order.

    Attributes:
        steps: [T] int64, their numbers.
        times: [T] ns, each the median over ranks.
        usual: [T] ns, the median of the steps around each.
        paused: [T] which are pauses.
        lost: [T] ns by which pauses are longer than usual, less what the steps after them catch up; else 0.
        recorded: whether these are steps of deep windows, since there are no others.
        by_device: whether their device timed them.
        cycle: over how many steps each time is a mean: 1, but for hosts that run ahead of a device.
    """

    steps: NDArray[np.int64]
    times: Floats
    usual: Floats
    paused: Bools
    lost: Floats
    recorded: bool
    by_device: bool
    cycle: int

    @property
    def typical_ns(self) -> float:
        """The typical step."""
        return float(np.median(self.times[~self.paused]))

    @property
    def mean_ns(self) -> float:
        """The mean step with pauses."""
        return float(self.times.mean())

    @property
    def lost_share(self) -> float:
        """Share of the wall time that is lost to pauses."""
        return float(self.lost.sum() / self.times.sum())


def job_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """The job's steps, in order: `step`, `duration_ns` (median over ranks), `begin_ns` and `end_ns`.

    Of a trace that was recorded in depth all along, all steps count. When a step began and ended is by the
    host, how long it took by the device where that timed it.

    Args:
        steps: table `steps`.
    """
    timed = with_times(steps).filter(pl.col("time_ns") > 0)
    outside = timed.filter(pl.col("window") < 0)
    return (
        (timed if outside.is_empty() else outside)
        .group_by("step")
        .agg(
            duration_ns=pl.col("time_ns").median(),
            begin_ns=pl.col("start_ns").min(),
            end_ns=(pl.col("start_ns") + pl.col("duration_ns")).max(),
        )
        .sort("step")
    )


def step_series(steps: pl.DataFrame) -> StepSeries | None:
    """How long the steps of a job take; None where no step was timed.

    Args:
        steps: table `steps`.
    """
    usable = undisturbed(with_times(steps))
    series = job_steps(usable)
    if series.is_empty():
        return None
    times = series["duration_ns"].to_numpy().astype(np.float64)
    usual = _usual(times)
    noise = _noise(times / usual)
    paused = _paused(times / usual - 1, noise)
    return StepSeries(
        series["step"].to_numpy(),
        times,
        usual,
        paused,
        _lost(times - usual, paused, noise * usual),
        recorded=bool((usable["window"] >= 0).all()),
        by_device=bool(usable["by_device"].any()),
        cycle=int(usable["cycle"].to_numpy().max()),
    )


def undisturbed(steps: pl.DataFrame) -> pl.DataFrame:
    """The steps that recording did not slow down; all, where there are no such steps.

    Args:
        steps: table `steps`.
    """
    outside = steps.sort("rank", "step").filter(~disturbed(steps))
    return steps if outside.is_empty() else outside


def _usual(times: Floats) -> Floats:
    """The median of the steps around each; just where the job becomes slower, what it is then."""
    median = pl.Series(_full(pl.Series(times).rolling_median(min(AROUND, times.size), center=True)))
    return np.asarray(np.maximum(median.rolling_max(3, center=True, min_samples=1).to_numpy(), 1.0))


def _full(rolled: pl.Series) -> Floats:
    """The first and last steps have the value of the nearest that has enough steps around."""
    return np.asarray(rolled.fill_null(strategy="forward").fill_null(strategy="backward").to_numpy())


def _noise(ratios: Floats) -> float:
    """Standard deviation of the times, relative to the usual ones."""
    return max(float(MAD_TO_SIGMA * np.median(np.abs(ratios - np.median(ratios)))), MIN_NOISE)


def _paused(longer: Floats, noise: float) -> Bools:
    """Which steps are far longer than usual, alone or a few in a row."""
    far = longer >= max(MIN_LONGER, CLEAR * noise)
    edges = np.flatnonzero(np.diff(far.astype(np.int8), prepend=0, append=0))
    for begin, end in edges.reshape(-1, 2):
        far[begin:end] &= end - begin <= MAX_RUN
    if far.size < MIN_STEPS:
        return np.zeros_like(far)
    often = _full(pl.Series(far, dtype=pl.Float64).rolling_mean(min(AROUND, far.size), center=True))
    return np.asarray(far & (often <= MAX_SHARE))


def _lost(longer: Floats, paused: Bools, noise: Floats) -> Floats:
    """What pauses cost: a host that was ahead of its GPU goes on faster until it is ahead again."""
    lost = np.where(paused, longer, 0.0)
    caught_up = (longer < -2 * noise) & ~paused
    for pause in np.flatnonzero(paused):
        following = pause + 1
        while following < longer.size and caught_up[following] and lost[pause] > 0:
            lost[pause] = max(lost[pause] + longer[following], 0.0)
            following += 1
    return np.asarray(lost)
