"""A job that slows down is seen to, at any speed; pauses, recording and what is small or over are not it."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from dpro.extensions.watch.job import MIN_STEPS, OPEN_NS
from dpro.extensions.watch.pace import ANOTHER, MANY, PARTS, Pace, has_window_since

MS = 10**6


def read(times_ms, windows=(), every=50):
    """The pace of a job whose steps took this long, read after every so many, the latest of them."""
    pace, rows, start_ns = Pace(), [], 0
    for step, time_ms in enumerate(times_ms):
        rows.append((step, start_ns, int(time_ms * MS), -1))
        start_ns += int(time_ms * MS)
        if step % every == every - 1:
            pace.read(SimpleNamespace(steps=np.array(rows[-MIN_STEPS:], np.int64), windows=windows))
    return pace


@pytest.mark.parametrize("step_ms", [2, 30, 500])
def test_slowdown_is_seen_at_any_speed_and_outlasts_what_is_remembered_of_steps(step_ms):
    random.seed(3)
    count = 12 * max(MANY, 500 // step_ms)
    times = [step_ms * random.gauss(1, 0.05) for _ in range(2 * count)]
    pace = read([*times[:count], *(1.5 * time for time in times[count:])])
    slower = pace.slowdown()
    assert abs(slower.since - count) <= max(MANY, 500 // step_ms)
    assert slower.after_ns / slower.before_ns == pytest.approx(1.5, rel=0.05)


@pytest.mark.parametrize(
    "times",
    [
        [30.0] * 3000,
        [30.0] * 1500 + [32.0] * 1500,  # little
        [30.0] * 1000 + [60.0] * 500 + [30.0] * 1500,  # over
        [60.0] * 500 + [30.0] * 2500,  # the beginning
        [30.0 + 2000 * (step % 700 == 699) for step in range(3000)],  # pauses
        [],
    ],
)
def test_what_is_no_slowdown_is_none(times):
    assert read(times).slowdown() is None


def test_steps_while_a_window_is_recorded_do_not_count():
    slow_ns = 2000 * 30 * MS
    assert read([30.0] * 2000 + [60.0] * 1000).slowdown() is not None
    assert read([30.0] * 2000 + [60.0] * 1000, [(0, slow_ns, OPEN_NS)]).slowdown() is None


def test_what_was_long_ago_is_forgotten():
    assert len(read([1.0] * (PARTS + 50) * MANY, every=MANY)._parts) == PARTS


def test_a_window_counts_from_a_moment_on_by_its_end():
    tail = SimpleNamespace(windows=[(0, 10, 20)])
    assert has_window_since(tail, 20)
    assert not has_window_since(tail, 21)


def test_a_small_slowdown_is_none_that_is_worth_a_window_but_sets_windows_apart():
    pace = read([30.0] * 2000 + [31.8] * 1000)
    assert pace.slowdown() is None
    change = pace.slowdown(ANOTHER)
    assert change is not None
    assert 1950 <= change.since <= 2050
