"""What is drawn of a timeline: nothing wide is lost, nothing narrow is drawn twice, never too much."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.dashboards.segments import KINDS, Tracks, make_tracks, segments

KERNEL, COPY = KINDS.index("kernel"), KINDS.index("copy")


def _tracks(*spans: tuple[str, int, int, str]) -> Tracks:
    """Tracks of (track, start, end, kind) in order; every other slice is on the critical path."""
    rows = [
        {"group": "rank 0 measured", "track": track, "rank": 0, "kind": kind, "start_ns": start + 1000}
        | {"end_ns": end + 1000, "node": number, "critical": number % 2 == 0, "later_ns": 0}
        for number, (track, start, end, kind) in enumerate(spans)
    ]
    return make_tracks(pl.DataFrame(rows), 1000)


gaps = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300), st.sampled_from(KINDS)), max_size=60)


def _lay(spans) -> Tracks | None:
    at, laid = 0, []
    for gap, length, kind in spans:
        laid.append(("a", at + gap, at + gap + length, kind))
        at += gap + length
    return _tracks(*laid) if laid else None


def test_wide_spans_are_drawn_as_they_are_and_narrow_neighbours_as_one():
    tracks = _tracks(("a", 0, 100, "kernel"), ("a", 110, 112, "copy"), ("a", 113, 118, "kernel"))
    drawn = segments(tracks, [0], 0, 200, 10)
    assert list(zip(drawn.start, drawn.end, drawn.kind)) == [(0, 95, KERNEL), (110, 120, KERNEL)]
    assert drawn.merged == 2
    closer = segments(tracks, [0], 100, 130, 1)
    assert list(zip(closer.start, closer.end)) == [(110, 112), (113, 117)]


def test_rows_are_those_that_were_asked_for_in_their_order():
    tracks = _tracks(("a", 0, 100, "kernel"), ("b", 0, 100, "copy"), ("c", 0, 100, "kernel"))
    drawn = segments(tracks, [2, 1], 0, 100, 1)
    assert list(zip(drawn.row, drawn.kind)) == [(0, KERNEL), (1, COPY)]
    assert segments(tracks, [], 0, 100, 1).row.size == 0


def test_the_critical_path_is_drawn_alone():
    tracks = _tracks(("a", 0, 50, "kernel"), ("a", 50, 100, "kernel"), ("a", 100, 150, "copy"))
    assert segments(tracks, [0], 0, 200, 1, critical=True).start.tolist() == [0, 100]


@given(gaps, st.integers(1, 400), st.integers(0, 5000), st.integers(1, 5000))
def test_everything_that_is_seen_is_drawn_somewhere(spans, pixel, begin, length):
    tracks = _lay(spans)
    if tracks is None:
        return
    drawn = segments(tracks, [0], begin, begin + length, pixel)
    touches = (tracks.end > begin) & (tracks.start < begin + length)
    for start, end in zip(tracks.start[touches], tracks.end[touches]):
        middle = (start + end) // 2
        assert ((drawn.start <= middle) & (middle <= drawn.end + pixel)).any()
    assert (drawn.end > drawn.start).all()


@given(gaps, st.integers(1, 20))
def test_there_are_never_more_segments_than_allowed(spans, most):
    tracks = _lay(spans)
    if tracks is not None:
        assert segments(tracks, [0], 0, 100_000, 1, most=most).row.size <= most


@pytest.mark.parametrize(
    ("time", "near", "found"), [(50, 0, 0), (104, 4, -1), (104, 5, 0), (107, 5, 1), (112, 0, 1), (999, 5, -1)]
)
def test_the_span_at_a_place_is_the_one_there_or_the_nearest(time, near, found):
    tracks = _tracks(("a", 0, 100, "kernel"), ("a", 110, 114, "copy"))
    assert tracks.at(0, time, near) == found


def test_a_million_spans_of_one_kind_are_a_handful_of_segments():
    start = np.arange(1_000_000, dtype=np.int64) * 10
    nothing = np.zeros(start.size, np.int64)
    rows = {
        "start_ns": start,
        "end_ns": start + 9,
        "node": nothing,
        "critical": nothing.astype(bool),
        "later_ns": nothing,
    }
    words = {"group": pl.lit("g"), "track": pl.lit("t"), "rank": pl.lit(0), "kind": pl.lit("kernel")}
    tracks = make_tracks(pl.DataFrame(rows).with_columns(**words), 0)
    drawn = segments(tracks, [0], 0, 10_000_000, 10_000)
    assert drawn.row.size == 1
    assert (drawn.start[0], drawn.merged) == (0, 1_000_000)
    assert 9_990_000 <= drawn.end[0] < 10_000_000


@pytest.fixture(scope="module")
def dense():
    """Two tracks of short slices of all kinds."""
    chance, frames = np.random.default_rng(4), []
    for track, size in (("0", 120_000), ("1", 30_000)):
        gap, length = chance.integers(0, 40, size), chance.geometric(0.02, size)
        end = np.cumsum(gap + length)
        rows = {"start_ns": end - length, "end_ns": end, "kind": chance.choice(KINDS, size)}
        frames.append(pl.DataFrame(rows).with_columns(track=pl.lit(track)))
    both = pl.concat(frames).with_row_index("node").with_columns(pl.col("node").cast(pl.Int64))
    words = {
        "group": pl.lit("g"),
        "rank": pl.lit(0),
        "later_ns": pl.lit(0),
        "critical": pl.col("node") % 2 == 0,
    }
    return make_tracks(both.with_columns(**words), 0)


def test_coarser_levels_stand_for_all_slices_and_are_far_fewer(dense):
    for of_all, total in ((dense.whole, 150_000), (dense.path, 75_000)):
        assert len(of_all) > 1
        assert of_all[-1].grain_ns == 0
        for coarse, fine in itertools.pairwise(of_all):
            assert coarse.grain_ns > fine.grain_ns
            assert 2 * coarse.start.size < fine.start.size
        for level in of_all:
            assert level.count.sum() == total
            assert level.first[-1] == level.start.size
            for begin, end in itertools.pairwise(level.first):
                assert (np.diff(level.start[begin:end]) > 0).all()


def test_what_is_drawn_of_a_coarse_level_is_what_all_slices_give_within_a_pixel(dense):
    exact = dataclasses.replace(dense, whole=dense.whole[-1:], path=dense.path[-1:])
    length = int(dense.end.max())
    for begin, end in ((0, length), (length // 3, length // 2)):
        pixel = (end - begin) / 1600
        drawn, wanted = (segments(each, [0, 1], begin, end, pixel) for each in (dense, exact))
        assert drawn.merged == pytest.approx(wanted.merged, rel=0.01)
        covered = [_covered(each, begin, end, pixel) for each in (drawn, wanted)]
        assert np.abs(covered[0] - covered[1]).mean() < 0.03


def _covered(drawn, begin, end, pixel):
    """[rows, pixels] share of each pixel that is drawn, smoothed over three pixels."""
    edges = begin + pixel * np.arange(1601)
    rows = []
    for row in (0, 1):
        mine = drawn.row == row
        order = np.argsort(drawn.start[mine])
        start = drawn.start[mine][order]
        total = np.concatenate([[0], np.cumsum(drawn.end[mine][order] - start)])
        ends = np.interp(edges, np.r_[start, edges[-1] + pixel], total)
        rows.append(np.convolve(np.diff(ends) / pixel, np.ones(3) / 3, "same"))
    return np.clip(np.array(rows), 0, 1)
