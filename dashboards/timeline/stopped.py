"""The calls at which a job stopped: the last that each rank finished, and those that it never did.

In: the calls of a run that hangs, and how long it waited. Out: rows as those of table `spans`, which make a
lane of their own. Deep windows seldom hold a hang; calls of collectives are recorded always.
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
MAX_CALLS = 50  # of a rank that have not finished
_FIRST_ID = 1 << 40  # beyond those of spans


class Stop(NamedTuple):
    """Where a job stopped, on the aligned clock, ns.

    Attributes:
        calls: as of `spans`, each from when it was made, with `until_ns`: when its wait ends, at once for
            what finished.
        begin: of the first rank's last finished call.
        at: when those had ended, and the last rank had come to a call that it did not finish.
        end: until when ranks waited.
    """

    calls: pl.DataFrame
    begin: int
    at: int
    end: int


def stop_of(run: Run, alignment: Alignment, waited_ns: int) -> Stop | None:
    """Find where a run that hangs stopped; None where it is not known when its calls were made.

    Args:
        waited_ns: for how long ranks waited by the end.
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
