"""What recording cost is one figure, from the manifest, in `dpro info` and `dpro goodput`."""

import dataclasses

import pytest

from dpro.analysis.recording import RecordingShare, mean_share, recording_in_words, recording_share
from tests.builders import cpu_job


def manifest_with(tmp_path, costs, **options):
    return dataclasses.replace(cpu_job().write(tmp_path / "run").manifest, windows=costs, options=options)


def test_ends_of_steps_and_windows_add_up(tmp_path):
    costs = {"ends_share": 0.002, "count": 4, "cost_ms": 20.0, "share": 0.003}
    cost = recording_share(manifest_with(tmp_path, costs, budget=0.01))
    assert cost == RecordingShare(pytest.approx(0.005), 0.002, 0.003, 0.01)
    words = (
        "0.50% of the time in steps: 0.20% at the ends of steps, 0.30% by 4 deep windows that cost 20 ms each"
    )
    assert recording_in_words(cost, 4, 20.0) == words


def test_what_a_long_window_cost_is_in_seconds(tmp_path):
    cost = recording_share(manifest_with(tmp_path, {"ends_share": 0.002, "share": 0.4}, budget=0.01))
    assert recording_in_words(cost, 1, 3310.0).endswith("by 1 deep window that cost 3.31 s")


def test_a_run_without_windows_cost_what_the_ends_of_steps_took(tmp_path):
    cost = recording_share(manifest_with(tmp_path, {"ends_share": 0.004}, budget=0.01, windows=False))
    assert cost == RecordingShare(0.004, 0.004, 0.0, None)
    assert recording_in_words(cost) == "0.40% of the time in steps: 0.40% at the ends of steps"


def test_a_budget_that_the_ends_of_steps_use_up_is_the_reason_for_few_windows(tmp_path):
    cost = recording_share(manifest_with(tmp_path, {"ends_share": 0.02}, budget=0.01, every=None))
    assert "that used up the budget (1.0%), so no more windows followed" in recording_in_words(cost)
    fixed = recording_share(manifest_with(tmp_path, {"ends_share": 0.02}, budget=0.01, every=10))
    assert "budget" not in recording_in_words(fixed)


def test_an_older_run_says_nothing(tmp_path):
    assert recording_share(manifest_with(tmp_path, {"count": 4, "cost_ms": 20.0, "share": 0.003})) is None


def test_attempts_count_by_how_long_they_lasted():
    one, other = RecordingShare(0.01, 0.002, 0.008), RecordingShare(0.03, 0.03, 0.0)
    mean = mean_share([(one, 300.0), (None, 50.0), (other, 100.0)])
    assert (mean.share, mean.at_ends, mean.windows) == pytest.approx((0.015, 0.009, 0.006))
    assert mean_share([(None, 5.0), (one, 0.0)]) is None
