"""One rank as it runs in the joined graph: its own nodes, replayed by themselves.

In: a rank's graph, and when the collectives that it shares with others could begin to move. Out: a replay of
the rank. Every start is that of the whole graph, to the nanosecond.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from dpro.arrays import Ints
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.sharded.share import Share
from dpro.replay.timeline import Timeline, replay


class Meetings(NamedTuple):
    """Rendezvous.

    Attributes:
        collective: [K] of which collectives, ascending.
        start: [K] ns, when they happen.
    """

    collective: Ints
    start: Ints


def meetings_of(timeline: Timeline) -> Meetings:
    """The rendezvous of a joined graph."""
    met = np.flatnonzero(timeline.graph.nodes.kind == NodeKind.RENDEZVOUS)
    collective = timeline.graph.nodes.collective[met]
    order = np.argsort(collective, kind="stable")
    return Meetings(collective[order], timeline.start[met][order])


def those_of(meetings: Meetings, instance: Ints) -> Meetings:
    """The rendezvous of some collectives.

    Args:
        meetings: as from `meetings_of`.
        instance: [K] the collectives; those that one rank ran alone have none.
    """
    at = np.searchsorted(meetings.collective, np.sort(instance))
    at = at[at < meetings.collective.size]
    own = at[np.isin(meetings.collective[at], instance)]
    return Meetings(meetings.collective[own], meetings.start[own])


def replay_inside(share: Share, graph: Graph, meetings: Meetings) -> Timeline:
    """Replay a rank by itself.

    Args:
        graph: its graph, as from `dpro.replay.sharded.skeleton.finished`.
        meetings: rendezvous of all its collectives, as from `those_of`.

    Returns:
        Of its graph, in which transfers do not begin before their rendezvous.
    """
    met = np.flatnonzero(np.isin(share.instance, meetings.collective))
    begins = meetings.start[np.searchsorted(meetings.collective, share.instance[met])]
    earliest, transfers = graph.nodes.earliest.copy(), share.transfer[met]
    earliest[transfers] = np.maximum(earliest[transfers], begins)
    return replay(dataclasses.replace(graph, nodes=dataclasses.replace(graph.nodes, earliest=earliest)))
