"""How often a healthy job is called sick, and a sick one missed, under noise; the seeds are fixed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.detect.jobs import Work, equal_work, found_in_graph, graph_of, noisy, slower

SEEDS = range(30)


def named(folder: Path, work: Work) -> list[str]:
    return [finding.component_id for finding in found_in_graph(graph_of(folder, work))]


def false_alarms(tmp_path: Path, num_ranks: int, num_steps: int, sigma: float) -> int:
    jobs = (noisy(equal_work(num_ranks, num_steps), seed, sigma) for seed in SEEDS)
    return sum(bool(named(tmp_path / str(seed), job)) for seed, job in zip(SEEDS, jobs))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_noise_of_five_percent_blames_no_rank(num_ranks, tmp_path):
    assert false_alarms(tmp_path, num_ranks, num_steps=4, sigma=0.05) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("sigma", "num_steps"), [(0.01, 4), (0.01, 8), (0.05, 8), (0.05, 12)])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_little_noise_blames_no_rank_however_many_steps_there_are(num_ranks, num_steps, sigma, tmp_path):
    assert false_alarms(tmp_path, num_ranks, num_steps, sigma) == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [4, 8])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_noise_of_ten_percent_blames_a_rank_in_at_most_one_of_thirty_jobs(num_ranks, num_steps, tmp_path):
    assert false_alarms(tmp_path, num_ranks, num_steps, sigma=0.10) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_few_noisy_steps_blame_no_rank(num_steps, tmp_path):
    assert false_alarms(tmp_path, 2, num_steps, sigma=0.05) == 0


@pytest.mark.parametrize("times", [1.2, 1.5])
@pytest.mark.parametrize("num_ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_a_rank_that_computes_clearly_slower_is_found_in_noise_and_no_other(num_ranks, times, tmp_path):
    for seed in SEEDS[::6]:
        work = noisy(slower(equal_work(num_ranks), "compute", 1, times=times), seed, 0.05)
        assert named(tmp_path / str(seed), work) == ["1"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_a_rank_that_is_hardly_slower_may_be_missed_but_no_other_is_blamed(num_ranks, tmp_path):
    for seed in SEEDS:
        work = noisy(slower(equal_work(num_ranks), "compute", 1, times=1.1), seed, 0.05)
        assert named(tmp_path / str(seed), work) in ([], ["1"])
