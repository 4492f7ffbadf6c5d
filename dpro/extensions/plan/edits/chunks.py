"""Shared parts of edits that cut work and collectives into chunks: segments, and the cost of chunks.

Takes a graph; returns the graph with its segments as pipelines of chunks, once with the expected cost of
chunks, once with none, and once with the highest.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.estimate import estimate
from dpro.replay.cost.kernels.operations import matmuls
from dpro.replay.cost.kernels.recorded import SHORT_US
from dpro.replay.cost.kernels.roofline import BYTES, GPUS, common_model, stored_as
from dpro.replay.cost.transfers import fit_costs, why_no_cost
from dpro.replay.fidelity.overlap import overlap_of
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, GraphError, NodeKind, computed_once, once
from dpro.replay.kept import kept_as
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.scope import products_of_kernels
from dpro.units import NS_PER_US

# Position of collectives in the work of their ranks: the work before them, and the work that awaits them.

MAX_WORK_BETWEEN = (
    0.1  # of a collective's time: with more work between its call and the wait, it overlaps already
)
FSDP = "FSDP::"  # prefix of ranges in which parameters are gathered, and gradients reduced


class Member(NamedTuple):
    """A rank's part in a collective that its own work waits for.

    Attributes:
        rank: its number.
        arrive, transfer: nodes.
        call: the node of a thread that launches it, -1 where none is known.
        before: the last work before it: of its stream, or its call.
        after: the first work that waits for it, on the thread or stream of `before`.
        num_bytes: payload, -1 where unknown.
        message: kind of communication.
    """

    rank: int
    arrive: int
    transfer: int
    call: int
    before: int
    after: int
    num_bytes: int
    message: int


class Order:
    """Nodes of each thread and stream, in sequence.

    Attributes:
        nodes: [K] of all lanes, lane by lane.
        place: [N] the position of each node in `nodes`; -1 of nodes on no lane.
    """

    def __init__(self, graph: Graph) -> None:
        """Order the nodes of a graph."""
        lane = graph.nodes.lane
        on_lane = np.flatnonzero(lane >= 0)
        self.nodes: Ints = on_lane[np.argsort(lane[on_lane], kind="stable")]
        self.place: Ints = np.full(graph.num_nodes, -1)
        self.place[self.nodes] = np.arange(self.nodes.size)
        self._lane = lane
        self._until = np.append(0, np.cumsum(graph.nodes.duration[self.nodes]))

    def between_ns(self, first: int, last: int) -> int:
        """Return the time of the nodes between two of one lane, ns."""
        return int(self._until[self.place[last]] - self._until[self.place[first] + 1])

    def are_in_order(self, first: int, last: int) -> bool:
        """Return whether two nodes are on one lane, and `last` is `first` or comes after it."""
        return bool(self._lane[first] == self._lane[last] and self.place[first] <= self.place[last])

    def within(self, first: int, last: int) -> list[int]:
        """Return the nodes from one to another, both included."""
        return [int(node) for node in self.nodes[self.place[first] : self.place[last] + 1]]

    def from_here(self, node: int, way: int) -> Iterator[int]:
        """Yield a node, and those before or after it on its lane.

        Args:
            node: where to begin.
            way: -1 or 1.
        """
        place = int(self.place[node])
        while 0 <= place < self.nodes.size and self._lane[self.nodes[place]] == self._lane[node]:
            yield int(self.nodes[place])
            place += way


def awaited_collectives(graph: Graph) -> list[list[Member]]:
    """Return collectives that the work of each of their recorded ranks waits for at once, in order of time.

    Gathers and reductions of FSDP are left out: any chunk of tokens needs all of them.
    """
    return [list(members) for members in _awaited_collectives(graph)]


@kept_as("awaited-collectives", {"Member": Member})
def _awaited_collectives(graph: Graph) -> list[list[Member]]:
    nodes, edges, order = graph.nodes, graph.edges, Order(graph)
    into = _by_node(edges.target, np.isin(nodes.kind[edges.target], (NodeKind.ARRIVE,)))
    out = _by_node(edges.source, nodes.kind[edges.source] == NodeKind.TRANSFER)
    arrives: dict[int, list[int]] = defaultdict(list)
    for arrive in np.flatnonzero((nodes.kind == NodeKind.ARRIVE) & (nodes.collective >= 0)).tolist():
        arrives[int(nodes.collective[arrive])].append(arrive)
    moving = np.flatnonzero((nodes.kind == NodeKind.TRANSFER) & (nodes.message >= 0))
    transfers = {(int(nodes.collective[node]), int(nodes.rank[node])): int(node) for node in moving}
    awaited = []
    for collective, arrivals in arrives.items():
        members = []
        for arrive in arrivals:
            transfer = transfers.get((collective, int(nodes.rank[arrive])), -1)
            member = _member(graph, order, arrive, transfer, into[arrive], out[transfer])
            if member is not None:
                members.append(member)
        if members and len(members) == len(arrivals):
            awaited.append(sorted(members))
    return sorted(
        awaited, key=lambda members: min(int(nodes.measured_start[member.arrive]) for member in members)
    )


def _by_node(ends: Ints, chosen: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> dict[int, list[int]]:
    """Return the chosen edges at each node."""
    edges_of: dict[int, list[int]] = defaultdict(list)
    for edge in np.flatnonzero(chosen).tolist():
        edges_of[int(ends[edge])].append(edge)
    return edges_of


def _member(
    graph: Graph, order: Order, arrive: int, transfer: int, into: list[int], out: list[int]
) -> Member | None:
    """Return a rank's part in a collective, or None if its work does not wait for it at once."""
    nodes, edges = graph.nodes, graph.edges
    if transfer < 0:
        return None
    calls = [int(edges.source[edge]) for edge in into if edges.kind[edge] == EdgeKind.LAUNCH]
    call = calls[0] if calls else -1
    if call >= 0 and nodes.around[call] >= 0 and graph.names[nodes.around[call]].startswith(FSDP):
        return None
    on_stream = graph.lanes[int(nodes.lane[transfer])][1].startswith("stream")
    kinds = GPU_KINDS if on_stream else CPU_KINDS
    waits = (EdgeKind.EVENT, EdgeKind.STREAM) if on_stream else (EdgeKind.SYNC,)
    befores = [int(edges.source[edge]) for edge in into if edges.kind[edge] in waits] if on_stream else calls
    afters = [int(edges.target[edge]) for edge in out if edges.kind[edge] in waits]
    pairs = [
        (order.between_ns(before, after), before, after)
        for before in befores
        for after in afters
        if nodes.kind[before] in kinds
        and nodes.kind[after] in kinds
        and nodes.lane[before] == nodes.lane[after]
        and order.place[before] < order.place[after]
    ]
    between, before, after = min(pairs, default=(0, -1, -1))
    if before < 0 or between > MAX_WORK_BETWEEN * nodes.duration[transfer]:
        return None
    rank, num_bytes = int(nodes.rank[arrive]), int(nodes.bytes[transfer])
    return Member(rank, arrive, transfer, call, before, after, num_bytes, int(nodes.message[transfer]))


class ChunkedEdit(Edit):
    """An edit that cuts segments of a graph into chunks that overlap."""

    chunks: int

    @abstractmethod
    def find(self, graph: Graph) -> list[Segment]:
        """Return the segments to cut; empty where the run has none."""

    @abstractmethod
    def why_none(self, graph: Graph) -> str:
        """Word the reason why there is nothing to cut."""

    def segments(self, graph: Graph) -> list[Segment]:
        """Return the segments to cut.

        Raises:
            Unanswerable: there are none.
        """
        segments: list[Segment] = once(graph, (self.name, self), self.find)
        if not segments:
            raise Unanswerable(self.why_none(graph))
        return segments

    def bound(self, facts: RunFacts) -> float:
        return facts.idle_without_communication

    def is_proven(self, graph: Graph) -> bool:
        """Return False with kernels: all pairs are of jobs on CPUs, without contention on a GPU."""
        return super().is_proven(graph) and not (graph.nodes.kind == NodeKind.KERNEL).any()

    def apply(self, graph: Graph) -> Graph:
        """Cut all segments."""
        return self._with(graph, 0)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return the graphs with chunks without additional cost, and with their highest cost."""
        return (self._with(graph, 1), self._with(graph, 2))

    def _with(self, graph: Graph, which: int) -> Graph:
        segments = self.segments(graph)
        if self.chunks == 1:
            return graph
        costs = costs_of(graph, *cut_nodes(segments, graph.num_nodes), self.chunks)
        return with_chunks(graph, segments, costs[which])


# Segments as pipelines: a chunk of a stage runs once that chunk of the stage before is done.

PASSED_ON = (EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.SYNC, EdgeKind.CONTENTION)


def with_chunks(graph: Graph, segments: Sequence[Segment], costs: Costs) -> Graph:
    """Return the graph with its segments in chunks.

    Args:
        segments: of the graph; each node is in one at most.

    Raises:
        Unanswerable: in the recorded times, work depends on chunks that come after it.
    """
    num_bytes = graph.nodes.bytes.copy()  # for collectives in segments, the bytes of a chunk
    is_cut = cut_nodes(segments, graph.num_nodes)[1] & (num_bytes > 0)
    num_bytes[is_cut] = np.maximum(np.rint(num_bytes[is_cut] / costs.chunks), 1)
    made = _Chunked(
        graph, costs, dataclasses.replace(graph, nodes=dataclasses.replace(graph.nodes, bytes=num_bytes))
    )
    for segment in segments:
        made.cut_up(segment)
    try:
        return made.draft.finish()
    except GraphError as error:
        raise Unanswerable("the recorded order of calls leaves no room for chunks") from error


class _Chunked:
    """A graph while its segments are cut into chunks."""

    def __init__(self, graph: Graph, costs: Costs, smaller: Graph) -> None:
        self.graph, self.costs, self.draft = graph, costs, GraphEditor(smaller)
        edges, kind = graph.edges, graph.nodes.kind
        self.by_source = np.argsort(edges.source, kind="stable")
        self.first_out = np.searchsorted(edges.source[self.by_source], np.arange(graph.num_nodes + 1))
        self.instances = int(graph.nodes.collective.max(initial=-1)) + 1
        meetings = np.flatnonzero(kind == NodeKind.RENDEZVOUS)
        self.rendezvous = dict(zip(graph.nodes.collective[meetings].tolist(), meetings.tolist()))

    def cut_up(self, segment: Segment) -> None:
        """Add chunks 2, 3, … of a segment after its first, which is the recorded work."""
        chains = [_Chain(self, stages) for stages in segment.ranks]
        for chain in chains:
            chain.shorten()
        for number, chunk in _chunk_order(chains[0], self.costs.chunks):
            meet = self._meeting(segment.ranks[0][number], chunk)
            for chain in chains:
                chain.add(number, chunk, meet)
        for chain in chains:
            for number in range(len(chain.stages)):
                chain.close(number)
            chain.pass_on()

    def _meeting(self, stage: Stage, chunk: int) -> int:
        """Return the rendezvous of a chunk; -1 for work, and where the recorded collective has none."""
        if isinstance(stage, WorkStage):
            return -1
        number = int(self.graph.nodes.collective[stage.arrive])
        recorded = self.rendezvous.get(number, -1)
        return -1 if recorded < 0 else self.draft.add(recorded, collective=self.number_of(number, chunk))

    def number_of(self, collective: int, chunk: int) -> int:
        """Return an unused collective number for a chunk."""
        return collective + chunk * self.instances

    def into(self, node: int) -> list[int]:
        """Return the edges into a node."""
        return list(range(int(self.graph.indptr[node]), int(self.graph.indptr[node + 1])))

    def out(self, node: int) -> list[int]:
        """Return the edges out of a node."""
        edges = self.by_source[self.first_out[node] : self.first_out[node + 1]]
        return [int(edge) for edge in edges]


class _Chain:
    """The stages of one rank in chunks."""

    def __init__(self, job: _Chunked, stages: tuple[Stage, ...]) -> None:
        self.job, self.stages = job, stages
        self.nodes, self.edges = job.graph.nodes, job.graph.edges
        self.done: list[list[int]] = [[_last(stage)] for stage in stages]  # by stage, the last node per chunk
        self.on_thread = any(
            isinstance(stage, WorkStage) and self.nodes.kind[stage.nodes[0]] in CPU_KINDS for stage in stages
        )
        self.members = {node for stage in stages for node in _nodes(stage)}

    def shorten(self) -> None:
        """Shorten the recorded work to the first chunk; that of the first stage overlaps with nothing."""
        duration = self.job.draft.duration
        for number, stage in enumerate(self.stages):
            if isinstance(stage, WorkStage):
                nodes = np.array(stage.nodes)
                beside_ns = self._beside(number) if number else 0.0
                duration[nodes] = np.rint(
                    self.job.costs.work_ns(nodes, self.nodes.duration[nodes], beside_ns)
                )
            else:
                duration[stage.transfer] = round(float(self.job.costs.transfer_ns[stage.transfer]))

    def _beside(self, number: int) -> float:
        """Return ns of communication beside each chunk of work: of the collectives next to it."""
        near = [
            stage.transfer
            for stage in self.stages[max(number - 1, 0) : number + 2]
            if not isinstance(stage, WorkStage)
        ]
        return float(self.job.costs.transfer_ns[near].sum())

    def add(self, number: int, chunk: int, meet: int) -> None:
        """Add one more chunk of a stage.

        Args:
            chunk: from 1 on.
            meet: rendezvous of its members, -1 for work.
        """
        stage = self.stages[number]
        node = (
            self._work(number, stage)
            if isinstance(stage, WorkStage)
            else self._move(number, stage, chunk, meet)
        )
        self.done[number].append(node)

    def _work(self, number: int, stage: WorkStage) -> int:
        draft, nodes, chunk = self.job.draft, np.array(stage.nodes), len(self.done[number])
        last_alone = number == len(self.stages) - 1 and chunk == self.job.costs.chunks - 1
        beside_ns = 0.0 if last_alone else self._beside(number)
        took_ns = round(float(self.job.costs.work_ns(nodes, self.nodes.duration[nodes], beside_ns).sum()))
        like = int(nodes[np.argmax(self.nodes.duration[nodes])])
        if self.on_thread:
            node = draft.insert(self._anchor(number), template=like, duration=took_ns + stage.besides_ns)
        else:
            node = draft.add(like, duration=took_ns)
            draft.link(self.done[number][-1], node, EdgeKind.STREAM)
            self._launch(like, node, len(stage.nodes))
        self._after_stage_before(number, node, EdgeKind.SYNC if self.on_thread else EdgeKind.EVENT)
        return node

    def _anchor(self, number: int) -> int:
        """Return the node after which a thread continues with the next chunk: the next call, or the work."""
        follows = self.stages[number + 1] if number + 1 < len(self.stages) else None
        if isinstance(follows, Member) and follows.call >= 0:
            return follows.call
        return _last(self.stages[number])

    def _after_stage_before(self, number: int, node: int, kind: EdgeKind) -> None:
        if number:
            self.job.draft.link(self.done[number - 1][len(self.done[number])], node, kind)

    def _move(self, number: int, stage: Member, chunk: int, meet: int) -> int:
        draft, nodes = self.job.draft, self.nodes
        collective = self.job.number_of(int(nodes.collective[stage.arrive]), chunk)
        arrive = draft.add(stage.arrive, collective=collective)
        took = round(float(self.job.costs.transfer_ns[stage.transfer]))
        transfer = draft.add(stage.transfer, collective=collective, duration=took)
        draft.link(self.done[number][-1], arrive, EdgeKind.STREAM)
        draft.link(arrive, transfer, EdgeKind.STREAM)
        if meet >= 0:
            draft.link(arrive, meet, EdgeKind.RENDEZVOUS)
            lags = [
                int(self.edges.lag[edge])
                for edge in self.job.into(stage.transfer)
                if self.nodes.kind[self.edges.source[edge]] == NodeKind.RENDEZVOUS
            ]
            draft.link(meet, transfer, EdgeKind.RENDEZVOUS, max(lags, default=0))
        if self.on_thread and stage.call >= 0:
            call = draft.insert(stage.call, duration=int(nodes.duration[stage.call]))
            draft.link(call, arrive, EdgeKind.LAUNCH, self._launch_of(stage.arrive)[1])
            if number and isinstance(self.stages[number - 1], Member):
                self._after_stage_before(number, call, EdgeKind.SYNC)
        else:
            self._launch(stage.arrive, arrive, 1)
            self._after_stage_before(number, arrive, EdgeKind.EVENT)
        return transfer

    def _launch_of(self, node: int) -> tuple[int, int]:
        """Return the call that launches a node, -1 where none is known, and its lag."""
        for edge in self.job.into(node):
            if self.edges.kind[edge] == EdgeKind.LAUNCH:
                return int(self.edges.source[edge]), int(self.edges.lag[edge])
        return -1, 0

    def _launch(self, like: int, node: int, count: int) -> None:
        """Launch one more chunk on a thread, after its earlier launches."""
        call, lag = self._launch_of(like)
        if call >= 0 and self.nodes.lane[call] >= 0:
            spent = round(count * self.job.costs.launch_ns)
            self.job.draft.link(self.job.draft.insert(call, duration=spent), node, EdgeKind.LAUNCH, lag)

    def close(self, number: int) -> None:
        """Let later collectives of the group or stream begin once all chunks of this one have moved."""
        stage = self.stages[number]
        if isinstance(stage, WorkStage):
            return
        for other in self.stages[number + 1 :]:
            if isinstance(other, Member) and self._share(stage, other):
                self.job.draft.link(self.done[number][-1], other.arrive, EdgeKind.STREAM)
                return

    def _share(self, one: Member, other: Member) -> bool:
        messages = self.job.graph.messages
        same_lane = self.nodes.lane[one.transfer] == self.nodes.lane[other.transfer]
        return bool(same_lane) or messages[one.message].group == messages[other.message].group

    def pass_on(self) -> None:
        """Make work that waited for a recorded stage wait for its last chunk, if it follows the segment."""
        begins = int(self.nodes.measured_start[_first(self.stages[-1])])
        for number, stage in enumerate(self.stages):
            for node in _nodes(stage):
                for edge in self.job.out(node):
                    target = int(self.edges.target[edge])
                    if target in self.members or self.edges.kind[edge] not in PASSED_ON:
                        continue
                    if self.nodes.measured_start[target] >= begins:
                        kind, lag = EdgeKind(self.edges.kind[edge]), int(self.edges.lag[edge])
                        self.job.draft.link(self.done[number][-1], target, kind, lag)


def _chunk_order(chain: _Chain, chunks: int) -> Iterator[tuple[int, int]]:
    """Yield stages and their chunks from the second on, in the order of the program.

    Goes stage by stage; but a computing thread calls the collective of a chunk before its next chunk.
    """
    number = 0
    while number < len(chain.stages):
        pair = (
            chain.on_thread and isinstance(chain.stages[number], WorkStage) and number + 1 < len(chain.stages)
        )
        for chunk in range(1, chunks):
            yield number, chunk
            if pair:
                yield number + 1, chunk
        number += 1 + pair


def _nodes(stage: Stage) -> tuple[int, ...]:
    return stage.nodes if isinstance(stage, WorkStage) else (stage.arrive, stage.transfer)


def _first(stage: Stage) -> int:
    return stage.nodes[0] if isinstance(stage, WorkStage) else stage.transfer


def _last(stage: Stage) -> int:
    return stage.nodes[-1] if isinstance(stage, WorkStage) else stage.transfer


def cut_nodes(segments: Sequence[Segment], num_nodes: int) -> tuple[Bools, Bools]:
    """Return [N] masks of the work, and of the transfers, of segments."""
    masks = [np.zeros(num_nodes, np.bool_) for _ in range(2)]
    for segment in segments:
        for stages in segment.ranks:
            for stage in stages:
                nodes: Ints = np.array(stage.nodes if isinstance(stage, WorkStage) else [stage.transfer])
                masks[isinstance(stage, Member)][nodes] = True
    return masks[0], masks[1]


# Time of a chunk of work or of a collective: a share of the whole, and a cost per chunk.

# Slowdown of kernels beside communication: mean and largest (Lee et al., arXiv 2507.03114, 2025).
SLOWDOWN, LARGEST_SLOWDOWN = 1.19, 1.40


@dataclass(frozen=True)
class Costs:
    """Costs of chunks.

    Attributes:
        slowdown: of work beside communication.
        work: [N] share of a node's time for a chunk of it.
        transfer_ns: [N] ns of a chunk of each transfer.
        launch_ns: of a thread for each additional kernel and collective.
    """

    chunks: int
    slowdown: float
    work: Floats
    transfer_ns: Floats
    launch_ns: float

    def work_ns(self, nodes: Floats, duration: Floats, beside_ns: float) -> Floats:
        """Return ns of a chunk of each node.

        Args:
            nodes: [K] numbers.
            duration: [K] ns of each now.
        """
        alone = self.work[nodes] * duration
        share = min(beside_ns / max(float(alone.sum()), 1.0), 1.0)
        return np.asarray(alone * (1 + (self.slowdown - 1) * share), np.float64)


def costs_of(graph: Graph, work: Bools, transfers: Bools, chunks: int) -> tuple[Costs, Costs, Costs]:
    """Return the costs of chunks: as expected, at best and at worst.

    Args:
        work: [N] mask of the work to cut.
        transfers: [N] mask of the transfers to cut.

    Raises:
        Unanswerable: the run does not show the cost of the collectives.
    """
    on_gpu = bool((graph.nodes.kind[work] == NodeKind.KERNEL).any())
    shares, fixed = _work(graph, work, chunks), 0.0
    usual, unseen = _transfers(graph, transfers, chunks)
    launch = _launch_ns(graph) if on_gpu else fixed
    expected, best, worst = _slowdowns(graph, on_gpu)
    return (
        Costs(chunks, expected, shares, usual, launch),
        Costs(chunks, best, np.full(graph.num_nodes, 1 / chunks), usual, launch),
        Costs(chunks, worst, shares, unseen, launch),
    )


def _slowdowns(graph: Graph, on_gpu: bool) -> tuple[float, float, float]:
    """Return slowdowns of work beside communication: expected, lowest, highest."""
    seen = _overlap(graph)
    if seen is not None:
        return seen
    return (SLOWDOWN, 1.0, LARGEST_SLOWDOWN) if on_gpu else (1.0, 1.0, SLOWDOWN)


@computed_once
def _overlap(graph: Graph) -> tuple[float, float, float] | None:
    contention = overlap_of(graph)
    return None if contention is None else (contention.factor, contention.low, contention.high)


def _transfers(graph: Graph, transfers: Bools, chunks: int) -> tuple[Floats, Floats]:
    """Return [N] ns of a chunk of each transfer: by the run's curves, and with the largest latency."""
    nodes, lines = graph.nodes, fit_costs(graph)
    moves = (nodes.kind == NodeKind.TRANSFER) & (nodes.duration > 0)
    shortest = float(nodes.duration[moves].min()) if moves.any() else 0.0
    usual, unseen = np.zeros(graph.num_nodes), np.zeros(graph.num_nodes)
    for message in np.unique(nodes.message[transfers]).tolist():
        kind = graph.messages[message].op, graph.messages[message].group
        of_message = np.flatnonzero(transfers & (nodes.message == message))
        took, size = nodes.duration[of_message].astype(np.float64), nodes.bytes[of_message]
        if kind[0] in (DISPATCH, COMBINE) and (size <= 0).any():  # kernels without token counts
            latency = np.minimum(shortest, took)
            usual[of_message] = took / chunks
            unseen[of_message] = latency + (took - latency) / chunks
            continue
        if kind not in lines or (size <= 0).any():
            raise Unanswerable(why_no_cost(graph, kind))
        line = lines[kind]
        part = took * line.time_ns(size / chunks) / np.maximum(line.time_ns(size), 1e-9)
        usual[of_message] = np.clip(part, took / chunks, took)
        latency = np.minimum(shortest if line.bandwidth_only else 0.0, took)
        unseen[of_message] = np.maximum(usual[of_message], latency + (took - latency) / chunks)
    return usual, unseen


def _work(graph: Graph, work: Bools, chunks: int) -> Floats:
    """Return [N] the share of a node's time that a chunk of it takes."""
    share = np.full(graph.num_nodes, 1 / chunks)
    kernels = np.flatnonzero(work & (graph.nodes.kind == NodeKind.KERNEL))
    took = np.maximum(graph.nodes.duration[kernels].astype(np.float64), 1.0)
    fixed = np.minimum(SHORT_US * NS_PER_US / took, 1.0)
    share[kernels] = fixed + (1 - fixed) / chunks
    for node, part in _by_shapes(graph, work, chunks).iter_rows():
        share[node] = min(max(part, 1 / chunks), 1.0)
    return share


def _by_shapes(graph: Graph, work: Bools, chunks: int) -> pl.DataFrame:
    """Return `node`, `part`: a matmul's time with fewer rows over its whole time, where shapes are known."""
    nothing = pl.DataFrame(schema={"node": pl.Int64, "part": pl.Float64})
    device = common_model(graph.run.manifest.gpus) if graph.run is not None else ""
    kernels = work & (graph.nodes.kind == NodeKind.KERNEL)
    if not device or not kernels.any():
        return nothing
    products = products_of_kernels(graph, kernels)
    dtypes = [stored_as(graph.names[code]) for code in graph.nodes.name[products["node"].to_numpy()]]
    rows = products.with_columns(dtype=pl.Series(dtypes, dtype=pl.String))
    rows = rows.filter(pl.col("dtype").is_in([dtype for dtype in GPUS[device].tflops if dtype in BYTES]))
    parts = [nothing]
    for (stored,), same in rows.partition_by("dtype", as_dict=True).items():
        whole, cut = (
            estimate(matmuls(str(stored), same["m"] / by, same["n"], same["k"], same["batch"]), device)
            for by in (1, chunks)
        )
        ratio = same.select("node", part=cut["us"] / whole["us"]).drop_nulls()
        parts.append(ratio.cast({"node": pl.Int64, "part": pl.Float64}))
    return pl.concat(parts)


def _launch_ns(graph: Graph) -> float:
    """Return the median time of a thread from one launch to the next, ns."""
    nodes, edges = graph.nodes, graph.edges
    calls = np.unique(edges.source[edges.kind == EdgeKind.LAUNCH])
    calls = calls[np.isin(nodes.kind[calls], CPU_KINDS)]
    order = calls[np.lexsort((nodes.measured_end[calls], nodes.window[calls], nodes.lane[calls]))]
    gap_ns = np.diff(nodes.measured_end[order])
    one_thread = (np.diff(nodes.lane[order]) == 0) & (np.diff(nodes.window[order]) == 0)
    return float(np.median(gap_ns[one_thread])) if one_thread.any() else 0.0


# Segments of work and collectives that depend on each other: a matmul and its collective, or experts.

MAX_OTHER_WORK = 0.1  # of a matmul's time: with more other work before its collective, they are not a pair
MAX_AWAY = 64  # nodes between them, at most
ALL_TO_ALL, ALL_GATHER = "all_to_all", "all_gather"
DISPATCH, COMBINE = "dispatch", "combine"  # kernels that exchange tokens themselves
EXCHANGES = (ALL_TO_ALL, DISPATCH, COMBINE)
ENGINE, BACKWARD = "autograd::engine", "Backward"
NEAR = 8  # nodes before a call that show its pass
SAME_BYTES = 0.1  # relative difference of the bytes that return from those sent, at most


class WorkStage(NamedTuple):
    """A stage of work.

    Attributes:
        nodes: of one thread or stream, in order.
        besides_ns: other work up to its collective, which a thread repeats for each chunk.
    """

    nodes: tuple[int, ...]
    besides_ns: int = 0


Stage = WorkStage | Member


class Segment(NamedTuple):
    """Stages that depend on each other, for each member rank: all ranks have stages of the same kinds."""

    ranks: tuple[tuple[Stage, ...], ...]


def pairs_of(graph: Graph, order: Order, awaited: Sequence[list[Member]], work: Bools) -> list[Segment]:
    """Pair each collective with the work that it drains or feeds, where all its ranks have such work.

    Where both are possible, an all-gather feeds and others drain; work is in one pair only.

    Args:
        work: [N] mask of the work that may be cut.
    """
    ns = graph.nodes.duration.tolist()
    taken: set[int] = set()
    pairs = []
    for members in awaited:
        feeds = graph.messages[members[0].message].op == ALL_GATHER
        for way in (1, -1) if feeds else (-1, 1):
            begins = [member.before if way < 0 else member.after for member in members]
            near = [_nearest(order, begin, way, work, ns) for begin in begins]
            if all(node >= 0 and node not in taken for node in near):
                taken.update(near)
                ends = [sorted(pair, key=order.place.__getitem__) for pair in zip(begins, near)]
                cut = [
                    WorkStage((node,), order.between_ns(first, last) if first != last else 0)
                    for node, (first, last) in zip(near, ends)
                ]
                pairs.append(Segment(tuple(zip(cut, members) if way < 0 else zip(members, cut))))
                break
    return pairs


def _nearest(order: Order, begin: int, way: int, work: Bools, ns: Sequence[int]) -> int:
    """Return the next work on a lane with little other work before it; -1 without any."""
    between_ns = 0
    for away, node in enumerate(order.from_here(begin, way)):
        if work[node] and between_ns <= MAX_OTHER_WORK * ns[node]:
            return node
        between_ns += ns[node]
        if away > MAX_AWAY:
            break
    return -1


def experts_of(graph: Graph, order: Order, awaited: Sequence[list[Member]]) -> list[Segment]:
    """Return exchanges of tokens, their experts' work, and the exchanges back, with collectives in between.

    An all-to-all returns tokens if it is the next one in the group of an earlier one, with its bytes. A
    combine kernel (DeepEP's and others) returns what the dispatch before it sent.
    """
    segments: list[Segment] = []
    open_: dict[tuple[str, tuple[int, ...], bool], int] = {}
    for number, members in enumerate(awaited):
        message = graph.messages[members[0].message]
        if message.op not in EXCHANGES:
            continue
        place = (message.group, tuple(member.rank for member in members), message.op == ALL_TO_ALL)
        out = -1 if message.op == DISPATCH else open_.pop(place, -1)
        segment = None if out < 0 else _segment(graph, order, awaited[out : number + 1])
        if segment is not None:
            segments.append(segment)
        elif message.op != COMBINE:
            open_[place] = number
    return segments


def _segment(graph: Graph, order: Order, collectives: Sequence[list[Member]]) -> Segment | None:
    """Return the segment from an all-to-all to the one that returns its tokens; None if they do not match."""
    out, back = collectives[0], collectives[-1]
    between = [
        members for members in collectives[1:-1] if {one.rank for one in members} >= {one.rank for one in out}
    ]
    ranks = []
    for one, other in zip(out, back):
        if abs(one.num_bytes - other.num_bytes) > SAME_BYTES * max(one.num_bytes, 1):
            return None
        if not order.are_in_order(one.after, other.before) or _turns_back(graph, order, one, other):
            return None
        if graph.nodes.step[one.transfer] != graph.nodes.step[other.transfer]:
            return None
        inner = [member for members in between for member in members if member.rank == one.rank]
        ranks.append(_stages(order, [one, *_nested(order, one, other, inner), other]))
    kinds = {tuple(type(stage) for stage in stages) for stages in ranks}
    return Segment(tuple(ranks)) if len(kinds) == 1 and WorkStage in next(iter(kinds)) else None


def _turns_back(graph: Graph, order: Order, one: Member, other: Member) -> bool:
    """Return whether the calls are in a forward and a backward pass: then gradients return, not tokens."""
    if one.call < 0 or other.call < 0:
        return False
    if graph.nodes.lane[one.call] != graph.nodes.lane[other.call]:
        return True

    def is_backward(node: int) -> bool:
        name = graph.names[graph.nodes.name[node]]
        same_step = graph.nodes.step[node] == graph.nodes.step[one.call]
        return bool(same_step) and (name.startswith(ENGINE) or BACKWARD in name)

    before = islice(order.from_here(one.call, -1), NEAR)
    return any(map(is_backward, order.within(one.call, other.call))) and not any(map(is_backward, before))


def _nested(order: Order, one: Member, other: Member, inner: Iterable[Member]) -> list[Member]:
    """Return collectives between two, on the lane of the work between these."""
    first, last = order.place[one.after], order.place[other.before]
    return [
        member for member in inner if first <= order.place[member.before] < order.place[member.after] <= last
    ]


def _stages(order: Order, members: Sequence[Member]) -> tuple[Stage, ...]:
    """Return the collectives of a rank in order, with the work between each two."""
    stages: list[Stage] = [members[0]]
    for one, other in pairwise(members):
        last = other.before
        if last == other.call:  # on its thread, the work ends before the call
            last = int(order.nodes[order.place[last] - 1])
        if order.place[one.after] <= order.place[last]:
            stages.append(WorkStage(tuple(order.within(one.after, last))))
        stages.append(other)
    return tuple(stages)
