"""The stages of a job, as measured, and how often it failed: what a simulation of its recovery starts from.

In: the life of a job. Out: a `Recovery`, and how often it failed. A stage that never occurred takes no time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import polars as pl

from dpro.errors import Unanswerable
from dpro.goodput import account as classes
from dpro.goodput.attempts import SAVE, Attempt, updates_before
from dpro.goodput.document import JobLife
from dpro.goodput.marks import BETWEEN, DOWN, GROUP, IMPORTS, LAUNCH, SET_UP
from dpro.goodput.simulate import Recovery
from dpro.units import NS_PER_S

STARTING = (IMPORTS, GROUP, SET_UP, classes.LOADING, classes.WARM_UP)
HUNG = 2.0  # steps that a failed attempt stands: what stands less has ended a process by itself
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

    Args:
        life: of the job.

    Raises:
        Unanswerable: it did no step, or none that took time.
    """
    ranks = max(life.pieces["rank"].n_unique(), 1)
    seconds = {
        name: ns / ranks / NS_PER_S for name, ns in life.pieces.group_by("class").agg(_total()).iter_rows()
    }
    done = life.pieces.filter(pl.col("step") >= 0).group_by("attempt").agg(pl.col("step").n_unique())
    steps = int(done["step"].sum())
    # The part of a step that a failure cut off is no step.
    whole = life.pieces.filter((pl.col("class") != classes.REPEATED) | (pl.col("step") >= 0))
    step_s = _seconds(whole.filter(pl.col("class").is_in(TRAINING)), ranks) / max(steps, 1)
    if step_s <= 0:
        raise Unanswerable("the job did no step: what its recovery would give is not known")
    starts = len(life.attempts)
    between = life.pieces.filter((pl.col("class") == DOWN) & (pl.col("attempt") < starts - 1))
    stood_s = _stood_s(life, ranks)
    hung_s = [each for each in stood_s if each > HUNG * step_s]
    seen_s = [each for each in stood_s if each <= HUNG * step_s]
    saves = [_saves(each) for each in life.attempts]
    count = sum(len(each) for each in saves)
    gaps = [b - a for each in saves for a, b in pairwise(each)]
    every = round(sum(gaps) / len(gaps)) if gaps else (max(saves, default=[0], key=len) or [0])[0]
    return Recovery(
        step_s=step_s,
        every=every,
        stall_s=seconds.get(classes.CHECKPOINT, 0.0) / max(count, 1),
        background_s=_background_s(life.attempts),
        start_s=sum(seconds.get(name, 0.0) for name in STARTING) / starts,
        down_s=int(between["duration_ns"].sum()) / ranks / max(starts - 1, 1) / NS_PER_S,
        detect_s=sum(hung_s) / max(len(hung_s), 1),
        crash_s=sum(seen_s) / max(len(seen_s), 1),
        hangs=len(hung_s) / max(len(stood_s), 1),
        launch_s=seconds.get(LAUNCH, 0.0),
        writers=max(*(_writers(each) for each in life.attempts), 1),
        warm_s=seconds.get(classes.WARM_UP, 0.0) / starts,
        hosts=_hosts(life),
    )


def seen_failures(life: JobLife) -> SeenFailures:
    """How often a job failed, and in how long.

    Args:
        life: of the job.
    """
    ranks = max(life.pieces["rank"].n_unique(), 1)
    up = life.pieces.filter(~pl.col("class").is_in([DOWN]))
    count = sum(each.ended_well is False for each in life.attempts)
    return SeenFailures(count, int(up["duration_ns"].sum()) / ranks / NS_PER_S, _hosts(life))


def _stood_s(life: JobLife, ranks: int) -> list[float]:
    """How long each attempt that failed stood until its processes were ended, mean of its ranks."""
    failed = [each.number for each in life.attempts if each.ended_well is False]
    stood = life.pieces.filter(pl.col("class") == classes.HANG)
    return [_seconds(stood.filter(pl.col("attempt") == number), ranks) for number in failed]


def _seconds(pieces: pl.DataFrame, ranks: int) -> float:
    """What pieces take of the time of each rank."""
    return int(pieces["duration_ns"].sum()) / ranks / NS_PER_S


def _hosts(life: JobLife) -> int:
    """How many hosts the job had; one where none is named."""
    return max(1, *(each.workers["host"].n_unique() for each in life.attempts))


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
    saves = pl.concat([each.checkpoints for each in attempts]).filter(
        (pl.col("kind") == SAVE) & (pl.col("duration_ns") >= 0)
    )
    mean = (saves["duration_ns"] - saves["stall_ns"]).clip(lower_bound=0).mean()
    return float(mean) / NS_PER_S if isinstance(mean, (int, float)) else 0.0
