"""Data dependencies recorded in the trace: between operators, and from forward to backward.

Takes the dependencies of execution traces and autograd's sequence numbers; returns pairs of spans, and links
between threads and between streams made from them. Most data of a program is passed on along a thread or
stream, whose order implies the dependency: only pairs that cross and that add a constraint are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.construction.dependencies import Dependencies, links
from dpro.replay.construction.gpu_streams import ROUNDING_NS, Pairs, Streams
from dpro.replay.construction.rank_view import RankView, index_of
from dpro.replay.graph import EdgeKind
from dpro.schema import DEPENDENCIES
from dpro.store import Run

PAIR = ("rank", "window", "source_span_id", "target_span_id")


def recorded_dependencies(run: Run, spans: pl.DataFrame, parts: Sequence[Path] | None = None) -> pl.DataFrame:
    """Return pairs of spans whose target needs the result of the source.

    Args:
        parts: parts of its table `dependencies` to read; all if None.

    Returns:
        `rank`, `window`, `source_span_id`, `target_span_id`.
    """
    columns = (*PAIR, "kind")
    parts = run.parts(DEPENDENCIES) if parts is None else parts
    rows = run.read(DEPENDENCIES, parts, columns) if parts else DEPENDENCIES.empty().select(columns)
    recorded = rows.filter(pl.col("kind") == "data").select(PAIR)
    return pl.concat([recorded, backward_of_forward(spans).select(PAIR)])


def backward_of_forward(spans: pl.DataFrame) -> pl.DataFrame:
    """Pair each backward operator with the forward one of its sequence number, if that is on one thread only.

    Operators that make no node of autograd's graph have the number of the next one that does: of several, the
    last to begin is used.
    """
    number = ["rank", "window", "sequence_number"]
    numbered = spans.filter(pl.col("sequence_number") >= 0)
    backward = numbered.filter(pl.col("forward_thread") > 0).select(*number, target_span_id="span_id")
    forward = (
        numbered.filter(pl.col("forward_thread") <= 0)
        .join(backward, on=number, how="semi")
        .group_by(number)
        .agg(
            source_span_id=pl.col("span_id").sort_by("start_ns", "span_id").last(),
            threads=pl.col("tid").n_unique(),
        )
        .filter(pl.col("threads") == 1)
    )
    return backward.join(forward, on=number).sort("rank", "window", "target_span_id")


def as_spans(view: RankView, pairs: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return the pairs that do not contradict their times, as indices of the rank's spans: sources, targets.

    Args:
        pairs: `source_span_id` and `target_span_id`, from `recorded_dependencies`.
    """
    place = index_of(view.span_id)
    source, target = (place(pairs[f"{end}_span_id"].to_numpy()) for end in ("source", "target"))
    have_spans = (source >= 0) & (target >= 0)
    source, target = source[have_spans], target[have_spans]
    ordered = view.end[source] <= view.start[target]
    return source[ordered], target[ordered]


def between_threads(view: RankView, threads: list[int], source: Ints, target: Ints) -> Dependencies:
    """Return hand-overs from one CPU thread to another.

    Args:
        source, target: pairs of spans, from `as_spans`.
    """
    tids = (view.tid[source], view.tid[target])
    crosses = view.on_cpu[source] & view.on_cpu[target] & (tids[0] != tids[1])
    crosses &= np.isin(tids[0], threads) & np.isin(tids[1], threads)
    rows = np.stack(
        [tids[0][crosses], tids[1][crosses], view.start[target[crosses]], view.end[source[crosses]]]
    )
    rows = rows[:, np.lexsort((rows[3], rows[2], rows[1], rows[0]))]
    # A thread keeps earlier results: only a result later than all of those adds a constraint.
    latest = np.full(rows.shape[1], -1, np.int64)
    opens = np.flatnonzero(np.append(True, (np.diff(rows[:2], axis=1) != 0).any(axis=0))[: rows.shape[1]])
    for first, end in zip(opens, [*opens[1:], rows.shape[1]]):
        latest[first + 1 : end] = np.maximum.accumulate(rows[3, first:end])[:-1]
    from_tid, to_tid, started, made = rows[:, rows[3] > latest]
    return links(EdgeKind.HANDOVER, (from_tid, made), (to_tid, started))


def between_streams(view: RankView, streams: Streams, source: Ints, target: Ints) -> Pairs:
    """Pair the last work of a source operator with the first work of its target, on another stream.

    Args:
        source, target: pairs of spans, from `as_spans`.
    """
    work = streams.work[view.launch[streams.work] >= 0]
    work = work[np.argsort(streams.launched[work], kind="stable")]
    tid = view.tid[view.launch[work]]
    last, first = np.full(source.size, -1, np.int64), np.full(target.size, -1, np.int64)
    for here in np.unique(tid):
        on_stream = work[tid == here]
        launched = streams.launched[on_stream]
        for spans, ends, edge in ((source, last, -1), (target, first, 0)):
            begin = np.searchsorted(launched, view.start[spans])
            end = np.searchsorted(launched, view.end[spans])
            inside = (view.tid[spans] == here) & view.on_cpu[spans] & (end > begin)
            ends[inside] = on_stream[(end + edge if edge else begin)[inside]]
    crosses = (last >= 0) & (first >= 0) & (view.stream[last] != view.stream[first])
    crosses &= view.end[last] <= view.start[first] + ROUNDING_NS
    return [(int(a), int(b)) for a, b in np.unique(np.stack([last, first])[:, crosses], axis=1).T]
