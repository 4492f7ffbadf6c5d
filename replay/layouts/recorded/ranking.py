"""Layouts of a recorded job, ranked, and its own.

In: a recorded job, and what to rank. Out: frames as from `plan.plan`. The run's own layout calibrates all,
so that it comes out at its measured step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf

import polars as pl

from dpro.replay.layouts.layout import COLUMNS, RECOMPUTE, USUAL_SCHEDULES, candidates, gpus_of
from dpro.replay.layouts.machine import Machine
from dpro.replay.layouts.plan import MeasuredLayout, plan
from dpro.replay.layouts.recorded.job import RecordedJob

SELECTIVE = RECOMPUTE.index("selective")
SHARDED = 3  # stage of ZeRO that shards parameters


def ranked(
    job: RecordedJob,
    gpus: int,
    global_batch: int,
    keep: Mapping[str, int] | None = None,
    measured: Sequence[MeasuredLayout] = (),
    schedules: Sequence[str] = USUAL_SCHEDULES,
) -> pl.DataFrame:
    """Rank all layouts of a recorded job.

    Args:
        gpus: how many it may have.
        keep: values of columns that stay as given.
    """
    keep = dict(keep or {})
    rows = candidates(job.model, gpus, job.machine.per_host, global_batch, keep, schedules)
    if job.software.flash and "recompute" not in keep:
        rows = rows.filter(pl.col("recompute") != SELECTIVE)
    unsharded = min(int(job.own["zero"][0]), SHARDED - 1)  # as the job's framework has it
    if "zero" not in keep:
        kept = pl.when(pl.col("zero") < SHARDED).then(unsharded).otherwise(pl.col("zero"))
        rows = rows.with_columns(zero=kept.cast(pl.Int64))
    if (
        gpus == job.ranks
        and global_batch == job.global_batch
        and all(int(job.own[name][0]) == value for name, value in keep.items())
    ):
        rows = pl.concat([rows, job.own.select(rows.columns)])
    return _planned(job, rows.unique(maintain_order=True), measured)


def own_layout(job: RecordedJob) -> pl.DataFrame:
    """The run's own layout, as `ranked` has it."""
    return _planned(job, job.own, ())


def _planned(job: RecordedJob, rows: pl.DataFrame, measured: Sequence[MeasuredLayout]) -> pl.DataFrame:
    own = {name: int(job.own[name][0]) for name in COLUMNS}
    known = [MeasuredLayout(own, job.step_ms), *measured]
    found = plan(job.model, rows, with_memory(job), job.software, known, job.timed)
    return found if job.on_gpu else found.with_columns(mfu=pl.lit(None, pl.Float64))


def with_memory(job: RecordedJob) -> Machine:
    """The job's machine; where its memory is not known, everything fits."""
    return replace(job.machine, memory_gb=job.machine.memory_gb or inf)


def is_own(job: RecordedJob) -> pl.Expr:
    """Which rows are the run's own layout."""
    same = [pl.col(name) == int(job.own[name][0]) for name in COLUMNS]
    return pl.all_horizontal(same)


def usual_batch(job: RecordedJob, gpus: int) -> int:
    """Sequences of a step where each rank keeps as many as it has."""
    return max(round(job.global_batch * gpus / int(gpus_of(job.own)[0])), 1)
