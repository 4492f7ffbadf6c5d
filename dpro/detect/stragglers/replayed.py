"""Ranks that work longer than their peers on the same work, distinguished from the ranks that wait for them.

In: a graph. Out: findings. A rank that waits shows long collectives, not long work, so work is what is
compared, phase by phase between collectives. A rank is at fault if the step becomes shorter when it
works like its peers: in nearly every step, and by more than noise; in all that was recorded, or in the latest
steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.detect.baseline import Baseline, waits
from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_STEPS, clear_gain, confidence, first_of_latest
from dpro.detect.stragglers.axes import felt_along
from dpro.detect.stragglers.causes import (
    CPU,
    HOST_CAUSES,
    OPERATORS,
    counted_more,
    excess_by_cause,
    host_cause,
    idle_cause,
)
from dpro.replay.condense.alternatives import condense_both, with_ranks_of
from dpro.replay.graph import Graph
from dpro.replay.peers import peers_by_rank
from dpro.replay.timeline import changed_step_times, replay
from dpro.replay.whatif.edits.heal import healed_at_once
from dpro.schema import COUNTERS, STEPS
from dpro.units import format_duration

Times = NDArray[np.int64] | NDArray[np.float64]


@dataclass(frozen=True)
class HealingGains:
    """What healing ranks would save.

    Attributes:
        ranks: [R] which are healed together.
        steps: [T] which steps.
        base: [T] ns, step times unhealed.
        saved: [T, R] ns per step.
    """

    ranks: list[list[int]]
    steps: Ints
    base: Ints
    saved: Ints


def find_stragglers(baseline: Baseline) -> list[Finding]:
    """Name the ranks that hold the others up, costliest first.

    Where healing no single rank helps but healing all that work longer than their peers does, these are
    named together.
    """
    ranks = sorted({int(rank) for rank in np.unique(baseline.graph.nodes.rank) if rank >= 0})
    work = baseline.work
    gains = healing_gains(baseline, work, [[rank] for rank in ranks]) if len(ranks) > 1 else None
    if gains is None or gains.base.size < MIN_STEPS:
        return []
    found = _significant(baseline, work, gains)
    for first in first_of_latest(gains.steps):
        named = {rank for finding in found for rank in finding.ranks}
        latest = work.filter(pl.col("step") >= first)
        others = [rank for rank in _working_longer(latest, gains) if rank not in named]
        found += _significant(baseline, latest, healing_gains(baseline, latest, [[rank] for rank in others]))
        named |= {rank for finding in found for rank in finding.ranks}
        left = [rank for rank in others if rank not in named]
        found += (
            _significant(baseline, latest, healing_gains(baseline, latest, [left])) if len(left) > 1 else []
        )
    return sorted(found, key=lambda finding: -finding.cost_ns)


def _significant(baseline: Baseline, work: pl.DataFrame, gains: HealingGains | None) -> list[Finding]:
    """Findings for those whose healing clearly helps."""
    if gains is None:
        return []
    clear = (at for at in range(len(gains.ranks)) if clear_gain(gains.saved[:, at], gains.base))
    return [describe(baseline.graph, work, gains, at) for at in clear]


def _working_longer(work: pl.DataFrame, gains: HealingGains) -> list[int]:
    """Ranks that clearly work longer per step than their peers typically do, be it on the CPU or the GPU.

    Args:
        work: as `phase_work` returns it, of the steps that count.
        gains: of all steps.
    """
    whole = work.group_by("rank", "step", "resource").agg(pl.col("work_ns").sum())
    base = gains.base[gains.steps >= work["step"].to_numpy().min()]
    longer = set()
    for rank, peers_of_rank in peers_by_rank(work).items():
        of_peers = whole.filter(pl.col("rank").is_in(peers_of_rank))
        peers = of_peers.group_by("step", "resource").agg(peer=pl.col("work_ns").median())
        both = whole.filter(pl.col("rank") == rank).join(peers, on=["step", "resource"]).sort("step")
        for _, own in both.group_by("resource"):
            excess = (own["work_ns"] - own["peer"]).to_numpy()
            if excess.size == base.size and clear_gain(excess, base):
                longer.add(int(rank))
    return sorted(longer)


def healing_gains(baseline: Baseline, work: pl.DataFrame, sets: list[list[int]]) -> HealingGains | None:
    """Replay with each set of ranks healed in turn; None where no two ranks can be compared.

    Args:
        baseline: the unchanged graph.
        work: as `phase_work` returns it, of the steps that count.
        sets: ranks to heal together; those that have no peer are left out.
    """
    peers = peers_by_rank(work)
    with_peers = [[rank for rank in ranks if peers.get(rank)] for ranks in sets]
    sets = [ranks for ranks in with_peers if ranks]
    if not sets:
        return None
    ranks = sorted({rank for ranks in sets for rank in ranks})
    healed = healed_at_once(baseline.graph, ranks, work)
    return gains_of(baseline, work, sets, healed)


def gains_of(baseline: Baseline, work: pl.DataFrame, sets: list[list[int]], healed: Ints) -> HealingGains:
    """What healing sets of ranks would save, in the steps that count.

    Args:
        baseline: the unchanged graph.
        work: as `phase_work` returns it, of the steps that count.
        sets: ranks to heal together.
        healed: [N] ns, durations of the nodes where their rank is healed.
    """
    counted = baseline.steps >= work["step"].to_numpy().min()
    base = baseline.step_ns[counted]
    one, other = condense_both(baseline.graph, healed)
    saved = []
    for ranks in sets:
        after = replay(with_ranks_of(one, other, ranks))
        steps = changed_step_times(baseline.step_ends, after.graph, after.start, after.end)
        saved.append(base - steps["duration_ns"].to_numpy()[-base.size :])
    return HealingGains(sets, baseline.steps[counted], base, np.stack(saved, axis=1))


def describe(graph: Graph, work: pl.DataFrame, gains: HealingGains, column: int) -> Finding:
    """The finding that names one of the sets of ranks that were healed.

    Args:
        graph: the graph.
        work: as `phase_work` returns it, of the steps that count.
        gains: of healing.
        column: which set.
    """
    ranks, saved = gains.ranks[column], gains.saved[:, column]
    cost, step = float(saved.mean()), float(gains.base.mean())
    since = int(gains.steps[0])
    causes = excess_by_cause(graph, ranks[0], peers_by_rank(work)[ranks[0]], since)
    total = float(causes["excess_ns"].clip(lower_bound=0).sum())
    largest = causes.row(0, named=True)
    more = _counted(graph, work, ranks[0], since)
    counted = host_cause(more, total)
    if counted is None and largest["cause"] == OPERATORS:
        counted = idle_cause(more, total)
    class_, cause = ("slow.host", counted.cause) if counted else (largest["class"], largest["cause"])
    who = _names(ranks)
    axis, felt = felt_along(graph, ranks)
    evidence = [
        f"{who} works {format_duration(total)} longer per step than its peers on the same work, "
        f"{format_duration(largest['excess_ns'])} of it in {largest['cause']}: {largest['example']}",
        *([counted.evidence] if counted else []),
        *(lateness(graph, rank) for rank in ranks),
        *felt,
        f"replayed with {who} as fast as its peers, the step takes "
        f"{format_duration(step - cost)} instead of {format_duration(step)}",
    ]
    if since > int(np.min(graph.nodes.step[graph.nodes.step >= 0])):
        evidence.append(f"this is so in the latest {gains.steps.size} recorded steps, from step {since} on")
    if len(ranks) > 1:
        evidence[0] = evidence[0].replace(who, _names(ranks[:1]), 1)
        evidence.append("healing one of them alone saves little: the others are as late")
    elif total and cost < 0.5 * total:
        evidence.append("other ranks are nearly as late: healing this one alone saves less than it lost")
    kind, name = ("rank", str(ranks[0])) if len(ranks) == 1 else ("ranks", ", ".join(map(str, ranks)))
    return Finding(
        class_, kind, name, tuple(ranks), round(cost / step, 4), confidence(saved, gains.base),
        cost, tuple(evidence), cause, axis,
    )  # fmt: skip


def _counted(graph: Graph, work: pl.DataFrame, rank: int, since: int) -> dict[str, float]:
    """How much more of each counter the rank has than its peers in steps in deep windows, ns per step."""
    if graph.run is None:
        return {}
    steps, counters = graph.run.table(STEPS), graph.run.table(COUNTERS)
    compared = pl.col("rank").is_in([rank, *peers_by_rank(work)[rank]])
    inside = steps.filter(compared & (pl.col("window") >= 0) & (pl.col("step") >= since))
    places = inside.select("rank", time_ns="start_ns")
    rows = counters.filter(pl.col("counter").is_in([CPU, *HOST_CAUSES])).join(places, on=["rank", "time_ns"])
    return counted_more(rows, rank)


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def lateness(graph: Graph, rank: int) -> str:
    """How often a rank came last to a collective, and how long the others waited there, in words.

    Args:
        graph: the graph.
        rank: which rank.
    """
    frame = waits(graph, graph.nodes.measured_start)
    times = frame.filter((pl.col("wait_ns") == 0) & (pl.col("rank") == rank)).height
    per_rank = (
        frame.group_by("rank", "step")
        .agg(pl.col("wait_ns").sum())
        .group_by("rank")
        .agg(pl.col("wait_ns").mean())
    )
    own = per_rank.filter(pl.col("rank") == rank)["wait_ns"].to_numpy().sum()
    peers = per_rank.filter(pl.col("rank") != rank)["wait_ns"].to_numpy()
    theirs = float(np.median(peers)) if peers.size else 0.0
    return (
        f"rank {rank} came last to {times} of {frame['instance'].n_unique()} collectives; per step it waited "
        f"{format_duration(float(own))} for its peers, they {format_duration(theirs)} each for others"
    )
