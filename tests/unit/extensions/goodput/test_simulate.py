"""Jobs that fail and recover, simulated: by hand, and against closed forms where their assumptions hold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.campaigns.compared import logged
from dpro.extensions.goodput.outlook import young_daly
from dpro.extensions.goodput.simulate import CLASSES, Recovery, exponential, simulate

H = 3600.0
# Steps of 1 s, after each 10 a checkpoint of 2 s; a start takes 5 s, 3 s after the processes are ended.
PLAIN = Recovery(step_s=1, every=10, stall_s=2, background_s=0, start_s=5, down_s=3, detect_s=4)


def run(recovery, failures_s, horizon_s, of_host=False):
    """Seconds by class of one job that fails at given times."""
    failures = logged(np.array(failures_s, float), np.full(len(failures_s), of_host))
    found = simulate(recovery, failures, horizon_s, np.random.default_rng(0), 1)
    return dict(zip(CLASSES, found.seconds[0], strict=True)) | {"steps": found.steps[0]}


def expected(**seconds):
    return pytest.approx(dict.fromkeys(CLASSES, 0.0) | seconds)


def test_job_that_never_fails_starts_steps_and_saves():
    # 5 s of start, then 12 s for 10 steps and their checkpoint, twice, and 6 steps.
    assert run(PLAIN, [], 35) == expected(start=5, productive=26, checkpoint=4, steps=26)


def test_failure_costs_what_was_done_since_the_last_checkpoint():
    # 5 s of start, 12 for ten steps that are saved, 8 that are lost; 4 until that is seen, 3 until it starts
    # again; 5 s of start, 12 for ten steps, and one more.
    assert run(PLAIN, [25], 50) == expected(
        start=10, productive=21, checkpoint=4, repeated=8, hang=4, down=3, steps=21
    )


def test_failure_close_to_a_checkpoint_is_before_or_after_it_as_far_as_steps_differ():
    # The ninth checkpoint is whole 113 s after the start; the failure comes 1 s later.
    failures = logged(np.array([5 + 9 * 12 + 1.0]), np.zeros(1, bool))

    def lost_s(noise):
        noisy = replace(PLAIN, step_noise=noise)
        return simulate(noisy, failures, 118, np.random.default_rng(0), 2000).seconds[:, 3]

    assert lost_s(0.0) == pytest.approx(1.0)
    # The mean of 109 steps is 0.5 / sqrt(109) = 0.048 s off. Above 1.011 s (z = 0.23) there are eight
    # checkpoints by then, below 0.989 s the ninth is more than 2 s ago.
    assert np.mean(lost_s(0.5) > 2) == pytest.approx(0.82, abs=0.03)
    assert lost_s(0.5).max() == pytest.approx(10, abs=2)


def test_stages_of_other_jobs_are_open_as_far_as_they_are_in_doubt():
    # Fails at 90 s: two starts of 5 s and 3 s between, by a tenth longer or shorter in each job together.
    failures = logged(np.array([90.0]), np.zeros(1, bool))
    open_ = replace(PLAIN, every=0, stall_s=0, detect_s=0, crash_s=0, stage_doubt=0.1)

    def spread_s(recovery):
        lost = simulate(recovery, failures, 200, np.random.default_rng(0), 4_000).seconds
        names = [CLASSES.index(name) for name in ("start", "down")]
        return lost[:, names].sum(axis=1).std()

    assert spread_s(replace(open_, stage_doubt=0.0)) == 0
    assert spread_s(open_) == pytest.approx(13 * 0.1, rel=0.05)
    # Starts that differ by themselves do so each for itself: the second one with what went before it.
    assert spread_s(replace(open_, stage_doubt=0.0, stage_noise=0.1)) == pytest.approx(
        0.1 * np.hypot(8, 5), rel=0.05
    )


def test_checkpoint_in_the_background_is_lost_until_it_is_written():
    recovery = replace(PLAIN, stall_s=0, background_s=6)
    assert run(recovery, [5 + 10 + 5], 20)["repeated"] == 15  # written at 16
    assert run(recovery, [5 + 10 + 7], 22)["repeated"] == 7


def test_failure_while_it_starts_costs_the_start():
    found = run(PLAIN, [2], 14)
    assert (found["start"], found["productive"]) == (7, 0)


def test_neighbours_keep_all_steps_but_one():
    recovery = replace(PLAIN, every=0, stall_s=0, kept_steps=1)
    assert run(recovery, [5 + 20.5], 60)["repeated"] == pytest.approx(1.5)


def test_job_without_checkpoints_begins_again():
    found = run(replace(PLAIN, every=0), [100], 200)
    assert found["steps"] == 200 - 100 - 4 - 3 - 5


def test_job_without_a_spare_waits_for_its_host():
    recovery = replace(PLAIN, hosts=4, spares=0, repair_s=50)
    found = run(recovery, [15], 200, of_host=True)
    assert found["waiting"] == 50 - 3  # it is missed from when the failure is seen


def test_host_that_is_back_has_to_start_its_launcher():
    recovery = replace(PLAIN, hosts=4, spares=0, repair_s=50, launch_s=9)
    assert run(recovery, [15], 200, of_host=True)["waiting"] == 50 + 9 - 3


def test_failure_that_ends_a_process_is_seen_sooner_than_one_that_hangs():
    recovery = replace(PLAIN, crash_s=1)
    hangs = np.array([False, True, False])
    failures = logged(np.array([80.0, 40.0, 20.0]), np.zeros(3, bool), hangs)
    found = simulate(recovery, failures, 200, np.random.default_rng(0), 2)
    assert found.seconds[:, CLASSES.index("hang")].tolist() == [1 + 4 + 1] * 2
    chance = replace(recovery, hangs=0.0)
    found = simulate(
        chance, exponential(1 / 50, 0.0, np.random.default_rng(0)), 900, np.random.default_rng(0), 1
    )
    assert found.seconds[0, CLASSES.index("hang")] == pytest.approx(found.failures[0], abs=1)


def test_spare_takes_the_place_of_the_first_failed_host_only():
    recovery = replace(PLAIN, hosts=4, spares=1, repair_s=100)
    found = run(recovery, [15, 40], 200, of_host=True)
    assert found["waiting"] == (15 + 4 + 100) - (40 + 4 + 3)


def test_smaller_job_goes_on_and_begins_at_its_last_checkpoint_when_the_host_is_back():
    recovery = replace(PLAIN, hosts=4, spares=0, repair_s=50, replicas=4, stall_s=0)
    found = run(recovery, [5], 205, of_host=True)
    # Seen at 9, from 12 on with three of four hosts: 5 s of start, steps until 59, of which 40 are saved;
    # then 3 and 5 s, and steps to 205.
    assert found["smaller"] == pytest.approx(40 / 4)
    assert found["repeated"] == pytest.approx(2)
    assert found["waiting"] == 0
    assert found["productive"] == pytest.approx(40 * 3 / 4 + 205 - 67)


@pytest.mark.parametrize(("keeps_batch", "productive"), [(True, 1.0), (False, 0.75)])
def test_smaller_job_takes_longer_for_a_step_that_counts_as_many_samples_as_it_holds(keeps_batch, productive):
    recovery = replace(
        PLAIN, hosts=4, spares=0, repair_s=1000, replicas=4, every=0, stall_s=0, slower=2.0,
        keeps_batch=keeps_batch, wait_s=7,
    )  # fmt: skip
    found = run(recovery, [5], 5 + 4 + 3 + 7 + 5 + 80, of_host=True)
    assert found["down"] == 3 + 7
    assert found["steps"] == pytest.approx(40 * productive)
    assert found["productive"] == pytest.approx(40 * productive)


def test_replica_that_lost_one_of_eight_gpus_computes_seven_eighths_of_its_samples():
    recovery = replace(
        PLAIN, hosts=4, spares=0, repair_s=1000, replicas=4, every=0, stall_s=0, kept_share=0.875, detect_s=0
    )
    found = run(recovery, [5], 5 + 3 + 5 + 80, of_host=True)
    assert found["steps"] == pytest.approx(80 * (3 + 0.875) / 4)
    alone = replace(recovery, hosts=1, replicas=1)  # which waits for its host otherwise
    assert run(alone, [5], 5 + 3 + 5 + 80, of_host=True)["steps"] == pytest.approx(80 * 0.875)


@pytest.mark.parametrize("every", [100, 300, 900, 2000])
def test_goodput_is_dalys_where_failures_have_no_memory(every):
    # Daly, FGCS 22 (2006), without approximation: a segment takes e^(rR) (e^(r(w+C)) - 1) / r on average.
    rate, work, stall, restart = 1 / (4 * H), float(every), 30.0, 120.0
    recovery = Recovery(1.0, every, stall, 0.0, restart, 0.0, 0.0)
    rng = np.random.default_rng(1)
    found = simulate(recovery, exponential(rate, 0.0, rng), 4000 * H, rng, 16)
    closed = work / (np.exp(rate * restart) * (np.exp(rate * (work + stall)) - 1) / rate)
    assert found.goodput.mean() == pytest.approx(closed, rel=0.005)


def test_best_interval_is_young_dalys_where_checkpoints_are_short():
    rate = 1 / (24 * H)
    recovery = Recovery(1.0, 1, 10.0, 0.0, 60.0, 0.0, 0.0)
    best = young_daly(recovery, rate)
    assert best == round((2 * 10 * 24 * H) ** 0.5)

    def goodput(every):
        rng = np.random.default_rng(2)
        return simulate(
            replace(recovery, every=every), exponential(rate, 0.0, rng), 5000 * H, rng, 16
        ).goodput.mean()

    at_best = goodput(best)
    assert at_best > goodput(best // 4)
    assert at_best > goodput(best * 4)


@settings(max_examples=40, deadline=None)
@given(
    every=st.integers(0, 50),
    times=st.tuples(*[st.floats(0, 20)] * 5),
    failures=st.lists(st.floats(0, 3000), max_size=20),
    spares=st.integers(-1, 2),
    replicas=st.sampled_from([0, 4]),
)
@example(every=38, times=(5.042, 0.0, 0.0, 0.0, 0.0), failures=[1033.705], spares=-1, replicas=0)
def test_classes_of_any_job_add_up_to_its_time(every, times, failures, spares, replicas):
    stall, background, start, down, detect = times
    recovery = Recovery(
        1.0, every, stall, background, start, down, detect,
        hosts=4, spares=spares, repair_s=100.0, replicas=replicas,
    )  # fmt: skip
    found = simulate(
        recovery,
        logged(np.array(failures), np.ones(len(failures), bool)),
        2000.0,
        np.random.default_rng(0),
        3,
    )
    assert found.seconds.sum(axis=1) == pytest.approx([2000.0] * 3)
    assert (found.seconds >= -1e-6).all()
    assert (found.failures <= len(failures)).all()


def test_failures_that_come_too_often_are_an_error(monkeypatch):
    monkeypatch.setattr("dpro.extensions.goodput.simulate.MAX_CYCLES", 10)
    with pytest.raises(ValueError, match="too often"):
        run(PLAIN, list(range(1000)), 1000)
