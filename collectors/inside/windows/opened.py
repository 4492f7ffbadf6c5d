"""One deep window, from when Kineto starts to when it stops; on a GPU that is longer than its steps.

In: the ends of steps. Out: the files of the window, and records of when its steps were. Kernels that were
queued before CUPTI was attached have no launch in a trace: on a GPU Kineto starts a step early, and what
belongs to that step is dropped when the trace is converted. A host runs ahead of its GPU: Kineto stops once
that has done the last step's work, or `PATIENCE` steps later.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import captures, records
from .kineto import Recording
from .plan import Window
from .tail import PendingGpuWork

PATIENCE = 10  # steps that are recorded at most for the GPU to do the work of those before


class OpenWindow:
    """A window that is being recorded.

    Attributes:
        window: which.
        thread: that started Kineto: no other can stop it.
        has_whole_step: whether one of its steps has ended.
    """

    def __init__(
        self, options: Mapping[str, Any], folder: Path, own: records.RecordWriter, window: Window, step: int
    ) -> None:
        """Start recording.

        Args:
            folder: of this process's files.
        """
        self.window = window
        self.thread = threading.get_ident()
        self.has_whole_step = False
        self._folder, self._own = folder, own
        own.write(records.OPENED, window.number, time.time_ns(), window.step)
        self._recording = Recording(options, folder / f"trace{window.number:04d}.json")
        self._started_ns = time.time_ns() if step >= window.step else 0
        self._ended_ns = self._ended_after = 0
        self._tail: PendingGpuWork | None = None

    @property
    def has_begun(self) -> bool:
        """Whether its first step has."""
        return self._started_ns > 0

    @property
    def has_ended(self) -> bool:
        """Whether its last step has: what is recorded since is of no use but for the GPU's work."""
        return self._ended_ns > 0

    def end_step(self, step: int) -> bool:
        """Note how many steps have ended. Returns whether nothing more has to be recorded."""
        if not self.has_begun and step >= self.window.step:
            self._started_ns = time.time_ns()
        self.has_whole_step = self.has_whole_step or step > self.window.step
        if not self.has_ended and step >= self.window.step + self.window.steps:
            self._end(step)
        if captures.is_capturing_here():
            return False
        return self.has_ended and (step >= self._ended_after + PATIENCE or self.is_complete())

    def is_complete(self) -> bool:
        """Whether all work of its steps is done, on the GPU too."""
        return self.has_ended and (self._tail is None or self._tail.has_passed())

    def finish(self, longest_s: float) -> None:
        """End the last step now if it has not, and wait this long for the GPU."""
        if not self.has_ended:
            self._end(self.window.step)
        if self._tail is not None:
            self._tail.wait(longest_s)

    def close(self, keep: bool) -> bool:
        """Stop recording.

        Args:
            keep: whether to save the window.

        Returns:
            Whether it is saved: not into a run that was deleted.

        Raises:
            OSError: it cannot be saved, as where the process has given up its rights; Kineto has stopped.
        """
        number, end_ns = self.window.number, self._ended_ns or time.time_ns()
        path: Path | None = None
        try:
            if keep and _is_there(self._folder):
                if self._recording.gpu:
                    seen = self.is_complete() and not captures.is_capturing_here()
                    self._own.write(records.CUT, number, self._started_ns, end_ns, int(seen))
                path = self._folder / f"window{number:04d}.json"
        finally:
            self._recording.stop(path)
        if path is not None:
            self._own.write(records.WINDOW, number, self._started_ns, end_ns, time.time_ns())
        else:
            self._own.write(records.DROPPED, number, time.time_ns())
        return path is not None

    def _end(self, step: int) -> None:
        self._ended_ns, self._ended_after = time.time_ns(), step
        if self._recording.gpu:
            self._tail = PendingGpuWork()


def _is_there(folder: Path) -> bool:
    """Whether a folder exists: where the run was deleted, Kineto would say so on stderr.

    Raises:
        PermissionError: this process may no longer enter it.
    """
    try:
        os.stat(folder / ".")
    except FileNotFoundError:
        return False
    return True
