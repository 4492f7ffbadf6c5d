"""Which method answers, with which interval, and what is refused."""

import numpy as np
import polars as pl
import pytest

from benchmarks.device_checks.tables import read_tables, unknown_devices
from dpro.errors import DproError, Unanswerable
from dpro.replay.cost.kernels.estimate import MeasuredOperations, Sources, estimate
from dpro.replay.cost.kernels.formula import (
    ANY,
    PRIOR,
    device_named,
    formula_us,
    half_bands,
    shipped,
    sizes_of,
)
from dpro.replay.cost.kernels.learned import kept_out, learn
from dpro.replay.cost.kernels.operations import attention, matmuls, moves
from dpro.replay.cost.kernels.roofline import GPUS

PRODUCT = matmuls("bf16", 4096, 8192, 8192)


def _table_file(folder, device="h100_sxm", backend="mine", factor=1.0, count=12):
    """A table as users have it: the formula times a factor, and a hump that it does not know."""
    m, n, k = (
        each.ravel() for each in np.meshgrid(2 ** np.arange(5, 13), 1024 * np.arange(1, count), [4096])
    )
    operations = matmuls("bf16", m, n, k)
    us = formula_us(PRIOR, sizes_of(operations), GPUS[device_named(device)], "bf16")
    us = us * factor * (1 + 0.3 * np.sin(np.log2(m)))
    frame = pl.DataFrame({"m": m, "n": n, "k": k, "latency_us": us}).with_columns(
        device=pl.lit(device), backend=pl.lit(backend), kernel=pl.lit("k"), dtype=pl.lit("bfloat16")
    )
    path = folder / "gemm.parquet"
    old = [pl.read_parquet(path)] if path.exists() else []
    pl.concat([*old, frame], how="diagonal").write_parquet(path)
    return operations, us


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    _table_file(folder)
    return read_tables(folder)


def test_a_device_that_was_measured_is_said_by_its_own_numbers_and_others_by_their_sheet():
    (known,) = estimate(PRODUCT, "H100").to_dicts()
    (sheet,) = estimate(PRODUCT, "B200").to_dicts()
    assert (known["method"], sheet["method"]) == ("fitted", "sheet")
    assert known["low_us"] < known["us"] < known["high_us"]
    assert sheet["high_us"] / sheet["low_us"] > known["high_us"] / known["low_us"]
    roofline = 2 * 4096 * 8192 * 8192 / 989e6
    assert roofline < known["us"] < 2 * roofline


def test_rows_keep_their_order_whatever_their_kind():
    mixed = pl.concat([moves("bf16", 1e9, 1e9), PRODUCT, moves("bf16", 2e9, 2e9)])
    us = estimate(mixed, "H200")["us"]
    assert us[2] == pytest.approx(2 * us[0], rel=0.1)
    assert us[1] == estimate(PRODUCT, "H200")["us"][0]


def test_what_a_device_does_not_multiply_is_refused():
    (row,) = estimate(matmuls("fp8", 4096, 4096, 4096), "A100-SXM4-80GB").to_dicts()
    assert row["us"] is None
    assert row["reason"] == "A100-SXM4-80GB does not multiply in fp8"


def test_operations_far_larger_than_any_measured_are_refused():
    (row,) = estimate(matmuls("bf16", 1 << 20, 1 << 17, 1 << 17), "H100").to_dicts()
    assert (row["us"], row["method"]) == (None, "")
    assert "more operations or bytes" in row["reason"]


def test_a_device_without_a_sheet_is_refused_with_those_there_are():
    with pytest.raises(Unanswerable, match=r"no data sheet of 'H900'.*H200"):
        estimate(PRODUCT, "H900")


@pytest.mark.slow
def test_a_table_says_its_own_shapes_and_its_trees_those_between(tables):
    (table,) = tables
    sources = Sources(tables, [learn(table)])
    exact = estimate(table.operations, "H100", sources)
    assert exact["method"].unique().to_list() == ["table"]
    assert exact["us"].to_numpy() == pytest.approx(table.us)
    between = matmuls("bf16", 512, 1024 * np.array([2.5, 5.5, 7.5]), 4096)
    predicted = estimate(between, "H100", sources)
    assert predicted["method"].to_list() == ["trees"] * 3
    beyond = estimate(matmuls("bf16", 64, 1 << 17, 4096), "H100", sources)
    assert beyond["method"].to_list() == ["fitted"]


def test_trees_know_of_shapes_that_were_kept_out_what_the_formula_does_not(tables):
    (table,) = tables
    out = kept_out(table, 1)
    known = learn(table.rows(~out))
    rest = table.rows(out)
    predicted = estimate(rest.operations, "H100", Sources(learned=[known]))["us"].to_numpy()
    formula = formula_us(known.numbers.numbers, sizes_of(rest.operations), GPUS["H100"], "bf16")
    assert np.median(abs(predicted / rest.us - 1)) < 0.5 * np.median(abs(formula / rest.us - 1))


def test_half_of_what_a_method_misses_elsewhere_goes_along():
    own = estimate(PRODUCT, "H100")["us"].to_numpy()
    here = estimate(PRODUCT, "H200")["us"].to_numpy()
    (row,) = estimate(PRODUCT, "H200", given=MeasuredOperations("H100", PRODUCT, 1.44 * own)).to_dicts()
    assert row["us"] == pytest.approx(1.2 * here[0])
    assert row["method"] == "measured x fitted"


def test_tables_of_both_devices_come_before_the_formula(tmp_path):
    operations, h100 = _table_file(tmp_path)
    _, a100 = _table_file(tmp_path, "a100_sxm", factor=1.5)
    given = MeasuredOperations("H100", operations, 1.21 * h100)
    predicted = estimate(operations, "A100-SXM4-80GB", Sources(read_tables(tmp_path)), given)
    assert predicted["method"].unique().to_list() == ["measured x table"]
    assert predicted["us"].to_numpy() == pytest.approx(1.1 * a100)


def test_a_product_in_fp8_is_said_from_the_same_one_in_bf16():
    slow = estimate(PRODUCT, "H100")["us"].to_numpy()
    (row,) = estimate(
        matmuls("fp8", 4096, 8192, 8192), "H100", given=MeasuredOperations("H100", PRODUCT, slow)
    ).to_dicts()
    assert 0.4 < row["us"] / slow[0] < 0.9


def test_attention_takes_longer_the_more_keys_it_sees():
    us = estimate(attention("bf16", 4, 1, [1000, 4000, 16000], 32, 8, 128), "H200")["us"].to_numpy()
    assert (np.diff(us) > 0).all()


def test_a_table_without_a_column_is_refused(tmp_path):
    pl.DataFrame({"device": ["h100_sxm"], "m": [1]}).write_parquet(tmp_path / "gemm.parquet")
    with pytest.raises(DproError, match=r"gemm.parquet is no table of operations: it lacks backend, kernel"):
        read_tables(tmp_path)


def test_devices_of_a_table_that_no_sheet_knows_are_named(tmp_path):
    _table_file(tmp_path)
    frame = pl.read_parquet(tmp_path / "gemm.parquet").with_columns(device=pl.lit("b60"))
    frame.write_parquet(tmp_path / "gemm.parquet")
    assert unknown_devices(tmp_path) == ["b60"]
    assert read_tables(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *[("h100_sxm", "H100"), ("h100_pcie", "H100 PCIe"), ("gb200", "GB200"), ("b200_sxm", "B200")],
        *[("a100_pcie", "A100 80GB PCIe"), ("l40s", "L40S"), ("l4", "L4"), ("b60", "")],
    ],
)
def test_names_of_devices_in_tables_are_those_of_products(name, device):
    assert device_named(name) == device


def test_what_ships_is_small_and_of_devices_that_have_a_sheet(repository):
    assert (repository / "replay" / "cost" / "kernels" / "coefficients.json").stat().st_size < 16_000
    for (kind, dtype, device), known in shipped().items():
        assert kind in {"matmul", "prefill", "decode"}
        assert device == ANY or dtype in GPUS[device].tflops
        assert known.fit.numbers.shape == known.fit.widths.shape == (10,)
        assert (known.bands.quantiles[:, 0] < known.bands.quantiles[:, 1]).all()
        assert (known.bias > 0) == (device == ANY)
    assert (half_bands("memory", "fp16", "fitted").quantiles[:, 0] < 0).all()
