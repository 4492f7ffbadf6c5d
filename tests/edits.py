"""What edits make of graphs, for the tests of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpro.replay.graph import Graph
from dpro.replay.timeline import replay, step_times
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.replay.whatif.registry import parse_edit
from tests.builders import US


def changed(graph: Graph, *edits: str) -> Graph:
    """The graph with edits applied, one after the other."""
    for edit in edits:
        graph = with_shared_links(graph, parse_edit(edit).apply(graph))
    return graph


def steps_us(graph: Graph, *edits: str) -> NDArray[np.float64]:
    """How long each step takes with edits, us."""
    timeline = replay(changed(graph, *edits))
    lasted = step_times(timeline.graph, timeline.start, timeline.end)["duration_ns"].to_numpy()
    return lasted / US


def step_us(graph: Graph, *edits: str) -> float:
    """How long the second step takes with edits, us: the first one that follows another."""
    return float(steps_us(graph, *edits)[1])
