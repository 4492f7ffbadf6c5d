"""A user's measured products: tables and traces become numbers, trees and look-ups."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.errors import InputError
from dpro.replay.cost.kernels.estimate import MeasuredOperations, estimate
from dpro.replay.cost.kernels.formula import PRIOR, formula_us, sizes_of
from dpro.replay.cost.kernels.operations import matmuls
from dpro.replay.cost.kernels.products import PRODUCTS, read_products, sources_of
from dpro.replay.cost.kernels.roofline import GPUS


def _measured(count: int, slower: float, device: str = "B200") -> pl.DataFrame:
    """Products of a device that takes this many times what the formula says."""
    draw = np.random.default_rng(1)
    m, n, k = 2 ** draw.integers(9, 13, (3, count)).astype(np.float64)
    us = slower * formula_us(PRIOR, sizes_of(matmuls("bf16", m, n, k)), GPUS[device], "bf16")
    made = {"device": device, "software": "trace", "dtype": "bf16", "batch": 1.0}
    return (
        pl.DataFrame({"m": m, "n": n, "k": k, "us": us})
        .with_columns(**{name: pl.lit(value) for name, value in made.items()})
        .select(list(PRODUCTS))
    )


@pytest.mark.parametrize("count", [30, 200])
def test_products_of_a_device_move_what_is_predicted_of_others_there(count):
    asked = matmuls("bf16", 3000, 5000, 7000)
    real = 1.6 * formula_us(PRIOR, sizes_of(asked), GPUS["B200"], "bf16")[0]
    before = estimate(asked, "B200")
    after = estimate(asked, "B200", sources_of(_measured(count, 1.6), "B200"))
    assert abs(np.log(after["us"][0] / real)) < 0.5 * abs(np.log(before["us"][0] / real))
    assert after["method"][0] == "fitted"
    wide, narrow = (np.log(each["high_us"][0] / each["low_us"][0]) for each in (before, after))
    assert narrow < wide


def test_four_products_are_too_few_and_other_devices_stay_as_they_are():
    asked = matmuls("bf16", 3000, 5000, 7000)
    for sources in (sources_of(_measured(4, 1.6), "B200"), sources_of(_measured(30, 1.6), "H100")):
        assert estimate(asked, "B200", sources).equals(estimate(asked, "B200"))


def test_a_product_that_was_measured_there_is_looked_up_and_moved_by_half_of_the_miss_here():
    table = _measured(30, 1.6)
    asked = matmuls("bf16", *(table[name][:1] for name in "mnk"))
    sources = sources_of(table, "H100", "B200")
    here = estimate(asked, "H100")["us"][0]
    found = estimate(asked, "B200", sources, MeasuredOperations("H100", asked, np.array([4 * here])))
    assert found["method"][0] == "measured x table"
    assert found["us"][0] == pytest.approx(2 * table["us"][0])


def test_a_file_is_read_in_the_names_of_published_tables_and_of_data_sheets(tmp_path):
    (tmp_path / "t.csv").write_text(
        "device,dtype,m,n,k,latency_ms\nb200_sxm,bfloat16,1,2,3,0.5\nB200,bf16,1,2,4,1\nabacus,bf16,1,2,3,1\n"
    )
    rows = read_products(tmp_path / "t.csv")
    assert rows.schema == pl.Schema(PRODUCTS)
    assert rows.select("device", "dtype", "k", "us").rows() == [
        ("B200", "bf16", 3, 500),
        ("B200", "bf16", 4, 1000),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("device,dtype,m,n,latency_us\n", "no column k"),
        ("device,dtype,m,n,k\n", "no column latency_us"),
        ("device,dtype,m,n,k,us\nabacus,bf16,1,2,3,4\n", "abacus"),
        ("", "not a readable"),
        ("device,dtype,m,n,k,us\n", r"no product of a device .*\(none\)"),
        ("device,dtype,m,n,k,us\nH100,bf16,one,2,3,4\n", "column m has 'one'"),
        ("device,dtype,m,n,k,us\nH100,int3,1,2,3,4\n", r"no product in an element type .*\(int3\)"),
        ("device,dtype,m,n,k,us\nH100,bf16,1,2,3,-4\n", "no product whose sizes and us are above 0"),
        ("device,dtype,m,n,k,us\nH100,bf16,4096,4096,4096,2e-4\n", "column us: wrong unit"),
        ("device,dtype,m,n,k,us\nH100,bf16,4096,4096,4096,2e5\n", "column us: wrong unit"),
    ],
)
def test_a_file_that_is_no_table_of_products_is_refused_in_one_line(text, why, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(InputError, match=why) as refused:
        read_products(tmp_path / "t.csv")
    assert "\n" not in str(refused.value)
