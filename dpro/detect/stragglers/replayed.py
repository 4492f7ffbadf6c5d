"""Detectors of ranks that work longer than their peers on equal work, as opposed to ranks that wait for them.

Takes a graph; returns findings. A rank that waits has long collectives rather than long work, so work is
compared, phase by phase between collectives. A rank is at fault if the step becomes shorter when it works
like its peers, in nearly every step and beyond noise, in all recorded steps or in the latest ones. Two more
detectors find ranks whose own work is far or steadily longer, though the replay does not show in every step
that this costs anything.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats, Ints
from dpro.detect.baseline import Baseline, waits
from dpro.detect.findings import Finding, costliest_first, ranks_of
from dpro.detect.observations import Observation, Value, observe, observe_replay
from dpro.detect.significance import (
    MIN_COST_OF_SLOW,
    MIN_LATEST,
    MIN_SHARE,
    MIN_STEPS,
    PERSISTENT,
    clear_gain,
    clear_gains,
    confidence,
    first_of_latest,
)
from dpro.detect.stragglers.causes import (
    COUNTED,
    NEARLY_AS_LATE,
    OPERATORS,
    OUTSIDE_OPERATORS,
    counted_more,
    excess_by_cause,
    host_cause,
    idle_cause,
)
from dpro.detect.stragglers.code import name_code
from dpro.detect.stragglers.excess import (
    MIDMEAN_ERROR,
    MIN_NOISE,
    MIN_SIGNIFICANCE,
    Excess,
    median_of_peers,
    midmean,
    noise_of,
)
from dpro.replay.graph import Graph
from dpro.replay.mesh import Mesh, axes_of_messages, mesh_of_run, named_axes, places_along
from dpro.replay.peers import ON_CPU, ON_GPU, peer_medians, peers_of, ranks_of_teams, teams_by_work
from dpro.replay.timeline import are_usual
from dpro.replay.whatif.edits.heal import Shortened, healing, healing_in_each_step
from dpro.schema import COUNTERS, STEPS

ROUNDING = 1e-9  # relative error of sums of ns as floats
AS_LATE = observe("late-together", "fixing one of them alone saves little: the others are as late")


@dataclass(frozen=True)
class HealingGains:
    """Gains of healing ranks.

    Attributes:
        ranks: [R] sets of ranks that are healed together.
        steps: [T] step numbers.
        base: [T] step times unhealed, in ns.
        saved: [T, R] savings, in ns per step.
    """

    ranks: list[list[int]]
    steps: Ints
    base: Ints
    saved: Ints

    def of_usual_step(self, column: int) -> tuple[float, float]:
        """Return what healing one set saves of the mean usual step, and that step's length, in ns."""
        usual = are_usual(self.base)
        return float(self.saved[usual, column].mean()), float(self.base[usual].mean())


def find_stragglers(baseline: Baseline) -> list[Finding]:
    """Find the ranks that hold up the others, costliest first.

    Where healing no single rank helps but healing all that work longer than their peers does, these are
    named together.
    """
    work = baseline.work
    ranks = sorted(work["rank"].unique().to_list())
    gains = large_gains(baseline, work, [[rank] for rank in ranks]) if len(ranks) > 1 else None
    if gains is None or gains.base.size < MIN_STEPS:
        return []
    findings = _significant(baseline, work, gains)
    for first in first_of_latest(gains.steps):
        named = ranks_of(findings)
        latest = work.filter(pl.col("step") >= first)
        others = [rank for rank in _working_longer(latest, gains) if rank not in named]
        findings += _significant(baseline, latest, large_gains(baseline, latest, [[rank] for rank in others]))
        named |= ranks_of(findings)
        left = [rank for rank in others if rank not in named]
        findings += (
            _significant(baseline, latest, large_gains(baseline, latest, [left])) if len(left) > 1 else []
        )
    return costliest_first(findings)


def _significant(baseline: Baseline, work: pl.DataFrame, gains: HealingGains | None) -> list[Finding]:
    """Return findings of the sets whose healing clearly helps."""
    if gains is None:
        return []
    clear = np.flatnonzero(clear_gains(gains.saved, gains.base)).tolist()
    return [describe(baseline, work, gains, column) for column in clear]


def _working_longer(work: pl.DataFrame, gains: HealingGains) -> list[int]:
    """Return ranks that clearly work longer per step than their peers typically do, on the CPU or on the GPU.

    Args:
        work: as from `phase_work`, of the steps that count.
    """
    base = gains.base[gains.steps >= work["step"].to_numpy().min()]
    place = ["team", "step", "resource"]
    whole = work.group_by("rank", "step", "resource").agg(pl.col("work_ns").sum())
    whole = whole.join(ranks_of_teams(teams_by_work(work)).select("rank", "team"), on="rank")
    places = whole.select(place).unique().with_row_index("place")
    rows = whole.join(places, on=place).with_columns(others=pl.len().over("place").cast(pl.Int64) - 1)
    place_of_row, spent, others = (rows[name].to_numpy() for name in ("place", "work_ns", "others"))
    peer = peer_medians(place_of_row, spent, np.ones(rows.height, np.bool_), others)
    compared = rows.with_columns(excess=pl.col("work_ns") - pl.Series(peer)).filter(pl.col("others") > 0)
    in_all = compared.filter(pl.len().over("rank", "resource") == base.size).sort("rank", "resource", "step")
    excess = in_all["excess"].to_numpy().reshape(-1, base.size).T
    longer: list[int] = np.unique(in_all["rank"].to_numpy()[:: base.size][clear_gains(excess, base)]).tolist()
    return longer


def healing_gains(baseline: Baseline, work: pl.DataFrame, sets: list[list[int]]) -> HealingGains | None:
    """Replay with each set of ranks healed in turn; None where no two ranks can be compared.

    Args:
        work: as from `phase_work`, of the steps that count.
        sets: ranks to heal together; those without peers are left out.
    """
    sets, healed = _healed(baseline, work, sets)
    return gains_of(baseline, work, sets, healed) if sets else None


def large_gains(baseline: Baseline, work: pl.DataFrame, sets: list[list[int]]) -> HealingGains | None:
    """Return `healing_gains` without sets that save too little for a finding, usually nearly all.

    The critical path to the end of a window still exists after healing: no set saves more than the time that
    it removes from that path.

    Args:
        work: as from `phase_work`, of the steps that count.
        sets: ranks to heal together; those without peers are left out.
    """
    sets, healed = _healed(baseline, work, sets)
    if not sets:
        return None
    taken = baseline.saved_at_most(healed, set(chain(*sets)))
    least = MIN_SHARE * baseline.step_ns[_counted_steps(baseline, work)].sum()
    large = [ranks for ranks in sets if taken[np.array(ranks) + 1].sum() >= least * (1 - ROUNDING)]
    return gains_of(baseline, work, large, healed)


def _healed(
    baseline: Baseline, work: pl.DataFrame, sets: list[list[int]]
) -> tuple[list[list[int]], Shortened]:
    """Return the sets without ranks that have no peers, and the change that heals the other ranks."""
    with_peers = {rank for team in teams_by_work(work) if len(team) > 1 for rank in team}
    sets = [kept for ranks in sets if (kept := [rank for rank in ranks if rank in with_peers])]
    return sets, Shortened(healing(baseline.graph, sorted(set(chain(*sets))), work))


def _counted_steps(baseline: Baseline, work: pl.DataFrame) -> Bools:
    """Return [T] a mask of the steps that count: from the first one that `work` has."""
    counted: Bools = baseline.steps >= work["step"].to_numpy().min()
    return counted


def gains_of(
    baseline: Baseline, work: pl.DataFrame, sets: list[list[int]], healed: Shortened
) -> HealingGains:
    """Return what healing sets of ranks would save, in the steps that count.

    Args:
        work: as from `phase_work`, of the steps that count.
    """
    counted = _counted_steps(baseline, work)
    base = baseline.step_ns[counted]
    graphs = baseline.graphs_changed(healed, sets)
    after = [baseline.changed_step_ns(changed)[-base.size :] for changed in graphs]
    return HealingGains(
        sets, baseline.steps[counted], base, base[:, None] - np.reshape(after, (-1, base.size)).T
    )


def describe(baseline: Baseline, work: pl.DataFrame, gains: HealingGains, column: int) -> Finding:
    """Return the finding of one of the sets of ranks that were healed.

    Args:
        work: as from `phase_work`, of the steps that count.
    """
    graph, ranks, saved = baseline.graph, gains.ranks[column], gains.saved[:, column]
    cost, step = gains.of_usual_step(column)
    since = int(gains.steps[0])
    causes = excess_by_cause(baseline, ranks[0], peers_of(teams_by_work(work), ranks[0]), since)
    total = float(causes["excess_ns"].clip(lower_bound=0).sum())
    largest = causes.row(0, named=True)
    more = _counted(graph, work, ranks[0], since)
    counted = host_cause(more, total)
    if counted is None and largest["cause"] in (OPERATORS, OUTSIDE_OPERATORS):
        counted = idle_cause(more, total)
    class_, cause = ("slow.host", counted.cause) if counted else (largest["class"], largest["cause"])
    kind, name = "rank" if len(ranks) == 1 else "ranks", ", ".join(map(str, ranks))
    axis, felt = felt_along(graph, ranks)
    longer = observe(
        "longer-work",
        "rank {rank} works {longer_ns} longer per step than its peers on the same work, {cause_ns} of it in "
        "{cause}",
        rank=ranks[0], longer_ns=total, cause_ns=largest["excess_ns"], cause=largest["cause"],
    )  # fmt: skip
    longer, place = name_code(longer, largest, graph.run, ranks[0])
    observations = [
        longer,
        *([counted.observation] if counted else []),
        *(lateness(graph, rank) for rank in ranks),
        *felt,
        observe_replay(f"{kind} {name} as fast as its peers", step - cost, step),
    ]  # fmt: skip
    if since > int(np.min(graph.nodes.step[graph.nodes.step >= 0])):
        sentence = "this holds for the latest {steps} recorded steps, from step {since_step} on"
        observations.append(observe("so-since", sentence, steps=gains.steps.size, since_step=since))
    if len(ranks) > 1:
        observations.append(AS_LATE)
    elif total and cost < 0.5 * total:
        observations.append(NEARLY_AS_LATE)
    return Finding(
        class_, kind, name, tuple(ranks), round(cost / step, 4), confidence(saved, gains.base),
        cost, tuple(observations), cause, axis, place,
    )  # fmt: skip


def _counted(graph: Graph, work: pl.DataFrame, rank: int, since: int) -> dict[str, float]:
    """Return how much more of each counter the rank has than its peers in deep windows, in ns per step."""
    if graph.run is None:
        return {}
    steps, counters = graph.run.table(STEPS), graph.run.table(COUNTERS)
    compared = pl.col("rank").is_in([rank, *peers_of(teams_by_work(work), rank)])
    inside = steps.filter(compared & (pl.col("window") >= 0) & (pl.col("step") >= since))
    places = inside.select("rank", time_ns="start_ns")
    rows = counters.filter(pl.col("counter").is_in(COUNTED)).join(places, on=["rank", "time_ns"])
    return counted_more(rows, rank)


def lateness(graph: Graph, rank: int) -> Observation:
    """Return the share of all waiting in collectives that is for a rank, and how often it came last.

    A share, since waits of one rank in several collectives at once add up to more than it really waits.
    """
    frame = waits(graph, graph.nodes.measured_start)
    times = frame.filter((pl.col("wait_ns") == 0) & (pl.col("rank") == rank)).height
    waited_ns, is_last = frame["wait_ns"].to_numpy(), (frame["last"] == rank).to_numpy()
    return observe(
        "lateness",
        "{waited_share} of all waiting in collectives is for rank {rank}, which comes last to {times} of "
        "{collectives}",
        waited_share=float(waited_ns[is_last].sum()) / max(float(waited_ns.sum()), 1.0), rank=rank,
        times=times, collectives=frame["instance"].n_unique(),
    )  # fmt: skip


# Coordinates of a late rank in the layout, and the axis of the groups that wait for it.

MIN_WAIT = 0.1  # of the longest wait: shorter ones are not mentioned


def felt_along(graph: Graph, ranks: Sequence[int]) -> tuple[str, tuple[Observation, ...]]:
    """Return the axis along which others wait most for late ranks, and the waits; empty with one axis."""
    if graph.run is None:
        return "", ()
    mesh = mesh_of_run(graph.run)
    if len(named_axes(mesh)) < 2:
        return "", ()
    waits_ns = _waits_by_axis(graph, ranks)
    if not waits_ns:
        return "", ()
    (worst, worst_ns), *others = sorted(waits_ns.items(), key=lambda item: -item[1])
    alone = len(ranks) == 1
    felt = observe(
        "waited-for-along",
        f"ranks that share a group with {'{ranks} ({place})' if alone else 'these ranks'} wait for it per "
        "step: along {axis} {wait_ns}",
        ranks=ranks, place=place_of(mesh, ranks[0]) if alone else "", axis=worst, wait_ns=worst_ns,
    )  # fmt: skip
    for number, (axis, ns) in enumerate(others, 2):
        if ns >= MIN_WAIT * worst_ns:
            values: dict[str, Value] = {f"axis_{number}": axis, f"axis_{number}_wait_ns": ns}
            felt = felt.then(f", along {{axis_{number}}} {{axis_{number}_wait_ns}}", **values)
    return worst, (felt,)


def place_of(mesh: Mesh, rank: int) -> str:
    """Return a rank's coordinates, such as `dp 1, tp 0`; empty where unknown."""
    places = ((name, places_along(mesh, name).get(rank)) for name in named_axes(mesh))
    return ", ".join(f"{name} {place}" for name, place in places if place is not None)


def _waits_by_axis(graph: Graph, ranks: Sequence[int]) -> dict[str, float]:
    """Return by axis the mean wait of each rank where one of `ranks` comes last, in ns per step."""
    nodes = graph.nodes
    axes = (*axes_of_messages(graph), "")
    calls = np.flatnonzero((nodes.collective >= 0) & (nodes.message >= 0))
    named = pl.DataFrame(
        {"instance": nodes.collective[calls], "axis": [axes[kind] for kind in nodes.message[calls].tolist()]},
        {"instance": pl.Int64, "axis": pl.String},
    ).unique("instance", keep="first", maintain_order=True)
    late = pl.col("last").is_in(list(ranks)) & ~pl.col("rank").is_in(list(ranks))
    frame = waits(graph, graph.nodes.measured_start)
    steps = max(frame["step"].n_unique(), 1)
    waited = frame.filter(late & (pl.col("wait_ns") > 0)).join(
        named.filter(pl.col("axis") != ""), on="instance"
    )
    by_axis = waited.group_by("axis").agg(pl.col("wait_ns").sum() / (steps * pl.col("rank").n_unique()))
    return {axis: float(ns) for axis, ns in by_axis.sort("axis").iter_rows()}


# Ranks whose lateness is hidden by queued work.

FAR = 1.5  # multiple of the slowest peer's work
MIN_PEERS = 2  # with a single other rank, it is unknown which of the two is usual
NO_STAGE = -1


def find_masked(baseline: Baseline, named: Collection[int] = ()) -> list[Finding]:
    """Find ranks whose host is far slower than its peers' and costs something now, costliest first."""
    graph, work, base = baseline.graph, baseline.work, baseline.step_ns
    if base.size < MIN_STEPS:
        return []
    findings = []
    for rank, longer in _far_longer(graph, work, base).items():
        gains = healing_gains(baseline, work, [[rank]]) if rank not in named else None
        if gains is not None and _costs(gains):
            findings.append(_describe(baseline, rank, gains, longer))
    return costliest_first(findings)


def _far_longer(graph: Graph, work: pl.DataFrame, base: Ints) -> dict[int, Floats]:
    """Return ranks that clearly work far longer than the slowest peer, with their [T] excess, in ns.

    Phases count that are far longer in nearly every step than is usual there: what lengthens a step on all
    ranks (allocating memory in the first) does not make a rank look better.

    Args:
        base: [T] step times, in ns.
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
    far_longer: dict[int, Floats] = {}
    for (rank,), phases in suspects.group_by("rank", maintain_order=True):
        longer = np.array(phases["excess"].to_list(), np.float64)
        clear = [steps_longer for steps_longer in longer if clear_gain(steps_longer, base)]
        if clear or clear_gain(longer.sum(axis=0), base):
            far_longer[int(rank)] = np.sum(clear or longer, axis=0)
    return far_longer


def _with_slowest_peer(graph: Graph, work: pl.DataFrame) -> pl.DataFrame:
    """Return `rank`, `step`, `position` of a phase, the host's `work_ns` in it, and the slowest `peer`'s.

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
    cost, step = gains.of_usual_step(0)
    causes = excess_by_cause(baseline, rank, peers_of(baseline.teams, rank), int(gains.steps.min()))
    largest = causes.filter(pl.col("class") == "slow.host").row(0, named=True)
    longer_work = observe(
        "longer-work",
        "between the same collectives, the host of rank {rank} works {longer_ns} longer per step than the "
        "slowest of its peers, {times} times as long or more in nearly every step; {cause}",
        rank=rank, longer_ns=float(longer.mean()), times=FAR, cause=largest["cause"],
    )  # fmt: skip
    longer_work, place = name_code(longer_work, largest, baseline.graph.run, rank)
    observations = (
        longer_work,
        lateness(baseline.graph, rank),
        observe_replay(f"rank {rank} as fast as its peers", step - cost, step).then(
            ": work that is queued elsewhere hides the rest"
        ),
    )  # fmt: skip
    return Finding(
        "slow.host", "rank", str(rank), (rank,), round(cost / step, 4), confidence(longer, gains.base), cost,
        observations, largest["cause"], place=place,
    )  # fmt: skip


# Ranks whose work is clearly longer, at a cost that varies from step to step. Where peers are nearly as late
# by chance, now one and now another, healing a slow rank saves nothing in many steps, and the few steps of
# deep windows do not show that the gain persists. The rank's own work does: it is compared with its peers' as
# log-ratios, in units of their noise, which is estimated from all ranks of the team. A rank is named if its
# excess costs something on average.

MIN_LONGER = 1.1  # multiple of the peers' work: windows have too few steps to show smaller differences
MIN_DIFFERENCES = 20  # between successive steps, over all ranks: fewer do not show the noise
SHRINK = np.sqrt(2)  # ratio of successive numbers of latest steps that are tested: faults may be recent


def find_persistent(baseline: Baseline, named: Collection[int] = ()) -> list[Finding]:
    """Find ranks that clearly work longer than their peers and cost something, costliest first."""
    work = baseline.work
    findings: dict[int, Finding] = {}
    for ranks, steps, spent in _teams(work):
        for size in _latest(len(steps)):
            latest = work.filter(pl.col("step") >= int(steps[-size]))
            for excess in clearly_longer(spent, size):
                rank = ranks[excess.column]
                if rank in findings or rank in named:
                    continue
                finding = _costing(baseline, latest, rank, excess)
                if finding is not None:
                    findings[rank] = finding
    return costliest_first(findings.values())


def _teams(work: pl.DataFrame) -> list[tuple[list[int], Ints, Floats]]:
    """Return ranks of each team, their steps, and [T, R] ns of work in these; CPU and GPU separately."""
    per_step = work.group_by("rank", "step", "resource").agg(pl.col("work_ns").sum())
    arrays = []
    for members, resource in product(teams_by_work(work), (ON_CPU, ON_GPU)):
        team = per_step.filter(pl.col("rank").is_in(members) & (pl.col("resource") == resource))
        ranks = sorted(team["rank"].unique().to_list())
        whole = team.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
        if len(ranks) > 1 and whole.height:
            steps = whole["step"].unique(maintain_order=True).to_numpy()
            spent = whole["work_ns"].to_numpy().reshape(-1, len(ranks)).astype(float)
            arrays.append((ranks, steps, spent))
    return arrays


def _latest(count: int) -> list[int]:
    """Return the numbers of latest steps that are tested, largest first."""
    sizes: list[int] = []
    size = float(count)
    while round(size) >= MIN_LATEST:
        sizes.append(round(size))
        size /= SHRINK
    return sizes


def clearly_longer(spent: Floats, size: int) -> list[Excess]:
    """Return ranks that worked longer than their peers in nearly all of the latest steps, beyond chance.

    Noise is the spread of log-ratios from step to step: that of all ranks together, or of the rank alone
    if larger. Two ranks count as half as many samples as three, since their ratios are equal.

    Args:
        spent: [T, R] work, in ns.
    """
    if (size - 1) * (spent.shape[1] - 1) < MIN_DIFFERENCES:
        return []
    logs = np.log(np.maximum(spent[-size:], 1.0))
    excess = logs - median_of_peers(logs)
    level, persistent = midmean(excess), (excess > 0).mean(axis=0)
    differences = np.diff(excess, axis=0)
    noise = np.maximum(noise_of(differences), noise_of(differences.reshape(-1, 1)))
    error = np.maximum(noise, MIN_NOISE) * MIDMEAN_ERROR / np.sqrt(size)
    clear = (level >= np.log(MIN_LONGER)) & (persistent >= PERSISTENT) & (level >= MIN_SIGNIFICANCE * error)
    return [
        Excess(column, size, level.item(column), error.item(column), persistent.item(column))
        for column in np.flatnonzero(clear).tolist()
    ]


def _costing(baseline: Baseline, work: pl.DataFrame, rank: int, excess: Excess) -> Finding | None:
    """Return the finding, if healing the rank's typical excess, or that of each step, saves something."""
    gains = healing_gains(baseline, work, [[rank]])
    if gains is None:
        return None
    if not _costs(gains):
        healed = Shortened(healing_in_each_step(rank, work))
        gains = gains_of(baseline, work, [[rank]], healed)
    if not _costs(gains):
        return None
    often = observe(
        "often-longer",
        "its work is longer than its peers' typically is in {longer_share} of {steps} recorded steps; the "
        "step does not wait for it in all of them",
        longer_share=excess.persistent, steps=excess.num_steps,
    )  # fmt: skip
    sure = round(excess.persistent * (1 - excess.error / excess.level), 3)
    return replace(describe(baseline, work, gains, 0), confidence=sure).observing(often)


def _costs(gains: HealingGains) -> bool:
    """Return whether the mean gain is worth a finding."""
    return bool(gains.saved.mean() >= MIN_COST_OF_SLOW * gains.base.mean())
