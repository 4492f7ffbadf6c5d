"""The stages of a job, as measured, and how often it failed: what a simulation of its recovery starts from.

In: the life of a job. Out: a `Recovery`, and how often it failed. A stage that never occurred takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import polars as pl

from dpro.errors import Unanswerable
from dpro.goodput import account as classes
from dpro.goodput.attempts import BETWEEN, DOWN, GROUP, IMPORTS, LAUNCH, SAVE, SET_UP, Attempt, updates_before
from dpro.goodput.life import JobLife
from dpro.goodput.recovery.simulate import Recovery
from dpro.units import NS_PER_S

STARTING = (IMPORTS, GROUP, SET_UP, classes.LOADING, classes.WARM_UP)
HUNG = 2.0  # steps that a failed attempt stands at least if it hung
RARE = 0.01  # of the moments of training: in the others, steps are shorter than what a failed attempt stood
TRAINING = (classes.PRODUCTIVE, classes.STRAGGLER, classes.EVALUATION, classes.REPEATED, BETWEEN)


@dataclass(frozen=True)
class SeenFailures:
    """How often a job failed.

    Attributes:
        count: attempts that did not end well.
        up_s: how long its processes were there, all attempts.
        hosts: that it had.
    """

    count: int
    up_s: float
    hosts: int


def stages_of(life: JobLife) -> Recovery:
    """How long each stage of a job takes, means over its attempts.

    Raises:
        Unanswerable: it did no step, or none that took time.
    """
    ranks = max(life.pieces["rank"].n_unique(), 1)
    # A job may go on with fewer ranks for a while, so all are means over the ranks that were there.
    seconds = {name: ns / NS_PER_S for name, ns in life.pieces.group_by("class").agg(_total()).iter_rows()}
    # The part of a step that a failure cut off is no step.
    whole = life.pieces.filter((pl.col("class") != classes.REPEATED) | (pl.col("step") >= 0))
    stepping = whole.filter(pl.col("class").is_in(TRAINING))
    steps = life.pieces.filter(pl.col("step") >= 0).select("attempt", "rank", "step").n_unique()
    step_s = _seconds(stepping, 1) / max(steps, 1)
    if step_s <= 0:
        raise Unanswerable("the job did no step: what its recovery would give is not known")
    there = life.pieces.filter(~pl.col("class").is_in([DOWN, LAUNCH])).select("attempt", "rank").unique()
    present = dict(there.group_by("attempt").len().iter_rows())
    starts = max(there.height, 1)
    hung_s, seen_s = _stood_s(life, ranks)
    saves = [_saves(attempt) for attempt in life.attempts]
    count = sum(len(save) * present.get(n, 0) for n, save in enumerate(saves))
    gaps = [b - a for save in saves for a, b in pairwise(save)]
    every = round(sum(gaps) / len(gaps)) if gaps else (max(saves, default=[0], key=len) or [0])[0]
    return Recovery(
        step_s=step_s,
        every=every,
        stall_s=seconds.get(classes.CHECKPOINT, 0.0) / max(count, 1),
        background_s=_background_s(life.attempts),
        start_s=sum(seconds.get(name, 0.0) for name in STARTING) / starts,
        down_s=_down_s(life.pieces, there),
        detect_s=sum(hung_s) / max(len(hung_s), 1),
        crash_s=sum(seen_s) / max(len(seen_s), 1),
        hangs=len(hung_s) / max(len(hung_s) + len(seen_s), 1),
        launch_s=seconds.get(LAUNCH, 0.0) / ranks,
        writers=max(*(_writers(attempt) for attempt in life.attempts), 1),
        warm_s=seconds.get(classes.WARM_UP, 0.0) / starts,
        ranks=ranks,
        hosts=_hosts(life),
        step_noise=_noise(stepping),
    )


def seen_failures(life: JobLife) -> SeenFailures:
    """How often a job failed, and in how long."""
    ranks = max(life.pieces["rank"].n_unique(), 1)
    up = life.pieces.filter(~pl.col("class").is_in([DOWN]))
    count = sum(attempt.ended_well is False for attempt in life.attempts)
    return SeenFailures(count, int(up["duration_ns"].sum()) / ranks / NS_PER_S, _hosts(life))


def _down_s(pieces: pl.DataFrame, there: pl.DataFrame) -> float:
    """From the end of a process until that of the next attempt is there, mean of the ranks that both have."""
    again = there.select(pl.col("attempt") - 1, "rank")
    between = pieces.filter(pl.col("class") == DOWN).join(again, on=["attempt", "rank"])
    between = between.join(there, on=["attempt", "rank"])
    gaps = between.group_by("attempt", "rank").agg(_total())["duration_ns"].mean()
    return float(gaps) / NS_PER_S if isinstance(gaps, (int, float)) else 0.0


def _stood_s(life: JobLife, ranks: int) -> tuple[list[float], list[float]]:
    """How long attempts stood until their processes were ended, means of ranks: those that hung, the others.

    An attempt hung if all its processes outlived its last step for longer than steps take, in all but a few
    of the moments at which a failure may come.
    """
    typical_ns = {attempt.number: attempt.typical_ns for attempt in life.attempts}
    latest_ns = _longest_ns(life.pieces)
    hung_s: list[float] = []
    seen_s: list[float] = []
    for attempt in life.attempts:
        if attempt.ended_well is not False:
            continue
        stood = life.pieces.filter((pl.col("class") == classes.HANG) & (pl.col("attempt") == attempt.number))
        first_ns = stood.group_by("rank").agg(_total())["duration_ns"].min()
        alive_ns = first_ns if stood["rank"].n_unique() == attempt.workers.height else 0
        hung = isinstance(alive_ns, int) and alive_ns + typical_ns[attempt.number] > latest_ns
        (hung_s if hung else seen_s).append(_seconds(stood, ranks))
    return hung_s, seen_s


def _longest_ns(pieces: pl.DataFrame) -> float:
    """What steps take, without saves, loads and warm-up, at all but `RARE` of the moments.

    A failure that comes at any moment finds a long step more often than a short one.
    """
    steps = pieces.filter((pl.col("step") >= 0) & pl.col("class").is_in(TRAINING))
    took = steps.group_by("attempt", "rank", "step").agg(_total()).sort("duration_ns")
    later = took.filter(pl.col("duration_ns").cum_sum() >= (1 - RARE) * pl.col("duration_ns").sum())
    longest, typical = later["duration_ns"].min(), took["duration_ns"].median()
    has_steps = isinstance(longest, int) and isinstance(typical, (int, float))
    return max(float(longest), HUNG * float(typical)) if has_steps else 0.0  # type: ignore[arg-type]


def _noise(stepping: pl.DataFrame) -> float:
    """By what share steps differ, so that the mean of n has this deviation over the root of n.

    By the method of batch means (Law, Simulation Modeling and Analysis): slow steps come together, so that
    single ones do not show by how much the mean of many differs.
    """
    by_rank = stepping.filter(pl.col("step") >= 0).group_by("attempt", "rank", "step").agg(_total())
    steps = by_rank.group_by("attempt", "step").agg(pl.col("duration_ns").mean())
    size = max(int(steps.height**0.5), 1)
    batch = (pl.int_range(pl.len()).over("attempt") // size).alias("batch")
    batches = (
        steps.sort("attempt", "step").with_columns(batch).group_by("attempt", "batch", maintain_order=True)
    )
    means = batches.agg(pl.col("duration_ns").mean(), pl.len().alias("steps")).filter(pl.col("steps") == size)
    deviation, mean = means["duration_ns"].std(), means["duration_ns"].mean()
    has_batches = isinstance(deviation, float) and isinstance(mean, float) and mean > 0
    return size**0.5 * deviation / mean if has_batches else 0.0


def _seconds(pieces: pl.DataFrame, ranks: int) -> float:
    """What pieces take of the time of each rank."""
    return int(pieces["duration_ns"].sum()) / ranks / NS_PER_S


def _hosts(life: JobLife) -> int:
    """How many hosts the job had; one where none is named."""
    return max(1, *(attempt.workers["host"].n_unique() for attempt in life.attempts))


def _total() -> pl.Expr:
    return pl.col("duration_ns").sum()


def _saves(attempt: Attempt) -> list[int]:
    """How many steps of the attempt were done at each of its saves, of ranks that save together once."""
    saves = attempt.checkpoints.filter(pl.col("kind") == SAVE)
    rows = saves.select("rank", "start_ns").iter_rows()
    return sorted({updates_before(attempt, rank, start_ns) for rank, start_ns in rows})


def _writers(attempt: Attempt) -> int:
    """How many ranks saved."""
    return attempt.checkpoints.filter(pl.col("kind") == SAVE)["rank"].n_unique()


def _background_s(attempts: list[Attempt]) -> float:
    """How long saves went on after training had gone on."""
    saves = pl.concat([attempt.checkpoints for attempt in attempts]).filter(
        (pl.col("kind") == SAVE) & (pl.col("duration_ns") >= 0)
    )
    mean = (saves["duration_ns"] - saves["stall_ns"]).clip(lower_bound=0).mean()
    return float(mean) / NS_PER_S if isinstance(mean, (int, float)) else 0.0
