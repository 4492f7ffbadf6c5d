"""Matching two ranks' orders of collectives, by the ends alone."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpro.replay.alignment.match import Matching, best_shift, match_collectives
from dpro.schema import COLLECTIVES, SPANS, conform

US = 1_000
MS = 1_000_000
UNEVEN_MS = np.array([3, 8, 1, 12, 2, 7, 5, 20, 4, 9, 6, 11])  # between one collective and the next
SKEW_US = np.array([0, 18, -7, 30, 4, -22, 11, 2, -15, 9, 25, -3])


def _ends(first: int, count: int, late_ms: int = 0) -> np.ndarray:
    """Ends on a rank that holds this many collectives of one series, from some number on."""
    ends = np.cumsum(UNEVEN_MS) * MS + late_ms * (MS + SKEW_US * US)
    return ends[first : first + count]


def _all_same(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return np.ones(j.size, np.bool_)


@pytest.mark.parametrize("count", [3, 4, 5])
def test_few_collectives_that_both_ranks_hold_are_matched(count):
    a, b = _ends(2, count), _ends(2, count, late_ms=1)
    assert best_shift(a, b, _all_same) == (0, True)


@pytest.mark.parametrize(("first", "count"), [(0, 3), (4, 3), (9, 3), (3, 5), (7, 5)])
def test_three_collectives_are_found_among_many(first, count):
    a, b = _ends(0, 12), _ends(first, count, late_ms=1)
    assert best_shift(a, b, _all_same) == (first, True)


def test_a_single_pair_decides_nothing_however_even_it_is():
    # Paired fully, the ends differ by milliseconds: these are not the same three.
    a = np.array([0, 10, 30]) * MS
    b = np.array([0, 25, 31]) * MS
    assert not best_shift(a, b, _all_same)[1]


def test_three_collectives_at_equal_distances_are_refused():
    a = np.array([0, 10, 20]) * MS
    b = a + np.array([0, 20, -10]) * US
    assert not best_shift(a, b, _all_same)[1]


def test_two_collectives_are_laid_end_to_end_where_they_are_the_same():
    a, b = _ends(0, 5), _ends(3, 2)
    assert best_shift(a, b, _all_same) == (3, True)
    assert best_shift(a, b, lambda i, j: (i != 4) | (j != 1)) == (3, False)


@given(st.integers(0, 2**31), st.integers(3, 8), st.integers(0, 6), st.integers(-50, 50))
def test_what_is_called_clear_is_right_wherever_the_windows_were_clipped(seed, count, first, late_ms):
    noise = np.random.default_rng(seed)
    ends = np.cumsum(noise.integers(100, 20_000, 20)) * US
    a = ends[first : first + count + 4]
    b = (ends + noise.normal(0, 20 * US, 20).astype(np.int64) + late_ms * MS)[first + 1 : first + 1 + count]
    shift, clear = best_shift(a, b, _all_same)
    assert not clear or shift == 1


@given(st.integers(0, 2**31), st.integers(3, 30), st.integers(3, 30), st.integers(1, 3))
def test_shifts_are_compared_by_the_quartiles_of_their_differences(seed, n, m, kinds):
    noise = np.random.default_rng(seed)
    a, b = (np.cumsum(noise.integers(1, 2_000, size)) for size in (n, m))
    of_a, of_b = noise.integers(0, kinds, n) // 2, noise.integers(0, kinds, m) // 2
    expected = []
    least = max(2, min(n, m) // 2)
    for shift in range(least - m, n - least + 1):
        j = np.arange(max(0, -shift), min(m, n - shift))
        equal = of_a[j + shift] == of_b[j]
        if equal.mean() >= 0.9:
            low, high = np.percentile(a[(j + shift)[equal]] - b[j[equal]], (25, 75))
            expected.append((high - low + 1.0, equal.sum(), shift))
    spread, pairs, shift = min(expected, default=(0.0, 0, 0))
    enough = max(3.0, 30.0 / max(pairs, 1)) * spread
    clear = pairs >= 3 and all(other >= enough for other, _, at in expected if at != shift)
    assert best_shift(a, b, lambda i, j: of_a[i] == of_b[j]) == (shift, clear)


@settings(max_examples=8)
@given(st.integers(0, 2**31), st.integers(-300, 300), st.booleans())
def test_of_many_shifts_the_hopeless_ones_are_left_out_and_nothing_else_changes(seed, first, periodic):
    noise = np.random.default_rng(seed)
    gaps = noise.integers(100, 20_000, 1400) if not periodic else np.full(1400, 5_000)
    ends = np.cumsum(gaps) * US
    a, b = ends[300:1000], ends[300 + first : 1000 + first] + noise.integers(-50, 50, 700) * US + MS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpro.replay.alignment.match.MANY_SHIFTS", 10_000)
        every = best_shift(a, b, _all_same)
    assert best_shift(a, b, _all_same) == every
    assert every[1] != periodic


def _two_ways(i: np.ndarray, j: np.ndarray) -> np.ndarray:
    return (i == j) | (i == j + 1)


@pytest.mark.parametrize(
    ("count", "times", "clear"),
    [
        (64, 2, False),  # of many pairs, 3 times less even is clear
        (64, 4, True),
        (8, 3.5, False),  # of eight pairs, 30 / 8 times
        (8, 5, True),
    ],
)
def test_a_shift_is_accepted_only_where_the_next_best_is_less_even_by_far(count, times, clear):
    # The spread is 200 us where each entry meets its own, and `times` as much where it meets the next.
    odd = np.arange(count) % 2 * US
    a = np.arange(count) * 10 * MS + odd * round(100 * (times - 1))
    assert best_shift(a, a + odd * 200, _two_ways) == (0, clear)


@pytest.mark.parametrize(("others", "clear"), [(1, True), (3, False)])
def test_orders_whose_operations_differ_in_a_tenth_are_not_matched(others, clear):
    ends = np.cumsum(np.tile(UNEVEN_MS, 2)[:20]) * MS
    assert best_shift(ends, ends, lambda i, j: (i != j) | (j >= others))[1] == clear


def _calls(op: str, odd_rank: int = 1, **of_last: int) -> pl.DataFrame:
    """Twenty calls of one operation on two ranks; the last on one of them differs in what is given."""
    ends = np.cumsum(np.tile(UNEVEN_MS, 2)[:20]) * MS
    rows = [
        {
            "rank": rank,
            "collective_id": number,
            "window": 0,
            "op": op,
            "group": "world",
            "group_ranks": "0,1",
            "bytes_in": 400,
            "start_ns": int(end) - US,
            "duration_ns": US,
        }
        for rank in (0, 1)
        for number, end in enumerate(ends)
    ]
    rows[20 * odd_rank + 19] |= of_last
    return conform(COLLECTIVES, pl.DataFrame(rows))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("op", "num_bytes", "members"),
    [
        ("all_reduce", 401, 1),
        ("broadcast", 401, 1),
        ("all_to_all", 401, 2),
        ("all_reduce", 0, 1),  # nothing is a size, too
        ("all_reduce", -1, 2),  # a size that is not known fits any
    ],
)
def test_sizes_have_to_agree_where_the_operation_asks_for_it(op, num_bytes, members, rank):
    matched = match_collectives(_calls(op, rank, bytes_in=num_bytes), SPANS.empty()).rows
    found = matched.filter(pl.col("collective_id") == 19)["members"].to_list()
    assert found == [members] * 2
    assert (matched.filter(pl.col("collective_id") < 19)["members"] == 2).all()


@pytest.mark.parametrize(("duration_ns", "counts"), [(0, True), (-1, False)])
def test_a_call_that_lasts_no_time_counts_and_one_of_unknown_length_does_not(duration_ns, counts):
    matched = match_collectives(_calls("all_reduce", duration_ns=duration_ns), SPANS.empty()).rows
    assert matched.height == 39 + counts


def _gathered(*rows: tuple[int, int, int], **same: object) -> pl.DataFrame:
    """All-gathers of a microsecond: rank, sequence number, and when each ends, ms."""
    base = {"window": 0, "op": "all_gather", "group": "world", "group_ranks": "0,1", "bytes_in": 400} | same
    return conform(
        COLLECTIVES,
        pl.DataFrame(
            [
                base
                | {
                    "rank": rank,
                    "collective_id": number,
                    "sequence": sequence,
                    "span_id": number,
                    "start_ns": end * MS - US,
                    "duration_ns": US,
                }
                for number, (rank, sequence, end) in enumerate(rows)
            ]
        ),
    )


def test_a_shift_pairs_entries_by_adding_it():
    # Two operations in turn: entry j of b is entry j + 1 of a.
    a, b = _ends(0, 12), _ends(1, 11, late_ms=1)
    assert best_shift(a, b, lambda i, j: i % 2 == (j + 1) % 2) == (1, True)


def test_sequence_numbers_decide_whatever_they_begin_with():
    # By their order, 7 of rank 1 would be 7 of rank 0, and 5 would be 6.
    rows = match_collectives(
        _gathered((0, 5, 10), (0, 6, 20), (0, 7, 30), (1, 5, 11), (1, 7, 31)), SPANS.empty()
    )
    members = rows.rows.sort("collective_id")["members"].to_list()
    assert members == [2, 1, 2, 2, 2]


def test_calls_after_a_ranks_last_one_ran_outside_its_window():
    calls = [(0, number, 10 * number) for number in range(4)] + [
        (1, number, 10 * number + 1) for number in (0, 1)
    ]
    rows = match_collectives(_gathered(*calls), SPANS.empty()).rows.sort("collective_id")
    assert rows["covering"].to_list() == [2, 2, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("rows", "on_all_ranks", "outside"),
    [
        ([], 1.0, 0.0),
        ([(0, 1, 2, 1)], 0.0, 1.0),  # no window covers it on both ranks: that none is missing says nothing
        ([(0, 1, 2, 1), (1, 1, 2, 2)], 0.0, 0.5),
        ([(0, 1, 2, 1), (1, 2, 2, 2), (1, 2, 2, 2), (2, 1, 2, 2)], 0.5, 1 / 3),
    ],
)
def test_shares_are_of_what_the_windows_of_all_ranks_cover(rows, on_all_ranks, outside):
    columns = dict.fromkeys(("instance", "members", "expected", "covering"), pl.Int64)
    matching = Matching(pl.DataFrame(rows, columns, orient="row"), ())
    assert (matching.share_on_all_ranks, matching.share_outside) == (on_all_ranks, outside)


def test_a_rank_whose_order_cannot_be_matched_may_have_recorded_anything():
    # Calls at equal distances: by their ends rank 1 may hold any of them.
    calls = [(rank, -1, 10 * number) for rank in (0, 1) for number in range(12)]
    matching = match_collectives(_gathered(*calls), SPANS.empty())
    assert len(matching.refused) == 1
    assert matching.rows["covering"].to_list() == [2] * 24


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.integers(2, 5), st.booleans())
def test_groups_and_windows_are_matched_without_rendezvous(seed, num_groups, numbered):
    noise = np.random.default_rng(seed)
    parts = []
    for group in range(num_groups):
        calls = [
            (rank, number if numbered or group % 2 else -1, int(10 * number + noise.integers(1, 9)))
            for rank in range(int(noise.integers(1, 4)))
            for number in range(int(noise.integers(0, 4)), int(noise.integers(4, 9)))
        ]
        parts.append(_gathered(*calls, group=f"group {group // 2}", window=group % 2))
    rows = pl.concat(parts).with_columns(collective_id=pl.int_range(pl.len()))
    together = match_collectives(rows, SPANS.empty()).rows
    apart = [match_collectives(part, SPANS.empty()).rows for _, part in rows.group_by("window", "group")]
    facts = ["members", "expected", "covering"]
    alone = pl.concat(apart).sort("collective_id")
    assert together.sort("collective_id").select(facts).equals(alone.select(facts))
    for _, part in together.group_by("window", "group"):
        same = part.join(alone, on="collective_id").select(now=pl.col("instance"), then="instance_right")
        assert same.unique().height == same["now"].n_unique() == same["then"].n_unique()
    of_group = together.group_by("instance").agg(pl.struct("window", "group").n_unique())
    assert (of_group["window"] == 1).all()


@settings(max_examples=25)
@given(st.integers(0, 2**31))
def test_covering_counts_the_ranks_that_recorded_from_before_to_behind(seed):
    noise = np.random.default_rng(seed)
    extents = [sorted(noise.integers(0, 12, 2).tolist()) for _ in range(4)]
    calls = [
        (rank, number, 10 * number)
        for rank, (first, last) in enumerate(extents)
        for number in range(first, last + 1)
    ]
    rows = match_collectives(_gathered(*calls), SPANS.empty()).rows.sort("collective_id")
    expected = [sum(first <= number <= last for first, last in extents) for _, number, _ in calls]
    assert rows["covering"].to_list() == expected


def test_groups_of_one_rank_are_never_one_collective_though_they_share_a_name():
    calls = _gathered((0, 3, 10), (1, 3, 10)).with_columns(group_ranks=pl.Series(["0", "1"]))
    assert match_collectives(calls, SPANS.empty()).rows["members"].to_list() == [1, 1]


def test_a_kernel_without_a_group_belongs_to_that_of_its_stream():
    # The second call of rank 1 does not name its group, the first on the same stream does.
    calls = _gathered((0, 1, 10), (0, 2, 20), (1, 1, 10), (1, 2, 20))
    unnamed = pl.col("collective_id") == 3
    calls = calls.with_columns(
        group=pl.when(unnamed).then(pl.lit("")).otherwise("group"),
        group_ranks=pl.when(unnamed).then(pl.lit("")).otherwise("group_ranks"),
    )
    spans = [{"rank": number // 2, "span_id": number, "device": 0, "stream": 20} for number in range(4)]
    rows = match_collectives(calls, _on_streams(spans)).rows.sort("collective_id")
    assert rows["members"].to_list() == [2, 2, 2, 2]


def _on_streams(rows: list[dict[str, int]]) -> pl.DataFrame:
    """Table `spans` with kernels on some streams."""
    rest = {"window": 0, "kind": "kernel", "name": "ncclDevKernel", "start_ns": 0, "duration_ns": 1}
    return conform(SPANS, pl.DataFrame([row | rest for row in rows]))
