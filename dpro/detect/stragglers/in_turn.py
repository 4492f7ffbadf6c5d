"""Ranks that are late one after another in each step: they take turns at something that they share.

In: own times of ranks, and calls, on one clock. Out: at most one finding for each team of ranks, about the
job: no rank is at fault. Where the same rank comes last in nearly all steps it is late by itself, which is
found elsewhere; ranks that are late by chance are not equally far apart in each step.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.arrays import MAD_TO_SIGMA, Floats
from dpro.detect.findings import Finding, costliest_first
from dpro.detect.significance import PERSISTENT
from dpro.detect.stragglers.excess import midmean
from dpro.detect.stragglers.from_calls import team_of
from dpro.detect.stragglers.own_time import teams_by_calls
from dpro.units import format_duration

COMPONENT = "what ranks take in turn"
MIN_STEPS = 20
MIN_GAP = 0.05  # of the step: from one rank to the next
MAX_SPREAD = 0.25  # of a distance: of normal noise it is 0.6 or more, however large that is
MAX_RATIO = 2.0  # of the largest distance to the smallest
MAX_LAST = 0.9  # of the steps in which one rank comes last: else it is late by itself


def find_turns(own_times: pl.DataFrame, calls: pl.DataFrame, workers: pl.DataFrame) -> list[Finding]:
    """Find ranks that take turns, costliest first.

    Args:
        own_times: as `dpro.detect.stragglers.own_time.own_time` gives it, without pauses.
        calls: as `calls_of` gives them; for which ranks belong together.
        workers: table `workers`, which says of what stage ranks are.
    """
    stages = {rank: stage for rank, stage in workers.select("rank", "pp").iter_rows() if stage >= 0}
    findings = []
    for ranks in teams_by_calls(calls, own_times, stages):
        team = team_of(own_times, ranks)
        if len(ranks) < 2 or team.steps.size < MIN_STEPS:
            continue
        cycle = float(np.median((team.own + team.waited).mean(axis=1)))
        gaps_ns = distances(team.own, cycle)
        if gaps_ns is None:
            continue
        cost = float(min(gaps_ns.sum(), team.waited.max(axis=1).mean()))
        last = np.bincount(team.own.argmax(axis=1), minlength=len(ranks)) / team.steps.size
        shares = ", ".join(f"rank {rank} {share:.0%}" for rank, share in zip(ranks, last, strict=True))
        gap = format_duration(float(np.median(gaps_ns)))
        evidence = (
            f"in each step ranks come one after another, each {gap} later, "
            f"and which comes last changes: {shares} of {team.steps.size} steps",
            "no rank is at fault: they wait for each other at something that they share and take in turn, "
            "such as a lock of a file, a server, or a disk; look at what all of them open in each step",
        )
        sure = round(float(1 - last.max()) * len(ranks) / (len(ranks) - 1), 3)
        findings.append(
            Finding(
                "slow.host",
                "job",
                COMPONENT,
                tuple(ranks),
                round(cost / cycle, 4),
                min(sure, 0.9),
                cost,
                evidence,
            )
        )
    return costliest_first(findings)


def distances(own_ns: Floats, cycle_ns: float) -> Floats | None:
    """[R - 1] ns from each rank to the next in the order in which they come; None where they take no turns.

    Args:
        own_ns: [T, R] own times.
        cycle_ns: of a step.
    """
    gaps_ns = np.diff(np.sort(own_ns, axis=1), axis=1)
    typical = midmean(gaps_ns)
    spread = MAD_TO_SIGMA * np.median(np.abs(gaps_ns - np.median(gaps_ns, axis=0)), axis=0)
    last = np.bincount(own_ns.argmax(axis=1), minlength=own_ns.shape[1]) / len(own_ns)
    steady = (gaps_ns >= typical / 2).mean(axis=0) >= PERSISTENT
    if typical.min() < MIN_GAP * cycle_ns or typical.max() > MAX_RATIO * typical.min():
        return None
    if not steady.all() or (spread > MAX_SPREAD * typical).any() or last.max() > MAX_LAST:
        return None
    return typical
