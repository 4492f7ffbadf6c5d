"""Put other work into the bubbles of a pipeline, and say what that costs the job."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.replay.graph import EdgeKind, Graph
from dpro.replay.timeline import replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.parallelism.pipeline import computes, shape_of
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor

FOREIGN = "(foreign work)"
MS = 1e6
OVERRUN = 1.1  # times what a piece of work is said to take: the other end of the interval


@dataclass(frozen=True)
class Fill(Edit):
    """Pieces of another job's work where stages stand still for each other."""

    name = "fill"
    summary = "pieces of another job's work in the bubbles of the pipeline"
    example = "fill:ms=20,switch_ms=1,risk=0.1"
    needs = "a trace of whole operations with more than one stage"
    assumes = (
        "a piece that was begun is not interrupted and takes what is said, memory suffices for it, and it "
        "slows down no message"
    )
    source = (
        "PipeFill (arXiv 2410.07192): bubbles are planned for by their usual length, each costs a switch; "
        "what the job loses where one is shorter is replayed"
    )
    of_operations = True
    proof = "pieces of 20 ms in the bubbles of 1F1B: sleeping layers, gloo"
    effort = "code"
    ms: float = key("of one piece of foreign work", least=0.001)
    switch_ms: float = key("to switch to foreign work and back, once per bubble", 1.0, least=0.0)
    risk: float = key("part of the steps with a bubble shorter than planned", 0.1, least=0.0, most=1.0)
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Pieces as long as the work of a micro-batch."""
        rows = computes(facts.graph)
        shape_of(rows)
        return [cls(max(round(float(np.median(rows["ns"].to_numpy())) / MS, 3), 0.001))]

    def bound(self, facts: RunFacts) -> float:
        """The job itself gains nothing."""
        return 0.0

    def apply(self, graph: Graph) -> Graph:
        """Put as many pieces as fit after the work before each bubble."""
        return _filled(graph, planned(graph, self))

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Pieces that take longer than said."""
        plan = planned(graph, self)
        return (_filled(graph, plan.with_columns(ns=(pl.col("ns") * OVERRUN).round().cast(pl.Int64))),)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """How much fits."""
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
        return f"foreign work in pieces of {self.ms:g} ms in the bubbles"

    def how(self) -> str:
        return (
            "run a second process at low priority that takes pieces when a stage begins to wait (a hook "
            "before its receives), as PipeFill does"
        )


def planned(graph: Graph, fill: Fill) -> pl.DataFrame:
    """Foreign work that goes into each bubble: rows of `bubbles` with `pieces`, and `ns` with the switch."""
    gaps = bubbles(graph)
    usual = pl.col("gap").quantile(fill.risk, "lower").over("rank", "number")
    room = (usual / MS - fill.switch_ms) / fill.ms
    plan = gaps.with_columns(pieces=room.clip(0).floor().cast(pl.Int64))
    busy = (pl.col("pieces") * fill.ms + fill.switch_ms) * MS
    return plan.with_columns(ns=pl.when(pl.col("pieces") > 0).then(busy).otherwise(0).round().cast(pl.Int64))


def bubbles(graph: Graph) -> pl.DataFrame:
    """Where each rank stands still within the pipeline of a step.

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
    """The graph with foreign work after the work before each bubble; what comes next waits for it."""
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
    """What follows a node on its stream, or the end of its step."""
    edges = graph.edges
    leaving = (edges.source == node) & np.isin(edges.kind, (EdgeKind.STREAM, EdgeKind.THREAD))
    targets = edges.target[leaving]
    next_nodes: list[int] = targets[np.isin(graph.nodes.lane[targets], (graph.nodes.lane[node], -1))].tolist()
    return next_nodes
