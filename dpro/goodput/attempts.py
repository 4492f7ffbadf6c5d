"""The attempts of a job, in order, and the step that each resumed from.

In: runs. Out: one `Attempt` for each start of the job. Each run numbers its steps from 0; which step of the
job that is follows from the checkpoint that it loaded, if that was saved in an earlier attempt: the same file
by its inode and time of change, which renaming keeps, else by its path. What is not known is in `notes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import polars as pl

from dpro.schema import CHECKPOINTS, COUNTERS, STARTS, STEPS, WORKERS
from dpro.store import Run, open_run

ATTEMPTS = "attempts"  # the folder in a run that has those before it
WARM_STEPS = 3  # of an attempt, the first: what they take longer is warm-up
SAVE, LOAD = "save", "load"


@dataclass(frozen=True)
class Attempt:
    """One start of the job.

    Attributes:
        run: what was recorded of it.
        number: its place among the attempts, from 0.
        first_step: steps of the job that were done when it began.
        notes: what is not known, one line each.
        followed: whether another came after it.
    """

    run: Run
    number: int = 0
    first_step: int = 0
    notes: tuple[str, ...] = ()
    followed: bool = False

    @cached_property
    def steps(self) -> pl.DataFrame:
        """Table `steps`."""
        return self.run.table(STEPS)

    @cached_property
    def starts(self) -> pl.DataFrame:
        """Table `starts`."""
        return self.run.table(STARTS)

    @cached_property
    def checkpoints(self) -> pl.DataFrame:
        """Table `checkpoints`."""
        return self.run.table(CHECKPOINTS)

    @cached_property
    def counters(self) -> pl.DataFrame:
        """Table `counters`."""
        return self.run.table(COUNTERS)

    @cached_property
    def workers(self) -> pl.DataFrame:
        """Table `workers`."""
        return self.run.table(WORKERS)

    @property
    def begin_ns(self) -> int:
        """When the first of its processes was seen."""
        return _least(self.starts["process_ns"], self.workers["started_ns"])

    @property
    def end_ns(self) -> int:
        """The last moment of it that was seen."""
        steps = self.steps["start_ns"] + self.steps["duration_ns"]
        last = pl.concat([steps, self.workers["ended_ns"], self.starts["process_ns"]]).max()
        return last if isinstance(last, int) else -1

    @cached_property
    def typical_ns(self) -> float:
        """The median step, after the first ones where there are more; 0 without steps."""
        later = self.steps.filter(pl.col("step") >= WARM_STEPS)
        median = (self.steps if later.is_empty() else later)["duration_ns"].median()
        return float(median) if isinstance(median, (int, float)) else 0.0

    @property
    def ended_well(self) -> bool | None:
        """Whether all its processes ended with exit code 0; None where nothing says it.

        So it is of imports, and of what still runs: no process of it has ended, and no attempt came after it.
        """
        known = self.workers.filter((pl.col("exit_code") >= 0) | (pl.col("exit_signal") >= 0))
        untold = self.starts.is_empty() or self.workers.is_empty() or not self.followed
        if known.is_empty() and untold and not self.run.manifest.exit_status:
            return None
        return self.workers.height > 0 and bool((self.workers["exit_code"] == 0).all())


def attempts_of(runs: Sequence[Run]) -> list[Attempt]:
    """The attempts of a job, in order of time, with the step that each resumed from.

    Args:
        runs: of one job; those before a restart, in the folder `attempts` of a run, are found. One that is
            given twice, or is a copy, counts once.
    """
    earlier = [open_run(path.parent) for run in runs for path in run.path.glob(f"{ATTEMPTS}/*/manifest.json")]
    different: dict[object, Attempt] = {}
    for attempt in map(Attempt, [*earlier, *runs]):
        different.setdefault(_processes(attempt) or attempt.run.path.resolve(), attempt)
    found = sorted(different.values(), key=lambda attempt: attempt.begin_ns)
    resumed: list[Attempt] = []
    for number, attempt in enumerate(found):
        followed = number + 1 < len(found)
        resumed.append(_resumed(replace(attempt, number=number, followed=followed), resumed))
    return resumed


def updates_before(attempt: Attempt, rank: int, time_ns: int) -> int:
    """How many steps a rank had done in an attempt by a moment.

    Args:
        time_ns: the moment, on its host's clock.
    """
    first = attempt.starts.filter((pl.col("rank") == rank) & pl.col("first_update_ns").is_between(0, time_ns))
    ended = pl.col("start_ns") + pl.col("duration_ns") <= time_ns
    last = attempt.steps.filter((pl.col("rank") == rank) & ended)["step"].max()
    return last + 1 if isinstance(last, int) else first.height


def _processes(attempt: Attempt) -> tuple[tuple[object, ...], ...]:
    """What its processes are known by; empty where that was not recorded."""
    known = attempt.workers.filter(pl.col("started_ns") >= 0)
    return tuple(known.select("host", "rank", "pid", "started_ns").sort("rank").iter_rows())


def _resumed(attempt: Attempt, earlier: Sequence[Attempt]) -> Attempt:
    """The attempt, with the step that it resumed from."""
    if not earlier:
        return attempt
    if attempt.steps.is_empty() and (attempt.starts["first_update_ns"] < 0).all():
        return attempt  # it did no step
    loads = attempt.checkpoints.filter(pl.col("kind") == LOAD)
    saves = [_saves(each) for each in earlier]
    if loads.is_empty() and all(each.is_empty() for each in saves):
        note = "no checkpoint was seen saved: each attempt is taken to have begun at step 0"
        return replace(attempt, notes=(note,))
    if loads.is_empty():
        note = f"attempt {attempt.number} loaded no checkpoint: it is taken to have begun at step 0"
        return replace(attempt, notes=(note,))
    known = pl.concat(saves).sort("start_ns")
    for load in loads.iter_rows(named=True):
        before = known.filter(pl.col("start_ns") < load["start_ns"])
        same_file = (
            (pl.col("inode") == load["inode"])
            & (pl.col("modified_ns") == load["modified_ns"])
            & (load["inode"] >= 0)
        )
        same_path = (pl.col("path") == load["path"]) & (load["path"] != "")
        for same in (same_file, same_path):
            if (found := before.filter(same)).height:
                return replace(attempt, first_step=int(found["done"][-1]))
    whole = known.filter(pl.col("duration_ns") >= 0)
    if whole.is_empty():
        note = (
            f"attempt {attempt.number} loaded what no attempt had saved: it is taken to have begun at step 0"
        )
        return replace(attempt, notes=(note,))
    note = f"attempt {attempt.number} loaded a file that was not seen saved: taken for the last checkpoint"
    return replace(attempt, first_step=int(whole["done"][-1]), notes=(note,))


def _saves(attempt: Attempt) -> pl.DataFrame:
    """What an attempt saved, with `done`: the steps of the job that were done then."""
    saves = attempt.checkpoints.filter(pl.col("kind") == SAVE)
    done = [
        attempt.first_step + updates_before(attempt, rank, start_ns)
        for rank, start_ns in saves.select("rank", "start_ns").iter_rows()
    ]
    return saves.with_columns(done=pl.Series(done, dtype=pl.Int64))


def _least(*times: pl.Series) -> int:
    """The earliest of moments that were seen; -1 where none was."""
    seen = pl.concat([each.cast(pl.Int64) for each in times])
    least = seen.filter(seen >= 0).min()
    return least if isinstance(least, int) else -1
