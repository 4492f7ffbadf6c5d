"""Schedules as the engine replays them: bubbles by hand, and what more links or micro-batches do."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import UsageError
from dpro.extensions.plan import step as schedules_of_layouts
from dpro.extensions.plan.step import bound_us, pipeline, pipelined_us, replayed_us


def step(stages: int, count: int, chunks: int = 1, schedule: str = "1f1b", message_us: float = 0.0) -> float:
    """A step whose forwards take 1 us on each stage, and backwards 2, divided over its chunks."""
    each = np.ones((stages, chunks)) / chunks
    return replayed_us(pipeline(stages, chunks, count, schedule), each, 2 * each, message_us)[0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 4), (4, 16), (8, 3)])
def test_the_bubble_of_equal_stages_is_stages_less_one_over_micro_batches(
    schedule: str, stages: int, count: int
) -> None:
    assert step(stages, count, schedule=schedule) == pytest.approx(3 * count * (1 + (stages - 1) / count))


@pytest.mark.parametrize(("schedule", "chunks"), [("zb-h1", 1), ("zbv", 2), ("dualpipe", 1)])
@pytest.mark.parametrize(("stages", "count"), [(2, 8), (4, 16), (8, 32)])
def test_the_closed_form_of_other_schedules_is_near_their_replay(
    schedule: str, chunks: int, stages: int, count: int
) -> None:
    each, shape = np.full((1, stages), 3.0), [np.array([float(number)]) for number in (chunks, count, 0)]
    assert bound_us(each, *shape, [schedule])[0] == pytest.approx(
        step(stages, count, chunks, schedule), rel=0.04
    )


def test_chunks_divide_the_bubble() -> None:
    assert step(4, 8, chunks=2) == pytest.approx(3 * (8 + 3 / 2), abs=1e-3)


def test_messages_between_two_stages_are_paid_on_the_way_there_and_back() -> None:
    # One micro-batch: forward, message, forward, backward, message, backward.
    assert step(2, 1, message_us=5) == pytest.approx(1 + 5 + 1 + 2 + 5 + 2)


def test_the_longest_stage_decides() -> None:
    forward, backward = np.array([[1.0], [3.0]]), np.array([[2.0], [6.0]])
    found, busy = replayed_us(pipeline(2, 1, 10), forward, backward, 0.0)
    assert found == pytest.approx(10 * 9 + 3)
    assert busy.tolist() == [30.0, 90.0]


def test_a_schedule_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(UsageError, match="multiple"):
        pipeline(4, 2, 6)
    with pytest.raises(UsageError, match="even number"):
        pipeline(3, 1, 6, "dualpipe")
    with pytest.raises(UsageError, match="1f1b"):
        pipeline(4, 1, 6, "any")


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.lists(st.floats(0.1, 50), min_size=5, max_size=5),
    st.floats(0, 20),
)
def test_the_closed_form_without_messages_is_never_above_the_replay(
    stages: int, count: int, us: list[float], message_us: float
) -> None:
    forward = np.array(us[:stages])[:, None]
    found, _ = replayed_us(pipeline(stages, 1, count), forward, 2 * forward, message_us)
    bound = bound_us(3 * forward.T, np.array([1.0]), np.array([float(count)]), np.zeros(1))
    assert bound[0] <= found + 0.01


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.floats(0, 5), st.floats(0, 5))
def test_slower_messages_never_shorten_a_step(stages: int, one: float, other: float) -> None:
    fast, slow = sorted((one, other))
    assert step(stages, 6, message_us=fast) <= step(stages, 6, message_us=slow) + 1e-9


def test_the_bubble_goes_away_with_many_micro_batches() -> None:
    shares = [1 - 3 * count / step(4, count) for count in (4, 16, 64, 256)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.012


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zb-h1", 1), ("zbv", 2)]
)
def test_a_very_long_step_goes_on_as_its_last_micro_batches_do(schedule, chunks, monkeypatch):
    forward = np.array([[100.0] * chunks, [130.0] * chunks, [90.0] * chunks])
    whole = replayed_us(pipeline(3, chunks, 120, schedule), forward, 2 * forward, 5.0)[0]
    monkeypatch.setattr(schedules_of_layouts, "MAX_COMPUTES", 4 * 3 * chunks * 12)
    found = pipelined_us((3, chunks, 120), schedule, forward, 2 * forward, 5.0)
    assert found == pytest.approx(whole, rel=1e-3)
    short = pipelined_us((3, chunks, 12), schedule, forward, 2 * forward, 5.0)
    assert short == replayed_us(pipeline(3, chunks, 12, schedule), forward, 2 * forward, 5.0)[0]
