"""Losses of a changed job beside those of the job as it is."""

import numpy as np
import polars as pl
import pytest

from dpro.extensions.trial.measure import compare_losses, losses_of


def curve(length=40, end=1.0, seed=0, noise=0.0):
    steps = np.arange(length)
    return end + np.exp(-steps / 5) + noise * np.random.default_rng(seed).standard_normal(length)


def test_the_same_losses_are_the_same():
    compared = compare_losses([curve(), curve()], [curve()])
    assert not compared.differs
    assert (compared.spread, compared.passes) == (0.0, 40)


def test_losses_that_do_not_fall_differ_with_numbers():
    compared = compare_losses([curve(), curve()], [np.full(40, 2.0)])
    assert compared.differs
    assert compared.base == pytest.approx(curve()[20:].mean())
    assert compared.changed == 2.0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_losses_that_are_not_finite_differ(bad):
    assert compare_losses([curve()], [np.append(curve(39), bad)]).differs


def test_a_job_that_diverges_by_itself_says_nothing_of_the_change():
    assert not compare_losses([np.full(40, np.nan)], [np.full(40, np.nan)]).differs


def test_what_recordings_of_one_job_differ_by_is_tolerated():
    noisy = [curve(noise=0.5, seed=seed) for seed in range(6)]
    assert not compare_losses(noisy[:3], noisy[3:]).differs


def test_a_pass_of_twice_the_samples_is_compared_with_two():
    base = np.arange(40.0)
    doubled = base.reshape(20, 2).mean(axis=1)
    compared = compare_losses([base], [doubled], passes=2.0)
    assert compared.changed == compared.base == base[20:].mean()


def test_only_what_both_trained_on_is_compared():
    assert compare_losses([curve(60)], [curve(40)]).passes == 40


def test_too_few_passes_are_not_compared():
    assert compare_losses([curve(5)], [curve()]) is None


def test_losses_of_ranks_are_averaged_in_the_order_of_their_passes():
    class Recording:
        def table(self, _table):
            return pl.DataFrame(
                {
                    "rank": [0, 1, 0, 1, 0, 0],
                    "kind": ["loss"] * 5 + ["grad_norm"],
                    "time_ns": [2, 1, 1, 2, 3, 1],
                    "value": [4.0, 1.0, 2.0, 3.0, 9.0, 7.0],
                }
            )

    assert losses_of(Recording()).tolist() == [1.5, 3.5]
