"""When processes are asked for the calls that show which ranks are late, and when these are looked at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from dpro.detect.findings import Finding
from dpro.detect.stragglers.excess import Team
from dpro.extensions.watch.late import (
    ANSWER_S,
    ASK_S,
    MAX_AGAIN,
    MIN_AGAIN,
    LateState,
    LatestRecords,
    LateWatchPhase,
    OwnTimes,
    is_still_late,
    look_since,
    looked,
    next_state,
    num_steps_again,
)

ASKED = LateState(LateWatchPhase.ASKED, asked_s=100.0, asked_at=8)


def test_processes_are_asked_once_steps_have_ended_since_they_were_asked_last():
    assert next_state(LateState(asked_at=8), 100.0, 8) == LateState(asked_at=8)
    assert next_state(LateState(asked_at=7), 100.0, 8) == ASKED


def test_processes_are_not_asked_before_the_watch_has_rested():
    resting = LateState(due_s=100.5)
    assert next_state(resting, 100.0, 8) == resting
    assert next_state(resting, 100.5, 8).phase is LateWatchPhase.ASKED


def test_calls_are_looked_at_when_processes_have_had_time_to_answer():
    assert next_state(ASKED, 100.0 + 0.9 * ANSWER_S, 9) == ASKED
    assert next_state(ASKED, 100.0 + ANSWER_S, 9).phase is LateWatchPhase.LOOKING


def test_looks_take_a_share_of_the_time_and_are_not_more_frequent_than_dumps_may_be():
    cheap = looked(ASKED, 102.0, took_s=0.001)
    assert cheap == LateState(LateWatchPhase.RESTING, due_s=100.0 + ASK_S, asked_s=100.0, asked_at=8)
    assert looked(ASKED, 102.0, took_s=2.0).due_s == 102.0 - ANSWER_S + 20.0


@pytest.mark.parametrize(
    ("excess_ms", "holds"),
    [
        ([30.0] * 10, True),
        ([30.0] * 6 + [0.0] * 4, True),  # a stretch in which the others are slow, too
        ([5.0] * 10, False),  # of the 30 ms that it cost
        ([30.0] * 40 + [0.0] * 10, False),
    ],
)
def test_a_rank_is_late_until_its_own_time_is_about_that_of_its_peers(excess_ms, holds):
    ms = 1e6
    own_ns = np.full((len(excess_ms), 3), 10 * ms)
    own_ns[:, 1] += np.array(excess_ms) * ms
    team = Team([4, 5, 6], np.arange(len(own_ns)), own_ns, np.zeros_like(own_ns), np.arange(len(own_ns)))
    late = Finding("slow.host", "rank", "5", (5,), 0.5, 0.9, 30 * ms, ())
    assert is_still_late(late, team) is holds
    assert not is_still_late(replace(late, ranks=(7,)), team)


def test_findings_are_held_where_no_call_shows_who_is_late():
    late = Finding("slow.host", "rank", "5", (5,), 0.5, 0.9, 30e6, ())
    none = LatestRecords(*[pl.DataFrame()] * 5, messages=False, tables=lambda _: {})
    assert OwnTimes().look(none, [late]) == [late]


def made(num_steps: int, calls_per_step: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Steps of 1,000 ns of one rank, and its calls."""
    steps = pl.DataFrame({"rank": 0, "step": range(num_steps), "start_ns": range(0, 1000 * num_steps, 1000)})
    calls = pl.DataFrame({"enqueued_ns": range(0, 1000 * num_steps, 1000 // calls_per_step)})
    return steps.with_columns(duration_ns=pl.lit(1000)), calls


def test_calls_of_fewer_steps_are_looked_at_again_where_there_are_many(monkeypatch):
    steps, calls = made(50, 10)
    assert num_steps_again(steps, calls) == MAX_AGAIN
    assert look_since(steps, calls).rows() == [(0, 10_000)]
    monkeypatch.setattr("dpro.extensions.watch.late.MAX_ROWS", 200)
    assert num_steps_again(steps, calls) == 19
    monkeypatch.setattr("dpro.extensions.watch.late.MAX_ROWS", 10)
    assert num_steps_again(steps, calls) == MIN_AGAIN
    assert look_since(steps.clear(), calls).is_empty()
