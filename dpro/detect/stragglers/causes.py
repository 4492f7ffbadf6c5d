"""Causes of a rank's longer work: from the host's counters, and from the work in a graph.

Takes how much more of each counter a rank has than its peers; or a graph. Returns the cause that explains the
excess, if one does: waiting for data, garbage collection, no free core; operators, kernels, launches, other
host code. `dpro.collectors` declares the counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Ints
from dpro.detect.baseline import Baseline
from dpro.detect.observations import Observation, observe
from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.whatif.graph_ops.scope import DATA_LOADING
from dpro.replay.whatif.graph_ops.selected import NodeSelection

CPU = "step_training_thread_cpu_ns"
EXPLAINED = 0.4  # share of the excess that a counter must show to be its cause
INPUT_PIPELINE = "the input pipeline"
WAITING_CODE = "host code that waits"
NEARLY_AS_LATE = observe(
    "nearly-as-late", "other ranks are nearly as late: fixing this one alone saves less than it loses"
)
OPERATORS = "operators"  # on a host without a GPU
HOST_OPERATORS, RUNTIME_CALLS, LATE_LAUNCHES = "the host's operators", "GPU runtime calls", "late launches"
OUTSIDE_OPERATORS, KERNELS = "host code outside any operator", "kernels"
CAUSES = (
    "", OPERATORS, HOST_OPERATORS, RUNTIME_CALLS, OUTSIDE_OPERATORS, LATE_LAUNCHES, INPUT_PIPELINE, KERNELS,
)  # fmt: skip
ADDRESS = r"\b0x[0-9a-f]+"  # of the object whose method is called: another one in each process
OF_DEVICES = (OPERATORS, KERNELS)  # computing; all other causes are the host's


class HostCause(NamedTuple):
    """Why a host takes longer."""

    cause: str
    observation: Observation


HOST_CAUSES = {
    "step_data_wait_ns": (INPUT_PIPELINE, "waits for its data"),
    "step_run_queue_ns": ("CPU contention", "waits for a CPU core"),
    "step_gc_ns": ("garbage collection", "collects garbage"),
}
RUN_QUEUE = "step_run_queue_ns"
PROCESS_CPU, CHILDREN_CPU, WRITTEN = "step_cpu_ns", "step_children_cpu_ns", "step_written_bytes"
COUNTED = (*HOST_CAUSES, CPU, PROCESS_CPU, CHILDREN_CPU, WRITTEN)  # counters that may reveal a cause
COMPUTING = 0.2  # share of the excess that CPU time must show if it comes with a wait for a core
MIN_WRITTEN = 1 << 18  # bytes per step, beyond those of peers, that a rank waiting for the disk writes


def host_cause(more: Mapping[str, float], longer_ns: float) -> HostCause | None:
    """Return the counter that explains most of the excess, or None if none explains enough.

    A rank that computes more, itself or in its own threads and programs, also waits longer for a core: that
    is not contention.

    Args:
        more: ns per step that the rank has more than its peers, by counter.
    """
    counted = {name: value for name, value in more.items() if name in HOST_CAUSES}
    if counted.get(RUN_QUEUE, 0.0) >= EXPLAINED * longer_ns:
        if (by_programs := _by_own_programs(more, longer_ns)) is not None:
            return by_programs
        if computes(more, longer_ns):
            counted.pop(RUN_QUEUE, None)
    largest = max(counted, key=lambda name: counted[name], default="")
    if not largest or counted[largest] < EXPLAINED * longer_ns:
        return None
    cause, does = HOST_CAUSES[largest]
    sentence = f"it {does} {{longer_ns}} longer per step than its peers"
    return HostCause(cause, observe("longer-on-host", sentence, counter=largest, longer_ns=counted[largest]))


def computes(more: Mapping[str, float], longer_ns: float) -> bool:
    """Return whether the training thread computes, or waits for a core to, in enough of its excess time."""
    cpu, waits = more.get(CPU, 0.0), more.get(RUN_QUEUE, 0.0)
    return cpu >= EXPLAINED * longer_ns or (
        cpu >= COMPUTING * longer_ns and cpu + waits >= EXPLAINED * longer_ns
    )


def idle_cause(more: Mapping[str, float], longer_ns: float) -> HostCause | None:
    """Return what a host waits for, if its training thread does not compute; None if it does, or if unknown.

    Args:
        more: as for `host_cause`, which must have returned None.
    """
    if CPU not in more or computes(more, longer_ns):
        return None
    return wait_cause(more, longer_ns) or HostCause(
        WAITING_CODE,
        observe(
            "idle-host",
            "in that time it neither computes nor waits for its data, a core or garbage collection: "
            "something in the host's code sleeps or waits (a lock, the network)",
        ),
    )


def wait_cause(more: Mapping[str, float], longer_ns: float) -> HostCause | None:
    """Return what a training thread waits for, by the host's counters: a thread, program or disk; or None."""
    by_programs = _by_own_programs(more, longer_ns)
    if by_programs is None and more.get(WRITTEN, 0.0) >= MIN_WRITTEN:
        sentence = "it writes {written_bytes} more per step to a disk than its peers, and waits meanwhile"
        return HostCause(
            "waiting for a disk", observe("written-to-disk", sentence, written_bytes=more[WRITTEN])
        )
    return by_programs


def _by_own_programs(more: Mapping[str, float], longer_ns: float) -> HostCause | None:
    """Return the cause if other threads of the process, or programs that it started, compute meanwhile."""
    children = more.get(CHILDREN_CPU, 0.0)
    if children >= EXPLAINED * longer_ns:
        return HostCause(
            "a process that it started",
            observe(
                "cpu-time-of-children",
                "processes that it starts and waits for compute {longer_ns} per step, more than those of its "
                "peers",
                longer_ns=children,
            ),
        )
    threads = more.get(PROCESS_CPU, 0.0) - more.get(CPU, 0.0)
    if threads >= EXPLAINED * longer_ns and not computes(more, longer_ns):
        return HostCause(
            "another thread of its process",
            observe(
                "cpu-time-of-threads",
                "other threads of its process compute {longer_ns} longer per step than those of its peers: "
                "their Python code holds the interpreter's lock (GIL) meanwhile",
                longer_ns=threads,
            ),
        )
    return None


def counted_more(rows: pl.DataFrame, rank: int) -> dict[str, float]:
    """Return how much more of each counter a rank has per step than its peers, in ns.

    Args:
        rows: `rank`, `counter`, `value` per step, of the rank and its peers.
    """
    per_rank = rows.group_by("counter", "rank").agg(pl.col("value").median())
    is_rank = pl.col("rank") == rank
    compared = per_rank.group_by("counter").agg(
        own=pl.col("value").filter(is_rank).first(), theirs=pl.col("value").filter(~is_rank).median()
    )
    more = compared.drop_nulls("own").select("counter", pl.col("own") - pl.col("theirs").fill_null(0.0))
    return dict(more.iter_rows())


def excess_by_cause(baseline: Baseline, rank: int, peers: list[int], since: int) -> pl.DataFrame:
    """Attribute a rank's extra work, relative to the median of its peers, to causes, from a step on.

    Returns:
        `cause`, `class`, `excess_ns` per step, `example` (the name that contributes most), largest first.
    """
    keys, compared = ["cause", "label"], [rank, *peers]
    per_step = pl.concat(
        baseline.job.map_ranks(partial(_work_by_cause, compared, since, baseline.job.on_gpus), compared)
    )
    others = per_step.filter(pl.col("rank").is_in(peers)).group_by(keys).agg(peer=pl.col("work").median())
    of_rank = per_step.filter(pl.col("rank") == rank).join(others, on=keys, how="left")
    excess = of_rank.with_columns(
        pl.Series(CAUSES)[of_rank["cause"]].alias("cause"),
        excess_ns=pl.col("work") - pl.col("peer").fill_null(0),
    )
    compute = pl.col("cause").is_in(OF_DEVICES)
    excess = excess.with_columns(
        pl.when(compute).then(pl.lit("slow.compute")).otherwise(pl.lit("slow.host")).alias("class")
    )
    return (
        excess.sort(["excess_ns", "label"], descending=[True, False])
        .group_by("cause", "class", maintain_order=True)
        .agg(pl.col("excess_ns").sum(), example=pl.col("label").first())
        .sort(["excess_ns", "cause"], descending=[True, False])
    )


def _work_by_cause(ranks: list[int], since: int, on_gpus: bool, graph: Graph) -> pl.DataFrame:
    """Return `rank`, `cause`, `label` and `work` (ns per step) of some ranks of a graph, from a step on."""
    nodes, cause = graph.nodes, causes_of(graph, on_gpus)
    here = np.flatnonzero((nodes.step >= since) & (cause > 0) & np.isin(nodes.rank, ranks))
    around, host = nodes.around[here], nodes.kind[here] == NodeKind.HOST
    label = np.where(host & (around >= 0), around, nodes.name[here])
    rows = {"rank": nodes.rank[here], "step": nodes.step[here], "cause": cause[here], "label": label}
    names = pl.Series(graph.names, dtype=pl.String).str.replace(ADDRESS, "0x")
    frame = pl.DataFrame({**rows, "work": nodes.duration[here]})
    frame = frame.with_columns(label=names.gather(frame["label"]))
    steps = frame.group_by("rank").agg(steps=pl.col("step").n_unique())
    summed = frame.group_by("rank", "cause", "label").agg(pl.col("work").sum()).join(steps, on="rank")
    return summed.select("rank", "cause", "label", pl.col("work") / pl.col("steps"))


def causes_of(graph: Graph, on_gpus: bool) -> Ints:
    """Return [N] the cause of each node's time, as an index of `CAUSES`; 0 for waits and transfers.

    Args:
        on_gpus: whether any rank of the job has work on a GPU.
    """
    nodes = graph.nodes
    gpu = np.isin(nodes.kind, GPU_KINDS)
    cause = np.zeros(graph.num_nodes, np.int64)
    of_kinds = {
        NodeKind.CPU: HOST_OPERATORS if on_gpus else OPERATORS,
        NodeKind.RUNTIME: RUNTIME_CALLS,
        NodeKind.HOST: OUTSIDE_OPERATORS,
        NodeKind.GAP: OUTSIDE_OPERATORS,
        NodeKind.DELAY: LATE_LAUNCHES,
    }
    for kind, what in of_kinds.items():
        cause[nodes.kind == kind] = CAUSES.index(what)
    cause[NodeSelection(within=DATA_LOADING).mask(graph)] = CAUSES.index(INPUT_PIPELINE)
    cause[gpu] = CAUSES.index(KERNELS)
    return cause
