"""The edit that replaces a series of collectives, each waited for, by one collective.

Takes a graph; returns the graph in which the last collective of each series moves the bytes of all. Only
collectives with mostly latency in their time count. A matrix product, as in a layer, between two of them ends
a series: the second then depends on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.classify import classify
from dpro.errors import Unanswerable
from dpro.replay.cost.kernels.roofline import MATMULS
from dpro.replay.cost.transfers import fit_costs
from dpro.replay.gradient_passes import Launches
from dpro.replay.graph import CPU_KINDS, Graph, NodeKind, computed_once, is_one_of
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.selected_work import without
from dpro.replay.whatif.facts import RunFacts

# Collectives that can be merged into one. Other operations may determine what the next one moves.
JOINED = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter")
OF_LAYERS = ("gemm", "convolution", "attention")
PLACE = ["rank", "window", "step"]


@dataclass(frozen=True)
class Coalesce(Edit):
    """Series of collectives of one kind, each waited for, become one collective each."""

    name = "coalesce"
    of_torch = True
    summary = "use one collective in place of several in a row, each waited for"
    example = "coalesce"
    needs = "collectives of one operation, group and type in a row, each awaited before the next is called"
    assumes = "nothing that is sent depends on what was just received, and copies into one tensor are free"
    source = "Hockney 1994: time = latency + bytes / bandwidth, with one latency for each series"
    effort = "code"
    doubt: float = 0.2

    @classmethod
    def candidates(cls, facts: RunFacts) -> Sequence[Edit]:
        series_of(facts.graph)
        return [cls()]

    def bound(self, facts: RunFacts) -> float:
        return facts.idle_without_communication

    def apply(self, graph: Graph) -> Graph:
        """Remove all collectives of a series but the last, which moves the bytes of all."""
        series, nodes = series_of(graph), graph.nodes
        gone = np.zeros(graph.num_nodes, np.bool_)
        for column in ("call", "transfer"):
            gone[series[column].to_numpy()] = True
        duration, last = nodes.duration.copy(), series["last"].to_numpy()
        moving_ns = series["bytes"].to_numpy() * ns_per_byte(graph)[nodes.message[last]]
        np.add.at(duration, last, np.rint(moving_ns).astype(np.int64))
        return without(graph.with_durations(duration), gone)

    def describe(self) -> str:
        return "one collective in place of each series"

    def how(self) -> str:
        return "torch.cat the tensors, communicate once, and split the result; of objects, send one list"


def ns_per_byte(graph: Graph) -> Floats:
    """Return [messages] ns per additional byte, by their kind's cost, else by the fastest transfer."""
    nodes, costs = graph.nodes, fit_costs(graph)
    moved = (nodes.kind == NodeKind.TRANSFER) & (nodes.bytes > 0) & (nodes.duration > 0)
    fastest = float((nodes.duration[moved] / nodes.bytes[moved]).min()) if moved.any() else 0.0
    lines = [costs.get((message.op, message.group)) for message in graph.messages]
    return np.array([line.ns_per_byte if line and not line.bandwidth_only else fastest for line in lines])


def series_of(graph: Graph) -> pl.DataFrame:
    """Return collectives whose bytes a later one could move.

    Returns:
        One row per rank and collective: `rank`, `call`, `transfer` (nodes), `bytes`, and `last`: the node of
        the transfer that could move them.

    Raises:
        Unanswerable: there are none.
    """
    series = _find_series(graph)
    if series.is_empty():
        raise Unanswerable("no two collectives of one kind are in a row, each waited for")
    return series


@computed_once
def _find_series(graph: Graph) -> pl.DataFrame:
    nodes, launches = graph.nodes, Launches(graph)
    ops = np.array([message.op in JOINED for message in graph.messages] + [False], np.bool_)
    in_fsdp = np.array([name.startswith("FSDP::") for name in graph.names] + [False], np.bool_)
    counted = (launches.transfer >= 0) & (nodes.step[launches.source] >= 0)
    call, transfer = launches.source[counted], launches.transfer[counted]
    calls = pl.DataFrame(
        {
            **{name: getattr(nodes, name)[call] for name in PLACE},
            "call": call,
            "transfer": transfer,
            "message": nodes.message[transfer],
            "collective": nodes.collective[transfer],
            "bytes": nodes.bytes[transfer].clip(0),
            "took_ns": nodes.duration[transfer],
            "moving_ns": ns_per_byte(graph)[nodes.message[transfer]] * nodes.bytes[transfer].clip(0),
            "at": nodes.measured_start[call],
            "ends": nodes.measured_end[transfer],
            "layers": _layers_before(graph, call),
            "can": ops[nodes.message[transfer]] & ~in_fsdp[nodes.around[call]],
        }
    ).sort(*PLACE, "at", "call")
    follows = (pl.col("at") >= pl.col("ends").shift(1)) & (pl.col("layers") == pl.col("layers").shift(1))
    follows &= pl.col("can") & pl.col("can").shift(1)
    begins = ~follows.over(PLACE).fill_null(False)
    one = [*PLACE, "series", "message"]
    is_small = (pl.col("bytes") > 0) & (
        pl.col("moving_ns") < pl.col("took_ns").median().over("message", "bytes") / 2
    )
    calls = calls.with_columns(series=begins.cum_sum()).filter("can", is_small)
    calls = calls.with_columns(
        last=pl.col("transfer").last().over(one), into=pl.col("collective").last().over(one)
    )
    goes = (pl.col("into") != pl.col("collective")) & (pl.col("collective") >= 0)
    agreed = goes.all() & (pl.col("into").n_unique() == 1)
    return calls.filter(agreed.over("collective")).select("rank", "call", "transfer", "bytes", "last")


def _layers_before(graph: Graph, call: Ints) -> Ints:
    """Return [C] the number of matrix products that the rank's host began before each call."""
    nodes = graph.nodes
    of_layers = [name in MATMULS or classify(name).kind in OF_LAYERS for name in graph.names]
    products = np.flatnonzero(
        np.array([*of_layers, False], np.bool_)[nodes.name] & is_one_of(nodes.kind, CPU_KINDS)
    )
    before = np.zeros(call.size, np.int64)
    for rank in graph.ranks:
        starts = np.sort(nodes.measured_start[products[nodes.rank[products] == rank]])
        of_rank = nodes.rank[call] == rank
        before[of_rank] = np.searchsorted(starts, nodes.measured_start[call[of_rank]])
    return before
