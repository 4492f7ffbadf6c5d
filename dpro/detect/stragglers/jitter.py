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
from dpro.detect.findings import Finding
from dpro.detect.imbalance.load_model import explain, workloads_of
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
    own: pl.DataFrame, calls: pl.DataFrame, counters: pl.DataFrame, workers: pl.DataFrame
) -> list[Finding]:
    """Ranks whose own time varies far more than that of their peers, costliest first.

    Args:
        own: as `dpro.detect.stragglers.own_time.own_time` gives it, without pauses.
        calls: as `calls_of` gives them; for which ranks belong together.
    """
    stages = {rank: stage for rank, stage in workers.select("rank", "pp").iter_rows() if stage >= 0}
    found: list[Finding] = []
    for ranks in teams_by_calls(calls, own, stages):
        team = team_of(own, ranks)
        if len(ranks) < 2 or team.steps.size < MIN_STEPS:
            continue
        uneven = explain(team.own, workloads_of(counters, ranks, team.start), team.steps)
        equal = team.own if uneven is None else uneven.equal
        found += [_finding(team, equal, column, counters) for column in varying(equal)]
    worth = [each for each in found if each.severity >= MIN_COST]
    return sorted(worth, key=lambda finding: -finding.cost_ns)


def varying(own: Floats) -> list[int]:
    """Columns that vary far more than the others, in both halves of the steps, and are not slower in most.

    Args:
        own: [T, R] ns.
    """
    spread = spread_of(own)
    halves = [spread_of(half) for half in np.array_split(own, 2)]
    level = np.median(np.log(own), axis=0)
    found = []
    for column in range(own.shape[1]):
        usual, most = _peers(spread, column)
        lasts = all(half[column] >= MIN_TIMES_HALF * _peers(half, column)[0] for half in halves)
        slower = level[column] - np.median(np.delete(level, column)) >= np.log1p(MIN_RATIO)
        apart = spread[column] >= max(MIN_TIMES * usual, MIN_TIMES_NEXT * most)
        if apart and lasts and not slower:
            found.append(column)
    return found


def spread_of(own: Floats) -> Floats:
    """[R] how far the slowest tenth of the steps is above the median, as a logarithm.

    Args:
        own: [T, R] ns.
    """
    late, middle = np.quantile(np.log(own), [TAIL, 0.5], axis=0)
    spread: Floats = np.maximum(late - middle, MIN_SPREAD)
    return spread


def _peers(spread: Floats, column: int) -> tuple[float, float]:
    others = np.delete(spread, column)
    return float(np.median(others)), float(others.max())


def _finding(team: Team, own: Floats, column: int, counters: pl.DataFrame) -> Finding:
    rank, spread = team.ranks[column], spread_of(own)
    usual, _ = _peers(spread, column)
    middle = np.median(own[:, column])
    calm = own.copy()
    calm[:, column] = middle * (own[:, column] / middle) ** (usual / spread[column])
    waits = np.median(np.delete(team.waited, column, axis=1), axis=1)
    saved = np.clip(own.max(axis=1) - calm.max(axis=1), 0, None)
    cost = min(float(saved.mean()), float(waits.mean()))  # a wait may be counted in the step after
    step = float(np.median((team.own + team.waited)[:, column]))
    last = float((own.argmax(axis=1) == column).mean())
    evidence = [
        f"rank {rank}'s own time of a step is {format_duration(middle)}, and in the slowest tenth of "
        f"{own.shape[0]} steps at least {_percent(spread[column])} more; that of its peers {_percent(usual)}",
        f"it comes last in {last:.0%} of the steps; if it varied as its peers do, steps would take "
        f"{format_duration(cost)} less",
    ]
    cause, why = _why(team, own, column, counters)
    return Finding(
        "jitter", "rank", str(rank), (rank,), round(cost / step, 4) if step else 0.0, CONFIDENCE, cost,
        (*evidence, why), cause,
    )  # fmt: skip


def _percent(log_ratio: float) -> str:
    return f"{np.expm1(log_ratio):.0%}"


def _why(team: Team, own: Floats, column: int, counters: pl.DataFrame) -> tuple[str, str]:
    """Which counter is higher in the slow steps of the rank, by a good part of what they take longer.

    Returns:
        The cause, empty if unknown, and a line of evidence.
    """
    mine, start = own[:, column], team.start[:, column]
    late = mine >= np.quantile(mine, TAIL)
    longer = float(mine[late].mean() - np.median(mine))
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
    known = not means.is_empty()
    return "", "no counter of its host explains it" if known else "no counter of its host was recorded"
