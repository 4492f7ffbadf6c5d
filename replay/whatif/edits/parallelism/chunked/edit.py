"""What edits share that cut stretches of work and collectives into chunks: what is cut, and what it costs.

In: a graph. Out: the graph with its segments as pipelines of chunks, once with what a chunk is expected to
cost besides, once with nothing, and once with the most.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from dpro.arrays import Bools, Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, EdgeKind, Graph, GraphError, NodeKind, once
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.parallelism.chunked.costs import Costs, costs_of
from dpro.replay.whatif.edits.parallelism.chunked.places import Member
from dpro.replay.whatif.edits.parallelism.chunked.segments import Segment, Stage, WorkStage
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor


class ChunkedEdit(Edit):
    """Segments of a graph cut into chunks that overlap."""

    chunks: int

    @abstractmethod
    def find(self, graph: Graph) -> list[Segment]:
        """The segments to cut; none where the run holds none."""

    @abstractmethod
    def why_none(self, graph: Graph) -> str:
        """Why there is nothing to cut."""

    def segments(self, graph: Graph) -> list[Segment]:
        """What is cut.

        Raises:
            Unanswerable: there is nothing to cut.
        """
        columns = (*graph.nodes.columns, graph.edges.source, graph.edges.lag, graph.messages)
        found: list[Segment] = once(graph, (self.name, self), columns, lambda: self.find(graph))
        if not found:
            raise Unanswerable(self.why_none(graph))
        return found

    def bound(self, facts: RunFacts) -> float:
        return facts.idle_without_communication

    def is_proven(self, graph: Graph) -> bool:
        """All pairs are of jobs on CPUs: what kernels beside a collective lose, they do not show."""
        return super().is_proven(graph) and not (graph.nodes.kind == NodeKind.KERNEL).any()

    def apply(self, graph: Graph) -> Graph:
        """Cut up all segments."""
        return self._with(graph, 0)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """With chunks that cost nothing besides, and with the most that they may cost."""
        return (self._with(graph, 1), self._with(graph, 2))

    def _with(self, graph: Graph, which: int) -> Graph:
        segments = self.segments(graph)
        if self.chunks == 1:
            return graph
        costs = costs_of(graph, *cut_nodes(segments, graph.num_nodes), self.chunks)
        return with_chunks(graph, segments, costs[which])


# A graph whose segments run as pipelines: a chunk of a stage once that chunk of the stage before is done.

PASSED_ON = (EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.SYNC, EdgeKind.CONTENTION)


def with_chunks(graph: Graph, segments: Sequence[Segment], costs: Costs) -> Graph:
    """The graph with its segments in chunks.

    Args:
        segments: of it; each node is in one at most.

    Raises:
        Unanswerable: in the recorded times, work depends on chunks that come after it.
    """
    made = _Chunked(graph, costs, _with_fewer_bytes(graph, segments, costs.chunks))
    for segment in segments:
        made.cut_up(segment)
    try:
        return made.draft.finish()
    except GraphError as error:
        raise Unanswerable("the recorded order of calls leaves no room for chunks") from error


def _with_fewer_bytes(graph: Graph, segments: Sequence[Segment], chunks: int) -> Graph:
    """The graph, each collective of segments with the bytes of a chunk."""
    num_bytes = graph.nodes.bytes.copy()
    at = cut_nodes(segments, graph.num_nodes)[1] & (num_bytes > 0)
    num_bytes[at] = np.maximum(np.rint(num_bytes[at] / chunks), 1)
    return dataclasses.replace(graph, nodes=dataclasses.replace(graph.nodes, bytes=num_bytes))


class _Chunked:
    """A graph whose segments are being cut up."""

    def __init__(self, graph: Graph, costs: Costs, smaller: Graph) -> None:
        self.graph, self.costs, self.draft = graph, costs, GraphEditor(smaller)
        edges, kind = graph.edges, graph.nodes.kind
        self.by_source = np.argsort(edges.source, kind="stable")
        self.first_out = np.searchsorted(edges.source[self.by_source], np.arange(graph.num_nodes + 1))
        self.instances = int(graph.nodes.collective.max(initial=-1)) + 1
        at = np.flatnonzero(kind == NodeKind.RENDEZVOUS)
        self.rendezvous = dict(zip(graph.nodes.collective[at].tolist(), at.tolist()))

    def cut_up(self, segment: Segment) -> None:
        """Put chunks 2, 3, … of a segment behind its first, which is what is recorded."""
        chains = [_Chain(self, stages) for stages in segment.ranks]
        for chain in chains:
            chain.shorten()
        for number, chunk in _turns(chains[0], self.costs.chunks):
            meet = self._meeting(segment.ranks[0][number], chunk)
            for chain in chains:
                chain.add(number, chunk, meet)
        for chain in chains:
            for number in range(len(chain.stages)):
                chain.close(number)
            chain.pass_on()

    def _meeting(self, stage: Stage, chunk: int) -> int:
        """The rendezvous of a chunk; -1 of work, and where the recorded collective has none."""
        if isinstance(stage, WorkStage):
            return -1
        number = int(self.graph.nodes.collective[stage.arrive])
        own = self.rendezvous.get(number, -1)
        return -1 if own < 0 else self.draft.add(own, collective=self.number_of(number, chunk))

    def number_of(self, collective: int, chunk: int) -> int:
        """The number of a chunk of a collective, which none has."""
        return collective + chunk * self.instances

    def into(self, node: int) -> list[int]:
        """Edges into a node."""
        return list(range(int(self.graph.indptr[node]), int(self.graph.indptr[node + 1])))

    def out(self, node: int) -> list[int]:
        """Edges out of a node."""
        mine = self.by_source[self.first_out[node] : self.first_out[node + 1]]
        return [int(edge) for edge in mine]


class _Chain:
    """The stages of one rank in chunks."""

    def __init__(self, job: _Chunked, stages: tuple[Stage, ...]) -> None:
        self.job, self.stages = job, stages
        self.nodes, self.edges = job.graph.nodes, job.graph.edges
        self.done: list[list[int]] = [[_last(stage)] for stage in stages]  # by stage, the last node per chunk
        self.calls: dict[tuple[int, int], int] = {}
        self.on_thread = any(
            isinstance(stage, WorkStage) and self.nodes.kind[stage.nodes[0]] in CPU_KINDS for stage in stages
        )
        self.own = {node for stage in stages for node in _nodes(stage)}

    def shorten(self) -> None:
        """What is recorded is the first chunk: of a stage that begins, it has nothing beside it."""
        duration = self.job.draft.duration
        for number, stage in enumerate(self.stages):
            if isinstance(stage, WorkStage):
                at = np.array(stage.nodes)
                beside = self._beside(number) if number else 0.0
                duration[at] = np.rint(self.job.costs.work_ns(at, self.nodes.duration[at], beside))
            else:
                duration[stage.transfer] = round(float(self.job.costs.transfer_ns[stage.transfer]))

    def _beside(self, number: int) -> float:
        """ns of communication beside each chunk of a stage of work: of the collectives next to it."""
        near = [
            stage.transfer
            for stage in self.stages[max(number - 1, 0) : number + 2]
            if not isinstance(stage, WorkStage)
        ]
        return float(self.job.costs.transfer_ns[near].sum())

    def add(self, number: int, chunk: int, meet: int) -> None:
        """One more chunk of a stage.

        Args:
            chunk: from 1 on.
            meet: where its members meet, -1 of work.
        """
        stage = self.stages[number]
        node = (
            self._work(number, stage)
            if isinstance(stage, WorkStage)
            else self._move(number, stage, chunk, meet)
        )
        self.done[number].append(node)

    def _work(self, number: int, stage: WorkStage) -> int:
        draft, at, chunk = self.job.draft, np.array(stage.nodes), len(self.done[number])
        last_alone = number == len(self.stages) - 1 and chunk == self.job.costs.chunks - 1
        beside = 0.0 if last_alone else self._beside(number)
        took = round(float(self.job.costs.work_ns(at, self.nodes.duration[at], beside).sum()))
        like = int(at[np.argmax(self.nodes.duration[at])])
        if self.on_thread:
            node = draft.insert(self._anchor(number), template=like, duration=took + stage.besides_ns)
        else:
            node = draft.add(like, duration=took)
            draft.link(self.done[number][-1], node, EdgeKind.STREAM)
            self._launch(like, node, len(stage.nodes))
        self._after_stage_before(number, node, EdgeKind.SYNC if self.on_thread else EdgeKind.EVENT)
        return node

    def _anchor(self, number: int) -> int:
        """Behind which node a thread goes on with the next chunk: the call of what follows, or the work."""
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
            draft.link(meet, transfer, EdgeKind.RENDEZVOUS, self._lag_from_meeting(stage.transfer))
        if self.on_thread and stage.call >= 0:
            call = draft.insert(stage.call, duration=int(nodes.duration[stage.call]))
            draft.link(call, arrive, EdgeKind.LAUNCH, self._launch_of(stage.arrive)[1])
            if number and isinstance(self.stages[number - 1], Member):
                self._after_stage_before(number, call, EdgeKind.SYNC)
        else:
            self._launch(stage.arrive, arrive, 1)
            self._after_stage_before(number, arrive, EdgeKind.EVENT)
        return transfer

    def _lag_from_meeting(self, transfer: int) -> int:
        lags = [
            int(self.edges.lag[edge])
            for edge in self.job.into(transfer)
            if self.nodes.kind[self.edges.source[edge]] == NodeKind.RENDEZVOUS
        ]
        return max(lags, default=0)

    def _launch_of(self, node: int) -> tuple[int, int]:
        """The call that launches a node, -1 where none is known, and its lag."""
        for edge in self.job.into(node):
            if self.edges.kind[edge] == EdgeKind.LAUNCH:
                return int(self.edges.source[edge]), int(self.edges.lag[edge])
        return -1, 0

    def _launch(self, like: int, node: int, count: int) -> None:
        """A thread launches one more chunk behind what it launched before."""
        call, lag = self._launch_of(like)
        if call >= 0 and self.nodes.lane[call] >= 0:
            spent = round(count * self.job.costs.launch_ns)
            self.job.draft.link(self.job.draft.insert(call, duration=spent), node, EdgeKind.LAUNCH, lag)

    def close(self, number: int) -> None:
        """Collectives of the same group or stream begin once all chunks of this one have moved."""
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
        """What waited for the recorded work or collective waits for the last chunk, if it comes behind."""
        begins = int(self.nodes.measured_start[_first(self.stages[-1])])
        for number, stage in enumerate(self.stages):
            for node in _nodes(stage):
                for edge in self.job.out(node):
                    target = int(self.edges.target[edge])
                    if target in self.own or self.edges.kind[edge] not in PASSED_ON:
                        continue
                    if self.nodes.measured_start[target] >= begins:
                        kind, lag = EdgeKind(self.edges.kind[edge]), int(self.edges.lag[edge])
                        self.job.draft.link(self.done[number][-1], target, kind, lag)


def _turns(chain: _Chain, chunks: int) -> Iterator[tuple[int, int]]:
    """Stages and their chunks from the second on, in the order of the program.

    Stage by stage; but a thread that computes calls the collective of a chunk before its next chunk.
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
    """[N] the work, and the transfers, of segments."""
    found = [np.zeros(num_nodes, np.bool_) for _ in range(2)]
    for segment in segments:
        for stages in segment.ranks:
            for stage in stages:
                at: Ints = np.array(stage.nodes if isinstance(stage, WorkStage) else [stage.transfer])
                found[isinstance(stage, Member)][at] = True
    return found[0], found[1]
