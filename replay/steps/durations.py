"""How long each step of a run took, also where hosts run ahead of GPUs that timed nothing.

In: a run. Out: table `steps` with the columns of `dpro.timed.with_times`.

In runs on GPUs whose timing events are missing (older recordings, traces) hosts that run ahead show by their
synchronisation schedule: many short steps, and at a regular distance a long one, which waits for all that was
enqueued. Of these only the mean over such a cycle is known.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
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
    if not any(at.size for at in waits.values()):
        return steps
    facts = host_facts(steps, read_counters())
    for rank, at in waits.items():
        if at.size and not _is_aside(parts[rank], at, facts):
            parts[rank] = _averaged(parts[rank], at)
    return pl.concat(parts.values()).sort(STEPS.sort_by, maintain_order=True)


def _disturbed(steps: pl.DataFrame) -> Bools:
    """Which steps are no measure of others; none if all are so."""
    found: Bools = steps.select(disturbed(steps)).to_series().to_numpy()
    return np.asarray(found & ~found.all())


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
