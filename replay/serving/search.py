"""Which changes allow the most requests per second while the slowest keep a goal.

In: a fitted server and a goal. Out: sets of changes with the rate of arrivals at which the goal just holds,
the most first. Arrivals come as recorded, only faster or slower, so that bursts stay bursts; the rate is
found by halving. Changes of hardware are not searched: what they cost is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.serving.changes import Server, changed
from dpro.replay.serving.fit import FittedCost
from dpro.replay.serving.predict import answered, figures_of
from dpro.units import NS_PER_S

BUDGETS = (0, 256, 512, 1024, 2048, 8192)
BATCHES = (8, 16, 32, 64, 128, 256, 512)
HALVINGS = 7
FASTEST = 16.0  # times the recorded rate is not looked beyond


@dataclass(frozen=True)
class Goal:
    """What 99% of the requests have to keep; inf where it does not matter.

    Attributes:
        ttft_ms: until the first token.
        tpot_ms: from one token to the next.
    """

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Allowed:
    """Changes, and the most requests per second that keep the goal; 0 where none do."""

    changes: tuple[str, ...]
    requests_per_s: float


def most_requests(requests: pl.DataFrame, fitted: FittedCost, goal: Goal) -> list[Allowed]:
    """Changes by the rate that they allow, the most first: those that gain, and the unchanged server.

    Args:
        requests: as recorded.
        fitted: to them.
        goal: that has to be kept.
    """
    span_ns = int(np.ptp(requests["arrival_ns"].to_numpy()))
    recorded = requests.height / (span_ns / NS_PER_S) if span_ns else np.nan
    found = [
        Allowed(changes, recorded * _fastest(requests, fitted, goal, changes))
        for changes in _candidates(fitted)
    ]
    best: dict[float, Allowed] = {}  # of each rate the fewest changes
    unchanged = found[0].requests_per_s
    for each in sorted(found, key=lambda each: len(each.changes)):
        if each.requests_per_s > unchanged or not each.changes:
            best.setdefault(each.requests_per_s, each)
    return sorted(best.values(), key=lambda each: -each.requests_per_s)


def _candidates(fitted: FittedCost) -> Iterator[tuple[str, ...]]:
    budgets = [
        "",
        *(f"chunked-prefill:tokens={tokens}" for tokens in BUDGETS if tokens != fitted.engine.token_budget),
    ]
    batches = ["", *(f"max-batch:requests={most}" for most in BATCHES if most != fitted.engine.max_requests)]
    for both in product(budgets, batches):
        yield tuple(change for change in both if change)


def _fastest(requests: pl.DataFrame, fitted: FittedCost, goal: Goal, changes: Sequence[str]) -> float:
    """The largest factor of the rate of arrivals that keeps the goal."""
    low, high = 1 / FASTEST, FASTEST
    if not _kept(requests, fitted, goal, changes, low):
        return 0.0
    for _ in range(HALVINGS):
        middle = float(np.sqrt(low * high))
        if _kept(requests, fitted, goal, changes, middle):
            low = middle
        else:
            high = middle
    return low


def _kept(
    requests: pl.DataFrame, fitted: FittedCost, goal: Goal, changes: Sequence[str], rate: float
) -> bool:
    server = Server(requests, fitted.engine, fitted.cost)
    try:
        seen = figures_of(
            answered(reduce(changed, [*changes, f"arrivals:rate={rate}"], server), fitted.delay_s)
        )
    except Unanswerable:  # a request never fits
        return False
    return seen["ttft_p99_ms"] <= goal.ttft_ms and seen["tpot_p99_ms"] <= goal.tpot_ms
