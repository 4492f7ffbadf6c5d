"""Utilisation worked out by hand: one matmul of known shapes on a GPU of known peak."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.errors import Unanswerable
from dpro.replay.cost.work import PARAMETERS, SHAPES, find_mfu, operations_of_calls
from dpro.schema import COUNTERS, MODEL_CALLS, SPANS, conform

H100 = ["NVIDIA H100 80GB HBM3"]
STEPS = pl.DataFrame(
    {"rank": [0, 0], "window": [0, 0], "step": [0, 1], "start_ns": [0, 1000], "end_ns": [1000, 2000]}
)
KERNEL = {"kind": "kernel", "name": "nvjet_tst_128x256", "start_ns": 100, "duration_ns": 500}
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


def test_time_is_that_of_the_gpu_where_the_host_is_ahead_of_it():
    calls = [
        {
            "kind": "runtime",
            "name": "cudaLaunchKernel",
            "start_ns": begin,
            "duration_ns": 10,
            "correlation": begin,
        }
        for begin in (150, 1150)
    ]
    kernels = [
        KERNEL | {"start_ns": begin, "duration_ns": 4000, "correlation": call["start_ns"]}
        for begin, call in zip((100_000, 104_000), calls)
    ]
    # The host's steps take 1,000 ns each, those of the GPU, 100 us later, 4,000.
    mfu = find_mfu(_spans(*calls, *kernels, MATMUL, MATMUL | {"start_ns": 1100}), STEPS, H100)
    assert mfu.share == pytest.approx(500 / 989)


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
        ([KERNEL, MATMUL | {"shapes": ""}], H100, "without their shapes"),
        ([KERNEL | {"name": "gemm_kernel"}, MATMUL], H100, "precision"),
        ([KERNEL, MATMUL], ["NVIDIA Something"], "not known"),
    ],
)
def test_what_is_missing_is_said(rows, gpus, why):
    with pytest.raises(Unanswerable, match=why):
        find_mfu(_spans(*rows), STEPS, gpus)


# By the parameters of the model.

TOKENS = ([[4, 1024], [4, 1024]], ["int64", "int64"])
MODEL = {"matrices": 1_000_000, "trained_matrices": 1_000_000, "parameters": 1_200_000, "tensors": 0}


def _calls(*rows: dict) -> pl.DataFrame:
    known = {"rank": 0, "shapes": TOKENS[0], "dtypes": TOKENS[1]} | MODEL
    return conform(MODEL_CALLS, pl.DataFrame([known | {"time_ns": at} | row for at, row in enumerate(rows)]))


def _backward(*per_rank: float) -> pl.DataFrame:
    rows = [
        {"rank": rank, "counter": "step_backward_calls", "time_ns": step, "value": value}
        for rank, value in enumerate(per_rank)
        for step in (0, 1)
    ]
    return conform(COUNTERS, pl.DataFrame(rows))


def test_each_weight_takes_six_operations_for_each_token():
    # 6 * 1e6 weights * 4,096 tokens * 2 micro-batches
    assert operations_of_calls(_calls({}, {}), _backward(2)) == pytest.approx(6e6 * 4096 * 2)


def test_weights_without_gradients_take_four():
    assert operations_of_calls(_calls({"trained_matrices": 0}), _backward(1)) == pytest.approx(4e6 * 4096)


def test_ranks_and_calls_that_differ_are_averaged():
    calls = _calls({}, {"shapes": [[4, 512]], "dtypes": ["int64"]}, {"rank": 1, "matrices": 2_000_000})
    first, second = 6e6 * (4096 + 2048) / 2, (4 * 2e6 + 2 * 1e6) * 4096
    assert operations_of_calls(calls, _backward(1, 1)) == pytest.approx((first + second) / 2)


def test_parameters_count_where_no_operator_has_shapes():
    bare = MATMUL | {"shapes": ""}
    # 1e9 operations in a step of 1,000 ns are 1,000e12 per second
    mfu = find_mfu(_spans(KERNEL, bare), STEPS, H100, 1e9)
    assert (mfu.basis, mfu.operations, mfu.share) == (PARAMETERS, 1e9, pytest.approx(1000 / 989))
    assert find_mfu(_spans(KERNEL, MATMUL), STEPS, H100, 7e9).basis == SHAPES


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"experts": True}, "it has expert modules"),
        ({"tensors": 20_000}, "convolutions"),
        ({"parameters": -1}, "sizes of its weights"),
        ({"matrices": 0}, "sizes of its weights"),
        ({"shapes": [[4, 128, 768]], "dtypes": ["bfloat16"]}, r"bfloat16 \[4, 128, 768\]"),
    ],
)
def test_models_whose_parameters_do_not_say_it_are_refused(row, why):
    with pytest.raises(Unanswerable, match=why):
        operations_of_calls(_calls(row), _backward(1))
