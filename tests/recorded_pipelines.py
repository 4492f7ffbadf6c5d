"""Made-up jobs of `tests.pipelines` as dpro would have recorded them: table `operations` beside steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl

from dpro.schema import OPERATIONS, STEPS, WORKERS
from dpro.store import Manifest, Run, open_run, write_manifest, write_part
from dpro.table import complete
from tests.pipelines import MS

KINDS = {"forward-compute": "forward", "backward-compute": "backward"}


def recorded(rows: list[dict[str, Any]], folder: Path, update: float = 4.0) -> Run:
    """The forwards and backwards of a job as a recording of it, with steps that end after an update.

    Args:
        rows: as from `tests.pipelines.Job.run`, ms.
        folder: where to.
        update: ms that each rank goes on after the last operation of the job in a step.
    """
    frame = pl.DataFrame(rows).filter(pl.col("optype").is_in(list(KINDS)))
    end = pl.col("start_ts") + pl.col("duration")
    lasts = frame.group_by("step").agg(length=end.max() + update / 1e3).sort("step")
    lasts = lasts.with_columns(begin=pl.col("length").cum_sum() - pl.col("length"))
    placed = frame.join(lasts, on="step")
    operations = placed.select(
        *("rank", "stage"),
        step=pl.col("step") + 3,
        chunk=pl.lit(0),
        place="stage",
        micro_batch="mb_id",
        kind=pl.col("optype").replace_strict(KINDS),
        start_ns=_ns(pl.col("begin") + pl.col("start_ts")),
        duration_ns=_ns(pl.col("duration")),
    )
    steps = placed.select(
        "rank",
        step=pl.col("step") + 3,
        start_ns=_ns(pl.col("begin")),
        duration_ns=_ns(pl.col("length")),
        window=pl.lit(-1),
    ).unique()
    workers = placed.select("rank", dp="dp_rank", pp="stage", host=pl.lit("a")).unique().sort("rank")
    for table, part in ((OPERATIONS, operations), (STEPS, steps), (WORKERS, workers)):
        write_part(folder, table, "rank00000", complete(table, part))
    ranks = workers["rank"].to_list()
    write_manifest(folder, Manifest(world_size=len(ranks), ranks=ranks))
    return open_run(folder)


def _ns(seconds: pl.Expr) -> pl.Expr:
    return (seconds * 1e3 * MS).round().cast(pl.Int64)
