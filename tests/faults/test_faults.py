"""Real jobs with a fault of their own: what is said of them names the rank, the class and the place.

One job of each kind, and a healthy one; `python -m benchmarks.diagnosis.jobs` runs all of the table.
"""

from __future__ import annotations

import os

import pytest

from benchmarks.diagnosis.jobs import graded_job
from tests.faults.table import JOBS, TRAIN, FaultJob

pytest.importorskip("torch")

ROWS = {job.row: job for job in reversed(JOBS.values()) if job.row and job.script == TRAIN}
HEALTHY = "healthy, plain"


def test_the_table_has_enough_jobs_whose_names_differ_in_more_than_case():
    assert sum(not job.healthy for job in JOBS.values()) >= 60
    assert sum(job.healthy for job in JOBS.values()) >= 20
    assert len({name.lower() for name in JOBS}) == len(JOBS)


@pytest.mark.slow
@pytest.mark.parametrize("job", ROWS.values(), ids=lambda job: job.name)
def test_rank_and_class_of_a_fault_are_named_first(job: FaultJob):
    if job.root and os.geteuid():
        pytest.skip("needs root")
    grade = graded_job(job, loaded=True)
    assert grade.right, grade.said
    assert not grade.wrong_rank, grade.said
    assert grade.place is not False, grade.said


@pytest.mark.slow
def test_nothing_is_said_of_a_healthy_job():
    grade = graded_job(JOBS[HEALTHY], loaded=True)
    assert not grade.alarm, grade.said
