"""The work of a rank in order: what is a product, what is backward, and which collectives come between.

In: the replay of a graph with its run, and a rank. Out: `WorkSequence`. Of a GPU the work is
that of its busiest stream; of a CPU that of its threads, without waiting, which the graph leaves out. Matrix
products, convolutions and attention are products: they have a token, equal for equal operators with equal
shapes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.classify import classify
from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.roofline import MATMULS
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.timeline import Timeline
from dpro.schema import SPANS

PRODUCT_KERNELS = ("gemm", "attention", "convolution")
ATTENTION = r"(?i)flash|attention|attn|fmha|sdpa"


class WorkSequence(NamedTuple):
    """The work of a rank in steps, in order of steps and starts, each [N].

    Attributes:
        node: of the graph.
        step: number.
        start: replayed, ns.
        ns: how long.
        token: of the first work of each product; equal for equal products; -1 of all other work.
        product: whether it is of a product.
        backward: whether a backward pass called it.
        host: whether it is the host's own time, in no operator: it is the same for any size.
    """

    node: Ints
    step: Ints
    start: Ints
    ns: Ints
    token: Ints
    product: Bools
    backward: Bools
    host: Bools

    def part(self, rows: Ints | Bools) -> WorkSequence:
        """Some rows of it."""
        return WorkSequence._make(column[rows] for column in self)


def works_on_gpu(graph: Graph) -> bool:
    """Whether GPUs did the work."""
    return bool((graph.nodes.kind == NodeKind.KERNEL).any())


def work_of(timeline: Timeline, rank: int) -> tuple[WorkSequence, list[str]]:
    """The work of a rank, and the product that each token stands for: operator and shapes, or kernel.

    Raises:
        Unanswerable: the run does not say which operators are backward.
    """
    graph = timeline.graph
    nodes = graph.nodes
    mine = (nodes.rank == rank) & (nodes.step >= 0)
    if works_on_gpu(graph):
        mine &= np.isin(nodes.kind, GPU_KINDS)
        lanes, spent = nodes.lane[mine], nodes.duration[mine]
        if lanes.size:
            mine &= nodes.lane == int(np.argmax(np.bincount(lanes, spent)))
    else:
        mine &= np.isin(nodes.kind, CPU_KINDS)
    at = np.flatnonzero(mine)
    at = at[np.lexsort([at, timeline.start[at], nodes.step[at]])]
    called = _called(graph, rank, at)
    if not called["backward"].any():
        raise Unanswerable(
            "which operators are backward is not recorded: layers are found by their forward and backward"
        )
    text, operator = called["text"], called["operator"].to_numpy()
    product = (text != "").to_numpy()
    first = product & ~_seen(operator)
    kinds, number = np.unique(text.to_numpy().astype(str), return_inverse=True)
    work = WorkSequence(
        at,
        nodes.step[at],
        timeline.start[at],
        nodes.duration[at],
        np.where(first, number, -1),
        product,
        called["backward"].to_numpy(),
        np.isin(nodes.kind[at], (NodeKind.HOST, NodeKind.GAP)),
    )
    return work, kinds.tolist()


def _seen(operator: Ints) -> Bools:
    """[N] whether it is not the first of its operator."""
    _, first = np.unique(operator, return_index=True)
    again = np.ones(operator.size, np.bool_)
    again[first] = False
    return again


def _called(graph: Graph, rank: int, at: Ints) -> pl.DataFrame:
    """Of each piece of work `text` of its product (empty: none), `operator` (its number) and `backward`."""
    assert graph.run is not None
    columns = [
        "span_id",
        "rank",
        "kind",
        "name",
        "shapes",
        "start_ns",
        "duration_ns",
        "tid",
        "forward_thread",
    ]
    spans = graph.run.table(SPANS, columns).filter(pl.col("rank") == rank)
    calls = pl.DataFrame({"row": np.arange(at.size), "span_id": graph.nodes.span[_launcher(graph, at)]})
    calls = calls.join(spans.select("span_id", "tid", "start_ns"), on="span_id").sort("start_ns")
    operators = spans.filter(pl.col("kind") == "cpu_op")
    back = _inside(calls, operators.filter(pl.col("forward_thread") > 0))
    is_product = pl.col("name").is_in(list(MATMULS)) | pl.col("name").str.contains(ATTENTION)
    made = _inside(calls, _innermost(operators.filter(is_product)))
    known = made.select("row", "operator", text=pl.col("name") + pl.col("shapes"))
    rows = (
        pl.DataFrame({"row": np.arange(at.size)})
        .join(known, on="row", how="left", maintain_order="left")
        .with_columns(
            pl.col("text").fill_null(""),
            pl.col("operator").fill_null(-2 - pl.col("row")),
            backward=pl.col("row").is_in(back["row"].implode()),
        )
    )
    return _by_kernels(graph, at, rows) if works_on_gpu(graph) else rows


def _by_kernels(graph: Graph, at: Ints, rows: pl.DataFrame) -> pl.DataFrame:
    """Of a GPU's work only kernels that multiply are of a product, also where no operator launched them."""
    multiplies = np.array([classify(name).kind in PRODUCT_KERNELS for name in graph.names], np.bool_)
    names = pl.Series(graph.names, dtype=pl.String).gather(graph.nodes.name[at])
    own = pl.Series(multiplies[graph.nodes.name[at]])
    named = pl.when(pl.col("text") == "").then(names).otherwise(pl.col("text"))
    return rows.with_columns(text=pl.when(own).then(named).otherwise(pl.lit("")))


def _launcher(graph: Graph, at: Ints) -> Ints:
    """[N] the node that launched each, or itself."""
    edges = graph.edges
    source = np.arange(graph.num_nodes)
    launch = edges.kind == EdgeKind.LAUNCH
    source[edges.target[launch]] = edges.source[launch]
    found: Ints = source[at]
    return found


def _innermost(operators: pl.DataFrame) -> pl.DataFrame:
    """Operators in which no other of them begins."""
    ordered = operators.sort("tid", "start_ns", "duration_ns", descending=[False, False, True])
    following = pl.col("start_ns").shift(-1).over("tid")
    end = pl.col("start_ns") + pl.col("duration_ns")
    return ordered.filter((following >= end).fill_null(True))


def _inside(calls: pl.DataFrame, operators: pl.DataFrame) -> pl.DataFrame:
    """Calls within operators, with `name`, `shapes` and `operator` of that which began last."""
    # Backward operators nest: the outer one ends later.
    until = (pl.col("start_ns") + pl.col("duration_ns")).cum_max().over("tid")
    ordered = operators.sort("start_ns").select(
        "tid", "start_ns", "name", "shapes", operator="span_id", until=until
    )
    return calls.join_asof(
        ordered, on="start_ns", by="tid", strategy="backward", check_sortedness=False
    ).filter(pl.col("start_ns") < pl.col("until"))
