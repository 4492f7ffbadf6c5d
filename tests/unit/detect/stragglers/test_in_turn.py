"""Ranks that take turns at something that they share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dpro.detect.findings import Finding
from dpro.detect.stragglers.from_calls import distances, find_turns
from dpro.detect.stragglers.own_time import calls_of, own_time
from dpro.replay.steps import host_facts
from tests.unit.detect.calling import Job, data_parallel, noisy, tables


def in_turn(num_ranks: int, ms: float, num_steps: int = 40, seed: int = 3) -> Job:
    """Each rank works a multiple of some time longer, in an order that differs from step to step."""
    job = noisy(data_parallel(num_ranks, num_steps), seed, 0.01)
    generator = np.random.default_rng(seed)
    order = np.array([generator.permutation(num_ranks) for _ in range(num_steps)]).T
    factors = job.factors.copy()
    factors[:, :, 0] += ms * order / job.sections[0].ms
    return replace(job, factors=factors)


def turns_of(job: Job) -> list[Finding]:
    collectives, steps, counters, workers = tables(job)
    calls = calls_of(collectives)
    return find_turns(own_time(calls, steps), calls, workers, host_facts(steps, counters))


@pytest.mark.parametrize("counter", ["step_run_queue_ns", "step_training_thread_cpu_ns"])
def test_ranks_that_wait_for_a_core_or_compute_longer_in_turn_do_not_share_what_holds_them_up(counter):
    job = in_turn(2, 30.0)
    longer_ms = np.where(job.factors[:, :, 0] > 2, 30.0, 0.0)
    assert turns_of(replace(job, counters={counter: 0 * longer_ms + 5}))
    assert turns_of(replace(job, counters={counter: longer_ms + 5})) == []


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_that_take_turns_are_one_finding_about_what_they_share(num_ranks):
    (finding,) = turns_of(in_turn(num_ranks, 30.0))
    assert (finding.class_, finding.component_kind, finding.ranks) == (
        "slow.host",
        "job",
        tuple(range(num_ranks)),
    )
    assert finding.cost_ns == pytest.approx((num_ranks - 1) * 30e6, rel=0.15)
    one_by_one, no_rank = finding.observations
    assert one_by_one.values["later_ns"] == pytest.approx(30e6, rel=0.15)
    assert sum(one_by_one.values[f"rank_{rank}_last_share"] for rank in range(num_ranks)) == pytest.approx(1)
    assert no_rank.kind == "no-rank-at-fault"
    assert finding.remedy == "check what all of them open in each step"


@pytest.mark.parametrize("sigma", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("tail", [0.0, 3.0])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_that_are_late_by_chance_take_no_turns(num_ranks, sigma, tail):
    for seed in range(5):
        assert turns_of(noisy(data_parallel(num_ranks, 60), seed, sigma, tail)) == []


def test_a_rank_that_is_always_last_takes_no_turns():
    own = np.tile([40.0, 80.0], (40, 1))
    assert distances(own, 80.0) is None
    own[::4] = own[::4, ::-1]
    assert distances(own, 80.0) == pytest.approx([40.0])
