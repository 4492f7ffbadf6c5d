"""From the records of a process to its rows of `operations`.

In: its records, its steps, and `pipeline.json`, which says what part of the model it has. Out: a row per
forward and backward of a micro-batch. What the loss took is added to the forward that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from dpro.collectors.convert.recorded import RecordedProcess
from dpro.collectors.inside import records
from dpro.collectors.inside.names import FORWARD, LOSS
from dpro.collectors.inside.names import OPERATIONS as KINDS
from dpro.collectors.inside.pipelines.facts import PIPELINE
from dpro.schema import OPERATIONS
from dpro.words import from_json

MICRO_BATCH_BITS = 32


def operations(
    process: RecordedProcess, recorded: Sequence[records.Record], steps: pl.DataFrame
) -> pl.DataFrame:
    """The operations of a process, as rows of `operations`.

    Args:
        steps: its rows of `steps`.
    """
    path = process.folder / PIPELINE
    facts: dict[str, Any] = from_json(path.read_text()) if path.is_file() else {}
    rows = [
        (r.a, r.b, r.c >> MICRO_BATCH_BITS, r.c & ((1 << MICRO_BATCH_BITS) - 1), KINDS[r.d])
        for r in recorded
        if r.kind == records.OPERATION and 0 <= r.d < len(KINDS)
    ]
    if not facts or not rows:
        return OPERATIONS.empty()
    chunks = {int(place): chunk for place, chunk in facts["chunks"].items()}
    found = pl.DataFrame(rows, _RECORDED, orient="row").sort("start_ns")
    return _with_losses(_in_steps(found, steps)).select(
        "step",
        "place",
        "micro_batch",
        "kind",
        "start_ns",
        rank=pl.lit(process.rank, pl.Int32),
        stage=pl.lit(int(facts["stage"]), pl.Int64),
        chunk=pl.col("place").replace_strict(chunks, default=-1, return_dtype=pl.Int64),
        duration_ns=pl.col("end_ns") - pl.col("start_ns"),
        source=pl.lit(str(facts["source"])),
    )


_RECORDED = {
    "start_ns": pl.Int64, "end_ns": pl.Int64, "place": pl.Int64, "micro_batch": pl.Int64, "kind": pl.String,
}  # fmt: skip


def _in_steps(found: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """The rows, sorted by start, with the `step` that each began in."""
    begun = steps.select("step", "duration_ns", begin="start_ns").sort("begin")
    joined = found.join_asof(begun, left_on="start_ns", right_on="begin", strategy="backward")
    within = pl.col("start_ns") < pl.col("begin") + pl.col("duration_ns")
    return joined.with_columns(step=pl.when(within).then("step").otherwise(-1).fill_null(-1))


def _with_losses(found: pl.DataFrame) -> pl.DataFrame:
    """Forwards until their loss is there, and all else but losses; outside steps losses are left out."""
    key = ["step", "place", "micro_batch"]
    losses = found.filter((pl.col("kind") == LOSS) & (pl.col("step") >= 0))
    until = losses.group_by(key).agg(kind=pl.lit(FORWARD), loss_ns=pl.col("end_ns").max())
    return (
        found.filter(pl.col("kind") != LOSS)
        .join(until, on=[*key, "kind"], how="left", maintain_order="left")
        .with_columns(end_ns=pl.max_horizontal("end_ns", "loss_ns"))
    )
