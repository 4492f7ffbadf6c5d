"""How long the stages of a pipeline stand still for each other.

In: an opened run that consists of operations of known role, or has them recorded. Out: per stage, how much of
the time between the first forward of a step on any stage and its last backward on any its ranks did not
compute. What else is in a step (gathering parameters, reducing gradients, the optimizer) is not of the
pipeline.
"""

from __future__ import annotations

import polars as pl

from dpro.replay.intervals import covered, union
from dpro.replay.pipeline.operations import Role
from dpro.replay.pipeline.recorded import operations_of
from dpro.selection import ALL, Selection
from dpro.store import Run

SCHEMA: dict[str, type[pl.DataType]] = {
    "stage": pl.Int64,
    "ranks": pl.Int64,
    "steps": pl.Int64,
    "pipeline_ns": pl.Float64,
    "compute_ns": pl.Float64,
    "bubble_ns": pl.Float64,
    "bubble_share": pl.Float64,
}

COMPUTES = (Role.FORWARD, Role.BACKWARD, Role.WEIGHTS)


def pipeline_bubbles(run: Run, selection: Selection = ALL) -> pl.DataFrame:
    """The bubble of each stage: the pipeline's time in which a rank computes neither forward nor backward.

    With p stages, m micro-batches and even work it is (p - 1) / (m + p - 1) of the pipeline's time (Narayanan
    et al., SC 2021, section 2.2). It is averaged over steps and the ranks of a stage.

    Returns:
        One row per stage, columns as in `SCHEMA`; none where the run has no operations, or its
        pipeline has one stage.
    """
    operations = operations_of(run)
    if operations is None:
        return pl.DataFrame(schema=SCHEMA)
    rows = operations.rows.filter(pl.col("role").is_in([int(role) for role in COMPUTES]))
    if operations.num_stages < 2 or rows.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    extents = rows.group_by("step", "dp").agg(begin=pl.col("start").min(), finish=pl.col("end").max())
    parts = []
    for (_, stage), computes in (
        selection.keep(rows).join(extents, on=["step", "dp"]).group_by(["rank", "stage"], maintain_order=True)
    ):
        busy = union(computes["start"].to_numpy(), computes["end"].to_numpy())
        steps = computes.unique("step", maintain_order=True)
        begin, finish = steps["begin"].to_numpy(), steps["finish"].to_numpy()
        compute = covered(busy, begin, finish)
        parts.append(
            pl.DataFrame(
                {"stage": stage, "rank": computes["rank"][0], "pipeline": finish - begin, "compute": compute}
            )
        )
    if not parts:
        return pl.DataFrame(schema=SCHEMA)
    total = (
        pl.concat(parts)
        .group_by("stage")
        .agg(
            ranks=pl.col("rank").n_unique(),
            steps=pl.len() // pl.col("rank").n_unique(),
            pipeline_ns=pl.col("pipeline").mean(),
            compute_ns=pl.col("compute").mean(),
        )
    )
    bubble = pl.col("pipeline_ns") - pl.col("compute_ns")
    bubbles = total.with_columns(bubble_ns=bubble, bubble_share=bubble / pl.col("pipeline_ns"))
    return bubbles.select(*SCHEMA).cast(pl.Schema(SCHEMA)).sort("stage")
