"""Accumulated gradients and activations computed again, by hand and as properties."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable, UsageError
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import replay
from dpro.replay.whatif.edits import scaling
from dpro.replay.whatif.edits.scaling import with_copies
from dpro.replay.whatif.graph_ops.scope import blocks_of_run
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import SPANS
from tests.builders import MAIN, US, TinyRun, cpu_job, gpu_job, tiny_graph
from tests.edits import changed, steps_us
from tests.pipelines import Job, written


@pytest.fixture(scope="module")
def jobs(tmp_path_factory) -> dict[str, Graph]:
    made = {"cpu": cpu_job(extra=0), "uneven": cpu_job(), "gpu": gpu_job()}
    return {name: job.build(tmp_path_factory.mktemp(name) / "run").graph for name, job in made.items()}


@pytest.mark.parametrize("job", ["cpu", "uneven", "gpu"])
def test_one_pass_per_step_is_the_job_as_it_is(jobs, job):
    assert changed(jobs[job], "accumulate:steps=1") is jobs[job]


def test_further_passes_neither_reduce_nor_update(jobs):
    # A step is input, forward and the two parts of backward of 50, 200, 100, 150; the reduction ends 150
    # after that, and the update takes 60. Passes without both last 500 and the noise of their parts.
    graph = jobs["cpu"]
    further = steps_us(graph, "accumulate:steps=2") - steps_us(graph)
    assert further == pytest.approx([500 + 4 * 15] * 4, abs=60)


@given(st.sampled_from(["cpu", "uneven", "gpu"]), st.integers(2, 4))
def test_each_further_pass_takes_as_long(jobs, job, steps):
    graph = jobs[job]
    total = [steps_us(graph, f"accumulate:steps={count}").sum() for count in (steps, steps + 1, steps + 2)]
    assert total[2] - total[1] == pytest.approx(total[1] - total[0], rel=0.05)


def test_a_slow_rank_holds_the_others_up_once_per_step_by_all_its_passes(jobs):
    # Rank 1's input takes 400 longer in each pass.
    even, uneven = (steps_us(jobs[job], "accumulate:steps=3").mean() for job in ("cpu", "uneven"))
    assert uneven - even == pytest.approx(3 * 400, abs=100)


def test_copies_of_a_step_run_before_it_one_after_another():
    # A thread with one node per step: the second step begins when all of the first is done.
    graph = tiny_graph([5, 7, 11], [(0, 1, 0), (1, 2, 2)], step=[-1, 0, 1])
    made = with_copies(graph, np.array([5, 1, 3]), graph.edges.lag, np.zeros(2, np.bool_), 2)
    ends = replay(made).end
    names = np.array(made.names)[made.nodes.name]
    assert sorted(ends[names == "1"]) == [6, 7, 14]
    assert sorted(ends[names == "2"]) == [19, 22, 33]


def test_many_copies_take_as_long_as_if_each_were_in_the_graph(monkeypatch):
    graph = tiny_graph([5, 7, 11], [(0, 1, 0), (1, 2, 2)], step=[-1, 0, 1])
    made = with_copies(graph, np.array([5, 1, 3]), graph.edges.lag, np.zeros(2, np.bool_), 100)
    assert made.num_nodes == 3 + 2 * scaling.MAX_COPIES
    # The thread's first node, 100 copies of the second and itself, a lag, 100 copies of the third and itself.
    assert replay(made).end.max() == 5 + 100 * 1 + 7 + 2 + 100 * 3 + 11


@pytest.mark.parametrize("job", ["cpu", "uneven"])
def test_passes_that_are_not_in_the_graph_take_as_long_as_those_that_are(jobs, job, monkeypatch):
    few = steps_us(jobs[job], "accumulate:steps=31")
    monkeypatch.setattr(scaling, "MAX_COPIES", 30)
    assert few == pytest.approx(steps_us(jobs[job], "accumulate:steps=31"), rel=1e-3)


def test_work_that_an_earlier_step_needs_is_not_copied_with_a_later_one():
    graph = tiny_graph([1, 1, 1], [(0, 1, 0), (1, 2, 0)], step=[0, 1, 0])
    made = with_copies(graph, graph.nodes.duration, graph.edges.lag, np.zeros(2, np.bool_), 1)
    assert replay(made).end.max() == 6


def test_reductions_of_several_groups_need_to_be_distinguished(jobs):
    graph = jobs["cpu"]
    (only,) = graph.messages
    sorts = (only._replace(group="tensor"), only._replace(group="data[0-2]"))
    message = np.where((graph.nodes.message >= 0) & (graph.nodes.step > 1), 1, graph.nodes.message)
    graph = dataclasses.replace(
        graph, messages=sorts, nodes=dataclasses.replace(graph.nodes, message=message)
    )
    with pytest.raises(Unanswerable, match=r"the gradients with group= \(data\[0-2\], tensor\)"):
        changed(graph, "accumulate")
    for group in ("data", "tensor"):
        assert (steps_us(graph, f"accumulate:group={group}") > steps_us(graph)).all()
    with pytest.raises(Unanswerable, match="in group 'other'"):
        changed(graph, "accumulate:group=other")


def test_jobs_without_reductions_and_whole_operations_are_refused(tmp_path):
    run = TinyRun()
    run.op("aten::mm", 0, 10)
    run.step(0, 0, 10)
    with pytest.raises(Unanswerable, match="no gradient reduction"):
        changed(run.build(tmp_path / "a").graph, "accumulate")
    with pytest.raises(Unanswerable, match="already have micro-batches"):
        changed(build_graph(written(Job().run(), tmp_path / "b")).graph, "accumulate")
    with pytest.raises(UsageError, match="steps must be 1 or more"):
        parse_edit("accumulate:steps=0")


def blocks(num_steps: int = 2) -> TinyRun:
    """Two blocks of two operators each, and their backward; an operator outside; each launches a kernel."""
    run = TinyRun()
    begin, correlation = 0.0, 0

    def op(name: str, at: float, kernel: float, **more) -> None:
        nonlocal correlation
        correlation += 1
        run.op(name, at, at + 20, **more)
        run.call(at + 5, at + 10, correlation)
        run.kernel(f"{name} kernel", at + 10, at + 10 + kernel, correlation)

    for step in range(num_steps):
        for index, kernel in enumerate((5, 7, 9, 11)):
            op("aten::mm", begin + 20 * index, kernel, sequence_number=4 * step + index, forward_thread=0)
        for block in (0, 1):
            run.mark(f"nn.Module: layers.{block}", begin + 40 * block, begin + 40 * block + 40)
        run.mark("nn.Module: layers", begin, begin + 80)
        op("aten::loss", begin + 80, 3)
        for index in range(4):
            at = begin + 100 + 20 * index
            op("MmBackward0", at, 10, sequence_number=4 * step + 3 - index, forward_thread=1)
        run.step(step, begin, begin + 180)
        begin += 180
    return run


def _kernels(graph: Graph, name: str) -> list[float]:
    fits = (graph.nodes.kind == NodeKind.KERNEL) & (graph.nodes.name == graph.names.index(name))
    at = np.flatnonzero(fits)
    return (graph.nodes.duration[at[np.argsort(graph.nodes.measured_start[at])]] / US).tolist()


def test_backward_of_each_block_grows_by_its_forward_on_cpu_and_gpu(tmp_path):
    graph = blocks(1).build(tmp_path / "r").graph
    again = changed(graph, "recompute:module=layers.?")
    assert _kernels(again, "MmBackward0 kernel") == [10 + 9 + 11, 10, 10 + 5 + 7, 10]
    assert _kernels(again, "aten::mm kernel") == _kernels(graph, "aten::mm kernel")
    assert steps_us(again) - steps_us(graph) == pytest.approx([80], abs=3)


def test_only_the_outermost_modules_that_fit_are_blocks(tmp_path):
    graph = blocks(1).build(tmp_path / "r").graph
    assert _kernels(changed(graph, "recompute:module=layers*"), "MmBackward0 kernel") == [
        10 + 32,
        10,
        10,
        10,
    ]
    one = changed(graph, "recompute:module=layers.0")
    assert _kernels(one, "MmBackward0 kernel") == [10, 10, 22, 10]


def test_modules_within_ddp_are_found_by_the_names_that_the_script_gives_them(tmp_path):
    run = blocks(1)
    for span in run.rows[SPANS.name]:
        span["name"] = span["name"].replace("nn.Module: ", "nn.Module: module.")
    graph = run.build(tmp_path / "r").graph
    plain = changed(graph, "recompute:module=layers.?")
    assert _kernels(plain, "MmBackward0 kernel") == [10 + 9 + 11, 10, 10 + 5 + 7, 10]
    assert (plain.nodes.duration == changed(graph, "recompute:module=module.layers.?").nodes.duration).all()


def test_modules_that_torch_profiler_numbers_by_class_are_blocks_where_they_hold_others(tmp_path):
    run = blocks(1)
    for span in run.rows[SPANS.name]:
        if span["name"].startswith("nn.Module: layers"):
            of_layer = span["name"][len("nn.Module: layers") :]
            span["name"] = f"nn.Module: Layer_{of_layer[1:]}" if of_layer else "nn.Module: Model_0"
            span["kind"] = "python"
    for index in range(4):
        run.span("python", f"nn.Module: Linear_{index}", 20 * index, 20 * index + 20, pid=MAIN, tid=MAIN)
    graph = run.build(tmp_path / "r").graph
    assert blocks_of_run(graph.run) == {"Layer_*": ["Layer_0", "Layer_1"]}
    assert _kernels(changed(graph, "recompute:module=Layer_*"), "MmBackward0 kernel") == [30, 10, 22, 10]


def test_what_backward_computes_again_already_is_refused(tmp_path):
    run = blocks(1)
    run.mark("nn.Module: layers.1", 101, 115)  # within the first operator of the backward pass
    with pytest.raises(Unanswerable, match=r"already recomputes .*: those of layers.1$"):
        changed(run.build(tmp_path / "r").graph, "recompute:module=layers.?")
    with pytest.raises(Unanswerable, match=r"those of layers.1$"):  # which is called by what is asked for
        changed(run.build(tmp_path / "outer").graph, "recompute:module=layers")
    assert changed(run.build(tmp_path / "other").graph, "recompute:module=layers.0") is not None


def test_recomputing_two_blocks_in_either_order_is_recomputing_both(tmp_path):
    graph = blocks().build(tmp_path / "r").graph
    one, other = "recompute:module=layers.0", "recompute:module=layers.1"
    both = changed(graph, "recompute:module=layers.?").nodes.duration
    assert (changed(graph, one, other).nodes.duration == both).all()
    assert (changed(graph, other, one).nodes.duration == both).all()
    assert (both >= graph.nodes.duration).all()


def test_modules_that_are_not_there_or_have_no_backward_are_refused(tmp_path, jobs):
    graph = blocks(1).build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match=r"did you mean 'layers.0'.*--modules"):
        changed(graph, "recompute:module=layer.0")
    with pytest.raises(Unanswerable, match="no module in the run"):
        changed(jobs["gpu"], "recompute:module=*")
    run = TinyRun()
    run.mark("nn.Module: layers.0", 0, 10)
    run.op("aten::mm", 1, 9)
    run.step(0, 0, 10)
    with pytest.raises(Unanswerable, match="no backward pass"):
        changed(run.build(tmp_path / "forward").graph, "recompute:module=layers.0")
