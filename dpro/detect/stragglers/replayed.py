"""Ranks that work longer than their peers on the same work, distinguished from the ranks that wait for them.

In: a graph. Out: findings. A rank that waits shows long collectives, not long work, so work is what is
compared, phase by phase between collectives. A rank is at fault if the step becomes shorter when it
works like its peers: in nearly every step, and by more than noise; in all that was recorded, or in the latest
steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import polars as pl

from dpro.arrays import Bools, Ints
from dpro.detect.baseline import Baseline, waits
from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_SHARE, MIN_STEPS, clear_gains, confidence, first_of_latest
from dpro.detect.stragglers.causes import (
    CPU,
    HOST_CAUSES,
    OPERATORS,
    counted_more,
    excess_by_cause,
    host_cause,
    idle_cause,
)
from dpro.replay.graph import Graph
from dpro.replay.mesh import Mesh, named_axes, places_along
from dpro.replay.peers import peer_medians, peers_of, ranks_of_teams, teams_by_work
from dpro.replay.run_mesh import axes_of_messages, mesh_of_run
from dpro.replay.whatif.edits.heal import Shortened, healing
from dpro.schema import COUNTERS, STEPS
from dpro.units import format_duration

ROUNDING = 1e-9  # of sums of ns as floats


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
    work = baseline.work
    ranks = sorted(work["rank"].unique().to_list())
    gains = large_gains(baseline, work, [[rank] for rank in ranks]) if len(ranks) > 1 else None
    if gains is None or gains.base.size < MIN_STEPS:
        return []
    found = _significant(baseline, work, gains)
    for first in first_of_latest(gains.steps):
        named = {rank for finding in found for rank in finding.ranks}
        latest = work.filter(pl.col("step") >= first)
        others = [rank for rank in _working_longer(latest, gains) if rank not in named]
        found += _significant(baseline, latest, large_gains(baseline, latest, [[rank] for rank in others]))
        named |= {rank for finding in found for rank in finding.ranks}
        left = [rank for rank in others if rank not in named]
        found += (
            _significant(baseline, latest, large_gains(baseline, latest, [left])) if len(left) > 1 else []
        )
    return sorted(found, key=lambda finding: -finding.cost_ns)


def _significant(baseline: Baseline, work: pl.DataFrame, gains: HealingGains | None) -> list[Finding]:
    """Findings for those whose healing clearly helps."""
    if gains is None:
        return []
    clear = np.flatnonzero(clear_gains(gains.saved, gains.base)).tolist()
    return [describe(baseline, work, gains, at) for at in clear]


def _working_longer(work: pl.DataFrame, gains: HealingGains) -> list[int]:
    """Ranks that clearly work longer per step than their peers typically do, be it on the CPU or the GPU.

    Args:
        work: as `phase_work` returns it, of the steps that count.
    """
    base = gains.base[gains.steps >= work["step"].to_numpy().min()]
    place = ["team", "step", "resource"]
    whole = work.group_by("rank", "step", "resource").agg(pl.col("work_ns").sum())
    whole = whole.join(ranks_of_teams(teams_by_work(work)).select("rank", "team"), on="rank")
    places = whole.select(place).unique().with_row_index("place")
    rows = whole.join(places, on=place).with_columns(others=pl.len().over("place").cast(pl.Int64) - 1)
    place_of_row, spent, others = (rows[name].to_numpy() for name in ("place", "work_ns", "others"))
    peer = peer_medians(place_of_row, spent, np.ones(rows.height, np.bool_), others)
    own = rows.with_columns(excess=pl.col("work_ns") - pl.Series(peer)).filter(pl.col("others") > 0)
    in_all = own.filter(pl.len().over("rank", "resource") == base.size).sort("rank", "resource", "step")
    excess = in_all["excess"].to_numpy().reshape(-1, base.size).T
    longer: list[int] = np.unique(in_all["rank"].to_numpy()[:: base.size][clear_gains(excess, base)]).tolist()
    return longer


def healing_gains(baseline: Baseline, work: pl.DataFrame, sets: list[list[int]]) -> HealingGains | None:
    """Replay with each set of ranks healed in turn; None where no two ranks can be compared.

    Args:
        work: as `phase_work` returns it, of the steps that count.
        sets: ranks to heal together; those that have no peer are left out.
    """
    sets, healed = _healed(baseline, work, sets)
    return gains_of(baseline, work, sets, healed) if sets else None


def large_gains(baseline: Baseline, work: pl.DataFrame, sets: list[list[int]]) -> HealingGains | None:
    """`healing_gains`, without the sets that save too little to be named: of many ranks, nearly all.

    A chain of work that decides when a window ends is there after healing, too: no set saves more than it
    takes from that chain.

    Args:
        work: as `phase_work` returns it, of the steps that count.
        sets: ranks to heal together; those that have no peer are left out.
    """
    sets, healed = _healed(baseline, work, sets)
    if not sets:
        return None
    taken = baseline.saved_at_most(healed, set(chain(*sets)))
    least = MIN_SHARE * baseline.step_ns[_that_count(baseline, work)].sum()
    large = [ranks for ranks in sets if taken[np.array(ranks) + 1].sum() >= least * (1 - ROUNDING)]
    return gains_of(baseline, work, large, healed)


def _healed(
    baseline: Baseline, work: pl.DataFrame, sets: list[list[int]]
) -> tuple[list[list[int]], Shortened]:
    """The sets without ranks that have no peer, and what healing each of these takes away."""
    with_peers = {rank for team in teams_by_work(work) if len(team) > 1 for rank in team}
    sets = [kept for ranks in sets if (kept := [rank for rank in ranks if rank in with_peers])]
    return sets, Shortened(healing(baseline.graph, sorted(set(chain(*sets))), work))


def _that_count(baseline: Baseline, work: pl.DataFrame) -> Bools:
    """[T] which steps count: those from the first that the work is of."""
    counted: Bools = baseline.steps >= work["step"].to_numpy().min()
    return counted


def gains_of(
    baseline: Baseline, work: pl.DataFrame, sets: list[list[int]], healed: Shortened
) -> HealingGains:
    """What healing sets of ranks would save, in the steps that count.

    Args:
        work: as `phase_work` returns it, of the steps that count.
    """
    counted = _that_count(baseline, work)
    base = baseline.step_ns[counted]
    graphs = baseline.graphs_changed(healed, sets)
    after = [baseline.changed_step_ns(changed)[-base.size :] for changed in graphs]
    return HealingGains(
        sets, baseline.steps[counted], base, base[:, None] - np.reshape(after, (-1, base.size)).T
    )


def describe(baseline: Baseline, work: pl.DataFrame, gains: HealingGains, column: int) -> Finding:
    """The finding that names one of the sets of ranks that were healed.

    Args:
        work: as `phase_work` returns it, of the steps that count.
    """
    graph, ranks, saved = baseline.graph, gains.ranks[column], gains.saved[:, column]
    cost, step = float(saved.mean()), float(gains.base.mean())
    since = int(gains.steps[0])
    causes = excess_by_cause(baseline, ranks[0], peers_of(teams_by_work(work), ranks[0]), since)
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
    compared = pl.col("rank").is_in([rank, *peers_of(teams_by_work(work), rank)])
    inside = steps.filter(compared & (pl.col("window") >= 0) & (pl.col("step") >= since))
    places = inside.select("rank", time_ns="start_ns")
    rows = counters.filter(pl.col("counter").is_in([CPU, *HOST_CAUSES])).join(places, on=["rank", "time_ns"])
    return counted_more(rows, rank)


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def lateness(graph: Graph, rank: int) -> str:
    """How often a rank came last to a collective, and how long the others waited there, in words."""
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


# Where in the layout a late rank stands, and the ranks of which of its groups wait for it.

MIN_WAIT = 0.1  # of the longest wait: less is not worth a word


def felt_along(graph: Graph, ranks: Sequence[int]) -> tuple[str, tuple[str, ...]]:
    """The axis along which others wait most for late ranks, and that in words; none if there is one axis."""
    if graph.run is None:
        return "", ()
    mesh = mesh_of_run(graph.run)
    if len(named_axes(mesh)) < 2:
        return "", ()
    each = _waits_by_axis(graph, ranks)
    if not each:
        return "", ()
    worst = max(each, key=lambda axis: each[axis])
    words = [
        f"along {axis} {format_duration(ns)}"
        for axis, ns in sorted(each.items(), key=lambda item: -item[1])
        if ns >= MIN_WAIT * each[worst]
    ]
    who = f"rank {ranks[0]} ({place_of(mesh, ranks[0])})" if len(ranks) == 1 else "these ranks"
    return worst, (f"ranks that share a group with {who} wait for it per step: {', '.join(words)}",)


def place_of(mesh: Mesh, rank: int) -> str:
    """Where a rank stands, such as `dp 1, tp 0`; empty where that is not known."""
    places = ((name, places_along(mesh, name).get(rank)) for name in named_axes(mesh))
    return ", ".join(f"{name} {at}" for name, at in places if at is not None)


def _waits_by_axis(graph: Graph, ranks: Sequence[int]) -> dict[str, float]:
    """By axis, ns per step that each rank of their groups waits where one of these comes last."""
    nodes = graph.nodes
    axes = (*axes_of_messages(graph), "")
    known = np.flatnonzero((nodes.collective >= 0) & (nodes.message >= 0))
    named = pl.DataFrame(
        {"instance": nodes.collective[known], "axis": [axes[at] for at in nodes.message[known].tolist()]},
        {"instance": pl.Int64, "axis": pl.String},
    ).unique("instance", keep="first", maintain_order=True)
    late = pl.col("last").is_in(list(ranks)) & ~pl.col("rank").is_in(list(ranks))
    frame = waits(graph, graph.nodes.measured_start)
    steps = max(frame["step"].n_unique(), 1)
    waited = frame.filter(late & (pl.col("wait_ns") > 0)).join(
        named.filter(pl.col("axis") != ""), on="instance"
    )
    each = waited.group_by("axis").agg(pl.col("wait_ns").sum() / (steps * pl.col("rank").n_unique()))
    return {axis: float(ns) for axis, ns in each.sort("axis").iter_rows()}
