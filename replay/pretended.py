"""The step of a job with pretended ranks: their own work, and estimated communication.

Takes the graph of pretended ranks, in which communication takes no time, and a measured network table, or the
data sheet of the GPU the ranks ran on. Returns the graph with communication times, and the mean step with an
interval, or the reasons why it is unknown. Waits and pipeline bubbles follow from the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace

from dpro.arrays import Floats, Ints
from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.members import members_of
from dpro.replay.alignment.match import POINT_TO_POINT
from dpro.replay.construction.graph_builder import Built
from dpro.replay.cost.kernels.roofline import model_named
from dpro.replay.cost.machine import SPREADS, Machine, machine_of, one_way_us
from dpro.replay.cost.tables import CurveGroup, NetworkTable, network_table
from dpro.replay.cost.transfers import estimate
from dpro.replay.fidelity.accuracy import RUN_TO_RUN, STANDARD_ERRORS
from dpro.replay.graph import CPU_KINDS, Graph, NodeKind
from dpro.replay.steps import host_facts
from dpro.replay.timeline import durations_of, replay, step_ends
from dpro.schema import COUNTERS, STEPS
from dpro.store import Manifest
from dpro.units import ms
from dpro.words import first_few

NINETY = 1.645  # standard deviations on each side of the mean that contain 90% of a normal distribution
TWO_WAYS = 2.0  # an all-reduce is a reduce-scatter and an all-gather
# Operations that tables seldom have; an all-reduce of as many bytes includes each, so it takes no less.
WITHIN_ALL_REDUCE = ("broadcast", "reduce", "gather", "scatter", "barrier")


class PretendedStep(DocumentPart, frozen=True):
    """The predicted step of the pretended job.

    Attributes:
        ranks, world_size: number of pretended ranks, and number of ranks of the job.
        compute_ms: the mean step if communication took no time.
        step_ms: the mean step; null where communication times are unknown.
        low_ms, high_ms: interval of the mean step; null where `step_ms` is.
        how: sources of the communication times.
        unknown: reasons why the step is unknown.
    """

    ranks: int
    world_size: int
    compute_ms: float
    step_ms: float | None
    low_ms: float | None
    high_ms: float | None
    how: list[str]
    unknown: list[str]

    @property
    def doubt_pct(self) -> float:
        """The largest deviation of the interval from the step, in %; 0 where the step is unknown."""
        if not self.step_ms or self.low_ms is None or self.high_ms is None:
            return 0.0
        return 100 * max(self.high_ms - self.step_ms, self.step_ms - self.low_ms) / self.step_ms


class Sharing(NamedTuple):
    """The effect of sharing the cores of a host on the own work of ranks that ran alone.

    Attributes:
        longest: factor on own work if all ranks of a host, and their communication threads, compute at once.
        line: its basis, in words; empty where the host has a core for each.
    """

    longest: float = 1.0
    line: str = ""


@dataclass(frozen=True)
class Times:
    """Communication times, in ns, each [T]."""

    expected: Floats
    low: Floats
    high: Floats
    how: str


def with_communication(
    built: Built, manifest: Manifest, network: pl.DataFrame | None, error_pct: float
) -> tuple[Graph, PretendedStep]:
    """Fill in communication times.

    Args:
        network: a measured network table, from `read_frame`; None for none.

    Returns:
        The graph, with communication times if all are known, and its step. The step is that of ranks that
        share no core, like the pretended ones; its interval includes the effect of sharing.
    """
    graph, rows = without_waits_for_cores(built.graph), built.matching.rows
    alone = replayed_steps(graph)
    compute_ns = float(alone.mean()) if alone.size else 0.0
    step_without = PretendedStep(
        len(manifest.ranks), manifest.world_size, ms(compute_ns), None, None, None, [], []
    )
    transfers = np.flatnonzero(graph.nodes.kind == NodeKind.TRANSFER)
    durations = [np.zeros(transfers.size) for _ in range(3)]
    how: dict[str, None] = {}
    unknown = dict.fromkeys(_unknown_parts(rows, manifest))
    kinds = rows.group_by("instance").agg(pl.col("op", "group_ranks", "peer", "rank").first())
    call_of = {row[0]: row[1:] for row in kinds.iter_rows()}
    by_kind: dict[tuple[str, int, int, int], list[int]] = {}
    per_host = manifest.options["pretend"]["per_host"]
    for place, node in enumerate(transfers.tolist()):
        op, ranks, peer, rank = call_of[int(graph.nodes.collective[node])]
        by_kind.setdefault(
            _group_shape(op, [rank, peer] if op in POINT_TO_POINT else members_of(ranks), per_host), []
        ).append(place)
    source = _Source(manifest, network, per_host)
    for (op, num_ranks, hosts, stride), places in by_kind.items():
        of_kind = np.array(places)
        if num_ranks < 2:
            continue
        try:
            num_bytes = np.maximum(graph.nodes.bytes[transfers[of_kind]], 1).astype(np.float64)
            times = source.times(op, num_ranks, hosts, stride, num_bytes)
        except Unanswerable as error:
            unknown[f"what {op} among {num_ranks} ranks takes: {error}"] = None
            continue
        how.setdefault(times.how)
        for column, filled in zip(durations, (times.expected, times.low, times.high)):
            column[of_kind] = filled
    if unknown:
        return graph, replace(step_without, unknown=list(unknown))
    sharing = sharing_of(graph, min(per_host, manifest.world_size))
    works = (1.0, 1.0, sharing.longest)
    graphs = [_with_times(graph, transfers, *changes) for changes in zip(durations, works)]
    steps = [replayed_steps(graph) for graph in graphs]
    step, low, high = (float(step.mean()) if step.size else 0.0 for step in steps)
    deviation = float(steps[0].std(ddof=1)) if steps[0].size > 1 else 0.0
    # As in any prediction, the interval covers the variation of steps and of recordings of one job.
    margin = STANDARD_ERRORS * deviation * float(np.hypot(RUN_TO_RUN, steps[0].size ** -0.5 if step else 0.0))
    margin += error_pct / 100 * step
    low, high = max(min(low, step) - margin, 0.0), max(high, step) + margin
    how_known = [*how, *filter(None, [sharing.line])]
    return graphs[0], replace(step_without, step_ms=ms(step), low_ms=ms(low), high_ms=ms(high), how=how_known)


def replayed_steps(graph: Graph) -> Floats:
    """Return [S] the duration of each step of the replayed graph, in ns."""
    timeline = replay(graph)
    steps = durations_of(step_ends(graph, timeline.start, timeline.end))["duration_ns"]
    return steps.to_numpy().astype(np.float64)


def _with_times(graph: Graph, transfers: Ints, duration: Floats, work: float) -> Graph:
    """Return the graph with other transfer times, and with host work scaled by a factor."""
    changed = graph.nodes.duration.copy()
    on_host = np.isin(graph.nodes.kind, CPU_KINDS)
    changed[on_host] = np.rint(changed[on_host] * work).astype(np.int64)
    changed[transfers] = np.rint(duration).astype(np.int64)
    return graph.with_durations(changed)


def without_waits_for_cores(graph: Graph) -> Graph:
    """Return the graph without the time that pretended ranks waited for a core, which other programs caused.

    A rank that runs alone waits for no other rank. Waits are recorded per step only, so all host work of the
    rank in a step is shortened by the same share.
    """
    assert graph.run is not None
    facts = host_facts(graph.run.table(STEPS), graph.run.table(COUNTERS)).drop_nulls("run_queue_ns")
    duration, nodes = graph.nodes.duration.copy(), graph.nodes
    on_host = np.isin(nodes.kind, CPU_KINDS)
    for rank, step, lasted, waited in facts.select("rank", "step", "duration_ns", "run_queue_ns").iter_rows():
        working = on_host & (nodes.rank == rank) & (nodes.step == step)
        left = 1 - min(waited / max(lasted, 1), 1.0)
        duration[working] = np.rint(duration[working] * left).astype(np.int64)
    return graph.with_durations(duration)


def sharing_of(graph: Graph, ranks: int) -> Sharing:
    """Return the effect of ranks sharing the cores of a host like the one they were pretended on."""
    assert graph.run is not None
    steps, counters = graph.run.table(STEPS), graph.run.table(COUNTERS)
    facts = host_facts(steps, counters).drop_nulls(["cpu_ns", "training_thread_cpu_ns"])
    limits = counters.filter(pl.col("counter").is_in(["cpus", "cgroup_cpu_limit_cores"]))["value"].to_list()
    cores = min((limit for limit in limits if limit > 0), default=0.0)
    names = ("duration_ns", "training_thread_cpu_ns", "cpu_ns", "run_queue_ns")
    duration, training, every, waited = (float(facts[name].fill_null(0.0).sum()) for name in names)
    if not cores or not training or duration <= waited:
        return Sharing()
    by_host = not (graph.nodes.kind == NodeKind.KERNEL).any()  # without a GPU, another thread communicates
    threads = ranks * (max(every / training, 1.0) + by_host)
    if threads <= cores:
        return Sharing()
    share = min(training / (duration - waited), 1.0)
    longest = 1 + share * (threads / cores - 1)
    line = (
        f"up to {longest:.2f} times as much own work if the {ranks} ranks of a host share {cores:g} cores, "
        f"as this machine has: a rank computes for {share:.0%} of its step"
    )
    return Sharing(longest, line)


def _unknown_parts(rows: pl.DataFrame, manifest: Manifest) -> list[str]:
    """Return what no table can supply: a job needs collectives, and a message needs both its ends."""
    ends = rows.filter(pl.col("op").is_in(POINT_TO_POINT))["peer"].unique().sort().to_list()
    if rows.is_empty():
        return ["the script called no collective: each rank would run by itself, as this one did"]
    absent = [rank for rank in ends if rank not in manifest.ranks]
    if not absent:
        return []
    who = first_few(absent, 8)
    return [f"when rank {who} sends and receives: pretend all stages of a pipeline (--pretend-ranks)"]


def _group_shape(op: str, ranks: Sequence[int], per_host: int) -> tuple[str, int, int, int]:
    """Return operation, number of ranks, number of hosts and distance between ranks of a collective."""
    ordered = sorted(ranks)
    stride = ordered[1] - ordered[0] if len(ordered) > 1 else 1
    name = "send_recv" if op in POINT_TO_POINT else op
    return name, len(ordered), len({rank // per_host for rank in ordered}), max(stride, 1)


class _Source:
    """The source of communication times: a table where there is one, else a data sheet."""

    def __init__(self, manifest: Manifest, network: pl.DataFrame | None, per_host: int) -> None:
        self._table: NetworkTable | None = None
        self._machine: Machine | None = None
        if network is not None:
            self._table = network_table(network, "the network table")
        elif manifest.gpus:
            try:
                self._machine = machine_of(model_named(manifest.gpus[0]), per_host)
            except Unanswerable:
                self._machine = None

    def times(self, op: str, num_ranks: int, hosts: int, stride: int, num_bytes: Floats) -> Times:
        """Estimate the times of collectives.

        Args:
            num_bytes: [T] payloads.

        Raises:
            Unanswerable: there is no source for them.
        """
        if op in WITHIN_ALL_REDUCE:
            most = self.times("all_reduce", num_ranks, hosts, stride, num_bytes)
            how = f"{most.how}: half an all-reduce for {op}"
            return Times(most.expected / 2, most.low * 0, most.high, how)
        if self._table is not None:
            return _by_table(self._table, op, num_ranks, hosts, num_bytes)
        if self._machine is not None:
            return _by_sheet(self._machine, op, num_ranks, hosts, stride, num_bytes)
        raise Unanswerable("give a measured table with --network-table FILE (docs/curves.md)")


def _by_table(table: NetworkTable, op: str, num_ranks: int, hosts: int, num_bytes: Floats) -> Times:
    """Estimate times by a measured table, from all of its devices and libraries that cover the group."""
    answers, why = [], ""
    for device, library, version in dict.fromkeys((g.device, g.library, g.version) for g in table.curves):
        try:
            one = estimate(table, CurveGroup(op, num_ranks, hosts, device, library, version), num_bytes)
        except Unanswerable as error:
            why = why or str(error)
            continue
        expected = np.sqrt(one.low_ns * one.high_ns) if one.time_ns is None else one.time_ns
        answers.append((expected, one.low_ns, one.high_ns, one.how))
    if not answers:
        raise Unanswerable(why or "the network table is empty")
    expected, low, high = (np.stack([answer[column] for answer in answers]) for column in range(3))
    how = f"{op} among {num_ranks} ranks: the network table ({answers[0][3]})"
    return Times(np.median(expected, axis=0), low.min(axis=0), high.max(axis=0), how)


def _by_sheet(machine: Machine, op: str, num_ranks: int, hosts: int, stride: int, num_bytes: Floats) -> Times:
    """Estimate times by the data sheet of links, as `dpro plan` does, but with all links for one message."""
    ranks, strides = np.full(num_bytes.size, num_ranks), np.full(num_bytes.size, stride)
    if op == "send_recv":
        gbps = machine.inside_gbps if hosts == 1 else machine.outside_gbps / machine.per_host
        took_us = machine.message_us + num_bytes / (gbps * 1e3)
    else:
        took_us = one_way_us(num_bytes, ranks, strides, machine) * (TWO_WAYS if op == "all_reduce" else 1.0)
    off = np.exp(NINETY * SPREADS["inside_gbps" if hosts == 1 else "outside_gbps"])
    time = took_us * 1e3
    return Times(time, time / off, time * off, f"{op}: data sheet of {machine.gpu}, unmeasured")
