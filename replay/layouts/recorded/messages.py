"""What the messages of a recorded pipeline say: its micro-batches, and how long a message moves.

In: a graph with its run, perhaps of some ranks alone. Out: a recorded rank of each stage, and numbers. It
reads no schedule: one rank receives as many messages from each neighbour as there are micro-batches.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.arrays import Bools
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.mesh import Mesh
from dpro.schema import COLLECTIVES

RECEIVED = ("recv", "send_recv")


def a_rank_of_each_stage(graph: Graph, mesh: Mesh, stages: int) -> dict[int, int]:
    """The lowest recorded rank of each stage that has one, by its number; of all without a pipeline.

    Args:
        mesh: where its ranks stand.
    """
    ranks = [int(rank) for rank in np.unique(graph.nodes.rank) if rank >= 0]
    names = [axis.name for axis in mesh.axes]
    if stages == 1 or "pp" not in names:
        return {0: ranks[0]}
    at = names.index("pp")
    first: dict[int, int] = {}
    for rank in ranks:
        if rank in mesh.coordinates:
            first.setdefault(mesh.coordinates[rank][at], rank)
    return dict(sorted(first.items()))


def micro_batches_of(graph: Graph, rank: int) -> int:
    """Micro-batches of a pipeline: messages of a step that a rank receives from each of its neighbours.

    Raises:
        Unanswerable: it received none.
    """
    assert graph.run is not None
    nodes = graph.nodes
    mine = _received(graph, ("recv",)) & (nodes.step >= 0) & (nodes.rank == rank)
    steps = np.unique(nodes.step[(nodes.rank == rank) & (nodes.step >= 0)]).size
    calls = graph.run.table(COLLECTIVES, ["rank", "op", "peer"])
    peers = calls.filter((pl.col("rank") == rank) & (pl.col("op") == "recv") & (pl.col("peer") >= 0))["peer"]
    count = round(int(mine.sum()) / max(steps, 1) / max(peers.n_unique(), 1))
    if not count:
        raise Unanswerable(
            "how many micro-batches its pipeline has is not known: `dpro plan` takes --layout micro_batches="
        )
    return count


def message_us_of(graph: Graph, ranks: list[int]) -> float:
    """Microseconds that a message between two recorded ranks moves data; 0 where there is none.

    One whose sender was not recorded seems to move as long as its receiver waits for it.
    """
    nodes = graph.nodes
    ends = nodes.kind == NodeKind.TRANSFER
    numbers, counts = np.unique(nodes.collective[ends], return_counts=True)
    whole = np.isin(nodes.collective, numbers[counts > 1])
    mine = _received(graph, RECEIVED) & whole & np.isin(nodes.rank, ranks)
    return float(np.median(nodes.duration[mine])) / 1e3 if mine.any() else 0.0


def _received(graph: Graph, ops: tuple[str, ...]) -> Bools:
    """[N] which nodes are transfers of such operations."""
    numbers = [number for number, each in enumerate(graph.messages) if each.op in ops]
    found: Bools = (graph.nodes.kind == NodeKind.TRANSFER) & np.isin(graph.nodes.message, numbers)
    return found
