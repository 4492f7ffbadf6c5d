"""GPU work of one rank, by hand: what releases it, what orders it, and which calls wait for it."""

from __future__ import annotations

import pytest

from dpro.replay.fidelity.accuracy import StreamPairs, count_starts, evidence_of, share, unexplained_ns
from dpro.replay.graph import EdgeKind, NodeKind
from dpro.replay.timeline import (
    replay,
    step_ends,
    step_lengths,
    step_times,
    usual_steps,
)
from dpro.replay.whatif.edits.selected_work import Scale
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from tests.builders import COMM, COMPUTE, MAIN, US, WORKER, Seen, TinyRun


def replayed(run: TinyRun, folder) -> Seen:
    run.step(0, 0, 2000)
    return Seen(run.build(folder / "r").graph)


def step_us(graph) -> float:
    """How long the one step of a graph takes when it is replayed."""
    timeline = replay(graph)
    return step_times(graph, timeline.start, timeline.end)["duration_ns"].item() / US


def test_a_launch_releases_its_kernel_at_the_end_of_the_call(tmp_path):
    run = TinyRun()
    run.call(0, 100, 1)
    run.kernel("gemm", 106, 200, 1)
    seen = replayed(run, tmp_path)
    assert seen.misses() == 0
    longer = seen.lasting("cudaLaunchKernel", 50)
    assert longer.start("gemm") == 156


def test_kernels_of_a_stream_run_in_order_of_launch_however_soon_they_are_ready(tmp_path):
    # The first kernel of each pair keeps the second, launched long ago, waiting.
    run = TinyRun()
    run.call(0, 5, 1)
    run.call(5, 10, 2)
    run.kernel("first", 11, 300, 1)
    run.kernel("second", 300, 400, 2)
    seen = replayed(run, tmp_path)
    assert seen.misses() == 0
    assert seen.lasting("first", 70).start("second") == 370
    assert ("first", "second") in seen.edges(EdgeKind.STREAM)
    without = Seen(seen.graph.without_edges(seen.graph.edges.kind == EdgeKind.STREAM))
    assert without.start("second") == 16  # its launch ends at 10, and a launch takes 6 to arrive


def test_a_later_ready_kernel_does_not_run_first(tmp_path):
    # `second` could run at once; the launch of `first` becomes slow, and still `first` goes before it.
    run = TinyRun()
    run.call(0, 5, 1)
    run.call(5, 10, 2)
    run.kernel("first", 10, 50, 1)
    run.kernel("second", 50, 60, 2)
    seen = replayed(run, tmp_path)
    late = seen.lasting("cudaLaunchKernel", 500)
    assert late.start("first") == 510
    assert late.start("second") == 550


def test_streams_run_beside_each_other(tmp_path):
    run = TinyRun()
    run.call(0, 5, 1)
    run.call(5, 10, 2)
    run.kernel("a", 10, 500, 1)
    run.kernel("b", 15, 400, 2, stream=8)
    seen = replayed(run, tmp_path)
    assert seen.misses() == 0
    assert seen.lasting("a", 900).end("b") == 400


def test_a_kernel_may_start_before_its_launching_call_returns(tmp_path):
    # On some machines the call returns 20 after the kernel began: a negative latency, pooled and kept.
    run = TinyRun()
    for index in range(3):
        begin = 200 * index
        run.call(begin, begin + 60, index)
        run.kernel("gemm", begin + 40, begin + 90, index)
    seen = replayed(run, tmp_path)
    launch = seen.graph.edges.kind == EdgeKind.LAUNCH
    assert (seen.graph.edges.lag[launch] == -20 * US).all()
    assert seen.misses() == 0


def test_launch_latency_is_one_number_for_all_ranks_from_those_whose_gpu_idles(tmp_path):
    # Rank 1's GPU never idles after its first kernel: alone it would show a latency of hundreds.
    run = TinyRun()
    for rank in (0, 1):
        for index in range(5):
            begin = 100 * index
            run.call(begin, begin + 5, index, rank)
            if rank == 0:
                run.kernel("gemm", begin + 12, begin + 60, index, rank)
            else:
                run.kernel("gemm", 12 + 300 * index, 12 + 300 * (index + 1), index, rank)
        run.step(0, 0, 2000, rank)
    graph = run.build(tmp_path / "r").graph
    launch = graph.edges.kind == EdgeKind.LAUNCH
    assert (graph.edges.lag[launch] == 7 * US).all()
    assert Seen(graph).misses() == 0


def _two_streams(with_event: bool) -> TinyRun:
    """`a` on stream 7, then `b` on stream 8, which starts when `a` has ended.

    CPU    a 0-5, record 5-8, wait 8-11, b 11-16
    """
    run = TinyRun()
    run.call(0, 5, 1)
    run.call(5, 8, 2, name="cudaEventRecord")
    run.call(8, 11, 3, name="cudaStreamWaitEvent")
    run.call(11, 16, 4)
    run.kernel("a", 10, 300, 1)
    run.kernel("b", 302, 400, 4, stream=8)
    if with_event:
        run.sync("event_record", 5, correlation=2)
        run.sync("stream_wait_event", 8, correlation=3, stream=8, record_stream=COMPUTE, record_correlation=2)
    return run


@pytest.mark.parametrize("with_event", [True, False])
def test_a_stream_that_waits_for_an_event_goes_on_when_the_other_has_come_to_it(tmp_path, with_event):
    seen = replayed(_two_streams(with_event), tmp_path)
    assert seen.misses() == 0
    assert seen.edges(EdgeKind.EVENT) == [("a", "b")]
    event = seen.graph.edges.kind == EdgeKind.EVENT
    # Where the trace does not record events, the coincidence of the times shows it, marked as inferred.
    assert seen.graph.edges.inferred[event].tolist() == [not with_event]
    assert seen.lasting("a", 100).start("b") == 402


def test_an_event_that_is_only_inferred_lags_no_more_than_what_happened(tmp_path):
    run = TinyRun()
    for at, gap in ((0, 1), (500, 2), (1000, 3)):
        run.call(at, at + 5, at + 1)
        run.call(at + 11, at + 16, at + 4)
        run.kernel("a", at + 10, at + 300, at + 1)
        run.kernel("b", at + 300 + gap, at + 400, at + 4, stream=8)
    seen = replayed(run, tmp_path)
    edges = seen.graph.edges
    event = edges.kind == EdgeKind.EVENT
    assert edges.inferred[event].all()
    assert (edges.lag[event] / US).tolist() == [1, 2, 2]  # the median, where as much was seen


LOST = (1 << 32) - 1


@pytest.mark.parametrize("lost", [-1, LOST])
def test_what_is_recorded_and_what_inferred_is_decided_by_pair_of_streams(tmp_path, lost):
    """A newer driver: of two waits for events one has lost where the event was recorded.

    Stream 8 waits for 7, which is recorded; that of NCCL waits for 8, which is not, long
    after `b` has ended, where no coincidence of times shows it.
    """
    run = TinyRun()
    run.call(0, 5, 1)
    run.call(5, 8, 2, name="cudaEventRecord")
    run.call(8, 11, 3, name="cudaStreamWaitEvent")
    run.call(11, 16, 4)
    run.call(16, 18, 5, name="cudaEventRecord")
    run.call(18, 20, 6, name="cudaStreamWaitEvent")
    run.call(20, 25, 7)
    run.call(25, 30, 8)
    run.kernel("a", 10, 300, 1)
    run.kernel("b", 302, 400, 4, stream=8)
    run.nccl(460, 600, 7)
    run.kernel("c", 470, 650, 8)
    run.sync("event_record", 5, correlation=2)
    run.sync("stream_wait_event", 8, correlation=3, stream=8, record_stream=COMPUTE, record_correlation=2)
    run.sync("event_record", 16, correlation=5)
    run.sync("stream_wait_event", 18, correlation=6, stream=COMM, record_correlation=lost)
    seen = replayed(run, tmp_path)
    event = seen.graph.edges.kind == EdgeKind.EVENT
    assert seen.edges(EdgeKind.EVENT) == [("a", "b"), ("b", "ncclDevKernel")]
    assert seen.graph.edges.inferred[event].tolist() == [False, True]
    evidence = evidence_of(count_starts(replay(seen.graph)))
    assert evidence.stream_pairs == StreamPairs(1, 1)
    assert seen.lasting("b", 100).start("ncclDevKernel") == seen.start("ncclDevKernel") + 100


def test_an_event_recorded_before_the_last_kernel_orders_only_what_came_before_it(tmp_path):
    # a (7), record, c (7), wait on 8, b (8): b waits for a but not for c.
    run = TinyRun()
    run.call(0, 5, 1)
    run.call(5, 8, 2, name="cudaEventRecord")
    run.call(8, 12, 5)
    run.call(12, 15, 3, name="cudaStreamWaitEvent")
    run.call(15, 20, 4)
    run.kernel("a", 10, 300, 1)
    run.kernel("c", 300, 900, 5)
    run.kernel("b", 301, 400, 4, stream=8)
    run.sync("event_record", 5, correlation=2)
    run.sync("stream_wait_event", 12, correlation=3, stream=8, record_stream=COMPUTE, record_correlation=2)
    seen = replayed(run, tmp_path)
    assert seen.edges(EdgeKind.EVENT) == [("a", "b")]
    assert seen.lasting("c", 500).end("b") == seen.end("b")


def _crowded(run: TinyRun, rank: int, step: int, alone: float, room: float = 2000) -> None:
    """A kernel of two waves lets one on another stream begin after the first, which slows the second wave."""
    at, call = 10_000 * step, 10 * step
    run.call(at, at + 5, call, rank)
    run.call(at + 10, at + 15, call + 1, rank)
    run.kernel("two waves", at + 6, at + 6 + alone, call, rank)
    run.kernel("other", at + 6 + room, at + 6 + room + 3000, call + 1, rank, stream=8)
    run.step(step, at, at + 10_000, rank)


def test_work_that_waits_for_room_starts_when_kernels_of_that_sort_leave_room_however_long_they_last(
    tmp_path,
):
    # The second wave takes 600 to 1600 us; the first always 2000, but for 40 of noise.
    run = TinyRun()
    for rank, lasts in enumerate((2600, 3000, 3600)):
        _crowded(run, rank, 0, lasts, room=2000 + 40 * (rank - 1))
    built = run.build(tmp_path / "r")
    seen = Seen(built.graph)
    assert seen.edges(EdgeKind.CONTENTION) == [("two waves", "other")] * 3
    assert [seen.start("other", rank) for rank in range(3)] == [2006] * 3
    evidence = evidence_of(count_starts(seen.timeline)).starts
    assert (evidence.inferred, evidence.fitted, evidence.anchored) == (0.5, 0, 0)
    assert seen.lasting("two waves", 500, rank=1).start("other", rank=1) == 2506


def test_work_that_waits_for_a_kernel_seen_too_seldom_is_fitted_and_said_to_be(tmp_path):
    run = TinyRun()
    _crowded(run, 0, 0, 2600)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.start("other") == 2006
    evidence = evidence_of(count_starts(seen.timeline)).starts
    assert (evidence.inferred, evidence.fitted) == (0, 0.5)


@pytest.mark.parametrize(("lasts", "waits"), [(2600, True), (4300, False)])
def test_work_that_begins_in_the_first_half_of_a_kernel_did_not_wait_for_its_last_wave(
    tmp_path, lasts, waits
):
    run = TinyRun()
    _crowded(run, 0, 0, lasts)
    assert bool(Seen(run.build(tmp_path / "r").graph).edges(EdgeKind.CONTENTION)) == waits


def test_communication_has_no_waves_that_leave_room_before_its_end(tmp_path):
    run = TinyRun()
    run.step(0, 0, 10_000)
    run.call(0, 5, 1)
    run.call(10, 15, 2)
    run.nccl(6, 5006, 1)
    run.kernel("other", 3500, 4000, 2)
    assert Seen(run.build(tmp_path / "r").graph).edges(EdgeKind.CONTENTION) == []


@pytest.mark.parametrize(
    "name",
    ["cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "hipDeviceSynchronize",
     "cudaThreadSynchronize"],
)  # fmt: skip
def test_a_synchronising_call_makes_the_cpu_wait_for_the_gpu(tmp_path, name):
    run = TinyRun()
    run.call(0, 5, 1)
    run.kernel("gemm", 10, 500, 1)
    run.call(20, 503, 2, name=name)
    run.op("after", 503, 600)
    seen = replayed(run, tmp_path)
    assert seen.misses() == 0
    assert seen.lasting("gemm", 100).start("after") == 603
    # The call itself is only what it lasts beyond the GPU's work.
    assert [seen.graph.nodes.duration[n] / US for n in seen.nodes(name)] == [3]


def _reads_events(silence_ends: int) -> TinyRun:
    """A thread launches `a` and `b`, records nothing more, and then reads when an event happened."""
    run = TinyRun()
    run.call(0, 5, 1)
    run.call(5, 10, 2)
    run.kernel("a", 11, 900, 1)
    run.kernel("b", 900, 5000, 2)
    run.call(silence_ends, silence_ends + 5, 3, name="cudaEventElapsedTime")
    run.call(silence_ends + 5, silence_ends + 10, 4)
    run.kernel("c", 5000, 5100, 4)
    return run


def test_reading_the_time_of_an_event_after_silence_gives_away_the_wait_for_it(tmp_path):
    # The profiler left the waiting call out: the thread goes on 40 after `a`, whatever else is queued.
    seen = replayed(_reads_events(940), tmp_path)
    assert seen.misses() == 0
    assert seen.lasting("a", 400).start("cudaEventElapsedTime") == 1340
    assert seen.lasting("b", 100).start("cudaEventElapsedTime") == 940


@pytest.mark.parametrize("silence_ends", [300, 1400])
def test_silence_that_is_short_or_ends_with_no_work_is_no_wait(tmp_path, silence_ends):
    seen = replayed(_reads_events(silence_ends), tmp_path)
    assert seen.lasting("a", 100).start("cudaEventElapsedTime") == silence_ends


def test_a_long_call_that_waits_for_nothing_is_work_of_the_cpu(tmp_path):
    # The stream is idle from 50; the call returns at 503, long after: it did not wait for the GPU.
    run = TinyRun()
    run.call(0, 5, 1)
    run.kernel("gemm", 10, 50, 1)
    run.call(20, 503, 2, name="cudaMemcpyAsync")
    run.op("after", 503, 600)
    seen = replayed(run, tmp_path)
    assert seen.edges(EdgeKind.SYNC) == []
    assert sum(seen.graph.nodes.duration[n] for n in seen.nodes("cudaMemcpyAsync")) == 483 * US
    assert seen.lasting("gemm", 200).start("after") == 503


def test_a_copy_whose_call_returns_with_it_blocks_and_one_whose_call_returns_at_once_does_not(tmp_path):
    run = TinyRun()
    run.call(0, 5, 1)
    run.kernel("gemm", 10, 300, 1)
    run.call(20, 404, 2, name="cudaMemcpyAsync")
    run.kernel("Memcpy DtoH", 300, 400, 2, kind="memcpy")
    run.op("item", 404, 450)
    run.call(450, 455, 3, name="cudaMemcpyAsync")
    run.kernel("Memcpy DtoD", 460, 900, 3, kind="memcpy")
    run.op("on", 455, 500)
    seen = replayed(run, tmp_path)
    assert seen.misses() < 5  # two copies whose launches took 0 and 5 to arrive share one latency
    slower = seen.lasting("gemm", 1000)
    assert slower.start("item") == 1404
    assert seen.lasting("Memcpy DtoD", 1000).start("on") == seen.start("on")


@pytest.mark.parametrize(("name", "waits"), [("cudaMemset", True), ("cudaMemsetAsync", False)])
def test_a_fill_that_is_asynchronous_never_blocks_even_where_its_call_returns_with_it(tmp_path, name, waits):
    run = TinyRun()
    run.call(0, 5, 1)
    run.kernel("gemm", 10, 300, 1)
    run.call(20, 310, 2, name=name)
    run.kernel("Memset", 300, 308, 2, kind="memset")
    run.op("on", 310, 350)
    seen = replayed(run, tmp_path)
    assert seen.lasting("gemm", 1000).start("on") - seen.start("on") == (1000 if waits else 0)


def test_a_blocking_copy_returns_sooner_when_the_kernel_before_it_gets_faster(tmp_path):
    run = TinyRun()
    run.call(0, 5, 1)
    run.kernel("gemm", 10, 300, 1)
    run.call(20, 404, 2, name="cudaMemcpyAsync")
    run.kernel("Memcpy DtoH", 300, 400, 2, kind="memcpy")
    run.op("item", 404, 450)
    seen = replayed(run, tmp_path)
    # gemm ends at 110, the copy at 210; launching it may cost the call a few microseconds first.
    assert seen.lasting("gemm", -190).start("item") == pytest.approx(214, abs=20)


@pytest.mark.parametrize("off", [-40, 40])
def test_a_gpu_whose_clock_is_read_wrongly_has_a_launch_latency_of_its_own(tmp_path, off):
    # Kernels arrive 5 after their call returns; rank 1's GPU shows all its times early, or late.
    run = TinyRun()
    for rank in (0, 1):
        for index in range(30):
            begin = 200 * index
            run.call(begin, begin + 10, index, rank)
            start = begin + 15 + off * rank
            run.kernel("gemm", start, start + 60, index, rank)
        run.op("last", 6000, 6100, rank)
    seen = replayed(run, tmp_path)
    assert seen.misses() == 0
    assert share(unexplained_ns(seen.graph)) == 0
    # It is still derived: a later launch is a later kernel.
    assert seen.lasting("cudaLaunchKernel", 300, rank=1).start("gemm", 1) - seen.start("gemm", 1) == 300


def test_calls_that_block_do_not_show_the_latency_of_launches(tmp_path):
    run = TinyRun()
    for index in range(3):
        begin = 200 * index
        run.call(begin, begin + 102, index, name="cudaMemcpyAsync")
        run.kernel("Memcpy DtoH", begin + 10, begin + 100, index, kind="memcpy")
    run.call(800, 805, 9, name="cudaMemcpyAsync")
    run.kernel("Memcpy DtoD", 815, 900, 9, kind="memcpy")
    assert replayed(run, tmp_path).start("Memcpy DtoD") == 815


def test_a_staged_copy_that_begins_during_its_call_and_ends_just_after_it_is_not_held_back(tmp_path):
    # From pageable memory the call copies piece by piece, and returns 25 before the last one is through.
    run = TinyRun()
    run.call(0, 1100, 1, name="cudaMemcpyAsync")
    run.kernel("Memcpy HtoD (Pageable -> Device)", 10, 1125, 1, kind="memcpy")
    for index in range(2, 5):
        run.call(1000 * index, 1000 * index + 5, index, name="cudaMemcpyAsync")
        run.kernel(
            "Memcpy HtoD (Pinned -> Device)", 1000 * index + 8, 1000 * index + 30, index, kind="memcpy"
        )
    assert replayed(run, tmp_path).start("Memcpy HtoD (Pageable -> Device)") == pytest.approx(10, abs=10)


def test_a_thread_that_has_nothing_more_to_do_does_not_hold_up_the_end_of_the_step(tmp_path):
    # The CPU is done at 20 and the GPU runs to 1000: with a faster kernel the step is over sooner.
    run = TinyRun()
    run.op("launcher", 0, 20)
    run.call(5, 10, 1)
    run.kernel("gemm", 20, 1000, 1)
    run.step(0, 0, 1000)
    graph = run.build(tmp_path / "r").graph
    assert step_us(Scale(NodeSelection(kind="kernel"), 0.5).apply(graph)) == 510


def test_work_launched_before_the_window_is_anchored_and_what_follows_it_is_not(tmp_path):
    run = TinyRun()
    run.op("first", 100, 400)
    run.kernel("from before", 140, 300)
    run.call(110, 115, 1)
    run.kernel("gemm", 300, 400, 1)
    seen = replayed(run, tmp_path)
    nodes = seen.graph.nodes
    anchored = [seen.graph.names[n] for n in nodes.name[nodes.anchored & (nodes.kind == NodeKind.KERNEL)]]
    assert anchored == ["from before"]
    assert seen.misses() == 0
    assert seen.lasting("from before", 50).start("gemm") - seen.start("gemm") == 50


@pytest.mark.parametrize(("start", "is_queued"), [(950, False), (350, True)])
def test_work_of_unknown_launch_on_an_idle_device_follows_what_ran_before_it(tmp_path, start, is_queued):
    run = TinyRun()
    run.call(0, 5, 1)
    run.call(5, 10, 2)
    run.kernel("a", 11, 300, 1)
    run.kernel("b", 300, 600, 2)
    run.kernel("lost", start, 1000, stream=COMM)
    run.step(0, 0, 1000)
    seen = replayed(run, tmp_path)
    assert seen.start("lost") == start
    assert step_us(seen.graph) == (0 if is_queued else 1000)  # queued work is of no step
    kept = [seen.graph.names[name] for name in seen.graph.nodes.name[seen.graph.nodes.earliest > 0]]
    assert kept == (["lost"] if is_queued else [])


def test_the_launch_of_a_cuda_graph_releases_many_kernels_in_stream_order(tmp_path):
    run = TinyRun()
    run.call(0, 300, 1, name="cudaGraphLaunch")  # returns long after the first kernel began
    for index in range(4):
        run.kernel(f"k{index}", 50 + 100 * index, 150 + 100 * index, 1)
    run.kernel("side", 60, 90, 1, stream=8)
    run.op("after", 300, 400)
    for index in range(2, 8):  # what plain launches take to arrive: 5
        run.call(400 + 100 * index, 410 + 100 * index, index)
        run.kernel("plain", 415 + 100 * index, 440 + 100 * index, index)
    seen = replayed(run, tmp_path)
    assert seen.misses() == pytest.approx(0, abs=10)
    released = [target for source, target in seen.edges(EdgeKind.LAUNCH) if source == "cudaGraphLaunch"]
    assert sorted(released) == ["k0", "side"]
    moved = seen.lasting("k1", 40)
    assert [moved.start(f"k{i}") - seen.start(f"k{i}") for i in range(4)] == [0, 0, 40, 40]


def test_measured_starts_of_derived_work_do_not_enter_the_replay(tmp_path):
    run = _two_streams(True)
    graph = replayed(run, tmp_path).graph
    shifted = graph.nodes.measured_start + 77 * US
    nodes = type(graph.nodes)(
        **{
            f: shifted if f == "measured_start" else getattr(graph.nodes, f)
            for f in graph.nodes.__dataclass_fields__
        }
    )
    moved = type(graph)(nodes, graph.edges, graph.indptr, graph.names, graph.lanes, graph.origin_ns)
    assert (replay(moved).start == replay(graph).start).all()


def test_a_wait_that_is_recorded_is_one_though_the_clock_of_the_gpu_is_ahead(tmp_path):
    # The call returns at 503, by the GPU's clock 13 before the work that it waited for.
    run = TinyRun()
    run.call(0, 5, 1)
    run.kernel("gemm", 10, 516, 1)
    call = run.call(20, 503, 2, name="cudaStreamSynchronize")
    run.sync("stream_sync", 20, stream=COMPUTE, span_id=call, correlation=2, duration_ns=483 * US)
    run.op("after", 503, 600)
    seen = replayed(run, tmp_path)
    assert seen.lasting("gemm", -400).start("after") == pytest.approx(103, abs=15)


def _full_queue(outstanding: int) -> TinyRun:
    """A launch of 400 us that returns as the first kernel ends, with the others still in the queue."""
    run = TinyRun()
    for number in range(outstanding):
        run.call(number * 0.1, number * 0.1 + 0.1, number)
        run.kernel("first" if number == 0 else "queued", 500 + number, 501 + number, number)
    run.rows["spans"][1] |= {"start_ns": 50 * US, "duration_ns": 450 * US}
    run.call(100, 504, outstanding)
    run.kernel("last", 500 + outstanding, 501 + outstanding, outstanding)
    run.op("after", 504, 510)
    return run


@pytest.mark.parametrize(("outstanding", "starts"), [(200, 304), (50, 504)])
def test_a_launch_waits_for_room_in_a_queue_that_is_full(tmp_path, outstanding, starts):
    seen = Seen(_full_queue(outstanding).build(tmp_path / "r").graph)
    faster = seen.lasting("first", -200)
    assert faster.start("after") == pytest.approx(starts, abs=5)


TRANSFER_ENDS = 10_000


def _runs_out_of_memory(
    ends: float = TRANSFER_ENDS + 50,
    usual: float = 10,
    calls: int = 6,
    step: float = 20_000,
    asks: tuple[float, int] = (600, MAIN),
    device: int = 0,
) -> TinyRun:
    """One `aten::cat` lasts until a transfer has ended; the others, of other steps, are short.

    Args:
        ends: when the long one does.
        usual: what the others take.
        calls: how many others there are.
        step: how long a step is.
        asks: when, and from which thread, the collective is launched.
        device: where it runs.
    """
    run = TinyRun()
    for number in range(calls):
        run.op("aten::cat", 50_000 + 10_000 * number, 50_000 + 10_000 * number + usual)
    called, tid = asks
    run.call(0, 5, 1)
    run.kernel("gemm", 10, 500, 1)
    run.call(called, called + 5, 2, tid=tid)
    run.member(run.kernel("ncclDevKernel", called + 10, TRANSFER_ENDS, 2, stream=COMM, device=device))
    run.op("aten::cat", 700, ends)
    run.op("after", ends, ends + 10)
    for number in range(round(200_000 / step)):
        run.step(number, number * step, (number + 1) * step)
    return run


def _waited(run: TinyRun, folder) -> bool:
    """Whether the long operator waits: if so for the transfer alone, and by inference."""
    seen = Seen(run.build(folder / "r").graph)
    sync = seen.graph.edges.kind == EdgeKind.SYNC
    assert seen.edges(EdgeKind.SYNC) in ([], [("ncclDevKernel", "aten::cat")])
    assert seen.graph.edges.inferred[sync].all()
    return bool(sync.any())


def test_an_operator_that_lasts_until_a_transfer_has_ended_waited_for_it(tmp_path):
    run = _runs_out_of_memory()
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == 0
    # Of the long one there remain its usual 10 and the 50 after the transfer; the others take 10.
    assert sum(seen.graph.nodes.duration[n] for n in seen.nodes("aten::cat")) == (10 + 50 + 6 * 10) * US
    assert seen.lasting("ncclDevKernel", -6000).start("after") == TRANSFER_ENDS + 50 - 6000
    assert seen.lasting("ncclDevKernel", -9380).start("after") == 760  # it is over before that needs it
    assert _waited(run, tmp_path)


@pytest.mark.parametrize(("after", "waits"), [(-21, False), (-20, True), (100, True), (101, False)])
def test_an_operator_waited_for_a_transfer_only_if_both_end_together(tmp_path, after, waits):
    assert _waited(_runs_out_of_memory(TRANSFER_ENDS + after), tmp_path) == waits


@pytest.mark.parametrize(
    ("changed", "waits"),
    [
        ({"usual": 1870}, True),  # the long one takes 9350: five times as long, and no less
        ({"usual": 1871}, False),
        ({"calls": 4}, True),
        ({"calls": 3}, False),  # with the long one too few to say what is usual
        ({"step": 100_000}, True),
        ({"step": 200_000}, False),  # 4.7% of a step
        ({"asks": (600, WORKER)}, True),
        ({"asks": (720, WORKER)}, False),  # launched when the operator had begun
        ({"device": 1}, False),  # the thread launches onto device 0
    ],
)
def test_an_operator_waited_only_if_it_is_unusually_long_and_could_know_of_the_transfer(
    tmp_path, changed, waits
):
    if changed.get("device"):  # another thread's
        changed |= {"asks": (600, WORKER)}
    assert _waited(_runs_out_of_memory(**changed), tmp_path) == waits


@pytest.mark.parametrize(("others", "waits"), [(2, True), (3, False)])
def test_where_transfers_end_all_the_time_the_end_of_one_says_nothing(tmp_path, others, waits):
    # An end within 120 of one of three is chance in 3.9% of 9350, of one of four in 5.1%.
    run = _runs_out_of_memory()
    for number in range(others):
        run.call(650 + 10 * number, 655 + 10 * number, 10 + number)
        run.member(run.kernel("other", 1000, 2000 + 100 * number, 10 + number, stream=30 + number))
    assert _waited(run, tmp_path) == waits


def test_a_call_that_is_known_to_wait_waits_once(tmp_path):
    run = TinyRun()
    for number in range(6):
        run.call(50_000 + 100 * number, 50_005 + 100 * number, number, name="cudaEventSynchronize")
    run.call(600, 605, 10)
    run.nccl(610, TRANSFER_ENDS, 10)
    run.call(700, TRANSFER_ENDS + 50, 11, name="cudaEventSynchronize")
    run.step(0, 0, 60_000)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.edges(EdgeKind.SYNC) == [("ncclDevKernel", "cudaEventSynchronize")]
    # All of it is a wait: what it usually takes, is not kept.
    assert seen.graph.nodes.duration[seen.nodes("cudaEventSynchronize")[0]] == 50 * US


@pytest.mark.parametrize("name", ["cudaStreamSynchronize", "aten::cat"])
def test_only_a_long_call_that_synchronises_waited_for_a_kernel_whatever_the_clock_of_its_gpu(tmp_path, name):
    # By the GPU's clock the kernel ends 9 after the call has returned.
    run = TinyRun()
    for number in range(6):
        run.call(50_000 + 100 * number, 50_005 + 100 * number, number, name=name)
    run.call(600, 605, 10)
    run.kernel("gemm", 610, TRANSFER_ENDS + 9, 10)
    run.call(700, TRANSFER_ENDS, 11, name=name)
    run.op("after", TRANSFER_ENDS, TRANSFER_ENDS + 10)
    run.step(0, 0, 60_000)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == pytest.approx(9 if name.startswith("cuda") else 0, abs=0.1)
    starts = TRANSFER_ENDS - 4000 * name.startswith("cuda")
    assert seen.lasting("gemm", -4000).start("after") == pytest.approx(starts, abs=10)


def test_what_a_blocked_launch_launches_follows_its_wait(tmp_path):
    run = TinyRun()
    for number in range(6):
        run.call(50_000 + 100 * number, 50_005 + 100 * number, number)
        run.kernel("gemm", 50_010 + 100 * number, 50_020 + 100 * number, number)
    run.call(600, 605, 10)
    run.nccl(610, TRANSFER_ENDS, 10)
    run.call(700, TRANSFER_ENDS, 11)
    run.kernel("first", TRANSFER_ENDS + 5, TRANSFER_ENDS + 10, 11)
    run.step(0, 0, 60_000)
    seen = Seen(run.build(tmp_path / "r").graph)
    assert seen.misses() == pytest.approx(0, abs=0.1)
    assert seen.lasting("ncclDevKernel", -6000).start("first") == pytest.approx(TRANSFER_ENDS - 5995, abs=0.1)


def test_the_first_work_of_each_window_waits_for_what_was_queued_before_it(tmp_path):
    run = TinyRun()
    for window, begin in enumerate((0, 100_000)):
        for step in range(2):
            called = begin + 100 * step
            for number in range(2):
                correlation = 10 * window + 2 * step + number
                run.call(called + 10 * number, called + 10 * number + 5, correlation, window=window)
                behind = begin + 5000 + 600 * step + 300 * number  # the GPU is 5 ms behind
                run.kernel("gemm", behind, behind + 300, correlation, window=window)
            run.step(10 * window + step, called, called + 100)
            run.rows["steps"][-1]["window"] = window
    seen = replayed(run, tmp_path)
    assert seen.misses() == pytest.approx(0, abs=1)
    ends = step_ends(seen.graph, seen.timeline.start, seen.timeline.end)
    assert ends["queued"].to_list() == [True, False, True, False]
    assert step_lengths(ends).tolist() == [600 * US] * 4  # without the 5 ms of older work
    assert usual_steps(ends)["counted"].to_list() == [False, True, False, True]


def test_a_wait_behind_work_that_was_queued_before_the_window_is_no_latency_of_launches(tmp_path):
    run = TinyRun()
    run.call(0, 5, 1, name="cudaMemsetAsync")
    run.kernel("Memset", 5_000, 5_002, 1, kind="memset")  # the GPU is 5 ms behind
    run.call(100, 105, 2)
    run.kernel("gemm", 5_003, 6_003, 2)
    run.call(900, 905, 3, name="cudaMemsetAsync")
    run.kernel("second Memset", 6_004, 6_006, 3, kind="memset")
    run.step(0, 0, 1_000)
    seen = replayed(run, tmp_path)
    assert seen.misses() == pytest.approx(0, abs=1)
    assert seen.lasting("gemm", -900).start("second Memset") == pytest.approx(5_104, abs=1)
