"""How attempts ended, and what left no record."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.analysis.analysis import Analysis
from dpro.extensions.goodput.attempts import attempts_of, clock_jumps, end_of_attempt, missing_attempts
from dpro.extensions.goodput.life import life_of
from dpro.schema import CLOCK_SAMPLES, conform
from dpro.store import write_part
from tests.lives import WrittenAttempt, job, ns


def ended(run) -> list[str]:
    return [end_of_attempt(Analysis(each.run), each).how for each in attempts_of([run])]


def written(begin: float, steps: int = 5) -> tuple[WrittenAttempt, float]:
    attempt = WrittenAttempt(begin=begin)
    return attempt, attempt.trained(steps)


def test_attempt_whose_end_nothing_says_runs_only_if_no_other_came_after_it(tmp_path):
    (first, _), (second, end) = written(0), written(30)
    for attempt in (first, second):
        attempt.ended(end, code=-1)
        attempt.workers = [row | {"exit_signal": -1, "source": "dpro recorder"} for row in attempt.workers]
    run = job(tmp_path / "run", [first, second])
    life = life_of([run])
    assert [each.how for each in life.ends] == ["failed", "running"]
    assert [each.ended_well for each in life.attempts] == [False, None]
    assert not {"hang", "shutdown"} & {*life.pieces.filter(pl.col("attempt") == 1)["class"]}


def test_exit_codes_say_how_an_attempt_ended_where_nothing_watched_it(tmp_path):
    (first, _), (second, end) = written(0), written(30)
    assert ended(job(tmp_path, [first.ended(20, code=1), second.ended(end)])) == ["failed", "completed"]


def test_attempt_that_another_rank_ended_is_put_down_to_the_first(tmp_path):
    attempt, end = written(0)
    (life_end,) = life_of([attempt.killed(end, rank=1).written(tmp_path)]).ends
    assert (life_end.label, life_end.rank) == ("SIGKILL", 1)


@pytest.mark.parametrize(("restart", "said"), [(1, []), (2, ["1 start of"]), (4, ["3 starts o"])])
def test_starts_of_torchrun_that_left_no_record_are_counted(tmp_path, restart, said):
    (first, _), (second, end) = written(0), written(30)
    first.starts = [row | {"restart": 0} for row in first.starts]
    second.starts = [row | {"restart": restart} for row in second.starts]
    run = job(tmp_path, [first.ended(20, code=1), second.ended(end)])
    notes = missing_attempts(attempts_of([run]))
    assert [note[:10] for note in notes] == said
    assert all(note in life_of([run]).notes for note in notes)


def test_torchruns_of_two_jobs_each_count_for_themselves(tmp_path):
    (first, _), (second, end) = written(0), written(30)
    first.starts = [row | {"restart": 0} for row in first.starts]
    second.starts = [row | {"restart": 5, "launched_ns": ns(25)} for row in second.starts]
    run = job(tmp_path, [first.ended(20, code=1), second.ended(end)])
    assert missing_attempts(attempts_of([run])) == []


@pytest.mark.parametrize(("jump_s", "said"), [(3600, 1), (0.2, 0), (-5, 0)])
def test_clock_that_was_set_forward_is_said(tmp_path, jump_s, said):
    attempt, end = written(0)
    run = attempt.ended(end).written(tmp_path)
    samples = [
        {"rank": 0, "time_ns": ns(at + jump_s * (at > 5)), "monotonic_ns": ns(100 + at), "peer_rank": -1}
        for at in range(9)
    ]
    write_part(run.path, CLOCK_SAMPLES, "rank00000", conform(CLOCK_SAMPLES, pl.DataFrame(samples)))
    notes = clock_jumps(attempts_of([run]))
    assert len(notes) == said
    assert all("set forward by 60 min" in note for note in notes)


def test_job_without_checkpoints_says_so_once(tmp_path):
    attempts = [written(20.0 * number) for number in range(4)]
    run = job(tmp_path, [attempt.ended(end + 1, code=1) for attempt, end in attempts])
    assert life_of([run]).notes == [
        "no checkpoint save was observed: each attempt is assumed to have begun at step 0"
    ]
