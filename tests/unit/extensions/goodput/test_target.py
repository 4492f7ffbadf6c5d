"""The time to a target loss, by hand: steps of 1 s, and a loss that falls by 0.1 a step."""

from __future__ import annotations

import json

import pytest

from dpro.errors import Unanswerable
from dpro.extensions.goodput.life import life_of
from dpro.extensions.goodput.target import MEAN_STEPS, time_to_loss
from tests.commands import dpro, refused
from tests.lives import WrittenAttempt, job


def attempt(begin, steps, first_loss, ranks=2):
    """An attempt whose ranks differ by 0.2 in their loss, around `first_loss - 0.1 * step`."""
    written = WrittenAttempt(begin=begin, ranks=ranks)
    end = written.trained(steps)
    for step in range(1, steps):
        for rank in range(ranks):
            written.loss(rank, step, first_loss - 0.1 * step + (0.1 if rank else -0.1))
    return written.ended(end + 1, code=1), end + 1


def printed(run, loss):
    return dpro("goodput", run.path, "--target-loss", loss).stdout


def test_mean_of_twenty_steps_over_all_ranks_reaches_the_target(tmp_path):
    written, _ = attempt(0.0, 41, 10.0)
    found = time_to_loss(life_of([job(tmp_path, [written])]), 7.5)
    # The mean of steps s-19 to s is 10 - 0.1 (s - 9.5): 7.45 at step 35, 4 + 1 + 35 s from the start.
    assert (found.step, found.wall_s) == (35, 40.0)
    assert (found.lowest, found.lowest_step) == (pytest.approx(10 - 0.1 * 30.5), 40)


def test_time_counts_earlier_attempts_and_steps_are_those_of_the_job(tmp_path):
    first, end = attempt(0.0, 31, 10.0)
    first.checkpoint("save", 4 + 1 + 30.0, 0.0, "/c")
    second = WrittenAttempt(begin=end + 3)
    second.checkpoint("load", second.begin + 3.5, 0.2, "/c")
    second.ended(second.trained(31) + 1)
    for step in range(1, 31):
        second.loss(0, step, 5.0)
    found = time_to_loss(life_of([job(tmp_path, [first, second])]), 5.0)
    # Its twentieth loss is of its step 20, which ends 4 + 1 + 20 s after it began: step 51 of the job.
    assert (found.step, found.wall_s) == (31 + 20, second.begin + 25)


def test_target_that_was_not_reached_names_the_lowest_loss(tmp_path):
    run = job(tmp_path, [attempt(0.0, 41, 10.0)[0]])
    document = json.loads(dpro("goodput", run.path, "--target-loss", "1", "--json").stdout)
    assert document["target"] == {
        "loss": 1, "wall_s": None, "step": None, "lowest": pytest.approx(6.95), "lowest_step": 40
    }  # fmt: skip
    assert "Loss 1 was not reached: lowest 6.95, at step 40" in printed(run, "1")
    assert "Loss 7.5 was reached after 40 s, at step 35" in printed(run, "7.5")


def test_run_without_enough_losses_says_what_to_record(tmp_path):
    run = job(tmp_path, [attempt(0.0, MEAN_STEPS, 10.0)[0]])
    with pytest.raises(Unanswerable, match=r"no 20 steps in a row.*--watch-loss"):
        time_to_loss(life_of([run]), 1.0)
    assert "--watch-loss" in refused(dpro("goodput", run.path, "--target-loss", "1"), 1)
    assert "nan is not a number" in dpro("goodput", run.path, "--target-loss", "nan").stderr
