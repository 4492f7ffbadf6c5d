"""A figure of each host against the same figure of the others.

In: figures, where more is better. Out: those that are clearly lower than the others'. A host is compared with
the median of all others; how far off it has to be follows from their median absolute deviation, with a floor:
up to half of the others may be anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

MIN_SLOW = 1.15  # times as fast as it: the others
MIN_SLOW_OF_TWO = 1.5  # where there is only one other
DEVIATIONS = 5.0
MIN_DEVIATION = 0.02  # of a logarithm: a lower deviation is raised to this
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
_SMALLEST = 1e-12

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class PeerFigures:
    """What the others reach.

    Attributes:
        median: of their figures.
        limit: times as low as that, from which on a figure is slow.
    """

    median: float
    limit: float

    def times(self, figure: float) -> float:
        """How many times as fast they typically are, if a figure is clearly lower; else 0."""
        behind = self.median / max(figure, _SMALLEST)
        return behind if behind >= self.limit else 0.0


def peers_of(figures: Collection[float], least: float = MIN_SLOW) -> PeerFigures:
    """What some hosts reach, and what is slow beside it.

    Args:
        figures: theirs, at least one.
    """
    logs = np.log(np.maximum(np.fromiter(figures, float), _SMALLEST))
    middle = float(np.median(logs))
    spread = float(np.median(np.abs(logs - middle))) * MAD_TO_DEVIATION
    least = least if logs.size > 1 else max(least, MIN_SLOW_OF_TWO)
    far = max(math.log(least), DEVIATIONS * max(spread, MIN_DEVIATION))
    return PeerFigures(math.exp(middle), math.exp(far) * (1 - 1e-9))


def slower_than_peers(figures: Mapping[Key, float], least: float = MIN_SLOW) -> dict[Key, float]:
    """How many times as fast the others typically are, of what is clearly slower than them."""
    found = {}
    values = list(figures.values())
    for at, (key, figure) in enumerate(figures.items()):
        others = values[:at] + values[at + 1 :]
        times = peers_of(others, least).times(figure) if others else 0.0
        if times:
            found[key] = times
    return found
