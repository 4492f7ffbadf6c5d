"""How long something took so far, however often it began.

In: when an activity begins and ends. Out: its total time.
"""

from __future__ import annotations

import time


class Stopwatch:
    """How long an activity took so far; nested calls are counted once."""

    def __init__(self) -> None:
        self._depth = self._total_ns = self._begun_ns = 0

    def start(self) -> None:
        """Note that the activity begins."""
        self._depth += 1
        if self._depth == 1:
            self._begun_ns = time.time_ns()

    def stop(self) -> int:
        """Note that the activity ends; one that began before the stopwatch existed is ignored.

        Returns:
            How long it took, ns, if that was the outermost; else -1.
        """
        if self._depth != 1:
            self._depth = max(self._depth - 1, 0)
            return -1
        self._depth = 0
        took_ns = time.time_ns() - self._begun_ns
        self._total_ns += took_ns
        return took_ns

    def total_ns(self, now_ns: int) -> int:
        """The total time so far, including an activity that still runs."""
        return self._total_ns + (now_ns - self._begun_ns if self._depth else 0)
