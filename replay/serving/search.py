"""Which changes allow the most requests per second while the slowest keep a goal.

In: a fitted server and a goal. Out: sets of changes with the rate of arrivals at which the goal just holds,
the most first. Arrivals come as recorded, only faster or slower, so that bursts stay bursts; the rate is
found by halving. Of many settings the best one by the fitted cost is often one whose batches were never
recorded, and whose cost is least known: the best few are judged again by costs that are as likely, nine of
ten of which have to keep the goal. Changes of hardware are not searched: what they cost is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

import numpy as np
import polars as pl

from dpro.errors import Unanswerable
from dpro.replay.serving.changes import Server, changed
from dpro.replay.serving.engine import IterationCost
from dpro.replay.serving.fit import COST_PARTS, FittedCost
from dpro.replay.serving.predict import MIN_ERROR, answered, figures_of, moved
from dpro.units import NS_PER_S

BUDGETS = (0, 256, 512, 1024, 2048, 8192)
BATCHES = (8, 16, 32, 64, 128, 256, 512)
HALVINGS = 7
MAX_JUDGED = 8  # sets of changes that are judged by other costs
DRAWS = 10
SURE = 0.9  # of these have to keep the goal
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
    """Changes, and the most requests per second that surely keep the goal; 0 where none do."""

    changes: tuple[str, ...]
    requests_per_s: float


def most_requests(requests: pl.DataFrame, fitted: FittedCost, goal: Goal) -> list[Allowed]:
    """Changes by the rate that they allow, the most first: those that gain, and the unchanged server."""
    span_ns = int(np.ptp(requests["arrival_ns"].to_numpy()))
    recorded = requests.height / (span_ns / NS_PER_S) if span_ns else np.nan
    server, fitted_cost = Server(requests, fitted.engine, fitted.cost), [(fitted.cost, fitted.delay_s)]
    rates = {changes: _fastest(server, fitted_cost, goal, changes) for changes in _candidates(fitted)}
    gaining = sorted((each for each in rates if rates[each] > rates[()]), key=lambda each: -rates[each])
    likely = _likely_costs(fitted)
    found = [
        Allowed(changes, recorded * _fastest(server, likely, goal, changes))
        for changes in [(), *_fewest(gaining, rates)[:MAX_JUDGED]]
    ]
    unchanged = found[0].requests_per_s
    kept = [each for each in found if each.requests_per_s > unchanged or not each.changes]
    return sorted(kept, key=lambda each: (-each.requests_per_s, len(each.changes)))


def _fewest(
    gaining: Sequence[tuple[str, ...]], rates: Mapping[tuple[str, ...], float]
) -> list[tuple[str, ...]]:
    """Of sets that allow the same rate the one with the fewest changes."""
    best: dict[float, tuple[str, ...]] = {}
    for changes in sorted(gaining, key=len):
        best.setdefault(rates[changes], changes)
    return sorted(best.values(), key=lambda changes: -rates[changes])


def _likely_costs(fitted: FittedCost) -> list[tuple[IterationCost, float]]:
    """Costs and delays that are as likely as the fitted one, in a run that is a little faster or slower."""
    other_run = np.random.default_rng(0).normal(0, MIN_ERROR, DRAWS)
    return [
        (moved(cost, [log] * len(COST_PARTS)), delay_s)
        for (cost, delay_s), log in zip(fitted.draws(DRAWS), other_run.tolist(), strict=True)
    ]


def _candidates(fitted: FittedCost) -> Iterator[tuple[str, ...]]:
    budgets = [
        "",
        *(f"chunked-prefill:tokens={tokens}" for tokens in BUDGETS if tokens != fitted.engine.token_budget),
    ]
    own, masked = fitted.engine.max_requests, fitted.engine.masked
    # Masked attention grows with the square of a batch, and faster once keys fill a cache: what larger
    # batches take than the recorded ones does not follow from these (docs/serving.md).
    sizes = [most for most in BATCHES if most < own or (most > own and not masked)]
    batches = ["", *(f"max-batch:requests={most}" for most in sizes)]
    for both in product(budgets, batches):
        yield tuple(change for change in both if change)


def _fastest(
    server: Server, costs: Sequence[tuple[IterationCost, float]], goal: Goal, changes: Sequence[str]
) -> float:
    """The largest factor of the rate of arrivals at which enough of the costs and delays keep the goal."""
    low, high = 1 / FASTEST, FASTEST
    if not _kept(server, costs, goal, changes, low):
        return 0.0
    for _ in range(HALVINGS):
        middle = float(np.sqrt(low * high))
        if _kept(server, costs, goal, changes, middle):
            low = middle
        else:
            high = middle
    return low


def _kept(
    server: Server,
    costs: Sequence[tuple[IterationCost, float]],
    goal: Goal,
    changes: Sequence[str],
    rate: float,
) -> bool:
    allowed = len(costs) - int(np.ceil(SURE * len(costs)))  # may fail
    for cost, delay_s in costs:
        after = reduce(changed, [*changes, f"arrivals:rate={rate}"], replace(server, cost=cost))
        try:
            seen = figures_of(answered(after, delay_s))
        except Unanswerable:  # a request never fits
            return False
        if not (seen["ttft_p99_ms"] <= goal.ttft_ms and seen["tpot_p99_ms"] <= goal.tpot_ms):
            allowed -= 1
        if allowed < 0:
            return False
    return True
