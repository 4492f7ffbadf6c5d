"""How much faster one job is than another, from its steps."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.extensions.trial.measure import CoreUse, MeasuredChange, compare, load_differs, step_times
from dpro.schema import STEPS
from dpro.store import Manifest, open_run, write_manifest, write_part

MS = 1_000_000


def run_of(folder, durations, windows=()):
    """A run of one rank whose steps take that long, ms; some are in a deep window."""
    rows = {
        "rank": [0] * len(durations),
        "step": list(range(1, len(durations) + 1)),
        "window": [0 if step in windows else -1 for step in range(1, len(durations) + 1)],
        "start_ns": [0] * len(durations),
        "duration_ns": [int(duration * MS) for duration in durations],
    }
    write_part(folder, STEPS, "rank00000", pl.DataFrame(rows, schema_overrides={"rank": pl.Int32}))
    write_manifest(folder, Manifest(1, [0]))
    return open_run(folder)


def noisy(middle, seed, size=40):
    return middle * MS * (1 + 0.02 * np.random.default_rng(seed).standard_normal(size))


def test_first_steps_those_of_windows_and_the_one_after_are_left_out(tmp_path):
    durations = [100] * 5 + [10] * 20
    durations[14] = durations[15] = durations[16] = 50
    times = step_times(run_of(tmp_path / "run", durations, windows=(15, 16)), skip=5)
    assert times.tolist() == [10 * MS] * 17


def test_too_few_steps_are_refused(tmp_path):
    with pytest.raises(Unanswerable, match="9 of 14 steps can be measured"):
        step_times(run_of(tmp_path / "run", [10] * 14), skip=5)


def test_a_change_of_ten_percent_is_found_in_pairs(tmp_path):
    measured = compare(
        [noisy(10, seed) for seed in range(4)], [noisy(9, seed) for seed in range(4, 8)], False
    )
    assert measured.ratio == pytest.approx(0.9, rel=0.02)
    assert measured.low < 0.9 < measured.high < 1
    assert (measured.verdict, measured.num_pairs, measured.num_steps) == ("faster", 4, 40)


def test_the_same_job_twice_is_no_effect():
    measured = compare(
        [noisy(10, seed) for seed in range(3)], [noisy(10, seed) for seed in range(3, 6)], False
    )
    assert measured.verdict == "no effect beyond noise"
    assert measured.low < 1 < measured.high


def test_an_effect_smaller_than_what_the_unchanged_job_varies_by_is_none():
    before = [np.full(20, middle * MS) for middle in (10.0, 11.0, 12.0)]
    after = [times * 0.95 for times in before]
    measured = compare(before, after, False)
    assert measured.high < 1
    assert measured.noise == pytest.approx(0.1, abs=0.01)  # A against A: 10% and 9%
    assert measured.verdict == "no effect beyond noise"


def test_drift_that_hits_both_of_a_pair_does_not_widen_the_interval():
    before = [np.full(20, 10.0 * MS * drift) for drift in (1.0, 1.01, 1.02)]
    measured = compare(before, [times * 0.9 for times in before], False)
    assert measured.high - measured.low < 1e-6
    assert measured.ratio == pytest.approx(0.9)


def test_where_steps_differ_by_what_they_do_their_mean_is_compared():
    before, after = np.full(40, 10.0 * MS), np.tile([*[4.0] * 19, 44.0], 2) * MS
    assert compare([before], [after], True).ratio == pytest.approx(0.6)
    assert compare([before], [after], False).ratio == pytest.approx(0.4)


def test_where_batches_come_in_bursts_the_mean_is_compared_and_pauses_alone_make_no_bursts():
    before, bursts, pauses = noisy(36, 0), np.tile([1.5, 1.5, 14.0], 14) * MS, noisy(18, 1)
    pauses[20] *= 20
    mean = float(bursts.mean() / before.mean())
    assert compare([before] * 3, [bursts] * 3, False).ratio == pytest.approx(mean)
    assert compare([before], [pauses], False).ratio == pytest.approx(0.5, rel=0.05)


def test_a_single_pair_has_an_interval_from_its_steps_and_no_noise():
    measured = compare([noisy(10, 0)], [noisy(8, 1)], False)
    assert measured.low < 0.8 < measured.high < 1
    assert measured.noise is None


@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=6))
def test_the_measured_ratio_is_within_its_interval(shifts):
    before = [np.full(10, 10.0 * MS) for _ in shifts]
    after = [np.full(10, 10.0 * MS * np.exp(shift)) for shift in shifts]
    measured = compare(before, after, False)
    assert measured.low <= measured.ratio * (1 + 1e-12)
    assert measured.ratio <= measured.high * (1 + 1e-12)


def loads(wait, cpu):
    return [CoreUse(wait * MS, cpu * MS)] * 3


@pytest.mark.parametrize(
    ("before", "after", "ratio", "said"),
    [
        # 8 ms of waits have gone and the step takes 7 less: that is no gain of the change.
        ((9, 2), (1, 2), 0.3, "the load of the machine differed: a step waits 9 ms for a core unchanged"),
        ((1, 2), (9, 2), 1.7, "the load"),
        # Half the work waits half as long: both sides are as crowded.
        ((6, 3), (3, 1.5), 0.55, ""),
        # The waits differ by 1 ms, the step by 5.
        ((2, 4), (1, 4), 0.5, ""),
        # The waits differ, but by less than counts.
        ((0.1, 4), (0.02, 4), 0.99, ""),
    ],
)
def test_sides_of_which_one_waited_much_longer_for_cores_are_not_compared(before, after, ratio, said):
    measured = MeasuredChange(ratio, ratio, ratio, 0.01, 10 * MS, 3, 40)
    why = load_differs(loads(*before), loads(*after), measured)
    assert why.startswith(said) if said else why == ""
    judged = replace(measured, withheld=why).verdict
    assert judged.startswith("not judged: the load") if said else judged == "faster"


def test_sides_are_compared_where_waits_for_cores_were_not_recorded():
    measured = MeasuredChange(0.5, 0.5, 0.5, 0.01, 10 * MS, 3, 40)
    assert load_differs([None], loads(9, 1), measured) == ""
