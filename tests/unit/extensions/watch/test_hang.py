"""When a job that stands still is asked for its calls, and when these are searched for a hang."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpro.detect.findings import Finding
from dpro.detect.hang.stacks import main_threads
from dpro.extensions.watch.hang import (
    BUSY_S,
    COMPILE_S,
    LONGER,
    MIN_PATIENCE_S,
    STARTING_S,
    HangObservation,
    HangState,
    HangWatchPhase,
    after_search,
    may_go_on,
    next_state,
    patience_of,
)

STUCK = Finding("hang.host", "rank", "1", (1,), 1.0, 0.98, 0.0, ())
PATIENCE_S = 10.0


def still(still_s: float, num_answers: int = 0, is_awaited: bool = False) -> HangObservation:
    """A job whose latest step ended at the time 1000."""
    return HangObservation(1000 + still_s, still_s, PATIENCE_S, num_answers, is_awaited)


def after(*looks: HangObservation) -> HangState:
    """The state after some looks at a job that moved."""
    state = HangState()
    for seen in looks:
        state = next_state(state, seen)
    return state


def test_a_job_that_has_made_no_two_steps_may_still_be_compiling():
    assert patience_of(0, []) == STARTING_S


def test_a_job_may_stand_still_as_long_as_its_steps_and_pauses_suggest():
    assert patience_of(49, [0.1] * 50) == MIN_PATIENCE_S
    assert patience_of(49, [4.0] * 50) == 12.0
    assert patience_of(49, [*[0.1] * 49, 40.0]) == LONGER * 40.0


def test_processes_are_asked_when_the_patience_is_nearly_over_and_not_before():
    assert after(still(1)).phase is HangWatchPhase.MOVING
    assert after(still(6)).phase is HangWatchPhase.PATIENT
    assert after(still(7.4)).phase is HangWatchPhase.PATIENT
    assert after(still(7.5)) == HangState(HangWatchPhase.ASKED, asked_s=1007.5)


def test_calls_are_searched_when_the_patience_is_over_and_all_have_answered():
    asked = still(7.5)
    assert after(asked, still(9, 3)).phase is HangWatchPhase.ASKED  # others may still answer, and steps end
    assert after(asked, still(10, 2, is_awaited=True)).phase is HangWatchPhase.ASKED
    assert after(asked, still(10, 3)).phase is HangWatchPhase.SEARCHING


def test_further_answers_are_waited_for_while_they_come_and_not_for_ever():
    looks = [still(7.5), still(10.5, 0, True)]
    assert after(*looks).phase is HangWatchPhase.ASKED
    looks += [still(11.4, 1, True)]
    assert after(*looks).phase is HangWatchPhase.ASKED
    looks += [still(15.3, 1, True)]  # long since they were asked, but not since one answered
    assert after(*looks).phase is HangWatchPhase.ASKED
    looks += [still(15.3, 2, True)]
    assert after(*looks).phase is HangWatchPhase.ASKED
    assert after(*looks, still(19.4, 2, True)).phase is HangWatchPhase.SEARCHING
    assert after(*looks, still(15.4, 3)).phase is HangWatchPhase.SEARCHING


@pytest.mark.parametrize("looks", [[still(6)], [still(8)], [still(8), still(10)]])
def test_a_step_ends_whatever_the_watch_does(looks):
    assert next_state(after(*looks), still(0.5)) == HangState()


def test_after_a_search_the_same_job_is_asked_again_when_a_share_of_the_time_has_passed():
    assert after_search(1012.0, took_s=0.1).due_s == 1014.0
    state = after_search(1012.0, took_s=3.0)
    assert state == HangState(HangWatchPhase.PATIENT, due_s=1018.0)
    assert next_state(state, still(17.9)) == state
    assert next_state(state, still(18)) == HangState(HangWatchPhase.ASKED, asked_s=1018.0)


def test_a_host_that_works_is_waited_for_longer_and_others_are_not():
    group = Finding("hang.comm", "group", "0", (1,), 1.0, 0.9, 0.0, ())
    assert may_go_on(STUCK, still(PATIENCE_S + 1), {1}.__contains__)
    assert not may_go_on(STUCK, still(PATIENCE_S + 1), {2}.__contains__)
    assert not may_go_on(group, still(PATIENCE_S + 1), {1}.__contains__)
    assert not may_go_on(STUCK, still(PATIENCE_S + BUSY_S + 1), {1}.__contains__)


def test_a_cold_compile_of_ten_minutes_is_no_hang_on_any_host():
    calls = ["/venv/site-packages/torch/_dynamo/convert_frame.py:9 transform", "job.py:12 fit"]
    compiles = replace(STUCK, observations=(main_threads(STUCK.ranks, calls, "is"),))
    assert may_go_on(compiles, still(PATIENCE_S + 600), set().__contains__)
    assert not may_go_on(compiles, still(PATIENCE_S + COMPILE_S + 1), {1}.__contains__)
