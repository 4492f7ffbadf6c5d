"""What measured steps of some layouts say about all others, and how sure each prediction is.

In: sensitivities of the step to the machine's constants (`machine.SPREADS`), and measured steps. Out: a
factor and an interval per layout. Logarithms of misses are taken to be normal: those of two layouts go
together as far as both depend on the same constants, are of the same job, and have the same tensor
parallelism and micro-batch. A measured row then moves every other one by the regression on its own miss
(kriging; Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, eq. 2.25, 2.26). A row far
from what is expected counts less, as rows of a Student t distribution do: a stalled step is no sign of slow
matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.replay.layouts.inputs.machine import SPREADS, Machine, moved
from dpro.replay.layouts.step import TimedLayouts, step_times

NUDGE = 0.05  # of a logarithm, to see how a step depends on a constant
# Standard deviations in log: of all steps of a job, of those of one tensor parallelism, of those that share
# the micro-batch with it, of each alone. Set with the tables of docs/reality.md in sight.
JOB, TENSOR, CELL, OWN = 0.07, 0.1, 0.05, 0.08
TAIL = 2.0  # degrees of freedom of the t distribution
MAX_SHIFT = 0.7  # of a logarithm: no row moves a prediction by more
HOLDS_90 = 1.645


@dataclass(frozen=True)
class Beliefs:
    """What is believed of the steps of [N] layouts.

    Attributes:
        factor: [N] on what the model says.
        deviation: [N] standard deviation of the logarithm of what is left.
    """

    factor: Floats
    deviation: Floats

    def interval(self, deviations: float = HOLDS_90) -> tuple[Floats, Floats]:
        """[N] factors that the interval begins and ends with, of the predicted step."""
        return np.exp(-deviations * self.deviation), np.exp(deviations * self.deviation)


def sensitivities(job: TimedLayouts, machine: Machine) -> Floats:
    """[N, K] by how much the step changes with each constant of `SPREADS`, both in log."""
    base = step_times(job, machine, replay=False)["step_ms"].to_numpy()
    columns = [
        np.log(step_times(job, moved(machine, {name: NUDGE}), replay=False)["step_ms"].to_numpy() / base)
        / NUDGE
        for name in SPREADS
    ]
    return np.stack(columns, axis=1)


def covariance(rows: pl.DataFrame, slopes: Floats, at: Ints) -> Floats:
    """[N, n] how misses of layouts go together with those of some, without what belongs to each alone.

    Args:
        slopes: [N, K] sensitivities.
    """
    scaled = slopes * np.array(list(SPREADS.values()))
    tensor, batch = rows["tp"].to_numpy(), rows["micro_batch"].to_numpy()
    same = tensor[:, None] == tensor[None, at]
    cell = same & (batch[:, None] == batch[None, at])
    together: Floats = scaled @ scaled[at].T + JOB**2 + TENSOR**2 * same + CELL**2 * cell
    return together


def beliefs(rows: pl.DataFrame, slopes: Floats, measured: dict[int, float]) -> Beliefs:
    """What follows from measured rows, or from none.

    Args:
        slopes: [N, K] sensitivities.
    """
    scaled = slopes * np.array(list(SPREADS.values()))
    spread = (scaled**2).sum(1) + JOB**2 + TENSOR**2 + CELL**2 + OWN**2
    if not measured:
        return Beliefs(np.ones(rows.height), np.sqrt(spread))
    at = np.array(list(measured))
    missed = np.array(list(measured.values()))
    noise = OWN**2 * np.maximum((TAIL + missed**2 / spread[at]) / (TAIL + 1), 1.0)
    together = covariance(rows, slopes, at)  # [N, n]
    weights = np.linalg.solve(together[at] + np.diag(noise), together.T).T
    shift = np.clip(weights @ missed, -MAX_SHIFT, MAX_SHIFT)
    left = spread - np.einsum("ij,ij->i", weights, together)
    return Beliefs(np.exp(shift), np.sqrt(np.maximum(left, 1e-6)))
