"""Why a limit limits: what was found in the run, with names and numbers from it.

In: `JobFacts`. Out: a few words, or nothing where the run does not show it. Waiting is traced to what the
host did: many cheap launches, a few that cost milliseconds each, hosts that stand still.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools
from dpro.replay.graph import Graph, NodeKind, is_of
from dpro.units import NS_PER_MS, format_duration
from dpro.verdict.facts import JobFacts
from dpro.verdict.kernel_names import short_kernel
from dpro.verdict.limits import COMMUNICATION, COMPUTE, HOST

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


def cause_of(facts: JobFacts, limit: str) -> str:
    """What is behind a limit, in words; empty where the run does not show it."""
    if limit == HOST:
        still = stand_still(facts)
        if still is None:
            return _launching(facts)
        ranks = len(facts.job.graph.ranks)
        return (
            f"hosts stand still for {still.share:.0%} of it, {still.at_once:.0f} of {ranks} at a time: "
            "they do not get a core"
        )
    if limit == COMPUTE:
        return ", ".join(
            f"{short_kernel(name)} {facts.share_of([name]):.0%}" for name in _longest(facts, False)
        )
    if limit == COMMUNICATION:
        return ", ".join(map(short_kernel, _longest(facts, True)[:1]))
    return ""


def _longest(facts: JobFacts, communication: bool) -> list[str]:
    of_kind = (pl.col("family") == "communication") == communication
    return facts.kernels.filter(of_kind)["name"].head(2).to_list()


def _launching(facts: JobFacts) -> str:
    dear = dear_launches(facts)
    if dear is not None:
        name, count, took_ns = dear
        return (
            f"{count:.0f} launches of {short_kernel(name)} take {format_duration(took_ns)} of the host each"
        )
    steps = max(facts.stretches.height, 1)
    launches = facts.launches.height / steps
    gpu_ns = float(facts.kernels["total_ns"].sum()) / steps
    if not launches:
        return ""
    return f"{launches:,.0f} launches a rank for {format_duration(gpu_ns)} of kernels"


def dear_launches(facts: JobFacts) -> tuple[str, float, float] | None:
    """The kernel before whose launches the host spends much of the step.

    Returns:
        Its name, how many a step and rank, ns of the host before each.
    """
    spans = facts.spans
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
    steps = max(facts.stretches.height, 1)
    dear = (
        named.filter(pl.col("took_ns") >= DEAR_NS)
        .group_by("name")
        .agg(
            count=pl.len() / steps, mean_ns=pl.col("took_ns").mean(), total_ns=pl.col("took_ns").sum() / steps
        )
        .sort("total_ns", descending=True)
    )
    if dear.is_empty() or dear["count"][0] < 3 or dear["total_ns"][0] < DEAR * facts.step_ns:
        return None
    return str(dear["name"][0]), float(dear["count"][0]), float(dear["mean_ns"][0])


def stand_still(facts: JobFacts) -> StandStill | None:
    """How long hosts stand still, where that is what they mostly do: they have no core.

    Calls of many names that usually take microseconds take milliseconds now and then, on most ranks.
    """
    calls = pl.concat(facts.job.map_ranks(_calls))
    usual = calls.group_by("name").agg(usual_ns=pl.col("took_ns").median(), count=pl.len())
    pauses = calls.join(usual, on="name").filter(
        (pl.col("usual_ns") < USUALLY_NS) & (pl.col("count") >= FEW) & (pl.col("took_ns") >= STILL_NS)
    )
    paused_ns, ranks = float(pauses["took_ns"].sum()), len(facts.job.graph.ranks)
    share = paused_ns / max(facts.step_ns * facts.ends.height * ranks, 1.0)
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
