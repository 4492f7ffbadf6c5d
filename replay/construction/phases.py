"""Phases: positions in a step by which the work of ranks can be compared.

Ranks of one job call the same collectives in the same order, so "the work after the third collective of the
step" means the same on all of them, independent of their clocks and of how their windows are clipped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpro.arrays import Ints
from dpro.replay.construction.rank_view import RankView
from dpro.replay.engine import compiled

# instance of a collective -> (step, position among the rank's own in it, from 1)
Positions = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class CallOrder:
    """Collectives that a rank called inside a window, in order.

    Attributes:
        instance: [C] instance of each.
        called: [C] ns of the call.
        step: [C] step of the rank during which it was called.
    """

    rank: int
    window: int
    instance: Ints
    called: Ints
    step: Ints


def call_order(view: RankView) -> CallOrder:
    """Return the collectives that the rank called inside the window, in order."""
    ran = np.flatnonzero((view.instance >= 0) & (view.launch >= 0))
    called = view.start[view.launch[ran]]
    order = np.argsort(called, kind="stable")
    called = called[order]
    return CallOrder(view.rank, view.window, view.instance[ran[order]], called, view.step_of(called))


def positions_in_steps(all_calls: Iterable[CallOrder]) -> dict[int, Positions]:
    """Count, for each rank, the collectives with several callers that it called in each step.

    Collectives of other ranks are not counted, since their order relative to its own is random. A step whose
    beginning is cut off by the window has fewer: it is numbered so that its end agrees with whole steps.

    Returns:
        By rank, the step and position of each instance it called.
    """
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    orders: list[tuple[CallOrder, list[int]]] = []
    for calls in all_calls:
        orders.append((calls, calls.instance.tolist()))
        for instance, step in zip(calls.instance.tolist(), calls.step.tolist()):
            steps[instance][step] += 1
    step_of = {call: votes.most_common(1)[0][0] for call, votes in steps.items() if votes.total() > 1}
    by_rank: dict[int, dict[tuple[int, int], list[int]]] = defaultdict(dict)
    for calls, order in orders:
        for instance in order:
            step = step_of.get(instance, -1)
            if step >= 0:
                by_rank[calls.rank].setdefault((calls.window, step), []).append(instance)
    return {rank: _numbered(by_step) for rank, by_step in by_rank.items()}


def _numbered(by_step: dict[tuple[int, int], list[int]]) -> Positions:
    """Return the positions of one rank's collectives, given in order by window and step."""
    counts = Counter(len(instances) for instances in by_step.values())
    usual = max(counts, key=lambda count: (counts[count], count))
    first_steps = {window: min(s for w, s in by_step if w == window) for window, _ in by_step}
    positions: Positions = {}
    for (window, step), instances in by_step.items():
        missing = max(usual - len(instances), 0) if step == first_steps[window] else 0
        positions |= {instance: (step, missing + i + 1) for i, instance in enumerate(instances)}
    return positions


def phases_at(calls: CallOrder, time: Ints, step: Ints, positions: Positions) -> Ints:
    """Return [N] position of the last collective that the rank had called in the step by each time.

    0 where the step had called none yet, -1 outside steps.

    Args:
        time: [N] ns.
        step: [N] step that each belongs to.
        positions: positions of the rank's collectives.
    """
    phase = np.empty(time.size, np.int64)
    fill_phases(np.arange(time.size), time, step, known_positions(calls, positions), phase)
    return phase


def known_positions(calls: CallOrder, positions: Positions) -> tuple[Ints, Ints, Ints]:
    """Return step, position and call time of the collectives with a known position.

    Args:
        calls: calls of the rank in the window, in order.
        positions: positions of the rank's collectives.
    """
    positions_ = [
        (*positions[instance], called)
        for instance, called in zip(calls.instance.tolist(), calls.called.tolist())
        if instance in positions
    ]
    in_step, position, when = np.array(positions_, np.int64).reshape(-1, 3).T.copy()
    return in_step, position, when


@compiled
def fill_phases(number: Any, time: Any, step: Any, positions: Any, phase: Any) -> None:
    """Write `phases_at` of some nodes.

    Args:
        number: [K] nodes.
        time: [K] ns.
        step: [N] steps of all nodes.
        positions: from `known_positions`.
        phase: [N] phases of all nodes, written at `number`.
    """
    in_step, position, when = positions
    last = -1  # the last call before `time[i]`; the next node is mostly in the same phase
    for i in range(number.size):
        node = number[i]
        while last + 1 < when.size and when[last + 1] < time[i]:
            last += 1
        while last >= 0 and when[last] >= time[i]:
            last -= 1
        phase[node] = -1
        if step[node] >= 0:
            phase[node] = position[last] if last >= 0 and in_step[last] == step[node] else 0
