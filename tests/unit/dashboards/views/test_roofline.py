"""Matmuls below the roof of their GPU, against values worked out by hand, and runs that lack the data."""

from __future__ import annotations

import dataclasses

import pytest

from dpro.dashboards.links import Link, parse_link
from dpro.dashboards.loaded import Loaded
from dpro.dashboards.views.kernels import VIEW, gpu_of, roofline_figure, roofline_info
from dpro.errors import Unanswerable
from tests.builders import cpu_job
from tests.unit.replay.whatif.edits.gpu.test_precision import BIG, FLAT, H100, graph_of, matmuls

BF16 = "nvjet_sm90_tst_128x256"


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    work = [("aten::mm", BIG, BF16, 200.0)] * 3 + [
        ("aten::mm", FLAT, BF16, 30.0),
        ("aten::mm", BIG, BF16, 5.0),
    ]
    return graph_of(matmuls(work), tmp_path_factory.mktemp("matmuls") / "run")


def test_a_square_matmul_is_limited_by_arithmetic_and_a_flat_one_by_memory(graph):
    square, flat = roofline_info(graph, gpu_of(graph), Link()).to_dicts()
    operations = 2 * 4096**3
    # three of 200 us and one of 5 us, which alone would be faster than the GPU can
    assert square["count"] == 4
    assert square["tflops"] == pytest.approx(operations / (605e-6 / 4) / 1e12)
    assert square["intensity"] == pytest.approx(operations / (3 * 4096**2 * 2))
    assert square["limit"] == "compute"
    assert square["of_limit"] == pytest.approx(square["tflops"] / 989)
    moved = 2 * (1_000_000 * 8 + 64 + 1_000_000 * 8)
    assert flat["limit"] == "memory"
    assert flat["of_limit"] == pytest.approx(moved / 3350e9 / 30e-6)
    assert flat["dtype"] == "bf16"


def test_what_would_be_above_the_roof_is_left_out(tmp_path):
    fast = graph_of(matmuls([("aten::mm", BIG, BF16, 5.0)]), tmp_path / "run")
    assert roofline_info(fast, gpu_of(fast), Link()).is_empty()


def test_points_are_below_their_roof(graph):
    gpu = gpu_of(graph)
    roof, points = roofline_figure(roofline_info(graph, gpu, Link()), gpu, "dark").data
    assert max(roof.y) == pytest.approx(989e12)
    for x, y in zip(points.x, points.y):
        assert y < min(989e12, x * gpu.gbps * 1e9)


def test_throughput_has_the_units_of_data_sheets(graph):
    gpu = gpu_of(graph)
    axis = roofline_figure(roofline_info(graph, gpu, Link()), gpu, "dark").layout.yaxis
    assert dict(zip(axis.tickvals, axis.ticktext))[10**14] == "100 TFLOP/s"


def test_only_selected_ranks_and_steps_count(graph):
    gpu = gpu_of(graph)
    assert roofline_info(graph, gpu, parse_link("?ranks=1")).is_empty()
    assert roofline_info(graph, gpu, parse_link("?steps=7")).is_empty()
    assert roofline_info(graph, gpu, parse_link("?ranks=0&steps=0")).height == 2


def test_the_view_says_what_is_missing(tmp_path):
    fill, link = VIEW.sections["kernels-roofline"], Link(view="kernels")
    with pytest.raises(Unanswerable, match="No GPU was used"):
        fill(Loaded(cpu_job().write(tmp_path / "cpu")), link)
    run = matmuls([("aten::mm", BIG, BF16, 200.0)], shaped=False).write(tmp_path / "unshaped")
    run = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, gpus=[H100]))
    assert "dpro record --shapes" in str(fill(Loaded(run), link))
    run = matmuls([("aten::mm", BIG, BF16, 200.0)]).write(tmp_path / "shaped")
    run = dataclasses.replace(run, manifest=dataclasses.replace(run.manifest, gpus=[H100]))
    assert "69% of the limits" in str(fill(Loaded(run), link))
