from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.detect.load_model import AHEAD, explain
from dpro.detect.stragglers.own_time import calls_of, own_time
from tests.unit.detect.calling import MS, Job, counted, data_parallel, late_ranks, noisy, slower, tables

NUM_RANKS, NUM_STEPS = 4, 40
USUAL = 4096.0
STEPS = np.arange(NUM_STEPS)


def findings(job):
    return late_ranks(*tables(job))


def named(job):
    return [(each.class_, each.ranks) for each in findings(job)]


def healthy(seed=1, num_ranks=NUM_RANKS, sigma=0.03) -> Job:
    return noisy(data_parallel(num_ranks, NUM_STEPS), seed, sigma)


def varying(seed=1, num_ranks=NUM_RANKS, spread=0.7):
    return np.rint(USUAL * np.exp(np.random.default_rng(seed).uniform(0, spread, (num_ranks, NUM_STEPS))))


def always_more(rank=2, times=2.0):
    amounts = np.full((NUM_RANKS, NUM_STEPS), USUAL)
    amounts[rank] *= times
    return amounts


def handed(job: Job, amounts, fixed=0.2, quadratic=0.0) -> Job:
    """Batches of these sizes; all work but a fixed part of it grows with them, some with their square."""
    x = amounts / USUAL
    takes = fixed + (1 - fixed) * ((1 - quadratic) * x + quadratic * x * x)
    return replace(sized(job, amounts), factors=job.factors * takes[:, :, None])


def sized(job: Job, amounts) -> Job:
    """Batches of these sizes, which make no difference."""
    return counted(job, step_input_elements=amounts / MS)


ALL = ("imbalance.data", (0, 1, 2, 3))


def test_own_time_at_equal_work_is_what_the_mean_batch_would_take():
    # A fifth of a step of 2 units is fixed, each of these takes 0.4: 1, 2 and 4 of them 0.6, 1.0 and 1.8.
    amounts = np.array([[1.0, 4.0], [2.0, 4.0], [4.0, 2.0], [2.0, 1.0]] * 6)
    uneven = explain((0.2 + 0.4 * amounts) * MS, amounts, np.arange(24))
    assert (uneven.model.power, uneven.model.typical) == (1, 2)
    assert uneven.model.share == pytest.approx(0.8, abs=0.01)
    assert uneven.equal_ns[:4] == pytest.approx(
        np.repeat([[1.2], [1.4], [1.4], [0.8]], 2, axis=1) * MS, rel=0.01
    )


@pytest.mark.parametrize("times", [1.5, 5.0])
def test_of_ranks_one_of_which_always_has_more_all_take_as_long_at_equal_work(times):
    amounts = np.tile([3 * USUAL, USUAL, USUAL], (14, 1))
    amounts[::3, 0] = amounts[1::4, 1] = np.nan  # samples may be missing
    uneven = explain(np.tile([times, 1.0, 1.0], (14, 1)) * MS, amounts, np.arange(14))
    assert uneven.model.significance == 0
    assert uneven.equal_ns / uneven.equal_ns[0, 0] == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("quadratic", [0.0, 0.4])
def test_work_that_is_uneven_from_step_to_step_is_reported_with_its_cost_and_no_rank_is_blamed(quadratic):
    job = handed(healthy(), varying(), quadratic=quadratic)
    (finding,) = findings(job)
    assert (finding.class_, finding.component_kind, finding.ranks) == ("imbalance.data", "job", (0, 1, 2, 3))
    takes = job.factors.sum(axis=2).T * 40 / 3
    even = takes / (work := takes.copy()) * work.mean(axis=1, keepdims=True)  # as much for everyone
    assert finding.cost_ns / MS == pytest.approx((takes.max(axis=1) - even.max(axis=1)).mean(), rel=0.2)
    assert finding.confidence > 0.9


def test_a_rank_that_always_has_more_is_not_blamed():
    assert named(handed(healthy(), always_more())) == [ALL]
    assert named(handed(healthy(), always_more(), quadratic=0.5)) == [ALL]


def test_a_rank_that_runs_more_backward_passes_has_more_work_where_batches_do_not_show_it():
    passes = always_more() / USUAL
    job = handed(healthy(), always_more())
    (finding,) = findings(counted(job, step_input_elements=passes**0, step_backward_calls=passes))
    assert (finding.class_, finding.ranks) == ALL
    assert "more backward passes than the mean of all" in finding.evidence[0]
    most = finding.observations[0].values
    assert (most["rank"], most["often_share"]) == (2, 1.0)
    assert most["more_share"] == pytest.approx(2 / (1 + 1 / NUM_RANKS) - 1)
    slow = slower(counted(healthy(), step_backward_calls=passes**0), 1, 1.5)
    assert named(slow) == [("slow.compute", (1,))]


def test_of_many_ranks_the_one_that_began_to_have_more_is_not_blamed():
    amounts = np.full((16, NUM_STEPS), USUAL)
    amounts[5, 20:] *= 2
    job = handed(noisy(data_parallel(16, NUM_STEPS), 1, 0.01), amounts)
    assert [each.class_ for each in findings(job)] == ["imbalance.data"]


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("buckets", [3, 8])
def test_whether_calls_are_waited_for_at_once_is_inferred_with_uneven_work_too(blocks, buckets):
    job = handed(noisy(data_parallel(4, NUM_STEPS, buckets=buckets, blocks=blocks), 1, 0.05), varying())
    collectives, steps, _, _ = tables(job)
    own = own_time(calls_of(collectives), steps).sort("step", "rank")
    truly = job.factors.sum(axis=2).T[own["step"].unique().sort().to_list()] * 40 / buckets + 1
    assert own["own_ns"].to_numpy() / MS == pytest.approx(truly.ravel(), rel=0.05)


def test_what_a_rank_is_slow_beyond_its_work_is_its_own():
    more = varying()
    more[2] *= 1.5
    found = {each.class_: each for each in findings(slower(handed(healthy(), more), 2, 1.5))}
    assert set(found) == {"imbalance.data", "slow.compute"}
    assert found["slow.compute"].ranks == (2,)
    assert "50%" in found["slow.compute"].evidence[0] or "49%" in found["slow.compute"].evidence[0]


def test_slow_rank_with_as_much_work_as_others_is_blamed():
    assert named(slower(sized(healthy(), always_more(times=1.0)), 1, 1.5)) == [("slow.compute", (1,))]
    assert named(slower(sized(healthy(), varying()), 1, 1.5)) == [("slow.compute", (1,))]
    assert ("slow.compute", (1,)) in named(slower(handed(healthy(), always_more(2)), 1, 1.5))


@pytest.mark.parametrize("seed", range(4))
def test_batches_that_differ_in_what_costs_nothing_are_no_finding(seed):
    assert named(sized(healthy(seed, sigma=0.1), varying(seed))) == []
    assert named(sized(noisy(data_parallel(2, NUM_STEPS), seed, 0.05, 2.5), varying(seed, 2))) == []
    assert named(sized(healthy(seed), always_more(seed % 4, 3.0))) == []


def test_batches_that_differ_little_are_no_finding():
    assert named(handed(healthy(), varying(spread=0.02))) == []


def test_batches_that_are_fetched_a_step_ahead_belong_to_the_next_step():
    amounts = varying()
    job = handed(healthy(), amounts)
    ahead = sized(job, np.roll(amounts, -1, axis=1))
    (finding,) = findings(ahead)
    assert finding.class_ == "imbalance.data"
    assert AHEAD in finding.observations


def test_missing_samples_make_little_difference():
    amounts = always_more()
    job = handed(healthy(), amounts)
    collectives, steps, counters, workers = tables(job)
    left = counters.sample(fraction=0.7, seed=1)
    assert [each.class_ for each in late_ranks(collectives, steps, left, workers)] == ["imbalance.data"]
    assert explain(np.ones((8, 2)) * MS, np.full((8, 2), np.nan), STEPS[:8]) is None


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 1.0), st.integers(0, 10_000), st.integers(2, 6))
def test_the_share_that_grows_is_found_whoever_is_slow(share, seed, num_ranks):
    draw = np.random.default_rng(seed)
    amounts = draw.uniform(1, 3, (40, num_ranks))
    slow = draw.uniform(1, 2, num_ranks)
    typical = np.median(amounts)
    own = slow * (1 - share + share * amounts / typical) * MS
    relation = explain(own, amounts, STEPS).model
    assert relation.curve(np.array([1.0, 2.0, 3.0])) == pytest.approx(
        1 - share + share * np.array([1.0, 2.0, 3.0]) / typical, rel=0.03
    )
