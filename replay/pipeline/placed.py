"""Operations that were found in a trace, with the stage and the step that each is in.

In: when ranks computed for which micro-batch. Out: rows of table `operations`.
"""

from __future__ import annotations

import polars as pl

from dpro.replay.mesh import places_along
from dpro.replay.run_mesh import mesh_of_run
from dpro.schema import OPERATIONS, STEPS
from dpro.store import Run
from dpro.table import complete

# Operators that are no work: messages, and what makes room for them.
MESSAGE = r"^(?:c10d::|gloo:|nccl:|record_param_comms|ProcessGroup|aten::(?:empty|detach))"


def placed_in_steps(run: Run, found: pl.DataFrame, source: str) -> pl.DataFrame:
    """Rows of `operations`; those outside the steps of their rank are in step -1.

    Args:
        found: `rank`, `start_ns`, `end`, `place` (in the model; null where it is that of the stage),
            `micro_batch`, `kind`.
    """
    stages = _stages(run, found)
    placed = found.join(stages, on="rank").with_columns(pl.col("place").fill_null(pl.col("stage")))
    chunk = pl.col("place").rank("dense").over("rank").cast(pl.Int64) - 1
    steps = run.table(STEPS).filter(pl.col("duration_ns") >= 0)
    begun = steps.select("rank", "step", begin="start_ns", until=pl.col("start_ns") + pl.col("duration_ns"))
    joined = placed.sort("start_ns").join_asof(
        begun.sort("begin"), left_on="start_ns", right_on="begin", by="rank", check_sortedness=False
    )
    within = pl.when(pl.col("start_ns") < pl.col("until")).then("step").otherwise(-1)
    rows = joined.select(
        *("rank", "stage", "place", "micro_batch", "kind", "start_ns"),
        step=within.fill_null(-1),
        chunk=chunk,
        duration_ns=pl.col("end") - pl.col("start_ns"),
        source=pl.lit(source),
    )
    return complete(OPERATIONS, rows).sort(OPERATIONS.sort_by)


def _stages(run: Run, found: pl.DataFrame) -> pl.DataFrame:
    """`rank` and `stage`: as the job's groups say, else by the first chunk that a rank has, else by rank.

    Where neither groups nor operations say where a stage is, ranks are in the order of stages.
    """
    along = places_along(mesh_of_run(run), "pp")
    recorded = pl.DataFrame([*along.items()], {"rank": pl.Int32, "recorded": pl.Int64}, orient="row")
    first = found.group_by("rank").agg(pl.col("place").min()).sort("place", "rank")
    by_place = first.with_columns(by_place=pl.col("place").rank("dense").cast(pl.Int64) - 1)
    by_rank = pl.col("rank").rank("dense").cast(pl.Int64) - 1
    known = by_place.join(recorded, on="rank", how="left").with_columns(by_rank=by_rank)
    return known.select("rank", stage=pl.coalesce("recorded", "by_place", "by_rank"))
