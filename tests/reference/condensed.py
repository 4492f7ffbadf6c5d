"""Slow, readable twin of condensing, and random jobs to compare on."""

from __future__ import annotations

from hypothesis import strategies as st

from dpro.replay.condense.parts import Part
from dpro.replay.graph import Graph, NodeKind
from tests.builders import tiny_graph
from tests.reference.event_driven import Edge

Labels = dict[int, int]  # kept node of the graph -> longest path from its end


def labels_of(part: Part) -> dict[int, tuple[int, Labels]]:
    """Of each node that has to stay: when it starts at the earliest, and how long after which others.

    Every path is followed, nothing is left out. Virtual ends are -1, -2, … in order.
    """
    names: list[int] = []
    for node in part.node.tolist():
        names.append(node if node >= 0 else -1 - sum(name < 0 for name in names))
    ends: list[
        tuple[int | None, Labels]
    ] = []  # of each node: by what it ends at the earliest, and its labels
    found = {}
    for at, name in enumerate(names):
        floor, labels = int(part.earliest[at, 0]), Labels()
        for edge in range(part.indptr[at], part.indptr[at + 1]):
            constant, behind = ends[part.source[edge]]
            lag = int(part.lag[edge, 0])
            floor = max(floor, constant + lag) if constant is not None else floor
            for kept, length in behind.items():
                labels[kept] = max(labels.get(kept, length + lag), length + lag)
        if part.keep[at]:
            found[name] = (floor, labels)
            ends.append((None, {name: 0}))
        else:
            lasts = int(part.duration[at, 0])
            ends.append((floor + lasts, {kept: length + lasts for kept, length in labels.items()}))
    return found


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
