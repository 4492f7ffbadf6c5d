"""Ranks that vary far more than their peers, in made-up jobs of which only calls are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpro.detect.findings import Finding
from dpro.detect.stragglers.from_calls import find_jitter, spread_of, varying
from dpro.detect.stragglers.own_time import calls_of, own_time
from tests.unit.detect.calling import MS, Job, counted, data_parallel, late_ranks, noisy, slower, tables

STEPS = 120


def found(job: Job) -> list[Finding]:
    collectives, steps, counters, workers = tables(job)
    calls = calls_of(collectives)
    return find_jitter(own_time(calls, steps), calls, counters, workers)


def jittery(job: Job, rank: int, sigma: float, seed: int = 9, since: int = 0) -> Job:
    """The same with a rank whose steps vary, each as a whole."""
    factors = job.factors.copy()
    draws = np.random.default_rng(seed).standard_normal(factors.shape[1] - since)
    factors[rank, since:] *= np.exp(sigma * draws)[:, None]
    return replace(job, factors=factors)


def test_spread_is_that_of_the_slowest_tenth_against_the_median() -> None:
    own = np.array([[100.0, 100.0]] * 8 + [[150.0, 100.0]] * 2)
    assert spread_of(own) == pytest.approx([np.log(1.5), 0.01])


def test_a_rank_that_varies_is_reported_with_what_it_costs_and_not_as_slow() -> None:
    job = jittery(noisy(data_parallel(4, STEPS), 1, 0.01), 2, 0.3)
    (finding,) = found(job)
    assert (finding.class_, finding.component_id, finding.ranks) == ("jitter", "2", (2,))
    # Of 40 ms with a deviation of 0.3 what is above the others: 0.4 deviations on average.
    assert finding.cost_ns == pytest.approx(40 * MS * 0.3 * 0.4, rel=0.4)
    values = {one.kind: one.values for one in finding.observations}
    assert values["own-time-varies"]["own_ns"] == pytest.approx(40 * MS, rel=0.1)
    assert finding.evidence[-1] == "no counter of its host was recorded"
    assert late_ranks(*tables(job)) == []


def test_the_counter_that_is_higher_in_its_slow_steps_is_the_cause() -> None:
    job = jittery(noisy(data_parallel(4, STEPS), 1, 0.01), 2, 0.3)
    longer = np.clip(job.factors[..., 0] - 1, 0, None) * 40
    (finding,) = found(counted(job, step_run_queue_ns=longer, step_gc_ns=np.zeros_like(longer)))
    assert finding.cause == "CPU contention"
    assert "waits for a CPU core" in finding.evidence[-1]


def test_a_rank_that_varied_for_a_while_is_not_reported() -> None:
    assert found(jittery(noisy(data_parallel(4, STEPS), 1, 0.01), 2, 0.3, since=STEPS // 2)) == []


def test_a_slow_rank_is_not_a_varying_one() -> None:
    assert found(slower(noisy(data_parallel(4, STEPS), 1, 0.02), 1, 1.5)) == []


def test_few_steps_show_nothing() -> None:
    assert found(jittery(noisy(data_parallel(4, 50), 1, 0.01), 2, 0.3)) == []


def test_what_costs_little_is_not_reported() -> None:
    assert varying(np.exp(np.random.default_rng(1).normal(0, [0.001, 0.05], (STEPS, 2)))) == [1]
    job = jittery(noisy(data_parallel(4, STEPS), 1, 0.002), 2, 0.05)
    assert all(finding.severity >= 0.02 for finding in found(job))


@pytest.mark.parametrize(("sigma", "tail"), [(0.02, 0.0), (0.1, 0.0), (0.05, 2.5)])
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_healthy_jobs_of_any_noise_report_nothing(num_ranks: int, sigma: float, tail: float) -> None:
    generator = np.random.default_rng(17)
    for _ in range(200):
        draws = (
            generator.standard_t(tail, (240, num_ranks)) if tail else generator.normal(size=(240, num_ranks))
        )
        own = 40 * MS * np.exp(sigma * draws.clip(-8, 60)).clip(0.2, 30)
        assert varying(own) == []
        assert varying(own[:60]) == []
