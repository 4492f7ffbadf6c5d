"""Hosts that became communication-bound: they wait longer than before, and not for each other.

In: own times of ranks, as inferred from their calls, and what the hosts counted in each step. Out: findings.
Where hosts wait for their transfers, as with gloo, a rank's own time in which it neither computes nor waits
for data, a core or garbage is what transfers take, or code that sleeps. One rank that sleeps is late, and
found elsewhere; here all ranks of a group have to wait longer since some step. Which of the two it is
only deep windows show: the finding says so.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.hang.evidence import ranks_in_words
from dpro.detect.regression import Regression, regression_of
from dpro.members import members_of
from dpro.replay.steps.durations import job_steps
from dpro.replay.steps.host import host_facts
from dpro.units import format_duration

COUNTED = ("training_thread_cpu_ns", "data_wait_ns", "gc_ns", "run_queue_ns")
MIN_KNOWN = 0.5  # of a group's ranks in a step: single samples may be missing
MIN_GROWTH = 0.5  # of the growth: how much of it the steps must have grown by, too


class ExchangeGroup(NamedTuple):
    """Ranks that exchange data.

    Attributes:
        ranks: those that were recorded.
        unseen: ranks that these also call with, here or in other groups, and that left no record.
    """

    ranks: list[int]
    unseen: list[int]


def find_communication_bound(
    own: pl.DataFrame, calls: pl.DataFrame, steps: pl.DataFrame, counters: pl.DataFrame, apart: list[int]
) -> list[Finding]:
    """The findings, if all ranks of a group wait longer since some step, for nothing that was counted.

    Args:
        own: as `dpro.detect.stragglers.own_time.own_time` gives it.
        calls: as `dpro.detect.stragglers.own_time.calls_of` gives them.
        apart: ranks that were left out of these, which others may have waited for.
    """
    idle = idle_times(own, steps, counters)
    job = job_steps(steps)
    if idle.is_empty() or job.is_empty():
        return []
    found: list[tuple[ExchangeGroup, Regression]] = []
    for group in _groups(calls, apart):
        inside = any(set(group.ranks) <= set(other.ranks) for other, _ in found)  # a larger one waits already
        change = None if inside else _change(idle, job, group.ranks)
        found += [(group, change)] if change else []
    return [_finding(group, change, job) for group, change in found]


def idle_times(own: pl.DataFrame, steps: pl.DataFrame, counters: pl.DataFrame) -> pl.DataFrame:
    """`[rank, step, idle_ns]`: own time without work and without what was waited for and counted.

    Args:
        own: as `own_time` returns it.
    """
    counted = host_facts(steps.filter(pl.col("window") < 0), counters).select("rank", "step", *COUNTED)
    known = own.join(counted.drop_nulls("training_thread_cpu_ns"), on=["rank", "step"])
    rest = pl.col("own_ns") - pl.sum_horizontal(COUNTED)
    return known.select("rank", "step", idle_ns=rest.clip(lower_bound=0).cast(pl.Float64))


def _groups(calls: pl.DataFrame, apart: list[int]) -> list[ExchangeGroup]:
    """Groups of which several ranks were recorded, the largest first; none that may wait for ranks apart."""
    seen = calls.group_by("key").agg(pl.col("rank").unique().sort()).sort("key")
    members = [set(members_of(key.rpartition("|")[2])) for key in seen["key"]]
    recorded = {*calls["rank"]}
    found = {}
    for ranks in seen["rank"].to_list():
        met = set().union(*(others for others in members if others & {*ranks}))
        if len(ranks) > 1 and not met & {*apart}:
            found[tuple(ranks)] = ExchangeGroup(ranks, sorted(met - recorded))
    return sorted(found.values(), key=lambda group: (-len(group.ranks), group.ranks))


def _change(idle: pl.DataFrame, job: pl.DataFrame, ranks: list[int]) -> Regression | None:
    """Since when every rank of a group waits longer; None where they do not, or the steps hardly show it."""
    least = (
        idle.filter(pl.col("rank").is_in(ranks))
        .group_by("step")
        .agg(pl.col("idle_ns").min(), known=pl.len())
        .filter(pl.col("known") >= max(2, MIN_KNOWN * len(ranks)))
    )
    typical = job["duration_ns"].median()
    series = job.join(least, on="step").sort("step").with_columns(duration_ns=pl.col("idle_ns") + typical)
    change = regression_of(series) if series.height else None
    if change is None:
        return None
    late = pl.col("step") >= change.since
    before, after = (job.filter(side)["duration_ns"].median() for side in (~late, late))
    grown = float(after) - float(before)  # type: ignore[arg-type]
    return change if grown >= MIN_GROWTH * (change.after_ns - change.before_ns) else None


def _finding(group: ExchangeGroup, change: Regression, job: pl.DataFrame) -> Finding:
    typical = float(job["duration_ns"].median())  # type: ignore[arg-type]
    before, after = change.before_ns - typical, change.after_ns - typical
    cost = after - before
    step = float(job.filter(pl.col("step") >= change.since)["duration_ns"].median())  # type: ignore[arg-type]
    who = f"{ranks_in_words(group.ranks)}"
    evidence = [
        f"since step {change.since} each of {who} spends {format_duration(after)} per step neither computing "
        f"nor waiting for a later rank, its data, a core or garbage; before it was {format_duration(before)}",
        "that is what hosts wait for transfers, or code of theirs that sleeps; as all of them began to at "
        "once, it is likely the network between them",
        "not known: which, and which link or port; deep windows, or NCCL's Inspector, would show it",
    ]
    either = [f"the network between {who}", "code that waits on all of them"]
    if group.unseen:
        either.append(f"{ranks_in_words(group.unseen)} coming late")
        evidence.append(f"they may wait for {ranks_in_words(group.unseen)}, which left no record")
    sure = round(change.persistent / len(either), 3)
    return Finding(
        "slow.fabric", "one of", ", ".join(either), tuple(group.ranks), round(cost / step, 4), sure, cost,
        tuple(evidence),
    )  # fmt: skip
