"""The declarations, and what `conform` lets through."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.schema import SPANS, STEPS, TABLES, conform
from dpro.table import SchemaError
from tests.conftest import REPOSITORY
from tests.schema_page import page


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
def test_every_column_says_what_it_is_and_sorting_uses_declared_columns(table):
    assert all(column.doc.endswith((".", "…")) for column in table.columns.values())
    assert set(table.sort_by) <= set(table.columns)
    assert conform(table, table.empty()).equals(table.empty())


def test_columns_a_source_does_not_have_get_their_default():
    row = conform(STEPS, pl.DataFrame({"step": [4], "start_ns": [10]})).row(0, named=True)
    unknown = {"beside": -1, "duration_ns": -1, "source": "", "gpu_step_ns": -1}
    assert row == {"rank": -1, "step": 4, "window": -1, "start_ns": 10, **unknown}


def test_an_undeclared_column_is_refused():
    with pytest.raises(SchemaError, match="colour"):
        conform(STEPS, pl.DataFrame({"step": [1], "colour": ["red"]}))


@pytest.mark.parametrize(
    ("frame", "what"),
    [
        ({"step": ["many"]}, "many"),
        ({"step": [None], "start_ns": [7]}, "nulls in step"),
        ({"step": [1], "duration_ns": [-5]}, "negative duration"),
    ],
)
def test_a_value_that_does_not_fit_is_named(frame, what):
    with pytest.raises(SchemaError, match=what):
        conform(STEPS, pl.DataFrame(frame))


_SPAN_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "span_id": st.integers(0, 2**62),
            "start_ns": st.integers(-(2**62), 2**62),
            "duration_ns": st.integers(-1, 2**62),
            "kind": st.sampled_from(["kernel", "cpu_op", "python"]),
            "name": st.text(),
        }
    ),
    max_size=20,
)


@given(_SPAN_ROWS)
def test_conforming_sorts_keeps_every_value_and_changes_nothing_the_second_time(rows):
    frame = (
        pl.DataFrame(rows, schema_overrides={"span_id": pl.Int64, "start_ns": pl.Int64})
        if rows
        else SPANS.empty()
    )
    once = conform(SPANS, frame)
    assert once.schema == SPANS.dtypes
    assert once.select("start_ns", "span_id").rows() == sorted(once.select("start_ns", "span_id").rows())
    named = ("span_id", "start_ns", "duration_ns", "kind", "name")
    assert sorted(once.select(named).rows()) == sorted(tuple(row[name] for name in named) for row in rows)
    assert conform(SPANS, once).equals(once)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3)), max_size=12), st.booleans()
)
def test_rows_come_out_in_declared_order_whether_they_went_in_so_or_not(rows, sorted_before):
    rows = sorted(rows) if sorted_before else rows
    frame = pl.DataFrame(
        {
            "rank": [rank for rank, _, _ in rows],
            "start_ns": [start for _, start, _ in rows],
            "span_id": [span for _, _, span in rows],
            "duration_ns": [0] * len(rows),
        },
        schema={"rank": pl.Int32, "start_ns": pl.Int64, "span_id": pl.Int64, "duration_ns": pl.Int64},
    )
    out = conform(SPANS, frame).select("rank", "start_ns", "span_id").rows()
    assert out == sorted(rows)


def test_the_page_of_the_tables_is_what_their_declarations_generate():
    assert (REPOSITORY / "docs" / "schema.md").read_text() == page(), "run `make schema`"


def test_a_row_of_the_page_has_type_unit_default_and_meaning():
    rows = page().splitlines()
    assert "| `gpu_step_ns` | int64 | ns | `-1` | " in "\n".join(rows)
    assert "| `names` | list of string |  |  | Their names; empty where unknown. |" in rows
    assert any(row.startswith("| `kind` | one of `event_record`, ") for row in rows)
