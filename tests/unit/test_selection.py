"""Steps and ranks as options and links write them."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import UsageError
from dpro.selection import RankChoice, Selection, parse_ranges, parse_rank_choice, ranges_of, ranges_text


def test_lists_and_ranges_are_merged_in_order():
    assert parse_ranges("3-8", "steps") == ((3, 8),)
    assert parse_ranges(" 9, 3 ,4,5 - 5,7-8", "steps") == ((3, 5), (7, 9))
    assert parse_ranges("", "ranks") == ()


@given(st.sets(st.integers(0, 300), max_size=40))
def test_what_is_written_is_what_is_read(numbers):
    ranges = ranges_of(numbers)
    assert parse_ranges(ranges_text(ranges), "steps") == ranges
    assert {number for first, last in ranges for number in range(first, last + 1)} == numbers
    frame = pl.DataFrame({"step": list(range(301))})
    kept = Selection(steps=ranges).keep(frame)["step"].to_list()
    assert kept == (sorted(numbers) or list(range(301)))


@pytest.mark.parametrize("text", ["x", "5-3", "1;2", "0-99999999999", "5-", "-5", "1--2", "٣x", "1\x1b[2J"])
def test_what_is_no_list_is_named_on_one_line(text):
    with pytest.raises(UsageError, match=r"ranks .* are invalid") as error:
        parse_ranges(text, "ranks")
    assert "\x1b" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("0,2-3", RankChoice(ranks=((0, 0), (2, 3)))),
        ("tp=0", RankChoice(places=(("tp", ((0, 0),)),))),
        ("dp=0-3,5,pp=1", RankChoice(places=(("dp", ((0, 3), (5, 5))), ("pp", ((1, 1),))))),
        ("", RankChoice()),
    ],
)
def test_ranks_are_chosen_by_number_or_by_place(text, choice):
    assert parse_rank_choice(text) == choice
    assert str(choice) == text
    assert bool(choice) == bool(text)


@pytest.mark.parametrize("text", ["tp=", "=0", "0,tp=1", "tp=0,tp=1", "tp=x", "tp=3-1", "tp==0", "\x1b=0"])
def test_places_that_are_not_understood_are_named_on_one_line(text):
    with pytest.raises(UsageError, match=r"ranks .* are invalid") as error:
        parse_rank_choice(text)
    assert "\x1b" not in str(error.value)


def test_a_frame_is_filtered_by_the_columns_it_has():
    frame = pl.DataFrame({"rank": [0, 0, 1, 1], "step": [3, 4, 3, 4]})
    selection = Selection(steps=((4, 4),), ranks=((1, 9),))
    assert selection.keep(frame).rows() == [(1, 4)]
    assert selection.keep(frame.select("rank")).rows() == [(1,), (1,)]
    assert selection.has_rank(1)
    assert not selection.has_rank(0)


def test_a_selection_of_nothing_says_what_there_is():
    recorded = pl.DataFrame({"rank": [0, 1] * 5, "step": [5, 5, 6, 6, 7, 7, 30, 30, -1, -1]})
    with pytest.raises(UsageError) as error:
        Selection(steps=((8, 9),), ranks=((1, 1),)).checked(recorded)
    assert str(error.value) == (
        "--steps 8-9 --ranks 1 selects nothing; steps recorded in depth: 5-7, 30; ranks 0-1"
    )
    with pytest.raises(UsageError, match=r"steps recorded in depth: none; ranks 0$"):
        Selection(steps=((1, 1),)).checked(pl.DataFrame({"rank": [0], "step": [-1]}))
