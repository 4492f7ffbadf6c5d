"""What recording cost, on steps worked out by hand (ms)."""

import polars as pl
import pytest

from dpro.collectors.convert.windows import recording_costs, worst


def steps(*rows):
    """Rows of (gap before the step, its duration, its window, the window it is recorded beside)."""
    time, found = 0, []
    for step, (gap, duration, window, *beside) in enumerate(rows):
        start = time + gap
        time = start + duration
        found.append((step, start * 1_000_000, duration * 1_000_000, window, *(beside or [-1])))
    columns = ["step", "start_ns", "duration_ns", "window", "beside"]
    return pl.DataFrame(found, schema=columns, orient="row").with_columns(rank=pl.lit(0))


def costs_of(steps, *recorder_ms):
    passes = pl.DataFrame({"recorder_ns": [ms * 1_000_000 for ms in recorder_ms]}, {"recorder_ns": pl.Int64})
    return recording_costs(steps, passes)


PLAIN = (0, 10, -1)


def test_cost_is_own_time_and_what_steps_took_longer():
    costs = costs_of(steps(*[PLAIN] * 5, (2, 12, 0), (0, 13, 0), (30, 15, -1), *[PLAIN] * 20))
    assert costs["count"] == 1
    assert costs["cost_ms"] == pytest.approx(2 + 30 + 2 + 3 + 5)
    assert costs["share"] == pytest.approx(42 / (28 * 10 + 42))


def test_steps_that_are_recorded_beside_a_window_cost_too():
    beside = [(2, 14, -1, 0), (0, 12, 0), (0, 15, -1, 0), (30, 11, -1)]
    assert costs_of(steps(*[PLAIN] * 5, *beside, *[PLAIN] * 20))["cost_ms"] == 2 + 4 + 2 + 5 + 30 + 1


def test_cost_is_by_the_device_where_it_timed_the_steps_of_a_host_that_runs_ahead():
    device = [50, 50, 50, 60, 63, 65, *[50] * 20, -1]
    host = steps(*[PLAIN] * 3, (2, 15, 0), (0, 15, 0), (30, 410, -1), *[PLAIN] * 21)
    timed = host.with_columns(gpu_step_ns=pl.Series([each * 1_000_000 for each in device]))
    assert costs_of(timed)["cost_ms"] == pytest.approx(2 + 30 + 10 + 13 + 15)
    assert costs_of(host)["cost_ms"] > 400


def test_steps_in_windows_that_were_faster_by_chance_cost_nothing():
    costs = costs_of(steps(*[PLAIN] * 5, (0, 8, 0), (0, 8, 0), PLAIN, *[PLAIN] * 5))
    assert costs["cost_ms"] == 0


def test_windows_without_other_steps_have_no_known_cost():
    assert costs_of(steps((0, 10, 0), (0, 10, 0))) == {}
    assert costs_of(steps(*[PLAIN] * 3)) == {"ends_share": 0}


def test_what_the_recorder_takes_at_ends_of_steps_is_apart_from_what_windows_cost():
    costs = costs_of(steps(PLAIN, *[(1, 10, -1)] * 4, (2, 12, 0), (0, 13, 0), (30, 15, -1), *[PLAIN] * 20))
    assert costs["ends_share"] == pytest.approx(4 / (28 * 10 + 4 + 42))
    assert costs["share"] == pytest.approx(42 / (28 * 10 + 4 + 42))


def test_what_the_recorder_takes_at_backward_passes_counts_with_what_it_takes_at_ends_of_steps():
    assert costs_of(steps(*[PLAIN] * 10), 1, 2)["ends_share"] == pytest.approx(3 / 100)


def test_run_has_the_cost_of_the_rank_that_was_slowed_most():
    assert worst([{}, {"share": 0.1}, {"share": 0.3}, {}]) == {"share": 0.3}
    both = {"share": 0.1, "ends_share": 0.3}
    assert worst([{"share": 0.3, "ends_share": 0.0}, both, {"ends_share": 0.35}]) == both
    assert worst([]) == {}
