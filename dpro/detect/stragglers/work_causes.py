"""What a rank's time is attributed to: the input pipeline, operators, kernels, launches, other host code.

In: a graph. Out: the cause of each node, and how much longer a rank works than its peers by cause.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.whatif.edits.training_loop import DATA_LOADING
from dpro.replay.whatif.graph_ops.selected import Selection

INPUT_PIPELINE = "the input pipeline"
OPERATORS = "operators"  # of a host that has no GPU


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
    cause[Selection(within=DATA_LOADING).mask(graph)] = INPUT_PIPELINE
    cause[gpu] = "kernels"
    class_[gpu] = "slow.compute"
    if not computes_on_gpu:
        class_[cause == OPERATORS] = "slow.compute"
    return cause, class_
