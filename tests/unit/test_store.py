"""Run directories: what is written is what is read."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.errors import InputError
from dpro.schema import COLLECTIVES, STEPS, TABLES, conform
from dpro.store import (
    FORMAT_VERSION,
    Manifest,
    is_run,
    merge_counts,
    open_run,
    write_manifest,
    write_part,
)
from dpro.table import SchemaError

GROUPS = st.sampled_from(["", "0", "0-7", "0-56:8", "3,1"])


def _column(dtype: pl.DataType) -> st.SearchStrategy[object]:
    if isinstance(dtype, pl.Enum):
        return st.sampled_from(dtype.categories.to_list())
    if isinstance(dtype, pl.List):
        return st.lists(_column(dtype.inner), max_size=4)
    if dtype == pl.String:
        return st.text(max_size=10)
    if dtype == pl.Float64:
        return st.floats(allow_nan=False)
    if dtype == pl.Boolean:
        return st.booleans()
    return st.integers(-1, 2**31 - 1) if dtype == pl.Int32 else st.integers(-1, 2**63 - 1)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
@given(data=st.data())
@settings(max_examples=25)
def test_what_is_written_is_read_back(table, data):
    _write_and_read(table, data)


@pytest.mark.slow
@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.name)
@given(data=st.data())
def test_whatever_is_written_is_read_back(table, data):
    _write_and_read(table, data)


def _write_and_read(table, data):
    row = st.fixed_dictionaries(
        {name: GROUPS if name == "group_ranks" else _column(dtype) for name, dtype in table.dtypes.items()}
    )
    frame = pl.DataFrame(data.draw(st.lists(row, min_size=1, max_size=5)), schema=table.dtypes)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        write_part(run, table, "rank00000", frame)
        write_manifest(run, Manifest(world_size=1, ranks=[0]))
        opened = open_run(run)
        assert opened.table(table).equals(conform(table, frame))
        assert opened.rows()[table.name] == frame.height


def test_parts_of_several_ranks_are_one_sorted_table(tmp_path):
    for rank in (1, 0):
        write_part(tmp_path, STEPS, f"rank{rank:05d}", pl.DataFrame({"rank": [rank], "step": [3]}))
    write_manifest(tmp_path, Manifest(world_size=2, ranks=[0, 1]))
    assert open_run(tmp_path).table(STEPS)["rank"].to_list() == [0, 1]


@pytest.mark.parametrize("odd", ["as declared", "older", "newer", "of other types", "in no order"])
def test_a_table_is_the_same_whether_its_parts_are_read_at_once_or_one_by_one(tmp_path, monkeypatch, odd):
    whole = [conform(STEPS, pl.DataFrame({"rank": [rank] * 3, "step": [1, 1, 2]})) for rank in range(3)]
    change: dict[str, Callable[[pl.DataFrame], pl.DataFrame]] = {
        "as declared": lambda frame: frame.with_columns(
            start_ns=pl.int_range(3)
        ),  # of equal keys the order counts
        "older": lambda frame: frame.drop("source", "window"),
        "newer": lambda frame: frame.with_columns(pl.lit(1).alias("something new")),
        "of other types": lambda frame: frame.with_columns(pl.col("step").cast(pl.Int16)),
        "in no order": lambda frame: frame.reverse(),
    }
    (tmp_path / "steps").mkdir()
    for number, frame in enumerate([whole[2], change[odd](whole[0]), whole[1]]):
        frame.write_parquet(tmp_path / "steps" / f"rank{number:05}.parquet")
    write_manifest(tmp_path, Manifest(world_size=3, ranks=[0, 1, 2]))
    at_once = open_run(tmp_path).table(STEPS)
    monkeypatch.setattr("dpro.store._read_at_once", lambda *_: None)
    assert at_once.equals(open_run(tmp_path).table(STEPS))
    assert at_once["rank"].to_list() == [0] * 3 + [1] * 3 + [2] * 3


def test_of_several_parts_the_damaged_one_is_named(tmp_path):
    for rank in range(3):
        write_part(tmp_path, STEPS, f"rank{rank:05d}", pl.DataFrame({"rank": [rank], "step": [3]}))
    write_manifest(tmp_path, Manifest(world_size=3, ranks=[0, 1, 2]))
    part = tmp_path / "steps" / "rank00001.parquet"
    whole = part.read_bytes()
    part.write_bytes(whole[:40])
    for ask in (lambda: open_run(tmp_path).table(STEPS), lambda: open_run(tmp_path).num_rows(STEPS)):
        with pytest.raises(InputError, match=r"rank00001\.parquet"):
            ask()
    pl.read_parquet(whole).with_columns(step=pl.lit(None, pl.Int64)).write_parquet(part)
    with pytest.raises(InputError, match=r"rank00001\.parquet: damaged"):
        open_run(tmp_path).table(STEPS)


def test_an_empty_frame_writes_no_file(tmp_path):
    assert write_part(tmp_path, COLLECTIVES, "rank00000", COLLECTIVES.empty()) == 0
    assert list(tmp_path.iterdir()) == []


def test_writing_leaves_no_temporary_file(tmp_path):
    write_part(tmp_path, STEPS, "rank00000", pl.DataFrame({"step": [3]}))
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "manifest.json",
        "rank00000.parquet",
    ]


def test_parts_say_that_no_value_is_null_and_between_what_their_rows_lie(tmp_path):
    write_part(tmp_path, STEPS, "rank00000", pl.DataFrame({"rank": [0], "step": [3], "start_ns": [5]}))
    written = pq.ParquetFile(tmp_path / "steps" / "rank00000.parquet")
    assert not any(field.nullable for field in written.schema_arrow)
    columns = [written.metadata.row_group(0).column(at) for at in range(len(STEPS.columns))]
    assert [each.path_in_schema for each in columns if each.statistics] == [
        name for name in STEPS.columns if name in STEPS.sort_by
    ]


def test_the_manifest_says_which_ranks_are_missing(tmp_path):
    write_manifest(tmp_path, Manifest(world_size=4, ranks=[0, 2]))
    assert open_run(tmp_path).manifest.missing_ranks == [1, 3]
    assert json.loads((tmp_path / "manifest.json").read_text())["missing_ranks"] == [1, 3]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "not a run manifest"),
        ("{}", "not a run manifest"),
        (
            f'{{"format_version": {FORMAT_VERSION + 1}, "world_size": 1, "ranks": []}}',
            "which needs a newer dpro",
        ),
    ],
)
def test_a_manifest_that_is_not_one_is_one_line(tmp_path, content, what):
    (tmp_path / "manifest.json").write_text(content)
    assert is_run(tmp_path)
    with pytest.raises(InputError, match=what):
        open_run(tmp_path)


def test_what_is_no_run_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(InputError, match="not a run directory"):
        open_run(tmp_path)


def test_a_damaged_part_is_named(tmp_path):
    write_part(tmp_path, STEPS, "rank00000", pl.DataFrame({"step": [3]}))
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    part = tmp_path / "steps" / "rank00000.parquet"
    part.write_bytes(part.read_bytes()[:40])
    with pytest.raises(InputError, match=r"rank00000\.parquet"):
        open_run(tmp_path).table(STEPS)
    with pytest.raises(InputError, match=r"rank00000\.parquet"):
        open_run(tmp_path).rows()


def test_counts_add_up_by_reason():
    assert merge_counts([{"b": 1}, {"a": 2, "b": 3}, {}]) == {"a": 2, "b": 4}


def test_some_columns_of_all_parts_are_read_at_once(tmp_path):
    for rank in (1, 0):
        rows = pl.DataFrame({"rank": [rank], "step": [7], "start_ns": [5], "duration_ns": [3]})
        write_part(tmp_path, STEPS, f"rank{rank:05d}", rows)
    write_manifest(tmp_path, Manifest(world_size=2, ranks=[0, 1]))
    read = open_run(tmp_path).table(STEPS, ["rank", "duration_ns"])
    assert read.to_dict(as_series=False) == {"rank": [0, 1], "duration_ns": [3, 3]}


def test_columns_that_an_older_part_lacks_have_their_default(tmp_path):
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    (tmp_path / "steps").mkdir()
    old = conform(STEPS, pl.DataFrame({"rank": [0], "step": [7]})).drop("source", "window")
    old.write_parquet(tmp_path / "steps" / "rank00000.parquet")
    read = open_run(tmp_path).table(STEPS, ["step", "window", "source"])
    assert read.rows() == [(7, -1, "")]


def test_a_part_that_is_damaged_is_named_also_where_few_columns_are_read(tmp_path):
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "rank00000.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(InputError, match="rank00000"):
        open_run(tmp_path).table(STEPS, ["step"])


@pytest.mark.parametrize(
    "changed",
    [
        {"world_size": "two"},
        {"world_size": -1},
        {"world_size": 1 << 40},
        {"ranks": {"0": 1}},
        {"ranks": [0, "1"]},
        {"ranks": [-1]},
        {"hosts": "node0"},
        {"versions": [1]},
        {"warnings": [{}]},
        {"skipped": {"a": "b"}},
        {"format_version": "1"},
        {"exit_status": "0"},
        {"applied": [1]},
        {"windows": {"count": None}},
        {"options": {"pretend": 3}},
        {"options": {"pretend": {"per_host": 0}}},
    ],
    ids=str,
)
def test_a_manifest_with_a_field_of_another_type_is_one_line(tmp_path, changed):
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(InputError, match=r"manifest\.json: not a run manifest") as caught:
        open_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_part_with_other_types_or_nulls_is_the_files_fault(tmp_path):
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    (tmp_path / "steps").mkdir()
    part = tmp_path / "steps" / "rank00000.parquet"
    for column in (
        pl.Series("step", ["many"]),
        pl.Series("step", [{"a": 1}]),
        pl.Series("step", [[1]]),
        pl.Series("step", [1 << 100], dtype=pl.Int128),
        pl.Series("step", [None], dtype=pl.Int64),
        pl.Series("duration_ns", [-7]),
    ):
        pl.DataFrame([column]).write_parquet(part)
        with pytest.raises(InputError, match=r"rank00000\.parquet: ") as caught:
            open_run(tmp_path).table(STEPS)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["x", "0,x", "[0, 1]", "7-0", "0-999999999", "x" * 1000])
def test_ranks_of_groups_that_are_none_are_the_files_fault_and_are_not_written(tmp_path, text):
    rows = pl.DataFrame({"rank": [0, 0], "group_ranks": ["0-7", text]}, schema_overrides={"rank": pl.Int32})
    with pytest.raises(SchemaError, match="table collectives: group_ranks is "):
        write_part(tmp_path, COLLECTIVES, "rank00000", rows)
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    (tmp_path / "collectives").mkdir()
    rows.write_parquet(tmp_path / "collectives" / "rank00000.parquet")
    with pytest.raises(InputError, match=r"rank00000\.parquet: damaged, or not written by dpro") as caught:
        open_run(tmp_path).table(COLLECTIVES)
    assert "as `0-7`, `0-56:8` or `0,3`; empty where unknown" in str(caught.value)
    assert len(str(caught.value)) < len(str(tmp_path)) + 300


def test_what_is_no_file_is_not_read_as_a_part(tmp_path):
    """A pipe would wait for ever."""
    write_part(tmp_path, STEPS, "rank00000", pl.DataFrame({"rank": [0], "step": [3]}))
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    os.mkfifo(tmp_path / "steps" / "rank00001.parquet")
    (tmp_path / "steps" / "rank00002.parquet").mkdir()
    run = open_run(tmp_path)
    assert run.table(STEPS)["step"].to_list() == run.table(STEPS, ["step"])["step"].to_list() == [3]
    assert run.rows()["steps"] == 1
    assert [part.height for part in run.part_by_part(STEPS, ["step"])] == [1]


def test_a_part_that_holds_more_rows_than_its_bytes_can_is_refused(tmp_path, monkeypatch):
    write_manifest(tmp_path, Manifest(world_size=2, ranks=[0, 1]))
    write_part(tmp_path, STEPS, "rank00000", pl.DataFrame({"rank": [0], "step": [3]}))
    rows = conform(STEPS, pl.DataFrame({"rank": [1] * 200_000, "step": [1] * 200_000}))
    rows.write_parquet(tmp_path / "steps" / "rank00001.parquet", compression="zstd")
    run = open_run(tmp_path)
    assert run.rows()["steps"] == 200_001
    monkeypatch.setattr("dpro.store.MIN_ROWS", 1000)
    for read in (lambda: run.table(STEPS), lambda: run.table(STEPS, ["step"]), run.rows):
        with pytest.raises(InputError, match=r"rank00001.parquet: claims 200,000 rows in"):
            read()


def test_a_run_whose_path_no_reader_takes_is_refused(tmp_path):
    write_manifest(folder := tmp_path / "run\udcff", Manifest(world_size=1, ranks=[0]))
    with pytest.raises(InputError, match="the path of a run must be UTF-8"):
        open_run(folder)


def test_a_part_whose_name_dpro_never_wrote_is_not_read(tmp_path):
    write_part(tmp_path, STEPS, "rank00000", pl.DataFrame({"rank": [0], "step": [3]}))
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    shutil.copy(tmp_path / "steps" / "rank00000.parquet", tmp_path / "steps" / "rank\udcff.parquet")
    assert open_run(tmp_path).table(STEPS).height == 1


def test_a_manifest_of_gigabytes_is_not_read(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(InputError, match=r"manifest.json: is larger than 67"):
        open_run(tmp_path)


def test_a_part_with_a_column_of_another_type_is_named_also_where_few_columns_are_read(tmp_path):
    write_manifest(tmp_path, Manifest(world_size=1, ranks=[0]))
    (tmp_path / "steps").mkdir()
    pl.DataFrame({"step": ["many"]}).write_parquet(tmp_path / "steps" / "rank00000.parquet")
    with pytest.raises(InputError, match=r"rank00000\.parquet: damaged"):
        open_run(tmp_path).table(STEPS, ["step"])
