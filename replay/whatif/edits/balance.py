"""An even division of the work of a job: over the stages of its pipeline, or over the sequences of a step.

Stages need a run of whole operations, whose nodes are the forward and backward of a micro-batch; `computes`
returns these. Sequences need such a run, or the number of elements in each rank's batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind, computed_once
from dpro.replay.pipeline.operations import (
    BACKWARD,
    BACKWARD_NAMES,
    FORWARD,
    FORWARD_NAMES,
    WEIGHTS,
    WEIGHTS_NAMES,
)
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.facts import RunFacts
from dpro.replay.whatif.grammar import key
from dpro.replay.whatif.graph_ops.scope import DATA_LOADING, optimizing
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.schema import COUNTERS, STEPS

NOT_OPERATIONS = (
    "the run does not consist of whole operations: record a pipeline of torch.distributed.pipelining, "
    "Megatron-core or DeepSpeed, or import a trace of forward and backward per micro-batch "
    "(operation-level Parquet or pipeline timelines)"
)


@computed_once
def computes(graph: Graph) -> pl.DataFrame:
    """Return forward and backward operations, a row each, by order of time.

    Returns:
        `node`, `rank`, `dp`, `stage`, `step`, `kind` (`FORWARD`, `BACKWARD`, `WEIGHTS`), `ns`, `start`,
        `chunk` (of its stage), `micro_batch` and `place` (number of the chunk in the model).

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
