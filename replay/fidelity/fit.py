"""How far a replay is from the trace: by step, by rank, and by single starts.

In: a replay of the unchanged graph. Out: frames of errors. What they are worth is judged in
`dpro.replay.fidelity.accuracy`.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.fidelity.evidence import is_started, taken_from_trace
from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.timeline import Timeline, measured_step_times, rank_step_times, step_ends, step_times

PERCENTILES = (50, 75, 95, 99, 100)


def step_errors(timeline: Timeline) -> pl.DataFrame:
    """`window`, `step`, `measured_ns`, `replayed_ns`, `error_pct` of each step that lasts."""
    graph = timeline.graph
    return _compared(
        measured_step_times(graph), step_times(graph, timeline.start, timeline.end), ["window", "step"]
    )


def rank_errors(timeline: Timeline, derived: Timeline) -> pl.DataFrame:
    """How well each rank fits.

    Args:
        timeline: the replay of the unchanged graph, for the steps.
        derived: the replay whose starts are judged: that of the graph that is predicted from.

    Returns:
        `rank`, `error_pct` (mean of the absolute errors of its own steps; null without any), and `p50`,
        `p95`: percentiles of the errors of its starts, ns.
    """
    graph, nodes = timeline.graph, timeline.graph.nodes
    measured = rank_step_times(graph, nodes.measured_start, nodes.measured_end)
    replayed = rank_step_times(graph, timeline.start, timeline.end)
    steps = _compared(measured, replayed, ["rank", "window", "step"])
    of_steps = steps.group_by("rank").agg(pl.col("error_pct").abs().mean())
    counted = counted_starts(derived)
    missed = pl.DataFrame({"rank": nodes.rank[counted], "miss": start_misses(derived)[counted]})
    of_starts = missed.group_by("rank").agg(
        p50=pl.col("miss").quantile(0.5, "linear"), p95=pl.col("miss").quantile(0.95, "linear")
    )
    ranks = pl.DataFrame({"rank": np.unique(nodes.rank[nodes.rank >= 0])})
    return ranks.join(of_steps, on="rank", how="left").join(of_starts, on="rank", how="left").sort("rank")


def start_errors(timeline: Timeline, counted: Bools) -> dict[int, float]:
    """Percentiles of `start_misses`, ns, by percent; empty where nothing is counted.

    Args:
        timeline: the replay.
        counted: [N] nodes whose starts count, as of `counted_starts`.
    """
    missed = start_misses(timeline)[counted]
    return dict(zip(PERCENTILES, map(float, np.percentile(missed, PERCENTILES)))) if missed.size else {}


def start_misses(timeline: Timeline) -> Ints:
    """[N] ns |replayed - measured| start.

    Where launches were not recorded and usual delays stand in for them, both are counted from the beginning
    of their step: else what the delays of one step are off by would count again in all steps after it.
    """
    graph, nodes = timeline.graph, timeline.graph.nodes
    missed = timeline.start - nodes.measured_start
    if (nodes.kind == NodeKind.DELAY).any():
        missed = missed - _begin_of_step(graph, timeline.start, timeline.end)
        missed = missed + _begin_of_step(graph, nodes.measured_start, nodes.measured_end)
    distance: Ints = np.abs(missed)
    return distance


def _begin_of_step(graph: Graph, start: Ints, end: Ints) -> Ints:
    """[N] ns when the step of each node begins; 0 outside steps."""
    previous = pl.col("finish_ns").shift(1).over("window").fill_null(pl.col("begin_ns"))
    begins = step_ends(graph, start, end).select("window", "step", begin=previous)
    places = pl.DataFrame({"window": graph.nodes.window, "step": graph.nodes.step})
    of_node = places.join(begins, on=["window", "step"], how="left", maintain_order="left")
    begin: Ints = of_node["begin"].fill_null(0).to_numpy()
    return begin


def counted_starts(timeline: Timeline) -> Bools:
    """[N] starts that are judged: of GPU work and collectives, and of CPU spans where there is no GPU work.

    Those that the trace sets are left out: they are right by construction.
    """
    nodes = timeline.graph.nodes
    counted = is_started(timeline.graph)
    if not np.isin(nodes.kind, GPU_KINDS).any():
        counted |= nodes.span >= 0
    return counted & ~taken_from_trace(timeline.graph)


def _compared(measured: pl.DataFrame, replayed: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    both = measured.rename({"duration_ns": "measured_ns"}).join(replayed, on=keys)
    both = both.rename({"duration_ns": "replayed_ns"}).filter(pl.col("measured_ns") > 0)
    error = (pl.col("replayed_ns") / pl.col("measured_ns") - 1) * 100
    return both.with_columns(error_pct=error).sort(keys)
