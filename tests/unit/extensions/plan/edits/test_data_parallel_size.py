"""A wider job, by hand and against a job of as many ranks as was asked for."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import polars as pl
import pytest

from dpro.errors import Unanswerable
from dpro.extensions.plan.edits.data_parallel import largest_of
from dpro.members import members_text
from dpro.replay.construction.graph_builder import Built, build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import durations_of, replay
from dpro.replay.whatif.predict import baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import COLLECTIVES
from dpro.store import open_run
from tests.builders import TinyRun
from tests.ddp import ddp_job
from tests.unit.replay.whatif.edits.test_communication import ALPHA, BETA, SIZES, four_ranks, times_us

NOISE, STEPS = 200.0, 40


def noisy_job(num_ranks: int, seed: int = 3) -> TinyRun:
    """Ranks whose work varies from step to step, each for itself, and an all-reduce in a ring's time."""
    run = TinyRun()
    noise = np.random.default_rng(seed)
    share = 2 * (num_ranks - 1) / num_ranks
    begin = 0.0
    for step in range(STEPS):
        size = 1000 * (1 + step % 2)
        work = 2000 + NOISE * noise.normal(size=num_ranks)
        together = begin + work.max() + 20
        end = together + 0.5 * share * size
        for rank in range(num_ranks):
            ready = begin + work[rank]
            run.op("work", begin, ready, rank)
            facts = {
                "group": "dp",
                "group_ranks": members_text(range(num_ranks)),
                "bytes_in": size,
                "bytes_out": size,
            }
            run.gloo((ready, ready + 10), (ready + 20, end), rank, sequence=step, **facts)
            run.mark("wait", ready + 10, end + 5, rank)
            run.op("update", end + 5, end + 100, rank)
            run.step(step, begin, end + 100, rank)
        begin = end + 100
    return run


def built(run: TinyRun, folder) -> Built:
    run.write(folder)
    return build_graph(open_run(folder))


def mean_step_us(job: Built) -> float:
    return mean_step_us_of(job.graph)


def mean_step_us_of(graph: Graph) -> float:
    return float(durations_of(baseline_steps(graph))["duration_ns"].to_numpy().mean()) / 1000


def test_a_wider_job_waits_for_the_slowest_of_more_ranks_and_reduces_over_more(tmp_path):
    narrow, wide = (built(noisy_job(ranks), tmp_path / str(ranks)) for ranks in (4, 12))
    trust = assess(narrow, replay(narrow.graph), narrow.graph.run.manifest)
    predicted = predict(
        narrow.graph, baseline_steps(narrow.graph), [parse_edit("data-parallel:ranks=12")], trust
    )
    measured = mean_step_us(wide)
    assert predicted.predicted_ns / 1000 == pytest.approx(measured, rel=0.03)
    assert predicted.low_ns / 1000 <= measured <= predicted.high_ns / 1000
    assert abs(predicted.predicted_ns / 1000 - measured) < abs(mean_step_us(narrow) - measured)


def test_transfers_cost_what_a_ring_of_so_many_does(tmp_path):
    graph = parse_edit("data-parallel:ranks=8").apply(four_ranks(tmp_path))
    expected = [14 * ALPHA + 2 * 7 / 8 * BETA * size for size in SIZES]
    assert times_us(graph) == pytest.approx(expected, rel=0.01)


def test_what_the_run_says_ran_counts_more_than_a_ring(tmp_path):
    recorded = parse_edit("data-parallel:ranks=8").apply(four_ranks(tmp_path / "recorded", algorithm="TREE"))
    supposed = parse_edit("data-parallel:ranks=8,now=tree").apply(four_ranks(tmp_path / "supposed"))
    assert times_us(recorded) == times_us(supposed)
    assert times_us(recorded) != pytest.approx(
        times_us(parse_edit("data-parallel:ranks=8").apply(four_ranks(tmp_path / "r")))
    )


def test_as_many_ranks_as_there_are_change_nothing(tmp_path):
    graph = four_ranks(tmp_path)
    assert parse_edit("data-parallel:ranks=4").apply(graph) is graph


def test_a_wider_job_is_never_faster(tmp_path):
    graph = four_ranks(tmp_path)
    lasts = [
        parse_edit(f"data-parallel:ranks={ranks}")
        .apply(graph)
        .nodes.duration[graph.nodes.kind == NodeKind.TRANSFER]
        for ranks in (2, 4, 8, 64)
    ]
    assert all((fewer <= more).all() for fewer, more in pairwise(lasts))


def test_the_largest_of_many_deviates_is_what_drawing_them_gives():
    draws = np.random.default_rng(0).normal(size=(20_000, 64))
    for count in (2, 5, 16, 64):
        assert largest_of(count) == pytest.approx(draws[:, :count].max(axis=1).mean(), abs=0.03)
    assert largest_of(1) == pytest.approx(NormalDist().inv_cdf(0.5))


def test_ranks_in_several_groups_are_refused(tmp_path):
    with pytest.raises(Unanswerable, match="several groups"):
        parse_edit("data-parallel:ranks=8").apply(four_ranks(tmp_path, inside=True))


def test_groups_that_each_hold_all_ranks_are_one_whatever_their_names(tmp_path):
    run = noisy_job(4)
    for row in run.rows[COLLECTIVES.name][::2]:
        row["group"] = "of a kernel alone"  # as traces call what was launched before they begin
    graph = built(run, tmp_path / "r").graph
    assert len({message.group for message in graph.messages}) == 2
    same = built(noisy_job(4), tmp_path / "same").graph
    assert parse_edit("data-parallel:ranks=8").samples(graph) == 2.0
    wider = [mean_step_us_of(parse_edit("data-parallel:ranks=8").apply(each)) for each in (graph, same)]
    assert wider[0] == pytest.approx(wider[1], rel=0.01)


def sharded_job(op: str) -> TinyRun:
    """Four ranks that scatter (or keep) sums of two sizes, and then update for 400 us."""
    run, at = TinyRun(), 0.0
    for step in range(6):
        size = 1000 * (1 + step % 2)
        facts = {"op": op, "group": "all", "group_ranks": "0-3", "bytes_in": size, "bytes_out": size}
        end = at + 540 + 0.1 * size
        for rank in range(4):
            run.op("work", at, at + 500, rank)
            run.gloo((at + 500, at + 510), (at + 520, end), rank, sequence=step, **facts)
            run.mark("wait", at + 510, end, rank)
            run.mark("Optimizer.step#SGD.step", end, end + 400, rank)
            run.op("aten::add_", end, end + 400, rank)
            run.step(step, at, end + 400, rank)
        at = end + 400
    return run


def test_of_half_as_many_ranks_each_updates_twice_the_shard(tmp_path):
    def updates_us(op: str, *more: str) -> list[float]:
        graph = built(sharded_job(op), tmp_path / "".join((op, *more))).graph
        changed = parse_edit("data-parallel:ranks=2").apply(graph)
        is_update = graph.nodes.name == graph.names.index("aten::add_")
        return (changed.nodes.duration[is_update] / 1000).tolist()

    assert updates_us("reduce_scatter") == pytest.approx([800.0] * 24, abs=1)
    assert updates_us("all_reduce") == pytest.approx([400.0] * 24, abs=1)  # each updates all there is


def test_that_more_ranks_may_need_another_host_is_said(tmp_path):
    edit, narrower = parse_edit("data-parallel:ranks=8"), parse_edit("data-parallel:ranks=2")
    run = sharded_job("all_reduce")
    for rank in range(4):
        run.worker(rank, "host0")
    graph = built(run, tmp_path / "one").graph
    assert "all ranks are on one host" in edit.notes(graph)[0]
    assert not any("one host" in note for note in narrower.notes(graph))
    assert not any("one host" in note for note in edit.notes(four_ranks(tmp_path / "two")))


def test_that_latency_is_not_known_is_said(tmp_path):
    (line,) = parse_edit("data-parallel:ranks=8").notes(ddp_job().build(tmp_path / "run").graph)
    assert "too similar to show latency" in line


def _table(**ranks_per_us: float) -> pl.DataFrame:
    """A network table of all-reduces that take this many times their bytes, and 10 us, by number of ranks."""
    rows = [
        (int(name[1:]), 2.0**power, 1e4 + 1e3 * factor * 2**power)
        for name, factor in ranks_per_us.items()
        for power in range(9, 22)
    ]
    frame = pl.DataFrame(rows, schema=["num_ranks", "bytes", "time_ns"], orient="row")
    words = {"op": "all_reduce", "device": "", "library": "", "version": "", "link": ""}
    return frame.with_columns(hosts=pl.lit(1), **{name: pl.lit(text) for name, text in words.items()})


def test_a_table_that_has_both_numbers_of_ranks_counts_more_than_the_formula(tmp_path):
    plain = four_ranks(tmp_path)
    graph = dataclasses.replace(plain, network=_table(n4=0.003, n8=0.009))
    edit = parse_edit("data-parallel:ranks=8")
    before, after = times_us(graph), times_us(edit.apply(graph))
    expected = [(10 + 0.009 * size) / (10 + 0.003 * size) for size in SIZES]
    assert [one / other for one, other in zip(after, before)] == pytest.approx(expected, rel=0.02)
    assert edit.notes(graph) == ("all_reduce among 8 ranks: by the network table",)


def test_without_the_other_number_of_ranks_in_the_table_the_formula_counts_and_that_is_said(tmp_path):
    plain = four_ranks(tmp_path)
    graph = dataclasses.replace(plain, network=_table(n4=0.003))
    edit = parse_edit("data-parallel:ranks=8")
    assert edit.notes(graph)[0].endswith("by a formula, the network table lacks it")
    far = dataclasses.replace(plain, network=_table(n4=0.003, n8=0.009).with_columns(pl.col("bytes") * 1e6))
    assert edit.notes(far)[0].endswith("by a formula, the network table lacks it")
    assert times_us(edit.apply(far)) != times_us(far)
