"""Communication of activations, whose size is that of the batch: not of gradients or parameters.

In: a graph. Out: which of its transfers move activations, and the graph with more of them.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.kept import kept
from dpro.replay.models.link_costs import fit_costs, messages_by_kind
from dpro.replay.whatif.graph_ops.shared_links import own_ns
from dpro.schema import COLLECTIVES, SPANS, STEPS
from dpro.store import Run

BETWEEN_LAYERS = ("all_to_all", "send", "recv")
KEY = ["rank", "window"]


def with_more_activations(graph: Graph, factor: float) -> Graph:
    """The graph with transfers of activations that take what this many times their bytes take.

    What one stood in line behind others does not grow with its bytes.

    Args:
        factor: of the bytes.
    """
    nodes, duration = graph.nodes, graph.nodes.duration.astype(np.float64)
    grows, costs, own = np.flatnonzero(moves_activations(graph)), fit_costs(graph), own_ns(graph)
    for kind, messages in messages_by_kind(graph).items():
        mine = grows[np.isin(nodes.message[grows], messages)]
        num_bytes = nodes.bytes[mine].astype(np.float64)
        known = kind in costs and bool((num_bytes > 0).all())
        now = costs[kind].time_ns(num_bytes) if known else np.ones(mine.size)
        then = costs[kind].time_ns(factor * num_bytes) if known else factor * now
        duration[mine] += own[mine] * (then / np.maximum(now, 1e-9) - 1)
    return graph.with_durations(np.rint(duration).astype(np.int64))


def moves_activations(graph: Graph) -> Bools:
    """[N] transfers of activations, or of their gradients.

    All-to-alls and messages between two ranks are. So are all-reduces of a size that a forward pass reduces:
    tensor parallelism reduces what a layer returns there, and as much in the backward pass; DDP and FSDP
    reduce in the backward pass alone.
    """
    nodes = graph.nodes
    columns = (nodes.kind, nodes.bytes, nodes.message, graph.messages, graph.run)
    found = np.zeros(graph.num_nodes, np.bool_)
    found[kept(graph, "transfers-of-activations", columns, lambda: _moving_activations(graph))] = True
    return found


def _moving_activations(graph: Graph) -> Ints:
    nodes = graph.nodes
    moving = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0))
    ops = np.array([message.op for message in graph.messages] + [""])[nodes.message[moving]]
    found: Bools = np.isin(ops, BETWEEN_LAYERS)
    if graph.run is not None:
        found |= (ops == "all_reduce") & np.isin(nodes.bytes[moving], _reduced_forward(graph.run))
    return moving[found]


def _reduced_forward(run: Run) -> list[int]:
    """Sizes of all-reduces that are called before the first backward operator of a step, bytes."""
    calls = run.table(COLLECTIVES, [*KEY, "op", "bytes_in", "start_ns", "launch_span_id"])
    calls = calls.filter((pl.col("op") == "all_reduce") & (pl.col("bytes_in") > 0))
    spans = run.table(SPANS, [*KEY, "span_id", "name", "forward_thread", "start_ns"])
    called = spans.select("rank", launch_span_id="span_id", called_ns="start_ns")
    calls = calls.join(called, on=["rank", "launch_span_id"], how="left").select(
        *KEY, "bytes_in", at=pl.coalesce("called_ns", "start_ns")
    )
    begins = run.table(STEPS, [*KEY, "start_ns"]).select(*KEY, at="start_ns", step_ns="start_ns").sort("at")
    backward = spans.filter((pl.col("forward_thread") > 0) | (pl.col("name") == "dpro::backward"))
    turns = (
        backward.select(*KEY, at="start_ns", turn_ns="start_ns")
        .sort("at")
        .join_asof(begins, on="at", by=KEY, check_sortedness=False)
        .group_by(*KEY, "step_ns")
        .agg(pl.col("turn_ns").min())
    )
    placed = (
        calls.sort("at")
        .join_asof(begins, on="at", by=KEY, check_sortedness=False)
        .join(turns, on=[*KEY, "step_ns"])
    )
    early = placed.filter(pl.col("at") < pl.col("turn_ns"))
    return early["bytes_in"].unique().to_list()
