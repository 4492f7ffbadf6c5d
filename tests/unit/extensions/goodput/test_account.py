"""Every second of every rank of a job in one class."""

from __future__ import annotations

from shutil import copytree

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.extensions.goodput.account import account, totals
from dpro.extensions.goodput.attempts import attempts_of
from dpro.extensions.goodput.life import life_of
from dpro.extensions.goodput.stages import observed_failures
from dpro.store import open_run
from tests.lives import S, WrittenAttempt, job, ns


def seconds(run, stragglers=None, hung=()):
    """Seconds of all ranks by class."""
    pieces, _ = account(attempts_of([run]), stragglers or {}, hung)
    return {name: value / S for name, value, _ in totals(pieces).iter_rows()}


def two_attempts(save_at: int = 3):
    """Ten steps, then a failure; the checkpoint after `save_at` steps is loaded, and eight steps are done."""
    first = WrittenAttempt(begin=5)
    last = first.trained(10)
    first.checkpoint("save", first.begin + 4 + save_at + 0.001, 0.0, "/c", inode=7, modified_ns=70)
    first.ended(last + 2.5, code=1)
    second = WrittenAttempt(begin=last + 10)
    second.checkpoint("load", second.begin + 3.25, 0.5, "/c", inode=7, modified_ns=70)
    second.ended(second.trained(8) + 1.5)
    return first, second


def test_job_that_ran_once_and_well(tmp_path):
    attempt = WrittenAttempt(begin=5)
    run = job(tmp_path, [attempt.ended(attempt.trained(10) + 1)])
    assert seconds(run) == pytest.approx(
        {
            "productive": 20, "launch": 10, "imports": 4, "process_group": 2, "set_up": 2, "finish": 2,
        }
    )  # fmt: skip


def test_steps_after_the_checkpoint_are_done_again(tmp_path):
    run = job(tmp_path, two_attempts(save_at=3))
    found = seconds(run)
    # 10 steps at first; the second attempt begins at step 3, and does 3 to 10: of these 7 again.
    assert found["productive"] == pytest.approx(2 * (10 + 1))
    # The part of a step that was lost with the failure counts as much: one second of the 2.5 that it stood.
    assert found["repeated"] == pytest.approx(2 * (7 + 1))
    assert found["shutdown"] == pytest.approx(2 * 1.5)
    assert found["down"] == pytest.approx(2 * 7.5)
    assert found["load"] == pytest.approx(0.5)
    assert found["set_up"] == pytest.approx(2 * 2 - 0.5)
    assert [each.first_step for each in attempts_of([run])] == [0, 3]


def test_job_begins_when_it_was_launched_though_its_process_is_older(tmp_path):
    attempt = WrittenAttempt(begin=5)
    attempt.ended(attempt.trained(10) + 1)
    attempt.starts = [row | {"launched_ns": row["process_ns"] + S // 2} for row in attempt.starts]
    pieces, notes = account(attempts_of([job(tmp_path, [attempt])]), {})
    assert notes == []
    took = {name: value / S for name, value, _ in totals(pieces).iter_rows()}
    assert "launch" not in took
    assert took["imports"] == pytest.approx(2 * 1.5)


def test_time_before_the_end_of_an_attempt_is_a_hang_only_if_it_hung(tmp_path):
    run = job(tmp_path, two_attempts(save_at=3))
    ended, hung = seconds(run), seconds(run, hung=[0])
    assert "hang" not in ended
    assert hung == {name if name != "shutdown" else "hang": taken for name, taken in ended.items()}


def test_steps_that_are_not_done_again_by_the_end_are_lost(tmp_path):
    first, second = two_attempts(save_at=3)
    second = WrittenAttempt(begin=second.begin)
    second.checkpoint("load", second.begin + 3.25, 0.5, "/c", inode=7, modified_ns=70)
    found = seconds(job(tmp_path, [first, second.ended(second.trained(2), code=1)]))
    # Steps 0 to 4 are done at the end; steps 5 to 9 are lost, steps 3 and 4 were done twice, one was cut off.
    assert found["productive"] == pytest.approx(2 * 5)
    assert found["repeated"] == pytest.approx(2 * (5 + 2 + 1))


def test_attempt_that_did_no_step_loses_nothing_of_others(tmp_path):
    first = WrittenAttempt(begin=0)
    first.ended(first.trained(10), code=1)
    second = WrittenAttempt(begin=30)
    second.trained(0)
    assert seconds(job(tmp_path, [first, second.ended(40, code=1)]))["productive"] == pytest.approx(2 * 10)


def test_classes_add_up_to_the_wall_time_of_all_ranks_without_gaps(tmp_path):
    run = job(tmp_path, two_attempts())
    pieces, notes = account(attempts_of([run]), {0: 0.3})
    assert notes == []
    for _, rank in pieces.group_by("rank"):
        ends = rank["start_ns"] + rank["duration_ns"]
        assert rank["start_ns"][1:].to_list() == ends[:-1].to_list()
        assert rank["start_ns"][0] == 0
    assert pieces.group_by("rank").agg(pl.col("duration_ns").sum())["duration_ns"].n_unique() == 1


def test_rank_that_waits_for_the_one_that_saves_stands_as_long(tmp_path):
    attempt = WrittenAttempt(begin=0)
    end = attempt.trained(20, longer={10: 2.0})
    attempt.checkpoint("save", 4 + 10.5, 2.0, "/c")
    found = seconds(job(tmp_path, [attempt.ended(end)]))
    assert found["checkpoint"] == pytest.approx(4)
    assert found["productive"] == pytest.approx(40)


def test_longer_first_steps_are_warm_up(tmp_path):
    attempt = WrittenAttempt(begin=0)
    end = attempt.trained(20, longer={1: 5.0, 15: 1.0})
    found = seconds(job(tmp_path, [attempt.ended(end)]))
    assert found["warm_up"] == pytest.approx(10)
    assert found["productive"] == pytest.approx(2 * 21)  # a long step later is not


def test_evaluation_is_work_without_gradients_beyond_the_usual(tmp_path):
    attempt = WrittenAttempt(begin=0)
    end = attempt.trained(20, longer={10: 3.0})
    for rank in (0, 1):
        for step in range(1, 20):
            start = 4.0 + step + (3.0 if step > 10 else 0.0)
            value = ns(0.02 + 3.0 * (step == 10))
            attempt.counters.append(
                {"rank": rank, "counter": "step_no_grad_ns", "time_ns": ns(start), "value": float(value)}
            )
    found = seconds(job(tmp_path, [attempt.ended(end)]))
    assert found["evaluation"] == pytest.approx(6)


def test_evaluation_in_a_step_that_is_done_again_is_lost_with_it(tmp_path):
    first, second = two_attempts(save_at=3)
    for rank in (0, 1):
        for step in range(1, 8):
            counter = {"rank": rank, "counter": "step_no_grad_ns", "time_ns": ns(second.begin + 4.0 + step)}
            second.counters.append(counter | {"value": float(ns(0.5 * (step == 4)))})
    found = seconds(job(tmp_path, [first, second]))
    assert "evaluation" not in found
    assert found["repeated"] == pytest.approx(2 * (7 + 1))


def test_stragglers_take_their_share_of_productive_steps_only(tmp_path):
    run = job(tmp_path, two_attempts())
    before, after = seconds(run), seconds(run, {0: 0.25, 1: 0.25})
    assert after["straggler"] == pytest.approx(0.25 * before["productive"])
    assert after["productive"] == pytest.approx(0.75 * before["productive"])
    assert after["repeated"] == before["repeated"]


def test_renamed_checkpoint_is_known_by_its_inode_and_an_overwritten_one_by_its_time(tmp_path):
    first = WrittenAttempt(begin=0)
    last = first.trained(10)
    first.checkpoint("save", 4 + 3.01, 0.0, "/c.tmp", inode=7, modified_ns=70)
    first.checkpoint("save", 4 + 6.01, 0.0, "/c.tmp", inode=8, modified_ns=80)
    second = WrittenAttempt(begin=last + 10)
    second.checkpoint("load", second.begin + 3.5, 0.0, "/c", inode=8, modified_ns=80)
    second.ended(second.trained(8))
    run = job(tmp_path, [first.ended(last, code=1), second])
    assert [each.first_step for each in attempts_of([run])] == [0, 6]


def test_attempt_that_loaded_nothing_begins_again_and_says_so(tmp_path):
    first, second = two_attempts()
    second.checkpoints.clear()
    attempts = attempts_of([job(tmp_path, [first, second])])
    assert attempts[1].first_step == 0
    assert attempts[1].notes == ("attempt 1 loaded no checkpoint: it is assumed to have begun at step 0",)


def test_checkpoint_that_was_not_seen_saved_is_taken_for_the_last_one(tmp_path):
    first, second = two_attempts(save_at=5)
    second.checkpoints[0] |= {"path": "/elsewhere", "inode": 99}
    attempts = attempts_of([job(tmp_path, [first, second])])
    assert attempts[1].first_step == 5
    assert "was not seen saved" in attempts[1].notes[0]


def test_clock_that_was_set_back_is_said_and_the_classes_still_add_up(tmp_path):
    first, second = two_attempts()
    for row in second.steps:
        row["start_ns"] -= ns(3)
    pieces, notes = account(attempts_of([job(tmp_path, [first, second])]), {})
    assert "out of order" in notes[0]
    by_rank = pieces.group_by("rank").agg(pl.col("duration_ns").sum())["duration_ns"]
    assert by_rank.n_unique() == 1
    assert (pieces["duration_ns"] > 0).all()


def test_attempt_that_did_no_step_is_all_start_and_down(tmp_path):
    first = WrittenAttempt(begin=0)
    first.trained(0)
    second = WrittenAttempt(begin=30)
    run = job(tmp_path, [first.ended(8, code=1), second.ended(second.trained(5))])
    found = seconds(run)
    assert found["productive"] == pytest.approx(10)
    assert found["down"] == pytest.approx(2 * 22)


def test_runs_that_a_scheduler_started_apart_are_one_job(tmp_path):
    first, second = two_attempts()
    apart = [second.written(tmp_path / "b"), first.written(tmp_path / "a")]
    together = job(tmp_path / "c", two_attempts())
    pieces, _ = account(attempts_of(apart), {})
    assert totals(pieces).equals(totals(account(attempts_of([together]), {})[0]))


def test_run_without_any_moment_says_so(tmp_path):
    run = WrittenAttempt(begin=0).written(tmp_path)
    pieces, notes = account(attempts_of([run]), {})
    assert pieces.is_empty()
    assert notes == ["no moment of any rank was recorded"]


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    gaps=st.lists(st.floats(0.1, 20), min_size=4, max_size=4),
    ranks=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    stalls=st.lists(st.tuples(st.floats(0, 15), st.floats(0, 9)), max_size=3),
)
def test_whatever_happened_each_rank_has_the_same_wall_time(tmp_path_factory, steps, gaps, ranks, stalls):
    now, attempts = 1.0, []
    for count, gap, num_ranks in zip(steps, gaps, ranks, strict=False):
        attempt = WrittenAttempt(now + gap, num_ranks)
        now = attempt.trained(count) + gap
        for after, stall in stalls:
            attempt.checkpoint("save", attempt.begin + after, stall, "/c")
        attempts.append(attempt.ended(now, code=-1))
    pieces, _ = account(attempts_of([job(tmp_path_factory.mktemp("job"), attempts)]), {0: 0.5})
    by_rank = pieces.group_by("rank").agg(pl.col("duration_ns").sum())["duration_ns"]
    assert by_rank.unique().to_list() == [ns(now)]
    assert (pieces["duration_ns"] > 0).all()


def test_run_that_is_given_twice_counts_once(tmp_path):
    attempt = WrittenAttempt(begin=0)
    attempt.ended(attempt.trained(10))
    run = attempt.written(tmp_path / "run")
    copied = open_run(copytree(run.path, tmp_path / "copy"))
    assert len(attempts_of([run, run, copied])) == 1
    later = WrittenAttempt(begin=100)
    later.ended(later.trained(10))
    assert len(attempts_of([run, later.written(tmp_path / "later"), run])) == 2


def test_import_does_not_say_how_it_started_and_ended(tmp_path):
    attempt = WrittenAttempt(begin=0)
    attempt.ended(attempt.trained(10) + 3, code=-1)
    for worker in attempt.workers:
        worker["exit_signal"] = -1
    attempt.starts = []
    life = life_of([attempt.written(tmp_path)])
    assert life.attempts[0].ended_well is None
    assert observed_failures(life).count == 0
    assert not {"repeated", "hang", "shutdown"} & set(life.pieces["class"])
    assert life.notes == [
        "attempt 0 has no record of how it started: all before its first step counts as launch"
    ]
