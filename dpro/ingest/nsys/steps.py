"""Where training steps begin and end by NVTX ranges.

In: one process's spans. Out: rows of `steps`: from ranges that count (`step 12`, `iter_3`), else from the
marks that `dpro.ingest.derived.steps` knows, else from ranges that repeat at the top level of a thread; none
where there are no such ranges. What ranges are called is up to the job: the source of a step names them.
"""

from __future__ import annotations

import polars as pl

from dpro.ingest.derived.steps import find_steps as find_marked_steps

_COLUMNS = ("step", "start_ns", "duration_ns", "source")
_COUNTED = r"(?i)^(.*(?:step|iter|iteration|batch)[^\d]{0,3})(\d+)[^\w]*$"
# Ranges of libraries, which repeat within a step.
_LIBRARY = r"^(nccl|gloo|FSDP::|DistributedDataParallel|Optimizer\.|enumerate\()"


def find_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Steps of one process.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `tid`, `domain`, `sequence_number` and
            `forward_thread`.
    """
    ranges = spans.filter(
        (pl.col("kind") == "annotation")
        & ~pl.col("name").str.contains(_LIBRARY)
        & (pl.col("domain").str.to_uppercase() != "NCCL")
        & (pl.col("duration_ns") > 0)
    ).with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns"))
    for steps in (_counted(ranges), find_marked_steps(spans)):
        if steps.height:
            return steps
    return _repeated(ranges)


def _counted(ranges: pl.DataFrame) -> pl.DataFrame:
    """The outermost ranges whose names count: of all such series the one that takes most time."""
    series = ["tid", "prefix"]
    counted = (
        ranges.with_columns(
            prefix=pl.col("name").str.extract(_COUNTED, 1),
            step=pl.col("name").str.extract(_COUNTED, 2).cast(pl.Int64, strict=False),
        )
        .drop_nulls("step")
        .sort("start_ns", maintain_order=True)
    )
    # A number that comes twice counts something within a step; steps do not overlap.
    apart = (pl.col("start_ns") >= pl.col("end_ns").shift(1).over(series)).fill_null(True)
    candidates = (
        counted.with_columns(apart=apart)
        .group_by(series)
        .agg(
            total=pl.col("duration_ns").sum(),
            sound=pl.col("step").is_unique().all() & pl.col("apart").all(),
        )
    )
    best = (
        candidates.filter("sound").sort(["total", "prefix", "tid"], descending=[True, False, False]).head(1)
    )
    found = counted.join(best, on=series, how="semi").with_columns(source=pl.format("NVTX {}N", "prefix"))
    return found.select(_COLUMNS).sort("step")


def _repeated(ranges: pl.DataFrame) -> pl.DataFrame:
    """The ranges at the top level of a thread that repeat and take most time.

    Ranges that come equally often, one after the other (forward, backward, optimizer), make a step together.
    """
    before = pl.col("end_ns").cum_max().shift(1).over("tid")
    top = ranges.sort("start_ns", "end_ns", descending=[False, True]).filter(
        before.is_null() | (pl.col("start_ns") >= before)
    )
    named = top.with_columns(
        count=pl.len().over("tid", "name"), nth=pl.int_range(pl.len()).over("tid", "name")
    )
    repeated = named.filter(pl.col("count") > 1)
    totals = repeated.group_by("tid", "name", "count").agg(total=pl.col("duration_ns").sum())
    longest = totals.sort(["total", "name", "tid"], descending=[True, False, False]).head(1)
    alone = repeated.join(longest, on=["tid", "name"], how="semi")
    together = _cycles(repeated.join(longest, on=["tid", "count"], how="semi"))
    if (together["start_ns"] >= together["start_ns"].shift(1) + together["duration_ns"].shift(1)).all():
        return together
    return _cycles(alone)


def _cycles(ranges: pl.DataFrame) -> pl.DataFrame:
    """The n-th of each name together, in order."""
    first, last = pl.col("start_ns").min(), pl.col("end_ns").max()
    cycles = ranges.group_by("nth").agg(
        start_ns=first,
        duration_ns=last - first,
        source=pl.lit("NVTX ") + pl.col("name").sort_by("start_ns").str.join(", "),
    )
    return cycles.rename({"nth": "step"}).select(_COLUMNS).sort("step")
