"""What a chunk of work or of a collective takes: a share of the whole, and what each chunk costs besides.

In: a graph, segments, a number of chunks. Out: `Costs` as expected, and at both ends of what the run leaves
open. A collective's chunk costs what the run's own curve says of that many bytes. A matmul's chunk is as
efficient as `devices.estimate` says where shapes and GPU are known; else each kernel keeps the few
microseconds that any kernel takes. Kernels beside a collective are slowed down as the run shows it, or else
as others have measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats
from dpro.errors import Unanswerable
from dpro.replay.devices.estimate import estimate
from dpro.replay.devices.kernels import SHORT_US
from dpro.replay.devices.operations import matmuls
from dpro.replay.fidelity.overlap import overlap_of
from dpro.replay.graph import CPU_KINDS, EdgeKind, Graph, NodeKind, once
from dpro.replay.models.gpus import GPUS, common_model
from dpro.replay.models.link_costs import fit_costs, why_no_cost
from dpro.replay.models.roofline import BYTES, product_of, stored_as
from dpro.replay.whatif.graph_ops.spans.scope import matmuls_of_kernels
from dpro.units import NS_PER_US

# Of kernels beside communication: the mean, and the most (Lee et al., arXiv 2507.03114, 2025).
SLOWDOWN, LARGEST_SLOWDOWN = 1.19, 1.40


@dataclass(frozen=True)
class Costs:
    """What chunks take.

    Attributes:
        chunks: how many there are.
        slowdown: of work beside communication.
        work: [N] of a node's time, what a chunk of it takes.
        transfer_ns: [N] ns of a chunk of each transfer.
        launch_ns: of a thread for each kernel and collective more.
    """

    chunks: int
    slowdown: float
    work: Floats
    transfer_ns: Floats
    launch_ns: float

    def work_ns(self, nodes: Floats, duration: Floats, beside_ns: float) -> Floats:
        """ns of a chunk of each node.

        Args:
            nodes: [K] numbers.
            duration: [K] ns of each now.
        """
        alone = self.work[nodes] * duration
        share = min(beside_ns / max(float(alone.sum()), 1.0), 1.0)
        return np.asarray(alone * (1 + (self.slowdown - 1) * share), np.float64)


def costs_of(graph: Graph, work: Bools, transfers: Bools, chunks: int) -> tuple[Costs, Costs, Costs]:
    """What chunks take: as expected, at best and at worst.

    Args:
        work: [N] what is cut.
        transfers: [N] what is cut.

    Raises:
        Unanswerable: the run does not show what the collectives cost.
    """
    on_gpu = bool((graph.nodes.kind[work] == NodeKind.KERNEL).any())
    shares, fixed = _work(graph, work, chunks), 0.0
    usual, unseen = _transfers(graph, transfers, chunks)
    launch = _launch_ns(graph) if on_gpu else fixed
    expected, best, worst = _slowdowns(graph, on_gpu)
    return (
        Costs(chunks, expected, shares, usual, launch),
        Costs(chunks, best, np.full(graph.num_nodes, 1 / chunks), usual, launch),
        Costs(chunks, worst, shares, unseen, launch),
    )


def _slowdowns(graph: Graph, on_gpu: bool) -> tuple[float, float, float]:
    """Of work beside communication: as expected, at least, at most."""
    seen = once(graph, "overlap", (*graph.nodes.columns, graph.edges.lag), lambda: _overlap(graph))
    if seen is not None:
        return seen
    return (SLOWDOWN, 1.0, LARGEST_SLOWDOWN) if on_gpu else (1.0, 1.0, SLOWDOWN)


def _overlap(graph: Graph) -> tuple[float, float, float] | None:
    contention = overlap_of(graph)
    return None if contention is None else (contention.factor, contention.low, contention.high)


def _transfers(graph: Graph, transfers: Bools, chunks: int) -> tuple[Floats, Floats]:
    """[N] ns of a chunk of each transfer: by the run's curves, and with the largest latency there can be."""
    nodes, lines = graph.nodes, fit_costs(graph)
    moves = (nodes.kind == NodeKind.TRANSFER) & (nodes.duration > 0)
    shortest = float(nodes.duration[moves].min(initial=0)) if moves.any() else 0.0
    usual, unseen = np.zeros(graph.num_nodes), np.zeros(graph.num_nodes)
    for message in np.unique(nodes.message[transfers]).tolist():
        kind = graph.messages[message].op, graph.messages[message].group
        mine = np.flatnonzero(transfers & (nodes.message == message))
        if kind not in lines or (nodes.bytes[mine] <= 0).any():
            raise Unanswerable(why_no_cost(graph, kind))
        line, took, size = lines[kind], nodes.duration[mine].astype(np.float64), nodes.bytes[mine]
        part = took * line.time_ns(size / chunks) / np.maximum(line.time_ns(size), 1e-9)
        usual[mine] = np.clip(part, took / chunks, took)
        latency = np.minimum(shortest if line.bandwidth_only else 0.0, took)
        unseen[mine] = np.maximum(usual[mine], latency + (took - latency) / chunks)
    return usual, unseen


def _work(graph: Graph, work: Bools, chunks: int) -> Floats:
    """[N] what a chunk of each node is of its time."""
    share = np.full(graph.num_nodes, 1 / chunks)
    at = np.flatnonzero(work & (graph.nodes.kind == NodeKind.KERNEL))
    took = np.maximum(graph.nodes.duration[at].astype(np.float64), 1.0)
    fixed = np.minimum(SHORT_US * NS_PER_US / took, 1.0)
    share[at] = fixed + (1 - fixed) / chunks
    for node, part in _by_shapes(graph, work, chunks).iter_rows():
        share[node] = min(max(part, 1 / chunks), 1.0)
    return share


def _by_shapes(graph: Graph, work: Bools, chunks: int) -> pl.DataFrame:
    """`node`, `part`: what a matmul of fewer rows takes of the whole, where shapes are known."""
    nothing = pl.DataFrame(schema={"node": pl.Int64, "part": pl.Float64})
    device = common_model(graph.run.manifest.gpus) if graph.run is not None else ""
    kernels = work & (graph.nodes.kind == NodeKind.KERNEL)
    if not device or not kernels.any():
        return nothing
    parts = []
    for node, name, shapes in matmuls_of_kernels(graph, kernels).select("node", "name", "shapes").iter_rows():
        size, dtype = product_of(name, shapes), stored_as(graph.names[graph.nodes.name[node]])
        if size is not None and dtype in BYTES and dtype in GPUS[device].tflops:
            parts.append((node, dtype, *size))
    rows = pl.DataFrame(parts, ["node", "dtype", "batch", "m", "n", "k"], orient="row") if parts else nothing
    found = [nothing]
    for (stored,), same in rows.partition_by("dtype", as_dict=True).items() if parts else ():
        whole, cut = (
            estimate(matmuls(str(stored), same["m"] / by, same["n"], same["k"], same["batch"]), device)
            for by in (1, chunks)
        )
        ratio = same.select("node", part=cut["us"] / whole["us"]).drop_nulls()
        found.append(ratio.cast({"node": pl.Int64, "part": pl.Float64}))
    return pl.concat(found)


def _launch_ns(graph: Graph) -> float:
    """What a thread usually takes from one launch to the next: the median."""
    nodes, edges = graph.nodes, graph.edges
    calls = np.unique(edges.source[edges.kind == EdgeKind.LAUNCH])
    calls = calls[np.isin(nodes.kind[calls], CPU_KINDS)]
    order = calls[np.lexsort((nodes.measured_end[calls], nodes.window[calls], nodes.lane[calls]))]
    apart = np.diff(nodes.measured_end[order])
    same = (np.diff(nodes.lane[order]) == 0) & (np.diff(nodes.window[order]) == 0)
    return float(np.median(apart[same])) if same.any() else 0.0
