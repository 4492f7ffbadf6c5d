"""How much slower ranks are than others and than before, in arrays of own times."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.detect.stragglers.excess import Excess, Team, late_columns, median_of_peers, midmean


def team(own: np.ndarray) -> Team:
    """A team of all columns."""
    steps, ranks = own.shape
    zeros = np.zeros(own.shape)
    return Team(list(range(ranks)), np.arange(steps), own, zeros, zeros.astype(np.int64))


def work(seed: int, num_steps: int, num_ranks: int, sigma: float = 0.02, unlike: float = 0.0) -> np.ndarray:
    """[T, R] ns of ranks that do the same: noise of each step, and devices that differ."""
    random = np.random.default_rng(seed)
    devices = random.normal(0, unlike, num_ranks)
    return 1e8 * np.exp(devices + random.normal(0, sigma, (num_steps, num_ranks)))


def became(own: np.ndarray) -> list[Excess]:
    return [each for each in late_columns(team(own)) if each.against_past]


def test_midmean_is_the_mean_of_the_middle_half():
    values = np.array([[100.0, 1.0], [1.0, 2.0], [2.0, 3.0], [4.0, 4.0], [-50.0, 5.0]])
    assert midmean(values).tolist() == [(1 + 2 + 4) / 3, 3.0]


def test_midmean_of_normal_values_varies_by_a_tenth_more_than_their_mean():
    draws = np.random.default_rng(0).normal(size=(100, 20_000))
    assert midmean(draws).std() * 10 == pytest.approx(1.093, rel=0.02)


def test_median_of_the_others_leaves_out_the_own():
    values = np.random.default_rng(0).normal(size=(5, 7))
    expected = [[np.median(np.delete(row, at)) for at in range(7)] for row in values]
    assert median_of_peers(values) == pytest.approx(np.array(expected))
    assert median_of_peers(values[:, :6])[0, 2] == pytest.approx(np.median(np.delete(values[0, :6], 2)))


@pytest.mark.parametrize("num_ranks", [4, 16])
def test_rank_that_becomes_five_percent_slower_is_seen_within_twenty_steps_whatever_device_it_has(num_ranks):
    """5% of noise of each of 16 pieces of work is 1.3% of a step."""
    jobs = [work(seed, 100, num_ranks, sigma=0.013, unlike=0.01) for seed in range(10)]
    for own in jobs:
        own[80:, 1] *= 1.05
    found = [each.column for own in jobs for each in became(own)]
    assert set(found) == {1}
    assert len(found) >= 8


def test_devices_that_always_differed_are_not_said_to_have_become_slower():
    for seed in range(10):
        assert became(work(seed, 240, 16, unlike=0.03)) == []


def test_others_are_not_blamed_where_a_peer_became_faster():
    own = work(1, 100, 2)
    own[70:, 0] *= 0.9
    assert became(own) == []


def test_rank_that_catches_up_with_slower_peers_holds_no_rank_up():
    own = work(2, 100, 4)
    own[:70, 3] *= 0.9  # had less to do
    assert became(own) == []


def test_all_becoming_slower_together_is_no_rank_of_its_own():
    own = work(3, 100, 4)
    own[70:] *= 1.2
    assert late_columns(team(own)) == []


@pytest.mark.parametrize("tail", [0.0, 2.5])
def test_noise_alone_makes_no_rank_slower_than_before(tail):
    random = np.random.default_rng(5)
    shape = (2500, 8)
    draws = random.standard_t(tail, shape).clip(-8, 60) if tail else random.standard_normal(shape)
    own = 1e8 * np.exp(0.05 * draws)
    looks = (own[max(0, end - 240) : end] for end in range(40, 2500, 20))
    assert [found for look in looks for found in became(look)] == []
