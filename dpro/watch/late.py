"""Who the others wait for, of a job that runs.

In: the latest calls, steps and counters of its processes. Out: findings. Own times of steps are computed once
and remembered; only the latest steps' calls are looked at again, and of large jobs fewer of them: what a call
waits for is told from many ranks there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.imbalance.load_model import AMOUNT
from dpro.detect.machine.oversubscribed import crowds_of, find_crowded_hosts, not_crowding
from dpro.detect.stragglers.from_calls import HISTORY, NOTHING, judge
from dpro.detect.stragglers.own_time import AlwaysOn, on_one_clock, own_time
from dpro.schema import COUNTERS

AGAIN, FEWEST = 40, 5  # steps whose calls are looked at again: what a call waits for is told from several
ROWS = 100_000  # calls that are looked at again, where that is enough for the fewest steps
PEERS = 32  # ranks whose counters are compared with those of one that is late


@dataclass(frozen=True)
class Latest:
    """What is known of a job now, times on each host's own clock.

    Attributes:
        calls: as `dpro.watch.calls.Calls` keeps them.
        steps, workers, clock_samples: rows of these tables.
        amounts: rows of `counters` that tell how much work steps were handed.
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


class Lateness:
    """The own times of a job so far."""

    def __init__(self) -> None:
        """None is known."""
        self._own: pl.DataFrame | None = None

    def look(self, now: Latest) -> list[Finding]:
        """Who is late now; what has been read of the processes is taken in.

        Args:
            now: the latest of the job.
        """
        if now.steps.is_empty() or now.calls.is_empty():
            return []
        steps = now.steps.filter(pl.col("step") > pl.col("step").max() - AGAIN)
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
        told = _costing(judge(self._own, calls, now.amounts, now.workers, doubtful=now.messages))
        late = [rank for finding in told if finding.component_kind == "rank" for rank in finding.ranks]
        if not late:
            return told
        causes = now.counters(_with_peers(late, self._own["rank"].unique().sort().to_list()))
        counters = pl.concat([now.amounts, causes.filter(pl.col("counter") != AMOUNT)])
        told = _costing(judge(self._own, calls, counters, now.workers, doubtful=now.messages))
        crowds = crowds_of(steps, causes, now.workers)
        kept = not_crowding(told, crowds, steps, causes)
        return kept if len(kept) == len(told) else [*find_crowded_hosts(crowds, causes), *kept]


def _costing(found: list[Finding]) -> list[Finding]:
    """Those that cost something now: what may come to cost something is no reason for an alarm."""
    return [finding for finding in found if finding.severity >= NOTHING]


def since_of(steps: pl.DataFrame, calls: pl.DataFrame) -> pl.DataFrame:
    """From when on calls are looked at again: `rank`, `since_ns`.

    Args:
        steps: the latest steps.
        calls: the calls that are known.
    """
    last = steps["step"].max()
    if not isinstance(last, int):
        return pl.DataFrame(schema={"rank": pl.Int32, "since_ns": pl.Int64})
    latest = steps.filter(pl.col("step") > last - again(steps, calls))
    return latest.group_by("rank").agg(since_ns=pl.col("start_ns").min())


def again(steps: pl.DataFrame, calls: pl.DataFrame) -> int:
    """How many steps' calls are looked at again."""
    times = calls["enqueued_ns"]
    first, last, step_ns = times.min(), times.max(), steps["duration_ns"].mean()
    if not isinstance(first, int) or not isinstance(last, int) or not isinstance(step_ns, float):
        return AGAIN
    covered = max((last - first) / max(step_ns, 1.0), 1.0)
    return max(FEWEST, min(AGAIN, int(ROWS * covered / calls.height)))


def _joined(known: pl.DataFrame, new: pl.DataFrame) -> pl.DataFrame:
    """The own times of the latest steps; where a step was known before, as it is seen now."""
    before = known.join(new.select("rank", "step"), on=["rank", "step"], how="anti")
    rows = pl.concat([before, new.select(before.columns)])
    return rows.filter(pl.col("step") > pl.col("step").max() - HISTORY).sort("step", "rank")


def _with_peers(late: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Ranks that are late and some others, spread over the job."""
    others = [rank for rank in ranks if rank not in late]
    every = max(len(others) // PEERS, 1)
    return sorted({*late, *others[::every]})
