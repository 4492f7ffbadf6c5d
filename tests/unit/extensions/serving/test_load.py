"""Servers on either side of what they can do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.extensions.serving.changes import Server
from dpro.extensions.serving.engine import Engine, IterationCost, serve
from dpro.extensions.serving.fit import NO_LIMIT, SPREAD, FittedCost, engine_of, fit_requests, most_at_once
from dpro.extensions.serving.outlook import load_of, served_per_s
from dpro.extensions.serving.predict import PredictedFigure, figures_of, predict
from dpro.schema import ITERATIONS
from tests.unit.extensions.serving.test_fit import TRUTH, arrivals

S = 1_000_000_000
ONE_AT_A_TIME = Engine(max_requests=1)
SECOND = IterationCost(1.0, 1e-9, 1e-9)  # two iterations a request: one for the prompt, one for a decode
KNOWN = FittedCost(
    ONE_AT_A_TIME, SECOND, 0.0, np.log([1.0, *[1e-9] * 7]), np.zeros((8, 8)), misfit=0.0, count=1
)


def every(seconds: float, count: int = 41) -> pl.DataFrame:
    """Requests of two tokens at equal distances, as a server that takes two seconds for each serves them."""
    sent = pl.DataFrame(
        {
            "arrival_ns": (np.arange(count) * seconds * S).astype(np.int64),
            "prompt_tokens": [1] * count,
            "output_tokens": [2] * count,
        }
    )
    return serve(sent, ONE_AT_A_TIME, SECOND).requests


def first_token(requests: pl.DataFrame, *changes: str, fitted: FittedCost = KNOWN) -> PredictedFigure:
    return {each.name: each for each in predict(requests, fitted, changes)}["ttft_p50_ms"]


def test_two_seconds_for_each_request_are_half_a_request_per_second() -> None:
    assert served_per_s(Server(every(4.0), ONE_AT_A_TIME, SECOND)) == pytest.approx(0.5)
    batch = Server(every(4.0, 40), Engine(max_requests=4), SECOND)  # four at once take no longer than one
    assert served_per_s(batch) == pytest.approx(2.0)


def test_below_capacity_first_tokens_take_their_prompt_and_nothing_is_said() -> None:
    load = load_of(every(8.0), KNOWN, ["arrivals:rate=2"])
    assert load is not None
    assert (load.arrivals_per_s, load.most_recorded) == (0.25, None)
    assert 0.4 < load.low_per_s < 0.5 < load.high_per_s < 0.6
    assert load.sentences == []
    assert first_token(every(8.0), "arrivals:rate=2").predicted == pytest.approx(1000.0)


def test_above_capacity_each_waits_longer_than_the_one_before() -> None:
    # One more each second, two seconds each: the k-th waits k seconds, the middle one of 41 20.
    said = first_token(every(8.0), "arrivals:rate=8")
    assert said.predicted == pytest.approx(21_000.0)
    assert said.low < 21_000.0 < said.high
    load = load_of(every(8.0), KNOWN, ["arrivals:rate=8"])
    assert load is not None
    assert load.sentences[0].startswith("1 requests/s arrive, and it can serve 0.4")
    assert "each waits longer than the one before" in load.sentences[0]


def test_at_capacity_whether_requests_queue_is_not_known_and_there_is_no_point() -> None:
    said = first_token(every(8.0), "arrivals:rate=4")
    assert said.predicted is None
    assert said.low < 1000.0
    assert said.high > 2000.0
    load = load_of(every(8.0), KNOWN, ["arrivals:rate=4"])
    assert load is not None
    assert load.sentences == [f"0.5 requests/s arrive, and it can serve {load.low_per_s:.3g} to "
                              f"{load.high_per_s:.3g}: it is uncertain whether they queue up"]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(rates=st.lists(st.floats(1.0, 12.0), min_size=2, max_size=2, unique=True), count=st.integers(3, 30))
def test_more_load_never_narrows_the_interval_of_the_first_token(rates: list[float], count: int) -> None:
    # At equal distances the order of waits is that of the requests, so that the median is of one request.
    recorded = every(8.0, count)
    widths = [
        said.high - said.low
        for said in (first_token(recorded, f"arrivals:rate={rate}") for rate in sorted(rates))
    ]
    assert widths[1] >= widths[0] * (1 - 1e-6)


def test_clients_that_wait_for_answers_cannot_send_too_much() -> None:
    assert load_of(every(4.0), KNOWN, ["clients:count=9"]) is None
    assert load_of(every(4.0).with_columns(arrival_ns=pl.lit(0, pl.Int64)), KNOWN, []) is None


def test_batch_larger_than_any_recorded_may_not_be_allowed() -> None:
    limited = Engine(max_requests=6)
    recorded = serve(arrivals(60, 1.5), limited, TRUTH).requests
    seen = engine_of(recorded, ITERATIONS.empty())
    assert (seen.max_requests, most_at_once(recorded)) == (NO_LIMIT, 5)
    fitted = fit_requests(recorded, replace(seen, token_budget=limited.token_budget))
    actual = figures_of(serve(arrivals(60, 1.5 * 6), limited, TRUTH).requests)
    said = first_token(recorded, "arrivals:rate=6", fitted=fitted)
    assert said.predicted is None
    assert said.low < actual["ttft_p50_ms"] < said.high
    load = load_of(recorded, fitted, ["arrivals:rate=6"])
    assert load is not None
    assert load.most_recorded == 5
    assert "give --max-requests" in load.sentences[-1]
    given_limit = replace(fitted, engine=replace(fitted.engine, max_requests=6))
    known = load_of(recorded, given_limit, ["arrivals:rate=6"])
    assert known is not None
    assert known.most_recorded is None


def test_simulation_that_misses_the_requests_whose_moments_are_known_is_refused() -> None:
    queued = serve(arrivals(60, 20.0), Engine(kv_tokens=4_000), TRUTH).requests
    shown = queued.with_columns(
        pl.when(pl.int_range(pl.len()) < 50).then(pl.col(name)).otherwise(-1).alias(name)
        for name in ("first_token_ns", "end_ns")
    )
    fitted = replace(KNOWN, engine=Engine(), cost=TRUTH)
    with pytest.raises(Unanswerable, match="what limits this engine is not known"):
        predict(shown, fitted, [])


def test_part_that_was_moved_as_far_as_it_may_is_no_less_certain_than_before() -> None:
    # Nothing that a usual server does explains a minute for each token of a context.
    strange = serve(arrivals(40, 2.0), Engine(), replace(TRUTH, request_s=0.05)).requests
    fitted = fit_requests(strange, Engine())
    assert (np.sqrt(np.diag(fitted.covariance)) <= SPREAD * (1 + 1e-9)).all()
