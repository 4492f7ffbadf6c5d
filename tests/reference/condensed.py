"""Slow, readable twin of condensing, and random jobs to compare on."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from dpro.replay.condense import cut_by_rank, joined_graph, skeletons_of
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.timeline import rank_step_times, replay, step_ends
from tests.builders import tiny_graph
from tests.reference.event_driven import Edge

Labels = dict[int, int]  # kept node of the graph -> longest path from its end
Step = tuple[int, int]  # window and step
Name = int | Step  # of a node of the graph, or of the virtual end of a step


def condense(graph: Graph) -> tuple[Graph, np.ndarray]:
    """Return the condensed graph, and the node of the whole graph that each of its nodes is, or -1."""
    cut = cut_by_rank(graph)
    return joined_graph(graph, cut, skeletons_of(graph, cut))


def with_transfers_of(small: Graph, node: np.ndarray, changed: Graph) -> Graph:
    """Return a condensed graph with the durations of another whole graph, which differ in transfers alone."""
    return small.with_durations(np.where(node >= 0, changed.nodes.duration[node], 0))


def assert_replays_as(graph: Graph, small: Graph, node: np.ndarray) -> None:
    """Check that all kept nodes and all steps of a condensed graph have the times of the whole graph."""
    whole, condensed, real = replay(graph), replay(small), node >= 0
    assert (condensed.start[real] == whole.start[node[real]]).all()
    assert (condensed.end[real] == whole.end[node[real]]).all()
    for steps in (step_ends, rank_step_times):
        assert steps(graph, whole.start, whole.end).equals(steps(small, condensed.start, condensed.end))


def labels_of(graph: Graph, rank: int, kept: set[int]) -> dict[Name, tuple[int, Labels]]:
    """Of kept nodes of a rank, and of the ends of its steps: when they start at the earliest by what is not
    kept, and how long after the ends of which others. Every path inside the rank is followed.
    """
    nodes, edges = graph.nodes, graph.edges
    found: dict[Name, tuple[int, Labels]] = {}
    ends: dict[int, tuple[int | None, Labels]] = {}  # by what each node ends at the earliest, and its labels
    for node in np.flatnonzero(nodes.rank == rank).tolist():
        floor, labels = int(nodes.earliest[node]), Labels()
        for edge in range(graph.indptr[node], graph.indptr[node + 1]):
            if nodes.rank[edges.source[edge]] == rank:
                floor = _behind(floor, labels, ends[int(edges.source[edge])], int(edges.lag[edge]))
        if node in kept:
            found[node] = (floor, labels)
            ends[node] = (None, {node: 0})
        else:
            lasts = int(nodes.duration[node])
            ends[node] = (floor + lasts, {each: length + lasts for each, length in labels.items()})
        if nodes.kind[node] != NodeKind.RENDEZVOUS:
            step = (int(nodes.window[node]), int(nodes.step[node]))
            floor, labels = found.setdefault(step, (min(0, int(nodes.earliest.min())), Labels()))
            found[step] = (_behind(floor, labels, ends[node], 0), labels)
    return found


def _behind(floor: int, labels: Labels, end: tuple[int | None, Labels], lag: int) -> int:
    """Add what one predecessor says to labels; return the new floor."""
    constant, before = end
    for kept, length in before.items():
        labels[kept] = max(labels.get(kept, length + lag), length + lag)
    return floor if constant is None else max(floor, constant + lag)


class _Job:
    """Nodes and edges of a job in the making; every rank has two lanes."""

    def __init__(self) -> None:
        self.columns: dict[str, list[int]] = {
            name: [] for name in ("duration", "earliest", "rank", "window", "step", "kind")
        }
        self.edges: list[Edge] = []

    def node(self, **values: int) -> int:
        for name, column in self.columns.items():
            column.append(values.get(name, 0))
        return len(self.columns["kind"]) - 1

    def graph(self) -> Graph:
        columns = dict(self.columns)
        return tiny_graph(columns.pop("duration"), self.edges, **columns)


@st.composite
def jobs(draw: st.DrawFn, most: int = 14) -> Graph:
    """A random graph of up to three ranks: work, collectives, and edges with lags of both signs."""
    num_ranks = draw(st.integers(1, 3))
    job, own = _Job(), {rank: [] for rank in range(num_ranks)}
    lags = st.integers(-30, 50)
    for _ in range(draw(st.integers(1, most))):
        place = {"window": draw(st.integers(0, 1)), "step": draw(st.sampled_from([-2, -1, 0, 0, 1]))}
        members = draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
        kinds = [NodeKind.ARRIVE, NodeKind.TRANSFER] if len(members) > 1 or draw(st.booleans()) else [0]
        met = job.node(rank=-1, kind=NodeKind.RENDEZVOUS, step=-1) if len(members) > 1 else None
        for rank in sorted(members):
            before = draw(st.sets(st.sampled_from(own[rank]), max_size=3)) if own[rank] else set()
            made = [
                job.node(
                    rank=rank,
                    kind=int(kind),
                    duration=0 if kind == NodeKind.ARRIVE else draw(st.integers(0, 40)),
                    earliest=draw(st.sampled_from([0, 0, 0, 7, 60])),
                    **place,
                )
                for kind in kinds
            ]
            job.edges += [(each, made[0], draw(lags)) for each in sorted(before)]
            job.edges += [(made[0], made[1], 0)] if len(made) == 2 else []
            if met is not None:
                job.edges += [(made[0], met, draw(st.integers(0, 3))), (met, made[1], 0)]
            own[rank] += made
    return job.graph()
