"""What each rank was doing from which moment on, over all attempts of a job.

In: attempts. Out: a frame of pieces, which cover the wall time of each rank without gaps. A clock that was
set back shows as moments out of order: they are moved to the latest before them, and counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from dpro.goodput.attempts import Attempt

# What a rank is doing: classes of `account`, but for STEP, FIRST and TAIL, which are divided there.
LAUNCH, IMPORTS, SET_UP, GROUP = "launch", "imports", "set_up", "process_group"
FIRST, STEP, BETWEEN, TAIL = "first step", "step", "recording", "tail"
DOWN = "down"
# From which moment of `starts` on what is done.
_STARTS = (
    ("process_ns", IMPORTS),
    ("imported_ns", SET_UP),
    ("group_begin_ns", GROUP),
    ("group_ns", SET_UP),
    ("work_ns", FIRST),
    ("first_update_ns", BETWEEN),
)
PIECES = {
    "attempt": pl.Int32, "rank": pl.Int32, "step": pl.Int64, "doing": pl.String,
    "start_ns": pl.Int64, "duration_ns": pl.Int64,
}  # fmt: skip


def pieces_of(attempts: Sequence[Attempt]) -> tuple[pl.DataFrame, int]:
    """Cut the wall time of each rank where what it does changes.

    Args:
        attempts: of a job, in order.

    Returns:
        `[attempt, rank, step, doing, start_ns, duration_ns]`, in order of rank and time, step -1 outside
        steps; and how many moments were out of order.
    """
    marks = [_marks(attempt) for attempt in attempts]
    ranks = pl.concat([each.select("rank") for each in marks]).unique().sort("rank")
    known = pl.concat(marks).filter(pl.col("start_ns") >= 0)
    if known.is_empty():
        return pl.DataFrame(schema=PIECES), 0
    begin_ns, end_ns = _begin(attempts), int(known["start_ns"].max())  # type: ignore[arg-type]
    first = ranks.with_columns(_mark(0, LAUNCH), start_ns=pl.lit(begin_ns, pl.Int64)).select(known.columns)
    ordered = pl.concat([first, known]).sort("rank", "attempt", maintain_order=True)
    in_order = pl.col("start_ns").cum_max().over("rank")
    displaced = int(ordered.select((in_order > pl.col("start_ns")).sum()).item())
    until = pl.col("start_ns").shift(-1, fill_value=end_ns).over("rank")
    is_tail = (pl.col("doing") == BETWEEN) & (pl.col("doing").shift(-1).over("rank") == DOWN)
    doing = pl.when(is_tail).then(pl.lit(TAIL)).otherwise("doing")
    pieces = ordered.with_columns(doing=doing, start_ns=in_order).with_columns(
        duration_ns=until - pl.col("start_ns")
    )
    columns = [pl.col(name).cast(dtype) for name, dtype in PIECES.items()]
    return pieces.filter(pl.col("duration_ns") > 0).select(columns), displaced


def _mark(attempt: int, doing: str) -> list[pl.Expr]:
    return [
        pl.lit(attempt, pl.Int32).alias("attempt"),
        pl.lit(-1, pl.Int64).alias("step"),
        pl.lit(doing).alias("doing"),
    ]


def _marks(attempt: Attempt) -> pl.DataFrame:
    """What each rank does from which moment on, in order for each rank."""
    columns = ["rank", "attempt", "step", "doing", "start_ns"]
    # The loop may ask for nothing before its first backward: its first step takes a typical one at least.
    asked, updated = pl.col("work_ns"), pl.col("first_update_ns")
    latest = pl.when(updated >= 0).then(updated - round(attempt.typical_ns))
    begun = pl.max_horizontal(pl.min_horizontal(asked, latest), "group_ns", "imported_ns")
    moments = attempt.starts.with_columns(work_ns=pl.when(asked >= 0).then(begun).otherwise(-1))
    starts = [
        moments.select("rank", *_mark(attempt.number, doing), "first_update_ns", start_ns=moment)
        for moment, doing in _STARTS
    ]
    unfinished = (pl.col("doing") == FIRST) & (pl.col("first_update_ns") < 0)
    doing = pl.when(unfinished).then(pl.lit(BETWEEN)).otherwise("doing")
    starts = [each.with_columns(doing=doing) for each in starts]
    steps = attempt.steps.sort("rank", "start_ns")
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    number = pl.lit(attempt.number, pl.Int32).alias("attempt")
    stepped = steps.select("rank", number, "step", pl.lit(STEP).alias("doing"), "start_ns")
    ended = steps.select("rank", *_mark(attempt.number, BETWEEN), start_ns=end_ns)
    stepping = pl.concat([ended, stepped]).sort("rank", "start_ns", maintain_order=True)
    gone = attempt.workers.select("rank", *_mark(attempt.number, DOWN), start_ns="ended_ns")
    marks = pl.concat([each.select(columns) for each in (*starts, stepping, gone)])
    return marks.sort("rank", maintain_order=True)


def _begin(attempts: Sequence[Attempt]) -> int:
    """When the job began: by its scheduler, else its launcher, else its first process."""
    first = attempts[0]
    for moment in ("scheduled_ns", "launched_ns"):
        known = first.starts.filter(pl.col(moment) >= 0)[moment].min()
        if isinstance(known, int):
            return known
    return first.begin_ns
