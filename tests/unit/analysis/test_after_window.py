"""Steps before and after the first deep window are compared, and only what shows is said."""

import numpy as np
import polars as pl
import pytest

from dpro.analysis.step_time import MIN_SIDE, after_first_window, after_window_in_words
from dpro.schema import STEPS, conform


def steps(before, after, slower, noise=0.01, pauses=(), ranks=2):
    """A job of steps of 10 ms with a window of two steps, slower from then on; ms."""
    rng = np.random.default_rng(7)
    rows = []
    for rank in range(ranks):
        for step in range(1, before + after + 2):
            window = 0 if before < step <= before + 2 else -1
            beside = 0 if step in (before, before + 3) else -1
            time = 10 * (1 + (slower if step > before else 0)) * (1 + noise * rng.standard_normal())
            time *= 3 if step in pauses or window == 0 or beside == 0 else 1
            rows.append((rank, step, window, beside, step * 10**9, int(time * 1e6)))
    names = ["rank", "step", "window", "beside", "start_ns", "duration_ns"]
    return conform(STEPS, pl.DataFrame(rows, schema=names, orient="row"))


def test_job_that_is_slower_after_the_window_is_said_to_be():
    found = after_first_window(steps(100, 300, 0.12), gpu=True)
    assert found.change == pytest.approx(0.12, abs=0.01)
    assert found.between[0] < found.change < found.between[1]
    assert (found.steps_before, found.steps_after) == (90, 297)
    text = after_window_in_words(found)
    assert text.startswith("steps after the first deep window take 12% longer (12% to 13%; medians of 90 ")
    assert text.endswith("--no-windows or TEARDOWN_CUPTI=1 avoids that")


def test_of_a_cpu_job_no_cause_is_named():
    text = after_window_in_words(after_first_window(steps(100, 300, 0.12), gpu=False))
    assert "CUPTI" not in text
    faster = after_window_in_words(after_first_window(steps(100, 300, -0.1), gpu=True))
    assert "take 10% less time (9% to 10%;" in faster
    assert "CUPTI" not in faster


def test_job_that_became_slower_some_time_before_the_window_is_not_said_to_be_so_since():
    slower = steps(100, 300, 0.0).with_columns(
        duration_ns=pl.when(pl.col("step") < 50).then("duration_ns").otherwise(pl.col("duration_ns") * 2)
    )
    assert after_first_window(slower, gpu=True) is None


@pytest.mark.parametrize("slower", [0.0, 0.01])
def test_difference_that_is_none_or_small_is_not_said(slower):
    assert after_first_window(steps(100, 300, slower), gpu=True) is None


def test_difference_within_what_steps_vary_by_is_not_said():
    assert after_first_window(steps(40, 300, 0.03, noise=0.15), gpu=True) is None


def test_pauses_and_recorded_steps_do_not_count():
    assert after_first_window(steps(100, 300, 0, pauses=range(110, 400, 20)), gpu=True) is None


def test_too_few_steps_show_nothing():
    assert after_first_window(steps(5, 300, 0.5), gpu=True) is None
    assert after_first_window(steps(100, MIN_SIDE, 0.5), gpu=True) is None
    assert after_first_window(STEPS.empty(), gpu=True) is None
