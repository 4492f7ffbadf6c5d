"""Measures the stages of a job and its failure rate, from which a simulation of its recovery starts.

Takes the life of a job; returns a `Recovery` and the failures seen. A stage that never occurred takes no
time.

The failure rate of a job comes from its own attempts, a log, or publications: `FailureRate` has failures per
hour of the job as a whole and of each host. There are two rates since small jobs fail more often than their
hosts explain: software and storage fail, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.errors import InputError, Unanswerable, first_line
from dpro.extensions.goodput import account as classes
from dpro.extensions.goodput.attempts import (
    BETWEEN,
    DOWN,
    GROUP,
    IMPORTS,
    LAUNCH,
    SAVE,
    SET_UP,
    Attempt,
    updates_before,
)
from dpro.extensions.goodput.life import JobLife
from dpro.extensions.goodput.simulate import Recovery
from dpro.limits import read_small
from dpro.panics import panics_as
from dpro.units import NS_PER_S, NS_PER_US, S_PER_H, format_duration

STARTING = (IMPORTS, GROUP, SET_UP, classes.LOADING, classes.WARM_UP)
MIN_HANG_STEPS = 2.0  # a failed attempt hung if it was idle for at least this many typical steps
RARE = 0.01  # of the moments of training, at which steps may be longer than the idle time of a hang
# Relative standard deviation of a stage's mean from one job, or month, to the next: between twelve jobs
# of one machine it was 0.13 for starts and 0.07 for checkpoints.
BETWEEN_JOBS = 0.1
TRAINING = (classes.PRODUCTIVE, classes.STRAGGLER, classes.EVALUATION, classes.REPEATED, BETWEEN)


@dataclass(frozen=True)
class ObservedFailures:
    """How often a job failed.

    Attributes:
        count: attempts that did not end well.
        up_s: time that its processes were up, over all attempts.
        hosts: number of its hosts.
    """

    count: int
    up_s: float
    hosts: int


def stages_of(life: JobLife) -> Recovery:
    """Return the duration of each stage of a job, as means over its attempts.

    Raises:
        Unanswerable: it did no step, or none that took time.
    """
    ranks = max(life.pieces["rank"].n_unique(), 1)
    # A job may continue with fewer ranks for a while, so all are means over the ranks that were up.
    seconds = {name: ns / NS_PER_S for name, ns in life.pieces.group_by("class").agg(_total()).iter_rows()}
    # A step cut off by a failure does not count.
    whole = life.pieces.filter((pl.col("class") != classes.REPEATED) | (pl.col("step") >= 0))
    stepping = whole.filter(pl.col("class").is_in(TRAINING))
    steps = life.pieces.filter(pl.col("step") >= 0).select("attempt", "rank", "step").n_unique()
    step_s = _seconds(stepping, 1) / max(steps, 1)
    if step_s <= 0:
        raise Unanswerable("the job did no step, so its recovery cannot be predicted")
    there = life.pieces.filter(~pl.col("class").is_in([DOWN, LAUNCH])).select("attempt", "rank").unique()
    present = dict(there.group_by("attempt").len().iter_rows())
    starts = max(there.height, 1)
    hung_s, seen_s = _idle_until_end_s(life, ranks)
    saves = [_saves(attempt) for attempt in life.attempts]
    count = sum(len(save) * present.get(n, 0) for n, save in enumerate(saves))
    gaps = [b - a for save in saves for a, b in pairwise(save)]
    noise = _stage_noise(life.pieces)
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
        stage_noise=noise,
        stage_doubt=float(np.hypot(noise / np.sqrt(len(life.attempts)), BETWEEN_JOBS)),
    )


def observed_failures(life: JobLife) -> ObservedFailures:
    """Return how often a job failed, and in how much time."""
    ranks = max(life.pieces["rank"].n_unique(), 1)
    up = life.pieces.filter(~pl.col("class").is_in([DOWN]))
    count = sum(attempt.ended_well is False for attempt in life.attempts)
    return ObservedFailures(count, int(up["duration_ns"].sum()) / ranks / NS_PER_S, _hosts(life))


def _down_s(pieces: pl.DataFrame, there: pl.DataFrame) -> float:
    """Return the mean time from the end of a rank's process until that of the next attempt starts, in s."""
    again = there.select(pl.col("attempt") - 1, "rank")
    between = pieces.filter(pl.col("class") == DOWN).join(again, on=["attempt", "rank"])
    between = between.join(there, on=["attempt", "rank"])
    gaps = between.group_by("attempt", "rank").agg(_total())["duration_ns"].mean()
    return float(gaps) / NS_PER_S if isinstance(gaps, (int, float)) else 0.0


def _idle_until_end_s(life: JobLife, ranks: int) -> tuple[list[float], list[float]]:
    """Return idle times of failed attempts until they were ended, in s, means over ranks: hung ones, others.

    An attempt hung if all its processes outlived its last step for longer than a step that a failure
    interrupts at a random moment takes, except with probability `RARE`.
    """
    typical_ns = {attempt.number: attempt.typical_ns for attempt in life.attempts}
    latest_ns = _longest_ns(life.pieces)
    ended = pl.col("class").is_in([classes.HANG, classes.SHUTDOWN])
    hung_s: list[float] = []
    seen_s: list[float] = []
    for attempt in life.attempts:
        if attempt.ended_well is not False:
            continue
        stood = life.pieces.filter(ended & (pl.col("attempt") == attempt.number))
        first_ns = stood.group_by("rank").agg(_total())["duration_ns"].min()
        alive_ns = first_ns if stood["rank"].n_unique() == attempt.workers.height else 0
        hung = isinstance(alive_ns, int) and alive_ns + typical_ns[attempt.number] > latest_ns
        (hung_s if hung else seen_s).append(_seconds(stood, ranks))
    return hung_s, seen_s


def _longest_ns(pieces: pl.DataFrame) -> float:
    """Return the duration that steps, without saves, loads and warm-up, exceed at only `RARE` of the moments.

    Weighted by time, since a failure at a random moment meets a long step more often than a short one.
    """
    steps = pieces.filter((pl.col("step") >= 0) & pl.col("class").is_in(TRAINING))
    took = steps.group_by("attempt", "rank", "step").agg(_total()).sort("duration_ns")
    later = took.filter(pl.col("duration_ns").cum_sum() >= (1 - RARE) * pl.col("duration_ns").sum())
    longest, typical = later["duration_ns"].min(), took["duration_ns"].median()
    has_steps = isinstance(longest, int) and isinstance(typical, (int, float))
    return max(float(longest), MIN_HANG_STEPS * float(typical)) if has_steps else 0.0  # type: ignore[arg-type]


def _noise(stepping: pl.DataFrame) -> float:
    """Return the variation of steps, such that the mean of n steps varies by this share over the root of n.

    By the method of batch means (Law, Simulation Modeling and Analysis): slow steps come in groups, so the
    variation of single steps does not show that of the mean of many.
    """
    by_rank = stepping.filter(pl.col("step") >= 0).group_by("attempt", "rank", "step").agg(_total())
    steps = by_rank.group_by("attempt", "step").agg(pl.col("duration_ns").mean())
    size = max(int(steps.height**0.5), 1)
    batch = (pl.int_range(pl.len()).over("attempt") // size).alias("batch")
    batches = (
        steps.sort("attempt", "step").with_columns(batch).group_by("attempt", "batch", maintain_order=True)
    )
    means = batches.agg(pl.col("duration_ns").mean(), pl.len().alias("steps")).filter(pl.col("steps") == size)
    return float(size**0.5) * _variation(means["duration_ns"])


def _stage_noise(pieces: pl.DataFrame) -> float:
    """Return the variation of starts, as a share of their mean."""
    starts = pieces.filter(pl.col("class").is_in(STARTING)).group_by("attempt", "rank").agg(_total())
    return _variation(starts.group_by("attempt").agg(pl.col("duration_ns").mean())["duration_ns"])


def _variation(values: pl.Series) -> float:
    """Return the standard deviation over the mean; 0 of fewer than two values."""
    deviation, mean = values.std(), values.mean()
    if isinstance(deviation, float) and isinstance(mean, float) and mean > 0:
        return deviation / mean
    return 0.0


def _seconds(pieces: pl.DataFrame, ranks: int) -> float:
    """Return the time of pieces per rank, in s."""
    return int(pieces["duration_ns"].sum()) / ranks / NS_PER_S


def _hosts(life: JobLife) -> int:
    """Return the number of hosts of the job; 1 where none is named."""
    return max(1, *(attempt.workers["host"].n_unique() for attempt in life.attempts))


def _total() -> pl.Expr:
    return pl.col("duration_ns").sum()


def _saves(attempt: Attempt) -> list[int]:
    """Return the number of steps done at each save of the attempt; simultaneous saves of ranks count once."""
    saves = attempt.checkpoints.filter(pl.col("kind") == SAVE)
    rows = saves.select("rank", "start_ns").iter_rows()
    return sorted({updates_before(attempt, rank, start_ns) for rank, start_ns in rows})


def _writers(attempt: Attempt) -> int:
    """Return the number of ranks that saved."""
    return attempt.checkpoints.filter(pl.col("kind") == SAVE)["rank"].n_unique()


def _background_s(attempts: list[Attempt]) -> float:
    """Return the mean time that saves continued in the background after training resumed, in s."""
    saves = pl.concat([attempt.checkpoints for attempt in attempts]).filter(
        (pl.col("kind") == SAVE) & (pl.col("duration_ns") >= 0)
    )
    mean = (saves["duration_ns"] - saves["stall_ns"]).clip(lower_bound=0).mean()
    return float(mean) / NS_PER_S if isinstance(mean, (int, float)) else 0.0


MIN_FAILURES = 3  # fewer do not give a rate
YEAR_LAST = re.compile(r"\s*\d{1,2}[/.-]\d{1,2}[/.-]\d{4}")
MAX_TIME_S = 1e11  # the year 5138: larger values are in ms, us or ns


@dataclass(frozen=True)
class FailureRate:
    """Failures per hour.

    Attributes:
        job: of the job as a whole.
        host: of each host.
        count: number of failures that the rate is estimated from; 0 for a rate that was given.
        source: its source, in words.
    """

    job: float
    host: float
    count: int
    source: str

    def per_s(self, jobs: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Return [S] rates of the job and of each host, per second, drawn from their uncertainty per job.

        Args:
            rng: draws from the Gamma distribution of a rate estimated from `count` failures.
        """
        sure = rng.gamma(self.count, 1 / self.count, jobs) if self.count else np.ones(jobs)
        return self.job / S_PER_H * sure, self.host / S_PER_H * sure


# Rates of hosts with 8 GPUs; docs/goodput.md derives them.
PRESETS = {
    # 7.9 h at 1,024 GPUs as measured, 1.8 h at 16,384 as projected (arXiv 2410.21680): two equations.
    "rsc-1": FailureRate(0.0980, 2.234e-4, 0, "RSC-1, A100 (arXiv 2410.21680)"),
    # 419 unexpected interruptions in 54 days on 2,048 hosts, 54 of them software (arXiv 2407.21783, table 5).
    "llama-3": FailureRate(54 / 1296, 365 / 1296 / 2048, 0, "Llama 3, H100 (arXiv 2407.21783)"),
    # About one failure of hardware a week on 48 hosts (its public log).
    "bloom": FailureRate(0.0, 1 / (168 * 48), 0, "BLOOM, A100 (bigscience chronicles)"),
}


def own_rate(seen: ObservedFailures) -> FailureRate:
    """Return the rate of a job's own failures, all attributed to its hosts.

    Raises:
        Unanswerable: they are too few.
    """
    if seen.count < MIN_FAILURES or seen.up_s <= 0:
        raise Unanswerable(
            f"{seen.count} failures in {format_duration(seen.up_s * NS_PER_S)} do not show how often the job "
            f"fails: give --mtbf-per-gpu HOURS, --failures LOG, or --preset {' or '.join(PRESETS)}"
        )
    per_host = seen.count / (seen.up_s / S_PER_H) / seen.hosts
    return FailureRate(0.0, per_host, seen.count, f"{seen.count} failures of the job's own")


def rate_per_gpu(mtbf_h: float, gpus_per_host: int) -> FailureRate:
    """Return the rate from the mean time between failures of a GPU, in hours."""
    return FailureRate(0.0, gpus_per_host / mtbf_h, 0, f"a failure each {mtbf_h:,.6g} h of a GPU")


def rate_of_log(log: pl.DataFrame, hosts: int) -> FailureRate:
    """Return the rate of the failures in a log; those without a host are attributed to the job.

    Args:
        log: as `read_log` returns it.

    Raises:
        Unanswerable: it has too few failures, or all at one time.
    """
    span_h = float(log["time_s"][-1] - log["time_s"][0]) / S_PER_H
    count = log.height - 1  # intervals
    if count < MIN_FAILURES or span_h <= 0:
        raise Unanswerable(f"a log of {log.height} failures does not show their rate: it needs more")
    of_host = float((log["host"] != "").mean())  # type: ignore[arg-type]
    per_h = count / span_h
    return FailureRate(
        per_h * (1 - of_host), per_h * of_host / hosts, count, f"a log of {log.height} failures"
    )


def read_log(path: Path) -> pl.DataFrame:
    """Read a log of failures: `time_s`, sorted, and `host`, empty for failures of no host.

    Args:
        path: CSV or Parquet with a column `time` (ISO 8601, or seconds) and, if known, `host`.

    Raises:
        InputError: it cannot be read, or lacks the column.
    """

    def unreadable(why: str) -> InputError:
        return InputError(f"{path}: not readable as a log of failures ({why})")

    content, is_parquet = read_small(path), path.suffix == ".parquet"
    try:
        with panics_as(unreadable):
            file = BytesIO(content)
            frame = pl.read_parquet(file) if is_parquet else pl.read_csv(file, try_parse_dates=True)
            frame = frame.rename({name: name.strip() for name in frame.columns})
    except pl.exceptions.PolarsError as error:
        raise unreadable(first_line(error)) from error
    if "time" not in frame.columns:
        raise InputError(f"{path}: a log of failures has a column 'time', and 'host' where one failed")
    if frame.is_empty() or frame["time"].null_count():
        raise InputError(f"{path}: has no failure, or one without a time")
    if not is_parquet:
        first = pl.read_csv(BytesIO(content), infer_schema=False, n_rows=1).row(0)
        written = str(first[frame.columns.index("time")])
        if YEAR_LAST.match(written):
            raise InputError(f"{path}: it is unclear whether {written!r} has the day first: give ISO 8601")
    try:
        host = frame["host"].cast(pl.String).fill_null("") if "host" in frame.columns else pl.lit("")
    except pl.exceptions.PolarsError as error:
        raise InputError(f"{path}: its hosts are not names ({first_line(error)})") from error
    seconds = _log_seconds(path, frame["time"])
    hosts = pl.DataFrame({"time_s": seconds}).with_columns(host=host)
    return hosts.with_columns(pl.col("host").str.strip_chars()).sort("time_s")


def _log_seconds(path: Path, time: pl.Series) -> pl.Series:
    if time.dtype in (pl.Datetime, pl.Date):
        return time.dt.epoch("us") / (NS_PER_S / NS_PER_US)
    if not time.dtype.is_numeric():
        raise InputError(f"{path}: its times are neither ISO 8601 nor seconds, as {str(time[0])!r}")
    seconds = time.cast(pl.Float64)
    wrong = seconds.filter(~(seconds.abs() <= MAX_TIME_S).fill_null(False))
    if wrong.len():
        raise InputError(f"{path}: {wrong[0]:g} s is not a time: times are ISO 8601 or seconds")
    return seconds
