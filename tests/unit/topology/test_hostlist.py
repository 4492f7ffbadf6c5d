"""Lists of names in brackets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.errors import UsageError
from dpro.topology.hostlist import expand, fold


def test_a_range_keeps_its_leading_zeros() -> None:
    assert expand("node[008-010,7]") == ["node008", "node009", "node010", "node7"]


def test_brackets_multiply_and_commas_separate() -> None:
    assert expand("rack[1-2]node[1-2], login") == [
        "rack1node1", "rack1node2", "rack2node1", "rack2node2", "login",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("node[1-", "brackets"),
        ("node]1[", "brackets"),
        ("node[[1]]", "brackets"),
        ("node[a-b]", "neither a number nor a range"),
        ("node[3-1]", "ends before"),
        ("node[1-99999999]", "names"),
        ("a[1-2000]b[1-2000]", "names"),
    ],
)
def test_what_is_no_list_is_named(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        expand(text)


def test_neighbours_fold_into_ranges() -> None:
    assert fold(["n08", "n09", "n10", "n12", "login", "n1"]) == "n[08-10,12],login,n1"


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}", fullmatch=True), max_size=20))
def test_folded_names_expand_to_themselves(names: list[str]) -> None:
    assert expand(fold(names)) == names
