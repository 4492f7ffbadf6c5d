"""Which steps predictions start from, and that no step becomes shorter than the hosts' own pace."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import numpy as np
import polars as pl
import pytest

from dpro.errors import Unanswerable
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, NodeKind, is_one_of
from dpro.replay.timeline import host_paces, replay, slowest_pace, step_lengths, usual_steps
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import baseline_steps, measured_ns, predict, refuse_nothing_left
from dpro.replay.whatif.registry import parse_edit
from tests.builders import US, TinyRun, cpu_job, gpu_job


def ends_of(*lengths: float) -> pl.DataFrame:
    """When steps end that take so long each, one after the other."""
    return pl.DataFrame(
        {
            "window": [0] * len(lengths),
            "step": range(len(lengths)),
            "finish_ns": np.cumsum(lengths) * US,
            "begin_ns": [0] * len(lengths),
        }
    ).cast({"finish_ns": pl.Int64})


@pytest.mark.parametrize(
    ("lengths", "counted"),
    [
        ((378, 152, 157), (152, 157)),  # the first one warms up
        ((150, 150, 150, 0.02), (150, 150, 150)),  # the last one is cut off
        ((150, 900, 151, 149), (150, 151, 149)),  # a pause
        ((400, 150), (150,)),
        ((150, 20), (150,)),
        ((150, 160), (150, 160)),
        ((42,), (42,)),
        ((46, 185, 47, 186, 45, 184), (46, 185, 47, 186, 45, 184)),  # by turns
        ((150, 152, 150, 900, 151, 149), (150, 152, 150, 151, 149)),
    ],
)
def test_steps_that_are_cut_off_warm_up_or_pause_do_not_count(lengths, counted):
    lengths_ns = step_lengths(usual_steps(ends_of(*lengths)))
    assert lengths_ns.tolist() == [round(length * US) for length in counted]


def test_where_the_only_usual_step_has_queued_work_that_step_counts():
    ends = ends_of(400, 150).with_columns(queued=pl.Series([False, True]))
    assert step_lengths(usual_steps(ends)).tolist() == [150 * US]


@pytest.mark.parametrize(("longest", "counted"), [(54, (36,)), (30, (36, 71)), (None, (36, 71))])
def test_steps_longer_than_those_outside_windows_do_not_count_beside_others(longest, counted):
    lengths_ns = step_lengths(usual_steps(ends_of(36, 71), longest and longest * US))
    assert lengths_ns.tolist() == [length * US for length in counted]


def test_steps_that_take_no_time_are_no_baseline(tmp_path):
    run = TinyRun()
    run.op("forward", 5, 5)
    run.call(5, 5, 1)
    run.kernel("gemm", 5, 5, 1)
    with pytest.raises(Unanswerable, match="takes any time"):
        baseline_steps(run.build(tmp_path).graph)


def slow_device(steps_us: list[float], host_us: float = 500) -> TinyRun:
    """A host that needs 500 a step, ahead of a device that needs some longer time."""
    run, ends = TinyRun(), 500 + np.cumsum([0, *steps_us])
    for step, (begin, end) in enumerate(pairwise(ends)):
        at = host_us * step
        run.op("aten::mul", at, at + host_us - 10)
        run.call(at + host_us - 10, at + host_us, step)
        run.kernel("gemm", begin, end, step)
        run.step(step, at, at + host_us)
    return run


def test_the_pace_of_a_host_is_its_step_without_waits(tmp_path):
    # The host needs 500 a step, the device 600; without the device no step takes less than 500.
    graph = slow_device([600] * 4).build(tmp_path / "run").graph
    assert slowest_pace(graph) == pytest.approx(500 * US, rel=0.05)


def test_hosts_alone_are_the_graph_whose_devices_and_other_ranks_take_no_time(tmp_path):
    graph = gpu_job().build(tmp_path / "run").graph
    nodes = graph.nodes
    elsewhere = is_one_of(nodes.kind, (*GPU_KINDS, NodeKind.TRANSFER, NodeKind.RENDEZVOUS))
    alone = graph.without_edges(graph.edges.kind == EdgeKind.RENDEZVOUS)
    durations, earliest = (np.where(elsewhere, 0, of) for of in (nodes.duration, nodes.earliest))
    alone = dataclasses.replace(
        alone, nodes=dataclasses.replace(nodes, duration=durations, earliest=earliest)
    )
    timeline = replay(alone)
    on_host = is_one_of(nodes.kind, CPU_KINDS) & (nodes.step >= 0)
    ends = {
        (rank, step): timeline.end[on_host & (nodes.rank == rank) & (nodes.step == step)].max()
        for rank in graph.ranks
        for step in np.unique(nodes.step[on_host]).tolist()
    }
    paces = host_paces(graph).filter("later")
    steps = sorted({step for _, step in ends})
    assert len(steps) > 1
    for rank in graph.ranks:
        between = [ends[rank, step] - ends[rank, before] for before, step in pairwise(steps)]
        assert paces.filter(rank=rank)["pace_ns"].to_list() == between


def test_no_predicted_step_is_shorter_than_the_host_needs_for_one(tmp_path):
    # Kernels of 600 that take 60: the replay alone lives off the lead of the host, 440 at the end.
    built = slow_device([600] * 4).build(tmp_path / "run")
    trust = assess(built, replay(built.graph), built.graph.run.manifest)
    # Recording may have slowed the host down by up to 1.7 times.
    shorter, longer = (pl.DataFrame({"rank": [0], "factor": [factor]}) for factor in (1 / 1.7, 1.0))
    trust = dataclasses.replace(trust, host_factors=(shorter, longer))
    edit = parse_edit("scale:name=gemm,factor=0.1")
    baseline = baseline_steps(built.graph)
    job = ReplayedJob(built.graph)
    assert job.under(edit).job.pace_ns == job.pace_ns
    prediction = predict(job, baseline, [edit], trust)
    assert prediction.predicted_ns >= 0.95 * 500 * US
    assert prediction.speedup == pytest.approx(1.2, rel=0.05)
    # Without that, 294 may do.
    assert 250 * US < prediction.low_ns < 294 * US
    assert prediction.gain_low_ns == pytest.approx(100 * US, rel=0.1)


def test_measured_and_replayed_step_are_means_of_the_same_steps(tmp_path):
    built = slow_device([600, 600, 2000, 600], 100).build(tmp_path / "run")
    trust = assess(built, replay(built.graph), built.graph.run.manifest)
    baseline = baseline_steps(built.graph)
    # The first waits for 490 us behind older work, and the third is a pause.
    assert baseline["counted"].to_list() == [False, True, False, True]
    assert step_lengths(baseline).mean() == pytest.approx(measured_ns(trust, baseline), rel=0.02)


def test_hosts_without_devices_have_no_pace_of_their_own(tmp_path):
    job = ReplayedJob(cpu_job().build(tmp_path / "run").graph)
    assert job.pace_ns == 0


def test_a_change_that_leaves_nothing_of_the_step_is_refused(tmp_path):
    graph = cpu_job().build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match="nothing of the step"):
        refuse_nothing_left(np.zeros(2, np.int64))
    refuse_nothing_left(step_lengths(baseline_steps(graph)))
