"""How long stages of a pipeline stand still, on made-up jobs whose bubble is known, and on real ones."""

from __future__ import annotations

import pytest

from dpro.opening import open_path
from dpro.replay.pipeline.recorded import pipeline_bubbles
from dpro.schema import STEPS
from dpro.selection import Selection
from tests.builders import gpu_job
from tests.pipelines import Job, written


@pytest.mark.parametrize(("num_stages", "num_batches"), [(2, 2), (4, 4), (4, 8), (3, 1)])
def test_the_bubble_of_even_stages_is_that_of_the_schedule(tmp_path, num_stages, num_batches):
    job = Job(num_stages=num_stages, num_batches=num_batches, num_steps=2, message=0.0)
    found = pipeline_bubbles(written(job.run(), tmp_path))
    expected = (num_stages - 1) / (num_batches + num_stages - 1)
    assert found["stage"].to_list() == list(range(num_stages))
    assert found["bubble_share"].to_list() == pytest.approx([expected] * num_stages, abs=1e-6)
    assert found["ranks"].to_list() == [2] * num_stages
    assert found["steps"].to_list() == [2] * num_stages
    assert found["compute_ns"].to_list() == pytest.approx([30e6 * num_batches] * num_stages)


def test_a_stage_with_more_work_stands_still_less_and_the_others_more(tmp_path):
    job = Job(num_stages=3, num_batches=6, forward=lambda stage, dp: 20.0 if stage == 2 else 10.0)
    shares = pipeline_bubbles(written(job.run(), tmp_path))["bubble_share"].to_list()
    assert shares[2] < 0.25 < shares[1] == pytest.approx(shares[0])


def test_bubbles_of_selected_steps_and_ranks_are_within_the_whole_pipeline(tmp_path):
    run = written(Job(num_stages=2, num_batches=2, num_steps=3, message=0.0).run(), tmp_path)
    whole, steps = pipeline_bubbles(run), run.table(STEPS)["step"].unique().sort().to_list()
    of_step = pipeline_bubbles(run, Selection(steps=((steps[1], steps[1]),)))
    assert of_step["steps"].to_list() == [1, 1]
    assert of_step.drop("steps").equals(whole.drop("steps"))  # all steps are the same
    (stage,) = pipeline_bubbles(run, Selection(ranks=((0, 0),))).to_dicts()
    assert (stage["stage"], stage["ranks"], stage["steps"]) == (0, 1, 3)
    assert stage["bubble_share"] == whole["bubble_share"][0]
    assert pipeline_bubbles(run, Selection(steps=((99, 99),))).is_empty()


def test_a_job_without_a_pipeline_has_no_bubble(tmp_path):
    assert pipeline_bubbles(written(Job(num_stages=1).run(), tmp_path / "one")).is_empty()
    assert pipeline_bubbles(gpu_job().write(tmp_path / "kernels")).is_empty()


def test_the_last_stage_of_a_real_job_with_more_work_there_stands_still_least(traces):
    found = pipeline_bubbles(open_path(traces / "straggler_parquet" / "trace-ST.parquet"))
    shares = found["bubble_share"].to_list()
    assert len(shares) == 4
    assert min(shares) == shares[-1] > 0
