"""Removal of spans with impossible times, which profilers lost or corrupted.

Takes the spans of one rank in one window; returns the plausible spans, and counts of the others by reason.
Which times are impossible follows from how devices work, in any format: work does not begin before the call
that launches it, nor long after all else has ended; a stream runs one item after the other, in the order of
the calls; nothing takes days. Host threads nest and block for any time, so only days-long spans are removed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.ingest.derived import with_launch
from dpro.schema import GPU_WORK_KINDS
from dpro.store import IMPOSSIBLE
from dpro.words import counted

LONGEST_NS = 24 * 3600 * 10**9  # maximum duration of a span
FARTHEST_NS = 30 * LONGEST_NS  # maximum distance from the median start; a time of 0 is decades away
CLOCKS_NS = 10_000_000  # host and device clocks differ by 0.1 ms in traces of V100, more on AMD
BELATED_NS = 60_000_000_000  # work begins within 34 ms of a free stream, but devices may stall
OVERLAP_NS = 1_000_000  # kernels launched ahead of time overlap by up to 0.14 ms

ABSURD = f"{IMPOSSIBLE}: days long, or days away from the others"
EARLY = f"{IMPOSSIBLE}: before the call that launched them"
UNORDERED = f"{IMPOSSIBLE}: not in the order of their stream"
BELATED = f"{IMPOSSIBLE}: long after their launch and all else"
MOVED = f"{IMPOSSIBLE}: moved by the error of their device's clock"

_COLUMNS = ("kind", "start_ns", "duration_ns", "tid", "device", "stream", "correlation")
_QUEUE = ("device", "stream", "thread")


def drop_impossible(spans: pl.DataFrame) -> tuple[pl.DataFrame, Counter[str]]:
    """Remove spans with impossible times, and shift those of a device whose clock is off.

    Args:
        spans: with `kind`, `start_ns`, `duration_ns`, `device`, `stream`, `correlation`, `tid`.

    Returns:
        The remaining spans, in their order, and the number of removed or shifted ones, by reason.
    """
    if spans.is_empty():
        return spans, Counter()
    start = spans["start_ns"].to_numpy()
    absurd: Bools = spans["duration_ns"].to_numpy() > LONGEST_NS
    if int(start.max()) - int(start.min()) > FARTHEST_NS:
        absurd |= np.abs(start - int(np.median(start))) > FARTHEST_NS
    counts = Counter({ABSURD: int(absurd.sum())})
    spans = spans.filter(~absurd) if absurd.any() else spans
    work = _work(spans)
    spans, moved = _on_clocks_of_hosts(spans, work)
    work = _work(spans) if moved else work
    is_early = pl.col("launch_ns") - pl.col("start_ns") > CLOCKS_NS
    early, work = work.filter(is_early)["row"], work.filter(is_early.fill_null(False).not_())
    out_of_turn = _out_of_turn(work)
    outlasting = _outlasting(work.filter(~pl.col("row").is_in(out_of_turn.implode())))
    unordered = pl.concat([out_of_turn, outlasting])
    kept = np.ones(spans.height, np.bool_)
    kept[np.concatenate([early.to_numpy(), unordered.to_numpy()])] = False
    belated = _belated(spans, work.filter(~pl.col("row").is_in(unordered.implode())), kept)
    counts.update({EARLY: early.len(), UNORDERED: unordered.len(), BELATED: belated.size, MOVED: moved})
    kept[belated] = False
    if not kept.all():
        spans = spans.filter(kept & _are_shadows_of_work(spans, kept))
    return spans, +counts


def impossible_in_words(name: str, counts: Mapping[str, int]) -> list[str]:
    """Word the counts of `drop_impossible` as at most one warning."""
    moved = counts.get(MOVED, 0)
    gone = sum(count for reason, count in counts.items() if reason.startswith(IMPOSSIBLE)) - moved
    words = [f"{counted(gone, 'span')} with impossible times left out"] if gone else []
    if moved:
        words.append(f"{counted(moved, 'span')} moved, since the clock of their device is off")
    return [f"{name}: {', and '.join(words)}; record again before relying on it"] if words else []


def _work(spans: pl.DataFrame) -> pl.DataFrame:
    """Return work on streams with its index among the spans, `row`, and the columns of `with_launch`."""
    numbered = spans.select(_COLUMNS).with_row_index("span_id")
    on_stream = pl.col("kind").is_in(GPU_WORK_KINDS) & (pl.col("stream") >= 0)
    work = with_launch(numbered.filter(on_stream), numbered.filter(pl.col("correlation") > 0))
    return work.rename({"span_id": "row"})


def _on_clocks_of_hosts(spans: pl.DataFrame, work: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Shift the work of devices most of whose work begins long before its launching calls.

    Args:
        work: from `_work`.

    Returns:
        The spans, in their order, and the number of shifted ones. After the shift at most 1% of a device's
        work begins before its call.
    """
    ahead = (pl.col("launch_ns") - pl.col("start_ns")).drop_nulls()
    clocks = work.group_by("device").agg(median=ahead.median(), by_ns=ahead.quantile(0.99))
    clocks = clocks.filter(pl.col("median") > CLOCKS_NS)
    if clocks.is_empty():
        return spans, 0
    of_device = pl.col("kind").cast(pl.String).is_in([*GPU_WORK_KINDS, "gpu_annotation"])
    by_ns = pl.col("device").replace_strict(clocks["device"], clocks["by_ns"].cast(pl.Int64), default=0)
    moved = spans.with_columns(start_ns=pl.col("start_ns") + pl.when(of_device).then(by_ns).otherwise(0))
    return moved, spans.select((of_device & (by_ns != 0)).sum()).item()


def _out_of_turn(work: pl.DataFrame) -> pl.Series:
    """Return the `row` of the fewest items whose removal leaves each stream in the order of its launches.

    Of the work of one call, which may run in parallel as in a CUDA graph, only the first counts.
    """
    calls = work.drop_nulls("launch_ns").sort("start_ns").group_by(*_QUEUE, "launch_ns", maintain_order=True)
    first = calls.agg(pl.col("row", "start_ns").first()).sort(*_QUEUE, "launch_ns")
    behind = (pl.col("start_ns").shift(1).over(_QUEUE) - pl.col("start_ns")) > OVERLAP_NS
    out_of_turn = [first["row"].clear()]
    for queue in first.filter(behind.any().over(_QUEUE)).partition_by(_QUEUE, maintain_order=True):
        start = queue["start_ns"].to_numpy()
        in_order = ascending(start)
        least = np.maximum.accumulate(np.where(in_order, start, start.min()))
        most = np.minimum.accumulate(np.where(in_order, start, start.max())[::-1])[::-1]
        out_of_turn.append(queue["row"].filter((start < least - OVERLAP_NS) | (start > most + OVERLAP_NS)))
    return pl.concat(out_of_turn)


def ascending(values: Ints) -> Bools:
    """Return [N] whether each value is part of a longest ascending subsequence.

    Source: M. L. Fredman, On computing the length of longest increasing subsequences, 1975.
    """
    lasts: list[int] = []  # least last value of a subsequence of each length
    lengths = []
    for value in values.tolist():
        length = bisect_right(lasts, value)
        lasts[length : length + 1] = [value]
        lengths.append(length)
    chosen = np.zeros(values.size, np.bool_)
    wanted = len(lasts) - 1
    for place in range(values.size - 1, -1, -1):
        if lengths[place] == wanted:
            chosen[place] = True
            wanted -= 1
    return chosen


def _outlasting(work: pl.DataFrame) -> pl.Series:
    """Return the `row` of work that ends after later work of another launch on its stream."""
    lane = ["device", "stream"]
    end = pl.col("start_ns") + pl.col("duration_ns")
    ordered = work.select("row", "start_ns", "correlation", *lane, end=end).sort(*lane, "start_ns", "end")
    alone = pl.when(pl.col("correlation") > 0).then("correlation").otherwise(-pl.int_range(pl.len()))
    ordered = ordered.with_columns(at=pl.int_range(pl.len()).over(lane), call=alone)
    ordered = ordered.with_columns(
        last=pl.col("at").max().over(*lane, "call"),
        next_end=pl.col("end").reverse().cum_min().reverse().shift(-1).over(lane),
    )
    behind = ordered.select(*lane, last="at", least="next_end")
    ordered = ordered.join(behind, on=[*lane, "last"], how="left", maintain_order="left")
    return ordered.filter(pl.col("end") - pl.col("least") > OVERLAP_NS)["row"]


def _belated(spans: pl.DataFrame, work: pl.DataFrame, kept: Bools) -> Ints:
    """Return rows of work that begins long after its launch, from the first such work after an idle gap.

    The first work of a stream may wait for earlier work that was launched before the recording.

    Args:
        work: work among the kept spans.
        kept: [N] whether each span is kept.
    """
    start = spans["start_ns"].to_numpy()
    order = np.argsort(start, kind="stable")
    order = order[kept[order]]
    ends = np.maximum.accumulate((spans["start_ns"] + spans["duration_ns"]).to_numpy()[order])
    calm = np.flatnonzero(start[order[1:]] - ends[:-1] > BELATED_NS) + 1
    behind = work.sort("start_ns").with_columns(nth=pl.int_range(pl.len()).over("device", "stream"))
    waited = pl.col("start_ns") - pl.col("launch_end_ns") > BELATED_NS
    late = behind.filter(waited, pl.col("nth") > 0)["row"].to_numpy()
    first = [place for place in calm.tolist() if np.isin(order[place], late)]
    return np.intersect1d(order[first[0] :], late) if first else np.empty(0, np.int64)


def _are_shadows_of_work(spans: pl.DataFrame, kept: Bools) -> Bools:
    """Return [N] false for annotations on streams that end after all kept work, as removed work did."""
    end = (spans["start_ns"] + spans["duration_ns"]).to_numpy()
    kind = spans["kind"].cast(pl.String)
    work = kept & kind.is_in(GPU_WORK_KINDS).to_numpy()
    last = int(end[work].max()) if work.any() else 0
    return ~((kind == "gpu_annotation").to_numpy() & (end > last + OVERLAP_NS))
