"""Measured tables of communication: read, asked for what they have, for what stands in, and beyond."""

from __future__ import annotations

import os

import numpy as np
import polars as pl
import pytest

from dpro.errors import InputError, Unanswerable
from dpro.replay.cost.tables import CurveGroup, link_of_device, network_table, read_frame
from dpro.replay.cost.transfers import estimate
from tests.conftest import REPOSITORY

SIZES = [2**power for power in range(10, 28, 2)]
AT = np.array([2.0**13, 2.0**20])


def _rows(
    device: str, op: str, ranks: int, times: float = 1.0, hosts: int = 1, version: str = "2.27"
) -> pl.DataFrame:
    """A line of 10 us and 100 GB/s, all times some factor longer."""
    return pl.DataFrame(
        {
            "device": device,
            "library": "nccl",
            "library_version": version,
            "op": op,
            "gpus": ranks,
            "nodes": hosts,
            "message_bytes": SIZES,
            "latency_us": [times * (10 + size / 1e5) for size in SIZES],
        }
    )


def _table(tmp_path, *parts):
    pl.concat(parts).write_parquet(tmp_path / "t.parquet")
    return network_table(read_frame(tmp_path / "t.parquet"), "t.parquet")


def test_what_was_measured_is_said_with_an_interval_around_it(tmp_path):
    table = _table(tmp_path, _rows("h100_sxm", "alltoall", 4))
    predicted = estimate(table, CurveGroup("all_to_all", 4, 1, "h100_sxm", "nccl", "2.27"), AT)
    assert predicted.time_ns == pytest.approx(10_000 + AT / 100, rel=0.01)
    assert (predicted.low_ns < predicted.time_ns).all()
    assert (predicted.time_ns < predicted.high_ns).all()


def test_csv_with_bandwidths_and_hosts_is_read(tmp_path):
    (tmp_path / "t.csv").write_text("op,nodes,gpus,message_mb,bandwidth_gb_s\nAllReduce,2,16,256,128\n")
    (row,) = read_frame(tmp_path / "t.csv").iter_rows(named=True)
    assert (row["op"], row["hosts"], row["num_ranks"]) == ("all_reduce", 2, 16)
    assert (row["bytes"], row["time_ns"]) == (256e6, 2e6)


@pytest.mark.parametrize("missing", ["op", "gpus", "message_bytes", "latency_us"])
def test_a_missing_column_is_named(tmp_path, missing):
    _rows("h100_sxm", "all_reduce", 4).drop(missing).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match=missing):
        read_frame(tmp_path / "t.parquet")


def test_a_file_that_is_no_table_is_refused_in_one_line(tmp_path):
    (tmp_path / "t.parquet").write_bytes(b"nothing")
    with pytest.raises(InputError, match="not a readable") as error:
        read_frame(tmp_path / "t.parquet")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"op": "foo"}, r"no operation is known to dpro \(foo\)"),
        ({"gpus": 7.5}, "no row has .* a whole number of ranks"),
        ({"gpus": "eight"}, "column gpus has 'eight'"),
        ({"nodes": 0}, "no row has .* a whole number of ranks"),
        ({"latency_us": -1.0}, "no row has bytes and time above 0"),
        ({"latency_us": 1e-5}, "times are not in the unit of their column"),
        ({"latency_us": 1e300}, "times are not in the unit of their column"),
    ],
)
def test_a_table_that_says_nothing_that_can_be_is_refused_in_one_line(tmp_path, changes, why):
    rows = _rows("h100_sxm", "all_reduce", 4)
    rows.with_columns(**{name: pl.lit(value) for name, value in changes.items()}).write_parquet(
        tmp_path / "t.parquet"
    )
    with pytest.raises(InputError, match=why) as error:
        read_frame(tmp_path / "t.parquet")
    assert "\n" not in str(error.value)


def test_a_table_without_rows_is_refused(tmp_path):
    _rows("h100_sxm", "all_reduce", 4).head(0).write_parquet(tmp_path / "t.parquet")
    with pytest.raises(InputError, match="no row has bytes"):
        read_frame(tmp_path / "t.parquet")


def test_a_gpu_whose_other_curves_are_equal_stands_in(tmp_path):
    others = [
        ("all_gather", 4, 3.0),
        ("reduce_scatter", 4, 3.0),
        ("all_gather", 2, 2.0),
        ("reduce_scatter", 2, 2.0),
    ]
    both = [_rows(device, *each) for each in others for device in ("h100_sxm", "h200_sxm")]
    table = _table(tmp_path, *both, _rows("h200_sxm", "all_reduce", 8, 5.0))
    predicted = estimate(table, CurveGroup("all_reduce", 8, 1, "h100_sxm", "nccl", "2.27"), AT)
    assert predicted.how == "a GPU with the same link"
    assert predicted.time_ns == pytest.approx(5 * (10_000 + AT / 100), rel=0.01)


def test_a_gpu_with_another_link_does_not_stand_in(tmp_path):
    shared = [_rows(device, "all_gather", 4, times) for device, times in (("a100_sxm", 1), ("h100_sxm", 2.0))]
    table = _table(tmp_path, *shared, _rows("h100_sxm", "all_reduce", 8))
    with pytest.raises(Unanswerable, match="nothing like all_reduce of 8 ranks"):
        estimate(table, CurveGroup("all_reduce", 8, 1, "a100_sxm", "nccl", "2.27"), AT)


def test_behind_pcie_nothing_stands_in(tmp_path):
    table = _table(tmp_path, _rows("l40s", "all_gather", 4), _rows("l40s", "reduce_scatter", 2))
    with pytest.raises(Unanswerable, match="no switch"):
        estimate(table, CurveGroup("reduce_scatter", 4, 1, "l40s", "nccl", "2.27"), AT)


def test_sizes_far_beyond_those_measured_are_refused(tmp_path):
    table = _table(tmp_path, _rows("h100_sxm", "all_reduce", 4))
    with pytest.raises(Unanswerable, match="bytes were measured"):
        estimate(table, CurveGroup("all_reduce", 4, 1, "h100_sxm", "nccl", "2.27"), np.array([2.0**30]))


def test_more_hosts_have_an_interval_and_no_point(tmp_path):
    table = _table(
        tmp_path, _rows("h100_sxm", "all_reduce", 16, 1, 2), _rows("h100_sxm", "all_reduce", 32, 3.0, 4)
    )
    predicted = estimate(table, CurveGroup("all_reduce", 64, 8, "h100_sxm", "nccl", "2.27"), AT)
    assert predicted.time_ns is None
    assert (predicted.low_ns <= 3 * (10_000 + AT / 100)).all()
    assert (predicted.high_ns >= 9 * (10_000 + AT / 100)).all()
    with pytest.raises(Unanswerable, match="between hosts"):
        estimate(table, CurveGroup("all_gather", 64, 8, "h100_sxm", "nccl", "2.27"), AT)


@pytest.mark.parametrize(
    ("name", "link"),
    [
        ("h100_sxm", "nvlink"),
        ("NVIDIA H200", "nvlink"),
        ("h100_pcie", "pcie"),
        ("a100_pairwise_nvlink", "pcie"),
        ("L40S", ""),
    ],
)
def test_the_name_of_a_device_says_its_link_or_nothing(name, link):
    assert link_of_device(name) == link


@pytest.fixture(scope="module")
def reality():
    """Folder of measured tables of other people's machines; not part of the repository."""
    from pathlib import Path

    folder = Path(os.environ.get("DPRO_REALITY", REPOSITORY.parent / "shared" / "reality"))
    if not folder.is_dir():
        pytest.skip(f"no measured tables in {folder} (DPRO_REALITY names another folder)")
    return folder


@pytest.mark.parametrize("file", ["collectives.parquet", "vidur_network.parquet", "ultrascale_network.csv"])
def test_published_tables_are_read_as_they_are(reality, file):
    rows = read_frame(reality / file)
    assert rows["time_ns"].min() > 0
    assert set(rows["op"]) <= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"}
    assert (rows["hosts"] <= rows["num_ranks"]).all()


def test_sizes_left_out_of_published_nccl_curves_are_said_within_the_bars(reality):
    from benchmarks.curves import SIZES as BARS
    from benchmarks.curves import errors_result, points, sizes_left_out

    rows = read_frame(reality / "collectives.parquet").filter(pl.col("library") == "nccl")
    tried = sizes_left_out(points(rows))
    assert errors_result(tried.errors, BARS)["holds"], errors_result(tried.errors, BARS)
    assert np.mean(tried.inside) >= 0.85


def test_boxes_without_a_switch_are_refused_on_published_tables(reality):
    rows = read_frame(reality / "collectives.parquet")
    table = network_table(rows, "published")
    for device in ("l40s", "rtx_pro_6000_server"):
        with pytest.raises(Unanswerable, match="no switch"):
            estimate(table, CurveGroup("all_reduce", 4, 1, device, "nccl", "2.27.3"), AT)
