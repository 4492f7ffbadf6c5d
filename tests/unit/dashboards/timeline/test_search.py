"""Search by name: counts, order, and expressions that make no sense."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest

from dpro.dashboards.timeline.lanes import SpanNames, make_lanes
from dpro.dashboards.timeline.search import KEPT, FoundSpan, Search, exactly, matching
from dpro.errors import UsageError
from dpro.schema import SPANS, conform


@pytest.fixture
def ranks():
    names, found = SpanNames(), {}
    for rank, spans in {
        0: [("gemm_a", 0), ("copy", 20), ("gemm_b", 40)],
        1: [("GEMM_a", 10), ("add", 30)],
    }.items():
        rows = [
            {"span_id": n, "rank": rank, "name": name, "start_ns": start, "duration_ns": 10, "tid": 1}
            for n, (name, start) in enumerate(spans)
        ]
        frame = conform(SPANS, pl.DataFrame(rows)).with_columns(until_ns=pl.lit(None, pl.Int64))
        found[rank] = make_lanes(frame, names, 100, 0)
    return found, Search(names)


def test_matches_are_counted_whatever_the_case_with_their_time(ranks):
    lanes, search = ranks
    assert search.count("gemm", lanes) == (3, 30)
    assert search.count("^gemm_a$", lanes) == (2, 20)
    assert search.count("nothing", lanes) == (0, 0)


def test_the_next_match_is_the_one_that_begins_next_on_any_rank_and_after_the_last_comes_the_first(ranks):
    lanes, search = ranks
    at, found = FoundSpan(-1, -1, -1), []
    for _ in range(4):
        at, number = search.next("gemm", lanes, at)
        found.append((at.start, at.rank, number))
    assert found == [(0, 0, 1), (10, 1, 2), (40, 0, 3), (0, 0, 1)]
    before, number = search.next("gemm", lanes, at, backwards=True)
    assert (before.start, number) == (40, 3)
    between, _ = search.next("gemm", lanes, FoundSpan(20, 0, 1), backwards=True)
    assert between.start == 10
    assert search.next("nothing", lanes, at) == (None, 0)


def test_matches_on_gpu_lanes_come_before_those_of_threads():
    names, rows = SpanNames(), []
    for n, (start, stream) in enumerate([(0, -1), (20, 7), (40, 7), (60, -1)]):
        lane = {"tid": 1, "stream": stream, "device": 0, "kind": "cpu_op" if stream < 0 else "kernel"}
        rows.append({"span_id": n, "rank": 0, "name": "gemm", "start_ns": start, "duration_ns": 10, **lane})
    frame = conform(SPANS, pl.DataFrame(rows)).with_columns(until_ns=pl.lit(None, pl.Int64))
    lanes, search = {0: make_lanes(frame, names, 100, 0)}, Search(names)
    assert lanes[0].on_gpu.tolist() == [True, True, False, False]
    at, found = FoundSpan(30, -1, -1), []
    for _ in range(4):
        at, number = search.next("gemm", lanes, at)
        found.append((at.start, number))
    assert found == [(40, 2), (0, 3), (60, 4), (20, 1)]
    assert search.next("gemm", lanes, FoundSpan(0, 0, 2), backwards=True)[0].start == 40


def test_levels_of_matches_have_only_those_and_few_are_kept(ranks):
    lanes, search = ranks
    (level,) = search.of_rank("gemm", lanes[0], 100)
    assert level.start.tolist() == [0, 40]
    assert level.item.tolist() == [0, 2]
    assert search.of_rank("gemm", lanes[0], 100)[0] is level
    for number in range(KEPT):
        search.of_rank(f"copy{number}", lanes[0], 100)
    assert search.of_rank("gemm", lanes[0], 100)[0] is not level


@pytest.mark.parametrize("pattern", ["(", "a{99999999}", "x" * 301])
def test_what_is_no_expression_is_refused_in_one_line(pattern):
    with pytest.raises(UsageError) as refused:
        matching(pattern, ["a"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["a.b", "void f<int, 4>(x*)[2]{}|^$+?\\ end", "y" * 400])
def test_an_expression_for_one_name_matches_it_and_no_other(name):
    assert matching(exactly(name), [name, f"x{name}", name.replace(".", "-")]).tolist()[:2] == [True, False]
    assert not matching(exactly("a.b"), ["a-b", "a.bc"]).any()


def test_names_are_matched_one_by_one():
    assert np.flatnonzero(matching("b|c", ["a", "b", "xCx"])).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("nccl(", "a ( is not closed"),
        ("[a", "a [ is not closed"),
        ("a)", "a ) closes nothing"),
        ("*", "before it to repeat"),
        ("a\\", "it ends with a \\"),
        ("a{", "{"),
        ("(?=a)", "(?= and (?< are not supported"),
    ],
)
def test_what_is_wrong_with_an_expression_is_said_in_words(pattern, said):
    with pytest.raises(UsageError) as refused:
        matching(pattern, ["a"])
    assert said in str(refused.value)
    assert "parse error" not in str(refused.value)
    assert "\n" not in str(refused.value)
