"""Steps of jobs whose GPU or host limits them, and which work belongs to which step."""

from __future__ import annotations

import numpy as np

from dpro.replay.graph import NodeKind
from dpro.replay.timeline import (
    changed_step_times,
    durations_of,
    measured_step_times,
    replay,
    step_ends,
    step_times,
)
from dpro.replay.whatif.edits.host import NoLaunch
from dpro.replay.whatif.edits.selected_work import Scale
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from tests.builders import US, TinyRun
from tests.unit.replay.construction.test_gpu_streams import replayed, step_us


def _bound(call: float, kernel: float) -> TinyRun:
    """Twenty launches and kernels; the step ends when the device has drained."""
    run = TinyRun()
    gpu_free = 0.0
    for index in range(20):
        begin = call * index
        run.call(begin, begin + call, index)
        start = max(begin + call + 5, gpu_free)
        gpu_free = start + kernel
        run.kernel("gemm", start, gpu_free, index)
    end = max(gpu_free, 20 * call)
    run.call(20 * call, end, 99, name="cudaDeviceSynchronize")
    run.op("loss", end, end + 10)
    run.step(0, 0, end + 10)
    return run


def test_a_launch_bound_step_hardly_gains_from_faster_kernels_and_becomes_gpu_bound_without_launches(
    tmp_path,
):
    graph = _bound(call=30, kernel=20).build(tmp_path / "r").graph
    assert step_us(graph) == measured_step_times(graph)["duration_ns"].item() / US == 635
    faster = Scale(NodeSelection(kind="kernel"), 0.1).apply(graph)
    assert step_us(faster) == 617  # only the last kernel, after the last launch
    free = NoLaunch().apply(graph)
    assert step_us(free) == 20 * 20 + 10
    # And now the kernels decide.
    assert step_us(Scale(NodeSelection(kind="kernel"), 0.5).apply(free)) == 20 * 10 + 10


def test_a_gpu_bound_step_gains_nothing_from_free_launches_and_becomes_launch_bound(tmp_path):
    graph = _bound(call=10, kernel=50).build(tmp_path / "r").graph
    assert step_us(graph) == 10 + 5 + 20 * 50 + 10
    assert step_us(NoLaunch().apply(graph)) == 20 * 50 + 10
    assert step_us(Scale(NodeSelection(kind="kernel"), 0.01).apply(graph)) == 20 * 10 + 5 + 0.5 + 10


def test_a_run_with_nothing_but_gpu_work_still_replays(tmp_path):
    run = TinyRun()
    run.kernel("a", 10, 100)
    run.kernel("b", 100, 150)
    seen = replayed(run, tmp_path)
    assert seen.misses() == 0
    assert seen.lasting("a", 50).end("b") == 190


def test_kernels_that_last_no_time_do_not_make_a_cycle(tmp_path):
    # Traces in microseconds round short kernels to nothing: several start at once on both streams.
    run = TinyRun()
    for index in range(8):
        run.call(index, index + 1, index)
        run.kernel(f"k{index}", 100, 100 if index % 3 else 101, index, stream=7 + index % 2)
    seen = replayed(run, tmp_path)
    assert np.isfinite(seen.misses())
    starts = [seen.start(f"k{index}") for index in (1, 5, 7)]
    assert starts == sorted(starts)


def test_moving_one_kernel_in_the_trace_does_not_move_it_in_the_replay(tmp_path):
    # Five kernels into an idle stream; the third was seen 4 later than its launch explains.
    starts = []
    for late in (0, 4):
        run = TinyRun()
        for index in range(5):
            begin = 200 * index
            run.call(begin, begin + 5, index)
            shift = late if index == 2 else 0
            run.kernel(f"k{index}", begin + 12 + shift, begin + 60 + shift, index)
        seen = replayed(run, tmp_path / str(late))
        starts.append([seen.start(f"k{index}") for index in range(5)])
    assert starts[0] == starts[1] == [12, 212, 412, 612, 812]


def test_work_of_a_trace_without_launches_belongs_to_the_step_it_ran_in(tmp_path):
    run = TinyRun()
    for step in range(3):
        run.kernel("gemm", 100 * step + 5, 100 * step + 90)
        run.step(step, 100 * step, 100 * (step + 1))
    nodes = run.build(tmp_path / "r").graph.nodes
    assert nodes.step[nodes.kind == NodeKind.KERNEL].tolist() == [0, 1, 2]


def test_time_before_the_first_span_of_a_window_belongs_to_its_first_step(tmp_path):
    # The loop sleeps 60 before anything is recorded.
    run = TinyRun()
    for step in range(2):
        run.op("forward", 100 * step + 60, 100 * step + 100)
        run.step(step, 100 * step, 100 * (step + 1))
    graph = run.build(tmp_path / "r").graph
    timeline = replay(graph)
    assert step_times(graph, timeline.start, timeline.end)["duration_ns"].to_list() == [100 * US, 100 * US]
    assert graph.nodes.duration[graph.nodes.kind == NodeKind.GAP].sum() == 120 * US


def test_faster_work_before_the_first_step_does_not_make_that_step_longer(tmp_path):
    run = TinyRun()
    run.op("launcher", 0, 400)
    run.kernel("from before", 5, 95)
    run.call(100, 105, 1)
    run.kernel("gemm", 200, 300, 1)
    run.step(0, 100, 400)
    graph = run.build(tmp_path / "r").graph
    before = replay(graph)
    baseline = step_ends(graph, before.start, before.end)
    faster = Scale(NodeSelection(kind="kernel"), 0.5).apply(graph)
    after = replay(faster)
    changed = changed_step_times(baseline, faster, after.end)
    assert changed["duration_ns"][0] <= durations_of(baseline)["duration_ns"][0]


def test_what_the_driver_moves_by_itself_counts_when_it_ran(tmp_path):
    """Migrations of managed memory have a stream of their own and no launch; they follow launched work."""
    run = TinyRun()
    for number in range(10):
        at = 100.0 * number
        run.call(at, at + 10, number)
        run.kernel("solve", at + 15, at + 60, number)
        run.kernel("Memcpy Unknown", at + 70, at + 72, stream=99, kind="memcpy")
    graph = run.build(tmp_path / "r").graph
    moved = graph.nodes.kind == NodeKind.COPY
    assert moved.sum() == 10
    assert (graph.nodes.step[moved] == 0).all()
    assert measured_step_times(graph)["duration_ns"].item() / US == 972
