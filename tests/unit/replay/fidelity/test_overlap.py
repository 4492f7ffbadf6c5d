"""Kernels beside communication: how much slower they are, and what a changed overlap does to a prediction."""

import dataclasses

import numpy as np
import pytest
from msgspec import structs

from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.fidelity.overlap import (
    overlap_of,
    overlapped_before,
    overlapped_share,
    replays_with_new_overlap,
)
from dpro.replay.graph import NodeKind
from dpro.replay.timeline import critical_path_of_steps, replay
from dpro.replay.whatif.edits.communication import Network, NoCommunication
from dpro.replay.whatif.predict import apply_all, baseline_steps, predict, predicted_timeline
from dpro.store import open_run
from tests.builders import tiny_graph

ALONE, OVERLAPPED, KERNELS, STEPS = 1_000, 1_300, 10, 4


def one_gpu(overlapped=OVERLAPPED):
    """Ten kernels a step in a row; data moves during the first five in even steps, else during the others.

    Each transfer starts when the kernel before it ends, and lasts exactly as long as the five kernels.
    """
    durations, edges, columns, now, last = [], [], [], 0, None
    for step in range(STEPS):
        for k in range(KERNELS):
            covered = (k < KERNELS // 2) == (step % 2 == 0)
            if covered and k in (0, KERNELS // 2):
                durations.append(KERNELS // 2 * overlapped)
                columns.append((NodeKind.TRANSFER, step, now, now + durations[-1], KERNELS))
                edges += [(last, len(durations) - 1, 0)] if last is not None else []
            durations.append(overlapped if covered else ALONE)
            columns.append((NodeKind.KERNEL, step, now, now + durations[-1], k))
            edges += [(last, len(durations) - 1, 0)] if last is not None else []
            last, now = len(durations) - 1, now + durations[-1]
    kind, step, start, end, name = map(list, zip(*columns))
    names = [f"kernel {k}" for k in range(KERNELS)] + ["all_reduce"]
    return tiny_graph(
        durations, edges, names, kind=kind, step=step, measured_start=start, measured_end=end, name=name
    )


def test_slowdown_is_the_time_during_communication_over_the_time_alone():
    overlap = overlap_of(one_gpu())
    assert overlap is not None
    assert overlap.factor == overlap.low == overlap.high == OVERLAPPED / ALONE


@pytest.mark.parametrize(("needed", "enough"), [(KERNELS, True), (KERNELS + 1, False)])
def test_each_place_at_which_a_kernel_is_seen_both_ways_counts_once(monkeypatch, needed, enough):
    monkeypatch.setattr("dpro.replay.fidelity.overlap.ENOUGH_PLACES", needed)
    assert (overlap_of(one_gpu()) is not None) == enough


def test_nothing_is_reported_where_kernels_are_no_slower_beside_communication():
    assert overlap_of(one_gpu(overlapped=ALONE)) is None


def test_share_counts_moments_of_several_transfers_once():
    graph = tiny_graph(
        [100, 50, 50, 100], [], kind=[NodeKind.KERNEL, NodeKind.TRANSFER, NodeKind.TRANSFER, NodeKind.KERNEL]
    )
    start = np.array([0, 20, 40, 200])
    share = overlapped_share(graph, start, start + graph.nodes.duration)
    assert share.tolist() == [0.7, 0, 0, 0]


def test_transfers_of_other_ranks_slow_no_rank_down():
    kinds = [NodeKind.KERNEL, NodeKind.TRANSFER]
    graph = tiny_graph([100, 100], [], kind=kinds, rank=[0, 1])
    start = np.zeros(2, np.int64)
    assert overlapped_share(graph, start, start + 100).tolist() == [0, 0]


def test_kernels_are_as_fast_as_alone_once_nothing_moves_beside_them():
    graph = one_gpu()
    timeline = replay(graph)
    overlap = overlap_of(timeline.graph)
    assert timeline.end.max() == STEPS * KERNELS * (ALONE + OVERLAPPED) // 2
    changed = NoCommunication().apply(graph)
    (after,) = replays_with_new_overlap(changed, overlapped_before(graph), [overlap.factor])
    assert after.end.max() == STEPS * KERNELS * ALONE


def test_kernels_that_come_to_stand_beside_communication_slow_down():
    # At half the bandwidth each transfer lasts twice as long, and reaches over more kernels.
    graph = one_gpu()
    overlap = overlap_of(graph)
    changed = Network(0.5).apply(graph)
    (after,) = replays_with_new_overlap(changed, overlapped_before(graph), [overlap.factor])
    kernels = after.graph.nodes.kind == NodeKind.KERNEL
    slow = after.graph.nodes.duration[kernels] > ALONE
    assert slow.sum() > STEPS * KERNELS // 2
    assert after.end.max() > replay(changed).end.max()


@pytest.mark.parametrize("run", ["healthy", "slow_rank"])
def test_an_edit_that_changes_nothing_replays_to_the_nanosecond(repository, run):
    graph = build_graph(open_run(repository / "sample_traces" / run)).graph
    timeline = replay(graph)
    (again,) = replays_with_new_overlap(graph, overlapped_share(graph, timeline.start, timeline.end), [1.5])
    assert (again.end == timeline.end).all()


def test_prediction_counts_what_a_changed_overlap_costs_and_how_well_that_is_known(repository):
    graph = one_gpu()
    timeline = replay(graph)
    overlap = overlap_of(timeline.graph)
    built = build_graph(run := open_run(repository / "sample_traces" / "healthy"))
    trust = assess(built, replay(built.graph), run.manifest)
    trust = dataclasses.replace(trust, overlap=overlap, error_pct=0.0)
    baseline = baseline_steps(graph)
    sure = predict(graph, baseline, [NoCommunication()], trust)
    unsure = dataclasses.replace(trust, overlap=structs.replace(overlap, low=1.2, high=1.4))
    wide = predict(graph, baseline, [NoCommunication()], unsure)
    assert sure.predicted_ns == wide.predicted_ns == KERNELS * ALONE
    assert wide.high_ns - wide.low_ns > sure.high_ns - sure.low_ns
    blind = predict(graph, baseline, [NoCommunication()], dataclasses.replace(trust, overlap=None))
    assert blind.predicted_ns == KERNELS * (ALONE + OVERLAPPED) / 2


@pytest.mark.parametrize("edit", [NoCommunication(), Network(0.5)])
def test_parts_of_predicted_steps_add_up_where_a_changed_overlap_changes_kernels(repository, edit):
    graph = one_gpu()
    built = build_graph(run := open_run(repository / "sample_traces" / "healthy"))
    trust = assess(built, replay(built.graph), run.manifest)
    trust = dataclasses.replace(trust, overlap=overlap_of(graph))
    baseline = baseline_steps(graph)
    applied = apply_all(graph, [edit])
    parts = critical_path_of_steps(predicted_timeline(applied, trust), baseline, baseline)
    predicted = predict(graph, baseline, [edit], trust).predicted_ns
    assert parts["duration_ns"].sum() == predicted * STEPS
    plain = critical_path_of_steps(replay(applied.graphs[-1]), baseline, baseline)
    assert plain["duration_ns"].sum() != predicted * STEPS


def test_real_gpus_are_slower_beside_communication(traces):
    from dpro.cli.analysis import open_quietly

    built = build_graph(run := open_quietly(traces / "multirank" / "torchrec_v100_4r_a2a_ar"))
    overlap = assess(built, replay(built.graph), run.manifest).overlap
    assert overlap is not None
    assert 1 < overlap.low < overlap.factor < overlap.high < 1.5
