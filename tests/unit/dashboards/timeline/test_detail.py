"""Level of detail: no wide span is lost, none is counted twice, and the number of segments is bounded."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpro.dashboards.timeline.detail import DetailLevel, Segments, levels, segments, select_spans

A, B = 4, 5  # kinds


def _level(*rows: list[tuple[int, int, int]]) -> DetailLevel:
    """Rows of (start, end, kind)."""
    first = np.cumsum([0, *map(len, rows)]).astype(np.int64)
    spans = np.array([span for row in rows for span in row], np.int64).reshape(-1, 3)
    return DetailLevel(0.0, first, spans[:, 0], spans[:, 1], spans[:, 2].astype(np.uint8))


def merged(drawn: Segments) -> int:
    """How many spans are not segments of their own."""
    return int(drawn.count[drawn.count > 1].sum())


gaps = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 300), st.integers(0, 8)), max_size=60)


def _lay(spans) -> DetailLevel:
    at, laid = 0, []
    for gap, length, kind in spans:
        laid.append((at + gap, at + gap + length, kind))
        at += gap + length
    return _level(laid)


def test_wide_spans_are_drawn_as_they_are_and_narrow_neighbours_as_one():
    level = _level([(0, 100, A), (110, 112, B), (113, 118, A)])
    drawn = segments([level], [0], 0, 200, 10)
    assert list(zip(drawn.start, drawn.end, drawn.kind)) == [(0, 100, A), (110, 120, A)]
    assert drawn.count.tolist() == [1, 2]
    assert drawn.busy.tolist() == [100, 7]
    assert drawn.item.tolist() == [0, 2]  # of what is merged the longest
    assert merged(drawn) == 2
    closer = segments([level], [0], 100, 130, 1)
    assert list(zip(closer.start, closer.end)) == [(110, 112), (113, 118)]


def test_neighbours_of_another_kind_or_density_are_not_merged():
    level = _level([(0, 9, A), (10, 19, A), (20, 29, B), (30, 31, B)])
    drawn = segments([level], [0], 0, 40, 10)
    assert list(zip(drawn.start, drawn.end, drawn.count)) == [(0, 19, 2), (20, 30, 1), (30, 40, 1)]


def test_rows_are_those_that_were_asked_for_in_their_order():
    level = _level([(0, 100, A)], [(0, 100, B)], [(0, 100, A)])
    drawn = segments([level], [2, 1], 0, 100, 1)
    assert list(zip(drawn.row, drawn.kind)) == [(0, A), (1, B)]
    assert segments([level], [], 0, 100, 1).row.size == 0


def test_chosen_spans_are_drawn_alone_and_keep_their_numbers():
    level = select_spans(_level([(0, 50, A), (50, 100, A), (100, 150, B)]), np.array([True, False, True]))
    drawn = segments(levels(level, 200), [0], 0, 200, 1)
    assert drawn.start.tolist() == [0, 100]
    assert drawn.item.tolist() == [0, 2]


@given(gaps, st.integers(1, 400), st.integers(0, 5000), st.integers(1, 5000))
def test_what_is_longer_than_a_pixel_is_a_segment_of_its_own(spans, pixel, begin, length):
    level = _lay(spans)
    drawn = segments(levels(level, 5000), [0], begin, begin + length, pixel)
    alone = set(zip(drawn.start[drawn.count == 1].tolist(), drawn.end[drawn.count == 1].tolist()))
    touches = (level.end > begin) & (level.start < begin + length)
    wide = touches & (level.end - level.start >= pixel)
    assert set(zip(level.start[wide].tolist(), level.end[wide].tolist())) <= alone
    for start, end in zip(level.start[touches], level.end[touches]):
        middle = (start + end) // 2
        assert ((drawn.start <= middle) & (middle <= drawn.end + pixel)).any()
    assert (drawn.end > drawn.start).all()


@given(gaps, st.integers(1, 400))
def test_busy_time_and_number_of_segments_are_those_of_the_spans(spans, pixel):
    level = _lay(spans)
    drawn = segments(levels(level, 3000), [0], -1, 1 << 40, pixel)
    assert drawn.busy.sum() == (level.end - level.start).sum()
    assert drawn.count.sum() == len(spans)
    assert (drawn.busy <= np.maximum(drawn.end - drawn.start, pixel)).all()


@given(gaps, st.integers(1, 20))
def test_there_are_never_more_segments_than_allowed(spans, most):
    assert segments([_lay(spans)], [0], 0, 100_000, 1, most=most).row.size <= most


def test_a_million_spans_of_one_kind_are_a_handful_of_segments():
    start = np.arange(1_000_000, dtype=np.int64) * 10
    kind = np.full(start.size, A, np.uint8)
    known = levels(DetailLevel(0.0, np.array([0, start.size]), start, start + 9, kind), 10_000_000)
    drawn = segments(known, [0], 0, 10_000_000, 10_000)
    assert drawn.row.size <= 3  # a grain that begins within a pixel may fill it less
    assert (drawn.start[0], merged(drawn)) == (0, 1_000_000)
    assert drawn.busy.sum() == 9_000_000


@pytest.fixture(scope="module")
def dense() -> DetailLevel:
    """Two rows of short spans of all kinds."""
    chance, rows = np.random.default_rng(4), []
    for size in (120_000, 30_000):
        gap, length = chance.integers(0, 40, size), chance.geometric(0.02, size)
        end = np.cumsum(gap + length)
        rows.append((end - length, end, chance.integers(0, 9, size)))
    first = np.array([0, 120_000, 150_000])
    start, end, kind = (np.concatenate(column) for column in zip(*rows))
    return DetailLevel(0.0, first, start, end, kind.astype(np.uint8))


def test_coarser_levels_stand_for_all_spans_and_are_far_fewer(dense):
    known = levels(dense, int(dense.end.max()))
    assert len(known) > 1
    assert known[-1].grain_ns == 0
    for coarse, fine in itertools.pairwise(known):
        assert coarse.grain_ns > fine.grain_ns
        assert 2 * coarse.start.size < fine.start.size
    for level in known[:-1]:
        assert level.count.sum() == dense.start.size
        assert level.busy.sum() == (dense.end - dense.start).sum()
        assert level.first[-1] == level.start.size
        for begin, end in itertools.pairwise(level.first):
            assert (np.diff(level.start[begin:end]) > 0).all()


def test_what_is_drawn_of_a_coarse_level_is_what_all_spans_give_within_a_pixel(dense):
    known, length = levels(dense, int(dense.end.max())), int(dense.end.max())
    for begin, end in ((0, length), (length // 3, length // 2)):
        pixel = (end - begin) / 1600
        drawn, wanted = (segments(each, [0, 1], begin, end, pixel) for each in (known, known[-1:]))
        assert drawn.busy.sum() == pytest.approx(wanted.busy.sum(), rel=0.001)
        covered = [_covered(each, begin, pixel) for each in (drawn, wanted)]
        assert np.abs(covered[0] - covered[1]).mean() < 0.03


def _covered(drawn, begin, pixel):
    """[rows, pixels] share of each pixel that is drawn, smoothed over three pixels."""
    edges = begin + pixel * np.arange(1601)
    rows = []
    for row in (0, 1):
        mine = drawn.row == row
        order = np.argsort(drawn.start[mine], kind="stable")
        start = drawn.start[mine][order]
        total = np.concatenate([[0], np.cumsum(drawn.busy[mine][order])])
        ends = np.interp(edges, np.r_[start, edges[-1] + pixel], total)
        rows.append(np.convolve(np.diff(ends) / pixel, np.ones(3) / 3, "same"))
    return np.clip(np.array(rows), 0, 1)
