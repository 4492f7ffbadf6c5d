"""How each attempt of a job ended, and what it left no record of.

In: an attempt's analysis, or the attempts in order. Out: an `AttemptEnd`, as `dpro.analysis.end` judges it;
an error where runs are not attempts of one job; notes where torchrun started more attempts than were
recorded, and where a clock was set forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import NamedTuple

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.end import COMPLETED, ENDED, FAILED, NOT_WATCHED, RUNNING, UNKNOWN
from dpro.detect.hang.deaths import signal_name
from dpro.errors import DproError, InputError
from dpro.goodput.attempts import Attempt
from dpro.schema import CLOCK_SAMPLES
from dpro.store import Run
from dpro.units import NS_PER_S, format_duration

MIN_TOGETHER = 0.5  # of the shorter of two runs: they ran at the same time
MIN_JUMP_NS = NS_PER_S
MAX_SLEW = 1e-3  # of the time that went by: by less a clock is slewed, not set
HUNG = "hung"
NOT_RECORDED = "how it ended is not recorded"


class AttemptEnd(NamedTuple):
    """How an attempt ended.

    Attributes:
        how: completed, failed, hung, ended (from outside), running or unknown.
        label: the same in a word or two, as `SIGKILL`.
        words: and by what.
        rank: the rank of the first cause; -1 where that is no single rank, or unknown.
    """

    how: str
    label: str
    words: str
    rank: int = -1


def end_of_attempt(analysis: Analysis, attempt: Attempt) -> AttemptEnd:
    """How an attempt ended."""
    try:
        end = analysis.end
    except DproError:
        end = NOT_WATCHED
    rank = end.ranks[0] if len(end.ranks) == 1 else -1
    if end.hung:
        who = f"rank {rank} stood still" if rank >= 0 else "it stood still"
        return AttemptEnd(HUNG, HUNG, f"{who}, and was ended" + (f" by {end.by}" if end.by else ""), rank)
    if end.how == COMPLETED:
        return AttemptEnd(COMPLETED, "finished", "ended well")
    if end.how == FAILED:
        words = end.cause or (f"the command ended with {end.by}" if end.by else "did not end well")
        return AttemptEnd(FAILED, _label(attempt, rank), words, rank)
    if end.how == ENDED:
        return AttemptEnd(ENDED, "ended from outside", f"was ended by {end.by}")
    if end.how == RUNNING and not attempt.followed:
        return AttemptEnd(RUNNING, "running", "still runs, or its end was not seen")
    if attempt.ended_well is None:
        return AttemptEnd(UNKNOWN, "", NOT_RECORDED)
    if attempt.ended_well:
        return AttemptEnd(COMPLETED, "finished", "ended well")
    return AttemptEnd(FAILED, "failed", "did not end well")


def _label(attempt: Attempt, rank: int) -> str:
    """What ended the first rank: a signal, or an error."""
    of_rank = attempt.workers.filter(pl.col("rank") == rank)
    number = of_rank["exit_signal"].max()
    return signal_name(number) if isinstance(number, int) and number > 0 else "error"


def missing_attempts(attempts: Sequence[Attempt]) -> list[str]:
    """A line for each gap in torchrun's count of restarts: those between ended before they were recorded.

    Args:
        attempts: of a job, in order.
    """
    notes = []
    for before, after in pairwise(attempts):
        # Each host's torchrun counts for itself; one that has counted on alone has not restarted the job.
        gaps = _restarts(before).join(_restarts(after), on=["launched_ns", "host"], suffix="_after")
        gap = (gaps["restart_after"] - gaps["restart"] - 1).min()
        if isinstance(gap, int) and gap > 0:
            starts = f"{gap} start{'s' * (gap > 1)} of torchrun"
            between = f"between attempts {before.number} and {after.number}"
            notes.append(f"{starts} {between} left no record: the time counts as down")
    return notes


def set_forward(attempts: Sequence[Attempt]) -> list[str]:
    """A line for each attempt in which a host's clock was set forward: its time seems longer by as much.

    Args:
        attempts: of a job, in order.
    """
    notes = []
    for attempt in attempts:
        own = attempt.run.table(CLOCK_SAMPLES).filter(
            (pl.col("peer_rank") < 0) & (pl.col("monotonic_ns") >= 0)
        )
        ordered = own.sort("rank", "monotonic_ns")
        ran = pl.col("monotonic_ns").diff().over("rank")
        ahead = ordered.select("rank", ahead=pl.col("time_ns").diff().over("rank") - ran, ran=ran)
        jumps = ahead.filter(
            pl.col("ahead") > pl.max_horizontal(pl.lit(MIN_JUMP_NS), MAX_SLEW * pl.col("ran"))
        )
        if jumps.height:
            rank, jump = jumps.sort("ahead").row(-1)[:2]
            notes.append(
                f"attempt {attempt.number}: the clock of rank {rank} was set forward by "
                f"{format_duration(jump)}: what it did then seems longer by as much"
            )
    return notes


def ensure_one_job(attempts: Sequence[Attempt], runs: Sequence[Run]) -> None:
    """Refuse runs that ran at the same time.

    Args:
        attempts: of all runs, in order.

    Raises:
        InputError: two of them did.
    """
    spans = []
    for run in runs:
        own = [each for each in attempts if each.run.path == run.path and each.begin_ns >= 0]
        if own:
            spans.append((own[0].begin_ns, max(each.end_ns for each in own), run.label))
    for (begin, end, name), (other_begin, other_end, other) in combinations(spans, 2):
        together = min(end, other_end) - max(begin, other_begin)
        if together > MIN_TOGETHER * min(end - begin, other_end - other_begin):
            raise InputError(
                f"{name} and {other} ran at the same time: they are no attempts of one job; "
                "ask about each job alone"
            )


def _restarts(attempt: Attempt) -> pl.DataFrame:
    """`launched_ns`, `host`, and how often torchrun had restarted there."""
    hosts = attempt.workers.select("rank", "host")
    known = attempt.starts.filter((pl.col("restart") >= 0) & (pl.col("launched_ns") >= 0))
    return known.join(hosts, on="rank").group_by("launched_ns", "host").agg(pl.col("restart").max())
