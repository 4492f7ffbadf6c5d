"""Edits of the division of a pipeline-parallel job: its schedule, its micro-batches, the work of each stage
and rank; or of other work that fills its bubbles, and its cost for the job.

These edits need runs of whole operations, whose nodes are the forward and backward of a micro-batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable, UsageError
from dpro.replay.graph import EdgeKind, Graph, NodeKind, computed_once, once
from dpro.replay.pipeline.operations import BACKWARD_NAMES, FORWARD_NAMES, WEIGHTS_NAMES
from dpro.replay.pipeline.schedules import (
    BACKWARD,
    FORWARD,
    HALF,
    SCHEDULES,
    WEIGHTS,
    Order,
    PipelineTask,
    Schedule,
    most_in_flight,
    table_of,
)
from dpro.replay.timeline import replay
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.graph_editor import GraphEditor
from dpro.replay.whatif.graph_ops.rebuilt import RebuildPlan, rebuild, resample
from dpro.replay.whatif.graph_ops.scope import DATA_LOADING, optimizing
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.schema import COUNTERS, STEPS

NOT_OPERATIONS = (
    "the run does not consist of whole operations: record a pipeline of torch.distributed.pipelining, "
    "Megatron-core or DeepSpeed, or import a trace of forward and backward per micro-batch "
    "(operation-level Parquet or pipeline timelines)"
)
MIN_SHARE = 1 / 3  # of a backward in gradients of weights: attention scores have none


@computed_once
def computes(graph: Graph) -> pl.DataFrame:
    """Return forward and backward operations, a row each, by order of time.

    Returns:
        `node`, `rank`, `dp`, `stage`, `step`, `kind` (as in `schedules.tasks`), `ns`, `start`, `chunk` (of
        its stage), `micro_batch` and `place` (number of the chunk in the model).

    Raises:
        Unanswerable: the run does not consist of whole operations.
    """
    nodes = graph.nodes
    kinds = {name: kind for kind, names in _NAMES.items() for name in names}
    kind_of = [kinds.get(name.lower(), "") for name in graph.names]
    operations = np.flatnonzero(
        (nodes.kind == NodeKind.KERNEL) & np.array([kind != "" for kind in kind_of])[nodes.name]
    )
    if operations.size == 0 or not graph.places:
        raise Unanswerable(NOT_OPERATIONS)
    places = [graph.places[int(rank)] for rank in nodes.rank[operations]]
    rows = pl.DataFrame(
        {
            "node": operations,
            "rank": nodes.rank[operations],
            "dp": [place.dp for place in places],
            "stage": [place.stage for place in places],
            "step": nodes.step[operations],
            "kind": [kind_of[name] for name in nodes.name[operations]],
            "ns": nodes.duration[operations],
            "start": nodes.measured_start[operations],
            "around": nodes.around[operations],
        }
    ).sort("step", "rank", "start", "node")
    return _numbered(rows, graph.names)


def _numbered(rows: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Add `chunk`, `micro_batch` and `place` to operations.

    Chunks and micro-batches are read from the labels around operations; by default there is one chunk, and
    micro-batches are in order.
    """
    around = pl.Series("around_name", [*names, ""])
    written = rows.with_columns(around=around.gather(rows["around"].to_numpy() % len(around)))
    chunk = pl.col("around").str.extract(r"chunk (\d+)").cast(pl.Int64).fill_null(0)
    batch = pl.col("around").str.extract(r"micro-batch (\d+)").cast(pl.Int64)
    order = pl.int_range(pl.len()).over("step", "rank", "kind", "chunk")
    numbered = written.with_columns(chunk=chunk, batch=batch).with_columns(
        micro_batch=pl.coalesce("batch", order)
    )
    return _placed(numbered.drop("around", "batch"))


def _placed(rows: pl.DataFrame) -> pl.DataFrame:
    """Add `place` to operations: the number of their chunk in the model.

    Chunks go round the stages, or forth and back (V), as the first forwards of each chunk show.
    """
    stages = int(rows["stage"].to_numpy().max()) + 1
    second = rows.filter((pl.col("chunk") == 1) & (pl.col("kind") == FORWARD) & (pl.col("micro_batch") == 0))
    first = second.sort("start").unique(["step", "dp"], keep="first", maintain_order=True)
    is_v = int(rows["chunk"].to_numpy().max()) == 1 and bool(first.select((pl.col("stage") > 0).all()).item())
    looped_place = pl.col("chunk") * stages + pl.col("stage")
    down = pl.when(pl.col("chunk") == 1).then(2 * stages - 1 - pl.col("stage")).otherwise("stage")
    return rows.with_columns(place=down if is_v else looped_place)


_NAMES = {FORWARD: FORWARD_NAMES, BACKWARD: BACKWARD_NAMES, WEIGHTS: WEIGHTS_NAMES}


MIN_SLOWNESS = 1.1  # ratio of a rank to others of its stage in three of four steps: less is variation of work


@computed_once
def slowness(graph: Graph) -> pl.DataFrame:
    """Return how much longer each rank takes than others of its stage for the same work.

    Returns:
        `rank`, `kind`, `slowness`: 1 for a rank that is alone, or not clearly slower in most steps.
    """
    rows = computes(graph)
    ratios: list[tuple[int, str, float]] = []
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
            ratios.append((int(rank), str(kind), float(np.median(ratio)) if is_slow else 1.0))
    schema = {"rank": pl.Int64, "kind": pl.String, "slowness": pl.Float64}
    return pl.DataFrame(ratios, schema=schema, orient="row")


@dataclass(frozen=True)
class Balance(Edit):
    """Work is divided evenly over stages, or over the sequences of a step."""

    name = "balance"
    summary = "balance the work of pipeline stages, or of the sequences of a step"
    example = "balance:over=stages"
    needs = (
        "an operation-level trace; for sequences, alternatively the number of elements in each rank's batches"
    )
    assumes = "any amount of work can be moved, and a slow rank within its stage stays slow"
    source = (
        "Lin et al., OSDI 2025: uneven stages and uneven sequence lengths, replaced by their mean; tokens "
        "and zones of short and long sequences: Zeppelin (arXiv 2509.21841)"
    )
    proof = "balanced tokens of two ranks, DDP on gloo"
    effort = "code"
    of_operations = True
    over: str = key("what to balance", choices=("stages", "sequences"))
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        if _by_tokens(facts.graph):
            handed(facts.graph)
            return [cls("sequences")]
        computes(facts.graph)
        return [cls("stages"), cls("sequences")]

    def bound(self, facts: RunFacts) -> float:
        work = np.zeros(facts.graph.num_nodes, np.bool_)
        if self.over == "sequences" and _by_tokens(facts.graph):
            work[handed(facts.graph).nodes] = True
            return facts.on_path(work)
        work[computes(facts.graph)["node"].to_numpy()] = True
        return facts.on_path(work)

    def apply(self, graph: Graph) -> Graph:
        """Give each operation the mean of those it is evened out with; the sum of all work stays.

        Each chunk of a stage is compared separately, since only the last has the loss. The excess of a slow
        rank is not work that others could do: it stays there.
        """
        if self.over == "sequences" and _by_tokens(graph):
            return with_even_tokens(graph)
        rows = computes(graph).join(slowness(graph), on=["rank", "kind"], how="left", maintain_order="left")
        mean = (pl.col("ns") / pl.col("slowness")).mean()
        if self.over == "stages":
            new = pl.col("ns") * (mean.over("kind") / mean.over("kind", "place")).fill_nan(1.0)
        else:
            new = mean.over("kind", "place", "step") * pl.col("slowness")
        changed = rows.with_columns(new=new.round().cast(pl.Int64))
        duration = graph.nodes.duration.copy()
        duration[changed["node"].to_numpy()] = changed["new"].to_numpy()
        return graph.with_durations(duration)

    def is_proven(self, graph: Graph) -> bool:
        """Return whether tokens are balanced: the recorded pair has counted tokens, not whole operations."""
        return self.over == "sequences" and _by_tokens(graph)

    def bounds(self, graph: Graph) -> tuple[Graph, ...]:
        """Return, where tokens count, graphs with more and less of the work growing with them."""
        if self.over == "stages" or not _by_tokens(graph):
            return ()
        return with_even_tokens(graph, -OPEN_SHARE), with_even_tokens(graph, OPEN_SHARE)

    def notes(self, graph: Graph) -> tuple[str, ...]:
        """Report which ranks are slow, and whether that could be seen; or the tokens that they received."""
        if self.over == "sequences" and _by_tokens(graph):
            return zones(graph)
        rows = computes(graph)
        most = slowness(graph).group_by("rank").agg(pl.col("slowness").max())
        slow = most.filter(pl.col("slowness") > 1).sort("rank")
        lines = [
            f"rank {rank} takes {times:.2f} times as long as others of its stage: its excess is not spread "
            f"over them, since it is not their work; heal:rank={rank} shows its cost"
            for rank, times in slow.iter_rows()
        ]
        if rows.group_by("stage").agg(pl.col("rank").n_unique())["rank"].max() == 1:
            lines.append(
                "each stage is one rank: a slow rank cannot be distinguished from a stage with more work"
            )
        return tuple(lines)

    def describe(self) -> str:
        return "all stages have equal work" if self.over == "stages" else "sequences are spread evenly"

    def how(self) -> str:
        if self.over == "stages":
            return "move layers between stages: fewer on the last, which has the loss"
        return "sort or pack sequences so that micro-batches and ranks have equal sums of squared lengths"


def _by_tokens(graph: Graph) -> bool:
    """Return whether a run without whole operations counts the tokens of its ranks."""
    try:
        computes(graph)
    except Unanswerable:
        return graph.run is not None and TOKENS in graph.run.table(COUNTERS, ["counter"])["counter"]
    return False


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


# Even sequences: the tokens that each rank received in each step, and the dependence of its time on them.

TOKENS = "step_input_elements"
POWERS = (1.0, 2.0)
SHARES = np.linspace(0, 1, 51)
MIN_SPREAD = 0.02  # of the logarithm of tokens: less counts as even
MAX_LEFT = 0.7  # largest share of the variation of work that tokens may leave unexplained
MIN_STEPS = 4  # of a rank whose own tokens differ
OPEN_SHARE = 0.1  # uncertainty of the share


class TokenDependence(NamedTuple):
    """Tokens of ranks in each step, and the dependence of their work on them.

    Attributes:
        nodes: [K] work that grows.
        row: [K] the rank and step of each, as a row of the following arrays.
        tokens, mean: [R] of the rank, and the mean over ranks of its step.
        share: of a usual step that grows.
        power: of the growth.
        usual: tokens.
    """

    nodes: Ints
    row: Ints
    tokens: Floats
    mean: Floats
    share: float
    power: float
    usual: float

    def even(self, share: float) -> Floats:
        """Return [R] the factor on a rank's work with the mean tokens of its step."""
        return _curve(self.mean / self.usual, share, self.power) / _curve(
            self.tokens / self.usual, share, self.power
        )


def _curve(tokens: Floats, share: float, power: float) -> Floats:
    return 1 - share + share * tokens**power


@computed_once
def handed(graph: Graph) -> TokenDependence:
    """Return the tokens of ranks, and the dependence of their work on them.

    Raises:
        Unanswerable: the run does not count tokens, they are even, or work does not depend on them.
    """
    tokens = _tokens_of(graph)
    on_gpu = graph.nodes.kind == NodeKind.KERNEL
    work = on_gpu if on_gpu.any() else graph.nodes.kind == NodeKind.CPU
    work = work & ~optimizing(graph) & ~NodeSelection(within=DATA_LOADING).mask(graph)
    working = np.flatnonzero(work & (graph.nodes.step >= 0))
    spent = pl.DataFrame(
        {
            "rank": graph.nodes.rank[working],
            "step": graph.nodes.step[working],
            "ns": graph.nodes.duration[working],
            "node": working,
        }
    )
    fits = [_fitted(spent, tokens, ahead) for ahead in (0, 1)]
    usable = [fit for fit in fits if fit is not None]
    if not usable:
        raise Unanswerable(
            "the work of ranks does not follow the number of elements in their batches: sequences do "
            "not cause the imbalance"
        )
    return min(usable, key=lambda fit: fit[0])[1]


def _tokens_of(graph: Graph) -> pl.DataFrame:
    """Return `rank`, `step`, `tokens` that were loaded in the step.

    Raises:
        Unanswerable: the run does not count them, or all ranks always have as many.
    """
    counters = graph.run.table(COUNTERS) if graph.run is not None else COUNTERS.empty()
    counted = counters.filter((pl.col("counter") == TOKENS) & (pl.col("value") > 0))
    if graph.run is None or counted.is_empty():
        raise Unanswerable(
            "the run does not count the elements of ranks' batches (nor has it whole operations): "
            "`dpro record` counts the elements of batches from a DataLoader"
        )
    steps = graph.run.table(STEPS, ["rank", "step", "start_ns"])
    tokens = steps.join(
        counted.select("rank", start_ns="time_ns", tokens="value").unique(["rank", "start_ns"]),
        on=["rank", "start_ns"],
    )
    uneven = tokens.group_by("step").agg(spread=pl.col("tokens").log().max() - pl.col("tokens").log().min())
    if not (uneven["spread"] > MIN_SPREAD).any():
        raise Unanswerable(
            "the batches of all ranks have equal numbers of elements in every step: nothing is uneven"
        )
    return tokens.select(pl.col("rank").cast(pl.Int64), pl.col("step").cast(pl.Int64), "tokens")


def _fitted(spent: pl.DataFrame, tokens: pl.DataFrame, ahead: int) -> tuple[float, TokenDependence] | None:
    """Fit the growth that explains most of the variation of work; return the rest, and the fit.

    None where most of the variation stays unexplained.

    Args:
        spent: `rank`, `step`, `ns`, `node` of work.
        tokens: `rank`, `step`, `tokens`.
        ahead: steps by which batches are loaded before they are used.
    """
    used = tokens.with_columns(step=pl.col("step") + ahead)
    rows = spent.group_by("rank", "step").agg(pl.col("ns").sum()).join(used, on=["rank", "step"])
    rows = (
        rows.with_columns(mean=pl.col("tokens").mean().over("step"))
        .sort("rank", "step")
        .with_row_index("row")
    )
    if rows.is_empty():
        return None
    usual = float(rows["tokens"].median())  # type: ignore[arg-type]
    relative, work = rows["tokens"].to_numpy() / usual, rows["ns"].to_numpy().clip(1).astype(np.float64)
    rank = rows["rank"].to_numpy()
    if _centred(np.log(relative), rank).std() < MIN_SPREAD or np.bincount(rank).max() < MIN_STEPS:
        return None
    forms = [(float(share), power) for power in POWERS for share in SHARES]
    unexplained = [
        float(np.abs(_centred(np.log(work) - np.log(_curve(relative, *form).clip(1e-3)), rank)).mean())
        for form in forms
    ]
    best = int(np.argmin(unexplained))
    if unexplained[best] >= MAX_LEFT * unexplained[0]:
        return None
    grown = spent.join(rows.select("rank", "step", "row"), on=["rank", "step"])
    return unexplained[best], TokenDependence(
        grown["node"].to_numpy(),
        grown["row"].to_numpy().astype(np.int64),
        rows["tokens"].to_numpy().astype(np.float64),
        rows["mean"].to_numpy().astype(np.float64),
        *forms[best],
        usual,
    )


def _centred(values: Floats, rank: Ints) -> Floats:
    """Return [R] values minus the median of their rank, so that the speed of a rank does not count."""
    centred = values.copy()
    for number in np.unique(rank).tolist():
        centred[rank == number] -= np.median(centred[rank == number])
    return centred


def with_even_tokens(graph: Graph, off: float = 0.0) -> Graph:
    """Return the graph with the mean tokens of each step on each rank.

    Args:
        off: added to the share that grows.
    """
    inputs = handed(graph)
    duration = graph.nodes.duration.copy()
    factor = inputs.even(min(max(inputs.share + off, 0.0), 1.0))
    duration[inputs.nodes] = np.rint(duration[inputs.nodes] * factor[inputs.row]).astype(np.int64)
    return graph.with_durations(duration)


def zones(graph: Graph) -> tuple[str, ...]:
    """Report how uneven tokens are, how work depends on them, and the ranks to split long sequences over."""
    inputs = handed(graph)
    most = float((inputs.tokens / inputs.mean).max())
    over = math.ceil(most - MIN_SPREAD)
    grows = "the square of its tokens" if inputs.power > 1 else "its tokens"
    return (
        f"{inputs.share:.0%} of a usual step grows with {grows}; a rank has up to {most:.2f} times the mean "
        "of its step",
        f"short sequences stay whole on a rank; those of the longest batch would be cut over {over} ranks, "
        "if they cannot be dealt out whole: what attention between these exchanges is not included",
    )


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
