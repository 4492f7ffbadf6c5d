"""Jobs that wait for their input on every rank, found by counters of steps."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.detect.host_bound import find_input_bound
from tests.unit.detect.calling import MS, counted, data_parallel, noisy, tables


def found(waits_ms: np.ndarray, *, on_gpus: bool = False):
    job = noisy(data_parallel(3, waits_ms.shape[1]), 1, 0.02)  # steps of 41 ms
    _, steps, counters, _ = tables(counted(job, step_data_wait_ns=waits_ms))
    return find_input_bound(steps, counters, on_gpus=on_gpus)


def test_job_that_waits_for_its_data_on_all_ranks_is_reported_with_its_cost():
    (finding,) = found(np.full((3, 20), 12.0))
    assert (finding.class_, finding.component_kind, finding.component_id) == (
        "slow.host",
        "job",
        "the input pipeline",
    )
    assert finding.cost_ns == pytest.approx(12 * MS)
    assert finding.ranks == (0, 1, 2)


def test_it_is_reported_of_the_latest_steps_alone_if_it_began_while_the_job_ran():
    waits = np.full((3, 60), 0.2)
    waits[:, 35:] = 12.0
    (finding,) = found(waits)
    assert "latest 20 steps" in finding.evidence[0]
    assert finding.cost_ns == pytest.approx(12 * MS)


def test_on_gpus_it_is_said_that_they_may_have_had_work_meanwhile():
    (finding,) = found(np.full((3, 20), 12.0), on_gpus=True)
    assert finding.confidence <= 0.5
    assert "not known" in finding.evidence[-1]


def test_one_rank_that_waits_short_waits_and_few_steps_are_no_finding_of_the_job():
    one = np.full((3, 20), 0.2)
    one[1] = 12.0
    now_and_then = np.full((3, 20), 12.0)
    now_and_then[:, ::3] = 0.2
    for waits in (one, now_and_then, np.full((3, 20), 3.0), np.full((3, 9), 12.0)):
        assert found(waits) == []
