"""What the host did in each step, windows or not: waiting for data, collecting garbage, waiting for a core.

In: tables `steps` and `counters` as the recorder leaves them. Out: frames, null where nothing was measured.
Nothing here is predicted; which rank is at fault is found in `dpro.detect`.
"""

from __future__ import annotations

import polars as pl

FACTS = {  # counter of a step -> column
    "step_data_wait_ns": "data_wait_ns",
    "step_gc_ns": "gc_ns",
    "step_run_queue_ns": "run_queue_ns",
    "step_training_thread_cpu_ns": "training_thread_cpu_ns",
    "step_cpu_ns": "cpu_ns",
    "step_backward_calls": "backward_calls",
    "step_checkpoint_ns": "checkpoint_ns",
    "step_no_grad_ns": "no_grad_ns",
    "step_compile_ns": "compile_ns",
}


def host_facts(steps: pl.DataFrame, counters: pl.DataFrame) -> pl.DataFrame:
    """What is known of each step.

    Args:
        steps: table `steps`.
        counters: table `counters`; those about steps carry the start of theirs.

    Returns:
        `[rank, step, duration_ns]` and the columns of `FACTS` (ns or a count, Float64), sorted by rank and
        step; no rows where nothing is known of any step.
    """
    samples = counters.filter(pl.col("counter").is_in(list(FACTS)))
    if samples.is_empty():
        steps = steps.clear()
    columns = [
        pl.col("value").filter(pl.col("counter") == counter).first().alias(column)
        for counter, column in FACTS.items()
    ]
    wide = samples.group_by("rank", pl.col("time_ns").alias("start_ns")).agg(columns)
    joined = steps.join(wide, on=["rank", "start_ns"], how="left")
    return joined.select("rank", "step", "duration_ns", *FACTS.values()).sort("rank", "step")


def per_rank(facts: pl.DataFrame) -> pl.DataFrame:
    """The mean step of each rank: `[rank, steps, duration_ns]` and the columns of `FACTS`, Float64.

    A time that was measured in some steps only, such as the wait for a core in the longer ones, is the same
    share of the mean step as it is of those: their mean alone could be more than a step.
    """
    times = [column for column in FACTS.values() if column.endswith("_ns")]
    duration = pl.col("duration_ns")
    shares = [_as_large_a_share(name) for name in times]
    means = [duration.mean(), *shares, pl.col("backward_calls").mean()]
    shown = ["rank", "steps", "duration_ns", *FACTS.values()]
    return (
        facts.group_by("rank").agg(pl.len().cast(pl.Int64).alias("steps"), *means).select(shown).sort("rank")
    )


def _as_large_a_share(name: str) -> pl.Expr:
    """Of the mean step, of what the steps in which it was measured say; null where there are none."""
    duration, is_sampled = pl.col("duration_ns"), pl.col(name).is_not_null()
    share = pl.col(name).sum() / duration.filter(is_sampled).sum()
    return pl.when(is_sampled.any()).then(share * duration.mean()).alias(name)
