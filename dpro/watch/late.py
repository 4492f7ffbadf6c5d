"""The late watch: which ranks the others wait for, of a job that runs.

In: the latest calls, steps and counters of its processes. Out: findings, once per look. Processes are asked
for their latest calls, given time to answer, and then looked at; the state is a record, and `next_state`
alone decides what comes next. Own times of steps are computed once and remembered. Only the latest steps'
calls are looked at again, and of large jobs fewer of them: what a call waits for is inferred from many ranks
there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.live import LatestSteps, diagnose_calls
from dpro.detect.stragglers.from_calls import HISTORY
from dpro.detect.stragglers.own_time import AlwaysOn, on_one_clock, own_time
from dpro.schema import COUNTERS
from dpro.watch.calls import CallTable
from dpro.watch.job import Job
from dpro.watch.tail import ProcessTail, amounts_of, clock_samples_of, steps_of

# Steps whose calls are looked at again: what a call waits for is inferred from several.
MIN_AGAIN, MAX_AGAIN = 5, 40
MAX_ROWS = 100_000  # calls that are looked at again, unless fewer are less than MIN_AGAIN steps
MAX_PEERS = 32  # ranks whose counters are compared with those of one that is late
ASK_S = 2.0  # between two requests for the latest calls: a dump costs the job some 20 ms of CPU
ANSWER_S = 1.2  # until all have answered: each looks for requests once a second
SHARE = 0.1  # of the time that looks may take


class LateWatchPhase(Enum):
    """What the late watch does."""

    RESTING = "the last look was not long ago, or no step has ended since"
    ASKED = "processes were asked for their calls"
    LOOKING = "the calls are looked at"


@dataclass(frozen=True)
class LateState:
    """The state of the late watch; times on this host's monotonic clock.

    Attributes:
        phase: what it does.
        due_s: before which processes are not asked again.
        asked_s: when they were asked.
        asked_at: ends of steps until then, of all ranks together.
    """

    phase: LateWatchPhase = LateWatchPhase.RESTING
    due_s: float = 0.0
    asked_s: float = 0.0
    asked_at: int = 0


def next_state(state: LateState, now_s: float, updates: int) -> LateState:
    """Return the state at a look of the watcher.

    Args:
        now_s: the time, on the monotonic clock.
    """
    if state.phase is LateWatchPhase.RESTING and now_s >= state.due_s and updates > state.asked_at:
        return replace(state, phase=LateWatchPhase.ASKED, asked_s=now_s, asked_at=updates)
    if state.phase is LateWatchPhase.ASKED and now_s >= state.asked_s + ANSWER_S:
        return replace(state, phase=LateWatchPhase.LOOKING)
    return state


def looked(state: LateState, now_s: float, took_s: float) -> LateState:
    """Return the state after a look."""
    due_s = max(state.asked_s + ASK_S, now_s - ANSWER_S + took_s / SHARE)
    return replace(state, phase=LateWatchPhase.RESTING, due_s=due_s)


@dataclass(frozen=True)
class LatestRecords:
    """What is known of a job now, times on each host's own clock.

    Attributes:
        calls: as `dpro.watch.calls.CallTable` keeps them.
        steps, workers, clock_samples: rows of these tables.
        amounts: rows of `counters` with the amount of work of steps.
        messages: whether ranks also wait for messages, which calls do not show.
        counters: gives the rows of `counters` of some ranks, which are needed of few.
    """

    calls: pl.DataFrame
    steps: pl.DataFrame
    workers: pl.DataFrame
    clock_samples: pl.DataFrame
    amounts: pl.DataFrame
    messages: bool
    counters: Callable[[Sequence[int]], pl.DataFrame]


class LateWatch:
    """Looks for ranks that the others wait for.

    Attributes:
        state: what it does.
    """

    def __init__(self) -> None:
        """No call is read yet."""
        self.state = LateState()
        self._calls, self._own_times = CallTable(), OwnTimes()

    def look(self, job: Job) -> list[Finding] | None:
        """Return the findings of a look; None where none was due, or no call was new."""
        now_s, before = time.monotonic(), self.state
        self.state = next_state(before, now_s, job.progress.updates)
        if self.state.phase is LateWatchPhase.ASKED and before.phase is not LateWatchPhase.ASKED:
            job.ask_for_calls()
        if self.state.phase is not LateWatchPhase.LOOKING:
            return None
        begun_s, tails = time.thread_time(), list(job.tails.values())
        try:
            return self._own_times.look(self._latest(job, tails)) if self._calls.read(tails) else None
        finally:
            self.state = looked(self.state, now_s, time.thread_time() - begun_s)

    def _latest(self, job: Job, tails: Sequence[ProcessTail]) -> LatestRecords:
        """Return what is known of the job; calls of steps that are not looked at again are forgotten."""
        steps = steps_of(tails)
        self._calls.forget_before(since_of(steps, self._calls.frame))
        by_rank = {tail.process.rank: tail for tail in tails}

        def counters(ranks: Sequence[int]) -> pl.DataFrame:
            return pl.concat([by_rank[rank].frames()[COUNTERS.name] for rank in ranks])

        samples, amounts = clock_samples_of(tails), amounts_of(tails)
        calls = self._calls
        return LatestRecords(calls.frame, steps, job.workers, samples, amounts, calls.messages, counters)


class OwnTimes:
    """The own times of a job's steps so far."""

    def __init__(self) -> None:
        """None is known."""
        self._own: pl.DataFrame | None = None

    def look(self, now: LatestRecords) -> list[Finding]:
        """Return which ranks are late now, after adding the own times of the latest steps."""
        if now.steps.is_empty() or now.calls.is_empty():
            return []
        steps = now.steps.filter(pl.col("step") > pl.col("step").max() - MAX_AGAIN)
        rows = AlwaysOn(now.calls, steps, COUNTERS.empty(), now.workers, now.clock_samples)
        aligned, _ = on_one_clock(rows)
        calls = aligned.collectives.rename({"enqueued_ns": "time_ns"})
        if calls.is_empty():
            return []
        # Steps and counters of a rank are joined by when they began, on its own clock.
        new = own_time(calls, aligned.steps).drop("start_ns").join(
            steps.select("rank", "step", "start_ns"), on=["rank", "step"], maintain_order="left"
        )  # fmt: skip
        self._own = new if self._own is None else _joined(self._own, new)
        ranks = self._own["rank"].unique().sort().to_list()
        return diagnose_calls(
            LatestSteps(
                self._own, calls, steps, now.workers, now.amounts,
                counters=lambda late: now.counters(_with_peers(late, ranks)), messages_unseen=now.messages,
            )
        )  # fmt: skip


def since_of(steps: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """Return from when on calls are looked at again.

    Args:
        steps: the latest steps.

    Returns:
        `rank` and `since_ns`, on the rank's own clock.
    """
    last = steps["step"].max()
    if not isinstance(last, int):
        return pl.DataFrame(schema={"rank": pl.Int32, "since_ns": pl.Int64})
    latest = steps.filter(pl.col("step") > last - num_again(steps, calls))
    return latest.group_by("rank").agg(since_ns=pl.col("start_ns").min())


def num_again(steps: pl.DataFrame, calls: pl.DataFrame) -> int:
    """Return the number of steps whose calls are looked at again.

    Args:
        steps: the latest steps.
    """
    times = calls["enqueued_ns"]
    first, last, step_ns = times.min(), times.max(), steps["duration_ns"].mean()
    if not isinstance(first, int) or not isinstance(last, int) or not isinstance(step_ns, float):
        return MAX_AGAIN
    covered = max((last - first) / max(step_ns, 1.0), 1.0)
    return max(MIN_AGAIN, min(MAX_AGAIN, int(MAX_ROWS * covered / calls.height)))


def _joined(known: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """Return the own times of the latest steps; of a step that was known before, the new ones."""
    before = known.join(new.select("rank", "step"), on=["rank", "step"], how="anti")
    rows = pl.concat([before, new.select(before.columns)])
    return rows.filter(pl.col("step") > pl.col("step").max() - HISTORY).sort("step", "rank")


def _with_peers(late: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Return the ranks that are late and some others, spread over the job."""
    others = [rank for rank in ranks if rank not in late]
    every = max(len(others) // MAX_PEERS, 1)
    return sorted({*late, *others[::every]})
