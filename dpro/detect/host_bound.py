"""Detectors of hosts that slow down the job on all ranks: GPUs idle, or the training loop waits for input.

Takes a graph and the breakdown of its steps; or, where no deep window shows the cost of waiting for input,
steps and the host's counters. Returns at most one finding of each kind, about the job, and a note on GPUs
that idle in a single step. No rank is at fault: the step would be much shorter if hosts took no time, or if
input were ready, beyond what healing ranks would save. Does not say how much of that is attainable, or how;
what-ifs do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints
from dpro.detect.baseline import Baseline, ScaledWork
from dpro.detect.findings import Finding
from dpro.detect.observations import Observation, name_range, observe, observe_replay
from dpro.detect.significance import LATEST_STEPS, MIN_STEPS, PERSISTENT
from dpro.detect.stragglers.causes import CAUSES, INPUT_PIPELINE, OUTSIDE_OPERATORS, causes_of
from dpro.errors import Unanswerable
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, NO_SPAN, Graph
from dpro.replay.steps import host_facts
from dpro.replay.timeline import Timeline, are_usual
from dpro.replay.whatif.edits.host import NoLaunch
from dpro.replay.whatif.edits.training_loop import HideInput
from dpro.replay.whatif.graph_ops.scope import DATA_LOADING
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.schema import SPANS

Breakdown = Callable[[], pl.DataFrame]

THE_HOST = "the host"
MIN_IDLE = 0.25  # of nearly every step in which GPUs do nothing, averaged over ranks
MIN_SAVED = 0.25  # of nearly every step that free hosts save, beyond what other findings explain
MAX_PARTS = 3  # listed parts of the host's time on the critical path
NOTABLY = 1.05  # times what free hosts save: if hosts take more, that is said
NANOSECONDS = ("duration_ns", "compute_ns", "copy_ns", "exposed_comm_ns", "host_bound_ns", "idle_ns")


def find_idle_gpus(baseline: Baseline, breakdown: Breakdown, explained_ns: float = 0.0) -> list[Finding]:
    """Find whether GPUs idle for much of nearly every step, and hosts that took no time would end that.

    Args:
        breakdown: returns `step_breakdown` of the run; called only where it is needed.
        explained_ns: what other findings would save per step; only the remainder counts here.

    Returns:
        At most one finding, of the job.
    """
    usual = are_usual(baseline.step_ns)
    base, free_hosts = _savings_of_free_hosts(baseline, usual)
    saved = free_hosts - explained_ns
    if base.size < MIN_STEPS or float((saved >= MIN_SAVED * base).mean()) < PERSISTENT:
        return []
    steps = breakdown()
    if steps["step"].n_unique() != usual.size:
        return []
    steps = steps.filter(pl.col("step").is_in(baseline.steps[usual].tolist()))
    idle = _idle_shares(steps)
    steady = float(((saved >= MIN_SAVED * base) & (idle >= MIN_IDLE)).mean())
    if steady < PERSISTENT:
        return []
    cost = float(saved.mean())
    ranks = tuple(sorted(steps["rank"].unique().to_list()))
    observations = (_observe_gpu_use(steps), *_observe_hosts(baseline, usual, free_hosts))
    share = round(cost / float(base.mean()), 4)
    return [Finding("slow.host", "job", THE_HOST, ranks, share, round(steady, 3), cost, observations)]


def note_idle_gpus(baseline: Baseline, breakdown: Breakdown) -> list[str]:
    """Return at most one line on idle GPUs in a run of one step, which does not show that this is usual."""
    usual = are_usual(baseline.step_ns)
    base, saved = _savings_of_free_hosts(baseline, usual)
    if base.size != 1 or saved[0] < MIN_SAVED * base[0]:
        return []
    steps = breakdown().filter(pl.col("step").is_in(baseline.steps[usual].tolist()))
    if steps.is_empty() or not (_idle_shares(steps) >= MIN_IDLE).all():
        return []
    replayed = _observe_hosts(baseline, usual, saved)[0]
    return [f"{_observe_gpu_use(steps).text}; {replayed.text}; one step does not show whether this is usual"]


def _savings_of_free_hosts(baseline: Baseline, usual: Bools) -> tuple[Ints, Ints]:
    """Return [S] usual step times and [S] savings if hosts took no time, in ns; empty without GPUs.

    Args:
        usual: [T] mask of usual steps.
    """
    if not baseline.job.on_gpus:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    on_gpus = np.concatenate(baseline.job.map_ranks(_ranks_on_gpus))
    no_time = pl.DataFrame({"rank": on_gpus, "factor": np.zeros(on_gpus.size)})
    free = baseline.changed_step_ns(baseline.under(ScaledWork(CPU_KINDS, no_time)).graph)
    saved = baseline.step_ns - np.clip(free, 0, None)  # earlier work may extend into the first step
    return baseline.step_ns[usual], saved[usual]


def _ranks_on_gpus(graph: Graph) -> Ints:
    return np.unique(graph.nodes.rank[np.isin(graph.nodes.kind, GPU_KINDS)])


def _idle_shares(breakdown: pl.DataFrame) -> NDArray[np.float64]:
    """Return [S] shares of steps in which GPUs do nothing, averaged over ranks; 0 for empty steps."""
    share = (pl.col("idle_ns") + pl.col("host_bound_ns")) / pl.max_horizontal("duration_ns", 1)
    return breakdown.group_by("step").agg(share=share.mean()).sort("step")["share"].to_numpy()


def _observe_gpu_use(breakdown: pl.DataFrame) -> Observation:
    total = {name: float(breakdown[name].sum()) for name in NANOSECONDS}
    total["duration_ns"] = max(total["duration_ns"], 1.0)
    compute, copying, moving, host, idle = (total[name] / total["duration_ns"] for name in NANOSECONDS[1:])
    return observe(
        "gpu-busy",
        "GPU busy {busy_share} of the time as recorded ({compute_share} computing, {communication_share} "
        "only communicating, {copy_share} only copying), {host_share} waiting for the host to launch, "
        "{idle_share} idle otherwise",
        busy_share=compute + copying + moving, compute_share=compute, communication_share=moving,
        copy_share=copying, host_share=host, idle_share=idle,
    )  # fmt: skip


def _observe_hosts(baseline: Baseline, usual: Bools, saved: Ints) -> list[Observation]:
    """Return what free hosts, and free launch calls only, would save; and what hosts spend their time on.

    Args:
        usual: [T] mask of the steps that count.
        saved: [S] savings if hosts took no time, in ns.
    """
    graph, step = baseline.graph, float(baseline.step_ns[usual].mean())
    free = observe_replay("hosts that take no time", step - float(saved.mean()), step)
    free = free.then(": no change to the host can gain more")
    with suppress(Unanswerable):
        launched = baseline.changed_step_ns(baseline.under(NoLaunch()).graph)
        free = free.then(
            "; with free launch calls alone {free_launches_ns}",
            free_launches_ns=float(launched[usual].mean()),
        )
    observations = [free]
    observations += _observe_host_work(baseline, baseline.steps[usual], float(saved.mean()))
    if graph.run is not None and (graph.run.table(SPANS, ["kind"])["kind"] == "python").any():
        observations.append(
            observe("python-stacks", "Python stacks were recorded, which itself slows the host down")
        )
    return observations


def _observe_host_work(baseline: Baseline, steps: Ints, saved_ns: float) -> Iterator[Observation]:
    """Yield the work of hosts on the critical path of some steps, per step: the sum, and the longest parts.

    Args:
        saved_ns: what hosts that take no time would save per step.
    """
    spent = [_host_work(baseline, steps, *stretch) for stretch in baseline.critical_stretches()]
    parts = (
        pl.concat(spent)
        .group_by("cause", "name")
        .agg(pl.col("ns").sum())
        .sort(["ns", "name"], descending=[True, False])
        .group_by("cause", maintain_order=True)
        .agg(pl.col("ns").sum(), pl.col("name").first())
        .sort(["ns", "cause"], descending=[True, False])
    )
    if (total := float(parts["ns"].sum()) / steps.size) >= NOTABLY * saved_ns:
        yield observe(
            "host-work-in-all",
            "{waited_ns} of a step's critical path are the host's; without it other work would fill "
            "{filled_ns} of that",
            waited_ns=total,
            filled_ns=total - saved_ns,
        )
    for what, ns, name in parts.head(MAX_PARTS).iter_rows():
        sentence = "{waited_ns} of a step's critical path are the host's, in {what}"
        waited = observe("host-work", sentence, waited_ns=ns / steps.size, what=what)
        yield waited if name == NO_SPAN else waited.then(" (most in {name})", name=name[:80])


def _host_work(baseline: Baseline, steps: Ints, timeline: Timeline, path: Ints) -> pl.DataFrame:
    """Return `cause`, `name` and `ns` of the work of hosts in some steps on a part of the critical path."""
    graph, nodes = timeline.graph, timeline.graph.nodes
    critical = timeline.end[path] - np.append(timeline.start[path[:1]], timeline.end[path[:-1]])
    on_host = np.isin(nodes.kind[path], CPU_KINDS) & np.isin(nodes.step[path], steps) & (critical > 0)
    here = path[on_host]
    cause = causes_of(graph, baseline.job.on_gpus)[here]
    around = np.where(nodes.around[here] >= 0, nodes.around[here], nodes.name[here])
    name = np.where(cause == CAUSES.index(OUTSIDE_OPERATORS), around, nodes.name[here])
    names = pl.Series(graph.names, dtype=pl.String).gather(name)
    return pl.DataFrame({"cause": pl.Series(CAUSES)[cause], "name": names, "ns": critical[on_host]})


# The training loop waits for its input on every rank.

MIN_WAIT = 0.10  # of nearly every step: handing over a batch that is ready costs less


def find_slow_input(baseline: Baseline, excess_of_stragglers_ns: float = 0.0) -> list[Finding]:
    """Find at most one finding, of the job: the step would be much shorter with its input always ready.

    Args:
        excess_of_stragglers_ns: what healing single ranks would save already; only the remainder counts here.
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
    looked = chain(*(part.items() for part in baseline.job.map_ranks(_loading_ns_by_rank)))
    loading = {rank: total / base.size for rank, total in looked}
    if min(loading.values()) < MIN_WAIT * base.mean():
        return []  # slow input on some ranks only is a fault of these ranks
    usual = are_usual(base)
    cost, step = float(saved[usual].mean()), float(base[usual].mean())
    least, most = min(loading.values()), max(loading.values())
    observations = (
        observe(
            "data-wait",
            f"each rank spends {name_range(least, most)} per step in the DataLoader's __next__, on the "
            "thread that drives the training loop",
            least_ns=least, most_ns=most,
        ),
        observe_replay("the input always ready", float(hidden[usual].mean()), step),
    )  # fmt: skip
    share, sure = round(cost / step, 4), round(steady, 3)
    return [Finding("slow.host", "job", INPUT_PIPELINE, tuple(loading), share, sure, cost, observations)]


def _loading_ns_by_rank(graph: Graph) -> dict[int, float]:
    """Return the time each rank spends in its DataLoader within steps, in ns, by rank."""
    ranks = np.unique(graph.nodes.rank[graph.nodes.rank >= 0])
    loading = NodeSelection(within=DATA_LOADING).mask(graph) & (graph.nodes.step >= 0)
    total = np.bincount(
        graph.nodes.rank[loading], graph.nodes.duration[loading], minlength=int(ranks.max()) + 1
    )
    return {int(rank): float(total[rank]) for rank in ranks}


def find_input_bound(steps: pl.DataFrame, counters: pl.DataFrame, *, on_gpus: bool) -> list[Finding]:
    """Find at most one finding, of the job: all ranks wait long for data in nearly each of the latest steps.

    Args:
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
        .filter(pl.col("ranks") >= pl.col("ranks").max() / 2)  # some samples may be missing
        .with_columns(is_long=pl.col("data_wait_ns") >= MIN_WAIT * pl.col("duration_ns"))
        .sort("step")
    )
    judged = (
        (waits.tail(size), float(waits["is_long"].tail(size).to_numpy().mean()))
        for size in reversed(LATEST_STEPS)
        if size <= waits.height
    )
    waits, steady = next((latest for latest in judged if latest[1] >= PERSISTENT), (waits, 0.0))
    if not steady:
        return []
    least, most, step = (
        float(waits[name].to_numpy().mean()) for name in ("data_wait_ns", "most_ns", "duration_ns")
    )
    observations = [
        observe(
            "data-wait",
            "each rank waits {least_ns} to {most_ns} per step for its data, in the latest {steps} steps",
            least_ns=least, most_ns=most, steps=waits.height,
        )
    ]  # fmt: skip
    if on_gpus:
        not_known = "not known: whether the GPUs have work meanwhile; a deep window would show it"
        observations.append(observe("gpu-work-unknown", not_known))
    ranks = tuple(sorted(facts["rank"].unique().to_list()))
    sure = round(steady * (0.5 if on_gpus else 1.0), 3)
    share = round(least / step, 4)
    return [Finding("slow.host", "job", INPUT_PIPELINE, ranks, share, sure, least, tuple(observations))]
