"""Timelines as Chrome's trace JSON, which Perfetto, chrome://tracing and most other viewers open.

In: slices. Out: a `.json` or `.json.gz` file. Times are microseconds since `baseTimeNanoseconds`, as in the
traces of torch.profiler: a double cannot hold nanoseconds since 1970.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
from isal import igzip


def write_chrome(rows: pl.DataFrame, path: Path) -> None:
    """Write slices.

    Args:
        rows: as from `dpro.export.slices`.
        path: the file; compressed if its name ends in `.gz`.

    Raises:
        OSError: it cannot be written.
    """
    origin = int(rows["start_ns"].to_numpy().min()) if rows.height else 0
    tracks = rows.select("group", "track").unique(maintain_order=True)
    groups = {group: pid for pid, group in enumerate(tracks["group"].unique(maintain_order=True))}
    numbered = tracks.with_row_index("tid").with_columns(
        pid=pl.col("group").replace_strict(groups, return_dtype=pl.Int64)
    )
    lines = [json.dumps(each) for each in _metadata(groups, numbered)]
    lines += _events(rows.join(numbered, on=["group", "track"], maintain_order="left"), origin)
    header = f'{{"displayTimeUnit":"ms","baseTimeNanoseconds":{origin},"traceEvents":[\n'
    content = (header + ",\n".join(lines) + "\n]}\n").encode()
    if path.suffix == ".gz":
        content = igzip.compress(content, 1)
    path.write_bytes(content)


def _metadata(groups: dict[str, int], tracks: pl.DataFrame) -> list[dict[str, Any]]:
    """Names of groups and tracks, and the order to show them in."""
    events = []
    for group, pid in groups.items():
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": group}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
    for tid, _, track, pid in tracks.select("tid", "group", "track", "pid").iter_rows():
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        order = {"sort_index": tid}
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": order})
    return events


def _events(rows: pl.DataFrame, origin: int) -> list[str]:
    """One line of JSON per slice."""
    line = pl.format(
        '{{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"name":{},"cat":{},"args":{{"rank":{},"lane":{},'
        '"step":{},"node":{},"waited_for":{},"slack_ns":{},"critical":{}}}}}',
        "pid",
        "tid",
        _microseconds(pl.col("start_ns") - origin),
        _microseconds(pl.col("end_ns") - pl.col("start_ns")),
        _quoted(rows, "name"),
        _quoted(rows, "kind"),
        "rank",
        _quoted(rows, "lane"),
        "step",
        "node",
        "waited_for",
        "slack_ns",
        "critical",
    )
    return rows.select(line).to_series().to_list()


def _quoted(rows: pl.DataFrame, column: str) -> pl.Expr:
    """Text as JSON has it; each different one is quoted once."""
    texts = rows[column].unique().to_list()
    return pl.col(column).replace_strict(texts, [json.dumps(text) for text in texts], return_dtype=pl.String)


def _microseconds(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds as microseconds with three decimals."""
    return pl.format("{}.{}", ns // 1000, (ns % 1000).cast(pl.String).str.zfill(3))
