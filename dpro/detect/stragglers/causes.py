"""Why a rank takes longer: by the host's counters, and by the work that a graph shows.

In: how much more of each counter a rank has than its peers; or a graph. Out: the cause that explains it, if
one does: waiting for data, garbage collection, no free core; operators, kernels, launches, other host code.
Which counters exist is declared by `dpro.collectors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.whatif.edits.training_loop import DATA_LOADING
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.units import format_duration

CPU = "step_training_thread_cpu_ns"
EXPLAINED = 0.4  # share of the excess that a counter must show to be its cause
INPUT_PIPELINE = "the input pipeline"
OPERATORS = "operators"  # of a host that has no GPU


class HostCause(NamedTuple):
    """Why a host takes longer.

    Attributes:
        cause: in a word.
        evidence: a line.
    """

    cause: str
    evidence: str


HOST_CAUSES = {
    "step_data_wait_ns": (INPUT_PIPELINE, "waits for its data"),
    "step_run_queue_ns": ("CPU contention", "is ready to run and has no core"),
    "step_gc_ns": ("garbage collection", "collects garbage"),
}


def host_cause(more: Mapping[str, float], longer_ns: float) -> HostCause | None:
    """The counter that explains the most, if it explains enough.

    Args:
        more: ns per step that the rank has more than its peers, by counter.
        longer_ns: by how much it takes longer per step.
    """
    known = {name: value for name, value in more.items() if name in HOST_CAUSES}
    largest = max(known, key=lambda name: known[name], default="")
    if not largest or known[largest] < EXPLAINED * longer_ns:
        return None
    cause, does = HOST_CAUSES[largest]
    return HostCause(cause, f"it {does} {format_duration(known[largest])} longer per step than they")


def idle_cause(more: Mapping[str, float], longer_ns: float) -> HostCause | None:
    """That a host waits, where its training thread was not computing; None where it was, or that is unknown.

    Args:
        more: as of `host_cause`, which must have found none.
        longer_ns: by how much it takes longer per step.
    """
    if CPU not in more or more[CPU] >= EXPLAINED * longer_ns:
        return None
    return HostCause(
        "host code that waits",
        "it neither computes in that time, nor waits for its data, a core or garbage: something in the "
        "host's code sleeps or waits (a lock, a disk, the network)",
    )


def counted_more(rows: pl.DataFrame, rank: int) -> dict[str, float]:
    """How much more of each counter a rank has per step than its peers, ns.

    Args:
        rows: `rank`, `counter`, `value` per step, of the rank and its peers.
        rank: which.
    """
    per_rank = rows.group_by("counter", "rank").agg(pl.col("value").median())
    mine = pl.col("rank") == rank
    both = per_rank.group_by("counter").agg(
        own=pl.col("value").filter(mine).first(), theirs=pl.col("value").filter(~mine).median()
    )
    more = both.drop_nulls("own").select("counter", pl.col("own") - pl.col("theirs").fill_null(0.0))
    return dict(more.iter_rows())


def excess_by_cause(graph: Graph, rank: int, peers: list[int], since: int) -> pl.DataFrame:
    """Where a rank's extra work is, against the median of its peers, from a step on.

    Args:
        graph: the graph.
        rank: which rank.
        peers: ranks to compare it with.
        since: the first step that counts.

    Returns:
        `cause`, `class`, `excess_ns` per step, `example` (the name that contributes most), largest first.
    """
    nodes = graph.nodes
    cause, class_ = causes_of(graph)
    counted = (nodes.step >= since) & (cause != "")
    names = np.array(graph.names, dtype=object)
    label = np.where(nodes.around >= 0, names[np.maximum(nodes.around, 0)], names[nodes.name])
    label = np.where(nodes.kind == NodeKind.HOST, label, names[nodes.name])
    frame = pl.DataFrame(
        {
            "rank": nodes.rank[counted],
            "step": nodes.step[counted],
            "cause": cause[counted].tolist(),
            "class": class_[counted].tolist(),
            "label": label[counted].tolist(),
            "work": nodes.duration[counted],
        }
    )
    keys = ["cause", "class", "label"]
    steps = frame.group_by("rank").agg(steps=pl.col("step").n_unique())
    per_step = (
        frame.group_by("rank", *keys)
        .agg(pl.col("work").sum())
        .join(steps, on="rank")
        .with_columns(work=pl.col("work") / pl.col("steps"))
    )
    others = per_step.filter(pl.col("rank").is_in(peers)).group_by(keys).agg(peer=pl.col("work").median())
    own = per_step.filter(pl.col("rank") == rank).join(others, on=keys, how="left")
    excess = own.with_columns(excess_ns=pl.col("work") - pl.col("peer").fill_null(0)).sort(
        ["excess_ns", "label"], descending=[True, False]
    )
    return (
        excess.group_by("cause", "class", maintain_order=True)
        .agg(pl.col("excess_ns").sum(), example=pl.col("label").first())
        .sort(["excess_ns", "cause"], descending=[True, False])
    )


def causes_of(graph: Graph) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """[N] what each node's time is attributed to, and the class that makes; empty for waits and transfers."""
    nodes = graph.nodes
    gpu = np.isin(nodes.kind, GPU_KINDS)
    computes_on_gpu = bool(gpu.any())
    cause = np.full(graph.num_nodes, "", dtype=object)
    class_ = np.full(graph.num_nodes, "slow.host", dtype=object)
    cause[nodes.kind == NodeKind.CPU] = "the host's operators" if computes_on_gpu else OPERATORS
    cause[nodes.kind == NodeKind.RUNTIME] = "GPU runtime calls"
    cause[np.isin(nodes.kind, (NodeKind.HOST, NodeKind.GAP))] = "host code outside any operator"
    cause[nodes.kind == NodeKind.DELAY] = "late launches"
    cause[NodeSelection(within=DATA_LOADING).mask(graph)] = INPUT_PIPELINE
    cause[gpu] = "kernels"
    class_[gpu] = "slow.compute"
    if not computes_on_gpu:
        class_[cause == OPERATORS] = "slow.compute"
    return cause, class_
