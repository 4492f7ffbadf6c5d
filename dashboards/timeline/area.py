"""Totals of an area of the timeline, by name and by lane.

Takes lanes of ranks, their rows, and two times; returns tables, with spans cut to these times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from dpro.dashboards.theme import kind_words
from dpro.dashboards.timeline.lanes import KINDS, RankLanes
from dpro.replay.intervals import Times, covered, union

_SPANS = {
    "rank": pl.Int64, "lane": pl.Int64, "name": pl.Int32, "kind": pl.UInt8, "start": pl.Int64,
    "end": pl.Int64,
}  # fmt: skip


def spans_within(lanes: RankLanes, rows: Sequence[int], begin: int, end: int) -> pl.DataFrame:
    """Return `rank`, `lane`, `name`, `kind`, `start`, `end` of rows' spans, cut to the given times."""
    level = lanes.all
    seen = [level.seen(row, begin, end) for row in rows]
    items = np.concatenate([np.empty(0, np.int64), *(np.arange(part.start, part.stop) for part in seen)])
    lane = np.repeat([lanes.lane_of(row) for row in rows], [max(part.stop - part.start, 0) for part in seen])
    columns = {
        "rank": np.full(items.size, lanes.rank), "lane": lane, "name": lanes.name[items],
        "kind": level.kind[items], "start": np.maximum(level.start[items], begin),
        "end": np.minimum(level.end[items], end),
    }  # fmt: skip
    return pl.DataFrame(columns, schema=_SPANS)


def by_name(spans: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Return `name`, `kind`, `spans`, `total_ns`, `mean_ns`, `longest_ns`; the largest total comes first.

    Args:
        spans: as from `spans_within`, of any number of ranks.
    """
    lasts = pl.col("end") - pl.col("start")
    totals = spans.group_by("name", "kind").agg(
        spans=pl.len(), total_ns=lasts.sum(), mean_ns=lasts.mean(), longest_ns=lasts.max()
    )
    texts, kinds = pl.Series(names, dtype=pl.String), pl.Series(kind_words(KINDS))
    named = totals.with_columns(name=texts.gather(totals["name"]), kind=kinds.gather(totals["kind"]))
    return named.sort("total_ns", "name", "kind", descending=[True, False, False])


def by_lane(spans: pl.DataFrame, lanes: RankLanes) -> pl.DataFrame:
    """Return `rank`, `lane` (its label), `spans`, and `busy_ns`: time in spans that do not wait.

    Lanes are in the order of the screen.

    Args:
        spans: as from `spans_within`, of one rank.
    """
    rows = []
    for number, lane in enumerate(lanes.lanes):
        of_lane = spans.filter(lane=number)
        if of_lane.height:
            works = of_lane.filter(pl.col("kind") != KINDS.index("wait"))
            busy = union(works["start"].to_numpy(), works["end"].to_numpy())
            rows.append((lanes.rank, lane.label, of_lane.height, int((busy[:, 1] - busy[:, 0]).sum())))
    schema = {"rank": pl.Int64, "lane": pl.String, "spans": pl.Int64, "busy_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row")


def by_range(spans: pl.DataFrame, lanes: RankLanes, names: Sequence[str]) -> pl.DataFrame:
    """Return `rank`, `lane` (its label), `range`, `alone_ns`: time of ranges in which nothing else runs.

    Time in nested ranges belongs to the innermost one: a loader that sleeps, or a host that waits, is in no
    operator, and only its range shows it. Lanes that have nothing but ranges are left out.

    Args:
        spans: as from `spans_within`, of one rank.
    """
    host = pl.col("kind") == KINDS.index("host")
    rows: list[tuple[int, str, str, int]] = []
    for number, lane in enumerate(lanes.lanes):
        of_lane = spans.filter(lane=number)
        ranges, others = of_lane.filter(host).sort("start", -pl.col("end")), of_lane.filter(~host)
        if ranges.is_empty() or others.is_empty():
            continue
        starts, ends = ranges["start"].to_numpy(), ranges["end"].to_numpy()
        outer = _outer_ranges(starts, ends)
        nested = np.flatnonzero(outer >= 0)
        busy = union(others["start"].to_numpy(), others["end"].to_numpy())
        inside = np.minimum(ends[nested], ends[outer[nested]])
        alone = ends - starts - covered(busy, starts, ends)
        of_nested = inside - starts[nested] - covered(busy, starts[nested], inside)
        np.subtract.at(alone, outer[nested], of_nested)
        of_names = ranges.select("name", alone=pl.Series(alone)).group_by("name").agg(pl.col("alone").sum())
        rows += [(lanes.rank, lane.label, names[name], ns) for name, ns in of_names.iter_rows() if ns > 0]
    schema = {"rank": pl.Int64, "lane": pl.String, "range": pl.String, "alone_ns": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row").sort(pl.all())


def _outer_ranges(starts: Times, ends: Times) -> Times:
    """Return [N] the range around each range, -1 for none.

    Args:
        starts, ends: [N] ns, by start, the longer first.
    """
    outer, open_ones = np.full(starts.size, -1, np.int64), list[int]()
    for number, (start, end) in enumerate(zip(starts.tolist(), ends.tolist())):
        while open_ones and ends[open_ones[-1]] <= start:
            open_ones.pop()
        outer[number] = open_ones[-1] if open_ones else -1
        if end > start:
            open_ones.append(number)
    return outer
