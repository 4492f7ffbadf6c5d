"""The best two edits together, against a replay of every pair."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.graph import Graph
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import facts_of
from dpro.replay.whatif.registry import parse_edit
from dpro.replay.whatif.search import (
    EQUAL_SHARE,
    MIN_GAIN,
    EditSets,
    best_pair,
    bounds_of,
    can_combine,
    candidates,
)
from tests.unit.replay.whatif.test_every_edit import NAMES, TABLES, job  # noqa: F401

pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # of durations that are no numbers
TEXTS = sorted({text for texts in TABLES.values() for text in texts})


def _sets(graph: Graph, edits: Sequence[Edit]) -> tuple[EditSets, list[Edit]]:
    """As the search begins to look for pairs: what may gain was replayed by itself."""
    facts = facts_of(graph)
    bounds, _ = bounds_of(facts, edits)
    tried = [edit for edit, bound in bounds.items() if bound > MIN_GAIN * facts.base_ns]
    sets = EditSets(facts, cast(Trust, None))  # which only predictions ask for
    gains, _ = sets.single_gains(tried, 10_000)
    return sets, [edit for edit in bounds if edit in gains or edit not in tried]


def _left(tried: EditSets, edits: Sequence[Edit]) -> float:
    """The least that is left by one of the edits, or by two."""
    sets = [[edit] for edit in edits]
    sets += [list(pair) for pair in combinations(edits, 2) if can_combine(pair[1], [pair[0]])]
    gains = [gain for each in sets if (gain := tried.together(each)) is not None]
    return tried.facts.base_ns - max(gains, default=0.0)


def _found(graph: Graph, edits: Sequence[Edit]) -> tuple[float, float]:
    """What is left by the best pair that is found, or the best edit, and by the best of all."""
    tried, known = _sets(graph, edits)
    pair = best_pair(tried, known)
    singles = [gain for edit in known if tried.knows(edit) and (gain := tried.together([edit])) is not None]
    most = tried.together(pair) if pair else max(singles, default=0.0)
    return tried.facts.base_ns - max(most or 0.0, 0.0), _left(_sets(graph, edits)[0], known)


@settings(max_examples=25)
@given(st.sampled_from(NAMES), st.lists(st.sampled_from(TEXTS), min_size=3, max_size=7, unique=True))
def test_no_pair_leaves_less_than_the_one_that_is_found(job, name, texts):  # noqa: F811
    found, least = _found(job(name), [parse_edit(text) for text in texts])
    assert found <= least / (1 - EQUAL_SHARE) ** 2 + 1


@pytest.mark.slow
@settings(max_examples=1000)
@given(st.sampled_from(NAMES), st.lists(st.sampled_from(TEXTS), min_size=3, max_size=9, unique=True))
def test_no_pair_of_many_leaves_less_than_the_one_that_is_found(job, name, texts):  # noqa: F811
    found, least = _found(job(name), [parse_edit(text) for text in texts])
    assert found <= least / (1 - EQUAL_SHARE) ** 2 + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_of_all_candidates_of_a_job_no_pair_leaves_less_than_the_one_that_is_found(job, name):  # noqa: F811
    found, least = _found(job(name), candidates(facts_of(job(name)))[0])
    assert found <= least / (1 - EQUAL_SHARE) ** 2 + 1
