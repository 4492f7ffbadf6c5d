"""Scenarios in which some ranks are changed: the condensed graph of each, without condensing again.

In: a graph, and other durations of its nodes. Out: two condensed graphs of one shape, one with all ranks
unchanged and one with all ranks changed; and from these two, graphs with some ranks changed. An edge is left
out only where neither of the two needs it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import numpy as np

from dpro.arrays import Ints
from dpro.replay.condense.joined import joined_graph
from dpro.replay.condense.parts import cut_by_rank
from dpro.replay.condense.skeletons import skeletons_of
from dpro.replay.graph import Graph


def condense_both(graph: Graph, changed: Ints) -> tuple[Graph, Graph]:
    """The condensed graph, and the same with all ranks changed.

    Args:
        changed: [N] ns, durations of its nodes where their rank is changed.
    """
    cut = cut_by_rank(graph)
    skeletons = skeletons_of(graph, cut, duration=np.stack([graph.nodes.duration, changed], axis=1))
    (one, _), (other, _) = (joined_graph(graph, cut, skeletons, scenario) for scenario in (0, 1))
    return one, other


def with_ranks_of(one: Graph, other: Graph, ranks: Collection[int]) -> Graph:
    """The first graph, with some ranks taken from the second.

    Args:
        one, other: as from `condense_both`.
        ranks: the ranks to take from `other`.
    """
    mine = np.isin(one.nodes.rank, list(ranks))
    nodes = dataclasses.replace(
        one.nodes,
        duration=np.where(mine, other.nodes.duration, one.nodes.duration),
        earliest=np.where(mine, other.nodes.earliest, one.nodes.earliest),
    )
    lag = np.where(mine[one.edges.target], other.edges.lag, one.edges.lag)
    return dataclasses.replace(one, nodes=nodes).with_lags(lag)
