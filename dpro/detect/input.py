"""A training loop that waits for its input on every rank.

In: a graph. Out: at most one finding. One rank whose input is slow is a straggler; here nobody is slower
than the rest, and the step would still be shorter if its input were ready.
"""

from __future__ import annotations

import numpy as np

from dpro.detect.findings import Finding
from dpro.detect.straggler import FEWEST_STEPS, INPUT_PIPELINE, PERSISTENT
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.timeline import steps_before_and_after
from dpro.replay.whatif.input import DATA_LOADING, HideInput
from dpro.replay.whatif.select import Selection
from dpro.units import format_duration

LEAST_SHARE = 0.10  # of nearly every step: less is what handing over a batch costs


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
    base, hidden = steps_before_and_after(graph, changed)
    saved = base - hidden - excess_of_stragglers_ns
    steady = float((saved >= LEAST_SHARE * base).mean()) if base.size else 0.0
    if base.size < FEWEST_STEPS or steady < PERSISTENT:
        return []
    loading = _loading_per_step(graph, base.size)
    if min(loading.values()) < LEAST_SHARE * base.mean():
        return []  # the input of some ranks only is their fault
    cost = float(saved.mean())
    extremes = dict.fromkeys(format_duration(pick(loading.values())) for pick in (min, max))
    evidence = (
        f"each rank spends {' to '.join(extremes)} per step in the DataLoader's "
        "__next__, on the thread that drives the training loop",
        f"replayed with the input always ready, the step takes {format_duration(float(hidden.mean()))} "
        f"instead of {format_duration(float(base.mean()))}",
    )
    share = round(cost / float(base.mean()), 4)
    return [
        Finding("slow.host", "job", INPUT_PIPELINE, tuple(loading), share, round(steady, 3), cost, evidence)
    ]


def _loading_per_step(graph: Graph, num_steps: int) -> dict[int, float]:
    """Time each rank spends in its DataLoader per step, ns, by rank."""
    ranks = np.unique(graph.nodes.rank[graph.nodes.rank >= 0])
    loading = Selection(within=DATA_LOADING).mask(graph) & (graph.nodes.step >= 0)
    total = np.bincount(
        graph.nodes.rank[loading], graph.nodes.duration[loading], minlength=int(ranks.max()) + 1
    )
    return {int(rank): float(total[rank]) / num_steps for rank in ranks}
