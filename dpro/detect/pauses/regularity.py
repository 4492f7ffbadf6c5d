"""Whether something that happens in some steps does so regularly, and in which words.

In: the numbers of the steps it happens in, and of all that were seen. Out: a period, if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dpro.arrays import Ints
from dpro.words import few

MIN_TIMES = 3  # two are always a distance apart
REGULAR = 0.8  # of the times have to be a period apart, and of the steps that are due have to have it
ABOUT = 0.15  # of the typical distance, by which distances differ where it comes about as often
SHOWN = 4  # steps that are named


@dataclass(frozen=True)
class Recurrence:
    """When something happens.

    Attributes:
        steps: [N] in which steps.
        period: steps from one to the next; 0 where it is not regular.
        exact: whether it is just that, not about.
    """

    steps: Ints
    period: int
    exact: bool

    def in_words(self) -> str:
        """`in every 10th step`, `in about every 40th step`, `now and then`."""
        if not self.period:
            return "in one step" if self.steps.size == 1 else "now and then"
        return f"in {'' if self.exact else 'about '}every {ordinal(self.period)} step"

    def named(self) -> str:
        """The first of the steps: `steps 10, 20, 30, 40 …`."""
        return f"step{'s' if self.steps.size > 1 else ''} {few(self.steps.tolist(), SHOWN)}"


def recurrence_of(steps: Ints, seen: Ints) -> Recurrence:
    """How regularly something happens.

    Args:
        steps: [N] int64, the steps in which it does, ascending.
        seen: [T] int64, all steps that would have shown it.
    """
    distances = np.diff(steps)
    if steps.size < MIN_TIMES:
        return Recurrence(steps, 0, False)
    for period in _candidates(distances):
        if _in_step(steps, seen, period):
            return Recurrence(steps, int(period), True)
    middle = float(np.median(distances))
    spread = float(np.quantile(np.abs(distances - middle), REGULAR))
    if middle >= 2 and steps.size > MIN_TIMES and spread <= ABOUT * middle:
        return Recurrence(steps, round(middle), False)
    return Recurrence(steps, 0, False)


def _candidates(distances: Ints) -> Ints:
    """Distances that occur, the most frequent first, then what all are multiples of: some were not seen."""
    values, counts = np.unique(distances, return_counts=True)
    ordered = np.append(values[np.lexsort((values, -counts))], np.gcd.reduce(distances))
    return np.asarray(ordered[ordered > 1])


def _in_step(steps: Ints, seen: Ints, period: int) -> bool:
    """Whether nearly all times are whole periods apart, and nearly all steps that are due have it."""
    phases, counts = np.unique(steps % period, return_counts=True)
    phase = phases[counts.argmax()]
    within = seen[(seen >= steps[0]) & (seen <= steps[-1])]
    due = within[within % period == phase]
    return bool(counts.max() >= REGULAR * steps.size and counts.max() >= REGULAR * due.size)


def ordinal(number: int) -> str:
    """`1st`, `2nd`, `40th`."""
    suffix = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"
