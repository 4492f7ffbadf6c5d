"""GPUs that stand idle on all ranks because their hosts do not keep them busy.

In: a graph, and where the time of its steps went. Out: at most one finding, about the job; of a single step a
note. No rank is at fault here: the step would be much shorter if hosts took no time, beyond what healing
ranks or the input would save. How much of that can be had, and how, is what what-ifs answer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Ints
from dpro.detect.baseline import Baseline
from dpro.detect.findings import Finding
from dpro.detect.significance import MIN_STEPS, PERSISTENT
from dpro.detect.stragglers.causes import CAUSES, OUTSIDE_OPERATORS, causes_of
from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, GPU_KINDS
from dpro.replay.timeline import time_on_critical_path
from dpro.replay.whatif.edits.host import NoLaunch
from dpro.schema import SPANS
from dpro.units import format_duration

Breakdown = Callable[[], pl.DataFrame]

THE_HOST = "the host"
MIN_IDLE = 0.25  # of nearly every step, GPUs neither compute nor communicate: the mean of all ranks
MIN_SAVED = 0.25  # of nearly every step, if hosts took no time, beyond what other findings explain
MAX_PARTS = 3  # of the host's time on the critical path that are listed
NANOSECONDS = ("duration_ns", "compute_ns", "exposed_comm_ns", "host_bound_ns", "idle_ns")


def find_idle_gpus(baseline: Baseline, breakdown: Breakdown, explained_ns: float = 0.0) -> list[Finding]:
    """Find out whether GPUs idle for much of nearly every step, and hosts that took no time would end that.

    Args:
        baseline: the unchanged graph.
        breakdown: returns what `step_breakdown` does, of the same run; called only where it is needed.
        explained_ns: what other findings would save per step; only the rest counts here.

    Returns:
        At most one finding, of the job.
    """
    base, free_hosts = _saved(baseline)
    saved = free_hosts - explained_ns
    if base.size < MIN_STEPS or float((saved >= MIN_SAVED * base).mean()) < PERSISTENT:
        return []
    steps = breakdown()
    idle = _idle(steps)
    if idle.size != base.size:
        return []
    steady = float(((saved >= MIN_SAVED * base) & (idle >= MIN_IDLE)).mean())
    if steady < PERSISTENT:
        return []
    cost = float(saved.mean())
    ranks = tuple(sorted(steps["rank"].unique().to_list()))
    evidence = (_busy(steps), *_evidence(baseline, base, free_hosts))
    share = round(cost / float(base.mean()), 4)
    return [Finding("slow.host", "job", THE_HOST, ranks, share, round(steady, 3), cost, evidence)]


def note_idle_gpus(baseline: Baseline, breakdown: Breakdown) -> list[str]:
    """Return at most one line on idle GPUs of a run of one step, which does not show that this is usual.

    Args:
        baseline: the unchanged graph.
        breakdown: as of `find_idle_gpus`.
    """
    base, saved = _saved(baseline)
    if base.size != 1 or saved[0] < MIN_SAVED * base[0]:
        return []
    steps = breakdown()
    if not (_idle(steps) >= MIN_IDLE).all():
        return []
    replayed = _evidence(baseline, base, saved)[0]
    return [f"{_busy(steps)}; {replayed}; it is one step, which does not show that this is usual"]


def _saved(baseline: Baseline) -> tuple[Ints, Ints]:
    """Return [S] ns, step times, and what hosts that take no time would save; empty where no GPU was used."""
    graph = baseline.graph
    nodes = graph.nodes
    on_gpus = np.unique(nodes.rank[np.isin(nodes.kind, GPU_KINDS)])
    if not on_gpus.size:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    on_host = np.isin(nodes.kind, CPU_KINDS) & np.isin(nodes.rank, on_gpus)
    free = baseline.changed_step_ns(graph.with_durations(np.where(on_host, 0, nodes.duration)))
    return baseline.step_ns, baseline.step_ns - np.clip(
        free, 0, None
    )  # work before the first step may go into it


def _idle(breakdown: pl.DataFrame) -> NDArray[np.float64]:
    """Return [S] the share of each step in which GPUs neither compute nor communicate, mean of the ranks."""
    share = (pl.col("idle_ns") + pl.col("host_bound_ns")) / pl.col("duration_ns")
    return breakdown.group_by("step").agg(share=share.mean()).sort("step")["share"].to_numpy()


def _busy(breakdown: pl.DataFrame) -> str:
    """Return what GPUs do in a step, in words."""
    total = {name: float(breakdown[name].sum()) for name in NANOSECONDS}
    compute, moving, host, idle = (total[name] / total["duration_ns"] for name in NANOSECONDS[1:])
    return (
        f"GPU busy {compute + moving:.0%} of the time ({compute:.0%} computing, {moving:.0%} only "
        f"communicating), {host:.0%} waiting for the host to launch, {idle:.0%} idle otherwise"
    )


def _evidence(baseline: Baseline, base: Ints, saved: Ints) -> list[str]:
    """Return what free hosts, and free launch calls only, would save; and what hosts spend their time on.

    Args:
        graph: the graph.
        base: [S] ns, step times.
        saved: [S] ns, what hosts that take no time would save.
    """
    graph, step = baseline.graph, float(base.mean())
    free = format_duration(step - float(saved.mean()))
    lines = [
        f"replayed with hosts that take no time, the step takes {free} instead of {format_duration(step)}: "
        "the most that can be gained on the host"
    ]
    try:
        launched = baseline.changed_step_ns(NoLaunch().apply(graph))
        lines[0] += f"; with free launch calls alone {format_duration(float(launched.mean()))}"
    except Unanswerable:
        pass
    parts = _spent(baseline, base.size)
    if parts:
        lines.append("what the step waits for on the host: " + "; ".join(parts))
    if graph.run is not None and (graph.run.table(SPANS, ["kind"])["kind"] == "python").any():
        lines.append("Python stacks were recorded, which itself slows the host down")
    return lines


def _spent(baseline: Baseline, num_steps: int) -> list[str]:
    """Return what hosts do on the critical path, per step, longest first."""
    graph = baseline.graph
    nodes = graph.nodes
    cause = causes_of(graph)
    critical = time_on_critical_path(baseline.timeline)
    here = np.flatnonzero(np.isin(nodes.kind, CPU_KINDS) & (nodes.step >= 0) & (critical > 0))
    around = np.where(nodes.around[here] >= 0, nodes.around[here], nodes.name[here])
    outside = cause[here] == CAUSES.index(OUTSIDE_OPERATORS)
    frame = pl.DataFrame(
        {
            "cause": pl.Series(CAUSES)[cause[here]],
            "name": np.where(outside, around, nodes.name[here]),
            "ns": critical[here],
        },
        schema={"cause": pl.String, "name": pl.Int64, "ns": pl.Int64},
    )
    parts = (
        frame.group_by("cause", "name")
        .agg(pl.col("ns").sum())
        .sort(["ns", "name"], descending=[True, False])
        .group_by("cause", maintain_order=True)
        .agg(pl.col("ns").sum(), pl.col("name").first())
        .sort(["ns", "cause"], descending=[True, False])
    )
    return [
        f"{format_duration(ns / num_steps)} in {what} (most in {graph.names[name][:80]})"
        for what, ns, name in parts.head(MAX_PARTS).iter_rows()
    ]
