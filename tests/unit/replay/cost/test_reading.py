"""Tables of users: every column becomes numbers or names, or one line says which holds what instead."""

from __future__ import annotations

import os
from datetime import timedelta

import polars as pl
import pytest

from dpro.errors import InputError
from dpro.replay.cost.tables import read_measured

GOOD = pl.DataFrame({"op": ["a", "b"], "us": [1, 2], "more": [3.0, 4.0]})


def written(folder, frame: pl.DataFrame):
    frame.write_parquet(folder / "t.parquet")
    return folder / "t.parquet"


def test_columns_that_are_asked_for_become_numbers_and_names(tmp_path):
    said = GOOD.with_columns(pl.col("us").cast(pl.String), pl.col("op").cast(pl.Categorical))
    read = read_measured(written(tmp_path, said), ("us", "not there"), ("op",))
    assert read.schema == pl.Schema({"us": pl.Float64, "op": pl.String})
    assert read.rows() == [(1.0, "a"), (2.0, "b")]


def test_what_is_not_there_is_null_in_either_format(tmp_path):
    (tmp_path / "t.csv").write_text("op,us\na,\n,2\n")
    rows = [(None, "a"), (2.0, None)]
    assert read_measured(tmp_path / "t.csv", ("us",), ("op",)).rows() == rows
    frame = pl.DataFrame({"op": ["a", None], "us": [None, 2]})
    assert read_measured(written(tmp_path, frame), ("us",), ("op",)).rows() == rows


@pytest.mark.parametrize(
    ("column", "why"),
    [
        (pl.lit("ten").alias("us"), "column us has 'ten', which is not a number"),
        (pl.lit([1, 2]).alias("us"), "column us has List.* instead of numbers"),
        (pl.lit(True).alias("us"), "column us has Boolean instead of numbers"),
        (pl.lit(timedelta(seconds=1)).alias("us"), "column us has Duration.* instead of numbers"),
        (pl.struct("us", "more").alias("op"), "column op has Struct.* instead of names"),
        (pl.lit(b"\xff\xfe").alias("op"), "column op has Binary instead of names"),
    ],
)
def test_a_column_of_another_kind_is_named_in_one_line(tmp_path, column, why):
    with pytest.raises(InputError, match=why) as refused:
        read_measured(written(tmp_path, GOOD.with_columns(column)), ("us",), ("op",))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("damage", ["truncated", "empty", "other bytes", "a pipe", "not there", "a folder"])
@pytest.mark.parametrize("name", ["t.parquet", "t.csv"])
def test_a_file_that_cannot_be_read_is_said_in_one_line(tmp_path, name, damage):
    file = tmp_path / name
    whole = written(tmp_path, GOOD).read_bytes()
    file.unlink(missing_ok=True)
    if damage == "a folder":
        file.mkdir()
    elif damage == "a pipe":
        os.mkfifo(file)
    elif damage != "not there":
        file.write_bytes(
            {"truncated": whole[: len(whole) // 2], "empty": b"", "other bytes": bytes(range(256))}[damage]
        )
    with pytest.raises(InputError, match=r"not a readable Parquet or CSV table|cannot be read") as refused:
        read_measured(file, ("us",), ("op",))
    assert "\n" not in str(refused.value)
    assert str(file) in str(refused.value)
