"""Whether a difference between steps is large, persistent and beyond chance.

In: a gain per step, and the steps without it. Out: whether it counts, and how sure that is. Detectors that
replay a changed graph share these bars.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpro.arrays import Bools, Ints

Times = NDArray[np.int64] | NDArray[np.float64]

# What a finding must cost, as a share of the step.
MIN_SHARE = 0.03  # where the gain alone is the evidence: differences of this size are everywhere
MIN_COST = 0.02  # where own times of many steps, or workloads, show that something is slow
MIN_COST_OF_SLOW = 0.01  # where ranks or transfers are far slower than others, whatever that costs
LATEST_STEPS = (10, 20, 40)  # numbers of latest steps that are tested: it may have begun while the job ran
# A gain must reach MIN_SHARE in this share of the steps, and its mean this many of its standard deviations:
# of two healthy ranks on busy cores one is always a little slower, but not the same in every step.
PERSISTENT = 0.8
EFFECT_SIZE = 1.5
MIN_STEPS = 2  # one step cannot show that anything persists
MIN_LATEST = 4  # steps, of those that a fault that began while the job ran may show in
# Student's t, 99.9%, for 1, 2, … degrees of freedom: the spread of few steps is itself hardly known, and
# every rank is one more chance to be wrong.
T_999 = (318.3, 22.33, 10.21, 7.17, 5.89, 5.21, 4.79, 4.50, 4.30)


def clear_gain(saved: Times, base: Times) -> bool:
    """Whether a gain per step is large enough, there in nearly every step, and beyond chance.

    Args:
        saved: [T] ns, the gain per step.
        base: [T] ns, the steps without it.
    """
    return bool(clear_gains(saved[:, None], base)[0])


def clear_gains(saved: Times, base: Times) -> Bools:
    """[R] `clear_gain` of each of several gains.

    Beyond chance by Student's t test of one sample, one-sided at 99.9%, and by its effect size (Cohen's d).

    Args:
        saved: [T, R] ns, the gains per step.
        base: [T] ns, the steps without them.
    """
    freedom = min(base.size - 1, len(T_999))
    needed = max(EFFECT_SIZE, T_999[freedom - 1] / np.sqrt(base.size)) * saved.std(axis=0, ddof=1)
    persistent = (saved >= MIN_SHARE * base[:, None]).mean(axis=0)
    clear: Bools = (saved.mean(axis=0) >= np.maximum(MIN_SHARE * base.mean(), needed)) & (
        persistent >= PERSISTENT
    )
    return clear


def confidence(saved: Times, base: Times) -> float:
    """How steady a gain per step is: 1 - its standard error relative to its mean, times its persistence.

    Args:
        saved: [T] ns, the gain per step, above 0 on average.
        base: [T] ns, the steps without it.
    """
    error = float(saved.std(ddof=1)) / np.sqrt(saved.size) / float(saved.mean())
    persistent = float((saved >= MIN_SHARE * base).mean())
    return round(float(np.clip(1 - error, 0, 1)) * persistent, 3)


def first_of_latest(steps: Ints) -> list[int]:
    """The first of all steps, of the latest half, the latest quarter, …: a fault may be recent.

    Args:
        steps: [T] in order.
    """
    sizes = [steps.size]
    while sizes[-1] // 2 >= MIN_LATEST:
        sizes.append(sizes[-1] // 2)
    return [int(steps[-size]) for size in sizes]
