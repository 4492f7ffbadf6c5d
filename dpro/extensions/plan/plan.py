"""Ranks all layouts of a job by throughput with an interval; adds its parts, memory, and why some do not fit.

Takes a model, a machine, a framework, layouts and optionally measured steps; returns a frame, starting with
the fastest that fits. All layouts are ranked by the closed form of their pipeline; those that may be among
the fastest are replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import UsageError
from dpro.extensions.plan.layout import COLUMNS, gpus_of, in_words, layouts
from dpro.extensions.plan.memory import memory_of, refusals, verdicts
from dpro.extensions.plan.model import Model, Software
from dpro.extensions.plan.step import TimedLayouts, job_of, step_times
from dpro.replay.cost.machine import SPREADS, Machine, with_factors

REPLAYED = 200  # maximum number of replayed layouts: the fastest by the closed form
PARTS = ("step_ms", "bubble", "exposed_ms")


class MeasuredLayout(NamedTuple):
    """A layout with a measured step: its known columns of `layout.COLUMNS`, and milliseconds."""

    layout: dict[str, int]
    step_ms: float


def plan(
    model: Model,
    rows: pl.DataFrame,
    machine: Machine,
    software: Software,
    measured: Sequence[MeasuredLayout] = (),
    timed: Callable[[pl.DataFrame], TimedLayouts] | None = None,
) -> pl.DataFrame:
    """Rank layouts.

    Args:
        timed: times the work of layouts from recorded layers; by default `step.job_of` does.

    Returns:
        The columns of `rows`; `step_ms`, `low_ms`, `high_ms` (an interval aimed at 90% coverage),
        `tokens_per_s_per_gpu` with `_low` and `_high`, `mfu`, `bubble`, `exposed` (share of the step), 1e9
        bytes by kind of `memory.KINDS` and `memory_gb`, `fits` ("yes", "tight", "no"), `why` (not),
        `replayed`. Layouts that do not fit come last.

    Raises:
        UsageError: a measured step is not a positive number of milliseconds.
    """
    layouts_measured = layouts([step.layout for step in measured]) if measured else rows.clear()
    every = pl.concat([rows.select(list(COLUMNS)), layouts_measured])
    job = timed(every) if timed else job_of(model, every, machine, software)
    parts = memory_of(model, rows, software)
    fit = verdicts(parts, machine)
    refused = refusals(model, rows, software)
    fits = ["no" if why else word for (word, _), why in zip(fit, refused)]
    wanted, times = _times(job, machine, _tokens(model, rows), fits)
    factor, low, high = _calibrated(job, machine, times["step_ms"], measured, rows.height)
    said = times["step_ms"][: rows.height] * factor
    replayed = np.zeros(rows.height, np.bool_)
    replayed[wanted] = True
    rate = 1e3 * _tokens(model, rows) / said
    return (
        rows.with_columns(
            step_ms=said,
            low_ms=said * low,
            high_ms=said * high,
            tokens_per_s_per_gpu=rate,
            tokens_per_s_per_gpu_low=rate / high,
            tokens_per_s_per_gpu_high=rate / low,
            mfu=rate * model.operations_per_token() / (machine.sheet.tflops[software.dtype] * 1e12),
            bubble=times["bubble"][: rows.height],
            exposed=times["exposed_ms"][: rows.height] / times["step_ms"][: rows.height],
            fits=pl.Series(fits),
            why=pl.Series([refusal or why for refusal, (_, why) in zip(refused, fit)]),
            replayed=replayed,
        )
        .hstack(parts)
        .with_columns(layout=pl.Series([in_words(row) for row in rows.iter_rows(named=True)]))
        .sort(pl.col("fits") == "no", -pl.col("tokens_per_s_per_gpu"))
    )


def _times(
    job: TimedLayouts, machine: Machine, tokens: Floats, fits: Sequence[str]
) -> tuple[Ints, dict[str, Floats]]:
    """Return the numbers of replayed rows, and [N] each of `PARTS`; measured rows are replayed, too."""
    bound = step_times(job, machine, replay=False)
    times = {name: bound[name].to_numpy().copy() for name in PARTS}
    ms_per_token = times["step_ms"][: tokens.size] / tokens
    possible = np.array([word != "no" for word in fits])
    order = np.lexsort([ms_per_token, ~possible])
    wanted: Ints = order[:REPLAYED].astype(np.int64)
    row_numbers = np.concatenate([wanted, np.arange(tokens.size, job.rows.height)])
    exact = step_times(replace(job, rows=job.rows[row_numbers], work=job.work[row_numbers]), machine)
    for name in PARTS:
        times[name][row_numbers] = exact[name].to_numpy()
    return wanted, times


def _tokens(model: Model, rows: pl.DataFrame) -> Floats:
    """Return [N] tokens per GPU and step."""
    batch = (rows["dp"] * rows["micro_batch"] * rows["micro_batches"]).to_numpy().astype(np.float64)
    per_gpu: Floats = batch * model.sequence / gpus_of(rows)
    return per_gpu


def _calibrated(
    job: TimedLayouts, machine: Machine, said_ms: Floats, measured: Sequence[MeasuredLayout], height: int
) -> tuple[Floats, Floats, Floats]:
    """Return [height] factors on the prediction, and [height] factors of the interval's low and high end."""
    missed = {}
    for index, step in enumerate(measured):
        if not (np.isfinite(step.step_ms) and step.step_ms > 0):
            raise UsageError(f"a measured step of {step.step_ms} ms: a positive number is needed")
        missed[height + index] = float(np.log(step.step_ms / said_ms[height + index]))
    believed = calibrate(job.rows, sensitivities(job, machine), missed)
    low, high = believed.interval(HOLDS_90)
    return believed.factor[:height], low[:height], high[:height]


# Calibration: what measured steps of some layouts imply for all others, and the uncertainty of predictions.

NUDGE = 0.05  # change of a constant, in log, that gives the slope of a step
# Standard deviations in log of errors shared by all steps of a job, by those with one degree of tensor
# parallelism, by those with its micro-batch, too, and by none; chosen in view of docs/accuracy.md.
JOB, TENSOR, CELL, OWN = 0.07, 0.1, 0.05, 0.08
TAIL = 2.0  # degrees of freedom of the t distribution
MAX_SHIFT = 0.7  # in log: bounds the correction of a prediction
HOLDS_90 = 1.645


@dataclass(frozen=True)
class Beliefs:
    """The calibration of predicted steps of [N] layouts.

    Attributes:
        factor: [N] on the prediction of the model.
        deviation: [N] standard deviation of the remaining error, in log.
    """

    factor: Floats
    deviation: Floats

    def interval(self, deviations: float = HOLDS_90) -> tuple[Floats, Floats]:
        """Return [N] factors on the predicted step for the low and high end of its interval."""
        return np.exp(-deviations * self.deviation), np.exp(deviations * self.deviation)


def sensitivities(job: TimedLayouts, machine: Machine) -> Floats:
    """Return [N, K] slopes of the step by each constant of `SPREADS`, both in log."""
    base = step_times(job, machine, replay=False)["step_ms"].to_numpy()
    columns = [
        np.log(
            step_times(job, with_factors(machine, {name: NUDGE}), replay=False)["step_ms"].to_numpy() / base
        )
        / NUDGE
        for name in SPREADS
    ]
    return np.stack(columns, axis=1)


def covariance(rows: pl.DataFrame, slopes: Floats, columns: Ints) -> Floats:
    """Return [N, n] covariance of errors of all layouts with those of `columns`, without each one's own part.

    Args:
        slopes: [N, K] sensitivities.
    """
    scaled = slopes * np.array(list(SPREADS.values()))
    tensor, batch = rows["tp"].to_numpy(), rows["micro_batch"].to_numpy()
    same = tensor[:, None] == tensor[None, columns]
    cell = same & (batch[:, None] == batch[None, columns])
    together: Floats = scaled @ scaled[columns].T + JOB**2 + TENSOR**2 * same + CELL**2 * cell
    return together


def calibrate(rows: pl.DataFrame, slopes: Floats, measured: dict[int, float]) -> Beliefs:
    """Return the calibration that follows from measured rows, if any.

    Args:
        slopes: [N, K] sensitivities.
        measured: measured over predicted step, in log, by row.
    """
    scaled = slopes * np.array(list(SPREADS.values()))
    spread = (scaled**2).sum(1) + JOB**2 + TENSOR**2 + CELL**2 + OWN**2
    if not measured:
        return Beliefs(np.ones(rows.height), np.sqrt(spread))
    row_numbers = np.array(list(measured))
    missed = np.array(list(measured.values()))
    noise = OWN**2 * np.maximum((TAIL + missed**2 / spread[row_numbers]) / (TAIL + 1), 1.0)
    together = covariance(rows, slopes, row_numbers)  # [N, n]
    weights = np.linalg.solve(together[row_numbers] + np.diag(noise), together.T).T
    shift = np.clip(weights @ missed, -MAX_SHIFT, MAX_SHIFT)
    left = spread - np.einsum("ij,ij->i", weights, together)
    return Beliefs(np.exp(shift), np.sqrt(np.maximum(left, 1e-6)))
