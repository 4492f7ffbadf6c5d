"""Layers moved between stages, against jobs simulated with them there from the start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable, UsageError
from dpro.extensions.plan.edits import stages
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edits.balance import computes
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.registry import parse_edit
from tests.builders import cpu_job
from tests.pipelines import MS, Job, written

LOSS = 12.0


def _job(*layers: int) -> Job:
    """A layer takes 4 ms there and 8 ms back, the loss 12 ms there and 24 ms back."""
    last = len(layers) - 1

    def forward(stage: int, dp: int) -> float:
        return 4.0 * layers[stage] + LOSS * (stage == last)

    return Job(
        len(layers), 2, 8, 2, forward=forward, backward=lambda stage, dp: 2 * forward(stage, dp), message=0.0
    )


def _graph(job: Job, folder: Path) -> Graph:
    return build_graph(written(job.run(), folder)).predictive


def _steps(graph: Graph) -> list[float]:
    timeline = replay(graph)
    return (step_times(graph, timeline.start, timeline.end)["duration_ns"] / MS).to_list()


@pytest.mark.parametrize("wanted", [(5, 4, 4, 3), (4, 4, 5, 3), (1, 5, 5, 5)])
def test_moved_layers_take_as_long_as_a_job_that_has_them_there(wanted, tmp_path):
    graph = _graph(_job(4, 4, 4, 4), tmp_path / "recorded")
    text = "/".join(map(str, wanted))
    changed = parse_edit(f"stages:layers={text}").apply(graph)
    assert _steps(changed) == pytest.approx(_steps(_graph(_job(*wanted), tmp_path / "wanted")), abs=0.01)
    back = parse_edit(f"stages:layers=4/4/4/4,now={text}").apply(changed)
    assert _steps(back) == pytest.approx(_steps(graph), abs=0.01)


def test_balanced_stages_leave_layers_to_the_stage_without_the_loss(tmp_path):
    graph = _graph(_job(4, 4, 4, 4), tmp_path / "r")
    edit = parse_edit("stages:now=4/4/4/4")
    # 16 layers and a loss as long as three: 19 in all, 5 on the slowest.
    (line, memory) = edit.notes(graph)
    assert line.startswith("layers of stages: 4/4/4/4 now, ")
    assert line.endswith("/2 then")
    assert "is ignored here" in memory
    work = computes(edit.apply(graph)).filter((pl.col("kind") == "forward") & (pl.col("step") == 0))
    assert work.group_by("rank").agg(pl.col("ns").mean())["ns"].max() == 20 * MS


def test_layers_where_they_are_change_nothing(tmp_path):
    graph = _graph(_job(4, 4, 4, 4), tmp_path / "r")
    assert parse_edit("stages:layers=4/4/4/4").apply(graph) is graph


def test_memory_keeps_layers_off_a_stage(tmp_path, monkeypatch):
    graph = _graph(_job(4, 4, 4, 4), tmp_path / "r")
    monkeypatch.setattr(stages, "peaks_of", lambda run: dict.fromkeys(range(8), 40000000000))
    edit = parse_edit("stages:now=4/4/4/4,memory_gb=50")
    assert edit.notes(graph)[1] == "there is memory for 5/5/5/5 layers"
    with pytest.raises(Unanswerable, match="stage 0 has memory for 5 layers, not for 6"):
        parse_edit("stages:layers=6/4/4/2,memory_gb=50").apply(graph)
    with pytest.raises(Unanswerable, match="do not fit"):
        parse_edit("stages:now=4/4/4/4,memory_gb=30").apply(graph)


def test_the_number_of_layers_is_taken_from_the_command(tmp_path):
    graph = _graph(_job(4, 4, 4, 4), tmp_path / "r")
    with pytest.raises(Unanswerable, match="layers per stage"):
        stages.StageLayers.candidates(facts_of(graph))
    assert graph.run is not None
    manifest = dataclasses.replace(graph.run.manifest, command=["train.py", "--num-layers=16"])
    named = dataclasses.replace(graph, run=dataclasses.replace(graph.run, manifest=manifest))
    assert list(map(str, stages.StageLayers.candidates(facts_of(named)))) == ["stages:now=4/4/4/4"]


def test_what_cannot_be_is_refused_in_a_line(tmp_path):
    graph = _graph(_job(4, 4, 4, 4), tmp_path / "r")
    for text, why in (
        ("layers=8/8", "2 numbers for 4 stages"),
        ("layers=a/b/c/d", "whole numbers"),
        ("layers=5/4/4/4", "give now="),
        ("layers=5/4/4/4,now=4/4/4/4", "17 layers are not 16"),
    ):
        with pytest.raises(UsageError, match=why):
            parse_edit(f"stages:{text}").apply(graph)
    with pytest.raises(Unanswerable, match="does not consist of whole operations"):
        parse_edit("stages:layers=4/4").apply(cpu_job().build(tmp_path / "cpu").graph)


def test_a_real_job_with_an_uneven_last_stage_gains_by_fewer_layers_there(traces):
    graph = build_graph(open_quietly(traces / "straggler_parquet" / "trace-ST.parquet")).predictive
    changed = parse_edit("stages:now=8/8/8/8").apply(graph)
    assert np.mean(_steps(changed)) < np.mean(_steps(graph))
    assert computes(changed)["ns"].sum() == pytest.approx(computes(graph)["ns"].sum(), rel=0.01)


def test_branches_that_hand_nothing_to_each_other_work_side_by_side(tmp_path, monkeypatch):
    job = Job(4, 1, 2, message=0.0, gather=1.0, scatter=1.0, norm=1.0, update=1.0)
    graph = _graph(job, tmp_path / "r")
    edit = parse_edit("stages:branches=1/2")
    with pytest.raises(Unanswerable, match="stages 1 and 2 exchanged 4 messages"):
        edit.apply(graph)
    monkeypatch.setattr(stages, "message_counts", lambda graph, rows: None)
    with pytest.raises(Unanswerable, match="are unknown"):
        edit.apply(graph)
    monkeypatch.setattr(
        stages, "message_counts", lambda graph, rows: {(0, 1): 4, (0, 2): 4, (1, 3): 4, (2, 3): 4}
    )
    # Two micro-batches of 30 on each stage, and 4 around; the pipeline is three stages deep, not four.
    assert _steps(graph) == pytest.approx([4 + 2 * 30 + 3 * 30], abs=0.01)
    assert _steps(edit.apply(graph)) == pytest.approx([4 + 2 * 30 + 2 * 30], abs=0.01)
    for text in ("2/1", "1/3", "0-3", "a/b"):
        with pytest.raises(UsageError, match="branches"):
            parse_edit(f"stages:branches={text}").apply(graph)
