"""At which ends of steps clocks are read, so that the recorder's own time stays within half a percent.

Takes how long a step took, and what the recorder took at its end. Decides whether the clocks of the process
and events of its device are read there. They are read at the end of a step that is long enough to pay for it,
and of every step while the host is ahead of its device, since a host that will wait has time. Of other steps
two ends in a row are read, and the next two `APART` steps later: one step is known by itself, and those
between by their sum. `APART` is a prime: a regular event of the job is then neither always met nor never.
Steps of less than a millisecond have their clocks read more rarely still.
"""

from __future__ import annotations

from statistics import median

SHARE = 0.004  # of a step; about a fifth of the recorder's time is not measured
APART, FARTHEST = 7, 31  # steps; a tenth of those on a device are timed, without which none of them counts
MIN_APART_NS = 5_000_000  # from two ends that are read to the next, unless that is more than `FARTHEST` steps
FIRST = 9  # ends of steps whose median sets `paying_ns` at first
_NUDGE = 1.05


class Sampling:
    """When clocks are read in one process; every step reads its attributes, and calls nothing.

    Attributes:
        left: ends of steps until the next that are read however long steps are.
        paying_ns: the shortest step that pays for reading them.
        ahead: ends of steps for which the host still counts as ahead of its device.
    """

    def __init__(self) -> None:
        self.left = 2
        self.paying_ns = 0.0
        self.ahead = 0
        self._first: list[int] = []

    def see(self, is_ahead: bool) -> None:
        """Record whether the host is ahead of its device: one that was ahead soon is again."""
        self.ahead = FARTHEST if is_ahead else max(self.ahead - 1, 0)

    def took(self, own_ns: int, step_ns: float) -> None:
        """Record the recorder's time where clocks were read, at the end of a step of this length.

        The median counts, since on a busy machine some times are long: first that of `FIRST` ends, which are
        all read, then an estimate that follows later times in small steps.
        """
        if self.left <= 0:
            self.left = min(max(APART, int(MIN_APART_NS / max(step_ns, 1.0))), FARTHEST)
        if self.paying_ns:
            self.paying_ns *= _NUDGE if own_ns > SHARE * self.paying_ns else 1 / _NUDGE
            return
        self._first.append(own_ns)
        if len(self._first) == FIRST:
            self.paying_ns = median(self._first) / SHARE
