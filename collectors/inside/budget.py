"""What deep windows have cost a job, and whether another one is paid for.

Takes the times of one rank's steps, and of the recorder's own work at the ends of steps and windows. Decides
whether a window may open, and when automatic windows stop and resume. Keeps plain sums without a clock: a
step costs a few operations. `plan` decides which steps are windows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

SETTLED = 10  # steps after a window until its cost is known
WARM_UP = 3  # first steps, whose times do not recur
REMEMBERED = 50  # latest steps; at the first window they become the reference for later steps
MIN_BEFORE = 5  # reference steps, below which nothing is compared
BLOCK = 50  # later steps that are compared at once
MIN_STANDARD_ERRORS = (
    4.5  # standard errors by which a block takes longer: none of a job's hundreds does by chance
)
BLOCKS = 100  # latest blocks, which show how much the job wanders
GUESSED_NS = 250_000_000  # assumed for the first window: 6,000 spans cost 50 ms, with all details 330 ms
MIN_SLOW_BLOCKS = 4  # consecutive blocks that take longer, until windows stop
DEVIATION_PER_MAD = 1.4826  # standard deviation over median distance to the median, of normal values
_COSTS = 3  # latest windows whose cost counts


class Sample(NamedTuple):
    """Number, mean and spread of steps that are compared with others.

    Attributes:
        steps: number of steps.
        squares: sum of their squared differences from the mean, in ns².
    """

    steps: int
    mean_ns: float
    squares: float

    @classmethod
    def of(cls, durations_ns: Sequence[int]) -> Sample:
        """Summarise at least one step."""
        mean_ns = fmean(durations_ns)
        return cls(len(durations_ns), mean_ns, sum((ns - mean_ns) ** 2 for ns in durations_ns))


def longer_ns(since: Sample, before: Sample, wander_ns: float) -> float:
    """Return by how much later steps take longer in the mean; 0 where chance may explain it.

    The standard error is that of the difference of two means, of steps that vary equally (Student's), since a
    few steps do not show how much they vary. Where the job is faster or slower for longer than a block, the
    variation of the means of blocks counts, if it is larger.

    Args:
        wander_ns: standard deviation of the means of blocks.
    """
    variance = (since.squares + before.squares) / (since.steps + before.steps - 2)
    error_ns = math.sqrt(variance * (1 / since.steps + 1 / before.steps))
    difference_ns = since.mean_ns - before.mean_ns
    return difference_ns if difference_ns > MIN_STANDARD_ERRORS * max(error_ns, wander_ns) else 0.0


def spread(means_ns: Sequence[float]) -> float:
    """Return the standard deviation of most of these values, from the median distance to their median.

    A slow spell does not count, whether it covers a few of the values or nearly all.
    """
    middle = median(means_ns)
    return DEVIATION_PER_MAD * median([abs(mean_ns - middle) for mean_ns in means_ns])


class WindowsChange(NamedTuple):
    """A decision to stop automatic windows, or to resume them.

    Attributes:
        stops: whether they stop.
        spent_ns: cost of all windows until now.
        elapsed_ns: the job's time until now.
        longer: share by which steps took longer than before the first window, since the slow-down began or
            while windows were stopped.
    """

    stops: bool
    spent_ns: int
    elapsed_ns: int
    longer: float


class Budget:
    """What windows have cost, from the times of one rank's steps, and what they may cost.

    The recorder's own work at the ends of steps counts, whether there are windows or not. A window costs the
    recorder's time at its two ends, the excess of its steps over others, and that of the step after it, in
    which this rank waits for ranks that are still saving. All of this is by the host's clock: where the end
    of a window waits for everything that a host ahead of its device had enqueued, the cost may be lower.

    A window may also have slowed all later steps: their excess over the steps before the first window is a
    cost, too, while it is more than chance. A job that became slower by itself looks the same. Where few
    steps came before the first window, nothing is compared.

    Attributes:
        least: steps from one window to the next, however cheap they are.
    """

    def __init__(self, share: float, least: int) -> None:
        """Start before the first step.

        Args:
            share: of the job's time that windows may cost.
        """
        self.least = least
        self._share = share
        self._recent: deque[int] = deque(maxlen=REMEMBERED)
        self._costs: deque[int] = deque(maxlen=_COSTS)
        self._after: int | None = SETTLED  # plain steps since the window; None while open, then -1
        self._own_ns = 0
        self._inside: list[int] = []
        self._warm_up = WARM_UP
        self._opened = False  # whether any window was opened
        self._before: Sample | None = None  # the first window: the reference for later steps
        self._block: list[int] = []
        self._means: deque[float] = deque(maxlen=BLOCKS)  # ns, of blocks
        self._spent_ns = self._elapsed_ns = 0
        self._slow = 0  # consecutive blocks that took longer
        self._longer_ns = self._longer_steps = 0.0  # their cost, and their number of steps
        self._stopped = False

    @property
    def step_ns(self) -> int:
        """The mean time of a step outside windows; 0 before the first.

        The mean, since windows may cost a share of the job's time. A host that runs ahead of its device has
        many short steps, and now and then a long one that waits: their median is the time of enqueueing,
        their mean that of the device.
        """
        return int(fmean(self._recent)) if self._recent else 0

    @property
    def median_step_ns(self) -> int:
        """The median: how fast steps may follow each other while a host runs ahead; 0 before the first."""
        return int(median(self._recent)) if self._recent else 0

    @property
    def usual_ns(self) -> int:
        """The median cost of a window, without lasting effects; 0 before the first."""
        return int(median(self._costs)) if self._costs else 0

    @property
    def is_slower(self) -> bool:
        """Whether the latest block of steps took longer than steps before the first window."""
        return self._slow > 0

    def opened(self, own_ns: int) -> None:
        """Record that a window was opened, which took `own_ns`."""
        if not self._opened and len(self._recent) >= MIN_BEFORE:
            self._before = Sample.of(self._recent)
        self._opened = True
        if self._after is not None and self._after < SETTLED:
            self._settle()  # the previous window: its cost will not be known better
        self._elapsed_ns += own_ns
        self._own_ns, self._inside, self._after = own_ns, [], None

    def closed(self, own_ns: int) -> None:
        """Record that the window was closed, which took `own_ns`."""
        self._elapsed_ns += own_ns
        self._own_ns += own_ns
        self._after = -1

    def step(self, duration_ns: int, own_ns: int = 0) -> WindowsChange | None:
        """Count the duration of a step as one inside, after or outside a window.

        Args:
            own_ns: the part of the step that the recorder took at its beginning, except to open or close a
                window.

        Returns:
            Whether windows stop or resume, where this step shows it; else None.
        """
        self._elapsed_ns += duration_ns
        self._spent_ns += own_ns
        if self._after is None or self._after < 0:
            self._inside.append(duration_ns)
            self._after = 0 if self._after == -1 else None
            return None
        if self._warm_up:
            self._warm_up -= 1
        else:
            self._recent.append(duration_ns)
        self._after += 1
        if self._after == SETTLED:
            self._settle()
        if self._before is None:
            return None
        self._block.append(duration_ns)
        return self._judge_block(self._before) if len(self._block) == BLOCK else None

    def affords(self, ahead: int) -> bool:
        """Return whether one more automatic window is paid for `ahead` steps from now."""
        return not self._stopped and self._is_settled and self._is_paid(ahead * self.median_step_ns)

    def wait_ns(self, ahead: int) -> int | None:
        """Return the job's time until a window `ahead` steps from now is paid for, the first one, too, in ns.

        Returns:
            0 where it is paid for; None where windows have stopped.
        """
        if self._stopped:
            return None
        left = SETTLED if self._after is None else max(SETTLED - self._after, 0)
        cost_ns = self._spent_ns + (self.usual_ns or GUESSED_NS)
        unpaid_ns = math.ceil(cost_ns / self._share) - self._elapsed_ns - ahead * self.median_step_ns
        return max(left * self.median_step_ns, unpaid_ns, 0)

    @property
    def _is_settled(self) -> bool:
        return self._after is not None and self._after >= SETTLED

    def _is_paid(self, later_ns: int) -> bool:
        return self._spent_ns + self.usual_ns <= self._share * (self._elapsed_ns + later_ns)

    def _settle(self) -> None:
        """Add the latest window's own cost."""
        if self._inside:
            slower_ns = sum(self._inside) - len(self._inside) * self.step_ns if self._recent else 0
            self._costs.append(self._own_ns + max(slower_ns, 0))
            self._spent_ns += self._costs[-1]

    def _judge_block(self, before: Sample) -> WindowsChange | None:
        """Add the excess of a block of steps to the cost of windows; return whether they stop or resume."""
        block, self._block = Sample.of(self._block), []
        self._means.append(block.mean_ns)
        lasting_ns = longer_ns(block, before, spread(list(self._means)))
        self._slow = self._slow + 1 if lasting_ns else 0
        if lasting_ns:
            self._spent_ns += int(lasting_ns * block.steps)
            self._longer_ns += lasting_ns * block.steps
            self._longer_steps += block.steps
        elif not self._stopped:
            self._longer_ns = self._longer_steps = 0.0
        if not self._is_settled:
            return None
        is_paid = self._is_paid(0)
        never = self._slow >= MIN_SLOW_BLOCKS and lasting_ns > self._share * block.mean_ns
        if is_paid if self._stopped else never and not is_paid:
            self._stopped = not self._stopped
            longer = self._longer_ns / self._longer_steps / before.mean_ns
            if not self._stopped:
                self._longer_ns = self._longer_steps = 0.0
            return WindowsChange(self._stopped, self._spent_ns, self._elapsed_ns, longer)
        return None
