"""The view of pipelines, of recorded and of imported ones."""

from __future__ import annotations

import dataclasses

import pytest

from dpro.analysis.answers.report import report_tables
from dpro.dashboards import needs
from dpro.dashboards.links import Link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.views.pipeline import (
    VIEW,
    bubble_figure,
    bubble_info,
    operation_figure,
    operation_info,
)
from tests.builders import gpu_job
from tests.pipelines import Job, written
from tests.recorded_pipelines import recorded

MAKE = {"recorded": recorded, "imported": written}


@pytest.fixture(params=MAKE)
def loaded(request, tmp_path):
    rows = Job(num_stages=2, num_dp=1, num_batches=2, num_steps=3, message=0.0, gather=0.0).run()
    return Loaded(MAKE[request.param](rows, tmp_path))


def test_bars_are_the_operations_of_one_step_by_stage(loaded):
    rows = operation_info(loaded, Link())
    assert rows["step"].n_unique() == 1
    work = rows.filter(rows["what"].is_in(["forward", "backward"])).sort("rank", "begin_ms")
    assert work.select("stage", "what", "micro_batch", "lasts_ms").rows() == [
        (0, "forward", 0, 10.0), (0, "forward", 1, 10.0), (0, "backward", 0, 20.0), (0, "backward", 1, 20.0),
        (1, "forward", 0, 10.0), (1, "backward", 0, 20.0), (1, "forward", 1, 10.0), (1, "backward", 1, 20.0),
    ]  # fmt: skip
    figure = operation_figure(rows, "light")
    assert {bar.name for bar in figure.data} >= {"forward", "backward"}
    assert list(figure.layout.yaxis.categoryarray)[-1] == "stage 0, rank 0"


def test_bubble_of_each_stage_is_a_bar(loaded):
    bubbles = bubble_info(loaded, Link())
    assert bubbles["bubble_share"].to_list() == pytest.approx([1 / 3, 1 / 3])
    (bar,) = bubble_figure(bubbles, "dark").data
    assert list(bar.y) == pytest.approx([100 / 3, 100 / 3])
    assert bubble_info(loaded, Link(ranks=(1,)))["stage"].to_list() == [1]


def test_bubbles_are_those_of_the_usual_steps_as_all_other_answers(tmp_path):
    job = Job(num_dp=1, num_steps=12, times=lambda step, dp, batch: (5.0, 5.0) if step == 1 else (1.0, 1.0))
    loaded = Loaded(written(job.run(), tmp_path))
    number = loaded.steps["step"].min() + 1
    bubbles = bubble_info(loaded, Link())
    assert bubbles["steps"].to_list() == [11, 11]
    assert bubbles["compute_ms"].to_list() == pytest.approx([60.0, 60.0])
    assert "Mean of 11 usual steps." in str(VIEW.sections["pipeline-bubbles"](loaded, Link()))
    chosen = bubble_info(loaded, Link(steps=((number, number),)))
    assert chosen["compute_ms"].to_list() == pytest.approx([300.0, 300.0])  # what is selected is shown
    report = report_tables(loaded).stages
    assert report["bubble_share"].to_list() == bubbles["bubble_share"].to_list()


def test_views_say_which_ranks_were_not_recorded(loaded):
    assert needs.missing_ranks(loaded) == ""
    assert "not recorded" not in str(VIEW.sections["pipeline-bubbles"](loaded, Link()))
    run = loaded.run
    without = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, world_size=4))
    assert needs.missing_ranks(Loaded(without)) == "2 of 4 ranks were not recorded: 2, 3."
    assert "2 of 4 ranks were not recorded" in str(VIEW.sections["pipeline-bubbles"](Loaded(without), Link()))


def test_sections_fill_for_any_selection(loaded):
    assert not needs.operations(loaded, Link())
    for fill in VIEW.sections.values():
        for link in (Link(), Link(steps=((900, 902),)), Link(ranks=(77,)), Link(ranks=(0,))):
            assert fill(loaded, link)


def test_job_without_a_pipeline_says_what_is_missing(tmp_path):
    assert "pass of a micro-batch is known" in needs.operations(
        Loaded(gpu_job().write(tmp_path / "kernels")), Link()
    )
    alone = recorded(Job(num_stages=1, num_dp=1, num_steps=3).run(), tmp_path / "alone")
    assert "one stage" in needs.operations(Loaded(alone), Link())
