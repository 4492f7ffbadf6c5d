"""Operations of a pipeline by the ranges that PyTorch's profiler shows: traces that dpro did not record.

In: spans of a run. Out: rows of table `operations`. `torch.distributed.pipelining` marks each action of a
schedule, such as `PP:3B0` (stage 3 of the model, backward, micro-batch 0), and GPipe each `Forward 0` and
`Backward 0`. A range may begin with waiting for a message: an operation is what operators in it take, from
the first that does not communicate to the last.
"""

from __future__ import annotations

import polars as pl

from dpro.replay.pipeline.operations import MESSAGE, placed_in_steps
from dpro.schema import SPANS
from dpro.store import Run

RANGE = r"^(?:PP:\d+[FBIW]\d+|(?:Forward|Backward) \d+)$"
BOTH = r"^PP:\((\d+)F(\d+);(\d+)([BI])(\d+)\)OVERLAP_F_B$"
KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
BACKWARD_OP = "autograd::engine::evaluate_function"
SOURCE = "ranges of torch.distributed.pipelining"
COLUMNS = ["rank", "window", "kind", "name", "start_ns", "duration_ns"]
PLACE = ["rank", "window", "range"]


def has_ranges(run: Run) -> bool:
    """Whether the spans of the run's first part have such ranges."""
    parts = run.parts(SPANS)
    if not parts:
        return False
    first = run.read(SPANS, parts[:1], ["kind", "name"])
    ranges = first.filter((pl.col("kind") == "annotation") & pl.col("name").str.contains(f"{RANGE}|{BOTH}"))
    return not ranges.is_empty()


def operations_by_ranges(run: Run) -> pl.DataFrame:
    """Rows of `operations`; those outside the steps of their rank are in step -1."""
    spans = run.table(SPANS, COLUMNS).with_columns(end=pl.col("start_ns") + pl.col("duration_ns"))
    ranges = spans.filter(pl.col("kind") == "annotation").drop("kind")
    operators = spans.filter((pl.col("kind") == "cpu_op") & ~pl.col("name").str.contains(MESSAGE))
    found = pl.concat([_single(ranges, operators), _overlapped(ranges, operators)])
    return placed_in_steps(run, found, SOURCE)


def _single(ranges: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Operations with a range of their own."""
    own = ranges.filter(pl.col("name").str.contains(RANGE)).with_columns(range="start_ns")
    name = pl.col("name")
    kind = pl.coalesce(name.str.extract(r"^PP:\d+([FBIW])\d+$"), name.str.extract(r"^(F|B)"))
    return (
        _extents(own, operators)
        .join(own.select(*PLACE, "name"), on=PLACE)
        .select(
            "rank",
            "start_ns",
            "end",
            place=name.str.extract(r"^PP:(\d+)").cast(pl.Int64),
            micro_batch=name.str.extract(r"(\d+)$").cast(pl.Int64),
            kind=kind.replace_strict(KINDS, return_dtype=pl.String),
        )
    )


def _overlapped(ranges: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """A forward and a backward of one range: the backward begins with the first operator of that kind."""
    both = ranges.filter(pl.col("name").str.contains(BOTH)).with_columns(range="start_ns")
    is_backward = pl.col("name").str.starts_with(BACKWARD_OP)
    turned = _extents(both, operators.filter(is_backward)).select(*PLACE, turn="start_ns")
    parts = []
    for first, batch, letter, keep in ((1, 2, pl.lit("F"), "before"), (3, 5, _group(4), "after")):
        halves = both.join(turned, on=PLACE).with_columns(
            start_ns=pl.col("start_ns") if keep == "before" else pl.col("turn"),
            end=pl.col("turn") if keep == "before" else pl.col("end"),
        )
        named = both.select(
            *PLACE,
            place=_group(first).cast(pl.Int64),
            micro_batch=_group(batch).cast(pl.Int64),
            kind=letter.replace_strict(KINDS, return_dtype=pl.String),
        )
        parts.append(
            _extents(halves, operators)
            .join(named, on=PLACE)
            .select("rank", "start_ns", "end", "place", "micro_batch", "kind")
        )
    return pl.concat(parts)


def _group(number: int) -> pl.Expr:
    return pl.col("name").str.extract(BOTH, number)


def _extents(ranges: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """From the first to the last of the operators within each range.

    Args:
        ranges: `rank`, `window`, `range` (which it is), `start_ns`, `end`; of one rank they do not overlap.

    Returns:
        `rank`, `window`, `range`, `start_ns`, `end`; none of a range without operators.
    """
    bounds = ranges.select(*PLACE, begin="start_ns", until="end").sort("begin")
    held = operators.sort("start_ns").join_asof(
        bounds, left_on="start_ns", right_on="begin", by=["rank", "window"], check_sortedness=False
    )
    held = held.filter(pl.col("start_ns") < pl.col("until"))
    return held.group_by(PLACE).agg(pl.col("start_ns").min(), pl.min_horizontal("end", "until").max())
