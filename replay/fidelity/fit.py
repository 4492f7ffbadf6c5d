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


def rank_errors(timeline: Timeline, starts: pl.DataFrame) -> pl.DataFrame:
    """How well each rank fits.

    Args:
        starts: as from `rank_start_errors`.

    Returns:
        `rank`, `error_pct` (mean of the absolute errors of its own steps; null without any), and `p50`,
        `p95`: percentiles of the errors of its starts, ns.
    """
    graph, nodes = timeline.graph, timeline.graph.nodes
    measured = rank_step_times(graph, nodes.measured_start, nodes.measured_end)
    replayed = rank_step_times(graph, timeline.start, timeline.end)
    steps = _compared(measured, replayed, ["rank", "window", "step"])
    of_steps = steps.group_by("rank").agg(pl.col("error_pct").abs().mean())
    ranks = pl.DataFrame({"rank": np.unique(nodes.rank[nodes.rank >= 0])})
    return ranks.join(of_steps, on="rank", how="left").join(starts, on="rank", how="left").sort("rank")


def rank_start_errors(misses: pl.DataFrame) -> pl.DataFrame:
    """`rank`, and `p50`, `p95`: percentiles of the errors of its starts, ns; ranks without any are left out.

    Args:
        misses: as from `judged_starts`.
    """
    return misses.group_by("rank").agg(
        p50=pl.col("miss_ns").quantile(0.5, "linear"), p95=pl.col("miss_ns").quantile(0.95, "linear")
    )


def judged_starts(timeline: Timeline, on_gpu: bool) -> pl.DataFrame:
    """Starts that are judged: `rank`, `window`, `step`, and `miss_ns`: |replayed - measured|.

    Args:
        on_gpu: whether any rank of the run has work on a GPU.
    """
    nodes, counted = timeline.graph.nodes, counted_starts(timeline, on_gpu)
    columns = {name: getattr(nodes, name)[counted] for name in ("rank", "window", "step")}
    return pl.DataFrame(columns | {"miss_ns": start_misses(timeline)[counted]})


def counted(misses: pl.DataFrame) -> pl.DataFrame:
    """`window`, `step`, `miss_ns`, and `count`: how many starts of any rank are off by so much.

    Args:
        misses: as from `judged_starts`.
    """
    return misses.group_by("window", "step", "miss_ns").agg(count=pl.len().cast(pl.Int64))


def start_errors(misses: pl.DataFrame) -> dict[int, float]:
    """Percentiles of errors of starts, ns, by percent; empty without any.

    Between two of them as `numpy.percentile` has it.

    Args:
        misses: as from `counted`.
    """
    if misses.is_empty():
        return {}
    ordered = misses.group_by("miss_ns").agg(pl.col("count").sum()).sort("miss_ns")
    miss, before = ordered["miss_ns"].to_numpy(), ordered["count"].cum_sum().to_numpy()
    at = (before[-1] - 1) * (np.array(PERCENTILES) / 100)
    low, high = (miss[np.searchsorted(before, place, side="right")] for place in (np.floor(at), np.ceil(at)))
    over = at - np.floor(at)
    between = np.where(over < 0.5, low + (high - low) * over, high - (high - low) * (1 - over))
    return dict(zip(PERCENTILES, between.tolist()))


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


def counted_starts(timeline: Timeline, on_gpu: bool) -> Bools:
    """[N] starts that are judged: of GPU work and collectives, and of CPU spans where there is no GPU work.

    Those that the trace sets are left out: they are right by construction.

    Args:
        on_gpu: whether any rank of the run has work on a GPU.
    """
    nodes = timeline.graph.nodes
    chosen = is_started(timeline.graph)
    if not on_gpu:
        chosen |= nodes.span >= 0
    return chosen & ~taken_from_trace(timeline.graph)


def has_gpu_work(graph: Graph) -> bool:
    """Whether any of it is work on a GPU."""
    return bool(np.isin(graph.nodes.kind, GPU_KINDS).any())


def _compared(measured: pl.DataFrame, replayed: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    both = measured.rename({"duration_ns": "measured_ns"}).join(replayed, on=keys)
    both = both.rename({"duration_ns": "replayed_ns"}).filter(pl.col("measured_ns") > 0)
    error = (pl.col("replayed_ns") / pl.col("measured_ns") - 1) * 100
    return both.with_columns(error_pct=error).sort(keys)
