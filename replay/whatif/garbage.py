"""Change when Python collects its garbage: never, or on all ranks at once every so many steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, Graph, NodeKind
from dpro.replay.pipeline import GARBAGE_COLLECTION
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.ranks import first_work
from dpro.schema import COUNTERS, SPANS
from dpro.units import NS_PER_MS, format_duration

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Garbage(Edit):
    """Python's garbage collector does not run by itself; planned, it runs at one step on all ranks."""

    name = "gc"
    summary = "no automatic garbage collection, or one at the same step on all ranks"
    example = "gc:every=100"
    needs = "pauses of 1 ms or more in deep windows, as `dpro record` notes, or operations named gc"
    assumes = "a planned collection takes what the longest took, and memory does not run out in between"
    source = "planned garbage collection, as in Lin et al., OSDI 2025"
    every: int = key("collect before every so many steps; 0 is never", 0, least=0)
    doubt: float = 0.2

    def apply(self, graph: Graph) -> Graph:
        """Take the pauses out of the CPU work they fell into, and put the planned ones in evenly."""
        paused = paused_ns(graph)
        if not paused.any():
            raise Unanswerable(
                f"no garbage collection of 1 ms or more fell into a deep window{_outside(graph)}"
            )
        duration = graph.nodes.duration - paused
        if self.every:
            ranks = sorted({int(rank) for rank in np.unique(graph.nodes.rank) if rank >= 0})
            duration[first_work(graph, ranks)] += round(_longest(graph, paused) / self.every)
        return graph.with_durations(duration)

    def describe(self) -> str:
        """What is changed."""
        return (
            f"garbage is collected every {self.every} steps on all ranks" if self.every else "no collections"
        )

    def how(self) -> str:
        """How to do it."""
        if self.every:
            return f"gc.disable(), and gc.collect() after every {self.every} steps on all ranks"
        return "gc.disable() or gc.freeze() after setup, where the loop makes no cycles"


def paused_ns(graph: Graph) -> Ints:
    """[N] ns of each node's time that went to collecting garbage.

    A pause is taken from the thread that was busiest during it.
    """
    nodes = graph.nodes
    paused = np.zeros(graph.num_nodes, np.int64)
    if GARBAGE_COLLECTION in graph.names:
        named = (nodes.name == graph.names.index(GARBAGE_COLLECTION)) & (nodes.kind == NodeKind.KERNEL)
        paused[named] = nodes.duration[named]
    on_cpu = np.isin(nodes.kind, CPU_KINDS)
    for rank, begin, end in _pauses(graph):
        at = np.flatnonzero(
            on_cpu & (nodes.rank == rank) & (nodes.measured_end > begin) & (nodes.measured_start < end)
        )
        if at.size == 0:
            continue
        overlap = np.minimum(nodes.measured_end[at], end) - np.maximum(nodes.measured_start[at], begin)
        by_lane = np.bincount(nodes.lane[at], overlap)
        mine = nodes.lane[at] == int(by_lane.argmax())
        paused[at[mine]] += overlap[mine]
    return np.minimum(paused, nodes.duration)


def _pauses(graph: Graph) -> list[tuple[int, int, int]]:
    """(rank, begin, end) of noted collections, on the graph's clock."""
    if graph.run is None:
        return []
    noted = graph.run.table(COUNTERS, ["rank", "counter", "time_ns", "value"])
    noted = noted.filter(pl.col("counter") == "gc_pause_ns").sort("rank", "time_ns")
    if noted.is_empty():
        return []
    shift = clock_shifts(graph)
    found = []
    for rank, time, length in noted.select("rank", "time_ns", pl.col("value").cast(pl.Int64)).iter_rows():
        if rank in shift:
            found.append((rank, time + shift[rank], time + shift[rank] + length))
    return found


def clock_shifts(graph: Graph) -> dict[int, int]:
    """What to add to a recorded time of each rank to have it on the graph's clock, within its drift, ns."""
    if graph.run is None:
        return {}
    nodes = graph.nodes
    known = nodes.span >= 0
    seen = pl.DataFrame(
        {"rank": nodes.rank[known], "span_id": nodes.span[known], "at": nodes.measured_start[known]}
    ).group_by("rank", "span_id")
    spans = graph.run.table(SPANS, ["rank", "span_id", "start_ns"]).with_columns(
        pl.col("rank").cast(pl.Int64)
    )
    both = seen.agg(pl.col("at").min()).join(spans, on=["rank", "span_id"])
    # A span's first own piece begins with it, unless one that it contains begins at the same moment.
    shifts = both.group_by("rank").agg(shift=(pl.col("at") - pl.col("start_ns")).mode().min())
    return {int(rank): int(shift) for rank, shift in shifts.iter_rows()}


def _longest(graph: Graph, paused: Ints) -> float:
    """The longest collection: noted, or as an operation."""
    noted = [end - begin for _, begin, end in _pauses(graph)]
    return float(max(noted, default=int(paused.max(initial=0))))


def _outside(graph: Graph) -> str:
    """What collecting garbage takes in all steps, where that was counted."""
    if graph.run is None:
        return ""
    counted = graph.run.table(COUNTERS, ["counter", "value"]).filter(pl.col("counter") == "step_gc_ns")[
        "value"
    ]
    mean = counted.mean()
    if not isinstance(mean, float):
        return ": `dpro record` notes them"
    share = f"in all recorded steps it takes {format_duration(mean)} per step"
    return (
        f"; {share}: record more or longer windows (--every, --window-steps)"
        if mean > NS_PER_MS / 100
        else f"; {share}"
    )
