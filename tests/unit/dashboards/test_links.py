"""A link reproduces a view: the selection survives a round trip through the query."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.dashboards.links import Link, parse_link
from dpro.errors import UsageError
from dpro.selection import ranges_of

numbers = st.integers(0, 5000)
links = st.builds(
    Link,
    view=st.sampled_from(["verdict", "timeline", "kernels"]),
    run=st.text(max_size=9),
    against=st.text(max_size=9),
    steps=st.sets(numbers, max_size=9).map(ranges_of),
    ranks=st.sets(numbers, max_size=9).map(lambda ranks: tuple(sorted(ranks))),
    time_ms=st.none() | st.tuples(numbers, st.integers(1, 99)).map(lambda t: (t[0] / 8, t[0] / 8 + t[1])),
    theme=st.sampled_from(["light", "dark"]),
    options=st.dictionaries(st.sampled_from(["filter", "edit"]), st.text(min_size=1, max_size=20)),
)


@given(links)
def test_a_link_says_what_it_was_made_from(link):
    assert parse_link(link.query()) == link


def test_runs_of_ranks_and_single_steps_are_short():
    assert Link(steps=((4, 4),), ranks=(0, 1, 2, 5)).query() == "?steps=4&ranks=0-2,5"
    assert parse_link("?steps=9,3-5,4-6").query() == "?steps=3-6,9"


@pytest.mark.parametrize(
    "query", ["?steps=x", "?steps=5-3", "?ranks=1;2", "?ranks=0-99999999999", "?time=2~1", "?time=nan~1"]
)
def test_a_selection_that_makes_no_sense_is_named(query):
    with pytest.raises(UsageError, match=query[1:5]):
        parse_link(query)


def test_a_selection_is_of_the_columns_that_a_frame_has():
    frame = pl.DataFrame({"rank": [0, 0, 1, 1], "step": [3, 4, 3, 4]})
    link = parse_link("?ranks=1&steps=4")
    assert link.chosen(frame).rows() == [(1, 4)]
    assert link.chosen(frame.select("rank")).rows() == [(1,), (1,)]
    assert parse_link("?steps=4,6").chosen(frame)["step"].to_list() == [4, 4]
    assert Link().chosen(frame).equals(frame)
