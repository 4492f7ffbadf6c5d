"""Where in the next forward pass each gradient's parameter is needed first, on the thread or on the GPU.

In: a graph and its backward passes. Out: a node for each gradient. A gradient is accumulated right behind the
backward operator that made it, which has the sequence number of its forward operator.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import GPU_KINDS, EdgeKind, Graph
from dpro.replay.kept import kept
from dpro.replay.models.gradients.passes import ACCUMULATE, MAIN_THREAD, Pass, lane_of
from dpro.schema import SPANS

COLUMNS = ["span_id", "kind", "name", "start_ns", "sequence_number", "forward_thread"]


def first_uses(graph: Graph, passes: list[Pass], on_gpu: bool) -> list[Ints]:
    """For each pass the nodes of its own forward pass that use its parameters first.

    Args:
        on_gpu: whether the GPU's work is meant, or that of the thread.

    Returns:
        For each pass [P] nodes.

    Raises:
        Unanswerable: the run has no sequence numbers, or does not hold the forward pass.
    """
    nodes, edges = graph.nodes, graph.edges
    places = (nodes.rank, nodes.window, nodes.step, nodes.lane, nodes.span, nodes.kind, nodes.message)
    columns = (*places, nodes.measured_start, nodes.measured_end, edges.source, edges.target, edges.kind)
    known = (*columns, graph.lanes, graph.messages, graph.run)
    return list(kept(graph, "first-uses", known, lambda: tuple(_first_uses(graph, passes, on_gpu))))


def _first_uses(graph: Graph, passes: list[Pass], on_gpu: bool) -> list[Ints]:
    found: list[Ints] = [np.empty(0, np.int64)] * len(passes)
    for place in sorted({(each.rank, each.window) for each in passes}):
        mine = [which for which, each in enumerate(passes) if (each.rank, each.window) == place]
        nodes, begins = _work_of(graph, *place, on_gpu)
        for which, starts in zip(mine, _forward_starts(graph, *place, [passes[which] for which in mine])):
            at = np.searchsorted(begins, starts)
            if (at == begins.size).any():
                raise Unanswerable("no work of the forward pass follows the operator that uses a parameter")
            found[which] = nodes[at]
    return found


def _work_of(graph: Graph, rank: int, window: int, on_gpu: bool) -> tuple[Ints, Ints]:
    """Work of the main thread or what it launched, and when the thread did it or launched it, in order."""
    nodes, edges = graph.nodes, graph.edges
    lanes = [lane for lane, what in enumerate(graph.lanes) if what == (rank, MAIN_THREAD)]
    on_thread = np.isin(nodes.lane, lanes) & (nodes.window == window)
    if on_gpu:
        launch = (edges.kind == EdgeKind.LAUNCH) & on_thread[edges.source]
        launch &= np.isin(nodes.kind[edges.target], GPU_KINDS)
        source, target = edges.source[launch], edges.target[launch]
    else:
        source = target = np.flatnonzero(on_thread)
    order = np.lexsort((target, nodes.measured_start[source]))
    return target[order], nodes.measured_start[source[order]]


def _forward_starts(graph: Graph, rank: int, window: int, passes: list[Pass]) -> list[Ints]:
    """For each pass [P] ns, when the forward operators began that its gradients come from."""
    assert graph.run is not None
    spans = graph.run.table(SPANS, ["rank", "window", *COLUMNS])
    spans = spans.filter((pl.col("rank") == rank) & (pl.col("window") == window)).sort("start_ns", "span_id")
    lane = lane_of(graph, rank, window, spans.filter(pl.col("name") == ACCUMULATE)["span_id"].to_numpy())
    numbered = spans.filter(
        (pl.col("kind") == "cpu_op")
        & (pl.col("sequence_number") >= 0)
        & ~pl.col("name").str.ends_with("AccumulateGrad")
    )
    backward = numbered.filter(pl.col("forward_thread") > 0)
    forward = numbered.filter(pl.col("forward_thread") <= 0)
    if lane is None or backward.is_empty():
        raise Unanswerable(
            "the run does not say which forward operator a gradient comes from: it has no sequence numbers"
        )
    ends = np.concatenate([graph.nodes.measured_end[each.ready] for each in passes])
    made = pl.DataFrame({"ready": ends - lane[1] - 1})  # what begins at the end is the next operator
    asked = (
        made.with_row_index("gradient")
        .sort("ready")
        .join_asof(
            backward.select("start_ns", "sequence_number"),
            left_on="ready",
            right_on="start_ns",
            strategy="backward",
        )
    )
    used = asked.sort("start_ns").join_asof(
        forward.select("start_ns", "sequence_number", began="start_ns"),
        on="start_ns",
        by="sequence_number",
        strategy="backward",
        check_sortedness=False,
    )
    if used["began"].null_count():
        raise Unanswerable("the window does not hold the forward operator that a gradient comes from")
    began = used.sort("gradient")["began"].to_numpy() + lane[1]
    return np.split(began, np.cumsum([each.ready.size for each in passes])[:-1])
