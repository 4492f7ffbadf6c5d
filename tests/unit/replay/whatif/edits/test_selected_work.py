"""Work selected in every way there is, and scaled, replaced and removed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import replay
from dpro.replay.whatif.edits.selected_work import Remove, Replace, Scale, durations_per_span, times_without
from dpro.replay.whatif.graph_ops.selected import NodeSelection, messages_fitting
from dpro.replay.whatif.registry import parse_edit
from tests.builders import COMM, US, Seen, TinyRun, cpu_job, gpu_job, tiny_graph


@pytest.fixture(scope="module")
def gpu(tmp_path_factory) -> Graph:
    return gpu_job().build(tmp_path_factory.mktemp("gpu") / "run").graph


@pytest.fixture(scope="module")
def cpu(tmp_path_factory) -> Graph:
    return cpu_job().build(tmp_path_factory.mktemp("cpu") / "run").graph


@pytest.fixture(scope="module")
def modules(tmp_path_factory) -> Graph:
    """One step: a layer within a layer, and backward; each operator launches a kernel."""
    run = TinyRun()
    run.worker(0, "node-a")
    run.step(0, 0, 1000)
    run.mark("nn.Module: layers", 0, 300)
    run.mark("nn.Module: layers.1", 100, 200)
    for name, begin, sequence in (("aten::mm", 10, 1), ("aten::relu", 110, 2), ("aten::add", 210, 3)):
        run.op(name, begin, begin + 60, sequence_number=sequence, forward_thread=0)
        run.call(begin + 10, begin + 20, begin)
        run.kernel(f"{name} kernel", begin + 20, begin + 50, begin)
    for name, begin, sequence in (
        ("AddBackward0", 410, 3),
        ("ReluBackward0", 510, 2),
        ("MmBackward0", 610, 1),
    ):
        run.op(name, begin, begin + 60, sequence_number=sequence, forward_thread=1)
        run.call(begin + 10, begin + 20, begin)
        run.kernel(f"{name} kernel", begin + 20, begin + 50, begin)
    return run.build(tmp_path_factory.mktemp("modules") / "run").graph


def _names(graph: Graph, text: str) -> set[str]:
    selection = parse_edit(f"scale:{text}").selection  # type: ignore[attr-defined]
    return {graph.names[name] for name in graph.nodes.name[selection.mask(graph)]}


def test_a_module_is_what_is_inside_it_with_its_backward_and_the_gpu_work_of_both(modules):
    found = _names(modules, "module=layers.1")
    assert {"aten::relu", "aten::relu kernel", "ReluBackward0", "ReluBackward0 kernel"} <= found
    assert not {"aten::mm", "MmBackward0", "aten::add kernel", "AddBackward0 kernel"} & found
    everything = _names(modules, "module=layers")
    assert {"aten::mm kernel", "aten::relu kernel", "MmBackward0 kernel"} <= everything


def test_a_module_that_is_not_there_is_refused_with_the_nearest_and_what_to_record(modules):
    with pytest.raises(Unanswerable, match=r"did you mean 'layers.1'.*--modules"):
        NodeSelection(module="layer.1").mask(modules)


def test_work_is_selected_by_host_and_stream_and_collective(gpu, modules):
    assert _names(modules, "host=node-*,kind=kernel") >= {"aten::mm kernel"}
    assert not _names(modules, "host=other")
    assert _names(gpu, f"stream={COMM}") == {"ncclDevKernel"}
    assert _names(gpu, "op=all_reduce") == {"ncclDevKernel"}
    assert _names(gpu, "op=broadcast") == _names(gpu, "group=17") == set()
    mask = NodeSelection(op="all_reduce", kind="collective", rank=1, step=2).mask(gpu)
    assert (gpu.nodes.kind[mask] == NodeKind.TRANSFER).all()
    assert mask.sum() == 1


@pytest.mark.parametrize("group", ["data", "data[0-2]", "data[[]0-2]", "data[0, 1, 2]", "*[[]0, 1, *"])
def test_a_group_is_selected_by_its_name_and_by_its_label_as_it_is_and_as_it_was(group, gpu):
    labels = ("data[0-2]", "more[3-5]", "tensor[10,1]", "unknown", "")
    graph = replace(gpu, messages=tuple(gpu.messages[0]._replace(group=label) for label in labels))
    assert messages_fitting(graph, group=group).tolist() == [True, *[False] * 4]


def test_what_a_run_does_not_say_of_hosts_is_refused(gpu):
    with pytest.raises(Unanswerable, match="the hosts of the ranks"):
        NodeSelection(host="node").mask(gpu)


def test_a_name_that_nothing_has_is_refused_with_the_nearest(gpu):
    with pytest.raises(Unanswerable, match="did you mean 'softmax'"):
        Scale(NodeSelection(name="sofmax")).apply(gpu)


def test_without_a_kernel_the_next_starts_where_it_did(gpu):
    before, after = Seen(gpu), Seen(Remove(NodeSelection(name="softmax")).apply(gpu))
    assert after.start("norm") == before.start("softmax")
    assert after.start("norm") < before.start("norm")


def test_work_that_is_gone_is_not_waited_for_and_what_began_early_still_does(gpu):
    into = np.bincount(gpu.edges.target, minlength=gpu.num_nodes)
    node = int(into.argmax())
    to_it, other = np.flatnonzero(gpu.edges.target == node)[:2], int((gpu.edges.target != node).argmax())
    lag = np.zeros(gpu.edges.lag.size, np.int64)
    lag[[*to_it, other]] = -5, 7, 7
    gone = np.arange(gpu.num_nodes) == node
    duration, left = times_without(gpu.with_lags(lag), gone)
    assert left[[*to_it, other]].tolist() == [-5, 0, 7]
    assert (duration == np.where(gone, 0, gpu.nodes.duration)).all()


def test_the_launch_of_a_removed_kernel_goes_with_it(gpu):
    before, after = Seen(gpu), Seen(Remove(NodeSelection(name="*", kind="kernel")).apply(gpu))
    launches = before.nodes("cudaLaunchKernel")
    gone = [node for node in launches if after.graph.nodes.duration[node] == 0]
    assert len(gone) == 4 * 3  # the fifth of each step launches a collective, which stays


def test_no_rank_waits_in_a_collective_that_is_not_done(gpu):
    alone = Remove(NodeSelection(op="all_reduce")).apply(gpu)
    slower = (
        np.where((gpu.nodes.rank == 1) & (gpu.nodes.kind == NodeKind.KERNEL), 7, 1) * alone.nodes.duration
    )
    others = gpu.nodes.rank == 0
    assert (replay(alone.with_durations(slower)).end == replay(alone).end)[others].all()


def test_a_removed_operator_takes_what_it_calls_and_launches_with_it(modules):
    removed = Remove(NodeSelection(name="aten::mm")).apply(modules)
    names = [modules.names[name] for name in modules.nodes.name]
    for name, was, now in zip(names, modules.nodes.duration, removed.nodes.duration):
        if name in ("aten::mm", "aten::mm kernel"):
            assert now == 0
        elif name != "cudaLaunchKernel":
            assert now == was


def test_a_replaced_span_lasts_as_long_as_is_said_however_many_nodes_it_is(modules):
    changed = Replace(NodeSelection(name="aten::mm"), 7.001).apply(modules)
    parts = [modules.names[name] == "aten::mm" for name in modules.nodes.name]
    assert sum(parts) > 1
    assert changed.nodes.duration[parts].sum() == 7001


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=8))
def test_spans_that_last_as_long_as_they_do_are_left_alone(durations):
    spans = [0] * (len(durations) // 2) + [1] * (len(durations) - len(durations) // 2)
    graph = tiny_graph(durations, [], span=spans)
    for span in (0, 1):
        mask = graph.nodes.span == span
        total = graph.nodes.duration[mask].sum()
        assert (durations_per_span(graph, mask, float(total)) == graph.nodes.duration).all()


def test_a_kernel_replaced_by_one_as_long_changes_nothing(gpu):
    adam = gpu.nodes.duration[NodeSelection(name="adam", kind="kernel").mask(gpu)]
    assert set(adam) == {50 * US}
    changed = Replace(NodeSelection(name="adam"), 50).apply(gpu)
    assert (changed.nodes.duration == gpu.nodes.duration).all()


@pytest.mark.parametrize("name", ["softmax", "nccl*", "gemm", "*"])
def test_removing_work_lets_nothing_end_later(gpu, cpu, name):
    removed = Remove(NodeSelection(name=name)).apply(gpu)
    assert (replay(removed).end <= replay(gpu).end).all()


def test_removing_two_things_in_either_order_is_the_same(cpu):
    one, other = Remove(NodeSelection(name="aten::mm")), Remove(NodeSelection(op="all_reduce"))
    ends = [replay(second.apply(first.apply(cpu))).end for first, second in ((one, other), (other, one))]
    assert (ends[0] == ends[1]).all()


def test_a_kernel_is_described_by_its_short_name_and_given_by_its_whole_one():
    name = "void at::native::(anonymous namespace)::softmax<at::Half, 4>(int*)"
    selection = NodeSelection(name=name)
    assert selection.describe() == "softmax<Half, 4>"
    assert name in str(selection)
