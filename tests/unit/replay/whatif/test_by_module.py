"""A precision for each module, by hand on a made-up GPU job of two layers."""

from __future__ import annotations

import json

import numpy as np
import polars as pl
import pytest

from dpro.errors import Unanswerable, UsageError
from dpro.replay.cost.kernels.estimate import MeasuredOperations, estimate
from dpro.replay.cost.kernels.operations import matmuls
from dpro.replay.graph import NodeKind
from dpro.replay.whatif.choices import choose_precisions, expected_losses
from dpro.replay.whatif.registry import parse_edit
from dpro.store import open_run
from tests.builders import BACKWARD, TinyRun
from tests.unit.replay.whatif.edits.gpu.test_precision import graph_of, kernel_us

SIZE, US = 4096, 3000.0
KERNEL = "ampere_sgemm"
SHAPES = json.dumps([[SIZE, SIZE], [SIZE, SIZE]])


def job(traces=None):
    """Forward of layers a and b, backward of b and a; a product of 3 ms each; b's weight may mind more."""
    run = TinyRun()
    at = 0.0
    for number, (name, backward) in enumerate([("a", False), ("b", False), ("b", True), ("a", True)]):
        sequence = {"sequence_number": 7 + "ab".index(name)}
        thread = {"tid": BACKWARD} if backward else {}
        if backward:
            run.op("MmBackward0", at, at + 20, forward_thread=1, **sequence, **thread)
        else:
            run.mark(f"nn.Module: module.{name}", at, at + 20)
            run.op("aten::linear", at, at + 19, **sequence)
        run.op("aten::mm", at + 1, at + 18, shapes=SHAPES, **thread)
        run.call(at + 5, at + 10, number, **thread)
        run.kernel(KERNEL, at + 10, at + 10 + US, number)
        at += US + 30
    run.step(0, 0, at)
    for module, trace in (traces or {}).items():
        for precision, error in (("bf16", 1e-3), ("fp8", 0.1)):
            row = {"rank": 0, "module": module, "precision": precision, "elements": 100, "square_norm": 1.0}
            row |= {"square_error": error, "trace": trace, "method": "hutchinson", "batches": 3, "loss": 2.0}
            run.rows["sensitivities"].append(row)
    return run


def chosen(graph, lowest, budget):
    kernels = graph.nodes.kind == NodeKind.KERNEL
    return {each.module: each.precision for each in choose_precisions(graph, kernels, lowest, budget)}


def test_the_loss_rises_by_half_the_mean_curvature_times_what_rounding_moves(tmp_path):
    graph = graph_of(job({"a": 400.0, "b": -1.0}), tmp_path / "r")
    losses = {(m, p): loss for m, p, loss in expected_losses(graph.run).iter_rows()}
    assert losses["a", "fp8"] == pytest.approx(400 / 100 * 0.1 / 2 / 2.0)
    assert losses["b", "fp8"] == 0  # of a saddle nothing is promised


def test_within_a_small_budget_only_the_module_that_minds_least_has_fewer_bits(tmp_path):
    graph = graph_of(job({"a": 400.0, "b": 40_000.0}), tmp_path / "r")
    # Of the loss of 2: a adds 0.001 in bf16 and 0.1 in fp8, b 0.1 and 10.
    assert chosen(graph, "bf16", 0.01) == {"a": "bf16", "b": ""}
    assert chosen(graph, "bf16", 0.2) == {"a": "bf16", "b": "bf16"}
    assert chosen(graph, "fp8", 0.15) in ({"a": "fp8", "b": ""}, {"a": "bf16", "b": "bf16"})
    assert chosen(graph, "fp8", 0.3) == {"a": "fp8", "b": "bf16"}
    assert chosen(graph, "bf16", 1e-6) == {"a": "", "b": ""}


def test_products_forward_and_backward_take_what_the_device_takes_for_them(tmp_path):
    graph = graph_of(job({"a": 400.0, "b": 40_000.0}), tmp_path / "r")
    us = kernel_us(parse_edit("precision:dtype=bf16,budget=0.01").apply(graph))
    given = MeasuredOperations("H100", matmuls("fp32", SIZE, SIZE, SIZE), np.array([US]))
    there = estimate(matmuls("bf16", SIZE, SIZE, SIZE), "H100", given=given)["us"][0]
    cast = 2 * SIZE**2 * 6 / 3350 / 1e3
    assert us == pytest.approx([there + cast, US, US, there + cast], rel=1e-3)
    notes = parse_edit("precision:dtype=bf16,budget=0.01").notes(graph)
    assert notes[0].startswith("1 of 2 modules in bf16 (a): the loss may rise by ")


def test_without_a_probe_it_is_refused_with_how_to_get_one(tmp_path):
    graph = graph_of(job(), tmp_path / "r")
    with pytest.raises(Unanswerable, match="dpro try precision:probe"):
        parse_edit("precision:budget=0.01").apply(graph)
    with pytest.raises(UsageError, match="exclude"):
        parse_edit("precision:budget=0.01,speedup=2")


DAMAGED = [
    {"trace": float("nan")}, {"elements": 0}, {"square_error": -1.0}, {"loss": float("inf")}, {"module": ""},
]  # fmt: skip


@pytest.mark.parametrize("damage", [*DAMAGED, "trace", "square_error", "loss", "elements"])
def test_a_damaged_probe_is_refused_and_decides_nothing(tmp_path, damage):
    run = job({"a": 400.0, "b": 40_000.0})
    run.write(tmp_path / "r")
    (part,) = (tmp_path / "r" / "sensitivities").glob("*.parquet")
    rows = pl.read_parquet(part)
    lacking = rows.drop(damage) if isinstance(damage, str) else None
    (
        rows.with_columns(**{k: pl.lit(v) for k, v in damage.items()}) if lacking is None else lacking
    ).write_parquet(part)
    with pytest.raises(Unanswerable, match="no row of table sensitivities has"):
        expected_losses(open_run(tmp_path / "r"))


def test_what_one_damaged_row_was_to_say_is_not_chosen(tmp_path):
    run = job({"a": 400.0, "b": 400.0})
    run.rows["sensitivities"][0]["trace"] = float("nan")  # module a in bf16
    assert chosen(graph_of(run, tmp_path / "r"), "bf16", 0.1) == {"a": "", "b": "bf16"}
