"""Ranks that work longer than their peers on the same work, told from the ranks that wait for them.

In: a graph. Out: findings. A rank that waits shows long collectives, not long work, so work is what is
compared, section by section between collectives. A rank is at fault if the step becomes shorter when it
works like its peers: in nearly every step, and by more than noise; in all that was recorded, or in the latest
steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.detect.causes import CPU, HOST_CAUSES, counted_more, host_cause, idle_cause
from dpro.detect.findings import Finding
from dpro.detect.waits import waits
from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.timeline import changed_step_times, durations_of, replay, replay_durations, step_ends
from dpro.replay.whatif.heal import healed_durations, peers_by_rank, peers_of, section_work
from dpro.replay.whatif.input import DATA_LOADING
from dpro.replay.whatif.select import Selection
from dpro.schema import COUNTERS, STEPS
from dpro.units import format_duration

Ints = NDArray[np.int64]
Times = NDArray[np.int64] | NDArray[np.float64]

# A rank below this is not blamed: differences of this size are everywhere and cost little.
LEAST_SHARE = 0.03
# The gain must reach that in this share of the steps, and its mean this many of its standard deviations:
# of two healthy ranks on busy cores one is always a little slower, but not the same in every step.
PERSISTENT = 0.8
EFFECT_SIZE = 1.5
FEWEST_STEPS = 2  # one step cannot show that anything persists
FEWEST_LATEST = 4  # steps, of those that a fault that began while the job ran may show in
# Student's t, 99.9%, for 1, 2, … degrees of freedom: the spread of few steps is itself hardly known, and
# every rank is one more chance to be wrong.
T_999 = (318.3, 22.33, 10.21, 7.17, 5.89, 5.21, 4.79, 4.50, 4.30)
INPUT_PIPELINE = "the input pipeline"
OPERATORS = "operators"  # of a host that has no GPU


@dataclass(frozen=True)
class Gains:
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


def find_stragglers(graph: Graph) -> list[Finding]:
    """Name the ranks that hold the others up, costliest first.

    Where healing no single rank helps but healing all that work longer than their peers does, these are
    named together.
    """
    ranks = sorted({int(rank) for rank in np.unique(graph.nodes.rank) if rank >= 0})
    work = section_work(graph)
    gains = healing_gains(graph, work, [[rank] for rank in ranks]) if len(ranks) > 1 else None
    if gains is None or gains.base.size < FEWEST_STEPS:
        return []
    found = _clear(graph, work, gains)
    for first in first_of_latest(gains.steps):
        named = {rank for finding in found for rank in finding.ranks}
        latest = work.filter(pl.col("step") >= first)
        others = [rank for rank in _working_longer(latest, gains) if rank not in named]
        found += _clear(graph, latest, healing_gains(graph, latest, [[rank] for rank in others]))
        named |= {rank for finding in found for rank in finding.ranks}
        left = [rank for rank in others if rank not in named]
        found += _clear(graph, latest, healing_gains(graph, latest, [left])) if len(left) > 1 else []
    return sorted(found, key=lambda finding: -finding.cost_ns)


def first_of_latest(steps: Ints) -> list[int]:
    """The first of all steps, of the latest half, the latest quarter, …: a fault may be recent.

    Args:
        steps: [T] in order.
    """
    sizes = [steps.size]
    while sizes[-1] // 2 >= FEWEST_LATEST:
        sizes.append(sizes[-1] // 2)
    return [int(steps[-size]) for size in sizes]


def _clear(graph: Graph, work: pl.DataFrame, gains: Gains | None) -> list[Finding]:
    """Findings for those whose healing clearly helps."""
    if gains is None:
        return []
    clear = (at for at in range(len(gains.ranks)) if clear_gain(gains.saved[:, at], gains.base))
    return [describe(graph, work, gains, at) for at in clear]


def clear_gain(saved: Times, base: Times) -> bool:
    """Whether a gain per step is large enough, there in nearly every step, and more than chance."""
    freedom = min(saved.size - 1, len(T_999))
    needed = max(EFFECT_SIZE, T_999[freedom - 1] / np.sqrt(saved.size)) * float(saved.std(ddof=1))
    persistent = float((saved >= LEAST_SHARE * base).mean())
    return bool(saved.mean() >= max(LEAST_SHARE * base.mean(), needed) and persistent >= PERSISTENT)


def _working_longer(work: pl.DataFrame, gains: Gains) -> list[int]:
    """Ranks that clearly work longer per step than their peers typically do, be it on the CPU or the GPU.

    Args:
        work: as `section_work` gives it, of the steps that count.
        gains: of all steps.
    """
    whole = work.group_by("rank", "step", "resource").agg(pl.col("work_ns").sum())
    base = gains.base[gains.steps >= work["step"].to_numpy().min()]
    longer = set()
    for rank, alike in peers_by_rank(work).items():
        of_peers = whole.filter(pl.col("rank").is_in(alike))
        peers = of_peers.group_by("step", "resource").agg(peer=pl.col("work_ns").median())
        both = whole.filter(pl.col("rank") == rank).join(peers, on=["step", "resource"]).sort("step")
        for _, own in both.group_by("resource"):
            excess = (own["work_ns"] - own["peer"]).to_numpy()
            if excess.size == base.size and clear_gain(excess, base):
                longer.add(int(rank))
    return sorted(longer)


def healing_gains(graph: Graph, work: pl.DataFrame, sets: list[list[int]]) -> Gains | None:
    """Replay with each set of ranks healed in turn; None where no two ranks can be compared.

    Args:
        graph: the graph.
        work: as `section_work` gives it, of the steps that count.
        sets: ranks to heal together; those that have no peer are left out.
    """
    peers = peers_by_rank(work)
    with_peers = [[rank for rank in ranks if peers.get(rank)] for ranks in sets]
    sets = [ranks for ranks in with_peers if ranks]
    if not sets:
        return None
    columns = {rank: column for column, rank in enumerate(sorted({rank for ranks in sets for rank in ranks}))}
    healed = healed_durations(graph, list(columns), work=work)
    durations = np.stack([healed[:, [columns[rank] for rank in ranks]].min(axis=1) for ranks in sets], axis=1)
    return gains_of(graph, work, sets, durations)


def gains_of(graph: Graph, work: pl.DataFrame, sets: list[list[int]], durations: Ints) -> Gains:
    """What each column of durations [N, S] would save, in the steps that count.

    Args:
        graph: the graph.
        work: as `section_work` gives it, of the steps that count.
        sets: [S] ranks that are healed in each column.
        durations: of the nodes.
    """
    timeline = replay(graph)
    baseline = step_ends(graph, timeline.start, timeline.end)
    ends = replay_durations(graph, durations)
    base = durations_of(baseline).filter(pl.col("step") >= work["step"].min())
    saved = []
    for column in range(len(sets)):
        end = np.ascontiguousarray(ends[:, column])
        after = changed_step_times(baseline, graph, end - durations[:, column], end)
        saved.append((base["duration_ns"] - after.tail(base.height)["duration_ns"]).to_numpy())
    return Gains(sets, base["step"].to_numpy(), base["duration_ns"].to_numpy(), np.stack(saved, axis=1))


def describe(graph: Graph, work: pl.DataFrame, gains: Gains, column: int) -> Finding:
    """The finding that names one of the sets of ranks that were healed.

    Args:
        graph: the graph.
        work: as `section_work` gives it, of the steps that count.
        gains: of healing.
        column: which set.
    """
    ranks, saved = gains.ranks[column], gains.saved[:, column]
    cost, step = float(saved.mean()), float(gains.base.mean())
    since = int(gains.steps[0])
    causes = excess_by_cause(graph, ranks[0], peers_of(work, ranks[0]), since)
    total = float(causes["excess_ns"].clip(lower_bound=0).sum())
    largest = causes.row(0, named=True)
    more = _counted(graph, work, ranks[0], since)
    counted = host_cause(more, total)
    if counted is None and largest["cause"] == OPERATORS:
        counted = idle_cause(more, total)
    class_, cause = ("slow.host", counted.cause) if counted else (largest["class"], largest["cause"])
    who = _names(ranks)
    evidence = [
        f"{who} works {format_duration(total)} longer per step than its peers on the same work, "
        f"{format_duration(largest['excess_ns'])} of it in {largest['cause']}: {largest['example']}",
        *([counted.evidence] if counted else []),
        *(lateness(graph, rank) for rank in ranks),
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
        cost, tuple(evidence), cause,
    )  # fmt: skip


def _counted(graph: Graph, work: pl.DataFrame, rank: int, since: int) -> dict[str, float]:
    """How much more of each counter the rank has than its peers in steps in deep windows, ns per step."""
    if graph.run is None:
        return {}
    steps, counters = graph.run.table(STEPS), graph.run.table(COUNTERS)
    compared = pl.col("rank").is_in([rank, *peers_of(work, rank)])
    inside = steps.filter(compared & (pl.col("window") >= 0) & (pl.col("step") >= since))
    places = inside.select("rank", time_ns="start_ns")
    rows = counters.filter(pl.col("counter").is_in([CPU, *HOST_CAUSES])).join(places, on=["rank", "time_ns"])
    return counted_more(rows, rank)


def _names(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def confidence(saved: Times, base: Times) -> float:
    """How steady a gain per step is: 1 - its standard error relative to its mean, times its persistence."""
    error = float(saved.std(ddof=1)) / np.sqrt(saved.size) / float(saved.mean())
    persistent = float((saved >= LEAST_SHARE * base).mean())
    return round(float(np.clip(1 - error, 0, 1)) * persistent, 3)


def excess_by_cause(graph: Graph, rank: int, peers: list[int], since: int) -> pl.DataFrame:
    """Where a rank's extra work is, against the median of its peers, from a step on.

    Returns:
        `cause`, `class`, `excess_ns` per step, `example` (the name that contributes most), largest first.
    """
    nodes = graph.nodes
    cause, class_ = causes_of(graph)
    counted = (nodes.step >= since) & (cause != "")
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
    others = per_step.filter(pl.col("rank").is_in(peers)).group_by(keys).agg(peer=pl.col("work").median())
    own = per_step.filter(pl.col("rank") == rank).join(others, on=keys, how="left")
    excess = own.with_columns(excess_ns=pl.col("work") - pl.col("peer").fill_null(0)).sort(
        ["excess_ns", "label"], descending=[True, False]
    )
    return (
        excess.group_by("cause", "class", maintain_order=True)
        .agg(pl.col("excess_ns").sum(), example=pl.col("label").first())
        .sort(["excess_ns", "cause"], descending=[True, False])
    )


def causes_of(graph: Graph) -> tuple[NDArray[np.object_], NDArray[np.object_]]:
    """[N] what each node's time is blamed on, and the class that makes; empty for waits and transfers."""
    nodes = graph.nodes
    gpu = np.isin(nodes.kind, GPU_KINDS)
    computes_on_gpu = bool(gpu.any())
    cause = np.full(graph.num_nodes, "", dtype=object)
    class_ = np.full(graph.num_nodes, "slow.host", dtype=object)
    cause[nodes.kind == NodeKind.CPU] = "the host's operators" if computes_on_gpu else OPERATORS
    cause[nodes.kind == NodeKind.RUNTIME] = "GPU runtime calls"
    cause[np.isin(nodes.kind, (NodeKind.HOST, NodeKind.GAP))] = "host code outside any operator"
    cause[nodes.kind == NodeKind.DELAY] = "late launches"
    cause[Selection(within=DATA_LOADING).mask(graph)] = INPUT_PIPELINE
    cause[gpu] = "kernels"
    class_[gpu] = "slow.compute"
    if not computes_on_gpu:
        class_[cause == OPERATORS] = "slow.compute"
    return cause, class_


def lateness(graph: Graph, rank: int) -> str:
    """How often the rank came last to a collective, and how long the others waited there."""
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
