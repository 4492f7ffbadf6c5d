"""An input-bound job: the training loop waits for its input on every rank.

In: a graph; or, where no deep window shows what the wait costs, steps and the host's counters. Out: at most
one finding. A single rank whose input is slow is a straggler; here no rank is slower than the rest, and the
step would still be shorter if its input were ready.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import polars as pl

from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.significance import LATEST_STEPS, MIN_STEPS, PERSISTENT
from dpro.detect.stragglers.causes import INPUT_PIPELINE
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph
from dpro.replay.steps.host import host_facts
from dpro.replay.whatif.edits.training_loop import DATA_LOADING, HideInput
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.units import format_duration

MIN_WAIT = 0.10  # of nearly every step: passing on a batch costs less


def find_slow_input(baseline: Baseline, excess_of_stragglers_ns: float = 0.0) -> list[Finding]:
    """The finding, if the step would be much shorter with its input always ready.

    Args:
        excess_of_stragglers_ns: what healing single ranks would save already; only the rest counts here.
    """
    try:
        changed = baseline.under(HideInput()).graph
    except Unanswerable:
        return []
    base, hidden = baseline.step_ns, baseline.changed_step_ns(changed)
    saved = base - hidden - excess_of_stragglers_ns
    steady = float((saved >= MIN_WAIT * base).mean()) if base.size else 0.0
    if base.size < MIN_STEPS or steady < PERSISTENT:
        return []
    looked = chain(*(each.items() for each in baseline.job.map_ranks(_loading)))
    loading = {rank: total / base.size for rank, total in looked}
    if min(loading.values()) < MIN_WAIT * base.mean():
        return []  # the input of some ranks only is their fault
    cost = float(saved.mean())
    extremes = dict.fromkeys(format_duration(pick(loading.values())) for pick in (min, max))
    evidence = (
        f"each rank spends {' to '.join(extremes)} per step in the DataLoader's "
        "__next__, on the thread that drives the training loop",
        f"replayed with the input always ready, the step takes {format_duration(float(hidden.mean()))} "
        f"instead of {format_duration(float(base.mean()))}",
    )
    share = round(cost / float(base.mean()), 4)
    return [
        Finding("slow.host", "job", INPUT_PIPELINE, tuple(loading), share, round(steady, 3), cost, evidence)
    ]


def _loading(graph: Graph) -> dict[int, float]:
    """Time each rank spends in its DataLoader in steps, ns, by rank."""
    ranks = np.unique(graph.nodes.rank[graph.nodes.rank >= 0])
    loading = NodeSelection(within=DATA_LOADING).mask(graph) & (graph.nodes.step >= 0)
    total = np.bincount(
        graph.nodes.rank[loading], graph.nodes.duration[loading], minlength=int(ranks.max()) + 1
    )
    return {int(rank): float(total[rank]) for rank in ranks}


def find_input_bound(steps: pl.DataFrame, counters: pl.DataFrame, *, on_gpus: bool) -> list[Finding]:
    """The finding, if every rank waits for data for a large part of nearly each of the latest steps.

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
    judged = (
        (waits.tail(size), _steady(waits.tail(size)))
        for size in reversed(LATEST_STEPS)
        if size <= waits.height
    )
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
        evidence.append("not known: whether their GPUs have work meanwhile; a deep window would show it")
    ranks = tuple(sorted(facts["rank"].unique().to_list()))
    sure = round(steady * (0.5 if on_gpus else 1.0), 3)
    share = round(least / step, 4)
    return [Finding("slow.host", "job", INPUT_PIPELINE, ranks, share, sure, least, tuple(evidence))]


def _steady(waits: pl.DataFrame) -> float:
    """Share of the steps in which all ranks wait for long."""
    return float((waits["data_wait_ns"] >= MIN_WAIT * waits["duration_ns"]).to_numpy().mean())
