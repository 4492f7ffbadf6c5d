"""Edits of the schedule of a pipeline-parallel job and its micro-batches, or of other work that fills its
bubbles, and its cost for the job.

These edits need runs of whole operations, whose nodes are the forward and backward of a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.errors import Unanswerable, UsageError
from dpro.extensions.plan.rebuilt import RebuildPlan, rebuild, resample
from dpro.extensions.plan.schedules import (
    HALF,
    SCHEDULES,
    Order,
    PipelineTask,
    Schedule,
    most_in_flight,
    table_of,
)
from dpro.replay.graph import EdgeKind, Graph, once
from dpro.replay.pipeline.operations import BACKWARD, WEIGHTS
from dpro.replay.timeline import replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.balance import computes, slowness
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor

MIN_SHARE = 1 / 3  # of a backward in gradients of weights: attention scores have none


@dataclass(frozen=True)
class Pipeline(Edit):
    """Another schedule, another number of micro-batches of the same batch or of chunks, or all of these."""

    name = "pipeline"
    of_torch = True
    summary = "change the pipeline schedule, or the number of micro-batches or model chunks"
    example = "pipeline:schedule=1f1b,micro_batches=16"
    needs = "an operation-level trace with more than one stage"
    assumes = (
        "work and messages scale with the micro-batch size, work is even within a stage except for the "
        "extra time of the first and last stage (embedding, loss), messages never compete, memory "
        "suffices, and separate weight gradients take half of a backward pass, unless recorded"
    )
    source = (
        "the published orders, replayed: GPipe, 1F1B, interleaved (PTD-P, SC 2021), ZB-H1 and ZB-V "
        "(arXiv 2401.10241), DualPipe (arXiv 2412.19437)"
    )
    proof = "GPipe, 1F1B, interleaved, ZB-H1, ZB-V, DualPipe, 8 and 4 micro-batches: sleeping layers, gloo"
    effort = "line"
    of_operations = True
    schedule: str = key("pipeline schedule", "1f1b", choices=tuple(SCHEDULES))
    micro_batches: int | None = key(
        "number of micro-batches; default: as recorded", None, least=1, most=65_536
    )
    chunks: int | None = key("model chunks per stage, for interleaved and gpipe", None, least=1, most=1024)
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return edits to schedules with smaller bubbles, and to more micro-batches."""
        rows = computes(facts.graph)
        shape = shape_of(rows)
        wanted = [cls("zb-h1"), cls("interleaved", chunks=2), cls("zbv"), cls("dualpipe")]
        wanted = [edit for edit in wanted if shape.chunks == 1 or edit.schedule != "interleaved"]
        wanted += [cls("1f1b", times * shape.batches) for times in (2, 4)]
        return [edit for edit in wanted if edit._is_possible(shape)]

    def bound(self, facts: RunFacts) -> float:
        """Return all idle time; where chunks move, that beside a stage with the mean work of all."""
        rows = computes(facts.graph)
        if self._keeps_places(rows, shape_of(rows)):
            other_work = np.ones(facts.graph.num_nodes, np.bool_)
            other_work[rows["node"].to_numpy()] = False
            return facts.idle(other_work)
        even = rows.join(slowness(facts.graph), on=["rank", "kind"], how="left")
        work = even.group_by("step").agg(even=(pl.col("ns") / pl.col("slowness")).sum())["even"]
        return max(facts.base_ns - float(work.to_numpy().min()) / rows["rank"].n_unique(), 0.0)

    def apply(self, graph: Graph) -> Graph:
        """Replace the operations of the recorded schedule by those of the wanted one."""
        rows = computes(graph)
        return self._made(graph, rows, share_of_weights(rows) or HALF)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return graphs with fewer weight gradients, and with loss and embedding spread over layers."""
        rows = computes(graph)
        shape, graphs = shape_of(rows), []
        share = share_of_weights(rows)
        if self._chosen.splits and share is None:
            graphs.append(self._made(graph, rows, MIN_SHARE))
        recorded = shape.stages * shape.chunks
        if self._places(shape) != recorded and recorded > 2:
            graphs.append(self._made(graph, rows, share or HALF, ends_stay=False))
        return tuple(graphs)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report the activations that the schedule keeps in memory."""
        rows = computes(graph)
        shape = shape_of(rows)
        before = once(graph, "activations held", lambda _: most_held(rows, shape_of(rows)), (rows,))
        orders = self._orders(shape)
        most = max(map(most_in_flight, orders)) / self._chunks(shape)
        after = most * shape.batches / (self.micro_batches or shape.batches)
        lines = [
            f"a stage keeps activations of at most {after:.3g} micro-batches of the recorded size, where it "
            f"kept {before:.3g}"
        ]
        if self._chosen.copies > 1:
            lines.append("each stage holds the parameters of two; reducing their gradients is not predicted")
        if self._chosen.splits and share_of_weights(rows) is None:
            lines.append(
                "the share of weight gradients in a backward was not recorded: half is assumed, a "
                "third is the other end of the interval"
            )
        return tuple(lines)

    @property
    def _chosen(self) -> Schedule:
        return SCHEDULES[self.schedule]

    def _chunks(self, shape: PipelineShape) -> int:
        if self.chunks is None and self.schedule == "interleaved" and shape.chunks > 1:
            return shape.chunks
        return self.chunks or (1 if self.schedule == "interleaved" else self._chosen.chunks)

    def _places(self, shape: PipelineShape) -> int:
        """Return the number of parts of the model."""
        return shape.stages * self._chunks(shape)

    def _keeps_places(self, rows: pl.DataFrame, shape: PipelineShape) -> bool:
        """Return whether every stage keeps its chunks of the model."""
        held = rows.select("stage", "chunk", "place").unique().iter_rows()
        stays = all(
            self._chosen.place(stage, chunk, shape.stages) == recorded for stage, chunk, recorded in held
        )
        return stays and self._chunks(shape) == shape.chunks and self._chosen.copies == 1

    def _orders(self, shape: PipelineShape) -> list[Order]:
        if self._chosen.copies >= shape.stages:
            raise Unanswerable(
                f"{self.schedule} on {shape.stages} stages: each would hold the whole model, no part of it"
            )
        return self._chosen.orders(shape.stages, self.micro_batches or shape.batches, self._chunks(shape))

    def _is_possible(self, shape: PipelineShape) -> bool:
        try:
            self._orders(shape)
        except (UsageError, Unanswerable):
            return False
        return True

    def _made(self, graph: Graph, rows: pl.DataFrame, share: float, ends_stay: bool = True) -> Graph:
        shape = shape_of(rows)
        orders = self._orders(shape)
        if self._keeps_places(rows, shape) and _is_order(rows, orders):
            return graph
        places, batches = self._places(shape), self.micro_batches or shape.batches

        def resized(work: Floats) -> Floats:
            return resample(work, places, batches, ends_stay)

        table = table_of(orders, self._chosen.place)
        wanted = RebuildPlan(table, share, resized, shape.batches / batches)
        return rebuild(graph, rows, slowness(graph), wanted)

    def describe(self) -> str:
        batches = f" with {self.micro_batches} micro-batches" if self.micro_batches else ""
        article = "an" if self.schedule == "interleaved" else "a"
        return f"{article} {self.schedule} pipeline{batches}"

    def how(self) -> str:
        return self._chosen.code.format(self.micro_batches or "…")


class PipelineShape(NamedTuple):
    """Number of stages of a pipeline, chunks on each, and micro-batches in a step."""

    stages: int
    chunks: int
    batches: int


def shape_of(rows: pl.DataFrame) -> PipelineShape:
    """Return the shape of a recorded pipeline.

    Raises:
        Unanswerable: there is one stage, or ranks or steps differ.
    """
    stages, chunks = int(rows["stage"].to_numpy().max()) + 1, int(rows["chunk"].to_numpy().max()) + 1
    if stages < 2:
        raise Unanswerable("the run has only one stage: there is no pipeline")
    counts = rows.group_by("rank", "step", "kind", "chunk").agg(
        pieces=pl.len(), batches=pl.col("micro_batch").n_unique(), last=pl.col("micro_batch").max() + 1
    )
    shapes = set(counts.filter(pl.col("kind") != WEIGHTS).select("pieces", "batches", "last").iter_rows())
    per_rank = set(counts.group_by("rank", "step", "kind").len()["len"].to_list())
    if len(shapes) != 1 or len(set(next(iter(shapes)))) != 1 or per_rank != {chunks}:
        raise Unanswerable("steps or ranks differ in their number of forward and backward operations")
    return PipelineShape(stages, chunks, int(next(iter(shapes))[0]))


def share_of_weights(rows: pl.DataFrame) -> float | None:
    """Return the share of weight gradients in all backward work; None where they were not recorded apart."""
    total = rows.group_by("kind").agg(pl.col("ns").sum())
    ns = dict(total.iter_rows())
    return ns[WEIGHTS] / (ns[WEIGHTS] + ns[BACKWARD]) if WEIGHTS in ns else None


def most_held(rows: pl.DataFrame, shape: PipelineShape) -> float:
    """Return the most micro-batches whose activations a stage holds at once, in the recorded order.

    Args:
        rows: as from `computes`.
    """
    most = 0
    for _, of_rank in rows.group_by("step", "rank", maintain_order=True):
        most = max(most, most_in_flight([PipelineTask(*task) for task in _tasks(of_rank)]))
    return most / shape.chunks


def _tasks(rows: pl.DataFrame) -> list[tuple[str, int, int]]:
    return list(rows.select("kind", "micro_batch", "chunk").iter_rows())


def _is_order(rows: pl.DataFrame, orders: list[Order]) -> bool:
    """Return whether every rank already works in this order."""
    for (_, _, stage), of_rank in rows.group_by("step", "rank", "stage", maintain_order=True):
        if _tasks(of_rank) != [tuple(task[:3]) for task in orders[stage]]:
            return False
    return True


FOREIGN = "(foreign work)"
MS = 1e6
OVERRUN = 1.1  # factor on the given time of a piece, for the other end of the interval


@dataclass(frozen=True)
class Fill(Edit):
    """Pieces of another job's work fill the time in which stages wait for each other."""

    name = "fill"
    summary = "fill pipeline bubbles with pieces of another job's work"
    example = "fill:ms=20,switch_ms=1,risk=0.1"
    needs = "an operation-level trace with more than one stage"
    assumes = (
        "a piece runs to its end in the given time, memory suffices for it, and it slows down no message"
    )
    source = (
        "PipeFill (arXiv 2410.07192): the plan uses the usual bubble lengths, each bubble costs a "
        "switch, and losses from shorter bubbles are replayed"
    )
    of_operations = True
    proof = "pieces of 20 ms in the bubbles of 1F1B: sleeping layers, gloo"
    effort = "code"
    ms: float = key("duration of one piece of foreign work, in ms", least=0.001)
    switch_ms: float = key("time to switch to foreign work and back, in ms, once per bubble", 1.0, least=0.0)
    risk: float = key("share of steps with a bubble shorter than planned", 0.1, least=0.0, most=1.0)
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Return the edit with pieces as long as the work of a micro-batch."""
        rows = computes(facts.graph)
        shape_of(rows)
        return [cls(max(round(float(np.median(rows["ns"].to_numpy())) / MS, 3), 0.001))]

    def bound(self, facts: RunFacts) -> float:
        """Return 0, since the job itself gains nothing."""
        return 0.0

    def apply(self, graph: Graph) -> Graph:
        """Insert as many pieces as fit after the work before each bubble."""
        return _filled(graph, planned(graph, self))

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return the graph with pieces that take longer than given."""
        plan = planned(graph, self)
        return (_filled(graph, plan.with_columns(ns=(pl.col("ns") * OVERRUN).round().cast(pl.Int64))),)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report how many pieces fit."""
        plan = planned(graph, self)
        steps, ranks = plan["step"].n_unique(), plan["rank"].n_unique()
        pieces, idle = int(plan["pieces"].sum()), float(plan["gap"].sum())
        per_step = pieces * self.ms / max(steps, 1)
        share = pieces * self.ms * MS / idle if idle else 0.0
        return (
            f"{pieces / max(steps, 1):.0f} pieces of {self.ms:g} ms fit into a step: {per_step:.1f} ms on "
            f"{ranks} ranks together, {share:.0%} of their bubbles",
        )

    def describe(self) -> str:
        return f"{self.ms:g} ms pieces of foreign work in the bubbles"

    def how(self) -> str:
        return (
            "run a second process at low priority that starts pieces when a stage begins to wait (a "
            "hook before its receives), as PipeFill does"
        )


def planned(graph: Graph, fill: Fill) -> pl.DataFrame:
    """Return rows of `bubbles` with `pieces` of foreign work, and `ns` of these with the switch."""
    gaps = bubbles(graph)
    usual = pl.col("gap").quantile(fill.risk, "lower").over("rank", "number")
    room = (usual / MS - fill.switch_ms) / fill.ms
    plan = gaps.with_columns(pieces=room.clip(0).floor().cast(pl.Int64))
    busy = (pl.col("pieces") * fill.ms + fill.switch_ms) * MS
    return plan.with_columns(ns=pl.when(pl.col("pieces") > 0).then(busy).otherwise(0).round().cast(pl.Int64))


def bubbles(graph: Graph) -> pl.DataFrame:
    """Return the idle times of each rank within the pipeline of a step.

    Returns:
        `step`, `dp`, `rank`, `number` (of the bubble in the step, from 0: before the first work), `before`
        and `after` (nodes of work, -1 none), `first` (node of the first work of the pipeline), `gap` (ns).
    """
    rows = computes(graph)
    shape_of(rows)
    timeline = replay(graph)
    node = rows["node"].to_numpy()
    rows = rows.with_columns(begin=timeline.start[node], finish=timeline.end[node])
    extents = (
        rows.sort("begin", "node")
        .group_by("step", "dp")
        .agg(opens=pl.col("begin").first(), first=pl.col("node").first(), closes=pl.col("finish").max())
    )
    operations = rows.sort("step", "rank", "begin", "node").join(
        extents, on=["step", "dp"], how="left", maintain_order="left"
    )
    by = ["step", "rank"]
    ended, before = pl.col("finish").shift(1).over(by), pl.col("node").shift(1).over(by)
    inside = operations.select(
        *("step", "dp", "rank", "first"),
        number=pl.int_range(pl.len()).over(by),
        before=before.fill_null(-1),
        after="node",
        gap=pl.col("begin") - pl.coalesce(ended, "opens"),
    )
    last = operations.group_by(by, maintain_order=True).agg(
        pl.col("dp", "first").first(),
        number=pl.len().cast(pl.Int64),
        before=pl.col("node").last(),
        after=pl.lit(-1, pl.Int64),
        gap=(pl.col("closes") - pl.col("finish")).last(),
    )
    gaps = pl.concat([inside, last.select(inside.columns)])
    return gaps.with_columns(pl.col("gap").clip(0)).sort("step", "rank", "number")


def _filled(graph: Graph, plan: pl.DataFrame) -> Graph:
    """Insert foreign work after the work before each bubble; subsequent work waits for it."""
    wanted = plan.filter(pl.col("ns") > 0)
    if wanted.is_empty():
        return graph
    graph = dataclasses.replace(graph, names=(*graph.names, FOREIGN))
    draft, nodes = GraphEditor(graph), graph.nodes
    name = len(graph.names) - 1
    for row in wanted.iter_rows(named=True):
        before, after = row["before"], row["after"]
        like = after if before < 0 else before
        ends = int(nodes.measured_end[like])
        times = {"duration": row["ns"], "measured_start": ends, "measured_end": ends + row["ns"]}
        foreign = draft.add(like, name=name, around=-1, span=-1, **times)
        if before < 0:  # from when the pipeline begins elsewhere
            first = row["first"]
            draft.link(first, foreign, EdgeKind.HANDOVER, -int(nodes.duration[first]))
        else:
            draft.link(before, foreign, EdgeKind.STREAM)
        for target in [after] if after >= 0 else _next_on_lane(graph, before):
            draft.link(foreign, target, EdgeKind.STREAM)
    return draft.finish()


def _next_on_lane(graph: Graph, node: int) -> list[int]:
    """Return the successors of a node on its stream, or the end of its step."""
    edges = graph.edges
    leaving = (edges.source == node) & np.isin(edges.kind, (EdgeKind.STREAM, EdgeKind.THREAD))
    targets = edges.target[leaving]
    next_nodes: list[int] = targets[np.isin(graph.nodes.lane[targets], (graph.nodes.lane[node], -1))].tolist()
    return next_nodes
