"""Predicts how a changed server would serve requests: first tokens, tokens after it, throughput.

Takes a fitted server and changes; returns each figure as measured, as predicted, and an interval aimed at 90%
coverage. A prediction is the measured figure, changed by the ratio of two simulations, changed and unchanged;
for times that become longer, by their difference: if a server is a little slower than assumed, its service
takes proportionally longer, but that does not determine how long requests queue in addition. For the
interval, both simulations are repeated with other costs: uncertainty of the fitted cost, variation between
runs of the machine, uncertainty of a change, and a limit of the batch that never bound, which may be just
above the largest recorded batch. Each repetition schedules the requests again, so that a few percent of the
cost become a wide interval where a server is close to its limit. The error of the unchanged simulation is
added. A figure that may be less than half or more than twice as large gets its interval only.

A search looks for the changes that allow the most requests per second while the slowest meet a goal. Arrivals
are as recorded, but faster or slower, so that bursts stay bursts; bisection finds the rate. Of many settings,
the best one by the fitted cost is often one whose batches were never recorded, so that its cost is least
certain: therefore the best few are judged again with other likely costs, nine of ten of which must meet the
goal. Changes of hardware are not searched, since their price is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.extensions.serving.changes import NOTHING_GIVEN, GivenFacts, Pools, Server, changed, changed_by_all
from dpro.extensions.serving.engine import IterationCost, serve
from dpro.extensions.serving.fit import COST_PARTS, NO_LIMIT, FittedCost, delayed, most_at_once
from dpro.units import NS_PER_MS, NS_PER_S, format_duration

DRAWS = 40
INTERVAL = (0.05, 0.95)  # quantiles of the draws that bound the interval
SIGMAS = 1.64  # 90% of normal errors
MIN_ERROR = 0.04  # in log: two runs of one server on one machine differ by some percent
MAX_MISSED = 2.0  # factor on the median latency beyond which the simulation does not match the server
MAX_OPEN = 2.0  # factor: a figure with a wider interval has no predicted value


class PredictedFigure(DocumentPart, frozen=True):
    """One figure of a changed server.

    Attributes:
        name: ttft_p50_ms, ttft_p99_ms, tpot_p50_ms, tpot_p99_ms, latency_p50_ms or tokens_per_s.
        measured: of the run; null where some times are unknown.
        predicted: with the changes; null where it may be less than half or more than twice as large, such as
            first tokens of a server near its limit.
        low, high: interval aimed at 90% coverage.
    """

    name: str
    measured: float | None
    predicted: float | None
    low: float
    high: float


def _first_s(requests: pl.DataFrame) -> Floats:
    return (requests["first_token_ns"] - requests["arrival_ns"]).to_numpy() / NS_PER_S


def _per_token_s(requests: pl.DataFrame) -> Floats:
    several = requests.filter(pl.col("output_tokens") > 1)
    if several.is_empty():
        raise Unanswerable("no request has more than one token of output: there is no time per token")
    decoding = (several["end_ns"] - several["first_token_ns"]).to_numpy() / NS_PER_S
    return np.asarray(decoding / (several["output_tokens"].to_numpy() - 1))


def _latency_s(requests: pl.DataFrame) -> Floats:
    return (requests["end_ns"] - requests["arrival_ns"]).to_numpy() / NS_PER_S


def _tokens_per_s(requests: pl.DataFrame) -> float:
    arrival, end, tokens = (requests[name].to_numpy() for name in ("arrival_ns", "end_ns", "output_tokens"))
    return float(tokens.sum() / (end.max() - arrival.min()) * NS_PER_S)


HAS_MOMENTS = (pl.col("first_token_ns") >= 0) & (pl.col("end_ns") >= pl.col("first_token_ns"))
FIGURES: dict[str, Callable[[pl.DataFrame], float]] = {
    "ttft_p50_ms": lambda requests: 1e3 * float(np.median(_first_s(requests))),
    "ttft_p99_ms": lambda requests: 1e3 * float(np.quantile(_first_s(requests), 0.99)),
    "tpot_p50_ms": lambda requests: 1e3 * float(np.median(_per_token_s(requests))),
    "tpot_p99_ms": lambda requests: 1e3 * float(np.quantile(_per_token_s(requests), 0.99)),
    "latency_p50_ms": lambda requests: 1e3 * float(np.median(_latency_s(requests))),
    "tokens_per_s": _tokens_per_s,
}
TIMES_MS = FIGURES.keys() - {"tokens_per_s"}


def figures_of(requests: pl.DataFrame) -> dict[str, float]:
    """Return figures by name, of requests with all their times."""
    return {name: figure(requests) for name, figure in FIGURES.items()}


def served_requests(server: Server, delay_s: float) -> pl.DataFrame:
    """Return the requests with the times that a server gives them.

    Raises:
        Unanswerable: a request never fits.
    """
    later = delayed(server.requests, delay_s)
    served = (
        _in_pools(later, server, server.pools)
        if server.pools
        else serve(later, server.engine, server.cost)[0]
    )
    back = pl.col("arrival_ns") - round(delay_s * NS_PER_S)
    return served.with_columns(back)


def _in_pools(requests: pl.DataFrame, server: Server, pools: Pools) -> pl.DataFrame:
    """Serve prompts in some engines, then send their keys and values to others that decode."""
    engine = replace(server.engine, replicas=pools.prefill)
    first = serve(requests.with_columns(output_tokens=pl.lit(1)), engine, server.cost).requests
    sent_s = pl.col("prompt_tokens") * (pools.kv_bytes / (pools.gbps * 1e9))
    there = (pl.col("end_ns") + sent_s * NS_PER_S).round().cast(pl.Int64)
    rest = requests.with_columns(
        first.select(there.alias("arrival_ns")).to_series(),
        # The prefill engine gave the first token; others are decoded from the keys and values it sent.
        prompt_tokens=pl.col("prompt_tokens") + 1,
        cached_tokens=pl.col("prompt_tokens"),
        output_tokens=(pl.col("output_tokens") - 1).clip(1),
    )
    decoded = serve(rest, replace(server.engine, replicas=pools.decode), server.cost).requests
    end = pl.when(pl.col("output_tokens") > 1).then(decoded["end_ns"]).otherwise(first["end_ns"])
    return requests.with_columns(first["scheduled_ns"], first["first_token_ns"], end_ns=end.cast(pl.Int64))


def predict(
    requests: pl.DataFrame, fitted: FittedCost, changes: Sequence[str], given: GivenFacts = NOTHING_GIVEN
) -> list[PredictedFigure]:
    """Predict the figures of a changed server.

    Args:
        requests: as recorded; figures follow from the requests with known times.

    Raises:
        UsageError: there is no such change.
        Unanswerable: a request never fits, a change needs an unknown fact, or the simulation of the unchanged
            server does not match the recording.
    """
    before = Server(requests, fitted.engine, fitted.cost, given=given)
    after = changed_by_all(before, changes)
    seen = requests.select(HAS_MOMENTS).to_series()
    pinned = bool((seen & (requests["output_tokens"] > 1)).any())
    measured = figures_of(requests.filter(seen)) if pinned else {}
    same, other = (served_requests(served, fitted.delay_s) for served in (before, after))
    point = Pair(figures_of(same.filter(seen)) if pinned else {}, figures_of(other))
    if pinned:
        _ensure_as_recorded(measured, point.before)
    drawn = [
        Pair(
            figures_of(served_requests(base, delay_s).filter(seen)) if pinned else {},
            figures_of(served_requests(changed_, delay_s)),
        )
        for base, changed_, delay_s in likely_servers(before, fitted, changes, DRAWS)
    ]
    return [_figure(name, measured.get(name), point, drawn, is_measured=bool(seen.all())) for name in FIGURES]


class Pair(NamedTuple):
    """Figures of two simulations with one cost: before, of requests with known times, and after."""

    before: Mapping[str, float]
    after: Mapping[str, float]

    def said(self, name: str, measured: float | None) -> float:
        """Return a figure after the change, corrected such that the figure before is the measured one."""
        if measured is None:
            return self.after[name]
        was, becomes = self.before[name], self.after[name]
        if name in TIMES_MS and becomes > was:
            return measured + becomes - was
        return measured * becomes / was


def _figure(
    name: str, measured: float | None, point: Pair, drawn: Sequence[Pair], *, is_measured: bool
) -> PredictedFigure:
    """Return a figure with its interval.

    Args:
        measured: of the requests with known times; None where there are none.
        is_measured: whether these are all requests.
    """
    said = point.said(name, measured)
    missed = 0.0 if measured is None else SIGMAS * float(np.log(point.before[name] / measured))
    least, most = np.log(np.quantile([pair.said(name, measured) for pair in drawn], INTERVAL) / said)
    down, up = (float(np.hypot(max(width, SIGMAS * MIN_ERROR), missed)) for width in (-least, most))
    is_open = max(down, up) > np.log(MAX_OPEN)
    return PredictedFigure(
        name,
        measured if is_measured else None,
        None if is_open else said,
        said * np.exp(-down),
        said * np.exp(up),
    )


def ensure_served_as_recorded(requests: pl.DataFrame, fitted: FittedCost) -> None:
    """Raise if the fitted server does not reproduce the measured latency, where all requests have one.

    Raises:
        Unanswerable: it does not.
    """
    if requests.select(HAS_MOMENTS.all()).item():
        before = Server(requests, fitted.engine, fitted.cost)
        _ensure_as_recorded(figures_of(requests), figures_of(served_requests(before, fitted.delay_s)))


def _ensure_as_recorded(measured: Mapping[str, float], same: Mapping[str, float]) -> None:
    """Raise if the simulated median latency is far from the measured one, so that its ratios mean nothing.

    Raises:
        Unanswerable: it is.
    """
    was, said = measured["latency_p50_ms"], same["latency_p50_ms"]
    if max(was / said, said / was) > MAX_MISSED:
        raise Unanswerable(
            f"served again by an unchanged engine, requests take {format_duration(said * NS_PER_MS)} in the "
            f"median, and {format_duration(was * NS_PER_MS)} were measured: what limits this engine is not "
            "known; give what its log says (--max-requests, --token-budget, --kv-tokens)"
        )


def likely_servers(
    before: Server, fitted: FittedCost, changes: Sequence[str], count: int
) -> Iterator[tuple[Server, Server, float]]:
    """Yield unchanged and changed servers, and the delay, with randomly drawn costs and limits."""
    rng = np.random.default_rng(0)
    seen = most_at_once(before.requests)
    is_unknown = seen > 0 and fitted.engine.max_requests >= NO_LIMIT
    for number, (cost, delay_s) in enumerate(fitted.draws(count)):
        # A limit that never bound is the largest batch or more; draws alternate between both ends.
        limit = seen if is_unknown and number % 2 else fitted.engine.max_requests
        base = replace(before, cost=cost, engine=replace(before.engine, max_requests=limit))
        after = changed_by_all(base, changes)
        other_run = rng.normal(0, MIN_ERROR) + rng.normal(0, after.doubt, len(COST_PARTS))
        yield base, replace(after, cost=moved(after.cost, other_run)), delay_s


def moved(cost: IterationCost, logs: Floats | Sequence[float]) -> IterationCost:
    """Multiply each part of a cost by exp(log).

    Args:
        logs: [6] of `COST_PARTS`.
    """
    factors = dict(zip(COST_PARTS, np.exp(logs).tolist(), strict=True))
    return replace(cost, **{part: getattr(cost, part) * factor for part, factor in factors.items()})


# The search for changes that allow the most requests per second while the slowest meet a goal.

BUDGETS = (0, 256, 512, 1024, 2048, 8192)
BATCHES = (8, 16, 32, 64, 128, 256, 512)
HALVINGS = 7
MAX_JUDGED = 8  # sets of changes that are judged with other costs
FEW_DRAWS = 10
SURE = 0.9  # of the draws must meet the goal
FASTEST = 16.0  # maximum factor on the recorded rate, and inverse of the minimum


@dataclass(frozen=True)
class Goal:
    """Maximum times of 99% of the requests; inf for no limit.

    Attributes:
        ttft_ms: until the first token.
        tpot_ms: per output token after the first.
    """

    ttft_ms: float
    tpot_ms: float


@dataclass(frozen=True)
class Allowed:
    """Changes, and the maximum requests per second that surely meet the goal; 0 where none do."""

    changes: tuple[str, ...]
    requests_per_s: float


def most_requests(requests: pl.DataFrame, fitted: FittedCost, goal: Goal) -> list[Allowed]:
    """Rank changes by the rate that they allow, the most first: those that gain, and the unchanged server."""
    span_ns = int(np.ptp(requests["arrival_ns"].to_numpy()))
    recorded = requests.height / (span_ns / NS_PER_S) if span_ns else np.nan
    server, fitted_cost = Server(requests, fitted.engine, fitted.cost), [(fitted.cost, fitted.delay_s)]
    rates = {changes: _fastest(server, fitted_cost, goal, changes) for changes in _candidates(fitted)}
    gaining = sorted(
        (changes for changes in rates if rates[changes] > rates[()]), key=lambda changes: -rates[changes]
    )
    # Costs and delays from the uncertainty of the fit, in runs that are a little faster or slower.
    other_run = np.random.default_rng(0).normal(0, MIN_ERROR, FEW_DRAWS)
    likely = [
        (moved(cost, [log] * len(COST_PARTS)), delay_s)
        for (cost, delay_s), log in zip(fitted.draws(FEW_DRAWS), other_run.tolist(), strict=True)
    ]
    allowed = [
        Allowed(changes, recorded * _fastest(server, likely, goal, changes))
        for changes in [(), *_fewest(gaining, rates)[:MAX_JUDGED]]
    ]
    unchanged = allowed[0].requests_per_s
    kept = [change for change in allowed if change.requests_per_s > unchanged or not change.changes]
    return sorted(kept, key=lambda change: (-change.requests_per_s, len(change.changes)))


def _fewest(
    gaining: Sequence[tuple[str, ...]], rates: Mapping[tuple[str, ...], float]
) -> list[tuple[str, ...]]:
    """Return the set with the fewest changes for each allowed rate, highest rate first."""
    best: dict[float, tuple[str, ...]] = {}
    for changes in sorted(gaining, key=len):
        best.setdefault(rates[changes], changes)
    return sorted(best.values(), key=lambda changes: -rates[changes])


def _candidates(fitted: FittedCost) -> Iterator[tuple[str, ...]]:
    budgets = [
        "",
        *(f"chunked-prefill:tokens={tokens}" for tokens in BUDGETS if tokens != fitted.engine.token_budget),
    ]
    most_now, masked = fitted.engine.max_requests, fitted.engine.masked
    # Masked attention grows with the square of a batch, and faster once keys fill a cache: recorded batches
    # do not predict larger ones (docs/accuracy.md).
    sizes = [most for most in BATCHES if most < most_now or (most > most_now and not masked)]
    batches = ["", *(f"max-batch:requests={most}" for most in sizes)]
    for pair in product(budgets, batches):
        yield tuple(change for change in pair if change)


def _fastest(
    server: Server, costs: Sequence[tuple[IterationCost, float]], goal: Goal, changes: Sequence[str]
) -> float:
    """Return the largest factor on the rate of arrivals at which enough costs and delays meet the goal."""
    low, high = 1 / FASTEST, FASTEST
    if not _meets_goal(server, costs, goal, changes, low):
        return 0.0
    for _ in range(HALVINGS):
        middle = float(np.sqrt(low * high))
        if _meets_goal(server, costs, goal, changes, middle):
            low = middle
        else:
            high = middle
    return low


def _meets_goal(
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
            seen = figures_of(served_requests(after, delay_s))
        except Unanswerable:  # a request never fits
            return False
        if not (seen["ttft_p99_ms"] <= goal.ttft_ms and seen["tpot_p99_ms"] <= goal.tpot_ms):
            allowed -= 1
        if allowed < 0:
            return False
    return True
