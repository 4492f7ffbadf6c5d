"""Placement of a run's ranks in its fabric: their exchanges, and the rings and trees of groups.

Reads a graph with its run and the run's topology; returns `Communications`: transfers that meet, the GPUs of
their ranks, their operation, and the rings and trees of groups where NCCL's log or its Inspector recorded
them. A rank computes on the GPU of its host that has the rank's local number. NCCL numbers the members of a
communicator itself; their ranks in the job follow from hosts and processes, or from the only group of the run
that fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.members import members_of
from dpro.replay.cost.fabric.connections import hashed_loads, known_paths
from dpro.replay.cost.fabric.flows import (
    MESSAGES,
    NOT_RECORDED,
    PAIRWISE,
    TREE,
    Channels,
    Flows,
    Hop,
    Load,
    flows_of,
)
from dpro.replay.cost.fabric.network import NIC, Fabric, Routes, fabric_of, routes_of
from dpro.replay.cost.transfers import RING, cost
from dpro.replay.graph import EdgeKind, Graph, NodeKind, computed_once
from dpro.schema import COLLECTIVES, SENDS, WORKERS
from dpro.store import Run
from dpro.topology.file import FILE as TOPOLOGY
from dpro.topology.file import read
from dpro.topology.kept import CHANNELS as CHANNELS
from dpro.topology.kept import PATHS, GroupChannels, PathEntry, read_channels, read_paths
from dpro.topology.nccl_log import LoggedCommunicator


@dataclass(frozen=True)
class Communications:
    """Exchanges of ranks over the fabric.

    Attributes:
        transfers: [T] nodes of the graph.
        of: [T] the communication of each transfer.
        members: by communication, the GPU of each rank in it, in the order of ranks.
        ops: by communication, its operation.
        algorithms: by communication, as recorded, empty where unknown.
        kind: [C] equal for communications of the same GPUs, operation and algorithm: they take the same
            paths.
        first: [K] one communication of each kind.
        sent: [C] bytes that the busiest rank of each sends, 0 where unknown.
        channels: by communication, as recorded, or `NOT_RECORDED`.
        channels_from: source of the recorded channels, in words; empty without any.
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
        members, ops, algorithms, channels = (
            [column[communication] for communication in self.first.tolist()] for column in columns
        )
        return members, ops, algorithms, channels  # type: ignore[return-value]


def fabric_of_run(run: Run | None) -> Fabric:
    """Return the fabric described by a run's topology.

    Raises:
        Unanswerable: the run has none.
        InputError: its file is wrong.
    """
    if run is None or not (run.path / TOPOLOGY).is_file():
        raise Unanswerable("the run has no topology: add one with `dpro topology FILE --attach RUN`")
    return fabric_of(read(run.path / TOPOLOGY))


def host_named(fabric: Fabric, name: str) -> int | None:
    """Return the host that a run calls by a name, with or without domain; None where the fabric lacks it."""
    short = name.partition(".")[0]
    for host, listed in enumerate(fabric.hosts):
        if name == listed or short == listed.partition(".")[0]:
            return host
    return None


HOW_TO_SAY_HOSTS = "`dpro topology FILE --attach RUN --hosts map.csv` does"


def gpus_of_ranks(run: Run, fabric: Fabric) -> dict[int, int]:
    """Return the GPU (its node) of each rank.

    Raises:
        Unanswerable: the run does not record where its ranks are, or has two on one GPU, or the fabric lacks
            a host or a GPU.
    """
    gpus: dict[int, int] = {}
    taken: dict[int, int] = {}  # GPUs and their ranks
    for rank, local, name in run.table(WORKERS).select("rank", "local_rank", "host").iter_rows():
        if not name or local is None or local < 0:
            raise Unanswerable(
                f"the run does not say on which GPU of which host rank {rank} is: {HOW_TO_SAY_HOSTS}"
            )
        host = host_named(fabric, name)
        if host is None:
            raise Unanswerable(f"host {name}, of rank {rank}, is not in the run's topology")
        if local >= len(fabric.gpus[host]):
            raise Unanswerable(f"host {name} has {len(fabric.gpus[host])} GPUs by the topology")
        gpu = fabric.gpus[host][local]
        if gpu in taken:
            raise Unanswerable(
                f"ranks {taken[gpu]} and {rank} are both on {fabric.names[gpu]}, by their local ranks"
            )
        gpus[rank], taken[gpu] = gpu, rank
    if not gpus:
        raise Unanswerable(f"the run does not say on which hosts its ranks are: {HOW_TO_SAY_HOSTS}")
    return gpus


def communications(graph: Graph, gpus: dict[int, int]) -> Communications:
    """Return the exchanges between the ranks of a graph."""
    nodes, edges = graph.nodes, graph.edges

    is_transfer = (nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0) & (nodes.duration > 0)
    met = np.flatnonzero((edges.kind == EdgeKind.RENDEZVOUS) & is_transfer[edges.target])
    order = np.lexsort((nodes.rank[edges.target[met]], edges.source[met]))
    transfers, meeting = edges.target[met][order], edges.source[met][order]
    _, of = np.unique(meeting, return_inverse=True)
    first = np.flatnonzero(np.diff(of, prepend=-1))
    split = np.split(nodes.rank[transfers], first[1:]) if transfers.size else []
    ranks = [tuple(met_ranks.tolist()) for met_ranks in split]
    members = tuple(tuple(gpus[rank] for rank in met_ranks) for met_ranks in ranks)
    messages = nodes.message[transfers[first]].tolist() if transfers.size else []
    ops = tuple(graph.messages[message].op for message in messages)
    num_bytes = np.zeros(len(ops))
    np.maximum.at(num_bytes, of, nodes.bytes[transfers].astype(np.float64))
    sent = num_bytes * [_busiest_share(op, len(gpus_of)) for op, gpus_of in zip(ops, members)]
    algorithms = _algorithms(graph, transfers[first] if transfers.size else transfers)
    numbers: dict[tuple[tuple[int, ...], str, str], int] = {}
    keys = zip(members, ops, algorithms)
    kind = np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)
    first_of = np.unique(kind, return_index=True)[1].astype(np.int64)
    recorded = channels_of_run(graph.run)
    channels = tuple(recorded.of.get(group, NOT_RECORDED) for group in ranks)
    of = of.astype(np.int64)
    return Communications(
        transfers, of, members, ops, algorithms, kind, first_of, sent, channels, recorded.source
    )


def _algorithms(graph: Graph, transfers: Ints) -> tuple[str, ...]:
    """Return the recorded algorithm of each transfer's collective; empty where none was recorded."""
    if graph.run is None:
        return ("",) * transfers.size
    recorded = graph.run.table(COLLECTIVES, ["rank", "span_id", "algorithm"]).filter(
        pl.col("algorithm") != ""
    )
    of_span = {(rank, span): algorithm for rank, span, algorithm in recorded.iter_rows()}
    ends = zip(graph.nodes.rank[transfers].tolist(), graph.nodes.span[transfers].tolist())
    return tuple(of_span.get(end, "") for end in ends)


def _busiest_share(op: str, num_ranks: int) -> float:
    """Return the bytes that the busiest rank sends, over the payload."""
    try:
        return cost(op, RING, num_ranks).share
    except Unanswerable:
        return 1.0


@dataclass(frozen=True)
class Placed:
    """A run in its fabric.

    Attributes:
        routes: next hops in the present fabric.
        communications: exchanges of its ranks.
        flows: of each kind of communication.
        gpus: GPU of each rank, in the order of ranks.
        path_entries: paths kept in the run.
    """

    fabric: Fabric
    routes: Routes
    communications: Communications
    flows: Flows
    gpus: tuple[int, ...]
    path_entries: tuple[PathEntry, ...] = ()

    @cached_property
    def hashed(self) -> list[Load]:
        """Load of the flows by the hash of each seed, as `hashed_loads` orders them."""
        return hashed_loads(self.flows, self.routes)

    @cached_property
    def known_missing(self) -> bool:
        """Whether the path of any connection is unknown."""
        return bool(known_paths(self.flows, self.routes, self.path_entries).missing.size)

    @cached_property
    def now(self) -> list[Load]:
        """Load of the flows by the hash of each seed, with known paths as they are."""
        return hashed_loads(self.flows, self.routes, self.path_entries) if self.path_entries else self.hashed


def paths_of_run(run: Run) -> tuple[PathEntry, ...]:
    """Return the paths kept in a run."""
    kept = run.path / PATHS
    return tuple(read_paths(kept)) if kept.is_file() else ()


@computed_once
def placed(graph: Graph) -> Placed:
    """Place the ranks of a graph and their exchanges in the fabric of its run.

    Raises:
        Unanswerable: the run has no topology, or the topology lacks a host, or no rank sends to another host.
    """
    fabric = fabric_of_run(graph.run)
    assert graph.run is not None
    gpus = gpus_of_ranks(graph.run, fabric)
    exchanged = communications(graph, gpus)
    flows = flows_of(fabric, *exchanged.kinds)
    if not (fabric.kind[flows.begin] == NIC).any():
        raise Unanswerable("no rank sends to another host: this run does not use the fabric")
    in_order = tuple(gpus[rank] for rank in sorted(gpus))
    return Placed(fabric, routes_of(fabric), exchanged, flows, in_order, paths_of_run(graph.run))


# Recorded rings and trees.

LOG = "NCCL's log"
INSPECTOR = "what NCCL's proxies sent"
Ranks = tuple[int, ...]  # of a group, in ascending order


class RecordedChannels(NamedTuple):
    """Channels of the groups of a run.

    Attributes:
        of: by the ranks of a group.
        source: of the channels, in words; empty without any.
    """

    of: Mapping[Ranks, Channels]
    source: str


class PlacedGroups(NamedTuple):
    """Communicators of a log as groups of ranks.

    Attributes:
        groups: with their channels.
        unknown: number of communicators with ranks that are not known.
        incomplete: number of those with members missing in the log: neither rings nor trees are known.
        differing: number of groups whose communicators differ in rings or trees.
    """

    groups: list[GroupChannels]
    unknown: int
    incomplete: int
    differing: int


def channels_of_run(run: Run | None) -> RecordedChannels:
    """Return the recorded channels of a run's groups: from NCCL's log, else from the sends of its proxies.

    Raises:
        InputError: the file in the run is wrong.
    """
    if run is None:
        return RecordedChannels({}, "")
    if (run.path / CHANNELS).is_file():
        groups = read_channels(run.path / CHANNELS)
        return RecordedChannels({tuple(group.ranks): _hops(group) for group in groups}, LOG if groups else "")
    sent = _sent_along(run)
    return RecordedChannels(sent, INSPECTOR if sent else "")


def _hops(group: GroupChannels) -> Channels:
    place = {rank: member for member, rank in enumerate(group.ranks)}
    rings = tuple(
        tuple((place[one], place[other]) for one, other in zip(ring, [*ring[1:], ring[0]]))
        for ring in group.rings
    )
    trees = tuple(
        tuple((member, place[up]) for member, up in enumerate(parents) if up >= 0) for parents in group.trees
    )
    return Channels(rings, trees)


def _sent_along(run: Run) -> dict[Ranks, Channels]:
    """Return, by group, the members between which NCCL's proxies sent, per channel: only between hosts."""
    sends = run.table(SENDS)
    if not sends.height:
        return {}
    call = ["rank", "group", "sequence"]
    calls = run.table(COLLECTIVES, [*call, "op", "algorithm"])
    ranks: dict[str, Ranks] = {
        group: tuple(sorted(ranks))
        for group, ranks in calls.group_by("group").agg(pl.col("rank").unique()).iter_rows()
    }
    places = sends.select("group", to="rank", peer_member="member").unique()
    places = places.unique(["group", "peer_member"], keep="none")
    chained = ~pl.col("op").is_in([*PAIRWISE, *MESSAGES])
    hops = (
        sends.join(places, on=["group", "peer_member"])
        .join(calls.filter(chained).unique(call, keep="none"), on=call)
        .select("group", "channel", "rank", "to", tree=pl.col("algorithm") == TREE)
        .unique()
        .sort("group", "tree", "channel", "rank", "to")
    )
    hops_of: dict[tuple[Ranks, bool], dict[int, list[Hop]]] = defaultdict(lambda: defaultdict(list))
    for group, channel, rank, to, tree in hops.iter_rows():
        of = ranks[group]
        if tree and rank > to:
            continue  # an edge of a tree is used both ways; one direction is enough
        if rank in of and to in of:
            hops_of[of, tree][channel].append((of.index(rank), of.index(to)))
    return {
        of: Channels(*(tuple(map(tuple, hops_of.get((of, tree), {}).values())) for tree in (False, True)))
        for of in {key for key, _ in hops_of}
    }


def groups_of_log(run: Run, communicators: Sequence[LoggedCommunicator]) -> PlacedGroups:
    """Return the communicators of a log as groups of a run's ranks."""
    workers = run.table(WORKERS).select("host", "pid", "rank")
    rank_of = {(_short(host), pid): rank for host, pid, rank in workers.iter_rows() if host and pid}
    texts = run.table(COLLECTIVES, ["group_ranks"])["group_ranks"].unique()
    groups_of_run = [members_of(text) for text in texts.sort() if text]
    groups: dict[Ranks, list[GroupChannels]] = {}
    unknown = incomplete = 0
    for communicator in communicators:
        if not communicator.rings and not communicator.trees:
            incomplete += 1
            continue
        seen = {
            member: rank_of[_short(host), pid]
            for member, (host, pid) in communicator.places.items()
            if (_short(host), pid) in rank_of
        }
        members = _members(communicator.size, seen, groups_of_run, run.manifest.world_size)
        if members is None:
            unknown += 1
            continue
        groups.setdefault(tuple(sorted(members)), []).append(_channels_by_rank(communicator, members))
    agreed = [logged[0] for logged in groups.values() if all(other == logged[0] for other in logged)]
    right = [group for group in agreed if not group.wrong()]
    return PlacedGroups(right, unknown, incomplete + len(agreed) - len(right), len(groups) - len(agreed))


def _short(host: str) -> str:
    return host.partition(".")[0]


def _members(
    size: int, seen: Mapping[int, int], groups: Sequence[Ranks], world_size: int | None
) -> Ranks | None:
    """Return the rank of each member: all seen, or from the only group of its size that fits; else None."""
    if len(seen) == size and len(set(seen.values())) == size:
        return tuple(seen[member] for member in range(size))
    whole = [tuple(range(size))] if size == world_size else []
    fits = {
        group
        for group in (*groups, *whole)
        if len(group) == size and all(group[member] == rank for member, rank in seen.items())
    }
    return fits.pop() if len(fits) == 1 else None


def _channels_by_rank(communicator: LoggedCommunicator, members: Ranks) -> GroupChannels:
    """Return the channels of a communicator by ranks of the job."""
    ranks = sorted(members)
    member_of = {rank: member for member, rank in enumerate(members)}
    trees = [
        [members[tree[member_of[rank]]] if tree[member_of[rank]] >= 0 else -1 for rank in ranks]
        for tree in communicator.trees
        if all(-1 <= up < communicator.size for up in tree)
    ]
    return GroupChannels(ranks, [[members[place] for place in ring] for ring in communicator.rings], trees)
