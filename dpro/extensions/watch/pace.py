"""How fast a job has stepped for the last ten minutes, and since when it is slower.

In: the latest steps of one process: ranks that meet step at one pace. Out: a slowdown. What the
watcher remembers is a number of steps, which of a fast job are seconds; here it is a mean of each second or
so, of which neither a host that runs ahead of its device nor a pause changes many. Time in deep windows is
left out.
"""

from __future__ import annotations

from collections import deque

import polars as pl

from dpro.detect.regression import Regression, regression_of
from dpro.extensions.watch.job import MIN_STEPS, ProcessTail

PART_S = 0.5  # that a mean is of, at least; looks come once a second
PARTS = 600
MANY = MIN_STEPS // 2  # steps are a part, however short: more of them may be forgotten
SLOWER = 0.1  # share by which steps take longer: less is not worth a window
CLEAR = 8.0  # deviations of a part by which levels differ that wander too much to be compared by ranks


class Pace:
    """What the steps of a process take, part by part."""

    def __init__(self) -> None:
        """No step is known."""
        self._parts: deque[tuple[int, float, int, int]] = deque(maxlen=PARTS)
        self._last = -1

    def read(self, tail: ProcessTail) -> None:
        """Add a part, once there are steps enough for one."""
        new = tail.steps[tail.steps[:, 0] > self._last]
        if not len(new):
            return
        begin_ns, end_ns = int(new[0, 1]), int(new[-1, 1] + new[-1, 2])
        if end_ns - begin_ns < PART_S * 1e9 and len(new) < MANY:
            return
        self._last = int(new[-1, 0])
        if not any(begin < end_ns and end > begin_ns for _, begin, end in tail.windows):
            self._parts.append((int(new[0, 0]), (end_ns - begin_ns) / len(new), begin_ns, end_ns))

    @property
    def step_ns(self) -> int:
        """What a step of the latest part takes; 0 before the first."""
        return round(self._parts[-1][1]) if self._parts else 0

    def slowdown(self) -> Regression | None:
        """The change since which steps take longer; None where they do not, or did so before ten minutes."""
        columns = ["step", "duration_ns", "begin_ns", "end_ns"]
        parts = pl.DataFrame(list(self._parts), schema=columns, orient="row")
        return regression_of(parts, SLOWER, CLEAR)


def has_window_since(tail: ProcessTail, since_ns: int) -> bool:
    """Whether a deep window of a process ended after a moment of its host's clock, or is open."""
    return any(end_ns >= since_ns for _, _, end_ns in tail.windows)
