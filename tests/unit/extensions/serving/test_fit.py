"""A cost that served requests is found again from their moments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dpro.errors import Unanswerable
from dpro.extensions.serving.engine import Engine, IterationCost, serve
from dpro.extensions.serving.fit import engine_of, fit_iterations, fit_requests, fit_run
from dpro.schema import ITERATIONS
from dpro.table import complete

TRUTH = IterationCost(1e-3, 1.5e-2, 5e-5, 3e-5, 1e-7, 2e-9)


def arrivals(count: int, per_s: float, seed: int = 0) -> pl.DataFrame:
    """Requests with lengths and arrivals by chance."""
    rng = np.random.default_rng(seed)
    return pl.DataFrame(
        {
            "arrival_ns": np.cumsum(rng.exponential(1e9 / per_s, count)).astype(np.int64),
            "prompt_tokens": rng.integers(50, 1500, count),
            "output_tokens": rng.integers(20, 120, count),
        }
    )


def seconds_off(found: IterationCost, prefill: float, decodes: float, context: float) -> float:
    """Relative error of an iteration."""
    from dpro.extensions.serving.fit import seconds

    held = [np.array([each]) for each in (prefill, decodes, context, prefill * prefill / 2)]
    return abs(float(seconds(found, *held)[0] / seconds(TRUTH, *held)[0]) - 1)


@pytest.mark.slow
def test_cost_of_iterations_is_found_from_moments_of_half_of_the_requests() -> None:
    engine = Engine(token_budget=1024, max_requests=24)
    requests = serve(arrivals(120, 6.0), engine, TRUTH).requests
    fitted = fit_requests(requests, engine, pl.Series(np.arange(120) < 60))
    assert not fitted.engine.ahead
    assert seconds_off(fitted.cost, 0, 16, 16 * 600) < 0.05
    assert seconds_off(fitted.cost, 1000, 16, 16 * 600) < 0.05


def test_engine_that_plans_ahead_is_recognised() -> None:
    engine = Engine(token_budget=1024, max_requests=24, ahead=True)
    requests = serve(arrivals(80, 6.0), engine, TRUTH).requests
    assert fit_requests(requests, replace(engine, ahead=False)).engine.ahead


def test_cost_is_found_from_iterations_that_say_what_they_held() -> None:
    engine = Engine(token_budget=1024, max_requests=24)
    iterations = serve(arrivals(60, 6.0), engine, TRUTH).iterations
    fitted = fit_iterations(iterations, engine)
    assert seconds_off(fitted.cost, 0, 16, 16 * 600) < 0.05
    assert seconds_off(fitted.cost, 800, 0, 0) < 0.1


def test_limits_are_those_that_iterations_show() -> None:
    engine = Engine(token_budget=256, max_requests=4)
    served = serve(arrivals(60, 20.0), engine, TRUTH)
    recorded = served.iterations.with_columns(num_requests=pl.col("decode_tokens") + 1).head(-20)
    shown = engine_of(served.requests, recorded.with_columns(pl.col("num_requests").clip(1, 4)))
    assert (shown.token_budget, shown.max_requests, shown.whole_prompts) == (256, 4, False)


def test_limits_that_never_bound_are_taken_as_none() -> None:
    served = serve(arrivals(60, 0.5), Engine(token_budget=1 << 20, max_requests=99), TRUTH)
    recorded = served.iterations.with_columns(num_requests=pl.col("decode_tokens") + 1, waiting=pl.lit(0))
    shown = engine_of(served.requests, recorded)
    assert shown.max_requests > 1000
    assert shown.whole_prompts


def test_requests_alone_show_how_many_were_served_at_once() -> None:
    served = serve(arrivals(60, 20.0), Engine(max_requests=4), TRUTH)
    assert engine_of(served.requests, ITERATIONS.empty()).max_requests == 4


def test_too_few_requests_are_refused() -> None:
    requests = serve(arrivals(5, 1.0), Engine(), TRUTH).requests
    with pytest.raises(Unanswerable, match="5 requests"):
        fit_run(requests, complete(ITERATIONS, pl.DataFrame()))
