"""CUDA graphs: what a capture takes away, what stays, and how much the trace leaves open."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpro.cli.analysis import open_quietly
from dpro.errors import DproError, Unanswerable
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.fidelity.accuracy import assess
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edits.cuda_graph import CudaGraph, captured
from dpro.replay.whatif.edits.host import free_host
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.predict import Prediction, baseline_steps, predict
from dpro.replay.whatif.registry import parse_edit
from tests.builders import US, TinyRun, gpu_job
from tests.edits import changed, steps_us

LASTS = 370.0  # of a step of `training`


def training(num_steps: int = 3) -> TinyRun:
    """Steps of 370 that the host decides: data 100, input copied 40, three operators with 40 of Python
    between the first two, a scalar read 40, 50 of logging, two more operators."""
    run = TinyRun()
    for step in range(num_steps):
        begin, number = LASTS * step, 100 * step
        run.mark("enumerate(DataLoader)#_Iter.__next__", begin, begin + 100)
        run.op("aten::copy_", begin + 100, begin + 140)
        run.call(begin + 110, begin + 130, number, name="cudaMemcpyAsync")
        run.kernel("Memcpy HtoD (Pinned -> Device)", begin + 130, begin + 135, number, kind="memcpy")
        for index, at in enumerate((140, 200, 220, 330, 350), start=1):
            run.op("aten::add", begin + at, begin + at + 20)
            run.call(begin + at + 5, begin + at + 15, number + index)
            run.kernel("add", begin + at + 15, begin + at + 18, number + index)
        run.op("aten::item", begin + 240, begin + 280)
        run.op("aten::_local_scalar_dense", begin + 242, begin + 278)
        run.call(begin + 245, begin + 255, number + 50, name="cudaMemcpyAsync")
        run.kernel("Memcpy DtoH (Device -> Pageable)", begin + 255, begin + 257, number + 50, kind="memcpy")
        run.call(begin + 256, begin + 276, number + 51, name="cudaStreamSynchronize")
        run.step(step, begin, begin + LASTS)
    return run


@pytest.fixture(scope="module")
def graph(tmp_path_factory) -> Graph:
    return training().build(tmp_path_factory.mktemp("training") / "run").graph


def _predicted(run: TinyRun, folder: Path, edit: str = "cuda-graph") -> Prediction:
    opened = run.write(folder)
    built = build_graph(opened)
    trust = assess(built, replay(built.graph), opened.manifest)
    return predict(built.graph, baseline_steps(built.graph), [parse_edit(edit)], trust)


def test_operators_behind_the_first_launch_of_a_graph_are_gone_and_nothing_else(graph):
    # Of the first three operators 5, 20 and 15; of the last two 5 and 15. Data, copy, scalar, logging stay.
    assert steps_us(graph) == pytest.approx([LASTS] * 3, abs=1)
    assert steps_us(graph, "cuda-graph") == pytest.approx([LASTS - 60] * 3, abs=3)


def test_host_time_in_no_operator_is_open_between_launches_and_stays_elsewhere(graph):
    found = captured(graph, np.ones(graph.num_nodes, np.bool_))
    nodes = graph.nodes
    left_open = nodes.duration[found.open & (nodes.step == 1)]
    assert left_open.sum() == 40 * US  # the Python between two operators, not the 50 of logging
    assert not (found.open & found.taken).any()
    slow, fast = (replay(each) for each in CudaGraph(parse_edit("scale").selection).bounds(graph))  # type: ignore[attr-defined]
    ends = [step_times(graph, each.start, each.end)["duration_ns"].to_numpy() / US for each in (slow, fast)]
    assert ends[1] == pytest.approx([LASTS - 100] * 3, abs=3)
    # Two kernels behind the first in one graph and one in the other, 2.2 each.
    assert ends[0] == pytest.approx([LASTS - 60 + 6.6] * 3, abs=3)


def test_the_interval_holds_both_ends_and_claims_no_more_than_a_host_that_is_free(graph, tmp_path):
    prediction = _predicted(training(), tmp_path / "r")
    assert prediction.low_ns <= (LASTS - 100) * US
    assert prediction.high_ns >= (LASTS - 60 + 6) * US
    assert prediction.low_ns >= steps_us(graph, "free-host").mean() * US
    assert "operators that can be captured" in prediction.notes[0]
    assert not prediction.proven


@pytest.mark.parametrize("job", [training, gpu_job])
def test_a_free_host_is_faster_than_graphs_and_than_free_launches(job, tmp_path):
    graph = job().build(tmp_path / "r").graph
    ends = replay(free_host(graph)).end
    for edit in ("cuda-graph", "no-launch"):
        assert (ends <= replay(changed(graph, edit)).end).all()


def test_a_call_that_synchronises_is_in_no_graph_even_if_it_did_not_wait(graph):
    found = captured(graph, np.ones(graph.num_nodes, np.bool_))
    gone = {graph.names[name] for name in graph.nodes.name[found.taken | found.open]}
    assert "aten::add" in gone
    assert not gone & {"aten::item", "aten::_local_scalar_dense", "cudaStreamSynchronize", "aten::copy_"}


def test_ranges_of_frameworks_are_captured_with_the_python_inside(tmp_path):
    run = training()
    for step in range(3):
        run.mark("Optimizer.step#SGD.step", LASTS * step + 140, LASTS * step + 240)
    graph = run.build(tmp_path / "r").graph
    assert steps_us(graph, "cuda-graph") == pytest.approx([LASTS - 100] * 3, abs=3)


def test_the_optimizer_alone_is_offered_where_the_step_waits_for_its_host_work(tmp_path):
    def offered(run: TinyRun, name: str) -> list[str]:
        facts = facts_of(run.build(tmp_path / name).graph)
        return [str(edit) for edit in CudaGraph.candidates(facts)]

    run = training()
    assert offered(run, "without") == ["cuda-graph"]
    for step in range(3):  # around two operators of 20 and the Python between them
        run.mark("Optimizer.step#SGD.step", LASTS * step + 140, LASTS * step + 240)
    assert offered(run, "with") == ["cuda-graph", "cuda-graph:module=Optimizer.step#*"]
    graph = run.build(tmp_path / "again").graph
    alone = steps_us(graph) - steps_us(graph, "cuda-graph:module=Optimizer.step#*")
    both = steps_us(graph) - steps_us(graph, "cuda-graph")
    assert (alone > 0).all()
    assert (alone < both).all()


def test_what_is_launched_as_graphs_already_is_left_alone(tmp_path):
    run = TinyRun()
    for step in range(2):
        for index in range(3):
            at, number = 100.0 * step + 20 * index, 10 * step + index
            run.call(at, at + 15, number, name="cudaGraphLaunch")
            run.kernel("gemm", at + 15, at + 20, number)
        run.step(step, 100.0 * step, 100.0 * step + 100)
    graph = run.build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match="nowhere are two launches that can be captured"):
        changed(graph, "cuda-graph")


def test_bounds_say_that_they_are_and_what_is_free():
    launches, host = parse_edit("no-launch"), parse_edit("free-host")
    assert not launches.is_advice
    assert not host.is_advice
    assert "GPU launch calls" in launches.describe()
    assert "not possible" in launches.how()


@pytest.mark.slow
def test_on_no_gpu_trace_a_graph_claims_more_than_a_free_host(traces):
    answered = 0
    for path in sorted(each for folder in ("multirank", "nccl_meta", "single_hta", "single", "perf", "nsys")
                       for each in (traces / folder).iterdir()):  # fmt: skip
        try:
            run = open_quietly(path)
            built = build_graph(run)
            graph = built.predictive
            base = baseline_steps(graph)
            trust = assess(built, replay(built.graph), run.manifest)
            found, free, launch = (
                predict(graph, base, [parse_edit(each)], trust)
                for each in ("cuda-graph", "free-host", "no-launch")
            )
        except DproError:
            continue
        answered += 1
        assert found.low_ns >= free.predicted_ns * 0.999, path.name
        assert found.predicted_ns >= free.predicted_ns, path.name
        assert launch.predicted_ns >= free.predicted_ns, path.name
    assert answered >= 20
