"""How unevenly work is spread over ranks and experts: small steps worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dpro.replay.attribution import MODULE
from dpro.replay.experts import EXCHANGE, GROUPED, PRODUCTS, imbalances, rows_of, uneven_layers
from dpro.schema import COLLECTIVES, SPANS, STEPS
from tests.builders import TinyRun


def layers_of(run: TinyRun, folder: Path) -> pl.DataFrame:
    written = run.write(folder / "run")
    return imbalances(written.table(SPANS), written.table(COLLECTIVES), written.table(STEPS))


def exchange(run: TinyRun, at: float, rank: int, sent: int, received: int, group: str = "0-1") -> None:
    call, ran = (at, at + 1), (at + 1, at + 3)
    run.gloo(call, ran, rank, op="all_to_all", bytes_in=sent, bytes_out=received, group_ranks=group)


def test_a_dispatch_loads_ranks_by_what_they_get_and_its_combine_by_what_they_give_back(tmp_path):
    run = TinyRun()
    for rank, load in ((0, 70), (1, 10)):
        run.step(1, 0, 100, rank)
        run.mark(f"{MODULE}layers.0.experts", 5, 40, rank)
        exchange(run, 10, rank, 40, load)
        exchange(run, 20, rank, load, 40)
        exchange(run, 60, rank, 40, 40)
    layers = layers_of(run, tmp_path)
    assert layers.drop("mean", "source").rows() == [
        ("layers.0.experts", 2, 140.0, 0, 1.75),
        ("call 3", 2, 40.0, 1, 1.0),
    ]
    assert layers["mean"].to_list() == [80.0, 40.0]
    assert layers["source"].unique().to_list() == [EXCHANGE]
    assert uneven_layers(layers)["layer"].to_list() == ["layers.0.experts"]


def test_the_imbalance_is_that_of_single_steps_though_ranks_take_turns(tmp_path):
    run = TinyRun()
    for rank in (0, 1):
        for step in (0, 1):
            run.step(step, 100 * step, 100 * step + 100, rank)
            exchange(run, 100 * step + 10, rank, 50, 90 if rank == step else 10)
    (layer,) = layers_of(run, tmp_path).to_dicts()
    assert (layer["imbalance"], layer["most"], layer["mean"]) == (pytest.approx(1.8), 50.0, 50.0)


@pytest.mark.parametrize("group", ["", "0-1"])
def test_even_exchanges_and_those_of_unknown_groups_are_no_layers(tmp_path, group):
    run = TinyRun()
    for rank in (0, 1):
        run.step(1, 0, 100, rank)
        exchange(run, 10, rank, 40, 40 if group else 10 + 60 * rank, group)
    assert layers_of(run, tmp_path).is_empty()


def test_rows_of_grouped_products_count_forward_by_rank(tmp_path):
    run = TinyRun()
    for rank, tokens in ((0, 30), (1, 10)):
        run.step(1, 0, 100, rank)
        run.mark(f"{MODULE}mlp", 5, 40, rank)
        run.op("aten::_grouped_mm", 10, 20, rank, shapes=f"[[{tokens}, 8], [2, 8, 16], [2], [], []]")
        run.op("GroupedMmBackward0", 50, 70, rank, sequence_number=3, forward_thread=1)
        run.op("aten::_grouped_mm", 55, 60, rank, shapes="[[7, 16], [2, 16, 8], [2], [], []]")
    (layer,) = layers_of(run, tmp_path).to_dicts()
    assert (layer["source"], layer["layer"], layer["mean"], layer["most"]) == (GROUPED, "mlp", 20.0, 30.0)


def test_experts_that_are_modules_are_compared_with_each_other(tmp_path):
    run = TinyRun()
    run.step(1, 0, 100)
    for expert, tokens in enumerate((2, 4, 12)):
        run.mark(f"{MODULE}layers.5.experts.{expert}.up", 10 * expert, 10 * expert + 9)
        run.op("aten::mm", 10 * expert + 2, 10 * expert + 4, shapes=f"[[{tokens}, 8], [8, 16]]")
    (layer,) = layers_of(run, tmp_path).to_dicts()
    assert (layer["source"], layer["layer"], layer["members"]) == (PRODUCTS, "layers.5.experts", 3)
    assert (layer["busiest"], layer["imbalance"]) == (2, 2.0)


@pytest.mark.parametrize(
    ("name", "shapes", "rows"),
    [
        ("aten::_grouped_mm", "[[128, 64], [64, 512], [2], [], []]", -1.0),  # gradients of weights
        ("aten::_grouped_mm", "[[64, 8], [4, 8, 16], [4]]", 64.0),
        ("aten::_scaled_grouped_mm", "[[64, 8]]", -1.0),
        ("aten::_grouped_mm", "nonsense", -1.0),
        ("aten::_grouped_mm", "[[], 3]", -1.0),
        ("aten::addmm", "[[16], [64, 8], [8, 16]]", 64.0),
        ("aten::mm", "[]", -1.0),
    ],
)
def test_rows_are_read_of_shapes_as_they_are_recorded(name: str, shapes: str, rows: Any):
    assert rows_of(name, shapes) == rows
