"""Ranks, hosts and stages healed, slowed and left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, Graph
from dpro.replay.timeline import replay
from tests.builders import US, TinyRun, cpu_job, gpu_job
from tests.edits import changed, steps_us
from tests.pipelines import MS, Job, written

PLACES = ["rank=0", "rank=2", "host=b", "host=*"]


def _on_hosts(job: TinyRun) -> TinyRun:
    for rank, host in enumerate("aabb"):
        job.worker(rank, host)
    return job


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Graph]:
    even = _on_hosts(cpu_job(num_ranks=4, extra=0))
    uneven = _on_hosts(cpu_job(num_ranks=4, slow_rank=2))
    gpu = _on_hosts(gpu_job(num_ranks=4))
    made = {"even": even, "uneven": uneven, "gpu": gpu}
    return {name: job.build(tmp_path_factory.mktemp(name) / "run").graph for name, job in made.items()}


@given(st.sampled_from(["even", "uneven", "gpu"]), st.sampled_from(PLACES))
def test_a_straggler_that_loses_nothing_changes_nothing(jobs, job, place):
    graph = jobs[job]
    for strength in ("factor=1", "ms=0", "factor=1,ms=0"):
        assert (changed(graph, f"slow:{place},{strength}").nodes.duration == graph.nodes.duration).all()


@given(st.sampled_from(["even", "uneven", "gpu"]), st.sampled_from(PLACES), st.integers(10, 40))
def test_a_straggler_makes_nothing_end_earlier_and_touches_only_its_own_work(jobs, job, place, tenths):
    graph = jobs[job]
    slower = changed(graph, f"slow:{place},factor={tenths / 10},ms=0.1")
    assert (replay(slower).end >= replay(graph).end).all()
    touched = slower.nodes.duration != graph.nodes.duration
    assert np.isin(graph.nodes.kind[touched], (*CPU_KINDS, *GPU_KINDS)).all()
    if place.startswith("rank"):
        assert set(graph.nodes.rank[touched]) <= {int(place[-1])}


def test_a_rank_that_loses_two_ms_a_step_costs_the_job_two_ms_a_step(jobs):
    saved = steps_us(jobs["even"], "slow:rank=1,ms=2") - steps_us(jobs["even"])
    assert saved == pytest.approx([2000] * 4, abs=100)


@pytest.mark.parametrize("edit", ["heal:rank=2", "heal:host=b"])
def test_healing_a_rank_or_its_host_takes_the_slowness_away_that_was_put_in(jobs, edit):
    slow = steps_us(jobs["even"], "slow:rank=2,factor=2").mean()
    healed = steps_us(jobs["even"], "slow:rank=2,factor=2", edit).mean()
    assert healed == pytest.approx(steps_us(jobs["even"]).mean(), rel=0.03)
    assert slow > 1.2 * healed


def test_healing_a_host_counts_its_ranks_not_among_the_peers(jobs):
    # Both ranks of host b are slow: to each the other would look healthy.
    slower = ("slow:host=b,factor=2",)
    alone = steps_us(jobs["even"], *slower, "heal:host=b").mean()
    assert alone == pytest.approx(steps_us(jobs["even"]).mean(), rel=0.03)
    with pytest.raises(Unanswerable, match="no peer"):
        changed(jobs["even"], "heal:host=*")


@given(st.sampled_from(["even", "uneven", "gpu"]), st.sampled_from(PLACES[:-1]), st.floats(0, 3))
def test_healing_never_slows(jobs, job, place, factor):
    slower = changed(jobs[job], f"slow:rank=2,factor={factor}")
    healed = changed(slower, f"heal:{place}")
    assert (healed.nodes.duration <= slower.nodes.duration).all()
    assert (replay(healed).end <= replay(slower).end).all()


@given(st.sampled_from(["even", "uneven", "gpu"]), st.integers(10, 30), st.integers(0, 20))
def test_stragglers_on_two_ranks_are_the_same_in_either_order(jobs, job, tenths, ms):
    one, other = f"slow:rank=0,factor={tenths / 10}", f"slow:rank=2,ms={ms}"
    assert (steps_us(jobs[job], one, other) == steps_us(jobs[job], other, one)).all()


def test_no_rank_waits_for_one_that_is_dropped(jobs):
    graph = jobs["uneven"]
    without = steps_us(graph, "drop:rank=2").mean()
    assert without == pytest.approx(steps_us(graph, "heal:rank=2").mean(), rel=0.05)
    assert (steps_us(graph, "slow:rank=2,factor=9", "drop:rank=2") == steps_us(graph, "drop:rank=2")).all()


@pytest.mark.parametrize("job", ["even", "uneven", "gpu"])
@pytest.mark.parametrize("rank", range(4))
def test_dropping_a_rank_lets_nothing_end_later(jobs, job, rank):
    dropped = changed(jobs[job], f"drop:rank={rank}")
    assert (replay(dropped).end <= replay(jobs[job]).end).all()


def test_ranks_that_are_not_there_are_refused(jobs, tmp_path):
    for edit in ("heal:rank=9", "slow:rank=9,ms=1", "drop:rank=9"):
        with pytest.raises(Unanswerable, match="rank 9 is not in the run"):
            changed(jobs["even"], edit)
    with pytest.raises(Unanswerable, match="host nowhere is not in the run"):
        changed(jobs["even"], "heal:host=nowhere")
    with pytest.raises(Unanswerable, match="the stage and data-parallel rank"):
        changed(cpu_job().build(tmp_path / "r").graph, "heal:stage=1")


def _pipeline_ms(folder, *edits: str, **job) -> list[float]:
    from dpro.replay.construction.graph_builder import build_graph

    return (steps_us(build_graph(written(Job(**job).run(), folder)).graph, *edits) * US / MS).tolist()


def test_a_replica_is_dropped_as_a_whole_and_a_part_of_it_is_refused(tmp_path):
    # 106 by hand; the other replica twice as slow, left out, is as if it had never been.
    slow = "scale:dp=1,name=*-compute,factor=2"
    assert _pipeline_ms(tmp_path / "a", slow, "drop:dp=1") == [106]
    with pytest.raises(Unanswerable, match="drop a whole replica"):
        _pipeline_ms(tmp_path / "b", "drop:rank=1")


def test_a_stage_with_more_work_is_healed_by_the_others(tmp_path):
    uneven = "scale:stage=1,name=*-compute,factor=2"
    assert _pipeline_ms(tmp_path / "a", uneven, "heal:stage=1") == [106]
    assert _pipeline_ms(tmp_path / "b", uneven, "heal:stage=0")[0] > 106
