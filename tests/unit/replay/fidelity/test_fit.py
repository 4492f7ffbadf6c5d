"""What a replay rests on, how far it is from the trace, and what decided single steps."""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
import pytest

from dpro.replay.fidelity.accuracy import (
    StartCounts,
    count_starts,
    counted,
    counted_starts,
    evidence_of,
    judged_starts,
    min_share_from_trace,
    rank_errors,
    rank_start_errors,
    start_errors,
    start_misses,
    step_errors,
)
from dpro.replay.graph import EdgeKind, NodeKind
from dpro.replay.timeline import (
    changed_step_times,
    critical_path,
    critical_path_of_steps,
    rank_step_times,
    replay,
    step_ends,
    step_times,
)
from tests.builders import TinyRun, cpu_job, gpu_job, tiny_graph

US = 1_000
KERNELS = [int(NodeKind.KERNEL)] * 4


@pytest.mark.parametrize(
    ("taken", "of", "least"),
    [
        (0, 4, 0.0),
        (1, 4, 1 - 0.95 ** (1 / 4)),  # of any share below that, none of four is taken in 95%
        (4, 4, 0.05 ** (1 / 4)),
        (7, 32, 0.107),  # 22%, which alone would be poor
        (3000, 10_000, 0.2924),
    ],
)
def test_of_few_starts_the_share_that_is_taken_from_the_trace_is_not_known_to_be_large(taken, of, least):
    set_by = np.array([of - taken, 0, taken, 0])
    assert min_share_from_trace(StartCounts(np.zeros(2), np.zeros(2), set_by)) == pytest.approx(
        least, rel=0.01
    )


def test_errors_of_starts_are_how_far_the_replay_is_from_the_trace():
    graph = tiny_graph(
        [10, 10, 10, 10],
        [(0, 1, 0), (1, 2, 0), (2, 3, 0)],
        kind=KERNELS,
        measured_start=[0, 14, 20, 30],
        measured_end=[10, 24, 30, 40],
    )
    timeline = replay(graph)
    errors = start_errors(counted(judged_starts(timeline, on_gpu=True)))
    assert (errors[50], errors[100]) == (0, 4)
    anchored = tiny_graph([10], [], kind=KERNELS[:1], measured_start=[7], anchored=[1])
    assert (
        start_errors(counted(judged_starts(replay(anchored), on_gpu=True))) == {}
    )  # not 0: it is not derived


def test_starts_that_the_trace_sets_are_not_judged():
    # 1 follows a delay as recorded, 3 the usual one of 2 instead of 5, 4 is fitted to the draining of a
    # device; each of them starts as measured or 3 sooner.
    kind = [NodeKind.DELAY, NodeKind.KERNEL, NodeKind.DELAY, NodeKind.KERNEL, NodeKind.KERNEL]
    graph = tiny_graph(
        [4, 10, 2, 10, 10], [(0, 1, 0), (2, 3, 0), (1, 4, -5)], kind=list(map(int, kind)),
        anchored=[0, 0, 0, 0, 1],
        measured_start=[0, 4, 0, 5, 9], measured_end=[4, 14, 5, 15, 19],
    )  # fmt: skip
    last = int(np.flatnonzero(graph.nodes.name == 4)[0])
    edges = dataclasses.replace(
        graph.edges, kind=np.where(graph.edges.target == last, EdgeKind.CONTENTION, EdgeKind.LAUNCH)
    )
    timeline = replay(dataclasses.replace(graph, edges=edges))
    judged = counted_starts(timeline, on_gpu=True)
    assert graph.nodes.name[judged].tolist() == [3]
    assert start_errors(counted(judged_starts(timeline, on_gpu=True)))[50] == 3


def test_starts_after_usual_delays_are_counted_from_the_beginning_of_their_step():
    # Each of two steps begins with a delay of 9 where 4 are usual: the second one's kernel begins 10 sooner
    # in the replay, 5 of which are due to the step before it.
    kind = [int(NodeKind.DELAY), int(NodeKind.KERNEL)] * 2
    graph = tiny_graph(
        [4, 10, 4, 10], [(0, 1, 0), (1, 2, 0), (2, 3, 0)], kind=kind, step=[0, 0, 1, 1],
        measured_start=[0, 9, 19, 28], measured_end=[9, 19, 28, 38],
    )  # fmt: skip
    timeline = replay(graph)
    assert (timeline.start - graph.nodes.measured_start).tolist() == [0, -5, -5, -10]
    assert start_misses(timeline).tolist() == [0, 5, 0, 5]


def test_each_rank_has_steps_and_errors_of_its_own():
    # Rank 0 ends at 10 as measured; rank 1 ends at 20 where 25 were measured: 20% off, its start right.
    graph = tiny_graph(
        [10, 20], [], kind=KERNELS[:2], rank=[0, 1], measured_start=[0, 0], measured_end=[10, 25]
    )
    timeline = replay(graph)
    starts = rank_start_errors(judged_starts(timeline, on_gpu=True))
    assert rank_errors(timeline, starts).rows() == [(0, 0.0, 0.0, 0.0), (1, pytest.approx(20), 0.0, 0.0)]
    assert rank_step_times(graph, timeline.start, timeline.end)["duration_ns"].to_list() == [10, 20]
    assert step_errors(timeline)["error_pct"].to_list() == [pytest.approx(-20)]


def test_a_rank_without_work_in_a_step_has_no_error_rather_than_none():
    graph = tiny_graph([10, 10], [], kind=[0, int(NodeKind.KERNEL)], rank=[0, 1], step=[0, -1])
    starts = rank_start_errors(judged_starts(replay(graph), on_gpu=True))
    errors = rank_errors(replay(graph), starts)
    assert errors.filter(pl.col("rank") == 1)["error_pct"].to_list() == [None]


def test_starts_are_counted_by_what_set_them(tmp_path):
    # k1 follows its launch; k2 an event that is only inferred; k3 waits for room; k4 is anchored.
    run = TinyRun()
    run.step(0, 0, 400)
    run.call(0, 10, 1)
    run.kernel("k1", 15, 100, 1)
    run.call(10, 20, 2)
    run.kernel("k2", 101, 140, 2, stream=8)  # nothing else explains 101 than the end of k1
    run.kernel("k4", 5, 12, stream=9)
    evidence = evidence_of(count_starts(replay(run.build(tmp_path).graph))).starts
    assert (evidence.derived, evidence.inferred, evidence.anchored) == pytest.approx((1 / 3, 1 / 3, 1 / 3))


@pytest.mark.parametrize("job", [cpu_job, gpu_job])
def test_edges_are_counted_by_kind_and_evidence(job, tmp_path):
    graph = job().build(tmp_path).graph
    edges = evidence_of(count_starts(replay(graph))).edges
    for row in edges:
        mine = graph.edges.kind == EdgeKind[row.kind.upper()]
        assert row.inferred == graph.edges.inferred[mine].sum()
        assert row.recorded == (~graph.edges.inferred[mine]).sum()
    assert sum(row.recorded + row.inferred for row in edges) == graph.edges.kind.size


@pytest.mark.parametrize("job", [cpu_job, gpu_job])
def test_what_decides_a_step_lasts_as_long_as_the_step(job, tmp_path):
    graph = job().build(tmp_path).graph
    timeline = replay(graph)
    steps = step_times(graph, timeline.start, timeline.end)
    for row in steps.iter_slices(1):
        path = critical_path_of_steps(timeline, row)
        assert path["duration_ns"].sum() == row["duration_ns"].item()
    whole = critical_path_of_steps(timeline, steps)["duration_ns"].sum()
    assert whole == critical_path(timeline)["duration_ns"].sum() == timeline.end.max()


def test_a_slow_input_decides_the_steps_it_is_in_and_no_other(tmp_path):
    run = cpu_job(extra=0)
    slow = next(row for row in run.rows["spans"] if row["rank"] == 2 and "__next__" in row["name"])
    graph = run.build(tmp_path).graph
    node = np.flatnonzero((graph.nodes.rank == 2) & (graph.nodes.span == slow["span_id"]))[0]
    duration = graph.nodes.duration.copy()
    duration[node] += 900 * US
    late = replay(graph.with_durations(duration))
    path = critical_path_of_steps(late, pl.DataFrame({"window": [0], "step": [0]}))
    name = graph.names[graph.nodes.name[node]]
    assert path.filter((pl.col("rank") == 2) & (pl.col("name") == name))["duration_ns"].sum() > 900 * US
    after = critical_path_of_steps(late, pl.DataFrame({"window": [0], "step": [1]}))
    assert after["duration_ns"].sum() < 900 * US


@pytest.mark.parametrize("seed", range(30))
def test_parts_of_changed_steps_add_up_to_the_steps_whatever_the_graph(seed):
    # Ranks, windows, work before and after the steps, and work that may not start before a time of its own.
    random = np.random.default_rng(seed)
    size = 60
    source = random.integers(0, size - 1, 90)
    window = np.sort(random.integers(0, 2, size))
    edges = [
        (int(a), int(b), int(lag))
        for a, b, lag in zip(source, source + 1 + random.integers(0, 5, 90), random.integers(0, 9, 90))
        if b < size and window[a] == window[b]
    ]
    step = np.where(random.random(size) < 0.1, -2, np.arange(size) // 7 - 1)
    graph = tiny_graph(
        random.integers(0, 50, size).tolist(), edges, step=step, window=window,
        rank=random.integers(0, 3, size), kind=random.choice([0, 4, 7, 9], size),
        earliest=np.where(random.random(size) < 0.2, random.integers(0, 300, size), 0),
    )  # fmt: skip
    timeline = replay(graph)
    baseline = step_ends(graph, timeline.start, timeline.end)
    changed = replay(graph.with_durations(graph.nodes.duration * random.integers(0, 3, size) // 2))
    whole = changed_step_times(baseline, changed.graph, changed.end)
    parts = critical_path_of_steps(changed, baseline, baseline)
    assert parts["duration_ns"].sum() == whole["duration_ns"].sum()
    for row in whole.iter_slices(1):
        assert (
            critical_path_of_steps(changed, row, baseline)["duration_ns"].sum() == row["duration_ns"].item()
        )
