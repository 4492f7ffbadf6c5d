"""What hosts do for long: they stand still for want of a core, or work for milliseconds before one launch.

In: a job, or the spans of its steps. Out: a `StandStill`, `DearLaunches`, or None where it is neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools
from dpro.replay.graph import Graph, NodeKind, is_of
from dpro.replay.whatif.job import ReplayedJob
from dpro.units import NS_PER_MS

STILL_NS = 2 * NS_PER_MS  # a host that ends nothing for so long in a call of microseconds stands still
USUALLY_NS = 200_000  # a call that takes less, usually
STILL = 0.2  # share of the step from which on standing still is the cause
FEW = 4  # calls of a name, from which on it is known how long one usually takes
MOSTLY = 0.4  # of the pauses: a name that has more of them is itself the cause
DEAR_NS = 500_000  # host time before one launch
DEAR = 0.4  # of the host's time: what one kernel's launches take of it


class StandStill(NamedTuple):
    """Hosts that stand still.

    Attributes:
        share: of the step, mean of ranks.
        at_once: how many ranks do at the same time, mean over the time when any does.
        ended: the change that ends it.
    """

    share: float
    at_once: float
    ended: UsualCalls


@dataclass(frozen=True)
class UsualCalls:
    """Calls in which the host stands still take what calls of their name usually do.

    Attributes:
        usual_ns: by name.
    """

    usual_ns: Mapping[str, int]

    def apply(self, graph: Graph) -> Graph:
        """As of `RankChange`."""
        nodes = graph.nodes
        usual_ns = np.array([self.usual_ns.get(name, -1) for name in graph.names])[nodes.name]
        still = _is_call(graph) & (nodes.duration >= STILL_NS) & (usual_ns >= 0)
        return graph.with_durations(np.where(still, usual_ns, nodes.duration))


class DearLaunches(NamedTuple):
    """A kernel, how many times a step and rank it is launched, and ns of the host before each."""

    kernel: str
    per_step: float
    took_ns: float


def dear_launches(spans: pl.DataFrame, rank_steps: int, step_ns: float) -> DearLaunches | None:
    """The kernel before whose launches the host spends much of the step; None where it does before none.

    Args:
        spans: table `spans`, as far as they began in the steps.
        rank_steps: how many steps of ranks these are.
        step_ns: how long one takes.
    """
    launches = (
        spans.filter((pl.col("kind") == "runtime") & (pl.col("correlation") >= 0))
        .select("rank", "tid", "correlation", "start_ns", end=pl.col("start_ns") + pl.col("duration_ns"))
        .sort("rank", "tid", "start_ns")
    )
    kernels = (
        spans.filter(pl.col("kind") == "kernel")
        .select("rank", "correlation", "name")
        .unique(["rank", "correlation"])
    )
    before = (pl.col("end") - pl.col("end").shift(1).over("rank", "tid")).alias("took_ns")
    named = launches.with_columns(before).drop_nulls("took_ns").join(kernels, on=["rank", "correlation"])
    dear = (
        named.filter(pl.col("took_ns") >= DEAR_NS)
        .group_by("name")
        .agg(
            count=pl.len() / rank_steps,
            mean_ns=pl.col("took_ns").mean(),
            total_ns=pl.col("took_ns").sum() / rank_steps,
        )
        .sort("total_ns", descending=True)
    )
    if dear.is_empty() or dear["count"][0] < 3 or dear["total_ns"][0] < DEAR * step_ns:
        return None
    return DearLaunches(str(dear["name"][0]), float(dear["count"][0]), float(dear["mean_ns"][0]))


def stand_still(job: ReplayedJob, step_ns: float, num_steps: int) -> StandStill | None:
    """How long hosts stand still, where that is what they mostly do: they have no core.

    Calls of many names that usually take microseconds take milliseconds now and then, on most ranks.

    Args:
        step_ns: how long a step takes.
        num_steps: how many the job has.
    """
    calls = pl.concat(job.map_ranks(_calls))
    usual = calls.group_by("name").agg(usual_ns=pl.col("took_ns").median(), count=pl.len())
    pauses = calls.join(usual, on="name").filter(
        (pl.col("usual_ns") < USUALLY_NS) & (pl.col("count") >= FEW) & (pl.col("took_ns") >= STILL_NS)
    )
    paused_ns, ranks = float(pauses["took_ns"].sum()), len(job.graph.ranks)
    share = paused_ns / max(step_ns * num_steps * ranks, 1.0)
    if share < STILL or ranks < 2 or pauses["rank"].n_unique() <= ranks / 2:
        return None
    of_one_name = pauses.group_by("name").agg(pl.col("took_ns").sum())["took_ns"].max()
    if float(of_one_name or 0) > MOSTLY * paused_ns:  # type: ignore[arg-type]
        return None
    starts = pauses["start"].to_numpy()
    moments = np.concatenate([starts, starts + pauses["took_ns"].to_numpy()])
    order = np.argsort(moments, kind="stable")
    standing = np.cumsum(np.repeat([1, -1], starts.size)[order])[:-1]
    between = np.diff(moments[order])
    some = standing > 0
    at_once = float((standing * between)[some].sum() / max(between[some].sum(), 1))
    usual_ns = dict(pauses.select("name", pl.col("usual_ns").cast(pl.Int64)).iter_rows())
    return StandStill(share, at_once, UsualCalls(usual_ns))


def _calls(graph: Graph) -> pl.DataFrame:
    """Calls of the host in steps, by their own time: `rank`, `name`, `start`, `took_ns`."""
    nodes = graph.nodes
    calls = np.flatnonzero(_is_call(graph) & (nodes.step >= 0))
    return pl.DataFrame(
        {
            "rank": nodes.rank[calls],
            "name": pl.Series(graph.names, dtype=pl.String).gather(nodes.name[calls]),
            "start": nodes.measured_start[calls],
            "took_ns": nodes.duration[calls],
        }
    )


def _is_call(graph: Graph) -> Bools:
    """[N] operators and calls of the runtime."""
    return is_of(graph.nodes.kind, (NodeKind.CPU, NodeKind.RUNTIME))
