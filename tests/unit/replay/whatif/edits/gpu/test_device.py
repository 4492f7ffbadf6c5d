"""A job on another GPU model: products by their shapes, others by their class, the host as it was."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from dpro.cli.analysis import open_quietly
from dpro.errors import Unanswerable, UsageError
from dpro.replay.construction.graph_builder import build_graph
from dpro.replay.cost.kernels.estimate import MeasuredOperations, estimate
from dpro.replay.cost.kernels.operations import matmuls as products
from dpro.replay.cost.kernels.roofline import GPUS
from dpro.replay.graph import NodeKind
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.edits.device import products_of
from dpro.replay.whatif.registry import parse_edit
from dpro.schema import WORKERS
from tests.builders import TinyRun, cpu_job
from tests.unit.replay.whatif.edits.gpu.test_precision import ADD, BIG, graph_of, kernel_us, matmuls

MM = "nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNN"
JOB = [
    ("aten::mm", BIG, MM, 200.0),
    ("aten::add", [], ADD, 400.0),
    ("aten::op", [], "flash_fwd_kernel", 300.0),
]


def moved(graph, edit: str) -> list[float]:
    return kernel_us(parse_edit(edit).apply(graph))


def test_a_product_takes_what_the_interface_says_from_what_was_measured_here(tmp_path):
    graph = graph_of(matmuls(JOB[:1]), tmp_path / "r")
    one = products("bf16", 4096, 4096, 4096)
    predicted = estimate(one, "A100-SXM4-80GB", given=MeasuredOperations("H100", one, np.array([200.0])))[
        "us"
    ][0]
    assert moved(graph, "device:to=A100-SXM4-80GB") == pytest.approx([predicted], rel=0.02)
    assert predicted > 300


def test_a_pointwise_kernel_gains_the_ratio_of_the_bandwidths_that_both_reach(tmp_path):
    graph = graph_of(matmuls(JOB[1:2]), tmp_path / "r")
    (us,) = moved(graph, "device:to=H200")
    assert us == pytest.approx(400 * GPUS["H100"].gbps / GPUS["H200"].gbps, rel=0.1)


def test_attention_without_shapes_gains_the_ratio_of_the_peaks_with_a_wide_interval(tmp_path):
    graph = graph_of(matmuls(JOB[2:]), tmp_path / "r")
    (us,) = moved(graph, "device:to=B200")
    assert us == pytest.approx(300 * 989 / 2250, rel=0.3)
    low, high = (kernel_us(each)[0] for each in parse_edit("device:to=B200").bounds(graph))
    assert low < 0.85 * us < 1.15 * us < high


def test_the_host_takes_what_it_took_and_the_interval_surrounds_what_is_said(tmp_path):
    graph = graph_of(matmuls(JOB), tmp_path / "r")
    edit = parse_edit("device:to=H200")
    changed = edit.apply(graph)
    host = graph.nodes.kind != NodeKind.KERNEL
    assert (changed.nodes.duration[host] == graph.nodes.duration[host]).all()
    low, high = (sum(kernel_us(each)) for each in edit.bounds(graph))
    assert low < sum(kernel_us(changed)) < high


def test_shares_of_kernel_time_are_reported_by_method(tmp_path):
    graph = graph_of(matmuls(JOB), tmp_path / "r")
    notes = parse_edit("device:to=B200").notes(graph)
    assert notes[0] == "78% of kernel time is predicted by the class of the kernel, without shapes"
    assert notes[1].startswith(
        "22% of kernel time is predicted by measurements on this GPU and the data sheet of that GPU"
    )


def test_only_the_ranks_that_are_named_move(tmp_path):
    graph = graph_of(matmuls(JOB), tmp_path / "r")
    with pytest.raises(Unanswerable, match="no such GPU kernels"):
        parse_edit('device:to=H200,ranks="1,3"').apply(graph)
    assert moved(graph, "device:to=H200,ranks=0") == moved(graph, "device:to=H200")


@pytest.mark.parametrize(
    ("edit", "error", "reason"),
    [
        ("device:to=H900", UsageError, "no data sheet of 'H900'"),
        ("device:to=H200,ranks=x", UsageError, "ranks"),
        ("device:to=V100", Unanswerable, "does not multiply in bf16"),
    ],
)
def test_what_cannot_be_said_is_refused(tmp_path, edit, error, reason):
    with pytest.raises(error, match=reason):
        parse_edit(edit).apply(graph_of(matmuls(JOB), tmp_path / "r"))


def test_a_run_on_the_cpu_or_on_a_gpu_that_is_not_known_is_refused(tmp_path):
    with pytest.raises(Unanswerable, match="no such GPU kernels"):
        parse_edit("device:to=H200").apply(cpu_job().build(tmp_path / "c").graph)
    unknown = graph_of(matmuls(JOB), tmp_path / "r", "NVIDIA H900")
    with pytest.raises(Unanswerable, match="H900"):
        parse_edit("device:to=H200").apply(unknown)


def test_ranks_of_a_mixed_cluster_move_each_from_its_own_model(tmp_path):
    run, models = TinyRun(), ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
    for rank, name in enumerate(models):
        run.rows[WORKERS.name].append({"rank": rank, "host": "a", "gpu_name": name})
        run.op("aten::mm", 0, 20, rank, shapes=json.dumps(BIG))
        run.call(5, 10, rank, rank=rank)
        run.kernel(MM, 10, 210, rank, rank=rank)
        run.step(0, 0, 220, rank)
    graph = graph_of(run, tmp_path / "r")
    opened = graph.run
    manifest = dataclasses.replace(opened.manifest, gpus=models)
    graph = dataclasses.replace(graph, run=dataclasses.replace(opened, manifest=manifest))
    assert sorted(moved(graph, "device:to=H200")) == sorted(
        [200.0, *moved(graph_of(matmuls(JOB[:1]), tmp_path / "one"), "device:to=H200")]
    )


def test_a_trace_on_the_other_device_says_what_products_take_there(tmp_path):
    graph = graph_of(matmuls(JOB), tmp_path / "r")
    sizes = [[[4096, 64 * size], [64 * size, 4096]] for size in range(35, 65)]
    there = graph_of(
        matmuls([("aten::mm", size, MM, 100.0 + at) for at, size in enumerate(sizes)]), tmp_path / "t"
    )
    manifest = dataclasses.replace(there.run.manifest, gpus=["NVIDIA B200"])
    found = products_of(dataclasses.replace(there, run=dataclasses.replace(there.run, manifest=manifest)))
    assert found.height == 30
    assert set(found["device"]) == {"B200"}
    informed = dataclasses.replace(graph, products=found)
    notes = parse_edit("device:to=B200").notes(informed)
    assert any("measurements on this and on that GPU" in note for note in notes), notes
    assert moved(informed, "device:to=B200") != moved(graph, "device:to=B200")
    with pytest.raises(Unanswerable, match="--shapes"):
        products_of(graph_of(matmuls(JOB, shaped=False), tmp_path / "u"))


def test_on_traces_of_one_model_on_two_gpus_the_step_is_within_15_percent(traces):
    """BERT on an H100 and on an MI300X; that trace does not name its GPU, so only this way round."""
    graph = build_graph(open_quietly(traces / "single" / "h100_bert_pystack.json.gz")).predictive
    other = build_graph(open_quietly(traces / "single" / "mi300x_bert_pystack.json.gz")).predictive
    times = []
    for each in (parse_edit("device:to=MI300X").apply(graph), other):
        timeline = replay(each)
        times.append(step_times(each, timeline.start, timeline.end)["duration_ns"][0])
    assert times[0] == pytest.approx(times[1], rel=0.15)
