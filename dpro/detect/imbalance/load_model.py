"""Uneven work: ranks that are handed larger batches than others, told from how their time grows with them.

In: own times of ranks per step, and how many elements the batches had that they were handed. Out: how own
time depends on the amount of work, what it would be if all had the same, and findings of `imbalance.data`,
for which nobody is to blame. Who is slow beyond what their work explains is judged elsewhere, at equal work.

A step's own time is taken to be `s (1 - share + share x^power)`: `x` the amount relative to what is typical,
`s` how slow the rank is. Part of a step does not grow with the batch (the optimizer), and attention grows
with the square of the length. The share is told from how ranks differ *within* a step, beyond how they always
do: that neither a slow rank nor a slow step can feign.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import MAD_TO_SIGMA, Bools, Floats, Ints
from dpro.detect.findings import Finding
from dpro.units import format_duration

AMOUNT = "step_input_elements"
CLASS = "imbalance.data"
BATCHES = "the ranks' batches"
ELEMENTS = "elements in its batches"
POWERS = (1.0, 2.0)
CLEAR = 4.5  # standard errors by which time has to grow with the amount
TELLING = 10.0  # standard errors that proportional growth would be, for the share to be told from variation
MIN_DIFFERENCES = 6  # degrees of freedom, likewise
MIN_SHARE = 0.02  # of the step
NEAREST = 3  # known amounts of a rank that stand for one that is not
LATEST = 40  # steps that a finding is about
OUTLYING = 6.0  # standard deviations beyond which what is left unexplained says no more than one there
ALWAYS = 0.8  # of the steps in which the same rank has the most
REST = 0.1  # of what work explains of a rank's time: how that grows with the work is not known better
GUESSED = 0.7  # confidence, where amounts differ between ranks, and never from step to step
_COARSE = np.linspace(0, 1, 21)
_FINE = np.linspace(-0.05, 0.05, 21)


@dataclass(frozen=True)
class LoadModel:
    """How own time depends on the amount of work.

    Attributes:
        share: of a typical step, what grows with the amount.
        power: of the amount with which that grows.
        typical: amount.
        clear: how many standard errors it is from none; 0 where that cannot be told.
        explained: share of the squared log-differences of own time within steps that amounts explain.
        lag: steps after which a batch is worked on: loaders may fetch ahead.
    """

    share: float
    power: float
    typical: float
    clear: float
    explained: float
    lag: int = 0

    def curve(self, amounts: Floats) -> Floats:
        """How long work of these amounts takes, relative to the typical."""
        return 1 - self.share + self.share * (amounts / self.typical) ** self.power


@dataclass(frozen=True)
class Uneven:
    """Own times of ranks, and what of them is due to the amount of work.

    Attributes:
        relation: of time and amount.
        amounts: [T, R]; NaN where unknown.
        own: [T, R] ns.
        equal: [T, R] ns, what own times would be if all ranks had the step's mean amount.
        what: the amounts are of.
    """

    relation: LoadModel
    amounts: Floats
    own: Floats
    equal: Floats
    what: str = ELEMENTS

    @property
    def explained(self) -> Floats:
        """[R] ns per step that a rank typically works longer, or less long, because of its amounts."""
        return np.median((self.own - self.equal)[-LATEST:], axis=0)


def amounts_of(counters: pl.DataFrame, ranks: list[int], start: Ints) -> Floats:
    """[T, R] how much work ranks were handed in steps; NaN where that is not known.

    Args:
        counters: table `counters`.
        ranks: [R] which.
        start: [T, R] ns, when their steps began.
    """
    places = pl.DataFrame(
        {"rank": pl.Series(np.tile(ranks, len(start)), dtype=pl.Int32), "time_ns": start.ravel()}
    )
    counted = counters.filter((pl.col("counter") == AMOUNT) & (pl.col("value") > 0))
    counted = counted.select("rank", "time_ns", "value").unique(["rank", "time_ns"])
    joined = places.join(counted, on=["rank", "time_ns"], how="left", maintain_order="left")
    return joined["value"].fill_null(np.nan).to_numpy().reshape(start.shape)


def explain(own: Floats, amounts: Floats, steps: Ints, what: str = ELEMENTS) -> Uneven | None:
    """What of own times is due to how much work there was; None where amounts are unknown, or all alike.

    Args:
        own: [T, R] ns of work.
        amounts: [T, R] of work handed over in the step, NaN where unknown.
        steps: [T] their numbers.
        what: the amounts are of.
    """
    ahead = np.full_like(amounts, np.nan)
    following = np.diff(steps) == 1
    ahead[1:][following] = amounts[:-1][following]
    told = [_relate(own, given, lag) for lag, given in ((0, amounts), (1, ahead))]
    relation = told[0]
    if told[1] is not None and told[1].clear >= 2 * max(CLEAR, relation.clear if relation else 0.0):
        relation, amounts = told[1], ahead
    if relation is None or relation.share == 0:
        return None
    likely = _with_likely(amounts, relation.typical)
    takes, even = relation.curve(likely), relation.curve(likely.mean(axis=1, keepdims=True))
    return Uneven(relation, amounts, own, own * even / takes, what)


def _with_likely(amounts: Floats, typical: float) -> Floats:
    """[T, R] amounts, where unknown what the rank had in the steps around: samples may be missing."""
    filled = amounts.copy()
    for column in range(amounts.shape[1]):
        known = np.flatnonzero(~np.isnan(amounts[:, column]))
        for row in np.flatnonzero(np.isnan(amounts[:, column])).tolist():
            nearest = known[np.argsort(np.abs(known - row), kind="stable")[:NEAREST]]
            filled[row, column] = np.median(amounts[nearest, column]) if nearest.size else typical
    return filled


def _relate(own: Floats, amounts: Floats, lag: int) -> LoadModel | None:
    """How own time depends on amounts; None where nothing differs."""
    known = ~np.isnan(amounts) & (amounts > 0)
    known &= known.sum(axis=1, keepdims=True) > 1
    if not known.any():
        return None
    typical = float(np.median(amounts[known]))
    relative = np.where(known, amounts, typical) / typical
    logs = np.log(np.maximum(own, 1.0))
    from_steps = _from_steps(logs, relative, known)
    share, power, clear, explained = from_steps or _from_ranks(logs, relative, known)
    return LoadModel(share, power, typical, clear, explained, lag)


def _from_steps(logs: Floats, relative: Floats, known: Bools) -> tuple[float, float, float, float] | None:
    """Share, power, how clear and how much explained, by how ranks differ within steps and not always.

    None where that does not tell: amounts differ too little, and time does not clearly follow them.
    """
    freedom = (int(known.any(axis=1).sum()) - 1) * (int(known.any(axis=0).sum()) - 1)
    times = _centred(logs, known)
    growth = _centred(np.log(relative), known)
    if freedom < MIN_DIFFERENCES or not growth.any():
        return None
    share, power = _share(times, relative, known, of_ranks=True)
    takes = _centred(_log_time(relative, share, power), known)
    left = _without_outliers(times - takes, known)
    times = takes + left
    clear = _clear(takes, left, times, freedom) if share else 0.0
    if clear < CLEAR and _clear(growth, left, growth, freedom) < TELLING:
        return None
    return share, power, clear, max(1 - float((left**2).sum() / max((times**2).sum(), 1e-12)), 0.0)


def _from_ranks(logs: Floats, relative: Floats, known: Bools) -> tuple[float, float, float, float]:
    """The same by what ranks typically have and take: a slow rank is not told from one with much work.

    Time is taken to grow by what fits, and at most with the square of the amount.
    """
    some = np.flatnonzero(known.any(axis=0))
    amounts = np.array([[np.median(relative[known[:, rank], rank]) for rank in some.tolist()]])
    logs = logs[:, some] - logs[:, some].mean(axis=1, keepdims=True)  # also where samples are missing
    there = np.ones_like(amounts, dtype=bool)
    times = _centred(np.median(logs, axis=0, keepdims=True), there, of_ranks=False)
    relative = amounts / np.median(amounts)  # to what is typical, as in `LoadModel`
    share, power = _share(times, relative, there, of_ranks=False)
    return share, power, 0.0, 0.0


def _log_time(relative: Floats, share: float, power: float) -> Floats:
    return np.log(np.maximum(1 - share + share * relative**power, 1e-3))


def _clear(growth: Floats, left: Floats, times: Floats, freedom: int) -> float:
    """By how many of its standard errors times move with growth (White's estimate, Econometrica 1980)."""
    error = np.sqrt(((growth * left) ** 2).sum() * growth.size / max(freedom, 1))
    return float((growth * times).sum() / max(error, 1e-12))


def _share(times: Floats, relative: Floats, known: Bools, *, of_ranks: bool) -> tuple[float, float]:
    """The share and power whose times have the least mean absolute deviation from these."""

    def deviation(form: tuple[float, float]) -> float:
        return float(np.abs(times - _centred(_log_time(relative, *form), known, of_ranks)).sum())

    coarse, power = min(((share, power) for power in POWERS for share in _COARSE.tolist()), key=deviation)
    fine = np.clip(coarse + _FINE, 0, 1).tolist()
    return min(((share, power) for share in fine), key=deviation)


def _centred(values: Floats, known: Bools, of_ranks: bool = True) -> Floats:
    """[T, R] what is left without the means of steps and, if asked, of ranks; 0 where unknown."""
    left = np.where(known, values, 0.0)
    for _ in range(2):
        for axis in (0, 1) if of_ranks else (1,):
            count = np.maximum(known.sum(axis=axis, keepdims=True), 1)
            left = np.where(known, left - left.sum(axis=axis, keepdims=True) / count, 0.0)
    return left


def _without_outliers(left: Floats, known: Bools) -> Floats:
    """[T, R] the same, with what is far off drawn in."""
    spread = MAD_TO_SIGMA * float(np.median(np.abs(left[known])))
    return left.clip(-OUTLYING * spread, OUTLYING * spread)


def describe_uneven_work(uneven: Uneven, cost: float, step: float, ranks: list[int]) -> list[Finding]:
    """Say so if the step would be shorter with work handed out evenly, and that is more than chance.

    Args:
        uneven: own times, and why they differ.
        cost: ns per step that even work would save.
        step: ns that a step takes.
        ranks: [R] of whom.
    """
    relation = uneven.relation
    told = relation.clear >= CLEAR or relation.clear == 0
    if not told or not step or cost < MIN_SHARE * step:
        return []
    sure = 1 - 1 / relation.clear if relation.clear else GUESSED
    severity = round(cost / step, 4)
    evidence = tuple(_evidence(uneven, ranks, cost, step))
    return [Finding(CLASS, "job", BATCHES, tuple(ranks), severity, round(sure, 3), cost, evidence)]


def _evidence(uneven: Uneven, ranks: list[int], cost: float, step: float) -> list[str]:
    relation, amounts = uneven.relation, uneven.amounts
    amounts = amounts[(~np.isnan(amounts)).sum(axis=1) > 1]
    most = np.nanmax(amounts, axis=1) / np.nanmean(amounts, axis=1)
    holders = np.nanargmax(amounts, axis=1)
    often = np.bincount(holders, minlength=len(ranks)) / len(holders)
    who = (
        f"rank {ranks[int(often.argmax())]} in {often.max():.0%} of the steps"
        if often.max() >= ALWAYS
        else f"{int((often > 0).sum())} different ranks"
    )
    grows = "the square of that" if relation.power > 1 else "that"
    lines = [
        f"in each step one rank has more {uneven.what} than the mean of all, typically by "
        f"{np.median(most) - 1:.0%}: {who}",
        f"{relation.share:.0%} of a typical step grows with {grows}"
        + (
            f", which explains {relation.explained:.0%} of how ranks differ from step to step"
            if relation.clear
            else ""
        ),
        f"with as much for each rank, the step would take about {format_duration(step - cost)} instead of "
        f"{format_duration(step)}; no rank is at fault",
    ]
    if relation.lag:
        lines.append("batches are fetched one step ahead")
    if not relation.clear:
        lines.append(
            "how much single ranks have varies too little from step to step to tell what it costs: a rank "
            "that is slow for another reason as well looks the same, up to the square of how much more it has"
        )
    return lines
