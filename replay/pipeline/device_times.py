"""When the device did what a host launched for each operation of a pipeline, in deep windows of GPU jobs.

In: operations by the host, and spans. Out: the same operations by the device, and steps likewise. A host runs
ahead of its GPU: an operation is from the first to the last kernel that was launched within it, but for those
that communicate; a step of a rank ends with the last kernel that was launched in it.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from dpro.classify import is_communication
from dpro.replay.alignment.match import POINT_TO_POINT
from dpro.schema import COLLECTIVES, GPU_WORK_KINDS, SPANS, STEPS
from dpro.store import Run
from dpro.table import complete

COLUMNS = ["rank", "window", "kind", "name", "start_ns", "duration_ns", "correlation"]
LAUNCH = ["rank", "window", "correlation"]


class OnDevice(NamedTuple):
    """What devices did.

    Attributes:
        table: rows of `operations`; none of one that launched nothing but communication.
        steps: rows of `steps`.
        reductions: collectives but messages: `rank`, `op`, `group`, `group_ranks`, `step`, `start_ns`,
            `duration_ns`.
    """

    table: pl.DataFrame
    steps: pl.DataFrame
    reductions: pl.DataFrame


def on_device(run: Run, table: pl.DataFrame) -> OnDevice:
    """Operations, steps and reductions by the times of the device.

    Args:
        table: rows of `operations`, by the host.
    """
    launched = _launched(run.table(SPANS, COLUMNS))
    hosts = run.table(STEPS).filter((pl.col("duration_ns") >= 0) & (pl.col("window") >= 0))
    launched = _within(launched, hosts.select("rank", "step", begin="start_ns", lasts="duration_ns"))
    numbered = table.with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    computed = launched.filter(~pl.col("communicates")).drop("step")
    owned = _within(computed, numbered.select("rank", "row", begin="start_ns", lasts="duration_ns"))
    extents = owned.group_by("row").agg(pl.col("start_ns").min(), pl.col("end").max())
    times = numbered.drop("start_ns", "duration_ns").join(extents, on="row")
    found = times.with_columns(duration_ns=pl.col("end") - pl.col("start_ns")).drop("row", "end")
    return OnDevice(found.select(table.columns), _steps(launched), _reductions(run, launched))


def _launched(spans: pl.DataFrame) -> pl.DataFrame:
    """GPU work: `rank`, `window`, `start_ns`, `end`, `at` (when it was launched), `communicates`."""
    calls = spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
    calls = calls.select(*LAUNCH, at="start_ns").unique(LAUNCH, keep="first", maintain_order=True)
    work = spans.filter(pl.col("kind").cast(pl.String).is_in(GPU_WORK_KINDS) & (pl.col("duration_ns") >= 0))
    names = work["name"].unique().to_list()
    known = pl.DataFrame(
        {"name": names, "communicates": [is_communication(name) for name in names]},
        {"name": pl.String, "communicates": pl.Boolean},
    )
    return (
        work.join(calls, on=LAUNCH)
        .join(known, on="name")
        .select(
            "rank", "window", "start_ns", "at", "communicates", end=pl.col("start_ns") + pl.col("duration_ns")
        )
    )


def _within(launched: pl.DataFrame, hosts: pl.DataFrame) -> pl.DataFrame:
    """GPU work that was launched within intervals of its host, with what else these have."""
    joined = launched.sort("at").join_asof(
        hosts.sort("begin"), left_on="at", right_on="begin", by="rank", check_sortedness=False
    )
    return joined.filter(pl.col("at") < pl.col("begin") + pl.col("lasts")).drop("begin", "lasts")


def _steps(launched: pl.DataFrame) -> pl.DataFrame:
    """Steps from the end of the one before in the window, the first from its first kernel."""
    by = ["rank", "window"]
    extents = launched.group_by(*by, "step").agg(first=pl.col("start_ns").min(), end=pl.col("end").max())
    ended = extents.sort(*by, "step").with_columns(
        start_ns=pl.coalesce(pl.col("end").shift(1).over(by), "first")
    )
    lasts = (pl.col("end") - pl.col("start_ns")).clip(lower_bound=0)
    return complete(STEPS, ended.select(*by, "step", "start_ns", duration_ns=lasts))


def _reductions(run: Run, launched: pl.DataFrame) -> pl.DataFrame:
    """Collectives on the device, with the step that they began in by the device's own steps."""
    columns = ["rank", "window", "op", "group", "group_ranks", "start_ns", "duration_ns"]
    rows = run.table(COLLECTIVES, columns).filter(
        ~pl.col("op").is_in(POINT_TO_POINT) & (pl.col("window") >= 0) & (pl.col("duration_ns") >= 0)
    )
    begun = launched.filter("communicates").select("rank", "window", "start_ns", "step")
    return rows.join(begun.unique(["rank", "window", "start_ns"]), on=["rank", "window", "start_ns"])
