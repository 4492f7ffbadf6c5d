"""Change how a pipeline-parallel job is divided: its schedule, its micro-batches, and the work of each stage
and rank.

These edits are about runs of whole operations, whose nodes are the forward and backward of a micro-batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import polars as pl

from dpro.arrays import Bools
from dpro.errors import Unanswerable
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.pipeline.operations import BACKWARD_NAMES, FORWARD_NAMES
from dpro.replay.whatif.edit import Edit, key
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.schedules import BACKWARD, FORWARD, SCHEDULES, WEIGHTS, Order

MESSAGES = ("send", "recv")
HALF = 0.5  # of a backward goes into the gradients of weights: as many products as for those of inputs


def computes(graph: Graph) -> pl.DataFrame:
    """Forward and backward operations: `node`, `rank`, `dp`, `stage`, `step`, `kind`, `ns`, by order of time.

    Raises:
        Unanswerable: the run does not consist of whole operations.
    """
    nodes = graph.nodes
    kinds = {
        name: kind for kind, names in ((FORWARD, FORWARD_NAMES), (BACKWARD, BACKWARD_NAMES)) for name in names
    }
    kind_of = [kinds.get(name.lower(), "") for name in graph.names]
    at = np.flatnonzero(
        (nodes.kind == NodeKind.KERNEL) & np.array([kind != "" for kind in kind_of])[nodes.name]
    )
    if at.size == 0 or not graph.places:
        raise Unanswerable(
            "the run does not consist of whole operations: import a trace of forward and backward per "
            "micro-batch (`dpro import` of operation-level Parquet or pipeline timelines)"
        )
    places = [graph.places[int(rank)] for rank in nodes.rank[at]]
    return pl.DataFrame(
        {
            "node": at,
            "rank": nodes.rank[at],
            "dp": [place.dp for place in places],
            "stage": [place.stage for place in places],
            "step": nodes.step[at],
            "kind": [kind_of[name] for name in nodes.name[at]],
            "ns": nodes.duration[at],
            "start": nodes.measured_start[at],
        }
    ).sort("step", "rank", "start", "node")


MIN_SLOWNESS = (
    1.1  # of a rank to the others of its stage, in three steps of four: less is how its work varies
)


def slowness(rows: pl.DataFrame) -> pl.DataFrame:
    """How much longer each rank takes than others of its stage do for the same work.

    Args:
        rows: as from `computes`.

    Returns:
        `rank`, `kind`, `slowness`: 1 of a rank that is not clearly slower in most steps, or alone.
    """
    found: list[tuple[int, str, float]] = []
    per_step = rows.group_by("stage", "kind", "rank", "step").agg(pl.col("ns").sum())
    per_step = per_step.sort("stage", "kind", "rank", "step")
    for (_, kind), same in per_step.group_by("stage", "kind", maintain_order=True):
        table = same.pivot("rank", index="step", values="ns").drop("step")
        times = table.fill_null(0).to_numpy().astype(np.float64)
        for column, rank in enumerate(table.columns):
            others = np.delete(times, column, axis=1)
            usual = np.median(others, axis=1) if others.size else times[:, column]
            ratio = times[:, column][usual > 0] / usual[usual > 0]
            is_slow = ratio.size and np.quantile(ratio, 0.25) > MIN_SLOWNESS
            found.append((int(rank), str(kind), float(np.median(ratio)) if is_slow else 1.0))
    schema = {"rank": pl.Int64, "kind": pl.String, "slowness": pl.Float64}
    return pl.DataFrame(found, schema=schema, orient="row")


@dataclass(frozen=True)
class Balance(Edit):
    """The same work, divided evenly over stages, or over the sequences of a step."""

    name = "balance"
    summary = "stages, or the sequences of a step, have even work"
    example = "balance:over=stages"
    needs = "a trace of whole operations"
    assumes = "work can be moved in any amount, and a rank that is slow within its stage stays as slow"
    source = "Lin et al., OSDI 2025: uneven stages and uneven sequence lengths, replaced by their mean"
    effort = "code"
    over: str = key("what is evened out", choices=("stages", "sequences"))
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        computes(facts.graph)
        return [cls("stages"), cls("sequences")]

    def bound(self, facts: RunFacts) -> float:
        work = np.zeros(facts.graph.num_nodes, np.bool_)
        work[computes(facts.graph)["node"].to_numpy()] = True
        return facts.on_path(work)

    def apply(self, graph: Graph) -> Graph:
        """Give each operation the mean of those it is evened out with; the sum of all work stays.

        What a slow rank takes longer is no work that others could do: it stays with it.
        """
        rows = computes(graph)
        rows = rows.join(slowness(rows), on=["rank", "kind"], how="left", maintain_order="left")
        mean = (pl.col("ns") / pl.col("slowness")).mean()
        if self.over == "stages":
            own, all_stages = mean.over("kind", "stage"), mean.over("kind")
            new = pl.col("ns") * (all_stages / own).fill_nan(1.0)
        else:
            new = mean.over("kind", "stage", "step") * pl.col("slowness")
        changed = rows.with_columns(new=new.round().cast(pl.Int64))
        duration = graph.nodes.duration.copy()
        duration[changed["node"].to_numpy()] = changed["new"].to_numpy()
        return graph.with_durations(duration)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Which ranks are slow by themselves, and whether that could be seen."""
        rows = computes(graph)
        most = slowness(rows).group_by("rank").agg(pl.col("slowness").max())
        slow = most.filter(pl.col("slowness") > 1).sort("rank")
        lines = [
            f"rank {rank} takes {times:.2f} times as long as others of its stage: that is not spread over "
            f"them, since it is no work of theirs; heal:rank={rank} says what it costs"
            for rank, times in slow.iter_rows()
        ]
        if rows.group_by("stage").agg(pl.col("rank").n_unique())["rank"].max() == 1:
            lines.append("each stage is one rank: a slow one cannot be distinguished from one with more work")
        return tuple(lines)

    def describe(self) -> str:
        return "all stages have as much work" if self.over == "stages" else "sequences are spread evenly"

    def how(self) -> str:
        if self.over == "stages":
            return "move layers between stages: fewer on the last, which has the loss"
        return "sort or pack sequences so that micro-batches and ranks have even sums of squared lengths"


@dataclass(frozen=True)
class Pipeline(Edit):
    """Another schedule, another number of micro-batches of the same batch, or both."""

    name = "pipeline"
    summary = "another pipeline schedule or number of micro-batches"
    example = "pipeline:schedule=1f1b,micro_batches=16"
    needs = "a trace of whole operations with more than one stage"
    assumes = (
        "work is proportional to the size of a micro-batch, messages between stages are too and are never in "
        "each other's way, and memory suffices"
    )
    source = "the published orders: GPipe, 1F1B, interleaved (Megatron-LM), zero-bubble (ZB-H1), replayed"
    effort = "line"
    schedule: str = key("in which order stages work", "1f1b", choices=tuple(SCHEDULES))
    micro_batches: int | None = key("how many there are; as recorded without", None, least=1)
    chunks: int | None = key("of the model per stage, for interleaved", None, least=1)
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        """Schedules with less of a bubble, and more micro-batches."""
        rows = computes(facts.graph)
        if int(rows["stage"].to_numpy().max()) < 1:
            raise Unanswerable("the run has one stage: there is no pipeline")
        recorded = _recorded_batches(rows)
        more = [cls("1f1b", times * recorded) for times in (2, 4)]
        return [cls("zero-bubble"), cls("interleaved", chunks=2), *more]

    def bound(self, facts: RunFacts) -> float:
        besides = np.ones(facts.graph.num_nodes, np.bool_)
        besides[computes(facts.graph)["node"].to_numpy()] = False
        return facts.idle(besides)

    def apply(self, graph: Graph) -> Graph:
        """Take the operations of the recorded schedule out, and put those of the wanted one in."""
        rows = computes(graph)
        num_stages = int(rows["stage"].to_numpy().max()) + 1
        if num_stages < 2:
            raise Unanswerable("the run has one stage: there is no pipeline")
        recorded = _recorded_batches(rows)
        wanted = self.micro_batches or recorded
        orders = SCHEDULES[self.schedule](num_stages, wanted, self.chunks or 1)
        if self.schedule != "zero-bubble" and self.chunks is None and _is_order(rows, orders):
            return graph
        return rebuild(graph, rows, orders, recorded / wanted, self.chunks or 1)

    def describe(self) -> str:
        batches = f" with {self.micro_batches} micro-batches" if self.micro_batches else ""
        article = "an" if self.schedule == "interleaved" else "a"
        return f"{article} {self.schedule} pipeline{batches}"

    def how(self) -> str:
        names = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B"}
        name = names.get(self.schedule, "ScheduleInterleavedZeroBubble")
        return f"torch.distributed.pipelining.{name}(stage, n_microbatches={self.micro_batches or '…'})"


def _recorded_batches(rows: pl.DataFrame) -> int:
    """How many micro-batches a step has.

    Raises:
        Unanswerable: stages have several chunks, or ranks and steps differ.
    """
    counts = rows.group_by("rank", "step", "kind").len()["len"].unique().to_list()
    if len(counts) != 1:
        raise Unanswerable("steps or ranks differ in how many forward and backward operations they have")
    return int(counts[0])


def _is_order(rows: pl.DataFrame, orders: list[Order]) -> bool:
    """Whether every rank works in this order already."""
    for (_, _, stage), own in rows.group_by("step", "rank", "stage", maintain_order=True):
        if own["kind"].to_list() != [task.kind for task in orders[int(stage)]]:
            return False
    return True


def rebuild(graph: Graph, rows: pl.DataFrame, orders: list[Order], smaller: float, num_chunks: int) -> Graph:
    """The graph with the computes of these orders in place of those that were recorded.

    Args:
        graph: the graph.
        rows: its computes.
        orders: of the stages.
        smaller: the size of the new micro-batches to that of the recorded ones.
        num_chunks: per stage.
    """
    draft = GraphEditor(graph)
    replaced = np.zeros(graph.num_nodes, np.bool_)
    replaced[rows["node"].to_numpy()] = True
    passed, late = _messages(graph), _delays_of(graph, replaced)
    draft.gone |= replaced | passed | late | _delays_of(graph, passed)
    message_ns = _message_ns(graph, replaced, passed) * smaller
    launch_ns = int(graph.nodes.duration[late].sum()) / rows.height
    borders = _borders(graph, rows, draft.gone)
    last = num_chunks * len(orders) - 1
    for _, step in rows.group_by("step", "dp", maintain_order=True):
        made: dict[tuple[str, int, int], int] = {}
        for (rank, stage, number), own in step.group_by("rank", "stage", "step", maintain_order=True):
            order = orders[int(stage)]
            nodes = _insert(draft, own, order, num_chunks, launch_ns)
            for source, target, kind, lag in borders[int(number), int(rank)]:
                draft.link(*((nodes[-1], target) if source < 0 else (source, nodes[0])), kind, lag)
            for task, node in zip(order, nodes):
                made[task.kind, task.batch, task.chunk * len(orders) + int(stage)] = node
        _hand_over(draft, made, last, round(message_ns))
    return draft.finish()


def _hand_over(draft: GraphEditor, made: dict[tuple[str, int, int], int], last: int, message_ns: int) -> None:
    """Forward goes up the chunks of all stages, turns at the last, and backward goes down."""
    for (kind, batch, at), node in made.items():
        follows = {FORWARD: (FORWARD, batch, at + 1), BACKWARD: (BACKWARD, batch, at - 1)}.get(kind)
        if kind == FORWARD and at == last:
            draft.link(node, made[BACKWARD, batch, at], EdgeKind.STREAM)
        elif follows in made:
            draft.link(node, made[follows], EdgeKind.HANDOVER, message_ns)


def _insert(
    draft: GraphEditor, own: pl.DataFrame, order: Order, num_chunks: int, launch_ns: float
) -> list[int]:
    """The computes of one rank in one step, behind one another.

    A new micro-batch takes the time of the stretch of recorded ones that it covers.
    """
    num_batches = 1 + max(task.batch for task in order)
    times, like = {}, {}
    for kind in (FORWARD, BACKWARD):
        recorded = own.filter(pl.col("kind") == kind)
        ends = np.append(0.0, np.cumsum(recorded["ns"].to_numpy()))
        at = np.linspace(0, recorded.height, num_batches + 1)
        times[kind] = np.diff(np.interp(at, np.arange(recorded.height + 1), ends)) / num_chunks
        like[kind] = int(recorded["node"][0])
    split = any(task.kind == WEIGHTS for task in order)
    share = {FORWARD: 1.0, BACKWARD: HALF if split else 1.0, WEIGHTS: HALF}
    nodes = []
    for task in order:
        kind = FORWARD if task.kind == FORWARD else BACKWARD
        duration = round(float(times[kind][task.batch]) * share[task.kind] + launch_ns)
        nodes.append(draft.add(like[kind], duration=duration))
    for one, other in pairwise(nodes):
        draft.link(one, other, EdgeKind.STREAM)
    return nodes


Border = tuple[int, int, EdgeKind, int]


def _borders(graph: Graph, rows: pl.DataFrame, gone: Bools) -> dict[tuple[int, int], list[Border]]:
    """Edges between the computes of each (step, rank) and what stays: source, target, kind, lag.

    -1 stands for the computes. What lay between them comes before the first; only what began with or after
    the last comes after that.
    """
    nodes, edges = graph.nodes, graph.edges
    owner = dict(zip(rows["node"].to_list(), rows.select("step", "rank").iter_rows()))
    replaced = np.isin(np.arange(graph.num_nodes), rows["node"].to_numpy())
    latest = {
        (step, rank): at
        for step, rank, at in rows.group_by("step", "rank").agg(pl.col("start").max()).iter_rows()
    }
    found: dict[tuple[int, int], list[Border]] = defaultdict(list)
    for edge in np.flatnonzero(replaced[edges.target] & ~gone[edges.source]).tolist():
        source, target = int(edges.source[edge]), int(edges.target[edge])
        if nodes.measured_start[source] < latest[owner[target]]:
            found[owner[target]].append((source, -1, EdgeKind(edges.kind[edge]), int(edges.lag[edge])))
    for edge in np.flatnonzero(replaced[edges.source] & ~gone[edges.target]).tolist():
        source, target = int(edges.source[edge]), int(edges.target[edge])
        if nodes.measured_start[target] >= latest[owner[source]]:
            found[owner[source]].append(
                (-1, target, EdgeKind(edges.kind[edge]), min(int(edges.lag[edge]), 0))
            )
    return found


def _messages(graph: Graph) -> Bools:
    """[N] sends and receives between stages, and where they meet."""
    nodes = graph.nodes
    between_stages = np.array([message.op in MESSAGES for message in graph.messages] + [False], np.bool_)
    moves = between_stages[nodes.message] & (nodes.kind == NodeKind.TRANSFER)
    found: Bools = (nodes.collective >= 0) & np.isin(nodes.collective, nodes.collective[moves])
    return found


def _delays_of(graph: Graph, work: Bools) -> Bools:
    """[N] launch delays of this work."""
    edges = graph.edges
    delays = np.zeros(graph.num_nodes, np.bool_)
    delays[edges.source[work[edges.target]]] = True
    found: Bools = delays & (graph.nodes.kind == NodeKind.DELAY)
    return found


def _message_ns(graph: Graph, replaced: Bools, passed: Bools) -> float:
    """How long what one stage computed takes to the next: as messages, or as what was seen to pass."""
    moves = passed & (graph.nodes.kind == NodeKind.TRANSFER)
    if moves.any():
        return float(np.median(graph.nodes.duration[moves]))
    edges = graph.edges
    handed = (edges.kind == EdgeKind.HANDOVER) & replaced[edges.source] & replaced[edges.target]
    return float(np.median(np.maximum(edges.lag[handed], 0))) if handed.any() else 0.0
