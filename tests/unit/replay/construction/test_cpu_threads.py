"""CPU threads, by hand: hand-over to backward and back, and waiting for collectives on workers."""

from __future__ import annotations

import numpy as np
import pytest

from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import EdgeKind, NodeKind
from dpro.replay.timeline import replay
from tests.builders import BACKWARD, COMM, COMPUTE, MAIN, US, Seen, TinyRun


def _backward() -> TinyRun:
    """The main thread waits in backward() while another thread works.

    main       forward 0-100, gap 100-400, optimizer 400-500
    backward                110-390
    """
    run = TinyRun()
    run.step(0, 0, 500)
    run.op("forward", 0, 100)
    run.op("optimizer", 400, 500)
    outer = {"tid": BACKWARD}
    run.op("autograd::engine::evaluate_function: MmBackward0", 110, 250, **outer)
    run.op("aten::mm", 120, 240, **outer)
    run.op("autograd::engine::evaluate_function: AddBackward0", 260, 390, **outer)
    return run


def test_backward_starts_when_the_main_thread_hands_over_and_the_main_thread_goes_on_after_it(tmp_path):
    seen = Seen(_backward().build(tmp_path / "r").graph)
    assert seen.misses() == 0
    backward = "autograd::engine::evaluate_function: MmBackward0"
    assert seen.lasting("forward", 70).start(backward) == 180
    assert seen.lasting("aten::mm", 55).start("optimizer") == 455
    assert seen.lasting("forward", 70).start("optimizer") == 470
    assert len(seen.edges(EdgeKind.HANDOVER)) == 2


def test_faster_backward_brings_the_optimizer_forward(tmp_path):
    seen = Seen(_backward().build(tmp_path / "r").graph)
    assert seen.lasting("aten::mm", -100).start("optimizer") == 300


def test_backward_without_spans_of_its_engine_waits_for_forward(tmp_path):
    run = TinyRun()
    run.step(0, 0, 500)
    run.op("forward", 0, 100)
    run.op("NllLossBackward", 110, 250, tid=BACKWARD)
    run.op("MmBackward0", 260, 390, tid=BACKWARD)
    run.op("optimizer", 400, 500)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.lasting("forward", 70).start("NllLossBackward") == 180
    assert seen.lasting("forward", 70).start("optimizer") == 470


def test_without_the_hand_over_backward_does_not_wait_for_forward(tmp_path):
    graph = _backward().build(tmp_path / "r").graph
    alone = Seen(graph.without_edges(graph.edges.kind == EdgeKind.HANDOVER))
    assert alone.start("autograd::engine::evaluate_function: MmBackward0") < 100
    assert alone.start("optimizer") < 200


def test_backward_beside_a_busy_main_thread_delays_backward_only(tmp_path):
    # The main thread works all the while: nothing says that it waited.
    run = TinyRun()
    run.step(0, 0, 500)
    run.op("forward", 0, 100)
    run.op("other", 100, 300)
    run.op("more", 300, 500)
    run.op("autograd::engine::evaluate_function: MmBackward0", 150, 450, tid=BACKWARD)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == 0
    assert seen.lasting("autograd::engine::evaluate_function: MmBackward0", 200).end("more") == 500
    handover = seen.graph.edges.kind == EdgeKind.HANDOVER
    assert seen.graph.edges.inferred[handover].tolist() == [True]


def _calls_without_operators(at_us: dict[int, list[tuple[int, int]]]) -> TinyRun:
    """Launches of 5 us each, of some threads.

    Args:
        at_us: by thread stretches in which it launches every 10 us.
    """
    run, number = TinyRun(), 0
    run.step(0, 0, 1_000)
    for tid, stretches in at_us.items():
        for begin, end in stretches:
            for at in range(begin, end, 10):
                run.call(at, at + 5, number, tid=tid)
                run.kernel(f"of {tid}", at + 6, at + 8, number)
                number += 1
    return run


def test_threads_that_launch_in_long_turns_wait_for_each_other_whatever_their_names(tmp_path):
    turns = {MAIN: [(0, 300), (605, 900)], BACKWARD: [(305, 600)]}
    seen = Seen(_calls_without_operators(turns).build(tmp_path / "r").graph)
    assert len(seen.edges(EdgeKind.HANDOVER)) == 2
    graph = seen.graph
    slow = graph.nodes.duration.copy()
    (first,) = np.flatnonzero(graph.nodes.measured_start == 305 * US)[:1]
    slow[first] += 400 * US
    assert replay(graph.with_durations(slow)).end.max() == replay(graph).end.max() + 400 * US


def test_threads_that_launch_at_the_same_time_wait_for_nothing(tmp_path):
    beside = {MAIN: [(0, 900)], BACKWARD: [(305, 600)]}
    seen = Seen(_calls_without_operators(beside).build(tmp_path / "r").graph)
    assert not len(seen.edges(EdgeKind.HANDOVER))


def test_a_thread_that_launches_while_the_main_one_waits_for_a_device_is_not_what_it_waits_for(tmp_path):
    run = _calls_without_operators({MAIN: [(0, 300), (605, 900)], BACKWARD: [(310, 590)]})
    run.call(301, 604, -1, name="cudaDeviceSynchronize")
    seen = Seen(run.build(tmp_path / "r").graph)
    assert not len(seen.edges(EdgeKind.HANDOVER))


LOADER = 40


def _loader(resumes: float, *inside: str) -> TinyRun:
    """The main thread launches two kernels and waits for them; a thread beside it copies two batches.

    main     launches 0-20    waits 20-3,000                  updates 3,000-4,500
    device       forward 30-1,500, backward 1,500-3,000
    loader   copies 100-110   pauses until `resumes`, copies for 10
    device          120-200

    Args:
        resumes: in microseconds.
        inside: names of annotations around the pause.
    """
    run = TinyRun()
    run.step(0, 0, 4_500)
    for number, at in enumerate((0, 10)):
        run.call(at, at + 10, number)
    run.kernel("forward", 30, 1_500, 0)
    run.kernel("backward", 1_500, 3_000, 1)
    run.call(20, 3_000, 2, name="cudaDeviceSynchronize")
    run.op("update", 3_000, 4_500)
    for name in inside:
        run.mark(name, 110, resumes, tid=LOADER)
    for number, at, batch in ((3, 100, "first"), (4, resumes, "second")):
        run.call(at, at + 10, number, name="cudaMemcpyAsync", tid=LOADER)
        run.kernel(batch, at + 20, at + 100, number, stream=COMM, kind="memcpy")
    return run


@pytest.mark.parametrize("inside", [(), ("queue.get",)])
def test_thread_beside_the_loop_resumes_when_the_loop_is_as_far_as_it_was_then(tmp_path, inside):
    seen = Seen(_loader(3_600, *inside).build(tmp_path / "r").graph)
    assert seen.misses() == 0
    assert seen.lasting("backward", -1_000).start("second") == 2_620
    assert seen.lasting("backward", 500).start("second") == 4_120


def test_thread_beside_a_loop_that_waits_resumes_when_the_device_is_as_far_as_it_was_then(tmp_path):
    seen = Seen(_loader(1_800).build(tmp_path / "r").graph)
    assert seen.misses() == 0
    assert seen.lasting("forward", -1_000).start("second") == 820
    assert seen.lasting("backward", -1_000).start("second") == 1_820


def test_short_pause_of_a_thread_beside_the_loop_is_its_own_work(tmp_path):
    seen = Seen(_loader(900).build(tmp_path / "r").graph)
    assert not seen.edges(EdgeKind.HANDOVER)
    assert seen.lasting("forward", -1_000).start("second") == 920


def test_pause_of_the_thread_that_drives_the_loop_is_its_own_work(tmp_path):
    run = _loader(3_600)
    run.op("next epoch", 7_000, 7_100)
    run.step(1, 4_500, 7_100)
    assert Seen(run.build(tmp_path / "r").graph).lasting("update", -1_000).start("next epoch") == 6_000


def test_time_in_no_span_is_kept_as_work_of_its_own(tmp_path):
    run = TinyRun()
    run.step(0, 0, 300)
    run.op("a", 0, 100)
    run.op("b", 180, 300)
    seen = Seen(run.build(tmp_path / "r").graph)
    gaps = seen.graph.nodes.kind == NodeKind.GAP
    assert seen.graph.nodes.duration[gaps].sum() == 80 * US
    assert seen.lasting("a", -60).start("b") == 120


def test_an_outer_operator_keeps_only_the_time_not_spent_in_others(tmp_path):
    run = TinyRun()
    run.step(0, 0, 100)
    run.mark("epoch", 0, 100)
    run.op("linear", 10, 90)
    run.op("addmm", 20, 60)
    seen = Seen(run.build(tmp_path / "r").graph)
    own = {
        name: sum(seen.graph.nodes.duration[seen.nodes(name)].tolist()) // US
        for name in ("epoch", "linear", "addmm")
    }
    assert own == {"epoch": 20, "linear": 40, "addmm": 40}
    around = {seen.graph.names[seen.graph.nodes.around[node]] for node in seen.nodes("addmm")}
    assert around == {"epoch"}


def test_threads_that_touch_neither_a_stream_nor_a_collective_are_left_out(tmp_path):
    run = TinyRun()
    run.step(0, 0, 100)
    run.op("main", 0, 100)
    for index in range(3):
        run.op("pin_memory", 30 * index, 30 * index + 20, tid=77)
    built = run.build(tmp_path / "r")
    assert {what for _, what in built.graph.lanes} == {"main thread"}


def _ddp(wait_ends_in_gap: bool, backward_mark: tuple[float, float] | None = None) -> TinyRun:
    """Two ranks, rank 1 calls late. The collective ends in a gap of the caller, or beside its work.

    rank 0   forward 0-100, call 100-120, [gap to 500] or [compute 130-700], after
    rank 1   forward 0-300, call 300-320, the same
    worker   from the call to 500, 502
    """
    run = TinyRun()
    for rank, begin in ((0, 100), (1, 300)):
        run.step(0, 0, 900, rank)
        if backward_mark:
            run.mark("dpro::backward", *backward_mark, rank)
        run.op("forward", 0, begin, rank)
        run.gloo((begin, begin + 20), (begin + 15, 500 + 2 * rank), rank)
        if not wait_ends_in_gap:
            run.op("compute", begin + 30, 700, rank)
        run.op("after", 503 if wait_ends_in_gap else 800, 850, rank)
    return run


def test_the_thread_that_called_a_collective_waits_for_it_in_its_gap(tmp_path):
    seen = Seen(_ddp(True).build(tmp_path / "r").graph)
    assert seen.misses() == 0
    sync = seen.graph.edges.kind == EdgeKind.SYNC
    assert sync.sum() == 2
    assert seen.graph.edges.inferred[sync].all()
    # Rank 1 is later: both collectives end later, and both main threads go on later.
    late = seen.lasting("forward", 100, rank=1)
    assert [late.start("after", rank) for rank in (0, 1)] == [603, 603]
    # Rank 0 comes first anyway: later by up to the wait changes nothing.
    assert seen.lasting("forward", 150, rank=0).start("after", 0) == 503


def test_a_thread_that_goes_on_the_moment_a_collective_ends_was_waiting_for_it(tmp_path):
    # In a trace in microseconds both times are the same number.
    run = TinyRun()
    for rank, begin in ((0, 100), (1, 300)):
        run.step(0, 0, 900, rank)
        run.op("forward", 0, begin, rank)
        run.gloo((begin, begin + 20), (begin + 15, 500), rank)
        run.op("after", 500, 850, rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.lasting("forward", 100, rank=1).start("after", 0) == 600
    assert seen.lasting("forward", -150, rank=1).start("after", 0) == 350


def test_spans_whose_thread_is_unknown_are_on_one_thread(tmp_path):
    run = TinyRun()
    run.step(0, 0, 200)
    run.op("launcher", 0, 100, tid=-1)
    run.call(10, 20, 1, tid=-1)
    run.kernel("gemm", 25, 150, 1)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.lasting("cudaLaunchKernel", 30).start("gemm") == 55


def test_a_worker_thread_with_a_negative_number_is_no_stream(tmp_path):
    # Thread numbers cut down to 32 bits are negative half of the time.
    run = TinyRun()
    for rank in (0, 1):
        run.step(0, 0, 900, rank)
        called = run.op("c10d::allreduce_", 0, 20, rank)
        run.member(run.mark("gloo:all_reduce", 15, 500, rank, tid=-8), launched_by=called)
        run.call(30, 40, 1, rank)
        run.kernel("gemm", 45, 800, 1, rank, stream=COMPUTE)  # stream 7
    graph = run.build(tmp_path / "r").graph
    assert sorted(what.partition(" ")[0] for rank, what in graph.lanes if rank == 0) == [
        "communication",
        "main",
        "stream",
    ]


def test_a_collective_that_ends_beside_work_is_needed_at_the_end_of_the_backward_that_called_it(tmp_path):
    seen = Seen(_ddp(False, backward_mark=(50, 750)).build(tmp_path / "r").graph)
    assert seen.misses() == 0
    later = seen.lasting("forward", 50, rank=1)
    assert later.start("after", 1) == 850  # its own work is later by as much
    assert later.start("after", 0) == 800  # rank 0 still had 250 to spare until its backward ended
    much_later = seen.lasting("gloo:all_reduce", 600, rank=0)  # done at 1100, the compute at 700
    assert much_later.start("after", 0) == 1150  # and 50 of own time after backward
    assert not seen.graph.edges.inferred[seen.graph.edges.kind == EdgeKind.SYNC].any()


def test_without_a_mark_of_backward_the_result_is_needed_by_the_end_of_the_step_and_that_is_inferred(
    tmp_path,
):
    run = _ddp(False)
    for rank in (0, 1):
        run.step(1, 900, 1000, rank)
        run.op("next", 900, 1000, rank)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == 0
    assert seen.graph.edges.inferred[seen.graph.edges.kind == EdgeKind.SYNC].all()
    slow = seen.lasting("gloo:all_reduce", 1000, rank=0)
    assert slow.start("next", 0) == 1500
    assert slow.start("after", 0) == 800


def test_the_thread_that_marks_steps_is_the_main_one_even_if_another_works_more(tmp_path):
    run = TinyRun()
    run.step(0, 0, 100)
    run.mark("Optimizer.step#SGD.step", 80, 100, tid=99)
    run.op("busy", 0, 100, tid=MAIN)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert [what for _, what in seen.graph.lanes] == ["main thread"]
    assert seen.nodes("Optimizer.step#SGD.step")


def test_a_run_without_spans_is_refused_with_what_to_record(tmp_path):
    run = TinyRun()
    run.step(0, 0, 10)
    with pytest.raises(Unanswerable, match="dpro record"):
        build_graph(run.write(tmp_path / "r"))


def test_windows_do_not_touch(tmp_path):
    run = TinyRun()
    for window, begin in ((0, 0), (1, 10_000)):
        run.op("work", begin, begin + 100, window=window)
        run.rows["steps"].append(
            {
                "rank": 0,
                "step": window,
                "window": window,
                "start_ns": begin * US,
                "duration_ns": 100 * US,
            }
        )
    seen = Seen(run.build(tmp_path / "r").graph)
    first, second = seen.nodes("work")
    longer = seen.lasting("work", 500_000)
    assert longer.timeline.end[first] == 500_100 * US
    assert longer.timeline.start[second] == seen.timeline.start[second] == 10_000 * US


def test_work_after_the_last_annotation_of_a_thread_is_in_none(tmp_path):
    run = TinyRun()
    run.step(0, 0, 300)
    run.op("before", 0, 50)
    run.mark("around", 100, 200)
    run.op("inside", 110, 190)
    run.op("after", 250, 300)
    seen = Seen(run.build(tmp_path / "r").graph)
    around = {
        name: seen.graph.nodes.around[seen.nodes(name)[0]] >= 0 for name in ("before", "inside", "after")
    }
    assert around == {"before": False, "inside": True, "after": False}


def test_a_thread_whose_spans_take_no_time_is_work_of_no_time(tmp_path):
    run = TinyRun()
    run.op("forward", 5, 5)
    run.call(5, 5, 1)
    run.kernel("gemm", 5, 5, 1)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.timeline.end.max() == 0


def test_a_run_whose_spans_do_no_work_is_refused(tmp_path):
    run = TinyRun()
    run.kernel("range", 0, 10, kind="gpu_annotation")
    with pytest.raises(Unanswerable, match="no work to replay"):
        run.build(tmp_path / "r")
