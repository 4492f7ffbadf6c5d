"""Few ranks recorded of many: which represent the missing ones, and how much stays unknown."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import polars as pl
import pytest

from dpro.errors import Unanswerable
from dpro.members import members_text
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.fidelity.missing_ranks import (
    as_missing_ranks_may_come,
    extrapolate_missing_ranks,
    pipeline_stages,
    rendezvous_with,
    share_of_waiting,
)
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.predict import Prediction, baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import COLLECTIVES, SPANS, STEPS, SYNCS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from tests.builders import TinyRun, gpu_job


def only(run: Run, ranks: list[int], folder: Path) -> Run:
    """A copy of a run of which only some ranks were recorded."""
    for table in (SPANS, COLLECTIVES, SYNCS, STEPS, WORKERS):
        write_part(folder, table, "all", run.table(table).filter(pl.col("rank").is_in(ranks)))
    write_manifest(folder, dataclasses.replace(run.manifest, ranks=ranks))
    return open_run(folder)


def _waited(waits: list[float]) -> TinyRun:
    """One rank of two, whose all-reduces move for 100 after it has waited for the other for this long."""
    run = TinyRun()
    begin = 0.0
    for step, wait in enumerate(waits):
        run.call(begin, begin + 10, 2 * step)
        run.call(begin + 10, begin + 20, 2 * step + 1)
        run.kernel("gemm", begin + 10, begin + 200, 2 * step)
        end = begin + 300 + wait
        run.nccl(begin + 200, end, 2 * step + 1, sequence=step, group="0", group_ranks="0,1", bytes_in=64)
        run.call(begin + 20, end, 1000 + step, name="cudaDeviceSynchronize")
        run.step(step, begin, end)
        begin = end
    return run


def _given(run: TinyRun, folder: Path, world_size: int = 2) -> Run:
    opened = run.write(folder)
    write_manifest(folder, dataclasses.replace(opened.manifest, world_size=world_size))
    return open_run(folder)


def test_what_may_be_waiting_is_what_communication_lasts_longer_than_at_its_fastest(tmp_path):
    run = _given(_waited([0, 50, 250]), tmp_path / "run")
    built = build_graph(run)
    # 300, 350 and 550 of which at most 0, 50 and 250 are waiting.
    rendezvous = rendezvous_with(built, [1])
    assert share_of_waiting(built.graph, rendezvous) == pytest.approx(300 / 1200, abs=0.005)
    assert rendezvous_with(built, []) is None
    extrapolation = extrapolate_missing_ranks(built, run.manifest)
    assert "1 of 2 ranks is missing" in extrapolation.unknown[0]
    assert "up to 25% of a step" in extrapolation.unknown[0]


def test_missing_ranks_are_taken_to_do_what_the_given_ones_do_where_nothing_shows_a_pipeline(tmp_path):
    run = _given(_waited([0, 0]), tmp_path / "run", world_size=8)
    extrapolation = extrapolate_missing_ranks(build_graph(run), run.manifest)
    assert len(extrapolation.unknown) == 1
    assert extrapolation.assumed[0].startswith("the missing ranks are assumed to do what rank 0 does")
    whole = open_run(_waited([0, 0]).write(tmp_path / "whole").path)
    assert extrapolate_missing_ranks(build_graph(whole), whole.manifest).assumed == ()


def _staged(num_stages: int, group: bool) -> TinyRun:
    """Rank 0, the first of a pipeline of every fourth rank, sends twice."""
    run = _waited([0, 0])
    ranks = [4 * stage for stage in range(num_stages)]
    for index in range(2):
        run.call(30 + 20 * index, 35 + 20 * index, 500 + index)
        facts = {"peer": 4, "group": "pp", "group_ranks": members_text(ranks if group else ())}
        span = run.kernel("ncclDevKernel_SendRecv", 40 + 60 * index, 90 + 60 * index, 500 + index, stream=21)
        run.member(span, "send", **facts)
    return run


def test_pipeline_stages_of_which_no_rank_is_recorded_are_named(tmp_path):
    run = _given(_staged(4, group=True), tmp_path / "run", world_size=16)
    built = build_graph(run)
    assert pipeline_stages(built.matching.rows) == (4, {0: 0, 4: 1, 8: 2, 12: 3})
    extrapolation = extrapolate_missing_ranks(built, run.manifest)
    assert "no rank of pipeline stage 1, 2, 3 of 4 was recorded" in extrapolation.unknown[1]
    assert extrapolation.assumed[0].startswith("missing ranks of the same pipeline stage")


def test_a_pipeline_whose_stages_are_not_recorded_is_said_to_be_unknown(tmp_path):
    run = _given(_staged(4, group=False), tmp_path / "run", world_size=16)
    extrapolation = extrapolate_missing_ranks(build_graph(run), run.manifest)
    assert "other pipeline stages" in extrapolation.unknown[1]


def test_a_message_to_a_given_rank_is_no_waiting_for_a_missing_one(tmp_path):
    run = TinyRun()
    for rank, op, peer in ((0, "send", 1), (1, "recv", 0)):
        run.step(0, 0, 600, rank)
        for index, length in enumerate((100, 180, 120, 140)):
            begin = 40 + 150 * index - (30 if rank else 0)
            run.call(begin - 20, begin - 15, index, rank)
            run.nccl(begin, 40 + 150 * index + length / 2, index, rank, op=op, peer=peer)
    built = build_graph(_given(run, tmp_path / "run", world_size=3))
    assert rendezvous_with(built, [2]) is None
    assert len(rendezvous_with(built, [0]).transfers_in(built.graph)) == 8  # both ends of each


def test_verdict_and_predictions_say_what_is_assumed_and_how_far_it_may_be_wrong(tmp_path):
    run = _given(_waited([0, 50, 250]), tmp_path / "run")
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    assert trust.answerable
    assert trust.assumed[0].endswith("a change to rank 0 is applied to all 2 ranks")
    edit = [parse_edit("scale:kind=kernel,factor=0.5")]
    baseline = baseline_steps(built.graph).drop("counted", strict=False)  # all three
    unsure = predict(built.graph, baseline, edit, trust)
    sure = predict(built.graph, baseline, edit, dataclasses.replace(trust, rendezvous=None))
    # Half of each kernel's 190 less. At one end the waits of 50 and 250 go, too; at the other they take up
    # what the kernels save, where they are as long.
    assert unsure.predicted_ns == sure.predicted_ns == pytest.approx(305_000, rel=0.01)
    prompt, late = (
        float(step_times(each.graph, each.start, each.end)["duration_ns"].mean())
        for each in as_missing_ranks_may_come(edit[0].apply(built.graph), trust.rendezvous)
    )
    assert prompt == pytest.approx(205_000, rel=0.02)
    assert late == pytest.approx(400_000, rel=0.02)
    assert unsure.high_ns - sure.high_ns == pytest.approx(100_000, rel=0.05)
    with pytest.raises(Unanswerable, match="no peer"):
        parse_edit("heal:rank=0").apply(built.graph)


def test_a_run_of_all_ranks_waits_for_no_missing_rank(tmp_path):
    run = gpu_job().write(tmp_path / "run")
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    assert (trust.rendezvous, trust.assumed) == (None, ())
    assert extrapolate_missing_ranks(built, Manifest(world_size=2, ranks=[0, 1])).unknown == ()


EDITS = ("scale:kind=kernel,factor=0.5", "scale:kind=cpu,factor=0.5", "network:bandwidth=2", "no-launch")


def _predicted(run: Run) -> list[Prediction]:
    built = build_graph(run)
    trust = assess(built, replay(built.graph), run.manifest)
    assert trust.answerable
    baseline = baseline_steps(built.graph)
    return [predict(built.graph, baseline, [parse_edit(edit)], trust) for edit in EDITS]


@pytest.mark.parametrize("name", ["nanogpt_h100_8r_rs_ag", "torchrec_v100_4r_a2a_ar"])
def test_what_one_rank_of_a_real_job_predicts_holds_what_all_of_them_do_within_its_interval(
    traces, tmp_path, name
):
    # The one rank that waits for all others takes their work for slow communication: its interval is wide.
    from dpro.opening import open_path

    if not (traces / "multirank" / name).is_dir():
        pytest.skip(f"no {name} among the real traces")
    run = open_path(traces / "multirank" / name)
    of_all = [prediction.speedup for prediction in _predicted(run)]
    for rank in run.manifest.ranks:
        for step, alone in zip(of_all, _predicted(only(run, [rank], tmp_path / f"rank{rank}"))):
            base = alone.predicted_ns * alone.speedup
            assert step * alone.low_ns <= base <= step * alone.high_ns
