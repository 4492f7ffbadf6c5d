"""From optimizer updates to training steps.

A step ends where the optimizer that updates least often updates: one of many in optimizer-in-backward, the
generator of a GAN, the outer one of nested optimizers. Which one that is, the *anchor*, shows after each has
updated twice; until then every update is passed on, so that `number_steps` can number the first steps
afterwards. The anchor is looked for again when an optimizer joins, unless it is the only one left, and when
the anchor falls silent. Optimizers with next to no elements, compared with the largest, end no steps: such
an optimizer may exist on one rank alone. All ranks run the same updates in the same order, so they count the
same steps without communication.

Anything else that ends steps is treated as an optimizer: one that outweighs all others where the script names
its steps, and one of weight 0 where only model calls can be counted.

Runs inside the job, where only the standard library may be assumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

SMALL = 0.01  # of the heaviest weight: a lighter optimizer ends no steps
SEEN_ONCE = 64  # updates of another after which an optimizer that updated once is not waited for
EARLY = 16  # an optimizer that joins before this step counts from the beginning: the first guess was wrong
REPEATS = 64  # updates with apparently the same gradients, after which they count as new
PATIENCE = 16  # updates of others that the anchor may miss, beyond four times what it used to


class StepSignal:
    """A signal other than an optimizer that ends steps, treated as one.

    Attributes:
        source: where the steps come from, an index of `SOURCES`.
        weight: compared with the number of elements that optimizers update.
    """

    def __init__(self, source: int, weight: float) -> None:
        self.source, self.weight = source, weight


SOURCES = ("optimizer", "named", "model call", "engine iteration")
NAMED = StepSignal(1, float("inf"))
MODEL_CALL = StepSignal(2, 0.0)
ITERATION = StepSignal(3, 1.0)  # ends steps rather than the model calls in it, and where nothing trains


class Boundary(NamedTuple):
    """The end of one step and, once our own work was done, the start of the next; in ns."""

    end_ns: int
    resume_ns: int


class StepCounter:
    """The counter of one process's steps."""

    def __init__(self, weigh: Callable[[Any], float], announce: Callable[[int, int, int], None]) -> None:
        """Start counting.

        Args:
            weigh: returns the weight of an optimizer; called once for each, in the order of their numbers.
            announce: gets the number of the optimizer that counts from now on, what to add to its count of
                updates to get the steps ended, and the first step that it numbers.
        """
        self.step = 0
        self._weigh = weigh
        self._announce = announce
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}  # by id, which may come back
        self._weights: list[float] = []
        self._least = 0.0  # the weight an optimizer must have
        self._counts: list[int] = []
        self._recent: dict[int, int] = {}  # updates since calibration began; empty once it is over
        self._joined: dict[int, tuple[int, int]] = {}  # step, and own updates before, when it joined
        self._used: dict[int, tuple[object, int]] = {}  # latest gradients, and how often they were repeated
        self._anchor = -1
        self._base = 0
        self._missed = 0  # updates of others since the anchor's latest
        self._patience = 0

    def update(self, optimizer: Any, gradients: object = None) -> tuple[int, int] | None:
        """Count one update.

        Args:
            gradients: a value that differs once there are new gradients; None if that is not known. Further
                updates with the same value belong to the same step: of one parameter group after the other.

        Returns:
            The optimizer's number and its updates so far; None where they cannot end a step.
        """
        numbered = self._numbers.get(id(optimizer))
        number = self._meet(optimizer) if numbered is None or numbered[0]() is not optimizer else numbered[1]
        if self._weights[number] < self._least:
            return None
        if gradients is not None:
            used, times = self._used.get(number, (None, 0))
            times = times + 1 if gradients == used else 0
            self._used[number] = gradients, times
            if 0 < times <= REPEATS:  # if they stay the same for longer, gradients come from elsewhere
                return None
        self._counts[number] += 1
        if self._recent:
            self._calibrate(number)
        elif number != self._anchor:
            self._missed += 1
            if self._missed <= self._patience:
                return None
            self._calibrate(number)
        if number == self._anchor:
            self._missed = 0
            self.step = self._base + self._counts[number]
        return number, self._counts[number]

    def _meet(self, optimizer: Any) -> int:
        """Number a new optimizer, and look for the anchor again."""
        number = len(self._counts)
        self._numbers[id(optimizer)] = weakref.ref(optimizer), number
        self._counts.append(0)
        self._weights.append(self._weigh(optimizer))
        alive = [other for reference, other in self._numbers.values() if reference() is not None]
        self._least = SMALL * max(self._weights[other] for other in alive)
        if self._weights[number] >= self._least:
            self._recent = {n: c for n, c in self._recent.items() if self._weights[n] >= self._least}
            self._recent[number] = 0
            self._joined[number] = self.step, 0
        return number

    def _calibrate(self, number: int) -> None:
        if number not in self._recent:
            self._joined[number] = self.step, self._counts[number] - 1
        # Re-inserted, so that the order of the dict is the order of the latest updates.
        self._recent[number] = self._recent.pop(number, 0) + 1
        if self._recent[number] >= SEEN_ONCE:
            self._recent = {n: c for n, c in self._recent.items() if c > 1}
        replaced = self._anchor >= 0 and self._alive() == {number}
        if min(self._recent.values()) < 2 and not replaced:
            return
        rarest = min(reversed(self._recent), key=lambda other: self._recent[other])
        if rarest != self._anchor:
            self._hand_over(rarest)
        self._patience = PATIENCE + 4 * sum(self._recent.values()) // self._recent[rarest]
        self._recent.clear()
        self._joined.clear()

    def _alive(self) -> set[int]:
        """Return the optimizers that may still end steps."""
        alive = {number for reference, number in self._numbers.values() if reference() is not None}
        return {number for number in alive if self._weights[number] >= self._least}

    def _hand_over(self, rarest: int) -> None:
        """Let another optimizer count; its steps continue those of the previous one."""
        first, before = self._joined[rarest]
        beside = self._anchor in self._recent  # the previous one goes on, and has counted meanwhile
        if first < EARLY and (beside or self._weights[self._anchor] < self._least):
            first, before = 0, 0
        elif beside:
            first, before = self.step, self._counts[rarest] - 1
        self._anchor, self._base = rarest, first - before
        self._announce(rarest, self._base, first)


def number_steps(
    updates: Iterable[tuple[int, int, Boundary]], anchors: Iterable[tuple[int, int, int]]
) -> dict[int, tuple[int, Boundary]]:
    """Return the optimizer and the boundary that end each step, by number of the step from 0.

    Args:
        updates: results of `StepCounter.update`, with their times, in order.
        anchors: the announcements, in order; none in a job too short for one.
    """
    by_optimizer: dict[int, dict[int, Boundary]] = {}
    for optimizer, count, boundary in updates:
        by_optimizer.setdefault(optimizer, {})[count] = boundary
    if not by_optimizer:
        return {}
    steps: dict[int, tuple[int, Boundary]] = {}
    for optimizer, base, first in list(anchors) or [(max(by_optimizer), 0, 0)]:
        steps = {step: end for step, end in steps.items() if step < first}
        for count, boundary in by_optimizer.get(optimizer, {}).items():
            if base + count > first:
                steps[base + count - 1] = optimizer, boundary
    return dict(sorted(steps.items()))
