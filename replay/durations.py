"""How long each step took: the one place that every statistic of steps has it from.

In: table `steps`, or a run. Out: the same rows with `time_ns`, what the step took (-1 where that is not
known), `by_device`, whether its device timed it, and `cycle`, over how many steps the time is a mean.

Hosts enqueue work, and run ahead of their device as far as the launch queue reaches: a host's step may be the
time of enqueueing alone. So where a rank's device timed its steps these times count, and its other steps,
which only the host timed, are of no known duration. In runs on GPUs whose events are missing (older
recordings, traces) hosts that run ahead show by their rhythm: many short steps, and at a regular distance a
long one, which waits for all that was enqueued. Of these only the mean over such a cycle is known.

`start_ns` and `duration_ns` stay what they are: when the host was in the step, and what it did there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.host import FACTS, host_facts
from dpro.schema import COUNTERS, STEPS
from dpro.store import Run

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

FEWEST = 5  # steps of a rank that its device timed, and their share, for these alone to count
SHARE = 0.1
FAR = 2.0  # times the median step: what a step takes that waits for those before it
CYCLES = 3  # at least, to be a rhythm
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
    steps = with_times(run.table(STEPS))
    return steps if steps["by_device"].any() else host_steps_of(run)


def host_steps_of(run: Run) -> pl.DataFrame:
    """The same by hosts alone: for a comparison with a run whose steps no device timed.

    Raises:
        InputError: a part of the run cannot be read.
    """
    steps = with_times(run.table(STEPS).drop("gpu_step_ns"))
    return over_cycles(steps, lambda: run.table(COUNTERS)) if run.manifest.gpus else steps


def with_times(steps: pl.DataFrame) -> pl.DataFrame:
    """Steps with how long each took, by its device where that timed steps of the rank, else by its host.

    Args:
        steps: rows of that table; returned as they are where the times have been added.
    """
    if "time_ns" in steps.columns:
        return steps
    if "gpu_step_ns" not in steps.columns:
        steps = steps.with_columns(gpu_step_ns=pl.lit(-1, pl.Int64))
    timed = (pl.col("gpu_step_ns") > 0).sum().over("rank")
    enough = (timed >= FEWEST) & (timed >= SHARE * pl.len().over("rank"))
    return steps.with_columns(
        time_ns=pl.when(enough).then("gpu_step_ns").otherwise("duration_ns"),
        by_device=enough,
        cycle=pl.lit(1, pl.Int64),
    )


def over_cycles(steps: pl.DataFrame, read_counters: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    """Steps of hosts that wait for their device at a regular distance, each as the mean of its cycle.

    Of steps up to the first such wait, after the last, and of cycles with a deep window it is not known.

    Args:
        steps: as from `with_times`, of a run on GPUs.
        read_counters: gives table `counters`; asked only where there is such a rhythm.
    """
    parts = {rank: part.sort("step") for (rank,), part in steps.group_by("rank", maintain_order=True)}
    waits = {rank: _waits(part["time_ns"].to_numpy(), _disturbed(part)) for rank, part in parts.items()}
    if not any(at.size for at in waits.values()):
        return steps
    facts = host_facts(steps, read_counters())
    for rank, at in waits.items():
        if at.size and not _is_aside(parts[rank], at, facts):
            parts[rank] = _averaged(parts[rank], at)
    return pl.concat(parts.values()).sort(STEPS.sort_by, maintain_order=True)


def _disturbed(steps: pl.DataFrame) -> Bools:
    """Steps of deep windows and those right after one, which are no measure of others; none if all are."""
    deep = steps["window"].to_numpy() >= 0
    after = np.concatenate([[False], deep[:-1]])
    return np.asarray((deep | after) & ~deep.all())


def _waits(times: Ints, disturbed: Bools) -> Ints:
    """Where a host waited for its device: steps far longer than most, at a regular distance; else none."""
    none = np.empty(0, np.int64)
    known = times[(times > 0) & ~disturbed]
    if not known.size:
        return none
    at = np.flatnonzero((times > FAR * np.median(known)) & ~disturbed)
    if at.size <= CYCLES:
        return none
    apart = np.diff(at)
    usual = int(np.median(apart))
    return at if usual >= 2 and float((apart % usual == 0).mean()) >= REGULAR else none


def _is_aside(steps: pl.DataFrame, at: Ints, facts: pl.DataFrame) -> bool:
    """Whether what the host counted explains most of the long steps."""
    chosen = steps["step"][at.tolist()].implode()
    known = facts.filter(pl.col("rank") == steps["rank"][0]).with_columns(
        aside=pl.sum_horizontal(pl.col(name).fill_null(0.0) for name in FACTS.values() if name in _ASIDE)
    )
    if known.is_empty():
        return False
    is_long = pl.col("step").is_in(chosen)
    more = known.select(
        (pl.col(name).filter(is_long).mean() - pl.col(name).filter(~is_long).median()).alias(name)
        for name in ("aside", "duration_ns")
    ).row(0)
    return None not in more and more[0] >= EXPLAINED * more[1]


def _averaged(steps: pl.DataFrame, at: Ints) -> pl.DataFrame:
    """Each step as the mean of its cycle, which ends with a wait."""
    number = np.searchsorted(at, np.arange(steps.height))  # of the cycle that the step is in
    whole = (number > 0) & (number < at.size) & ~np.isin(number, number[_disturbed(steps)])
    apart = int(np.median(np.diff(at)))
    return (
        steps.with_columns(cycle_number=pl.Series(number), is_whole=pl.Series(whole))
        .with_columns(
            time_ns=pl.when("is_whole")
            .then(pl.col("time_ns").mean().over("cycle_number").round().cast(pl.Int64))
            .otherwise(-1),
            cycle=pl.lit(apart, pl.Int64),
        )
        .drop("cycle_number", "is_whole")
    )
