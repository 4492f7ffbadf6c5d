"""A training loop that waits for its input on every rank, told from the host's counters alone.

In: steps and their counters. Out: at most one finding. It serves where no deep window shows what the wait
costs; where there is one, `input.py` replays the job without it. One rank that waits is late, and named so.
"""

from __future__ import annotations

import polars as pl

from dpro.detect.findings import Finding
from dpro.detect.input import LEAST_SHARE
from dpro.detect.straggler import INPUT_PIPELINE, PERSISTENT
from dpro.replay.host import host_facts
from dpro.units import format_duration

WINDOWS = (40, 20, 10)  # steps that are judged, the latest of: it may have begun while the job ran


def find_waiting_for_data(steps: pl.DataFrame, counters: pl.DataFrame, *, on_gpus: bool) -> list[Finding]:
    """Say so if every rank waits for data for a large part of nearly each of the latest steps.

    Args:
        steps: table `steps`.
        counters: table `counters`.
        on_gpus: whether GPUs may have had work meanwhile.
    """
    facts = host_facts(steps.filter(pl.col("window") < 0), counters).drop_nulls("data_wait_ns")
    waits = (
        facts.group_by("step")
        .agg(
            pl.col("data_wait_ns").min(),
            pl.col("duration_ns").median(),
            most_ns=pl.col("data_wait_ns").max(),
            ranks=pl.len(),
        )
        .filter(pl.col("ranks") >= pl.col("ranks").max() / 2)  # single samples may be missing
        .sort("step")
    )
    judged = ((waits.tail(size), _steady(waits.tail(size))) for size in WINDOWS if size <= waits.height)
    waits, steady = next((each for each in judged if each[1] >= PERSISTENT), (waits, 0.0))
    if not steady:
        return []
    least, most, step = (
        float(waits[name].to_numpy().mean()) for name in ("data_wait_ns", "most_ns", "duration_ns")
    )
    evidence = [
        f"each rank waits {format_duration(least)} to {format_duration(most)} per step for its data, in the "
        f"latest {waits.height} steps"
    ]
    if on_gpus:
        evidence.append("not known: whether their GPUs have work meanwhile; a deep window would tell")
    ranks = tuple(sorted(facts["rank"].unique().to_list()))
    sure = round(steady * (0.5 if on_gpus else 1.0), 3)
    share = round(least / step, 4)
    return [Finding("slow.host", "job", INPUT_PIPELINE, ranks, share, sure, least, tuple(evidence))]


def _steady(waits: pl.DataFrame) -> float:
    """Share of the steps in which all ranks wait for long."""
    return float((waits["data_wait_ns"] >= LEAST_SHARE * waits["duration_ns"]).to_numpy().mean())
