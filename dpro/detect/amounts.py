"""How much work each rank had in each step of deep windows, by whatever the recording holds of that.

In: a run. Out: `[rank, step, amount]`, one frame per sort of evidence: what loaders handed over, what others
sent to be worked on (experts, embeddings), and how large the inputs of operators are where shapes are
recorded. None of them says how long that takes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import polars as pl

from dpro.detect.uneven import AMOUNT, ELEMENTS
from dpro.schema import COLLECTIVES, COUNTERS, SPANS, STEPS
from dpro.store import Run

RECEIVED, SHAPES = "bytes from all_to_all", "elements in the inputs of its operators"
MAX_ELEMENTS = 1 << 48  # of the inputs of one operator: no memory holds more


def amounts_in_windows(run: Run) -> Mapping[str, pl.DataFrame]:
    """The frames by what is counted; those with no row are left out."""
    steps = run.table(STEPS, ["rank", "step", "window", "start_ns", "duration_ns"])
    steps = steps.filter(pl.col("window") >= 0).sort("start_ns")
    counters = run.table(COUNTERS).filter(pl.col("counter") == AMOUNT)
    handed = counters.select("rank", start_ns="time_ns", amount="value").join(steps, on=["rank", "start_ns"])
    frames = {
        ELEMENTS: handed.select("rank", "step", "amount"),
        RECEIVED: _per_step(_received(run), steps),
        SHAPES: _per_step(_shapes(run), steps),
    }
    return {what: frame.filter(pl.col("amount") > 0) for what, frame in frames.items() if frame.height}


def _received(run: Run) -> pl.DataFrame:
    """`rank`, `window`, `start_ns` and `amount` of calls that gather what ranks work on next."""
    calls = run.table(COLLECTIVES, ["rank", "window", "op", "start_ns", "bytes_out"])
    known = calls.filter((pl.col("op") == "all_to_all") & (pl.col("bytes_out") >= 0))
    return known.select("rank", "window", "start_ns", amount="bytes_out")


def _shapes(run: Run) -> pl.DataFrame:
    """The same of operators whose shapes are recorded."""
    spans = run.table(SPANS, ["rank", "window", "kind", "start_ns", "shapes"])
    spans = spans.filter((pl.col("kind") == "cpu_op") & (pl.col("shapes") != ""))
    known = spans.select(pl.col("shapes").unique()).with_columns(
        amount=pl.col("shapes").map_elements(_elements_of_text, return_dtype=pl.Int64, skip_nulls=False)
    )
    return spans.join(known, on="shapes").select("rank", "window", "start_ns", "amount")


def _elements_of_text(text: str) -> int:
    """How many elements inputs have whose shapes a trace writes so; 0 where that is no number of a tensor."""
    with suppress(ValueError, RecursionError):
        elements = _elements(json.loads(text))
        return elements if 0 <= elements <= MAX_ELEMENTS else 0
    return 0


def _elements(shapes: Any) -> int:
    """How many elements inputs of these shapes have; lists of tensors are lists of shapes."""
    if not isinstance(shapes, list) or not shapes:
        return 0
    if all(isinstance(size, int) for size in shapes):
        return math.prod(shapes)
    return sum(_elements(each) for each in shapes)


def _per_step(rows: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `step` and `amount`: the sum of those rows that begin in the step."""
    joined = rows.sort("start_ns").join_asof(
        steps.rename({"start_ns": "begun_ns"}), left_on="start_ns", right_on="begun_ns",
        by=["rank", "window"], check_sortedness=False,
    )  # fmt: skip
    inside = joined.filter(pl.col("start_ns") < pl.col("begun_ns") + pl.col("duration_ns"))
    return inside.group_by("rank", "step").agg(pl.col("amount").sum().cast(pl.Float64))
