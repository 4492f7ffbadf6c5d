"""Where training steps begin and end in a trace.

In: spans of one rank. Out: rows of `steps`: from the profiler's own marks, else from the ends of optimizer
steps, else guessed from what repeats. A step is a stretch of CPU time; its GPU work may run later.
"""

from __future__ import annotations

import polars as pl

from dpro.ingest.derived.repetition import SOURCE as REPETITION
from dpro.ingest.derived.repetition import repetitions

_COLUMNS = ("step", "start_ns", "duration_ns", "source")
_OPTIMIZER = r"^Optimizer\.step#(.+)\.step$"


def find_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Steps by `ProfilerStep#N`, else by optimizer annotations, else none.

    Args:
        spans: with `kind`, `name`, `start_ns`, `duration_ns`, `sequence_number`, `forward_thread`.
    """
    marked = _marked_steps(spans)
    return marked if marked.height else _optimizer_steps(spans)


def guess_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Steps as above, else by the repetition of the main thread's work where that is clear.

    Args:
        spans: as above, and `pid`, `tid`, `stream`.
    """
    found = find_steps(spans)
    if found.height:
        return found
    bounds = repetitions(spans)
    return pl.DataFrame(
        {
            "step": range(len(bounds)),
            "start_ns": [start for start, _ in bounds],
            "duration_ns": [end - start for start, end in bounds],
            "source": [REPETITION] * len(bounds),
        },
        schema=found.schema,
    )


def _marked_steps(spans: pl.DataFrame) -> pl.DataFrame:
    # The 2020 profiler has no annotations: there the mark is an operator.
    marked = pl.col("kind").is_in(["annotation", "cpu_op"]) & pl.col("name").str.starts_with("ProfilerStep#")
    marks = (
        spans.select("kind", "name", "start_ns", "duration_ns")
        .filter(marked)
        .with_columns(
            step=pl.col("name").str.extract(r"^ProfilerStep#(\d+)$").cast(pl.Int64, strict=False),
            source=pl.lit("ProfilerStep"),
        )
    )
    first = marks.drop_nulls("step").unique("step", keep="first", maintain_order=True)
    return first.select(_COLUMNS).sort("step")


def _optimizer_steps(spans: pl.DataFrame) -> pl.DataFrame:
    """Each step ends with its last optimizer.

    Optimizers with no forward work between them belong to one step. Where one optimizer is in every such
    group, a group is a step (others may step less often); where none is (two networks trained in turn),
    the rarest optimizer ends the step. The time before the first end is part of the first step; what
    follows the last end is part of a step that the window cuts, and is left out.
    """
    groups = _optimizer_groups(spans)
    counts = groups.explode("optimizers").group_by("optimizers").len().sort("len", "optimizers")
    if counts.is_empty():
        return pl.DataFrame(
            schema={"step": pl.Int64, "start_ns": pl.Int64, "duration_ns": pl.Int64, "source": pl.String}
        )
    if counts["len"].max() != groups.height:
        groups = groups.filter(pl.col("optimizers").list.contains(counts["optimizers"][0]))
    ends = groups["end_ns"].sort()
    starts = pl.concat([spans["start_ns"].sort().head(1), ends.head(ends.len() - 1)])
    return pl.DataFrame({"start_ns": starts, "duration_ns": ends - starts}).select(
        step=pl.int_range(pl.len()),
        start_ns="start_ns",
        duration_ns="duration_ns",
        source=pl.lit("optimizer annotation"),
    )


def _optimizer_groups(spans: pl.DataFrame) -> pl.DataFrame:
    """Optimizer annotations with no forward work between them: their optimizers and the last end."""
    annotations = spans.filter(pl.col("kind") == "annotation").select(
        "start_ns",
        optimizer=pl.col("name").str.extract(_OPTIMIZER),
        end_ns=pl.col("start_ns") + pl.col("duration_ns"),
    )
    optimizers = annotations.drop_nulls("optimizer").sort("start_ns", maintain_order=True)
    forward = spans.filter((pl.col("sequence_number") >= 0) & (pl.col("forward_thread") <= 0))[
        "start_ns"
    ].sort()
    # Without autograd's numbers forward work cannot be seen: then every annotation stands alone.
    alone = pl.int_range(pl.len())
    work_before = pl.Series(forward.search_sorted(optimizers["start_ns"])) if forward.len() else alone
    return (
        optimizers.with_columns(group=work_before)
        .group_by("group", maintain_order=True)
        .agg(pl.col("optimizer").unique().sort().alias("optimizers"), pl.col("end_ns").max())
    )
