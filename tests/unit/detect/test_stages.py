from dataclasses import replace

import numpy as np
import pytest

from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.observations import observe
from dpro.detect.uneven_work import find_uneven_work_of_stages, with_doubt
from dpro.replay.construction.graph_builder import build_graph
from dpro.store import open_run
from tests.reference.training_jobs import Job, Machine, run_job
from tests.reference.training_records import Recording, write_run
from tests.unit.detect.jobs import found_in_graph

WINDOWS = ((4, 2), (9, 2), (14, 2))
UNEVEN = Job("tp_pp", 16, 16, gpu=True, noise="1%", windows=WINDOWS, fault="imbalance", severity=3.0)


class Evened(Machine):
    """The same work, spread evenly: a stage of 1 and one of 3 units have 2 each."""

    def _fault_of_work(self, ranks):
        return np.full(ranks.size, 2.0)


def graph_of(folder, job, lost=()):
    return build_graph(open_run(write_run(folder / "run", job, run_job(job), Recording(lost=lost)))).graph


def length_ms(log):
    return float(log.steps[-1]["end"].max()) / len(log.steps)


def evened(job):
    machine = Evened(job)
    for step in range(job.num_steps):
        machine.step(step)
    return machine.log


def test_stage_with_more_work_is_named_with_what_even_stages_would_save(tmp_path):
    (finding,) = found_in_graph(graph_of(tmp_path, UNEVEN))
    assert (finding.class_, finding.component_kind, finding.component_id) == ("imbalance.stage", "stage", "1")
    assert finding.ranks == tuple(range(8, 16))
    saved = length_ms(run_job(UNEVEN)) - length_ms(evened(UNEVEN))
    assert finding.cost_ns / 1e6 == pytest.approx(saved, rel=0.1)
    assert finding.confidence == 0.5  # hosts have eight ranks here, a stage has a host
    assert "slow hosts look the same" in finding.evidence[-1]
    values = {one.kind: one.values for one in finding.observations}
    assert values["work-of-stage"]["stage"] == 1
    without = values["step-without-it"]
    assert without["step_ns"] - without["changed_ns"] == pytest.approx(finding.cost_ns)


def test_stage_that_began_to_have_more_work_is_named(tmp_path):
    windows = (*WINDOWS, (18, 2), (22, 2))
    job = replace(UNEVEN, num_ranks=4, gpu=False, num_steps=24, windows=windows, since=12)
    (finding,) = find_uneven_work_of_stages(Baseline(graph_of(tmp_path, job)))
    assert finding.ranks == (2, 3)


def test_stage_of_one_recorded_rank_may_be_slow_instead(tmp_path):
    job = replace(UNEVEN, num_ranks=4, gpu=False)
    (finding,) = find_uneven_work_of_stages(Baseline(graph_of(tmp_path, job, lost=(1, 3))))
    assert (finding.ranks, finding.confidence) == ((2,), 0.5)
    assert "a slow rank would look the same" in finding.evidence[-1]


def test_slow_rank_of_a_stage_does_not_make_the_stage_uneven(tmp_path):
    job = replace(UNEVEN, num_ranks=4, fault="compute", victim=3, severity=1.5)
    (finding,) = found_in_graph(graph_of(tmp_path, job))
    assert (finding.class_, finding.ranks) == ("slow.compute", (3,))


def test_even_stages_are_no_finding(tmp_path):
    assert found_in_graph(graph_of(tmp_path, replace(UNEVEN, fault=""))) == []


def test_of_a_rank_that_is_a_stage_it_is_said_that_either_may_be_true():
    slow = Finding("slow.compute", "rank", "3", (3,), 0.2, 0.9, 1e6, (observe("test", "it is slow"),))
    stage = Finding("imbalance.stage", "stage", "1", (3,), 0.2, 0.5, 1e6, (observe("test", "it is large"),))
    (kept,) = with_doubt([slow], [stage])
    assert kept.confidence == 0.5
    assert kept.evidence[-1].startswith("either the rank is slow")
    assert (kept.observations[-1].kind, kept.observations[-1].values) == ("slow-or-uneven", {"stage": "1"})
    assert with_doubt([slow], [replace(stage, confidence=0.9)]) == []  # it does more operations
    assert with_doubt([slow], [replace(stage, ranks=(2,))]) == [slow]
