"""How what is said of jobs with a known fault is graded."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.diagnosis.jobs import checks_of, graded
from tests.faults.table import JOBS, FaultJob

LATE = FaultJob("late", "sleep", "--ms 30", 4, (2,), ("slow.host",), 30.0, "sleeps")
DEAD = FaultJob("dead", "killed", "", 4, (1, 3), ("dead.rank",), None, "SIGKILL")
HEALTHY = FaultJob("healthy", "none")


def finding(
    class_: str, *ranks: int, cost: float | None = None, kind: str = "rank", line: str = ""
) -> dict[str, Any]:
    part = {"kind": kind, "id": ",".join(map(str, ranks))}
    return {
        "class": class_, "component": part, "ranks": list(ranks), "confidence": 0.9, "cost_ms_per_step": cost,
        "evidence": [line],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "right", "cost", "place", "wrong"),
    [
        ([finding("slow.host", 2, cost=33, line="it sleeps")], True, True, True, False),
        ([finding("slow.host", 2, cost=20)], True, False, False, False),
        ([finding("slow.compute", 2, cost=30)], False, None, None, False),
        ([finding("slow.host", 1, cost=30)], False, None, None, True),
        ([finding("slow.host", 2, cost=30), finding("slow.host", 0)], True, True, False, True),
        ([], False, None, None, False),
    ],
)
def test_the_first_finding_names_class_ranks_cost_and_place(said, right, cost, place, wrong):
    grade = graded(LATE, {"findings": said}, 30.0)
    assert (grade.right, grade.cost, grade.place, grade.wrong_rank) == (right, cost, place, wrong)


def test_of_what_ended_a_job_all_ranks_count_that_are_named_as_surely():
    both = [finding("dead.rank", 3, line="SIGKILL"), finding("dead.rank", 1)]
    assert graded(DEAD, {"findings": both}, None).right
    assert not graded(DEAD, {"findings": both[:1]}, None).right


def test_anything_that_is_said_of_a_healthy_job_is_an_alarm_but_that_its_host_is_crowded_beside_a_load():
    crowded = {"findings": [finding("slow.host", 0, 1, kind="host")]}
    assert graded(HEALTHY, crowded, None).alarm
    assert not graded(HEALTHY, crowded, None, loaded=True).alarm


def test_shares_are_held_to_their_bars():
    right = graded(LATE, {"findings": [finding("slow.host", 2, cost=30, line="sleeps")]}, 30.0)
    checks = checks_of([right, graded(HEALTHY, {"findings": []}, None)], loaded=False)
    assert all(check["holds"] for check in checks.values())
    assert not checks_of([graded(LATE, {"findings": []}, 30.0)], loaded=False)["rank and class"]["holds"]


def test_every_job_of_the_table_says_what_it_costs_by_what_its_script_is_given():
    assert all(job.ms > 0 for job in JOBS.values() if job.cost_ms is not None and job.measured)
