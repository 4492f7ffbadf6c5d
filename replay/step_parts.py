"""The parts of replayed steps: how long the devices of each rank compute, copy, communicate, wait or idle.

Takes a timeline and the ends of its steps; returns the columns of `dpro.replay.steps.step_breakdown`, which
splits the steps of the trace. Only ranks with GPU work are split; else main-thread spans show the parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.replay.construction.rank_graph import STREAM
from dpro.replay.graph import EdgeKind, NodeKind, is_one_of
from dpro.replay.steps import STEP_SCHEMA, gpu_activity, split_steps
from dpro.replay.timeline import Timeline, durations_of

KINDS = {NodeKind.KERNEL: "kernel", NodeKind.COPY: "memcpy", NodeKind.TRANSFER: "kernel"}


def replayed_breakdown(timeline: Timeline, ends: pl.DataFrame, partial: Sequence[int] = ()) -> pl.DataFrame:
    """Split every replayed step of every rank with GPU work into the parts of its time.

    Args:
        ends: `baseline_steps` of the graph: a step lasts from the end of the previous one, on all ranks.
        partial: collectives in which ranks without a record take part, or may.

    Returns:
        `STEP_SCHEMA`, sorted by step and rank. Waits are known only for collectives with all members here.
    """
    work, launches = _gpu_work(timeline, partial)
    begins = pl.col("finish_ns").shift(1).over("window").fill_null(pl.col("begin_ns"))
    steps = ends.with_columns(start_ns=begins, end_ns=pl.col("finish_ns"))
    steps = steps.join(durations_of(ends).select("window", "step"), on=["window", "step"], how="semi")
    of_window = steps.partition_by("window", as_dict=True)
    parts = [pl.DataFrame(schema=STEP_SCHEMA)]
    for (rank, window), inside in work.partition_by("rank", "window", as_dict=True).items():
        if (window,) not in of_window:
            continue
        stretches = of_window[window,].with_columns(rank=pl.lit(rank, pl.Int32))
        called = launches.filter((pl.col("rank") == rank) & (pl.col("window") == window))
        begin = min(int(stretches["start_ns"][0]), int(inside["start_ns"].min()))  # type: ignore[arg-type]
        activity = gpu_activity(pl.concat([inside, called]), begin)
        parts.append(split_steps(stretches, activity).select(list(STEP_SCHEMA)).cast(pl.Schema(STEP_SCHEMA)))
    return pl.concat(parts).sort("step", "rank", "duration_ns")


def _gpu_work(timeline: Timeline, partial: Sequence[int]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the work on GPUs, and the calls that launch it, as spans of the replay."""
    graph = timeline.graph
    nodes, edges = graph.nodes, graph.edges
    is_stream = np.array([*(what.startswith(STREAM) for _, what in graph.lanes), False])
    on_gpu = is_stream[nodes.lane]
    moves = nodes.kind == NodeKind.TRANSFER
    begins = timeline.start.copy()
    members = np.bincount(nodes.collective[moves & (nodes.collective >= 0)])
    members = np.append(members, 1)  # for nodes without a collective
    expected = np.array([*(message.num_ranks for message in graph.messages), 1])[nodes.message]
    whole = ~moves | ((members[nodes.collective] >= expected) & ~np.isin(nodes.collective, partial))
    arrived = np.flatnonzero(nodes.kind == NodeKind.ARRIVE)
    by_member = dict(zip(zip(nodes.rank[arrived].tolist(), nodes.span[arrived].tolist()), arrived.tolist()))
    launch = np.full(nodes.duration.size, -1)
    by_call = edges.kind == EdgeKind.LAUNCH
    launch[edges.target[by_call]] = edges.source[by_call]
    for node in np.flatnonzero(moves & on_gpu).tolist():
        arrival = by_member.get((int(nodes.rank[node]), int(nodes.span[node])))
        if arrival is not None:  # the call launches the arrival, and the transfer is the rest of its kernel
            begins[node] = timeline.start[arrival]
            launch[node] = max(launch[node], launch[arrival])
    work = np.flatnonzero(is_one_of(nodes.kind, tuple(KINDS)) & on_gpu)
    calls = np.unique(launch[work][launch[work] >= 0])
    kinds = pl.Series(
        [KINDS.get(NodeKind(kind), "runtime") for kind in range(len(NodeKind))], dtype=pl.String
    )

    def as_spans(rows: Ints, begin: Ints, number: Ints) -> pl.DataFrame:
        return pl.DataFrame(
            {
                "rank": nodes.rank[rows],
                "window": nodes.window[rows],
                "span_id": rows,
                "kind": kinds.gather(nodes.kind[rows]),
                "correlation": number,
                "start_ns": begin[rows],
                "duration_ns": timeline.end[rows] - begin[rows],
                "end_ns": timeline.end[rows],
                "is_comm": moves[rows],
                "ready_ns": pl.Series(timeline.start[rows]).set(~pl.Series(whole[rows]), None),
            }
        )

    return as_spans(work, begins, launch[work]), as_spans(calls, timeline.start, calls)
