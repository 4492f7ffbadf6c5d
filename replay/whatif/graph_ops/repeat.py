"""Work that is done several times: copies of a step before it, forward passes again before backward.

In: a graph, and what is to be repeated. Out: a graph in which each step begins with its copies, one behind
the other on every thread and stream, or in which the first backward work of each block is longer. What a
copy leaves out is decided by the edits.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.limits import refuse_large_graph
from dpro.replay.engine import longest_path
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Edges, Graph, NodeKind, Nodes, make_graph, once
from dpro.replay.timeline import AFTER_STEPS
from dpro.replay.whatif.graph_ops.spans.scope import blocks_of


def with_copies(graph: Graph, duration: Ints, lag: Ints, unmet: Bools, times: int) -> Graph:
    """Put copies of each step before it.

    Args:
        duration: [N] ns, of the nodes in the copies.
        lag: [E] ns, of the edges in the copies.
        unmet: [E] edges that the copies do not have; where it is the same array again, less is to be done.

    Returns:
        The graph, itself where there are to be none.

    Raises:
        Unanswerable: there is no memory for it.
    """
    if times == 0:
        return graph
    refuse_large_graph(graph.num_nodes * (1 + times))
    nodes, edges = graph.nodes, graph.edges
    # How nodes are ordered depends on no duration and no lag: graphs that differ in these alone share it.
    columns = (*_lasting(nodes), edges.source, edges.target, edges.kind, unmet)
    made = once(graph, ("copies", times), columns, lambda: _numbered_with_copies(graph, unmet, times))
    durations = np.concatenate([nodes.duration, duration])[made.nodes.duration]
    lags = np.concatenate([edges.lag, lag, [0]])[made.edges.lag]
    return made.with_durations(durations).with_lags(lags).of_same_job(graph)


def with_recomputed_blocks(graph: Graph, pattern: str) -> Graph:
    """Make the first backward work of each block longer by its forward work, on CPU and GPU.

    Raises:
        Unanswerable: there is no such module, it has no backward pass, or it communicates.
    """
    blocks = blocks_of(graph, pattern)
    if blocks.filter("backward").is_empty():
        raise Unanswerable(f"no backward pass of {pattern!r} in the run has sequence numbers")
    nodes = graph.nodes
    at = blocks["node"].to_numpy()
    if (nodes.kind[at] == NodeKind.TRANSFER).any():
        raise Unanswerable(f"{pattern!r} communicates: whether that is repeated depends on the job")
    on_gpu = np.isin(nodes.kind[at], GPU_KINDS)
    rows = blocks.with_columns(
        on_gpu=pl.Series(on_gpu),
        works=pl.Series(on_gpu | np.isin(nodes.kind[at], CPU_KINDS)),
        ns=pl.Series(nodes.duration[at]),
        start=pl.Series(nodes.measured_start[at]),
    ).filter("works")
    forward = rows.filter(~pl.col("backward")).group_by("block", "on_gpu").agg(pl.col("ns").sum())
    begins = rows.filter("backward").sort("start", "node").unique(["block", "on_gpu"], keep="first")
    longer = begins.drop("ns").join(forward, on=["block", "on_gpu"])
    duration = nodes.duration.copy()
    np.add.at(duration, longer["node"].to_numpy(), longer["ns"].to_numpy())
    return graph.with_durations(duration)


def _lasting(nodes: Nodes) -> list[Ints | Bools]:
    """All columns of the nodes but their durations."""
    return [column for column in nodes.columns if column is not nodes.duration]


def _numbered_with_copies(graph: Graph, unmet: Bools, times: int) -> Graph:
    """As `with_copies`, with numbers for durations and lags: the graph's own, and behind them the copies'.

    Edges that are in neither have -1.
    """
    size, num_edges = graph.num_nodes, graph.edges.lag.size
    graph = graph.with_durations(np.arange(size)).with_lags(np.arange(num_edges))
    copied = graph.with_durations(size + np.arange(size)).with_lags(num_edges + np.arange(num_edges))
    copied = copied.without_edges(unmet)
    step = _steps(graph)
    picked = np.flatnonzero(step >= 0)
    position = np.full(graph.num_nodes, -1)
    position[picked] = np.arange(picked.size)
    first = graph.num_nodes + picked.size * np.arange(times)  # number of each copy's first node
    edges = [graph.edges, _into(copied, step, position + first[0])]
    edges += [_within(copied, step, position + shift) for shift in first]
    edges += _behind(graph, step, position, first)
    joined = Edges(
        **{f.name: np.concatenate([getattr(e, f.name) for e in edges]) for f in dataclasses.fields(Edges)}
    )
    return make_graph(_nodes(copied, graph, picked, times), joined, graph.names, graph.lanes, graph.origin_ns)


def _steps(graph: Graph) -> Ints:
    """[N] the step that each node is copied with; none depends on a later one.

    What something of an earlier step needs belongs to that. This is a longest path over the graph read
    backwards, of what is left until the last step.
    """
    nodes, edges = graph.nodes, graph.edges
    last = int(nodes.step.max(initial=0)) + 1
    known = nodes.kind != NodeKind.RENDEZVOUS
    left = np.where(nodes.step == AFTER_STEPS, 0, np.where(known, last - nodes.step, 0))
    order = np.argsort(-edges.source, kind="stable")
    target = graph.num_nodes - 1 - edges.source[order]
    indptr = np.searchsorted(target, np.arange(graph.num_nodes + 1)).astype(np.int64)
    none = np.zeros(graph.num_nodes, np.int64)
    back, _, _ = longest_path(
        none, left[::-1].copy(), indptr, graph.num_nodes - 1 - edges.target[order], np.zeros_like(order)
    )
    step: Ints = last - back[::-1]
    return np.where(step == last, AFTER_STEPS, step)


def _nodes(copied: Graph, graph: Graph, picked: Ints, times: int) -> Nodes:
    """The nodes of the graph, then those of the copies, whose collectives are others."""
    columns = {}
    for f in dataclasses.fields(Nodes):
        own, new = getattr(graph.nodes, f.name), np.tile(getattr(copied.nodes, f.name)[picked], times)
        columns[f.name] = np.append(own, np.zeros_like(new) if f.name in ("earliest", "anchored") else new)
    instances = int(graph.nodes.collective.max(initial=-1)) + 1
    copy = np.append(np.zeros(graph.num_nodes, np.int64), np.repeat(np.arange(times) + 1, picked.size))
    columns["collective"] = np.where(
        columns["collective"] >= 0, columns["collective"] + copy * instances, columns["collective"]
    )
    return Nodes(**columns)


def _chosen(edges: Edges, mask: NDArray[np.bool_], source: Ints, target: Ints) -> Edges:
    """The masked edges between other nodes."""
    kept = Edges(**{f.name: getattr(edges, f.name)[mask] for f in dataclasses.fields(Edges)})
    return dataclasses.replace(kept, source=source, target=target)


def _within(graph: Graph, step: Ints, number: Ints) -> Edges:
    """Edges within steps, between the nodes of a copy."""
    edges, window = graph.edges, graph.nodes.window
    source, target = edges.source, edges.target
    mask = (step[source] == step[target]) & (step[source] >= 0) & (window[source] == window[target])
    return _chosen(edges, mask, number[source[mask]], number[target[mask]])


def _into(graph: Graph, step: Ints, number: Ints) -> Edges:
    """Edges into a step from before it, to its first copy."""
    edges = graph.edges
    mask = (step[edges.target] >= 0) & (step[edges.source] < step[edges.target])
    return _chosen(edges, mask, edges.source[mask], number[edges.target[mask]])


def _behind(graph: Graph, step: Ints, position: Ints, first: Ints) -> list[Edges]:
    """On every lane the first node of a copy, and of the step itself, after the last of the copy before."""
    nodes = graph.nodes
    on_lane = np.flatnonzero((step >= 0) & (nodes.lane >= 0))
    order = on_lane[np.lexsort((on_lane, step[on_lane], nodes.lane[on_lane], nodes.window[on_lane]))]
    columns = (step[order], nodes.lane[order], nodes.window[order])
    opens = np.append(True, np.any([np.diff(column) != 0 for column in columns], axis=0))[: order.size]
    begin, end = order[opens], order[np.append(opens[1:], True)[: order.size]]
    kind = np.where(np.isin(nodes.kind[begin], CPU_KINDS), EdgeKind.THREAD, EdgeKind.STREAM)
    size = begin.size
    none, sure = np.full(size, -1), np.zeros(size, np.bool_)
    found = []
    for copy, shift in enumerate(first):
        after = position[begin] + first[copy + 1] if copy + 1 < first.size else begin
        found.append(Edges(position[end] + shift, after, none, kind.astype(np.int64), sure))
    return found
