"""The median of a rank's peers, of all ranks at once."""

from __future__ import annotations

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from dpro.replay.peers import peer_medians, peers_of, ranks_of_teams, teams_by_work, teams_in_groups

VALUES = st.tuples(st.integers(0, 3), st.integers(0, 9), st.booleans())  # group, value, whether it counts


@given(st.lists(VALUES, max_size=12), st.integers(0, 3))
def test_the_median_of_others_is_that_of_all_values_of_the_group_that_count_but_its_own(rows, absent):
    group, value, counts = (np.array([row[at] for row in rows], np.int64) for at in range(3))
    found: list[list[int]] = []
    for at in range(len(rows)):
        theirs = (group == group[at]) & (counts == 1)
        theirs[at] = False
        found.append([*value[theirs].tolist(), *[0] * absent])
    others = np.array([len(each) for each in found], np.int64)
    medians = peer_medians(group, value, counts == 1, others)
    assert medians.tolist() == [float(np.median(each)) if each else 0.0 for each in found]


def test_peers_are_the_others_of_a_team_and_those_set_apart_do_not_count():
    teams = [[4, 1, 3], [0], [2, 5]]
    assert [peers_of(teams, rank) for rank in (1, 0, 2, 7)] == [[4, 3], [], [5], []]
    known = ranks_of_teams(teams, without=[1, 5])
    assert known["rank"].to_list() == [0, 1, 2, 3, 4, 5]
    assert known["others"].to_list() == [0, 2, 0, 1, 1, 1]


def test_a_lone_rank_is_a_team_without_peers():
    rows = [(0, 1, 5), (1, 1, 5), (2, 1, 6), (3, 2, 5)]  # as many phases, and the same calls
    work = pl.DataFrame(rows, ["rank", "position", "calls"], orient="row")
    assert teams_by_work(work) == [[0, 1], [2], [3]]


def test_ranks_that_wait_for_each_other_are_of_one_kind_and_none_waits_for_itself():
    kinds = {0: "a", 1: "a", 2: "b", 3: "a", 4: "a", 5: "b"}
    assert teams_in_groups(kinds, [[0, 1, 2], [1, 3, 9], [4, 5]]) == [[0, 1, 3]]
    assert teams_in_groups(kinds, [[2, 5]]) == [[2, 5]]
