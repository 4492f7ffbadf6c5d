"""Fused optimizers and pointwise kernels, on jobs small enough to work out by hand."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import replay
from dpro.replay.whatif.registry import parse_edit
from tests.builders import US, TinyRun, cpu_job
from tests.edits import changed, steps_us

ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
GEMM = "sm90_xmma_gemm_f32f32"


def pointwise(kernels: list[tuple[str, float]], num_steps: int = 2) -> TinyRun:
    """Each operator of 20 launches a kernel; kernels follow one another; the CPU is far ahead of them."""
    run = TinyRun()
    begin, correlation = 0.0, 0
    for step in range(num_steps):
        at, free = begin, begin + 30
        for name, length in kernels:
            correlation += 1
            run.op("aten::op", at, at + 20)
            run.call(at + 5, at + 15, correlation)
            free = max(free, at + 15)
            run.kernel(name, free, free + length, correlation)
            at, free = at + 20, free + length
        run.call(at, free + 5, correlation + 1000, name="cudaDeviceSynchronize")
        run.step(step, begin, free + 5)
        begin = free + 5
    return run


def updating(optimizer: str, ops: list[str], num_parameters: int = 10, gpu: bool = True) -> TinyRun:
    """Steps of an optimizer whose operators of 8, with 2 of Python before each, run for each parameter."""
    run = TinyRun()
    begin, correlation = 0.0, 0
    for step in range(2):
        at = begin
        for _ in range(num_parameters):
            for name in ops:
                correlation += 1
                run.op(name, at + 2, at + 10)
                if gpu:
                    run.call(at + 4, at + 9, correlation)
                    run.kernel(ADD, at + 9, at + 12, correlation)
                at += 10
        run.mark(f"Optimizer.step#{optimizer}.step", begin, at)
        run.call(at, at + 5, correlation + 1000, name="cudaDeviceSynchronize") if gpu else None
        run.op("aten::rest", at + 5, at + 50)
        run.step(step, begin, at + 50)
        begin = at + 50
    return run


def _kernels(graph: Graph) -> list[float]:
    """How long the kernels take, us, in their order."""
    at = np.flatnonzero(graph.nodes.kind == NodeKind.KERNEL)
    return (graph.nodes.duration[at[np.argsort(graph.nodes.measured_start[at])]] / US).tolist()


def test_three_kernels_behind_one_another_become_one_without_their_intermediate_results(tmp_path):
    graph = pointwise([(ADD, 90), (ADD, 90), (ADD, 90), (GEMM, 50), (ADD, 60)], 1).build(tmp_path / "r").graph
    # Two results of 30 are neither written nor read again; the last kernel has no other beside it.
    assert _kernels(changed(graph, "compile")) == pytest.approx([270 - 4 * 30, 0, 0, 50, 60])


NORM = "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>"
COMPILED = "triton_red_fused__fused_rms_norm_mul_sum_view_0"


def test_reductions_join_the_pointwise_kernels_around_them_and_matmuls_do_not(tmp_path):
    graph = (
        pointwise([(ADD, 90), (NORM, 120), (ADD, 90), (GEMM, 50), (ADD, 60)], 1).build(tmp_path / "r").graph
    )
    assert _kernels(changed(graph, "compile")) == pytest.approx([300 - 140, 0, 0, 50, 60])
    (least,) = parse_edit("compile").bounds(graph)
    assert _kernels(least) == _kernels(graph)


@pytest.mark.slow
def test_torch_compile_makes_one_kernel_of_these_and_leaves_products_alone():
    torch = pytest.importorskip("torch")
    code = pytest.importorskip("torch._inductor.utils").run_and_get_code
    x, y, weight, scale = (torch.randn(size) for size in ((64, 256), (64, 256), (256, 256), 256))
    functional = torch.nn.functional
    jobs = {
        lambda: functional.layer_norm(x + y, (256,), scale, scale): (["cpp_fused_add_native_layer_norm"], 0),
        lambda: torch.softmax(x * 0.1 + y, -1): (["cpp_fused__softmax_add_mul"], 0),
        lambda: functional.gelu(functional.linear(x, weight, scale)): (["cpp_fused_gelu"], 1),
    }
    for job, (kernels, products) in jobs.items():
        torch.compiler.reset()
        _, (source, *_) = code(torch.compile(job))
        calls = source[source.index("def call") :]
        assert re.findall(r"(cpp_fused_\w+)_\d+\(", calls) == kernels
        assert len(re.findall(r"extern_kernels\.addmm\(|_linear_pointwise\w*\(", calls)) == products


def test_what_is_compiled_already_stays_as_it_is(tmp_path):
    graph = pointwise([(COMPILED, 90), (COMPILED, 90), (GEMM, 50)], 1).build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match=r"already uses kernels fused by torch\.compile"):
        changed(graph, "compile")


def test_what_is_not_compiled_of_a_job_is_fused_beside_what_is(tmp_path):
    kernels = [(COMPILED, 40), (COMPILED, 40), (GEMM, 50), (ADD, 90), (ADD, 90)]
    graph = pointwise(kernels, 1).build(tmp_path / "r").graph
    assert _kernels(changed(graph, "compile")) == pytest.approx([40, 40, 50, 180 - 60, 0])


def test_a_fused_kernel_takes_no_less_than_its_longest_part(tmp_path):
    graph = pointwise([(ADD, 3), (ADD, 300), (ADD, 3)], 1).build(tmp_path / "r").graph
    assert _kernels(changed(graph, "compile")) == pytest.approx([300, 0, 0])


def test_the_operators_of_fused_kernels_go_with_their_launches(tmp_path):
    # Kernels of 1 behind launches every 20: the CPU is the limit, of five operators two are left.
    graph = pointwise([(ADD, 1), (ADD, 1), (ADD, 1), (ADD, 1), (GEMM, 1)]).build(tmp_path / "r").graph
    before, after = steps_us(graph), steps_us(changed(graph, "compile"))
    assert before - after == pytest.approx([60] * 2, abs=3)


SOME_KERNELS = st.lists(st.tuples(st.sampled_from([ADD, GEMM]), st.integers(1, 60)), min_size=2, max_size=8)


@given(SOME_KERNELS)
@settings(max_examples=25)
def test_fusing_never_lengthens_the_job_nor_shortens_it_below_its_longest_kernel(tmp_path_factory, kernels):
    _fuse(tmp_path_factory, kernels)


@pytest.mark.slow
@given(SOME_KERNELS)
def test_fusing_any_kernels_keeps_to_its_bounds(tmp_path_factory, kernels):
    _fuse(tmp_path_factory, kernels)


def _fuse(tmp_path_factory, kernels):
    graph = pointwise(kernels, 1).build(tmp_path_factory.mktemp("fused") / "r").graph
    names = [name for name, _ in kernels]
    if not any(pair == (ADD, ADD) for pair in pairwise(names)):
        with pytest.raises(Unanswerable, match="nothing to fuse"):
            changed(graph, "compile")
        return
    fused = changed(graph, "compile")
    assert replay(fused).end.max() <= replay(graph).end.max()
    assert sum(_kernels(fused)) >= max(length for _, length in kernels)


def test_kernels_of_a_part_are_fused_alone(tmp_path):
    graph = pointwise([(ADD, 90), (ADD, 90)], 2).build(tmp_path / "r").graph
    assert _kernels(changed(graph, "compile:step=1")) == pytest.approx([90, 90, 120, 0])


ADAMW = [
    "aten::add_",
    *(f"aten::{name}" for name in ("mul_", "lerp_", "mul_", "addcmul_", "sqrt", "div", "add_")),
]
ADAMW += ["aten::addcdiv_"]


def test_a_fused_optimizer_moves_each_tensor_once_and_launches_once(tmp_path):
    graph = updating("AdamW", ADAMW).build(tmp_path / "r").graph
    fused = changed(graph, "optimizer:impl=fused")
    assert sum(_kernels(fused)) == pytest.approx(sum(_kernels(graph)) / 3)
    # The first call returns at 9, kernels of 270 / 3 follow, then the rest of 45.
    assert steps_us(fused) == pytest.approx([9 + 90 + 45] * 2, abs=3)


def test_a_foreach_optimizer_saves_launches_and_no_traffic(tmp_path):
    graph = updating("AdamW", ADAMW).build(tmp_path / "r").graph
    foreach = changed(graph, "optimizer:impl=foreach")
    assert _kernels(foreach) == _kernels(graph)
    assert (steps_us(foreach) < 0.6 * steps_us(graph)).all()


def test_on_a_cpu_fused_saves_traffic_and_python_and_foreach_nothing(tmp_path):
    graph = updating("AdamW", ADAMW, gpu=False).build(tmp_path / "r").graph
    # 90 operators of 8 to a third, Python of 180 to a ninth.
    assert steps_us(changed(graph, "optimizer:impl=fused")) == pytest.approx([240 + 20 + 50] * 2, abs=3)
    assert changed(graph, "optimizer:impl=foreach") is graph


@pytest.mark.parametrize("impl", ["foreach", "fused"])
def test_an_optimizer_that_is_what_is_asked_for_stays_as_it_is(impl, tmp_path):
    graph = updating("Adam", [f"aten::_{impl}_adam_"], 1).build(tmp_path / "r").graph
    assert changed(graph, f"optimizer:impl={impl}") is graph


def test_an_optimizer_of_unknown_traffic_is_refused_and_so_is_unfusing(tmp_path):
    other = updating("Lion", ["aten::mul_"]).build(tmp_path / "other").graph
    with pytest.raises(Unanswerable, match="the memory traffic of Lion is unknown: known are AdamW"):
        changed(other, "optimizer")
    fused = updating("Adam", ["aten::_fused_adam_"]).build(tmp_path / "fused").graph
    with pytest.raises(Unanswerable, match="the optimizer is fused"):
        changed(fused, "optimizer:impl=foreach")


def test_plain_gradient_descent_has_nothing_to_fuse_but_launches(tmp_path):
    graph = updating("SGD", ["aten::add_"]).build(tmp_path / "r").graph
    assert _kernels(changed(graph, "optimizer")) == _kernels(graph)


def test_a_job_without_an_optimizers_range_or_without_kernels_is_refused(tmp_path):
    graph = cpu_job().build(tmp_path / "r").graph
    with pytest.raises(Unanswerable, match="no GPU kernels"):
        changed(graph, "compile")
    run = TinyRun()
    run.op("aten::mm", 0, 10)
    run.step(0, 0, 10)
    with pytest.raises(Unanswerable, match=r"no range 'Optimizer.step#\*'"):
        changed(run.build(tmp_path / "bare").graph, "optimizer")
