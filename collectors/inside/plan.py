"""Which steps of a job are deep windows: the same on every rank.

Takes announcements that all ranks get, and the steps of one rank as they end. Returns the window that begins
now. Plain computation; `budget` knows what windows cost, and whether another one is paid for.
"""

from __future__ import annotations

from typing import NamedTuple


class Window(NamedTuple):
    """A deep window that all ranks take.

    Attributes:
        number: of the window among those of the job.
        step: steps that have ended when it begins.
        steps: number of its steps; 0 means that no window follows.
        goes_on: whether windows follow it at their usual distance, where that is fixed.
        request: the id of the request for it; empty where it was not requested.
    """

    number: int
    step: int
    steps: int
    goes_on: bool = True
    request: str = ""


class WindowPlan:
    """The windows to come, as one rank knows them."""

    def __init__(self, first: int | None, steps: int, every: int | None) -> None:
        """Plan the first window.

        Args:
            first: steps before it; None where it is announced like the others.
            every: steps from one window to the next; None where each is announced.
        """
        self.number = 0
        self.steps = steps
        self._first = first
        self._every = every
        self._next = None if first is None else Window(0, first, steps)
        self._announced: tuple[Window, ...] = ()  # a rank behind rank 0 may know of two

    @property
    def upcoming(self) -> Window | None:
        """The next window; None for none."""
        announced, following = self._announced[:1], self._next
        if not announced or (following is not None and following.step < announced[0].step):
            return following
        return announced[0]

    def announce(self, window: Window) -> None:
        """Add a window that all ranks take, and those that follow from it."""
        self._announced = (*self._announced, window)

    def take(self, step: int) -> Window | None:
        """Return the window that begins now, or should have before this rank knew of it; None for none."""
        window = self.upcoming
        if window is None or step < window.step:
            return None
        if window in self._announced:
            self._announced = self._announced[1:]
        self.number = window.number + (window.steps > 0)
        self._next = self._following(window)
        return window

    def place(self, step: int, ahead: int, steps: int) -> Window | None:
        """Return the window of `steps` steps that can be announced, or None if another has to begin first."""
        earliest, following = step + ahead, self._next
        if self._announced:
            return None
        if following is None or earliest + steps <= following.step:
            return Window(self.number, earliest, steps)
        if self._every is None or self._every > ahead + steps:
            return None  # there is room after it
        rounds = max(0, -(-(earliest - following.step) // self._every))
        return Window(following.number + rounds, following.step + rounds * self._every, steps)

    def _following(self, window: Window) -> Window | None:
        if self._every is None or self._first is None or not window.goes_on:
            return None
        step = window.step + self._every
        if window.request:  # between two regular windows, whose steps stay the same
            rounds = -(-(window.step + max(window.steps, 1) - self._first) // self._every)
            step = self._first + rounds * self._every
        return Window(self.number, step, self.steps)
