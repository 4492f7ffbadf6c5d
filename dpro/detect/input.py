"""A training loop that waits for its input on every rank.

In: a graph. Out: at most one finding. One rank whose input is slow is a straggler; here nobody is slower
than the rest, and the step would still be shorter if its input were ready.
"""

from __future__ import annotations

import numpy as np

from dpro.detect.findings import Finding
from dpro.detect.straggler import INPUT_PIPELINE
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.scale import DATA_LOADING, HideInput
from dpro.replay.whatif.select import Selection
from dpro.units import format_duration

LEAST_SHARE = 0.10  # of the step: less is what handing over a batch costs


def find_slow_input(graph: Graph, excess_of_stragglers_ns: float = 0.0) -> list[Finding]:
    """Say so if the step would be much shorter with its input always ready.

    Args:
        graph: the graph.
        excess_of_stragglers_ns: what healing single ranks would save already; only the rest counts here.
    """
    try:
        changed = HideInput().apply(graph)
    except Unanswerable:
        return []
    before, after = replay(graph), replay(changed)
    base = step_times(graph, before.start, before.end)["duration_ns"].to_numpy()
    hidden = step_times(changed, after.start, after.end)["duration_ns"].to_numpy()
    if base.size == 0:
        return []
    cost = float((base - hidden).mean()) - excess_of_stragglers_ns
    share = cost / float(base.mean())
    if share < LEAST_SHARE:
        return []
    loading = Selection(within=DATA_LOADING).mask(graph) & (graph.nodes.step >= 0)
    ranks = sorted({int(rank) for rank in graph.nodes.rank[loading]})
    per_step = graph.nodes.duration[loading].sum() / max(len(ranks) * base.size, 1)
    steady = float(((base - hidden) >= LEAST_SHARE / 2 * base).mean())
    evidence = (
        f"each rank spends {format_duration(float(per_step))} per step inside the DataLoader's __next__, "
        "on the thread that drives the training loop",
        f"replayed with the input always ready, the step takes {format_duration(float(hidden.mean()))} "
        f"instead of {format_duration(float(np.mean(base)))}",
    )
    return [
        Finding(
            "slow.host",
            "job",
            INPUT_PIPELINE,
            tuple(ranks),
            round(share, 4),
            round(steady, 3),
            cost,
            evidence,
        )
    ]
