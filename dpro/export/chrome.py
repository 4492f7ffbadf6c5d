"""Timelines as Chrome's trace JSON, which Perfetto, chrome://tracing and most other viewers open.

In: a drawing. Out: a `.json` or `.json.gz` file. Times are microseconds since `baseTimeNanoseconds`, as in
the traces of torch.profiler: a double cannot hold nanoseconds since 1970. Slices are complete events (`X`).
An arrow is a flow: a start (`s`) within one slice and a finish (`f`) within another that share category, name
and id (Trace Event Format, "Flow Events"). `bp: e` binds the finish to the slice that it lies in.
Telemetry is counter events (`C`) in a process per host.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
from isal import igzip

from dpro.export.drawing import ARGUMENTS, Drawing

_NO_TRACKS = pl.DataFrame(schema={"tid": pl.Int64, "group": pl.String, "track": pl.String, "pid": pl.Int64})
_OF_SLICE = ("rank", "lane", "step", "node", "waited_for", "slack_ns", "later_ns", "critical")


def write_chrome(drawn: Drawing, path: Path) -> None:
    """Write a drawing.

    Args:
        path: the file; compressed if its name ends in `.gz`.

    Raises:
        OSError: it cannot be written.
    """
    rows = drawn.rows
    origin = int(rows["start_ns"].to_numpy().min()) if rows.height else 0
    tracks = rows.select("group", "track").unique(maintain_order=True)
    groups = {group: pid for pid, group in enumerate(tracks["group"].unique(maintain_order=True))}
    numbered = tracks.with_row_index("tid").with_columns(
        pid=pl.col("group").replace_strict(groups, return_dtype=pl.Int64)
    )
    placed = rows.join(numbered, on=["group", "track"], maintain_order="left")
    lines = [*map(json.dumps, _metadata(groups, numbered))]
    lines += _events(placed, origin)
    lines += _flows(drawn.arrows, placed, origin)
    lines += _counters(drawn.counters, origin, len(groups))
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
        '{{"ph":"X","pid":{},"tid":{},"ts":{},"dur":{},"name":{},"cat":{},"args":{{{}}}}}',
        "pid",
        "tid",
        _microseconds(pl.col("start_ns") - origin),
        _microseconds(pl.col("end_ns") - pl.col("start_ns")),
        _quoted(rows, "name"),
        _quoted(rows, "kind"),
        pl.concat_str(
            [_argument(rows, name) for name in (*_OF_SLICE, *ARGUMENTS)], separator=",", ignore_nulls=True
        ),
    )
    return rows.select(line).to_series().to_list()


def _argument(rows: pl.DataFrame, name: str) -> pl.Expr:
    """`"name":value`; null where there is none."""
    value = _quoted(rows, name) if rows[name].dtype == pl.String else pl.col(name).cast(pl.String)
    return pl.when(pl.col(name).is_not_null()).then(pl.format('"{}":{}', pl.lit(name), value))


def _flows(arrows: pl.DataFrame, rows: pl.DataFrame, origin: int) -> list[str]:
    """Two lines of JSON per arrow, one after the other: where it leaves and where it arrives."""
    places = rows.with_row_index("row").select(pl.col("row").cast(pl.Int64), "pid", "tid")
    flows = arrows.with_row_index("id")
    ends = []
    for end, moment, event in (
        ("source", "leaves_ns", '"ph":"s"'),
        ("target", "arrives_ns", '"ph":"f","bp":"e"'),
    ):
        there = flows.join(places, left_on=end, right_on="row", how="left", maintain_order="left")
        line = pl.format(
            '{{{},"pid":{},"tid":{},"ts":{},"id":{},"name":{},"cat":"flow"}}',
            pl.lit(event), "pid", "tid", _microseconds(pl.col(moment) - origin), "id", _quoted(flows, "kind"),
        )  # fmt: skip
        ends.append(there.select(line).to_series().to_list())
    return [line for pair in zip(*ends) for line in pair]


def _counters(counters: pl.DataFrame, origin: int, first: int) -> list[str]:
    """One line of JSON per value, after the names of the hosts' processes, numbered from `first`."""
    hosts = {host: pid for pid, host in enumerate(counters["host"].unique(maintain_order=True), start=first)}
    named = _metadata({f"telemetry {host}": pid for host, pid in hosts.items()}, _NO_TRACKS)
    values = counters.with_columns(
        pid=pl.col("host").replace_strict(hosts, return_dtype=pl.Int64),
        name=pl.format("{}: {}", _title(), "series"),
    )
    line = pl.format(
        '{{"ph":"C","pid":{},"tid":0,"ts":{},"name":{},"args":{{"value":{}}}}}',
        "pid", _microseconds(pl.col("time_ns") - origin), _quoted(values, "name"), "value",
    )  # fmt: skip
    return [*map(json.dumps, named), *values.select(line).to_series().to_list()]


def _title() -> pl.Expr:
    """Label of a counter with its unit: this format has no other place for units."""
    unit = pl.col("unit")
    return pl.concat_str("label", pl.when(unit != "").then(pl.format(", {}", unit)).otherwise(pl.lit("")))


def _quoted(rows: pl.DataFrame, column: str) -> pl.Expr:
    """Text as JSON has it; each different one is quoted once."""
    texts = rows[column].drop_nulls().unique().to_list()
    return pl.col(column).replace_strict(
        texts, [json.dumps(text) for text in texts], default=None, return_dtype=pl.String
    )


def _microseconds(ns: pl.Expr) -> pl.Expr:
    """Nanoseconds as microseconds with three decimals."""
    return pl.format("{}.{}", ns // 1000, (ns % 1000).cast(pl.String).str.zfill(3))
