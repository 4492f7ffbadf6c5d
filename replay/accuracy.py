"""How far to believe a replay: its errors against the trace, and what the trace did not tell.

In: a graph with its matching, and its timeline. Out: numbers and a plain verdict. A small error of the step
time proves little by itself (wrong parts can add up right), so the errors of single starts, the time that
nothing explains, and the starts that were taken from the trace are counted too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
from numpy.typing import NDArray

from dpro.classify import classify
from dpro.replay.build import UNEXPLAINED_NS, Built
from dpro.replay.graph import GPU_KINDS, EdgeKind, Graph, NodeKind
from dpro.replay.overlap import Overlap, overlap_of
from dpro.replay.timeline import Timeline, measured_step_times, replay, step_times
from dpro.store import Manifest
from dpro.units import NS_PER_MS, ms

Ints = NDArray[np.int64]

# Beyond these a replay does not describe the job well enough to predict from.
WORST_STEP_ERROR_PCT = 5.0
WORST_UNEXPLAINED = 0.10
WORST_ANCHORED = 0.20


@dataclass(frozen=True)
class Trust:
    """What is known about how well a replay fits.

    Attributes:
        steps: `step`, `measured_ns`, `replayed_ns`, `error_pct`.
        error_pct: mean of the steps' absolute errors.
        start_error_ns: median and 95th percentile of |replayed - measured| starts of GPU work and
            collectives, or of CPU spans where there are none; anchored ones left out.
        collectives_matched: share of collectives found on all ranks that recorded their group.
        kernels_classified: share of GPU time in kernels of a known class; None without GPU work.
        time_unexplained: share of the ranks' window time in which GPU work or a collective could have
            started by all that is known, but had not.
        host_gaps: share of the threads' time that no span explains; it is kept as work of its own.
        starts_anchored: share of starts of GPU work and collectives taken from the trace: anchored, tied to
            the draining of the device by the time measured, or delayed by a launch that was not recorded.
        overlap: how kernels slow down beside communication; None where the trace does not tell.
        reasons: what the trace cannot answer, one line each.
        answerable: whether predictions from this replay make sense.
        assumed: what was taken for granted, one line each.
    """

    steps: pl.DataFrame
    error_pct: float
    start_error_ns: tuple[float, float]
    collectives_matched: float
    kernels_classified: float | None
    time_unexplained: float
    host_gaps: float
    starts_anchored: float
    overlap: Overlap | None
    reasons: tuple[str, ...]
    answerable: bool
    assumed: tuple[str, ...] = ()


def assess(built: Built, timeline: Timeline, manifest: Manifest) -> Trust:
    """Compare a replay of the unchanged graph with the trace.

    Args:
        built: graph and matching.
        timeline: its replay.
        manifest: the run's.
    """
    graph = built.graph
    replayed = step_times(graph, timeline.start, timeline.end)
    steps = measured_step_times(graph).rename({"duration_ns": "measured_ns"})
    steps = steps.join(replayed, on=["window", "step"]).rename({"duration_ns": "replayed_ns"})
    error = (pl.col("replayed_ns") / pl.col("measured_ns") - 1) * 100
    steps = steps.filter(pl.col("measured_ns") > 0).with_columns(error_pct=error).sort("window", "step")
    error_pct = float(steps["error_pct"].abs().mean() or 0.0)  # type: ignore[arg-type]
    unexplained = unexplained_share(graph)
    matched = built.matching.share_on_all_ranks
    anchored = _share_anchored(graph)
    # What late launches cost is the unexplained share: their number is no harm.
    doubtful = 0.0 if built.of_operations else anchored
    why_not = [*_why_not(error_pct, unexplained, doubtful, steps.height), *built.alignment.conflicts]
    return Trust(
        steps=steps,
        error_pct=error_pct,
        start_error_ns=_start_errors(timeline),
        collectives_matched=matched,
        kernels_classified=_share_classified(graph),
        time_unexplained=unexplained,
        host_gaps=_share_of_gaps(graph),
        starts_anchored=anchored,
        overlap=None if built.of_operations else overlap_of(timeline),
        reasons=(*why_not, *_not_known(built, manifest)),
        answerable=not why_not,
        assumed=_assumed(built, unexplained),
    )


def _assumed(built: Built, unexplained: float) -> tuple[str, ...]:
    late = built.graph.nodes.kind == NodeKind.DELAY
    if not late.any():
        return built.assumed
    launches = (
        "launches were not recorded: that operations begin later than all they depend on makes up "
        f"{unexplained:.1%} of the steps; predictions take the usual delay of each kind"
    )
    return (launches, *built.assumed)


def unexplained_share(graph: Graph) -> float:
    """Share of the ranks' window time in which work could have started, by all edges, but had not.

    Where such time is a node of its own, what the steps would save without it: many wait for others
    meanwhile.
    """
    nodes, edges = graph.nodes, graph.edges
    delay = nodes.kind == NodeKind.DELAY
    if delay.any():
        prompt = replay(graph.with_durations(np.where(delay, 0, nodes.duration)))
        measured = float(measured_step_times(graph)["duration_ns"].sum())
        left = float(step_times(graph, prompt.start, prompt.end)["duration_ns"].sum())
        return 1 - left / measured if measured else 0.0
    ready = nodes.earliest.copy()
    np.maximum.at(ready, edges.target, nodes.measured_end[edges.source] + edges.lag)
    work = np.isin(nodes.kind, (*GPU_KINDS, NodeKind.ARRIVE))
    lag = np.maximum(nodes.measured_start - ready, 0)[work]
    extent = (
        pl.DataFrame({"r": nodes.rank, "w": nodes.window, "s": nodes.measured_start, "e": nodes.measured_end})
        .filter(pl.col("r") >= 0)
        .group_by("r", "w")
        .agg(length=pl.col("e").max() - pl.col("s").min())
    )
    total = float(extent["length"].sum())
    return float(lag.sum()) / total if total else 0.0


def _start_errors(timeline: Timeline) -> tuple[float, float]:
    nodes = timeline.graph.nodes
    counted = np.isin(nodes.kind, (*GPU_KINDS, NodeKind.ARRIVE)) & ~nodes.anchored
    if not np.isin(nodes.kind, GPU_KINDS).any():
        counted |= (nodes.span >= 0) & ~nodes.anchored
    if not counted.any():
        return 0.0, 0.0
    error = np.abs(timeline.start - nodes.measured_start)[counted]
    return float(np.percentile(error, 50)), float(np.percentile(error, 95))


def _share_anchored(graph: Graph) -> float:
    work = np.isin(graph.nodes.kind, (*GPU_KINDS, NodeKind.ARRIVE))
    taken = graph.nodes.anchored.copy()
    taken[graph.edges.target[graph.edges.kind == EdgeKind.CONTENTION]] = True
    late = (graph.nodes.kind == NodeKind.DELAY) & (graph.nodes.duration > UNEXPLAINED_NS)
    taken[graph.edges.target[late[graph.edges.source]]] = True
    return float(taken[work].mean()) if work.any() else 0.0


def _share_of_gaps(graph: Graph) -> float:
    cpu = graph.nodes.kind <= NodeKind.GAP
    total = int(graph.nodes.duration[cpu].sum())
    return float(graph.nodes.duration[graph.nodes.kind == NodeKind.GAP].sum()) / total if total else 0.0


def _share_classified(graph: Graph) -> float | None:
    nodes = graph.nodes
    gpu = np.isin(nodes.kind, (NodeKind.KERNEL, NodeKind.TRANSFER)) & (nodes.duration > 0)
    gpu &= np.isin(nodes.lane, [i for i, (_, what) in enumerate(graph.lanes) if what.startswith("stream")])
    total = int(nodes.duration[gpu].sum())
    if total == 0:
        return None
    known = np.array([classify(name).kind != "other" for name in graph.names])
    return float(nodes.duration[gpu & known[nodes.name]].sum()) / total


def _why_not(error_pct: float, unexplained: float, anchored: float, steps: int) -> list[str]:
    """What forbids predictions from the replay, one line each."""
    reasons = []
    if steps == 0:
        reasons.append("no whole step in the trace: record at least two steps")
    if error_pct > WORST_STEP_ERROR_PCT:
        reasons.append(f"the replayed steps are off by {error_pct:.1f}%: do not predict from this trace")
    if unexplained > WORST_UNEXPLAINED:
        reasons.append(
            f"nothing in the trace explains {unexplained:.1%} of the time before GPU work and collectives"
        )
    if anchored > WORST_ANCHORED:
        reasons.append(
            f"{anchored:.0%} of the starts of GPU work and collectives were taken from the trace, which does "
            "not tell what they depend on: a small error proves nothing"
        )
    return reasons


def _not_known(built: Built, manifest: Manifest) -> list[str]:
    """What the trace leaves open without forbidding predictions, one line each."""
    reasons = list(built.unknown)
    missing = [] if built.of_operations else manifest.missing_ranks  # others of the same place stand for them
    if missing:
        reasons.append(
            f"{len(missing)} of {manifest.world_size} ranks are missing: what made the others wait for them "
            "cannot be told from slow communication; record all ranks"
        )
    silent = sorted(set(manifest.ranks) - {int(rank) for rank in np.unique(built.graph.nodes.rank)})
    if silent:
        reasons.append(f"no spans of ranks {', '.join(map(str, silent))}: they are left out")
    if not built.steps_known:
        reasons.append("no steps are known: each window is taken as one step; mark steps in the profiler")
    if len(manifest.ranks) > 1 and not built.of_operations and not (built.matching.rows["members"] > 1).any():
        reasons.append("no collective is known on two ranks: who waits for whom cannot be told")
    reasons += [
        f"collectives not matched ({line}): their waiting counts as communication"
        for line in built.matching.refused
    ]
    return reasons + _clocks_not_known(built)


def _clocks_not_known(built: Built) -> list[str]:
    uncertainty = {place: clock.line.uncertainty_ns for place, clock in built.alignment.clocks.items()}
    reasons = []
    unsure = {rank for (rank, _), ns in uncertainty.items() if ns > NS_PER_MS}
    if unsure:
        worst = ms(max(uncertainty.values()))
        reasons.append(f"the clocks of {len(unsure)} ranks are known only to {worst:.1f} ms")
    unknown = {rank for (rank, _), ns in uncertainty.items() if ns < 0}
    if unknown and (built.matching.rows["members"] > 1).any():
        reasons.append(f"nothing tells how far the clocks of {len(unknown)} ranks are off")
    return reasons
