"""A recording of Kineto that is longer than its window, cut to the window's steps.

In: the tables of one rank's window on a GPU, where Kineto ran a step before and some after, and when its
steps began and ended on the host. Out: the same tables with what those steps did: host work by its time, GPU
work by the call that launched it, whenever it ran.
"""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

from dpro.schema import COLLECTIVES, COUNTERS, DEPENDENCIES, GPU_WORK_KINDS, SPANS, SYNCS

_GPU = pl.col("kind").is_in([*GPU_WORK_KINDS, "gpu_annotation"])
_END = pl.col("start_ns") + pl.col("duration_ns").clip(0)


def cut(frames: Mapping[str, pl.DataFrame], start_ns: int, end_ns: int) -> dict[str, pl.DataFrame]:
    """The tables of a window without what does not belong to its steps.

    Args:
        frames: `spans`, `collectives`, `syncs`, `dependencies`, `counters` of one rank and window.
    """
    spans = frames[SPANS.name]
    host = _host(spans.filter(~_GPU), start_ns, end_ns)
    gpu = _gpu(spans, host, start_ns, end_ns)
    kept = pl.concat([host, gpu])
    ids = kept["span_id"].implode()
    source, target = pl.col("source_span_id").is_in(ids), pl.col("target_span_id").is_in(ids)
    return {
        **frames,
        SPANS.name: kept.sort(SPANS.sort_by, maintain_order=True),
        COLLECTIVES.name: _collectives(frames[COLLECTIVES.name], ids, start_ns, end_ns),
        SYNCS.name: frames[SYNCS.name].filter(pl.col("span_id").is_in(ids)),
        DEPENDENCIES.name: frames[DEPENDENCIES.name].filter(source & target),
        COUNTERS.name: _counters(frames[COUNTERS.name], start_ns, end_ns),
    }


def _host(spans: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    """What the host began during the steps, as if recording had ended with them.

    A Python function that was called before is shown from the beginning on, as where recording begins there.
    """
    python = pl.col("kind") == "python"
    begun = (pl.col("start_ns") >= start_ns) | (python & _END.gt(start_ns))
    within = spans.filter(begun & (pl.col("start_ns") < end_ns))
    start, end = pl.col("start_ns").clip(start_ns), pl.min_horizontal(_END, pl.lit(end_ns))
    known = pl.when(pl.col("duration_ns") >= 0)
    return within.with_columns(start_ns=start, duration_ns=known.then(end - start).otherwise("duration_ns"))


def _gpu(spans: pl.DataFrame, host: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    """What these calls launched; of what nothing is known to have launched, what ran meanwhile."""
    work = spans.filter(_GPU)
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    launched = pl.col("correlation").is_in(calls["correlation"].implode())
    mine = pl.col("correlation").is_in(host.filter(pl.col("kind") == "runtime")["correlation"].implode())
    own = work.filter((pl.col("correlation") >= 0) & mine)
    first, last = own["start_ns"].min(), own.select(_END.max()).item()
    meanwhile = (pl.col("start_ns") >= (start_ns if first is None else first)) & (
        pl.col("start_ns") < (end_ns if last is None else last)
    )
    return pl.concat([own, work.filter(~launched & meanwhile)])


def _collectives(rows: pl.DataFrame, ids: pl.Series, start_ns: int, end_ns: int) -> pl.DataFrame:
    linked = (pl.col("span_id") >= 0) | (pl.col("launch_span_id") >= 0)
    mine = pl.col("span_id").is_in(ids) | pl.col("launch_span_id").is_in(ids)
    return rows.filter(pl.when(linked).then(mine).otherwise(pl.col("start_ns").is_between(start_ns, end_ns)))


def _counters(rows: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    """The values of the steps, the ones that held when they began included."""
    before = rows.filter(pl.col("time_ns") < start_ns).sort("time_ns", maintain_order=True)
    held = before.unique(["host", "device", "counter"], keep="last", maintain_order=True)
    within = rows.filter(pl.col("time_ns").is_between(start_ns, end_ns, closed="left"))
    return pl.concat([held.with_columns(time_ns=pl.lit(start_ns, pl.Int64)), within])
