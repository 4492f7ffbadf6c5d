"""Who the others wait for, of a job that runs.

In: the latest calls, steps and counters of its processes. Out: findings. Own times of steps are computed once
and remembered; only the latest steps' calls are looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.late_ranks import HISTORY, judge, messages_unseen
from dpro.detect.lateness import calls_of, own_time
from dpro.detect.one_clock import Always, on_one_clock
from dpro.schema import CLOCK_SAMPLES, COUNTERS, STEPS, WORKERS
from dpro.watch.tail import Tail

AGAIN = 40  # steps whose calls are looked at again: what a call waits for is told from several


class Lateness:
    """The own times of a job so far."""

    def __init__(self) -> None:
        """None is known."""
        self._own: pl.DataFrame | None = None

    def look(self, tails: Sequence[Tail]) -> list[Finding]:
        """Who is late now; what has been read of the processes is taken in.

        Args:
            tails: the processes of the job.
        """
        rows, _ = on_one_clock(_always(tails))
        if rows.steps.is_empty() or rows.collectives.is_empty():
            return []
        calls = calls_of(rows.collectives)
        self._own = self._joined(own_time(calls, rows.steps), rows.steps)
        doubtful = messages_unseen(rows.collectives, rows.workers)
        return judge(self._own, calls, rows.counters, rows.workers, doubtful=doubtful)

    def _joined(self, new: pl.DataFrame, steps: pl.DataFrame) -> pl.DataFrame:
        """The own times of the latest steps; where a step was known before, as it is seen now."""
        known = new if self._own is None else pl.concat([self._own, new])
        known = known.unique(["rank", "step"], keep="last", maintain_order=True)
        known = known.filter(pl.col("step") > pl.col("step").max() - HISTORY)
        starts = steps.select("rank", "step", now_ns="start_ns")  # as the clocks are known now
        moved = known.join(starts, on=["rank", "step"], how="left", maintain_order="left")
        return moved.with_columns(start_ns=pl.coalesce("now_ns", "start_ns")).drop("now_ns")


def _always(tails: Sequence[Tail]) -> Always:
    """The latest rows of what is always recorded."""
    frames = [tail.frames() for tail in tails]
    steps = pl.concat([each[STEPS.name] for each in frames])
    steps = steps.filter(pl.col("step") > pl.col("step").max().over("rank") - HISTORY)
    again = steps.filter(pl.col("step") > pl.col("step").max() - AGAIN).group_by("rank")
    since = again.agg(since=pl.col("start_ns").min())
    calls = pl.concat([tail.collectives for tail in tails]).join(since, on="rank")
    return Always(
        calls.filter(pl.col("enqueued_ns") >= pl.col("since")).drop("since"),
        steps,
        pl.concat([each[COUNTERS.name] for each in frames]),
        pl.concat([each[WORKERS.name] for each in frames]),
        pl.concat([each[CLOCK_SAMPLES.name] for each in frames]),
    )
