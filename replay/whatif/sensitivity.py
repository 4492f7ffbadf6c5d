"""Sensitivity of the step time to the speed of each part of the machine, with the break-even of each.

Takes a graph; returns a curve per part: the network, GPU kernels, the host's CPU, the input pipeline. The
break-even is the factor from which on the step hardly gets shorter, with the next limit of the step.
"""

from __future__ import annotations

import numpy as np
import polars as pl

from dpro.documents import DocumentPart
from dpro.errors import Unanswerable
from dpro.replay.graph import GPU_KINDS, Graph, NodeKind
from dpro.replay.step_parts import replayed_breakdown
from dpro.replay.timeline import changed_step_times, replay, time_on_critical_path
from dpro.replay.whatif.edit import Edit
from dpro.replay.whatif.edits.communication import Network
from dpro.replay.whatif.edits.host import Cpu
from dpro.replay.whatif.edits.selected_work import Scale
from dpro.replay.whatif.graph_ops.scope import DATA_LOADING
from dpro.replay.whatif.graph_ops.selected import NodeSelection
from dpro.replay.whatif.graph_ops.shared_links import with_shared_links
from dpro.replay.whatif.predict import baseline_steps
from dpro.units import ms

FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 30.0, 1000.0)
FASTEST = FACTORS[-2]  # what a machine may reach; the last factor stands for a part that takes no time
NEARLY_ALL = 0.9  # of the possible gain
MIN_GAIN = 0.01  # of the step: a part with less gain is not a limit
MOSTLY = 0.5  # of the step: kernels that run for longer must be part of what limits it
UNLIKELY = 0.1  # of the time of such kernels: the replay does not show what they cost if it saves less
NOTHING_ELSE = 100.0  # gain of a host that takes no time from which it is all that the run shows of a step
ALONE = "next to nothing else of the step was recorded"
HOST_MAY_WAIT = "a host thread counts as busy all the time, but may wait"


class Curve(DocumentPart, frozen=True):
    """Step time over the speed of one part of the machine.

    Attributes:
        part: network, kernels, host or input.
        base_ms: mean step as it is.
        factors: speed-ups of the part; empty where their effect is not known.
        step_ms: mean step for each of the factors.
        break_even: factor beyond which hardly any gain is left; null where the part is not a limit, or is
            still the limit at x30.
        then: part that limits the step beyond `break_even`, or `part` if it still does at x30; null where the
            part is not a limit.
        unknown: why the run does not show what a faster part gains; empty if it does.
    """

    part: str
    base_ms: float
    factors: list[float]
    step_ms: list[float]
    break_even: float | None
    then: str | None
    unknown: str = ""


def sensitivity(graph: Graph) -> list[Curve]:
    """Return a curve for each part of the machine that the run shows.

    Raises:
        Unanswerable: there is no complete step.
    """
    baseline = baseline_steps(graph)
    base = _mean_step(graph, baseline)
    computing = _share_of_kernels(graph, baseline)
    curves = []
    for part in PARTS:
        try:
            changed = [with_shared_links(graph, _faster(graph, part, factor)) for factor in FACTORS]
        except Unanswerable:
            continue
        steps = [_mean_step(graph_then, baseline) for graph_then in changed]
        if part == "kernels" and computing >= MOSTLY and base - steps[-1] < UNLIKELY * computing * base:
            curves.append(Curve(part, ms(base), [], [], None, None, HOST_MAY_WAIT))
            continue
        if part == "host" and base > NOTHING_ELSE * steps[-1]:
            curves.append(Curve(part, ms(base), [], [], None, None, ALONE))
            continue
        factor, then = break_even(base, FACTORS, steps), None
        if factor is not None and factor > FASTEST:
            factor, then = None, part
        elif factor is not None:
            then = limiting_part(changed[int(np.searchsorted(FACTORS, factor))], part)
        curves.append(Curve(part, ms(base), list(FACTORS), list(map(ms, steps)), factor, then))
    return curves


PART_WORDS = {
    "network": "the network",
    "kernels": "the GPU's kernels",
    "host": "the host's CPU",
    "input": "the input pipeline",
}
FASTER = {
    "network": "a faster network",
    "kernels": "faster GPU kernels",
    "host": "a faster CPU",
    "input": "a faster input pipeline",
}
PARTS = tuple(PART_WORDS)


def edit_of(part: str, factor: float) -> Edit:
    """Return the edit that speeds up a part by a factor."""
    if part == "network":
        return Network(bandwidth=factor, latency=1 / factor)
    if part == "kernels":
        return Scale(NodeSelection(kind="kernel"), 1 / factor)
    if part == "host":
        return Cpu(factor=factor)
    return Scale(NodeSelection(within=DATA_LOADING), 1 / factor)


def _faster(graph: Graph, part: str, factor: float) -> Graph:
    """Speed up a part, and no other: a faster CPU leaves the input as it is, which may wait for a disk."""
    changed = edit_of(part, factor).apply(graph)
    if part != "host":
        return changed
    loading = parts_of(graph) == PARTS.index("input")
    return changed.with_durations(np.where(loading, graph.nodes.duration, changed.nodes.duration))


def _share_of_kernels(graph: Graph, baseline: pl.DataFrame) -> float:
    """Return the share of the mean step in which GPUs compute; 0 without GPU work."""
    parts = replayed_breakdown(replay(graph), baseline).select(pl.col("compute_ns", "duration_ns").sum())
    computing, whole = parts.row(0)
    return float(computing / whole) if whole else 0.0


def _mean_step(changed: Graph, baseline: pl.DataFrame) -> float:
    timeline = replay(changed)
    steps = changed_step_times(baseline, changed, timeline.end)
    return float(steps["duration_ns"].to_numpy().mean())


def break_even(base: float, factors: tuple[float, ...], steps: list[float]) -> float | None:
    """Return the factor from which on the step hardly gets shorter, interpolated between tried factors.

    There, nearly all of the gain is reached, and the part takes no more of the step than all others.

    Args:
        base: step time at a factor of 1.
        factors, steps: ascending, and the step time at each.

    Returns:
        None where the gain is negligible.
    """
    last = steps[-1]
    if base - last < MIN_GAIN * base:
        return None
    gain = np.maximum.accumulate(base - np.array([base, *steps]))
    nearly_all = base - last - min((1 - NEARLY_ALL) * (base - last), last)
    speed = 1 / np.array([1.0, *factors])  # a step limited by the part is linear in its time, not its speed
    return float(1 / np.interp(nearly_all, gain, speed))


def limiting_part(graph: Graph, but: str = "") -> str:
    """Return the part of the machine with most of the critical path, leaving out one.

    Args:
        but: the part to leave out.
    """
    spent = time_on_critical_path(replay(graph))
    total = dict(zip(PARTS, np.bincount(parts_of(graph), spent, minlength=len(PARTS)).tolist()))
    total.pop(but, None)
    return max(total, key=lambda name: total[name])


def parts_of(graph: Graph) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return [N] index into `PARTS` of the part that each node keeps busy."""
    kind = graph.nodes.kind
    part = np.full(graph.num_nodes, PARTS.index("host"), np.int64)
    part[np.isin(kind, GPU_KINDS)] = PARTS.index("kernels")
    part[np.isin(kind, (NodeKind.ARRIVE, NodeKind.RENDEZVOUS, NodeKind.TRANSFER))] = PARTS.index("network")
    part[NodeSelection(within=DATA_LOADING).mask(graph)] = PARTS.index("input")
    return part


def curve_sentence(curve: Curve) -> str:
    """Word a curve as a sentence."""
    part = PART_WORDS[curve.part]
    if curve.unknown:
        return f"{part}: not known for this run: {curve.unknown}"
    if curve.then is None:
        return f"{part}: not a limit; {FASTER[curve.part]} would not help"
    if curve.break_even is None:
        gain = min(curve.base_ms / curve.step_ms[curve.factors.index(FASTEST)], FASTEST)
        return f"{part}: x{gain:.2f} once it is {FASTEST:.0f} times as fast, and it is still the limit"
    most = curve.base_ms / curve.step_ms[-1]
    less = " (less where hosts sleep)" if curve.part == "host" else ""  # a trace does not distinguish the two
    then = PART_WORDS[curve.then]
    return (
        f"{part}: x{most:.2f} at most{less}; once it is {curve.break_even:.1f} times as fast, "
        f"the limit is {then}"
    )
