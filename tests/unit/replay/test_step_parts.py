"""Where the steps of a replay go, against what the trace shows and by hand."""

from __future__ import annotations

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.replay.step_parts import replayed_breakdown
from dpro.replay.timeline import replay, step_ends
from tests.builders import US, TinyRun, gpu_job

PARTS = ["compute_ns", "exposed_wait_ns", "exposed_transfer_ns", "host_bound_ns", "idle_ns"]


def parts_of(tiny: TinyRun, folder) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Parts of steps as replayed without a change, and as recorded."""
    analysis = Analysis(tiny.write(folder / "run"))
    timeline = replay(analysis.built.graph)
    ends = step_ends(timeline.graph, timeline.start, timeline.end)
    return replayed_breakdown(timeline, ends), analysis.breakdown


def test_the_parts_of_an_unchanged_replay_are_those_of_the_trace(tmp_path):
    replayed, recorded = parts_of(gpu_job(), tmp_path)
    both = replayed.join(recorded, on=["step", "rank"], suffix="_recorded")
    assert both.height == recorded.height
    for part in PARTS:
        assert ((both[part] - both[f"{part}_recorded"]).abs() <= 20 * US).all(), part


def test_collectives_that_missing_ranks_may_take_part_in_are_not_split_into_wait_and_transfer(tmp_path):
    analysis = Analysis(gpu_job().write(tmp_path / "run"))
    timeline = replay(analysis.built.graph)
    ends = step_ends(timeline.graph, timeline.start, timeline.end)
    instances = analysis.built.matching.rows["instance"].unique().to_list()
    split, unsplit = (replayed_breakdown(timeline, ends, partial) for partial in ((), instances))
    assert split["exposed_wait_ns"].null_count() == 0
    assert unsplit["exposed_wait_ns"].null_count() == unsplit.height > 0
    assert unsplit["exposed_comm_ns"].to_list() == split["exposed_comm_ns"].to_list()


def test_a_gpu_that_idles_until_its_host_calls_a_collective_waits_for_its_host(tmp_path):
    run = TinyRun()
    for step, begin in enumerate((0, 1000)):
        for rank, called in enumerate((begin + 20, begin + 620)):
            run.call(begin, begin + 10, 10 * step, rank)
            run.kernel("gemm", begin + 12, begin + 112, 10 * step, rank)
            run.call(called, called + 10, 10 * step + 1, rank)
            run.nccl(max(called + 12, begin + 112), begin + 732, 10 * step + 1, rank, sequence=step)
            run.call(called + 10, begin + 740, 10 * step + 2, rank, name="cudaDeviceSynchronize")
            run.op("log", begin + 740, begin + 1000, rank)
            run.step(step, begin, begin + 1000, rank)
    replayed, recorded = parts_of(run, tmp_path)
    for parts in (replayed, recorded):
        late = parts.filter((pl.col("rank") == 1) & (pl.col("step") == 1))
        assert abs(late["host_bound_ns"][0] - 520 * US) < 300 * US
        waits = parts.filter((pl.col("rank") == 0) & (pl.col("step") == 1))
        assert abs(waits["exposed_wait_ns"][0] - 520 * US) < 20 * US
