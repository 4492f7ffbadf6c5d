"""Calls at which a job stopped: the last that each rank finished, and those that it never finished.

Takes the calls of a run that hangs, and how long it waited; returns rows like those of table `spans`, shown
in a separate lane. Deep windows seldom contain a hang; collective calls are always recorded.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from dpro.detect.hang.records import UNFINISHED, with_known_state
from dpro.replay.alignment.align import Alignment
from dpro.schema import COLLECTIVES, SPANS
from dpro.store import Run
from dpro.table import complete

CALLS = -2  # in place of a thread
MAX_CALLS = 50  # unfinished calls of a rank
_FIRST_ID = 1 << 40  # greater than the ids of spans


class Stop(NamedTuple):
    """Where a job stopped, in ns on the aligned clock.

    Attributes:
        calls: columns of `spans`, each from when it was made, and `until_ns`: the end of its wait, which for
            a finished call is its start.
        begin: the earliest last finished call of a rank.
        at: when these calls had ended and the last rank had made a call that it did not finish.
        end: until when ranks waited.
    """

    calls: pl.DataFrame
    begin: int
    at: int
    end: int


def stop_of(run: Run, alignment: Alignment, waited_ns: int) -> Stop | None:
    """Find where a hanging run stopped; None if it is unknown when its calls were made.

    Args:
        waited_ns: how long ranks had waited at the end.
    """
    calls = with_known_state(run.table(COLLECTIVES))
    begins = pl.when(pl.col("enqueued_ns") >= 0).then("enqueued_ns").otherwise("start_ns")
    calls = calls.with_columns(start_ns=begins, unfinished=pl.col("state").is_in(UNFINISHED))
    calls = alignment.aligned(calls.filter(pl.col("start_ns") >= 0)).sort("rank", "start_ns", "sequence")
    stuck = calls.filter("unfinished").group_by("rank", maintain_order=True).head(MAX_CALLS)
    if stuck.is_empty():
        return None
    came = int(stuck.group_by("rank").agg(pl.col("start_ns").min())["start_ns"].to_numpy().max())
    finished = calls.filter(~pl.col("unfinished")).group_by("rank", maintain_order=True).tail(1)
    begin = min([came, *finished["start_ns"].to_list()])
    at = max([came, *(finished["start_ns"] + finished["duration_ns"]).to_list()])
    end = max(came + waited_ns, at + 1)
    both = (
        pl.concat([finished, stuck]).with_row_index("number").cast({"number": pl.Int64, "state": pl.String})
    )
    lasts = pl.when("unfinished").then(end - pl.col("start_ns")).otherwise(pl.col("duration_ns").clip(1))
    name = pl.format("{} #{}", pl.col("op").cast(pl.String), "sequence")
    rows = both.select(
        "rank", "window", "start_ns", "unfinished", duration_ns=lasts, span_id=_FIRST_ID + pl.col("number"),
        kind=pl.lit("annotation"), tid=pl.lit(CALLS),
        name=pl.when("unfinished").then(pl.format("{}: {}, never finished", name, "state")).otherwise(name),
    )  # fmt: skip
    until = pl.when(rows["unfinished"]).then(end).otherwise("start_ns")
    return Stop(complete(SPANS, rows.drop("unfinished")).with_columns(until_ns=until), begin, at, end)
