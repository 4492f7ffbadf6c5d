"""The clocks of pretended ranks: each ran by itself, and stands still while a collective is answered.

In: tables of a run of pretended ranks. Out: the same on clocks that do not count how long our own answers
took, since a real rank would not make them; and an alignment by which all begin the first step of a window at
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.alignment.align import Alignment, Clock, ClockLine

Answers = Mapping[int, tuple[Ints, Ints]]  # by rank: when answers began and ended, ns, disjoint and ascending


def answers_of(collectives: pl.DataFrame) -> Answers:
    """When each rank was being answered.

    Args:
        collectives: the `collectives` table.
    """
    ran = collectives.filter((pl.col("start_ns") >= 0) & (pl.col("duration_ns") > 0)).sort("start_ns")
    answers = {}
    for (rank,), calls in ran.group_by("rank"):
        start = calls["start_ns"].to_numpy()
        end = np.maximum.accumulate(start + calls["duration_ns"].to_numpy())
        opens = np.append(True, start[1:] > end[:-1])
        answers[int(str(rank))] = start[opens], end[np.append(opens[1:], True)]
    return answers


def without_answers(frame: pl.DataFrame, answers: Answers) -> pl.DataFrame:
    """A table's rows on clocks that stand still during answers.

    Args:
        frame: has `rank` and `start_ns`, perhaps `duration_ns` and `asked_ns` (negative where unknown).
        answers: as from `answers_of`.
    """
    rank, start = frame["rank"].to_numpy(), frame["start_ns"].to_numpy()
    has_end = "duration_ns" in frame.columns
    columns = {"start_ns": _moved(rank, start, answers)}
    if has_end:
        lasts = frame["duration_ns"].to_numpy()
        end = _moved(rank, start + np.maximum(lasts, 0), answers)
        columns["duration_ns"] = np.where(lasts < 0, lasts, end - columns["start_ns"])
    if "asked_ns" in frame.columns:
        asked = frame["asked_ns"].to_numpy()
        columns["asked_ns"] = np.where(asked < 0, asked, _moved(rank, asked, answers))
    return frame.with_columns(pl.Series(name, column, pl.Int64) for name, column in columns.items())


def _moved(rank: Ints, time: Ints, answers: Answers) -> Ints:
    """[N] ns, the times of some ranks without the answers before each."""
    moved = time.astype(np.int64)
    for number, (begin, end) in answers.items():
        of_rank = np.flatnonzero(rank == number)
        before = np.append(0, np.cumsum(end - begin))
        place = np.searchsorted(begin, time[of_rank], side="right")
        inside = np.maximum(end[np.maximum(place - 1, 0)] - time[of_rank], 0) * (place > 0)
        moved[of_rank] -= before[place] - inside
    return moved


def one_after_the_other(places: Iterable[tuple[int, int]], steps: pl.DataFrame) -> Alignment:
    """The alignment of ranks that ran one after the other: in each window all begin their first step at once.

    Args:
        steps: the `steps` table.
    """
    begun = steps.filter(pl.col("window") >= 0).group_by("rank", "window").agg(pl.col("start_ns").min())
    first = {(rank, window): start for rank, window, start in begun.iter_rows()}
    clocks: dict[tuple[int, int], Clock] = {}
    reference: dict[int, int] = {}
    for rank, window in sorted(places):
        start = first.get((rank, window), 0)
        zero = reference.setdefault(window, start)
        clocks[rank, window] = Clock(f"rank {rank}", ClockLine(start, start - zero), "pretended")
    return Alignment(clocks)
