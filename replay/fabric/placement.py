"""Where the ranks of a run are in its fabric, and what they exchange there.

In: a graph with its run, and the topology that the run keeps. Out: `Communications`: transfers that meet,
the GPUs of their ranks, their operation. A rank computes on the GPU of its host that has the rank's local
number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.fabric.channels import channels_of_run
from dpro.replay.fabric.connections import known_paths
from dpro.replay.fabric.flows import NOT_RECORDED, Channels, Flows, Load, flows_of
from dpro.replay.fabric.network import NIC, Fabric, fabric_of
from dpro.replay.fabric.routes import Routes, routes_of
from dpro.replay.fabric.usage import hashed_loads
from dpro.replay.graph import EdgeKind, Graph, NodeKind, once
from dpro.replay.models.collective_algorithms import RING, cost
from dpro.schema import COLLECTIVES, WORKERS
from dpro.store import Run
from dpro.topology import paths
from dpro.topology.file import FILE, read
from dpro.topology.paths import PathEntry


@dataclass(frozen=True)
class Communications:
    """What ranks exchange over the fabric.

    Attributes:
        transfers: [T] nodes of the graph.
        of: [T] which communication each belongs to.
        members: by communication, the GPU of each rank that takes part, in the order of ranks.
        ops: by communication, its operation.
        algorithms: by communication, as recorded, empty where unknown.
        kind: [C] communications of the same GPUs, operation and algorithm are of one kind: they take the same
            paths.
        first: [K] one communication of each kind.
        sent: [C] bytes that the busiest rank of each sends, 0 where unknown.
        channels: by communication, as recorded, `NOT_RECORDED` where they were not.
        channels_from: where they were recorded, in words; empty where none were.
    """

    transfers: Ints
    of: Ints
    members: tuple[tuple[int, ...], ...]
    ops: tuple[str, ...]
    algorithms: tuple[str, ...]
    kind: Ints
    first: Ints
    sent: Floats
    channels: tuple[Channels, ...]
    channels_from: str

    @property
    def kinds(self) -> tuple[list[tuple[int, ...]], list[str], list[str], list[Channels]]:
        """Members, operation, algorithm and channels by kind."""
        columns = (self.members, self.ops, self.algorithms, self.channels)
        members, ops, algorithms, channels = ([each[at] for at in self.first.tolist()] for each in columns)
        return members, ops, algorithms, channels  # type: ignore[return-value]


def fabric_of_run(run: Run | None) -> Fabric:
    """The fabric that a run keeps.

    Raises:
        Unanswerable: it keeps none.
        InputError: its file is wrong.
    """
    if run is None or not (run.path / FILE).is_file():
        raise Unanswerable("the run has no topology: `dpro topology FILE --attach RUN` gives it one")
    return fabric_of(read(run.path / FILE))


def host_named(fabric: Fabric, name: str) -> int | None:
    """The host that a run calls by a name, with or without its domain; None where the fabric lacks it."""
    short = name.partition(".")[0]
    for at, known in enumerate(fabric.hosts):
        if name == known or short == known.partition(".")[0]:
            return at
    return None


def gpus_of_ranks(run: Run, fabric: Fabric) -> dict[int, int]:
    """The GPU (its node) that each rank computes on.

    Raises:
        Unanswerable: the run does not say where its ranks are, or has two in one place, or the fabric lacks a
            host or a GPU.
    """
    found: dict[int, int] = {}
    taken: dict[int, int] = {}  # GPUs and their ranks
    for rank, local, name in run.table(WORKERS).select("rank", "local_rank", "host").iter_rows():
        if not name or local is None or local < 0:
            raise Unanswerable(f"the run does not say on which GPU of which host rank {rank} is")
        host = host_named(fabric, name)
        if host is None:
            raise Unanswerable(f"host {name}, of rank {rank}, is not in the run's topology")
        if local >= len(fabric.gpus[host]):
            raise Unanswerable(f"host {name} has {len(fabric.gpus[host])} GPUs by the topology")
        gpu = fabric.gpus[host][local]
        if gpu in taken:
            raise Unanswerable(
                f"ranks {taken[gpu]} and {rank} are both on {fabric.names[gpu]}, by their numbers"
            )
        found[rank], taken[gpu] = gpu, rank
    if not found:
        raise Unanswerable("the run does not say on which hosts its ranks are")
    return found


def communications(graph: Graph, gpus: dict[int, int]) -> Communications:
    """What the ranks of a graph exchange with each other."""
    nodes, edges = graph.nodes, graph.edges

    is_transfer = (nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0) & (nodes.duration > 0)
    met = np.flatnonzero((edges.kind == EdgeKind.RENDEZVOUS) & is_transfer[edges.target])
    order = np.lexsort((nodes.rank[edges.target[met]], edges.source[met]))
    transfers, meeting = edges.target[met][order], edges.source[met][order]
    _, of = np.unique(meeting, return_inverse=True)
    first = np.flatnonzero(np.diff(of, prepend=-1))
    split = np.split(nodes.rank[transfers], first[1:]) if transfers.size else []
    ranks = [tuple(each.tolist()) for each in split]
    members = tuple(tuple(gpus[rank] for rank in each) for each in ranks)
    messages = nodes.message[transfers[first]].tolist() if transfers.size else []
    ops = tuple(graph.messages[message].op for message in messages)
    num_bytes = np.zeros(len(ops))
    np.maximum.at(num_bytes, of, nodes.bytes[transfers].astype(np.float64))
    sent = num_bytes * [_share(op, len(each)) for op, each in zip(ops, members)]
    algorithms = _algorithms(graph, transfers[first] if transfers.size else transfers)
    numbers: dict[tuple[tuple[int, ...], str, str], int] = {}
    keys = zip(members, ops, algorithms)
    kind = np.array([numbers.setdefault(each, len(numbers)) for each in keys], np.int64)
    first_of = np.unique(kind, return_index=True)[1].astype(np.int64)
    recorded = channels_of_run(graph.run)
    channels = tuple(recorded.of.get(each, NOT_RECORDED) for each in ranks)
    of = of.astype(np.int64)
    return Communications(
        transfers, of, members, ops, algorithms, kind, first_of, sent, channels, recorded.source
    )


def _algorithms(graph: Graph, transfers: Ints) -> tuple[str, ...]:
    """By transfer, the algorithm that its collective was recorded with."""
    if graph.run is None:
        return ("",) * transfers.size
    known = graph.run.table(COLLECTIVES, ["rank", "span_id", "algorithm"]).filter(pl.col("algorithm") != "")
    of_span = {(rank, span): algorithm for rank, span, algorithm in known.iter_rows()}
    ends = zip(graph.nodes.rank[transfers].tolist(), graph.nodes.span[transfers].tolist())
    return tuple(of_span.get(each, "") for each in ends)


def _share(op: str, num_ranks: int) -> float:
    """What the busiest rank sends, over the payload."""
    try:
        return cost(op, RING, num_ranks).share
    except Unanswerable:
        return 1.0


@dataclass(frozen=True)
class Placed:
    """A run in its fabric.

    Attributes:
        fabric: the fabric.
        routes: next hops as it is.
        found: what its ranks exchange.
        flows: the flows of each kind of that.
        gpus: by rank, in the order of ranks, the GPU that it computes on.
        known: paths that the run keeps.
    """

    fabric: Fabric
    routes: Routes
    found: Communications
    flows: Flows
    gpus: tuple[int, ...]
    known: tuple[PathEntry, ...] = ()

    @cached_property
    def hashed(self) -> list[Load]:
        """The load of the flows by the hash of each seed, as `hashed_loads` orders them."""
        return hashed_loads(self.flows, self.routes)

    @cached_property
    def known_missing(self) -> bool:
        """Whether the path of a connection is not known."""
        return bool(known_paths(self.flows, self.routes, self.known).missing.size)

    @cached_property
    def now(self) -> list[Load]:
        """The same where known paths are kept."""
        return hashed_loads(self.flows, self.routes, self.known) if self.known else self.hashed


def paths_of_run(run: Run) -> tuple[PathEntry, ...]:
    """The paths that a run keeps."""
    kept = run.path / paths.FILE
    return tuple(paths.read_paths(kept)) if kept.is_file() else ()


def placed(graph: Graph) -> Placed:
    """Where the ranks of a graph are in the fabric of its run, and what they exchange.

    Raises:
        Unanswerable: the run has no topology, or the topology lacks a host, or no rank sends to another host.
    """

    def compute() -> Placed:
        fabric = fabric_of_run(graph.run)
        assert graph.run is not None
        gpus = gpus_of_ranks(graph.run, fabric)
        found = communications(graph, gpus)
        flows = flows_of(fabric, *found.kinds)
        if not (fabric.kind[flows.begin] == NIC).any():
            raise Unanswerable("no rank sends to another host: the fabric has no part in this run")
        in_order = tuple(gpus[rank] for rank in sorted(gpus))
        return Placed(fabric, routes_of(fabric), found, flows, in_order, paths_of_run(graph.run))

    nodes, edges = graph.nodes, graph.edges
    columns = (nodes.kind, nodes.message, nodes.rank, nodes.duration, edges.source, edges.kind)
    return once(graph, "placed", columns, compute)
