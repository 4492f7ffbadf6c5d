"""MFU and tokens per second of a job, in steps and over its wall time."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.analysis.analysis import Analysis
from dpro.analysis.mean_step import Inputs
from dpro.extensions.goodput.document import goodput_document
from dpro.extensions.goodput.life import DoneSteps, StepAmount, amount_of, life_of, throughput_of
from dpro.replay.cost.work import Mfu
from dpro.schema import SPANS, conform
from dpro.store import write_part
from tests.commands import dpro
from tests.lives import WrittenAttempt, job, ns

PEAK = 1000.0  # TFLOP/s
# A step of 2 s at half of the peak, with 3,000 tokens.
KNOWN = StepAmount(Mfu(0.5, PEAK * 1e12, "bf16", PEAK, "H100"), "", Inputs(30.0, 1500.0), "", 2.0)
UNKNOWN = StepAmount(None, "no GPU work", None, "no shapes", 2.0)


def test_only_steps_done_for_the_first_time_count_over_the_wall_time():
    found = throughput_of([DoneSteps(10, 4, KNOWN), DoneSteps(5, 4, KNOWN)], 60.0, 4 * 60.0)
    assert (found.mfu, found.tokens_per_s, found.samples_per_s) == (0.5, 1500.0, 30.0)
    # 15 steps of 1 s at peak in a minute; of 3,000 tokens each.
    assert found.mfu_overall == pytest.approx(15 / 60)
    assert found.tokens_per_s_overall == pytest.approx(15 * 3000 / 60)
    assert (found.mfu_unknown, found.rate_unknown, found.attempts_measured) == ("", "", 2)


def test_attempt_of_which_nothing_is_known_is_taken_to_do_the_same_per_step_and_rank():
    found = throughput_of([DoneSteps(10, 4, KNOWN), DoneSteps(10, 2, UNKNOWN)], 60.0, 4 * 60.0)
    assert found.tokens_per_s_overall == pytest.approx((10 * 3000 + 10 * 1500) / 60)
    assert found.mfu_overall == pytest.approx((10 * 4 + 10 * 2) / (4 * 60))
    assert found.mfu == 0.5
    assert found.attempts_measured == 1


def test_gpus_of_another_peak_count_by_their_own():
    slower = KNOWN._replace(mfu=Mfu(0.25, PEAK * 1e12, "bf16", 2 * PEAK, "B200"))
    found = throughput_of([DoneSteps(10, 1, KNOWN), DoneSteps(10, 1, slower)], 60.0, 60.0)
    assert found.mfu == pytest.approx((10 * 1.0 + 10 * 0.5) / (10 * 2 + 10 * 2))
    assert found.mfu_overall == pytest.approx((10 * 1.0 + 10 * 0.5) / 60)


@pytest.mark.parametrize("done", [[], [DoneSteps(0, 4, UNKNOWN)]])
def test_job_without_a_step_says_that(done):
    found = throughput_of(done, 60.0, 60.0)
    assert (found.mfu, found.tokens_per_s, found.mfu_unknown) == (None, None, "no step")


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 4), st.booleans()), max_size=6), st.floats(0, 50)
)
def test_over_the_wall_time_it_is_never_more_than_in_steps(attempts, lost_s):
    done = [DoneSteps(steps, ranks, KNOWN if known else UNKNOWN) for steps, ranks, known in attempts]
    wall_s = sum(each.steps for each in done) * 2.0 + lost_s
    found = throughput_of(done, wall_s, 4 * wall_s)
    if found.mfu is not None:
        assert found.mfu_overall <= found.mfu * (1 + 1e-9)


def test_command_gives_the_tokens_of_a_model_and_says_why_mfu_is_not_known(tmp_path):
    attempt = WrittenAttempt(begin=0, ranks=1)
    end = attempt.trained(10)
    attempt.steps = [row | {"window": 0} for row in attempt.steps]
    run = job(tmp_path / "run", [attempt.ended(end)])
    looks_up = {"rank": 0, "window": 0, "kind": "cpu_op", "name": "aten::embedding", "duration_ns": ns(0.1)}
    rows = [
        looks_up | {"shapes": "[[1000, 64], [8, 128]]", "start_ns": row["start_ns"] + 10}
        for row in attempt.steps
    ]
    write_part(run.path, SPANS, "rank00000", conform(SPANS, pl.DataFrame(rows)))
    document = goodput_document(life_of([run]), ["run"])
    assert document.throughput.tokens_per_s == pytest.approx(8 * 128)
    assert document.throughput.tokens_per_s_overall == pytest.approx(8 * 128 * 10 / 14)
    lines = dpro("goodput", str(run.path)).stdout.splitlines()
    assert "MFU: not known: no GPU work" in lines
    assert "tokens per second: 1,024 in steps, 731.4 over all the time" in lines


def test_run_without_windows_says_why_tokens_are_not_known(tmp_path):
    attempt = WrittenAttempt(begin=0)
    run = job(tmp_path, [attempt.ended(attempt.trained(10))])
    amount = amount_of(Analysis(run))
    assert (amount.mfu, amount.rate, amount.step_s) == (None, None, 1.0)
    assert (amount.no_mfu, amount.no_rate) == ("no step was recorded in depth",) * 2
