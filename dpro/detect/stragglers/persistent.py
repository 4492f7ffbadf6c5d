"""Ranks whose work is clearly longer than their peers', at a cost that differs from step to step.

In: a graph, and the ranks already at fault. Out: findings. Where peers are nearly as late by chance, now this
one and now that, healing a slow rank saves nothing in many steps, and few steps of deep windows do not show
that it persists. That the rank's own work is longer does: it is compared with its peers' in
log-ratios, in units of their noise, which is estimated from all ranks of the team. A rank is named if that
costs something on average.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import product

import numpy as np
import polars as pl

from dpro.arrays import Floats, Ints
from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_COST_OF_SLOW, MIN_LATEST, PERSISTENT
from dpro.detect.stragglers.excess import (
    MIDMEAN_ERROR,
    MIN_NOISE,
    MIN_SIGNIFICANCE,
    Excess,
    median_of_others,
    midmean,
    noise_of,
)
from dpro.detect.stragglers.replayed import HealingGains, describe, gains_of, healing_gains
from dpro.replay.peers import ON_CPU, ON_GPU, teams_by_work
from dpro.replay.whatif.edits.heal import Shortened, healing_in_each_step

MIN_LONGER = 1.1  # times the peers' work: windows have few steps, and little shows what is usual
MIN_DIFFERENCES = 20  # of steps that follow each other, of all ranks: fewer do not show the noise
SHRINK = np.sqrt(2)  # from one number of latest steps that is looked at to the next: faults may be recent


def find_persistent(baseline: Baseline, named: Collection[int] = ()) -> list[Finding]:
    """Name ranks that clearly work longer than their peers and cost something, costliest first."""
    work = baseline.work
    found: dict[int, Finding] = {}
    for ranks, steps, spent in _teams(work):
        for size in _latest(len(steps)):
            latest = work.filter(pl.col("step") >= int(steps[-size]))
            for excess in clearly_longer(spent, size):
                rank = ranks[excess.column]
                if rank in found or rank in named:
                    continue
                finding = _costing(baseline, latest, rank, excess)
                if finding is not None:
                    found[rank] = finding
    return sorted(found.values(), key=lambda finding: -finding.cost_ns)


def _teams(work: pl.DataFrame) -> list[tuple[list[int], Ints, Floats]]:
    """Ranks of each team, their steps, and [T, R] ns of work in these; the CPU and the GPU apart."""
    per_step = work.group_by("rank", "step", "resource").agg(pl.col("work_ns").sum())
    found = []
    for members, resource in product(teams_by_work(work), (ON_CPU, ON_GPU)):
        team = per_step.filter(pl.col("rank").is_in(members) & (pl.col("resource") == resource))
        ranks = sorted(team["rank"].unique().to_list())
        whole = team.filter(pl.len().over("step") == len(ranks)).sort("step", "rank")
        if len(ranks) > 1 and whole.height:
            steps = whole["step"].unique(maintain_order=True).to_numpy()
            found.append((ranks, steps, whole["work_ns"].to_numpy().reshape(-1, len(ranks)).astype(float)))
    return found


def _latest(count: int) -> list[int]:
    """Numbers of latest steps that are looked at, most first."""
    sizes: list[int] = []
    size = float(count)
    while round(size) >= MIN_LATEST:
        sizes.append(round(size))
        size /= SHRINK
    return sizes


def clearly_longer(spent: Floats, size: int) -> list[Excess]:
    """Ranks that worked longer than their peers in nearly all of the latest steps, beyond chance.

    Noise is the spread of log-ratios from step to step: those of all ranks together, or of the rank alone
    where that is more. Two ranks show it half as well as three, since their ratios are the same.

    Args:
        spent: [T, R] ns of work.
        size: how many of the latest steps are judged.
    """
    if (size - 1) * (spent.shape[1] - 1) < MIN_DIFFERENCES:
        return []
    logs = np.log(np.maximum(spent[-size:], 1.0))
    excess = logs - median_of_others(logs)
    level, persistent = midmean(excess), (excess > 0).mean(axis=0)
    differences = np.diff(excess, axis=0)
    noise = np.maximum(noise_of(differences), noise_of(differences.reshape(-1, 1)))
    error = np.maximum(noise, MIN_NOISE) * MIDMEAN_ERROR / np.sqrt(size)
    clear = (level >= np.log(MIN_LONGER)) & (persistent >= PERSISTENT) & (level >= MIN_SIGNIFICANCE * error)
    return [
        Excess(int(at), size, float(level[at]), float(error[at]), float(persistent[at]))
        for at in np.flatnonzero(clear)
    ]


def _costing(baseline: Baseline, work: pl.DataFrame, rank: int, excess: Excess) -> Finding | None:
    """The finding, if healing the rank saves something on average: what is typical, or what is so now."""
    gains = healing_gains(baseline, work, [[rank]])
    if gains is None:
        return None
    if not _costs(gains):
        healed = Shortened(healing_in_each_step(rank, work))
        gains = gains_of(baseline, work, [[rank]], healed)
    if not _costs(gains):
        return None
    finding = describe(baseline, work, gains, 0)
    why = (
        f"its work is longer than its peers' typically is in {excess.persistent:.0%} of {excess.num_steps} "
        "recorded steps; the step does not wait for it in all of them"
    )
    sure = round(excess.persistent * (1 - excess.error / excess.level), 3)
    return replace(finding, confidence=sure, evidence=(*finding.evidence, why))


def _costs(gains: HealingGains) -> bool:
    """Whether the mean gain is worth a finding."""
    return bool(gains.saved.mean() >= MIN_COST_OF_SLOW * gains.base.mean())
