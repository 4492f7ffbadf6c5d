"""Which steps the deep windows of a job are: the same on every rank, and far enough apart for their cost.

In: announcements that all ranks get, and steps as they end. Out: the window that begins now; where the next
one can be; how many steps apart windows have to be. Plain computation, which knows neither torch nor files.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import fmean, median
from typing import NamedTuple

SETTLED = 10  # steps after a window until its cost is known
WARM_UP = 3  # steps, the first: what they take does not come again
_REMEMBERED = 50  # steps
_COSTS = 3  # windows


class Window(NamedTuple):
    """A deep window that all ranks take.

    Attributes:
        number: counts the windows of the job.
        step: it begins when this many steps have ended.
        steps: how many steps it has; none means that no window follows.
        goes_on: whether windows follow it at their usual distance, where that is fixed.
        request: the id of the request for it, empty where it was not requested.
    """

    number: int
    step: int
    steps: int
    goes_on: bool = True
    request: str = ""


class WindowPlan:
    """The windows to come, as one rank knows them."""

    def __init__(self, first: int, steps: int, every: int | None) -> None:
        """Plan the first window.

        Args:
            every: steps from one to the next; None where each is announced.
        """
        self.number = 0
        self.steps = steps
        self._first = first
        self._every = every
        self._next: Window | None = Window(0, first, steps)
        self._announced: tuple[Window, ...] = ()  # a rank behind rank 0 may know of two

    @property
    def upcoming(self) -> Window | None:
        """What comes next."""
        announced, following = self._announced[:1], self._next
        if not announced or (following is not None and following.step < announced[0].step):
            return following
        return announced[0]

    def announce(self, window: Window) -> None:
        """All ranks take this window, and from then on what follows from it."""
        self._announced = (*self._announced, window)

    def take(self, step: int) -> Window | None:
        """What begins now, or should have at an earlier step, of which this rank did not know."""
        window = self.upcoming
        if window is None or step < window.step:
            return None
        if window in self._announced:
            self._announced = self._announced[1:]
        self.number = window.number + (window.steps > 0)
        self._next = self._following(window)
        return window

    def place(self, step: int, ahead: int, steps: int) -> Window | None:
        """Where a window can be announced.

        Returns:
            The window, with its number; None where another one has to begin first.
        """
        earliest, following = step + ahead, self._next
        if self._announced:
            return None
        if following is None or earliest + steps <= following.step:
            return Window(self.number, earliest, steps)
        if self._every is None or self._every > ahead + steps:
            return None  # there is room behind it
        rounds = max(0, -(-(earliest - following.step) // self._every))
        return Window(following.number + rounds, following.step + rounds * self._every, steps)

    def _following(self, window: Window) -> Window | None:
        if self._every is None or not window.goes_on:
            return None
        step = window.step + self._every
        if window.request:  # between two regular ones: their steps stay what they are
            rounds = -(-(window.step + max(window.steps, 1) - self._first) // self._every)
            step = self._first + rounds * self._every
        return Window(self.number, step, self.steps)


class Budget:
    """What windows cost, from the times of one rank's steps.

    The cost of a window is the recorder's own time at its two ends, by how much its steps took longer than
    others, and by how much the step after it did: then this rank waits for ranks that are still saving.
    That is by the host's clock: where the end of a window waits for all that a host ahead of its device had
    enqueued, the cost is at most this.
    """

    def __init__(self, share: float, least: int) -> None:
        """Nothing is known yet.

        Args:
            share: of the job's time that windows may cost.
            least: steps from one window to the next, however cheap they are.
        """
        self._share = share
        self._least = least
        self._plain: deque[int] = deque(maxlen=_REMEMBERED)
        self._costs: deque[int] = deque(maxlen=_COSTS)
        self._after: int | None = SETTLED  # plain steps since the window; None where its cost is known
        self._own_ns = 0
        self._inside: list[int] = []
        self._warm_up = WARM_UP

    @property
    def step_ns(self) -> int:
        """How long a step takes outside of windows; 0 where none was seen.

        It is the mean, since windows may cost a share of the job's time. A host that runs ahead of its device
        has many short steps, and now and then a long one that waits: the median would be the time of
        enqueueing, and the mean is that of the device.
        """
        return int(fmean(self._plain)) if self._plain else 0

    @property
    def hurried_ns(self) -> int:
        """The median: how fast steps may follow each other while a host runs ahead; 0 where none was seen."""
        return int(median(self._plain)) if self._plain else 0

    def opened(self, own_ns: int) -> None:
        """A window was opened, which took this long."""
        self._own_ns, self._inside, self._after = own_ns, [], None

    def closed(self, own_ns: int) -> None:
        """It was closed, which took this long."""
        self._own_ns += own_ns
        self._after = -1

    def step(self, duration_ns: int) -> None:
        """Count the duration of a step as one inside, after or outside a window."""
        if self._after is None or self._after < 0:
            self._inside.append(duration_ns)
            self._after = 0 if self._after == -1 else None
            return
        if self._warm_up:
            self._warm_up -= 1
        else:
            self._plain.append(duration_ns)
        self._after += 1
        if self._after == SETTLED and self._inside:
            slower_ns = sum(self._inside) - len(self._inside) * self.step_ns
            self._costs.append(self._own_ns + max(slower_ns, 0))

    def period(self) -> int | None:
        """Steps from the latest window to the next; None where the cost of windows is not known yet."""
        if self._after is None or self._after < SETTLED or not self.step_ns:
            return None
        cost_ns = median(self._costs) if self._costs else 0
        return max(self._least, math.ceil(cost_ns / (self._share * self.step_ns)))
