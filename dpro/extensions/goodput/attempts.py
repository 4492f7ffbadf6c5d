"""The attempts of a job in order, the step that each resumed from, how it ended, and what its ranks did when.

Takes runs; returns one `Attempt` for each start of the job. Each run numbers its steps from 0. Its first step
of the job follows from the checkpoint that it loaded, if an earlier attempt saved it: the same file by inode
and time of change, which renaming keeps, or else the same path. `notes` lists what is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise
from typing import NamedTuple

import polars as pl

from dpro.analysis.analysis import Analysis
from dpro.analysis.end import COMPLETED, ENDED, FAILED, NOT_WATCHED, RUNNING, UNKNOWN
from dpro.detect.hang.case import signal_name
from dpro.errors import DproError, InputError
from dpro.schema import CHECKPOINTS, CLOCK_SAMPLES, COUNTERS, START_PARTS, STARTS, STEPS, WORKERS
from dpro.store import Run, open_run
from dpro.table import Table
from dpro.units import NS_PER_S, format_duration

ATTEMPTS = "attempts"  # the folder of earlier attempts in a run
WARM_STEPS = 3  # first steps of an attempt, whose time beyond a typical step is warm-up
SAVE, LOAD = "save", "load"


def _table(table: Table) -> cached_property[pl.DataFrame]:
    """Return a property for a table of an attempt's run, read once."""
    return cached_property(lambda attempt: attempt.run.table(table))


@dataclass(frozen=True)
class Attempt:
    """One start of the job.

    Attributes:
        run: its run.
        number: its position among the attempts, from 0.
        first_step: steps of the job that were done when it began.
        notes: what is unknown, one line each.
        followed: whether another attempt came after it.
    """

    run: Run
    number: int = 0
    first_step: int = 0
    notes: tuple[str, ...] = ()
    followed: bool = False

    steps = _table(STEPS)
    starts = _table(STARTS)
    checkpoints = _table(CHECKPOINTS)
    counters = _table(COUNTERS)
    workers = _table(WORKERS)

    @cached_property
    def parts(self) -> pl.DataFrame:
        """Parts of the start: rows of `start_parts` and loads of checkpoints, without nested ones."""
        kind = pl.col("kind").cast(pl.String)
        loads = self.checkpoints.filter((kind == LOAD) & (pl.col("stall_ns") > 0))
        loaded = loads.select("rank", kind, "start_ns", "bytes", name="path", duration_ns="stall_ns")
        parts = pl.concat([self.run.table(START_PARTS).with_columns(kind), loaded], how="diagonal")
        ordered = parts.with_columns(end_ns=pl.col("start_ns") + pl.col("duration_ns")).sort(
            "rank", "start_ns", "end_ns", descending=[False, False, True]
        )
        latest = pl.col("end_ns").cum_max().shift(1).over("rank")
        return ordered.filter(latest.is_null() | (pl.col("start_ns") >= latest))

    @property
    def begin_ns(self) -> int:
        """The earliest recorded start of its processes."""
        return _earliest(self.starts["process_ns"], self.workers["started_ns"])

    @property
    def end_ns(self) -> int:
        """The latest recorded moment; -1 where there is none."""
        steps = self.steps["start_ns"] + self.steps["duration_ns"]
        last = pl.concat([steps, self.workers["ended_ns"], self.starts["process_ns"]]).max()
        return last if isinstance(last, int) else -1

    @cached_property
    def typical_ns(self) -> float:
        """The median step, without the first `WARM_STEPS` if there are more; 0 without steps."""
        later = self.steps.filter(pl.col("step") >= WARM_STEPS)
        median = (self.steps if later.is_empty() else later)["duration_ns"].median()
        return float(median) if isinstance(median, (int, float)) else 0.0

    @property
    def ended_well(self) -> bool | None:
        """Whether all its processes ended with exit code 0; None where that is unknown.

        It is unknown for imports, and for the last attempt while none of its processes has ended.
        """
        ended = self.workers.filter((pl.col("exit_code") >= 0) | (pl.col("exit_signal") >= 0))
        untold = self.starts.is_empty() or self.workers.is_empty() or not self.followed
        if ended.is_empty() and untold and not self.run.manifest.exit_status:
            return None
        return self.workers.height > 0 and bool((self.workers["exit_code"] == 0).all())


def attempts_of(runs: Sequence[Run]) -> list[Attempt]:
    """Return the attempts of a job in order of time, with the step that each resumed from.

    Args:
        runs: runs of one job; earlier attempts in the folder `attempts` of a run are found. A run that is
            given twice, or is a copy, counts once.
    """
    earlier = [open_run(path.parent) for run in runs for path in run.path.glob(f"{ATTEMPTS}/*/manifest.json")]
    different: dict[object, Attempt] = {}
    for attempt in map(Attempt, [*earlier, *runs]):
        different.setdefault(_processes(attempt) or attempt.run.path.resolve(), attempt)
    attempts = sorted(different.values(), key=lambda attempt: attempt.begin_ns)
    resumed: list[Attempt] = []
    for number, attempt in enumerate(attempts):
        followed = number + 1 < len(attempts)
        resumed.append(_resumed(replace(attempt, number=number, followed=followed), resumed))
    return resumed


def updates_before(attempt: Attempt, rank: int, time_ns: int) -> int:
    """Return the number of steps that a rank had done in an attempt by a given time.

    Args:
        time_ns: the time, on the clock of the rank's host.
    """
    first = attempt.starts.filter((pl.col("rank") == rank) & pl.col("first_update_ns").is_between(0, time_ns))
    ended = pl.col("start_ns") + pl.col("duration_ns") <= time_ns
    last = attempt.steps.filter((pl.col("rank") == rank) & ended)["step"].max()
    return last + 1 if isinstance(last, int) else first.height


def _processes(attempt: Attempt) -> tuple[tuple[object, ...], ...]:
    """Return what identifies the attempt's processes; empty where that was not recorded."""
    processes = attempt.workers.filter(pl.col("started_ns") >= 0)
    return tuple(processes.select("host", "rank", "pid", "started_ns").sort("rank").iter_rows())


def _resumed(attempt: Attempt, earlier: Sequence[Attempt]) -> Attempt:
    """Return the attempt with the step that it resumed from."""
    if not earlier:
        return attempt
    if attempt.steps.is_empty() and (attempt.starts["first_update_ns"] < 0).all():
        return attempt  # it did no step
    loads = attempt.checkpoints.filter(pl.col("kind") == LOAD)
    saves = [_saves(previous) for previous in earlier]
    if loads.is_empty() and all(save.is_empty() for save in saves):
        note = "no checkpoint save was observed: each attempt is assumed to have begun at step 0"
        return replace(attempt, notes=(note,))
    if loads.is_empty():
        note = f"attempt {attempt.number} loaded no checkpoint: it is assumed to have begun at step 0"
        return replace(attempt, notes=(note,))
    all_saves = pl.concat(saves).sort("start_ns")
    for load in loads.iter_rows(named=True):
        before = all_saves.filter(pl.col("start_ns") < load["start_ns"])
        same_file = (
            (pl.col("inode") == load["inode"])
            & (pl.col("modified_ns") == load["modified_ns"])
            & (load["inode"] >= 0)
        )
        same_path = (pl.col("path") == load["path"]) & (load["path"] != "")
        for same in (same_file, same_path):
            if (saved := before.filter(same)).height:
                return replace(attempt, first_step=int(saved["done"][-1]))
    whole = all_saves.filter(pl.col("duration_ns") >= 0)
    if whole.is_empty():
        note = (
            f"attempt {attempt.number} loaded a file that no attempt saved: it is assumed to begin at step 0"
        )
        return replace(attempt, notes=(note,))
    note = f"attempt {attempt.number} loaded a file that was not seen saved: assumed the last checkpoint"
    return replace(attempt, first_step=int(whole["done"][-1]), notes=(note,))


def _saves(attempt: Attempt) -> pl.DataFrame:
    """Return the checkpoints that an attempt saved, with `done`: steps of the job that were done at each."""
    saves = attempt.checkpoints.filter(pl.col("kind") == SAVE)
    done = [
        attempt.first_step + updates_before(attempt, rank, start_ns)
        for rank, start_ns in saves.select("rank", "start_ns").iter_rows()
    ]
    return saves.with_columns(done=pl.Series(done, dtype=pl.Int64))


def _earliest(*times: pl.Series) -> int:
    """Return the earliest recorded time, ignoring negative ones; -1 where there is none."""
    seen = pl.concat([time.cast(pl.Int64) for time in times])
    least = seen.filter(seen >= 0).min()
    return least if isinstance(least, int) else -1


# How each attempt of a job ended, and gaps in its record.

MIN_TOGETHER = 0.5  # of the shorter of two runs: if they overlap by more, they ran at the same time
MIN_JUMP_NS = NS_PER_S
MAX_SLEW = 1e-3  # of elapsed time: a smaller difference is a clock being slewed, not set
HUNG = "hung"
NOT_RECORDED = "how it ended is not recorded"


class AttemptEnd(NamedTuple):
    """How an attempt ended.

    Attributes:
        how: completed, failed, hung, ended (from outside), running or unknown.
        label: the end in one or two words, such as `SIGKILL`.
        words: the end and its cause.
        rank: the rank that caused it; -1 where it is not a single rank, or unknown.
    """

    how: str
    label: str
    words: str
    rank: int = -1


def end_of_attempt(analysis: Analysis, attempt: Attempt) -> AttemptEnd:
    """Return how an attempt ended."""
    try:
        end = analysis.end
    except DproError:
        end = NOT_WATCHED
    rank = end.ranks[0] if len(end.ranks) == 1 else -1
    if end.hung:
        who = f"rank {rank} hung" if rank >= 0 else "it hung"
        return AttemptEnd(HUNG, HUNG, f"{who}, and was ended" + (f" by {end.by}" if end.by else ""), rank)
    if end.how == COMPLETED:
        return AttemptEnd(COMPLETED, "finished", "ended well")
    if end.how == FAILED:
        words = end.cause or (f"the command ended with {end.by}" if end.by else "did not end well")
        of_rank = attempt.workers.filter(pl.col("rank") == rank)
        number = of_rank["exit_signal"].max()
        return AttemptEnd(
            FAILED, signal_name(number) if isinstance(number, int) and number > 0 else "error", words, rank
        )
    if end.how == ENDED:
        return AttemptEnd(ENDED, "killed from outside", f"was ended by {end.by}")
    if end.how == RUNNING and not attempt.followed:
        return AttemptEnd(RUNNING, "running", "still runs, or its end was not seen")
    if attempt.ended_well is None:
        return AttemptEnd(UNKNOWN, "", NOT_RECORDED)
    if attempt.ended_well:
        return AttemptEnd(COMPLETED, "finished", "ended well")
    return AttemptEnd(FAILED, "failed", "did not end well")


def missing_attempts(attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each gap in torchrun's count of restarts: starts that left no record."""
    notes = []
    for before, after in pairwise(attempts):
        # Each host's torchrun has its own count; the job restarted only where all of them count on.
        gaps = _restarts(before).join(_restarts(after), on=["launched_ns", "host"], suffix="_after")
        gap = (gaps["restart_after"] - gaps["restart"] - 1).min()
        if isinstance(gap, int) and gap > 0:
            starts = f"{gap} start{'s' * (gap > 1)} of torchrun"
            between = f"between attempts {before.number} and {after.number}"
            notes.append(f"{starts} {between} left no record: the time counts as down")
    return notes


def clock_jumps(attempts: Sequence[Attempt]) -> list[str]:
    """Return a line for each attempt in which a host's clock was set forward, which lengthens its time."""
    notes = []
    for attempt in attempts:
        samples = attempt.run.table(CLOCK_SAMPLES).filter(
            (pl.col("peer_rank") < 0) & (pl.col("monotonic_ns") >= 0)
        )
        ordered = samples.sort("rank", "monotonic_ns")
        ran = pl.col("monotonic_ns").diff().over("rank")
        ahead = ordered.select("rank", ahead=pl.col("time_ns").diff().over("rank") - ran, ran=ran)
        jumps = ahead.filter(
            pl.col("ahead") > pl.max_horizontal(pl.lit(MIN_JUMP_NS), MAX_SLEW * pl.col("ran"))
        )
        if jumps.height:
            rank, jump = jumps.sort("ahead").row(-1)[:2]
            notes.append(
                f"attempt {attempt.number}: the clock of rank {rank} was set forward by "
                f"{format_duration(jump)}: its activity then seems longer by as much"
            )
    return notes


def ensure_one_job(attempts: Sequence[Attempt], runs: Sequence[Run]) -> None:
    """Raise if two runs ran at the same time, so that they are not attempts of one job.

    Raises:
        InputError: two of them did.
    """
    spans = []
    for run in runs:
        of_run = [attempt for attempt in attempts if attempt.run.path == run.path and attempt.begin_ns >= 0]
        if of_run:
            spans.append((of_run[0].begin_ns, max(attempt.end_ns for attempt in of_run), run.label))
    for (begin, end, name), (other_begin, other_end, other) in combinations(spans, 2):
        together = min(end, other_end) - max(begin, other_begin)
        if together > MIN_TOGETHER * min(end - begin, other_end - other_begin):
            raise InputError(
                f"{name} and {other} ran at the same time, so they are not attempts of one job; "
                "ask about each job alone"
            )


def _restarts(attempt: Attempt) -> pl.DataFrame:
    """Return how often torchrun had restarted the job, by `launched_ns` and `host`."""
    hosts = attempt.workers.select("rank", "host")
    launched = attempt.starts.filter((pl.col("restart") >= 0) & (pl.col("launched_ns") >= 0))
    return launched.join(hosts, on="rank").group_by("launched_ns", "host").agg(pl.col("restart").max())


# The activity of each rank over time, over all attempts of a job.

# Activities: classes of `account`, except for STEP, FIRST and TAIL, which are divided there.
LAUNCH, IMPORTS, SET_UP, GROUP = "launch", "imports", "set_up", "process_group"
FIRST, STEP, BETWEEN, TAIL = "first step", "step", "recording", "tail"
DOWN = "down"
# The activity that begins at each moment of `starts`.
_STARTS = (
    ("process_ns", IMPORTS),
    ("imported_ns", SET_UP),
    ("group_begin_ns", GROUP),
    ("group_ns", SET_UP),
    ("work_ns", FIRST),
    ("first_update_ns", BETWEEN),
)
_PARTS = {"import": IMPORTS, "process_group": GROUP}  # activities within time that is otherwise set-up
PIECES = {
    "attempt": pl.Int32, "rank": pl.Int32, "step": pl.Int64, "doing": pl.String,
    "start_ns": pl.Int64, "duration_ns": pl.Int64,
}  # fmt: skip


def pieces_of(attempts: Sequence[Attempt]) -> tuple[pl.DataFrame, int]:
    """Cut the wall time of each rank at changes of its activity.

    Returns:
        `[attempt, rank, step, doing, start_ns, duration_ns]`, in order of rank and time, step -1 outside
        steps; and the number of moments that were out of order.
    """
    marks = [_marks(attempt) for attempt in attempts]
    ranks = pl.concat([mark.select("rank") for mark in marks]).unique().sort("rank")
    moments = pl.concat(marks).filter(pl.col("start_ns") >= 0)
    if moments.is_empty():
        return pl.DataFrame(schema=PIECES), 0
    begin_ns, end_ns = _begin(attempts), int(moments["start_ns"].max())  # type: ignore[arg-type]
    first = ranks.with_columns(_mark(0, LAUNCH), start_ns=pl.lit(begin_ns, pl.Int64)).select(moments.columns)
    ordered = pl.concat([first, moments]).sort("rank", "attempt", maintain_order=True)
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
    """Return the moments at which each rank changes its activity, in order for each rank."""
    columns = ["rank", "attempt", "step", "doing", "start_ns"]
    # A loop may show no work before its first backward, so its first step takes at least a typical step.
    asked, updated = pl.col("work_ns"), pl.col("first_update_ns")
    latest = pl.when(updated >= 0).then(updated - round(attempt.typical_ns))
    begun = pl.max_horizontal(pl.min_horizontal(asked, latest), "group_ns", "imported_ns")
    # `dpro record` itself becomes the process of a command without launcher: that began before the job.
    process = pl.when(pl.col("process_ns") >= 0).then(pl.max_horizontal("process_ns", "launched_ns"))
    moments = attempt.starts.with_columns(
        work_ns=pl.when(asked >= 0).then(begun).otherwise(-1), process_ns=process.otherwise(-1)
    )
    starts = [
        moments.select("rank", *_mark(attempt.number, doing), "first_update_ns", start_ns=moment)
        for moment, doing in _STARTS
    ]
    unfinished = (pl.col("doing") == FIRST) & (pl.col("first_update_ns") < 0)
    doing = pl.when(unfinished).then(pl.lit(BETWEEN)).otherwise("doing")
    starts = [start.with_columns(doing=doing).select(columns) for start in starts]
    began, had, begins = (
        pl.when(pl.col(name) >= 0).then(name) for name in ("group_begin_ns", "group_ns", "work_ns")
    )
    before = _part_marks(
        attempt, moments.select("rank", since="imported_ns", until=pl.coalesce(began, begins))
    )
    after = _part_marks(attempt, moments.select("rank", since=had, until=begins))
    starts = [*starts[:2], before, *starts[2:4], after, *starts[4:]]
    steps = attempt.steps.sort("rank", "start_ns")
    end_ns = pl.col("start_ns") + pl.col("duration_ns")
    number = pl.lit(attempt.number, pl.Int32).alias("attempt")
    stepped = steps.select("rank", number, "step", pl.lit(STEP).alias("doing"), "start_ns")
    ended = steps.select("rank", *_mark(attempt.number, BETWEEN), start_ns=end_ns)
    stepping = pl.concat([ended, stepped]).sort("rank", "start_ns", maintain_order=True)
    gone = attempt.workers.select("rank", *_mark(attempt.number, DOWN), start_ns="ended_ns")
    marks = pl.concat([rows.select(columns) for rows in (*starts, stepping, gone)])
    return marks.sort("rank", maintain_order=True)


def _part_marks(attempt: Attempt, times: pl.DataFrame) -> pl.DataFrame:
    """Return when imports and process groups begin, and when set-up resumes, in order for each rank.

    Args:
        times: `rank`, and `since` and `until`, between which time is otherwise set-up; null for never, and
            for no end.
    """
    parts = attempt.parts.filter(pl.col("kind").is_in(list(_PARTS))).join(
        times.drop_nulls("since"), on="rank"
    )
    cut = parts.with_columns(
        begin=pl.max_horizontal("start_ns", "since"), end=pl.min_horizontal("end_ns", "until")
    ).filter(pl.col("begin") < pl.col("end"))
    ended = cut.select("rank", *_mark(attempt.number, SET_UP), start_ns="end")
    begun = cut.select("rank", *_mark(attempt.number, IMPORTS), "kind", start_ns="begin")
    begun = begun.with_columns(doing=pl.col("kind").replace_strict(_PARTS, return_dtype=pl.String)).drop(
        "kind"
    )
    marks = pl.concat([ended, begun.select(ended.columns)]).sort("rank", "start_ns", maintain_order=True)
    return marks.select("rank", "attempt", "step", "doing", "start_ns")


def _begin(attempts: Sequence[Attempt]) -> int:
    """Return when the job began: by its scheduler, else its launcher, else its first process."""
    first = attempts[0]
    for moment in ("scheduled_ns", "launched_ns"):
        begin = first.starts.filter(pl.col(moment) >= 0)[moment].min()
        if isinstance(begin, int):
            return begin
    return first.begin_ns
