"""Pipelines rebuilt: their computes in another order, with other micro-batches, or divided differently.

Takes a graph, its forward and backward work, and an order of work for each stage; returns the graph with the
work in this order in place of the recorded one: computes follow each other on their stage, and wait for the
stage that their micro-batch comes from. The edits decide the order.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.errors import Unanswerable
from dpro.extensions.plan.schedules import (
    KINDS,
    Order,
    PipelineTask,
    Place,
    TaskTable,
    looped,
)
from dpro.replay.graph import EdgeKind, Graph, NodeKind, once
from dpro.replay.pipeline.operations import BACKWARD, FORWARD, WEIGHTS, WEIGHTS_NAMES, Links, recorded_links
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor

MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class RebuildPlan:
    """The pipeline to rebuild.

    Attributes:
        table: all computes and their dependencies.
        share: of a backward spent on gradients of weights, where they are computed apart.
        resized: maps recorded forward or backward work to the new pipeline: [places, micro-batches] ns to
            [new places, new micro-batches] ns.
        smaller: size of the new micro-batches over that of the recorded ones.
    """

    table: TaskTable
    share: float
    resized: Callable[[Floats], Floats]
    smaller: float = 1.0


def resample(work: Floats, places: int, batches: int, ends_stay: bool = False) -> Floats:
    """Return [places, batches] the work in other numbers of equal parts, of the model and of the batch.

    Work is spread evenly within each part.

    Args:
        work: [recorded places, recorded micro-batches] ns.
        ends_stay: whether the difference of the first and the last place from the median of the others stays
            at that end in full: embedding and loss are not layers, and the first layer may have no gradient
            of its input.
    """
    fixed = np.zeros_like(work[[0, -1]])
    if ends_stay and len(work) > 2:
        inner = np.median(work[1:-1], axis=0)
        fixed = np.maximum(work[[0, -1]] - inner, -inner * min(len(work) / places, 1.0))
    body = work.copy()
    body[[0, -1]] -= fixed
    shares = _cut(body, places)
    shares[[0, -1]] = np.maximum(shares[[0, -1]] + fixed, 0.0)
    return _cut(shares.T, batches).T


def _cut(work: Floats, parts: int) -> Floats:
    """Return [parts, M] of [N, M] work, with the first axis cut into equal stretches."""
    if parts == len(work):
        return work
    until = np.concatenate([np.zeros((1, work.shape[1])), np.cumsum(work, axis=0)])
    borders = np.linspace(0, len(work), parts + 1)
    low = np.minimum(borders.astype(np.int64), len(work) - 1)
    parts_: Floats = np.diff(until[low] + (borders - low)[:, None] * work[low], axis=0)
    return parts_


def rebuild(graph: Graph, rows: pl.DataFrame, slowness: pl.DataFrame, wanted: RebuildPlan) -> Graph:
    """Return the graph with computes in the wanted orders in place of the recorded ones.

    Args:
        slowness: factor of each `rank` and `kind` relative to the others of its stage; it applies to any work
            of the rank.
        wanted: the new orders.

    Raises:
        Unanswerable: ranks of a stage cannot be matched to those of the others.
    """
    slow = {(rank, kind): times for rank, kind, times in slowness.iter_rows()}
    table, recorded = wanted.table, graph
    labels = [label(int(chunk), int(batch)) for chunk, batch in {*zip(table.chunk, table.batch)}]
    existing = set(graph.names)
    graph = dataclasses.replace(
        graph, names=((*graph.names, *sorted({*labels, WEIGHTS_NAMES[0]} - existing)))
    )
    draft = GraphEditor(graph)
    draft.gone, passed, late = _gone(graph, rows)
    link_ns = _link_times(graph, rows, passed, wanted.smaller)
    launch_ns = int(graph.nodes.duration[late].sum()) / rows.height
    borders = once(recorded, "borders of computes", lambda graph: _borders(graph, rows), (rows,))
    pipes = once(recorded, "recorded pipes", lambda _: _recorded_pipes(rows), (rows,))
    number = {name: place for place, name in enumerate(graph.names)}
    around = [number[label(chunk, batch)] for chunk, batch in zip(table.chunk.tolist(), table.batch.tolist())]
    for pipe in pipes:
        durations = np.rint(_durations(pipe, wanted, slow) + launch_ns).astype(np.int64)
        computes = _insert(draft, pipe.rows, table, durations, np.array(around), number[WEIGHTS_NAMES[0]])
        for rank, stage in pipe.places:
            first, last = computes[table.stage == stage][[0, -1]].tolist()
            for source, target, kind, lag in borders[pipe.step, rank]:
                one, other = (last, target) if source < 0 else (source, first)
                draft.link(one, other, kind, lag)
        _hand_over(draft, computes, table, link_ns)
    return draft.finish()


class RecordedPipe(NamedTuple):
    """Computes of one pipeline in one step.

    Attributes:
        rows: of `_pipes`.
        places: each rank and its stage.
        work: of forwards and of backwards, as from `recorded_work`.
    """

    step: int
    rows: pl.DataFrame
    places: list[tuple[int, int]]
    work: tuple[tuple[Floats, list[int]], ...]


def _recorded_pipes(rows: pl.DataFrame) -> list[RecordedPipe]:
    return [
        RecordedPipe(
            step,
            pipe,
            sorted(set(zip(pipe["rank"].to_list(), pipe["stage"].to_list()))),
            tuple(recorded_work(pipe, kind) for kind in (FORWARD, BACKWARD)),
        )
        for (step, *_), pipe in _pipes(rows).group_by("step", "first", maintain_order=True)
    ]


def _pipes(rows: pl.DataFrame) -> pl.DataFrame:
    """Add `first`, a key of the ranks of all stages that form one pipeline, and sort by stage and time.

    Each of several ranks with one stage of one replica (tensor parallelism) is in its own pipeline.
    """
    sided = rows.with_columns(side=pl.col("rank").rank("dense").over("dp", "stage"))
    if sided.group_by("dp", "side").agg(pl.col("stage").n_unique())["stage"].n_unique() > 1:
        raise Unanswerable(
            "stages have different numbers of ranks: which ranks pass data to which is not known"
        )
    firsts = sided.with_columns(first=pl.col("rank").min().over("step", "dp", "side"))
    return firsts.sort("step", "first", "stage", "start", "node")


def label(chunk: int, batch: int) -> str:
    """Return the label of a compute."""
    return f"chunk {chunk} micro-batch {batch}" if chunk else f"micro-batch {batch}"


def recorded_work(pipe: pl.DataFrame, kind: str) -> tuple[Floats, list[int]]:
    """Return [places, micro-batches] ns of one pipeline's forwards or backwards in one step, and its ranks.

    Raises:
        Unanswerable: a stage of the pipeline is not recorded.
    """
    of_kind = (pipe["kind"] == FORWARD).to_numpy() == (kind == FORWARD)
    place, batch, ns, rank = (
        pipe[name].to_numpy()[of_kind] for name in ("place", "micro_batch", "ns", "rank")
    )
    work_ns = np.zeros((int(place.max()) + 1, int(batch.max()) + 1))
    np.add.at(work_ns, (place, batch), ns)
    ranks = dict(zip(place.tolist(), rank.tolist()))
    if len(ranks) < len(work_ns):
        raise Unanswerable("a stage of the pipeline is not recorded: what it works on is not known")
    return work_ns, [ranks[place_number] for place_number in range(len(work_ns))]


def _durations(pipe: RecordedPipe, wanted: RebuildPlan, slow: dict[tuple[int, str], float]) -> Floats:
    """Return [N] ns of each compute."""
    table = wanted.table
    ranks = {stage: rank for rank, stage in pipe.places}
    work_ns = []
    for kind, (work, held_by) in zip((FORWARD, BACKWARD), pipe.work):
        even = work / np.array([slow.get((rank, kind), 1.0) for rank in held_by])[:, None]
        times = np.array([slow.get((ranks[stage], kind), 1.0) for stage in range(len(ranks))])
        work_ns.append(wanted.resized(even)[table.place, table.batch] * times[table.stage])
    forward, backward = work_ns
    without_weights = np.where(table.apart, 1 - wanted.share, 1.0)
    durations: Floats = np.choose(table.kind, [forward, backward * without_weights, backward * wanted.share])
    return durations


def _insert(
    draft: GraphEditor, pipe: pl.DataFrame, table: TaskTable, durations: Ints, around: Ints, weights: int
) -> Ints:
    """Insert the computes of one pipeline in one step, in sequence on each stage; return [N] their nodes.

    Args:
        durations: [N] ns.
        around: [N] names of the labels.
    """
    stage, start, node = (pipe[name].to_numpy() for name in ("stage", "start", "node"))
    is_kind = {kind: (pipe["kind"] == kind).to_numpy() for kind in (FORWARD, BACKWARD)}
    likes, starts = [], []
    for number, count in zip(*np.unique(table.stage, return_counts=True)):
        of_stage = stage == number
        likes.append([node[of_stage & is_kind[kind]][0] for kind in (FORWARD, BACKWARD)])
        starts.append(np.linspace(start[of_stage][0], start[of_stage][-1], count).astype(np.int64))
    kind, start = table.kind, np.concatenate(starts)
    template = np.array(likes)[table.stage, (kind != KINDS.index(FORWARD)).astype(np.int64)]
    name = np.where(kind == KINDS.index(WEIGHTS), weights, draft.graph.nodes.name[template])
    times = {"duration": durations, "measured_start": start, "measured_end": start + durations}
    nodes = draft.add_all(template, name=name, around=around, **times)
    one_stage = table.stage[1:] == table.stage[:-1]
    draft.link_all(nodes[:-1][one_stage], nodes[1:][one_stage], EdgeKind.STREAM)
    return nodes


def _hand_over(draft: GraphEditor, nodes: Ints, table: TaskTable, link_ns: Ints) -> None:
    """Link each compute to those that need its result, on the next stage or its own."""
    one, other = table.stage[table.source], table.stage[table.target]
    kind = np.where(one == other, EdgeKind.STREAM, EdgeKind.HANDOVER)
    lag = np.where(one == other, 0, link_ns[one, other])
    draft.link_all(nodes[table.source], nodes[table.target], kind, lag)


Border = tuple[int, int, EdgeKind, int]


def _gone(graph: Graph, rows: pl.DataFrame) -> tuple[Bools, Bools, Bools]:
    """Return [N] masks of what is replaced: all of it, the messages of stages, the delays of computes."""
    replaced = np.zeros(graph.num_nodes, np.bool_)
    replaced[rows["node"].to_numpy()] = True
    passed, late = _messages(graph), _delays_of(graph, replaced)
    return replaced | passed | late | _delays_of(graph, passed), passed, late


def _borders(graph: Graph, rows: pl.DataFrame) -> dict[tuple[int, int], list[Border]]:
    """Return edges between the computes of each (step, rank) and the rest: source, target, kind, lag.

    -1 is the computes. Nodes between them come before the first; only nodes that began with or after the last
    come after it.
    """
    nodes, edges, gone = graph.nodes, graph.edges, _gone(graph, rows)[0]
    owner = dict(zip(rows["node"].to_list(), rows.select("step", "rank").iter_rows()))
    replaced = np.isin(np.arange(graph.num_nodes), rows["node"].to_numpy())
    latest = {
        (step, rank): latest_start
        for step, rank, latest_start in rows.group_by("step", "rank").agg(pl.col("start").max()).iter_rows()
    }
    borders: dict[tuple[int, int], list[Border]] = defaultdict(list)
    for edge in np.flatnonzero(replaced[edges.target] & ~gone[edges.source]).tolist():
        source, target = int(edges.source[edge]), int(edges.target[edge])
        if nodes.measured_start[source] < latest[owner[target]]:
            borders[owner[target]].append((source, -1, EdgeKind(edges.kind[edge]), int(edges.lag[edge])))
    for edge in np.flatnonzero(replaced[edges.source] & ~gone[edges.target]).tolist():
        source, target = int(edges.source[edge]), int(edges.target[edge])
        if nodes.measured_start[target] >= latest[owner[source]]:
            borders[owner[source]].append(
                (-1, target, EdgeKind(edges.kind[edge]), min(int(edges.lag[edge]), 0))
            )
    return borders


def _messages(graph: Graph) -> Bools:
    """Return [N] a mask of sends and receives between stages, with their rendezvous."""
    nodes = graph.nodes
    between_stages = np.array([message.op in MESSAGES for message in graph.messages] + [False], np.bool_)
    moves = between_stages[nodes.message] & (nodes.kind == NodeKind.TRANSFER)
    is_message: Bools = (nodes.collective >= 0) & np.isin(nodes.collective, nodes.collective[moves])
    return is_message


def _delays_of(graph: Graph, work: Bools) -> Bools:
    """Return [N] a mask of the launch delays of this work."""
    edges = graph.edges
    delays = np.zeros(graph.num_nodes, np.bool_)
    delays[edges.source[work[edges.target]]] = True
    of_tasks: Bools = delays & (graph.nodes.kind == NodeKind.DELAY)
    return of_tasks


def _link_times(graph: Graph, rows: pl.DataFrame, passed: Bools, smaller: float) -> Ints:
    """Return [stages, stages] ns from one stage to another, by messages or by observed gaps.

    Pairs of stages without any have the median over all pairs.

    Args:
        passed: [N] sends and receives.
        smaller: size of the new micro-batches over that of the recorded ones.
    """
    moves = passed & (graph.nodes.kind == NodeKind.TRANSFER)
    seen = _message_times(graph, rows, moves) if moves.any() else _handover_times(graph, rows)
    usual = float(np.median(seen["ns"].to_numpy())) if seen.height else 0.0
    times = {
        (one, to): ns for one, to, ns in seen.group_by("one", "to").agg(pl.col("ns").median()).iter_rows()
    }
    stages = range(int(rows["stage"].to_numpy().max()) + 1)
    return np.array([[round(times.get((one, to), usual) * smaller) for to in stages] for one in stages])


def _message_times(graph: Graph, rows: pl.DataFrame, moves: Bools) -> pl.DataFrame:
    """Return `one`, `to` (stages) and `ns` of recorded messages, once in each direction."""
    nodes = graph.nodes
    stage = dict(rows.select("rank", "stage").unique().iter_rows())
    frame = pl.DataFrame(
        {
            "instance": nodes.collective[moves],
            "stage": [stage.get(rank, -1) for rank in nodes.rank[moves].tolist()],
            "ns": nodes.duration[moves],
        }
    )
    ends = [pl.col("stage").min().over("instance"), pl.col("stage").max().over("instance")]
    pairs = [frame.select(one=one, to=to, ns="ns") for one, to in (ends, ends[::-1])]
    return pl.concat(pairs)


def _handover_times(graph: Graph, rows: pl.DataFrame) -> pl.DataFrame:
    """Return `one`, `to` (stages) and `ns` of hand-overs without a recorded message."""
    edges = graph.edges
    stage = np.full(graph.num_nodes, -1, np.int64)
    stage[rows["node"].to_numpy()] = rows["stage"].to_numpy()
    one, to = stage[edges.source], stage[edges.target]
    handed = (edges.kind == EdgeKind.HANDOVER) & (one >= 0) & (to >= 0)
    ns = np.maximum(edges.lag[handed], 0)
    return pl.DataFrame({"one": one[handed], "to": to[handed], "ns": ns})


def message_counts(graph: Graph, rows: pl.DataFrame) -> Links | None:
    """Return the number of messages recorded between each two stages; None where none was recorded."""
    nodes = graph.nodes
    moves = _messages(graph) & (nodes.kind == NodeKind.TRANSFER)
    if not moves.any():
        return recorded_links(graph.run, graph.places) or None if graph.run is not None else None
    stage = dict(rows.select("rank", "stage").unique().iter_rows())
    frame = pl.DataFrame(
        {
            "instance": nodes.collective[moves],
            "stage": [stage.get(rank, -1) for rank in nodes.rank[moves].tolist()],
        }
    )
    counts: dict[tuple[int, int], int] = defaultdict(int)
    ends = frame.group_by("instance").agg(pl.col("stage").unique().sort())["stage"]
    for stages in ends.to_list():
        if len(stages) == 2:
            counts[stages[0], stages[1]] += 1
    return dict(counts)


def recorded_orders(rows: pl.DataFrame) -> list[Order]:
    """Return the order of each stage in one pipeline, in the middle step of the run."""
    steps = rows["step"].unique().sort().to_list()
    of_step = rows.filter((pl.col("step") == steps[len(steps) // 2]) & (pl.col("dp") == rows["dp"].min()))
    orders = []
    for _, stage in of_step.sort("stage", "start", "node").group_by(["stage"], maintain_order=True):
        of_rank = stage.filter(pl.col("rank") == stage["rank"].min())
        orders.append(
            [PipelineTask(*row) for row in of_rank.select("kind", "micro_batch", "chunk").iter_rows()]
        )
    return orders


def recorded_place(rows: pl.DataFrame) -> Place:
    """Return the place of each chunk of each stage in the model."""
    places = {
        (stage, chunk): place for stage, chunk, place in rows.select("stage", "chunk", "place").iter_rows()
    }
    return lambda stage, chunk, num_stages: places.get((stage, chunk), looped(stage, chunk, num_stages))
