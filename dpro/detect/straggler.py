"""Ranks that work longer than their peers on the same work, told from the ranks that wait for them.

In: a graph. Out: findings. A rank that waits shows long collectives, not long work, so work is what is
compared, section by section between collectives. A rank is at fault if the step becomes shorter when it
works like its peers: in most steps, by more than noise, and by more than healing any other rank gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.detect.findings import Finding
from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.timeline import replay, replay_durations, step_times
from dpro.replay.whatif.heal import healed_durations, section_times
from dpro.replay.whatif.scale import DATA_LOADING
from dpro.replay.whatif.select import Selection
from dpro.units import format_duration

Ints = NDArray[np.int64]

# A rank below these is not blamed: differences of this size are everywhere and cost little.
LEAST_SHARE = 0.03
# The gain must reach that in this share of the steps, and its mean this many of its standard deviations:
# of two healthy ranks on busy cores one is always a little slower, but not the same in every step.
PERSISTENT = 0.8
EFFECT_SIZE = 1.5
FEWEST_STEPS = 2  # one step cannot show that anything persists
# And exceed the typical gain of healing any one of the others by this factor: healing noise gains too.
ABOVE_OTHERS = 2.0
INPUT_PIPELINE = "the input pipeline"


@dataclass(frozen=True)
class Gains:
    """What healing one rank at a time would save.

    Attributes:
        ranks: [R] which.
        base: [T] ns, step times unhealed.
        saved: [T, R] ns per step.
    """

    ranks: list[int]
    base: Ints
    saved: Ints


def find_stragglers(graph: Graph) -> list[Finding]:
    """Name the ranks that hold the others up, costliest first."""
    ranks = sorted({int(rank) for rank in np.unique(graph.nodes.rank) if rank >= 0})
    gains = healing_gains(graph, ranks) if len(ranks) > 1 else None
    if gains is None or gains.base.size < FEWEST_STEPS:
        return []
    step = float(gains.base.mean())
    mean = gains.saved.mean(axis=0)
    findings = []
    for column, rank in enumerate(gains.ranks):
        others = np.delete(mean, column)
        share = mean[column] / step if step else 0.0
        persistent = float((gains.saved[:, column] >= LEAST_SHARE * gains.base).mean())
        if share < LEAST_SHARE or persistent < PERSISTENT:
            continue
        spread = float(gains.saved[:, column].std(ddof=1))
        if mean[column] < max(ABOVE_OTHERS * float(np.median(others)), EFFECT_SIZE * spread):
            continue
        confidence = _confidence(gains.saved[:, column], persistent)
        findings.append(_describe(graph, gains, column, rank, share, confidence))
    return sorted(findings, key=lambda finding: -finding.cost_ns)


def healing_gains(graph: Graph, ranks: list[int]) -> Gains | None:
    """Replay with each rank healed in turn; None where no two ranks can be compared."""
    totals = section_times(graph)
    sections = totals.group_by("rank").agg(pl.col("position").max())
    comparable = sections.filter(pl.len().over("position") > 1)["rank"].to_list()
    ranks = [rank for rank in ranks if rank in comparable]
    if not ranks:
        return None
    timeline = replay(graph)
    base = step_times(graph, timeline.start, timeline.end)
    durations = healed_durations(graph, ranks)
    ends = replay_durations(graph, durations)
    saved = []
    for column in range(len(ranks)):
        end = np.ascontiguousarray(ends[:, column])
        healed = step_times(graph, end - durations[:, column], end)
        saved.append((base["duration_ns"] - healed["duration_ns"]).to_numpy())
    return Gains(ranks, base["duration_ns"].to_numpy(), np.stack(saved, axis=1))


def _confidence(saved: Ints, persistent: float) -> float:
    """How steady the gain is: 1 - its standard error relative to its mean, times its persistence."""
    if saved.size < 2:
        return 0.5 * persistent
    error = float(saved.std(ddof=1)) / np.sqrt(saved.size) / float(saved.mean())
    return round(float(np.clip(1 - error, 0, 1)) * persistent, 3)


def _describe(graph: Graph, gains: Gains, column: int, rank: int, share: float, confidence: float) -> Finding:
    cost = float(gains.saved[:, column].mean())
    step = float(gains.base.mean())
    causes = excess_by_cause(graph, rank)
    total = float(causes["excess_ns"].clip(lower_bound=0).sum())
    largest = causes.row(0, named=True)
    evidence = [
        f"rank {rank} works {format_duration(total)} longer per step than its peers on the same work, "
        f"{format_duration(largest['excess_ns'])} of it in {largest['cause']}: {largest['example']}",
        _lateness(graph, rank),
        f"replayed with rank {rank} as fast as its peers, the step takes "
        f"{format_duration(step - cost)} instead of {format_duration(step)}",
    ]
    if total and cost < 0.5 * total:
        evidence.append("other ranks are nearly as late: healing this one alone saves less than it lost")
    return Finding(
        largest["class"], "rank", str(rank), (rank,), round(share, 4), confidence, cost, tuple(evidence)
    )


def excess_by_cause(graph: Graph, rank: int) -> pl.DataFrame:
    """Where a rank's extra work is, against the median of the other ranks.

    Returns:
        `cause`, `class`, `excess_ns` per step, `example` (the name that contributes most), largest first.
    """
    nodes = graph.nodes
    cause, class_ = _causes(graph)
    counted = (nodes.step >= 0) & (cause != "")
    names = np.array(graph.names, dtype=object)
    label = np.where(nodes.around >= 0, names[np.maximum(nodes.around, 0)], names[nodes.name])
    label = np.where(nodes.kind == NodeKind.HOST, label, names[nodes.name])
    frame = pl.DataFrame(
        {
            "rank": nodes.rank[counted],
            "step": nodes.step[counted],
            "cause": cause[counted].tolist(),
            "class": class_[counted].tolist(),
            "label": label[counted].tolist(),
            "work": nodes.duration[counted],
        }
    )
    keys = ["cause", "class", "label"]
    steps = frame.group_by("rank").agg(steps=pl.col("step").n_unique())
    per_step = (
        frame.group_by("rank", *keys)
        .agg(pl.col("work").sum())
        .join(steps, on="rank")
        .with_columns(work=pl.col("work") / pl.col("steps"))
    )
    peers = per_step.filter(pl.col("rank") != rank).group_by(keys).agg(peer=pl.col("work").median())
    own = per_step.filter(pl.col("rank") == rank).join(peers, on=keys, how="left")
    excess = own.with_columns(excess_ns=pl.col("work") - pl.col("peer").fill_null(0)).sort(
        ["excess_ns", "label"], descending=[True, False]
    )
    return (
        excess.group_by("cause", "class", maintain_order=True)
        .agg(pl.col("excess_ns").sum(), example=pl.col("label").first())
        .sort(["excess_ns", "cause"], descending=[True, False])
    )


def _causes(graph: Graph) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """[N] what each node's time is blamed on, and the class that makes; empty for waits and transfers."""
    nodes = graph.nodes
    gpu = np.isin(nodes.kind, GPU_KINDS)
    computes_on_gpu = bool(gpu.any())
    cause = np.full(graph.num_nodes, "", dtype=object)
    class_ = np.full(graph.num_nodes, "slow.host", dtype=object)
    cause[nodes.kind == NodeKind.CPU] = "the host's operators" if computes_on_gpu else "operators"
    cause[nodes.kind == NodeKind.RUNTIME] = "GPU runtime calls"
    cause[np.isin(nodes.kind, (NodeKind.HOST, NodeKind.GAP))] = "host code outside any operator"
    cause[Selection(within=DATA_LOADING).mask(graph)] = INPUT_PIPELINE
    cause[gpu] = "kernels"
    class_[gpu] = "slow.compute"
    if not computes_on_gpu:
        class_[cause == "operators"] = "slow.compute"
    return cause, class_


def _lateness(graph: Graph, rank: int) -> str:
    """How often the rank came last to a collective, and how long the others waited there."""
    nodes = graph.nodes
    arrive = (nodes.kind == NodeKind.ARRIVE) & (nodes.step >= 0)
    frame = pl.DataFrame(
        {
            "instance": nodes.collective[arrive],
            "rank": nodes.rank[arrive],
            "step": nodes.step[arrive],
            "time": nodes.measured_start[arrive],
        }
    ).filter(pl.len().over("instance") > 1)
    last = pl.col("time").max().over("instance")
    frame = frame.with_columns(wait=last - pl.col("time"))
    times = frame.filter((pl.col("wait") == 0) & (pl.col("rank") == rank)).height
    waits = (
        frame.group_by("rank", "step").agg(pl.col("wait").sum()).group_by("rank").agg(pl.col("wait").mean())
    )
    own = waits.filter(pl.col("rank") == rank)["wait"].to_numpy().sum()
    peers = waits.filter(pl.col("rank") != rank)["wait"].to_numpy()
    theirs = float(np.median(peers)) if peers.size else 0.0
    return (
        f"it came last to {times} of {frame['instance'].n_unique()} collectives; in a step it waited "
        f"{format_duration(float(own))} for its peers, they {format_duration(theirs)} each for others"
    )
