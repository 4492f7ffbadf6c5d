"""Limits of the step: how much shorter it becomes if one thing alone costs nothing.

Takes a job and the ends of its steps; returns a `Counterfactual` for each thing that could limit it. Shares
of time do not show a limit: a rank that waits is faster only if what it waits for is. So each is replayed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl

from dpro.arrays import Bools, Floats
from dpro.classify import is_communication
from dpro.errors import DproError, Unanswerable
from dpro.replay.fidelity.accuracy import Trust
from dpro.replay.first_calls import PROMPTLY_NS, beside_launched_ns
from dpro.replay.graph import CPU_KINDS, GPU_KINDS, EdgeKind, Graph, NodeKind, computed_once, is_one_of
from dpro.replay.peers import ON_GPU, PHASE, teams_by_work
from dpro.replay.steps import NO_STEP
from dpro.replay.timeline import durations_of, step_lengths
from dpro.replay.whatif.edit import Edit, RankChange
from dpro.replay.whatif.edits.balance import Balance
from dpro.replay.whatif.edits.communication import Network
from dpro.replay.whatif.edits.heal import Shortened
from dpro.replay.whatif.edits.host import FreeHost, NoSync, next_launches
from dpro.replay.whatif.edits.training_loop import Garbage, loading_of
from dpro.replay.whatif.graph_ops.aside import Stretches, compiling, held_ns, saving
from dpro.replay.whatif.job import ReplayedJob
from dpro.replay.whatif.predict import changed_steps_ns, slowdowns_of
from dpro.schema import STEPS

HOST, COMPUTE, COMMUNICATION, IMBALANCE = "host", "compute", "communication", "imbalance"
INPUT, SYNCHRONISATION, COPIES, BUBBLE = "input", "synchronisation", "memory-copies", "pipeline-bubble"
ALLOCATOR = "allocator"  # part of the host's work
COMPILATION, CHECKPOINT, COLLECTION = "compilation", "checkpoint", "collection"  # work that no step needs

ALLOCATING = r"(?i)^(cuda|hip)(Malloc|Free)(Async|Pitch|Array|3D|3DArray|Managed)?$"  # calls of the runtime
FREE = 1e6  # times the bandwidth, so that transfers take no time
INTO_DEVICE = r"(?i)memcpy.*(HtoD|HostToDevice)"
BATCH_NS = 10_000  # least time of a copy that moves a batch; of arguments and sizes it takes 1 to 3 us
LOADING = 0.8  # share of the work before steps from which loading alone counts as their input
SLOW_LAUNCH_NS = 500_000  # host time before one launch, above which it does more than launching


class Counterfactual(NamedTuple):
    """The step if one thing cost nothing.

    Attributes:
        limit: the thing that would cost nothing.
        gains: [S] current step times over those without it.
        lengths: [S] current step times, in ns.
    """

    limit: str
    gains: Floats
    lengths: Floats

    @property
    def gain(self) -> float:
        """Current usual step time over that without it."""
        return typical(self.gains, self.lengths)


def typical(gains: Floats, lengths: Floats) -> float:
    """Return the gain of the mean step; at least 1.

    Args:
        gains: [S] of the steps.
        lengths: [S] current step times.
    """
    return max(float(lengths.sum() / (lengths / gains).sum()), 1.0)


def counterfactuals(job: ReplayedJob, ends: pl.DataFrame, trust: Trust) -> list[Counterfactual]:
    """Return the gain of each thing that could limit the job, by itself, largest first.

    Args:
        ends: `baseline_steps` of its graph.
    """
    now = lengths_of(ends)
    results = []
    for limit, change in CHANGES:
        with suppress(DproError):
            results.append(Counterfactual(limit, gains_of(job, change(job), ends, trust), now))
    busiest_ns = without_bubble(job.graph, ends)
    if busiest_ns is not None:
        results.append(Counterfactual(BUBBLE, now / np.maximum(busiest_ns, 1), now))
    return sorted(results, key=lambda result: -result.gain)


def gains_of(before: ReplayedJob, after: ReplayedJob, ends: pl.DataFrame, trust: Trust) -> Floats:
    """Return [S] usual step times over those in a changed job, as predictions have it.

    Args:
        ends: `baseline_steps` of the unchanged job.
    """
    changed_ns = changed_steps_ns(ends, before, after, slowdowns_of(trust))
    gains: Floats = lengths_of(ends) / np.maximum(changed_ns, 1)
    return gains


def lengths_of(ends: pl.DataFrame) -> Floats:
    """Return [S] lengths of the steps of `baseline_steps`, in ns; 1 at least."""
    lengths: Floats = np.maximum(step_lengths(ends), 1).astype(np.float64)
    return lengths


@dataclass(frozen=True)
class Free:
    """Change after which some nodes take no time.

    Attributes:
        chosen: returns [N] a mask of a graph's nodes; may raise a `DproError` if the graph cannot show them.
    """

    chosen: Callable[[Graph], Bools]

    def apply(self, graph: Graph) -> Graph:
        """Return the graph in which the chosen nodes take no time."""
        return graph.with_durations(np.where(self.chosen(graph), 0, graph.nodes.duration))


def copies_of(graph: Graph) -> Bools:
    """Return [N] a mask of device copies."""
    copies: Bools = graph.nodes.kind == NodeKind.COPY
    return copies


def input_of(graph: Graph) -> Bools:
    """Return [N] a mask of loading input; where that is little of it, also of what hosts do before.

    That is before a step's first launch, or its batch.
    """
    before = before_input(graph)
    with suppress(DproError):
        loading, duration = loading_of(graph), graph.nodes.duration
        if duration[loading].sum() >= LOADING * duration[before | loading].sum():
            return loading
        before = before | loading
    return before


@computed_once
def before_input(graph: Graph) -> Bools:
    """Return [N] a mask of what hosts do before a step's first launch, or for long before copying a batch."""
    return before_first_launch(graph) | before_batches(graph)


def outside_operators(graph: Graph) -> Bools:
    """Return [N] a mask of CPU work in steps outside operators: Python, and waits such as sleeping."""
    outside: Bools = is_one_of(graph.nodes.kind, (NodeKind.HOST, NodeKind.GAP)) & (graph.nodes.step >= 0)
    return outside


def host_of_operators(graph: Graph) -> Bools:
    """Return [N] a mask of what hosts do outside operators, in a job that computes on them.

    Raises:
        Unanswerable: devices compute; other work of hosts then matters only through launches.
    """
    if is_one_of(graph.nodes.kind, GPU_KINDS).any():
        raise Unanswerable("operators compute on devices")
    return outside_operators(graph)


def allocations_of(graph: Graph) -> Bools:
    """Return [N] a mask of runtime calls that allocate or free device memory."""
    wanted = np.array([bool(re.search(ALLOCATING, name)) for name in graph.names])
    allocations: Bools = (graph.nodes.kind == NodeKind.RUNTIME) & wanted[graph.nodes.name]
    return allocations


def exchanges_of(graph: Graph) -> Bools:
    """Return [N] a mask of kernels that communicate, waiting or moving, also those without a match."""
    communicates = np.array([*map(is_communication, graph.names), False], np.bool_)
    exchanges: Bools = (graph.nodes.kind == NodeKind.KERNEL) & communicates[graph.nodes.name]
    return exchanges


def work_of_devices(graph: Graph) -> Bools:
    """Return [N] a mask of kernels; without any, of what hosts do.

    Any other work of hosts besides kernels belongs to no step, as on a rank whose steps are unknown.
    """
    works: Bools = graph.nodes.kind == NodeKind.KERNEL
    return works if works.any() else is_one_of(graph.nodes.kind, CPU_KINDS)


@dataclass(frozen=True)
class FreeAside:
    """Change after which one kind of work that hosts do besides their steps takes no time.

    Attributes:
        stretches: returns the time ranges of that work in a graph.
    """

    stretches: Callable[[Graph], Stretches]

    def apply(self, graph: Graph) -> Graph:
        """Return the graph in which these stretches take no time.

        Raises:
            Unanswerable: no work of hosts is in such a stretch, or not in most steps: then it is a pause.
        """
        nodes, held = graph.nodes, held_ns(graph, self.stretches(graph))
        within, steps = (
            np.unique(nodes.step[(nodes.step >= 0) & chosen]).size for chosen in (held > 0, nodes.rank >= 0)
        )
        if within <= steps / 2:
            raise Unanswerable("hosts do nothing of that kind in most steps")
        return graph.with_durations(nodes.duration - held)


class FreeCopies:
    """Change after which device copies, and the time that calls spend on them, take no time.

    For pageable memory the host copies, too, before, beside and after the device, and returns when that is
    done: such a call then takes as long as one that only hands in work.
    """

    def apply(self, graph: Graph) -> Graph:
        """Return the graph in which copies take no time."""
        copies = copies_of(graph)
        left_ns = np.maximum(graph.nodes.duration - beside_launched_ns(graph, NodeKind.COPY), 0)
        left_ns = np.where(_copying_calls(graph), np.minimum(left_ns, PROMPTLY_NS), left_ns)
        return graph.with_durations(np.where(copies, 0, left_ns))


def _copying_calls(graph: Graph) -> Bools:
    """Return [N] a mask of calls that copy pageable memory."""
    nodes, edges = graph.nodes, graph.edges
    pageable = np.array(["pageable" in name.lower() for name in (*graph.names, "")])
    made = (edges.kind == EdgeKind.LAUNCH) & pageable[nodes.name[edges.target]]
    place = ("rank", "window", "span")
    frame = pl.DataFrame({name: getattr(nodes, name) for name in place})
    pieces = frame.with_row_index("node").filter(pl.Series(nodes.kind == NodeKind.RUNTIME))
    pieces = pieces.join(frame[edges.source[made]], on=place, how="semi")
    copying = np.zeros(graph.num_nodes, np.bool_)
    copying[pieces["node"].to_numpy()] = True
    return copying


class PromptLaunches:
    """Change after which calls that launch kernels do not wait for them, as with CUDA_LAUNCH_BLOCKING."""

    def apply(self, graph: Graph) -> Graph:
        """Return the graph in which calls take no time while their own kernels run."""
        left_ns = graph.nodes.duration - beside_launched_ns(graph, NodeKind.KERNEL)
        return graph.with_durations(np.maximum(left_ns, 0))


@dataclass(frozen=True)
class FasterKernels:
    """Change after which kernels take a share of their time, by name."""

    factors: Mapping[str, float]

    def apply(self, graph: Graph) -> Graph:
        """Return the graph with shorter kernels, rounded to whole ns."""
        factor = np.array([self.factors.get(name, 1.0) for name in graph.names])[graph.nodes.name]
        shorter = np.where(graph.nodes.kind == NodeKind.KERNEL, factor, 1.0) * graph.nodes.duration
        return graph.with_durations(np.rint(shorter).astype(np.int64))


def _equal_ranks(job: ReplayedJob) -> ReplayedJob:
    """Return the job in which all ranks of one role take at most what half of them do, in turns or together.

    Devices are compared in each phase of each step. Hosts vary randomly from phase to phase, which would
    look like a gain: so they are compared per step, and a host's excess is removed from its longer phases.
    """
    work = job.work
    members = [team for team in teams_by_work(work) if len(team) > 1]
    if not members:
        raise DproError("no rank has a peer")
    team_of = {rank: number for number, team in enumerate(members) for rank in team}
    phases = (
        work.filter(pl.col("rank").is_in(list(team_of)))
        .group_by("rank", "step", *PHASE)
        .agg(pl.col("work_ns").sum())
        .with_columns(team=pl.col("rank").replace_strict(team_of, return_dtype=pl.Int64))
    )
    longer = (pl.col("work_ns") - _most_of_half("team", "step", *PHASE)).clip(lower_bound=0)
    whole = pl.col("work_ns").sum().over("rank", "step", "resource")
    of_steps = phases.with_columns(longer=longer, whole=whole)
    totals = of_steps.group_by("team", "rank", "step", "resource").agg(
        pl.col("whole").first(), pl.col("longer").sum()
    )
    excess = (pl.col("whole") - _most_of_half("team", "step", "resource", of="whole")).clip(lower_bound=0)
    counts = pl.when(pl.col("resource") == ON_GPU).then(1.0).otherwise(excess / pl.col("longer"))
    taken = totals.select("rank", "step", "resource", counts=counts.clip(upper_bound=1.0))
    ratios = of_steps.join(taken, on=["rank", "step", "resource"]).with_columns(
        ratio=1 - pl.col("longer") * pl.col("counts").fill_nan(0.0) / pl.col("work_ns")
    )
    ratios = ratios.filter((pl.col("work_ns") > 0) & (pl.col("ratio") < 1))
    return job.with_change(Shortened(ratios.select("rank", "step", *PHASE, "ratio")))


def _most_of_half(*by: str, of: str = "work_ns") -> pl.Expr:
    """Return the lower median over the ranks of a group."""
    return pl.col(of).quantile(0.5, "lower").over(by)


def before_first_launch(graph: Graph) -> Bools:
    """Return [N] a mask of CPU work of a step before its rank first launches GPU work in it.

    Empty if no steps are known: work before the very first launch is the start of the program. The work of an
    operator before its first kernel belongs to launching it.
    """
    nodes, edges = graph.nodes, graph.edges
    calls = edges.kind == EdgeKind.LAUNCH
    calls &= (nodes.step[edges.source] >= 0) & (nodes.kind[edges.source] == NodeKind.RUNTIME)
    before = np.zeros(graph.num_nodes, np.bool_)
    if not calls.any() or not _has_steps(graph):
        return before
    place = ("rank", "step", "window")
    launch, is_kernel = edges.source[calls], nodes.kind[edges.target[calls]] == NodeKind.KERNEL
    first = (
        pl.DataFrame({name: getattr(nodes, name)[launch] for name in place})
        .with_columns(first_ns=pl.Series(nodes.measured_start[launch]), is_kernel=pl.Series(is_kernel))
        .sort("first_ns")
        .group_by(place, maintain_order=True)
        .first()
    )
    on_cpu = np.flatnonzero(is_one_of(nodes.kind, CPU_KINDS) & (nodes.step >= 0))
    work = pl.DataFrame({name: getattr(nodes, name)[on_cpu] for name in (*place, "span", "measured_start")})
    work = work.with_columns(
        ends=pl.Series(nodes.measured_end[on_cpu]),
        of_operator=pl.Series((nodes.kind[on_cpu] == NodeKind.CPU) & (nodes.span[on_cpu] >= 0)),
    ).join(first, on=place, how="left", maintain_order="left")
    goes_on = (
        pl.col("of_operator") & pl.col("is_kernel") & (pl.col("measured_start") > pl.col("first_ns"))
    ).any()
    dispatches = pl.col("of_operator") & goes_on.over("rank", "window", "span")
    earlier = work.select((pl.col("ends") <= pl.col("first_ns")) & ~dispatches).to_series()
    before[on_cpu] = earlier.fill_null(False).to_numpy()
    return before


def _has_steps(graph: Graph) -> bool:
    """Return whether the run has steps; for a condensed rank, which has no run, whether its nodes do."""
    if graph.run is None:
        return bool((graph.nodes.step != NO_STEP).any())
    return graph.run.num_rows(STEPS) > 0


def host_ns_before(graph: Graph) -> Floats:
    """Return [N] ns of what hosts do before each launch and since the last, on all threads of a rank."""
    following = next_launches(graph)
    counted = following >= 0
    total = np.bincount(following[counted], graph.nodes.duration[counted], graph.num_nodes)
    return total.astype(np.float64)


def host_before_launches(graph: Graph) -> pl.DataFrame:
    """Return what the host does between one launch and the next, on all threads of a rank.

    Returns:
        `launch` (its node), `kernel` that it launches, `window`, `step`, `is_first` of the rank's in that
        step, and `took_ns`; in order of time. If no steps are known, the first launch after work that was
        launched before the window is not the first of a step.
    """
    nodes, edges = graph.nodes, graph.edges
    took_ns = host_ns_before(graph)
    by = edges.kind == EdgeKind.LAUNCH
    launch, first_edge = np.unique(edges.source[by], return_index=True)
    kernel = nodes.name[edges.target[by][first_edge]]
    rows = pl.DataFrame(
        {
            "launch": launch,
            "kernel": pl.Series(graph.names, dtype=pl.String).gather(kernel),
            "start_ns": nodes.measured_start[launch],
            **{name: getattr(nodes, name)[launch] for name in ("rank", "window", "step")},
            "took_ns": took_ns[launch],
        }
    )
    calls = rows.filter(pl.Series(np.isin(launch, next_launches(graph)))).sort("start_ns")
    is_first = pl.int_range(pl.len()).over("rank", "window", "step") == 0
    if not _has_steps(graph):
        older = is_one_of(nodes.kind, GPU_KINDS)
        older[edges.target[by]] = False
        began = pl.DataFrame(
            {name: getattr(nodes, name)[older] for name in ("rank", "window", "measured_start")}
        )
        began = began.group_by("rank", "window").agg(pl.col("measured_start").min())
        calls = calls.join(began, on=["rank", "window"], how="left", maintain_order="left")
        is_first &= (pl.col("start_ns") <= pl.col("measured_start")).fill_null(True)
    return calls.with_columns(is_first=is_first).drop("start_ns", "rank", "measured_start", strict=False)


def before_batches(graph: Graph) -> Bools:
    """Return [N] a mask of what threads do outside operators for long before copying a batch to a device.

    Each step has its own batch: of a single step it is not known what its copies are.
    """
    nodes, edges = graph.nodes, graph.edges
    if np.unique(nodes.step[nodes.step >= 0]).size < 2:
        return np.zeros(nodes.step.size, np.bool_)
    moved = np.array([bool(re.search(INTO_DEVICE, name)) for name in graph.names], np.bool_)[nodes.name]
    moved &= (nodes.kind == NodeKind.COPY) & (nodes.duration >= BATCH_NS)
    by = (edges.kind == EdgeKind.LAUNCH) & moved[edges.target]
    slow = edges.source[by & (host_ns_before(graph)[edges.source] >= SLOW_LAUNCH_NS)]
    following = next_launches(graph)
    waits = np.isin(following, slow) & outside_operators(graph)
    waits[waits] = nodes.lane[waits] == nodes.lane[following[waits]]
    return waits


def host_work_before_slow_launch(kernel: str | None, graph: Graph) -> Bools:
    """Return [N] a mask of CPU work between two launches of a rank that lasts too long to be launching alone.

    Args:
        kernel: what the second launches, other than as the first of a step; any kernel if None.
    """
    launches = host_before_launches(graph).filter(pl.col("took_ns") >= SLOW_LAUNCH_NS)
    if kernel is not None:
        launches = launches.filter((pl.col("kernel") == kernel) & ~pl.col("is_first"))
    slow: Bools = np.isin(next_launches(graph), launches["launch"].to_numpy())
    return slow


def without_bubble(graph: Graph, ends: pl.DataFrame) -> Floats | None:
    """Return [S] ns that the busiest rank computes in each step; None for graphs without whole operations."""
    nodes = graph.nodes
    if not (nodes.kind == NodeKind.DELAY).any():
        return None
    works = is_one_of(nodes.kind, (NodeKind.KERNEL, *CPU_KINDS)) & (nodes.step >= 0)
    busy = (
        pl.DataFrame({"window": nodes.window[works], "step": nodes.step[works], "rank": nodes.rank[works]})
        .with_columns(busy_ns=pl.Series(nodes.duration[works]))
        .group_by("window", "step", "rank")
        .agg(pl.col("busy_ns").sum())
        .group_by("window", "step")
        .agg(pl.col("busy_ns").max())
    )
    counted = durations_of(ends).select("window", "step")
    return (
        counted.join(busy, on=["window", "step"], how="left", maintain_order="left")["busy_ns"]
        .fill_null(0)
        .to_numpy()
    )


def _under(edit: Edit) -> Callable[[ReplayedJob], ReplayedJob]:
    return lambda job: job.under(edit, in_full=False).job


def _with(change: RankChange) -> Callable[[ReplayedJob], ReplayedJob]:
    return lambda job: job.with_change(change)


# The changes that remove each limit, from specific limits to general ones.
CHANGES: Sequence[tuple[str, Callable[[ReplayedJob], ReplayedJob]]] = (
    (COMPILATION, _with(FreeAside(compiling))),
    (CHECKPOINT, _with(FreeAside(saving))),
    (COLLECTION, _under(Garbage())),
    (INPUT, _with(Free(input_of))),
    (SYNCHRONISATION, _under(NoSync())),
    (ALLOCATOR, _with(Free(allocations_of))),
    (IMBALANCE, _equal_ranks),
    (IMBALANCE, _under(Balance(over="stages"))),
    (COMMUNICATION, _under(Network(bandwidth=FREE, latency=0.0))),
    (COMMUNICATION, _with(Free(exchanges_of))),
    (COPIES, _with(FreeCopies())),
    (HOST, _under(FreeHost())),
    (HOST, _with(Free(host_of_operators))),
)
