"""Operations of a pipeline by its messages and its backward passes: traces whose schedule marks no ranges.

In: spans of a run. Out: rows of table `operations`. PyTorch's profiler numbers the operators of a forward
pass, and gives the functions that autograd runs for them the same numbers. What a rank runs backward between
two messages is the backward of one micro-batch (the second time, that of its weights alone), and what has
these numbers is its forward. Who schedules does not matter: 1F1B of `torch.distributed.pipelining`,
Megatron-core, or DeepSpeed.

In a pipeline the first stage sends first, all others receive first. Where a stage has several chunks of the
model, which one a forward is of would be a guess: there are no rows of such a job.
"""

from __future__ import annotations

import polars as pl

from dpro.replay.pipeline.placed import MESSAGE, placed_in_steps
from dpro.schema import OPERATIONS, SPANS, STEPS
from dpro.store import Run

FUNCTION = "autograd::engine::evaluate_function"
SENT, RECEIVED = "c10d::send", "c10d::recv"
NO_FORWARD = r"^(?:Optimizer\.|enumerate\()"  # annotations of an optimizer, and of a data loader
SOURCE = "messages and backward passes"
COLUMNS = ["kind", "name", "rank", "window", "start_ns", "duration_ns", "sequence_number"]
PLACE = ["rank", "window"]
PASS = [*PLACE, "since"]  # `since`: the latest message or numbered operator before it
BATCH = [*PLACE, "batch"]


def operations_by_backwards(run: Run) -> pl.DataFrame:
    """Rows of `operations`; none of what is no pipeline, in step -1 those outside the steps of their rank."""
    parts = run.parts(SPANS)
    if not parts or not _may_pipeline(run.read(SPANS, parts[:1], ["kind", "name"])):
        return OPERATIONS.empty()
    spans = run.table(SPANS, COLUMNS).filter(pl.col("duration_ns") >= 0)
    spans = spans.with_columns(end=pl.col("start_ns") + pl.col("duration_ns"), number="sequence_number")
    spans = spans.sort("start_ns", "end")
    name = pl.col("name")
    called = spans.filter(pl.col("kind") == "cpu_op")
    messages = called.filter(name.str.starts_with(SENT) | name.str.starts_with(RECEIVED))
    functions = called.filter(name.str.starts_with(FUNCTION))
    operators = _outside(called.filter(~name.str.contains(f"{MESSAGE}|^autograd::")), functions)
    passes = _passes(functions, messages, operators)
    others = spans.filter((pl.col("kind") == "annotation") & name.str.contains(NO_FORWARD))
    starts = [each.select(*PLACE, "start_ns") for each in (messages, functions, run.table(STEPS))]
    bounds = pl.concat([*starts, others.select(*PLACE, start_ns="end")])
    found = pl.concat([_backwards(passes), _forwards(passes, operators, bounds)])
    rows = _in_order(placed_in_steps(run, found, SOURCE))
    return rows if _is_pipeline(run, rows, messages) else OPERATIONS.empty()


def _may_pipeline(spans: pl.DataFrame) -> bool:
    """Whether a rank sends messages, and computes gradients."""
    name = spans.filter(pl.col("kind") == "cpu_op")["name"]
    return bool(name.str.starts_with(SENT).any() and name.str.starts_with(FUNCTION).any())


def _outside(operators: pl.DataFrame, functions: pl.DataFrame) -> pl.DataFrame:
    """Operators that no function of autograd runs: not what is recomputed."""
    bounds = functions.select(*PLACE, begin="start_ns", until="end")
    held = operators.join_asof(bounds, left_on="start_ns", right_on="begin", by=PLACE, check_sortedness=False)
    return held.filter((pl.col("start_ns") >= pl.col("until")).fill_null(True)).drop("begin", "until")


def _passes(functions: pl.DataFrame, messages: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Backward passes: `PLACE`, `start_ns`, `end`, `first` and `last` of their numbers, and `batch`.

    Those of one `batch` have numbers in common: they are of one forward.
    """
    breaks = pl.concat(
        [each.select(*PLACE, "start_ns") for each in (messages, operators.filter(pl.col("number") >= 0))]
    )
    breaks = breaks.with_columns(since="start_ns").sort("start_ns")
    grouped = functions.join_asof(breaks, on="start_ns", by=PLACE, check_sortedness=False).group_by(PASS)
    known = pl.col("number").filter(pl.col("number") >= 0)
    passes = grouped.agg(
        pl.col("start_ns").min(), pl.col("end").max(), first=known.min(), last=known.max()
    ).drop_nulls("first")
    before = pl.col("last").cum_max().shift(1).over(PLACE)
    ordered = passes.sort(*PLACE, "first", "start_ns")
    return ordered.with_columns(batch=(pl.col("first") > before).fill_null(True).cum_sum().over(PLACE))


def _backwards(passes: pl.DataFrame) -> pl.DataFrame:
    """Operations: the first pass of a batch, and the second, of weights."""
    nth = pl.int_range(pl.len()).over(BATCH)
    several = pl.len().over(BATCH) > 1
    kind = (
        pl.when(~several)
        .then(pl.lit("backward"))
        .when(pl.col("nth") == 0)
        .then(pl.lit("backward_input"))
        .otherwise(pl.lit("backward_weight"))
    )
    ordered = passes.sort("start_ns").with_columns(nth=nth)
    return ordered.select("rank", "start_ns", "end", micro_batch="batch", kind=kind).with_columns(_NO_PLACE)


_NO_PLACE = pl.lit(None, pl.Int64).alias("place")


def _forwards(passes: pl.DataFrame, operators: pl.DataFrame, bounds: pl.DataFrame) -> pl.DataFrame:
    """Operations: operators between the same bounds as the last that has a number of the batch.

    Args:
        passes: as from `_passes`.
        bounds: `PLACE` and `start_ns` of what no forward goes on across.
    """
    bounds = bounds.with_columns(since="start_ns").sort("start_ns")
    inside = operators.join_asof(bounds, on="start_ns", by=PLACE, check_sortedness=False)
    batches = passes.group_by(BATCH).agg(pl.col("first").min(), pl.col("last").max()).sort("first")
    owned = (
        inside.filter(pl.col("number") >= 0)
        .sort("number", "start_ns")
        .join_asof(batches, left_on="number", right_on="first", by=PLACE, check_sortedness=False)
    ).filter(pl.col("number") <= pl.col("last"))
    final = owned.group_by(BATCH).agg(pl.col("since").sort_by("number", "start_ns").last())
    extents = inside.group_by(PASS).agg(pl.col("start_ns").min(), pl.col("end").max())
    found = final.join(extents, on=PASS).unique(PASS, keep="first", maintain_order=True)
    named = found.select("rank", "start_ns", "end", micro_batch="batch", kind=pl.lit("forward"))
    return named.with_columns(_NO_PLACE)


def _in_order(rows: pl.DataFrame) -> pl.DataFrame:
    """Operations whose micro-batches are numbered in each step; no backward whose forward is not known."""
    step = ["rank", "step"]
    begun = rows.filter(pl.col("kind") == "forward").select(*step, "micro_batch", begin="start_ns")
    numbers = begun.select(*step, "micro_batch", number=pl.col("begin").rank("ordinal").over(step) - 1)
    joined = rows.join(numbers, on=[*step, "micro_batch"])
    numbered = joined.with_columns(micro_batch=pl.col("number").cast(rows.schema["micro_batch"]))
    return numbered.select(rows.columns).sort(OPERATIONS.sort_by)


def _is_pipeline(run: Run, rows: pl.DataFrame, messages: pl.DataFrame) -> bool:
    """Whether first stages compute before they receive, and the others after that, in every step.

    A stage of one chunk sends as many messages for each micro-batch.
    """
    step = ["rank", "step"]
    rows = rows.filter(pl.col("step") >= 0)
    if rows["stage"].n_unique() < 2:
        return False
    each = rows.filter(pl.col("kind") == "forward").group_by(step)
    forwards = each.agg(pl.col("stage").first(), first=pl.col("start_ns").min(), batches=pl.len())
    begun = run.table(STEPS).select(*step, begin="start_ns").sort("begin")
    inside = messages.select("rank", "name", "start_ns").join_asof(
        begun, left_on="start_ns", right_on="begin", by="rank", check_sortedness=False
    )
    is_sent = pl.col("name").str.starts_with(SENT)
    before = ~is_sent & (pl.col("start_ns") < pl.col("first"))
    counts = (
        inside.join(forwards, on=step)
        .group_by(*step, "stage", "batches")
        .agg(sent=is_sent.sum(), received=before.sum())
    )
    first_sends = (pl.col("stage") == 0) == (pl.col("received") == 0)
    holds = first_sends & (pl.col("sent") > 0) & (pl.col("sent") % pl.col("batches") == 0)
    return counts.height == forwards.height and bool(counts.select(holds.all()).item())
