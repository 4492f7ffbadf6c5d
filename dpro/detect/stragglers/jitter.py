"""Ranks whose steps vary far more than those of their peers, though they are not slower in most.

In: own times of ranks, calls, counters and workers on one clock. Out: findings of class `jitter`: what is
seen, and what the others wait because of it. Which part of the machine is at fault a varying time does not
show, so no part is blamed. Ranks that are slower in nearly all steps, and steps that pause, are found
elsewhere.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.arrays import Floats
from dpro.detect.findings import Finding, costliest_first
from dpro.detect.load_model import explain, workloads_of
from dpro.detect.significance import MIN_COST
from dpro.detect.stragglers.causes import EXPLAINED, HOST_CAUSES
from dpro.detect.stragglers.excess import MIN_RATIO, Team
from dpro.detect.stragglers.from_calls import team_of
from dpro.detect.stragglers.own_time import teams_by_calls
from dpro.units import format_duration

MIN_STEPS = 60  # of fewer, how far the slowest tenth is off is hardly known
TAIL = 0.9  # quantile whose distance from the median is the spread: what the others wait for is lateness
MIN_SPREAD = 0.01  # of the own time: lower spreads of peers are raised to this
# Times the spread of the peers, typically and of the one that varies most: the quantile of 60 normal values
# has a relative error of a quarter, and each rank of each job is one more chance to be wrong.
MIN_TIMES, MIN_TIMES_NEXT = 4.0, 2.5
MIN_TIMES_HALF = 2.5  # in each half of the steps: what was there for a while is no jitter
CONFIDENCE = 0.7


def find_jitter(
    own_times: pl.DataFrame, calls: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Ranks whose own time varies far more than that of their peers, costliest first.

    Args:
        own_times: as `dpro.detect.stragglers.own_time.own_time` gives it, without pauses.
        calls: as `calls_of` gives them; for which ranks belong together.
    """
    stages = {rank: stage for rank, stage in workers.select("rank", "pp").iter_rows() if stage >= 0}
    findings: list[Finding] = []
    for ranks in teams_by_calls(calls, own_times, stages):
        team = team_of(own_times, ranks)
        if len(ranks) < 2 or team.steps.size < MIN_STEPS:
            continue
        uneven = explain(team.own, workloads_of(counters, ranks, team.start), team.steps)
        equal = team.own if uneven is None else uneven.equal
        findings += [_finding(team, equal, column, counters) for column in varying(equal)]
    worth = [finding for finding in findings if finding.severity >= MIN_COST]
    return costliest_first(worth)


def varying(own_ns: Floats) -> list[int]:
    """Columns that vary far more than the others, in both halves of the steps, and are not slower in most.

    Args:
        own_ns: [T, R] ns.
    """
    spread = spread_of(own_ns)
    halves = [spread_of(half) for half in np.array_split(own_ns, 2)]
    level = np.median(np.log(own_ns), axis=0)
    columns = []
    for column in range(own_ns.shape[1]):
        usual, most = _peers(spread, column)
        lasts = all(half[column] >= MIN_TIMES_HALF * _peers(half, column)[0] for half in halves)
        slower = level[column] - np.median(np.delete(level, column)) >= np.log1p(MIN_RATIO)
        apart = spread[column] >= max(MIN_TIMES * usual, MIN_TIMES_NEXT * most)
        if apart and lasts and not slower:
            columns.append(column)
    return columns


def spread_of(own_ns: Floats) -> Floats:
    """[R] how far the slowest tenth of the steps is above the median, as a logarithm.

    Args:
        own_ns: [T, R] ns.
    """
    late, middle = np.quantile(np.log(own_ns), [TAIL, 0.5], axis=0)
    spread: Floats = np.maximum(late - middle, MIN_SPREAD)
    return spread


def _peers(spread: Floats, column: int) -> tuple[float, float]:
    others = np.delete(spread, column)
    return float(np.median(others)), float(others.max())


def _finding(team: Team, own_ns: Floats, column: int, counters: pl.DataFrame) -> Finding:
    rank, spread = team.ranks[column], spread_of(own_ns)
    usual, _ = _peers(spread, column)
    middle = np.median(own_ns[:, column])
    calm = own_ns.copy()
    calm[:, column] = middle * (own_ns[:, column] / middle) ** (usual / spread[column])
    waits = np.median(np.delete(team.waited, column, axis=1), axis=1)
    saved = np.clip(own_ns.max(axis=1) - calm.max(axis=1), 0, None)
    cost = min(float(saved.mean()), float(waits.mean()))  # a wait may be counted in the step after
    step = float(np.median((team.own + team.waited)[:, column]))
    last = float((own_ns.argmax(axis=1) == column).mean())
    evidence = [
        f"rank {rank}'s own time of a step is {format_duration(middle)}, and in the slowest tenth of "
        f"{len(own_ns)} steps at least {_percent(spread[column])} more; that of its peers {_percent(usual)}",
        f"it comes last in {last:.0%} of the steps; if it varied as its peers do, steps would take "
        f"{format_duration(cost)} less",
    ]
    cause, why = _why(team, own_ns, column, counters)
    return Finding(
        "jitter", "rank", str(rank), (rank,), round(cost / step, 4) if step else 0.0, CONFIDENCE, cost,
        (*evidence, why), cause,
    )  # fmt: skip


def _percent(log_ratio: float) -> str:
    return f"{np.expm1(log_ratio):.0%}"


def _why(team: Team, own_ns: Floats, column: int, counters: pl.DataFrame) -> tuple[str, str]:
    """Which counter is higher in the slow steps of the rank, by a good part of what they take longer.

    Returns:
        The cause, empty if unknown, and a line of evidence.
    """
    of_rank, start = own_ns[:, column], team.start[:, column]
    late = of_rank >= np.quantile(of_rank, TAIL)
    longer = float(of_rank[late].mean() - np.median(of_rank))
    rows = counters.filter(
        (pl.col("rank") == team.ranks[column]) & pl.col("counter").is_in(list(HOST_CAUSES))
    )
    times = pl.DataFrame(
        {"time_ns": start, "late": late}, schema_overrides={"time_ns": rows["time_ns"].dtype}
    )
    means = (
        rows.join(times, on="time_ns")
        .group_by("counter")
        .agg(more=pl.col("value").filter("late").mean() - pl.col("value").filter(~pl.col("late")).mean())
        .drop_nulls("more")
        .sort("more", descending=True)
    )
    for counter, more in means.head(1).iter_rows():
        if more >= EXPLAINED * longer:
            cause, does = HOST_CAUSES[counter]
            return cause, f"in these steps it {does} {format_duration(more)} longer than in others"
    unexplained = "no counter of its host explains it"
    return "", "no counter of its host was recorded" if means.is_empty() else unexplained
