"""What the collectives of a run say of its links: bandwidth and latency, and how much of them nothing hides.

In: the replay of a run, groups of ranks. Out: a machine with the run's own links, and times of reductions. A
collective is taken to run as a ring (Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005): curves that are fitted
to one group say what another size of group takes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import log2
from typing import NamedTuple

import numpy as np

from dpro.arrays import Ints
from dpro.errors import Unanswerable
from dpro.replay.graph import Graph, NodeKind
from dpro.replay.intervals import covered, union
from dpro.replay.layouts.inputs.machine import Machine
from dpro.replay.models.collective_algorithms import RING, cost
from dpro.replay.models.link_costs import fit_costs
from dpro.replay.timeline import Timeline

US = 1e3  # ns
SHOWS_LATENCY = 1 << 18  # bytes: what larger ones take, were they smaller, is no latency


class GradientTraffic(NamedTuple):
    """Microseconds of a step and rank in which data-parallel collectives move: in all, and beside no work."""

    moving: float
    exposed: float


def with_own_links(
    machine: Machine, timeline: Timeline, with_outside: bool
) -> tuple[Machine, tuple[str, ...]]:
    """The machine with links as the run's collectives show them, and what that rests on.

    Args:
        with_outside: whether links across hosts, where none was seen, are taken to be like those within one.
    """
    graph = timeline.graph
    curves = fit_costs(graph)
    moved = {kind: _moved(graph, *kind) for kind in curves}
    per_host = machine.per_host
    for kind in sorted(moved, key=lambda each: (-moved[each][1], each)):
        ranks, total, typical, least = moved[kind]
        if not total or ranks < 2:
            continue
        try:
            spent = cost(kind[0], RING, ranks)
        except Unanswerable:
            continue
        curve = curves[kind]
        shown = least <= SHOWS_LATENCY  # else the time at no bytes is no latency
        alpha = curve.latency_ns / spent.messages / US if shown else 0.0
        moving = float(curve.time_ns(typical)) - (curve.latency_ns if shown else 0.0)
        gbps = spent.share * typical / max(moving, 1e-3)
        one_way = spent.messages / (2 if kind[0] == "all_reduce" else 1)
        latency = alpha * one_way / max(log2(ranks), 1) if shown else machine.inside_us
        step_us = alpha if shown else machine.outside_us
        if ranks > per_host:
            own = replace(machine, outside_gbps=gbps * per_host, outside_us=step_us)
        elif with_outside:
            own = replace(
                machine, inside_gbps=gbps, inside_us=latency, outside_gbps=gbps * per_host, outside_us=step_us
            )
        else:
            own = replace(machine, inside_gbps=gbps, inside_us=latency)
        return own, (f"links as {kind[0]} among {ranks} ranks show them: {gbps:.3g} GB/s",)
    return machine, ("links by the data sheet: the run has no collectives of known size to show its own",)


def _moved(graph: Graph, op: str, group: str) -> tuple[int, float, float, float]:
    """Ranks of a kind of communication, bytes that it moves in all, the size that moves most, the least."""
    nodes = graph.nodes
    numbers = [n for n, each in enumerate(graph.messages) if (each.op, each.group) == (op, group)]
    mine = np.isin(nodes.message, numbers) & (nodes.kind == NodeKind.TRANSFER) & (nodes.bytes > 0)
    if not mine.any():
        return 0, 0.0, 0.0, 0.0
    sizes, counts = np.unique(nodes.bytes[mine], return_counts=True)
    return (
        graph.messages[numbers[0]].num_ranks,
        float(nodes.bytes[mine].sum()),
        float(sizes[np.argmax(sizes * counts)]),
        float(sizes[0]),
    )


def reduced_of(
    timeline: Timeline, rank: int, work: Ints, axis: Collection[frozenset[int]]
) -> GradientTraffic:
    """How long data-parallel collectives of a rank move data in a step, and how long beside no work.

    Args:
        work: [N] nodes of its work.
    """
    graph, nodes = timeline.graph, timeline.graph.nodes
    sizes = {len(ranks) for ranks in axis}
    numbers = [n for n, each in enumerate(graph.messages) if each.num_ranks in sizes and _collective(each.op)]
    moving = (nodes.rank == rank) & (nodes.kind == NodeKind.TRANSFER) & (nodes.step >= 0)
    moving &= np.isin(nodes.message, numbers)
    steps = np.unique(nodes.step[work])
    when = union(timeline.start[moving], timeline.end[moving])
    busy = union(timeline.start[work], timeline.end[work])
    if not len(when) or not steps.size:
        return GradientTraffic(0.0, 0.0)
    total = float((when[:, 1] - when[:, 0]).sum())
    hidden = float(covered(busy, when[:, 0], when[:, 1]).sum())
    return GradientTraffic(total / steps.size / US, (total - hidden) / steps.size / US)


def _collective(op: str) -> bool:
    return op not in ("send", "recv", "send_recv")
