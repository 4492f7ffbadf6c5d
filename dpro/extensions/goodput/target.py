"""The time to a target loss, over all restarts of a job: `dpro goodput RUN --target-loss 2.5`.

Reads the losses and steps of each attempt (`dpro record --watch-loss`); returns a `TargetDocument`. Losses
are those of training, averaged over ranks and steps: benchmarks such as AlgoPerf measure the time to a
validation score instead, which a recording does not contain.
"""

from __future__ import annotations

import polars as pl

from dpro.detect.bad_numbers import LOSS
from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.extensions.goodput.attempts import Attempt
from dpro.extensions.goodput.life import JobLife
from dpro.schema import LOSSES
from dpro.units import NS_PER_S

MEAN_STEPS = 20  # steps whose mean counts: single batches differ too much


class TargetDocument(DocumentPart, frozen=True):
    """The time until the training loss, as the mean of 20 steps, first reached a target.

    Attributes:
        loss: the target.
        wall_s: from the start of the job to the end of the step that reached it, restarts included; null if
            none did.
        step: that step of the job; null if none did.
        lowest: the lowest mean of 20 steps.
        lowest_step: the step of the job that ended these.
    """

    loss: float
    wall_s: float | None
    step: int | None
    lowest: float
    lowest_step: int


def time_to_loss(life: JobLife, loss: float) -> TargetDocument:
    """Find when a job first reached a training loss.

    Raises:
        Unanswerable: fewer than 20 steps of every attempt have a loss.
    """
    means = pl.concat([_mean_losses(attempt) for attempt in life.attempts])
    if means.is_empty():
        raise Unanswerable(
            f"--target-loss: no {MEAN_STEPS} steps in a row have a recorded loss: record with "
            "`dpro record --watch-loss`"
        )
    lowest = means.row(int(means["mean"].arg_min() or 0), named=True)
    reached = means.filter(pl.col("mean") <= loss).head(1)
    begin_ns = life.pieces["start_ns"].min()
    return TargetDocument(
        loss=loss,
        wall_s=(reached["end_ns"].item() - begin_ns) / NS_PER_S if reached.height else None,
        step=reached["step"].item() if reached.height else None,
        lowest=lowest["mean"],
        lowest_step=lowest["step"],
    )


def _mean_losses(attempt: Attempt) -> pl.DataFrame:
    """Return `[step, mean, end_ns]` of one attempt: the mean loss of the 20 steps that end with each step."""
    losses = attempt.run.table(LOSSES).filter(pl.col("kind").cast(pl.String) == LOSS, pl.col("step") >= 0)
    ends = attempt.steps.group_by("step").agg(end_ns=(pl.col("start_ns") + pl.col("duration_ns")).max())
    means = losses.group_by("step").agg(pl.col("value").mean()).join(ends, on="step").sort("step")
    rolling = pl.col("value").rolling_mean(MEAN_STEPS)
    step = (pl.col("step") + attempt.first_step).cast(pl.Int64)
    return means.select(step, "end_ns", mean=rolling).filter(pl.col("mean").is_finite())
