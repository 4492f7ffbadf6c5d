"""Where in a step the ranks stand: the common measure by which their work can be compared.

Ranks of one job call the same collectives in the same order, so "the work after the third collective of the
step" means the same on all of them, whatever their clocks say and however their windows are clipped.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray

from dpro.replay.local import Local

Ints = NDArray[np.int64]

# instance of a collective -> (step, position in it, from 1)
Positions = dict[int, tuple[int, int]]


def called_at(local: Local) -> tuple[Ints, Ints]:
    """Collectives the rank called inside the window: their spans and when each was called, in order."""
    ran = np.flatnonzero((local.instance >= 0) & (local.launch >= 0))
    called = local.start[local.launch[ran]]
    order = np.argsort(called, kind="stable")
    return ran[order], called[order]


def positions_in_steps(locals_: list[Local]) -> Positions:
    """Number the collectives of each step that several ranks called.

    A step whose beginning is cut off by the window holds fewer: it is numbered so that its end agrees with
    the steps that are whole.

    Args:
        locals_: all ranks and windows.
    """
    steps: dict[int, Counter[int]] = defaultdict(Counter)
    first_call: dict[int, int] = {}
    window_of: dict[int, int] = {}
    for local in locals_:
        ran, called = called_at(local)
        for instance, step, time in zip(
            local.instance[ran].tolist(), local.step_of(called).tolist(), called.tolist()
        ):
            steps[instance][step] += 1
            first_call[instance] = min(time, first_call.get(instance, time))
            window_of[instance] = local.window
    by_step: dict[tuple[int, int], list[int]] = defaultdict(list)
    for instance in sorted(first_call, key=first_call.__getitem__):
        step = steps[instance].most_common(1)[0][0]
        if step >= 0 and steps[instance].total() > 1:
            by_step[window_of[instance], step].append(instance)
    usual = Counter(len(instances) for instances in by_step.values()).most_common(1)
    first_steps = {window: min(s for w, s in by_step if w == window) for window, _ in by_step}
    positions: Positions = {}
    for (window, step), instances in by_step.items():
        missing = max(usual[0][0] - len(instances), 0) if step == first_steps[window] else 0
        positions |= {instance: (step, missing + i + 1) for i, instance in enumerate(instances)}
    return positions


def sections(local: Local, time: Ints, step: Ints, positions: Positions) -> Ints:
    """[N] position of the last collective that the rank had called in the step by each time.

    0 where the step had called none yet, -1 outside steps.

    Args:
        local: the rank.
        time: [N] ns.
        step: [N] step that each belongs to.
        positions: of all collectives.
    """
    ran, called = called_at(local)
    known = [
        (*positions[instance], time_called)
        for instance, time_called in zip(local.instance[ran].tolist(), called.tolist())
        if instance in positions
    ]
    if not known:
        return np.where(step >= 0, 0, -1)
    in_step, position, when = np.array(known, np.int64).T
    at = np.searchsorted(when, time, side="left") - 1
    same_step = (at >= 0) & (in_step[np.maximum(at, 0)] == step)
    return np.where(step >= 0, np.where(same_step, position[np.maximum(at, 0)], 0), -1)
