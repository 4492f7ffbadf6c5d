"""Even sequences by what each rank was really handed: its tokens in each step, and how its time follows them.

In: a graph of a recorded job, whose run counts the elements of each batch. Out: the graph with as much work
for each rank of a step. A step's work is `1 - share + share x^power`, with `x` the tokens of the rank over
the usual ones: part of a step does not grow with its tokens, and attention grows with their square. Both are
inferred from how the work of a rank varies with its own tokens, so a slow rank stays slow. Where no counter
says what ranks were handed, this is refused.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind, once
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.replay.whatif.graph_ops.spans.scope import optimizing
from dpro.schema import COUNTERS, STEPS

TOKENS = "step_input_elements"
POWERS = (1.0, 2.0)
SHARES = np.linspace(0, 1, 51)
MIN_SPREAD = 0.02  # of the logarithm of tokens: less, and nothing is uneven
MAX_LEFT = 0.7  # of how work varies, that tokens must leave unexplained at most
MIN_STEPS = 4  # of a rank, in which its own tokens differ
OPEN_SHARE = 0.1  # by which the share may be off


class Handed(NamedTuple):
    """What ranks were handed in each step, and how their work grows with it.

    Attributes:
        nodes: [K] work that grows.
        row: [K] the rank and step of each, as a row of those below.
        tokens, mean: [R] of the rank, and the mean over ranks of its step.
        share: of a usual step that grows.
        power: with which.
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
        """[R] how many times as long a rank's work takes with the mean tokens of its step."""
        return _curve(self.mean / self.usual, share, self.power) / _curve(
            self.tokens / self.usual, share, self.power
        )


def _curve(tokens: Floats, share: float, power: float) -> Floats:
    return 1 - share + share * tokens**power


def handed(graph: Graph) -> Handed:
    """What ranks were handed, and how their work follows it.

    Raises:
        Unanswerable: the run does not count it, it is even, or work does not follow it.
    """
    nodes = graph.nodes
    columns = (nodes.duration, nodes.kind, nodes.rank, nodes.step, nodes.name, graph.run)
    return once(graph, "handed sequences", columns, lambda: _handed(graph))


def _handed(graph: Graph) -> Handed:
    from dpro.replay.whatif.edits.training_loop import DATA_LOADING

    tokens = _tokens_of(graph)
    on_gpu = graph.nodes.kind == NodeKind.KERNEL
    work = on_gpu if on_gpu.any() else graph.nodes.kind == NodeKind.CPU
    work = work & ~optimizing(graph) & ~NodeSelection(within=DATA_LOADING).mask(graph)
    at = np.flatnonzero(work & (graph.nodes.step >= 0))
    spent = pl.DataFrame(
        {
            "rank": graph.nodes.rank[at],
            "step": graph.nodes.step[at],
            "ns": graph.nodes.duration[at],
            "node": at,
        }
    )
    found = [_fitted(spent, tokens, ahead) for ahead in (0, 1)]
    known = [each for each in found if each is not None]
    if not known:
        raise Unanswerable(
            "how long ranks work does not follow how many elements their batches have: work is not uneven "
            "because of its sequences"
        )
    return min(known, key=lambda each: each[0])[1]


def _tokens_of(graph: Graph) -> pl.DataFrame:
    """`rank`, `step`, `tokens` that were loaded in the step.

    Raises:
        Unanswerable: the run does not count them, or all ranks always have as many.
    """
    counters = graph.run.table(COUNTERS) if graph.run is not None else COUNTERS.empty()
    counted = counters.filter((pl.col("counter") == TOKENS) & (pl.col("value") > 0))
    if graph.run is None or counted.is_empty():
        raise Unanswerable(
            "the run does not count what ranks were handed (it consists of no whole operations, either): "
            "`dpro record` counts the elements of batches from a DataLoader"
        )
    steps = graph.run.table(STEPS, ["rank", "step", "start_ns"])
    tokens = steps.join(
        counted.select("rank", start_ns="time_ns", tokens="value").unique(["rank", "start_ns"]),
        on=["rank", "start_ns"],
    )
    uneven = tokens.group_by("step").agg(spread=pl.col("tokens").log().max() - pl.col("tokens").log().min())
    if not (uneven["spread"] > MIN_SPREAD).any():
        raise Unanswerable("the batches of all ranks have as many elements in every step: nothing is uneven")
    return tokens.select(pl.col("rank").cast(pl.Int64), pl.col("step").cast(pl.Int64), "tokens")


def _fitted(spent: pl.DataFrame, tokens: pl.DataFrame, ahead: int) -> tuple[float, Handed] | None:
    """The growth that leaves least of how work varies, and how much; None where that is most of it.

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
    left = [
        float(np.abs(_centred(np.log(work) - np.log(_curve(relative, *form).clip(1e-3)), rank)).mean())
        for form in forms
    ]
    best = int(np.argmin(left))
    if left[best] >= MAX_LEFT * left[0]:
        return None
    mine = spent.join(rows.select("rank", "step", "row"), on=["rank", "step"])
    return left[best], Handed(
        mine["node"].to_numpy(),
        mine["row"].to_numpy().astype(np.int64),
        rows["tokens"].to_numpy().astype(np.float64),
        rows["mean"].to_numpy().astype(np.float64),
        *forms[best],
        usual,
    )


def _centred(values: Floats, rank: Ints) -> Floats:
    """[R] values, less the median of their rank: how fast a rank is does not count."""
    left = values.copy()
    for each in np.unique(rank).tolist():
        left[rank == each] -= np.median(left[rank == each])
    return left


def with_even_tokens(graph: Graph, off: float = 0.0) -> Graph:
    """The graph with the mean tokens of each step on each rank.

    Args:
        off: by how much the share that grows may be off.
    """
    known = handed(graph)
    duration = graph.nodes.duration.copy()
    factor = known.even(min(max(known.share + off, 0.0), 1.0))
    duration[known.nodes] = np.rint(duration[known.nodes] * factor[known.row]).astype(np.int64)
    return graph.with_durations(duration)


def zones(graph: Graph) -> tuple[str, ...]:
    """How uneven tokens are, how work follows them, and over how many ranks long sequences have to be cut."""
    known = handed(graph)
    most = float((known.tokens / known.mean).max())
    over = math.ceil(most - MIN_SPREAD)
    grows = "the square of its tokens" if known.power > 1 else "its tokens"
    return (
        f"{known.share:.0%} of a usual step grows with {grows}; a rank has up to {most:.2f} times the mean "
        "of its step",
        f"short sequences stay whole on a rank; those of the longest batch would be cut over {over} ranks, "
        "if they cannot be dealt out whole: what attention between these exchanges is not included",
    )
