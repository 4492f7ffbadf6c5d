"""From optimizer updates to training steps.

A step ends where the optimizer that updates least often updates: one of many in optimizer-in-backward,
the generator of a GAN, the outer one of nested optimizers. Which one that is shows after each has
updated twice; until then every update is handed on, so that `number_steps` can number the first steps
afterwards. All ranks run the same updates in the same order, so they count alike without talking.

Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple


class Boundary(NamedTuple):
    """The end of one step and, once our own work was done, the start of the next; ns."""

    end_ns: int
    resume_ns: int


class StepCounter:
    """Counts the steps of one process.

    Attributes:
        step: steps ended so far.
    """

    def __init__(self, announce: Callable[[int, int], None]) -> None:
        """Start counting.

        Args:
            announce: told the number of the optimizer that counts from now on, and how many steps
                were counted before its first update.
        """
        self.step = 0
        self._announce = announce
        self._numbers: dict[Hashable, int] = {}
        self._counts: list[int] = []
        self._recent: dict[int, int] = {}  # updates since calibration began; empty once it is over
        self._anchor = -1
        self._base = 0

    def update(self, optimizer: Hashable) -> tuple[int, int] | None:
        """Count one update.

        Returns:
            The optimizer's number and its updates so far; None where they cannot end a step.
        """
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = len(self._counts)
            self._counts.append(0)
            self._recent[number] = 0  # a newcomer: see again which one is rarest
        self._counts[number] += 1
        if self._recent:
            self._calibrate(number)
        elif number != self._anchor:
            return None
        if number == self._anchor:
            self.step = self._base + self._counts[number]
        return number, self._counts[number]

    def _calibrate(self, number: int) -> None:
        # Re-inserted, so that the order of the dict is the order of the latest updates.
        self._recent[number] = self._recent.pop(number, 0) + 1
        if self._recent[number] < 2 or min(self._recent.values()) < 2:
            return
        rarest = min(reversed(self._recent), key=lambda each: self._recent[each])
        if self._anchor not in self._recent:
            self._base = self.step  # the earlier optimizer is done: the newcomer carries on counting
        self._anchor = rarest
        self._recent.clear()
        self._announce(rarest, self._base)


def number_steps(
    updates: Iterable[tuple[int, int, Boundary]], anchors: Iterable[tuple[int, int]]
) -> dict[int, Boundary]:
    """The boundary that ends each step, by number of the step from 0.

    Args:
        updates: what `StepCounter.update` returned, with when it happened, in order.
        anchors: what was announced, in order; none in a job too short to tell.
    """
    by_optimizer: dict[int, dict[int, Boundary]] = {}
    for optimizer, count, boundary in updates:
        by_optimizer.setdefault(optimizer, {})[count] = boundary
    if not by_optimizer:
        return {}
    steps: dict[int, Boundary] = {}
    for optimizer, base in list(anchors) or [(max(by_optimizer), 0)]:
        steps = {step: boundary for step, boundary in steps.items() if step < base}
        steps |= {base + count - 1: boundary for count, boundary in by_optimizer.get(optimizer, {}).items()}
    return dict(sorted(steps.items()))
