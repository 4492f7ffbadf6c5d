"""The host's part: launches, the CPU's speed, waits for the GPU, input, garbage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import CPU_KINDS, EdgeKind, Graph
from dpro.replay.hosts import hosts_of
from dpro.replay.timeline import replay
from dpro.replay.whatif.edits.training_loop import HideInput, Workers
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import COUNTERS
from tests.builders import US, TinyRun, cpu_job, gpu_job
from tests.edits import changed, steps_us
from tests.pipelines import Job, written


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Graph]:
    made = {"cpu": cpu_job(), "gpu": gpu_job(), "bound": launch_bound()}
    return {name: job.build(tmp_path_factory.mktemp(name) / "run").graph for name, job in made.items()}


def launch_bound(num_steps: int = 3) -> TinyRun:
    """Steps of ten operators of 20 with a call of 10 in each, kernels of 5, and the loss read at the end."""
    run = TinyRun()
    begin = 0.0
    for step in range(num_steps):
        at = begin
        for index in range(10):
            correlation = 100 * step + index
            run.op("aten::add", at, at + 20)
            run.call(at + 5, at + 15, correlation)
            run.kernel("add", at + 15, at + 20, correlation)
            at += 20
        run.op("aten::item", at, at + 40)
        run.op("aten::_local_scalar_dense", at + 2, at + 38)
        run.call(at + 5, at + 15, 100 * step + 50)
        run.kernel("slow", at + 15, at + 30, 100 * step + 50)
        run.call(at + 15, at + 33, 100 * step + 51, name="cudaStreamSynchronize")
        run.step(step, begin, at + 40)
        begin = at + 40
    return run


def loading(per_batch: float = 100, num_steps: int = 6, workers: str = "_SingleProcess") -> TinyRun:
    """Steps of 100 with nothing but operators after a batch that takes this long to come."""
    run = TinyRun()
    begin = 0.0
    for step in range(num_steps):
        computing = begin + per_batch
        run.mark(f"enumerate(DataLoader)#{workers}DataLoaderIter.__next__", begin, computing)
        run.op("aten::mm", computing, computing + 100)
        run.step(step, begin, computing + 100)
        begin = computing + 100
    return run


names = st.sampled_from(["cpu", "gpu", "bound"])


@given(names)
def test_a_cpu_as_fast_as_it_was_changes_nothing(jobs, job):
    assert (changed(jobs[job], "cpu:factor=1").nodes.duration == jobs[job].nodes.duration).all()


@given(names, st.floats(1, 50))
def test_a_faster_cpu_lets_nothing_end_later_and_touches_only_the_cpu(jobs, job, factor):
    graph, faster = jobs[job], changed(jobs[job], f"cpu:factor={factor}")
    assert (replay(faster).end <= replay(graph).end).all()
    touched = faster.nodes.duration != graph.nodes.duration
    assert np.isin(graph.nodes.kind[touched], CPU_KINDS).all()


def test_a_launch_bound_job_gains_what_its_cpu_gains(jobs):
    # Of each step of 240 the CPU works 223, and waits 15 for a kernel that it must launch first.
    assert steps_us(jobs["bound"]) == pytest.approx([240] * 3, abs=2)
    assert steps_us(jobs["bound"], "cpu:factor=2") == pytest.approx([240 / 2 + 8] * 3, abs=4)


def test_between_two_waits_a_graph_is_launched_once(jobs):
    graph = jobs["bound"]
    captured = changed(graph, "cuda-graph")
    kept = captured.nodes.duration != 0
    for step in range(3):
        calls = [graph.names[n] == "cudaLaunchKernel" for n in graph.nodes.name]
        # One launch of a graph per stretch: the last operator of a step comes before its wait.
        assert (kept & calls & (graph.nodes.step == step)).sum() == 1
    # Left: 5 before the first launch, the launch, 11 kernels behind one another, and what follows the wait.
    assert steps_us(graph, "cuda-graph") == pytest.approx([5 + 10 + 50 + 15 + 7 + 3] * 3, abs=4)


def test_what_the_host_does_other_than_launching_is_no_part_of_a_cuda_graph(tmp_path):
    run = TinyRun()
    for step, begin in enumerate((0, 10_000)):
        for index, at in enumerate((begin, begin + 20, begin + 5_000, begin + 5_020)):
            run.op("aten::add", at, at + 20)
            run.call(at + 5, at + 15, 10 * step + index)
            run.kernel("add", at + 15, at + 20, 10 * step + index)
        run.op("aten::item", begin + 5_040, begin + 5_060)
        run.step(step, begin, begin + 10_000)
    graph = run.build(tmp_path / "r").graph  # 4.96 ms in no operator between the second and the third launch
    assert steps_us(changed(graph, "cuda-graph"))[0] > 4_960


def test_a_cuda_graph_never_slows_and_launches_for_free_gain_at_least_what_its_launches_do(jobs):
    for job in ("gpu", "bound"):
        ends = replay(changed(jobs[job], "cuda-graph")).end
        assert (ends <= replay(jobs[job]).end).all()
        again = changed(jobs[job], "cuda-graph", "cuda-graph")
        assert (replay(again).end == ends).all()


def test_a_cuda_graph_of_a_part_leaves_the_rest(jobs):
    part = changed(jobs["bound"], "cuda-graph:step=1")
    touched = part.nodes.duration != jobs["bound"].nodes.duration
    assert set(part.nodes.step[touched]) == {1}


def test_input_and_cpu_jobs_have_no_cuda_graphs(jobs, tmp_path):
    with pytest.raises(Unanswerable, match="the run has no GPU launches"):
        changed(jobs["cpu"], "cuda-graph")
    with pytest.raises(Unanswerable, match="the run has no GPU launches"):
        changed(build_graph(written(Job().run(), tmp_path)).graph, "cuda-graph")


@pytest.mark.parametrize("where", ["aten::item", "cudaStreamSynchronize", "aten::_local*"])
def test_a_call_that_does_not_wait_lets_the_cpu_run_ahead(jobs, where):
    graph = jobs["bound"]
    free = changed(graph, f"no-sync:within={where}")
    assert (free.edges.kind == EdgeKind.SYNC).sum() == (graph.edges.kind == EdgeKind.SYNC).sum() - 3
    assert (replay(free).end <= replay(graph).end).all()
    # The CPU no longer loses the 15 of the last kernel.
    assert steps_us(free)[1:] == pytest.approx([225] * 2, abs=4)


def acting(own_us: float, range_name: str = "") -> TinyRun:
    """Steps in which the host waits for a kernel of 1 ms, then runs code of its own before the next."""
    run = TinyRun()
    begin = 0.0
    for step in range(4):
        run.op("aten::mm", begin, begin + 20)
        run.call(begin + 5, begin + 15, 10 * step)
        run.kernel("gemm", begin + 20, begin + 1020, 10 * step)
        run.op("aten::item", begin + 30, begin + 1030)
        run.call(begin + 35, begin + 1025, 10 * step + 1, name="cudaStreamSynchronize")
        if range_name:
            run.mark(range_name, begin + 1030, begin + 1030 + own_us)
        begin += 1050 + own_us
        run.op("aten::to", begin - 20, begin)
        run.step(step, begin - 1050 - own_us, begin)
    return run


@pytest.mark.parametrize("range_name", ["", "environment"])
def test_a_result_that_the_host_works_with_is_awaited_unless_the_call_is_named(tmp_path, range_name):
    graph = acting(6_000, range_name).build(tmp_path / "run").graph
    with pytest.raises(Unanswerable, match="works with the result of each"):
        changed(graph, "no-sync")
    assert steps_us(graph, "no-sync:within=aten::item")[1:-1] == pytest.approx([6_070] * 2, rel=0.02)


@pytest.mark.parametrize(
    ("own_us", "range_name"),
    [(900, ""), (6_000, "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")],
)
def test_a_result_that_is_logged_or_not_needed_for_input_can_be_read_later(tmp_path, own_us, range_name):
    graph = acting(own_us, range_name).build(tmp_path / "run").graph
    assert steps_us(graph, "no-sync")[1:-1] == pytest.approx([max(own_us + 70, 1_000)] * 2, rel=0.05)


def test_waits_that_are_not_there_are_refused_with_the_nearest_call(jobs):
    with pytest.raises(Unanswerable, match="nowhere in 'aten::mm'"):
        changed(jobs["bound"], "no-sync:within=aten::mm")
    with pytest.raises(Unanswerable, match="did you mean 'cudaStreamSynchronize'"):
        changed(jobs["bound"], "no-sync:within=cudaStreamSynchronise")
    with pytest.raises(Unanswerable, match="no call in the run"):
        changed(jobs["cpu"], "no-sync")


@given(names, st.sampled_from(["no-sync", "cpu:factor=3", "cuda-graph", "no-launch"]), st.data())
def test_what_makes_the_host_faster_lets_nothing_end_later_in_any_order(jobs, job, edit, data):
    other = data.draw(st.sampled_from(["cpu:factor=3", "no-sync", "scale:kind=kernel,factor=0.5"]))
    try:
        one, two = changed(jobs[job], edit, other), changed(jobs[job], other, edit)
    except Unanswerable:
        return
    assert (replay(one).end <= replay(jobs[job]).end).all()
    if edit != "cpu:factor=3" or other != edit:  # what is divided twice is rounded twice
        assert (replay(one).end == replay(two).end).all()


@pytest.fixture(scope="module")
def input_bound(tmp_path_factory) -> Graph:
    return loading(per_batch=300).build(tmp_path_factory.mktemp("input") / "run").graph


def test_a_loader_without_workers_stays_as_it_is(input_bound):
    assert (changed(input_bound, "workers:count=0").nodes.duration == input_bound.nodes.duration).all()


@pytest.mark.parametrize(("count", "step"), [(1, 300), (2, 150), (3, 100), (8, 100)])
def test_workers_load_side_by_side_and_beside_the_step(input_bound, count, step):
    # A batch takes 300, the step without it 100.
    assert steps_us(input_bound, f"workers:count={count}") == pytest.approx([step] * 6, abs=1)


def test_more_workers_than_cores_are_warned_of(tmp_path):
    run = loading(per_batch=300)
    run.worker(0, "node7")
    run.counter("cpus", 5, 4)
    run.counter("cgroup_cpu_limit_cores", 5, 2)
    for row in run.rows[COUNTERS.name]:
        row["host"] = "node7"
    graph = run.build(tmp_path / "r").graph
    assert parse_edit("workers:count=2").notes(graph) == ()
    (said,) = parse_edit("workers:count=100000").notes(graph)
    assert said.startswith("100,000 workers on host node7, which has 2 cores")


@pytest.mark.parametrize(("limit", "busy"), [(None, 0.5), (4, 0.75), (8, 0.5)])
def test_workers_get_no_more_from_the_cores_than_these_have_left(tmp_path, limit, busy):
    run = loading(per_batch=300)
    run.worker(0, "")
    begun, ended = 0, 2_000
    run.counter("cpus", begun, 8)
    for state, seconds in (("cpu_user_s", 8), ("cpu_system_s", 4), ("cpu_idle_s", 11), ("cpu_iowait_s", 1)):
        run.counter(state, begun, 100, rank=-1)
        run.counter(state, ended, 100 + seconds, rank=-1)
    if limit:
        run.counter("cgroup_cpu_limit_cores", begun, limit)
        run.counter("cgroup_cpu_s", begun, 7, rank=-1)
        run.counter("cgroup_cpu_s", ended, 7 + 3 * (ended - begun) / 1e6, rank=-1)
    built = run.build(tmp_path / "r")
    (host,) = hosts_of(built.graph)
    assert host == ("", 1, limit or 8, pytest.approx(busy))
    # Of the 400 that a step takes now, the cores work this share.
    assert steps_us(built.graph, "workers:count=8") == pytest.approx([400 * busy] * 6, abs=1)
    assert Workers.candidates(facts_of(built.graph)) == [Workers(1)] + [Workers(2)] * (busy < 0.75)


def test_enough_workers_are_as_good_as_input_that_is_always_ready(input_bound):
    assert (steps_us(input_bound, "workers:count=9") == steps_us(input_bound, str(HideInput()))).all()


def test_workers_that_cannot_keep_up_show_what_a_batch_takes(tmp_path):
    run = loading(per_batch=200, workers="_MultiProcessing")
    for step in range(6):
        run.counter("data_wait_ns", 300 * step, 200 * US, device=f"DataLoader worker {step % 2}")
    graph = run.build(tmp_path / "r").graph
    # Two workers make a step of 300, so a batch takes 600.
    assert (changed(graph, "workers:count=2").nodes.duration == graph.nodes.duration).all()
    assert steps_us(graph, "workers:count=4") == pytest.approx([150] * 6, abs=1)
    assert steps_us(graph, "workers:count=6") == pytest.approx([100] * 6, abs=1)


def test_workers_that_keep_up_do_not_show_what_a_batch_takes(tmp_path):
    graph = loading(per_batch=2, workers="_MultiProcessing").build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match="num_workers=0"):
        changed(graph, "workers:count=1")


def collecting(pause: float = 2000) -> TinyRun:
    """Two ranks that meet at the end of each step; each collects garbage once, at another step."""
    run = TinyRun()
    clock = 5_000.0
    for step in range(4):
        lasts = [3000 + pause * (step == rank + 1) for rank in (0, 1)]
        moved = clock + max(lasts) + 100
        for rank in (0, 1):
            if step == rank + 1:
                run.counter("gc_pause_ns", clock + 1000, pause * US, rank, device="generation 2")
            run.op("aten::mm", clock, clock + lasts[rank], rank)
            run.gloo(
                (clock + lasts[rank], clock + lasts[rank] + 5),
                (clock + lasts[rank] + 2, moved),
                rank,
                sequence=step,
            )
            run.op("step", moved, moved + 50, rank)
            run.step(step, clock, moved + 50, rank)
        clock = moved + 50
    return run


def test_without_collections_their_pauses_are_gone(tmp_path):
    graph = collecting().build(tmp_path / "r").graph
    assert steps_us(graph) == pytest.approx([3150, 5150, 5150, 3150], abs=10)
    assert steps_us(graph, "gc:every=0") == pytest.approx([3150] * 4, abs=10)
    assert (replay(changed(graph, "gc:every=0")).end <= replay(graph).end).all()


def test_a_planned_collection_costs_all_ranks_at_once(tmp_path):
    graph = collecting().build(tmp_path / "r").graph
    # 2000 in every fourth step: 500 on average, where unplanned each of two ranks costs the job 2000 of four.
    assert steps_us(graph, "gc:every=4") == pytest.approx([3650] * 4, abs=10)


def test_operations_that_collect_garbage_are_known_by_name(tmp_path):
    graph = build_graph(written(Job(num_steps=2).run(), tmp_path)).graph
    with pytest.raises(Unanswerable, match="a garbage collection of 1 ms or more"):
        changed(graph, "gc")


def test_no_collection_in_a_window_is_refused_with_what_is_known_of_all_steps(jobs, tmp_path):
    with pytest.raises(Unanswerable, match="`dpro record` records them"):
        changed(jobs["cpu"], "gc")
    run = cpu_job()
    run.counter("step_gc_ns", 0, 3_000_000)
    with pytest.raises(Unanswerable, match=r"3.*ms per step: record more"):
        changed(run.build(tmp_path / "r").graph, "gc")
