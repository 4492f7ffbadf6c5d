"""Matmuls with fewer bits: rooflines by hand, casts, and real matmuls that are no faster than their GPU."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable, UsageError
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.cost.kernels.roofline import gpu_named, matmul_of, stored_as
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.whatif.edits.kernels import Precision
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.graph_ops.scope import matmuls_of_kernels
from dpro.replay.whatif.registry import parse_edit
from tests.builders import TinyRun, cpu_job

BIG, FLAT = [[4096, 4096], [4096, 4096]], [[1_000_000, 8], [8, 8]]
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
H100 = "NVIDIA H100 80GB HBM3"


def matmuls(kernels: list[tuple[str, list, str, float]], shaped: bool = True) -> TinyRun:
    """One step of operators: name, shapes, kernel, how long in us."""
    run = TinyRun()
    at = 0.0
    for correlation, (name, shapes, kernel, length) in enumerate(kernels):
        more = {"shapes": json.dumps(shapes)} if shaped else {}
        run.op(name, at, at + 20, **more)
        run.call(at + 5, at + 10, correlation)
        run.kernel(kernel, at + 10, at + 10 + length, correlation)
        at += length + 20
    run.step(0, 0, at)
    return run


def graph_of(run: TinyRun, folder, gpu: str = H100) -> Graph:
    graph = run.build(folder).graph
    opened = graph.run
    assert opened is not None
    manifest = dataclasses.replace(opened.manifest, gpus=[gpu])
    return dataclasses.replace(graph, run=dataclasses.replace(opened, manifest=manifest))


def kernel_us(graph: Graph) -> list[float]:
    at = np.flatnonzero(graph.nodes.kind == NodeKind.KERNEL)
    return (graph.nodes.duration[at[np.argsort(graph.nodes.measured_start[at])]] / 1e3).tolist()


def changed(graph: Graph, edit: str) -> list[float]:
    return kernel_us(parse_edit(edit).apply(graph))


def test_a_matmul_bound_by_arithmetic_gains_the_ratio_of_the_peaks_and_pays_for_its_casts(tmp_path):
    graph = graph_of(matmuls([("aten::mm", BIG, "sm90_xmma_gemm_tf32f32_tf32f32", 400)]), tmp_path / "r")
    # 495 to 989 TFLOP/s; two operands of 4096 x 4096 are read in 4 bytes and written in 2, at 3.35 TB/s.
    cast = 2 * 4096**2 * 6 / 3350 / 1e3
    assert changed(graph, "precision:dtype=bf16") == pytest.approx([400 * 495 / 989 + cast], abs=0.01)


def test_a_matmul_bound_by_memory_gains_the_ratio_of_the_bytes(tmp_path):
    graph = graph_of(matmuls([("aten::mm", FLAT, "sm90_xmma_gemm_tf32f32_tf32f32", 40)]), tmp_path / "r")
    assert changed(graph, "precision:dtype=bf16") == pytest.approx([40 / 2 + 8e6 * 6 / 3350 / 1e3], abs=0.01)


def test_it_is_said_which_matmuls_are_bound_by_what(tmp_path):
    kernels = [
        ("aten::mm", BIG, "ampere_sgemm", 4000),
        ("aten::mm", FLAT, "ampere_sgemm", 40),
        ("aten::add", [], ADD, 9),
    ]
    notes = Precision(parse_edit("scale").selection).notes(graph_of(matmuls(kernels), tmp_path / "r"))  # type: ignore[attr-defined]
    assert [note.split(" of their time, are ")[-1] for note in notes[1:]] == ["compute-bound", "memory-bound"]
    assert notes[0] == "1 pointwise kernels on floats move half the bytes"


def test_pointwise_kernels_on_floats_move_half_the_bytes_and_fp8_leaves_them(tmp_path):
    kernels = [("aten::mm", BIG, "ampere_sgemm", 4000), ("aten::add", [], ADD, 9)]
    kernels += [
        ("aten::add", [], ADD.replace("float", "c10::BFloat16"), 9),
        ("aten::norm", [], "layer_norm_kernel<float>", 9),
    ]
    graph = graph_of(matmuls(kernels), tmp_path / "r")
    assert changed(graph, "precision:dtype=bf16")[1:] == [4.5, 9, 9]
    assert changed(graph, "precision:dtype=fp8")[1:] == [9, 9, 9]


def test_matmuls_that_have_so_few_bits_already_are_left_alone(tmp_path):
    kernels = [("aten::mm", BIG, "nvjet_tst_256x128_64x4", 200), ("aten::mm", BIG, "ampere_sgemm", 4000)]
    graph = graph_of(matmuls(kernels), tmp_path / "r")
    assert changed(graph, "precision:dtype=bf16")[0] == 200
    assert changed(graph, "precision:dtype=fp8")[0] < 200
    only = graph_of(matmuls(kernels[:1]), tmp_path / "only")
    with pytest.raises(Unanswerable, match="more bits than bf16"):
        changed(only, "precision:dtype=bf16")


def test_a_convolution_that_seems_faster_than_its_gpu_only_counts_its_bytes(tmp_path):
    # Stride 16: at stride 1 it would be 256 times the work.
    shapes = [[128, 3, 224, 224], [768, 3, 16, 16]]
    graph = graph_of(matmuls([("aten::convolution", shapes, "fprop_tf32f32", 1000)]), tmp_path / "r")
    read = 128 * 3 * 224**2 + 768 * 3 * 16**2
    assert changed(graph, "precision") == pytest.approx([500 + read * 6 / 3350 / 1e3], abs=0.01)


def test_a_given_speedup_needs_neither_shapes_nor_a_known_gpu(tmp_path):
    kernels = [("aten::mm", BIG, "ampere_sgemm", 400), ("aten::mul", [], "embedding_kernel<float>", 50)]
    graph = graph_of(matmuls(kernels, shaped=False), tmp_path / "r", gpu="Some Accelerator")
    assert changed(graph, "precision:speedup=4") == [100, 50]
    assert changed(graph, "precision:dtype=fp8,speedup=1") == [400, 50]


def test_what_is_missing_is_said_with_what_to_record_or_give(tmp_path):
    kernels = [("aten::mm", BIG, "ampere_sgemm", 400)]
    without = graph_of(matmuls(kernels, shaped=False), tmp_path / "a")
    with pytest.raises(Unanswerable, match="--shapes"):
        changed(without, "precision")
    unknown = graph_of(matmuls(kernels), tmp_path / "b", gpu="Some Accelerator")
    with pytest.raises(Unanswerable, match=r"Some Accelerator.*speedup="):
        changed(unknown, "precision")
    old = graph_of(matmuls(kernels), tmp_path / "c", gpu="Tesla V100-SXM2-16GB")
    with pytest.raises(Unanswerable, match="does not multiply in bf16"):
        changed(old, "precision:dtype=bf16")
    with pytest.raises(Unanswerable, match="no such GPU kernel"):
        parse_edit("precision").apply(cpu_job().build(tmp_path / "d").graph)
    with pytest.raises(UsageError, match="did you mean 'bf16'"):
        parse_edit("precision:dtype=bf61")


@pytest.mark.parametrize(
    ("name", "shapes", "operations", "moved"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 60, 6 + 15 + 10),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], 60, 6 + 15 + 10),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 420, 7 * 31),
        ("aten::convolution", [[1, 2, 4, 4], [3, 2, 1, 1]], 2 * 48 * 2, 32 + 6 + 48),
        ("aten::convolution_backward", [[1, 3, 4, 4], [1, 2, 4, 4], [3, 2, 1, 1]], 4 * 48 * 2, 96 + 38 + 38),
    ],
)
def test_operations_and_elements_of_matmuls_are_those_counted_by_hand(name, shapes, operations, moved):
    found = matmul_of(name, json.dumps(shapes))
    assert found is not None
    assert (found.operations, found.read + found.written) == (operations, moved)


@pytest.mark.parametrize("shapes", ["", "[]", "[[3],[4]]", "[[2,3],[4,5]]", "nonsense", "[[[2]],[[3]]]"])
def test_shapes_that_are_no_product_show_nothing(shapes):
    assert matmul_of("aten::mm", shapes) is None


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        ("ampere_sgemm_128x128_tn", "fp32"),
        ("cutlass_80_tensorop_s1688gemm_64x64_32x6_tn_align4", "tf32"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "bf16"),
        ("ampere_fp16_s16816gemm_fp16_64x64", "fp16"),
        ("volta_h884gemm_128x64", "fp16"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "bf16"),
        ("Cijk_Alik_Bljk_BBS_BH_MT256x224x128_MI16x16x1", "bf16"),
        ("nvjet_rqsss_144x128_128x6_1x2_h_bz", "fp8"),
        (ADD, "fp32"),
        ("some_kernel", ""),
    ],
)
def test_what_a_kernel_reads_follows_from_its_name(kernel, dtype):
    assert stored_as(kernel) == dtype


@pytest.mark.parametrize(
    ("file", "least"),
    [("multirank/nanogpt_h100_8r_rs_ag", 5000), ("single_hta/trace_diff__control__control.json.gz", 1000)],
)
def test_no_real_matmul_is_faster_than_its_gpu_can_be_and_the_best_comes_close(file, least, traces):
    graph = build_graph(open_quietly(traces / file)).graph
    assert graph.run is not None
    gpu = gpu_named(graph.run.manifest.gpus)
    operators = matmuls_of_kernels(graph, graph.nodes.kind == NodeKind.KERNEL)
    reached = []
    for (name, shapes, *_), parts in operators.group_by("name", "shapes", "rank", "span_id"):
        own = graph.nodes.duration[parts["node"].to_numpy()]
        longest = parts["node"].to_numpy()[own.argmax()]
        asked, stored = matmul_of(name, shapes), stored_as(graph.names[graph.nodes.name[longest]])
        if asked is not None and stored in gpu.tflops:
            reached.append(asked.least_ns(gpu, stored) / own.sum())
    assert len(reached) > least
    assert 0.6 < max(reached) < 1


@pytest.mark.parametrize("edit", ["precision", "precision:speedup=2"])
def test_kernels_without_a_matmul_among_them_are_refused(edit, tmp_path):
    graph = graph_of(matmuls([("aten::add", [], ADD, 9), ("aten::add", [], ADD, 9)]), tmp_path / "r")
    with pytest.raises(Unanswerable, match="none of these kernels is a matmul"):
        changed(graph, edit)


def test_a_speedup_of_matmuls_that_have_so_few_bits_already_is_refused(tmp_path):
    graph = graph_of(matmuls([("aten::mm", BIG, "nvjet_tst_256x128_64x4", 200)]), tmp_path / "r")
    with pytest.raises(Unanswerable, match="more bits than bf16"):
        changed(graph, "precision:speedup=2")


@pytest.mark.parametrize(
    ("gpu", "half"), [(H100, "bf16"), ("Tesla V100-SXM2-32GB", "fp16"), ("no GPU", "bf16")]
)
def test_half_precision_is_what_the_gpu_multiplies(tmp_path, gpu, half):
    graph = graph_of(matmuls([("aten::mm", BIG, "volta_sgemm", 9000)]), tmp_path / "r", gpu)
    assert str(Precision.candidates(facts_of(graph))[0]) == f"precision:dtype={half}"
