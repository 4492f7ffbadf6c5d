"""Utilisation worked out by hand: one matmul of known shapes on a GPU of known peak."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.errors import Unanswerable
from dpro.replay.models.mfu import find_mfu
from dpro.schema import SPANS, conform

H100 = ["NVIDIA H100 80GB HBM3"]
STEPS = pl.DataFrame(
    {"rank": [0, 0], "window": [0, 0], "step": [0, 1], "start_ns": [0, 1000], "end_ns": [1000, 2000]}
)
KERNEL = {"kind": "kernel", "name": "nvjet_tst_128x256", "start_ns": 100, "duration_ns": 500}
SHAPES = "[[1000, 1000], [1000, 1000]]"  # 2 * 1000 * 1000 * 1000 operations
MATMUL = {
    "kind": "cpu_op",
    "name": "aten::mm",
    "start_ns": 100,
    "duration_ns": 10,
    "shapes": "[[1000, 1000], [1000, 1000]]",
}


def _spans(*rows: dict) -> pl.DataFrame:
    filled = [
        {name: None if column.default is None else column.default for name, column in SPANS.columns.items()}
        | {"rank": 0, "window": 0, "span_id": number, "shapes": "", "kind": "cpu_op"}
        | row
        for number, row in enumerate(rows)
    ]
    return conform(SPANS, pl.DataFrame(filled, schema=SPANS.dtypes))


def test_operations_over_time_and_peak():
    mfu = find_mfu(
        _spans(KERNEL, MATMUL, MATMUL | {"start_ns": 1100}),
        STEPS,
        H100,
    )
    # 4e9 operations in 2,000 ns are 2,000e12 per second, of 989e12
    assert (mfu.dtype, mfu.peak_tflops, mfu.gpu) == ("bf16", 989, "H100")
    assert mfu.share == pytest.approx(2000 / 989)
    assert mfu.operations == pytest.approx(2e9)


def test_operators_outside_of_steps_do_not_count():
    inside, after = MATMUL, MATMUL | {"start_ns": 2000}
    assert find_mfu(_spans(KERNEL, inside, after), STEPS, H100).operations == pytest.approx(1e9)


def test_the_precision_is_the_one_that_matmuls_spend_most_time_in():
    short = KERNEL | {"name": "sm90_gemm_f16", "duration_ns": 499}
    assert find_mfu(_spans(KERNEL, short, MATMUL), STEPS, H100).dtype == "bf16"
    assert find_mfu(_spans(KERNEL, short | {"duration_ns": 501}, MATMUL), STEPS, H100).dtype == "fp16"


@pytest.mark.parametrize(
    ("rows", "gpus", "why"),
    [
        ([KERNEL, MATMUL | {"shapes": ""}], H100, "no shapes"),
        ([KERNEL | {"name": "gemm_kernel"}, MATMUL], H100, "precision"),
        ([KERNEL, MATMUL], ["NVIDIA Something"], "not known"),
    ],
)
def test_what_is_missing_is_said(rows, gpus, why):
    with pytest.raises(Unanswerable, match=why):
        find_mfu(_spans(*rows), STEPS, gpus)
