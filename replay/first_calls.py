"""Calls that take far longer than such calls do, since they are the first of a process: cold ones.

In: a `Graph`. Out: which of its nodes are such calls, and how long these take without that. A launch loads
its kernel's code when that is first launched; a library is loaded, code compiled. Later steps do none of it:
the job as it runs is without it. What a first call allocates or copies is like that of others: it stays.
"""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind, is_of, once

PROMPT = r"^(cuda|cu|hip)[A-Z]"  # calls that, once they have loaded what they need, take microseconds
LONGER = r"Malloc|Free|Alloc|Synchronize|Memcpy|Memset|Query|Graph"  # but these
COMPILING = r"\(dynamo_timed\)$|^compile_inner\b|^(cu|hip)(Module|Library)Load|^nvrtcCompile"
COLD_NS = 200_000  # what takes less is not worth a name
TIMES = 50.0  # times what such calls usually take
PROMPTLY_NS = 10_000  # what one usually takes of which there are few
FEW = 4  # calls of a name, from which on it is known how long one usually takes
IDLE = 0.5  # of a call's time that its device waits for it: else other work hides what it takes


def with_warm_calls(graph: Graph) -> Graph:
    """The graph in which first calls take no longer than such calls usually do."""
    usual_ns, duration = usual_of_first(graph), graph.nodes.duration
    cold = (usual_ns >= 0) & (usual_ns < duration)
    return graph.with_durations(np.where(cold, usual_ns, duration)) if cold.any() else graph


def usual_of_first(graph: Graph) -> Ints:
    """[N] ns that first calls take once they are none, -1 of other nodes."""
    nodes, edges = graph.nodes, graph.edges
    columns = (nodes.kind, nodes.name, nodes.around, nodes.step, nodes.measured_start, edges.kind)
    return once(graph, "usual of first calls", columns, lambda: _usual_of_first(graph))


def first_calls(graph: Graph) -> pl.DataFrame:
    """What first calls take longer than such calls usually do, in steps.

    Returns:
        `rank`, `window`, `step`, `name`, `took_ns` (all of it) and `cold_ns`.
    """
    nodes, usual_ns = graph.nodes, usual_of_first(graph)
    cold = np.flatnonzero((usual_ns >= 0) & (nodes.step >= 0))
    took_ns = nodes.measured_end[cold] - nodes.measured_start[cold]
    return pl.DataFrame(
        {
            **{name: getattr(nodes, name)[cold] for name in ("rank", "window", "step")},
            "name": pl.Series(graph.names, dtype=pl.String).gather(nodes.name[cold]),
            "took_ns": took_ns,
            "cold_ns": np.maximum(took_ns - usual_ns[cold], 0),
        }
    )


def _usual_of_first(graph: Graph) -> Ints:
    nodes = graph.nodes
    usual_ns = np.full(graph.num_nodes, -1, np.int64)
    took_ns = nodes.measured_end - nodes.measured_start
    names = pl.Series(graph.names, dtype=pl.String).str
    is_prompt = (names.contains(PROMPT) & ~names.contains(LONGER)).to_numpy()
    calls = np.flatnonzero((nodes.kind == NodeKind.RUNTIME) & is_prompt[nodes.name])
    for name in np.unique(nodes.name[calls[took_ns[calls] >= COLD_NS]]):
        named = calls[nodes.name[calls] == name]
        typical = float(np.median(took_ns[named])) if named.size >= FEW else PROMPTLY_NS
        slow = named[took_ns[named] >= max(COLD_NS, TIMES * typical)]
        usual_ns[slow[_may_be_first(graph, slow, took_ns)]] = round(typical)
    usual_ns[_compiles(graph)] = 0
    return usual_ns


def _may_be_first(graph: Graph, calls: Ints, took_ns: Ints) -> Bools:
    """Which of some calls launch nothing, or a kernel for the first time, for which its device waits.

    A launch that waits for room in a full queue, and a host without a core, take as long.
    """
    nodes, edges = graph.nodes, graph.edges
    launches = (edges.kind == EdgeKind.LAUNCH) & np.isin(edges.source, calls)
    call, kernel = edges.source[launches], edges.target[launches]
    work = pl.DataFrame(
        {name: getattr(nodes, name) for name in ("rank", "name", "measured_start")}
    ).with_columns(node=pl.int_range(pl.len()), end=pl.Series(nodes.measured_end))
    work = work.filter(pl.Series(is_of(nodes.kind, GPU_KINDS))).sort(
        "measured_start", "end", maintain_order=True
    )
    placed = work.with_columns(
        idle_ns=(pl.col("measured_start") - pl.col("end").cum_max().shift(1)).over("rank"),
        is_first=pl.int_range(pl.len()).over("rank", "name") == 0,
    ).filter(pl.col("node").is_in(kernel))
    seen = pl.DataFrame({"node": kernel}).join(placed, on="node", how="left", maintain_order="left")
    idle_ns = seen["idle_ns"].fill_null(np.iinfo(np.int64).max).to_numpy()
    loads = seen["is_first"].fill_null(False).to_numpy() & (idle_ns >= IDLE * took_ns[call])
    return ~np.isin(calls, call[~loads])


def _compiles(graph: Graph) -> Bools:
    """[N] CPU work of the first step of a window that compiles or loads code."""
    nodes = graph.nodes
    compiling = np.array([bool(re.search(COMPILING, name)) for name in (*graph.names, "")])
    compiles: Bools = is_of(nodes.kind, CPU_KINDS) & (compiling[nodes.name] | compiling[nodes.around])
    if not compiles.any():
        return compiles
    steps = pl.DataFrame({"rank": nodes.rank, "step": nodes.step})
    first = pl.col("step").filter(pl.col("step") >= 0).min().over("rank")
    compiles &= steps.select((pl.col("step") <= first).fill_null(False)).to_series().to_numpy()
    return compiles
