"""When the input of the whole job is blamed, and when it is not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dpro.detect.findings import Finding
from tests.unit.detect.jobs import MS, Work, equal_work, found_in_graph, graph_of, mean_step_ns, slower


def diagnosed(tmp_path: Path, work: Work) -> list[Finding]:
    return found_in_graph(graph_of(tmp_path / "run", work))


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_input_slow_on_all_ranks_is_one_finding_of_the_job_that_blames_no_rank(num_ranks, tmp_path):
    everyone = list(range(num_ranks))
    slow = graph_of(tmp_path / "slow", slower(equal_work(num_ranks), "data", everyone, plus=20))
    (finding,) = found_in_graph(slow)
    assert (finding.class_, finding.component_kind) == ("slow.host", "job")
    assert finding.component_id == "the input pipeline"
    assert finding.ranks == tuple(everyone)
    without = graph_of(
        tmp_path / "without", replace(equal_work(num_ranks), data=equal_work(num_ranks).data * 0)
    )
    assert finding.cost_ns == pytest.approx(mean_step_ns(slow) - mean_step_ns(without), rel=0.02)
    assert "each rank spends 21 ms per step" in finding.evidence[0]


def test_the_time_it_takes_to_hand_over_a_batch_is_not_blamed(tmp_path):
    assert diagnosed(tmp_path, slower(equal_work(4), "data", [0, 1, 2, 3], plus=2)) == []


def test_input_of_one_rank_is_not_also_blamed_on_the_job(tmp_path):
    (finding,) = diagnosed(tmp_path, slower(equal_work(4), "data", 2, plus=40))
    assert (finding.component_kind, finding.component_id) == ("rank", "2")


def test_slow_input_everywhere_and_slower_on_one_rank_splits_the_cost(tmp_path):
    work = slower(slower(equal_work(4), "data", [0, 1, 2, 3], plus=20), "data", 2, plus=30)
    costs = {finding.component_kind: finding.cost_ns for finding in diagnosed(tmp_path, work)}
    assert costs == pytest.approx({"rank": 30 * MS, "job": 21 * MS}, rel=0.02)


def test_a_slow_rank_for_another_reason_does_not_hide_slow_input(tmp_path):
    work = slower(slower(equal_work(4), "data", [0, 1, 2, 3], plus=20), "compute", 2, plus=10)
    costs = {finding.class_: finding.cost_ns for finding in diagnosed(tmp_path, work)}
    assert costs == pytest.approx({"slow.host": 21 * MS, "slow.compute": 20 * MS}, rel=0.02)


def test_slow_computation_everywhere_blames_no_rank(tmp_path):
    assert diagnosed(tmp_path, slower(equal_work(4), "compute", [0, 1, 2, 3], plus=50)) == []


def test_one_step_cannot_blame_the_input(tmp_path):
    assert diagnosed(tmp_path, slower(equal_work(4, num_steps=1), "data", [0, 1, 2, 3], plus=20)) == []


def test_one_slow_batch_is_not_blamed(tmp_path):
    work = equal_work(4, num_steps=8)
    work.data[:, 3] += 200
    assert diagnosed(tmp_path, work) == []


def test_input_slow_on_half_of_the_ranks_is_not_said_of_the_others(tmp_path):
    findings = diagnosed(tmp_path, slower(equal_work(4), "data", [1, 2], plus=40))
    assert findings
    assert {rank for finding in findings for rank in finding.ranks} == {1, 2}
