"""Pipelines in other orders and with other micro-batches, against jobs simulated so from the start."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pytest

from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable, UsageError
from dpro.extensions.plan.edits.pipeline import Pipeline, shape_of
from dpro.extensions.plan.rebuilt import RebuildPlan, rebuild
from dpro.extensions.plan.schedules import FORWARD, HALF, SCHEDULES, looped, table_of
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edits.balance import computes, slowness
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import candidates
from tests.builders import cpu_job
from tests.pipelines import MS, Job, written


@dataclass
class AllForwardsFirst(Job):
    def order(self, stage: int) -> list[tuple[str, int]]:
        return [(kind, batch) for kind in ("forward", "backward") for batch in range(self.num_batches)]


def _graph(job: Job, folder) -> Graph:
    return build_graph(written(job.run(), folder)).predictive


def _steps(graph: Graph, *edits: str) -> list[float]:
    for edit in edits:
        graph = parse_edit(edit).apply(graph)
    timeline = replay(graph)
    return (step_times(graph, timeline.start, timeline.end)["duration_ns"] / MS).to_list()


def _sized(kind: type[Job], num_stages: int, num_batches: int, parts: int = 1) -> Job:
    """A job whose micro-batches are this many parts of those of the usual one."""
    return kind(
        num_stages,
        2,
        num_batches * parts,
        2,
        forward=lambda stage, dp: 10.0 / parts,
        backward=lambda stage, dp: 20.0 / parts,
        message=1.0 / parts,
    )


shapes = pytest.mark.parametrize(("num_stages", "num_batches"), [(2, 2), (3, 4), (4, 4), (4, 8)])


@pytest.mark.few(3)
@shapes
@pytest.mark.parametrize("parts", [2, 3])
def test_smaller_micro_batches_take_as_long_as_a_job_that_has_them(num_stages, num_batches, parts, tmp_path):
    recorded = _graph(_sized(Job, num_stages, num_batches), tmp_path / "recorded")
    wanted = _graph(_sized(Job, num_stages, num_batches, parts), tmp_path / "wanted")
    predicted = _steps(recorded, f"pipeline:micro_batches={num_batches * parts}")
    assert predicted == pytest.approx(_steps(wanted), abs=0.01)
    back = _steps(wanted, f"pipeline:micro_batches={num_batches}")
    assert back == pytest.approx(_steps(recorded), abs=0.01)


@shapes
def test_another_order_takes_as_long_as_a_job_that_works_in_it(num_stages, num_batches, tmp_path):
    plain = _graph(_sized(Job, num_stages, num_batches), tmp_path / "1f1b")
    eager = _graph(_sized(AllForwardsFirst, num_stages, num_batches), tmp_path / "gpipe")
    # Simulated messages wait for a receiver that is busy, predicted ones do not: some of 1 ms each per step.
    for recorded, wanted, schedule in ((plain, eager, "gpipe"), (eager, plain, "1f1b")):
        short = np.array(_steps(wanted)) - _steps(recorded, f"pipeline:schedule={schedule}")
        assert ((short >= -0.01) & (short <= 2 * num_batches)).all()


@shapes
def test_the_order_that_was_recorded_changes_nothing(num_stages, num_batches, tmp_path):
    graph = _graph(_sized(Job, num_stages, num_batches), tmp_path / "1f1b")
    assert parse_edit("pipeline").apply(graph) is graph
    assert parse_edit(f"pipeline:micro_batches={num_batches}").apply(graph) is graph
    eager = _graph(_sized(AllForwardsFirst, num_stages, num_batches), tmp_path / "gpipe")
    assert parse_edit("pipeline:schedule=gpipe").apply(eager) is eager


def test_zero_bubbles_and_chunks_shorten_the_pipelines_start_and_end_as_published(tmp_path):
    job = Job(4, 1, 8, message=0.0, gather=1.0, scatter=1.0, norm=1.0, update=1.0)
    graph = _graph(job, tmp_path / "r")
    # Work of 240, 4 around it. Forward 10, backward 10 + 10: 90 idle; a third in ZB-H1, half in two chunks.
    assert _steps(graph) == pytest.approx([244 + 90], abs=0.01)
    # In ZB-V stages begin one after the other; in DualPipe one is idle as its report says.
    for schedule, bubble in (("zb-h1", 30), ("interleaved,chunks=2", 45), ("zbv", 15), ("dualpipe", 20)):
        assert _steps(graph, f"pipeline:schedule={schedule}") == pytest.approx([244 + bubble], abs=0.01)


def test_dualpipe_of_two_stages_is_no_pipeline(tmp_path):
    graph = _graph(Job(2, 1, 8), tmp_path / "r")
    with pytest.raises(Unanswerable, match="each would hold the whole model"):
        _steps(graph, "pipeline:schedule=dualpipe")
    edits, _ = candidates(facts_of(graph), [Pipeline])
    assert {edit.schedule for edit in edits} == {"1f1b", "zb-h1", "interleaved", "zbv"}


def test_a_pipeline_that_interleaves_is_not_advised_to(traces):
    interleaved, plain = (
        facts_of(build_graph(open_quietly(traces / "pp_timeline" / name)).predictive)
        for name in ("megatronapp_pp4", "primus_pp8")
    )
    for facts, advised in ((interleaved, False), (plain, True)):
        edits, _ = candidates(facts, [Pipeline])
        assert ("interleaved" in {edit.schedule for edit in edits}) is advised


def _work(graph: Graph) -> int:
    return int(computes(graph)["ns"].sum())


def test_evened_work_is_as_much_as_it_was_and_even_work_stays(tmp_path):
    uneven = Job(2, 2, 4, 2, forward=lambda stage, dp: 10.0 + 5 * stage, noise=0.1)
    graph = _graph(uneven, tmp_path / "uneven")
    for over in ("stages", "sequences"):
        balanced = parse_edit(f"balance:over={over}").apply(graph)
        assert _work(balanced) == pytest.approx(_work(graph), abs=computes(graph).height)
        again = parse_edit(f"balance:over={over}").apply(balanced)
        assert np.abs(again.nodes.duration - balanced.nodes.duration).max() <= 1
        assert sum(_steps(balanced)) <= sum(_steps(graph))
    even = _graph(Job(), tmp_path / "even")
    for over in ("stages", "sequences"):
        assert (parse_edit(f"balance:over={over}").apply(even).nodes.duration == even.nodes.duration).all()


def test_stages_are_evened_to_the_job_that_has_even_stages(tmp_path):
    uneven = _graph(Job(forward=lambda stage, dp: 5.0 + 10 * stage), tmp_path / "uneven")
    assert _steps(uneven, "balance:over=stages") == [106]


def test_what_the_last_chunk_takes_longer_is_spread_over_chunks_and_not_over_sequences(tmp_path):
    chunked = parse_edit("pipeline:schedule=interleaved,chunks=2").apply(_graph(Job(2, 1, 4), tmp_path / "r"))
    rows = computes(chunked).filter(pl.col("place") == 3)  # of the model's four parts that with the loss
    duration = chunked.nodes.duration.copy()
    duration[rows["node"].to_numpy()] *= 5
    graph = chunked.with_durations(duration)
    assert (parse_edit("balance:over=sequences").apply(graph).nodes.duration == duration).all()
    even = computes(parse_edit("balance:over=stages").apply(graph))
    assert set(even.filter(pl.col("kind") == FORWARD)["ns"].to_list()) == {2 * 5 * MS}  # (1 + 1 + 1 + 5) / 4


def test_jobs_that_are_no_pipelines_and_orders_that_do_not_exist_are_refused(tmp_path):
    graph = cpu_job().build(tmp_path / "cpu").graph
    for edit in ("pipeline", "balance:over=stages"):
        with pytest.raises(Unanswerable, match="does not consist of whole operations"):
            parse_edit(edit).apply(graph)
    with pytest.raises(Unanswerable, match="one stage"):
        parse_edit("pipeline").apply(_graph(Job(num_stages=1), tmp_path / "one"))
    pipeline = _graph(Job(2, 1, 3), tmp_path / "three")
    with pytest.raises(UsageError, match="multiple of the 2 stages"):
        parse_edit("pipeline:schedule=interleaved,chunks=2").apply(pipeline)
    with pytest.raises(UsageError, match="needs chunks="):
        parse_edit("pipeline:schedule=interleaved").apply(pipeline)
    with pytest.raises(UsageError, match="one chunk per stage"):
        parse_edit("pipeline:chunks=2").apply(pipeline)
    with pytest.raises(UsageError, match="did you mean 'gpipe'"):
        parse_edit("pipeline:schedule=gpip")


# Real jobs, their schedule, and by how much the mean step may be off once it is put together by the rule.
REAL = [
    ("straggler_parquet/trace-ST.parquet", "1f1b", 0.002),
    ("pp_timeline/primus_pp8", "1f1b", 0.002),
    ("pp_timeline/megatronapp_pp4", "interleaved", 0.02),
]


def _rebuilt(graph: Graph, schedule: str) -> Graph:
    """The same job in this order by its rule alone, whatever was recorded."""
    rows = computes(graph)
    shape = shape_of(rows)
    orders = SCHEDULES[schedule].orders(shape.stages, shape.batches, shape.chunks)
    return rebuild(
        graph, rows, slowness(graph), RebuildPlan(table_of(orders, looped), HALF, lambda work: work)
    )


@pytest.mark.parametrize(("file", "schedule", "bar"), REAL)
def test_a_real_pipeline_rebuilt_as_it_was_takes_as_long(file, schedule, bar, traces):
    graph = build_graph(open_quietly(traces / file)).predictive
    rebuilt = _rebuilt(graph, schedule)
    before, after = np.array(_steps(graph)), np.array(_steps(rebuilt))
    assert (graph.nodes.kind == NodeKind.KERNEL).sum() == (rebuilt.nodes.kind == NodeKind.KERNEL).sum()
    assert abs(after.mean() / before.mean() - 1) < bar
    assert np.median(np.abs(after / before - 1)) < bar


@pytest.mark.parametrize(
    ("file", "there", "back"),
    [
        ("pp_timeline/primus_pp8", "gpipe", "1f1b"),
        ("pp_timeline/primus_pp8", "interleaved,chunks=2", "1f1b"),
        ("pp_timeline/primus_pp8", "zbv", "1f1b"),
        ("pp_timeline/megatronapp_pp4", "1f1b", "interleaved,chunks=4"),
    ],
)
def test_a_real_pipeline_in_another_schedule_and_back_takes_as_long_as_measured(file, there, back, traces):
    graph = build_graph(open_quietly(traces / file)).predictive
    found = np.array(_steps(graph, f"pipeline:schedule={there}", f"pipeline:schedule={back}"))
    assert np.median(np.abs(found / _steps(graph) - 1)) < 0.03


def _as_work(stage: int, dp: int) -> float:
    """A slow worker: replica 0 takes three times as long on stage 0."""
    return 30.0 if (stage, dp) == (0, 0) else 10.0


@pytest.mark.parametrize("over", ["stages", "sequences"])
def test_what_a_slow_worker_takes_longer_is_not_spread_over_others(over, tmp_path):
    job = Job(2, 3, 4, 3, forward=_as_work, backward=lambda stage, dp: 2 * _as_work(stage, dp))
    graph = _graph(job, tmp_path / "slow")
    edit = parse_edit(f"balance:over={over}")
    balanced = edit.apply(graph)
    assert (balanced.nodes.duration == graph.nodes.duration).all()
    (note,) = edit.notes(graph)
    assert note.startswith("rank 0 takes 3.00 times as long as others of its stage")


def test_uneven_stages_are_evened_beside_a_slow_worker_that_stays_as_slow(tmp_path):
    uneven = Job(
        2, 3, 4, 3, forward=lambda stage, dp: (5.0 + 10 * stage) * (3 if (stage, dp) == (0, 0) else 1)
    )
    rows = computes(parse_edit("balance:over=stages").apply(_graph(uneven, tmp_path / "uneven")))
    forward = rows.filter(pl.col("kind") == FORWARD)
    assert set(forward.filter(pl.col("rank") != 0)["ns"].to_list()) == {10_000_000}
    assert set(forward.filter(pl.col("rank") == 0)["ns"].to_list()) == {30_000_000}


def test_with_one_rank_per_stage_a_slow_worker_is_said_to_look_like_a_stage(tmp_path):
    graph = _graph(Job(2, 1, 3, forward=lambda stage, dp: 5.0 + 10 * stage), tmp_path / "one")
    (note,) = parse_edit("balance:over=stages").notes(graph)
    assert "cannot be distinguished from a stage with more work" in note
