"""What an importer hands over."""

from __future__ import annotations

import polars as pl
import pytest

from dpro.ingest.trace import RankTrace
from dpro.schema import SPANS
from dpro.table import SchemaError


def test_columns_get_their_declared_types():
    frame = pl.DataFrame({"kind": ["kernel"], "rank": [3], "device": [None], "start_ns": [5]})
    spans = RankTrace(3, -1, {"spans": frame}).frames["spans"]
    assert spans.schema == {name: SPANS.dtypes[name] for name in ("kind", "rank", "device", "start_ns")}
    assert spans.rows() == [("kernel", 3, None, 5)]


def test_a_number_that_is_too_large_for_its_column_is_none():
    frame = pl.DataFrame({"device": [0, 1 << 40], "stream": [0, 1 << 40]})
    assert RankTrace(0, -1, {"spans": frame}).frames["spans"].rows() == [(0, 0), (-1, 1 << 40)]


def test_a_frame_without_columns_has_no_rows():
    spans = RankTrace(0, -1, {"spans": pl.DataFrame()}).frames["spans"]
    assert spans.height == 0


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ({"spans": {"colour": ["red"]}}, "undeclared columns colour"),
        ({"spans": {"start_ns": ["now"]}}, "table spans"),
        ({"spans": {"start_ns": [{"a": 1}]}}, "start_ns is Struct"),
        ({"dreams": {"rank": [1]}}, "no table dreams"),
    ],
)
def test_what_is_not_declared_is_a_defect_and_not_the_files_fault(frames, what):
    with pytest.raises(SchemaError, match=f"internal error: .*{what}.*please report it"):
        RankTrace(0, -1, {name: pl.DataFrame(columns) for name, columns in frames.items()})
