"""Stages that are skipped, and bubbles that are filled: worked out by hand, and refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable
from dpro.extensions.plan.edits.pipeline import bubbles
from dpro.extensions.plan.rebuilt import recorded_work
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edits.balance import computes
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from tests.builders import cpu_job
from tests.fuzz.removals import frames_of, removals_of, write_frames
from tests.pipelines import MS, Job, written


def _graph(folder: Path, *shape: int, **more: float) -> Graph:
    return build_graph(written(Job(*shape, **more).run(), folder)).predictive


def _steps(graph: Graph) -> list[float]:
    timeline = replay(graph)
    return (step_times(graph, timeline.start, timeline.end)["duration_ns"] / MS).to_list()


def _quiet(folder: Path, stages: int, count: int) -> Graph:
    """Forward 10, backward 20, and 4 around the pipeline; messages take no time."""
    return _graph(folder, stages, 1, count, message=0.0, gather=1.0, scatter=1.0, norm=1.0, update=1.0)


def test_micro_batches_that_skip_a_stage_take_turns_on_the_stages_that_are_left(tmp_path):
    graph = _quiet(tmp_path / "r", 4, 2)
    assert _steps(graph) == pytest.approx([4 + 2 * 30 + 3 * 30], abs=0.01)
    # Micro-batch 0 goes 0 2 3, and 1 goes 0 1 3: forwards of stage 3 from 20 and 50, after the backward of 0
    # there; that of 1 ends at 80, and those on the way back at 100 and 120.
    skipped = parse_edit("skip:share=0.25").apply(graph)
    assert _steps(skipped) == pytest.approx([4 + 120], abs=0.01)
    assert sorted(computes(skipped)["stage"].to_list()) == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 3, 3]


def test_what_is_skipped_is_said_and_so_is_what_it_does_to_the_training(tmp_path):
    graph = _quiet(tmp_path / "r", 4, 4)
    edit = parse_edit("skip:share=0.25")
    assert edit.notes(graph) == (
        "each micro-batch skips 1 of 4 stages",
        "stages 1 are skipped by 2 micro-batches of 4: 0, 2",
        "stages 2 are skipped by 2 micro-batches of 4: 1, 3",
    )
    assert "does not show the effect on the loss" in edit.training
    # Each of the inner stages has half of its work left; the first has all.
    work = computes(edit.apply(graph)).group_by("stage").len().sort("stage")["len"].to_list()
    assert work == [8, 4, 4, 8]


def test_stages_that_cannot_be_skipped_are_refused(tmp_path):
    with pytest.raises(Unanswerable, match="needs four"):
        parse_edit("skip:share=0.5").apply(_quiet(tmp_path / "two", 2, 2))
    with pytest.raises(Unanswerable, match="the first and the last"):
        parse_edit("skip:share=0.9").apply(_quiet(tmp_path / "four", 4, 4))
    with pytest.raises(Unanswerable, match="too few"):
        parse_edit("skip:share=0.25").apply(_quiet(tmp_path / "short", 4, 1))
    for edit in ("skip:share=0.5", "fill:ms=5"):
        with pytest.raises(Unanswerable, match="does not consist of whole operations"):
            parse_edit(edit).apply(cpu_job().build(tmp_path / edit[:4]).graph)


def test_bubbles_are_those_of_the_schedule(tmp_path):
    # 1F1B of two stages and two micro-batches: stage 0 does F F . B . B, stage 1 . F B F B . with . of 10 at
    # first and 10, 20 later.
    gaps = bubbles(_quiet(tmp_path / "r", 2, 2))
    found = {rank: [gap / MS for gap in own["gap"] if gap] for (rank,), own in gaps.group_by("rank")}
    assert {rank: sum(each) for rank, each in found.items()} == {0: pytest.approx(30), 1: pytest.approx(30)}
    assert found[1] == [pytest.approx(10), pytest.approx(20)]


def test_pieces_that_fit_cost_nothing_and_those_that_overrun_do(tmp_path):
    graph = _quiet(tmp_path / "r", 2, 2)
    # Bubbles of 10 and 20: nine pieces of 1 ms in the first, 19 in the second, after 1 ms of switching each.
    edit = parse_edit("fill:ms=1,switch_ms=1")
    assert _steps(edit.apply(graph)) == pytest.approx(_steps(graph), abs=0.01)
    (line,) = edit.notes(graph)
    assert line.startswith("56 pieces of 1 ms fit into a step: 56.0 ms on 2 ranks together, 93% of")
    (overrun,) = edit.bounds(graph)
    assert _steps(overrun)[0] > _steps(graph)[0]
    assert parse_edit("fill:ms=25").apply(graph) is graph


def test_where_bubbles_vary_pieces_that_fit_most_steps_cost_the_job_something(tmp_path):
    graph = _graph(tmp_path / "r", 3, 1, 4, 8, noise=0.2)
    safe, bold = (parse_edit(f"fill:ms=1,switch_ms=0,risk={risk}") for risk in (0, 0.9))
    assert _steps(safe.apply(graph)) == pytest.approx(_steps(graph), abs=0.01)
    assert np.mean(_steps(bold.apply(graph))) > np.mean(_steps(graph))


def test_a_real_pipeline_has_room_for_foreign_work_at_little_cost(traces):
    graph = build_graph(open_quietly(traces / "pp_timeline" / "primus_pp8")).predictive
    edit = parse_edit("fill:ms=20,switch_ms=1,risk=0.1")
    cost = np.median(np.array(_steps(edit.apply(graph))) / _steps(graph)) - 1
    print(edit.notes(graph), cost)
    assert 0 <= cost < 0.02


def test_stages_are_not_skipped_where_the_first_is_not_recorded(tmp_path):
    run = written(Job(5, 1, 4).run(), tmp_path)
    frames = frames_of(run)
    without = removals_of(frames)["spans: of the first rank"](frames)
    write_frames(without, run.manifest, tmp_path / "without")
    graph = build_graph(open_run(tmp_path / "without")).predictive
    with pytest.raises(Unanswerable, match="first stage"):
        parse_edit("skip:share=0.25").bound(facts_of(graph))
    with pytest.raises(Unanswerable, match="a stage of the pipeline is not recorded"):
        recorded_work(computes(graph), "forward")
