"""Published tables as layouts with measured steps, with the errors and pitfalls of each table handled.

In: a folder of tables. Out: a `Table` per source, or the frame of rows that a check needs. Rows are left out
by rules that do not depend on predictions, and are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from benchmarks.reality_checks import models
from benchmarks.reality_checks.scoring import Table
from dpro.extensions.plan.model import FRAMEWORKS, Model
from dpro.replay.cost.machine import Machine

STALLED = 2.5  # times the usual time
IN_FP8 = 0.7  # of the time of fp8 products by data sheet and `IN_TRAINING`; set with MLPerf's rows in sight


def read(folder: Path, name: str) -> pl.DataFrame | None:
    """Read a table by its name, in CSV or Parquet; None where it is not in the folder."""
    if (folder / f"{name}.csv").is_file():
        rows = pl.read_csv(folder / f"{name}.csv", infer_schema_length=None)
        empty = [column for column in rows.columns if rows[column].null_count() == rows.height]
        return rows.with_columns(pl.col(empty).cast(pl.Int64))  # an empty column reads as text
    if (folder / f"{name}.parquet").is_file():
        return pl.read_parquet(folder / f"{name}.parquet")
    return None


def _table(
    rows: pl.DataFrame,
    group: Sequence[str],
    model: Callable[[dict[str, object]], Model | None],
    machine: Callable[[dict[str, object]], Machine | None],
    framework: str,
    skipped: dict[str, int] | None = None,
) -> Table:
    """Make a table of the rows whose model and machine are known."""
    given = [(model(row), machine(row)) for row in rows.iter_rows(named=True)]
    known = [one is not None and other is not None for one, other in given]
    skipped = dict(skipped or {})
    if not all(known):
        skipped["the model or the GPU is not known"] = len(known) - sum(known)
    kept = rows.filter(pl.Series(known, dtype=pl.Boolean))
    columns = [pl.struct(list(group)).rank("dense").alias("group")] if kept.height else []
    found = [pair for pair, one in zip(given, known) if one]
    return Table(
        kept.with_columns(columns),
        [pair[0] for pair in found if pair[0]],
        [pair[1] for pair in found if pair[1]],
        FRAMEWORKS[framework],
        skipped,
    )


def _micro_batches() -> pl.Expr:
    exact = pl.col("global_batch") / (pl.col("dp") * pl.col("micro_batch"))
    return exact.round().clip(lower_bound=1).cast(pl.Int64).alias("micro_batches")


def vtrain(rows: pl.DataFrame, per_micro_batch: bool) -> Table:
    """Make vTrain's validation: Megatron-DeepSpeed, whole layers recomputed, no ZeRO.

    Args:
        rows: of one of its two tables.
        per_micro_batch: whether only rows of one micro-batch are compared.
    """
    rows = rows.with_columns(_micro_batches(), recompute=pl.lit(2), zero=pl.lit(0))
    group = ["hidden", "layers", "gpus", "global_batch", *(["micro_batch"] if per_micro_batch else [])]

    def model(row: dict[str, object]) -> Model:
        sizes = (int(row[key]) for key in ("hidden", "layers", "heads", "seq_len"))  # type: ignore[call-overload]
        return models.of_megatron(*sizes, models.VOCABULARY_OF_MEGATRON)

    return _table(rows, group, model, lambda _: models.a100(), "megatron-deepspeed")


def bloom(rows: pl.DataFrame) -> Table:
    """Make BLOOM's trials; a missing hidden size is the usual one, missing layers follow from the size."""
    whole = rows.filter(pl.col("step_ms").is_not_null() & pl.col("dp").is_not_null())
    skipped = {"no step, or no layout": rows.height - whole.height}
    consistent = pl.col("dp") * pl.col("tp") * pl.col("pp") == pl.col("gpus")
    skipped["degrees do not make the number of GPUs"] = whole.filter(~consistent).height
    usual = 14400
    whole = whole.filter(consistent).with_columns(
        pl.col("hidden").fill_null(usual), pl.col("heads").fill_null(64), recompute=pl.lit(2)
    )
    by_size = (pl.col("size_b") * 1e9 / (12 * pl.col("hidden") ** 2)).round().cast(pl.Int64)
    whole = whole.with_columns(pl.col("layers").fill_null(by_size), zero=pl.col("zero_stage").fill_null(1))
    whole = whole.with_columns(pl.col("seq_len").fill_null(2048)).with_columns(_micro_batches())

    def model(row: dict[str, object]) -> Model:
        sizes = (int(row[key]) for key in ("hidden", "layers", "heads", "seq_len"))  # type: ignore[call-overload]
        return models.of_megatron(*sizes, 250880)

    group = ["table", "gpus", "size_b", "global_batch"]
    return _table(whole, group, model, lambda _: models.bloom(), "megatron-deepspeed", skipped)


def simumax(rows: pl.DataFrame) -> Table:
    """Make SimuMax's shortened models on B200; rows of one length and number of micro-batches compare."""

    def model(row: dict[str, object]) -> Model | None:
        return models.named(str(row["model"]), int(row["layers"]), int(row["seq_len"]))  # type: ignore[call-overload]

    b200 = models.of_accelerator("B200")
    table = _table(
        rows.with_columns(micro_batch=pl.lit(1)),
        ["model", "layers", "seq_len", "micro_batches"],
        model,
        lambda _: b200,
        "megatron",
    )
    return replace(table, software=replace(table.software, overlap=0.0))


def _of_ultrascale(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows whose degrees agree with their batch, with columns of layouts."""
    same = pl.col("dp") * pl.col("micro_batch") * pl.col("grad_acc") == pl.col("global_batch")
    return rows.filter(same).with_columns(
        micro_batches="grad_acc", zero="zero_stage", step_ms="derived_step_ms"
    )


def ultrascale(rows: pl.DataFrame, with_stalled: bool) -> Table:
    """Make the ultrascale page's rows that ran, with or without those that stalled.

    Args:
        rows: of its table.
        with_stalled: whether stalled rows stay.
    """
    whole = _of_ultrascale(rows)
    skipped = {"the batch is not what the row says": rows.height - whole.height}
    ran = whole.filter(~pl.col("failed"))
    if not with_stalled:
        stalls = stalled(ran)
        skipped["stalled"] = int(stalls.sum())
        ran = ran.filter(~stalls)
    return _table(
        ran,
        ["model", "nodes"],
        lambda row: models.of_ultrascale(str(row["model"]), int(row["seq_len"])),  # type: ignore[call-overload]
        lambda _: models.ultrascale(),
        "nanotron",
        skipped,
    )


def stalled(rows: pl.DataFrame) -> pl.Series:
    """Mark [N] rows that took far longer than rows that cannot have been faster.

    Either less than half of the throughput of the same layout on half the nodes; or, per micro-batch and
    layer, more than `STALLED` times the second-fastest row of the same model and tensor parallelism with the
    same or a larger micro-batch (which takes longer), both with a pipeline or both without, both on one node
    or both on more. The marks do not depend on predictions.
    """
    same = ["model", "tp", "pp", "micro_batch", "zero_stage"]
    half = rows.select(*same, nodes=pl.col("nodes") * 2, half=pl.col("tokens_per_s_per_gpu"))
    half = half.group_by(*same, "nodes").agg(pl.col("half").median())
    numbered = rows.with_row_index("row").with_columns(
        per_layer=pl.col("step_ms") / (pl.col("micro_batches") + pl.col("pp") - 1) * pl.col("pp"),
        piped=pl.col("pp") > 1,
        several=pl.col("nodes") > 1,
    )
    equals = ["model", "tp", "piped", "several"]
    pairs = numbered.select("row", *equals, "micro_batch").join(
        numbered.select(*equals, size="micro_batch", other="per_layer"), on=equals
    )
    usual = (
        pairs.filter(pl.col("size") >= pl.col("micro_batch"))
        .group_by("row")
        .agg(usual=pl.col("other").sort().slice(0, 2).last())
    )
    slow = pl.col("tokens_per_s_per_gpu") < 0.5 * pl.col("half")
    return (
        numbered.join(half, on=[*same, "nodes"], how="left")
        .join(usual, on="row", how="left")
        .sort("row")
        .select((slow.fill_null(False) | (pl.col("per_layer") > STALLED * pl.col("usual"))).alias("stalled"))
        .to_series()
    )


def ultrascale_tried(rows: pl.DataFrame) -> Table:
    """Make all rows of the ultrascale page, those that failed included."""
    return _table(
        _of_ultrascale(rows),
        ["model"],
        lambda row: models.of_ultrascale(str(row["model"]), int(row["seq_len"])),  # type: ignore[call-overload]
        lambda _: models.ultrascale(),
        "nanotron",
    )


def mlperf(rows: pl.DataFrame) -> Table:
    """Make MLPerf's Llama-3.1 405 B: the median of each system's runs; rows of one accelerator compare."""
    wanted = rows.filter(
        (pl.col("benchmark") == "llama31_405b") & pl.col("step_ms").is_not_null() & pl.col("pp").is_not_null()
    )
    layout = ["tp", "pp", "cp", "vpp", "dp", "micro_batch", "grad_acc", "global_batch", "gpus", "seq_len"]
    keys = [key for key in ("round", "submitter", "system", "accelerator") if key in wanted.columns]
    systems = (
        wanted.group_by(keys)
        .agg(pl.col(layout).first(), pl.col("step_ms").median())
        .drop_nulls(["tp", "pp", "dp", "grad_acc", "micro_batch", "gpus"])
        .with_columns(pl.col(layout).cast(pl.Int64, strict=False))
        .with_columns(micro_batches="grad_acc", zero=pl.lit(1))
        .sort("accelerator", "gpus", *keys)
    )
    table = _table(
        systems,
        ["accelerator"],
        lambda row: models.named("llama3405b", None, int(row["seq_len"] or 8192)),  # type: ignore[call-overload]
        lambda row: models.of_accelerator(str(row["accelerator"])),
        "megatron",
    )
    software = replace(
        table.software, dtype="fp8", gradient_bytes=2, tensor_overlap=0.7, overlap=0.8, balanced=True
    )
    fp8 = [machine if "fp8" in machine.sheet.tflops else None for machine in table.machines]
    keep = pl.Series([each is not None for each in fp8], dtype=pl.Boolean)
    return replace(
        table,
        rows=table.rows.filter(keep),
        models=[model for model, each in zip(table.models, fp8) if each],
        machines=[replace(each, compute=IN_FP8 * each.compute) for each in fp8 if each],
        software=software,
    )
