"""Model of how own time grows with the workload, to detect ranks that get larger batches than others.

Takes own times of ranks per step, and the workload of each: the number of elements in its batches. Returns
how own time depends on the workload, own times at equal workloads, and findings of `imbalance.data`, for
which no rank is at fault. Does not find ranks that are slow beyond what their workload explains; these are
found elsewhere, at equal work.

The model of a step's own time is `s (1 - share + share x^power)`: `x` is the workload relative to the typical
one, `s` the slowness of the rank. Part of a step does not grow with the batch (the optimizer), and attention
grows with the square of the length. The share is inferred from how ranks differ *within* a step, beyond how
they always differ: neither a slow rank nor a slow step looks like that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import MAD_TO_SIGMA, Bools, Floats, Ints
from dpro.detect.findings import Finding
from dpro.detect.observations import Observation, observe
from dpro.detect.significance import MIN_COST

WORKLOAD = "step_input_elements"
CLASS = "imbalance.data"
BATCHES = "the ranks' batches"
ELEMENTS = "elements in its batches"
RECEIVED, SHAPES = "bytes from all_to_all", "elements in the inputs of its operators"
EVEN_BATCHES = (
    "give all ranks equal work in each step: group samples by length over many batches, or pack them"
)
COUNTED = {WORKLOAD: ELEMENTS, "step_backward_calls": "backward passes"}  # the better measure first
POWERS = (1.0, 2.0)
MIN_SIGNIFICANCE = 4.5  # standard errors by which time must grow with the workload
MIN_CONTRAST = 10.0  # standard errors of proportional growth above which an insignificant share counts, too
MIN_DIFFERENCES = 6  # degrees of freedom needed to infer the share within steps
NEAREST = 3  # known workloads of a rank whose median replaces an unknown one
LATEST = 40  # steps that a finding covers
OUTLYING = 6.0  # standard deviations at which residuals are clipped
ALWAYS = 0.8  # share of steps above which one rank is named as having the most
MODEL_ERROR = 0.1  # relative error of the time that the workload explains: the model is not more accurate
GUESSED = 0.7  # confidence where workloads differ between ranks but not from step to step
AHEAD = observe("loaded-ahead", "batches are loaded one step ahead")
LOOKS_THE_SAME = observe(
    "slow-or-uneven",
    "the workload of single ranks varies too little from step to step to show what it costs: a rank that is "
    "slow for another reason as well looks the same, up to the square of its larger share",
)
_COARSE = np.linspace(0, 1, 21)
_FINE = np.linspace(-0.05, 0.05, 21)


@dataclass(frozen=True)
class LoadModel:
    """Dependence of own time on the workload.

    Attributes:
        share: share of a typical step that grows with the workload.
        power: power of the workload with which that share grows.
        typical: typical workload.
        significance: standard errors between the growth and none; 0 where that is not known.
        explained: share of the squared log-differences of own time within steps that workloads explain.
        lag: steps between loading and use of a batch: loaders may fetch ahead.
    """

    share: float
    power: float
    typical: float
    significance: float
    explained: float
    lag: int = 0

    def curve(self, workloads: Floats) -> Floats:
        """Return the times of steps with these workloads, relative to that of the typical one."""
        return 1 - self.share + self.share * (workloads / self.typical) ** self.power


@dataclass(frozen=True)
class Uneven:
    """Own times of ranks, and the part that the workload explains.

    Attributes:
        workloads: [T, R]; NaN where unknown.
        own_ns: [T, R] own times, in ns.
        equal_ns: [T, R] own times if all ranks had the step's mean workload, in ns.
        what: the unit that the workloads count.
    """

    model: LoadModel
    workloads: Floats
    own_ns: Floats
    equal_ns: Floats
    what: str = ELEMENTS

    @property
    def explained(self) -> Floats:
        """[R] ns per step that a rank typically works longer (negative: shorter) because of its workloads."""
        return np.median((self.own_ns - self.equal_ns)[-LATEST:], axis=0)


def explain_counted(
    own_ns: Floats, counters: pl.DataFrame, ranks: list[int], start: Ints, steps: Ints
) -> Uneven | None:
    """Infer the part of own times that the counted workload explains; None where it is unknown, or all equal.

    Args:
        own_ns: [T, R] own times, in ns.
        ranks: [R] rank of each column.
        start: [T, R] begin times of steps, in ns.
        steps: [T] step numbers.
    """
    for counter, what in COUNTED.items():
        counted = counters.filter((pl.col("counter") == counter) & (pl.col("value") > 0))
        uneven = explain(own_ns, _workloads_of(counted, ranks, start), steps, what)
        if uneven is not None:
            return uneven
    return None


def _workloads_of(counted: pl.DataFrame, ranks: list[int], start: Ints) -> Floats:
    """Return [T, R] workloads of ranks in steps; NaN where unknown."""
    places = pl.DataFrame(
        {"rank": pl.Series(np.tile(ranks, len(start)), dtype=pl.Int32), "time_ns": start.ravel()}
    )
    counted = counted.select("rank", "time_ns", "value").unique(["rank", "time_ns"])
    joined = places.join(counted, on=["rank", "time_ns"], how="left", maintain_order="left")
    return joined["value"].fill_null(np.nan).to_numpy().reshape(start.shape)


def explain(own_ns: Floats, workloads: Floats, steps: Ints, what: str = ELEMENTS) -> Uneven | None:
    """Infer the part of own times that the workload explains; None where workloads are unknown, or all equal.

    Args:
        own_ns: [T, R] own times, in ns.
        workloads: [T, R] of the batches loaded in the step; NaN where unknown.
        steps: [T] step numbers.
    """
    ahead = np.full_like(workloads, np.nan)
    following = np.diff(steps) == 1
    ahead[1:][following] = workloads[:-1][following]
    model, model_ahead = _fitted(own_ns, workloads, lag=0), _fitted(own_ns, ahead, lag=1)
    needed = 2 * max(MIN_SIGNIFICANCE, model.significance if model else 0.0)
    if model_ahead is not None and model_ahead.significance >= needed:
        model, workloads = model_ahead, ahead
    if model is None or model.share == 0:
        return None
    likely = _with_likely(workloads, model.typical)
    takes, even = model.curve(likely), model.curve(likely.mean(axis=1, keepdims=True))
    return Uneven(model, workloads, own_ns, own_ns * even / takes, what)


def _with_likely(workloads: Floats, typical: float) -> Floats:
    """Return [T, R] workloads, filling unknown ones from the nearest steps: samples may be missing."""
    filled = workloads.copy()
    for column in range(workloads.shape[1]):
        sampled = np.flatnonzero(~np.isnan(workloads[:, column]))
        for row in np.flatnonzero(np.isnan(workloads[:, column])).tolist():
            nearest = sampled[np.argsort(np.abs(sampled - row), kind="stable")[:NEAREST]]
            filled[row, column] = np.median(workloads[nearest, column]) if nearest.size else typical
    return filled


def _fitted(own_ns: Floats, workloads: Floats, lag: int) -> LoadModel | None:
    """Return the model of own times and workloads; None where no workload is known."""
    is_known = ~np.isnan(workloads) & (workloads > 0)
    is_known &= is_known.sum(axis=1, keepdims=True) > 1
    if not is_known.any():
        return None
    typical = float(np.median(workloads[is_known]))
    relative = np.where(is_known, workloads, typical) / typical
    logs = np.log(np.maximum(own_ns, 1.0))
    from_steps = _from_steps(logs, relative, is_known)
    share, power, significance, explained = from_steps or _from_ranks(logs, relative, is_known)
    return LoadModel(share, power, typical, significance, explained, lag)


def _from_steps(logs: Floats, relative: Floats, is_known: Bools) -> tuple[float, float, float, float] | None:
    """Fit share, power, significance and explained share to how ranks differ within steps but not always.

    None where that is inconclusive: workloads differ too little, and time does not clearly follow them.
    """
    freedom = (int(is_known.any(axis=1).sum()) - 1) * (int(is_known.any(axis=0).sum()) - 1)
    times = _centred(logs, is_known)
    growth = _centred(np.log(relative), is_known)
    if freedom < MIN_DIFFERENCES or not growth.any():
        return None
    share, power = _fit_share(times, relative, is_known, of_ranks=True)
    takes = _centred(_log_time(relative, share, power), is_known)
    left = _clip_outliers(times - takes, is_known)
    times = takes + left
    significance = _significance(takes, left, times, freedom) if share else 0.0
    if significance < MIN_SIGNIFICANCE and _significance(growth, left, growth, freedom) < MIN_CONTRAST:
        return None
    return share, power, significance, max(1 - float((left**2).sum() / max((times**2).sum(), 1e-12)), 0.0)


def _from_ranks(logs: Floats, relative: Floats, is_known: Bools) -> tuple[float, float, float, float]:
    """Fit share and power to the typical workload and time of each rank; significance and explained are 0.

    A slow rank looks like one with much work. Time may grow at most with the square of the workload.
    """
    some = np.flatnonzero(is_known.any(axis=0))
    workloads = np.array([[np.median(relative[is_known[:, rank], rank]) for rank in some.tolist()]])
    logs = logs[:, some] - logs[:, some].mean(axis=1, keepdims=True)  # also where samples are missing
    there = np.ones_like(workloads, dtype=bool)
    times = _centred(np.median(logs, axis=0, keepdims=True), there, of_ranks=False)
    relative = workloads / np.median(workloads)  # relative to the typical one, as in `LoadModel`
    share, power = _fit_share(times, relative, there, of_ranks=False)
    return share, power, 0.0, 0.0


def _log_time(relative: Floats, share: float, power: float) -> Floats:
    return np.log(np.maximum(1 - share + share * relative**power, 1e-3))


def _significance(growth: Floats, left: Floats, times: Floats, freedom: int) -> float:
    """Return the slope of times over growth in heteroscedasticity-consistent standard errors (White 1980)."""
    error = np.sqrt(((growth * left) ** 2).sum() * growth.size / max(freedom, 1))
    return float((growth * times).sum() / max(error, 1e-12))


def _fit_share(times: Floats, relative: Floats, is_known: Bools, *, of_ranks: bool) -> tuple[float, float]:
    """Return the share and power whose times have the smallest mean absolute deviation from `times`."""

    def deviation(form: tuple[float, float]) -> float:
        return float(np.abs(times - _centred(_log_time(relative, *form), is_known, of_ranks)).sum())

    coarse, power = min(((share, power) for power in POWERS for share in _COARSE.tolist()), key=deviation)
    fine = np.clip(coarse + _FINE, 0, 1).tolist()
    return min(((share, power) for share in fine), key=deviation)


def _centred(values: Floats, is_known: Bools, of_ranks: bool = True) -> Floats:
    """Return [T, R] values without the means of steps and, if `of_ranks`, of ranks; 0 where unknown."""
    left = np.where(is_known, values, 0.0)
    for _ in range(2):
        for axis in (0, 1) if of_ranks else (1,):
            count = np.maximum(is_known.sum(axis=axis, keepdims=True), 1)
            left = np.where(is_known, left - left.sum(axis=axis, keepdims=True) / count, 0.0)
    return left


def _clip_outliers(left: Floats, is_known: Bools) -> Floats:
    """Return [T, R] residuals, clipped at `OUTLYING` standard deviations."""
    spread = MAD_TO_SIGMA * float(np.median(np.abs(left[is_known])))
    return left.clip(-OUTLYING * spread, OUTLYING * spread)


def describe_uneven_work(uneven: Uneven, cost: float, step: float, ranks: list[int]) -> list[Finding]:
    """Return the finding, if the step would be shorter with balanced work, beyond chance.

    Args:
        cost: ns per step that even work would save.
        step: step time, in ns.
        ranks: [R] rank of each column of `uneven`.
    """
    model = uneven.model
    is_beyond_chance = model.significance >= MIN_SIGNIFICANCE or model.significance == 0
    if not is_beyond_chance or not step or cost < MIN_COST * step:
        return []
    sure = 1 - 1 / model.significance if model.significance else GUESSED
    severity = round(cost / step, 4)
    observations = tuple(_observe(uneven, ranks, cost, step))
    remedy = EVEN_BATCHES if uneven.what in (ELEMENTS, SHAPES) else ""
    return [
        Finding(
            CLASS, "job", BATCHES, tuple(ranks), severity, round(sure, 3), cost, observations, remedy=remedy
        )
    ]


def _observe(uneven: Uneven, ranks: list[int], cost: float, step: float) -> list[Observation]:
    model, workloads = uneven.model, uneven.workloads
    workloads = workloads[(~np.isnan(workloads)).sum(axis=1) > 1]
    most = np.nanmax(workloads, axis=1) / np.nanmean(workloads, axis=1)
    holders = np.nanargmax(workloads, axis=1)
    often = np.bincount(holders, minlength=len(ranks)) / len(holders)
    who = (
        "rank {rank} in {often_share} of the steps" if often.max() >= ALWAYS else "{holders} different ranks"
    )
    has_most = observe(
        "uneven-work",
        f"in each step one rank has more {{what}} than the mean of all, typically by {{more_share}}: {who}",
        what=uneven.what, more_share=float(np.median(most)) - 1, rank=ranks[int(often.argmax())],
        often_share=float(often.max()), holders=int((often > 0).sum()),
    )  # fmt: skip
    grows = observe(
        "grows-with-work",
        f"{{grows_share}} of a typical step grows with {'the square of that' if model.power > 1 else 'that'}",
        grows_share=model.share, power=model.power,
    )  # fmt: skip
    if model.significance:
        sentence = ", which explains {explained_share} of how ranks differ from step to step"
        grows = grows.then(sentence, explained_share=model.explained)
    even = observe(
        "step-without-it",
        "with equal work on each rank, the step would take about {changed_ns} instead of {step_ns}; no rank "
        "is at fault",
        changed_ns=step - cost, step_ns=step,
    )  # fmt: skip
    observations = [has_most, grows, even]
    if model.lag:
        observations.append(AHEAD)
    if not model.significance:
        observations.append(LOOKS_THE_SAME)
    return observations
