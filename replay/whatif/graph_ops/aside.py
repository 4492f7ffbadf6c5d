"""Host work beside the steps: garbage collection, saving of checkpoints, compilation.

Takes a graph and its run; returns when each rank did such work, on the graph's clock, and how much of each
node's time it took. Work in the background, beside the training thread, is not included.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.graph import CPU_KINDS, Graph, computed_once
from dpro.replay.intervals import union
from dpro.schema import CHECKPOINTS, COUNTERS, SPANS

Stretches = list[tuple[int, int, int]]  # rank, begin, end
COMPILER = r"\(dynamo_timed\)$|^Torch-?Dynamo Compile|^CompileId"  # names of the work of PyTorch's compiler


def collecting(graph: Graph) -> Stretches:
    """Return when garbage was collected, where recorded: 1 ms or more."""
    if graph.run is None:
        return []
    noted = graph.run.table(COUNTERS, ["rank", "counter", "time_ns", "value"])
    noted = noted.filter(pl.col("counter") == "gc_pause_ns")
    return _stretches_on_clock(graph, noted.select("rank", "time_ns", pl.col("value").cast(pl.Int64)))


def saving(graph: Graph) -> Stretches:
    """Return when saving a checkpoint blocked the training thread."""
    if graph.run is None:
        return []
    saved = graph.run.table(CHECKPOINTS).filter((pl.col("kind") == "save") & (pl.col("stall_ns") > 0))
    return _stretches_on_clock(graph, saved.select("rank", "start_ns", "stall_ns"))


def compiling(graph: Graph) -> Stretches:
    """Return when code was compiled, by the ranges of the compiler; nested ranges are merged."""
    if graph.run is None:
        return []
    spans = graph.run.table(SPANS, ["rank", "kind", "name", "start_ns", "duration_ns"])
    on_host = pl.col("kind").is_in(["cpu_op", "annotation"]) & (pl.col("duration_ns") > 0)
    named = spans.filter(on_host & pl.col("name").str.contains(COMPILER))
    return _stretches_on_clock(graph, named.select("rank", "start_ns", "duration_ns"))


def _stretches_on_clock(graph: Graph, rows: pl.DataFrame) -> Stretches:
    """Merge rows of rank, start and length into stretches without overlap, on the graph's clock."""
    if rows.is_empty():
        return []
    shift, stretches = clock_shifts(graph), Stretches()
    for (rank,), of_rank in rows.sort(rows.columns).group_by(rows.columns[0], maintain_order=True):
        if rank in shift:
            start = of_rank.to_series(1).to_numpy() + shift[rank]
            both = union(start, start + of_rank.to_series(2).to_numpy()).tolist()
            stretches += [(int(rank), begin, end) for begin, end in both]
    return stretches


def held_ns(graph: Graph, stretches: Stretches) -> Ints:
    """Return [N] ns of each node's time within stretches of its rank.

    Each stretch counts on the thread that was busiest during it.
    """
    nodes = graph.nodes
    held, on_cpu = np.zeros(graph.num_nodes, np.int64), np.isin(nodes.kind, CPU_KINDS)
    for rank, begin, end in stretches:
        within = np.flatnonzero(
            on_cpu & (nodes.rank == rank) & (nodes.measured_end > begin) & (nodes.measured_start < end)
        )
        if within.size == 0:
            continue
        overlap = np.minimum(nodes.measured_end[within], end)
        overlap -= np.maximum(nodes.measured_start[within], begin)
        of_main = nodes.lane[within] == int(np.bincount(nodes.lane[within], overlap).argmax())
        held[within[of_main]] += overlap[of_main]
    return np.minimum(held, nodes.duration)


@computed_once
def clock_shifts(graph: Graph) -> dict[int, int]:
    """Return ns to add to each rank's recorded times to get the graph's clock, within its drift."""
    if graph.run is None:
        return {}
    nodes = graph.nodes
    in_spans = nodes.span >= 0
    seen = pl.DataFrame(
        {
            "rank": nodes.rank[in_spans],
            "span_id": nodes.span[in_spans],
            "at": nodes.measured_start[in_spans],
        }
    ).group_by("rank", "span_id")
    spans = graph.run.table(SPANS, ["rank", "span_id", "start_ns"]).with_columns(
        pl.col("rank").cast(pl.Int64)
    )
    matched = seen.agg(pl.col("at").min()).join(spans, on=["rank", "span_id"])
    # A span's first piece begins with the span, unless a nested span begins at the same moment.
    shifts = matched.group_by("rank").agg(shift=(pl.col("at") - pl.col("start_ns")).mode().min())
    return {int(rank): int(shift) for rank, shift in shifts.iter_rows()}
