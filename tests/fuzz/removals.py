"""Runs from which things are taken away: kinds of spans, tables, columns, ranks, lengths, all but one.

In: the tables of a run. Out: the tables without the thing, as another run. Sources lack such things, by tool,
version and setting, in any combination.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import polars as pl

from dpro.errors import DproError
from dpro.ingest.importer import import_sources
from dpro.schema import SPANS, STEPS, TABLES
from dpro.store import Manifest, Run, is_run, open_run, write_manifest, write_part
from tests.fuzz.pool import Commands
from tests.jobs import ROOT

Frames = Mapping[str, pl.DataFrame]
Removal = Callable[[Frames], Frames]

SPANS_EACH = 700  # of each rank: of more, commands take longer and see nothing else
MAX_BYTES = 4 << 20  # of a trace on disk
COMMANDS = ("info", "report", "explain", "replay", "whatif", "diagnose")

_KIND, _NAME, _ROW = pl.col("kind").cast(pl.String), pl.col("name"), pl.int_range(pl.len())
_ON_GPU = _KIND.is_in(["kernel", "memcpy", "memset", "gpu_annotation"])
_LINKS = ("span_id", "launch_span_id", "source_span_id", "target_span_id")  # of rows that name a span
_SPANS = {
    "kernels": _KIND == "kernel",
    "copies": _KIND.is_in(["memcpy", "memset"]),
    "launches": (_KIND == "runtime") & _NAME.str.contains("(?i)launch"),
    "runtime calls": _KIND == "runtime",
    "operators": _KIND == "cpu_op",
    "annotations": _KIND == "annotation",
    "annotations of devices": _KIND == "gpu_annotation",
    "Python calls": _KIND == "python",
    "all on devices": _ON_GPU,
    "all on hosts": ~_ON_GPU,
    "all but kernels": _KIND != "kernel",
    "all but operators": _KIND != "cpu_op",
    "all but the first": _ROW > 0,
    "all but the last": pl.len() - 1 > _ROW,
    "all but three": _ROW > 2,
    "all kernels but one": (_KIND == "kernel") & ((_KIND == "kernel").cum_sum() > 1),
    "the later half": pl.len() // 2 < _ROW,
    "every second": _ROW % 2 == 1,
}
# Of these columns every second value is taken away, too.
_HALVED = ("correlation", "stream", "start_ns", "bytes_in", "group_ranks", "sequence", "step")


def removals_of(frames: Frames) -> dict[str, Removal]:
    """What can be taken away from a run, by name."""
    found: dict[str, Removal] = {
        "the first rank": partial(_keep_ranks, slice(1, None)),
        "the last rank": partial(_keep_ranks, slice(None, -1)),
        "all ranks but one": partial(_keep_ranks, slice(1)),
        "all rows": lambda frames: {name: frame.clear() for name, frame in frames.items()},
    }
    if SPANS.name in frames:
        found |= {f"spans: {name}": partial(_drop_spans, which) for name, which in _SPANS.items()}
    for name in frames:
        found[f"{name}: all"] = partial(_drop_rows, name, pl.lit(True))
        found[f"{name}: all but one"] = partial(_drop_rows, name, _ROW > 0)
        found[f"{name}: of the first rank"] = partial(
            _drop_rows, name, pl.col("rank") == pl.col("rank").min()
        )
        found |= {f"{name}: {what}": partial(_change, name, values) for what, values in _values(name).items()}
    return found


def _values(table: str) -> dict[str, pl.Expr]:
    """What can be taken away from the columns of a table, by name, as the column without it."""
    found: dict[str, pl.Expr] = {}
    columns = TABLES[table].columns
    for name, column in columns.items():
        if name == "rank" or column.default is None or (name == "kind" and column.default == -1):
            continue
        none = pl.lit(column.default, dtype=column.dtype).alias(name)
        found[name] = none
        if name in _HALVED:
            found[f"half of {name}"] = pl.when(_ROW % 2 == 1).then(none).otherwise(pl.col(name)).alias(name)
    if "duration_ns" in columns:
        duration = pl.col("duration_ns")
        found["lengths"] = (0 * duration).alias("duration_ns")
        one = pl.when(pl.len() // 2 == _ROW).then(0).otherwise(duration)
        found["the length of one"] = one.alias("duration_ns")
        found["distances"] = pl.col("start_ns").min()
    if table == STEPS.name:
        found["numbers that follow each other"] = pl.col("step") * 10**12
    return found


def _drop_spans(which: pl.Expr, frames: Frames) -> Frames:
    """Take spans away; rows that name one of them name none then."""
    spans = frames[SPANS.name].filter(~which)
    left = spans.select("rank", "span_id").unique()
    return {name: _without_links(frame, left) for name, frame in frames.items()} | {SPANS.name: spans}


def _without_links(frame: pl.DataFrame, left: pl.DataFrame) -> pl.DataFrame:
    for column in set(_LINKS).intersection(frame.columns):
        there = left.select("rank", pl.col("span_id").alias(column), there=pl.lit(True))
        is_there = frame.join(there, on=["rank", column], how="left", maintain_order="left")["there"]
        frame = frame.with_columns(pl.when(is_there).then(column).otherwise(-1).alias(column))
    return frame


def _drop_rows(table: str, which: pl.Expr, frames: Frames) -> Frames:
    return {**frames, table: frames[table].filter(~which)}


def _change(table: str, values: pl.Expr, frames: Frames) -> Frames:
    return {**frames, table: frames[table].with_columns(values)}


def _keep_ranks(which: slice, frames: Frames) -> Frames:
    kept = _ranks(frames)[which]
    return {name: frame.filter(pl.col("rank").is_in(kept)) for name, frame in frames.items()}


def _ranks(frames: Frames) -> list[int]:
    return sorted({rank for frame in frames.values() for rank in frame["rank"].unique().to_list()})


def frames_of(run: Run) -> Frames:
    """The tables of a run that have rows, until `SPANS_EACH` spans of some rank have begun."""
    frames = {name: run.table(table) for name, table in TABLES.items() if run.num_rows(table)}
    if SPANS.name not in frames:
        return frames
    begun = (
        frames[SPANS.name].sort("start_ns").group_by("rank").agg(pl.col("start_ns").head(SPANS_EACH).max())
    )
    last = pl.lit(begun["start_ns"].max())
    time = {name: {"start_ns", "time_ns"}.intersection(frame.columns) for name, frame in frames.items()}
    return {
        name: frame.filter(pl.col(time[name].pop()) <= last) if time[name] else frame
        for name, frame in frames.items()
    }


def write_frames(frames: Frames, manifest: Manifest, run: Path) -> None:
    """Write tables as a run."""
    ranks = _ranks(frames)
    run.mkdir(parents=True)
    for name, frame in frames.items():
        for (rank,), rows in frame.group_by("rank", maintain_order=True):
            write_part(run, TABLES[name], f"rank{rank:05d}", rows)
    write_manifest(run, replace(manifest, ranks=[rank for rank in ranks if rank >= 0]))


@cache
def _sources() -> tuple[Path, ...]:
    """Runs that ship, and real traces where there are any: those of one job are in a folder."""
    samples = [path.parent for path in sorted((ROOT / "sample_traces").glob("*/manifest.json"))]
    traces = Path(os.environ.get("DPRO_TRACES", ROOT.parent / "shared" / "traces"))
    real = sorted(path for path in traces.glob("*/*") if path.is_dir() or path.stat().st_size <= MAX_BYTES)
    return (*samples, *real)


@cache
def _read(source: Path) -> tuple[Frames, Manifest] | None:
    """The tables of a source; None where there is no trace in it."""
    with TemporaryDirectory() as folder:
        run = source if is_run(source) else Path(folder) / "run"
        try:
            if run != source:
                import_sources([source], run, jobs=1)
        except DproError:
            return None
        opened = open_run(run)
        return frames_of(opened), opened.manifest


def of_a_removal(random: Random, number: int, folder: Path) -> Commands:
    """A run that ships, or a real one, without one thing or two."""
    sources = _sources()
    while (found := _read(sources[number % len(sources)])) is None:
        number += 1
    frames, manifest = found
    write_frames(frames, manifest, folder / "whole")
    for _ in range(random.choice((1, 1, 2))):
        frames = random.choice(list(removals_of(frames).values()))(frames)
    write_frames(frames, manifest, folder / "run")
    run, whole = str(folder / "run"), str(folder / "whole")
    asked = [[command, run, *random.choice(([], ["--json"]))] for command in COMMANDS]
    way = random.choice(("--chrome", "--perfetto"))
    return [
        *asked,
        ["export", run, way, str(folder / "exported")],
        ["diff", whole, run],
        ["diff", run, whole],
    ]
