"""When enough pairs of recordings were made to decide whether a change helps.

In: the ratios of the pairs so far. Out: whether to stop, and why. After each pair Student's interval of the
mean logarithm is looked at, with its error divided by the number of looks there may be, so that all of them
together keep 95% (Bonferroni's bound; group-sequential tests: Jennison and Turnbull, 2000, ch. 2). It has
decided where it excludes "as fast", or where it excludes any effect of 2%. Where the pairs so far say that
more would be needed than there may be, no more are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
EFFECT = math.log1p(0.02)  # an effect of less is none
MIN_PAIRS = 3  # before it is said that too many would be needed: of two, the variation is hardly known
LARGEST_NEED = 10_000


@dataclass(frozen=True)
class Decision:
    """Whether to go on.

    Attributes:
        stop: whether no more pairs shall be made.
        decided: whether the question is answered.
        needed: pairs that would be needed to answer it, by what is known now.
    """

    stop: bool
    decided: bool
    needed: int


def confidence_of(max_pairs: int) -> float:
    """The confidence of the interval at each look.

    Args:
        max_pairs: how many pairs there may be.
    """
    return 1 - (1 - CONFIDENCE) / max(max_pairs - 1, 1)


def half_width(deviation: float, pairs: int, confidence: float) -> float:
    """Half the width of Student's interval of a mean.

    Args:
        pairs: how many there are, two at least.
    """
    from scipy.special import stdtrit

    return float(stdtrit(pairs - 1, (1 + confidence) / 2)) * deviation / math.sqrt(pairs)


def decide(ratios: Sequence[float], max_pairs: int) -> Decision:
    """Decide whether the pairs so far are enough.

    Args:
        max_pairs: how many pairs there may be.
    """
    count, logs = len(ratios), np.log(np.array(ratios))
    if count < 2:
        return Decision(count >= max_pairs, False, max_pairs)
    mean, deviation = abs(float(logs.mean())), float(logs.std(ddof=1))
    confidence = confidence_of(max_pairs)
    enough = max(mean, EFFECT - mean)  # excludes "as fast", or lies within the effect that is none
    if half_width(deviation, count, confidence) < enough:
        return Decision(True, True, count)
    needed = _needed(deviation, enough, confidence, count)
    hopeless = count >= MIN_PAIRS and needed > max_pairs
    return Decision(hopeless or count >= max_pairs, False, needed)


def _needed(deviation: float, enough: float, confidence: float, count: int) -> int:
    """The least number of pairs whose interval is narrow enough, by bisection."""
    low, high = count, LARGEST_NEED
    while low < high:
        middle = (low + high) // 2
        if half_width(deviation, middle, confidence) < enough:
            high = middle
        else:
            low = middle + 1
    return low
