"""Ranks of groups as text: what is written is what is read, and it is short."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.limits import MAX_RANKS
from dpro.members import count_of, members_of, members_text
from dpro.schema import COLLECTIVES, conform
from dpro.schema.members import num_members, sorted_members, texts_of_lists
from dpro.store import Manifest, open_run, write_manifest, write_part
from dpro.table import SchemaError

RANKS = st.lists(st.integers(0, 300) | st.integers(0, MAX_RANKS - 1), max_size=40, unique=True)
RUNS = st.lists(st.builds(range, st.integers(0, 99), st.integers(0, 400), st.integers(1, 9)), max_size=4)


@given(RANKS | RUNS.map(lambda runs: [rank for run in runs for rank in run]))
def test_ranks_are_read_in_the_order_in_which_they_were_written(ranks):
    ranks = list(dict.fromkeys(ranks))
    text = members_text(ranks)
    assert list(members_of(text)) == ranks
    assert count_of(text) == len(ranks)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ((), ""),
        ((5,), "5"),
        ((0, 1), "0,1"),
        (range(8), "0-7"),
        (range(0, 10_240, 8), "0-10232:8"),
        ((0, 1, 2, 8, 9, 10), "0-2,8-10"),
        ((0, 2, 3, 4), "0,2-4"),
        ((3, 2, 1, 0), "3,2,1,0"),
    ],
)
def test_what_lies_apart_by_the_same_is_a_range(ranks, text):
    assert members_text(ranks) == text


@pytest.mark.parametrize("ranks", [(0, -1), (0, MAX_RANKS), (0, None), [0] * 500_000])
def test_ranks_that_no_group_has_are_unknown(ranks):
    assert members_text(ranks) == ""


@pytest.mark.parametrize(
    "text", ["x", "1,", "5-3", "-1", "0-999999999", ",".join(["0-262143"] * 2), "1 2", "٣"]
)
def test_a_text_that_says_no_ranks_says_none(text):
    assert members_of(text) == ()
    assert count_of(text) == 0


def test_columns_are_counted_and_sorted_text_by_text():
    frame = pl.DataFrame({"group_ranks": ["0-7", "", None, "3,1", "0-7"], "of": [1, 1, 2, 2, 2]})
    assert frame.select(num_members())["group_ranks"].to_list() == [8, 0, None, 2, 8]
    assert frame.select(sorted_members())["group_ranks"].to_list() == ["0-7", "", None, "1,3", "0-7"]
    assert frame.select(num_members().max().over("of"))["group_ranks"].to_list() == [8, 8, 8, 8, 8]
    assert frame.clear().select(num_members())["group_ranks"].to_list() == []


def test_lists_become_texts_and_what_is_no_list_of_numbers_is_refused():
    lists = [[0, 1, 2], [], None, [2, 0], [0, 1, 2], [0, None]]
    assert texts_of_lists(pl.Series(lists)).to_list() == ["0-2", "", None, "2,0", "0-2", ""]
    with pytest.raises(SchemaError):
        conform(COLLECTIVES, pl.DataFrame({"group_ranks": [["a"]]}))


@pytest.mark.parametrize("columns", [None, ["rank", "group_ranks"], ["rank", "group"]])
def test_a_run_that_lists_the_ranks_in_each_row_is_read_as_one_that_does_not(tmp_path, columns):
    ranks = [[0, 1, 2, 3], [], [1, 3]]
    rows = conform(COLLECTIVES, pl.DataFrame({"group": ["a", "b", "c"], "group_ranks": ranks}))
    for name, number in (("old", 1), ("new", 2)):
        write_manifest(tmp_path / name, Manifest(world_size=4, ranks=[0], format_version=number))
        write_part(tmp_path / name, COLLECTIVES, "rank00000", rows)
    lists = rows.with_columns(group_ranks=pl.Series(ranks, dtype=pl.List(pl.Int32)))
    lists.write_parquet(tmp_path / "old" / "collectives" / "rank00000.parquet")
    old, new = (open_run(tmp_path / name).table(COLLECTIVES, columns) for name in ("old", "new"))
    assert old.equals(new)
    assert old.schema == new.schema


def test_a_call_of_ten_thousand_ranks_takes_no_more_room_than_one_of_eight(tmp_path):
    sizes = []
    for num_ranks in (8, 10_240):
        text = members_text(range(num_ranks))
        rows = pl.DataFrame({"collective_id": range(5000), "group": "0", "group_ranks": text})
        write_part(tmp_path, COLLECTIVES, f"rank{num_ranks}", rows)
        sizes.append((tmp_path / "collectives" / f"rank{num_ranks}.parquet").stat().st_size)
    assert sizes[1] < sizes[0] + 100
