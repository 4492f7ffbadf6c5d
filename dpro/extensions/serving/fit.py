"""Fits the cost of an engine's iterations to its recording.

Takes requests with the times of their first and last tokens, or iterations with their contents, and how the
engine forms its batches. Returns the cost of an iteration, with the uncertainty of each part, and the delay
until the engine knows of a request.

From requests: they are served again (`engine.serve`), and the parts of the cost are varied until the times
match the recording. From iterations, which are preferred where their contents are recorded: their durations
are fitted directly. Parts that the recording hardly determines stay near typical values of language models,
in proportion to the others. Least squares with normal priors and errors give the most probable cost and, from
the curvature, a covariance.

The limits of the engine are those that its recorded iterations show: a limit that never bound is unknown, and
assumed not to exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.optimize import least_squares

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.extensions.serving.engine import TIMES, Engine, IterationCost, ServedRequests, serve
from dpro.units import NS_PER_S

COST_PARTS = ("host_s", "weights_s", "token_s", "request_s", "context_s", "pair_s")
PARTS = (*COST_PARTS, "power", "delay")
MIN_POWER = 1.0
ERROR = 0.02  # of a latency, as a standard deviation of its logarithm
FORM_ERROR = 0.07  # of each part, in the same measure; chosen in view of the pairs in docs/accuracy.md
NOISE = 0.15  # of one iteration, in the same measure
SPREAD = np.log([3, 2, 2, 3, 5, 10, 2, 3])  # standard deviation of each part from its usual value, in log
MAX_SPREADS = 4  # bounds of the parts, in units of `SPREAD`
SMALLEST = 20  # requests or iterations that a fit needs
ROUNDS = 40
MIN_DELAY_S = 1e-6
STEP = 1e-4  # in log, for slopes
HELD = ("prefill_tokens", "decode_tokens", "context_tokens", "prompt_pairs")
STARTS = ((1.0, 1.0), (1.2, 0.7), (0.8, 1.4))  # starting points: factors of the weights and of a token
# Usual values, absolute or as shares of a decode and a token: a token's keys and values are read in 1/100,000
# of the time of the weights; a pair of tokens is multiplied in 1/(6 x hidden size) of the time of a token.
HOST_S, REQUEST_S, DELAY_S = 1e-3, 3e-5, 5e-3
DECODE_SHARE, CONTEXT_SHARE, PAIR_SHARE = 0.8, 8e-6, 4e-5


@dataclass(frozen=True)
class FittedCost:
    """The result of a fit.

    Attributes:
        engine: how it forms batches; the variant that explains the recording best.
        cost: the most probable one.
        delay_s: from the arrival of a request until the engine can schedule it.
        center: [8] logarithms of `PARTS`.
        covariance: [8, 8] of `center`.
        misfit: half the remaining sum of squares, in units of the expected error.
        count: number of requests or iterations fitted.
    """

    engine: Engine
    cost: IterationCost
    delay_s: float
    center: Floats
    covariance: Floats
    misfit: float
    count: int

    def draws(self, count: int, seed: int = 0) -> list[tuple[IterationCost, float]]:
        """Draw costs and delays from the uncertainty that the recording leaves.

        Besides the covariance of the fit, each part varies by `FORM_ERROR`: few numbers represent all
        kernels, so unseen batches take a little more or less than predicted.
        """
        rng = np.random.default_rng(seed)
        form = np.diag([FORM_ERROR**2] * len(COST_PARTS) + [0.0] * (len(PARTS) - len(COST_PARTS)))
        drawn = rng.multivariate_normal(self.center, self.covariance + form, size=count, method="eigh")
        return [_cost(numbers) for numbers in drawn]


def fit_requests(requests: pl.DataFrame, engine: Engine, fitted: pl.Series | None = None) -> FittedCost:
    """Fit the cost of an iteration to requests and the times of their tokens.

    Tries both variants of planning ahead and of reusing blocks of evicted requests, and keeps the best fit.

    Args:
        requests: rows of table `requests` of one engine; all of them are served.
        fitted: [N] bool, requests whose times are compared; all by default.

    Raises:
        Unanswerable: too few requests have all their times and lengths.
    """
    seen = (pl.col("first_token_ns") > pl.col("arrival_ns")) & (pl.col("end_ns") > pl.col("first_token_ns"))
    seen &= pl.col("output_tokens") > 1
    whole = requests.select(seen).to_series()
    chosen = (whole if fitted is None else whole & fitted).to_numpy()
    if chosen.sum() < SMALLEST:
        raise Unanswerable(f"{chosen.sum()} requests have all their moments: {SMALLEST} are needed")
    measured = requests.filter(pl.Series(chosen))
    per_token = (pl.col("end_ns") - pl.col("first_token_ns")) / (pl.col("output_tokens") - 1)
    begun = pl.when(pl.col("scheduled_ns") >= 0).then("scheduled_ns").otherwise("arrival_ns")
    prompt = (pl.col("first_token_ns") - begun) / pl.col("prompt_tokens")
    decode_ns, token_ns = measured.select(per_token.min().alias("decode"), prompt.quantile(0.1)).row(0)
    usual = _usual_parts(max(decode_ns, 1) / NS_PER_S, max(token_ns, 1) / NS_PER_S)
    variants = [(False, True)] * 2 if engine.kv_tokens else [(False, True), (False,)]
    fits = []
    for ahead, keeps in product(*variants):
        variant = replace(engine, ahead=ahead, keeps_blocks=keeps)
        fits.append(_fitted(_moments(requests, chosen, variant), usual, variant, measured.height))
    return min(fits, key=lambda fit: fit.misfit)


def fit_iterations(iterations: pl.DataFrame, engine: Engine) -> FittedCost:
    """Fit the cost of an iteration to iterations and their contents.

    Tries masked and unmasked attention, and keeps the best fit.

    Args:
        iterations: rows of table `iterations` of one rank, with known tokens.

    Raises:
        Unanswerable: too few iterations have recorded contents.
    """
    counted = iterations.filter((pl.col("prefill_tokens") >= 0) & (pl.col("decode_tokens") >= 0))
    if counted.height < SMALLEST:
        raise Unanswerable(f"{counted.height} iterations say what they held: {SMALLEST} are needed")
    tokens = counted["prefill_tokens"].to_numpy()
    lasted = counted["duration_ns"].to_numpy() / NS_PER_S
    decode_s = float(np.quantile(lasted[tokens == 0], 0.2) if (tokens == 0).any() else lasted.min())
    many = (
        tokens > np.median(tokens[tokens > 0]) / 2
        if (tokens > 0).any()
        else np.zeros(len(tokens), dtype=bool)
    )
    token_s = float(np.quantile(lasted[many] / tokens[many], 0.3)) if many.any() else decode_s / 100
    usual = _usual_parts(decode_s, token_s)
    fits = []
    for masked in (False, True):
        moments = _durations(counted, lasted, masked)
        fits.append(_fitted(moments, usual, replace(engine, masked=masked), counted.height))
    return min(fits, key=lambda fit: fit.misfit)


def _durations(iterations: pl.DataFrame, lasted: Floats, masked: bool) -> _Moments:
    """Return errors and slopes of the durations of iterations, [N] s, as `_moments` does for requests."""
    tokens, decodes, keys = (
        iterations[name].to_numpy() for name in ("prefill_tokens", "decode_tokens", "context_tokens")
    )
    keys = np.maximum(keys, 0)
    # In a mixed batch only the total context is known, most of it of prompts.
    context = np.maximum(keys - tokens, 0) * (decodes > 0)
    pairs = (tokens + decodes) * keys if masked else tokens * tokens / 2

    def errors(parts: Floats) -> Floats:
        said = seconds(_cost(parts)[0], tokens, decodes, context, pairs)
        return np.asarray(np.log(said / lasted) / NOISE)

    def slopes(parts: Floats) -> Floats:
        steps = STEP * np.eye(parts.size)
        return np.stack([(errors(parts + step) - errors(parts)) / STEP for step in steps], axis=1)

    return _Moments(errors, slopes)


def seconds(cost: IterationCost, prefill: Floats, decodes: Floats, context: Floats, pairs: Floats) -> Floats:
    """Return [N] seconds of iterations.

    Args:
        prefill: [N] tokens of prompts.
        decodes: [N] requests that decode.
        context: [N] tokens that decodes read.
        pairs: [N] pairs of tokens in the attention of prompts.
    """
    multiplied = cost.token_s * (prefill + cost.per_decode * decodes)
    joined = (cost.weights_s**cost.power + multiplied**cost.power) ** (1 / cost.power)
    attended = cost.context_s * context + cost.pair_s * pairs
    hidden = cost.overlapped * np.minimum(joined, attended)
    times = np.where(prefill > 0, cost.with_prompts, cost.only_decodes)
    return np.asarray(times * (cost.host_s + joined + attended - hidden + cost.request_s * decodes))


def _usual_parts(decode_s: float, token_s: float) -> Floats:
    weights_s = decode_s * DECODE_SHARE
    host_s = min(HOST_S, weights_s / 4)
    parts = (
        host_s,
        weights_s,
        token_s,
        REQUEST_S,
        weights_s * CONTEXT_SHARE,
        token_s * PAIR_SHARE,
        1.0,
        DELAY_S,
    )
    return np.log(parts)


def _cost(parts: Floats) -> tuple[IterationCost, float]:
    """Return the cost and the delay from the logarithms of `PARTS`."""
    host, weights, token, request, context, pair, power, delay = np.exp(parts).tolist()
    return IterationCost(host, weights, token, request, context, pair, MIN_POWER + power), delay


def with_delay(fitted: FittedCost, delay_s: float) -> FittedCost:
    """Set the delay of a fit to iterations, which do not show it, to one that requests show."""
    delay, center, covariance = PARTS.index("delay"), fitted.center.copy(), fitted.covariance.copy()
    center[delay] = np.log(max(delay_s, MIN_DELAY_S))
    covariance[delay, :] = covariance[:, delay] = 0.0
    return replace(fitted, delay_s=delay_s, center=center, covariance=covariance)


def delayed(requests: pl.DataFrame, delay_s: float) -> pl.DataFrame:
    """Delay the arrivals of requests, as the engine sees them."""
    return requests.with_columns(arrival_ns=pl.col("arrival_ns") + round(delay_s * NS_PER_S))


class _Moments(NamedTuple):
    """Errors of times in units of the expected error, and their slopes by `PARTS`."""

    errors: Callable[[Floats], Floats]
    slopes: Callable[[Floats], Floats]


def _moments(requests: pl.DataFrame, chosen: Bools, engine: Engine) -> _Moments:
    """Return errors and slopes of ends, first tokens and the time between them, of the chosen requests [N].

    With a small change of the cost a request may just miss an iteration, so its times jump. Slopes are
    therefore those of the sum of iterations with unchanged contents.
    """
    arrival, first, end = (
        requests[name].to_numpy()[chosen] for name in ("arrival_ns", "first_token_ns", "end_ns")
    )
    per_token = np.median((end - first) / (requests["output_tokens"].to_numpy()[chosen] - 1))
    # The phase of the iteration that runs at an arrival is unknown, so first tokens vary by an iteration.
    units = np.concatenate([
        ERROR * (end - arrival), np.hypot(ERROR * (first - arrival), per_token), ERROR * (end - first)
    ])  # fmt: skip

    def three(first: Floats, end: Floats) -> Floats:
        return np.concatenate([end, first, end - first])

    def served(parts: Floats) -> ServedRequests:
        cost, delay_s = _cost(parts)
        return serve(delayed(requests, delay_s), engine, cost)

    def errors(parts: Floats) -> Floats:
        said = served(parts).requests
        moments = (said[name].to_numpy()[chosen] for name in ("first_token_ns", "end_ns"))
        return np.asarray((three(*moments) - three(first, end)) / units)

    def slopes(parts: Floats) -> Floats:
        first_moved, end_moved = _moved_ns(parts, served(parts))
        return np.asarray(three(first_moved[chosen], end_moved[chosen]) / units[:, None])

    return _Moments(errors, slopes)


def _moved_ns(parts: Floats, served: ServedRequests) -> tuple[Floats, Floats]:
    """Return [N, 8] slopes of first tokens and of ends of requests by the logarithm of each part, in ns."""
    held = [served.iterations[name].to_numpy() for name in HELD]
    here = seconds(_cost(parts)[0], *held)
    total = np.zeros((served.iterations.height + 1, parts.size))  # of the iterations before each
    for part, step in enumerate(STEP * np.eye(parts.size)):
        slower = seconds(_cost(parts + step)[0], *held) - here
        np.cumsum(slower * (NS_PER_S / STEP), out=total[1:, part])
    ends = served.iterations["end_ns"].to_numpy()
    arrival, scheduled, first, end = (served.requests[name].to_numpy() for name in TIMES)
    since, until_first, until_end = (
        np.searchsorted(ends, moment, side="right") for moment in (scheduled, first, end)
    )
    lasts = np.diff(ends, prepend=ends[:1])
    waited = scheduled - arrival > 2 * lasts[np.minimum(since, ends.size - 1)]
    moved = np.zeros((scheduled.size, parts.size))  # of when each was scheduled
    moved[:, PARTS.index("delay")] = np.exp(parts[PARTS.index("delay")]) * NS_PER_S
    # A request that waited was scheduled at the end of another one, and moves with it.
    by_end = np.argsort(end, kind="stable")
    place = np.searchsorted(end[by_end], scheduled, side="right") - 1
    for request in np.argsort(scheduled, kind="stable").tolist():
        if waited[request] and place[request] >= 0:
            other = by_end[place[request]]
            moved[request] = moved[other] + total[since[request]] - total[since[other]]
    return moved + total[until_first] - total[since], moved + total[until_end] - total[since]


def _fitted(moments: _Moments, usual: Floats, engine: Engine, count: int) -> FittedCost:
    """Return the most probable parts of a cost, from several starting points."""
    bounds = (usual - MAX_SPREADS * SPREAD, usual + MAX_SPREADS * SPREAD)

    def residuals(parts: Floats) -> Floats:
        return np.concatenate([moments.errors(parts), (parts - usual) / SPREAD])

    def slopes(parts: Floats) -> Floats:
        return np.concatenate([moments.slopes(parts), np.diag(1 / SPREAD)])

    solutions = []
    for weights, token in STARTS:
        start = usual.copy()
        start[1] += np.log(weights)
        start[2] += np.log(token)
        solutions.append(
            least_squares(
                residuals, start, slopes, bounds=bounds, loss="soft_l1", x_scale=SPREAD, max_nfev=ROUNDS
            )
        )
    best = min(solutions, key=lambda solution: float(solution.cost))
    # The recording with the weights of the robust loss, and the full prior, whose residuals do not reduce its
    # weight: a part at its bound is not less certain.
    seen = moments.slopes(best.x) * (1 + moments.errors(best.x)[:, None] ** 2) ** -0.25
    covariance: Floats = np.linalg.inv(seen.T @ seen + np.diag(SPREAD**-2)).astype(np.float64)
    cost, delay_s = _cost(best.x)
    return FittedCost(engine, cost, delay_s, best.x, covariance, float(best.cost), count)


# The server of a recording: how its engine forms batches, and the cost of its iterations.

NO_LIMIT = 1 << 20  # tokens or requests
KNOWN = (pl.col("prefill_tokens") >= 0) & (pl.col("decode_tokens") >= 0) & (pl.col("num_requests") > 0)


def engine_of(requests: pl.DataFrame, iterations: pl.DataFrame) -> Engine:
    """Return how an engine forms batches, as its iterations show it.

    Args:
        iterations: rows of table `iterations` of one rank.
    """
    counted = iterations.filter(KNOWN)
    if counted.height < SMALLEST:
        return _engine_of_requests(requests)
    crowded = counted.filter(pl.col("waiting") > 0)
    with_prompts = counted.filter(pl.col("prefill_tokens") > 0)
    tokens = counted.select((pl.col("prefill_tokens") + pl.col("decode_tokens")).max()).item()
    cut = with_prompts.height > 1.2 * requests.height  # more iterations with prompts than there are prompts
    mixed = (with_prompts["decode_tokens"] > 0).any()
    return Engine(
        token_budget=tokens if cut else NO_LIMIT,
        max_requests=int(counted["num_requests"].to_numpy().max()) if crowded.height else NO_LIMIT,
        whole_prompts=not cut,
        prompts_first=not mixed and with_prompts.height > 1,
    )


def _engine_of_requests(requests: pl.DataFrame) -> Engine:
    """Return an engine whose limit is the largest number of running requests, if others waited meanwhile."""
    begun, running = _running_at_starts(requests)
    if not begun.size:
        return Engine(max_requests=NO_LIMIT)
    most = running.max()
    waiting = np.searchsorted(np.sort(requests["arrival_ns"].to_numpy()), begun, side="right")
    waiting = waiting - np.arange(1, begun.size + 1)
    binds = bool((waiting[running == most] > 0).any()) and int((running == most).sum()) > 1
    return Engine(max_requests=int(most) if binds else NO_LIMIT)


def most_at_once(requests: pl.DataFrame) -> int:
    """Return the maximum number of running requests; 0 where their times are unknown."""
    return int(_running_at_starts(requests)[1].max(initial=0))


def _running_at_starts(requests: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return [N] times at which requests were scheduled, in ns and in order, and the number running then."""
    if not {"scheduled_ns", "end_ns"} <= set(requests.columns):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    seen = requests.filter((pl.col("scheduled_ns") >= 0) & (pl.col("end_ns") >= 0))
    begun, ended = np.sort(seen["scheduled_ns"].to_numpy()), np.sort(seen["end_ns"].to_numpy())
    return begun, np.arange(1, begun.size + 1) - np.searchsorted(ended, begun, side="right")


def fit_run(requests: pl.DataFrame, iterations: pl.DataFrame, engine: Engine | None = None) -> FittedCost:
    """Fit the server of a recording.

    Args:
        iterations: rows of table `iterations`, of one rank.
        engine: with its limits, where they are known; by default as the recording shows.

    Raises:
        Unanswerable: too little was recorded.
    """
    engine = engine or engine_of(requests, iterations)
    if iterations.filter(KNOWN).height < SMALLEST:
        return fit_requests(requests, engine)
    ordered = iterations.sort("start_ns")
    next_start, next_decodes = pl.col("start_ns").shift(-1), pl.col("decode_tokens").shift(-1)
    cycle = pl.when(next_decodes > 0).then(next_start - pl.col("start_ns")).otherwise("duration_ns")
    fitted = fit_iterations(
        ordered.with_columns(duration_ns=pl.max_horizontal(cycle, "duration_ns").cast(pl.Int64)), engine
    )
    waited = requests.filter(pl.col("scheduled_ns") >= 0).select(
        pl.col("scheduled_ns") - pl.col("arrival_ns")
    )
    least = waited.to_series().quantile(0.1) if waited.height else 0.0
    return with_delay(fitted, max(least or 0.0, 0.0) / NS_PER_S)
