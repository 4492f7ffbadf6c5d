"""Pace of a job over the last ten minutes, and since when it is slower.

Takes the latest steps of one process, since ranks that meet step at one pace; returns a slowdown. The watcher
keeps a number of steps, which in a fast job are seconds; here it keeps the mean of each second or so, which a
host that runs ahead of its device, or a pause, distorts only briefly. Time in deep windows is left out.
"""

from __future__ import annotations

from collections import deque

import polars as pl

from dpro.detect.regression import Regression, regression_of
from dpro.extensions.watch.job import MIN_STEPS, ProcessTail

PART_S = 0.5  # least duration of a part, over which a mean is taken; looks come once a second
PARTS = 600
MANY = MIN_STEPS // 2  # this many steps are a part, however short, before the watcher drops them
SLOWER = 0.1  # least share by which steps are slower: less is not worth a window
ANOTHER = 0.03  # from which on windows before and after would hide in each other what slowed the steps
CLEAR = 8.0  # deviations of a part between levels that vary too much for a comparison by ranks


class Pace:
    """Mean step times of a process, part by part."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, float, int, int]] = deque(maxlen=PARTS)
        self._last = -1

    def read(self, tail: ProcessTail) -> None:
        """Add a part once there are enough steps for one."""
        new = tail.steps[tail.steps[:, 0] > self._last]
        if not len(new):
            return
        begin_ns, end_ns = int(new[0, 1]), int(new[-1, 1] + new[-1, 2])
        if end_ns - begin_ns < PART_S * 1e9 and len(new) < MANY:
            return
        self._last = int(new[-1, 0])
        if not any(begin < end_ns and end > begin_ns for _, begin, end in tail.windows):
            self._parts.append((int(new[0, 0]), (end_ns - begin_ns) / len(new), begin_ns, end_ns))

    def slowdown(self, least: float = SLOWER) -> Regression | None:
        """Return the change since which steps are slower; None if there is none in the last ten minutes.

        Args:
            least: share by which they are slower.
        """
        columns = ["step", "duration_ns", "begin_ns", "end_ns"]
        parts = pl.DataFrame(list(self._parts), schema=columns, orient="row")
        return regression_of(parts, least, CLEAR)


def has_window_since(tail: ProcessTail, since_ns: int) -> bool:
    """Return whether a deep window of a process is open, or ended after a time on its host's clock."""
    return any(end_ns >= since_ns for _, _, end_ns in tail.windows)
