"""What a job moved between its ranks, and what its steps would save if some of it were faster.

In: a graph. Out: one row per transfer, without waiting, and its replay with other transfers. Traffic of calls
that were timed without a graph is in `timed_calls.py`; what is slow is said elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.detect.baseline import Baseline
from dpro.errors import DproError, Unanswerable
from dpro.replay.cost.fabric.placement import placed
from dpro.replay.graph import EdgeKind, Graph, NodeKind
from dpro.replay.whatif.graph_ops.selected import hosts_of
from dpro.replay.whatif.graph_ops.shared_fabric import with_links_apart
from dpro.store import Run
from dpro.units import format_duration

MESSAGE = "message"


class Healed(NamedTuple):
    """What steps would save.

    Attributes:
        steps: [T] which.
        saved: [T] ns.
        base: [T] ns that they take.
    """

    steps: Ints
    saved: Floats
    base: Floats


@dataclass(frozen=True)
class Traffic:
    """What ranks exchange.

    Attributes:
        transfers: as `recorded_transfers` returns them.
        hosts: which host each rank is on, as far as known.
        healed: what steps would save if transfers (`instance`) took this many `times` as long.
        replayed: whether that is known; else it is the most: other work may hide some of it.
        run: which says where its ranks stand; None where there is none.
        apart: the transfers as they would be if connections of the job that meet between switches had a cable
            each; None where it is not known which meet.
    """

    transfers: pl.DataFrame
    hosts: Mapping[int, str]
    healed: Callable[[pl.DataFrame], Healed]
    replayed: bool
    run: Run | None = None
    apart: Callable[[], pl.DataFrame | None] = lambda: None

    def gain_in_words(self, like: str, steps_take: str, saved_ns: float, step_ns: float) -> str:
        """What would be saved if slow transfers were as fast as others, as a line of evidence."""
        if self.replayed:
            return (
                f"replayed with these transfers as fast as {like}, {steps_take} "
                f"{format_duration(step_ns - saved_ns)} instead of {format_duration(step_ns)}"
            )
        return (
            f"with these transfers as fast as {like}, a step of {format_duration(step_ns)} would save "
            f"{format_duration(saved_ns)} at most: how much of it other work hides, deep windows would show"
        )


def traffic_of(baseline: Baseline) -> Traffic:
    """The traffic of a graph, and how its replay changes with it."""
    graph = baseline.graph
    saved = partial(replayed_with, baseline)
    transfers, hosts, apart = recorded_transfers(graph), host_of(graph), partial(transfers_apart, graph)
    return Traffic(transfers, hosts, saved, replayed=True, run=graph.run, apart=apart)


def transfers_apart(graph: Graph) -> pl.DataFrame | None:
    """The transfers as they would be if connections that meet between switches had a cable each.

    None where paths are not known, or the topology does not fit.
    """
    try:
        at = placed(graph)
        return None if at.known_missing else recorded_transfers(with_links_apart(graph, at))
    except DproError:
        return None


def transfers_of(graph: Graph) -> pl.DataFrame:
    """Each collective whose members are all recorded, in steps.

    Returns:
        `instance`, `op`, `bytes`, `num_ranks`, `num_hosts`, `members` (ranks as text, the sender of a message
        first), `step`, `transfer_ns` (of the member that took the least: the others' may be waiting).
    """
    return recorded_transfers(graph).filter("whole").drop("whole")


def recorded_transfers(graph: Graph) -> pl.DataFrame:
    """The same of all collectives of which at least two members are recorded, and whether `whole`.

    Where some are not, the time holds what the recorded ones waited for the others.
    """
    nodes, edges = graph.nodes, graph.edges
    met = np.zeros(graph.num_nodes, np.bool_)
    met[edges.target[edges.kind == EdgeKind.RENDEZVOUS]] = True
    chosen = np.flatnonzero(
        (nodes.kind == NodeKind.TRANSFER) & met & (nodes.message >= 0) & (nodes.step >= 0)
    )
    message = nodes.message[chosen]
    op = pl.Series([each.op for each in graph.messages], dtype=pl.String).gather(message)
    size = pl.Series([each.num_ranks for each in graph.messages], dtype=pl.Int64).gather(message)
    hosts = host_of(graph)
    host = pl.Series(nodes.rank[chosen]).replace_strict(hosts, default="", return_dtype=pl.String)
    rows = pl.DataFrame(
        {
            "instance": nodes.collective[chosen],
            "rank": nodes.rank[chosen],
            "host": host,
            "receives": op.str.starts_with("recv"),
            "op": op.replace({"send": MESSAGE, "recv": MESSAGE}),
            "size": size,
            "bytes": nodes.bytes[chosen],
            "step": nodes.step[chosen],
            "transfer_ns": nodes.duration[chosen],
        }
    )
    ordered = pl.col("rank").sort_by("receives", "rank").cast(pl.String).str.join(",")
    is_message = pl.col("op").first() == MESSAGE
    return (
        rows.group_by("instance")
        .agg(
            pl.col("op").first(),
            pl.col("bytes").max(),
            num_ranks=pl.len().cast(pl.Int64),
            num_hosts=pl.col("host").n_unique().cast(pl.Int64),
            members=ordered,
            step=pl.col("step").min(),
            transfer_ns=pl.col("transfer_ns").min(),
            whole=(pl.len() == pl.col("size").max()) | is_message,
        )
        .filter((pl.col("num_ranks") > 1) & (pl.col("transfer_ns") > 0))
        .sort("instance")
    )


def host_of(graph: Graph) -> dict[int, str]:
    """Which host each rank is on, as far as the run shows."""
    try:
        return hosts_of(graph)
    except Unanswerable:
        return {}


def replayed_with(baseline: Baseline, factor: pl.DataFrame) -> Healed:
    """Replay with other transfers.

    Args:
        factor: `instance` of collectives, and how many `times` as long their transfers take.
    """
    graph = baseline.graph
    scale = np.ones(int(graph.nodes.collective.max()) + 2)
    scale[factor["instance"].to_numpy()] = factor["times"].to_numpy()
    nodes = graph.nodes
    moved = (nodes.kind == NodeKind.TRANSFER) & (nodes.collective >= 0)
    duration = np.where(moved, np.rint(nodes.duration * scale[nodes.collective]), nodes.duration)
    base, changed = (
        baseline.step_ns,
        baseline.changed_step_ns(graph.with_durations(duration.astype(np.int64))),
    )
    steps = np.unique(nodes.step[nodes.step >= 0])
    return Healed(steps, (base - changed).astype(np.float64), base.astype(np.float64))
