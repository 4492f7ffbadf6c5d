"""Layers in a row, divided over the stages of a pipeline so that the slowest is as fast as can be.

In: how long layers take, what stages do besides, and how many layers each has memory for. Out: how many
layers each stage gets. The division is exact: by dynamic programming over where each stage ends.
"""

from __future__ import annotations

import numpy as np

from dpro.arrays import Floats, Ints
from dpro.errors import Unanswerable


def balanced(layers: Floats, fixed: Floats, most: Ints) -> Ints:
    """[P] layers of each stage: with the least work of the slowest, then the least sum of squares.

    Args:
        layers: [N] ns of each layer, in the order of the model.
        fixed: [P] ns of what each stage does besides.
        most: [P] layers that each has memory for.

    Raises:
        Unanswerable: the layers do not fit, or are fewer than the stages.
    """
    until = np.concatenate([[0.0], np.cumsum(layers)])
    count = layers.size
    ends = np.arange(count + 1)
    slowest = np.where(ends == 0, 0.0, np.inf)
    squares = slowest.copy()
    begins = np.zeros((fixed.size, count + 1), np.int64)
    for stage, own in enumerate(fixed.tolist()):
        first, last = ends[:, None], ends[None, :]
        fits = (last > first) & (last - first <= most[stage])
        work = np.where(fits, until[None, :] - until[:, None] + own, np.inf)
        worst = np.maximum(slowest[:, None], work)
        total = np.where(np.isfinite(worst), squares[:, None] + work**2, np.inf)
        best = worst.min(axis=0)
        begins[stage] = np.argmin(np.where(worst == best, total, np.inf), axis=0)
        slowest, squares = best, total[begins[stage], ends]
    if not np.isfinite(slowest[count]):
        raise Unanswerable(
            f"{count} layers do not fit on {fixed.size} stages that have memory for "
            f"{', '.join(map(str, np.minimum(most, count).tolist()))} of them"
        )
    cuts = [count]
    for stage in reversed(range(fixed.size)):
        cuts.append(int(begins[stage, cuts[-1]]))
    ends = np.array(cuts[::-1], np.int64)
    return ends[1:] - ends[:-1]


def layer_times(work: Floats, now: Ints, ends_stay: bool = True) -> tuple[Floats, Floats]:
    """What layers take by what places do that hold several, and what the ends do besides: [N, M], [2, M].

    What the first and the last of three or more places take longer than their layers would at the median of
    the others is embedding and loss, and no layer; what they take less stays there, too: the first layer may
    have no gradient of its input.

    Args:
        work: [P, M] of each place and micro-batch.
        now: [P] layers of each place.
        ends_stay: whether there is such work; else layers of the ends are slower.
    """
    each: Floats = work / now[:, None]
    inner = np.median(each[1:-1], axis=0) if len(work) > 2 else each.max(axis=0)
    besides: Floats = (each[[0, -1]] - inner) * now[[0, -1], None]
    if not ends_stay or len(work) < 3:
        besides = np.zeros_like(besides)
    each[[0, -1]] -= besides / now[[0, -1], None]
    found: Floats = np.repeat(each, now, axis=0)
    return found, besides


def regrouped(work: Floats, now: Ints, layers: Ints, ends_stay: bool = True) -> Floats:
    """[P, M] the work of places whose layers are moved between them.

    Args:
        work: [P, M] of each place and micro-batch.
        now: [P] layers of each place.
        layers: [P] layers that each is to have.
        ends_stay: as in `layer_times`.
    """
    if (now == layers).all():
        return work
    each, besides = layer_times(work, now, ends_stay)
    found: Floats = np.add.reduceat(each, np.cumsum(layers) - layers, axis=0)
    found[[0, -1]] = np.maximum(found[[0, -1]] + besides, 0.0)
    return found
