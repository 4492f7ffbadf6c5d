"""Cold calls: the first calls of a process, which take far longer than later ones.

Takes a `Graph`; returns which of its nodes are cold, and their usual duration. The first launch of a kernel
loads its code; the first use of a library or compiler loads or compiles code. Later steps do none of this, so
the usual step of a job is without it. Allocations and copies of first calls are like others, and stay, except
calls that set up the device. Also returns how long calls overlap with the work that they launched.
"""

from __future__ import annotations

import re

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind, computed_once, is_one_of, once

PROMPT = r"^(cuda|cu|hip)[A-Z]"  # calls that take microseconds once their code is loaded,
LONGER = r"Malloc|Free|Alloc|Synchronize|Memcpy|Memset|Query|Graph"  # except these
COMPILING = r"\(dynamo_timed\)$|^compile_inner\b|^(cu|hip)(Module|Library)Load|^nvrtcCompile"
SETTING_UP = r"^(cuda|hip)Free$"  # sets up a device that no call has used yet, and loads its libraries
SET_UP_NS = 50_000_000  # a free that takes as long, and waits for no work, does that
COLD_NS = 200_000  # shorter calls are not worth naming
MIN_RATIO = 50.0  # a cold call takes at least this multiple of the usual duration
PROMPTLY_NS = 10_000  # assumed usual duration of calls with fewer than `FEW` samples
FEW = 4  # calls of one name from which their median is trusted
IDLE = 0.5  # share of a call during which its device idles: below, other work hides the call


def with_warm_calls(graph: Graph) -> Graph:
    """Return the graph with first calls as long as such calls usually are."""
    usual_ns, duration = usual_of_first(graph), graph.nodes.duration
    cold = (usual_ns >= 0) & (usual_ns < duration)
    return graph.with_durations(np.where(cold, usual_ns, duration)) if cold.any() else graph


@computed_once
def usual_of_first(graph: Graph) -> Ints:
    """Return [N] the usual duration of each first call, in ns; -1 for other nodes."""
    nodes = graph.nodes
    usual_ns = np.full(graph.num_nodes, -1, np.int64)
    took_ns = nodes.measured_end - nodes.measured_start
    names = pl.Series(graph.names, dtype=pl.String).str
    is_prompt = (names.contains(PROMPT) & ~names.contains(LONGER)).to_numpy()
    calls = np.flatnonzero((nodes.kind == NodeKind.RUNTIME) & is_prompt[nodes.name])
    for name in np.unique(nodes.name[calls[took_ns[calls] >= COLD_NS]]):
        named = calls[nodes.name[calls] == name]
        typical = float(np.median(took_ns[named])) if named.size >= FEW else PROMPTLY_NS
        slow = named[took_ns[named] >= max(COLD_NS, MIN_RATIO * typical)]
        usual_ns[slow[_may_be_first(graph, slow, took_ns)]] = round(typical)
    usual_ns[_set_up(graph)] = PROMPTLY_NS
    usual_ns[_compiles(graph)] = 0
    return usual_ns


def first_calls(graph: Graph) -> pl.DataFrame:
    """Return the excess duration of the first calls in steps.

    Returns:
        `rank`, `window`, `step`, `name`, `took_ns` (whole duration) and `cold_ns` (excess over the usual).
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


def _set_up(graph: Graph) -> Ints:
    """Return the calls that set up a device: frees that take long while none of its work runs."""
    nodes = graph.nodes
    frees = np.array([bool(re.search(SETTING_UP, name)) for name in (*graph.names, "")])[nodes.name]
    starts, ends = nodes.measured_start, nodes.measured_end
    calls = np.flatnonzero((nodes.kind == NodeKind.RUNTIME) & frees & (ends - starts >= SET_UP_NS))
    works = is_one_of(nodes.kind, GPU_KINDS)
    beside_ns = [
        np.clip(np.minimum(ends[work], ends[call]) - np.maximum(starts[work], starts[call]), 0, None).sum()
        for call in calls
        for work in [works & (nodes.rank == nodes.rank[call])]
    ]
    return calls[np.array(beside_ns, np.int64) < (1 - IDLE) * (ends - starts)[calls]]


def _may_be_first(graph: Graph, calls: Ints, took_ns: Ints) -> Bools:
    """Return a mask of calls that launch nothing, or a kernel for the first time while its device idles.

    A warm launch takes as long if it waits for room in a full queue, for its kernel to end (as with
    CUDA_LAUNCH_BLOCKING), or on a host short of CPU cores.
    """
    nodes, edges = graph.nodes, graph.edges
    launches = (edges.kind == EdgeKind.LAUNCH) & np.isin(edges.source, calls)
    call, kernel = edges.source[launches], edges.target[launches]
    work = pl.DataFrame(
        {name: getattr(nodes, name) for name in ("rank", "name", "measured_start")}
    ).with_columns(node=pl.int_range(pl.len()), end=pl.Series(nodes.measured_end))
    work = work.filter(pl.Series(is_one_of(nodes.kind, GPU_KINDS))).sort(
        "measured_start", "end", maintain_order=True
    )
    placed = work.with_columns(
        idle_ns=(pl.col("measured_start") - pl.col("end").cum_max().shift(1)).over("rank"),
        is_first=pl.int_range(pl.len()).over("rank", "name") == 0,
    ).filter(pl.col("node").is_in(kernel))
    seen = pl.DataFrame({"node": kernel}).join(placed, on="node", how="left", maintain_order="left")
    idle_ns = seen["idle_ns"].fill_null(np.iinfo(np.int64).max).to_numpy()
    loads = seen["is_first"].fill_null(False).to_numpy() & (idle_ns >= IDLE * took_ns[call])
    waits = beside_launched_ns(graph, NodeKind.KERNEL)[calls] > IDLE * took_ns[calls]
    return ~np.isin(calls, call[~loads]) & ~waits


def beside_launched_ns(graph: Graph, kind: NodeKind) -> Ints:
    """Return [N] ns that calls of the runtime overlap with the work of a kind that they launched."""
    return once(graph, ("beside launched", kind), lambda graph: _beside_launched_ns(graph, kind))


def _beside_launched_ns(graph: Graph, kind: NodeKind) -> Ints:
    nodes, edges = graph.nodes, graph.edges
    made = (edges.kind == EdgeKind.LAUNCH) & (nodes.kind == kind)[edges.target]
    place = ("rank", "window", "span")
    rows = {name: getattr(nodes, name) for name in (*place, "measured_start", "measured_end")}
    frame = pl.DataFrame(rows).with_columns(node=pl.int_range(pl.len()))
    times = frame[edges.target[made]].select(begun="measured_start", ended="measured_end")
    calls = pl.concat([frame[edges.source[made]].select(place), times], how="horizontal")
    # A call has several pieces where it released its work before it returned.
    pieces = frame.filter(pl.Series(nodes.kind == NodeKind.RUNTIME))
    pieces = pieces.join(calls.filter(pl.col("span") >= 0), on=place)
    both = pl.min_horizontal("measured_end", "ended") - pl.max_horizontal("measured_start", "begun")
    beside = pieces.group_by("node").agg(both.max().clip(lower_bound=0))
    beside_ns = np.zeros(graph.num_nodes, np.int64)
    beside_ns[beside["node"].to_numpy()] = beside.to_series(1).to_numpy()
    return beside_ns


def _compiles(graph: Graph) -> Bools:
    """Return [N] mask of CPU work that compiles or loads code in the first step of a window."""
    nodes = graph.nodes
    compiling = np.array([bool(re.search(COMPILING, name)) for name in (*graph.names, "")])
    compiles: Bools = is_one_of(nodes.kind, CPU_KINDS) & (compiling[nodes.name] | compiling[nodes.around])
    if not compiles.any():
        return compiles
    steps = pl.DataFrame({"rank": nodes.rank, "step": nodes.step})
    first = pl.col("step").filter(pl.col("step") >= 0).min().over("rank")
    compiles &= steps.select((pl.col("step") <= first).fill_null(False)).to_series().to_numpy()
    return compiles
