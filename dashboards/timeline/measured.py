"""The measured lanes of a run, read rank by rank: ranks that are read are shown while others are being read.

In: a run. Out: `MeasuredLanes`, which a background thread fills. It keeps some 40 bytes per span; other
columns of a span stay in its file until they are needed. Its clock needs the tables of collectives, clock
samples and steps, and four columns of the spans, one part in memory at a time: the timeline does not wait for
the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl

from dpro.analysis.cached import Cached, cached
from dpro.dashboards import defect_in
from dpro.dashboards.timeline.lanes import RankLanes, SpanNames, make_lanes
from dpro.dashboards.timeline.search import Search
from dpro.errors import DproError
from dpro.replay.alignment.align import Alignment, align, one_clock
from dpro.replay.alignment.match import match_collectives
from dpro.replay.construction.graph_builder import wait_and_transfer
from dpro.replay.pipeline.operations import consists_of_operations
from dpro.schema import CLOCK_SAMPLES, COLLECTIVES, SPANS, STEPS, WORKERS
from dpro.store import Run
from dpro.units import NS_PER_MS

MAX_UNASKED = 1_500_000  # spans of a run whose graph is built before a view asks for it
COLUMNS = (
    "span_id", "rank", "window", "kind", "name", "start_ns", "duration_ns", "tid", "device", "stream",
    "correlation", "forward_thread", "micro_batch",
)  # fmt: skip


class MeasuredLanes(Cached):
    """The lanes that have been read so far.

    Attributes:
        ranks: rank -> its lanes; grows until `complete`.
        failed: the reason why reading ended early; empty where it did not.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run, self.names = run, SpanNames()
        self.search = Search(self.names)
        self.ranks: dict[int, RankLanes] = {}
        self.failed = ""
        self._complete = threading.Event()
        self._started = False

    @cached
    def clocks(self) -> Clocked:
        """The clock of each rank, steps, collectives."""
        return clocked(self.run)

    @property
    def complete(self) -> bool:
        """Whether all ranks have been read, or never will be."""
        return self._complete.is_set()

    def start(self, first: Iterable[int] = ()) -> None:
        """Begin to read in a thread, unless that has begun."""
        with self.lock_of("start"):
            if self._started:
                return
            self._started = True
        threading.Thread(target=self._read, args=(list(first),), daemon=True).start()

    def all(self) -> dict[int, RankLanes]:
        """All ranks, once they are there."""
        self.start()
        self._complete.wait()
        return self.ranks

    def _read(self, first: list[int]) -> None:
        try:
            of = self.clocks
            for rank in sorted(of.parts, key=lambda rank: (rank not in first, rank)):
                self.ranks[rank] = self._lanes(of, rank)
        except DproError as error:
            self.failed = str(error)
        except Exception:
            self.failed = defect_in("timeline")
        finally:
            self._complete.set()

    def _lanes(self, of: Clocked, rank: int) -> RankLanes:
        spans = self.run.read(SPANS, of.parts[rank], COLUMNS).filter(pl.col("rank") == rank)
        spans = of.alignment.aligned(spans)
        spans = spans.join(arrivals(of, rank), on="span_id", how="left", maintain_order="left")
        return make_lanes(spans, self.names, of.window_ns, of.origin_ns)


# One clock for all ranks, the steps on it, and when the members of each collective arrived.

_EXTENT = ("rank", "window", "span_id", "device", "stream", "start_ns", "duration_ns")


@dataclass(frozen=True)
class Clocked:
    """What all lanes of a run share: clocks, collectives, steps.

    Attributes:
        members: a row per member of a collective, on the aligned clock: `rank`, `window`, `span_id`, `op`,
            `key` (its group), `instance`, `members`, `start_ns`, `duration_ns`, `rendezvous_ns`, `bytes_in`,
            `bytes_out`, `dtype`, `launch_span_id`.
        parts: rank -> the files its spans are in.
        origin_ns: begin of the timeline, on the aligned clock.
        end_ns: end of the timeline, since the origin.
        window_ns: duration of the longest deep window.
        steps: `window`, `step`, `begin_ms`, `end_ms` since the origin.
        lateness_ms: rank -> by how much it comes later to collectives than the first member, on average.
    """

    alignment: Alignment
    members: pl.DataFrame
    parts: Mapping[int, list[Path]]
    origin_ns: int
    end_ns: int
    window_ns: int
    steps: pl.DataFrame
    lateness_ms: Mapping[int, float]
    spans: int


def clocked(run: Run) -> Clocked:
    """Find the clock of each rank, and when collectives met.

    Raises:
        InputError: a part of the run cannot be read.
    """
    collectives = run.table(COLLECTIVES)
    wanted = collectives.filter((pl.col("window") >= 0) & (pl.col("span_id") >= 0)).select("rank", "span_id")
    parts: dict[int, list[Path]] = {}
    extents, called, spans = [], [SPANS.empty().select(_EXTENT)], 0
    for path, part in zip(run.parts(SPANS), run.part_by_part(SPANS, _EXTENT)):
        end = (pl.col("start_ns") + pl.col("duration_ns").clip(0)).max()
        extents.append(part.group_by("rank", "window").agg(pl.col("start_ns").min(), end=end))
        called.append(part.join(wanted.unique(), on=["rank", "span_id"], how="semi"))
        spans += part.height
        for rank in extents[-1]["rank"].unique().to_list():
            parts.setdefault(rank, []).append(path)
    empty = pl.DataFrame(schema={"rank": pl.Int32, "window": pl.Int32, "start_ns": pl.Int64, "end": pl.Int64})
    extent = (
        pl.concat([empty, *extents])
        .group_by("rank", "window")
        .agg(pl.col("start_ns").min(), pl.col("end").max())
    )
    places = [(int(rank), int(window)) for rank, window in extent.select("rank", "window").iter_rows()]
    matched = match_collectives(collectives, pl.concat(called)).rows
    alignment = _alignment(run, matched, places)
    members = wait_and_transfer(alignment.aligned(matched)).drop("device", "stream")
    moved = alignment.aligned(extent.with_columns(duration_ns=pl.col("end") - pl.col("start_ns")))
    begin = moved["start_ns"].to_numpy()
    origin = int(begin.min(initial=np.iinfo(np.int64).max)) if begin.size else 0
    end_ns = int((begin + moved["duration_ns"].to_numpy()).max(initial=origin))
    length = moved.group_by("window").agg(
        last=(pl.col("start_ns") + pl.col("duration_ns")).max() - pl.col("start_ns").min()
    )["last"]
    return Clocked(
        alignment, members, dict(sorted(parts.items())), origin, end_ns - origin,
        int(length.to_numpy().max(initial=1)), _steps(run, alignment, moved, origin), _lateness(members),
        spans,
    )  # fmt: skip


def _alignment(run: Run, matched: pl.DataFrame, places: list[tuple[int, int]]) -> Alignment:
    """Align the clocks as the graph does; traces of whole operations already share one clock."""
    first = next(iter(run.part_by_part(SPANS, ("rank", "kind", "name", "correlation"))), None)
    if first is not None and consists_of_operations(first):
        return one_clock(places, "one trace")
    return align(matched, places, run.table(WORKERS), run.table(CLOCK_SAMPLES))


def _steps(run: Run, alignment: Alignment, extent: pl.DataFrame, origin_ns: int) -> pl.DataFrame:
    """List the steps of deep windows, each from its first begin to its last end on any rank."""
    steps = run.table(STEPS).filter(pl.col("duration_ns") >= 0)
    within = steps.filter(pl.col("window") >= 0)
    steps = alignment.aligned(steps if within.is_empty() else within)
    low, high = extent["start_ns"].min(), (extent["start_ns"] + extent["duration_ns"]).max()
    end = pl.col("start_ns") + pl.col("duration_ns")
    if extent.height:
        steps = steps.filter((end > low) & (pl.col("start_ns") < high))
    return (
        steps.group_by("window", "step")
        .agg(
            begin_ms=(pl.col("start_ns").min() - origin_ns) / NS_PER_MS,
            end_ms=(end.max() - origin_ns) / NS_PER_MS,
        )
        .sort("window", "step")
    )


def _lateness(members: pl.DataFrame) -> dict[int, float]:
    """Compute how much later each rank arrives than the first member of its collectives, mean, ms."""
    late = pl.col("start_ns") - pl.col("start_ns").min().over("instance")
    met = members.filter(pl.col("members") > 1).with_columns(late=late)
    means = met.group_by("rank").agg(pl.col("late").mean() / NS_PER_MS)
    return {int(rank): float(ms) for rank, ms in means.iter_rows()}


def arrivals(of: Clocked, rank: int) -> pl.DataFrame:
    """Return the arrival of the last member of each collective of a rank: `span_id`, `until_ns` (aligned)."""
    members = of.members.filter((pl.col("rank") == rank) & (pl.col("span_id") >= 0))
    return members.group_by("span_id").agg(until_ns=pl.col("rendezvous_ns").max())


def wait_ns(member: dict[str, int]) -> int:
    """Return how long a member of a collective waited for the last one."""
    return int(np.clip(member["rendezvous_ns"] - member["start_ns"], 0, max(member["duration_ns"], 0)))
