"""One rank as it runs in the joined graph: its own nodes, replayed by themselves.

In: a rank's graph, and when the collectives that it shares with others could begin to move. Out: a replay of
the rank, in which those are its first nodes. Every start is that of the whole graph, to the nanosecond.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dpro.arrays import Ints
from dpro.replay.graph import EdgeKind, Edges, Graph, NodeKind, Nodes, assembled
from dpro.replay.sharded.share import Share
from dpro.replay.timeline import Timeline, replay


def meetings_of(timeline: Timeline) -> Nodes:
    """The rendezvous of a joined graph by number of collective; none starts earlier than it does there.

    Args:
        timeline: the replay of the joined graph.
    """
    nodes = timeline.graph.nodes
    met = np.flatnonzero(nodes.kind == NodeKind.RENDEZVOUS)
    met = met[np.argsort(nodes.collective[met], kind="stable")]
    columns = {f.name: getattr(nodes, f.name)[met] for f in dataclasses.fields(Nodes)}
    return Nodes(**columns | {"earliest": timeline.start[met]})


def those_of(meetings: Nodes, instance: Ints) -> Nodes:
    """The rendezvous of some collectives.

    Args:
        meetings: as from `meetings_of`.
        instance: [K] the collectives; those that one rank ran alone have none.
    """
    at = np.searchsorted(meetings.collective, np.sort(instance))
    at = at[at < meetings.collective.size]
    own = at[np.isin(meetings.collective[at], instance)]
    return Nodes(**{f.name: getattr(meetings, f.name)[own] for f in dataclasses.fields(Nodes)})


def replay_inside(share: Share, graph: Graph, meetings: Nodes) -> Timeline:
    """Replay a rank by itself.

    Args:
        share: of the rank.
        graph: its graph, as from `dpro.replay.sharded.skeleton.finished`.
        meetings: rendezvous of all its collectives, as from `those_of`.

    Returns:
        Of its graph with the rendezvous in front.
    """
    count = meetings.collective.size
    meetings = dataclasses.replace(meetings, name=np.full(count, len(graph.names) - 1, np.int64))
    nodes = Nodes(
        **{
            f.name: np.concatenate([getattr(meetings, f.name), getattr(graph.nodes, f.name)])
            for f in dataclasses.fields(Nodes)
        }
    )
    at = np.flatnonzero(np.isin(share.instance, meetings.collective))
    own, none = graph.edges, np.zeros(at.size, np.int64)
    edges = Edges(
        source=np.append(own.source + count, np.searchsorted(meetings.collective, share.instance[at])),
        target=np.append(own.target + count, share.transfer[at] + count),
        lag=np.append(own.lag, none),
        kind=np.append(own.kind, none + EdgeKind.RENDEZVOUS),
        inferred=np.append(own.inferred, none > 0),
    )
    whole = assembled(nodes, edges, graph.names, graph.lanes, graph.origin_ns)
    return replay(whole.of_same_job(graph))
