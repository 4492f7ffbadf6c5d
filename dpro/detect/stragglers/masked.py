"""Masked stragglers: ranks whose host works far longer than its peers', mostly hidden by queued work.

In: a graph, and the ranks already at fault. Out: findings. While a GPU has work queued, its host may be late
at no cost, or at one that differs from step to step: the replay alone then does not show that a rank is at
fault. Its work does, where it is far beyond that of the slowest peer in nearly every step. A rank is named if
that costs something already; ranks of other pipeline stages are no peers.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_COST_OF_SLOW, MIN_STEPS, PERSISTENT, clear_gain, confidence
from dpro.detect.stragglers.causes import excess_by_cause
from dpro.detect.stragglers.replayed import HealingGains, healing_gains, lateness
from dpro.replay.graph import Graph
from dpro.replay.peers import ON_CPU, peers_of, teams_by_work
from dpro.units import format_duration

FAR = 1.5  # times the work of the slowest peer
MIN_PEERS = 2  # with one other rank it is not known which of the two is usual
NO_STAGE = -1


def find_masked(baseline: Baseline, named: Collection[int] = ()) -> list[Finding]:
    """Name ranks whose host is far slower than its peers' and costs something now, costliest first."""
    graph, work, base = baseline.graph, baseline.work, baseline.step_ns
    if base.size < MIN_STEPS:
        return []
    found = []
    for rank, longer in _far_longer(graph, work, base).items():
        gains = healing_gains(baseline, work, [[rank]]) if rank not in named else None
        if gains is not None and gains.saved.mean() >= MIN_COST_OF_SLOW * base.mean():
            found.append(_describe(baseline, rank, gains, longer))
    return sorted(found, key=lambda finding: -finding.cost_ns)


def _far_longer(graph: Graph, work: pl.DataFrame, base: Ints) -> dict[int, Floats]:
    """Ranks that clearly work far longer than the slowest peer: by how much in each step, [T] ns.

    Phases count that are far longer in nearly every step, against what is usual there: what all ranks do
    longer in a step (allocating memory in the first) does not make a rank look better.

    Args:
        work: its `phase_work`.
        base: [T] ns, step times.
    """
    excess = pl.col("work_ns") - pl.col("peer")
    far = excess >= (FAR - 1) * pl.col("peer").median().over("rank", "position")
    suspects = (
        _with_slowest_peer(graph, work)
        .with_columns(far=far, excess=excess)
        .group_by("rank", "position")
        .agg(pl.col("excess").sort_by("step"), pl.col("far").mean(), steps=pl.len())
        .filter((pl.col("far") >= PERSISTENT) & (pl.col("steps") == base.size))
        .sort("rank", "position")
    )
    found: dict[int, Floats] = {}
    for (rank,), phases in suspects.group_by("rank", maintain_order=True):
        longer = np.array(phases["excess"].to_list(), np.float64)
        clear = [each for each in longer if clear_gain(each, base)]
        if clear or clear_gain(longer.sum(axis=0), base):
            found[int(rank)] = np.sum(clear or longer, axis=0)
    return found


def _with_slowest_peer(graph: Graph, work: pl.DataFrame) -> pl.DataFrame:
    """`rank`, `step`, `position` of a phase, `work_ns` of the host there, and that of the slowest `peer`.

    Peers are ranks of one team and one pipeline stage.
    """
    stages = {rank: place.stage for rank, place in graph.places.items()}
    numbered = {rank: number for number, team in enumerate(teams_by_work(work)) for rank in team}
    sort = [
        pl.col("rank").replace_strict(numbered),
        pl.col("rank").replace_strict(stages, default=NO_STAGE),
    ]
    compared = ["step", "position", "team", "stage"]
    worked = pl.col("work_ns")
    return (
        work.filter(pl.col("resource") == ON_CPU)
        .group_by("rank", "step", "position")
        .agg(worked.sum())
        .with_columns(team=sort[0], stage=sort[1])
        .filter(pl.len().over(compared) > MIN_PEERS)
        .with_columns(first=worked.max().over(compared), second=worked.top_k(2).min().over(compared))
        .with_columns(peer=pl.when(worked == pl.col("first")).then("second").otherwise("first"))
        .select("rank", "step", "position", "work_ns", "peer")
    )


def _describe(baseline: Baseline, rank: int, gains: HealingGains, longer: Floats) -> Finding:
    cost, step = float(gains.saved.mean()), float(gains.base.mean())
    causes = excess_by_cause(baseline, rank, peers_of(baseline.teams, rank), int(gains.steps.min()))
    largest = causes.filter(pl.col("class") == "slow.host").row(0, named=True)
    excess, healed = format_duration(float(longer.mean())), format_duration(step - cost)
    evidence = (
        f"between the same collectives, the host of rank {rank} works {excess} longer per step than the "
        f"slowest of its peers, {FAR} times as long or more in nearly every step; {largest['cause']}: "
        f"{largest['example']}",
        lateness(baseline.graph, rank),
        f"replayed with rank {rank} as fast as its peers, the step takes {healed} instead of "
        f"{format_duration(step)}: work that is queued elsewhere hides the rest for now",
    )
    return Finding(
        "slow.host", "rank", str(rank), (rank,), round(cost / step, 4), confidence(longer, gains.base), cost,
        evidence, largest["cause"],
    )  # fmt: skip
