"""Requests served by an engine: small cases by hand, and any case equal to the slow twin."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.extensions.serving.engine import Engine, IterationCost, serve
from tests.reference.serving import Request, Twin

# A second of host work, and nothing else, makes each iteration last a second.
SECOND = IterationCost(1.0, 0.0, 0.0)
S = 1_000_000_000


def requests(*rows: tuple[float, int, int]) -> pl.DataFrame:
    """Arrival in seconds, tokens of the prompt, tokens of the output."""
    return pl.DataFrame(
        {
            "arrival_ns": [round(row[0] * S) for row in rows],
            "prompt_tokens": [row[1] for row in rows],
            "output_tokens": [row[2] for row in rows],
        }
    )


def moments(served: pl.DataFrame) -> list[tuple[float, float, float]]:
    """Scheduled, first token and end in seconds."""
    columns = served.select(pl.col("scheduled_ns", "first_token_ns", "end_ns") / S)
    return columns.rows()


@pytest.mark.slow
def test_first_token_comes_with_the_prompt_and_each_decode_gives_one() -> None:
    served = serve(requests((0, 10, 3)), Engine(), SECOND)
    assert moments(served.requests) == [(0, 1, 3)]
    assert served.iterations["prefill_tokens"].to_list() == [10, 0, 0]
    assert served.iterations["context_tokens"].to_list() == [0, 10, 11]


@pytest.mark.parametrize("row", [(0, 10, 10**9), (0, 10**12, 1)])
def test_requests_that_take_more_iterations_than_are_simulated_are_refused(row) -> None:
    with pytest.raises(Unanswerable, match="more than 10,000,000 iterations"):
        serve(requests(row), Engine(), SECOND)


def test_without_requests_there_is_no_iteration() -> None:
    served = serve(requests(), Engine(), SECOND)
    assert (served.requests.height, served.iterations.height, served.evictions) == (0, 0, 0)


@pytest.mark.slow
def test_replicas_without_requests_take_no_time() -> None:
    assert moments(serve(requests((0, 10, 3)), Engine(replicas=10**9), SECOND).requests) == [(0, 1, 3)]


def test_arrival_during_an_iteration_waits_for_its_end() -> None:
    served = serve(requests((0, 10, 3), (0.5, 10, 1)), Engine(), SECOND)
    assert moments(served.requests)[1] == (1, 2, 2)


def test_engine_that_plans_ahead_makes_an_arrival_wait_for_two() -> None:
    served = serve(requests((0, 10, 4), (0.5, 10, 1)), Engine(ahead=True), SECOND)
    assert moments(served.requests)[1] == (1, 3, 3)


def test_long_prompt_is_cut_into_chunks_beside_decodes() -> None:
    served = serve(requests((0, 2, 4), (0.5, 9, 1)), Engine(token_budget=4), SECOND)
    assert moments(served.requests)[1] == (1, 4, 4)
    assert served.iterations["prefill_tokens"].to_list() == [2, 3, 3, 3]
    assert served.iterations["decode_tokens"].to_list() == [0, 1, 1, 1]


def test_prompts_alone_make_decodes_wait() -> None:
    engine = Engine(token_budget=100, whole_prompts=True, prompts_first=True)
    served = serve(requests((0, 2, 3), (0.5, 9, 1)), engine, SECOND)
    assert moments(served.requests) == [(0, 1, 4), (1, 2, 2)]


def test_full_batch_makes_the_next_request_wait() -> None:
    served = serve(requests((0, 1, 3), (0, 1, 1)), Engine(max_requests=1), SECOND)
    assert moments(served.requests) == [(0, 1, 3), (3, 4, 4)]


def test_request_that_was_scheduled_last_is_evicted_and_computed_again() -> None:
    engine = Engine(kv_tokens=8, block_tokens=1)
    served = serve(requests((0, 3, 4), (0, 3, 4)), engine, SECOND)
    assert served.evictions == 1
    # Three and four tokens of both fit; the fifth of the first needs a block that the second held.
    assert moments(served.requests) == [(0, 1, 4), (0, 1, 6)]


def test_iteration_that_evicts_admits_none() -> None:
    engine = Engine(kv_tokens=8, block_tokens=1, token_budget=4)
    served = serve(requests((0, 3, 4), (0, 3, 4)), engine, SECOND)
    # The third evicts the second request, of whose four tokens three would fit at once.
    assert served.iterations["prefill_tokens"].to_list() == [4, 2, 0, 0, 4, 0, 0]
    assert (served.evictions, moments(served.requests)) == (1, [(0, 1, 4), (0, 2, 7)])


def test_evicted_request_finds_its_first_blocks_again() -> None:
    engine = Engine(kv_tokens=8, block_tokens=1, keeps_blocks=True)
    again = serve(requests((0, 3, 4), (0, 3, 4)), engine, SECOND).iterations["prefill_tokens"].to_list()
    afresh = serve(requests((0, 3, 4), (0, 3, 4)), Engine(kv_tokens=8, block_tokens=1), SECOND)
    assert sum(again) < afresh.iterations["prefill_tokens"].sum()


def test_clients_send_the_next_request_when_the_one_before_has_ended() -> None:
    served = serve(requests((0, 1, 2), (0, 1, 2), (0, 1, 2)), Engine(clients=1), SECOND)
    assert (served.requests["arrival_ns"] / S).to_list() == [0, 2, 4]
    assert [each[2] for each in moments(served.requests)] == [2, 4, 6]


def test_replicas_take_turns() -> None:
    served = serve(requests((0, 1, 2), (0, 1, 2)), Engine(max_requests=1, replicas=2), SECOND)
    assert [each[2] for each in moments(served.requests)] == [2, 2]


def test_guessed_tokens_come_with_fewer_iterations() -> None:
    served = serve(requests((0, 1, 5)), Engine(tokens_per_decode=2.0), SECOND)
    assert moments(served.requests) == [(0, 1, 3)]


def test_request_that_never_fits_is_refused() -> None:
    with pytest.raises(Unanswerable, match="memory for 16"):
        serve(requests((0, 100, 1)), Engine(kv_tokens=16, block_tokens=16), SECOND)


def test_request_without_a_length_is_refused() -> None:
    with pytest.raises(Unanswerable, match="no known length"):
        serve(requests((0, -1, 4)), Engine(), SECOND)


ROWS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, 8)), min_size=1, max_size=8)
ENGINES = st.builds(
    Engine,
    token_budget=st.integers(1, 16),
    max_requests=st.integers(1, 4),
    kv_tokens=st.sampled_from([0, 24, 40]),
    block_tokens=st.sampled_from([1, 4]),
    whole_prompts=st.booleans(),
    ahead=st.booleans(),
)


@given(ROWS, ENGINES)
@settings(max_examples=60, deadline=None)
def test_loop_equals_its_slow_twin(rows: list[tuple[int, int, int]], engine: Engine) -> None:
    cost = IterationCost(0.3, 0.5, 0.05, 0.02, 0.001, 0.0001)
    frame = requests(*rows)
    twin = Twin(engine, [Request(row[0] * S, row[1], row[2]) for row in rows])
    twin.run(cost)
    served = serve(frame, engine, cost).requests
    assert served["first_token_ns"].to_list() == [each.first for each in twin.requests]
    assert served["end_ns"].to_list() == [each.end for each in twin.requests]
